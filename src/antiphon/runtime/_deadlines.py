"""When our calls time out: one timer of the loop for all of them.

Nearly every call is answered long before, and a timer of its own, made and cancelled, would cost more
than all else about it. So calls wait in rows, one for each length of time, where the first to come is
the first to go; the loop's one timer is set for the first of all, and looks again when it goes off.
Leaves what a timeout means to `_outgoing`.
"""

from __future__ import annotations

from contextvars import copy_context
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Context

    from antiphon.runtime._outgoing import OutboundCall

__all__ = ["Deadlines"]

#: Rows that may stand empty, for the next call of their length.
_EMPTY_ROWS = 8


class Deadlines:
    """The deadlines of one connection's calls.

    Args:
        loop: the connection's.
        expired: called with a call, and the seconds it was given, when they are up; in the context of who
            has put it there, as from a timer of its own.
    """

    __slots__ = ("_at", "_expired", "_loop", "_rows", "_time", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expired: Callable[[OutboundCall, float], None]
    ) -> None:
        self._loop = loop
        self._time = loop.time
        self._expired = expired
        #: By seconds given: calls in the order of their deadlines. Each holds its own, and where it comes
        #: from: a tuple for each would be one more object that the collector looks at.
        self._rows: dict[float, dict[OutboundCall, bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf  # what it is set for

    def put(self, call: OutboundCall, seconds: float) -> None:
        """Let a call wait so long; it must not be waiting here."""
        at = self._time() + seconds
        row = self._rows.get(seconds)
        if row is None:
            row = self._rows[seconds] = {}
        row[call] = True
        call.due = at
        call.asked_in = copy_context()
        call.patience = seconds
        if at < self._at:
            self._set(at)

    def take(self, call: OutboundCall) -> None:
        """Let a call wait no longer. Nothing where it does not wait."""
        seconds, call.patience = call.patience, None
        row = None if seconds is None else self._rows.get(seconds)
        if row is None or seconds is None or not row.pop(call, False):
            return
        del call.asked_in
        if not row and len(self._rows) > _EMPTY_ROWS:
            del self._rows[seconds]

    def close(self) -> None:
        """No call waits any more, and none will."""
        self._rows.clear()
        self._set(inf)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None if at == inf else self._loop.call_at(at, self._look)

    def _look(self) -> None:
        # The loop may be early by the resolution of its clock.
        now = max(self._time(), self._at)
        due: list[tuple[float, OutboundCall, float, Context]] = []
        following = inf
        for seconds, row in self._rows.items():
            for call in row:
                if call.due > now:
                    following = min(following, call.due)
                    break
                due.append((call.due, call, seconds, call.asked_in))
        self._timer = None
        self._set(following)
        for _, call, seconds, context in sorted(due, key=_when):
            self.take(call)
            # On its own, as from a timer of its own: what one raises does not keep the next from it.
            self._loop.call_soon(self._expired, call, seconds, context=context)


def _when(due: tuple[float, OutboundCall, float, Context]) -> float:
    return due[0]
