"""One attach: history, the answer, live records, each once and in order, whatever the link does."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import ConnectionClosed, InvalidParams, ResourceNotFound
from antiphon.core import error_frame
from antiphon.journal import (
    Entry,
    JournalError,
    MemoryJournal,
    Record,
    Rider,
    SessionLog,
    Writer,
)
from antiphon.journal._record import FrameHeads
from antiphon.journal._subscriber import _LONGEST, _PAGE, _PAGE_BYTES, Subscriber
from tests.journal.attachments import SESSION, Link, session, update, written
from tests.journal.schedules import hold, steps

if TYPE_CHECKING:
    from collections.abc import Sequence

TIP, NONE = Rider(history="tip"), Rider(history="none")


def entry(kind: str, payload: bytes = b"{}", taint: str = "system") -> Entry:
    return Entry(kind, payload, taint)


class Fake:
    """A source that says what a test makes it say."""

    def __init__(self) -> None:
        self.tails: list[Subscriber] = []
        self.credits = 0
        self.left: list[Subscriber] = []

    async def subscribe(self, tail: Subscriber) -> None:
        self.tails.append(tail)

    def unsubscribe(self, tail: Subscriber) -> None:
        self.left.append(tail)

    def credit(self, tail: Subscriber) -> None:
        self.credits += 1


class Paged(SessionLog):
    """A log that shows how it is read, and stops where it is told to."""

    def __init__(self, log: SessionLog) -> None:
        self.session_id = log.session_id
        self.log = log
        self.pages: list[tuple[int, int]] = []
        self.marks = 0
        self.before_mark: Any = None
        self.before_read: Any = None

    async def claim(self) -> None:
        await self.log.claim()

    async def release(self) -> None:
        await self.log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        return await self.log.append(entries, flush=flush)

    async def read(self, start: int, stop: int) -> list[Record]:
        self.pages.append((start, stop))
        if self.before_read is not None:
            await self.before_read()
        return await self.log.read(start, stop)

    async def high_watermark(self) -> int:
        self.marks += 1
        if self.before_mark is not None:
            await self.before_mark()
        return await self.log.high_watermark()


async def a_while() -> None:
    """Time enough for what must not happen."""
    for _ in range(20):
        await asyncio.sleep(0)


def record(offset: int, kind: str = "x") -> Record:
    return Record(offset, SESSION, kind, b"{}", "system", 5)


# ------------------------------------------------------------------ §14, and §3.1 row by row


async def test_the_worked_trace_of_the_specification() -> None:
    writer, log = await session()
    origin = object()
    await writer.begin_turn(origin)
    for text in ("one", "two"):
        await writer.append(update(text))
    writer.complete_turn(origin, 1, stop_reason="end_turn")
    await writer.append(update("between"))  # 6, so that what is submitted is durable
    paged, link = Paged(log), Link()
    reads = 0

    async def the_origin_goes_on() -> None:
        nonlocal reads
        reads += 1
        if reads == 1:
            await writer.begin_turn(origin)
            await writer.append(update("three"))

    paged.before_read = the_origin_goes_on
    subscriber = link.subscriber(paged, writer)
    assert await subscriber.attach() == 6
    writer.complete_turn(origin, 2, stop_reason="end_turn")
    await writer.append(entry("later"))

    assert link.shown == [1, 2, 3, 4, 5, 6, ("caught_up", 7), ("reply", 6), 7, 8, 9, 10]
    names = [message.get("method", "answer").rpartition("/")[2] for message in link.messages]
    assert names == [
        *["session.record"] * 2,
        *["update"] * 2,
        "session.record",
        "update",
        "session.caught_up",
        "answer",
        "session.record",
        "update",
        *["session.record"] * 2,
    ]


@pytest.mark.parametrize("start", range(6))
async def test_history_begins_where_it_is_asked_to(start: int) -> None:
    writer, log = await written(5)
    link = Link()

    assert await link.subscriber(log, writer, Rider(start)).attach() == 5
    await writer.append(update())
    history = list(range(max(start, 1), 6))
    assert link.shown == [*history, ("caught_up", 6), ("reply", 5), 6]


async def test_from_right_behind_the_mark_there_is_no_history() -> None:
    writer, log = await written(5)
    paged, link = Paged(log), Link()

    assert await link.subscriber(paged, writer, Rider(6)).attach() == 5
    await writer.append(update())
    assert link.shown == [("caught_up", 6), ("reply", 5), 6]
    assert paged.pages == []


@pytest.mark.parametrize("history", ["from_offset", "tip"])
@pytest.mark.parametrize("start", [7, 8, 10**30])
@pytest.mark.parametrize("writerless", [False, True])
async def test_who_holds_more_than_there_is_is_told_so_and_nothing_else(
    history: Any, start: int, writerless: bool
) -> None:
    writer, log = await written(5)
    link = Link()
    subscriber = link.subscriber(log, None if writerless else writer, Rider(start, history))
    with pytest.raises(InvalidParams) as refused:
        await subscriber.attach()
    await writer.append(update())

    error = refused.value
    assert error_frame(b"12", error.code, error.message, error.data) == (
        b'{"jsonrpc":"2.0","id":12,"error":{"code":-32602,"message":"invalid params",'
        b'"data":{"highWatermark":5}}}'
    )
    assert link.messages == []
    assert link.ended == []
    assert subscriber.over == "failed"
    assert not writer.publishes_to(subscriber)


async def test_from_the_tip_there_is_no_history() -> None:
    writer, log = await written(5)
    link = Link()

    assert await link.subscriber(log, writer, TIP).attach() == 5
    await writer.append(update())
    assert link.shown == [("caught_up", 6), ("reply", 5), 6]


async def test_a_probe_tells_the_mark_and_registers_nothing() -> None:
    writer, log = await written(5)
    link = Link()
    subscriber = link.subscriber(log, writer, Rider(99, "none"))

    assert await subscriber.attach() == 5
    await writer.append(update())
    assert link.shown == [("reply", 5)]
    assert link.ended == ["answered"]
    assert not subscriber.live
    assert not writer.publishes_to(subscriber)


@pytest.mark.parametrize("rider", [Rider(), TIP, NONE, Rider(9)])
async def test_a_session_that_nobody_ever_wrote_to_is_not_found(rider: Rider) -> None:
    _, log = await session()
    link = Link()
    with pytest.raises(ResourceNotFound) as refused:
        await link.subscriber(log, None, rider).attach()

    error = refused.value
    assert error_frame(b"12", error.code, error.message, error.data) == (
        b'{"jsonrpc":"2.0","id":12,"error":{"code":-32002,"message":"Resource not found"}}'
    )
    assert link.messages == []


async def test_a_probe_does_not_begin_a_session_and_an_attach_does() -> None:
    writer, log = await session()
    link = Link()
    with pytest.raises(ResourceNotFound):
        await link.subscriber(log, writer, NONE).attach()
    assert await log.high_watermark() == 0

    assert await link.subscriber(log, writer).attach() == 1
    assert link.shown == [1, ("caught_up", 2), ("reply", 1)]


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize(
    ("rider", "history", "told"),
    [(Rider(3), [3, 4, 5], True), (TIP, [], True), (NONE, [], False)],
    ids=["from_offset", "tip", "none"],
)
async def test_without_a_writer_there_is_history_and_a_normal_answer(
    aware: bool, rider: Rider, history: list[int], told: bool
) -> None:
    _, log = await written(5)
    link = Link()
    subscriber = link.subscriber(log, None, rider, aware=aware)

    assert await subscriber.attach() == 5
    caught_up = [("caught_up", 6)] if told and aware else []
    assert link.shown == [*history, *caught_up, ("reply", 5)]
    assert not subscriber.live
    assert link.ended == ["answered"]
    subscriber.detach()
    assert subscriber.over == "answered"
    assert link.ended == ["answered"]


async def test_a_journal_that_was_filled_by_hand_need_not_begin_with_genesis() -> None:
    journal = MemoryJournal()
    log = await journal.open(SESSION)
    await log.claim()
    await log.append([entry("turn_started"), update("one"), entry("from_the_future")])
    link = Link()

    assert await link.subscriber(log, None).attach() == 3
    assert link.shown == [1, 2, 3, ("caught_up", 4), ("reply", 3)]


# ------------------------------------------------------------------ the frames


async def test_frames_are_what_the_specification_shows() -> None:
    journal = MemoryJournal()
    log = await journal.open(SESSION)
    writer, link = Writer(log, meta={"cwd": "/srv"}), Link()
    await writer.append(update("hi"))
    await link.subscriber(log, writer).attach()
    writer.submit(update("ho"))
    await writer.append(entry("turn_started", b'{"turnId":2,"prompt":[]}', "user"))
    writer.credit(link.subscriber(log, None))  # nobody it knows
    times = [record.ts for record in await log.read(1, 4)]

    def updated(offset: int, text: str) -> Any:
        content = {"type": "text", "text": text}
        rider = {"offset": offset, "taint": "agent", "ts": times[offset - 1]}
        return {
            "jsonrpc": "2.0",
            "method": "session/update",
            "params": {
                "sessionId": SESSION,
                "update": {"sessionUpdate": "agent_message_chunk", "content": content},
                "_meta": {"raxol.io": rider},
            },
        }

    def other(offset: int, kind: str, payload: Any, taint: str) -> Any:
        members = {"offset": offset, "kind": kind, "payload": payload, "taint": taint}
        params = {"sessionId": SESSION, **members, "ts": times[offset - 1]}
        return {"jsonrpc": "2.0", "method": "_raxol/session.record", "params": params}

    caught_up = {"sessionId": SESSION, "offset": 3}
    assert link.messages == [
        other(1, "session_created", {"cwd": "/srv"}, "system"),
        updated(2, "hi"),
        {"jsonrpc": "2.0", "method": "_raxol/session.caught_up", "params": caught_up},
        {"id": 2, "result": {"_meta": {"raxol.io": {"highWatermark": 2}}}},
        updated(3, "ho"),
        other(4, "turn_started", {"turnId": 2, "prompt": []}, "user"),
    ]


async def test_a_session_id_is_any_text() -> None:
    name = 's"1\\ \u2028 \U0001f600'
    journal = MemoryJournal()
    writer, link = Writer(await journal.open(name)), Link()
    await link.subscriber(await journal.open(name), writer).attach()
    await writer.aclose()

    ids = {message["params"]["sessionId"] for message in link.messages if "params" in message}
    assert ids == {name}
    assert link.shown == [1, ("caught_up", 2), ("reply", 1), ("closed", "closed")]


# ------------------------------------------------------------------ a client that knows no offsets


async def test_a_stock_client_gets_updates_only() -> None:
    writer, log = await session()
    link = Link()
    for number in range(3):
        await writer.append(entry("turn_started"))
        await writer.append(update(f"{number}"))
    await link.subscriber(log, writer, aware=False).attach()
    await writer.append(entry("turn_completed"))
    await writer.append(update("live"))

    assert link.shown == [3, 5, 7, ("reply", 7), 9]
    methods = {message["method"] for message in link.messages if "method" in message}
    assert methods == {"session/update"}


async def test_what_a_stock_client_is_shown_may_differ_and_be_left_out() -> None:
    writer, log = await session()
    link = Link()

    def project(record: Record) -> bytes | None:
        if b"secret" in record.payload:
            return None
        return b'{"sessionUpdate":"plan"}' if b"old" in record.payload else record.payload

    def skip(record: Record) -> bool:
        return b"mine" in record.payload

    for text in ("old", "secret", "mine"):
        await writer.append(update(text))
    subscriber = link.subscriber(log, writer, aware=False, project=project, skip=skip)
    await subscriber.attach()
    for text in ("old", "secret", "mine", "new"):
        await writer.append(update(text))

    assert link.shown == [2, 4, ("reply", 4), 5, 8]
    updates = [message["params"]["update"] for message in link.messages if "params" in message]
    texts = [found.get("content", {}).get("text", found["sessionUpdate"]) for found in updates]
    assert texts == ["plan", "mine", "plan", "new"]
    riders = [message["params"]["_meta"] for message in link.messages if "params" in message]
    assert [rider["raxol.io"]["taint"] for rider in riders] == ["agent"] * 4
    assert subscriber.forwarded == 8


async def test_an_aware_client_is_shown_everything_as_it_is() -> None:
    writer, log = await written(2)
    link = Link()
    never: Any = pytest.fail
    await link.subscriber(log, writer, project=never, skip=never).attach()
    await writer.append(update("mine"))

    assert link.offsets == [1, 2, 3]


# ------------------------------------------------------------------ the gate


async def test_the_gate_is_fixed_and_every_credit_comes_back() -> None:
    _, log = await written(5)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source, Rider(5))
    await subscriber.attach()
    link.messages.clear()
    for offset in (3, 5, 6, 1, 6, 8, 7, 5):
        subscriber.received(record(offset))

    # What is wrong with the source is seen, and not hidden: 6 twice, 8 in front of 7.
    assert link.offsets == [6, 6, 8, 7]
    assert subscriber.forwarded == 8
    assert source.credits == 8


async def test_live_records_wait_for_the_answer() -> None:
    _, log = await written(3)
    paged, source, link = Paged(log), Fake(), Link()

    async def early(*offsets: int) -> None:
        await asyncio.sleep(0)
        for offset in offsets:
            source.tails[0].received(record(offset))

    paged.before_mark = lambda: early(3)
    paged.before_read = lambda: early(2, 4, 5)
    subscriber = link.subscriber(paged, source)
    await subscriber.attach()

    assert link.shown == [1, 2, 3, ("caught_up", 4), ("reply", 3), 4, 5]
    assert source.credits == 4


async def test_it_registers_first_and_asks_the_store_then() -> None:
    _, log = await written(3)
    paged, source, link = Paged(log), Fake(), Link()

    async def registered() -> None:
        assert source.tails

    paged.before_mark = registered
    await link.subscriber(paged, source).attach()
    assert paged.marks == 1


# ------------------------------------------------------------------ a slow link


async def test_no_task_or_future_is_made_for_a_live_record() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    made: list[Any] = []
    loop = asyncio.get_running_loop()

    def make(*args: Any, **_named: Any) -> None:
        made.append(args)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_task", "create_future", "call_soon", "call_later"):
            patch.setattr(loop, name, make)
        for offset in range(2, 500):
            subscriber.received(record(offset))

    assert made == []
    assert link.offsets == list(range(1, 500))
    assert source.credits == 498


async def test_a_slow_link_has_one_task_and_gives_credit_for_what_it_took() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    before = asyncio.all_tasks()
    link.take(2)
    for offset in range(2, 100):
        subscriber.received(record(offset))
    assert link.offsets == [1, 2, 3]
    assert source.credits == 2
    pumps = asyncio.all_tasks() - before
    assert len(pumps) == 1
    link.take(3)
    await link.until(3 + 2 + 3)
    for offset in range(100, 103):
        subscriber.received(record(offset))
    assert asyncio.all_tasks() - before == pumps
    link.take()
    await link.until(2 + 102)
    await asyncio.wait(pumps)
    assert link.offsets == list(range(1, 103))
    assert source.credits == 101

    subscriber.received(record(103))
    assert link.offsets[-1] == 103
    assert asyncio.all_tasks() == before


async def test_nothing_overtakes_what_waits() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    link.take(0)
    subscriber.received(record(2))
    link.take()
    subscriber.received(record(3))  # before the pump has had its turn
    await link.until(2 + 3)
    subscriber.received(record(4))
    assert link.offsets == [1, 2, 3, 4]


async def test_a_link_may_be_slow_again_and_again() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    for offset in range(2, 20, 2):
        link.take(0)
        subscriber.received(record(offset))
        link.take()
        await link.until(2 + offset)
        await a_while()
        subscriber.received(record(offset + 1))
        assert link.offsets[-1] == offset + 1
    assert link.offsets == list(range(1, 20))
    assert source.credits == 18


async def test_history_waits_for_a_slow_link_and_live_records_for_history() -> None:
    writer, log = await written(10)
    link = Link(room=0)
    subscriber = link.subscriber(log, writer)
    attaching = asyncio.create_task(subscriber.attach())
    for room, total in ((1, 1), (4, 5)):
        link.take(room)
        await link.until(total)
        await writer.append(update())
    assert link.offsets == [1, 2, 3, 4, 5]
    assert not subscriber.live
    link.take()
    assert await attaching == 10
    assert link.shown == [*range(1, 11), ("caught_up", 11), ("reply", 10), 11, 12]


async def test_credit_that_comes_back_never_lags() -> None:
    writer, log = await session(credit=1)
    link = Link()
    await link.subscriber(log, writer).attach()
    for _ in range(50):
        await writer.append(update())

    assert link.offsets == list(range(1, 52))
    assert link.ended == []


async def test_who_is_too_slow_is_told_after_all_that_waited_and_can_heal() -> None:
    writer, log = await session(credit=3)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.take(0)
    for _ in range(9):
        await writer.append(update())
    assert subscriber.over is None
    assert subscriber.live
    link.take()
    await link.until_ended()

    assert link.shown == [1, ("caught_up", 2), ("reply", 1), 2, 3, 4, ("lagged", 4)]
    assert link.ended == ["lagged"]
    assert subscriber.over == "lagged"
    await writer.append(update())
    assert len(link.shown) == 7

    healed = Link()
    await healed.subscriber(log, writer, Rider(5)).attach()
    await writer.append(update())
    assert [*link.offsets, *healed.offsets] == list(range(1, 13))


async def test_who_lags_before_the_answer_is_told_after_it() -> None:
    writer, log = await written(4, credit=2)
    link = Link(room=1)
    attaching = asyncio.create_task(link.subscriber(log, writer).attach())
    await link.until(1)
    for _ in range(5):
        await writer.append(update())
    link.take()
    assert await attaching == 4

    live = [5, 6, ("lagged", 6)]
    assert link.shown == [1, 2, 3, 4, ("caught_up", 5), ("reply", 4), *live]
    assert link.ended == ["lagged"]


async def test_one_that_lags_at_once_heals_from_the_mark() -> None:
    _, log = await written(4)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source, Rider(5))
    await subscriber.attach()
    subscriber.lagged()

    assert link.shown[-1] == ("lagged", 4)


async def test_the_others_notice_nothing_of_a_slow_one() -> None:
    writer, log = await session(credit=2)
    slow, quick = Link(), Link()
    await slow.subscriber(log, writer).attach()
    await quick.subscriber(log, writer).attach()
    slow.take(0)
    for _ in range(10):
        await writer.append(update())
    assert quick.offsets == list(range(1, 12))
    slow.lose()
    await slow.until_ended()
    assert slow.ended == ["link_lost"]


# ------------------------------------------------------------------ one frame for all


async def test_a_record_s_frame_is_built_once_for_all_aware_subscribers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[int] = []
    original = FrameHeads.frame

    def frame(self: FrameHeads, record: Record) -> bytes:
        built.append(record.offset)
        return original(self, record)

    monkeypatch.setattr(FrameHeads, "frame", frame)
    writer, log = await written(1)
    links = [Link() for _ in range(5)]
    for link in links:
        await link.subscriber(log, writer, TIP).attach()
        link.frames.clear()
    for number in range(3):
        writer.submit(update(f"{number}"))
    await writer.append(entry("last"))

    assert built == [2, 3, 4, 5]
    assert all(link.frames == links[0].frames for link in links)
    assert all(one is other for one, other in zip(links[0].frames, links[4].frames, strict=True))


async def test_frames_of_other_sessions_and_records_are_not_mixed_up() -> None:
    _, log = await written(1)
    link, source = Link(), Fake()
    subscriber = link.subscriber(log, source, TIP)
    await subscriber.attach()
    link.messages.clear()
    one, same = record(2, "one"), record(2, "one")
    for given_record in (one, same, record(3, "two"), one):
        subscriber.received(given_record)

    kinds = [message["params"]["kind"] for message in link.messages]
    assert kinds == ["one", "one", "two", "one"]


# ------------------------------------------------------------------ pages


async def test_history_is_read_in_pages_that_grow() -> None:
    writer, log = await session()
    await writer.ready()
    for number in range(1100):
        writer.submit(update(f"{number}"))
    await writer.append(update())
    paged, link = Paged(log), Link()
    await link.subscriber(paged, writer).attach()

    assert link.offsets == list(range(1, 1103))
    sizes = [stop - start + 1 for start, stop in paged.pages]
    assert sizes[:4] == [32, 64, 128, 256]
    assert max(sizes) == _PAGE
    assert sum(sizes) == 1102


async def test_pages_of_large_records_are_small() -> None:
    writer, log = await session()
    await writer.ready()
    text = "x" * (_PAGE_BYTES // 4)
    for _ in range(60):
        writer.submit(update(text))
    await writer.append(update())
    paged, link = Paged(log), Link()
    await link.subscriber(paged, writer).attach()

    sizes = [stop - start + 1 for start, stop in paged.pages]
    assert sizes[0] == 32
    assert max(sizes[1:]) <= 4
    assert link.offsets == list(range(1, 63))


async def test_a_long_replay_leaves_others_their_turn() -> None:
    writer, log = await session()
    for number in range(3000):
        writer.submit(update(f"{number}"))
    await writer.append(update())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await Link().subscriber(log, writer).attach()
    other.cancel()
    assert turns >= 3000 // _PAGE


# ------------------------------------------------------------------ the end of a grant


class Clock:
    """Unix seconds that go with the loop's time, and can be moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.shift = now - asyncio.get_running_loop().time()

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.shift


@pytest.mark.virtual_time
@pytest.mark.covers("CDI-6")
@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("seconds", [1, 60, 61, 3600, 20 * 3600])
async def test_a_grant_that_ends_closes_the_attach_then_and_not_before(
    aware: bool, seconds: int
) -> None:
    writer, log = await written(1)
    link, clock = Link(), Clock()
    subscriber = link.subscriber(
        log, writer, aware=aware, expires_at=1_700_000_000 + seconds, clock=clock
    )
    await subscriber.attach()
    await asyncio.sleep(seconds - 0.5)
    await writer.append(update("in time"))
    assert subscriber.live
    before = len(link.shown)
    await asyncio.sleep(1)

    assert link.shown[before:] == [("closed", "revoked")]
    assert link.ended == ["revoked"]
    assert not writer.publishes_to(subscriber)
    await writer.append(update("late"))
    assert len(link.shown) == before + 1


@pytest.mark.virtual_time
@pytest.mark.parametrize(("rider", "writerless"), [(NONE, False), (Rider(), True)])
async def test_where_nothing_is_live_the_grant_ends_all_the_same(
    rider: Rider, writerless: bool
) -> None:
    writer, log = await written(1)
    link, clock = Link(), Clock()
    await link.subscriber(
        log,
        None if writerless else writer,
        rider,
        aware=False,
        expires_at=1_700_000_010,
        clock=clock,
    ).attach()
    await asyncio.sleep(9)
    assert link.shown[-1] == ("reply", 1)
    await asyncio.sleep(2)
    assert link.shown[-2:] == [("reply", 1), ("closed", "revoked")]
    assert link.ended == ["revoked"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("expires_at", [2**53, 10**400])
async def test_a_grant_may_end_in_any_distant_future(expires_at: int) -> None:
    writer, log = await written(1)
    link, clock = Link(), Clock()
    await link.subscriber(log, writer, expires_at=expires_at, clock=clock).attach()
    await asyncio.sleep(1000)
    await writer.append(update())
    assert link.offsets == [1, 2]
    assert link.ended == []


@pytest.mark.covers("CDI-6")
@pytest.mark.parametrize("expires_at", [-(10**400), 0, 1_600_000_000, 1_700_000_000])
async def test_a_grant_that_is_over_closes_right_behind_the_answer(expires_at: int) -> None:
    writer, log = await written(2)
    paged, link = Paged(log), Link()

    async def one_more() -> None:
        if len(paged.pages) == 1:
            await writer.append(update("live"))

    paged.before_read = one_more
    subscriber = link.subscriber(
        paged, writer, expires_at=expires_at, clock=lambda: 1_700_000_000.0
    )
    assert await subscriber.attach() == 2

    assert link.shown == [1, 2, ("caught_up", 3), ("reply", 2), ("closed", "revoked")]
    assert link.ended == ["revoked"]
    assert not subscriber.live
    await writer.append(update())
    assert len(link.shown) == 5


@pytest.mark.virtual_time
async def test_the_clock_is_looked_at_again_and_again() -> None:
    """A machine that slept, or whose clock was set: the loop's time knows nothing of that."""
    writer, log = await written(1)
    link, clock = Link(), Clock()
    await link.subscriber(log, writer, expires_at=1_700_100_000, clock=clock).attach()
    await asyncio.sleep(10)
    clock.shift += 100_000
    await asyncio.sleep(_LONGEST)
    assert link.ended == ["revoked"]

    behind, clock = Link(), Clock()
    await behind.subscriber(log, writer, expires_at=1_700_000_030, clock=clock).attach()
    clock.shift -= 1000
    await asyncio.sleep(1029)
    assert behind.ended == []
    await asyncio.sleep(_LONGEST)
    assert behind.ended == ["revoked"]


@pytest.mark.virtual_time
@pytest.mark.covers("CDI-6")
async def test_an_old_timer_does_not_touch_a_new_attach() -> None:
    writer, log = await written(1)
    clock = Clock()
    old, new = Link(), Link()
    await old.subscriber(log, writer, expires_at=1_700_000_010, clock=clock).attach()
    await asyncio.sleep(5)
    fresh = new.subscriber(log, writer, expires_at=1_700_000_100, clock=clock)
    await fresh.attach()
    await asyncio.sleep(10)
    assert old.ended == ["revoked"]
    assert new.ended == []
    await writer.append(update())
    assert new.offsets == [1, 2]
    await asyncio.sleep(100)
    assert new.ended == ["revoked"]


@pytest.mark.virtual_time
async def test_what_waits_for_a_slow_link_is_not_sent_under_a_grant_that_is_over() -> None:
    writer, log = await written(1)
    link, clock = Link(), Clock()
    await link.subscriber(log, writer, expires_at=1_700_000_010, clock=clock).attach()
    link.take(1)
    for _ in range(5):
        await writer.append(update())
    await asyncio.sleep(11)

    assert link.shown[3:] == [2, ("closed", "revoked")]
    link.take()
    await asyncio.sleep(1)
    assert len(link.shown) == 5


@pytest.mark.virtual_time
async def test_without_an_end_a_grant_needs_no_timer() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    assert subscriber._timer is None
    timed = link.subscriber(log, writer, expires_at=2**62)
    await timed.attach()
    assert timed._timer is not None
    timed.detach()
    assert timed._timer is None


@pytest.mark.virtual_time
async def test_a_link_that_is_lost_when_the_grant_ends_ends_silently() -> None:
    writer, log = await written(1)
    link, clock = Link(), Clock()
    await link.subscriber(log, writer, expires_at=1_700_000_010, clock=clock).attach()
    link.lose()
    await asyncio.sleep(11)
    assert link.ended == ["link_lost"]


# ------------------------------------------------------------------ other ends


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("reason", ["closed", "deleted", "writer_down"])
async def test_the_end_of_the_source_is_told_behind_what_it_said(aware: bool, reason: str) -> None:
    writer, log = await session()
    link = Link()
    subscriber = link.subscriber(log, writer, TIP, aware=aware)
    await subscriber.attach()
    link.messages.clear()
    link.take(1)
    writer.submit(update())
    await writer.append(update())
    if reason == "writer_down":
        writer._end_all(reason)
    else:
        await writer.aclose(reason)
    link.take()
    await link.until_ended()

    assert link.shown == [2, 3, ("closed", reason)]
    assert link.ended == [reason]
    assert subscriber.over == reason


async def test_a_store_that_fails_ends_the_attach() -> None:
    class Full(Paged):
        async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
            if any(b"too much" in one.payload for one in entries):
                raise JournalError("no space left")
            return await super().append(entries, flush=flush)

    journal = MemoryJournal()
    log = await journal.open(SESSION)
    writer, link = Writer(Full(log)), Link()
    await link.subscriber(log, writer).attach()
    await writer.append(update())
    with pytest.raises(JournalError):
        await writer.append(update("too much"))

    assert link.shown == [1, ("caught_up", 2), ("reply", 1), 2, ("closed", "writer_down")]


async def test_a_writer_that_is_down_lets_nobody_in() -> None:
    writer, log = await written(3)
    await writer.aclose()
    link = Link()
    subscriber = link.subscriber(log, writer)
    with pytest.raises(JournalError):
        await subscriber.attach()
    assert link.messages == []
    assert subscriber.over == "failed"


@pytest.mark.parametrize("fails", ["before_mark", "before_read"])
async def test_a_journal_that_cannot_be_read_undoes_the_attach(fails: str) -> None:
    async def broken() -> None:
        raise JournalError("input/output error")

    writer, log = await written(3)
    paged, link = Paged(log), Link()
    setattr(paged, fails, broken)
    subscriber = link.subscriber(paged, writer)
    with pytest.raises(JournalError):
        await subscriber.attach()

    assert link.messages == []
    assert link.ended == []
    assert not writer.publishes_to(subscriber)


async def test_a_session_that_is_deleted_meanwhile_is_no_short_history() -> None:
    journal = MemoryJournal()
    writer, log = await session(journal)
    for _ in range(100):
        await writer.append(update())
    paged, link = Paged(log), Link()

    async def deleted() -> None:
        if len(paged.pages) == 2:
            await journal.delete(SESSION)

    paged.before_read = deleted
    with pytest.raises(JournalError, match="33 to 96"):
        await link.subscriber(paged, writer).attach()
    assert link.offsets == list(range(1, 33))
    assert ("reply", 101) not in link.shown


async def test_an_answer_that_fails_undoes_the_attach() -> None:
    writer, log = await written(1)
    link = Link()

    def reply(_mark: int) -> None:
        raise ValueError("no JSON")

    subscriber = Subscriber(
        log,
        writer,
        Rider(),
        aware=True,
        send=link.send,
        writable=link.writable,
        drain=link.drain,
        reply=reply,
    )
    with pytest.raises(ValueError, match="no JSON"):
        await subscriber.attach()
    assert not writer.publishes_to(subscriber)


async def test_a_failure_in_a_live_record_ends_one_attach_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer, log = await written(1)
    failing, other = Link(), Link()

    def project(_record: Record) -> bytes | None:
        raise KeyError("a bug")

    subscriber = failing.subscriber(log, writer, TIP, aware=False, project=project)
    await subscriber.attach()
    await other.subscriber(log, writer).attach()
    await writer.append(update())
    await writer.append(update())

    assert failing.ended == ["failed"]
    assert not writer.publishes_to(subscriber)
    assert other.offsets == [1, 2, 3]
    assert "a bug" in caplog.text


async def test_a_failure_behind_a_slow_link_ends_it_too(caplog: pytest.LogCaptureFixture) -> None:
    writer, log = await written(1)
    link = Link()

    def skip(_record: Record) -> bool:
        raise KeyError("a bug")

    await link.subscriber(log, writer, TIP, aware=False, skip=skip).attach()
    link.take(0)
    await writer.append(update())
    link.take()
    await link.until_ended()
    assert link.ended == ["failed"]
    assert "a bug" in caplog.text


async def test_detaching_sends_nothing_and_can_be_done_twice() -> None:
    writer, log = await written(2)
    link = Link()
    subscriber = link.subscriber(log, writer, expires_at=2**40)
    await subscriber.attach()
    before = len(link.frames)
    subscriber.detach()
    subscriber.detach()
    await writer.append(update())
    subscriber.received(record(9))
    subscriber.lagged()
    subscriber.ended("closed")

    assert len(link.frames) == before
    assert link.ended == ["detached"]
    assert not subscriber.live
    assert not writer.publishes_to(subscriber)


async def test_detaching_lets_go_of_what_waits() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.take(0)
    await writer.append(update())
    subscriber.detach()
    link.take()
    await a_while()

    assert link.offsets == [1]
    assert not subscriber._inbox


@pytest.mark.parametrize(
    ("live", "shown", "ended"),
    [(2, [2, 3], "detached"), (5, [2, 3, 4, ("lagged", 4)], "lagged")],
)
async def test_detaching_may_hand_over_what_waits_first(
    live: int, shown: list[Any], ended: str
) -> None:
    writer, log = await written(1, credit=3)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.messages.clear()
    link.take(0)
    for _ in range(live):
        await writer.append(update())
    assert link.shown == []
    subscriber.detach(flush=True)
    assert link.shown == shown
    assert link.ended == [ended]
    link.take()
    await a_while()
    assert link.shown == shown


async def test_handing_over_to_a_link_that_is_gone_ends_it_silently() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.take(0)
    await writer.append(update())
    link.lost = True
    subscriber.detach(flush=True)
    assert link.ended == ["link_lost"]
    assert link.offsets == [1]
    await a_while()


@pytest.mark.parametrize("reason", ["closed", "lagged"])
async def test_a_closing_link_is_handed_what_waits_and_what_follows_and_no_last_word(
    reason: str,
) -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    link.messages.clear()
    link.take(0)
    subscriber.received(record(2))
    assert link.shown == []
    subscriber.part()
    assert link.shown == [2]
    link.take()
    subscriber.received(record(3))
    subscriber.ended(reason)
    await a_while()

    assert link.shown == [2, 3]
    assert link.ended == [reason]


async def test_a_pump_whose_work_was_handed_over_does_not_mind_that_the_link_is_gone() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    await subscriber.attach()
    link.take(0)
    subscriber.received(record(2))
    await a_while()  # the pump waits for room
    subscriber.part()
    link.lose()
    await a_while()

    assert link.ended == []
    assert subscriber.live
    subscriber.received(record(3))
    await a_while()
    assert link.ended == ["link_lost"]


async def test_detaching_before_the_answer_leaves_the_answer() -> None:
    writer, log = await written(5)
    link = Link(room=2)
    subscriber = link.subscriber(log, writer, expires_at=2**40)
    attaching = asyncio.create_task(subscriber.attach())
    await link.until(2)
    await writer.append(update())
    subscriber.detach()
    assert not writer.publishes_to(subscriber)
    assert link.ended == []
    link.take()
    assert await attaching == 5
    await writer.append(update())

    assert link.shown == [1, 2, 3, 4, 5, ("caught_up", 6), ("reply", 5)]
    assert link.ended == ["detached"]
    assert not subscriber.live
    assert subscriber._timer is None


async def test_one_that_is_detached_before_it_is_let_in_keeps_no_seat() -> None:
    writer, log = await written(5)
    link = Link()
    subscriber = link.subscriber(log, writer)
    attaching = asyncio.create_task(subscriber.attach())
    await asyncio.sleep(0)
    subscriber.detach()
    assert await attaching == 5

    assert not writer.publishes_to(subscriber)
    assert link.ended == ["detached"]


# ------------------------------------------------------------------ the link goes


async def test_a_link_that_goes_during_history_ends_it_silently() -> None:
    writer, log = await written(5)
    link = Link(room=2)
    subscriber = link.subscriber(log, writer)
    attaching = asyncio.create_task(subscriber.attach())
    await link.until(2)
    link.lose()
    with pytest.raises(ConnectionClosed):
        await attaching

    assert link.offsets == [1, 2]
    assert link.ended == []
    assert subscriber.over == "link_lost"
    assert not writer.publishes_to(subscriber)


async def test_a_link_that_goes_while_live_records_wait_ends_it_silently() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    link.take(0)
    await writer.append(update())
    await asyncio.sleep(0)
    link.lose()
    await link.until_ended()

    assert link.ended == ["link_lost"]
    assert link.offsets == [1]
    assert not writer.publishes_to(subscriber)


async def test_a_link_that_is_found_gone_behind_the_answer_ends_it_silently() -> None:
    _, log = await written(1)
    paged, source, link = Paged(log), Fake(), Link()

    async def early() -> None:
        source.tails[0].received(record(2))

    def reply(mark: int) -> None:
        link.reply(mark)
        link.lost = True

    paged.before_read = early
    subscriber = link.subscriber(paged, source)
    subscriber._reply = reply
    subscriber._writable = lambda: True
    assert await subscriber.attach() == 1

    assert link.ended == ["link_lost"]
    assert source.left == [subscriber]
    assert link.shown == [1, ("caught_up", 2), ("reply", 1)]


async def test_a_link_that_is_found_gone_by_a_live_record_ends_it_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    subscriber._writable = lambda: True
    await subscriber.attach()
    link.lost = True
    await writer.append(update())

    assert link.ended == ["link_lost"]
    assert not writer.publishes_to(subscriber)
    assert caplog.text == ""


async def test_a_pump_that_is_cancelled_with_everything_else_ends_it() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    before = asyncio.all_tasks()
    link.take(0)
    await writer.append(update())
    (pump,) = asyncio.all_tasks() - before
    await asyncio.sleep(0)
    pump.cancel()
    with suppress(asyncio.CancelledError):
        await pump
    assert link.ended == ["link_lost"]
    assert not writer.publishes_to(subscriber)


# ------------------------------------------------------------------ the load is cancelled


async def test_a_load_that_is_cancelled_is_undone_wherever_it_is() -> None:
    """At each of its steps: nothing more is sent, nothing stays registered."""
    sent = 0
    for turns in range(40):
        writer, log = await written(70)
        link = Link(room=40)
        subscriber = link.subscriber(log, writer)
        attaching = asyncio.create_task(subscriber.attach())
        for _ in range(turns):
            await asyncio.sleep(0)
        attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching
        sent = len(link.frames)
        await writer.append(update())
        link.take()
        await asyncio.sleep(0)

        assert len(link.frames) == sent
        assert link.offsets == list(range(1, sent + 1))
        assert link.ended == []
        assert not writer.publishes_to(subscriber)
        assert not subscriber._inbox
    assert sent == 40


async def test_one_that_is_registered_too_late_leaves_again() -> None:
    _, log = await written(1)
    source, link = Fake(), Link()
    subscriber = link.subscriber(log, source)
    subscriber.detach()
    subscriber.received(record(2))
    assert source.left == [subscriber, subscriber]
    assert not subscriber._inbox


# ------------------------------------------------------------------ how far it has come


async def test_one_may_wait_until_an_offset_was_given_to_the_connection() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    await subscriber.reached(1)
    waits = [asyncio.create_task(subscriber.reached(offset)) for offset in (4, 2, 3, 3)]
    await asyncio.sleep(0)
    waits[3].cancel()
    link.take(0)
    for _ in range(3):
        await writer.append(update())
    await a_while()
    assert [wait.done() for wait in waits] == [False, False, False, True]
    link.take(2)
    await asyncio.wait(waits[1:3])
    assert not waits[0].done()
    link.take()
    await waits[0]
    assert subscriber._wanted > 2**40


def anything(_record: Record) -> bool:
    return True


async def test_what_is_left_out_counts_as_given() -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer, aware=False, skip=anything)
    await subscriber.attach()
    wait = asyncio.create_task(subscriber.reached(3))
    await asyncio.sleep(0)
    await writer.append(entry("turn_started"))
    await writer.append(update())
    await wait
    assert subscriber.forwarded == 3
    assert link.shown == [("reply", 1)]


@pytest.mark.parametrize("how", ["detach", "lose", "lagged", "closed"])
async def test_nobody_waits_for_an_attach_that_is_over(how: str) -> None:
    writer, log = await written(1)
    link = Link()
    subscriber = link.subscriber(log, writer)
    await subscriber.attach()
    wait = asyncio.create_task(subscriber.reached(99))
    await asyncio.sleep(0)
    if how == "detach":
        subscriber.detach()
    elif how == "lagged":
        subscriber.lagged()
    elif how == "closed":
        await writer.aclose()
    else:
        link.lose()
        await writer.append(update())
    await wait
    await subscriber.reached(100)


@pytest.mark.parametrize("rider", [Rider(), NONE])
async def test_where_nothing_live_comes_nobody_waits(rider: Rider) -> None:
    _, log = await written(1)
    subscriber = Link().subscriber(log, None, rider)
    await subscriber.attach()
    await subscriber.reached(99)


async def test_waiting_before_the_answer_includes_history() -> None:
    writer, log = await written(5)
    link = Link(room=1)
    subscriber = link.subscriber(log, writer)
    attaching = asyncio.create_task(subscriber.attach())
    await link.until(1)
    waits = [asyncio.create_task(subscriber.reached(offset)) for offset in (5, 6)]
    link.take()
    assert await attaching == 5
    await waits[0]
    assert not waits[1].done()
    await writer.append(update())
    await waits[1]


# ------------------------------------------------------------------ any order


@pytest.mark.parametrize("follows", [False, True], ids=["writer", "follower"])
@settings(max_examples=250)
@given(st.lists(steps, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 40))
async def test_history_and_live_are_the_durable_records_each_once_in_order(
    follows: bool, schedules: list[list[tuple[str, Any]]], credit: int, before: int
) -> None:
    await hold(schedules, credit=credit, before=before, follows=follows)


# ------------------------------------------------------------------ what it costs


def test_a_live_record_costs_about_what_its_frame_costs() -> None:
    """Counted in bytecode calls, not in time: nothing is decoded, copied or made but the frame."""
    import sys

    async def calls() -> list[str]:
        _, log = await written(1)
        source, frames = Fake(), list[bytes]()
        subscriber = Subscriber(
            log,
            source,
            TIP,
            aware=True,
            send=frames.append,
            writable=lambda: True,
            drain=Link().drain,
            reply=lambda _: None,
        )
        await subscriber.attach()
        found: list[str] = []
        one = record(2)

        def profile(frame: Any, event: str, _argument: Any) -> None:
            if event == "call":
                found.append(frame.f_code.co_name)

        sys.setprofile(profile)
        subscriber.received(one)
        sys.setprofile(None)
        assert json.loads(frames[-1])["params"]["offset"] == 2
        return found

    found = asyncio.run(calls())
    assert found[:2] == ["received", "<lambda>"]
    assert set(found) == {"received", "<lambda>", "_forward", "frame", "encode", "credit"}
    assert len(found) <= 7
