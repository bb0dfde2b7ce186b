"""How a run of records is one row: text for people and other languages, a checksum for each record.

Responsible for the bytes of a row and for what is derived from records (`Index`). Leaves tables and
files to `_sqlite_schema`, transactions to `_sqlite_thread`.

A row of `records` holds a run of consecutive records of one session: `key` is the session's number
times 2**40 plus the first offset, `body` one JSON text a line, `checks` the CRC-32 of the session's id
and each line, as little-endian 32-bit numbers: so a row that got under another key fits nowhere. A line is

    {"offset":9,"kind":"session_update","taint":"agent","ts":1784290000123,"payload":{…}}

with the payload always last. A later version may put further members before it; what reads a line
passes over those, and nothing here ever rewrites one (decision note 0022).
"""

from __future__ import annotations

import json
from collections import deque
from itertools import repeat
from struct import pack, unpack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

import msgspec

from antiphon._errors import JournalDamaged, JournalError
from antiphon.journal._record import SESSION_CREATED, SESSION_UPDATE, Record, tag_of_update
from antiphon.journal._store import title_after
from antiphon.schema import encode

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from antiphon.journal._record import Entry

__all__ = [
    "LAST_OFFSET",
    "STATE_TAGS",
    "Broken",
    "Index",
    "Row",
    "base",
    "id_bytes",
    "id_text",
    "index_columns",
    "index_of",
    "next_index",
    "pack_runs",
    "unpack_plain",
    "unpack_run",
    "watermark",
]

#: Offsets have 40 bits of a key, session numbers the 23 above them.
_SHIFT = 40
LAST_OFFSET = (1 << _SHIFT) - 1
LAST_SESSION = (1 << 23) - 1

#: A run is no longer than this, so that one damaged row, or reading one record, is a bounded matter.
#: A single record that is larger is a run of its own.
RUN_RECORDS = 256
RUN_BYTES = 256 * 1024
#: SQLite's own bound for one value is 1,000,000,000 bytes unless it was built with another.
RECORD_BYTES = 900_000_000

#: The tags whose newest record can be found without looking through a session.
STATE_TAGS = frozenset(
    (
        "session_created",
        "turn_started",
        "turn_completed",
        "current_mode_update",
        "config_option_update",
        "session_info_update",
        "available_commands_update",
        "usage_update",
    )
)
_TITLED = "session_info_update"


class Row(NamedTuple):
    """One row of `records`."""

    key: int
    checks: bytes
    body: bytes


class Broken(NamedTuple):
    """A record that is not what was written, and why that is known."""

    offset: int
    reason: str


class Index(msgspec.Struct, frozen=True):
    """What is derived from a session's records, so that nobody has to look through them.

    Attributes:
        records: the last offset.
        created: the time of the first record.
        updated: the time of the last.
        meta: the payload of the first `session_created`, as text.
        title: as last told.
        latest: the newest offset of each of `STATE_TAGS` that has one.
    """

    records: int = 0
    created: int = 0
    updated: int = 0
    meta: str | None = None
    title: str | None = None
    latest: dict[str, int] = {}


class _Tagged(msgspec.Struct, rename="camel", gc=False):
    session_update: str = ""


class _Plain(msgspec.Struct, rename="camel", gc=False):
    """An update that is no state; most are. Decoding one of those fails."""

    session_update: Literal[
        "agent_message_chunk",
        "agent_thought_chunk",
        "plan",
        "tool_call",
        "tool_call_update",
        "user_message_chunk",
    ]


class _Head(msgspec.Struct, gc=False):
    offset: int
    kind: str
    taint: str
    ts: int


_decode_tagged = msgspec.json.Decoder(_Tagged).decode
_decode_plain = msgspec.json.Decoder(_Plain).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_PAYLOAD = b',"payload":'
_LF, _CR = b"\n\r"

#: What comes between the offset and the time: there are few pairs of kind and taint.
_middles: dict[tuple[str, str], tuple[bytes, str, str]] = {}
_MIDDLES = 256

#: Fewer than this are packed one by one.
_FEW = 12
#: What a line has before its kind, at most.
_OFFSET_BYTES = 32
#: How offsets end: writing each of them anew costs as much as all else in a line.
_digits = [b"%03d" % number for number in range(1000)]


def base(number: int) -> int:
    """The key before all keys of a session."""
    return number << _SHIFT


def id_bytes(session_id: str) -> bytes:
    """How a session's id is stored: UTF-8, and half characters as they are."""
    return session_id.encode("utf-8", "surrogatepass")


def id_text(stored: bytes) -> str:
    """The id that was stored."""
    return stored.decode("utf-8", "surrogatepass")


def _middle_of(kind: str, taint: str) -> tuple[bytes, str, str]:
    return _middles.get((kind, taint)) or _middle(kind, taint)


def _middle(kind: str, taint: str) -> tuple[bytes, str, str]:
    if len(_middles) >= _MIDDLES:  # both are open sets, and a peer may name the kind
        _middles.clear()
    kind_text, taint_text = encode(kind), encode(taint)
    # Decoded again, so that a record is the same when it is appended and when it is read: text that
    # cannot be written is mended on the way.
    found = (
        b'"kind":%b,"taint":%b,"ts":' % (kind_text, taint_text),
        msgspec.json.decode(kind_text, type=str),
        msgspec.json.decode(taint_text, type=str),
    )
    _middles[kind, taint] = found
    return found


def _tag_of(payload: bytes) -> str:
    """The tag of an update's payload; raises `JournalError` for what is no JSON object.

    A row is for ever, so what could not be read again is refused here.
    """
    try:
        if not payload.isascii():
            payload.decode()
        return _decode_tagged(payload).session_update
    except UnicodeDecodeError as error:
        raise JournalError(f"a payload is not UTF-8: {error}") from None
    except RecursionError:
        return ""  # deeper than we can look; it is kept as it is
    except msgspec.DecodeError:
        _check_odd(payload)
        return tag_of_update(payload)


def _check_odd(payload: bytes) -> None:
    """For what the strict decoder refuses: a tag that is no text, escapes of half a character."""
    try:
        value: Any = json.loads(payload)
    except RecursionError:
        return
    except ValueError as error:
        raise JournalError(f"a payload is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JournalError(f"a payload is a JSON {type(value).__name__}, not an object")


def pack_runs(
    session_id: str, number: int, index: Index, entries: Sequence[Entry], ts: int
) -> tuple[list[Row], list[Record], Index]:
    """The rows and the records of entries that follow `index`, and the index after them.

    Raises:
        JournalError: a payload is not a JSON object, or too large.
    """
    if index.records + len(entries) > LAST_OFFSET:
        raise JournalError("a session has as many records as the store can number")
    packing = _Packing(session_id, number, index, ts)
    for at in range(0, len(entries), RUN_RECORDS):
        run = entries[at : at + RUN_RECORDS]
        if len(run) < _FEW or not packing.plain(run):
            packing.each(run)
    return packing.rows, packing.records, packing.index()


class _Packing:
    """Rows in the making."""

    __slots__ = (
        "_before",
        "_latest",
        "_meta",
        "_offset",
        "_seed",
        "_session_id",
        "_start",
        "_title",
        "_ts",
        "records",
        "rows",
    )

    def __init__(self, session_id: str, number: int, index: Index, ts: int) -> None:
        self._session_id = session_id
        self._start = base(number)
        self._seed = crc32(id_bytes(session_id))
        self._ts = ts
        self._before = index
        self._offset = index.records
        self._latest: dict[str, int] | None = None
        self._meta = index.meta
        self._title = index.title
        self.rows: list[Row] = []
        self.records: list[Record] = []

    def index(self) -> Index:
        """The index after all that was packed."""
        before, ts = self._before, self._ts
        return Index(
            self._offset,
            before.created if before.records else ts,
            ts,
            self._meta,
            self._title,
            before.latest if self._latest is None else self._latest,
        )

    def plain(self, run: Sequence[Entry]) -> bool:
        """Pack a run of updates that are no states, all at once; False where it is none.

        What `each` does, with no step of Python for a record: streams of text are that.
        """
        count = len(run)
        taints = [entry.taint for entry in run]
        taint = taints[0]
        if [entry.kind for entry in run].count(SESSION_UPDATE) != count or taints.count(
            taint
        ) != count:
            return False
        middle, kind, taint = _middle_of(SESSION_UPDATE, taint)
        first, ts = self._offset + 1, self._ts
        middle = b',%b%d,"payload":' % (middle, ts)
        payloads = [entry.payload for entry in run]
        text = b"".join(payloads)
        size = len(text) + count * (len(middle) + _OFFSET_BYTES)
        if size > RUN_BYTES or _LF in text or _CR in text:
            return False
        try:
            if not text.isascii():
                text.decode()
            deque(map(_decode_plain, payloads), 0)
        except (ValueError, RecursionError):
            return False
        lines = _lines(first, middle, payloads)
        self.rows.append(_row(self._start + first, lines, map(crc32, lines, repeat(self._seed))))
        self.records += _records(first, self._session_id, kind, payloads, taint, ts)
        self._offset += count
        return True

    def each(self, run: Sequence[Entry]) -> None:
        """Pack any run, each record by itself."""
        session_id, start, seed, ts = self._session_id, self._start, self._seed, self._ts
        offset, records = self._offset, self.records
        lines: list[bytes] = []
        sums: list[int] = []
        size = 0
        stamp = b"%d" % ts
        decode = _decode_tagged
        for entry in run:
            payload = entry.payload
            kind = entry.kind
            try:
                if not payload.isascii():
                    payload.decode()
                tag = decode(payload).session_update
            except (ValueError, RecursionError):  # what is wrong, or odd, is looked at more closely
                tag = _tag_of(payload)
            if kind != SESSION_UPDATE:
                tag = kind
            elif tag in STATE_TAGS:
                tag = tag_of_update(payload)
            if _LF in payload or _CR in payload:
                # Outside of strings, where JSON allows no raw line end, one is only space.
                payload = payload.replace(b"\n", b" ").replace(b"\r", b" ")
            offset += 1
            middle, kind, taint = _middles.get((kind, entry.taint)) or _middle(kind, entry.taint)
            line = b'{"offset":%d,%b%b,"payload":%b}' % (offset, middle, stamp, payload)
            length = len(line)
            if lines and size + length > RUN_BYTES:
                self.rows.append(_row(start + offset - len(lines), lines, sums))
                lines, sums, size = [], [], 0
            if length > RECORD_BYTES:
                raise JournalError(f"a record of {length} bytes is more than the store can hold")
            lines.append(line)
            sums.append(crc32(line, seed))
            size += length
            records.append(Record(offset, session_id, kind, payload, taint, ts))
            if tag in STATE_TAGS:
                self._note(tag, offset, payload)
        self.rows.append(_row(start + offset + 1 - len(lines), lines, sums))
        self._offset = offset

    def _note(self, tag: str, offset: int, payload: bytes) -> None:
        if self._latest is None:
            self._latest = dict(self._before.latest)
        self._latest[tag] = offset
        if tag == SESSION_CREATED and self._meta is None:
            self._meta = payload.decode()
        elif tag == _TITLED:
            self._title = title_after(self._title, payload)


def _lines(first: int, middle: bytes, payloads: Sequence[bytes]) -> list[bytes]:
    """The lines of records that differ in offset and payload alone."""
    end = first + len(payloads)
    thousand, rest = divmod(first, 1000)
    if thousand and rest + len(payloads) <= 1000:
        head, digits = b'{"offset":%d' % thousand, _digits[rest : rest + len(payloads)]
    else:
        head, digits = b'{"offset":', [b"%d" % offset for offset in range(first, end)]
    return list(map(b"".join, zip(repeat(head), digits, repeat(middle), payloads, repeat(b"}"))))


def _records(
    first: int, session_id: str, kind: str, payloads: Sequence[bytes], taint: str, ts: int
) -> Iterator[Record]:
    numbers = range(first, first + len(payloads))
    return map(
        Record, numbers, repeat(session_id), repeat(kind), payloads, repeat(taint), repeat(ts)
    )


def _row(key: int, lines: list[bytes], sums: Iterable[int]) -> Row:
    return Row(key, pack(f"<{len(lines)}I", *sums), b"\n".join(lines))


def next_index(index: Index, record: Record) -> Index:
    """The index after one more record; what `pack_runs` does for many at once."""
    tag = _tag_of(record.payload) if record.kind == SESSION_UPDATE else record.kind
    if tag in STATE_TAGS:
        tag = record.tag
    meta, title, latest = index.meta, index.title, index.latest
    if tag in STATE_TAGS:
        latest = {**latest, tag: record.offset}
        if tag == SESSION_CREATED and meta is None:
            meta = record.payload.decode()
        elif tag == _TITLED:
            title = title_after(title, record.payload)
    created = index.created if index.records else record.ts
    return Index(record.offset, created, record.ts, meta, title, latest)


def unpack_run(
    session_id: str, first: int, checks: Any, body: Any, start: int = 0
) -> Iterator[Record | Broken]:
    """Each record of a row, or what is wrong with it; those before `start` need not be among them."""
    if not isinstance(checks, bytes) or not isinstance(body, bytes):
        yield Broken(first, "its row cannot be read")  # spoiled so that it is of another type
        return
    start = max(start, first)
    plain = unpack_plain(session_id, first, checks, body, start, LAST_OFFSET)
    if plain is not None:
        yield from plain
        return
    seed = crc32(id_bytes(session_id))
    lines = body.split(b"\n")
    if len(checks) != 4 * len(lines):
        # Lines are found by their line ends, so a changed byte can make two of one. The checksums
        # then say how many there were; each line that fits is where it should be, or not at all.
        yield from _unpack_odd(session_id, first, checks, lines, seed)
        return
    sums = unpack(f"<{len(lines)}I", checks)
    for at in range(start - first, len(lines)):
        yield _unpack_line(session_id, first + at, lines[at], sums[at], seed)


def unpack_plain(
    session_id: str, first: int, checks: Any, body: Any, start: int, stop: int
) -> list[Record] | None:
    """The records of a row from `start` to `stop`, all at once, as far as it has them.

    None where those are not alike in all but offset and payload, or do not fit: `unpack_run` tells.
    """
    if not isinstance(checks, bytes) or not isinstance(body, bytes):
        return None
    lines = body.split(b"\n")
    if len(checks) != 4 * len(lines):
        return None
    at, end = start - first, stop + 1 - first
    lines, checks, first = lines[at:end], checks[4 * at : 4 * end], start
    if not lines:
        return []
    try:
        head = _decode_head(lines[0][: lines[0].find(_PAYLOAD)] + b"}")
    except (ValueError, RecursionError):  # nothing has said yet that these bytes are right
        return None
    middle = b',%b%d,"payload":' % (_middle_of(head.kind, head.taint)[0], head.ts)
    if middle not in lines[-1]:
        return None  # where rows differ, they mostly do at their ends, and this is soon known
    seed = crc32(id_bytes(session_id))
    if pack(f"<{len(lines)}I", *map(crc32, lines, repeat(seed))) != checks:
        return None
    payloads = [line[line.find(_PAYLOAD) + len(_PAYLOAD) : -1] for line in lines]
    if _lines(first, middle, payloads) != lines:
        return None
    return list(_records(first, session_id, head.kind, payloads, head.taint, head.ts))


def _unpack_line(
    session_id: str, offset: int, line: bytes, check: int, seed: int
) -> Record | Broken:
    if crc32(line, seed) != check:
        return Broken(offset, "the checksum does not fit")
    at = line.find(_PAYLOAD)
    try:
        head = _decode_head(line[:at] + b"}")
    except msgspec.DecodeError as error:
        return Broken(offset, f"is not written as a record is: {error}")
    if head.offset != offset:
        return Broken(offset, f"is record {head.offset} in the wrong place")
    return Record(offset, session_id, head.kind, line[at + len(_PAYLOAD) : -1], head.taint, head.ts)


def _unpack_odd(
    session_id: str, first: int, checks: bytes, lines: list[bytes], seed: int
) -> Iterator[Record | Broken]:
    count = len(checks) // 4
    sums = unpack(f"<{count}I", checks[: 4 * count])
    found: dict[int, Record] = {}
    for line in lines:
        try:
            offset = _decode_head(line[: line.find(_PAYLOAD)] + b"}").offset
        except msgspec.DecodeError:
            continue
        if first <= offset < first + count:
            record = _unpack_line(session_id, offset, line, sums[offset - first], seed)
            if isinstance(record, Record):
                found[offset] = record
    for offset in range(first, first + max(count, 1)):
        yield found.get(offset) or Broken(offset, "its line cannot be found")


def index_columns(index: Index, session_id: str) -> tuple[Any, ...]:
    """What an index is in a row of `sessions`: records, created, updated, meta, title, latest, sum."""
    latest = encode(index.latest).decode()
    columns = (index.records, index.created, index.updated, index.meta, index.title, latest)
    return (*columns, _index_sum(columns, session_id))


def _index_sum(columns: Sequence[Any], session_id: str) -> int:
    return crc32(encode(columns), crc32(id_bytes(session_id)))


def index_of(row: Sequence[Any], name: str, session_id: str) -> tuple[Index, bool]:
    """The index in a row of `sessions`, and whether it fits its checksum; see `index_columns`.

    Raises:
        JournalDamaged: it cannot even be read.
    """
    *columns, check = row
    records, created, updated, meta, title, latest = columns
    try:
        offsets = msgspec.json.decode(latest, type=dict[str, int])
        index = msgspec.convert(
            (records, created, updated, meta, title, offsets), _IndexRow, strict=True
        )
    except (msgspec.DecodeError, TypeError):
        raise JournalDamaged(name, "its index cannot be read", session_id=session_id) from None
    return Index(*index), check == _index_sum(columns, session_id)


_IndexRow = tuple[int, int, int, str | None, str | None, dict[str, int]]


def watermark(execute: Callable[..., sqlite3.Cursor], number: int) -> int:
    """The last offset of a session, from its records themselves."""
    start = base(number)
    row = execute(
        "SELECT key, length(checks) FROM records WHERE key BETWEEN ? AND ? ORDER BY key DESC LIMIT 1",
        (start + 1, start + LAST_OFFSET),
    ).fetchone()
    if row is None:
        return 0
    # A row that is spoiled has one record at least, which cannot be read.
    return int(row[0]) - start + max((row[1] or 0) // 4, 1) - 1
