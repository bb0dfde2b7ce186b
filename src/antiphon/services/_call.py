"""What an agent wants to do, as rules see it: a `Call`, read from a request or from what a service will do.

Pure. A request is the agent's own description, so whatever in it cannot be taken at its word is put into
`Call.doubt`, and whatever is huge is cut. What is said about a call is left to `_rules`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from antiphon.schema import v1
from antiphon.services._context import given

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.schema import v1_unstable
    from antiphon.services._context import Operation

__all__ = ["KINDS", "SHELLS", "Call", "below", "normalised", "spelled"]

#: Paths of one call that are looked at; a call with more is in doubt.
MAX_PATHS: Final = 256
#: Characters of a path, as in `Roots.locate`; and of a title.
MAX_PATH: Final = 4096
MAX_TITLE: Final = 64 * 1024
#: Characters of all paths of a call that rules are tried on, which is done on the event loop.
MAX_ALL_PATHS: Final = 64 * 1024
#: Of a command: characters, as no system takes a longer word, and words. And variables.
MAX_COMMAND: Final = 128 * 1024
MAX_WORDS: Final = 16 * 1024
MAX_ENV: Final = 1024

#: The protocol's words for what a call is.
KINDS: Final = (
    *("read", "edit", "delete", "move", "search"),
    *("execute", "fetch", "think", "switch_mode", "other"),
)
_OPERATION_KINDS: Final = {"read": "read", "write": "edit", "execute": "execute"}
# What a shell passes on as it is. A first word with "=" is an assignment, so it is not among these.
_PLAIN_LINE: Final = re.compile(
    r"[A-Za-z0-9_@%+:,./][A-Za-z0-9_@%+:,./-]*(?: [A-Za-z0-9_@%+=:,./-]+)*"
)
_NO_TEXT: Final = re.compile("[\0\ud800-\udfff]")
SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash", "ksh", "ash", "fish"})
_STANDARD_SHELLS: Final = frozenset(
    folder + shell for folder in ("", "/bin/", "/usr/bin/") for shell in SHELLS - {"fish"}
)
# Words that mean something to a shell and run others, or say what will be run: such a line is no
# program and its arguments, however plain. (`_rules` knows those that are programs, too.)
_SHELL_WORDS: Final = frozenset(
    (
        *("if", "then", "elif", "else", "fi", "for", "foreach", "while", "until", "repeat", "do"),
        *("done", "case", "esac", "select", "function", "coproc", "builtin", "source", ".", "trap"),
        *("nocorrect", "noglob", "alias", "compgen", "complete", "enable", "hash", "jobs", "bind"),
        *("mapfile", "readarray", "fc", "sched", "zmodload", "autoload", "zle", "emulate"),
    )
)
_PATH_KEYS: Final = (
    *("path", "file_path", "filePath", "filepath", "file", "filename", "abs_path", "absolute_path"),
    *("absolutePath", "notebook_path", "notebookPath", "target_file", "source", "destination"),
    *("old_path", "new_path", "oldPath", "newPath", "paths", "files"),
)
_COMMAND_KEYS: Final = ("command", "cmd", "argv")
_CWD_KEYS: Final = ("cwd", "workdir", "working_directory", "workingDirectory")
# A home or a drive or a scheme: nobody here can say which file that is.
_ODD_PATH: Final = re.compile(r"~|[A-Za-z][A-Za-z0-9+.-]*:")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent wants to do, as far as rules are concerned with it.

    Attributes:
        kind: the protocol's word: read, edit, delete, move, search, execute, fetch, think, switch_mode
            or other. As the agent says it, so nothing to rely on; see `kinds`.
        title: one line for a person, in the agent's words.
        paths: the files that it names, absolute and lexically normalised.
        changes: those of them of which it shows what will stand there.
        command: the argument list that will be run, None if it runs none. A line for a shell is
            `("/bin/sh", "-c", line)`, one of plain words is their list.
        cwd: where the command will run.
        env: what the agent adds to its environment.
        session_id: the session on whose behalf.
        roots: the session's directories, its `cwd` first; relative globs begin there.
        aliases: for roots that are reached through links: how they are spelled, and where they are.
        doubt: why it cannot be taken at its word ("" if it can). It is then never allowed by a
            rule, only by whoever is asked.
    """

    kind: str = "other"
    title: str = ""
    paths: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    cwd: str | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    session_id: str = ""
    roots: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    doubt: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is: as it says, and what its content makes it whatever it says."""
        found = [self.kind]
        if self.command is not None:
            found.append("execute")
        if self.changes:
            found.append("edit")
        return tuple(dict.fromkeys(found))

    @staticmethod
    def words(line: str) -> tuple[str, ...]:
        """The `command` that a line is: its words if they are plain, else a shell and the line."""
        return _plain(("/bin/sh", "-c", line))

    @classmethod
    def of_request(
        cls,
        params: v1_unstable.RequestPermissionRequest,
        roots: Sequence[str] = (),
        *,
        known: Any = None,
        aliases: Sequence[tuple[str, str]] = (),
    ) -> Call:
        """What a permission request is about.

        Args:
            params: the request. Its tool call may be a patch of what was said before.
            roots: the session's directories.
            known: what is known of the tool call by now (a `ToolCallView`, or anything with its
                attributes `title`, `kind`, `content`, `locations` and `raw_input`), where the
                request itself is silent.
            aliases: see `Call`.
        """
        return _read_request(params, roots, known, tuple(aliases))

    @classmethod
    def of_operation(
        cls,
        operation: Operation,
        roots: Sequence[str] = (),
        *,
        aliases: Sequence[tuple[str, str]] = (),
    ) -> Call:
        """What a service is about to do: "read" is read, "write" is edit, "execute" is execute."""
        unclear = _Unclear()
        paths = () if operation.path is None else (unclear.path(operation.path, ()),)
        command = None if operation.command is None else _plain(tuple(operation.command))
        if not roots:
            unclear.because("the session's directories are not known")
        return cls(
            kind=_OPERATION_KINDS[operation.kind],
            title=operation.title[:MAX_TITLE],
            paths=paths,
            command=command,
            cwd=operation.cwd,
            env=dict(operation.env),
            session_id=operation.session_id,
            roots=tuple(roots),
            aliases=tuple(aliases),
            doubt=unclear.reason,
        )


def normalised(path: str) -> str:
    """An absolute path without `.`, `..` and doubled slashes, as text."""
    # Two leading slashes are kept by normpath; they mean something elsewhere only.
    return posixpath.normpath("/" + path.lstrip("/"))


def below(path: str, root: str) -> str | None:
    """What comes after `root` in `path`; None if it lies elsewhere."""
    if path == root:
        return ""
    start = root.rstrip("/") + "/"
    return path[len(start) :] if path.startswith(start) else None


def spelled(path: str, aliases: Iterable[tuple[str, str]]) -> str:
    """A real path as it is spelled through the session's roots."""
    for spelling, real in aliases:
        if (rest := below(path, real)) is not None:
            return normalised(f"{spelling}/{rest}")
    return path


# ---------------------------------------------------------------------- reading


class _Unclear:
    """Collects why a call cannot be taken at its word; the first reason is kept."""

    def __init__(self) -> None:
        self.reason = ""

    def because(self, reason: str) -> None:
        self.reason = self.reason or reason

    def path(self, path: str, roots: Sequence[str]) -> str:
        """A path that the agent wrote, as rules see it."""
        if len(path) > MAX_PATH:
            self.because("it names a path that is too long for a file")
            path = path[:MAX_PATH]
        if _NO_TEXT.search(path):
            self.because("it names a path that is no text")
        elif not path:
            self.because("it names a path that is empty")
        elif ".." in path.split("/"):
            self.because("it names a path with '..', which may lead elsewhere than it reads")
        elif not path.startswith("/") and (_ODD_PATH.match(path) or not roots):
            self.because("it names a path that is not absolute")
        if path.startswith("/"):
            return normalised(path)
        return normalised(f"{roots[0] if roots else '/'}/{path}")


def _read_request(
    params: v1_unstable.RequestPermissionRequest,
    roots: Sequence[str],
    known: Any,
    aliases: tuple[tuple[str, str], ...],
) -> Call:
    unclear = _Unclear()
    tool = params.tool_call

    def said(name: str) -> Any:
        value = given(getattr(tool, name), None)
        return (
            value if value is not None or known is None else given(getattr(known, name, None), None)
        )

    kind, title, raw = said("kind"), said("title"), said("raw_input")
    kind = kind if isinstance(kind, str) else ""
    title = title if isinstance(title, str) else ""
    if len(title) > MAX_TITLE:
        unclear.because("its title is too long to be one")
    changes = [item.path for item in said("content") or () if isinstance(item, v1.Diff)]
    named = [*changes, *(location.path for location in said("locations") or ())]
    command, cwd, env = None, None, dict[str, str]()
    if isinstance(raw, Mapping):
        fields = cast("Mapping[str, object]", raw)
        named += _paths_in(fields)
        command = _command_in(fields, unclear)
        cwd = next((v for v in map(fields.get, _CWD_KEYS) if isinstance(v, str) and v), None)
        env = _env_in(fields.get("env"), unclear)
    elif kind == "execute" and raw is not None:
        command = _command_of(cast("object", raw), unclear)
    if not kind:
        kind = "execute" if command is not None else "edit" if changes else "other"
    if command is not None:
        at = unclear.path(cwd, roots) if cwd else (roots[0] if roots else None)
    else:
        at = None
    if not roots and (named or command):
        unclear.because("the session's directories are not known")
    names, paths, left = list(dict.fromkeys(named)), dict[str, None](), MAX_ALL_PATHS
    if len(names) > MAX_PATHS:
        unclear.because(f"it names more than {MAX_PATHS} paths")
    for name in names[:MAX_PATHS]:
        left -= len(name)
        if left < 0 and paths:
            unclear.because("it names paths that are too long to look at all of them")
            break
        paths[unclear.path(name, roots)] = None
    return Call(
        kind=kind,
        title=title[:MAX_TITLE],
        paths=tuple(paths),
        changes=tuple(dict.fromkeys(unclear.path(path, roots) for path in changes[:MAX_PATHS])),
        command=command,
        cwd=at,
        env=env,
        session_id=params.session_id,
        roots=tuple(roots),
        aliases=aliases,
        doubt=unclear.reason,
    )


def _paths_in(fields: Mapping[str, object]) -> Iterable[str]:
    """Paths in a tool's own parameters, by the names that agents use for them."""
    for key in _PATH_KEYS:
        value = fields.get(key)
        if isinstance(value, str) and value:
            yield value
        elif isinstance(value, list):
            for item in cast("list[object]", value)[: MAX_PATHS + 1]:
                if isinstance(item, str) and item:
                    yield item


def _command_in(fields: Mapping[str, object], unclear: _Unclear) -> tuple[str, ...] | None:
    """The command in a tool's own parameters; what more than one is, nobody can say."""
    found: list[tuple[str, ...]] = []
    for key in _COMMAND_KEYS:
        value = fields.get(key)
        if value is None:
            continue
        args = fields.get("args")
        words = _command_of(value, unclear, args if key != "argv" else None)
        if words is not None and words not in found:
            found.append(words)
    if len(found) > 1:
        unclear.because("it names several commands")
    return found[0] if found else None


def _command_of(value: object, unclear: _Unclear, args: object = None) -> tuple[str, ...] | None:
    words: tuple[str, ...] | None = None
    if isinstance(value, str):
        words = (value,)
    elif isinstance(value, list):
        words = _words(cast("list[object]", value))
    more = _words(cast("list[object]", args)) if isinstance(args, list) else None
    everything = (*(words or ()), *(more or ()))
    if len(everything) > MAX_WORDS or sum(map(len, everything)) > MAX_COMMAND:
        unclear.because("its command is longer than a system takes")
        beginning = words[0][:MAX_COMMAND] if words else ""
        return ("/bin/sh", "-c", beginning) if isinstance(value, str) else (beginning,)
    if words is None or (args is not None and more is None):
        unclear.because("its command is neither a line nor a list of words")
        return words
    if not words or not words[0].strip() or any("\0" in word for word in (*words, *(more or ()))):
        unclear.because("its command is empty or no text")
        return words or None
    if isinstance(value, str) and not more:
        # As it will be run: by a shell, unless it is plain words, which mean the same without one.
        return _plain(("/bin/sh", "-c", value))
    return _plain((*words, *(more or ())))


def _words(items: list[object]) -> tuple[str, ...] | None:
    return tuple(cast("list[str]", items)) if all(isinstance(i, str) for i in items) else None


def _plain(words: tuple[str, ...]) -> tuple[str, ...]:
    """A list as rules see it: a shell's line of plain words is these words."""
    match words:
        case (shell, *options, line) if (
            shell in _STANDARD_SHELLS and tuple(options) in _LINE_OPTIONS and _is_plain(line)
        ):
            return tuple(line.split(" "))
        case (shell, *options, line) if (
            shell in _STANDARD_SHELLS and tuple(options) in _LINE_OPTIONS
        ):
            return ("/bin/sh", "-c", line)
        case _:
            return words


_LINE_OPTIONS: Final = frozenset({("-c",), ("-lc",), ("-cl",), ("-l", "-c")})


def _is_plain(line: str) -> bool:
    # One expression for all of it: an agent may send a hundred thousand words.
    return _PLAIN_LINE.fullmatch(line) is not None and line.partition(" ")[0] not in _SHELL_WORDS


def _env_in(value: object, unclear: _Unclear) -> dict[str, str]:
    found: dict[str, str] = {}
    match value:
        case None:
            pass
        case Mapping():
            given = cast("Mapping[object, object]", value)
            if len(given) > MAX_ENV:
                unclear.because("it adds too much to the environment")
            for name, content in islice(given.items(), MAX_ENV):
                found[str(name)] = str(content)
        case list():
            entries = cast("list[object]", value)
            if len(entries) > MAX_ENV:
                unclear.because("it adds too much to the environment")
            for entry in entries[:MAX_ENV]:
                match entry:
                    case {"name": str(name)}:
                        found[name] = str(cast("dict[str, object]", entry).get("value", ""))
                    case str():
                        name, _, content = entry.partition("=")
                        found[name] = content
                    case _:
                        unclear.because("what it adds to the environment cannot be read")
        case _:
            unclear.because("what it adds to the environment cannot be read")
    return found
