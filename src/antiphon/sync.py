"""The client side without `async`: for scripts, notebooks and prompts.

::

    import antiphon.sync

    with antiphon.sync.spawn(["my-agent", "--acp"]) as agent:
        session = agent.new_session(cwd=".")
        with session.prompt("hello") as turn:
            for update in turn:
                print(update.text, end="")
        print(turn.stop_reason)

Responsible for the shape alone: every call goes to the same `Session` and `AgentPeer` that `antiphon.spawn`
gives, on an event loop in a background thread (`_background`). So it works inside a running loop
too (Jupyter's), errors are the same exceptions, and any thread may call, several at a time.

What runs where:

* A plain function given as `permissions`, to `antiphon.services.Permissions` as its `ask`, or to
  `antiphon.services.Elicitation` as a hook, is called in a thread that waits for the agent (in `run`,
  in the `for` loop, in any call): it may ask with `input()` and take its time. While nobody waits, the
  agent waits for its answer.
* All else that is called back (async handlers of the `Client`, services, `on_update`, `stderr`,
  `record`, `telemetry`) runs on the background thread: it must not block, and cannot call what is in
  this module.

Ctrl-C ends the call that is waited for: a request is cancelled; an open turn gets `session/cancel`, and
its end is waited for, at most `Limits.cancel_backstop` seconds. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast, overload

from antiphon import _connect
from antiphon._background import Resident
from antiphon._client import Client
from antiphon._errors import ConnectionClosed
from antiphon.schema import UNSET, UnsetType
from antiphon.sessions import Update

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from antiphon import sessions
    from antiphon._client import Deciding, Decision
    from antiphon.core import Limits
    from antiphon.schema import v1, v1_unstable
    from antiphon.sessions import (
        Capability,
        Extensions,
        History,
        Observer,
        PromptOutcome,
        Reattach,
        SessionRecord,
        SessionView,
    )
    from antiphon.transports import Environment, Transport

    Prompt: TypeAlias = str | v1.ContentBlock | Sequence[str | v1.ContentBlock]

__all__ = ["AgentPeer", "Process", "PromptTurn", "Session", "Updates", "connect", "spawn"]


def spawn(
    argv: Sequence[str],
    *,
    client: Client | None = None,
    permissions: Deciding | None = None,
    cwd: str | os.PathLike[str] | None = None,
    env: Environment = None,
    stderr: _connect.Stderr = None,
    unstable: bool = False,
    limits: Limits | None = None,
    record: _connect.Record | None = None,
    telemetry: _connect.Telemetry | None = None,
    authenticate: str | None = None,
    reattach: Reattach | bool = False,
) -> AgentPeer:
    """Start an agent as a child process, connect to it, and wait until it is ready.

    Use it in `with`, or `close()` it. One that is forgotten is closed when it is garbage collected,
    or, within 5 s, at the interpreter's exit.

    Args:
        argv: the command, one argument each; no shell is involved.
        client: what is lent to the agent and how it is answered; by default nothing, and no.
        permissions: how permission requests are decided, instead of as `client` says. May be a
            plain function of (params, ctx); `antiphon.services.Permissions` also guards what
            `client` lends.
        cwd: directory of the process; by default ours.
        env: what it sees of our environment, as for `antiphon.spawn`; by default all of it.
        stderr: called with each line it writes to its standard error; or a path, or "inherit".
        unstable: also offer and call unstable methods.
        limits: what the connection may cost, and how long things may take.
        record: a file to append every frame to, as NDJSON, or a function of (direction, frame).
        telemetry: called with each `TelemetryEvent` on the background thread; it must not block.
        authenticate: id of an agent-side auth method to call right after the handshake.
        reattach: when the link is lost, start the agent again and go on with the sessions, as for
            `antiphon.spawn`.

    Raises:
        StartError: the command could not be started, ended, or did not answer `initialize` in time.
        VersionMismatch: it speaks no version that we do.
        RequestError: it refused `initialize` or `authenticate`.
        TypeError: `permissions` for a client that overrides `request_permission`.
    """
    return _open(
        partial(
            _connect.spawn,
            argv,
            cwd=cwd,
            env=env,
            stderr=stderr,
            unstable=unstable,
            limits=limits,
            record=record,
            telemetry=telemetry,
            authenticate=authenticate,
            reattach=reattach,
        ),
        client,
        permissions,
    )


def connect(
    transport: Transport | str | Callable[[], Transport],
    *,
    client: Client | None = None,
    permissions: Deciding | None = None,
    unstable: bool = False,
    limits: Limits | None = None,
    record: _connect.Record | None = None,
    telemetry: _connect.Telemetry | None = None,
    authenticate: str | None = None,
    reattach: Reattach | bool = False,
) -> AgentPeer:
    """Connect to an agent that listens at an address, or over any `antiphon.transports.Transport`.

    A transport, or what a function makes as one, is started, used and closed on the background thread.
    Arguments and errors as for `spawn` and `antiphon.connect`.
    """
    return _open(
        partial(
            _connect.connect,
            transport,
            unstable=unstable,
            limits=limits,
            record=record,
            telemetry=telemetry,
            authenticate=authenticate,
            reattach=reattach,
        ),
        client,
        permissions,
    )


class AgentPeer:
    """An agent, connected and initialized. Made by `spawn` and `connect`.

    Every method waits for the agent's answer and raises `RequestError` for an error answer,
    `RequestTimeout`, `ConnectionClosed`, and `CapabilityError` without sending anything where the
    agent did not advertise what the call needs. `timeout` is in seconds; None waits for ever, and
    UNSET means `Limits.request_timeout`.
    """

    def __init__(self, resident: Resident[sessions.AgentPeer], peer: sessions.AgentPeer) -> None:
        """Not for callers: use `spawn` or `connect`."""
        self._resident = resident
        self._peer = peer
        # At the interpreter's exit `_background` does more: it waits.
        weakref.finalize(self, resident.stop).atexit = False

    def __repr__(self) -> str:
        state = "closed" if self._resident.ended else "lost" if self.closed else "open"
        return f"<antiphon.sync.AgentPeer on {self._peer.transport.describe()}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the link and end the process that was started for it, with its whole group.

        Idempotent, bounded as `antiphon.spawn` says, and safe while other threads wait for the agent:
        their calls fail with `ConnectionClosed`. An interrupt ends the wait; closing goes on.
        """
        self._resident.close()

    # -------------------------------------------------------------- what is known

    @property
    def closed(self) -> bool:
        """Whether the link is gone, whoever ended it."""
        return self._peer.connection.closed

    @property
    def initialize_result(self) -> v1_unstable.InitializeResponse:
        """The agent's answer to `initialize`."""
        return self._peer.initialize_result

    @property
    def capabilities(self) -> v1_unstable.AgentCapabilities:
        """What the agent advertised; what it left out reads as unsupported."""
        return self._peer.capabilities

    @property
    def info(self) -> v1.Implementation | None:
        """Name and version of the agent, if it said."""
        return self._peer.info

    @property
    def auth_methods(self) -> Sequence[v1_unstable.AuthMethod]:
        """How the agent lets users sign in."""
        return self._peer.auth_methods

    @property
    def process(self) -> Process | None:
        """The agent's process if it is one of ours."""
        return None if self._peer.process is None else Process(self._resident, self._peer.process)

    def offers(self, path: str) -> bool:
        """Whether the agent advertised a capability, e.g. "sessionCapabilities.list"."""
        return self._peer.offers(path)

    # -------------------------------------------------------------- sessions

    def new_session(
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
            timeout: seconds.
        """
        session = self._resident.call(
            self._peer.new_session(
                cwd=cwd,
                mcp_servers=mcp_servers,
                additional_directories=additional_directories,
                meta=meta,
                timeout=timeout,
            )
        )
        return Session(self, self._resident, session)

    def load_session(
        self,
        session_id: str,
        *,
        cwd: str | Path = ".",
        mcp_servers: Sequence[v1_unstable.McpServer] = (),
        additional_directories: Sequence[str | Path] = (),
        timeout: float | None | UnsetType = UNSET,
    ) -> Session:
        """`session/load`: the agent replays the conversation, then answers.

        The history waits for the first who asks for it: `for update in session.replay()`. It counts
        towards `Limits.queue_bytes` until then. Arguments as for `new_session`.
        """
        opening = partial(
            self._peer.load_session,
            session_id,
            cwd=cwd,
            mcp_servers=mcp_servers,
            additional_directories=additional_directories,
            timeout=timeout,
        )
        return Session(self, self._resident, self._resident.call(_opened(opening)))

    def resume_session(
        self,
        session_id: str,
        *,
        cwd: str | Path = ".",
        mcp_servers: Sequence[v1_unstable.McpServer] = (),
        additional_directories: Sequence[str | Path] = (),
        timeout: float | None | UnsetType = UNSET,
    ) -> Session:
        """`session/resume`: go on with a session without replay. Arguments as for `new_session`."""
        opening = partial(
            self._peer.resume_session,
            session_id,
            cwd=cwd,
            mcp_servers=mcp_servers,
            additional_directories=additional_directories,
            timeout=timeout,
        )
        return Session(self, self._resident, self._resident.call(_opened(opening)))

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
    ) -> Session:
        """Attach to a session that is not known here; as `antiphon.AgentPeer.attach_session`.

        The history is in `session.replay()`, the rest in `session.updates()`. A `capability` that is a
        function is called on the background thread.
        """
        opening = partial(
            self._peer.attach_session,
            session_id,
            cwd=cwd,
            additional_directories=additional_directories,
            from_offset=from_offset,
            history=history,
            capability=capability,
            timeout=timeout,
        )
        return Session(self, self._resident, self._resident.call(_opened(opening)))

    def adopt_session(
        self, session_id: str, *, cwd: str | Path, additional_directories: Sequence[str | Path] = ()
    ) -> Session:
        """A `Session` for an id that came another way, without asking the agent.

        For a raw `session/new`, an unstable `session/fork`, or a subagent's child session. Updates
        that arrived for it come first. Arguments as for `new_session`.

        Raises:
            LocalProtocolError: the session is known here.
            LimitExceeded: there are `Limits.sessions` already.
        """
        adopt = partial(
            self._peer.adopt_session,
            session_id,
            cwd=cwd,
            additional_directories=additional_directories,
        )
        session = self._resident.call(_on_loop(adopt), asking=False)
        return Session(self, self._resident, session)

    def list_sessions(
        self, *, cwd: str | Path | None = None, cursor: str | None = None
    ) -> v1_unstable.ListSessionsResponse:
        """`session/list`: one page; `next_cursor` of the answer asks for the next."""
        return self._resident.call(self._peer.list_sessions(cwd=cwd, cursor=cursor))

    def iter_sessions(self, *, cwd: str | Path | None = None) -> Iterator[v1_unstable.SessionInfo]:
        """All sessions the agent knows, page after page."""
        infos = self._peer.iter_sessions(cwd=cwd)
        while (info := self._resident.call(_next_of(infos))) is not None:
            yield info

    def close_session(self, session_id: str) -> None:
        """`session/close`: the agent cancels what runs and frees the session; its history stays."""
        self._resident.call(self._peer.close_session(session_id))

    def delete_session(self, session_id: str) -> None:
        """`session/delete`: the session disappears from the list."""
        self._resident.call(self._peer.delete_session(session_id))

    def authenticate(self, method_id: str) -> None:
        """`authenticate` with one of `auth_methods`.

        Raises:
            LocalProtocolError: a terminal method, which is carried out by running the agent's command
                in a terminal and is never sent.
        """
        self._resident.call(self._peer.authenticate(method_id))

    def logout(self) -> None:
        """`logout`: end the signed-in state; running sessions may fail with `AuthRequired`."""
        self._resident.call(self._peer.logout())

    # -------------------------------------------------------------- any method

    def request_extension(
        self, method: str, params: Any = None, *, timeout: float | None | UnsetType = UNSET
    ) -> Any:
        """Ask an extension method (its name starts with `_`); the result as plain JSON values."""
        return self._resident.call(self._peer.request_extension(method, params, timeout=timeout))

    def notify_extension(self, method: str, params: Any = None) -> None:
        """Send an extension notification (its name starts with `_`)."""
        self._resident.call(self._peer.notify_extension(method, params))

    @overload
    def request(
        self, params: v1_unstable.InitializeProxyRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.InitializeProxyResponse: ...

    @overload
    def request(
        self, params: v1.InitializeRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.InitializeResponse: ...

    @overload
    def request(
        self, params: v1.AuthenticateRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.AuthenticateResponse: ...

    @overload
    def request(
        self, params: v1_unstable.ListProvidersRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ListProvidersResponse: ...

    @overload
    def request(
        self, params: v1_unstable.SetProviderRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.SetProviderResponse: ...

    @overload
    def request(
        self, params: v1_unstable.DisableProviderRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.DisableProviderResponse: ...

    @overload
    def request(
        self, params: v1.LogoutRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.LogoutResponse: ...

    @overload
    def request(
        self, params: v1_unstable.AuthStatusRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.AuthStatusResponse: ...

    @overload
    def request(
        self, params: v1.NewSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.NewSessionResponse: ...

    @overload
    def request(
        self, params: v1.LoadSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.LoadSessionResponse: ...

    @overload
    def request(
        self, params: v1.ListSessionsRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ListSessionsResponse: ...

    @overload
    def request(
        self, params: v1.DeleteSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.DeleteSessionResponse: ...

    @overload
    def request(
        self, params: v1_unstable.ForkSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ForkSessionResponse: ...

    @overload
    def request(
        self, params: v1_unstable.ArchiveSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ArchiveSessionResponse: ...

    @overload
    def request(
        self,
        params: v1_unstable.UnarchiveSessionRequest,
        *,
        timeout: float | None | UnsetType = ...,
    ) -> v1_unstable.UnarchiveSessionResponse: ...

    @overload
    def request(
        self, params: v1_unstable.SessionStatusRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.SessionStatusResponse: ...

    @overload
    def request(
        self, params: v1_unstable.SetSessionTitleRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.SetSessionTitleResponse: ...

    @overload
    def request(
        self, params: v1.ResumeSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ResumeSessionResponse: ...

    @overload
    def request(
        self, params: v1.CloseSessionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.CloseSessionResponse: ...

    @overload
    def request(
        self, params: v1.SetSessionModeRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.SetSessionModeResponse: ...

    @overload
    def request(
        self, params: v1.SetSessionConfigOptionRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.SetSessionConfigOptionResponse: ...

    @overload
    def request(
        self, params: v1.PromptRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.PromptResponse: ...

    @overload
    def request(
        self, params: v1_unstable.ProxySuccessorRequest, *, timeout: float | None | UnsetType = ...
    ) -> v1_unstable.ProxySuccessorResponse: ...

    def request(self, params: Any, *, timeout: float | None | UnsetType = UNSET) -> Any:
        """Send any request of the protocol, e.g. `v1.ListSessionsRequest()`; its typed result.

        Raises:
            CapabilityError: the agent did not advertise it.
            LocalProtocolError: it is unstable, and `unstable=True` was not given.
        """
        peer: Any = self._peer
        return self._resident.call(peer.request(params, timeout=timeout))

    @overload
    def notify(self, params: v1.CancelNotification) -> None: ...

    @overload
    def notify(self, params: v1_unstable.MessageMcpNotification) -> None: ...

    @overload
    def notify(self, params: v1_unstable.ProxySuccessorNotification) -> None: ...

    @overload
    def notify(self, params: v1.CancelRequestNotification) -> None: ...

    def notify(self, params: Any) -> None:
        """Send any notification of the protocol."""
        peer: Any = self._peer
        self._resident.call(peer.notify(params))


class Process:
    """The process of an agent that was spawned, as long as it runs and after."""

    def __init__(self, resident: Resident[Any], process: Any) -> None:
        """Not for callers: see `AgentPeer.process`."""
        self._resident = resident
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return cast("int", self._process.pid)

    @property
    def exit_status(self) -> int | None:
        """None while it runs; else the exit status, or minus the signal that ended it."""
        return cast("int | None", self._process.exit_status)

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error so far, at most 64 KiB."""
        try:
            return self._resident.call(_tail(self._process), asking=False)
        except ConnectionClosed:
            return cast("str", self._process.stderr_tail)


class Session:
    """One session of an agent. Made by `AgentPeer.new_session` and its kin.

    Attributes:
        agent: whose it is.
    """

    def __init__(
        self, agent: AgentPeer, resident: Resident[Any], session: sessions.Session
    ) -> None:
        """Not for callers: use `AgentPeer.new_session`, `load_session` or `resume_session`."""
        self.agent = agent
        self._resident = resident
        self._session = session

    def __repr__(self) -> str:
        return f"<antiphon.sync.Session {self.session_id!r} in {self.cwd!r}>"

    @property
    def session_id(self) -> str:
        """Its id."""
        return self._session.session_id

    @property
    def cwd(self) -> str:
        """Its absolute working directory."""
        return self._session.cwd

    @property
    def additional_directories(self) -> tuple[str, ...]:
        """Further absolute roots, as sent."""
        return self._session.additional_directories

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories: what the agent may touch."""
        return self._session.roots

    @property
    def response(
        self,
    ) -> (
        v1_unstable.NewSessionResponse
        | v1_unstable.LoadSessionResponse
        | v1_unstable.ResumeSessionResponse
        | None
    ):
        """The answer to `session/new`, `session/load` or `session/resume`; None if it was adopted."""
        return self._session.response

    @property
    def modes(self) -> v1_unstable.SessionModeState | None:
        """The modes the agent offered when the session was opened, if any."""
        return self._session.modes

    @property
    def config_options(self) -> list[v1_unstable.SessionConfigOption] | None:
        """The configuration options as last answered by the agent, if it has any."""
        return self._session.config_options

    def prompt(
        self,
        content: Prompt,
        *,
        timeout: float | None = None,
        silence: float | None | UnsetType = UNSET,
        meta: dict[str, Any] | None = None,
    ) -> PromptTurn:
        """A prompt, not sent yet: `run()` it for the whole outcome, or iterate over it in `with`.

        Args:
            content: text, a content block, or several of either.
            timeout: seconds for the whole turn, None for no bound; then `RequestTimeout`.
            silence: seconds in which the agent may give no sign of life; then `SilenceTimeout`. UNSET:
                `Limits.silence_timeout`; None: no bound.
            meta: `_meta` of the request.
        """
        turn = self._session.prompt(content, timeout=timeout, silence=silence, meta=meta)
        return PromptTurn(self, self._resident, turn)

    def cancel(self, *, backstop: float | None | UnsetType = UNSET) -> None:
        """Send `session/cancel` if a turn is open; it ends soon, with "cancelled".

        While this session is attached, that may be another client's turn.
        For another thread than the one that waits for the turn; that one may use Ctrl-C, or leave
        the turn's block. Permission requests of the turn are answered cancelled. An agent that has
        not answered after `backstop` seconds (UNSET: one more than `Limits.cancel_backstop`, None: no
        bound) is given up, and the turn ends with `RequestTimeout`.
        """
        self._resident.call(self._session.cancel(backstop=backstop), asking=False)

    @property
    def view(self) -> SessionView:
        """What a user sees of this session now, kept up to date from the first access on.

        It is folded on the background thread, so copy a list or dictionary of it before a loop over
        it. The first access also takes what has arrived outside a turn and was taken by nobody: look
        at it right after `new_session` or `load_session`, to have everything.
        """
        view = self._session.inbox.view
        if view is not None:
            return view
        return self._resident.call(_on_loop(lambda: self._session.view), asking=False)

    def updates(self) -> Updates:
        """Every update of this session from here on, in order, turns included.

        The first subscriber also gets what arrived outside a turn and was seen by nobody. Ends when
        the connection is lost or the subscription is closed.
        """
        return Updates(self, self._resident, self._session.updates)

    def replay(self) -> Updates:
        """The history that `session/load` has sent."""
        return Updates(self, self._resident, self._session.replay)

    def on_update(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(update)` for each update, in order; returns a function that ends that.

        It is called on the background thread, and may be async. The next update waits for it, and so
        does the answer to every request about this session. What it raises is logged.
        """
        stop = self._resident.call(_on_loop(partial(self._session.on_update, observer)))

        def end() -> None:
            try:
                self._resident.call(_on_loop(stop), asking=False)
            except ConnectionClosed:
                return

        return end

    def set_mode(self, mode_id: str) -> None:
        """`session/set_mode`. Raises `RequestError` (-32602 for an unknown mode)."""
        self._resident.call(self._session.set_mode(mode_id))

    def set_config_option(
        self,
        config_id: str,
        value: str | bool,  # noqa: FBT001  (a value of the protocol, not a switch)
    ) -> list[v1_unstable.SessionConfigOption]:
        """`session/set_config_option`; returns the full list of options as they are now."""
        return self._resident.call(self._session.set_config_option(config_id, value))

    @property
    def offset(self) -> int:
        """The highest offset of its journal that is held here; 0 where none is."""
        return self._session.offset

    @property
    def attached(self) -> bool:
        """Whether the agent sends every record of the session as it becomes durable."""
        return self._session.attached

    def reattach(
        self,
        agent: AgentPeer | None = None,
        *,
        from_offset: int | None = None,
        history: History = "from_offset",
        capability: Capability = None,
        cwd: str | Path | None = None,
        timeout: float | None | UnsetType = UNSET,
    ) -> int:
        """Attach this session over `agent` (None: the one it has), and go on.

        As `antiphon.Session.reattach`; returns the journal's high watermark. What iterates over a turn
        in another thread waits on the old agent: begin to iterate again afterwards.
        """
        target = self.agent if agent is None else agent
        mark = target._resident.call(  # pyright: ignore[reportPrivateUsage]
            self._session.reattach(
                target._peer,  # pyright: ignore[reportPrivateUsage]
                from_offset=from_offset,
                history=history,
                capability=capability,
                cwd=cwd,
                timeout=timeout,
            )
        )
        self.agent, self._resident = target, target._resident  # pyright: ignore[reportPrivateUsage]
        return mark

    def detach(self) -> None:
        """`_raxol/session.detach`: the agent need not send what others do in this session any more."""
        self._resident.call(self._session.detach())

    def on_record(self, observer: Callable[[SessionRecord], object]) -> Callable[[], None]:
        """Call `observer(record)` for each record that is no update; returns a function that ends that.

        It is called on the background thread and must not block.
        """
        stop = self._resident.call(_on_loop(partial(self._session.on_record, observer)))

        def end() -> None:
            self._resident.post(stop)

        return end

    def close(self) -> None:
        """`session/close`: the agent cancels what runs and frees the session; its history stays."""
        self._resident.call(self._session.close())


class PromptTurn(Iterator[Update]):
    """A prompt and its turn: `run()` it, or iterate over it in `with`.

    The prompt is sent by `run` or on entering the block. Iteration gives every update of the turn in
    wire order and ends after the last one; then `response`, `stop_reason` and `usage` are set. An
    error answer, a timeout or a lost connection is raised by the iteration, after the updates that
    came before it. Leaving the block earlier, by whatever exception, sends `session/cancel` and waits
    for the answer, at most `Limits.cancel_backstop` seconds. One that is neither run nor entered is
    never sent, of which a `RuntimeWarning` tells.

    Attributes:
        session: whose turn it is.
    """

    def __init__(
        self, session: Session, resident: Resident[Any], turn: sessions.PromptTurn
    ) -> None:
        """Not for callers: use `Session.prompt`."""
        self.session = session
        self._resident = resident
        self._turn = turn
        # Between the loop and the caller: an interrupt in that moment loses nothing.
        self._taken: deque[Update] = deque()
        turn.unsent = "session.prompt(…) was neither run() nor entered"

    def run(self) -> PromptOutcome:
        """Send the prompt and wait for the end of its turn: updates, response, `text`, `stop_reason`.

        Raises:
            TurnInProgress: the session's turn is open; nothing was sent.
            CapabilityError: the agent does not take this content; nothing was sent.
            RequestError: the agent's answer is an error.
            RequestTimeout: the turn took longer than its `timeout`; it was cancelled.
            ConnectionClosed: the agent is gone.
        """
        self._turn.unsent = ""
        return self._resident.call(_whole(self._turn))

    def __enter__(self) -> Self:
        self._turn.unsent = ""
        try:
            self._resident.call(self._turn.__aenter__())
        except BaseException as error:
            if self._turn.session.turn is self._turn:
                # Interrupted at this moment: it was sent, and nobody else would end it.
                self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Nobody is asked any more: the turn's questions are answered cancelled.
        self._resident.call(self._turn.__aexit__(kind, error, trace), asking=False)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Update:
        if not self._taken and not self._resident.call(_take(self._turn, self._taken)):
            raise StopIteration
        return self._taken.popleft()

    @property
    def ended(self) -> bool:
        """Whether the answer is here (updates may still wait to be taken)."""
        return self._turn.ended

    @property
    def response(self) -> v1_unstable.PromptResponse | None:
        """The `PromptResponse`, None until the turn ended."""
        return self._turn.response

    @property
    def stop_reason(self) -> str | None:
        """Why the agent stopped, e.g. "end_turn"; None until the turn ended."""
        return self._turn.stop_reason

    @property
    def usage(self) -> v1_unstable.Usage | None:
        """Tokens of the turn where the agent reports them."""
        return self._turn.usage

    def cancel(self, *, backstop: float | None | UnsetType = UNSET) -> None:
        """Ask the agent to stop; go on iterating, the turn ends by itself. A no-op once it ended.

        An agent that has not answered after `backstop` seconds (UNSET: one more than
        `Limits.cancel_backstop`, None: no bound) is given up: the iteration raises `RequestTimeout`.
        """
        self._resident.call(self._turn.cancel(backstop=backstop), asking=False)


class Updates(Iterator[Update]):
    """An independent view of a session's updates; each `next` waits. Close it, or use it in `with`.

    What is not taken counts towards `Limits.queue_bytes`, and when that is spent the agent has to wait:
    close what you do not read. One that is garbage collected is closed.
    """

    def __init__(
        self,
        session: Session,
        resident: Resident[Any],
        subscribe: Callable[[], sessions.Subscription],
    ) -> None:
        """Not for callers: use `Session.updates` or `Session.replay`."""
        self._session = session  # which keeps the agent alive
        self._resident = resident
        self._subscription = resident.call(_on_loop(subscribe), asking=False)
        self._taken: deque[Update] = deque()
        weakref.finalize(self, resident.post, self._subscription.close).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Update:
        if not self._taken and not self._resident.call(_take(self._subscription, self._taken)):
            raise StopIteration
        return self._taken.popleft()

    def close(self) -> None:
        """Stop listening; what was not taken is let go. Idempotent."""
        self._resident.post(self._subscription.close)


# -------------------------------------------------------------------- inside

_T = TypeVar("_T")


def _open(
    connecting: Callable[..., _connect.Connecting],
    client: Client | None,
    permissions: Deciding | None,
) -> AgentPeer:
    client = Client() if client is None else client
    decide: Any = client.permissions
    if permissions is not None:
        if type(client).request_permission is not Client.request_permission:
            msg = f"{type(client).__name__} decides by itself: it overrides request_permission"
            raise TypeError(msg)
        decide = permissions
    ask: _Ask | None = None
    policy = getattr(decide, "guard", None) is not None
    if callable(decide) and not policy and not inspect.iscoroutinefunction(decide):
        decide = ask = _Ask(decide)
    lent = None
    asks = policy or client.elicitation is not None
    if asks or decide is not client.permissions:
        client = lent = _Lent(client, decide)
    resident = Resident(connecting(client=client))
    if ask is not None:
        ask.resident = resident
    if lent is not None and asks:
        lent.asking = resident.ask
    return AgentPeer(resident, resident.open())


class _Ask:
    """A plain function that decides, as an async one: called in a thread that waits."""

    def __init__(self, decide: Callable[[Any, Any], Any]) -> None:
        self._decide = decide
        self.resident: Resident[Any] | None = None

    async def __call__(self, params: Any, ctx: Any) -> Decision:
        assert self.resident is not None
        decision = await self.resident.ask(partial(self._decide, params, ctx))
        return await decision if inspect.isawaitable(decision) else decision


class _Lent(Client):
    """A client as it is, but for who decides."""

    def __init__(self, client: Client, decide: Any) -> None:
        # With the services, so that a policy guards them.
        super().__init__(files=client.files, terminals=client.terminals, permissions=decide)
        #: Calls a plain function in a thread that waits, for a policy that asks.
        self.asking: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
        self._client = client
        vars(self)["info"] = client.info  # declared for the class, and read from the instance

    def find_handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
        if (
            name == "request_permission"
            and type(self._client).request_permission is Client.request_permission
        ):
            return self._asking_here(self.request_permission)
        return self._asking_here(self._client.find_handler(name))

    def _asking_here(
        self, handler: Callable[[Any, Any], Awaitable[Any]] | None
    ) -> Callable[[Any, Any], Awaitable[Any]] | None:
        if handler is None or self.asking is None:
            return handler
        from antiphon.services._question import asking_thread

        async def asking(params: Any, ctx: Any) -> Any:
            token = asking_thread.set(self.asking)
            try:
                return await handler(params, ctx)
            finally:
                asking_thread.reset(token)

        return asking

    def extensions(self) -> Extensions:
        return self._client.extensions()

    def observers(self, peer: sessions.AgentPeer) -> Sequence[Observer]:
        return self._client.observers(peer)

    def advertised(self, *, unstable: bool) -> v1_unstable.ClientCapabilities:
        return self._client.advertised(unstable=unstable)

    async def sessions_closed(self, session_ids: Sequence[str]) -> None:
        await self._client.sessions_closed(session_ids)
        if self.permissions is not self._client.permissions:
            await Client(permissions=cast("Any", self.permissions)).sessions_closed(session_ids)


async def _opened(opening: Callable[[], sessions.SessionOpening]) -> sessions.Session:
    return await opening()


async def _whole(turn: sessions.PromptTurn) -> PromptOutcome:
    return await turn


#: Updates that are carried to the caller at once; that many may be out of `Limits.queue_bytes`.
_BATCH = 256


async def _take(updates: sessions.PromptTurn | sessions.Subscription, taken: deque[Update]) -> bool:
    """Take one update and those that are here already, or tell that there will be none.

    Waking another thread costs fifty times what an update costs.
    """
    try:
        taken.append(await anext(updates))
    except StopAsyncIteration:
        return False
    while len(taken) < _BATCH and (update := _next_nowait(updates)) is not None:
        taken.append(update)
    return True


def _next_nowait(updates: sessions.PromptTurn | sessions.Subscription) -> Update | None:
    """The next update if it is here; None where one would have to wait, or it has ended."""
    step = updates.__anext__()
    try:
        step.send(None)
    except StopIteration as found:
        return cast("Update", found.value)
    except Exception:  # noqa: BLE001  (its end or its error: both come again, after what was taken)
        return None
    step.close()  # as if it had been cancelled while it waits
    return None


async def _next_of(values: AsyncIterator[_T]) -> _T | None:
    return await anext(values, None)


async def _on_loop(act: Callable[[], _T]) -> _T:
    return act()


async def _tail(process: Any) -> str:
    return cast("str", process.stderr_tail)
