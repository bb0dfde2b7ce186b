"""A socket that a loop moves by itself, as a reader and a writer; `test_socket.py` has it in use."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from antiphon._descriptors import HIGH_WATER
from antiphon.transports._loop_socket import LoopReader, LoopWriter, open_by_loop

if TYPE_CHECKING:
    from antiphon._descriptors import Reader, Writer

    # For the type checkers: they have the shape of what they stand for.
    A_READER: type[Reader] = LoopReader
    A_WRITER: type[Writer] = LoopWriter


class Ends:
    """Both ends of a socket: ours open by the loop, and theirs."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        self.here = here
        self.got = b""
        self.told: list[Any] = []
        self.changed = asyncio.Event()

    async def open(self) -> tuple[LoopReader, LoopWriter]:
        def receive(data: bytes) -> None:
            self.got += data
            self.changed.set()

        def tell(what: Any) -> None:
            self.told.append(what)
            self.changed.set()

        return await open_by_loop(
            self.here,
            receive=receive,
            ended=lambda error: tell(("ended", type(error))),
            paused=lambda: tell("paused"),
            resumed=lambda: tell("resumed"),
            failed=lambda error: tell(("failed", type(error))),
        )

    async def until(self, *told: Any) -> None:
        while self.told != list(told):
            self.changed.clear()
            await self.changed.wait()


async def test_nothing_is_handed_over_before_it_is_wanted(loop_factory: Any) -> None:
    ends = Ends()
    reader, writer = await ends.open()
    ends.there.sendall(b"early")
    reader.pause()
    reader.drain(100)
    await asyncio.sleep(0.01)
    assert not ends.changed.is_set()

    reader.resume()
    reader.resume()
    await ends.changed.wait()
    assert ends.got == b"early"

    reader.close()
    reader.close()
    reader.resume()
    writer.close()
    writer.close()
    ends.there.close()
    await asyncio.sleep(0)
    assert ends.told == []


async def test_an_end_of_input_leaves_the_output_open(loop_factory: Any) -> None:
    ends = Ends()
    reader, writer = await ends.open()
    reader.resume()
    ends.there.shutdown(socket.SHUT_WR)
    await ends.until(("ended", type(None)))

    writer.write(b"answer")
    writer.end()
    assert await asyncio.to_thread(ends.there.recv, 100) == b"answer"
    assert await asyncio.to_thread(ends.there.recv, 100) == b""

    writer.close()
    reader.close()
    ends.there.close()
    await asyncio.sleep(0)


async def test_room_is_asked_for_and_told(loop_factory: Any) -> None:
    ends = Ends()
    reader, writer = await ends.open()
    while not ends.told:
        writer.write(b"x" * 10_000)
    assert ends.told == ["paused"]
    assert writer.buffered > HIGH_WATER
    drained = asyncio.create_task(writer.drained())
    await asyncio.sleep(0)

    while writer.buffered:
        await asyncio.to_thread(ends.there.recv, 65536)
    await drained
    await ends.until("paused", "resumed")

    writer.close()
    reader.close()
    ends.there.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["closed", "lost"])
async def test_who_waits_for_the_output_is_not_left_waiting(way: str, loop_factory: Any) -> None:
    ends = Ends()
    reader, writer = await ends.open()
    while not ends.told:
        writer.write(b"x" * 10_000)
    drained = asyncio.create_task(writer.drained())
    await asyncio.sleep(0)

    if way == "closed":
        reader.close()
        writer.close()
    else:
        ends.there.close()
    await drained

    assert writer.buffered == 0
    writer.write(b"dropped")
    writer.end()
    reader.close()
    writer.close()
    ends.there.close()
    await asyncio.sleep(0)


async def test_a_peer_that_is_gone_is_told_to_both(loop_factory: Any) -> None:
    ends = Ends()
    reader, writer = await ends.open()
    ends.there.close()
    writer.write(b"x")
    writer.write(b"x")
    await asyncio.sleep(0)

    async with asyncio.timeout(5):
        while len(ends.told) < 2:
            ends.changed.clear()
            await ends.changed.wait()

    assert [what for what, _ in ends.told] == ["ended", "failed"]
    reader.close()
    writer.close()


async def test_a_socket_that_cannot_be_opened_is_closed() -> None:
    ends = Ends()
    ends.here.setblocking(False)
    ends.here.close()

    with pytest.raises((OSError, ValueError)):
        await ends.open()

    assert ends.there.recv(1) == b""
    ends.there.close()
