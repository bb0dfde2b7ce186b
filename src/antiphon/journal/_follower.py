"""Hears, in this process, of the records of a session that another process writes.

Responsible for giving what `Journal.follow` gives to tails, from the first one that subscribes to the
last one that goes. Leaves credit to `_tails`, appending to the `Writer` of the other process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from antiphon._errors import JournalError
from antiphon.journal._tails import CREDIT, Audience

if TYPE_CHECKING:
    from antiphon.journal._store import Journal
    from antiphon.journal._tails import Tail

__all__ = ["Follower"]

log = logging.getLogger("antiphon.journal")


class Follower(Audience):
    """Publishes what another process appends; for tails it is what a `Writer` is, without appends.

    It follows the journal only while it has a tail. Where following ends, all tails are told: with
    "deleted" when the session was deleted, with "writer_down" when it cannot be read; the next
    `subscribe` tries again.

    Attributes:
        session_id: the session.
    """

    __slots__ = ("_closed", "_coming", "_journal", "_pump", "_started", "_tasks", "session_id")

    def __init__(self, journal: Journal, session_id: str, *, credit: int = CREDIT) -> None:
        """Nothing is read yet. `credit` is how many records each tail may be behind."""
        super().__init__(credit)
        self.session_id = session_id
        self._journal = journal
        self._pump: asyncio.Task[None] | None = None
        #: When the pump knows where it begins, or what was wrong; what is durable then is history.
        self._started: asyncio.Future[Exception | None] | None = None
        #: How many wait for that.
        self._coming = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def subscribe(self, tail: Tail) -> None:
        """Tell a tail of every record that becomes durable from now on; idempotent.

        What was durable before this returned may be told, too: the gate of a subscriber, which reads
        the high watermark afterwards, drops it. Cancelled, it is undone.

        Raises:
            JournalError: the store cannot be read, or `aclose` was called.
        """
        if self._closed:
            raise self._over()
        if self._pump is None:
            self._started = asyncio.get_running_loop().create_future()
            pump = self._pump = asyncio.Task(
                self._run(self._started), loop=asyncio.get_running_loop()
            )
            self._tasks.add(pump)
            pump.add_done_callback(self._tasks.discard)
        pump, started = self._pump, self._started
        if started is not None and not started.done():
            self._coming += 1
            try:
                await asyncio.wait([started])
            except asyncio.CancelledError:
                self._coming -= 1
                self._rest()
                raise
            self._coming -= 1
        error = None if started is None else started.result()
        if error is not None:
            raise error.with_traceback(None)
        if pump is not self._pump:
            raise self._over()
        self._seat(tail)

    def unsubscribe(self, tail: Tail) -> None:
        """As for `Writer.unsubscribe`; after the last one nothing is followed any more."""
        super().unsubscribe(tail)
        self._rest()

    async def aclose(self, reason: str = "closed") -> None:
        """Stop following, and tell the tails why. Idempotent."""
        self._closed = True
        self._stop(reason)
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _over(self) -> JournalError:
        return JournalError(f"session {self.session_id!r} is not followed any more")

    def _rest(self) -> None:
        """Stop following where nobody listens."""
        if not self._seats and not self._coming:
            self._leave_off()

    def _stop(self, reason: str) -> None:
        self._leave_off()
        self._end_all(reason)

    def _leave_off(self) -> None:
        pump, self._pump = self._pump, None
        if pump is None:
            return
        # One that is cancelled before its first step does not take it.
        if self._started is not None and not self._started.done():
            self._started.set_result(self._over())
        if pump is not asyncio.current_task():
            pump.cancel()

    async def _run(self, started: asyncio.Future[Exception | None]) -> None:
        reason = "writer_down"
        try:
            start = await self._mark() + 1
            started.set_result(None)
            runs = self._journal.follow(self.session_id, start)
            try:
                async for run in runs:
                    seats = list(self._seats.values())
                    for record in run:
                        self._give(record, seats)
                    if self._pump is not asyncio.current_task():
                        return
            finally:
                aclose = getattr(runs, "aclose", None)
                if aclose is not None:
                    await aclose()
            reason = "deleted"
        except Exception as error:  # noqa: BLE001  (who waits gets it, else it is logged)
            if not started.done():
                started.set_result(error)
            else:
                log.warning("session %r is not followed any more: %s", self.session_id, error)
        finally:
            if self._pump is asyncio.current_task():
                self._stop(reason)

    async def _mark(self) -> int:
        opened = await self._journal.open(self.session_id)
        try:
            return await opened.high_watermark()
        finally:
            await opened.aclose()
