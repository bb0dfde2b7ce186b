"""The threads of a shard: what shares a transaction, and what one failure means for the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Entry, JournalError, SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path


def update(n: int) -> Entry:
    return Entry("session_update", b'{"n":%d}' % n, "agent")


async def commits(journal: SqliteJournal) -> int:
    mark = journal.directory / "shard-00.mark"
    return int(mark.read_text(), 16)


async def test_appends_of_many_sessions_share_a_transaction(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1, gather=0.2)
    logs = [await journal.open(f"s-{n}") for n in range(20)]
    await asyncio.gather(*(log.claim() for log in logs))
    before = await commits(journal)

    await asyncio.gather(*(log.append([update(n)]) for n, log in enumerate(logs)))

    assert await commits(journal) - before <= 2
    assert {await log.high_watermark() for log in logs} == {1}
    await journal.aclose()


async def test_one_refused_payload_fails_its_append_alone(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log, other = await journal.open("s-1"), await journal.open("s-2")
    await log.claim()
    await other.claim()

    answers = await asyncio.gather(
        log.append([update(1)]),
        log.append([update(2), Entry("session_update", b"no", "agent")]),
        log.append([update(3)]),
        other.append([update(4)]),
        return_exceptions=True,
    )

    assert isinstance(answers[1], JournalError)
    assert [record.data["n"] for record in await log.read(1, 9)] == [1, 3]
    assert await other.high_watermark() == 1
    await journal.aclose()


async def test_a_flush_does_not_wait_for_more(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1, gather=1.0)
    log = await journal.open("s-1")
    await log.claim()
    loop = asyncio.get_running_loop()
    started = loop.time()

    for n in range(5):
        await log.append([update(n)], flush=True)

    assert loop.time() - started < 0.9
    await journal.aclose()


async def test_what_was_handed_over_is_durable_when_it_is_closed(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1, gather=1.0)
    log = await journal.open("s-1")
    await log.claim()
    waiting = asyncio.gather(*(log.append([update(n)]) for n in range(3)))
    await asyncio.sleep(0)

    await journal.aclose()

    assert [records[0].offset for records in await waiting] == [1, 2, 3]


async def test_a_wait_that_is_cancelled_takes_nothing_back(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    waiting = asyncio.ensure_future(log.append([update(1)]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert [record.offset for record in await log.append([update(2)])] == [2]
    await journal.aclose()
