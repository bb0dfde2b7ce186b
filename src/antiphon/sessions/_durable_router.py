"""Routing for an agent with a journal: sessions are loaded, listed and deleted from it, and attached to.

Responsible for what the journal adds to the methods of `AgentRouter`, and for the extension's own
(`_raxol/session.load`, `.steer`, `.detach`). Leaves the way of updates to `_durable_link`, history and
tail to `journal.Subscriber`.

Source: resumable-sessions §2, §7.1, §12.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime as dt
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from antiphon._errors import (
    ConnectionClosed,
    InvalidParams,
    InvalidRequest,
    JournalError,
    JournalInUse,
    RequestCancelled,
    ResourceNotFound,
)
from antiphon.journal import (
    Denied,
    Follower,
    Grant,
    Record,
    Rider,
    Subscriber,
    attach_denied,
    read_rider,
)
from antiphon.runtime import NoticeRoute, RequestRoute, deferrable
from antiphon.schema import UNSET, UnsetType, decode, encode_checked, v1, v1_unstable
from antiphon.sessions._agent_router import AgentRouter
from antiphon.sessions._attach_frames import KEY
from antiphon.sessions._durability import SteerParams
from antiphon.sessions._durable_link import DurableLink
from antiphon.sessions._methods import allowed_by, tree_of
from antiphon.sessions._turn import gate_of_update
from antiphon.sessions._turn_states import Event, State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.journal import AttachContext, SessionInfo, SessionLog, Writer
    from antiphon.runtime import InboundCall
    from antiphon.sessions._agent_router import AgentContext, AgentHandlersLike
    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._client_peer import ClientPeer
    from antiphon.sessions._durability import Durability
    from antiphon.sessions._turn import Turn

__all__ = ["DurableRouter"]

log = logging.getLogger("antiphon.journal")

#: Sessions in one answer to `session/list`.
_LISTED = 100

#: What only who controls a session may ask.
_CONTROL = frozenset(
    (
        "session/set_mode",
        "session/set_config_option",
        "session/set_title",
        "session/close",
        "session/delete",
        "session/archive",
        "session/unarchive",
        "session/fork",
    )
)

#: What the agent's own handlers of do only for whom the policy lets in, as the journal's do.
_ADMITTED = frozenset(("load_session", "resume_session", "list_sessions", "delete_session"))


class AttachParams(msgspec.Struct, rename="camel"):
    """Parameters of `_raxol/session.load`; `session/load` has the same and more."""

    session_id: str
    cwd: str
    mcp_servers: list[Any] = []
    meta: Any = msgspec.field(name="_meta", default=None)


class DetachParams(msgspec.Struct, rename="camel"):
    """Parameters of `_raxol/session.detach`."""

    session_id: str


class _Attach:
    """A load that was accepted in the reader, and what it found."""

    __slots__ = ("cwd", "known", "loading", "more", "params", "rider", "session")

    def __init__(
        self, params: Any, rider: Rider, session: AgentSession, *, known: bool, loading: bool
    ) -> None:
        self.params = params
        self.rider = rider
        self.session = session
        #: Whether the session was open on this connection before.
        self.known = known
        #: Whether prompts have to wait for its end.
        self.loading = loading
        self.cwd = session.cwd
        self.more = session.additional_directories


class DurableRouter(AgentRouter):
    """Routes what the client of a durable agent sends."""

    def __init__(self, peer: ClientPeer, agent: AgentHandlersLike, durability: Durability) -> None:
        super().__init__(peer, agent)
        self._durability = durability
        own: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "load_session": self._never,
            "resume_session": self._resume,
            "list_sessions": self._list,
            "delete_session": self._delete,
        }
        implemented = agent.find_handler

        def find_handler(name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
            # What the agent does itself it does in the journal's place, for whom the policy lets in.
            found = implemented(name)
            if found is None:
                return own.get(name)
            return self._admitting(found) if name in _ADMITTED else found

        #: Prompts that are being handled: also those whose turn is over, and not durable yet.
        self._prompts: set[InboundCall] = set()
        #: The session that was set up last.
        self._new: AgentSession | None = None
        self._find_handler = find_handler
        self._loads_itself = implemented("load_session") is not None
        for method, route in list(self._extensions.requests.items()):
            self._extensions.requests[method] = self._behind_its_updates(method, route)
        attach = RequestRoute(
            decode_attach, self._attach, _as_it_is, self._accept_attach, self._withdraw_attach
        )
        self._extensions.requests["_raxol/session.load"] = attach
        self._extensions.requests["_raxol/session.steer"] = RequestRoute(
            lambda raw: decode(SteerParams, b"null" if raw is None else raw),
            self._steer,
            encode_checked,
        )
        self._extensions.notices["_raxol/session.detach"] = NoticeRoute(
            lambda raw: decode(DetachParams, b"null" if raw is None else raw),
            immediate=self._detached,
        )

    # -------------------------------------------------------------- what a session writes to

    def session_opened(self, session: AgentSession) -> None:
        """A session was made known on this connection."""
        link = session.link = session.durable = DurableLink(session, self._durability)
        link.asked = True  # until it is known who opens it, and what for
        self._durability.add(link)

    def session_forgotten(self, session: AgentSession) -> None:
        """It was closed, deleted, or could not be loaded."""
        if session.durable is not None:
            session.durable.close()

    # -------------------------------------------------------------- Router

    def cancelled(self, call: InboundCall) -> bool:
        """What a turn ended with is in the journal, or on its way there: the answer says the same."""
        return super().cancelled(call) or call in self._prompts

    def input_ended(self) -> None:
        for session in list(self._peer.sessions.values()):
            if not self._goes_on(session):
                session.fire(Event.INPUT_ENDED)

    def connection_lost(self, error: ConnectionClosed) -> None:
        for session in list(self._peer.sessions.values()):
            if not self._goes_on(session):
                session.fire(Event.LOST)
            if session.durable is not None:
                session.durable.lose()

    @staticmethod
    def _goes_on(session: AgentSession) -> bool:
        """Whether the session's open turn outlives its connection."""
        link = session.durable
        running = session.states.state is State.PROMPTING
        return link is not None and link.outlives and running

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        served = super()._served(method, self._behind_its_updates(method, route))
        if method == "session/load":
            return self._load_from_journal(served)
        return served

    def _behind_its_updates(self, method: str, route: RequestRoute) -> RequestRoute:
        """An answer leaves behind what its handler has sent before; a prompt's has its own way."""
        if method == "session/prompt":
            return route
        peer, invoke, control = self._peer, route.invoke, method in _CONTROL
        extension = method.startswith("_")
        if extension:
            invoke = deferrable(invoke)

        async def answer(params: Any, context: AgentContext) -> Any:
            session_id = context.session_id
            if control:
                await self._check_may(session_id)
            elif extension and (link := self._link_of(session_id)) and link.role is None:
                # What one means for whoever looks on is the agent's to say; nobody else may ask.
                self._check_control(session_id)
            result = await invoke(params, context)
            link = self._link_of(session_id)
            if link is not None:
                link.touched = True
            if extension or link is None:
                await peer.all_settled()  # whichever it was about
            else:
                await link.settled()
            return result

        return RequestRoute(route.decode, answer, route.encode, route.accept, route.withdraw)

    def _link_of(self, session_id: str) -> DurableLink | None:
        session = self._peer.sessions.get(session_id)
        return None if session is None else session.durable

    def _check_control(self, session_id: str) -> None:
        """Refuse what an observer asks for. A session not known here is found missing elsewhere."""
        link = self._link_of(session_id)
        if link is None or link.role == "controller":
            return
        if link.asked:
            raise InvalidRequest({"sessionId": session_id}, "the session is being loaded")
        if link.role is None:
            raise attach_denied()
        raise _observer(session_id)

    async def _check_may(self, session_id: str) -> None:
        """The same, for what may be asked about a session that is not open here, too."""
        if session_id in self._peer.sessions:
            self._check_control(session_id)
        elif session_id:
            granted = await self._admitted(session_id, Rider())
            if self._durability.role_of(*granted) != "controller":
                raise _observer(session_id)

    def _admitting(
        self, handler: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """A handler of the agent that opens, lists or deletes sessions."""

        async def admitted(params: Any, context: AgentContext) -> Any:
            session_id = context.session_id
            session = self._peer.sessions.get(session_id)
            granted = await self._admitted(session_id, Rider())
            result = await handler(params, context)
            link = None if session is None else session.durable
            if link is not None and context.method in ("session/load", "session/resume"):
                link.allow(self._durability.role_of(*granted), granted[0].expires_at)
            return result

        return admitted

    # -------------------------------------------------------------- handshake

    def _initialize_route(self, route: RequestRoute) -> RequestRoute:
        invoke = route.invoke

        async def initialize(params: Any, context: Any) -> Any:
            response = await invoke(params, context)
            if not isinstance(response, v1.InitializeResponse):
                return response
            tree: dict[str, Any] = tree_of(response.agent_capabilities) or {}
            tree["loadSession"] = True
            sessions = tree.get("sessionCapabilities")
            sessions = tree["sessionCapabilities"] = dict(sessions) if sessions else {}
            for name in ("list", "resume", "delete"):
                sessions.setdefault(name, {})
            return msgspec.structs.replace(
                response,
                agent_capabilities=decode(v1_unstable.AgentCapabilities, encode_checked(tree)),
                meta=_with_extension(response.meta, {"resumable": True}),
            )

        return super()._initialize_route(
            RequestRoute(route.decode, initialize, route.encode, route.accept, route.withdraw)
        )

    # -------------------------------------------------------------- turns

    def _new_route(self, route: RequestRoute) -> RequestRoute:
        served = super()._new_route(route)
        invoke = served.invoke

        async def new_session(params: Any, context: AgentContext) -> Any:
            body = await invoke(params, context)
            # In the same step: what else is being opened here has its request to wait for.
            opened, self._new = self._new, None
            if opened is not None and opened.durable is not None:
                opened.durable.allow("controller")
                try:
                    # Whoever is told of a session can come back to it, whatever happens next.
                    await opened.durable.create()
                except BaseException:
                    # Who asked never learns of it.
                    self._peer.forget_session(opened)
                    raise
            return body

        return RequestRoute(served.decode, new_session, served.encode)

    def _set_up(self, session: AgentSession, response: Any, route: RequestRoute) -> bytes:
        body = super()._set_up(session, response, route)
        if session.durable is not None:
            options: Any = getattr(response, "config_options", UNSET)
            if options is UNSET:
                options = self._agent.initial_config_options()
            session.durable.options = list(options) if options else None
        self._new = session
        return body

    def _accept_prompt(
        self, params: v1_unstable.PromptRequest, raw: Any, call: InboundCall
    ) -> Turn:
        self._check_control(params.session_id)
        turn = super()._accept_prompt(params, raw, call)
        if turn.session.durable is not None:
            turn.session.durable.touched = True
        return turn

    def _prompt_route(self, route: RequestRoute) -> RequestRoute:
        plain = super()._prompt_route(route)
        return RequestRoute(plain.decode, self._serve_turn, plain.encode, begin=plain.begin)

    async def _serve_turn(self, turn: Turn, _: None) -> v1.PromptResponse:
        link = turn.session.durable
        if link is None:
            return await self._run_turn(turn)
        call = turn.call
        if call is not None:
            self._prompts.add(call)
        try:
            return await self._run_kept(link, turn)
        finally:
            if call is not None:
                self._prompts.discard(call)

    async def _run_kept(self, link: DurableLink, turn: Turn) -> v1.PromptResponse:
        if not link.outlives:
            return await self._run_durable(link, turn)
        # In a task of its own, which the end of the connection leaves alone.
        task = self._durability.create_task(self._run_durable(link, turn))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not (self._peer.connection.closed and self._goes_on(turn.session)):
                task.cancel()
            raise

    async def _run_durable(self, link: DurableLink, turn: Turn) -> v1.PromptResponse:
        try:
            await link.begin_turn(turn)
        except BaseException:
            turn.session.fire(Event.ABORTED, turn)
            raise
        try:
            response = await self._run_turn(turn)
        except asyncio.CancelledError:
            if self._peer.connection.closed or link.outlives:
                link.abandon_turn(turn)
            else:
                await link.end_turn(turn, failure=RequestCancelled())
            raise
        except Exception as error:
            await link.end_turn(turn, failure=error)
            raise
        except BaseException:
            link.abandon_turn(turn)
            raise
        await link.end_turn(turn, stop_reason=response.stop_reason)
        return response

    def _cancel_received(
        self, params: v1_unstable.CancelNotification, context: AgentContext
    ) -> None:
        session = self._peer.sessions.get(params.session_id)
        link = None if session is None else session.durable
        if link is not None and link.role != "controller":
            return
        if session is not None and session.turn is None:
            self._durability.cancel(params.session_id)
        super()._cancel_received(params, context)

    def _mode_route(self, route: RequestRoute) -> RequestRoute:
        served = super()._mode_route(route)
        invoke = served.invoke

        async def set_mode(params: v1_unstable.SetSessionModeRequest, context: AgentContext) -> Any:
            link = context.session().durable
            if link is not None:
                link.change_begins()
            response = await invoke(params, context)
            if link is not None:
                link.note(v1.CurrentModeUpdate(current_mode_id=params.mode_id))
                await link.settled()
            return response

        return RequestRoute(served.decode, set_mode, served.encode)

    def _option_route(self, route: RequestRoute) -> RequestRoute:
        invoke = route.invoke

        async def set_option(params: Any, context: AgentContext) -> Any:
            link = context.session().durable
            if link is not None:
                link.change_begins()
            response = await invoke(params, context)
            options = getattr(response, "config_options", None)
            if link is not None and options is not None:
                link.note(v1.ConfigOptionUpdate(config_options=options))
                await link.settled()
            return response

        return super()._option_route(RequestRoute(route.decode, set_option, route.encode))

    # -------------------------------------------------------------- attaching

    def _load_from_journal(self, plain: RequestRoute) -> RequestRoute:
        """`session/load`: with a rider an attach; without, the agent's own handler or the journal's."""
        own = self._loads_itself

        def decode_load(raw: Any) -> Any:
            try:
                return plain.decode(raw)
            except ValueError:
                # The extension's own parameters need no list of servers.
                params = decode_attach(raw)
                if not read_rider(params.meta).present:
                    raise
                return params

        def accept(params: Any, context: AgentContext) -> Any:
            if own and not read_rider(_builtins(params.meta)).present:
                assert plain.accept is not None
                accepted = plain.accept(params, context)
                accepted[1].durable.replaying = True
                return accepted
            return self._accept_attach(params, context)

        def withdraw(accepted: Any) -> None:
            if isinstance(accepted, _Attach):
                self._withdraw_attach(accepted)
            elif plain.withdraw is not None:
                accepted[1].durable.replaying = False
                plain.withdraw(accepted)

        async def load(accepted: Any, context: AgentContext) -> Any:
            if isinstance(accepted, _Attach):
                return await self._attach(accepted, context)
            link = accepted[1].durable
            try:
                return await plain.invoke(accepted, context)
            finally:
                link.replaying = False
                if not self._peer.connection.closed and accepted[1].states.state is not State.GONE:
                    await link.open()

        return RequestRoute(decode_load, load, _as_it_is, accept, withdraw)

    def _accept_attach(self, params: Any, context: AgentContext) -> _Attach:
        """In the reader: what follows in the stream finds the session being loaded."""
        peer = self._peer
        rider = read_rider(_builtins(params.meta))
        if not rider.present and context.method == "session/load":
            self._check_setup(params)
        known = peer.sessions.get(params.session_id)
        session = known or peer.open_session(params.session_id, params.cwd, ())
        # With a rider a connection may attach to what it prompts itself, at any time.
        loading = known is None or (not rider.present and context.method == "session/load")
        if loading:
            session.fire(Event.LOAD)
        if session.durable is not None:
            session.durable.touched = True
            session.durable.coming += 1
        return _Attach(params, rider, session, known=known is not None, loading=loading)

    def _withdraw_attach(self, accepted: _Attach) -> None:
        session, link = accepted.session, accepted.session.durable
        if link is not None and not link.closed:
            link.coming -= 1
            if link.asked and not link.coming:  # nor does another attach that is under way
                self._peer.forget_session(session)
        if accepted.loading:
            session.fire(Event.LOADED)

    async def _attach(self, accepted: _Attach, context: AgentContext) -> Any:
        """Attach a connection to a session: history, the answer, and then what happens."""
        session, rider, params = accepted.session, accepted.rider, accepted.params
        standard = not rider.present and context.method == "session/load"
        if session.durable is not None:
            session.durable.restoring()
        try:
            grant = await self._admitted(session.session_id, rider)
            info = await self._durability.journal.info(session.session_id)
            if standard:
                self._check_known(session.session_id, params, info)
            restored = await self._restore(session, info)
            more = params.additional_directories if standard else UNSET
            if standard and not isinstance(more, UnsetType):
                session.additional_directories = tuple(more or ())
            await self._subscribe(accepted, context, grant, restored, standard=standard)
        except BaseException as error:
            session.cwd, session.additional_directories = accepted.cwd, accepted.more
            gone = self._is_gone(session)
            self._withdraw_attach(accepted)
            if gone and isinstance(error, JournalError):
                raise _not_found(session.session_id) from error
            raise
        return b"{}"  # not sent: the answer stands in front of what is live

    def _is_gone(self, session: AgentSession) -> bool:
        """Whether it is being deleted, or was closed here: then its journal fails whom it likes."""
        link, state = session.durable, session.states.state
        closing = state in (State.CLOSING, State.ENDING) or link is None or link.closed
        return closing or session.session_id in self._durability.deleting

    async def _admitted(self, session_id: str, rider: Rider) -> tuple[Grant, AttachContext]:
        """Go through the funnel; raises the one refusal."""
        peer = self._peer
        context = self._durability.context(
            session_id, peer.transport, capability=rider.capability, from_offset=rider.from_offset
        )
        verdict = await self._durability.admit(context)
        surface = str(context.surface)
        if isinstance(verdict, Denied):
            peer.connection.emit(
                "attach.denied",
                session=session_id,
                surface=surface,
                reason=verdict.reason,
                detail=verdict.detail,
            )
            raise attach_denied()
        peer.connection.emit(
            "attach.granted", session=session_id, surface=surface, via=str(verdict.via)
        )
        return verdict, context

    def _check_known(self, session_id: str, params: Any, info: SessionInfo | None) -> None:
        """Raise for a session that is not there (R1-55), or is elsewhere (R1-57)."""
        if info is None:
            raise _not_found(session_id)
        cwd = info.meta.get("cwd")
        if isinstance(cwd, str) and _trimmed(cwd) != _trimmed(params.cwd):
            raise InvalidParams({"reason": "cwd_mismatch", "sessionId": session_id, "cwd": cwd})

    async def _restore(
        self, session: AgentSession, info: SessionInfo | None
    ) -> tuple[v1.SessionModeState | None, list[Any] | None]:
        """What the journal says of a session's folder, mode and options."""
        if info is not None:
            cwd = info.meta.get("cwd")
            if isinstance(cwd, str):
                session.cwd = cwd
            session.additional_directories = tuple(_directories(info))
        modes, options = self._agent.initial_modes(), self._agent.initial_config_options() or None
        if info is None:
            return modes, options
        log_ = await self._durability.journal.open(session.session_id)
        try:
            last = await log_.latest(("current_mode_update", "config_option_update"))
        finally:
            await log_.aclose()
        mode = last.get("current_mode_update")
        if modes is not None and mode is not None:
            mode_id = mode.data.get("currentModeId")
            if any(known.id == mode_id for known in modes.available_modes):
                modes.current_mode_id = str(mode_id)
        option = last.get("config_option_update")
        if options is not None and option is not None:
            try:
                options = decode(v1_unstable.ConfigOptionUpdate, option.payload).config_options
            except msgspec.DecodeError:
                log.warning("the options of session %r in its journal are none", session.session_id)
        return modes, options

    async def _source(
        self, session: AgentSession, log_: SessionLog, rider: Rider
    ) -> Writer | Follower | None:
        """Whom to subscribe to: our own writer, what another process appends, or nobody."""
        link, writers = session.durable, self._durability.writers
        assert link is not None
        if rider.history == "none":
            return None
        there = writers.get(session.session_id) is not None
        if not there and not await log_.high_watermark():
            return None
        try:
            writer = await link.open()
            _check_open(link)
            if not there and not await log_.high_watermark():
                return None  # it was deleted meanwhile, and is not to begin anew
            if writer is not None:
                await writer.ready()
        except JournalInUse:
            return Follower(self._durability.journal, session.session_id)
        except JournalError:
            return None  # a journal that can only be read
        return writer

    async def _subscribe(
        self,
        accepted: _Attach,
        context: AgentContext,
        granted: tuple[Grant, AttachContext],
        restored: tuple[v1.SessionModeState | None, list[Any] | None],
        *,
        standard: bool,
    ) -> None:
        link, call = accepted.session.durable, context.call
        assert link is not None
        assert call is not None

        def answer(subscriber: Subscriber, mark: int) -> None:
            self._answer(accepted, subscriber, call, mark, restored, granted, standard=standard)

        await self._attach_link(link, accepted.rider, granted[0], answer, standard=standard)

    async def _attach_link(
        self,
        link: DurableLink,
        rider: Rider,
        grant: Grant,
        reply: Callable[[Subscriber, int], None],
        *,
        standard: bool,
    ) -> None:
        """Have an attach take the place of the one that a connection has of a session."""
        log_ = await self._durability.journal.open(link.session_id)
        try:
            source = await self._source(link.session, log_, rider)
            subscriber = self._subscriber(
                link,
                log_,
                source,
                rider,
                grant,
                standard=standard,
                reply=lambda mark: reply(subscriber, mark),
            )
            if rider.history != "none":
                await _check_ahead(log_, rider)
                _check_open(link)
                link.detach()
                link.attached = subscriber
                link.attached_in_turn()
            try:
                await subscriber.attach()
            finally:
                if link.attached is subscriber and not subscriber.live:
                    link.attach_failed()
        except BaseException:
            await log_.aclose()
            raise

    def _subscriber(
        self,
        link: DurableLink,
        log_: SessionLog,
        source: Writer | Follower | None,
        rider: Rider,
        grant: Grant,
        *,
        standard: bool,
        reply: Callable[[int], None],
    ) -> Subscriber:
        connection = self._peer.connection
        replay = [True]

        def answer(mark: int) -> None:
            replay[0] = False
            reply(mark)

        def project(record: Record) -> bytes | None:
            return self._shown(record, replayed=replay[0])

        def ended(subscriber: Subscriber, _reason: str) -> None:
            link.attach_ended(subscriber)
            # Also when the connection is gone: nothing else closes it.
            self._durability.create_task(log_.aclose())

        return Subscriber(
            log_,
            source,
            rider,
            aware=not standard,
            send=connection.send,
            # The link itself: one that takes everything is never behind, however much a turn tells. What is
            # closing waits for nothing more.
            writable=lambda: not connection.writer.paused or connection.lost is not None,
            drain=connection.drain,
            reply=answer,
            project=project if standard else None,
            skip=link.is_own_prompt if standard else None,
            expires_at=grant.expires_at,
            clock=self._durability.clock,
            on_end=ended,
        )

    def _answer(
        self,
        accepted: _Attach,
        subscriber: Subscriber | None,
        call: InboundCall,
        mark: int,
        restored: tuple[v1.SessionModeState | None, list[Any] | None],
        granted: tuple[Grant, AttachContext],
        *,
        standard: bool,
    ) -> None:
        """Answer the load, in front of everything live."""
        session, (modes, options) = accepted.session, restored
        link, asked = session.durable, accepted.rider
        if link is not None:
            _check_open(link)
            link.coming -= 1
            modes, options = link.restored(modes, options)
            if asked.history != "none" or not accepted.known:
                link.allow(self._durability.role_of(*granted), granted[0].expires_at)
            if link.attached is subscriber:
                replays = asked.history == "from_offset"
                link.attach_answered(asked.from_offset - 1 if replays else mark, mark)
        rider = {KEY: {"highWatermark": mark}}
        if options is not None:
            options = self._peer.allowed_options(options)
        if not accepted.known or standard:
            session.modes = None if modes is None else msgspec.structs.replace(modes)
            session.config_options = options
        if accepted.loading:
            session.fire(Event.LOADED)
        response: Any = {"_meta": rider}
        if standard:
            response = v1_unstable.LoadSessionResponse(
                modes=UNSET if modes is None else modes,
                config_options=UNSET if options is None else options,
                meta=rider,
            )
        self._peer.connection.answer(call, encode_checked(response), stop=False)

    def _shown(self, record: Record, *, replayed: bool) -> bytes | None:
        """An update as a client without the extension may see it (R1-35..R1-39, R1-53)."""
        tag = record.tag
        if replayed and tag == "notice":
            return None
        gate = gate_of_update(tag)
        if gate is not None and not allowed_by(self._peer.tree, gate):
            return None
        if tag == "config_option_update":
            try:
                update = decode(v1_unstable.ConfigOptionUpdate, record.payload)
            except msgspec.DecodeError:
                return record.payload
            allowed = self._peer.allowed_options(update.config_options)
            if len(allowed) != len(update.config_options):
                return encode_checked(msgspec.structs.replace(update, config_options=allowed))
        return record.payload

    def _detached(self, params: DetachParams, _: AgentContext) -> None:
        session = self._peer.sessions.get(params.session_id)
        if session is not None and session.durable is not None:
            session.durable.detach()

    # -------------------------------------------------------------- from the journal

    async def _never(self, params: Any, context: Any) -> Any:
        """Stands for `load_session`, which `_load_from_journal` serves before it comes to that."""
        raise AssertionError(params, context)

    async def _resume(self, params: Any, context: AgentContext) -> v1.ResumeSessionResponse:
        """`session/resume`: open again, without a replay (R1-54); what happens from now on is seen."""
        session = context.session()
        link = session.durable
        assert link is not None
        link.restoring()
        granted = await self._admitted(session.session_id, Rider())
        info = await self._durability.journal.info(session.session_id)
        self._check_known(session.session_id, params, info)
        modes, options = await self._restore(session, info)

        def answered(_: Subscriber, mark: int) -> None:
            _check_open(link)
            link.attach_answered(mark, mark)

        try:
            await self._attach_link(link, Rider(history="tip"), granted[0], answered, standard=True)
        except JournalError as error:
            if self._is_gone(session):
                raise _not_found(session.session_id) from error
            raise
        link.allow(self._durability.role_of(*granted), granted[0].expires_at)
        modes, options = link.restored(modes, options)
        return v1_unstable.ResumeSessionResponse(
            modes=UNSET if modes is None else modes,
            config_options=UNSET if options is None else options,
        )

    async def _list(
        self, params: v1_unstable.ListSessionsRequest, context: AgentContext
    ) -> v1.ListSessionsResponse:
        """`session/list`, the sessions that changed last first; a page at a time."""
        await self._admitted("", Rider())
        # Sorted here: sessions that changed at once have no order of their own, and a cursor needs one.
        found = await self._durability.journal.sessions()
        # A client opens a session before anybody has typed a word: what holds none is not shown.
        sessions = sorted((each for each in found if each.records > 1), key=_place)
        if isinstance(params.cwd, str):
            cwd = _trimmed(params.cwd)
            sessions = [each for each in sessions if _trimmed(str(each.meta.get("cwd"))) == cwd]
        after = _position(params.cursor)
        if after is not None:
            sessions = [each for each in sessions if _place(each) > after]
        page = sessions[:_LISTED]
        more = len(sessions) > _LISTED
        return v1.ListSessionsResponse(
            sessions=[_shown_info(each) for each in page],
            next_cursor=_cursor(page[-1]) if more else UNSET,
        )

    async def _delete(self, params: Any, context: AgentContext) -> v1.DeleteSessionResponse:
        """`session/delete`: the whole session, here and in the journal."""
        session_id = params.session_id
        granted = await self._admitted(session_id, Rider())
        durability = self._durability
        if durability.role_of(*granted) != "controller":
            raise _observer(session_id)
        if durability.in_turn(session_id, but=self._peer):
            raise InvalidRequest({"sessionId": session_id}, "prompt already in flight")
        try:
            deleted = await durability.delete(session_id, but=self._peer)
        except JournalInUse:
            reason = {"sessionId": session_id, "reason": "session_in_use"}
            raise InvalidRequest(reason, "the session is in use by another process") from None
        if not deleted and session_id not in self._peer.sessions:
            raise _not_found(session_id)
        return v1.DeleteSessionResponse()

    # -------------------------------------------------------------- steering

    async def _steer(self, params: SteerParams, context: AgentContext) -> Any:
        self._peer.session_of(params.session_id)
        self._check_control(params.session_id)
        take = self._agent.steer if self._agent.steers else None
        return await self._durability.steer(params.session_id, params, take)


def _observer(session_id: str) -> InvalidRequest:
    return InvalidRequest({"sessionId": session_id, "role": "observer"}, "an observer looks on")


def decode_attach(raw: Any) -> AttachParams:
    """The parameters of an attach. Raises `msgspec.DecodeError`."""
    return decode(AttachParams, b"null" if raw is None else raw)


def _check_open(link: DurableLink) -> None:
    """Raise for a session that was closed or deleted, or whose connection is gone, meanwhile."""
    if link.leave_if_closed():
        raise _not_found(link.session_id)


def _not_found(session_id: str) -> ResourceNotFound:
    return ResourceNotFound({"sessionId": session_id}, "Session not found")


async def _check_ahead(log_: SessionLog, rider: Rider) -> None:
    """Refuse a client that is ahead before anything is changed: what its connection has stays."""
    mark = await log_.high_watermark()
    if mark and rider.from_offset > mark + 1:
        raise InvalidParams({"highWatermark": mark}, "invalid params")


def _as_it_is(body: bytes) -> bytes:
    return body


def _builtins(meta: Any) -> Any:
    return None if isinstance(meta, UnsetType) else meta


def _with_extension(meta: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """A `_meta` with what is said of the extension; what an author says there as well stays."""
    merged: dict[str, Any] = dict(cast("Mapping[str, Any]", meta)) if meta else {}
    said: Any = merged.get(KEY)
    merged[KEY] = {**facts, **said} if isinstance(said, Mapping) else facts
    return merged


def _directories(info: SessionInfo) -> list[str]:
    more: Any = info.meta.get("additionalDirectories")
    if not isinstance(more, list):
        return []
    return [path for path in cast("list[object]", more) if isinstance(path, str)]


def _trimmed(path: str) -> str:
    return path.rstrip("/") or "/"


def _place(info: SessionInfo) -> tuple[int, str]:
    """Where a session stands in the list."""
    return -info.updated, info.session_id


def _cursor(info: SessionInfo) -> str:
    return base64.urlsafe_b64encode(encode_checked([info.updated, info.session_id])).decode()


def _position(cursor: Any) -> tuple[int, str] | None:
    if not isinstance(cursor, str):
        return None
    try:
        updated, session_id = decode(tuple[int, str], base64.urlsafe_b64decode(cursor))
    except (ValueError, binascii.Error):
        raise InvalidParams({"reason": "unknown cursor"}) from None
    return -updated, session_id


def _shown_info(info: SessionInfo) -> v1.SessionInfo:
    cwd = info.meta.get("cwd")
    return v1.SessionInfo(
        session_id=info.session_id,
        cwd=cwd if isinstance(cwd, str) else "/",
        additional_directories=_directories(info) or UNSET,
        title=UNSET if info.title is None else info.title,
        updated_at=_moment(info.updated),
    )


def _moment(ts: int) -> str | UnsetType:
    """A time for `session/list`; journals that others fill may hold what is none."""
    try:
        moment = dt.datetime.fromtimestamp(ts / 1000, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return UNSET
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
