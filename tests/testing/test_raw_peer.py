"""The peer that a test puts words into the mouth of says and hears exactly those."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import UNSET
from antiphon.core import Fault
from antiphon.testing import RawPeer, Recorder, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

FAULT = Fault("frame_too_large", 9, b"", b"")


@asynccontextmanager
async def two() -> AsyncGenerator[tuple[RawPeer, RawPeer]]:
    """Two raw peers that talk to each other."""
    one, other = memory_pair()
    async with RawPeer(one) as here, RawPeer(other) as there:
        yield here, there


@pytest.mark.virtual_time
async def test_what_it_is_told_to_send_goes_out_as_it_is_and_in_one_go() -> None:
    async with two() as (raw, there):
        raw.send(
            {"a": 1},
            b'{ "b":2}',
            raw.notification("m", None),
            raw.request("r", "q", [1]),
            raw.update("s", "text"),
        )
        raw.answer({"id": 7}, {"x": 1})
        raw.refuse({"id": 8}, -5, data=[])
        await there.answer_to(8)
        update = {
            "sessionUpdate": "agent_message_chunk",
            "content": {"type": "text", "text": "text"},
        }
        assert there.frames == [
            {"a": 1},
            {"b": 2},
            {"jsonrpc": "2.0", "method": "m", "params": None},
            {"jsonrpc": "2.0", "id": "r", "method": "q", "params": [1]},
            {
                "jsonrpc": "2.0",
                "method": "session/update",
                "params": {"sessionId": "s", "update": update},
            },
            {"jsonrpc": "2.0", "id": 7, "result": {"x": 1}},
            {"jsonrpc": "2.0", "id": 8, "error": {"code": -5, "message": "no", "data": []}},
        ]
        assert there.raw_frames[1] == b'{ "b":2}'
        assert there.batches == [there.raw_frames]  # one turn of the loop, one delivery


def test_params_that_are_not_given_are_absent_and_those_that_are_null_are_null() -> None:
    assert RawPeer.request(1, "m") == {"jsonrpc": "2.0", "id": 1, "method": "m"}
    assert RawPeer.request(1, "m", None) == {**RawPeer.request(1, "m"), "params": None}
    assert RawPeer.notification("m") == {"jsonrpc": "2.0", "method": "m"}
    assert RawPeer.notification("m", []) == {**RawPeer.notification("m"), "params": []}


@pytest.mark.virtual_time
async def test_it_waits_for_the_frame_it_was_asked_for() -> None:
    async with two() as (raw, there):
        second = asyncio.create_task(there.wait("m", 2))
        answer = asyncio.create_task(there.answer_to("a"))
        raw.send(raw.notification("m", 1), raw.request("a", "m2", None))
        await there.wait("m2")
        assert not second.done()
        assert not answer.done()  # a request with that id is no answer
        raw.send(raw.notification("m", 2), {"id": "a", "result": None})
        assert (await second)["params"] == 2
        assert (await answer)["result"] is None
        assert len(there.sent("m")) == 2
        assert there.sent(None) == [{"id": "a", "result": None}]


@pytest.mark.virtual_time
async def test_what_was_forgotten_is_neither_found_nor_expected() -> None:
    async with two() as (raw, there):
        raw.send({"id": 1, "result": "old"}, {"method": "m"}, b"no json")
        assert (await there.answer_to(1))["result"] == "old"
        answer = asyncio.create_task(there.answer_to(2))
        await asyncio.sleep(1)
        there.forget()
        for kept in (there.frames, there.raw_frames, there.received, there.batches):
            assert not kept
        await there.expect_nothing()
        raw.send({"id": 1, "result": "new"}, {"id": 2, "result": None})
        assert (await there.answer_to(1))["result"] == "new"
        assert (await answer)["result"] is None
        await there.expect_nothing()


@pytest.mark.virtual_time
async def test_an_id_is_of_exactly_one_type() -> None:
    async with two() as (raw, there):
        raw.send(*({"id": id_, "result": str(id_)} for id_ in (1.0, "1", True, 1, None)), {"x": 1})
        for id_ in (1, 1.0, True, "1", None):
            assert (await there.answer_to(id_))["result"] == str(id_)
            assert len(there.responses(id_)) == 1


@pytest.mark.virtual_time
async def test_a_wait_fails_at_its_bound_and_shows_what_came_instead() -> None:
    async with two() as (raw, there):
        there.bound = 3.0
        raw.send(raw.notification("other", 1), b"no json", [1])
        with pytest.raises(AssertionError) as caught:
            await there.wait("m")
        assert asyncio.get_running_loop().time() == 3.0
        text = str(caught.value)
        assert "m (number 1) did not come within 3 s; 3 frames came; the last:" in text
        assert '{"jsonrpc": "2.0", "method": "other", "params": 1}' in text
        assert "no json" in text
        with pytest.raises(AssertionError, match="a response to id 5 did not come within 3 s"):
            await there.answer_to(5)
        with pytest.raises(AssertionError, match="the condition did not come true within 3 s"):
            await there.until(lambda: False)
        with pytest.raises(AssertionError, match="the link was not closed within 3 s"):
            await there.closed()


@pytest.mark.virtual_time
async def test_a_wait_fails_at_once_when_the_link_is_gone() -> None:
    async with two() as (raw, there):
        waiting = asyncio.create_task(there.wait("m"))
        await raw.aclose()
        with pytest.raises(AssertionError, match="before the other side ended; the link is closed"):
            await waiting
        assert there.lost.is_set()
        assert there.error is None
        await there.closed()
        assert asyncio.get_running_loop().time() == 0.0


@pytest.mark.virtual_time
async def test_it_asks_with_a_new_id_each_time() -> None:
    async with two() as (raw, there):
        first = asyncio.create_task(raw.ask("m"))
        second = asyncio.create_task(raw.ask("m", {"x": 1}, "mine"))
        third = asyncio.create_task(raw.ask("m", [2]))
        await there.wait("m", 3)
        for number, request in enumerate(there.sent("m")):
            there.answer(request, number)
        assert [(await task)["result"] for task in (first, second, third)] == [0, 1, 2]
        assert len({request["id"] for request in there.sent("m")}) == 3
        assert there.sent("m")[1]["id"] == "mine"


@pytest.mark.virtual_time
async def test_expecting_takes_frames_in_their_order_and_looks_only_at_what_is_named() -> None:
    async with two() as (raw, there):
        raw.send({"method": "a", "id": 1, "params": {"x": 1, "y": [{"z": 1, "more": 2}]}})
        raw.send({"method": "b"}, {"id": 2, "result": {}})
        frame = await there.expect("a", id=..., params={"y": [{"z": 1}], "w": UNSET})
        assert frame["params"]["x"] == 1
        await there.expect(method="b", id=UNSET)
        await there.expect(None, result={})
        await there.expect_nothing()


@pytest.mark.virtual_time
async def test_what_was_waited_for_is_expected_already() -> None:
    async with two() as (raw, there):
        raw.send({"method": "a"}, {"method": "b"}, {"method": "a"}, {"method": "c"}, {"id": 1})
        await there.wait("a", 2)
        await there.answer_to(1)
        await there.expect("b")
        with pytest.raises(AssertionError, match=r'nobody expected:\n  {"method": "c"}$'):
            await there.expect_nothing()
        await there.expect("c")
        await there.expect_nothing()


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("wanted", "came", "differences"),
    [
        ({"id": 1}, {"id": "1"}, ['id: came "1", expected 1']),
        ({"id": 1}, {"id": True}, ["id: came true, expected 1"]),
        ({"id": 1}, {"id": 1.0}, ["id: came 1.0, expected 1"]),
        ({"params": None}, {}, ["params: absent, expected null"]),
        ({"params": UNSET}, {"params": None}, ["params: came null, expected to be absent"]),
        ({"params": {"a": {"b": ...}}}, {"params": {"a": {}}}, ["params.a.b: absent, expected"]),
        ({"params": [1, {"a": 2}]}, {"params": [3, {"a": 4}]}, ["params[0]: ", "params[1].a: "]),
        ({"params": [1]}, {"params": [1, 2]}, ["params: 2 items came, expected 1"]),
        ({"params": {"a": 1}}, {"params": [1]}, ['params: came [1], expected {"a": 1}']),
        ({"method": "m"}, {"method": "n"}, ['method: came "n", expected "m"']),
        ({"method": None}, {"method": "n"}, ['method: came "n", expected to be absent']),
    ],
)
async def test_a_frame_that_was_not_expected_is_shown_with_what_differs(
    wanted: dict[str, Any], came: dict[str, Any], differences: list[str]
) -> None:
    async with two() as (raw, there):
        raw.send(came)
        with pytest.raises(AssertionError) as caught:
            await there.expect(**wanted)
        lines = str(caught.value).splitlines()
        assert lines[1].startswith("  expected: {")
        assert lines[2].startswith("  came:     {")
        assert len(lines) == 3 + len(differences)
        for line, difference in zip(lines[3:], differences, strict=True):
            assert line.startswith(f"  {difference}")
        await there.expect()  # it is still the next one


@pytest.mark.virtual_time
async def test_expecting_what_never_comes_says_what_was_expected() -> None:
    async with two() as (raw, there):
        with pytest.raises(AssertionError, match=r'expected {"method": "m", "id": "\(anything\)"}'):
            await there.expect("m", id=...)
        assert asyncio.get_running_loop().time() == 10.0
        raw.send(b"[1]")
        with pytest.raises(AssertionError, match="what came is no JSON object: b'\\[1\\]'"):
            await there.expect("m")
        raw.send(b"x" * 2000)
        await raw.aclose()
        with pytest.raises(
            AssertionError, match=r"nobody expected:\n  .*\n.*… \(2003 characters\)"
        ):
            await there.expect_nothing()


async def test_what_is_on_its_way_is_seen_by_expecting_nothing_in_real_time_too() -> None:
    async with two() as (raw, there):
        await there.expect_nothing()
        raw.send({"method": "m"})
        with pytest.raises(AssertionError, match="nobody expected"):
            await there.expect_nothing()


@pytest.mark.virtual_time
async def test_expecting_nothing_can_wait() -> None:
    async with two() as (raw, there):
        asyncio.get_running_loop().call_later(5, raw.send, {"method": "m"})
        await there.expect_nothing(4)
        with pytest.raises(AssertionError, match="nobody expected"):
            await there.expect_nothing(4)


@pytest.mark.virtual_time
async def test_a_transport_of_frames_has_no_bytes_to_send() -> None:
    async with two() as (raw, _):
        with pytest.raises(TypeError, match="a memory transport moves frames, not bytes"):
            raw.send_bytes(b"x")


@pytest.mark.parametrize(
    ("calls", "law"),
    [
        (["lost", "frames"], "frames after the link was lost"),
        (["ended", "frames"], "frames after the end of input"),
        (["no frames"], "a delivery without frames"),
        (["ended", "ended"], "a second end of input"),
        (["lost", "ended"], "the end of input after the link was lost"),
        (["lost", "lost"], "a second loss of the link"),
        (["lost", "pause"], "pause_writing after the link was lost"),
        (["lost", "resume"], "resume_writing after the link was lost"),
    ],
)
@pytest.mark.virtual_time
async def test_a_transport_that_breaks_a_law_is_told_on(calls: list[str], law: str) -> None:
    raw = RawPeer(memory_pair()[0])
    ways = {
        "lost": lambda: raw.connection_lost(None),
        "ended": raw.input_ended,
        "frames": lambda: raw.frames_received([b"{}"]),
        "no frames": lambda: raw.frames_received([]),
        "pause": raw.pause_writing,
        "resume": raw.resume_writing,
    }
    for call in calls[:-1]:
        ways[call]()
    with pytest.raises(AssertionError, match=law):
        ways[calls[-1]]()
    # Transports call from the loop, where nobody may look: so whoever waits is told as well.
    with pytest.raises(AssertionError, match=f"the transport broke a law of Transport: {law}"):
        await raw.wait("m")
    with pytest.raises(AssertionError, match=law):
        await raw.aclose()


async def test_everything_that_a_transport_says_is_kept() -> None:
    raw = RawPeer(memory_pair()[0])
    error = OSError()
    raw.pause_writing()
    raw.frames_received([b"1", FAULT, b'{"a":1}'])
    raw.frames_received([b"\xff"])
    raw.resume_writing()
    raw.input_ended()
    assert raw.ended.is_set()
    assert not raw.lost.is_set()
    raw.connection_lost(error)
    assert raw.batches == [[b"1", FAULT, b'{"a":1}'], [b"\xff"]]
    assert raw.received == [b"1", FAULT, b'{"a":1}', b"\xff"]
    assert raw.raw_frames == [b"1", b'{"a":1}', b"\xff"]
    assert raw.frames == [{"a": 1}]
    assert raw.faults == [FAULT]
    assert raw.room == ["pause", "resume"]
    assert raw.error is error
    with pytest.raises(
        AssertionError, match=r"the link is lost: OSError\(\); 4 frames came(?s:.)*Fault\("
    ):
        await raw.wait("m")


@pytest.mark.virtual_time
async def test_a_recorder_is_the_receiver_of_a_transport_under_test() -> None:
    near, far = memory_pair()
    inside: list[list[bytes | Fault]] = []
    recorder = Recorder(bound=5.0, on_frames=inside.append)
    await far.start(recorder)
    await near.start(Recorder())
    having = asyncio.create_task(recorder.have(3))
    near.send([b"a", b"b"])
    await asyncio.sleep(1)
    assert not having.done()
    near.send([b"c"])
    assert await having == recorder.received == [b"a", b"b", b"c"]
    assert inside == recorder.batches == [[b"a", b"b"], [b"c"]]
    with pytest.raises(AssertionError, match="4 frames did not come within 5 s; 3 frames came"):
        await recorder.have(4)
    await near.aclose()
    await recorder.closed()
    with pytest.raises(AssertionError, match="4 frames did not come before the other side ended"):
        await recorder.have(4)
