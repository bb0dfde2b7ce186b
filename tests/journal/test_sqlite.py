"""A journal on disk: what it keeps, who may write it, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from antiphon.journal import Entry, JournalError, JournalInUse, SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hi"}}'


def chunk(text: str = "hi") -> Entry:
    return Entry("session_update", CHUNK.replace(b"hi", text.encode()), "agent")


def created(payload: bytes = b'{"cwd":"/srv"}') -> Entry:
    return Entry("session_created", payload, "system")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


async def filled(directory: Path, session_id: str, *entries: Entry) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open(session_id)
    await log.claim()
    await log.append(entries, flush=True)
    await journal.aclose()


async def test_what_was_appended_is_there_for_the_next_process(directory: Path) -> None:
    await filled(directory, "s-1", created(), chunk("one"), chunk("two"))

    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    records = await log.read(1, 100)
    await journal.aclose()

    assert [record.offset for record in records] == [1, 2, 3]
    assert [record.kind for record in records] == ["session_created"] + ["session_update"] * 2
    assert records[2].payload == chunk("two").payload


async def test_a_second_log_cannot_claim_what_the_first_has(directory: Path) -> None:
    journal = SqliteJournal(directory)
    first, second = await journal.open("s-1"), await journal.open("s-1")
    await first.claim()
    await first.claim()

    with pytest.raises(JournalInUse):
        await second.claim()
    with pytest.raises(JournalInUse):
        await second.append([chunk()])
    await first.release()
    await second.claim()
    await second.append([chunk()])

    assert await first.high_watermark() == 1
    await journal.aclose()


async def test_a_deleted_session_is_gone_and_its_writer_is_told(directory: Path) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    await log.append([created(), chunk()])

    assert await journal.delete("s-1")
    assert not await journal.delete("s-1")
    with pytest.raises(JournalInUse, match="deleted"):
        await log.append([chunk()])
    assert await log.high_watermark() == 0
    assert await journal.sessions() == []
    await journal.aclose()


async def test_after_closing_everything_is_refused(directory: Path) -> None:
    journal = SqliteJournal(directory)
    log = await journal.open("s-1")
    await log.claim()
    await journal.aclose()
    await journal.aclose()

    with pytest.raises(JournalError, match="closed"):
        await log.append([chunk()])
    with pytest.raises(JournalError, match="closed"):
        await log.read(1, 2)
    with pytest.raises(JournalError, match="closed"):
        await journal.open("s-1")
