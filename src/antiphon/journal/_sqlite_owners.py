"""Who is alive: an owner is a file that its process keeps locked for as long as it lives.

Responsible for the owner file of a journal, and for telling whether another's owner still lives.
Leaves which session is claimed by which owner to the database (`_sqlite_thread`).

The lock is the operating system's, so it is gone in the moment in which the process is, however it
ended; no clock, heartbeat or process id is asked. A name is used once, so neither a process id that
comes again nor a file that was left behind can be taken for an owner.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["Owner", "is_alive", "lock_file", "owner_text", "tidy"]

#: The part of the file that is locked on Windows, where a locked part cannot be read.
_LOCKED_AT = 1 << 30
_NEW = ".new-"

#: Owners of this process. They are never looked at through their files: on some systems closing any
#: descriptor of a file gives up the process's locks on it.
_ours: set[str] = set()
_living: weakref.WeakSet[Owner] = weakref.WeakSet()
_guard = threading.RLock()


class Owner:
    """The owner file of one journal object; made in its folder, locked, and gone with `close`.

    Attributes:
        name: what claims are made under; not guessable and never used twice.
    """

    def __init__(self, folder: Path) -> None:
        """Create and lock it. Raises `OSError`."""
        while True:
            self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
            self._path = folder / self.name
            new = folder / f"{_NEW}{self.name}"
            self._fd = private_file(new)
            try:
                if not lock_file(self._fd, exclusive=True):
                    # Somebody tidies up and holds it for a moment: it is not known to be ours yet.
                    self._drop()
                    continue
                with _guard:
                    _ours.add(self.name)
                new.rename(self._path)  # only now can anybody take it for an owner
            except FileNotFoundError:  # tidied up in the moment before it was locked
                self._drop()
                continue
            except BaseException:
                self._drop()
                raise
            _living.add(self)
            return

    def close(self) -> None:
        """End it: what it has claimed is free. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._drop()

    def _drop(self) -> None:
        _living.discard(self)
        with _guard:
            _ours.discard(self.name)
        fd, self._fd = self._fd, -1
        os.close(fd)

    def forget(self) -> None:
        """Let go of what a fork has copied, without touching the parent's file or lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _after_fork() -> None:
    # The lock belongs to the description that parent and child share: while the child had it open, a
    # parent that was killed would look alive.
    for owner in list(_living):
        owner.forget()
    _living.clear()
    _ours.clear()
    _guard.release()


if sys.platform != "win32":
    # With the guard held: a child whose parent's thread had it would wait for that thread for ever.
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_after_fork
    )


def private_file(path: Path) -> int:
    """Create a file that only its user can read, whatever the umask; raises if it exists."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
    if sys.platform != "win32":
        os.fchmod(fd, 0o600)  # a umask can only have taken bits away, from us too
    return fd


def lock_file(fd: int, *, exclusive: bool) -> bool:
    """Lock an open file, without waiting; returns whether it is locked now."""
    if sys.platform == "win32":
        os.lseek(fd, _LOCKED_AT, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_alive(folder: Path, name: str) -> bool:
    """Whether the process that made this owner still has it."""
    with _guard:
        if name in _ours:
            return True
    return _is_locked(folder / name)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's, and nothing is known of it: do not take what may be theirs
    try:
        # A shared lock: two that look at the same time do not take each other for the owner.
        return not lock_file(fd, exclusive=False)
    finally:
        os.close(fd)


def owner_text(name: str) -> str:
    """Who that is, in words."""
    return f"process {name.partition('-')[0]}"


def tidy(folder: Path) -> None:
    """Remove the files of owners that have ended. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with _guard:
                if name.removeprefix(_NEW) in _ours:
                    continue
            path = folder / name
            with contextlib.suppress(OSError):
                if not _is_locked(path):
                    path.unlink()
