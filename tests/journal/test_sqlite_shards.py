"""Which use of a journal object is refused, and that reading makes nothing."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Entry, JournalError, SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path


def test_a_journal_belongs_to_one_loop(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")

    async def use() -> None:
        await journal.sessions()

    asyncio.run(use())
    with pytest.raises(JournalError, match="another event loop"):
        asyncio.run(use())


async def test_reading_makes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")

    assert await log.read(1, 10) == []
    assert await log.high_watermark() == 0
    assert await log.latest(["turn_started", "other"]) == {}
    assert await journal.sessions() == []
    assert await journal.info("s-1") is None
    assert not await journal.delete("s-1")
    await log.aclose()
    await journal.aclose()

    assert not directory.exists()


async def test_a_journal_that_was_opened_for_reading_refuses_to_write(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", read_only=True)
    log = await journal.open("s-1")

    with pytest.raises(JournalError, match="reading only"):
        await log.claim()
    with pytest.raises(JournalError, match="reading only"):
        await journal.delete("s-1")
    await journal.aclose()


async def test_a_fork_cannot_use_it(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    log = await journal.open("s-1")
    await log.claim()
    await log.append([Entry("session_created", b"{}", "system")])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            journal._shards.check()
            os.write(writing, b"no error")
        except JournalError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    told = os.read(reading, 1000)
    os.close(reading)
    os.waitpid(child, 0)

    assert b"fork" in told
    assert len(await log.append([Entry("k", b"{}", "t")])) == 1
    await journal.aclose()


async def test_many_that_use_it_first_at_once_make_one_directory(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=4)
    logs = [await journal.open(f"s-{n}") for n in range(50)]

    await asyncio.gather(*(log.claim() for log in logs), journal.sessions(), logs[0].read(1, 2))

    assert len(list((tmp_path / "journal").glob("*.db"))) == 4
    await journal.aclose()
