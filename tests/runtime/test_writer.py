"""What leaves together, what leaves at once, and what becomes of a peer that does not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.link import (
    BOUND,
    SIDES,
    PlainSide,
    bounded,
    good,
    linked,
    raw,
    turns,
    update,
)

from antiphon._errors import (
    ConnectionClosed,
    LimitExceeded,
    RequestError,
)
from antiphon.runtime import Connection, FutureCall, OutboundCall
from antiphon.schema import encode_checked
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from antiphon import TelemetryEvent


async def test_frames_of_one_turn_of_the_loop_leave_in_one_send() -> None:
    async with linked() as link:
        for number in range(5):
            link.connection.notify("x/y", b"%d" % number)
        assert link.transport.sent == []

        await turns(1)

        assert [len(frames) for frames in link.transport.sent] == [5]
        assert [m["params"] for m in await link.peer.messages(5)] == [0, 1, 2, 3, 4]


async def test_the_only_call_and_the_only_answer_leave_at_once() -> None:
    async with linked() as link:
        link.side.serve("good", good)
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())

        link.connection.open_call(call, None)

        assert len(link.transport.sent) == 1
        await link.peer.messages(1)
        link.peer.respond(1, None)
        await bounded(call.future)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)
        assert [len(frames) for frames in link.transport.sent] == [1, 1]


async def test_what_was_queued_before_leaves_before_a_lone_answer() -> None:
    async def handle(params: Any, context: Any) -> Any:
        context.connection.notify("x/first", None)
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)

        assert [m.get("method", m.get("id")) for m in link.peer.frames] == ["x/first", 1]
        assert [len(frames) for frames in link.transport.sent] == [2]


async def test_a_lone_answer_waits_for_no_turn_of_the_loop_although_something_else_does() -> None:
    written: list[int] = []

    async def handle(params: Any, context: Any) -> Any:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: written.append(len(link.transport.sent)))
        context.connection.notify("x/first", None)
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)
        link.connection.notify("x/last", None)
        await turns(1)

        assert written == [1], "both have left by the next turn of the loop"
        assert [len(frames) for frames in link.transport.sent] == [2, 1]


async def test_what_frames_that_came_together_cause_leaves_together() -> None:
    async with linked() as link:
        link.peer.send(*(b'{"id":%d,"method":"unknown"}' % number for number in range(10)))
        await link.peer.messages(10)

        assert [len(frames) for frames in link.transport.sent] == [10]


async def test_much_that_is_queued_does_not_wait_for_the_end_of_the_turn() -> None:
    async with linked() as link:
        for _ in range(10):
            link.connection.notify("x/y", b'"%s"' % (b"x" * 20_000))
        assert [len(frames) for frames in link.transport.sent] == [4, 4]

        await link.peer.messages(10)
        assert [len(frames) for frames in link.transport.sent] == [4, 4, 2]


async def test_writing_goes_on_after_a_fault_in_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked("client", queue_bytes=100) as link:
        link.side.queue_updates = True

        def failing() -> None:
            raise ValueError("x")

        pause, link.transport.pause_reading = (  # type: ignore[method-assign]
            link.transport.pause_reading,
            failing,
        )
        with pytest.raises(ValueError, match="x"):
            link.connection.frames_received([update(200)])
        link.transport.pause_reading = pause  # type: ignore[method-assign]

        link.connection.notify("x/y", None)
        await link.peer.messages(1)


async def test_draining_waits_for_room_once_and_is_failed_by_the_loss() -> None:
    async with linked() as link:
        connection = link.connection
        await bounded(connection.drain())
        connection.pause_writing()
        assert connection.writing_paused
        waiting = [asyncio.create_task(connection.drain()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in waiting)

        waiting[0].cancel()  # one that gives up takes nobody with it
        await turns()
        connection.resume_writing()
        await bounded(asyncio.gather(*waiting[1:]))
        assert waiting[0].cancelled()

        connection.pause_writing()
        waiting = [asyncio.create_task(connection.drain()) for _ in range(3)]
        await turns()
        waiting[0].cancel()
        connection.connection_lost(None)
        for task in waiting[1:]:
            with pytest.raises(ConnectionClosed):
                await bounded(task)
        await bounded(connection.wait_closed())


async def test_a_slow_peer_is_felt_through_the_transport() -> None:
    async with linked() as link:
        link.peer.transport.pause_reading()
        for _ in range(10):
            link.connection.notify("x/y", b'"%s"' % (b"x" * 20_000))
        await turns(1)
        assert link.connection.writing_paused
        waiting = asyncio.create_task(link.connection.drain())
        await turns()
        assert not waiting.done()

        link.peer.transport.resume_reading()
        await bounded(waiting)

        assert not link.connection.writing_paused


BIG = b'"%s"' % (b"x" * 100_000)


async def test_a_peer_that_does_not_read_is_refused_what_it_asks() -> None:
    """And is served again as soon as it has read."""
    events: list[TelemetryEvent] = []
    async with linked(unsent_bytes=250_000, telemetry=events.append) as link:
        link.side.serve("good", good)
        link.peer.transport.pause_reading()
        for _ in range(3):
            link.connection.notify("x/y", BIG)
        await turns()

        link.peer.call(1, "good")
        await turns()
        with pytest.raises(LimitExceeded, match="unsent_bytes"):
            link.connection.open_call(OutboundCall("x/y"), None)
        link.connection.notify("x/y", None)  # what is told is told
        link.peer.transport.resume_reading()

        assert (await link.peer.answer_to(1))["error"] == {
            "code": -32603,
            "message": "Server busy",
            "data": {"reason": "limit unsent_bytes exceeded", "limit": 250_000},
        }
        link.peer.call(2, "good")
        assert (await link.peer.answer_to(2))["result"] == {"good": True}
        assert not link.connection.closed
        link.peer.transport.pause_reading()
        for _ in range(4):  # it is told of again, once
            link.connection.notify("x/y", BIG)
            await turns(1)
        link.peer.transport.resume_reading()
        await turns()
        told = [event.facts for event in events if event.name == "peer_not_reading"]
        assert [(facts["limit"], facts["closed"]) for facts in told] == [(250_000, False)] * 2
        assert told[0]["unsent_bytes"] > 300_000
        assert [event.facts["id"] for event in events if event.name == "inbound_shed"] == ["1"]


async def test_a_peer_that_asks_and_never_reads_is_closed() -> None:
    """Its own answers are what would fill our memory."""

    async def serve(params: Any, context: Any) -> Any:
        return "x" * 100_000

    async with linked(unsent_bytes=250_000) as link:
        link.side.serve("x/big", serve)
        call = FutureCall("x/y", link.connection.create_future())
        link.connection.open_call(call, None)
        await link.peer.messages(1)
        link.peer.transport.pause_reading()
        for number in range(2000):
            link.peer.call(number, "x/big")
            await turns(2)
            if link.connection.closed:
                break
            assert link.connection.transport.unsent < 700_000

        with pytest.raises(ConnectionClosed, match="the peer does not read") as caught:
            await bounded(call.future)
        assert "limit unsent_bytes of 250000" in str(caught.value)
        await bounded(link.connection.wait_closed())


async def test_what_a_sender_cannot_wait_with_closes_the_connection_later_not_inside() -> None:
    """Whoever sends is in the middle of something: the loss comes in a later turn of the loop."""
    async with linked(unsent_bytes=100_000) as link:
        link.peer.transport.pause_reading()
        for _ in range(5):
            link.connection.notify("x/y", BIG)
            assert not link.connection.closed

        await bounded(link.connection.wait_closed())
        with pytest.raises(ConnectionClosed, match="does not read"):
            link.connection.notify("x/y", BIG)


async def test_two_sides_that_flood_each_other_with_requests_do_not_deadlock() -> None:
    """Reading never stops for output that waits."""
    here, there = memory_pair()
    sides = PlainSide(), PlainSide()
    ends = [
        Connection(transport, role, side)
        for transport, role, side in zip((here, there), SIDES, sides, strict=True)
    ]
    for end, side in zip(ends, sides, strict=True):
        side.connection = end
        end.initialized = True

        async def serve(params: Any, context: Any) -> Any:
            return params

        side.serve("x/echo", serve)
        await end.start()

    asked = [
        end.request("x/echo", b'"%d %s"' % (number, b"x" * 50_000), BOUND)
        for number in range(20)
        for end in ends
    ]
    answers = await bounded(asyncio.gather(*asked))

    assert [raw(answer).split()[0] for answer in answers[::2]] == [str(n) for n in range(20)]
    for end in ends:
        await bounded(end.aclose())


@pytest.mark.covers("R1-2")
async def test_every_frame_is_one_line_of_json() -> None:
    text = "a\nb\r\nc\u2028\u2029\u0085\x00d"

    async def handle(params: Any, context: Any) -> Any:
        if params["fail"]:
            raise RequestError(-32000, text, {text: text})
        return {text: text}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.connection.notify(text, encode_checked(text))
        link.peer.call(text, "x/y", {"fail": True})
        link.peer.call(1, "x/y", {"fail": False})
        link.peer.call(2, text)
        await link.peer.messages(4)

        assert not any(b"\n" in frame or b"\r" in frame for frame in link.peer.raw_frames)
        assert (await link.peer.answer_to(text))["error"]["data"] == {text: text}
        assert (await link.peer.answer_to(1))["result"] == {text: text}


async def test_every_frame_is_recorded_once_in_its_order() -> None:
    seen: list[tuple[str, bytes]] = []

    def record(way: str, frame: bytes) -> None:
        seen.append((way, frame))

    async with linked(record=record) as link:
        link.side.serve("good", good)
        link.peer.send(b'{"id":1,"method":"good"}', b"{", b'{"method":"x"}')
        await link.peer.messages(2)
        link.connection.notify("x/y", None)
        await link.peer.messages(3)

        assert [frame for way, frame in seen if way == "in"] == [
            b'{"id":1,"method":"good"}',
            b"{",
            b'{"method":"x"}',
        ]
        assert [frame for way, frame in seen if way == "out"] == link.peer.raw_frames
        assert seen[0] == ("in", b'{"id":1,"method":"good"}')


async def test_who_sends_without_end_waits_for_the_loop_although_the_peer_takes_everything() -> (
    None
):
    async with linked() as link:
        connection, frame = link.connection, b"%200d" % 0
        link.transport.send = lambda frames: None  # type: ignore[method-assign]
        sent = 0
        while not connection.writing_paused:
            connection.send(frame)
            sent += len(frame)
        assert (1 << 18) < sent < (1 << 19)

        waiting = asyncio.create_task(connection.drain())
        await turns(1)  # in which the task begins to wait, and the turn that was too long is over
        await bounded(waiting)

        assert not connection.writing_paused
        # A new turn has its whole share again.
        for _ in range(100):
            connection.send(frame)
        assert not connection.writing_paused


async def test_the_end_of_a_turn_of_the_loop_is_no_room_at_a_peer_that_asked_for_patience() -> None:
    async with linked() as link:
        connection = link.connection
        link.transport.send = lambda frames: None  # type: ignore[method-assign]
        while not connection.writing_paused:
            connection.send(b"%200d" % 0)
        connection.pause_writing()
        waiting = asyncio.create_task(connection.drain())
        await turns(5)
        assert connection.writing_paused
        assert not waiting.done()

        connection.resume_writing()
        await bounded(waiting)
