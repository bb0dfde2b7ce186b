"""What a journal's store is: the contract that `MemoryJournal`, `SqliteJournal` and others fulfil.

The laws (resumable-sessions §13), which `antiphon.testing.journal_laws` tests for any store:

1. Offsets are per session, from 1, contiguous, strictly increasing, never reused or reassigned.
2. `high_watermark` is asked of the store itself at the time of the call; it is never a cached number.
3. Reads are exact: the records asked for, ascending, each equal in value to what was appended.
4. What `append` has returned, every later read and watermark shows, in this process and in others.
5. What is durable stays: there is no truncation; only whole sessions are deleted, when somebody asks.
6. Reading never writes: no genesis, no repair, no claim.
7. One log at a time may append to a session, across all processes; the others are told who does.

A session id is an opaque string and never a path. Leaves genesis, repair, the turn latch and publishing
to `Writer`; turns and connections to nobody here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.journal._record import object_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from antiphon.journal._record import Entry, Record

__all__ = ["Journal", "SessionInfo", "SessionLog", "title_after"]

#: How many records are read at once where all of many are looked at.
_PAGE = 256

#: How often, in seconds, `follow` looks for what other processes appended, unless a store knows better.
_LOOK = 0.05


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as a journal knows it.

    Attributes:
        session_id: its id.
        records: its high watermark.
        created: when its first record was appended, in milliseconds since 1970.
        updated: when its last one was.
        meta: the payload of its `session_created`, {} where it has none: `cwd`,
            `additionalDirectories` and what else its writer was given.
        title: as last told by a `session_info_update`, None where it has none.
        turn_open: whether its last turn was started and not completed.
    """

    session_id: str
    records: int
    created: int
    updated: int
    meta: dict[str, Any]
    title: str | None
    turn_open: bool


def title_after(title: str | None, update: bytes) -> str | None:
    """A session's title after a `session_info_update`: null takes it away, an absent one keeps it."""
    told = object_of(update).get("title", title)
    return told if told is None or isinstance(told, str) else title


class SessionLog(ABC):
    """The records of one session; made by `Journal.open`. All methods may be called from one loop.

    Attributes:
        session_id: whose records these are.
    """

    __slots__ = ()

    session_id: str

    @abstractmethod
    async def claim(self) -> None:
        """Become the one that may append, until `release` or the end of the process. Idempotent.

        A claim whose process has ended, however it ended, is no hindrance.

        Raises:
            JournalInUse: another log, in this process or another, has the claim; who is in it.
            JournalError: the store cannot be written.
        """

    @abstractmethod
    async def release(self) -> None:
        """Let another log claim it. Idempotent; nothing where there was no claim."""

    @abstractmethod
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        """Append all, in order, or none; returns the complete records when they are durable.

        Cancelling it cancels the wait: what was handed over may still be appended.

        Args:
            entries: what to append; an empty sequence gives [].
            flush: somebody waits for it: do not gather more first.

        Raises:
            JournalInUse: the claim was never made, or is lost (another process took the session over):
                nothing of this was appended, and nothing will be.
            JournalError: they could not be made durable (disk full, store closed); none is visible.
        """

    def hurry(self) -> None:  # noqa: B027  (nothing to do where nothing is gathered)
        """Somebody waits after all: an `append` that gathers more first shall not go on with that."""

    @abstractmethod
    async def read(self, start: int, stop: int) -> list[Record]:
        """Exactly the records with `start` <= offset <= `stop`, ascending; an inverted range is [].

        Raises:
            JournalDamaged: one of them is damaged; which is in it.
        """

    @abstractmethod
    async def high_watermark(self) -> int:
        """The offset of the last durable record, 0 where there is none."""

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        """The newest record of each of these tags (`Record.tag`) that has one.

        This one scans back from the tip until it has all; a store that knows better overrides it.
        """
        found: dict[str, Record] = {}
        stop = await self.high_watermark()
        while stop > 0 and len(found) < len(set(tags)):
            start = max(1, stop - _PAGE + 1)
            for record in reversed(await self.read(start, stop)):
                tag = record.tag
                if tag in tags and tag not in found:
                    found[tag] = record
            stop = start - 1
        return found

    async def aclose(self) -> None:
        """Release the claim and let go of what the log holds. Idempotent."""
        await self.release()


class Journal(ABC):
    """A store of the journals of many sessions. One object may serve many connections of one loop."""

    @abstractmethod
    async def open(self, session_id: str) -> SessionLog:
        """A log of a session, which may have no records yet; opening writes nothing.

        Each call gives a log of its own, and all of them show the same records.
        """

    @abstractmethod
    async def sessions(self) -> list[SessionInfo]:
        """Every session with at least one record, the one that changed last first.

        What is damaged is left out and logged; `SqliteJournal.verify` names it.
        """

    @abstractmethod
    async def delete(self, session_id: str) -> bool:
        """Delete a session whole; returns whether there was one. Idempotent.

        Raises:
            JournalInUse: another process appends to it.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close what is open, after making durable what was handed over. Idempotent."""

    async def info(self, session_id: str) -> SessionInfo | None:
        """What is known of one session, None where it has no records."""
        for session in await self.sessions():
            if session.session_id == session_id:
                return session
        return None

    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        """Records from `start` on, in runs, as they become durable; also those of other processes.

        It ends by itself only when the session is deleted. It needs no claim, and what it gives is
        durable.

        Raises:
            JournalDamaged: the next record is damaged.
        """
        log = await self.open(session_id)
        last = 0
        try:
            while True:
                stop = await log.high_watermark()
                if stop < last:
                    return
                last = stop
                while start <= stop:
                    records = await log.read(start, min(stop, start + _PAGE - 1))
                    start += len(records)
                    yield records
                await asyncio.sleep(_LOOK)
        finally:
            await log.aclose()
