"""What a user sees of a session now, folded from its updates.

`SessionView` takes one update after the other and keeps the state they add up to: messages, tool
calls, plan, mode, commands, options, usage, title. It is a fold and nothing else: no connection, no
clock, no display. In which order updates come, and where one turn ends, is `_inbox`'s and `_session`'s
to say; how it looks is the user interface's.

The cost of an update does not depend on what is there already: ids are looked up, and a message's
text is appended to, never joined again.
"""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from antiphon.schema import UNSET, UnknownUpdate, UnsetType, v1, v1_unstable
from antiphon.sessions._update import Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.schema.v1_unstable import SessionUpdate
    from antiphon.sessions._update import Label

__all__ = ["CompactionView", "MessageView", "SessionView", "ToolCallView"]

#: Statuses of a tool call that it does not end with.
_UNFINISHED = ("pending", "in_progress")


class MessageView:
    """One message, put together from its chunks.

    Attributes:
        kind: "agent", "user" or "thought"; "session" for one between sessions (unstable).
        message_id: the agent's id for it, None where it gives none.
        info: of a message between sessions: the update that announced it, with its senders.
    """

    __slots__ = ("_parts", "info", "kind", "message_id", "sent_here")

    def __init__(self, kind: str, message_id: str | None = None) -> None:
        self.kind = kind
        self.message_id = message_id
        self.info: v1_unstable.SessionMessage | None = None
        # Text of consecutive plain chunks in one buffer: appending costs what is appended, and both
        # ends are single operations of the interpreter, so that other threads may read meanwhile.
        self._parts: list[StringIO | v1.ContentBlock] = []
        #: Whether it is a prompt that was sent here, and not repeated by the agent.
        self.sent_here = False

    def __repr__(self) -> str:
        return f"MessageView({self.kind!r}, {self.message_id!r}, {self.text!r})"

    @property
    def text(self) -> str:
        """Its text; blocks of other kinds have none. Costs as much as the text is long."""
        return "".join(
            part.getvalue() if isinstance(part, StringIO) else str(getattr(part, "text", ""))
            for part in tuple(self._parts)
        )

    @property
    def blocks(self) -> list[v1.ContentBlock]:
        """Its content: plain text chunks that follow each other are one block."""
        return [
            v1.TextContent(text=part.getvalue()) if isinstance(part, StringIO) else part
            for part in tuple(self._parts)
        ]

    def add(self, block: v1.ContentBlock) -> None:
        """Append a chunk's block; for the view."""
        parts = self._parts
        if isinstance(block, v1.TextContent) and not block.annotations and not block.meta:
            last = parts[-1] if parts else None
            if not isinstance(last, StringIO):
                # Lines end as the agent says.
                last = StringIO(newline="")
                last.write(block.text)
                parts.append(last)
            else:
                last.write(block.text)
        else:
            parts.append(block)

    def replace(self, blocks: Sequence[v1.ContentBlock]) -> None:
        """Put other content in place of what there is; for the view."""
        self._parts = []
        for block in blocks:
            self.add(block)


class ToolCallView(msgspec.Struct, kw_only=True, eq=False):
    """A tool call, put together from everything that was said about it.

    Attributes:
        tool_call_id: its id.
        title: "" until one was given: permission may be asked for a call that was not announced.
        name: of the tool, where the agent says it.
        kind: "other" until given.
        status: as on the wire; "pending" until given.
        content: what it shows, as last given.
        locations: the files it is about, as last given.
        raw_input: the tool's own parameters, None until given.
        raw_output: the tool's own result, None until given.
        terminals: ids of all terminals ever embedded in it, in their order, also those that a later
            content has left out.
        cancelled: the turn was cancelled before it came to its end (R1-93).
        meta: the newest `_meta` of an update about it, if there was one.
    """

    tool_call_id: str
    title: str = ""
    name: str | None = None
    kind: str = "other"
    status: str = "pending"
    content: list[v1.ToolCallContent] = []
    locations: list[v1.ToolCallLocation] = []
    raw_input: Any = None
    raw_output: Any = None
    terminals: list[str] = []
    cancelled: bool = False
    meta: dict[str, Any] | None = None
    # The same ids, to look them up. Most calls embed none, and a view keeps every call.
    _embedded: set[str] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected: completed, failed, or cancelled here."""
        return self.cancelled or self.status not in _UNFINISHED

    @property
    def state(self) -> str:
        """What to show: the status, or "cancelled"."""
        return "cancelled" if self.cancelled else self.status

    def patch(self, call: v1.ToolCall | v1.ToolCallUpdate) -> None:
        """Absent and null both mean "as before"; a list replaces the whole list (R1-102)."""
        for name in ("title", "name", "kind", "status"):
            value = getattr(call, name)
            if isinstance(value, str):
                setattr(self, name, value)
        if isinstance(call.content, list):
            self.content = call.content
            for item in call.content:
                if isinstance(item, v1.Terminal):
                    self._embeds(item.terminal_id)
        if isinstance(call.locations, list):
            self.locations = call.locations
        for name in ("raw_input", "raw_output", "meta"):
            value = getattr(call, name)
            if value is not UNSET and value is not None:
                setattr(self, name, value)

    def _embeds(self, terminal_id: str) -> None:
        if self._embedded is None:
            self._embedded = set()
        if terminal_id not in self._embedded:
            self._embedded.add(terminal_id)
            self.terminals.append(terminal_id)


class CompactionView:
    """The shortening of a session's history, as far as it is known.

    Attributes:
        compaction_id: its id.
        status: as on the wire; "in_progress" until given.
        error: why it failed, if the agent says so.
    """

    __slots__ = ("_summary", "compaction_id", "error", "status")

    def __init__(self, compaction_id: str) -> None:
        self.compaction_id = compaction_id
        self.status = "in_progress"
        self.error: str | None = None
        self._summary = MessageView("summary")

    def __repr__(self) -> str:
        return f"CompactionView({self.compaction_id!r}, {self.status!r})"

    @property
    def summary(self) -> list[v1.ContentBlock]:
        """What the history was shortened to."""
        return self._summary.blocks

    def patch(self, update: v1.CompactionUpdate) -> None:
        """Absent keeps, null clears, a value replaces."""
        self.status = update.status
        if not isinstance(update.summary, UnsetType):
            self._summary.replace(update.summary or ())
        if not isinstance(update.error, UnsetType):
            self.error = update.error

    def add(self, block: v1.ContentBlock) -> None:
        """Append a chunk's block to the summary; for the view."""
        self._summary.add(block)


Entry: TypeAlias = MessageView | ToolCallView | CompactionView | v1.Notice


class SessionView:
    """The state that a session's updates add up to: `session.view`, or `SessionView()` of one's own.

    All of it is live: it changes as updates come. From another thread than the one that folds (as in
    `antiphon.sync`), copy a list or dictionary before a loop over it.

    Attributes:
        entries: what a transcript shows, in order of its first appearance: messages (the prompts sent
            here too), tool calls, notices, compactions. The plan is not in it: it has no place but
            the newest.
        tool_calls: the tool calls among them, by id.
        plan: the newest plan (R1-88); empty if there was none.
        plans: plans with ids (unstable): the newest content of each.
        commands: the commands that may be used now.
        mode: id of the current mode; None where none was said.
        config_options: all options as they are now; None where none were said.
        usage: tokens and cost as last reported.
        title: of the session: UNSET until the agent says one, None after it was cleared.
        updated_at: when it last changed, as the agent writes it; UNSET and None as for `title`.
        subagents: sessions that this one has started (unstable), by id, patched together.
        unknown: updates of no known kind, or that did not decode, as they came.
        revision: counts the changes; two equal ones mean that nothing happened in between.
    """

    def __init__(self) -> None:
        self.commands: list[v1.AvailableCommand] = []
        self.mode: str | None = None
        self.config_options: list[v1_unstable.SessionConfigOption] | None = None
        self.usage: v1.UsageUpdate | None = None
        self.title: str | None | UnsetType = UNSET
        self.updated_at: str | None | UnsetType = UNSET
        self.subagents: dict[str, v1_unstable.SubagentUpdate] = {}
        self.unknown: list[UnknownUpdate] = []
        self.revision = 0
        self._clear_transcript()
        self._label: Label = "session"
        self._replayed_again = False
        self._resuming = False
        self._cancelling = False

    def _clear_transcript(self) -> None:
        self.entries: list[Entry] = []
        self.tool_calls: dict[str, ToolCallView] = {}
        self._messages: dict[tuple[str, str], MessageView] = {}
        self._compactions: dict[str, CompactionView] = {}
        self._unfinished: dict[str, ToolCallView] = {}
        self.plan: list[v1.PlanEntry] = []
        self.plans: dict[str, v1_unstable.PlanUpdateContent] = {}
        # The message without an id that the next chunk of its kind belongs to.
        self._open: MessageView | None = None

    def __repr__(self) -> str:
        return f"<SessionView: {len(self.entries)} entries, revision {self.revision}>"

    @property
    def messages(self) -> list[MessageView]:
        """The messages among the entries."""
        return [entry for entry in tuple(self.entries) if isinstance(entry, MessageView)]

    # -------------------------------------------------------------- what happens

    def apply(self, update: Update | SessionUpdate) -> Entry | None:
        """Fold one update in; returns the entry that it changed, None if it is about none."""
        if isinstance(update, Update):
            label, value = update.label, update.value
            if label != self._label:
                self._label_changed(label)
        else:
            value = update
        self.revision += 1
        match value:
            case v1.AgentMessageChunk():
                return self._fold_chunk("agent", value)
            case v1.AgentThoughtChunk():
                return self._fold_chunk("thought", value)
            case v1.ToolCall() | v1.ToolCallUpdate():
                return self._fold_tool_call(value)
            case v1.UserMessageChunk():
                return self._fold_chunk("user", value)
            case v1.Notice():
                return self._fold_notice(value)
            case v1.CompactionUpdate():
                compaction = self._compaction(value.compaction_id)
                compaction.patch(value)
                return compaction
            case v1.CompactionSummaryChunk():
                compaction = self._compaction(value.compaction_id)
                compaction.add(value.content)
                return compaction
            case v1_unstable.SessionMessage():
                return self._fold_session_message(value)
            case v1_unstable.SessionMessageChunk():
                message = self._session_message(value.message_id)
                message.add(value.content)
                return message
            case _:
                self._fold_state(value)
                return None

    def apply_tool_call(self, call: v1.ToolCall | v1.ToolCallUpdate) -> ToolCallView:
        """Fold in what anything says about a tool call, e.g. a permission request (quirk 14)."""
        self.revision += 1
        self._open = None
        return self._fold_tool_call(call)

    def begin_turn(self, prompt: Sequence[v1.ContentBlock] = ()) -> None:
        """A prompt is sent: it is the user's next message, unless the agent repeats it at once."""
        self.revision += 1
        self._label, self._cancelling = "turn", False
        self._open = None
        if prompt:
            message = MessageView("user")
            message.replace(prompt)
            message.sent_here = True
            self.entries.append(message)
            self._open = message

    def cancel_turn(self) -> None:
        """`session/cancel` is sent: tool calls that are not finished are cancelled (R1-93).

        So is one that begins before the turn has ended. What still is reported as completed or failed
        is that.
        """
        self.revision += 1
        self._cancelling = True
        for call in self._unfinished.values():
            call.cancelled = True

    def end_turn(self, stop_reason: str | None = None) -> None:
        """The prompt is answered; "cancelled" marks what `cancel_turn` does."""
        if stop_reason == "cancelled":
            self.cancel_turn()
        self.revision += 1
        self._label, self._cancelling = "session", False

    def begin_load(self) -> None:
        """The history is about to be replayed: its first part takes the place of the transcript."""
        self._replayed_again = True
        self._label_changed("replay")

    def begin_resume(self) -> None:
        """No history should come, but some agents send it: then it begins with the user's message."""
        self._resuming = True
        self._label_changed("replay")

    def end_load(self) -> None:
        """It was replayed; where nothing came, the transcript is what it was."""
        self._replayed_again = self._resuming = False

    @property
    def _replaced(self) -> bool:
        """Whether what is in the transcript is about to be replaced."""
        return self._replayed_again and self._label == "replay"

    def _label_changed(self, label: Label) -> None:
        # A turn that ended keeps its last message open: some agents send the tail behind the answer.
        if label != "session" or self._label == "replay":
            self._open = None
        self._label = label

    # -------------------------------------------------------------- folding

    def _fold_chunk(self, kind: str, chunk: v1.ContentChunk) -> MessageView:
        if self._resuming:
            self._resuming, self._replayed_again = False, kind == "user"
        message_id = chunk.message_id if isinstance(chunk.message_id, str) else None
        last = self._open
        if last is not None and last.sent_here and last is self.entries[-1] and kind == "user":
            # The agent's copy of the prompt.
            last.sent_here = False
            last.replace([chunk.content])
            last.message_id = message_id
            if message_id is not None:
                self._messages[kind, message_id] = last
                self._open = None
            return last
        message: MessageView | None
        if message_id is not None:
            message = self._messages.get((kind, message_id))
            self._open = None
            if message is None or self._replaced:
                message = self._messages[kind, message_id] = self._begin_message(kind, message_id)
        else:
            message = last
            if message is None or message.kind != kind or self._replaced:
                message = self._open = self._begin_message(kind, None)
        message.add(chunk.content)
        return message

    def _begin_message(self, kind: str, message_id: str | None) -> MessageView:
        self._transcript_begins()
        message = MessageView(kind, message_id)
        self.entries.append(message)
        return message

    def _transcript_begins(self) -> None:
        if self._replaced:
            self._replayed_again = False
            self._clear_transcript()

    def _fold_tool_call(self, call: v1.ToolCall | v1.ToolCallUpdate) -> ToolCallView:
        """Create or patch: an update may come first, and an announcement twice (quirk 15)."""
        self._open = None
        self._resuming = False
        id_ = call.tool_call_id
        tool = self.tool_calls.get(id_)
        if tool is None or self._replaced:
            self._transcript_begins()
            tool = self.tool_calls[id_] = ToolCallView(tool_call_id=id_)
            self.entries.append(tool)
        tool.patch(call)
        if tool.status not in _UNFINISHED:
            tool.cancelled = False
            self._unfinished.pop(id_, None)
        else:
            # One that goes on after the turn that was cancelled is at work again.
            if self._cancelling:
                tool.cancelled = True
            elif isinstance(call.status, str):
                tool.cancelled = False
            self._unfinished[id_] = tool
        return tool

    def _fold_state(self, value: SessionUpdate) -> None:
        """What has no place among the entries; only a plan stands between two messages."""
        match value:
            case v1.Plan():
                self._open = None
                self.plan = value.entries
            case v1_unstable.PlanUpdate():
                self._open = None
                self.plans[value.plan.plan_id] = value.plan
            case v1_unstable.PlanRemoved():
                self.plans.pop(value.plan_id, None)
            case v1.AvailableCommandsUpdate():
                self.commands = value.available_commands
            case v1.CurrentModeUpdate():
                self.mode = value.current_mode_id
            case v1.ConfigOptionUpdate():
                self.config_options = list(value.config_options)
            case v1.SessionInfoUpdate():
                # Absent keeps, null clears.
                if not isinstance(value.title, UnsetType):
                    self.title = value.title
                if not isinstance(value.updated_at, UnsetType):
                    self.updated_at = value.updated_at
            case v1.UsageUpdate():
                self.usage = value
            case v1_unstable.SubagentUpdate():
                self._fold_subagent(value)
            case UnknownUpdate():
                self.unknown.append(value)
            case _:
                pass  # entries, which `apply` has taken

    def _fold_notice(self, notice: v1.Notice) -> v1.Notice:
        self._transcript_begins()
        self._open = None
        self.entries.append(notice)
        return notice

    def _compaction(self, compaction_id: str) -> CompactionView:
        """The first that is said about one fixes its place (acp-v1 §22)."""
        self._open = None
        compaction = self._compactions.get(compaction_id)
        if compaction is None or self._replaced:
            self._transcript_begins()
            compaction = self._compactions[compaction_id] = CompactionView(compaction_id)
            self.entries.append(compaction)
        return compaction

    def _fold_subagent(self, update: v1_unstable.SubagentUpdate) -> None:
        known = self.subagents.get(update.session_id)
        if known is not None:
            given = {
                name: value
                for name in update.__struct_fields__
                if (value := getattr(update, name)) is not UNSET
            }
            update = msgspec.structs.replace(known, **given)
        self.subagents[update.session_id] = update

    def _session_message(self, message_id: str) -> MessageView:
        self._open = None
        message = self._messages.get(("session", message_id))
        if message is None or self._replaced:
            message = self._begin_message("session", message_id)
            self._messages["session", message_id] = message
        return message

    def _fold_session_message(self, update: v1_unstable.SessionMessage) -> MessageView:
        message = self._session_message(update.message_id)
        message.info = update
        if not isinstance(update.content, UnsetType):
            message.replace(update.content or ())
        return message
