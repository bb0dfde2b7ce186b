"""What was received and waits: how much of it, and whether reading goes on (DESIGN §4.4, §4.5).

Responsible for the account of a connection in bytes and updates, and for stopping and starting the
transport's reading by it. Leaves to the sessions what waits where (whoever queues an update adds it
here, and gives it back when it is consumed or discarded), to `_notices` the queue of notifications, and
to `_outgoing` which calls fail when the overdraft is spent too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core import Limits
    from antiphon.runtime._telemetry import Telemetry
    from antiphon.transports import Transport

__all__ = ["Budget"]

#: Between two looks at all sessions of a connection, while much waits.
_READS_PER_LOOK = 16


class Budget:
    """One connection's account of what was received and waits.

    The base of `Connection`, not a part of it: it is added to for every update, at no more than the
    cost of an attribute.

    Attributes:
        queued_bytes: frame bytes of what waits: updates, and what came during the handshake.
        queued_updates: how many of them.
        blocking_calls: open calls of ours whose answer somebody may be waiting for. While there are
            any, reading goes on past a spent budget: a consumer that calls the peer must not wait for
            an answer behind its own queue.
        reading_paused: whether reading is stopped.
        notices_full: whether the queue of notifications wants it to be.
        on_crowded: called now and then while more waits than is one session's share.
    """

    # Slots, although `Connection` has a dictionary: adding to one costs half as much.
    __slots__ = (
        "_crowd_bytes",
        "_crowd_updates",
        "_looks",
        "blocking_calls",
        "emit",
        "limits",
        "notices_full",
        "on_crowded",
        "queued_bytes",
        "queued_updates",
        "reading_paused",
        "transport",
    )

    def __init__(self, limits: Limits, transport: Transport, telemetry: Telemetry) -> None:
        self.limits = limits
        self.transport = transport
        #: See `Telemetry.emit`.
        self.emit = telemetry.emit
        self.queued_bytes = 0
        self.queued_updates = 0
        self.blocking_calls = 0
        self.reading_paused = False
        self.notices_full = False
        self.on_crowded: Callable[[], None] | None = None
        self._crowd_bytes = min(limits.session_bytes, limits.queue_bytes)
        self._crowd_updates = min(limits.session_updates, limits.queue_updates)
        self._looks = 0

    def look_around(self) -> bool:
        """After each read: report sessions that are full, stop reading if the budget is spent.

        Returns whether more waits than is one session's share; below that there is nothing to do.
        """
        if (
            self.queued_updates <= self._crowd_updates
            and self.queued_bytes <= self._crowd_bytes
            and not self.notices_full
        ):
            self._looks = 0
            return False
        spent = self.budget_spent
        # Looking costs as much as there are sessions.
        if self.on_crowded is not None and (spent or self._looks % _READS_PER_LOOK == 0):
            self.on_crowded()
        self._looks += 1
        if spent:
            self.check_budget()
        return True

    def look_soon(self) -> None:
        """A session that was full is no more: the next look is not put off."""
        self._looks = 0

    @property
    def budget_spent(self) -> bool:
        """Whether nothing more should be read."""
        limits = self.limits
        return (
            self.queued_bytes > limits.queue_bytes
            or self.queued_updates > limits.queue_updates
            or self.notices_full
        )

    @property
    def budget_overdrawn(self) -> bool:
        """Whether not even the answers that somebody waits for can be read any more.

        Calls that are open then fail, but for those that can wait until somebody takes something.
        """
        return self.queued_bytes > 2 * self.limits.queue_bytes

    def check_budget(self) -> None:
        """Stop or start reading, as things are now."""
        if self.budget_spent and (not self.blocking_calls or self.budget_overdrawn):
            if not self.reading_paused:
                self.reading_paused = True
                self.emit(
                    "reading_paused",
                    queued_bytes=self.queued_bytes,
                    queued_updates=self.queued_updates,
                )
                self.transport.pause_reading()
        elif self.reading_paused:
            self.reading_paused = False
            self.emit(
                "reading_resumed",
                queued_bytes=self.queued_bytes,
                queued_updates=self.queued_updates,
            )
            self.transport.resume_reading()

    def release(self, size: int, updates: int = 0) -> None:
        """Count what was consumed or discarded: frame bytes, and how many updates of them."""
        self.queued_bytes -= size
        self.queued_updates -= updates
        if self.reading_paused:
            self.check_budget()

    def blocking_call_opened(self) -> None:
        """Somebody may wait for an answer: read on."""
        self.blocking_calls += 1
        if self.reading_paused:
            self.check_budget()

    def blocking_call_over(self) -> None:
        """Nobody waits for that answer any more."""
        self.blocking_calls -= 1
        if not self.blocking_calls and (self.queued_bytes or self.notices_full):
            self.check_budget()
