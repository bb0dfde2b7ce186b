"""The one who appends to a session's journal, and publishes what is durable.

Responsible for the order "append, then publish", genesis and the repair of a broken tip, the turn latch,
and the one queue that appends and subscriptions share (resumable-sessions §8). Leaves records to a
`SessionLog`, credit to `_tails`, history to subscribers, and which sessions have a writer to `Writers`.

It takes what was submitted in one turn of the loop as one append; what comes while an append runs is
the next. There is a task only while something waits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from antiphon._errors import JournalError, TurnHeld
from antiphon.journal._record import (
    SESSION_CREATED,
    TURN_COMPLETED,
    TURN_STARTED,
    Entry,
)
from antiphon.journal._tails import CREDIT, Audience
from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.journal._record import Record
    from antiphon.journal._store import SessionLog
    from antiphon.journal._tails import Tail

    Published = Callable[[Record | None], None]
    OnEvent = Callable[[str, dict[str, Any]], None]
    Reached = Callable[[Exception | None], None]

__all__ = ["Sender", "Writer"]

log = logging.getLogger("antiphon.journal")

#: Who can wait should wait while more than this is not durable yet.
_ENTRIES = 1024
_BYTES = 4 * 1024 * 1024


class Sender:
    """Who submits so much that being told of each record costs more than the record; see `submit`."""

    __slots__ = ()

    def published(self, records: Sequence[Record]) -> None:
        """Its next entries are durable, and every tail has their records. Must not raise or block."""
        raise NotImplementedError

    def refused(self) -> None:
        """Its next entry never will be. Must not raise or block."""
        raise NotImplementedError


class Writer(Audience):
    """The one publisher of a session in this process; `Writers` sees to that.

    A writer of a session that another process writes fails at its first use with `JournalInUse`. One
    that has failed, or was closed, is never revived: a new one takes its place, and repairs.

    Attributes:
        session_id: the session.
        log: its records; the writer claims and releases it, and does not close it.
        failed: why it is down, None while it is up. After `aclose` a `JournalError`, too.
        turn_holder: who holds the session's one turn, None where it is free.
        waiting_bytes: the bytes of what was submitted and is not durable yet.
        freed: called whenever the latch was let go of, and when the writer is down.
    """

    __slots__ = (
        "_appending",
        "_closing",
        "_entries",
        "_flush",
        "_gathering",
        "_meta",
        "_on_event",
        "_pump",
        "_ready",
        "_room",
        "_steps",
        "_taken",
        "_told",
        "_turn_id",
        "failed",
        "freed",
        "log",
        "session_id",
        "turn_holder",
        "waiting_bytes",
    )

    def __init__(
        self,
        log: SessionLog,
        *,
        meta: Mapping[str, Any] | None = None,
        credit: int = CREDIT,
        on_event: OnEvent | None = None,
    ) -> None:
        """A writer over a log; it does nothing before its first use.

        Args:
            log: the session's log. Nobody else may append to it.
            meta: the payload of `session_created`, where this writer is the first.
            credit: how many records each tail may be behind, at least 1.
            on_event: told what is out of the ordinary, as a name and facts: `journal.writer_failed`
                (`session`, `error`, `lost`), `journal.non_holder_turn_completed` (`session`, `turn`).
        """
        super().__init__(credit)
        self.log = log
        self.session_id = log.session_id
        self.failed: Exception | None = None
        self.turn_holder: object | None = None
        self.waiting_bytes = 0
        self._meta = meta
        self._on_event = on_event
        #: What is to be appended next, and who is told of each.
        self._entries: list[Entry] = []
        self._told: list[Published | Sender | None] = []
        #: How many entries were taken to be appended, ever, and how many of them are on their way.
        self._taken = 0
        self._appending = 0
        #: What takes effect between appends: after so many entries, ever.
        self._steps: list[tuple[int, Reached]] = []
        #: Whether somebody waits for something in the queue.
        self._flush = False
        #: Whether the store was told that it may gather more before it appends.
        self._gathering = False
        self._pump: asyncio.Task[None] | None = None
        self._ready = False
        self._room: list[asyncio.Future[None]] = []
        self._turn_id = 0
        self._closing: str | None = None
        self.freed: Callable[[], None] | None = None

    # ------------------------------------------------------------------ appending

    @property
    def waiting(self) -> int:
        """How many entries were submitted and are not durable yet."""
        return len(self._entries) + self._appending

    @property
    def full(self) -> bool:
        """Whether so much waits that who can wait should, with `room`."""
        waiting = len(self._entries) + self._appending
        return waiting > _ENTRIES or self.waiting_bytes > _BYTES

    @property
    def closing(self) -> bool:
        """Whether `aclose` was called."""
        return self._closing is not None

    async def room(self) -> None:
        """Wait until it is not full any more, or down."""
        while self.full:
            free = asyncio.get_running_loop().create_future()
            self._room.append(free)
            await free

    async def ready(self) -> None:
        """Claim the session and write its genesis or repair, once in a writer's life (§8.2).

        Every other operation does it first; concurrent callers share it.

        Raises:
            JournalInUse: another process, or log, writes the session.
            JournalError: the store cannot be read or written, or the writer was closed.
        """
        if not self._ready or self.failed is not None:
            await self._step(None)

    def submit(
        self, entry: Entry, published: Published | Sender | None = None, *, flush: bool = False
    ) -> None:
        """Append an entry. It returns at once; nothing is published inside it.

        When the entry is durable, every tail gets its record, then `published` is called with it.
        If it never will be, because the writer fails or is down, `published` is called with None.
        Either way the calls come on the loop, in the order of submission; they must not block.

        Args:
            entry: what to append.
            published: told the record. A `Sender` is told of several at once, where nobody else has to
                be told in between.
            flush: somebody waits: the store shall not gather more first.
        """
        if self.failed is not None or self._closing is not None:
            self._refuse(published)
            return
        self._entries.append(entry)
        self._told.append(published)
        self.waiting_bytes += len(entry.payload)
        if flush:
            self._hurry()
        if self._pump is None:
            self._start()

    async def flush(self) -> None:
        """Wait until everything that was submitted is durable and published.

        Raises:
            JournalInUse: the claim is another's.
            JournalError: it could not be made durable, or the writer was closed.
        """
        await self._step(None)

    def hurry(self) -> None:
        """Somebody waits for what was submitted: the store shall not gather more first."""
        if self.waiting:
            self._hurry()

    def _hurry(self) -> None:
        self._flush = True
        if self._gathering:
            self._gathering = False
            self.log.hurry()

    async def append(self, entry: Entry) -> Record:
        """Append an entry and wait until it is durable and published; its record.

        Cancelling it cancels the wait: the entry is appended all the same.

        Raises:
            JournalInUse: the claim is another's.
            JournalError: it could not be made durable, or the writer was closed.
        """
        done: asyncio.Future[Record] = asyncio.get_running_loop().create_future()

        def published(record: Record | None) -> None:
            if done.done():
                return
            if record is None:
                done.set_exception(self._why())
            else:
                done.set_result(record)

        self.submit(entry, published, flush=True)
        return await done

    # ------------------------------------------------------------------ turns

    async def begin_turn(
        self, holder: object, entries: Sequence[Entry] = (), published: Published | None = None
    ) -> int:
        """Take the session's one turn, and submit its `turn_started` and what comes right after it.

        It waits for `ready`, not for the commit: what must be durable first is told by `submit`.

        Args:
            holder: whose turn it is, by identity; whoever watches it calls `release_turn` when it dies.
            entries: what the turn begins with, e.g. the prompt's blocks.
            published: told the record of `turn_started`, as for `submit`; those of `entries` come right
                behind it.

        Returns:
            The turn's number: one more than the last in the journal.

        Raises:
            TurnHeld: another turn is open; nothing was written.
            JournalInUse: the claim is another's.
            JournalError: as for `ready`.
        """
        await self.ready()
        if self.failed is not None or self._closing is not None:
            raise self._why()
        if self.turn_holder is not None:
            raise TurnHeld(self.session_id)
        self.turn_holder = holder
        self._turn_id += 1
        payload: dict[str, Any] = {"turnId": self._turn_id, "prompt": []}
        self.submit(Entry(TURN_STARTED, encode(payload), "user"), published)
        for entry in entries:
            self.submit(entry)
        return self._turn_id

    def complete_turn(
        self,
        holder: object,
        turn_id: int,
        *,
        stop_reason: str | None = None,
        error: tuple[int, str] | None = None,
        published: Published | None = None,
    ) -> None:
        """Submit the turn's `turn_completed` and let go of the latch, in one step.

        Where nobody holds the turn it is a plain append (§8.3).

        Args:
            holder: who began it.
            turn_id: what `begin_turn` returned.
            stop_reason: how it ended, where it did not fail.
            error: the code and message of the answer, where it failed.
            published: as for `submit`.

        Raises:
            TurnHeld: somebody else holds the turn; nothing was written.
        """
        if self.turn_holder is not None and self.turn_holder is not holder:
            self._tell("journal.non_holder_turn_completed", {"turn": turn_id})
            raise TurnHeld(self.session_id)
        payload: dict[str, Any] = {"turnId": turn_id}
        if error is None:
            payload["stopReason"] = stop_reason
        else:
            payload["error"] = {"code": error[0], "message": error[1]}
        self.submit(Entry(TURN_COMPLETED, encode(payload), "system"), published, flush=True)
        self._let_go()

    def release_turn(self, holder: object) -> None:
        """The holder is gone: complete its turn as an orphan, if it still holds one."""
        if self.turn_holder is not None and self.turn_holder is holder:
            self.submit(_orphan(self._turn_id), flush=True)
            self._let_go()

    def _let_go(self) -> None:
        if self.turn_holder is not None:
            self.turn_holder = None
            if self.freed is not None:
                self.freed()

    # ------------------------------------------------------------------ tails

    async def subscribe(self, tail: Tail) -> None:
        """Tell a tail of every record that is appended from now on; idempotent.

        It goes through the queue of the appends: what was submitted before is durable when this
        returns, and none of it is told (§7.4). Cancelled, it is undone.

        Raises:
            JournalInUse: the claim is another's.
            JournalError: as for `ready`.
        """
        await self._step(tail)

    async def _step(self, tail: Tail | None) -> None:
        """Wait until the queue has come this far; let a tail in there."""
        if self.failed is not None or self._closing is not None:
            raise self._why()
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        let_in = False

        def done(error: Exception | None) -> None:
            nonlocal let_in
            if reached.done():
                return
            if error is not None:
                reached.set_exception(error)
                return
            let_in = tail is not None and self._seat(tail)
            reached.set_result(None)

        self._queue_step(done)
        try:
            await reached
        except asyncio.CancelledError:
            if let_in and tail is not None:
                self.unsubscribe(tail)
            raise

    # ------------------------------------------------------------------ the end

    async def aclose(self, reason: str = "closed") -> None:
        """Make durable what waits, end the tails, release the claim. Idempotent.

        A turn that is still held is completed as an orphan, since nobody can complete it any more.
        What is submitted from now on is refused. Cancelled, it goes on by itself.

        Args:
            reason: what tails are told: "closed" or "deleted".
        """
        if self._closing is None and self.failed is None:
            if self.turn_holder is not None and reason != "deleted":
                self.release_turn(self.turn_holder)
            self._closing = reason
            if self._pump is None:
                self._start()
        if self._pump is not None:
            await asyncio.wait([self._pump])

    # ------------------------------------------------------------------ the queue

    def _queue_step(self, done: Reached) -> None:
        self._steps.append((self._taken + len(self._entries), done))
        # Who waits for a step waits for what is before it.
        self._hurry()
        if self._pump is None:
            self._start()

    def _start(self) -> None:
        # Never an eager task: the first of several entries would be appended alone, inside submit.
        self._pump = asyncio.Task(self._run(), loop=asyncio.get_running_loop())
        self._pump.add_done_callback(self._pump_ended)

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        """One that was cancelled before its first step did not take it: what waits still waits."""
        if pump is not self._pump:
            return
        self._pump = None
        if self._entries or self._steps or (self._closing is not None and self.failed is None):
            self._start()

    async def _run(self) -> None:
        told: list[Published | Sender | None] = []
        try:
            while self._entries or self._steps:
                if not self._ready:
                    await self._prepare()
                entries, told, size, flush = self._next()
                if entries:
                    self._appending = len(entries)
                    self._gathering = not flush
                    records = await self.log.append(entries, flush=flush)
                    self._gathering = False
                    _compare(entries, records)
                    durable, told = told, []
                    self._publish(durable, records, size)
            if self._closing is not None:
                await self._end(self._closing)
        except BaseException as error:
            await self._fail(error, told)
            if not isinstance(error, Exception):
                raise
        finally:
            self._pump = None

    async def _prepare(self) -> None:
        """Claim; then genesis, or the repair of a turn that a dead writer left open (§8.2).

        The newest boundary counts, however much lies between it and the tip: a crash in the middle of
        a turn leaves an update there.
        """
        await self.log.claim()
        if await self.log.high_watermark() == 0:
            genesis = Entry(SESSION_CREATED, encode(dict(self._meta or {})), "system")
            await self.log.append([genesis], flush=True)
        else:
            boundaries = await self.log.latest((TURN_STARTED, TURN_COMPLETED))
            turns = sorted(boundaries.values(), key=_offset)
            # Others' journals count from 1 again in each life, and may hold anything as a number.
            self._turn_id = max((n for n in map(_number, turns) if type(n) is int), default=0)
            if turns and turns[-1].kind == TURN_STARTED:
                await self.log.append([_orphan(_number(turns[-1]))], flush=True)
        self._meta = None
        self._ready = True

    def _next(self) -> tuple[list[Entry], list[Published | Sender | None], int, bool]:
        """Take the entries up to the next step, after the steps before them.

        Returns:
            The entries, who is told of each, their bytes, and whether somebody waits for them.
        """
        flush = self._flush
        while self._steps and self._steps[0][0] == self._taken:
            _, done = self._steps.pop(0)
            done(None)
        entries, told = self._entries, self._told
        if not self._steps:
            self._taken += len(entries)
            self._entries, self._told, self._flush = [], [], False
            return entries, told, self.waiting_bytes, flush
        end = self._steps[0][0] - self._taken
        self._taken += end
        self._entries, self._told = entries[end:], told[end:]
        del entries[end:], told[end:]
        return entries, told, sum(len(entry.payload) for entry in entries), flush

    def _publish(
        self, told: list[Published | Sender | None], records: list[Record], size: int
    ) -> None:
        """Tell of what is durable: there is no other way to a tail."""
        self._appending = 0
        self.waiting_bytes -= size
        seats = list(self._seats.values())
        first = told[0] if told else None
        if not seats and isinstance(first, Sender) and told.count(first) == len(told):
            _call(first.published, records)  # the rule, in a stream
        else:
            for who, record in zip(told, records, strict=True):
                if seats:
                    self._give(record, seats)
                if isinstance(who, Sender):
                    _call(who.published, [record])
                elif who is not None:
                    _call(who, record)
        self._wake()

    async def _end(self, reason: str) -> None:
        self.failed = JournalError(f"the writer of session {self.session_id!r} is {reason}")
        self._end_all(reason)
        await self._over()

    async def _fail(self, error: BaseException, appending: list[Published | Sender | None]) -> None:
        """Everything that waits is lost; so says everything that can say so."""
        lost = [*appending, *self._told]
        begin = self._taken - len(appending)
        steps = [(at - begin, done) for at, done in self._steps]
        self._entries, self._told, self._steps, self._flush = [], [], [], False
        self._appending = self.waiting_bytes = 0
        self.turn_holder = None
        if self.failed is None:
            self.failed = error if isinstance(error, Exception) else JournalError("cancelled")
            log.warning("session %r is not journaled any more: %s", self.session_id, error)
            self._tell("journal.writer_failed", {"error": type(error).__name__, "lost": len(lost)})
        # Tails first: what is told without having been kept must not look like one of theirs.
        self._end_all("writer_down")
        at = 0
        for end, done in [*steps, (len(lost), None)]:
            for who in lost[at:end]:
                _refuse(who)
            at = end
            if done is not None:
                done(self._why())
        await self._over()

    async def _over(self) -> None:
        self._wake()
        try:
            await self.log.release()
        except Exception:
            log.exception("the claim of session %r was not released", self.session_id)
        if self.freed is not None:
            self.freed()

    def _refuse(self, published: Published | Sender | None) -> None:
        if published is None:
            return
        if self.failed is None:
            # What was submitted before is still on its way, and is told first.
            self._queue_step(lambda _: _refuse(published))
        else:
            asyncio.get_running_loop().call_soon(_refuse, published)

    def _why(self) -> Exception:
        if self.failed is None:
            return JournalError(f"the writer of session {self.session_id!r} is being closed")
        return self.failed.with_traceback(None)

    def _wake(self) -> None:
        if self._room and not self.full:
            room, self._room = self._room, []
            for free in room:
                if not free.done():
                    free.set_result(None)

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(name, {"session": self.session_id, **facts})
        except Exception:
            log.exception("what listens to events failed")


def _compare(entries: list[Entry], records: list[Record]) -> None:
    if len(entries) != len(records):
        raise JournalError(f"of {len(entries)} entries the store made {len(records)} records")


def _orphan(turn_id: Any) -> Entry:
    """The completion of a turn that nobody is left to complete (§5)."""
    payload = {"turnId": turn_id, "outcome": "orphaned", "stopReason": "cancelled"}
    return Entry(TURN_COMPLETED, encode(payload), "system")


def _offset(record: Record) -> int:
    return record.offset


def _number(record: Record) -> Any:
    return record.data.get("turnId")


def _refuse(who: Published | Sender | None) -> None:
    if isinstance(who, Sender):
        _call(_refused, who)
    elif who is not None:
        _call(who, None)


def _refused(sender: Sender) -> None:
    sender.refused()


def _call(tell: Callable[[Any], None], what: Any) -> None:
    try:
        tell(what)
    except Exception:
        log.exception("what was to be told of a record failed")
