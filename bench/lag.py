"""`python -m bench.lag`: how late a 10 ms ticker is while the library is kept busy.

A large frame that comes in small pieces, at the client and at the agent; a million updates, told by an
agent, taken by a client, and left lying by a client for a while; a history of a million records that is
replayed. The peer is a process of its own wherever a real one would be, so that only our own loop is held
up by what we do. Each case has a bound; where the ticker was later, the exit status is 1.

Bounds are generous: a machine with other work makes any process wait. What is not bounded by turns is the
decoding of one frame, which cannot be divided; its cost is measured here, on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.journal import Link, attach, fill

from antiphon import Agent, Client, Limits, Turn, connect, serve, serve_unix, spawn
from antiphon.journal import Rider, SqliteJournal
from antiphon.schema import decode, v1
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.schema import Frame

__all__ = ["CASES", "Lag", "Options", "main", "ticking"]

MIB: Final = 1 << 20
PERIOD: Final = 0.01
#: What a turn of the loop may take where its work can be divided, in seconds.
TURN: Final = 0.1
#: How often the decoding of one frame may be in one turn: the frame is decoded in two passes, and a
#: ticker can be late for what came before it as well.
PASSES: Final = 6

# A peer that is no program of ours: it writes what it is told to, and takes whatever comes.
PEER: Final = r"""
import json, os, socket, sys, threading
side, where, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if side == "client":
    link = socket.socket(socket.AF_UNIX)
    link.connect(where)
    reading, writing = link.makefile("rb"), link.fileno()
else:
    reading, writing = sys.stdin.buffer, 1

def send(data):
    view = memoryview(data)
    while view:
        view = view[os.write(writing, view):]

def pieces(data, size):
    for at in range(0, len(data), size):
        send(data[at:at + size])

def line(**message):
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"

def update(text):
    content = {"type": "text", "text": text}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    return line(method="session/update", params={"sessionId": "s", "update": update})

def asked():
    for frame in reading:
        message = json.loads(frame) if len(frame) < 65536 else None
        if message and "method" in message:
            yield message

def agent():
    for message in asked():
        method = message["method"]
        if method == "initialize":
            send(line(id=message["id"], result={"protocolVersion": 1}))
        elif method == "session/new":
            send(line(id=message["id"], result={"sessionId": "s"}))
        elif method == "session/prompt":
            if plan.get("large"):
                pieces(update("x" * plan["large"]), 4096)
            block = update("The quick fox jumps over a dog. ") * 320
            for _ in range(plan.get("updates", 0) // 320):
                send(block)
            send(line(id=message["id"], result={"stopReason": "end_turn"}))

def answer():
    while True:
        message = json.loads(reading.readline())
        if "result" in message:
            return message["result"]

def client():
    send(line(id=1, method="initialize", params={"protocolVersion": 1}))
    answer()
    send(line(id=2, method="session/new", params={"cwd": "/", "mcpServers": []}))
    session = answer()["sessionId"]
    block = {"type": "text", "text": "x" * plan.get("large", 1)}
    params = {"sessionId": session, "prompt": [block]}
    pieces(line(id=3, method="session/prompt", params=params), 4096)
    while b'"stopReason"' not in reading.readline():
        pass

{"agent": agent, "client": client}[side]()
"""


@dataclass(frozen=True)
class Options:
    """How much of everything.

    Attributes:
        frame: bytes of the large frame, nearly the limit.
        updates: how many stream.
        records: how many the history has.
        idle: seconds for which the client that does not consume does not.
    """

    frame: int = 16 * MIB - 4096
    updates: int = 1_000_000
    records: int = 1_000_000
    idle: float = 1.0

    def scaled(self, factor: float) -> Options:
        """The same, with so much less; never so little that nothing is measured."""
        return Options(
            max(MIB, int(self.frame * factor)),
            max(3200, int(self.updates * factor)),
            max(1000, int(self.records * factor)),
            max(0.1, self.idle * factor),
        )


@dataclass(frozen=True)
class Lag:
    """How late the ticker was, in milliseconds, and how late it may be at worst."""

    case: str
    seconds: float
    ticks: int
    median: float
    p99: float
    worst: float
    bound: float


class Ticker:
    """Wants to wake every 10 ms, and notes how late it was."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD
            await asyncio.sleep(PERIOD)
            self.late.append(loop.time() - due)


@asynccontextmanager
async def ticking() -> AsyncGenerator[Ticker]:
    """Tick beside the block; the last tick is behind it."""
    gc.collect()
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    await asyncio.sleep(0)
    try:
        yield ticker
    finally:
        await asyncio.sleep(2 * PERIOD)
        task.cancel()


def _peer(side: str, where: str, **plan: int) -> list[str]:
    return [sys.executable, "-c", PEER, side, where, json.dumps(plan)]


def _cost_of_a_frame(size: int) -> float:
    """Seconds that one pass over the text of such a frame takes."""
    raw: Frame = b'{"type":"text","text":"%s"}' % (b"x" * size)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        decode(v1.ContentBlock, raw)
        best = min(best, time.perf_counter() - begin)
    return best


# ------------------------------------------------------------------ cases


class Counting(Agent):
    """Says as much as it is told to."""

    def __init__(self, updates: int = 0) -> None:
        self.updates = updates
        self.taken = 0

    async def prompt(self, turn: Turn) -> None:
        self.taken = len(turn.text)
        for _ in range(self.updates):
            await turn.say("The quick fox jumps over a dog. ")


async def _from_an_agent(ticks: list[Ticker], idle: float, **plan: int) -> int:
    """A client of ours and an agent that is none: how many updates came."""
    count = 0
    async with spawn(_peer("agent", "", **plan)) as agent:
        session = await agent.new_session(cwd="/")
        async with ticking() as ticker:
            ticks.append(ticker)
            async with session.prompt("go") as turn:
                if idle:
                    await asyncio.sleep(idle)
                async for update in turn:
                    assert update.value is not None
                    count += 1
    return count


async def _from_a_client(ticks: list[Ticker], agent: Counting, **plan: int) -> None:
    """An agent of ours and a client that is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "agent")
        async with serve_unix(agent, path), ticking() as ticker:
            ticks.append(ticker)
            process = await asyncio.create_subprocess_exec(*_peer("client", path, **plan))
            assert await process.wait() == 0


async def frame_to_client(options: Options) -> tuple[Ticker, float]:
    """One large frame in pieces of 4 KiB, to a client."""
    ticks: list[Ticker] = []
    assert await _from_an_agent(ticks, 0, large=options.frame - 1024) == 1
    return ticks[0], TURN + PASSES * _cost_of_a_frame(options.frame)


async def frame_to_agent(options: Options) -> tuple[Ticker, float]:
    """One large frame in pieces of 4 KiB, to an agent."""
    ticks: list[Ticker] = []
    agent = Counting()
    await _from_a_client(ticks, agent, large=options.frame - 1024)
    assert agent.taken == options.frame - 1024
    return ticks[0], TURN + PASSES * _cost_of_a_frame(options.frame)


async def stream_to_client(options: Options) -> tuple[Ticker, float]:
    """Updates as fast as they come, each taken by the turn's iterator."""
    ticks: list[Ticker] = []
    updates = options.updates // 320 * 320
    assert await _from_an_agent(ticks, 0, updates=updates) == updates
    return ticks[0], TURN


async def stream_left_lying(options: Options) -> tuple[Ticker, float]:
    """The same, to a client that takes none at first: its budget is spent, then reading stops."""
    ticks: list[Ticker] = []
    updates = options.updates // 320 * 320
    assert await _from_an_agent(ticks, options.idle, updates=updates) == updates
    return ticks[0], TURN


async def stream_from_agent(options: Options) -> tuple[Ticker, float]:
    """Updates as fast as an agent can tell them, in one handler that waits for nothing else."""
    ticks: list[Ticker] = []
    await _from_a_client(ticks, Counting(options.updates))
    return ticks[0], TURN


async def replay_to_subscriber(options: Options) -> tuple[Ticker, float]:
    """A history, read from SQLite, as frames, to a link that takes whatever it is given."""
    with tempfile.TemporaryDirectory() as folder:
        journal = SqliteJournal(folder)
        try:
            await fill(journal, "s", options.records)
            async with ticking() as ticker:
                _, link = await attach(journal, None, "s", Rider(from_offset=1))
            assert isinstance(link, Link)
            assert link.frames >= options.records
        finally:
            await journal.aclose()
    return ticker, TURN


async def replay_to_client(options: Options) -> tuple[Ticker, float]:
    """The same to a client, both sides in this loop, each record taken by its iterator."""
    with tempfile.TemporaryDirectory() as folder:
        journal = SqliteJournal(folder)
        try:
            await fill(journal, "s", options.records)
            here, there = memory_pair()
            serving = asyncio.create_task(serve(Counting(), there, journal=journal))
            async with connect(here, client=Client(), limits=Limits()) as agent:
                count = 0
                async with ticking() as ticker:
                    opening = agent.attach_session("s", cwd="/", from_offset=1)
                    async with opening as session:
                        async for _ in session.replay():
                            count += 1
                assert count >= options.records - 3  # what is no update is no part of it
            await serving
        finally:
            await journal.aclose()
    return ticker, TURN


CASES: Final = {
    "frame, to a client": frame_to_client,
    "frame, to an agent": frame_to_agent,
    "stream, to a client": stream_to_client,
    "stream, left lying": stream_left_lying,
    "stream, from an agent": stream_from_agent,
    "replay, to a subscriber": replay_to_subscriber,
    "replay, to a client": replay_to_client,
}


async def measured(case: str, options: Options) -> Lag:
    """Run one case."""
    begin = time.perf_counter()
    ticker, bound = await CASES[case](options)
    seconds = time.perf_counter() - begin
    late = sorted(ticker.late)
    return Lag(
        case,
        round(seconds, 2),
        len(late),
        *(
            round(value * 1e3, 2)
            for value in (
                statistics.median(late),
                late[len(late) * 99 // 100],
                late[-1],
                bound,
            )
        ),
    )


def _table(found: Sequence[Lag]) -> str:
    lines = [
        "| case | s | ticks | median ms | p99 ms | worst ms | bound ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {lag.case} | {lag.seconds:.1f} | {lag.ticks} | {lag.median:.1f} | {lag.p99:.1f} "
        f"| {lag.worst:.1f} | {lag.bound:.0f} |"
        for lag in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lag", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes and numbers")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the cases' names")
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    options = parser.parse_args(arguments)
    sizes = Options().scaled(options.scale)
    names = [
        name for name in CASES if not options.only or any(part in name for part in options.only)
    ]
    found = [asyncio.run(measured(name, sizes)) for name in names]
    print(_table(found))
    if options.json:
        report: dict[str, Any] = {
            "python": sys.version.split()[0],
            "options": asdict(sizes),
            "cases": [asdict(lag) for lag in found],
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    late = [lag.case for lag in found if lag.worst > lag.bound]
    for case in late:
        print(f"too late: {case}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
