"""Standard output as bytes: agent text or JSON lines, flushed at once, and safe to lose.

A reader that goes away (`| head`) is no error of ours and no traceback: the stream is marked lost,
later writes vanish, and whoever runs the turn is told, so that it can be stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Output", "as_line", "harmless", "is_terminal", "readable", "tell", "update_line"]

#: Characters of an agent's text that are shown at once.
MAX_CHARS = 4000

# What some readers take for the end of a line, raw inside JSON: a carriage return can only stand
# between tokens there, the other three only inside strings.
_LINE_ENDS = re.compile(rb"\r|\xc2\x85|\xe2\x80[\xa8\xa9]")
_AS_JSON = {
    b"\r": b" ",
    b"\xc2\x85": rb"\u0085",
    b"\xe2\x80\xa8": rb"\u2028",
    b"\xe2\x80\xa9": rb"\u2029",
}
# C0 and C1 controls but tab and newline, and DEL: what can move a cursor or talk to a terminal.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# What shows text in another order than it has, or not at all: embeddings, overrides, isolates, tags,
# and what has no width. Joiners are left: scripts and emoji need them.
_DISGUISES = re.compile(
    "[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
_BREAKS = re.compile("\r\n|[\r\n\x0b\x0c\x85\u2028\u2029]")


class Output:
    """Standard output of this process.

    Attributes:
        was_there: False under `>&-`; who says that wants the work done all the same.
        lost: nobody reads any more (closed pipe), or it cannot be written to (disk full, closed).
        on_lost: called once when that is found out.
    """

    def __init__(self, on_lost: Callable[[], object] | None = None) -> None:
        self.on_lost = on_lost
        # Under `>&-` the interpreter has no stdout at all.
        self.was_there = sys.stdout is not None  # pyright: ignore[reportUnnecessaryComparison]
        self.lost = not self.was_there
        #: Whether a person looks at it directly.
        self.is_terminal = not self.lost and sys.stdout.isatty()
        #: Whether another programme reads it while we write.
        self.is_pipe = not self.lost and _is_pipe(sys.stdout)

    def write(self, data: bytes) -> None:
        """Write and flush all of it; never raises for a stream that cannot be written to."""
        if self.lost:
            return
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except (OSError, ValueError):
            self._lose()

    def text(self, text: str) -> None:
        """Write text as UTF-8, lone surrogates as U+FFFD; without controls on a terminal."""
        if self.is_terminal:
            text = readable(text)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        self.write(data)

    def line(self, value: dict[str, Any]) -> None:
        """Write one JSON object as a line."""
        self.write(one_line(msgspec.json.encode(value)) + b"\n")

    def _lose(self) -> None:
        self.lost = True
        try:
            # What is still buffered would fail once more at exit, with a message and code 120.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.close(null)
        except OSError:
            pass
        if self.on_lost is not None:
            self.on_lost()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it is one, for streams that may be closed or were never there (`2>&-`)."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _is_pipe(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def tell(text: str) -> None:
    """Write to standard error, if there is one; never raises for one that cannot be written to."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def update_line(raw: bytes) -> bytes:
    """The line of `--json` for an update: its own bytes, unknown members and `_meta` included.

    Only what a reader of lines could trip over is written differently, with the same value: a
    carriage return between tokens as a space, U+0085, U+2028 and U+2029 as escapes.
    """
    return b'{"type":"update","update":' + one_line(raw) + b"}\n"


def one_line(data: bytes) -> bytes:
    """The same JSON text without anything that any reader takes for the end of a line."""
    return _LINE_ENDS.sub(lambda found: _AS_JSON[found[0]], data)


def readable(text: str) -> str:
    """Text from elsewhere, safe to show on a terminal: control characters become U+FFFD.

    An agent must not be able to move our cursor, rename the window or fill the clipboard.
    """
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


def as_line(text: str) -> str:
    """Text from elsewhere as one line, for what a person decides by.

    It cannot look like lines of ours, nor in another order than it is: line ends become "⏎", what
    has no width or turns the direction U+FFFD, like control characters.
    """
    return _DISGUISES.sub("\ufffd", readable(_BREAKS.sub("⏎", text)))


def harmless(text: str, limit: int = MAX_CHARS, *, one_line: bool = False) -> str:
    """Text from elsewhere that can neither move the cursor, nor hide, nor turn other text around.

    Args:
        text: in as many lines as it has.
        limit: characters after which it is cut, marked by "…".
        one_line: as one line, white space of any length a space.
    """
    if one_line:
        text = " ".join(text.split())
    text = _DISGUISES.sub("\ufffd", readable(text))
    return text if len(text) <= limit else text[:limit] + "…"
