"""Runs the command as a user does, as a process, and reads what it printed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ODD_AGENT = Path(__file__).with_name("odd_agent.py")
COMMAND = [sys.executable, "-m", "antiphon"]
MARK = "ANTIPHON_TEST_MARK"
BOUND = 20.0


def odd(kind: str) -> str:
    """The `--agent` argument for one of the odd agents."""
    return shlex.join([sys.executable, str(ODD_AGENT), kind])


class Ran:
    """What came of one run."""

    def __init__(self, code: int, out: bytes, err: bytes, seconds: float) -> None:
        self.code = code
        self.out_bytes = out
        self.out = out.decode()
        self.err = err.decode()
        self.seconds = seconds

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        """The last line, which must be the only result."""
        assert [line["type"] for line in self.lines].index("result") == len(self.lines) - 1
        return self.lines[-1]


def environment(**more: str) -> dict[str, str]:
    """Ours, with a mark that the command's processes inherit and by which they can be found.

    Without PYTHONUNBUFFERED, which hides what is still in a buffer where a stream is closed.
    """
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**ours, MARK: uuid.uuid4().hex, **more}


def antiphon(
    *arguments: str,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ran:
    """Run `python -m antiphon`; leaves nothing behind, which is checked."""
    marked = environment(**(env or {}))
    started = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=marked,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=BOUND)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    seconds = time.monotonic() - started
    assert not left_by(marked), "the command left processes behind"
    return Ran(process.returncode, out, err, seconds)


def left_by(marked: Mapping[str, str]) -> list[str]:
    """Processes that carry the mark of this environment and still live."""
    return [" ".join(words) for mark, words in _marked() if mark == marked[MARK]]


def _marked() -> Iterator[tuple[str, list[str]]]:
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process.environ().get(MARK, ""), process.cmdline()
        except psutil.Error:
            continue
