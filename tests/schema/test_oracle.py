"""Every type of every version against the official schema, decoded and encoded.

The oracle is the official JSON itself, as the generator fetches it, and pairs of JSON and typed
value that `tests.strategies` builds side by side. Definitions of the unstable schema that are the
very same type as in version 1 are not tested twice.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final

import jsonschema_rs
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from schema_generator.command import ROOT, STABLE, UNSTABLE
from schema_generator.pinned import load_pin, official_documents
from tests import strategies

from antiphon.schema import FieldError, _codec, decode, decode_reporting, encode
from antiphon.schema._forgiving import Walk, forgive
from antiphon.schema._report import is_array, is_object

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENTS: Final = {"v1": STABLE, "v1_unstable": UNSTABLE}

#: Few examples a type: there are some 300 types, and each is also met inside others.
EXAMPLES: Final = settings(
    max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def different(version: str) -> list[str]:
    """The definitions of a version that the versions before it do not have in the same form."""
    names = list(strategies.definitions(version))
    if version == "v1":
        return names
    stable = set(strategies.definitions("v1"))
    return [
        name
        for name in names
        if name not in stable
        or strategies.python_type(name, version) is not strategies.python_type(name, "v1")
    ]


#: Definitions whose alternatives are members of one struct, so that members of several may stand in
#: one value. The official schema takes that (it knows no member that is too much).
MERGED: Final = {
    "ElicitationFormMode": ("toolCallId", "requestId", "sessionId"),
    "ElicitationUrlMode": ("toolCallId", "requestId", "sessionId"),
    "IdleStateUpdate": ("error",),
    "SetSessionConfigOptionRequest": ("type",),
}

TYPES: Final = [(version, name) for version in DOCUMENTS for name in different(version)]

each_type = pytest.mark.parametrize(
    ("version", "name"), TYPES, ids=[f"{version}-{name}" for version, name in TYPES]
)


# --- what the official schema says


@functools.cache
def official(version: str) -> dict[str, Any]:
    pin = load_pin(ROOT / "src" / "antiphon" / "schema" / "PINNED.json")
    definitions: dict[str, Any] = official_documents(pin, ROOT / ".cache")[DOCUMENTS[version]][
        "$defs"
    ]
    return definitions


@functools.cache
def closed(version: str) -> dict[str, Any]:
    """The official definitions, made to refuse members that they do not name.

    Wherever a value is described, what no part of its description has looked at is forbidden. In
    the definitions themselves it cannot be: a variant of a union does not know the union's tag.
    """
    definitions = official(version)

    def names_members(schema: Any) -> bool:
        """Whether every alternative is an object with named members, or is no object at all."""
        if not is_object(schema):
            return False
        if "$ref" in schema:
            return names_members(definitions[schema["$ref"].rpartition("/")[2]])
        for alternatives in ("anyOf", "oneOf"):
            if any(part == {} or is_anything(part) for part in schema.get(alternatives, [])):
                return False
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, [])]
        return "properties" in schema or any(map(names_members, parts))

    def is_anything(schema: Any) -> bool:
        if is_object(schema) and "$ref" in schema:
            return is_anything(definitions[schema["$ref"].rpartition("/")[2]])
        if is_object(schema) and len(schema.get("allOf", [])) == 1 and "properties" not in schema:
            return is_anything(schema["allOf"][0])
        constraints = {"type", "properties", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"}
        return is_object(schema) and not constraints & set(schema)

    def close(schema: Any, *, described: bool) -> Any:
        if is_array(schema):
            return [close(part, described=False) for part in schema]
        if not is_object(schema):
            return schema
        made: dict[str, Any] = {}
        for key, part in schema.items():
            match key:
                case "properties":
                    made[key] = {
                        name: close(member, described=True) for name, member in part.items()
                    }
                case "items" | "additionalProperties":
                    made[key] = close(part, described=True)
                case "allOf" | "anyOf" | "oneOf":
                    made[key] = close(part, described=False)
                case _:
                    made[key] = part
        if described and names_members(schema):
            made["unevaluatedProperties"] = False
        return made

    made = {name: close(definition, described=False) for name, definition in definitions.items()}
    for name, members in MERGED.items():
        if name in made:
            made[name]["properties"] = dict.fromkeys(members, True) | made[name]["properties"]
    return made | {
        f"{name}.closed": close({"$ref": f"#/$defs/{name}"}, described=True) for name in definitions
    }


@functools.cache
def validator(version: str, name: str, *, strict: bool) -> Callable[[Any], None]:
    definitions = closed(version) if strict else official(version)
    root = f"{name}.closed" if strict else name
    return jsonschema_rs.validator_for(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$ref": f"#/$defs/{root}",
            "$defs": definitions,
        }
    ).validate


@functools.cache
def unions(version: str) -> dict[tuple[str, str], str]:
    """The union of each variant, by the name of the variant's definition and its tag."""
    return {
        (body["$ref"].rpartition("/")[2], tag["const"]): name
        for name, definition in official(version).items()
        for variant in [*definition.get("oneOf", []), *definition.get("anyOf", [])]
        for tag in variant.get("properties", {}).values()
        for body in variant.get("allOf", [])
        if "const" in tag
    }


def assert_official(version: str, name: str, text: bytes) -> None:
    """The text is valid, and has no member that the definition does not name.

    A struct with a tag is more than its definition, and is held against its union for the latter.
    """
    value = json.loads(text)
    validator(version, name, strict=False)(value)
    config = getattr(strategies.python_type(name, version), "__struct_config__", None)
    if config is not None and config.tag is not None:
        name = unions(version)[name, config.tag]
    validator(version, name, strict=True)(value)


def text_of(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    [
        b'{"sessionId":"s","prompt":[{"type":"text","text":"t","annotations":{}}],"extra":1}',
        b'{"sessionId":"s","prompt":[{"type":"text","text":"t","annotations":{},"extra":1}]}',
        b'{"sessionId":"s","prompt":[{"type":"text","text":"t","annotations":{"extra":1}}]}',
    ],
)
def test_closed_schema_refuses_a_member_too_much_at_any_depth(text: bytes) -> None:
    assert_official(
        "v1", "PromptRequest", text.replace(b',"extra":1', b"").replace(b'"extra":1', b"")
    )
    validator("v1", "PromptRequest", strict=False)(json.loads(text))

    with pytest.raises(jsonschema_rs.ValidationError, match="extra"):
        validator("v1", "PromptRequest", strict=True)(json.loads(text))


@pytest.mark.parametrize("version", list(DOCUMENTS))
def test_closed_schema_closes_every_definition_that_names_members(version: str) -> None:
    definitions = closed(version)
    left_open = {
        name
        for name in official(version)
        if '"properties":' in json.dumps(definitions[name])
        and definitions[f"{name}.closed"].get("unevaluatedProperties") is not False
    }

    assert left_open == set()


# --- decoding and encoding


@pytest.mark.covers("R1-153")
@each_type
def test_valid_json_decodes_strictly_and_encodes_officially(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = strategies.python_type(name, version)
    # Behind the forgiving path a broken hook would hide: it would show only as slowness.
    monkeypatch.setattr(_codec, "_decode_forgiving", refuse_to_forgive)

    @EXAMPLES
    @given(strategies.pairs(name, version))
    def check(pair: strategies.Pair) -> None:
        value, repairs = decode_reporting(kind, text_of(pair.json))
        text = encode(value)

        assert (value, repairs) == (pair.typed, ())
        assert json.loads(text) == pair.json
        assert_official(version, name, text)
        assert decode(kind, text) == value

    check()


@pytest.mark.covers("R1-158")
@each_type
def test_unknown_members_make_no_difference_on_either_path(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = strategies.python_type(name, version)
    monkeypatch.setattr(_codec, "_decode_forgiving", refuse_to_forgive)

    @EXAMPLES
    @given(strategies.pairs(name, version, unknown_members=True))
    def check(pair: strategies.Pair) -> None:
        text = text_of(pair.json)
        walk = Walk(text, out_of_range=False, lax=False)

        assert decode_reporting(kind, text) == (pair.typed, ())
        assert (forgive(kind, pair.json, walk), walk.repairs) == (pair.typed, [])

    check()


@each_type
def test_odd_json_keeps_what_is_right_and_reports_the_rest(version: str, name: str) -> None:
    kind = strategies.python_type(name, version)

    @EXAMPLES
    @given(strategies.pairs(name, version, odd=True), strategies.untyped_json())
    def check(pair: strategies.Pair, foreign: Any) -> None:
        text = text_of(pair.json)
        value, repairs = decode_reporting(kind, text)

        assert value == pair.typed
        assert bool(repairs) == refused_strictly(kind, text)
        assert decode_reporting(kind, encode(value)) == (value, ())
        assert_decodes_or_refuses(kind, text_of(foreign))

    check()


def refuse_to_forgive(kind: Any, raw: Any, *, lax: bool = False) -> Any:
    raise AssertionError(f"the strict decoder refused {bytes(raw)!r} as {kind}")


def refused_strictly(kind: Any, text: bytes) -> bool:
    try:
        _codec.decoder(kind)(text)
    except msgspec.DecodeError:
        return True
    return False


def assert_decodes_or_refuses(kind: Any, text: bytes) -> None:
    """Whatever JSON stands in the place of a type: a value, or an error that says where."""
    where: str | None = None
    try:
        value, _ = decode_reporting(kind, text)
    except FieldError as error:
        where = error.path
    else:
        assert decode(kind, encode(value)) == value
    assert where is None or (where.startswith("$") and refused_strictly(kind, text))
