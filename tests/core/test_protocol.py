"""Frames to events and calls to frames: classification, ids, the two tables, and every odd frame."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon._errors import LimitExceeded, RemoteProtocolError, RequestError, ResourceNotFound
from antiphon.core import (
    Event,
    Fault,
    Ignored,
    Limits,
    NotificationEvent,
    Protocol,
    Refusal,
    RequestEvent,
    ResponseEvent,
    Side,
    UpdateEvent,
    _protocol,
    error_frame,
)
from antiphon.core._protocol import _HEAD, _TAIL
from antiphon.schema import encode_checked, json_depth_exceeds

SIDES: list[Side] = ["agent", "client"]
GOOD = b'{"jsonrpc":"2.0","id":9,"method":"session/list"}'


def protocol(side: Side = "agent", **limits: Any) -> Protocol:
    return Protocol(side, Limits(**limits), json_depth_exceeds)


def reply_of(event: Event) -> dict[str, Any]:
    assert isinstance(event, Refusal), event
    reply = json.loads(event.reply)
    assert reply["jsonrpc"] == "2.0"
    return cast("dict[str, Any]", reply)


def code_and_id(event: Event) -> tuple[int, Any]:
    reply = reply_of(event)
    return reply["error"]["code"], reply["id"]


def with_calls(side: Side, count: int, **limits: Any) -> Protocol:
    """A protocol with open calls "call 1", "call 2", …, which have the ids 1, 2, …"""
    made = protocol(side, **limits)
    for number in range(1, count + 1):
        id_, _ = made.request("x/y", None, f"call {number}")
        assert id_ == b"%d" % number
    return made


def answer(event: Event) -> ResponseEvent:
    assert isinstance(event, ResponseEvent), event
    return event


# --- what a frame is -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_a_request_keeps_its_id_its_params_and_its_frame(side: Side) -> None:
    frame = b'{"jsonrpc":"2.0","id": 7 ,"method":"session/new","params":{"cwd": "/a"}}'

    event = protocol(side).receive_frame(frame)

    assert isinstance(event, RequestEvent)
    assert (event.id, event.method, event.frame) == (b"7", "session/new", frame)
    assert event.params is not None
    assert bytes(event.params) == b'{"cwd": "/a"}'


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("params", [b"", b',"params":null', b',"params": null '])
def test_absent_and_null_params_are_the_same(side: Side, params: bytes) -> None:
    made = protocol(side)

    request = made.receive_frame(b'{"id":1,"method":"logout"' + params + b"}")
    notification = made.receive_frame(b'{"method":"_x/y"' + params + b"}")

    assert isinstance(request, RequestEvent)
    assert isinstance(notification, NotificationEvent)
    assert request.params is None
    assert notification.params is None


@pytest.mark.parametrize("side", SIDES)
def test_a_frame_with_a_method_and_no_id_is_a_notification(side: Side) -> None:
    frame = b'{"method":"session/cancel","params":{"sessionId":"s"}}'

    event = protocol(side).receive_frame(frame)

    assert isinstance(event, NotificationEvent)
    assert (event.method, event.frame) == ("session/cancel", frame)


@pytest.mark.covers("R1-158")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "more",
    [b'"zzz":1', b'"_meta":{"k":[1]}', b'"_meta":"bad"', b'"zzz":%s' % (b"9" * 5000), b'"zzz":[]'],
)
def test_unknown_members_of_the_envelope_are_ignored(side: Side, more: bytes) -> None:
    made = with_calls(side, 1)

    request = made.receive_frame(b"{" + more + b',"id":1,"method":"x"}')
    notification = made.receive_frame(b'{"method":"x",' + more + b"}")
    response = made.receive_frame(b'{"id":1,' + more + b',"result":{}}')

    assert isinstance(request, RequestEvent)
    assert isinstance(notification, NotificationEvent)
    assert answer(response).call == "call 1"


@pytest.mark.covers("R1-156")
@pytest.mark.parametrize("meta", [b'{"k":[1]}', b'"bad"', b"null", b"[]", b'{"traceparent":1}'])
def test_foreign_meta_hides_no_update(meta: bytes) -> None:
    frame = b'{"method":"session/update","params":{"_meta":%s,"sessionId":"s","update":{}}}' % meta

    event = protocol("client").receive_frame(frame)

    assert isinstance(event, UpdateEvent)


@pytest.mark.parametrize(
    "members",
    [
        b'"method":"session/update","params":{"sessionId":"s","update":{"a":1}}',
        b'"params":{"update":{"a":1},"sessionId":"s"},"method":"session/update","jsonrpc":"2.0"',
        b'"method":"session\\/update","params":{"sessionId":"\\u0073","update": {"a":1} ,"x":0}',
    ],
)
def test_a_client_gets_updates_in_one_pass_with_the_update_still_raw(members: bytes) -> None:
    event = protocol("client").receive_frame(b"{" + members + b"}")

    assert isinstance(event, UpdateEvent)
    route: Any = event.params
    assert (route.sessionId, bytes(route.update)) == ("s", b'{"a":1}')


@pytest.mark.parametrize(
    ("params", "given"),
    [
        (b'{"sessionId":5,"update":{}}', b'{"sessionId":5,"update":{}}'),
        (b'{"sessionId":"s"}', b'{"sessionId":"s"}'),
        (b"[1]", b"[1]"),
        (b'"x"', b'"x"'),
        (b"null", None),
    ],
)
def test_an_update_that_the_fast_path_cannot_take_is_a_notification(
    params: bytes, given: bytes | None
) -> None:
    event = protocol("client").receive_frame(b'{"method":"session/update","params":%s}' % params)

    assert isinstance(event, NotificationEvent)
    assert event.method == "session/update"
    assert (None if event.params is None else bytes(event.params)) == given


def test_an_update_with_an_id_is_a_request() -> None:
    frame = b'{"id":1,"method":"session/update","params":{"sessionId":"s","update":{}}}'

    assert isinstance(protocol("client").receive_frame(frame), RequestEvent)


def test_an_agent_gets_an_update_like_any_notification() -> None:
    frame = b'{"method":"session/update","params":{"sessionId":"s","update":{}}}'

    assert isinstance(protocol("agent").receive_frame(frame), NotificationEvent)


# --- what is no message --------------------------------------------------------------------------

SCALARS_AND_ARRAYS = [
    b"null",
    b"42",
    b"-1.5e3",
    b'"x"',
    b"true",
    b"[]",
    b"[1,2]",
    b'[{"id":3,"method":"initialize"}]',
    b"[%s]" % (b"9" * 5000),
    b"9" * 5000,
    b'"\\ud800"',
    b'["\xff"]',
]
# code, id
ODD_OBJECTS: list[tuple[bytes, Any]] = [
    (b"{}", None),
    (b'{"id":4}', 4),
    (b'{"id":"four"}', "four"),
    (b'{"id":null}', None),
    (b'{"id":4.0}', None),
    (b'{"id":[]}', None),
    (b'{"jsonrpc":"2.0"}', None),
    (b'{"params":{}}', None),
    (b'{"id":1,"method":5}', 1),
    (b'{"id":"a","method":null}', "a"),
    (b'{"id":5,"method":["x"]}', 5),
    (b'{"method":7}', None),
    (b'{"id":{},"method":7}', None),
    (b'{"jsonrpc":"1.0","id":1,"method":"x"}', 1),
    (b'{"jsonrpc":2.0,"id":1,"method":"x"}', 1),
    (b'{"jsonrpc":null,"id":1,"method":"x"}', 1),
    (b'{"jsonrpc":"1.0","method":"x"}', None),
    (b'{"jsonrpc":"1.0","id":1,"method":"x","n":%s}' % (b"9" * 5000), 1),
    (b'{"jsonrpc":"1.0","id":1,"method":"\\ud800"}', 1),
    (b'{"id":null,"method":"x"}', None),
    (b'{"id":1.5,"method":"x"}', None),
    (b'{"id":1.0,"method":"x"}', None),
    (b'{"id":1e3,"method":"x"}', None),
    (b'{"id":true,"method":"x"}', None),
    (b'{"id":false,"method":"x"}', None),
    (b'{"id":{},"method":"x"}', None),
    (b'{"id":[1],"method":"x"}', None),
    (b'{"id":"\xff","method":"x"}', None),
    (b'{"id":"\xff\\n","method":"x"}', None),
    (b'{"id":%s,"method":"x"}' % (b"9" * 5000), None),
    (b'{"id":"%s","method":"x"}' % (b"x" * 5000), None),
]
NO_JSON = [
    b"{",
    b'{"id":1,"method":"x"',
    b'{"id":1,"method":"x"} x',
    b'{"id":1 "method":"x"}',
    b"{'id':1}",
    b'{"id":01,"method":"x"}',
    b'{"id":1,"method":"x",}',
    b'{"id":1,"method":"x\n"}',
    b'{"n":NaN}',
]
NOISE = [
    b"Welcome user",
    b"[INFO] ready",
    b"[1,2",
    b"NaN",
    b"\xff\xfe",
    b"\xff\xfe{\x00}\x00",
    '\ufeff{"id":1,"method":"x"}'.encode("utf-16-le"),
    b"   indented",
    b"\x1b]0;title\x07",
]


@pytest.mark.covers("R1-12")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("frame", SCALARS_AND_ARRAYS)
def test_a_scalar_or_array_is_one_invalid_request_without_an_id(side: Side, frame: bytes) -> None:
    made = protocol(side)

    assert code_and_id(made.receive_frame(frame)) == (-32600, None)
    assert isinstance(made.receive_frame(GOOD), RequestEvent)


@pytest.mark.covers("R1-12")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("frame", "id_"), ODD_OBJECTS)
def test_an_object_that_is_no_message_is_refused_with_its_id_where_that_is_legal(
    side: Side, frame: bytes, id_: Any
) -> None:
    made = protocol(side)

    event = made.receive_frame(frame)

    assert code_and_id(event) == (-32600, id_)
    assert reply_of(event)["error"]["data"]["reason"]
    assert isinstance(made.receive_frame(GOOD), RequestEvent)


@pytest.mark.covers("R1-11")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("frame", NO_JSON)
def test_what_looks_like_an_object_and_is_no_json_is_a_parse_error(
    side: Side, frame: bytes
) -> None:
    made = protocol(side)

    event = made.receive_frame(frame)

    assert code_and_id(event) == (-32700, None)
    assert isinstance(event, Refusal)
    assert event.noise == frame
    assert isinstance(made.receive_frame(GOOD), RequestEvent)


@pytest.mark.covers("R1-1", "R1-11")
@pytest.mark.parametrize("frame", NOISE)
def test_noise_is_a_parse_error_for_an_agent_and_ignored_by_a_client(frame: bytes) -> None:
    agent, client = protocol("agent"), protocol("client")

    ignored = client.receive_frame(frame)

    assert code_and_id(agent.receive_frame(frame)) == (-32700, None)
    assert isinstance(ignored, Ignored)
    assert ignored.noise == frame
    assert isinstance(agent.receive_frame(GOOD), RequestEvent)
    assert isinstance(client.receive_frame(GOOD), RequestEvent)


def test_of_much_noise_only_the_beginning_is_kept() -> None:
    event = protocol("client").receive_frame(b"Welcome " * 100_000)

    assert isinstance(event, Ignored)
    assert event.noise is not None
    assert len(event.noise) == 4096


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    list(SCALARS_AND_ARRAYS + NO_JSON + NOISE)
    + [frame for frame, _ in ODD_OBJECTS]
    + [b"[" * 100_000, b'{"id":1,"a":' + b"[" * 2000 + b"]" * 2000 + b"}"],
)
def test_a_refusal_is_never_answered_so_that_errors_do_not_play_ping_pong(
    side: Side, frame: bytes
) -> None:
    event = protocol(side).receive_frame(frame)

    if isinstance(event, Refusal):
        for other in SIDES:
            # Even one whose own calls have such ids: an error without an id is nobody's answer.
            assert not isinstance(protocol(other).receive_frame(event.reply), Refusal)


@given(st.binary(max_size=60), st.sampled_from(SIDES))
def test_any_bytes_give_an_event_and_no_exception(data: bytes, side: Side) -> None:
    event = protocol(side).receive_frame(data)

    assert isinstance(event, Event)
    if isinstance(event, Refusal):
        json.loads(event.reply)


_IDS = [b"0", b"-1", b"1", b"1.0", b"1e0", b"true", b"null", b"{}", b'"1"', b'"\\u0031"', b'"\xff"']
_METHODS = [b'"x/y"', b"5", b"null", b'"session/update"', b'"\\ud800"', b'"\xff"', b"[]"]
_VALUES = [b"null", b"{}", b"[]", b"1", b'{"sessionId":"s","update":{}}', b'"\\ud800"', b'"\xff"']
_ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        b"id": st.sampled_from(_IDS),
        b"method": st.sampled_from(_METHODS),
        b"params": st.sampled_from(_VALUES),
        b"result": st.sampled_from(_VALUES),
        b"error": st.sampled_from([*_VALUES, b'{"code":-32000,"message":"m"}', b'{"code":1}']),
        b"jsonrpc": st.sampled_from([b'"2.0"', b'"1.0"', b"2", b"null"]),
    },
)


@given(_ENVELOPES, st.sampled_from(SIDES), st.randoms(use_true_random=False))
def test_any_envelope_is_classified_by_its_members_in_any_order(
    members: dict[bytes, bytes], side: Side, random: Any
) -> None:
    order = list(members)
    random.shuffle(order)
    frame = b"{" + b",".join(b'"%s":%s' % (name, members[name]) for name in order) + b"}"
    made = with_calls(side, 1)

    event = made.receive_frame(frame)

    asks = members.get(b"method", b"null") != b"null"
    answers = not asks and (b"result" in members or b"error" in members)
    if members.get(b"id") == b"1" and not asks and b"jsonrpc" not in members:
        # Ours: nothing that bears the id may leave the caller waiting.
        assert isinstance(event, ResponseEvent) or b"method" in members
    if answers:
        assert isinstance(event, (ResponseEvent, Ignored))
        assert isinstance(event, ResponseEvent) == (members.get(b"id") == b"1")
    if isinstance(event, ResponseEvent):
        assert event.call == "call 1"
        assert (event.result is None) != (event.error is None)
        assert not made.calls
    if isinstance(event, (RequestEvent, NotificationEvent, UpdateEvent)):
        assert asks
        assert isinstance(event, RequestEvent) == (b"id" in members)


_TOLD = st.sampled_from(
    [
        *(
            b'{"method":"session/update","params":{"sessionId":"a","update":{"n":%d}}}' % n
            for n in (1, 2)
        ),
        b'{"jsonrpc":"2.0","method":"session/update","params":{"update":{},"sessionId":"b"}}',
        b'{"method":"session/update","params":{"update":{}}}',
        b'{"method":"session/update","params":{"sessionId":"a"}}',
        b'{"method":"session/update","params":null}',
        b'{"method":"session/update"}',
        b'{"method":"session/update","params":{"sessionId":"a","update":"\\ud800"}}',
        b'{"method":"session/update","params":{"sessionId":7,"update":{}}}',
        b'{"id":5,"method":"session/update","params":{"sessionId":"a","update":{}}}',
        b'{"jsonrpc":"1.0","method":"session/update","params":{"sessionId":"a","update":{}}}',
        b'{"method":"x/y","params":{"sessionId":"a","update":{}}}',
        b'{"id":5,"method":"x/y","params":{"sessionId":"a","update":{}}}',
        b'{"id":1,"result":{"sessionId":"a","update":{}}}',
        b'{"id":1,"error":{"code":-32000,"message":"m"}}',
        b'{"id":1,"result":' + b"[" * 300 + b"]" * 300 + b"}",
        b"{}",
        b"noise",
        Fault("frame_too_large", 9, b"{", b"}"),
    ]
)


@given(st.lists(_TOLD, max_size=12))
def test_updates_that_come_together_are_those_that_come_one_by_one(
    frames: list[bytes | Fault],
) -> None:
    def seen(event: Event) -> Any:
        if isinstance(event, UpdateEvent):
            route: Any = event.params
            return route.sessionId, bytes(route.update)
        return type(event), [
            bytes(part) if isinstance(part, msgspec.Raw) else repr(part)
            for part in msgspec.structs.astuple(event)
        ]

    def one(made: Protocol, frame: bytes | Fault) -> Event:
        return made.receive_frame(frame) if isinstance(frame, bytes) else made.receive_fault(frame)

    single, together = with_calls("client", 1), with_calls("client", 1)
    found: list[Any] = []
    at = 0
    while at < len(frames):
        event = one(together, frames[at])
        at += 1
        found.append(seen(event))
        if isinstance(event, UpdateEvent):
            session_id = found[-1][0]
            updates = together.updates_behind(event, frames, at)
            assert bytes(updates[0]) == found[-1][1]
            found += [(session_id, bytes(update)) for update in updates[1:]]
            at += len(updates) - 1

    assert found == [seen(one(single, frame)) for frame in frames]


def test_updates_of_one_session_are_taken_together_up_to_the_first_that_is_none() -> None:
    made = with_calls("client", 1)
    frames = [
        b'{"method":"session/update","params":{"sessionId":"%s","update":{"n":%d}}}' % (s, n)
        for n, s in enumerate((b"a", b"a", b"a", b"b"))
    ]

    first = made.receive_frame(frames[0])
    assert isinstance(first, UpdateEvent)

    assert [bytes(u) for u in made.updates_behind(first, frames, 1)] == [
        b'{"n":0}',
        b'{"n":1}',
        b'{"n":2}',
    ]


@given(
    st.lists(
        st.sampled_from(
            [
                b'"method":"session/update"',
                b'"method":"session/request_permission"',
                b'"method":7',
                b'"params":{"sessionId":"s","update":{"sessionUpdate":"plan"}}',
                b'"params":{"sessionId":"s","options":[[[[[[]]]]]]}',
                b'"params":null',
                b'"params":"\\ud800"',
                b'"id":1',
                b'"id": "a"',
                b'"id":null',
                b'"id":1.5',
                b'"id":{"a":[[[[[[[[]]]]]]]]}',
                b'"result":{}',
                b'"error":{"code":-1,"message":"no"}',
                b'"jsonrpc":"1.0"',
                b'"other":[}',
            ]
        ),
        max_size=4,
    ),
    st.sampled_from([b'{"jsonrpc":"2.0",', b'{"jsonrpc": "2.0", ', b"{"]),
    st.sampled_from([2, 6, 128]),
)
def test_what_shows_its_id_first_is_told_as_from_everywhere_else_in_a_frame(
    members: list[bytes], begin: bytes, depth: int
) -> None:
    """The member it begins with decides which decoder looks first, and nothing else."""
    frame = begin + b",".join(members) + b"}"

    def told() -> Any:
        made = with_calls("client", 2, json_depth=depth)
        event: Any = made.receive_frame(frame)
        parts = [getattr(event, name) for name in event.__struct_fields__]
        if isinstance(event, UpdateEvent):
            route: Any = event.params
            parts[0] = route.sessionId, bytes(route.update)
        return (
            type(event),
            [bytes(part) if isinstance(part, msgspec.Raw) else repr(part) for part in parts],
            made.calls,
        )

    found = told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_protocol, "_WITH_ID", b"no frame begins like this")
        assert told() == found


def test_only_what_is_no_frame_ends_a_look_ahead_with_a_type_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = with_calls("client", 1)
    update = b'{"method":"session/update","params":{"sessionId":"a","update":{}}}'
    first = made.receive_frame(update)
    assert isinstance(first, UpdateEvent)
    fault = Fault("frame_too_large", 9, b"{", b"}")
    assert len(made.updates_behind(first, [update, update, fault, update], 1)) == 2

    def mistaken(_frame: bytes) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(_protocol, "_decode_update", mistaken)
    with pytest.raises(TypeError, match="ours"):
        made.updates_behind(first, [update, update], 1)


def test_a_frame_that_was_looked_at_ahead_is_not_kept() -> None:
    made = with_calls("client", 1)
    update = b'{"method":"session/update","params":{"sessionId":"a","update":{}}}'
    frames = [update, b'{"id":1,"result":"%s"}' % (b"x" * 5000)]
    counted = sys.getrefcount(frames[1])

    first = made.receive_frame(frames[0])
    assert isinstance(first, UpdateEvent)
    assert len(made.updates_behind(first, frames, 1)) == 1
    answer = made.receive_frame(frames[1])
    assert isinstance(answer, ResponseEvent)
    del answer

    left = sys.getrefcount(frames[1])
    assert left == counted


# --- ids of the peer's requests ------------------------------------------------------------------

LEGAL_IDS = [
    b"0",
    b"-1",
    b"1",
    b"-0",
    b"9007199254740992",
    b"9007199254740993",
    b"-9223372036854775808",
    b"18446744073709551616",
    b"9" * 100,
    b'""',
    b'"1"',
    b'"6f1c-4b"',
    '"ünï€😀"'.encode(),
    b'"\\u00fc\\n\\/"',
    b'" "',
    b'"null"',
]


@pytest.mark.covers("R1-6")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("id_", LEGAL_IDS)
def test_an_id_is_echoed_byte_for_byte(side: Side, id_: bytes) -> None:
    made = protocol(side)
    event = made.receive_frame(b'{"id":%s,"method":"x"}' % id_)
    assert isinstance(event, RequestEvent)

    assert made.open(event.id, "one")
    assert made.result(event.id, b"{}") == b'{"jsonrpc":"2.0","id":%s,"result":{}}' % id_
    assert made.open(event.id, "two")
    frame = made.error(event.id, -32603, "Internal error")
    assert frame is not None
    assert frame.startswith(b'{"jsonrpc":"2.0","id":%s,"error":{' % id_)


def test_ids_that_only_look_alike_are_different() -> None:
    made = protocol()

    assert all(made.open(id_, id_) for id_ in (b"1", b'"1"', b'""', b"0", b"-1", b'"a"', b'"A"'))
    assert made.request_of(b"1") == b"1"
    assert made.request_of(b'"1"') == b'"1"'
    assert made.request_of(b"1.0") is None
    assert made.request_of(b"true") is None


@pytest.mark.covers("R1-6")
def test_an_id_in_flight_is_not_opened_again_and_is_free_after_its_answer() -> None:
    made = protocol()
    assert made.open(b'"a"', "first")

    assert not made.open(b'"a"', "second")
    assert not made.open(b'"\\u0061"', "the same, escaped")
    assert made.is_open(b'"\\u0061"')
    assert made.request_of(b'"a"') == "first"
    assert made.result(b'"a"', b"1") is not None
    assert not made.is_open(b'"a"')
    assert made.open(b'"a"', "third")


def test_a_request_gets_one_response_whichever_comes_first() -> None:
    made = protocol()
    for first in ("result", "error"):
        assert made.open(b"1", "call")
        if first == "result":
            assert made.result(b"1", b"{}") is not None
        else:
            assert made.error(b"1", -32800, "Request cancelled") is not None

        assert made.result(b"1", b"{}") is None
        assert made.error(b"1", -32603, "Internal error") is None


@pytest.mark.parametrize(
    "id_", [b"null", b"1.5", b"{}", b"[[1]]", b'"\xff"', b'"\xff\\n"', b"true"]
)
def test_a_request_is_not_looked_up_by_an_illegal_id(id_: bytes) -> None:
    made = protocol()
    made.open(b"1", "call")

    assert made.request_of(id_) is None


def test_a_lone_surrogate_in_a_request_is_repaired_and_the_request_answered() -> None:
    frame = b'{"id":6,"method":"session/prompt","params":{"text":"\\ud800","ok":"\\ud83d\\ude00"}}'

    event = protocol().receive_frame(frame)

    assert isinstance(event, RequestEvent)
    assert event.params is not None
    assert json.loads(bytes(event.params)) == {"text": "\ufffd", "ok": "😀"}


def test_a_lone_surrogate_in_an_update_is_repaired() -> None:
    frame = b'{"method":"session/update","params":{"sessionId":"s","update":{"text":"\\udc00!"}}}'

    event = protocol("client").receive_frame(frame)

    assert isinstance(event, NotificationEvent)
    assert event.params is not None
    assert json.loads(bytes(event.params)) == {"sessionId": "s", "update": {"text": "\ufffd!"}}


def test_bad_utf8_in_a_method_is_an_unknown_method_and_not_an_error_of_the_envelope() -> None:
    event = protocol().receive_frame(b'{"id":1,"method":"\xff"}')

    assert isinstance(event, RequestEvent)
    assert event.method == "\ufffd"


# --- our calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_our_ids_count_from_one_and_our_frames_are_whole(side: Side) -> None:
    made = protocol(side)

    assert made.request("x/y", b'{"a":1}', "one") == (
        b"1",
        b'{"jsonrpc":"2.0","id":1,"method":"x/y","params":{"a":1}}',
    )
    assert made.request('q"é', None, "two") == (
        b"2",
        '{"jsonrpc":"2.0","id":2,"method":"q\\"é"}'.encode(),
    )
    assert made.notification("x/y", None) == b'{"jsonrpc":"2.0","method":"x/y"}'
    assert made.notification("x/y", b"[1]") == b'{"jsonrpc":"2.0","method":"x/y","params":[1]}'
    assert list(made.calls.values()) == ["one", "two"]


class _Told(msgspec.Struct, omit_defaults=True):
    text: str
    more: Any = None


@given(st.text(), st.sampled_from(["session/prompt", '_a/\u00e9"b']))
def test_parameters_that_are_no_bytes_yet_make_the_same_frame(text: str, method: str) -> None:
    given_bytes, given_struct = protocol("client"), protocol("client")
    params = _Told(text + "\u2028\ud83d")

    for _ in range(2):
        assert given_struct.request(method, params, "c") == given_bytes.request(
            method, encode_checked(params), "c"
        )


def test_parameters_that_are_no_json_open_no_call_and_are_named() -> None:
    made = protocol("client")

    with pytest.raises(ValueError, match=r"^_Told\.more is NaN"):
        made.request("x/y", _Told("a", float("nan")), "c")
    with pytest.raises(TypeError, match="object is no JSON value"):
        made.request("x/y", _Told("a", object()), "c")

    assert not made.calls


@pytest.mark.covers("R1-6")
@pytest.mark.parametrize("side", SIDES)
def test_the_two_directions_have_ids_of_their_own(side: Side) -> None:
    made = with_calls(side, 1)

    request = made.receive_frame(b'{"id":1,"method":"x"}')
    assert isinstance(request, RequestEvent)
    assert made.open(request.id, "theirs")
    response = answer(made.receive_frame(b'{"id":1,"result":"ours"}'))

    assert response.call == "call 1"
    assert made.request_of(b"1") == "theirs"
    assert made.result(b"1", b'"theirs"') == b'{"jsonrpc":"2.0","id":1,"result":"theirs"}'


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "members",
    [
        b'"jsonrpc":"2.0","id":1,"result":{"a": 1}',
        b'"jsonrpc":"2.0","result":{"a": 1},"id":1',
        b'"result" : {"a": 1} , "id" : 1',
        b'"id":1,"result":{"a": 1},"error":null',
        b'"id":1,"result":{"a": 1},"error":{"code":1,"message":"m"}',
        b'"id":1,"result":{"a": 1},"method":null,"params":null',
    ],
)
def test_an_answer_gives_its_raw_result_to_its_call(side: Side, members: bytes) -> None:
    made = with_calls(side, 2)

    response = answer(made.receive_frame(b"{" + members + b"}"))

    assert (response.call, response.error) == ("call 1", None)
    assert response.result is not None
    assert bytes(response.result) == b'{"a": 1}'
    assert list(made.calls) == [b"2"]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("members", [b'"id":1,"result":null', b'"id":1'])
def test_a_null_result_and_one_left_out_are_a_result(side: Side, members: bytes) -> None:
    response = answer(with_calls(side, 1).receive_frame(b"{" + members + b"}"))

    assert response.error is None
    assert response.result is not None
    assert bytes(response.result) == b"null"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "error",
    [
        b'{"code":-32002,"message":"gone","data":{"uri":"x"}}',
        b'{"data":{"uri":"x"},"message":"gone","code":-32002,"more":[]}',
    ],
)
@pytest.mark.parametrize("result", [b"", b'"result":null,'])
def test_an_error_answer_becomes_the_exception_for_its_code(
    side: Side, error: bytes, result: bytes
) -> None:
    made = with_calls(side, 1)

    response = answer(made.receive_frame(b'{"id":1,' + result + b'"error":' + error + b"}"))

    assert response.result is None
    assert isinstance(response.error, ResourceNotFound)
    assert (response.error.code, response.error.message) == (-32002, "gone")
    assert response.error.data == {"uri": "x"}


@pytest.mark.covers("R1-14")
@pytest.mark.parametrize("code", [12345, 400, 0, 1, -1, -32099, -(2**31), 2**40])
def test_an_error_code_that_nobody_knows_is_a_general_request_error(code: int) -> None:
    made = with_calls("client", 1)

    response = answer(made.receive_frame(b'{"id":1,"error":{"code":%d,"message":"m"}}' % code))

    assert type(response.error) is RequestError
    assert response.error.code == code


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'"text"', "text"),
        (b"[1,null]", [1, None]),
        (b"null", None),
        (b"0", 0),
        (b'{"a":"\\ud800"}', {"a": "\ufffd"}),
        (b'"\xff"', "\ufffd"),
        (b"9" * 5000, None),  # malformed data is dropped, the cause is kept
        (b"[" * 300 + b"]" * 300, "deep"),
    ],
)
def test_the_data_of_an_error_may_be_any_json(data: bytes, expected: Any) -> None:
    made = with_calls("client", 1, json_depth=1000)

    response = answer(
        made.receive_frame(b'{"id":1,"error":{"code":-32603,"message":"m","data":%s}}' % data)
    )

    assert isinstance(response.error, RequestError)
    assert (response.error.code, response.error.message) == (-32603, "m")
    if expected == "deep":
        assert isinstance(response.error.data, list)
    else:
        assert response.error.data == expected


@pytest.mark.covers("R1-1")
def test_bad_utf8_in_an_error_answer_is_repaired() -> None:
    made = with_calls("client", 1)

    response = answer(made.receive_frame(b'{"id":1,"error":{"code":-1,"message":"caf\xe9"}}'))

    assert isinstance(response.error, RequestError)
    assert response.error.message == "caf\ufffd"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "error",
    [
        b"null",
        b'"no such model"',
        b"[]",
        b"{}",
        b'{"code":-32603}',
        b'{"message":"no such model"}',
        b'{"code":"x","message":"no such model"}',
        b'{"code":true,"message":"m"}',
        b'{"code":1.5,"message":"m"}',
        b'{"code":1,"message":null}',
        b"5",
    ],
)
def test_a_malformed_error_fails_its_caller_and_says_what_came(side: Side, error: bytes) -> None:
    made = with_calls(side, 1)

    response = answer(made.receive_frame(b'{"id":1,"error":' + error + b"}"))

    assert isinstance(response.error, RemoteProtocolError)
    assert error.decode() in str(response.error)
    assert not made.calls


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "members",
    [
        b'"jsonrpc":"1.0","id":1,"result":{}',
        b'"jsonrpc":null,"id":1,"result":{"n":%s}' % (b"9" * 5000),
        b'"jsonrpc":2,"id":1,"error":{"code":1,"message":"m"}',
    ],
)
def test_a_malformed_answer_fails_its_caller_and_is_never_answered(
    side: Side, members: bytes
) -> None:
    made = with_calls(side, 1)

    response = answer(made.receive_frame(b"{" + members + b"}"))

    assert isinstance(response.error, RemoteProtocolError)
    assert isinstance(made.receive_frame(b"{" + members + b"}"), Ignored)


@pytest.mark.covers("R1-16")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    [
        b'{"id":"1","result":{}}',
        b'{"id":1.0,"result":{}}',
        b'{"id":1e0,"result":{}}',
        b'{"id":true,"result":{}}',
        b'{"id":[1],"result":{}}',
        b'{"id":2,"result":{}}',
        b'{"id":0,"result":{}}',
        b'{"id":-1,"error":{"code":1,"message":"m"}}',
        b'{"id":null,"error":{"code":-32602,"message":"m"}}',
        b'{"id":null,"result":{}}',
        b'{"error":{"code":-32600,"message":"m"}}',
        b'{"result":{}}',
        b'{"id":2,"error":5}',
        b'{"jsonrpc":"1.0","id":"1","result":{}}',
    ],
)
def test_an_answer_with_another_id_is_ignored(side: Side, frame: bytes) -> None:
    made = with_calls(side, 1)

    assert isinstance(made.receive_frame(frame), Ignored)
    assert list(made.calls) == [b"1"]


@pytest.mark.covers("R1-16")
def test_a_second_answer_is_ignored() -> None:
    made = with_calls("client", 1)
    answer(made.receive_frame(b'{"id":1,"result":{}}'))

    assert isinstance(made.receive_frame(b'{"id":1,"result":{}}'), Ignored)


def test_an_abandoned_call_is_cancelled_at_the_peer_once_and_its_late_answer_ignored() -> None:
    made = with_calls("client", 2)

    assert made.abandon(b"1") == (
        b'{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":1}}'
    )
    assert made.abandon(b"1") is None
    assert isinstance(made.receive_frame(b'{"id":1,"result":{}}'), Ignored)
    assert list(made.calls) == [b"2"]


def test_closing_gives_the_calls_that_get_no_answer_oldest_first_and_forgets_all() -> None:
    made = with_calls("client", 3)
    answer(made.receive_frame(b'{"id":2,"result":{}}'))
    made.open(b"1", "theirs")

    assert made.close() == ["call 1", "call 3"]
    assert made.close() == []
    assert made.result(b"1", b"{}") is None
    assert isinstance(made.receive_frame(b'{"id":1,"result":{}}'), Ignored)


# --- limits --------------------------------------------------------------------------------------


def test_a_frame_of_exactly_the_limit_is_sent_and_one_byte_more_is_refused() -> None:
    room = len(b'{"jsonrpc":"2.0","id":1,"method":"x","params":""}')
    made = protocol(frame_bytes=room + 10)
    made.request("x", b'"%s"' % (b"y" * 10), "fits")

    with pytest.raises(LimitExceeded) as caught:
        made.request("x", b'"%s"' % (b"y" * 11), "does not")

    assert (caught.value.limit, caught.value.maximum) == ("frame_bytes", room + 10)
    assert caught.value.size == room + 11
    assert list(made.calls.values()) == ["fits"]
    assert made.request("x", None, "next")[0] == b"3"


def test_a_notification_over_the_limit_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        protocol(frame_bytes=100).notification("x", b'"%s"' % (b"y" * 100))


def test_a_result_over_the_limit_leaves_the_request_open_for_an_error() -> None:
    made = protocol(frame_bytes=100)
    made.open(b"1", "call")

    with pytest.raises(LimitExceeded):
        made.result(b"1", b'"%s"' % (b"y" * 100))

    assert made.is_open(b"1")
    assert made.error(b"1", -32603, "Internal error") is not None


def test_an_error_over_the_limit_goes_without_its_data_and_the_end_of_its_message() -> None:
    made = protocol(frame_bytes=1000)
    made.open(b"1", "call")
    made.open(b"2", "call")

    without_data = made.error(b"1", -32000, "short", {"long": "y" * 1000})
    shortened = made.error(b"2", -32000, "long" * 1000)

    assert without_data == b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"short"}}'
    assert shortened is not None
    assert len(shortened) < 1000


@pytest.mark.parametrize("data", [float("nan"), object(), {"a": {1: object()}}, [float("inf")]])
def test_an_error_whose_data_is_no_json_leaves_the_request_open(data: Any) -> None:
    made = protocol()
    made.open(b"1", "call")

    with pytest.raises((TypeError, ValueError)):
        made.error(b"1", -32000, "m", data)

    assert made.is_open(b"1")


def test_a_lone_surrogate_in_an_error_is_replaced() -> None:
    frame = error_frame(b"1", -32002, "no \udcff.txt", {"na\udcffme": "\ud83d\ude00"})

    assert json.loads(frame)["error"] == {
        "code": -32002,
        "message": "no \ufffd.txt",
        "data": {"na\ufffdme": "😀"},
    }


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("side", SIDES)
def test_nesting_of_exactly_the_limit_passes_and_one_more_is_refused(side: Side) -> None:
    made = protocol(side)  # the envelope is a level of its own

    assert isinstance(
        made.receive_frame(b'{"id":1,"method":"x","params":%s}' % nested(255)), RequestEvent
    )
    event = made.receive_frame(b'{"id":1,"method":"x","params":%s}' % nested(256))

    assert code_and_id(event) == (-32600, 1)
    assert reply_of(event)["error"]["data"] == {"reason": "too_deep", "limit": 256}
    assert isinstance(made.receive_frame(GOOD), RequestEvent)


def test_brackets_in_text_do_not_nest() -> None:
    text = b'{"id":1,"method":"x","params":"%s \\" %s"}' % (b"[" * 1000, b"{" * 1000)

    assert isinstance(protocol().receive_frame(text), RequestEvent)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("depth", [300, 2000, 100_000])
@pytest.mark.parametrize(
    "members",
    [
        (b'"jsonrpc":"2.0","id":"a","method":"x","params":', b""),
        (b'"method":"x","params":', b',"id":"a"'),
        (b'"params":', b',"method":"x","jsonrpc":"2.0","id":"a"'),
        (b'"id":"a","params":', b',"method":"x"'),
    ],
)
def test_a_request_that_nests_too_deeply_is_answered_with_its_id(
    side: Side, depth: int, members: tuple[bytes, bytes]
) -> None:
    frame = b"{" + members[0] + nested(depth) + members[1] + b"}"

    assert code_and_id(protocol(side).receive_frame(frame)) == (-32600, "a")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("depth", [300, 2000, 100_000])
@pytest.mark.parametrize(
    "members",
    [
        (b'"jsonrpc":"2.0","id":1,"result":', b""),
        (b'"result":', b',"id":1'),
        (b'"id":1,"error":{"code":-1,"message":"m","data":', b"}"),
        (b'"_meta":', b',"result":{},"id":1'),
    ],
)
def test_an_answer_that_nests_too_deeply_fails_its_call(
    side: Side, depth: int, members: tuple[bytes, bytes]
) -> None:
    made = with_calls(side, 1)

    response = answer(made.receive_frame(b"{" + members[0] + nested(depth) + members[1] + b"}"))

    assert response.call == "call 1"
    assert isinstance(response.error, LimitExceeded)
    assert response.error.limit == "json_depth"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    [
        b"[" * 100_000,
        nested(100_000),
        b'{"a":' * 100_000,
        b'{"id":1,"\\ud800":' + nested(100_000) + b',"x":"' + b"y" * (1 << 20) + b'"}',
        b'{"jsonrpc":"1.0","id":7,"result":' + nested(100_000) + b"}",
    ],
)
def test_absurd_nesting_is_refused_without_an_id(side: Side, frame: bytes) -> None:
    made = protocol(side)

    assert code_and_id(made.receive_frame(frame)) == (-32700, None)
    assert isinstance(made.receive_frame(GOOD), RequestEvent)


# --- what stands for a frame over the limit ------------------------------------------------------

FILL = b"x" * 20_000


def fault(frame: bytes) -> Fault:
    assert json.loads(frame)
    return Fault("frame_too_large", len(frame), frame[:4096], frame[-4096:])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    [
        b'{"jsonrpc":"2.0","id":"a\\"","method":"x","params":{"t":"%s"}}' % FILL,
        b'{ "method" : "x", "n": -1.5e3, "params" : {"t":"%s"} , "id" : "a\\"" }' % FILL,
        b'{"params":["%s"],"method":"x","ok":true,"no":null,"id":"a\\"","jsonrpc":"2.0"}' % FILL,
        b'{"id":"a\\"","params":["%s"],"method":"x"}' % FILL,
        b'{"id":"a\\"","method":"x","params":{"id":5,"t":"%s","id":6}}' % FILL,
    ],
)
def test_a_request_over_the_limit_is_answered_with_its_id(side: Side, frame: bytes) -> None:
    made = with_calls(side, 6)

    event = made.receive_fault(fault(frame))

    assert code_and_id(event) == (-32600, 'a"')
    assert reply_of(event)["error"]["data"] == {"reason": "frame_too_large", "limit": 1 << 24}
    assert len(made.calls) == 6


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    [
        b'{"jsonrpc":"2.0","id":1,"result":{"t":"%s"}}' % FILL,
        b'{"result":{"t":"%s"},"id":1}' % FILL,
        b'{"result":"%s", "jsonrpc" : "2.0" , "id" : 1 }' % FILL,
        b'{"id":1,"error":{"code":1,"message":"%s"}}' % FILL,
        b'{"_meta":["%s"],"result":{},"id":1}' % FILL.replace(b"x", b"\\u00fc"),
        b'{"id":1,"result":{"t":"%s","method":"x","id":2},"more":[]}' % FILL,
    ],
)
def test_an_answer_over_the_limit_fails_its_call(side: Side, frame: bytes) -> None:
    made = with_calls(side, 2)

    response = answer(made.receive_fault(fault(frame)))

    assert response.call == "call 1"
    assert isinstance(response.error, LimitExceeded)
    assert (response.error.limit, response.error.size) == ("frame_bytes", len(frame))
    assert list(made.calls) == [b"2"]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "frame",
    [
        b'{"id":7,"result":{"t":"%s"}}' % FILL,
        b'{"id":"1","result":{"t":"%s"}}' % FILL,
        b'{"id":1.0,"result":{"t":"%s"}}' % FILL,
        b'{"result":{"t":"%s","id":1}}' % FILL,
        b'{"result":["%s",{"a":0,"id":1}]}' % FILL,
        b'{"result":["%s"],"t":",\\"id\\":1}","u":[]}' % FILL,
        b'{"params":["%s"],"id":1,"method":"x","_meta":{}}' % FILL,  # somebody's request
        b'{"id":1,"params":["%s"],"method":"x","_meta":{}}' % FILL,
        b'{"method":"session/update","params":{"t":"%s"}}' % FILL,
        b'{"_meta":["%s"],"id":1,"result":["%s"]}' % (FILL, FILL),
        b'["%s"]' % FILL,
        b'"%s"' % FILL,
    ],
)
def test_what_names_no_open_call_for_certain_fails_none(side: Side, frame: bytes) -> None:
    made = with_calls(side, 2)

    assert code_and_id(made.receive_fault(fault(frame))) == (-32700, None)
    assert len(made.calls) == 2


@pytest.mark.parametrize("text", [b"", b"\xff" * 4096, b"[" * 4096, b'"' * 4096, b'{"a":"' * 600])
def test_a_fault_of_any_bytes_is_refused(text: bytes) -> None:
    event = protocol("client").receive_fault(Fault("frame_too_large", 1 << 25, text, text))

    assert code_and_id(event) == (-32700, None)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text('",:{}[]\\i d1', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('",:{}i\\d', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["id", "a", ',"id":1', "b\\"]) | st.text(max_size=3), _JSON))
def test_what_is_found_at_the_ends_are_members_of_the_outermost_object(
    value: dict[str, Any],
) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    for start in range(len(text) + 1):
        found = re.search(_TAIL, text[start:])
        if found:
            part = json.loads(b"{" + found[1][1:] + b"}")
            assert part.items() <= value.items()
        head = re.match(_HEAD, text[:start])
        if head and head[1]:
            part = json.loads(b"{" + head[1][:-1] + b"}")
            assert part.items() <= value.items()


def test_the_result_of_a_large_answer_is_not_copied_to_classify_it() -> None:
    made = with_calls("client", 1)
    frame = b'{"id":1,"result":"%s"}' % (b"x" * (1 << 20))

    response = answer(made.receive_frame(frame))

    # msgspec's raw values point into their message.
    assert isinstance(response.result, msgspec.Raw)
    assert len(response.result) == (1 << 20) + 2


@pytest.mark.covers("R1-6")
@pytest.mark.parametrize(
    "frame",
    [
        b'{"id":4,"method":7}',
        b'{"id":4}',
        b'{"id":4,"method":"m","jsonrpc":"1.0"}',
        b'{"id":4,"method":"m","params":%s}' % (b"[" * 300 + b"]" * 300),
    ],
)
def test_a_frame_that_is_refused_takes_no_answer_from_a_request_with_its_id(frame: bytes) -> None:
    """That id gets exactly one response, from its handler; without it the refusal names the id."""
    protocol = Protocol("agent", Limits(), json_depth_exceeds)
    assert code_and_id(protocol.receive_frame(frame))[1] == 4

    assert protocol.open(b"4", object())
    event = protocol.receive_frame(frame)

    assert code_and_id(event) == (-32600, None)
    assert isinstance(event, Refusal)
    assert event.facts["id"] == "4"
    assert protocol.result(b"4", b"{}") is not None
    assert code_and_id(protocol.receive_frame(frame))[1] == 4
