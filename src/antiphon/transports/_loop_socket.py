"""A socket whose bytes the event loop moves by itself: for Windows, where a loop can watch none.

Responsible for giving a loop's own transport the shape of a reader and a writer, as `_descriptors` has
them. Leaves everything else to who uses them: `_socket`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple, cast

from antiphon._descriptors import HIGH_WATER, LOW_WATER

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["LoopReader", "LoopWriter", "open_by_loop"]


class _Calls(NamedTuple):
    receive: Callable[[bytes], None]
    ended: Callable[[OSError | None], None]
    paused: Callable[[], None]
    resumed: Callable[[], None]
    failed: Callable[[OSError], None]


class _Link(asyncio.Protocol):
    """What the loop calls, and what both ends of the socket have in common."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls
        self.reading = self.writing = True
        self.waiters: list[asyncio.Future[None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()
        self.transport.set_write_buffer_limits(HIGH_WATER, LOW_WATER)

    def data_received(self, data: bytes) -> None:
        if self.reading:
            self.calls.receive(data)

    def eof_received(self) -> bool:
        self._end_reading(None)
        return True  # what is written may still be read

    def connection_lost(self, exc: Exception | None) -> None:
        error = exc if isinstance(exc, OSError) else None
        self._end_reading(error)
        if self.writing:
            self.writing = False
            self.calls.failed(error or ConnectionResetError("the connection was lost"))
        self._wake()

    def pause_writing(self) -> None:
        if self.writing:
            self.calls.paused()

    def resume_writing(self) -> None:
        self._wake()
        if self.writing:
            self.calls.resumed()

    def close_one(self) -> None:
        """One of the two directions was closed."""
        if not (self.reading or self.writing):
            self.transport.abort()
            self._wake()

    def _end_reading(self, error: OSError | None) -> None:
        if self.reading:
            self.reading = False
            self.calls.ended(error)

    def _wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class LoopReader:
    """Satisfies `_descriptors.Reader`, but what is unread when writing fails is lost."""

    pollable = False

    def __init__(self, link: _Link) -> None:
        self._link = link

    def resume(self) -> None:
        """Hand over what comes. Idempotent."""
        if self._link.reading:
            self._link.transport.resume_reading()

    def pause(self) -> None:
        """Hand over nothing for now. Idempotent."""
        if self._link.reading:
            self._link.transport.pause_reading()

    def drain(self, most: int) -> None:
        """Do nothing: the loop hands over what it has read at once."""

    def close(self) -> None:
        """Hand over nothing more. Idempotent."""
        if self._link.reading:
            self._link.transport.pause_reading()
            self._link.reading = False
        self._link.close_one()


class LoopWriter:
    """Satisfies `_descriptors.Writer`."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    @property
    def buffered(self) -> int:
        """Bytes taken but not yet given to the operating system."""
        return self._link.transport.get_write_buffer_size() if self._link.writing else 0

    def write(self, data: bytes) -> None:
        """Take `data`; nothing is raised."""
        if self._link.writing:
            self._link.transport.write(data)

    async def drained(self) -> None:
        """Wait until nothing is buffered, or writing failed, or the writer was closed.

        For the end only: from here on, senders are told that there is room when nothing waits at all.
        """
        if self.buffered:
            waiter = asyncio.get_running_loop().create_future()
            self._link.waiters.append(waiter)
            self._link.transport.set_write_buffer_limits(0)
            await waiter

    def end(self) -> None:
        """Let the peer see the end of what we write, behind what is buffered."""
        if self._link.writing:
            with contextlib.suppress(OSError):  # the peer is gone, which is told soon
                self._link.transport.write_eof()

    def close(self) -> None:
        """Drop what is buffered and close, with the reader if that is still to come. Idempotent."""
        self._link.writing = False
        self._link.close_one()


async def open_by_loop(
    sock: socket.socket,
    *,
    receive: Callable[[bytes], None],
    ended: Callable[[OSError | None], None],
    paused: Callable[[], None],
    resumed: Callable[[], None],
    failed: Callable[[OSError], None],
) -> tuple[LoopReader, LoopWriter]:
    """Make a reader, paused, and a writer of a connected socket, which is owned from here on."""
    link = _Link(_Calls(receive, ended, paused, resumed, failed))
    try:
        await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
    except BaseException:
        sock.close()
        raise
    return LoopReader(link), LoopWriter(link)
