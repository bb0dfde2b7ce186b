"""Our calls: opened, answered once, given up, timed out, or failed with the link.

Responsible for the clock of each call and for which calls fail when no answer can be read any more.
Leaves to `core.Protocol` ids and which answer belongs to which call, to `_budget` when reading stops,
and to whoever opened a call what its answer means.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from antiphon._errors import (
    ConnectionClosed,
    LimitExceeded,
    NotInitialized,
    RemoteProtocolError,
    RequestTimeout,
)
from antiphon.runtime._deadlines import Deadlines
from antiphon.runtime._telemetry import shown_id, shown_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    import msgspec

    from antiphon.core import ResponseEvent
    from antiphon.runtime._connection import Connection

__all__ = ["FutureCall", "OutboundCall", "Outgoing", "no_more_answers"]

log = logging.getLogger("antiphon.connection")


class OutboundCall:
    """A request of ours that waits for its answer; subclasses say what happens with it.

    Compared by what it is, never by value.

    Attributes:
        method: wire name.
        blocking: whether somebody may be waiting for exactly this answer. While such a call is open,
            reading goes on past a spent budget (DESIGN §4.5). False for an open turn.
        patience: the seconds after which it times out, None once it does not; while it does, `due` is when
            by the loop's clock, and `asked_in` the context that is told of it.
        way: what its frames are sent with, None for the connection's own `send`.
    """

    __slots__ = ("asked_in", "blocking", "due", "id", "method", "patience", "way")

    due: float
    asked_in: Context

    def __init__(self, method: str, *, blocking: bool = True) -> None:
        self.method = method
        self.blocking = blocking
        self.id = b""
        self.way: Callable[[bytes], None] | None = None
        self.patience: float | None = None

    def answered(self, result: Any, error: Exception | None) -> None:
        """Called once, in the reader: with the raw result, or with why there is none."""
        raise NotImplementedError

    def can_wait(self) -> bool:
        """Whether reading may stop before the answer, because what is before it is being taken."""
        return False


class FutureCall(OutboundCall):
    """A call whose raw result is awaited."""

    __slots__ = ("future",)

    def __init__(self, method: str, future: asyncio.Future[Any]) -> None:
        # One is made for each question: not by way of the base's.
        self.method = method
        self.blocking = True
        self.id = b""
        self.way = None
        self.patience = None
        self.future = future

    def answered(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
            self.future.exception()  # a caller that was cancelled meanwhile is no news


class Outgoing:
    """The calls of one connection; its methods are the connection's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._protocol = connection.protocol
        self._limits = connection.limits
        self._send = connection.send
        #: What waits for the answers that may yet come for calls that were given up.
        self._lingering: set[OutboundCall] = set()
        self._deadlines = Deadlines(connection.loop, self._expired)
        #: The peer sends nothing more, so no answer either.
        self.input_ended = False

    # ------------------------------------------------------------------ asking and telling

    def open_call(
        self,
        call: OutboundCall,
        params: bytes | msgspec.Struct | None,
        timeout: float | None = None,
        send: Callable[[bytes], None] | None = None,
    ) -> None:
        """Send a request; `call.answered` comes once, from the reader, a timeout or the close.

        `send` takes its frame in the connection's place, where something else has to leave before it,
        and the one that gives it up: that must not overtake it.

        Raises:
            ConnectionClosed: the link is gone.
            NotInitialized: before the handshake.
            TypeError, ValueError: parameters, not encoded yet, are no JSON; or `timeout` is no number.
            LimitExceeded: the frame would be over `frame_bytes`; or the peer has sent so much that
                nobody takes that no answer can be read (`queue_bytes`); or it has not taken what was
                written before (`unsent_bytes`).
        """
        connection = self._connection
        if connection.lost is not None or not connection.initialized:
            self._check_open(call.method)
        if self.input_ended:
            raise no_more_answers()
        if call.blocking and connection.queued_bytes and connection.budget_overdrawn:
            raise self._overdrawn()
        if connection.writing_paused and connection.writer.full:
            unsent = connection.transport.unsent
            raise LimitExceeded("unsent_bytes", self._limits.unsent_bytes, unsent)
        if timeout is not None:  # first: what is no number of seconds leaves no open call behind
            self._deadlines.put(call, timeout)
        try:
            call.id, frame = self._protocol.request(call.method, params, call)
        except BaseException:
            self._deadlines.take(call)
            raise
        if call.blocking:
            connection.blocking_calls += 1
            if connection.reading_paused:
                connection.check_budget()
        if send is not None:
            call.way = send
            send(frame)
        else:
            self._send(frame, now=len(self._protocol.calls) == 1)

    def abandon(self, call: OutboundCall) -> None:
        """Forget a call and tell the peer; `answered` will not be called. Harmless when answered."""
        frame = self._give_up_id(call)
        if frame is not None:
            self._over(call)
            (call.way or self._send)(frame)

    def disown(self, call: OutboundCall) -> None:
        """Forget a call without a word to the peer: what it asked for goes on elsewhere."""
        if self._protocol.calls.get(call.id) is call:
            del self._protocol.calls[call.id]
            self._over(call)

    async def request(self, method: str, params: bytes | None, timeout: float | None) -> Any:
        """Ask and wait for the raw result.

        Cancelling the caller abandons the call and sends `$/cancel_request`. Raises what `open_call`
        raises, `RequestError` for an error answer, `RequestTimeout`, `ConnectionClosed`.
        """
        call = FutureCall(method, self._loop.create_future())
        self.open_call(call, params, timeout)
        return await self.answer_to(call)

    async def answer_to(self, call: FutureCall) -> Any:
        """Wait for the raw result of an open call, or raise what `request` does."""
        try:
            return await call.future
        except asyncio.CancelledError:
            self.abandon(call)
            raise

    def notify(self, method: str, params: bytes | None) -> None:
        """Queue a notification. Raises `ConnectionClosed`, `NotInitialized` or `LimitExceeded`."""
        self._check_open(method)
        self._send(self._protocol.notification(method, params))

    def check_frame(self, size: int) -> None:
        """Raise `LimitExceeded` for a frame of that size, for senders that build their own."""
        if size > self._limits.frame_bytes:
            raise LimitExceeded("frame_bytes", self._limits.frame_bytes, size)

    def fail(self, call: OutboundCall, error: Exception) -> None:
        """Give a call up as a timeout does: the peer is told, the call fails. Harmless when answered."""
        frame = self._give_up_id(call)
        if frame is not None:
            (call.way or self._send)(frame)
            self._settle(call, None, error)

    def _give_up_id(self, call: OutboundCall) -> bytes | None:
        """What tells the peer, or None if the call is over; its id may linger for a late answer."""
        late = self._protocol.calls.get(call.id, call) is not call
        return None if late else self._protocol.abandon(call.id)

    def set_blocking(self, call: OutboundCall, *, blocking: bool) -> None:
        """Say that somebody waits for the answer of an open call from now on, or nobody any more."""
        if call.blocking is blocking or self._protocol.calls.get(call.id) is not call:
            return
        call.blocking = blocking
        if blocking:
            self._connection.blocking_call_opened()
        else:
            self._connection.blocking_call_over()

    def linger(self, call: OutboundCall, late: OutboundCall, seconds: float) -> None:
        """Let `late` have the answer that may yet come for an abandoned call, or its absence."""
        late.id = call.id
        self._protocol.calls[late.id] = late
        self._lingering.add(late)
        self._deadlines.put(late, seconds)

    def _check_open(self, method: str) -> None:
        if self._connection.lost is not None:
            raise self._connection.lost_error()
        if not self._connection.initialized and method != "initialize":
            msg = f"{method} before initialize"
            raise NotInitialized(msg)

    # ------------------------------------------------------------------ the doors a call leaves by

    def answered(self, event: ResponseEvent) -> None:
        """The peer's answer."""
        error, call = event.error, event.call
        if error is not None and isinstance(error, (RemoteProtocolError, LimitExceeded)):
            self._connection.emit(
                "malformed_response", id=shown_id(call.id), reason=shown_text(str(error))
            )
        self._over(call)
        call.answered(event.result, error)

    def _expired(self, call: OutboundCall, seconds: float) -> None:
        if self._protocol.calls.get(call.id) is not call:
            return
        if call in self._lingering:  # the peer was told when it was given up
            del self._protocol.calls[call.id]
            self._settle(call, None, RequestTimeout(call.method, seconds))
        else:
            self._connection.emit("call_timed_out", method=call.method, seconds=seconds)
            self.fail(call, RequestTimeout(call.method, seconds))

    def fail_all(self, calls: list[OutboundCall]) -> None:
        """The link is gone: fail what was open, each call with an exception of its own."""
        self._deadlines.close()
        for call in calls:
            try:
                self._settle(call, None, self._connection.lost_error())
            except Exception:
                log.exception("a call of %s could not be failed", call.method)

    def end_input(self) -> None:
        """The peer will answer nothing more: refuse what is asked from now on."""
        self.input_ended = True

    def fail_unanswered(self) -> None:
        """Fail the calls that the end of input left without an answer."""
        for call in list(self._protocol.calls.values()):
            self._protocol.calls.pop(call.id, None)
            self._settle(call, None, no_more_answers())

    def fail_blocking(self) -> None:
        """The answers are behind more updates than may wait: nobody can wait for them (§4.5)."""
        calls = [
            call for call in self._protocol.calls.values() if call.blocking and not call.can_wait()
        ]
        if not calls:
            return
        self._connection.emit(
            "calls_over_budget",
            calls=len(calls),
            queued_bytes=self._connection.queued_bytes,
            limit=self._limits.queue_bytes,
        )
        for call in calls:
            self.fail(call, self._overdrawn())

    def _overdrawn(self) -> LimitExceeded:
        return LimitExceeded("queue_bytes", self._limits.queue_bytes, self._connection.queued_bytes)

    def _settle(self, call: OutboundCall, result: Any, error: Exception | None) -> None:
        self._over(call)
        call.answered(result, error)

    def _over(self, call: OutboundCall) -> None:
        if call.patience is not None:
            self._deadlines.take(call)
        if self._lingering:
            self._lingering.discard(call)
        if call.blocking:
            self._connection.blocking_call_over()


def no_more_answers() -> ConnectionClosed:
    """Why nothing is answered after the end of input."""
    return ConnectionClosed("the peer closed its output")
