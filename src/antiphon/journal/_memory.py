"""The journal that is kept in memory: it survives connections and writers, and ends with its object.

Responsible for keeping records in plain lists, by the laws of `_store`. Leaves what is to outlive the
process to `SqliteJournal`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from antiphon._errors import JournalError, JournalInUse
from antiphon.journal._record import (
    SESSION_CREATED,
    TURN_COMPLETED,
    TURN_STARTED,
    Record,
    object_of,
)
from antiphon.journal._store import Journal, SessionInfo, SessionLog, title_after

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from antiphon.journal._record import Entry

__all__ = ["MemoryJournal"]

#: How many records `follow` gives at once.
_RUN = 256


class _Kept:
    """One session's records, and what is known of them so far."""

    __slots__ = ("changed", "looked_at", "newest", "open", "owner", "records", "title", "watchers")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.owner: _MemoryLog | None = None
        #: When it changed, as a number that grows with each append to the journal.
        self.changed = 0
        self.watchers: list[asyncio.Future[None]] = []
        #: Up to which offset `newest`, `title` and `open` tell.
        self.looked_at = 0
        self.newest: dict[str, Record] = {}
        self.title: str | None = None
        self.open = False

    def look(self) -> None:
        """Take in what came since: each record is looked at once, however often somebody asks."""
        for record in self.records[self.looked_at :]:
            tag = record.tag
            self.newest[tag] = record
            if tag == "session_info_update":
                self.title = title_after(self.title, record.payload)
            elif tag in (TURN_STARTED, TURN_COMPLETED):
                self.open = tag == TURN_STARTED
        self.looked_at = len(self.records)

    def wake(self) -> None:
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


class _Shelf:
    """What a `MemoryJournal` and its logs share."""

    def __init__(self) -> None:
        self.all: dict[str, _Kept] = {}
        self.changes = 0
        self.closed = False

    def check(self) -> None:
        if self.closed:
            raise JournalError("the journal is closed")

    def find(self, session_id: str) -> _Kept | None:
        self.check()
        return self.all.get(session_id)

    def keep(self, session_id: str) -> _Kept:
        kept = self.find(session_id)
        if kept is None:
            kept = self.all[session_id] = _Kept()
        return kept

    def forget_if_nothing(self, session_id: str) -> None:
        kept = self.all.get(session_id)
        if kept is not None and not (kept.records or kept.owner or kept.watchers):
            del self.all[session_id]

    def info(self, session_id: str, kept: _Kept) -> SessionInfo:
        kept.look()
        first, last = kept.records[0], kept.records[-1]
        meta: dict[str, Any] = object_of(first.payload) if first.kind == SESSION_CREATED else {}
        return SessionInfo(
            session_id, last.offset, first.ts, last.ts, meta, kept.title, turn_open=kept.open
        )


class MemoryJournal(Journal):
    """A journal in memory: plain lists, gone with the process. Share it by sharing the object.

    It survives connections, writers and event loops; one loop at a time may use it. Claims of a loop
    that was closed are void, as those of a dead process are in a journal on disk.
    """

    def __init__(self) -> None:
        self._shelf = _Shelf()

    async def open(self, session_id: str) -> SessionLog:
        """As for `Journal.open`; raises `JournalError` after `aclose`."""
        self._shelf.check()
        return _MemoryLog(self._shelf, session_id)

    async def sessions(self) -> list[SessionInfo]:
        """As for `Journal.sessions`."""
        self._shelf.check()
        found = [(kept.changed, name) for name, kept in self._shelf.all.items() if kept.records]
        found.sort(reverse=True)
        return [self._shelf.info(name, self._shelf.all[name]) for _, name in found]

    async def info(self, session_id: str) -> SessionInfo | None:
        """As for `Journal.info`."""
        kept = self._shelf.find(session_id)
        return None if kept is None or not kept.records else self._shelf.info(session_id, kept)

    async def delete(self, session_id: str) -> bool:
        """As for `Journal.delete`. A log of this journal that has the claim loses it."""
        self._shelf.check()
        kept = self._shelf.all.pop(session_id, None)
        if kept is None:
            return False
        kept.wake()
        return bool(kept.records)

    async def aclose(self) -> None:
        """Refuse everything from now on; what is kept goes with the object."""
        self._shelf.closed = True
        for kept in self._shelf.all.values():
            kept.wake()

    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        """As for `Journal.follow`, without looking again and again: an append wakes it."""
        followed: _Kept | None = None
        while True:
            kept = self._shelf.keep(session_id)
            if followed is not None and kept is not followed:
                self._shelf.forget_if_nothing(session_id)
                return
            followed = kept if kept.records else None
            if start <= len(kept.records):
                run = kept.records[start - 1 : start - 1 + _RUN]
                start += len(run)
                yield run
                continue
            woken = asyncio.get_running_loop().create_future()
            kept.watchers.append(woken)
            try:
                await woken
            finally:
                if woken in kept.watchers:
                    kept.watchers.remove(woken)
                    self._shelf.forget_if_nothing(session_id)


def _who(kept: _Kept | None) -> str:
    if kept is None or kept.owner is None:
        return "nobody (this log has no claim)"
    return "another log of this process"


class _MemoryLog(SessionLog):
    """A log of a `MemoryJournal`."""

    __slots__ = ("loop", "session_id", "shelf")

    def __init__(self, shelf: _Shelf, session_id: str) -> None:
        self.session_id = session_id
        self.shelf = shelf
        self.loop = asyncio.get_running_loop()

    async def claim(self) -> None:
        kept = self.shelf.keep(self.session_id)
        owner = kept.owner
        if owner is not None and owner is not self and not owner.loop.is_closed():
            raise JournalInUse(self.session_id, _who(kept))
        kept.owner = self

    async def release(self) -> None:
        kept = self.shelf.all.get(self.session_id)
        if kept is not None and kept.owner is self:
            kept.owner = None
            self.shelf.forget_if_nothing(self.session_id)

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        del flush  # nothing is ever gathered
        name, kept = self.session_id, self.shelf.find(self.session_id)
        if kept is None or kept.owner is not self:
            raise JournalInUse(name, _who(kept))
        if not entries:
            return []
        now = time.time_ns() // 1_000_000
        records = [
            Record(number, name, entry.kind, entry.payload, entry.taint, now)
            for number, entry in enumerate(entries, len(kept.records) + 1)
        ]
        kept.records += records
        self.shelf.changes += 1
        kept.changed = self.shelf.changes
        if kept.watchers:
            kept.wake()
        return records

    async def read(self, start: int, stop: int) -> list[Record]:
        return self._records()[max(start, 1) - 1 : max(stop, 0)]

    async def high_watermark(self) -> int:
        return len(self._records())

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        kept = self.shelf.find(self.session_id)
        if kept is None:
            return {}
        kept.look()
        return {tag: kept.newest[tag] for tag in tags if tag in kept.newest}

    def _records(self) -> list[Record]:
        kept = self.shelf.find(self.session_id)
        return [] if kept is None else kept.records
