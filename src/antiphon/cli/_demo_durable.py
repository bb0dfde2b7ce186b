"""The agent of `antiphon demo --resume`: it counts, durably, for whoever connects.

It is what the library's durable side is like to write: what it says is journaled by itself, and after a
restart it reads in its journal how far it came. It listens for as long as its standard input is open,
so it cannot outlive the demo, and says where on its first line of output. `_demo_resume` starts it and
tells it how far it may count, so that every accident finds it in the middle; what that proves, is told
there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

from antiphon import Durability, DurableAgent, Turn, serve_tcp, serve_unix
from antiphon._version import __version__
from antiphon.journal import AttachContext, AttachRefused, Grant, LocalNode, SqliteJournal
from antiphon.schema import v1

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from antiphon import AgentServer
    from antiphon.journal import Policy

__all__ = ["CountingAgent", "main", "secret_policy"]


class CountingAgent(DurableAgent):
    """Counts aloud to a number, from where the journal says that it came.

    Args:
        durability: where its sessions are kept, and who may attach.
        to: the last number.
        pace: seconds between two numbers.
        may: it waits behind this number until `allow` says a higher one; None: it never waits.
    """

    info = ("antiphon-counter", __version__)

    def __init__(
        self, durability: Durability, *, to: int, pace: float, may: int | None = None
    ) -> None:
        super().__init__(durability)
        self._to = to
        self._pace = pace
        self._may = to if may is None else may
        self._news = asyncio.Event()

    def allow(self, number: int) -> None:
        """Let it count on to a number."""
        self._may = number
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def prompt(self, turn: Turn) -> str | None:
        said = [number async for update in turn.session.history() for number in _numbers(update)]
        for number in range(said[-1] + 1 if said else 1, self._to + 1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace):
                    await turn.wait_cancelled()
            while number > self._may and not turn.cancelled:
                await _first(turn.wait_cancelled(), self._news.wait())
            if turn.cancelled:
                return "cancelled"
            await turn.say(f"{number} ")
        return None


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return with the first of several waits."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _numbers(update: object) -> list[int]:
    """The numbers in a piece of the agent's text."""
    if isinstance(update, v1.AgentMessageChunk) and isinstance(update.content, v1.TextContent):
        return [int(word) for word in re.findall(r"\d+", update.content.text)]
    return []


def secret_policy(secret: str) -> Policy:
    """Admit who knows a secret: a TCP port of this machine is open to everybody on it."""

    def decide(context: AttachContext) -> Grant:
        given = context.capability
        if not isinstance(given, str) or not hmac.compare_digest(given.encode(), secret.encode()):
            raise AttachRefused("not the demo")
        return Grant(actor={"id": "demo"}, session_id=context.session_id, via="secret")

    return decide


async def _serve(options: argparse.Namespace, secret: str) -> None:
    journal = SqliteJournal(options.journal)
    try:
        # A Unix socket tells who connects; a TCP port does not.
        policy = LocalNode() if options.listen else secret_policy(secret)
        durability = Durability(journal, policy=policy)
        agent = CountingAgent(durability, to=options.to, pace=options.pace, may=0)
        path: str = options.listen
        server: AgentServer = serve_unix(agent, path) if path else serve_tcp(agent)
        async with server:
            print(server.address, flush=True)
            async for line in _lines_of_input():
                agent.allow(int(line))
    finally:
        await journal.aclose()


async def _lines_of_input() -> AsyncIterator[bytes]:
    """The lines of our standard input, for as long as somebody holds its other end."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        # In a thread, which waits in the same way for pipes of every system.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            while line := sys.stdin.buffer.readline():
                loop.call_soon_threadsafe(lines.put_nowait, line)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lines.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        yield line


def main(argv: Sequence[str] | None = None) -> int:
    """Listen until standard input ends; 0.

    Its first line is a secret, for TCP; each further one the number that may be counted to.
    """
    parser = argparse.ArgumentParser(prog="python -m antiphon.cli._demo_durable")
    parser.add_argument("--journal", required=True, help="the directory of its journal")
    parser.add_argument("--listen", default="", help="path of a Unix socket (default: a TCP port)")
    parser.add_argument("--to", type=int, required=True, help="the last number")
    parser.add_argument("--pace", type=float, required=True, help="seconds between two numbers")
    options = parser.parse_args(argv)
    secret = sys.stdin.buffer.readline().decode().strip()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, secret))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
