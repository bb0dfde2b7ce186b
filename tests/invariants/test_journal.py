"""What holds of attaching (J1 to J10, P-BUS), each against a subscriber or writer that is wrong.

The wrong variants are those of resumable-sessions §7.4 and of conformance-cases B.6: the assertions that
pass for ours fail for each of them. Any order of events is the business of tests/journal, whole agents
that of tests/sessions; P-BUS4 (a denied attach leaves no trace) is in test_admission.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon import ResourceNotFound
from antiphon.journal import (
    SESSION_UPDATE,
    Entry,
    MemoryJournal,
    Record,
    Rider,
    SessionLog,
    Subscriber,
    Writer,
)
from antiphon.journal._record import FrameHeads
from tests.invariants.controls import changed, controlled, together
from tests.journal.attachments import SESSION, Link, offset_of, session, update, written
from tests.journal.ears import LogOver
from tests.journal.schedules import Reader, hold

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Json = dict[str, Any]


def entry(kind: str, payload: bytes = b"{}", taint: str = "system") -> Entry:
    return Entry(kind, payload, taint)


async def completed(writer: Writer, origin: object, turn_id: int) -> None:
    """Complete a turn, and wait until that is published."""
    done = asyncio.Event()
    writer.complete_turn(
        origin, turn_id, stop_reason="end_turn", published=lambda _record: done.set()
    )
    await done.wait()


class Staged(LogOver):
    """A log at whose steps something else happens, once each."""

    def __init__(self, log: SessionLog) -> None:
        super().__init__(log)
        self.before_mark: Callable[[], Awaitable[Any]] | None = None
        self.after_mark: Callable[[], Awaitable[Any]] | None = None

    async def high_watermark(self) -> int:
        before, self.before_mark = self.before_mark, None
        if before is not None:
            await before()
        mark = await self.log.high_watermark()
        after, self.after_mark = self.after_mark, None
        if after is not None:
            await after()
        return mark


# ------------------------------------------------------------------ the wrong variants of §7.4


async def history_first(original: Any, self: Subscriber) -> int:
    """Read the mark, send history, then register."""
    source, self._source = self._source, None
    mark: int = await original(self)
    self._source = source
    if source is not None:
        await source.subscribe(self)
        self._live = True
    return mark


async def cached(original: Any, self: Subscriber) -> int:
    """The mark is a number that somebody keeps, and that lags."""
    self._log = Lagging(self._log, await self._log.high_watermark() - 1)
    mark: int = await original(self)
    return mark


class Lagging(Staged):
    """A log with somebody's number for its mark."""

    def __init__(self, log: SessionLog, mark: int) -> None:
        super().__init__(log)
        self.mark = mark

    async def high_watermark(self) -> int:
        return self.mark


async def looks_early(original: Any, self: Subscriber) -> int:
    """Live records are looked at before there is a mark."""
    self._answered = self._live = True
    mark: int = await original(self)
    return mark


def last_seen(original: Any, self: Subscriber, record: Record) -> None:
    """What is not newer than the newest is a duplicate."""
    if record.offset > self.forwarded:
        original(self, record)


def gate_open(original: Any, self: Subscriber, record: Record) -> None:
    """No gate at all."""
    self._mark = 0
    original(self, record)


def from_the_last(_original: Any, last_offset: int) -> int:
    """Heal from the last record that was told, not behind it."""
    return last_offset


def taint_dropped(taint: str) -> Any:
    """A path that leaves records of one taint out, of history and live."""

    def forward(original: Any, self: Subscriber, record: Record) -> None:
        if record.taint != taint:
            original(self, record)

    return together(changed(Subscriber, "_show", forward), changed(Subscriber, "_forward", forward))


def published_ahead(original: Any, self: Writer, one: Entry, *more: Any, **named: Any) -> None:
    """Tell a record that is not durable yet."""
    offset = EXPECTED[0] = EXPECTED[0] + 1
    self._give(
        Record(offset, self.session_id, one.kind, one.payload, one.taint, 5),
        list(self._seats.values()),
    )
    original(self, one, *more, **named)


EXPECTED = [0]

REGISTERS_LATE = changed(Subscriber, "attach", history_first)
CACHED = changed(Subscriber, "attach", cached)
EARLY = changed(Subscriber, "attach", looks_early)


# ------------------------------------------------------------------ J1: each once, in order


@pytest.mark.covers("J1", "P-BUS1")
@controlled(
    no_user=taint_dropped("user"),
    no_agent=taint_dropped("agent"),
    no_external=taint_dropped("external"),
    no_system=taint_dropped("system"),
    history_first=REGISTERS_LATE,
    cached=CACHED,
)
async def test_history_and_live_records_are_one_sequence() -> None:
    writer, log = await session()
    await writer.append(entry("turn_started", taint="user"))
    await writer.append(update("one"))
    await writer.append(update("look", "tool_call", "external"))
    await writer.append(entry("turn_completed"))
    staged, link = Staged(log), Link()

    async def meanwhile() -> None:
        await writer.append(entry("turn_started", taint="user"))

    staged.after_mark = meanwhile
    mark = await link.subscriber(staged, writer).attach()
    await writer.append(update("two"))
    await writer.append(entry("turn_completed"))

    assert mark == 5
    assert link.shown == [1, 2, 3, 4, 5, ("caught_up", 6), ("reply", 5), 6, 7, 8]
    kinds = [m["params"].get("kind", SESSION_UPDATE) for m in link.messages if offset_of(m)]
    stored = [record.kind for record in await log.read(1, 8)]
    assert kinds == stored


# ------------------------------------------------------------------ J2: the gate


@pytest.mark.covers("J2", "P-BUS2")
@controlled(
    registers_after_history=REGISTERS_LATE,
    cached_mark=CACHED,
    looks_before_the_mark=EARLY,
    no_gate=changed(Subscriber, "_forward", gate_open),
)
async def test_what_is_appended_around_the_mark_comes_once() -> None:
    writer, log = await written(3)
    staged, link = Staged(log), Link()

    async def appended() -> None:
        await writer.append(update())

    # One is registered for, and is history all the same; the other is behind the mark, and live.
    staged.before_mark = staged.after_mark = appended
    mark = await link.subscriber(staged, writer).attach()
    await appended()

    assert link.offsets == [1, 2, 3, 4, 5, 6]
    assert link.shown == [1, 2, 3, 4, ("caught_up", 5), ("reply", 4), 5, 6]
    assert mark == 4


class Faulty:
    """A source that is broken: it gives whatever it is told to."""

    async def subscribe(self, tail: Subscriber) -> None: ...

    def unsubscribe(self, tail: Subscriber) -> None: ...

    def credit(self, tail: Subscriber) -> None: ...


@pytest.mark.covers("J2", "P-BUS2")
@controlled(
    moving_gate=changed(Subscriber, "_forward", last_seen),
    no_gate=changed(Subscriber, "_forward", gate_open),
)
async def test_old_records_are_dropped_for_ever_and_a_broken_order_is_not_hidden() -> None:
    _, log = await written(5)
    link = Link()
    subscriber = link.subscriber(log, Faulty(), Rider(6))
    await subscriber.attach()
    for offset in (2, 7, 6, 5, 8, 8, 1):
        subscriber.received(Record(offset, SESSION, "x", b"{}", "system", 5))

    assert link.offsets == [7, 6, 8, 8]


# ------------------------------------------------------------------ J3: append, then publish


class Durable(Staged):
    """A log whose appends take until they are let through."""

    def __init__(self, log: SessionLog) -> None:
        super().__init__(log)
        self.mark = 0
        self.through = asyncio.Event()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        await self.through.wait()
        records = await super().append(entries, flush=flush)
        self.mark = records[-1].offset
        return records


@pytest.mark.covers("J3", "J10", "P-BUS6")
@controlled(published_ahead=changed(Writer, "submit", published_ahead))
async def test_nothing_is_told_that_is_not_durable() -> None:
    journal = MemoryJournal()
    durable = Durable(await journal.open(SESSION))
    writer, link = Writer(durable), Link()
    durable.through.set()
    subscriber = link.subscriber(await journal.open(SESSION), writer)
    EXPECTED[0] = await subscriber.attach()
    told: list[tuple[int, int]] = []
    give = link.send

    def send(frame: bytes) -> None:
        give(frame)
        told.append((offset_of(link.messages[-1]) or 0, durable.mark))

    subscriber._send = send
    durable.through.clear()
    for number in range(5):
        writer.submit(update(f"{number}"))
        await asyncio.sleep(0)
    assert told == []
    durable.through.set()
    await writer.append(update("last"))

    assert link.offsets == [1, 2, 3, 4, 5, 6, 7]
    assert [offset for offset, _ in told] == [2, 3, 4, 5, 6, 7]
    assert all(offset <= mark for offset, mark in told)
    public = {name for name in dir(Writer) if not name.startswith("_")}
    assert not {name for name in public if "publish" in name} - {"publishes_to"}


# ------------------------------------------------------------------ J4: without a writer


async def needs_a_writer(original: Any, self: Subscriber) -> int:
    if self._source is None:
        raise ResourceNotFound
    mark: int = await original(self)
    return mark


@pytest.mark.covers("J4", "P-BUS3")
@controlled(needs_a_writer=changed(Subscriber, "attach", needs_a_writer))
async def test_without_a_writer_there_is_history_and_a_normal_answer() -> None:
    _, log = await written(4)
    link = Link()
    try:
        await link.subscriber(log, None, Rider(2)).attach()
    except ResourceNotFound:
        pytest.fail("a journal that nobody writes cannot be attached to")

    assert link.shown == [2, 3, 4, ("caught_up", 5), ("reply", 4)]
    assert link.ended == ["answered"]


async def answers_anyway(original: Any, self: Subscriber) -> int:
    try:
        mark: int = await original(self)
    except ResourceNotFound:
        self._reply(0)
        return 0
    return mark


@pytest.mark.covers("J4", "P-BUS3")
@controlled(answers_anyway=changed(Subscriber, "attach", answers_anyway))
@pytest.mark.parametrize("history", ["from_offset", "tip", "none"])
async def test_a_session_that_nobody_ever_wrote_to_is_not_found(history: Any) -> None:
    _, log = await session()
    link = Link()
    with pytest.raises(ResourceNotFound) as refused:
        await link.subscriber(log, None, Rider(history=history)).attach()

    assert (refused.value.code, refused.value.message) == (-32002, "Resource not found")
    assert refused.value.data is None
    assert link.messages == []


# ------------------------------------------------------------------ J5: taint never filters


def unannotated(original: Any, self: FrameHeads, record: Record) -> bytes:
    frame: bytes = original(self, record)
    return frame.replace(b'"taint":"external",', b"")


TAGS = {
    "user_message_chunk": "user",
    "agent_message_chunk": "agent",
    "agent_thought_chunk": "agent",
    "plan": "agent",
    "tool_call": "external",
    "tool_call_update": "external",
    "current_mode_update": "system",
    "from_the_future": "system",
}


@pytest.mark.covers("J5")
@controlled(
    no_user=taint_dropped("user"),
    no_agent=taint_dropped("agent"),
    no_external=taint_dropped("external"),
    no_system=taint_dropped("system"),
    unannotated=changed(FrameHeads, "frame", unannotated),
)
@pytest.mark.parametrize("aware", [True, False])
async def test_what_comes_from_whom_changes_nothing_of_what_is_told(aware: bool) -> None:
    writer, log = await session()
    link = Link()

    async def one_of_each() -> None:
        for tag, taint in TAGS.items():
            await writer.append(update("x", tag, taint))

    await one_of_each()
    await link.subscriber(log, writer, Rider(2), aware=aware).attach()
    await one_of_each()

    riders = [
        message["params"]["_meta"]["raxol.io"]
        for message in link.messages
        if message.get("method") == "session/update"
    ]
    assert [rider.get("taint") for rider in riders] == [*TAGS.values()] * 2
    assert link.offsets == list(range(2, 18))


# ------------------------------------------------------------------ J6: too slow, and healed


class Client:
    """What heals: it attaches again behind what it holds."""

    @staticmethod
    def heal_from(last_offset: int) -> int:
        return last_offset + 1


def lags_early(original: Any, self: Subscriber) -> None:
    """Say that it lags before what waits was sent."""
    self._inbox.clear()
    original(self)


def goes_on(original: Any, self: Subscriber, reason: str, *rest: Any) -> None:
    """Say that it lags, and stay."""
    if reason == "lagged":
        self._tell(*rest)
    else:
        original(self, reason, *rest)


@pytest.mark.covers("J6", "P-BUS5")
@controlled(
    from_the_last=changed(Client, "heal_from", from_the_last),
    lags_early=changed(Subscriber, "lagged", lags_early),
    goes_on=changed(Subscriber, "_finish", goes_on),
)
async def test_who_is_too_slow_is_told_once_and_heals_to_the_same_records() -> None:
    writer, log = await session(credit=1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.take(0)
    for number in range(4):
        await writer.append(update(f"{number}"))
    link.take()
    for _ in range(20):
        await asyncio.sleep(0)

    assert link.shown == [1, ("caught_up", 2), ("reply", 1), 2, ("lagged", 2)]
    assert link.ended == ["lagged"]
    assert not subscriber.live
    healed = Link()
    start = Client.heal_from(link.messages[-1]["params"]["lastOffset"])
    await healed.subscriber(log, writer, Rider(start)).attach()
    assert [*link.offsets, *healed.offsets] == [1, 2, 3, 4, 5]


def no_credit_back(original: Any, self: Subscriber, record: Record) -> None:
    self._credit = ignored
    original(self, record)


@pytest.mark.covers("J6", "P-BUS5")
@controlled(no_credit_back=changed(Subscriber, "_forward", no_credit_back))
async def test_credit_is_a_backlog_and_no_lifetime() -> None:
    writer, log = await session(credit=2)
    link = Link()
    await link.subscriber(log, writer).attach()
    for number in range(20):
        await writer.append(update(f"{number}"))

    assert link.offsets == list(range(1, 22))
    assert link.ended == []


# ------------------------------------------------------------------ P-BUS7: through JSON


def written_loosely(original: Any, self: FrameHeads, record: Record) -> bytes:
    """The payload goes through floating point on its way."""
    payload = json.dumps(json.loads(record.payload, parse_int=float)).encode()
    frame: bytes = original(self, msgspec.structs.replace(record, payload=payload))
    return frame


@pytest.mark.covers("P-BUS7")
@controlled(written_loosely=changed(FrameHeads, "frame", written_loosely))
async def test_what_is_delivered_is_the_same_after_encoding_and_decoding() -> None:
    writer, log = await session()
    origin, exact = object(), 9_007_199_254_740_993
    await writer.begin_turn(origin)
    text = 'ü"\\ \u2028\U0001f600\x00'
    payload = {"sessionUpdate": "from_the_future", "text": text, "exact": exact, "null": None}
    await writer.append(Entry(SESSION_UPDATE, msgspec.json.encode(payload), "system"))
    await completed(writer, origin, 1)
    link = Link()
    await link.subscriber(log, writer).attach()

    frames = link.frames[:-1]  # without the answer
    assert len(frames) == 5
    decoded = [msgspec.json.decode(frame) for frame in frames]
    assert [msgspec.json.decode(msgspec.json.encode(message)) for message in decoded] == decoded
    told = [
        message["params"].get("payload", message["params"].get("update")) for message in decoded
    ]
    assert told[:4] == [record.data for record in await log.read(1, 4)]
    assert told[2] == payload
    assert decoded[4]["params"] == {"sessionId": SESSION, "offset": 5}


# ------------------------------------------------------------------ the trace of §14, and B.6's others


@pytest.mark.covers("J1", "J2")
@controlled(
    history_first=REGISTERS_LATE,
    cached=CACHED,
    looks_early=EARLY,
)
async def test_the_worked_trace() -> None:
    writer, log = await session()
    origin = object()
    await writer.begin_turn(origin)
    await writer.append(update("one"))
    await writer.append(update("two"))
    await completed(writer, origin, 1)
    staged, link = Staged(log), Link(room=2)
    attaching = asyncio.create_task(link.subscriber(staged, writer).attach())
    await link.until(2)
    await writer.begin_turn(origin)
    link.take()
    assert await attaching == 5
    await writer.append(update("three"))
    await completed(writer, origin, 2)

    assert link.shown == [1, 2, 3, 4, 5, ("caught_up", 6), ("reply", 5), 6, 7, 8]


async def answered_first(original: Any, self: Subscriber) -> int:
    """The answer in front of what it covers."""
    reply = self._reply
    reply(await self._log.high_watermark())
    self._reply = ignored
    mark: int = await original(self)
    return mark


def ignored(_what: object) -> None: ...


def to_everybody(original: Any, self: Subscriber, name: str, more: bytes) -> None:
    """`caught_up` for clients that know no offsets, or behind the answer: here, twice."""
    original(self, name, more)
    if name == "caught_up":
        original(self, name, more)


@pytest.mark.covers("J1")
@controlled(
    answered_first=changed(Subscriber, "attach", answered_first),
    told_twice=changed(Subscriber, "_tell", to_everybody),
)
async def test_the_answer_stands_between_history_and_what_is_live() -> None:
    writer, log = await written(3)
    staged, link = Staged(log), Link()

    async def meanwhile() -> None:
        await writer.append(update())

    staged.after_mark = meanwhile
    await link.subscriber(staged, writer).attach()

    assert link.shown == [1, 2, 3, ("caught_up", 4), ("reply", 3), 4]


def shows_all(_original: Any, self: Subscriber, record: Record) -> None:
    self._send(self._frame(record))


@pytest.mark.covers("J5")
@controlled(shows_all=changed(Subscriber, "_show", shows_all))
async def test_a_client_that_knows_no_offsets_gets_updates_only() -> None:
    writer, log = await session()
    link = Link()
    await writer.append(entry("turn_started"))
    await writer.append(update())
    await link.subscriber(log, writer, aware=False).attach()
    await writer.append(entry("turn_completed"))
    await writer.append(update())

    assert link.shown == [3, ("reply", 3), 5]


async def refuses_late(original: Any, self: Subscriber) -> int:
    """Look at the offset only when history was sent, or not at all."""

    def never(_mark: int) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self, "_check", never)
        mark: int = await original(self)
    return mark


def stays(_original: Any, _self: Subscriber) -> None: ...


@pytest.mark.covers("J2")
@controlled(
    refuses_late=changed(Subscriber, "attach", refuses_late),
    stays=changed(Subscriber, "_leave", stays),
)
@pytest.mark.parametrize("history", ["from_offset", "tip"])
async def test_who_holds_more_than_there_is_hears_how_much_and_nothing_else(history: Any) -> None:
    writer, log = await written(3)
    link = Link()
    subscriber = link.subscriber(log, writer, Rider(5, history))
    outcome: Any = (await asyncio.gather(subscriber.attach(), return_exceptions=True))[0]
    await writer.append(update())

    assert getattr(outcome, "data", None) == {"highWatermark": 3}
    assert (outcome.code, outcome.message) == (-32602, "invalid params")
    assert link.messages == []
    assert not writer.publishes_to(subscriber)
    fine = Link()
    assert await fine.subscriber(log, writer, Rider(5, history)).attach() == 4
    assert fine.offsets == []


# ------------------------------------------------------------------ any order


def drawn(seed: int) -> Any:
    """Schedules as hypothesis would draw them, the same in each run."""
    chance = random.Random(seed)

    def one() -> tuple[str, Any]:
        action = chance.choice(("append", "append", "attach", "attach", "take", "run", "run"))
        if action == "append":
            return action, chance.randint(1, 9)
        return action, chance.choice((None, 0, 1, 2, 5)) if action != "run" else chance.randint(
            1, 3
        )

    return [[one() for _ in range(chance.randint(5, 25))] for _ in range(2)]


def from_the_last_offset(original: Any, self: Reader, room: int | None) -> None:
    """A client that asks again for the last that it holds."""
    held, self.held = self.held, self.held[:-1]
    original(self, room)
    self.held = held


WRONG = {
    "history_first": REGISTERS_LATE,
    "cached": CACHED,
    "looks_early": EARLY,
    "no_gate": changed(Subscriber, "_forward", gate_open),
    "from_the_last_offset": changed(Reader, "attach", from_the_last_offset),
    "published_ahead": changed(Writer, "submit", published_ahead),
    "no_agent": taint_dropped("agent"),
    "answered_first": changed(Subscriber, "attach", answered_first),
}


@pytest.mark.virtual_time  # whoever waits for what never comes is found out at once
@pytest.mark.covers("J2", "P-BUS2")
@pytest.mark.parametrize("wrong", WRONG)
async def test_random_schedules_find_each_wrong_variant(wrong: str) -> None:
    """And so would find it in ours: tests/journal/test_subscriber.py plays the same."""
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    before = asyncio.all_tasks()
    found = False
    for seed in range(200):
        EXPECTED[0] = 1
        with WRONG[wrong]() as used:
            try:
                async with asyncio.timeout(60):
                    await hold(drawn(seed), credit=2, before=seed % 9, follows=False)
            except (AssertionError, TimeoutError):
                found = True
            finally:
                left = asyncio.all_tasks() - before
                for task in left:
                    task.cancel()
                if left:
                    await asyncio.wait(left, timeout=5)
        assert not [one for one in used if isinstance(one, BaseException)]
        if found:
            assert used
            break
    assert found, f"200 schedules do not find {wrong}"


async def test_random_schedules_find_nothing_in_ours() -> None:
    for seed in range(200):
        await hold(drawn(seed), credit=2, before=seed % 9, follows=seed % 2 == 1)
