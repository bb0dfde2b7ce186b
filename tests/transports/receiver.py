"""A receiver that records, and lets a test wait for what it has got.

Unlike the runtime it accepts everything at any time, so the laws are checked here: every call after
`connection_lost` is an error of the transport.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core import Fault


class Recorder:
    """Keeps frames, the end, and what was said of room for writing."""

    def __init__(self, on_frames: Callable[[list[bytes | Fault]], object] | None = None) -> None:
        self.batches: list[list[bytes | Fault]] = []
        self.frames: list[bytes | Fault] = []
        self.room: list[str] = []
        self.ended = False
        self.lost = asyncio.Event()
        self.losses = 0
        self.error: Any = None
        self.on_frames = on_frames
        self._changed = asyncio.Event()

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        assert not self.losses, "frames after the end"
        assert not self.ended, "frames after the end of input"
        assert frames, "a call without frames"
        self.batches.append(frames)
        self.frames += frames
        self._changed.set()
        if self.on_frames is not None:
            self.on_frames(frames)

    def input_ended(self) -> None:
        assert not self.losses, "input ended after the end"
        assert not self.ended, "input ended twice"
        self.ended = True
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.losses += 1
        assert self.losses == 1, "a second end"
        self.error = error
        self.lost.set()
        self._changed.set()

    def pause_writing(self) -> None:
        assert not self.losses, "a pause after the end"
        self.room.append("pause")
        self._changed.set()

    def resume_writing(self) -> None:
        assert not self.losses, "room after the end"
        self.room.append("resume")
        self._changed.set()

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        """Wait until `condition` holds; asked again after each call. The test's bound bounds it."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    async def have(self, count: int) -> list[bytes | Fault]:
        """Wait for `count` frames in all."""
        await self.until(lambda recorder: len(recorder.frames) >= count)
        return self.frames
