"""Time jumps when nothing is left to do, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import threading
import time

import pytest

from antiphon.testing import Stuck, VirtualTimeLoop, run_virtual


@pytest.mark.virtual_time
async def test_a_marked_test_runs_on_a_loop_whose_hours_take_no_time() -> None:
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    assert isinstance(loop, VirtualTimeLoop)
    assert loop.time() == 0.0
    await asyncio.sleep(7200)
    assert loop.time() == 7200.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600):
            await asyncio.Event().wait()
    assert loop.time() == 7800.0
    called = asyncio.Event()
    loop.call_later(60, called.set)
    await called.wait()
    assert loop.time() == 7860.0
    assert time.monotonic() - began < 5


async def test_an_unmarked_test_runs_in_real_time() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


@pytest.mark.virtual_time
async def test_everything_that_is_ready_runs_before_time_moves() -> None:
    order: list[str] = []

    async def busy() -> None:
        for turn in range(100):
            await asyncio.sleep(0)
            order.append(f"turn {turn}")
        assert asyncio.get_running_loop().time() == 0.0

    async def late() -> None:
        await asyncio.sleep(1e-6)
        order.append("late")

    await asyncio.gather(late(), busy())
    assert order[-1] == "late"
    assert len(order) == 101


@pytest.mark.virtual_time
async def test_timers_run_in_their_order_however_they_were_set() -> None:
    order: list[float] = []
    loop = asyncio.get_running_loop()
    for delay in (5.0, 0.25, 3.0, 1e9, 0.5):
        loop.call_later(delay, order.append, delay)
    await asyncio.sleep(4)
    assert order == [0.25, 0.5, 3.0]


def test_the_order_is_the_same_in_every_run() -> None:
    async def race() -> list[int]:
        order: list[int] = []

        async def runner(number: int) -> None:
            for lap in range(5):
                await asyncio.sleep((number * 7 + lap * 3) % 5 / 10)
                order.append(number)

        await asyncio.gather(*map(runner, range(20)))
        return order

    first = run_virtual(race())
    assert all(run_virtual(race()) == first for _ in range(5))


def test_the_result_and_the_exception_are_those_of_the_coroutine() -> None:
    async def seven() -> int:
        await asyncio.sleep(100)
        return 7

    async def wrong() -> None:
        await asyncio.sleep(100)
        raise ZeroDivisionError

    assert run_virtual(seven()) == 7
    with pytest.raises(ZeroDivisionError):
        run_virtual(wrong())


async def test_within_a_running_loop_it_is_refused_and_leaves_nothing_to_warn_of() -> None:
    main = asyncio.sleep(5)

    with pytest.raises(RuntimeError, match="a loop is running already"):
        run_virtual(main)

    assert inspect.getcoroutinestate(main) == inspect.CORO_CLOSED
    assert await asyncio.to_thread(lambda: run_virtual(asyncio.sleep(5, "done"))) == "done"


def test_a_deadlock_is_an_error_that_names_the_tasks_and_where_they_wait() -> None:
    cancelled: list[str] = []

    async def the_lock_nobody_opens(lock: asyncio.Lock) -> None:
        try:
            await lock.acquire()
        except asyncio.CancelledError:
            cancelled.append("yes")
            await asyncio.sleep(1)  # what cleans up may take its time
            raise

    async def main() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        async with asyncio.TaskGroup() as group:
            group.create_task(the_lock_nobody_opens(lock), name="the one that waits")

    with pytest.raises(Stuck, match="nothing is scheduled and nothing is ready") as caught:
        run_virtual(main())
    assert "* the one that waits" in str(caught.value)
    assert "await lock.acquire()" in str(caught.value)
    assert "async with asyncio.TaskGroup() as group" in str(caught.value)
    assert len(caught.value.tasks) == 2
    assert cancelled == ["yes"]


def test_a_run_that_never_ends_is_stopped_at_its_bound() -> None:
    ticks: list[float] = []

    async def ticking() -> None:
        try:
            while True:
                await asyncio.sleep(10)
                ticks.append(asyncio.get_running_loop().time())
        finally:
            await asyncio.sleep(50)  # what cleans up may take its time
            ticks.append(0.0)

    with pytest.raises(Stuck, match="not done after 100 s of virtual time") as caught:
        run_virtual(ticking(), bound=100)
    assert ticks == [*(10.0 * n for n in range(1, 11)), 0.0]
    assert "await asyncio.sleep(10)" in str(caught.value)


@pytest.mark.virtual_time
async def test_time_does_not_jump_over_a_call_in_a_thread() -> None:
    release = threading.Event()
    async with asyncio.timeout(3600):
        # Without the wait for the thread, the timer below would fire at once.
        asyncio.get_running_loop().call_later(0.05, release.set)
        assert await asyncio.to_thread(release.wait, 20)
    assert asyncio.get_running_loop().time() < 20
    # The pool's idle thread is no reason to wait.
    before = time.monotonic()
    await asyncio.sleep(3600)
    assert time.monotonic() - before < 20


@pytest.mark.virtual_time
async def test_time_does_not_jump_over_a_thread_of_somebody_s_own() -> None:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    go = threading.Event()

    def work() -> None:
        go.wait(20)
        loop.call_soon_threadsafe(came.set)

    thread = threading.Thread(target=work)
    thread.start()
    loop.call_later(0.01, go.set)
    async with asyncio.timeout(30):
        await came.wait()
    thread.join()
    assert loop.time() < 20


@pytest.mark.virtual_time
async def test_time_does_not_jump_while_a_socket_may_bring_something() -> None:
    loop = asyncio.get_running_loop()
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        loop.call_later(0.01, other.send, b"x")
        async with asyncio.timeout(3600):
            assert await loop.sock_recv(one, 1) == b"x"
        assert 0.01 <= loop.time() < 20


@pytest.mark.virtual_time
async def test_time_does_not_jump_over_a_child_process() -> None:
    async with asyncio.timeout(3600):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(7)", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
    assert output == b"7" + os.linesep.encode()
    assert child.returncode == 0
    assert 0 < asyncio.get_running_loop().time() < 25


def test_patience_with_what_is_outside_ends() -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            await asyncio.get_running_loop().sock_recv(one, 1)

    with pytest.raises(Stuck, match=r"nothing came from outside \(descriptors\) for 0\.\d+ s"):
        run_virtual(main(), patience=0.1)


def test_a_thread_that_ends_without_a_word_is_no_hope() -> None:
    async def main() -> None:
        thread = threading.Thread(target=time.sleep, args=(0.02,))
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            thread.join()

    with pytest.raises(Stuck, match="nothing is scheduled"):
        run_virtual(main(), patience=20)


def test_a_thread_that_never_ends_is_named() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(20,), name="the one that holds us up")

    async def main() -> None:
        thread.start()
        await asyncio.Event().wait()

    try:
        with pytest.raises(Stuck, match=r"threads: the one that holds us up"):
            run_virtual(main(), patience=0.1)
    finally:
        release.set()
        thread.join()


def test_what_a_cancelled_call_in_a_thread_still_does_is_not_waited_for() -> None:
    release = threading.Event()

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.to_thread(release.wait, 20)
        before = time.monotonic()
        await asyncio.sleep(1000)
        assert time.monotonic() - before < 15
        release.set()

    run_virtual(main())
