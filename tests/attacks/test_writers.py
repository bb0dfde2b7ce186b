"""Processes that write are killed, and write over one another: the file is always one text, whole."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.attacks.writer import Ctx

from antiphon.schema import v1_unstable
from antiphon.services import Files

if TYPE_CHECKING:
    from collections.abc import Generator

MIB = 1 << 20
LEFT_BEHIND = re.compile(r"\.antiphon-[0-9a-f]{16}")


@contextlib.contextmanager
def writing(root: Path, mode: str) -> Generator[subprocess.Popen[str]]:
    """A process that writes `root/f`, and has begun to; killed at the end, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("writer.py")), str(root), "f", mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def texts(*letters: str) -> set[str]:
    return {letter * MIB for letter in letters}


@pytest.mark.parametrize("old", [None, "old"])
async def test_a_writer_that_is_killed_before_the_rename_leaves_the_old_file(
    tmp_path: Path, old: str | None
) -> None:
    root = tmp_path.resolve()
    if old is not None:
        (root / "f").write_text(old)
        (root / "f").chmod(0o640)
    with writing(root, "hold") as process:
        process.kill()
        process.wait()
    names = {path.name for path in root.iterdir()}
    left = {name for name in names if LEFT_BEHIND.fullmatch(name)}
    # One file is left, as `Files.write_text_file` says, and it stands in nobody's way.
    assert len(left) == 1
    assert names - left == (set() if old is None else {"f"})
    if old is not None:
        assert (root / "f").read_text() == old
        assert (root / "f").stat().st_mode & 0o777 == 0o640
    params = v1_unstable.WriteTextFileRequest(session_id="s", path=f"{root}/f", content="next")
    await Files(root).write_text_file(params, Ctx())
    assert (root / "f").read_text() == "next"
    assert {path.name for path in root.iterdir()} == {"f", *left}


def test_a_writer_that_is_killed_at_any_moment_leaves_one_text_whole(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    for number in range(8):
        with writing(root, "a") as process:
            # As much later as it takes to see another text, and a different part of the next write.
            seen = (root / "f").stat().st_ino
            while (root / "f").stat().st_ino == seen:
                pass
            until = time.perf_counter() + number * 0.0003
            while time.perf_counter() < until:
                pass
            process.kill()
            process.wait()
        assert (root / "f").read_text() in texts("a", "A")
        others = {path.name for path in root.iterdir()} - {"f"}
        assert all(LEFT_BEHIND.fullmatch(name) for name in others)
        assert len(others) <= number + 1


def test_two_processes_that_write_leave_the_text_of_one_whole(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    seen: set[str] = set()
    with writing(root, "a") as one, writing(root, "b") as other:
        until = time.monotonic() + 20
        while len(seen) < 4 and time.monotonic() < until:
            seen.add((root / "f").read_text())
        for process in (one, other):
            process.communicate(timeout=20)
            assert process.returncode == 0
    assert seen == texts("a", "A", "b", "B")
    assert (root / "f").read_text() in seen
    assert [path.name for path in root.iterdir()] == ["f"]
