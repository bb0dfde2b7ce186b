"""The rider is read whatever is there, and what cannot be meant is as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.journal import Rider, read_rider
from antiphon.schema import UNSET


def rider(**members: Any) -> Rider:
    return read_rider({"raxol.io": members})


@pytest.mark.parametrize("meta", [None, UNSET, {}, {"other.io": {"fromOffset": 3}}])
def test_without_a_rider_everything_is_its_default(meta: Any) -> None:
    assert read_rider(meta) == Rider(0, "from_offset", None, present=False)


@pytest.mark.parametrize("value", [None, 5, "7", True, [], [{"fromOffset": 3}], 1.5])
def test_a_rider_that_is_no_object_is_none(value: Any) -> None:
    assert read_rider({"raxol.io": value}) == Rider()


@pytest.mark.parametrize("meta", [5, "raxol.io", ["raxol.io"], True])
def test_a_meta_that_is_no_object_has_no_rider(meta: Any) -> None:
    assert read_rider(meta) == Rider()


def test_an_empty_rider_is_there() -> None:
    assert rider() == Rider(0, "from_offset", None, present=True)


@pytest.mark.parametrize(
    ("value", "start"),
    [(0, 0), (1, 1), (7, 7), (10**30, 10**30), (-1, 0), (7.0, 0), ("7", 0), (True, 0), (None, 0)],
)
def test_an_offset_is_an_integer_from_0_on(value: Any, start: int) -> None:
    found = rider(fromOffset=value).from_offset

    assert found == start
    assert type(found) is int


@pytest.mark.parametrize(
    ("value", "history"),
    [
        *((name, name) for name in ("from_offset", "tip", "none")),
        *((odd, "from_offset") for odd in ("None", "TIP", "", None, 0, True, ["tip"], {"tip": 1})),
    ],
)
def test_a_policy_is_one_of_three(value: Any, history: str) -> None:
    assert rider(historyPolicy=value).history == history


@pytest.mark.parametrize("value", ["RXC1.a.b", "", None, 5, True, ["RXC1.a.b"], {"token": "RXC1"}])
def test_a_capability_passes_unchanged(value: Any) -> None:
    assert rider(capability=value).capability is value


def test_members_that_are_not_known_mean_nothing() -> None:
    assert rider(fromOffset=2, kinds=["session_update"]) == Rider(2, present=True)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(rider(capability="secret"))
    assert "secret" not in f"{rider(capability=['secret'])}"
    assert repr(rider(fromOffset=3)) == (
        "Rider(from_offset=3, history='from_offset', capability=None, present=True)"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
members = st.fixed_dictionaries(
    {},
    optional={
        "fromOffset": json_values | st.integers(-2, 9),
        "historyPolicy": json_values | st.sampled_from(["from_offset", "tip", "none"]),
        "capability": json_values,
        "more": json_values,
    },
)


def member(value: Any, name: str) -> Any:
    return value.get(name) if hasattr(value, "get") else None


@given(json_values | st.fixed_dictionaries({"raxol.io": json_values | members}))
def test_reading_is_total(meta: Any) -> None:
    found = read_rider(meta)

    raw = member(meta, "raxol.io")
    assert found.present is isinstance(raw, dict)
    assert type(found.from_offset) is int
    assert found.from_offset >= 0
    assert found.history in {"from_offset", "tip", "none"}
    assert found.capability is member(raw, "capability")
    assert found.present or found == Rider()
