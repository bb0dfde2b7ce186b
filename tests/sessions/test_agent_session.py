"""What an agent may tell about a session, when, and to which client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from antiphon import (
    Agent,
    AgentContext,
    AgentSession,
    Capabilities,
    CapabilityError,
    ConnectionClosed,
    LimitExceeded,
    Limits,
    LocalProtocolError,
    ResourceNotFound,
    Turn,
    TurnOver,
    UnknownUpdate,
)
from antiphon.schema import UNSET, v1, v1_unstable
from antiphon.testing import RawPeer, raw_client

if TYPE_CHECKING:
    from collections.abc import Callable

NEW: dict[str, Any] = {"cwd": "/w", "mcpServers": [], "additionalDirectories": ["/m"]}
TEXT = v1.TextContent(text="x")


class Keeping(Agent):
    """Keeps the sessions that were opened, so that a test can use them from outside any handler."""

    capabilities = Capabilities(modes=[v1.SessionMode(id="a", name="A")])

    def __init__(self) -> None:
        self.sessions: list[AgentSession] = []
        self.act: Callable[[Turn], Any] | None = None

    async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
        response = await super().new_session(params, ctx)

        def keep() -> None:
            self.sessions.append(ctx.session(response.session_id))

        ctx.after_response(keep)
        return response

    async def prompt(self, turn: Turn) -> None:
        assert self.act is not None
        await self.act(turn)


async def opened(agent: Keeping, raw: RawPeer) -> AgentSession:
    await raw.ask("session/new", NEW)
    await raw.round_trip()
    return agent.sessions[-1]


def told(raw: RawPeer) -> list[dict[str, Any]]:
    return [frame["params"]["update"] for frame in raw.sent("session/update")]


async def test_what_is_about_the_session_may_be_told_at_any_time() -> None:
    agent = Keeping()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        hint = v1.UnstructuredCommandInput(hint="what")
        await session.commands([v1.AvailableCommand(name="go", description="d", input=hint)])
        await session.commands([])
        await session.set_mode("a")
        await session.set_config_options([])
        await session.info(title="T", updated_at="2026-01-01T00:00:00Z")
        await session.info(title=None)
        await session.info()
        await session.usage(used=1, size=2)
        await session.usage(used=1, size=2, cost=(0.5, "EUR"))
        await session.usage(used=1, size=2, cost=v1.Cost(amount=1.0, currency="USD"))
        await session.update(UnknownUpdate(b'{"sessionUpdate":"future","x":1}', "unknown"))
        await raw.round_trip()
        commands: dict[str, Any] = {
            "sessionUpdate": "available_commands_update",
            "availableCommands": [],
        }
        usage = {"sessionUpdate": "usage_update", "used": 1, "size": 2}
        assert told(raw) == [
            {
                **commands,
                "availableCommands": [
                    {"name": "go", "description": "d", "input": {"hint": "what"}}
                ],
            },
            commands,
            {"sessionUpdate": "current_mode_update", "currentModeId": "a"},
            {"sessionUpdate": "config_option_update", "configOptions": []},
            {
                "sessionUpdate": "session_info_update",
                "title": "T",
                "updatedAt": "2026-01-01T00:00:00Z",
            },
            {"sessionUpdate": "session_info_update", "title": None},  # null clears, absent keeps
            {"sessionUpdate": "session_info_update"},
            usage,
            {**usage, "cost": {"amount": 0.5, "currency": "EUR"}},
            {**usage, "cost": {"amount": 1.0, "currency": "USD"}},
            {"sessionUpdate": "future", "x": 1},
        ]
        assert {f["params"]["sessionId"] for f in raw.sent("session/update")} == {
            session.session_id
        }


TURN_UPDATES = [
    v1.UserMessageChunk(content=TEXT),
    v1.AgentMessageChunk(content=TEXT),
    v1.AgentThoughtChunk(content=TEXT),
    v1.ToolCall(tool_call_id="t", title="T"),
    v1.ToolCallProgress(tool_call_id="t"),
    v1.ToolCallUpdate(tool_call_id="t"),
    v1.Plan(entries=[]),
    v1_unstable.PlanUpdate(plan=v1_unstable.PlanMarkdown(plan_id="p", content="x")),
    v1_unstable.PlanRemoved(plan_id="p"),
]


@pytest.mark.covers("R1-82")
@pytest.mark.parametrize("update", TURN_UPDATES, ids=lambda u: type(u).__name__)
async def test_what_a_turn_does_is_told_in_a_turn_only(update: Any) -> None:
    agent = Keeping()
    async with raw_client(agent, {"plan": {}}, unstable=True) as raw:
        session = await opened(agent, raw)

        async def act(turn: Turn) -> None:
            await session.update(update)

        with pytest.raises(TurnOver):
            await session.update(update)
        agent.act = act
        params: dict[str, Any] = {"sessionId": session.session_id, "prompt": []}
        assert "result" in await raw.ask("session/prompt", params)
        assert len(told(raw)) == 1
        assert told(raw)[0]["sessionUpdate"] in (
            *("user_message_chunk", "agent_message_chunk", "agent_thought_chunk"),
            *("tool_call", "tool_call_update", "plan", "plan_update", "plan_removed"),
        )
        with pytest.raises(TurnOver):
            await session.update(update)
        assert len(told(raw)) == 1


def sub(path: str) -> dict[str, Any]:
    """A capability tree with one object at the end of a path."""
    tree: dict[str, Any] = {}
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return tree


@pytest.mark.covers("R1-36", "R1-37", "R1-38", "R1-39")
@pytest.mark.parametrize(
    ("update", "gate"),
    [
        (v1.Notice(severity="info", title="T"), "session.notices"),
        (v1.CompactionUpdate(compaction_id="c", status="completed"), "session.compaction"),
        (v1.CompactionSummaryChunk(compaction_id="c", content=TEXT), "session.compaction"),
        (v1_unstable.PlanUpdate(plan=v1_unstable.PlanMarkdown(plan_id="p", content="")), "plan"),
        (v1_unstable.PlanRemoved(plan_id="p"), "plan"),
        (v1_unstable.SubagentUpdate(session_id="child"), "subagents"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_updates_a_client_must_have_asked_for_are_refused_to_any_other(
    update: Any, gate: str
) -> None:
    for offered, is_sent in (({}, False), (sub(gate), True)):
        agent = Keeping()
        async with raw_client(agent, cast("Any", offered), unstable=True) as raw:
            session = await opened(agent, raw)

            refused: list[str] = []

            async def act(turn: Turn, refused: list[str] = refused) -> None:
                raw_update = v1_unstable.SessionNotification(
                    session_id=turn.session_id, update=update
                )
                for sending in (
                    turn.send(update),
                    turn.session.update(update),
                    turn.peer.notify(raw_update),
                ):
                    try:
                        await sending
                    except CapabilityError as error:
                        refused.append(error.capability)

            agent.act = act
            params: dict[str, Any] = {"sessionId": session.session_id, "prompt": []}
            assert "result" in await raw.ask("session/prompt", params)
            assert len(told(raw)) == (3 if is_sent else 0)
            assert refused == ([] if is_sent else [f"clientCapabilities.{gate}"] * 3)


async def test_a_notice_can_be_given_in_words() -> None:
    agent = Keeping()
    async with raw_client(agent, sub("session.notices")) as raw:
        session = await opened(agent, raw)
        await session.notice("Careful", severity="warning", description="why")
        await session.notice("Hello")
        await raw.round_trip()
        assert told(raw) == [
            {
                "sessionUpdate": "notice",
                "severity": "warning",
                "title": "Careful",
                "description": "why",
            },
            {"sessionUpdate": "notice", "severity": "info", "title": "Hello"},
        ]
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        with pytest.raises(CapabilityError):
            await session.notice("Hello")


async def test_what_is_no_update_is_refused() -> None:
    agent = Keeping()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        for value in (TEXT, {"sessionUpdate": "plan"}, None, "text"):
            with pytest.raises(TypeError, match="no session update"):
                await session.update(cast("Any", value))
        await raw.round_trip()
        assert told(raw) == []


async def test_what_was_told_is_remembered() -> None:
    agent = Keeping()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        assert session.modes is not None
        assert session.config_options is None
        option = v1.SessionConfigSelect(id="o", name="O", current_value="1", options=[])
        await session.set_config_options([option])
        assert session.config_options == [option]
        session.modes.available_modes.append(v1.SessionMode(id="b", name="B"))
        await session.set_mode("b")
        assert session.modes.current_mode_id == "b"
        assert session.roots == ("/w", "/m")
        assert repr(session) == f"<AgentSession {session.session_id!r} in '/w'>"


@pytest.mark.covers("R1-101")
async def test_tool_calls_are_named_apart_within_and_between_lives_of_a_session() -> None:
    agent = Keeping()
    ids: list[str] = []
    for _ in range(2):
        async with raw_client(agent) as raw:
            for _ in range(2):
                session = await opened(agent, raw)
                ids += [session.new_tool_call_id() for _ in range(3)]
    assert len(set(ids)) == 12


async def test_a_lost_client_cannot_be_told_anything() -> None:
    agent = Keeping()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
    with pytest.raises(ConnectionClosed):
        await session.info(title="late")
    session.cancel()  # harmless


@pytest.mark.parametrize("how", ["session/close", "session/delete", "a load that fails"])
async def test_a_session_that_is_no_more_cannot_be_told_about(how: str) -> None:
    """Its id may be another session's by then."""
    kept: list[AgentSession] = []

    class Closing(Keeping):
        async def close_session(self, params: Any, ctx: Any) -> None:
            await ctx.session().info(title="about to close")

        delete_session = close_session

        async def load_session(self, params: Any, ctx: Any) -> Any:
            kept.append(ctx.session())
            raise ResourceNotFound

    agent = Closing()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        if how == "a load that fails":
            params = {**NEW, "sessionId": "s"}
            assert "error" in await raw.ask("session/load", {**params, "additionalDirectories": []})
            (session,) = kept
        else:
            assert "result" in await raw.ask(how, {"sessionId": session.session_id})
            assert [update["title"] for update in told(raw)] == ["about to close"]
        raw.frames.clear()
        for telling in (session.info(title="late"), session.commands([])):
            with pytest.raises(LocalProtocolError, match="was closed"):
                await telling
        with pytest.raises(TurnOver):
            await session.update(v1.Plan(entries=[]))
        await raw.round_trip()
        assert told(raw) == []


async def test_an_agent_may_stop_a_turn_itself() -> None:
    """The client is answered as if it had asked for that."""
    agent = Keeping()
    agent.act = Turn.wait_cancelled
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        session.cancel()  # there is none, and the next is not meant
        params: dict[str, Any] = {"sessionId": session.session_id, "prompt": []}
        raw.send(raw.request("p", "session/prompt", params))
        await raw.round_trip()
        session.cancel()
        session.cancel()
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}


async def test_an_update_over_the_frame_limit_is_refused_whole() -> None:
    agent = Keeping()
    async with raw_client(agent, limits=Limits(frame_bytes=2000)) as raw:
        session = await opened(agent, raw)
        with pytest.raises(LimitExceeded, match="frame_bytes"):
            await session.info(title="x" * 3000)
        await session.info(title="short")
        await raw.round_trip()
        assert [update["title"] for update in told(raw)] == ["short"]


async def test_a_session_is_found_by_the_context_of_any_handler() -> None:
    found: list[Any] = []

    class Asking(Keeping):
        async def set_session_mode(self, params: Any, ctx: Any) -> v1.SetSessionModeResponse:
            found.append(ctx.session())
            with pytest.raises(ResourceNotFound):
                ctx.session("nobody")
            assert ctx.roots == ("/w", "/m")
            assert ctx.client_capabilities.terminal is UNSET
            await ctx.update(v1.CurrentModeUpdate(current_mode_id="a"))
            return v1.SetSessionModeResponse()

    agent = Asking()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        params = {"sessionId": session.session_id, "modeId": "a"}
        assert "result" in await raw.ask("session/set_mode", params)
        assert found == [session]
        assert told(raw) == [{"sessionUpdate": "current_mode_update", "currentModeId": "a"}]


async def test_slow_clients_are_waited_for() -> None:
    """What a session tells is held back by the same room as what its turns tell."""
    agent = Keeping()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        raw.transport.pause_reading()
        telling = asyncio.create_task(_tell(session, 200))
        done, _ = await asyncio.wait([telling], timeout=0.05)
        assert not done
        raw.transport.resume_reading()
        await asyncio.wait_for(telling, 5)
        await raw.round_trip()
        assert len(told(raw)) == 200


async def _tell(session: AgentSession, count: int) -> None:
    for number in range(count):
        await session.info(title=f"{number}" + "x" * 1000)


@pytest.mark.parametrize("verb", ["the verb", "an update"])
async def test_what_the_client_was_told_of_modes_and_options_is_kept_by_whichever_verb(
    verb: str,
) -> None:
    modes = v1.SessionModeState(
        current_mode_id="a",
        available_modes=[v1.SessionMode(id="a", name="A"), v1.SessionMode(id="b", name="B")],
    )
    choices = [v1.SessionConfigSelectOption(value=value, name=value) for value in ("x", "y")]
    option = v1.SessionConfigSelect(id="o", name="O", current_value="x", options=choices)

    class Moded(Keeping):
        capabilities = Capabilities(
            modes=[v1.SessionMode(id="a", name="A"), v1.SessionMode(id="b", name="B")],
            config_options=[option],
        )

    agent = Moded()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        assert session.modes == modes
        changed: list[v1_unstable.SessionConfigOption] = [
            msgspec.structs.replace(option, current_value="y")
        ]
        if verb == "the verb":
            await session.set_mode("b")
            await session.set_config_options(changed)
        else:
            await session.update(v1.CurrentModeUpdate(current_mode_id="b"))
            await session.update(v1.ConfigOptionUpdate(config_options=list(changed)))

        assert session.modes is not None
        assert session.modes.current_mode_id == "b"
        assert session.config_options == changed
        assert session.config_options is not changed


async def test_what_could_not_be_told_of_modes_and_options_is_not_kept() -> None:
    class Moded(Keeping):
        capabilities = Capabilities(modes=[v1.SessionMode(id="a", name="A")])

        async def close_session(self, params: Any, ctx: AgentContext) -> v1.CloseSessionResponse:
            return v1.CloseSessionResponse()

    agent = Moded()
    async with raw_client(agent) as raw:
        session = await opened(agent, raw)
        await raw.ask("session/close", {"sessionId": session.session_id})
        with pytest.raises(LocalProtocolError):
            await session.set_mode("b")
        with pytest.raises(LocalProtocolError):
            await session.set_config_options([])

        assert session.modes is not None
        assert session.modes.current_mode_id == "a"
        assert session.config_options is None
