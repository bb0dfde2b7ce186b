"""Frames over any two descriptors: delivery before the end, pausing, back-pressure."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any, Self

import pytest

from antiphon import Limits, LocalProtocolError
from antiphon.core import Fault, join_frames
from antiphon.testing import Recorder
from antiphon.transports._stream import StreamTransport

if TYPE_CHECKING:
    from antiphon.transports import Receiver


class OverDescriptors(StreamTransport):
    """The plainest stream: the end of either direction is the end of the connection."""

    def __init__(self, reading: int, writing: int, *, frame_bytes: int = 1 << 20) -> None:
        super().__init__(Limits(frame_bytes=frame_bytes))
        self._descriptors = reading, writing

    async def start(self, receiver: Receiver) -> None:
        self._claim(receiver)
        self._open(*self._descriptors, own=True)

    def describe(self) -> str:
        return "two descriptors"

    def _input_over(self, error: OSError | None) -> None:
        self._finish()

    def _output_failed(self, error: OSError) -> None:
        self._close_writer()
        self._finish()

    def _last_word(self) -> Exception | None:
        return None

    async def flush_and_close(self, seconds: float = 1.0) -> bool:
        flushed = await self._flush(seconds)
        self._closing = True
        self._lose(None)
        self._close_reader()
        self._close_writer()
        return flushed


class Wire:
    """A started stream and the far ends of its two pipes."""

    def __init__(self, **options: Any) -> None:
        reading, self.to_it = os.pipe()
        self.from_it, writing = os.pipe()
        self.stream = OverDescriptors(reading, writing, **options)
        self.receiver = Recorder()
        self._open = {self.to_it, self.from_it}

    async def __aenter__(self) -> Self:
        await self.stream.start(self.receiver)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.flush_and_close(0)
        for fd in list(self._open):
            self.close(fd)

    def close(self, fd: int) -> None:
        self._open.remove(fd)
        os.close(fd)

    def feed(self, data: bytes) -> None:
        os.write(self.to_it, data)


async def test_frames_of_one_chunk_are_delivered_together(loop_factory: Any) -> None:
    async with Wire() as wire:
        wire.feed(b"a\nb\r\n\nc\npart")
        await wire.receiver.have(3)
        wire.feed(b"ial\n")
        await wire.receiver.have(4)

    assert wire.receiver.batches == [[b"a", b"b", b"c"], [b"partial"]]


async def test_an_over_long_line_is_a_fault_in_its_place() -> None:
    async with Wire(frame_bytes=10) as wire:
        wire.feed(b"before\n" + b"x" * 50 + b"\nafter\n")
        await wire.receiver.have(3)

    before, fault, after = wire.receiver.received
    assert (before, after) == (b"before", b"after")
    assert isinstance(fault, Fault)
    assert fault.size == 50


async def test_a_last_line_without_an_end_is_delivered_before_the_end(loop_factory: Any) -> None:
    async with Wire() as wire:
        wire.feed(b"a\nlast")
        wire.close(wire.to_it)
        await wire.receiver.lost.wait()

        assert wire.receiver.received == [b"a", b"last"]
        assert wire.receiver.lost.is_set()


async def test_pausing_inside_a_delivery_delivers_that_chunk_and_no_other() -> None:
    async with Wire() as wire:

        def pause(frames: list[bytes | Fault]) -> None:
            wire.stream.pause_reading()

        wire.receiver.on_frames = pause
        wire.feed(b"a\nb\n")
        await wire.receiver.have(2)
        wire.feed(b"c\n")
        wire.close(wire.to_it)
        await asyncio.sleep(0.01)
        assert wire.receiver.received == [b"a", b"b"]
        assert not wire.receiver.lost.is_set()

        wire.receiver.on_frames = None
        wire.stream.resume_reading()
        await wire.receiver.lost.wait()

        assert wire.receiver.received == [b"a", b"b", b"c"]


async def test_frames_are_joined_with_line_ends_and_separators_escaped() -> None:
    async with Wire() as wire:
        wire.stream.send([b'{"a":1}', '{"b":"\u2028"}'.encode()])
        wire.stream.send([])

        assert os.read(wire.from_it, 100) == b'{"a":1}\n{"b":"\\u2028"}\n'


@pytest.mark.parametrize("size", [65535, 65536, 65537, 300_000])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_large_frame_is_written_as_any_other(size: int, others: int) -> None:
    async with Wire() as wire:
        large = "x".join(["\u2028", "\u2029", "\u00a8\u00a9"] * 3).encode().ljust(size, b"y")
        frames = [large] + [b"small"] * others

        wire.stream.send(frames)
        wire.stream.send([b"last"])

        expected = join_frames([*frames, b"last"])
        assert await asyncio.to_thread(read_all, wire.from_it, len(expected)) == expected


def read_all(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(fd, size)
    return data


async def test_a_slow_peer_pauses_the_sender_and_delays_no_reading() -> None:
    async with Wire() as wire:
        while not wire.receiver.room:
            wire.stream.send([b"x" * 1000])
        wire.feed(b"meanwhile\n")
        await wire.receiver.have(1)
        assert wire.receiver.room == ["pause"]

        os.set_blocking(wire.from_it, False)
        while wire.receiver.room == ["pause"]:
            try:
                assert os.read(wire.from_it, 65_536)
            except BlockingIOError:
                await asyncio.sleep(0)

        assert wire.receiver.room == ["pause", "resume"]


async def test_what_the_descriptor_has_not_taken_is_told_by_its_bytes() -> None:
    async with Wire() as wire:
        assert wire.stream.unsent == 0
        sent = 0
        while not wire.receiver.room:
            wire.stream.send([b"x" * 999])
            sent += 1000
        before = wire.stream.unsent
        assert 65_536 < before < sent
        wire.stream.send([b"x" * 999])
        assert wire.stream.unsent == before + 1000

        read = len(await asyncio.to_thread(os.read, wire.from_it, 65_536))
        while wire.stream.unsent == before + 1000:  # until the loop has written what fits again
            await asyncio.sleep(0)
        assert before + 1000 - read <= wire.stream.unsent < before + 1000


async def test_a_peer_that_takes_no_more_is_lost_after_what_it_sent_also_while_paused() -> None:
    async with Wire() as wire:
        wire.stream.pause_reading()
        wire.feed(b"last words\nand half a lin")
        wire.close(wire.from_it)
        wire.stream.send([b"a"])
        wire.stream.send([b"b"])
        await wire.receiver.lost.wait()

        assert wire.receiver.received == [b"last words", b"and half a lin"]


async def test_a_peer_that_takes_no_more_is_lost_without_pausing_too() -> None:
    async with Wire() as wire:
        wire.feed(b"last words\n")
        wire.close(wire.from_it)
        wire.stream.send([b"a"])
        await wire.receiver.lost.wait()

        assert wire.receiver.received == [b"last words"]


async def test_sending_after_the_end_is_a_no_op() -> None:
    async with Wire() as wire:
        wire.close(wire.to_it)
        await wire.receiver.lost.wait()

        wire.stream.send([b"a"])

        assert os.read(wire.from_it, 100) == b""


async def test_flushing_waits_for_a_slow_peer_but_not_for_ever() -> None:
    async with Wire() as wire:
        wire.stream.send([b"x" * 600_000])

        assert not await wire.stream.flush_and_close(0.01)


async def test_flushing_returns_when_everything_is_written() -> None:
    async with Wire() as wire:
        wire.stream.send([b"x" * 600_000])
        flushing = asyncio.create_task(wire.stream.flush_and_close(10))
        size = 0
        while size < 600_001:
            size += len(await asyncio.to_thread(os.read, wire.from_it, 65_536))

        assert await flushing


async def test_a_transport_starts_once() -> None:
    async with Wire() as wire:
        with pytest.raises(LocalProtocolError, match="two descriptors"):
            await wire.stream.start(Recorder())


async def test_one_socket_carries_both_directions(loop_factory: Any) -> None:
    here, there = socket.socketpair()
    stream = OverDescriptors(os.dup(here.fileno()), here.detach())
    receiver = Recorder()
    await stream.start(receiver)
    there.sendall(b"in\n")
    await receiver.have(1)
    stream.send([b"out"])
    assert there.recv(100) == b"out\n"
    there.close()

    await receiver.lost.wait()

    await stream.flush_and_close()
