from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon import RequestError
from antiphon.sessions._own_turn import Outcome


def test_a_turn_that_was_completed_has_its_response() -> None:
    outcome = Outcome.of({"turnId": 1, "stopReason": "max_tokens"})

    assert outcome.result is not None
    assert json.loads(outcome.result) == {"stopReason": "max_tokens"}
    assert not outcome.orphaned


@pytest.mark.covers("J7")
def test_a_turn_that_nobody_ended_counts_as_cancelled_and_says_so() -> None:
    outcome = Outcome.of({"turnId": 1, "outcome": "orphaned", "stopReason": "cancelled"})

    assert outcome.result is not None
    assert json.loads(outcome.result) == {
        "stopReason": "cancelled",
        "_meta": {"raxol.io": {"outcome": "orphaned"}},
    }
    assert outcome.orphaned


def test_a_turn_that_failed_has_its_error() -> None:
    outcome = Outcome.of({"turnId": 1, "error": {"code": -32042, "message": "too warm"}})

    assert outcome.result is None
    assert isinstance(outcome.error, RequestError)
    assert (outcome.error.code, outcome.error.message) == (-32042, "too warm")


@pytest.mark.parametrize(
    "payload", [{}, {"stopReason": 3}, {"error": {}}, {"error": {"code": "x"}}]
)
def test_a_record_that_says_nothing_of_use_ends_a_turn_all_the_same(
    payload: dict[str, Any],
) -> None:
    outcome = Outcome.of(payload)

    assert (outcome.result is None) is (outcome.error is not None)
