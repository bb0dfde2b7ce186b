"""The display and the questions with the extra `cli`: rich and prompt-toolkit, imported only here.

What is finished scrolls past and stays: paragraphs of the agent's text as Markdown, tool calls with
their diffs and output. What is going on stands below it and changes in place: the paragraph being
written, the running tools, the plan. Where standard output is this same terminal the agent's text is
shown here; where it is a file it goes there untouched, and only the rest is shown. A pipe has a reader
that may write to this terminal meanwhile, so it gets the plain display.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

from prompt_toolkit.application import Application
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import PromptSession
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from antiphon.cli._ask import forget_typed
from antiphon.cli._output import as_line, readable
from antiphon.cli._plain import KINDS_WITHOUT_TEXT, change_lines, relative, same_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, RenderResult

    from antiphon.cli._output import Output
    from antiphon.cli._view import FileChange, PlanLine, Question, ToolView

__all__ = ["Pleasant", "PleasantAsker", "StyledPaper"]

FRAMES_PER_SECOND: Final = 12
MAX_CHANGE_LINES: Final = 40
MAX_OUTPUT_LINES: Final = 14
#: A paragraph longer than this is shown as plain text while it grows: rendering it anew for each
#: piece would cost the square of its length.
MAX_PREVIEW_CHARS: Final = 4000
#: A message longer than this is no reading matter: laying it out would take seconds.
MAX_MARKDOWN_CHARS: Final = 100_000

_DONE, _FAILED, _WAITING, _NOW = "✔", "✘", "○", "▸"
_CHANGE_STYLES: Final = {"+": "green", "-": "red"}


class Pleasant:
    """One terminal, one turn."""

    def __init__(self, out: Output, aside: TextIO, *, cwd: str) -> None:
        self._out = out
        self._cwd = cwd
        self._console = Console(file=aside, highlight=False, soft_wrap=False)
        # The text belongs to standard output; where that is this very terminal, it is shown here.
        self._shows_text = out.is_terminal and same_file(sys.stdout, aside)
        self._live: Live | None = None
        self._ticks: asyncio.TimerHandle | None = None
        self._suspended = False
        self._started = time.monotonic()
        self._message = _Paragraphs()
        self._thought = _Paragraphs()
        self._plan: tuple[PlanLine, ...] = ()
        self._running: dict[str, ToolView] = {}
        self._finished: set[str] = set()
        self._shown_changes: dict[str, tuple[FileChange, ...]] = {}
        self._printed: dict[str, str] = {}
        self._context = ""
        self._last = ""

    # -- what is told

    def begin(self, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for label, value in facts:
            table.add_row(Text(label, "dim"), Text(readable(value)))
        self._print(Text(title, "bold"), Padding(table, (0, 0, 0, 2)), kind="begin")

    def message(self, text: str) -> None:
        if not self._shows_text:
            self._out.text(text)
            return
        self._finish_thought()
        for paragraph in self._message.feed(readable(text)):
            self._print(_markdown(paragraph), kind="message")
        self._tick()

    def thought(self, text: str) -> None:
        self._finish_message()
        for paragraph in self._thought.feed(readable(text)):
            self._print(_thought(paragraph), kind="thought")
        self._tick()

    def plan(self, lines: Sequence[PlanLine]) -> None:
        self._plan = tuple(lines)
        self._tick()

    def tool(self, tool: ToolView) -> None:
        self._finish_text()
        if tool.id in self._finished:
            # Announced again or amended after its end (quirk 15): it was shown already.
            return
        if not tool.is_over:
            self._running[tool.id] = tool
            self._tick()
            return
        self._running.pop(tool.id, None)
        self._finished.add(tool.id)
        parts: list[RenderableType] = [self._tool_line(tool)]
        parts += self._changes(tool)
        printed = [self._printed.pop(terminal_id, "") for terminal_id in tool.terminals]
        shown = "\n".join(filter(None, (text.strip("\n") for text in printed)))
        # Agents often repeat a terminal's output as text.
        if not shown and tool.kind not in KINDS_WITHOUT_TEXT:
            shown = tool.text
        if shown.strip():
            parts.append(_block(shown, MAX_OUTPUT_LINES))
        self._print(*parts, kind="tool")

    def output(self, terminal_id: str, text: str) -> None:
        self._printed[terminal_id] = self._printed.get(terminal_id, "") + text
        self._tick()

    def usage(self, used: int, size: int, cost: str) -> None:
        self._context = f"{used:,} of {size:,} tokens{f', {cost}' if cost else ''}"
        self._tick()

    def note(self, text: str) -> None:
        self._finish_text()
        self._print(Text(readable(text), "dim"), kind="note")

    def decided(self, question: Question, answer: str, *, allowed: bool, reason: str) -> None:
        self._finish_text()
        parts: list[RenderableType] = []
        given = Text.assemble(
            ("  →  ", "dim"),
            (readable(answer), "green" if allowed else "red"),
            (f"  ({as_line(reason)})" if reason else "", "dim"),
        )
        if reason:
            parts += self._changes(question.tool, with_title=True)
            given = Text.assemble(_headline(question), given)
        self._print(*parts, given, kind="tool")

    def suspend(self, question: Question) -> None:
        self._finish_text()
        tool = question.tool
        parts: list[RenderableType] = [_headline(question), *self._changes(tool)]
        if not tool.changes:
            parts += [
                Text(f"  {readable(relative(path, self._cwd))}", "dim")
                for path in tool.locations
                if path not in tool.name
            ]
        if tool.command and tool.command != tool.name:
            parts.append(Text(f"  $ {as_line(tool.command)}"))
        self._print(*parts, kind="tool")
        self._suspended = True
        self._stop_live()

    def resume(self) -> None:
        self._suspended = False
        self._tick()

    def end(self, lines: Sequence[tuple[bool | None, str]]) -> None:
        self._finish()
        table = Table.grid(padding=(0, 1))
        for good, text in lines:
            mark, style = (
                ("", "")
                if good is None
                else (_DONE, "bold green")
                if good
                else (_FAILED, "bold red")
            )
            table.add_row(Text(mark, style), Text(readable(text)))
        self._print(table, kind="end")

    def close(self) -> None:
        self._finish()
        self._suspended = True
        self._stop_live()

    # -- what is finished

    def _finish(self) -> None:
        self._finish_text()
        for tool in self._running.values():
            self._print(self._tool_line(tool), *self._changes(tool), kind="tool")
        self._running.clear()
        plan, self._plan = self._plan, ()
        if plan:
            self._print(_plan(plan), kind="plan")
        context, self._context = self._context, ""
        if context:
            self._print(Text(f"context: {context}", "dim"), kind="note")

    def _finish_text(self) -> None:
        self._finish_message()
        self._finish_thought()

    def _finish_message(self) -> None:
        rest = self._message.rest()
        if rest.strip():
            self._print(_markdown(rest), kind="message")

    def _finish_thought(self) -> None:
        rest = self._thought.rest()
        if rest.strip():
            self._print(_thought(rest), kind="thought")

    def _tool_line(self, tool: ToolView) -> Text:
        mark, style = {
            "completed": (_DONE, "green"),
            "failed": (_FAILED, "red"),
        }.get(tool.status, (_WAITING, "dim"))
        line = Text.assemble((f"{mark} ", style), (readable(tool.name), "bold"))
        line.append(f"  {tool.kind}", "cyan")
        for path in tool.locations[:3]:
            line.append(f"  {readable(relative(path, self._cwd))}", "dim")
        if tool.command and tool.command != tool.name:
            line.append(f"\n  $ {readable(tool.command)}", "dim")
        return line

    def _changes(self, tool: ToolView, *, with_title: bool = False) -> list[RenderableType]:
        if not tool.changes or self._shown_changes.get(tool.id) == tool.changes:
            return []
        self._shown_changes[tool.id] = tool.changes
        parts: list[RenderableType] = [self._tool_line(tool)] if with_title else []
        return [*parts, *(changes(change, self._cwd) for change in tool.changes)]

    def _print(self, *parts: RenderableType, kind: str) -> None:
        """Print for good, above what is going on; a blank line between different things."""
        blank = bool(self._last) and (self._last != kind or kind in {"message", "thought"})
        self._last = kind
        with contextlib.suppress(OSError, ValueError):
            self._console.print(*([""] if blank else []), *parts, sep="\n")

    # -- what is going on

    def _tick(self) -> None:
        """Draw soon, at most so often a second, for as long as something goes on."""
        if self._ticks is None and not self._suspended:
            self._ticks = asyncio.get_running_loop().call_later(1 / FRAMES_PER_SECOND, self._draw)

    def _draw(self) -> None:
        self._ticks = None
        if self._suspended:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                    get_renderable=self._going_on,
                )
                self._live.start()
            self._live.refresh()
        # The spinner turns while nothing else happens.
        self._tick()

    def _stop_live(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def _going_on(self) -> RenderableType:
        height = max(self._console.height - 2, 4)
        parts: list[RenderableType] = []
        room = height - 2 - len(self._plan)
        if self._thought.text.strip():
            parts += ["", _Tail(_thought(self._thought.text[-MAX_PREVIEW_CHARS:]), room)]
        if self._message.text.strip():
            text = self._message.text
            preview = _markdown(text) if len(text) <= MAX_PREVIEW_CHARS else Text(text[-4000:])
            parts += ["", _Tail(preview, room)]
        if self._running:
            parts.append("")
        for tool in list(self._running.values())[-5:]:
            parts.append(Spinner("dots", self._tool_line_running(tool), style="yellow"))
            for terminal_id in tool.terminals:
                text = self._printed.get(terminal_id, "")
                if text.strip():
                    parts.append(_block(text, 5))
        if self._plan:
            parts += ["", _plan(self._plan)]
        parts.append("")
        seconds = int(time.monotonic() - self._started)
        status = f"working  {seconds} s"
        if self._context:
            status += f"  {self._context}"
        status += "  Ctrl-C cancels"
        parts.append(Spinner("dots", Text(status, "dim"), style="dim"))
        return _Tail(Group(*parts), height)

    def _tool_line_running(self, tool: ToolView) -> Text:
        line = Text(readable(tool.name), "bold")
        line.append(f"  {tool.kind}", "cyan")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


class _Paragraphs:
    """Text that comes in pieces, given out in whole paragraphs; a fenced block is never cut."""

    def __init__(self) -> None:
        self.text = ""
        self._fence = ""
        # Everything before this was looked at already.
        self._seen = 0
        # The end of the last whole paragraph so far.
        self._cut = 0

    def feed(self, piece: str) -> list[str]:
        """Take a piece; the paragraphs that it completed."""
        self.text += piece
        while (end := self.text.find("\n", self._seen)) >= 0:
            line = self.text[self._seen : end].strip()
            self._seen = end + 1
            if self._fence:
                if line.startswith(self._fence) and not line.strip(self._fence[0]):
                    self._fence = ""
            elif line.startswith(("```", "~~~")):
                self._fence = line[:3]
            elif not line:
                self._cut = self._seen
        done, self.text = self.text[: self._cut], self.text[self._cut :]
        self._seen -= self._cut
        self._cut = 0
        return [done.strip("\n")] if done.strip() else []

    def rest(self) -> str:
        """What is left, taken out: whatever follows belongs to something else."""
        text = self.text.strip("\n")
        self.text, self._fence, self._seen, self._cut = "", "", 0, 0
        return text


class _Tail:
    """The last lines of something, at most so many: what grows is watched at its end."""

    def __init__(self, content: RenderableType, lines: int) -> None:
        self._content = content
        self._lines = max(lines, 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for number, line in enumerate(lines[-self._lines :]):
            if number:
                yield Segment.line()
            yield from line


class PleasantAsker:
    """Puts a question as a small menu: arrows or numbers, Enter; n and Escape say no."""

    async def choose(self, question: Question) -> str | None:
        """The chosen option's key, or None. Cancellable; leaves nothing of the menu behind."""
        forget_typed(sys.stdin.fileno())
        menu = _Menu(question)
        return await menu.application.run_async(handle_sigint=False, set_exception_handler=False)

    async def line(self, default: str, *, fresh: bool) -> str | None:
        """A line to edit, with `default` in it. None for Ctrl-D in an empty one, and for Ctrl-C."""
        if fresh:
            forget_typed(sys.stdin.fileno())
        keys = KeyBindings()
        keys.add("c-c", eager=True)(_interrupt)
        keys.add("c-d", eager=True)(_leave)
        session: PromptSession[str] = PromptSession(
            key_bindings=keys, output=_menu_output(), enable_open_in_editor=False
        )
        text: str | None = await session.prompt_async(
            "❯ ", default=readable(default), handle_sigint=False, set_exception_handler=False
        )
        return text

    def show(self, text: str, style: str = "") -> None:
        """Lines on standard error, one address on one line whatever the width."""
        console = Console(file=sys.stderr, highlight=False)
        with contextlib.suppress(OSError, ValueError):
            console.print(Text(readable(text), style), soft_wrap=True)


class _Menu:
    def __init__(self, question: Question) -> None:
        self._options = question.options
        self._at = 0
        keys = KeyBindings()
        for name in ("up", "k", "c-p", "s-tab"):
            keys.add(name)(self._up)
        for name in ("down", "j", "c-n", "tab"):
            keys.add(name)(self._down)
        for number in range(min(len(self._options), 9)):
            keys.add(str(number + 1))(self._take_numbered)
        keys.add("enter")(self._take)
        # Whoever types "n" and Enter by habit must not have taken what the marker stood at.
        for name in ("escape", "c-d", "n", "N"):
            keys.add(name, eager=True)(self._refuse)
        keys.add("c-c", eager=True)(_interrupt)
        self.application: Application[str | None] = Application(
            layout=Layout(Window(FormattedTextControl(self._lines, focusable=True), height=None)),
            key_bindings=keys,
            erase_when_done=True,
            output=_menu_output(),
        )
        # Escape is also how every arrow key begins; this is how long it may stand alone.
        self.application.ttimeoutlen = 0.1

    def _lines(self) -> FormattedText:
        lines: list[tuple[str, str]] = []
        for number, (_, name, kind) in enumerate(self._options):
            here = number == self._at
            colour = "ansigreen" if kind.startswith("allow") else "ansired"
            lines.append(("bold" if here else "", f" {'❯' if here else ' '} {number + 1}. "))
            lines.append((f"fg:{colour} {'bold' if here else ''}", readable(name)))
            lines.append(("", "\n"))
        lines.append(("fg:ansibrightblack", "   ↑ ↓ Enter, or a number; n or Esc says no"))
        return FormattedText(lines)

    def _up(self, event: KeyPressEvent) -> None:
        self._at = (self._at - 1) % max(len(self._options), 1)

    def _down(self, event: KeyPressEvent) -> None:
        self._at = (self._at + 1) % max(len(self._options), 1)

    def _take_numbered(self, event: KeyPressEvent) -> None:
        self._at = int(event.data) - 1
        self._take(event)

    def _take(self, event: KeyPressEvent) -> None:
        event.app.exit(result=self._options[self._at][0] if self._options else None)

    def _refuse(self, event: KeyPressEvent) -> None:
        event.app.exit(result=None)


def _interrupt(event: KeyPressEvent) -> None:
    # In this mode the key is no signal; the run has one handler for both.
    event.app.exit(result=None)
    signal.raise_signal(signal.SIGINT)


def _leave(event: KeyPressEvent) -> None:
    event.app.exit(result=None)


def _menu_output() -> Vt100_Output:
    def size() -> Size:
        try:
            columns, rows = os.get_terminal_size(sys.stderr.fileno())
        except (OSError, ValueError):
            columns, rows = 80, 24
        return Size(rows=rows or 24, columns=columns or 80)

    return Vt100_Output(
        sys.stderr,
        size,
        term=os.environ.get("TERM"),
        default_color_depth=ColorDepth.from_env(),  # NO_COLOR, which rich heeds by itself
        enable_cpr=False,  # not every terminal answers where the cursor is
    )


class StyledPaper:
    """The lines of a journal in colours, its agents' messages as Markdown (`_journal_page.Paper`)."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=False)

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line; where it is too long it goes on further right: the left edge is ours."""
        text = Text.assemble(*pieces)
        first, *more = text.wrap(self._console, self._console.width) or [Text()]
        self._print(first)
        if more:
            rest = text[len(first) :]
            for line in rest.wrap(self._console, max(self._console.width - 4, 8)):
                self._print(Padding(line, (0, 0, 0, 4)))

    def prose(self, text: str) -> None:
        """Markdown, indented by two."""
        shown = _markdown(text) if len(text) <= MAX_MARKDOWN_CHARS else Text(text)
        self._print(Padding(shown, (0, 0, 0, 2)))

    def piece(self, text: str, style: str) -> None:
        """As it comes."""
        self._print(Text(text, style), end="", soft_wrap=True)

    def _print(self, content: RenderableType, **how: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(content, **how)


def changes(change: FileChange, cwd: str) -> RenderableType:
    """One coloured diff."""
    path, *lines = change_lines(change, cwd, MAX_CHANGE_LINES)
    text = Text(no_wrap=True, overflow="ellipsis").append(readable(path), "bold")
    for line in lines:
        text.append(f"\n{readable(line)}", _CHANGE_STYLES.get(line[:1], "dim"))
    return Padding(text, (0, 0, 0, 2))


def _headline(question: Question) -> Text:
    return Text.assemble(("? ", "bold yellow"), (readable(question.headline), "yellow"))


def _plan(lines: Sequence[PlanLine]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        mark, mark_style, style = {
            "completed": (_DONE, "green", "dim"),
            "in_progress": (_NOW, "yellow", "bold"),
        }.get(line.status, (_WAITING, "dim", ""))
        table.add_row(Text(mark, mark_style), Text(readable(line.content), style))
    return table


def _thought(text: str) -> RenderableType:
    return Text(text, "dim italic")


def _markdown(text: str) -> RenderableType:
    # Without live links: what is shown is where it leads.
    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


def _block(text: str, limit: int) -> RenderableType:
    lines = readable(text).strip("\n").split("\n")
    shown = lines[-limit:]
    if len(lines) > limit:
        shown.insert(0, f"… {len(lines) - limit} lines before")
    return Padding(
        Text("\n".join(f"│ {line}" for line in shown), "dim", no_wrap=True, overflow="ellipsis"),
        (0, 0, 0, 2),
    )
