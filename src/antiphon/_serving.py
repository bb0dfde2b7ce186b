"""Agents that many clients connect to: `serve_unix` and `serve_tcp`.

Responsible for who may connect, for one `serve` for each who does, and for an end within a bound in which
running work is still answered. Leaves opening and accepting to `transports`, a single connection to
`serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from antiphon._agent import Agent
from antiphon._connect import is_left_to_the_command, run_program, serve
from antiphon._errors import ENDING, LocalProtocolError
from antiphon.core import Limits
from antiphon.transports import SocketTransport, TcpAddress, UnixAddress
from antiphon.transports._listener import Listener, check_reach, listen_tcp, listen_unix

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Generator
    from types import TracebackType

    from antiphon._connect import Record, Telemetry
    from antiphon.journal import Journal
    from antiphon.sessions import Durability
    from antiphon.transports._listener import Listening

__all__ = ["AgentServer", "serve_tcp", "serve_unix"]

log = logging.getLogger("antiphon.server")

Served: TypeAlias = "Agent | Callable[[], Agent]"

#: At a time; what one costs beside memory is two descriptors, three on uvloop.
MAX_CONNECTIONS = 128
#: What a transport needs to close, beside the graces of `Limits.close_grace`.
_TRANSPORT_GRACE = 3.0
#: What a client is told that is one too many, before the link is closed.
_BUSY = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"Too many connections"}}\n'


class AgentServer:
    """An agent that listens at an address. Made by `serve_unix` and `serve_tcp`.

    It listens from `async with`, `await` or `serve_forever` on, whichever comes first. Leaving the block
    closes it, as `aclose` does.
    """

    def __init__(
        self,
        agent: Served,
        address: UnixAddress | TcpAddress,
        listen: Callable[[], Awaitable[Listening]],
        *,
        users: Collection[int] | None,
        max_connections: int,
        limits: Limits | None,
        record: Record | None,
        on_listening: Callable[[str], object] | None,
        options: dict[str, Any],
    ) -> None:
        """Not for callers: use `serve_unix` or `serve_tcp`."""
        if not isinstance(agent, Agent) and not callable(agent):
            msg = f"an Agent is served, or a function that makes one, not {agent!r}"
            raise TypeError(msg)
        if max_connections < 1:
            msg = f"max_connections is at least 1, not {max_connections}"
            raise ValueError(msg)
        self._agent = agent
        self._address = address
        self._listen = listen
        self._users = users
        self._most = max_connections
        self._limits = limits or Limits()
        self._record = record
        self._on_listening = on_listening
        self._options = options
        self._count = 0
        self._clients: dict[SocketTransport, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        self._listening: Listening | None = None
        self._listener: Listener | None = None
        self._closing: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None
        self._hurried = False
        self._ended = asyncio.Event()
        self._full = False

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address}, {len(self._clients)} connections>"

    async def serve_forever(self) -> None:
        """Listen, if it does not yet, until `aclose` is called. Cancelling it closes."""
        await self._start()
        try:
            await self._ended.wait()
        finally:
            await self.aclose()

    def run(self, *, uvloop: bool = False) -> None:
        """`serve_forever` as a whole programme: closes and returns on SIGTERM or Ctrl-C.

        A handler, task or worker thread that does not end then is left behind after a few seconds. A
        journal is closed at the end, and turns that outlived their connections are ended before. Returns
        at once in a module that `antiphon run` imports: it is the command that serves then.

        Args:
            uvloop: run on uvloop.

        Raises:
            OSError: it cannot listen.
            MissingExtra: uvloop was asked for and is not installed.
        """
        agent = self._agent if isinstance(self._agent, Agent) else None
        if is_left_to_the_command(agent):
            return

        async def main(_: Durability | None) -> None:
            await self.serve_forever()

        run_program(main, agent, self._options.get("journal"), uvloop=uvloop)

    async def aclose(self) -> None:
        """Accept nothing more, let what runs be answered, and close all connections.

        To each connection this is as if its client had ended its input: a handler gets a quarter of
        `Limits.close_grace` to come to its end, is then asked to stop, and left behind when the grace is
        over. Returns when all are closed, which is bounded by a few graces and seconds. Idempotent;
        cancelled, the connections are closed at once. A turn that is journaled outlives its connection,
        and so the server: `Durability.aclose` ends it, and so does `run`.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._hurried = True
            if self._patience is not None:
                self._patience.reschedule(asyncio.get_running_loop().time())
            raise

    async def _start(self) -> None:
        async with self._starting:
            if self._closing is not None:
                msg = f"the server at {self.address} was closed"
                raise LocalProtocolError(msg)
            if self._listening is None:
                listening = await self._listen()
                self._address = listening.address
                try:
                    if self._on_listening is not None:
                        self._on_listening(self.address)
                    self._listener = Listener(listening.sock, self._accepted)
                except BaseException:  # who could not start is not there to close it
                    await listening.close()
                    raise
                self._listening = listening

    async def _close(self) -> None:
        try:
            async with self._starting:  # one that is about to listen does so first
                if self._listener is not None:
                    self._listener.stop()
                if self._listening is not None:
                    await self._listening.close()
            for transport in self.connections:
                transport.refuse_input()
            grace = self._limits.close_grace
            await self._wait(3 * grace + _TRANSPORT_GRACE)
            # Cancelled, a connection ends what runs; again, it gives that no more time, nor its link.
            for seconds in (2 * grace + _TRANSPORT_GRACE, 0, 0, 0):
                for task in self._clients.values():
                    task.cancel()
                await self._wait(seconds)
            for transport in self.connections:
                log.error("%s does not end and is left behind", transport.describe())
        finally:
            self._ended.set()

    async def _wait(self, seconds: float) -> None:
        """Wait until all connections have ended, but not longer; not at all in a hurry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._hurried else seconds) as self._patience:
                while self._clients:
                    await asyncio.wait(self._clients.values())
        self._patience = None

    # ------------------------------------------------------------------ what it knows

    @property
    def address(self) -> str:
        """Where it listens, as `connect` takes it: "unix:/run/agent.sock", "tcp:127.0.0.1:4711"."""
        return str(self._address)

    @property
    def connections(self) -> tuple[SocketTransport, ...]:
        """The links to those who are connected; `info` says who it is, `aclose()` ends one."""
        return tuple(self._clients)

    # ------------------------------------------------------------------ connections

    def _accepted(self, sock: socket.socket) -> None:
        try:
            transport = SocketTransport(sock, self._limits)
            refusal = self._refusal(transport)
        except Exception:
            log.exception("a client could not be taken")
            sock.close()
            return
        if refusal is not None:
            log.warning("%s was refused: %s", transport.describe(), refusal)
            sock.close()
            return
        if len(self._clients) >= self._most:
            if not self._full:  # once until there is room again
                log.warning("max_connections of %d are open; more are refused", self._most)
            self._full = True
            with contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(_BUSY)
            sock.close()
            return
        self._count += 1
        task = asyncio.create_task(self._serve(transport, self._count))
        self._clients[transport] = task
        task.add_done_callback(lambda _: self._gone(transport))

    def _refusal(self, transport: SocketTransport) -> str | None:
        """Why this peer may not connect."""
        if self._users is None:
            return None
        peer = transport.info["peer"]
        if peer is None:
            return "it is not known whose it is"
        return None if peer["uid"] in self._users else f"of user {peer['uid']}"

    async def _serve(self, transport: SocketTransport, number: int) -> None:
        timer: asyncio.TimerHandle | None = None
        try:
            if self._closing is None:
                if self._limits.startup_timeout is not None:
                    loop = asyncio.get_running_loop()
                    timer = loop.call_later(
                        self._limits.startup_timeout, self._check_heard, transport
                    )
                await serve(
                    self._agent if isinstance(self._agent, Agent) else self._agent(),
                    transport,
                    limits=self._limits,
                    record=_numbered(self._record, number),
                    **self._options,
                )
        except (*ENDING, asyncio.CancelledError):
            raise
        except BaseException:
            log.exception("%s could not be served", transport.describe())
        finally:
            if timer is not None:
                timer.cancel()
            await transport.aclose()

    def _check_heard(self, transport: SocketTransport) -> None:
        if not transport.heard and transport in self._clients:
            log.warning("%s says nothing and is disconnected", transport.describe())
            self._clients[transport].cancel()

    def _gone(self, transport: SocketTransport) -> None:
        del self._clients[transport]
        self._full = False
        if self._listener is not None:
            self._listener.again()


def _numbered(record: Record | None, number: int) -> Record | None:
    """The record of one of many connections: a file of its own, "wire-1.ndjson" for "wire.ndjson"."""
    if record is None or callable(record):
        return record
    path = Path(record)
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def serve_unix(
    agent: Served,
    path: str | os.PathLike[str],
    *,
    allow_users: Collection[int] = (),
    allow_other_users: bool = False,
    max_connections: int = MAX_CONNECTIONS,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    journal: Journal | Durability | None = None,
    on_listening: Callable[[str], object] | None = None,
) -> AgentServer:
    """Serve an agent to many clients on a Unix socket.

    ::

        async with serve_unix(MyAgent(), "/run/user/1000/my-agent.sock") as server:
            await server.serve_forever()

    Only processes of our own user may connect: the socket's mode is 0600 from its first moment, and who
    connects is asked of the kernel. What a server that has died left at `path` is replaced, one that
    lives and what is no socket are not, and the socket is removed at the end. In a folder where others
    may write, they can put another socket in its place.

    Args:
        agent: answers; an `Agent`, which all connections share, or a function (a class) that makes one
            for each.
        path: where; at most 107 bytes. "@NAME" is an abstract socket of Linux, which leaves no file.
        allow_users: ids of users who may connect besides our own; the socket's mode is 0666 then.
        allow_other_users: let every user of this machine connect.
        max_connections: how many at a time; more are told so and closed.
        unstable: also advertise and serve unstable methods.
        limits: what each connection may cost, and how long things may take. A client that says nothing
            for `startup_timeout` is disconnected.
        record: a file to append the frames of each connection to, as NDJSON, with the connection's
            number: `wire.ndjson` is `wire-1.ndjson`; or a function of (direction, frame), for all.
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        journal: keeps the agent's sessions, as for `serve`; all connections share them.
        on_listening: called with the address once clients can connect to it; what it raises is raised
            where the server was awaited or entered, which then does not listen.

    Raises:
        ValueError: `path` is no path of a socket. From here on, when it is awaited or entered:
        OSError: a server is listening there (EADDRINUSE), what is there is no socket
            (`FileExistsError`), or the folder is missing or not ours to write in.
        NotImplementedError: this is Windows.
    """
    address = UnixAddress(os.fspath(path))
    others = allow_other_users or bool(allow_users)
    users = None if allow_other_users else {_own_user(), *allow_users}
    return AgentServer(
        agent,
        address,
        lambda: listen_unix(address.path, everybody=others),
        users=users,
        max_connections=max_connections,
        limits=limits,
        record=record,
        on_listening=on_listening,
        options=_options(unstable=unstable, telemetry=telemetry, journal=journal),
    )


def serve_tcp(
    agent: Served,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    allow_remote: bool = False,
    max_connections: int = MAX_CONNECTIONS,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    journal: Journal | Durability | None = None,
    on_listening: Callable[[str], object] | None = None,
) -> AgentServer:
    """Serve an agent to many clients on a TCP port of this machine.

    ::

        async with serve_tcp(MyAgent()) as server:
            print(server.address)  # tcp:127.0.0.1:41873
            await server.serve_forever()

    TCP proves nobody's identity, and nothing is encrypted: every user and program of this machine can
    connect and prompt, and existing sessions of a durable agent need a token. Where there are Unix
    sockets, use `serve_unix`. A connection that does not begin with a JSON object is closed unheard,
    so that no web page can have a browser speak to the agent.

    Args:
        agent: as for `serve_unix`; so are the options that are not told here.
        host: address or name of ours; of a name that has several, the first.
        port: 0 for any that is free; `server.address` tells it.
        allow_remote: also where other machines can connect, which can then do all that a prompt can do.
        max_connections: how many at a time; more are told so and closed.
        unstable: also advertise and serve unstable methods.
        limits: what each connection may cost, and how long things may take.
        record: a file for each connection, or a function.
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        journal: keeps the agent's sessions, as for `serve`; all connections share them.
        on_listening: called with the address once clients can connect to it; what it raises is raised
            where the server was awaited or entered, which then does not listen.

    Raises:
        ValueError: there is no such address, or other machines could connect to it and `allow_remote`
            is not given; of a name that is known when it is awaited or entered.
        OSError: then: the port is in use, the name is unknown.
    """
    address = TcpAddress(host, port)
    check_reach(host, allow_remote=allow_remote)
    return AgentServer(
        agent,
        address,
        lambda: listen_tcp(host, port, allow_remote=allow_remote),
        users=None,
        max_connections=max_connections,
        limits=limits,
        record=record,
        on_listening=on_listening,
        options=_options(unstable=unstable, telemetry=telemetry, journal=journal),
    )


def _own_user() -> int:
    return getattr(os, "geteuid", lambda: -1)()


def _options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
