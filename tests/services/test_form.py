"""Forms: what is read of a schema, what fits, and that everything wrong is named."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from antiphon.schema import Unknown, decode_params, v1, v1_unstable
from antiphon.services import Choice, Field, Form, FormError
from antiphon.services._form import read_form
from antiphon.services._pattern import MAX_STEPS


def form(required: Any = (), /, **properties: Any) -> Form:
    raw = {
        "mode": "form",
        "sessionId": "s",
        "message": "Please",
        "requestedSchema": {
            "type": "object",
            "properties": properties,
            "required": list(required),
        },
    }
    params = decode_params(
        v1_unstable.CreateElicitationRequest, msgspec.Raw(json.dumps(raw).encode())
    )
    assert isinstance(params, v1.ElicitationFormMode)
    return read_form(params, "agent 1")


def field(**schema: Any) -> Field:
    return form(a=schema)["a"]


def wrong(of: Field, value: object) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        of.check(value)
    return str(caught.value)


def test_fields_keep_the_agents_order_and_words() -> None:
    asked = form(
        ["b"],
        b={"type": "string", "title": "Name", "description": "yours", "minLength": 1},
        a={"type": "integer", "minimum": 2, "maximum": 5, "default": 3},
        c={"type": "number"},
        d={"type": "boolean", "default": False},
        e={"type": "string", "enum": ["x", "y"]},
        f={"type": "string", "oneOf": [{"const": "x", "title": "The X", "description": "!"}]},
        g={"type": "array", "items": {"type": "string", "enum": ["p", "q"]}, "minItems": 1},
        h={"type": "array", "items": {"anyOf": [{"const": "p", "title": "P"}]}},
    )

    assert [f.name for f in asked.fields] == list("bacdefgh")
    assert [f.kind for f in asked.fields] == [
        "string", "integer", "number", "boolean", "choice", "choice", "choices", "choices",
    ]  # fmt: skip
    assert asked["b"].title == "Name"
    assert asked["b"].required
    assert asked["a"].title == "a"
    assert asked["f"].choices == (Choice("x", "The X", "!"),)
    assert asked["h"].choices == (Choice("p", "P"),)
    assert asked.defaults() == {"a": 3, "d": False}
    assert asked.agent == "agent 1"
    assert asked.message == "Please"


@pytest.mark.covers("R1-131")
def test_an_answer_is_checked_and_every_wrong_field_is_named() -> None:
    asked = form(
        ["name", "age"],
        name={"type": "string", "minLength": 2},
        age={"type": "integer", "minimum": 18},
        mail={"type": "string", "format": "email"},
    )

    assert asked.check({"age": 20.0, "name": "Jo", "mail": None}) == {"name": "Jo", "age": 20}
    with pytest.raises(FormError) as caught:
        asked.check({"name": "J", "mail": "nobody", "zip": "1"})
    assert set(caught.value.problems) == {"name", "age", "mail", "zip"}
    assert all(name in str(caught.value) for name in caught.value.problems)


@pytest.mark.parametrize(
    ("schema", "right", "not_right"),
    [
        ({"type": "string"}, ["", "x", "😀"], [5, None, b"x", ["x"], "\ud800"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "😀😀😀"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["a1", ""]),
        ({"type": "string", "format": "email"}, ["a@b.c"], ["a", "@b", "a@", "a b@c", "a@b@c"]),
        ({"type": "string", "format": "uri"}, ["https://x/y", "urn:a:b"], ["x", "http:", "a b:c", "https://["]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2023-2-1", "٢٠٢٣-01-01"]),
        (
            {"type": "string", "format": "date-time"},
            ["2024-02-29T12:00:00Z", "2024-02-29t12:00:00.5+02:00"],
            ["2024-02-29", "2024-02-29T24:00:00Z", "2024-02-29T12:00:00", "2024-02-30T12:00:00Z"],
        ),
        ({"type": "string", "format": "colour"}, ["anything"], []),
        ({"type": "string", "pattern": "(?=x)"}, ["left to the agent"], []),
        ({"type": "integer", "minimum": -1, "maximum": 3}, [-1, 3, 2.0], [-2, 4, 1.5, True, "1", 2**63]),
        ({"type": "integer"}, [2**63 - 1], [2**63, float("nan"), float("inf")]),
        ({"type": "number", "minimum": 0.5}, [0.5, 1], [0.4, float("nan"), float("inf"), True, "1", 10**400]),
        ({"type": "boolean"}, [True, False], [1, "yes", None]),
        ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", "", 5]),
        ({"type": "string", "enum": []}, [], ["", "a"]),
        (
            {"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2},
            [["a"], ["c", "a"]],
            [[], ["a", "b", "c"], ["a", "a"], ["z"], "a", [1], [["a"]]],
        ),
    ],
)  # fmt: skip
def test_each_kind_takes_what_it_says(
    schema: dict[str, Any], right: list[Any], not_right: list[Any]
) -> None:
    of = field(**schema)

    assert [of.check(value) for value in right] == right
    for value in not_right:
        assert wrong(of, value)


@pytest.mark.parametrize(
    ("schema", "typed", "means"),
    [
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "1e3", None),
        ({"type": "integer"}, "1_0", None),
        ({"type": "number"}, "-1.5e2", -150.0),
        ({"type": "number"}, "nan", None),
        ({"type": "boolean"}, "Yes", True),
        ({"type": "boolean"}, "n", False),
        ({"type": "boolean"}, "maybe", None),
        ({"type": "string"}, " kept ", " kept "),
        ({"type": "string", "enum": ["red", "2", "1"]}, "1", "1"),
        ({"type": "string", "enum": ["red", "blue"]}, "2", "blue"),
        ({"type": "string", "enum": ["red", "blue"]}, "RED", "red"),
        ({"type": "string", "enum": ["red", "blue"]}, "3", None),
        ({"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}, "2, red", ["blue", "red"]),
        ({"type": "array", "items": {"type": "string", "enum": ["a, b", "c"]}}, "a, b", ["a, b"]),
        ({"type": "array", "items": {"type": "string", "enum": ["red"]}}, "", []),
        ({"type": "array", "items": {"type": "string", "enum": ["red"]}}, "green", None),
    ],
)  # fmt: skip
def test_typed_text_means_what_a_person_would_expect(
    schema: dict[str, Any], typed: str, means: Any
) -> None:
    of = field(**schema)

    if means is None:
        with pytest.raises(ValueError, match=r"is|holds"):
            of.parse(typed)
    else:
        assert of.parse(typed) == means


def test_a_default_that_does_not_fit_is_none() -> None:
    asked = form(
        a={"type": "string", "enum": ["x"], "default": "y"},
        b={"type": "integer", "minimum": 5, "default": 1},
        c={"type": "string", "default": 7},
        d={"type": "array", "items": {"type": "string", "enum": ["x"]}, "default": ["x"]},
    )

    assert asked.defaults() == {"d": ["x"]}
    assert asked.defaults()["d"] is not asked["d"].default


@pytest.mark.covers("R1-142")
def test_an_unknown_kind_is_kept_as_it_came_and_takes_no_value() -> None:
    asked = form(
        ["a", "z"],
        a={"type": "colour", "palette": [1]},
        b={"type": "array", "items": {"type": "colour"}},
    )

    assert [(f.name, f.kind) for f in asked.fields] == [
        ("a", "other"),
        ("b", "other"),
        ("z", "other"),
    ]
    assert isinstance(asked["a"].schema, Unknown)
    assert asked["a"].schema.data == {"type": "colour", "palette": [1]}
    assert not asked.answerable
    with pytest.raises(FormError) as caught:
        asked.check({"a": "red", "b": ["red"]})
    assert set(caught.value.problems) == {"a", "b", "z"}


def test_a_large_hostile_form_is_read_and_checked_in_a_moment() -> None:
    names = [f"n{i}" for i in range(3000)]
    started = time.thread_time()
    asked = form(
        names,
        **{n: {"type": "string", "pattern": "((a+)+)+$", "default": "a" * 30 + "b"} for n in names},
        many={"type": "array", "items": {"type": "string", "enum": names}, "default": names},
    )
    with pytest.raises(FormError):
        asked.check(dict.fromkeys(names, "b"))

    assert time.thread_time() - started < 4


def test_the_patterns_of_a_form_cost_no_more_than_one_may() -> None:
    pattern = "((a+)+)+$"
    text = "a" * (MAX_STEPS // 30) + "b"
    names = [f"n{i}" for i in range(300)]
    started = time.thread_time()
    asked = form([], **{n: {"type": "string", "pattern": pattern, "default": text} for n in names})
    # The first is known not to fit, and the others are the agent's to look at.
    assert list(asked.defaults()) == names[1:]
    with pytest.raises(FormError) as caught:
        asked.check(dict.fromkeys(names, text))
    assert list(caught.value.problems) == names[:1]
    assert time.thread_time() - started < 4
