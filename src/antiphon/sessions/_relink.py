"""Another link in place of one that is lost, for the same `AgentPeer`.

Responsible for the attempts, their pauses and their end, and for who waits meanwhile. Leaves the
handshake and the sessions to `_agent_peer`, and what is attached from where to `_attachment`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec

from antiphon._errors import ConnectionClosed
from antiphon.sessions._attachment import Capability

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.runtime import Connection
    from antiphon.sessions._session import Session

__all__ = ["Reattach", "Relink"]

#: A link that is there for so many seconds is no mere attempt.
_LIVED = 10.0


class Reattach(msgspec.Struct, frozen=True, kw_only=True):
    """How a client makes another link when one is lost, and attaches its sessions again.

    Attributes:
        attempts: how many links are tried in a row, None for no bound. One that is lost again before
            every session was attached over it, or anything new had come, counts among them.
        delay: seconds before the second attempt; the first is made at once.
        backoff: each further pause is so many times the one before.
        max_delay: the longest pause, in seconds.
        deadline: seconds for all attempts in a row, None for no bound.
        capability: what permits to attach: a token, or a function of a session's id that gives one (or
            an awaitable of one) each time that a session is attached.
    """

    attempts: int | None = 8
    delay: float = 0.2
    backoff: float = 2.0
    max_delay: float = 10.0
    deadline: float | None = 120.0
    capability: Capability = None

    def __post_init__(self) -> None:
        few = self.attempts is not None and self.attempts < 1
        short = self.deadline is not None and self.deadline <= 0
        if few or short or self.delay < 0 or self.max_delay < 0 or self.backoff < 1:
            msg = (
                "Reattach needs attempts of at least 1, a delay and a max_delay of at least 0, a backoff"
                " of at least 1, and a deadline over 0"
            )
            raise ValueError(msg)

    def pause(self, attempt: int) -> float:
        """Seconds before the attempt of this number, counted from 1."""
        if attempt < 2:
            return 0.0
        # A power of many attempts would be over what a float can be.
        growth = min(self.backoff ** min(attempt - 2, 64), 1e9)
        return min(self.delay * growth, self.max_delay)


class Linked(Protocol):
    """What this module needs of an `AgentPeer`."""

    @property
    def connection(self) -> Connection:
        """The link it has, or had."""
        ...

    async def link_again(self) -> None:
        """Make another link and shake hands; on an error, nothing of it is left."""

    def attach_again(self) -> int:
        """Begin to attach the sessions over it; returns how many they are."""
        ...

    def surviving(self) -> Iterable[Session]:
        """The sessions that go on over another link."""
        ...

    def holding(self) -> int:
        """A number that is another once anything new has come to one of them."""
        ...

    def end_sessions(self, error: ConnectionClosed) -> None:
        """No other link is made: everything that waits ends."""


class Relink:
    """The lost links of one peer.

    Attributes:
        options: as given.
        willing: whether a lost link is replaced; not any more after `stop`, or when it failed.
        task: makes another link, None while there is one.
        held_back: tasks that show updates to observers, left over from the lost link.
    """

    def __init__(self, peer: Linked, options: Reattach) -> None:
        self._peer = peer
        self.options = options
        self.willing = True
        self.task: asyncio.Task[None] | None = None
        self.held_back: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()
        self._linked = asyncio.Event()
        self._linked.set()
        # Of the attempts in a row: how many, since when; and what was held when the last link was made.
        self._attempt = 0
        self._begun = self._made = 0.0
        self._held = 0
        #: Done when the last link is gone and no other is made.
        self.over: asyncio.Future[None] = self._loop.create_future()

    def lost(self, error: ConnectionClosed) -> None:
        """A link is gone, and what it had is still as it was: begin to make another."""
        if self.task is None:
            self._linked.clear()
            if self._was_of_use():
                self._attempt, self._begun = 0, self._loop.time()
            self.task = self._loop.create_task(self._run(error))

    def _was_of_use(self) -> bool:
        """Whether the lost link is no mere attempt: else an agent that dies of what we ask dies for ever."""
        peer = self._peer
        if not self._attempt or peer.holding() != self._held:
            return True
        if self._loop.time() - self._made >= _LIVED:
            return True
        sessions = list(peer.surviving())
        return bool(sessions) and all(session.attached for session in sessions)

    async def linked(self) -> None:
        """Wait for a link. Raises `ConnectionClosed` where none could be made."""
        while not self._linked.is_set():
            await self._linked.wait()
        if not self.willing and self._peer.connection.closed:
            raise self._peer.connection.lost_error()

    async def stop(self) -> None:
        """Make no other link. Idempotent, prompt."""
        self.willing = False
        task = self.task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
        await self._end_held_back()

    def close(self) -> None:
        """Nothing is linked again: whoever waits is told."""
        self.willing = False
        self._linked.set()
        if not self.over.done():
            self.over.set_result(None)

    async def _run(self, lost: ConnectionClosed) -> None:
        peer, options = self._peer, self.options
        sessions = len(list(peer.surviving()))
        peer.connection.emit("link_lost", reason=lost.reason, sessions=sessions)
        end = None if options.deadline is None else self._begun + options.deadline
        last: Exception = lost
        try:
            # What is left of the old one may hold what the new one needs: a process, a session's claim.
            await peer.connection.wait_closed()
            async with asyncio.timeout_at(end):
                while options.attempts is None or self._attempt < options.attempts:
                    self._attempt += 1
                    await asyncio.sleep(options.pause(self._attempt))
                    try:
                        await peer.link_again()
                    except Exception as error:  # noqa: BLE001  (whatever a function of the user raises)
                        last = error
                    else:
                        if not peer.connection.closed:
                            break
                        last = peer.connection.lost_error()
                    peer.connection.emit(
                        "link_attempt_failed", attempt=self._attempt, error=str(last)
                    )
        except TimeoutError:
            pass
        except BaseException:
            self._failed(ConnectionClosed("this side closed the connection"))
            raise
        if peer.connection.closed:
            peer.connection.emit("link_given_up", attempts=self._attempt, error=str(last))
            self._failed(_given_up(lost, last))
            await self._end_held_back()
            return
        self.held_back.clear()
        self.task = None
        self._made, self._held = self._loop.time(), peer.holding()
        # The sessions first: who waits for the link finds them being attached.
        attached = peer.attach_again()
        peer.connection.emit("link_made", attempts=self._attempt, sessions=attached)
        self._linked.set()

    def _failed(self, error: ConnectionClosed) -> None:
        self.close()
        self._peer.end_sessions(error)

    async def _end_held_back(self) -> None:
        """Observers are given the closing grace for what was received before the end."""
        tasks, self.held_back = self.held_back, set()
        if not tasks:
            return
        _, running = await asyncio.wait(tasks, timeout=self._peer.connection.limits.close_grace)
        for task in running:
            task.cancel()
        if running:
            with suppress(TimeoutError):
                await asyncio.wait(running, timeout=self._peer.connection.limits.close_grace)


def _given_up(lost: ConnectionClosed, last: Exception) -> ConnectionClosed:
    """Why the link is gone, and why there is no other."""
    reason = lost.reason
    reason += "; no other link could be made" + ("" if last is lost else f": {last}")
    error = ConnectionClosed(reason, exit_status=lost.exit_status, stderr_tail=lost.stderr_tail)
    error.__cause__ = None if last is lost else last
    return error
