from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from antiphon import InvalidParams, RemoteProtocolError, RequestError
from antiphon.sessions._attach_frames import (
    NOTICES,
    SessionRecord,
    attach_params,
    offset_of,
    read_watermark,
    refused_watermark,
    same_block,
    user_block,
)

RECORD: dict[str, Any] = {
    "sessionId": "s-41",
    "offset": 8,
    "kind": "turn_started",
    "payload": {"turnId": 2, "prompt": []},
    "taint": "user",
    "ts": 1784290000100,
}


def update(params: dict[str, Any]) -> bytes:
    body = {"sessionId": "s", "update": {"sessionUpdate": "plan"}, **params}
    return json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": body}).encode()


def test_the_offset_of_an_update_is_in_its_rider() -> None:
    frame = update({"_meta": {"raxol.io": {"offset": 9, "taint": "agent", "ts": 1784290000123}}})

    assert offset_of(frame) == 9


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"_meta": None},
        {"_meta": {}},
        {"_meta": {"raxol.io": None}},
        {"_meta": {"raxol.io": {}}},
        {"_meta": {"raxol.io": {"offset": None}}},
        {"_meta": {"raxol.io": {"offset": "9"}}},
        {"_meta": {"raxol.io": {"offset": True}}},
        {"_meta": {"raxol.io": {"offset": 0}}},
        {"_meta": {"raxol.io": {"offset": -3}}},
        {"_meta": {"raxol.io": "9"}},
        {"_meta": [9]},
    ],
)
def test_an_update_without_an_offset_that_is_one_has_none(meta: dict[str, Any]) -> None:
    assert offset_of(update(meta)) == 0


def test_a_record_keeps_what_it_says_and_passes_over_what_is_new() -> None:
    record = msgspec.convert({**RECORD, "colour": "blue"}, SessionRecord)

    assert record.offset == 8
    assert record.kind == "turn_started"
    assert record.payload == {"turnId": 2, "prompt": []}
    assert msgspec.convert({k: v for k, v in RECORD.items() if k != "payload"}, SessionRecord) == (
        SessionRecord("s-41", 8, "turn_started", "user", 1784290000100)
    )


@pytest.mark.parametrize(
    "wrong",
    [{"payload": None}, {"payload": []}, {"offset": 0}, {"offset": "8"}, {"kind": 3}, {"ts": None}],
)
def test_a_record_of_the_wrong_shape_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**RECORD, **wrong}, SessionRecord)


def test_the_four_notifications_are_known_by_their_names() -> None:
    names = {"record", "caught_up", "lagged", "closed"}

    assert set(NOTICES) == {f"_raxol/session.{name}" for name in names}


def test_an_attach_asks_as_the_extension_has_it() -> None:
    params = attach_params(
        "s-41", "/srv/project", from_offset=7, history="from_offset", capability="RXC1.x"
    )

    assert json.loads(params) == {
        "sessionId": "s-41",
        "cwd": "/srv/project",
        "mcpServers": [],
        "_meta": {
            "raxol.io": {
                "fromOffset": 7,
                "historyPolicy": "from_offset",
                "capability": "RXC1.x",
            }
        },
    }


def test_without_a_capability_the_rider_has_none() -> None:
    params = attach_params("s", "/", from_offset=0, history="tip", capability=None)

    assert json.loads(params)["_meta"] == {"raxol.io": {"fromOffset": 0, "historyPolicy": "tip"}}


def test_further_roots_go_with_an_attach() -> None:
    params = attach_params(
        "s", "/", from_offset=0, history="tip", capability=None, additional_directories=("/data",)
    )

    assert json.loads(params)["additionalDirectories"] == ["/data"]


def test_the_high_watermark_is_read_from_the_answer() -> None:
    assert read_watermark(b'{"_meta":{"raxol.io":{"highWatermark":19}}}') == 19


@pytest.mark.parametrize("answer", [b"{}", b"null", b'{"_meta":{"raxol.io":{"highWatermark":-1}}}'])
def test_an_answer_without_a_watermark_is_malformed(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_watermark(answer)


@pytest.mark.parametrize(
    ("error", "mark"),
    [
        (InvalidParams({"highWatermark": 5}, "invalid params"), 5),
        (InvalidParams({"highWatermark": True}), None),
        (InvalidParams("free text"), None),
        (RequestError(-32000, "attach denied"), None),
        (ValueError("no answer"), None),
    ],
)
def test_a_refusal_tells_the_mark_where_we_are_ahead(error: Exception, mark: int | None) -> None:
    assert refused_watermark(error) == mark


def test_only_a_chunk_of_the_users_message_has_its_block() -> None:
    chunk = b'{"sessionUpdate":"user_message_chunk","content":{"type":"text","text":"hi"}}'

    assert user_block(chunk) == {"type": "text", "text": "hi"}
    assert user_block(chunk.replace(b"user", b"agent")) is None
    assert user_block(b'{"sessionUpdate":3}') is None


def test_blocks_are_the_same_whatever_is_left_out_or_noted_beside() -> None:
    one = {"type": "text", "text": "hi", "_meta": {"a": 1}, "annotations": None}

    assert same_block(one, {"text": "hi", "type": "text"})
    assert not same_block(one, {"text": "ho", "type": "text"})
