"""Bytes to frames and back: the newline framing of stdio.

Responsible for finding line ends in whatever chunks the bytes arrive in, within a bound of
memory, and for joining frames into what is written. Leaves to `transports` where the bytes come
from, and to `core.Protocol` what a frame means and how a refused one is answered.

Source: conformance cases F1-F6, transport contract "Stdio", field faults 01, 02, 03 and 05.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import TYPE_CHECKING, Literal, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Fault", "LineFramer", "escape_separators", "join_frames"]

#: How much of a refused line is kept at each end: enough for an id wherever the sender puts it.
KEPT = 4096
#: A line that is so long is read to where it is kept, so much at a time.
LONG = ROOM = 1 << 16

_BOM = b"\xef\xbb\xbf"
# As numbers: `bytes in bytes` takes its left side for a number first, and an exception and ten times
# as long to find that it is none.
_CR = ord("\r")
_LAST_OF_2028, _LAST_OF_2029 = 0xA8, 0xA9
_LINE_SEPARATORS = b"\xe2\x80[\xa8\xa9]"


class Fault(msgspec.Struct, frozen=True):
    """Stands in the stream where a frame was refused.

    Attributes:
        reason: always "frame_too_large".
        size: bytes of the line without its end, as far as they were seen: a lower bound.
        head: its first bytes, at most 4 KiB.
        tail: its last bytes, at most 4 KiB; the two overlap where the line is short.
    """

    reason: Literal["frame_too_large"]
    size: int
    head: bytes
    tail: bytes


class LineFramer:
    r"""Cuts a byte stream into frames, however it is chunked.

    A frame ends with LF; one CR directly before it is stripped, also where the two come in
    different chunks. Blank lines are skipped. One byte order mark at the very start of the stream
    is stripped. Only the byte 0x0A ends a line: U+2028, U+2029 and U+0085 are text.

    A line of more than `max_bytes` (counted without its end) becomes one `Fault` at its place, and
    the lines around it are untouched. Of such a line only the two ends are kept, so at most
    `max_bytes` + 1 bytes are held, whatever the peer does. Time is linear: each byte is searched
    once and copied at most twice, of a large frame hardly at all where it is read to where `room` is.

    Args:
        max_bytes: the longest frame that passes, in bytes. Anything but a positive integer raises
            `ValueError`.
    """

    __slots__ = (
        "_head",
        "_held",
        "_line",
        "_max",
        "_reach",
        "_room",
        "_skipped",
        "_start",
        "_tail",
    )

    def __init__(self, max_bytes: int) -> None:
        if type(max_bytes) is not int or max_bytes <= 0:
            msg = f"max_bytes must be a positive integer, not {max_bytes!r}"
            raise ValueError(msg)
        self._max = max_bytes
        self._line = BytesIO()  # the unfinished line
        self._held = 0  # its length
        self._reach = 0  # to where `_line` is filled with what means nothing yet, 0 if it is not
        self._room: memoryview | None = None  # what was lent of that
        self._skipped = 0  # bytes seen of a line that is too long; then `_line` is empty
        self._head = b""
        self._tail = b""
        self._start = True  # nothing but, perhaps, a part of the byte order mark was seen

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished line held in memory; the ends kept of a refused one count."""
        return self._held + len(self._head) + len(self._tail)

    @property
    def unfinished(self) -> bytes:
        """The beginning of a line whose end has not come, at most 4 KiB; b"" where there is none."""
        return (
            self._head if self._skipped else bytes(self._line.getbuffer()[: min(KEPT, self._held)])
        )

    def feed(self, chunk: bytes) -> list[bytes | Fault]:
        """Take the next bytes of the stream, however many; return the frames they complete.

        A refused line appears where it ends, because the id may be its last member.
        """
        if self._reach:
            self._settle()
        if self._start:
            chunk = self._strip_mark(chunk)
        if not chunk:
            return []
        end = chunk.rfind(b"\n")
        if end < 0:  # the middle of a large frame, which is not copied here
            self._hold(chunk)
            return []
        # Not `split`, which looks at one byte after the other: this finds the next end by `memchr`, and
        # takes a fifth to a half of the time.
        lines = [line[:-1] for line in BytesIO(chunk)]
        rest = b""
        if end + 1 < len(chunk):
            rest = chunk[end + 1 :]
            lines.pop()
        # Frames of a chunk that has no CR and no long line, the common case, are these lines.
        frames = cast("list[bytes | Fault]", lines)
        first = None
        if self._held or self._skipped:
            first = self._finish(lines[0])
        if _CR in chunk:
            frames[:] = [line.removesuffix(b"\r") for line in lines]
        if len(chunk) > self._max:
            frames[:] = [line if len(line) <= self._max else _fault(line) for line in lines]
        if first is not None:  # after the passes above, which are for whole lines
            frames[0] = first
        if not all(frames):
            frames = [frame for frame in frames if frame]
        if rest:
            self._hold(rest)
        return frames

    def room(self) -> memoryview | None:
        """Where to read the next bytes of a long line, None where there is no such line.

        `filled` has to come before anything else. Nothing is made in memory on the way: a chunk that lies
        behind the line would have to be passed when the line grows, and leaves a hole where it was.
        """
        held, line = self._held, self._line
        if held < LONG:
            return None
        if held + ROOM > self._reach:
            self._reach = held + max(ROOM, held >> 3)
            line.seek(self._reach - 1)
            line.write(b"\0")
        self._room = room = line.getbuffer()[held : held + ROOM]
        return room

    def filled(self, count: int) -> list[bytes | Fault]:
        """The same as `feed`, of the first `count` bytes of the room that was lent."""
        room, self._room = self._room, None
        if room is None:
            return []
        # Slower than `find` of bytes, but there are none here, and making some is what must not be.
        whole = re.compile(b"\n").search(room, 0, count) is None
        if whole and self._held + count <= self._max:
            room.release()
            self._held += count
            return []
        chunk = bytes(room[:count])
        room.release()
        return self.feed(chunk)

    def _settle(self) -> None:
        """Let the line end where it ends. What there is room for in memory stays."""
        self._line.truncate(self._held)
        self._line.seek(self._held)
        self._reach = 0

    def end(self) -> list[bytes | Fault]:
        """Take the end of the stream; return what an unterminated last line gives.

        Whether that line is a whole frame cannot be told here; the decoder will. Afterwards the
        framer is as new.
        """
        if self._reach:
            self._settle()
        last = self._finish(b"") if self._held or self._skipped else b""
        self._start = True
        return [last] if last else []

    def _strip_mark(self, chunk: bytes) -> bytes:
        chunk = self._take() + chunk
        if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
            # Not by `_hold`: of a mark nothing counts towards the limit.
            self._line.write(chunk)
            self._held = len(chunk)
            return b""
        self._start = False
        return chunk.removeprefix(_BOM)

    def _hold(self, rest: bytes) -> None:
        """Keep the beginning or the middle of a line whose end has not come."""
        if self._skipped:
            self._skip(rest)
            return
        # It grows in place, and in the end becomes the frame: pieces that are joined then would take
        # twice the memory.
        self._line.write(rest)
        self._held += len(rest)
        # A line of exactly the limit may have its CR here and its LF in the next chunk.
        if self._held - rest.endswith(b"\r") > self._max:
            self._skip(self._take())

    def _skip(self, rest: bytes) -> None:
        self._skipped += len(rest)
        if len(self._head) < KEPT:
            self._head += rest[: KEPT - len(self._head)]
        # One byte more than is wanted: it may be the CR of the line end.
        self._tail = (self._tail + rest[-KEPT - 1 :])[-KEPT - 1 :]

    def _take(self, rest: bytes = b"") -> bytes:
        if not self._held:
            return rest
        line, self._line, self._held = self._line, BytesIO(), 0
        line.write(rest)
        return line.getvalue()  # its own bytes, not a copy

    def _finish(self, rest: bytes) -> bytes | Fault:
        """Make the frame (perhaps blank) or fault of what is held and `rest`."""
        if self._skipped:
            self._skip(rest)
            tail = self._tail.removesuffix(b"\r")
            size = self._skipped - (len(self._tail) - len(tail))
            fault = Fault("frame_too_large", size, self._head[:size], tail[-KEPT:])
            self._skipped = 0
            self._head = self._tail = b""
            return fault
        line = self._take(rest).removesuffix(b"\r")
        return line if len(line) <= self._max else _fault(line)


def _fault(line: bytes) -> Fault:
    return Fault("frame_too_large", len(line), line[:KEPT], line[-KEPT:])


def join_frames(frames: Sequence[bytes]) -> bytes:
    r"""Make what is written for `frames`: each with a line end, copied once.

    U+2028 and U+2029 are written as escapes, because peers on Node's readline end a line there.
    Both can stand only inside JSON strings, so replacing the bytes is exact. A frame must hold no
    LF: the encoder writes none, and the framer returns none.
    """
    return escape_separators(b"\n".join((*frames, b"")))


def _find_first_separator(data: bytes) -> object:
    """Make the search, for the first data that may have one: no start of a program waits for it."""
    global _find_separator  # noqa: PLW0603  (set once, to a constant)
    _find_separator = re.compile(_LINE_SEPARATORS).search
    return _find_separator(data)


_find_separator: Callable[[bytes], object] = _find_first_separator


def escape_separators(data: bytes) -> bytes:
    """The same JSON with U+2028 and U+2029 as escapes: `data` itself where it has none."""
    # The last byte of both is rare and one byte is found fastest; their first, 0xE2, begins every
    # dash and curly quote.
    if (_LAST_OF_2028 in data or _LAST_OF_2029 in data) and _find_separator(data):
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data
