"""`SqliteJournal`: sessions on disk, in a directory, by the standard library's SQLite.

Responsible for what a journal offers, on the loop: which session is in which shard, logs and their
claims. Leaves SQL to `_sqlite_thread`, bytes to `_sqlite_format`, files to `_sqlite_schema`, proofs of
life to `_sqlite_owners`, and the search for damage to `_sqlite_damage`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from antiphon._errors import JournalDamaged, JournalInUse
from antiphon.journal._sqlite_format import LAST_OFFSET, STATE_TAGS, Broken, base, unpack_run
from antiphon.journal._sqlite_schema import MAX_SHARDS, Loss
from antiphon.journal._sqlite_shards import Shards
from antiphon.journal._sqlite_thread import id_bytes, id_text, index_of, watermark
from antiphon.journal._store import Journal, SessionInfo, SessionLog

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Collection, Sequence

    from antiphon.journal._record import Entry, Record
    from antiphon.journal._sqlite_thread import Claim, Place, Session

__all__ = ["Loss", "SqliteJournal"]

log = logging.getLogger("antiphon.journal")

#: How many records are read in one view of a database; a longer read is several of them.
_PAGE = 2048


class SqliteJournal(Journal):
    """A journal in a directory: one SQLite database for each shard of its sessions.

    What `append` has returned is on the disk, and survives the end of the process; with
    `durability="power"` a loss of power too, with "process" the last moments before one may be lost.
    Other processes may read at the same time, and write to other sessions; two that want the same
    session are told apart by an owner that the operating system knows to be alive.

    An object belongs to the loop on which it is used first, and to its process: it is of no use after
    a fork. It makes the directory (for its user alone) with the first append, never while reading.

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

    async def delete(self, session_id: str) -> bool:
        if await self._shards.known() is None:
            self._shards.refuse_writing()
            return False
        writer = await self._shards.writer_of(session_id)
        return bool(await writer.call(lambda session: writer.delete(session, session_id)))

    async def aclose(self) -> None:
        await self._shards.aclose()


_INFO = "SELECT id, records, created, updated, meta, title, latest FROM sessions WHERE records > 0"


def _infos(
    name: str, database: sqlite3.Connection | None, session_id: str | None = None
) -> list[SessionInfo]:
    if database is None:
        return []
    if session_id is None:
        rows = database.execute(_INFO)
    else:
        rows = database.execute(f"{_INFO} AND id=?", (id_bytes(session_id),))
    found: list[SessionInfo] = []
    for stored, *row in rows:
        known = id_text(stored)
        try:
            index = index_of(row, name, known)
            meta = (
                {} if index.meta is None else msgspec.json.decode(index.meta, type=dict[str, Any])
            )
        except (JournalDamaged, msgspec.DecodeError) as error:
            log.warning("a session is left out: %s", error)
            continue
        found.append(
            SessionInfo(
                session_id=known,
                records=index.records,
                created=index.created,
                updated=index.updated,
                meta=meta,
                title=index.title,
                turn_open=index.latest.get("turn_started", 0)
                > index.latest.get("turn_completed", 0),
            )
        )
    return found


def _number_of(database: sqlite3.Connection, session_id: str) -> int | None:
    row = database.execute(
        "SELECT number FROM sessions WHERE id=?", (id_bytes(session_id),)
    ).fetchone()
    return None if row is None else row[0]


def read_records(
    database: sqlite3.Connection, place: Place, session_id: str, number: int, start: int, stop: int
) -> list[Record]:
    """The records of a session from `start` to `stop`, both there; raises `JournalDamaged`."""
    found: list[Record] = []
    low = base(number)
    rows = database.execute(
        "SELECT key, checks, body FROM records WHERE key BETWEEN coalesce("
        "(SELECT max(key) FROM records WHERE key BETWEEN ? AND ?), ?) AND ? ORDER BY key",
        (low + 1, low + start, low + start, low + stop),
    )
    due = start
    for key, checks, body in rows:
        for record in unpack_run(session_id, key - low, checks, body):
            if record.offset < due:
                continue
            if record.offset > stop:
                return found
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
    return found


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

            def run(session: Session) -> Claim:
                return writer.claim(session, self.session_id)

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
        await writer.call(lambda session: writer.release(session, claim))

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
            number = None if database is None else _number_of(database, session_id)
            if database is None or number is None or known not in {None, number}:
                return None, 0, []
            last = min(stop, watermark(database.execute, number))
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

        def run(database: sqlite3.Connection | None) -> int:
            number = None if database is None else _number_of(database, session_id)
            return 0 if database is None or number is None else watermark(database.execute, number)

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
            number = None if database is None else _number_of(database, session_id)
            if database is None or number is None:
                return records
            row = database.execute(
                "SELECT records, created, updated, meta, title, latest FROM sessions"
                " WHERE number=?",
                (number,),
            ).fetchone()
            latest = index_of(row, place.name, session_id).latest
            for tag in sorted(wanted & STATE_TAGS & set(latest)):
                at = latest[tag]
                records[tag] = read_records(database, place, session_id, number, at, at)[0]
            return records

        states: dict[str, Record] = await reader.call(run)
        return found | states
