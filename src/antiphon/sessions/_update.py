"""What a consumer of a session gets: one update, decoded when looked at, its bytes kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from antiphon.schema import decode_update, loads, strict_updates

if TYPE_CHECKING:
    from antiphon.schema import UnknownUpdate
    from antiphon.schema.v1_unstable import SessionUpdate

__all__ = ["Label", "Update"]

#: Where an update belongs: to the open turn, to the session outside any turn, or to replayed history.
Label = Literal["turn", "session", "replay"]


class Update(msgspec.Struct, gc=False, eq=False):
    """One `session/update`, delivered in wire order and exactly once to each consumer (DESIGN §4).

    Several consumers share one object; it is decoded once, by the first who looks.

    Attributes:
        session_id: the session it belongs to.
        label: "turn", "session" (outside a turn) or "replay" (history sent for `session/load`).
        frame: the whole frame as it came.
    """

    session_id: str
    label: Label
    encoded: msgspec.Raw
    frame: bytes
    decoded: Any = None

    @property
    def value(self) -> SessionUpdate | UnknownUpdate:
        """The typed update of `antiphon.schema.v1`, or `UnknownUpdate` for one that does not decode."""
        value = self.decoded
        if value is None:
            try:  # what `decode_update` tries first, without the call of it
                value = strict_updates.decode(self.encoded)
            except (msgspec.DecodeError, RecursionError):
                value = decode_update(self.encoded)
            self.decoded = value
        return value  # type: ignore[no-any-return]

    @property
    def raw(self) -> bytes:
        """The update's own JSON text (`params.update`), unknown members and `_meta` included."""
        return bytes(self.encoded)

    @property
    def kind(self) -> str:
        """Its wire tag, e.g. "agent_message_chunk"; "" for one that has none."""
        return _tag(self.encoded)

    @property
    def text(self) -> str:
        """The text of a chunk of the agent's message, "" for everything else."""
        value: Any = self.value
        if getattr(value, "__struct_config__", None) is None:
            return ""
        if value.__struct_config__.tag != "agent_message_chunk":
            return ""
        text = getattr(value.content, "text", "")
        return text if isinstance(text, str) else ""

    @property
    def meta(self) -> Any:
        """`_meta` of the notification around the update, or None."""
        try:
            params = loads(self.frame)["params"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return None
        return params.get("_meta")

    def __repr__(self) -> str:
        return f"Update({self.value!r})"


class _Tag(msgspec.Struct, rename="camel"):
    session_update: str = ""


_decode_tag = msgspec.json.Decoder(_Tag).decode


def _tag(raw: msgspec.Raw) -> str:
    try:
        return _decode_tag(raw).session_update
    except msgspec.DecodeError:
        return ""
