"""The pair of sides that other tests stand on: what it records, and that nothing is left of it."""

from __future__ import annotations

import asyncio

import pytest

from antiphon import Agent, AgentPeer, ConnectionClosed, LimitExceeded, Limits, Turn
from tests.sessions.pairs import Wire, joined


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(turn.text)


async def test_a_wire_keeps_what_crossed_with_its_direction_and_order() -> None:
    async with joined(Echo()) as (peer, wire):
        session = await peer.new_session(cwd="/w")
        await session.prompt("hi")
        assert [(direction, frame.get("method")) for direction, frame in wire.frames] == [
            ("out", "initialize"),
            ("in", None),
            ("out", "session/new"),
            ("in", None),
            ("out", "session/prompt"),
            ("in", "session/update"),
            ("in", None),
        ]
        assert wire.sent("session/new")[0]["cwd"] == "/w"
        assert wire.received("session/update")[0]["sessionId"] == session.session_id
        assert wire.sent("session/update") == wire.received("session/new") == []
        assert [answer["id"] for answer in wire.answers()] == [1, 2, 3]


async def test_a_wire_can_be_waited_at() -> None:
    wire = Wire()
    waiting = asyncio.create_task(wire.wait_for("x", 2))
    wire("out", b'{"method":"x","params":1}')
    await asyncio.sleep(0)
    wire("in", b'{"method":"y"}')
    await asyncio.sleep(0)
    assert not waiting.done()
    wire("in", b'{"method":"x","params":2}')
    assert list[object](await asyncio.wait_for(waiting, 5)) == [1, 2]
    assert await wire.wait_for("y") == [{}]


async def test_each_side_can_have_limits_of_its_own() -> None:
    async with joined(Echo(), agent_limits=Limits(sessions=1)) as (peer, _):
        await peer.new_session(cwd="/")
        with pytest.raises(Exception, match="limit sessions exceeded"):
            await peer.new_session(cwd="/")
    async with joined(Echo(), limits=Limits(sessions=1)) as (peer, _):
        await peer.new_session(cwd="/")
        with pytest.raises(LimitExceeded):
            await peer.new_session(cwd="/")


async def test_both_sides_are_closed_when_the_block_is_left_by_an_error() -> None:
    peers: list[AgentPeer] = []
    with pytest.raises(ZeroDivisionError):
        async with joined(Echo()) as (peer, _):
            peers.append(peer)
            raise ZeroDivisionError
    assert peers[0].connection.closed
    with pytest.raises(ConnectionClosed):
        await peers[0].new_session()
