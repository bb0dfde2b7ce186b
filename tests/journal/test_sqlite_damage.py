"""Damage is named by file, session and offset, and what can be read is had all the same."""

from __future__ import annotations

import random
import shutil
import sqlite3
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Damage, Entry, JournalDamaged, JournalError, Record, SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path

SESSIONS = [f"s-{n}" for n in range(12)]


def entries(session_id: str, count: int = 300) -> list[Entry]:
    text = f"{session_id} " * 40
    return [
        Entry("session_created", b'{"cwd":"/x"}', "system"),
        Entry("session_update", b'{"sessionUpdate":"session_info_update","title":"T"}', "system"),
        *(
            Entry("session_update", b'{"n":%d,"text":"%b"}' % (n, text.encode()), "agent")
            for n in range(count)
        ),
    ]


#: Journals that were written once, to be copied, by their number of shards.
_written: dict[int, tuple[Path, dict[str, list[Record]]]] = {}


async def written(directory: Path, *, shards: int = 1) -> dict[str, list[Record]]:
    """Have a journal in the directory, which belongs to the test; returns its records."""
    if shards not in _written:
        first = directory.parent.with_name(f"written-{shards}")
        _written[shards] = first, await _write(first, shards)
    source, records = _written[shards]
    shutil.copytree(source, directory)
    return records


async def _write(directory: Path, shards: int) -> dict[str, list[Record]]:
    journal = SqliteJournal(directory, shards=shards)
    records: dict[str, list[Record]] = {}
    for session_id in SESSIONS:
        log = await journal.open(session_id)
        await log.claim()
        told = entries(session_id)
        records[session_id] = [
            record
            for at in range(0, len(told), 40)
            for record in await log.append(told[at : at + 40])
        ]
    await journal.aclose()
    return records


async def exported(journal: SqliteJournal, session_id: str) -> tuple[list[Record], list[Damage]]:
    damages: list[Damage] = []
    runs = journal.export(session_id, damaged=damages.append)
    return [record async for run in runs for record in run], damages


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def change(directory: Path, *statements: str) -> None:
    database = sqlite3.connect(directory / "shard-00.db")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


async def test_a_sound_journal_has_no_damage(directory: Path) -> None:
    records = await written(directory)
    journal = SqliteJournal(directory, read_only=True)

    assert await journal.verify() == []
    assert await journal.verify(["s-3", "nobody"]) == []
    assert await exported(journal, "s-3") == (records["s-3"], [])
    assert await exported(journal, "nobody") == ([], [])
    await journal.aclose()


async def test_a_flipped_bit_in_a_record_is_named_and_hides_nothing_else(directory: Path) -> None:
    records = await written(directory)
    path = directory / "shard-00.db"
    data = bytearray(path.read_bytes())
    at = data.index(b'{"n":17,"text":"s-5 ')
    data[at + 20] ^= 1
    path.write_bytes(data)
    journal = SqliteJournal(directory)
    log = await journal.open("s-5")

    with pytest.raises(JournalDamaged) as caught:
        await log.read(1, 300)
    assert (caught.value.file, caught.value.session_id, caught.value.offset) == (
        "shard-00.db",
        "s-5",
        20,
    )
    assert await log.read(1, 19) == records["s-5"][:19]
    assert await log.read(21, 302) == records["s-5"][20:]
    assert await journal.verify() == [Damage("shard-00.db", "s-5", 20, "the checksum does not fit")]
    assert await exported(journal, "s-5") == (
        [*records["s-5"][:19], *records["s-5"][20:]],
        [Damage("shard-00.db", "s-5", 20, "the checksum does not fit")],
    )
    await journal.aclose()


async def test_a_row_that_is_gone_is_a_gap_and_a_lost_end_is_never_written_over(
    directory: Path,
) -> None:
    records = await written(directory)
    change(
        directory,
        "DELETE FROM records WHERE key=(SELECT number<<40 FROM sessions WHERE id=CAST('s-1' AS BLOB))+41",
        "DELETE FROM records WHERE key=(SELECT max(key) FROM records WHERE key>>40="
        "(SELECT number FROM sessions WHERE id=CAST('s-2' AS BLOB)))",
    )
    journal = SqliteJournal(directory)

    assert await journal.verify() == [
        Damage("shard-00.db", "s-1", 41, "cannot be found (records 41 to 80)"),
        Damage("shard-00.db", "s-2", 281, "cannot be found (records 281 to 302)"),
    ]
    log = await journal.open("s-1")
    with pytest.raises(JournalDamaged, match="record 41"):
        await log.read(1, 302)
    assert (await exported(journal, "s-1"))[0] == records["s-1"][:40] + records["s-1"][80:]
    assert (await exported(journal, "s-2"))[1] == [
        Damage("shard-00.db", "s-2", 281, "cannot be found (records 281 to 302)")
    ]
    lost = await journal.open("s-2")
    with pytest.raises(JournalDamaged, match="record 281"):
        await lost.claim()
    await log.claim()
    assert (await log.append(entries("s-1", 1)[:1]))[0].offset == 303
    await journal.aclose()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE sessions SET title='other'", "its index has another title than its records"),
        ("UPDATE sessions SET latest='{}'", "its index has another latest than its records"),
        ("UPDATE sessions SET latest='x'", "its index cannot be read"),
        ("UPDATE sessions SET records=300", "its index knows 300 of 302 records"),
        ("UPDATE sessions SET meta=NULL", "its index has another meta than its records"),
        ("UPDATE sessions SET created=1", "its index has another created than its records"),
    ],
)
async def test_an_index_that_does_not_fit_is_told(
    directory: Path, statement: str, reason: str
) -> None:
    await written(directory)
    change(directory, f"{statement} WHERE id=CAST('s-4' AS BLOB)")
    journal = SqliteJournal(directory)

    assert await journal.verify() == [Damage("shard-00.db", "s-4", None, reason)]
    await journal.aclose()


@pytest.mark.parametrize(
    "statement", ["UPDATE sessions SET latest='x'", "UPDATE sessions SET records=300, title='x'"]
)
async def test_an_index_is_made_anew_from_the_records(directory: Path, statement: str) -> None:
    await written(directory)
    change(directory, f"{statement} WHERE id=CAST('s-4' AS BLOB)")
    journal = SqliteJournal(directory)
    log = await journal.open("s-4")

    await log.claim()

    assert await journal.verify() == []
    info = await journal.info("s-4")
    assert info is not None
    assert (info.records, info.title) == (302, "T")
    assert (await log.append(entries("s-4", 1)[:1]))[0].offset == 303
    await journal.aclose()


async def test_records_without_a_session_are_told(directory: Path) -> None:
    await written(directory)
    change(directory, "DELETE FROM sessions WHERE id=CAST('s-4' AS BLOB)")
    journal = SqliteJournal(directory)

    (damage,) = await journal.verify()

    assert damage.session_id is None
    assert damage.reason.startswith("302 records belong to no session")
    await journal.aclose()


async def check_what_is_left(
    directory: Path, records: dict[str, list[Record]], *, sound: bool
) -> None:
    """Every record that is given is one that was written; damage is told, never another error."""
    journal = SqliteJournal(directory)
    damages = await journal.verify()
    complete = 0
    for session_id in SESSIONS:
        try:
            had, gaps = await exported(journal, session_id)
        except JournalDamaged:
            continue
        whole = records[session_id]
        assert all(record == whole[record.offset - 1] for record in had)
        offsets = [record.offset for record in had]
        assert offsets == sorted(set(offsets))
        complete += len(had) == len(whole)
        if 0 < len(had) < len(whole):
            assert gaps or damages
    if complete < len(SESSIONS):
        assert damages
        assert {damage.file for damage in damages} == {"shard-00.db"}
    if sound:
        assert complete == len(SESSIONS)
    assert isinstance(await journal.sessions(), list)
    await journal.aclose()


@pytest.mark.bound(120)
async def test_a_file_cut_at_every_page_is_damage_and_no_surprise(directory: Path) -> None:
    records = await written(directory)
    path = directory / "shard-00.db"
    data = path.read_bytes()
    pages = len(data) // 16384
    assert pages > 20
    for page in range(0, pages, 1 if pages < 40 else pages // 40):
        path.write_bytes(data[: page * 16384])
        await check_what_is_left(directory, records, sound=False)


@pytest.mark.bound(120)
async def test_a_page_that_is_no_page_costs_only_what_was_in_it(directory: Path) -> None:
    records = await written(directory)
    path = directory / "shard-00.db"
    data = path.read_bytes()
    dice = random.Random(5)
    pages = len(data) // 16384
    for page in dice.sample(range(1, pages), min(pages - 1, 40)):
        path.write_bytes(data[: page * 16384] + b"\xff" * 16384 + data[(page + 1) * 16384 :])
        await check_what_is_left(directory, records, sound=False)


@pytest.mark.bound(120)
async def test_flipped_bytes_are_never_given_as_records(directory: Path) -> None:
    records = await written(directory)
    path = directory / "shard-00.db"
    data = path.read_bytes()
    dice = random.Random(7)
    for _ in range(40):
        changed = bytearray(data)
        for _ in range(dice.choice([1, 3, 30])):
            changed[dice.randrange(len(changed))] ^= dice.randrange(1, 256)
        path.write_bytes(changed)
        await check_what_is_left(directory, records, sound=False)


@pytest.mark.covers("FF-49")
async def test_other_shards_stay_usable(directory: Path) -> None:
    records = await written(directory, shards=4)
    paths = sorted(directory.glob("*.db"))
    paths[0].write_bytes(b"\0" * 20000)
    journal = SqliteJournal(directory)
    known = {info.session_id for info in await journal.sessions()}

    assert 0 < len(known) < len(SESSIONS)
    (damage,) = await journal.verify()
    assert (damage.file, damage.session_id) == (paths[0].name, None)
    for session_id in SESSIONS:
        log = await journal.open(session_id)
        if session_id in known:
            assert await log.read(1, 302) == records[session_id]
            await log.claim()
            await log.append(entries(session_id, 1))
        else:
            with pytest.raises(JournalDamaged):
                await log.read(1, 302)
            with pytest.raises(JournalDamaged):
                await log.claim()
    await journal.aclose()


async def test_a_lost_shape_hides_no_damage(directory: Path) -> None:
    await written(directory, shards=2)
    (directory / "journal.json").write_bytes(b"\0\0")
    (directory / "shard-01.db").write_bytes(b"")
    journal = SqliteJournal(directory)

    assert [(damage.file, damage.reason) for damage in await journal.verify()] == [
        ("journal.json", "it is not JSON"),
        ("shard-01.db", "it is empty"),
    ]
    with pytest.raises(JournalError):
        await journal.sessions()
    await journal.aclose()


@pytest.mark.bound(120)
@pytest.mark.covers("FF-49")
async def test_a_log_cut_at_any_byte_loses_its_end_and_says_so(directory: Path) -> None:
    """The last bytes one by one, and one place in each frame before."""
    journal = SqliteJournal(directory, shards=1)
    log = await journal.open("s-1")
    await log.claim()
    for n in range(12):
        await log.append([Entry("session_update", b'{"n":%d}' % n, "agent")], flush=True)
    whole = await log.read(1, 12)
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    await journal.aclose()
    wal = (copy / "shard-00.db-wal").read_bytes()
    cuts = {*range(0, len(wal), 16411), *range(len(wal) - 40, len(wal) + 1), 1, 31, 32, 33}
    seen: set[int] = set()
    for cut in sorted(cuts):
        place = directory.with_name(f"cut-{cut}")
        shutil.copytree(copy, place)
        (place / "shard-00.db-wal").write_bytes(wal[:cut])
        again = SqliteJournal(place)
        records = await (await again.open("s-1")).read(1, 100)
        mine = await again.open("s-1")
        assert records == whole[: len(records)]
        seen.add(len(records))
        lost = cut < len(wal)
        assert bool(again.losses) == lost
        told = [damage.reason for damage in await again.verify()]
        assert any("acknowledged commits" in reason for reason in told) == lost
        await mine.claim()
        (record,) = await mine.append([Entry("k", b"{}", "t")])
        assert record.offset == len(records) + 1
        assert [loss.file for loss in again.losses] == ["shard-00.db"] * lost
        await again.aclose()
        # It is told later as well, when the count of commits has been passed.
        later = SqliteJournal(place, read_only=True)
        assert bool(await later.verify()) == lost
        await later.aclose()
        shutil.rmtree(place)
    assert seen >= {0, 1, 11, 12}
