"""Field fault 49, as clients see it: histories shown or recorded twice, sessions that do not exist.

What a crash, a damaged file and a second process do to the store itself is in `tests/attacks`.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from antiphon import Agent, AgentContext, Turn
from antiphon.journal import MemoryJournal, SqliteJournal
from antiphon.schema import v1
from antiphon.testing import RawPeer, raw_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon.journal import Journal, Record

PLACE: dict[str, Any] = {"cwd": "/srv", "mcpServers": []}
#: More than is sent at once, so that a load can be given up in the middle of it.
MANY = 5_000


class Talker(Agent):
    """Says so many things about what it is asked."""

    async def prompt(self, turn: Turn) -> None:
        word, _, count = turn.text.partition(" ")
        for number in range(int(count)):
            await turn.say(f"{word} {number}")

    async def set_session_mode(
        self, params: v1.SetSessionModeRequest, ctx: AgentContext
    ) -> v1.SetSessionModeResponse:
        return v1.SetSessionModeResponse()


class Opened(NamedTuple):
    """A kind of journal, made in a folder."""

    kind: str
    folder: Path

    @asynccontextmanager
    async def journal(self) -> AsyncGenerator[Journal]:
        kept = MemoryJournal() if self.kind == "memory" else SqliteJournal(self.folder / "journal")
        try:
            yield kept
        finally:
            await kept.aclose()


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    return Opened(request.param, tmp_path)


async def records(journal: Journal, session: str) -> list[Record]:
    log = await journal.open(session)
    try:
        return await log.read(1, await log.high_watermark())
    finally:
        await log.aclose()


async def prompted(raw: RawPeer, session: str, text: str) -> None:
    params = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
    answer = await raw.ask("session/prompt", params)
    assert answer["result"]["stopReason"] == "end_turn"


def shown(raw: RawPeer) -> list[tuple[str, str]]:
    """Tag and text of each update that came."""
    updates = [frame["params"]["update"] for frame in raw.sent("session/update")]
    return [(update["sessionUpdate"], update["content"]["text"]) for update in updates]


def told(word: str, count: int) -> list[tuple[str, str]]:
    """What an editor shows of such a turn when it loads it."""
    said = [("agent_message_chunk", f"{word} {number}") for number in range(count)]
    return [("user_message_chunk", f"{word} {count}"), *said]


@pytest.mark.covers("FF-49")
async def test_a_history_that_is_loaded_twice_is_recorded_once_and_is_not_what_comes_live(
    opened: Opened,
) -> None:
    async with opened.journal() as journal:
        turns = [("a", 2), ("b", 1), ("c", 3)]
        async with raw_client(Talker(), journal=journal) as raw:
            session = (await raw.ask("session/new", PLACE))["result"]["sessionId"]
            for word, count in turns:
                await prompted(raw, session, f"{word} {count}")
            # A prompt's own text is no update to the one who typed it.
            assert shown(raw) == [item for turn in turns for item in told(*turn)[1:]]
        before = await records(journal, session)

        async with raw_client(Talker(), journal=journal) as raw:
            for _ in range(2):
                raw.forget()
                answer = await raw.ask("session/load", {"sessionId": session, **PLACE})
                assert "result" in answer
                assert shown(raw) == [item for turn in turns for item in told(*turn)]
                assert await records(journal, session) == before
            raw.forget()
            await prompted(raw, session, "d 2")
            assert shown(raw) == told("d", 2)[1:]

        after = await records(journal, session)
        assert after[: len(before)] == before
        assert [record.tag for record in after[len(before) :]] == [
            "turn_started",
            "user_message_chunk",
            "agent_message_chunk",
            "agent_message_chunk",
            "turn_completed",
        ]
        assert len({record.payload for record in after if record.kind == "session_update"}) == 8 + 4


@pytest.mark.covers("FF-49")
async def test_a_load_that_is_given_up_in_the_middle_leaves_nothing_and_the_next_is_whole(
    opened: Opened,
) -> None:
    async with opened.journal() as journal:
        async with raw_client(Talker(), journal=journal) as raw:
            session = (await raw.ask("session/new", PLACE))["result"]["sessionId"]
            await prompted(raw, session, f"a {MANY}")
        before = await records(journal, session)

        async with raw_client(Talker(), journal=journal) as raw:
            raw.send(raw.request("first", "session/load", {"sessionId": session, **PLACE}))
            await raw.wait("session/update", 10)
            raw.send(raw.notification("$/cancel_request", {"requestId": "first"}))
            await raw.round_trip()
            partly = len(shown(raw))
            raw.forget()
            answer = await raw.ask("session/load", {"sessionId": session, **PLACE})
            assert "result" in answer
            assert shown(raw) == told("a", MANY)
            raw.forget()
            await prompted(raw, session, "b 1")
            assert shown(raw) == told("b", 1)[1:]

        assert partly <= MANY + 1
        assert (await records(journal, session))[: len(before)] == before


@pytest.mark.covers("FF-49")
@pytest.mark.parametrize("session", ["nope", "../../x", "", "/etc/passwd", "a\x00b", "x" * 5000])
async def test_a_session_that_does_not_exist_is_an_error_and_none_is_made(
    opened: Opened, session: str
) -> None:
    async with opened.journal() as journal:
        async with raw_client(Talker(), journal=journal) as raw:
            known = (await raw.ask("session/new", PLACE))["result"]["sessionId"]
            await prompted(raw, known, "a 1")
            files, there = everything(opened.folder), await journal.sessions()
            named = {"sessionId": session}
            for method, params in (
                ("session/load", {**named, **PLACE}),
                ("session/resume", {**named, **PLACE}),
                ("_raxol/session.load", {**named, **PLACE}),
                ("session/prompt", {**named, "prompt": [{"type": "text", "text": "a 1"}]}),
                ("session/set_mode", {**named, "modeId": "m"}),
            ):
                answer = await raw.ask(method, params)
                assert answer["error"]["code"] == -32002, (method, answer)

            assert await journal.sessions() == there
            assert everything(opened.folder) == files
            await prompted(raw, known, "b 1")

        assert [info.session_id for info in await journal.sessions()] == [known]


def everything(folder: Path) -> set[str]:
    """All names below a folder and beside it."""
    return {
        os.path.join(where, name)  # noqa: PTH118  (a name, not a path)
        for where, folders, files in os.walk(folder.parent)
        for name in (*folders, *files)
        # The log of a database comes and goes.
        if not name.endswith(("-wal", "-shm"))
    }
