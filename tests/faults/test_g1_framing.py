"""Field faults 01 to 07: long lines, broken characters, poison lines, text that cannot be written."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import antiphon, odd
from tests.faults.wires import (
    AGENT_WIRES,
    CLIENT_WIRES,
    END,
    begun,
    opened,
    opened_in,
    raw_agent,
    raw_client,
    reply,
    unshaken_agent,
    unshaken_client,
)

from antiphon import Agent, Client, LimitExceeded, Limits, RequestError, Turn, connect, extension
from antiphon.core import LineFramer, Protocol
from antiphon.schema import decode_params, json_depth_exceeds, v1
from antiphon.services import Terminals
from antiphon.testing import joined
from antiphon.transports import ProcessTransport

MIB = 1 << 20


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(turn.text)

    @extension("_test/same")
    async def same(self, params: Any, ctx: Any) -> Any:
        return params


class Reader(Agent):
    """Reads a file and says how long it was, or what came instead."""

    async def prompt(self, turn: Turn) -> None:
        for path in ("/big", "/small"):
            try:
                await turn.say(str(len(await turn.read_text_file(path))))
            except (RequestError, LimitExceeded) as error:
                await turn.say(type(error).__name__)


def prompt(session_id: str, text: str = "go") -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


def texts(raw: Any) -> list[str]:
    return [f["params"]["update"]["content"]["text"] for f in raw.sent("session/update")]


# ------------------------------------------------------------------ 01

SIZES = [65_500, 65_535, 65_536, 65_537, MIB, 15 * MIB]


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("late", [False, True])
async def test_a_long_answer_reaches_a_client_also_if_its_end_comes_later(
    wire: str, size: int, late: bool
) -> None:
    async with raw_agent(wire) as (peer, raw):
        asking = begun(peer.request_extension("_x/long"))
        request = await raw.wait("_x/long")
        answer = reply(request, {"content": "x" * size})
        if late and wire == "process":
            raw.send_bytes(json.dumps(answer).encode())
            await asyncio.sleep(0.02)  # let it arrive without its end
            assert not asking.done()
            raw.send_bytes(b"\n")
        else:
            raw.send(answer)
        assert len((await asking)["content"]) == size
        await raw.round_trip()


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("size", SIZES)
async def test_a_long_answer_reaches_an_agent(wire: str, size: int) -> None:
    async with raw_client(wire, Reader(), {"fs": {"readTextFile": True}}) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        raw.answer(await raw.wait("fs/read_text_file"), {"content": "x" * size})
        raw.answer(await raw.wait("fs/read_text_file", 2), {"content": "small"})
        await raw.answer_to(3)
        assert texts(raw) == [str(size), "5"]


TINY = Limits(frame_bytes=100_000)


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("size", [100_000, 200_000, 20 * MIB])
@pytest.mark.parametrize("id_first", [True, False])
async def test_an_over_long_answer_fails_its_call_alone(
    wire: str, size: int, id_first: bool
) -> None:
    async with raw_agent(wire, limits=TINY) as (peer, raw):
        if wire == "memory" and size > MIB:
            return  # frames are handed over whole: nothing new
        first = begun(peer.request_extension("_x/long"))
        second = begun(peer.request_extension("_x/other"))
        long, other = await raw.wait("_x/long"), await raw.wait("_x/other")
        head = {"jsonrpc": "2.0"} | ({"id": long["id"]} if id_first else {})
        answer = head | {"result": {"content": "x" * size}} | {"id": long["id"]}
        raw.send(answer, reply(other, "good"))
        assert await second == "good"
        if wire == "process":
            with pytest.raises(LimitExceeded, match="frame_bytes"):
                await first
            await raw.round_trip()
        else:
            raw.answer(long, 1)  # memory has no framer: the frame passes
            assert (await first) is not None


@pytest.mark.covers("FF-01")
async def test_an_over_long_request_is_refused_by_its_id_and_an_update_is_said_to_be_lost() -> None:
    async with raw_agent("process", limits=TINY) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            params = {"sessionId": "s1", "path": "/x", "content": "y" * 200_000}
            raw.send(
                raw.update("s1", "before"),
                raw.request("long", "fs/write_text_file", params),
                raw.update("s1", "z" * 200_000),
                raw.update("s1", "after"),
                reply(request, END),
            )
            assert [u.text async for u in turn] == ["before", "after"]
        refused = await raw.answer_to("long")
        assert refused["error"]["code"] == -32600
        assert refused["error"]["data"]["limit"] == 100_000
        await raw.round_trip()
        (lost,) = raw.responses(None)
        assert lost["error"]["data"] == {"reason": "frame_too_large", "limit": 100_000}


class Verbose(Agent):
    async def prompt(self, turn: Turn) -> None:
        for size in (200_000, 5):
            try:
                await turn.say("x" * size)
            except LimitExceeded as error:
                await turn.say(error.limit)
        async with turn.tool("big") as tool:
            with pytest.raises(LimitExceeded):
                await tool.add("y" * 200_000)

    @extension("_test/long")
    async def long(self, params: Any, ctx: Any) -> Any:
        return "x" * 200_000


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_refuses_to_send_what_is_too_long_and_writes_no_byte_of_it(
    wire: str,
) -> None:
    async with raw_client(wire, Verbose(), limits=TINY) as raw:
        session_id = await opened_in(raw)
        answer = await raw.ask("session/prompt", prompt(session_id))
        assert answer["result"] == END
        said = raw.sent("session/update")
        assert [u["params"]["update"].get("content") for u in said[:2]] == [
            {"type": "text", "text": "frame_bytes"},
            {"type": "text", "text": "xxxxx"},
        ]
        assert said[-1]["params"]["update"]["status"] == "completed"
        refused = await raw.ask("_test/long", None)
        assert refused["error"]["data"]["limit"] == 100_000
        assert all(len(frame) <= 100_000 for frame in raw.raw_frames)


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_does_so_too(wire: str) -> None:
    async with raw_agent(wire, limits=TINY) as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(LimitExceeded):
            await session.prompt("x" * 100_000)
        with pytest.raises(LimitExceeded):
            await peer.request_extension("_x/y", "x" * 100_000)
        with pytest.raises(LimitExceeded):
            await peer.notify_extension("_x/z", "x" * 100_000)
        running = begun(session.prompt("x" * 90_000))
        raw.answer(await raw.wait("session/prompt"), END)
        assert (await running).stop_reason == "end_turn"
        assert not raw.sent("_x/y")
        assert not raw.sent("_x/z")


# ------------------------------------------------------------------ 02


def spent(size: int) -> float:
    """CPU time of a prompt with an image of so much base64, cut into 4 KiB chunks."""
    block = '{"type":"image","mimeType":"image/png","data":"' + "A" * size + '"}'
    head = '{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":{"sessionId":"s","prompt":['
    data = (head + block + "]}}\n").encode()
    chunks = [data[n : n + 4096] for n in range(0, len(data), 4096)]
    best = 1e9
    for _ in range(3):
        framer = LineFramer(64 * MIB)
        protocol = Protocol("agent", Limits(frame_bytes=64 * MIB), json_depth_exceeds)
        begin = time.process_time()
        frames = [frame for chunk in chunks for frame in framer.feed(chunk)]
        event: Any = protocol.receive_frame(frames[0])  # type: ignore[arg-type]
        params = decode_params(v1.PromptRequest, event.params)
        best = min(best, time.process_time() - begin)
        assert len(params.prompt[0].data) == size  # type: ignore[union-attr]
    return best


@pytest.mark.covers("FF-02")
def test_twice_the_image_costs_about_twice_the_time() -> None:
    assert spent(24 * MIB) < 3.2 * spent(12 * MIB) + 0.01


@pytest.mark.covers("FF-02")
async def test_the_loop_runs_on_while_a_long_frame_trickles_in() -> None:
    async with raw_client("pipe", Echo(), limits=Limits(frame_bytes=64 * MIB)) as raw:
        session_id = await opened_in(raw)
        data = json.dumps(raw.request(3, "session/prompt", prompt(session_id, "x" * (12 * MIB))))
        frame = data.encode() + b"\n"
        done = asyncio.Event()
        worst = 0.0

        async def tick() -> None:
            nonlocal worst
            while not done.is_set():
                begin = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - begin - 0.01)

        ticking = asyncio.ensure_future(tick())
        for n in range(0, len(frame), 64 * 1024):
            raw.send_bytes(frame[n : n + 64 * 1024])
            await asyncio.sleep(0)
        assert (await raw.answer_to(3))["result"] == END
        done.set()
        await ticking
        assert worst < 1.0


# ------------------------------------------------------------------ 03

LETTERS = "€漢😀é"


@pytest.mark.covers("FF-03")
async def test_an_answer_and_an_update_byte_by_byte_keep_their_characters() -> None:
    async with raw_agent("process") as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            frame = json.dumps(raw.update("s1", LETTERS), ensure_ascii=False).encode() + b"\n"
            for n in range(len(frame)):
                raw.send_bytes(frame[n : n + 1])
                await asyncio.sleep(0)
            raw.answer(request, END)
            assert [u.text async for u in turn] == [LETTERS]


@pytest.mark.covers("FF-03")
async def test_a_prompt_cut_anywhere_keeps_its_characters() -> None:
    async with raw_client("pipe", Echo()) as raw:
        session_id = await opened_in(raw)
        for cut in range(1, 12):
            message = raw.request(cut, "session/prompt", prompt(session_id, LETTERS))
            frame = json.dumps(message, ensure_ascii=False).encode() + b"\n"
            at = frame.index("€".encode()) + cut
            raw.send_bytes(frame[:at])
            await asyncio.sleep(0.002)
            raw.send_bytes(frame[at:])
            await raw.answer_to(cut)
        assert texts(raw) == [LETTERS] * 11


WRITER = """
import os, sys, time
for byte in b'%s':
    os.write(%d, bytes([byte])); time.sleep(0.003)
"""


def writer(data: bytes, fd: int) -> str:
    literal = "".join(f"\\x{byte:02x}" for byte in data)
    return WRITER % (literal, fd)


@pytest.mark.covers("FF-03")
@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (LETTERS.encode(), LETTERS),
        ("a€".encode()[:-1], "a\ufffd"),  # ends in the middle of a character
        (b"\xff\xe2\x82", "\ufffd\ufffd"),
    ],
)
async def test_a_terminal_polled_meanwhile_never_shows_half_a_character(
    data: bytes, shown: str, tmp_path: Path
) -> None:
    async with raw_agent("memory", Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        command = {"command": sys.executable, "args": ["-S", "-c", writer(data, 1)]}
        made = await raw.ask("terminal/create", {"sessionId": "s1", **command})
        told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
        raw.send(raw.request("wait", "terminal/wait_for_exit", told))
        seen: list[str] = []
        while not raw.responses("wait"):
            seen += [(await raw.ask("terminal/output", told))["result"]["output"]]
            await asyncio.sleep(0.001)
        last = (await raw.ask("terminal/output", told))["result"]["output"]
        # What has no end yet may be held back until everybody has let go of the pipe.
        assert shown.startswith(last)
        assert len(shown) - len(last) <= 1
        assert all(shown.startswith(output) for output in seen)
        await raw.ask("terminal/release", told)


@pytest.mark.covers("FF-03")
async def test_standard_error_is_shown_in_whole_characters() -> None:
    lines: list[str] = []
    code = writer(f"{LETTERS}\nend€".encode()[:-1], 2)
    transport = ProcessTransport([sys.executable, "-S", "-c", code], stderr=lines.append)
    with pytest.raises(Exception, match="ended") as failed:
        await connect(transport)
    assert lines == [LETTERS, "end\ufffd"]
    assert LETTERS in str(failed.value)


# ------------------------------------------------------------------ 05


@pytest.mark.covers("FF-05")
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_a_mark_and_windows_line_ends_cost_an_agent_nothing(mark: bytes, end: bytes) -> None:
    hello = b'{"id":0,"method":"initialize","params":{"protocolVersion":1}}'
    more = b'{"id":1,"method":"session/new","params":{"cwd":"/","mcpServers":[]}}'
    async with unshaken_client("pipe", Echo()) as raw:
        raw.send_bytes(mark + hello + end + end + more + end)
        assert "result" in await raw.answer_to(0)
        assert "result" in await raw.answer_to(1)
        assert not raw.transport.received.startswith(b"\xef\xbb\xbf")  # type: ignore[attr-defined]
        assert b"\r" not in raw.transport.received  # type: ignore[attr-defined]


@pytest.mark.covers("FF-05")
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_nor_a_client(mark: bytes) -> None:
    async with unshaken_agent("process") as (raw, opening):
        request = await raw.wait("initialize")
        answer = json.dumps(reply(request, {"protocolVersion": 1})).encode()
        raw.send_bytes(mark + answer + b"\r\n")
        peer = await opening
        raw.send_bytes(b"\r\n\r\n")
        assert (await opened(peer, raw)).session_id == "s1"


@pytest.mark.covers("FF-05")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_another_encoding_is_no_json_and_no_guess(encoding: str) -> None:
    hello = '{"id":0,"method":"initialize","params":{"protocolVersion":1}}'
    async with unshaken_client("pipe", Echo()) as raw:
        raw.send_bytes(hello.encode(encoding) + b"\n")
        answer = await raw.answer_to(None)
        assert answer["error"]["code"] == -32700
        assert "result" in await raw.ask("initialize", {"protocolVersion": 1})
        assert not raw.responses(0)


@pytest.mark.covers("FF-05")
def test_an_agent_writes_utf_8_and_bare_line_ends_whatever_the_locale() -> None:
    frames = [
        {"id": 0, "method": "initialize", "params": {"protocolVersion": 1}},
        {"id": 1, "method": "_test/same", "params": "漢\u00e9😀"},
    ]
    data = "".join(json.dumps(f, ensure_ascii=False) + "\r\n" for f in frames).encode()
    env = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", "run", "agent:agent"],
        cwd=Path(__file__).parent,
        input=data,
        env={**os.environ, **env},
        capture_output=True,
        timeout=20,
    )
    lines = done.stdout.split(b"\n")
    assert lines.pop() == b""
    assert json.loads(lines[1])["result"] == "漢\u00e9😀"
    assert "漢".encode() in lines[1]
    assert not any(line.endswith(b"\r") or line.startswith(b"\xef") for line in lines)


# ------------------------------------------------------------------ 06

POISON: list[tuple[bytes, int | None, Any]] = [
    (b"[" * 100_000, -32700, None),
    (b'{"id":2,"method":"_x/y","params":' + b"[" * 50_000 + b"]" * 50_000 + b"}", -32600, 2),
    (b'{"id":2,"x":' + b"9" * 5000 + b"}", -32600, 2),
    (b"null", -32600, None),
    (b"42", -32600, None),
    (b'"x"', -32600, None),
    (b'[{"id":3,"method":"initialize"}]', -32600, None),
    (b'{"id":4}', -32600, 4),
    (b'{"id":5,"method":7}', -32600, 5),
    (b'{"id":{},"method":"x"}', -32600, None),
    (b'{"id":[1],"method":"x"}', -32600, None),
    (b'{"id":1e400,"method":"x"}', -32600, None),
    (b'{"jsonrpc":2,"id":6,"method":"x"}', -32600, 6),
    (b'{"id":6,"result":1,"error":{}}', None, None),
    (b'{"id":6,"error":null}', None, None),
    (b'{"id":6,"error":"text"}', None, None),
    (b'{"method":"session/update","params":[]}', None, None),
    (b'{"method":"session/cancel","params":{"sessionId":{}}}', None, None),
    (b'{"method":"$/cancel_request","params":{"requestId":{}}}', None, None),
]
#: What a client takes for somebody's print and does not answer.
NO_OBJECT_AT_ALL: list[bytes] = [b"\xff\xfe", b"\x00", b"NaN", b"tru", b"\xef\xbb\xbf{}", b"'a'"]


@pytest.mark.covers("FF-06")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("case", range(len(POISON)))
async def test_a_poison_line_gets_its_one_answer_and_the_next_request_is_served(
    wire: str, case: int
) -> None:
    line, code, id_ = POISON[case]
    async with raw_client(wire, Echo()) as raw:
        raw.send(line, raw.request(9, "_test/same", "alive"))
        assert (await raw.answer_to(9))["result"] == "alive"
        got = [f for f in raw.frames if f.get("id") not in (9, "hello")]
        assert [(f["error"]["code"], f["id"]) for f in got] == (
            [] if code is None else [(code, id_)]
        )


@pytest.mark.covers("FF-06")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_all_of_them_in_one_turn_cost_a_client_nothing(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for n, (line, _, _) in enumerate(POISON):
                raw.send(line, raw.update("s1", str(n)))
            raw.send(*NO_OBJECT_AT_ALL, reply(request, END))
            got = [u.text async for u in turn]
        assert got == [str(n) for n in range(len(POISON))]
        await raw.round_trip()
        answered = [(f["error"]["code"], f["id"]) for f in raw.sent(None) if f["id"] != "ask-1"]
        assert answered == [(code, id_) for _, code, id_ in POISON if code is not None]


@pytest.mark.covers("FF-06")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_says_of_what_is_no_json_that_it_is_none(wire: str) -> None:
    lines = [*NO_OBJECT_AT_ALL, b"{", b'{"id":1,', b'{"id":1,"method":"x"}}', b"{'id':1}"]
    async with raw_client(wire, Echo()) as raw:
        raw.send(*lines)
        await raw.round_trip()
        codes = [f["error"]["code"] for f in raw.responses(None)]
        # One that begins with a mark is JSON to those who skip it, and none to us.
        assert codes == [-32700] * len(lines)


@pytest.mark.covers("FF-06")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    "answer",
    [
        {"error": "text"},
        {"error": {"code": "x", "message": 5}},
        {"error": {}},
        {"error": []},
        {"jsonrpc": "1.0", "result": {}},
    ],
    ids=json.dumps,
)
async def test_a_malformed_answer_fails_its_caller_and_nobody_else(
    wire: str, answer: dict[str, Any]
) -> None:
    async with raw_agent(wire) as (peer, raw):
        first = begun(peer.request_extension("_x/a"))
        second = begun(peer.request_extension("_x/b"))
        one, two = await raw.wait("_x/a"), await raw.wait("_x/b")
        raw.send({"jsonrpc": "2.0", "id": one["id"], **answer}, reply(two, 2))
        assert await second == 2
        with pytest.raises(Exception, match=r"malformed"):
            await first
        before = len(raw.frames)
        await raw.round_trip()
        assert len(raw.frames) == before + 1  # a response is never answered


@pytest.mark.covers("FF-06")
async def test_two_of_our_own_sides_never_play_ping_pong_with_errors() -> None:
    frames: list[bytes] = []

    def record(direction: str, frame: bytes) -> None:
        frames.append(frame)

    async with joined(Echo(), record=record) as peer:
        before = len(frames)
        for line in (b"{bad", b"[]", b"42", b'{"id":4}', b'{"id":1,"error":5}'):
            peer.transport.send([line])
        assert await peer.request_extension("_test/same", 1) == 1
        # One answer at most for each, and the two frames of the request.
        assert len(frames) - before <= 4 + 2


# ------------------------------------------------------------------ 07


class Odd(Agent):
    """Sends what Python holds and the wire does not."""

    async def prompt(self, turn: Turn) -> None:
        bad = "ok \ud83d"
        await turn.say(bad)
        await turn.think(bad)
        await turn.plan([bad])
        async with turn.tool(bad, raw_input={bad: [bad]}, locations=[(bad, 1)]) as tool:
            with pytest.raises(ValueError, match="NaN"):
                await tool.update(raw_output=float("nan"))
            with pytest.raises(ValueError, match="NaN"):
                await tool.update(raw_output={"a": [float("inf")]})
            await tool.update(raw_output={bad: bad})
            await turn.ask_permission(tool)
        with pytest.raises(FileNotFoundError):
            await turn.read_text_file("/" + os.fsdecode(b"\xff.txt"))
        await turn.session.info(title=bad)

    @extension("_test/fails")
    async def fails(self, params: Any, ctx: Any) -> Any:
        raise RequestError(5, "bad \udc80", {"\udc80": "\ud800"})


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_text_that_no_wire_can_carry_costs_no_frame_and_no_connection(wire: str) -> None:
    async with raw_client(wire, Odd(), {"fs": {"readTextFile": True}}) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        raw.answer(await raw.wait("session/request_permission"), {"outcome": {"outcome": "x"}})
        reading = await raw.wait("fs/read_text_file")
        assert reading["params"]["path"] == "/\ufffd.txt"
        raw.refuse(reading, -32002)
        assert (await raw.answer_to(3))["result"] == END
        updates = [f["params"]["update"] for f in raw.sent("session/update")]
        assert updates[0]["content"]["text"] == "ok \ufffd"
        assert updates[1]["content"]["text"] == "ok \ufffd"
        assert updates[2]["entries"][0]["content"] == "ok \ufffd"
        assert updates[3]["rawInput"] == {"ok \ufffd": ["ok \ufffd"]}
        assert updates[4]["rawOutput"] == {"ok \ufffd": "ok \ufffd"}
        assert updates[-1]["title"] == "ok \ufffd"
        error = (await raw.ask("_test/fails", None))["error"]
        assert (error["message"], error["data"]) == ("bad \ufffd", {"\ufffd": "\ufffd"})
        for frame in raw.raw_frames:
            frame.decode("utf-8")
            assert b"NaN" not in frame


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_repairs_what_it_sends_and_what_it_is_sent(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(ValueError, match="NaN"):
            await peer.request_extension("_x/y", {"a": float("nan")})
        async with session.prompt("go \udcff") as turn:
            request = await raw.wait("session/prompt")
            assert request["params"]["prompt"][0]["text"] == "go \ufffd"
            frame = json.dumps(raw.update("s1", "a\ud800b")).encode()
            assert b"\\ud800" in frame
            raw.send(frame, frame.replace(b"\\ud800", b"\xed\xa0\x80"), reply(request, END))
            got = [u.text async for u in turn]
        assert got[0] == "a\ufffdb"
        assert got[1].startswith("a\ufffd")
        assert got[1].endswith("b")
        text = got[0].encode()  # can be written, logged, shown
        assert text


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_what_came_broken_can_be_sent_back(wire: str) -> None:
    async with raw_client(wire, Echo()) as raw:
        raw.send(b'{"id":1,"method":"_test/same","params":{"\\ud800":"\\udfff","a":"\xff"}}')
        answer = await raw.answer_to(1)
        assert answer["result"] == {"\ufffd": "\ufffd", "a": "\ufffd"}


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_the_command_prints_any_text_on_any_output(encoding: str) -> None:
    env = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    ran = antiphon("prompt", "--agent", odd("chatty"), "--json", "go", env=env)
    assert ran.code == 0, ran.err
    agent = "env PYTHONIOENCODING=utf-8 " + odd("echo")  # whose own text is its own affair
    ran = antiphon("prompt", "--agent", agent, "漢 😀 \u2028 €", env=env)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err


@pytest.mark.covers("FF-07")
async def test_what_json_cannot_say_is_refused_at_the_call_and_leaves_its_session_free() -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        for wrong in (float("nan"), [float("-inf")], object(), {"a": {1, 2.0, float("nan")}}):
            with pytest.raises((TypeError, ValueError)):
                await session.prompt("go", meta={"x": wrong})
            with pytest.raises((TypeError, ValueError)):
                await peer.new_session(cwd="/", meta={"x": wrong})
        assert session.turn is None
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), END)
        assert (await running).stop_reason == "end_turn"
        await raw.round_trip()
        assert len(raw.sent("session/new")) == 1
        assert len(raw.sent("session/prompt")) == 1


class Unsayable(Agent):
    @extension("_test/value")
    async def value(self, params: Any, ctx: Any) -> Any:
        deep: Any = []
        for _ in range(100_000):
            deep = [deep]
        circle: list[Any] = []
        circle.append(circle)
        values = {"nan": float("nan"), "object": object(), "deep": deep, "circle": circle}
        return {"a": values[params]}


@pytest.mark.covers("FF-07")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_result_that_json_cannot_say_is_an_internal_error_of_its_own_request(
    wire: str,
) -> None:
    async with raw_client(wire, Unsayable()) as raw:
        for value in ("nan", "object", "deep", "circle"):
            answer = await raw.ask("_test/value", value)
            assert answer["error"] == {"code": -32603, "message": "Internal error"}
        await opened_in(raw)
