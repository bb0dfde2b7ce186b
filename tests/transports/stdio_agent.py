"""A process on `StdioTransport` that echoes frames and makes all the noise it can.

Started by `test_stdio.py`, with words that say what else it does. Before each echo it writes to
standard output in every way there is, and starts children that write to it and read from standard
input. What it says of itself goes to the file named in REPORT, because standard error is under
test too.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORDS = set(sys.argv[1:])

if "import" in WORDS:
    print("printed before", end="")

if "occupied" in WORDS:
    # Something else has taken the number that was closed.
    occupied = os.open("/proc/self/exe", os.O_RDONLY)
    assert occupied == 0

from antiphon.transports import StdioTransport, secure_stdio  # noqa: E402

if "early" in WORDS:
    secure_stdio()
    print("printed early")
    assert secure_stdio() == secure_stdio()

report: dict[str, Any] = {"seen": [], "room": [], "error": None, "ended": False}


def noise() -> None:
    print("noise by print, 漢")
    os.write(1, b"noise by write\n")
    sys.stdout.buffer.write(b"noise by buffer\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"noise by libc")
    libc.fflush(None)
    subprocess.run(["echo", "noise by child"], check=True)
    subprocess.run(["cat"], check=True)
    with contextlib.suppress(EOFError):
        input()


def noise_on_errors() -> None:
    print("errors by print", file=sys.stderr, flush=True)
    os.write(2, b"errors by write\n")
    logging.getLogger("agent").error("errors by log")
    subprocess.run(["sh", "-c", "echo errors by child >&2"], check=True)


class Echo:
    def __init__(self, transport: StdioTransport) -> None:
        self.transport = transport
        self.done = asyncio.Event()

    def frames_received(self, frames: list[Any]) -> None:
        for frame in frames:
            report["seen"].append(frame.decode())
            if "noise" in WORDS:
                noise()
            if "errors" in WORDS:
                noise_on_errors()
            if frame == b"big":
                self.transport.send([b"x" * (1 << 20)])
            elif frame == b"bye":
                self.done.set()
            else:
                self.transport.send([b"echo " + frame])
            save()

    def input_ended(self) -> None:
        report["ended"] = True
        self.transport.send([b"after the end"])
        self.done.set()

    def connection_lost(self, error: Exception | None) -> None:
        report["error"] = None if error is None else f"{type(error).__name__}: {error}"
        self.done.set()

    def pause_writing(self) -> None:
        report["room"].append("pause")

    def resume_writing(self) -> None:
        report["room"].append("resume")


def save() -> None:
    path = Path(os.environ["REPORT"])
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report), encoding="utf-8")
    new.replace(path)  # at once, for who reads it meanwhile


async def main() -> None:
    transport = StdioTransport()
    echo = Echo(transport)
    await transport.start(echo)
    assert transport.describe() == "stdio"
    reading, writing = secure_stdio()
    assert min(reading, writing) > 2
    if "descriptors" in WORDS:
        done = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, check=True)
        report["descriptors"] = done.stdout.decode()
    if "again" in WORDS:
        try:
            await StdioTransport().start(echo)
        except Exception as error:
            report["again"] = f"{type(error).__name__}: {error}"
    if "ready" in WORDS:
        save()
    await echo.done.wait()
    if "cancel" in WORDS:
        closing = asyncio.create_task(transport.aclose())
        also = asyncio.create_task(transport.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        await also
        report["cancelled"] = closing.cancelled()
    await transport.aclose()
    await transport.aclose()
    transport.send([b"too late"])
    save()


if "uvloop" in WORDS:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
else:
    asyncio.run(main())
