"""Unions by shape: which alternative a value takes, and what an unknown one keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.schema import Unknown, UnknownUpdate, v1, v1_unstable, variants
from antiphon.schema._choice import Choice, choose, decode_hook, encode_hook

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


MEMBERS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["uri", "text", "blob", "mimeType", "_meta", "x"]),
    st.none() | st.text(max_size=3) | st.integers(0, 9) | st.just([]) | st.just({"a": 1}),
)


@given(MEMBERS | st.lists(MEMBERS, max_size=1) | st.text(max_size=2))
def test_the_quick_way_of_a_flat_union_ends_as_the_general_one(value: Any) -> None:
    union: Any = v1.EmbeddedResourceResource

    def outcome() -> Any:
        try:
            return convert(value, union)
        except msgspec.ValidationError as error:
            return str(error)

    quick, union.quick = outcome(), ()
    try:
        assert quick == outcome()
    finally:
        union.quick = None


def test_a_union_below_which_there_may_be_another_has_no_quick_way() -> None:
    convert({"uri": "u", "text": "t"}, v1.EmbeddedResourceResource)
    convert({"action": "cancel"}, v1.CreateElicitationResponse)
    resource: Any = v1.EmbeddedResourceResource
    response: Any = v1.CreateElicitationResponse

    assert resource.quick == (
        (v1.TextResourceContents, "text", str),
        (v1.BlobResourceContents, "blob", str),
    )
    assert response.quick == ()
