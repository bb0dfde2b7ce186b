"""What a journal must hold after its writer was killed: keeps books of it, and says what is wrong.

A `Book` takes a session's records in the order of the file, and what a subscriber saw of it. Everything
that must not be is a sentence in `wrong`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.journal import SESSION_CREATED, TURN_COMPLETED, TURN_STARTED
from antiphon.journal._record import FrameHeads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.journal import Record, SessionLog


class _Rider(msgspec.Struct):
    offset: int


class _Meta(msgspec.Struct):
    rider: _Rider = msgspec.field(name="raxol.io")


class _Params(msgspec.Struct):
    session_id: str = msgspec.field(name="sessionId")
    offset: int | None = None
    meta: _Meta | None = msgspec.field(name="_meta", default=None)


class _Frame(msgspec.Struct):
    params: _Params


_decode = msgspec.json.Decoder(_Frame).decode


def place_of(frame: bytes) -> tuple[str, int]:
    """Session and offset of a subscriber's frame."""
    params = _decode(frame).params
    offset = params.offset if params.meta is None else params.meta.rider.offset
    assert offset is not None
    return params.session_id, offset


def _digest(frame: bytes) -> bytes:
    return hashlib.blake2b(frame, digest_size=16).digest()


class Book:
    """One session: what its file has held, each record once, and what was seen of it.

    Attributes:
        wrong: what must not be, a sentence each.
        orphans: how many completions a repair, or the end of a holder, has written.
        turn_open: whether the last turn is not completed.
    """

    def __init__(self, session_id: str) -> None:
        self.wrong: list[str] = []
        self.orphans = 0
        self.turn_open = False
        self._session_id = session_id
        self._heads = FrameHeads(session_id)
        self._held: list[bytes] = []
        self._turn_id = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, records: Iterable[Record]) -> None:
        """The next records of the file."""
        for record in records:
            if record.offset != len(self._held) + 1:
                self._find(f"record {record.offset} stands where {len(self._held) + 1} was to")
            self._held.append(_digest(self._heads.frame(record)))
            self._fold(record)

    def again(self, records: Iterable[Record]) -> None:
        """All records of the file anew: none has changed, and none is gone."""
        held = [_digest(self._heads.frame(record)) for record in records]
        if len(held) < len(self._held):
            self._find(f"of {len(self._held)} records {len(held)} are left")
        for offset, (now, before) in enumerate(zip(held, self._held, strict=False), start=1):
            if now != before:
                self._find(f"record {offset} has changed")

    def see(self, offset: int, frame: bytes) -> None:
        """What a subscriber was shown: it must be in the file, to the byte."""
        if not 1 <= offset <= len(self._held):
            self._find(f"record {offset} was shown and is not in the file")
        elif self._held[offset - 1] != _digest(frame):
            self._find(f"record {offset} was shown as another than it is in the file")

    def _find(self, what: str) -> None:
        self.wrong.append(f"{self._session_id}: {what}")

    def _fold(self, record: Record) -> None:
        data: dict[str, Any] = record.data
        if (record.kind == SESSION_CREATED) != (record.offset == 1):
            self._find(f"record {record.offset} is a {record.kind}")
        if record.kind == TURN_STARTED:
            if self.turn_open:
                self._find(f"record {record.offset} starts a turn in an open one")
            if data["turnId"] != self._turn_id + 1:
                self._find(f"turn {data['turnId']} comes after {self._turn_id}")
            self.turn_open, self._turn_id = True, data["turnId"]
        elif record.kind == TURN_COMPLETED:
            orphan = data.get("outcome") == "orphaned"
            if not self.turn_open:
                self._find(f"record {record.offset} completes no turn (orphan: {orphan})")
            elif data["turnId"] != self._turn_id:
                self._find(f"record {record.offset} completes turn {data['turnId']}")
            self.turn_open = False
            self.orphans += orphan
        elif record.kind != SESSION_CREATED and not self.turn_open:
            self._find(f"record {record.offset} is outside of a turn")


async def all_of(log: SessionLog, start: int = 1) -> list[Record]:
    """Every record from `start` on, in pages."""
    records: list[Record] = []
    stop = await log.high_watermark()
    while start <= stop:
        page = await log.read(start, min(stop, start + 255))
        start = page[-1].offset + 1 if page else stop + 1
        records += page
    return records
