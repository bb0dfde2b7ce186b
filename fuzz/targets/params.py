"""`decode_params` of every method: a typed value that survives a round trip, or `DecodeError`.

The first byte chooses the method.
"""

from __future__ import annotations

import msgspec

from antiphon.schema import decode_params, v1_unstable
from fuzz.targets._round_trip import check_round_trip

_ROWS = v1_unstable.METHODS


def check(data: bytes) -> None:
    if not data:
        return
    kind = _ROWS[data[0] % len(_ROWS)].params
    try:
        value = decode_params(kind, data[1:])
    except msgspec.DecodeError:
        return
    check_round_trip(kind, value)
