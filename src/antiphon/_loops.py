"""Event loops of our own, which end within a bound whatever other people's code does.

`asyncio.Runner` waits for ever for a task that ignores its cancellation, and for a worker thread
(`asyncio.to_thread`) that does not return; so does the interpreter's exit for the latter. An agent
whose client has gone must not: nobody is left to end it (field faults 35 and 36). Leaves what runs on
the loop to `_connect` and `_background`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    Work = tuple[Future[Any], Callable[[], Any]]

__all__ = ["GRACE", "Workers", "bounded_runner"]

log = logging.getLogger("antiphon.loops")

#: Tasks that are cancelled at the loop's end get this long; those that were cancelled before and are
#: still here had their time already.
GRACE = 5.0
#: Worker threads get this long after that.
WORKER_GRACE = 1.0

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def bounded_runner(
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Generator[asyncio.Runner]:
    """`asyncio.Runner`, but what does not end when it should is reported and left behind.

    Worker threads of the loop are daemons: they do not keep the process.
    """
    runner = asyncio.Runner(loop_factory=factory)
    loop = runner.get_loop()
    workers = Workers()
    loop.set_default_executor(workers)
    try:
        yield runner
    finally:
        try:
            _end_tasks(loop)
            _run_within(loop, [loop.create_task(loop.shutdown_asyncgens())])
            workers.shutdown(wait=False)
            if not workers.join(WORKER_GRACE):
                log.error("a worker thread does not return and is left behind")
        finally:
            if factory is None:
                asyncio.set_event_loop(None)
            loop.close()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    told = {task for task in tasks if task.cancelling()}
    for task in tasks:
        task.cancel()
    _run_within(loop, tasks - told)
    for task in tasks:
        if not task.done():
            if task not in told:  # the others were reported by who told them
                log.error("a task ignores cancellation and is left behind: %r", task)
        elif not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {"message": "a task failed while it was ended", "exception": error, "task": task}
            )


def _run_within(loop: asyncio.AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = set(tasks)
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))


class Workers(ThreadPoolExecutor):
    """Worker threads for a loop that are daemons, unlike those of the base class.

    Only what `Executor` promises is the same; the base is there because loops insist on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most = min(32, (os.cpu_count() or 1) + 4)
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._unemployed = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._crew: list[threading.Thread] = []
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have `fn` called by a worker. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()
        with self._guard:
            if self._ended:
                msg = "the workers were sent home"
                raise RuntimeError(msg)
            self._queue.put((future, lambda: fn(*args, **kwargs)))
            if not self._unemployed.acquire(blocking=False) and len(self._crew) < self._most:
                thread = threading.Thread(target=self._serve, name="antiphon worker", daemon=True)
                self._crew.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  (as in the base)
        """Take no more work; what was taken is done, unless `cancel_futures`. Idempotent."""
        with self._guard:
            if not self._ended:
                self._ended = True
                if cancel_futures:
                    while not self._queue.empty():
                        work = self._queue.get()
                        if work is not None:
                            work[0].cancel()
                for _ in self._crew:
                    self._queue.put(None)
        if wait:
            self.join(None)

    def join(self, seconds: float | None) -> bool:
        """After `shutdown`: wait until everything is done, but not longer; tell whether it is."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._crew:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._crew)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  (handed to who asked)
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del work, future, call  # or an idle worker would keep them alive
            self._unemployed.release()
