"""Tests of antiphon.schema._forgiving: what is kept, what is left out, what stays strict.

The rules are shown on structs made here; that the generated ones follow their flags is shown for
every type in test_oracle.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import pytest
from msgspec import UNSET, UnsetType, inspect

from antiphon.schema import _forgiving, v1, v1_unstable, variants
from antiphon.schema._choice import Choice, Unknown, UnknownUpdate, choice
from antiphon.schema._forgiving import OutOfRange, Walk, forgive
from antiphon.schema._report import FieldError, Repair


class Inner(msgspec.Struct, kw_only=True, rename="camel"):
    deep_name: str
    note: str | UnsetType = UNSET


class Red(msgspec.Struct, kw_only=True, tag_field="hue", tag="red"):
    warmth: int


class Blue(msgspec.Struct, kw_only=True, tag_field="hue", tag="blue"):
    pass


class Outer(msgspec.Struct, kw_only=True, rename="camel"):
    plain_name: str
    listed: list[Inner]
    maybe: Inner | None | UnsetType = UNSET
    free: list[Inner] | UnsetType = UNSET
    args: list[str] | UnsetType = UNSET
    must: list[str] = []
    colour: Red | Blue | UnsetType = UNSET
    colours: list[Red | Blue] | UnsetType = UNSET
    named: dict[str, int] | UnsetType = UNSET
    small: Annotated[int, msgspec.Meta(ge=0, le=9)] | UnsetType = UNSET
    words: Annotated[str, msgspec.Meta(min_length=1)] | UnsetType = UNSET
    key: int | str | None | UnsetType = UNSET
    share: float | UnsetType = UNSET
    either: float | str | UnsetType = UNSET
    flag: bool | UnsetType = UNSET
    more: Outer | UnsetType = UNSET
    rest: Any = UNSET


class Needed(msgspec.Struct, kw_only=True):
    items: list[str]
    count: int


class Counted(msgspec.Struct, kw_only=True):
    noted: Inner
    count: int


class Listing(msgspec.Struct, kw_only=True):
    listed: list[Counted]


class Picky(msgspec.Struct, kw_only=True):
    one: str | UnsetType = UNSET
    two: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.one is UNSET and self.two is UNSET:
            raise ValueError("Object missing required field `one` or `two`")


if TYPE_CHECKING:
    Shape: TypeAlias = Red | Unknown | Inner
else:
    Shape = choice(
        "Shape", __name__, (Red, "hue", "red"), (Unknown, "hue", str), (Inner, None, None)
    )


class Holder(msgspec.Struct, kw_only=True):
    shape: Shape


FORGIVING: Final = {
    Inner: {"note": "D"},
    Outer: {
        "listed": "DS",
        "maybe": "D",
        "free": "DS",
        "args": "N",
        "colours": "DS",
        "share": "D",
        "more": "D",
        "rest": "D",
    },
    Needed: {"items": "N"},
    Listing: {"listed": "S"},
}

GOOD: Final[dict[str, Any]] = {"plainName": "n", "listed": []}


def forgiven(kind: Any, value: Any, *, lax: bool = False) -> tuple[Any, list[tuple[str, str]]]:
    walk = Walk(json.dumps(value, default=str).encode(), out_of_range=False, lax=lax)
    typed = forgive(kind, value, walk)
    return typed, [(repair.path, repair.reason) for repair in walk.repairs]


def refused(kind: Any, value: Any) -> tuple[str, str]:
    with pytest.raises(FieldError) as caught:
        forgiven(kind, value)
    assert str(caught.value) == f"{caught.value.reason} - at `{caught.value.path}`"
    return caught.value.path, caught.value.reason


# --- D, S, N


def test_malformed_optional_value_becomes_absent() -> None:
    value, repairs = forgiven(Outer, GOOD | {"maybe": 5, "share": "x", "rest": None})

    assert value == Outer(plain_name="n", listed=[], rest=None)
    assert repairs == [
        ("$.maybe", "Expected `object`, got `int`"),
        ("$.share", "Expected `float`, got `str`"),
    ]


def test_null_where_it_is_allowed_stays_null() -> None:
    assert forgiven(Outer, GOOD | {"maybe": None, "flag": True}) == (
        Outer(plain_name="n", listed=[], maybe=None, flag=True),
        [],
    )


def test_malformed_required_list_becomes_empty() -> None:
    value, repairs = forgiven(Outer, {"plainName": "n", "listed": {"0": {}}})

    assert value.listed == []
    assert repairs == [("$.listed", "Expected `array`, got `object`")]


def test_missing_required_list_is_an_error_unless_the_walk_is_lax() -> None:
    assert refused(Outer, {"plainName": "n"}) == ("$.listed", "Missing required field")
    assert forgiven(Outer, {"plainName": "n"}, lax=True) == (
        Outer(plain_name="n", listed=[]),
        [("$.listed", "Missing required field")],
    )


def test_bad_items_are_left_out_and_the_good_ones_kept_in_order() -> None:
    listed = [{"deepName": "a"}, 7, {"deepName": 8}, {}, {"deepName": "b", "note": 1}]
    value, repairs = forgiven(Outer, {"plainName": "n", "listed": listed})

    assert value.listed == [Inner(deep_name="a"), Inner(deep_name="b")]
    assert repairs == [
        ("$.listed[1]", "Expected `object`, got `int`"),
        ("$.listed[2].deepName", "Expected `str`, got `int`"),
        ("$.listed[3].deepName", "Missing required field"),
        ("$.listed[4].note", "Expected `str`, got `int`"),
    ]


def test_unknown_variant_is_left_out_of_a_lenient_list() -> None:
    colours = [{"hue": "red", "warmth": 1}, {"hue": "green"}, {"hue": "blue"}, {"warmth": 2}]
    value, repairs = forgiven(Outer, GOOD | {"colours": colours})

    assert value.colours == [Red(warmth=1), Blue()]
    assert repairs == [
        ("$.colours[1].hue", "Unknown variant"),
        ("$.colours[3].hue", "Missing required field"),
    ]


def test_repairs_inside_what_is_given_up_are_not_reported() -> None:
    more: dict[str, Any] = {"plainName": "n", "listed": [1, 2, 3], "must": [None]}
    listed: list[Any] = [{"noted": {"note": 1, "deepName": "d"}, "count": "x"}]

    assert forgiven(Outer, GOOD | {"more": more})[1] == [
        ("$.more.must[0]", "Expected `str`, got `null`")
    ]
    assert forgiven(Listing, {"listed": listed})[1] == [
        ("$.listed[0].count", "Expected `int`, got `str`")
    ]


def test_null_becomes_the_default_where_the_schema_says_so() -> None:
    value, repairs = forgiven(Outer, GOOD | {"args": None})
    needed, _ = forgiven(Needed, {"items": None, "count": 1})

    assert value.args is UNSET
    assert needed == Needed(items=[], count=1)
    assert repairs == [("$.args", "Null counts as absent")]


def test_default_on_null_forgives_nothing_else() -> None:
    assert refused(Outer, GOOD | {"args": ["a", 5]}) == ("$.args[1]", "Expected `str`, got `int`")
    assert refused(Outer, GOOD | {"args": "ab"}) == ("$.args", "Expected `array`, got `str`")


# --- what stays strict


@pytest.mark.parametrize(
    ("members", "path", "reason"),
    [
        ({"plainName": None}, "$.plainName", "Expected `str`, got `null`"),
        ({"must": [None]}, "$.must[0]", "Expected `str`, got `null`"),
        ({"colour": {"hue": "green"}}, "$.colour.hue", "Unknown variant"),
        ({"colour": {"hue": 5}}, "$.colour.hue", "Expected `str`, got `int`"),
        ({"colour": {"hue": "red"}}, "$.colour.warmth", "Missing required field"),
        ({"named": {"a": 1, "b": "2"}}, "$.named[...]", "Expected `int`, got `str`"),
        ({"small": -1}, "$.small", "Expected `int` >= 0"),
        ({"small": 10}, "$.small", "Expected `int` <= 9"),
        ({"small": True}, "$.small", "Expected `int`, got `bool`"),
        ({"small": 1.5}, "$.small", "Expected `int`, got `float`"),
        ({"words": ""}, "$.words", "Expected `str` of length >= 1"),
        ({"flag": 1}, "$.flag", "Expected `bool`, got `int`"),
        ({"either": None}, "$.either", "Expected `float | str`, got `null`"),
        ({"key": 1.0}, "$.key", "Expected `int | str | null`, got `float`"),
        ({"key": True}, "$.key", "Expected `int | str | null`, got `bool`"),
    ],
)
def test_strict_part_is_refused_with_its_path(
    members: dict[str, Any], path: str, reason: str
) -> None:
    assert refused(Outer, GOOD | members) == (path, reason)


def test_known_variant_with_a_bad_body_is_not_taken_for_an_unknown_one() -> None:
    assert refused(Holder, {"shape": {"hue": "red"}}) == (
        "$.shape.warmth",
        "Missing required field",
    )


def test_struct_with_a_tag_alone_accepts_none_and_refuses_a_wrong_one() -> None:
    assert forgiven(Blue, {}) == (Blue(), [])
    assert refused(Blue, {"hue": "red"}) == ("$.hue", "Wrong variant")


def test_rule_over_several_members_is_kept() -> None:
    assert refused(Picky, {}) == ("$", "Object missing required field `one` or `two`")
    assert forgiven(Picky, {"two": "x"}) == (Picky(two="x"), [])


def test_refusal_at_the_root() -> None:
    assert refused(Outer, []) == ("$", "Expected `object`, got `array`")


# --- numbers


def test_whole_float_counts_as_an_integer_and_is_reported() -> None:
    value, repairs = forgiven(Outer, GOOD | {"small": 3.0, "named": {"a": -0.0}})

    assert (value.small, value.named) == (3, {"a": 0})
    assert isinstance(value.small, int)
    assert repairs == [
        ("$.named[...]", "Expected `int`, got `float`"),
        ("$.small", "Expected `int`, got `float`"),
    ]


def test_integer_counts_as_a_float_without_a_report() -> None:
    value, repairs = forgiven(Outer, GOOD | {"share": 3, "either": 4})

    assert (value.share, type(value.share), repairs) == (3.0, float, [])
    assert (value.either, type(value.either)) == (4.0, float)


def test_number_out_of_range_is_no_value_of_any_type() -> None:
    walk = Walk(b"", out_of_range=True, lax=False)
    big = OutOfRange()
    members = {"share": big, "maybe": {"deepName": big}, "rest": {"a": [1, {"b": big}]}}

    assert forgive(Outer, GOOD | members, walk) == Outer(plain_name="n", listed=[])
    assert walk.repairs == [
        Repair("$.maybe.deepName", "Expected `str`, got `number out of range`"),
        Repair("$.share", "Expected `float`, got `number out of range`"),
        Repair("$.rest", "Number out of range"),
    ]
    assert refused(Outer, GOOD | {"share": 10**400, "plainName": 1})[0] == "$.plainName"


# --- unions by shape, and updates


def test_unknown_variant_of_an_open_union_is_kept_as_it_came() -> None:
    value, repairs = forgiven(Holder, {"shape": {"hue": "green", "a": [1]}})

    assert value.shape == Unknown(b'{"hue":"green","a":[1]}')
    assert repairs == []


def test_variant_without_a_mark_is_found_by_the_lack_of_it() -> None:
    assert forgiven(Holder, {"shape": {"deepName": "x", "note": 5}}) == (
        Holder(shape=Inner(deep_name="x")),
        [("$.shape.note", "Expected `str`, got `int`")],
    )


def test_value_of_no_variant_is_refused() -> None:
    assert refused(Holder, {"shape": 5}) == ("$.shape", "Expected `object`, got `int`")


def test_undecodable_update_is_kept_with_the_text_it_had_in_the_message() -> None:
    text = b'{"sessionId":"s","update":{"sessionUpdate" : "new","x":1.50e0},"z":1}'
    walk = Walk(text, out_of_range=False, lax=False)

    value = forgive(v1.SessionNotification, msgspec.json.decode(text), walk)

    assert isinstance(value.update, UnknownUpdate)
    assert value.update.raw == b'{"sessionUpdate" : "new","x":1.50e0}'
    assert value.update.reason == "Unknown variant - at `$.update.sessionUpdate`"
    assert walk.repairs == [Repair("$.update.sessionUpdate", "Unknown variant")]


# --- the plans themselves


def every_type() -> list[Any]:
    modules = (v1, v1_unstable)
    return [
        value
        for module in modules
        for name in module.__all__
        if is_type(value := getattr(module, name))
    ]


def is_type(value: Any) -> bool:
    return (isinstance(value, type) and issubclass(value, msgspec.Struct)) or isinstance(
        value, Choice
    )


def test_every_wire_type_has_a_plan() -> None:
    # A constraint that no plan knows raises instead of being ignored.
    for kind in every_type():
        for variant in variants(kind):
            if variant is not Unknown:
                inspect.type_info(variant)
                with pytest.raises(FieldError):
                    forgiven(variant, 5)


def test_a_field_with_a_merged_struct_is_forgiven_as_its_union() -> None:
    def outcome(kind: Any, message: Any, step: str) -> Any:
        try:
            found, repairs = forgiven(kind, message)
        except FieldError as error:
            return error.path.removeprefix(step), error.reason
        return found, [(path.removeprefix(step), reason) for path, reason in repairs]

    texts: list[dict[str, Any]] = [{}, {"text": "t"}, {"text": None}, {"text": 5}]
    blobs: list[dict[str, Any]] = [{}, {"blob": "b"}, {"blob": 5}]
    rests: list[dict[str, Any]] = [{"uri": "u"}, {"uri": "u", "mimeType": 5, "_meta": []}, {}]
    resources = [one | two | three for one in texts for two in blobs for three in rests]
    for value in (*resources, None, 5, [resources[0]]):
        alone = outcome(v1.EmbeddedResourceResource, value, "$")
        inside = outcome(v1.EmbeddedResource, {"resource": value}, "$.resource")
        if isinstance(inside[0], v1.EmbeddedResource):
            inside = (inside[0].resource, inside[1])
            assert type(inside[0]) is type(alone[0])
        assert inside == alone


def test_constraint_that_no_plan_knows_is_not_ignored() -> None:
    with pytest.raises(AssertionError, match="does not know"):
        forgiven(list[Annotated[str, msgspec.Meta(pattern="a+")]], ["b"])


def test_flags_name_fields_that_exist() -> None:
    for module in (v1, v1_unstable):
        for struct, flags in module.FORGIVING.items():
            fields = {field.name: field for field in msgspec.structs.fields(struct)}
            assert set(flags) <= set(fields)
            required = {name for name in flags if fields[name].required}
            assert all(is_list(fields[name].type) for name in required), struct


def is_list(kind: Any) -> bool:
    return isinstance(inspect.type_info(kind), inspect.ListType)


def test_plans_are_built_whole_also_by_many_threads_at_once() -> None:
    message: dict[str, Any] = {
        "plainName": "n",
        "listed": [{"deepName": "a", "note": 1}],
        "more": GOOD,
    }
    expected = Outer(
        plain_name="n", listed=[Inner(deep_name="a")], more=Outer(plain_name="n", listed=[])
    )
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            _forgiving._plans.clear()
            found = [threads.submit(forgiven, Outer, message) for _ in range(8)]
            assert [future.result()[0] for future in found] == [expected] * 8


def test_time_is_linear_in_the_number_of_repairs() -> None:
    def spent(count: int) -> float:
        value = {"plainName": "n", "listed": [{"deepName": "a", "note": 1}, 5] * count}
        begin = time.thread_time()
        _, repairs = forgiven(Outer, value)
        assert len(repairs) == 2 * count
        return time.thread_time() - begin

    spent(10)

    # Quadratic time would be 64 times as long; linear 8 times, with room for a busy machine.
    assert min(spent(4000), spent(4000)) < 32 * min(spent(500), spent(500))
