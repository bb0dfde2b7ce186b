"""Field faults 35 to 41: trees of processes, shutdown, standard error, starts, environments, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.cli.command import antiphon, environment, left_by, odd
from tests.faults.wires import (
    begun,
    opened,
    raw_agent,
    raw_client,
)

from antiphon import Client, Limits, StartError, connect, spawn
from antiphon.services import Terminals
from antiphon.transports import ProcessTransport, inherit_env

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
PYTHON = [sys.executable, "-S", "-c"]

#: Answers the handshake, whatever else it does.
HELLO = """
import json, os, signal, subprocess, sys, time
def serve(wait):
    request = json.loads(sys.stdin.readline())
    print(json.dumps({"id": request["id"], "result": {"protocolVersion": 1}}), flush=True)
    wait()
"""


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run."""
    found: list[int] = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def gone_within(pids: Iterable[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)  # nobody tells when a process of others ends
    return True


async def soon(condition: Any, seconds: float = 10.0) -> None:
    """Wait for something of which nothing tells."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------ 35

TREE = (
    HELLO
    + """
if "real" not in sys.argv:
    sys.exit(subprocess.call([sys.executable, "-S", "-c", os.environ["TREE"], "real"]))
tool = subprocess.Popen(["sleep", "60"])
away = subprocess.Popen(["sleep", "61"], start_new_session=True)
with open(os.environ["PIDS"] + ".new", "w") as file:
    json.dump([os.getppid(), os.getpid(), tool.pid, away.pid], file)
os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
serve(lambda: time.sleep(60))
"""
)
CLIENT = """
import asyncio, json, os, sys
from antiphon import spawn

async def main():
    async with spawn([sys.executable, "-S", "-c", os.environ["TREE"]]):
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def tree_environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TREE": TREE, "PIDS": str(folder / "pids")}


def end_the_one_that_left(pid: int) -> None:
    """What leaves the group by `setsid` cannot be followed, as the documentation says."""
    assert alive([pid]) == [pid]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("how", ["close", "exception", "cancelled task", "start too long"])
async def test_a_launcher_the_agent_and_its_tools_end_together(how: str, tmp_path: Path) -> None:
    env = tree_environment(tmp_path)
    silent = TREE.replace("serve(lambda: time.sleep(60))", "time.sleep(60)")
    pids: list[int] = []
    limits = Limits(startup_timeout=2.0 if how == "start too long" else 20.0)

    async def use() -> None:
        code = silent if how == "start too long" else TREE
        transport = ProcessTransport(
            [*PYTHON, code], env=env | {"TREE": code}, stdin_grace=0.2, term_grace=0.2
        )
        async with connect(transport, limits=limits):
            if how == "exception":
                raise LookupError
            if how == "cancelled task":
                await asyncio.Event().wait()

    using = asyncio.ensure_future(use())
    await soon((tmp_path / "pids").exists)
    pids.extend(json.loads((tmp_path / "pids").read_text()))
    if how == "cancelled task":
        await asyncio.sleep(0.1)
        using.cancel()
    await asyncio.wait([using])
    assert using.cancelled() or how == "close" or using.exception() is not None
    assert alive(pids[:3]) == []
    end_the_one_that_left(pids[3])


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_client_that_is_killed_leaves_no_agent(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=tree_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        pids = json.loads((tmp_path / "pids").read_text())
        client.send_signal(number)
        client.wait(20)
    assert gone_within(pids[:3], 8)
    end_the_one_that_left(pids[3])


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("verb", ["kill", "release", "close the session", "lose the agent"])
@pytest.mark.parametrize(
    "script",
    ["sleep 60 & wait", "sleep 60 & sleep 60 & exec sleep 60", "trap '' TERM; sleep 60 & wait"],
)
async def test_everything_that_a_terminal_has_started_ends_with_it(
    verb: str, script: str, tmp_path: Path
) -> None:
    terminals = Terminals(kill_grace=0.2)
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    async with raw_agent("memory", Client(terminals=terminals), capabilities) as (peer, raw):
        session = await opened(peer, raw, cwd=tmp_path)
        before = {p.pid for p in psutil.Process().children(recursive=True)}
        command = {"command": "/bin/sh", "args": ["-c", f"{script}"]}
        made = await raw.ask("terminal/create", {"sessionId": "s1", **command})
        told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}

        def started() -> set[int]:
            return {p.pid for p in psutil.Process().children(recursive=True)} - before

        await soon(lambda: len(started()) >= (3 if "exec" in script else 2))
        pids = started()
        if verb in ("kill", "release"):
            assert "result" in await raw.ask(f"terminal/{verb}", told)
            assert alive(pids) == []
        elif verb == "close the session":
            closing = begun(session.close())
            raw.answer(await raw.wait("session/close"), {})
            await closing
            assert alive(pids) == []
        else:
            await raw.aclose()
    assert alive(pids) == []


# ------------------------------------------------------------------ 36

SHUTDOWNS: dict[str, tuple[str, int]] = {
    # what it does then, how it ends
    "ends at the end of input": ("sys.stdin.read()", 0),
    "needs a while": (
        "sys.stdin.read(); time.sleep(0.3); open(os.environ['DONE'], 'w').close()",
        0,
    ),
    "ignores the end of input": ("time.sleep(60)", -15),
    "ignores TERM too": ("signal.signal(15, signal.SIG_IGN); time.sleep(60)", -9),
    "needs a while after TERM": (
        (
            "signal.signal(15, lambda *_: (time.sleep(0.2), open(os.environ['DONE'], 'w').close(), "
            "os._exit(5))); time.sleep(60)"
        ),
        5,
    ),
    "stopped": ("os.kill(os.getpid(), 19)", -9),
}


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("case", SHUTDOWNS)
async def test_closing_climbs_its_ladder_as_far_as_it_must(case: str, tmp_path: Path) -> None:
    does, status = SHUTDOWNS[case]
    code = HELLO + f"serve(lambda: ({does}))" if ";" not in does else None
    if code is None:
        code = HELLO + "serve(lambda: None)\n" + does
    transport = ProcessTransport(
        [*PYTHON, code],
        env={**os.environ, "DONE": str(tmp_path / "done")},
        stdin_grace=0.6,
        term_grace=0.4,
    )
    peer = await connect(transport)
    begin = time.monotonic()
    await asyncio.gather(*(peer.aclose() for _ in range(2)))
    assert time.monotonic() - begin < 6
    assert peer.process.exit_status == status
    assert (tmp_path / "done").exists() == ("a while" in case)
    await peer.aclose()


@pytest.mark.covers("FF-36")
async def test_an_agent_that_never_reads_is_not_waited_for_to_take_what_was_sent() -> None:
    code = HELLO + "serve(lambda: time.sleep(60))"
    transport = ProcessTransport([*PYTHON, code], stdin_grace=0.5, term_grace=0.5)
    async with connect(transport) as peer:
        for _ in range(20):
            asking = begun(peer.request_extension("_x/y", "x" * 100_000))
            await asyncio.sleep(0)
            asking.cancel()
        begin = time.monotonic()
    assert time.monotonic() - begin < 3
    assert peer.process.exit_status == -15


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("closing", [True, False])
def test_a_loop_that_ends_while_an_agent_is_being_ended_leaves_no_agent(closing: bool) -> None:
    code = HELLO + "signal.signal(15, signal.SIG_IGN)\nserve(lambda: time.sleep(60))"

    async def main() -> Any:
        grace = 30 if closing else 0.3
        transport = ProcessTransport([*PYTHON, code], stdin_grace=grace, term_grace=grace)
        peer = await connect(transport)
        if closing:
            task = asyncio.ensure_future(peer.aclose())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return peer.process.pid
        # Its owner is cancelled by the end of the loop, as by Ctrl-C.
        owner = asyncio.ensure_future(own(peer))
        await asyncio.sleep(0)
        assert not owner.done()
        return peer.process.pid

    async def own(peer: Any) -> None:
        async with peer:
            await asyncio.Event().wait()

    begin = time.monotonic()
    pid = asyncio.run(main())
    assert gone_within([pid], 2)
    assert time.monotonic() - begin < 5


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("start", ["run", "script"])
def test_what_was_asked_before_the_end_of_input_is_answered_and_the_exit_is_clean(
    start: str,
) -> None:
    frames: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": 1}},
        {"id": 2, "method": "session/new", "params": {"cwd": "/", "mcpServers": []}},
    ]
    command = ["-m", "antiphon", "run", "agent:agent"] if start == "run" else ["agent.py", "late"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=HERE,
        input="".join(json.dumps(frame) + "\n" for frame in frames).encode(),
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == [1, 2]
    assert all("result" in answer for answer in answers)


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_agent_that_is_told_to_go_in_a_turn_answers_and_goes(
    number: signal.Signals,
) -> None:
    command = [sys.executable, "-m", "antiphon", "run", "agent:agent"]
    async with spawn(command, cwd=HERE) as peer:
        session = await peer.new_session(cwd="/")
        async with session.prompt("wait") as turn:
            assert (await anext(turn)).text == "waiting"
            os.kill(peer.process.pid, number)
            begin = time.monotonic()
            with pytest.raises(Exception, match=r".*"):
                while True:
                    await anext(turn)
        assert time.monotonic() - begin < 8
    assert peer.process.exit_status in (0, 130, -2)


# ------------------------------------------------------------------ 37

STDERR: dict[str, str] = {
    "one line": "os.write(2, b'e' * 65536)",
    "no UTF-8": "os.write(2, b'\\xff\\xfe\\x80' * 20000)",
    "many lines": "os.write(2, b'line of text\\n' * 5000)",
    "control": "os.write(2, b'\\x1b[2J\\x00\\r\\n' * 8000)",
}


@pytest.mark.covers("FF-37")
@pytest.mark.parametrize("kind", STDERR)
@pytest.mark.parametrize("to", ["tail", "function", "file"])
async def test_five_mebibytes_of_standard_error_before_an_answer_delay_nothing(
    kind: str, to: str, tmp_path: Path
) -> None:
    write = f"written = 0\nwhile written < 5 << 20: written += {STDERR[kind]}"
    code = HELLO + write + "\nserve(lambda: None)\n" + write + "\nsys.stdin.read()"
    lines: list[str] = []

    where: Any = {
        "tail": None,
        "function": lines.append,
        "file": tmp_path / "err",
    }[to]
    async with spawn([*PYTHON, code], stderr=where) as peer:
        tail = peer.process.stderr_tail
        assert len(tail.encode()) <= 64 * 1024 * 3  # bad UTF-8 is replaced by three bytes
        if to == "file":
            assert (tmp_path / "err").stat().st_size >= 5 << 20
        if to == "function":
            assert max(map(len, lines)) <= 2 * 64 * 1024
    assert peer.process.exit_status == 0


@pytest.mark.covers("FF-37")
async def test_a_function_for_lines_that_always_fails_is_reported_once_and_delays_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(line: str) -> None:
        raise LookupError

    code = HELLO + "os.write(2, b'line of text\\n' * 200_000)\nserve(sys.stdin.read)"
    begin = time.monotonic()
    async with spawn([*PYTHON, code], stderr=failing):
        assert time.monotonic() - begin < 10
    assert [record.exc_info is not None for record in caplog.records].count(True) == 1


@pytest.mark.covers("FF-37")
async def test_so_for_a_terminal_whose_output_nobody_looks_at(tmp_path: Path) -> None:
    async with raw_agent("memory", Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        for fd in (1, 2):
            code = f"import os\nfor n in range(80): os.write({fd}, b'e' * 65536)"
            command = {"command": sys.executable, "args": ["-S", "-c", code]}
            made = await raw.ask("terminal/create", {"sessionId": "s1", **command})
            told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
            assert (await raw.ask("terminal/wait_for_exit", told))["result"]["exitCode"] == 0
            result = (await raw.ask("terminal/output", told))["result"]
            assert result["truncated"] is True
            assert len(result["output"]) <= 1 << 20
            await raw.ask("terminal/release", told)


# ------------------------------------------------------------------ 39


def a_script(folder: Path, first: str, mode: int = 0o755) -> str:
    path = folder / f"script{len(list(folder.iterdir()))}"
    path.write_text(f"{first}\n")
    path.chmod(mode)
    return str(path)


@pytest.mark.covers("FF-39")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("absent", "no-such-command-anywhere"),
        ("absent path", "/no/such/agent"),
        ("not executable", "not executable"),
        ("interpreter", "interpreter"),
        ("windows line ends", "interpreter"),
        ("folder", "directory|not executable|cannot start"),
        ("cwd missing", "working directory"),
        ("cwd a file", "working directory"),
    ],
)
async def test_a_start_that_cannot_be_says_at_once_what_is_wrong(
    what: str, words: str, tmp_path: Path
) -> None:
    commands: dict[str, list[str]] = {
        "absent": ["no-such-command-anywhere"],
        "absent path": ["/no/such/agent"],
        "not executable": [a_script(tmp_path, "#!/bin/sh", 0o644)],
        "interpreter": [a_script(tmp_path, "#!/no/such/interpreter")],
        "windows line ends": [a_script(tmp_path, "#!/bin/sh\r")],
        "folder": [str(tmp_path)],
    }
    cwd = {"cwd missing": tmp_path / "none", "cwd a file": tmp_path / "script0"}.get(what)
    begin = time.monotonic()
    with pytest.raises(StartError, match=words) as failed:
        await spawn(commands.get(what, [sys.executable]), cwd=cwd)
    assert time.monotonic() - begin < 2
    assert failed.value.exit_status is None
    assert not failed.value.timed_out


@pytest.mark.covers("FF-39")
@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("sys.exit('no API key')", 1, "no API key"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), 11)", -11, "signal 11"),
        ("print('usage: agent [--acp]'); sys.exit(2)", 2, "usage"),
        ("raise LookupError('deep inside')", 1, "deep inside"),
    ],
)
async def test_an_agent_that_ends_at_once_is_told_with_all_that_is_known(
    code: str, status: int, words: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(StartError, match=words) as failed:
        await spawn([*PYTHON, f"import os, sys; {code}"])
    assert time.monotonic() - begin < 5
    assert failed.value.exit_status == status
    assert failed.value.command[0] == sys.executable


@pytest.mark.covers("FF-39")
async def test_a_silent_agent_is_given_up_at_the_deadline_with_its_last_words() -> None:
    code = "import sys, time; sys.stderr.write('Loading model\\n'); sys.stderr.flush(); "
    code += "sys.stdout.write('\\x1b[?1049h'); sys.stdout.flush(); time.sleep(60)"
    begin = time.monotonic()
    with pytest.raises(StartError, match="Loading model") as failed:
        await spawn([*PYTHON, code], limits=Limits(startup_timeout=0.5))
    assert failed.value.timed_out
    assert "1049h" in str(failed.value)  # what a terminal program begins with
    assert time.monotonic() - begin < 7


@pytest.mark.covers("FF-39")
async def test_a_slow_first_start_is_waited_for() -> None:
    code = HELLO + "sys.stderr.write('downloading\\n'); time.sleep(1); serve(sys.stdin.read)"
    lines: list[str] = []
    async with spawn([*PYTHON, code], stderr=lines.append) as peer:
        assert peer.initialize_result.protocol_version == 1
    assert lines == ["downloading"]


@pytest.mark.covers("FF-39")
@pytest.mark.parametrize("cwd", [None, "", "relative", "./x", "~", "../x", 5, ...])
async def test_an_agent_refuses_a_session_without_an_absolute_directory(cwd: Any) -> None:
    from tests.faults.test_g1_framing import Echo

    params: dict[str, Any] = {"mcpServers": []}
    if cwd is not ...:
        params["cwd"] = cwd
    async with raw_client("memory", Echo()) as raw:
        assert (await raw.ask("session/new", params))["error"]["code"] == -32602


# ------------------------------------------------------------------ 41


async def sees(name: str, env: Any) -> str:
    """What an agent started with `env` has in a variable."""
    command = [sys.executable, "agent.py", "late"]
    async with spawn(command, cwd=HERE, env=env) as peer:
        session = await peer.new_session(cwd="/")
        outcome = await session.prompt(f"env {name}")
        return outcome.text.removesuffix(f"env {name}")


@pytest.mark.covers("FF-41")
async def test_an_agent_sees_a_secret_of_ours_only_where_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    monkeypatch.setenv("VENDOR_KEY", "2")
    assert await sees("SECRET_X", None) == "1"  # agents take their keys from there; documented
    assert await sees("SECRET_X", "essential") == "None"
    assert await sees("SECRET_X", inherit_env()) == "None"
    assert await sees("SECRET_X", inherit_env("SECRET_X")) == "1"
    assert await sees("VENDOR_KEY", inherit_env("VENDOR_*")) == "2"
    assert await sees("SECRET_X", inherit_env("VENDOR_*")) == "None"
    assert await sees("EXTRA", inherit_env(EXTRA="3")) == "3"
    assert await sees("PATH", "essential") == os.environ["PATH"]
    assert await sees("SECRET_X", {"EXTRA": "4"}) == "None"
    assert await sees("SECRET_X", {"SECRET_X": "5"}) == "5"
    for name in ("PATH", "HOME"):  # a mapping adds to what every program needs
        assert await sees(name, {"SECRET_X": "5"}) == os.environ[name]
    assert await sees("HOME", {"HOME": None}) == "None"


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize(
    ("given", "name", "seen"),
    [
        ([], "SECRET_X", "unset"),
        ([{"name": "SECRET_X", "value": "theirs"}], "SECRET_X", "theirs"),
        ([{"name": "A", "value": ""}], "A", ""),
        ([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], "A", "2"),
        ([{"name": "A", "value": "x=y\nz"}], "A", "x=y\nz"),
        ([], "PATH", os.environ["PATH"]),
    ],
)
async def test_a_terminal_sees_none_and_what_the_agent_gives_it(
    given: list[Any], name: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    async with raw_agent("memory", Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        command = {"command": "/bin/sh", "args": ["-c", f'printf %s "${{{name}-unset}}"']}
        made = await raw.ask("terminal/create", {"sessionId": "s1", "env": given, **command})
        told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
        await raw.ask("terminal/wait_for_exit", told)
        assert (await raw.ask("terminal/output", told))["result"]["output"] == seen
        await raw.ask("terminal/release", told)


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
async def test_a_variable_that_cannot_be_is_refused_and_nothing_started(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="environment variable"):
        await spawn([sys.executable], env={name: "x"})
    async with raw_agent("memory", Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        env = [{"name": name, "value": "x"}]
        answer = await raw.ask("terminal/create", {"sessionId": "s1", "command": "ls", "env": env})
        assert answer["error"]["code"] == -32602


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize(
    "words",
    [["a b"], ["a\\b"], ['say "hi"', "it's"], ["C:\\x y\\z", ""], ["*", "$HOME", ";", "\n"]],
)
async def test_arguments_arrive_as_they_are(words: list[str], tmp_path: Path) -> None:
    code = f"import json, sys; json.dump(sys.argv[1:], open({str(tmp_path / 'argv')!r}, 'w'))"
    with pytest.raises(StartError):
        await spawn([*PYTHON, code, *words])
    assert json.loads((tmp_path / "argv").read_text()) == words
    # and so from the command line of the command
    line = shlex.join([*PYTHON, code, *words])
    antiphon("prompt", "--agent", line, "go")
    assert json.loads((tmp_path / "argv").read_text()) == words


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("agent", ["waits_for_cancel", "deaf"])
def test_ctrl_c_in_a_terminal_cancels_the_turn_first_and_stops_hard_second(
    agent: str, tmp_path: Path
) -> None:
    """The terminal sends SIGINT to its whole foreground group; the agent is in another."""
    record = tmp_path / "wire"
    master, slave = pty.openpty()
    marked = environment()
    command = ["-m", "antiphon", "prompt", "--agent", odd(agent), "--record", str(record), "go"]
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=marked,
        preexec_fn=_own_terminal,  # noqa: PLW1509  (a test without threads)
    ) as process:
        os.close(slave)
        _read_until(master, b"working")
        os.write(master, b"\x03")
        if agent == "deaf":
            _wait_for(record, b"session/cancel")
            os.write(master, b"\x03")
        _read_until(master, None)
        process.wait(20)
    os.close(master)
    assert process.returncode == 130
    assert b"session/cancel" in record.read_bytes()
    assert time.monotonic() - begin < 12
    assert not left_by(marked)


def _own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _wait_for(path: Path, text: bytes) -> None:
    end = time.monotonic() + 10
    while text not in path.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.01)


def _read_until(master: int, text: bytes | None) -> None:
    """Read what is shown until `text`, or until the other end is closed."""
    data = b""
    while text is None or text not in data:
        ready, _, _ = select.select([master], [], [], 20)
        assert ready, data
        try:
            got = os.read(master, 65_536)
        except OSError:  # EIO: nobody has the other end any more
            return
        if not got:
            return
        data += got
