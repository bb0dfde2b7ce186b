"""An event loop in a thread of its own, and threads of the user that wait for what lives on it.

Responsible for carrying calls from any thread to the loop and their outcomes back, for questions in the
other direction, for interrupts, and for the end: of one resident, of the thread with the last one, at
the interpreter's exit. Knows nothing of agents: `sync` says what lives here and what is called.

All residents share one loop, so that what they share (a `Client` and its services) is used by one
thread only. The thread is a daemon, starts with the first resident and ends with the last.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from antiphon._errors import ConnectionClosed, LocalProtocolError
from antiphon._loops import bounded_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

__all__ = ["Resident"]

log = logging.getLogger("antiphon.sync")

#: At the interpreter's exit residents that were never closed get this long, together, to end well.
EXIT_GRACE = 5.0
#: Calls that are open when a resident ends get this long to come to their own end.
CALL_GRACE = 1.0
#: Python cannot interrupt a wait without a bound on Windows: there Ctrl-C is looked for so often.
_STEP = 0.1 if sys.platform == "win32" else None

T = TypeVar("T")
V = TypeVar("V")


class Background:
    """One event loop in one daemon thread. Made by `join`, ends when everybody has left."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.owner = os.getpid()
        self.thread = threading.Thread(target=self._run, name="antiphon sync", daemon=True)
        self._members = 0
        self._over = asyncio.Event()

    @staticmethod
    def join() -> Background:
        """The loop that is running, or a new one; `leave` it, on its own thread, in the end."""
        global _current  # noqa: PLW0603  (the one background of this process)
        with _lock:
            background = _current
            # A forked child has inherited the variable, but not the thread.
            if background is None or background.owner != os.getpid():
                background = Background()
                try:
                    background.thread.start()
                except BaseException:
                    background.loop.close()
                    raise
                _current = background
            background._members += 1
            return background

    def leave(self) -> None:
        """One member less; the last one ends the loop and the thread. Called on the loop."""
        with _lock:
            self._members -= 1
            if not self._members:
                self._retire()
                self._over.set()

    @property
    def ending(self) -> bool:
        """Whether everybody has left: the thread will be gone in a moment."""
        return self._over.is_set()

    def _retire(self) -> None:
        global _current  # noqa: PLW0603  (see join)
        if _current is self:
            _current = None

    def _run(self) -> None:
        try:
            with bounded_runner(lambda: self.loop) as runner:
                runner.run(self._wait_over())
        except BaseException:
            # Only `SystemExit` and its like leave a task: some handler wanted to end the program.
            log.exception("a handler ended the background loop")
        finally:
            with _lock:
                self._retire()
            self._over.set()
            for resident in list(_residents):
                resident.lose(self)

    async def _wait_over(self) -> None:
        await self._over.wait()


_lock = threading.Lock()
_current: Background | None = None
_residents: set[Resident[Any]] = set()


class _Call(Generic[T]):
    """What a thread waits for: a value or an exception."""

    __slots__ = ("condition", "done", "error", "task", "value")

    def __init__(self, condition: threading.Condition) -> None:
        self.condition = condition
        self.task: asyncio.Task[T] | None = None
        self.done = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def settle(self, value: T | None, error: BaseException | None) -> None:
        with self.condition:
            if not self.done:
                self.done, self.value, self.error = True, value, error
                self.condition.notify_all()

    def cancel(self) -> None:
        """Cancel the coroutine, or give it up if it was never begun; called on the loop."""
        if self.task is not None:
            self.task.cancel()
        else:
            self.settle(None, _closed())

    def result(self) -> T:
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return cast("T", self.value)


class _Question:
    """A function that a waiting thread shall call, and who on the loop waits for its result."""

    __slots__ = ("ask", "future", "loop")

    def __init__(
        self, ask: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]
    ) -> None:
        self.ask = ask
        self.loop = loop
        self.future = future

    def answer(self) -> None:
        """Call it; an interrupt goes on into the caller, and the loop gets None."""
        try:
            value = self.ask()
        except Exception as error:  # noqa: BLE001  (handed to who asked)
            self._post(None, error)
        except BaseException:
            self._post(None, None)
            raise
        else:
            self._post(value, None)

    def _post(self, value: Any, error: Exception | None) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(settle)


class Resident(Generic[T]):
    """An asynchronous context manager that lives on the background loop, used from other threads.

    Any thread may use it, several at a time.

    Args:
        manager: entered by `open`, left by `close`.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        # Reentrant: a signal handler may call while its own thread is looking around in `_wait`.
        self._condition = threading.Condition(threading.RLock())
        self._questions: deque[_Question] = deque()
        self._background: Background | None = None
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._open = False
        self._ended = False
        self._failure: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether it was closed, and everything of it is gone."""
        return self._ended

    def open(self) -> T:
        """Enter the manager and wait until it is entered; the value.

        Raises what entering raises, then nothing is left. An interrupt cancels entering and waits
        until that is done; a second one does not wait.
        """
        background = self._background = Background.join()
        opened: _Call[T] = _Call(self._condition)
        _residents.add(self)
        try:
            background.loop.call_soon_threadsafe(self._begin_life, opened)
            self._wait(opened, asking=True)
        except BaseException:
            self.stop()
            self.wait_ended()
            raise
        if not self._open:
            self.wait_ended()
            if not opened.done:
                raise _closed()
        # Anew each time, so that it runs before what was registered meanwhile (processes).
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        return opened.result()

    def call(self, work: Coroutine[Any, Any, V], *, asking: bool = True) -> V:
        """Run a coroutine on the loop and wait here for its outcome.

        Questions of the loop are answered meanwhile, in this thread, unless `asking` is false. An
        interrupt (what a signal handler raises, Ctrl-C) cancels the coroutine, waits until it has
        ended, and goes on; a second one does not wait.

        Raises:
            ConnectionClosed: the resident is closed.
            LocalProtocolError: called on the background thread, which would wait for itself.
        """
        if not self.reachable or self._ended:
            work.close()
            raise _closed()
        if self._on_loop:
            work.close()
            raise LocalProtocolError(_WAITS_FOR_ITSELF)
        call: _Call[V] = _Call(self._condition)
        try:
            self.post(partial(self._begin, call, work))
            self._wait(call, asking=asking)
        except BaseException:
            self.post(call.cancel)
            self._wait(call, asking=False)
            if call.task is None:
                work.close()  # the interrupt came before it was begun
            raise
        if not call.done:
            work.close()  # the loop ended before it could begin
            raise _closed()
        return call.result()

    async def ask(self, ask: Callable[[], V]) -> V | None:
        """Have `ask` called by a thread that waits in `call`, now or later; await its result.

        None where an interrupt ended it. Raises what it raises.
        """
        loop = asyncio.get_running_loop()
        question = _Question(ask, loop, loop.create_future())
        with self._condition:
            self._questions.append(question)
            self._condition.notify_all()
        try:
            return cast("V | None", await question.future)
        finally:
            with self._condition, suppress(ValueError):
                self._questions.remove(question)

    @property
    def reachable(self) -> bool:
        """Whether it was opened, and in this process: a forked child has inherited it without its loop."""
        return self._background is not None and self._background.owner == os.getpid()

    def post(self, act: Callable[[], object]) -> None:
        """Have `act` called on the loop, soon, if that still runs; does not wait and takes no lock."""
        if self._background is not None and self.reachable:
            with suppress(RuntimeError):  # the loop is closed
                self._background.loop.call_soon_threadsafe(act)

    def stop(self) -> None:
        """Begin to leave the manager; does not wait, takes no lock, and may be called again."""
        self.post(self._stop)

    def close(self) -> None:
        """Leave the manager and wait until it and, with the last resident, the thread are gone.

        Idempotent, and may be called by several threads. Raises what leaving raises, once. An
        interrupt ends the wait; leaving goes on.

        Raises:
            LocalProtocolError: called on the background thread.
        """
        if not self.reachable:
            return
        if self._on_loop:
            raise LocalProtocolError(_WAITS_FOR_ITSELF)
        self.stop()
        self.wait_ended()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -------------------------------------------------------------- in a waiting thread

    @property
    def _on_loop(self) -> bool:
        return (
            self._background is not None and threading.current_thread() is self._background.thread
        )

    def _wait(self, call: _Call[Any], *, asking: bool) -> None:
        """Wait until the call is done (or never will be), answering questions if `asking`."""
        while True:
            with self._condition:
                while not (call.done or self._ended or (asking and self._questions)):
                    self._condition.wait(_STEP)
                if call.done or self._ended:
                    return
                # A signal handler that called meanwhile may have answered it.
                question = self._questions.popleft() if self._questions else None
            if question is not None:
                question.answer()

    def wait_ended(self, seconds: float | None = None) -> None:
        """Wait until everything of it is gone, the thread included if it was the last."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._condition:
            while not self._ended:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._condition.wait(_STEP if left is None else min(left, _STEP or left))
        background = self._background
        if background is not None and background.ending:
            while background.thread.is_alive():
                background.thread.join(_STEP if end is None else max(0.0, end - time.monotonic()))
                if end is not None and time.monotonic() >= end:
                    return

    # -------------------------------------------------------------- on the loop

    def lose(self, background: Background) -> None:
        """The loop is gone, in whatever way: nobody may wait any longer."""
        if self._background is background:
            self._end()

    def _end(self) -> None:
        _residents.discard(self)
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def _begin_life(self, opened: _Call[T]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live(opened))

    async def _live(self, opened: _Call[T]) -> None:
        try:
            if self._stopping.is_set():
                raise asyncio.CancelledError  # noqa: TRY301  (interrupted before it began)
            async with self._manager as value:
                self._open = True
                opened.settle(value, None)
                await self._stopping.wait()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (handed over)
            # A cancellation is ours, or that of a loop that is going down.
            failure = error if isinstance(error, Exception) else None
            if self._open:
                self._failure = failure
            else:
                opened.settle(None, failure or _closed())
        finally:
            try:
                await self._end_calls()
            finally:
                assert self._background is not None
                self._background.leave()
                self._end()

    async def _end_calls(self) -> None:
        """Let open calls come to their own end: their errors say more than a cancellation."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=CALL_GRACE)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CALL_GRACE)

    def _stop(self) -> None:
        self._stopping.set()
        if self._task is not None and not self._open:
            self._task.cancel()

    def _begin(self, call: _Call[Any], work: Coroutine[Any, Any, Any]) -> None:
        if self._ended:
            work.close()
            call.settle(None, _closed())
            return
        task = call.task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            self._calls.discard(task)
            if task.cancelled():
                call.settle(None, _closed())
            elif (error := task.exception()) is not None:
                call.settle(None, error)
            else:
                call.settle(task.result(), None)

        task.add_done_callback(ended)


_WAITS_FOR_ITSELF = (
    "this runs on the background thread, which cannot wait for itself: "
    "use the context's `peer`, which is asynchronous"
)


def _closed() -> ConnectionClosed:
    return ConnectionClosed("this side closed the connection")


def _close_all() -> None:
    """At the interpreter's exit: what nobody closed ends as if somebody had, within a bound."""
    left = [resident for resident in list(_residents) if resident.reachable]
    for resident in left:
        resident.stop()
    end = time.monotonic() + EXIT_GRACE
    for resident in left:
        resident.wait_ended(max(0.0, end - time.monotonic()))
