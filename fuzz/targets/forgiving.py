"""The forgiving path: what is right needs no repair, what is repaired is right afterwards.

The first byte chooses the type.
"""

from __future__ import annotations

import msgspec

from antiphon.schema import decode_reporting, decoder, v1_unstable
from fuzz.targets._round_trip import check_round_trip

_KINDS = [
    v1_unstable.InitializeRequest,
    v1_unstable.InitializeResponse,
    v1_unstable.NewSessionResponse,
    v1_unstable.PromptRequest,
    v1_unstable.PromptResponse,
    v1_unstable.RequestPermissionRequest,
    v1_unstable.RequestPermissionResponse,
    v1_unstable.CreateTerminalRequest,
    v1_unstable.SessionUpdate,
    v1_unstable.ListSessionsResponse,
    v1_unstable.SetSessionConfigOptionResponse,
    v1_unstable.CreateElicitationRequest,
]


def check(data: bytes) -> None:
    if not data:
        return
    kind, text = _KINDS[data[0] % len(_KINDS)], data[1:]
    try:
        strict = decoder(kind)(text)
    except (msgspec.DecodeError, RecursionError):
        strict = None
    try:
        value, repairs = decode_reporting(kind, text)
    except msgspec.DecodeError:
        assert strict is None
        return
    if strict is not None:
        assert value == strict
        assert not repairs
    for repair in repairs:
        assert repair.reason
    check_round_trip(kind, value)
