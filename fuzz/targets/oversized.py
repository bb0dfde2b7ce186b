"""`Protocol.receive_fault`: what is known of a frame that was too long, from its two ends alone.

The frame is JSON that was made from the data; what is salvaged must be what it says.
"""

from __future__ import annotations

import json
from typing import Any, cast

from antiphon.core import Fault, Limits, Protocol, Refusal, ResponseEvent
from antiphon.schema import json_depth_exceeds

_KEPT = 64


def check(data: bytes) -> None:
    protocol = Protocol("client", Limits(), json_depth_exceeds)
    for _ in range(3):
        protocol.request("session/list", None, object())
    size = len(data) + 1000
    fault = Fault("frame_too_large", size, data[:_KEPT], data[-_KEPT:])

    event = protocol.receive_fault(fault)

    assert isinstance(event, ResponseEvent | Refusal)
    message = _message(data)
    if isinstance(event, ResponseEvent):
        assert event.result is None
        assert event.error is not None
        assert len(protocol.calls) == 2
        if message is not None:
            assert "method" not in message, "a request was taken for an answer"
            assert str(message["id"]) in ("1", "2", "3")
    else:
        reply = json.loads(event.reply)
        if message is not None and reply["id"] is not None:
            assert reply["id"] == message["id"]


def _message(data: bytes) -> dict[str, Any] | None:
    """The object, where the data is one whose member names stand once each."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError
        return found

    try:
        value: Any = json.loads(data, object_pairs_hook=members)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if type(value) is dict else None
