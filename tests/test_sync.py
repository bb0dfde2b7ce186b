"""The client without async: same answers, same errors, and a Ctrl-C that leaves nothing behind."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import antiphon
import antiphon.sync
from antiphon import (
    Agent,
    AgentContext,
    AuthRequired,
    Capabilities,
    CapabilityError,
    Client,
    ClientContext,
    ConnectionClosed,
    InvalidParams,
    Limits,
    LocalProtocolError,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    SilenceTimeout,
    StartError,
    Turn,
    TurnInProgress,
    UnknownUpdate,
    Update,
    content,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.services import Answer, Decision, Elicitation, Files, Permissions, Request
from antiphon.transports import ProcessTransport
from tests.in_process import InProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator


BOUND = 20.0
ECHO = [
    sys.executable,
    "-c",
    textwrap.dedent("""
        import sys
        from antiphon import Agent, serve_stdio
        class Echo(Agent):
            async def prompt(self, turn):
                print("asked", file=sys.stderr, flush=True)
                await turn.say(f"echo: {turn.text}")
        serve_stdio(Echo())
    """),
]


class Script(Agent):
    """Does what the first word of the prompt says."""

    info = ("script", "1")
    capabilities = Capabilities(
        modes=(v1.SessionMode(id="slow", name="Slow"), v1.SessionMode(id="fast", name="Fast")),
        auth_methods=(v1.AuthMethodAgent(id="key", name="Key"),),
    )

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.cancelled = threading.Event()
        self.signed_in = False
        self.told: list[Any] = []
        self.closed: list[str] = []

    async def prompt(self, turn: Turn) -> str | None:
        word, _, rest = turn.text.partition(" ")
        match word:
            case "say":
                for piece in rest.split():
                    await turn.say(piece)
            case "ask":
                answer = await turn.ask_permission(rest or "Do it")
                await turn.say(f"{answer.allowed} {answer.option_id}")
            case "wait" | "ctrl-c":
                await turn.say("waiting")
                self.started.set()
                if word == "ctrl-c":
                    await asyncio.to_thread(self.go.wait, BOUND)
                    interrupt()
                await turn.wait_cancelled()
                self.cancelled.set()
            case "deaf":
                with suppress(asyncio.CancelledError):
                    await asyncio.get_running_loop().create_future()
            case "ctrl-c-twice":
                interrupt()
                await turn.wait_cancelled()
                interrupt()
                await asyncio.get_running_loop().create_future()
            case "fail":
                for piece in ("before", *rest.split()):
                    await turn.say(piece)
                raise InvalidParams(rest)
            case "read":
                await turn.say(await turn.read_text_file(rest))
            case _:
                return "refusal"
        return None

    async def load_session(
        self, params: v1.LoadSessionRequest, ctx: AgentContext
    ) -> v1.LoadSessionResponse:
        for text in ("old", "older"):
            await ctx.update(v1.UserMessageChunk(content=v1.TextContent(text=text)))
        return v1.LoadSessionResponse()

    async def resume_session(
        self, params: v1.ResumeSessionRequest, ctx: AgentContext
    ) -> v1.ResumeSessionResponse:
        return v1.ResumeSessionResponse()

    async def list_sessions(
        self, params: v1.ListSessionsRequest, ctx: AgentContext
    ) -> v1.ListSessionsResponse:
        page = int(params.cursor or 0)
        return v1.ListSessionsResponse(
            sessions=[v1.SessionInfo(session_id=f"s{page}", cwd="/")],
            next_cursor=str(page + 1) if page < 2 else None,
        )

    async def close_session(
        self, params: v1.CloseSessionRequest, ctx: AgentContext
    ) -> v1.CloseSessionResponse:
        self.closed.append(params.session_id)
        return v1.CloseSessionResponse()

    async def delete_session(
        self, params: v1.DeleteSessionRequest, ctx: AgentContext
    ) -> v1.DeleteSessionResponse:
        self.closed.append(f"deleted {params.session_id}")
        return v1.DeleteSessionResponse()

    async def authenticate(
        self, params: v1.AuthenticateRequest, ctx: AgentContext
    ) -> v1.AuthenticateResponse:
        self.signed_in = True
        return v1.AuthenticateResponse()

    async def logout(self, params: v1.LogoutRequest, ctx: AgentContext) -> v1.LogoutResponse:
        if not self.signed_in:
            raise AuthRequired
        self.signed_in = False
        return v1.LogoutResponse()

    @extension("_script/twice")
    async def twice(self, params: Any, ctx: AgentContext) -> Any:
        return {"twice": params["text"] * 2}

    @extension("_script/ctrl-c")
    async def ctrl_c(self, params: Any, ctx: AgentContext) -> Any:
        interrupt()
        await asyncio.get_running_loop().create_future()

    @extension("_script/told", kind="notification")
    async def tell(self, params: Any, ctx: AgentContext) -> None:
        self.told.append(params)


def interrupt() -> None:
    """What Ctrl-C does to a program: SIGINT, handled in the main thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "antiphon sync"]


@contextmanager
def connected(
    agent: Agent | None = None, **options: Any
) -> Generator[tuple[antiphon.sync.AgentPeer, antiphon.sync.Session]]:
    with antiphon.sync.connect(InProcess(agent or Script()), **options) as peer:
        yield peer, peer.new_session(cwd="/")


# ---------------------------------------------------------------------- turns


def test_a_turn_gives_its_updates_in_order_and_then_its_end() -> None:
    with connected() as (_, session):
        turn = session.prompt("say a b c d e")
        assert (turn.ended, turn.stop_reason, turn.usage, turn.response) == (
            False,
            None,
            None,
            None,
        )
        with turn:
            texts = [update.text for update in turn]
            assert list(turn) == []

    assert texts == ["a", "b", "c", "d", "e"]
    assert turn.ended
    assert turn.stop_reason == "end_turn"
    assert turn.response is not None
    assert turn.response.stop_reason == "end_turn"
    assert turn.session is session


def test_a_long_turn_keeps_its_order_and_its_error_comes_last() -> None:
    words = [str(number) for number in range(3000)]
    with connected() as (_, session):
        with session.prompt(f"say {' '.join(words)}") as turn:
            assert [update.text for update in turn] == words
        texts: list[str] = []
        with pytest.raises(InvalidParams), session.prompt(f"fail {' '.join(words)}") as turn:
            while True:
                texts.append(next(turn).text)
    assert texts == ["before", *words]


def test_run_gives_the_whole_turn() -> None:
    with connected() as (_, session):
        outcome = session.prompt(["say a", content.link("file:///x", "x")]).run()
        refused = session.prompt("what?").run()

    assert (outcome.text, outcome.stop_reason) == ("a", "end_turn")
    assert [update.kind for update in outcome.updates] == ["agent_message_chunk"]
    assert (refused.updates, refused.stop_reason) == ([], "refusal")


def test_the_agent_may_be_called_inside_a_turn() -> None:
    with connected() as (agent, session), session.prompt("say a b") as turn:
        for update in turn:
            assert agent.request_extension("_script/twice", {"text": update.text}) == {
                "twice": update.text * 2
            }


def test_leaving_the_block_early_cancels_the_turn() -> None:
    script = Script()
    with connected(script) as (_, session):
        with session.prompt("wait") as turn:
            assert next(turn).text == "waiting"
        assert script.cancelled.is_set()
        assert session.prompt("say on").run().text == "on"


def test_an_exception_in_the_block_cancels_the_turn_and_goes_on() -> None:
    script = Script()
    with connected(script) as (_, session):
        with pytest.raises(ZeroDivisionError), session.prompt("wait"):
            raise ZeroDivisionError
        assert script.cancelled.is_set()


def test_another_thread_may_cancel_a_turn() -> None:
    script = Script()
    with connected(script) as (_, session):

        def cancel() -> None:
            assert script.started.wait(BOUND)
            session.cancel()
            session.cancel()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        outcome = session.prompt("wait").run()
        canceller.join(BOUND)
        session.cancel()

    assert outcome.stop_reason == "cancelled"


def test_a_turn_can_be_cancelled_and_iterated_to_its_end() -> None:
    with connected() as (_, session), session.prompt("wait") as turn:
        for _update in turn:
            turn.cancel()
    turn_after = turn.stop_reason
    assert turn_after == "cancelled"


def test_a_cancelled_turn_that_is_not_answered_ends_at_its_bound() -> None:
    with connected() as (_, session):
        with pytest.raises(RequestTimeout), session.prompt("deaf") as turn:
            turn.cancel(backstop=None)
            session.cancel(backstop=0.05)
            list(turn)
        assert turn.ended


def test_an_agent_that_gives_no_sign_of_life_is_given_up() -> None:
    with connected() as (_, session):
        with pytest.raises(SilenceTimeout) as silent:
            session.prompt("wait", silence=0.1).run()
        assert silent.value.seconds == 0.1
    limits = Limits(silence_timeout=0.1)
    with connected(limits=limits) as (_, session), pytest.raises(SilenceTimeout):
        session.prompt("wait").run()


# ---------------------------------------------------------------------- errors


def test_errors_are_those_of_the_library() -> None:
    with connected() as (agent, session):
        with pytest.raises(InvalidParams, match="no"):
            session.prompt("fail no").run()
        with session.prompt("fail no") as turn:
            assert [next(turn).text, next(turn).text] == ["before", "no"]
            with pytest.raises(InvalidParams):
                next(turn)
        with session.prompt("wait"), pytest.raises(TurnInProgress):
            session.prompt("say a").run()
        with pytest.raises(CapabilityError):
            session.prompt(content.image(b"", "image/png")).run()
        with pytest.raises(RequestError) as caught:
            session.set_mode("none")
        assert caught.value.code == -32602
        with pytest.raises(LocalProtocolError, match="underscore"):
            agent.request_extension("vendor/method")
        with pytest.raises(AuthRequired):
            agent.logout()


def test_timeouts_pass_through() -> None:
    with connected() as (agent, session):
        with pytest.raises(RequestTimeout) as caught:
            session.prompt("wait", timeout=0.01).run()
        assert (caught.value.method, caught.value.seconds) == ("session/prompt", 0.01)
        with pytest.raises(RequestTimeout):
            prompt = v1.PromptRequest(session_id=session.session_id, prompt=[content.text("wait")])
            agent.request(prompt, timeout=0.01)


def test_what_is_not_awaited_is_not_forgotten_by_a_closed_agent() -> None:
    with connected() as (agent, session):
        turn = session.prompt("say a")
        updates = session.updates()
        stop = session.on_update(lambda _update: None)
    assert agent.closed
    for call in (turn.run, agent.list_sessions, session.close, session.updates):
        with pytest.raises(ConnectionClosed, match="closed"):
            call()
    # Ending what has ended is no error.
    stop()
    updates.close()
    agent.close()
    assert "closed" in repr(agent)
    assert agent.info is not None


def test_closing_ends_the_waits_of_other_threads() -> None:
    script = Script()
    agent = antiphon.sync.connect(InProcess(script))
    session = agent.new_session()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            session.prompt("wait").run()
        except ConnectionClosed as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert script.started.wait(BOUND)
    closing = [threading.Thread(target=agent.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    for thread in (*closing, waiting):
        thread.join(BOUND)
        assert not thread.is_alive()

    assert len(caught) == 1
    assert not background_threads()


# ---------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("how", ["run", "iterate", "body"])
def test_ctrl_c_during_a_turn_cancels_it_and_waits_for_its_end(how: str) -> None:
    script = Script()
    script.go.set()
    with connected(script) as (_, session):
        with pytest.raises(KeyboardInterrupt):
            if how == "run":
                session.prompt("ctrl-c").run()
            elif how == "iterate":
                with session.prompt("ctrl-c") as turn:
                    for _update in turn:
                        pass
            else:
                with session.prompt("wait") as turn:
                    next(turn)
                    interrupt()
                    threading.Event().wait(BOUND)
        assert script.cancelled.is_set()
        assert session.prompt("say on").run().text == "on"
    assert not background_threads()


def test_a_turn_goes_on_for_who_catches_the_interrupt_inside_its_block() -> None:
    texts: list[str] = []
    script = Script()
    with connected(script) as (_, session), session.prompt("ctrl-c") as turn:
        try:
            script.go.set()
            while True:
                texts.append(next(turn).text)
        except KeyboardInterrupt:
            turn.cancel()
        texts += [update.text for update in turn]
    assert texts == ["waiting"]
    assert turn.stop_reason == "cancelled"


def test_ctrl_c_during_a_request_cancels_it() -> None:
    with connected() as (agent, session):
        with pytest.raises(KeyboardInterrupt):
            agent.request_extension("_script/ctrl-c")
        assert session.prompt("say on").run().text == "on"


def test_a_second_ctrl_c_does_not_wait_for_an_agent_that_ignores_the_first() -> None:
    limits = Limits(cancel_backstop=600, close_grace=0.01)
    with connected(limits=limits) as (_, session), pytest.raises(KeyboardInterrupt):
        session.prompt("ctrl-c-twice").run()
    assert not background_threads()


def test_ctrl_c_while_an_agent_starts_ends_its_process() -> None:
    def record(direction: str, frame: bytes) -> None:
        if b'"initialize"' in frame:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        antiphon.sync.spawn([sys.executable, "-c", "input(); input()"], record=record)
    assert not background_threads()


# ---------------------------------------------------------------------- permissions


Params = v1.RequestPermissionRequest


def always(decision: Any) -> Callable[[Params, ClientContext], Any]:
    def decide(params: Params, ctx: ClientContext) -> Any:
        if isinstance(decision, Exception):
            raise decision
        return decision

    return decide


@pytest.mark.parametrize(
    ("permissions", "said"),
    [
        ("allow", "True allow_once"),
        ("deny", "False reject_once"),
        (always(True), "True allow_once"),
        (always(False), "False reject_once"),
        (always("allow_always"), "True allow_always"),
        (always("never offered"), "False reject_once"),
        (always(None), "False None"),
        (always(ZeroDivisionError()), "False reject_once"),
    ],
)
def test_a_permission_is_decided_by_a_word_or_a_plain_function(permissions: Any, said: str) -> None:
    with connected(permissions=permissions) as (_, session):
        assert session.prompt("ask").run().text == said


def test_a_plain_function_is_asked_in_the_thread_that_waits_and_may_use_the_agent() -> None:
    asked: list[tuple[str, object]] = []

    def decide(params: Params, ctx: ClientContext) -> bool:
        asked.append((str(params.tool_call.title), threading.current_thread()))
        session.set_mode("fast")
        return bool(agent.request_extension("_script/twice", {"text": "x"}) == {"twice": "xx"})

    with connected(permissions=decide) as (agent, session):
        assert session.prompt("ask Delete it").run().text == "True allow_once"

    assert asked == [("Delete it", threading.current_thread())]


def test_a_question_waits_for_somebody_who_waits() -> None:
    script = Script()
    order: list[str] = []

    def decide(params: Params, ctx: ClientContext) -> bool:
        order.append("asked")
        return True

    with connected(script, permissions=decide) as (agent, session), session.prompt("ask") as turn:
        agent.notify_extension("_script/told", 1)
        order.append("busy")
        texts = [update.text for update in turn]

    assert order in (["busy", "asked"], ["asked", "busy"])
    assert texts == ["True allow_once"]


def test_nobody_is_asked_about_a_turn_that_is_being_left() -> None:
    asked: list[str] = []

    def decide(params: Params, ctx: ClientContext) -> bool:
        asked.append("asked")
        return True

    requested = threading.Event()

    def record(direction: str, frame: bytes) -> None:
        if direction == "in" and b"session/request_permission" in frame:
            requested.set()

    with connected(permissions=decide, record=record) as (_, session):
        with session.prompt("ask"):
            assert requested.wait(BOUND)
        assert session.prompt("say on").run().text == "on"

    assert asked == []


def test_ctrl_c_at_a_question_cancels_the_turn() -> None:
    def decide(params: Params, ctx: ClientContext) -> bool:
        raise KeyboardInterrupt

    with connected(permissions=decide) as (_, session):
        with pytest.raises(KeyboardInterrupt):
            session.prompt("ask").run()
        assert session.prompt("say on").run().text == "on"


@pytest.mark.parametrize("wrap", [False, True])
def test_an_async_function_decides_on_the_background_thread(wrap: bool) -> None:
    threads: list[str] = []

    async def decide(params: Params, ctx: ClientContext) -> str:
        threads.append(threading.current_thread().name)
        return "allow_once"

    def wrapped(params: Params, ctx: ClientContext) -> Awaitable[str]:
        return decide(params, ctx)

    with connected(permissions=wrapped if wrap else decide) as (_, session):
        assert session.prompt("ask").run().text == "True allow_once"

    assert threads == ["antiphon sync"]


class Lender(Client):
    info = ("lender", "1")

    def __init__(self, permissions: Any = "deny") -> None:
        super().__init__(permissions=permissions)
        self.seen: list[str] = []

    async def read_text_file(
        self, params: v1.ReadTextFileRequest, ctx: ClientContext
    ) -> v1.ReadTextFileResponse:
        return v1.ReadTextFileResponse(content=f"text of {params.path}")

    async def session_update(self, params: v1.SessionNotification, ctx: ClientContext) -> None:
        assert not isinstance(params.update, UnknownUpdate)
        self.seen.append(type(params.update).__name__)


@pytest.mark.parametrize("given", ["beside", "inside"])
def test_a_client_stays_itself_beside_a_plain_function(given: str) -> None:
    def decide(params: Params, ctx: ClientContext) -> bool:
        return True

    initialize: list[bytes] = []

    def record(direction: str, frame: bytes) -> None:
        if b'"initialize"' in frame:
            initialize.append(frame)

    client = Lender() if given == "beside" else Lender(decide)
    options: dict[str, Any] = {"permissions": decide} if given == "beside" else {}
    with connected(client=client, record=record, **options) as (_, session):
        assert session.prompt("read /a").run().text == "text of /a"
        assert session.prompt("ask").run().text == "True allow_once"

    assert client.seen == ["AgentMessageChunk", "AgentMessageChunk"]
    assert b'"readTextFile":true' in initialize[0]
    assert b'"name":"lender"' in initialize[0]
    assert client.permissions == ("deny" if given == "beside" else decide)


def test_a_client_that_decides_by_itself_takes_no_other_decision() -> None:
    class Decided(Client):
        async def request_permission(
            self, params: Params, ctx: ClientContext
        ) -> v1.RequestPermissionResponse:
            return v1.RequestPermissionResponse(
                outcome=v1.SelectedPermissionOutcome(option_id="allow_always")
            )

    def fill_in(form: Any, ctx: Any) -> None:
        raise AssertionError

    # Also where something else of it has to ask in the thread that waits, so that it is lent.
    for elicitation in (None, Elicitation(form=fill_in)):
        with connected(client=Decided(elicitation=elicitation)) as (_, session):
            assert session.prompt("ask").run().text == "True allow_always"
    with pytest.raises(TypeError, match="Decided"):
        antiphon.sync.connect(InProcess(Script()), client=Decided(), permissions="allow")


@pytest.mark.parametrize("given", ["beside", "inside"])
def test_a_policy_asks_a_plain_function_in_the_thread_that_waits(
    given: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("text")
    asked: list[tuple[str, object]] = []

    def ask(request: Request) -> bool:
        asked.append((request.call.kind, threading.current_thread()))
        assert agent.request_extension("_script/twice", {"text": "x"}) == {"twice": "xx"}
        return True

    permissions = Permissions(reads="ask", ask=ask)
    files = Files(tmp_path)
    options: dict[str, Any] = (
        {"client": Client(files=files), "permissions": permissions}
        if given == "beside"
        else {"client": Client(files=files, permissions=permissions)}
    )
    with connected(**options) as (agent, session):
        assert session.prompt("ask").run().text == "True allow_once"
        assert session.prompt(f"read {tmp_path}/a").run().text == "text"

    here = threading.current_thread()
    assert asked == [("other", here), ("read", here)]


def test_a_policy_s_async_function_asks_on_the_background_thread() -> None:
    threads: list[str] = []

    async def ask(request: Request) -> Answer:
        threads.append(threading.current_thread().name)
        return Answer(allow=True, remember="session")

    permissions = Permissions(ask=ask)
    with connected(permissions=permissions) as (_, session):
        assert session.prompt("ask").run().text == "True allow_once"
        assert session.prompt("ask").run().text == "True allow_once"
        assert len(permissions.remembered) == 1

    assert threads == ["antiphon sync"]
    # What was remembered for the session went with it.
    assert not permissions.remembered


def test_a_policy_s_deadline_holds_for_a_plain_function() -> None:
    answer = threading.Event()

    def ask(request: Request) -> bool:
        assert answer.wait(BOUND)
        return True

    def observe(decision: Decision) -> None:
        decided.append((decision.outcome, decision.by))
        answer.set()

    decided: list[tuple[str, str]] = []
    permissions = Permissions(ask=ask, deadline=0.05, on_decision=observe)
    with connected(permissions=permissions) as (_, session):
        assert session.prompt("ask").run().text == "False reject_once"
    assert decided == [("deny", "deadline")]


def test_ctrl_c_at_a_policy_s_question_cancels_the_turn() -> None:
    def ask(request: Request) -> bool:
        raise KeyboardInterrupt

    decided: list[Decision] = []
    permissions = Permissions(ask=ask, on_decision=decided.append)
    with connected(permissions=permissions) as (_, session):
        with pytest.raises(KeyboardInterrupt):
            session.prompt("ask").run()
        assert session.prompt("say on").run().text == "on"
    assert [decision.outcome for decision in decided] == ["cancelled"]


# ---------------------------------------------------------------------- everything else of an agent


def test_a_list_that_goes_in_a_circle_ends_in_an_error() -> None:
    class Circular(Script):
        async def list_sessions(
            self, params: v1.ListSessionsRequest, ctx: AgentContext
        ) -> v1.ListSessionsResponse:
            return v1.ListSessionsResponse(sessions=[], next_cursor="same")

    with connected(Circular()) as (agent, _), pytest.raises(RemoteProtocolError, match="same"):
        list(agent.iter_sessions())


def test_sessions_are_listed_loaded_resumed_closed_and_deleted() -> None:
    script = Script()
    with connected(script) as (agent, session):
        assert agent.list_sessions().sessions[0].session_id == "s0"
        assert [info.session_id for info in agent.iter_sessions()] == ["s0", "s1", "s2"]
        loaded = agent.load_session("s1", cwd="/")
        with loaded.replay() as replay:
            history = [(update.label, str(update.value)) for update in replay]
        assert [label for label, _ in history] == ["replay", "replay"]
        assert "'old'" in history[0][1]
        assert loaded.prompt("say a").run().text == "a"
        assert agent.resume_session("s2", cwd="/tmp").cwd == "/tmp"
        session.close()
        agent.close_session("s1")
        agent.delete_session("s2")

    assert script.closed == [session.session_id, "s1", "deleted s2"]


def test_a_session_tells_and_changes_what_it_has() -> None:
    with connected() as (agent, session):
        assert session.agent is agent
        assert session.session_id in repr(session)
        assert (session.cwd, session.additional_directories, session.roots) == ("/", (), ("/",))
        assert session.modes is not None
        assert session.modes.current_mode_id == "slow"
        assert session.config_options is None
        assert isinstance(session.response, v1.NewSessionResponse)
        assert session.response.session_id == session.session_id
        session.set_mode("fast")
        with pytest.raises(RequestError):
            session.set_config_option("model", "x")


def test_the_agent_tells_what_it_is() -> None:
    script = Script()
    with antiphon.sync.connect(InProcess(script), authenticate="key") as agent:
        assert script.signed_in
        assert agent.info == v1.Implementation(name="script", version="1")
        assert agent.initialize_result.protocol_version == 1
        assert agent.capabilities.load_session
        assert agent.offers("loadSession")
        assert not agent.offers("promptCapabilities.image")
        assert [method.id for method in agent.auth_methods] == ["key"]
        assert agent.process is None
        assert not agent.closed
        assert repr(agent) == "<antiphon.sync.AgentPeer on in process (Script), open>"
        agent.logout()
        agent.authenticate("key")
        assert script.signed_in


def test_any_method_can_be_called() -> None:
    script = Script()
    with connected(script) as (agent, _):
        page = agent.request(v1.ListSessionsRequest(cursor="2"))
        assert [info.session_id for info in page.sessions] == ["s2"]
        agent.notify_extension("_script/told", {"a": 1})
        agent.notify(v1.CancelNotification(session_id="none"))
        assert agent.request_extension("_script/twice", {"text": "a"}) == {"twice": "aa"}
        with pytest.raises(LocalProtocolError, match="unstable"):
            agent.request(v1_unstable.ForkSessionRequest(session_id="a", cwd="/"))
    with connected(script, unstable=True) as (agent, _), pytest.raises(CapabilityError):
        agent.request(v1_unstable.ForkSessionRequest(session_id="a", cwd="/"))

    assert script.told == [{"a": 1}]


def test_updates_are_an_independent_view() -> None:
    with connected() as (_, session):
        with session.updates() as updates:
            session.prompt("say a b").run()
            assert [next(updates).text, next(updates).text] == ["a", "b"]
        assert list(updates) == []
        forgotten = session.updates()
        subscribers: list[Any] = session._session.inbox._subscribers
        assert len(subscribers) == 1
        del forgotten
        gc.collect()
        session.prompt("say c").run()
        assert subscribers == []


def test_a_session_has_a_view_of_what_it_adds_up_to() -> None:
    with connected() as (agent, session):
        view = session.view
        assert session.view is view
        session.prompt("say a b").run()
        session.set_mode("fast")
        assert [(m.kind, m.text) for m in view.messages] == [("user", "say a b"), ("agent", "ab")]
        assert view.mode == "fast"
        loaded = agent.load_session("loaded", cwd="/")
        assert [m.text for m in loaded.view.messages] == ["oldolder"]
    assert session.view is view  # also when the agent is gone


def test_a_session_that_came_another_way_is_adopted() -> None:
    with connected() as (agent, _):
        answer = agent.request(v1.NewSessionRequest(cwd="/", mcp_servers=[]))
        session = agent.adopt_session(answer.session_id, cwd="/", additional_directories=["/b"])
        assert session.roots == ("/", "/b")
        assert session.response is None
        assert session.prompt("say a").run().text == "a"
        with pytest.raises(LocalProtocolError):
            agent.adopt_session(answer.session_id, cwd="/")


def test_an_observer_runs_on_the_background_thread_and_cannot_wait_for_it() -> None:
    seen: list[tuple[str, str]] = []
    refused: list[Exception] = []

    def observe(update: Update) -> None:
        seen.append((update.text, threading.current_thread().name))
        for call in (session.close, agent.close):
            try:
                call()
            except LocalProtocolError as error:
                refused.append(error)

    with connected() as (agent, session):
        stop = session.on_update(observe)
        session.prompt("say a").run()
        stop()
        session.prompt("say b").run()

    assert seen == [("a", "antiphon sync")]
    assert len(refused) == 2


# ---------------------------------------------------------------------- processes, loops, threads


def test_a_spawned_agent_ends_with_its_block() -> None:
    lines: list[str] = []
    with antiphon.sync.spawn(ECHO, stderr=lines.append) as agent:
        process = agent.process
        assert process is not None
        assert process.pid > 0
        assert process.exit_status is None
        assert agent.new_session().prompt("hello").run().text == "echo: hello"
        assert process.stderr_tail == "asked\n"
    assert process.exit_status == 0
    assert process.stderr_tail == "asked\n"
    assert lines == ["asked"]
    assert not background_threads()


def test_an_agent_that_cannot_start_leaves_nothing() -> None:
    with pytest.raises(StartError, match="no-such-command"):
        antiphon.sync.spawn(["no-such-command"])
    with pytest.raises(StartError) as caught:
        antiphon.sync.spawn([sys.executable, "-c", "raise SystemExit('sorry')"])
    assert (caught.value.exit_status, caught.value.stderr_tail) == (1, "sorry\n")
    with pytest.raises(TypeError, match="list"):
        antiphon.sync.spawn("not a list")
    assert not background_threads()


def test_any_transport_can_be_connected() -> None:
    with antiphon.sync.connect(ProcessTransport(ECHO)) as agent:
        assert agent.new_session().prompt("hello").run().text == "echo: hello"


def test_an_agent_that_dies_fails_the_turn_with_its_last_words() -> None:
    program = ECHO[2].replace("await turn.say", "import os; os._exit(3); await turn.say")
    with antiphon.sync.spawn([sys.executable, "-c", program]) as agent:
        session = agent.new_session()
        with pytest.raises(ConnectionClosed) as caught:
            session.prompt("hello").run()
        assert (caught.value.exit_status, caught.value.stderr_tail) == (3, "asked\n")
        assert agent.closed
        assert "lost" in repr(agent)


async def test_it_works_inside_a_running_loop() -> None:
    here = asyncio.current_task()

    def decide(params: Params, ctx: ClientContext) -> bool:
        return asyncio.current_task() is here

    with connected(permissions=decide) as (_, session):
        with session.prompt("say a b") as turn:
            assert [update.text for update in turn] == ["a", "b"]
        assert session.prompt("ask").run().text == "True allow_once"


def test_several_agents_share_one_thread_that_ends_with_the_last() -> None:
    first = antiphon.sync.connect(InProcess(Script()))
    second = antiphon.sync.connect(InProcess(Script()))
    assert len(background_threads()) == 1
    first.close()
    assert second.new_session().prompt("say a").run().text == "a"
    second.close()
    assert not background_threads()


def test_many_threads_may_use_one_agent() -> None:
    def work(number: int) -> None:
        session = agent.new_session()
        for turn in range(5):
            word = f"{number}.{turn}"
            texts.append((word, session.prompt(f"say {word}").run().text))

    texts: list[tuple[str, str]] = []
    with connected() as (agent, _):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)

    assert len(texts) == 40
    assert all(asked == said for asked, said in texts)


def test_a_forgotten_agent_is_closed_when_it_is_collected() -> None:
    agent = antiphon.sync.spawn(ECHO)
    session = agent.new_session()
    process = agent.process
    assert process is not None
    (thread,) = background_threads()
    del agent
    gc.collect()
    assert session.prompt("hello").run().text == "echo: hello"  # a session keeps its agent
    del session
    gc.collect()
    thread.join(BOUND)
    assert not thread.is_alive()
    assert process.exit_status == 0


# ---------------------------------------------------------------------- the interpreter's exit


def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


AGENT = """
import sys
from antiphon import Agent, serve_stdio
class Reader(Agent):
    async def prompt(self, turn):
        await turn.say(str(len(await turn.read_text_file(turn.text))))
serve_stdio(Reader())
open(sys.argv[1], "w").write("ended well")
"""


def test_what_was_never_closed_ends_well_at_the_exit_and_says_nothing(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_text("x" * 1_000_000)
    script = """
        import sys, antiphon.sync
        from antiphon import Client
        from antiphon.services import Files
        agent = antiphon.sync.spawn(
            [sys.executable, "-c", sys.argv[1], sys.argv[2]], client=Client(files=Files("/"))
        )
        session = agent.new_session()
        print(session.prompt(sys.argv[3]).run().text)  # large: read in a worker thread
    """

    run = run_script(script, AGENT, str(tmp_path / "mark"), str(big))

    assert (run.stdout, run.stderr, run.returncode) == ("1000000\n", "", 0)
    assert (tmp_path / "mark").read_text() == "ended well"


def test_an_agent_that_does_not_end_is_killed_at_the_exit(tmp_path: Path) -> None:
    script = """
        import sys, antiphon._background, antiphon.sync
        antiphon._background.EXIT_GRACE = 0.2
        agent = antiphon.sync.spawn([sys.executable, "-c", sys.argv[1]])
        print(agent.process.pid)
    """
    stubborn = """
import signal, threading
from antiphon import Agent, serve_stdio
signal.signal(signal.SIGTERM, signal.SIG_IGN)
serve_stdio(Agent())
threading.Event().wait()
"""

    run = run_script(script, stubborn)

    assert (run.stderr, run.returncode) == ("", 0)
    # Its parent is gone: whether it is reaped depends on whose child it is now.
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(run.stdout)).status() == psutil.STATUS_ZOMBIE


def test_a_forked_child_leaves_its_parents_agent_alone() -> None:
    script = """
        import os, sys, time, warnings, antiphon, antiphon.sync
        warnings.simplefilter("ignore")  # 3.12 warns of forks beside threads
        agent = antiphon.sync.spawn([sys.executable, "-c", sys.argv[1]])
        session = agent.new_session()
        child = os.fork()
        if not child:
            started = time.monotonic()
            try:
                session.prompt("from the child").run()
            except antiphon.ConnectionClosed:
                print("child", flush=True)
            agent.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(session.prompt("hello").run().text)
        agent.close()
    """

    run = run_script(script, ECHO[2])

    assert (run.stdout, run.stderr, run.returncode) == ("child\necho: hello\n", "", 0)


# ---------------------------------------------------------------------- the same as with async


def overloads(module: str, name: str) -> dict[str, list[tuple[str, str]]]:
    source = (Path(antiphon.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    typed: dict[str, list[tuple[str, str]]] = {"request": [], "notify": []}
    for node in found.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name in typed and node.decorator_list:
            assert node.args.args[1].annotation is not None
            assert node.returns is not None
            params = ast.unparse(node.args.args[1].annotation)
            typed[node.name].append((params, ast.unparse(node.returns)))
    return typed


def test_requests_are_typed_as_with_async() -> None:
    assert overloads("sync", "AgentPeer") == overloads("_calls", "AgentCalls")


def test_what_is_offered_is_called_as_with_async() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    with connected() as (agent, session):
        turn = session.prompt("say a")
        turn.run()
        known = {
            antiphon.sync.AgentPeer: (agent._peer, {"close", "closed"}),
            antiphon.sync.Session: (session._session, set[str]()),
            antiphon.sync.PromptTurn: (turn._turn, {"run"}),
        }
        for kind, (original, more) in known.items():
            assert {name for name in public(kind) if not hasattr(original, name)} == more


def test_a_prompt_that_was_forgotten_is_told_of() -> None:
    with antiphon.sync.connect(InProcess(Script())) as agent:
        session = agent.new_session(cwd=".")
        with pytest.warns(RuntimeWarning, match="was neither run.. nor entered"):
            session.prompt("forgotten")


def test_a_prompt_for_which_it_is_too_late_is_not_called_forgotten() -> None:
    with antiphon.sync.connect(InProcess(Script())) as agent:
        session = agent.new_session(cwd=".")
    with pytest.raises(ConnectionClosed):
        session.prompt("too late").run()
    with pytest.raises(ConnectionClosed), session.prompt("too late"):
        pass


# -------------------------------------------------------------------- attached sessions

DURABLE = """
import sys
from antiphon import Agent, serve_stdio
from antiphon.journal import SqliteJournal
from antiphon.schema import v1


class Teller(Agent):
    async def new_session(self, params, ctx):
        return v1.NewSessionResponse(session_id="tale")

    async def prompt(self, turn):
        for number in range(int(turn.text)):
            await turn.say(f"{number} ")
        if turn.text == "3":
            await turn.wait_cancelled()


serve_stdio(Teller(), journal=SqliteJournal(sys.argv[1]))
"""


def test_an_agent_that_is_killed_is_started_again(tmp_path: Path) -> None:
    program = tmp_path / "teller.py"
    program.write_text(DURABLE)
    argv = [sys.executable, str(program), str(tmp_path / "journal")]
    records: list[str] = []
    with antiphon.sync.spawn(argv, reattach=antiphon.Reattach(delay=0.05)) as agent:
        session = agent.new_session(cwd=tmp_path)
        end = session.on_record(lambda record: records.append(record.kind))
        process = agent.process
        assert process is not None
        given: list[str] = []
        with session.prompt("3") as turn:
            for update in turn:
                given.append(update.text)
                if len(given) == 3:
                    os.kill(process.pid, signal.SIGKILL)
        assert (given, turn.stop_reason) == (["0 ", "1 ", "2 "], "cancelled")
        assert session.prompt("2").run().text == "0 1 "
        end()

        assert session.attached
        assert session.reattach() == session.offset
        assert records == ["turn_started", "turn_completed"] * 2
        with antiphon.sync.spawn(argv) as other:
            with pytest.raises(antiphon.LocalProtocolError, match="known"):
                agent.attach_session("tale")
            follower = other.attach_session("tale", cwd=tmp_path)
            history = [update.text for update in follower.replay()]
            assert history == ["", "0 ", "1 ", "2 ", "", "0 ", "1 "]
            follower.detach()
            assert not follower.attached
