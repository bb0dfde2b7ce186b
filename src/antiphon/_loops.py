"""Event loops of our own, which end within a bound whatever other people's code does.

`asyncio.Runner` waits for ever for a task that ignores its cancellation, and for a worker thread
(`asyncio.to_thread`) that does not return; so does the interpreter's exit for the latter. An agent
whose client has gone must not: nobody is left to end it (field faults 35 and 36). Leaves what runs on
the loop to `_connect` and `_background`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from antiphon._workers import Workers

__all__ = ["GRACE", "bounded_runner"]

log = logging.getLogger("antiphon.loops")

#: Tasks that are cancelled at the loop's end get this long; those that were cancelled before and are
#: still here had their time already.
GRACE = 5.0
#: Worker threads get this long after that.
WORKER_GRACE = 1.0


@contextmanager
def bounded_runner(
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Generator[asyncio.Runner]:
    """`asyncio.Runner`, but what does not end when it should is reported and left behind.

    Worker threads of the loop are daemons: they do not keep the process.
    """
    runner = asyncio.Runner(loop_factory=factory)
    loop = runner.get_loop()
    employment = _Employment(loop)
    try:
        yield runner
    finally:
        try:
            _end_tasks(loop)
            _run_within(loop, [loop.create_task(loop.shutdown_asyncgens())])
            workers = employment.end()
            if workers is not None:
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


class _Employment:
    """Gives a loop its workers when it is first given work for its default executor.

    No start of an agent waits for `concurrent.futures.thread`, then. A loop that takes no attributes
    has workers at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._workers: Workers | None = None
        self._guard = threading.RLock()  # a signal may come in between
        self._due = True  # nobody has given the loop an executor yet
        # What stands in for the loop's own methods until then.
        self._doors: dict[str, Callable[..., Any]] = {
            "run_in_executor": self._run_in_executor,
            "set_default_executor": self._set_default_executor,
        }
        try:
            vars(loop).update(self._doors)
        except TypeError:
            self._employ()

    def _run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            self._employ()
        return type(self._loop).run_in_executor(self._loop, executor, func, *args)

    def _set_default_executor(self, executor: Any) -> None:
        with self._guard:
            type(self._loop).set_default_executor(self._loop, executor)  # it may refuse that one
            self._withdraw()

    def _employ(self) -> None:
        # Whoever has kept one of the methods from before comes here again, from any thread.
        with self._guard:
            if not self._due:
                return
            from antiphon._workers import Workers

            self._workers = Workers()
            type(self._loop).set_default_executor(self._loop, self._workers)
            self._withdraw()

    def _withdraw(self) -> None:
        self._due = False
        for name, door in self._doors.items():
            # What somebody else has put over it stays.
            if getattr(self._loop, name) == door:
                delattr(self._loop, name)

    def end(self) -> Workers | None:
        """The workers, if there are any; there will be none after this."""
        with self._guard:
            if self._due:
                self._withdraw()
        return self._workers
