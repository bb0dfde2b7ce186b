"""Tests of antiphon.schema._report: the words for what is wrong, and that they come cheap."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from antiphon.schema._report import JSON_NAMES, FieldError, Repair, is_array, is_object, json_name


def test_error_names_the_path_and_is_a_validation_error() -> None:
    error = FieldError("$.sessionId", "Expected `str`, got `int`")

    assert isinstance(error, msgspec.ValidationError)
    assert str(error) == "Expected `str`, got `int` - at `$.sessionId`"
    assert (error.path, error.reason) == ("$.sessionId", "Expected `str`, got `int`")


def test_error_words_a_refusal_as_msgspec_does() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b"[5]", type=list[str])

    assert str(caught.value) == str(FieldError("$[0]", "Expected `str`, got `int`"))


def test_repair_is_a_value() -> None:
    assert Repair("$.a", "r") == Repair("$.a", "r")
    assert len({Repair("$.a", "r"), Repair("$.a", "r")}) == 1


def test_every_decoded_value_has_a_name_and_only_containers_are_containers() -> None:
    for value in (None, True, 1, 1.5, "s", [1], {"a": 1}):
        decoded = msgspec.json.decode(json.dumps(value))
        assert type(decoded) in JSON_NAMES
        assert is_object(decoded) is isinstance(value, dict)
        assert is_array(decoded) is isinstance(value, list)


def test_process_that_meets_nothing_wrong_never_loads_the_forgiving_path() -> None:
    code = """
import sys
from antiphon.schema import decode, decode_update, encode, v1
decode(v1.LogoutRequest, b"{}")
decode_update(encode(v1.AgentMessageChunk(content=v1.TextContent(text="x"))))
strictly = "antiphon.schema._forgiving" in sys.modules
decode_update(b"{}")
print(strictly, "antiphon.schema._forgiving" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )

    assert done.stdout == b"False True\n"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({}, "object"),
        ([], "array"),
        ("", "str"),
        (True, "bool"),
        (1, "int"),
        (1.0, "float"),
        (None, "null"),
        (object(), "number out of range"),
    ],
)
def test_a_value_is_named_by_its_json_type(value: object, name: str) -> None:
    assert json_name(value) == name
