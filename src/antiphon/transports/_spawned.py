"""A spawned agent as a peer.

Responsible for joining a supervised process (`_process.Child`) and a stream of frames: what it means
for the link when the process ends, closes one of its pipes, or leaves them to a child of its own,
and in which order closing happens. Leaves the process to `_process`, the bytes to `_stream`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from antiphon._errors import ConnectionClosed
from antiphon._launch import environment, redact
from antiphon._process import Child
from antiphon.transports._stream import StreamTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon._launch import Environment, StrPath
    from antiphon.core import Limits
    from antiphon.transports._transport import Receiver

__all__ = ["ProcessTransport"]

#: A process that has closed a pipe is usually about to exit. Its status is worth so much waiting.
EXIT_GRACE = 0.5


class ProcessTransport(StreamTransport):
    """Frames over the standard input and output of a process of ours; satisfies `Transport`.

    The process leads a session and group of its own (Ctrl-C at our terminal does not reach it). Its
    standard error is drained all the time, and the last 64 KiB are kept. Lines on its standard
    output that are no protocol are frames like others here; `core` tells them apart.

    The connection is lost when the process ends (after what it has written is delivered, also if a
    child of it keeps the pipe open), when it closes its output, or when it no longer takes input;
    then with a `ConnectionClosed` that has the exit status, if that comes within half a second, and
    the end of standard error.

    Args:
        argv: command and arguments, run without a shell.
        cwd: working directory; None for ours.
        env: what it is given of our environment. None or "inherit": all that is in it, secrets too.
            "essential": what programs need to find themselves and their user. A mapping: the
            essential and these; a value that is None leaves its name out. `inherit_env` makes one
            of names, patterns and what is added.
        stderr: None to keep only the tail; a function to be called with each line as well; a path,
            to have all of it appended to that file as well; or "inherit" to leave standard error
            where ours goes (then there is no tail).
        limits: `frame_bytes` is used.
        stdin_grace: seconds from closing standard input to TERM.
        term_grace: seconds from TERM to KILL.

    Raises:
        ValueError: `env` is no environment: an empty name, a name with "=", a NUL. `stderr` is text
            other than "inherit": a path is a `pathlib.Path`, so that no word is taken for one.
        TypeError: a name in `env` is no string, or a value neither a string nor None.
    """

    def __init__(
        self,
        argv: Sequence[StrPath],
        *,
        cwd: StrPath | None = None,
        env: Environment = None,
        stderr: Callable[[str], object] | os.PathLike[str] | Literal["inherit"] | None = None,
        limits: Limits | None = None,
        stdin_grace: float = 2.0,
        term_grace: float = 2.0,
    ) -> None:
        super().__init__(limits)
        self._argv = argv
        self._cwd = cwd
        self._env = environment(env)
        word: object = stderr
        if isinstance(word, str) and word != "inherit":
            msg = f'stderr is "inherit", a pathlib.Path or a function, not {word!r}'
            raise ValueError(msg)
        self._stderr = stderr
        self._stdin_grace = stdin_grace
        self._term_grace = term_grace
        self._child: Child | None = None
        self._reason = "the agent's process ended"
        self._exit_timer: asyncio.TimerHandle | None = None

    @property
    def argv(self) -> list[str]:
        """Command and arguments, as they were given."""
        return [os.fspath(word) for word in self._argv]

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._child is None else self._child.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; else the exit status, or minus the signal that ended it."""
        return None if self._child is None else self._child.returncode

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error so far, at most 64 KiB.

        Secrets of its environment are left out (`redact`), since this is what errors quote; a function
        given as `stderr` gets every line as it was written.
        """
        return "" if self._child is None else redact(self._child.stderr_tail, self._env)

    @property
    def unfinished(self) -> bytes:
        """The beginning of a line that it has written without an end; a question to a person, perhaps."""
        return self._framer.unfinished

    async def start(self, receiver: Receiver) -> None:
        """Start the process and begin to deliver.

        Raises:
            StartError: it could not be started, within milliseconds; the text says whether the
                command, its interpreter, the working directory or the file for standard error is
                at fault. One that ends right after is `connection_lost`.
        """
        self._claim(receiver)
        function = self._stderr if callable(self._stderr) else None
        place = None if callable(self._stderr) else self._stderr
        child = await Child.start(
            self._argv,
            cwd=self._cwd,
            env=self._env,
            stderr="inherit" if isinstance(place, str) else "pipe",
            stderr_file=None if isinstance(place, str) else place,
            on_stderr_line=function,
        )
        self._child = child
        try:
            self._open(child.take_stdout(), child.take_stdin(), own=True)
        except BaseException:
            child.abort()
            raise
        child.on_exit(self._exited)

    def describe(self) -> str:
        """Name it in logs and errors: "process 4711 (my-agent)"."""
        name = Path(self._argv[0]).name if self._argv else "no command"
        return f"process ({name})" if self._child is None else f"process {self.pid} ({name})"

    @property
    def info(self) -> dict[str, Any]:
        """The kind, "stdio", and that the peer is nobody's but ours."""
        return {"kind": "stdio", "peer": None}

    async def aclose(self) -> None:
        """End the process and all of its group.

        Writes what was sent, closes standard input, waits 2 s, sends TERM to the group, waits 2 s,
        sends KILL, and sweeps what is left of the group. What the process writes meanwhile is read
        and dropped. `connection_lost(None)` comes first, if it has not come.

        Idempotent; several may wait. Cancelled, it kills the group at once.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            self._lose(None)
            if self._reader is not None:
                self._reader.resume()
            if self._child is not None:
                await self._end(self._child)
        finally:
            self._stop_timer()
            self._close_writer()
            if self._child is not None:
                self._child.abort()
            self._close_reader()
            self._closed.set()

    async def _end(self, child: Child) -> None:
        flushed = await self._flush(self._stdin_grace)
        self._close_writer()
        # A process that takes no input will not see the end of it either.
        grace = self._stdin_grace if flushed else 0.0
        await child.end(stdin_grace=grace, term_grace=self._term_grace)

    def _input_over(self, error: OSError | None) -> None:
        self._end_soon("the agent closed its output")

    def _output_failed(self, error: OSError) -> None:
        self._close_writer()
        self._end_soon("the agent closed its input")

    def _end_soon(self, reason: str) -> None:
        """Lose the connection when the exit status is there, or will not come."""
        if self._child is None or self._child.returncode is not None:
            self._finish()
        elif self._exit_timer is None:
            self._reason = reason
            loop = asyncio.get_running_loop()
            self._exit_timer = loop.call_later(EXIT_GRACE, self._finish)

    def _exited(self) -> None:
        self._stop_timer()
        if self._closing or self._lost:
            return
        self._reason = "the agent's process ended"
        if self._reader is None or self._reader.pollable:
            self._finish()
        else:
            # A thread is reading what is left; the end of it comes unless a grandchild has it.
            self._hurry()
            loop = asyncio.get_running_loop()
            self._exit_timer = loop.call_later(EXIT_GRACE, self._finish)

    def _stop_timer(self) -> None:
        if self._exit_timer is not None:
            self._exit_timer.cancel()
            self._exit_timer = None

    def _last_word(self) -> Exception:
        return ConnectionClosed(
            self._reason, exit_status=self.exit_status, stderr_tail=self.stderr_tail
        )
