"""A running command of a terminal, in the three ways that there are: plain, in a pty, in a sandbox.

A plain command is a child like any other. The other two are begun by `_inside`, which an interpreter
of its own runs in the child, and which speaks with us over a socket; here is our half of that.
What a sandbox is made of is left to `_bwrap`, the process to `_process`, its output to `_terminals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from typing import TYPE_CHECKING, Final, Protocol

from antiphon._descriptors import open_reader, open_writer
from antiphon._errors import StartError
from antiphon._process import Child
from antiphon.services import _bwrap, _pty
from antiphon.services._confine import open_anything, open_directory
from antiphon.services._seccomp import without_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.services._confine import Place, Roots

__all__ = ["Command", "Plain", "directory_name", "start_launched"]

#: A terminal or a sandbox is made within some 50 ms; one that is not is given up.
START_SECONDS: Final = 20.0
#: What is left in a sandbox after its command gets this long between TERM and KILL.
STRAGGLER_GRACE: Final = 0.5
# A line from `_inside` is shorter.
_LINE_BYTES: Final = 256
# What may come with the answer, before anybody listens: a command can end that fast.
_UNHEARD: Final = 4
_KILLED: Final = 9


class Command(Protocol):
    """A command that runs or has run; `end` must be awaited in the end."""

    #: Its output, which the caller owns.
    output: int
    #: None unless it runs in a pty.
    silence: _pty.Silence | None

    @property
    def returncode(self) -> int | None:
        """None while it runs; else its exit code, or minus the signal that ended it."""
        ...

    def on_exit(self, watcher: Callable[[], object]) -> None:
        """Have `watcher` called on the loop, once, when the command itself has ended."""
        ...

    async def end(self, grace: float) -> object:
        """End it and what it has started: TERM, `grace` seconds, KILL. Idempotent."""
        ...

    def abort(self) -> None:
        """Kill it and what it has started at once, and close `output`, which nobody has taken."""
        ...


class Plain:
    """A command that is a child of ours, and whose group is all that it has started."""

    def __init__(self, child: Child, output: int, silence: _pty.Silence | None = None) -> None:
        self.output = output
        self.silence = silence
        self.on_exit = child.on_exit
        self._child = child

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def end(self, grace: float) -> object:
        return await self._child.end(stdin_grace=0, term_grace=grace)

    def abort(self) -> None:
        self._child.abort()
        os.close(self.output)
        if self.silence is not None:
            self.silence.close()


class Boxed:
    """A command in a sandbox, whose first process is ours and outlives it."""

    def __init__(
        self, child: Child, control: _Control, output: int, silence: _pty.Silence | None
    ) -> None:
        self.output = output
        self.silence = silence
        self._child = child
        self._control = control
        self._returncode: int | None = None
        self._exited = asyncio.Event()
        self._watchers: list[Callable[[], object]] = []
        child.on_exit(self._box_ended)
        control.listen(self._told)

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def on_exit(self, watcher: Callable[[], object]) -> None:
        if self._returncode is None:
            self._watchers.append(watcher)
        else:
            asyncio.get_running_loop().call_soon(watcher)

    def _told(self, words: list[str]) -> None:
        if len(words) == 2 and words[0] == "exited":
            # Others in the sandbox can write to us if they try hard: their numbers may be any.
            with contextlib.suppress(ValueError, OverflowError):
                self._end_is(os.waitstatus_to_exitcode(int(words[1])))

    def _box_ended(self) -> None:
        # What its first process has said last may not have been read yet. If it did not come to
        # say anything, it was killed, and so was everything else in there.
        self._control.drain()
        self._end_is(-_KILLED)

    def _end_is(self, code: int) -> None:
        if self._returncode is None:
            self._returncode = code
            self._exited.set()
            for watcher in self._watchers:
                watcher()

    async def end(self, grace: float) -> object:
        try:
            if self._child.returncode is None:
                self._control.ask_to_end()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self._exited.wait()
                if self._returncode is not None:
                    await self._child.wait_within(STRAGGLER_GRACE)
        finally:
            try:
                # With its first process everything in the sandbox ends, and cannot escape that.
                await self._child.end(stdin_grace=0, term_grace=0)
            finally:
                self._control.close()
        return self._returncode

    def abort(self) -> None:
        self._child.abort()
        self._control.close()
        os.close(self.output)
        if self.silence is not None:
            self.silence.close()


class _Control:
    """Our end of the socket to `_inside`."""

    def __init__(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener: Callable[[list[str]], None] | None = None
        self._unheard: list[list[str]] = []
        self._first: asyncio.Future[list[str]] = loop.create_future()
        self._begun = False
        self._rest = b""
        writing = os.dup(ours.fileno())
        self._reader = open_reader(loop, ours.detach(), self._received, self._ended, own=True)
        self._writer = open_writer(
            loop,
            writing,
            paused=lambda: None,
            resumed=lambda: None,
            failed=lambda _error: None,
            own=True,
        )
        self._reader.resume()

    def listen(self, listener: Callable[[list[str]], None]) -> None:
        """Have what comes after the answer given to `listener`; what has come, at once."""
        self._listener = listener
        for words in self._unheard:
            listener(words)

    def order(self, order: bytes) -> None:
        self._writer.write(order)

    def ask_to_end(self) -> None:
        self._writer.write(b"T")

    def drain(self) -> None:
        self._reader.drain(_LINE_BYTES * 4)

    def lost(self) -> None:
        """The process is gone."""
        self.drain()
        self._answer(["lost"])

    async def answer(self) -> list[str]:
        """What became of the order: "started", "became", "lost", or "failed" STEP ERRNO."""
        return await self._first

    def _answer(self, words: list[str]) -> None:
        if not self._first.done():
            self._first.set_result(words)

    def _received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_LINE_BYTES]
        for line in lines:
            words = line[:_LINE_BYTES].decode("ascii", "replace").split()
            if words == ["begun"]:
                self._begun = True
            elif not self._first.done():
                self._answer(words)
            elif self._listener is not None:
                self._listener(words)
            elif len(self._unheard) < _UNHEARD:
                self._unheard.append(words)

    def _ended(self, _error: OSError | None) -> None:
        # A descriptor that closes when a program takes the place of this one.
        self._answer(["became"] if self._begun else ["lost"])

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


async def start_launched(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    place: Place,
    size: tuple[int, int] | None,
    box: _bwrap.Box | None,
    roots: Roots,
) -> Command:
    """Start a command in a pty of `size`, or in a sandbox, or in both.

    Raises:
        StartError: it was not started, and nothing is left of the attempt.

    Cancelled, it kills what was started.
    """
    launch = _Launch(argv, env, place, roots)
    try:
        return await launch.run(size, box)
    except OSError as error:
        reason = f"cannot start {argv[0]!r}: {error.strerror or error}"
        raise StartError(reason, command=list(argv)) from error
    finally:
        launch.close()


class _Launch:
    """One start, and the descriptors that are ours only while it lasts."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], place: Place, roots: Roots
    ) -> None:
        self._argv = argv
        self._env = env
        self._place = place
        self._roots = roots
        self._open: list[int] = []
        self._output = -1

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
        if self._output >= 0:
            os.close(self._output)

    async def run(self, size: tuple[int, int] | None, box: _bwrap.Box | None) -> Command:
        try:
            order = self._order(size is not None, box is not None)
        except UnicodeEncodeError as error:
            reason = f"cannot start {self._argv[0]!r}: {error}"
            raise StartError(reason, command=list(self._argv)) from error
        self._output, theirs = os.pipe() if size is None else _pty.open_pty(size)
        self._open.append(theirs)
        ours, other = socket.socketpair()
        with ours, other:
            control = _Control(ours)
            try:
                child = await self._child(box, other.fileno(), theirs)
            except BaseException:
                control.close()
                raise
        silence: _pty.Silence | None = None
        try:
            # A pipe takes all of it at once.
            with os.fdopen(child.take_stdin(), "wb") as file:
                file.write(_program())
            control.order(order)
            child.on_exit(control.lost)
            await self._started(child, control)
            if size is not None:
                silence = _pty.Silence(asyncio.get_running_loop(), self._output, theirs)
            command = (
                Boxed(child, control, self._output, silence)
                if box
                else Plain(child, self._output, silence)
            )
        except BaseException:
            child.abort()
            control.close()
            if silence is not None:
                silence.close()
            raise
        if box is None:
            control.close()
        self._output = -1  # the command's from now on
        return command

    async def _child(self, box: _bwrap.Box | None, control: int, output: int) -> Child:
        python = box.python if box else _bwrap.interpreter()
        words = [python, "-I", "-S", "-", str(control), str(output)]
        passed = [control, output]
        if box is not None:
            words = [*self._boxed(box), *words]
            passed += self._open[1:]
        return await Child.start(
            words,
            cwd="/" if box else directory_name(self._place),
            env=_bwrap.environment_of_tools(),
            stdin="pipe",
            stdout="null",
            pass_fds=passed,
        )

    def _boxed(self, box: _bwrap.Box) -> list[str]:
        spellings = self._roots.spellings()
        reals = set(spellings.values())
        outer = sorted(real for real in reals if not _bwrap.below(real, reals - {real}))
        if b"/" in outer:
            reason = "a sandbox whose root is / would hold nothing"
            raise StartError(reason, command=list(self._argv))
        if _bwrap.below(os.fsencode(box.program), outer):
            reason = f"{box.program} lies in a root, where it may be exchanged"
            raise StartError(reason, command=list(self._argv))
        bound = {real: self._hold(open_directory(real)) for real in outer}
        # Nobody may have put a link to something else in the place of what may be seen; in a root
        # it is seen as it is.
        shown = {
            real: self._hold(open_anything(real))
            for real in box.shown
            if not _bwrap.below(real, outer)
        }
        # Its name now, if it still has one in a root: `_inside` looks whether it leads there.
        cwd = os.readlink(os.fsencode(f"/proc/self/fd/{self._place.directory}"))
        calls = self._hold(_bwrap.as_file(without_keys()))
        arguments = _bwrap.as_arguments(box.arguments(spellings, bound, shown, calls, cwd))
        return [box.program, "--args", str(self._hold(arguments))]

    def _hold(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def _order(self, terminal: bool, supervise: bool) -> bytes:  # noqa: FBT001  (private)
        from antiphon.services import _inside  # what it imports, Windows does not have

        place = os.stat(self._place.directory)
        return _inside.pack(
            supervise=supervise,
            terminal=terminal,
            place=f"{place.st_dev}:{place.st_ino}" if supervise else "",
            argv=[os.fsencode(word) for word in self._argv],
            env={os.fsencode(name): os.fsencode(value) for name, value in self._env.items()},
        )

    async def _started(self, child: Child, control: _Control) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await control.answer()
        except TimeoutError:
            answer = ["late"]
        if answer in (["started"], ["became"]):
            return
        if answer[0] == "failed" and len(answer) == 3:
            step, number = answer[1], int(answer[2])
            said = {
                "cwd": "its directory has been exchanged for another",
                "apart": "the first process of its sandbox cannot be kept out of its reach",
                "terminal": f"it cannot be given its terminal: {os.strerror(number)}",
            }.get(step, os.strerror(number))
        else:
            said = child.stderr_tail.strip() or "what begins it ended with no word"
        reason = f"cannot start {self._argv[0]!r}: {said}"
        raise StartError(reason, command=list(self._argv))


def directory_name(place: Place) -> str:
    """A path that leads to the directory that was checked, and nowhere else where that can be had."""
    # The descriptor's own name leads there, even if its path now leads elsewhere: the child changes
    # its directory before it closes what it does not inherit.
    name = f"/proc/self/fd/{place.directory}"
    return name if sys.platform == "linux" and os.access(name, os.F_OK) else place.path


@functools.cache
def _program() -> bytes:
    from importlib import resources  # slow, and needed nowhere else

    return resources.files("antiphon.services").joinpath("_inside.py").read_bytes()
