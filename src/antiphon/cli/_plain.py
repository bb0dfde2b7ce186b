"""The display that needs nothing: one plain line after another, for pipes, logs and the base install.

Agent text goes to standard output exactly as it comes; everything else is a line on standard error
(both on standard output in the demo, where the show is the result). `_pleasant` does the same with
rich where a person watches.
"""

from __future__ import annotations

import difflib
import os
import sys
from typing import TYPE_CHECKING, TextIO

from antiphon.cli._output import as_line, is_terminal, readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.cli._output import Output
    from antiphon.cli._view import FileChange, PlanLine, Question, ToolView

__all__ = ["KINDS_WITHOUT_TEXT", "Plain", "Quiet", "change_lines", "relative", "same_file"]

_PLAN_MARKS = {"completed": "x", "in_progress": ">"}
_MAX_CHANGE_LINES = 40
_MAX_OUTPUT_LINES = 20
#: What these tools return is shown otherwise, or is what nobody asked to see.
KINDS_WITHOUT_TEXT = frozenset({"read", "edit"})


class Plain:
    """Lines of text. `aside` gets everything but the agent's own text."""

    def __init__(self, out: Output, aside: TextIO | None = None, *, cwd: str = "") -> None:
        self._out = out
        self._aside = sys.stderr if aside is None else aside
        self._cwd = cwd
        # Whether text and lines meet in one place, where a line must not begin inside the text: also
        # where what reads the text may show it on the terminal that the lines go to (`| tee`).
        self._mixed = (
            self._out.is_terminal
            or same_file(sys.stdout, self._aside)
            or (self._out.is_pipe and is_terminal(self._aside))
        )
        # What the last character written belongs to: "" at the start of a line.
        self._open = ""
        self._plan: tuple[PlanLine, ...] = ()
        self._tools: dict[str, tuple[str, str, tuple[FileChange, ...]]] = {}
        self._output: dict[str, list[str]] = {}

    def begin(self, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
        self._line(title)
        for label, value in facts:
            self._line(f"  {label + ':':<10}{value}")

    def message(self, text: str) -> None:
        if not text:
            return
        if self._open == "thought":
            self._break()
        self._out.text(text)
        if self._mixed:
            self._open = "" if text.endswith("\n") else "message"

    def thought(self, text: str) -> None:
        if not text:
            return
        if self._open != "thought":
            self._break()
            self._write("thinking: ")
            self._open = "thought"
        self._write(readable(text).replace("\n", "\n          "))

    def plan(self, lines: Sequence[PlanLine]) -> None:
        before, self._plan = self._plan, tuple(lines)
        same_steps = [line.content for line in before] == [line.content for line in lines]
        for number, line in enumerate(self._plan):
            if not same_steps or before[number].status != line.status:
                self._line(f"plan [{_PLAN_MARKS.get(line.status, ' ')}] {line.content}")

    def tool(self, tool: ToolView) -> None:
        name, end, changes = self._tools.get(tool.id, ("", "", ()))
        ended = tool.status if tool.is_over else ""
        if (tool.name, ended) != (name, end):
            places = ", ".join(relative(path, self._cwd) for path in tool.locations)
            where = f" ({places})" if places and not (name and ended) else ""
            self._line(f"{tool.kind}: {tool.name}{where}{f' [{ended}]' if ended else ''}")
        if tool.changes != changes:
            self._changes(tool)
        if tool.is_over and not end:
            self._result(tool)
        self._tools[tool.id] = (tool.name, ended, tool.changes)

    def _result(self, tool: ToolView) -> None:
        printed = [self._printed(terminal_id) for terminal_id in tool.terminals]
        # Agents often repeat a terminal's output as text.
        if not any(printed) and tool.kind not in KINDS_WITHOUT_TEXT:
            printed = [tool.text]
        for text in printed:
            if text.strip():
                self._block(text)

    def output(self, terminal_id: str, text: str) -> None:
        self._output.setdefault(terminal_id, []).append(text)

    def usage(self, used: int, size: int, cost: str) -> None:
        self._line(f"context: {used:,} of {size:,} tokens{f', {cost}' if cost else ''}")

    def note(self, text: str) -> None:
        self._line(text)

    def decided(self, question: Question, answer: str, *, allowed: bool, reason: str) -> None:
        del allowed
        why = f" ({reason})" if reason else ""
        self._line(f"{question.kind}: {question.subject} -> {answer}{why}")

    def suspend(self, question: Question) -> None:
        tool = question.tool
        self._line(question.headline)
        if tool.changes != self._tools.get(tool.id, ("", "", ()))[2]:
            self._changes(tool)
        if tool.command and tool.command != tool.name:
            self._line(f"  $ {as_line(tool.command)}")

    def resume(self) -> None:
        """Nothing was taken away."""

    def end(self, lines: Sequence[tuple[bool | None, str]]) -> None:
        for good, text in lines:
            self._line({True: "ok: ", False: "not ok: ", None: ""}[good] + text)

    def close(self) -> None:
        self._break()

    def _changes(self, tool: ToolView) -> None:
        for change in tool.changes:
            for line in change_lines(change, self._cwd, _MAX_CHANGE_LINES):
                self._line(f"  {line}")

    @property
    def _shares_stdout(self) -> bool:
        return self._aside is sys.stdout

    def _block(self, text: str) -> None:
        lines = text.strip("\n").split("\n")
        for line in lines[-_MAX_OUTPUT_LINES:]:
            self._line(f"  | {line}")

    def _printed(self, terminal_id: str) -> str:
        return "".join(self._output.pop(terminal_id, ())).strip("\n")

    def _line(self, text: str) -> None:
        self._break()
        self._write(readable(text) + "\n")

    def _break(self) -> None:
        if self._open:
            self._write("\n")
            self._open = ""

    def _write(self, text: str) -> None:
        if self._shares_stdout:
            self._out.text(text)
            return
        try:
            self._aside.write(text)
            self._aside.flush()
        except (OSError, ValueError, AttributeError):
            # Standard error is gone; what it would have shown is not what the run is for.
            pass


class Quiet(Plain):
    """The display of `--json`, where standard output says everything: only questions are shown."""

    def begin(self, *, title: str, facts: Sequence[tuple[str, str]]) -> None: ...
    def message(self, text: str) -> None: ...
    def thought(self, text: str) -> None: ...
    def plan(self, lines: Sequence[PlanLine]) -> None: ...
    def tool(self, tool: ToolView) -> None: ...
    def output(self, terminal_id: str, text: str) -> None: ...
    def usage(self, used: int, size: int, cost: str) -> None: ...
    def decided(self, question: Question, answer: str, *, allowed: bool, reason: str) -> None: ...
    def end(self, lines: Sequence[tuple[bool | None, str]]) -> None: ...
    def note(self, text: str) -> None: ...


def same_file(one: TextIO, other: TextIO) -> bool:
    """Whether two streams lead to one file, pipe or terminal."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (AttributeError, OSError, ValueError):
        return one is other


def change_lines(change: FileChange, cwd: str, limit: int) -> Iterator[str]:
    """One change: its path, then a diff of at most `limit` lines, "⋮" between distant places."""
    path = as_line(relative(change.path, cwd))
    yield f"{path} (new file)" if change.old is None else path
    old, new = _lines(change.old or ""), _lines(change.new)
    # The first three lines are headers for a patch programme.
    lines = list(difflib.unified_diff(old, new, lineterm="", n=2))[3:]
    for line in lines[:limit]:
        yield "⋮" if line.startswith("@@") else as_line(line)
    if len(lines) > limit:
        yield f"… {len(lines) - limit} more lines"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def relative(path: str, cwd: str) -> str:
    """`path` as seen from `cwd`, where it is inside."""
    prefix = cwd.rstrip("/") + "/"
    return path[len(prefix) :] if cwd and path.startswith(prefix) else path
