"""The client's side of a connection: the agent as seen from here."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from antiphon._calls import AgentCalls
from antiphon._errors import (
    AntiphonError,
    ConnectionClosed,
    LimitExceeded,
    LocalProtocolError,
    MethodNotFound,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
    StartError,
    TurnInProgress,
    VersionMismatch,
)
from antiphon.runtime import Connection, FutureCall, OutboundCall
from antiphon.schema import (
    UNSET,
    UnsetType,
    decode,
    encode,
    encode_checked,
    v1,
    v1_unstable,
)
from antiphon.sessions._attach_frames import DETACH, KEY, LOAD, attach_params, read_watermark
from antiphon.sessions._client_router import ClientHandlersLike, ClientRouter
from antiphon.sessions._content import check_prompt_content
from antiphon.sessions._methods import (
    PROTOCOL_VERSION,
    or_none,
    read_result,
    tag_of,
    tree_of,
)
from antiphon.sessions._peer import Peer, check_extension
from antiphon.sessions._relink import Reattach, Relink
from antiphon.sessions._session import Once, Session
from antiphon.sessions._side_router import session_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    from antiphon.core import Limits
    from antiphon.runtime import TelemetryEvent
    from antiphon.sessions._attach_frames import History
    from antiphon.sessions._attachment import Attachment, Capability
    from antiphon.sessions._inbox import Inbox
    from antiphon.transports import Transport

__all__ = ["AgentPeer", "SessionOpening"]

log = logging.getLogger("antiphon.client")

#: How long the answer to a `session/new` that was given up is looked for where requests have no bound.
_LATE_ANSWER = 60.0


class _MarkedCall(FutureCall):
    """A call about a session: notes how many of its updates had arrived before the answer.

    `then` is called with a result in its place in the stream.
    """

    __slots__ = ("inbox", "mark", "then")

    def __init__(
        self,
        method: str,
        future: asyncio.Future[Any],
        inbox: Inbox,
        then: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(method, future)
        self.inbox = inbox
        self.mark = 0
        self.then = then

    def answered(self, result: Any, error: Exception | None) -> None:
        self.mark = self.inbox.received
        super().answered(result, error)
        if error is None and self.then is not None:
            self.then(result)

    async def settled(self) -> None:
        """Wait until the observers have returned from what came before the answer."""
        await self.inbox.settled(self.mark)


class _ClosingCall(_MarkedCall):
    """`session/close` or `session/delete`: what its answer says holds from there on in the stream.

    Behind a refusal the updates are wanted again; behind a result the session is gone, whoever still
    waits for it, and one of the same id is another.
    """

    __slots__ = ("closed",)

    def __init__(
        self, method: str, future: asyncio.Future[Any], inbox: Inbox, closed: Callable[[], None]
    ) -> None:
        super().__init__(method, future, inbox)
        self.closed = closed

    def answered(self, result: Any, error: Exception | None) -> None:
        super().answered(result, error)
        if error is None:
            self.closed()
        else:
            self.inbox.keep()


class _NewSessionCall(FutureCall):
    """`session/new`: registers the session in the reader, since the next frame may be its update."""

    __slots__ = ("given_up", "make", "mark", "open", "session")

    def __init__(
        self,
        future: asyncio.Future[Any],
        make: Callable[[v1_unstable.NewSessionResponse], Session],
        given_up: Callable[[_NewSessionCall], None],
    ) -> None:
        super().__init__("session/new", future)
        self.make = make
        self.mark = 0
        #: Called where the answer may yet come; in the reader, since the next frame may be it.
        self.given_up = given_up
        #: What came of it, and whether it waits for its answer: the future says neither once its
        #: awaiter was cancelled.
        self.session: Session | None = None
        self.open = True

    def answered(self, result: Any, error: Exception | None) -> None:
        self.open = False
        if _given_up_here(error):
            self.given_up(self)
        if error is None:
            try:
                response = read_result(self.method, v1_unstable.NewSessionResponse, result)
                self.session = session = result = self.make(response)
                self.mark = session.inbox.received
            except AntiphonError as fault:
                error = fault
        super().answered(result, error)


class _LoadCall(_MarkedCall):
    """`session/load` or `session/resume`: what follows its answer in the stream is no replay."""

    __slots__ = ("known", "open", "opened", "session")

    def __init__(
        self, method: str, future: asyncio.Future[Any], session: Session, *, known: bool
    ) -> None:
        super().__init__(method, future, session.inbox)
        self.session = session
        #: Whether the session was open before.
        self.known = known
        #: Whether it waits for its answer, and whether that was a good one: the future does not say
        #: so once its awaiter was cancelled.
        self.open = True
        self.opened = False

    def can_wait(self) -> bool:
        """A history that somebody takes may be longer than any budget (DESIGN §4.4)."""
        inbox = self.inbox
        return inbox.consumed and inbox.held()[1] > inbox.connection.limits.queue_bytes

    def answered(self, result: Any, error: Exception | None) -> None:
        if _given_up_here(error):
            self.given_up()
        else:
            self.open, self.opened = False, error is None
            self.session.abandoned |= error is not None and not self.known
            self.session.load_ends()
            if self.opened and self.method != LOAD:
                self.session.peer.want_attached(
                    self.session, replayed=self.method == "session/load"
                )
            self.session.peer.settle_forgotten(self.session)
        super().answered(result, error)
        if error is None and self.inbox.view is not None:
            self.session.view_opened(self.method, result)

    def given_up(self) -> None:
        """Nobody waits for the answer any more; what comes before it is not the next load's."""
        if not self.open:
            return
        self.open = False
        self.session.abandoned |= not self.known
        peer = self.session.peer
        if self.id and not self.known and not peer.connection.closed:
            peer.expect_late_load(self.session, self)
        else:
            self.session.load_ends()


class _Load:
    """A load or resume that was sent."""

    def __init__(
        self,
        peer: AgentPeer,
        session: Session,
        call: _LoadCall,
        opened: Callable[[Session], Awaitable[None]] | None = None,
    ) -> None:
        self.session = session
        self._opened = opened
        self._peer = peer
        self._call = call
        self._before = session.cwd, session.additional_directories

    async def finish(self, result_type: Any) -> None:
        """Wait for the answer; a session that could not be opened is forgotten."""
        call = self._call
        try:
            raw = await _settled(call, call.future)
            self.session.opened(read_result(call.method, result_type, raw))
            if self._opened is not None:
                await self._opened(self.session)
        except asyncio.CancelledError:
            # The agent may have opened it already, and nobody will ever use it.
            unwanted = call.opened and not call.known and not self.session.forgotten
            self.abandon()
            if unwanted:
                self._peer.let_go_unwanted(self.session.session_id, call.method)
            raise
        except BaseException:
            self.abandon()
            raise

    def leave(self, result_type: Any) -> None:
        """Wait no longer: a session whose answer is here is open, any other is abandoned."""
        future = self._call.future
        if future.done() and not future.cancelled() and future.exception() is None:
            with suppress(RemoteProtocolError):
                result = read_result(self._call.method, result_type, future.result())
                self.session.opened(result)
                return
        self.abandon()

    def abandon(self) -> None:
        """Give up: the agent is told, and a session that was new here is forgotten."""
        peer, session, call = self._peer, self.session, self._call
        peer.connection.abandon(call)
        if not call.future.done():
            call.future.cancel()
        session.cwd, session.additional_directories = self._before
        call.given_up()
        if not call.known and not session.forgotten:
            peer.forget(session.session_id)
            peer.take_back(session.session_id)


class _AttachLoad(_LoadCall):
    """An attach that opens a session here; what is before its answer is replay."""

    __slots__ = ("attachment", "from_offset", "history")

    def __init__(
        self,
        future: asyncio.Future[Any],
        attachment: Attachment,
        from_offset: int,
        history: History,
    ) -> None:
        super().__init__(LOAD, future, attachment.session, known=False)
        self.attachment = attachment
        self.from_offset = from_offset
        self.history: History = history

    def answered(self, result: Any, error: Exception | None) -> None:
        mark = 0
        if error is None:
            try:
                mark = read_watermark(result)
            except RemoteProtocolError as fault:
                error = fault
        self.attachment.attached(self.from_offset, self.history, mark, error)
        self.attachment.opened()
        super().answered(result, error)

    def given_up(self) -> None:
        self.attachment.opened()
        super().given_up()


class _LateLoad(OutboundCall):
    """A load or resume that is not waited for any more; its history ends where its answer stands."""

    __slots__ = ("_over", "_session", "awaited")

    def __init__(self, session: Session, method: str) -> None:
        super().__init__(method, blocking=False)
        self._session = session
        #: Whether the session is to be opened again behind it.
        self.awaited = False
        self._over = session.inbox.connection.create_future()

    def answered(self, result: Any, error: Exception | None) -> None:
        """The late answer, or its absence."""
        session, peer = self._session, self._session.peer
        session.load_ends()
        peer.late_load_ended(self, session)
        self._over.set_result(None)
        if error is None and not self.awaited and session.session_id not in peer.sessions:
            peer.let_go_unwanted(session.session_id, self.method)

    async def wait(self) -> None:
        """Wait for that; it takes at most `Limits.cancel_backstop`."""
        self.awaited = True
        await asyncio.shield(self._over)


class _LateNewSession(OutboundCall):
    """A `session/new` that is not waited for any more: a session that yet comes of it is closed."""

    __slots__ = ("_peer",)

    def __init__(self, peer: AgentPeer) -> None:
        super().__init__("session/new", blocking=False)
        self._peer = peer

    def answered(self, result: Any, error: Exception | None) -> None:
        """The late answer, or its absence."""
        if error is not None:
            return
        peer = self._peer
        try:
            response = read_result(self.method, v1_unstable.NewSessionResponse, result)
        except RemoteProtocolError as fault:
            log.info("the late answer to session/new is none: %s", fault)
            return
        if response.session_id not in peer.sessions:  # else the id of one in use was given again
            peer.close_unwanted(response.session_id)


class SessionOpening(Once["Session"]):
    """`session/load`, `session/resume` or an attach to be sent: await it, or use it in `async with`.

    Awaiting sends the request and gives the `Session` once the agent has answered. `async with` sends
    it and gives the session at once, so that replayed history can be iterated (`session.replay()`)
    before the answer; leaving the block waits for the answer, and raises what is wrong with it.

    One that is given up before its answer (a timeout, a cancellation, an error in the block) is over at
    the agent only with that: the next load of the session is sent then, or after
    `Limits.cancel_backstop`, unless it was open before. What is opened too late is closed again.
    """

    def __init__(self, send: Callable[[], Awaitable[_Load]], verb: str, result_type: Any) -> None:
        self._send = send
        self._result_type = result_type
        self._load: _Load | None = None
        self.unsent = f"agent.{verb}_session(…) was never awaited or entered"

    async def _run(self) -> Session:
        load = await self._send()
        await load.finish(self._result_type)
        return load.session

    async def __aenter__(self) -> Session:
        self.unsent = ""
        self._load = await self._send()
        return self._load.session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._load is None:
            return
        if kind is None:
            await self._load.finish(self._result_type)
        else:
            self._load.leave(self._result_type)


class AgentPeer(Peer, AgentCalls):
    """An agent, connected and initialized. Made by `antiphon.spawn` and `antiphon.connect`.

    Every method waits for the agent's answer and raises `RequestError` for an error answer,
    `RequestTimeout`, `ConnectionClosed`, and `CapabilityError` without sending anything where the
    agent did not advertise what the call needs (R1-28, R1-41). Cancelling a caller sends
    `$/cancel_request`.

    Attributes:
        connection: the runtime underneath.
        sessions: the sessions known on this connection, by id.
        initialize_result: the agent's answer to `initialize`.
        unstable: whether unstable methods may be called.
    """

    side = "agent"
    initialize_result: v1_unstable.InitializeResponse

    def __init__(
        self,
        transport: Transport,
        handlers: ClientHandlersLike,
        *,
        unstable: bool = False,
        limits: Limits | None = None,
        record: Callable[[str, bytes], None] | None = None,
        telemetry: Callable[[TelemetryEvent], None] | None = None,
        on_close: Callable[[], None] | None = None,
        reattach: Reattach | None = None,
        renew: Callable[[], Transport] | None = None,
    ) -> None:
        self.unstable = unstable
        self._on_close = on_close
        self._options = limits, record, telemetry
        self._renew = renew
        self._hello: tuple[v1.Implementation | None, float | None] = None, None
        self._authenticated: str | None = None
        #: Whether the agent says that a client can attach to its sessions; None where it says nothing.
        self.resumable: bool | None = None
        #: Whether it has let us attach to one.
        self.has_attached = False
        self._relink = None if reattach is None or renew is None else Relink(self, reattach)
        #: Whether another link may have to be waited for (`link`).
        self.relinks = self._relink is not None
        self.sessions: dict[str, Session] = {}
        self._late_loads: dict[str, _LateLoad] = {}
        self._handlers = handlers
        self._router = ClientRouter(self, handlers)
        self.transport = transport
        self.connection = self._connection_over(transport)
        self.tree = {}

    def _connection_over(self, transport: Transport) -> Connection:
        limits, record, telemetry = self._options
        connection = Connection(
            transport, "client", self._router, limits=limits, record=record, telemetry=telemetry
        )
        connection.on_crowded = self._router.look_at_sessions
        return connection

    # -------------------------------------------------------------- life

    async def initialize(
        self,
        client_info: v1.Implementation | None,
        timeout: float | None,
    ) -> None:
        """Open the transport and shake hands (R1-20..R1-23); called once, by `connect`.

        Raises:
            StartError: the agent ended or stayed silent.
            VersionMismatch: it answered a version we cannot speak; the link is closed.
            RequestError: it refused.
        """
        self._hello = client_info, timeout
        await self._shake_hands(self.connection)

    async def _shake_hands(self, connection: Connection) -> None:
        client_info, timeout = self._hello
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        capabilities = self._handlers.advertised(unstable=self.unstable)
        self._router.offer(capabilities)
        params = v1_unstable.InitializeRequest(
            protocol_version=PROTOCOL_VERSION,
            client_capabilities=capabilities,
            client_info=UNSET if client_info is None else client_info,
        )
        call = _InitializeCall(loop.create_future(), partial(self._initialized, connection))
        try:
            async with asyncio.timeout_at(deadline):
                await connection.start()
                connection.open_call(call, encode_checked(params))
                await call.future
        except TimeoutError:
            reason = f"no answer to initialize within {timeout:g} s"
            raise self._start_error(connection, reason, timed_out=True) from None
        except StartError:
            raise
        except ConnectionClosed as error:
            raise self._start_error(
                connection, f"the agent ended before it answered initialize: {error.reason}", error
            ) from None

    def _start_error(
        self,
        connection: Connection,
        reason: str,
        error: ConnectionClosed | None = None,
        *,
        timed_out: bool = False,
    ) -> StartError:
        unfinished: bytes = getattr(connection.transport, "unfinished", b"")
        noise = b"\n".join((connection.noise, unfinished)).decode("utf-8", "replace").strip()
        if noise:
            reason += f"; it wrote what is no protocol message: {noise[:500]!r}"
        process = _process_of(connection.transport)
        tail = error.stderr_tail if error is not None else ""
        status = error.exit_status if error is not None else None
        return StartError(
            reason,
            command=list(getattr(process, "argv", ())),
            timed_out=timed_out,
            exit_status=status if status is not None else getattr(process, "exit_status", None),
            stderr_tail=tail or getattr(process, "stderr_tail", ""),
        )

    def _initialized(self, connection: Connection, raw: Any) -> None:
        """The answer to `initialize`, in the reader: the very next frame may rely on it."""
        result = read_result("initialize", v1_unstable.InitializeResponse, raw)
        if result.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatch(PROTOCOL_VERSION, result.protocol_version)
        self.initialize_result = result
        self.tree = tree_of(result.agent_capabilities) or {}
        self.resumable = _resumable(result.meta)
        connection.initialized = True
        if connection is not self.connection:
            self._move_to(connection)

    async def aclose(self) -> None:
        """Close the link, end the process that was started for it. Idempotent, bounded, cancel-safe.

        Open turns are cancelled first, so that an agent at work knows at once. Where another link is
        being made, that ends.
        """
        try:
            if self._relink is not None:
                await self._relink.stop()
        finally:
            await self._aclose()

    async def _aclose(self) -> None:
        for session in self.sessions.values():
            if session.turn is not None:
                self.notify_cancel(session.session_id)
        try:
            await self.connection.aclose()
        finally:
            if self._relink is not None:
                self._relink.close()
            try:
                await self._handlers.sessions_closed([*self.sessions, *self._router.strangers])
            finally:
                if self._on_close is not None:
                    self._on_close()

    async def wait_closed(self) -> None:
        """Wait until the link is gone, whoever ended it, and no other is made."""
        if self._relink is not None:
            await asyncio.shield(self._relink.over)
        await self.connection.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # -------------------------------------------------------------- what is known

    @property
    def process(self) -> Any:
        """The agent's process (`pid`, `exit_status`, `stderr_tail`) if it is one of ours, else None."""
        return _process_of(self.transport)

    @property
    def capabilities(self) -> v1_unstable.AgentCapabilities:
        """What the agent advertised; what it left out reads as unsupported."""
        given = self.initialize_result.agent_capabilities
        return v1_unstable.AgentCapabilities() if isinstance(given, UnsetType) else given

    @property
    def info(self) -> v1.Implementation | None:
        """Name and version of the agent, if it said."""
        return or_none(self.initialize_result.agent_info)

    @property
    def auth_methods(self) -> Sequence[v1_unstable.AuthMethod]:
        """How the agent lets users sign in."""
        methods = self.initialize_result.auth_methods
        return () if isinstance(methods, UnsetType) else methods

    # -------------------------------------------------------------- sessions

    async def new_session(
        self,
        *,
        cwd: str | Path = ".",
        mcp_servers: Sequence[v1_unstable.McpServer] = (),
        additional_directories: Sequence[str | Path] = (),
        meta: dict[str, Any] | None = None,
        timeout: float | None | UnsetType = UNSET,
    ) -> Session:
        """`session/new`.

        Args:
            cwd: working directory; made absolute here.
            mcp_servers: servers the agent shall connect to.
            additional_directories: further roots, if the agent takes them.
            meta: `_meta` of the request.
            timeout: seconds; UNSET means `Limits.request_timeout`.
        """
        directory, more = self._directories(cwd, additional_directories)
        self._check_room()
        params = v1_unstable.NewSessionRequest(
            cwd=directory,
            mcp_servers=list(mcp_servers),
            additional_directories=more or UNSET,
            meta=UNSET if meta is None else meta,
        )
        self._check_offered("session/new", params)
        await self.link()

        def make(response: v1_unstable.NewSessionResponse) -> Session:
            session_id = response.session_id
            known = self.sessions.get(session_id)
            if known is not None:
                if known.turn is not None or known.loading:
                    msg = f"the agent gave a new session the id {session_id!r} of one in use"
                    raise RemoteProtocolError(msg)
                self.forget(session_id)  # some agents make the id from the folder (quirk 28)
                self.take_back(session_id)
            told = self._router.unknown_of(session_id)
            try:
                session = self._register(session_id, directory, more)
            except LimitExceeded:  # several were asked for at once
                self.close_unwanted(session_id)
                raise
            session.opened(response)
            if self._may_attach:
                session.attach_here().begin_new(told)
            return session

        connection = self.connection

        def given_up(call: _NewSessionCall) -> None:
            """The agent may have opened it, or be about to, and nobody will ever use it."""
            late = connection.limits.request_timeout or _LATE_ANSWER
            connection.linger(call, _LateNewSession(self), late)

        call = _NewSessionCall(connection.create_future(), make, given_up)
        connection.open_call(call, encode_checked(params), self._timeout("session/new", timeout))
        try:
            session: Session = await connection.answer_to(call)
            await session.inbox.settled(call.mark)
            await self._attach_opened(session)
        except asyncio.CancelledError:
            if call.session is not None:
                self.close_unwanted(call.session.session_id)
            elif call.open and not connection.closed:
                given_up(call)
            raise
        return session

    def adopt_session(
        self,
        session_id: str,
        *,
        cwd: str | Path,
        additional_directories: Sequence[str | Path] = (),
    ) -> Session:
        """A `Session` for an id that came another way, without asking the agent.

        For a raw `session/new`, an unstable `session/fork`, or a subagent's child session. Updates
        that arrived for it are kept (at most `Limits.unknown_session_updates` of all such sessions)
        and come first.

        Args:
            session_id: as the agent gave it.
            cwd: its directory; made absolute here. With the next it is what the agent may touch.
            additional_directories: further roots.

        Raises:
            LocalProtocolError: the session is known here; it is in `sessions`.
            LimitExceeded: there are `Limits.sessions` already.
        """
        if session_id in self.sessions:
            msg = f"session {session_id!r} is known: agent.sessions has it"
            raise LocalProtocolError(msg)
        directory, more = self._directories(cwd, additional_directories)
        return self._register(session_id, directory, more)

    def let_go_unwanted(self, session_id: str, method: str) -> None:
        """A session was opened too late: close it, but for an attach, since others may be using it."""
        if method != LOAD:
            self.close_unwanted(session_id)
            return
        self._router.drop_unknown(session_id)
        log.info("session %s was attached too late, and is let go", session_id)
        with suppress(AntiphonError):  # the link is about to go
            self.connection.notify(DETACH, encode({"sessionId": session_id}))

    def close_unwanted(self, session_id: str) -> None:
        """Have the agent close a session that nobody waits for any more, if it closes any."""
        if session_id in self.sessions:
            self.forget(session_id)
            self.take_back(session_id)
        self._router.drop_unknown(session_id)
        if not self.offers("sessionCapabilities.close"):
            log.info("session %s was opened too late, and this agent closes none", session_id)
            return
        log.info("session %s was opened too late, and is closed", session_id)
        call = FutureCall("session/close", self.connection.create_future())
        call.blocking = False  # nobody waits for it, so it may be asked past a spent budget
        params = encode(v1.CloseSessionRequest(session_id=session_id))
        with suppress(AntiphonError):  # the link is about to go
            self.connection.open_call(call, params, self.connection.limits.request_timeout)

    async def request_extension(
        self, method: str, params: Any = None, *, timeout: float | None | UnsetType = UNSET
    ) -> Any:
        """Ask an extension method (its name starts with `_`); the result as plain JSON values.

        Where the parameters name a session that is known here (`sessionId`), the answer is visible
        only after the observers of its updates have returned from what came before it (DESIGN §4.2);
        an answer that belongs to no session waits for nobody.
        """
        session = self.sessions.get(session_of(params))
        await self.link(session)
        if session is None:
            return await super().request_extension(method, params, timeout=timeout)
        check_extension(method)
        call = _MarkedCall(method, self.connection.create_future(), session.inbox)
        self.connection.open_call(call, encode_checked(params), self._timeout(method, timeout))
        return decode(Any, await _settled(call, self.connection.answer_to(call)))

    def load_session(
        self,
        session_id: str,
        *,
        cwd: str | Path = ".",
        mcp_servers: Sequence[v1_unstable.McpServer] = (),
        additional_directories: Sequence[str | Path] = (),
        timeout: float | None | UnsetType = UNSET,
    ) -> SessionOpening:
        """`session/load`: the agent replays the conversation, then answers. See `SessionOpening`."""
        request = v1_unstable.LoadSessionRequest
        return self._open(request, session_id, cwd, mcp_servers, additional_directories, timeout)

    def resume_session(
        self,
        session_id: str,
        *,
        cwd: str | Path = ".",
        mcp_servers: Sequence[v1_unstable.McpServer] = (),
        additional_directories: Sequence[str | Path] = (),
        timeout: float | None | UnsetType = UNSET,
    ) -> SessionOpening:
        """`session/resume`: go on with a session without replay. See `SessionOpening`."""
        request = v1_unstable.ResumeSessionRequest
        return self._open(request, session_id, cwd, mcp_servers, additional_directories, timeout)

    def _open(
        self,
        request: type[v1_unstable.LoadSessionRequest | v1_unstable.ResumeSessionRequest],
        session_id: str,
        cwd: str | Path,
        mcp_servers: Sequence[v1_unstable.McpServer],
        additional_directories: Sequence[str | Path],
        timeout: float | None | UnsetType,
    ) -> SessionOpening:
        directory, more = self._directories(cwd, additional_directories)
        params = request(
            session_id=session_id,
            cwd=directory,
            mcp_servers=list(mcp_servers),
            additional_directories=more or UNSET,
        )
        row = self._row_of(params, "request")
        self._check_offered(row.name, params)

        replays = row.name == "session/load"

        async def send() -> _Load:
            await self.link()
            await self.late_load_over(session_id)
            known = self.sessions.get(session_id)
            if known is not None and known.abandoned:
                # Its load has failed, and whoever waits for that has not been told yet.
                self.forget(session_id)
                self.take_back(session_id)
                known = None
            if known is not None and (known.turn is not None or known.winding_down is not None):
                raise TurnInProgress(session_id)
            if known is not None and known.loading:
                msg = f"session {session_id!r} is being loaded"
                raise LocalProtocolError(msg)
            session = known or self._register(session_id, directory, more)
            future = self.connection.create_future()
            call = _LoadCall(row.name, future, session, known=known is not None)
            load = _Load(self, session, call, self._attach_opened)
            if self._may_attach:
                session.attach_here()  # which notes the offsets of what is told
            # What is served to the agent from now on is served within the new roots.
            session.cwd, session.additional_directories = directory, tuple(more)
            session.load_begins(replays=replays)
            try:
                self.connection.open_call(
                    call, encode_checked(params), self._timeout(row.name, timeout)
                )
            except BaseException:
                load.abandon()
                raise
            return load

        return SessionOpening(send, row.name.removeprefix("session/"), row.result)

    def attach_session(
        self,
        session_id: str,
        *,
        cwd: str | Path = ".",
        additional_directories: Sequence[str | Path] = (),
        from_offset: int = 0,
        history: Literal["from_offset", "tip"] = "from_offset",
        capability: Capability = None,
        timeout: float | None | UnsetType = UNSET,
    ) -> SessionOpening:
        """Attach to a session that is not known here: follow what others do in it, or go on with it.

        The agent sends its journal from `from_offset` on, which is replay, answers, and from then on
        sends what comes (resumable-sessions §2.1). See `SessionOpening`; `session.reattach` attaches one
        that is known.

        Args:
            session_id: which.
            cwd: its working directory; made absolute here.
            additional_directories: further roots.
            from_offset: of the first record wanted; 0 and 1 are the start.
            history: "tip": nothing of what is durable already.
            capability: a token, or a function of the session's id that gives one (or an awaitable of
                one) each time that the session is attached.
            timeout: seconds; UNSET means `Limits.request_timeout`.

        Raises:
            LocalProtocolError: the session is known here.
            MethodNotFound: the agent attaches no sessions.
            RequestError: -32000 "attach denied"; -32002 where nobody knows it; -32602 where `from_offset`
                is ahead of the journal, whose mark is in `data["highWatermark"]`.
        """
        directory, more = self._directories(cwd, additional_directories)

        async def send() -> _Load:
            await self.link()
            await self.late_load_over(session_id)
            if session_id in self.sessions:
                msg = f"session {session_id!r} is known: use its `reattach`"
                raise LocalProtocolError(msg)
            session = self._register(session_id, directory, more)
            attachment = session.attach_here()
            attachment.capability = capability
            if capability is None and self._relink is not None:
                attachment.capability = self._relink.options.capability
            start = max(from_offset, 1)
            call = _AttachLoad(self.connection.create_future(), attachment, start, history)
            load = _Load(self, session, call)
            session.load_begins(replays=history == "from_offset")
            attachment.opens(start)
            try:
                permit = await attachment.permit()
                params = attach_params(
                    session_id,
                    directory,
                    from_offset=start,
                    history=history,
                    capability=permit,
                    additional_directories=more,
                )
                self.connection.open_call(call, params, self._timeout(LOAD, timeout))
            except BaseException:
                load.abandon()
                raise
            return load

        return SessionOpening(send, "attach", v1_unstable.LoadSessionResponse)

    async def list_sessions(
        self, *, cwd: str | Path | None = None, cursor: str | None = None
    ) -> v1_unstable.ListSessionsResponse:
        """`session/list`: one page; `next_cursor` of the answer asks for the next (R1-65)."""
        params = v1_unstable.ListSessionsRequest(
            cwd=UNSET if cwd is None else self.absolute(cwd),
            cursor=UNSET if cursor is None else cursor,
        )
        return await self.request(params)

    async def iter_sessions(
        self, *, cwd: str | Path | None = None
    ) -> AsyncIterator[v1_unstable.SessionInfo]:
        """All sessions the agent knows, page after page."""
        cursor: str | None = None
        while True:
            page = await self.list_sessions(cwd=cwd, cursor=cursor)
            for info in page.sessions:
                yield info
            following = page.next_cursor
            if isinstance(following, UnsetType) or not following:
                return
            if following == cursor:
                msg = f"session/list gives the cursor {cursor!r} for its own page"
                raise RemoteProtocolError(msg)
            cursor = following

    async def close_session(self, session_id: str) -> None:
        """`session/close`: the agent cancels what runs and frees the session; its history stays.

        Updates that nobody took are let go with an event, its subscriptions end. A turn that is open ends
        with its answer, which the agent has `Limits.cancel_backstop` for; another prompt is refused
        here. A session that the agent does not know is closed, too.
        """
        self._require("session/close", "sessionCapabilities.close")
        with self._letting_go(session_id):
            try:
                await self.request(v1.CloseSessionRequest(session_id=session_id))
            except ResourceNotFound:  # as good as closed (R1-59)
                self.forget(session_id)
        await self._handlers.sessions_closed([session_id])

    async def delete_session(self, session_id: str) -> None:
        """`session/delete`: the session disappears from the list, and is closed here."""
        self._require("session/delete", "sessionCapabilities.delete")
        with self._letting_go(session_id):
            await self.request(v1.DeleteSessionRequest(session_id=session_id))
        await self._handlers.sessions_closed([session_id])

    async def authenticate(self, method_id: str) -> None:
        """`authenticate` with one of `auth_methods`.

        Raises:
            LocalProtocolError: a terminal method, which is carried out by running the agent's command
                in a terminal and is never sent (R1-145).
        """
        for method in self.auth_methods:
            if method.id == method_id and isinstance(method, v1.AuthMethodTerminal):
                msg = (
                    f"{method_id!r} is a terminal login: run the agent's command with its arguments"
                )
                raise LocalProtocolError(msg)
        await self.request(v1.AuthenticateRequest(method_id=method_id))
        self._authenticated = method_id

    async def logout(self) -> None:
        """`logout`: end the signed-in state; running sessions may fail with `AuthRequired`."""
        await self.request(v1.LogoutRequest())
        self._authenticated = None

    # -------------------------------------------------------------- for the generated calls

    async def _request(self, params: Any, timeout: float | None | UnsetType) -> Any:
        row = self._row_of(params, "request")
        self._check_offered(row.name, params)
        session = self.sessions.get(getattr(params, "session_id", ""))
        if self._relink is not None and not isinstance(params, v1.AuthenticateRequest):
            await self.link(session)
        future = self.connection.create_future()
        if session is None:
            call = FutureCall(row.name, future)
        elif row.name in ("session/close", "session/delete"):
            forget = partial(self.forget, session.session_id)
            call = _ClosingCall(row.name, future, session.inbox, forget)
        else:
            then = partial(session.changed, params)
            call = _MarkedCall(row.name, future, session.inbox, then)
        self.connection.open_call(call, encode_checked(params), self._timeout(row.name, timeout))
        answer = self.connection.answer_to(call)
        raw = await (_settled(call, answer) if isinstance(call, _MarkedCall) else answer)
        return read_result(row.name, row.result, raw)

    async def _notify(self, params: Any) -> None:
        row = self._row_of(params, "notification")
        await self.link()
        self.connection.notify(row.name, encode_checked(params))
        await self.connection.drain()

    # -------------------------------------------------------------- one link after the other

    @property
    def reattaches(self) -> bool:
        """Whether another link is made when this one is lost, and sessions attached over it."""
        relink = self._relink
        able = self.resumable is True or (self.resumable is None and self.has_attached)
        return relink is not None and relink.willing and able

    @property
    def _may_attach(self) -> bool:
        relink = self._relink
        return relink is not None and relink.willing and self.resumable is not False

    async def link(self, session: Session | None = None) -> None:
        """Wait for the link that is being made, and until the session is attached over it.

        That takes at most as long as `Reattach` lets attempts be made. Raises `ConnectionClosed` where
        they failed.
        """
        relink = self._relink
        if relink is None:
            return
        while True:
            connection = self.connection
            if connection.unanswering and not connection.closed and self.reattaches:
                await connection.wait_closed()  # it is about to go
            await relink.linked()
            if session is not None and session.attachment is not None:
                await session.attachment.ready()
            if self.connection.unanswering and self.reattaches:
                continue  # lost again meanwhile
            return

    def link_lost(self, error: ConnectionClosed) -> frozenset[str]:
        """The link is gone; returns the ids of the sessions that go on over another."""
        relink, again = self._relink, self.reattaches
        if relink is not None and again:
            relink.lost(error)
        kept = frozenset(s.session_id for s in self.surviving()) if again else frozenset[str]()
        for session in list(self.sessions.values()):
            attachment = session.attachment
            if session.session_id not in kept:
                if attachment is not None:
                    attachment.give_up(error)
                continue
            if attachment is not None:
                attachment.link_lost()
            showing = session.inbox.held_back()
            if showing is not None and relink is not None:
                session.inbox.connection.disown_task(showing)
                relink.held_back.add(showing)
        if relink is not None and not again and relink.task is None:
            relink.close()
        return kept

    def surviving(self) -> list[Session]:
        """The sessions that go on over another link."""
        return [session for session in self.sessions.values() if session.survives]

    def holding(self) -> int:
        """How many records are held of the sessions that go on over another link."""
        return sum(session.offset for session in self.surviving())

    async def link_again(self) -> None:
        """Make another link and shake hands; on an error, nothing of it is left."""
        assert self._renew is not None
        connection = self._connection_over(self._renew())
        try:
            await self._shake_hands(connection)
            if self._authenticated is not None:
                await self.authenticate(self._authenticated)
        except BaseException:
            await connection.aclose()
            raise

    def _move_to(self, connection: Connection) -> None:
        """Another link is there: what was not attached has ended with the old one."""
        self.connection, self.transport = connection, connection.transport
        for session in list(self.sessions.values()):
            if session.survives:
                session.inbox.move(connection)
            else:
                if session.attachment is not None:
                    session.attachment.give_up(ConnectionClosed("the agent attaches no sessions"))
                del self.sessions[session.session_id]
                self._router.close_inbox(session.inbox)

    def attach_again(self) -> int:
        """Begin to attach the sessions over another link; returns how many they are."""
        sessions = self.surviving()
        for session in sessions:
            if session.attachment is not None:
                session.attachment.renew()
        return len(sessions)

    def end_sessions(self, error: ConnectionClosed) -> None:
        """No other link is made: everything that waits ends."""
        for session in list(self.sessions.values()):
            if session.attachment is not None:
                session.attachment.give_up(error)
            session.inbox.end()

    def want_attached(self, session: Session, *, replayed: bool) -> None:
        """A load or resume was answered, in the reader: a link that is lost now is one of many."""
        attachment = session.attachment
        if attachment is not None and self._may_attach:
            # What was told without offsets is not to come again.
            counted = attachment.covers_load if replayed else attachment.offset > 0
            attachment.want("from_offset" if counted else "tip")

    async def _attach_opened(self, session: Session) -> None:
        """Attach a session that was opened in another way, where lost links are replaced."""
        relink, attachment = self._relink, session.attachment
        if relink is None or not self._may_attach or session.forgotten or attachment is None:
            return
        await attachment.ready()
        if attachment.live:  # over another link already
            return
        if attachment.capability is None:
            attachment.capability = relink.options.capability
        reason: str
        try:
            await attachment.attach(history=attachment.history)
        except ConnectionClosed:
            if not session.survives:
                raise
            return
        except MethodNotFound as error:
            self.resumable = False
            self.connection.emit(
                "reattach_unsupported", session=session.session_id, reason=str(error)
            )
        except (RequestError, RequestTimeout, RemoteProtocolError, LimitExceeded) as error:
            reason = str(error)
            self.connection.emit(
                "attach_failed", session=session.session_id, offset=session.offset, error=reason
            )
        else:
            return
        if not attachment.live:
            session.attachment = None
            self._router.route_to(session.inbox, None)

    def route_to(self, session: Session, attachment: Attachment) -> None:
        """Let an attachment see a session's updates first."""
        self._router.route_to(session.inbox, attachment)

    def take_over(self, session: Session) -> None:
        """Have a session that another connection had, with all that waits in it.

        Raises:
            LocalProtocolError: there is one of that id.
            LimitExceeded: there are `Limits.sessions` already.
        """
        if session.session_id in self.sessions:
            msg = f"session {session.session_id!r} is known on that connection already"
            raise LocalProtocolError(msg)
        self._check_room()
        session.peer.leave_to(self, session)
        self.sessions[session.session_id] = session
        session.peer = self
        self._router.take_inbox(session.inbox)
        session.inbox.move(self.connection)

    def leave_to(self, other: AgentPeer, session: Session) -> None:
        """A session goes on over another connection, its open turn, too."""
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]
        self._router.drop_inbox(session.inbox)
        turn = session.turn
        if turn is not None:
            self.connection.disown_call(turn)
            turn.carried_over()
        log.info("session %s goes on over %r", session.session_id, other)

    # -------------------------------------------------------------- for the session

    def notify_cancel(self, session_id: str) -> None:
        """Send `session/cancel` and answer the session's open permission requests as cancelled."""
        if self.connection.closed:
            session = self.sessions.get(session_id)
            if session is not None and session.turn is not None:
                session.turn.cancelling = (
                    True  # the agent is told over the next link, if there is one
                )
            return
        self.connection.notify(
            "session/cancel", encode(v1.CancelNotification(session_id=session_id))
        )
        self._router.cancel_questions(session_id)
        session = self.sessions.get(session_id)
        if session is not None and session.inbox.view is not None:
            session.inbox.view.cancel_turn()

    # -------------------------------------------------------------- inside

    def _check_room(self) -> None:
        limit = self.connection.limits.sessions
        if len(self.sessions) >= limit:
            raise LimitExceeded("sessions", limit, len(self.sessions) + 1)

    def _register(self, session_id: str, cwd: str, more: Sequence[str]) -> Session:
        self._check_room()
        inbox = self._router.open_inbox(session_id)
        session = self.sessions[session_id] = Session(self, inbox, cwd, more)
        return session

    @contextmanager
    def _letting_go(self, session_id: str) -> Generator[None]:
        """Before the request, since its answer may stand behind updates that nobody takes."""
        session = self.sessions.get(session_id)
        if session is not None:
            session.inbox.let_go()
        try:
            yield
        except BaseException:
            if session is not None and self.sessions.get(session_id) is session:
                session.inbox.keep()
            elif session is not None:  # it is closed, and only its caller was cancelled
                self.connection.create_task(self._handlers.sessions_closed([session_id]))
            raise

    def forget(self, session_id: str) -> None:
        """Let go of a session: its queues, its place in `sessions`.

        A turn that is open gets what still comes up to its answer, for which the agent has the
        back-stop; its questions are answered cancelled.
        """
        session = self.sessions.get(session_id)
        if session is None:
            return
        connection, turn = self.connection, session.turn
        if turn is not None:
            self._router.cancel_questions(session_id)
            connection.set_blocking(turn, blocking=True)
            turn.end_within(connection.limits.cancel_backstop)
        del self.sessions[session_id]
        if session.attachment is not None:
            session.attachment.stop()
        session.inbox.let_go(for_good=True)
        self.settle_forgotten(session)

    def settle_forgotten(self, session: Session) -> None:
        """Nothing more is delivered to a session that is forgotten, once nothing of it is open."""
        if self.sessions.get(session.session_id) is session:  # it is not forgotten
            return
        if session.inbox.turn is not None or session.loading:
            return
        self._router.close_inbox(session.inbox)

    def take_back(self, session_id: str) -> None:
        """End what was lent to a session, without waiting for that."""
        if not self.connection.closed:  # else `aclose` does
            self.connection.create_task(self._handlers.sessions_closed([session_id]))

    def expect_late_load(self, session: Session, call: _LoadCall) -> None:
        """A load was given up: for as long as a turn's end would be, its answer is looked for."""
        late = self._late_loads[session.session_id] = _LateLoad(session, call.method)
        self.connection.linger(call, late, self.connection.limits.cancel_backstop)

    def late_load_ended(self, late: _LateLoad, session: Session) -> None:
        """That answer, or its absence."""
        if self._late_loads.get(session.session_id) is late:
            del self._late_loads[session.session_id]
        self.settle_forgotten(session)

    async def late_load_over(self, session_id: str) -> None:
        """Wait until a load of that session that was given up is over, if there is one."""
        while (late := self._late_loads.get(session_id)) is not None:
            await late.wait()

    @staticmethod
    def absolute(path: str | Path) -> str:
        """A path as it goes over the wire."""
        return str(Path(path).absolute())

    def _directories(
        self, cwd: str | Path, additional: Sequence[str | Path]
    ) -> tuple[str, list[str]]:
        return self.absolute(cwd), [self.absolute(path) for path in additional]

    def _check_offered(self, method: str, params: Any) -> None:
        """Refuse parts of parameters that the agent must have asked for (R1-42..R1-45, R1-73)."""
        if isinstance(params, v1.PromptRequest):
            check_prompt_content(params.prompt, self.tree)
        elif hasattr(params, "mcp_servers"):
            self._check_setup(method, params)

    def _check_setup(self, method: str, params: Any) -> None:
        if _given(params, "additional_directories"):
            self._require(method, "sessionCapabilities.additionalDirectories")
        for server in _given(params, "mcp_servers") or ():
            kind = tag_of(server)  # a stdio server has none
            if kind:
                self._require(method, f"mcpCapabilities.{kind}")
        prompt = _given(params, "system_prompt")
        if prompt is not None:
            self._require(method, "sessionCapabilities.systemPrompt")
            if prompt.mode == "override":
                self._require(method, "sessionCapabilities.systemPrompt.mode.override")
            if not prompt.content or any(tag_of(block) != "text" for block in prompt.content):
                msg = "a system prompt is made of text blocks, at least one"
                raise LocalProtocolError(msg)


def _process_of(transport: Transport) -> Any:
    return transport if hasattr(transport, "exit_status") else None


def _resumable(meta: Any) -> bool | None:
    """What an agent says of the extension in its answer to `initialize`; None: nothing."""
    told: Any = or_none(meta)
    told = told.get(KEY) if isinstance(told, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    said: Any = told.get("resumable") if isinstance(told, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return said if isinstance(said, bool) else None


async def _settled(call: _MarkedCall, answer: Awaitable[Any]) -> Any:
    """The raw result, seen when DESIGN §4.2 allows it; so is an error that the agent answered."""
    try:
        raw = await answer
    except (RequestError, RemoteProtocolError):
        await call.settled()
        raise
    await call.settled()
    return raw


def _given_up_here(error: Exception | None) -> bool:
    """Whether a call failed before its answer was read, which may yet come."""
    overdrawn = isinstance(error, LimitExceeded) and error.limit == "queue_bytes"
    return overdrawn or isinstance(error, RequestTimeout)


def _given(params: Any, name: str) -> Any:
    """A member of parameters, None where it is absent or they have none of that name."""
    return or_none(getattr(params, name, None))


class _InitializeCall(FutureCall):
    __slots__ = ("take",)

    def __init__(self, future: asyncio.Future[Any], take: Callable[[Any], None]) -> None:
        super().__init__("initialize", future)
        self.take = take

    def answered(self, result: Any, error: Exception | None) -> None:
        if error is None:
            try:
                self.take(result)
            except RemoteProtocolError as fault:
                error = fault
        super().answered(result, error)
