"""The generated modules: absent, null and value; what is written; bounds; the import's cost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from antiphon.schema import UNSET, v1, v1_unstable
from antiphon.schema._choice import decode_hook, encode_hook


def decode(text: bytes, kind: Any) -> Any:
    return msgspec.json.decode(text, type=kind, dec_hook=decode_hook)


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=encode_hook)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (b'{"sessionUpdate":"session_info_update"}', UNSET),
        (b'{"sessionUpdate":"session_info_update","title":null}', None),
        (b'{"sessionUpdate":"session_info_update","title":""}', ""),
    ],
)
def test_absent_null_and_value_are_three_things_both_ways(text: bytes, title: Any) -> None:
    update = decode(text, v1_unstable.SessionUpdate)

    assert (
        update.title is title if title is not None and title is not UNSET else update.title == title
    )
    assert encode(update) == text


@pytest.mark.parametrize("raw", [b"", b',"rawInput":null', b',"rawInput":{"a":[1]}'])
def test_absent_null_and_value_are_three_things_in_untyped_members(raw: bytes) -> None:
    text = b'{"toolCallId":"1"' + raw + b"}"

    assert encode(decode(text, v1.ToolCallUpdate)) == text


def test_meta_is_a_field_of_its_own() -> None:
    text = b'{"text":"t","_meta":{"session_id":"x"}}'
    content = decode(b'{"type":"text",' + text[1:], v1.ContentBlock)

    assert content == v1.TextContent(text="t", meta={"session_id": "x"})
    assert encode(content) == b'{"type":"text",' + text[1:]


def test_required_lists_are_written_empty_too() -> None:
    assert encode(v1.NewSessionRequest(cwd="/", mcp_servers=[])) == b'{"cwd":"/","mcpServers":[]}'
    with pytest.raises(TypeError, match="mcp_servers"):
        v1.NewSessionRequest(cwd="/")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_what_equals_the_schemas_default_is_written_all_the_same() -> None:
    assert encode(v1.PromptCapabilities(image=False)) == b'{"image":false}'


def test_unknown_words_stay_as_they_are() -> None:
    response = decode(b'{"stopReason":"weather"}', v1.PromptResponse)

    assert response.stop_reason == "weather"
    assert encode(response) == b'{"stopReason":"weather"}'


def test_every_message_chunk_is_a_content_chunk_with_a_tag_of_its_own() -> None:
    text = b'{"sessionUpdate":"agent_thought_chunk","content":{"type":"text","text":"t"}}'
    update = decode(text, v1.SessionUpdate)

    assert type(update) is v1.AgentThoughtChunk
    assert isinstance(update, v1.ContentChunk)
    assert encode(update) == text


def test_tool_call_of_a_permission_request_has_no_tag() -> None:
    call = v1.ToolCallUpdate(tool_call_id="1")

    assert encode(call) == b'{"toolCallId":"1"}'
    assert (
        encode(v1.ToolCallProgress(tool_call_id="1"))
        == b'{"sessionUpdate":"tool_call_update","toolCallId":"1"}'
    )


def test_tag_may_stand_anywhere() -> None:
    assert decode(b'{"text":"t","type":"text"}', v1.ContentBlock) == v1.TextContent(text="t")


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        (b'{"path":"/","line":-1}', v1.ToolCallLocation, "$.line"),
        (b'{"protocolVersion":65536}', v1.InitializeRequest, "$.protocolVersion"),
        (b'{"protocolVersion":-1}', v1.InitializeRequest, "$.protocolVersion"),
        (b'{"sessionUpdate":"notice","severity":"info","title":""}', v1.SessionUpdate, "$.title"),
        (b'{"used":-1,"size":1,"sessionUpdate":"usage_update"}', v1.SessionUpdate, "$.used"),
    ],
)
def test_bounds_of_the_schema_hold(text: bytes, kind: Any, path: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(text, kind)

    assert path in str(caught.value)


@pytest.mark.parametrize("value", [b'"s"', b"1", b"-5", b"null", b'""'])
def test_request_id_keeps_its_kind(value: bytes) -> None:
    text = b'{"requestId":' + value + b"}"

    assert encode(decode(text, v1.CancelRequestNotification)) == text


@pytest.mark.parametrize("value", [b"true", b"1", b"1.5", b'"s"', b'["a"]'])
def test_elicited_value_keeps_its_kind(value: bytes) -> None:
    text = b'{"action":"accept","content":{"x":' + value + b"}}"

    assert encode(decode(text, v1.CreateElicitationResponse)) == text


def test_elicitation_needs_a_scope() -> None:
    with pytest.raises(ValueError, match="`sessionId` or `requestId`"):
        v1.ElicitationUrlMode(message="m", elicitation_id="e", url="u")
    with pytest.raises(msgspec.ValidationError, match="`sessionId` or `requestId`"):
        decode(
            b'{"mode":"url","message":"m","elicitationId":"e","url":"u"}',
            v1.CreateElicitationRequest,
        )

    v1.ElicitationUrlMode(message="m", elicitation_id="e", url="u", request_id=None)


def test_boolean_option_value_brings_its_mark() -> None:
    request = v1.SetSessionConfigOptionRequest(session_id="s", config_id="c", value=True)

    assert encode(request) == b'{"sessionId":"s","configId":"c","type":"boolean","value":true}'
    word = v1.SetSessionConfigOptionRequest(session_id="s", config_id="c", value="fast")
    assert encode(word) == b'{"sessionId":"s","configId":"c","value":"fast"}'


def test_variant_with_shared_members_is_one_struct() -> None:
    text = b'{"type":"select","id":"i","name":"n","currentValue":"v","options":[]}'
    option = decode(text, v1.SessionConfigOption)

    assert option == v1.SessionConfigSelect(id="i", name="n", current_value="v", options=[])
    assert encode(option) == text


def test_unstable_values_pass_where_stable_ones_are_asked_for() -> None:
    response = v1_unstable.PromptResponse(
        stop_reason="end_turn",
        usage=v1_unstable.Usage(total_tokens=3, input_tokens=1, output_tokens=2),
    )

    assert isinstance(response, v1.PromptResponse)
    assert b'"usage"' in encode(response)
    assert v1_unstable.TextContent is v1.TextContent


def test_idle_state_keeps_reason_and_error_together() -> None:
    text = (
        b'{"sessionUpdate":"subagent_update","sessionId":"s","state":'
        b'{"state":"idle","stopReason":"error","error":{"code":-32603,"message":"m"}}}'
    )
    update = decode(text, v1_unstable.SessionUpdate)

    assert update.state == v1_unstable.IdleStateUpdate(
        stop_reason="error", error=v1.Error(code=-32603, message="m")
    )
    assert encode(update) == text


def test_door_of_the_schema_loads_no_version() -> None:
    code = (
        "import sys, antiphon.schema\n"
        "assert antiphon.schema.UNSET is not None\n"
        "print([name for name in sys.modules if name.startswith('antiphon.schema.v')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    assert run.stdout.strip() == "[]", run.stderr
