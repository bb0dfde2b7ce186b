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

__all__ = ["RawSide", "raw_agent", "raw_client", "raw_pair", "unshaken_client"]


class RawSide:
    """Receives frames into a list and sends any bytes as frames."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.frames: list[dict[str, Any]] = []
        self.lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._pings = 0

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

    def refuse(self, request: dict[str, Any], code: int, message: str = "no", **more: Any) -> None:
        """Answer a request that was received with an error."""
        error = {"code": code, "message": message, **more}
        self.send({"jsonrpc": "2.0", "id": request["id"], "error": error})

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

    def sent(self, method: str | None) -> list[dict[str, Any]]:
        """What the other side has sent with this method so far (None: responses)."""
        return [f for f in self.frames if f.get("method") == method]

    async def ask(self, method: str, params: Any, id_: Any = None) -> dict[str, Any]:
        """Send a request and wait for its response."""
        if id_ is None:
            self._pings += 1
            id_ = f"ask-{self._pings}"
        self.send(self.request(id_, method, params))
        return await self.answer_to(id_)

    async def round_trip(self) -> None:
        """Everything sent before has been read by the other side once this returns."""
        answer = await self.ask("_test/nobody_serves_this", None)
        assert answer["error"]["code"] in (-32600, -32601)

    async def answer_to(self, id_: Any) -> dict[str, Any]:
        """The response with this id, within 10 s."""
        async with asyncio.timeout(10):
            while True:
                for frame in self.frames:
                    if "method" not in frame and frame.get("id") == id_:
                        return frame
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def raw_pair() -> AsyncGenerator[tuple[MemoryTransport, RawSide]]:
    """A transport for a side of ours, and the raw side at its other end."""
    ours, theirs = memory_pair()
    raw = RawSide(theirs)
    await theirs.start(raw)
    try:
        yield ours, raw
    finally:
        await theirs.aclose()


async def shake_hands(raw: RawSide, capabilities: dict[str, Any], more: dict[str, Any]) -> None:
    request = await raw.wait("initialize")
    raw.answer(request, {"protocolVersion": 1, "agentCapabilities": capabilities, **more})


@asynccontextmanager
async def raw_agent(
    client: Client | None = None,
    capabilities: dict[str, Any] | None = None,
    *,
    initialized: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[tuple[AgentPeer, RawSide]]:
    """A client of ours, shaken hands with a raw agent; `initialized` is more of its answer."""
    async with raw_pair() as (ours, raw):
        shaking = asyncio.create_task(shake_hands(raw, capabilities or {}, initialized or {}))
        async with connect(ours, client=client, **options) as peer:
            await shaking
            yield peer, raw


@asynccontextmanager
async def raw_client(
    agent: Agent, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[RawSide]:
    """An agent of ours, shaken hands with a raw client."""
    async with unshaken_client(agent, **options) as raw:
        params = {"protocolVersion": 1, "clientCapabilities": capabilities or {}}
        assert "result" in await raw.ask("initialize", params, "hello")
        yield raw


@asynccontextmanager
async def unshaken_client(agent: Agent, **options: Any) -> AsyncGenerator[RawSide]:
    """An agent of ours being served to a raw client that has said nothing yet."""
    async with raw_pair() as (ours, raw):
        serving = asyncio.create_task(serve(agent, ours, **options))
        try:
            yield raw
        finally:
            await raw.transport.aclose()
            await asyncio.wait_for(serving, 10)
