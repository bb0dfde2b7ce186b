"""The frames of an attachment, as a client reads and writes them (resumable-sessions §2-§4).

Responsible for what is in them: the rider of an update, records, boundaries, the parameters of an
attach and its answer. Leaves what they mean for a session to `_attachment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from antiphon._errors import InvalidParams, RemoteProtocolError
from antiphon.schema import encode_checked

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DETACH",
    "KEY",
    "LOAD",
    "NOTICES",
    "CaughtUp",
    "Closed",
    "History",
    "Lagged",
    "SessionRecord",
    "attach_params",
    "offset_of",
    "read_watermark",
    "refused_watermark",
    "same_block",
    "user_block",
]

#: The extension's member of `_meta`.
KEY = "raxol.io"
#: The request that attaches, whatever the agent says about `session/load`.
LOAD = "_raxol/session.load"
#: The notification that ends an attachment.
DETACH = "_raxol/session.detach"

#: Which of what is durable is sent before the live records (resumable-sessions §3.1).
History: TypeAlias = Literal["from_offset", "tip", "none"]

_Offset = Annotated[int, msgspec.Meta(ge=1)]


class SessionRecord(msgspec.Struct, rename="camel", frozen=True):
    """A record of a session's journal that is no update: where a turn began and ended, a steer, ….

    Attributes:
        session_id: whose.
        offset: its place in the journal, from 1.
        kind: "session_created", "turn_started", "turn_completed", "steer", or one not known here.
        taint: where its content is from: "user", "agent", "external", "system", ….
        ts: when it was stored, in milliseconds since 1970.
        payload: what it says, as plain JSON values.
    """

    session_id: str
    offset: _Offset
    kind: str
    taint: str
    ts: int
    payload: dict[str, Any] = {}


class CaughtUp(msgspec.Struct, rename="camel", frozen=True):
    """History is complete; the next live record has this offset."""

    session_id: str
    offset: int


class Lagged(msgspec.Struct, rename="camel", frozen=True):
    """The agent sends nothing more, since we did not keep up."""

    session_id: str
    last_offset: int


class Closed(msgspec.Struct, rename="camel", frozen=True):
    """The agent sends nothing more."""

    session_id: str
    reason: str


#: The notifications of an attachment, by method.
NOTICES: dict[str, type[SessionRecord | CaughtUp | Lagged | Closed]] = {
    "_raxol/session.record": SessionRecord,
    "_raxol/session.caught_up": CaughtUp,
    "_raxol/session.lagged": Lagged,
    "_raxol/session.closed": Closed,
}


class _Rider(msgspec.Struct):
    offset: int = 0


class _Meta(msgspec.Struct):
    rider: _Rider | None = msgspec.field(name=KEY, default=None)


class _Params(msgspec.Struct):
    meta: _Meta | None = msgspec.field(name="_meta", default=None)


class _Frame(msgspec.Struct):
    params: _Params


_decode_frame = msgspec.json.Decoder(_Frame).decode


def offset_of(frame: bytes) -> int:
    """The offset in the rider of an update's frame; 0 where it has none that is any."""
    try:
        meta = _decode_frame(frame).params.meta
    except (msgspec.DecodeError, RecursionError):
        return 0
    if meta is None or meta.rider is None:
        return 0
    return max(meta.rider.offset, 0)


def attach_params(
    session_id: str,
    cwd: str,
    *,
    from_offset: int,
    history: History,
    capability: str | None,
    additional_directories: Sequence[str] = (),
) -> bytes:
    """The parameters of an attach (resumable-sessions §2.1)."""
    rider: dict[str, Any] = {"fromOffset": from_offset, "historyPolicy": history}
    if capability is not None:
        rider["capability"] = capability
    params: dict[str, Any] = {"sessionId": session_id, "cwd": cwd, "mcpServers": []}
    if additional_directories:
        params["additionalDirectories"] = list(additional_directories)
    return encode_checked({**params, "_meta": {KEY: rider}})


class _Answered(msgspec.Struct, rename="camel"):
    high_watermark: Annotated[int, msgspec.Meta(ge=0)]


class _AnsweredMeta(msgspec.Struct):
    rider: _Answered = msgspec.field(name=KEY)


class _Answer(msgspec.Struct):
    meta: _AnsweredMeta = msgspec.field(name="_meta")


_decode_answer = msgspec.json.Decoder(_Answer).decode


def read_watermark(result: Any) -> int:
    """The high watermark in the answer to an attach. Raises `RemoteProtocolError` without one."""
    try:
        return _decode_answer(result).meta.rider.high_watermark
    except msgspec.DecodeError as fault:
        raise RemoteProtocolError(f"the answer to {LOAD} is malformed: {fault}") from None


def refused_watermark(error: Exception) -> int | None:
    """The journal's mark where an attach was refused for being ahead of it (§12), else None."""
    if not isinstance(error, InvalidParams) or not isinstance(error.data, dict):
        return None
    mark: object = error.data.get("highWatermark")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return mark if isinstance(mark, int) and not isinstance(mark, bool) else None


class _Chunk(msgspec.Struct, rename="camel"):
    session_update: str
    content: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def user_block(raw: Any) -> Any:
    """The content of a `user_message_chunk` as plain JSON, None where the update is another."""
    try:
        chunk = _decode_chunk(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return chunk.content if chunk.session_update == "user_message_chunk" else None


def same_block(one: Any, other: Any) -> bool:
    """Whether two content blocks say the same, `_meta` and members that are null left aside."""
    try:
        return bool(_plain(one) == _plain(other))
    except RecursionError:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _plain(member)
            for name, member in value.items()  # pyright: ignore[reportUnknownVariableType]
            if member is not None and name != "_meta"
        }
    return value
