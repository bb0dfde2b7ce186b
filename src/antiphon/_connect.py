"""Joining a side and a transport: `spawn` and `connect` for clients, `serve` and stdio for agents.

Either side is loaded by the function that joins it: an agent does not load a client.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from antiphon._errors import MissingExtra
from antiphon._loops import bounded_runner
from antiphon._version import __version__
from antiphon.core import Limits

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from types import TracebackType

    from antiphon._agent import Agent
    from antiphon._client import Client
    from antiphon._recording import Guarded, Recorder
    from antiphon.journal import Journal
    from antiphon.runtime import TelemetryEvent
    from antiphon.sessions import AgentPeer, Durability, Reattach
    from antiphon.transports import Environment, Transport

__all__ = ["Connecting", "connect", "run_stdio", "serve", "serve_stdio", "spawn"]

#: While `antiphon run` imports a module: the agents that the module itself asked to have served.
_left_to_the_command: list[Agent] | None = None

Stderr: TypeAlias = "Callable[[str], object] | os.PathLike[str] | Literal['inherit'] | None"
Record: TypeAlias = "str | os.PathLike[str] | Callable[[str, bytes], None]"
Telemetry: TypeAlias = "Callable[[TelemetryEvent], None]"


class Connecting:
    """A connection to an agent being made: use it in `async with`, or await it and close it yourself."""

    def __init__(self, make: Callable[[], Transport], options: _Options) -> None:
        self._make = make
        self._options = options
        self._peer: AgentPeer | None = None

    def __await__(self) -> Generator[Any, None, AgentPeer]:
        return self._open().__await__()

    async def __aenter__(self) -> AgentPeer:
        self._peer = await self._open()
        return self._peer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._peer is not None:
            await self._peer.aclose()

    async def _open(self) -> AgentPeer:
        from antiphon.schema import v1
        from antiphon.sessions import AgentPeer

        options = self._options
        record = _recorder(options.record)
        on_close = None if record is None else record.close
        try:
            peer = AgentPeer(
                self._make(),
                options.client,
                unstable=options.unstable,
                limits=options.limits,
                record=record,
                telemetry=options.telemetry,
                on_close=on_close,
                reattach=options.reattach,
                renew=self._make,
            )
        except BaseException:
            if on_close is not None:
                on_close()
            raise
        info = options.client.info
        if info is None:
            info = ("antiphon", __version__)
        try:
            if isinstance(info, tuple):
                info = v1.Implementation(name=info[0], version=info[1])
            await peer.initialize(info, options.limits.startup_timeout)
            if options.authenticate is not None:
                await peer.authenticate(options.authenticate)
        except BaseException:
            await peer.aclose()
            raise
        return peer


class _Options:
    def __init__(
        self,
        client: Client | None,
        limits: Limits | None,
        record: Record | None,
        telemetry: Telemetry | None,
        authenticate: str | None,
        *,
        unstable: bool,
        reattach: Reattach | bool,
    ) -> None:
        from antiphon._client import Client
        from antiphon.sessions import Reattach

        self.client = Client() if client is None else client
        self.limits = Limits() if limits is None else limits
        self.record = record
        self.telemetry = telemetry
        self.authenticate = authenticate
        self.unstable = unstable
        self.reattach = (
            (Reattach() if reattach else None) if isinstance(reattach, bool) else reattach
        )


def _recorder(record: Record | None) -> Recorder | Guarded | None:
    if record is None:
        return None
    from antiphon._recording import Guarded, Recorder

    return Guarded(record) if callable(record) else Recorder(record)


def spawn(
    argv: Sequence[str],
    *,
    client: Client | None = None,
    cwd: str | os.PathLike[str] | None = None,
    env: Environment = None,
    stderr: Stderr = None,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    authenticate: str | None = None,
    reattach: Reattach | bool = False,
) -> Connecting:
    """Start an agent as a child process and connect to it over its stdin and stdout.

    ::

        async with spawn(["my-agent", "--acp"], client=Client(files=Files("."))) as agent:
            session = await agent.new_session(cwd=".")

    The process gets a group of its own and is ended with everything in it when the block is left:
    its stdin is closed, after 2 s it is sent TERM, after 2 more KILL.

    Args:
        argv: the command, one argument each; no shell is involved.
        client: what is lent to the agent and how it is answered; by default nothing, and no.
        cwd: directory of the process; by default ours.
        env: what it sees of our environment. None or "inherit": all of it, secrets too; agents take
            their keys from there. "essential": PATH, HOME, LANG and the like. A mapping: those and
            these, where a value that is None leaves its name out;
            `antiphon.transports.inherit_env("NAME", "PREFIX_*")` makes one of names of ours.
        stderr: a function to be called with each line it writes to its standard error, a path to
            have it appended to a file, or "inherit" to leave it where ours goes. It is always
            drained but for the last; then its end is in `agent.process.stderr_tail` and in errors.
        unstable: also offer and call unstable methods.
        limits: what the connection may cost, and how long things may take.
        record: a file to append every frame to, as NDJSON, or a function of (direction, frame).
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        authenticate: id of an agent-side auth method to call right after the handshake.
        reattach: when the link is lost, start the agent again and go on with the sessions that it let
            us attach to: their iterators never notice. True, or a `Reattach` that says how often and
            how long it is tried. For an agent that keeps journals; with others all is as without it.

    Raises:
        StartError: the command could not be started, ended, or did not answer `initialize` in time.
        VersionMismatch: it speaks no version that we do.
        RequestError: it refused `initialize` or `authenticate`.
        ValueError: `env` has an empty name, one with "=", or a NUL, or `stderr` is text other than
            "inherit"; nothing was started.
    """
    if isinstance(argv, (str, bytes)):
        msg = "argv is a list of arguments, not one string; shlex.split makes one of a command line"
        raise TypeError(msg)
    words = list(argv)  # ours, whatever becomes of it
    options = _Options(
        client, limits, record, telemetry, authenticate, unstable=unstable, reattach=reattach
    )

    def make() -> Transport:
        from antiphon.transports import ProcessTransport

        return ProcessTransport(words, cwd=cwd, env=env, stderr=stderr, limits=options.limits)

    return Connecting(make, options)


def connect(
    transport: Transport | str | Callable[[], Transport],
    *,
    client: Client | None = None,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    authenticate: str | None = None,
    reattach: Reattach | bool = False,
) -> Connecting:
    """Connect to an agent that listens, or over any object that satisfies `transports.Transport`.

    ::

        async with connect("unix:/run/user/1000/my-agent.sock", client=client) as agent:
            session = await agent.new_session(cwd=".")

    Args:
        transport: an address, `"unix:PATH"`, `"unix:@NAME"` (an abstract socket of Linux),
            `"tcp:HOST:PORT"` or `"tcp:[IPV6]:PORT"`; or a transport, which is started here and closed
            with the connection; or a function that makes one.
        client: as for `spawn`; so are all others.
        unstable: also offer and call unstable methods.
        limits: what the connection may cost, and how long things may take.
        record: a file to append every frame to, as NDJSON, or a function of (direction, frame).
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        authenticate: id of an agent-side auth method to call right after the handshake.
        reattach: as for `spawn`, over a new link to the same address; not for a transport, which can be
            started only once.

    Raises:
        ValueError: that is no address; or `reattach` is given with a transport.
        StartError: nobody listens there, it may not be used, or there is no answer in time.
        VersionMismatch: the agent speaks no version that we do.
        RequestError: it refused `initialize` or `authenticate`.
    """
    options = _Options(
        client, limits, record, telemetry, authenticate, unstable=unstable, reattach=reattach
    )
    make = _maker(transport, options.limits)
    if options.reattach is not None and not isinstance(transport, str) and not callable(transport):
        msg = "a transport is started only once: to reattach, give an address or a function"
        raise ValueError(msg)
    return Connecting(make, options)


def _maker(
    transport: Transport | str | Callable[[], Transport], limits: Limits
) -> Callable[[], Transport]:
    if isinstance(transport, str):
        from antiphon.transports import SocketTransport, parse_address

        address = transport
        parse_address(address)  # wrong ones are told here, and not in `await`
        return lambda: SocketTransport(address, limits)
    if callable(transport):
        return transport
    given: Transport = transport
    return lambda: given


async def serve(
    agent: Agent,
    transport: Transport,
    *,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    journal: Journal | Durability | None = None,
) -> None:
    """Serve one client over a transport, until it goes. Cancelling closes the link.

    Args:
        agent: answers; one instance may serve several connections.
        transport: started and closed here.
        unstable: also advertise and serve unstable methods.
        limits: what the connection may cost, and how long things may take.
        record: a file to append every frame to, as NDJSON, or a function of (direction, frame).
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        journal: keeps the agent's sessions: a journal, or a `Durability` that says how. It stays open;
            what this client's sessions told is durable when this returns. By default what the agent
            itself has as `journal` (`DurableAgent`).
    """
    from antiphon.sessions import ClientPeer

    recorder = _recorder(record)
    durability = _durability(agent, journal)
    try:
        peer = ClientPeer(
            transport,
            agent,
            unstable=unstable,
            limits=limits,
            record=recorder,
            telemetry=telemetry,
            durability=durability,
        )
        await peer.run()
    finally:
        if recorder is not None:
            recorder.close()
        if durability is not None:
            await durability.flush((limits or Limits()).close_grace)


def _durability(agent: Agent | None, journal: Journal | Durability | None) -> Durability | None:
    if journal is None:
        journal = getattr(agent, "journal", None)
    if journal is None:
        return None
    from antiphon.sessions import Durability

    return Durability.of(journal)


async def run_stdio(
    agent: Agent,
    *,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    journal: Journal | Durability | None = None,
) -> None:
    """Serve the client at the other end of our own stdin and stdout, until it goes.

    From here on the protocol has private descriptors: whatever is printed goes to standard error, and
    what is read from stdin is empty (DESIGN §3.8). What was printed before the call has reached the
    client: `antiphon run MODULE:AGENT` secures the descriptors before it imports your code. While it
    imports, this returns at once: it is the command that serves.
    """
    if is_left_to_the_command(agent):
        return

    from antiphon.transports import StdioTransport

    await serve(
        agent,
        StdioTransport(limits),
        unstable=unstable,
        limits=limits,
        record=record,
        telemetry=telemetry,
        journal=journal,
    )


def is_left_to_the_command(agent: Agent | None) -> bool:
    """Whether it is a command that serves what is being imported; then this agent is noted."""
    if _left_to_the_command is None:
        return False
    if agent is not None:
        _left_to_the_command.append(agent)
    return True


@contextmanager
def left_to_the_command() -> Generator[list[Agent]]:
    """For `antiphon run`, around an import: what the module would serve itself is only noted."""
    global _left_to_the_command  # noqa: PLW0603  (one process has one standard input)
    _left_to_the_command = []
    try:
        yield _left_to_the_command
    finally:
        _left_to_the_command = None


def serve_stdio(
    agent: Agent,
    *,
    unstable: bool = False,
    limits: Limits | None = None,
    record: Record | None = None,
    telemetry: Telemetry | None = None,
    journal: Journal | Durability | None = None,
    uvloop: bool = False,
) -> None:
    """`run_stdio` as a whole programme: returns when the client has gone, or on SIGTERM.

    A handler, task or worker thread that does not end then is left behind after a few seconds.
    Returns at once in a module that `antiphon run` imports: it is the command that serves then, so
    that one file can be run either way.

    Args:
        agent: answers.
        unstable: also advertise and serve unstable methods.
        limits: what the connection may cost, and how long things may take.
        record: a file to append every frame to, as NDJSON, or a function of (direction, frame).
        telemetry: called with each `TelemetryEvent` on the event loop; it must not block.
        journal: keeps the agent's sessions, as for `serve`; it is closed at the end.
        uvloop: run on uvloop, which halves the cost of a round trip.

    Raises:
        MissingExtra: uvloop was asked for and is not installed.
    """
    if is_left_to_the_command(agent):
        return

    from antiphon.transports import secure_stdio

    secure_stdio()

    async def main(durability: Durability | None) -> None:
        await run_stdio(
            agent,
            unstable=unstable,
            limits=limits,
            record=record,
            telemetry=telemetry,
            journal=durability,
        )

    run_program(main, agent, journal, uvloop=uvloop)


def run_program(
    main: Callable[[Durability | None], Coroutine[Any, Any, None]],
    agent: Agent | None,
    journal: Journal | Durability | None,
    *,
    uvloop: bool,
) -> None:
    """Run what serves as a whole programme: SIGTERM cancels it, and the journal is closed at its end.

    Raises:
        MissingExtra: uvloop was asked for and is not installed.
    """
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if uvloop:
        try:
            from uvloop import new_event_loop
        except ImportError:
            raise MissingExtra("fast", "uvloop") from None
        factory = new_event_loop

    async def whole() -> None:
        task = asyncio.current_task()
        if task is not None:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        durability = _durability(agent, journal)
        try:
            with suppress(asyncio.CancelledError):
                await main(durability)
        finally:
            if durability is not None:
                await durability.aclose()
                await durability.journal.aclose()

    with bounded_runner(factory) as runner:
        runner.run(whole())
