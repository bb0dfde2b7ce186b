"""Finds a path inside the directories that were lent, and holds what it found by descriptor.

A path is walked component by component from a pinned root. Each directory is opened relative to
the one before it and without following links; a link is read and its target walked by hand. So
the walk stands, at every moment, in a directory that it reached from a root, and no exchange of
names by another process can lead it out: there is no check that an open comes after. Nothing
outside the roots is ever looked at, so a refusal cannot tell whether something is there.

What is done with the place found is left to `_files` and `_terminals`; they work relative to the
descriptor that a `Place` holds, never with its path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from antiphon._errors import InternalError, ResourceNotFound
from antiphon.services._context import refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from antiphon._errors import RequestError
    from antiphon.services._context import ServiceContext

__all__ = ["Pins", "Place", "Roots", "not_found", "open_anything", "open_directory", "os_failure"]

#: Links followed in one path, as in Linux (40). Plain directories are not counted.
MAX_LINKS: Final = 40
#: Names passed in one path, those of the links' targets included: forty links could have eighty
#: thousand, which take a third of a second.
MAX_STEPS: Final = 4096
#: Bytes of a path, as in Linux: the agent's own tools could not open a longer one either.
MAX_PATH_BYTES: Final = 4096
#: Directories below a root. Each costs a descriptor while the path is walked.
MAX_DEPTH: Final = 128

# O_PATH (Linux) needs no permission to read the directory, only to pass through it, as the kernel's
# own walk does. Elsewhere the directory must be readable.
_DIRECTORY: Final = (
    (getattr(os, "O_PATH", 0) or os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if hasattr(os, "O_DIRECTORY")
    else 0
)
# What O_DIRECTORY | O_NOFOLLOW answer for a link or a file; which of the two depends on the system.
_NO_DIRECTORY: Final = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EMLINK})

# Targets that are absolute somewhere: `\\host\share`, `\x`, `//host/share`, `c:`, `c:/x`, `c:\x`.
# They are refused on every system, so that a tree means the same wherever it is mounted.
_ABSOLUTE_ELSEWHERE: Final = re.compile(rb"\\|//|[A-Za-z]:(?:[/\\]|\Z)")

_Names = tuple[bytes, ...]


class Roots:
    """Directories an agent may use, each pinned to its real path when this object is made.

    A root may be named through links; it stays what those links meant at that moment. What stands
    at its real path later is what is lent, unless that, or anything above it, has become a link:
    then nothing is, until it is a directory again. Inside, links are followed as long as they stay
    within the roots (any of them). Mounts and hard links cannot be told from what is there.

    Args:
        paths: the directories; relative ones are taken from the working directory.
        skip_missing: leave out what is no directory, instead of raising.

    Raises:
        NotImplementedError: the system has no directory descriptors (Windows): nothing can be
            confined there without a race, so nothing is lent.
        OSError: a root does not exist or is no directory.
    """

    __slots__ = ("_above", "_real")

    def __init__(
        self, paths: Iterable[str | os.PathLike[str]], *, skip_missing: bool = False
    ) -> None:
        if os.open not in os.supports_dir_fd or os.readlink not in os.supports_dir_fd:
            what = (
                f"{sys.platform} has no directory descriptors: paths cannot be confined here"
                " without a race, so neither files nor terminals are lent"
            )
            raise NotImplementedError(what)
        # Spelling of a root, as given and resolved, in components -> its real components.
        self._real: dict[_Names, _Names] = {}
        # All proper ancestors of all spellings: where a path may pass, without being looked at.
        self._above: set[_Names] = set()
        for path in paths:
            given = os.path.join(os.getcwdb(), os.fsencode(path))
            try:
                real = os.path.realpath(given, strict=True)
                if not os.path.isdir(real):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            except OSError as error:
                if skip_missing:
                    continue
                if isinstance(error.filename, bytes):
                    # As a person wrote it and reads it.
                    error.filename = os.fsdecode(error.filename)
                raise
            self._pin(_names(real), _names(real))
            plain = os.path.normpath(given)
            # `link/..` is not what its text says: such a spelling is no name of the root.
            if os.path.realpath(plain) == real:
                self._pin(_names(plain), _names(real))

    def _pin(self, spelling: _Names, real: _Names) -> None:
        self._real[spelling] = real
        self._above.update(spelling[:length] for length in range(len(spelling)))

    def __bool__(self) -> bool:
        return bool(self._real)

    @property
    def real(self) -> tuple[str, ...]:
        """The real paths of the roots."""
        found = dict.fromkeys(self._real.values())
        return tuple("/" + b"/".join(names).decode("utf-8", "replace") for names in found)

    @property
    def first(self) -> str:
        """The real path of the first root; "/" where there is none, which nothing then holds."""
        return "/" + b"/".join(next(iter(self._real.values()), ())).decode("utf-8", "replace")

    def spellings(self) -> dict[bytes, bytes]:
        """Each name by which a root is known -> its real path; both absolute."""
        return {b"/" + b"/".join(name): b"/" + b"/".join(real) for name, real in self._real.items()}

    def locate(self, path: str) -> Place:
        """Walk an absolute path; the place holds a descriptor that the caller closes.

        `..` means the parent of the directory that was really reached, as for the kernel; where
        nothing exists it cancels the name before it. A path that leaves the roots by its text
        alone is refused before anything is opened.

        Raises:
            RequestError: -32602 with `data.reason`
                `path_not_absolute`, `path_not_text` (a NUL or a lone surrogate), `path_too_long`,
                `path_too_deep`,
                `path_traversal` (outside every root), `symlink_escape` (a link leads outside),
                `too_many_symlinks`, `not_a_directory` (a file is used as a directory);
                -32603 with `io_error` where the system refused a step inside a root.
        """
        wanted = _checked(path)
        plain = _names(os.path.normpath(wanted))
        # The text must stay within a root, besides where the links lead: what a person was shown
        # is then never outside. Two leading slashes are a host on some systems.
        if wanted.startswith(b"//") or not self._holds(plain):
            raise refusal("path_traversal", path=path)
        walk = _Walk(self._real, self._above, path)
        try:
            return walk.run(wanted.split(b"/"))
        except OSError as error:
            raise os_failure("io_error", path, error) from error
        finally:
            walk.close()

    def _holds(self, names: _Names) -> bool:
        return any(names[: len(spelling)] == spelling for spelling in self._real)


class Pins:
    """The roots of a service: its own, else each session's, resolved once and then kept."""

    __slots__ = ("_own", "_sessions")

    def __init__(self, roots: tuple[str | os.PathLike[str], ...]) -> None:
        self._own = Roots(roots) if roots else None
        self._sessions: dict[str, tuple[tuple[str, ...], Roots]] = {}

    def roots(self, ctx: ServiceContext) -> Roots:
        """The roots that hold for a call; a directory that the session lacks lends nothing."""
        if self._own is not None:
            return self._own
        names = tuple(ctx.roots)
        if not names:
            # No session that is known, and an agent can make up any number of ids.
            return Roots(())
        pinned = self._sessions.get(ctx.session_id)
        # Loading a session may give it other directories.
        if pinned is None or pinned[0] != names:
            pinned = self._sessions[ctx.session_id] = (names, Roots(names, skip_missing=True))
        return pinned[1]

    def holds_everything(self) -> bool:
        """Whether the service's own roots contain the root of the file system."""
        return self._own is not None and b"/" in self._own.spellings().values()

    def named(self, ctx: ServiceContext) -> tuple[str, ...]:
        """The session's directories as it names them, then those that are lent, by real path."""
        return tuple(dict.fromkeys((*ctx.roots, *self.roots(ctx).real)))

    def release(self, session_id: str) -> None:
        """Forget a session. Idempotent."""
        self._sessions.pop(session_id, None)


class Place:
    """What a path leads to: a name in a directory that is held open.

    Attributes:
        path: the real path, every link resolved, for people; never to be opened.
        directory: descriptor of the deepest existing directory on the way (owned; `close` it).
            It may be good for passing through only, not for reading or syncing.
        missing: names of directories below it that do not exist.
        leaf: the last name, which is no link and no directory, or does not exist. None: the path
            is the directory itself.
        exists: whether everything was there when the path was walked.
        wants_directory: the text ends in a slash, so it can be no file.
    """

    __slots__ = ("directory", "exists", "leaf", "missing", "path", "wants_directory")

    def __init__(
        self,
        directory: int,
        names: Sequence[bytes],
        missing: Sequence[bytes],
        leaf: bytes | None,
        *,
        wants_directory: bool,
    ) -> None:
        self.directory = directory
        self.exists = not missing
        last = leaf if not missing else missing[-1]
        self.missing = list(missing[:-1])
        self.leaf = last
        whole = [*names, *self.missing, *(() if last is None else (last,))]
        self.path = "/" + b"/".join(whole).decode("utf-8", "replace")
        self.wants_directory = wants_directory

    def make_parents(self) -> None:
        """Create the missing directories and step into them; each stays within the last.

        Raises:
            OSError: one could not be made, or something else took its name meanwhile.
        """
        while self.missing:
            name = self.missing[0]
            # Another writer may be faster; if it made a link, the open refuses it.
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.directory)
            inner = os.open(name, _DIRECTORY, dir_fd=self.directory)
            os.close(self.directory)
            self.directory = inner
            del self.missing[0]

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.directory >= 0:
            os.close(self.directory)
            self.directory = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Walk:
    """One walk: where it stands, and the descriptors of the root and every directory below it.

    Above the roots it stands nowhere: names are compared with those of the roots, and nothing is
    opened. The descriptors of all directories passed are kept because `..` needs them: asking the
    system for the parent would leave the root if the directory had been moved meanwhile.
    """

    def __init__(self, real: dict[_Names, _Names], above: set[_Names], path: str) -> None:
        self._real = real
        self._ancestors = above
        self._path = path
        self._links = 0
        self._steps = 0
        self._names: list[bytes] = []
        self._open: list[int] = []

    def run(self, names: Sequence[bytes]) -> Place:
        todo = list(reversed(names))
        missing: list[bytes] = []
        trailing = False
        self._restart()
        while todo:
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise refusal("too_many_symlinks", path=self._path)
            name = todo.pop()
            trailing = name in {b"", b"."}
            if trailing:
                continue
            if name == b"..":
                if missing:
                    missing.pop()
                else:
                    self._up(todo)
            elif not self._open:
                self._down_to_root(name)
            elif missing:
                missing.append(name)
            else:
                target = self._down(name)
                if target is _MISSING:
                    missing.append(name)
                elif target is _FILE:
                    if todo:
                        raise refusal("not_a_directory", path=self._path)
                    return self._found([], name, wants_directory=False)
                elif target is not None:
                    self._follow(target, todo)
        if not self._open:
            raise self._outside()
        return self._found(missing, None, wants_directory=trailing)

    def _found(self, missing: list[bytes], leaf: bytes | None, *, wants_directory: bool) -> Place:
        place = Place(self._open.pop(), self._names, missing, leaf, wants_directory=wants_directory)
        if any(len(name) > _NAME_BYTES for name in missing):
            place.close()
            raise refusal("path_too_long", path=self._path)
        return place

    def _outside(self) -> RequestError:
        return refusal("symlink_escape" if self._links else "path_traversal", path=self._path)

    def _restart(self) -> None:
        self.close()
        self._names = []
        self._enter_root_here()

    def _up(self, todo: list[bytes]) -> None:
        names = self._names[:-1]
        if len(self._open) > 1:
            os.close(self._open.pop())
            self._names = names
        else:
            # Out of a root, perhaps into another: its real path has no links and leads there.
            self._restart()
            todo.extend(reversed(names))

    def _down_to_root(self, name: bytes) -> None:
        self._names.append(name)
        self._enter_root_here()
        if not self._open and tuple(self._names) not in self._ancestors:
            raise self._outside()

    def _enter_root_here(self) -> None:
        real = self._real.get(tuple(self._names))
        if real is not None:
            self._names = list(real)
            self._open.append(_open_root(real))

    def _down(self, name: bytes) -> bytes | None:
        """Step into a directory (None), or say what else stands there."""
        here = self._open[-1]
        try:
            inner = os.open(name, _DIRECTORY, dir_fd=here)
        except FileNotFoundError:
            return _MISSING
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise refusal("path_too_long", path=self._path) from error
            if error.errno not in _NO_DIRECTORY:
                raise
        else:
            self._open.append(inner)
            self._names.append(name)
            if len(self._open) > MAX_DEPTH:
                raise refusal("path_too_deep", path=self._path)
            return None
        try:
            return os.readlink(name, dir_fd=here)
        except FileNotFoundError:
            return _MISSING
        except OSError as error:
            if error.errno == errno.EINVAL:  # no link
                return _FILE
            raise

    def _follow(self, target: bytes, todo: list[bytes]) -> None:
        self._links += 1
        if self._links > MAX_LINKS:
            raise refusal("too_many_symlinks", path=self._path)
        if _ABSOLUTE_ELSEWHERE.match(target):
            raise self._outside()
        if target.startswith(b"/"):
            self._restart()
        todo.extend(reversed(target.split(b"/")))

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


# Answers of `_down` that are no target: a target is never empty and holds no NUL.
_MISSING: Final = b"\0missing"
_FILE: Final = b"\0file"
# NAME_MAX of every common file system; a longer missing name would fail only when it is created.
_NAME_BYTES: Final = 255


def _open_root(names: _Names) -> int:
    """Open a real path from the file system's root, refusing every link on the way."""
    here = os.open("/", _DIRECTORY)
    for name in names:
        try:
            inner = os.open(name, _DIRECTORY, dir_fd=here)
        finally:
            os.close(here)
        here = inner
    return here


def open_directory(real: bytes) -> int:
    """Open a directory by its real path, refusing every link on the way; the caller closes it."""
    return _open_root(_names(real))


def open_anything(real: bytes) -> int:
    """Hold what stands at a real path, refusing every link, without opening it (Linux).

    Raises:
        OSError: it is not there, or is a link now, or behind one.
    """
    parent = _open_root(_names(real)[:-1])
    try:
        name = _names(real)[-1] if _names(real) else b"."
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), real)
    return fd


def _names(path: bytes) -> _Names:
    return tuple(name for name in path.split(b"/") if name)


def _checked(path: str) -> bytes:
    shown = path[:MAX_PATH_BYTES]
    if not path.startswith("/"):
        raise refusal("path_not_absolute", path=shown)
    try:
        wanted = path.encode()
    except UnicodeEncodeError as error:
        shown = shown.encode("utf-8", "replace").decode()
        raise refusal("path_not_text", path=shown) from error
    if b"\0" in wanted:
        raise refusal("path_not_text", path=shown)
    if len(wanted) >= MAX_PATH_BYTES:
        raise refusal("path_too_long", path=shown)
    return wanted


def not_found(path: str) -> RequestError:
    """-32002 for a path that does not exist inside the roots; `data.uri` names it."""
    return ResourceNotFound({"uri": Path(path).as_uri()})


def os_failure(reason: str, path: str, error: OSError) -> RequestError:
    """-32603 for what the system refused inside a root: the errno's name, none of its text."""
    code = errno.errorcode.get(error.errno or 0, "EIO")
    return InternalError({"reason": reason, "path": path, "errno": code})
