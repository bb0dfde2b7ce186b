"""A tail that remembers, a log over another, and one whose appends a test can hold back or break."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from antiphon.journal import SESSION_UPDATE, Entry, MemoryJournal, Record, SessionLog

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["Ears", "Events", "HeldJournal", "HeldLog", "LogOver", "kinds", "say", "stored"]


def say(text: str) -> Entry:
    payload = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%b"}}'
    return Entry(SESSION_UPDATE, payload % text.encode(), "agent")


async def stored(journal: MemoryJournal, session_id: str = "s") -> list[Record]:
    log = await journal.open(session_id)
    return await log.read(1, await log.high_watermark())


def kinds(records: Sequence[Record]) -> list[str]:
    return [record.kind for record in records]


class Ears:
    """A tail: offsets, and words for what else it is told."""

    def __init__(self) -> None:
        self.heard: list[int | str] = []
        self.records: list[Record] = []
        self._event = asyncio.Event()

    def received(self, record: Record) -> None:
        self.heard.append(record.offset)
        self.records.append(record)
        self._event.set()

    def lagged(self) -> None:
        self.heard.append("lagged")
        self._event.set()

    def ended(self, reason: str) -> None:
        self.heard.append(reason)
        self._event.set()

    async def wait_for(self, count: int) -> None:
        while len(self.heard) < count:
            self._event.clear()
            await self._event.wait()


class LogOver(SessionLog):
    """Leaves all to another log; `latest` is found by `read`, as in every log that knows no better."""

    def __init__(self, log: SessionLog) -> None:
        self.session_id = log.session_id
        self.log = log

    async def claim(self) -> None:
        await self.log.claim()

    async def release(self) -> None:
        await self.log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        return await self.log.append(entries, flush=flush)

    def hurry(self) -> None:
        self.log.hurry()

    async def read(self, start: int, stop: int) -> list[Record]:
        return await self.log.read(start, stop)

    async def high_watermark(self) -> int:
        return await self.log.high_watermark()


class HeldLog(LogOver):
    """Over a log in memory: each append waits while `gate` is closed, and fails as `error` says."""

    def __init__(self, log: SessionLog) -> None:
        super().__init__(log)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        #: The sizes of the appends that were begun, and whether they were to be flushed.
        self.appends: list[tuple[int, bool]] = []
        self.begun = asyncio.Event()
        self.hurried = 0
        self.claims = 0
        self.released = 0
        self.closed = 0

    async def claim(self) -> None:
        self.claims += 1
        await self.log.claim()

    async def release(self) -> None:
        self.released += 1
        await self.log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.appends.append((len(entries), flush))
        self.begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await self.log.append(entries, flush=flush)

    def hurry(self) -> None:
        self.hurried += 1

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        return await self.log.latest(tags)

    async def aclose(self) -> None:
        self.closed += 1
        await self.log.aclose()


class HeldJournal(MemoryJournal):
    """A journal in memory whose logs are `HeldLog`s."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[HeldLog] = []
        #: Raised by the next `open`, and by the next `delete`.
        self.error: Exception | None = None

    async def open(self, session_id: str) -> SessionLog:
        if self.error is not None:
            raise self.error
        log = HeldLog(await super().open(session_id))
        self.logs.append(log)
        return log

    async def delete(self, session_id: str) -> bool:
        if self.error is not None:
            raise self.error
        return await super().delete(session_id)


class Events:
    """What a writer tells of what is out of the ordinary."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, facts: dict[str, Any]) -> None:
        self.all.append((name, facts))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [facts for event, facts in self.all if event == name]
