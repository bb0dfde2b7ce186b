"""An agent and a client of ours joined by a memory pair, with everything that crosses it recorded.

Unlike a real link it has no bytes cut anywhere, and both sides run on one loop.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from antiphon import testing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon import Agent, AgentPeer, Client, Limits

__all__ = ["Wire", "joined"]


class Wire:
    """The frames that crossed, as the client saw them, decoded."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    def __call__(self, direction: str, frame: bytes) -> None:
        self.frames.append((direction, json.loads(frame)))
        self._changed.set()

    def sent(self, method: str) -> list[dict[str, Any]]:
        """Parameters of what the client sent with this method."""
        return [
            f.get("params", {}) for d, f in self.frames if d == "out" and f.get("method") == method
        ]

    def received(self, method: str) -> list[dict[str, Any]]:
        """Parameters of what the agent sent with this method."""
        return [
            f.get("params", {}) for d, f in self.frames if d == "in" and f.get("method") == method
        ]

    def answers(self) -> list[dict[str, Any]]:
        """The agent's responses."""
        return [f for d, f in self.frames if d == "in" and "method" not in f]

    async def wait_for(self, method: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until so many frames with this method crossed, in either direction."""
        while True:
            found = [f.get("params", {}) for _, f in self.frames if f.get("method") == method]
            if len(found) >= count:
                return found
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def joined(
    agent: Agent,
    client: Client | None = None,
    *,
    unstable: bool = False,
    limits: Limits | None = None,
    agent_limits: Limits | None = None,
) -> AsyncGenerator[tuple[AgentPeer, Wire]]:
    """Serve `agent` to `client`; both are closed and awaited at the end."""
    wire = Wire()
    options = {"unstable": unstable, "limits": agent_limits or limits}
    async with testing.joined(
        agent, client, unstable=unstable, limits=limits, record=wire, agent_options=options
    ) as peer:
        yield peer, wire
