"""Fails a test that leaves something behind: processes, descriptors, threads, temporary files.

Each test starts from what is there when its own fixtures begin, so that what a module's or the
session's fixtures keep open is not held against it. What ends by itself within a moment (a child
that has been told to stop, a descriptor that a cycle of objects holds) is no leak. Nor is the one
guard that the first child of a process brings with it, and the one socket to it.
"""

from __future__ import annotations

import gc
import os
import select
import shlex
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from antiphon._guard import guard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# What is ending gets this long. A leak costs this much, a clean test nothing.
GRACE = 2.0
# Every process that a test starts inherits it, however far its parents are gone.
MARK = "ANTIPHON_TEST_RUN"

_started = [0]


def _count_starts(event: str, _arguments: tuple[object, ...]) -> None:
    if event in {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}:
        _started[0] += 1


sys.addaudithook(_count_starts)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder for this run alone: what appears in it is ours, and nobody else's."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv(MARK, f"{os.getpid()}-{time.time_ns()}")
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _nothing_is_left(own_temporary_folder: Path) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    starts = _started[0]
    children = _children()
    descriptors = _descriptors()
    threads = set(threading.enumerate())
    files = set(os.listdir(own_temporary_folder))
    yield
    left = [
        *_left_processes(children, everywhere=_started[0] != starts or "uvloop" in sys.modules),
        *_left_threads(threads),
        *_left_descriptors(descriptors),
        *_left_files(own_temporary_folder, files),
    ]
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(f"* {what}" for what in left), False)


# Only Linux tells without a privilege and at no cost; elsewhere these checks see nothing, and the
# others still work.
LINUX = sys.platform == "linux"


def _children() -> set[int]:
    if not LINUX:
        return set()
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text(encoding="ascii").split()))
        except FileNotFoundError:  # that thread ended just now
            continue
    return found - {guard.pid}


def _marked() -> set[int]:
    """Every process that inherited this run's mark, orphans too; this one excepted."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:  # ended just now, or somebody else's
            continue
    return found - {os.getpid()}


def _descends(pid: int, ancestors: set[int]) -> bool:
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return True  # ended just now: no leak either


def _left_processes(before: set[int], *, everywhere: bool) -> list[str]:
    def left() -> set[int]:
        found = (_children() | (_marked() if everywhere else set[int]())) - before
        return {pid for pid in found if not (before and _descends(pid, before))}

    end = time.monotonic() + GRACE
    while (pids := left()) and (seconds := end - time.monotonic()) > 0:
        _wait_for_an_end(pids, seconds)
    texts: list[str] = []
    for pid in sorted(pids):
        try:
            process = psutil.Process(pid)
            status = process.status()
            command = "" if status == psutil.STATUS_ZOMBIE else shlex.join(process.cmdline())
            texts.append(f"process {pid} ({status}) {command}")
            process.kill()
            if process.ppid() == os.getpid():  # an orphan is for its reaper to wait for
                process.wait(GRACE)
        except psutil.NoSuchProcess:
            continue
    return texts


def _wait_for_an_end(pids: set[int], seconds: float) -> None:
    """Return when one of the processes has ended, or at the latest after so many seconds."""
    handles: list[int] = []
    waiting = select.poll()
    try:
        for pid in pids:
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    continue
                handles.append(os.pidfd_open(pid))
            except (psutil.NoSuchProcess, ProcessLookupError):
                return
            waiting.register(handles[-1], select.POLLIN)
        if handles:
            waiting.poll(seconds * 1000)
        else:
            time.sleep(0.01)  # all have ended; who collects one tells nobody
    finally:
        for handle in handles:
            os.close(handle)


def _left_threads(before: set[threading.Thread]) -> list[str]:
    texts: list[str] = []
    for thread in set(threading.enumerate()) - before:
        # A daemon thread may be blocked in a read that nothing can interrupt; such a thread is
        # the last resort of the stdio transport, and ends with the process.
        if thread.daemon or isinstance(thread, threading._DummyThread):
            continue
        thread.join(GRACE)
        if thread.is_alive():
            texts.append(f"thread {thread.name}")
    return texts


def _descriptors() -> dict[int, str]:
    if not LINUX:
        return {}
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  (of each test)
        except FileNotFoundError:  # the one that listed the folder
            continue
    found.pop(-1 if guard.fileno is None else guard.fileno, None)
    return found


def _left_descriptors(before: dict[int, str]) -> list[str]:
    def left() -> list[str]:
        after = _descriptors()
        return [f"descriptor {fd}: {what}" for fd, what in after.items() if before.get(fd) != what]

    if left():
        gc.collect()
    return left()


def _left_files(folder: Path, before: set[str]) -> list[str]:
    texts: list[str] = []
    for name in sorted(set(os.listdir(folder)) - before):
        texts.append(f"temporary file {name}")
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return texts
