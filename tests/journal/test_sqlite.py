"""A journal on disk: what it keeps, who may write it, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import (
    Damage,
    Entry,
    JournalDamaged,
    JournalError,
    JournalInUse,
    SqliteJournal,
)
from antiphon.testing import JournalLaw, journal_laws

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hi"}}'


def chunk(text: str = "hi") -> Entry:
    return Entry("session_update", CHUNK.replace(b"hi", text.encode()), "agent")


def created(payload: bytes = b'{"cwd":"/srv"}') -> Entry:
    return Entry("session_created", payload, "system")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


async def filled(directory: Path, session_id: str, *entries: Entry) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open(session_id)
    await log.claim()
    await log.append(entries, flush=True)
    await journal.aclose()


async def test_it_can_be_made_before_there_is_anything_to_keep(directory: Path) -> None:
    journal = SqliteJournal(directory)
    await journal.make()

    assert sorted(path.name for path in directory.iterdir()) == ["journal.json", "lock", "owners"]
    assert await journal.sessions() == []
    await journal.aclose()


async def test_what_is_in_the_way_of_writing_is_found_when_it_is_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(directory, "s-1", created())
    under_a_file = SqliteJournal(directory / "journal.json" / "journal")
    with pytest.raises(JournalError, match=r"journal\.json is not a directory"):
        await under_a_file.make()
    await under_a_file.aclose()

    def access(_path: Path, mode: int) -> bool:
        return mode != os.W_OK

    monkeypatch.setattr(os, "access", access)
    read_only = SqliteJournal(directory)
    with pytest.raises(JournalError, match="cannot be written to"):
        await read_only.make()
    await read_only.aclose()


async def test_what_was_appended_is_there_for_the_next_process(directory: Path) -> None:
    await filled(directory, "s-1", created(), chunk("one"), chunk("two"))

    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    records = await log.read(1, 100)
    await journal.aclose()

    assert [record.offset for record in records] == [1, 2, 3]
    assert [record.kind for record in records] == ["session_created"] + ["session_update"] * 2
    assert records[2].payload == chunk("two").payload


async def test_a_second_log_cannot_claim_what_the_first_has(directory: Path) -> None:
    journal = SqliteJournal(directory)
    first, second = await journal.open("s-1"), await journal.open("s-1")
    await first.claim()
    await first.claim()

    with pytest.raises(JournalInUse):
        await second.claim()
    with pytest.raises(JournalInUse):
        await second.append([chunk()])
    await first.release()
    await second.claim()
    await second.append([chunk()])

    assert await first.high_watermark() == 1
    await journal.aclose()


async def test_a_deleted_session_is_gone_and_its_writer_is_told(directory: Path) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    await log.append([created(), chunk()])

    assert await journal.delete("s-1")
    assert not await journal.delete("s-1")
    with pytest.raises(JournalInUse, match="deleted"):
        await log.append([chunk()])
    assert await log.high_watermark() == 0
    assert await journal.sessions() == []
    await journal.aclose()


async def test_after_closing_everything_is_refused(directory: Path) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    await journal.aclose()
    await journal.aclose()

    with pytest.raises(JournalError, match="closed"):
        await log.append([chunk()])
    with pytest.raises(JournalError, match="closed"):
        await log.read(1, 2)
    with pytest.raises(JournalError, match="closed"):
        await journal.open("s-1")


WRITER = """
import asyncio, sys
from pathlib import Path
from antiphon.journal import Entry, SqliteJournal

async def main():
    journal = SqliteJournal(Path(sys.argv[1]))
    log = await journal.open("s-1")
    await log.claim()
    loop = asyncio.get_running_loop()
    for line in sys.stdin:
        entries = [Entry("session_update", b'{"n":%d}' % n, "agent") for n in range(int(line))]
        records = await log.append(entries, flush=True)
        print(records[-1].offset, flush=True)
    await journal.aclose()

asyncio.run(main())
"""


class WriterProcess:
    """Another process that writes to "s-1"."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def append(self, count: int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def writer(directory: Path) -> Iterator[WriterProcess]:
    process = WriterProcess(directory)
    yield process
    process.kill()


@pytest.mark.covers("FF-49")
async def test_another_process_is_named_until_it_is_killed(
    directory: Path, writer: WriterProcess
) -> None:
    writer.append(3)
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")

    with pytest.raises(JournalInUse) as caught:
        await log.claim()
    assert caught.value.owner == f"process {writer.pid}"
    with pytest.raises(JournalInUse):
        await journal.delete("s-1")
    pruned = await journal.prune(sessions=["s-1"])
    assert pruned.removed == []
    assert pruned.in_use == {"s-1": f"process {writer.pid}"}

    writer.kill()
    await log.claim()
    (record,) = await log.append([chunk()])
    assert record.offset == 4
    await journal.aclose()
    assert os.listdir(directory / "owners") == []


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_session_of_another_process_is_followed(
    directory: Path, writer: WriterProcess, read_only: bool
) -> None:
    journal = SqliteJournal(directory, read_only=read_only)
    following = journal.follow("s-1", start=2)
    first = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    writer.append(3)
    seen = [record.offset for record in await first]
    delays: list[float] = []
    for _ in range(20):
        more = asyncio.ensure_future(anext(following))
        await asyncio.to_thread(writer.append, 1)
        before = time.monotonic()
        seen += [record.offset for record in await more]
        delays.append(time.monotonic() - before)
    await following.aclose()
    await journal.aclose()

    assert seen == list(range(2, 24))
    assert statistics.median(delays) < 0.2  # it looks every 20 ms; a busy machine is given more


async def test_following_ends_with_the_session(directory: Path) -> None:
    journal = SqliteJournal(directory)
    following = journal.follow("s-1")
    first = asyncio.ensure_future(anext(following))
    log = await journal.open("s-1")
    await log.claim()
    await log.append([created()])
    await first
    rest = asyncio.ensure_future(anext(following))
    await journal.delete("s-1")

    with pytest.raises(StopAsyncIteration):
        await rest
    await journal.aclose()


async def test_following_is_told_that_the_journal_is_closed(directory: Path) -> None:
    await filled(directory, "s-1", created())
    journal = SqliteJournal(directory)
    following = journal.follow("s-1")
    await anext(following)
    rest = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    await journal.aclose()

    with pytest.raises(JournalError, match="closed"):
        await rest


async def test_what_is_old_is_pruned_whole(directory: Path) -> None:
    for name in ("a", "b", "c", "d"):
        await filled(directory, name, created(), chunk())
    journal = SqliteJournal(directory)
    newest = [info.session_id for info in await journal.sessions()]

    with pytest.raises(ValueError, match="say older_than"):
        await journal.prune()
    none = await journal.prune(older_than=0)
    kept = await journal.prune(keep=3)
    named = await journal.prune(sessions=[newest[0], "nobody"])
    every = await journal.prune(older_than=2**50, keep=1)

    assert none.removed == []
    assert kept.removed == newest[3:]
    assert named.removed == newest[:1]
    assert every.removed == newest[2:3]
    assert [info.session_id for info in await journal.sessions()] == newest[1:2]
    assert await journal.verify() == []
    await journal.aclose()


async def test_the_sessions_of_a_file_that_was_cut_are_listed_and_what_is_there_is_exported(
    directory: Path,
) -> None:
    journal = SqliteJournal(directory, shards=1)
    for name in ("s-1", "s-2"):
        log = await journal.open(name)
        await log.claim()
        for _ in range(40):
            await log.append([chunk("x" * 900)], flush=True)
        await log.aclose()
    await journal.aclose()
    os.truncate(directory / "shard-00.db", (directory / "shard-00.db").stat().st_size * 3 // 4)

    journal = SqliteJournal(directory, read_only=True)
    listed = {info.session_id: info.records for info in await journal.sessions()}
    gaps: dict[str, list[Damage]] = {"s-1": [], "s-2": []}
    held = {
        name: [
            record
            async for run in journal.export(name, damaged=gaps[name].append)
            for record in run
        ]
        for name in gaps
    }
    damages = [damage.reason for damage in await journal.verify()]
    await journal.aclose()

    assert damages[0].startswith("it was cut: ")
    assert listed == {"s-1": 40, "s-2": 40}
    assert [record.offset for record in held["s-1"]][:20] == [*range(1, 21)]
    assert len(held["s-2"]) < 40
    assert (gaps["s-2"][0].file, gaps["s-2"][0].session_id) == ("shard-00.db", "s-2")
    writing = SqliteJournal(directory)
    with pytest.raises(JournalDamaged):
        await (await writing.open("s-2")).claim()
    await writing.aclose()


async def test_a_deleted_session_leaves_no_text_in_the_files(directory: Path) -> None:
    await filled(directory, "s-1", created(), *(chunk(f"secret-{n}-" * 400) for n in range(50)))
    journal = SqliteJournal(directory)
    await journal.delete("s-1")
    await journal.aclose()

    for path in directory.iterdir():
        if path.is_file():
            assert b"secret" not in path.read_bytes(), path.name


ODD_IDS = ["", "../../x", "/etc/passwd", "\ud800", "\udfff\ud800", "a\0b", "x" * 2**20, "ä", "S-1"]


@pytest.mark.covers("FF-49")
async def test_ids_are_only_names(directory: Path, tmp_path: Path) -> None:
    journal = SqliteJournal(directory)
    for session_id in (*ODD_IDS, "s-1"):
        log = await journal.open(session_id)
        await log.claim()
        await log.append([created(), chunk()])
    await journal.aclose()
    assert os.listdir(tmp_path) == ["journal"]

    journal = SqliteJournal(directory)
    assert {info.session_id for info in await journal.sessions()} == {*ODD_IDS, "s-1"}
    for session_id in ODD_IDS:
        log = await journal.open(session_id)
        assert [record.session_id for record in await log.read(1, 2)] == [session_id] * 2
        info = await journal.info(session_id)
        assert info is not None
        assert info.records == 2
    assert await journal.verify() == []
    assert await journal.delete("../../x")
    await journal.aclose()


async def test_the_clock_may_go_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5000, 4000, 3000, 2000])
    monkeypatch.setattr("antiphon.journal._sqlite_thread.now", lambda: next(times, 1000))
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    records = [(await log.append([chunk()]))[0] for _ in range(3)]

    assert [record.offset for record in records] == [1, 2, 3]
    assert records[0].ts > records[2].ts
    assert await log.read(1, 3) == records
    assert await journal.verify() == []
    await journal.aclose()


async def test_a_record_of_16_mib_is_kept(directory: Path) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    large = chunk("x" * (16 << 20))
    records = await log.append([chunk(), large, chunk()])

    assert await log.read(1, 3) == records
    assert await log.read(2, 2) == records[1:2]
    await journal.aclose()


@pytest.mark.parametrize("law", journal_laws(SqliteJournal), ids=repr)
@pytest.mark.covers("J8")
def test_it_keeps_the_laws_of_a_journal(law: JournalLaw) -> None:
    law()
