"""A writer appends, then publishes; it begins and repairs sessions, and one turn at a time is open."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.journal import (
    SESSION_CREATED,
    SESSION_UPDATE,
    STEER,
    TURN_COMPLETED,
    TURN_STARTED,
    Entry,
    JournalDamaged,
    JournalError,
    JournalInUse,
    MemoryJournal,
    Record,
    Sender,
    TurnHeld,
    Writer,
)
from tests.journal.ears import Ears, Events, HeldJournal, HeldLog, kinds, say, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ORPHAN = {"outcome": "orphaned", "stopReason": "cancelled"}


class Told:
    """What `published` was called with: offsets, and None."""

    def __init__(self) -> None:
        self.of: list[tuple[int, int | None]] = []

    def __call__(self, number: int) -> Callable[[Record | None], None]:
        def published(record: Record | None) -> None:
            self.of.append((number, None if record is None else record.offset))

        return published


class Held:
    """A writer over a log that a test holds back."""

    def __init__(self, journal: MemoryJournal, log: HeldLog, **options: Any) -> None:
        self.journal = journal
        self.log = log
        self.events = Events()
        self.writer = Writer(log, on_event=self.events, **options)

    async def stored(self) -> list[Record]:
        return await stored(self.journal)


async def held(journal: MemoryJournal | None = None, **options: Any) -> Held:
    journal = MemoryJournal() if journal is None else journal
    return Held(journal, HeldLog(await journal.open("s")), **options)


async def turn_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ------------------------------------------------------------------ append, then publish


@pytest.mark.covers("J3", "P-BUS6")
async def test_every_record_is_published_once_in_order_and_after_it_is_durable() -> None:
    made = await held(meta={"cwd": "/x"})
    tail = Ears()
    await made.writer.subscribe(tail)
    made.log.gate.clear()
    told = Told()
    for number in range(3):
        made.writer.submit(say(str(number)), told(number))
    await made.log.begun.wait()
    await turn_of_the_loop()

    assert (tail.heard, told.of) == ([], [])

    made.log.gate.set()
    await made.writer.append(say("last"))
    assert tail.heard == [2, 3, 4, 5]
    assert told.of == [(0, 2), (1, 3), (2, 4)]
    assert tail.records == (await made.stored())[1:]
    await made.writer.aclose()


async def test_tails_are_told_before_the_one_who_submitted_record_by_record() -> None:
    made = await held()
    order: list[str] = []

    class Noting(Ears):
        def received(self, record: Record) -> None:
            order.append(f"tail {record.offset}")

    await made.writer.subscribe(Noting())

    def published(record: Record | None) -> None:
        order.append(f"told {record and record.offset}")

    for _ in range(2):
        made.writer.submit(say("x"), published)
    await made.writer.append(say("last"))

    assert order == ["tail 2", "told 2", "tail 3", "told 3", "tail 4"]
    await made.writer.aclose()


async def test_nothing_happens_inside_submit_even_with_eager_tasks() -> None:
    made = await held()
    await made.writer.ready()
    factory = getattr(asyncio, "eager_task_factory", None)  # since 3.12
    asyncio.get_running_loop().set_task_factory(factory)
    told = Told()

    made.writer.submit(say("a"), told(0))
    made.writer.submit(say("b"), told(1))
    assert told.of == []
    await made.writer.append(say("c"))

    assert made.log.appends == [(1, True), (3, True)]
    asyncio.get_running_loop().set_task_factory(None)
    await made.writer.aclose()


async def test_what_comes_in_one_turn_of_the_loop_is_one_append() -> None:
    made = await held()
    await made.writer.ready()
    for size in (1, 7, 300):
        for number in range(size):
            made.writer.submit(say(str(number)))
        await turn_of_the_loop()

    assert made.log.appends == [(1, True), (1, False), (7, False), (300, False)]
    await made.writer.aclose()


async def test_what_comes_while_an_append_runs_is_the_next() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    made.log.begun.clear()
    made.writer.submit(say("first"))
    await made.log.begun.wait()
    for number in range(5):
        made.writer.submit(say(str(number)), flush=number == 2)
        await asyncio.sleep(0)
    made.log.gate.set()
    await turn_of_the_loop()

    assert made.log.appends == [(1, True), (1, False), (5, True)]
    await made.writer.aclose()


async def test_somebody_who_waits_hurries_the_append_that_gathers() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    made.log.begun.clear()
    made.writer.submit(say("paced"))
    await made.log.begun.wait()
    assert made.log.hurried == 0

    made.writer.submit(say("at once"), flush=True)
    made.writer.submit(say("and again"), flush=True)
    assert made.log.hurried == 1
    made.log.gate.set()
    await made.writer.aclose()


async def test_hurrying_flushes_what_waits_and_nothing_where_nothing_does() -> None:
    made = await held()
    await made.writer.ready()
    made.writer.hurry()
    made.writer.submit(say("a"))
    await turn_of_the_loop()
    made.writer.submit(say("b"))
    made.writer.hurry()
    await turn_of_the_loop()

    assert made.log.appends == [(1, True), (1, False), (1, True)]
    await made.writer.aclose()


@pytest.mark.covers("J8")
async def test_concurrent_appends_are_contiguous_from_1() -> None:
    made = await held()
    records = await asyncio.gather(*(made.writer.append(say(str(n))) for n in range(100)))

    assert [record.offset for record in records] == list(range(2, 102))
    assert [record.offset for record in await made.stored()] == list(range(1, 102))
    await made.writer.aclose()


async def test_a_published_that_raises_hinders_nobody(caplog: pytest.LogCaptureFixture) -> None:
    made = await held()
    told = Told()

    def broken(record: Record | None) -> None:
        raise ValueError("broken")

    made.writer.submit(say("a"), broken)
    made.writer.submit(say("b"), told(1))
    await made.writer.append(say("c"))

    assert told.of == [(1, 3)]
    assert made.writer.failed is None
    assert "what was to be told of a record failed" in caplog.text
    await made.writer.aclose()


class Sends(Sender):
    """What a sender was told: offsets, run by run, and None."""

    def __init__(self, told: list[Any], *, broken: bool = False) -> None:
        self.told = told
        self.broken = broken

    def published(self, records: Sequence[Record]) -> None:
        self.told.append([record.offset for record in records])
        if self.broken:
            raise ValueError("broken")

    def refused(self) -> None:
        self.told.append(None)
        if self.broken:
            raise ValueError("broken")


async def test_a_sender_is_told_of_a_run_in_its_place_among_the_others() -> None:
    made = await held()
    await made.writer.ready()
    told: list[Any] = []
    sender, other = Sends(told), Sends(told)
    for _ in range(3):
        made.writer.submit(say("x"), sender)
    await made.writer.flush()
    made.writer.submit(say("y"), sender)
    made.writer.submit(say("y"), sender)
    made.writer.submit(say("y"))
    made.writer.submit(say("y"), told.append)
    made.writer.submit(say("y"), sender)
    made.writer.submit(say("y"), other)
    await made.writer.flush()

    assert told[:1] == [[2, 3, 4]]
    assert told[1:3] == [[5], [6]]
    assert told[3].offset == 8
    assert told[4:] == [[9], [10]]
    await made.writer.aclose()


async def test_every_tail_has_a_record_before_its_sender_is_told() -> None:
    made = await held()
    order: list[Any] = []

    class Tells(Ears):
        def received(self, record: Record) -> None:
            order.append(record.offset)

    await made.writer.subscribe(Tells())
    sender = Sends(order)
    for _ in range(3):
        made.writer.submit(say("x"), sender)
    await made.writer.flush()

    assert order == [2, [2], 3, [3], 4, [4]]
    await made.writer.aclose()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_sender_is_told_what_never_will_be_durable(
    broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = await held()
    told: list[Any] = []
    sender = Sends(told, broken=broken)
    made.writer.submit(say("x"), sender)
    await made.writer.flush()
    made.log.gate.clear()
    made.writer.submit(say("x"), sender)
    await turn_of_the_loop()
    made.writer.submit(say("x"), lambda record: told.append(("other", record)))
    made.writer.submit(say("x"), sender)
    made.log.error = JournalError("no space")
    made.log.gate.set()
    with pytest.raises(JournalError, match="no space"):
        await made.writer.flush()
    made.writer.submit(say("x"), sender)
    assert told == [[2], None, ("other", None), None]
    await turn_of_the_loop()

    assert told == [[2], None, ("other", None), None, None]
    assert ("what was to be told of a record failed" in caplog.text) == broken


async def test_there_is_no_way_to_publish_but_to_append() -> None:
    public = {name for name in dir(Writer) if not name.startswith("_")}

    assert public == {
        *(
            "aclose",
            "append",
            "begin_turn",
            "closing",
            "complete_turn",
            "credit",
            "exempt",
            "failed",
            "flush",
        ),
        *("freed", "full", "hurry", "log", "publishes_to", "ready", "release_turn", "room"),
        *("session_id", "submit", "subscribe", "turn_holder", "unsubscribe", "waiting"),
        "waiting_bytes",
    }


async def test_a_cancelled_append_is_appended_all_the_same() -> None:
    made = await held()
    await made.writer.ready()
    task = asyncio.create_task(made.writer.append(say("a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.writer.append(say("b"))

    assert len(await made.stored()) == 3
    await made.writer.aclose()


async def test_flushing_waits_for_all_that_was_submitted() -> None:
    made = await held()
    told = Told()
    for number in range(3):
        made.writer.submit(say("x"), told(number))
    await made.writer.flush()
    assert told.of == [(0, 2), (1, 3), (2, 4)]

    made.log.error = JournalError("no space")
    made.writer.submit(say("x"))
    with pytest.raises(JournalError, match="no space"):
        await made.writer.flush()


# ------------------------------------------------------------------ one queue


@pytest.mark.covers("CDI-4")
async def test_a_subscription_takes_effect_between_the_appends_around_it() -> None:
    made = await held()
    await made.writer.ready()
    tail = Ears()
    made.writer.submit(say("before"))
    subscribing = asyncio.create_task(made.writer.subscribe(tail))
    await asyncio.sleep(0)
    made.writer.submit(say("after"))
    await subscribing
    mark = await made.log.high_watermark()
    await made.writer.append(say("later"))

    assert mark >= 2
    assert tail.heard == [3, 4]
    await made.writer.aclose()


@pytest.mark.covers("CDI-4")
async def test_a_subscription_waits_for_the_append_before_it_and_hurries_it() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    made.log.begun.clear()
    made.writer.submit(say("before"))
    await made.log.begun.wait()
    tail = Ears()
    subscribing = asyncio.create_task(made.writer.subscribe(tail))
    await turn_of_the_loop()

    assert not subscribing.done()
    assert made.log.hurried == 1

    made.log.gate.set()
    await subscribing
    assert await made.log.high_watermark() == 2
    assert tail.heard == []
    await made.writer.aclose()


async def test_subscribing_twice_is_subscribing_once() -> None:
    made = await held()
    tail = Ears()
    await asyncio.gather(*(made.writer.subscribe(tail) for _ in range(3)))
    await made.writer.append(say("a"))
    assert tail.heard == [2]

    made.writer.unsubscribe(tail)
    made.writer.unsubscribe(tail)
    await made.writer.append(say("b"))
    assert tail.heard == [2]
    await made.writer.aclose()


@pytest.mark.parametrize("turns", range(3))
async def test_a_cancelled_subscription_is_undone(turns: int) -> None:
    made = await held()
    tail = Ears()
    subscribing = asyncio.create_task(made.writer.subscribe(tail))
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = subscribing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await subscribing
    await made.writer.append(say("a"))

    assert cancelled
    assert tail.heard == []
    await made.writer.aclose()


async def test_cancelling_a_second_subscription_leaves_the_first() -> None:
    made = await held()
    tail = Ears()
    await made.writer.subscribe(tail)
    again = asyncio.create_task(made.writer.subscribe(tail))
    await asyncio.sleep(0)
    again.cancel()
    await asyncio.wait([again])
    await made.writer.append(say("a"))

    assert tail.heard == [2]
    await made.writer.aclose()


# ------------------------------------------------------------------ genesis and repair


@pytest.mark.covers("J3", "J12")
@pytest.mark.parametrize("first", ["append", "subscribe", "ready", "begin_turn", "submit"])
async def test_the_first_operation_begins_the_session_before_it_takes_effect(first: str) -> None:
    made = await held(meta={"cwd": "/x"})
    tail = Ears()
    if first == "append":
        await made.writer.append(say("a"))
    elif first == "subscribe":
        await made.writer.subscribe(tail)
    elif first == "begin_turn":
        await made.writer.begin_turn(made)
    elif first == "submit":
        made.writer.submit(say("a"))
        await turn_of_the_loop()
    else:
        await asyncio.gather(*(made.writer.ready() for _ in range(3)))
    await turn_of_the_loop()
    records = await made.stored()

    assert [record.kind for record in records].count(SESSION_CREATED) == 1
    assert (records[0].offset, records[0].kind, records[0].taint) == (1, SESSION_CREATED, "system")
    assert records[0].data == {"cwd": "/x"}
    assert tail.heard == []
    assert made.log.claims == 1
    await made.writer.aclose()


async def test_a_writer_that_is_not_used_writes_nothing() -> None:
    made = await held()
    await made.writer.aclose()

    assert await made.stored() == []
    assert made.log.released == 1


async def crashed(*entries: Entry) -> MemoryJournal:
    """A journal whose writer died after these."""
    journal = MemoryJournal()
    log = await journal.open("s")
    await log.claim()
    await log.append(entries)
    await log.release()
    return journal


CREATED = Entry(SESSION_CREATED, b"{}", "system")
STARTED = Entry(TURN_STARTED, b'{"turnId":4,"prompt":[]}', "user")
COMPLETED = Entry(TURN_COMPLETED, b'{"turnId":4,"stopReason":"end_turn"}', "system")
FORGED = Entry(SESSION_UPDATE, b'{"sessionUpdate":"turn_completed","turnId":4}', "agent")
LATER = Entry(STEER, b"{}", "user")


@pytest.mark.covers("J12", "J7")
@pytest.mark.parametrize(
    ("entries", "orphans"),
    [
        ([CREATED], 0),
        ([CREATED, STARTED], 1),
        ([CREATED, STARTED, say("in the middle")], 1),
        ([CREATED, STARTED, *[say("x")] * 600], 1),
        ([CREATED, STARTED, FORGED], 1),
        ([CREATED, STARTED, COMPLETED], 0),
        ([CREATED, STARTED, COMPLETED, say("after it")], 0),
        ([CREATED, STARTED, COMPLETED, STARTED, LATER], 1),
        ([STARTED], 1),
        ([say("dumped by hand")], 0),
    ],
)
async def test_an_open_turn_is_completed_once_over_any_number_of_restarts(
    entries: list[Entry], orphans: int
) -> None:
    journal = await crashed(*entries)
    for _ in range(3):
        made = await held(journal)
        await made.writer.ready()
        await made.writer.aclose()
    records = await stored(journal)

    assert len(records) == len(entries) + orphans
    if orphans:
        assert (records[-1].kind, records[-1].taint) == (TURN_COMPLETED, "system")
        assert records[-1].data == {"turnId": 4, **ORPHAN}


@pytest.mark.covers("J12")
async def test_a_repair_comes_before_the_first_turn_and_not_after_it() -> None:
    journal = await crashed(CREATED, STARTED)
    made = await held(journal)
    tail = Ears()
    subscribing = asyncio.create_task(made.writer.subscribe(tail))
    number = await made.writer.begin_turn(made, [say("prompt")])
    await subscribing
    made.writer.complete_turn(made, number, stop_reason="end_turn")
    await made.writer.aclose()

    records = await stored(journal)
    turns = [(r.kind, r.data["turnId"]) for r in records if r.kind.startswith("turn_")]
    assert turns == [
        (TURN_STARTED, 4),
        (TURN_COMPLETED, 4),
        (TURN_STARTED, 5),
        (TURN_COMPLETED, 5),
    ]
    assert 3 not in tail.heard


class RepairsLate(Writer):
    """The wrong one: its first operation takes effect, then it looks for what is to be repaired."""

    async def _prepare(self) -> None:
        await self.log.claim()
        entries, told, size, flush = self._next()
        records = await self.log.append(entries, flush=flush)
        self._publish(told, records, size)
        await super()._prepare()


def turns_of(records: Sequence[Record]) -> list[str]:
    """Each turn's start and completion, as "S4" and "C4"."""
    return [
        f"{'S' if record.kind == TURN_STARTED else 'C'}{record.data['turnId']}"
        for record in records
        if record.kind in (TURN_STARTED, TURN_COMPLETED)
    ]


@pytest.mark.covers("J12")
@pytest.mark.parametrize(
    ("writer", "at_once", "turns"),
    [
        (Writer, True, ["S4", "C4", "S5", "C5"]),
        (Writer, False, ["S4", "C4", "S5", "C5"]),
        (RepairsLate, True, ["S4", "S5", "C5"]),  # the open turn is buried
        (RepairsLate, False, ["S4", "S5", "C5", "C5"]),  # and the new one completed twice
    ],
)
async def test_a_repair_after_the_first_operation_buries_a_turn_or_completes_one_twice(
    writer: type[Writer], at_once: bool, turns: list[str]
) -> None:
    journal = await crashed(CREATED, STARTED)
    made = writer(await journal.open("s"))
    made.submit(Entry(TURN_STARTED, b'{"turnId":5,"prompt":[]}', "user"))
    if not at_once:
        await turn_of_the_loop()
    made.complete_turn(made, 5, stop_reason="end_turn")
    await made.aclose()

    assert turns_of(await stored(journal)) == turns


@pytest.mark.parametrize(
    ("payload", "number", "orphan"),
    [
        (b'{"turnId":"seven"}', 1, '"seven"'),
        (b"{}", 1, "null"),
        (b"[1]", 1, "null"),
        (b'{"turnId":true}', 1, "true"),
        (b'{"turnId":12}', 13, "12"),
    ],
)
async def test_a_turn_number_that_is_none_is_repeated_and_not_counted(
    payload: bytes, number: int, orphan: str
) -> None:
    journal = await crashed(Entry(TURN_STARTED, payload, "user"))
    made = await held(journal)

    assert await made.writer.begin_turn(made) == number
    await made.writer.aclose()
    assert f'"turnId":{orphan},'.encode() in (await stored(journal))[1].payload


# ------------------------------------------------------------------ the turn latch (§8.3)


@pytest.mark.covers("J7")
async def test_a_turn_is_started_completed_and_let_go_of_in_one_step() -> None:
    made = await held()
    told = Told()

    number = await made.writer.begin_turn(made, [say("prompt"), say("more")])
    assert (number, made.writer.turn_holder) == (1, made)
    made.writer.complete_turn(made, number, stop_reason="end_turn", published=told(0))
    assert made.writer.turn_holder is None
    assert await made.writer.begin_turn("another") == 2
    made.writer.complete_turn("another", 2, error=(-32603, "Internal error"))
    await made.writer.aclose()

    records = await made.stored()
    assert kinds(records) == [
        *(SESSION_CREATED, TURN_STARTED, SESSION_UPDATE, SESSION_UPDATE, TURN_COMPLETED),
        *(TURN_STARTED, TURN_COMPLETED),
    ]
    assert records[1].data == {"turnId": 1, "prompt": []}
    assert records[1].taint == "user"
    assert records[4].data == {"turnId": 1, "stopReason": "end_turn"}
    assert records[4].taint == "system"
    assert records[6].data == {"turnId": 2, "error": {"code": -32603, "message": "Internal error"}}
    assert told.of == [(0, 5)]
    assert made.log.appends[-1][1]


@pytest.mark.covers("J7")
async def test_a_second_turn_is_refused_and_writes_nothing() -> None:
    made = await held()
    await made.writer.begin_turn(made)
    for holder in ("another", made):
        with pytest.raises(TurnHeld) as caught:
            await made.writer.begin_turn(holder)
        assert caught.value.session_id == "s"
    made.writer.complete_turn(made, 1, stop_reason="end_turn")

    assert await made.writer.begin_turn("another") == 2
    await made.writer.aclose()
    assert kinds(await made.stored()).count(TURN_STARTED) == 2


async def test_of_two_that_begin_at_once_one_does() -> None:
    made = await held()
    got = await asyncio.gather(
        made.writer.begin_turn("a"), made.writer.begin_turn("b"), return_exceptions=True
    )

    assert got[0] == 1
    assert isinstance(got[1], TurnHeld)
    assert made.writer.turn_holder == "a"
    await made.writer.aclose()


@pytest.mark.covers("J7")
async def test_a_completion_by_somebody_else_is_refused_and_told() -> None:
    made = await held()
    number = await made.writer.begin_turn(made)
    with pytest.raises(TurnHeld):
        made.writer.complete_turn("another", number, stop_reason="end_turn")

    assert made.writer.turn_holder is made
    assert made.events.all == [
        ("journal.non_holder_turn_completed", {"session": "s", "turn": 1}),
    ]
    made.writer.complete_turn(made, number, stop_reason="end_turn")
    await made.writer.aclose()
    assert kinds(await made.stored()).count(TURN_COMPLETED) == 1


async def test_a_holder_is_told_by_identity_and_not_by_what_it_equals() -> None:
    made = await held()
    mine, twin = [1], [1]
    await made.writer.begin_turn(mine)
    with pytest.raises(TurnHeld):
        made.writer.complete_turn(twin, 1, stop_reason="end_turn")
    made.writer.release_turn(twin)

    assert made.writer.turn_holder is mine
    await made.writer.aclose()


async def test_a_completion_where_nobody_holds_the_turn_is_a_plain_append() -> None:
    made = await held()
    made.writer.complete_turn(made, 9, stop_reason="end_turn")
    await made.writer.aclose()

    assert [r.data for r in await made.stored() if r.kind == TURN_COMPLETED] == [
        {"turnId": 9, "stopReason": "end_turn"}
    ]


async def test_any_other_kind_is_appended_whoever_holds_the_turn() -> None:
    made = await held()
    await made.writer.begin_turn(made)
    await made.writer.append(Entry(STEER, b"{}", "user"))

    assert kinds(await made.stored())[-1] == STEER
    await made.writer.aclose()


@pytest.mark.covers("J12", "J7")
async def test_a_holder_that_dies_leaves_one_orphan_and_a_free_latch() -> None:
    made = await held()
    tail = Ears()
    await made.writer.subscribe(tail)
    number = await made.writer.begin_turn(made)
    await made.writer.append(say("half a turn"))
    made.writer.release_turn(made)
    made.writer.release_turn(made)

    assert made.writer.turn_holder is None
    await made.writer.aclose()
    last = (await made.stored())[-1]
    assert (last.kind, last.data, last.taint) == (
        TURN_COMPLETED,
        {"turnId": number, **ORPHAN},
        "system",
    )
    assert tail.heard == [2, 3, 4, "closed"]


@pytest.mark.covers("J12")
async def test_a_holder_that_dies_after_its_completion_leaves_nothing() -> None:
    made = await held()
    number = await made.writer.begin_turn(made)
    made.writer.complete_turn(made, number, stop_reason="end_turn")
    made.writer.release_turn(made)
    await made.writer.aclose()

    assert kinds(await made.stored()).count(TURN_COMPLETED) == 1


async def test_a_holder_that_dies_while_another_holds_the_turn_changes_nothing() -> None:
    made = await held()
    await made.writer.begin_turn(made)
    made.writer.release_turn("another")

    assert made.writer.turn_holder is made
    await made.writer.aclose()


async def test_the_freed_hook_is_called_when_the_latch_is_let_go_of() -> None:
    made = await held()
    freed: list[object] = []
    made.writer.freed = lambda: freed.append(made.writer.turn_holder)
    number = await made.writer.begin_turn(made)
    assert freed == []
    made.writer.complete_turn(made, number, stop_reason="end_turn")
    assert freed == [None]
    await made.writer.aclose()
    assert freed == [None, None]


# ------------------------------------------------------------------ what fails (§8.4)


@pytest.mark.parametrize("error", [JournalError("no space"), OSError(28, "no space"), ValueError()])
async def test_an_append_that_fails_takes_the_writer_down_and_says_so(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    made = await held()
    tail, told = Ears(), Told()
    await made.writer.subscribe(tail)
    await made.writer.begin_turn(made)
    await turn_of_the_loop()
    made.log.gate.clear()
    made.log.begun.clear()
    made.log.error = error
    made.writer.submit(say("0"), told(0))
    await made.log.begun.wait()
    made.writer.submit(say("1"), told(1))
    late = asyncio.create_task(made.writer.append(say("2")))
    subscribing = asyncio.create_task(made.writer.subscribe(Ears()))
    await turn_of_the_loop()
    made.log.gate.set()
    await asyncio.wait([late, subscribing])
    made.writer.submit(say("3"), told(3))
    assert told.of == [(0, None), (1, None)]
    await turn_of_the_loop()

    assert late.exception() is error
    assert subscribing.exception() is error
    assert made.writer.failed is error
    assert made.writer.turn_holder is None
    assert told.of == [(0, None), (1, None), (3, None)]
    assert tail.heard == [2, "writer_down"]
    assert (made.writer.waiting, made.writer.waiting_bytes) == (0, 0)
    assert made.log.released == 1
    assert made.events.of("journal.writer_failed") == [
        {"session": "s", "error": type(error).__name__, "lost": 3}
    ]
    assert "session 's' is not journaled any more" in caplog.text
    assert len(await made.stored()) == 2


async def test_a_failed_writer_is_never_revived_and_a_new_one_repairs() -> None:
    made = await held()
    await made.writer.begin_turn(made)
    await turn_of_the_loop()
    made.log.error = JournalError("no space")
    with pytest.raises(JournalError, match="no space"):
        await made.writer.append(say("lost"))
    made.log.error = None
    for again in (
        made.writer.append(say("x")),
        made.writer.ready(),
        made.writer.subscribe(Ears()),
        made.writer.begin_turn(made),
    ):
        with pytest.raises(JournalError, match="no space"):
            await again
    made.writer.complete_turn(made, 1, stop_reason="end_turn")
    await made.writer.room()
    await made.writer.aclose()

    after = await held(made.journal)
    assert await after.writer.begin_turn(after) == 2
    await after.writer.aclose()
    turns = [(r.kind, r.data["turnId"]) for r in await made.stored() if r.kind != SESSION_CREATED]
    assert turns == [
        (TURN_STARTED, 1),
        (TURN_COMPLETED, 1),
        (TURN_STARTED, 2),
        (TURN_COMPLETED, 2),
    ]


async def test_a_claim_that_was_lost_takes_the_writer_down() -> None:
    made = await held()
    tail = Ears()
    await made.writer.subscribe(tail)
    await made.log.log.release()
    other = await made.journal.open("s")
    await other.claim()

    with pytest.raises(JournalInUse, match="another log"):
        await made.writer.append(say("x"))
    assert isinstance(made.writer.failed, JournalInUse)
    assert tail.heard == ["writer_down"]
    await other.append([say("theirs")])


@pytest.mark.parametrize("first", ["ready", "append", "subscribe", "begin_turn"])
async def test_a_session_that_another_writes_is_refused_at_first_use(first: str) -> None:
    journal = MemoryJournal()
    other = await journal.open("s")
    await other.claim()
    made = await held(journal)
    use: dict[str, Callable[[], Any]] = {
        "ready": made.writer.ready,
        "append": lambda: made.writer.append(say("x")),
        "subscribe": lambda: made.writer.subscribe(Ears()),
        "begin_turn": lambda: made.writer.begin_turn(made),
    }
    with pytest.raises(JournalInUse) as caught:
        await use[first]()

    assert caught.value.session_id == "s"
    assert await stored(journal) == []
    await other.append([say("still theirs")])


async def test_a_session_that_is_damaged_is_not_written_to() -> None:
    journal = await crashed(CREATED, STARTED)
    made = await held(journal)

    async def latest(tags: Any) -> dict[str, Record]:
        raise JournalDamaged("3.db", "the checksum is wrong", session_id="s", offset=2)

    made.log.latest = latest  # type: ignore[method-assign]
    tail = Ears()
    with pytest.raises(JournalDamaged):
        await made.writer.subscribe(tail)
    with pytest.raises(JournalDamaged):
        await made.writer.append(say("x"))

    assert len(await stored(journal)) == 2
    assert made.log.released == 1
    assert tail.heard == []


async def test_a_store_that_confirms_fewer_than_it_was_given_is_not_believed() -> None:
    made = await held()
    await made.writer.ready()

    async def append(entries: Any, *, flush: bool = False) -> list[Record]:
        return (await made.log.log.append(entries))[:-1]

    made.log.append = append  # type: ignore[method-assign]
    told = Told()
    for number in range(3):
        made.writer.submit(say("x"), told(number))
    await turn_of_the_loop()

    assert told.of == [(0, None), (1, None), (2, None)]
    assert "of 3 entries the store made 2 records" in str(made.writer.failed)


async def test_an_event_hook_and_a_release_that_fail_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = await held()
    await made.writer.ready()

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    async def release() -> None:
        raise OSError("gone")

    made.writer._on_event = broken
    made.log.release = release  # type: ignore[method-assign]
    made.log.error = JournalError("no space")
    with pytest.raises(JournalError):
        await made.writer.append(say("x"))
    await made.writer.aclose()

    assert "what listens to events failed" in caplog.text
    assert "the claim of session 's' was not released" in caplog.text


def test_a_loop_that_ends_takes_its_writers_down_and_frees_their_sessions() -> None:
    journal = HeldJournal()
    told = Told()

    async def main() -> None:
        log = await journal.open("s")
        writer = Writer(log)
        await writer.begin_turn("me")
        await turn_of_the_loop()
        journal.logs[0].gate.clear()
        writer.submit(say("lost"), told(0))
        await turn_of_the_loop()

    async def after() -> list[str]:
        writer = Writer(await journal.open("s"))
        await writer.ready()
        await writer.aclose()
        return kinds(await stored(journal))

    asyncio.run(main())
    assert told.of == [(0, None)]
    assert asyncio.run(after()) == [SESSION_CREATED, TURN_STARTED, TURN_COMPLETED]


# ------------------------------------------------------------------ closing


async def test_closing_makes_durable_what_waits_and_refuses_the_rest_in_order() -> None:
    made = await held()
    tail, told = Ears(), Told()
    await made.writer.subscribe(tail)
    made.log.gate.clear()
    made.log.begun.clear()
    made.writer.submit(say("0"), told(0))
    await made.log.begun.wait()
    closing = asyncio.create_task(made.writer.aclose())
    await asyncio.sleep(0)
    assert made.writer.closing
    made.writer.submit(say("1"), told(1))
    made.writer.submit(say("nobody is told"))
    for refused in (made.writer.begin_turn(made), made.writer.subscribe(Ears())):
        with pytest.raises(JournalError, match="clos"):
            await refused
    appending = asyncio.create_task(made.writer.append(say("x")))
    await turn_of_the_loop()
    assert told.of == []
    made.log.gate.set()
    await closing
    with pytest.raises(JournalError, match="clos"):
        await appending
    made.writer.submit(say("2"), told(2))
    await turn_of_the_loop()

    assert told.of == [(0, 2), (1, None), (2, None)]
    assert tail.heard == [2, "closed"]
    assert isinstance(made.writer.failed, JournalError)
    assert made.log.released == 1
    await asyncio.gather(made.writer.aclose(), made.writer.aclose("deleted"))
    assert tail.heard == [2, "closed"]
    assert made.log.released == 1


@pytest.mark.covers("J7")
async def test_closing_completes_a_turn_that_nobody_can_complete_any_more() -> None:
    made = await held()
    await made.writer.begin_turn(made)
    await made.writer.aclose()
    made.writer.complete_turn(made, 1, stop_reason="end_turn")
    await turn_of_the_loop()

    assert [r.data for r in await made.stored()][2:] == [{"turnId": 1, **ORPHAN}]


async def test_closing_for_a_deletion_completes_nothing() -> None:
    made = await held()
    tail = Ears()
    await made.writer.subscribe(tail)
    await made.writer.begin_turn(made)
    await made.writer.aclose("deleted")

    assert tail.heard == [2, "deleted"]


async def test_a_cancelled_close_goes_on_by_itself() -> None:
    made = await held()
    tail = Ears()
    await made.writer.subscribe(tail)
    made.log.gate.clear()
    made.log.begun.clear()
    made.writer.submit(say("a"))
    closing = asyncio.create_task(made.writer.aclose())
    await made.log.begun.wait()
    closing.cancel()
    await asyncio.wait([closing])
    made.log.gate.set()
    await tail.wait_for(2)

    assert tail.heard == [2, "closed"]
    await made.writer.aclose()


async def test_a_pump_that_is_cancelled_before_it_begins_is_begun_again() -> None:
    journal = MemoryJournal()
    writer = Writer(await journal.open("s"))
    found: list[Record | None] = []
    others = asyncio.all_tasks()
    writer.submit(say("x"), found.append)
    for task in asyncio.all_tasks() - others:
        task.cancel()
    await writer.flush()

    assert [None if record is None else record.offset for record in found] == [2]
    await writer.aclose()


async def test_closing_what_has_failed_waits_for_its_claim_to_be_free() -> None:
    made = await held()
    await made.writer.ready()
    made.log.error = JournalError("no space")
    with pytest.raises(JournalError):
        await made.writer.append(say("x"))
    await made.writer.aclose()

    assert made.log.released == 1


# ------------------------------------------------------------------ what waits, and what it costs


async def test_who_can_wait_waits_while_too_much_is_not_durable() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    for number in range(1024):
        made.writer.submit(say(str(number)))
    assert not made.writer.full
    await made.writer.room()
    made.writer.submit(say("one more"))
    assert (made.writer.full, made.writer.waiting) == (True, 1025)
    waiting = [asyncio.create_task(made.writer.room()) for _ in range(2)]
    await turn_of_the_loop()
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()

    made.log.gate.set()
    await waiting[1]
    assert (made.writer.full, made.writer.waiting, made.writer.waiting_bytes) == (False, 0, 0)
    await made.writer.aclose()


async def test_bytes_count_as_well_as_entries() -> None:
    made = await held()
    made.writer.submit(Entry("blob", b'"' + b"x" * (4 << 20) + b'"', "agent"))

    assert (made.writer.full, made.writer.waiting) == (True, 1)
    assert made.writer.waiting_bytes == (4 << 20) + 2
    await made.writer.room()
    assert not made.writer.full
    await made.writer.aclose()


async def test_who_waits_for_room_is_let_go_when_the_writer_fails() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    for number in range(1100):
        made.writer.submit(say(str(number)))
    waiting = asyncio.create_task(made.writer.room())
    await turn_of_the_loop()
    made.log.error = JournalError("no space")
    made.log.gate.set()
    await waiting

    assert made.writer.failed is not None


async def test_counts_are_right_with_subscriptions_in_between() -> None:
    made = await held()
    await made.writer.ready()
    made.log.gate.clear()
    made.writer.submit(say("aa"))
    size = made.writer.waiting_bytes
    first = asyncio.create_task(made.writer.subscribe(Ears()))
    await asyncio.sleep(0)
    made.writer.submit(say("bb"))
    second = asyncio.create_task(made.writer.subscribe(Ears()))
    await asyncio.sleep(0)
    made.writer.submit(say("cc"))
    assert (made.writer.waiting, made.writer.waiting_bytes) == (3, 3 * size)
    made.log.gate.set()
    await asyncio.gather(first, second)
    await made.writer.append(say("dd"))

    assert (made.writer.waiting, made.writer.waiting_bytes) == (0, 0)
    assert [count for count, _ in made.log.appends] == [1, 1, 1, 1, 1]
    await made.writer.aclose()


async def test_an_idle_writer_is_small_and_has_no_task() -> None:
    tasks = asyncio.all_tasks()
    made = await held()
    await made.writer.append(say("x"))
    await turn_of_the_loop()

    assert asyncio.all_tasks() == tasks
    assert not hasattr(made.writer, "__dict__")
    parts: list[Any] = [getattr(made.writer, name) for name in Writer.__slots__ if name != "log"]
    own = sum(sys.getsizeof(part) for part in parts if type(part) in (list, dict))
    assert sys.getsizeof(made.writer) + own < 600
    await made.writer.aclose()


async def test_a_writer_keeps_nothing_of_who_submitted() -> None:
    made = await held()
    marked: contextvars.ContextVar[object] = contextvars.ContextVar("marked")

    class Mark:
        """Something that can be watched."""

    async def somebody() -> weakref.ref[Mark]:
        mark = Mark()
        marked.set(mark)
        await made.writer.append(say("x"))
        return weakref.ref(mark)

    gone = await asyncio.create_task(somebody())
    await turn_of_the_loop()
    gc.collect()
    assert gone() is None
    await made.writer.aclose()
