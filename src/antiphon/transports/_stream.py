"""What transports over descriptors share: one reader, one framer, one writer, one receiver.

Responsible for the laws of `Transport` over bytes: frames in order, `connection_lost` once, last,
and never before what was read has been delivered. Leaves to `_stdio` and `_spawned` where the
descriptors come from and what the end of one of them means.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from antiphon._descriptors import HIGH_WATER, open_reader, open_writer
from antiphon._errors import LocalProtocolError
from antiphon.core import Limits, LineFramer, escape_separators, join_frames

if TYPE_CHECKING:
    from antiphon._descriptors import Reader, Writer
    from antiphon.transports._transport import Receiver

__all__ = ["StreamTransport"]

#: When the peer is found gone while there is still something to read, as much is read at most: a
#: pipe's content, and some more where a child of the peer goes on writing.
LAST_BYTES = 4 << 20


class StreamTransport:
    """Base of the transports that move frames as lines of bytes.

    Reading: a chunk of up to 64 KiB is split and all its frames are delivered in one call, also if
    `pause_reading` is called inside that call; after that nothing is read until `resume_reading`,
    so the peer feels it. Writing: what the peer does not take at once waits in memory, and
    `pause_writing` (perhaps inside `send`) says when that is more than 64 KiB.
    """

    def __init__(self, limits: Limits | None) -> None:
        self._framer = LineFramer((limits or Limits()).frame_bytes)
        self._receiver: Receiver | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._paused = False
        self._lost = False
        self._finishing = False
        self._closing = False
        self._closed = asyncio.Event()

    # ------------------------------------------------------------------ for subclasses

    def _claim(self, receiver: Receiver) -> None:
        if self._receiver is not None or self._closing:
            msg = f"the transport ({self.describe()}) was started or closed before"
            raise LocalProtocolError(msg)
        self._receiver = receiver

    def _open(self, reading: int, writing: int, *, own: bool) -> None:
        """Begin to move frames over two descriptors, which are closed in any case."""
        loop = asyncio.get_running_loop()
        try:
            self._writer = open_writer(
                loop,
                writing,
                paused=self._output_full,
                resumed=self._output_free,
                failed=self._output_failed,
                own=own,
            )
        except BaseException:
            os.close(writing)
            os.close(reading)
            raise
        try:
            self._reader = open_reader(
                loop,
                reading,
                self._received,
                self._input_ended,
                own=own,
                into=self,
            )
        except BaseException:
            os.close(reading)
            self._close_writer()
            raise
        if not self._paused:
            self._reader.resume()

    def _input_over(self, error: OSError | None) -> None:
        """All input was delivered; decide what that means."""
        raise NotImplementedError

    def _output_failed(self, error: OSError) -> None:
        """Nothing can be written any more; decide what that means."""
        raise NotImplementedError

    def _last_word(self) -> Exception | None:
        """Say why the connection is lost; asked when there is nothing more to deliver."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Deliver what can be read at once, then lose the connection."""
        self._hurry()
        if self._reader is not None:
            self._reader.drain(LAST_BYTES)
        self._end_frames()
        self._lose(self._last_word())

    def _hurry(self) -> None:
        """The peer is known to be gone: read what it has left although the receiver has paused.

        That is bounded, and what waits for an answer must not have to wait for a consumer.
        """
        self._finishing = True
        if self._reader is not None:
            self._reader.resume()

    def _lose(self, error: Exception | None) -> None:
        """Tell the receiver, once, and read no more."""
        if self._lost or self._receiver is None:
            return
        self._lost = True
        if not self._closing:
            self._close_reader()
            self._close_writer()
        self._receiver.connection_lost(error)

    async def _flush(self, seconds: float) -> bool:
        """Wait until what was sent is written, but not longer; tell whether it was."""
        if self._writer is not None and self._writer.buffered:
            try:
                async with asyncio.timeout(seconds):
                    await self._writer.drained()
            except TimeoutError:
                return False
        return True

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ------------------------------------------------------------------ Transport

    def send(self, frames: list[bytes]) -> None:
        """Take frames and write at once what the peer takes; joined once, never copied again."""
        writer = self._writer
        if writer is None or not frames or self._closing:
            return
        if len(frames) == 1 and len(frames[0]) > HIGH_WATER:
            # Its line end is not worth a copy of it: the two leave together, or what is left of them.
            writer.write(escape_separators(frames[0]))
            writer.write(b"\n")
        else:
            writer.write(join_frames(frames))

    @property
    def unsent(self) -> int:
        """Bytes that wait in memory for the descriptor to take them."""
        return 0 if self._writer is None else self._writer.buffered

    def pause_reading(self) -> None:
        """Read and deliver nothing more; the end of the peer's output is not seen either."""
        self._paused = True
        if self._reader is not None and not self._closing and not self._finishing:
            self._reader.pause()

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""
        self._paused = False
        if self._reader is not None:
            self._reader.resume()

    def describe(self) -> str:
        """Name it in logs and errors."""
        raise NotImplementedError

    # ------------------------------------------------------------------ from the descriptors

    def _received(self, data: bytes) -> None:
        # Input is read while closing, so that the peer is not stuck with it, but it is too late.
        if not self._lost and self._receiver is not None:
            frames = self._framer.feed(data)
            if frames:
                self._receiver.frames_received(frames)

    def room(self) -> memoryview | None:
        """Where to read the middle of a long line; for the reader."""
        return None if self._lost or self._receiver is None else self._framer.room()

    def filled(self, count: int) -> None:
        """The same as `_received` of what was read there; for the reader."""
        frames = self._framer.filled(count)
        if frames and self._receiver is not None:
            self._receiver.frames_received(frames)

    def _input_ended(self, error: OSError | None) -> None:
        self._reader = None
        if not self._lost:
            self._end_frames()
            self._input_over(error)

    def _end_frames(self) -> None:
        """Deliver a last line that has no end, whole or not."""
        if not self._lost and self._receiver is not None:
            frames = self._framer.end()
            if frames:
                self._receiver.frames_received(frames)

    def _output_full(self) -> None:
        if not self._lost and self._receiver is not None:
            self._receiver.pause_writing()

    def _output_free(self) -> None:
        if not self._lost and self._receiver is not None:
            self._receiver.resume_writing()
