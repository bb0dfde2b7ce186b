"""The tree that is attacked, the attackers at work on it, and the naive controls that they defeat."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tests.attacks.attacker import KINDS

if TYPE_CHECKING:
    from types import TracebackType

SECRET: Final = "TOP SECRET"
INSIDE: Final = "inside"
#: What is written by whoever must not write outside.
WRITTEN: Final = "written by the agent"
LARGE: Final = 300 * 1024  # such a file is read in a thread


def plant(base: Path) -> None:
    """Two roots, `r/w` and `q/w`, and what must not be reached, `out`."""
    root, out = base / "r" / "w", base / "out"
    for folder in (root, base / "q" / "w", out, out / "sub", out / "w"):
        folder.mkdir(parents=True)
    for name in ("f", "secret", "sub/f", "w/f"):
        (out / name).write_text(SECRET)
    (out / "large").write_text(SECRET * (LARGE // len(SECRET)))
    for name in ("xd", "pd", "n/d", "m/i"):
        (root / name / "sub").mkdir(parents=True)
        for file in ("f", "sub/f"):
            (root / name / file).write_text(INSIDE)
        (root / name / "large").write_text(INSIDE * (LARGE // len(INSIDE)))
    (root / "half").mkdir()
    (root / "p").mkdir()
    for name in ("xf", "pf", "half/f"):
        (root / name).write_text(INSIDE)
    (base / "q" / "w" / "f").write_text(INSIDE)
    for name in ("xl", "pl"):
        (root / name).symlink_to(out)
    (root / "n" / "l").symlink_to("../../../out")
    for name in ("xg", "pg"):
        (root / name).symlink_to(out / "secret")
    (base / "ql").symlink_to(out)


def outside(base: Path) -> dict[str, tuple[int, int, str]]:
    """All that is outside: each name with its inode, its time of change and its content.

    But for `i`, which an attacker moves there and back, so that it may vanish at any moment.
    """
    found: dict[str, tuple[int, int, str]] = {}
    for folder, names, files in os.walk(base / "out"):
        if "i" in names:
            names.remove("i")
        for name in (*names, *files):
            path = Path(folder, name)
            status = path.lstat()
            plain = stat.S_ISREG(status.st_mode)
            # The time of a directory changes with the attackers' own coming and going.
            changed = status.st_mtime_ns if plain else 0
            found[str(path)] = (status.st_ino, changed, path.read_text() if plain else "")
    return found


class Attackers:
    """One process for each kind of attack, from `with` to the end of it."""

    def __init__(self, base: Path) -> None:
        self.rounds: dict[str, int] = {}
        self._base = base
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        try:
            for kind in KINDS:
                script = Path(__file__).with_name("attacker.py")
                self._running[kind] = subprocess.Popen(
                    [sys.executable, "-S", str(script), str(self._base), kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            for process in self._running.values():
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
        except BaseException:
            self._kill()
            raise
        return self

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._running.values())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for name, process in self._running.items():
                said, _ = process.communicate(timeout=20)
                if process.returncode == 0:
                    self.rounds[name] = int(said)
        finally:
            self._kill()

    def _kill(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


def checked(root: str, path: str) -> str:
    """What a naive client does: resolve, compare, and then use the path."""
    real = os.path.realpath(path)
    if not real.startswith(f"{root}/"):
        raise PermissionError(path)
    return path


def naive_read(root: str, path: str) -> str:
    """Check, then open."""
    return Path(checked(root, path)).read_text()


def naive_write(root: str, path: str) -> None:
    """Check, then write."""
    Path(checked(root, path)).write_text(WRITTEN)


def naive_create(root: str, path: str) -> None:
    """Check, then make the directory that is missing, and write."""
    target = Path(checked(root, path))
    target.parent.mkdir(exist_ok=True)
    target.write_text(WRITTEN)


def naive_start(root: str, path: str) -> int:
    """Check, then start a command there; the inode of where it ran."""
    where = checked(root, path)
    listed = subprocess.run(["ls", "-di", "."], cwd=where, capture_output=True, check=True)
    return int(listed.stdout.split()[0])


def parent_by_the_system(root: str, names: list[str]) -> str:
    """Descriptors for every step, as they should be, but `..` left to the system."""
    here = os.open(root, os.O_RDONLY)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        fd = os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW, dir_fd=here)
        with os.fdopen(fd) as file:
            return file.read()
    finally:
        with contextlib.suppress(OSError):
            os.close(here)
