"""What every store gets for nothing: the newest of each tag, what is known of one session, following."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Entry, Journal, MemoryJournal, Record, SessionInfo, SessionLog
from antiphon.journal._store import title_after
from tests.journal.ears import say

if TYPE_CHECKING:
    from collections.abc import Sequence


class BareLog(SessionLog):
    """Over a log in memory, with everything that is not abstract as it comes."""

    def __init__(self, log: SessionLog) -> None:
        self.log = log
        self.session_id = log.session_id
        self.reads: list[tuple[int, int]] = []
        self.released = 0

    async def claim(self) -> None:
        await self.log.claim()

    async def release(self) -> None:
        self.released += 1
        await self.log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        return await self.log.append(entries, flush=flush)

    async def read(self, start: int, stop: int) -> list[Record]:
        self.reads.append((start, stop))
        return await self.log.read(start, stop)

    async def high_watermark(self) -> int:
        return await self.log.high_watermark()


class BareJournal(Journal):
    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.logs: list[BareLog] = []

    async def open(self, session_id: str) -> SessionLog:
        self.logs.append(BareLog(await self.journal.open(session_id)))
        return self.logs[-1]

    async def sessions(self) -> list[SessionInfo]:
        return await self.journal.sessions()

    async def delete(self, session_id: str) -> bool:
        return await self.journal.delete(session_id)

    async def aclose(self) -> None:
        await self.journal.aclose()


async def filled(journal: BareJournal, *entries: Entry) -> BareLog:
    log = await journal.open("s")
    await log.claim()
    await log.append(entries)
    assert isinstance(log, BareLog)
    return log


async def test_the_newest_of_each_tag_is_looked_for_from_the_tip_and_no_further() -> None:
    plan = Entry("session_update", b'{"sessionUpdate":"plan"}', "agent")
    log = await filled(BareJournal(), *[say("x")] * 300, plan, *[say("y")] * 300)

    found = await log.latest(["plan", "agent_message_chunk"])
    assert {tag: record.offset for tag, record in found.items()} == {
        "plan": 301,
        "agent_message_chunk": 601,
    }
    assert log.reads == [(346, 601), (90, 345)]
    log.reads.clear()
    assert list(await log.latest(["agent_message_chunk"] * 2)) == ["agent_message_chunk"]
    assert log.reads == [(346, 601)]
    log.reads.clear()
    assert await log.latest(["nothing"]) == {}
    assert log.reads == [(346, 601), (90, 345), (1, 89)]
    log.reads.clear()
    assert await log.latest([]) == {}
    assert log.reads == []


async def test_closing_a_log_releases_it_and_hurrying_one_that_does_not_gather_is_nothing() -> None:
    log = await filled(BareJournal(), say("x"))
    log.hurry()
    await log.aclose()

    assert log.released == 1


async def test_one_session_is_found_among_all() -> None:
    journal = BareJournal()
    await filled(journal, say("x"))

    info = await journal.info("s")
    assert info is not None
    assert (info.session_id, info.records) == ("s", 1)
    assert await journal.info("t") is None


@pytest.mark.virtual_time
async def test_following_looks_again_and_again_and_lets_go_of_its_log() -> None:
    journal = BareJournal()
    log = await filled(journal, *[say("x")] * 300)
    runs = journal.follow("s", 2)
    sizes = [len(await anext(runs)) for _ in range(2)]
    waiting = asyncio.ensure_future(anext(runs))
    await asyncio.sleep(1)
    assert not waiting.done()
    await log.append([say("live")])
    [live] = await waiting

    assert sizes == [256, 43]
    assert live.offset == 301
    with contextlib.suppress(AttributeError):
        await runs.aclose()  # type: ignore[attr-defined]
    assert journal.logs[-1].released == 1


@pytest.mark.virtual_time
async def test_following_ends_when_the_session_is_deleted() -> None:
    journal = BareJournal()
    await filled(journal, say("x"), say("y"))
    runs = journal.follow("s")
    await anext(runs)
    waiting = asyncio.ensure_future(anext(runs, None))
    await asyncio.sleep(0)
    await journal.delete("s")

    assert await waiting is None
    assert journal.logs[-1].released == 1


@pytest.mark.virtual_time
async def test_following_waits_for_a_session_and_an_offset_that_are_not_there_yet() -> None:
    journal = BareJournal()
    waiting = asyncio.ensure_future(anext(journal.follow("s", 3)))
    await asyncio.sleep(1)
    await filled(journal, say("1"), say("2"), say("3"))

    assert [record.offset for record in await waiting] == [3]


@pytest.mark.parametrize(
    ("before", "update", "after"),
    [
        (None, b'{"title":"a"}', "a"),
        ("a", b'{"title":"b"}', "b"),
        ("a", b'{"updatedAt":"2026"}', "a"),
        ("a", b'{"title":null}', None),
        ("a", b'{"title":7}', "a"),
        ("a", b"[]", "a"),
        ("a", b"{", "a"),
    ],
)
def test_a_title_is_kept_changed_or_taken_away(
    before: str | None, update: bytes, after: str | None
) -> None:
    assert title_after(before, update) == after
