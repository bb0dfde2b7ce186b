"""`decode_update` and `Update`: every JSON value is delivered, whatever it is; nothing else is raised."""

from __future__ import annotations

import msgspec

from antiphon import Update
from antiphon.schema import UnknownUpdate, decode_update, repair_text, v1_unstable
from fuzz.targets._round_trip import check_round_trip

_skip = msgspec.json.Decoder(msgspec.Raw).decode


def check(data: bytes) -> None:
    try:
        raw = _skip(repair_text(data))
    except (msgspec.DecodeError, RecursionError):
        return  # `core` cuts no such update out of a frame
    value = decode_update(data)
    if isinstance(value, UnknownUpdate):
        assert value.reason
        assert _skip(value.raw) is not None
    else:
        check_round_trip(v1_unstable.SessionUpdate, value)

    update = Update("s", "turn", raw, b'{"params":{"update":' + bytes(raw) + b"}}")
    assert isinstance(update.text, str)
    assert isinstance(update.kind, str)
    assert update.raw == bytes(raw)
    assert update.meta is None
    assert repr(update)
