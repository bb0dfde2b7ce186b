"""What a session's records tell, folded into parts that a person reads one after the other.

Messages are put together from their chunks and tool calls from all that was said about them, by the
same fold as for a live session (`antiphon.SessionView`); turns get a beginning and an end. Where records
come from is `_journal`'s business, how parts look `_journal_page`'s. A journal is believed as little as
an agent: turns may lack either end, kinds may be unknown, payloads may be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from antiphon import SessionView, ToolCallView, journal
from antiphon.cli._view import PlanLine, ToolView, block_text, display_only_output, tool_view
from antiphon.schema import UnknownUpdate, decode_update, encode, loads
from antiphon.schema import v1_unstable as v1

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.journal import Record

__all__ = [
    "Change",
    "Note",
    "Part",
    "PlanPart",
    "Said",
    "Story",
    "ToolPart",
    "TurnBegin",
    "TurnEnd",
]

#: Characters of a payload of an unknown kind that are shown.
_MAX_PAYLOAD = 300


class TurnBegin(msgspec.Struct, frozen=True, kw_only=True):
    """A turn started; `number` is the writer's own, None where it gave none."""

    offset: int
    ts: int
    number: int | None


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A turn ended, or there is no more to tell of it.

    Attributes:
        offset: of the record that says so; where there is none, of the last one before.
        ts: when that was, in milliseconds since 1970.
        number: the turn's.
        how: why it ended, in words: the stop reason, the error, or that it was orphaned.
        good: whether it ended by itself and well; None for what is neither.
        seconds: how long it took, None where its beginning is not known.
        updates: how many updates it had, as far as they were read.
        context: how full the context was at last, "" where nothing was said.
    """

    offset: int
    ts: int
    number: int | None
    how: str
    good: bool | None
    seconds: float | None
    updates: int
    context: str


class Said(msgspec.Struct, kw_only=True, eq=False):
    """A message; `who` is "user", "agent", "thought" or "session"."""

    offset: int
    ts: int
    who: str
    pieces: list[str]

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class ToolPart(msgspec.Struct, kw_only=True, eq=False):
    """A tool call as it is now; `status` may also be "cancelled". `printed` came from its terminals."""

    offset: int
    ts: int
    tool: ToolView
    printed: list[str]


class PlanPart(msgspec.Struct, kw_only=True, eq=False):
    """The plan as it is now."""

    offset: int
    ts: int
    lines: list[PlanLine]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One line about anything else."""

    offset: int
    ts: int
    text: str


Part: TypeAlias = TurnBegin | TurnEnd | Said | ToolPart | PlanPart | Note


class Change(msgspec.Struct, frozen=True):
    """What a record did.

    Attributes:
        part: the part that it began or changed.
        new: whether it began it.
        piece: of a message, what was added.
    """

    part: Part
    new: bool = True
    piece: str = ""


class Story:
    """The fold; `add` takes the records in order, `parts` gives those of `show` in theirs.

    What is kept does not grow with the session, only with its longest turn.
    """

    def __init__(self) -> None:
        self._view = SessionView()
        self._parts: list[Part] = []
        self._by_entry: dict[int, tuple[Any, Part]] = {}
        self._plan: PlanPart | None = None
        self._turn: TurnBegin | None = None
        self._updates = 0
        self._context = ""
        self._last: Record | None = None

    @property
    def turn_is_open(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._turn is not None

    def add(self, record: Record) -> list[Change]:
        """Fold one record in; what that changed."""
        changes = list(self._fold(record))
        self._last = record
        for change in changes:
            if change.new and not isinstance(change.part, PlanPart):
                self._parts.append(change.part)
        return changes

    def take(self) -> list[Part]:
        """The parts that will not change any more, each once: those up to the end of a turn."""
        return [] if self._turn is not None else self._let_go()

    def rest(self) -> list[Part]:
        """What is left at the end of what is to be told; a turn that is open stays without an end."""
        if self._plan is not None:
            self._parts.append(self._plan)
            self._plan = None
        return self._let_go()

    def _let_go(self) -> list[Part]:
        parts, self._parts = self._parts, []
        self._by_entry.clear()
        return parts

    # -- records

    def _fold(self, record: Record) -> Iterator[Change]:
        match record.kind:
            case journal.SESSION_UPDATE:
                self._updates += 1
                yield from self._fold_update(record, _update(record.payload))
            case journal.TURN_STARTED:
                yield from self._begin(record, _object(record))
            case journal.TURN_COMPLETED:
                yield from self._complete(record, _object(record))
            case journal.STEER:
                yield from self._steer(record, _object(record))
            case journal.SESSION_CREATED if record.offset == 1:
                pass
            case _:
                yield Change(_note(record, f"record: {record.kind} {_cut(record.payload)}"))

    def _begin(self, record: Record, payload: dict[str, Any]) -> Iterator[Change]:
        if self._turn is not None:
            yield from self._end(self._last or record, "never completed", good=False)
        number = _number(payload)
        self._turn = TurnBegin(offset=record.offset, ts=record.ts, number=number)
        self._updates, self._context = 0, ""
        self._view.begin_turn()
        yield Change(self._turn)
        prompt = payload.get("prompt")
        if isinstance(prompt, list):
            blocks: list[Any] = prompt  # pyright: ignore[reportUnknownVariableType]
            for block in blocks:
                chunk = {"sessionUpdate": "user_message_chunk", "content": block}
                yield from self._fold_update(record, _update(encode(chunk)))

    def _complete(self, record: Record, payload: dict[str, Any]) -> Iterator[Change]:
        stop, error = payload.get("stopReason"), payload.get("error")
        good: bool | None = None
        if payload.get("outcome") == "orphaned":
            how, good = "orphaned: whoever worked on it had gone; nothing more came of it", False
        elif isinstance(error, dict):
            code, message = error.get("code"), error.get("message")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            how, good = f"failed: {message} ({code})", False
        else:
            how = stop if isinstance(stop, str) else "completed"
            good = True if how == "end_turn" else None
        number = _number(payload)
        yield from self._end(record, how, good=good, number=number, stop=stop)

    def _end(
        self,
        record: Record,
        how: str,
        *,
        good: bool | None,
        number: int | None = None,
        stop: object = None,
    ) -> Iterator[Change]:
        begun, self._turn = self._turn, None
        self._view.end_turn(stop if isinstance(stop, str) else None)
        for entry, part in self._by_entry.values():
            if isinstance(entry, ToolCallView) and isinstance(part, ToolPart):
                part.tool.status = entry.state
        if self._plan is not None:
            self._parts.append(self._plan)
            self._plan = None
        yield Change(
            TurnEnd(
                offset=record.offset,
                ts=record.ts,
                number=number if begun is None else begun.number,
                how=how,
                good=good,
                seconds=None if begun is None else (record.ts - begun.ts) / 1000,
                updates=self._updates,
                context=self._context,
            )
        )
        self._updates, self._context = 0, ""
        # What comes later is a part of its own; calls that go on are patched further.
        self._by_entry.clear()
        self._view.entries.clear()
        calls = self._view.tool_calls
        for id_ in [id_ for id_, call in calls.items() if call.is_over]:
            del calls[id_]

    def _steer(self, record: Record, payload: dict[str, Any]) -> Iterator[Change]:
        inner = payload.get("payload")
        text = inner.get("text") if isinstance(inner, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        text = text if isinstance(text, str) else ""
        yield Change(
            Said(offset=record.offset, ts=record.ts, who="steer", pieces=[text]), piece=text
        )

    # -- updates

    def _fold_update(
        self, record: Record, value: v1.SessionUpdate | UnknownUpdate
    ) -> Iterator[Change]:
        entry = self._view.apply(value)
        match value:
            case (
                v1.AgentMessageChunk()
                | v1.AgentThoughtChunk()
                | v1.UserMessageChunk()
                | v1.SessionMessageChunk()
            ):
                yield from self._say(record, entry, _piece(value.content))
            case v1.SessionMessage():
                content = value.content if isinstance(value.content, list) else []
                yield from self._say(record, entry, "".join(map(_piece, content)))
            case v1.ToolCall() | v1.ToolCallUpdate():
                assert isinstance(entry, ToolCallView)
                yield self._tool(record, entry, value.meta)
            case v1.Plan():
                lines = [PlanLine(e.content, e.status, e.priority) for e in value.entries]
                new = self._plan is None
                self._plan = PlanPart(offset=record.offset, ts=record.ts, lines=lines)
                yield Change(self._plan, new)
            case v1.UsageUpdate():
                cost = value.cost
                amount = f", {cost.amount:g} {cost.currency}" if isinstance(cost, v1.Cost) else ""
                self._context = f"{value.used:,} of {value.size:,} tokens{amount}"
            case v1.AvailableCommandsUpdate():
                names = ", ".join(f"/{command.name}" for command in value.available_commands)
                yield Change(_note(record, f"commands: {names or 'none'}"))
            case v1.CurrentModeUpdate():
                yield Change(_note(record, f"mode: {value.current_mode_id}"))
            case v1.ConfigOptionUpdate():
                yield Change(_note(record, f"options: {_options(value.config_options)}"))
            case v1.SessionInfoUpdate():
                if isinstance(value.title, str):
                    yield Change(_note(record, f"title: {value.title}"))
            case v1.Notice():
                about = [value.severity, value.title, value.description]
                text = ": ".join(part for part in about if isinstance(part, str) and part)
                yield Change(_note(record, f"notice: {text}"))
            case v1.CompactionUpdate():
                yield Change(_note(record, f"history shortened: {value.status}"))
            case v1.CompactionSummaryChunk():
                pass
            case UnknownUpdate():
                yield Change(_note(record, f"an update of no known kind: {_cut(value.raw)}"))
            case _:
                tag = type(value).__struct_config__.tag
                yield Change(_note(record, f"update: {tag}"))

    def _say(self, record: Record, entry: Any, piece: str) -> Iterator[Change]:
        if not piece:
            return
        known = self._by_entry.get(id(entry))
        if known is not None and isinstance(known[1], Said):
            part = known[1]
            if piece.startswith("\n") and part.pieces and part.pieces[-1].endswith("\n"):
                piece = piece[1:]
            part.pieces.append(piece)
            yield Change(part, new=False, piece=piece)
            return
        part = Said(offset=record.offset, ts=record.ts, who=entry.kind, pieces=[piece])
        self._by_entry[id(entry)] = entry, part
        yield Change(part, piece=piece)

    def _tool(self, record: Record, entry: ToolCallView, meta: Any) -> Change:
        tool = tool_view(entry)
        tool.status = entry.state
        printed = [text for _, text in display_only_output(meta)]
        known = self._by_entry.get(id(entry))
        if known is not None and isinstance(known[1], ToolPart):
            known[1].tool = tool
            known[1].printed += printed
            return Change(known[1], new=False)
        part = ToolPart(offset=record.offset, ts=record.ts, tool=tool, printed=printed)
        self._by_entry[id(entry)] = entry, part
        return Change(part)


def _update(payload: bytes) -> v1.SessionUpdate | UnknownUpdate:
    try:
        return decode_update(payload)
    except msgspec.DecodeError as error:
        return UnknownUpdate(payload, str(error))


def _piece(block: object) -> str:
    text = block_text(block)
    # What stands for an image or a file is a line of its own.
    return text if isinstance(block, v1.TextContent) or not text else f"\n{text}\n"


def _options(options: Sequence[Any]) -> str:
    """Names and values, as far as they have any."""
    values = [(option.name, getattr(option, "current_value", None)) for option in options]
    return ", ".join(f"{name} = {value}" for name, value in values) or "none"


def _note(record: Record, text: str) -> Note:
    return Note(offset=record.offset, ts=record.ts, text=text)


def _number(payload: dict[str, Any]) -> int | None:
    number = payload.get("turnId")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _object(record: Record) -> dict[str, Any]:
    """The payload, {} where it is none: other programs may write journals, too."""
    try:
        value = loads(record.payload)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _cut(raw: bytes) -> str:
    text = bytes(raw).decode("utf-8", "replace")
    return text if len(text) <= _MAX_PAYLOAD else text[:_MAX_PAYLOAD] + "…"
