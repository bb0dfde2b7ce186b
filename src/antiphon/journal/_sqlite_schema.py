"""The directory of a SQLite journal: its files, their modes, the tables in them and their versions.

Responsible for making and opening files safely, for migrations, and for telling what a file is when it
is not what it should be. Leaves what is in the tables to `_sqlite_format` and `_sqlite_thread`.

    journal.json          {"format": "antiphon-journal", "shards": 8}
    lock                  locked while a file is being made
    shard-00.db           one SQLite database for each shard that was ever written (and -wal, -shm)
    shard-00.mark         how many commits of it were acknowledged
    owners/4711-…         locked by a process that may write

A file gets its name when it is complete, so a file that is empty or no database was damaged, and is
never made anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import sys
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon._errors import JournalDamaged, JournalError
from antiphon.journal._sqlite_owners import lock_file, private_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

__all__ = [
    "VERSION",
    "Loss",
    "Mark",
    "Mode",
    "check_shape",
    "connect",
    "explain",
    "has_log",
    "make_directory",
    "make_shard",
    "read_shape",
    "shard_name",
]

log = logging.getLogger("antiphon.journal")

#: "write" for the one writer of a shard, "read" for readers beside it, "look" for who must not write.
Mode = Literal["write", "read", "look"]
Durability = Literal["power", "process"]

APPLICATION_ID = 0x414E544A  # "ANTJ"
_PAGE = 16384
_FORMAT = "antiphon-journal"
_SHAPE = "journal.json"
_LOCK = "lock"
#: Seconds that a process waits for another that makes files; one that was stopped keeps the lock.
_PATIENCE = 10.0
OWNERS = "owners"
MAX_SHARDS = 64

#: What leads to each version from the one before. Version 0 is an empty file.
MIGRATIONS: dict[int, Sequence[str]] = {
    1: (
        "CREATE TABLE migrations(version INTEGER PRIMARY KEY, at INTEGER NOT NULL)",
        "CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "INSERT INTO meta VALUES('commits', 0)",
        # Numbers are never used twice: a key that somebody remembers is never another session's.
        """CREATE TABLE sessions(
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id BLOB NOT NULL UNIQUE,
            generation INTEGER NOT NULL DEFAULT 0,
            owner TEXT,
            records INTEGER NOT NULL DEFAULT 0,
            created INTEGER NOT NULL DEFAULT 0,
            updated INTEGER NOT NULL DEFAULT 0,
            meta TEXT,
            title TEXT,
            latest TEXT NOT NULL DEFAULT '{}',
            sum INTEGER NOT NULL DEFAULT 0)""",
        "CREATE TABLE records(key INTEGER PRIMARY KEY, checks BLOB NOT NULL, body BLOB NOT NULL)",
        "CREATE TABLE garbage(number INTEGER PRIMARY KEY)",
        """CREATE TABLE losses(
            at INTEGER NOT NULL, acknowledged INTEGER NOT NULL, found INTEGER NOT NULL)""",
    ),
}
VERSION = max(MIGRATIONS)


class Loss(msgspec.Struct, frozen=True):
    """Commits that were acknowledged, and that a file does not have any more.

    Attributes:
        file: name of the file.
        commits: how many are missing at its end, at least.
    """

    file: str
    commits: int


def shard_name(shard: int) -> str:
    """The name of a shard's file."""
    return f"shard-{shard:02d}.db"


def check_directory(directory: Path, *, write: bool) -> None:
    """Refuse a directory whose files others can change or put in place."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise JournalError(f"{directory} is not a directory")
    if sys.platform == "win32":
        return
    if status.st_mode & 0o022:
        raise JournalError(
            f"others can write to {directory} (mode {stat.S_IMODE(status.st_mode):04o}):"
            f" a journal in it could be changed by them"
        )
    if write and os.geteuid() not in {0, status.st_uid} and status.st_uid != 0:
        raise JournalError(f"{directory} belongs to another user")


def _private_directory(path: Path) -> None:
    """Make it for its user alone, and its missing parents as the system makes directories."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        if sys.platform != "win32":
            path.chmod(0o700)  # a umask can only have taken bits away, from us too


def read_shape(directory: Path, *, write: bool = False) -> int | None:
    """How many shards a journal has, None where there is no journal."""
    try:
        check_directory(directory, write=write)
        text = (directory / _SHAPE).read_bytes()
    except FileNotFoundError:
        _refuse_remains(directory)
        return None
    except OSError as error:
        raise JournalError(f"{directory}: {error.strerror}") from error
    try:
        shape = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise JournalDamaged(_SHAPE, "it is not JSON") from None
    match shape:
        case {"format": "antiphon-journal", "shards": int(shards)} if (
            shards is not True and 1 <= shards <= MAX_SHARDS
        ):
            return shards
        case {"format": "antiphon-journal"}:
            raise JournalDamaged(_SHAPE, "it does not say how many shards there are")
        case _:
            raise JournalError(f"{directory / _SHAPE} is not a journal's")


def _refuse_remains(directory: Path) -> None:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    # Shards are made after it: one that was made since this looked for it is not missing.
    if any(name.startswith("shard-") for name in names) and not (directory / _SHAPE).exists():
        raise JournalDamaged(_SHAPE, "it is missing, and sessions are there")


def make_directory(directory: Path, shards: int) -> int:
    """Make what is missing of the directory; returns how many shards the journal has."""
    try:
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            _private_directory(directory)
        found = read_shape(directory, write=True)
        if found is None:
            with _locked(directory):
                found = read_shape(directory, write=True)
                if found is None:
                    text = msgspec.json.encode({"format": _FORMAT, "shards": shards}) + b"\n"
                    _place(directory, _SHAPE, lambda fd: _write_all(fd, text))
                    found = shards
        _private_directory(directory / OWNERS)
        writable = os.access(directory, os.W_OK)
    except FileExistsError as error:  # a parent is a file
        raise JournalError(f"{error.filename or directory} is not a directory") from error
    except OSError as error:
        raise JournalError(f"{directory}: {error.strerror or error}") from error
    if not writable:
        raise JournalError(f"{directory} cannot be written to")
    return found


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None]:
    """One process at a time makes files here."""
    path = directory / _LOCK
    try:
        fd = private_file(path)
    except FileExistsError:
        fd = os.open(path, os.O_RDWR)
    try:
        end = time.monotonic() + _PATIENCE
        while not lock_file(fd, exclusive=True):
            if time.monotonic() >= end:
                raise JournalError(f"{path} is kept locked by another process")
            time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _place(directory: Path, name: str, fill: Callable[[int], None]) -> None:
    """Make a file that has its name only when it is complete and on the disk."""
    new = directory / f".new-{name}"
    new.unlink(missing_ok=True)  # of a process that ended half-way; we hold the lock
    fd = private_file(new)
    try:
        fill(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    new.rename(directory / name)
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    if sys.platform == "win32":
        return
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_shard(directory: Path, shard: int) -> None:
    """Make a shard's database if there never was one.

    Raises:
        JournalDamaged: there was one and it is gone.
        JournalError: it cannot be made.
    """
    name = shard_name(shard)
    path = directory / name
    try:
        if path.exists():
            return
        with _locked(directory):
            if path.exists():
                return
            refuse_missing(directory, shard)
            _make_database(directory, name)
            # After the database: only then is a mark without one a sign that it is gone.
            _place(directory, mark_name(name), lambda fd: _write_all(fd, _mark_text(0)))
    except OSError as error:
        raise JournalError(f"{name} cannot be made: {error.strerror or error}") from error
    except sqlite3.Error as error:
        raise explain(error, name) from error


def refuse_missing(directory: Path, shard: int) -> None:
    """Raise `JournalDamaged` where a shard's database is not there, but was."""
    name = shard_name(shard)
    for trace in (mark_name(name), f"{name}-wal"):
        if (directory / trace).exists() and not (directory / name).exists():
            raise JournalDamaged(name, "it is missing, and was there")


def _make_database(directory: Path, name: str) -> None:
    new = directory / f".new-{name}"
    files = (new, *(new.with_name(new.name + end) for end in ("-journal", "-wal", "-shm")))
    for leftover in files:
        leftover.unlink(missing_ok=True)
    try:
        _fill_database(new, name)
    except BaseException:
        for unfinished in files:  # the disk may be full, and not because of them
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        raise
    new.rename(directory / name)
    _sync_directory(directory)


def _fill_database(new: Path, name: str) -> None:
    os.close(private_file(new))
    database = sqlite3.connect(f"{new.as_uri()}?mode=rw", uri=True, isolation_level=None)
    try:
        database.execute(f"PRAGMA page_size={_PAGE}")
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")
        database.execute("PRAGMA synchronous=FULL")
        # The mode is a property of the file. Set first, and the tables would be in a log that is
        # left under the new name; a file that is closed again has none.
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        _migrate(database, name)
        # Closing would do that too, and say nothing where the disk is full: what is left in the log
        # does not go along to the new name.
        (busy, _, _) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise JournalError(f"{name} cannot be made: another process looks at it")
    finally:
        database.close()


def connect(directory: Path, shard: int, mode: Mode, durability: Durability) -> sqlite3.Connection:
    """Open a shard's database, which exists.

    Raises:
        JournalDamaged: it is not a database, or empty.
        JournalError: it cannot be opened, or a newer version wrote it.
    """
    name = shard_name(shard)
    path = directory / name
    try:
        status = path.stat()
    except FileNotFoundError:
        raise JournalDamaged(name, "it is missing") from None
    except OSError as error:
        raise JournalError(f"{name}: {error.strerror}") from error
    if status.st_size == 0:
        raise JournalDamaged(name, "it is empty")
    if mode == "look":
        return _look(path, durability, immutable=not has_log(path))
    return _open(path, "mode=rw", mode, durability)


def _look(path: Path, durability: Durability, *, immutable: bool) -> sqlite3.Connection:
    """Open for one who must not write.

    Beside a log SQLite needs the log's index, which it shares with a living writer and makes where it
    may. Without one nothing is to be shared: the file alone is read, and nothing beside it is made.
    """
    if immutable:
        return _open(path, "mode=ro&immutable=1", "look", durability)
    try:
        return _open(path, "mode=ro", "look", durability)
    except JournalDamaged:
        raise
    except JournalError as error:
        cause = error.__cause__
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CANTOPEN:
            raise
        log.warning(
            "%s: its log cannot be read, so what is newest is left out: %s", path.name, cause
        )
        return _open(path, "mode=ro&immutable=1", "look", durability)


def _open(path: Path, options: str, mode: Mode, durability: Durability) -> sqlite3.Connection:
    name = path.name
    database: sqlite3.Connection | None = None
    try:
        database = sqlite3.connect(
            f"{path.as_uri()}?{options}", uri=True, isolation_level=None, timeout=_BUSY_OPEN
        )
        _set_up(database, mode, durability)
        _check_version(database, name, mode)
    except sqlite3.Error as error:
        if database is not None:
            database.close()
        raise explain(error, name) from error
    except BaseException:
        if database is not None:
            database.close()
        raise
    return database


#: Seconds that reading may wait for another process that makes the log anew.
_BUSY_OPEN = 10.0


def has_log(path: Path) -> bool:
    """Whether a log is beside a database, so that what is in the file alone is not all."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


def _set_up(database: sqlite3.Connection, mode: Mode, durability: Durability) -> None:
    execute = database.execute
    execute("PRAGMA trusted_schema=OFF")
    execute("PRAGMA cell_size_check=ON")
    execute("PRAGMA temp_store=MEMORY")
    if mode != "write":
        execute("PRAGMA query_only=ON")
        # A file that was cut says that it is longer, and SQLite reads nothing of it; with this it reads
        # the pages that are there, and names each that is not. Nothing can be written all the same.
        execute("PRAGMA writable_schema=ON")
        return
    execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
    if durability == "power":  # macOS: a flush that reaches the disk itself
        execute("PRAGMA fullfsync=ON")
        execute("PRAGMA checkpoint_fullfsync=ON")
    execute("PRAGMA secure_delete=ON")
    execute("PRAGMA wal_autocheckpoint=0")  # done after those who wait were told
    # A log that begins anew is cut to this, so that its size says how much there is to fold.
    execute(f"PRAGMA journal_size_limit={1 << 20}")


def _check_version(database: sqlite3.Connection, name: str, mode: Mode) -> None:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version < 1:
        raise JournalDamaged(name, "it is a database, but not a journal's")
    if version > VERSION:
        raise JournalError(
            f"{name} was written by a newer version (format {version}, known here: {VERSION})"
        )
    if version < VERSION and mode == "write":
        _migrate(database, name)


def _migrate(database: sqlite3.Connection, name: str) -> None:
    """Bring a database to the newest version: all steps, or none."""
    database.execute("BEGIN IMMEDIATE")
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        for step in range(version + 1, VERSION + 1):
            for statement in MIGRATIONS[step]:
                database.execute(statement)
            database.execute("INSERT INTO migrations VALUES(?, ?)", (step, now()))
            database.execute(f"PRAGMA user_version={step}")
            if version:
                log.info("%s was brought to format %d", name, step)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def check_shape(database: sqlite3.Connection, name: str) -> None:
    """Raise `JournalDamaged` where a database's tables are not declared as they were made.

    Who only reads has SQLite make nothing of that; who writes is refused by it.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        made.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for step in range(1, min(version, VERSION) + 1):
            for statement in MIGRATIONS[step]:
                made.execute(statement)
        there, due = (
            set(each.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall())
            for each in (database, made)
        )
    for declared in due ^ there:
        raise JournalDamaged(name, f"its {declared[0]} {declared[1]} is not declared as it was")


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def explain(error: sqlite3.Error, name: str) -> JournalError:
    """What an error of SQLite means for a file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    match code:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return JournalDamaged(name, str(error))
        case sqlite3.SQLITE_ERROR:  # what is asked is always right, so what it is asked of is not
            return JournalDamaged(name, f"it is not as it was made: {error}")
        case 0 if str(error).startswith("Could not decode"):  # the module's own, for text
            return JournalDamaged(name, str(error))
        case sqlite3.SQLITE_FULL:
            return JournalError(f"no space left for {name}")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JournalError(f"{name} is kept locked by another process")
        case _:
            return JournalError(f"{name}: {error}")


def mark_name(name: str) -> str:
    """The name of a database's mark."""
    return f"{name.removesuffix('.db')}.mark"


def _mark_text(commits: int) -> bytes:
    return b"%016x\n" % commits


class Mark:
    """How many commits of a shard were acknowledged, beside the database.

    It is written after a commit and before anybody is told of it, and never flushed: it outlives the
    process, and after a loss of power it may be older than the database but, with
    `durability="power"`, not newer. So a database with fewer commits has lost what somebody saw.
    """

    def __init__(self, directory: Path, shard: int, *, write: bool) -> None:
        """Open it; one that is missing says nothing, and is made where it may be."""
        self._name = mark_name(shard_name(shard))
        path = directory / self._name
        binary = getattr(os, "O_BINARY", 0)
        self._fd = -1
        try:
            if write:
                try:
                    self._fd = os.open(path, os.O_RDWR | binary)
                except FileNotFoundError:
                    self._fd = private_file(path)
            else:
                self._fd = os.open(path, os.O_RDONLY | binary)
        except OSError as error:
            log.info("%s cannot be used: %s", self._name, error)

    def read(self) -> int:
        """What it says, 0 where it says nothing."""
        if self._fd < 0:
            return 0
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)
            return int(os.read(self._fd, 17), 16)
        except (OSError, ValueError):
            return 0

    def write(self, commits: int) -> None:
        """Say so many. What cannot be written leaves an older number, which says less."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, _mark_text(commits))

    def close(self) -> None:
        """Let go of it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
