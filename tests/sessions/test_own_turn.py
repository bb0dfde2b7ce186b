from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon import RequestError
from antiphon.schema import v1
from antiphon.sessions._own_turn import Outcome, OwnTurn, Place

if TYPE_CHECKING:
    from antiphon import PromptTurn


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


def own_turn(*prompt: str, given: int = 0) -> OwnTurn:
    blocks = [v1.TextContent(text=text) for text in prompt]
    turn = SimpleNamespace(params=SimpleNamespace(prompt=blocks))
    return OwnTurn(cast("PromptTurn", turn), given, prompts=bool(prompt))


def chunk(text: str, kind: str = "agent") -> bytes:
    content = {"type": "text", "text": text}
    return json.dumps({"sessionUpdate": f"{kind}_message_chunk", "content": content}).encode()


def test_the_blocks_of_its_prompt_are_as_many_as_were_sent() -> None:
    own = own_turn("one", "two")
    own.started()

    places = [own.place(chunk(text, "user")) for text in ("one", "two", "three")]

    assert places == [Place.prompt, Place.prompt, Place.turn]


def test_another_prompt_is_no_part_of_it_and_its_own_may_follow() -> None:
    own = own_turn("ours")
    own.started()
    assert own.place(chunk("theirs", "user")) is Place.outside
    assert not own.running

    own.started()
    assert own.place(chunk("ours", "user")) is Place.prompt
    assert own.running


def test_how_it_ended_is_kept_when_another_turn_begins() -> None:
    own = own_turn("ours")
    own.started()
    ended = own.completed({"stopReason": "end_turn"})
    own.started()
    own.place(chunk("theirs", "user"))

    assert own.outcome is ended


def test_an_update_that_is_no_chunk_of_the_user_ends_the_blocks() -> None:
    own = own_turn("ours")
    own.started()

    assert own.place(chunk("a")) is Place.turn
    assert own.place(chunk("ours", "user")) is Place.turn


def test_what_it_had_before_its_records_comes_again() -> None:
    own = own_turn(given=2)
    own.started()

    places = [own.place(chunk(text)) for text in "abc"]

    assert places == [Place.double, Place.double, Place.turn]


def test_copies_are_told_apart_in_either_order() -> None:
    own = own_turn()
    own.started()
    assert own.before(chunk("a"), doubles=True) == ([], False)
    assert not own.told(chunk("a"), b"", given=False)
    assert own.told(chunk("b"), b"b", given=False)
    assert own.before(chunk("b"), doubles=True) == ([], False)
    assert not own.held


def test_the_same_text_twice_is_two_updates() -> None:
    own = own_turn()
    own.started()
    assert own.told(chunk("a"), b"1", given=True)
    assert own.told(chunk("a"), b"2", given=True)

    assert [own.before(chunk("a"), doubles=False) for _ in range(3)] == [
        ([], True),
        ([], True),
        ([], False),
    ]


def test_what_has_no_other_copy_comes_in_front_of_the_next_that_has() -> None:
    own = own_turn()
    own.started()
    for text in "abc":
        own.told(chunk(text), text.encode(), given=False)

    missed, given = own.before(chunk("c"), doubles=True)

    assert [copy.frame for copy in missed] == [b"a", b"b"]
    assert not given


def test_what_is_held_is_released_once() -> None:
    own = own_turn()
    own.started()
    own.told(chunk("a"), b"a", given=False)
    own.told(chunk("b"), b"b", given=True)

    assert [copy.frame for copy in own.release()] == [b"a"]
    assert own.release() == []
    assert own.before(chunk("a"), doubles=True) == ([], True)


def test_copies_of_which_the_second_never_comes_are_bounded() -> None:
    own = own_turn()
    own.started()
    large = chunk("x" * (1 << 20))
    for _ in range(40):
        own.told(large, b"", given=True)

    assert not own.full
    assert sum(own.before(large, doubles=False)[1] for _ in range(40)) <= 16


def test_too_many_that_are_held_are_to_be_released() -> None:
    own = own_turn()
    own.started()
    large = chunk("x" * (1 << 20))
    while not own.full:
        own.told(large, b"", given=False)

    assert len(own.release()) == 16


def test_an_update_that_cannot_be_read_is_like_no_other() -> None:
    own = own_turn()
    own.started()
    own.told(b"{1}", b"", given=True)

    assert own.before(b"{2}", doubles=False) == ([], False)
    assert own.before(b"{1}", doubles=False) == ([], True)
