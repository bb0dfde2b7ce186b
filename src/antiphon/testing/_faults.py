"""Two transports over a simulated byte stream, and what may happen to the bytes on their way.

Responsible for cutting, delaying, repeating, losing and ending the bytes of each direction, the same
way in every run, and for the laws of `Transport` over them: framed exactly as stdio, with the flow
control of the memory pair. Leaves what a frame means to whoever receives it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from antiphon import ConnectionClosed, Limits
from antiphon.core import LineFramer, join_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.transports import Receiver

__all__ = ["ByteTransport", "Faults", "byte_pair"]

#: More than so many bytes on their way ask the sender to pause, as with every transport of ours.
_FULL = 65536
#: So few let it go on.
_FREE = 16384
_WHOLE = 1 << 62  # a chunk that is never full

#: How a stream ends: the peer closed, closed its output only, or died.
_End = Literal["closed", "ended", "died"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to the bytes of one direction. By default nothing: they arrive as they were sent.

    Bytes sent in one turn of the loop travel together, unless they are cut: then each chunk arrives in
    a turn of its own. Chunks are numbered from 0; positions in the stream count its bytes from 0, as
    they were sent. Chunks never overtake each other.

    Args:
        chunks: where the stream is cut: sizes in bytes, one for all, or several which are used over and
            over, or drawn at random. A chunk that is not full when the sender pauses travels as it is,
            and the next one completes it: the cuts stay where they are.
        delay: how long a chunk travels, in seconds of the loop, or a function of its number.
        duplicate: numbers of chunks that arrive twice.
        drop: numbers of chunks that never arrive.
        end_at: position at which this direction ends, while the other one lives; what is sent after is
            lost.
        die_at: position at which the link is lost for both ends; the receiving one gets what came
            before. Inside a frame, that is a part of it.

    Raises:
        ValueError: sizes, positions or delays that cannot be.
    """

    chunks: int | Sequence[int] | Random | None = None
    delay: float | Callable[[int], float] = 0.0
    duplicate: Container[int] = ()
    drop: Container[int] = ()
    end_at: int | None = None
    die_at: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.chunks, int):
            sizes: Sequence[int] = (self.chunks,)
        else:
            sizes = () if isinstance(self.chunks, Random) else self.chunks or ()
            if not sizes and self.chunks is not None and not isinstance(self.chunks, Random):
                raise ValueError("chunks needs at least one size")
        if any(size <= 0 for size in sizes):
            raise ValueError(f"sizes of chunks are positive, not {self.chunks!r}")
        if not callable(self.delay) and self.delay < 0:
            raise ValueError(f"a delay is not negative, as {self.delay!r} is")
        for position in (self.end_at, self.die_at):
            if position is not None and position < 0:
                raise ValueError(f"positions begin at 0, not at {position!r}")

    @classmethod
    def from_seed(cls, seed: int, *, damage: bool = False) -> Faults:
        """Make cuts and delays by chance, always the same for a seed.

        Args:
            seed: any number.
            damage: also lose or repeat chunks, or end the stream, so that it is no longer what was sent.
        """
        random = Random(seed)  # noqa: S311  (chance for tests, not for secrets)
        sizes = tuple(random.randint(1, 1 << random.randrange(12)) for _ in range(40))
        delays = tuple(random.choice((0.0, 0.0, random.random())) for _ in range(40))
        faults = cls(chunks=sizes, delay=_Delays(delays))
        if not damage:
            return faults
        some = frozenset(random.sample(range(random.choice((8, 40))), random.randrange(1, 4)))
        position = random.randrange(random.choice((400, 4000)))
        kind = random.choice(("drop", "duplicate", "die_at", "end_at"))
        return cls(
            chunks=sizes,
            delay=faults.delay,
            drop=some if kind == "drop" else (),
            duplicate=some if kind == "duplicate" else (),
            die_at=position if kind == "die_at" else None,
            end_at=position if kind == "end_at" else None,
        )


@dataclass(frozen=True)
class _Delays:
    """A delay for each chunk, which can be shown and compared."""

    delays: tuple[float, ...]

    def __call__(self, number: int) -> float:
        return self.delays[number % len(self.delays)]


def byte_pair(
    a_to_b: Faults | None = None, b_to_a: Faults | None = None, limits: Limits | None = None
) -> tuple[ByteTransport, ByteTransport]:
    """Make two transports, each the other's peer, joined by a simulated stream of bytes.

    Frames become lines as on stdio, and are cut out of what arrives by the same framer. Both transports
    belong to the loop that starts them.

    Args:
        a_to_b: what happens to the bytes that the first one sends; by default nothing.
        b_to_a: what happens to those that the second one sends.
        limits: `frame_bytes` is used, at both ends.
    """
    frame_bytes = (limits or Limits()).frame_bytes
    a = ByteTransport(a_to_b or Faults(), frame_bytes, None)
    return a, ByteTransport(b_to_a or Faults(), frame_bytes, a)


class ByteTransport:
    """One end of a byte pair; satisfies `Transport`.

    What arrives before `start` or while reading is paused is held, and more than 64 KiB on their way
    ask the sender to pause. A last line without an end is delivered when the stream ends, whole or not.
    """

    def __init__(self, faults: Faults, frame_bytes: int, peer: ByteTransport | None) -> None:
        """Not for callers: use `byte_pair`."""
        self._peer = self if peer is None else peer
        if peer is not None:
            peer._peer = self
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._framer = LineFramer(frame_bytes)
        self._lost = False
        self._error: Exception | None = None
        # What we send.
        self._faults = faults
        self._sizes = _sizes_of(faults)
        self._room = next(self._sizes)  # in the chunk that is being filled
        self._chunks = 0  # cut so far
        self._position = 0  # in the stream, of the next byte to be cut
        self._unsent = bytearray()
        self._to_follow: _End | None = None  # comes after what is unsent
        self._output_over = False
        self._travelling = 0  # bytes sent and not delivered
        self._told_to_pause = False
        # What we receive.
        self._arriving: deque[tuple[float, bytes | _End]] = deque()  # and when, at the earliest
        self._arrival: asyncio.Handle | None = None
        self._paused = False
        self._peer_gone = False

    # ------------------------------------------------------------------ Transport

    async def start(self, receiver: Receiver) -> None:
        """Begin to deliver, with what has arrived already."""
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        if self._lost:
            self._loop.call_soon(receiver.connection_lost, self._error)
        self._peer._schedule_cut()
        self._schedule()

    def send(self, frames: list[bytes]) -> None:
        """Send frames as lines; a no-op once either side has closed."""
        if frames:
            self.send_bytes(join_frames(frames))

    def send_bytes(self, data: bytes) -> None:
        """Send any bytes, framed or not; a no-op once either side has closed."""
        if self._lost or self._output_over or self._to_follow is not None or self._peer._lost:
            return
        self._unsent += data
        self._travelling += len(data)
        if self._travelling > _FULL and not self._told_to_pause and self._receiver is not None:
            self._told_to_pause = True
            self._receiver.pause_writing()
        self._schedule_cut()

    @property
    def unsent(self) -> int:
        """Bytes that were sent and neither delivered nor lost."""
        return self._travelling

    def end_output(self) -> None:
        """Close this direction only: the peer gets what was sent, then `input_ended`. Idempotent."""
        self._follow("ended")

    def pause_reading(self) -> None:
        """Deliver nothing more for now."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver what was held, in later turns of the loop."""
        self._paused = False
        self._schedule()

    async def aclose(self) -> None:
        """Close both directions; the peer still gets what was sent, then its end. Idempotent."""
        if not self._lost:
            self._lose(None)
            self._follow("closed")

    def describe(self) -> str:
        """Name it in logs and errors."""
        return "simulated stream"

    @property
    def info(self) -> dict[str, Any]:
        """What this end knows of the other: it is in the same process."""
        return {"kind": "process", "peer": None}

    # ------------------------------------------------------------------ what we send

    def _follow(self, end: _End) -> None:
        self._to_follow = end
        self._schedule_cut()

    def _schedule_cut(self) -> None:
        """Cut in the next turn, so that what is sent in this one travels together."""
        if self._peer._loop is not None:
            self._peer._loop.call_soon(self._cut)

    def _cut(self) -> None:
        """Put what is unsent on its way."""
        faults = self._faults
        while not self._output_over:
            if self._position == faults.die_at:
                self._dispatch("died")
            elif self._position == faults.end_at:
                self._dispatch("ended")
            elif self._unsent:
                size = min(self._room, len(self._unsent))
                for position in (faults.die_at, faults.end_at):
                    if position is not None:
                        size = min(size, position - self._position)
                self._dispatch_chunk(bytes(self._unsent[:size]))
            else:
                break
        end, self._to_follow = self._to_follow, None
        if end == "closed" or (end is not None and not self._output_over):
            self._dispatch(end)

    def _dispatch_chunk(self, chunk: bytes) -> None:
        del self._unsent[: len(chunk)]
        number = self._chunks
        self._chunks += 1
        self._position += len(chunk)
        self._room -= len(chunk)
        if not self._room:
            self._room = next(self._sizes)
        if number in self._faults.drop:
            self._delivered(len(chunk))
            return
        when = self._arrival_of(number)
        if number in self._faults.duplicate:
            self._travelling += len(chunk)
            self._peer._arriving.append((when, chunk))
        self._peer._arriving.append((when, chunk))
        self._peer._schedule()

    def _dispatch(self, end: _End) -> None:
        """Put an end on its way; it follows the last chunk at once."""
        self._output_over = True
        self._delivered(len(self._unsent))
        self._unsent.clear()
        self._peer._peer_gone |= end != "ended"
        self._peer._arriving.append((0.0, end))
        self._peer._schedule()

    def _arrival_of(self, number: int) -> float:
        """When a chunk arrives that leaves now, unless it has to wait behind another."""
        delay = self._faults.delay
        now = 0.0 if self._peer._loop is None else self._peer._loop.time()
        return now + (delay(number) if callable(delay) else delay)

    def _delivered(self, size: int) -> None:
        self._travelling -= size
        if self._told_to_pause and self._travelling <= _FREE and not self._lost:
            self._told_to_pause = False
            if self._receiver is not None:
                self._receiver.resume_writing()

    # ------------------------------------------------------------------ what we receive

    @property
    def _held(self) -> bool:
        # What a peer that is gone has left is delivered all the same, as by every transport of ours.
        return self._paused and not self._peer_gone

    def _schedule(self) -> None:
        """See to it that the next chunk is delivered when it has arrived."""
        if self._loop is None or self._arrival or self._held or self._lost or not self._arriving:
            return
        when, _ = self._arriving[0]
        if when <= self._loop.time():
            self._arrival = self._loop.call_soon(self._deliver)
        else:
            self._arrival = self._loop.call_at(when, self._deliver)

    def _deliver(self) -> None:
        self._arrival = None
        if self._held or self._lost or self._receiver is None:
            return
        _, what = self._arriving.popleft()
        if isinstance(what, bytes):
            frames = self._framer.feed(what)
            if frames:
                self._receiver.frames_received(frames)
            self._peer._delivered(len(what))
        else:
            self._end(what)
        # Reading may have been paused, or the transport closed, inside the calls above.
        self._schedule()

    def _end(self, end: _End) -> None:
        frames = self._framer.end()
        if frames and self._receiver is not None:
            self._receiver.frames_received(frames)
        if end == "ended":
            if self._receiver is not None and not self._lost:
                self._receiver.input_ended()
        elif end == "closed":
            self._lose(None)
        else:
            error = ConnectionClosed(f"the stream broke after byte {self._peer._position}")
            self._lose(error)
            self._peer._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._error = error
        self._arriving.clear()
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        if self._receiver is not None:
            self._receiver.connection_lost(error)


def _sizes_of(faults: Faults) -> Iterator[int]:
    chunks = faults.chunks
    if chunks is None:
        return repeat(_WHOLE)
    if isinstance(chunks, int):
        return repeat(chunks)
    if isinstance(chunks, Random):
        return _random_sizes(chunks)
    return cycle(chunks)


def _random_sizes(random: Random) -> Iterator[int]:
    while True:
        yield random.randint(1, 1 << random.randrange(13))
