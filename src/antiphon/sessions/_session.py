"""The client's view of a session: prompts, turns, updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec

from antiphon._errors import (
    AntiphonError,
    ConnectionClosed,
    LocalProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    TurnInProgress,
)
from antiphon.runtime import OutboundCall
from antiphon.schema import UNSET, encode_checked
from antiphon.sessions._content import as_blocks, check_prompt_content
from antiphon.sessions._inbox import Inbox, Observer, Sink, Subscription, UpdateQueue
from antiphon.sessions._methods import or_none, read_result
from antiphon.sessions._update import Update

if TYPE_CHECKING:
    from types import TracebackType

    from antiphon.schema import v1, v1_unstable
    from antiphon.sessions._agent_peer import AgentPeer

    Prompt: TypeAlias = str | v1.ContentBlock | Sequence[str | v1.ContentBlock]

__all__ = ["PromptOutcome", "PromptTurn", "Session"]

log = logging.getLogger("antiphon.session")


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


class PromptTurn(OutboundCall, AsyncIterator[Update]):
    """A prompt and its turn: iterate over it inside `async with`, or await it.

    The prompt is sent on `await` or on entering the block. Iteration gives every update of the turn
    in wire order and ends after the last one; then `response`, `stop_reason` and `usage` are set. An
    error answer, a timeout or a lost connection is raised by the iteration, after the updates that
    came before it. Leaving the block earlier sends `session/cancel`, lets the rest go with a log line
    and waits for the answer, at most `Limits.cancel_backstop` seconds; an error in its place is let go,
    too.

    Attributes:
        response: the `PromptResponse`, None until the turn ended, and where none came.
    """

    def __init__(
        self,
        session: Session,
        params: v1.PromptRequest,
        timeout: float | None,
    ) -> None:
        super().__init__("session/prompt", blocking=False)
        self.session = session
        self.params = params
        self.response: v1_unstable.PromptResponse | None = None
        self._timeout = timeout
        self._queue: UpdateQueue | None = None
        self._error: Exception | None = None
        self._raw: Any = None
        self._mark = -1  # updates received when the answer came; -1 until then
        self._raised = False
        self._over: asyncio.Future[None] | None = None  # where leaving waits for the answer
        #: Whether `session/cancel` was sent: permission requests are answered cancelled from then on.
        self.cancelling = False

    # -------------------------------------------------------------- the reader's side

    def answered(self, result: Any, error: Exception | None) -> None:
        """The end of the turn, in the place it has in the stream."""
        session, connection = self.session, self.session.inbox.connection
        self._end(result, error)
        if isinstance(error, RequestTimeout):
            # What comes until the agent has stopped belongs to this turn, not to the next.
            session.winding_down = _WindingDown(session)
            connection.linger(self, session.winding_down, connection.limits.cancel_backstop)
            # Many agents ignore `$/cancel_request`: tell them in the way they all know.
            session.peer.notify_cancel(session.session_id)

    def _end(self, result: Any, error: Exception | None) -> None:
        inbox = self.session.inbox
        self._raw, self._error = result, error
        self._mark = inbox.received
        left, inbox.turn = inbox.turn, None
        if isinstance(left, Sink):
            self._report(left.dropped)
        inbox.label = "session"
        self.session.turn = None
        if self._queue is not None:
            self._queue.wake()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    # -------------------------------------------------------------- the user's side

    async def _begin(self) -> None:
        """Send the prompt, once the agent is done with a turn that timed out."""
        if self._queue is None and self.session.winding_down is not None:
            await self.session.winding_down.wait()
        self.send()

    def send(self) -> None:
        """Send the prompt.

        Raises:
            TurnInProgress: the session has an open turn.
            LocalProtocolError: it is being loaded, or this prompt was sent already.
            CapabilityError: the agent does not take such content.
            ConnectionClosed: the link is gone.
        """
        session = self.session
        if self._queue is not None:
            msg = "this prompt was sent already; make a new one"
            raise LocalProtocolError(msg)
        if session.turn is not None:
            raise TurnInProgress(session.session_id)
        if session.loading:
            msg = f"session {session.session_id!r} is being loaded"
            raise LocalProtocolError(msg)
        check_prompt_content(self.params.prompt, session.peer.tree)
        inbox = session.inbox
        self._queue = inbox.turn = UpdateQueue(inbox.connection)
        inbox.label = "turn"
        session.turn = self
        try:
            inbox.connection.open_call(self, encode_checked(self.params), self._timeout)
        except BaseException:
            inbox.turn = self._queue = session.turn = None
            inbox.label = "session"
            raise

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

    async def cancel(self) -> None:
        """Ask the agent to stop; go on iterating, the turn ends by itself. A no-op once it ended."""
        if self._queue is not None and not self.ended:
            await self.session.cancel()

    def __aiter__(self) -> PromptTurn:
        return self

    async def __anext__(self) -> Update:
        queue = self._queue
        if queue is None:
            msg = "use `async with session.prompt(…) as turn` to iterate over a turn"
            raise LocalProtocolError(msg)
        while True:
            update = queue.take()
            if update is not None:
                return update
            if self._mark >= 0:
                await self._finish()
                raise StopAsyncIteration
            await queue.wait()

    async def _finish(self) -> None:
        """The answer, once everything before it was delivered: to us, and to the observers."""
        inbox = self.session.inbox
        # A lost link and a timeout are no answers: they are seen at once (DESIGN §4.6).
        unanswered = isinstance(self._error, (ConnectionClosed, RequestTimeout))
        if inbox.observed and not unanswered:
            await inbox.settled(self._mark)
        if self._error is not None:
            self._raised = True
            raise self._error
        if self.response is None:
            from antiphon.schema import v1_unstable

            try:
                self.response = read_result(self.method, v1_unstable.PromptResponse, self._raw)
            except RemoteProtocolError:
                self._raised = True
                raise

    def __await__(self) -> Generator[Any, None, PromptOutcome]:
        return self._run().__await__()

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
        limit = connection.limits.cancel_backstop
        self._over = connection.create_future()
        try:
            await self.session.cancel()
            async with asyncio.timeout(limit or 0.001):
                await self._over
                # An answer is to be seen afterwards; an error of a turn that was left is not.
                with suppress(AntiphonError):
                    await self._finish()
        except TimeoutError:
            if self.ended:  # an observer is still busy with the last updates
                return
            log.warning("session %s: no answer to the cancelled prompt", self.session.session_id)
            connection.abandon(self)
            self._end(None, RequestTimeout(self.method, limit))
        except ConnectionClosed:
            pass

    def _let_go(self) -> None:
        """Keep nothing for a consumer that has left, whenever the answer comes."""
        queue, inbox = self._queue, self.session.inbox
        if queue is not None:
            if inbox.turn is queue:
                inbox.turn = Sink(inbox.connection)
            self._report(queue.discard())

    def _report(self, dropped: int) -> None:
        if dropped:
            log.info("session %s: %d updates were not taken", self.session.session_id, dropped)


class _WindingDown(OutboundCall):
    """A turn that timed out here and is not known to have ended at the agent."""

    __slots__ = ("_over", "_session", "_sink")

    def __init__(self, session: Session) -> None:
        super().__init__("session/prompt", blocking=False)
        inbox = session.inbox
        self._session = session
        self._sink = inbox.turn = Sink(inbox.connection)
        self._over = inbox.connection.create_future()
        inbox.label = "turn"

    def answered(self, result: Any, error: Exception | None) -> None:
        """The agent has stopped, or is given up."""
        session, inbox = self._session, self._session.inbox
        session.winding_down = None
        inbox.turn = None
        inbox.label = "session"
        self._over.set_result(None)
        if self._sink.dropped:
            log.info(
                "session %s: %d updates of a turn that timed out were not taken",
                session.session_id,
                self._sink.dropped,
            )

    async def wait(self) -> None:
        """Wait for that; it takes at most `Limits.cancel_backstop`."""
        await asyncio.shield(self._over)


class Session:
    """One session of an agent, on one connection. Made by `AgentPeer.new_session` and its kin.

    Attributes:
        session_id: its id.
        cwd: its absolute working directory.
        additional_directories: further absolute roots, as sent.
        response: the answer to `session/new`, `session/load` or `session/resume`; None while a load
            or resume is still under way.
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
        #: The turn before, if it timed out here and may still run at the agent.
        self.winding_down: _WindingDown | None = None
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
        meta: dict[str, Any] | None = None,
    ) -> PromptTurn:
        """A prompt, not sent yet: `await` it for the whole outcome, or iterate over it in `async with`.

        Args:
            content: text, a content block, or several of either.
            timeout: seconds for the whole turn, None for no bound; then `RequestTimeout`, and the
                agent is told to stop. The next prompt is sent when it has, or after
                `Limits.cancel_backstop`.
            meta: `_meta` of the request.
        """
        from antiphon.schema import v1

        params = v1.PromptRequest(
            session_id=self.session_id,
            prompt=as_blocks(content),
            meta=UNSET if meta is None else meta,
        )
        return PromptTurn(self, params, timeout)

    async def cancel(self) -> None:
        """Send `session/cancel` if a turn is open; permission requests of it are answered cancelled.

        Returns when the frame is queued; the turn ends with its answer (R1-91, R1-92).
        """
        if self.turn is None:
            return
        self.peer.notify_cancel(self.session_id)

    def updates(self) -> Subscription:
        """Every update of this session from here on, in order, turns included.

        The first subscriber also gets what arrived outside a turn and was seen by nobody (e.g. the
        commands announced right after `session/new`). Ends when the connection is lost or the
        subscription is closed.
        """
        return self.inbox.subscribe()

    def __aiter__(self) -> Subscription:
        return self.updates()

    def replay(self) -> Subscription:
        """The history that `session/load` sends, ending where its answer stands in the stream.

        Call it before the answer is here, inside `async with agent.load_session(…)`; afterwards it
        gives what is still there unseen.
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
        from antiphon.schema import v1

        await self.peer.request(
            v1.SetSessionModeRequest(session_id=self.session_id, mode_id=mode_id)
        )

    async def set_config_option(
        self,
        config_id: str,
        value: str | bool,  # noqa: FBT001  (a value of the protocol, not a switch)
    ) -> list[v1_unstable.SessionConfigOption]:
        """`session/set_config_option`; returns the full list of options as they are now."""
        from antiphon.schema import v1

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
            options = [
                msgspec.structs.replace(option, current_value=value)
                if option.id == config_id
                else option
                for option in self.config_options or ()
            ]
        self._config_options = options
        return options

    async def close(self) -> None:
        """`session/close`: the agent cancels what runs and frees the session; its history stays."""
        await self.peer.close_session(self.session_id)

    # -------------------------------------------------------------- for the peer

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

    def load_begins(self) -> None:
        """Label what comes as replayed history until the answer."""
        self.inbox.label = "replay"

    def load_ends(self) -> None:
        """The answer to a load or resume is here."""
        self.inbox.load_ended()
