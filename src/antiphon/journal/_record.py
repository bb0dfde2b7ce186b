"""One record of a session's journal, and what it looks like on the wire.

Responsible for the fields, the kinds and the taint of records, and for a subscriber's frames. Leaves
offsets and times to the stores, and who gets which record to `_writer` and `_subscriber`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SESSION_CREATED",
    "SESSION_UPDATE",
    "STEER",
    "TURN_COMPLETED",
    "TURN_STARTED",
    "Entry",
    "FrameHeads",
    "Record",
    "object_of",
    "tag_of_update",
    "taint_of_update",
]

SESSION_CREATED: Final = "session_created"
TURN_STARTED: Final = "turn_started"
SESSION_UPDATE: Final = "session_update"
STEER: Final = "steer"
TURN_COMPLETED: Final = "turn_completed"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What is to be appended; offset, session and time are the store's to give.

    Attributes:
        kind: an open set: `SESSION_UPDATE` and its kin, or what a future writer adds.
        payload: a JSON object, as text. For an update the update itself, its tag included.
        taint: where it comes from: "user", "agent", "external" or "system"; an open set. A hint for a
            receiver's own redaction: nothing here ever filters by it (resumable-sessions §6).
    """

    kind: str
    payload: bytes
    taint: str


class Record(msgspec.Struct, frozen=True, gc=False):
    """One immutable entry of one session's journal (resumable-sessions §5).

    Attributes:
        offset: its number in the session: 1, 2, 3, …
        session_id: the session.
        kind: as for `Entry`; a reader passes over one that it does not know.
        payload: a JSON object, as text, equal in value to what was appended.
        taint: as for `Entry`.
        ts: when it was appended, in milliseconds since 1970.
    """

    offset: int
    session_id: str
    kind: str
    payload: bytes
    taint: str
    ts: int

    @property
    def data(self) -> dict[str, Any]:
        """The payload as builtins, decoded anew each time; {} where it is no JSON object."""
        return object_of(self.payload)

    @property
    def tag(self) -> str:
        """What it tells: an update's `sessionUpdate`, of any other kind the kind."""
        return tag_of_update(self.payload) if self.kind == SESSION_UPDATE else self.kind


class FrameHeads:
    """What a subscriber's frames of one session begin with; made once per subscriber."""

    __slots__ = ("_record", "_update")

    def __init__(self, session_id: str) -> None:
        named = b'","params":{"sessionId":' + encode(session_id)
        self._update = b'{"jsonrpc":"2.0","method":"session/update' + named + b',"update":'
        self._record = b'{"jsonrpc":"2.0","method":"_raxol/session.record' + named + b',"offset":'

    def frame(self, record: Record) -> bytes:
        """The frame of a record: `session/update` with a rider, or `_raxol/session.record` (§4).

        It is one line, also where the payload is not.
        """
        payload = record.payload
        if _LF in payload or _CR in payload:
            # Between a JSON text's tokens; there is no other place for them.
            payload = payload.replace(b"\n", b" ").replace(b"\r", b" ")
        taint = _TAINT_TEXTS.get(record.taint) or encode(record.taint)
        if record.kind == SESSION_UPDATE:
            return b'%b%b,"_meta":{"raxol.io":{"offset":%d,"taint":%b,"ts":%d}}}}' % (
                self._update,
                payload,
                record.offset,
                taint,
                record.ts,
            )
        return b'%b%d,"kind":%b,"payload":%b,"taint":%b,"ts":%d}}' % (
            self._record,
            record.offset,
            encode(record.kind),
            payload,
            taint,
            record.ts,
        )


#: As numbers: looking for those is far quicker than looking for bytes.
_LF, _CR = b"\n\r"
_TAINT_TEXTS = {taint: encode(taint) for taint in ("user", "agent", "external", "system")}


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def object_of(payload: bytes) -> dict[str, Any]:
    """A payload as builtins, {} where it is no JSON object: others fill journals, too."""
    try:
        return _decode_object(payload)
    except (msgspec.DecodeError, RecursionError):
        return {}


class _Tagged(msgspec.Struct, rename="camel"):
    session_update: str = ""


_decode_tag = msgspec.json.Decoder(_Tagged).decode
#: Where our own encoder, and most others, write the tag.
_FIRST_MEMBER = re.compile(rb'\{"sessionUpdate":"([a-z_]+)"')

_TAINTS: Mapping[str, str] = {
    "user_message_chunk": "user",
    "agent_message_chunk": "agent",
    "agent_thought_chunk": "agent",
    "plan": "agent",
    "tool_call": "external",
    "tool_call_update": "external",
}


#: Tags and kinds are looked up in one table (`SessionLog.latest`), and an update's tag is its sender's
#: to choose: one that calls itself `turn_started` must not pass for the start of a turn.
_KINDS = frozenset((SESSION_CREATED, TURN_STARTED, SESSION_UPDATE, STEER, TURN_COMPLETED))


def tag_of_update(update: bytes) -> str:
    """The `sessionUpdate` of an update's JSON text, "" where it has none or that of a kind of record."""
    match = _FIRST_MEMBER.match(update)
    if match is not None:
        tag = match[1].decode()
    else:
        try:
            tag = _decode_tag(update).session_update
        except (msgspec.DecodeError, RecursionError):
            return ""
    return "" if tag in _KINDS else tag


def taint_of_update(tag: str) -> str:
    """The taint of an update by its tag (resumable-sessions §5)."""
    return _TAINTS.get(tag, "system")
