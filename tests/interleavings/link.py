"""A transport whose every step a test decides: which bytes arrive when, cut where, and when it dies.

What our side writes is cut into frames and handed on at once; what it shall read lies in `incoming`
until the test delivers some of it. Nothing moves by itself, so one seed is one interleaving.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from antiphon.core import LineFramer, join_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core import Fault
    from antiphon.transports import Receiver

__all__ = ["Link"]


class Link:
    """One end of a simulated byte stream; satisfies `antiphon.transports.Transport`.

    Args:
        written: called with each frame that our side writes, decoded, in order.
        arriving: called with each frame just before our side is given it.
        failed: called with what these two raise; our side must not be the one to catch it.
    """

    def __init__(
        self,
        written: Callable[[dict[str, Any]], None],
        arriving: Callable[[dict[str, Any]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.incoming = bytearray()
        self.lost = False
        self.paused = False
        #: The peer sends nothing more.
        self.ended = False
        #: Frames that crossed, in either direction: for a world that waits for rest.
        self.crossed = 0
        #: Called before anything is delivered, so that what was written before is seen before.
        self.before: Callable[[], None] = lambda: None
        self._written = written
        self._arriving = arriving
        self._failed = failed
        self._framer = LineFramer(1 << 24)
        self._receiver: Receiver | None = None

    # -------------------------------------------------------------- Transport

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, frames: list[bytes]) -> None:
        if self.lost:
            return
        for frame in b"\n".join(frames).split(b"\n"):
            self.crossed += 1
            try:
                self._written(json.loads(frame))
            except Exception as error:
                self._failed(error)

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    @property
    def unsent(self) -> int:
        return 0  # what is written is taken at once

    async def aclose(self) -> None:
        self.die(None)

    def describe(self) -> str:
        return "a link under test"

    # -------------------------------------------------------------- the test's side

    def put(self, *messages: dict[str, Any] | bytes) -> None:
        """Lay messages behind what is on its way already; bytes are a line as it is."""
        self.incoming += join_frames(
            [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        )

    def deliver(self, size: int) -> None:
        """Give our side the next `size` bytes, in one read."""
        if self.lost or self.ended or self.paused or self._receiver is None or not self.incoming:
            return
        self.before()
        chunk = bytes(self.incoming[:size])
        del self.incoming[:size]
        self._give(self._framer.feed(chunk))

    def end_input(self) -> None:
        """The peer closes its output; it still reads."""
        if not self.lost and not self.ended and self._receiver is not None:
            self.before()
            self.ended = True
            self._receiver.input_ended()

    def die(self, error: Exception | None) -> None:
        """The link is gone, wherever in a frame it is."""
        if not self.lost:
            self.lost = True
            if self._receiver is not None:
                self._receiver.connection_lost(error)

    def _give(self, frames: list[bytes | Fault]) -> None:
        if not frames or self._receiver is None:
            return
        for frame in frames:
            self.crossed += 1
            if isinstance(frame, bytes):
                try:
                    message = json.loads(frame)
                except ValueError:
                    continue
                if isinstance(message, dict):
                    try:
                        self._arriving(message)  # pyright: ignore[reportUnknownArgumentType]
                    except Exception as error:
                        self._failed(error)
        self._receiver.frames_received(frames)
