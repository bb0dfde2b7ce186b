"""A process and all that it starts, as one thing that Windows ends: a job object.

Responsible for making a job, putting a process into it, and ending what is in it. The job ends with
its handle, so what is in it ends when we do, however we do. Leaves everything else about a process to
`_process`; other systems have process groups and `_guard`.

There is no branch on the platform here but one: the library of the system comes as an object, so that
type checkers see all of it and tests can play the system.

What the process starts in the moment before it is in the job is not in the job; a program takes
longer than that to begin.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

__all__ = ["Job", "Kernel32", "declare", "job_of", "kernel32"]

# winnt.h, by their names there.
JOB_OBJECT_EXTENDED_LIMIT_INFORMATION = 9
JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE = 0x2000
PROCESS_TERMINATE = 0x0001
PROCESS_SET_QUOTA = 0x0100

_DWORD = ctypes.c_uint32  # not wintypes.DWORD, whose size is that of C's long where tests run


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("per_process_user_time", ctypes.c_int64),
        ("per_job_user_time", ctypes.c_int64),
        ("limit_flags", _DWORD),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", _DWORD),
        ("affinity", ctypes.c_size_t),
        ("priority_class", _DWORD),
        ("scheduling_class", _DWORD),
    )


class ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    )


class Kernel32(Protocol):
    """What is used of kernel32.dll. A handle is None or 0, a truth 0, where a call has failed."""

    def CreateJobObjectW(self, attributes: None, name: None, /) -> int | None:  # noqa: N802
        ...

    def SetInformationJobObject(self, job: int, kind: int, limits: Any, size: int, /) -> int:  # noqa: N802
        ...

    def OpenProcess(self, access: int, inherit: int, pid: int, /) -> int | None:  # noqa: N802
        ...

    def AssignProcessToJobObject(self, job: int, process: int, /) -> int:  # noqa: N802
        ...

    def TerminateJobObject(self, job: int, status: int, /) -> int:  # noqa: N802
        ...

    def CloseHandle(self, handle: int, /) -> int:  # noqa: N802
        ...


class Job:
    """A job object of ours; `close` must be called in the end, which ends what is still in it."""

    def __init__(self, system: Kernel32, handle: int) -> None:
        """Not for callers: use `job_of`."""
        self._system = system
        self._handle: int | None = handle

    def terminate(self, status: int = 1) -> None:
        """End every process in it at once, with this exit status. Nothing happens after `close`."""
        if self._handle is not None:
            self._system.TerminateJobObject(self._handle, status)

    def close(self) -> None:
        """Give it up, and end what is in it. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._system.CloseHandle(handle)


def job_of(pid: int, system: Kernel32) -> Job | None:
    """Put a running process into a new job.

    None where the system refuses: one of ours that is in a job which allows no further one (before
    Windows 8), or a process that has ended. Nothing is left open then.
    """
    handle = system.CreateJobObjectW(None, None)
    if not handle:
        return None
    job = Job(system, handle)
    limits = ExtendedLimits()
    limits.basic.limit_flags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    kind, size = JOB_OBJECT_EXTENDED_LIMIT_INFORMATION, ctypes.sizeof(limits)
    if system.SetInformationJobObject(handle, kind, ctypes.byref(limits), size):
        process = system.OpenProcess(PROCESS_SET_QUOTA | PROCESS_TERMINATE, 0, pid)
        if process:
            try:
                if system.AssignProcessToJobObject(handle, process):
                    return job
            finally:
                system.CloseHandle(process)
    job.close()
    return None


def declare(library: Any) -> Kernel32:
    """Tell ctypes the types of the functions: it takes a handle for an int of 32 bits otherwise."""
    handle, truth, number = ctypes.c_void_p, ctypes.c_int, _DWORD
    types: dict[str, tuple[Any, list[Any]]] = {
        "CreateJobObjectW": (handle, [ctypes.c_void_p, ctypes.c_wchar_p]),
        "SetInformationJobObject": (truth, [handle, ctypes.c_int, ctypes.c_void_p, number]),
        "OpenProcess": (handle, [number, truth, number]),
        "AssignProcessToJobObject": (truth, [handle, handle]),
        "TerminateJobObject": (truth, [handle, ctypes.c_uint]),
        "CloseHandle": (truth, [handle]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    system: Kernel32 = library
    return system


def kernel32() -> Kernel32:
    """The system's own.

    Raises:
        OSError: this is not Windows.
    """
    if sys.platform == "win32":
        return declare(ctypes.WinDLL("kernel32"))
    msg = "job objects are of Windows"
    raise OSError(msg)
