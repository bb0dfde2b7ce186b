"""Reading and writing open descriptors from an event loop, whatever they are.

Responsible for moving bytes between a descriptor and the loop's thread without ever blocking the
loop, losing a byte, or changing what other programs see of the descriptor. Leaves framing and the
meaning of an end to `transports`, processes to `_process`.

Own code instead of asyncio's pipe transports, because those refuse files, hang on the null device,
read with a buffer that is slow to allocate, close a socket that is both ends, and set O_NONBLOCK on
descriptions that stderr may share, which silently loses log text (decision note 0004).

A loop that is not asyncio's own may set O_NONBLOCK on whatever it watches (uvloop does). Where others
may hold the description, such a loop is given an epoll object of ours that watches it instead.

============== ============================ ======================================
descriptor     reading                      writing
============== ============================ ======================================
pipe of ours   `add_reader`, `os.read`      O_NONBLOCK, `os.write`, `add_writer`
foreign pipe   the same                     its own description, reopened; else
                                            the flag if nobody shares it; else a
                                            thread
terminal       the same                     its own description, reopened; else
                                            plain `os.write`
socket         the same                     MSG_DONTWAIT, `add_writer`
file, null     a thread                     plain `os.write`
anything, on   a thread                     a thread
Windows
============== ============================ ======================================
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import stat
import sys
import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from queue import SimpleQueue
    from typing import Protocol

    Bytes = bytes | memoryview
else:
    Protocol = object  # for type checkers alone; a class of it takes five times as long to make

__all__ = [
    "CHUNK",
    "HIGH_WATER",
    "LOW_WATER",
    "PIPE",
    "Reader",
    "Writer",
    "open_reader",
    "open_writer",
]

#: Read at most this much at a time. It is what a pipe holds, and below the size from which glibc
#: maps fresh memory for each buffer, which costs more than the read.
CHUNK = 65536
#: Above this much unwritten output, senders are asked to wait; at or below the low mark, to go on.
HIGH_WATER = 65536
LOW_WATER = 16384
#: What a pipe that we write to is to hold, once it was full. A mebibyte gains little more than this,
#: and sixty-four of those are all that a user's pipes may hold.
PIPE = 1 << 18

# Pieces given to one gathering write. The kernel takes up to IOV_MAX of them, at least 16.
_GATHER = 16
# How long closing may wait for a thread that is about to return from a read of a file.
_JOIN = 0.05


class Into(Protocol):
    """Where a reader may read to, so that a chunk need not be made of it and copied."""

    def room(self) -> memoryview | None:
        """Where the next bytes may be put, None where they are to be received; `filled` follows."""
        raise NotImplementedError

    def filled(self, count: int) -> None:
        """So many bytes are there: they are received, if any."""


class Reader(Protocol):
    """Owns a descriptor and hands over what is read from it; begins paused.

    `receive(data)` gets every chunk in order, `ended(error)` comes once and last: None for an
    orderly end, else the OS error. Both run on the loop, never inside a method called on the
    reader except `drain`. After `close` nothing comes any more.
    """

    #: False where a thread does the reading.
    pollable: bool

    def resume(self) -> None:
        """Hand over what comes. Idempotent."""

    def pause(self) -> None:
        """Hand over nothing for now. Idempotent."""

    def drain(self, most: int) -> None:
        """Hand over at once what can be read without waiting, about `most` bytes, unless paused."""

    def close(self) -> None:
        """Stop, and close the descriptor. Idempotent."""


def open_reader(
    loop: asyncio.AbstractEventLoop,
    fd: int,
    receive: Callable[[bytes], None],
    ended: Callable[[OSError | None], None],
    *,
    own: bool = False,
    into: Into | None = None,
) -> Reader:
    """Make the right reader for `fd`, which it owns from now on.

    No flag is needed or changed: a descriptor that polls readable does not block a read.

    Args:
        loop: where the reader lives.
        fd: the descriptor.
        receive: called with each chunk.
        ended: called at the end.
        own: True for a pipe made by this process, whose reading end nobody else has: then it does
            not matter what the loop does to its flags.
        into: where to read to in place of calling `receive`, as long as it has room; not used by a thread.
    """
    if _can_poll(fd) and _can_watch(loop, own=own):
        reader = _PollReader(_Watch(loop, fd, own=own), fd, receive, ended, into)
        try:
            reader.resume()
        except (OSError, NotImplementedError):  # this loop cannot watch this one
            reader.forget()
        else:
            reader.pause()
            return reader
    return _ThreadReader(loop, fd, receive, ended)


def _can_poll(fd: int) -> bool:
    if sys.platform == "win32":
        return False
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def _can_watch(loop: asyncio.AbstractEventLoop, *, own: bool) -> bool:
    return own or isinstance(loop, asyncio.SelectorEventLoop) or sys.platform == "linux"


class _Watch:
    """Has the loop call a function while a descriptor is ready, and leaves its flags alone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, *, own: bool, write: bool = False
    ) -> None:
        self._epoll: select.epoll | None = None
        if own or isinstance(loop, asyncio.SelectorEventLoop):
            self._fd = fd
        else:
            # Other loops may set O_NONBLOCK on what they watch: let it be this object. It is
            # readable when the descriptor is ready, for reading or for writing.
            self._epoll = select.epoll()
            self._epoll.register(fd, select.EPOLLOUT if write else select.EPOLLIN)
            self._fd = self._epoll.fileno()
            write = False
        self._add = loop.add_writer if write else loop.add_reader
        self._remove = loop.remove_writer if write else loop.remove_reader

    def start(self, function: Callable[[], object]) -> None:
        self._add(self._fd, function)

    def stop(self) -> None:
        self._remove(self._fd)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


def _end_of(error: OSError) -> OSError | None:
    # A terminal whose other side is gone says EIO; it is its way to say end of file.
    return None if error.errno == errno.EIO else error


class _PollReader:
    pollable = True

    def __init__(
        self,
        watch: _Watch,
        fd: int,
        receive: Callable[[bytes], None],
        ended: Callable[[OSError | None], None],
        into: Into | None = None,
    ) -> None:
        self._into = into
        self._watch = watch
        self._fd = fd
        self._receive = receive
        self._ended = ended
        self._paused = True

    def resume(self) -> None:
        if self._paused and self._fd >= 0:
            self._watch.start(self._ready)
            self._paused = False

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._watch.stop()

    def drain(self, most: int) -> None:
        while most > 0 and not self._paused and self._fd >= 0:
            if not _readable(self._fd):
                return
            most -= self._ready()

    def close(self) -> None:
        if self._fd >= 0:
            self.pause()
            os.close(self._fd)
            self.forget()

    def forget(self) -> None:
        """Give the descriptor up without closing it."""
        self._watch.close()
        self._fd = -1

    def _ready(self) -> int:
        if self._paused:
            return 0
        into = self._into
        room = None if into is None else into.room()
        if into is not None and room is not None:
            return self._read_into(into, room)
        try:
            data = os.read(self._fd, CHUNK)
        except (BlockingIOError, InterruptedError):
            # Whoever gave us the descriptor had set O_NONBLOCK, and a third party read it empty.
            return CHUNK
        except OSError as error:
            self._end(_end_of(error))
            return 0
        if data:
            self._receive(data)
        else:
            self._end(None)
        return len(data)

    def _read_into(self, into: Into, room: memoryview) -> int:
        count = 0
        failed: OSError | None = None
        try:
            count = os.readv(self._fd, (room,))
        except OSError as error:
            failed = error
        finally:  # a line cannot grow while its room is lent
            into.filled(count)
        if isinstance(failed, (BlockingIOError, InterruptedError)):
            return CHUNK
        if not count:
            self._end(None if failed is None else _end_of(failed))
        return count

    def _end(self, error: OSError | None) -> None:
        self.close()
        self._ended(error)


def _readable(fd: int) -> bool:
    if sys.platform == "win32":
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _wait_for(fd: int, *, write: bool) -> None:
    """Block until a descriptor is ready. Not by `select`, which takes no number from 1024 on."""
    if sys.platform == "win32":  # where no descriptor is non-blocking, so that none is waited for
        raise NotImplementedError
    poll = select.poll()
    poll.register(fd, select.POLLOUT if write else select.POLLIN)
    poll.poll()


class _ThreadReader:
    """Reads in a thread, one chunk ahead, so that pausing bounds what is held."""

    pollable = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        receive: Callable[[bytes], None],
        ended: Callable[[OSError | None], None],
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._receive = receive
        self._ended = ended
        self._paused = True
        self._closed = False
        self._held: tuple[bytes, OSError | None] | None = None
        self._wanted = threading.Semaphore(0)
        # A daemon, because a read that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name="antiphon read", daemon=True)

    def resume(self) -> None:
        if not self._paused or self._closed:
            return
        self._paused = False
        if self._thread.ident is None:
            self._thread.start()
        elif self._held is not None:
            self._loop.call_soon(self._hand_over)

    def pause(self) -> None:
        self._paused = True

    def drain(self, most: int) -> None:
        """Do nothing: what the thread has read is on its way already."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._held = None
        if self._thread.ident is None:
            os.close(self._fd)
            return
        # The thread closes the descriptor: here it might be closed, and its number given away,
        # while the thread is about to read it. From a file the read returns at once.
        self._wanted.release()
        self._thread.join(_JOIN)

    def _run(self) -> None:
        try:
            while not self._closed:
                data, error = self._read()
                self._loop.call_soon_threadsafe(self._take, data, error)
                if not data:
                    return
                self._wanted.acquire()
        except RuntimeError:  # the loop is closed: nobody waits for this any more
            pass
        finally:
            os.close(self._fd)

    def _read(self) -> tuple[bytes, OSError | None]:
        while True:
            try:
                return os.read(self._fd, CHUNK), None
            except BlockingIOError:
                _wait_for(self._fd, write=False)
            except OSError as error:
                return b"", _end_of(error)

    def _take(self, data: bytes, error: OSError | None) -> None:
        if not self._closed:
            self._held = data, error
            self._hand_over()

    def _hand_over(self) -> None:
        if self._paused or self._held is None:
            return
        (data, error), self._held = self._held, None
        if data:
            self._wanted.release()
            self._receive(data)
        else:
            self.close()
            self._ended(error)


class Writer(Protocol):
    """Owns a descriptor and writes to it, now as much as it takes, the rest when it can.

    `paused()` (perhaps inside `write`) and `resumed()` come when the output that waits exceeds
    `HIGH_WATER` and when it is back at `LOW_WATER`; `failed(error)` comes at most once, never
    inside `write`, when the other side is gone; what is written after that is dropped. After
    `close` nothing comes any more.
    """

    @property
    def buffered(self) -> int:
        """Bytes taken but not yet given to the operating system."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Take `data`; it is not copied, and nothing is raised."""

    async def drained(self) -> None:
        """Wait until nothing is buffered, or writing failed, or the writer was closed."""

    def close(self) -> None:
        """Drop what is buffered and close the descriptor. Idempotent."""


def open_writer(
    loop: asyncio.AbstractEventLoop,
    fd: int,
    *,
    paused: Callable[[], None],
    resumed: Callable[[], None],
    failed: Callable[[OSError], None],
    own: bool = False,
) -> Writer:
    """Make the right writer for `fd`, which it owns from now on.

    Args:
        loop: where the writer lives.
        fd: the descriptor.
        paused: called when more than `HIGH_WATER` bytes wait.
        resumed: called when, after that, no more than `LOW_WATER` bytes wait.
        failed: called when nothing can be written any more.
        own: True for a pipe made by this process, whose writing end nobody else has: its flags
            may be changed. False for a descriptor that came from outside.
    """
    flow = _Flow(paused, resumed, failed)
    if sys.platform == "win32":
        return _ThreadWriter(loop, fd, flow)
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        if not _can_watch(loop, own=own):
            return _ThreadWriter(loop, fd, flow)
        return _PollWriter(loop, _SocketTarget(fd), flow, own=own)
    if stat.S_ISFIFO(mode):
        if own:
            os.set_blocking(fd, False)
            return _PollWriter(loop, _PipeTarget(fd), flow, own=True)
        reopened = _reopen(fd)
        if reopened is not None:
            os.close(fd)
            return _PollWriter(loop, _PipeTarget(reopened), flow, own=True)
        if _shares_description(fd, 2):
            return _ThreadWriter(loop, fd, flow)
        return _PollWriter(loop, _PipeTarget(fd, restore=_set_nonblocking(fd)), flow, own=True)
    if os.isatty(fd):
        reopened = _reopen(fd)
        if reopened is not None:
            os.close(fd)
            return _PollWriter(loop, _PipeTarget(reopened), flow, own=True)
    return _PollWriter(loop, _FileTarget(fd), flow)


def _reopen(fd: int) -> int | None:
    """Open a non-blocking description of our own for the same pipe or terminal, or None.

    Only Linux can: elsewhere /dev/fd gives the same description back. Refused, for example, for a
    pipe of another user. Must not be done to regular files: the new offset would be 0.
    """
    if sys.platform != "linux":
        return None
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError:
        return None


def _shares_description(one: int, other: int) -> bool:
    """Tell whether two descriptors are the same open file description.

    There is no portable question for it, so: change the flag on one, look at the other, undo it.
    """
    try:
        before = os.get_blocking(one)
        if os.get_blocking(other) != before:
            return False
        os.set_blocking(one, not before)
        try:
            return os.get_blocking(other) != before
        finally:
            os.set_blocking(one, before)
    except OSError:
        return False


def _set_nonblocking(fd: int) -> bool:
    """Set O_NONBLOCK; tell whether it has to be cleared at the end."""
    before = os.get_blocking(fd)
    os.set_blocking(fd, False)
    return before


class _Flow:
    def __init__(
        self,
        paused: Callable[[], None],
        resumed: Callable[[], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self.paused = paused
        self.resumed = resumed
        self.failed = failed


class _Target(Protocol):
    """One way to write a descriptor without blocking."""

    fd: int

    def send(self, data: Bytes) -> int: ...
    def send_pieces(self, pieces: Sequence[Bytes]) -> int: ...
    def grow(self) -> bool: ...
    def close(self) -> None: ...


class _PipeTarget:
    def __init__(self, fd: int, *, restore: bool = False) -> None:
        self.fd = fd
        self._restore = restore
        self._grown = False

    def send(self, data: Bytes) -> int:
        return os.write(self.fd, data)

    def send_pieces(self, pieces: Sequence[Bytes]) -> int:
        return os.writev(self.fd, pieces)

    def grow(self) -> bool:
        if self._grown:
            return False
        self._grown = True
        return _grow_pipe(self.fd)

    def close(self) -> None:
        if self._restore:
            with contextlib.suppress(OSError):
                os.set_blocking(self.fd, True)
        os.close(self.fd)


class _SocketTarget:
    def __init__(self, fd: int) -> None:
        # A default timeout would make the constructor set O_NONBLOCK on what others share.
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(None)
        try:
            self._socket = socket.socket(fileno=fd)
        finally:
            socket.setdefaulttimeout(timeout)
        self._flags = socket.MSG_DONTWAIT
        self.fd = fd

    def send(self, data: Bytes) -> int:
        return self._socket.send(data, self._flags)

    def send_pieces(self, pieces: Sequence[Bytes]) -> int:
        return self._socket.sendmsg(pieces, (), self._flags)

    def grow(self) -> bool:
        return False  # it has the size that the system gives it

    def close(self) -> None:
        self._socket.close()


class _FileTarget:
    """A regular file or the null device, which are never full: plain blocking writes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, data: Bytes) -> int:
        _write_all(self.fd, data)
        return len(data)

    def send_pieces(self, pieces: Sequence[Bytes]) -> int:
        return sum(self.send(piece) for piece in pieces)

    def grow(self) -> bool:
        return False  # it is never full

    def close(self) -> None:
        os.close(self.fd)


def _grow_pipe(fd: int) -> bool:
    """Let a pipe hold `PIPE` bytes, where the system allows it; tell whether it holds more now.

    Who writes much then waits less often, and for each of its waits two processes have to wake. Only
    for one that was found full: what the pipes of one user hold in all is limited, and most never are.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) >= PIPE:
            return False
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE)
    except OSError:
        return False
    return True


def _write_all(fd: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            # Others have made the description non-blocking.
            _wait_for(fd, write=True)


class _Writer:
    """What writers share: the marks, the waiters, failing once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, flow: _Flow) -> None:
        self._loop = loop
        self._flow = flow
        self._buffered = 0
        self._above = False
        self._dead = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def buffered(self) -> int:
        return self._buffered

    async def drained(self) -> None:
        if self._buffered and not self._dead:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _added(self, size: int) -> None:
        self._buffered += size
        if self._buffered > HIGH_WATER and not self._above:
            self._above = True
            self._flow.paused()

    def _written(self, size: int) -> None:
        self._buffered -= size
        if self._above and self._buffered <= LOW_WATER:
            self._above = False
            self._flow.resumed()
        if not self._buffered:
            self._wake()

    def _stop(self) -> None:
        self._dead = True
        self._buffered = 0
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class _PollWriter(_Writer):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, target: _Target, flow: _Flow, *, own: bool = True
    ) -> None:
        super().__init__(loop, flow)
        self._target = target
        self._own = own
        self._watch: _Watch | None = None  # while something waits for room
        self._send = target.send
        self._backlog: deque[Bytes] = deque()
        self._open = True

    def write(self, data: bytes) -> None:
        if self._dead or not data:
            return
        if self._buffered:
            self._backlog.append(data)
            self._added(len(data))
            return
        try:
            sent = self._send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        if sent < len(data):
            rest = memoryview(data)[sent:] if sent else data
            if self._target.grow():
                self._write_on(rest)
            else:
                self._keep(rest)

    def _write_on(self, rest: Bytes) -> None:
        """Write what has room now; only what the descriptor does not take may wait here."""
        try:
            sent = self._send(rest)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        if sent < len(rest):
            self._keep(memoryview(rest)[sent:])

    def _keep(self, rest: Bytes) -> None:
        self._backlog.append(rest)
        self._watch = _Watch(self._loop, self._target.fd, own=self._own, write=True)
        self._watch.start(self._ready)
        self._added(len(rest))

    def close(self) -> None:
        if self._open:
            self._forget()
            self._open = False
            self._stop()
            self._target.close()

    def _ready(self) -> None:
        backlog = self._backlog
        if not backlog:
            return
        try:
            # A large piece goes alone; small ones are gathered, none of them copied.
            if len(backlog) == 1 or len(backlog[0]) >= CHUNK:
                sent = self._send(backlog[0])
            else:
                sent = self._target.send_pieces(list(islice(backlog, _GATHER)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        rest = sent
        while rest:
            piece = backlog.popleft()
            if len(piece) > rest:
                backlog.appendleft(memoryview(piece)[rest:])
                break
            rest -= len(piece)
        if not backlog:
            self._forget()
        self._written(sent)

    def _fail(self, error: OSError) -> None:
        self._forget()
        self._stop()
        # Not from here: the caller of `write` is in the middle of something.
        self._loop.call_soon(self._report, error)

    def _report(self, error: OSError) -> None:
        if self._open:
            self._flow.failed(error)

    def _forget(self) -> None:
        self._backlog.clear()
        if self._watch is not None:
            self._watch.stop()
            self._watch.close()
            self._watch = None


class _ThreadWriter(_Writer):
    """Writes in a thread, for what can neither be polled nor made non-blocking."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, flow: _Flow) -> None:
        from queue import SimpleQueue  # a pipe needs none

        super().__init__(loop, flow)
        self._fd = fd
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        # A daemon, because a write that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name="antiphon write", daemon=True)
        self._open = True

    def write(self, data: bytes) -> None:
        if self._dead or not data:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(data)
        self._added(len(data))

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._stop()
        if self._thread.ident is None:
            os.close(self._fd)
            return
        # As for reading, the thread closes what it may be using.
        self._queue.put(None)
        self._thread.join(_JOIN)

    def _run(self) -> None:
        try:
            while (data := self._queue.get()) is not None:
                if self._dead:
                    continue
                try:
                    _write_all(self._fd, data)
                except OSError as error:
                    self._loop.call_soon_threadsafe(self._fail, error)
                else:
                    self._loop.call_soon_threadsafe(self._progress, len(data))
        except RuntimeError:  # the loop is closed
            pass
        finally:
            os.close(self._fd)

    def _progress(self, size: int) -> None:
        if not self._dead:
            self._written(size)

    def _fail(self, error: OSError) -> None:
        if not self._dead:
            self._stop()
            self._flow.failed(error)
