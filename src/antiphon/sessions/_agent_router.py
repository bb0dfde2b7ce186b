"""Routing what a client sends to the agent's handlers, and keeping the sessions in step.

Responsible for saying which message is which event of a session's states, and for running a turn's
handler. Leaves to `_turn_states` what an event means, and to `AgentSession` carrying it out.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import (
    ENDING,
    ConnectionClosed,
    InvalidParams,
    RequestError,
    TurnOver,
)
from antiphon.runtime import Connection, Context, InboundCall, NoticeRoute, RequestRoute
from antiphon.schema import (
    UNSET,
    UnsetType,
    decode,
    decoder,
    encode_checked,
    params_decoder,
    v1,
    v1_unstable,
)
from antiphon.sessions._agent_session import cancelled_response
from antiphon.sessions._content import missing_capability
from antiphon.sessions._methods import allowed_by, table, tag_of, tree_of
from antiphon.sessions._side_router import HandlersLike, SideRouter, session_of
from antiphon.sessions._turn import Turn
from antiphon.sessions._turn_states import Effect, Event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from typing import Protocol

    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._client_peer import ClientPeer
    from antiphon.sessions._turn_states import Step
else:
    Protocol = object  # for type checkers alone; a class of it takes five times as long to make

__all__ = ["AgentContext", "AgentHandlersLike", "AgentRouter"]

log = logging.getLogger("antiphon.agent")

# A client may run on another system than the agent, so all forms of absolute paths count.
# Compiled (and then kept by `re`) with the first session, not while an editor waits for the start.
_ABSOLUTE = r"/|[A-Za-z]:[\\/]|\\\\"


class AgentHandlersLike(HandlersLike, Protocol):
    """What this module needs of an `Agent`."""

    async def prompt(self, turn: Turn) -> Any:
        """Answer one prompt."""

    @property
    def steers(self) -> bool:
        """Whether `steer` does something."""
        raise NotImplementedError

    async def steer(self, turn: Turn, text: str | None) -> None:
        """Take a new direction in a turn that runs."""

    def initial_modes(self) -> v1.SessionModeState | None:
        """What a session whose handler names no modes has."""

    def initial_config_options(self) -> list[v1_unstable.SessionConfigOption]:
        """What a session whose handler names no options has."""
        raise NotImplementedError


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
        """Send an update of the request's session; in `load_session` also its history.

        Raises:
            ResourceNotFound: the request names no session that is open here.
            TurnOver: it tells what a turn does (message, thought, tool, plan), no turn is open, and
                this is no `session/load` before its answer (R1-54).
            CapabilityError: the client did not ask for its kind (R1-36..R1-39).
        """
        await self.session().update(update)


class AgentRouter(SideRouter):
    """Routes what the client sends to the agent's handlers, and keeps the sessions in step."""

    def __init__(self, peer: ClientPeer, agent: AgentHandlersLike) -> None:
        super().__init__("agent", peer, agent)
        self._peer = peer
        self._agent = agent
        self._auth_methods: Sequence[Any] = ()
        self._cancel = NoticeRoute(
            params_decoder(v1_unstable.CancelNotification),
            immediate=self._cancel_received,
        )
        self._special: Mapping[str, Callable[[RequestRoute], RequestRoute]] = {
            "initialize": self._initialize_route,
            "authenticate": self._authenticate_route,
            "session/list": self._list_route,
            "session/new": self._new_route,
            "session/load": self._load_route,
            "session/resume": self._load_route,
            "session/fork": self._new_route,
            "session/prompt": self._prompt_route,
            "session/close": self._close_route,
            "session/delete": self._close_route,
            "session/set_mode": self._mode_route,
            "session/set_config_option": self._option_route,
        }

    # -------------------------------------------------------------- for the peer

    def session_opened(self, session: AgentSession) -> None:
        """A session was made known on this connection."""

    def session_forgotten(self, session: AgentSession) -> None:
        """It was closed, deleted, or could not be loaded."""

    # -------------------------------------------------------------- Router

    def notice_route(self, method: str) -> NoticeRoute | None:
        return self._cancel if method == "session/cancel" else super().notice_route(method)

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        special = self._special.get(method)
        return route if special is None else special(route)

    def context(self, method: str, raw: Any, params: Any, call: InboundCall | None) -> AgentContext:
        peer = self._peer
        return AgentContext(peer.connection, method, session_of(params), raw, call, peer)

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        """An agent receives no updates; `core` never reports one on this side."""

    def updates_received(
        self, session_id: str, updates: Sequence[Any], frames: Sequence[bytes]
    ) -> None:
        """Nor several."""

    def cancelled(self, call: InboundCall) -> bool:
        """`$/cancel_request` on a prompt is a cancelled turn: its answer stays a result (R1-98)."""
        for session in self._peer.sessions.values():
            turn = session.turn
            if turn is not None and turn.call is call:
                session.fire(Event.PROMPT_CANCELLED, turn)
                return True
        return False

    def input_ended(self) -> None:
        for session in list(self._peer.sessions.values()):
            session.fire(Event.INPUT_ENDED)

    def connection_lost(self, error: ConnectionClosed) -> None:
        for session in list(self._peer.sessions.values()):
            session.fire(Event.LOST)

    # -------------------------------------------------------------- handshake

    def _initialize_route(self, route: RequestRoute) -> RequestRoute:
        async def initialize(params: v1_unstable.InitializeRequest, context: Any) -> Any:
            params = _with_file_system(params, context.raw_params)
            self._peer.client_known(params)
            response = await route.invoke(params, context)
            if isinstance(response, v1.InitializeResponse):
                self._offered = tree_of(response.agent_capabilities) or {}
                self._auth_methods = _list(response.auth_methods)
            return response

        return RequestRoute(route.decode, initialize, route.encode)

    def _authenticate_route(self, route: RequestRoute) -> RequestRoute:
        async def authenticate(params: v1_unstable.AuthenticateRequest, context: Any) -> Any:
            """R1-146; a terminal login is not carried out by this method either (R1-145)."""
            methods = self._auth_methods
            if methods and not any(
                m.id == params.method_id and not isinstance(m, v1.AuthMethodTerminal)
                for m in methods
            ):
                raise InvalidParams({"reason": "unknown auth method", "methodId": params.method_id})
            return await route.invoke(params, context)

        return RequestRoute(route.decode, authenticate, route.encode)

    # -------------------------------------------------------------- opening and closing sessions

    # Where a session is known, what happens to it begins in the reader, as a prompt does: what follows
    # in the stream finds it being loaded or closed.

    def _list_route(self, route: RequestRoute) -> RequestRoute:
        async def list_sessions(params: v1_unstable.ListSessionsRequest, context: Any) -> Any:
            if isinstance(params.cwd, str):
                _check_absolute((params.cwd,))
            return await route.invoke(params, context)

        return RequestRoute(route.decode, list_sessions, route.encode)

    def _new_route(self, route: RequestRoute) -> RequestRoute:
        async def new_session(params: Any, context: AgentContext) -> bytes:
            peer = self._peer
            more = self._check_setup(params)
            peer.check_room()
            response = await route.invoke(params, context)
            session_id = getattr(response, "session_id", None)
            if not isinstance(session_id, str):
                return route.encode(response)  # says what is wrong
            if session_id in peer.sessions:
                msg = f"session {session_id!r} is open already, a new one needs an id of its own"
                raise ValueError(msg)  # R1-47
            session = peer.open_session(session_id, params.cwd, more)
            return self._set_up(session, response, route)

        return RequestRoute(route.decode, new_session, _as_it_is)

    def _load_route(self, route: RequestRoute) -> RequestRoute:
        def accept(params: Any, context: AgentContext) -> tuple[Any, AgentSession, bool]:
            peer = self._peer
            more = self._check_setup(params)
            known = peer.sessions.get(params.session_id)
            session = known or peer.open_session(params.session_id, params.cwd, more)
            session.fire(Event.LOAD if context.method == "session/load" else Event.RESUME)
            return params, session, known is not None

        def withdraw(accepted: tuple[Any, AgentSession, bool]) -> None:
            _, session, known = accepted
            if not known:
                self._peer.forget_session(session)
            session.fire(Event.LOADED)

        async def load_session(accepted: Any, context: AgentContext) -> bytes:
            params, session, _ = accepted
            before = session.cwd, session.additional_directories
            session.cwd = params.cwd
            session.additional_directories = tuple(_list(params.additional_directories))
            try:
                response = await route.invoke(params, context)
                if response is None:  # says the same as the method's own empty result
                    response = table().requests["agent"][context.method].result()
                body = self._set_up(session, response, route)
            except BaseException:
                session.cwd, session.additional_directories = before
                withdraw(accepted)
                raise
            session.fire(Event.LOADED)
            return body

        return RequestRoute(route.decode, load_session, _as_it_is, accept, withdraw)

    def _check_setup(self, params: Any) -> list[str]:
        """Refuse what a session cannot be set up with; returns the additional directories."""
        more = _list(params.additional_directories)
        _check_absolute((params.cwd, *more))  # R1-48, R1-51
        for server in _list(params.mcp_servers):
            kind = tag_of(server)  # a stdio server has none
            if kind and not allowed_by(self._offered, f"mcpCapabilities.{kind}"):
                reason = {"reason": "unsupported MCP transport", "type": kind}
                raise InvalidParams(reason)  # R1-76
        return more

    def _set_up(self, session: AgentSession, response: Any, route: RequestRoute) -> bytes:
        """Encode the answer, and keep what it tells the client about modes and options.

        What is kept is copied: a handler may give the same objects to many sessions. What the handler
        leaves absent is as declared (DESIGN §6: merged); null says that there is none.
        """
        if getattr(response, "modes", None) is UNSET:
            response = msgspec.structs.replace(response, modes=self._agent.initial_modes() or UNSET)
        if getattr(response, "config_options", None) is UNSET:
            response = msgspec.structs.replace(
                response, config_options=self._agent.initial_config_options() or UNSET
            )
        options: Any = getattr(response, "config_options", None)
        if isinstance(options, UnsetType):
            options = None
        if options is not None:
            options = self._peer.allowed_options(options)
            response = msgspec.structs.replace(response, config_options=options)
        body = route.encode(response)
        modes: Any = getattr(response, "modes", None)
        known = isinstance(modes, v1.SessionModeState)
        session.modes = msgspec.structs.replace(modes) if known else None
        session.config_options = options
        return body

    def _close_route(self, route: RequestRoute) -> RequestRoute:
        def accept(params: Any, _: AgentContext) -> tuple[Any, AgentSession | None]:
            session = self._peer.sessions.get(params.session_id)
            if session is not None:
                session.fire(Event.CLOSE)
            return params, session

        def withdraw(accepted: tuple[Any, AgentSession | None]) -> None:
            _, session = accepted
            if session is not None:
                session.fire(Event.CLOSED)

        async def close_session(accepted: Any, context: AgentContext) -> Any:
            params, session = accepted
            if session is None:
                return await route.invoke(params, context)
            try:
                if session.turn is not None:
                    # Bounded by the back-stop; the prompt is answered first (R1-58).
                    await session.turn.wait_over()
                response = await route.invoke(params, context)
                self._peer.forget_session(session)
            finally:
                session.fire(Event.CLOSED)
            return response

        return RequestRoute(route.decode, close_session, route.encode, accept, withdraw)

    # -------------------------------------------------------------- modes and options

    def _mode_route(self, route: RequestRoute) -> RequestRoute:
        async def set_mode(params: v1_unstable.SetSessionModeRequest, context: AgentContext) -> Any:
            session = context.session()
            session.fire(Event.SET_MODE)
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
            session.fire(Event.SET_MODE)
            if session.config_options is not None:
                _check_option(session.config_options, params)
            response = await route.invoke(params, context)
            options = getattr(response, "config_options", None)
            if options is not None:
                session.config_options = self._peer.allowed_options(options)
                response = msgspec.structs.replace(response, config_options=session.config_options)
            return response

        return RequestRoute(route.decode, set_option, route.encode)

    # -------------------------------------------------------------- turns

    def _prompt_route(self, route: RequestRoute) -> RequestRoute:
        encode = route.encode

        def encode_response(response: Any) -> bytes:
            return _ENDED_RAW if response is _ENDED else encode(response)

        return RequestRoute(
            route.decode,
            self._begin_turn,
            encode_response,
            begin=self._accept_prompt,
            conclude=self._conclude_turn,
        )

    def _accept_prompt(
        self, params: v1_unstable.PromptRequest, raw: Any, call: InboundCall
    ) -> Turn:
        """In the reader: a cancel right behind the prompt must find the turn (field fault 25)."""
        session = self._peer.sessions.get(params.session_id)
        if session is None:
            session = self._peer.session_of(params.session_id)  # raises
        for block in params.prompt:
            if block.__class__ is not _TEXT:  # which every agent takes
                missing = missing_capability(params.prompt, self._offered)
                if missing is None:
                    break
                reason = {"reason": "unsupported content", "capability": missing}
                raise InvalidParams(reason)  # R1-80
        turn = Turn(session, params, raw, call)
        step = session.states.fire(_PROMPT, turn)
        if step.duties:
            session.carry_out(step.duties, turn)
        return turn

    def _begin_turn(self, turn: Turn, _: None = None) -> Awaitable[Any]:
        """In the turn's task: call the handler, unless the turn is over."""
        # A step that asks nothing of the session.
        if _RUN in turn.session.states.fire(_BEGIN, turn).effects:
            return self._agent.prompt(turn)
        return _nothing()

    def _conclude_turn(self, turn: Turn, result: Any, error: BaseException | None) -> Any:
        """The handler has ended: answer in the same step, or wait for the subtasks first."""
        session = turn.session
        try:
            if error is None:
                if _KEEP in session.states.fire(_RESULT, turn).effects:
                    turn.result = result
            elif isinstance(error, asyncio.CancelledError):
                if _KEEP not in session.fire(Event.INTERRUPTED, turn):
                    raise error  # noqa: TRY301  (aborted as by any other)
            elif isinstance(error, ENDING):
                raise error  # noqa: TRY301
            else:
                self._handler_failed(turn, error)
            if turn.subtasks:
                return self._finish_turn(turn)
            step = session.states.fire(_DRAINED, turn)
            if step.duties:
                session.carry_out(step.duties, turn)
        except BaseException:
            session.fire(Event.ABORTED, turn)
            raise
        return self._answer_of(turn, step)

    async def _finish_turn(self, turn: Turn) -> v1.PromptResponse:
        """Wait for the subtasks; the response is sent in the same step as they end."""
        session = turn.session
        try:
            await turn.finish()
            step = session.states.fire(_DRAINED, turn)
            session.carry_out(step.duties, turn)
        except BaseException:
            session.fire(Event.ABORTED, turn)
            raise
        return self._answer_of(turn, step)

    async def _run_turn(self, turn: Turn) -> v1.PromptResponse:
        """A turn from its begin to its response, for who does something around it."""
        try:
            result = await self._begin_turn(turn)
        except BaseException as error:  # noqa: BLE001  (it is told)
            response: Any = self._conclude_turn(turn, None, error)
        else:
            response = self._conclude_turn(turn, result, None)
        return response if isinstance(response, v1.PromptResponse) else await response

    def _answer_of(self, turn: Turn, step: Step) -> v1.PromptResponse:
        """What a turn is answered with that has come to its end; raises what its handler has."""
        failure = turn.failure
        if failure is not None:
            turn.failure = None  # it holds the frames that hold the turn
        if _ANSWER not in step.effects:
            return cancelled_response(turn)
        if failure is not None:
            raise failure
        return self._response_of(turn)

    def _handler_failed(self, turn: Turn, error: BaseException) -> None:
        if _KEEP in turn.session.fire(Event.CRASH, turn):
            turn.failure = error
        if turn.cancelled and not isinstance(error, (RequestError, TurnOver)):
            log.info("a cancelled turn ended with an error", exc_info=error)

    def _response_of(self, turn: Turn) -> v1.PromptResponse:
        """What a turn is answered with whose handler returned, and which was not cancelled."""
        response = _ENDED if turn.result is None else _as_response(turn.result)
        if not turn.sent and turn.params.prompt:
            self._peer.connection.emit(
                "zero_updates_turn", session=turn.session_id, stop_reason=response.stop_reason
            )
        return response

    def _cancel_received(
        self, params: v1_unstable.CancelNotification, context: AgentContext
    ) -> None:
        session = self._peer.sessions.get(params.session_id)
        if session is None:
            return
        session.fire(Event.CANCEL)
        handler = self._agent.find_handler("cancel")
        if handler is not None:  # waits for its turn, and within the bounds, of all notifications
            self._peer.connection.handle_notice(handler, params, context, len(context.raw))


# Taken for each prompt.
_PROMPT, _BEGIN, _RESULT, _DRAINED = Event.PROMPT, Event.BEGIN, Event.RESULT, Event.DRAINED
_RUN, _KEEP, _ANSWER = Effect.RUN, Effect.KEEP, Effect.ANSWER
_TEXT = v1.TextContent
#: What a turn is answered with whose handler returned None: the same each time.
_ENDED = v1.PromptResponse(stop_reason="end_turn")
_ENDED_RAW = encode_checked(_ENDED)

#: One that the protocol does not know has to be returned as a `PromptResponse`.
_STOP_REASONS = frozenset(("end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"))


async def _nothing() -> None:
    """In the place of a handler that is not to be called."""


class _OldCapabilities(msgspec.Struct, rename="camel"):
    file_system: msgspec.Raw


class _OldParams(msgspec.Struct, rename="camel"):
    client_capabilities: _OldCapabilities


def _with_file_system(
    params: v1_unstable.InitializeRequest, raw: Any
) -> v1_unstable.InitializeRequest:
    """Take `fileSystem` for `fs`, as clients of raxol name it (runtime-semantics §13)."""
    offered = params.client_capabilities
    if raw is None or isinstance(offered, UnsetType) or offered.fs is not UNSET:
        return params
    try:
        old = decoder(_OldParams)(raw).client_capabilities.file_system
        fs = decode(v1.FileSystemCapabilities, old)
    except (msgspec.DecodeError, RecursionError):
        return params  # there is none, or it is no object
    offered = msgspec.structs.replace(offered, fs=fs)
    return msgspec.structs.replace(params, client_capabilities=offered)


def _list(value: Sequence[Any] | UnsetType | None) -> list[Any]:
    return [] if value is None or isinstance(value, UnsetType) else list(value)


def _as_it_is(body: bytes) -> bytes:
    return body


def _check_absolute(paths: Iterable[str]) -> None:
    for path in paths:
        if not re.match(_ABSOLUTE, path):
            raise InvalidParams({"reason": "path_not_absolute", "path": path})


def _as_response(result: Any) -> v1.PromptResponse:
    """What `Agent.prompt` returned, as the response; raises for what is none."""
    if isinstance(result, v1.PromptResponse):
        return result
    if isinstance(result, str):
        if result not in _STOP_REASONS:
            msg = f"prompt returned {result[:80]!r}, no stop reason; `turn.say` is what sends text"
            raise ValueError(msg)
        return v1.PromptResponse(stop_reason=result)
    msg = f"prompt returned {type(result).__name__}, not None, a stop reason or a PromptResponse"
    raise TypeError(msg)


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
