"""Field faults 08 to 10: stray output, children that read, standard streams of every kind."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
import tty
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.faults.test_g1_framing import Echo
from tests.faults.wires import (
    END,
    begun,
    opened,
    raw_agent,
    raw_client,
    reply,
    unshaken_agent,
)

from antiphon import Limits, StartError, spawn

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
#: The two ways to start an agent; only the command comes before what is printed at import.
STARTS = {
    "command": [sys.executable, "-m", "antiphon", "run", "agent:agent"],
    "script": [sys.executable, "agent.py", "late"],
}


def frames() -> bytes:
    """A handshake and three requests."""
    messages: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": {"protocolVersion": 1}},
        *({"id": n, "method": "_test/same", "params": n} for n in range(1, 4)),
    ]
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def objects(data: bytes) -> list[dict[str, Any]]:
    """Every line, which must be a whole frame."""
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


# ------------------------------------------------------------------ 08, the agent's side


@pytest.mark.covers("FF-08")
@pytest.mark.parametrize("start", STARTS)
async def test_whatever_an_agent_prints_its_client_sees_frames_alone(start: str) -> None:
    noise: list[bytes] = []

    def record(direction: str, frame: bytes) -> None:
        if direction == "in":
            noise.append(frame)

    async with spawn(STARTS[start], cwd=HERE, record=record) as peer:
        session = await peer.new_session(cwd="/")
        for _ in range(3):
            outcome = await session.prompt("print everything")
            assert outcome.text == "print everything"
        assert peer.connection.noise == b""
        assert "hi" in peer.process.stderr_tail
        assert "logged" in peer.process.stderr_tail or start == "script"
    for frame in noise:
        assert isinstance(json.loads(frame), dict)


@pytest.mark.covers("FF-08")
@pytest.mark.parametrize("start", STARTS)
def test_nothing_printed_reaches_standard_output_before_during_or_after(start: str) -> None:
    done = subprocess.run(STARTS[start], cwd=HERE, input=frames(), capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert [message["id"] for message in objects(done.stdout)] == [0, 1, 2, 3]


# ------------------------------------------------------------------ 08, the client's side

NOISE: dict[str, bytes] = {
    "banner": b"Welcome user\n",
    "blank lines": b"\n\r\n\n",
    "control": b"\x1b]0;title\x07\x1b[2J\n",
    "login": b"Last login: Mon Nov 30\nYou have mail.\n",
    "200 KiB": b"#" * 200 * 1024 + b"\n",
    "log": b"[INFO] ready {\n[1, 2]: x\n",
    "binary": bytes(range(1, 10)) + bytes(range(128, 256)) + b"\n",
}


@pytest.mark.covers("FF-08")
@pytest.mark.parametrize("noise", NOISE)
async def test_noise_before_between_and_after_frames_is_skipped(noise: str) -> None:
    data = NOISE[noise]
    async with unshaken_agent("process") as (raw, opening):
        request = await raw.wait("initialize")
        raw.send_bytes(data)
        raw.answer(request, {"protocolVersion": 1})
        raw.send_bytes(data)
        peer = await opening
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for n in range(5):
                raw.send_bytes(data)
                raw.send(raw.update("s1", str(n)))
            raw.send(reply(request, END))
            assert [u.text async for u in turn] == ["0", "1", "2", "3", "4"]
        assert len(peer.connection.noise) <= 4096
        answered = [f for f in raw.sent(None) if f["id"] is None]
        assert answered == []  # and none of it is answered


@pytest.mark.covers("FF-08")
async def test_a_frame_that_noise_is_glued_to_is_lost_and_the_text_says_what_was_written() -> None:
    """Nothing is recovered by guessing; the handshake's deadline tells."""
    async with unshaken_agent("process", limits=Limits(startup_timeout=0.4)) as (raw, opening):
        request = await raw.wait("initialize")
        answer = json.dumps(reply(request, {"protocolVersion": 1})).encode()
        raw.send_bytes(b"\x1b]0;zsh\x07" + answer + b"\n")
        with pytest.raises(StartError) as failed:
            await opening
    assert failed.value.timed_out
    assert "zsh" in str(failed.value)


@pytest.mark.covers("FF-08")
async def test_endless_noise_without_a_line_end_is_bounded_and_told() -> None:
    limits = Limits(startup_timeout=1.0, frame_bytes=100_000)
    async with unshaken_agent("process", limits=limits) as (raw, opening):
        await raw.wait("initialize")
        for _ in range(100):
            raw.send_bytes(b"no protocol here " * 1000)
            await asyncio.sleep(0)
        with pytest.raises(StartError) as failed:
            await opening
    assert failed.value.timed_out
    assert len(str(failed.value)) < 2000


@pytest.mark.covers("FF-08")
async def test_an_agent_that_prints_its_help_and_ends_is_quoted() -> None:
    code = "print('usage: agent --acp')"
    begin = time.monotonic()
    with pytest.raises(StartError, match="usage: agent --acp"):
        await spawn([sys.executable, "-S", "-c", code])
    assert time.monotonic() - begin < 5


# ------------------------------------------------------------------ 09

CHILDREN = [
    "head -n1",
    "cat",
    "sh -c cat",
    f"{sys.executable} -S -c input()",
    "git hash-object --stdin",
]


@pytest.mark.covers("FF-09")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_reads_gets_none_of_the_frames_behind_its_prompt(
    start: str, child: str
) -> None:
    with subprocess.Popen(
        STARTS[start],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        hello = {"id": 0, "method": "initialize", "params": {"protocolVersion": 1}}
        new: dict[str, Any] = {
            "id": 1,
            "method": "session/new",
            "params": {"cwd": "/", "mcpServers": []},
        }
        process.stdin.write(json.dumps(hello).encode() + b"\n" + json.dumps(new).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        session_id = json.loads(process.stdout.readline())["result"]["sessionId"]
        text = [{"type": "text", "text": f"child {child}"}]
        prompt = {"sessionId": session_id, "prompt": text}
        messages = [{"id": 2, "method": "session/prompt", "params": prompt}]
        messages += [{"id": n, "method": "_test/same", "params": {"n": n}} for n in range(3, 9)]
        out, _ = process.communicate(
            b"".join(json.dumps(message).encode() + b"\n" for message in messages), timeout=20
        )
    assert {m["id"] for m in objects(out) if "id" in m} == set(range(2, 9))
    assert process.returncode == 0


# ------------------------------------------------------------------ 10


def from_file(folder: Path) -> tuple[bytes, int]:
    (folder / "in").write_bytes(frames())
    with (folder / "in").open("rb") as given, (folder / "out").open("wb") as out:
        done = subprocess.run(STARTS["command"], cwd=HERE, stdin=given, stdout=out, timeout=20)
    return (folder / "out").read_bytes(), done.returncode


def two_to_one(folder: Path) -> tuple[bytes, int]:
    done = subprocess.run(
        STARTS["command"],
        cwd=HERE,
        input=frames(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=20,
    )
    return done.stdout, done.returncode


def appended(folder: Path) -> tuple[bytes, int]:
    with (folder / "out").open("ab") as out:
        done = subprocess.run(
            STARTS["command"], cwd=HERE, input=frames(), stdout=out, stderr=out, timeout=20
        )
    return (folder / "out").read_bytes(), done.returncode


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("how", [from_file, two_to_one, appended])
def test_an_agent_works_on_files_and_with_both_outputs_joined(
    how: Callable[[Path], tuple[bytes, int]], tmp_path: Path
) -> None:
    out, code = how(tmp_path)
    assert code == 0
    assert [message["id"] for message in objects(out)] == [0, 1, 2, 3]


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("start", STARTS)
def test_the_null_device_is_an_input_that_has_ended(start: str) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        STARTS[start], cwd=HERE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=20
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert time.monotonic() - begin < 10


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_end_an_agent_in_order(closed: str) -> None:
    line = f'exec "$0" -m antiphon run agent:agent {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", line, sys.executable],
        cwd=HERE,
        input=frames(),
        capture_output=True,
        timeout=20,
    )
    assert done.returncode in (0, 1)
    assert b"Traceback" not in done.stderr
    if closed == "2>&-":
        assert [message["id"] for message in objects(done.stdout)] == [0, 1, 2, 3]


@pytest.mark.covers("FF-10")
def test_an_agent_on_a_terminal_speaks_like_any_other() -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    with subprocess.Popen(STARTS["command"], cwd=HERE, stdin=slave, stdout=slave) as process:
        os.close(slave)
        os.write(master, frames())
        data = b""
        while data.count(b"\n") < 4:
            ready, _, _ = select.select([master], [], [], 20)
            assert ready, data
            data += os.read(master, 65_536)
        process.terminate()
        process.wait(20)
    os.close(master)
    assert [message["id"] for message in objects(data)] == [0, 1, 2, 3]


@pytest.mark.covers("FF-10")
def test_nothing_else_that_shares_the_streams_becomes_non_blocking(tmp_path: Path) -> None:
    line = (
        'python="$0"; "$python" -m antiphon run agent:agent; '
        '"$python" -c "import os; print([os.get_blocking(n) for n in range(3)])" >&2'
    )
    done = subprocess.run(
        ["/bin/sh", "-c", line, sys.executable],
        cwd=HERE,
        input=frames(),
        capture_output=True,
        timeout=20,
    )
    assert done.stderr.splitlines()[-1] == b"[True, True, True]"
    assert len(objects(done.stdout)) == 4


@pytest.mark.covers("FF-10")
async def test_a_client_that_reads_slowly_delays_only_what_is_written() -> None:
    """A reply of a mebibyte waits for room, and what is asked meanwhile is read and handled."""
    async with raw_client("pipe", Echo()) as raw:
        raw.transport.pause_reading()
        raw.send(raw.request(1, "_test/same", "x" * (1 << 20)))
        for n in range(2, 20):
            raw.send(raw.request(n, "_test/same", n))
        await asyncio.sleep(0.3)
        assert len(raw.frames) == 1  # the handshake's
        raw.transport.resume_reading()
        for n in range(2, 20):
            assert (await raw.answer_to(n))["result"] == n
        assert len((await raw.answer_to(1))["result"]) == 1 << 20


@pytest.mark.covers("FF-10")
async def test_an_agent_that_does_not_read_for_a_while_gets_a_long_prompt_whole() -> None:
    async with raw_agent("process") as (peer, raw):
        session = await opened(peer, raw)
        raw.transport.pause_reading()
        running = begun(session.prompt("x" * (3 << 20)))
        asking = begun(peer.request_extension("_x/y"))
        await asyncio.sleep(0.2)
        assert not raw.sent("session/prompt")
        raw.transport.resume_reading()
        request = await raw.wait("session/prompt")
        assert len(request["params"]["prompt"][0]["text"]) == 3 << 20
        raw.answer(request, END)
        raw.answer(await raw.wait("_x/y"), 1)
        assert (await running).stop_reason == "end_turn"
        assert await asking == 1


@pytest.mark.covers("FF-08")
@pytest.mark.parametrize("size", [20, 3000, 200 * 1024, 3 << 20])
async def test_noise_without_a_line_end_is_quoted_when_the_handshake_times_out(size: int) -> None:
    limits = Limits(startup_timeout=0.5, frame_bytes=1 << 20)
    async with unshaken_agent("process", limits=limits) as (raw, opening):
        await raw.wait("initialize")
        raw.send_bytes(b"Password for user: " + b"." * size)
        with pytest.raises(StartError, match="Password for user: ") as failed:
            await opening
    assert failed.value.timed_out
    assert len(str(failed.value)) < 2000
