"""The counting agent of `antiphon demo --resume`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import pytest

from antiphon import Durability, RequestError, connect
from antiphon.cli._demo_durable import CountingAgent, secret_policy
from antiphon.journal import AttachContext, AttachRefused, MemoryJournal
from antiphon.testing import joined
from tests.cli.command import BOUND

if TYPE_CHECKING:
    from pathlib import Path


def agent(journal: MemoryJournal, may: int | None = None) -> CountingAgent:
    return CountingAgent(Durability(journal), to=6, pace=0.0, may=may)


async def test_it_counts_to_its_number_one_piece_each() -> None:
    async with joined(agent(MemoryJournal())) as peer:
        session = await peer.new_session(cwd="/")
        outcome = await session.prompt("Count.")

        assert outcome.text == "1 2 3 4 5 6 "
        assert len(outcome.updates) == 6
        assert outcome.stop_reason == "end_turn"


async def test_it_counts_as_far_as_it_may_and_on_from_its_journal() -> None:
    journal = MemoryJournal()
    counting = agent(journal, may=2)
    async with joined(counting) as peer:
        session = await peer.new_session(cwd="/")
        async with session.prompt("Count.") as turn:
            said: list[str] = []
            async for update in turn:
                said.append(update.text)
                if update.text == "2 ":
                    counting.allow(3)
                if update.text == "3 ":
                    await turn.cancel()
        assert (said, turn.stop_reason) == (["1 ", "2 ", "3 "], "cancelled")
    # Another process would have the same: nothing is remembered but what the journal has.
    async with joined(agent(journal)) as peer:
        again = await peer.load_session(session.session_id, cwd="/")
        assert (await again.prompt("Go on.")).text == "4 5 6 "
        assert (await again.prompt("Go on.")).text == ""


def context(capability: object) -> AttachContext:
    return AttachContext("s", None, "unknown", capability, 0, {"kind": "tcp", "peer": None})


async def test_the_secret_admits_and_nothing_else_does() -> None:
    decide = secret_policy("sesame")

    grant = decide(context("sesame"))
    assert grant.session_id == "s"  # type: ignore[union-attr]
    for wrong in ("", "sesam", "sesame ", None, True, ["sesame"], "ünsinn"):
        with pytest.raises(AttachRefused):
            decide(context(wrong))


class Listening:
    """The agent as a process."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "antiphon.cli._demo_durable"),
                *("--journal", str(tmp_path / "journal"), "--to", "5"),
                *("--pace", "0", *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    async def address(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"sesame\n9\n")
        self.process.stdin.flush()
        async with asyncio.timeout(BOUND):
            line = await asyncio.to_thread(self.process.stdout.readline)
        return line.decode().strip()

    async def end(self) -> int:
        """Close its input; the exit code."""
        async with asyncio.timeout(BOUND):
            await asyncio.to_thread(self.process.communicate)
        return self.process.returncode


async def test_it_listens_for_as_long_as_its_input_is_open(tmp_path: Path) -> None:
    with Listening(tmp_path, "--listen", str(tmp_path / "s")) as listening:
        address = await listening.address()
        assert address == f"unix:{tmp_path / 's'}"
        async with connect(address) as peer:
            session = await peer.new_session(cwd="/")
            await session.reattach()
            assert (await session.prompt("Count.")).text == "1 2 3 4 5 "

        assert await listening.end() == 0
    assert not (tmp_path / "s").exists()


async def test_over_tcp_nobody_attaches_without_the_secret(tmp_path: Path) -> None:
    with Listening(tmp_path) as listening:
        async with connect(await listening.address()) as peer:
            session = await peer.new_session(cwd="/")
            for wrong in (None, "guessed"):
                with pytest.raises(RequestError, match="attach denied"):
                    await session.reattach(capability=wrong)
            assert await session.reattach(capability="sesame") == 1
        assert await listening.end() == 0
