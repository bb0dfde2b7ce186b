"""What a record holds, what it is called by, and the frame that it becomes."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from antiphon.journal import (
    SESSION_CREATED,
    SESSION_UPDATE,
    STEER,
    TURN_COMPLETED,
    TURN_STARTED,
    Record,
    tag_of_update,
    taint_of_update,
)
from antiphon.journal._record import FrameHeads
from antiphon.schema import v1

UPDATE = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hi"}}'


def record(kind: str, payload: bytes, *, session_id: str = "s-41", taint: str = "agent") -> Record:
    return Record(9, session_id, kind, payload, taint, 1784290000123)


@pytest.mark.covers("P-BUS7", "J5")
def test_an_update_becomes_a_session_update_with_a_rider() -> None:
    frame = FrameHeads("s-41").frame(record(SESSION_UPDATE, UPDATE))

    assert json.loads(frame) == {
        "jsonrpc": "2.0",
        "method": "session/update",
        "params": {
            "sessionId": "s-41",
            "update": {
                "sessionUpdate": "agent_message_chunk",
                "content": {"type": "text", "text": "hi"},
            },
            "_meta": {"raxol.io": {"offset": 9, "taint": "agent", "ts": 1784290000123}},
        },
    }
    assert UPDATE in frame


@pytest.mark.covers("P-BUS7")
@pytest.mark.parametrize(
    "kind", [SESSION_CREATED, TURN_STARTED, STEER, TURN_COMPLETED, "new", 'q"']
)
def test_any_other_kind_becomes_a_record(kind: str) -> None:
    frame = FrameHeads("s-41").frame(record(kind, b'{"turnId":2,"prompt":[]}', taint="user"))

    assert json.loads(frame) == {
        "jsonrpc": "2.0",
        "method": "_raxol/session.record",
        "params": {
            "sessionId": "s-41",
            "offset": 9,
            "kind": kind,
            "payload": {"turnId": 2, "prompt": []},
            "taint": "user",
            "ts": 1784290000123,
        },
    }


@pytest.mark.parametrize("kind", [SESSION_UPDATE, "other"])
def test_a_frame_is_one_line_whatever_shape_the_payload_is_in(kind: str) -> None:
    payload = b'{\n\t"sessionUpdate": "plan",\r\n\r  "text": "one\\ntwo\\r"\n}\n'
    frame = FrameHeads("s-41").frame(record(kind, payload))
    params = json.loads(frame)["params"]

    assert b"\n" not in frame
    assert b"\r" not in frame
    assert params.get("payload", params.get("update")) == json.loads(payload)


@pytest.mark.parametrize("name", ["", 's"1', "s\\", "\u00e9\u2028\n", "\U0001f600"])
def test_a_session_and_a_taint_are_any_text(name: str) -> None:
    heads = FrameHeads(name)
    for kind in (SESSION_UPDATE, "other"):
        params = json.loads(heads.frame(record(kind, b"{}", session_id=name, taint=name)))["params"]
        assert params["sessionId"] == name
        assert name in (
            params.get("taint"),
            params.get("_meta", {}).get("raxol.io", {}).get("taint"),
        )


@pytest.mark.parametrize(
    ("payload", "data"),
    [(b'{"a":[1]}', {"a": [1]}), (b"{}", {}), (b"[1]", {}), (b"", {}), (b'{"a":', {}), (b"1", {})],
)
def test_a_payload_that_is_no_object_has_no_members(payload: bytes, data: dict[str, Any]) -> None:
    made = record("other", payload)

    assert made.data == data
    assert made.data is not made.data


@pytest.mark.parametrize(
    ("update", "tag"),
    [
        (UPDATE, "agent_message_chunk"),
        (b'{"content":1,"sessionUpdate":"plan"}', "plan"),
        (b' { "sessionUpdate" : "plan" } ', "plan"),
        (b'{"sessionUpdate":"of tomorrow-7"}', "of tomorrow-7"),
        (b'{"sessionUpdate":"pl\\u0061n"}', "plan"),
        (b'{"sessionUpdate":7}', ""),
        (b"{}", ""),
        (b"[]", ""),
        (b"{", ""),
        (b"[" * 100_000, ""),
        (b'{"sessionUpdate":"turn_started"}', ""),
        (b'{"a":1,"sessionUpdate":"turn_completed"}', ""),
        (b'{"sessionUpdate":"session_created"}', ""),
        (b'{"sessionUpdate":"steer"}', ""),
    ],
)
def test_an_update_is_called_by_its_tag_and_never_like_a_kind(update: bytes, tag: str) -> None:
    assert tag_of_update(update) == tag
    assert record(SESSION_UPDATE, update).tag == tag


def test_any_other_record_is_called_by_its_kind() -> None:
    assert record(TURN_STARTED, UPDATE).tag == TURN_STARTED


@pytest.mark.covers("J5")
def test_the_taint_of_every_update_of_the_protocol() -> None:
    tags = {str(kind.__struct_config__.tag) for kind in get_args(v1.SessionUpdate)}
    assert len(tags) > 10
    taints = {tag: taint_of_update(tag) for tag in tags}

    others = {tag: taint for tag, taint in taints.items() if taint != "system"}
    assert others == {
        "user_message_chunk": "user",
        "agent_message_chunk": "agent",
        "agent_thought_chunk": "agent",
        "plan": "agent",
        "tool_call": "external",
        "tool_call_update": "external",
    }
    assert taint_of_update("of tomorrow") == taint_of_update("") == "system"
