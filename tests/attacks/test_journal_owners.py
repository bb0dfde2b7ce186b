"""Processes that want the same session, and disks that are full: a clear error, and nothing is lost.

Each test tells real processes what to do (`journal_peer.py`), and reads the journal as a third.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import pytest

from antiphon.journal import SqliteJournal

if TYPE_CHECKING:
    from types import TracebackType


class Peer:
    """A process that does what it is told, and is killed at the end of the block."""

    def __init__(self, directory: Path, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [
                *wrapper,
                *(sys.executable, *SCRIPT),
                str(directory),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, verb: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def ask(self, verb: str, *arguments: object) -> Any:
        self.tell(verb, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()


SCRIPT = (str(Path(__file__).with_name("journal_peer.py")),)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def in_use(answer: Any, owner: int) -> bool:
    """Whether it is refused, naming who has the session."""
    return refused(answer) and str(owner) in answer["says"]


def refused(answer: Any) -> bool:
    """Whether it is refused because another has the session."""
    return bool(answer) and answer["error"] == "JournalInUse"


async def texts(directory: Path, session: str) -> list[str]:
    """What a third process reads, and that nothing is damaged."""
    journal = SqliteJournal(directory, read_only=True)
    log = await journal.open(session)
    records = await log.read(1, await log.high_watermark())
    await log.aclose()
    await journal.aclose()
    assert [record.offset for record in records] == list(range(1, len(records) + 1))
    return [record.data["content"]["text"] for record in records]


# ---------------------------------------------------------------- one session


@pytest.mark.covers("FF-49")
async def test_of_two_processes_one_writes_a_session_and_the_other_is_told_who(
    directory: Path,
) -> None:
    with Peer(directory) as one, Peer(directory) as other:
        assert one.ask("claim", "s") is None
        assert one.ask("append", "s", "a", "b") == [1, 2]

        assert in_use(other.ask("claim", "s"), one.process.pid)
        assert refused(other.ask("append", "s", "x"))
        assert in_use(other.ask("delete", "s"), one.process.pid)
        assert other.ask("texts", "s") == ["a", "b"]
        # Another session of the same files is nobody's.
        assert other.ask("claim", "t") is None
        assert other.ask("append", "t", "y") == [1]
        assert one.ask("append", "s", "c") == [3]

        assert one.ask("release", "s") is None
        assert other.ask("claim", "s") is None
        assert other.ask("append", "s", "d") == [4]
        assert refused(one.ask("append", "s", "x"))
        assert in_use(one.ask("claim", "s"), other.process.pid)

    assert await texts(directory, "s") == ["a", "b", "c", "d"]


@pytest.mark.covers("FF-49")
async def test_a_session_of_a_killed_process_is_anybody_s_at_once(directory: Path) -> None:
    held: list[str] = []
    for number in range(2):
        with Peer(directory) as owner, Peer(directory) as other:
            assert owner.ask("claim", "s") is None
            held.append(f"{number}")
            assert owner.ask("append", "s", held[-1]) == [len(held)]
            assert in_use(other.ask("claim", "s"), owner.process.pid)
            owner.process.kill()
            # Also while nobody has collected it, and its pid still exists.
            os.waitid(os.P_PID, owner.process.pid, os.WEXITED | os.WNOWAIT)
            if number % 2:
                owner.process.wait()
            assert other.ask("claim", "s") is None
            held.append("after")
            assert other.ask("append", "s", "after") == [len(held)]

    assert await texts(directory, "s") == held


async def test_of_many_that_claim_at_the_same_moment_one_has_it(directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(directory)) for _ in range(4)]
        for peer in peers:
            assert peer.ask("count", "warm") == 0
        for number in range(10):
            session = f"s{number}"
            moment = time.monotonic() + 0.02
            for peer in peers:
                peer.tell("claim_at", session, moment)
            answers = [peer.answer() for peer in peers]
            (owner,) = [n for n, answer in enumerate(answers) if answer is None]
            for n, peer in enumerate(peers):
                if n != owner:
                    assert in_use(answers[n], peers[owner].process.pid), answers
                    peer.tell("append", session, "x")
                else:
                    peer.tell("append", session, f"{number}")
            for n, peer in enumerate(peers):
                answer = peer.answer()
                assert answer == [1] if n == owner else refused(answer)

    for number in range(10):
        assert await texts(directory, f"s{number}") == [f"{number}"]


@pytest.mark.covers("FF-49")
async def test_an_owner_that_is_stopped_is_still_the_owner(directory: Path) -> None:
    with Peer(directory) as owner, Peer(directory) as other:
        assert owner.ask("claim", "s") is None
        assert owner.ask("append", "s", "a") == [1]
        owner.process.send_signal(signal.SIGSTOP)
        try:
            # Nothing that is told to a stopped process reaches it; it may be stopped for hours.
            for _ in range(3):
                assert in_use(other.ask("claim", "s"), owner.process.pid)
            # And it holds up nobody who writes something else, or reads.
            assert other.ask("claim", "t") is None
            assert other.ask("append", "t", "x") == [1]
            assert other.ask("texts", "s") == ["a"]
        finally:
            owner.process.send_signal(signal.SIGCONT)
        assert owner.ask("append", "s", "b") == [2]

    assert await texts(directory, "s") == ["a", "b"]


async def test_a_child_that_was_forked_does_not_write_for_its_parent(directory: Path) -> None:
    with Peer(directory) as owner:
        assert owner.ask("claim", "s") is None
        assert owner.ask("append", "s", "a") == [1]

        answer = owner.ask("child", "s")

        assert answer["error"] in {"JournalInUse", "JournalError"}, answer
        assert owner.ask("append", "s", "b") == [2]

    assert await texts(directory, "s") == ["a", "b"]


async def test_a_child_that_outlives_its_parent_does_not_keep_the_session(
    directory: Path,
) -> None:
    with Peer(directory) as owner, Peer(directory) as other:
        assert owner.ask("claim", "s") is None
        assert owner.ask("append", "s", "a") == [1]
        child = psutil.Process(owner.ask("lasting_child"))
        try:
            owner.kill()

            assert other.ask("claim", "s") is None
            assert other.ask("append", "s", "b") == [2]
            assert child.is_running()
        finally:
            child.kill()

    assert await texts(directory, "s") == ["a", "b"]


SANDBOX = ("bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--die-with-parent")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
async def test_processes_that_do_not_see_each_other_s_pids_respect_each_other(
    directory: Path,
) -> None:
    """Containers over one directory: each owner has the same pid, and none is known to the other."""
    with (
        Peer(directory, *SANDBOX) as one,
        Peer(directory, *SANDBOX) as other,
        Peer(directory) as out,
    ):
        assert one.ask("claim", "s") is None
        assert one.ask("append", "s", "a") == [1]
        for peer in (other, out):
            assert refused(peer.ask("claim", "s"))
            assert refused(peer.ask("append", "s", "x"))
        assert one.ask("append", "s", "b") == [2]
        one.kill()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in {other.process.pid, out.process.pid}:
                psutil.wait_procs([child], 0)
        deadline = time.monotonic() + 10
        while out.ask("claim", "s") is not None:
            assert time.monotonic() < deadline
        assert out.ask("append", "s", "c") == [3]

    assert await texts(directory, "s") == ["a", "b", "c"]


# ------------------------------------------------------------------ disk full


@pytest.mark.covers("FF-49")
@pytest.mark.parametrize("size", [50, 9_000], ids=["small", "longer than a page"])
async def test_a_file_that_may_not_grow_loses_nothing_that_was_acknowledged(
    directory: Path, size: int
) -> None:
    with Peer(directory) as peer:
        assert peer.ask("claim", "s") is None
        assert peer.ask("append", "s", "first") == [1]
        peer.ask("bound_files", 1_000_000)

        failed = peer.ask("fill", "s", size)

        assert failed["error"] == "JournalError", failed
        assert "shard-" in failed["says"], failed
        assert failed["done"] > 10
        # What was not acknowledged is nowhere, and reading goes on.
        assert peer.ask("count", "s") == failed["done"] + 1
        assert len(await texts(directory, "s")) == failed["done"] + 1

        peer.ask("bound_files", None)
        peer.ask("reopen")
        assert peer.ask("claim", "s") is None
        assert peer.ask("append", "s", "last") == [failed["done"] + 2]

    held = await texts(directory, "s")
    assert [text.split()[0] for text in held] == [
        "first",
        *map(str, range(failed["done"])),
        "last",
    ]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.covers("FF-49")
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    sandbox = ("bwrap", "--dev-bind", "/", "/", "--size", str(2 << 20), "--tmpfs", str(disk))
    with Peer(disk / "journal", *sandbox, "--die-with-parent") as peer:
        assert peer.ask("claim", "s") is None
        assert peer.ask("append", "s", "first") == [1]
        peer.ask("ballast", str(disk / "ballast"), 1 << 20)

        failed = peer.ask("fill", "s", 5_000)

        assert failed["error"] == "JournalError", failed
        assert "full" in failed["says"] or "space" in failed["says"], failed
        assert peer.ask("count", "s") == failed["done"] + 1
        # A disk that stays full still gives what it holds, also to who comes anew.
        peer.ask("reopen")
        assert peer.ask("count", "s") == failed["done"] + 1
        assert peer.ask("texts", "s")[0] == "first"

        peer.ask("ballast", str(disk / "ballast"), None)
        peer.ask("reopen")
        assert peer.ask("claim", "s") is None
        assert peer.ask("append", "s", "last") == [failed["done"] + 2]
        held = peer.ask("texts", "s")

    assert [text.split()[0] for text in held] == [
        "first",
        *map(str, range(failed["done"])),
        "last",
    ]
