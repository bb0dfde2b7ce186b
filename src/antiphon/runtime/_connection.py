"""One live connection: a reader that never waits for user code, one writer, one error boundary.

Frames come from a transport (`frames_received`), become events in `core.Protocol`, and are dispatched
here: updates straight to the router, requests to tasks of their own, other notifications to one ordered
task, responses to the call that waits for them. Whatever a handler raises becomes a wire error in
`_serve` and nowhere else.

Writing: frames queued within one turn of the event loop leave in one `send` of the transport, and a
lone request or answer leaves at once (it is on somebody's critical path).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import (
    ENDING,
    ConnectionClosed,
    InternalError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    MethodNotFound,
    NotInitialized,
    RequestCancelled,
    RequestError,
    RequestTimeout,
)
from antiphon.core import (
    Ignored,
    Limits,
    NotificationEvent,
    Protocol,
    Refusal,
    RequestEvent,
    ResponseEvent,
    Side,
    UpdateEvent,
)
from antiphon.runtime._telemetry import Telemetry
from antiphon.schema import json_depth_exceeds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from antiphon.core import Event, Fault
    from antiphon.runtime._context import Context
    from antiphon.runtime._router import RequestRoute, Router
    from antiphon.runtime._telemetry import TelemetryEvent
    from antiphon.transports import Transport

__all__ = ["Connection", "FutureCall", "InboundCall", "OutboundCall"]

log = logging.getLogger("antiphon.connection")

#: Queued bytes that leave without waiting for the end of the loop's turn: about one pipe.
_FLUSH_BYTES = 1 << 16

#: How much of an unknown method's name is repeated to the peer.
_METHOD_CHARACTERS = 256


class InboundCall:
    """A request of the peer that is being handled."""

    __slots__ = ("after", "answered", "cancelled", "id", "method", "started", "task", "withdrawn")

    def __init__(self, id_: bytes, method: str) -> None:
        self.id = id_
        self.method = method
        self.cancelled = False
        #: Whether it got its response from `Connection.answer`, so that its handler need not run.
        self.answered = False
        #: Whether its task has begun: one that has not would never see its own cancellation.
        self.started = False
        #: Whether it was cancelled before that, so that its handler need not run either.
        self.withdrawn = False
        self.task: asyncio.Task[None] | None = None
        self.after: list[Callable[[], Awaitable[None] | None]] = []


class OutboundCall:
    """A request of ours that waits for its answer; subclasses say what happens with it.

    Attributes:
        method: wire name.
        blocking: whether somebody may be waiting for exactly this answer. While such a call is open,
            reading goes on past a spent budget (DESIGN §4.5). False for an open turn.
    """

    __slots__ = ("blocking", "id", "method", "timer")

    def __init__(self, method: str, *, blocking: bool = True) -> None:
        self.method = method
        self.blocking = blocking
        self.id = b""
        self.timer: asyncio.TimerHandle | None = None

    def answered(self, result: Any, error: Exception | None) -> None:
        """Called once, in the reader: with the raw result, or with why there is none."""
        raise NotImplementedError


class FutureCall(OutboundCall):
    """A call whose raw result is awaited."""

    __slots__ = ("future",)

    def __init__(self, method: str, future: asyncio.Future[Any]) -> None:
        super().__init__(method)
        self.future = future

    def answered(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
            self.future.exception()  # a caller that was cancelled meanwhile is no news


class Connection:
    """The runtime of one link, for either side. Satisfies `transports.Receiver`.

    Args:
        transport: moves the frames; owned from here on.
        side: the role this end plays.
        router: what serves the peer's messages.
        limits: see `core.Limits`.
        record: called with ("in" | "out", frame) for every frame, in order; must not raise.
        telemetry: called with each `TelemetryEvent`; what it raises is logged.
    """

    def __init__(
        self,
        transport: Transport,
        side: Side,
        router: Router,
        *,
        limits: Limits | None = None,
        record: Callable[[str, bytes], None] | None = None,
        telemetry: Callable[[TelemetryEvent], None] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._telemetry = Telemetry(telemetry)
        self.side: Side = side
        self.transport = transport
        self.protocol = Protocol(side, self.limits, json_depth_exceeds)
        self.initialized = False
        #: What the peer wrote that was no message: the newest kibibytes, for error texts.
        self.noise = b""
        self._router = router
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deliveries: set[asyncio.Task[Any]] = set()  # finish before they are cancelled
        self._lost: ConnectionClosed | None = None
        self._closed = self._loop.create_future()
        self._closing: asyncio.Task[None] | None = None
        self._input_ended = False
        # The handshake being handled: what arrives meanwhile waits here, in order.
        self._held: list[RequestEvent | NotificationEvent] | None = None
        # writing
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._armed = False  # a flush is sure to come in this turn of the loop
        self._write_paused = False
        self._room: list[asyncio.Future[None]] = []
        # reading
        #: Bytes of what was received and waits: updates (whoever queues one adds its frame's size),
        #: notifications, and what came during the handshake.
        self.queued_bytes = 0
        #: How many updates of them; whoever queues one adds 1.
        self.queued_updates = 0
        self._blocking_calls = 0
        self._read_paused = False
        # ordered notifications
        self._notices: list[_Notice] = []
        self._notice_task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the transport and begin to read. Raises what `Transport.start` raises."""
        await self.transport.start(self)

    @property
    def closed(self) -> bool:
        """Whether the link is gone."""
        return self._lost is not None

    async def wait_closed(self) -> None:
        """Wait until the link is gone. Cancelling it cancels the wait alone."""
        await asyncio.shield(self._closed)

    def lost_error(self) -> ConnectionClosed:
        """A fresh exception that says why the link is gone (each caller gets its own traceback)."""
        lost = self._lost or ConnectionClosed("the connection was closed")
        return ConnectionClosed(
            lost.reason, exit_status=lost.exit_status, stderr_tail=lost.stderr_tail
        )

    async def aclose(self) -> None:
        """Close: open calls fail, handlers are cancelled and given a grace, the transport is closed.

        Idempotent, concurrent calls share the work, bounded by `close_grace` (twice, if observers of
        updates use theirs up) plus the transport's own bound; a cancelled caller stops waiting but
        the closing goes on.
        """
        if self._closing is None:
            self.flush()
            self._closing = self._loop.create_task(self._end())
            self._fail_everything(ConnectionClosed("this side closed the connection"))
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._reap()
            await self.transport.aclose()
        except Exception:
            log.exception("the transport could not be closed")
        finally:
            if not self._closed.done():
                self._closed.set_result(None)

    async def _reap(self) -> None:
        """Cancel what still runs, wait the grace, then leave behind and report what ignores it."""
        cancelled: set[asyncio.Task[Any]] = set()
        for task in self._tasks:
            task.cancel()
            cancelled.add(task)
        if delivering := [task for task in self._deliveries if not task.done()]:
            # What was received is still shown to its observers; only then are they ended.
            await asyncio.wait(delivering, timeout=self.limits.close_grace)
        deadline = self._loop.time() + self.limits.close_grace
        # Again, because what is being cancelled may start a task.
        while running := [t for t in (*self._tasks, *self._deliveries) if not t.done()]:
            for task in running:
                if task not in cancelled:
                    task.cancel()
                    cancelled.add(task)
            left = deadline - self._loop.time()
            if left <= 0:
                for task in running:
                    log.error("a task ignores cancellation and is left behind: %r", task)
                break
            await asyncio.wait(running, timeout=left)
        self.flush()

    def _fail_everything(self, error: ConnectionClosed) -> None:
        if self._lost is not None:
            return
        self._lost = error
        for call in self.protocol.close():
            try:
                self._settle(call, None, self.lost_error())
            except Exception:
                log.exception("a call of %s could not be failed", call.method)
        room, self._room = self._room, []
        for future in room:
            if not future.done():
                future.set_exception(self.lost_error())
                future.exception()  # a waiter that was cancelled meanwhile is no news
        try:
            self._router.connection_lost(error)
        except Exception:
            log.exception("the side could not take the loss of the connection")

    # ------------------------------------------------------------------ telemetry

    @property
    def observed(self) -> bool:
        """Whether a telemetry hook is set: what is only worth an event then can be left out else."""
        return self._telemetry.hook is not None

    def emit(self, name: str, **facts: Any) -> None:
        """Tell the operator of one of `EVENTS`: a log line, and the hook's call. Never raises."""
        self._telemetry.emit(name, facts)

    # ------------------------------------------------------------------ Receiver

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        """Dispatch frames that arrived together; what they cause to be written leaves together."""
        if self._lost is not None:
            return
        self._armed = True
        protocol, update_received = self.protocol, self._router.update_received
        receive = protocol.receive_frame
        record = self._record
        try:
            for frame in frames:
                try:
                    if not isinstance(frame, bytes):
                        self._dispatch(protocol.receive_fault(frame))
                        continue
                    if record is not None:
                        record("in", frame)
                    event = receive(frame)
                    if isinstance(event, UpdateEvent):
                        route: Any = event.params  # core gives no update without its route
                        update_received(route.sessionId, route.update, frame)
                    else:
                        self._dispatch(event)
                except ENDING:
                    raise
                except BaseException:
                    # Nothing a peer sends may end the reading; a fault of ours is logged, not hidden.
                    log.exception("a frame could not be dispatched")
            if self._spent():
                self._over_budget()
        finally:
            self.flush()

    def input_ended(self) -> None:
        """The peer will send nothing more: let what runs finish within the grace, then close."""
        self._input_ended = True
        if self._lost is None and self._closing is None:
            self._closing = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        # Nobody can answer our open calls any more, and handlers that wait for one end with that.
        for call in list(self.protocol.calls.values()):
            self.protocol.calls.pop(call.id, None)
            self._settle(call, None, _no_more_answers())
        # What was asked may still be answered: a pipe of frames without a reader's end is a fair use.
        # What takes longer is asked to stop, and then gets the rest of the grace.
        grace = self.limits.close_grace
        begin = self._loop.time()
        await self._wait_for_handlers(begin + grace / 4)
        self._router.input_ended()
        await self._wait_for_handlers(begin + grace)
        self.flush()
        self._fail_everything(_no_more_answers())
        await self._end()

    async def _wait_for_handlers(self, deadline: float) -> None:
        # Again and again, because the end of the handshake lets through what waited for it.
        while running := [task for task in self._tasks if not task.done()]:
            left = deadline - self._loop.time()
            if left <= 0:
                return
            await asyncio.wait(running, timeout=left)

    def connection_lost(self, error: Exception | None) -> None:
        """The transport's last word."""
        if isinstance(error, ConnectionClosed):
            closed = error
        elif error is None:
            closed = ConnectionClosed("the peer closed the connection")
        else:
            closed = ConnectionClosed(f"the connection broke: {error}")
        self._fail_everything(closed)
        if self._closing is None:
            self._closing = self._loop.create_task(self._end())

    def pause_writing(self) -> None:
        """The transport's: senders that can wait, should (`drain`)."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The transport's: there is room again."""
        self._write_paused = False
        room, self._room = self._room, []
        for future in room:
            if not future.done():
                future.set_result(None)

    # ------------------------------------------------------------------ dispatch

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, ResponseEvent):
            self._settle(event.call, event.result, event.error)
        elif isinstance(event, RequestEvent):
            if self._held is None:
                self._request_received(event)
            else:
                self._hold(self._held, event)
        elif isinstance(event, NotificationEvent):
            # The handshake itself may be cancelled; for what is held, a cancellation waits behind it.
            if self._held is None:
                self._notification_received(event)
            elif event.method != "$/cancel_request" or not self._cancel_received(event):
                self._hold(self._held, event)
        elif isinstance(event, Refusal):
            log.warning("refused a frame: %s", event.reason)
            self._note_noise(event.noise)
            self.send(event.reply)
        elif isinstance(event, Ignored):
            log.log(logging.INFO if event.noise else logging.DEBUG, "ignored: %s", event.reason)
            self._note_noise(event.noise)

    def _note_noise(self, noise: bytes | None) -> None:
        if noise:
            log.info("what is no message begins with %r", noise[:200])
            self.noise = (self.noise + b"\n" + noise)[-4096:]

    def _hold(
        self,
        held: list[RequestEvent | NotificationEvent],
        event: RequestEvent | NotificationEvent,
    ) -> None:
        held.append(event)
        self.queued_bytes += len(event.frame)

    def _request_received(self, event: RequestEvent) -> None:
        id_, method = event.id, event.method
        if self.protocol.is_open(id_):
            # Answering would give that id two responses.
            log.warning("dropped a request whose id is in flight already: %s", method)
            return
        call = InboundCall(id_, method)
        try:
            self._accept_request(event, call)
        except ENDING:
            raise
        except BaseException as error:  # noqa: BLE001  (the boundary)
            # If it was not open yet, it is now: it gets its one answer like any other.
            self.protocol.open(id_, call)
            self._answer_error(call, error)

    def _accept_request(self, event: RequestEvent, call: InboundCall) -> None:
        """Check a request and start its handler; raises what it is refused with."""
        method = event.method
        if self.initialized:
            if method == "initialize":
                raise InvalidRequest({"reason": "already initialized"})
        elif self.side == "agent" and method != "initialize":
            raise InvalidRequest({"method": method, "reason": "initialize required"})
        limit = self.limits.inbound_requests
        if len(self.protocol.requests) >= limit:
            busy = {"reason": "too many concurrent inbound requests", "limit": limit}
            raise InternalError(busy, "Server busy")
        route = self._router.request_route(method)
        if route is None:
            known = method if len(method) <= _METHOD_CHARACTERS else method[:_METHOD_CHARACTERS]
            raise MethodNotFound(known)
        try:
            params = route.decode(event.params)
        except RecursionError:
            raise InvalidParams("nested too deeply") from None
        except ValueError as error:  # msgspec's are among them; their text names the field
            raise InvalidParams(str(error)) from error
        self.protocol.open(call.id, call)
        context = self._router.context(method, event.params, params, call)
        if route.accept is not None:
            params = route.accept(params, context)
        if method == "initialize":
            self._held = []
        call.task = task = self._loop.create_task(self._serve(call, route, params, context))
        self._tasks.add(task)

    async def _serve(
        self, call: InboundCall, route: RequestRoute, params: Any, context: Context
    ) -> None:
        """Run one handler and answer, whatever happens: the boundary between exceptions and the wire."""
        succeeded = False
        call.started = True
        try:
            try:
                if call.answered:
                    return
                if call.withdrawn:
                    raise RequestCancelled  # noqa: TRY301  (the same boundary answers it)
                frame = self.protocol.result(
                    call.id, route.encode(await route.invoke(params, context))
                )
                succeeded = frame is not None
                if frame is not None:
                    self.send(frame, now=len(self.protocol.requests) == 0)
            except asyncio.CancelledError:
                if self._lost is not None:
                    raise
                self._answer_error(call, RequestCancelled())
            except GeneratorExit:
                raise
            except ENDING as error:  # the programme ends, but the peer knows why
                self._answer_error(call, error)
                self.flush()
                raise
            except BaseException as error:  # noqa: BLE001  (the boundary)
                self._answer_error(call, error)
        finally:
            task = call.task
            if task is not None:
                self._tasks.discard(task)
            if call.method == "initialize":
                self._handshake_handled(succeeded=succeeded)
        if succeeded:
            for act in call.after:
                self.run_soon(act)

    def _handshake_handled(self, *, succeeded: bool) -> None:
        """Let what arrived during `initialize` through, in its order (agent side)."""
        if succeeded:
            self.initialized = True
        held, self._held = self._held, None
        for event in held or ():
            self.release(len(event.frame))
            if self._lost is not None:
                continue
            try:
                self._dispatch(event)
            except Exception:
                log.exception("a frame could not be dispatched")

    def answer(self, call: InboundCall, body: bytes) -> bool:
        """Answer a request in its handler's place, whose task is cancelled; False if it is answered."""
        frame = self.protocol.result(call.id, body)
        if frame is None:
            return False
        call.answered = True
        self.send(frame)
        if call.started and call.task is not None:
            call.task.cancel()
        return True

    def _answer_error(self, call: InboundCall, error: BaseException) -> None:
        """Answer with an error; only a `RequestError` says anything about itself to the peer."""
        if isinstance(error, RequestError):
            code, message, data = error.code, error.message, error.data
        elif isinstance(error, LimitExceeded):
            code, message = -32603, "Internal error"
            data = {"reason": f"limit {error.limit} exceeded", "limit": error.maximum}
        else:
            code, message, data = -32603, "Internal error", None
            log.error("the handler of %s failed", call.method, exc_info=error)
        try:
            frame = self.protocol.error(call.id, code, message, data)
        except Exception:
            # The handler's error holds what is no JSON, but an answer is owed.
            log.exception("the error of %s cannot be encoded", call.method)
            frame = self.protocol.error(call.id, code, str(message))
        if frame is not None:
            self.send(frame, now=len(self.protocol.requests) == 0)

    def _notification_received(self, event: NotificationEvent) -> None:
        method = event.method
        if method == "$/cancel_request":
            self._cancel_received(event)
            return
        if not self.initialized and self.side == "agent":
            log.debug("dropped %s before the handshake", method)
            return
        if method == "session/update" and self.side == "client":
            self._odd_update_received(event)
            return
        route = self._router.notice_route(method)
        if route is None:
            log.debug("ignored the unknown notification %s", method)
            return
        try:
            params = route.decode(event.params)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            log.warning("dropped an undecodable %s: %s", method, error)
            return
        context = self._router.context(method, event.params, params, None)
        if route.immediate is not None:
            route.immediate(params, context)
        elif route.handle is not None:
            size = len(event.frame)
            self.queued_bytes += size
            self._notices.append(_Notice(route.handle, params, context, size))
            if self._notice_task is None:
                self._notice_task = self.create_task(self._handle_notices())

    async def _handle_notices(self) -> None:
        """Notifications one at a time, in wire order (requests and updates do not wait for them)."""
        task = asyncio.current_task()
        try:
            while self._notices:
                batch, self._notices = self._notices, []
                for notice in batch:
                    try:
                        await notice.handle(notice.params, notice.context)
                    except asyncio.CancelledError:
                        if task is None or task.cancelling():
                            raise
                        # Something the handler waited for was cancelled: its affair alone.
                        log.info("the handler of %s was cancelled", notice.context.method)
                    except ENDING:
                        raise
                    except BaseException:
                        log.exception("the handler of %s failed", notice.context.method)
                    self.release(notice.size)
        finally:
            self._notice_task = None

    def _odd_update_received(self, event: NotificationEvent) -> None:
        """An update the fast path could not take: repaired text, odd envelope members."""
        try:
            route = _decode_update_route(event.params if event.params is not None else b"null")
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("dropped a session/update without a session: %s", error)
            return
        self._router.update_received(route.session_id, route.update, event.frame)

    def _cancel_received(self, event: NotificationEvent) -> bool:
        """`$/cancel_request`: False if it is about no open request, and so means nothing."""
        try:
            requested = _decode_cancel(event.params if event.params is not None else b"null")
        except (msgspec.DecodeError, RecursionError):
            log.debug("ignored an undecodable $/cancel_request")
            return False
        call = self.protocol.request_of(bytes(requested.request_id))
        if not isinstance(call, InboundCall):
            return False
        if not call.cancelled:
            call.cancelled = True
            if not self._router.cancelled(call):
                if call.started and call.task is not None:
                    call.task.cancel()
                else:
                    call.withdrawn = True
        return True

    # ------------------------------------------------------------------ our calls

    def open_call(
        self, call: OutboundCall, params: bytes | None, timeout: float | None = None
    ) -> None:
        """Send a request; `call.answered` comes once, from the reader, a timeout or the close.

        Raises:
            ConnectionClosed: the link is gone.
            NotInitialized: before the handshake.
            LimitExceeded: the frame would be over `frame_bytes`, or the peer has sent so much that
                nobody takes that no answer can be read (`queue_bytes`).
        """
        if self._lost is not None:
            raise self.lost_error()
        if self._input_ended:
            raise _no_more_answers()
        if call.blocking and self.queued_bytes > 2 * self.limits.queue_bytes:
            raise LimitExceeded("queue_bytes", self.limits.queue_bytes, self.queued_bytes)
        if not self.initialized and call.method != "initialize":
            msg = f"{call.method} before initialize"
            raise NotInitialized(msg)
        call.id, frame = self.protocol.request(call.method, params, call)
        if timeout is not None:
            call.timer = self._loop.call_later(timeout, self._timed_out, call, timeout)
        if call.blocking:
            self._blocking_calls += 1
            if self._read_paused:
                self._resume_reading()
        self.send(frame, now=len(self.protocol.calls) == 1)

    def abandon(self, call: OutboundCall) -> None:
        """Forget a call and tell the peer; `answered` will not be called. Harmless when answered."""
        frame = self.protocol.abandon(call.id)
        if frame is not None:
            self._call_over(call)
            self.send(frame)

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
        if self._lost is not None:
            raise self.lost_error()
        if not self.initialized:
            msg = f"{method} before initialize"
            raise NotInitialized(msg)
        self.send(self.protocol.notification(method, params))

    def _timed_out(self, call: OutboundCall, seconds: float) -> None:
        frame = self.protocol.abandon(call.id)
        if frame is not None:
            self.send(frame)
            self._settle(call, None, RequestTimeout(call.method, seconds))

    def linger(self, call: OutboundCall, late: OutboundCall, seconds: float) -> None:
        """Let `late` have the answer that may yet come for an abandoned call, or its absence."""
        late.id = call.id
        self.protocol.calls[late.id] = late
        late.timer = self._loop.call_later(seconds, self._given_up, late, seconds)

    def _given_up(self, late: OutboundCall, seconds: float) -> None:
        if self.protocol.calls.pop(late.id, None) is not None:
            self._settle(late, None, RequestTimeout(late.method, seconds))

    def _settle(self, call: OutboundCall, result: Any, error: Exception | None) -> None:
        self._call_over(call)
        call.answered(result, error)

    def _call_over(self, call: OutboundCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.blocking:
            self._blocking_calls -= 1
            if not self._blocking_calls and self._spent():
                self._pause_reading()

    # ------------------------------------------------------------------ the budget of undelivered updates

    def _over_budget(self) -> None:
        """Stop reading when the budget is spent (DESIGN §4.4); looked at once per read.

        While a call of ours may be awaited, reading goes on into an overdraft of the same size, so
        that a consumer that calls the peer cannot wait for an answer behind its own queue. Past it
        those calls fail with `LimitExceeded` (DESIGN §4.5).
        """
        queued, budget = self.queued_bytes, self.limits.queue_bytes
        if not self._blocking_calls:
            self._pause_reading()
        elif queued > 2 * budget:
            for call in [c for c in self.protocol.calls.values() if c.blocking]:
                frame = self.protocol.abandon(call.id)
                if frame is not None:
                    self.send(frame)
                self._settle(call, None, LimitExceeded("queue_bytes", budget, queued))

    def release(self, size: int, updates: int = 0) -> None:
        """Count what was consumed or discarded: bytes of frames, and how many updates of them."""
        self.queued_bytes -= size
        self.queued_updates -= updates
        if self._read_paused and not self._spent():
            self._resume_reading()

    def _spent(self) -> bool:
        limits = self.limits
        return self.queued_bytes > limits.queue_bytes or self.queued_updates > limits.queue_updates

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            log.debug("reading stops: %d bytes of updates wait", self.queued_bytes)
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        self._read_paused = False
        self.transport.resume_reading()

    # ------------------------------------------------------------------ writing

    def send(self, frame: bytes, *, now: bool = False) -> None:
        """Queue a frame; `now` lets a lone one leave without waiting for the loop's next turn."""
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > _FLUSH_BYTES or (now and not self._armed):
            self._write()
        elif not self._armed:
            self._armed = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand what is queued to the transport."""
        self._armed = False
        if self._out:
            self._write()

    def _write(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if self._record is not None:
            for frame in out:
                self._record("out", frame)
        self.transport.send(out)

    def check_frame(self, size: int) -> None:
        """Raise `LimitExceeded` for a frame of that size, for senders that build their own."""
        if size > self.limits.frame_bytes:
            raise LimitExceeded("frame_bytes", self.limits.frame_bytes, size)

    @property
    def writing_paused(self) -> bool:
        """Whether senders that can wait should: the peer does not take what was written."""
        return self._write_paused

    async def drain(self) -> None:
        """Wait once for room if the peer is slow. Raises `ConnectionClosed` if it goes."""
        if self._lost is not None:
            raise self.lost_error()
        if self._write_paused:
            # One future each: a shared one would be cancelled for all by the first who gives up.
            future = self._loop.create_future()
            self._room.append(future)
            await future

    # ------------------------------------------------------------------ tasks

    def create_future(self) -> asyncio.Future[Any]:
        """A future of the connection's loop."""
        return self._loop.create_future()

    def create_task(
        self, work: Coroutine[Any, Any, Any], *, delivery: bool = False
    ) -> asyncio.Task[Any]:
        """A task that ends with the connection at the latest.

        A `delivery` shows received updates to an observer: it is given the closing grace to come to
        its own end, other tasks are cancelled at once.
        """
        tasks = self._deliveries if delivery else self._tasks
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def call_soon_from_anywhere(self, act: Callable[[], object]) -> None:
        """Have `act` called on the connection's loop. Raises `RuntimeError` if that is closed."""
        self._loop.call_soon_threadsafe(act)

    def run_soon(self, act: Callable[[], Awaitable[None] | None]) -> None:
        """Call `act` now; an awaitable it returns runs in a task. What it raises is logged."""
        try:
            result = act()
        except ENDING:
            raise
        except BaseException:
            log.exception("what was to run after a response failed")
            return
        if result is not None:
            self.create_task(_logged(result))


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except (*ENDING, asyncio.CancelledError):
        raise
    except BaseException:
        log.exception("what was to run after a response failed")


def _no_more_answers() -> ConnectionClosed:
    return ConnectionClosed("the peer closed its output")


class _Notice(msgspec.Struct):
    """A notification that waits for its handler."""

    handle: Callable[[Any, Context], Awaitable[None]]
    params: Any
    context: Context
    size: int


class _CancelParams(msgspec.Struct, rename="camel"):
    request_id: msgspec.Raw


class _UpdateParams(msgspec.Struct, rename="camel"):
    session_id: str
    update: msgspec.Raw


_decode_cancel = msgspec.json.Decoder(_CancelParams).decode
_decode_update_route = msgspec.json.Decoder(_UpdateParams).decode
