"""Asking with nothing but the terminal: the options as numbered lines, the answer as one line.

What the question is about, the display has shown before. `_pleasant` does the same with
prompt-toolkit where that is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from antiphon.cli._output import readable, tell

if TYPE_CHECKING:
    from antiphon.cli._view import Question

__all__ = ["PlainAsker", "can_ask", "forget_typed"]


def can_ask() -> bool:
    """Whether there is a person to ask: standard input and standard error are a terminal."""
    try:
        return sys.stdin.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):
        # Closed, or never there (`<&-`).
        return False


def forget_typed(terminal: int) -> None:
    """Drop what was typed so far: before a question is there, nothing is an answer to it."""
    import termios

    with contextlib.suppress(OSError, termios.error):
        termios.tcflush(terminal, termios.TCIFLUSH)


class PlainAsker:
    """Lists the options on standard error and reads the answer from the terminal."""

    async def choose(self, question: Question) -> str | None:
        """The chosen option's key, or None at end of input. Cancellable at any time."""
        terminal = _open_terminal()
        if terminal is None:
            tell("There is no terminal to ask on.\n")
            return None
        forget_typed(terminal)
        try:
            tell(_options(question))
            while True:
                tell("> ")
                line = await _read_line(terminal)
                if line is None:
                    tell("\n")
                    return None
                key = _chosen(question, line.strip())
                if key is not None:
                    return key
                tell(f"Please answer with a number from 1 to {len(question.options)}.\n")
        except asyncio.CancelledError:
            # What comes next is not what was typed.
            tell("\n")
            raise
        finally:
            os.close(terminal)

    async def line(self, default: str, *, fresh: bool) -> str | None:
        """A typed line; an empty one is `default`, and "-" is none. None at end of input."""
        terminal = _open_terminal()
        if terminal is None:
            return None
        if fresh:
            forget_typed(terminal)
        try:
            tell(f"[{readable(default)}, or - for nothing] > " if default else "> ")
            line = await _read_line(terminal)
        finally:
            os.close(terminal)
        if line is None:
            tell("\n")
            return None
        line = line.removesuffix("\n").removesuffix("\r")
        return (line or default) if line.strip() != "-" or not default else ""

    def show(self, text: str, style: str = "") -> None:
        """Lines on standard error; there are no styles."""
        del style
        tell(f"{readable(text)}\n")


def _options(question: Question) -> str:
    labels = [name for _, name, _ in question.options]
    lines = [f"  {number}. {readable(name)}" for number, name in enumerate(labels, start=1)]
    return "".join(f"{line}\n" for line in lines)


def _chosen(question: Question, answer: str) -> str | None:
    if answer.isdecimal() and 1 <= int(answer) <= len(question.options):
        return question.options[int(answer) - 1][0]
    # A unique beginning of one label will do as well; "y" and "n" do not pretend to be options.
    fitting = [key for key, name, _ in question.options if name.lower().startswith(answer.lower())]
    return fitting[0] if answer and len(fitting) == 1 else None


def _open_terminal() -> int | None:
    """A descriptor of the terminal: standard input where it is one, else the controlling one."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if sys.stdin.isatty():
            return os.dup(sys.stdin.fileno())
    with contextlib.suppress(OSError):
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    return None


async def _read_line(terminal: int) -> str | None:
    """One line from the terminal in its usual line mode; None at end of input."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(terminal, ready.set)
    try:
        await ready.wait()
        # The terminal's line discipline hands out whole lines, so this does not block.
        data = os.read(terminal, 4096)
    except OSError:
        return None
    finally:
        loop.remove_reader(terminal)
    return data.decode("utf-8", "replace") if data else None
