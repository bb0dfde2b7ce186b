"""The agent's side of a connection: the client as seen from here, sessions, and routing to handlers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from antiphon._errors import (
    CapabilityError,
    ConnectionClosed,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
    TurnOver,
)
from antiphon._handlers import ClientCalls
from antiphon.runtime import (
    Connection,
    Context,
    FutureCall,
    InboundCall,
    NoticeRoute,
    RequestRoute,
)
from antiphon.schema import UNSET, UnsetType, decode, decode_result, encode, v1, v1_unstable
from antiphon.sessions._content import missing_capability
from antiphon.sessions._extension import Extensions, extension_routes
from antiphon.sessions._methods import (
    allowed_by,
    default_timeout,
    encode_result_of,
    refuse_unstable,
    table,
    tree_of,
)
from antiphon.sessions._turn import Head, Turn, check_offer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.core import Limits
    from antiphon.schema import Method
    from antiphon.transports import Transport

__all__ = ["AgentContext", "AgentHandlersLike", "AgentSession", "ClientPeer"]

log = logging.getLogger("antiphon.agent")

PROTOCOL_VERSION = 1

#: Updates that tell what a turn does; everything else is about the session and always legal.
_TURN_UPDATES = frozenset(
    (
        "user_message_chunk",
        "agent_message_chunk",
        "agent_thought_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
        "plan_update",
        "plan_removed",
    )
)
# A client may run on another system than the agent, so all forms of absolute paths count.
_ABSOLUTE = re.compile(r"/|[A-Za-z]:[\\/]|\\\\")


class AgentHandlersLike(Protocol):
    """What this module needs of an `Agent`."""

    def find_handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
        """The handler of that name, or None where it is not implemented."""

    def extensions(self) -> Extensions:
        """The extension methods by wire name."""
        ...

    async def prompt(self, turn: Turn) -> Any:
        """Answer one prompt."""


class AgentContext(Context):
    """What an agent's handler is given: who asks, and for which session.

    Attributes:
        peer: the client; calls on it may be made from a handler without deadlock.
    """

    __slots__ = ("peer",)

    def __init__(  # noqa: PLR0913  (a record)
        self,
        connection: Connection,
        method: str,
        session_id: str,
        raw: Any,
        call: InboundCall | None,
        peer: ClientPeer,
    ) -> None:
        super().__init__(connection, method, session_id, raw, call)
        self.peer = peer

    @property
    def client_capabilities(self) -> v1_unstable.ClientCapabilities:
        """What the client advertised."""
        return self.peer.capabilities

    @property
    def roots(self) -> Sequence[str]:
        session = self.peer.sessions.get(self.session_id)
        return () if session is None else session.roots

    def session(self, session_id: str | None = None) -> AgentSession:
        """A session of this connection, by default the one the request names.

        Raises:
            ResourceNotFound: it is not known.
        """
        return self.peer.session_of(self.session_id if session_id is None else session_id)

    async def update(self, update: v1_unstable.SessionUpdate) -> None:
        """Send an update of the request's session before its answer: history, in `load_session`."""
        self.session().send_now(update)
        await self.connection.drain()


class AgentSession:
    """One session at the agent, on one connection.

    Its updates about the session itself may be sent at any time after the reply that made it known;
    what a turn does is sent through `Turn`.

    Attributes:
        session_id: its id.
        cwd: its absolute working directory.
        additional_directories: further absolute roots.
        turn: the open turn, if there is one.
        modes: the modes as last told to the client.
        config_options: the options as last told to the client.
    """

    def __init__(
        self, peer: ClientPeer, session_id: str, cwd: str, additional_directories: Sequence[str]
    ) -> None:
        self.peer = peer
        self.session_id = session_id
        self.cwd = cwd
        self.additional_directories = tuple(additional_directories)
        self.turn: Turn | None = None
        self.modes: v1.SessionModeState | None = None
        self.config_options: list[v1_unstable.SessionConfigOption] | None = None
        #: Tool calls numbered so far.
        self.tool_calls = 0
        self.head = Head(session_id)

    def __repr__(self) -> str:
        return f"<AgentSession {self.session_id!r} in {self.cwd!r}>"

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories."""
        return (self.cwd, *self.additional_directories)

    async def update(self, update: v1_unstable.SessionUpdate) -> None:
        """Send an update about the session.

        Raises:
            TurnOver: it tells what a turn does (message, thought, tool, plan) and none is open.
            CapabilityError: the client did not ask for its kind (R1-36..R1-39).
        """
        if self.turn is None and update.__struct_config__.tag in _TURN_UPDATES:
            raise TurnOver(self.session_id)
        self.send_now(update)
        await self.peer.connection.drain()

    async def commands(self, commands: Sequence[v1.AvailableCommand]) -> None:
        """The slash commands, all of them."""
        await self.update(v1.AvailableCommandsUpdate(available_commands=list(commands)))

    async def set_mode(self, mode_id: str) -> None:
        """The agent changed its mode itself."""
        if self.modes is not None:
            self.modes.current_mode_id = mode_id
        await self.update(v1.CurrentModeUpdate(current_mode_id=mode_id))

    async def set_config_options(self, options: Sequence[v1_unstable.SessionConfigOption]) -> None:
        """The configuration options, all of them, after the agent changed one itself."""
        self.config_options = self.peer.allowed_options(list(options))
        await self.update(v1.ConfigOptionUpdate(config_options=self.config_options))

    async def info(
        self,
        *,
        title: str | None | UnsetType = UNSET,
        updated_at: str | None | UnsetType = UNSET,
    ) -> None:
        """Title and time of change (ISO 8601); None clears, what is not given stays."""
        await self.update(v1.SessionInfoUpdate(title=title, updated_at=updated_at))

    async def usage(
        self, *, used: int, size: int, cost: v1.Cost | tuple[float, str] | None = None
    ) -> None:
        """Tokens in context, size of the window, cost of the session so far (amount, currency)."""
        if isinstance(cost, tuple):
            cost = v1.Cost(amount=cost[0], currency=cost[1])
        await self.update(
            v1.UsageUpdate(used=used, size=size, cost=UNSET if cost is None else cost)
        )

    async def notice(
        self, title: str, *, severity: str = "info", description: str | None = None
    ) -> None:
        """A notice for the user; raises `CapabilityError` where the client takes none."""
        await self.update(
            v1.Notice(
                severity=severity,
                title=title,
                description=UNSET if description is None else description,
            )
        )

    def send_now(self, update: v1_unstable.SessionUpdate) -> None:
        """Queue an update without looking whether a turn is open."""
        peer = self.peer
        check_offer(peer.tree, update)
        peer.connection.notify(
            "session/update",
            encode(v1_unstable.SessionNotification(session_id=self.session_id, update=update)),
        )

    def cancel(self) -> None:
        """`session/cancel`: no effect without an open turn (a stale one must not hit the next)."""
        turn = self.turn
        if turn is None or turn.cancelled:
            return
        turn.cancel()
        self.peer.arm_backstop(self, turn)


class ClientPeer(ClientCalls):
    """The client of one connection, as an agent sees it; `turn.peer` and `ctx.peer`.

    Calls raise `CapabilityError` without sending anything where the client did not advertise what
    they need (R1-33, R1-34), else `RequestError`, `RequestTimeout` or `ConnectionClosed`.

    Attributes:
        connection: the runtime underneath.
        sessions: the sessions open on this connection, by id.
        unstable: whether unstable methods are served and called.
    """

    def __init__(  # noqa: PLR0913  (assembled in one place, antiphon._connect)
        self,
        transport: Transport,
        agent: AgentHandlersLike,
        *,
        unstable: bool = False,
        limits: Limits | None = None,
        record: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.unstable = unstable
        self.sessions: dict[str, AgentSession] = {}
        self.transport = transport
        self._agent = agent
        self._params: v1_unstable.InitializeRequest | None = None
        #: The client's capabilities as builtins; what gates look at.
        self.tree: Any = {}
        self.connection = Connection(
            transport, "agent", _AgentRouter(self, agent), limits=limits, record=record
        )

    def __repr__(self) -> str:
        return f"<ClientPeer on {self.transport.describe()}>"

    @property
    def capabilities(self) -> v1_unstable.ClientCapabilities:
        """What the client advertised; what it left out reads as unsupported."""
        given = UNSET if self._params is None else self._params.client_capabilities
        return v1_unstable.ClientCapabilities() if isinstance(given, UnsetType) else given

    @property
    def info(self) -> v1.Implementation | None:
        """Name and version of the client, if it said."""
        info = UNSET if self._params is None else self._params.client_info
        return None if isinstance(info, UnsetType) else info

    def offers(self, path: str) -> bool:
        """Whether the client advertised a capability, e.g. "fs.readTextFile"."""
        return allowed_by(self.tree, path)

    async def run(self) -> None:
        """Serve until the link is gone. Cancelling it closes the link first."""
        try:
            await self.connection.start()
            await self.connection.wait_closed()
        finally:
            await self.connection.aclose()

    async def request_extension(
        self,
        method: str,
        params: Any = None,
        *,
        timeout: float | None | UnsetType = UNSET,  # noqa: ASYNC109  (sent as the request's deadline)
    ) -> Any:
        """Ask an extension method (its name starts with `_`); the result as plain JSON values."""
        _check_extension(method)
        seconds = (
            default_timeout(self.connection.limits, method)
            if isinstance(timeout, UnsetType)
            else timeout
        )
        raw = await self.connection.request(
            method, None if params is None else encode(params), seconds
        )
        return decode(Any, raw)

    async def notify_extension(self, method: str, params: Any = None) -> None:
        """Send an extension notification (its name starts with `_`)."""
        _check_extension(method)
        self.connection.notify(method, None if params is None else encode(params))
        await self.connection.drain()

    # -------------------------------------------------------------- for turns and generated calls

    def open_request(self, params: Any, timeout: float | None | UnsetType) -> FutureCall:
        """Send a request; its raw result is the call's future."""
        row = table().row_of(params, "request", "client")
        refuse_unstable(row, unstable=self.unstable)
        gate = row.gate
        if row.name == "elicitation/create":
            gate = f"elicitation.{params.__struct_config__.tag}"
        if not allowed_by(self.tree, gate):
            raise CapabilityError(row.name, f"clientCapabilities.{gate}")
        if isinstance(timeout, UnsetType):
            timeout = default_timeout(self.connection.limits, row.name)
        call = FutureCall(row.name, self.connection.create_future())
        self.connection.open_call(call, encode(params), timeout)
        return call

    def result_of(self, params: Any, raw: Any) -> Any:
        """The typed result of a request with these parameters."""
        row = table().row_of(params, "request", "client")
        try:
            return decode_result(row.result, raw)
        except msgspec.DecodeError as error:
            msg = f"the answer to {row.name} is malformed: {error}"
            raise RemoteProtocolError(msg) from None

    async def _request(self, params: Any, timeout: float | None | UnsetType) -> Any:
        call = self.open_request(params, timeout)
        try:
            raw = await call.future
        except asyncio.CancelledError:
            self.connection.abandon(call)
            raise
        return self.result_of(params, raw)

    async def _notify(self, params: Any) -> None:
        row = table().row_of(params, "notification", "client")
        refuse_unstable(row, unstable=self.unstable)
        if not allowed_by(self.tree, row.gate):
            raise CapabilityError(row.name, f"clientCapabilities.{row.gate}")
        self.connection.notify(row.name, encode(params))
        await self.connection.drain()

    # -------------------------------------------------------------- for the router

    def client_known(self, params: v1_unstable.InitializeRequest) -> None:
        """Take note of what the client said about itself."""
        self._params = params
        self.tree = tree_of(params.client_capabilities) or {}

    def session_of(self, session_id: str) -> AgentSession:
        """The open session of that id. Raises `ResourceNotFound` (R1-56)."""
        session = self.sessions.get(session_id)
        if session is None:
            raise ResourceNotFound({"sessionId": session_id}, "Session not found")
        return session

    def open_session(self, session_id: str, cwd: str, more: Sequence[str]) -> AgentSession:
        """Make a session known. Raises `LimitExceeded`."""
        limit = self.connection.limits.sessions
        if session_id not in self.sessions and len(self.sessions) >= limit:
            raise LimitExceeded("sessions", limit, len(self.sessions) + 1)
        session = self.sessions[session_id] = AgentSession(self, session_id, cwd, more)
        return session

    def allowed_options(
        self, options: list[v1_unstable.SessionConfigOption]
    ) -> list[v1_unstable.SessionConfigOption]:
        """Without boolean ones where the client did not ask for them (R1-35)."""
        if allowed_by(self.tree, "session.configOptions.boolean"):
            return options
        return [o for o in options if o.__struct_config__.tag != "boolean"]

    def arm_backstop(self, session: AgentSession, turn: Turn) -> None:
        """Give a cancelled turn `Limits.cancel_backstop` seconds to come to its end."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.connection.limits.cancel_backstop, self._expire, session, turn)
        turn.backstop = timer

    def _expire(self, session: AgentSession, turn: Turn) -> None:
        if turn.over or turn.call is None:
            return
        log.warning("%r ignored its cancellation; its tasks are cancelled", turn)
        session.turn = None
        turn.end()
        self.connection.answer(turn.call, _CANCELLED)


_CANCELLED = b'{"stopReason":"cancelled"}'


def _check_extension(method: str) -> None:
    if not method.startswith("_"):
        msg = f"an extension method starts with an underscore, not {method!r}"
        raise LocalProtocolError(msg)


class _AgentRouter:
    """Routes what the client sends to the agent's handlers, and keeps the sessions in step."""

    def __init__(self, peer: ClientPeer, agent: AgentHandlersLike) -> None:
        self._peer = peer
        self._agent = agent
        self._routes: dict[str, RequestRoute | None] = {}
        self._extensions = extension_routes(agent.extensions())
        self._offered: Any = {}
        self._cancel = NoticeRoute(
            _decoder(v1_unstable.CancelNotification), immediate=self._cancel_received
        )
        self._special: Mapping[str, Callable[[RequestRoute], RequestRoute]] = {
            "initialize": self._initialize_route,
            "session/new": self._new_route,
            "session/load": self._load_route,
            "session/resume": self._load_route,
            "session/fork": self._new_route,
            "session/close": self._close_route,
            "session/delete": self._close_route,
            "session/set_mode": self._mode_route,
            "session/set_config_option": self._option_route,
        }

    # -------------------------------------------------------------- Router

    def request_route(self, method: str) -> RequestRoute | None:
        try:
            return self._routes[method]
        except KeyError:
            pass
        if method.startswith("_"):
            return self._extensions.requests.get(method)
        row = table().requests["agent"].get(method)
        if row is None:  # names the peer makes up are not remembered
            return None
        route = self._make_route(row)
        if route is not None:  # what is offered may still change during the handshake
            self._routes[method] = route
        return route

    def _make_route(self, row: Method) -> RequestRoute | None:
        if not row.stable and not self._peer.unstable:
            return None
        if not allowed_by(self._offered, row.gate):
            return None
        decode_params = _decoder(row.params)
        if row.name == "session/prompt":
            return RequestRoute(decode_params, self._run_turn, encode, self._accept_prompt)
        handler = self._agent.find_handler(row.handler)
        if handler is None:
            return None
        route = RequestRoute(decode_params, handler, encode_result_of(row))
        special = self._special.get(row.name)
        return route if special is None else special(route)

    def notice_route(self, method: str) -> NoticeRoute | None:
        if method == "session/cancel":
            return self._cancel
        if method.startswith("_"):
            return self._extensions.notices.get(method)
        row = table().notifications["agent"].get(method)
        if row is None or (not row.stable and not self._peer.unstable):
            return None
        handler = self._agent.find_handler(row.handler)
        if handler is None:
            return None
        return NoticeRoute(_decoder(row.params), handle=cast("Any", handler))

    def context(self, method: str, raw: Any, params: Any, call: InboundCall | None) -> AgentContext:
        session_id = getattr(params, "session_id", "")
        return AgentContext(
            self._peer.connection,
            method,
            session_id if isinstance(session_id, str) else "",
            raw,
            call,
            self._peer,
        )

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        """An agent receives no updates; `core` never reports one on this side."""

    def cancelled(self, call: InboundCall) -> bool:
        """`$/cancel_request` on a prompt is a cancelled turn: its answer stays a result (R1-98)."""
        for session in self._peer.sessions.values():
            if session.turn is not None and session.turn.call is call:
                session.cancel()
                return True
        return False

    def connection_lost(self, error: ConnectionClosed) -> None:  # noqa: ARG002  (the log has it)
        for session in list(self._peer.sessions.values()):
            if session.turn is not None:
                session.turn.cancel()

    # -------------------------------------------------------------- handshake

    def _initialize_route(self, route: RequestRoute) -> RequestRoute:
        async def initialize(params: v1_unstable.InitializeRequest, context: Any) -> Any:
            self._peer.client_known(params)
            response = await route.invoke(params, context)
            if isinstance(response, v1.InitializeResponse):
                self._offered = tree_of(response.agent_capabilities) or {}
            return response

        return RequestRoute(route.decode, initialize, route.encode)

    # -------------------------------------------------------------- opening and closing sessions

    def _new_route(self, route: RequestRoute) -> RequestRoute:
        async def new_session(params: Any, context: AgentContext) -> Any:
            response = await route.invoke(params, context)
            session_id = getattr(response, "session_id", None)
            if isinstance(session_id, str):
                more = _list(params.additional_directories)
                session = self._peer.open_session(session_id, params.cwd, more)
                self._note_setup(session, response)
            return response

        return RequestRoute(route.decode, new_session, route.encode, _accept_directories)

    def _load_route(self, route: RequestRoute) -> RequestRoute:
        async def load_session(params: Any, context: AgentContext) -> Any:
            peer, session_id = self._peer, params.session_id
            known = peer.sessions.get(session_id)
            if known is not None and known.turn is not None:
                raise InvalidRequest({"reason": "prompt in flight"})
            session = peer.open_session(
                session_id, params.cwd, _list(params.additional_directories)
            )
            try:
                response = await route.invoke(params, context)
            except BaseException:
                if known is None:
                    peer.sessions.pop(session_id, None)
                else:
                    peer.sessions[session_id] = known
                raise
            self._note_setup(session, response)
            return response

        return RequestRoute(route.decode, load_session, route.encode, _accept_directories)

    def _note_setup(self, session: AgentSession, response: Any) -> None:
        """Keep what the client is being told about modes and options."""
        modes = getattr(response, "modes", None)
        session.modes = modes if isinstance(modes, v1.SessionModeState) else None
        options = getattr(response, "config_options", None)
        if isinstance(options, list):
            response.config_options = session.config_options = self._peer.allowed_options(
                cast("list[Any]", options)
            )

    def _close_route(self, route: RequestRoute) -> RequestRoute:
        async def close_session(params: Any, context: AgentContext) -> Any:
            session = self._peer.sessions.get(params.session_id)
            if session is not None and session.turn is not None:
                turn = session.turn
                session.cancel()
                await (
                    turn.wait_over()
                )  # bounded by the back-stop; R1-58: the prompt is answered first
            response = await route.invoke(params, context)
            self._peer.sessions.pop(params.session_id, None)
            return response

        return RequestRoute(route.decode, close_session, route.encode)

    # -------------------------------------------------------------- modes and options

    def _mode_route(self, route: RequestRoute) -> RequestRoute:
        async def set_mode(params: v1_unstable.SetSessionModeRequest, context: AgentContext) -> Any:
            session = context.session()
            modes = session.modes
            if modes is not None and all(m.id != params.mode_id for m in modes.available_modes):
                raise InvalidParams({"modeId": params.mode_id}, "unknown or unavailable mode")
            response = await route.invoke(params, context)
            if modes is not None:
                modes.current_mode_id = params.mode_id
            return response

        return RequestRoute(route.decode, set_mode, route.encode)

    def _option_route(self, route: RequestRoute) -> RequestRoute:
        async def set_option(params: Any, context: AgentContext) -> Any:
            session = context.session()
            if session.config_options is not None:
                _check_option(session.config_options, params)
            response = await route.invoke(params, context)
            options = getattr(response, "config_options", None)
            if isinstance(options, list):
                response.config_options = session.config_options = self._peer.allowed_options(
                    cast("list[Any]", options)
                )
            return response

        return RequestRoute(route.decode, set_option, route.encode)

    # -------------------------------------------------------------- turns

    def _accept_prompt(self, params: v1_unstable.PromptRequest, context: AgentContext) -> Turn:
        """In the reader: a cancel right behind the prompt must find the turn (field fault 25)."""
        session = self._peer.session_of(params.session_id)
        if session.turn is not None:
            raise InvalidRequest({"sessionId": params.session_id}, "prompt already in flight")
        missing = missing_capability(params.prompt, self._offered)
        if missing is not None:
            raise InvalidParams({"reason": "unsupported content", "capability": missing})  # R1-80
        turn = session.turn = Turn(session, params, context.raw_params)
        turn.call = context.call
        return turn

    async def _run_turn(self, turn: Turn, context: AgentContext) -> v1.PromptResponse:  # noqa: ARG002
        session = turn.session
        try:
            return await self._outcome(turn)
        finally:
            if turn.backstop is not None:
                turn.backstop.cancel()
            if session.turn is turn:
                session.turn = None
            turn.end()

    async def _outcome(self, turn: Turn) -> v1.PromptResponse:
        """What the prompt is answered with: `cancelled` beats everything else (R1-95, R1-96)."""
        result: Any = None
        failure: Exception | None = None
        if not turn.cancelled:
            try:
                result = await self._agent.prompt(turn)
            except asyncio.CancelledError:
                if not turn.cancelled:
                    raise
            except Exception as error:  # noqa: BLE001  (answered at the connection's boundary)
                failure = error
        await turn.finish()
        if turn.cancelled:
            if failure is not None and not isinstance(failure, (RequestError, TurnOver)):
                log.info("a cancelled turn ended with an error", exc_info=failure)
            return v1.PromptResponse(stop_reason="cancelled")
        if failure is not None:
            raise failure
        if result is None:
            if not turn.sent:
                log.warning("%r ended without any update", turn)
            return v1.PromptResponse(stop_reason="end_turn")
        if isinstance(result, str):
            return v1.PromptResponse(stop_reason=result)
        if isinstance(result, v1.PromptResponse):
            return result
        msg = (
            f"prompt returned {type(result).__name__}, not None, a stop reason or a PromptResponse"
        )
        raise TypeError(msg)

    def _cancel_received(self, params: v1_unstable.CancelNotification, context: Any) -> None:
        session = self._peer.sessions.get(params.session_id)
        if session is None:
            return
        session.cancel()
        handler = self._agent.find_handler("cancel")
        if handler is not None:
            self._peer.connection.run_soon(lambda: handler(params, context))


def _decoder(params_type: Any) -> Callable[[Any], Any]:
    def decode_params(raw: Any) -> Any:
        return decode(params_type, b"{}" if raw is None else raw)

    return decode_params


def _list(value: Any) -> list[str]:
    return value if isinstance(value, list) else []


def _accept_directories(params: Any, context: Any) -> Any:  # noqa: ARG001  (the shape of `accept`)
    """R1-48, R1-51: directories are absolute."""
    for path in (params.cwd, *_list(params.additional_directories)):
        if not _ABSOLUTE.match(path):
            raise InvalidParams({"reason": "path_not_absolute", "path": path})
    return params


def _check_option(options: Sequence[Any], params: Any) -> None:
    """R1-121: an unknown option, or a value it does not have."""
    for option in options:
        if option.id == params.config_id:
            break
    else:
        raise InvalidParams({"reason": "unknown config option", "configId": params.config_id})
    wrong = InvalidParams({"reason": "invalid value", "configId": params.config_id})
    if option.__struct_config__.tag == "boolean":
        if not isinstance(params.value, bool):
            raise wrong
        return
    groups = getattr(option, "options", None)
    if not isinstance(groups, list):
        return
    values = [
        choice.value
        for item in cast("list[Any]", groups)
        for choice in (item.options if hasattr(item, "group") else (item,))
    ]
    if params.value not in values:
        raise wrong
