"""Exchanges links and directories without pause: `attacker.py BASE KIND`, a process of its own.

It stands for whatever else may change a tree that was lent: the agent's own tools, a container that
has it mounted. It says `ready` when the first round is done, goes on until its standard input ends,
and then writes how many rounds there were. `swaps.plant` makes the tree that it works on.
"""

# Each swap is one call of the system; making a Path takes longer.
# ruff: noqa: PTH104, PTH106, PTH108, PTH114, PTH211

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def exchange(one: str, other: str) -> None:
    """Let two names change places: one step of the kernel on Linux, else three renames."""
    if _renameat2 is not None:
        _renameat2(_AT_FDCWD, one.encode(), _AT_FDCWD, other.encode(), _RENAME_EXCHANGE)
    else:
        rename_around(one, other)


def rename_around(one: str, other: str) -> None:
    """Let two names change places by way of a third: for a moment, one name is missing."""
    os.rename(one, f"{one}.between")
    while True:
        try:
            os.rename(other, one)
            break
        except OSError:  # a writer has made a directory where nothing was
            _remove(one)
    os.rename(f"{one}.between", other)


def _find_renameat2() -> Any:
    with contextlib.suppress(AttributeError, OSError):
        return ctypes.CDLL(None, use_errno=True).renameat2
    return None


_renameat2: Any = _find_renameat2()


def exchanges(base: str) -> Callable[[], None]:
    """Directories and files change places with links that lead out."""
    root = f"{base}/r/w"

    def swap() -> None:
        exchange(f"{root}/xd", f"{root}/xl")
        exchange(f"{root}/xf", f"{root}/xg")
        exchange(f"{root}/n/d", f"{root}/n/l")

    return swap


def renames(base: str) -> Callable[[], None]:
    """The same by plain renames, so that names are also missing for a moment."""
    root = f"{base}/r/w"

    def swap() -> None:
        rename_around(f"{root}/pd", f"{root}/pl")
        rename_around(f"{root}/pf", f"{root}/pg")

    return swap


def ancestors(base: str) -> Callable[[], None]:
    """What is above a root becomes a link; a directory inside is moved out and back."""
    steal = halves(base)

    def swap() -> None:
        exchange(f"{base}/q", f"{base}/ql")
        os.rename(f"{base}/r/w/m/i", f"{base}/out/i")
        os.rename(f"{base}/out/i", f"{base}/r/w/m/i")
        steal()

    return swap


def parents(base: str) -> Callable[[], None]:
    """Where a directory is missing there is, at times, a link that leads out."""
    new, away, out = f"{base}/r/w/p/new", f"{base}/r/w/p/away", f"{base}/out"

    def swap() -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink(out, new)
        try:
            os.unlink(new)
        except (IsADirectoryError, PermissionError):  # the writer was faster; it is a directory
            os.rename(new, away)
            _remove(away)

    return swap


def halves(base: str) -> Callable[[], None]:
    """A file that is half written becomes a link that leads out."""
    half, secret = f"{base}/r/w/half", f"{base}/out/secret"

    def swap() -> None:
        for name in os.listdir(half):
            if name.startswith(".antiphon-"):
                os.symlink(secret, f"{half}/link")
                os.rename(f"{half}/link", f"{half}/{name}")
        if os.path.islink(f"{half}/f"):  # the writer has taken it for its own
            os.unlink(f"{half}/f")

    return swap


def _remove(path: str) -> None:
    # The writer may still be at work in there.
    while Path(path).exists():
        for folder, names, files in os.walk(path, topdown=False):
            for name in files:
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{name}")
            for name in names:
                with contextlib.suppress(OSError):
                    os.rmdir(f"{folder}/{name}")
        with contextlib.suppress(OSError):
            os.rmdir(path)


KINDS: Final[dict[str, Callable[[str], Callable[[], None]]]] = {
    "exchanges": exchanges,
    "renames": renames,
    "ancestors": ancestors,
    "parents": parents,
}


def main(base: str, kind: str) -> None:
    """Attack until told to end, and leave everything where it was."""
    swap = KINDS[kind](base)
    swap()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    rounds = 1
    while True:
        for _ in range(200):
            swap()
        rounds += 200
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    sys.stdout.write(f"{rounds + rounds % 2}\n")
    if rounds % 2:
        swap()


if __name__ == "__main__":
    main(*sys.argv[1:])
