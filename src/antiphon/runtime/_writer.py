"""What leaves: frames of one turn of the loop in one write, and an end to what nobody reads.

Frames queued within one turn of the event loop leave in one `send` of the transport, and a lone
request or answer leaves at once (it is on somebody's critical path). Leaves to the transport how bytes
are written and kept, and to `Connection` what becomes of a peer that does not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from antiphon._errors import ConnectionClosed
    from antiphon.transports import Transport

__all__ = ["Writer"]

#: Queued bytes that leave without waiting for the end of the loop's turn: about one pipe.
_FLUSH_BYTES = 1 << 16
#: What may leave so within one turn of the loop. A peer that reads as fast as a handler tells never asks
#: for patience, and the handler would have the loop to itself: not even a cancellation would be read.
_TURN_BYTES = 1 << 18


class Writer:
    """The one writer of a connection.

    Args:
        loop: the connection's.
        transport: what it writes to; started by somebody else.
        record: called with ("out", frame) for every frame, in order; must not raise.
        unsent_bytes: how much may wait in the transport before the peer counts as busy.
        pace: called with whether senders that can wait should, since what they sent was enough for one turn
            of the loop; with False in its next turn.
        full: called with the bytes that wait when they are more than that, once until there is room;
            not from inside `send`.
        stuck: called once, with the bytes that wait, when they are more than twice that; likewise.
    """

    __slots__ = (
        "_full",
        "_full_told",
        "_limit",
        "_loop",
        "_out",
        "_out_bytes",
        "_pace",
        "_record",
        "_room",
        "_scheduled",
        "_stuck",
        "_stuck_told",
        "_transport",
        "_turn_bytes",
        "armed",
        "paused",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: Transport,
        record: Callable[[str, bytes], None] | None,
        unsent_bytes: int,
        *,
        pace: Callable[[bool], None],
        full: Callable[[int], None],
        stuck: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._record = record
        self._limit = unsent_bytes
        self._pace = pace
        #: What left within this turn before its end.
        self._turn_bytes = 0
        self._full = full
        self._full_told = False
        self._stuck = stuck
        self._stuck_told = False
        self._out: list[bytes] = []
        self._out_bytes = 0
        #: Whether a flush is sure to come at the end of what runs now; who sees to that sets it, and no
        #: frame leaves alone meanwhile.
        self.armed = False
        #: Whether one comes with the loop's next turn: what must leave `now` takes the rest along.
        self._scheduled = False
        #: Whether the transport asked for patience; set by the connection, unset by `resume`.
        self.paused = False
        self._room: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ frames out

    def send(self, frame: bytes, *, now: bool = False) -> None:
        """Queue a frame; with `now` what is queued leaves without waiting for the loop's next turn."""
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > _FLUSH_BYTES:
            self._write_early()
        elif now and not self.armed:
            self._write()
        elif not (self.armed or self._scheduled):
            self._scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._scheduled = False
        if self._out:
            self._write()

    def flush(self) -> None:
        """Hand what is queued to the transport."""
        self.armed = False
        if self._out:
            self._write()

    def _write_early(self) -> None:
        if not self._turn_bytes:
            self._loop.call_soon(self._turn_over)
        before = self._turn_bytes
        self._turn_bytes += self._out_bytes
        self._write()
        if before <= _TURN_BYTES < self._turn_bytes:
            self._pace(True)

    def _turn_over(self) -> None:
        paced, self._turn_bytes = self._turn_bytes > _TURN_BYTES, 0
        if paced:
            self._pace(False)

    def _write(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if self._record is not None:
            for frame in out:
                self._record("out", frame)
        self._transport.send(out)
        if self.paused:
            self._look()

    # ------------------------------------------------------------------ what the peer does not take

    @property
    def full(self) -> bool:
        """Whether more waits than `unsent_bytes`."""
        return self.paused and self._transport.unsent > self._limit

    def _look(self) -> None:
        unsent = self._transport.unsent
        if unsent <= self._limit:
            return
        if not self._full_told:
            self._full_told = True
            self._loop.call_soon(self._full, unsent)
        if unsent > 2 * self._limit and not self._stuck_told:
            self._stuck_told = True
            # Not from here: whoever sends is in the middle of something.
            self._loop.call_soon(self._stuck, unsent)

    def resume(self) -> None:
        """The transport has room again."""
        self.paused = self._full_told = False
        self.wake()

    def wake(self) -> None:
        """Let everybody go on who waits for room."""
        room, self._room = self._room, []
        for future in room:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait for `wake`, or raise what `fail` was given."""
        # One future each: a shared one would be cancelled for all by the first who gives up.
        future = self._loop.create_future()
        self._room.append(future)
        await future

    def fail(self, error: Callable[[], ConnectionClosed]) -> None:
        """Fail everybody who waits for room, each with an exception of their own."""
        room, self._room = self._room, []
        for future in room:
            if not future.done():
                future.set_exception(error())
                future.exception()  # a waiter that was cancelled meanwhile is no news
