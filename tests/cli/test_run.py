"""`antiphon run`: the wire carries the protocol and nothing else, whatever the module does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.command import BOUND, COMMAND, antiphon, environment, left_by

if TYPE_CHECKING:
    from pathlib import Path

ADDRESSES = ["unix:agent.sock", "tcp:127.0.0.1:0"]
INITIALIZE = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":1}}\n'

NOISY = """
import os, subprocess, sys
print("at import")
os.write(1, b"raw at import\\n")
subprocess.run(["echo", "child at import"], check=True)

from antiphon import Agent, Turn

class Noisy(Agent):
    async def prompt(self, turn: Turn) -> None:
        print("in a handler")
        os.write(1, b"raw")
        subprocess.run(["echo", "child"], check=True)
        eaten = subprocess.run(["cat"], capture_output=True, check=True).stdout
        await turn.say(f"echo: {turn.text} {eaten!r}")

agent = Noisy()

def make():
    return Noisy()

def fails():
    raise ValueError("no model")

number = 5
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "noisy.py").write_text(NOISY)
    return tmp_path


def converse(folder: Path, what: str, *, stderr: int = subprocess.PIPE) -> tuple[bytes, bytes]:
    """A whole conversation; what was on the wire, and on standard error."""
    marked = environment()
    out = b""
    with subprocess.Popen(
        [*COMMAND, "run", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=folder,
        env=marked,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(number: int, method: str, **params: Any) -> Any:
            nonlocal out
            assert process.stdin is not None
            assert process.stdout is not None
            request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            while True:
                line = process.stdout.readline()
                out += line
                message = json.loads(line)
                if message.get("id") == number:
                    return message["result"]

        ask(0, "initialize", protocolVersion=1)
        session = ask(1, "session/new", cwd=str(folder), mcpServers=[])["sessionId"]
        text = {"type": "text", "text": "hi"}
        ended = ask(2, "session/prompt", sessionId=session, prompt=[text])
        assert ended["stopReason"] == "end_turn"
        process.stdin.close()
        out += process.stdout.read()
        err = b"" if process.stderr is None else process.stderr.read()
        assert process.wait(BOUND) == 0
    assert not left_by(marked)
    return out, err


@pytest.mark.parametrize("what", ["noisy:agent", "noisy:Noisy", "noisy:make", "noisy:make()"])
@pytest.mark.covers("R1-3", "FF-08")
def test_nothing_a_module_prints_reaches_the_wire(module: Path, what: str) -> None:
    out, err = converse(module, what)

    messages = [json.loads(line) for line in out.splitlines()]
    assert [message.get("id") for message in messages] == [0, 1, None, 2]
    assert messages[2]["params"]["update"]["content"]["text"] == "echo: hi b''"
    for words in (b"at import", b"raw at import", b"child at import", b"in a handler", b"child"):
        assert words in err


@pytest.mark.covers("R1-3")
def test_nothing_reaches_the_wire_where_standard_error_is_the_wire(module: Path) -> None:
    out, _ = converse(module, "noisy:agent", stderr=subprocess.STDOUT)

    assert len([json.loads(line) for line in out.splitlines()]) == 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no_such_module:agent", "No module named 'no_such_module'"),
        ("noisy:absent", "there is no 'absent' in 'noisy'; its agents: Noisy, agent"),
        ("noisy:number", "is no Agent but 'int'"),
        ("noisy:fails", "ValueError: no model"),
        ("broken:agent", "SyntaxError"),
        ("leaves:agent", "SystemExit"),
    ],
)
def test_an_agent_that_is_not_there_is_exit_code_1_with_one_line_and_why(
    module: Path, what: str, words: str
) -> None:
    (module / "broken.py").write_text("def")
    (module / "leaves.py").write_text("raise SystemExit(0)")

    ran = antiphon("run", what, cwd=module)

    assert ran.code == 1
    assert ran.out == ""
    assert words in ran.err
    assert ran.err.splitlines()[-1].startswith("antiphon run: ")


@pytest.mark.parametrize("what", ["noisy", "noisy.py:agent", ":agent", "noisy:", "a b:c"])
def test_what_is_no_module_and_agent_is_exit_code_2(module: Path, what: str) -> None:
    ran = antiphon("run", what, cwd=module)

    assert ran.code == 2
    assert "antiphon run: " in ran.err


@pytest.mark.covers("R1-19")
def test_the_end_of_input_right_after_a_request_still_answers_it(module: Path) -> None:
    ran = antiphon("run", "noisy:agent", cwd=module, stdin=INITIALIZE)

    assert ran.code == 0
    assert json.loads(ran.out)["result"]["agentInfo"]["name"] == "Noisy"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end(module: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "noisy:agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=module,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(INITIALIZE)
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=BOUND)

    assert process.returncode == 0
    assert b"Traceback" not in err


def test_the_current_folder_comes_first_on_the_path(module: Path) -> None:
    (module / "mine.py").write_text(
        "import pathlib, sys\n"
        "assert pathlib.Path(sys.path[0]) == pathlib.Path.cwd()\n"
        "from noisy import Noisy\n"
    )

    ran = antiphon("run", "mine:Noisy", cwd=module, stdin=INITIALIZE)

    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    "ending", ["serve_stdio(Noisy())", "import asyncio; asyncio.run(run_stdio(Noisy()))"]
)
def test_a_module_that_serves_by_itself_is_served_once(module: Path, ending: str) -> None:
    (module / "both.py").write_text(
        f"from antiphon import run_stdio, serve_stdio\nfrom noisy import Noisy\n{ending}\n"
    )

    out, err = converse(module, "both:Noisy")

    assert [json.loads(line).get("id") for line in out.splitlines()] == [0, 1, None, 2]
    assert b"both serves an agent by itself; left to this command" in err
    assert b"Traceback" not in err


# ------------------------------------------------------------------ on a socket


class Listening:
    """`antiphon run … --listen`, from the moment it can be connected to."""

    def __init__(self, folder: Path, what: str, address: str) -> None:
        self.marked = environment()
        self.process = subprocess.Popen(
            [*COMMAND, "run", what, "--listen", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=self.marked,
        )

    def __enter__(self) -> str:
        assert self.process.stderr is not None
        begin, _, address = self.process.stderr.readline().decode().strip().rpartition(" ")
        assert begin == "antiphon run: listening at"
        return address

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=BOUND)
        assert not left_by(self.marked)

    def end_by(self, number: signal.Signals) -> tuple[bytes, bytes]:
        self.process.send_signal(number)
        return self.process.communicate(timeout=BOUND)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_agent_is_served_to_many_on_a_socket(module: Path, address: str) -> None:
    listening = Listening(module, "noisy:agent", address)
    with listening as where:
        for number in range(2):
            ran = antiphon("prompt", "--connect", where, f"hi {number}", cwd=module)
            assert ran.code == 0, ran.err
            assert ran.out == f"echo: hi {number} b''"
        out, err = listening.end_by(signal.SIGTERM)

    assert listening.process.returncode == 0
    assert out.count(b"in a handler") == 2  # where nothing is the wire, print is just print
    assert err == b""
    assert not (module / "agent.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("address", ADDRESSES)
def test_a_signal_ends_what_listens_while_somebody_is_connected(
    module: Path, address: str, number: signal.Signals
) -> None:
    listening = Listening(module, "noisy:agent", address)
    with listening as where:
        kind, _, rest = where.partition(":")
        with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as client:
            host, _, port = rest.partition(":")
            client.connect(str(module / rest) if kind == "unix" else (host, int(port)))
            client.sendall(INITIALIZE)
            assert b'"protocolVersion":1' in client.recv(65536)
            _, err = listening.end_by(number)
            assert client.recv(65536) == b""

    assert listening.process.returncode == 0
    assert err == b""


def test_an_address_where_nothing_can_listen_is_exit_code_1(module: Path) -> None:
    with Listening(module, "noisy:agent", "unix:agent.sock"):
        taken = antiphon("run", "noisy:agent", "--listen", "unix:agent.sock", cwd=module)
    (module / "file").touch()
    file = antiphon("run", "noisy:agent", "--listen", "unix:file", cwd=module)

    assert (taken.code, file.code) == (1, 1)
    assert (
        taken.err == "antiphon run: cannot listen at unix:agent.sock: a server is listening there\n"
    )
    assert file.err.endswith("unix:file: it is no socket, and is left alone\n")
    assert (module / "file").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("agent.sock", "is no address: unix:PATH or tcp:HOST:PORT"),
        ("tcp:0.0.0.0:0", "other machines could connect"),
        ("tcp:127.0.0.1", "has no port"),
    ],
)
def test_what_is_no_address_to_listen_at_is_exit_code_2(
    module: Path, address: str, words: str
) -> None:
    ran = antiphon("run", "noisy:agent", "--listen", address, cwd=module)

    assert ran.code == 2
    assert words in ran.err


def test_a_module_that_listens_by_itself_is_served_once(module: Path) -> None:
    (module / "both.py").write_text(
        "from antiphon import serve_unix\n"
        "from noisy import Noisy\n"
        "serve_unix(Noisy(), 'agent.sock').run()\n"
    )

    ran = antiphon("run", "both:Noisy", cwd=module, stdin=INITIALIZE)

    assert ran.code == 0
    assert "both serves an agent by itself; left to this command" in ran.err
    assert not (module / "agent.sock").exists()


# ------------------------------------------------------------------ with a journal


def test_an_agent_keeps_its_sessions_where_the_command_says(module: Path) -> None:
    agent = f"{sys.executable} -m antiphon run noisy:agent --journal kept"

    ran = antiphon("prompt", "--agent", agent, "hi", cwd=module)
    listed = antiphon("journal", "ls", "kept", "--json", cwd=module)

    assert ran.code == 0, ran.err
    assert [json.loads(line)["records"] for line in listed.out.splitlines()] == [5]


@pytest.mark.parametrize("place", ["file", "file/journal"])
def test_a_journal_that_cannot_be_used_is_said_before_anything_is_served(
    module: Path, place: str
) -> None:
    (module / "file").write_text("no directory")

    ran = antiphon("run", "noisy:agent", "--journal", place, cwd=module)

    assert ran.code == 1
    assert "antiphon run: the journal cannot be used: " in ran.err
    assert "Traceback" not in ran.err
