"""The client's side of a session: prompts, turns, updates.

Responsible for the life of a turn as a client sees it: sending, iterating, cancelling, leaving, the
clocks of all that. Leaves the delivery of updates to `_inbox`, what they add up to to `_view`, opening
and closing of sessions to `_agent_peer`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from antiphon._errors import (
    AntiphonError,
    ConnectionClosed,
    DeliveryGap,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    SilenceTimeout,
    TurnInProgress,
)
from antiphon.runtime import OutboundCall
from antiphon.schema import UNSET, UnsetType, v1, v1_unstable
from antiphon.sessions._attach_frames import DETACH
from antiphon.sessions._attachment import Attachment
from antiphon.sessions._content import as_blocks, check_prompt_content
from antiphon.sessions._inbox import (
    Inbox,
    Observer,
    Sink,
    Subscription,
    TracedQueue,
    UpdateQueue,
)
from antiphon.sessions._methods import or_none, read_result
from antiphon.sessions._update import Update
from antiphon.sessions._view import SessionView

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from antiphon.runtime import InboundCall
    from antiphon.sessions._agent_peer import AgentPeer
    from antiphon.sessions._attach_frames import History, SessionRecord
    from antiphon.sessions._attachment import Capability

    Prompt: TypeAlias = str | v1.ContentBlock | Sequence[str | v1.ContentBlock]

__all__ = ["Once", "PromptOutcome", "PromptTurn", "Session"]

log = logging.getLogger("antiphon.session")

#: What an answer may need from an agent to us, in seconds.
_ON_THE_WAY = 1.0

#: In how many parts a silence is measured: it lasts at most one part longer than it should.
_TICKS = 8

T_co = TypeVar("T_co", covariant=True)


class Once(Coroutine[Any, Any, T_co]):
    """Something that can be awaited, and given to `asyncio.create_task` or a `TaskGroup`, once.

    As a coroutine, it begins nothing when it is made, and a `RuntimeWarning` tells of one that was
    forgotten: neither begun nor closed.
    """

    #: What to warn of where it is forgotten; empty from then on that it is not.
    unsent: str = ""
    _running: Coroutine[Any, Any, T_co] | None = None

    def _run(self) -> Coroutine[Any, Any, T_co]:
        raise NotImplementedError

    def _start(self) -> Coroutine[Any, Any, T_co]:
        self.unsent = ""
        return self._run()

    def __await__(self) -> Generator[Any, None, T_co]:
        return self._start().__await__()

    def send(self, value: Any, /) -> Any:
        """For the task that runs it."""
        if self._running is None:
            self._running = self._start()
        return self._running.send(value)

    def throw(self, *error: Any) -> Any:
        """For the task that runs it."""
        if self._running is None:
            self._running = self._start()
        return self._running.throw(*error)

    def close(self) -> None:
        """For the task that runs it, and for who does not want it after all."""
        self.unsent = ""
        if self._running is not None:
            self._running.close()

    # Bound here, since the names of modules may be gone when the interpreter ends.
    def __del__(
        self,
        _warn: Callable[..., None] = warnings.warn,
        _ending: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        if self.unsent and not _ending():
            _warn(self.unsent, RuntimeWarning, stacklevel=2, source=self)


class PromptOutcome(msgspec.Struct, frozen=True):
    """A whole turn, as `await session.prompt(…)` gives it; also unpacks as (updates, response)."""

    updates: list[Update]
    response: v1_unstable.PromptResponse

    @property
    def stop_reason(self) -> str:
        """Why the agent stopped, e.g. "end_turn"."""
        return self.response.stop_reason

    @property
    def usage(self) -> v1_unstable.Usage | None:
        """Tokens of the turn where the agent reports them."""
        return or_none(self.response.usage)

    @property
    def text(self) -> str:
        """The agent's message, put together from its chunks."""
        return "".join(update.text for update in self.updates)

    def __iter__(self) -> Iterator[Any]:
        yield self.updates
        yield self.response


class PromptTurn(OutboundCall, Once[PromptOutcome], AsyncIterator[Update]):
    """A prompt and its turn: iterate over it inside `async with`, or await it.

    The prompt is sent on `await` or on entering the block. Iteration gives every update of the turn
    in wire order and ends after the last one; then `response`, `stop_reason` and `usage` are set. An
    error answer, a timeout or a lost connection is raised by the iteration, after the updates that
    came before it. Leaving the block earlier sends `session/cancel`, lets the rest go with an event
    and waits for the answer, at most `Limits.cancel_backstop` seconds; an error in its place is let go,
    too. `asyncio.create_task(session.prompt(…))` runs it beside others. One that is neither awaited nor
    entered is never sent, of which a `RuntimeWarning` tells; `close()` says that this was meant.

    Attributes:
        response: the `PromptResponse`, None until the turn ended, and where none came.
    """

    __name__ = "PromptTurn"  # of its instances, where asyncio shows a task

    # What few turns change stands here, where it costs the others nothing.
    _raised = False
    _over: asyncio.Future[None] | None = None  # where leaving waits for the answer
    _backstop: asyncio.TimerHandle | None = None  # since it was cancelled
    _deadline = 0.0  # of the whole turn, in the loop's seconds
    _overtime: asyncio.TimerHandle | None = None  # while no call keeps it
    _given_back = False  # nobody iterates over it, or will
    #: Whether `session/cancel` was sent: permission requests are answered cancelled from then on.
    cancelling = False

    def __init__(
        self,
        session: Session,
        params: v1.PromptRequest,
        timeout: float | None,
        silence: float | None,
    ) -> None:
        super().__init__("session/prompt", blocking=False)
        self.session = session
        self.params = params
        self._timeout = timeout
        self._silence = silence
        self.unsent = "session.prompt(…) was never awaited or entered"
        # What every turn changes is set at once: Python 3.11 makes a dictionary where it comes late.
        self.response: v1_unstable.PromptResponse | None = None
        self._queue: UpdateQueue | None = None
        self._before = 0  # updates received when it was sent
        self._whole = False  # whether all that came since was put into the queue
        self._number = 0  # of the session's turns on this connection
        self._error: Exception | None = None
        self._raw: Any = None
        self._mark = -1  # updates received when the answer came; -1 until then

    # -------------------------------------------------------------- the reader's side

    def answered(self, result: Any, error: Exception | None) -> None:
        """The end of the turn, in the place it has in the stream; or not its end, if more comes."""
        session = self.session
        attachment = session.attachment
        if self.ended:  # records of its session have said so before
            return
        if attachment is not None and attachment.turn_answered(result, error):
            self._goes_on()
            return
        self._end(result, error)
        if error is not None and isinstance(error, RequestTimeout):
            connection = session.inbox.connection
            # What comes until the agent has stopped belongs to this turn, not to the next.
            session.winding_down = _WindingDown(session)
            connection.linger(self, session.winding_down, connection.limits.cancel_backstop)
            # Many agents ignore `$/cancel_request`: tell them in the way they all know.
            session.peer.notify_cancel(session.session_id)

    def end(self, result: Any, error: Exception | None) -> None:
        """End it, as records of its session say. A no-op once it has ended."""
        if not self.ended:
            self._end(result, error)

    def carried_over(self) -> None:
        """It goes on over another connection, where no answer comes."""
        self._goes_on()
        attachment = self.session.attach_here()
        attachment.turn_resumes(self)

    def _goes_on(self) -> None:
        """Its call is over, and with that the clock of its call."""
        if self.ended or self._timeout is None or self._overtime is not None:
            return
        loop = asyncio.get_running_loop()
        self._overtime = loop.call_at(max(self._deadline, loop.time()), self._too_long)

    def _too_long(self) -> None:
        self._overtime = None
        if not self.ended and self._timeout is not None:
            self.session.peer.notify_cancel(self.session.session_id)
            self._end(None, RequestTimeout(self.method, self._timeout))

    def resume(self) -> bool:
        """Go on with a turn that a lost link has ended, and that somebody may still iterate."""
        queue, inbox = self._queue, self.session.inbox
        if self._given_back or queue is None or not self.ended or self.session.turn is not None:
            return False
        self._mark, self._raised, self._whole = -1, False, False
        self._raw = self._error = None
        self.session.turn = self
        inbox.turn_resumes(queue)
        self._goes_on()
        return True

    @property
    def received(self) -> int:
        """How many updates it was given."""
        return self.session.inbox.received - self._before

    def passed_by(self) -> None:
        """An update of the session arrives that is not the turn's."""
        self._before += 1

    def can_wait(self) -> bool:
        """A turn that was cancelled may still be iterated, with more waiting than any budget."""
        inbox = self.session.inbox
        return inbox.turn is self._queue and inbox.held()[1] > inbox.connection.limits.queue_bytes

    def _end(self, result: Any, error: Exception | None) -> None:
        session = self.session
        inbox = session.inbox
        self._raw, self._error = result, error
        if isinstance(error, ConnectionClosed):
            session.interrupted = self
        self._mark = inbox.received
        if self._backstop is not None:
            self._backstop.cancel()
        if self._overtime is not None:
            self._overtime.cancel()
        if session.watch is not None:
            self._listen_no_more()
        if session.attachment is not None:
            session.attachment.turn_over()
        left = inbox.turn_ended()
        queue = self._queue
        session.turn = None
        if queue is not None:
            self._whole = queue.cut or (left is queue and not queue.retired)
            if queue.waiter is not None:
                queue.wake()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        if inbox.view is not None:
            inbox.view.end_turn(_stop_reason(result))
        session.peer.settle_forgotten(session)

    # -------------------------------------------------------------- the user's side

    async def _begin(self) -> None:
        """Send the prompt, once the agent is done with a turn that timed out, and there is a link."""
        if self._queue is None and self.session.winding_down is not None:
            await self.session.winding_down.wait()
        await self.session.peer.link(self.session)
        attachment = self.session.attachment
        if attachment is not None and attachment.stray:
            await attachment.stray_over()
            await self.session.peer.link(self.session)
        self._send()

    def _send(self) -> None:
        """Send the prompt.

        Raises:
            TurnInProgress: the session has an open turn.
            LocalProtocolError: it is being loaded, or was closed; or this prompt was sent already.
            CapabilityError: the agent does not take such content.
            ConnectionClosed: the link is gone.
        """
        session = self.session
        if self._queue is not None:
            msg = "this prompt was sent already; make a new one"
            raise LocalProtocolError(msg)
        if session.turn is not None:
            raise TurnInProgress(session.session_id)
        inbox = session.inbox
        connection = inbox.connection
        if inbox.label == "replay":
            msg = f"session {session.session_id!r} is being loaded"
            raise LocalProtocolError(msg)
        if session.forgotten and not connection.closed:
            # Its updates would reach nobody.
            msg = f"session {session.session_id!r} was closed here; load or resume it"
            raise LocalProtocolError(msg)
        check_prompt_content(self.params.prompt, session.peer.tree)
        session.turns += 1
        self._number = session.turns
        self._queue = inbox.turn = (
            TracedQueue(inbox, self._number) if connection.observed else UpdateQueue(connection)
        )
        self._before = inbox.received
        inbox.label = "turn"
        session.turn = self
        if self._timeout is not None:
            self._deadline = connection.loop.time() + self._timeout
        if session.attachment is not None:
            session.attachment.turn_sent(self)
        try:
            connection.open_call(self, self.params, self._timeout)
        except BaseException:
            inbox.turn = self._queue = session.turn = None
            inbox.label = "session"
            if session.attachment is not None:
                session.attachment.turn_over()
            raise
        if self.ended:  # the link was found to be gone
            return
        if self._silence is not None:
            session.watch = SilenceWatch(self, self._silence)
        if inbox.view is not None:
            inbox.view.begin_turn(self.params.prompt)

    @property
    def error(self) -> Exception | None:
        """What it ended with, None while it is open and where it has a response."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the answer is here (updates may still wait to be taken)."""
        return self._mark >= 0

    @property
    def stop_reason(self) -> str | None:
        """Why the agent stopped, e.g. "end_turn"; None until the turn ended."""
        return None if self.response is None else self.response.stop_reason

    @property
    def usage(self) -> v1_unstable.Usage | None:
        """Tokens of the turn where the agent reports them."""
        return None if self.response is None else or_none(self.response.usage)

    async def cancel(self, *, backstop: float | None | UnsetType = UNSET) -> None:
        """Ask the agent to stop; go on iterating, the turn ends by itself. A no-op once it ended.

        An agent that has not answered after `backstop` seconds (UNSET: one more than
        `Limits.cancel_backstop`, None: no bound) is given up: the iteration raises `RequestTimeout`.
        """
        if self._queue is not None and not self.ended:
            await self.session.cancel(backstop=backstop)

    def end_within(self, seconds: float) -> None:
        """Give the agent that long for its answer; a bound that is set already may only be sooner."""
        loop = asyncio.get_running_loop()
        # Even for 0: what is read already comes first.
        at = loop.time() + max(seconds, 0.001)
        if self._backstop is not None:
            if self._backstop.when() <= at:
                return
            self._backstop.cancel()
        self._backstop = loop.call_at(at, self._give_up, seconds)
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        watch, self.session.watch = self.session.watch, None
        if watch is not None:
            watch.stop()

    def _give_up(self, seconds: float) -> None:
        log.warning("session %s: no answer to the cancelled prompt", self.session.session_id)
        if self.ended:
            return
        self.session.inbox.connection.abandon(self)
        self._end(None, RequestTimeout(self.method, seconds))

    def __aiter__(self) -> PromptTurn:
        return self

    async def __anext__(self) -> Update:
        queue = self._queue
        if queue is None:
            msg = "use `async with session.prompt(…) as turn` to iterate over a turn"
            raise LocalProtocolError(msg)
        if queue.batch:  # what `take` does then, without the call of it
            return queue.batch.pop()
        while True:
            update = queue.take()
            if update is not None:
                return update
            if self._mark >= 0:
                await self._finish()
                raise StopAsyncIteration
            # What `wait` does, without a coroutine for it: a thousand turns wait at once.
            if queue.waiter is not None and not queue.waiter.done():
                await queue.wait()  # which says what is wrong with that
            waiter = queue.waiter = queue.connection.create_future()
            try:
                await waiter
            finally:
                if queue.waiter is waiter:
                    queue.waiter = None

    async def _finish(self) -> None:
        """The answer, once everything before it was delivered: to us, and to the observers."""
        inbox = self.session.inbox
        # A lost link, a timeout and a spent budget are no answers: they are seen at once (DESIGN §4.6).
        if inbox.observed and not isinstance(
            self._error, (ConnectionClosed, RequestTimeout, LimitExceeded)
        ):
            await inbox.settled(self._mark)
        if self._error is not None:
            self._raised = True
            raise self._error
        if self._whole and self._queue is not None:
            queue, expected = self._queue, self._mark - self._before
            if queue.cut and queue.passed - queue.lost < expected:  # no mistake: it was told of
                self._raised = True
                raise DeliveryGap(inbox.session_id, queue.passed - queue.lost, expected)
            try:
                inbox.check_delivery(queue.passed, expected, turn=self._number)
            except DeliveryGap:
                self._raised = True
                raise
        if self.response is None:
            try:
                self.response = read_result(self.method, v1_unstable.PromptResponse, self._raw)
            except RemoteProtocolError:
                self._raised = True
                raise

    async def _run(self) -> PromptOutcome:
        await self._begin()
        updates: list[Update] = []
        try:
            updates.extend([update async for update in self])
        except asyncio.CancelledError:
            await self._leave()
            raise
        finally:
            self._let_go()
        assert self.response is not None
        return PromptOutcome(updates, self.response)

    async def __aenter__(self) -> Self:
        self.unsent = ""
        session = self.session
        if session.winding_down is None and session.attachment is None and not session.peer.relinks:
            self._send()  # nothing to wait for
        else:
            await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.response is not None or self._raised:
            return
        if not self.ended:
            await self._leave()
            return
        self._let_go()
        if kind is None:
            await self._finish()

    async def _leave(self) -> None:
        """Cancel the turn, let go of what comes, wait for the answer within the back-stop."""
        self._let_go()
        if self._queue is None or self.ended:
            return
        connection = self.session.inbox.connection
        self._over = connection.create_future()
        limit = connection.limits.cancel_backstop
        await self.session.cancel(backstop=limit)
        try:
            async with asyncio.timeout(max(limit, 0.001)):
                await asyncio.shield(self._over)
                # An answer is to be seen afterwards; an error of a turn that was left is not.
                with suppress(AntiphonError):
                    await self._finish()
        except TimeoutError:  # an observer is still busy with the last updates
            if not self.ended:
                self._give_up(limit)

    def _let_go(self) -> None:
        """Keep nothing for a consumer that has left, whenever the answer comes."""
        queue, inbox = self._queue, self.session.inbox
        self._given_back = True
        if queue is not None:
            if queue.cut:  # nobody misses it now
                queue.cut = self._whole = False
            inbox.leave(queue)


class _WindingDown(OutboundCall):
    """A turn that timed out here and is not known to have ended at the agent."""

    __slots__ = ("_over", "_session")

    def __init__(self, session: Session) -> None:
        super().__init__("session/prompt", blocking=False)
        inbox = session.inbox
        self._session = session
        inbox.turn = Sink(inbox.connection)
        self._over = inbox.connection.create_future()
        inbox.label = "turn"

    def answered(self, result: Any, error: Exception | None) -> None:
        """The agent has stopped, or is given up."""
        session, inbox = self._session, self._session.inbox
        session.winding_down = None
        inbox.turn_ended()
        self._over.set_result(None)
        if inbox.view is not None:
            inbox.view.end_turn()
        session.peer.settle_forgotten(session)

    async def wait(self) -> None:
        """Wait for that; it takes at most `Limits.cancel_backstop`."""
        await asyncio.shield(self._over)


def with_option(
    options: Sequence[Any],
    config_id: str,
    value: str | bool,  # noqa: FBT001
) -> list[Any]:
    """Options with one of them set."""
    return [
        msgspec.structs.replace(option, current_value=value) if option.id == config_id else option
        for option in options
    ]


class SilenceWatch:
    """Ends a turn whose agent gives no sign of life: no update, no request that waits for us.

    Looks now and then at what is counted anyway, so that an update costs nothing.
    """

    def __init__(self, turn: PromptTurn, seconds: float) -> None:
        self._turn = turn
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._received = turn.session.inbox.received
        self._asked = False
        self._calls: list[InboundCall] = []
        self._quiet = 0
        self._timer = self._loop.call_later(seconds / _TICKS, self._tick)

    def asked(self, call: InboundCall | None) -> None:
        """The agent has sent a request (or a notification) for the session."""
        self._asked = True
        if call is not None:
            self._calls.append(call)

    def stop(self) -> None:
        """The turn is over."""
        self._timer.cancel()

    def _tick(self) -> None:
        inbox = self._turn.session.inbox
        connection = inbox.connection
        request_of = connection.protocol.request_of
        self._calls = [call for call in self._calls if request_of(call.id) is call]
        if (
            self._asked
            or self._calls
            or self._received != inbox.received
            or connection.reading_paused  # then it is we who do not listen
            or connection.closed  # another link is being made
        ):
            self._quiet = 0
        else:
            self._quiet += 1
        self._asked, self._received = False, inbox.received
        if self._quiet < _TICKS:
            self._timer = self._loop.call_later(self._seconds / _TICKS, self._tick)
        else:
            connection.fail(self._turn, SilenceTimeout(self._turn.method, self._seconds))
            if not self._turn.ended:  # no call keeps it
                self._turn.session.peer.notify_cancel(self._turn.session.session_id)
                self._turn.end(None, SilenceTimeout(self._turn.method, self._seconds))


def _stop_reason(result: Any) -> str | None:
    """The stop reason in a raw answer to a prompt, as far as it has one."""
    if result is None:
        return None
    with suppress(msgspec.DecodeError):
        return _decode_stop(result).stop_reason
    return None


class _Stop(msgspec.Struct, rename="camel"):
    stop_reason: str = ""


_decode_stop = msgspec.json.Decoder(_Stop).decode


class Session:
    """One session of an agent, on one connection. Made by `AgentPeer.new_session` and its kin.

    Attributes:
        session_id: its id.
        cwd: its absolute working directory.
        additional_directories: further absolute roots, as sent.
        response: the answer to `session/new`, `session/load` or `session/resume`; None while a load
            or resume is still under way, and of a session that was adopted.
        turn: the open turn, if there is one.
    """

    def __init__(
        self,
        peer: AgentPeer,
        inbox: Inbox,
        cwd: str,
        additional_directories: Sequence[str] = (),
    ) -> None:
        self.peer = peer
        self.inbox = inbox
        self.session_id = inbox.session_id
        self.cwd = cwd
        self.additional_directories = tuple(additional_directories)
        self.response: (
            v1_unstable.NewSessionResponse
            | v1_unstable.LoadSessionResponse
            | v1_unstable.ResumeSessionResponse
            | None
        ) = None
        self.turn: PromptTurn | None = None
        #: The load that was to open it has failed: whoever asked for that will let go of it.
        self.abandoned = False
        #: How many prompts were sent here.
        self.turns = 0
        #: What ends the open turn when its agent is silent for too long.
        self.watch: SilenceWatch | None = None
        #: The turn before, if it timed out here and may still run at the agent.
        self.winding_down: _WindingDown | None = None
        #: What is known of its journal, once it was to be attached.
        self.attachment: Attachment | None = None
        #: The last turn that a lost link has ended: `reattach` goes on with it.
        self.interrupted: PromptTurn | None = None
        self._config_options: list[v1_unstable.SessionConfigOption] | None = None

    def __repr__(self) -> str:
        return f"<Session {self.session_id!r} in {self.cwd!r}>"

    @property
    def stopping(self) -> bool:
        """Whether the agent was told to stop the turn it is in: its questions are answered cancelled."""
        turn = self.turn
        return self.winding_down is not None or (turn is not None and turn.cancelling)

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories: what the agent may touch."""
        return (self.cwd, *self.additional_directories)

    @property
    def modes(self) -> v1_unstable.SessionModeState | None:
        """The modes the agent offered when the session was opened, if any."""
        return None if self.response is None else or_none(self.response.modes)

    @property
    def config_options(self) -> list[v1_unstable.SessionConfigOption] | None:
        """The configuration options as last answered by the agent, if it has any."""
        if self._config_options is not None:
            return self._config_options
        return None if self.response is None else or_none(self.response.config_options)

    def prompt(
        self,
        content: Prompt,
        *,
        timeout: float | None = None,
        silence: float | None | UnsetType = UNSET,
        meta: dict[str, Any] | None = None,
    ) -> PromptTurn:
        """A prompt, not sent yet: `await` it for the whole outcome, or iterate over it in `async with`.

        Args:
            content: text, a content block, or several of either.
            timeout: seconds for the whole turn, None for no bound; then `RequestTimeout`, and the
                agent is told to stop. The next prompt is sent when it has, or after
                `Limits.cancel_backstop`.
            silence: seconds in which the agent may give no sign of life: no update of the session
                arrives, and no request of the agent for it is open (a person who decides, or a
                command it waits for, is no silence). Then `SilenceTimeout`, and all else as for
                `timeout`. UNSET: `Limits.silence_timeout`; None: no bound.
            meta: `_meta` of the request.
        """
        params = v1.PromptRequest(
            session_id=self.session_id,
            prompt=as_blocks(content),
            meta=UNSET if meta is None else meta,
        )
        if isinstance(silence, UnsetType):
            silence = self.inbox.connection.limits.silence_timeout
        return PromptTurn(self, params, timeout, silence)

    async def cancel(self, *, backstop: float | None | UnsetType = UNSET) -> None:
        """Send `session/cancel` if a turn is open; permission requests of it are answered cancelled.

        While this session is attached, another client's turn may be open in it: then it is sent, too,
        and the agent decides whether we may (resumable-sessions §2). Without a turn it does nothing.

        Returns when the frame is queued; the turn ends with its answer (R1-91, R1-92). An agent that
        has not answered after `backstop` seconds (UNSET: one more than `Limits.cancel_backstop`, None:
        no bound) is given up, and the turn ends with `RequestTimeout`.
        """
        turn = self.turn
        if turn is None:
            if self.attached:
                self.peer.notify_cancel(self.session_id)
            return
        self.peer.notify_cancel(self.session_id)
        # From here on it is the answer that somebody waits for: it is read past a spent budget.
        self.inbox.connection.set_blocking(turn, blocking=True)
        if isinstance(backstop, UnsetType):
            # An agent with the same back-stop answers at its end: that is to be heard.
            backstop = self.inbox.connection.limits.cancel_backstop + _ON_THE_WAY
        if backstop is not None:
            turn.end_within(backstop)

    @property
    def view(self) -> SessionView:
        """What a user sees of this session now, kept up to date from the first access on.

        Folding is done as updates arrive, so the view may be ahead of an iterator. It begins with
        what has arrived outside a turn: all that nobody took, and a little (64 updates, 64 KiB) of
        what others took. Look at it right after `new_session`, or inside
        `async with agent.load_session(…)`, to have everything. From then on it is a consumer of what
        arrives outside turns.
        """
        inbox = self.inbox
        if inbox.view is None:
            view = SessionView()
            view.mode = None if self.modes is None else self.modes.current_mode_id
            view.config_options = self.config_options
            if self.turn is not None:
                view.begin_turn()
            if self.loading:
                view.begin_load()
            inbox.fold(view)
            return view
        return inbox.view

    def updates(self) -> Subscription:
        """Every update of this session from here on, in order, turns included.

        The first subscriber also gets what arrived outside a turn and was seen by nobody (e.g. the
        commands announced right after `session/new`). One that is made in a telemetry hook begins with
        the next update. Ends when the connection is lost or the subscription is closed.
        """
        return self.inbox.subscribe()

    def __aiter__(self) -> Subscription:
        return self.updates()

    def replay(self) -> Subscription:
        """The history that `session/load` sends, ending where its answer stands in the stream.

        Call it before the answer is here, inside `async with agent.load_session(…)`; afterwards it
        gives what is still there unseen: nothing where an observer, another subscription or the view
        has taken the history.
        """
        return self.inbox.subscribe(replay=True)

    def on_update(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(update)` for each update, in order; returns a function that ends that.

        An observer may be sync or async; the next update waits for it, and so does the answer to
        every request about this session (DESIGN §4.2). What it raises is logged.
        """
        return self.inbox.observe(observer)

    async def set_mode(self, mode_id: str) -> None:
        """`session/set_mode`. Raises `RequestError` (-32602 for an unknown mode)."""
        await self.peer.request(
            v1.SetSessionModeRequest(session_id=self.session_id, mode_id=mode_id)
        )

    async def set_config_option(
        self,
        config_id: str,
        value: str | bool,  # noqa: FBT001  (a value of the protocol, not a switch)
    ) -> list[v1_unstable.SessionConfigOption]:
        """`session/set_config_option`; returns the full list of options as they are now."""
        params = v1.SetSessionConfigOptionRequest(
            session_id=self.session_id,
            config_id=config_id,
            value=value,
            type="boolean" if isinstance(value, bool) else UNSET,
        )
        response = await self.peer.request(params)
        options = response.config_options
        if not options:
            # Some agents leave the list out (quirk 8), and an option that could be set is in it:
            # what was known, changed.
            options = with_option(self.config_options or (), config_id, value)
        self._config_options = options
        return options

    # -------------------------------------------------------------- attaching

    @property
    def offset(self) -> int:
        """The highest offset of its journal that is held here; 0 where none is."""
        return 0 if self.attachment is None else self.attachment.offset

    @property
    def attached(self) -> bool:
        """Whether the agent sends every record of the session as it becomes durable."""
        return self.attachment is not None and self.attachment.live

    async def reattach(
        self,
        peer: AgentPeer | None = None,
        *,
        from_offset: int | None = None,
        history: History = "from_offset",
        capability: Capability = None,
        cwd: str | Path | None = None,
        timeout: float | None | UnsetType = UNSET,
    ) -> int:
        """Attach this session over `peer`, and go on: resumable-sessions §2, §7.5.

        What was missed comes first, then what is live, each record once. Iterators, subscriptions,
        observers and the view that were not at their end go on; so does a turn that a lost link has
        ended: its iterator, which has raised `ConnectionClosed`, can be iterated again. Its updates are
        labelled "turn" although they come as history, all others of the history "replay".

        Args:
            peer: another connection to an agent that serves the same journal; None: the one it has.
            from_offset: where to begin; None: behind the last record that is held, `offset + 1`. An
                earlier one gives records again.
            history: "from_offset", "tip" (nothing of what is durable already) or "none" (attach
                nothing, ask only).
            capability: a token, or a function of the session's id that gives one (or an awaitable of
                one) each time that the session is attached; None: the one of before.
            cwd: the working directory as `peer` has it; made absolute here. None: that of before.
            timeout: seconds for the answer; UNSET means `Limits.request_timeout`, None no bound.

        Returns:
            The journal's high watermark: the offset of its last record.

        Raises:
            MethodNotFound: the agent attaches no sessions.
            RequestError: -32000 "attach denied", -32002 for a session that nobody knows, and -32602
                where `from_offset` was given and is ahead of the journal. Without it, such a journal is
                read from its start (event `attachment_ahead`), and an open turn ends with
                `AttachmentClosed`.
            TurnInProgress: `from_offset` asks for what an open turn has had.
            LocalProtocolError: it was closed or is being loaded, or `peer` has a session of that id.
            ConnectionClosed: the link is gone. Cancelling abandons the attach.
        """
        target = self.peer if peer is None else peer
        await target.link()
        if self.loading:
            msg = f"session {self.session_id!r} is being loaded"
            raise LocalProtocolError(msg)
        if target is self.peer and self.forgotten:
            msg = f"session {self.session_id!r} was closed here; load or attach it"
            raise LocalProtocolError(msg)
        if self.turn is not None and from_offset is not None and from_offset <= self.offset:
            raise TurnInProgress(self.session_id)
        if target is not self.peer:
            target.take_over(self)
        attachment = self.attach_here()
        if cwd is not None:
            self.cwd = target.absolute(cwd)
        if capability is not None:
            attachment.capability = capability
        if history == "none":
            return await attachment.attach(history="none", timeout=timeout)
        turn, self.interrupted = self.interrupted, None
        error = None if turn is None else turn.error
        if turn is not None and turn.resume():
            attachment.turn_resumes(turn)
        else:
            turn = None
        if from_offset is not None and from_offset <= self.offset and self.inbox.view is not None:
            self.inbox.view.begin_load()
        try:
            return await attachment.attach(
                from_offset=from_offset, history=history, timeout=timeout
            )
        except BaseException:
            if turn is not None and error is not None:
                turn.end(None, error)
            raise

    async def detach(self) -> None:
        """`_raxol/session.detach`: the agent need not send what others do in this session any more.

        Nothing is attached again by itself then; a turn of ours that is open is told as without an
        attachment. A no-op for a session that is not attached.
        """
        attachment = self.attachment
        if attachment is None or not (attachment.live or attachment.wanted):
            return
        attachment.stop()
        await self.peer.notify_extension(DETACH, {"sessionId": self.session_id})

    def on_record(self, observer: Callable[[SessionRecord], object]) -> Callable[[], None]:
        """Call `observer(record)` for each record that is no update, in its place among the updates.

        These are where turns begin and end (of other clients, too), steers, and what future agents
        write; of a session that is attached. It is called in the reader and must not block; what it
        raises is logged. Returns a function that ends that.
        """
        return self.attach_here().observe(observer)

    async def close(self) -> None:
        """`session/close`: the agent cancels what runs and frees the session; its history stays."""
        await self.peer.close_session(self.session_id)

    # -------------------------------------------------------------- for the peer

    @property
    def survives(self) -> bool:
        """Whether it goes on over another link when the one it has is lost."""
        attachment = self.attachment
        wanted = attachment is not None and attachment.wanted
        return wanted and self.peer.reattaches and not self.forgotten

    def attach_here(self) -> Attachment:
        """Its attachment, which from now on sees its updates first."""
        if self.attachment is None:
            self.attachment = Attachment(self)
        self.peer.route_to(self, self.attachment)
        return self.attachment

    @property
    def forgotten(self) -> bool:
        """Whether it was closed here, or another has its id."""
        return self.peer.sessions.get(self.session_id) is not self

    @property
    def loading(self) -> bool:
        """Whether a load or resume of it waits for its answer."""
        return self.inbox.label == "replay"

    def opened(
        self,
        response: v1_unstable.NewSessionResponse
        | v1_unstable.LoadSessionResponse
        | v1_unstable.ResumeSessionResponse,
    ) -> None:
        """Take what the agent answered: its modes and options replace what was known."""
        self.response = response
        self._config_options = None

    def view_opened(self, method: str, raw: Any) -> None:
        """An answer to a load or resume, in the reader: what the view says of modes and options."""
        view = self.inbox.view
        with suppress(RemoteProtocolError):  # which the caller is told
            response = read_result(method, v1_unstable.LoadSessionResponse, raw)
            modes, options = or_none(response.modes), or_none(response.config_options)
            if view is not None and modes is not None:
                view.apply(v1.CurrentModeUpdate(current_mode_id=modes.current_mode_id))
            if view is not None and options is not None:
                view.apply(v1.ConfigOptionUpdate(config_options=options))

    def changed(self, params: Any, raw: Any) -> None:
        """A successful answer, in the reader: a change that was asked for here shows in the view."""
        view = self.inbox.view
        if view is None:
            return
        if isinstance(params, v1.SetSessionModeRequest):
            view.apply(v1.CurrentModeUpdate(current_mode_id=params.mode_id))
        elif isinstance(params, v1.SetSessionConfigOptionRequest):
            with suppress(RemoteProtocolError):
                answer = read_result(
                    "session/set_config_option", v1.SetSessionConfigOptionResponse, raw
                )
                options = answer.config_options or with_option(
                    view.config_options or (), params.config_id, params.value
                )
                view.apply(v1.ConfigOptionUpdate(config_options=options))

    def load_begins(self, *, replays: bool) -> None:
        """Label what comes as replayed history until the answer."""
        self.inbox.label = "replay"
        if replays and self.attachment is not None:
            self.attachment.begin_load()
        view = self.inbox.view
        if view is not None:
            if replays:
                view.begin_load()
            else:
                view.begin_resume()

    def load_ends(self) -> None:
        """The answer to a load or resume is here."""
        self.inbox.load_ended()
        if self.inbox.view is not None:
            self.inbox.view.end_load()
