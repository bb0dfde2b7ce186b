"""Recording a connection: every frame as one line of NDJSON, `{"t", "dir", "frame"}`.

`t` is seconds since the epoch, `dir` "in" or "out" as seen from this side, `frame` the frame itself; a
frame that is no JSON is kept as a string.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import msgspec

from antiphon._errors import ENDING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

__all__ = ["Guarded", "Recorder"]

log = logging.getLogger("antiphon.connection")

_encode = msgspec.json.Encoder().encode


_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


class Recorder:
    """Appends to a file that only its owner can read: frames hold prompts and file contents.

    Each line is written through, so that a recording survives the death of the process.

    Args:
        path: the file; created with mode 0600, or appended to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600
        )
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", buffering=0)

    def __call__(self, direction: str, frame: bytes) -> None:
        """Write one frame; a full disk ends the recording with a log line, not the connection."""
        if self._file is None:
            return
        try:
            msgspec.json.decode(frame)
            # All of these end a line for somebody who reads text; the first two are only space in
            # JSON, the others can only stand in strings, where an escape means the same.
            text = frame.replace(b"\n", b" ").replace(b"\r", b" ")
            for raw, escape in _LINE_ENDS:
                text = text.replace(raw, escape)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            text = _encode(frame.decode("utf-8", "replace"))
        line = b'{"t":%.6f,"dir":"%s","frame":%s}\n' % (time.time(), direction.encode(), text)
        try:
            self._file.write(line)
        except OSError as error:
            log.warning("nothing more is recorded: %s", error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class Guarded:
    """A user's function as a record: what it raises ends the recording, not the connection.

    Args:
        function: called with ("in" | "out", frame) for every frame, in order.
    """

    def __init__(self, function: Callable[[str, bytes], object]) -> None:
        self._function: Callable[[str, bytes], object] | None = function

    def __call__(self, direction: str, frame: bytes) -> None:
        """Hand one frame on."""
        if self._function is None:
            return
        try:
            self._function(direction, frame)
        except ENDING:
            raise
        except BaseException:
            log.exception("the function given as record= failed; nothing more is recorded")
            self.close()

    def close(self) -> None:
        """Hand nothing more on. Idempotent."""
        self._function = None
