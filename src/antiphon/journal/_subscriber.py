"""One attach: history up to a mark, the answer, then live records, each once and in order.

Responsible for the sequence of resumable-sessions §7 on one connection: register, then read the mark,
replay, answer, and only then look at live records; for what a client that knows no offsets is shown
(§6), for slow links (§9) and for the end of a grant (§11.6). Leaves who may attach to `_attach`, and
the link, the request and its answer to whoever made it: it knows them as functions only.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from antiphon._errors import ConnectionClosed, InvalidParams, JournalError, ResourceNotFound
from antiphon.journal._record import SESSION_UPDATE, FrameHeads, Record
from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.journal._rider import Rider
    from antiphon.journal._store import SessionLog

__all__ = ["Source", "Subscriber"]

log = logging.getLogger("antiphon.journal")

#: History is read in pages of so many records at most, and of about so many bytes, by the page before.
_PAGE: Final = 256
_FIRST_PAGE: Final = 32
_PAGE_BYTES: Final = 1 << 20
#: How long, in seconds, one timer waits for the end of a grant before the clock is read again: the
#: loop's time stands still while a machine sleeps, and its timers have an end.
_LONGEST: Final = 60.0
#: A time that no timer lives to see, in seconds since 1970.
_FAR: Final = 1 << 52
#: More than any offset.
_NO_OFFSET: Final = sys.maxsize


def _nobody(_tail: Subscriber) -> None:
    """Who gives no live records wants no credit for them."""


class Source(Protocol):
    """Where live records come from: a `Writer`, or a `Follower` of another process's."""

    async def subscribe(self, tail: Subscriber, /) -> None: ...
    def unsubscribe(self, tail: Subscriber, /) -> None: ...
    def credit(self, tail: Subscriber, /) -> None: ...


class _Shared:
    """The frame that was built last.

    A publisher gives a record to its subscribers one right after the other, so one frame serves all
    of them. Other loops, in other threads, can only make it be built again: the pair is one value.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[Record | None, bytes] = (None, b"")


_shared = _Shared()


class Subscriber:
    """One attach of one connection to one session (resumable-sessions §7.2, §7.3, §9).

    `history ++ live` are the durable records from `Rider.from_offset` on, each once, in order. Of the
    methods only `attach` is awaited to begin with; `received`, `lagged` and `ended` are the source's
    to call.

    Attributes:
        rider: what was asked for.
        forwarded: the highest offset that the connection was given, or that was left out on purpose;
            from the answer on at least the high watermark. 0 before.
        over: why it is over: "lagged", "revoked", "detached", "link_lost", "failed", "answered" (it
            was, and nothing live can come), or what the source said; None as long as it is not.
    """

    def __init__(
        self,
        log: SessionLog,
        source: Source | None,
        rider: Rider,
        *,
        aware: bool,
        send: Callable[[bytes], None],
        writable: Callable[[], bool],
        drain: Callable[[], Awaitable[None]],
        reply: Callable[[int], None],
        project: Callable[[Record], bytes | None] | None = None,
        skip: Callable[[Record], bool] | None = None,
        expires_at: int | None = None,
        clock: Callable[[], float] = time.time,
        on_end: Callable[[Subscriber, str], None] | None = None,
    ) -> None:
        """Prepare an attach; nothing is registered, read or sent before `attach`.

        Args:
            log: the session's records; they stay whoever's they are.
            source: who publishes live records, None where nobody does: then there is history only.
            rider: what was asked for.
            aware: whether the client knows offsets. One that does not, a stock client, is shown
                updates only, and no `caught_up`.
            send: queues a frame; never waits.
            writable: whether the link takes frames now.
            drain: waits for that. Raises `ConnectionClosed` when the link has gone.
            reply: answers the load with the high watermark. Called once, before any live record.
            project: for a stock client: the payload to show in place of a record's, None to leave the
                record out.
            skip: for a stock client: whether to leave a live record out.
            expires_at: when the grant ends, in seconds since 1970.
            clock: what tells that time.
            on_end: called once with it and the reason, when an attach that succeeded is over.
        """
        self.rider = rider
        self.forwarded = 0
        self.over: str | None = None
        self._log = log
        self._source = source if rider.history != "none" else None
        self._aware = aware
        self._send = send
        self._writable = writable
        self._drain = drain
        self._reply = reply
        self._project = project
        self._skip = skip
        # Any integer is a time: one that is not near enough for the clock's arithmetic is far away.
        self._expires_at = None if expires_at is None else max(0, min(expires_at, _FAR))
        self._clock = clock
        self._on_end = on_end
        self._frame = FrameHeads(log.session_id).frame
        self._credit = _nobody if self._source is None else self._source.credit
        #: The mark; what is live up to it is no news, for ever.
        self._mark = 0
        #: Whether live records are looked at, and whether they may pass the inbox by.
        self._answered = False
        self._live = False
        self._parting = False
        #: What waits; a text is the source's last word.
        self._inbox: deque[Record | str] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Who waits for an offset, and the lowest that is waited for.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._wanted = _NO_OFFSET

    # ------------------------------------------------------------------ the attach

    async def attach(self) -> int:
        """Everything up to the answer, and the live records that came meanwhile.

        If it is cancelled, or the link goes, nothing more is sent and nothing stays registered. It
        can be called once.

        Returns:
            The high watermark, as answered.

        Raises:
            ResourceNotFound: nobody ever wrote to the session.
            InvalidParams: the client holds more than there is; the high watermark is in its data.
            ConnectionClosed: the link has gone.
            JournalError: the journal cannot be read, or its writer is down.
        """
        try:
            if self._source is not None:
                await self._source.subscribe(self)
            # Only now: what is appended from here on comes live, and what was before is in the store.
            mark = await self._log.high_watermark()
            self._check(mark)
            if self.rider.history == "from_offset":
                await self._replay(max(self.rider.from_offset, 1), mark)
            if self._aware and self.rider.history != "none":
                self._tell("caught_up", b'"offset":%d' % (mark + 1))
            self._reply(mark)
        except BaseException as error:
            self._stop("link_lost" if isinstance(error, ConnectionClosed) else "failed")
            raise
        self._mark = self.forwarded = mark
        self._answered = True
        if self._source is None and self._expires_at is None:
            self._stop("answered")
        if self.over is not None:  # also if it was detached meanwhile, maybe before it was let in
            self._leave()
            self._report()
            return mark
        self._wake()
        self._watch_grant()
        self._take()
        return mark

    def _check(self, mark: int) -> None:
        # A writer that is subscribed to has begun the session; what has no records has no writer.
        if mark == 0:
            raise ResourceNotFound
        if self.rider.history != "none" and self.rider.from_offset > mark + 1:
            raise InvalidParams({"highWatermark": mark}, "invalid params")

    async def _replay(self, start: int, mark: int) -> None:
        size = _FIRST_PAGE
        while start <= mark:
            stop = min(mark, start + size - 1)
            records = await self._log.read(start, stop)
            if len(records) != stop - start + 1:
                raise JournalError(
                    f"records {start} to {stop} cannot be read: the session was deleted"
                )
            read = 1
            for record in records:
                if not self._writable():
                    await self._drain()
                self._show(record)
                read += len(record.payload)
            start = stop + 1
            size = max(1, min(_PAGE, 2 * size, size * _PAGE_BYTES // read))
            # However fast the link and the store are, they are not the only ones here.
            await asyncio.sleep(0)

    # ------------------------------------------------------------------ live records

    def received(self, record: Record) -> None:
        """The source has a record: it is forwarded at once, or waits for the link or the answer."""
        if not self._live or not self._writable():
            self._queue(record)
            return
        try:
            self._forward(record)
        except Exception as error:  # noqa: BLE001  (the source must go on)
            self._fail(error)

    def lagged(self) -> None:
        """The source's last word: this one was too slow."""
        self._queue("lagged")

    def ended(self, reason: str) -> None:
        """The source's last word: it is over, and why."""
        self._queue(reason)

    def _queue(self, item: Record | str) -> None:
        if self.over is not None:
            # It was registered after it had ended: a registration that was under way cannot be undone.
            self._leave()
            return
        self._inbox.append(item)
        self._live = False
        if self._answered and self._pump is None:
            self._take()

    def _take(self) -> None:
        """Go through the inbox as long as the link takes it, then leave the rest to the pump."""
        try:
            while self._inbox and self._writable():
                self._next()
        except Exception as error:  # noqa: BLE001  (the source must go on)
            self._fail(error)
        if self.over is not None:
            return
        if self._inbox:
            self._pump = asyncio.get_running_loop().create_task(
                self._drain_inbox(), name="antiphon subscriber"
            )
        else:
            self._live = self._source is not None

    async def _drain_inbox(self) -> None:
        try:
            while self._inbox:
                if not self._writable():
                    try:
                        await self._drain()
                    except ConnectionClosed:
                        if not self._inbox:  # it was handed over meanwhile
                            break
                        raise
                if self._inbox:
                    self._next()
        except asyncio.CancelledError:
            if self.over is None:  # somebody ends all tasks there are
                self._stop("link_lost")
                self._report()
            raise
        except Exception as error:  # noqa: BLE001  (nobody awaits it)
            self._fail(error)
        self._pump = None

    def _next(self) -> None:
        item = self._inbox.popleft()
        if not isinstance(item, str):
            self._forward(item)
        elif self._parting:
            self._stop(item)
            self._report()
        elif item == "lagged":
            self._finish(item, "lagged", b'"lastOffset":%d' % self.forwarded)
        else:
            self._finish(item, "closed", b'"reason":' + encode(item))

    def _forward(self, record: Record) -> None:
        """The gate, for one live record: fixed, so that whatever else is wrong is seen (§7.3)."""
        offset = record.offset
        if offset > self._mark:
            if self._aware:
                last = _shared.last
                if last[0] is record:
                    frame = last[1]
                else:
                    frame = self._frame(record)
                    _shared.last = (record, frame)
                self._send(frame)
            elif self._skip is None or not self._skip(record):
                self._show(record)
            if offset > self.forwarded:
                self.forwarded = offset
                if offset >= self._wanted:
                    self._wake()
        self._credit(self)

    def _show(self, record: Record) -> None:
        """A record as this client is to see it, or nothing."""
        if not self._aware:
            if record.kind != SESSION_UPDATE:
                return
            if self._project is not None:
                payload = self._project(record)
                if payload is None:
                    return
                if payload is not record.payload:
                    record = Record(
                        record.offset,
                        record.session_id,
                        record.kind,
                        payload,
                        record.taint,
                        record.ts,
                    )
        self._send(self._frame(record))

    def _tell(self, name: str, more: bytes) -> None:
        self._send(
            b'{"jsonrpc":"2.0","method":"_raxol/session.%b","params":{"sessionId":%b,%b}}'
            % (name.encode(), encode(self._log.session_id), more)
        )

    # ------------------------------------------------------------------ until when

    @property
    def live(self) -> bool:
        """Whether it is attached to a source: what is published is or will be forwarded."""
        return self._answered and self._source is not None and self.over is None

    async def reached(self, offset: int) -> None:
        """Wait until the connection was given the record of this offset, or never will be.

        Returns at once where nothing live comes. Cancelling it changes nothing else.
        """
        if self.forwarded >= offset or self.over is not None or self._source is None:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((offset, future))
        self._wanted = min(self._wanted, offset)
        await future

    def _wake(self) -> None:
        over = self.over is not None
        waiting, self._waiting = self._waiting, []
        self._wanted = _NO_OFFSET
        for offset, future in waiting:
            if over or offset <= self.forwarded:
                if not future.done():
                    future.set_result(None)
            elif not future.done():
                self._waiting.append((offset, future))
                self._wanted = min(self._wanted, offset)

    def _watch_grant(self) -> None:
        """Wait for the end of the grant, by this side's clock (§11.6)."""
        self._timer = None
        if self._expires_at is None:
            return
        left = self._expires_at - self._clock()
        if left <= 0:
            # What still waits was published under a grant that is over.
            try:
                self._finish("revoked", "closed", b'"reason":"revoked"')
            except Exception as error:  # noqa: BLE001  (a timer has nobody to tell)
                self._fail(error)
        else:
            self._timer = asyncio.get_running_loop().call_later(
                min(left, _LONGEST), self._watch_grant
            )

    # ------------------------------------------------------------------ ends

    def detach(self, *, flush: bool = False) -> None:
        """End it without a frame. Idempotent; a load that is under way is still answered.

        With `flush` the live records that wait for the link are handed to it first.
        """
        if flush:
            self._hand_over()
        if self.over is None:
            self._stop("detached")
            if self._answered:
                self._report()

    def part(self) -> None:
        """The link is closing: what waits for it is handed to it now, and no frame says what this ends with."""
        self._parting = True
        self._hand_over()

    def _hand_over(self) -> None:
        while self._answered and self._inbox and self.over is None:
            try:
                self._next()
            except Exception as error:  # noqa: BLE001  (as for one that is forwarded)
                self._fail(error)

    def _finish(self, reason: str, name: str, more: bytes) -> None:
        """The last frame, and the end."""
        self._tell(name, more)
        self._stop(reason)
        self._report()

    def _fail(self, error: Exception) -> None:
        if self.over is not None:
            return
        if isinstance(error, ConnectionClosed):
            self._stop("link_lost")
        else:
            log.error("an attach to session %r failed", self._log.session_id, exc_info=error)
            self._stop("failed")
        self._report()

    def _stop(self, reason: str) -> None:
        if self.over is not None:
            return
        self.over = reason
        self._live = False
        self._leave()
        self._inbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pump is not None and self._pump is not asyncio.current_task():
            self._pump.cancel()
        self._pump = None
        self._wake()

    def _leave(self) -> None:
        if self._source is not None:
            self._source.unsubscribe(self)

    def _report(self) -> None:
        if self._on_end is not None:
            self._on_end(self, self.over or "detached")
