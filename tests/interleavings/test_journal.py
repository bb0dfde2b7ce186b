"""Random programs of appends, turns, attaches, lag and deaths keep the laws of a session's journal.

For each store, and each law is shown to be able to fail: with one fault put into the library, the same
programs find it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon.journal import (
    MemoryJournal,
    Record,
    SqliteJournal,
    Subscriber,
    TurnHeld,
    Writer,
    Writers,
)
from antiphon.journal._tails import Audience
from tests.interleavings.driver import Failure, Seed, how_many, run_many, run_one
from tests.interleavings.journal_world import JournalWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.journal import Entry, Journal, SessionLog

#: A disk that is none, where there is one: what is tested here is order, not durability.
RAM = Path("/dev/shm")


class OnDisk(JournalWorld):
    """The same over SQLite. Its thread goes its own way: a seed names the program, not each step's time."""

    async def make_store(self) -> Journal:
        self.folder = tempfile.mkdtemp(prefix="antiphon-test-", dir=RAM if RAM.is_dir() else None)
        return SqliteJournal(Path(self.folder) / "journal", shards=1, durability="process")

    async def end(self) -> None:
        try:
            await super().end()
        finally:
            await self.store.aclose()
            await asyncio.to_thread(shutil.rmtree, self.folder)


WORLDS: dict[str, type[JournalWorld]] = {"memory": JournalWorld, "sqlite": OnDisk}
#: How many of the programs run over each store, in percent.
SHARES = {"memory": 100, "sqlite": 10}


@pytest.mark.covers("J1", "J2", "J3", "J6", "J7", "J8", "J10", "J12", "P-BUS6", "CDI-4")
@pytest.mark.bound(300)
@pytest.mark.parametrize("store", WORLDS)
def test_no_random_interleaving_breaks_the_laws_of_a_journal(
    store: str, seed: Seed, say: Callable[[str], None]
) -> None:
    world, count = WORLDS[store], how_many() * SHARES[store] // 100

    steps = run_many(f"journal {store}", world, world.weights, count, seed)

    say(f"interleavings: journal {store}: {count} programs of {steps} steps")
    assert steps >= 5 * len(seed.numbers(count))


def test_a_seed_names_a_run_exactly(seed: Seed) -> None:
    for index in range(20):
        program, variant = Seed(f"{seed.base}").program("journal", index, JournalWorld.weights)
        runs = [run_one(JournalWorld, program, variant) for _ in range(2)]
        assert runs[0] == runs[1]


# ------------------------------------------------------------------ each law can fail


def published_ahead(patch: pytest.MonkeyPatch) -> None:
    submit = Writer.submit

    def submit_and_tell(self: Writer, entry: Entry, *arguments: Any, **options: Any) -> None:
        record = Record(1, self.session_id, entry.kind, entry.payload, entry.taint, 0)
        self._give(record, list(self._seats.values()))
        submit(self, entry, *arguments, **options)

    patch.setattr(Writer, "submit", submit_and_tell)


def published_in_reverse(patch: pytest.MonkeyPatch) -> None:
    publish = Writer._publish

    def publish_reversed(self: Writer, told: list[Any], records: list[Record], size: int) -> None:
        publish(self, told[::-1], records[::-1], size)

    patch.setattr(Writer, "_publish", publish_reversed)


def never_repaired(patch: pytest.MonkeyPatch) -> None:
    prepare = Writer._prepare

    async def prepare_lightly(self: Writer) -> None:
        async def latest(tags: Any) -> dict[str, Record]:
            return {}

        patch.setattr(self.log, "latest", latest, raising=False)
        await prepare(self)

    patch.setattr(Writer, "_prepare", prepare_lightly)


def repaired_at_the_tip_alone(patch: pytest.MonkeyPatch) -> None:
    prepare = Writer._prepare

    async def prepare_for_the_tip(self: Writer) -> None:
        latest, log = self.log.latest, self.log

        async def of_the_tip(tags: Any) -> dict[str, Record]:
            mark, found = await log.high_watermark(), await latest(tags)
            tip = max(found.values(), key=lambda record: record.offset, default=None)
            if tip is None or tip.kind != "turn_started" or tip.offset == mark:
                return found
            return {"turn_completed": msgspec.structs.replace(tip, kind="turn_completed")}

        patch.setattr(self.log, "latest", of_the_tip, raising=False)
        await prepare(self)

    patch.setattr(Writer, "_prepare", prepare_for_the_tip)


def latch_ignored(patch: pytest.MonkeyPatch) -> None:
    begin = Writer.begin_turn

    async def begin_turn(self: Writer, holder: object, entries: Sequence[Entry] = ()) -> int:
        try:
            return await begin(self, holder, entries)
        except TurnHeld:
            self.turn_holder = None
            return await begin(self, holder, entries)

    patch.setattr(Writer, "begin_turn", begin_turn)


def strangers_believed(patch: pytest.MonkeyPatch) -> None:
    complete = Writer.complete_turn

    def complete_turn(self: Writer, holder: object, *arguments: Any, **options: Any) -> None:
        complete(self, self.turn_holder or holder, *arguments, **options)

    patch.setattr(Writer, "complete_turn", complete_turn)


def dead_holders_kept(patch: pytest.MonkeyPatch) -> None:
    def release_turn(self: Writer, holder: object) -> None:
        """Wait for it to come back."""

    patch.setattr(Writer, "release_turn", release_turn)


def failures_kept_quiet(patch: pytest.MonkeyPatch) -> None:
    fail = Writer._fail

    async def fail_quietly(self: Writer, error: BaseException, batch: list[Any]) -> None:
        await fail(self, error, [])

    patch.setattr(Writer, "_fail", fail_quietly)


def tails_not_ended(patch: pytest.MonkeyPatch) -> None:
    def end_all(self: Audience, reason: str) -> None:
        self._seats.clear()

    patch.setattr(Audience, "_end_all", end_all)


def claim_kept(patch: pytest.MonkeyPatch) -> None:
    async def over(self: Writer) -> None:
        if self.freed is not None:
            self.freed()

    patch.setattr(Writer, "_over", over)

    async def drop(self: Writers, place: Any, reason: str) -> None:
        if place.writer is not None:
            await place.writer.aclose(reason)
            place.writer = None

    patch.setattr(Writers, "_drop", drop)


def credit_not_given_back(patch: pytest.MonkeyPatch) -> None:
    def credit(self: Audience, tail: Any, count: int = 1) -> None:
        """Keep it."""

    patch.setattr(Audience, "credit", credit)


def one_record_skipped_for_who_lags(patch: pytest.MonkeyPatch) -> None:
    def give(self: Audience, record: Record, seats: list[Any]) -> None:
        for seat in seats:
            if seat.tail is not None and seat.credit > 0:
                seat.credit -= 1
                seat.tail.received(record)

    patch.setattr(Audience, "_give", give)


def mark_read_before_registering(patch: pytest.MonkeyPatch) -> None:
    attach = Subscriber.attach

    async def attach_late(self: Subscriber) -> int:
        mark = await self._log.high_watermark()
        self._log = Marked(self._log, mark)  # type: ignore[assignment]
        return await attach(self)

    patch.setattr(Subscriber, "attach", attach_late)


class Marked:
    """A log whose mark is the one that was read before."""

    def __init__(self, log: SessionLog, mark: int) -> None:
        self.session_id = log.session_id
        self.read = log.read
        self.mark = mark

    async def high_watermark(self) -> int:
        return self.mark


def gate_open(patch: pytest.MonkeyPatch) -> None:
    forward = Subscriber._forward

    def forward_all(self: Subscriber, record: Record) -> None:
        self._mark = 0
        forward(self, record)

    patch.setattr(Subscriber, "_forward", forward_all)


def answered_before_history(patch: pytest.MonkeyPatch) -> None:
    replay = Subscriber._replay

    async def replay_late(self: Subscriber, start: int, mark: int) -> None:
        self._reply(mark)
        await replay(self, start, mark)

    patch.setattr(Subscriber, "_replay", replay_late)


def deletions_forgotten(patch: pytest.MonkeyPatch) -> None:
    async def delete(self: MemoryJournal, session_id: str) -> bool:
        return session_id in self._shelf.all

    patch.setattr(MemoryJournal, "delete", delete)


def appends_halved(patch: pytest.MonkeyPatch) -> None:
    take = Writer._next

    def take_some(self: Writer) -> Any:
        entries, told, size, flush = take(self)
        return entries[:3], told[:3], size, flush

    patch.setattr(Writer, "_next", take_some)


FAULTS = [
    published_ahead,
    published_in_reverse,
    never_repaired,
    repaired_at_the_tip_alone,
    latch_ignored,
    strangers_believed,
    dead_holders_kept,
    failures_kept_quiet,
    tails_not_ended,
    claim_kept,
    credit_not_given_back,
    one_record_skipped_for_who_lags,
    mark_read_before_registering,
    gate_open,
    answered_before_history,
    deletions_forgotten,
    appends_halved,
]


@pytest.mark.covers("J2", "J3", "J6", "J7", "J12", "P-BUS6")
@pytest.mark.bound(60)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_journal_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, seed: Seed
) -> None:
    fault(monkeypatch)

    with pytest.raises(Failure, match="ANTIPHON_SEED="):
        run_many("journal", JournalWorld, JournalWorld.weights, 1500, Seed(str(seed.base)), tries=0)
