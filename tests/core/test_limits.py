"""Limits have the documented defaults, and a nonsensical one is refused where it is made."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from antiphon.core import Limits

FIELDS = Limits.__struct_fields__
HINTS = get_type_hints(Limits)
OPTIONAL = [name for name in FIELDS if type(None) in get_args(HINTS[name])]
WHOLE = [name for name in FIELDS if HINTS[name] is int]


def limits_with(name: str, value: Any) -> Limits:
    given: dict[str, Any] = {name: value}
    return Limits(**given)


def test_the_defaults_are_those_of_the_design() -> None:
    assert msgspec.structs.asdict(Limits()) == {
        "frame_bytes": 16 * 1024 * 1024,
        "json_depth": 256,
        "inbound_requests": 1000,
        "inbound_bytes": 64 * 1024 * 1024,
        "sessions": 1000,
        "queue_bytes": 64 * 1024 * 1024,
        "queue_updates": 32_768,
        "session_updates": 4_096,
        "session_bytes": 16 * 1024 * 1024,
        "unknown_session_updates": 256,
        "queue_notifications": 4_096,
        "notification_bytes": 16 * 1024 * 1024,
        "notification_timeout": 10.0,
        "unsent_bytes": 64 * 1024 * 1024,
        "request_timeout": 60.0,
        "startup_timeout": 60.0,
        "permission_timeout": 600.0,
        "silence_timeout": None,
        "cancel_backstop": 30.0,
        "close_grace": 2.0,
    }


def test_a_limit_is_changed_by_name_and_never_afterwards() -> None:
    limits = Limits(frame_bytes=1)

    assert (limits.frame_bytes, limits.json_depth) == (1, 256)
    with pytest.raises(AttributeError):
        limits.frame_bytes = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        Limits(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, True, "1", [], 1j])
def test_what_is_no_positive_number_is_refused_by_the_name_of_its_limit(
    name: str, value: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"Limits.{name} must be"):
        limits_with(name, value)


@pytest.mark.parametrize("name", FIELDS)
def test_only_the_backstop_may_be_zero(name: str) -> None:
    if name == "cancel_backstop":
        assert Limits(cancel_backstop=0).cancel_backstop == 0
    else:
        with pytest.raises(ValueError, match=name):
            limits_with(name, 0)


@pytest.mark.parametrize("name", WHOLE)
def test_counts_and_sizes_are_whole(name: str) -> None:
    with pytest.raises(TypeError, match=f"Limits.{name} must be an integer, not 1.5"):
        limits_with(name, 1.5)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in WHOLE])
def test_seconds_may_be_whole_or_not(name: str) -> None:
    assert getattr(limits_with(name, 5), name) == 5
    assert getattr(limits_with(name, 0.001), name) == 0.001


@pytest.mark.parametrize("name", FIELDS)
def test_no_limit_is_possible_exactly_where_the_type_says_so(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(limits_with(name, None), name) is None
    else:
        with pytest.raises(TypeError, match=name):
            limits_with(name, None)
