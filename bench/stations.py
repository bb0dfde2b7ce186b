"""`make bench-stations`: where the time of a frame goes, station by station, through the public doors.

Each station is measured by what it adds to those before it, in one process and without the other side:
the counterpart is a transport that hands over ready frames and throws away what it is given. Processor time,
the least of several runs. What is missing to the figures of `make bench` is the event loop's waiting for
descriptors and the kernel's work for a pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import platform
import re
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from antiphon import Agent, Client, Turn, connect, serve
from antiphon.core import Limits, LineFramer, Protocol
from antiphon.schema import encode, v1

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from antiphon import Session
    from antiphon.core import Fault
    from antiphon.transports import Receiver

__all__ = ["Station", "main", "measured"]

#: What one read brings.
PIECE: Final = 64 * 1024
TEXT: Final = 'The "quick" fox \u2014 jumps\n\tover it'
DIFF: Final = v1.Diff(path="/src/main.py", old_text="return a - b\n", new_text="return a + b\n")
OPTIONS: Final = [v1.PermissionOption(option_id="allow", name="Allow", kind="allow_once")]


class Station(NamedTuple):
    """A part of a journey, and what it costs for one item, in microseconds of processor time."""

    journey: str
    name: str
    us: float


class Wire:
    """A transport whose other end is a function of what is sent together; satisfies `Transport`."""

    unsent = 0

    def __init__(self, sent: Callable[[list[bytes]], object]) -> None:
        self.sent = sent

    async def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def send(self, frames: list[bytes]) -> None:
        self.sent(frames)

    def pause_reading(self) -> None:
        """What comes is taken at once here."""

    def resume_reading(self) -> None:
        """See above."""

    async def aclose(self) -> None:
        self.receiver.connection_lost(None)

    def describe(self) -> str:
        return "nothing"

    def later(self, *frames: bytes) -> None:
        """Hand them over in the loop's next turn, as a real link does."""
        received: list[bytes | Fault] = [*frames]
        asyncio.get_running_loop().call_soon(self.receiver.frames_received, received)


def frame(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}, ensure_ascii=False).encode()


def chunk(session: str) -> bytes:
    content = {"type": "text", "text": TEXT}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    return frame(method="session/update", params={"sessionId": session, "update": update})


# ------------------------------------------------------------------ one side at a time


@asynccontextmanager
async def a_client(on_prompt: Callable[[Wire, bytes], object]) -> AsyncGenerator[Session]:
    """A session of our client, whose agent is a function of the prompt's id."""

    def sent(frames: list[bytes]) -> None:
        data = frames[-1]
        if data.find(b'"session/prompt"') >= 0:
            on_prompt(wire, id_of(data))
        elif data.find(b'"initialize"') >= 0:
            wire.later(answer(id_of(data), b'{"protocolVersion":1,"agentCapabilities":{}}'))
        elif data.find(b'"session/new"') >= 0:
            wire.later(answer(id_of(data), b'{"sessionId":"s"}'))

    wire = Wire(sent)
    async with connect(wire, client=Client(permissions="allow")) as agent:
        yield await agent.new_session(cwd="/")


@asynccontextmanager
async def an_agent(agent: Agent) -> AsyncGenerator[tuple[Wire, asyncio.Queue[bytes], str]]:
    """Our agent behind the handshake; what it sends first, and a session of it."""
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    wire = Wire(lambda frames: answers.put_nowait(frames[-1]))
    serving = asyncio.ensure_future(serve(agent, wire))
    try:
        while not hasattr(wire, "receiver"):
            await asyncio.sleep(0)
        wire.later(frame(id=0, method="initialize", params={"protocolVersion": 1}))
        await answers.get()
        wire.later(frame(id=1, method="session/new", params={"cwd": "/", "mcpServers": []}))
        session = json.loads(await answers.get())["result"]["sessionId"]
        yield wire, answers, session
    finally:
        wire.receiver.input_ended()
        wire.receiver.connection_lost(None)
        await serving


def prompt(id_: int, session: str) -> bytes:
    blocks = [{"type": "text", "text": ""}]
    return frame(id=id_, method="session/prompt", params={"sessionId": session, "prompt": blocks})


ID: Final = re.compile(rb'"id":("[^"]*"|[0-9]+)')
END: Final = b'{"stopReason":"end_turn"}'
ALLOWED: Final = b'{"outcome":{"outcome":"selected","optionId":"allow"}}'


def id_of(data: bytes) -> bytes:
    found = ID.search(data)
    assert found is not None, data
    return found[1]


def answer(id_: bytes, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (id_, result)


def best(repetitions: int, once: Callable[[], object], items: int) -> float:
    least = float("inf")
    for _ in range(repetitions):
        begin = time.process_time()
        once()
        least = min(least, time.process_time() - begin)
    return least / items * 1e6


async def best_of(repetitions: int, once: Callable[[], Awaitable[object]], items: int) -> float:
    least = float("inf")
    for _ in range(repetitions):
        begin = time.process_time()
        await once()
        least = min(least, time.process_time() - begin)
    return least / items * 1e6


# ------------------------------------------------------------------ the journeys


def through_a_pipe(data: bytes, repetitions: int, items: int) -> tuple[float, float]:
    """Writing and reading so many bytes in pieces, each by itself."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    written: list[float] = []
    read: list[float] = []
    for _ in range(repetitions):
        spent = [0.0, 0.0]
        for piece in pieces:
            begin = time.process_time()
            os.write(writing, piece)
            between = time.process_time()
            os.read(reading, PIECE)
            spent = [spent[0] + between - begin, spent[1] + time.process_time() - between]
        written.append(spent[0])
        read.append(spent[1])
    os.close(reading)
    os.close(writing)
    return min(written) / items * 1e6, min(read) / items * 1e6


async def client_stream(count: int, repetitions: int) -> list[Station]:
    """A chunk to a client that looks at it."""
    one = chunk("s")
    data = (one + b"\n") * count
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]

    def cut() -> None:
        framer = LineFramer(1 << 24)
        for piece in pieces:
            framer.feed(piece)

    def envelopes() -> None:
        receive = Protocol("client", Limits(), lambda _text, _limit: False).receive_frame
        for _ in range(count):
            receive(one)

    batch = PIECE // len(one)

    def tell(wire: Wire, id_: bytes) -> None:
        left = count

        def some() -> None:  # as reads bring them, the consumer in between
            nonlocal left
            number = min(batch, left)
            left -= number
            if number:
                wire.receiver.frames_received([one] * number)
                asyncio.get_running_loop().call_soon(some)
            else:
                wire.receiver.frames_received([answer(id_, END)])

        some()

    async with a_client(tell) as session:

        async def taken() -> None:
            async with session.prompt("") as updates:
                async for _ in updates:
                    pass

        async def looked_at() -> None:
            async with session.prompt("") as updates:
                async for update in updates:
                    assert update.value is not None

        each = [float("inf")] * 2
        for _ in range(repetitions):  # in turn: what disturbs one disturbs the other
            for at, turn in enumerate((taken, looked_at)):
                each[at] = min(each[at], await best_of(1, turn, count))
    cutting, opened = best(repetitions, cut, count), best(repetitions, envelopes, count)
    name = "a chunk to a client"
    _, read = through_a_pipe(data, repetitions, count)
    return [
        Station(name, "read 64 KiB from a pipe", read),
        Station(name, "cut at newlines", cutting),
        Station(name, "decode the envelope, session and kind", opened),
        Station(name, "to the turn's queue, counted, and taken by `async for`", each[0] - opened),
        Station(name, "decode the update where it is looked at", each[1] - each[0]),
    ]


async def agent_stream(count: int, repetitions: int) -> list[Station]:
    """A chunk, and a tool call, from an agent."""
    update = v1.ToolCallProgress(tool_call_id="call_1", status="completed", content=[DIFF])

    class Says(Agent):
        what = "chunk"

        async def prompt(self, turn: Turn) -> None:
            if self.what == "chunk":
                for _ in range(count):
                    await turn.say(TEXT)
            else:
                for _ in range(count):
                    await turn.send(update)

    says, each = Says(), dict[str, float]()
    for says.what in ("chunk", "tool"):
        async with an_agent(says) as (wire, answers, session):
            done = asyncio.Event()

            def sent(frames: list[bytes], done: asyncio.Event = done) -> None:
                if b'"stopReason"' in frames[-1]:
                    done.set()

            wire.sent = sent
            number = 2

            async def turn(wire: Wire = wire, session: str = session, done: Any = done) -> None:
                nonlocal number
                number += 1
                done.clear()
                wire.later(prompt(number, session))
                await done.wait()

            each[says.what] = await best_of(repetitions, turn, count)
            assert answers.empty()

    def escaped() -> None:
        text = msgspec.json.Encoder().encode
        for _ in range(count):
            text(TEXT)

    def encoded() -> None:
        for _ in range(count):
            encode(update)

    plain, tool = best(repetitions, escaped, count), best(repetitions, encoded, count)
    written, _ = through_a_pipe((chunk("s") + b"\n") * count, repetitions, count)
    return [
        Station("a chunk from an agent", "the text as JSON", plain),
        Station(
            "a chunk from an agent",
            "`say`: checks, frame, gathered for one write",
            each["chunk"] - plain,
        ),
        Station("a chunk from an agent", "write 64 KiB to a pipe", written),
        Station("a tool call's end from an agent", "the update as JSON", tool),
        Station(
            *("a tool call's end from an agent", "`send`: checks, frame, gathered for one write"),
            each["tool"] - tool,
        ),
    ]


async def round_trips(count: int, repetitions: int) -> list[Station]:
    """A prompt and a permission, each side by itself, one after another."""

    class Asks(Agent):
        times = 0

        async def prompt(self, turn: Turn) -> None:
            for _ in range(self.times):
                call = v1.ToolCallUpdate(tool_call_id="call_1", title="Edit")
                assert await turn.ask_permission(call, OPTIONS)

    asks = Asks()
    async with an_agent(asks) as (wire, _, session):
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def sent(frames: list[bytes]) -> None:
            if frames[-1].find(b'"stopReason"') >= 0:
                over.set_result(None)
            else:
                wire.later(answer(id_of(frames[-1]), ALLOWED))

        wire.sent = sent
        ready = [prompt(number, session) for number in range(2, count + 2)]  # ids of answered ones

        async def prompts() -> None:
            nonlocal over
            for data in ready[: 1 if asks.times else count]:
                over = loop.create_future()
                wire.later(data)
                await over

        prompted = await best_of(repetitions, prompts, count)
        asks.times = count
        asked = await best_of(repetitions, prompts, count)

    async with a_client(lambda wire, id_: wire.later(answer(id_, END))) as opened:

        async def turns() -> None:
            for _ in range(count):
                async with opened.prompt("") as turn:
                    async for _ in turn:
                        pass

        taken = await best_of(repetitions, turns, count)
    return [
        Station("a round trip, without the link", "a prompt answered by an agent", prompted),
        Station("a round trip, without the link", "a permission asked by an agent", asked),
        Station("a round trip, without the link", "a prompt sent by a client", taken),
    ]


async def measured(count: int, repetitions: int) -> list[Station]:
    return [
        *await client_stream(count, repetitions),
        *await agent_stream(count, repetitions),
        *await round_trips(max(10, count // 20), repetitions),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-stations ARGS=…", description=__doc__)
    parser.add_argument("--count", type=int, default=30_000, help="items of each run")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(arguments)
    found = asyncio.run(measured(given.count, given.repetitions))
    for station in found:
        print(f"{station.journey:32} {station.name:60} {station.us:7.3f}")
    if given.json is not None:
        note = (
            f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}; "
            f"Python {platform.python_version()}, asyncio; {time.strftime('%Y-%m-%d')}"
        )
        told = {"note": note, "stations": [list(station) for station in found]}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
