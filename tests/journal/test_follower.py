"""A follower tells what another process appends, while somebody listens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Follower, Journal, JournalError, MemoryJournal, Record, Writers
from tests.journal.ears import Ears, HeldJournal, say

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from antiphon.journal import SessionInfo, SessionLog, Writer


class Seen(Journal):
    """A journal that counts who follows it, and breaks when it is told to."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.following = 0
        self.begun = 0
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    async def open(self, session_id: str) -> SessionLog:
        if self.error is not None:
            raise self.error
        return await self.journal.open(session_id)

    async def sessions(self) -> list[SessionInfo]:
        return await self.journal.sessions()

    async def delete(self, session_id: str) -> bool:
        return await self.journal.delete(session_id)

    async def aclose(self) -> None:
        await self.journal.aclose()

    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        self.following += 1
        self.begun += 1
        try:
            async for run in self.journal.follow(session_id, start):
                if self.error is not None:
                    raise self.error
                yield run
        finally:
            self.following -= 1


async def there() -> tuple[Writers, Writer, Seen]:
    """Another process's writers, and the journal that is followed here."""
    journal = MemoryJournal()
    writers = Writers(journal)
    writer = await writers.ensure("s", 1)
    await writer.append(say("history"))
    return writers, writer, Seen(journal)


@pytest.mark.covers("CDI-4")
async def test_tails_are_told_of_what_comes_after_they_subscribed() -> None:
    writers, writer, seen = await there()
    follower, first, second = Follower(seen, "s"), Ears(), Ears()
    await follower.subscribe(first)
    await follower.subscribe(first)
    await writer.append(say("a"))
    await first.wait_for(1)
    await follower.subscribe(second)
    for text in "bcd":
        writer.submit(say(text))
    await writer.append(say("e"))
    await first.wait_for(5)

    assert first.heard == [3, 4, 5, 6, 7]
    assert [offset for offset in second.heard if isinstance(offset, int) and offset > 3] == [
        4,
        5,
        6,
        7,
    ]
    assert seen.begun == 1
    await follower.aclose()
    assert first.heard[5:] == ["closed"]
    await writers.aclose()


async def test_nothing_is_followed_before_the_first_tail_and_after_the_last() -> None:
    writers, writer, seen = await there()
    follower, tail = Follower(seen, "s"), Ears()
    assert seen.begun == 0
    for number in range(3):
        await follower.subscribe(tail)
        await writer.append(say("x"))
        await tail.wait_for(number + 1)
        follower.unsubscribe(tail)
        follower.unsubscribe(tail)
        await writer.append(say("unheard"))

    assert tail.heard == [3, 5, 7]
    assert (seen.begun, seen.following) == (3, 0)
    await follower.aclose()
    await writers.aclose()


async def test_who_lags_is_told_and_the_others_go_on() -> None:
    writers, writer, seen = await there()
    follower = Follower(seen, "s", credit=2)
    slow, quick, exempt = Ears(), Ears(), Ears()
    for tail in (slow, quick, exempt):
        await follower.subscribe(tail)
    follower.exempt(exempt, True)
    for number in range(5):
        await writer.append(say("x"))
        await quick.wait_for(number + 1)
        follower.credit(quick)

    assert slow.heard == [3, 4, "lagged"]
    assert quick.heard == exempt.heard == [3, 4, 5, 6, 7]
    await follower.aclose()
    await writers.aclose()


async def test_following_ends_when_the_last_tail_has_lagged() -> None:
    writers, writer, seen = await there()
    follower, tail = Follower(seen, "s", credit=1), Ears()
    await follower.subscribe(tail)
    await writer.append(say("a"))
    await writer.append(say("b"))
    await tail.wait_for(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert tail.heard == [3, "lagged"]
    assert seen.following == 0
    await follower.aclose()
    await writers.aclose()


async def test_no_log_is_left_open() -> None:
    journal = HeldJournal()
    follower = Follower(journal, "s")
    await follower.subscribe(Ears())
    await follower.aclose()

    assert [log.closed for log in journal.logs] == [1]


async def test_a_session_that_is_deleted_is_the_end() -> None:
    writers, _, seen = await there()
    follower, tail = Follower(seen, "s"), Ears()
    await follower.subscribe(tail)
    await writers.delete("s")
    await tail.wait_for(1)

    assert tail.heard == ["deleted"]
    await follower.subscribe(tail)
    writer = await writers.ensure("s", 1)
    await writer.append(say("anew"))
    await tail.wait_for(3)
    assert tail.heard == ["deleted", 1, 2]
    await follower.aclose()
    await writers.aclose()


async def test_what_cannot_be_read_ends_the_tails_and_the_next_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writers, writer, seen = await there()
    follower, tail = Follower(seen, "s"), Ears()
    await follower.subscribe(tail)
    seen.error = JournalError("damaged")
    await writer.append(say("x"))
    await tail.wait_for(1)

    assert tail.heard == ["writer_down"]
    assert "session 's' is not followed any more: damaged" in caplog.text
    with pytest.raises(JournalError, match="damaged"):
        await follower.subscribe(tail)
    seen.error = None
    await follower.subscribe(tail)
    await writer.append(say("y"))
    await tail.wait_for(2)
    assert tail.heard == ["writer_down", 4]
    await follower.aclose()
    await writers.aclose()


@pytest.mark.parametrize("turns", range(3))
async def test_a_cancelled_subscription_is_undone(turns: int) -> None:
    writers, writer, seen = await there()
    follower, tail = Follower(seen, "s"), Ears()
    subscribing = asyncio.create_task(follower.subscribe(tail))
    for _ in range(turns):
        await asyncio.sleep(0)
    subscribing.cancel()
    await asyncio.wait([subscribing])
    if not subscribing.cancelled():
        follower.unsubscribe(tail)
    await writer.append(say("x"))
    for _ in range(5):
        await asyncio.sleep(0)

    assert tail.heard == []
    assert seen.following == 0
    await follower.aclose()
    await writers.aclose()


async def test_one_of_two_that_subscribe_at_once_may_be_cancelled() -> None:
    writers, writer, seen = await there()
    follower, first, second = Follower(seen, "s"), Ears(), Ears()
    tasks = [asyncio.create_task(follower.subscribe(tail)) for tail in (first, second)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    await writer.append(say("x"))
    await second.wait_for(1)

    assert (first.heard, second.heard) == ([], [3])
    await follower.aclose()
    await writers.aclose()


async def test_a_closed_follower_refuses() -> None:
    writers, _, seen = await there()
    follower, tail = Follower(seen, "s"), Ears()
    await follower.subscribe(tail)
    waiting = asyncio.create_task(Follower(seen, "s").subscribe(Ears()))
    waiting.cancel()
    await asyncio.wait([waiting])
    await follower.aclose("deleted")
    await follower.aclose()

    assert tail.heard == ["deleted"]
    with pytest.raises(JournalError, match="not followed"):
        await follower.subscribe(tail)
    await writers.aclose()


async def test_closing_during_a_subscription_refuses_it() -> None:
    writers, _, seen = await there()
    follower = Follower(seen, "s")
    subscribing = asyncio.create_task(follower.subscribe(Ears()))
    await asyncio.sleep(0)
    await follower.aclose()
    with pytest.raises(JournalError, match="not followed"):
        await subscribing

    assert seen.following == 0
    await writers.aclose()
