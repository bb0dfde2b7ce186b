"""Requests of the peer: checked, served in tasks of their own, answered exactly once.

Responsible for the order of the checks (runtime-semantics §5), for the one boundary between exceptions
and the wire (`_serve`), for what waits while the handshake is handled, and for cancellation by the
peer. Leaves to the `Router` which handler serves a method and what serving it means, to
`core.Protocol` the table of ids, and to `_reply` answers that come after their handler has returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from antiphon._errors import (
    ENDING,
    InternalError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    MethodNotFound,
    RequestCancelled,
    RequestError,
)
from antiphon.runtime._reply import DEFERRED_MARK, Obligation, settled
from antiphon.runtime._telemetry import shown_id, shown_text
from antiphon.schema import decoder

if TYPE_CHECKING:
    from antiphon.core import NotificationEvent, RequestEvent
    from antiphon.runtime._connection import Connection
    from antiphon.runtime._context import Context
    from antiphon.runtime._router import RequestRoute, Router

__all__ = ["InboundCall", "Incoming"]

log = logging.getLogger("antiphon.connection")

_COROUTINE: Final[Any] = CoroutineType


class InboundCall(msgspec.Struct, eq=False):
    """A request of the peer that is being handled.

    Compared by what it is, never by value. A struct since one is made for each prompt, and what it
    begins with then costs nothing.
    """

    id: bytes
    method: str
    #: Position of its frame among all that came on the connection, from 1.
    rx_seq: int
    #: Bytes of its frame, if it counts among what is being handled.
    size: int = 0
    cancelled: bool = False
    #: Whether it has its response. By this, not by its id, is told what may still answer: the peer
    #: may use the id again as soon as it has the response.
    answered: bool = False
    #: Whether that was a result, and what had to follow it has been done.
    followed: bool = False
    #: Whether its task has begun: one that has not would never see its own cancellation.
    started: bool = False
    #: Whether it was cancelled before that, so that its handler need not run either.
    withdrawn: bool = False
    #: Set from `ctx.defer()` until the reply.
    deferred: Obligation | None = None
    #: What is to follow its answer, if anything.
    after: list[Callable[[], object]] | None = None


class Incoming:
    """The peer's requests on one connection."""

    def __init__(self, connection: Connection, router: Router) -> None:
        self._connection = connection
        self._router = router
        self._protocol = connection.protocol
        self._limits = connection.limits
        self._writer = connection.writer
        self._send = connection.send
        #: Frames of the requests that are being handled: what they hold, their handlers may hold.
        self._bytes = 0
        #: The tasks that handle them. Not in the calls: one that holds nothing that could be part of a
        #: cycle is no business of the collector's.
        self.tasks: dict[InboundCall, asyncio.Task[None]] = {}
        #: The handshake being handled: what arrives meanwhile waits here, in order.
        self.held: list[tuple[RequestEvent | NotificationEvent, int]] | None = None

    # ------------------------------------------------------------------ the handshake

    def hold(self, event: RequestEvent | NotificationEvent, rx_seq: int) -> None:
        """Let a message wait for the end of the handshake."""
        if self.held is not None:
            self.held.append((event, rx_seq))
            self._connection.queued_bytes += len(event.frame)
            self._connection.queued_updates += 1

    def _handshake_handled(self, *, succeeded: bool) -> None:
        """Let what arrived during `initialize` through, in its order (agent side)."""
        if succeeded:
            self._connection.initialized = True
        held, self.held = self.held, None
        for event, rx_seq in held or ():
            self._connection.release(len(event.frame), 1)
            self._connection.dispatch(event, rx_seq)

    # ------------------------------------------------------------------ a request comes

    def request_received(self, event: RequestEvent, rx_seq: int) -> None:
        """Check it and start its handler, or answer at once with what is wrong with it."""
        id_, method = event.id, event.method
        call = InboundCall(id_, method, rx_seq)
        if not self._protocol.open(id_, call):
            # Answering would give that id two responses, whatever else is wrong with the second.
            self._connection.emit(
                "duplicate_inflight_id", id=shown_id(id_), method=shown_text(method)
            )
            return
        try:
            self._accept(event, call)
        except ENDING:
            raise
        except BaseException as error:  # noqa: BLE001  (the boundary)
            self._answer_error(call, error)

    def _accept(self, event: RequestEvent, call: InboundCall) -> None:
        """Check a request that is open and start its handler; raises what it is refused with."""
        connection, method = self._connection, event.method
        if connection.initialized:
            if method == "initialize":
                raise InvalidRequest({"reason": "already initialized"})
        elif method != "initialize":
            raise InvalidRequest({"method": method, "reason": "initialize required"})
        limits, writer, size = self._limits, self._writer, len(event.frame)
        if len(self._protocol.requests) > limits.inbound_requests:
            raise self._busy(call, "inbound_requests")
        if self._bytes + size > limits.inbound_bytes and self._bytes:
            raise self._busy(call, "inbound_bytes")
        if writer.paused and writer.full:
            raise self._busy(call, "unsent_bytes")
        route = self._router.request_route(method)
        if route is None:
            raise MethodNotFound(shown_text(method))
        try:
            params = route.decode(event.params)
        except RecursionError:
            raise InvalidParams("nested too deeply") from None
        except ValueError as error:  # msgspec's are among them; their text names the field
            raise InvalidParams(str(error)) from error
        if route.at_once is not None and route.at_once(params, call):
            return
        context = None
        if route.begin is not None:
            params = route.begin(params, event.params, call)
        else:
            context = self._router.context(method, event.params, params, call)
            if route.accept is not None:
                params = route.accept(params, context)
                if call.answered and route.withdraw is None:
                    return  # there was nothing to wait for
        if method == "initialize":
            self.held = []
        # No callback that forgets it at its end, as `create_task` has: `_serve` does.
        call.size = size
        self._bytes += size
        self.tasks[call] = connection.new_task(self._serve(call, route, params, context), method)

    def _busy(self, call: InboundCall, name: str) -> InternalError:
        """What is said where there is no room: too much at once, or answers that nobody takes."""
        limit = getattr(self._limits, name)
        reason = f"limit {name} exceeded"
        if name == "inbound_requests":
            reason = "too many concurrent inbound requests"
        self._connection.emit(
            "inbound_shed",
            id=shown_id(call.id),
            method=shown_text(call.method),
            reason=reason,
            limit=limit,
        )
        return InternalError({"reason": reason, "limit": limit}, "Server busy")

    async def _serve(
        self, call: InboundCall, route: RequestRoute, params: Any, context: Context | None
    ) -> None:
        """Run one handler and answer, whatever happens: the boundary between exceptions and the wire."""
        succeeded = False
        call.started = True
        try:
            try:
                if call.answered:
                    return
                if call.withdrawn:
                    if route.withdraw is not None:
                        route.withdraw(params)
                    raise RequestCancelled  # noqa: TRY301  (the same boundary answers it)
                # A thousand may have been let in at once, before the first had its answer. What an
                # `accept` has entered somewhere its handler takes out again, so that has to run.
                writer = self._writer
                if writer.paused and route.accept is None and route.begin is None and writer.full:
                    raise self._busy(call, "unsent_bytes")  # noqa: TRY301
                if route.conclude is None:
                    value = await route.invoke(params, context)
                else:
                    try:
                        value = await route.invoke(params, context)
                    except BaseException as error:  # noqa: BLE001  (it is told)
                        value = route.conclude(params, None, error)
                    else:
                        value = route.conclude(params, value, None)
                    if value.__class__ is _COROUTINE:
                        value = await value
                if value is DEFERRED_MARK or call.deferred is not None:
                    value = await settled(value, call)
                if not call.answered:
                    frame = self._protocol.result(call.id, route.encode(value))
                    call.answered = succeeded = frame is not None
                    if frame is not None:
                        self._send(frame, now=len(self._protocol.requests) == 0)
            except asyncio.CancelledError:
                if self._connection.closed:
                    raise
                self._answer_error(call, RequestCancelled())
            except ENDING as error:  # the programme ends, but the peer knows why
                # With the coroutine of a task that is gone there is nobody left to answer.
                if asyncio.current_task(self._connection.loop) is self.tasks.get(call):
                    self._answer_error(call, error)
                    self._writer.flush()
                raise
            except BaseException as error:  # noqa: BLE001  (the boundary)
                self._answer_error(call, error)
        finally:
            self._bytes -= call.size
            if call.deferred is not None:
                call.deferred.release()
            self.tasks.pop(call, None)
            if call.method == "initialize":
                self._handshake_handled(succeeded=succeeded)
        if succeeded:
            for act in call.after or ():
                self._connection.run_soon(act)
            call.followed = True

    # ------------------------------------------------------------------ its one answer

    def answer(self, call: InboundCall, body: bytes, *, stop: bool = True) -> bool:
        """Answer a request in its handler's place; False if it is answered.

        With `stop` the handler's task is cancelled; without, what it returns is let go.
        """
        frame = None if call.answered else self._protocol.result(call.id, body)
        if frame is None:
            return False
        call.answered = True
        self._send(frame)
        if stop and call.started:
            self._stop(call)
        return True

    def _stop(self, call: InboundCall) -> None:
        task = self.tasks.get(call)
        if task is not None:
            task.cancel()

    def _answer_error(self, call: InboundCall, error: BaseException) -> None:
        """Answer with an error; only a `RequestError` says anything about itself to the peer."""
        if isinstance(error, RequestError):
            code, message, data = error.code, error.message, error.data
        elif isinstance(error, LimitExceeded):
            code, message = -32603, "Internal error"
            data = {"reason": f"limit {error.limit} exceeded", "limit": error.maximum}
            log.warning("the answer to %s is refused: %s", call.method, error)
        else:
            code, message, data = -32603, "Internal error", None
            self._connection.handler_failed("request", call.method, error)
        if call.answered:
            return
        try:
            frame = self._protocol.error(call.id, code, message, data)
        except Exception:
            # The handler's error holds what is no JSON, but an answer is owed.
            log.exception("the error of %s cannot be encoded", call.method)
            frame = self._protocol.error(call.id, code, str(message))
        call.answered = frame is not None
        if frame is not None:
            self._send(frame, now=len(self._protocol.requests) == 0)

    # ------------------------------------------------------------------ cancelled by the peer

    def cancel_received(self, event: NotificationEvent) -> bool:
        """`$/cancel_request`: False if it is about no open request, and so means nothing."""
        try:
            decode = decoder(_CancelParams)
            requested = decode(event.params if event.params is not None else b"null")
        except (msgspec.DecodeError, RecursionError):
            log.debug("ignored an undecodable $/cancel_request")
            return False
        call = self._protocol.request_of(bytes(requested.request_id))
        if not isinstance(call, InboundCall):
            return False
        if not call.cancelled:
            self._cancel(call)
        return True

    def _cancel(self, call: InboundCall) -> None:
        deferred = call.deferred
        if deferred is not None and deferred.over:
            return  # its reply is on its way
        call.cancelled = True
        if self._router.cancelled(call):
            return
        if deferred is not None and deferred.cancel():
            return
        if call.started:
            self._stop(call)
        else:
            call.withdrawn = True


class _CancelParams(msgspec.Struct, rename="camel"):
    request_id: msgspec.Raw
