"""What an `Agent` answers by itself: the handshake, new sessions, modes and options, who it is."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    Agent,
    AgentContext,
    Capabilities,
    Durability,
    DurableAgent,
    InvalidParams,
    MethodNotFound,
    RequestError,
    Turn,
    extension,
)
from antiphon.journal import MemoryJournal, SqliteJournal
from antiphon.schema import UNSET, v1, v1_unstable
from tests.sessions.pairs import joined

if TYPE_CHECKING:
    from pathlib import Path


class Echo(Agent):
    async def prompt(self, turn: Turn) -> str:
        await turn.say(turn.text)
        return "end_turn"


# ------------------------------------------------------------------ who it is


@pytest.mark.covers("R1-24")
async def test_name_and_version_are_the_class_s_or_what_it_says() -> None:
    class Plain(Echo):
        pass

    class Pair(Echo):
        info = ("pair", "2.1")

    class Full(Echo):
        info = v1.Implementation(name="full", version="3", title="Full!")

    for agent, expected in (
        (Plain(), v1.Implementation(name="Plain", version="0")),
        (Pair(), v1.Implementation(name="pair", version="2.1")),
        (Full(), v1.Implementation(name="full", version="3", title="Full!")),
    ):
        async with joined(agent) as (peer, _):
            assert peer.info == expected


async def test_an_initialize_of_one_s_own_may_add_to_what_is_answered() -> None:
    class Mine(Echo):
        capabilities = Capabilities(image=True)

        async def initialize(
            self, params: v1_unstable.InitializeRequest, ctx: AgentContext
        ) -> v1.InitializeResponse:
            response = await super().initialize(params, ctx)
            response.meta = {"example.com": {"seen": params.protocol_version}}
            return response

    async with joined(Mine()) as (peer, _):
        assert peer.initialize_result.meta == {"example.com": {"seen": 1}}
        assert peer.offers("promptCapabilities.image")


async def test_what_initialize_answers_decides_what_is_served() -> None:
    class Modest(Echo):
        async def initialize(
            self, params: v1_unstable.InitializeRequest, ctx: AgentContext
        ) -> v1.InitializeResponse:
            return v1.InitializeResponse(protocol_version=1)

        async def list_sessions(
            self, params: v1_unstable.ListSessionsRequest, ctx: AgentContext
        ) -> v1.ListSessionsResponse:
            raise AssertionError

    async with joined(Modest()) as (peer, _):
        peer.tree = {"sessionCapabilities": {"list": {}}}  # a client that does not look
        with pytest.raises(MethodNotFound):
            await peer.list_sessions()


# ------------------------------------------------------------------ what it implements


def test_handlers_that_nobody_wrote_are_none() -> None:
    class Some(Echo):
        async def load_session(
            self, params: v1_unstable.LoadSessionRequest, ctx: AgentContext
        ) -> v1.LoadSessionResponse:
            return v1.LoadSessionResponse()

    some = Some()
    assert some.find_handler("load_session") == some.load_session
    assert some.find_handler("new_session") == some.new_session
    assert some.find_handler("initialize") == some.initialize
    for name in ("list_sessions", "authenticate", "logout", "fork_session", "no_such_thing"):
        assert some.find_handler(name) is None


def test_modes_and_options_are_served_if_declared_or_written() -> None:
    class Written(Echo):
        async def set_session_mode(
            self, params: v1_unstable.SetSessionModeRequest, ctx: AgentContext
        ) -> v1.SetSessionModeResponse:
            return v1.SetSessionModeResponse()

    class Declared(Echo):
        capabilities = Capabilities(
            modes=[v1.SessionMode(id="a", name="A")],
            config_options=[v1.SessionConfigBoolean(id="b", name="B", current_value=True)],
        )

    for agent, mode, option in (
        (Echo(), False, False),
        (Written(), True, False),
        (Declared(), True, True),
    ):
        assert (agent.find_handler("set_session_mode") is not None) is mode
        assert (agent.find_handler("set_session_config_option") is not None) is option


async def test_a_method_that_only_an_instance_has_is_no_handler() -> None:
    agent: Any = Echo()

    async def load(params: Any, ctx: Any) -> None:
        raise AssertionError

    agent.load_session = load
    assert not agent.advertised(unstable=False).load_session


def test_extensions_are_found_in_base_classes_too() -> None:
    class Base(Echo):
        @extension("_v/ask")
        async def ask(self, params: Any, ctx: Any) -> Any:
            return None

    class Derived(Base):
        @extension("_v/tell", kind="notification")
        async def tell(self, params: Any, ctx: Any) -> None:
            return None

    assert set(Derived().extensions()) == {("_v/ask", "request"), ("_v/tell", "notification")}
    assert set(Base().extensions()) == {("_v/ask", "request")}


# ------------------------------------------------------------------ sessions by default


@pytest.mark.covers("R1-47")
async def test_new_sessions_have_random_ids_and_the_declared_state() -> None:
    class Declared(Echo):
        capabilities = Capabilities(
            modes=[v1.SessionMode(id="a", name="A"), v1.SessionMode(id="b", name="B")],
            config_options=[
                v1.SessionConfigSelect(
                    id="o",
                    name="O",
                    current_value="1",
                    options=[v1.SessionConfigSelectOption(value="1", name="One")],
                )
            ],
        )

    async with joined(Declared()) as (peer, _):
        sessions = [await peer.new_session(cwd="/") for _ in range(3)]
        assert len({session.session_id for session in sessions}) == 3
        for session in sessions:
            assert session.modes is not None
            assert session.modes.current_mode_id == "a"
            assert session.config_options is not None
            assert session.config_options[0].current_value == "1"
        await sessions[0].set_mode("b")
        with pytest.raises(InvalidParams, match="unknown or unavailable mode"):
            await sessions[0].set_mode("c")
        with pytest.raises(InvalidParams):
            await sessions[0].set_config_option("o", "2")
        assert (await sessions[0].set_config_option("o", "1"))[0].current_value == "1"
    async with joined(Echo()) as (peer, _):
        session = await peer.new_session(cwd="/")
        assert (session.modes, session.config_options) == (None, None)
        with pytest.raises(MethodNotFound):
            await session.set_mode("a")


async def test_initial_states_are_fresh_each_time() -> None:
    class Declared(Echo):
        capabilities = Capabilities(
            modes=[v1.SessionMode(id="a", name="A")],
            config_options=[v1.SessionConfigBoolean(id="b", name="B", current_value=False)],
        )

    agent = Declared()
    modes, options = agent.initial_modes(), agent.initial_config_options()
    assert modes is not None
    modes.current_mode_id = "changed"
    modes.available_modes.clear()
    flag = options[0]
    assert isinstance(flag, v1.SessionConfigBoolean)
    flag.current_value = True
    again = agent.initial_modes()
    assert again is not None
    assert again.current_mode_id == "a"
    assert len(again.available_modes) == 1
    assert agent.initial_config_options()[0].current_value is False
    assert Echo().initial_modes() is None
    assert Echo().initial_config_options() == []


async def test_a_handler_that_opens_sessions_itself_can_use_the_declared_state() -> None:
    class Loading(Echo):
        capabilities = Capabilities(modes=[v1.SessionMode(id="a", name="A")])

        async def load_session(
            self, params: v1_unstable.LoadSessionRequest, ctx: AgentContext
        ) -> v1.LoadSessionResponse:
            await ctx.update(v1.UserMessageChunk(content=v1.TextContent(text="old")))
            return v1.LoadSessionResponse(modes=self.initial_modes() or UNSET)

    async with joined(Loading()) as (peer, _):
        session = await peer.load_session("known before", cwd="/")
        assert session.modes is not None
        await session.set_mode("a")
        update = await anext(session.updates())
        assert (update.kind, update.label) == ("user_message_chunk", "replay")
        assert (await session.prompt("hi")).text == "hi"


async def test_sessions_that_a_handler_opens_have_the_declared_state_unless_it_says_none() -> None:
    class Own(Echo):
        capabilities = Capabilities(
            modes=[v1.SessionMode(id="a", name="A")],
            config_options=[
                v1.SessionConfigSelect(id="o", name="O", current_value="1", options=CHOICES)
            ],
        )

        async def new_session(
            self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
        ) -> v1.NewSessionResponse:
            if params.cwd == "/bare":
                return v1.NewSessionResponse(session_id="bare", modes=None, config_options=None)
            return v1.NewSessionResponse(session_id="mine")

        async def load_session(
            self, params: v1_unstable.LoadSessionRequest, ctx: AgentContext
        ) -> None:
            return None

        async def resume_session(
            self, params: v1_unstable.ResumeSessionRequest, ctx: AgentContext
        ) -> None:
            return None

    async with joined(Own()) as (peer, _):
        for session in (
            await peer.new_session(cwd="/"),
            await peer.load_session("old", cwd="/"),
            await peer.resume_session("older", cwd="/"),
        ):
            assert session.modes is not None
            await session.set_mode("a")
            with pytest.raises(InvalidParams):
                await session.set_mode("b")
            assert session.config_options is not None
            (option,) = await session.set_config_option("o", "2")
            assert option.current_value == "2"
        bare = await peer.new_session(cwd="/bare")
        assert bare.modes is None
        assert bare.config_options is None


CHOICES = [
    v1.SessionConfigSelectOption(value="1", name="One"),
    v1.SessionConfigSelectOption(value="2", name="Two"),
]


# ------------------------------------------------------------------ every stable method


class Everything(Echo):
    """Every stable method an agent can have; notes what it was asked."""

    capabilities = Capabilities(
        auth_methods=[v1.AuthMethodAgent(id="key", name="Key")],
        modes=[v1.SessionMode(id="a", name="A")],
        config_options=[v1.SessionConfigBoolean(id="b", name="B", current_value=False)],
    )

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.cancelled = asyncio.Event()

    async def authenticate(
        self, params: v1_unstable.AuthenticateRequest, ctx: AgentContext
    ) -> v1.AuthenticateResponse:
        self.asked.append(params)
        return v1.AuthenticateResponse()

    async def logout(
        self, params: v1_unstable.LogoutRequest, ctx: AgentContext
    ) -> v1.LogoutResponse:
        self.asked.append(params)
        return v1.LogoutResponse()

    async def load_session(
        self, params: v1_unstable.LoadSessionRequest, ctx: AgentContext
    ) -> v1.LoadSessionResponse:
        self.asked.append(params)
        return v1.LoadSessionResponse()

    async def resume_session(
        self, params: v1_unstable.ResumeSessionRequest, ctx: AgentContext
    ) -> v1.ResumeSessionResponse:
        self.asked.append(params)
        return v1.ResumeSessionResponse()

    async def list_sessions(
        self, params: v1_unstable.ListSessionsRequest, ctx: AgentContext
    ) -> v1.ListSessionsResponse:
        self.asked.append(params)
        if params.cursor == "bad":
            raise InvalidParams({"reason": "unknown cursor"})
        infos = [v1.SessionInfo(session_id="x", cwd="/x", title="X", updated_at="2026-01-01")]
        following = "more" if params.cursor is UNSET else UNSET
        return v1.ListSessionsResponse(
            sessions=infos if params.cwd is UNSET else [], next_cursor=following
        )

    async def close_session(
        self, params: v1_unstable.CloseSessionRequest, ctx: AgentContext
    ) -> v1.CloseSessionResponse:
        self.asked.append(params)
        return v1.CloseSessionResponse()

    async def delete_session(
        self, params: v1_unstable.DeleteSessionRequest, ctx: AgentContext
    ) -> v1.DeleteSessionResponse:
        self.asked.append(params)
        return v1.DeleteSessionResponse()

    async def cancel(self, params: v1_unstable.CancelNotification, ctx: AgentContext) -> None:
        self.asked.append(params)
        self.cancelled.set()

    async def prompt(self, turn: Turn) -> str:
        self.asked.append(turn.params)
        await turn.say("begin")
        if turn.text == "wait":
            await turn.wait_cancelled()
        return "max_tokens"


@pytest.mark.covers("R1-46", "R1-62", "R1-63", "R1-149")
async def test_every_stable_method_arrives_with_what_was_sent_and_its_answer_comes_back() -> None:
    agent = Everything()
    async with joined(agent) as (peer, _):
        await peer.authenticate("key")
        session = await peer.new_session(cwd="/w")
        first = await peer.list_sessions()
        assert [(i.session_id, i.cwd, i.title, i.updated_at) for i in first.sessions] == [
            ("x", "/x", "X", "2026-01-01")
        ]
        assert first.next_cursor == "more"
        assert [info.session_id async for info in peer.iter_sessions()] == ["x", "x"]
        assert (await peer.list_sessions(cwd="/odd", cursor="more")).sessions == []
        with pytest.raises(InvalidParams):
            await peer.list_sessions(cursor="bad")
        loaded = await peer.load_session("l", cwd="/l")
        resumed = await peer.resume_session("r", cwd="/r")
        assert (await loaded.prompt("x")).stop_reason == "max_tokens"
        async with session.prompt("wait") as turn:
            async for update in turn:
                assert update.text == "begin"
                await turn.cancel()
        assert turn.stop_reason == "cancelled"
        await asyncio.wait_for(agent.cancelled.wait(), 5)
        await resumed.close()
        await peer.delete_session("l")
        await peer.logout()
    ids = [getattr(params, "session_id", None) for params in agent.asked]
    kinds = [type(params).__name__ for params in agent.asked]
    assert list(zip(kinds, ids, strict=True)) == [
        ("AuthenticateRequest", None),
        ("ListSessionsRequest", None),
        ("ListSessionsRequest", None),
        ("ListSessionsRequest", None),
        ("ListSessionsRequest", None),
        ("ListSessionsRequest", None),
        ("LoadSessionRequest", "l"),
        ("ResumeSessionRequest", "r"),
        ("PromptRequest", "l"),
        ("PromptRequest", session.session_id),
        ("CancelNotification", session.session_id),
        ("CloseSessionRequest", "r"),
        ("DeleteSessionRequest", "l"),
        ("LogoutRequest", None),
    ]
    assert [params.cwd for params in agent.asked if hasattr(params, "mcp_servers")] == ["/l", "/r"]
    assert [params.cursor for params in agent.asked if hasattr(params, "cursor")] == [
        UNSET,
        UNSET,
        "more",
        "more",
        "bad",
    ]


async def test_usage_of_a_turn_reaches_the_client_without_unstable() -> None:
    class Counting(Echo):
        async def prompt(self, turn: Turn) -> Any:
            await turn.say("x")
            usage = v1_unstable.Usage(total_tokens=3, input_tokens=1, output_tokens=2)
            return v1_unstable.PromptResponse(stop_reason="end_turn", usage=usage)

    async with joined(Counting()) as (peer, _):
        session = await peer.new_session(cwd="/")
        outcome = await session.prompt("x")
        assert outcome.usage is not None
        assert outcome.usage.output_tokens == 2


async def test_a_handler_s_error_answers_with_exactly_its_code_message_and_data() -> None:
    class Failing(Echo):
        async def new_session(
            self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
        ) -> v1.NewSessionResponse:
            raise RequestError.of(-1234, "out of cheese", {"left": [0, None]})

    async with joined(Failing()) as (peer, _):
        with pytest.raises(RequestError) as failed:
            await peer.new_session(cwd="/")
        assert (failed.value.code, failed.value.message, failed.value.data) == (
            -1234,
            "out of cheese",
            {"left": [0, None]},
        )


# ------------------------------------------------------------------ one whose sessions survive


class Kept(DurableAgent):
    info = ("kept/../agent", "1")

    async def prompt(self, turn: Turn) -> None:
        await turn.say(f"{len([u async for u in turn.session.history()])} so far")


async def test_an_agent_is_made_durable_by_its_base_class(tmp_path: Path) -> None:
    async def told(text: str, session_id: str | None) -> tuple[str, str]:
        """What another process of the agent answers."""
        journal = SqliteJournal(tmp_path / "sessions")
        async with joined(Kept(journal)) as (peer, _):
            if session_id is None:
                session = await peer.new_session(cwd="/work")
            else:
                session = await peer.load_session(session_id, cwd="/work")
            outcome = await session.prompt(text)
        await Durability.of(journal).aclose()
        await journal.aclose()
        return outcome.text, session.session_id

    first, session_id = await told("one", None)
    second, _ = await told("two", session_id)

    assert (first, second) == ("1 so far", "3 so far")


@pytest.mark.skipif(
    sys.platform in {"win32", "darwin"}, reason="that system has a place of its own"
)
def test_a_durable_agent_keeps_its_sessions_in_the_user_s_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    agent = Kept()

    assert isinstance(agent.journal, SqliteJournal)
    assert agent.journal.directory == tmp_path / "antiphon" / "kept_2f.._2fagent"
    assert not list(tmp_path.iterdir())  # nothing is made before it is used


def test_where_a_durable_agent_keeps_its_sessions_can_be_said() -> None:
    journal = MemoryJournal()

    class Said(Kept):
        journal = MemoryJournal()

    assert Kept(journal).journal is journal
    assert Said().journal is Said.journal
    assert Said(journal).journal is journal


def test_steering_is_offered_where_it_is_implemented() -> None:
    class Steered(Echo):
        async def steer(self, turn: Turn, text: str | None) -> None:
            del turn, text

    assert Steered().steers
    assert not Echo().steers


async def test_steering_that_is_not_implemented_is_no_method() -> None:
    with pytest.raises(MethodNotFound):
        await Echo().steer(None, "left")  # type: ignore[arg-type]
