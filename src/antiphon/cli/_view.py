"""What a turn looks like from outside: updates folded into things that can be shown.

A display (`_plain`, `_pleasant`) is told of messages, plans and tool calls as they are *now*; here is
the way there. It believes no agent to be tidy: a tool call may be announced twice, never, or only by
the permission request about it (quirks 14, 15; `antiphon.SessionView` puts it together), and a
terminal may be one that nobody here started (quirk 22). Colours, lines and windows are the display's business.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from antiphon import SessionView
from antiphon.cli._output import as_line
from antiphon.schema import v1_unstable as v1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon import ToolCallView, Update

__all__ = [
    "Display",
    "FileChange",
    "PlanLine",
    "Question",
    "ToolView",
    "View",
    "block_text",
    "display_only_output",
    "tool_view",
]


class FileChange(msgspec.Struct, frozen=True):
    """One diff of a tool call; `old` is None for a new file."""

    path: str
    old: str | None
    new: str


class PlanLine(msgspec.Struct, frozen=True):
    """One entry of the plan; status and priority as on the wire."""

    content: str
    status: str
    priority: str


class ToolView(msgspec.Struct, kw_only=True):
    """A tool call as it is now, put together from everything that was said about it."""

    id: str
    title: str = ""
    kind: str = "other"
    status: str = "pending"
    locations: tuple[str, ...] = ()
    changes: tuple[FileChange, ...] = ()
    terminals: tuple[str, ...] = ()
    text: str = ""
    command: str = ""

    @property
    def is_over(self) -> bool:
        """Completed or failed."""
        return self.status in {"completed", "failed"}

    @property
    def name(self) -> str:
        """The title, or what stands in for one that was never given."""
        return self.title or self.command or self.id


_HEADS = {
    "read": "The agent wants to read",
    "write": "The agent wants to write",
    "execute": "The agent wants to run",
}


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has to be decided before the agent may go on.

    `kind` is "permission" (the agent asks), "read", "write" or "execute" (it is about to do it).
    """

    kind: str
    tool: ToolView
    #: (key, label, wire kind) of each choice; the wire kind tells allowing from rejecting.
    options: tuple[tuple[str, str, str], ...]
    #: Why it is asked, where that is not the usual case.
    why: str = ""

    @property
    def headline(self) -> str:
        """The question in one line."""
        why = f" ({as_line(self.why)})" if self.why else ""
        return f"{_HEADS.get(self.kind, 'The agent asks')}: {self.subject}{why}"

    @property
    def subject(self) -> str:
        """What it is about, in one line."""
        return as_line(self.tool.name)


class Display(Protocol):
    """What shows a turn. Called on the event loop, in the order of the wire; must not raise."""

    def begin(self, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
        """The run starts: a heading and (label, value) lines."""

    def message(self, text: str) -> None:
        """The next piece of the agent's text."""

    def thought(self, text: str) -> None:
        """The next piece of its reasoning."""

    def plan(self, lines: Sequence[PlanLine]) -> None:
        """The whole plan as it is now."""

    def tool(self, tool: ToolView) -> None:
        """A tool call began or changed."""

    def output(self, terminal_id: str, text: str) -> None:
        """The next piece of what a terminal printed."""

    def usage(self, used: int, size: int, cost: str) -> None:
        """How full the context is; `cost` is "" or an amount with its currency."""

    def note(self, text: str) -> None:
        """One line about anything else."""

    def decided(self, question: Question, answer: str, *, allowed: bool, reason: str) -> None:
        """A question was answered; `reason` says by what ("--permissions deny"), "" by a person."""

    def suspend(self, question: Question) -> None:
        """Show what a person is about to be asked, then leave the terminal alone until `resume`."""

    def resume(self) -> None:
        """Something goes on, at the agent's, from here: a turn begins, or `suspend` is undone."""

    def end(self, lines: Sequence[tuple[bool | None, str]]) -> None:
        """The run is over: (good, bad or neither; text) lines."""

    def close(self) -> None:
        """Give the terminal back. Idempotent."""


class View:
    """The way from an update to the display; what tool calls add up to, a `SessionView` knows."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self._sessions: dict[str, SessionView] = {}
        # The message whose chunks come now, None between messages; and how the last one ended.
        self._message: tuple[str, str] | None = None
        self._named: tuple[str, str] | None = None
        self._last_text = ""

    def show(self, update: Update) -> None:
        """Fold one update in and show what it changed."""
        display, value = self.display, update.value
        match value:
            case v1.AgentMessageChunk():
                self._show_message(update.session_id, value)
            case v1.AgentThoughtChunk():
                self._message = None
                display.thought(block_text(value.content))
            case v1.ToolCall() | v1.ToolCallUpdate():
                self._message = None
                display.tool(self.fold(update.session_id, value))
                for terminal_id, text in display_only_output(value.meta):
                    display.output(terminal_id, text)
            case v1.Plan():
                display.plan([PlanLine(e.content, e.status, e.priority) for e in value.entries])
            case v1.UsageUpdate():
                cost = value.cost
                amount = f"{cost.amount:g} {cost.currency}" if isinstance(cost, v1.Cost) else ""
                display.usage(value.used, value.size, amount)
            case v1.CurrentModeUpdate():
                display.note(f"mode: {value.current_mode_id}")
            case v1.Notice():
                display.note(": ".join(filter(None, (value.severity, value.title))))
            case (
                v1.UserMessageChunk()
                | v1.SessionInfoUpdate()
                | v1.ConfigOptionUpdate()
                | v1.AvailableCommandsUpdate()
            ):
                # Nothing that somebody who watches one turn could use.
                pass
            case _:
                display.note(f"update: {update.kind}")

    def _show_message(self, session_id: str, chunk: v1.AgentMessageChunk) -> None:
        """A chunk of text; a line end in front where it begins another message.

        Chunks belong together while nothing else comes between them or they name the same message
        (acp-v1 §6). Without the line end, "Reading." and "Editing." would be one word.
        """
        text = block_text(chunk.content)
        if not text:
            return
        named = isinstance(chunk.message_id, str)
        message = (session_id, str(chunk.message_id) if named else "")
        goes_on = message == self._message or (named and message == self._named)
        if not goes_on and self._last_text and not (self._last_text[-1:] + text[:1]).count("\n"):
            self.display.message("\n")
        self._message = message
        self._named = message if named else None
        self._last_text = text
        self.display.message(text)

    def fold(self, session_id: str, call: v1.ToolCall | v1.ToolCallUpdate) -> ToolView:
        """What is known of a tool call now that `call` says this about it."""
        return tool_view(self.known(session_id, call))

    def known(self, session_id: str, call: v1.ToolCall | v1.ToolCallUpdate) -> ToolCallView:
        """The same as the library keeps it, with everything that a policy looks at."""
        view = self._sessions.get(session_id)
        if view is None:
            view = self._sessions[session_id] = SessionView()
        return view.apply_tool_call(call)


def tool_view(tool: ToolCallView) -> ToolView:
    """What is shown of a tool call as the library knows it."""
    changes: list[FileChange] = []
    terminals: list[str] = []
    text: list[str] = []
    for item in tool.content:
        match item:
            case v1.Diff():
                old = item.old_text if isinstance(item.old_text, str) else None
                changes.append(FileChange(item.path, old, item.new_text))
            case v1.Terminal():
                terminals.append(item.terminal_id)
            case v1.Content():
                text.append(block_text(item.content))
            case _:
                pass
    return ToolView(
        id=tool.tool_call_id,
        title=tool.title,
        kind=tool.kind,
        status=tool.status,
        locations=tuple(_location(location) for location in tool.locations),
        changes=tuple(changes),
        terminals=tuple(terminals),
        text="\n".join(text),
        command=_command(tool.raw_input),
    )


def block_text(block: object) -> str:
    """The text of a content block, or a few words in its place."""
    match block:
        case v1.TextContent():
            return block.text
        case v1.ResourceLink():
            return f"[{block.name}]({block.uri})"
        case v1.ImageContent() | v1.AudioContent():
            return f"[{block.mime_type}, {len(block.data) * 3 // 4:,} bytes]"
        case v1.EmbeddedResource():
            return f"[{block.resource.uri}]"
        case _:
            return ""


def _location(location: v1.ToolCallLocation) -> str:
    line = location.line
    return f"{location.path}:{line}" if isinstance(line, int) and line else location.path


def _command(raw_input: Any) -> str:
    """The command line in a tool's own input, whose shape the protocol leaves open."""
    match raw_input:
        case {"command": str(line)}:
            return line
        case {"command": [*words]} if all(isinstance(word, str) for word in words):
            return shlex.join(words)
        case _:
            return ""


def display_only_output(meta: Any) -> list[tuple[str, str]]:
    """Output of a terminal that the agent runs itself and streams in `_meta` (quirk 22)."""
    match meta:
        case {"terminal_output": {"terminal_id": str(terminal_id), "data": str(data)}}:
            return [(terminal_id, data)]
        case _:
            return []
