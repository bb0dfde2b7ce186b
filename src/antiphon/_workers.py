"""Worker threads of a loop of ours. Loaded by the first work for one: most agents have none.

Leaves ending them within a bound to `_loops`.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Work = tuple[Future[Any], Callable[[], Any]]

__all__ = ["Workers"]

P = ParamSpec("P")
T = TypeVar("T")


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
