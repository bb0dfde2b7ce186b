"""A recording: one line a frame, readable by any JSON reader, by nobody but its owner."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon._recording import Recorder


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def recorded(path: Path, *frames: bytes) -> list[dict[str, Any]]:
    recorder = Recorder(path)
    for frame in frames:
        recorder("in", frame)
    recorder.close()
    return lines(path)


def test_a_line_holds_time_direction_and_frame(tmp_path: Path) -> None:
    before = time.time()
    recorder = Recorder(tmp_path / "wire.ndjson")
    recorder("out", b'{"id":1}')
    recorder("in", b'{"id":1,"result":{}}')
    recorder.close()

    found = lines(tmp_path / "wire.ndjson")
    assert [(line["dir"], line["frame"]) for line in found] == [
        ("out", {"id": 1}),
        ("in", {"id": 1, "result": {}}),
    ]
    assert all(before - 1 <= line["t"] <= time.time() + 1 for line in found)
    assert [list(line) for line in found] == [["t", "dir", "frame"]] * 2


def test_a_frame_is_kept_byte_for_byte(tmp_path: Path) -> None:
    frame = '{"a": 1.0e1, "é":"\\u00e9\u2028", "z":{"_meta":null}}'.encode()
    recorded(tmp_path / "x", frame)

    assert b',"frame":' + frame + b"}\n" in (tmp_path / "x").read_bytes()


@pytest.mark.parametrize(
    ("frame", "kept"),
    [
        (b"Welcome!", "Welcome!"),
        (b'{"a":', '{"a":'),
        (b"\xff\x00", "\ufffd\x00"),
        (b"", ""),
        (b"[" * 100_000, "[" * 100_000),
    ],
    ids=["text", "half", "bytes", "empty", "deep"],
)
def test_a_frame_that_is_no_json_is_kept_as_a_string(
    tmp_path: Path, frame: bytes, kept: str
) -> None:
    assert [line["frame"] for line in recorded(tmp_path / "x", frame)] == [kept]


def test_a_frame_with_line_ends_inside_stays_one_line(tmp_path: Path) -> None:
    assert [line["frame"] for line in recorded(tmp_path / "x", b'{\n"a":\n1}')] == [{"a": 1}]


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        recorded(tmp_path / "x", b"{}")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_a_second_recording_is_appended(tmp_path: Path) -> None:
    recorded(tmp_path / "x", b"1")

    assert [line["frame"] for line in recorded(tmp_path / "x", b"2")] == [1, 2]


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x")
    recorder("in", b"{}")

    assert len(lines(tmp_path / "x")) == 1
    recorder.close()


def test_closing_twice_and_recording_after_that_do_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x")
    recorder.close()
    recorder.close()
    recorder("in", b"{}")

    assert lines(tmp_path / "x") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_ends_the_recording_and_raises_nothing() -> None:
    recorder = Recorder("/dev/full")
    recorder("in", b"{}")
    recorder("in", b"{}")
    recorder.close()


def test_a_file_that_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "missing" / "x")
