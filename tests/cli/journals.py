"""Journals in a directory for tests: sessions of hand-made records, written as an agent writes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.journal import Entry, SqliteJournal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from antiphon.journal import Record


def write(directory: Path, sessions: Mapping[str, Sequence[Record]], *, shards: int = 2) -> None:
    """Append the records of each session; their times are now."""
    asyncio.run(append(directory, sessions, shards=shards))


async def append(
    directory: Path, sessions: Mapping[str, Sequence[Record]], *, shards: int = 2
) -> None:
    """The same on a running loop."""
    journal = SqliteJournal(directory, shards=shards, durability="process")
    try:
        for session_id, records in sessions.items():
            log = await journal.open(session_id)
            await log.claim()
            await log.append([Entry(one.kind, one.payload, one.taint) for one in records])
            await log.aclose()
    finally:
        await journal.aclose()
