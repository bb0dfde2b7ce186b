"""One live connection: a reader that never waits for user code, one writer, one error boundary.

Frames come from a transport (`frames_received`), become events in `core.Protocol`, and are dispatched
here: updates straight to the router, all else to the room that is responsible for it:

* `_incoming`: requests of the peer, in tasks of their own, and what their handlers raise;
* `_notices`: notifications, in one ordered task;
* `_outgoing`: our calls and their answers;
* `_budget`: how much of what was received waits, and whether reading goes on;
* `_writer`: what leaves, and how much of it is not taken.

This module has the life of the connection and its tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import ENDING, ConnectionClosed
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
from antiphon.runtime._budget import Budget
from antiphon.runtime._incoming import Incoming
from antiphon.runtime._notices import Notices
from antiphon.runtime._outgoing import Outgoing, no_more_answers
from antiphon.runtime._telemetry import Telemetry, shown_text
from antiphon.runtime._writer import Writer
from antiphon.schema import decoder, json_depth_exceeds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from antiphon.core import Event, Fault
    from antiphon.runtime._router import Router
    from antiphon.runtime._telemetry import TelemetryEvent
    from antiphon.transports import Transport

__all__ = ["Connection"]

log = logging.getLogger("antiphon.connection")


class Connection(Budget):
    """The runtime of one link, for either side. Satisfies `transports.Receiver`.

    What sessions do with it: `open_call`, `request`, `answer_to`, `notify`, `abandon`, `disown_call`,
    `fail`, `linger`, `set_blocking` and `check_frame` are those of `Outgoing`; `answer` that of `Incoming`;
    `handle_notice` is the `put` of `Notices`; `send` and `flush` are those of `Writer`; `emit` that
    of `Telemetry`.

    Args:
        transport: moves the frames; owned from here on.
        side: the role this end plays.
        router: what serves the peer's messages.
        limits: see `core.Limits`.
        record: called with ("in" | "out", frame) for every frame, in order; must not raise.
        telemetry: called with each `TelemetryEvent`; what it raises is logged.

    Attributes:
        initialized: whether the handshake was successful.
        received: how many frames came, whatever they were.
        writing_paused: whether senders that can wait should, since the peer does not take what was
            written. The writer's own, here for who looks at it for every update.
        lost: why the link is gone, None while it is not.
        noise: what the peer wrote that was no message: the newest kibibytes, for error texts.
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
        self._telemetry = Telemetry(telemetry)
        super().__init__(limits or Limits(), transport, self._telemetry)
        self.side: Side = side
        self.protocol = Protocol(side, self.limits, json_depth_exceeds)
        self.initialized = False
        self.received = 0
        self.writing_paused = False
        self.noise = b""
        self._last_noise = b""  # that came in one piece, up to the frame of this number
        self._noise_end = 0
        self.loop = asyncio.get_running_loop()
        self.create_future: Callable[[], asyncio.Future[Any]] = self.loop.create_future
        self._tasks: set[asyncio.Task[Any]] = set()  # beside those of `Incoming`
        self._deliveries: set[asyncio.Task[Any]] = set()  # finish before they are cancelled
        self._router = router
        self._record = record
        self.lost: ConnectionClosed | None = None
        self._closed = self.loop.create_future()
        self._closing: asyncio.Task[None] | None = None
        self._hurried = False
        self._patience: asyncio.Timeout | None = None

        self.writer = writer = Writer(
            self.loop,
            transport,
            record,
            self.limits.unsent_bytes,
            pace=self._pace_writing,
            full=self._output_full,
            stuck=self._output_stuck,
        )
        self.send, self.flush = writer.send, writer.flush
        self._outgoing = outgoing = Outgoing(self)
        self.open_call, self.answer_to = outgoing.open_call, outgoing.answer_to
        self.abandon, self.fail, self.linger = outgoing.abandon, outgoing.fail, outgoing.linger
        self.set_blocking, self.disown_call = outgoing.set_blocking, outgoing.disown
        self.request, self.notify = outgoing.request, outgoing.notify
        self.check_frame = outgoing.check_frame
        self._incoming = Incoming(self, router)
        self.answer = self._incoming.answer
        self._notices = Notices(self)
        self.handle_notice = self._notices.put

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the transport and begin to read. Raises what `Transport.start` raises."""
        await self.transport.start(self)

    @property
    def closed(self) -> bool:
        """Whether the link is gone."""
        return self.lost is not None

    @property
    def unanswering(self) -> bool:
        """Whether the peer answers nothing more: the link is gone, or about to go."""
        return self.lost is not None or self._outgoing.input_ended

    async def wait_closed(self) -> None:
        """Wait until the link is gone. Cancelling it cancels the wait alone."""
        await asyncio.shield(self._closed)

    def lost_error(self) -> ConnectionClosed:
        """A fresh exception that says why the link is gone (each caller gets its own traceback)."""
        lost = self.lost or ConnectionClosed("the connection was closed")
        return ConnectionClosed(
            lost.reason, exit_status=lost.exit_status, stderr_tail=lost.stderr_tail
        )

    async def aclose(self) -> None:
        """Close: open calls fail, handlers are cancelled and given a grace, the transport is closed.

        Idempotent, concurrent calls share the work, bounded by `close_grace` (twice, if observers of
        updates use theirs up) plus the transport's own bound. A cancelled caller stops waiting;
        handlers keep their grace, but the transport is no longer given time: a process is killed.
        """
        self.flush()  # which may find that the link is gone
        if self._closing is None:
            self._closing = self.new_task(self._end())
            self._fail_everything(ConnectionClosed("this side closed the connection"))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._hurried = True
            if self._patience is not None:
                self._patience.reschedule(self.loop.time())
            raise

    async def _end(self) -> None:
        try:
            await self._reap()
            await self._close_transport()
        except Exception:
            log.exception("the transport could not be closed")
        finally:
            if not self._closed.done():
                self._closed.set_result(None)

    async def _close_transport(self) -> None:
        try:
            async with asyncio.timeout(0 if self._hurried else None) as self._patience:
                await self.transport.aclose()
        except TimeoutError:
            if not self._hurried:
                raise
        finally:
            self._patience = None

    async def _reap(self) -> None:
        """Cancel what still runs, wait the grace, then leave behind and report what ignores it."""
        cancelled: set[asyncio.Task[Any]] = set()
        for task in self.tasks:
            task.cancel()
            cancelled.add(task)
        if delivering := [task for task in self._deliveries if not task.done()]:
            # What was received is still shown to its observers; only then are they ended.
            await asyncio.wait(delivering, timeout=self.limits.close_grace)
        deadline = self.loop.time() + self.limits.close_grace
        # Again, because what is being cancelled may start a task.
        while running := [t for t in (*self.tasks, *self._deliveries) if not t.done()]:
            for task in running:
                if task not in cancelled:
                    task.cancel()
                    cancelled.add(task)
            left = deadline - self.loop.time()
            if left <= 0:
                for task in running:
                    self.emit("task_left_behind", task=_named(task))
                break
            await asyncio.wait(running, timeout=left)
        self.flush()

    def _fail_everything(self, error: ConnectionClosed) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self.emit("connection_lost", reason=error.reason, exit_status=error.exit_status)
        self._outgoing.fail_all(self.protocol.close())
        self.writer.fail(self.lost_error)
        try:
            self._router.connection_lost(error)
        except Exception:
            log.exception("the side could not take the loss of the connection")

    # ------------------------------------------------------------------ Receiver

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        """Dispatch frames that arrived together; what they cause to be written leaves together."""
        if self.lost is not None:
            return
        writer = self.writer
        writer.armed = True
        receive, router = self.protocol.receive_frame, self._router
        record = self._record
        before, self.received = self.received, self.received + len(frames)
        at, end = 0, len(frames)
        told = ""  # the session of the update before
        try:
            while at < end:
                frame = frames[at]
                at += 1  # from here on its position, counted from 1
                try:
                    if not isinstance(frame, bytes):
                        self.dispatch(self.protocol.receive_fault(frame), before + at)
                        continue
                    if record is not None:
                        record("in", frame)
                    event = receive(frame)
                    if type(event) is not UpdateEvent:
                        # The same as `dispatch` does, without a call for what comes in numbers.
                        if type(event) is ResponseEvent:
                            self._outgoing.answered(event)
                        elif type(event) is RequestEvent and self._incoming.held is None:
                            self._incoming.request_received(event, before + at)
                        else:
                            self.dispatch(event, before + at)
                        continue
                    route: Any = event.params  # core gives no update without its route
                    session_id = route.sessionId
                    # One after another of the same session: there may be more. Where many sessions
                    # take turns, there is nothing to be gained by looking.
                    if session_id == told and at < end and record is None:
                        updates = self.protocol.updates_behind(event, frames, at)
                        if len(updates) > 1:
                            first, at = at - 1, at - 1 + len(updates)
                            router.updates_received(session_id, updates, frames[first:at])
                            continue
                    told = session_id
                    router.update_received(session_id, route.update, frame)
                except ENDING:
                    raise
                except BaseException as error:  # noqa: BLE001
                    # Nothing a peer sends may end the reading; a fault of ours is told, not hidden.
                    self._could_not_dispatch(error)
            waits = self.queued_bytes or self.notices_full
            if waits and self.look_around() and self.blocking_calls and self.budget_overdrawn:
                self._outgoing.fail_blocking()
        finally:
            writer.flush()

    def input_ended(self) -> None:
        """The peer will send nothing more: let what runs finish within the grace, then close."""
        self._outgoing.end_input()
        if self.lost is None and self._closing is None:
            self._closing = self.new_task(self._finish())

    async def _finish(self) -> None:
        # Nobody can answer our open calls any more, and handlers that wait for one end with that.
        self._outgoing.fail_unanswered()
        # What was asked may still be answered: a pipe of frames without a reader's end is a fair use.
        # What takes longer is asked to stop, and then gets the rest of the grace.
        grace = self.limits.close_grace
        begin = self.loop.time()
        await self._wait_for_handlers(begin + grace / 4)
        self._router.input_ended()
        await self._wait_for_handlers(begin + grace)
        self.flush()
        self._fail_everything(no_more_answers())
        await self._end()

    async def _wait_for_handlers(self, deadline: float) -> None:
        # Again and again, because the end of the handshake lets through what waited for it.
        while running := [task for task in self.tasks if not task.done()]:
            left = deadline - self.loop.time()
            if left <= 0:
                return
            await asyncio.wait(running, timeout=left)

    def connection_lost(self, error: Exception | None) -> None:
        """The transport's last word."""
        if isinstance(error, ConnectionClosed):
            closed = self._with_last_words(error)
        elif error is None:
            closed = ConnectionClosed("the peer closed the connection")
        else:
            closed = ConnectionClosed(f"the connection broke: {error}")
        self._lose(closed)

    def _lose(self, error: ConnectionClosed) -> None:
        self._fail_everything(error)
        if self._closing is None:
            self._closing = self.new_task(self._end())

    def pause_writing(self) -> None:
        """The transport's: senders that can wait, should (`drain`)."""
        self.writing_paused = self.writer.paused = True

    def resume_writing(self) -> None:
        """The transport's: there is room again."""
        self.writing_paused = False
        self.writer.resume()

    def _pace_writing(self, wait: bool) -> None:  # noqa: FBT001  (told by the writer alone)
        if wait:
            self.writing_paused = True
        elif not self.writer.paused:
            self.writing_paused = False
            self.writer.wake()

    # ------------------------------------------------------------------ what the peer does not take

    async def drain(self) -> None:
        """Wait once for room if the peer is slow. Raises `ConnectionClosed` if it goes."""
        if self.lost is not None:
            raise self.lost_error()
        if self.writing_paused:
            await self.writer.wait()

    def _output_full(self, unsent: int) -> None:
        if self.lost is None:
            limit = self.limits.unsent_bytes
            self.emit("peer_not_reading", unsent_bytes=unsent, limit=limit, closed=False)

    def _output_stuck(self, unsent: int) -> None:
        if self.lost is None:
            limit = self.limits.unsent_bytes
            self.emit("peer_not_reading", unsent_bytes=unsent, limit=limit, closed=True)
            self._lose(
                ConnectionClosed(
                    f"the peer does not read: {unsent} bytes wait (limit unsent_bytes of {limit})"
                )
            )

    # ------------------------------------------------------------------ dispatch

    def dispatch(self, event: Event, rx_seq: int) -> None:
        """Hand on what is no update. Never raises; `rx_seq` is the frame's position in the stream."""
        try:
            # By class, for those that come in numbers: a struct's metaclass makes `isinstance` slow.
            if type(event) is ResponseEvent:
                self._outgoing.answered(event)
            elif type(event) is RequestEvent:
                if self._incoming.held is not None:
                    self._incoming.hold(event, rx_seq)
                else:
                    self._incoming.request_received(event, rx_seq)
            elif isinstance(event, NotificationEvent):
                self._told(event, rx_seq)
            elif isinstance(event, Refusal):
                self._note_noise(event.noise, rx_seq)
                self._report(event)
                self.send(event.reply)
            elif isinstance(event, Ignored):
                self._note_noise(event.noise, rx_seq)
                self._report(event)
        except ENDING:
            raise
        except BaseException as error:  # noqa: BLE001
            self._could_not_dispatch(error)

    def _could_not_dispatch(self, error: BaseException) -> None:
        self.emit("dispatch_failed", cause=error, error=type(error).__name__)

    def _told(self, event: NotificationEvent, rx_seq: int) -> None:
        # The handshake itself may be cancelled; for what is held, a cancellation waits behind it.
        cancel = event.method == "$/cancel_request"
        if self._incoming.held is None:
            if cancel:
                self._incoming.cancel_received(event)
            else:
                self._notification_received(event, rx_seq)
        elif not cancel or not self._incoming.cancel_received(event):
            self._incoming.hold(event, rx_seq)

    def _notification_received(self, event: NotificationEvent, rx_seq: int) -> None:
        method = event.method
        if not self.initialized and self.side == "agent":
            self._ignore(method, "before the handshake")
            return
        if method == "session/update" and self.side == "client":
            self._odd_update_received(event)
            return
        route = self._router.notice_route(method)
        if route is None:
            self._ignore(method, "unknown")
            return
        try:
            params = route.decode(event.params)
        except Exception as error:  # noqa: BLE001  (a user's own type may raise anything)
            self._undecodable(method, error)
            return
        context = self._router.context(method, event.params, params, None)
        context.rx_seq = rx_seq
        if route.immediate is not None:
            route.immediate(params, context)
        elif route.handle is not None:
            self._notices.put(route.handle, params, context, len(event.frame))

    def _odd_update_received(self, event: NotificationEvent) -> None:
        """An update the fast path could not take: repaired text, odd envelope members."""
        try:
            route = decoder(_UpdateParams)(event.params if event.params is not None else b"null")
        except (msgspec.DecodeError, RecursionError) as error:
            self._undecodable(event.method, error)
            return
        self._router.update_received(route.session_id, route.update, event.frame)

    def _ignore(self, method: str, reason: str) -> None:
        self.emit("unknown_notification", method=shown_text(method), reason=reason)

    def _undecodable(self, method: str, error: Exception) -> None:
        # A decoder's text names members and types; of another fault its class has to do.
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        self.emit(
            "undecodable_notification",
            method=shown_text(method),
            reason=shown_text(reason),
        )

    def _note_noise(self, noise: bytes | None, rx_seq: int) -> None:
        if noise:
            self.noise = (self.noise + b"\n" + noise)[-4096:]
            before = self._last_noise + b"\n" if self._noise_end == rx_seq - 1 else b""
            self._last_noise = (before + noise)[-4096:]
            self._noise_end = rx_seq

    def _with_last_words(self, error: ConnectionClosed) -> ConnectionClosed:
        """The error with what the peer wrote last, if that was no message: it is often the reason.

        What it wrote in place of `initialize` is told by who waits for that.
        """
        words = self._last_noise.decode("utf-8", "replace").strip()
        if not (words and self.initialized and self._noise_end == self.received):
            return error
        return ConnectionClosed(
            f"{error.reason}; the last it wrote is no protocol message: {words[-500:]!r}",
            exit_status=error.exit_status,
            stderr_tail=error.stderr_tail,
        )

    # ------------------------------------------------------------------ telemetry

    @property
    def observed(self) -> bool:
        """Whether a telemetry hook is set: what is only worth an event then can be left out else."""
        return self._telemetry.hook is not None

    def handler_failed(self, what: str, method: str, error: BaseException) -> None:
        """Tell the operator what a handler raised.

        Args:
            what: "request", "notification" or "subtask".
            method: what it handled.
            error: no `RequestError`.
        """
        if self.lost is not None and isinstance(error, ConnectionClosed):
            # It was told that the peer is gone, and so is everybody.
            log.info(
                "the handler of %s ended with the connection: %s",
                shown_text(method),
                error,
            )
            return
        self.emit(
            "handler_crash",
            cause=error,
            what=what,
            method=shown_text(method),
            error=type(error).__name__,
        )

    def _report(self, event: Refusal | Ignored) -> None:
        """A frame that is no message, or none for us."""
        self.emit(event.event, **event.facts)

    # ------------------------------------------------------------------ tasks

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        """What runs and is cancelled where the connection ends: handlers, and what they have started."""
        return {*self._incoming.tasks.values(), *self._tasks}

    def create_task(
        self, work: Coroutine[Any, Any, Any], *, delivery: bool = False
    ) -> asyncio.Task[Any]:
        """A task that ends with the connection at the latest.

        A `delivery` shows received updates to an observer: it is given the closing grace to come to
        its own end, other tasks are cancelled at once.
        """
        tasks = self._deliveries if delivery else self._tasks
        task = self.new_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def new_task(
        self, work: Coroutine[Any, Any, Any], name: str | None = None
    ) -> asyncio.Task[Any]:
        """A task that begins in a later turn of the loop, and that the caller keeps account of.

        A name is worth more than `Task-17` to who looks, and making that one up costs a microsecond.

        Not made by the loop's task factory: an eager one would begin the work within this call, so
        that a handler ran in the reader.
        """
        return asyncio.Task(work, loop=self.loop, name=name)

    def disown_task(self, task: asyncio.Task[Any]) -> None:
        """Leave a task of ours to somebody else, who ends it: it outlives the connection."""
        for tasks in (self._tasks, self._deliveries):
            tasks.discard(task)
            task.remove_done_callback(tasks.discard)

    def own_task(self, task: asyncio.Task[Any]) -> None:
        """Take over a task that shows received updates to an observer."""
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    def call_soon_from_anywhere(self, act: Callable[[], object]) -> None:
        """Have `act` called on the connection's loop. Raises `RuntimeError` if that is closed."""
        self.loop.call_soon_threadsafe(act)

    def run_soon(
        self,
        act: Callable[[], object],
        what: str = "what was to run after a response",
    ) -> None:
        """Call `act` now; an awaitable it returns runs in a task. What it raises is logged."""
        try:
            result = act()
        except ENDING:
            raise
        except BaseException:
            log.exception("%s failed", what)
            return
        if inspect.isawaitable(result):
            self.create_task(_logged(result, what))


async def _logged(work: Awaitable[object], what: str) -> None:
    try:
        await work
    except (*ENDING, asyncio.CancelledError):
        raise
    except BaseException:
        log.exception("%s failed", what)


def _named(task: asyncio.Task[Any]) -> str:
    """A task, for telemetry: its name and what it runs."""
    work = task.get_coro()
    return f"{task.get_name()} ({getattr(work, '__qualname__', type(work).__name__)})"


class _UpdateParams(msgspec.Struct, rename="camel"):
    session_id: str
    update: msgspec.Raw
