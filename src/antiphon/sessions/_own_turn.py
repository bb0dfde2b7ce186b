"""The open turn of an attached session whose prompt was sent here: which records are its own.

Its updates come as records with an offset, between its `turn_started` and its `turn_completed`. They
may come without one as well: while the session is not attached, or from an agent that tells the
connection which prompts in addition to its subscribers (resumable-sessions §4.1). Both copies come in
the same order and say the same, which tells which of them is the second; one without an offset that
has no other could not be stored, and is shown all the same.

Leaves the delivery of what is to be shown to `_attachment`, and the end of the turn to `_session`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import RequestError
from antiphon.schema import decode, encode, loads
from antiphon.sessions._attach_frames import KEY, same_block, user_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.sessions._session import PromptTurn

__all__ = ["Copies", "Outcome", "OwnTurn", "Place", "Told"]

#: So many copies are remembered for the sake of their second, and so many bytes of them.
_REMEMBERED = 1 << 14
_REMEMBERED_BYTES = 1 << 24


class Place(Enum):
    """What an update with an offset is to an own turn."""

    #: Its next update.
    turn = "turn"
    #: No part of it.
    outside = "outside"
    #: A block of its own prompt.
    prompt = "prompt"
    #: The second copy of an update.
    double = "double"


class Outcome(msgspec.Struct, frozen=True):
    """How a turn ended, from its `turn_completed` record: the answer that its prompt had or would have.

    Attributes:
        result: the raw result, None where it is an error.
        error: that error.
        orphaned: nobody was there to end the turn; it counts as cancelled.
    """

    result: bytes | None
    error: RequestError | None
    orphaned: bool = False

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Outcome:
        """Read a record's payload; total, since a turn that is over must end."""
        said: Any = payload.get("error")
        if isinstance(said, dict):
            code: Any = said.get("code")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            text: Any = said.get("message")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            code = code if isinstance(code, int) else -32603
            text = text if isinstance(text, str) else "Internal error"
            return cls(None, RequestError.of(code, text))
        reason: Any = payload.get("stopReason")
        orphaned = payload.get("outcome") == "orphaned"
        answer: dict[str, Any] = {"stopReason": reason if isinstance(reason, str) else "cancelled"}
        if orphaned:
            answer["_meta"] = {KEY: {"outcome": "orphaned"}}
        return cls(encode(answer), None, orphaned)


class OwnTurn:
    """What is known of an open turn of ours.

    Attributes:
        turn: the turn.
        running: whether its records have begun and not ended.
        outcome: how its records say that it ended; None while they do not.
        answer: the answer to its prompt, where that came before its last records.
        adrift: the link on which it was prompted is gone, so that no answer will come.
        needed: where set, the offset with which nothing of the turn is missing.
        told_only: the copies without an offset are the ones that count.
    """

    def __init__(self, turn: PromptTurn, given: int, *, prompts: bool) -> None:
        self.turn = turn
        self.running = False
        self.outcome: Outcome | None = None
        self.answer: tuple[Any, Exception | None] | None = None
        self.adrift = False
        self.needed: int | None = None
        self.told_only = False
        # Updates that it was given before anything was known of its records: they come again.
        self._given = given
        # Copies without an offset whose second is not here, and whether they were given.
        self._told = Copies()
        self._held = 0  # of them, not given
        # Copies with an offset whose second is not here.
        self._numbered = Copies()
        # An agent of ours stores the blocks of a prompt behind the beginning of its turn.
        self._prompts = prompts
        self._expected: Sequence[Any] = ()
        self._block = 0
        self._last: Outcome | None = None

    # -------------------------------------------------------------- records

    def started(self) -> None:
        """A turn has begun, and it is this one until its prompt says otherwise."""
        self._last, self.outcome = self.outcome, None
        self.running = True
        self._numbered.clear()
        self._block = 0
        self._expected = ()
        if self._prompts:
            self._expected = [decode(Any, encode(block)) for block in self.turn.params.prompt]

    def completed(self, payload: dict[str, Any]) -> Outcome:
        """It has ended, as its records say."""
        self.running = False
        self.outcome = Outcome.of(payload)
        return self.outcome

    def place(self, raw: Any) -> Place:
        """What an update with an offset is, while the turn is running."""
        if self._expected:
            block = user_block(raw)
            if block is not None and (self._block or same_block(block, self._expected[0])):
                self._block += 1
                if self._block == len(self._expected):
                    self._expected = ()
                return Place.prompt
            self._expected = ()
            if block is not None:  # another's prompt: ours was not begun, or is refused
                self.running, self.outcome = False, self._last
                return Place.outside
        if self.told_only:
            return Place.double
        if self._given:
            self._given -= 1
            return Place.double
        return Place.turn

    def before(self, raw: Any, *, doubles: bool) -> tuple[list[Told], bool]:
        """What comes in front of an update with an offset, and whether that itself was given already.

        Copies without an offset in front of its own have no other: they could not be stored. With
        `doubles`, its own is expected where it has not come.
        """
        found = self._told.until(raw)
        if not found:
            if doubles:
                self._numbered.add(Told(raw, b"", given=True))
            return [], False
        self._held -= sum(not copy.given for copy in found)
        own = found.pop()
        return [copy for copy in found if not copy.given], own.given

    # -------------------------------------------------------------- copies without an offset

    @property
    def held(self) -> bool:
        """Whether copies without an offset are here that were not given."""
        return self._held > 0

    @property
    def full(self) -> bool:
        """Whether no more of them should be held."""
        return self._told.full

    def told(self, raw: Any, frame: bytes, *, given: bool) -> bool:
        """A copy without an offset came: whether it is the first of its update.

        It is noted as one that is given, or held until the other comes.
        """
        if self._numbered.until(raw):
            return False
        self._told.add(Told(raw, frame, given))
        self._held += not given
        return True

    def release(self) -> list[Told]:
        """No other copies come: those that were held, to be given."""
        if not self._held:
            return []
        held = [copy for copy in self._told.kept if not copy.given]
        for copy in held:
            copy.given = True
        self._held = 0
        return held

    def from_now_on(self) -> None:
        """The session was attached without its history: where the turn began is not told."""
        self.running, self._given = True, 0


class Told(msgspec.Struct):
    """A copy of an update, and whether it was given."""

    raw: Any
    frame: bytes
    given: bool


class Copies:
    """Copies whose second is not here, oldest first; the oldest are forgotten when they are too many."""

    def __init__(self) -> None:
        self.kept: deque[Told] = deque()
        self._bytes = 0

    def add(self, copy: Told) -> None:
        """Remember one."""
        self.kept.append(copy)
        self._bytes += len(copy.raw)
        while self.full and self.kept[0].given:
            self._pop()

    @property
    def full(self) -> bool:
        """Whether these are as many as are remembered."""
        return len(self.kept) > _REMEMBERED or self._bytes > _REMEMBERED_BYTES

    def until(self, raw: Any) -> list[Told]:
        """Take those up to the first that says the same, whatever the order of its members; else none."""
        text = bytes(raw)
        value: Any = None
        for index, copy in enumerate(self.kept):
            if len(copy.raw) != len(text):
                continue
            if bytes(copy.raw) != text:
                value = _read(text) if value is None else value
                if value is None or _read(copy.raw) != value:
                    continue
            return [self._pop() for _ in range(index + 1)]
        return []

    def clear(self) -> None:
        """Forget them."""
        self.kept.clear()
        self._bytes = 0

    def _pop(self) -> Told:
        copy = self.kept.popleft()
        self._bytes -= len(copy.raw)
        return copy


def _read(raw: Any) -> Any:
    """Its value; None where it cannot be read, and so is like no other."""
    try:
        return loads(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
