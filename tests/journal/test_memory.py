"""A journal in memory survives connections, writers and loops, and keeps the laws (`test_journal_laws`)."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from antiphon.journal import Entry, JournalError, JournalInUse, MemoryJournal, Writer, Writers
from tests.journal.ears import Ears, kinds, say, stored


async def claimed(journal: MemoryJournal, session_id: str = "s") -> None:
    log = await journal.open(session_id)
    await log.claim()
    await log.append([say("x")])


def test_it_survives_the_loop_and_a_claim_ends_with_its_loop() -> None:
    journal = MemoryJournal()

    async def again() -> int:
        log = await journal.open("s")
        await log.claim()
        return (await log.append([say("y")]))[0].offset

    asyncio.run(claimed(journal))
    assert asyncio.run(again()) == 2


async def test_a_claim_lasts_as_long_as_the_loop_runs() -> None:
    journal = MemoryJournal()
    await claimed(journal)
    other = await journal.open("s")

    with pytest.raises(JournalInUse, match="written by another log of this process"):
        await other.claim()
    with pytest.raises(JournalInUse):
        await other.append([say("x")])


async def test_it_survives_writers() -> None:
    journal = MemoryJournal()
    for number in range(3):
        writers = Writers(journal)
        writer = await writers.ensure("s", 1)
        await writer.append(say(str(number)))
        await writers.aclose()

    assert kinds(await stored(journal)) == ["session_created", *["session_update"] * 3]


async def test_a_log_of_a_deleted_session_has_lost_its_claim() -> None:
    journal = MemoryJournal()
    log = await journal.open("s")
    await log.claim()
    await log.append([say("x")])
    await journal.delete("s")
    with pytest.raises(JournalInUse, match="nobody"):
        await log.append([say("y")])
    await log.release()
    await log.claim()

    assert (await log.append([say("z")]))[0].offset == 1


async def test_a_claim_alone_is_no_session() -> None:
    journal = MemoryJournal()
    log = await journal.open("s")
    await log.claim()

    assert await journal.sessions() == []
    assert await journal.info("s") is None
    assert not await journal.delete("s")


async def test_nothing_is_kept_of_sessions_that_were_only_looked_at() -> None:
    journal = MemoryJournal()
    for number in range(100):
        log = await journal.open(str(number))
        await log.claim()
        await log.high_watermark()
        await log.aclose()
        runs = journal.follow(str(number))
        waiting = asyncio.ensure_future(anext(runs))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    assert journal._shelf.all == {}


async def test_followers_are_woken_by_appends_and_by_the_end() -> None:
    journal = MemoryJournal()
    log = await journal.open("s")
    await log.claim()
    runs = [journal.follow("s", start) for start in (1, 2)]
    waiting = [asyncio.ensure_future(anext(run)) for run in runs]
    await asyncio.sleep(0)
    await log.append([say("a")])
    assert [record.offset for record in await waiting[0]] == [1]
    await asyncio.sleep(0)
    assert not waiting[1].done()
    await log.append([say("b")])
    assert [record.offset for record in await waiting[1]] == [2]

    more = asyncio.ensure_future(anext(runs[1]))
    await asyncio.sleep(0)
    await journal.aclose()
    with pytest.raises(JournalError, match="closed"):
        await more


async def test_a_session_that_begins_anew_is_not_followed_on() -> None:
    journal = MemoryJournal()
    await claimed(journal)
    runs = journal.follow("s")
    await anext(runs)
    await journal.delete("s")
    log = await journal.open("s")
    await log.claim()
    await log.append([say("another session"), say("by the same name")])

    with pytest.raises(StopAsyncIteration):
        await anext(runs)


async def test_a_title_is_looked_for_once_in_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = MemoryJournal()
    log = await journal.open("s")
    await log.claim()
    title = b'{"sessionUpdate":"session_info_update","title":"told"}'
    await log.append([Entry("session_update", title, "system"), *[say("x")] * 50])
    looked: list[int] = []
    kept = journal._shelf.all["s"]
    look = type(kept).look

    def counting(self: object) -> None:
        looked.append(len(kept.records) - kept.looked_at)
        look(kept)

    monkeypatch.setattr(type(kept), "look", counting)
    for _ in range(3):
        assert [info.title for info in await journal.sessions()] == ["told"]
    await log.append([say("y")])
    await journal.info("s")

    assert looked == [51, 0, 0, 1]


async def test_it_goes_with_its_object() -> None:
    journal = MemoryJournal()
    writer = Writer(await journal.open("s"))
    await writer.subscribe(Ears())
    await writer.append(say("x"))
    await writer.aclose()
    record = weakref.ref(journal._shelf)
    del journal, writer
    gc.collect()

    assert record() is None
