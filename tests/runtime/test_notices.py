"""Notifications: one at a time, in wire order, and never more than may wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.link import (
    BOUND,
    Gate,
    Hard,
    bounded,
    good,
    linked,
    raw,
    turns,
)

if TYPE_CHECKING:
    from antiphon import TelemetryEvent


@pytest.mark.covers("FF-20")
async def test_notifications_are_handled_one_at_a_time_in_wire_order() -> None:
    order: list[str] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        order.append(f"begin {params}")
        await turns(params % 3)
        order.append(f"end {params}")
        if params == 99:
            ready.set()

    async with linked() as link:
        link.side.hear("x/y", hear)
        for number in range(50):
            link.peer.tell("x/y", number)
        await turns(3)
        for number in range(50, 100):
            link.peer.tell("x/y", number)
        await bounded(ready.wait())

        assert order == [f"{word} {n}" for n in range(100) for word in ("begin", "end")]
        assert link.connection.queued_bytes == 0


async def test_a_notification_handler_that_fails_or_is_cancelled_loses_only_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[int] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        if params == 1:
            raise ValueError("one")
        if params == 2:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        if params == 3:
            raise Hard
        heard.append(params)
        if params == 4:
            ready.set()

    async with linked() as link:
        link.side.hear("x/y", hear)
        link.peer.send(*(b'{"method":"x/y","params":%d}' % number for number in range(5)))
        await bounded(ready.wait())

        assert heard == [0, 4]
        assert link.connection.queued_bytes == 0
        assert "a handler failed (what='notification', method='x/y'" in caplog.text


async def test_notifications_that_wait_at_the_end_are_not_begun() -> None:
    gate = Gate()
    async with linked() as link:
        link.side.hear("x/y", gate)
        link.peer.send(b'{"method":"x/y"}', b'{"method":"x/y"}')
        await gate.entered()
        began = asyncio.get_running_loop().time()

        await bounded(link.connection.aclose())

        assert asyncio.get_running_loop().time() - began < link.connection.limits.close_grace
        assert gate.ended == ["cancelled"]


@pytest.mark.covers("FF-13")
async def test_a_notification_handler_may_call_the_peer() -> None:
    results: list[Any] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        results.append(raw(await context.connection.request("peer/x", None, BOUND)))
        ready.set()

    async with linked("client") as link:
        link.side.hear("x/y", hear)
        link.peer.tell("x/y", {})
        (asked,) = await link.peer.messages(1)
        link.peer.respond(asked["id"], "answered")
        await bounded(ready.wait())

        assert results == ["answered"]


def notices(*numbers: int) -> list[bytes]:
    return [b'{"method":"x/y","params":%d}' % number for number in numbers]


@pytest.mark.parametrize("bound", ["queue_notifications", "notification_bytes"])
async def test_a_full_queue_stops_reading_and_nothing_is_lost(bound: str) -> None:
    gate = Gate()
    heard: list[int] = []
    size = len(notices(10)[0])

    async def hear(params: Any, context: Any) -> None:
        await gate(params, context)
        heard.append(params)

    limits: dict[str, Any] = {bound: 5 if bound == "queue_notifications" else 5 * size}
    async with linked(**limits) as link:
        link.side.hear("x/y", hear)
        link.side.serve("good", good)
        for number in range(10, 30):
            link.peer.send(*notices(number))
            await turns(2)

        assert link.transport.reading == ["pause"]
        assert len(link.side.contexts) == 5
        link.peer.call(1, "good")
        gate.open()
        await link.peer.answer_to(1)
        await turns()

        assert heard == list(range(10, 30))
        assert set(link.transport.reading) == {"pause", "resume"}
        assert link.transport.reading[-1] == "resume"
        assert link.connection.queued_bytes == 0


async def test_a_batch_that_was_read_already_is_kept_however_many_it_has() -> None:
    heard: list[int] = []

    async def hear(params: Any, context: Any) -> None:
        await turns(1)
        heard.append(params)

    async with linked(queue_notifications=5) as link:
        link.side.hear("x/y", hear)
        link.side.serve("good", good)
        link.peer.send(*notices(*range(50)))
        await turns(2)
        link.peer.call(1, "good")

        await link.peer.answer_to(1)
        assert heard[:40] == list(range(40))
        await turns(20)
        assert heard == list(range(50))


@pytest.mark.virtual_time
async def test_a_handler_that_is_stuck_stops_nothing_else_for_ever() -> None:
    """When it has made no progress for a time, reading goes on, and what comes is let go and told."""
    gate = Gate()
    heard: list[Any] = []
    events: list[TelemetryEvent] = []

    async def hear(params: Any, context: Any) -> None:
        await gate(params, context)
        heard.append(params)

    async with linked(
        queue_notifications=3, notification_timeout=3, telemetry=events.append
    ) as link:
        link.side.hear("x/y", hear)
        link.side.hear("x/now", at_once=lambda params, _context: heard.append(params))
        link.side.serve("good", good)
        link.peer.send(*notices(0, 1, 2))
        await turns()
        assert link.transport.reading == ["pause"]

        link.peer.send(*notices(3, 4), b'{"method":"x/now","params":"at once"}')
        link.peer.call(1, "good")
        assert (await link.peer.answer_to(1))["result"] == {"good": True}

        assert link.transport.reading == ["pause", "resume"]
        assert heard == ["at once"]
        assert [event.facts for event in events if event.name == "notification_shed"] == [
            {"method": "x/y", "waiting": 3, "limit": 3}
        ] * 2
        # As soon as it goes on, so does everything.
        gate.open()
        await turns()
        link.peer.send(*notices(5))
        link.peer.call(2, "good")
        await link.peer.answer_to(2)
        await turns()
        assert heard == ["at once", 0, 1, 2, 5]


@pytest.mark.virtual_time
async def test_a_handler_that_is_slow_is_waited_for() -> None:
    """Any progress within the time is enough: nothing is let go."""
    heard: list[int] = []
    events: list[TelemetryEvent] = []
    gates = [Gate() for _ in range(12)]

    async def hear(params: Any, context: Any) -> None:
        await gates[params](params, context)
        heard.append(params)

    async with linked(
        queue_notifications=3, notification_timeout=3, telemetry=events.append
    ) as link:
        link.side.hear("x/y", hear)
        loop = asyncio.get_running_loop()
        for number, gate in enumerate(gates):
            loop.call_later(2 * (number + 1), gate.open)
        for number in range(10):
            link.peer.send(*notices(number))
            await turns(2)
        for number in (10, 11):  # while the queue is full, and longer than the time allowed
            loop.call_later(number / 2, link.peer.send, *notices(number))

        await asyncio.sleep(2 * 12 + 1)

        assert heard == list(range(12))
        assert not [event for event in events if event.name == "notification_shed"]


async def test_a_handler_that_calls_the_peer_gets_its_answer_past_a_full_queue() -> None:
    """Reading goes on while somebody waits for an answer; twice the limit is the end of that."""
    answers: list[Any] = []
    events: list[TelemetryEvent] = []

    async def hear(params: Any, context: Any) -> None:
        answers.append(raw(await link.connection.request("x/z", None, BOUND)))

    async with linked(queue_notifications=3, telemetry=events.append) as link:
        link.side.hear("x/y", hear)
        link.peer.send(*notices(0))
        await link.peer.messages(1)
        link.peer.send(*notices(1, 2, 3, 4, 5, 6, 7))
        await turns()
        assert link.transport.reading == []
        shed = [event for event in events if event.name == "notification_shed"]
        assert len(shed) == 2

        for number in range(1, 7):
            await link.peer.messages(number)
            link.peer.respond(number, number)

        await turns()
        assert answers == [1, 2, 3, 4, 5, 6]


async def test_notifications_have_the_position_of_their_frames() -> None:
    seen: list[int] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        seen.append(context.rx_seq)
        if len(seen) == 2:
            ready.set()

    async with linked() as link:
        link.side.hear("x/y", hear)
        link.peer.send(*notices(1), b"{", *notices(2))
        await bounded(ready.wait())

    assert seen == [1, 3]
