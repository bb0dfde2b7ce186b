"""Unions by shape: which alternative a value takes, and what an unknown one keeps."""

from __future__ import annotations

import itertools
import json
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.schema import (
    Unknown,
    UnknownUpdate,
    decode,
    decoder,
    v1,
    v1_unstable,
    variants,
)
from antiphon.schema import encode as wire
from antiphon.schema._choice import Choice, Merged, choose, decode_hook, encode_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HTTP: dict[str, Any] = {"type": "http", "name": "n", "url": "u", "headers": []}
STDIO: dict[str, Any] = {"name": "n", "command": "c", "args": [], "env": []}


def convert(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind, dec_hook=decode_hook)


def encode(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=encode_hook))


# Each: the union, a JSON value, what it must become.
SHAPES: list[tuple[Any, Any, Any]] = [
    (v1.McpServer, HTTP, v1.McpServerHttp(name="n", url="u", headers=[])),
    (v1.McpServer, STDIO, v1.McpServerStdio(name="n", command="c", args=[], env=[])),
    (
        v1.McpServer,
        {**STDIO, "type": "stdio"},  # redundant, but some peers write it
        v1.McpServerStdio(name="n", command="c", args=[], env=[]),
    ),
    (v1.AuthMethod, {"id": "a", "name": "A"}, v1.AuthMethodAgent(id="a", name="A")),
    (
        v1.AuthMethod,
        {"type": "terminal", "id": "a", "name": "A"},
        v1.AuthMethodTerminal(id="a", name="A"),
    ),
    (
        v1.AuthMethod,
        {"type": "env_var", "id": "a", "name": "A"},  # a former unstable variant
        v1.AuthMethodAgent(id="a", name="A"),
    ),
    (
        v1.EmbeddedResourceResource,
        {"uri": "u", "text": "t"},
        v1.TextResourceContents(uri="u", text="t"),
    ),
    (
        v1.EmbeddedResourceResource,
        {"uri": "u", "blob": "YQ=="},
        v1.BlobResourceContents(uri="u", blob="YQ=="),
    ),
    (
        v1.EmbeddedResourceResource,
        {"uri": "u", "blob": "YQ==", "text": None},  # writers that spell absence as null
        v1.BlobResourceContents(uri="u", blob="YQ=="),
    ),
    (v1.SessionConfigSelectOptions, [], []),
    (
        v1.SessionConfigSelectOptions,
        [{"value": "v", "name": "n"}],
        [v1.SessionConfigSelectOption(value="v", name="n")],
    ),
    (
        v1.SessionConfigSelectOptions,
        [{"group": "g", "name": "n", "options": [{"value": "v", "name": "n"}]}],
        [
            v1.SessionConfigSelectGroup(
                group="g", name="n", options=[v1.SessionConfigSelectOption(value="v", name="n")]
            )
        ],
    ),
    (
        v1.MultiSelectItems,
        {"type": "string", "enum": ["a"]},
        v1.StringMultiSelectItems(enum=["a"]),
    ),
    (
        v1.MultiSelectItems,
        {"anyOf": [{"const": "a", "title": "A"}]},
        v1.TitledMultiSelectItems(any_of=[v1.EnumOption(const="a", title="A")]),
    ),
    (v1.CreateElicitationResponse, {"action": "decline"}, v1.ElicitationDeclineAction()),
    (
        v1_unstable.MessageMcpResponse,
        {"result": None},
        v1_unstable.MessageMcpResponseResult(result=None),
    ),
    (
        v1_unstable.MessageMcpResponse,
        {"error": {"code": 1, "message": "m"}},
        v1_unstable.MessageMcpResponseError(error=v1_unstable.McpError(code=1, message="m")),
    ),
]


@pytest.mark.parametrize(("kind", "value", "expected"), SHAPES)
def test_shape_decides_the_variant(kind: Any, value: Any, expected: Any) -> None:
    decoded = convert(value, kind)

    assert decoded == expected
    assert type(decoded) is type(expected)
    assert isinstance(decoded, kind)


def test_acp_server_is_known_to_unstable_only() -> None:
    value = {"type": "acp", "name": "n", "serverId": "s"}

    assert convert(value, v1_unstable.McpServer) == v1_unstable.McpServerAcp(
        name="n", server_id="s"
    )
    with pytest.raises(msgspec.ValidationError, match="fits no variant of McpServer"):
        convert(value, v1.McpServer)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (v1.MultiSelectItems, {"type": "colour", "of": [1, {"a": None}]}),
        (v1.ElicitationPropertySchema, {"type": "date", "title": "When"}),
        (v1.CreateElicitationRequest, {"mode": "voice", "message": "m", "sessionId": "s"}),
        (v1.CreateElicitationResponse, {"action": "later", "at": 3.5}),
        (v1_unstable.StateUpdate, {"state": "dreaming"}),
    ],
)
def test_unknown_variant_of_an_open_union_round_trips(kind: Any, value: Any) -> None:
    decoded = convert(value, kind)

    assert isinstance(decoded, Unknown)
    assert isinstance(decoded, kind)
    assert decoded.data == value
    assert encode({"it": decoded}) == {"it": value}
    assert kind.__name__ in decoded.reason


def test_known_tag_with_a_bad_body_is_an_error_of_that_variant() -> None:
    with pytest.raises(msgspec.ValidationError, match="required field `url`"):
        convert({**STDIO, "type": "http"}, v1.McpServer)


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (v1.McpServer, "npx", "Expected `object`, got `str`"),
        (v1.McpServer, None, "Expected `object`, got `null`"),
        (v1.SessionConfigSelectOptions, {}, "Expected `array`, got `object`"),
        (v1.SessionConfigSelectOptions, [1], "Expected `object`, got `int`"),
        (v1.EmbeddedResourceResource, {"uri": "u"}, "look at `text` and `blob`"),
        (v1.CreateElicitationResponse, {"action": 1}, "look at `action`"),
    ],
)
def test_value_that_fits_nothing_says_what_was_looked_at(
    kind: Any, value: Any, complaint: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        convert(value, kind)


def test_error_inside_a_choice_keeps_the_path_outside_it() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        convert({"cwd": "/", "mcpServers": [{**STDIO, "args": [1]}]}, v1.NewSessionRequest)

    assert "$.args[0]" in str(caught.value)
    assert "$.mcpServers[0]" in str(caught.value)


def test_instance_check_of_a_choice_looks_at_its_members() -> None:
    assert isinstance(v1.McpServerStdio(name="n", command="c", args=[], env=[]), v1.McpServer)
    assert not isinstance(v1.TextContent(text="t"), v1.McpServer)
    options: Any = v1.SessionConfigSelectOptions  # to checkers an alias of two list types
    assert isinstance([], options)


def test_variants_lists_what_a_params_type_stands_for() -> None:
    assert variants(v1.PromptRequest) == (v1.PromptRequest,)
    assert variants(v1.CreateElicitationRequest) == (
        v1.ElicitationFormMode,
        v1.ElicitationUrlMode,
        Unknown,
    )
    assert variants(v1.RequestPermissionOutcome) == (
        v1.CancelledPermissionOutcome,
        v1.SelectedPermissionOutcome,
    )


def test_unknowns_are_equal_by_value_and_of_one_class() -> None:
    assert Unknown(b'{"a": 1}') == Unknown(b'{"a":1}', "why")
    assert Unknown(b"1") != Unknown(b"2")
    assert Unknown(b"1") != UnknownUpdate(b"1")
    assert Unknown(b"1") != 1
    assert Unknown(b"{") != Unknown(b"[")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Unknown(b"1"))


def test_unknown_without_a_text_would_break_the_frame_and_is_refused() -> None:
    with pytest.raises(ValueError, match="needs its JSON text"):
        Unknown(b"")


def test_unknown_shows_what_it_holds() -> None:
    assert repr(UnknownUpdate(b"{}", "no tag")) == "UnknownUpdate(raw=b'{}', reason='no tag')"


def test_hooks_leave_other_types_alone() -> None:
    with pytest.raises(NotImplementedError):
        decode_hook(complex, 1)
    with pytest.raises(NotImplementedError):
        encode_hook(1j)


def test_choose_is_for_choices() -> None:
    assert isinstance(v1.McpServer, Choice)
    assert choose(v1.McpServer, HTTP) is v1.McpServerHttp


@pytest.mark.covers("R1-76")
def test_a_server_of_an_unknown_transport_is_not_taken_for_a_command_to_run() -> None:
    for kind in ("stdio2", "websocket", 5, True):
        with pytest.raises(msgspec.ValidationError, match="fits no variant of McpServer"):
            convert({**STDIO, "type": kind}, v1.McpServer)
    assert isinstance(convert({**STDIO, "type": None}, v1.McpServer), v1.McpServerStdio)


RESOURCES: Any = v1.EmbeddedResourceResource
#: What a member of a resource may be, right and wrong; `...` is absent.
SPELLINGS: dict[str, list[Any]] = {
    "uri": ["u", ..., 5, None],
    "text": ["t", ..., None, 5, [], {"a": 1}],
    "blob": ["b", ..., None, 5, [], {"a": 1}],
    "mimeType": ["m", ..., None, 5],
    "_meta": [{"a": 1}, ..., None, []],
}


def every_resource() -> Iterator[dict[str, Any]]:
    """All of them."""
    for values in itertools.product(*SPELLINGS.values()):
        pairs = zip(SPELLINGS, values, strict=True)
        yield {key: value for key, value in pairs if value is not ...}


def blocks_of(resource: bytes) -> list[tuple[Any, bytes, Callable[[Any], Any]]]:
    """Types that hold a resource in some depth, their JSON, and how to get at the resource."""
    block = b'{"type":"resource","resource":%s}' % resource
    chunk = b'"messageId":"m","content":%s' % block
    content = b'[{"type":"content","content":%s},{"type":"terminal","terminalId":"t"}]' % block
    return [
        (v1.EmbeddedResource, block, lambda it: it.resource),
        (v1.ContentBlock, block, lambda it: it.resource),
        (
            v1.PromptRequest,
            b'{"sessionId":"s","prompt":[{"type":"text","text":"t"},%s]}' % block,
            lambda it: it.prompt[1].resource,
        ),
        (
            v1_unstable.SessionUpdate,
            b'{"sessionUpdate":"agent_message_chunk",%s}' % chunk,
            lambda it: it.content.resource,
        ),
        (
            v1_unstable.SessionUpdate,
            b'{"sessionUpdate":"tool_call_update","toolCallId":"c","content":%s}' % content,
            lambda it: it.content[0].content.resource,
        ),
    ]


def resource_or_none(kind: Any, value: Any) -> Any:
    try:
        return convert(value, kind)
    except msgspec.ValidationError:
        return None


def test_a_resource_is_decoded_in_its_block_as_the_union_decodes_it() -> None:
    others = [None, "u", 5, [], [{"uri": "u", "text": "t"}], {"uri": "u", "text": "t", "x": [1]}]
    kept = 0
    for value in itertools.chain(every_resource(), others):
        expected = resource_or_none(RESOURCES, value)
        for kind, text, resource_of in blocks_of(json.dumps(value).encode()):
            try:
                found = resource_of(decoder(kind)(text))
            except msgspec.ValidationError:
                found = None
            assert type(found) is type(expected), value
            assert found == expected
            assert repr(found) == repr(expected)
            if found is not None:
                kept += 1
                made = v1.EmbeddedResource(resource=found)
                assert decoder(v1.EmbeddedResource)(wire(made)) == made
    assert kept >= 500


@given(
    st.lists(
        st.tuples(st.sampled_from(["uri", "text", "blob"]), st.sampled_from(["t", None, 5])),
        max_size=6,
    )
)
@example([("text", 5), ("text", "t"), ("blob", "b"), ("uri", "u")])
@example([("blob", "b"), ("text", "t"), ("text", None), ("uri", "u")])
@example([("uri", 5), ("text", "t"), ("uri", "u")])
def test_of_a_member_that_comes_twice_the_last_counts_in_a_block(
    pairs: list[tuple[str, Any]],
) -> None:
    members = b",".join(b'"%s":%s' % (key.encode(), json.dumps(it).encode()) for key, it in pairs)
    expected = resource_or_none(RESOURCES, dict(pairs))
    try:
        found = decode(v1.EmbeddedResource, b'{"type":"resource","resource":{%s}}' % members)
    except msgspec.ValidationError:
        assert expected is None
    else:
        assert found == v1.EmbeddedResource(resource=expected)


def test_a_resource_that_is_handed_to_a_block_stays_itself() -> None:
    for resource in (
        v1.TextResourceContents(uri="u", text="t", meta={"a": 1}),
        v1.BlobResourceContents(uri="u", blob="b", mime_type=None),
    ):
        block = v1.EmbeddedResource(resource=resource)

        assert block.resource is resource
        assert decode(v1.EmbeddedResource, wire(block)) == block


def test_a_merged_struct_stands_in_for_its_union_where_a_decoder_looks_and_nowhere_else() -> None:
    declared = typing.get_type_hints(v1.EmbeddedResource)["resource"]

    assert issubclass(declared, Merged)
    assert declared.union is RESOURCES
    assert declared.__name__ not in v1.__all__
    assert not issubclass(declared, RESOURCES.members)


def test_a_resource_of_neither_kind_says_in_its_block_what_was_looked_at() -> None:
    complaint = "fits no variant of EmbeddedResourceResource: look at `text` and `blob`"
    for raw in (b'{"uri":"u"}', b'{"uri":"u","text":1}'):
        for kind, text, _ in blocks_of(raw):
            with pytest.raises(msgspec.ValidationError, match=complaint):
                decoder(kind)(text)
