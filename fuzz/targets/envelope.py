"""`Protocol.receive_frame`: any bytes become one event, and the two tables stay what they are.

The first byte chooses the side.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from antiphon.core import (
    Ignored,
    Limits,
    NotificationEvent,
    Protocol,
    Refusal,
    RequestEvent,
    ResponseEvent,
    UpdateEvent,
)
from antiphon.schema import json_depth_exceeds, repair_text

_LIMITS = Limits(json_depth=12)
_raw = msgspec.json.Decoder(msgspec.Raw).decode


def check(data: bytes) -> None:
    if not data:
        return
    frame = data[1:]
    if not frame or b"\n" in frame:  # no framer gives such
        return
    protocol = Protocol("client" if data[0] % 2 else "agent", _LIMITS, json_depth_exceeds)
    for number in range(3):
        protocol.request("session/list", None, f"call {number + 1}")
    protocol.open(b'"open"', "request")
    calls, requests = dict(protocol.calls), dict(protocol.requests)

    event = protocol.receive_frame(frame)

    if isinstance(event, ResponseEvent):
        assert (event.result is None) != (event.error is None)
        assert event.call in calls.values()
        assert event.call not in protocol.calls.values()
        assert len(protocol.calls) == len(calls) - 1
        again = protocol.receive_frame(frame)
        assert not isinstance(again, ResponseEvent), "one response answered two calls"
    else:
        assert protocol.calls == calls
    assert protocol.requests == requests, "receiving opens nothing"

    if isinstance(event, UpdateEvent):
        assert protocol.side == "client"
        assert event.method == "session/update"
        params: Any = event.params
        assert isinstance(params.sessionId, str)
        _raw(params.update)
    elif isinstance(event, RequestEvent):
        _check_request(protocol, event)
    elif isinstance(event, NotificationEvent):
        _check_params(event.params)
    elif isinstance(event, Refusal):
        reply = json.loads(event.reply)
        assert b"\n" not in event.reply
        assert reply["error"]["code"] in (-32700, -32600)
        assert "id" in reply
    elif isinstance(event, Ignored):
        assert event.event


def _check_request(protocol: Protocol, event: RequestEvent) -> None:
    _check_params(event.params)
    assert isinstance(json.loads(event.id), str | int)
    if protocol.is_open(event.id):
        assert protocol.open(event.id, "again") is False
        return
    assert protocol.open(event.id, "asked")
    frame = protocol.result(event.id, b"{}")
    assert frame is not None
    assert b'"id":' + event.id in frame, "ids are echoed byte for byte"
    assert protocol.error(event.id, -32603, "Internal error") is None, "one response for each id"


def _check_params(params: msgspec.Raw | None) -> None:
    if params is not None:
        _raw(repair_text(params))
