"""Writes sessions of a journal until it is killed: `journal_child.py DIRECTORY NAME VARIANT SESSION…`.

It connects to the socket `s` of its working directory (`journal_subscriber.py`), says `ready`, and
begins with the next line of its standard input. Each session's writer runs turn after turn; what is
published goes to the socket, as the frames of a subscriber. When standard input ends, it closes
everything as a program does that ends well.

VARIANT is `right`, or a wrong way on purpose, to show that it is found: `eager` publishes what is not
durable yet, `hasty` has a store that says "durable" before it is, and `forgetful` one that does not
tell its writer what the last turn was.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from antiphon.journal import (
    SESSION_UPDATE,
    Entry,
    Journal,
    Record,
    SessionLog,
    SqliteJournal,
    Writer,
    Writers,
    taint_of_update,
)
from antiphon.journal._record import FrameHeads
from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from antiphon.journal import SessionInfo


class Link:
    """A tail that passes every record on at once: what has been written survives a kill."""

    def __init__(self, writer: Writer, stream: socket.socket) -> None:
        self._writer = writer
        self._stream = stream
        self._heads = FrameHeads(writer.session_id)

    def received(self, record: Record) -> None:
        self.send(record)
        self._writer.credit(self)

    def send(self, record: Record) -> None:
        self._stream.sendall(self._heads.frame(record) + b"\n")

    def lagged(self) -> None:
        raise AssertionError("credit is given back at once")

    def ended(self, reason: str) -> None:
        assert reason == "closed", reason


class Conversation:
    """One session: turn after turn, of every shape, until `stop` is set."""

    def __init__(self, writer: Writer, link: Link, name: str, stop: asyncio.Event) -> None:
        self.writer = writer
        self.link = link
        self._random = random.Random(f"{name} {writer.session_id}")
        self._name = name
        self._count = 0
        self._stop = stop

    def update(self, tag: str = "agent_message_chunk") -> Entry:
        """One whose text no other has; some are longer than a page of the file."""
        self._count += 1
        size = 20_000 if self._random.random() < 0.01 else self._random.randrange(120)
        text = f"{self._name} {self._count} " + "ä" * size
        payload = {"sessionUpdate": tag, "content": {"type": "text", "text": text}}
        return Entry(SESSION_UPDATE, encode(payload), taint_of_update(tag))

    async def run(self) -> None:
        await self.writer.subscribe(self.link)
        while not self._stop.is_set():
            await self._turn()

    async def _turn(self) -> None:
        holder = object()
        prompt = [self.update("user_message_chunk") for _ in range(self._random.randrange(3))]
        turn_id = await self.writer.begin_turn(holder, prompt)
        for _ in range(self._random.choice([0, 3, 30])):
            await self._say()
        if self._random.random() < 0.2:
            self.writer.release_turn(holder)
            return
        done: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self.writer.complete_turn(
            holder, turn_id, stop_reason="end_turn", published=done.set_result
        )
        assert await done is not None, self.writer.failed

    async def _say(self) -> None:
        way = self._random.random()
        if way < 0.05:
            await self.writer.append(self.update())
        else:
            await self.submit(self.update())
        if way > 0.8:
            await asyncio.sleep(0 if way < 0.95 else 0.002)
        if self.writer.full:
            await self.writer.room()

    async def submit(self, entry: Entry) -> None:
        self.writer.submit(entry)


class Eager(Conversation):
    """Publishes what it submits before it is durable, under the offset that it will have."""

    async def run(self) -> None:
        await self.writer.begin_turn(self)
        while True:
            await self.writer.append(self.update())
            offset = await self.writer.log.high_watermark()
            for _ in range(20):
                offset += 1
                entry = self.update()
                session_id, kind, payload = self.writer.session_id, entry.kind, entry.payload
                self.link.send(Record(offset, session_id, kind, payload, entry.taint, 0))
                self.writer.submit(entry)


class Wrapped(SessionLog):
    """A log that leaves all to another."""

    def __init__(self, log: SessionLog) -> None:
        self.session_id = log.session_id
        self._log = log

    async def claim(self) -> None:
        await self._log.claim()

    async def release(self) -> None:
        await self._log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        return await self._log.append(entries, flush=flush)

    async def read(self, start: int, stop: int) -> list[Record]:
        return await self._log.read(start, stop)

    async def high_watermark(self) -> int:
        return await self._log.high_watermark()


class HastyLog(Wrapped):
    """Says that records are durable, and then begins to make them so."""

    _last: int | None = None
    _appending: asyncio.Task[Any] | None = None

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        if self._last is None:
            self._last = await self._log.high_watermark()
        now, records = time.time_ns() // 1_000_000, list[Record]()
        for entry in entries:
            self._last += 1
            records.append(
                Record(self._last, self.session_id, entry.kind, entry.payload, entry.taint, ts=now)
            )
        self._appending = asyncio.create_task(self._append(entries, self._appending))
        return records

    async def _append(
        self, entries: Sequence[Entry], before: asyncio.Task[Any] | None
    ) -> list[Record]:
        if before is not None:
            await before
        return await self._log.append(entries)


class ForgetfulLog(Wrapped):
    """Knows of no earlier turn."""

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        return {}


class Wrong(Journal):
    """A journal with logs of another kind."""

    def __init__(self, journal: Journal, kind: type[Wrapped]) -> None:
        self._journal = journal
        self._kind = kind

    async def open(self, session_id: str) -> SessionLog:
        return self._kind(await self._journal.open(session_id))

    async def sessions(self) -> list[SessionInfo]:
        return await self._journal.sessions()

    async def delete(self, session_id: str) -> bool:
        return await self._journal.delete(session_id)

    async def aclose(self) -> None:
        await self._journal.aclose()


LOGS: Final[dict[str, type[Wrapped]]] = {"hasty": HastyLog, "forgetful": ForgetfulLog}


async def main(
    stream: socket.socket, directory: str, name: str, variant: str, *sessions: str
) -> None:
    """Write all sessions at once until standard input ends."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(0, ended)
    journal: Journal = SqliteJournal(directory)
    if variant in LOGS:
        journal = Wrong(journal, LOGS[variant])
    writers = Writers(journal)
    talk = Eager if variant == "eager" else Conversation

    async def converse(session: str) -> None:
        user = object()
        writer = await writers.ensure(session, user, {"cwd": "/srv"})
        await talk(writer, Link(writer, stream), name, stop).run()
        writers.leave(session, user)

    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(converse(session))
    await writers.aclose()
    await journal.aclose()


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("s")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        if sys.stdin.readline():
            asyncio.run(main(link, *sys.argv[1:]))
