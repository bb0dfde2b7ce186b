"""Notifications: one at a time, in wire order, and never more than may wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.runtime.raw_peer import (
    BOUND,
    Gate,
    Hard,
    bounded,
    good,
    linked,
    raw,
    turns,
)


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
        (asked,) = await link.peer.have(1)
        link.peer.answer(asked["id"], "answered")
        await bounded(ready.wait())

        assert results == ["answered"]


async def test_a_flood_of_notifications_stops_the_reading_too() -> None:
    gate = Gate()
    async with linked(notification_bytes=1000) as link:
        link.side.hear("x/y", gate)
        link.side.serve("good", good)
        for _ in range(20):
            link.peer.tell("x/y", {"t": "x" * 100})
            await turns(2)

        assert link.transport.reading == ["pause"]
        assert len(link.side.contexts) < 20
        gate.open()
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)
        await link.peer.until(lambda: len(link.side.contexts) == 21)
        await turns()
        assert link.connection.queued_bytes == 0
