"""Two transports joined in memory: for tests, embedding, and proxies inside one process.

Keeps the laws of `Transport` exactly as the byte transports do, flow control included, but copies
and splits nothing, so it never gives a `Fault`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from antiphon._descriptors import HIGH_WATER

if TYPE_CHECKING:
    from antiphon.core import Fault
    from antiphon.transports._transport import Receiver

__all__ = ["MemoryTransport", "memory_pair"]


def memory_pair() -> tuple[MemoryTransport, MemoryTransport]:
    """Make two transports, each the other's peer. Both belong to the loop that starts them."""
    one = MemoryTransport(None)
    return one, MemoryTransport(one)


class MemoryTransport:
    """One end of a memory pair; satisfies `Transport`.

    Frames are handed over in a later turn of the loop, never inside `send`. What arrives before
    `start` or while reading is paused is held. The frames on their way count by their bytes: above
    64 KiB the sender is asked to pause, and to go on when they have been delivered.
    """

    def __init__(self, peer: MemoryTransport | None) -> None:
        """Not for callers: use `memory_pair`."""
        self._peer = peer
        if peer is not None:
            peer._peer = self
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver: Receiver | None = None
        self._inbox: list[bytes | Fault] = []
        self._inbox_bytes = 0
        self._sender_paused = False
        self._paused = False
        self._scheduled = False
        self._ended = False  # the peer sends nothing more
        self._lost = False

    async def start(self, receiver: Receiver) -> None:
        """Begin to deliver, with what has arrived already."""
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._schedule()

    def send(self, frames: list[bytes]) -> None:
        """Hand frames to the peer; a no-op once either side has closed."""
        peer = self._peer
        if self._lost or peer is None or peer._lost or not frames:
            return
        peer._inbox += frames
        peer._inbox_bytes += sum(map(len, frames))
        full = peer._inbox_bytes > HIGH_WATER
        if full and not peer._sender_paused and self._receiver is not None:
            peer._sender_paused = True
            self._receiver.pause_writing()
        peer._schedule()

    @property
    def unsent(self) -> int:
        """Bytes of the frames on their way to the peer."""
        peer = self._peer
        return 0 if peer is None else peer._inbox_bytes

    def pause_reading(self) -> None:
        """Hold what arrives from now on."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver what was held, in a later turn of the loop."""
        self._paused = False
        self._schedule()

    async def aclose(self) -> None:
        """Close both directions; the peer still gets what was sent, then its end."""
        self._inbox.clear()
        self._lose()
        peer = self._peer
        if peer is not None and not peer._ended:
            peer._ended = True
            peer._schedule()

    def describe(self) -> str:
        """Name it in logs and errors."""
        return "memory"

    @property
    def info(self) -> dict[str, Any]:
        """What this end knows of the other: it is in the same process."""
        return {"kind": "process", "peer": None}

    @property
    def _held(self) -> bool:
        # What a peer that is gone has left is delivered all the same: what waits for an answer must not
        # have to wait for a consumer.
        return self._paused and not self._ended

    def _schedule(self) -> None:
        if self._loop is None or self._scheduled or self._held or self._lost:
            return
        if self._inbox or self._ended:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self._held or self._lost or self._receiver is None:
            return
        if self._inbox:
            frames, self._inbox = self._inbox, []
            self._inbox_bytes = 0
            self._receiver.frames_received(frames)
            if self._sender_paused:
                self._sender_paused = False
                self._resume_peer()
        # Frames may have come, and reading may have been paused, inside the call above.
        if self._ended and not self._inbox:
            self._lose()
        else:
            self._schedule()

    def _resume_peer(self) -> None:
        peer = self._peer
        if peer is not None and peer._receiver is not None and not peer._lost:
            peer._receiver.resume_writing()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            if self._receiver is not None:
                self._receiver.connection_lost(None)
