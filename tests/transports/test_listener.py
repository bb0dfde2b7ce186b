"""Sockets that listen: whose they are from the first moment on, and that they go on whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.transports import TcpAddress, _listener
from antiphon.transports._listener import Listener, Listening, listen_tcp, listen_unix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.transports._address import Address


@pytest.fixture(params=["by its mode", "in a private folder"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the file of a socket gets its mode: on Linux, and elsewhere."""
    monkeypatch.setattr(_listener, "_BY_MODE", request.param == "by its mode")
    found: str = request.param
    return found


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """What the process takes away from the modes of its files."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def connected(address: Address) -> socket.socket:
    """A client at the address."""
    if isinstance(address, TcpAddress):
        return socket.create_connection((address.host, address.port))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address.sockaddr)
    return sock


# ------------------------------------------------------------------ the file of a Unix socket


@pytest.mark.parametrize("everybody", [False, True])
async def test_a_socket_has_its_mode_whatever_the_umask(
    tmp_path: Path, way: str, umask: int, everybody: bool
) -> None:
    path = tmp_path / "s"
    listening = await listen_unix(str(path), everybody=everybody)

    assert mode_of(path) == (0o666 if everybody else 0o600)
    with connected(listening.address):
        pass

    await listening.close()
    assert os.listdir(tmp_path) == []


async def test_nobody_else_can_enter_from_the_first_moment(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    listen = socket.socket.listen

    def look_and_listen(sock: socket.socket, backlog: int) -> None:
        (found,) = tmp_path.iterdir()  # bound just now: the socket, or the folder that it is in
        modes.append(mode_of(found))
        listen(sock, backlog)

    monkeypatch.setattr(socket.socket, "listen", look_and_listen)
    before = os.umask(0)
    try:
        listening = await listen_unix(str(tmp_path / "s"))
    finally:
        os.umask(before)

    assert modes == [0o600 if way == "by its mode" else 0o700]
    await listening.close()


async def test_what_a_dead_server_left_is_replaced(tmp_path: Path, way: str) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    listening = await listen_unix(str(path))

    with connected(listening.address):
        pass
    await listening.close()
    assert not path.exists()


async def test_a_server_that_lives_is_left_alone(tmp_path: Path, way: str) -> None:
    path = tmp_path / "s"
    first = await listen_unix(str(path))

    with pytest.raises(OSError, match="a server is listening there") as caught:
        await listen_unix(str(path))

    assert caught.value.errno == errno.EADDRINUSE
    with connected(first.address):
        pass
    await first.close()


async def test_a_server_whose_queue_is_full_lives(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as waiting:
        busy.bind(str(path))
        busy.listen(0)
        while True:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(str(path)):
                break

        with pytest.raises(OSError, match="a server is listening there"):
            await listen_unix(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
async def test_what_is_no_socket_is_never_removed(tmp_path: Path, way: str, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    before = path.lstat()

    with pytest.raises(FileExistsError, match="it is no socket, and is left alone"):
        await listen_unix(str(path))

    assert path.lstat().st_ino == before.st_ino
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("kind", ["file", "socket"])
async def test_only_our_own_socket_is_removed_at_the_end(
    tmp_path: Path, way: str, kind: str
) -> None:
    path = tmp_path / "s"
    listening = await listen_unix(str(path))
    path.unlink()
    other: Listening | None = None
    if kind == "file":
        path.write_text("somebody else's")
    else:
        other = await listen_unix(str(path))

    await listening.close()

    assert path.exists()
    if other is not None:
        with connected(other.address):
            pass
        await other.close()
        assert not path.exists()


async def test_a_socket_that_was_removed_is_no_trouble(tmp_path: Path, way: str) -> None:
    listening = await listen_unix(str(tmp_path / "s"))
    (tmp_path / "s").unlink()

    await listening.close()


async def test_of_many_that_find_the_same_leftover_one_listens(tmp_path: Path, way: str) -> None:
    path = tmp_path / "s"
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        results = await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, listen_unix(str(path))) for _ in range(4)),
            return_exceptions=True,
        )
        winners = [found for found in results if isinstance(found, Listening)]
        errors = [found for found in results if not isinstance(found, Listening)]

        assert len(winners) == 1
        assert all(isinstance(e, OSError) and e.errno == errno.EADDRINUSE for e in errors)
        with connected(winners[0].address):
            pass
        await winners[0].close()


async def test_only_one_at_a_time_looks_for_a_leftover_and_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[int] = []
    most: list[int] = []
    make_room = _listener._make_room

    def slowly(place: Path) -> None:
        inside.append(1)
        most.append(len(inside))
        make_room(place)
        time.sleep(0.02)  # another one would be in here, too
        inside.pop()

    monkeypatch.setattr(_listener, "_make_room", slowly)
    results = await asyncio.gather(
        *(asyncio.to_thread(asyncio.run, listen_unix(str(tmp_path / f"{n}"))) for n in range(4))
    )

    assert most == [1] * 4
    for listening in results:
        await listening.close()


async def test_a_folder_that_is_locked_by_others_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(_listener, "_LOCK_PATIENCE", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    listening = await listen_unix(str(tmp_path / "s"))

    await listening.close()
    os.close(held)


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent/s"):
        await listen_unix(str(tmp_path / "absent" / "s"))


async def test_a_private_folder_is_gone_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_listener, "_BY_MODE", False)

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", fail)
    with pytest.raises(PermissionError):
        await listen_unix(str(tmp_path / "s"))

    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
async def test_an_abstract_socket_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"@antiphon-{os.getpid()}"
    listening = await listen_unix(name)

    assert str(listening.address) == f"unix:{name}"
    with connected(listening.address):
        pass
    with pytest.raises(OSError, match="in use"):
        await listen_unix(name)
    await listening.close()
    assert os.listdir(tmp_path) == []


async def test_windows_has_no_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(NotImplementedError, match="use serve_tcp"):
        await listen_unix("s")


# ------------------------------------------------------------------ TCP


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
async def test_a_free_port_of_this_machine_is_found(host: str) -> None:
    listening = await listen_tcp(host, 0)
    address = listening.address

    assert isinstance(address, TcpAddress)
    assert address.port > 0
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as client:
        client.connect((address.host, address.port))
    await listening.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:10.0.0.1", "0"])
async def test_what_others_can_reach_has_to_be_allowed(host: str) -> None:
    with pytest.raises(ValueError, match="allow_remote=True"):
        await listen_tcp(host, 0)


async def test_what_others_can_reach_can_be_allowed() -> None:
    listening = await listen_tcp("0.0.0.0", 0, allow_remote=True)

    assert isinstance(listening.address, TcpAddress)
    with socket.socket() as client:
        client.connect(("127.0.0.1", listening.address.port))
    await listening.close()


async def test_a_port_that_is_taken_is_named() -> None:
    first = await listen_tcp("127.0.0.1", 0)
    assert isinstance(first.address, TcpAddress)

    with pytest.raises(OSError, match=str(first.address.port)) as caught:
        await listen_tcp("127.0.0.1", first.address.port)

    assert caught.value.errno == errno.EADDRINUSE
    await first.close()


async def test_a_port_can_be_had_again_at_once() -> None:
    first = await listen_tcp("127.0.0.1", 0)
    assert isinstance(first.address, TcpAddress)
    with connected(first.address) as client:
        accepted, _ = first.sock.accept()
        accepted.close()  # ours ends first, so that it is we who have to wait a minute
        assert client.recv(1) == b""
    await first.close()

    again = await listen_tcp("127.0.0.1", first.address.port)
    await again.close()


async def test_a_host_that_is_not_known_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), []]

    async def ask(*_: object, **__: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", ask)
    with pytest.raises(OSError, match="Name or service not known"):
        await listen_tcp("no-such-host", 0)
    with pytest.raises(OSError, match="the host has no address"):
        await listen_tcp("no-such-host", 0)


# ------------------------------------------------------------------ accepting


@pytest.fixture(params=["by the loop", "by a task"])
def accepting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How connections are accepted: elsewhere, and on Windows."""
    monkeypatch.setattr(_listener, "_BY_TASK", request.param == "by a task")
    found: str = request.param
    return found


class Taker:
    """Takes what is accepted, and closes it."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def __call__(self, sock: socket.socket) -> None:
        sock.close()
        self.count += 1
        self._changed.set()

    async def have(self, count: int) -> None:
        while self.count < count:
            self._changed.clear()
            await self._changed.wait()


async def test_each_connection_is_given_to_who_asked(accepting: str, loop_factory: Any) -> None:
    listening, taken = await listen_tcp("127.0.0.1", 0), Taker()
    listener = Listener(listening.sock, taken)

    clients = [connected(listening.address) for _ in range(50)]  # more than in one turn of the loop
    await taken.have(50)

    listener.stop()
    listener.stop()
    for client in clients:
        client.close()
    await asyncio.sleep(0)
    await listening.close()


async def test_nothing_is_accepted_after_stopping(accepting: str) -> None:
    listening, taken = await listen_tcp("127.0.0.1", 0), Taker()
    listener = Listener(listening.sock, taken)
    with connected(listening.address):
        listener.stop()
        listener.again()
        await asyncio.sleep(0.01)

    assert taken.count == 0
    await listening.close()


async def test_without_descriptors_accepting_goes_on_when_there_are_some(
    accepting: str, loop_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    listening, taken = await listen_tcp("127.0.0.1", 0), Taker()
    listener = Listener(listening.sock, taken)
    clients = [socket.socket() for _ in range(3)]
    assert isinstance(listening.address, TcpAddress)
    where = listening.address.host, listening.address.port
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest, *fillers), before[1]))
    try:
        for client in clients:
            client.connect(where)
        while "no connection can be accepted for now" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert taken.count == 0
        assert caplog.text.count("no connection can be accepted") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)

    listener.again()
    await taken.have(3)

    listener.stop()
    await asyncio.sleep(0)
    for client in clients:
        client.close()
    await listening.close()


async def test_a_listener_that_is_stopped_while_it_pauses_stays_stopped(
    accepting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_listener, "_FIRST_PAUSE", 0.01)
    with socket.socket() as never_listened:
        never_listened.setblocking(False)
        never_listened.bind(("127.0.0.1", 0))
        listener = Listener(never_listened, Taker())  # accepting fails: EINVAL
        await asyncio.sleep(0.05)

        listener.stop()
        await asyncio.sleep(0.03)
