"""Who hears of a session's new records, and how far behind each of them may be.

Responsible for credit (resumable-sessions §9): who has spent theirs is told once and forgotten, and
nobody else notices. Leaves when a tail is let in, and what it hears, to `Writer` and `Follower`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from antiphon.journal._record import Record

__all__ = ["CREDIT", "Audience", "Tail"]

log = logging.getLogger("antiphon.journal")

#: How many records a tail may be behind (DESIGN §5).
CREDIT = 1024


class Tail(Protocol):
    """What a `Writer` or `Follower` tells of a session's records, as each becomes durable.

    All are called on the event loop; none may block, or raise: a tail that raises is ended. After
    `lagged` or `ended` nothing more is called.
    """

    def received(self, record: Record) -> None:
        """The next record: each once, in the order of offsets."""

    def lagged(self) -> None:
        """Its credit was spent: a record was not given to it, and none will be (§9.2)."""

    def ended(self, reason: str) -> None:
        """There is nothing more to hear: "writer_down", "deleted" or "closed"."""


class _Seat:
    """A tail's place: what it may still be given."""

    __slots__ = ("credit", "exempt", "tail")

    def __init__(self, tail: Tail, credit: int) -> None:
        self.tail: Tail | None = tail
        self.credit = credit
        self.exempt = False


class Audience:
    """The tails of one session; the common part of `Writer` and `Follower`."""

    __slots__ = ("_exempt", "_limit", "_seats")

    def __init__(self, credit: int) -> None:
        if credit < 1:
            msg = f"credit must be at least 1, not {credit}"
            raise ValueError(msg)
        self._limit = credit
        self._seats: dict[Tail, _Seat] = {}
        #: Also those that are not let in yet; made when there is one.
        self._exempt: set[Tail] | None = None

    def unsubscribe(self, tail: Tail) -> None:
        """Tell it nothing more, from now on and without a word; one that is unknown is none."""
        seat = self._seats.pop(tail, None)
        if self._exempt is not None:
            self._exempt.discard(tail)
        if seat is not None:
            seat.tail = None

    def publishes_to(self, tail: Tail) -> bool:
        """Whether the tail is told of what is published now."""
        return tail in self._seats

    def credit(self, tail: Tail, count: int = 1) -> None:
        """Give back credit for `count` records that the tail is done with; never more than it had."""
        seat = self._seats.get(tail)
        if seat is not None:
            left = seat.credit + count
            # Each live record of each tail comes here: `min` would be half of what that costs.
            seat.credit = left if left < self._limit else self._limit  # noqa: FURB136

    def exempt(self, tail: Tail, exempt: bool) -> None:  # noqa: FBT001  (the one thing that is said)
        """Whether the tail's credit is left alone: it cannot lag while it is exempt.

        For the connection that prompts: it slows its own turn down instead. It may be said before the
        tail is let in, and holds until it is unsubscribed.
        """
        if self._exempt is None:
            self._exempt = set()
        if exempt:
            self._exempt.add(tail)
        else:
            self._exempt.discard(tail)
        seat = self._seats.get(tail)
        if seat is not None:
            seat.exempt = exempt

    def _seat(self, tail: Tail) -> bool:
        """Let a tail in; whether it was not in yet."""
        if tail in self._seats:
            return False
        seat = self._seats[tail] = _Seat(tail, self._limit)
        seat.exempt = self._exempt is not None and tail in self._exempt
        return True

    def _give(self, record: Record, seats: list[_Seat]) -> None:
        """Give a record to those of these tails that are still in, each of which pays for it."""
        for seat in seats:
            tail = seat.tail
            if tail is None:
                continue
            try:
                if seat.exempt:
                    tail.received(record)
                elif seat.credit > 0:
                    seat.credit -= 1
                    tail.received(record)
                else:
                    self.unsubscribe(tail)
                    tail.lagged()
            except Exception:
                log.exception("a tail of session %r failed and is ended", record.session_id)
                self.unsubscribe(tail)
                _end(tail, "writer_down")

    def _end_all(self, reason: str) -> None:
        """Tell all that this was the end."""
        tails = list(self._seats)
        for tail in tails:
            self.unsubscribe(tail)
            _end(tail, reason)


def _end(tail: Tail, reason: str) -> None:
    try:
        tail.ended(reason)
    except Exception:
        log.exception("a tail failed at its end")
