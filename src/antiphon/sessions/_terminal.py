"""A command in a terminal of the client, as the agent that runs it sees it.

Responsible for releasing what was created, whatever happens (R1-116), for asking again and again where
the protocol tells nothing by itself, and for ending a command that takes too long or whose turn was
cancelled. Leaves to `_pieces` what is new in an answer, and to `Turn` whether a command may be run.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from antiphon._errors import (
    AntiphonError,
    LimitExceeded,
    RequestError,
    RequestTimeout,
)
from antiphon.runtime import FutureCall, OutboundCall
from antiphon.schema import UNSET, v1, v1_unstable
from antiphon.sessions._methods import or_none
from antiphon.sessions._pieces import Pieces
from antiphon.sessions._turn_states import Event

if TYPE_CHECKING:
    from types import TracebackType

    from antiphon.sessions._turn import Turn

__all__ = ["ExitStatus", "Terminal"]

log = logging.getLogger("antiphon.agent")

#: Seconds between two looks at the output: after one that brought something, and at most. The exit
#: of the command is not waited for with them.
SOON: Final = 0.05
LATE: Final = 0.5
#: How often more may come after the exit, where the output does not say that it is all.
LATE_LOOKS: Final = 20
#: Characters a second that looking may cost; all that the client keeps comes with every look.
RATE: Final = 1 << 22
#: Seconds for which a create that was given up may still be answered.
_LATE_ANSWER: Final = 600.0


class ExitStatus(msgspec.Struct, frozen=True):
    """How a command in a terminal ended: an exit code, or the name of the signal that ended it."""

    exit_code: int | None
    signal: str | None


class Terminal:
    """A command in the client's terminal; made by `Turn.run`, released when its block is left.

    Inside the block, `async for text in terminal` gives the output as it comes, until the command has
    ended. The protocol has no message for new output, so the client is asked for the end of it, soon
    after something came and up to twice a second where nothing does; the exit of the command is seen
    at once. Each piece is given once, whoever iterates; one task at a time. Leaving the loop and
    coming back goes on where it was left. It raises `RequestError` where the client refuses to tell,
    `ConnectionClosed` where it is gone.

    The client keeps only the end of the output (`output_byte_limit`). What it has dropped between two
    looks is missing, and `gap` says so. That is known by what two answers have in common; where it is
    little (fewer than 64 characters), or repeats itself, `gap` is set for safety's sake.

    A turn that is cancelled while the block is open has the command killed: iterating and `wait` come
    to their end by that. A command that is started afterwards is not.

    Attributes:
        id: its `terminalId` (inside the block).
        status: how the command has ended, as soon as anything that was asked has told: iterating to
            the end, `wait`, `read`, `output`. None before.
        timed_out: whether it was killed because of `timeout`.
        gap: whether output may be missing right before the piece that was given last.
        gaps: how often that was so, a missing end included.
        truncated: whether the client has dropped the beginning of the output, as it said last.
    """

    def __init__(
        self, turn: Turn, params: v1.CreateTerminalRequest, timeout: float | None = None
    ) -> None:
        if timeout is not None and not timeout >= 0:
            msg = f"timeout is a number of seconds, or None for no bound, not {timeout!r}"
            raise ValueError(msg)
        self._turn = turn
        self._params = params
        self._timeout = timeout
        self._entered = False
        self._timer: asyncio.TimerHandle | None = None
        self._pieces = Pieces()
        #: The request that waits for its exit, and what comes of it.
        self._exit: FutureCall | None = None
        self._end: asyncio.Future[ExitStatus] | None = None
        self._watchers = 0
        #: Whether the exit is of interest also while nobody waits for it.
        self._watched_on = False
        self._failure: BaseException | None = None
        self._iterating = False
        self._over = False
        self._late_looks = 0
        self._pause = 0.0
        self.id = ""
        self.status: ExitStatus | None = None
        self.timed_out = False
        self.truncated = False

    @property
    def gap(self) -> bool:
        """Whether output may be missing right before the piece that was given last."""
        return self._pieces.gap

    @property
    def gaps(self) -> int:
        """How often output may be missing in what was given so far."""
        return self._pieces.gaps

    # -------------------------------------------------------------- created and released

    async def __aenter__(self) -> Self:
        turn = self._turn
        if self._entered:
            msg = "a command is run once: call `run` again"
            raise RuntimeError(msg)
        turn.session.fire(Event.USE, turn)
        self._entered = True
        was_cancelled = turn.cancelled
        peer = turn.peer
        call = peer.open_request(self._params, UNSET)
        try:
            raw = await asyncio.shield(call.future)
        except asyncio.CancelledError:
            # The command may be running already; `$/cancel_request` would hide its id (R1-116).
            call.future.add_done_callback(self._created_late)
            raise
        except RequestTimeout:
            peer.connection.linger(call, _LateCreate(self), _LATE_ANSWER)
            raise
        self.id = peer.result_of(v1.CreateTerminalRequest, raw).terminal_id
        turn.command_entered(self)
        if turn.cancelled and not was_cancelled:
            self.kill_soon()
        if self._timeout is not None:
            try:
                self._watch()
            except AntiphonError as failure:  # it was created, so it is to be released
                await self.__aexit__(type(failure), failure, None)
                raise
            self._watched_on = True
            self._timer = turn.peer.connection.loop.call_later(self._timeout, self._time_is_up)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # R1-116: released whatever happened. A task that is being cancelled still gets the frame out;
        # waiting for the answer is cut short by the cancellation itself, and that alone: a
        # `$/cancel_request` could stop the release.
        self._turn.command_left(self)
        self._disarm()
        if not self._watchers:
            self._forget_exit()
        try:
            call = self._open_release(self.id)
            if call is not None:
                await asyncio.shield(call.future)
        except RequestError as failure:
            # There is nothing to release, or nothing that could be done about it.
            log.warning("the client did not release a terminal: %s", failure)
        except AntiphonError as failure:
            if kind is None:
                raise
            log.info("releasing a terminal failed: %s", failure)

    def _created_late(self, created: asyncio.Future[Any]) -> None:
        """Release what was created for a task that was cancelled meanwhile."""
        if not created.cancelled() and created.exception() is None:
            self.release_late(created.result())

    def release_late(self, raw: Any) -> None:
        """Release what was created for nobody any more."""
        with suppress(AntiphonError):
            created = self._turn.peer.result_of(v1.CreateTerminalRequest, raw)
            self._open_release(created.terminal_id)

    def _open_release(self, terminal_id: str) -> FutureCall | None:
        """Send the release; None where it has to wait for room, and is sent then."""
        peer = self._turn.peer
        release = v1.ReleaseTerminalRequest(
            session_id=self._turn.session_id, terminal_id=terminal_id
        )
        try:
            return peer.open_request(release, UNSET)
        except LimitExceeded:
            peer.connection.create_task(self._release_with_room(release))
            return None

    async def _release_with_room(self, release: v1.ReleaseTerminalRequest) -> None:
        peer = self._turn.peer
        with suppress(AntiphonError):
            while not peer.connection.closed:
                await peer.connection.drain()
                try:
                    peer.open_request(release, UNSET)
                except LimitExceeded:
                    await asyncio.sleep(LATE)
                else:
                    return

    # -------------------------------------------------------------- its end

    async def wait(self) -> ExitStatus:
        """Wait until the command has ended. Any number of tasks may.

        Raises:
            RequestError: the client has no such terminal, or could not kill the command when its time
                was up or the turn was cancelled.
            ConnectionClosed: the client is gone.
        """
        if self.status is not None:
            return self.status
        end = self._watch()
        self._watchers += 1
        try:
            return await asyncio.shield(end)
        finally:
            self._watchers -= 1
            if not self._watchers and not self._watched_on:
                self._forget_exit()

    async def read(self) -> str:
        """Wait until the command has ended, and return its output as far as the client has kept it.

        `truncated` says whether that is only the end of it. Raises what `wait` and `output` raise.
        """
        await self.wait()
        return (await self.output()).output

    async def output(self) -> v1_unstable.TerminalOutputResponse:
        """What it has written so far; `exit_status` is set once it has ended.

        Raises:
            RequestError: the client has no such terminal.
        """
        response = await self._turn.peer.request(
            v1.TerminalOutputRequest(session_id=self._turn.session_id, terminal_id=self.id)
        )
        self.truncated = response.truncated
        exit_status = or_none(response.exit_status)
        if exit_status is not None:
            self._ended(exit_status)
        return response

    async def kill(self) -> None:
        """End the command; `output`, `wait` and iterating go on working.

        Raises:
            RequestError: the client has no such terminal.
        """
        await self._turn.peer.request(self._kill_request())

    def kill_soon(self) -> None:
        """End the command without waiting; if the client cannot, whoever waits for its end is told."""
        if self.status is not None:
            return
        try:
            call = self._turn.peer.open_request(self._kill_request(), UNSET)
        except AntiphonError as failure:
            log.info("killing a command failed: %s", failure)
        else:
            call.future.add_done_callback(self._killed)

    def _killed(self, done: asyncio.Future[Any]) -> None:
        failure = None if done.cancelled() else done.exception()
        if failure is None or self.status is not None:
            return
        log.info("the client did not kill a command: %s", failure)
        if self._exit is not None and isinstance(failure, Exception):
            self._turn.peer.connection.fail(self._exit, failure)

    def _time_is_up(self) -> None:
        self._timer = None
        if self.status is None:
            self.timed_out = True
            self.kill_soon()

    def _kill_request(self) -> v1.KillTerminalRequest:
        return v1.KillTerminalRequest(session_id=self._turn.session_id, terminal_id=self.id)

    def _wait_request(self) -> v1.WaitForTerminalExitRequest:
        return v1.WaitForTerminalExitRequest(session_id=self._turn.session_id, terminal_id=self.id)

    def _watch(self) -> asyncio.Future[ExitStatus]:
        """How it ends; one request waits for that, whoever asks."""
        if self._end is None:
            self._exit = self._turn.peer.open_request(self._wait_request(), UNSET)
            self._exit.future.add_done_callback(self._exit_seen)
            self._end = self._turn.peer.connection.create_future()
        return self._end

    def _exit_seen(self, done: asyncio.Future[Any]) -> None:
        self._exit = None
        try:
            how = self._turn.peer.result_of(v1.WaitForTerminalExitRequest, done.result())
        except AntiphonError as failure:
            end, self._end = self._end, None  # who asks again is told again
            if end is not None and not end.done():
                end.set_exception(failure)
                end.exception()  # where nobody waits any more, it is no news
        else:
            self._ended(how)

    def _ended(self, how: v1.WaitForTerminalExitResponse | v1.TerminalExitStatus) -> None:
        if self.status is None:
            self.status = ExitStatus(or_none(how.exit_code), or_none(how.signal))
            self._disarm()
            if self._end is not None:
                self._end.set_result(self.status)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget_exit(self) -> None:
        if self._exit is not None:
            self._turn.peer.connection.abandon(self._exit)
            self._exit = self._end = None

    # -------------------------------------------------------------- its output as it comes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._iterating:
            msg = "another task iterates over the output of this command"
            raise RuntimeError(msg)
        self._iterating = True
        try:
            while not self._over:
                text = await self._look()
                if text:
                    return text
        finally:
            self._iterating = False
        raise StopAsyncIteration

    async def _look(self) -> str:
        """Wait for the next moment to look, and return what is new then."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self.status is None:
            self._watched_on = True
            end = self._watch()
            if self._pause:
                await asyncio.wait([end], timeout=self._pause)
            failure = end.exception() if end.done() else None
        elif self._pause:
            await asyncio.sleep(self._pause)
        known = self.status is not None
        response = await self.output()
        output, truncated = response.output, response.truncated
        last = or_none(response.exit_status) is not None
        text = self._pieces.take(output, truncated=truncated, last=last)
        if known and not last:
            # A client that says it elsewhere only: as long as more comes, it was not all.
            self._late_looks += 1
            last = not text or self._late_looks > LATE_LOOKS
            if last:
                text += self._pieces.take(output, truncated=truncated, last=True)
        self._over = last
        self._failure = None if last else failure
        pause = SOON if text or known else min(max(self._pause, SOON) * 1.5, LATE)
        self._pause = max(pause, len(response.output) / RATE)
        return text

    def as_content(self) -> v1.Terminal:
        """For `ToolCallVerbs.add`: the client shows the terminal inside the tool call."""
        return v1.Terminal(terminal_id=self.id)


class _LateCreate(OutboundCall):
    """Takes the answer to a create that was given up: what it created is released."""

    __slots__ = ("terminal",)

    def __init__(self, terminal: Terminal) -> None:
        super().__init__("terminal/create", blocking=False)
        self.terminal = terminal

    def answered(self, result: Any, error: Exception | None) -> None:
        if error is None:
            self.terminal.release_late(result)
