"""An event loop whose time jumps to the next timer as soon as nothing else is left to do.

Responsible for the clock (`loop.time`), for waiting only where something may come from outside, and
for saying who waits when nothing can come any more. Leaves tasks, timers and descriptors to asyncio.

A test that waits for ten minutes of a permission dialog takes no time, and its order of events is the
same in every run. Source: trio's autojump clock, for the idea.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

__all__ = ["Stuck", "VirtualTimeLoop", "run_virtual", "stack_of"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: A thread may end without a word, so while one lives it is looked at so often, in real seconds.
_LOOK = 0.05


class Stuck(AssertionError):
    """The test cannot end, or not within its bound.

    Attributes:
        reason: one sentence.
        tasks: for each task that waits, its name and the places it waits at.
    """

    def __init__(self, reason: str, tasks: list[str]) -> None:
        super().__init__(reason, tasks)
        self.reason = reason
        self.tasks = tasks

    def __str__(self) -> str:
        return "\n".join((f"{self.reason}; the tasks:", *self.tasks))


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose `time()` starts at 0 and moves only when there is nothing to do.

    `asyncio.sleep`, `asyncio.timeout`, `call_later` and whatever else goes by the loop's clock need no
    real time. While something may come from outside (a descriptor is watched, a call runs in a thread,
    a thread started since is alive) time passes as it does for everybody. Code that looks at the
    `time` module sees real time.

    Where nothing is ready, scheduled or to be expected from outside, the loop raises `Stuck`, from
    whatever runs it.

    Args:
        bound: virtual seconds after which the loop raises `Stuck`.
        patience: real seconds for which nothing need happen while something is expected from outside;
            after that the loop raises `Stuck`, too.
    """

    def __init__(self, *, bound: float = 86400.0, patience: float = 30.0) -> None:
        self._now = 0.0
        self._bound = self._end = bound
        self._patience = patience
        self._calls_in_threads = 0
        self._executors: set[Executor] = set()
        self._threads_before = set(threading.enumerate())
        self._watch = _Watch(self._wait)
        super().__init__(self._watch)
        # What the loop watches for itself: how other threads wake it.
        self._own_descriptors = len(self._watch.get_map())

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As asyncio's; time does not jump before the call has ended."""
        future = super().run_in_executor(executor, func, *args)
        used = executor or getattr(self, "_default_executor", None)
        if used is not None:
            self._executors.add(used)
        self._calls_in_threads += 1
        future.add_done_callback(self._call_ended)
        return future

    def _call_ended(self, _future: asyncio.Future[Any]) -> None:
        self._calls_in_threads -= 1

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Stand in for the selector's wait: nothing is ready, and the next timer is so far away."""
        waited = 0.0
        while True:
            # In this order: a thread that has ended has said everything that it had to say.
            outside = self._expected_from_outside()
            events = self._watch.look(0)
            if events:
                return events
            if not outside:
                self._jump(timeout)
                return []
            if waited >= self._patience:
                raise self._stuck(f"nothing came from outside ({outside}) for {waited:g} s")
            step = self._patience - waited if outside == _DESCRIPTORS else _LOOK
            if timeout is not None:
                step = min(step, timeout)
            began = time.monotonic()
            events = self._watch.look(step)
            passed = time.monotonic() - began
            waited += passed
            self._now += passed
            if timeout is not None:
                timeout -= passed
            if events or (timeout is not None and timeout <= 0):
                return events

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise self._stuck("nothing is scheduled and nothing is ready, so this would never end")
        self._now += timeout
        if self._now > self._end:
            self._end = self._now + self._bound  # for what cleans up
            raise self._stuck(f"not done after {self._bound:g} s of virtual time")

    def _expected_from_outside(self) -> str:
        """What may still wake the loop, or nothing."""
        if self._calls_in_threads:
            return "a call in a thread"
        idle: set[threading.Thread] = set()
        for executor in self._executors:
            idle |= getattr(executor, "_threads", set[threading.Thread]())
        alive = set(threading.enumerate()) - self._threads_before - idle
        if alive:
            return "threads: " + ", ".join(sorted(thread.name for thread in alive))
        if len(self._watch.get_map()) > self._own_descriptors:
            return _DESCRIPTORS
        return ""

    def _stuck(self, reason: str) -> Stuck:
        return Stuck(reason, sorted(map(stack_of, asyncio.all_tasks(self))))


_DESCRIPTORS = "descriptors"


class _Watch(selectors.DefaultSelector):
    """The loop's selector; asks the loop how to wait."""

    def __init__(
        self, wait: Callable[[float | None], list[tuple[selectors.SelectorKey, int]]]
    ) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return self.look(0)
        return self._wait(timeout)

    def look(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait in real time."""
        return super().select(timeout)


def run_virtual(
    main: Coroutine[Any, Any, T], *, bound: float = 86400.0, patience: float = 30.0
) -> T:
    """Run a coroutine as `asyncio.run` does, on a `VirtualTimeLoop`; return what it returns.

    Args:
        main: what to run; tasks that it leaves are cancelled and awaited.
        bound: virtual seconds it may take.
        patience: real seconds for which it may wait for something outside without anything happening.

    Raises:
        Stuck: nothing can happen any more, or a bound was passed. The tasks have been cancelled.
        RuntimeError: called where a loop is running already.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        msg = (
            "a loop is running already; run_virtual is for tests that are no coroutines themselves"
        )
        raise RuntimeError(msg)

    def loop() -> VirtualTimeLoop:
        return VirtualTimeLoop(bound=bound, patience=patience)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


def stack_of(task: asyncio.Task[Any]) -> str:
    """A task's name and where it waits, through every coroutine it awaits (asyncio shows one)."""
    lines = [f"* {task.get_name()}"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            lines += traceback.format_list(traceback.extract_stack(frame, limit=1))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return "\n".join(line.rstrip() for line in lines)
