"""This process as a peer on its own standard input and output.

Responsible for moving the protocol away from descriptors 0 and 1 to private ones, so that neither a
`print`, nor a C library, nor a child process can write to the wire or read from it (field faults 08
and 09, R1 on stdout purity), and for a `Transport` over the private ones. Leaves reading, writing
and framing to `_stream`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from antiphon._errors import ConnectionClosed, LocalProtocolError
from antiphon.transports._stream import StreamTransport

if TYPE_CHECKING:
    from antiphon.core import Limits
    from antiphon.transports._transport import Receiver

__all__ = ["StdioTransport", "secure_stdio"]

logger = logging.getLogger("antiphon.stdio")

#: How long closing waits for the client to take what was sent.
FLUSH_GRACE = 2.0


class _Process:
    """What was done to the standard descriptors of this process."""

    private: tuple[int, int] | None = None
    taken = False


def secure_stdio() -> tuple[int, int]:
    """Move the protocol to private descriptors; return the one to read and the one to write.

    From then on descriptor 0 is the null device, so `input()` and careless children see the end of
    file, and descriptor 1 is where standard error goes, so what is printed is seen by a person and
    not by the peer. Text that `sys.stdout` still held is printed there too. The private descriptors
    are not inherited by children.

    * Where standard output and standard error are one file or pipe (`2>&1`), printed text must not
      go there: descriptors 1 and 2 become the null device; a terminal is left at 2, for people.
    * A descriptor that was closed is filled with the null device; as standard input it then gives
      the end of file at once.

    Idempotent: later calls return the same pair. Call it before anything that may print or start
    processes; what is printed before and flushed is on the wire already.
    """
    if _Process.private is None:
        _Process.private = _move()
        _redirect_text()
    return _Process.private


def _move() -> tuple[int, int]:
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    holes = {number for number in range(3) if not _is_open(number)}
    # A number that was closed when Python started, which made its stream None, may by now be
    # somebody else's file, or the loop's own: that is neither used nor replaced.
    foreign = {number for number in range(3) if streams[number] is None} - holes
    null = _open_null()
    try:
        for number in holes:
            os.dup2(null, number)
        reading = _duplicate(null if 0 in foreign else 0)
        writing = _duplicate(null if 1 in foreign else 1)
        shared = 2 not in foreign and _same_file(writing, 2)
        if 0 not in foreign:
            os.dup2(null, 0)
        if 1 not in foreign:
            os.dup2(null if shared or 2 in foreign else 2, 1)
        if shared and not os.isatty(2):
            os.dup2(null, 2)
            # Only now: said earlier, it might have gone to the peer.
            logger.warning(
                "standard error was the protocol's channel, and is discarded from now on"
            )
    finally:
        os.close(null)
    return reading, writing


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _open_null() -> int:
    """Open the null device at a number above the standard ones."""
    opened = [os.open(os.devnull, os.O_RDWR)]
    while opened[-1] <= 2:
        opened.append(os.open(os.devnull, os.O_RDWR))
    null = opened.pop()
    for fd in opened:
        os.close(fd)
    return null


def _duplicate(fd: int) -> int:
    """Duplicate to a number above the standard ones, not inherited by children."""
    if sys.platform == "win32":
        return os.dup(fd)  # by now the standard numbers are all in use
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _same_file(one: int, other: int) -> bool:
    first, second = os.fstat(one), os.fstat(other)
    # Pipes on Windows have no number; the null device swallows everything anyway.
    harmless = not first.st_ino or (stat.S_ISCHR(first.st_mode) and not os.isatty(one))
    return not harmless and (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _redirect_text() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if isinstance(stream, io.TextIOWrapper):
            # What it still held goes to standard error like all that follows; and as there, no
            # character may make a `print` fail.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                stream.reconfigure(line_buffering=True, errors="backslashreplace")


class StdioTransport(StreamTransport):
    """Frames over this process's own standard input and output; satisfies `Transport`.

    `start` calls `secure_stdio`. The end of standard input is `input_ended`: the output stays open,
    so that what was read can still be answered, until `aclose`. A client that no longer takes our
    output is `connection_lost`. Whatever standard input and output are is fine: pipes, sockets (one
    socket for both too), terminals, files, the null device. There is one such transport in the life
    of a process.

    Args:
        limits: `frame_bytes` is used.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._failure: ConnectionClosed | None = None

    async def start(self, receiver: Receiver) -> None:
        """Move standard input and output to private descriptors, and begin to deliver.

        Raises:
            LocalProtocolError: the transport, or another one in this process, was started before.
        """
        if _Process.taken:
            msg = "standard input and output serve one connection in the life of a process"
            raise LocalProtocolError(msg)
        self._claim(receiver)
        _Process.taken = True
        reading, writing = secure_stdio()
        self._open(reading, writing, own=False)

    def describe(self) -> str:
        """Name it in logs and errors."""
        return "stdio"

    @property
    def info(self) -> dict[str, Any]:
        """The kind, "stdio", and that nothing is known of the peer."""
        return {"kind": "stdio", "peer": None}

    async def aclose(self) -> None:
        """Write what was sent, for at most 2 s, and close; the peer sees the end of our output.

        `connection_lost(None)` comes first, if it has not come. Idempotent; cancelled, it closes
        at once.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._close_reader()
        try:
            self._lose(None)
            await self._flush(FLUSH_GRACE)
        finally:
            self._close_writer()
            self._closed.set()

    def _input_over(self, error: OSError | None) -> None:
        if error is not None:
            self._failure = _closed_by(error, "reading standard input failed")
            self._finish()
        elif self._receiver is not None:
            self._receiver.input_ended()

    def _output_failed(self, error: OSError) -> None:
        self._close_writer()
        if self._failure is None:
            self._failure = _closed_by(error, "the client no longer takes our output")
        self._finish()

    def _last_word(self) -> Exception | None:
        return self._failure


def _closed_by(error: OSError, reason: str) -> ConnectionClosed:
    closed = ConnectionClosed(f"{reason}: {error.strerror}")
    closed.__cause__ = error
    return closed
