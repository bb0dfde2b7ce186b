"""Requests that are answered after their handler has returned.

`ctx.defer()` gives a handler a `Reply` to hand on, and the handler returns `DEFERRED`. What waits in
its place is an `Obligation`: the request's task stands still in it, so that whatever else belongs to
the request (its place in the table, what a side does around the handler, cancellation, the end of the
connection) needs no second way. Responsible for who may discharge an obligation and for noticing that
nobody can any more. Leaves the response itself, one per id, to `_incoming`.

Source: runtime-semantics §6.1 and §7.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Never

from antiphon._errors import InternalError, RequestCancelled
from antiphon.runtime._telemetry import shown_id, shown_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.runtime._connection import Connection
    from antiphon.runtime._incoming import InboundCall

__all__ = ["DEFERRED", "DEFERRED_MARK", "Obligation", "Reply", "deferrable", "settled"]

log = logging.getLogger("antiphon.connection")


class _Deferred:
    def __repr__(self) -> str:
        return "antiphon.DEFERRED"


#: The same as `DEFERRED`, for comparing with it.
DEFERRED_MARK: Final[Any] = _Deferred()
#: What a handler returns whose `Reply` will be sent by somebody else. It has the type that may stand
#: for any other, so a handler keeps the result type of its method.
DEFERRED: Final[Never] = DEFERRED_MARK


class Obligation:
    """A response that is owed, between the request's task and its `Reply`."""

    __slots__ = ("_call", "_connection", "_listeners", "_outcome", "_replied", "_waiters")

    def __init__(self, connection: Connection, call: InboundCall) -> None:
        self._connection = connection
        self._call = call
        self._outcome: asyncio.Future[tuple[Any, BaseException | None]] = connection.create_future()
        self._replied = False  # by its Reply, not in any other way
        self._listeners: list[Callable[[], object]] = []
        self._waiters: list[asyncio.Future[None]] = []

    async def result(self) -> Any:
        """What the request is answered with. Cancelling this releases the obligation."""
        try:
            value, error = await self._outcome
        except asyncio.CancelledError:
            self.release()
            raise
        if error is not None:
            raise error
        return value

    # ------------------------------------------------------------------ its Reply

    def discharge(self, value: Any, error: BaseException | None) -> bool:
        """Answer; False if that is too late."""
        if self._outcome.done() or self._connection.closed:
            if self._replied:
                self._connection.emit(
                    "dup_reply", id=shown_id(self._call.id), method=shown_text(self.method)
                )
            return False
        self._replied = True
        self._outcome.set_result((value, error))
        self._wake()
        return True

    @property
    def method(self) -> str:
        return self._call.method

    @property
    def over(self) -> bool:
        """Whether it is discharged or released."""
        return self._outcome.done()

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the answer any more."""
        return self._call.cancelled or self._outcome.cancelled()

    def listen(self, act: Callable[[], object]) -> None:
        """Have `act` called when nobody wants the answer any more; now, if that is so."""
        if self.cancelled:
            self._tell(act)
        elif not self._outcome.done():
            self._listeners.append(act)

    async def wait(self) -> None:
        """Wait until nobody wants the answer any more, or it was given."""
        if self.cancelled or self._outcome.done():
            return
        waiter: asyncio.Future[None] = self._connection.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def adopted_by(self, adopter: asyncio.Task[Any]) -> None:
        """Watch who will reply: when that task has ended, nobody will."""
        adopter.add_done_callback(self._adopter_ended)
        # One that answers many must not gather what it has answered.
        self._outcome.add_done_callback(lambda _: adopter.remove_done_callback(self._adopter_ended))

    def _adopter_ended(self, adopter: asyncio.Task[Any]) -> None:
        if self._outcome.done():
            return
        error = None if adopter.cancelled() else adopter.exception()
        self.drop("the task that was to reply has ended", error)

    def drop(self, why: str, cause: BaseException | None = None) -> None:
        """Nobody will reply."""
        if self._outcome.done():
            return
        if self._call.cancelled:
            self._outcome.set_result((None, RequestCancelled()))
        else:
            log.error("nobody will answer %s: %s", self.method, why, exc_info=cause)
            self._outcome.set_result((None, InternalError()))
        self._wake()

    def lost(self) -> None:
        """Its `Reply` was garbage collected; may come from any thread."""
        if not self._outcome.done():
            with suppress(RuntimeError):  # the loop is closed, and the request with it
                self._connection.call_soon_from_anywhere(self._lost)

    def _lost(self) -> None:
        self.drop("its Reply was thrown away")

    # ------------------------------------------------------------------ its request

    def cancel(self) -> bool:
        """The peer has cancelled the request: tell who listens, and whether anybody does."""
        if not self._listeners and not self._waiters:
            return False
        self._notify()
        return True

    def release(self) -> None:
        """The request is over without its `Reply`: whatever that says from now on is too late."""
        self._outcome.cancel()
        self._notify()

    def _notify(self) -> None:
        listeners, self._listeners = self._listeners, []
        for act in listeners:
            self._tell(act)
        self._wake()

    def _tell(self, act: Callable[[], object]) -> None:
        self._connection.run_soon(act, "what was to run at a cancellation")

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Reply:
    """The answer of a request whose handler has returned, or will return, `DEFERRED`.

    Made by `ctx.defer()`. Whoever holds it answers, once, on the connection's loop. If it is garbage
    collected first, or the task it was made for ends, the request is answered -32603.
    """

    __slots__ = ("__weakref__", "_obligation")

    def __init__(self, obligation: Obligation) -> None:
        """Not for callers: `ctx.defer()` makes one."""
        self._obligation = obligation

    def __repr__(self) -> str:
        state = "over" if self._obligation.over else "open"
        return f"<Reply to {self._obligation.method}, {state}>"

    def __del__(self) -> None:
        self._obligation.lost()

    def send(self, result: Any = None) -> bool:
        """Answer with a result: what the handler would have returned.

        The response is queued within this turn of the loop, after what was sent before; what must
        follow it belongs into `ctx.after_response`. A result that is none of the method's is answered
        -32603 and logged, as a handler's is.

        Returns:
            False if it is too late: it was answered (by this reply: also the event `dup_reply`), or
            cancelled with nobody listening, or the link is gone.
        """
        return self._obligation.discharge(result, None)

    def fail(self, error: Exception) -> bool:
        """Answer with an error: what the handler would have raised. Returns as `send` does."""
        return self._obligation.discharge(None, error)

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the answer any more.

        The peer has cancelled the request (an answer is owed all the same), or it was answered in
        another way, or the link is gone.
        """
        return self._obligation.cancelled

    def on_cancel(self, act: Callable[[], object]) -> None:
        """Have `act` called, once, when `cancelled` becomes true; now, if it is.

        An awaitable it returns runs in a task of the connection. Who listens has to answer: without
        anybody listening, a request that the peer cancels is answered -32800 at once. `act` is kept
        until then: one that refers to this reply keeps it from being garbage collected.
        """
        self._obligation.listen(act)

    async def wait_cancelled(self) -> None:
        """Wait until `cancelled` is true, or the answer was given. Counts as listening meanwhile."""
        await self._obligation.wait()


async def settled(result: Any, call: InboundCall) -> Any:
    """What a request is answered with whose handler returned `result`; waits if that is deferred."""
    obligation = call.deferred
    if obligation is None:
        if result is DEFERRED_MARK:
            msg = f"the handler of {call.method} returned DEFERRED without ctx.defer()"
            raise TypeError(msg)
        return result
    if result is not DEFERRED_MARK and result is not None:
        msg = (
            f"the handler of {call.method} called ctx.defer() and returned "
            f"{type(result).__name__} instead of DEFERRED"
        )
        raise TypeError(msg)
    try:
        return await obligation.result()
    finally:
        call.deferred = None


def deferrable(
    handler: Callable[[Any, Any], Awaitable[Any]],
) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler that may defer, for a side that does something with what it returns."""

    async def invoke(params: Any, context: Any) -> Any:
        result = await handler(params, context)
        if result is DEFERRED_MARK or context.call.deferred is not None:
            return await settled(result, context.call)
        return result

    return invoke
