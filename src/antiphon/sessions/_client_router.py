"""Routing what an agent sends: updates to inboxes, requests and notifications to the client's handlers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from antiphon._errors import ConnectionClosed, InvalidParams, LimitExceeded
from antiphon.runtime import Connection, Context, InboundCall, NoticeRoute, RequestRoute
from antiphon.schema import UNSET, decode_params, v1_unstable
from antiphon.sessions._attach_frames import NOTICES, CaughtUp, Closed, Lagged, SessionRecord
from antiphon.sessions._attachment import Attachment
from antiphon.sessions._inbox import Inbox, Observer
from antiphon.sessions._methods import allowed_by, tag_of, tree_of
from antiphon.sessions._side_router import HandlersLike, SideRouter, session_of

if TYPE_CHECKING:
    from typing import Protocol

    from antiphon.sessions._agent_peer import AgentPeer
    from antiphon.sessions._session import Session
    from antiphon.sessions._update import Update
    from antiphon.sessions._view import ToolCallView
else:
    Protocol = object  # for type checkers alone; a class of it takes five times as long to make

__all__ = ["ClientContext", "ClientHandlersLike", "ClientRouter", "as_observer"]

Taker: TypeAlias = Inbox | Attachment
Notice: TypeAlias = SessionRecord | CaughtUp | Lagged | Closed

_CANCELLED = b'{"outcome":{"outcome":"cancelled"}}'
#: What is answered in a person's place, by the question.
_NO_ANSWER = {
    "session/request_permission": _CANCELLED,
    "elicitation/create": b'{"action":"cancel"}',
}

#: Characters of the id of a session that is not known, if it is to be remembered.
_STRANGE_ID = 4096


class ClientHandlersLike(HandlersLike, Protocol):
    """What this module needs of a `Client`."""

    def observers(self, peer: AgentPeer) -> Sequence[Observer]:
        """Who watches the updates of all sessions of a connection."""
        raise NotImplementedError

    def advertised(self, *, unstable: bool) -> v1_unstable.ClientCapabilities:
        """The capabilities to send."""
        raise NotImplementedError

    async def sessions_closed(self, session_ids: Sequence[str]) -> None:
        """Let go of what was lent to these sessions (terminals)."""


class ClientContext(Context):
    """What a client's handler is given: who asks, and for which session.

    Attributes:
        peer: the agent; calls on it may be made from a handler without deadlock.
    """

    __slots__ = ("peer",)

    def __init__(
        self,
        connection: Connection,
        method: str,
        session_id: str,
        raw: Any,
        call: InboundCall | None,
        peer: AgentPeer,
    ) -> None:
        super().__init__(connection, method, session_id, raw, call)
        self.peer = peer

    @property
    def agent_capabilities(self) -> v1_unstable.AgentCapabilities:
        """What the agent advertised."""
        return self.peer.capabilities

    @property
    def session(self) -> Session | None:
        """The session, if it is known here."""
        return self.peer.sessions.get(self.session_id)

    @property
    def roots(self) -> Sequence[str]:
        session = self.session
        return () if session is None else session.roots

    def known_tool_call(self, tool_call_id: str) -> ToolCallView | None:
        """What the session's view knows of a tool call; None where nobody has looked at the view."""
        session = self.session
        view = None if session is None else session.inbox.view
        return None if view is None else view.tool_calls.get(tool_call_id)


class ClientRouter(SideRouter):
    """Routes what the agent sends: updates to inboxes, requests and notifications to handlers."""

    def __init__(self, peer: AgentPeer, handlers: ClientHandlersLike) -> None:
        super().__init__("client", peer, handlers)
        self._peer = peer
        self._observers = tuple(handlers.observers(peer))
        #: Finds what decides a permission request without asking anybody, or gives None.
        self._decider: Callable[[], Callable[[Any], Any] | None] | None = getattr(
            handlers, "decider", None
        )
        self._decide: Callable[[Any], Any] | None = None  # that, once there is a route for them
        self._decision: Any = None  # the last such decision, and its answer
        self._answer = b""
        self._inboxes: dict[str, Inbox] = {}
        #: Who takes the updates of each of them: the inbox itself, or an attachment in front of it.
        self._takers: dict[str, Taker] = {}
        # (session id, update, frame), in the order they came.
        self._unknown: deque[tuple[str, Any, bytes]] = deque()
        self._unknown_bytes = 0
        self._shed = 0
        #: Open questions to a person, by the session they are about.
        self._questions: dict[InboundCall, str] = {}
        #: Ids of sessions not known here that asked for a terminal: they have to be ended as well.
        self.strangers: set[str] = set()

    def offer(self, capabilities: v1_unstable.ClientCapabilities) -> None:
        """Remember what was advertised: only that is served (R1-9)."""
        self._offered = tree_of(capabilities) or {}

    # -------------------------------------------------------------- updates

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        taker = self._takers.get(session_id)
        if taker is not None:
            taker.put(update, frame)
        else:
            self._keep_unknown(session_id, update, frame)

    def updates_received(
        self, session_id: str, updates: Sequence[Any], frames: Sequence[bytes]
    ) -> None:
        taker = self._takers.get(session_id)
        if isinstance(taker, Inbox):
            taker.put_all(updates, frames)
        else:  # what an attachment makes of one may change who takes the next
            for update, frame in zip(updates, frames, strict=True):
                self.update_received(session_id, update, frame)

    def _keep_unknown(self, session_id: str, update: Any, frame: bytes) -> None:
        """Some agents send updates before the answer that names their session (quirk 12).

        The oldest go first when there are too many: nobody has asked for them for the longest time.
        """
        limits = self._peer.connection.limits
        unknown = self._unknown
        unknown.append((session_id, update, frame))
        self._unknown_bytes += len(frame)
        while (
            len(unknown) > limits.unknown_session_updates
            or self._unknown_bytes > limits.queue_bytes
        ):
            lost, _, its_frame = unknown.popleft()
            self._unknown_bytes -= len(its_frame)
            self._shed += 1
            if (
                self._shed & (self._shed - 1) == 0
            ):  # the 1st, 2nd, 4th, …: a flood must not fill the log
                self._peer.connection.emit("update_shed", session=lost, lost=self._shed)

    def open_inbox(self, session_id: str) -> Inbox:
        """Begin to deliver for a session, what came before it was known first."""
        inbox = self._inboxes[session_id] = Inbox(self._peer.connection, session_id)
        self._takers[session_id] = inbox
        for observer in self._observers:
            inbox.observe(observer)
        if any(entry[0] == session_id for entry in self._unknown):
            others: deque[tuple[str, Any, bytes]] = deque()
            for entry in self._unknown:
                if entry[0] == session_id:
                    self._unknown_bytes -= len(entry[2])
                    inbox.put(entry[1], entry[2])
                else:
                    others.append(entry)
            self._unknown = others
        return inbox

    def unknown_of(self, session_id: str) -> list[tuple[Any, bytes]]:
        """What came for a session that is not known yet."""
        return [(entry[1], entry[2]) for entry in self._unknown if entry[0] == session_id]

    def drop_unknown(self, session_id: str) -> None:
        """Let go of what was kept for a session that nobody will ask for."""
        kept = deque(entry for entry in self._unknown if entry[0] != session_id)
        dropped = len(self._unknown) - len(kept)
        if dropped:
            self._peer.connection.emit("updates_discarded", session=session_id, updates=dropped)
        self._unknown = kept
        self._unknown_bytes = sum(len(frame) for _, _, frame in kept)

    def look_at_sessions(self) -> None:
        """Much waits: report the sessions whose share is full."""
        for inbox in self._inboxes.values():
            inbox.look()

    def close_inbox(self, inbox: Inbox) -> None:
        """Stop delivering to it; another of that id is left alone."""
        self.drop_inbox(inbox)
        inbox.end()

    def drop_inbox(self, inbox: Inbox) -> None:
        """Leave it to another connection, or to nobody; another of that id is left alone."""
        if self._inboxes.get(inbox.session_id) is inbox:
            del self._inboxes[inbox.session_id]
            del self._takers[inbox.session_id]

    def take_inbox(self, inbox: Inbox) -> None:
        """Deliver to one that another connection had."""
        self._inboxes[inbox.session_id] = self._takers[inbox.session_id] = inbox

    def route_to(self, inbox: Inbox, attachment: Attachment | None) -> None:
        """Let an attachment see the updates of a session first, or no more."""
        if self._inboxes.get(inbox.session_id) is inbox:
            self._takers[inbox.session_id] = inbox if attachment is None else attachment

    def notice_route(self, method: str) -> NoticeRoute | None:
        kind = NOTICES.get(method)
        if kind is None:
            return super().notice_route(method)
        # In the reader, so that records and updates keep one order.
        return NoticeRoute(partial(decode_params, kind), immediate=self._attachment_told)

    def _attachment_told(self, notice: Notice, context: ClientContext) -> None:
        taker = self._takers.get(notice.session_id)
        if isinstance(taker, Attachment):
            taker.notice(notice)
        else:
            self._peer.connection.emit(
                "unknown_notification", method=context.method, reason="not attached"
            )
        own = super().notice_route(context.method)
        if own is not None and own.handle is not None:  # the user's
            params = own.decode(context.raw)
            self._peer.connection.handle_notice(
                own.handle, params, context, len(context.raw or b"")
            )

    # -------------------------------------------------------------- requests

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        decode, invoke, encode = route.decode, route.invoke, route.encode
        match method:
            case "session/request_permission":
                ask = self._question_handler(invoke)
                self._decide = None if self._decider is None else self._decider()
                at_once = partial(self._permission_received, encode)
                return RequestRoute(decode, ask, encode, self._accept_permission, at_once=at_once)
            case "elicitation/create":
                ask = self._question_handler(invoke)
                return RequestRoute(decode, ask, encode, self._accept_elicitation)
            case "terminal/create":
                return RequestRoute(decode, self._terminal_handler(invoke), encode)
            case _:
                return route

    def _permission_received(
        self, encode: Callable[[Any], bytes], params: Any, call: InboundCall
    ) -> bool:
        """Show it in the view, and answer where nobody has to be asked: True if that was its answer.

        A policy that is always the same needs no task, and not even a context.
        """
        session = self._peer.sessions.get(params.session_id)
        if session is not None:
            view = session.inbox.view
            if view is not None:
                # It may say what no update has said yet (quirk 14).
                view.apply_tool_call(params.tool_call)
            if session.stopping:
                return False  # `_enter` says so
        decision = None if self._decide is None else self._decide(params)
        if decision is None:
            return False
        if session is not None and session.watch is not None:
            session.watch.asked(call)  # as `context` does
        self._peer.connection.answer(call, self._decided(encode, decision))
        return True

    def _decided(self, encode: Callable[[Any], bytes], decision: Any) -> bytes:
        """The answer for a decision; a fixed policy gives the same one nearly always."""
        if decision is not self._decision:
            self._answer = encode(decision)
            self._decision = decision
        return self._answer

    def _accept_permission(self, params: Any, context: ClientContext) -> Any:
        """Enter it where `session/cancel` finds it; answered at once in a turn being cancelled."""
        self._enter(context)
        return params

    def _enter(self, context: ClientContext) -> None:
        call = context.call
        if call is None:
            return
        if _stopping(context.session):
            self._peer.connection.answer(call, _NO_ANSWER[call.method])
        else:
            self._questions[call] = context.session_id

    def _question_handler(
        self, handler: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def ask(params: Any, context: ClientContext) -> Any:
            try:
                return await handler(params, context)
            finally:
                if context.call is not None:
                    self._questions.pop(context.call, None)

        return ask

    def cancel_questions(self, session_id: str) -> None:
        """Answer every open question of the session to a person as cancelled.

        Permission requests by R1-92, elicitations likewise: a turn that is stopped asks nothing more.
        """
        session = self._peer.sessions.get(session_id)
        if session is not None and session.turn is not None:
            session.turn.cancelling = True
        for call in [c for c, of in self._questions.items() if of == session_id]:
            del self._questions[call]
            self._peer.connection.answer(call, _NO_ANSWER[call.method])

    def _terminal_handler(
        self, handler: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def create_terminal(params: Any, context: ClientContext) -> Any:
            if context.session is None and params.session_id not in self.strangers:
                if len(params.session_id) > _STRANGE_ID:
                    raise InvalidParams({"reason": "session unknown"})
                limit = self._peer.connection.limits.sessions
                if len(self.strangers) >= limit:
                    raise LimitExceeded("sessions", limit, len(self.strangers) + 1)
                self.strangers.add(params.session_id)
            return await handler(params, context)

        return create_terminal

    def _accept_elicitation(self, params: Any, context: ClientContext) -> Any:
        """R1-128: a mode that was not advertised is refused."""
        mode = tag_of(params)
        if not allowed_by(self._offered, f"elicitation.{mode}"):
            raise InvalidParams({"reason": "elicitation mode not advertised", "mode": mode})
        if context.session_id:
            self._enter(context)
        return params

    # -------------------------------------------------------------- the rest of Router

    def context(
        self, method: str, raw: Any, params: Any, call: InboundCall | None
    ) -> ClientContext:
        peer, session_id = self._peer, session_of(params)
        session = peer.sessions.get(session_id)
        if session is not None and session.watch is not None:
            session.watch.asked(call)
        return ClientContext(peer.connection, method, session_id, raw, call, peer)

    def cancelled(self, call: InboundCall) -> bool:
        """A permission request that is withdrawn is answered as cancelled (acp-v1 §7, §20)."""
        if call.method == "session/request_permission":
            self._questions.pop(call, None)
            return self._peer.connection.answer(call, _CANCELLED)
        return False

    def input_ended(self) -> None:
        """Only an agent's input ends before its output does."""

    def connection_lost(self, error: ConnectionClosed) -> None:
        self._unknown.clear()
        self._questions.clear()
        kept = self._peer.link_lost(error)
        for inbox in list(self._inboxes.values()):
            if inbox.session_id not in kept:
                inbox.end()


def _stopping(session: Session | None) -> bool:
    return session is not None and session.stopping


def as_observer(handler: Callable[[Any, Any], Awaitable[None]], peer: AgentPeer) -> Observer:
    """An overridden `session_update(params, ctx)` as an observer of updates."""

    async def observe(update: Update) -> None:
        meta = update.meta
        params = v1_unstable.SessionNotification(
            session_id=update.session_id,
            update=update.value,
            meta=UNSET if not isinstance(meta, Mapping) else dict(cast("Mapping[str, Any]", meta)),
        )
        raw = _decode_params(update.frame).params
        context = ClientContext(
            peer.connection, "session/update", update.session_id, raw, None, peer
        )
        await handler(params, context)

    return observe


class _Params(msgspec.Struct):
    params: msgspec.Raw


_decode_params = msgspec.json.Decoder(_Params).decode
