"""Starting a program, and saying in one phrase why it could not be started.

Responsible for the pipes, the call of the operating system, and telling apart whether the working
directory, the command or its interpreter is at fault. Leaves the running process to `_process`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from antiphon._errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    StrPath = str | os.PathLike[str]

__all__ = ["Pipes", "explain", "inherit_env", "spawn", "words_of"]


class Pipes:
    """What a child gets as its three standard descriptors, and our ends of them (or -1).

    Raises:
        OSError: too many open files; nothing is left open.
    """

    def __init__(
        self,
        stdin: Literal["pipe", "null"],
        stdout: Literal["pipe", "null"],
        stderr: Literal["pipe", "stdout", "inherit", "null"],
    ) -> None:
        self._theirs: list[int] = []
        self.our_stdin = self.our_stdout = self.our_stderr = -1
        self.stdin = self.stdout = self.stderr = subprocess.DEVNULL
        self.inherit_stderr = stderr == "inherit"
        try:
            if stdin == "pipe":
                self.stdin, self.our_stdin = os.pipe()
                self._theirs.append(self.stdin)
            if stdout == "pipe":
                self.our_stdout, self.stdout = os.pipe()
                self._theirs.append(self.stdout)
            if stderr == "pipe":
                self.our_stderr, self.stderr = os.pipe()
                self._theirs.append(self.stderr)
            elif stderr == "stdout":
                self.stderr = subprocess.STDOUT
        except BaseException:
            self.close_theirs()
            self.close_ours()
            raise

    def close_theirs(self) -> None:
        """Close the child's ends, which it has inherited by now."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()

    def close_ours(self) -> None:
        """Close our ends, when there is no child."""
        for fd in (self.our_stdin, self.our_stdout, self.our_stderr):
            if fd >= 0:
                os.close(fd)


def spawn(
    words: list[str], cwd: StrPath | None, env: Mapping[str, str] | None, pipes: Pipes
) -> subprocess.Popen[bytes]:
    """Start the program. Raises what Popen does, for `explain`."""
    # Blocks for no longer than the system takes to begin the program; without waiting there is no
    # moment at which a cancellation could lose a process that has just been started.
    return subprocess.Popen(
        words,
        bufsize=0,
        cwd=cwd,
        env=env,
        stdin=pipes.stdin,
        stdout=pipes.stdout,
        stderr=None if pipes.inherit_stderr else pipes.stderr,
        start_new_session=sys.platform != "win32",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def words_of(argv: Sequence[StrPath]) -> list[str]:
    """Check `argv` and make strings of it.

    Raises:
        TypeError: it is one string, or has members that are neither strings nor paths.
        StartError: it is empty.
    """
    if isinstance(argv, str):
        msg = "argv must be a list of words; shlex.split() makes one of a command line"
        raise TypeError(msg)
    words = [os.fspath(word) for word in argv]
    if not words or not words[0]:
        msg = "no command was given"
        raise StartError(msg, command=words)
    return words


def explain(
    error: Exception, argv: list[str], cwd: StrPath | None, env: Mapping[str, str] | None
) -> str:
    """Say in one phrase what is at fault: the working directory, the command or its interpreter."""
    command = argv[0]
    if not isinstance(error, OSError):
        return f"cannot start {command!r}: {error}"
    text = error.strerror or str(error)
    if cwd is not None and (reason := _explain_cwd(Path(cwd))):
        return reason
    if error.errno not in {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR}:
        return f"cannot start {command!r}: {text}"
    path = _locate(command, cwd, env)
    if path is None:
        if Path(command).name != command:
            return f"the command {command!r} does not exist"
        return f"the command {command!r} was not found on PATH"
    if path.is_dir():
        return f"the command {str(path)!r} is a directory"
    if not os.access(path, os.X_OK):
        return f"the command {str(path)!r} is not executable"
    return _explain_program(path, error.errno, text)


def _explain_cwd(cwd: Path) -> str | None:
    try:
        mode = cwd.stat().st_mode
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"the working directory {str(cwd)!r} does not exist"
        return f"the working directory {str(cwd)!r} cannot be entered: {error.strerror}"
    if not stat.S_ISDIR(mode):
        return f"the working directory {str(cwd)!r} is not a directory"
    if not os.access(cwd, os.X_OK):
        return f"the working directory {str(cwd)!r} cannot be entered: permission denied"
    return None


def _locate(command: str, cwd: StrPath | None, env: Mapping[str, str] | None) -> Path | None:
    """The file that the system tried to run: the first executable one, else the first one."""
    if Path(command).name != command:
        path = Path(cwd or "", command)
        return path if os.path.lexists(path) else None
    paths = [Path(folder, command) for folder in os.get_exec_path(env)]
    found = [path for path in paths if path.is_file()]
    return next((path for path in found if os.access(path, os.X_OK)), found[0] if found else None)


def _explain_program(path: Path, number: int, text: str) -> str:
    first = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        first = file.readline(512)
    if first.startswith(b"#!"):
        words = first[2:].rstrip(b"\n").split(None, 1)
        if not words:
            return f"the script {str(path)!r} names no interpreter after its #!"
        interpreter = words[0].decode("utf-8", "replace")
        # A script with CRLF line ends asks for an interpreter whose name ends in CR.
        if first.endswith(b"\r\n") and len(words) == 1:
            interpreter += "\r"
        return f"the interpreter {interpreter!r} of the script {str(path)!r} cannot be run: {text}"
    if number == errno.ENOEXEC:
        return f"the command {str(path)!r} is neither a program for this system nor a script"
    if number == errno.ENOENT:
        return f"the command {str(path)!r} exists, but a loader or library it names does not"
    return f"cannot start {str(path)!r}: {text}"


#: What most programs cannot do without, on any system; nothing of it is secret.
ESSENTIAL = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "TERM"),
    *("LANG", "LC_ALL", "LC_CTYPE", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"),
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "TEMP", "TMP"),
    *("USERPROFILE", "USERNAME", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "PROGRAMFILES"),
)


def inherit_env(*names: str, **extra: str) -> dict[str, str]:
    """Make an environment that leaks no secrets of ours.

    It holds the variables that programs need to find themselves and their user (PATH, HOME, LANG,
    SYSTEMROOT and the like), those called `names` that are set here, and `extra`.
    """
    return {name: os.environ[name] for name in (*ESSENTIAL, *names) if name in os.environ} | extra
