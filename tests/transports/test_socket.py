"""Frames over sockets: connecting, half ends and whole ones, cuts, resets, and who is there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import ConnectionClosed, Limits, LocalProtocolError, StartError
from antiphon.core import Fault
from antiphon.testing import Recorder
from antiphon.transports import SocketTransport, _socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Two sockets that are connected to each other.
Pair = tuple[socket.socket, socket.socket]


def unix_pair() -> Pair:
    return socket.socketpair()


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        return here, there


PAIRS: dict[str, Callable[[], Pair]] = {"unix": unix_pair, "tcp": tcp_pair}


@pytest.fixture(params=["unix", "tcp", "tcp by the loop"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What kind of socket; the last one moves bytes as on Windows."""
    kind, _, by_the_loop = request.param.partition(" ")
    monkeypatch.setattr(_socket, "_BY_LOOP", bool(by_the_loop))
    monkeypatch.setattr(_socket, "LINGER", 0.05)  # for the peers that stay until the test is over
    found: str = kind
    return found


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    """A server's socket, and its client's."""
    here, there = PAIRS[kind]()
    yield here, there
    there.close()
    here.close()


async def started(
    peer: str | socket.socket, limits: Limits | None = None, *, accepted: bool = True
) -> tuple[SocketTransport, Recorder]:
    transport, receiver = SocketTransport(peer, limits, accepted=accepted), Recorder()
    await transport.start(receiver)
    return transport, receiver


async def read(sock: socket.socket, size: int = 65536) -> bytes:
    return await asyncio.to_thread(sock.recv, size)


# ------------------------------------------------------------------ frames


async def test_frames_go_both_ways(pair: Pair, loop_factory: Any) -> None:
    here, there = pair
    transport, receiver = await started(here)

    there.sendall(b'{"a":1}\n{"b":2}\r\n\n{"c":3}\n')
    assert await receiver.have(3) == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    transport.send([b"{}", '"\u2028"'.encode()])
    assert await read(there) == b'{}\n"\\u2028"\n'

    there.close()
    await receiver.ended.wait()
    await transport.aclose()


MESSAGE = '{"text":"漢"}'.encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_a_stream_may_be_cut_anywhere(kind: str, end: bytes) -> None:
    stream = b"\xef\xbb\xbf" + end + MESSAGE + end + b"\n" + MESSAGE + end + b"[" + MESSAGE
    for cut in range(1, len(stream)):
        here, there = PAIRS[kind]()
        transport, receiver = await started(here)
        there.sendall(stream[:cut])
        while not transport.heard:  # so that the cut is one
            await asyncio.sleep(0)
        there.sendall(stream[cut:])
        there.close()
        await receiver.ended.wait()

        assert receiver.received == [MESSAGE, MESSAGE, b"[" + MESSAGE]
        await transport.aclose()


async def test_bytes_may_come_one_by_one(pair: Pair) -> None:
    here, there = pair
    transport, receiver = await started(here)

    for byte in MESSAGE + b"\n" + MESSAGE + b"\n":
        there.send(bytes([byte]))
        await asyncio.sleep(0)

    assert await receiver.have(2) == [MESSAGE, MESSAGE]
    await transport.aclose()


async def test_a_frame_that_is_too_long_is_a_fault_in_its_place(pair: Pair) -> None:
    here, there = pair
    transport, receiver = await started(here, Limits(frame_bytes=20))

    there.sendall(b'{"a":1}\n{"b":"' + b"x" * 1000 + b'"}\n{"c":3}\n')

    before, fault, after = await receiver.have(3)
    assert (before, after) == (b'{"a":1}', b'{"c":3}')
    assert isinstance(fault, Fault)
    await transport.aclose()


async def test_large_frames_of_both_pass_each_other(pair: Pair, loop_factory: Any) -> None:
    here, there = pair
    one, at_one = await started(here)
    other, at_other = await started(there)
    frame = b'{"x":"' + random.Random(1).randbytes(3_000_000).hex().encode() + b'"}'

    for _ in range(3):
        one.send([frame])
        other.send([frame])
    assert await at_one.have(3) == [frame] * 3
    assert await at_other.have(3) == [frame] * 3

    assert at_one.room.count("pause") == at_one.room.count("resume")
    await asyncio.gather(one.aclose(), other.aclose())


# ------------------------------------------------------------------ slow peers


async def test_a_slow_peer_pauses_the_sender_and_delays_no_reading(
    pair: Pair, loop_factory: Any
) -> None:
    here, there = pair
    transport, receiver = await started(here)
    sent = 0
    while not receiver.room:
        transport.send([b"x" * 9999])
        sent += 10_000
    assert 65_536 < transport.unsent < sent
    there.sendall(b"{}\n")
    await receiver.have(1)

    read_so_far = 0
    while read_so_far < sent:
        read_so_far += len(await read(there))

    await receiver.until(lambda: receiver.room == ["pause", "resume"])
    assert transport.unsent == 0
    await transport.aclose()


async def test_a_paused_receiver_is_felt_by_the_peer(pair: Pair, loop_factory: Any) -> None:
    here, there = pair
    transport, receiver = await started(here)
    transport.pause_reading()
    there.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += there.send((b"{%s}\n" % (b" " * 997)) * 100)
    await asyncio.sleep(0.01)
    assert receiver.received == []

    transport.resume_reading()

    await receiver.have(sent // 1000)
    await transport.aclose()


async def test_what_was_sent_is_written_before_closing_and_then_our_end(
    pair: Pair, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_socket, "LINGER", 60.0)
    here, there = pair
    transport, _ = await started(here)
    transport.send([b"x" * 5_000_000])
    closing = asyncio.create_task(transport.aclose())

    size = 0
    while data := await read(there):
        size += len(data)

    assert size == 5_000_001
    there.close()
    await closing


async def test_what_was_sent_arrives_although_we_leave_unread_what_the_peer_sends(
    pair: Pair,
) -> None:
    # A socket that is closed with something unread in it resets, and over TCP drops what is on its way.
    here, there = pair
    transport, _ = await started(here)
    transport.pause_reading()
    there.sendall(b"{}\n" * 1000)
    transport.send([b"x" * 1_000_000])
    closing = asyncio.create_task(transport.aclose())

    size = 0
    while data := await read(there):
        size += len(data)

    assert size == 1_000_001
    there.close()
    await closing


async def test_closing_waits_for_a_peer_that_takes_nothing_and_then_gives_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_socket, "FLUSH_GRACE", 0.05)
    here, _ = pair
    transport, receiver = await started(here)
    transport.send([b"x" * 10_000_000])

    async with asyncio.timeout(5):
        await transport.aclose()

    assert receiver.lost.is_set()
    assert receiver.error is None


async def test_closing_waits_for_a_peer_that_does_not_end_and_then_gives_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_socket, "LINGER", 0.05)
    here, there = pair
    transport, _ = await started(here)
    transport.send([b"{}"])

    async with asyncio.timeout(5):
        await transport.aclose()

    assert await read(there) == b"{}\n"
    assert await read(there) == b""


async def test_a_cancelled_close_gives_up_at_once(pair: Pair) -> None:
    here, _ = pair
    transport, _ = await started(here)
    transport.send([b"x" * 10_000_000])
    closing = asyncio.create_task(transport.aclose())
    await asyncio.sleep(0)

    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    await transport.aclose()


# ------------------------------------------------------------------ ends


@pytest.mark.covers("R1-19")
async def test_a_peer_that_ends_its_writing_side_still_gets_answers(
    pair: Pair, loop_factory: Any
) -> None:
    here, there = pair
    transport, receiver = await started(here)
    there.sendall(b'{"a":1}\n{"last":1}')
    there.shutdown(socket.SHUT_WR)
    await receiver.ended.wait()
    assert receiver.received == [b'{"a":1}', b'{"last":1}']
    assert not receiver.lost.is_set()

    transport.send([b"answer" * 100_000])
    closing = asyncio.create_task(transport.aclose())

    size = 0
    while data := await read(there):
        size += len(data)
    assert size == 600_001
    await closing


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a half is told like a whole")
async def test_a_peer_that_closes_its_unix_socket_is_lost_at_once(loop_factory: Any) -> None:
    here, there = unix_pair()
    transport, receiver = await started(here)
    there.sendall(b'{"a":1}\n{"last":1}')
    there.close()

    await receiver.lost.wait()

    assert receiver.received == [b'{"a":1}', b'{"last":1}']
    assert receiver.error is None
    await transport.aclose()


@pytest.mark.parametrize(
    "kind", ["unix", "tcp"]
)  # the loop drops what is unread when writing fails
async def test_a_peer_that_is_gone_is_lost_when_something_is_written(
    pair: Pair, loop_factory: Any
) -> None:
    here, there = pair
    transport, receiver = await started(here)
    transport.pause_reading()
    there.sendall(b'{"a":1}\n{"last":1}')
    there.close()

    while not receiver.lost.is_set():  # the first makes the peer's system say that nobody is there
        transport.send([b"{}"])
        await asyncio.sleep(0)

    assert receiver.received == [b'{"a":1}', b'{"last":1}']
    assert isinstance(receiver.error, ConnectionClosed)
    assert "the peer takes nothing more: " in str(receiver.error)
    await transport.aclose()


def reset(sock: socket.socket) -> None:
    """Close it as a machine does whose program died in the middle of something."""
    if sock.family == socket.AF_UNIX:
        # Unread input does it; the other end has sent some.
        assert sock.recv(1, socket.MSG_PEEK)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def test_a_reset_is_a_loss_that_says_so(pair: Pair, loop_factory: Any) -> None:
    here, there = pair
    transport, receiver = await started(here)
    transport.send([b"unread"])
    there.sendall(b'{"a":1}\n')
    await receiver.have(1)

    reset(there)
    await receiver.lost.wait()

    assert isinstance(receiver.error, ConnectionClosed)
    assert str(receiver.error) == "the connection broke: Connection reset by peer"
    assert isinstance(receiver.error.__cause__, ConnectionResetError)
    await transport.aclose()


async def test_what_came_before_a_reset_is_all_delivered(kind: str, loop_factory: Any) -> None:
    here, there = PAIRS[kind]()
    transport, receiver = await started(here)
    transport.pause_reading()
    transport.send([b"unread"])
    there.sendall(b'{"a":1}\n' * 10_000)  # more than one read
    await asyncio.sleep(0)
    reset(there)

    transport.resume_reading()
    await receiver.lost.wait()

    assert receiver.received == [b'{"a":1}'] * 10_000
    assert "Connection reset" in str(receiver.error)
    await transport.aclose()


async def test_resets_at_any_moment_break_no_law(kind: str, loop_factory: Any) -> None:
    chance = random.Random(7)
    for _ in range(60):
        here, there = PAIRS[kind]()
        transport, receiver = await started(here)
        transport.send([b"x" * chance.choice([0, 10, 500_000])])
        there.sendall(b"{}\n" * chance.randrange(100))
        if chance.random() < 0.3:
            transport.pause_reading()
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        closing = None
        if chance.random() < 0.5:
            closing = asyncio.create_task(transport.aclose())
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            there.shutdown(socket.SHUT_WR)
        reset(there)
        transport.resume_reading()
        await receiver.ended.wait()
        if closing is not None:
            await closing
        await transport.aclose()

        assert receiver.lost.is_set()
        assert set(receiver.received) <= {b"{}"}


async def test_input_that_is_refused_is_an_end_of_it(pair: Pair, loop_factory: Any) -> None:
    here, there = pair
    transport, receiver = await started(here)
    transport.refuse_input()  # before anything came
    transport.refuse_input()
    assert receiver.ended.is_set()

    there.sendall(b'{"late":1}\n{"half')
    transport.send([b"answer"])
    assert await read(there) == b"answer\n"
    there.close()
    await transport.aclose()
    transport.refuse_input()

    assert receiver.received == []


async def test_input_that_is_refused_while_paused_does_not_hold_up_the_peer(pair: Pair) -> None:
    here, there = pair
    transport, receiver = await started(here)
    transport.pause_reading()
    transport.refuse_input()

    await asyncio.to_thread(there.sendall, b"x" * 10_000_000)

    there.close()
    await transport.aclose()
    assert receiver.received == []


# ------------------------------------------------------------------ what is no client of ours


@pytest.mark.parametrize(
    "begin",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n{}\n",
        b"\r\n\r\nGET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\n",
        b"hello\n",
        b"[{}]\n",
    ],
)
async def test_what_does_not_begin_with_an_object_is_not_heard_over_tcp(begin: bytes) -> None:
    here, there = tcp_pair()
    transport, receiver = await started(here)

    there.sendall(begin + b'{"jsonrpc":"2.0"}\n')
    await receiver.lost.wait()

    assert receiver.received == []
    assert "does not begin with a JSON object" in str(receiver.error)
    there.close()
    await transport.aclose()


async def test_no_browser_speaks_over_a_unix_socket() -> None:
    here, there = unix_pair()
    transport, receiver = await started(here)

    there.sendall(b"noise\n{}\n")

    assert await receiver.have(2) == [b"noise", b"{}"]
    await transport.aclose()
    there.close()


async def test_who_connected_by_other_means_is_a_client_too(pair: Pair) -> None:
    here, there = pair
    transport, receiver = await started(here, accepted=False)
    there.sendall(b"noise, but no browser\n")
    there.shutdown(socket.SHUT_WR)

    await receiver.lost.wait()

    assert receiver.received == [b"noise, but no browser"]
    assert transport.describe().startswith(("unix agent (uid ", "tcp agent (127.0.0.1:"))
    await transport.aclose()


# ------------------------------------------------------------------ connecting


class Server:
    """A plain server that a transport connects to."""

    def __init__(self, kind: str, folder: Path) -> None:
        if kind == "unix":
            self.address = f"unix:{folder / 's'}"
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(str(folder / "s"))
        else:
            self.socket = socket.socket()
            self.socket.bind(("127.0.0.1", 0))
            self.address = "tcp:{}:{}".format(*self.socket.getsockname())
        self.socket.listen()

    def accept(self) -> socket.socket:
        return self.socket.accept()[0]


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[Server]:
    made = Server(kind, tmp_path)
    yield made
    made.socket.close()


async def test_a_client_connects_by_an_address(server: Server, loop_factory: Any) -> None:
    transport, receiver = SocketTransport(server.address), Recorder()
    assert transport.info == {"kind": server.address[:4].rstrip(":"), "peer": None}
    assert transport.describe() == server.address
    await transport.start(receiver)
    there = server.accept()

    transport.send([b"hello"])
    assert await read(there) == b"hello\n"
    there.sendall(b"not json either\n")
    assert await receiver.have(1) == [b"not json either"]

    there.close()
    await receiver.lost.wait()
    assert receiver.error is None
    await transport.aclose()


async def test_for_a_client_the_end_of_what_the_agent_writes_is_the_end(server: Server) -> None:
    transport, receiver = await started(server.address)
    there = server.accept()
    there.sendall(b"last")
    there.shutdown(socket.SHUT_WR)

    await receiver.lost.wait()

    assert receiver.received == [b"last"]
    await transport.aclose()
    there.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("unix:absent", "cannot connect to unix:absent: there is no such socket"),
        ("unix:absent/s", "there is no such socket"),
        ("unix:dead", "cannot connect to unix:dead: nobody listens there"),
        ("unix:file", "nobody listens there"),
        ("tcp:127.0.0.1:{port}", "cannot connect to tcp:127.0.0.1:{port}: nobody listens there"),
        ("tcp:localhost:{port}", "nobody listens there"),
    ],
)
async def test_a_start_that_fails_says_what_is_in_the_way(
    address: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        transport = SocketTransport(address.format(port=port))

        with pytest.raises(StartError) as caught:
            await transport.start(Recorder())

    assert words.format(port=port) in str(caught.value)
    assert not caught.value.timed_out
    await transport.aclose()


async def test_a_host_that_is_not_known_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    transport = SocketTransport("tcp:no-such-host:1")

    with pytest.raises(StartError, match="no-such-host:1: Name or service not known"):
        await transport.start(Recorder())
    await transport.aclose()


async def test_of_several_addresses_of_a_host_one_that_answers_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        async def several(*_: object, **__: object) -> list[Any]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", sock.getsockname())
                for sock in (bound, server)
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", several)
        transport, _ = await started("tcp:host:1")
        accepted, _ = server.accept()

        accepted.close()
        await transport.aclose()


async def test_a_port_is_not_met_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # As it happens to who tries a port again and again from which the system also takes its own.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def from_the_same(sock: socket.socket, where: Any) -> None:
        sock.bind(("127.0.0.1", port))
        await connect(sock, where)

    monkeypatch.setattr(loop, "sock_connect", from_the_same)
    transport = SocketTransport(f"tcp:127.0.0.1:{port}")

    with pytest.raises(StartError, match="nobody listens there"):
        await transport.start(Recorder())
    await transport.aclose()


async def test_a_server_whose_queue_is_full_is_waited_for(
    tmp_path: Path, loop_factory: Any
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as waiting:
        server.bind(path)
        server.listen(0)
        while True:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(path):
                break
        starting = asyncio.create_task(started(f"unix:{path}"))
        await asyncio.sleep(0.05)
        assert not starting.done()

        server.accept()[0].close()
        transport, _ = await starting

        await transport.aclose()


async def test_a_connection_that_does_not_come_is_waited_for_but_not_for_ever(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as waiting:
        server.bind(path)
        server.listen(0)
        while True:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(path):
                break
        transport = SocketTransport(f"unix:{path}", connect_timeout=0.05)

        with pytest.raises(StartError, match=r"no connection to unix:.* within 0.05 s") as caught:
            await transport.start(Recorder())

    assert caught.value.timed_out
    await transport.aclose()


async def test_closing_while_connecting_closes_the_connection(
    kind: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = _socket.connect_socket
    go, going = asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any) -> socket.socket:
        going.set()
        await go.wait()
        return await connect(*arguments)

    monkeypatch.setattr(_socket, "connect_socket", slowly)
    transport = SocketTransport(server.address)
    starting = asyncio.create_task(transport.start(Recorder()))
    await going.wait()

    await transport.aclose()
    go.set()

    with pytest.raises(StartError, match="closed while it was being connected"):
        await starting


async def test_a_start_that_is_cancelled_leaves_nothing(
    kind: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SocketTransport("tcp:192.0.2.1:9" if kind == "tcp" else server.address)
    starting = asyncio.create_task(transport.start(Recorder()))
    await asyncio.sleep(0)
    starting.cancel()

    with contextlib.suppress(asyncio.CancelledError, StartError):
        await starting
    await transport.aclose()


async def test_a_transport_starts_once(pair: Pair) -> None:
    transport, _ = await started(pair[0])

    with pytest.raises(LocalProtocolError, match="started or closed before"):
        await transport.start(Recorder())

    await transport.aclose()
    with pytest.raises(LocalProtocolError, match="started or closed before"):
        await transport.start(Recorder())


async def test_a_socket_that_was_never_started_is_closed(pair: Pair) -> None:
    here, there = pair
    transport = SocketTransport(here)

    await transport.aclose()

    assert there.recv(1) == b""


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_without_descriptors_a_start_fails_and_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none_left)
    transport = SocketTransport(pair[0])

    with pytest.raises(OSError, match="Too many open files"):
        await transport.start(Recorder())

    await transport.aclose()
    assert pair[1].recv(1) == b""


def test_what_is_no_address_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="is no address"):
        SocketTransport("/run/agent.sock")


# ------------------------------------------------------------------ who is there


async def test_tcp_tells_where_from_and_does_not_wait_to_fill_segments() -> None:
    here, there = tcp_pair()
    host, port = there.getsockname()
    transport = SocketTransport(here)
    assert transport.info == {"kind": "tcp", "peer": {"host": host, "port": port}}
    assert transport.describe() == f"tcp client (127.0.0.1:{port})"

    number = here.fileno()
    await transport.start(Recorder())
    with socket.socket(fileno=os.dup(number)) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    there.close()
    await transport.aclose()


@pytest.mark.parametrize("kind", ["unix"])
async def test_a_unix_socket_tells_user_group_and_process(server: Server) -> None:
    transport, _ = await started(server.address)
    there = SocketTransport(server.accept())
    ours = {"uid": os.geteuid(), "gid": os.getegid(), "pid": os.getpid()}

    assert transport.info == {"kind": "unix", "peer": ours}
    assert there.info == {"kind": "unix", "peer": ours}
    assert there.describe() == f"unix client (uid {ours['uid']}, pid {ours['pid']})"
    await there.aclose()
    await transport.aclose()


async def test_of_a_peer_that_is_gone_it_is_told_that_nothing_is_known() -> None:
    with socket.socket() as never_connected, socket.socket(socket.AF_UNIX) as neither:
        assert _socket.info_of(never_connected) == {"kind": "tcp", "peer": None}
        assert _socket.info_of(neither) == {"kind": "unix", "peer": None}


@pytest.mark.parametrize(
    ("platform", "pid"), [("darwin", 4711), ("freebsd14", 0), ("sunos5", None)]
)
def test_other_systems_tell_it_in_their_own_words(
    monkeypatch: pytest.MonkeyPatch, platform: str, pid: int | None
) -> None:
    class Socket:
        """Answers as XNU does: `struct xucred`, and the process in an option of its own."""

        @staticmethod
        def getsockopt(level: int, option: int, size: int) -> bytes:
            assert level == 0
            if option == 2:
                return struct.pack("i", 4711)
            return struct.pack("IIhxx16I", 0, 501, 2, 20, 12, *[0] * 14)[:size]

    monkeypatch.setattr(sys, "platform", platform)
    sock: Any = Socket()

    told = _socket.peer_credentials(sock)

    assert told == (None if pid is None else {"uid": 501, "gid": 20, "pid": pid})
