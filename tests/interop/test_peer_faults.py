"""What the peers do on the raw wire that no client should have to know, and what ours does instead.

Each row is a fact that ours is built around: never send an array, send `session/cancel` besides
`$/cancel_request`, expect no answer to what cannot be parsed. A peer that gets better turns its row red.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.programs import OURS, PYTHON_SDKS, THEIRS, TYPESCRIPT_SDK, agent_command

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

pytestmark = pytest.mark.interop

Json = dict[str, Any]
AGENTS = (*THEIRS, OURS)
INITIALIZE: Json = {"protocolVersion": 1, "clientCapabilities": {}}


class Wire:
    """An agent's two ends, with nothing in between."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, *lines: str | Json) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        for line in lines:
            text = line if isinstance(line, str) else json.dumps({"jsonrpc": "2.0", **line})
            pipe.write(text.encode() + b"\n")
        pipe.flush()

    def until(self, found: Callable[[Json], bool]) -> Json:
        """Read on until a frame is what is looked for; the test's bound is the bound."""
        pipe = self._process.stdout
        assert pipe is not None
        for line in pipe:
            frame = json.loads(line)
            if found(frame):
                return dict(frame)
        raise AssertionError("the agent's output ended")

    def answer(self, name: int | None) -> Json:
        return self.until(lambda frame: "method" not in frame and frame.get("id") == name)

    def rest(self) -> list[Json]:
        """End its input, and read what it still says."""
        output, _ = self._process.communicate()
        return [json.loads(line) for line in output.splitlines()]


@contextmanager
def initialized(peer: str, tmp_path: Path) -> Generator[Wire]:
    process = subprocess.Popen(
        agent_command(peer, tmp_path / "state.json"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        wire = Wire(process)
        wire.send({"id": 0, "method": "initialize", "params": INITIALIZE})
        assert wire.answer(0)["result"]["protocolVersion"] == 1
        yield wire
    finally:
        process.kill()
        process.communicate()


LIST: Json = {"id": 7, "method": "session/list", "params": {}}


@pytest.mark.covers("R1-12")
@pytest.mark.parametrize("frame", ["[]", '"x"', "42"])
@pytest.mark.parametrize("peer", [TYPESCRIPT_SDK, OURS])
def test_a_frame_that_is_no_object_is_refused(peer: str, frame: str, tmp_path: Path) -> None:
    with initialized(peer, tmp_path) as wire:
        wire.send(frame, LIST)

        assert wire.answer(None)["error"]["code"] == -32600
        assert wire.answer(7)["result"] == {"sessions": []}


@pytest.mark.parametrize("frame", ["[]", '"x"', "42"])
@pytest.mark.parametrize("peer", PYTHON_SDKS)
def test_a_frame_that_is_no_object_gets_no_answer_from_the_python_sdk(
    peer: str, frame: str, tmp_path: Path
) -> None:
    with initialized(peer, tmp_path) as wire:
        wire.send(frame, LIST)
        rest = wire.rest()

    # 0.12.1's receive loop ends with an exception: nothing that was or is asked is ever answered
    # (quirk 3). 1.0.0rc3 passes over the frame.
    assert [answer["id"] for answer in rest] == ([] if peer == "py-0.12.1" else [7])


@pytest.mark.covers("R1-11")
@pytest.mark.parametrize("peer", AGENTS)
def test_a_line_that_is_no_json_does_not_end_the_connection(peer: str, tmp_path: Path) -> None:
    with initialized(peer, tmp_path) as wire:
        wire.send("{", LIST)
        if peer not in PYTHON_SDKS:  # which say nothing (quirk 4)
            assert wire.answer(None)["error"]["code"] == -32700

        assert wire.answer(7)["result"] == {"sessions": []}


@pytest.mark.covers("R1-7", "R1-10", "R1-100")
@pytest.mark.parametrize("peer", AGENTS)
def test_notifications_get_no_answer(peer: str, tmp_path: Path) -> None:
    with initialized(peer, tmp_path) as wire:
        wire.send(
            {"method": "no/such", "params": {}},
            {"method": "_no/such"},
            {"method": "$/cancel_request", "params": {"requestId": 999}},
            {"method": "session/cancel", "params": {"sessionId": "no such session"}},
            {"method": "session/cancel", "params": {"sessionId": 5}},
            LIST,
        )

        assert [frame["id"] for frame in wire.rest()] == [7]


@pytest.mark.covers("R1-98")
@pytest.mark.parametrize("peer", AGENTS)
def test_a_withdrawn_prompt_is_answered_once(peer: str, tmp_path: Path) -> None:
    with initialized(peer, tmp_path) as wire:
        wire.send(
            {"id": 1, "method": "session/new", "params": {"cwd": str(tmp_path), "mcpServers": []}}
        )
        session = wire.answer(1)["result"]["sessionId"]
        slow = {"sessionId": session, "prompt": [{"type": "text", "text": "slow"}]}
        wire.send({"id": 2, "method": "session/prompt", "params": slow})
        wire.until(lambda frame: '"started"' in json.dumps(frame))
        wire.send({"method": "$/cancel_request", "params": {"requestId": 2}})
        if peer in {"py-0.12.1", TYPESCRIPT_SDK}:
            # 0.12.1 does not know it, and the TypeScript SDK leaves it to the handler to look at a
            # signal: only session/cancel ends the turn (quirk 19).
            wire.send({"method": "session/cancel", "params": {"sessionId": session}})
        answer = wire.answer(2)
        wire.send(LIST)
        rest = wire.rest()

    # 1.0.0rc3 cancels the handler's task: no result, and what the turn had to say is lost.
    if peer == "py-1.0.0rc3":
        assert answer["error"]["code"] == -32800
    else:
        assert answer["result"] == {"stopReason": "cancelled"}
    assert [frame["id"] for frame in rest if "method" not in frame] == [7]
