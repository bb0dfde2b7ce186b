"""Two transports joined in memory keep the laws that byte transports keep."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.testing import Recorder
from antiphon.transports import MemoryTransport, memory_pair

if TYPE_CHECKING:
    from antiphon.core import Fault


async def started() -> tuple[MemoryTransport, Recorder, MemoryTransport, Recorder]:
    one, other = memory_pair()
    here, there = Recorder(), Recorder()
    await one.start(here)
    await other.start(there)
    return one, here, other, there


async def test_frames_arrive_in_the_order_of_sending() -> None:
    one, here, other, there = await started()

    for number in range(100):
        one.send([b"%d" % number, b"%d!" % number])
    other.send([b"back"])

    assert await there.have(200) == [b"%d%s" % (n, t) for n in range(100) for t in (b"", b"!")]
    assert await here.have(1) == [b"back"]


async def test_send_never_calls_the_other_receiver() -> None:
    one, _, _, there = await started()

    one.send([b"a"])

    assert there.received == []
    await there.have(1)


async def test_an_answer_from_inside_a_delivery_is_delivered_later() -> None:
    one, here, other, there = await started()
    order: list[str] = []

    def answer(frames: object) -> None:
        order.append("request")
        other.send([b"answer"])
        order.append("sent")

    there.on_frames = answer

    def answered(frames: list[bytes | Fault]) -> None:
        order.append(f"answer {frames}")

    here.on_frames = answered
    one.send([b"request"])
    await here.have(1)

    assert order == ["request", "sent", "answer [b'answer']"]


async def test_frames_sent_before_the_peer_starts_are_held_in_order() -> None:
    one, other = memory_pair()
    here, there = Recorder(), Recorder()
    await one.start(here)
    one.send([b"a"])
    one.send([b"b"])
    await asyncio.sleep(0)

    await other.start(there)

    assert await there.have(2) == [b"a", b"b"]


async def test_a_paused_reader_gets_nothing_and_then_everything() -> None:
    one, _, other, there = await started()
    other.pause_reading()
    other.pause_reading()
    one.send([b"a"])
    await asyncio.sleep(0)
    assert there.received == []

    other.resume_reading()
    other.resume_reading()

    assert await there.have(1) == [b"a"]


async def test_pausing_inside_a_delivery_holds_the_next_one() -> None:
    one, _, other, there = await started()

    def pause(frames: list[bytes | Fault]) -> None:
        other.pause_reading()

    there.on_frames = pause
    one.send([b"a", b"b"])
    await there.have(2)
    one.send([b"c"])
    await asyncio.sleep(0)
    assert there.received == [b"a", b"b"]

    other.resume_reading()

    assert await there.have(3) == [b"a", b"b", b"c"]


async def test_the_sender_is_paused_above_64_kib_and_resumed_after_delivery() -> None:
    one, here, other, there = await started()
    other.pause_reading()
    one.send([b"x" * 65_536])
    assert here.room == []
    one.send([b"x"])
    one.send([b"x"])
    assert here.room == ["pause"]

    other.resume_reading()
    await there.have(3)

    assert here.room == ["pause", "resume"]


async def test_closing_ends_both_sides_after_what_was_sent() -> None:
    one, here, other, there = await started()
    one.send([b"last"])

    await one.aclose()
    await one.aclose()

    assert here.lost.is_set()
    assert here.error is None
    await there.lost.wait()
    assert there.received == [b"last"]
    assert there.error is None
    await other.aclose()
    assert there.lost.is_set()


async def test_what_the_peer_has_not_taken_is_told_by_its_bytes() -> None:
    one, _, other, there = await started()
    assert one.unsent == 0
    other.pause_reading()

    one.send([b"x" * 1000, b"y" * 500])
    one.send([b"z"])
    assert (one.unsent, other.unsent) == (1501, 0)

    other.resume_reading()
    await there.have(3)
    assert one.unsent == 0


async def test_a_paused_reader_gets_what_was_sent_and_the_end_when_the_peer_has_gone() -> None:
    one, _, other, there = await started()
    other.pause_reading()

    def pause_again(_frames: list[bytes | Fault]) -> None:
        other.pause_reading()

    there.on_frames = pause_again
    one.send([b"last"])
    await asyncio.sleep(0)
    assert not there.received

    await one.aclose()

    await there.lost.wait()
    assert there.received == [b"last"]


async def test_what_arrived_before_closing_is_not_delivered_after_it() -> None:
    one, _, other, there = await started()
    one.send([b"late"])

    await other.aclose()
    await asyncio.sleep(0)

    assert there.received == []
    assert there.lost.is_set()


async def test_sending_after_the_end_is_a_no_op_on_both_sides() -> None:
    one, here, other, there = await started()
    await one.aclose()
    one.send([b"a"])
    other.send([b"b"])
    await there.lost.wait()
    other.send([b"c"])
    await asyncio.sleep(0)

    assert here.received == []
    assert there.received == []


async def test_a_peer_that_starts_after_the_end_gets_what_was_sent_and_the_end() -> None:
    one, other = memory_pair()
    here, there = Recorder(), Recorder()
    await one.start(here)
    one.send([b"a"])
    await one.aclose()

    await other.start(there)

    await there.lost.wait()
    assert there.received == [b"a"]


async def test_a_pair_describes_itself() -> None:
    one, _ = memory_pair()

    assert one.describe() == "memory"
