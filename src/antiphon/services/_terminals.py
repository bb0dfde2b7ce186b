"""`terminal/*`: commands that an agent runs through its client, and what they have written.

Starting, watching and ending processes is left to `_process`, deciding whether a command may run
to the guard, finding the working directory to `_confine`, one command's life and output to
`_terminal`. What is kept here is the table of terminals, each bound to its session.

A command's working directory is confined like a file; the command itself is not, it can do all that
this user can, unless it is run in a sandbox (`_bwrap`). It runs in a process group of its own, with
the null device as its standard input, or in a terminal of its own (`_pty`), in an environment that
holds no secrets of ours (`_launch.environment`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from antiphon._errors import InternalError, ResourceNotFound, StartError
from antiphon._launch import environment, with_variables
from antiphon._process import Child
from antiphon.schema import v1
from antiphon.services._bwrap import SESSION_VARIABLES, Box
from antiphon.services._confine import Pins, not_found
from antiphon.services._context import Operation, given, permit, refusal
from antiphon.services._launched import Plain, directory_name, start_launched
from antiphon.services._pty import checked_size
from antiphon.services._terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from antiphon._launch import Environment
    from antiphon.schema import v1_unstable
    from antiphon.services._confine import Place
    from antiphon.services._context import Guard, ServiceContext
    from antiphon.services._launched import Command

    OnOutput = Callable[[str, str, str], object]

__all__ = ["Terminals"]

logger = logging.getLogger("antiphon.services")

MIB: Final = 1 << 20
#: Kept of each terminal's output where the agent asks for no less (DESIGN §5).
OUTPUT_BYTES: Final = MIB
#: Terminals of one session at a time, until they are released (DESIGN §5).
TERMINALS: Final = 32
#: Terminals of all sessions together, also those that are being ended. Each costs two to
#: seven descriptors, and 1024 is what most systems give a process.
IN_ALL: Final = 128
#: What a command may be given: Linux takes no longer word, and most systems no more in all. Without
#: a bound, looking for a program along a PATH of a million folders holds up everybody.
WORD_CHARACTERS: Final = 128 * 1024 - 1
ALL_CHARACTERS: Final = 2 * MIB
ARGUMENTS: Final = 16 * 1024
VARIABLES: Final = 1024
PATH_FOLDERS: Final = 1024
MOST_SHOWN: Final = 128
#: Between TERM and KILL when a command is ended (DESIGN §5, shutdown ladder).
KILL_GRACE: Final = 2.0

# A word that a shell would take as it stands. Anything else can be meant for a shell only.
_PLAIN_WORD: Final = re.compile(r"[\w@%+=:,./-]+")


class Terminals:
    """Lends terminals to an agent: the handlers of `terminal/create`, `output` and the others.

    A terminal belongs to the session that created it; for any other its id is unknown. It lives
    until it is released, by the agent, by `release_session` or by `aclose`, and so does everything
    its command has started (what leaves the process group, a daemon, cannot be followed).

    Args:
        roots: where commands may be started. None given: the session's own directories.
        guard: asked before each command (see `Operation`); anything but True refuses. Async, or a
            plain function, which must not block.
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
        in_all: the most that all sessions may have together. What is being ended counts, too.
        life: seconds after which a command and what it has started are ended as by `kill_terminal`;
            the exit status says the signal, a line is logged, `expired` counts it. The terminal
            stays until it is released. None: no bound.
        kill_grace: seconds between TERM and KILL when a command is ended.
        pty: run commands in a terminal of 24 rows and 80 columns, or of (rows, columns): programs
            print there as for a person, with colours and progress, and lines end in CR LF. Nobody
            ever types; what reads gets an end of file (`_pty.Silence`). A program that takes single
            keys waits until it is killed: set `life`.
        confine: "bwrap" runs each command in a sandbox of bubblewrap: of the file system the roots
            alone can be changed, the system be read, and nothing else is there (`_bwrap`), least of
            all the home; no network; no process but its own, and all of them end with it, daemons
            too. Linux only.
        network: leave confined commands the network of this machine, what listens on loopback and
            abstract sockets included.
        visible: further files and directories that a confined command may read: a toolchain in the
            home, caches.
        on_output: called on the loop with session id, terminal id and what a command has printed
            since, for a display; bad UTF-8 is replaced. It is not awaited and must return soon. What
            it raises is logged once a terminal and changes nothing.

    Attributes:
        expired: how many commands `life` has ended.

    Raises:
        OSError: a root, or something in `visible`, does not exist, or a root is no directory.
        ValueError: `env` has an empty name, one with "=", or a NUL.
        TypeError: `env` has a name that is no string, or a value neither a string nor None.
        NotImplementedError: this system has no directory descriptors, no terminals, or no sandbox;
            the text says what is missing. Whether bubblewrap works here is tried once, which takes
            some 50 ms.
    """

    def __init__(
        self,
        *roots: str | os.PathLike[str],
        guard: Guard | None = None,
        env: Environment = None,
        shell_fallback: bool = True,
        output_bytes: int = OUTPUT_BYTES,
        per_session: int = TERMINALS,
        in_all: int = IN_ALL,
        life: float | None = None,
        kill_grace: float = KILL_GRACE,
        pty: bool | tuple[int, int] = False,
        confine: Literal["bwrap"] | None = None,
        network: bool = False,
        visible: Iterable[str | os.PathLike[str]] = (),
        on_output: OnOutput | None = None,
    ) -> None:
        self.guard = guard
        environment(env)  # refuses what is none
        self.env: Environment = dict(env) if isinstance(env, Mapping) else env or "essential"
        self.shell_fallback = shell_fallback
        self.output_bytes = output_bytes
        self.per_session = per_session
        self.in_all = in_all
        if life is not None and not life > 0:
            msg = f"life is a number of seconds above 0, or None for no bound, not {life!r}"
            raise ValueError(msg)
        self.life = life
        self.kill_grace = kill_grace
        self.expired = 0
        self.on_output = on_output
        self._size = checked_size(pty)
        visible = list(visible)
        if confine is None and (network or visible):
            msg = 'network= and visible= say what a confined command has: give confine="bwrap"'
            raise ValueError(msg)
        if confine not in {None, "bwrap"}:
            msg = f'confine is None or "bwrap", not {confine!r}'
            raise ValueError(msg)
        self._box = None if confine is None else Box(network=network, visible=visible)
        self._pins = Pins(roots)
        if self._box is not None and self._pins.holds_everything():
            msg = "a sandbox whose root is / would hold nothing"
            raise ValueError(msg)
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
                `command_invalid` (empty, a NUL, or longer than a system takes), `env_invalid`,
                `command_not_found`, `cannot_start`; -32002 with `data.uri` if `cwd` does not exist; -32603
                `permission_denied` if it was not allowed, `too_many_terminals`,
                `session_released` if that happened meanwhile. No terminal is left then.
        """
        args = given(params.args, [])
        added = _environment(given(params.env, []))
        _check_command([params.command, *args])
        session = self._session(ctx.session_id)
        with self._locate(given(params.cwd, None), ctx) as place:
            # None: all of ours. Taken anew each time, as ours may change.
            ours = environment(self.env) or dict(os.environ)
            env = with_variables(ours, {**self._changed(), "PWD": place.path, **added})
            seen = self._seen(ctx)
            argv, title = self._command(params.command, args, env, place, seen)
            self._refuse_too_many(session)
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
                command = await session.run(self._start(argv, env, place, ctx))
            finally:
                session.starting -= 1
        terminal_id = f"term-{secrets.token_hex(8)}"
        most = min(given(params.output_byte_limit, self.output_bytes), self.output_bytes)
        try:
            terminal = Terminal(command, most, self.kill_grace)
        except BaseException:
            command.abort()
            raise
        session.terminals[terminal_id] = terminal
        if (show := self.on_output) is not None:
            session_id = ctx.session_id
            terminal.show = lambda text: show(session_id, terminal_id, text)
        if self.life is not None:
            terminal.expire_after(self.life, self._count_expired)
        return v1.CreateTerminalResponse(terminal_id=terminal_id)

    def _refuse_too_many(self, session: _Session) -> None:
        # What is being ended counts: an agent might start faster than commands can be ended.
        everyone = sum(other.count() for other in self._sessions.values())
        for count, limit in ((session.count(), self.per_session), (everyone, self.in_all)):
            if count >= limit:
                facts = {"reason": "too_many_terminals", "limit": limit}
                raise InternalError(facts, "Too many terminals")

    def _count_expired(self) -> None:
        self.expired += 1

    def _changed(self) -> dict[str, str | None]:
        """What our environment says that does not hold where commands run."""
        changed: dict[str, str | None] = {}
        if self._size is not None and os.environ.get("TERM", "dumb") == "dumb":
            changed["TERM"] = "xterm-256color"
        if self._box is not None:
            changed.update(dict.fromkeys(SESSION_VARIABLES), TMPDIR="/tmp")  # noqa: S108 (its own)
        given = self.env
        if not isinstance(given, Mapping):
            return changed
        return {name: value for name, value in changed.items() if name not in given}

    async def _start(
        self, argv: list[str], env: Mapping[str, str], place: Place, ctx: ServiceContext
    ) -> Command:
        try:
            if self._size is None and self._box is None:
                cwd = directory_name(place)
                child = await Child.start(argv, cwd=cwd, env=env, stdin="null", stderr="stdout")
                return Plain(child, child.take_stdout())
            roots = self._pins.roots(ctx)
            return await start_launched(
                argv, env, place=place, size=self._size, box=self._box, roots=roots
            )
        except StartError as error:
            logger.info("a command of the agent was not started: %s", error)
            known = argv[0] == "/bin/sh" or _is_program(argv[0], env, place, self._seen(ctx))
            reason = "cannot_start" if known else "command_not_found"
            raise refusal(reason, command=argv[0]) from error

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
            await session.release()

    async def aclose(self) -> None:
        """End all terminals of all sessions. Idempotent; new ones may be created afterwards."""
        await asyncio.gather(*(self.release_session(session) for session in list(self._sessions)))

    def _session(self, session_id: str) -> _Session:
        return self._sessions.setdefault(session_id, _Session())

    def _find(self, terminal_id: str, ctx: ServiceContext) -> Terminal:
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

    def _seen(self, ctx: ServiceContext) -> Callable[[str], bool] | None:
        """Tells what a confined command can see: of nothing else may an answer tell whether it is."""
        box = self._box
        if box is None:
            return None
        spellings = self._pins.roots(ctx).spellings()
        return lambda path: box.shows(path, {*spellings, *spellings.values()})

    def _command(
        self,
        command: str,
        args: list[str],
        env: Mapping[str, str],
        place: Place,
        seen: Callable[[str], bool] | None,
    ) -> tuple[list[str], str]:
        """The argument list, and the line in which a person sees all of it."""
        if (
            args
            or not self.shell_fallback
            or _PLAIN_WORD.fullmatch(command)
            or _is_program(command, env, place, seen)
        ):
            argv = [command, *args]
            return argv, shlex.join(argv)
        return ["/bin/sh", "-c", command], command


class _Session:
    """The terminals of one session, and how many are being decided about."""

    def __init__(self) -> None:
        self.terminals: dict[str, Terminal] = {}
        self.ending: set[Terminal] = set()
        self.starting = 0
        self._released = False
        self._starts: set[asyncio.Task[Command]] = set()

    def count(self) -> int:
        return len(self.terminals) + len(self.ending) + self.starting

    async def run(self, starting: Coroutine[object, object, Command]) -> Command:
        """Let a command start, unless the session is released before it has."""
        if self._released:
            starting.close()
            raise _session_released()
        start = asyncio.get_running_loop().create_task(starting)
        self._starts.add(start)
        try:
            command = await start
        except asyncio.CancelledError:
            # It may have started all the same, just now.
            start.add_done_callback(_abort_what_started)
            start.cancel()
            if self._released and not _is_being_cancelled():
                raise _session_released() from None
            raise
        finally:
            self._starts.discard(start)
        if self._released:
            command.abort()
            raise _session_released()
        return command

    async def release(self) -> None:
        self._released = True
        starts = list(self._starts)
        for start in starts:
            start.cancel()
        terminals = [*self.terminals.values(), *self.ending]
        results = await asyncio.gather(
            *(terminal.release() for terminal in terminals), *starts, return_exceptions=True
        )
        for result in results[: len(terminals)]:
            if isinstance(result, BaseException):
                raise result


def _session_released() -> InternalError:
    return InternalError({"reason": "session_released"}, "Session released")


def _abort_what_started(start: asyncio.Task[Command]) -> None:
    if not start.cancelled() and start.exception() is None:
        start.result().abort()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_program(
    command: str,
    env: Mapping[str, str],
    place: Place,
    seen: Callable[[str], bool] | None,
) -> bool:
    """Whether a command can be executed as it is, seen from where it will run."""
    if "/" not in command:
        path = env.get("PATH", os.defpath)
        if seen is not None:
            folders = (os.path.join(place.path, folder) for folder in path.split(os.pathsep))
            path = os.pathsep.join(filter(seen, folders))
        found = shutil.which(command, path=path)
        return found is not None and (seen is None or seen(found))
    if seen is not None and not seen(os.path.join(place.path, command)):
        return False
    try:
        status = os.stat(command, dir_fd=place.directory)
        runs = os.access(command, os.X_OK, dir_fd=place.directory)
    except (OSError, ValueError):
        return False
    return runs and stat.S_ISREG(status.st_mode)


def _environment(entries: list[v1.EnvVariable]) -> dict[str, str]:
    """What the agent adds; of a name that comes twice, the last counts."""
    added: dict[str, str] = {}
    if len(entries) > VARIABLES:
        raise refusal("env_invalid", limit=VARIABLES)
    for entry in entries:
        name, value = entry.name, entry.value
        too_long = len(name) + len(value) > WORD_CHARACTERS
        too_wide = name == "PATH" and value.count(os.pathsep) >= PATH_FOLDERS
        if not name or "=" in name or "\0" in name + value or too_long or too_wide:
            raise refusal("env_invalid", name=name[:MOST_SHOWN])
        added[name] = value
    return added


def _check_command(words: list[str]) -> None:
    if (
        not words[0]
        or len(words) > ARGUMENTS
        or sum(map(len, words)) > ALL_CHARACTERS
        or any(len(word) > WORD_CHARACTERS or "\0" in word for word in words)
    ):
        raise refusal("command_invalid")
