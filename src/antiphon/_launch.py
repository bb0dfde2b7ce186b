"""Starting a program, and saying in one phrase why it could not be started.

Responsible for the environment, the pipes, the call of the operating system, what Windows needs to
start a batch file, and telling apart whether the working directory, the command or its interpreter is
at fault. Leaves the running process to `_process`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from antiphon._errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    StrPath = str | os.PathLike[str]

__all__ = [
    "Environment",
    "Pipes",
    "batch_line",
    "environment",
    "explain",
    "find_on_windows",
    "inherit_env",
    "redact",
    "spawn",
    "with_variables",
    "words_of",
]

#: What a child is given of our environment; see `environment`.
Environment: TypeAlias = 'Mapping[str, str | None] | Literal["inherit", "essential"] | None'


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
    words: list[str],
    cwd: StrPath | None,
    env: Mapping[str, str] | None,
    pipes: Pipes,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start the program, which inherits `pass_fds` too. Raises what Popen does, for `explain`."""
    # Blocks for no longer than the system takes to begin the program; without waiting there is no
    # moment at which a cancellation could lose a process that has just been started.
    command: str | list[str] = words
    shell: str | None = None
    if sys.platform == "win32":
        command, shell = _for_windows(words, env)
    return subprocess.Popen(
        command,
        bufsize=0,
        executable=shell,
        cwd=cwd,
        env=env,
        stdin=pipes.stdin,
        stdout=pipes.stdout,
        stderr=None if pipes.inherit_stderr else pipes.stderr,
        start_new_session=sys.platform != "win32",
        pass_fds=pass_fds,
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
    shown = _shown(command, path, cwd)
    if path.is_dir():
        return f"the command {shown!r} is a directory"
    if not os.access(path, os.X_OK):
        return f"the command {shown!r} is not executable"
    return _explain_program(path, shown, error.errno, text)


def _shown(command: str, path: Path, cwd: StrPath | None) -> str:
    """A path as it was given, which is what its writer looks for; else where it was found."""
    found_elsewhere = Path(command).name == command or (
        cwd is not None and not Path(command).is_absolute()
    )
    return str(path) if found_elsewhere else command


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


def _explain_program(path: Path, shown: str, number: int, text: str) -> str:
    first = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        first = file.readline(512)
    if first.startswith(b"#!"):
        words = first[2:].rstrip(b"\n").split(None, 1)
        if not words:
            return f"the script {shown!r} names no interpreter after its #!"
        interpreter = words[0].decode("utf-8", "replace")
        # A script with CRLF line ends asks for an interpreter whose name ends in CR.
        if first.endswith(b"\r\n") and len(words) == 1:
            interpreter += "\r"
        return f"the interpreter {interpreter!r} of the script {shown!r} cannot be run: {text}"
    if number == errno.ENOEXEC:
        return f"the command {shown!r} is neither a program for this system nor a script"
    if number == errno.ENOENT:
        return f"the command {shown!r} exists, but a loader or library it names does not"
    return f"cannot start {shown!r}: {text}"


# ---------------------------------------------------------------------- environment

#: What most programs cannot do without, on any system; nothing of it is secret.
ESSENTIAL = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "TERM"),
    *("LANG", "LC_ALL", "LC_CTYPE", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"),
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "TEMP", "TMP"),
    *("USERPROFILE", "USERNAME", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "PROGRAMFILES"),
)


def environment(policy: Environment) -> dict[str, str] | None:
    """The whole environment that a child gets; None for all of ours, as it is when it starts.

    Args:
        policy: None or "inherit" for all of ours; "essential" for what programs need to find
            themselves and their user; a mapping for the essential and these, where a value that is
            None leaves its name out. So no program is left without PATH, HOME or SYSTEMROOT
            because it was given one variable (field fault 41).

    Raises:
        ValueError: another word; a name that is empty or has a "=" or a NUL in it, a value with a
            NUL; on Windows, two names that differ in case only. No text shows a value.
        TypeError: neither None nor a word nor a mapping; a name that is no string, a value that is
            neither a string nor None.
    """
    if policy is None or policy == "inherit":
        return None
    if policy == "essential":
        return inherit_env()
    takes = 'env is None, "inherit", "essential" or a mapping of names to values'
    if isinstance(policy, str):
        msg = f"{takes}, not {policy!r}"
        raise ValueError(msg)  # noqa: TRY004  (a word of the right type)
    if not isinstance(policy, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        # Its type alone: the values of an environment are in no text.
        msg = f"{takes}, not a value of type {type(policy).__name__}"
        raise TypeError(msg)
    return with_variables(inherit_env(), policy)


def with_variables(base: Mapping[str, str], more: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with some variables set, or left out where their value is None.

    Raises:
        ValueError, TypeError: as `environment` for a mapping.
    """
    given = {name: "" if value is None else value for name, value in more.items()}
    _checked(given)
    if sys.platform == "win32":
        folded = {name.upper() for name in given}
        base = {name: value for name, value in base.items() if name.upper() not in folded}
    whole: dict[str, str | None] = {**base, **more}
    return {name: value for name, value in whole.items() if value is not None}


def inherit_env(*names: str, **extra: str) -> dict[str, str]:
    """Make an environment that has of ours only what is asked for.

    It holds the variables that programs need to find themselves and their user (PATH, HOME, LANG,
    SYSTEMROOT and the like), those called `names` that are set here, and `extra`. A name that ends
    in `*` stands for all that begin so: `inherit_env("GIT_*", "SSH_AUTH_SOCK", DEBUG="1")`.

    Raises:
        ValueError: a name that no variable can have, or a `*` elsewhere than at the end.
        TypeError: a value of `extra` that is no string.
    """
    env = {name: os.environ[name] for name in ESSENTIAL if name in os.environ}
    for name in names:
        start = name.removesuffix("*")
        if "*" in start:
            msg = f"{name!r}: a * stands at the end of a name"
            raise ValueError(msg)
        if start == name:
            _check_name(name)
            found = [name] if name in os.environ else []
        else:
            found = [other for other in os.environ if other.startswith(start)]
        env.update((other, os.environ[other]) for other in found)
    return env | _checked(extra)


#: Names of variables whose values are nobody else's business, and how short a value may be before
#: replacing it would tear other words apart.
# Compiled (and then kept by `re`) for the first text that is shown: most programs show none.
_PRIVATE_NAME = (
    r"(?i)(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PAT|CREDENTIALS?)(?:_|$)"
)
_SECRET_LENGTH = 8


def redact(text: str, env: Mapping[str, str] | None) -> str:
    """Put the names of secrets in the place of their values: for text that ends in errors and logs.

    A secret is the value, of 8 characters or more, of a variable in `env` (None: of ours) that is called
    KEY, TOKEN, SECRET, PASSWORD or the like. What a program was not given by its environment is
    not known here and stays.
    """
    secrets = [
        (value, name)
        for name, value in (os.environ if env is None else env).items()
        if len(value) >= _SECRET_LENGTH and re.search(_PRIVATE_NAME, name)
    ]
    for value, name in sorted(secrets, key=lambda secret: -len(secret[0])):
        text = text.replace(value, f"[{name}]")
    return text


def _checked(variables: Mapping[str, str]) -> dict[str, str]:
    seen: dict[str, str] = {}
    for name, value in variables.items():
        _check_name(name)
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            msg = f"the environment variable {name!r} has a value that is no string"
            raise TypeError(msg)
        if "\0" in value:
            msg = f"the environment variable {name!r} has a NUL in its value"
            raise ValueError(msg)
        if sys.platform == "win32" and seen.setdefault(name.upper(), name) != name:
            msg = (
                f"the environment variables {seen[name.upper()]!r} and {name!r} are one on Windows"
            )
            raise ValueError(msg)
    return dict(variables)


def _check_name(name: str) -> None:
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = f"the name {name!r} of an environment variable is no string"
        raise TypeError(msg)
    if not name or "=" in name or "\0" in name:
        msg = f"an environment variable cannot be called {name!r}"
        raise ValueError(msg)


# ---------------------------------------------------------------------- Windows


def _for_windows(
    words: list[str], env: Mapping[str, str] | None
) -> tuple[str | list[str], str | None]:
    """What CreateProcess needs for this command: a command line, and the shell if it takes one."""
    path = find_on_windows(words[0], env)
    if path is None:
        return words, None  # let the system say so
    if not path.lower().endswith((".cmd", ".bat")):
        return [path, *words[1:]], None
    shell = _variable(env, "COMSPEC") or "cmd.exe"
    return batch_line(shell, [path, *words[1:]]), shell


def find_on_windows(command: str, env: Mapping[str, str] | None) -> str | None:
    """The file that a command means: CreateProcess itself adds no ending but `.exe`.

    `npx` is `npx.cmd`. The endings are those of PATHEXT. A bare name is searched in the PATH of
    `env` alone, not in the current folder: what happens to lie there must not be run.
    """
    endings = (_variable(env, "PATHEXT") or ".COM;.EXE;.BAT;.CMD").split(";")
    folders = [""]
    if not re.search(r"[\\/:]", command):
        folders = [entry for entry in _variable(env, "PATH").split(os.pathsep) if entry]
    for folder in folders:
        base = os.path.join(folder, command)  # noqa: PTH118  (as text: "./x" is not "x")
        named = [base] if Path(command).suffix.upper() in map(str.upper, endings) else []
        for path in (*named, *(base + ending for ending in endings if ending)):
            if Path(path).is_file():
                return path
    return None


def _variable(env: Mapping[str, str] | None, name: str) -> str:
    """A variable by its name in any case, as on Windows; "" if there is none."""
    for other, value in (os.environ if env is None else env).items():
        if other.upper() == name:
            return value
    return ""


def batch_line(shell: str, words: list[str]) -> str:
    """The command line by which `cmd.exe` runs a batch file with exactly these arguments.

    A batch file is text that `cmd.exe` reads, and it would act on what an argument contains. So every
    word is quoted; quotes are doubled; a percent sign is followed by an expansion of nothing, since
    it cannot be escaped; and delayed expansion is off.

    Raises:
        ValueError: a line break, which no quoting keeps, or a NUL.
    """
    quoted: list[str] = []
    for word in words:
        if re.search(r"[\r\n\0]", word):
            msg = "a batch file takes no line break or NUL in an argument"
            raise ValueError(msg)
        # The program behind the batch file reads backslashes before a quote as escapes.
        text = re.sub(r'(\\*)"', r'\1\1""', word)
        text = re.sub(r"(\\+)$", r"\1\1", text)
        quoted.append(f'"{text.replace("%", "%%cd:~,%")}"')
    return f'"{shell}" /d /e:ON /v:OFF /s /c "{" ".join(quoted)}"'
