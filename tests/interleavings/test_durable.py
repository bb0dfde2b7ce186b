"""Random programs of clients of one durable agent keep what `durable_world` says of journals and attaches.

Each law is shown to be able to fail: with one fault put into the library, the same programs find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from antiphon.journal import Subscriber, Writer
from antiphon.sessions._durability import Durability
from antiphon.sessions._durable_link import DurableLink
from antiphon.sessions._durable_router import DurableRouter
from tests.interleavings.driver import Failure, Seed, how_many, run_many, run_one
from tests.interleavings.durable_world import DurableWorld
from tests.interleavings.world import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.journal import Entry, Record


@pytest.mark.alarms("zero_updates_turn")
@pytest.mark.bound(300)
@pytest.mark.covers("J1", "J2", "J7", "J10", "J12")
def test_no_random_interleaving_of_a_durable_agent_s_clients_loses_or_doubles_a_record(
    seed: Seed, say: Callable[[str], None]
) -> None:
    count = how_many() // 5

    steps = run_many("durable", DurableWorld, DurableWorld.weights, count, seed)

    say(f"interleavings: durable: {count} programs of {steps} steps")
    assert steps >= 5 * len(seed.numbers(count))


#: Programs that found a fault once, and what it was.
FOUND = {
    "an attach that replaces another at the end of a turn, on a slow link: the answer came first": (
        8393,
        [
            *(Step("attach", 50, 33), Step("rest", 35, 49), Step("attach", 14, 44)),
            *(Step("say", 35, 6), Step("turn", 56, 29), Step("end", 15, 15)),
            *(Step("slow", 32, 19), Step("turn", 61, 41), Step("turn", 31, 16)),
        ],
    ),
    "an attach that lags before its answer: what its connection's own turn said next was lost": (
        41695,
        [
            *(Step("connect", 55, 20), Step("lose", 10, 49), Step("lose", 6, 40)),
            *(Step("attach", 21, 29), Step("rest", 18, 47), Step("say", 2, 47)),
            *(Step("shut", 59, 40), Step("attach", 44, 13), Step("connect", 62, 51)),
            *(Step("say", 8, 2), Step("slow", 44, 21), Step("say", 48, 15)),
            *(Step("end", 31, 32), Step("connect", 23, 57), Step("lose", 58, 27)),
            *(Step("prompt", 52, 16), Step("open", 58, 58), Step("rest", 7, 50)),
            *(Step("say", 17, 52),),
        ],
    ),
}


@pytest.mark.alarms("zero_updates_turn")
@pytest.mark.parametrize("fault", FOUND)
def test_what_was_found_once_stays_mended(fault: str) -> None:
    variant, program = FOUND[fault]

    assert run_one(DurableWorld, program, variant)[0] == []


# ------------------------------------------------------------------ each law can fail


def published_twice(patch: pytest.MonkeyPatch) -> None:
    """The origin gets its own copy, attached or not."""
    published = DurableLink.published

    def always(self: DurableLink, records: Sequence[Record]) -> None:
        attached, self.attached = self.attached, None
        published(self, records)
        self.attached = attached

    patch.setattr(DurableLink, "published", always)


def answered_before_it_is_seen(patch: pytest.MonkeyPatch) -> None:
    async def seen(self: DurableLink, done: Any) -> None:
        """Wait for nothing."""

    patch.setattr(DurableLink, "_seen", seen)


def nothing(*_: object) -> None:
    """Check nothing."""


def no_latch(patch: pytest.MonkeyPatch) -> None:
    begin = Writer.begin_turn

    async def begin_turn(self: Writer, *args: Any) -> int:
        self.turn_holder = None
        return await begin(self, *args)

    patch.setattr(Writer, "begin_turn", begin_turn)
    patch.setattr(Durability, "check_free", nothing)


def gate_open(patch: pytest.MonkeyPatch) -> None:
    """What is live is shown, whether the history has shown it or not."""
    forward = Subscriber._forward

    def shown(self: Subscriber, record: Record) -> None:
        mark, self._mark = self._mark, 0
        forward(self, record)
        self._mark = mark

    patch.setattr(Subscriber, "_forward", shown)


def held_back_for_ever(patch: pytest.MonkeyPatch) -> None:
    def failed(self: DurableLink) -> None:
        self.attached = None
        self._held_back = {}

    patch.setattr(DurableLink, "attach_failed", failed)


def lag_before_the_answer_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An attach is answered as if it had all that is live, and has lagged already."""
    answered = DurableLink.attach_answered

    def all_is_had(self: DurableLink, uncovered: int, mark: int) -> None:
        answered(self, uncovered, mark)
        self._held_back = {}

    patch.setattr(DurableLink, "attach_answered", all_is_had)


def two_tails(patch: pytest.MonkeyPatch) -> None:
    def detach(self: DurableLink) -> None:
        self.attached = None

    patch.setattr(DurableLink, "detach", detach)


def late_answer(patch: pytest.MonkeyPatch) -> None:
    """An attach is answered behind what is live."""
    answer = DurableRouter._answer

    def soon(self: DurableRouter, *arguments: Any, **more: Any) -> None:
        loop = self._peer.connection.loop
        loop.call_soon(lambda: answer(self, *arguments, **more))

    patch.setattr(DurableRouter, "_answer", soon)


def forgotten_record(patch: pytest.MonkeyPatch) -> None:
    submit, count = Writer.submit, [0]

    def some(self: Writer, entry: Entry, *arguments: Any, **more: Any) -> None:
        count[0] += 1
        if count[0] % 11 or arguments or more or entry.kind != "session_update":
            submit(self, entry, *arguments, **more)

    def published_without(self: Writer, *arguments: Any) -> None:
        give(self, *arguments) if arguments[0].offset % 9 else None

    give = Writer._give
    patch.setattr(Writer, "submit", some)
    patch.setattr(Writer, "_give", published_without)


def uncompleted(patch: pytest.MonkeyPatch) -> None:
    """A turn that fails has no completion of its own."""

    async def end(self: DurableLink, turn: Any, *, failure: Any = None, **more: Any) -> None:
        if failure is None:
            await end_turn(self, turn, **more)
        else:
            self._turn = None
            if self.writer is not None:
                self.writer.turn_holder = None

    end_turn = DurableLink.end_turn
    patch.setattr(DurableLink, "end_turn", end)


@pytest.mark.alarms("zero_updates_turn")
@pytest.mark.bound(120)
@pytest.mark.parametrize(
    "fault",
    [
        published_twice,
        answered_before_it_is_seen,
        no_latch,
        gate_open,
        held_back_for_ever,
        lag_before_the_answer_forgotten,
        two_tails,
        late_answer,
        forgotten_record,
        uncompleted,
    ],
)
def test_a_fault_of_the_library_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    with pytest.raises(Failure):
        run_many("durable", DurableWorld, DurableWorld.weights, 4000, Seed("6"), tries=0)
