"""The threads of a shard: what shares a transaction, and what one failure means for the others."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from antiphon.journal import Entry, JournalError, JournalInUse, SqliteJournal
from antiphon.journal._sqlite_thread import Reader, Writer

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

    assert loop.time() - started < 3  # of the five that waiting for more takes
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


FULL_DISK = """
import asyncio, resource, signal, sys
from antiphon.journal import Entry, JournalError, SqliteJournal

large = Entry("session_update", b'{"x":"%b"}' % (b"x" * 100_000), "agent")

async def main():
    journal = SqliteJournal(sys.argv[1], shards=1)
    log = await journal.open("s-1")
    await log.claim()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    acknowledged = 0
    for _ in range(3):
        try:
            while True:
                acknowledged = (await log.append([large] * 3))[-1].offset
        except JournalError as error:
            print(error.reason)
        assert await log.high_watermark() == acknowledged > 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (record,) = await log.append([large])
    assert record.offset == acknowledged + 1
    assert len(await log.read(1, record.offset)) == record.offset
    assert await journal.verify() == []
    await journal.aclose()

asyncio.run(main())
"""


@pytest.mark.covers("FF-49")
def test_a_disk_that_is_full_fails_appends_and_takes_nothing_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "journal")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "shard-00.db: disk I/O error\n" * 3


async def test_a_neighbour_that_keeps_the_shard_is_waited_for_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.journal._sqlite_thread.BUSY", 0.1)
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    neighbour = sqlite3.connect(tmp_path / "journal" / "shard-00.db", isolation_level=None)
    neighbour.execute("BEGIN IMMEDIATE")

    with pytest.raises(JournalError, match="kept locked by another process"):
        await log.append([update(1)])
    waiting = asyncio.ensure_future(log.append([update(2)]))
    await asyncio.sleep(0)
    neighbour.execute("COMMIT")
    neighbour.close()

    assert [record.data["n"] for record in await waiting] == [2]
    await journal.aclose()


async def test_two_processes_that_write_one_shard_both_go_on(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from antiphon.journal import Entry, SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1], shards=1, gather=0)
    log = await journal.open(sys.argv[2])
    await log.claim()
    for n in range(200):
        await log.append([Entry("session_update", b'{"n":%d}' % n, "agent")])
    await journal.aclose()

asyncio.run(main())
"""
    directory = str(tmp_path / "journal")
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", code, directory, f"s-{n}")
        for n in range(2)
    ]
    assert [await writer.wait() for writer in writers] == [0, 0]

    journal = SqliteJournal(directory)
    for n in range(2):
        log = await journal.open(f"s-{n}")
        assert [record.data["n"] for record in await log.read(1, 200)] == list(range(200))
    assert await journal.verify() == []
    assert journal.losses == ()
    await journal.aclose()


async def test_a_claim_that_somebody_took_over_appends_nothing(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    await log.append([update(1)])
    other = sqlite3.connect(tmp_path / "journal" / "shard-00.db", isolation_level=None)
    other.execute("UPDATE sessions SET generation=generation+1, owner='4711-x'")
    other.close()

    with pytest.raises(JournalInUse) as caught:
        await log.append([update(2)])
    assert caught.value.owner == "process 4711"
    with pytest.raises(JournalInUse):
        await log.append([update(3)])
    assert await log.high_watermark() == 1
    await log.claim()  # process 4711 does not live, as it seems
    assert (await log.append([update(4)]))[0].offset == 2
    await journal.aclose()


async def test_a_deletion_that_was_cut_off_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    for session_id in ("s-1", "s-2"):
        log = await journal.open(session_id)
        await log.claim()
        for _ in range(5):
            await log.append([update(n) for n in range(200)])
    with monkeypatch.context() as patch:
        collect = Mock(return_value=False)
        patch.setattr("antiphon.journal._sqlite_thread.Writer._collect", collect)
        await journal.delete("s-1")
        assert await journal.verify() == []
        await journal.aclose()
    file = tmp_path / "journal" / "shard-00.db"
    database = sqlite3.connect(file)
    left = "SELECT (SELECT count(*) FROM records), (SELECT count(*) FROM garbage)"
    assert database.execute(left).fetchone() == (10, 1)

    journal = SqliteJournal(tmp_path / "journal")
    log = await journal.open("s-2")
    await log.claim()
    await journal.aclose()

    assert database.execute(left).fetchone() == (5, 0)
    database.close()


async def test_the_loop_goes_on_while_much_is_written_and_read(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    loop = asyncio.get_running_loop()
    late: list[float] = []

    async def watch() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            late.append(loop.time() - before)

    watching = asyncio.ensure_future(watch())
    large = Entry("session_update", b'{"x":"%b"}' % (b"x" * 200_000), "agent")
    for _ in range(6):  # more than the log may hold, so it is folded, too
        await log.append([large] * 20)
    assert len(await log.read(1, 120)) == 120
    watching.cancel()

    # A commit or a fold takes longer than most of the loop's turns.
    assert len(late) > 20
    assert statistics.median(late) < 0.05
    await journal.aclose()


async def test_the_log_is_folded_when_it_is_long_and_not_at_each_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.journal._sqlite_thread.LOG_BYTES", 2 << 20)
    folds: list[str] = []
    connected = Writer._connect

    def connect(writer: Writer) -> sqlite3.Connection:
        database = connected(writer)
        database.set_trace_callback(lambda text: folds.append(text) if "wal_" in text else None)
        return database

    monkeypatch.setattr(Writer, "_connect", connect)
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    large = Entry("session_update", b'{"x":"%b"}' % (b"x" * 100_000), "agent")

    for _ in range(60):
        await log.append([large] * 3, flush=True)
    size = (tmp_path / "journal" / "shard-00.db-wal").stat().st_size
    await journal.aclose()

    assert size < 4 << 20
    assert 5 <= len(folds) <= 12  # 18 MB, 2 MB at a time


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "not any more"), sqlite3.DatabaseError("it is spoiled")],
    ids=["system", "sqlite"],
)
async def test_who_follows_what_cannot_be_read_any_more_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    journal = SqliteJournal(tmp_path / "journal", shards=1)
    log = await journal.open("s-1")
    await log.claim()
    await log.append([update(1)])
    following = SqliteJournal(tmp_path / "journal")
    runs = following.follow("s-1")
    assert len(await anext(runs)) == 1
    rest = asyncio.ensure_future(anext(runs))
    there = await following.open("s-1")
    await asyncio.sleep(0)
    await there.high_watermark()  # behind the one of who follows, who only waits for news now

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "_current", Mock(side_effect=error))
        with pytest.raises(JournalError):
            await rest

    assert await there.high_watermark() == 1
    await following.aclose()
    await journal.aclose()
