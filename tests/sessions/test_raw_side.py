"""The peer that other tests put words into the mouth of says and hears exactly those."""

from __future__ import annotations

import asyncio

import pytest

from antiphon import Agent, AgentPeer, ConnectionClosed
from tests.sessions.raw_side import RawSide, raw_agent, raw_client, raw_pair, unshaken_client


async def test_what_it_is_told_to_send_goes_out_as_it_is_and_in_one_go() -> None:
    async with raw_pair() as (ours, raw):
        here = RawSide(ours)
        await ours.start(here)
        raw.send(
            {"a": 1},
            b'{ "b":2}',
            raw.notification("m", None),
            raw.request("r", "q", [1]),
            raw.update("s", "text"),
        )
        raw.answer({"id": 7}, {"x": 1})
        raw.refuse({"id": 8}, -5, data=[])
        await here.answer_to(8)
        update = {
            "sessionUpdate": "agent_message_chunk",
            "content": {"type": "text", "text": "text"},
        }
        assert here.frames == [
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


async def test_it_waits_for_the_frame_it_was_asked_for() -> None:
    async with raw_pair() as (ours, raw):
        here = RawSide(ours)
        await ours.start(here)
        second = asyncio.create_task(here.wait("m", 2))
        answer = asyncio.create_task(here.answer_to("a"))
        raw.send(raw.notification("m", 1), raw.request("a", "m2", None))
        await here.wait("m2")
        assert not second.done()
        assert not answer.done()  # a request with that id is no answer
        raw.send(raw.notification("m", 2), {"id": "a", "result": None})
        assert (await second)["params"] == 2
        assert (await answer)["result"] is None
        assert len(here.sent("m")) == 2
        assert here.sent(None) == [{"id": "a", "result": None}]


async def test_a_raw_client_has_shaken_hands_and_an_unshaken_one_has_not() -> None:
    async with raw_client(Agent(), {"terminal": True}) as raw:
        assert raw.frames[0]["id"] == "hello"
        assert raw.frames[0]["result"]["protocolVersion"] == 1
        await raw.round_trip()
        assert len(raw.frames) == 2
    async with unshaken_client(Agent()) as raw:
        assert raw.frames == []
        assert (await raw.ask("session/new", {}))["error"]["code"] == -32600


async def test_a_raw_agent_answers_the_handshake_as_it_is_told_and_nothing_else() -> None:
    async with raw_agent(
        capabilities={"loadSession": True}, initialized={"agentInfo": {"name": "n", "version": "1"}}
    ) as (peer, raw):
        assert peer.offers("loadSession")
        assert peer.info is not None
        assert peer.info.name == "n"
        opening = asyncio.create_task(peer.new_session())
        await raw.wait("session/new")
        await raw.round_trip()
        assert not opening.done()
        raw.answer(raw.sent("session/new")[0], {"sessionId": "s"})
        assert (await opening).session_id == "s"
        await raw.transport.aclose()
        await asyncio.wait_for(raw.lost.wait(), 5)


async def test_nothing_is_left_open_when_a_block_is_left_by_an_error() -> None:
    made: list[tuple[AgentPeer, RawSide]] = []
    with pytest.raises(ZeroDivisionError):
        async with raw_agent() as both:
            made.append(both)
            raise ZeroDivisionError
    ((peer, raw),) = made
    assert peer.connection.closed
    assert raw.lost.is_set()
    with pytest.raises(ConnectionClosed):
        await peer.new_session()
    with pytest.raises(ZeroDivisionError):
        async with raw_client(Agent()):
            raise ZeroDivisionError
