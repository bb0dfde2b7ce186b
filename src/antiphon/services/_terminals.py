"""`terminal/*`: commands that an agent runs through its client, and what they have written.

Starting, watching and ending processes is left to `_process`, deciding whether a command may run
to the guard, finding the working directory to `_confine`. What is kept here is the table of
terminals, each bound to its session, and the end of each one's output.

A command's working directory is confined like a file; the command itself is not, it can do all that
this user can. It runs in a process group of its own, with the null device as its standard input, in
an environment that holds no secrets of ours (`_launch.environment`).
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from antiphon._descriptors import open_reader
from antiphon._errors import InternalError, ResourceNotFound, StartError
from antiphon._launch import environment, with_variables
from antiphon._process import Child
from antiphon.schema import v1
from antiphon.services._confine import Pins, not_found
from antiphon.services._context import Operation, permit, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon._launch import Environment
    from antiphon.schema import v1_unstable
    from antiphon.services._confine import Place
    from antiphon.services._context import Guard, ServiceContext

__all__ = ["Terminals"]

logger = logging.getLogger("antiphon.services")

MIB: Final = 1 << 20
#: Kept of each terminal's output where the agent asks for no less (DESIGN §5).
OUTPUT_BYTES: Final = MIB
#: Terminals of one session at a time, until they are released (DESIGN §5).
TERMINALS: Final = 32
#: Between TERM and KILL when a command is ended (DESIGN §5, shutdown ladder).
KILL_GRACE: Final = 2.0

_T = TypeVar("_T")

# What the largest pipe holds on Linux without a privilege: so much can be left when a command ends.
_PIPE_BYTES: Final = MIB
# A word that a shell would take as it stands. Anything else can be meant for a shell only.
_PLAIN_WORD: Final = re.compile(r"[\w@%+=:,./-]+")


class Terminals:
    """Lends terminals to an agent: the handlers of `terminal/create`, `output` and the others.

    A terminal belongs to the session that created it; for any other its id is unknown. It lives
    until it is released, by the agent, by `release_session` or by `aclose`, and so does everything
    its command has started (what leaves the process group, a daemon, cannot be followed).

    Args:
        roots: where commands may be started. None given: the session's own directories.
        guard: asked before each command (see `Operation`); anything but True refuses.
        env: what commands see of our environment, as for `antiphon.spawn` but for None, which is
            "essential" here: what programs need to find themselves and their user. A mapping: the
            essential and these; a value that is None leaves its name out. "inherit": all of ours.
            What the agent sends goes over it.
        shell_fallback: agents send whole shell lines as `command`. If it is True, a command
            without arguments that names no program and is more than a plain word is run by
            `/bin/sh -c`; the guard is asked about the full line. Arguments never reach a shell.
        output_bytes: the most that is kept of a terminal's output, as UTF-8; an agent may ask for
            less.
        per_session: the most terminals that a session may have.
        kill_grace: seconds between TERM and KILL when a command is ended.

    Raises:
        OSError: a root does not exist or is no directory.
        ValueError: `env` has an empty name, one with "=", or a NUL.
        TypeError: `env` has a name that is no string, or a value neither a string nor None.
        NotImplementedError: this system has no directory descriptors.
    """

    def __init__(
        self,
        *roots: str | os.PathLike[str],
        guard: Guard | None = None,
        env: Environment = None,
        shell_fallback: bool = True,
        output_bytes: int = OUTPUT_BYTES,
        per_session: int = TERMINALS,
        kill_grace: float = KILL_GRACE,
    ) -> None:
        self.guard = guard
        environment(env)  # refuses what is none
        self.env: Environment = dict(env) if isinstance(env, Mapping) else env or "essential"
        self.shell_fallback = shell_fallback
        self.output_bytes = output_bytes
        self.per_session = per_session
        self.kill_grace = kill_grace
        self._pins = Pins(roots)
        self._sessions: dict[str, _Session] = {}

    def guard_with(self, guard: Guard, *, reads: bool) -> None:
        """Let `guard` decide about commands where no guard was given; one that was stays.

        `reads` means nothing here: it is for a caller that puts one guard before every service.
        """
        del reads
        if self.guard is None:
            self.guard = guard

    async def create_terminal(
        self, params: v1_unstable.CreateTerminalRequest, ctx: ServiceContext
    ) -> v1.CreateTerminalResponse:
        """Start a command and answer at once; its two outputs go into one, in order (R1-111).

        `cwd` is confined like a file and defaults to the session's first directory. On Linux the
        command starts in exactly the directory that was checked; elsewhere by its real path.
        `outputByteLimit` above `output_bytes` is taken for that.

        Raises:
            RequestError: -32602 with the reasons of `Roots.locate` for `cwd`, `not_a_directory`,
                `command_invalid` (empty, or a NUL), `env_invalid`, `command_not_found`,
                `cannot_start`; -32002 with `data.uri` if `cwd` does not exist; -32603
                `permission_denied` if it was not allowed, `too_many_terminals`,
                `session_released` if that happened meanwhile. No terminal is left then.
        """
        args = _or(params.args, [])
        added = _environment(_or(params.env, []))
        if not params.command or any("\0" in word for word in (params.command, *args)):
            raise refusal("command_invalid")
        session = self._session(ctx.session_id)
        with self._locate(_or(params.cwd, None), ctx) as place:
            # None: all of ours. Taken anew each time, as ours may change.
            ours = environment(self.env) or dict(os.environ)
            env = with_variables(ours, {"PWD": place.path, **added})
            argv, title = self._command(params.command, args, env, place)
            if len(session.terminals) + session.starting >= self.per_session:
                facts = {"reason": "too_many_terminals", "limit": self.per_session}
                raise InternalError(facts, "Too many terminals")
            # Counted while a person thinks, or many could pass at once.
            session.starting += 1
            try:
                await permit(
                    self.guard,
                    Operation(
                        kind="execute",
                        session_id=ctx.session_id,
                        title=title,
                        command=argv,
                        cwd=place.path,
                        env=added,
                        roots=self._pins.named(ctx),
                    ),
                )
            finally:
                session.starting -= 1
            if session.released:
                raise InternalError({"reason": "session_released"}, "Session released")
            child = await _start(argv, env, place)
        terminal_id = f"term-{secrets.token_hex(8)}"
        most = min(_or(params.output_byte_limit, self.output_bytes), self.output_bytes)
        session.terminals[terminal_id] = _Terminal(child, most, self.kill_grace)
        return v1.CreateTerminalResponse(terminal_id=terminal_id)

    async def terminal_output(
        self, params: v1_unstable.TerminalOutputRequest, ctx: ServiceContext
    ) -> v1.TerminalOutputResponse:
        """Answer the end of the output so far, and the exit status once there is one.

        At most the limit in UTF-8, cut between characters; what is no UTF-8 is replaced by
        U+FFFD, a character of which a part is still missing is held back (R1-112, R1-113).

        Raises:
            RequestError: -32002: the session has no such terminal.
        """
        terminal = self._find(params.terminal_id, ctx)
        answer = v1.TerminalOutputResponse(
            output=terminal.output.text(), truncated=terminal.output.truncated
        )
        if terminal.exited.is_set():
            code, name = terminal.status()
            answer.exit_status = v1.TerminalExitStatus(exit_code=code, signal=name)
        return answer

    async def wait_for_terminal_exit(
        self, params: v1_unstable.WaitForTerminalExitRequest, ctx: ServiceContext
    ) -> v1.WaitForTerminalExitResponse:
        """Wait for the exit of the command itself, whatever it has left running (R1-117, R1-118).

        Any number may wait; cancelling one concerns no other. What the command had written is in
        the output by then. Being killed or released ends the wait as well.

        Raises:
            RequestError: -32002: the session has no such terminal.
        """
        terminal = self._find(params.terminal_id, ctx)
        await terminal.exited.wait()
        code, name = terminal.status()
        return v1.WaitForTerminalExitResponse(exit_code=code, signal=name)

    async def kill_terminal(
        self, params: v1_unstable.KillTerminalRequest, ctx: ServiceContext
    ) -> v1.KillTerminalResponse:
        """End the command and what it has started: TERM, a grace, KILL; the id stays (R1-114).

        Answered when they are gone. Cancelled, it goes on in the background.

        Raises:
            RequestError: -32002: the session has no such terminal.
        """
        await self._find(params.terminal_id, ctx).end()
        return v1.KillTerminalResponse()

    async def release_terminal(
        self, params: v1_unstable.ReleaseTerminalRequest, ctx: ServiceContext
    ) -> v1.ReleaseTerminalResponse:
        """Forget the id at once, then end what still runs as `kill_terminal` does (R1-114).

        Raises:
            RequestError: -32002: the session has no such terminal.
        """
        terminal = self._find(params.terminal_id, ctx)
        session = self._sessions[ctx.session_id]
        del session.terminals[params.terminal_id]
        session.ending.add(terminal)
        terminal.closed = lambda: session.ending.discard(terminal)
        await terminal.release()
        return v1.ReleaseTerminalResponse()

    async def release_session(self, session_id: str) -> None:
        """End all terminals of a session and forget its directories. Idempotent.

        A command that is still being decided about will not be started. Cancelled, the ending
        goes on in the background.
        """
        self._pins.release(session_id)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.released = True
            await asyncio.gather(*(terminal.release() for terminal in session.all()))

    async def aclose(self) -> None:
        """End all terminals of all sessions. Idempotent; new ones may be created afterwards."""
        await asyncio.gather(*(self.release_session(session) for session in list(self._sessions)))

    def _session(self, session_id: str) -> _Session:
        return self._sessions.setdefault(session_id, _Session())

    def _find(self, terminal_id: str, ctx: ServiceContext) -> _Terminal:
        session = self._sessions.get(ctx.session_id)
        terminal = None if session is None else session.terminals.get(terminal_id)
        if terminal is None:
            raise ResourceNotFound({"terminalId": terminal_id})
        return terminal

    def _locate(self, cwd: str | None, ctx: ServiceContext) -> Place:
        roots = self._pins.roots(ctx)
        path = cwd or next(iter(ctx.roots), roots.first)
        place = roots.locate(path)
        if place.leaf is None:
            return place
        place.close()
        raise refusal("not_a_directory", path=path) if place.exists else not_found(path)

    def _command(
        self, command: str, args: list[str], env: Mapping[str, str], place: Place
    ) -> tuple[list[str], str]:
        """The argument list, and the line in which a person sees all of it."""
        if (
            args
            or not self.shell_fallback
            or _PLAIN_WORD.fullmatch(command)
            or _is_program(command, env, place)
        ):
            argv = [command, *args]
            return argv, shlex.join(argv)
        return ["/bin/sh", "-c", command], command


class _Session:
    """The terminals of one session, and how many are being decided about."""

    def __init__(self) -> None:
        self.terminals: dict[str, _Terminal] = {}
        self.ending: set[_Terminal] = set()
        self.starting = 0
        self.released = False

    def all(self) -> Iterable[_Terminal]:
        return [*self.terminals.values(), *self.ending]


class _Terminal:
    """One command and the end of its output."""

    def __init__(self, child: Child, most: int, kill_grace: float) -> None:
        self.output = OutputTail(most)
        self.exited = asyncio.Event()
        self.closed: Callable[[], None] | None = None
        self._child = child
        self._kill_grace = kill_grace
        self._ending: asyncio.Task[int | None] | None = None
        self._release: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        fd = child.take_stdout()
        # Our end of a pipe of ours. Emptying it at the exit may come between the loop's seeing
        # that it is readable and its reading, which must not wait for whoever still holds it.
        os.set_blocking(fd, False)
        self._reader = open_reader(
            loop, fd, self.output.add, lambda _error: self.output.end(), own=True
        )
        # Reading never pauses: output is thrown away rather than the command held up.
        self._reader.resume()
        child.on_exit(self._exit_seen)

    def _exit_seen(self) -> None:
        # What the command itself has written is in the pipe by now. What its children, which may
        # hold the pipe for ever, write later comes as it comes.
        self._reader.drain(_PIPE_BYTES)
        self.exited.set()

    def status(self) -> tuple[int | None, str | None]:
        """Exit code or signal name, never both."""
        code = self._child.returncode
        if code is None:
            return None, None
        return (code, None) if code >= 0 else (None, signal_name(-code))

    async def end(self) -> None:
        if self._ending is None:
            ending = self._child.end(stdin_grace=0, term_grace=self._kill_grace)
            self._ending = asyncio.get_running_loop().create_task(ending)
        # Nobody's cancellation may stop it half-way.
        await asyncio.shield(self._ending)

    async def release(self) -> None:
        if self._release is None:
            self._release = asyncio.get_running_loop().create_task(self._end_and_close())
        await asyncio.shield(self._release)

    async def _end_and_close(self) -> None:
        try:
            await self.end()
        finally:
            self._close()

    def _close(self) -> None:
        self._reader.close()
        self.output.end()
        # Set already, unless the kernel does not let go of the process.
        self.exited.set()
        if self.closed is not None:
            self.closed()


class OutputTail:
    """The end of a byte stream as text: at most `most` bytes of UTF-8, cut between characters."""

    def __init__(self, most: int) -> None:
        self.truncated = False
        self._most = most
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next piece, however it is cut."""
        self._keep(self._decoder.decode(data))

    def end(self) -> None:
        """The stream has ended: half a character will not become whole any more. Idempotent."""
        self._keep(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _keep(self, text: str) -> None:
        kept = self._kept
        kept += text.encode()
        cut = len(kept) - self._most
        if cut > 0:
            self.truncated = True
            while cut < len(kept) and kept[cut] & 0xC0 == 0x80:
                cut += 1
            del kept[:cut]

    def text(self) -> str:
        """What is kept."""
        return self._kept.decode()


async def _start(argv: list[str], env: Mapping[str, str], place: Place) -> Child:
    # The descriptor's own name leads to the directory that was checked, even if its path now leads
    # elsewhere: the child changes its directory before it closes what it does not inherit.
    cwd = f"/proc/self/fd/{place.directory}"
    if sys.platform != "linux" or not os.access(cwd, os.F_OK):
        cwd = place.path
    try:
        return await Child.start(argv, cwd=cwd, env=env, stdin="null", stderr="stdout")
    except StartError as error:
        logger.info("a command of the agent was not started: %s", error)
        known = argv[0] == "/bin/sh" or _is_program(argv[0], env, place)
        reason = "cannot_start" if known else "command_not_found"
        raise refusal(reason, command=argv[0]) from error


def _or(value: _T | msgspec.UnsetType | None, default: _T) -> _T:
    return default if value is None or value is msgspec.UNSET else value


def _is_program(command: str, env: Mapping[str, str], place: Place) -> bool:
    """Whether a command can be executed as it is, seen from where it will run."""
    if "/" not in command:
        return shutil.which(command, path=env.get("PATH", os.defpath)) is not None
    try:
        status = os.stat(command, dir_fd=place.directory)
        runs = os.access(command, os.X_OK, dir_fd=place.directory)
    except (OSError, ValueError):
        return False
    return runs and stat.S_ISREG(status.st_mode)


def _environment(entries: list[v1.EnvVariable]) -> dict[str, str]:
    """What the agent adds; of a name that comes twice, the last counts."""
    added: dict[str, str] = {}
    for entry in entries:
        if not entry.name or "=" in entry.name or "\0" in entry.name + entry.value:
            raise refusal("env_invalid", name=entry.name)
        added[entry.name] = entry.value
    return added


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL", "SIGRTMIN+2"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", 0)
        return f"SIGRTMIN+{number - first}" if first and number > first else f"SIG{number}"
