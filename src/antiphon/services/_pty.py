"""A terminal for a command to run in, at which nobody sits.

Responsible for its two ends, its size, and what the command gets where it reads: nothing will ever
be typed, so an end of file is, again and again. Making it the command's controlling terminal is left
to `_inside`, reading what is shown on it to `_terminals`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final

if sys.platform != "win32":
    import termios

if TYPE_CHECKING:
    import asyncio

__all__ = ["Silence", "checked_size", "open_pty"]

#: Rows and columns where nobody says otherwise.
SIZE: Final = (24, 80)
#: A command that has shown something and then nothing for so long may be asking.
QUIET: Final = 1.0
LONGEST_PAUSE: Final = 60.0


def checked_size(pty: bool | tuple[int, int]) -> tuple[int, int] | None:  # noqa: FBT001  (public there)
    """The rows and columns that `pty=` asks for; None for no terminal.

    Raises:
        ValueError: they are no two numbers from 1 to 65535.
        NotImplementedError: this system has no such terminals (Windows).
    """
    if pty is False:
        return None
    if sys.platform == "win32":
        raise NotImplementedError("pty= needs a system with pseudo-terminals")
    size = SIZE if pty is True else tuple(pty)
    if len(size) != len(SIZE) or not all(
        type(number) is int and 0 < number <= 0xFFFF for number in size
    ):
        msg = f"pty is True or (rows, columns), each from 1 to 65535, not {pty!r}"
        raise ValueError(msg)
    return size[0], size[1]


def open_pty(size: tuple[int, int]) -> tuple[int, int]:
    """Our end and the command's end of a new terminal of that many rows and columns.

    Raises:
        OSError: there can be no more terminals or descriptors; nothing is left open.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    ours, theirs = os.openpty()
    try:
        termios.tcsetwinsize(theirs, size)
    except (OSError, termios.error) as error:
        os.close(ours)
        os.close(theirs)
        raise OSError(*error.args) from error
    return ours, theirs


class Silence:
    """Types an end of file at the beginning, and again whenever the command has been silent a while.

    So what reads its input goes on at once, and what reads it again, or throws away what was typed
    before it asks (passwords), a second later. The pauses double, up to a minute, until something
    is shown: a program that does not read must not find thousands. Only where input is read by
    lines: to a program that takes single keys it would be a key, as one is that was on its way when
    the program began to take them.

    It holds the command's end too: one that closes all it has of its terminal would be hung up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ours: int, theirs: int) -> None:
        """Copies of both ends of the terminal are kept until `close`."""
        self._loop = loop
        self._fd = os.dup(ours)
        try:
            self._theirs = os.dup(theirs)
        except OSError:
            os.close(self._fd)
            raise
        os.set_blocking(self._fd, False)
        self._since = loop.time()
        self._pause = QUIET
        self._type()
        self._timer = loop.call_later(QUIET, self._look)

    def shown(self) -> None:
        """The command has written something."""
        self._since = self._loop.time()
        if self._pause > QUIET and self._fd >= 0:
            self._pause = QUIET
            self._timer.cancel()
            self._timer = self._loop.call_later(QUIET, self._look)

    def _look(self) -> None:
        left = self._since + self._pause - self._loop.time()
        if left <= 0:
            self._type()
            self._since = self._loop.time()
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            left = self._pause
        self._timer = self._loop.call_later(left, self._look)

    def _type(self) -> None:
        if sys.platform == "win32":
            raise NotImplementedError
        # The command is gone, or has read nothing of what was typed so far.
        with contextlib.suppress(OSError, termios.error):
            settings = termios.tcgetattr(self._fd)
            if settings[3] & termios.ICANON:
                os.write(self._fd, settings[6][termios.VEOF])

    def close(self) -> None:
        """The command has ended: type nothing any more, and let its output end. Idempotent."""
        self._timer.cancel()
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._theirs)
            self._fd = self._theirs = -1
