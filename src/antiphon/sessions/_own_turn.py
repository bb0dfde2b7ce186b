"""The open turn of an attached session whose prompt was sent here: which records are its own.

Its updates come as records with an offset, between its `turn_started` and its `turn_completed`. They
may come without one as well: before the session was attached, or from an agent that tells the
connection which prompts in addition to its subscribers (resumable-sessions §4.1). Both copies come in
the same order, so that the place of an update in the turn tells which of them is the second.

Leaves the delivery of what is to be shown to `_attachment`, and the end of the turn to `_session`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import RequestError
from antiphon.schema import decode, encode
from antiphon.sessions._attach_frames import KEY, same_block, user_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.sessions._session import PromptTurn

__all__ = ["Outcome", "OwnTurn", "Place"]


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
        delivered: how many of its updates its consumer was given.
        adrift: the link on which it was prompted is gone, so that no answer will come.
        held: copies without an offset that came before the others: (place in the turn, raw, frame).
        needed: where set, the offset with which nothing of the turn is missing.
        told_only: the copies without an offset are the ones that count.
    """

    def __init__(self, turn: PromptTurn, delivered: int, *, prompts: bool) -> None:
        self.turn = turn
        self.running = False
        self.outcome: Outcome | None = None
        self.answer: tuple[Any, Exception | None] | None = None
        self.delivered = delivered
        self.adrift = False
        self.held: deque[tuple[int, Any, bytes]] = deque()
        self.needed: int | None = None
        self._told = delivered  # copies without an offset that came
        self._given = delivered  # and those of them that its consumer was given
        self._numbered = 0  # copies with an offset that came
        self._aligned = True  # whether the places of both are comparable
        self.told_only = False  # whether only copies without an offset count
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
        self._numbered, self.delivered = 0, self._given
        self._block = 0
        self._expected = ()
        if self._prompts:
            self._expected = [decode(Any, encode(block)) for block in self.turn.params.prompt]

    def completed(self, payload: dict[str, Any]) -> Outcome:
        """It has ended, as its records say."""
        self.running = False
        self.outcome = Outcome.of(payload)
        self.held.clear()
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
        self._numbered += 1
        if not self._aligned:
            return Place.double if self.told_only else Place.turn
        if self._numbered <= self.delivered:
            return Place.double
        self.delivered = self._numbered
        while self.held and self.held[0][0] <= self.delivered:
            self.held.popleft()
        return Place.turn

    # -------------------------------------------------------------- copies without an offset

    def told(self) -> int:
        """A copy without an offset came: its place if it is to be shown, 0 if it is the second."""
        self._told += 1
        return self._told if self._told > self.delivered else 0

    def give(self, place: int) -> None:
        """That copy is given to the consumer."""
        self.delivered = self._given = place

    def from_now_on(self, *, told_only: bool) -> None:
        """The session was attached without its history: places can be compared no more.

        From an agent that sends both copies, those without an offset count from here on.
        """
        self.running = True
        self._aligned, self.told_only = False, told_only
