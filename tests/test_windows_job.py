"""Windows ends a tree of processes as one: real code, and a system that is played."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from antiphon import _windows_job
from antiphon._process import Child
from antiphon._windows_job import ExtendedLimits, declare, job_of, kernel32

SOURCE = Path(__file__).parents[1] / "src" / "antiphon"


class System:
    """What kernel32 does with jobs, done to the processes of this system.

    What the process in a job has started is in it too: all with `mark` as JOB in their environment.
    `refuses` names a function that fails.
    """

    def __init__(self, refuses: str = "", mark: str | None = None) -> None:
        self.refuses = refuses
        self.mark = mark
        self.calls: list[str] = []
        self.handles: dict[int, Any] = {}
        self.flags: dict[int, int] = {}
        self._next = 0x1_0000_0000  # does not fit into 32 bits

    def _called(self, name: str) -> bool:
        self.calls.append(name)
        return name != self.refuses

    def _new(self, what: Any) -> int:
        self._next += 4
        self.handles[self._next] = what
        return self._next

    def CreateJobObjectW(self, attributes: None, name: None, /) -> int | None:
        return self._new(set[int]()) if self._called("CreateJobObjectW") else None

    def SetInformationJobObject(self, job: int, kind: int, limits: Any, size: int, /) -> int:
        if not self._called("SetInformationJobObject"):
            return 0
        assert kind == 9
        assert size == ctypes.sizeof(ExtendedLimits)
        self.flags[job] = limits._obj.basic.limit_flags
        return 1

    def OpenProcess(self, access: int, inherit: int, pid: int, /) -> int | None:
        if not self._called("OpenProcess"):
            return None
        assert access == 0x101
        assert not inherit
        return self._new(pid)

    def AssignProcessToJobObject(self, job: int, process: int, /) -> int:
        if not self._called("AssignProcessToJobObject"):
            return 0
        self.handles[job].add(self.handles[process])
        return 1

    def TerminateJobObject(self, job: int, status: int, /) -> int:
        self._called("TerminateJobObject")
        self._end(job)
        return 1

    def CloseHandle(self, handle: int, /) -> int:
        self._called("CloseHandle")
        if self.flags.pop(handle, 0) & 0x2000:
            self._end(handle)
        del self.handles[handle]
        return 1

    def _end(self, job: int) -> None:
        inside = self.handles[job]
        for pid in marked(self.mark) if inside and self.mark is not None else inside:
            if not running(pid):
                continue
            fd = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([fd], [], [], 10)
            os.close(fd)


def marked(mark: str) -> list[int]:
    """The processes that live and have this in their environment, however they are related."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("JOB") == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TREE = "sleep 60 & echo $!; read line; exit 4"
STUBBORN = "sleep 60 & echo $!; sleep 60"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    made = System(mark=uuid.uuid4().hex)
    monkeypatch.setattr(_windows_job, "kernel32", lambda: made)
    return made


async def on_windows(patch: pytest.MonkeyPatch, system: System, text: str) -> Child:
    patch.setattr(sys, "platform", "win32")
    env = {**os.environ, "JOB": str(system.mark)}
    return await Child.start(["sh", "-c", text], env=env, stderr="null")


async def first_line(child: Child) -> str:
    fd = child.take_stdout()
    try:
        return (await asyncio.to_thread(os.read, fd, 100)).decode().strip()
    finally:
        os.close(fd)


# ------------------------------------------------------------------ a job


def test_the_limits_have_the_layout_of_the_system() -> None:
    assert ctypes.sizeof(ExtendedLimits) == 144
    limits: Any = ExtendedLimits
    basic: Any = _windows_job._BasicLimits
    assert basic.limit_flags.offset == 16
    assert limits.io_counters.offset == 64
    assert limits.process_memory.offset == 112


def test_a_job_ends_with_its_handle() -> None:
    system = System()
    with subprocess.Popen(["sleep", "60"]) as process:
        job = job_of(process.pid, system)
        assert job is not None
        assert list(system.flags.values()) == [0x2000]
        assert len(system.handles) == 1  # the process's handle is closed again

        job.close()
        job.close()

        assert process.wait(10) == -signal.SIGKILL
    assert not system.handles


def test_everything_in_a_job_can_be_terminated_and_nothing_after_its_end() -> None:
    system = System()
    with subprocess.Popen(["sleep", "60"]) as process:
        job = job_of(process.pid, system)
        assert job is not None

        job.terminate()

        assert process.wait(10) == -signal.SIGKILL
    job.close()
    job.terminate()
    assert system.calls.count("TerminateJobObject") == 1


@pytest.mark.parametrize(
    "refused",
    ["CreateJobObjectW", "SetInformationJobObject", "OpenProcess", "AssignProcessToJobObject"],
)
def test_where_the_system_refuses_there_is_no_job_and_nothing_is_left(refused: str) -> None:
    system = System(refused)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert job_of(process.pid, system) is None
        assert not system.handles
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(10) == 0


def test_handles_are_declared_to_be_as_wide_as_pointers() -> None:
    names = [name for name in dir(System) if name[0].isupper()]
    library = SimpleNamespace(**{name: SimpleNamespace() for name in names})

    assert declare(library) is library

    for name in names:
        function = getattr(library, name)
        assert function.restype in {ctypes.c_void_p, ctypes.c_int}
        assert len(function.argtypes) >= 1
    assert library.CreateJobObjectW.restype is ctypes.c_void_p
    assert library.OpenProcess.restype is ctypes.c_void_p
    assert library.AssignProcessToJobObject.argtypes == [ctypes.c_void_p, ctypes.c_void_p]
    assert library.CloseHandle.argtypes == [ctypes.c_void_p]


def test_elsewhere_there_is_no_such_system() -> None:
    with pytest.raises(OSError, match="of Windows"):
        kernel32()


# ------------------------------------------------------------------ a child in a job


@pytest.mark.covers("FF-35")
async def test_the_tree_ends_when_the_child_is_ended_by_force(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        child = await on_windows(patch, system, STUBBORN)
        tool = int(await first_line(child))

        assert await child.end(stdin_grace=0.05) == -signal.SIGKILL

    assert not running(tool)
    assert not system.handles
    assert "TerminateJobObject" in system.calls


async def test_what_has_outlived_a_child_that_left_by_itself_ends_with_the_job(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        child = await on_windows(patch, system, TREE)
        tool = int(await first_line(child))

        assert await child.end() == 4

    assert not running(tool)
    assert not system.handles
    assert "TerminateJobObject" not in system.calls


async def test_a_cancelled_end_terminates_the_job_at_once(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        child = await on_windows(patch, system, STUBBORN)
        tool = int(await first_line(child))
        ending = asyncio.create_task(child.end(stdin_grace=60))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    assert not running(tool)
    assert not system.handles


async def test_without_a_job_the_process_alone_is_terminated_and_it_is_said(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system.refuses = "AssignProcessToJobObject"
    terminated: list[int] = []

    def terminate(self: subprocess.Popen[bytes]) -> None:
        terminated.append(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "terminate", terminate)
        child = await on_windows(patch, system, "exec sleep 60")

        assert await child.end(stdin_grace=0.01) == -signal.SIGKILL

    assert terminated == [child.pid]
    assert "it got no job object" in caplog.text


async def test_a_thread_waits_for_the_exit(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        child = await on_windows(patch, system, "exit 3")

        assert await child.wait() == 3
        assert await child.end() == 3


def test_what_only_windows_runs_passes_a_strict_type_checker(tmp_path: Path) -> None:
    modules = ["_process.py", "_launch.py", "_guard.py", "_windows_job.py", "transports"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--platform", "win32"),
            *("--cache-dir", str(tmp_path), *(str(SOURCE / name) for name in modules)),
        ],
        cwd=SOURCE.parents[1],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
