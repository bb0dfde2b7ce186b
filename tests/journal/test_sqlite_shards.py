"""Which use of a journal object is refused, and that reading makes nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Entry, JournalDamaged, JournalError, SqliteJournal

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


async def test_all_that_look_first_at_once_are_told_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{")
    journal = SqliteJournal(tmp_path)

    answers = await asyncio.gather(*(journal.info("s-1") for _ in range(3)), return_exceptions=True)

    assert [type(answer) for answer in answers] == [JournalDamaged] * 3
    await journal.aclose()


async def test_one_that_is_cancelled_while_it_looks_first_hides_nothing(tmp_path: Path) -> None:
    await filled(tmp_path)
    journal = SqliteJournal(tmp_path)
    first, second = (asyncio.create_task(journal.info("s-1")) for _ in range(2))
    await asyncio.sleep(0)

    first.cancel()

    assert await second is not None
    with pytest.raises(asyncio.CancelledError):
        await first
    await journal.aclose()


async def filled(directory: Path, count: int = 3) -> None:
    journal = SqliteJournal(directory, shards=1)
    log = await journal.open("s-1")
    await log.claim()
    for n in range(count):
        await log.append([Entry("session_update", b'{"n":%d}' % n, "agent")])
    await journal.aclose()


def state(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


async def test_who_only_reads_leaves_every_file_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    await filled(directory)
    before = state(directory)
    times = {path: path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]}
    journal = SqliteJournal(directory, read_only=True)
    log = await journal.open("s-1")

    assert len(await log.read(1, 9)) == 3
    assert len(await journal.sessions()) == 1
    assert await journal.verify() == []
    assert state(directory) == before
    await journal.aclose()

    assert {path: path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]} == times


async def test_who_only_reads_sees_what_a_writer_does_that_comes_later(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    await filled(directory)
    reading = SqliteJournal(directory, read_only=True)
    log = await reading.open("s-1")
    seen = [await log.high_watermark()]
    for _ in range(3):
        writing = SqliteJournal(directory)
        mine = await writing.open("s-1")
        await mine.claim()
        await mine.append([Entry("k", b"{}", "t")])
        seen.append(await log.high_watermark())
        await mine.append([Entry("k", b"{}", "t")])
        seen.append(await log.high_watermark())
        await writing.aclose()
        seen.append(await log.high_watermark())
    await reading.aclose()

    assert seen == [3, 4, 5, 5, 6, 7, 7, 8, 9, 9]


READ = """
import asyncio, ctypes, logging, os, sys
from antiphon.journal import JournalError, SqliteJournal

logging.basicConfig(format="%(message)s")
if os.geteuid() == 0:  # root without what lets it ignore modes
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~0b110
    assert libc.capset(header, sets) == 0
try:
    open(sys.argv[1] + "/new", "w").close()
except PermissionError:
    pass
else:
    sys.exit("the directory can be written")

async def main():
    journal = SqliteJournal(sys.argv[1], read_only=True)
    log = await journal.open("s-1")
    print(len(await log.read(1, 99)))
    await journal.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("beside", [[], ["-wal", "-shm"], ["-wal"]])
async def test_a_directory_that_cannot_be_written_is_read(
    tmp_path: Path, beside: list[str]
) -> None:
    """With no log, with a log and its index, and with a log alone, whose records are left out."""
    directory = tmp_path / "journal"
    await filled(directory)
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    await log.append([Entry("k", b"{}", "t")])
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    await journal.aclose()
    for end in {"-wal", "-shm"} - set(beside):
        (copy / f"shard-00.db{end}").unlink()
    for path in copy.iterdir():
        path.chmod(0o500 if path.is_dir() else 0o400)
    copy.chmod(0o500)

    done = subprocess.run(
        [sys.executable, "-c", READ, str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    copy.chmod(0o700)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("4" if beside == ["-wal", "-shm"] else "3")
    assert ("newest is left out" in done.stderr) == (beside == ["-wal"])


UNCLOSED = """
import asyncio, sys
from antiphon.journal import Entry, SqliteJournal

async def main():
    global journal, log
    journal = SqliteJournal(sys.argv[1])
    log = await journal.open("s-1")
    await log.claim()
    await log.append([Entry("k", b"{}", "t")])
    asyncio.ensure_future(log.append([Entry("k", b"{}", "t")]))

asyncio.run(main())
"""


async def test_a_journal_that_nobody_closed_keeps_no_process_and_no_claim(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCLOSED, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")

    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    assert 1 <= await log.high_watermark() <= 2
    assert journal.losses == ()
    await journal.aclose()


FORKED = """
import asyncio, gc, os, sys
from antiphon.journal import Entry, SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1], shards=1)
    log = await journal.open("s-1")
    await log.claim()
    for n in range(5):
        await log.append([Entry("k", b"{}", "t")], flush=True)
        child = os.fork()
        if child == 0:
            return True  # ends as any program does, with all that it inherited
        assert os.waitpid(child, 0)[1] == 0
        await log.append([Entry("k", b"{}", "t")], flush=True)
    assert [record.offset for record in await log.read(1, 99)] == list(range(1, 11))
    assert await journal.verify() == []
    await journal.aclose()

if asyncio.new_event_loop().run_until_complete(main()):
    gc.collect()
    sys.exit(0)
"""


async def test_children_that_end_take_nothing_from_their_parent(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr

    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    assert await log.high_watermark() == 10
    assert await journal.verify() == []
    assert journal.losses == ()
    await journal.aclose()


async def test_what_is_under_way_when_it_is_closed_is_told(tmp_path: Path) -> None:
    await filled(tmp_path / "journal", 300)
    journal = SqliteJournal(tmp_path / "journal")
    exporting = journal.export("s-1")
    assert len(await anext(exporting)) == 256
    await journal.aclose()

    with pytest.raises(JournalError, match="closed"):
        await anext(exporting)


async def test_processes_that_come_first_at_once_agree(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from antiphon.journal import Entry, SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1], shards=int(sys.argv[2]))
    for n in range(4):
        log = await journal.open(f"s-{sys.argv[2]}-{n}")
        await log.claim()
        await log.append([Entry("k", b"{}", "t")])
    await journal.aclose()

asyncio.run(main())
"""
    directory = tmp_path / "journal"
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", code, directory, str(shards))
        for shards in (1, 2, 3, 4)
    ]
    assert [await process.wait() for process in processes] == [0] * 4

    journal = SqliteJournal(directory)
    assert len(await journal.sessions()) == 16
    assert await journal.verify() == []
    await journal.aclose()
    assert not list(directory.glob(".new*"))
