"""One live connection against a raw peer: odd frames, concurrency, every way it may end."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import msgspec
import pytest
from tests.runtime.link import (
    BOUND,
    SIDES,
    Gate,
    Link,
    bounded,
    good,
    linked,
    plain,
    raw,
    turns,
)

from antiphon._errors import (
    ConnectionClosed,
)
from antiphon.core import Limits, Side
from antiphon.runtime import FutureCall, OutboundCall
from antiphon.schema import encode_checked

# --- whatever comes, the next good request is answered -------------------------------------------

# What each frame is answered with: (code, id), or None for silence. "either" where the two sides
# differ: what an agent prints on its stdout is no reason to answer it.
OVER = 1 << 18  # the limit of these tests, plus something
ODD_FRAMES: list[tuple[bytes, tuple[int, Any] | None | str]] = [
    (b"{", (-32700, None)),
    (b'{"id":1,"method":', (-32700, None)),
    (b"Welcome user", "agent only"),
    (b"[INFO] ready", "agent only"),
    (b"\xff\xfe", "agent only"),
    (b"null", (-32600, None)),
    (b"42", (-32600, None)),
    (b'"x"', (-32600, None)),
    (b"[]", (-32600, None)),
    (b'[{"id":3,"method":"good"}]', (-32600, None)),
    (b"{}", (-32600, None)),
    (b'{"id":4}', (-32600, 4)),
    (b'{"jsonrpc":"1.0","id":4,"method":"good"}', (-32600, 4)),
    (b'{"id":5,"method":7}', (-32600, 5)),
    (b'{"id":null,"method":"good"}', (-32600, None)),
    (b'{"id":1.5,"method":"good"}', (-32600, None)),
    (b'{"id":true,"method":"good"}', (-32600, None)),
    (b'{"id":{},"method":"good"}', (-32600, None)),
    (b'{"id":"\xff","method":"good"}', (-32600, None)),
    (b'{"id":2,"x":%s}' % (b"9" * 5000), (-32600, 2)),
    (b'{"id":%s,"method":"good"}' % (b"9" * 5000), (-32600, None)),
    (b"[" * 100_000, (-32700, None)),
    (b'{"id":7,"method":"good","params":%s}' % (b"[" * 300 + b"]" * 300), (-32600, 7)),
    (b'{"id":7,"method":"good","params":{"t":"%s"}}' % (b"x" * OVER), (-32600, 7)),
    (b'{"params":{"t":"%s"},"method":"good","id":7}' % (b"x" * OVER), (-32600, 7)),
    (b"x" * (OVER + 1), (-32700, None)),
    (b'{"method":7}', (-32600, None)),
    (b'{"id":6,"result":1,"error":{}}', None),
    (b'{"id":6,"error":7}', None),
    (b'{"error":{"code":-32602,"message":"m"},"id":null}', None),
    (b'{"result":1}', None),
    (b'{"jsonrpc":"1.0","id":6,"result":1}', None),
    (b'{"method":"unheard"}', None),
    (b'{"method":"_vendor/y","params":[]}', None),
    (b'{"method":"$/other"}', None),
    (b'{"method":"$/cancel_request"}', None),
    (b'{"method":"$/cancel_request","params":{"requestId":[1,{"a":"\\n"}]}}', None),
    (b'{"method":"$/cancel_request","params":{"requestId":999}}', None),
    (b'{"method":"session/update"}', None),
    (b'{"method":"session/update","params":{"sessionId":5,"update":{}}}', None),
    (b'{"method":"session/update","params":{"sessionId":"s"}}', None),
    (b'{"id":8,"method":"good","params":{"t":"\\ud800"}}', (0, 8)),
    (b'{"id":8,"method":"good","params":{"t":"\xff"}}', (0, 8)),
    (b'{"id":8,"method":"good","params":{"t":%s}}' % (b"9" * 4000), (0, 8)),
    (b'{"id":8,"method":"good","zzz":1,"_meta":"bad"}', (0, 8)),
]


@pytest.mark.covers(
    "R1-1", "R1-7", "R1-10", "R1-11", "R1-12", "R1-16", "R1-100", "R1-156", "R1-158", "FF-06"
)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("frame", "expected"), ODD_FRAMES)
async def test_an_odd_frame_gets_its_one_answer_or_none_and_the_next_request_is_served(
    side: Side, frame: bytes, expected: tuple[int, Any] | None | str
) -> None:
    async with linked(side, frame_bytes=OVER) as link:
        link.side.serve("good", good)

        link.peer.send(frame, b'{"jsonrpc":"2.0","id":9,"method":"good"}')

        assert (await link.peer.answer_to(9))["result"] == {"good": True}
        await turns()
        others = [m for m in link.peer.frames if m["id"] != 9]
        if expected is None or (expected == "agent only" and side == "client"):
            assert others == []
        else:
            code, id_ = (-32700, None) if isinstance(expected, str) else expected
            assert len(others) == 1
            assert others[0]["id"] == id_
            assert others[0].get("error", {"code": 0})["code"] == code


@pytest.mark.parametrize("side", SIDES)
async def test_all_odd_frames_at_once_are_answered_one_by_one(side: Side) -> None:
    async with linked(side, frame_bytes=OVER) as link:
        link.side.serve("good", good)
        frames = [frame for frame, expected in ODD_FRAMES if expected != (0, 8)]

        link.peer.send(*frames, b'{"jsonrpc":"2.0","id":9,"method":"good"}')

        await link.peer.answer_to(9)
        await turns()
        answered = [e for _, e in ODD_FRAMES if isinstance(e, tuple) and e != (0, 8)]
        noise = [e for _, e in ODD_FRAMES if e == "agent only"] if side == "agent" else []
        assert len(link.peer.raw_frames) == len(answered) + len(noise) + 1


@pytest.mark.covers("FF-08")
async def test_what_an_agent_prints_is_kept_for_error_texts() -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        link.peer.send(b"Welcome user", b"[INFO] ready", b"{'a': 1}", b"x" * 10_000)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        assert len(link.connection.noise) == 4096
        link.peer.send(b"last words")
        link.peer.call(2, "good")
        await link.peer.answer_to(2)
        assert link.connection.noise.endswith(b"xxx\nlast words")


@pytest.mark.parametrize("text", [b"Welcome user", b"[INFO] ready", b"{'a': 1}"])
async def test_any_kind_of_noise_is_kept(text: bytes) -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        link.peer.send(text)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        assert link.connection.noise.strip() == text


# --- concurrency ---------------------------------------------------------------------------------


@pytest.mark.covers("FF-14")
async def test_a_waiting_request_blocks_no_other() -> None:
    gate = Gate()
    async with linked() as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        link.peer.call(1, "slow")
        await gate.entered()

        link.peer.call(2, "good")

        await link.peer.answer_to(2)
        assert link.peer.responses(1) == []
        gate.open()
        await link.peer.answer_to(1)


@pytest.mark.covers("FF-13")
@pytest.mark.parametrize("side", SIDES)
async def test_a_handler_may_call_the_peer_which_calls_back(side: Side) -> None:
    async def outer(params: Any, context: Any) -> Any:
        return {"inner": raw(await context.connection.request("peer/x", None, BOUND))}

    async with linked(side) as link:
        link.side.serve("outer", outer)
        link.side.serve("good", good)
        link.peer.call("o", "outer")
        (asked,) = await link.peer.messages(1)

        link.peer.call("n", "good")  # the peer's handler asks in turn before it answers
        await link.peer.answer_to("n")
        link.peer.respond(asked["id"], 42)

        assert (await link.peer.answer_to("o"))["result"] == {"inner": 42}


@pytest.mark.alarms("dispatch_failed")
async def test_an_immediate_notification_acts_before_the_next_frame_and_may_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order: list[str] = []

    def at_once(params: Any, context: Any) -> None:
        order.append("at once")
        raise ValueError("internal")

    async with linked() as link:
        link.side.hear("x/now", at_once=at_once)

        def accept(params: Any, context: Any) -> Any:
            order.append("next")
            return params

        link.side.serve("good", good, accept=accept)

        link.peer.send(b'{"method":"x/now"}', b'{"id":1,"method":"good"}')
        await link.peer.answer_to(1)

        assert order == ["at once", "next"]
        assert len(link.peer.raw_frames) == 1
        assert "could not be dispatched" in caplog.text


@pytest.mark.parametrize("fault", [ValueError("x"), KeyError("x"), RecursionError()])
async def test_an_undecodable_notification_is_dropped(fault: Exception) -> None:
    gate = Gate()

    def failing(raw: Any) -> Any:
        raise fault

    async with linked() as link:
        link.side.hear("x/y", gate, decode=failing)
        link.side.serve("good", good)

        link.peer.tell("x/y", {})
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        assert not gate.begun.is_set()


async def test_updates_go_straight_to_the_side_in_wire_order() -> None:
    async with linked("client") as link:
        link.side.serve("good", good)
        frames = [
            b'{"method":"session/update","params":{"sessionId":"%s","update":{"n":%d}}}' % (s, n)
            for n in range(100)
            for s in (b"a", b"b")
        ]
        repaired = (
            b'{"method":"session/update","params":{"sessionId":"a","update":{"n":"\\ud800"}}}'
        )

        link.peer.send(*frames, repaired, *frames)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        once = [(s, {"n": n}) for n in range(100) for s in ("a", "b")]
        assert [(s, u) for s, u, _ in link.side.updates] == [*once, ("a", {"n": "\ufffd"}), *once]
        assert [frame for _, _, frame in link.side.updates[:200]] == frames


@pytest.mark.alarms("dispatch_failed")
async def test_a_side_that_fails_on_an_update_does_not_end_the_reading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        def failing(session_id: str, update: Any, frame: bytes) -> None:
            raise ValueError("x")

        link.side.update_received = failing  # type: ignore[method-assign]
        link.peer.send(
            b'{"method":"session/update","params":{"sessionId":"a","update":{}}}',
            b'{"id":1,"method":"good"}',
        )

        await link.peer.answer_to(1)
        assert "could not be dispatched" in caplog.text


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("how", ["the peer closes", "we close"])
async def test_the_end_fails_every_call_within_one_turn_and_later_ones_at_once(how: str) -> None:
    async with linked("client") as link:
        calls = [FutureCall("x/y", asyncio.get_running_loop().create_future()) for _ in range(3)]
        for call in calls:
            link.connection.open_call(call, None, BOUND)

        if how == "we close":
            closing = asyncio.create_task(link.connection.aclose())
            await turns(1)
            assert all(call.future.done() for call in calls)
            await closing
        else:
            await link.peer.transport.aclose()
            await bounded(link.connection.wait_closed())

        errors = [call.future.exception() for call in calls]
        assert all(isinstance(error, ConnectionClosed) for error in errors)
        assert len(set(map(id, errors))) == 3  # each has its own traceback
        assert all(call.patience is None for call in calls)
        with pytest.raises(ConnectionClosed):
            await link.connection.request("x/y", None, BOUND)
        with pytest.raises(ConnectionClosed):
            link.connection.notify("x/y", None)
        with pytest.raises(ConnectionClosed):
            await link.connection.drain()
        assert link.connection.closed
        assert len(link.side.losses) == 1


async def test_what_is_known_of_the_loss_is_in_every_error() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)

        link.connection.connection_lost(
            ConnectionClosed("the agent ended", exit_status=3, stderr_tail="no key")
        )

        error = call.future.exception()
        assert isinstance(error, ConnectionClosed)
        assert (error.reason, error.exit_status, error.stderr_tail) == (
            "the agent ended",
            3,
            "no key",
        )
        assert link.connection.lost_error() is not link.connection.lost_error()
        await bounded(link.connection.wait_closed())


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, "the peer closed the connection"), (OSError(32, "Broken pipe"), "Broken pipe")],
)
async def test_the_reason_of_a_loss_is_told(error: Exception | None, text: str) -> None:
    async with linked("client") as link:
        link.connection.connection_lost(error)

        assert text in link.connection.lost_error().reason
        await bounded(link.connection.wait_closed())


async def test_an_answer_that_was_read_is_delivered_although_the_end_follows() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        link.peer.respond(1, "last words")
        await link.peer.transport.aclose()

        assert raw(await bounded(task)) == "last words"


@pytest.mark.covers("FF-12")
async def test_closing_is_shared_repeatable_and_outlives_a_caller_that_gives_up() -> None:
    async with linked() as link:
        cancelled = asyncio.Event()
        entered = asyncio.Event()

        async def slow_to_end(params: Any, context: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                await turns(10)
                cancelled.set()

        link.side.serve("slow", slow_to_end)
        link.peer.call(1, "slow")
        await bounded(entered.wait())

        first, *others = [asyncio.create_task(link.connection.aclose()) for _ in range(3)]
        await turns(2)
        first.cancel()
        await bounded(asyncio.gather(*others))

        assert first.cancelled()
        assert cancelled.is_set()
        assert link.transport.closes == 1
        await bounded(link.connection.aclose())
        await bounded(link.connection.wait_closed())
        await link.peer.closed()
        assert link.peer.raw_frames == []


async def test_a_handler_may_close_its_own_connection() -> None:
    ended: list[str] = []

    async def handle(params: Any, context: Any) -> Any:
        try:
            await context.connection.aclose()
        finally:
            ended.append("handler")

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await bounded(link.connection.wait_closed())

        assert ended == ["handler"]


async def test_a_handler_that_ignores_cancellation_is_left_behind_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()
    entered = asyncio.Event()
    done = asyncio.Event()

    async def deaf(params: Any, context: Any) -> Any:
        entered.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        done.set()
        return {}

    async with linked(close_grace=0.05) as link:
        link.side.serve("deaf", deaf)
        link.peer.call(1, "deaf")
        await bounded(entered.wait())
        began = asyncio.get_running_loop().time()

        await bounded(link.connection.aclose())

        assert asyncio.get_running_loop().time() - began < 1.0
        assert "ignores cancellation" in caplog.text
        release.set()
        await bounded(done.wait())
        await turns()
        assert link.peer.raw_frames == []


async def test_a_request_that_comes_while_closing_is_not_begun() -> None:
    entered = asyncio.Event()
    late = Gate()

    async def slow_to_end(params: Any, context: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turns(10)

    async with linked() as link:
        link.side.serve("slow", slow_to_end)
        link.side.serve("late", late)
        link.peer.call(1, "slow")
        await bounded(entered.wait())

        closing = asyncio.create_task(link.connection.aclose())
        await turns(1)
        link.peer.call(2, "late")
        await bounded(closing)

        assert not late.begun.is_set()


async def test_what_a_handler_starts_while_it_is_cancelled_is_ended_too() -> None:
    entered = asyncio.Event()
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async with linked() as link:

        async def handle(params: Any, context: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                link.connection.create_task(forever())
                await turns(2)

        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await bounded(entered.wait())

        await bounded(link.connection.aclose())

        assert ended == ["forever"]


async def test_deliveries_come_to_their_own_end_other_tasks_are_cancelled_at_once() -> None:
    ended: list[str] = []
    other_ended = asyncio.Event()

    async with linked("client") as link:

        async def deliver() -> None:
            await other_ended.wait()
            await turns(5)
            ended.append("delivered")

        async def other() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                other_ended.set()

        link.connection.create_task(deliver(), delivery=True)
        link.connection.create_task(other())
        await turns()

        await bounded(link.connection.aclose())

        assert ended == ["delivered"]


async def test_a_task_that_is_left_to_another_connection_keeps_nothing_of_the_first() -> None:
    """One that outlives a thousand links must not have a thousand of them to tell of its end."""
    async with (
        linked("client", close_grace=0.02) as first,
        linked("client", close_grace=0.02) as second,
    ):
        task = first.connection.create_task(asyncio.Event().wait(), delivery=True)
        kept = weakref.ref(first.connection._deliveries)
        first.connection.disown_task(task)
        second.connection.own_task(task)
        await bounded(first.connection.aclose())

        first.connection._deliveries = set()
        assert kept() is None
        assert not task.done()
        await bounded(second.connection.aclose())
        assert task.cancelled()


async def test_a_delivery_that_does_not_end_is_cancelled_after_the_grace() -> None:
    ended: list[str] = []

    async with linked("client", close_grace=0.02) as link:

        async def deliver() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        link.connection.create_task(deliver(), delivery=True)
        await turns()

        await bounded(link.connection.aclose())

        assert ended == ["cancelled"]


async def test_a_side_and_a_call_that_fail_at_the_end_do_not_keep_the_others_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None:
            raise ValueError("answered")

    async with linked("client") as link:
        link.connection.open_call(Failing("x/a"), None)
        call = FutureCall("x/b", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)

        def failing(error: Any) -> None:
            raise ValueError("lost")

        link.side.connection_lost = failing  # type: ignore[method-assign]
        await bounded(link.connection.aclose())

        assert isinstance(call.future.exception(), ConnectionClosed)
        assert "could not be failed" in caplog.text
        assert "could not take the loss" in caplog.text


@pytest.mark.parametrize("how", ["we close", "the peer closes"])
async def test_a_transport_that_cannot_be_closed_does_not_keep_anybody_waiting(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked("client") as link:

        async def failing() -> None:
            raise OSError(5, "Input/output error")

        link.transport.aclose = failing  # type: ignore[method-assign]
        if how == "we close":
            await bounded(link.connection.aclose())
        else:
            await link.peer.transport.aclose()

        await bounded(link.connection.wait_closed())
        assert "could not be closed" in caplog.text
        await link.transport.inner.aclose()


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("when", ["handlers end", "the transport closes"])
async def test_who_gives_up_closing_gives_the_transport_no_more_time(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked() as link:
        asked, told, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        inner = link.transport.aclose

        async def slow() -> None:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                await inner()

        async def handler(params: Any, context: Any) -> Any:
            told.set()
            try:
                await asyncio.Event().wait()
            finally:
                await turns(10)
                ended.set()

        link.transport.aclose = slow  # type: ignore[method-assign]
        if when == "handlers end":
            link.side.serve("slow", handler)
            link.peer.call(1, "slow")
            await bounded(told.wait())
        closing, waiting = [asyncio.create_task(link.connection.aclose()) for _ in range(2)]
        if when == "handlers end":
            await turns(2)
            assert not asked.is_set()
        else:
            await bounded(asked.wait())
        closing.cancel()
        await bounded(waiting)

        assert closing.cancelled()
        assert asked.is_set()
        assert ended.is_set() == (when == "handlers end")
        assert "could not be closed" not in caplog.text


async def test_cancelling_the_wait_for_the_end_cancels_the_wait_alone() -> None:
    async with linked() as link:
        waiting = asyncio.create_task(link.connection.wait_closed())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])

        assert not link.connection.closed
        again = asyncio.create_task(link.connection.wait_closed())
        await link.connection.aclose()
        await bounded(again)


# --- the end of input while output still works (own stdio) ---------------------------------------


@pytest.mark.covers("R1-19")
async def test_both_requests_before_the_end_of_input_are_answered_then_the_link_closes() -> None:
    async def slow(params: Any, context: Any) -> Any:
        await turns(10)
        return {"sessionId": "s"}

    async with linked(initialized=False) as link:
        link.side.serve("initialize", slow)
        link.side.serve("session/new", slow)

        link.peer.call(1, "initialize")
        link.peer.call(2, "session/new")
        await turns(2)
        link.connection.input_ended()
        await link.peer.closed()

        assert [m["id"] for m in link.peer.frames if "result" in m] == [1, 2]
        await bounded(link.connection.wait_closed())


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_nothing_runs_so_the_link_closes_at_once() -> None:
    async with linked() as link:
        link.connection.input_ended()
        link.connection.input_ended()
        await bounded(link.connection.wait_closed())

        assert link.transport.closes == 1
        assert link.connection.lost_error().reason == "the peer closed its output"


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_open_calls_and_later_ones_fail_at_once() -> None:
    outcomes: list[str] = []

    async def handle(params: Any, context: Any) -> Any:
        for _ in range(2):
            try:
                await context.connection.request("peer/x", None, None)
            except ConnectionClosed as error:
                outcomes.append(error.reason)
        return "answered all the same"

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.messages(1)

        link.connection.input_ended()

        assert (await link.peer.answer_to(1))["result"] == "answered all the same"
        assert outcomes == ["the peer closed its output"] * 2
        await link.peer.closed()
        assert len(link.peer.raw_frames) == 2


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_a_handler_gets_the_grace_and_no_more() -> None:
    gate = Gate()
    async with linked(close_grace=0.05) as link:
        link.side.serve("slow", gate)
        link.peer.call(1, "slow")
        await gate.entered()

        link.connection.input_ended()
        await bounded(link.connection.wait_closed())

        assert gate.ended == ["cancelled"]
        assert link.peer.raw_frames == []


async def test_a_loss_while_the_last_handlers_finish_closes_once() -> None:
    gate = Gate()
    async with linked(close_grace=0.1) as link:
        link.side.serve("slow", gate)
        link.peer.call(1, "slow")
        await gate.entered()
        link.connection.input_ended()
        await turns()

        await link.peer.transport.aclose()
        await bounded(link.connection.wait_closed())

        assert gate.ended == ["cancelled"]
        assert len(link.side.losses) == 1
        assert link.transport.closes == 1


# --- two connections with each other, and the doubles themselves ---------------------------------


async def test_two_sides_call_each_other_through_any_number_of_levels() -> None:
    async with linked("agent") as link:
        # The raw peer's end, given to a real client.
        far = Link("client", Limits())
        far.connection = type(link.connection)(link.peer.transport, "client", far.side)
        far.side.connection = far.connection
        await far.connection.start()
        far.connection.initialized = True

        async def descend(params: Any, context: Any) -> Any:
            if params == 0:
                return ["the ground"]
            inner = await context.connection.request("down", b"%d" % (params - 1), BOUND)
            return [params, *raw(inner)]

        link.side.serve("down", descend)
        far.side.serve("down", descend)

        answers = await bounded(
            asyncio.gather(*(far.connection.request("down", b"20", BOUND) for _ in range(20)))
        )

        assert [raw(answer) for answer in answers] == [[*range(20, 0, -1), "the ground"]] * 20
        await bounded(far.connection.aclose())


async def test_the_plain_side_gives_plain_values_both_ways() -> None:
    async def twice(params: Any, context: Any) -> Any:
        return [params, params]

    async with linked() as link:
        link.side.serve("twice", twice)
        link.peer.call(1, "twice", {"a": None})
        link.peer.call(2, "twice")

        assert (await link.peer.answer_to(1))["result"] == [{"a": None}] * 2
        assert (await link.peer.answer_to(2))["result"] == [{}, {}]
        assert plain(msgspec.Raw(b"[1]")) == [1]
        assert encode_checked([1]) == b"[1]"


async def test_an_eager_task_factory_of_the_loop_lets_no_handler_run_in_the_reader() -> None:
    """`asyncio.eager_task_factory` begins a task where it is made; before 3.12 there is none."""
    made: list[str] = []

    def factory(loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work.__qualname__)
        eager: Any = getattr(asyncio, "eager_task_factory", None)
        if eager is None:
            return asyncio.Task(work, loop=loop, **options)
        task: asyncio.Task[Any] = eager(loop, work, **options)
        return task

    order: list[Any] = []

    async def hear(params: Any, context: Any) -> None:
        order.append(params)

    async def handle(params: Any, context: Any) -> Any:
        order.append("asked")
        context.after_response(later)
        return {}

    async def later() -> None:
        order.append("after")

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        async with linked() as link:
            link.side.hear("x/at once", at_once=lambda params, _context: order.append(params))
            link.side.hear("x/y", hear)
            link.side.serve("x/z", handle)
            for number in range(3):
                link.peer.tell("x/y", number)
                link.peer.call(number, "x/z")
                link.peer.tell("x/at once", "read on")
                await link.peer.answer_to(number)
                await turns()

            assert order == [
                part for number in range(3) for part in ("read on", number, "asked", "after")
            ]
            assert not link.connection.tasks
    finally:
        loop.set_task_factory(None)
    assert made == []
