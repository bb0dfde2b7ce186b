"""The command `antiphon`: thin programmes over the public API.

`_arguments` says what can be asked for; each other module does one of it and is imported only then,
so that `antiphon --help` loads neither a protocol version nor a display. What a turn, a session or
a process is, the layers below know; here live only what a person types, sees and is asked, and what
a script reads: the lines on standard output and the exit code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's own arguments) and return its exit code.

    Raises nothing but what no code can answer (MemoryError and the like); a wrong argument is
    exit code 2 with one line on standard error.
    """
    from antiphon.cli._arguments import dispatch

    return dispatch(argv)
