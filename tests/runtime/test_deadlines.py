"""When calls time out: at their own time, each once, whatever else waits."""

from __future__ import annotations

import asyncio
import random
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from tests.runtime.link import linked, turns

from antiphon._errors import RequestTimeout
from antiphon.runtime import FutureCall, OutboundCall
from antiphon.runtime._deadlines import Deadlines
from antiphon.testing import run_virtual


class Call(OutboundCall):
    """A call that nobody answers."""

    def __init__(self) -> None:
        super().__init__("x/y")


def timers() -> list[asyncio.TimerHandle]:
    """What the loop has scheduled for later and has not been cancelled."""
    scheduled: Any = asyncio.get_running_loop()
    return [handle for handle in scheduled._scheduled if not handle.cancelled()]


@pytest.mark.parametrize("seed", range(20))
def test_each_call_expires_at_its_own_time_unless_it_was_taken_before(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        expired: list[tuple[OutboundCall, float, float]] = []
        deadlines = Deadlines(loop, lambda call, s: expired.append((call, s, loop.time())))
        due: dict[OutboundCall, tuple[float, float]] = {}
        lengths = [rng.choice((0.0, 1.0, 2.0, 2.5, 30, 600.0, rng.random())) for _ in range(60)]
        for seconds in lengths:
            call: OutboundCall = Call()
            deadlines.put(call, seconds)
            due[call] = loop.time() + seconds, seconds
            assert len(timers()) <= 1
            if rng.random() < 0.5:
                taken = rng.choice(list(due))
                deadlines.take(taken)
                assert taken.patience is None
                if due[taken][0] > loop.time():
                    del due[taken]
                deadlines.take(taken)  # once more does nothing
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice((0, 0.3, 1.0, 7.0)))
        await asyncio.sleep(1000)
        must = {call: (seconds, at) for call, (at, seconds) in due.items()}
        seen = {call: (seconds, at) for call, seconds, at in expired}
        assert len(seen) == len(expired)
        for call, (seconds, at) in seen.items():
            given, expected = must.pop(call)
            assert given == seconds
            assert at == pytest.approx(expected, abs=1e-6)
        # Left are those that were taken in the very turn in which they were due.
        assert all(seconds == 0.0 for seconds, _ in must.values())
        assert [at for _, _, at in expired] == sorted(at for _, _, at in expired)
        assert timers() == []

    run_virtual(main())


def test_what_one_expiry_raises_keeps_no_other_from_its_own() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        told: list[Any] = []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        expired: list[OutboundCall] = []

        def expire(call: OutboundCall, seconds: float) -> None:
            expired.append(call)
            raise RuntimeError

        deadlines = Deadlines(loop, expire)
        calls = [Call() for _ in range(3)]
        for call in calls:
            deadlines.put(call, 5)
        await asyncio.sleep(6)
        assert expired == calls
        assert len(told) == 3

    run_virtual(main())


_WHO: ContextVar[int] = ContextVar("who")


@pytest.mark.parametrize("seed", range(10))
def test_an_expiry_sees_the_context_of_who_made_the_call_whoever_the_timer_was_set_for(
    seed: int,
) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        seen: dict[OutboundCall, int] = {}

        def expire(call: OutboundCall, _seconds: float) -> None:
            assert call not in seen
            seen[call] = _WHO.get()

        deadlines = Deadlines(asyncio.get_running_loop(), expire)
        made: dict[OutboundCall, int] = {}
        for number in range(30):
            call: OutboundCall = Call()
            made[call] = number
            context = copy_context()
            context.run(_WHO.set, number)
            context.run(deadlines.put, call, rng.choice((0, 1.0, 5.0, rng.random())))
            if rng.random() < 0.3:
                await asyncio.sleep(0.5)
        await asyncio.sleep(10)
        assert seen == made

    run_virtual(main())


async def test_a_timeout_is_told_in_the_context_of_the_call_that_timed_out() -> None:
    told: list[tuple[Any, int]] = []

    def note(event: Any) -> None:
        if event.name == "call_timed_out":
            told.append((event.facts["method"], _WHO.get()))

    async def ask(link: Any, number: int) -> None:
        _WHO.set(number)
        with pytest.raises(RequestTimeout):
            await link.connection.request(f"x/{number}", None, number / 1000)

    async with linked("client", telemetry=note) as link:
        await asyncio.gather(*(asyncio.create_task(ask(link, number)) for number in range(5)))
    assert sorted(told) == [(f"x/{number}", number) for number in range(5)]


def test_lengths_that_are_none_are_refused_and_leave_nothing() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), lambda call, seconds: None)
        for _ in range(20):
            length: Any = object()
            with pytest.raises(TypeError):
                deadlines.put(Call(), length)
        assert not deadlines._rows
        assert timers() == []

    run_virtual(main())


def test_lengths_that_nothing_waits_for_any_more_are_forgotten() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), lambda call, seconds: None)
        for number in range(1000):
            call = Call()
            deadlines.put(call, 10 + number / 1000)
            deadlines.take(call)
        assert len(deadlines._rows) < 20
        deadlines.close()
        assert timers() == []

    run_virtual(main())


async def test_a_closed_connection_leaves_no_timer_and_one_with_many_calls_has_one() -> None:
    async with linked("client") as link:
        before = len(timers())
        calls = [FutureCall("x/y", asyncio.get_running_loop().create_future()) for _ in range(50)]
        for number, call in enumerate(calls):
            link.connection.open_call(call, None, 100 - number)
        assert len(timers()) == before + 1
        await link.connection.aclose()
        await turns()
        assert len(timers()) == before
        assert all(call.future.done() for call in calls)


def test_a_call_that_times_out_does_so_in_time_behind_others_that_were_answered() -> None:
    async def main() -> None:
        async with linked("client") as link:
            loop = asyncio.get_running_loop()
            answered = FutureCall("x/y", loop.create_future())
            link.connection.open_call(answered, None, 10)
            await link.peer.messages(1)
            link.peer.respond(1, "answered")
            await answered.future
            await asyncio.sleep(4)
            begin = loop.time()
            with pytest.raises(RequestTimeout):
                await link.connection.request("x/y", None, 10)
            assert loop.time() - begin == pytest.approx(10, abs=1e-3)

    run_virtual(main())
