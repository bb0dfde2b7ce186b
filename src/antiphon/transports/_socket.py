"""A peer at the other end of a Unix or TCP socket.

Responsible for connecting to one, for what is known of who is there (`info`), and for what the end of
either direction means: a client that ends its writing side still gets its answers. Leaves the bytes to
`_stream`, listening to `_listener`, and who may connect to the server above.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import select
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from antiphon._errors import ConnectionClosed, StartError
from antiphon.transports._address import TcpAddress, UnixAddress, parse_address
from antiphon.transports._loop_socket import open_by_loop
from antiphon.transports._stream import StreamTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core import Limits
    from antiphon.transports._address import Address
    from antiphon.transports._transport import Receiver

__all__ = ["SocketTransport"]

#: How long connecting may take.
CONNECT_TIMEOUT = 10.0
#: How long closing waits for the peer to take what was sent.
FLUSH_GRACE = 2.0
#: How long it waits after that for the peer's end. What has not arrived when a socket is closed with
#: something unread in it is lost, over TCP; and the peer is told of a reset instead of an end.
LINGER = 0.5
#: While the queue of somebody who listens is full, it is tried again so often, in seconds.
_AGAIN = 0.02

#: Where a loop cannot watch a socket.
_BY_LOOP = sys.platform == "win32"

_NOT_YET = {errno.EAGAIN, errno.EINPROGRESS, errno.EALREADY, errno.EINTR}
_TEXTS = {
    errno.ENOENT: "there is no such socket",
    errno.ECONNREFUSED: "nobody listens there",
}


class SocketTransport(StreamTransport):
    """Frames over a Unix or TCP socket; satisfies `Transport`.

    Where we have connected, the end of what the peer writes is the end of the connection. Where it was
    accepted, that is `input_ended`, so that a client that ends its writing side still gets its answers;
    one that has closed its Unix socket altogether is lost at once.

    It takes two descriptors, since each direction is closed by itself.

    A stranger's browser can be made to connect to any port of its own machine, and to send there what a
    page wants in the body of a request. So a TCP connection that was accepted and does not begin with a
    JSON object is lost before any of it is delivered.

    Args:
        peer: `"unix:PATH"`, `"unix:@NAME"` (an abstract socket of Linux), `"tcp:HOST:PORT"`,
            `"tcp:[IPV6]:PORT"`, which `start` connects to; or a connected stream socket, which is owned
            from here on.
        limits: `frame_bytes` is used.
        accepted: of a socket that is given: whether it was the peer who connected.
        connect_timeout: seconds for connecting; None for the system's own bound.

    Raises:
        ValueError: that is no address.
    """

    def __init__(
        self,
        peer: str | socket.socket,
        limits: Limits | None = None,
        *,
        accepted: bool = True,
        connect_timeout: float | None = CONNECT_TIMEOUT,
    ) -> None:
        super().__init__(limits)
        self._connect_timeout = connect_timeout
        self._address = parse_address(peer) if isinstance(peer, str) else None
        self._socket = None if isinstance(peer, str) else peer
        self._writing = -1  # the writer's descriptor, if it has one, while there is a writer
        self._end_writing: Callable[[], None] | None = None
        self._failure: ConnectionClosed | None = None
        self._over = asyncio.Event()  # nothing more can be read
        self._refusing = False  # what comes is dropped
        #: Whether anything came at all.
        self.heard = False
        if isinstance(peer, str):
            kind = "unix" if isinstance(self._address, UnixAddress) else "tcp"
            self._info: dict[str, Any] = {"kind": kind, "peer": None}
            self._accepted = self._wary = False
        else:
            self._info = info_of(peer)
            self._accepted = accepted
            self._wary = accepted and self._info["kind"] == "tcp"

    async def start(self, receiver: Receiver) -> None:
        """Connect, if that is still to be done, and begin to deliver.

        Raises:
            StartError: there is no such socket, nobody listens at it, it may not be used, or connecting
                took too long (`timed_out`).
            LocalProtocolError: the transport was started or closed before.
        """
        self._claim(receiver)
        if self._address is not None:
            sock = await connect_socket(self._address, self._connect_timeout)
            if self._closing:
                sock.close()
                raise StartError("it was closed while it was being connected")
            self._info = info_of(sock)
        else:
            assert self._socket is not None  # there is one or the other
            sock, self._socket = self._socket, None
        try:
            _prepare(sock)
            await self._begin(sock)
        except BaseException:
            sock.close()
            raise

    async def _begin(self, sock: socket.socket) -> None:
        if _BY_LOOP:
            reader, writer = await open_by_loop(
                sock,
                receive=self._received,
                ended=self._input_ended,
                paused=self._output_full,
                resumed=self._output_free,
                failed=self._output_failed,
            )
            self._reader, self._writer = reader, writer
            self._end_writing = writer.end
            if not self._paused:
                reader.resume()
            return
        reading = os.dup(sock.fileno())
        self._writing = writing = sock.detach()
        self._end_writing = lambda: _end_writing(writing)
        # A loop on libuv calls once for a socket with an error and then forgets it, whatever else is to
        # be read from it; through an object of ours it does not. Linux has one.
        plain = isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
        self._open(reading, writing, own=plain or sys.platform != "linux")

    @property
    def info(self) -> dict[str, Any]:
        """The kind, "unix" or "tcp", and who is the peer, as far as the system tells.

        For a Unix socket its uid, gid and pid when it connected (or began to listen); None where the
        system does not tell. For TCP its host and port, which prove nobody's identity. None before a
        connection is made.
        """
        return self._info

    def describe(self) -> str:
        """Name it in logs and errors: "unix:/run/agent.sock", "unix client (uid 1000, pid 4711)"."""
        if self._address is not None:
            return str(self._address)
        kind, peer = self._info["kind"], self._info["peer"]
        name = f"{kind} {'client' if self._accepted else 'agent'}"
        if peer is None:
            return name
        if kind == "unix":
            return f"{name} (uid {peer['uid']}, pid {peer['pid']})"
        return f"{name} ({str(TcpAddress(**peer)).removeprefix('tcp:')})"

    def refuse_input(self) -> None:
        """Take nothing more: as if the peer had ended its writing side. What came is answered.

        Idempotent, and nothing before the start or after the end.
        """
        if self._receiver is None or self._lost or self._refusing or self._over.is_set():
            return
        self._refusing = True
        if self._reader is not None:
            self._reader.resume()  # or the peer might be stuck with it, and the end not be seen
        self._receiver.input_ended()

    async def aclose(self) -> None:
        """Write what was sent, for at most 2 s, end our side, and wait at most 0.5 s for the peer's.

        `connection_lost(None)` comes first, if it has not come. Idempotent; cancelled, it closes at
        once.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            self._lose(None)
            if self._reader is not None:
                self._reader.resume()
            if await self._flush(FLUSH_GRACE) and self._writer and self._end_writing:
                self._end_writing()
                if self._reader is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LINGER):
                            await self._over.wait()
        finally:
            if self._socket is not None:
                self._socket.close()
            self._close_reader()
            self._close_writer()
            self._closed.set()

    # ------------------------------------------------------------------ from the stream

    def _received(self, data: bytes) -> None:
        self.heard = True
        if self._refusing:
            return
        if self._wary and not self._begins_well(data):
            return
        super()._received(data)

    def _begins_well(self, data: bytes) -> bool:
        begin = data.lstrip(b"\xef\xbb\xbf \t\r\n")  # the byte order mark, and blank lines
        if begin:
            self._wary = False
            if not begin.startswith(b"{"):
                self._failure = ConnectionClosed(
                    f"what connected does not begin with a JSON object: {begin[:60]!r}"
                )
                self._lose(self._failure)
                return False
        return True

    def _input_ended(self, error: OSError | None) -> None:
        self._over.set()
        super()._input_ended(error)

    def _end_frames(self) -> None:
        if not self._refusing:
            super()._end_frames()

    def _input_over(self, error: OSError | None) -> None:
        if error is not None:
            self._fail(error, "the connection broke")
        elif not self._accepted or self._writer is None or _hung_up(self._writing):
            self._finish()
        elif self._receiver is not None and not self._refusing:
            self._receiver.input_ended()

    def _output_failed(self, error: OSError) -> None:
        self._close_writer()
        self._fail(error, "the peer takes nothing more")

    def _fail(self, error: OSError, reason: str) -> None:
        if self._failure is None:
            self._failure = ConnectionClosed(f"{reason}: {error.strerror}")
            self._failure.__cause__ = error
        self._finish()

    def _last_word(self) -> Exception | None:
        return self._failure


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # the peer may be gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer whose machine has vanished is noticed, if late.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _end_writing(fd: int) -> None:
    """Let the peer see the end of what we write, and leave the descriptor as it is."""
    sock = socket.socket(fileno=fd)
    try:
        with contextlib.suppress(OSError):  # the peer is gone
            sock.shutdown(socket.SHUT_WR)
    finally:
        sock.detach()


def _hung_up(fd: int) -> bool:
    """Whether the peer of a Unix socket has closed it, and not its writing side alone.

    Of TCP nobody can know before something is written; elsewhere a half is told like a whole.
    """
    if sys.platform != "linux" or fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


# ---------------------------------------------------------------------- who is there


def info_of(sock: socket.socket) -> dict[str, Any]:
    """What `SocketTransport.info` says of a connected socket."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return {"kind": "unix", "peer": peer_credentials(sock)}
    peer = None
    with contextlib.suppress(OSError):  # it is gone already
        host, port = sock.getpeername()[:2]
        peer = {"host": host, "port": port}
    return {"kind": "tcp", "peer": peer}


def peer_credentials(sock: socket.socket) -> dict[str, int] | None:
    """User, group and process at the other end of a Unix socket, as the kernel knows them.

    They are those of the time when it connected, or began to listen. None where the system does not
    tell.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            form = struct.Struct("3i")
            pid, uid, gid = form.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
            )
            # Of a pair that was made without connecting, nobody is known.
            return {"uid": uid, "gid": gid, "pid": pid} if pid or uid != -1 else None
        if sys.platform == "darwin" or sys.platform.startswith("freebsd"):
            return _bsd_credentials(sock)
    return None


def _bsd_credentials(sock: socket.socket) -> dict[str, int] | None:
    local, credentials, process = 0, 1, 2  # SOL_LOCAL, LOCAL_PEERCRED, LOCAL_PEERPID
    data = sock.getsockopt(local, credentials, 256)
    version, uid, groups, gid = struct.unpack_from("IIhxxI", data)
    if version != 0 or groups < 1:
        return None
    pid = 0
    if sys.platform == "darwin":
        (pid,) = struct.unpack("i", sock.getsockopt(local, process, 4))
    return {"uid": uid, "gid": gid, "pid": pid}


# ---------------------------------------------------------------------- connecting


async def connect_socket(address: Address, timeout: float | None) -> socket.socket:
    """Connect. Raises `StartError`, which says what is in the way."""
    try:
        async with asyncio.timeout(timeout):
            if isinstance(address, UnixAddress):
                return await _connect_unix(address)
            return await _connect_tcp(address)
    except TimeoutError:
        within = "in time" if timeout is None else f"within {timeout:g} s"
        raise StartError(f"no connection to {address} {within}", timed_out=True) from None
    except OSError as error:
        reason = _TEXTS.get(error.errno or 0, error.strerror or str(error))
        raise StartError(f"cannot connect to {address}: {reason}") from error


async def _connect_unix(address: UnixAddress) -> socket.socket:
    if sys.platform == "win32":
        raise OSError(errno.EAFNOSUPPORT, "there are no Unix sockets on Windows; use tcp:HOST:PORT")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # Not by the loop's `sock_connect`: a full queue is EAGAIN here, after which there is nothing
        # to wait for, and which asyncio takes for a connection that is being made.
        while (code := sock.connect_ex(address.sockaddr)) in _NOT_YET:  # noqa: ASYNC110
            await asyncio.sleep(_AGAIN)
        _check(code)
    except BaseException:
        sock.close()
        raise
    return sock


def _check(code: int) -> None:
    if code not in {0, errno.EISCONN}:
        raise OSError(code, os.strerror(code))


async def _connect_tcp(address: TcpAddress) -> socket.socket:
    failure: OSError | None = None
    for family, where in await resolve(address):
        try:
            return await _connect_to(family, where)
        except OSError as error:
            # Of several, the first says most: the others are often an address family that is off.
            failure = failure or error
    raise failure or OSError(errno.EADDRNOTAVAIL, "the host has no address")


async def _connect_to(family: int, where: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
        if sock.getsockname() == sock.getpeername():
            # Nobody listens at a port from which the system also takes its own: it can be met by
            # itself, and echoes.
            _check(errno.ECONNREFUSED)
    except BaseException:
        sock.close()
        raise
    return sock


async def resolve(address: TcpAddress) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket addresses of a host, in the system's order. Raises `OSError`."""
    with contextlib.suppress(ValueError):  # a number needs nobody to be asked, and no thread
        number = ipaddress.ip_address(address.host)
        if number.version == 4:
            return [(socket.AF_INET, (address.host, address.port))]
        if "%" not in address.host:
            return [(socket.AF_INET6, (address.host, address.port, 0, 0))]
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [(family, where) for family, _, _, _, where in found if family in kinds]
