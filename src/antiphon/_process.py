"""A child process that cannot hang, leak, or outlive the one who started it.

Responsible for noticing the exit, draining standard error in bounded memory, and ending the whole
process group. Leaves the start, and the text of its failures, to `_launch`; what is written and read
to `transports` and `services`, which take the descriptors.

Own code instead of asyncio's subprocesses, because those wait for grandchildren that hold a pipe
before they report an exit (3.12, 3.13), and hand each chunk through one more turn of the loop.

* Every child is the leader of a session and process group of its own, so that Ctrl-C at our
  terminal does not hit it and a signal reaches what it has started. What leaves the group
  (`setsid`, daemons) cannot be followed and survives. On Windows a job object (`_windows_job`) takes
  the place of the group, which nothing leaves; there is no signal that it could heed, only the end.
* The exit is seen on a pidfd where the system has one, else by a thread. The child is then left a
  zombie until `end`, on purpose: as long as it is one, nobody else can be given its number, and
  signalling its group is safe.
* Where orphans are given to us (we are the first process of a container, or a subreaper), those of
  its group are reaped with it.
* Children that are still there when the interpreter exits are killed with their groups. Where it has
  no time to exit, `_guard` does it.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from antiphon._descriptors import open_reader
from antiphon._errors import ENDING, StartError
from antiphon._guard import guard
from antiphon._launch import Pipes, explain, spawn, words_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

    from antiphon._descriptors import Reader
    from antiphon._launch import StrPath
    from antiphon._windows_job import Job

__all__ = ["Child"]

logger = logging.getLogger("antiphon.process")

#: Of standard error, this much of the end is kept (DESIGN §5).
TAIL_BYTES = 64 * 1024
#: What of a group outlives its leader gets this long between TERM and KILL.
STRAGGLER_GRACE = 0.5
#: A process that was killed is waited for so long; longer means it hangs in the kernel.
KILL_WAIT = 2.0
#: The same where waiting has to block, because the waiting task was cancelled.
BLOCKING_KILL_WAIT = 0.2

_GROUP_POLL = 0.02
_TRACED_POLL = 0.05
_UNKNOWN_STATUS = 255  # as asyncio has it, when somebody else has taken the exit status

_living: set[Child] = set()


class Child:
    """One supervised process; `start` makes it, `end` must be awaited in the end.

    Attributes:
        argv: what was run.
        pid: its process id, which is its group's id too, and stays its own until `end` is done.
    """

    argv: list[str]
    pid: int

    def __init__(self, process: subprocess.Popen[bytes], argv: list[str]) -> None:
        """Not for callers: use `start`."""
        self.argv = argv
        self.pid = process.pid
        self._process = process
        self._owner = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._stdin = -1
        self._stdout = -1
        self._stderr: Reader | None = None
        self._tail = _Tail(TAIL_BYTES)
        self._copy: _Copy | None = None
        self._lines: _Lines | None = None
        self._returncode: int | None = None
        self._reaped = False
        self._group_gone = False
        self._job: Job | None = None  # on Windows
        self._pidfd = -1
        self._thread: threading.Thread | None = None
        self._found: tuple[int, bool] | None = None  # by the thread
        self._waiters: list[asyncio.Future[None]] = []
        self._watchers: list[Callable[[], object]] = []
        self._ending = False
        self._released = asyncio.Event()

    @classmethod
    async def start(
        cls,
        argv: Sequence[StrPath],
        *,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Literal["pipe", "null"] = "pipe",
        stdout: Literal["pipe", "null"] = "pipe",
        stderr: Literal["pipe", "stdout", "inherit", "null"] = "pipe",
        stderr_file: os.PathLike[str] | None = None,
        on_stderr_line: Callable[[str], object] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `argv`, without a shell.

        Args:
            argv: the command and its arguments. A bare name is searched in the PATH of `env`;
                a relative path with a slash starts at `cwd`.
            cwd: its working directory; None for ours.
            env: its whole environment; None to inherit all of ours. See `_launch.environment`.
            stdin: "pipe" (see `take_stdin`) or "null". It never inherits ours.
            stdout: "pipe" (see `take_stdout`) or "null".
            stderr: "pipe" is drained by us, and its end kept in `stderr_tail`; "stdout" joins the
                two; "inherit" leaves it at ours.
            stderr_file: a piped standard error is appended to this file too, which only its owner
                can read if it is new. A file that takes no more is logged once and changes nothing.
            on_stderr_line: called on the loop with each line of a piped standard error, without
                its end; bad UTF-8 is replaced, and what exceeds 64 KiB comes in pieces. What it
                raises changes nothing; the first time it is logged.
            pass_fds: further descriptors that it gets, under the same numbers (not on Windows).
                They stay the caller's.

        Raises:
            StartError: nothing was started; the text says what is wrong. Returns or raises within
                milliseconds and is never suspended, so it cannot be cancelled half-way.
        """
        words = words_of(argv)
        copy = _Copy(stderr_file, words) if stderr_file is not None else None
        try:
            pipes = Pipes(stdin, stdout, stderr)
        except OSError as error:
            if copy is not None:
                copy.close()
            reason = f"cannot make pipes: {error.strerror}"
            raise StartError(reason, command=words) from error
        try:
            process = spawn(words, cwd, env, pipes, pass_fds)
        except (OSError, ValueError) as error:
            pipes.close_ours()
            if copy is not None:
                copy.close()
            reason = explain(error, words, cwd, env)
            raise StartError(reason, command=words) from error
        finally:
            pipes.close_theirs()
        child = cls(process, words)
        try:
            child._stdin, child._stdout = pipes.our_stdin, pipes.our_stdout
            child._copy = copy
            if pipes.our_stderr >= 0:
                child._drain_stderr(pipes.our_stderr, on_stderr_line)
            _living.add(child)
            if sys.platform == "win32":
                child._job = _job_of(child.pid)
            else:
                # After the start: the child begins meanwhile. What is lost is a moment in which we
                # could be killed unnoticed.
                guard.add(child.pid)
            child._watch()
        except BaseException as error:
            child.abort()
            if isinstance(error, RuntimeError):  # there can be no more threads
                reason = f"cannot watch the process: {error}"
                raise StartError(reason, command=words) from error
            raise
        return child

    def _drain_stderr(self, fd: int, on_line: Callable[[str], object] | None) -> None:
        self._lines = _Lines(on_line) if on_line is not None else None
        self._stderr = open_reader(
            self._loop, fd, self._stderr_received, self._stderr_ended, own=True
        )
        self._stderr.resume()

    def _stderr_received(self, data: bytes) -> None:
        self._tail.add(data)
        if self._copy is not None:
            self._copy.write(data)
        if self._lines is not None:
            self._lines.feed(data)

    def _stderr_ended(self, _error: OSError | None) -> None:
        if self._lines is not None:
            self._lines.feed(b"", final=True)

    # ------------------------------------------------------------------ descriptors

    def take_stdin(self) -> int:
        """The writing end of its standard input; the caller owns it from now on.

        It is a pipe that nobody else writes to, so its flags may be changed.
        """
        fd, self._stdin = self._stdin, -1
        return fd

    def take_stdout(self) -> int:
        """The reading end of its standard output; the caller owns it from now on."""
        fd, self._stdout = self._stdout, -1
        return fd

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error, at most 64 KiB, bad UTF-8 replaced; "" if not piped.

        After the exit, what is still in the pipe is included.
        """
        if self._stderr is not None and self._returncode is not None:
            self._stderr.drain(TAIL_BYTES * 2)
        return self._tail.text()

    # ------------------------------------------------------------------ exit

    @property
    def returncode(self) -> int | None:
        """None while it runs; else its exit status, or minus the signal that ended it."""
        return self._returncode

    def on_exit(self, watcher: Callable[[], object]) -> None:
        """Have `watcher` called on the loop, once, when the process has ended (soon, if it has)."""
        if self._returncode is None:
            self._watchers.append(watcher)
        else:
            self._loop.call_soon(watcher)

    async def wait(self) -> int:
        """Wait for the exit of the process itself, whatever its children do; its `returncode`."""
        if self._returncode is None:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        return cast("int", self._returncode)

    async def wait_within(self, seconds: float) -> bool:
        """Wait for the exit, but not longer; tell whether it came."""
        if self._returncode is None and seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait()
        return self._returncode is not None

    def _watch(self) -> None:
        if sys.platform == "linux":
            try:
                self._pidfd = os.pidfd_open(self.pid)
                self._loop.add_reader(self._pidfd, self._look)
            except (OSError, NotImplementedError):  # before Linux 5.3, or forbidden in a sandbox
                self._close_pidfd()
            else:
                return
        thread = threading.Thread(target=self._wait_in_thread, name="antiphon wait", daemon=True)
        thread.start()
        self._thread = thread

    def _wait_in_thread(self) -> None:
        self._found = _wait_for(self._process)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited, *self._found)

    def _look(self) -> None:
        code = _peek(self.pid)
        if code is not None:
            self._exited(*code)
        else:
            # Its descriptor is ready, and will be until a debugger lets go of it.
            self._loop.remove_reader(self._pidfd)
            self._loop.call_later(_TRACED_POLL, self._look_again)

    def _look_again(self) -> None:
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._look)

    def _exited(self, code: int, reaped: bool) -> None:  # noqa: FBT001  (private)
        if self._returncode is not None:
            return
        self._returncode = code
        self._reaped = reaped
        if reaped and not _group_lives(self.pid):  # else it keeps the number from being reused
            guard.remove(self.pid)
        self._close_pidfd()
        if self._released.is_set():  # it had hung in the kernel when `end` gave it up
            self._reap()
            guard.remove(self.pid)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _reap(self) -> None:
        if not self._reaped:
            self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            # What is left of the group keeps its number, and must not be unguarded for a moment.
            if not _group_lives(self.pid):
                guard.remove(self.pid)
        # Popen would otherwise ask for a process that is no longer there.
        self._process.returncode = self._returncode

    def _reap_orphans(self) -> None:
        """Reap what of the group is dead and has been given to us; most systems have another for it."""
        if sys.platform != "win32":
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass

    # ------------------------------------------------------------------ ending

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all of its group; nothing happens if they are gone.

        On Windows, whatever the signal, everything in its job is terminated; the process alone
        where the system has refused a job.
        """
        if sys.platform == "win32":
            if self._job is not None:
                self._job.terminate()
            elif self._returncode is None:
                self._process.terminate()
        elif not self._group_gone:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                self._group_gone = self._reaped
            except PermissionError:
                # macOS says so for a group of zombies; elsewhere the group has changed its user.
                logger.debug("process group %d may not be signalled", self.pid)

    async def end(self, *, stdin_grace: float = 2.0, term_grace: float = 2.0) -> int | None:
        """Make the process and its group go away, by steps, and leave no trace of them.

        Closes standard input if it is still here, waits `stdin_grace` seconds for the exit, sends
        TERM to the group, waits `term_grace` seconds, sends KILL. What is left of the group after
        its leader gets TERM and, half a second later, KILL. Then descriptors and the process entry
        are released.

        Idempotent; several may wait at once. Cancelling it, or any of those who wait, skips the
        waiting: the group is killed at once. Returns the `returncode`; None only where the kernel
        does not let go of the process, which is then reaped when it does.
        """
        if not self._ending:
            self._ending = True
            try:
                await self._descend(stdin_grace, term_grace)
            finally:
                self.abort()
        elif not self._released.is_set():
            try:
                await self._released.wait()
            except asyncio.CancelledError:
                self.signal_group(_KILL)
                raise
        return self._returncode

    async def _descend(self, stdin_grace: float, term_grace: float) -> None:
        if self._stdin >= 0:
            os.close(self.take_stdin())
        if not await self.wait_within(stdin_grace):
            self.signal_group(signal.SIGTERM)
            if not await self.wait_within(term_grace):
                self.signal_group(_KILL)
                if not await self.wait_within(KILL_WAIT):
                    logger.warning("process %d does not end after being killed", self.pid)
                    return
        self._reap()
        if _group_lives(self.pid):
            self.signal_group(signal.SIGTERM)
            left = STRAGGLER_GRACE
            while left > 0 and _group_lives(self.pid):
                await asyncio.sleep(_GROUP_POLL)
                left -= _GROUP_POLL

    def abort(self) -> None:
        """Kill what is left of the process and its group, and release everything, at once.

        For when there is no time, or no loop, to await `end`. Idempotent. Blocks until a killed
        process is gone, which takes about a millisecond, and for at most some 0.2 s.
        """
        if self._released.is_set():
            return
        self._ending = True
        if self._returncode is None or _group_lives(self.pid):
            self.signal_group(_KILL)
            self._wait_blocking()
        if self._returncode is not None:
            self._reap()
            self._reap_orphans()
            self._group_gone = True
            guard.remove(self.pid)
        if self._job is not None:
            self._job.close()  # which ends what has outlived the process
        if self._stderr is not None:
            self._stderr.drain(TAIL_BYTES * 2)
            self._stderr.close()
            self._stderr_ended(None)
            self._stderr = None
        if self._copy is not None:
            self._copy.close()
        for fd in (self.take_stdin(), self.take_stdout()):
            if fd >= 0:
                os.close(fd)
        _living.discard(self)
        self._released.set()

    def _wait_blocking(self) -> None:
        """Wait for killed processes to be gone, which is a matter of milliseconds."""
        deadline = time.monotonic() + BLOCKING_KILL_WAIT
        if self._returncode is None and self._thread is not None:
            self._thread.join(BLOCKING_KILL_WAIT)
            if self._found is not None:
                self._exited(*self._found)
        elif sys.platform != "win32" and self._returncode is None and self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(BLOCKING_KILL_WAIT * 1000)
        while _group_lives(self.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        if sys.platform != "win32" and self._returncode is None and self._thread is None:
            code = _peek(self.pid)
            if code is not None:
                self._exited(*code)

    def kill_now(self) -> None:
        """Kill the group without waiting for anything: for the interpreter's exit."""
        if self._owner == os.getpid() and not self._released.is_set():
            self.signal_group(_KILL)


@atexit.register
def _kill_the_living() -> None:
    for child in list(_living):
        child.kill_now()
    guard.close()


if sys.platform == "win32":
    _KILL = signal.SIGTERM
else:
    _KILL = signal.SIGKILL


def _job_of(pid: int) -> Job | None:
    from antiphon import _windows_job

    job = _windows_job.job_of(pid, _windows_job.kernel32())
    if job is None:
        logger.warning("what process %d starts cannot be ended with it: it got no job object", pid)
    return job


def _peek(pid: int) -> tuple[int, bool] | None:
    """The exit status of a child that has ended, and whether it is reaped; None if it runs."""
    if sys.platform == "win32":
        raise NotImplementedError
    try:
        if not hasattr(os, "waitid"):  # macOS before 3.13
            done, status = os.waitpid(pid, os.WNOHANG)
            return (os.waitstatus_to_exitcode(status), True) if done else None
        # WNOWAIT leaves the zombie, and with it the number, in place.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Somebody waits for all children, or SIGCHLD is ignored: the status is lost.
        logger.warning("the exit status of process %d was taken by other code", pid)
        return _UNKNOWN_STATUS, True
    if found is None:
        return None
    return (found.si_status if found.si_code == os.CLD_EXITED else -found.si_status), False


def _wait_for(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Block until the child has ended; as `_peek`."""
    if sys.platform == "win32":
        return process.wait(), True
    try:
        if not hasattr(os, "waitid"):
            _, status = os.waitpid(process.pid, 0)
            return os.waitstatus_to_exitcode(status), True
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return _UNKNOWN_STATUS, True
    return _peek(process.pid) or (_UNKNOWN_STATUS, True)


def _group_lives(group: int) -> bool:
    """Tell whether a process group has a member that is not a zombie, as far as can be told."""
    if sys.platform == "win32":
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return sys.platform == "linux"
    # Orphans of a container whose first process reaps nobody stay zombies for ever.
    folders = list(Path("/proc").glob("[0-9]*")) if sys.platform == "linux" else []
    return not folders or any(_is_member(folder, group) for folder in folders)


def _is_member(folder: Path, group: int) -> bool:
    try:
        text = (folder / "stat").read_bytes()
    except OSError:  # gone by now
        return False
    # The name before the last parenthesis may contain anything.
    state, _parent, its_group = text.rpartition(b")")[2].split()[:3]
    return int(its_group) == group and state not in {b"Z", b"X"}


# ---------------------------------------------------------------------- standard error


class _Tail:
    """Keeps the end of a byte stream, in amortised constant time per byte."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = bytearray()
        self._cut = False

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._size:
            self._trim()

    def _trim(self) -> None:
        if len(self._data) > self._size:
            del self._data[: -self._size]
            self._cut = True

    def text(self) -> str:
        self._trim()
        data = bytes(self._data)
        if self._cut:  # not in the middle of a character
            data = data.lstrip(bytes(range(0x80, 0xC0)))
        return data.decode("utf-8", "replace")


class _Copy:
    """Appends a byte stream to a file, and gives up on a file that takes no more."""

    def __init__(self, path: os.PathLike[str], command: list[str]) -> None:
        # A named pipe is taken only if it has a reader, and one that does not read is given up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) else error
            reason = f"cannot write standard error to {os.fspath(path)!r}: {text}"
            raise StartError(reason, command=command) from error

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._fd >= 0:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            logger.warning("standard error is no longer copied to its file: %s", error.strerror)
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Lines:
    """Gives a byte stream to a function line by line, in bounded memory."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self._function = function
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._failed = False

    def feed(self, data: bytes, *, final: bool = False) -> None:
        text = self._rest + self._decoder.decode(data, final)
        lines = text.split("\n")
        self._rest = lines.pop()
        if final or len(self._rest) >= TAIL_BYTES:
            if self._rest:
                lines.append(self._rest)
            self._rest = ""
        for line in lines:
            try:
                self._function(line.removesuffix("\r"))
            except ENDING:
                raise
            except BaseException:
                # Once: it may fail on every line, and a traceback costs more than the line.
                if not self._failed:
                    self._failed = True
                    logger.exception("the function for lines of standard error failed")
