"""At most one live writer a session, shared by who uses it, and gone when nobody does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import (
    SESSION_CREATED,
    TURN_COMPLETED,
    TURN_STARTED,
    JournalError,
    JournalInUse,
    MemoryJournal,
    Record,
    Writers,
)
from tests.journal.ears import Ears, Events, HeldJournal, kinds, say, stored

if TYPE_CHECKING:
    from collections.abc import Sequence


async def turn_of_the_loop() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


# ------------------------------------------------------------------ one a session


async def test_everybody_gets_the_same_writer_and_the_store_is_claimed_once() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    got = await asyncio.gather(*(writers.ensure("s", n, {"n": n}) for n in range(5)))

    assert len(set(got)) == 1
    assert writers.get("s") is got[0]
    assert await writers.ensure("s", 0) is got[0]
    assert [log.claims for log in journal.logs] == [1]
    await got[0].append(say("x"))
    assert (await stored(journal))[0].data == {"n": 0}
    await writers.aclose()


async def test_sessions_have_writers_of_their_own() -> None:
    writers = Writers(MemoryJournal())
    one, two = await writers.ensure("one", 1), await writers.ensure("two", 1)

    assert (one.session_id, two.session_id) == ("one", "two")
    assert writers.get("three") is None
    await writers.aclose()


async def test_a_writer_that_was_ensured_has_written_nothing() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    await writers.ensure("s", 1)
    assert await journal.sessions() == []

    await writers.aclose()
    assert await journal.sessions() == []


async def test_a_session_that_another_writes_is_refused_until_it_is_free() -> None:
    journal = MemoryJournal()
    here, there = Writers(journal), Writers(journal)
    await there.ensure("s", 1)
    for _ in range(2):
        with pytest.raises(JournalInUse) as caught:
            await here.ensure("s", 1)
        assert caught.value.session_id == "s"
    assert here.get("s") is None
    there.leave("s", 1)
    await there.settled()

    assert (await here.ensure("s", 1)).failed is None
    await here.aclose()
    await there.aclose()


async def test_concurrent_callers_share_a_refusal() -> None:
    journal = HeldJournal()
    other = Writers(journal)
    await other.ensure("s", 1)
    writers = Writers(journal)
    got = await asyncio.gather(*(writers.ensure("s", n) for n in range(3)), return_exceptions=True)

    assert [type(error) for error in got] == [JournalInUse] * 3
    assert len(journal.logs) == 2
    assert journal.logs[1].closed == 1
    await writers.aclose()
    await other.aclose()


async def test_a_store_that_cannot_be_opened_says_so_and_is_asked_again() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    journal.error = JournalError("no permission")
    with pytest.raises(JournalError, match="no permission"):
        await writers.ensure("s", 1)
    journal.error = None

    assert (await writers.ensure("s", 1)).failed is None
    await writers.aclose()


# ------------------------------------------------------------------ as long as somebody uses it


async def test_a_writer_closes_when_its_last_user_has_left() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writers.ensure("s", 2)
    tail = Ears()
    await writer.subscribe(tail)
    writers.leave("s", 1)
    writers.leave("s", 1)
    await writers.settled()
    assert writers.get("s") is writer
    await writer.append(say("still there"))

    writers.leave("s", 2)
    await writers.settled()
    assert writers.get("s") is None
    assert tail.heard == [2, "closed"]
    assert (journal.logs[0].released, journal.logs[0].closed) == (1, 1)
    writers.leave("s", 2)
    await writers.aclose()


async def test_users_are_told_apart_by_identity() -> None:
    writers = Writers(MemoryJournal())
    mine, twin = [1], [1]
    writer = await writers.ensure("s", mine)
    writers.leave("s", twin)
    await writers.settled()

    assert writers.get("s") is writer
    await writers.aclose()


@pytest.mark.covers("J7")
async def test_an_open_turn_keeps_its_writer_until_it_is_completed() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    number = await writer.begin_turn("turn")
    writers.leave("s", 1)
    await writers.settled()
    assert writers.get("s") is writer
    writer.submit(say("it goes on"))
    writer.complete_turn("turn", number, stop_reason="end_turn")
    await writers.settled()

    assert writers.get("s") is None
    assert kinds(await stored(journal))[-1] == TURN_COMPLETED
    await writers.aclose()


async def test_who_comes_while_it_would_close_finds_it_alive() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    writers.leave("s", 1)

    assert await writers.ensure("s", 2) is writer
    assert len(journal.logs) == 1
    await writers.aclose()


async def test_who_comes_while_it_closes_gets_a_new_one_after_it() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    journal.logs[0].gate.clear()
    writer.submit(say("x"))
    writers.leave("s", 1)
    await turn_of_the_loop()
    coming = asyncio.create_task(writers.ensure("s", 2))
    await turn_of_the_loop()
    assert not coming.done()
    assert writers.get("s") is None
    journal.logs[0].gate.set()

    new = await coming
    assert new is not writer
    assert writer.failed is not None
    assert kinds(await stored(journal)) == [SESSION_CREATED, "session_update"]
    await writers.aclose()


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancelled_ensure_leaves_no_writer_behind(turns: int) -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    ensuring = asyncio.create_task(writers.ensure("s", 1))
    for _ in range(turns):
        await asyncio.sleep(0)
    ensuring.cancel()
    await asyncio.wait([ensuring])
    if not ensuring.cancelled():
        writers.leave("s", 1)
    await writers.settled()

    assert writers.get("s") is None
    assert all(log.closed == 1 for log in journal.logs)
    await writers.aclose()


async def test_a_cancelled_ensure_of_who_is_a_user_already_changes_nothing() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    journal.logs[0].error = JournalError("no space")
    with pytest.raises(JournalError):
        await writer.append(say("x"))
    again = asyncio.create_task(writers.ensure("s", 1))
    await asyncio.sleep(0)
    again.cancel()
    await asyncio.wait([again])
    await writers.settled()

    assert again.cancelled()
    assert writers.get("s") not in (None, writer)
    await writers.aclose()


# ------------------------------------------------------------------ what fails


@pytest.mark.covers("J12")
async def test_a_writer_that_failed_is_replaced_and_its_open_turn_repaired_once() -> None:
    journal = HeldJournal()
    events = Events()
    writers = Writers(journal, on_event=events)
    first = await writers.ensure("s", 1)
    await first.begin_turn("turn")
    await turn_of_the_loop()
    journal.logs[0].error = JournalError("no space")
    with pytest.raises(JournalError):
        await first.append(say("lost"))
    assert writers.get("s") is None

    second = await writers.ensure("s", 1)
    assert second is not first
    assert journal.logs[0].closed == 1
    tail = Ears()
    await second.subscribe(tail)
    await second.append(say("on it goes"))
    assert tail.heard == [4]
    assert kinds(await stored(journal)) == [
        *(SESSION_CREATED, TURN_STARTED, TURN_COMPLETED, "session_update"),
    ]
    assert events.of("journal.writer_failed")[0]["session"] == "s"
    await writers.aclose()


async def test_a_writer_that_failed_goes_when_its_users_leave() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    journal.logs[0].error = JournalError("no space")
    with pytest.raises(JournalError):
        await writer.append(say("lost"))
    writers.leave("s", 1)
    await writers.settled()

    assert journal.logs[0].closed == 1
    assert writers._places == {}
    await writers.aclose()


async def test_a_log_that_cannot_be_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    await writers.ensure("s", 1)

    async def aclose() -> None:
        raise OSError("gone")

    journal.logs[0].aclose = aclose  # type: ignore[method-assign]
    await writers.aclose()

    assert "the log of session 's' was not closed" in caplog.text


# ------------------------------------------------------------------ deleting and closing


async def test_deleting_a_session_ends_its_tails_and_all_that_there_was() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writers.ensure("other", 1)
    tail = Ears()
    await writer.subscribe(tail)
    await writer.begin_turn("turn")
    writer.submit(say("x"))

    assert await writers.delete("s")
    assert tail.heard == [2, 3, "deleted"]
    assert await stored(journal) == []
    assert writers.get("s") is None
    assert writers.get("other") is not None
    assert not await writers.delete("s")
    assert [*writers._places] == ["other"]
    again = await writers.ensure("s", 2)
    assert (await again.append(say("anew"))).offset == 2
    await writers.aclose()


async def test_deleting_what_nobody_writes_needs_no_writer() -> None:
    journal = HeldJournal()
    log = await MemoryJournal.open(journal, "s")
    await log.claim()
    await log.append([say("x")])
    await log.release()
    writers = Writers(journal)

    assert await writers.delete("s")
    assert not await writers.delete("never")
    assert journal.logs == []
    assert writers._places == {}
    await writers.aclose()


async def test_who_comes_during_a_deletion_gets_a_session_that_begins_anew() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writer.append(say("old"))
    deleting = asyncio.create_task(writers.delete("s"))
    again = asyncio.create_task(writers.delete("s"))
    await asyncio.sleep(0)
    coming = asyncio.create_task(writers.ensure("s", 2))

    assert [await deleting, await again] == [True, False]
    assert (await (await coming).append(say("new"))).offset == 2
    await writers.aclose()


async def test_a_deletion_that_fails_says_so() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    journal.error = JournalInUse("s", "process 4711")
    with pytest.raises(JournalInUse, match="4711"):
        await writers.delete("s")
    journal.error = None
    await writers.aclose()


async def test_a_cancelled_deletion_goes_on_by_itself() -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writer.append(say("x"))
    journal.logs[0].gate.clear()
    writer.submit(say("y"))
    deleting = asyncio.create_task(writers.delete("s"))
    await turn_of_the_loop()
    deleting.cancel()
    await asyncio.wait([deleting])
    journal.logs[0].gate.set()
    await writers.settled()

    assert await journal.sessions() == []
    await writers.aclose()


async def test_closing_all_makes_durable_what_waits_and_refuses_who_comes_then() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    tails = [Ears() for _ in range(20)]
    for number, tail in enumerate(tails):
        writer = await writers.ensure(str(number), 1)
        await writer.subscribe(tail)
        writer.submit(say("x"))
        if number % 2:
            await writer.begin_turn("turn")
    await asyncio.gather(writers.aclose(), writers.aclose())
    await writers.aclose()

    assert {str(tail.heard) for tail in tails[::2]} == {"[2, 'closed']"}
    assert {str(tail.heard) for tail in tails[1::2]} == {"[2, 3, 4, 'closed']"}
    assert not any(info.turn_open for info in await journal.sessions())
    with pytest.raises(JournalError, match="closed"):
        await writers.ensure("s", 1)
    await writers.settled()
    assert writers._places == {}


async def test_credit_is_that_of_each_writer() -> None:
    writers = Writers(MemoryJournal(), credit=1)
    writer = await writers.ensure("s", 1)
    tail = Ears()
    await writer.subscribe(tail)
    for _ in range(2):
        await writer.append(say("x"))

    assert tail.heard == [2, "lagged"]
    await writers.aclose()


async def test_any_order_of_coming_going_and_deleting_leaves_nothing() -> None:
    journal = HeldJournal()
    writers = Writers(journal)

    async def come_and_go(number: int) -> None:
        for step in range(5):
            writer = await writers.ensure("s", number)
            for _ in range((number * 7 + step) % 4):
                await asyncio.sleep(0)
            if writer.failed is None:
                writer.submit(say("x"))
            if (number + step) % 6 == 0:
                await writers.delete("s")
            writers.leave("s", number)

    await asyncio.gather(*(come_and_go(number) for number in range(7)))
    await writers.settled()

    assert writers._places == {}
    assert [(log.released, log.closed) for log in journal.logs] == [(1, 1)] * len(journal.logs)
    check_contiguous(await stored(journal))
    await writers.aclose()


def check_contiguous(records: Sequence[Record]) -> None:
    assert [record.offset for record in records] == list(range(1, len(records) + 1))


@pytest.mark.parametrize("turns", range(4))
async def test_closing_all_while_one_is_being_opened_leaves_none(turns: int) -> None:
    journal = HeldJournal()
    writers = Writers(journal)
    opening = asyncio.create_task(writers.ensure("s", 1))
    for _ in range(turns):
        await asyncio.sleep(0)
    await writers.aclose()
    await asyncio.wait([opening])

    error = opening.exception()
    writer = None if error is not None else opening.result()
    assert isinstance(error, JournalError) or (writer is not None and writer.failed is not None)
    assert all(log.closed == 1 for log in journal.logs)
    assert writers._places == {}


# ------------------------------------------------------------------ all tasks are cancelled


@pytest.mark.parametrize("steps", range(4))
async def test_what_is_cancelled_before_it_begins_keeps_nobody_from_closing(steps: int) -> None:
    others = asyncio.all_tasks()
    journal = MemoryJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writer.begin_turn(1)
    writers.leave("s", 1)
    writer.release_turn(1)  # now it closes
    opening = asyncio.ensure_future(writers.ensure("other", 1))
    for _ in range(steps):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - others:  # as a loop does that ends
        task.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await writers.settled()
    again = await writers.ensure("s", 2)
    await again.append(say("x"))
    await writers.aclose()

    assert kinds(await stored(journal))[:3] == [SESSION_CREATED, TURN_STARTED, TURN_COMPLETED]
    assert writers.get("s") is None
