"""One end of a memory pair that says exactly what a test tells it, frame by frame.

Stands in for a peer that may be wrong in any way. Unlike a real peer it answers nothing by itself.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from antiphon import AgentPeer, Client, connect, serve
from antiphon.transports import MemoryTransport, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon import Agent
    from antiphon.core import Fault

__all__ = ["RawSide", "raw_agent", "raw_client"]


class RawSide:
    """Receives frames into a list and sends any bytes as frames."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.frames: list[dict[str, Any]] = []
        self.lost = asyncio.Event()
        self._changed = asyncio.Event()

    # -- Receiver

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        for frame in frames:
            assert isinstance(frame, bytes)
            self.frames.append(json.loads(frame))
        self._changed.set()

    def input_ended(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self.lost.set()
        self._changed.set()

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    # -- the test's side

    def send(self, *messages: Any) -> None:
        """Send messages in one go: dicts become JSON, bytes go as they are."""
        self.transport.send(
            [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        )

    def answer(self, request: dict[str, Any], result: Any) -> None:
        """Answer a request that was received."""
        self.send({"jsonrpc": "2.0", "id": request["id"], "result": result})

    def update(self, session_id: str, text: str) -> dict[str, Any]:
        """A chunk of an agent's message."""
        content = {"type": "text", "text": text}
        body = {"sessionUpdate": "agent_message_chunk", "content": content}
        return self.notification("session/update", {"sessionId": session_id, "update": body})

    @staticmethod
    def notification(method: str, params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": method, "params": params}

    @staticmethod
    def request(id_: Any, method: str, params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}

    async def wait(self, method: str | None, count: int = 1) -> dict[str, Any]:
        """The `count`-th frame with this method (None: the count-th response), within 10 s."""
        async with asyncio.timeout(10):
            while True:
                found = [f for f in self.frames if f.get("method") == method]
                if len(found) >= count:
                    return found[count - 1]
                self._changed.clear()
                await self._changed.wait()

    async def answer_to(self, id_: Any) -> dict[str, Any]:
        """The response with this id, within 10 s."""
        async with asyncio.timeout(10):
            while True:
                for frame in self.frames:
                    if "method" not in frame and frame.get("id") == id_:
                        return frame
                self._changed.clear()
                await self._changed.wait()


async def shake_hands(raw: RawSide, capabilities: dict[str, Any]) -> None:
    request = await raw.wait("initialize")
    raw.answer(request, {"protocolVersion": 1, "agentCapabilities": capabilities})


@asynccontextmanager
async def raw_agent(
    client: Client | None = None, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[tuple[AgentPeer, RawSide]]:
    """A client of ours, shaken hands with a raw agent."""
    ours, theirs = memory_pair()
    raw = RawSide(theirs)
    await theirs.start(raw)
    shaking = asyncio.create_task(shake_hands(raw, capabilities or {}))
    async with connect(ours, client=client, **options) as peer:
        await shaking
        yield peer, raw
    await theirs.aclose()


@asynccontextmanager
async def raw_client(
    agent: Agent, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[RawSide]:
    """An agent of ours, shaken hands with a raw client."""
    ours, theirs = memory_pair()
    raw = RawSide(theirs)
    serving = asyncio.create_task(serve(agent, ours, **options))
    await theirs.start(raw)
    raw.send(
        raw.request(
            "hello", "initialize", {"protocolVersion": 1, "clientCapabilities": capabilities or {}}
        )
    )
    await raw.answer_to("hello")
    try:
        yield raw
    finally:
        await theirs.aclose()
        await asyncio.wait_for(serving, 10)
