"""Quirks 1 to 5: long frames, separators, frames that are no objects, ids, text on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.wires import (
    AGENT_WIRES,
    CLIENT_WIRES,
    begun,
    opened,
    opened_in,
    raw_agent,
    raw_client,
    reply,
)

from antiphon import Agent, LimitExceeded, Limits, StartError, Turn, extension, spawn

ODD_AGENT = str(Path(__file__).parents[1] / "cli" / "odd_agent.py")


class Echo(Agent):
    """Says what it is told, in one chunk."""

    async def prompt(self, turn: Turn) -> None:
        await turn.say(turn.text)

    @extension("_test/same")
    async def same(self, params: Any, ctx: Any) -> Any:
        return params


def prompt(session_id: str, text: str) -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


# ------------------------------------------------------------------ 1: long frames


@pytest.mark.covers("Q-01")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_half_a_megabyte_of_commands_right_after_the_session_is_one_update(wire: str) -> None:
    commands = [{"name": f"c{n}", "description": "does it"} for n in range(40)]
    body = {
        "sessionUpdate": "available_commands_update",
        "availableCommands": commands,
        "_meta": {"skills": [{"name": str(n), "text": "x" * 1000} for n in range(548)]},
    }
    async with raw_agent(wire) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        update = raw.notification("session/update", {"sessionId": "s1", "update": body})
        assert len(json.dumps(update)) > 548_000
        raw.send(reply(request, {"sessionId": "s1"}), update)
        session = await opening
        async with asyncio.timeout(10):
            async for got in session.updates():
                assert json.loads(got.raw) == body
                break


@pytest.mark.covers("Q-01")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 256 << 10, 3 << 20])
async def test_a_long_chunk_passes_unsplit_between_short_ones(wire: str, size: int) -> None:
    long = "ä" + "x" * size
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            updates = [raw.update("s1", text) for text in ("before", long, "after")]
            raw.send(*updates, reply(request, {"stopReason": "end_turn"}))
            assert [update.text async for update in turn] == ["before", long, "after"]


@pytest.mark.covers("Q-01")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_long_prompt_and_a_long_chunk_are_one_frame_each_at_the_agent(wire: str) -> None:
    text = "y" * (3 << 20)
    async with raw_client(wire, Echo()) as raw:
        session_id = await opened_in(raw)
        answer = await raw.ask("session/prompt", prompt(session_id, text))
        assert answer["result"]["stopReason"] == "end_turn"
        (update,) = raw.sent("session/update")
        assert update["params"]["update"]["content"]["text"] == text


@pytest.mark.covers("Q-01")
async def test_what_we_send_stays_under_what_others_refuse() -> None:
    """The TypeScript SDK stops at 32 MiB: by default we refuse long before, and write nothing."""
    assert Limits().frame_bytes <= 32 << 20
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(LimitExceeded):
            await session.prompt("x" * (Limits().frame_bytes + 1))
        await raw.round_trip()
        assert not raw.sent("session/prompt")


# ------------------------------------------------------------------ 2: separators

SEPARATORS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei"


@pytest.mark.covers("Q-02")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_separators_that_end_no_line_are_text(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            frame = json.dumps(raw.update("s1", SEPARATORS), ensure_ascii=False).encode()
            assert "\u2028".encode() in frame
            raw.send(frame, reply(request, {"stopReason": "end_turn"}))
            assert [update.text async for update in turn] == [SEPARATORS]


@pytest.mark.covers("Q-02")
async def test_a_client_writes_no_separator_at_which_a_peer_on_node_would_break() -> None:
    async with raw_agent("process") as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt([SEPARATORS, "漢😀—"]))
        request = await raw.wait("session/prompt")
        texts = [block["text"] for block in request["params"]["prompt"]]
        raw.answer(request, {"stopReason": "end_turn"})
        await running
        assert texts == [SEPARATORS, "漢😀—"]
        _no_separator(raw)


@pytest.mark.covers("Q-02")
async def test_an_agent_writes_none_either_wherever_text_may_stand() -> None:
    async with raw_client("pipe", Echo()) as raw:
        session_id = await opened_in(raw)
        await raw.ask("session/prompt", prompt(session_id, SEPARATORS), f"id{SEPARATORS}")
        assert await raw.ask("_test/same", {SEPARATORS: [SEPARATORS]}, "x") == {
            "jsonrpc": "2.0",
            "id": "x",
            "result": {SEPARATORS: [SEPARATORS]},
        }
        (update,) = raw.sent("session/update")
        assert update["params"]["update"]["content"]["text"] == SEPARATORS
        assert len(raw.responses(f"id{SEPARATORS}")) == 1
        _no_separator(raw)


def _no_separator(raw: Any) -> None:
    written = bytes(raw.transport.received)
    assert "\u2028".encode() not in written
    assert "\u2029".encode() not in written


# ------------------------------------------------------------------ 3: no objects

VALUES: list[Any] = [[], "x", 42, None, True, [{"method": "x"}]]
NO_OBJECTS = [b"[]", b'"x"', b"42", b"null", b"true", b'[{"jsonrpc":"2.0","method":"x"}]', b"[[]]"]


@pytest.mark.covers("Q-03")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_answers_what_is_no_object_once_and_goes_on(wire: str) -> None:
    async with raw_client(wire, Echo()) as raw:
        raw.send(*NO_OBJECTS)
        await raw.round_trip()
        codes = [frame["error"]["code"] for frame in raw.responses(None)]
        assert codes == [-32600] * len(NO_OBJECTS)
        session_id = await opened_in(raw)
        assert "result" in await raw.ask("session/prompt", prompt(session_id, "still here"))


@pytest.mark.covers("Q-03")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_does_so_in_the_middle_of_a_turn(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for n, frame in enumerate(NO_OBJECTS):
                raw.send(raw.update("s1", str(n)), frame)
            raw.send(reply(request, {"stopReason": "end_turn"}))
            got = [update.text async for update in turn]
        assert got == [str(n) for n in range(len(NO_OBJECTS))]
        await raw.round_trip()
        assert [f["error"]["code"] for f in raw.responses(None)] == [-32600] * len(NO_OBJECTS)


@pytest.mark.covers("Q-03")
async def test_every_frame_that_we_send_is_an_object() -> None:
    """Extensions are the only place where a user hands in a whole value."""
    written: list[bytes] = []

    def record(direction: str, frame: bytes) -> None:
        if direction == "out":
            written.append(frame)

    async with raw_agent("memory", record=record) as (peer, raw):
        for value in VALUES:
            asking = begun(peer.request_extension("_x/ask", value))
            raw.answer(await raw.wait("_x/ask", len(raw.sent("_x/ask")) + 1), value)
            assert await asking == value
            await peer.notify_extension("_x/tell", value)
    assert len(written) > 12
    async with raw_client("memory", Echo(), record=record) as raw:
        for value in VALUES:
            await raw.ask("_test/same", value)
        raw.send(*NO_OBJECTS)
        await raw.round_trip()
    assert len(written) > 24
    assert all(isinstance(json.loads(frame), dict) for frame in written)


# ------------------------------------------------------------------ 4: envelopes and ids


@pytest.mark.covers("Q-04", "Q-06")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_error_about_nothing_of_ours_is_met_with_silence_by_a_client(wire: str) -> None:
    errors = [
        b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}',
        b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"Parse error"}}',
        b'{"jsonrpc":"2.0","error":{"code":-32601,"message":"Method not found"}}',
        b'{"error":{"code":-32600,"message":"Invalid request"},"id":null}',
        b'{"jsonrpc":"2.0","id":999,"error":{"code":-32603,"message":"no such call"}}',
    ]
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            before = len(raw.frames)
            raw.send(*errors, raw.update("s1", "a"), reply(request, {"stopReason": "end_turn"}))
            assert [update.text async for update in turn] == ["a"]
        await raw.round_trip()
        assert len(raw.frames) == before + 1  # the answer to the round trip alone


@pytest.mark.covers("Q-04")
@pytest.mark.parametrize(
    "order",
    [
        ("jsonrpc", "result", "id"),
        ("id", "result", "jsonrpc"),
        ("result", "jsonrpc", "id"),
        ("result", "id"),
        ("id", "jsonrpc", "result"),
    ],
)
async def test_members_of_an_answer_come_in_any_order(order: tuple[str, ...]) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        for content in ("short", "x" * 100_000):
            running = begun(session.prompt(content))
            request = await raw.wait("session/prompt", len(raw.sent("session/prompt")) + 1)
            whole = reply(request, {"stopReason": "end_turn", "_meta": {"text": content}})
            raw.send({name: whole[name] for name in order})
            assert (await running).stop_reason == "end_turn"


@pytest.mark.covers("Q-04")
@pytest.mark.parametrize(
    "order",
    [
        ("method", "params", "id", "jsonrpc"),
        ("params", "id", "jsonrpc", "method"),
        ("id", "params", "method"),
        ("jsonrpc", "params", "method", "id"),
    ],
)
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_members_of_a_request_come_in_any_order(wire: str, order: tuple[str, ...]) -> None:
    async with raw_client(wire, Echo()) as raw:
        request = raw.request(7, "session/new", {"mcpServers": [], "cwd": "/"})
        raw.send({name: request[name] for name in order})
        assert "sessionId" in (await raw.answer_to(7))["result"]


IDS: list[Any] = [0, 1, 2, "0", "srv_01", "3f1c0e9a-9d7e-4d4c-8a55-6a8d3d9b4c11", "", "ä\u2028"]


@pytest.mark.covers("Q-04")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_echoes_every_kind_of_id_also_those_that_it_uses_itself(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            ids = [*IDS, request["id"]]  # open in the other direction at this moment
            raw.send(*(raw.request(id_, "fs/read_text_file", {"sessionId": "s1"}) for id_ in ids))
            for id_ in ids:
                assert (await raw.answer_to(id_))["error"]["code"] == -32601
            raw.answer(request, {"stopReason": "end_turn"})
            assert [update async for update in turn] == []
        assert turn.stop_reason == "end_turn"
        for id_ in IDS:
            assert len(raw.responses(id_)) == (2 if id_ == request["id"] else 1)


@pytest.mark.covers("Q-04")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_does_so_too(wire: str) -> None:
    async with raw_client(wire, Echo()) as raw:
        for id_ in IDS:
            raw.send(raw.request(id_, "session/new", {"cwd": "/", "mcpServers": []}))
        sessions = {(await raw.answer_to(id_))["result"]["sessionId"] for id_ in IDS}
        assert len(sessions) == len(IDS)
        assert all(len(raw.responses(id_)) == 1 for id_ in IDS)


# ------------------------------------------------------------------ 5: text on stdout


@pytest.mark.covers("Q-05")
async def test_a_sentence_in_place_of_the_protocol_is_told_at_once() -> None:
    with pytest.raises(StartError) as failed:
        await spawn([sys.executable, ODD_AGENT, "banner_and_exits"])
    assert "please log in first" in str(failed.value)
    assert failed.value.exit_status == 0


@pytest.mark.covers("Q-05")
async def test_text_between_frames_and_a_noisy_standard_error_cost_nothing() -> None:
    async with raw_agent("process", None, {}, "noisy") as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            noise = [b"INFO starting", b"\x1b[32mok\x1b[0m", b"", b"Traceback: none", "漢".encode()]
            for n, line in enumerate(noise):
                raw.send(raw.update("s1", str(n)), line)
            raw.send(reply(request, {"stopReason": "end_turn"}))
            assert [update.text async for update in turn] == ["0", "1", "2", "3", "4"]
        before = len(raw.frames)
        await raw.round_trip()
        assert len(raw.frames) == before + 1  # noise is not answered
        assert "DEBUG" in peer.process.stderr_tail
