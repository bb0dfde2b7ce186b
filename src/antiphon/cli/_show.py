"""Which display and which way of asking: the pleasant ones where a person watches and they are installed.

The only place that knows of both; the extra `cli` itself is imported in `_pleasant`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from antiphon.cli._ask import PlainAsker
from antiphon.cli._output import is_terminal
from antiphon.cli._plain import Plain, Quiet

if TYPE_CHECKING:
    from antiphon.cli._elicit import Person
    from antiphon.cli._journal_page import Paper
    from antiphon.cli._output import Output
    from antiphon.cli._view import Display

__all__ = ["choose_asker", "choose_display", "choose_paper"]


def choose_display(
    output: Output, *, cwd: str, quiet: bool = False, on_stdout: bool = False
) -> Display:
    """A display for this run.

    `quiet` is `--json`. `on_stdout` shows everything on standard output (the demo); else only the
    agent's text goes there.
    """
    if quiet:
        return Quiet(output, cwd=cwd)
    aside = sys.stdout if on_stdout else sys.stderr
    # What stands below and changes in place would be torn by a reader of the text that writes to the
    # same terminal (`| tee`).
    if _is_lively(aside) and (on_stdout or not output.is_pipe):
        try:
            from antiphon.cli._pleasant import Pleasant
        except ImportError:
            pass
        else:
            return Pleasant(output, aside, cwd=cwd)
    return Plain(output, aside, cwd=cwd)


def choose_asker() -> Person:
    """Somebody to put questions to a person."""
    if _is_lively(sys.stderr) and _is_lively(sys.stdin):
        try:
            from antiphon.cli._pleasant import PleasantAsker
        except ImportError:
            pass
        else:
            return PleasantAsker()
    return PlainAsker()


def choose_paper(output: Output) -> Paper:
    """Something to put the lines of a journal on: standard output."""
    if _is_lively(sys.stdout):
        try:
            from antiphon.cli._pleasant import StyledPaper
        except ImportError:
            pass
        else:
            return StyledPaper(sys.stdout)
    from antiphon.cli._journal_page import PlainPaper

    return PlainPaper(output)


def _is_lively(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can do more than print lines."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"
