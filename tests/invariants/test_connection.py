"""What holds of a connection (Inv-1 to Inv-21), each against a side that is wrong.

Inv-4 is IC-6 by another name. Inv-9 is meant of an API that waits for the connection's own task: there
is none here, so the test shows that wherever our user's code runs, it may call and wait.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    DEFERRED,
    AgentPeer,
    Client,
    ConnectionClosed,
    Limits,
    NotInitialized,
    Reply,
    RequestError,
    RequestTimeout,
    Turn,
    extension,
)
from antiphon.core import Protocol
from antiphon.runtime import Connection, OutboundCall
from antiphon.runtime._incoming import Incoming
from antiphon.runtime._reply import Obligation
from antiphon.sessions._inbox import Inbox
from antiphon.sessions._side_router import SideRouter
from antiphon.testing import raw_agent, raw_client, unshaken_client
from antiphon.testing._pairs import raw_pair
from tests.invariants.controls import changed, controlled, on_the_wire
from tests.invariants.sides import Played, cancel, new_session, prompt, turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon import AgentContext, TelemetryEvent
    from antiphon.testing import RawPeer

pytestmark = pytest.mark.virtual_time

Json = dict[str, Any]
NEW: Json = {"cwd": "/", "mcpServers": []}


def now() -> float:
    return asyncio.get_running_loop().time()


def never(_original: Any, *_args: Any, **_named: Any) -> None:
    """What is not done at all."""


def twice(frames: list[Json]) -> list[Json]:
    """Each response to a request of the test's, two times."""
    doubled: list[Json] = []
    for frame in frames:
        doubled.append(frame)
        if "method" not in frame and not str(frame.get("id")).startswith(("ask", "hello")):
            doubled.append(frame)
    return doubled


class Serves(Played):
    """Serves extensions: `_wait` until it is cancelled, `_echo`, `_fail`, `_call` (the client).

    `_defer` leaves its answer to whoever takes the last of `replies`.
    """

    def __init__(self, play: Callable[[Turn], Awaitable[Any]] | None = None) -> None:
        super().__init__(play)
        self.heard: list[str] = []
        self.waiting = asyncio.Event()
        self.replies: list[Reply] = []
        self.adopter: asyncio.Task[Any] | None = None

    @extension("_defer")
    async def defer(self, params: Any, ctx: AgentContext) -> Any:
        self.replies.append(ctx.defer(self.adopter))
        return DEFERRED

    @extension("_wait")
    async def wait(self, params: Any, ctx: Any) -> Any:
        self.heard.append("_wait")
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.heard.append("ended")

    @extension("_echo")
    async def echo(self, params: Any, ctx: Any) -> Any:
        self.heard.append("_echo")
        return params

    @extension("_fail")
    async def fail(self, params: Any, ctx: Any) -> Any:
        raise ValueError(params["secret"])

    @extension("_call")
    async def call(self, params: Any, ctx: AgentContext) -> Any:
        return await ctx.peer.request_extension("_test/back", params)


# ---------------------------------------------------------------- Inv-1, Inv-2: one way out for each call


class Counting(OutboundCall):
    """A call of ours that writes down what is delivered to it."""

    __slots__ = ("outcomes",)

    def __init__(self) -> None:
        super().__init__("_test/any")
        self.outcomes: list[Any] = []

    def answered(self, result: Any, error: Exception | None) -> None:
        self.outcomes.append(type(error) if error is not None else json.loads(bytes(result)))


def keeps_the_call(_original: Any, self: Protocol, id_: bytes) -> bytes:
    return self.notification("$/cancel_request", b'{"requestId":' + id_ + b"}")


@pytest.mark.covers("Inv-1", "Inv-2")
@controlled(keeps_the_call=changed(Protocol, "abandon", keeps_the_call))
async def test_a_call_gets_one_outcome_or_none_and_leaves_nothing() -> None:
    async with raw_agent() as (peer, raw):
        connection = peer.connection
        answered, timed_out, given_up = Counting(), Counting(), Counting()
        connection.open_call(answered, None, 5)
        connection.open_call(timed_out, None, 5)
        connection.open_call(given_up, None, 5)
        requests = [await raw.wait("_test/any", count) for count in (1, 2, 3)]
        raw.answer(requests[0], "yes")
        connection.abandon(given_up)
        await asyncio.sleep(6)
        for request in requests:  # late, or a second time
            raw.answer(request, "late")
        await raw.round_trip()

        assert answered.outcomes == ["yes"]
        assert timed_out.outcomes == [RequestTimeout]
        assert given_up.outcomes == []
        assert not connection.protocol.calls


# ---------------------------------------------------------------- Inv-3: timeouts


@pytest.mark.covers("Inv-3")
@controlled(
    tells_nobody=on_the_wire(
        lambda frames: [f for f in frames if f.get("method") != "$/cancel_request"]
    ),
    keeps_the_call=changed(Protocol, "abandon", keeps_the_call),
)
async def test_after_a_timeout_the_peer_is_told_and_its_late_answer_ignored() -> None:
    async with raw_agent(limits=Limits(request_timeout=5)) as (peer, raw):
        began = now()
        with pytest.raises(RequestTimeout):
            await peer.request_extension("_test/slow")
        request = await raw.wait("_test/slow")
        assert not peer.connection.protocol.calls
        raw.answer(request, "late")
        await raw.round_trip()

        assert now() - began == pytest.approx(5)
        told = [frame["params"] for frame in raw.sent("$/cancel_request")]
        assert told == [{"requestId": request["id"]}]
        again = asyncio.create_task(peer.request_extension("_test/quick"))
        raw.answer(await raw.wait("_test/quick"), "in time")
        assert await again == "in time"


# ---------------------------------------------------------------- Inv-5: updates are never answered


def complains(original: Any, self: Inbox, raw: Any, frame: bytes) -> None:
    self.connection.send(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32602,"message":"no"}}')
    original(self, raw, frame)


@pytest.mark.covers("Inv-5")
@controlled(complains=changed(Inbox, "put", complains))
async def test_whatever_becomes_of_an_update_no_frame_answers_it() -> None:
    seen: list[str] = []

    def observer(update: Any) -> None:
        seen.append(update.kind)
        raise ValueError("an observer that fails")

    async with raw_agent(Client(on_update=observer)) as (peer, raw):
        opening = asyncio.create_task(peer.new_session())
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        await opening
        raw.send(
            raw.update("s1", "fails"),
            raw.notification("session/update", {"sessionId": "s1", "update": 5}),
            raw.notification("session/update", {"sessionId": "s1", "update": {"a": "b"}}),
            raw.notification("session/update", {"sessionId": 5}),
            raw.notification("session/update", None),
        )
        await raw.expect_nothing(1)

        assert seen == ["agent_message_chunk", "", ""]


# ---------------------------------------------------------------- Inv-6, Inv-18: ids come back as they were


def retyped(frames: list[Json]) -> list[Json]:
    for frame in frames:
        if "method" not in frame and isinstance(frame.get("id"), int):
            frame["id"] = str(frame["id"])
    return frames


@pytest.mark.covers("Inv-6")
@controlled(retyped=on_the_wire(retyped))
async def test_each_kind_of_failure_has_its_code_and_the_id_of_its_request() -> None:
    async with raw_client(Serves()) as raw:
        raw.send(
            raw.request("a", "_test/unknown", {}),
            raw.request(-4, "session/new", {"cwd": 5}),
            raw.request("b", "_fail", {"secret": "x"}),
            {"jsonrpc": "2.0", "id": 7, "method": 5},
        )
        codes = {id_: (await raw.answer_to(id_))["error"]["code"] for id_ in ("a", -4, "b", 7)}

        assert codes == {"a": -32601, -4: -32602, "b": -32603, 7: -32600}


def cut_at_the_pipe(frames: list[Json]) -> list[Json]:
    for frame in frames:
        if "method" not in frame and "|" in str(frame.get("id")):
            frame["id"] = frame["id"].partition("|")[2]
    return frames


@pytest.mark.covers("Inv-18")
@controlled(cut_at_the_pipe=on_the_wire(cut_at_the_pipe))
async def test_an_id_that_looks_like_a_pair_comes_back_whole() -> None:
    async with raw_client(Serves()) as raw:
        assert (await raw.ask("_echo", {"x": 1}, "c1|5"))["result"] == {"x": 1}
        assert [frame["id"] for frame in raw.sent(None)[1:]] == ["c1|5"]


# ---------------------------------------------------------------- Inv-7: strangers leave no trace


def tables(peer: Any) -> dict[str, int]:
    """How much a connection at rest keeps."""
    connection = peer.connection
    return {
        "calls": len(connection.protocol.calls),
        "requests": len(connection.protocol.requests),
        "tasks": sum(not task.done() for task in connection.tasks),
        "routes": len(connection._router._routes),
        "sessions": len(peer.sessions),
    }


class Shows(Serves):
    """Keeps the peer that it has served."""

    peer: Any = None

    async def initialize(self, params: Any, ctx: AgentContext) -> Any:
        self.peer = ctx.peer
        return await super().initialize(params, ctx)


def remembers_routes(original: Any, self: SideRouter, method: str) -> Any:
    route = original(self, method)
    self._routes.setdefault(method, route)
    return route


@pytest.mark.covers("Inv-7")
@controlled(remembers_routes=changed(SideRouter, "request_route", remembers_routes))
async def test_hundreds_of_unknown_names_are_refused_and_forgotten() -> None:
    agent = Shows()
    async with raw_client(agent) as raw:
        await raw.ask("session/prompt", prompt(0, "unknown")["params"])
        before = tables(agent.peer)
        for number in range(200):
            raw.send(
                raw.request(f"m{number}", f"test/unknown-{number}", {}),
                raw.request(f"x{number}", f"_unknown-{number}", {}),
                raw.notification(f"test/unknown-{number}", {}),
                cancel(f"unknown-{number}"),
                prompt(f"p{number}", f"unknown-{number}"),
            )
        for kind, code in (("m", -32601), ("x", -32601), ("p", -32002)):
            answers = [await raw.answer_to(f"{kind}{number}") for number in range(200)]
            assert {answer["error"]["code"] for answer in answers} == {code}

        assert tables(agent.peer) == before


# ---------------------------------------------------------------- Inv-8, Inv-9: calls from everywhere


def waits_for_handlers(original: Any, self: Connection, frames: Any) -> None:
    """What comes while a request is handled waits for its end: the deadlock to be avoided."""
    if not self.protocol.requests or not self.initialized:
        original(self, frames)
    else:
        asyncio.get_running_loop().call_later(0.01, self.frames_received, frames)


WAITS_FOR_HANDLERS = changed(Connection, "frames_received", waits_for_handlers)


@pytest.mark.covers("Inv-8")
@controlled(waits_for_handlers=WAITS_FOR_HANDLERS)
async def test_a_handler_may_call_its_peer_and_wait() -> None:
    async with raw_client(Serves()) as raw:
        raw.send(raw.request(1, "_call", {"x": 1}))
        raw.answer(await raw.wait("_test/back"), {"y": 2})

        assert (await raw.answer_to(1))["result"] == {"y": 2}


@pytest.mark.covers("Inv-9")
@controlled(waits_for_handlers=WAITS_FOR_HANDLERS)
async def test_wherever_code_of_ours_runs_it_may_call_and_wait() -> None:
    answers: list[tuple[str, Any]] = []
    done = asyncio.Event()

    async def call(peer: AgentPeer, where: str) -> None:
        answers.append((where, await peer.request_extension("_test/back", where)))
        if len(answers) == 4:
            done.set()

    class Calls(Client):
        @extension("_test/request")
        async def asked(self, params: Any, ctx: Any) -> Any:
            ctx.after_response(lambda: call(ctx.peer, "after a response"))
            await call(ctx.peer, "request")

        @extension("_test/told", kind="notification")
        async def told(self, params: Any, ctx: Any) -> None:
            await call(ctx.peer, "notification")

        async def session_update(self, params: Any, ctx: Any) -> None:
            await call(ctx.peer, "update")

    async with raw_agent(Calls()) as (peer, raw):
        opening = asyncio.create_task(peer.new_session())
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        await opening
        raw.send(
            raw.update("s1", "x"), raw.notification("_test/told"), raw.request(1, "_test/request")
        )
        for count in range(1, 5):
            request = await raw.wait("_test/back", count)
            raw.answer(request, f"{request['params']}!")
        async with asyncio.timeout(5):
            await done.wait()
        await raw.answer_to(1)

    assert sorted(answers) == [
        (where, f"{where}!") for where in ("after a response", "notification", "request", "update")
    ]


# ---------------------------------------------------------------- Inv-10, Inv-11: the handshake


def initialized_from_the_start(original: Any, self: Connection, *args: Any, **named: Any) -> None:
    original(self, *args, **named)
    self.initialized = True


@pytest.mark.covers("Inv-10")
@controlled(initialized_from_the_start=changed(Connection, "__init__", initialized_from_the_start))
async def test_before_the_handshake_an_agent_serves_nothing_and_then_everything() -> None:
    agent = Serves()
    async with unshaken_client(agent) as raw:
        raw.send(raw.request(1, "_echo", {}), raw.notification("session/cancel", {}))
        answer = await raw.answer_to(1)
        assert answer.get("error", {}).get("code") == -32600
        assert answer["error"]["data"] == {"method": "_echo", "reason": "initialize required"}
        assert agent.heard == []
        hello = await raw.ask("initialize", {"protocolVersion": 1}, "hello")
        assert hello.get("result", {}).get("protocolVersion") == 1
        assert (await raw.ask("_echo", {"x": 1}))["result"] == {"x": 1}
        await raw.expect_nothing()


@pytest.mark.covers("Inv-10")
@controlled(initialized_from_the_start=changed(Connection, "__init__", initialized_from_the_start))
async def test_before_the_handshake_a_client_calls_and_serves_nothing_and_then_everything() -> None:
    served: list[Any] = []

    class Echoes(Client):
        @extension("_echo")
        async def echo(self, params: Any, ctx: Any) -> Any:
            served.append(params)
            return params

    async with raw_pair() as (ours, raw):
        peer = AgentPeer(ours, Echoes())
        shaking = asyncio.create_task(peer.initialize(None, 5))
        hello = await raw.wait("initialize")
        early = await raw.ask("_echo", {"x": 1})
        assert early.get("error", {}).get("code") == -32600
        assert early["error"]["data"] == {"method": "_echo", "reason": "initialize required"}
        assert served == []
        with pytest.raises(NotInitialized):
            peer.connection.open_call(Counting(), None)
        with pytest.raises(NotInitialized):
            peer.connection.notify("_test/any", None)
        await raw.expect_nothing()
        raw.answer(hello, {"protocolVersion": 1, "agentCapabilities": {}})
        await shaking
        assert (await raw.ask("_echo", {"x": 1}))["result"] == {"x": 1}
        asking = asyncio.create_task(peer.request_extension("_test/any"))
        raw.answer(await raw.wait("_test/any"), 5)
        assert await asking == 5
        await peer.aclose()


def forgets_the_handshake(original: Any, self: Any, event: Any, *args: Any) -> Any:
    if event.method == "initialize":
        self._connection.initialized = False
    return original(self, event, *args)


@pytest.mark.covers("Inv-11")
@controlled(forgets_the_handshake=changed(Incoming, "request_received", forgets_the_handshake))
async def test_a_second_handshake_is_refused_and_changes_nothing() -> None:
    seen: list[Any] = []

    class Slow(Serves):
        async def initialize(self, params: Any, ctx: AgentContext) -> Any:
            seen.append(ctx.peer.connection.initialized)
            await turns()
            seen.append(list(self.heard))
            return await super().initialize(params, ctx)

        @extension("_forms")
        async def forms(self, params: Any, ctx: AgentContext) -> bool:
            return ctx.peer.offers("elicitation.form")

    offered: Json = {"protocolVersion": 1, "clientCapabilities": {"elicitation": {"form": {}}}}
    async with unshaken_client(Slow()) as raw:
        # What follows the handshake waits for it: nothing is open inside of its handler.
        raw.send(raw.request(0, "initialize", {"protocolVersion": 1}), raw.request(1, "_echo", {}))
        assert "result" in await raw.answer_to(1)
        again = await raw.ask("initialize", offered)

        assert seen == [False, []]
        assert again.get("error", {}).get("code") == -32600
        assert again["error"]["data"] == {"reason": "already initialized"}
        assert (await raw.ask("_forms"))["result"] is False


# ---------------------------------------------------------------- Inv-12, Inv-13: the end


async def reaps_nothing(_original: Any, self: Connection) -> None:
    self.flush()


@pytest.mark.covers("Inv-12")
@controlled(reaps_nothing=changed(Connection, "_reap", reaps_nothing))
async def test_when_the_transport_dies_work_is_ended_and_nothing_is_sent() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "_wait", {}), raw.request(2, "_defer", {}))
        await agent.waiting.wait()
        await raw.aclose()
        await asyncio.sleep(1)

        assert agent.heard == ["_wait", "ended"]
        assert agent.replies[0].cancelled  # released, and told so
        assert agent.replies[0].send("late") is False
        assert raw.responses(1) == raw.responses(2) == []


def ends_again(original: Any, self: Connection, error: Any) -> None:
    self.lost = None
    original(self, error)


@pytest.mark.covers("Inv-13")
@controlled(ends_again=changed(Connection, "_fail_everything", ends_again))
async def test_however_often_it_is_closed_it_is_cleaned_up_once() -> None:
    losses: list[Any] = []
    async with raw_agent() as (peer, raw):
        call = Counting()
        peer.connection.open_call(call, None)
        router: Any = peer.connection._router
        original = router.connection_lost

        def lost(error: Any) -> None:
            losses.append(error)
            original(error)

        router.connection_lost = lost
        closing = [asyncio.create_task(peer.aclose()) for _ in range(3)]
        await raw.aclose()
        peer.connection.connection_lost(OSError("again"))
        await asyncio.gather(*closing)
        peer.connection.connection_lost(None)
        await peer.connection.wait_closed()

        assert len(losses) == 1
        assert call.outcomes == [ConnectionClosed]


# ---------------------------------------------------------------- Inv-14, Inv-15: odd frames between good ones


def takes_any_id(_original: Any, self: Protocol, id_: bytes, request: Any) -> bool:
    self.requests[id_] = request
    return True


@pytest.mark.covers("Inv-14")
@controlled(takes_any_id=changed(Protocol, "open", takes_any_id))
async def test_a_second_request_with_an_id_in_flight_is_ignored_entirely() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "_wait", {}))
        await agent.waiting.wait()
        raw.send(raw.request(1, "_echo", {"x": 1}), raw.request(1, "test/unknown", {}))
        await raw.round_trip()

        assert agent.heard == ["_wait"]
        assert raw.responses(1) == []
        raw.send(raw.notification("$/cancel_request", {"requestId": 1}))
        await raw.answer_to(1)
        await raw.round_trip()
        assert len(raw.responses(1)) == 1


def stops_at_garbage(original: Any, self: Connection, frames: Any) -> None:
    good: list[Any] = []
    for frame in frames:
        good.append(frame)
        if not isinstance(frame, bytes) or not frame.startswith(b'{"jsonrpc"'):
            break
    original(self, good)


GARBAGE: list[tuple[bytes, Any, int]] = [
    (b'{"id": 9}', 9, -32600),
    (b'{"jsonrpc":"1.0","id":10,"method":"_echo"}', 10, -32600),
    (b"5", None, -32600),
    (b"[]", None, -32600),
    (b"{nonsense", None, -32700),
    (b'{"id": [], "method": "_echo"}', None, -32600),
]


@pytest.mark.covers("Inv-15")
@controlled(stops_at_garbage=changed(Connection, "frames_received", stops_at_garbage))
async def test_garbage_between_good_frames_is_answered_and_touches_nothing() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "_wait", {}))
        await agent.waiting.wait()
        frames: list[Any] = []
        for number, (garbage, _, _) in enumerate(GARBAGE):
            frames += [garbage, raw.request(f"e{number}", "_echo", {"n": number})]
        raw.send(*frames)
        echoes = [await raw.answer_to(f"e{number}") for number in range(len(GARBAGE))]

        assert [echo["result"]["n"] for echo in echoes] == list(range(len(GARBAGE)))
        refused = [f for f in raw.sent(None) if "error" in f]
        assert [(f["id"], f["error"]["code"]) for f in refused] == [g[1:] for g in GARBAGE]
        assert raw.responses(1) == []


# ---------------------------------------------------------------- Inv-16: nothing leaks


def tells_all(original: Any, self: Incoming, call: Any, error: BaseException) -> None:
    original(self, call, RequestError(-32603, str(error)))


@pytest.mark.covers("Inv-16")
@controlled(tells_all=changed(Incoming, "_answer_error", tells_all))
async def test_what_an_exception_says_stays_here() -> None:
    async def play(turn: Turn) -> None:
        raise OSError("hunter2 in a turn")

    async with raw_client(Serves(play)) as raw:
        session_id = await new_session(raw)
        answers = [
            await raw.ask("_fail", {"secret": "hunter2"}),
            await raw.ask("session/prompt", prompt(0, session_id)["params"]),
        ]

        assert [answer["error"]["code"] for answer in answers] == [-32603, -32603]
        assert not [frame for frame in raw.raw_frames if b"hunter2" in frame]


# ---------------------------------------------------------------- Inv-17: at rest


def keeps_the_request(original: Any, self: Protocol, id_: bytes, body: bytes) -> Any:
    request = self.requests.get(id_)
    frame = original(self, id_, body)
    self.requests[id_ + b"-kept"] = request
    return frame


async def answered_late(agent: Serves, raw: RawPeer, id_: Any) -> Any:
    """A request that is answered when its handler has returned."""
    raw.send(raw.request(id_, "_defer", {}))
    await raw.round_trip()
    assert raw.responses(id_) == []
    assert agent.replies.pop().send({"x": 1})
    return (await raw.answer_to(id_))["result"]


@pytest.mark.covers("Inv-17")
@controlled(keeps_the_request=changed(Protocol, "result", keeps_the_request))
async def test_at_rest_every_table_is_empty() -> None:
    async def play(turn: Turn) -> None:
        await turn.say("x")
        await turn.ask_permission("Dig")

    agent = Shows(play)
    async with raw_client(agent) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(1, session_id), raw.request(2, "_wait", {}), raw.request(3, "_fail", {}))
        assert await answered_late(agent, raw, 4) == {"x": 1}
        raw.answer(
            await raw.wait("session/request_permission"), {"outcome": {"outcome": "cancelled"}}
        )
        raw.send(raw.notification("$/cancel_request", {"requestId": 2}))
        for id_ in (1, 2, 3):
            await raw.answer_to(id_)
        await raw.ask("_echo", {})
        await turns()

        kept = tables(agent.peer)
        assert {name: kept[name] for name in ("calls", "requests", "tasks")} == {
            "calls": 0,
            "requests": 0,
            "tasks": 0,
        }
        assert agent.peer.connection.queued_bytes == 0
        assert agent.peer.sessions[session_id].turn is None


# ---------------------------------------------------------------- Inv-19: a reply too many


def forgets_that_it_answered(_original: Any, self: Obligation, value: Any, error: Any) -> bool:
    self._connection.send(b'{"jsonrpc":"2.0","id":' + self._call.id + b',"result":{}}')
    return True


@pytest.mark.alarms("dup_reply")
@pytest.mark.covers("Inv-19", "C-09")
@controlled(forgets_that_it_answered=changed(Obligation, "discharge", forgets_that_it_answered))
async def test_a_second_and_a_late_reply_are_taken_and_send_nothing() -> None:
    told: list[str] = []

    def tell(event: TelemetryEvent) -> None:
        told.append(event.name)

    agent = Serves()
    async with raw_client(agent, telemetry=tell) as raw:
        raw.send(raw.request(1, "_defer", {}), raw.request(2, "_defer", {}))
        await raw.round_trip()
        twice_sent, late = agent.replies
        accepted = [twice_sent.send(1), twice_sent.send(2), twice_sent.fail(ValueError())]
        raw.send(raw.notification("$/cancel_request", {"requestId": 2}))
        await raw.round_trip()
        accepted.append(late.send(3))
        await raw.round_trip()

        assert accepted == [True, False, False, False]
        assert [answer["result"] for answer in raw.responses(1)] == [1]
        assert [answer.get("error", {}).get("code") for answer in raw.responses(2)] == [-32800]
        assert told.count("dup_reply") == 2


# ---------------------------------------------------------------- Inv-20: the order of the wire


def counts_backwards(original: Any, self: Incoming, event: Any, rx_seq: int) -> None:
    original(self, event, 1000 - rx_seq)


@pytest.mark.covers("Inv-20")
@controlled(counts_backwards=changed(Incoming, "request_received", counts_backwards))
async def test_the_position_of_each_frame_is_greater_than_of_those_before() -> None:
    positions: list[int] = []

    class Counts(Played):
        @extension("_count")
        async def count(self, params: Any, ctx: AgentContext) -> None:
            positions.append(ctx.rx_seq)

        async def cancel(self, params: Any, ctx: AgentContext) -> None:
            positions.append(ctx.rx_seq)

    async with raw_client(Counts()) as raw:
        session_id = await new_session(raw)
        raw.send(raw.request(1, "_count"), b"garbage", cancel(session_id))
        await raw.answer_to(1)
        assert await raw.ask("_count")

        # initialize and session/new were the first two; garbage counts as well.
        assert sorted(positions) == [3, 5, 6]
        assert positions[-1] == 6


# ---------------------------------------------------------------- Inv-21: cancel after a crash


def deaf_after_a_crash(original: Any, self: Connection, event: Any, *args: Any) -> Any:
    return None if event.method == "session/cancel" else original(self, event, *args)


@pytest.mark.covers("Inv-21")
@controlled(deaf=changed(Connection, "_notification_received", deaf_after_a_crash))
async def test_a_cancel_reaches_its_session_also_after_a_handler_has_crashed() -> None:
    async def play(turn: Turn) -> None:
        async with asyncio.timeout(5):
            await turn.wait_cancelled()

    async with raw_client(Serves(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(1, session_id))
        crash = await raw.ask("_fail", {"secret": "x"})
        began = now()
        raw.send(cancel(session_id))
        answer = await raw.answer_to(1)

        assert crash["error"]["code"] == -32603
        assert answer.get("result") == {"stopReason": "cancelled"}
        assert now() == began
