"""`SqliteJournal`: sessions on disk, in a directory, by the standard library's SQLite.

Responsible for what a journal offers, on the loop: which session is in which shard, logs and their
claims. Leaves SQL to `_sqlite_thread`, bytes to `_sqlite_format`, files to `_sqlite_schema`, proofs of
life to `_sqlite_owners`, and the search for damage to `_sqlite_damage`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from antiphon._errors import JournalDamaged, JournalInUse
from antiphon.journal._sqlite_damage import (
    Damage,
    Gap,
    gap_text,
    known_sessions,
    number_of,
    probe,
    scan,
    session_of,
    true_index,
)
from antiphon.journal._sqlite_format import (
    LAST_OFFSET,
    STATE_TAGS,
    Broken,
    base,
    id_bytes,
    id_text,
    index_of,
    unpack_plain,
    unpack_run,
)
from antiphon.journal._sqlite_schema import MAX_SHARDS, Loss
from antiphon.journal._sqlite_shards import Shards
from antiphon.journal._sqlite_thread import LOOK
from antiphon.journal._store import Journal, SessionInfo, SessionLog

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence

    from antiphon.journal._record import Entry, Record
    from antiphon.journal._sqlite_thread import Claim, Place, Transaction

__all__ = ["Damage", "Loss", "Pruned", "SqliteJournal"]

log = logging.getLogger("antiphon.journal")


class Pruned(msgspec.Struct, frozen=True):
    """What `SqliteJournal.prune` did.

    Attributes:
        removed: the sessions that are gone.
        in_use: the sessions that were left, and who writes each.
    """

    removed: list[str]
    in_use: dict[str, str]


#: How many records are read in one view of a database; a longer read is several of them.
_PAGE = 2048
#: How many records are given at once to who follows or exports.
_FOLLOWED = 256
#: How many sessions are deleted at once.
_PRUNED = 256


class SqliteJournal(Journal):
    """A journal in a directory: one SQLite database for each shard of its sessions.

    What `append` has returned is on the disk, and survives the end of the process; with
    `durability="power"` a loss of power too, with "process" the last moments before one may be lost.
    Other processes may read at the same time, and write to other sessions; two that want the same
    session are told apart by an owner that the operating system knows to be alive.

    An object belongs to the loop on which it is used first, and to its process: it is of no use after
    a fork. It makes the directory (for its user alone) with the first append, or when told to (`make`),
    never while reading.

    Nothing is ever removed unless somebody asks (`delete`, `prune`).

    Raises:
        ValueError: `shards` or `gather` is out of range.
        JournalError: from all methods: the directory can be changed by others, is no journal's, or a
            newer version's; the object is closed, or used on two loops.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durability: Literal["power", "process"] = "power",
        shards: int = 8,
        gather: float = 0.005,
        read_only: bool = False,
    ) -> None:
        """Open a directory, which need not exist; nothing is read or made yet.

        Args:
            directory: where it is. Others must not be able to write to it.
            durability: what an acknowledged record outlives.
            shards: into how many databases a new journal divides its sessions, 1 to 64. An existing
                one says itself.
            gather: how many seconds a commit follows the start of the one before it, so that many
                records share one. What is to be flushed does not wait.
            read_only: never write, not even to a directory that could be.
        """
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"shards: from 1 to {MAX_SHARDS}, not {shards}")
        if not 0 <= gather <= 1:
            raise ValueError(f"gather: from 0 to 1 second, not {gather}")
        if durability not in {"power", "process"}:
            raise ValueError(f'durability: "power" or "process", not {durability!r}')
        self._shards = Shards(
            Path(directory).absolute(),
            durability=durability,
            shards=shards,
            gather=gather,
            read_only=read_only,
        )

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._shards.directory

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Acknowledged commits that were found to be missing when files were opened."""
        return tuple(self._shards.losses)

    async def make(self) -> None:
        """Make the directory if there is none, and find out now whether it can be written to.

        For whoever would rather not start than go on without a journal; the first append does the same.

        Raises:
            JournalError: what is in the way.
        """
        await self._shards.make()

    async def open(self, session_id: str) -> SessionLog:
        self._shards.check()
        return SqliteLog(self._shards, session_id)

    async def sessions(self) -> list[SessionInfo]:
        found: list[SessionInfo] = []
        for reader in await self._shards.all_readers():
            try:
                found += await reader.call(partial(_infos, reader.place.name))
            except JournalDamaged as error:
                log.warning("sessions are left out: %s", error)
        found.sort(key=lambda info: info.updated, reverse=True)
        return found

    async def info(self, session_id: str) -> SessionInfo | None:
        reader = await self._shards.reader_of(session_id)
        if reader is None:
            return None
        name = reader.place.name
        infos: list[SessionInfo] = await reader.call(
            lambda database: _infos(name, database, session_id)
        )
        return infos[0] if infos else None

    async def follow(self, session_id: str, start: int = 1) -> AsyncGenerator[list[Record]]:
        log = await self.open(session_id)
        last = 0
        news = asyncio.Event()
        end: Callable[[], None] | None = None

        def moved(mark: int) -> None:
            if mark != last:
                news.set()

        with self._shards.waking(news):
            try:
                while True:
                    news.clear()
                    reader = await self._shards.reader_of(session_id)
                    if reader is not None and end is None:
                        # First this, then the mark: what is appended in between is seen twice, not never.
                        end = reader.follow(session_id, moved)
                    stop = await log.high_watermark()
                    if stop < last:
                        return
                    last = stop
                    while start <= stop:
                        records = await log.read(start, min(stop, start + _FOLLOWED - 1))
                        if not records:
                            return  # deleted meanwhile
                        start += len(records)
                        yield records
                    with contextlib.suppress(TimeoutError):
                        # While there is no directory, nothing in it can be looked at either.
                        async with asyncio.timeout(None if end is not None else LOOK):
                            await news.wait()
            finally:
                if end is not None:
                    end()

    async def export(
        self,
        session_id: str,
        *,
        start: int = 1,
        damaged: Callable[[Damage], None] | None = None,
    ) -> AsyncGenerator[list[Record]]:
        """Every record of a session that can be read, from `start` on, in runs.

        Unlike `SessionLog.read` it passes over what is damaged, and reads around pages that SQLite
        cannot read.

        Args:
            session_id: the session; one without records gives nothing.
            start: the first offset.
            damaged: is told of each gap, in order.
        """
        reader = await self._shards.reader_of(session_id)
        due = start
        while reader is not None:
            records, gaps, due = await reader.call(partial(_readable, session_id, due))
            for gap in gaps:
                if damaged is not None:
                    damaged(Damage(reader.place.name, session_id, gap.first, gap_text(gap)))
            if records:
                yield records
            if not due:
                return

    async def verify(self, sessions: Collection[str] | None = None) -> list[Damage]:
        """Look at every record, and at what is derived from them; [] where all is well.

        It reads the whole journal, beside whoever writes, and changes nothing. What it cannot know:
        records that were lost together with the count of commits beside the file, and a change that
        fits its checksum.

        Args:
            sessions: only these; the files they are in are checked whole.
        """
        return await self._shards.verify(sessions)

    async def prune(
        self,
        *,
        older_than: int | None = None,
        sessions: Collection[str] | None = None,
        keep: int = 0,
    ) -> Pruned:
        """Delete whole sessions that have not changed for long, or that are named.

        Sessions that a living process writes are left, and named in the result. With both limits a
        session must meet both.

        Args:
            older_than: in milliseconds since 1970: those that changed last before that.
            sessions: only these.
            keep: leave so many of those that changed last, of all there are.

        Raises:
            ValueError: neither limit is given, and `keep` is 0: that would be all.
        """
        if older_than is None and sessions is None and keep <= 0:
            raise ValueError("prune: say older_than, sessions or keep")
        self._shards.refuse_writing()
        chosen = [
            info.session_id
            for info in (await self.sessions())[max(keep, 0) :]
            if (older_than is None or info.updated < older_than)
            and (sessions is None or info.session_id in sessions)
        ]
        removed: list[str] = []
        in_use: dict[str, str] = {}
        for at in range(0, len(chosen), _PRUNED):
            some = chosen[at : at + _PRUNED]
            deleting: list[asyncio.Future[bool]] = []
            for session_id in some:
                writer = await self._shards.writer_of(session_id)
                delete = partial(writer.delete, session_id=session_id, ours=False)
                deleting.append(writer.call(partial(delete, older_than=older_than)))
            answers = await asyncio.gather(*deleting, return_exceptions=True)
            for session_id, answer in zip(some, answers, strict=True):
                if isinstance(answer, JournalInUse):
                    in_use[session_id] = answer.owner
                elif isinstance(answer, BaseException):
                    raise answer
                elif answer:
                    removed.append(session_id)
        return Pruned(removed, in_use)

    async def delete(self, session_id: str) -> bool:
        if await self._shards.known() is None:
            self._shards.refuse_writing()
            return False
        writer = await self._shards.writer_of(session_id)
        return bool(await writer.call(partial(writer.delete, session_id=session_id)))

    async def aclose(self) -> None:
        await self._shards.aclose()


_INFO = "SELECT id, number, records, created, updated, meta, title, latest, sum FROM sessions WHERE records > 0"


def _infos(
    name: str, database: sqlite3.Connection | None, session_id: str | None = None
) -> list[SessionInfo]:
    if database is None:
        return []
    if session_id is not None:
        rows = database.execute(f"{_INFO} AND id=?", (id_bytes(session_id),)).fetchall()
    else:
        try:
            rows = database.execute(_INFO).fetchall()
        except sqlite3.DatabaseError as error:
            log.warning("%s: sessions are left out: %s", name, error)
            rows = list(_readable_rows(database))
    found: list[SessionInfo] = []
    for row in rows:
        try:
            found.append(_info(database, row, name))
        except (
            JournalDamaged,
            sqlite3.DatabaseError,
            msgspec.DecodeError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            log.warning("a session is left out: %s", error)
    return found


def _readable_rows(database: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    for number, _ in known_sessions(database.execute):
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from database.execute(f"{_INFO} AND number=?", (number,)).fetchall()


def _info(database: sqlite3.Connection, row: Sequence[Any], name: str) -> SessionInfo:
    session_id = id_text(row[0])
    try:
        index, _ = true_index(database.execute, name, session_id, row[1], row[2:])
    except sqlite3.DatabaseError:
        # Its last records cannot be looked at. What is noted of it will do to list it, if it is sound.
        index, sound = index_of(row[2:], name, session_id)
        if not sound:
            raise
    latest = index.latest
    return SessionInfo(
        session_id=session_id,
        records=index.records,
        created=index.created,
        updated=index.updated,
        meta={} if index.meta is None else msgspec.json.decode(index.meta, type=dict[str, Any]),
        title=index.title,
        turn_open=latest.get("turn_started", 0) > latest.get("turn_completed", 0),
    )


def _readable(
    session_id: str, start: int, database: sqlite3.Connection | None
) -> tuple[list[Record], list[Gap], int]:
    """A run of what can be read from `start` on, the gaps in it, and where to go on, 0 at the end."""
    records: list[Record] = []
    gaps: list[Gap] = []
    number = None if database is None else number_of(database.execute, session_id)
    if database is None or number is None:
        return records, gaps, 0
    look = partial(probe, database.execute, session_id, number)

    def look_for(gap: Gap, most: int) -> None:
        for part in look(gap, most):
            if isinstance(part, Gap):
                gaps.append(part)
            else:
                records.append(part)

    gap: Gap | None = None
    for found in scan(database.execute, session_id, number, start):
        if isinstance(found, Gap):
            gap = found
            continue
        if gap is not None:
            look_for(gap, gap.last)
            gap = None
        records.append(found)
        if len(records) >= _FOLLOWED:
            return records, gaps, records[-1].offset + 1
    # No sound record is behind it, so that its end may be a key that is spoiled: far away.
    noted, most = _noted(database, number, session_id)
    if gap is not None:
        look_for(gap, most)
    last = max(start - 1, records[-1].offset if records else 0, gaps[-1].last if gaps else 0)
    if noted > last:
        look_for(Gap(last + 1, noted, "cannot be found"), most)
    return records, gaps, 0


#: No record takes fewer bytes of a file.
_LEAST = 32


def _noted(database: sqlite3.Connection, number: int, session_id: str) -> tuple[int, int]:
    """How many records a session should have, 0 where nobody knows, and how many there can be."""
    noted = size = 0
    try:
        ((size,),) = database.execute(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        )
        row = database.execute(
            "SELECT records, created, updated, meta, title, latest, sum FROM sessions"
            " WHERE number=?",
            (number,),
        ).fetchone()
        if row is not None and isinstance(row[0], int):
            noted = row[0]
            if index_of(row, "", session_id)[1]:
                return noted, noted
    except (sqlite3.DatabaseError, JournalDamaged):
        pass  # what is known by now has to do
    return noted, size // _LEAST


def read_records(
    database: sqlite3.Connection, place: Place, session_id: str, number: int, start: int, stop: int
) -> list[Record]:
    """The records of a session from `start` to `stop`, both there; raises `JournalDamaged`."""
    found: list[Record] = []
    try:
        _read_into(found, database, place, session_id, number, start, stop)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        raise JournalDamaged(
            place.name, str(error), session_id=session_id, offset=start + len(found)
        ) from error
    return found


def _read_into(
    found: list[Record],
    database: sqlite3.Connection,
    place: Place,
    session_id: str,
    number: int,
    start: int,
    stop: int,
) -> None:
    low = base(number)
    rows = database.execute(
        "SELECT key, checks, body FROM records WHERE key BETWEEN coalesce("
        "(SELECT max(key) FROM records WHERE key BETWEEN ? AND ?), ?) AND ? ORDER BY key",
        (low + 1, low + start, low + start, low + stop),
    )
    due = start
    for key, checks, body in rows:
        first = key - low
        if first <= due:
            plain = unpack_plain(session_id, first, checks, body, due, stop)
            if plain is not None:
                found += plain
                due += len(plain)
                continue
        for record in unpack_run(session_id, first, checks, body, due):
            if record.offset < due:
                continue
            if record.offset > stop:
                return
            if isinstance(record, Broken):
                raise JournalDamaged(
                    place.name, record.reason, session_id=session_id, offset=record.offset
                )
            if record.offset != due:
                raise JournalDamaged(place.name, "it is missing", session_id=session_id, offset=due)
            found.append(record)
            due += 1
    if due <= stop:
        raise JournalDamaged(place.name, "it is missing", session_id=session_id, offset=due)


class SqliteLog(SessionLog):
    """The records of one session in a `SqliteJournal`."""

    def __init__(self, shards: Shards, session_id: str) -> None:
        self._shards = shards
        self.session_id = session_id
        self._claim: Claim | None = None
        self._claiming: asyncio.Future[Claim] | None = None

    async def claim(self) -> None:
        if self._claim is not None and self._claim.lost is None:
            return
        self._claim = None
        writer = await self._shards.writer_of(self.session_id)
        if self._claiming is None:

            def run(transaction: Transaction) -> Claim:
                return writer.claim(transaction, self.session_id)

            self._claiming = writer.call(run)
            self._claiming.add_done_callback(self._claimed)
        await asyncio.shield(self._claiming)

    def _claimed(self, claiming: asyncio.Future[Claim]) -> None:
        self._claiming = None
        if not claiming.cancelled() and claiming.exception() is None:
            self._claim = claiming.result()

    async def release(self) -> None:
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        claim, self._claim = self._claim, None
        if claim is None or claim.lost is not None or self._shards.closing:
            return
        writer = await self._shards.writer_of(self.session_id)
        await writer.call(lambda transaction: writer.release(transaction, claim))

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self._shards.check()
        if not entries:
            return []
        if self._claim is None:
            raise JournalInUse(self.session_id, "nobody: it has not been claimed here")
        writer = await self._shards.writer_of(self.session_id)
        return await writer.append(self._claim, list(entries), flush=flush)

    def hurry(self) -> None:
        self._shards.hurry(self.session_id)

    async def read(self, start: int, stop: int) -> list[Record]:
        self._shards.check()
        start, stop = max(start, 1), min(stop, LAST_OFFSET)
        found: list[Record] = []
        reader = await self._shards.reader_of(self.session_id)
        if reader is None or start > stop:
            return found
        place, session_id = reader.place, self.session_id

        def run(
            first: int, known: int | None, database: sqlite3.Connection | None
        ) -> tuple[int | None, int, list[Record]]:
            if database is None:
                return None, 0, []
            there = session_of(database.execute, place.name, session_id)
            if there is None or known not in {None, there[0]}:
                return None, 0, []
            number, index = there
            last = min(stop, index.records)
            page = min(last, first + _PAGE - 1)
            if page < first:
                return number, last, []
            return number, last, read_records(database, place, session_id, number, first, page)

        number: int | None = None
        while start <= stop:
            number, last, records = await reader.call(partial(run, start, number))
            found += records
            start += len(records)
            if not records or start > last:
                break
        return found

    async def high_watermark(self) -> int:
        self._shards.check()
        reader = await self._shards.reader_of(self.session_id)
        if reader is None:
            return 0
        session_id = self.session_id

        place = reader.place

        def run(database: sqlite3.Connection | None) -> int:
            if database is None:
                return 0
            there = session_of(database.execute, place.name, session_id)
            return 0 if there is None else there[1].records

        return int(await reader.call(run))

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        wanted = set(tags)
        others = wanted - STATE_TAGS
        found = await super().latest(others) if others else {}
        reader = await self._shards.reader_of(self.session_id)
        if reader is None or not wanted & STATE_TAGS:
            return found
        place, session_id = reader.place, self.session_id

        def run(database: sqlite3.Connection | None) -> dict[str, Record]:
            records: dict[str, Record] = {}
            if database is None:
                return records
            there = session_of(database.execute, place.name, session_id)
            if there is None:
                return records
            number, latest = there[0], there[1].latest
            for tag in sorted(wanted & STATE_TAGS & set(latest)):
                at = latest[tag]
                records[tag] = read_records(database, place, session_id, number, at, at)[0]
            return records

        states: dict[str, Record] = await reader.call(run)
        return found | states
