"""Limits: the documented defaults, and no limit that would refuse everything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from antiphon.core import Limits

MIB = 1 << 20
DEFAULTS: dict[str, Any] = {
    "frame_bytes": 16 * MIB,
    "json_depth": 256,
    "inbound_requests": 1000,
    "sessions": 1000,
    "queue_bytes": 64 * MIB,
    "unknown_session_updates": 256,
    "request_timeout": 60.0,
    "startup_timeout": 60.0,
    "permission_timeout": 600.0,
    "cancel_backstop": 30.0,
    "close_grace": 2.0,
}


def limits(**given: Any) -> Limits:
    return Limits(**given)


def test_the_defaults_are_the_documented_ones() -> None:
    assert msgspec.structs.asdict(Limits()) == DEFAULTS


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [-1, -0.5])
def test_a_negative_limit_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Limits.{name} must be positive"):
        limits(**{name: value})


@pytest.mark.parametrize("name", sorted(set(DEFAULTS) - {"cancel_backstop"}))
@pytest.mark.covers("F4")
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Limits.{name} must be positive"):
        limits(**{name: 0})


def test_a_turn_may_be_cancelled_without_waiting() -> None:
    assert Limits(cancel_backstop=0).cancel_backstop == 0


@pytest.mark.parametrize("name", ["request_timeout", "startup_timeout", "permission_timeout"])
def test_a_wait_may_be_unbounded(name: str) -> None:
    assert getattr(limits(**{name: None}), name) is None


def test_limits_cannot_be_changed_under_a_connection() -> None:
    made: Any = Limits()

    with pytest.raises(AttributeError):
        made.frame_bytes = 1
    assert msgspec.structs.replace(made, frame_bytes=1).frame_bytes == 1
