"""Tests of antiphon.schema._codec: what comes in decodes or says why not, what goes out is JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import strategies

from antiphon.schema import (
    UNSET,
    FieldError,
    Repair,
    Unknown,
    UnknownUpdate,
    _codec,
    decode,
    decode_params,
    decode_reporting,
    decode_result,
    decode_update,
    decoder,
    encode,
    encode_checked,
    loads,
    params_decoder,
    refuse_non_finite,
    v1,
    v1_unstable,
)
from antiphon.schema._report import is_array, is_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK: Final = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%b"}}'
DEEP: Final = b"[" * 100_000 + b"]" * 100_000


# --- decoding


def test_decoder_is_made_once_per_type() -> None:
    assert decoder(v1.PromptRequest) is decoder(v1.PromptRequest)
    assert decoder(v1.PromptRequest)(b'{"sessionId":"s","prompt":[]}') == v1.PromptRequest(
        session_id="s", prompt=[]
    )


def test_strict_path_alone_handles_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def forgive(kind: Any, raw: Any, *, lax: bool = False) -> Any:
        calls.append(bytes(raw))
        return None, ()

    monkeypatch.setattr(_codec, "_decode_forgiving", forgive)

    decode(v1.NewSessionRequest, b'{"cwd":"/","mcpServers":[],"zzz":{"a":[1]}}')
    decode_reporting(v1.NewSessionResponse, b'{"sessionId":"s","modes":null}')
    decode_result(v1.LoadSessionResponse, b" null ")
    decode_params(v1.LogoutRequest, None)
    decode_update(CHUNK % b"x")

    assert calls == []


@pytest.mark.covers("R1-13")
@pytest.mark.parametrize(
    ("kind", "text", "path"),
    [
        (v1.PromptRequest, b'{"prompt":[]}', "$.sessionId"),
        (v1.PromptRequest, b'{"sessionId":5,"prompt":[]}', "$.sessionId"),
        (v1.PromptRequest, b'{"sessionId":"s","prompt":"x"}', "$.prompt"),
        (v1.PromptRequest, b'{"sessionId":"s","prompt":[{"type":"hologram"}]}', "$.prompt[0].type"),
        (v1.NewSessionRequest, b'{"mcpServers":[]}', "$.cwd"),
        (
            v1.NewSessionRequest,
            b'{"cwd":"/","mcpServers":[{"name":"n"}]}',
            "$.mcpServers[0].command",
        ),
        (v1.InitializeRequest, b'{"protocolVersion":"1"}', "$.protocolVersion"),
        (v1.InitializeRequest, b'{"protocolVersion":65536}', "$.protocolVersion"),
        (v1.ReadTextFileRequest, b'{"sessionId":"s","path":"/","line":-1}', "$.line"),
        (v1.CreateTerminalRequest, b'{"sessionId":"s","command":"c","args":[1]}', "$.args[0]"),
        (v1.CreateTerminalRequest, b'{"sessionId":"s","command":"c","cwd":1}', "$.cwd"),
        (v1.RequestPermissionResponse, b'{"outcome":{"outcome":"allowed"}}', "$.outcome.outcome"),
        (v1.RequestPermissionResponse, b'{"outcome":"selected"}', "$.outcome"),
        (v1.PromptResponse, b'{"stopReason":5}', "$.stopReason"),
        (v1.ElicitationFormMode, b'{"message":"m","requestedSchema":{}}', "$"),
        (v1.CancelRequestNotification, b'{"requestId":1.0}', "$.requestId"),
    ],
)
def test_bad_required_field_is_named_in_wire_spelling(kind: Any, text: bytes, path: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(kind, text)

    assert isinstance(caught.value, FieldError)
    assert caught.value.path == path
    assert str(caught.value).endswith(f" - at `{path}`")


MARK: Final = "qzx7"


@given(
    st.sampled_from(sorted(strategies.definitions("v1_unstable"))),
    st.recursive(
        st.just(MARK) | st.integers() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.just(MARK) | st.sampled_from(["type", "mode"]), inner, max_size=2)
        ),
        max_leaves=4,
    ),
)
def test_errors_and_reports_hold_nothing_of_the_input(name: str, value: Any) -> None:
    text = json.dumps({"update": value, "sessionId": value, "type": MARK, "prompt": value}).encode()
    kind = strategies.python_type(name, "v1_unstable")
    said = ""
    try:
        _, repairs = decode_reporting(kind, text)
        said = repr(repairs)
    except msgspec.DecodeError as error:
        said = str(error)

    assert MARK not in said


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"sessionId":"s"', b"NaN", b"{'a':1}", b"\xff", b"[1]x"]
)
def test_what_is_no_json_is_refused_as_such(text: bytes) -> None:
    for kind in (v1.PromptRequest, Any, v1_unstable.SessionUpdate):
        with pytest.raises(msgspec.DecodeError) as caught:
            decode(kind, text)
        assert not isinstance(caught.value, msgspec.ValidationError)
    with pytest.raises(msgspec.DecodeError):
        decode_update(text)


def test_absurd_nesting_is_refused_and_nothing_else_happens() -> None:
    for kind in (v1.PromptRequest, Any):
        with pytest.raises(msgspec.DecodeError, match="nests too deeply"):
            decode(kind, b'{"sessionId":"s","prompt":[],"_meta":{"a":' + DEEP + b"}}")
    update = decode_update(b'{"sessionUpdate":"agent_message_chunk","_meta":' + DEEP + b"}")

    assert isinstance(update, UnknownUpdate)
    assert update.reason == "JSON nests too deeply"


def test_lone_surrogates_and_bad_utf8_are_mended_and_reported() -> None:
    text = (
        rb'{"sessionId":"\ud800","prompt":[{"type":"text","text":"\ud83d\ude00 \udc00 '
        b'\xff"}]}'
    )
    value, repairs = decode_reporting(v1.PromptRequest, text)

    assert value == v1.PromptRequest(
        session_id="\ufffd", prompt=[v1.TextContent(text="😀 \ufffd \ufffd")]
    )
    assert repairs == (Repair("$", "Text that is no Unicode was replaced by U+FFFD"),)


def test_text_is_mended_also_where_a_field_is_wrong_and_a_number_too_large() -> None:
    text = rb'{"cwd":"\ud800","mcpServers":null,"_meta":{"a":1e999},"additionalDirectories":["x"]}'
    value, repairs = decode_reporting(v1.NewSessionRequest, text)

    assert value == v1.NewSessionRequest(cwd="\ufffd", mcp_servers=[], additional_directories=["x"])
    assert [repair.path for repair in repairs] == ["$", "$.mcpServers", "$._meta[...]"]


@pytest.mark.parametrize("number", [b"1e999", b"-1E400", b"9" * 5000])
def test_number_that_python_does_not_hold_costs_its_field_only(number: bytes) -> None:
    text = b'{"name":"n","version":"1","_meta":{"big":[%b]},"title":"t"}' % number
    value, repairs = decode_reporting(v1.Implementation, text)

    assert value == v1.Implementation(name="n", version="1", title="t")
    assert repairs == (Repair("$._meta[...]", "Number out of range"),)
    with pytest.raises(msgspec.ValidationError, match="Number out of range"):
        loads(text)


def test_large_integers_stay_exact() -> None:
    text = b'{"name":"n","version":"1","_meta":{"big":%b}}' % (b"9" * 60)

    assert decode(v1.Implementation, text).meta == {"big": int("9" * 60)}


def test_repairs_are_logged_at_debug_level_where_they_are_not_returned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "antiphon.schema")

    decode(v1.Implementation, b'{"name":"n","version":"1","title":5}')

    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert caplog.messages == ["Implementation: Expected `str`, got `int` at $.title"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, msgspec.Raw])
def test_every_kind_of_buffer_is_read(kind: Any) -> None:
    assert decode(v1.SessionMode, kind(b'{"id":"i","name":"n"}')).id == "i"
    assert decode(v1.SessionMode, kind(rb'{"id":"\ud800","name":"n"}')).id == "\ufffd"
    assert decode_update(kind(CHUNK % b"x")) == decode_update(CHUNK % b"x")
    assert decode_result(v1.LogoutResponse, kind(b"null")) == v1.LogoutResponse()


def test_loads_gives_plain_values_and_mends_text() -> None:
    assert loads(rb'{"a":[1,2.5,null,"\ud800"]}') == {"a": [1, 2.5, None, "\ufffd"]}
    with pytest.raises(msgspec.DecodeError):
        loads(b"{")


# --- results and params


@pytest.mark.covers("FF-31")
@pytest.mark.parametrize("raw", [None, b"null", b" null\n", b"{}"])
def test_null_counts_as_an_empty_result(raw: bytes | None) -> None:
    assert decode_result(v1.WriteTextFileResponse, raw) == v1.WriteTextFileResponse()
    assert decode_result(v1.LoadSessionResponse, raw) == v1.LoadSessionResponse()
    assert decode_result(v1.ListSessionsResponse, raw) == v1.ListSessionsResponse(sessions=[])
    assert decode_result(
        v1.SetSessionConfigOptionResponse, raw
    ) == v1.SetSessionConfigOptionResponse(config_options=[])


def test_result_without_what_cannot_be_guessed_is_refused() -> None:
    for kind, path in ((v1.NewSessionResponse, "$.sessionId"), (v1.PromptResponse, "$.stopReason")):
        with pytest.raises(FieldError) as caught:
            decode_result(kind, None)
        assert caught.value.path == path


def test_missing_list_is_forgiven_in_results_only() -> None:
    with pytest.raises(FieldError, match="sessions"):
        decode(v1.ListSessionsResponse, b"{}")


def test_missing_params_count_as_empty_where_nothing_is_required() -> None:
    assert decode_params(v1.ListSessionsRequest, None) == v1.ListSessionsRequest()
    assert decode_params(v1.ListSessionsRequest, b"null") == v1.ListSessionsRequest()
    with pytest.raises(FieldError, match="sessionId"):
        decode_params(v1.PromptRequest, None)


def test_untyped_null_stays_null() -> None:
    assert decode_result(Any, b"null") is None
    assert decode_result(Any, None) is None
    assert decode_params(Any, b"[null,1]") == loads(b"[null,1]")


# --- session updates


def test_update_of_a_known_kind_is_typed() -> None:
    assert decode_update(CHUNK % b"hi") == v1.AgentMessageChunk(content=v1.TextContent(text="hi"))


def test_the_decoder_of_updates_is_made_by_the_first_and_kept() -> None:
    updates = _codec.StrictUpdates()
    before = updates.decode

    first = updates.decode(CHUNK % b"hi")
    made = updates.decode

    assert first == updates.decode(CHUNK % b"hi") == decode_update(CHUNK % b"hi")
    assert made is updates.decode
    assert made != before
    for decoding in (before, made):
        with pytest.raises(msgspec.DecodeError):
            decoding(b'{"sessionUpdate":"brand_new"}')


@pytest.mark.covers("R1-86", "FF-32")
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"sessionUpdate":"brand_new","a":1.50}', "Unknown variant - at `$.sessionUpdate`"),
        (b'{"sessionUpdate":5}', "Expected `str`, got `int` - at `$.sessionUpdate`"),
        (b"{}", "Missing required field - at `$.sessionUpdate`"),
        (b"null", "Expected `object`, got `null` - at `$`"),
        (b"[ ]", "Expected `object`, got `array` - at `$`"),
        (
            b'{"sessionUpdate":"tool_call","title":"t"}',
            "Missing required field - at `$.toolCallId`",
        ),
        (
            b'{"sessionUpdate":"agent_message_chunk","content":{"type":"hologram"}}',
            "Unknown variant - at `$.content.type`",
        ),
        (b'{"sessionUpdate":"new","a":1e999}', "Unknown variant - at `$.sessionUpdate`"),
        (
            b'{"sessionUpdate":"new","a":%b}' % (b"9" * 5000),
            "Unknown variant - at `$.sessionUpdate`",
        ),
    ],
)
def test_update_that_is_none_of_ours_is_kept_as_it_came(raw: bytes, reason: str) -> None:
    update = decode_update(raw)

    assert update == UnknownUpdate(raw)
    assert isinstance(update, UnknownUpdate)
    assert update.reason == reason
    assert encode(update) == raw
    assert encode(v1.SessionNotification(session_id="s", update=update)) == (
        b'{"sessionId":"s","update":' + raw + b"}"
    )


@given(strategies.untyped_json())
def test_any_json_is_an_update_of_some_kind(value: Any) -> None:
    raw = json.dumps(value).encode()
    update = decode_update(raw)

    assert isinstance(update, UnknownUpdate)
    assert encode(update) == update.raw == raw


def test_text_of_an_unknown_update_is_mended_before_it_is_kept() -> None:
    update = decode_update(rb'{"sessionUpdate":"new","t":"\ud800' + b'\xff"}')

    assert update == UnknownUpdate(
        rb'{"sessionUpdate":"new","t":"\ufffd' + "\ufffd".encode() + b'"}'
    )


def test_notification_keeps_the_text_of_an_unknown_update() -> None:
    raw = b'{"sessionId":"s","update":{"sessionUpdate":"new" , "a":1.50},"_meta":5}'
    value, repairs = decode_reporting(v1_unstable.SessionNotification, raw)

    assert value.update == UnknownUpdate(b'{"sessionUpdate":"new" , "a":1.50}')
    assert value.meta is UNSET
    assert [repair.path for repair in repairs] == ["$.update.sessionUpdate", "$._meta"]


@pytest.mark.covers("R1-156", "FF-32")
def test_tool_call_keeps_everything_but_the_odd_parts() -> None:
    raw = json.dumps(
        {
            "sessionUpdate": "tool_call",
            "toolCallId": "t",
            "title": "T",
            "name": 5,
            "kind": "deploy",
            "status": "cancelled",
            "content": [
                {"type": "content", "content": {"type": "text", "text": "x"}},
                {"type": "hologram"},
                {"type": "content", "content": {"type": "hologram"}},
                {"type": "diff", "path": "/a", "newText": "n", "oldText": None},
            ],
            "locations": [{"path": "/a", "line": 3.0}, {"line": 1}, {"path": "/b", "line": "x"}],
            "rawInput": {"any": [1]},
            "_meta": "bad",
            "future": True,
        }
    ).encode()

    assert decode_update(raw) == v1.ToolCall(
        tool_call_id="t",
        title="T",
        kind="deploy",
        status="cancelled",
        content=[
            v1.Content(content=v1.TextContent(text="x")),
            v1.Diff(path="/a", new_text="n", old_text=None),
        ],
        locations=[v1.ToolCallLocation(path="/a", line=3), v1.ToolCallLocation(path="/b")],
        raw_input={"any": [1]},
    )


def test_mode_update_is_understood_in_the_documentations_spelling() -> None:
    old = b'{"sessionUpdate":"current_mode_update","modeId":"code"}'
    both = b'{"sessionUpdate":"current_mode_update","modeId":"code","currentModeId":"ask"}'

    assert decode_update(old) == v1.CurrentModeUpdate(current_mode_id="code")
    assert decode_update(both) == v1.CurrentModeUpdate(current_mode_id="ask")
    assert isinstance(decode_update(old.replace(b'"code"', b"5")), UnknownUpdate)
    assert decode_reporting(v1.CurrentModeUpdate, old)[1] == (
        Repair("$.currentModeId", "Taken from `modeId`"),
    )


def test_unknown_stop_reason_and_error_code_stay_what_they_are() -> None:
    assert decode(v1.PromptResponse, b'{"stopReason":"error"}').stop_reason == "error"
    assert decode(v1.Error, b'{"code":-31999,"message":"m"}').code == -31999


def test_unknown_elicitation_mode_is_kept_and_is_no_known_one() -> None:
    raw = b'{"mode":"voice","message":"m","sessionId":"s","tone":1}'
    value = decode(v1.CreateElicitationRequest, raw)

    assert value == Unknown(raw)
    assert encode(value) == raw
    assert not isinstance(value, v1.ElicitationFormMode | v1.ElicitationUrlMode)


@pytest.mark.covers("R1-31")
def test_malformed_optional_members_of_initialize_do_not_fail_it() -> None:
    request = decode(
        v1.InitializeRequest,
        b'{"protocolVersion":1,"clientCapabilities":{"fs":"x","terminal":true},"clientInfo":{}}',
    )
    response = decode(
        v1.InitializeResponse,
        b'{"protocolVersion":1,"agentCapabilities":5,"authMethods":[1,{"id":"i","name":"n"}]}',
    )

    assert request == v1.InitializeRequest(
        protocol_version=1, client_capabilities=v1.ClientCapabilities(terminal=True)
    )
    assert response == v1.InitializeResponse(
        protocol_version=1, auth_methods=[v1.AuthMethodAgent(id="i", name="n")]
    )


def test_update_with_thousands_of_bad_items_takes_linear_time() -> None:
    def spent(count: int) -> float:
        raw = b'{"sessionUpdate":"plan","entries":[' + b",".join([b'{"content":1}'] * count) + b"]}"
        begin = time.thread_time()
        assert decode_update(raw) == v1.Plan(entries=[])
        return time.thread_time() - begin

    spent(10)

    # Quadratic time would be 64 times as long; linear 8 times, with room for a busy machine.
    assert min(spent(4000), spent(4000)) < 32 * min(spent(500), spent(500))


# --- absent, null, value


@pytest.mark.covers("FF-31")
def test_absent_null_and_value_are_three_things_both_ways() -> None:
    for update, text in (
        (v1.SessionInfoUpdate(), b'{"sessionUpdate":"session_info_update"}'),
        (v1.SessionInfoUpdate(title=None), b'{"sessionUpdate":"session_info_update","title":null}'),
        (v1.SessionInfoUpdate(title=""), b'{"sessionUpdate":"session_info_update","title":""}'),
    ):
        assert encode(update) == text
        assert decode_update(text) == update


def test_required_lists_are_written_when_empty() -> None:
    assert encode(v1.NewSessionRequest(cwd="/", mcp_servers=[])) == b'{"cwd":"/","mcpServers":[]}'


# --- encoding: text


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("ok \ud83d", "ok \ufffd"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
        (os.fsdecode(b"\xff.txt"), "\ufffd.txt"),
        ("漢\u2028\0\x7f", "漢\u2028\0\x7f"),
    ],
)
def test_text_that_cannot_be_written_is_mended_by_one_rule(text: str, written: str) -> None:
    chunk = v1.AgentMessageChunk(content=v1.TextContent(text=text), meta={text: [text, (text,)]})

    assert json.loads(encode(text)) == written
    assert json.loads(encode(chunk)) == {
        "sessionUpdate": "agent_message_chunk",
        "content": {"type": "text", "text": written},
        "_meta": {written: [written, [written]]},
    }
    assert encode(chunk) == encode(chunk)
    assert chunk.content == v1.TextContent(text=text), "the caller's object is left alone"


@given(st.text(st.characters(categories=["L", "Cs", "Cc"]), max_size=8))
def test_mending_is_the_same_on_the_way_in_and_out(text: str) -> None:
    assert loads(json.dumps(text).encode()) == loads(encode(text))


class Level(enum.Enum):
    HIGH = "high\ud800"


@dataclasses.dataclass
class Point:
    x: float
    label: str = ""
    raw: Any = None


def test_users_own_types_are_mended_too() -> None:
    value: dict[str, Any] = {
        "p": Point(1.0, "\ud800", msgspec.Raw(b"1")),
        "e": Level.HIGH,
        "s": {"\udc00"},
        "u": Unknown(b'{"a":1}'),
    }

    assert json.loads(encode(value)) == {
        "p": {"x": 1.0, "label": "\ufffd", "raw": 1},
        "e": "high\ufffd",
        "s": ["\ufffd"],
        "u": {"a": 1},
    }


@pytest.mark.parametrize(
    "kind", [v1.ListSessionsRequest, v1.PromptRequest, v1.CancelNotification, Any]
)
@pytest.mark.parametrize(
    "raw",
    [
        *(None, b"null", b" null ", b"null" + b" " * 20, b"{}", b"[]", b"1", b'{"sessionId":"s"}'),
        *(b'{"sessionId":"s","prompt":[]}', b'{"sessionId":"s","prompt":[{"type":"new"}]}'),
        *(b'{"sessionId":7,"prompt":[]}', b'{"cwd":5,"cursor":null,"more":[1,2,3]}'),
        *(b'{"sessionId":"\\ud800 s","prompt":[]}', b"[" * 5000, b'{"sessionId":"s",,,,,,,,}'),
    ],
)
def test_a_decoder_made_for_params_does_what_decoding_params_does(kind: Any, raw: Any) -> None:
    def outcome(decode: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return decode(), ""
        except (msgspec.DecodeError, RecursionError) as error:
            return type(error), str(error)

    made = params_decoder(kind)
    assert outcome(lambda: made(raw)) == outcome(lambda: decode_params(kind, raw))


# --- encoding: what JSON has no word for


#: A value with a number in it, and where the error says it is.
WITH_NUMBER: Final[list[tuple[Callable[[float], Any], str]]] = [
    (lambda x: x, "float is"),
    (lambda x: [1, {"a": (x,)}], r"list\[1\]\['a'\]\[0\] is"),
    (lambda x: v1.Cost(amount=x, currency="EUR"), "Cost.amount is"),
    (
        lambda x: v1.ToolCall(tool_call_id="t", title="t", raw_output=x),
        "ToolCall.raw_output is",
    ),
    (lambda x: v1.LogoutRequest(meta={"a": {"b": x}}), r"LogoutRequest.meta\['a'\]\['b'\] is"),
    (
        lambda x: v1.SessionNotification(
            session_id="s",
            update=v1.AgentMessageChunk(
                content=v1.TextContent(text="t", annotations=v1.Annotations(priority=x))
            ),
        ),
        "SessionNotification.update.content.annotations.priority is",
    ),
    (lambda x: {"p": Point(x)}, r"dict\['p'\]\['x'\] is"),
    (lambda x: v1.ElicitationAcceptAction(content={"n": x}), r"content\['n'\] is"),
]


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("make", "where"), WITH_NUMBER)
def test_number_that_json_lacks_is_refused_at_the_call(
    number: float, make: Any, where: str
) -> None:
    with pytest.raises(ValueError, match=f"{where} NaN or infinite"):
        encode_checked(make(number))


def test_only_what_is_checked_is_refused_for_its_numbers() -> None:
    assert encode([float("nan"), v1.Cost(amount=float("inf"), currency="EUR")]) == (
        b'[null,{"amount":null,"currency":"EUR"}]'
    )


@pytest.mark.parametrize("name", strategies.definitions("v1_unstable"))
def test_check_finds_a_number_wherever_a_type_may_hold_one(name: str) -> None:
    nan = float("nan")

    @settings(max_examples=5)
    @given(strategies.typed(name, "v1_unstable"))
    def check(value: Any) -> None:
        assert encode_checked(value) == encode(value)
        for spoilt in spoil(value, nan):
            with pytest.raises(ValueError, match="NaN"):
                refuse_non_finite(spoilt)
            # Found by the null in the text, it is named as it is by looking at the value.
            with pytest.raises(ValueError, match="NaN"):
                encode_checked(spoilt)

    check()


def spoil(value: Any, nan: float) -> Iterator[Any]:
    """The value with one float, or one untyped value, in it replaced by NaN; for each of them."""
    if isinstance(value, float):
        yield nan
    elif is_array(value):
        for index, item in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in spoil(item, nan))
    elif is_object(value):
        for key, item in value.items():
            yield from (value | {key: other} for other in spoil(item, nan))
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            item = getattr(value, field.name)
            others = [nan] if field.type is Any else spoil(item, nan)
            yield from (msgspec.structs.replace(value, **{field.name: other}) for other in others)


@pytest.mark.parametrize("length", [0, 900, 1100, 5000])
def test_a_number_that_json_lacks_is_found_beside_texts_of_any_length(length: int) -> None:
    text = "x" * length
    spoilt = v1.ToolCall(tool_call_id="t", title=text, raw_input=[text, float("inf")])
    whole = msgspec.structs.replace(spoilt, raw_input=[text, None, "null", 1.5])

    with pytest.raises(ValueError, match=r"ToolCall.raw_input\[1\] is NaN or infinite"):
        encode_checked(spoilt)
    assert encode_checked(whole) == encode(whole)


@given(strategies.untyped_json())
def test_what_is_checked_is_written_as_what_is_not(value: Any) -> None:
    assert encode_checked(value) == encode(value)


def test_a_text_that_is_no_unicode_is_mended_where_its_numbers_are_checked() -> None:
    assert encode_checked(["\ud800", None]) == encode(["\ufffd", None])
    with pytest.raises(ValueError, match="NaN"):
        encode_checked(["\ud800", float("nan")])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        encode_checked(loop)


def test_finite_numbers_and_null_are_written_as_they_are() -> None:
    value = [1.5, -0.0, 1e300, 2**70, None, True]

    assert encode(value) == b"[1.5,-0.0,1e300,1180591620717411303424,null,true]"
    assert encode_checked(value) == encode(value)


@given(strategies.untyped_json())
def test_plain_json_is_written_as_it_is(value: Any) -> None:
    assert json.loads(encode(value)) == value


def test_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(ValueError, match="contains itself"):
        encode(v1.ToolCall(tool_call_id="t", title="t", raw_input=loop))
    with pytest.raises(ValueError, match="contains itself"):
        refuse_non_finite({"a": loop})
    with pytest.raises(ValueError, match="contains itself"):
        encode(["\ud800", loop])


@pytest.mark.parametrize("value", [object(), {"a": object()}, [1j], {(1, 2): 3}])
def test_what_is_no_json_value_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=r"is no JSON value$"):
        encode(value)
    with pytest.raises(TypeError, match=r"is no JSON value$"):
        encode_checked(value)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_unknown_value_over_several_lines_is_written_on_one(end: bytes) -> None:
    update = UnknownUpdate(b'{%b  "sessionUpdate": "new",  "text": "a\\nb"%b}' % (end, end))

    assert encode({"u": update}) == b'{"u":{"sessionUpdate":"new","text":"a\\nb"}}'


def test_unknown_value_without_text_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="JSON text"):
        Unknown(b"")


# --- what a newer peer may send


@pytest.mark.covers("R1-124")
def test_config_option_of_unknown_type_is_left_out_and_reported() -> None:
    slider = {"id": "a", "name": "A", "type": "slider", "currentValue": 3}
    switch = {"id": "b", "name": "B", "type": "boolean", "currentValue": True}
    raw = json.dumps({"sessionId": "s", "configOptions": [slider, switch]}).encode()

    response, repairs = decode_reporting(v1_unstable.NewSessionResponse, raw)

    assert isinstance(response.config_options, list)
    assert [option.id for option in response.config_options] == ["b"]
    assert len(repairs) == 1


@pytest.mark.covers("R1-125")
def test_config_option_of_unknown_category_is_kept_with_it() -> None:
    raw = b'{"id":"b","name":"B","type":"boolean","currentValue":true,"category":"mood"}'

    option = decode(v1_unstable.SessionConfigBoolean, raw)

    assert option.category == "mood"


@pytest.mark.covers("R1-142")
@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (v1.CreateElicitationRequest, b'{"sessionId":"s","mode":"hologram","message":"m"}'),
        (v1.CreateElicitationResponse, b'{"action":"later","content":{"a":1}}'),
    ],
    ids=["mode", "action"],
)
def test_unknown_kind_of_elicitation_is_kept_and_taken_for_no_known_one(
    kind: Any, raw: bytes
) -> None:
    value: Any = decode(kind, raw)

    assert isinstance(value, Unknown)
    assert encode(value) == raw


@pytest.mark.covers("R1-152")
def test_unknown_state_of_an_account_stays_the_string_it_is() -> None:
    assert decode(v1_unstable.AuthStatusResponse, b'{"state":"expired"}').state == "expired"
