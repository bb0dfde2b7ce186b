"""A process with a journal that does what it is told: `journal_peer.py DIRECTORY`.

Each line of standard input is a JSON list, a verb and its arguments, and is answered with one line: a
JSON value, or for an error `{"error": its class, "says": its text}`. It ends when standard input does,
and then as a program ends that closes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.journal import SESSION_UPDATE, Entry, JournalError, SqliteJournal
from antiphon.schema import encode

if TYPE_CHECKING:
    from antiphon.journal import SessionLog


def entry(text: str) -> Entry:
    """One update with this text."""
    content = {"type": "text", "text": text}
    payload = {"sessionUpdate": "agent_message_chunk", "content": content}
    return Entry(SESSION_UPDATE, encode(payload), "agent")


class Peer:
    """The verbs; each session has one log, made when it is first named."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._journal = SqliteJournal(directory)
        self._logs: dict[str, SessionLog] = {}

    async def _log(self, session: str) -> SessionLog:
        if session not in self._logs:
            self._logs[session] = await self._journal.open(session)
        return self._logs[session]

    async def claim(self, session: str) -> None:
        await (await self._log(session)).claim()

    async def claim_at(self, session: str, moment: float) -> None:
        """Claim it at a time of `time.monotonic`, together with others."""
        await self._log(session)
        while time.monotonic() < moment:
            pass
        await self.claim(session)

    async def release(self, session: str) -> None:
        await (await self._log(session)).release()

    async def append(self, session: str, *texts: str) -> list[int]:
        log = await self._log(session)
        records = await log.append([entry(text) for text in texts], flush=True)
        return [record.offset for record in records]

    async def texts(self, session: str) -> list[str]:
        log = await self._log(session)
        records = await log.read(1, await log.high_watermark())
        assert [record.offset for record in records] == list(range(1, len(records) + 1))
        return [record.data["content"]["text"] for record in records]

    async def delete(self, session: str) -> bool:
        return await self._journal.delete(session)

    async def bound_files(self, size: int | None) -> None:
        """No file may grow past so many bytes; None lifts that."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    async def fill(self, session: str, size: int) -> dict[str, Any]:
        """Append until it fails: what was acknowledged, and what the failure was."""
        log = await self._log(session)
        done: list[str] = []
        while True:
            texts = [f"{len(done) + n} " + "x" * size for n in range(3)]
            try:
                await log.append([entry(text) for text in texts], flush=True)
            except JournalError as error:
                return {"done": len(done), "error": type(error).__name__, "says": str(error)}
            done += texts

    async def count(self, session: str) -> int:
        return await (await self._log(session)).high_watermark()

    async def reopen(self) -> None:
        """Close everything and begin anew."""
        await self._journal.aclose()
        self._logs.clear()
        self._journal = SqliteJournal(self._directory)

    async def ballast(self, path: str, size: int | None) -> None:
        """A file that takes up so much room, or none."""
        if size is None:
            Path(path).unlink()
        else:
            Path(path).write_bytes(b"x" * size)

    async def child(self, session: str) -> dict[str, Any]:
        """Fork; the child appends with what it has inherited, and says what came of it."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            # The loop, too, is the parent's; a child that goes on uses one of its own.
            asyncio.events._set_running_loop(None)
            os.write(writing, json.dumps(asyncio.run(self._in_child(session))).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            answer: dict[str, Any] = json.loads(said.read())
        os.waitpid(pid, 0)
        return answer

    async def _in_child(self, session: str) -> dict[str, Any]:
        log = self._logs[session]
        try:
            async with asyncio.timeout(5):
                await log.append([entry("by the child")], flush=True)
        except (JournalError, TimeoutError) as error:
            return {"error": type(error).__name__, "says": str(error)}
        return {"error": None}

    async def lasting_child(self) -> int:
        """Fork a child that holds what it has inherited until it is killed; its pid."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.close(1)
            os.close(writing)
            while True:
                time.sleep(60)
        # It lets go of its copy of the lock itself, before it is here: only then may its parent die.
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return pid


async def main(directory: str) -> None:
    """Do what is told."""
    peer = Peer(directory)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, *arguments = json.loads(line)
        try:
            answer = await getattr(peer, verb)(*arguments)
        except JournalError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
