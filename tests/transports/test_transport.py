"""Every transport has the shape of the contract, and its laws hold in the same way for each."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.testing import Recorder, byte_pair
from antiphon.transports import (
    MemoryTransport,
    ProcessTransport,
    Receiver,
    SocketTransport,
    StdioTransport,
    Transport,
    memory_pair,
)

if TYPE_CHECKING:
    # For the type checkers: each class is a `Transport`, the recorder a `Receiver`.
    KINDS: list[type[Transport]] = [
        MemoryTransport,
        ProcessTransport,
        SocketTransport,
        StdioTransport,
    ]
    A_RECEIVER: type[Receiver] = Recorder


@pytest.mark.parametrize(
    "kind", [MemoryTransport, ProcessTransport, SocketTransport, StdioTransport]
)
def test_a_transport_has_the_methods_of_the_contract_with_their_signatures(kind: type) -> None:
    methods = {
        name: method
        for name, method in vars(Transport).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }

    assert len(methods) == 6
    for name, method in methods.items():
        own = getattr(kind, name)
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(method)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters)


async def echo_in_memory() -> Transport:
    here, there = memory_pair()
    await there.start(
        Recorder(on_frames=lambda frames: there.send([f for f in frames if isinstance(f, bytes)]))
    )
    return here


async def echo_process() -> Transport:
    return ProcessTransport(["cat"])


async def echo_socket(here: socket.socket, there: socket.socket) -> Transport:
    other = SocketTransport(there, accepted=False)
    await other.start(
        Recorder(on_frames=lambda frames: other.send([f for f in frames if isinstance(f, bytes)]))
    )
    return SocketTransport(here, accepted=False)


async def echo_unix() -> Transport:
    return await echo_socket(*socket.socketpair())


async def echo_tcp() -> Transport:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return await echo_socket(there, server.accept()[0])


Echo = Callable[[], Awaitable[Transport]]
ECHOES: dict[str, Echo] = {
    "memory": echo_in_memory,
    "process": echo_process,
    "unix": echo_unix,
    "tcp": echo_tcp,
}


@pytest.fixture(params=ECHOES)
def echo(request: pytest.FixtureRequest) -> Echo:
    """Makes a transport whose peer sends back every frame."""
    return ECHOES[request.param]


async def test_frames_keep_their_order_and_none_is_lost(echo: Echo) -> None:
    transport, receiver = await echo(), Recorder()
    chance = random.Random(1)
    sent = [b"%d:" % n + b"x" * chance.choice([0, 10, 1000, 100_000]) for n in range(300)]
    await transport.start(receiver)

    while len(receiver.received) < len(sent):
        for frame in sent[len(receiver.received) : len(receiver.received) + 7]:
            transport.send([frame])
        await receiver.have(min(len(receiver.received) + 7, len(sent)))

    assert receiver.received == sent
    await transport.aclose()
    assert receiver.lost.is_set()
    assert receiver.error is None


async def test_frames_sent_together_arrive_in_order(echo: Echo) -> None:
    transport, receiver = await echo(), Recorder()
    sent = [b"%d" % n for n in range(10_000)]
    await transport.start(receiver)

    transport.send(sent)

    assert await receiver.have(len(sent)) == sent
    await transport.aclose()


async def test_nothing_happens_after_closing(echo: Echo) -> None:
    transport, receiver = await echo(), Recorder()
    await transport.start(receiver)
    transport.send([b"a"])

    await asyncio.gather(transport.aclose(), transport.aclose())
    transport.send([b"b"])
    transport.pause_reading()
    transport.resume_reading()
    await transport.aclose()
    await asyncio.sleep(0)

    assert receiver.lost.is_set()
    assert b"b" not in receiver.received


async def test_closing_what_was_never_started_is_allowed(echo: Echo) -> None:
    transport = await echo()

    await transport.aclose()
    await transport.aclose()


async def test_reading_can_be_paused_before_the_start(echo: Echo) -> None:
    transport, receiver = await echo(), Recorder()
    transport.pause_reading()
    await transport.start(receiver)
    transport.send([b"a"])
    await asyncio.sleep(0.02)
    assert receiver.received == []

    transport.resume_reading()

    assert await receiver.have(1) == [b"a"]
    await transport.aclose()


async def test_each_tells_what_it_is_and_who_is_there() -> None:
    here, there = socket.socketpair()
    known = {"uid": os.geteuid(), "gid": os.getegid(), "pid": os.getpid()}
    sides = [SocketTransport(here), SocketTransport(there)]

    assert memory_pair()[0].info == {"kind": "process", "peer": None}
    assert byte_pair()[0].info == {"kind": "process", "peer": None}
    assert ProcessTransport(["cat"]).info == {"kind": "stdio", "peer": None}
    assert StdioTransport().info == {"kind": "stdio", "peer": None}
    assert [side.info for side in sides] == [{"kind": "unix", "peer": known}] * 2
    for side in sides:
        await side.aclose()


def test_the_door_knows_what_it_lists_and_nothing_else() -> None:
    from antiphon import transports

    assert [getattr(transports, name) for name in transports.__all__]
    name: Any = "NoTransport"
    with pytest.raises(AttributeError, match="NoTransport"):
        getattr(transports, name)
