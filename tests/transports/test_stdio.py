"""An agent on its own stdio: nothing else reaches the wire, whatever the descriptors are.

Every test runs `stdio_agent.py`, because moving descriptors 0 and 1 is not for the test's process.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import tty
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

AGENT = str(Path(__file__).with_name("stdio_agent.py"))
NOISE = [
    "noise by print, 漢",
    "noise by write",
    "noise by buffer",
    "noise by libc",
    "noise by child",
]
ERRORS = ["errors by print", "errors by write", "errors by log", "errors by child"]
ECHOES = b"echo a\necho b\nafter the end\n"


class Agent:
    """Starts the agent and reads what it reports."""

    def __init__(self, report: Path) -> None:
        self._path = report
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "REPORT": str(self._path),
            "PYTHONUNBUFFERED": "",
            **options.pop("env", {}),
        }
        options = {"stderr": subprocess.PIPE} | options
        start: Any = subprocess.Popen  # whose type depends on options that are not used here
        process: subprocess.Popen[bytes] = start(
            [sys.executable, AGENT, *words], env=environment, **options
        )
        self._processes.append(process)
        return process

    def run(self, *words: str, data: bytes = b"a\nb\n", **options: Any) -> tuple[bytes, bytes]:
        """Feed it through a pipe; return what came from its two outputs."""
        options = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE} | options
        process = self.start(*words, **options)
        given = data if options["stdin"] == subprocess.PIPE else None
        out, err = process.communicate(given, timeout=20)
        assert process.returncode == 0, err
        return out, err

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_bytes())
        return found

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until what it has reported so far fits; the test's bound bounds it."""
        while not self._path.exists() or not condition(self.report):
            time.sleep(0.005)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """The agent under test; it is gone afterwards in any case."""
    made = Agent(tmp_path / "report")
    yield made
    made.close()


def read_until(fd: int, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        ready, _, _ = select.select([fd], [], [], 20)
        assert ready, data
        data += os.read(fd, 65_536)
    return data


# ------------------------------------------------------------------ purity


@pytest.mark.covers("R1-3", "FF-08")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_but_frames_reaches_standard_output(agent: Agent, loop: str) -> None:
    out, err = agent.run("noise", "errors", loop)

    assert out == ECHOES
    for line in NOISE + ERRORS:
        assert err.decode().splitlines().count(line) == 2


@pytest.mark.covers("R1-3")
def test_nothing_but_frames_reaches_the_wire_when_stderr_is_the_same_pipe(agent: Agent) -> None:
    out, _ = agent.run("noise", "errors", stderr=subprocess.STDOUT)

    assert out == ECHOES


@pytest.mark.covers("R1-3")
def test_nothing_but_frames_reaches_a_file_that_is_both_outputs(
    agent: Agent, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        agent.run("noise", "errors", stdout=file, stderr=file)

    assert path.read_bytes() == ECHOES


@pytest.mark.covers("FF-09")
def test_children_do_not_eat_frames(agent: Agent) -> None:
    agent.run("noise", data=b"".join(b"%d\n" % n for n in range(10)))

    assert agent.report["seen"] == [str(n) for n in range(10)]


def test_text_that_was_printed_before_but_not_flushed_goes_to_standard_error(
    agent: Agent,
) -> None:
    out, err = agent.run("import")

    assert out == ECHOES
    assert err.decode().startswith("printed before")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_printing_never_fails_whatever_the_encoding(agent: Agent, encoding: str) -> None:
    out, err = agent.run("noise", env={"PYTHONIOENCODING": encoding})

    assert out == ECHOES
    assert b"noise by print, " in err


def test_securing_early_and_often_is_the_same_as_once(agent: Agent) -> None:
    out, err = agent.run("early")

    assert out == ECHOES
    assert err == b"printed early\n"


def test_children_inherit_nothing_but_the_null_device_and_standard_error(agent: Agent) -> None:
    agent.run("descriptors", stderr=subprocess.DEVNULL)

    links = {
        line.split()[-3]: line.split()[-1]
        for line in agent.report["descriptors"].splitlines()
        if " -> " in line
    }
    assert links["0"] == "/dev/null"
    # 1 and 2 are `capture_output`'s pipes, 3 is the folder that is listed.
    assert set(links) <= {"0", "1", "2", "3"}


def test_there_is_one_such_transport_in_a_process(agent: Agent) -> None:
    agent.run("again")

    assert agent.report["again"].startswith("LocalProtocolError: standard input and output")


# ------------------------------------------------------------------ kinds of descriptors


@pytest.mark.covers("R1-19")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_agent_answers_what_it_has_read_and_exits_at_the_end_of_input(
    agent: Agent, loop: str
) -> None:
    out, _ = agent.run(loop, data=b"a\nb")

    assert out == ECHOES
    assert agent.report["ended"]
    assert agent.report["error"] is None


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_files_are_read_and_written(agent: Agent, tmp_path: Path, loop: str) -> None:
    (tmp_path / "in").write_bytes(b"a\nb")
    (tmp_path / "out").write_bytes(b"")
    with (tmp_path / "in").open("rb") as given, (tmp_path / "out").open("wb") as taken:
        agent.run("noise", loop, stdin=given, stdout=taken)

    assert (tmp_path / "out").read_bytes() == ECHOES


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_null_device_is_an_end_of_input(agent: Agent, loop: str) -> None:
    out, _ = agent.run(loop, stdin=subprocess.DEVNULL)

    assert out == b"after the end\n"


@pytest.mark.parametrize("words", [(), ("early",)])
@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]], ids=str)
def test_closed_descriptors_are_survived(
    agent: Agent, closed: list[int], words: tuple[str, ...], tmp_path: Path
) -> None:
    code = "; ".join(f"os.close({fd})" for fd in closed)
    command = f"import os, sys; {code}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with (tmp_path / "in").open("wb+") as given, (tmp_path / "out").open("wb") as out:
        given.write(b"a\nb\n")
        given.seek(0)
        done = subprocess.run(
            [sys.executable, "-c", command, AGENT, *words],
            env={**os.environ, "REPORT": str(tmp_path / "report")},
            stdin=given,
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=20,
        )

    assert done.returncode == 0, done.stderr
    assert agent.report["ended"]
    assert agent.report["seen"] == ([] if 0 in closed else ["a", "b"])
    expected = b"after the end\n" if 0 in closed else ECHOES
    assert (tmp_path / "out").read_bytes() == (b"" if 1 in closed else expected)


def test_a_number_that_was_closed_and_is_somebody_elses_now_is_left_alone(
    agent: Agent, tmp_path: Path
) -> None:
    command = (
        "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, AGENT, "occupied"],
        env={**os.environ, "REPORT": str(tmp_path / "report")},
        capture_output=True,
        timeout=20,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == b"after the end\n"
    assert agent.report["seen"] == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_terminal_carries_frames_and_no_noise(agent: Agent, loop: str) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    process = agent.start("noise", "ready", loop, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    agent.until(lambda report: True)
    os.write(master, b"a\nb\n")

    assert read_until(master, b"echo b\n") == b"echo a\necho b\n"

    os.close(master)
    assert process.wait(20) == 0
    assert agent.report["ended"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("errors_too", [False, True])
def test_one_socket_is_both_input_and_output(agent: Agent, errors_too: bool, loop: str) -> None:
    here, there = socket.socketpair()
    agent.start(
        "noise",
        "errors",
        loop,
        stdin=there,
        stdout=there,
        stderr=there if errors_too else subprocess.PIPE,
    )
    here.sendall(b"a\n")
    assert read_until(here.fileno(), b"\n") == b"echo a\n"
    here.sendall(b"b\n")
    here.shutdown(socket.SHUT_WR)

    assert read_until(here.fileno(), b"end\n") == b"echo b\nafter the end\n"

    assert os.get_blocking(there.fileno())
    here.close()
    there.close()


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("shared", [False, True])
def test_flags_of_descriptions_that_others_hold_are_never_changed(
    agent: Agent, shared: bool, loop: str
) -> None:
    from_us, to_agent = os.pipe()
    to_us, from_agent = os.pipe()
    agent.start(
        loop,
        stdin=from_us,
        stdout=from_agent,
        stderr=subprocess.STDOUT if shared else subprocess.PIPE,
    )
    os.write(to_agent, b"a\n")
    assert read_until(to_us, b"\n") == b"echo a\n"
    os.write(to_agent, b"big\n")
    agent.until(lambda report: "big" in report["seen"])

    assert os.get_blocking(from_us)
    assert os.get_blocking(from_agent)

    os.close(to_agent)
    read_until(to_us, b"after the end\n")
    for fd in (from_us, to_us, from_agent):
        os.close(fd)


# ------------------------------------------------------------------ slow and dead clients


@pytest.mark.covers("FF-10")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_does_not_read_delays_only_what_is_written_to_it(
    agent: Agent, kind: str, loop: str
) -> None:
    here, there = socket.socketpair()
    process = agent.start(
        loop, stdin=subprocess.PIPE, stdout=there if kind == "socket" else subprocess.PIPE
    )
    there.close()
    assert process.stdin is not None
    process.stdin.write(b"big\n")
    process.stdin.flush()
    agent.until(lambda report: report["seen"] == ["big"])

    process.stdin.write(b"a\n")
    process.stdin.flush()
    agent.until(lambda report: report["seen"] == ["big", "a"])
    fd = here.fileno() if kind == "socket" else process.stdout.fileno()  # type: ignore[union-attr]
    assert read_until(fd, b"a\n") == b"x" * (1 << 20) + b"\necho a\n"
    process.stdin.write(b"b\n")
    process.stdin.flush()
    assert read_until(fd, b"b\n") == b"echo b\n"

    agent.until(lambda report: report["room"] == ["pause", "resume"])
    here.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_takes_no_more_is_lost_after_what_it_sent(agent: Agent, loop: str) -> None:
    process = agent.start(loop, "ready", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    agent.until(lambda report: True)
    process.stdout.close()
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()

    assert process.wait(20) == 0
    assert agent.report["seen"] == ["a", "b"]
    assert agent.report["error"] == (
        "ConnectionClosed: the client no longer takes our output: Broken pipe"
    )


def test_closing_waits_for_a_slow_client_and_then_gives_up(agent: Agent) -> None:
    process = agent.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"big\nbye\n")
    process.stdin.flush()
    start = time.monotonic()

    assert process.wait(20) == 0

    assert 1.5 < time.monotonic() - start < 5


def test_a_cancelled_close_gives_up_at_once(agent: Agent) -> None:
    process = agent.start("cancel", "ready", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    agent.until(lambda report: True)
    process.stdin.write(b"big\nbye\n")
    process.stdin.flush()
    start = time.monotonic()

    assert process.wait(20) == 0

    assert time.monotonic() - start < 1
    assert agent.report["cancelled"]


def test_what_was_sent_is_written_before_closing(agent: Agent) -> None:
    process = agent.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = process.communicate(b"big\na\nbye\n", timeout=20)

    assert out == b"x" * (1 << 20) + b"\necho a\n"
    assert agent.report["error"] is None
    assert process.returncode == 0


def test_an_agent_can_be_ended_by_a_signal_at_any_time(agent: Agent) -> None:
    process = agent.start("ready", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    agent.until(lambda report: True)
    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == -signal.SIGTERM
