"""What can still be read of a damaged shard, and what is wrong with it, by file, session and offset.

Responsible for looking through everything (`find_damages`), for reading around what cannot be read
(`scan`), and for making an index anew from its records (`rebuild`). It never writes. Leaves ordinary
reading, which stops at the first damage, to `_sqlite`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from antiphon._errors import JournalDamaged, JournalError
from antiphon.journal._record import Record
from antiphon.journal._sqlite_format import (
    LAST_OFFSET,
    Broken,
    Index,
    base,
    id_bytes,
    id_text,
    index_of,
    next_index,
    unpack_run,
    watermark,
)
from antiphon.journal._sqlite_schema import (
    Mark,
    check_shape,
    connect,
    has_log,
    refuse_missing,
    shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence
    from pathlib import Path

    from antiphon.journal._sqlite_schema import Mode

    Execute = Callable[..., sqlite3.Cursor]

__all__ = [
    "Damage",
    "Gap",
    "check_absence",
    "find_damages",
    "gap_text",
    "known_sessions",
    "number_of",
    "one_view",
    "probe",
    "rebuild",
    "scan",
    "session_of",
    "true_index",
]

#: SQLite's own check names at most so many places.
_PLACES = 20


class Damage(msgspec.Struct, frozen=True):
    """Something in a journal that is not what was written.

    Attributes:
        file: name of the file.
        session_id: the session, None where it cannot be assigned.
        offset: the first damaged record, None where it is not about one.
        reason: what is wrong, in words.
    """

    file: str
    session_id: str | None
    offset: int | None
    reason: str


class Gap(NamedTuple):
    """Records that cannot be had."""

    first: int
    last: int
    reason: str


def scan(
    execute: Execute, session_id: str, number: int, start: int = 1, stop: int = LAST_OFFSET
) -> Iterator[Record | Gap]:
    """The readable records of a session from `start` to `stop`, and the gaps between them.

    What is missing after the last record is no gap here: only the index knows of it.
    """
    due = start
    gap: Gap | None = None
    for found in _runs(execute, session_id, number, start, stop):
        offset = found.offset
        if offset < due or offset > stop:
            continue
        if offset > due:
            gap = _grown(gap, due, offset - 1, "cannot be found")
        due = offset + 1
        if isinstance(found, Broken):
            gap = _grown(gap, offset, offset, found.reason)
            continue
        if gap is not None:
            yield gap
            gap = None
        yield found
    if gap is not None:
        yield gap


def _grown(gap: Gap | None, first: int, last: int, reason: str) -> Gap:
    return Gap(first, last, reason) if gap is None else gap._replace(last=last)


def _runs(
    execute: Execute, session_id: str, number: int, start: int, stop: int
) -> Iterator[Record | Broken]:
    """What is in the rows that can be read, ascending."""
    low = base(number)
    at = _row_before(execute, low, start)
    end = low + stop
    while at < end:
        try:
            row = execute(
                "SELECT key, checks, body FROM records WHERE key > ? AND key <= ?"
                " ORDER BY key LIMIT 1",
                (at, end),
            ).fetchone()
        except sqlite3.DatabaseError as error:
            rows, at = _around(execute, at, end)
            if not rows:
                yield Broken(max(at - low, start), f"cannot be read: {error}")
                return
            for found in rows:
                yield from _of_row(session_id, low, found)
            continue
        if row is None:
            return
        if row[0] <= at:
            yield Broken(at - low + 1, "the rows are in no order")
            return
        yield from _of_row(session_id, low, row)
        at = row[0]


def _row_before(execute: Execute, low: int, start: int) -> int:
    """The key before the row in which a record is, or should be."""
    try:
        (key,) = execute(
            "SELECT max(key) FROM records WHERE key BETWEEN ? AND ?", (low + 1, low + start)
        ).fetchone()
    except sqlite3.DatabaseError:
        key = None
    return low + start - 1 if key is None else key - 1


def _around(execute: Execute, at: int, end: int) -> tuple[list[Any], int]:
    """The next rows after what cannot be read, and the key after which to go on.

    The rows have no known length, so the first one beyond is looked for in growing steps, and from
    there backwards.
    """
    step = 1
    while at + step <= end:
        try:
            row = execute(
                "SELECT key, checks, body FROM records WHERE key > ? AND key <= ?"
                " ORDER BY key LIMIT 1",
                (at + step, end),
            ).fetchone()
        except sqlite3.DatabaseError:
            step *= 2
            continue
        if row is None or row[0] <= at + step:
            break
        rows = [row]
        while True:
            try:
                before = execute(
                    "SELECT key, checks, body FROM records WHERE key > ? AND key < ?"
                    " ORDER BY key DESC LIMIT 1",
                    (at, rows[-1][0]),
                ).fetchone()
            except sqlite3.DatabaseError:
                break
            if before is None or not at < before[0] < rows[-1][0]:
                break
            rows.append(before)
        return rows[::-1], row[0]
    return [], at


def _of_row(session_id: str, low: int, row: tuple[Any, Any, Any]) -> Iterator[Record | Broken]:
    key, checks, body = row
    yield from unpack_run(session_id, key - low, checks, body)


def known_sessions(execute: Execute) -> list[tuple[int, str]]:
    """Number and id of each session that has a name which can be read.

    Names are in the table and in its index: where one cannot be read, the other may be.
    """
    found: dict[int, str] = {}
    for query in (
        "SELECT number, id FROM sessions NOT INDEXED ORDER BY number",
        "SELECT number, id FROM sessions NOT INDEXED ORDER BY number DESC",
        "SELECT number, id FROM sessions INDEXED BY sqlite_autoindex_sessions_1 ORDER BY id",
        "SELECT number, id FROM sessions INDEXED BY sqlite_autoindex_sessions_1 ORDER BY id DESC",
    ):
        try:
            for number, stored in execute(query):
                if isinstance(stored, bytes):
                    found.setdefault(number, id_text(stored))
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            continue
        break
    return sorted(found.items())


def number_of(execute: Execute, session_id: str) -> int | None:
    """The number of a session, also where the index of names cannot be read."""
    try:
        row = execute("SELECT number FROM sessions WHERE id=?", (id_bytes(session_id),)).fetchone()
        if row is None:
            check_absence(execute, "", id_bytes(session_id))
            return None
    except (sqlite3.DatabaseError, JournalDamaged):
        return {known: number for number, known in known_sessions(execute)}.get(session_id)
    return int(row[0])


def rebuild(execute: Execute, session_id: str, number: int) -> Index | Gap:
    """The index of a session from its records; the first gap where there is one."""
    index = Index()
    for found in scan(execute, session_id, number):
        if isinstance(found, Gap):
            return found
        index = next_index(index, found)
    return index


def true_index(
    execute: Execute, name: str, session_id: str, number: int, row: Sequence[Any]
) -> tuple[Index, bool]:
    """The index of a session, from its records where what is noted is spoiled.

    One that fits its checksum is believed, also where it knows of more records than there are.

    Returns:
        It, and whether it was made anew.

    Raises:
        JournalDamaged: it is spoiled, and the records are not whole either.
    """
    try:
        noted, sound = index_of(row, name, session_id)
    except JournalDamaged:
        noted, sound = Index(), False
    records = watermark(execute, number)
    if sound and noted.records >= records:
        return noted, False
    rebuilt = rebuild(execute, session_id, number)
    if isinstance(rebuilt, Gap):
        raise JournalDamaged(name, rebuilt.reason, session_id=session_id, offset=rebuilt.first)
    if rebuilt.records < noted.records:
        raise JournalDamaged(
            name, "cannot be found", session_id=session_id, offset=rebuilt.records + 1
        )
    return rebuilt, True


def session_of(execute: Execute, name: str, session_id: str) -> tuple[int, Index] | None:
    """Number and index of a session, None where there is none.

    Raises:
        JournalDamaged: what is noted of it is spoiled, or whether there is one cannot be told.
    """
    stored = id_bytes(session_id)
    row = execute(
        "SELECT number, records, created, updated, meta, title, latest, sum FROM sessions WHERE id=?",
        (stored,),
    ).fetchone()
    if row is None:
        check_absence(execute, name, stored)
        return None
    return row[0], true_index(execute, name, session_id, row[0], row[1:])[0]


_NAMES = "sessions INDEXED BY sqlite_autoindex_sessions_1"
_NEIGHBOURS = (
    f"SELECT number, id FROM {_NAMES} WHERE id < ? ORDER BY id DESC LIMIT 1",  # noqa: S608
    f"SELECT number, id FROM {_NAMES} WHERE id > ? ORDER BY id LIMIT 1",  # noqa: S608
)


def check_absence(execute: Execute, name: str, stored: bytes) -> None:
    """Raise `JournalDamaged` where a session was not found because names are spoiled.

    A search goes astray only at a name that is spoiled, and ends right beside it: so it is enough to
    compare the neighbours with the table, and a session that is new costs two look-ups.
    """
    alone = True
    for query in _NEIGHBOURS:
        row = execute(query, (stored,)).fetchone()
        if row is None:
            continue
        alone = False
        number, found = row
        there = execute("SELECT id FROM sessions NOT INDEXED WHERE number=?", (number,)).fetchone()
        if there is None or there[0] != found:
            raise JournalDamaged(name, "its names of sessions are spoiled")
    if not alone:
        return
    if execute("SELECT 1 FROM sessions NOT INDEXED LIMIT 1").fetchone() is not None:
        raise JournalDamaged(name, "its names of sessions cannot be found")
    if (
        execute("SELECT 1 FROM records LIMIT 1").fetchone() is not None
        and execute("SELECT 1 FROM garbage LIMIT 1").fetchone() is None
    ):
        raise JournalDamaged(name, "it has records, and no sessions")


def probe(
    execute: Execute, session_id: str, number: int, gap: Gap, most: int
) -> Iterator[Record | Gap]:
    """What of a gap can be had all the same, each record up to `most` looked for by its own key.

    Rows that are in no order end a look through them, and not a search.
    """
    low, due = base(number), gap.first
    lost: Gap | None = None
    while due <= min(gap.last, most):
        run = _run_around(execute, session_id, low, due)
        found = run.get(due)
        if not isinstance(found, Record):
            lost = _grown(lost, due, due, gap.reason)
            due += 1
            continue
        if lost is not None:
            yield lost
            lost = None
        while due <= gap.last and isinstance(found, Record):
            yield found
            due += 1
            found = run.get(due)
    if due <= gap.last:
        lost = _grown(lost, due, gap.last, gap.reason)
    if lost is not None:
        yield lost


def _run_around(
    execute: Execute, session_id: str, low: int, offset: int
) -> dict[int, Record | Broken]:
    """The run in which a record is, by two searches: each goes astray at other places."""
    columns = "SELECT key, checks, body FROM records WHERE key BETWEEN"
    before = "coalesce((SELECT max(key) FROM records WHERE key BETWEEN ? AND ?), ?)"
    first, last = low + 1, low + offset
    for query, keys in (
        (f"{columns} ? AND ? ORDER BY key DESC LIMIT 1", (first, last)),
        (f"{columns} {before} AND ? ORDER BY key LIMIT 64", (first, last, last, last)),
    ):
        try:
            rows = execute(query, keys).fetchall()
        except sqlite3.DatabaseError:
            continue
        run = {found.offset: found for row in rows for found in _of_row(session_id, low, row)}
        if isinstance(run.get(offset), Record):
            return run
    return {}


def find_damages(
    directory: Path,
    shard: int,
    mode: Mode,
    sessions: Collection[str] | None,
    stopped: Callable[[], bool],
) -> list[Damage]:
    """Everything that is wrong with a shard, or with these sessions of it."""
    name = shard_name(shard)
    found: list[Damage] = []

    def damage(reason: str, session_id: str | None = None, offset: int | None = None) -> None:
        found.append(Damage(name, session_id, offset, reason))

    mark = Mark(directory, shard, write=False)
    acknowledged = mark.read()
    mark.close()
    try:
        if not (directory / name).exists():
            refuse_missing(directory, shard)
            return found
        database = connect(directory, shard, mode, "power")
    except JournalDamaged as error:
        # The name is in the error's text, and beside the reason.
        damage(str(error).removeprefix(f"{name}: "))
        return found
    except JournalError as error:
        damage(error.reason)
        return found
    try:
        _check_header(directory / name, damage)
        try:
            check_shape(database, name)
        except JournalDamaged as error:
            damage(error.reason)
        except (sqlite3.DatabaseError, sqlite3.Warning) as error:
            damage(f"its tables are not declared as they were: {error}")
        _check_file(database.execute, acknowledged, damage)
        known = known_sessions(database.execute)
        for number, session_id in known:
            if stopped():
                break
            if sessions is None or session_id in sessions:
                _check_session(database, number, session_id, damage)
        if sessions is None:
            _check_nobodys(database.execute, {number for number, _ in known}, damage)
    finally:
        database.close()
    return found


#: All that is asked of the tables somewhere, so that a name that is spoiled shows.
_SHAPES = (
    """SELECT number, id, generation, owner, records, created, updated, meta, title, latest, sum
        FROM sessions LIMIT 0""",
    "SELECT key, checks, body FROM records LIMIT 0",
    "SELECT number FROM garbage LIMIT 0",
    "SELECT at, acknowledged, found FROM losses LIMIT 0",
    "SELECT key, value FROM meta LIMIT 0",
)


#: `quick_check` does not compare an index with its table.
_NAMELESS = """SELECT id FROM sessions AS there NOT INDEXED WHERE NOT EXISTS (
    SELECT 1 FROM sessions AS named INDEXED BY sqlite_autoindex_sessions_1
    WHERE named.id = there.id AND named.number = there.number)"""


def _check_header(path: Path, damage: Callable[[str], None]) -> None:
    """Compare a file with what its first page says of it, where no log knows better."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            header = file.read(100)
        # In this order: a log that is folded meanwhile is there still, or all of it is in the file.
        if len(header) < 100 or has_log(path):
            return
        if header[18:20] != b"\2\2":
            damage("its header says that it has no write-ahead log: nothing can be written to it")
        size = path.stat().st_size
        (page,), (counter, pages) = unpack(">H", header[16:18]), unpack(">II", header[24:32])
        page = 65_536 if page == 1 else page
        # As in SQLite's own reading: the number holds if the same change noted it.
        if header[92:96] == header[24:28] and counter and page and size < page * pages:
            damage(f"it was cut: {size // page:,} of {pages:,} pages are there")


def _check_file(execute: Execute, acknowledged: int, damage: Callable[..., None]) -> None:
    try:
        for (text,) in execute(f"PRAGMA quick_check({_PLACES})"):
            if text != "ok":
                damage(f"the database: {text}")
        for query in _SHAPES:
            execute(query).fetchall()
        for (stored,) in execute(_NAMELESS):
            damage("it cannot be found by its name", id_text(bytes(stored)))
        for (number,) in execute("SELECT number FROM garbage JOIN sessions USING(number)"):
            damage(f"it has a session as deleted that is there ({number})")
    except (sqlite3.DatabaseError, TypeError, UnicodeDecodeError) as error:
        damage(f"the database: {error}")
    try:
        (commits,) = execute("SELECT value FROM meta WHERE key='commits'").fetchone()
        if commits < acknowledged:
            damage(f"{acknowledged - commits} acknowledged commits are missing at its end")
        for at, known, seen in execute("SELECT at, acknowledged, found FROM losses ORDER BY at"):
            damage(f"{known - seen} acknowledged commits were missing at its end at {at}")
    except (sqlite3.DatabaseError, TypeError) as error:
        damage(f"its counters cannot be read: {error}")


def _check_session(
    database: sqlite3.Connection, number: int, session_id: str, damage: Callable[..., None]
) -> None:
    told = False

    def tell(reason: str, offset: int | None = None) -> None:
        nonlocal told
        told = True
        damage(reason, session_id, offset)

    try:
        # One view: a living writer goes on meanwhile.
        with one_view(database):
            noted, sound = _noted(database.execute, number, session_id, tell)
            if noted is _GONE:
                return
            index, whole = Index(), True
            for found in scan(database.execute, session_id, number):
                if isinstance(found, Gap):
                    whole = False
                    tell(gap_text(found), found.first)
                else:
                    index = next_index(index, found)
            if noted is not None:
                _compare(noted, index, whole=whole, tell=tell)
            if not sound and not told:
                tell("its index does not fit its checksum")
    except sqlite3.DatabaseError as error:
        tell(str(error))


@contextlib.contextmanager
def one_view(database: sqlite3.Connection) -> Generator[None]:
    """All that is read within it is of one moment."""
    database.execute("BEGIN")
    try:
        yield
    finally:
        # A statement that met damage may not let a transaction end well; there is nothing to keep.
        with contextlib.suppress(sqlite3.DatabaseError):
            database.execute("ROLLBACK")


#: A session that was deleted since its name was read.
_GONE = Index(records=-1)


def _noted(
    execute: Execute, number: int, session_id: str, tell: Callable[..., None]
) -> tuple[Index | None, bool]:
    try:
        row = execute(
            "SELECT records, created, updated, meta, title, latest, sum FROM sessions WHERE number=?",
            (number,),
        ).fetchone()
        return (_GONE, True) if row is None else index_of(row, "", session_id)
    except JournalDamaged:
        tell("its index cannot be read")
    except sqlite3.DatabaseError as error:
        tell(f"its index cannot be read: {error}")
    return None, False


def gap_text(gap: Gap) -> str:
    """What is wrong with a gap, in words."""
    return (
        gap.reason if gap.first == gap.last else f"{gap.reason} (records {gap.first} to {gap.last})"
    )


def _compare(noted: Index, index: Index, *, whole: bool, tell: Callable[..., None]) -> None:
    if noted.records > index.records:
        last = Gap(index.records + 1, noted.records, "cannot be found")
        tell(gap_text(last), last.first)
    elif noted.records < index.records:
        tell(f"its index knows {noted.records} of {index.records} records")
    if not whole or noted.records != index.records:
        return  # what is derived from lost records cannot be compared
    for field in ("created", "updated", "meta", "title", "latest"):
        if getattr(noted, field) != getattr(index, field):
            tell(f"its index has another {field} than its records")


def _check_nobodys(execute: Execute, known: set[int], damage: Callable[..., None]) -> None:
    """Records of sessions that have no name any more, and were not deleted."""
    try:
        deleted = {number for (number,) in execute("SELECT number FROM garbage")}
        at = 0
        while True:
            row = execute(
                "SELECT key FROM records WHERE key > ? ORDER BY key LIMIT 1", (at,)
            ).fetchone()
            if row is None or row[0] <= at:
                return
            number = row[0] >> 40
            if number not in known and number not in deleted:
                again = execute("SELECT 1 FROM sessions WHERE number=?", (number,)).fetchone()
                if again is None:
                    damage(f"{watermark(execute, number)} records belong to no session ({number})")
            at = base(number) + LAST_OFFSET
    except sqlite3.DatabaseError as error:
        damage(f"not all records can be looked at: {error}")
