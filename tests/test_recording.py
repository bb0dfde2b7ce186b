"""What a recording holds, who may read it, and that a full disk ends only the recording."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, Turn
from antiphon._recording import Guarded, Recorder
from antiphon.testing import raw_agent, raw_client
from tests.sessions.pairs import joined


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_frame_is_one_line_with_its_time_and_direction(tmp_path: Path) -> None:
    path = tmp_path / "wire.ndjson"
    before = time.time()
    recorder = Recorder(path)
    recorder("out", b'{"id":1,"x":  "\\u20ac"}')
    recorder("in", '{"id":2,"x":"€ "}'.encode())
    recorder.close()

    first, second = lines(path)
    assert (first["dir"], second["dir"]) == ("out", "in")
    assert before - 1 <= first["t"] <= second["t"] <= time.time() + 1
    assert second["frame"] == {"id": 2, "x": "€ "}
    # The frame's own text, not one that means the same.
    assert b'"frame":{"id":1,"x":  "\\u20ac"}}' in path.read_bytes()


@pytest.mark.parametrize(
    ("frame", "kept"),
    [
        (b"[INFO] ready", "[INFO] ready"),
        (b"", ""),
        (b'{"half":', '{"half":'),
        (b"\xff\xfe{", "\ufffd\ufffd{"),
        (b'{"x":NaN}', '{"x":NaN}'),
        (b"two\nlines", "two\nlines"),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
def test_a_frame_that_is_no_json_is_kept_as_a_string(
    tmp_path: Path, frame: bytes, kept: str
) -> None:
    recorder = Recorder(tmp_path / "wire")
    recorder("in", frame)
    recorder("in", b"{}")
    recorder.close()

    assert [line["frame"] for line in lines(tmp_path / "wire")] == [kept, {}]


def test_json_over_several_lines_becomes_one_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "wire")
    recorder("in", b'{\n "a": 1,\r\n "b": "x"\n}')
    recorder.close()

    (line,) = lines(tmp_path / "wire")
    assert line["frame"] == {"a": 1, "b": "x"}


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Recorder(tmp_path / "wire").close()
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "wire").stat().st_mode) == 0o600


def test_an_existing_file_is_appended_to(tmp_path: Path) -> None:
    for number in range(3):
        recorder = Recorder(str(tmp_path / "wire"))
        recorder("out", b"%d" % number)
        recorder.close()

    assert [line["frame"] for line in lines(tmp_path / "wire")] == [0, 1, 2]


def test_a_line_is_on_disk_before_the_next_one_comes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "wire")
    recorder("out", b"1")
    assert len(lines(tmp_path / "wire")) == 1  # it would survive the death of this process
    recorder.close()
    recorder.close()
    recorder("out", b"2")
    assert len(lines(tmp_path / "wire")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk at hand")
def test_a_full_disk_ends_the_recording_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder("/dev/full")
    recorder("out", b"1")
    recorder("out", b"2")
    recorder.close()
    (record,) = caplog.records
    assert record.getMessage() == f"nothing more is recorded: {os.strerror(errno.ENOSPC)}"


def test_a_file_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "nowhere" / "wire")


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(turn.text)


async def test_both_sides_of_a_connection_record_what_crossed_in_order(tmp_path: Path) -> None:
    path = tmp_path / "agent.ndjson"
    async with raw_client(Echo(), record=path) as raw:
        answer = await raw.ask("session/new", {"cwd": "/", "mcpServers": []}, "n")
        session_id = answer["result"]["sessionId"]
        prompt = {"sessionId": session_id, "prompt": [{"type": "text", "text": "hi"}]}
        await raw.ask("session/prompt", prompt, "p")
        raw.send(b"noise")
        await raw.wait(None, 4)
    recorded = lines(path)
    assert [line["dir"] for line in recorded] == [
        *("in", "out"),  # initialize
        *("in", "out"),  # session/new
        *("in", "out", "out"),  # the prompt, its update, its answer
        *("in", "out"),  # noise, and what it was answered
    ]
    assert [line["frame"] for line in recorded if line["dir"] == "out"] == raw.frames
    assert recorded[-2]["frame"] == "noise"


async def test_a_client_records_from_the_first_frame_to_the_last(tmp_path: Path) -> None:
    path = tmp_path / "client.ndjson"
    async with raw_agent(record=path) as (peer, raw):
        await peer.notify_extension("_x/y", {"a": [1]})
        await raw.wait("_x/y")
    recorded = lines(path)
    assert [line["frame"] for line in recorded if line["dir"] == "out"] == raw.frames
    assert recorded[0]["frame"]["method"] == "initialize"
    assert recorded[-1]["frame"]["params"] == {"a": [1]}


async def test_a_function_gets_the_frames_as_they_are() -> None:
    seen: list[tuple[str, bytes]] = []

    def record(direction: str, frame: bytes) -> None:
        seen.append((direction, frame))

    async with raw_agent(record=record) as (_, raw):
        await raw.round_trip()
    assert [json.loads(frame) for direction, frame in seen if direction == "out"] == raw.frames
    assert {direction for direction, _ in seen} == {"in", "out"}


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
async def test_a_function_that_fails_ends_the_recording_and_nothing_else(
    fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []

    def record(direction: str, frame: bytes) -> None:
        if len(seen) == fails_at:
            raise ValueError("recording trouble")
        seen.append(frame)

    async with raw_agent(record=record) as (_, raw):
        await raw.round_trip()
        await raw.round_trip()
    assert len(seen) == fails_at
    assert caplog.text.count("ValueError: recording trouble") == 1


async def test_what_two_sides_of_ours_record_is_the_same_conversation() -> None:
    async with joined(Echo()) as (peer, wire):
        session = await peer.new_session(cwd="/")
        await session.prompt("hi")
    assert [frame.get("method") for direction, frame in wire.frames if direction == "out"] == [
        "initialize",
        "session/new",
        "session/prompt",
    ]


def test_a_recording_is_one_line_a_frame_for_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "wire.ndjson"
    recorder = Recorder(path)
    recorder("in", '{"text":"a\u2028b\u2029c\u0085d"}'.encode())
    recorder.close()

    (line,) = path.read_text("utf-8").splitlines()
    assert json.loads(line)["frame"] == {"text": "a\u2028b\u2029c\u0085d"}


def test_a_function_is_handed_nothing_after_the_close() -> None:
    seen: list[tuple[str, bytes]] = []
    guarded = Guarded(lambda direction, frame: seen.append((direction, frame)))
    guarded("in", b"1")
    guarded.close()
    guarded.close()
    guarded("in", b"2")
    assert seen == [("in", b"1")]
