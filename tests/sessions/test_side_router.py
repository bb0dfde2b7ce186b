"""From a method's name to its handler, on either side."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon import DEFERRED, Agent, Client, Reply, Turn
from antiphon.schema import v1, v1_unstable
from antiphon.sessions._extension import extension, find_extensions
from antiphon.sessions._side_router import SideRouter, session_of
from antiphon.testing import joined, raw_agent, raw_client

if TYPE_CHECKING:
    from antiphon import AgentContext, ClientContext
    from antiphon.core import Side
    from antiphon.runtime import RequestRoute
    from antiphon.sessions._extension import Extensions


class Everything:
    """A peer and its handlers in one: every handler is there, and answers its parameters."""

    unstable = True

    @extension("_test/ask")
    async def ask(self, params: Any, ctx: Any) -> Any:
        return params

    @extension("_test/tell", kind="notification")
    async def tell(self, params: Any, ctx: Any) -> None: ...

    def find_handler(self, name: str) -> Any:
        return self.ask

    def extensions(self) -> Extensions:
        return find_extensions(self)


class Router(SideRouter):
    served: list[str]

    def offer(self, tree: Any) -> None:
        self._offered = tree

    @property
    def remembered(self) -> set[str]:
        return set(self._routes)

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        self.served.append(method)
        return route


def router(side: Side, *, unstable: bool = True) -> Router:
    everything = Everything()
    everything.unstable = unstable
    made = Router(side, cast("Any", everything), everything)
    made.served = []
    return made


@pytest.mark.covers("R1-8", "R1-9")
@pytest.mark.parametrize(
    ("side", "method", "tree"),
    [
        ("agent", "session/load", {"loadSession": True}),
        ("agent", "session/list", {"sessionCapabilities": {"list": {}}}),
        ("client", "fs/read_text_file", {"fs": {"readTextFile": True}}),
        ("client", "terminal/create", {"terminal": True}),
    ],
)
def test_a_request_is_served_once_it_is_offered_and_then_made_only_once(
    side: Side, method: str, tree: Any
) -> None:
    made = router(side)
    assert made.request_route(method) is None
    made.offer(tree)
    route = made.request_route(method)
    assert route is not None
    assert made.request_route(method) is route
    assert made.served == [method]


def test_a_notification_is_served_once_it_is_offered() -> None:
    made = router("agent")
    assert made.notice_route("mcp/message") is None
    made.offer({"mcpCapabilities": {"acp": True}})
    assert made.notice_route("mcp/message") is not None


@pytest.mark.parametrize("method", ["session/fork", "session/archive", "providers/list"])
def test_what_is_unstable_is_served_only_on_a_connection_that_is(method: str) -> None:
    tree: Any = {"sessionCapabilities": {"fork": {}, "archive": {}}, "providers": {}}
    for unstable in (True, False):
        made = router("agent", unstable=unstable)
        made.offer(tree)
        assert (made.request_route(method) is not None) is unstable


def test_names_of_the_other_side_or_of_nobody_are_not_served_and_not_remembered() -> None:
    made = router("agent")
    for method in ("fs/read_text_file", "no/such", "", "_test/nobody", "session/update"):
        assert made.request_route(method) is None
        assert made.notice_route(method) is None
    assert made.remembered == set()


@pytest.mark.parametrize("side", ["agent", "client"])
def test_extensions_are_served_as_what_they_are(side: Side) -> None:
    made = router(side)
    assert made.request_route("_test/ask") is not None
    assert made.notice_route("_test/ask") is None
    assert made.notice_route("_test/tell") is not None
    assert made.request_route("_test/tell") is None


def test_the_session_that_parameters_name() -> None:
    assert session_of(v1.CloseSessionRequest(session_id="s")) == "s"
    assert session_of(v1.LogoutRequest()) == ""
    assert session_of({"session_id": "s"}) == ""
    # Of an elicitation it may be absent.
    asked = v1_unstable.ElicitationUrlMode(
        message="m", url="x:y", elicitation_id="e", request_id="1"
    )
    assert session_of(asked) == ""


# --- answers that come after their handler has returned --------------------------------------------


class Late(Agent):
    """Answers `session/new` when a test lets it, and says what must follow."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    async def new_session(
        self, params: v1.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        async def announce() -> None:
            await ctx.session("late").update(v1.SessionInfoUpdate(title="opened late"))

        self.replies.append(ctx.defer())
        ctx.after_response(announce)
        return DEFERRED

    async def prompt(self, turn: Turn) -> None:
        await turn.say("here")


async def test_a_session_that_is_opened_late_is_known_by_the_time_its_answer_is_sent() -> None:
    agent = Late()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "session/new", {"cwd": "/", "mcpServers": []}))
        await raw.round_trip()
        assert raw.responses(1) == []

        assert agent.replies[0].send(v1.NewSessionResponse(session_id="late"))

        assert (await raw.answer_to(1))["result"]["sessionId"] == "late"
        await raw.wait("session/update")
        prompt = {"sessionId": "late", "prompt": [{"type": "text", "text": "x"}]}
        assert (await raw.ask("session/prompt", prompt))["result"] == {"stopReason": "end_turn"}
        assert [
            frame.get("id", frame["params"]["update"]["sessionUpdate"] if "params" in frame else 0)
            for frame in raw.frames
            if frame.get("id") == 1 or frame.get("method")
        ] == [1, "session_info_update", "agent_message_chunk"]


async def test_a_late_result_that_is_none_of_the_method_is_refused_like_a_prompt_one() -> None:
    agent = Late()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "session/new", {"cwd": "/", "mcpServers": []}))
        await raw.round_trip()

        assert agent.replies[0].send("late")

        assert (await raw.answer_to(1))["error"] == {"code": -32603, "message": "Internal error"}


async def test_a_dialog_may_be_answered_late_and_is_told_when_nobody_asks_any_more() -> None:
    replies: list[Reply] = []
    told: list[str] = []

    class Window(Client):
        async def request_permission(
            self, params: v1.RequestPermissionRequest, ctx: ClientContext
        ) -> v1.RequestPermissionResponse:
            reply = ctx.defer()
            reply.on_cancel(lambda: told.append("closed"))
            replies.append(reply)
            return DEFERRED

    options = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}]
    ask = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}, "options": options}
    async with raw_agent(Window()) as (_, raw):
        raw.send(raw.request("a", "session/request_permission", ask))
        raw.send(raw.request("b", "session/request_permission", ask))
        await raw.round_trip()
        chosen = v1.SelectedPermissionOutcome(option_id="yes")

        assert replies[0].send(v1.RequestPermissionResponse(outcome=chosen))
        answer = await raw.answer_to("a")
        assert answer["result"] == {"outcome": {"outcome": "selected", "optionId": "yes"}}

        raw.send(raw.notification("$/cancel_request", {"requestId": "b"}))
        answer = await raw.answer_to("b")
        assert answer["result"] == {"outcome": {"outcome": "cancelled"}}
        await raw.round_trip()
        assert told == ["closed"]
        assert not replies[1].send(v1.RequestPermissionResponse(outcome=chosen))


async def test_a_prompt_is_not_deferred_it_has_its_turn() -> None:
    class Defers(Agent):
        async def prompt(self, turn: Turn) -> Any:
            return DEFERRED

    async with raw_client(Defers()) as raw:
        session = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        prompt: dict[str, Any] = {"sessionId": session["result"]["sessionId"], "prompt": []}

        answer = await raw.ask("session/prompt", prompt)

        assert answer["error"] == {"code": -32603, "message": "Internal error"}


async def test_an_agent_reads_a_file_that_a_client_gives_it_later() -> None:
    replies: list[Reply] = []

    class Editor(Client):
        async def read_text_file(
            self, params: v1.ReadTextFileRequest, ctx: ClientContext
        ) -> v1.ReadTextFileResponse:
            replies.append(ctx.defer())
            return DEFERRED

    class Reads(Agent):
        async def prompt(self, turn: Turn) -> None:
            await turn.say(await turn.read_text_file("/a"))

    async with joined(Reads(), Editor()) as agent:
        session = await agent.new_session(cwd="/")
        turn = session.prompt("read")
        async with turn:
            while not replies:
                await asyncio.sleep(0)
            replies[0].send(v1.ReadTextFileResponse(content="late"))
            texts = [update.text async for update in turn]

    assert texts == ["late"]
