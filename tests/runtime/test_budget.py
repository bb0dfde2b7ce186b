"""What waits is counted, and reading stops and goes on by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.runtime.link import (
    BOUND,
    bounded,
    good,
    linked,
    raw,
    turns,
    update,
)

from antiphon._errors import (
    LimitExceeded,
)
from antiphon.runtime import FutureCall, OutboundCall


async def test_reading_stops_past_the_budget_and_goes_on_when_room_is_made() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.side.serve("good", good)
        for _ in range(20):
            link.peer.send(update(100))
            await turns(2)

        assert len(link.side.updates) == 11  # the first past the budget is taken
        assert link.connection.queued_bytes == 1100
        assert link.transport.reading == ["pause"]

        link.connection.release(50)
        assert link.transport.reading == ["pause"]
        link.connection.release(50)
        assert link.transport.reading == ["pause", "resume"]
        # All the rest came together with the first, and is one delivery: the budget is looked at
        # once for each.
        await turns()
        assert len(link.side.updates) == 20
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.release(link.connection.queued_bytes)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)


async def test_while_a_call_may_be_awaited_reading_goes_on_into_the_overdraft() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        for _ in range(15):
            link.peer.send(update(100))
            await turns(2)
        assert link.transport.reading == []
        link.peer.respond(1, "behind the updates")

        assert raw(await bounded(task)) == "behind the updates"
        assert len(link.side.updates) == 15
        assert link.transport.reading == ["pause"]  # nobody waits for an answer any more
        link.connection.release(1500)


async def test_a_call_whose_caller_gave_up_keeps_no_reading_alive() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None, BOUND)
        assert call.patience == BOUND

        link.connection.abandon(call)
        link.peer.send(*[update(100)] * 12)
        await turns(2)

        assert call.patience is None
        assert link.transport.reading == ["pause"]
        link.connection.release(1200)


async def test_a_call_made_while_reading_is_stopped_starts_it_again() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.peer.send(*[update(100)] * 12)
        await turns(2)
        assert link.transport.reading == ["pause"]

        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)
        link.peer.respond(1, "answered")

        assert raw(await bounded(task)) == "answered"
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.release(1200)
        assert link.transport.reading[-1] == "resume"


async def test_an_open_turn_does_not_keep_reading_alive() -> None:
    class Prompt(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None: ...

    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.connection.open_call(Prompt("session/prompt", blocking=False), None)
        link.peer.send(*[update(100)] * 12)
        await turns(2)

        assert link.transport.reading == ["pause"]
        link.connection.release(1200)


async def test_past_the_overdraft_the_call_fails_and_so_does_the_next() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        link.peer.send(*[update(100)] * 21)

        with pytest.raises(LimitExceeded) as caught:
            await bounded(task)
        assert (caught.value.limit, caught.value.maximum) == ("queue_bytes", 1000)
        assert caught.value.size == 2100
        assert link.transport.reading == ["pause"]
        assert (await link.peer.messages(2))[1]["params"] == {"requestId": 1}
        with pytest.raises(LimitExceeded):
            await link.connection.request("x/y", None, BOUND)
        assert link.transport.reading == ["pause"]
        assert len(link.peer.raw_frames) == 2

        link.connection.release(1000)  # in the overdraft still: a call is possible again
        task = asyncio.create_task(link.connection.request("x/z", None, BOUND))
        await link.peer.messages(3)
        link.peer.respond(2, "answered")
        assert raw(await bounded(task)) == "answered"
        link.connection.release(1100)


async def test_past_the_overdraft_reading_stops_for_a_call_that_can_wait() -> None:
    class Patient(FutureCall):
        def can_wait(self) -> bool:
            return True

    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        patient = Patient("x/patient", asyncio.get_running_loop().create_future())
        link.connection.open_call(patient, None, BOUND)
        other = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(2)
        link.peer.send(*[update(100)] * 15)
        await turns(2)
        assert link.transport.reading == []
        link.peer.send(*[update(100)] * 6)
        with pytest.raises(LimitExceeded):
            await bounded(other)
        assert not patient.future.done()
        assert link.transport.reading == ["pause"]
        link.connection.release(200)
        assert link.transport.reading == ["pause", "resume"]
        link.peer.respond(1, "in the end")
        assert raw(await bounded(patient.future)) == "in the end"
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.release(1900)


async def test_many_small_updates_spend_the_budget_as_well() -> None:
    async with linked("client", queue_updates=10) as link:
        link.side.queue_updates = True
        for _ in range(20):
            link.peer.send(update(80))
            await turns(2)

        assert len(link.side.updates) == 11
        assert link.transport.reading == ["pause"]
        link.connection.release(80, 1)
        assert link.transport.reading == ["pause", "resume"]
        link.connection.release(800, 10)
        await turns()
        assert len(link.side.updates) == 20
        link.connection.release(720, 9)
        assert (link.connection.queued_bytes, link.connection.queued_updates) == (0, 0)


async def test_a_turn_that_somebody_comes_to_wait_for_starts_reading_again() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        call = OutboundCall("x/turn", blocking=False)
        link.connection.open_call(call, None)
        link.peer.send(*[update(100)] * 12)
        await turns()
        assert link.transport.reading == ["pause"]

        link.connection.set_blocking(call, blocking=True)
        link.connection.set_blocking(call, blocking=True)
        assert link.transport.reading == ["pause", "resume"]

        link.connection.set_blocking(call, blocking=False)
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.set_blocking(call, blocking=True)
        link.connection.abandon(call)
        assert link.connection.blocking_calls == 0
        link.connection.set_blocking(call, blocking=False)  # it is over
        assert link.connection.blocking_calls == 0
        link.connection.release(1200, 12)


async def test_whoever_wants_to_know_is_told_now_and_then_while_much_waits() -> None:
    async with linked("client", queue_bytes=1_000_000, session_bytes=1000) as link:
        link.side.queue_updates = True
        looks: list[int] = []
        link.connection.on_crowded = lambda: looks.append(link.connection.queued_bytes)
        for count in (10, 1, 15, 1):
            for _ in range(count):
                link.peer.send(update(100))
                await turns(2)
            if count == 10:
                assert looks == []  # not more than its share
            elif count == 15:
                assert looks == [1100]
        assert looks == [1100, 2700]  # each look costs as much as there are sessions
        link.connection.release(2700)
        for _ in range(11):
            link.peer.send(update(100))
            await turns(2)
        assert looks == [1100, 2700, 1100]  # crowded anew
        link.connection.release(1100)


async def test_when_the_budget_is_spent_the_sessions_are_looked_at_in_any_case() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        looks: list[bool] = []
        link.connection.on_crowded = lambda: looks.append(link.connection.reading_paused)
        link.peer.send(*[update(100)] * 11)
        await turns(2)
        assert looks == [False]  # before reading stops: they may let go of something
        assert link.transport.reading == ["pause"]
        link.connection.release(1100)
