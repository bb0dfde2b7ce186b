"""The directory and its files: private from the first byte, and never made over what was there."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import JournalDamaged, JournalError, _sqlite_schema
from antiphon.journal._sqlite_owners import lock_file
from antiphon.journal._sqlite_schema import (
    MIGRATIONS,
    VERSION,
    Mark,
    connect,
    make_directory,
    make_shard,
    read_shape,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "journal"
    make_directory(directory, 4)
    make_shard(directory, 0)
    return directory


def test_a_journal_that_is_made_while_it_is_looked_for_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "journal"
    listdir = os.listdir

    def made_meanwhile(path: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        make_directory(directory, 4)
        make_shard(directory, 0)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", made_meanwhile)

    assert read_shape(directory) is None
    assert read_shape(directory) == 4


def test_the_number_of_shards_is_the_first_ones_word(tmp_path: Path) -> None:
    directory = tmp_path / "journal"

    assert read_shape(directory) is None
    assert make_directory(directory, 4) == 4
    assert make_directory(directory, 8) == 4
    assert read_shape(directory) == 4


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777])
def test_everything_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    directory = tmp_path / "journal"
    before = os.umask(mask)
    try:
        make_directory(directory, 2)
        make_shard(directory, 1)
        database = connect(directory, 1, "write", "power")
        database.execute("INSERT INTO garbage VALUES(1)")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in [directory, *directory.iterdir()]}
    database.close()

    assert modes == {
        "journal": 0o700,
        "journal.json": 0o600,
        "lock": 0o600,
        "owners": 0o700,
        "shard-01.db": 0o600,
        "shard-01.db-wal": 0o600,
        "shard-01.db-shm": 0o600,
        "shard-01.mark": 0o600,
    }


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "journal"
    make_directory(directory, 4)
    directory.chmod(mode)

    with pytest.raises(JournalError, match="others can write"):
        read_shape(directory)
    with pytest.raises(JournalError, match="others can write"):
        make_directory(directory, 4)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "journal"
    place.touch()

    with pytest.raises(JournalError, match="not a directory"):
        read_shape(place)


def test_a_process_that_keeps_others_from_making_files_is_waited_for_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_schema, "_PATIENCE", 0.05)
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o700)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    assert lock_file(fd, exclusive=True)

    with pytest.raises(JournalError, match="locked by another process"):
        make_directory(directory, 1)

    os.close(fd)
    assert make_directory(directory, 1) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("{}", "not a journal's"),
        ("[1]", "not a journal's"),
        ('{"format":"antiphon-journal"}', "how many shards"),
        ('{"format":"antiphon-journal","shards":0}', "how many shards"),
        ('{"format":"antiphon-journal","shards":true}', "how many shards"),
        ('{"format":"antiphon-journal","shards":1000}', "how many shards"),
    ],
)
def test_a_shape_that_says_nothing_is_refused(directory: Path, text: str, reason: str) -> None:
    (directory / "journal.json").write_text(text)

    with pytest.raises(JournalError, match=reason):
        read_shape(directory)


def test_shards_without_a_shape_are_never_given_a_new_one(directory: Path) -> None:
    (directory / "journal.json").unlink()

    with pytest.raises(JournalDamaged, match="missing"):
        make_directory(directory, 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b"\0" * 4096, "not a database"), (b"text\n" * 999, "not a database")],
)
@pytest.mark.covers("FF-49")
def test_what_is_no_database_any_more_is_damaged(
    directory: Path, content: bytes, reason: str
) -> None:
    path = directory / "shard-00.db"
    path.write_bytes(content)

    for mode in ("write", "read", "look"):
        with pytest.raises(JournalDamaged, match=reason) as caught:
            connect(directory, 0, mode, "power")
        assert caught.value.file == "shard-00.db"
    make_shard(directory, 0)
    assert path.read_bytes() == content


def test_a_database_that_is_gone_is_never_made_anew(directory: Path) -> None:
    (directory / "shard-00.db").unlink()

    with pytest.raises(JournalDamaged, match="missing"):
        make_shard(directory, 0)
    assert not (directory / "shard-00.db").exists()


def test_somebody_elses_database_is_refused(directory: Path) -> None:
    path = directory / "shard-00.db"
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t(x)")
    other.commit()
    other.close()

    with pytest.raises(JournalError, match="not a journal's"):
        connect(directory, 0, "write", "power")


def test_a_newer_version_is_refused_by_name(directory: Path) -> None:
    newer = connect(directory, 0, "write", "power")
    newer.execute(f"PRAGMA user_version={VERSION + 1}")
    newer.close()

    for mode in ("write", "read", "look"):
        with pytest.raises(JournalError, match="newer version"):
            connect(directory, 0, mode, "power")


def test_an_older_version_is_brought_up_whole_or_not_at_all(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = connect(directory, 0, "write", "power")
    old.execute("INSERT INTO sessions(id, records) VALUES(?, 7)", (b"s-1",))
    old.close()
    monkeypatch.setattr("antiphon.journal._sqlite_schema.VERSION", VERSION + 1)
    add = "ALTER TABLE sessions ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0"

    monkeypatch.setitem(MIGRATIONS, VERSION + 1, (add, "UPDATE nothing SET x=1"))
    with pytest.raises(JournalError, match="nothing"):
        connect(directory, 0, "write", "power")
    monkeypatch.setitem(MIGRATIONS, VERSION + 1, (add, "UPDATE sessions SET pinned=records"))
    new = connect(directory, 0, "write", "power")

    assert new.execute("SELECT id, records, pinned FROM sessions").fetchall() == [(b"s-1", 7, 7)]
    versions = [version for (version,) in new.execute("SELECT version FROM migrations")]
    assert versions == [*range(1, VERSION + 2)]
    new.close()


def test_a_database_that_is_not_whole_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "journal"
    make_directory(directory, 4)
    migrate = _sqlite_schema._migrate
    beside: list[sqlite3.Connection] = []

    def migrate_watched(database: sqlite3.Connection, name: str) -> None:
        """As on a disk that is full by now, what is in the log cannot be brought to the file."""
        other = sqlite3.connect(directory / ".new-shard-00.db", isolation_level=None)
        beside.append(other)
        other.execute("BEGIN")
        other.execute("SELECT * FROM sqlite_schema").fetchall()
        migrate(database, name)

    with monkeypatch.context() as patch:
        patch.setattr(_sqlite_schema, "_migrate", migrate_watched)
        with pytest.raises(JournalError, match=r"shard-00\.db cannot be made"):
            make_shard(directory, 0)
    beside[0].close()

    assert sorted(path.name for path in directory.glob("*shard*")) == []
    make_shard(directory, 0)
    database = connect(directory, 0, "write", "power")
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    assert sorted(path.name for path in directory.iterdir() if path.name[0] == ".") == []


def test_a_database_is_made_as_the_format_says(directory: Path) -> None:
    database = connect(directory, 0, "write", "power")
    values = [
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "journal_mode", "auto_vacuum", "synchronous", "user_version")
    ]
    database.close()
    process = connect(directory, 0, "write", "process")
    assert process.execute("PRAGMA synchronous").fetchone() == (1,)
    process.close()

    assert values == [16384, "wal", 2, 2, VERSION]


def test_who_reads_cannot_write(directory: Path) -> None:
    for mode in ("read", "look"):
        database = connect(directory, 0, mode, "power")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database.execute("INSERT INTO garbage VALUES(1)")
        database.close()


def test_a_mark_says_what_it_was_told(directory: Path) -> None:
    mark = Mark(directory, 0, write=True)
    mark.write(2**40)
    assert mark.read() == 2**40
    mark.close()

    (directory / "shard-00.mark").write_bytes(b"")
    again = Mark(directory, 0, write=False)
    assert again.read() == 0
    again.close()
    nowhere = Mark(directory, 3, write=False)
    nowhere.write(7)
    assert nowhere.read() == 0
