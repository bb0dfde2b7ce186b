"""`SessionView`: folds any updates, one a line, without raising, and the same ones to the same view."""

from __future__ import annotations

import msgspec

from antiphon import SessionView, Update
from antiphon.schema import repair_text

_skip = msgspec.json.Decoder(msgspec.Raw).decode


def check(data: bytes) -> None:
    updates: list[Update] = []
    for line in data.split(b"\n"):
        try:
            raw = _skip(repair_text(line))
        except (msgspec.DecodeError, RecursionError):
            continue
        updates.append(Update("s", "turn", raw, b"{}"))
    one, other = SessionView(), SessionView()
    for update in updates:
        one.apply(update)
    for update in updates:
        other.apply(Update("s", "turn", update.encoded, b"{}"))
    assert repr(one) == repr(other)
    assert repr(one.messages) == repr(other.messages)
    for message in one.messages:
        assert isinstance(message.text, str)
        assert message.blocks is not None
