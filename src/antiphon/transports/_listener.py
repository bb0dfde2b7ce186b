"""Sockets on which others connect: opened so that nobody else gets in, and kept accepting.

Responsible for the file of a Unix socket (its mode from the first moment, a dead server's left-over, who
may remove it), for keeping TCP on this machine, and for going on when accepting fails. Leaves what
becomes of a connection to who is given it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.transports._address import Address, TcpAddress, UnixAddress
from antiphon.transports._socket import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable


__all__ = ["Listener", "Listening", "check_reach", "listen_tcp", "listen_unix"]

log = logging.getLogger("antiphon.server")

#: Connections that wait to be accepted; the system may have a lower bound.
_BACKLOG = 1024
#: Accepted in one turn of the loop, so that a rush leaves the others their turns.
_BURST = 16
#: After accepting has failed, it is tried again so late at first, and at last.
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0
#: Others that open or remove a socket in the same folder are waited for so long.
_LOCK_PATIENCE, _LOCK_STEP = 2.0, 0.01
#: Where the file of a Unix socket gets the mode that the socket has.
_BY_MODE = sys.platform == "linux"
#: Where a loop cannot watch a socket.
_BY_TASK = sys.platform == "win32"


@dataclass(frozen=True)
class Listening:
    """A socket that listens, and the file that belongs to it.

    Attributes:
        sock: non-blocking.
        address: where it can be connected to, the port filled in.
        file: device and inode number of a Unix socket's file; None for any other.
    """

    sock: socket.socket
    address: Address
    file: tuple[int, int] | None = None

    async def close(self) -> None:
        """Remove the file, if it is still ours, and close. Cancelled, the file is left behind."""
        try:
            if self.file is not None and isinstance(self.address, UnixAddress):
                # Before closing: while the socket is open, no other file can have its number.
                path = Path(self.address.path)
                async with _alone_in(path.parent):
                    _remove(path, self.file)
        finally:
            self.sock.close()


def _remove(path: Path, file: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        if _identity(path) == file:
            path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


# ---------------------------------------------------------------------- Unix


async def listen_unix(path: str, *, everybody: bool = False) -> Listening:
    """Listen on a Unix socket that only its owner can connect to, or everybody.

    Args:
        path: where; "@NAME" is an abstract socket of Linux, which has no mode.
        everybody: mode 0666 instead of 0600.

    Raises:
        ValueError: there can be no socket of that path.
        OSError: a server is listening there (EADDRINUSE); what is there is no socket, and is left alone
            (FileExistsError); or what the system says of the folder.
        NotImplementedError: this is Windows.
    """
    if sys.platform == "win32":
        msg = "there are no Unix sockets on Windows; use serve_tcp"
        raise NotImplementedError(msg)
    address = UnixAddress(path)
    if address.abstract:
        return Listening(_bound(address.sockaddr, 0o600), address)
    mode = 0o666 if everybody else 0o600
    place = Path(path)
    async with _alone_in(place.parent):
        _make_room(place)
        bind = _bind_with_mode if _BY_MODE else _bind_in_private
        sock = bind(place, mode)
        try:
            return Listening(sock, address, _identity(place))
        except BaseException:
            sock.close()
            raise


def _make_room(place: Path) -> None:
    """Remove what a server that has died left behind; raise for whatever else is there."""
    if sys.platform == "win32":  # which `listen_unix` has refused
        raise NotImplementedError
    try:
        status = place.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "it is no socket, and is left alone", str(place))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(place))
    if code == errno.ECONNREFUSED:
        place.unlink()
    elif code in {errno.EACCES, errno.EPERM}:
        raise PermissionError(code, "somebody else's socket is there", str(place))
    elif code != errno.ENOENT:
        raise OSError(errno.EADDRINUSE, "a server is listening there", str(place))


def _bind_with_mode(place: Path, mode: int) -> socket.socket:
    """Bind where a file gets the mode of its socket (Linux), so that it never has another."""
    if sys.platform == "win32":
        raise NotImplementedError
    sock = _bound(str(place), mode)
    try:
        # The process's umask takes away from the mode; never by the path, which may be a link by now.
        fd = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
                os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101  (there is no such path)
        finally:
            os.close(fd)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_in_private(place: Path, mode: int) -> socket.socket:
    """Bind in a folder that nobody else can enter, and give it its name when its mode is right."""
    with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as folder:
        inside = Path(UnixAddress(f"{folder}/s").path)
        sock = _bound(str(inside), None)
        try:
            inside.chmod(mode)
            place.hardlink_to(inside)  # which replaces nothing
        except BaseException:
            sock.close()
            raise
    return sock


def _bound(where: str, mode: int | None) -> socket.socket:
    if sys.platform == "win32":
        raise NotImplementedError
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if mode is not None:
            os.fchmod(sock.fileno(), mode)
        try:
            sock.bind(where)
        except OSError as error:
            # With the path, which the system's own text does not have.
            raise OSError(error.errno, error.strerror, where) from None
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.asynccontextmanager
async def _alone_in(folder: Path) -> AsyncGenerator[None]:
    """Keep apart those that open and remove sockets of a folder, in all processes.

    Two that find the same left-over would each remove it, and the second one the first one's new socket.
    A lock on the folder itself leaves no file behind. Where it cannot be had, one goes on without.
    """
    fd = -1
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if fd >= 0 and sys.platform != "win32":
            end = asyncio.get_running_loop().time() + _LOCK_PATIENCE
            while asyncio.get_running_loop().time() < end:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_STEP)
                except OSError:  # a file system without locks
                    break
        yield
    finally:
        if fd >= 0:
            os.close(fd)


# ---------------------------------------------------------------------- TCP


def reachable_by_others(host: str) -> bool:
    """Whether a numeric address is more than this machine's own; of a name it is not known yet."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_reach(host: str, *, allow_remote: bool) -> None:
    """Raise `ValueError` where others than this machine could connect, and that is not allowed."""
    if not allow_remote and reachable_by_others(host):
        msg = f"other machines could connect to {host}, and nothing proves who they are: allow_remote=True"
        raise ValueError(msg)


async def listen_tcp(host: str, port: int, *, allow_remote: bool = False) -> Listening:
    """Listen on one TCP address; port 0 is any that is free.

    Raises:
        ValueError: there is no such address, or others than this machine could connect to it, and that
            is not allowed.
        OSError: what the system says: the name is unknown, the port is in use.
    """
    address = TcpAddress(host, port)
    check_reach(host, allow_remote=allow_remote)
    found = await resolve(address)
    if not found:
        raise OSError(errno.EADDRNOTAVAIL, "the host has no address", host)
    family, where = found[0]
    check_reach(str(where[0]), allow_remote=allow_remote)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # or the port could not be had again for a minute after a server has ended
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(address)) from None
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        name = sock.getsockname()
        return Listening(sock, TcpAddress(name[0], name[1]))
    except BaseException:
        sock.close()
        raise


# ---------------------------------------------------------------------- accepting


class Listener:
    """Accepts, and goes on accepting whatever happens.

    Where accepting fails (there are no descriptors left), it is tried again a little later, and at once
    when `again` says that something was closed.

    Args:
        sock: a socket that listens, non-blocking; not closed here.
        taken: called on the loop with each connection, which it then owns; it must not raise.
    """

    def __init__(self, sock: socket.socket, taken: Callable[[socket.socket], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._taken = taken
        self._pause = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._open = True
        self._watch()

    def again(self) -> None:
        """Something was closed: if accepting has failed, try again now."""
        if self._timer is not None:
            self._timer.cancel()
            self._resume()

    def stop(self) -> None:
        """Accept nothing more. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        elif self._task is not None:
            self._task.cancel()
        else:
            self._loop.remove_reader(self._sock)

    def _watch(self) -> None:
        if _BY_TASK:
            self._task = self._loop.create_task(self._accept_by_task())
        else:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._loop.remove_reader(self._sock)
                self._failed(error)
                return
            self._pause = 0.0
            self._taken(sock)
            if not self._open:
                return

    async def _accept_by_task(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._task = None
                self._failed(error)
                return
            self._pause = 0.0
            self._taken(sock)

    def _failed(self, error: OSError) -> None:
        if not self._pause:  # once for a time in which it fails
            log.warning("no connection can be accepted for now: %s", error.strerror)
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE), _LAST_PAUSE)
        self._timer = self._loop.call_later(self._pause, self._resume)

    def _resume(self) -> None:
        self._timer = None
        if self._open:
            self._watch()
