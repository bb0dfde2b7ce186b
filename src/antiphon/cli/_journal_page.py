"""How a session from a journal looks: parts as lines, whole for `show` and as they grow for `tail`.

What a part is, `_journal_story` says; a `Paper` puts lines where they are read, plain here, pleasant in
`_pleasant`. A journal holds what agents, users and files said, so it is hostile text: whatever a line
begins with at its left edge is ours, theirs is indented or in one line, and no control character of
theirs is written anywhere.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from antiphon.cli._journal_story import Note, PlanPart, Said, ToolPart, TurnBegin, TurnEnd
from antiphon.cli._output import as_line, readable
from antiphon.cli._plain import KINDS_WITHOUT_TEXT, change_lines, relative

if TYPE_CHECKING:
    from antiphon.cli._journal_story import Change, Part
    from antiphon.cli._output import Output
    from antiphon.cli._view import PlanLine
    from antiphon.journal import SessionInfo

__all__ = ["Page", "Paper", "PlainPaper", "iso", "moment"]

MAX_CHANGE_LINES: Final = 40
MAX_OUTPUT_LINES: Final = 20

_HEADS: Final = {
    "user": "user:",
    "agent": "agent:",
    "thought": "thinking:",
    "session": "another session:",
    "steer": "user, meanwhile:",
}
#: The wire's kinds of tools; any other word may be made to look like the beginning of a line of ours.
_KINDS: Final = frozenset(
    ("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode")
)
_MARKS: Final = {"completed": "x", "in_progress": ">"}
_STATUS_STYLES: Final = {"completed": "green", "failed": "red", "cancelled": "red"}
_CHANGE_STYLES: Final = {"+": "green", "-": "red"}
_LINE_ENDS: Final = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")


class Paper(Protocol):
    """Where lines go. Text that it is given is harmless already."""

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line of (text, style) pieces; a style is "" or words such as "bold red"."""

    def prose(self, text: str) -> None:
        """An agent's whole message, indented; Markdown, where that can be shown."""

    def piece(self, text: str, style: str) -> None:
        """Text that goes on where the last piece ended."""


class PlainPaper:
    """Standard output, without colours."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line."""
        self._output.text("".join(text for text, _ in pieces).rstrip() + "\n")

    def prose(self, text: str) -> None:
        """Indented by two."""
        for line in text.split("\n"):
            self.line((f"  {line}", ""))

    def piece(self, text: str, style: str) -> None:
        """As it comes."""
        self._output.text(text)


class Page:
    """The parts of one session, one after the other."""

    def __init__(self, paper: Paper, *, cwd: str = "") -> None:
        self._paper = paper
        self._cwd = cwd
        self._last = ""
        # Of a session that is followed: the message whose pieces come, what tools were told of, and
        # the plan as it was told.
        self._open: Said | None = None
        self._told: dict[str, tuple[str, str]] = {}
        self._plan: list[PlanLine] = []

    def head(self, session: SessionInfo) -> None:
        """Which session it is."""
        self._line((f"session {session.session_id}", "bold"))
        facts = (
            ("title", session.title or ""),
            ("folder", self._cwd),
            ("created", moment(session.created)),
            ("changed", moment(session.updated)),
            ("records", f"{session.records:,}"),
        )
        for label, value in facts:
            if value:
                self._line((f"  {label + ':':<10}", "dim"), (value, ""))
        self._last = "head"

    def remark(self, text: str) -> None:
        """A line of ours, e.g. what is left out."""
        self._close()
        self._line((text, "dim"), kind="remark")

    # -- whole parts

    def part(self, part: Part) -> None:
        """Show a part as it is now."""
        self._close()
        match part:
            case TurnBegin():
                self._begin(part)
            case TurnEnd():
                self._end(part)
            case Said():
                self._blank()
                self._say_who(part)
                if part.who == "agent":
                    self._paper.prose(_theirs(part.text).strip("\n"))
                else:
                    for line in _theirs(part.text).strip("\n").split("\n"):
                        self._paper.line((f"  {line}", _style(part.who)))
                self._last = "said"
            case ToolPart():
                self._tool(part)
            case PlanPart():
                self._blank(unless="plan")
                for step in part.lines:
                    self._plan_line(step)
            case Note():
                self._note(part)

    def _begin(self, part: TurnBegin) -> None:
        self._blank()
        where = f"  {moment(part.ts)}, record {part.offset}"
        self._line((_turn(part.number), "bold"), (where, "dim"), kind="turn")
        self._told.clear()
        self._plan = []

    def _end(self, part: TurnEnd) -> None:
        self._blank(unless="turn")
        facts = [f"{part.updates:,} update{'s' * (part.updates != 1)}"]
        if part.seconds is not None:
            facts.insert(0, f"after {_duration(part.seconds)}")
        if part.context:
            facts.append(f"context {part.context}")
        facts.append(f"record {part.offset}")
        style = {True: "bold green", False: "bold red", None: "bold"}[part.good]
        self._line(
            (f"{_turn(part.number)} ended: {part.how}", style),
            (f"  {', '.join(facts)}", "dim"),
            kind="end",
        )

    def _say_who(self, part: Said) -> None:
        self._line((_HEADS.get(part.who, "message:"), "bold" if part.who == "user" else "dim"))

    def _tool(self, part: ToolPart) -> None:
        tool = part.tool
        self._blank(unless="tool")
        self._tool_line(part)
        if tool.command and tool.command != tool.name:
            self._line((f"  $ {tool.command}", "dim"))
        for change in tool.changes:
            path, *lines = change_lines(change, self._cwd, MAX_CHANGE_LINES)
            self._line((f"  {path}", "bold"))
            for line in lines:
                self._line((f"  {line}", _CHANGE_STYLES.get(line[:1], "dim")))
        shown = _theirs("".join(part.printed)).strip("\n")
        # Agents often repeat a terminal's output as text.
        if not shown and tool.kind not in KINDS_WITHOUT_TEXT:
            shown = _theirs(tool.text).strip("\n")
        if shown.strip():
            lines = shown.split("\n")
            if len(lines) > MAX_OUTPUT_LINES:
                self._line((f"  | … {len(lines) - MAX_OUTPUT_LINES:,} lines before", "dim"))
            for line in lines[-MAX_OUTPUT_LINES:]:
                self._line((f"  | {line}", "dim"))
        self._last = "tool"

    def _tool_line(self, part: ToolPart) -> None:
        tool = part.tool
        places = ", ".join(relative(path, self._cwd) for path in tool.locations[:3])
        self._line(
            (f"{tool.kind if tool.kind in _KINDS else 'other'}: ", "cyan"),
            (tool.name, "bold"),
            (f" ({places})" if places else "", "dim"),
            (f" [{tool.status}]", _STATUS_STYLES.get(tool.status, "yellow")),
            kind="tool",
        )

    def _plan_line(self, line: PlanLine) -> None:
        mark = _MARKS.get(line.status, " ")
        style = "green" if mark == "x" else "yellow" if mark == ">" else "dim"
        self._line((f"plan [{mark}] ", style), (line.content, ""), kind="plan")

    def _note(self, part: Note) -> None:
        self._blank(unless="note")
        self._line((part.text, "dim"), kind="note")

    # -- parts that grow

    def live(self, change: Change) -> None:
        """Show what a record did, as soon as it has."""
        part = change.part
        match part:
            case Said():
                self._grow(part, change.piece)
            case ToolPart():
                self._close()
                now = (part.tool.name, part.tool.status if part.tool.is_over else "")
                before = self._told.get(part.tool.id)
                self._told[part.tool.id] = now
                if part.tool.is_over and before != now:
                    self._tool(part)
                elif before is None or before[0] != now[0]:
                    self._blank(unless="tool")
                    self._tool_line(part)
            case PlanPart():
                self._close()
                self._blank(unless="plan")
                before_lines, self._plan = self._plan, part.lines
                same = [line.content for line in before_lines] == [
                    line.content for line in part.lines
                ]
                for number, line in enumerate(part.lines):
                    if not same or before_lines[number].status != line.status:
                        self._plan_line(line)
            case _:
                self.part(part)

    def _grow(self, part: Said, piece: str) -> None:
        text = _theirs(piece)
        if self._open is not part:
            self._close()
            self._blank()
            self._say_who(part)
            self._open = part
            self._last = "said"
            text = f"  {text.lstrip(chr(10))}"
        self._paper.piece(text.replace("\n", "\n  "), _style(part.who))

    def close(self) -> None:
        """End the line that is being written. Idempotent."""
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open = None
            self._paper.piece("\n", "")

    # -- lines

    def _blank(self, unless: str = "") -> None:
        """A blank line between different things."""
        if self._last and self._last != unless:
            self._paper.line(("", ""))

    def _line(self, *pieces: tuple[str, str], kind: str = "") -> None:
        # Whatever comes from elsewhere: one line for every reader, in the order that it has.
        self._paper.line(*((as_line(text), style) for text, style in pieces))
        if kind:
            self._last = kind


def _theirs(text: str) -> str:
    """Their text in as many lines as it has for any reader, and nothing in it that controls one."""
    return readable(_LINE_ENDS.sub("\n", text))


def _style(who: str) -> str:
    return "dim italic" if who == "thought" else ""


def _turn(number: int | None) -> str:
    return "turn" if number is None else f"turn {number}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(ts: int) -> str:
    """A time of a record for people: local, to the second."""
    try:
        return datetime.fromtimestamp(ts / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ts} ms"


def iso(ts: int) -> str | None:
    """A time of a record for programs: UTC, to the millisecond; None for what is no time."""
    try:
        return datetime.fromtimestamp(ts / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None
