"""Files of a journal are cut and spoiled: damage is named, nothing wrong is given, all else is saved.

With `ANTIPHON_CRASHES` of 500 (`make crash`) the write-ahead log is cut at every byte and the file
spoiled in a thousand ways; else at every frame, and in some.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from antiphon.journal import (
    SESSION_UPDATE,
    Damage,
    Entry,
    JournalDamaged,
    JournalError,
    SqliteJournal,
)
from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon.journal import Record, SessionLog

ALL: Final = int(os.environ.get("ANTIPHON_CRASHES") or 0) >= 500
SEED: Final = os.environ.get("ANTIPHON_SEED") or str(random.SystemRandom().getrandbits(32))
SHARDS: Final = 2
PAGE: Final = 16384
TURNS: Final = ("turn_started", "turn_completed")
#: A disk that is none, where there is one: files are read and spoiled here, and nothing is to last.
RAM: Final = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _damage_is_expected() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    logger = logging.getLogger("antiphon.journal")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def tmp_path() -> Generator[Path]:
    """In place of pytest's, whose folder is on a disk that takes its time for each file."""
    ram = RAM if os.access(RAM, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="antiphon-test-", dir=ram) as folder:
        yield Path(folder)


def entry(text: str) -> Entry:
    content = {"type": "text", "text": text}
    payload = {"sessionUpdate": "agent_message_chunk", "content": content}
    return Entry(SESSION_UPDATE, encode(payload), "agent")


def entries_of(name: str, count: int) -> list[Entry]:
    """What one session holds; some of it is longer than a page."""
    turn = b'{"turnId":1}'
    said = [entry(f"{name} {n} " + "ö" * (9_000 if n % 20 == 5 else n)) for n in range(count)]
    return [
        Entry("session_created", b'{"cwd":"/srv"}', "system"),
        Entry("turn_started", turn, "user"),
        *said,
        Entry("turn_completed", turn, "system"),
    ]


def file_of(session: str) -> str:
    """The shard that a session is in."""
    digest = hashlib.sha256(session.encode()).digest()
    return f"shard-{int.from_bytes(digest[:8], 'big') % SHARDS:02d}.db"


class Kept:
    """A journal's files, and every record that was acknowledged for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, list[Record]] = {}

    async def append(self, log: SessionLog, *entries: Entry) -> None:
        records = await log.append(entries, flush=True)
        self.records.setdefault(log.session_id, []).extend(records)

    def copied(self, folder: Path) -> Path:
        """The files anew, to be spoiled."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder


class Examination:
    """Everything a spoiled journal gives, compared with what was written.

    Attributes:
        wrong: what must not be, a sentence each.
        damages: what `verify` names.
        spoiled: the sessions of which something could not be read.
        saved: how many records of the file that was spoiled are exported.
    """

    def __init__(self, kept: Kept, folder: Path, file: str | None) -> None:
        self.wrong: list[str] = []
        self.damages: list[Damage] = []
        self.spoiled: set[str] = set()
        self.saved = 0
        self._kept = kept
        self._folder = folder
        self._file = file

    async def run(self) -> None:
        journal = SqliteJournal(self._folder, read_only=True)
        self.damages = await journal.verify()
        for damage in self.damages:
            if damage.file != self._file:
                self.wrong.append(f"{damage.file} is not what was spoiled: {damage}")
        for session, records in self._kept.records.items():
            await self._read(journal, session, records)
        await self._list(journal)
        await journal.aclose()
        journal = SqliteJournal(self._folder)
        for session, records in self._kept.records.items():
            await self._append(journal, session, records)
        await journal.aclose()
        if self.spoiled and not self.damages:
            self.wrong.append(f"nothing is named, and {sorted(self.spoiled)} cannot be read")

    @contextlib.contextmanager
    def _damaged(self, session: str) -> Generator[None]:
        """What is damaged may be told so, for what is in the file that was spoiled."""
        try:
            yield
        except JournalDamaged as error:
            self.spoiled.add(session)
            if error.file != self._file or error.session_id not in {session, None}:
                self.wrong.append(f"{session}: {error} is told instead")
            if file_of(session) != self._file:
                self.wrong.append(f"{session}: {error}, and its file is as it was")
        except JournalError as error:
            # What it spoils may be the number of the format.
            self.spoiled.add(session)
            if file_of(session) != self._file or "newer version" not in str(error):
                self.wrong.append(f"{session}: {error}, which is no word of damage")

    async def _read(self, journal: SqliteJournal, session: str, records: list[Record]) -> None:
        log = await journal.open(session)
        with self._damaged(session):
            mark = await log.high_watermark()
            if mark != len(records):
                self.wrong.append(f"{session}: {mark} records are there, of {len(records)}")
        with self._damaged(session):
            self._compare(session, "read", await log.read(1, len(records) + 1), records)
        with self._damaged(session):
            latest = await log.latest(TURNS)
            if latest != {record.kind: record for record in records if record.kind in TURNS}:
                self.wrong.append(f"{session}: the latest are {latest}")
        readable: list[Record] = []
        # Each by itself where something is wrong, else it was all there.
        for record in records if session in self.spoiled else ():
            with self._damaged(session):
                found = await log.read(record.offset, record.offset)
                self._compare(session, f"read {record.offset}", found, [record])
                readable += found
        await log.aclose()
        await self._export(journal, session, records, readable)

    async def _export(
        self, journal: SqliteJournal, session: str, records: list[Record], readable: list[Record]
    ) -> None:
        gaps: list[Damage] = []
        exported: list[Record] = []
        with self._damaged(session):
            async for run in journal.export(session, damaged=gaps.append):
                exported += run
        self.saved += len(exported) if file_of(session) == self._file else 0
        offsets = [record.offset for record in exported]
        if offsets != sorted(set(offsets)) or not set(exported) <= set(records):
            self.wrong.append(f"{session}: {offsets} are exported, or others for them")
        for record in readable or (() if session in self.spoiled else records):
            if record not in exported:
                self.wrong.append(f"{session}: record {record.offset} can be read, not exported")
        if len(exported) < len(records) and not gaps and session not in self.spoiled:
            self.wrong.append(f"{session}: {len(exported)} records are exported, and no gap told")

    def _compare(self, session: str, what: str, found: list[Record], wanted: list[Record]) -> None:
        if found != wanted:
            differing = [record.offset for record in found if record not in wanted]
            self.wrong.append(
                f"{session}: {what} gives {len(found)} of {len(wanted)}, of them others: {differing}"
            )

    async def _list(self, journal: SqliteJournal) -> None:
        try:
            listed = await journal.sessions()
        except JournalError as error:
            if "newer version" not in str(error):
                self.wrong.append(f"the list of sessions: {error}")
            return
        for info in listed:
            session = info.session_id
            records = self._kept.records.get(session)
            if records is None or (info.records != len(records) and session not in self.spoiled):
                self.wrong.append(f"{session} is listed with {info.records} records")

    async def _append(self, journal: SqliteJournal, session: str, records: list[Record]) -> None:
        """An offset is given once, whatever became of the record that had it."""
        log = await journal.open(session)
        try:
            await log.claim()
            (record,) = await log.append([entry("after")], flush=True)
        except JournalError as error:
            self.spoiled.add(session)
            if file_of(session) != self._file:
                self.wrong.append(f"{session}: {error}, and its file is as it was")
        else:
            if record.offset != len(records) + 1:
                self.wrong.append(f"{session}: {record.offset} is given after {len(records)}")
        await log.aclose()


# ------------------------------------------------------------------ the file


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Eight sessions, closed: all is in the files."""
    kept = Kept(tmp_path / "kept")
    asyncio.run(write(kept))
    return kept


async def write(kept: Kept) -> None:
    journal = SqliteJournal(kept.folder, shards=SHARDS)
    for number in range(8):
        log = await journal.open(f"session {number}")
        await log.claim()
        entries = entries_of(log.session_id, 40)
        for start in range(0, len(entries), 7):
            await kept.append(log, *entries[start : start + 7])
        await log.aclose()
    await journal.aclose()


def fullest(kept: Kept) -> Path:
    """The larger one of the files."""
    return max(kept.folder.glob("shard-*.db"), key=lambda path: path.stat().st_size)


async def spoil(
    kept: Kept, folder: Path, file: str, change: Callable[[bytearray], None]
) -> Examination:
    """Change one file, and look at everything."""
    path = kept.copied(folder) / file
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    examination = Examination(kept, folder, file)
    await examination.run()
    return examination


async def test_what_is_whole_is_found_whole(kept: Kept, tmp_path: Path) -> None:
    examination = Examination(kept, kept.copied(tmp_path / "copy"), None)

    await examination.run()

    assert not examination.wrong
    assert not examination.damages
    assert not examination.spoiled


@pytest.mark.covers("FF-49")
@pytest.mark.bound(120)
async def test_a_file_that_is_cut_at_any_page_is_named_and_the_rest_is_saved(
    kept: Kept, tmp_path: Path
) -> None:
    file = fullest(kept)
    pages = file.stat().st_size // PAGE
    assert pages > 10
    written = sum(len(kept.records[name]) for name in kept.records if file_of(name) == file.name)
    saved: list[int] = []

    for number in range(pages):
        for cut in {number * PAGE, number * PAGE + 1 + number * 1000 % PAGE}:

            def change(data: bytearray, cut: int = cut) -> None:
                del data[cut:]

            examination = await spoil(kept, tmp_path / "copy", file.name, change)

            assert not examination.wrong, f"cut at {cut} of {pages} pages: {examination.wrong}"
            assert examination.damages, f"cut at {cut}: nothing is named"
            saved.append(examination.saved)

    # A file says how long it is; one that is shorter gives what it has all the same.
    assert max(saved) > 0.9 * written
    assert sorted(saved)[len(saved) * 3 // 4] > written / 4


@pytest.mark.covers("FF-49")
@pytest.mark.bound(60 + 600 * ALL)
async def test_bytes_that_are_flipped_are_never_given_and_never_lost_silently(
    kept: Kept, tmp_path: Path
) -> None:
    file = fullest(kept)
    named = 0

    for number in range(1000 if ALL else 60):
        chance = random.Random(f"{SEED}/{number}")

        def change(data: bytearray, chance: random.Random = chance) -> None:
            for _ in range(chance.choice([1, 1, 8])):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

        examination = await spoil(kept, tmp_path / "copy", file.name, change)

        assert not examination.wrong, f"ANTIPHON_SEED={SEED}, number {number}: {examination.wrong}"
        named += bool(examination.damages)

    assert named > 0


@pytest.mark.covers("FF-49")
@pytest.mark.bound(90 + 600 * ALL)
async def test_whatever_bit_of_the_first_page_is_flipped_is_named_or_does_no_harm(
    kept: Kept, tmp_path: Path
) -> None:
    file = fullest(kept)
    first = file.read_bytes()[:PAGE]
    bits = [
        (place, bit) for place in range(PAGE) if place < 128 or first[place] for bit in range(8)
    ]

    for place, bit in bits if ALL else random.Random(SEED).sample(bits, 150):

        def change(data: bytearray, place: int = place, bit: int = bit) -> None:
            data[place] ^= 1 << bit

        examination = await spoil(kept, tmp_path / "copy", file.name, change)

        assert not examination.wrong, f"bit {bit} of byte {place}: {examination.wrong}"


def page_of(file: Path, table: str) -> slice:
    """Where the first page of a table, or of an index, is in the file."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name=?"
        (root,) = database.execute(query, (table,)).fetchone()
    return slice((root - 1) * PAGE, root * PAGE)


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        # A session that is not found by its name is not a new one.
        ("sqlite_autoindex_sessions_1", b"session", b"sessinn"),
        # The last turn decides about a repair.
        ("sessions", b'"turn_started"', b'"turn_startee"'),
        ("sessions", b'"turn_completed":43', b'"turn_completed":42'),
        ("sessions", b"/srv", b"/srw"),
        # What is not asked for while reading.
        (None, b"owner TEXT", b"ownes TEXT"),
        (None, b"checks BLOB", b"cheaks BLOB"),
        # What only who writes is refused for.
        (None, b"losseslosses", b"losseslossds"),
        ("meta", b"commits", b"comm\0ts"),
    ],
)
async def test_what_is_spoiled_beside_the_records_is_named(
    kept: Kept, tmp_path: Path, table: str | None, old: bytes, new: bytes
) -> None:
    file = fullest(kept)
    place = slice(0, PAGE) if table is None else page_of(file, table)

    def change(data: bytearray) -> None:
        page = data[place]
        assert old in page
        data[place] = page.replace(old, new, 1)

    examination = await spoil(kept, tmp_path / "copy", file.name, change)

    assert not examination.wrong
    assert examination.damages


@pytest.mark.parametrize(
    "statement",
    [
        # One bit of the last row's key, of the first one's, of what sessions know of themselves.
        "UPDATE records SET key = key + (1 << 36) WHERE key = (SELECT max(key) FROM records)",
        "UPDATE records SET key = key + (1 << 36) WHERE key = (SELECT min(key) FROM records)",
        "UPDATE sessions SET records = records + (1 << 36)",
    ],
)
async def test_a_number_that_is_far_too_high_is_no_reason_to_look_for_so_many_records(
    kept: Kept, tmp_path: Path, statement: str
) -> None:
    file = fullest(kept)
    path = kept.copied(tmp_path / "copy") / file.name
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(statement)
    examination = Examination(kept, tmp_path / "copy", file.name)

    await examination.run()

    assert not examination.wrong
    assert examination.damages


@pytest.mark.parametrize(
    "statement",
    [
        # Rows of two sessions that changed places: each is whole, and neither's own.
        """UPDATE records SET key = (3 << 40) - (key - 36) + 36 + (1 << 62)
            WHERE key IN ((1 << 40) + 36, (2 << 40) + 36)""",
        "INSERT INTO garbage SELECT number FROM sessions",
        "DELETE FROM records WHERE key & 0xffff = 43",
        "DELETE FROM sqlite_sequence",
    ],
)
async def test_rows_that_are_not_where_they_were_are_named(
    kept: Kept, tmp_path: Path, statement: str
) -> None:
    file = fullest(kept)
    copy = kept.copied(tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(copy / file.name)) as database, database:
        database.execute(statement)
        database.execute("UPDATE records SET key = key - (1 << 62) WHERE key > (1 << 62)")
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    examination = Examination(kept, copy, file.name)
    await examination.run()

    assert not examination.wrong
    assert examination.damages or "sequence" in statement


# ------------------------------------------------------------------ the write-ahead log


class Logged(Kept):
    """A journal whose last appends are in its log; how long that was when each was acknowledged.

    Attributes:
        lengths: of the log, ascending, each with the number of records that were acknowledged then.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lengths: list[tuple[int, int]] = []

    @property
    def all(self) -> list[Record]:
        return self.records["s"]


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    logged = Logged(tmp_path / "kept")
    asyncio.run(write_logged(logged, tmp_path / "live"))
    return logged


async def write_logged(logged: Logged, live: Path) -> None:
    """Leave copies of the files, as a process leaves them that is killed."""
    for texts in ("ab", "c", "de"):
        journal = SqliteJournal(live, shards=1)
        log = await journal.open("s")
        await log.claim()
        wal = live / "shard-00.db-wal"
        for text in texts:
            await logged.append(log, entry(text), entry(f"{text}, again"))
            logged.lengths.append((wal.stat().st_size, len(logged.all)))
        if texts == "de":
            shutil.copytree(live, logged.folder)
            logged.lengths = [(0, len(logged.all) - 4), *logged.lengths[-2:]]
        await log.aclose()
        await journal.aclose()


def cuts_of(length: int) -> list[int]:
    """Every byte; or the edges of the log's header and of each frame, and some in between."""
    if ALL:
        return list(range(length, -1, -1))
    frame = 24 + PAGE
    edges = [0, 1, 31, 32, 33, *range(32, length + 1, frame)]
    near = {edge + by for edge in edges for by in (-1, 0, 1, 23, 24, 25, 4096)}
    chance = random.Random(SEED)
    some = {chance.randrange(length) for _ in range(100)}
    return sorted((cut for cut in near | some | {length} if 0 <= cut <= length), reverse=True)


async def cut_log(logged: Logged, folder: Path, cut: int) -> None:
    """Open a journal whose log ends there: what is left is the beginning, and the rest is told."""
    wal = folder / "shard-00.db-wal"
    os.truncate(wal, cut)
    (folder / "shard-00.db-shm").unlink(missing_ok=True)
    journal = SqliteJournal(folder, read_only=True)
    log = await journal.open("s")
    mark = await log.high_watermark()
    held = await log.read(1, mark + 1)
    await log.aclose()
    await journal.aclose()

    assert held == logged.all[:mark], f"cut at {cut}"
    # What was acknowledged when the log was no longer than that is there.
    assert mark >= max(count for length, count in logged.lengths if length <= cut), f"cut at {cut}"
    if mark < len(logged.all):
        assert [loss.file for loss in journal.losses] == ["shard-00.db"], f"cut at {cut}"
    else:
        assert not journal.losses, f"cut at {cut}"


@pytest.mark.covers("FF-49")
@pytest.mark.bound(60 + 1800 * ALL)
def test_a_log_that_is_cut_at_any_byte_gives_its_beginning_and_tells_the_loss(
    logged: Logged, tmp_path: Path
) -> None:
    folder = logged.copied(tmp_path / "copy")
    length = logged.lengths[-1][0]
    assert length > 3 * PAGE
    file = (folder / "shard-00.db").read_bytes()

    async def cut_all() -> None:
        for cut in cuts_of(length):
            await cut_log(logged, folder, cut)

    asyncio.run(cut_all())

    # Reading has changed nothing.
    assert (folder / "shard-00.db").read_bytes() == file


@pytest.mark.covers("FF-49")
async def test_a_log_that_was_cut_is_gone_on_with_and_the_loss_stays_named(
    logged: Logged, tmp_path: Path
) -> None:
    length = logged.lengths[-1][0]
    for cut in (0, 32, 40_000, 60_000, length - 1):
        folder = logged.copied(tmp_path / "copy")
        os.truncate(folder / "shard-00.db-wal", cut)
        journal = SqliteJournal(folder)
        log = await journal.open("s")
        mark = await log.high_watermark()
        await log.claim()

        (record,) = await log.append([entry("after")], flush=True)

        assert record.offset == mark + 1
        assert await log.read(1, mark + 1) == [*logged.all[:mark], record]
        assert [loss.file for loss in journal.losses] == ["shard-00.db"]
        await log.aclose()
        await journal.aclose()
        again = SqliteJournal(folder, read_only=True)
        assert any("acknowledged" in damage.reason for damage in await again.verify())
        await again.aclose()


@pytest.mark.covers("FF-49")
async def test_a_log_with_bytes_flipped_gives_its_beginning(logged: Logged, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    length = logged.lengths[-1][0]
    for _ in range(300 if ALL else 40):
        folder = logged.copied(tmp_path / "copy")
        wal = folder / "shard-00.db-wal"
        data = bytearray(wal.read_bytes())
        at = chance.randrange(length)
        data[at] ^= 1 << chance.randrange(8)
        wal.write_bytes(data)
        (folder / "shard-00.db-shm").unlink(missing_ok=True)
        journal = SqliteJournal(folder, read_only=True)
        log = await journal.open("s")
        mark = await log.high_watermark()
        assert await log.read(1, mark + 1) == logged.all[:mark], f"ANTIPHON_SEED={SEED}, {at}"
        if mark < len(logged.all):
            assert journal.losses, f"ANTIPHON_SEED={SEED}, flipped at {at}"
        await log.aclose()
        await journal.aclose()
