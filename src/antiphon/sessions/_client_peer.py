"""The agent's side of a connection: the client as seen from here."""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._calls import ClientCalls
from antiphon._errors import (
    LimitExceeded,
    ResourceNotFound,
)
from antiphon.runtime import Connection, FutureCall
from antiphon.schema import UNSET, UnsetType, decoder, encode_checked, v1, v1_unstable
from antiphon.sessions._agent_router import AgentHandlersLike, AgentRouter
from antiphon.sessions._agent_session import AgentSession
from antiphon.sessions._methods import (
    allowed_by,
    default_timeout,
    or_none,
    read_result,
    table,
    tag_of,
    tree_of,
)
from antiphon.sessions._peer import Peer
from antiphon.sessions._turn import check_offer
from antiphon.sessions._turn_states import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.core import Limits
    from antiphon.runtime import TelemetryEvent
    from antiphon.schema import Method
    from antiphon.sessions._durability import Durability
    from antiphon.sessions._durable_link import DurableLink
    from antiphon.transports import Transport

__all__ = ["ClientPeer"]


class ClientPeer(Peer, ClientCalls):
    """The client of one connection, as an agent sees it; `turn.peer` and `ctx.peer`.

    Calls raise `CapabilityError` without sending anything where the client did not advertise what
    they need (R1-33, R1-34), else `RequestError`, `RequestTimeout` or `ConnectionClosed`.

    Attributes:
        connection: the runtime underneath.
        sessions: the sessions open on this connection, by id.
        unstable: whether unstable methods are served and called.
    """

    side = "client"

    def __init__(
        self,
        transport: Transport,
        agent: AgentHandlersLike,
        *,
        unstable: bool = False,
        limits: Limits | None = None,
        record: Callable[[str, bytes], None] | None = None,
        telemetry: Callable[[TelemetryEvent], None] | None = None,
        durability: Durability | None = None,
    ) -> None:
        self.unstable = unstable
        self.sessions: dict[str, AgentSession] = {}
        self.transport = transport
        self._params: v1_unstable.InitializeRequest | None = None
        self.tree = {}
        #: What can be asked, by the class of its parameters, as far as it was asked before.
        self._known: dict[type[Any], _Known] = {}
        self._router = router = _router(self, agent, durability)
        self.connection = Connection(
            transport, "agent", router, limits=limits, record=record, telemetry=telemetry
        )

    @property
    def capabilities(self) -> v1_unstable.ClientCapabilities:
        """What the client advertised; what it left out reads as unsupported."""
        given = UNSET if self._params is None else self._params.client_capabilities
        return v1_unstable.ClientCapabilities() if isinstance(given, UnsetType) else given

    @property
    def info(self) -> v1.Implementation | None:
        """Name and version of the client, if it said."""
        info = UNSET if self._params is None else self._params.client_info
        return or_none(info)

    async def run(self) -> None:
        """Serve until the link is gone. Cancelling it closes the link first."""
        try:
            await self.connection.start()
            await self.connection.wait_closed()
        finally:
            await self.connection.aclose()

    # -------------------------------------------------------------- extensions

    async def request_extension(
        self, method: str, params: Any = None, *, timeout: float | None | UnsetType = UNSET
    ) -> Any:
        """Ask an extension method (its name starts with `_`); the result as plain JSON values."""
        await self.all_settled()
        return await super().request_extension(method, params, timeout=timeout)

    async def notify_extension(self, method: str, params: Any = None) -> None:
        """Send an extension notification (its name starts with `_`)."""
        await self.all_settled()
        await super().notify_extension(method, params)

    # -------------------------------------------------------------- for turns and generated calls

    def open_request(self, params: Any, timeout: float | None | UnsetType) -> FutureCall:
        """Send a request; its raw result is the call's future."""
        return self.open_question(params, timeout, self._durable_of(params))

    def open_question(
        self, params: Any, timeout: float | None | UnsetType, durable: DurableLink | None
    ) -> FutureCall:
        """The same where it is known already whether the session has a journal."""
        known = self._known.get(params.__class__) or self._find(params)
        connection = self.connection
        call = FutureCall(known.name, connection.create_future())
        connection.open_call(
            call,
            encode_checked(params),
            known.timeout if timeout is UNSET else timeout,
            None if durable is None else durable.send_behind,
        )
        return call

    def _find(self, params: Any) -> _Known:
        """The method of these parameters; raises where the client did not offer it."""
        row = self._row_of(params, "request")
        known = _Known(row, default_timeout(self.connection.limits, row.name))
        # Which gate it has depends on the class alone, and what the client offers does not change.
        # A user's own class is not remembered: there is no bound on them.
        if row.params is params.__class__ and self._params is not None:
            self._known[row.params] = known
        return known

    def _durable_of(self, params: Any) -> DurableLink | None:
        session = self.sessions.get(getattr(params, "session_id", ""))
        return None if session is None else session.durable

    def result_of(self, kind: type[Any], raw: Any) -> Any:
        """The typed result of a request with parameters of this class."""
        known = self._known.get(kind)
        if known is not None:
            try:
                return known.read(raw)
            except (msgspec.DecodeError, RecursionError):
                pass  # to be looked at
        row = table().row_of_class(kind, "request", "client")
        return read_result(row.name, row.result, raw)

    async def ask(self, params: Any, timeout: float | None | UnsetType = UNSET) -> Any:
        """Send a request behind what was told before, and wait for its typed result."""
        durable = self._durable_of(params)
        if durable is not None:
            await durable.settled()
        call = self.open_request(params, timeout)
        try:
            raw = await call.future
        except CancelledError:
            self.connection.abandon(call)
            raise
        return self.result_of(params.__class__, raw)

    _request = ask

    async def _notify(self, params: Any) -> None:
        row = self._row_of(params, "notification")
        if isinstance(params, v1.SessionNotification):
            check_offer(self.tree, params.update)
            durable = self._durable_of(params)
            if durable is not None:
                durable.send(durable.session.head.update + encode_checked(params.update) + b"}}")
                await durable.drain()
                return
        self.connection.notify(row.name, encode_checked(params))
        await self.connection.drain()

    # -------------------------------------------------------------- for the router

    async def all_settled(self) -> None:
        """Whatever session it is about, what was told of it before is seen before."""
        for session in list(self.sessions.values()):
            if session.durable is not None:
                await session.durable.settled()

    def client_known(self, params: v1_unstable.InitializeRequest) -> None:
        """Take note of what the client said about itself."""
        self._params = params
        self._known.clear()
        self.tree = tree_of(params.client_capabilities) or {}

    def session_of(self, session_id: str) -> AgentSession:
        """The open session of that id. Raises `ResourceNotFound` (R1-56)."""
        session = self.sessions.get(session_id)
        if session is None:
            raise ResourceNotFound({"sessionId": session_id}, "Session not found")
        return session

    def check_room(self) -> None:
        """Raise `LimitExceeded` if no further session may be opened."""
        limit = self.connection.limits.sessions
        if len(self.sessions) >= limit:
            raise LimitExceeded("sessions", limit, len(self.sessions) + 1)

    def open_session(self, session_id: str, cwd: str, more: Sequence[str]) -> AgentSession:
        """Make a session known. Raises `LimitExceeded`."""
        self.check_room()
        session = self.sessions[session_id] = AgentSession(self, session_id, cwd, more)
        self._router.session_opened(session)
        return session

    def forget_session(self, session: AgentSession) -> None:
        """A session was closed, or could not be loaded: nothing finds it any more."""
        if self.sessions.get(session.session_id) is session:  # and not one that was opened since
            del self.sessions[session.session_id]
        session.fire(Event.FORGOTTEN)
        self._router.session_forgotten(session)

    def allowed_options(
        self, options: list[v1_unstable.SessionConfigOption]
    ) -> list[v1_unstable.SessionConfigOption]:
        """A copy, without boolean ones where the client did not ask for them (R1-35)."""
        if allowed_by(self.tree, "session.configOptions.boolean"):
            return list(options)
        return [o for o in options if tag_of(o) != "boolean"]


class _Known:
    """A method of the client that may be called."""

    __slots__ = ("name", "read", "timeout")

    def __init__(self, row: Method, timeout: float | None) -> None:
        self.name = row.name
        self.timeout = timeout
        #: Gives the typed result if nothing is wrong with it.
        self.read = decoder(row.result)


def _router(
    peer: ClientPeer, agent: AgentHandlersLike, durability: Durability | None
) -> AgentRouter:
    if durability is None:
        return AgentRouter(peer, agent)
    from antiphon.sessions._durable_router import DurableRouter

    return DurableRouter(peer, agent, durability)
