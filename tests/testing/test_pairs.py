"""Pairs of ends start shaken hands, or not, and nothing is left of them, whatever happened inside."""

from __future__ import annotations

import asyncio
import gc
from typing import NoReturn

import pytest

from antiphon import (
    Agent,
    AgentPeer,
    Client,
    ConnectionClosed,
    LimitExceeded,
    Limits,
    RequestError,
    StartError,
    Turn,
    VersionMismatch,
)
from antiphon.testing import (
    ByteTransport,
    Faults,
    RawPeer,
    byte_pair,
    joined,
    memory_pair,
    raw_agent,
    raw_client,
    unshaken_agent,
    unshaken_client,
)
from antiphon.transports import MemoryTransport


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(turn.text)


@pytest.mark.virtual_time
async def test_a_raw_client_has_shaken_hands_and_an_unshaken_one_has_not() -> None:
    async with raw_client(Agent(), {"terminal": True}) as raw:
        assert raw.frames[0]["id"] == "hello"
        assert raw.frames[0]["result"]["protocolVersion"] == 1
        await raw.expect_nothing()  # the handshake is behind us
        await raw.round_trip()
        assert len(raw.frames) == 2
    async with unshaken_client(Agent()) as raw:
        assert raw.frames == []
        assert (await raw.ask("session/new", {}))["error"]["code"] == -32600


@pytest.mark.virtual_time
async def test_a_raw_agent_answers_the_handshake_as_it_is_told_and_nothing_else() -> None:
    async with raw_agent(
        capabilities={"loadSession": True}, initialized={"agentInfo": {"name": "n", "version": "1"}}
    ) as (peer, raw):
        assert peer.offers("loadSession")
        assert peer.info is not None
        assert peer.info.name == "n"
        await raw.expect_nothing()
        opening = asyncio.create_task(peer.new_session())
        await raw.wait("session/new")
        await raw.round_trip()
        assert not opening.done()
        raw.answer(raw.sent("session/new")[0], {"sessionId": "s"})
        assert (await opening).session_id == "s"
        await raw.aclose()
        await raw.closed()


@pytest.mark.virtual_time
async def test_an_unshaken_agent_can_answer_the_handshake_in_any_way() -> None:
    async with unshaken_agent() as (connecting, raw):
        request = await raw.wait("initialize")
        assert not connecting.done()
        raw.answer(request, {"protocolVersion": 1})
        peer = await connecting
        assert not peer.connection.closed
    assert peer.connection.closed
    async with unshaken_agent() as (connecting, raw):
        raw.refuse(await raw.wait("initialize"), -32000)
        with pytest.raises(RequestError):
            await connecting
    async with unshaken_agent(limits=Limits(startup_timeout=5.0)) as (connecting, _):
        with pytest.raises(StartError):
            await connecting
    assert asyncio.get_running_loop().time() == 5.0
    async with unshaken_agent() as (connecting, raw):
        await raw.wait("initialize")  # and then nobody looks
    assert connecting.cancelled()


@pytest.mark.virtual_time
async def test_a_handshake_that_fails_is_what_the_caller_sees() -> None:
    with pytest.raises(VersionMismatch):
        async with raw_agent(initialized={"protocolVersion": 77}):
            pytest.fail("no hands were shaken")
    with pytest.raises(TypeError, match="no_such_option"):
        async with raw_agent(no_such_option=1):
            pytest.fail("no hands were shaken")

    class Closed(MemoryTransport):
        async def start(self, receiver: object) -> None:
            raise OSError("it does not open")

    async def broken() -> None:
        ours, theirs = Closed(None), memory_pair()[0]
        async with raw_agent(transports=(ours, theirs)):
            pytest.fail("no hands were shaken")

    with pytest.raises(OSError, match="it does not open"):
        await broken()

    class Refuses(Agent):
        async def initialize(self, params: object, ctx: object) -> NoReturn:
            raise RequestError(-32000, "not today")

    gc.collect()  # what failed behind the scenes is on nobody's hands

    with pytest.raises(AssertionError, match=r"refused initialize.*not today"):
        async with raw_client(Refuses()):
            pytest.fail("no hands were shaken")


@pytest.mark.virtual_time
async def test_nothing_is_left_open_when_a_block_is_left_by_an_error() -> None:
    made: list[tuple[AgentPeer, RawPeer]] = []
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
    with pytest.raises(ZeroDivisionError):
        async with joined(Echo()) as peer:
            raise ZeroDivisionError
    assert peer.connection.closed


@pytest.mark.virtual_time
async def test_both_our_sides_can_be_joined() -> None:
    wire: list[tuple[str, bytes]] = []

    def record(direction: str, frame: bytes) -> None:
        wire.append((direction, frame))

    async with joined(Echo(), Client(), record=record) as agent:
        session = await agent.new_session(cwd="/w")
        assert (await session.prompt("hi")).text == "hi"
    assert [direction for direction, _ in wire] == ["out", "in", "out", "in", "out", "in", "in"]


@pytest.mark.virtual_time
async def test_an_agent_has_ended_when_its_block_is_left() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Slow(Agent):
        async def prompt(self, turn: Turn) -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1)
                ended.set()

    async def ask(agent: AgentPeer) -> None:
        session = await agent.new_session(cwd="/")
        await session.prompt("go")

    async with joined(Slow()) as agent:
        asking = asyncio.create_task(ask(agent))
        await begun.wait()
    assert ended.is_set()
    with pytest.raises(ConnectionClosed):
        await asking


@pytest.mark.virtual_time
async def test_each_side_can_have_options_of_its_own() -> None:
    async with joined(Echo(), agent_options={"limits": Limits(sessions=1)}) as agent:
        await agent.new_session(cwd="/")
        with pytest.raises(RequestError, match="limit sessions exceeded"):
            await agent.new_session(cwd="/")
    async with joined(Echo(), limits=Limits(sessions=1)) as agent:
        await agent.new_session(cwd="/")
        with pytest.raises(LimitExceeded):
            await agent.new_session(cwd="/")


@pytest.mark.virtual_time
async def test_any_pair_of_transports_will_do() -> None:
    ours, theirs = memory_pair()
    async with raw_client(Echo(), transports=(ours, theirs)) as raw:
        assert raw.transport is theirs
    ours, theirs = memory_pair()
    async with raw_agent(transports=(ours, theirs)) as (_, raw):
        assert raw.transport is theirs
    ours, theirs = memory_pair()
    async with joined(Echo(), transports=(ours, theirs)) as agent:
        assert agent.connection is not None


@pytest.mark.virtual_time
async def test_a_raw_peer_on_a_stream_can_say_half_a_frame() -> None:
    async with raw_client(Echo(), transports=byte_pair()) as raw:
        raw.send_bytes(b'{"jsonrpc":"2.0","id":5,')
        await raw.expect_nothing(60)
        raw.send_bytes(b'"method":"_who/knows"}\r\n\n{"jsonrpc":"2.0","id":6')
        await raw.expect(None, id=5, error={"code": -32601})
        assert isinstance(raw.transport, ByteTransport)
        raw.transport.end_output()  # half a frame is what is left of it
        await raw.expect(None, id=None, error={"code": -32700})
        await raw.closed()
        await raw.expect_nothing()


@pytest.mark.virtual_time
async def test_a_client_sees_what_came_before_its_stream_broke() -> None:
    # The handshake and the answer to session/new pass, and two and a half of three updates.
    broken = Faults(chunks=50, die_at=650)
    async with raw_agent(transports=byte_pair(b_to_a=broken)) as (agent, raw):
        opening = asyncio.create_task(agent.new_session(cwd="/"))
        raw.answer(await raw.expect("session/new"), {"sessionId": "s"})
        session = await opening
        heard: list[str] = []
        with pytest.raises(ConnectionClosed, match="the stream broke after byte 650"):
            async with session.prompt("go") as turn:
                await raw.wait("session/prompt")
                raw.send(*(raw.update("s", f"{number}" * 20) for number in range(3)))
                async for update in turn:
                    heard.append(update.text)  # noqa: PERF401  (some come, then an error)
        assert heard == ["0" * 20, "1" * 20]
        await raw.closed()
