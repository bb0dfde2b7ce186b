"""A side of ours on one kind of wire or another, with a raw peer at the other end.

`memory` hands frames over; `process` is a client's real child process, and `pipe` an agent on two
real pipes, both framed as on stdio. Raw frames leave as they are: nothing is escaped or checked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from antiphon import Limits, serve, spawn, testing
from antiphon.testing import RawPeer
from antiphon.transports._stream import StreamTransport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from antiphon import Agent, AgentPeer, Client, Session
    from antiphon.transports import Receiver

__all__ = [
    "AGENT_WIRES",
    "CLIENT_WIRES",
    "END",
    "RawPeer",
    "begun",
    "opened",
    "opened_in",
    "raw_agent",
    "raw_client",
    "reply",
    "unshaken_agent",
    "unshaken_client",
]

#: On which a client of ours meets a raw agent.
CLIENT_WIRES = ("memory", "process")
#: On which an agent of ours meets a raw client.
AGENT_WIRES = ("memory", "pipe")
#: How a turn ends that nobody stops.
END = {"stopReason": "end_turn"}
RELAY = str(Path(__file__).with_name("relay.py"))


class RawLines(asyncio.Protocol):
    """The raw side's end of a socket: cuts lines at LF alone, writes any bytes."""

    def __init__(self) -> None:
        self.linked = asyncio.get_running_loop().create_future()
        self.received = bytearray()  # everything, as it came
        self._begun = 0  # where the unfinished line begins
        self._receiver: Receiver | None = None
        self._waiting: list[bytes] = []
        self._link: asyncio.Transport

    # -- what a raw side wants of its transport

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, frames: list[bytes]) -> None:
        self.send_bytes(b"".join(frame + b"\n" for frame in frames))

    def send_bytes(self, data: bytes) -> None:
        self._link.write(data)

    def end_output(self) -> None:
        """The peer sees the end of what we say, and may still speak."""
        self._link.write_eof()

    def pause_reading(self) -> None:
        self._link.pause_reading()

    def resume_reading(self) -> None:
        self._link.resume_reading()

    async def aclose(self) -> None:
        if self.linked.done():
            self._link.close()

    @property
    def unsent(self) -> int:
        return self._link.get_write_buffer_size()

    def describe(self) -> str:
        return "raw lines"

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast("asyncio.Transport", transport)
        self.linked.set_result(None)

    def data_received(self, data: bytes) -> None:
        start = len(self.received)
        self.received += data
        lines: list[bytes] = []
        while (end := self.received.find(b"\n", start)) >= 0:
            lines.append(bytes(self.received[self._begun : end]))
            self._begun = start = end + 1
        if lines and self._receiver is not None:
            self._receiver.frames_received(cast("Any", lines))

    def eof_received(self) -> bool:
        return False  # close our end too

    def connection_lost(self, exc: Exception | None) -> None:
        if self._receiver is not None:
            self._receiver.connection_lost(exc)


class PipeTransport(StreamTransport):
    """An agent's end of two pipes: the end of its input ends the connection after the last answers."""

    def __init__(self, reading: int, writing: int, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._descriptors = reading, writing

    async def start(self, receiver: Receiver) -> None:
        self._claim(receiver)
        self._open(*self._descriptors, own=True)

    def describe(self) -> str:
        return "two pipes"

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._close_reader()
        self._lose(None)
        await self._flush(2.0)
        self._close_writer()

    def _input_over(self, error: OSError | None) -> None:
        assert self._receiver is not None
        self._receiver.input_ended()

    def _output_failed(self, error: OSError) -> None:
        self._close_writer()
        self._finish()

    def _last_word(self) -> Exception | None:
        return None


class RawPipes:
    """The raw client's ends of an agent's two pipes; as `RawLines`."""

    def __init__(self, writing: int, reading: int) -> None:
        self.lines = RawLines()
        self._writing, self._reading = writing, reading
        self._out: asyncio.WriteTransport
        self._in: asyncio.ReadTransport

    @property
    def received(self) -> bytearray:
        return self.lines.received

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._out, _ = await loop.connect_write_pipe(
            asyncio.Protocol, os.fdopen(self._writing, "wb", 0)
        )
        self._in, _ = await loop.connect_read_pipe(
            lambda: self.lines, os.fdopen(self._reading, "rb", 0)
        )

    async def start(self, receiver: Receiver) -> None:
        await self.lines.start(receiver)

    def send(self, frames: list[bytes]) -> None:
        self.send_bytes(b"".join(frame + b"\n" for frame in frames))

    def send_bytes(self, data: bytes) -> None:
        self._out.write(data)

    def end_output(self) -> None:
        self._out.close()

    def pause_reading(self) -> None:
        self._in.pause_reading()

    def resume_reading(self) -> None:
        self._in.resume_reading()

    async def aclose(self) -> None:
        self._out.close()

    @property
    def unsent(self) -> int:
        return self._out.get_write_buffer_size()

    def describe(self) -> str:
        return "two raw pipes"


# ------------------------------------------------------------------ a client of ours


@asynccontextmanager
async def unshaken_agent(
    wire: str, *words: str, **options: Any
) -> AsyncGenerator[tuple[RawPeer, asyncio.Task[AgentPeer]]]:
    """A raw agent, and a client of ours that is shaking hands with it; `words` are the relay's."""
    if wire == "memory":
        async with testing.unshaken_agent(**options) as (opening, raw):
            yield raw, opening
        return
    lines = RawLines()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: lines, "127.0.0.1", 0)
    raw = RawPeer(lines)
    await raw.start()
    try:
        port = server.sockets[0].getsockname()[1]
        command = [sys.executable, "-S", "-E", RELAY, str(port), *words]
        opening = asyncio.ensure_future(_awaited(spawn(command, **options)))
        async with _ended(opening):
            await lines.linked
            yield raw, opening
    finally:
        server.close()
        await lines.aclose()


async def _awaited(connecting: Any) -> AgentPeer:
    peer: AgentPeer = await connecting
    return peer


@asynccontextmanager
async def _ended(opening: asyncio.Task[AgentPeer]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        if not opening.done():
            opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()


@asynccontextmanager
async def raw_agent(
    wire: str,
    client: Client | None = None,
    capabilities: dict[str, Any] | None = None,
    *words: str,
    initialized: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[tuple[AgentPeer, RawPeer]]:
    """A client of ours, shaken hands with a raw agent; `initialized` is more of its answer."""
    async with unshaken_agent(wire, *words, client=client, **options) as (raw, opening):
        request = await raw.wait("initialize")
        answer = {"protocolVersion": 1, "agentCapabilities": capabilities or {}}
        raw.answer(request, answer | (initialized or {}))
        yield await opening, raw


async def opened(
    peer: AgentPeer, raw: RawPeer, session_id: str = "s1", cwd: str | Path = "/", **result: Any
) -> Session:
    """A session that the raw agent answers for."""
    opening = asyncio.ensure_future(peer.new_session(cwd=cwd))
    count = len(raw.sent("session/new")) + 1
    raw.answer(await raw.wait("session/new", count), {"sessionId": session_id, **result})
    return await opening


# ------------------------------------------------------------------ an agent of ours


@asynccontextmanager
async def unshaken_client(wire: str, agent: Agent, **options: Any) -> AsyncGenerator[RawPeer]:
    """An agent of ours being served to a raw client that has said nothing yet."""
    if wire == "memory":
        async with testing.unshaken_client(agent, **options) as raw:
            yield raw
        return
    reading, to_it = os.pipe()
    from_it, writing = os.pipe()
    pipes = RawPipes(to_it, from_it)
    await pipes.open()
    raw = RawPeer(pipes)
    await raw.start()
    ours = PipeTransport(reading, writing, options.get("limits"))
    serving = asyncio.ensure_future(serve(agent, ours, **options))
    try:
        yield raw
    finally:
        await pipes.aclose()
        await asyncio.wait_for(serving, 10)
        await asyncio.wait_for(raw.lost.wait(), 10)


@asynccontextmanager
async def raw_client(
    wire: str, agent: Agent, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[RawPeer]:
    """An agent of ours, shaken hands with a raw client."""
    async with unshaken_client(wire, agent, **options) as raw:
        params = {"protocolVersion": 1, "clientCapabilities": capabilities or {}}
        assert "result" in await raw.ask("initialize", params, "hello")
        yield raw


async def opened_in(raw: RawPeer, cwd: str = "/") -> str:
    """The id of a session that the raw client has opened."""
    answer = await raw.ask("session/new", {"cwd": cwd, "mcpServers": []})
    session_id: str = answer["result"]["sessionId"]
    return session_id


# ------------------------------------------------------------------ frames


def reply(request: dict[str, Any], result: Any) -> dict[str, Any]:
    """A response frame, to be sent together with others."""
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


def begun(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Begin what can be awaited, a prompt or a call, beside the test."""

    async def run() -> Any:
        return await work

    return asyncio.ensure_future(run())
