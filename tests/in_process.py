"""An agent in the same process, on whatever loop its client runs: no process to wait for.

Unlike a real agent it shares the client's loop, so a blocking handler blocks both.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon import Agent, serve
from antiphon.transports import MemoryTransport, memory_pair

if TYPE_CHECKING:
    from antiphon.transports import Receiver

__all__ = ["InProcess"]


class InProcess:
    """A transport with an agent behind it; satisfies `antiphon.transports.Transport`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._here: MemoryTransport
        self._serving: asyncio.Task[None] | None = None

    async def start(self, receiver: Receiver) -> None:
        self._here, there = memory_pair()
        self._serving = asyncio.create_task(serve(self._agent, there))
        await self._here.start(receiver)

    def send(self, frames: list[bytes]) -> None:
        self._here.send(frames)

    @property
    def unsent(self) -> int:
        return self._here.unsent

    def pause_reading(self) -> None:
        self._here.pause_reading()

    def resume_reading(self) -> None:
        self._here.resume_reading()

    async def aclose(self) -> None:
        await self._here.aclose()
        if self._serving is not None:
            await self._serving

    def describe(self) -> str:
        return f"in process ({type(self._agent).__name__})"
