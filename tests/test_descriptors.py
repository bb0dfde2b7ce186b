"""Reading and writing pipes, sockets, terminals, files and the null device on both kinds of loop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import pty
import resource
import socket
import sys
import threading
import tty
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import _descriptors
from antiphon._descriptors import HIGH_WATER, LOW_WATER, PIPE, open_reader, open_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from antiphon._descriptors import Reader, Writer

MEBIBYTE = b"0123456789abcdef" * 65_536


class Input:
    """A reader of `fd` that keeps what it gets."""

    def __init__(self, fd: int) -> None:
        self.data = b""
        self.chunks: list[int] = []
        self.ended = asyncio.Event()
        self.error: OSError | None = None
        self.on_data: Callable[[], object] | None = None
        self._changed = asyncio.Event()
        self.reader: Reader = open_reader(asyncio.get_running_loop(), fd, self._data, self._end)

    def _data(self, data: bytes) -> None:
        assert not self.ended.is_set()
        self.data += data
        self.chunks.append(len(data))
        self._changed.set()
        if self.on_data is not None:
            self.on_data()

    def _end(self, error: OSError | None) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()
        self._changed.set()

    async def until(self, size: int) -> None:
        while len(self.data) < size:
            self._changed.clear()
            await self._changed.wait()


async def turns() -> None:
    """Let the loop look at its descriptors a few times: what is ready now has been seen after that."""
    for _ in range(5):
        await asyncio.sleep(0)


class Output:
    """A writer to `fd` that keeps what it says."""

    def __init__(self, fd: int, *, own: bool = False) -> None:
        self.said: list[str] = []
        self.failed = asyncio.Event()
        self.error: OSError | None = None
        self.writer: Writer = open_writer(
            asyncio.get_running_loop(),
            fd,
            paused=lambda: self.said.append("paused"),
            resumed=lambda: self.said.append("resumed"),
            failed=self._fail,
            own=own,
        )

    def _fail(self, error: OSError) -> None:
        assert not self.failed.is_set()
        self.error = error
        self.failed.set()


def refuse_poll(fd: int) -> bool:
    return False


def is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def no_reopen(fd: int) -> None:
    return None


def no_growth(fd: int) -> bool:
    return False


def shared(one: int, other: int) -> bool:
    return True


def read_all(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(fd, 1 << 20)
    return data


# ------------------------------------------------------------------ reading


async def test_a_pipe_is_read_to_its_end(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    source = Input(reading)
    source.reader.resume()
    os.write(writing, b"abc")
    await source.until(3)
    os.write(writing, b"def")
    os.close(writing)

    await source.ended.wait()

    assert source.data == b"abcdef"
    assert source.error is None
    assert source.reader.pollable


class Lending:
    """Has room for every other chunk."""

    def __init__(self, read: list[bytes]) -> None:
        self.read = read
        self.asked = 0
        self.counts: list[int] = []
        self.lent = bytearray(1000)

    def room(self) -> memoryview | None:
        self.asked += 1
        return memoryview(self.lent) if self.asked % 2 else None

    def filled(self, count: int) -> None:
        self.counts.append(count)
        self.read.append(bytes(self.lent[:count]))


async def test_what_lends_room_is_read_into_in_place_of_being_given_chunks(
    loop_factory: Any,
) -> None:
    reading, writing = os.pipe()
    read: list[bytes] = []
    ended = asyncio.Event()
    lending = Lending(read)
    reader = open_reader(
        asyncio.get_running_loop(), reading, read.append, lambda error: ended.set(), into=lending
    )
    data = bytes(range(256)) * 40
    os.write(writing, data)
    reader.resume()
    await turns()
    os.close(writing)
    await ended.wait()

    assert b"".join(read) == data
    assert lending.counts[0] == 1000
    assert lending.asked >= 3  # the end is read, too
    assert is_closed(reading)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_room_is_given_back_when_a_read_into_it_is_interrupted(
    ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    read: list[bytes] = []
    lending = Lending(read)
    loop = asyncio.new_event_loop()
    reader = open_reader(loop, reading, read.append, lambda error: None, into=lending)
    os.write(writing, b"abc")
    reader.resume()

    def interrupted(fd: int, buffers: Any) -> int:
        raise ending

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", interrupted)
        with pytest.raises(ending):
            loop.run_forever()

    assert lending.counts == [0]
    lending.asked = 0
    while lending.counts[-1] != 3:
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert read[-1] == b"abc"
    reader.close()
    os.close(writing)
    loop.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBADMSG])
async def test_a_read_into_room_fails_as_any_other(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    read: list[bytes] = []
    errors: list[OSError | None] = []
    lending = Lending(read)
    reader = open_reader(
        asyncio.get_running_loop(), reading, read.append, errors.append, into=lending
    )
    os.write(writing, b"abc")

    def fail(fd: int, buffers: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fail)
        reader.resume()
        while not lending.counts:
            await asyncio.sleep(0)
        reader.pause()

    assert lending.counts == [0]  # what was lent was given back
    if number in {errno.EAGAIN, errno.EINTR}:
        assert not errors
        lending.asked = 0
        reader.resume()
        while lending.counts[-1] != 3:
            await asyncio.sleep(0)
        assert read[-1] == b"abc"
        reader.close()
    else:
        assert [error and error.errno for error in errors] == [
            None if number == errno.EIO else number
        ]
    os.close(writing)


async def test_reading_leaves_the_flags_of_a_descriptor_alone(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    keep = os.dup(reading)
    source = Input(reading)
    source.reader.resume()
    os.write(writing, b"a")
    await source.until(1)

    assert os.get_blocking(keep)
    source.reader.close()
    os.close(writing)
    os.close(keep)


async def test_a_reader_begins_paused_and_pauses_again(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    source = Input(reading)
    os.write(writing, b"a")
    await turns()
    assert source.data == b""

    source.on_data = source.reader.pause
    source.reader.resume()
    await source.until(1)
    os.write(writing, b"b")
    await turns()
    assert source.data == b"a"

    source.reader.resume()
    source.reader.resume()
    await source.until(2)
    source.reader.close()
    source.reader.close()
    os.close(writing)


async def test_at_most_64_kib_are_read_at_a_time() -> None:
    here, there = socket.socketpair()
    source = Input(here.detach())

    def send() -> None:
        there.sendall(MEBIBYTE)
        there.close()

    thread = threading.Thread(target=send)
    thread.start()
    source.reader.resume()

    await source.ended.wait()

    thread.join()
    assert source.data == MEBIBYTE
    assert max(source.chunks) <= 65_536


async def test_draining_reads_what_is_there_and_does_not_wait() -> None:
    reading, writing = os.pipe()
    source = Input(reading)
    source.reader.resume()
    os.write(writing, b"a" * 1000)

    source.reader.drain(1 << 20)

    assert len(source.data) == 1000
    os.write(writing, b"b")
    os.close(writing)
    source.reader.drain(1 << 20)
    assert source.data.endswith(b"b")
    assert source.ended.is_set()


async def test_draining_a_paused_reader_reads_nothing() -> None:
    reading, writing = os.pipe()
    source = Input(reading)
    os.write(writing, b"a")

    source.reader.drain(1 << 20)

    assert source.data == b""
    source.reader.close()
    os.close(writing)


async def test_draining_stops_when_it_has_read_enough() -> None:
    reading, writing = os.pipe()
    source = Input(reading)
    source.on_data = lambda: os.write(writing, b"more")  # as a grandchild that never stops
    source.reader.resume()
    os.write(writing, b"x")

    source.reader.drain(1000)

    assert len(source.data) < 2000
    source.reader.close()
    os.close(writing)


async def test_a_file_is_read_to_its_end(tmp_path: Path, loop_factory: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(MEBIBYTE)
    source = Input(os.open(path, os.O_RDONLY))
    source.reader.resume()

    await source.ended.wait()

    assert source.data == MEBIBYTE
    assert not source.reader.pollable


async def test_the_null_device_ends_at_once(loop_factory: Any) -> None:
    source = Input(os.open(os.devnull, os.O_RDONLY))
    source.reader.resume()

    await source.ended.wait()

    assert source.data == b""
    assert source.error is None


async def test_a_file_is_not_read_further_while_reading_is_paused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(MEBIBYTE)
    source = Input(os.open(path, os.O_RDONLY))
    source.on_data = source.reader.pause
    source.reader.resume()
    await source.until(65_536)
    reader = source.reader
    assert isinstance(reader, _descriptors._ThreadReader)
    while reader._held is None:  # one chunk ahead
        await asyncio.sleep(0)
    await turns()
    assert source.chunks == [65_536]
    assert os.lseek(reader._fd, 0, os.SEEK_CUR) == 2 * 65_536

    source.on_data = None
    source.reader.resume()
    await source.ended.wait()

    assert source.data == MEBIBYTE


async def test_closing_a_reader_of_a_file_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(MEBIBYTE)
    source = Input(os.open(path, os.O_RDONLY))
    source.on_data = source.reader.close
    source.reader.resume()

    await source.until(1)
    reader = source.reader
    assert isinstance(reader, _descriptors._ThreadReader)
    reader._thread.join(10)
    await turns()

    assert len(source.chunks) == 1
    assert not source.ended.is_set()


async def test_closing_a_reader_of_a_file_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    fd = os.open(path, os.O_RDONLY)
    threads = threading.enumerate()
    source = Input(fd)
    assert isinstance(source.reader, _descriptors._ThreadReader)

    source.reader.close()
    source.reader.resume()
    await turns()

    assert is_closed(fd)
    assert threading.enumerate() == threads
    assert source.data == b""
    assert not source.ended.is_set()


async def test_a_thread_reads_a_pipe_where_the_loop_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
    reading, writing = os.pipe()
    source = Input(reading)
    assert not source.reader.pollable
    source.reader.resume()
    os.write(writing, b"abc")
    await source.until(3)
    os.close(writing)

    await source.ended.wait()


@pytest.fixture
def many_open() -> Iterator[int]:
    """A number that only a process with many open files gives; `select` takes none so high."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2000), most))
    yield 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def moved(fd: int, number: int) -> int:
    """The same description under a higher number."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, number)
    os.close(fd)
    return high


async def test_a_thread_waits_for_a_description_that_others_made_non_blocking(
    monkeypatch: pytest.MonkeyPatch, many_open: int
) -> None:
    monkeypatch.setattr(_descriptors, "_can_poll", refuse_poll)
    reading, writing = os.pipe()
    reading = moved(reading, many_open)
    os.set_blocking(reading, False)
    waits = asyncio.Event()
    loop, real = asyncio.get_running_loop(), _descriptors._wait_for

    def wait(fd: int, *, write: bool) -> None:
        loop.call_soon_threadsafe(waits.set)
        real(fd, write=write)

    monkeypatch.setattr(_descriptors, "_wait_for", wait)
    source = Input(reading)
    source.reader.resume()
    await waits.wait()
    os.write(writing, b"abc")
    os.close(writing)

    await source.ended.wait()

    assert source.data == b"abc"


async def test_a_terminal_that_is_hung_up_is_the_end_of_input(loop_factory: Any) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    source = Input(slave)
    source.reader.resume()
    os.write(master, b"abc")
    await source.until(3)
    os.close(master)

    await source.ended.wait()

    assert source.error is None


async def test_a_reset_socket_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    source = Input(here.detach())
    source.reader.resume()
    # Closing with a linger time of zero sends a reset.
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    there.close()

    await source.ended.wait()

    assert source.error is not None
    assert source.error.errno == errno.ECONNRESET


# ------------------------------------------------------------------ writing


async def test_what_fits_is_written_at_once(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    out = Output(writing, own=True)

    out.writer.write(b"abc")

    assert os.read(reading, 10) == b"abc"
    assert out.writer.buffered == 0
    out.writer.close()
    out.writer.close()
    assert os.read(reading, 10) == b""
    os.close(reading)


async def test_what_does_not_fit_is_written_when_there_is_room(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    out = Output(writing, own=True)
    for _ in range(50):
        out.writer.write(b"line\n")
    out.writer.write(MEBIBYTE)
    for number in range(1000):
        out.writer.write(b"%d\n" % number)
    expected = b"line\n" * 50 + MEBIBYTE + b"".join(b"%d\n" % n for n in range(1000))
    assert out.writer.buffered > HIGH_WATER
    assert out.said == ["paused"]

    data = await asyncio.to_thread(read_all, reading, len(expected))
    await out.writer.drained()

    assert data == expected
    assert out.writer.buffered == 0
    assert out.said == ["paused", "resumed"]
    out.writer.close()
    os.close(reading)


async def test_the_marks_are_met_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_descriptors, "_grow_pipe", no_growth)
    reading, writing = os.pipe()
    out = Output(writing, own=True)
    out.writer.write(b"x" * 65_536)  # fills the pipe
    assert out.writer.buffered == 0
    out.writer.write(b"x" * HIGH_WATER)
    assert out.said == []
    out.writer.write(b"x")
    assert out.said == ["paused"]
    left = 65_536 + HIGH_WATER + 1
    while left:
        left -= len(os.read(reading, 4096))
        for _ in range(3):
            await asyncio.sleep(0)
        assert (out.said == ["paused", "resumed"]) == (out.writer.buffered <= LOW_WATER)
    out.writer.close()
    os.close(reading)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
class TestGrowingPipe:
    """A pipe that was found full is given more room, where that is allowed."""

    @staticmethod
    def size(fd: int) -> int:
        return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)

    async def test_a_pipe_that_was_full_holds_more_from_then_on(self, loop_factory: Any) -> None:
        reading, writing = os.pipe()
        before = self.size(reading)
        out = Output(writing, own=True)
        out.writer.write(b"x" * before)
        assert self.size(reading) == before  # it is full, and nothing waits
        out.writer.write(b"y")

        grown = self.size(reading)
        assert grown in (before, PIPE)  # a user who has many large ones already gets no more
        assert out.writer.buffered == (1 if grown == before else 0)  # what has room does not wait
        data = await asyncio.to_thread(read_all, reading, before + 1)

        assert data == b"x" * before + b"y"
        out.writer.close()
        os.close(reading)

    async def test_it_is_asked_for_once(
        self, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def refuse(fd: int) -> bool:
            asked.append(fd)
            return False

        monkeypatch.setattr(_descriptors, "_grow_pipe", refuse)
        reading, writing = os.pipe()
        out = Output(writing, own=True)
        for _ in range(3):
            out.writer.write(MEBIBYTE)
            await asyncio.to_thread(read_all, reading, len(MEBIBYTE))
            await out.writer.drained()

        assert asked == [writing]
        out.writer.close()
        os.close(reading)

    async def test_a_larger_one_keeps_its_size(self, loop_factory: Any) -> None:
        reading, writing = os.pipe()
        try:
            large = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 2 * PIPE)
        except PermissionError:
            pytest.skip("this user has too many large pipes")
        out = Output(writing, own=True)
        out.writer.write(MEBIBYTE)

        assert self.size(reading) == large
        out.writer.close()
        os.close(reading)

    async def test_a_system_that_refuses_is_written_to_as_ever(
        self, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(fd: int, command: int, value: int = 0) -> int:
            if command == fcntl.F_SETPIPE_SZ:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            return ask(fd, command, value)

        reading, writing = os.pipe()
        out = Output(writing, own=True)
        ask = fcntl.fcntl
        monkeypatch.setattr(fcntl, "fcntl", refuse)
        out.writer.write(MEBIBYTE)
        data = await asyncio.to_thread(read_all, reading, len(MEBIBYTE))

        assert data == MEBIBYTE
        assert out.error is None
        out.writer.close()
        os.close(reading)


@pytest.mark.parametrize("buffered", [False, True])
async def test_a_pipe_that_nobody_reads_fails_once_and_never_inside_write(
    buffered: bool, loop_factory: Any
) -> None:
    reading, writing = os.pipe()
    out = Output(writing, own=True)
    if buffered:
        out.writer.write(MEBIBYTE)
        waiting = asyncio.create_task(out.writer.drained())
        await asyncio.sleep(0)
        os.close(reading)
        await waiting
    else:
        os.close(reading)
        out.writer.write(b"a")
        out.writer.write(b"b")
        assert not out.failed.is_set()
    await out.failed.wait()

    assert isinstance(out.error, BrokenPipeError)
    assert out.writer.buffered == 0
    out.writer.write(b"c")
    out.writer.close()


async def test_nothing_is_said_after_closing() -> None:
    reading, writing = os.pipe()
    out = Output(writing, own=True)
    os.close(reading)
    out.writer.write(b"a")
    out.writer.close()
    await asyncio.sleep(0)
    out.writer.write(b"b")

    assert not out.failed.is_set()


async def test_closing_wakes_who_waits_for_room() -> None:
    reading, writing = os.pipe()
    out = Output(writing, own=True)
    out.writer.write(MEBIBYTE)
    waiting = [asyncio.create_task(out.writer.drained()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()

    out.writer.close()

    await asyncio.wait(waiting)
    assert [task.cancelled() for task in waiting] == [False, True, False]
    os.close(reading)


async def test_a_foreign_pipe_is_written_without_changing_its_flags(loop_factory: Any) -> None:
    reading, writing = os.pipe()
    keep = os.dup(writing)
    out = Output(writing)
    out.writer.write(MEBIBYTE)
    assert out.writer.buffered
    assert os.get_blocking(keep)

    assert await asyncio.to_thread(read_all, reading, len(MEBIBYTE)) == MEBIBYTE

    out.writer.close()
    assert os.get_blocking(keep)
    os.close(keep)
    os.close(reading)


async def test_a_foreign_pipe_that_cannot_be_reopened_gets_the_flag_and_loses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_descriptors, "_reopen", no_reopen)
    reading, writing = os.pipe()
    keep = os.dup(writing)
    out = Output(writing)
    out.writer.write(MEBIBYTE)
    assert not os.get_blocking(keep)

    assert await asyncio.to_thread(read_all, reading, len(MEBIBYTE)) == MEBIBYTE

    out.writer.close()
    assert os.get_blocking(keep)
    os.close(keep)
    os.close(reading)


@pytest.fixture
def shared_pipe(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A pipe that must be written by a thread: not to be reopened, and shared with stderr."""
    monkeypatch.setattr(_descriptors, "_reopen", no_reopen)
    monkeypatch.setattr(_descriptors, "_shares_description", shared)
    return os.pipe()


async def test_a_pipe_shared_with_stderr_is_written_by_a_thread(
    shared_pipe: tuple[int, int], loop_factory: Any
) -> None:
    reading, writing = shared_pipe
    keep = os.dup(writing)
    out = Output(writing)
    out.writer.write(b"abc")
    out.writer.write(MEBIBYTE)
    assert out.said == ["paused"]
    assert os.get_blocking(keep)

    data = await asyncio.to_thread(read_all, reading, 3 + len(MEBIBYTE))
    await out.writer.drained()

    assert data == b"abc" + MEBIBYTE
    assert out.said == ["paused", "resumed"]
    out.writer.close()
    out.writer.close()
    os.close(keep)
    os.close(reading)


async def test_so_it_is_where_others_made_it_non_blocking(
    shared_pipe: tuple[int, int], many_open: int
) -> None:
    reading, writing = shared_pipe
    writing = moved(writing, many_open)
    out = Output(writing)
    os.set_blocking(writing, False)
    out.writer.write(MEBIBYTE)

    data = await asyncio.to_thread(read_all, reading, len(MEBIBYTE))
    await out.writer.drained()

    assert data == MEBIBYTE
    out.writer.close()
    os.close(reading)


async def test_a_thread_that_writes_reports_a_broken_pipe_once(
    shared_pipe: tuple[int, int],
) -> None:
    reading, writing = shared_pipe
    out = Output(writing)
    os.close(reading)
    out.writer.write(b"a")
    out.writer.write(b"b")

    await out.failed.wait()
    await out.writer.drained()
    out.writer.write(b"c")

    out.writer.close()
    assert isinstance(out.error, BrokenPipeError)


async def test_a_writing_thread_that_was_never_needed_leaves_nothing(
    shared_pipe: tuple[int, int],
) -> None:
    reading, writing = shared_pipe
    threads = threading.enumerate()
    out = Output(writing)
    assert isinstance(out.writer, _descriptors._ThreadWriter)

    out.writer.close()

    assert is_closed(writing)
    assert os.read(reading, 1) == b""
    assert threading.enumerate() == threads
    assert out.said == []
    assert not out.failed.is_set()
    os.close(reading)


async def test_descriptors_of_one_description_are_told_from_others() -> None:
    reading, writing = os.pipe()
    twin = os.dup(writing)
    other = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY)

    assert _descriptors._shares_description(writing, twin)
    assert not _descriptors._shares_description(writing, other)
    assert not _descriptors._shares_description(writing, reading)
    os.set_blocking(other, False)
    assert not _descriptors._shares_description(writing, other)
    assert os.get_blocking(writing)
    assert not os.get_blocking(other)
    for fd in (reading, writing, twin, other):
        os.close(fd)
    assert not _descriptors._shares_description(writing, twin)


async def test_a_socket_is_written_without_changing_its_flags(loop_factory: Any) -> None:
    here, there = socket.socketpair()
    keep = here.dup()
    assert keep.getblocking()
    out = Output(here.detach())
    out.writer.write(b"a")
    out.writer.write(MEBIBYTE)
    out.writer.write(b"b")
    assert out.writer.buffered
    assert os.get_blocking(keep.fileno())

    data = await asyncio.to_thread(read_all, there.fileno(), len(MEBIBYTE) + 2)

    assert data == b"a" + MEBIBYTE + b"b"
    out.writer.close()
    keep.close()
    there.close()


async def test_a_default_socket_timeout_does_not_reach_a_socket_that_others_share() -> None:
    here, there = socket.socketpair()
    keep = os.dup(here.fileno())
    socket.setdefaulttimeout(5)
    try:
        out = Output(here.detach())
        assert socket.getdefaulttimeout() == 5
    finally:
        socket.setdefaulttimeout(None)

    out.writer.write(MEBIBYTE)

    assert os.get_blocking(keep)
    out.writer.close()
    os.close(keep)
    there.close()


async def test_one_socket_is_read_and_written(loop_factory: Any) -> None:
    here, there = socket.socketpair()
    source = Input(os.dup(here.fileno()))
    out = Output(here.detach())
    source.reader.resume()
    there.sendall(b"in")
    await source.until(2)
    out.writer.write(b"out")
    assert there.recv(10) == b"out"
    there.shutdown(socket.SHUT_WR)
    await source.ended.wait()

    out.writer.write(b"still open")

    assert there.recv(20) == b"still open"
    out.writer.close()
    there.close()


async def test_a_file_is_appended_at_its_offset(tmp_path: Path, loop_factory: Any) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before ")
    out = Output(fd)

    out.writer.write(MEBIBYTE)
    out.writer.write(b"")

    assert out.writer.buffered == 0
    assert path.read_bytes() == b"before " + MEBIBYTE
    out.writer.close()


async def test_a_terminal_is_written_and_a_stopped_one_does_not_block(loop_factory: Any) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    keep = os.dup(slave)
    out = Output(slave)
    out.writer.write(MEBIBYTE)  # nobody reads: this must return
    assert out.writer.buffered
    assert os.get_blocking(keep)

    assert await asyncio.to_thread(read_all, master, len(MEBIBYTE)) == MEBIBYTE

    out.writer.close()
    os.close(keep)
    os.close(master)


async def test_the_null_device_takes_everything() -> None:
    out = Output(os.open(os.devnull, os.O_WRONLY))

    out.writer.write(MEBIBYTE)

    assert out.writer.buffered == 0
    out.writer.close()


async def test_a_full_file_is_an_error() -> None:
    out = Output(os.open("/dev/full", os.O_WRONLY))

    out.writer.write(b"a")
    await out.failed.wait()

    assert out.error is not None
    assert out.error.errno == errno.ENOSPC
    out.writer.close()


async def test_on_windows_threads_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    reading, writing = os.pipe()
    source, out = Input(reading), Output(writing, own=True)
    source.reader.resume()
    out.writer.write(b"abc")
    await source.until(3)
    await out.writer.drained()
    out.writer.close()

    await source.ended.wait()

    assert not source.reader.pollable
