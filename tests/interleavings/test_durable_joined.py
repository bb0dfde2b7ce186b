"""Random programs of our clients and our durable agent keep what `durable_joined_world` says.

Each law is shown to be able to fail: with one fault put into the library, the same programs find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from antiphon.sessions._attachment import Attachment
from antiphon.sessions._own_turn import OwnTurn
from tests.interleavings.driver import Failure, Seed, how_many, run_many, run_one
from tests.interleavings.durable_joined_world import DurableJoinedWorld
from tests.interleavings.world import Step

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.alarms("zero_updates_turn")
@pytest.mark.bound(300)
@pytest.mark.covers("J1", "J12")
def test_whatever_becomes_of_its_links_a_client_sees_what_the_journal_says(
    seed: Seed, say: Callable[[str], None]
) -> None:
    count = how_many() // 4

    steps = run_many("durable_joined", DurableJoinedWorld, DurableJoinedWorld.weights, count, seed)

    say(f"interleavings: durable joined: {count} programs of {steps} steps")
    assert steps >= 5 * len(seed.numbers(count))


#: Programs that found a fault once, and what it was.
FOUND = {
    "a turn's last words on a link that closes, before the mode its client had set on it": (
        12187,
        [
            *(Step("rush", 7, 30), Step("disk", 24, 6), Step("set_mode", 44, 55)),
            *(Step("prompt", 54, 20), Step("rush", 50, 40), Step("act", 18, 6)),
            *(Step("turn", 24, 26), Step("hang_up", 40, 18)),
        ],
    ),
}


@pytest.mark.alarms("zero_updates_turn")
@pytest.mark.parametrize("fault", FOUND)
def test_what_was_found_once_stays_mended(fault: str) -> None:
    variant, program = FOUND[fault]

    assert run_one(DurableJoinedWorld, program, variant)[0] == []


# ------------------------------------------------------------------ each law can fail


def attached_at_what_is_held(patch: pytest.MonkeyPatch) -> None:
    """Attach again at the last record that is held, and show it again, instead of behind it."""
    ask = Attachment._ask_once

    async def from_the_last(self: Attachment, start: int, *more: Any, **options: Any) -> int:
        return await ask(self, max(start - 1, 1), *more, **options)

    patch.setattr(Attachment, "_ask_once", from_the_last)


def attached_one_too_late(patch: pytest.MonkeyPatch) -> None:
    """Forget the gap: attach again behind the first record that was missed."""
    ask = Attachment._ask_once

    async def behind(self: Attachment, start: int, *more: Any, **options: Any) -> int:
        return await ask(self, start + (start > 2), *more, **options)

    patch.setattr(Attachment, "_ask_once", behind)


def attached_from_now_on(patch: pytest.MonkeyPatch) -> None:
    """Forget the gap: ask for what is live alone."""
    ask = Attachment._ask_once

    async def tip(self: Attachment, start: int, history: str, *more: Any, **options: Any) -> int:
        return await ask(self, start, "tip", *more, **options)

    patch.setattr(Attachment, "_ask_once", tip)


def gaps_passed_over(patch: pytest.MonkeyPatch) -> None:
    def take(self: Attachment, offset: int) -> bool:
        newer = offset > self.offset
        self.offset = max(self.offset, offset)
        return newer

    def lagged(self: Attachment) -> None:
        """Wait for what comes."""

    patch.setattr(Attachment, "_take", take)
    patch.setattr(Attachment, "_attach_again", lagged)


def healed_as_replay(patch: pytest.MonkeyPatch) -> None:
    """What was missed of a turn is no part of it."""
    give = Attachment._give

    def other(self: Attachment, raw: Any, frame: bytes) -> None:
        if self.attaching:
            self.inbox.put_as(raw, frame, "replay", None)
        else:
            give(self, raw, frame)

    patch.setattr(Attachment, "_give", other)


def prompts_shown(patch: pytest.MonkeyPatch) -> None:
    started = OwnTurn.started

    def expecting_nothing(self: OwnTurn) -> None:
        started(self)
        self._expected = ()

    patch.setattr(OwnTurn, "started", expecting_nothing)


def new_sessions_told_twice(patch: pytest.MonkeyPatch) -> None:
    def note(self: Attachment, *_: Any) -> None:
        """Forget what was told without an offset."""
        self._unnumbered = None

    def begin(self: Attachment, _: Any) -> None:
        self.want("tip")

    patch.setattr(Attachment, "_note", note)
    patch.setattr(Attachment, "begin_new", begin)


def ends_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A turn whose end was missed waits for an answer that does not come."""

    def completed(self: Attachment, own: OwnTurn, payload: Any, _: int) -> None:
        own.completed(payload)
        if own.answer is not None:
            self._end(own, *own.answer)

    patch.setattr(Attachment, "_completed", completed)


@pytest.mark.alarms("zero_updates_turn", "delivery")
@pytest.mark.bound(120)
@pytest.mark.parametrize(
    "fault",
    [
        attached_at_what_is_held,
        attached_one_too_late,
        attached_from_now_on,
        gaps_passed_over,
        healed_as_replay,
        prompts_shown,
        new_sessions_told_twice,
        ends_forgotten,
    ],
)
def test_a_fault_of_the_client_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    with pytest.raises(Failure):
        run_many(
            "durable_joined",
            DurableJoinedWorld,
            DurableJoinedWorld.weights,
            1500,
            Seed("7"),
            tries=0,
        )
