"""The threads of a shard: one that writes, many appends a transaction, and one that reads.

Responsible for group commit, for the fence at each append, for transactions that are all or nothing,
and for telling the loop. Leaves bytes to `_sqlite_format`, files to `_sqlite_schema`, and what a
journal offers to `_sqlite`.

The loop hands over work and never waits for SQLite; it is told by one call per commit.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from antiphon._errors import JournalDamaged, JournalError, JournalInUse
from antiphon.journal._sqlite_damage import check_absence, one_view, true_index
from antiphon.journal._sqlite_format import (
    LAST_OFFSET,
    LAST_SESSION,
    Index,
    base,
    id_bytes,
    index_columns,
    pack_runs,
    watermark,
)
from antiphon.journal._sqlite_owners import Owner, is_alive, owner_text, tidy
from antiphon.journal._sqlite_schema import (
    OWNERS,
    VERSION,
    Loss,
    Mark,
    connect,
    explain,
    has_log,
    make_shard,
    now,
    refuse_missing,
    shard_name,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from antiphon.journal._record import Entry
    from antiphon.journal._sqlite_format import Row
    from antiphon.journal._sqlite_schema import Durability, Mode

    #: A future and how it ends.
    Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]

__all__ = ["Claim", "Place", "Reader", "Transaction", "Writer"]

log = logging.getLogger("antiphon.journal")

#: A commit does not wait for more when this much waits for it.
FULL_RECORDS = 512
FULL_BYTES = 1024 * 1024
#: Seconds that a commit waits for other processes that write to the same shard.
BUSY = 10.0
#: The log is folded into the database when it is longer than this many bytes.
LOG_BYTES = 16 << 20
#: What is removed at once of deleted sessions, in rows of up to 256 KiB, and given back, in pages.
_SLICE_ROWS = 64
_SLICE_PAGES = 512
#: Seconds between looks for what other processes appended, while somebody follows.
LOOK = 0.02
_CLOSED = "the journal is closed"


class Place(NamedTuple):
    """Which database this is about."""

    directory: Path
    shard: int

    @property
    def name(self) -> str:
        """The file's name."""
        return shard_name(self.shard)


class Claim:
    """That one log may append to a session; known to the writer's thread alone."""

    __slots__ = ("generation", "index", "lost", "number", "session_id")

    def __init__(self, session_id: str, number: int, generation: int, index: Index) -> None:
        self.session_id = session_id
        self.number = number
        self.generation = generation
        self.index = index
        self.lost: str | None = None  # who has it now


class _Append(NamedTuple):
    claim: Claim
    entries: Sequence[Entry]
    future: asyncio.Future[Any]


class _Call(NamedTuple):
    run: Callable[[Transaction], Any]
    future: asyncio.Future[Any]


class Transaction:
    """One transaction of a writer, and what is to be done once it is committed."""

    __slots__ = ("after", "execute", "executemany")

    def __init__(self, database: sqlite3.Connection) -> None:
        self.execute = database.execute
        self.executemany = database.executemany
        self.after: list[Callable[[], None]] = []


class _Thread:
    """A thread of a shard. It is a daemon: a journal that nobody closed keeps no process alive."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._tell([(self._ended, None, None)])

    def _work(self) -> None:
        raise NotImplementedError

    def _tell(self, outcomes: list[Outcome]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_settle, outcomes)

    async def ended(self) -> None:
        """Wait until the thread is gone."""
        import asyncio

        await asyncio.shield(self._ended)
        self._thread.join()  # it has nothing left to do


def _settle(outcomes: Iterable[Outcome]) -> None:
    for future, value, error in outcomes:
        if future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class Writer(_Thread):
    """The one writer of a shard in this journal; starts with its first work."""

    def __init__(
        self,
        place: Place,
        loop: asyncio.AbstractEventLoop,
        *,
        durability: Durability,
        gather: float,
        owner: Callable[[], Owner],
        lost: Callable[[Loss], None],
    ) -> None:
        super().__init__(f"antiphon-journal-write-{place.shard}", loop)
        self.place = place
        self._durability: Durability = durability
        self._gather = gather
        self._owner = owner
        self._lost = lost
        self._wake = threading.Condition(threading.Lock())
        self._jobs: deque[_Append | _Call] = deque()
        self._waiting = 0
        self._waiting_bytes = 0
        self._urgent = False
        self._closing = False
        self._garbage = False
        self._database: sqlite3.Connection | None = None
        self._mark: Mark | None = None
        self._unfolded = False
        #: What is claimed by this journal, so that a second log in it is told apart from the first.
        self.held: dict[int, Claim] = {}
        self._start()

    # On the loop.

    def append(
        self, claim: Claim, entries: Sequence[Entry], *, flush: bool
    ) -> asyncio.Future[list[Any]]:
        """Hand over what one log appends."""
        future = self._loop.create_future()
        size = sum([len(entry.payload) for entry in entries])
        self._put(_Append(claim, entries, future), len(entries), size, urgent=flush)
        return future

    def call(self, run: Callable[[Transaction], Any]) -> asyncio.Future[Any]:
        """Have something done within a transaction.

        It raises before it has changed anything, or what it raises ends the whole transaction.
        """
        future = self._loop.create_future()
        self._put(_Call(run, future), 1, 0, urgent=True)
        return future

    def _put(self, job: _Append | _Call, count: int, size: int, *, urgent: bool) -> None:
        with self._wake:
            if self._closing:
                self._loop.call_soon(_settle, [(job.future, None, JournalError(_CLOSED))])
                return
            idle = not self._jobs
            self._jobs.append(job)
            self._waiting += count
            self._waiting_bytes += size
            full = self._waiting >= FULL_RECORDS or self._waiting_bytes >= FULL_BYTES
            hurry = (urgent or full) and not self._urgent
            if hurry:
                self._urgent = True
            if idle or hurry:
                self._wake.notify()

    def hurry(self) -> None:
        """Have what waits committed at once."""
        with self._wake:
            if self._jobs and not self._urgent:
                self._urgent = True
                self._wake.notify()

    def close(self) -> None:
        """Have it finish what was handed over, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    # In the thread.

    def _work(self) -> None:
        started = -self._gather
        try:
            while True:
                with self._wake:
                    while not (self._jobs or self._closing or self._garbage):
                        self._wake.wait()
                    if not (self._jobs or self._garbage):
                        return
                    while self._jobs and not self._urgent and not self._closing:
                        left = started + self._gather - time.monotonic()
                        if left <= 0:
                            break
                        self._wake.wait(left)
                    jobs, self._jobs = self._jobs, deque()
                    self._waiting = self._waiting_bytes = 0
                    self._urgent = False
                if jobs:
                    started = time.monotonic()
                    self._do(list(jobs))
                    del jobs
                if self._garbage:
                    self._garbage = self._collect()
                self._fold()
        finally:
            self._disconnect()

    def _do(self, jobs: list[_Append | _Call]) -> None:
        try:
            outcomes = self._transact(jobs)
        except JournalDamaged as error:
            if len(jobs) > 1:
                # What is damaged may be one session's: the others go on.
                for job in jobs:
                    self._do([job])
                return
            outcomes = _all_failed(jobs, error)
        except JournalError as error:
            outcomes = _all_failed(jobs, error)
        except Exception as error:
            log.exception("%s: the transaction failed", self.place.name)
            failure = JournalError(f"{self.place.name}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            outcomes = _all_failed(jobs, failure)
        self._tell(outcomes)

    def _transact(self, jobs: list[_Append | _Call]) -> list[Outcome]:
        """Do all in one transaction. What is wrong with one job is that job's; all else is raised."""
        try:
            database = self._database or self._connect()
            self._begin(database)
            transaction = Transaction(database)
            try:
                commits = self._check(database)
                outcomes = self._carry_out(transaction, jobs)
                database.execute("UPDATE meta SET value=? WHERE key='commits'", (commits + 1,))
                database.execute("COMMIT")
            except BaseException:
                self._roll_back(database)
                raise
        except sqlite3.Error as error:
            raise explain(error, self.place.name) from error
        for after in transaction.after:
            after()
        if self._mark is not None:
            self._mark.write(commits + 1)
        return outcomes

    def _connect(self) -> sqlite3.Connection:
        place = self.place
        make_shard(place.directory, place.shard)
        mark = Mark(place.directory, place.shard, write=True)
        acknowledged = mark.read()  # before the database is looked at, which others may write to
        try:
            database = connect(place.directory, place.shard, "write", self._durability)
        except BaseException:
            mark.close()
            raise
        self._mark = mark
        self._database = database
        self._note_loss(database, acknowledged)
        # From here on the only wait is for the begin of a transaction, and it is ours: SQLite's own
        # pauses for up to a tenth of a second, in which a busy neighbour has always come first.
        database.execute("PRAGMA busy_timeout=0")
        tidy(place.directory / OWNERS)
        self._garbage = True  # perhaps: of a process that ended before it was through
        return database

    def _note_loss(self, database: sqlite3.Connection, acknowledged: int) -> None:
        commits = _commits(database, self.place.name)
        if commits >= acknowledged:
            return
        self._begin(database)
        try:
            commits = _commits(database, self.place.name)
            if commits < acknowledged:
                database.execute(
                    "INSERT INTO losses VALUES(?, ?, ?)", (now(), acknowledged, commits)
                )
                database.execute("UPDATE meta SET value=? WHERE key='commits'", (acknowledged,))
            database.execute("COMMIT")
        except BaseException:
            self._roll_back(database)
            raise
        self._lost(Loss(self.place.name, acknowledged - commits))

    def _begin(self, database: sqlite3.Connection) -> None:
        """Begin a transaction, waiting within a bound for other processes' ones."""
        end = time.monotonic() + BUSY
        pause = 0.0005
        while True:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= end:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 0.004)
            else:
                return

    def _check(self, database: sqlite3.Connection) -> int:
        """That the tables are still those that we know; returns how many commits there were."""
        version, commits = database.execute(
            "SELECT (SELECT user_version FROM pragma_user_version),"
            " (SELECT value FROM meta WHERE key='commits')"
        ).fetchone()
        if version != VERSION:
            raise JournalError(f"{self.place.name} was brought to format {version} by another")
        if not isinstance(commits, int):
            raise JournalDamaged(self.place.name, "its counters cannot be read")
        return commits

    def _roll_back(self, database: sqlite3.Connection) -> None:
        try:
            if database.in_transaction:
                database.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.warning("%s: rolling back: %s", self.place.name, error)
            self._disconnect()

    def _carry_out(
        self, transaction: Transaction, jobs: Sequence[_Append | _Call]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        groups: dict[Claim, list[_Append]] = {}
        indexes: dict[Claim, Index] = {}
        for job in jobs:
            if isinstance(job, _Append):
                groups.setdefault(job.claim, []).append(job)
                continue
            self._append_groups(transaction, groups, indexes, outcomes)
            groups = {}
            try:
                outcomes.append((job.future, job.run(transaction), None))
            except JournalDamaged:
                raise
            except JournalError as error:
                outcomes.append((job.future, None, error))
        self._append_groups(transaction, groups, indexes, outcomes)

        def keep() -> None:
            for claim, index in indexes.items():
                claim.index = index

        transaction.after.append(keep)
        return outcomes

    def _append_groups(
        self,
        transaction: Transaction,
        groups: dict[Claim, list[_Append]],
        indexes: dict[Claim, Index],
        outcomes: list[Outcome],
    ) -> None:
        ts = now()
        rows: list[Row] = []
        for claim, jobs in groups.items():
            index = indexes.get(claim, claim.index)
            failed: JournalError | None = _refusal(claim)
            again = True
            while failed is None:
                packed, answers, after = _pack(claim, index, jobs, ts)
                if after is index or self._fence(transaction, claim, index, after):
                    rows += packed
                    indexes[claim] = after
                    outcomes += answers
                    break
                fresh = self._reload(transaction, claim)
                if isinstance(fresh, JournalError):
                    failed = fresh
                elif again:
                    # A transaction that failed when it was flushed may be there after all.
                    index, again = fresh, False
                else:
                    failed = JournalError(f"{self.place.name}: the session changes under us")
            if failed is not None:
                outcomes += [(job.future, None, failed) for job in jobs]
        if rows:
            transaction.executemany("INSERT INTO records VALUES(?, ?, ?)", rows)

    def _fence(self, transaction: Transaction, claim: Claim, before: Index, after: Index) -> bool:
        """Move the session's index on, if the claim is still ours and nobody has appended."""
        changed = transaction.execute(
            "UPDATE sessions SET records=?, created=?, updated=?, meta=?, title=?, latest=?, sum=?"
            " WHERE number=? AND generation=? AND records=?",
            (
                *index_columns(after, claim.session_id),
                claim.number,
                claim.generation,
                before.records,
            ),
        )
        return changed.rowcount == 1

    def _reload(self, transaction: Transaction, claim: Claim) -> Index | JournalInUse:
        """Why the fence held: the claim is lost, or the index is another than we know."""
        row = transaction.execute(
            "SELECT generation, owner, records, created, updated, meta, title, latest, sum FROM sessions WHERE number=?",
            (claim.number,),
        ).fetchone()
        if row is not None and row[0] == claim.generation:
            return self._true_index(transaction, claim.session_id, claim.number, row[2:])
        if row is None:
            claim.lost = "nobody: it was deleted"
        else:
            claim.lost = owner_text(row[1]) if row[1] else "nobody: another had it meanwhile"
        transaction.after.append(lambda: self._drop(claim))
        return JournalInUse(claim.session_id, claim.lost)

    def _drop(self, claim: Claim) -> None:
        if self.held.get(claim.number) is claim:
            del self.held[claim.number]

    def _fold(self) -> None:
        """Fold the log into the database once it is long; readers and other writers go on."""
        database = self._database
        if database is None:
            return
        try:
            path = self.place.directory / f"{self.place.name}-wal"
            if path.stat().st_size > LOG_BYTES:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._unfolded = False
        except (OSError, sqlite3.Error) as error:
            # Nothing is lost: the log goes on growing, and what cannot be written is told then.
            if not self._unfolded:
                log.warning("%s: the log cannot be folded: %s", self.place.name, error)
            self._unfolded = True

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()
        if database is not None:
            try:
                database.close()
            except sqlite3.Error as error:
                log.warning("%s: closing: %s", self.place.name, error)

    # Within a transaction: what `call` runs.

    def claim(self, transaction: Transaction, session_id: str) -> Claim:
        """Make a claim; raises `JournalInUse`."""
        owner = self._owner()
        stored = id_bytes(session_id)
        row = transaction.execute(
            "SELECT number, generation, owner, records, created, updated, meta, title, latest, sum FROM sessions WHERE id=?",
            (stored,),
        ).fetchone()
        if row is None:
            check_absence(transaction.execute, self.place.name, stored)
            transaction.execute(
                "INSERT INTO sessions(id, generation, owner) VALUES(?, 1, ?)", (stored, owner.name)
            )
            (number,) = transaction.execute("SELECT last_insert_rowid()").fetchone()
            if number > LAST_SESSION:
                raise JournalDamaged(self.place.name, "has had as many sessions as it can number")
            claim = Claim(session_id, number, 1, Index())
            self._set_index(transaction, session_id, number, claim.index)
        else:
            number, generation, other = row[:3]
            self._refuse_owned(session_id, number, other)
            index = self._true_index(transaction, session_id, number, row[3:])
            claim = Claim(session_id, number, generation + 1, index)
            transaction.execute(
                "UPDATE sessions SET generation=?, owner=? WHERE number=?",
                (generation + 1, owner.name, number),
            )
        transaction.after.append(lambda: self.held.__setitem__(claim.number, claim))
        return claim

    def _true_index(
        self, transaction: Transaction, session_id: str, number: int, row: Sequence[Any]
    ) -> Index:
        """The index of a session, made anew from its records where it does not fit them."""
        name = self.place.name
        index, anew = true_index(transaction.execute, name, session_id, number, row)
        records = watermark(transaction.execute, number)
        if index.records > records:
            # Offsets that somebody may have seen are never given out again.
            raise JournalDamaged(name, "it is missing", session_id=session_id, offset=records + 1)
        if anew:
            log.warning("%s, session %r: its index was made anew", name, session_id)
            self._set_index(transaction, session_id, number, index)
        return index

    def _set_index(
        self, transaction: Transaction, session_id: str, number: int, index: Index
    ) -> None:
        transaction.execute(
            "UPDATE sessions SET records=?, created=?, updated=?, meta=?, title=?, latest=?, sum=?"
            " WHERE number=?",
            (*index_columns(index, session_id), number),
        )

    def _refuse_owned(self, session_id: str, number: int, other: str | None) -> None:
        if other is None:
            return
        if other == self._owner().name:
            if number in self.held:
                raise JournalInUse(session_id, owner_text(other))
        elif is_alive(self.place.directory / OWNERS, other):
            raise JournalInUse(session_id, owner_text(other))
        else:
            with contextlib.suppress(OSError):  # an owner that has ended is never one again
                (self.place.directory / OWNERS / other).unlink()

    def release(self, transaction: Transaction, claim: Claim) -> None:
        """Give a claim up; nothing where it is lost."""
        transaction.execute(
            "UPDATE sessions SET owner=NULL WHERE number=? AND generation=?",
            (claim.number, claim.generation),
        )
        transaction.execute(
            "DELETE FROM sessions WHERE number=? AND generation=? AND records=0",
            (claim.number, claim.generation),
        )
        transaction.after.append(lambda: self._drop(claim))

    def delete(
        self,
        transaction: Transaction,
        session_id: str,
        *,
        older_than: int | None = None,
        ours: bool = True,
    ) -> bool:
        """Take a session away; its records are removed afterwards, and are nobody's until then.

        Args:
            transaction: in which.
            session_id: which.
            older_than: only if it has not changed since.
            ours: also one that a log of this journal has claimed.

        Raises:
            JournalInUse: a living process has claimed it.
        """
        row = transaction.execute(
            "SELECT number, owner, records, updated FROM sessions WHERE id=?",
            (id_bytes(session_id),),
        ).fetchone()
        if row is None:
            check_absence(transaction.execute, self.place.name, id_bytes(session_id))
            return False
        number, other, records, updated = row
        if older_than is not None and updated >= older_than:
            return False
        if not ours or other != self._owner().name:
            self._refuse_owned(session_id, number, other)
        transaction.execute("DELETE FROM sessions WHERE number=?", (number,))
        transaction.execute("INSERT INTO garbage VALUES(?)", (number,))
        transaction.after.append(lambda: self._after_delete(number))
        return bool(records)

    def _after_delete(self, number: int) -> None:
        claim = self.held.pop(number, None)
        if claim is not None:
            claim.lost = "nobody: it was deleted"
        self._garbage = True

    def _collect(self) -> bool:
        """Remove a slice of the records of deleted sessions; returns whether there are more.

        In slices, so that nobody waits for long who appends to another session.
        """
        database = self._database
        if database is None:
            return False
        try:
            self._begin(database)
            # Not one that is there: a list that is spoiled is no reason to remove anything.
            garbage = database.execute(
                "SELECT number FROM garbage WHERE number NOT IN (SELECT number FROM sessions)"
                " AND number BETWEEN 1 AND ? LIMIT ?",
                (LAST_SESSION, _SLICE_ROWS),
            ).fetchall()
            if not garbage:
                # Give a slice of the space back, too.
                (before,) = database.execute("PRAGMA freelist_count").fetchone()
                database.execute(f"PRAGMA incremental_vacuum({_SLICE_PAGES})").fetchall()
                (after,) = database.execute("PRAGMA freelist_count").fetchone()
                database.execute("COMMIT")
                return bool(0 < after < before)
            left = _SLICE_ROWS
            for (number,) in garbage:
                removed = database.execute(
                    "DELETE FROM records WHERE key IN"
                    " (SELECT key FROM records WHERE key BETWEEN ? AND ? LIMIT ?)",
                    (base(number) + 1, base(number) + LAST_OFFSET, left),
                ).rowcount
                left -= removed
                if left <= 0:
                    break
                database.execute("DELETE FROM garbage WHERE number=?", (number,))
            database.execute("COMMIT")
        except sqlite3.Error as error:
            # They are nobody's, and are tried again when the file is opened the next time.
            log.warning("%s: removing deleted sessions: %s", self.place.name, error)
            self._roll_back(database)
            return False
        return True


def _all_failed(jobs: Iterable[_Append | _Call], error: JournalError) -> list[Outcome]:
    return [(job.future, None, error) for job in jobs]


def _commits(database: sqlite3.Connection, name: str) -> int:
    """How many commits there were."""
    row = database.execute("SELECT value FROM meta WHERE key='commits'").fetchone()
    if row is None or not isinstance(row[0], int):
        raise JournalDamaged(name, "its counters cannot be read")
    return row[0]


def _refusal(claim: Claim) -> JournalInUse | None:
    return None if claim.lost is None else JournalInUse(claim.session_id, claim.lost)


def _pack(
    claim: Claim, index: Index, jobs: Sequence[_Append], ts: int
) -> tuple[list[Row], list[Outcome], Index]:
    """The rows of several appends to one session, and what each of them is told."""
    answers: list[Outcome] = []
    if len(jobs) > 1:
        try:
            entries = [entry for job in jobs for entry in job.entries]
            rows, records, after = pack_runs(claim.session_id, claim.number, index, entries, ts)
        except JournalError:
            pass  # one of them is refused: find out which
        else:
            at = 0
            for job in jobs:
                answers.append((job.future, records[at : at + len(job.entries)], None))
                at += len(job.entries)
            return rows, answers, after
    every: list[Row] = []
    for job in jobs:
        try:
            rows, records, index = pack_runs(claim.session_id, claim.number, index, job.entries, ts)
        except JournalError as error:
            answers.append((job.future, None, error))
        else:
            every += rows
            answers.append((job.future, records, None))
    return every, answers, index


class Reader(_Thread):
    """Reads a shard beside its writers; starts with its first work.

    While sessions are followed it looks for what others appended, too.
    """

    def __init__(
        self,
        place: Place,
        loop: asyncio.AbstractEventLoop,
        *,
        look: bool,
        lost: Callable[[Loss], None],
    ) -> None:
        super().__init__(f"antiphon-journal-read-{place.shard}", loop)
        self.place = place
        self._mode: Mode = "look" if look else "read"
        self._lost = lost
        #: What is to be read; () wakes the thread, None ends it.
        self._jobs: SimpleQueue[
            tuple[Callable[..., Any], asyncio.Future[Any]] | tuple[()] | None
        ] = SimpleQueue()
        self._closing = False
        self._database: sqlite3.Connection | None = None
        #: With no lock and no log; what the file was when it was opened.
        self._alone: tuple[int, int] | None = None
        self._version = -1
        self._follows: list[tuple[str, Callable[[int], None]]] = []
        self._start()

    # On the loop.

    def call(self, run: Callable[[sqlite3.Connection | None], Any]) -> asyncio.Future[Any]:
        """Have something read, within one view of the database; None stands for no database yet."""
        future = self._loop.create_future()
        if self._closing:
            future.set_exception(JournalError(_CLOSED))
        else:
            self._jobs.put((run, future))
        return future

    def follow(self, session_id: str, moved: Callable[[int], None]) -> Callable[[], None]:
        """Call `moved` on the loop with a session's watermark, whenever the shard has changed.

        Returns what ends that.
        """
        entry = (session_id, moved)
        # The thread takes a list as it is: it is replaced, never changed.
        self._follows = [*self._follows, entry]
        if len(self._follows) == 1:
            self._jobs.put(())  # it waits without a bound

        def end() -> None:
            self._follows = [each for each in self._follows if each is not entry]

        return end

    def close(self) -> None:
        """Have it finish what was handed over, and end."""
        self._closing = True
        self._jobs.put(None)

    # In the thread.

    def _work(self) -> None:
        due = 0.0
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=LOOK if self._follows else None)
                except Empty:
                    pass
                else:
                    if job is None:
                        return
                    if job:
                        self._tell([self._answer(*job)])
                    del job
                # Asked for anew: whoever came meanwhile has read a mark that is older than this look.
                if (follows := self._follows) and time.monotonic() >= due:
                    self._look(follows)
                    due = time.monotonic() + LOOK
        finally:
            self._disconnect()

    def _answer(self, run: Callable[..., Any], future: asyncio.Future[Any]) -> Outcome:
        try:
            return future, self._read(run), None
        except JournalError as error:
            return future, None, error
        except Exception as error:
            log.exception("%s: reading failed", self.place.name)
            failure = JournalError(f"{self.place.name}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return future, None, failure

    def _look(self, follows: Sequence[tuple[str, Callable[[int], None]]]) -> None:
        """Tell those who follow, if anything was committed since the last look."""
        try:
            database = self._current()
            if database is None:
                return
            (version,) = database.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return
            marks = self._read(lambda view: _watermarks(view, follows))
        except (JournalError, sqlite3.Error, OSError) as error:
            log.info("%s: looking for news: %s", self.place.name, error)
            # No mark is less than none: who follows asks what is wrong.
            marks = [(moved, -1) for _, moved in follows]
        else:
            self._version = version
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_moved, marks)

    def _read(self, run: Callable[[sqlite3.Connection | None], Any]) -> Any:
        try:
            while True:
                database = self._current()
                if database is None:
                    return run(None)
                try:
                    with one_view(database):
                        value = run(database)
                except (JournalDamaged, sqlite3.DatabaseError):
                    if self._unchanged():
                        raise
                    continue  # it was changed under us, without a lock
                if self._unchanged():
                    return value
        except sqlite3.Error as error:
            self._disconnect()
            raise explain(error, self.place.name) from error

    def _current(self) -> sqlite3.Connection | None:
        """The database, opened anew where it is another than before."""
        if self._database is not None and not self._unchanged():
            self._disconnect()
        return self._database or self._connect()

    def _unchanged(self) -> bool:
        """Whether a file that is read without locks is still what it was, and still has no log."""
        return self._alone is None or self._alone == self._looks()

    def _looks(self) -> tuple[int, int] | None:
        path = self.place.directory / self.place.name
        try:
            status = path.stat()
            return None if has_log(path) else (status.st_mtime_ns, status.st_size)
        except OSError:
            return None

    def _connect(self) -> sqlite3.Connection | None:
        place = self.place
        if not (place.directory / place.name).exists():
            refuse_missing(place.directory, place.shard)
            return None
        mark = Mark(place.directory, place.shard, write=False)
        acknowledged = mark.read()  # before the database is looked at, which others may write to
        mark.close()
        if self._mode == "look":
            self._alone = self._looks()
        database = connect(place.directory, place.shard, self._mode, "power")
        self._database, self._version = database, -1
        try:
            (commits,) = database.execute("SELECT value FROM meta WHERE key='commits'").fetchone()
            if commits < acknowledged:
                self._lost(Loss(place.name, acknowledged - commits))
        except (sqlite3.DatabaseError, TypeError) as error:
            log.warning("%s: its counters cannot be read: %s", place.name, error)
        return database

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        self._alone = None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()


def _watermarks(
    database: sqlite3.Connection | None, follows: Sequence[tuple[str, Callable[[int], None]]]
) -> list[tuple[Callable[[int], None], int]]:
    found: list[tuple[Callable[[int], None], int]] = []
    if database is None:
        return found
    for session_id, moved in follows:
        row = database.execute(
            "SELECT number FROM sessions WHERE id=?", (id_bytes(session_id),)
        ).fetchone()
        found.append((moved, 0 if row is None else watermark(database.execute, row[0])))
    return found


def _moved(marks: Iterable[tuple[Callable[[int], None], int]]) -> None:
    for moved, mark in marks:
        moved(mark)
