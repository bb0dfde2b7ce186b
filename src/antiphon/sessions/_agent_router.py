"""Routing what a client sends to the agent's handlers, and keeping the sessions in step."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Protocol, cast

from antiphon._errors import (
    ConnectionClosed,
    InvalidParams,
    InvalidRequest,
    RequestError,
    TurnOver,
)
from antiphon.runtime import Connection, Context, InboundCall, NoticeRoute, RequestRoute
from antiphon.schema import UnsetType, decode, encode, v1, v1_unstable
from antiphon.sessions._content import missing_capability
from antiphon.sessions._extension import Extensions, extension_routes
from antiphon.sessions._methods import allowed_by, encode_result_of, table, tag_of, tree_of
from antiphon.sessions._turn import Turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from antiphon.schema import Method
    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._client_peer import ClientPeer

__all__ = ["AgentContext", "AgentHandlersLike", "AgentRouter"]

log = logging.getLogger("antiphon.agent")

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

    def __init__(
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


class AgentRouter:
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

    def connection_lost(self, error: ConnectionClosed) -> None:
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
        if options is not None and not isinstance(options, UnsetType):
            response.config_options = session.config_options = self._peer.allowed_options(options)

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
            if options is not None:
                response.config_options = session.config_options = self._peer.allowed_options(
                    options
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

    async def _run_turn(self, turn: Turn, context: AgentContext) -> v1.PromptResponse:
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


def _list(value: list[str] | UnsetType) -> list[str]:
    return [] if isinstance(value, UnsetType) else value


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
    if tag_of(option) == "boolean":
        if not isinstance(params.value, bool):
            raise wrong
        return
    values = [
        choice.value
        for item in getattr(option, "options", ())
        for choice in (item.options if hasattr(item, "group") else (item,))
    ]
    if params.value not in values:
        raise wrong
