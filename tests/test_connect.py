"""Joining sides: agents as processes that start, fail, end; stdio served; one agent, many clients."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, cast

import pytest

from antiphon import (
    Agent,
    AuthRequired,
    Capabilities,
    Client,
    ConnectionClosed,
    Limits,
    LocalProtocolError,
    MissingExtra,
    RequestError,
    StartError,
    Turn,
    VersionMismatch,
    connect,
    serve,
    spawn,
)
from antiphon.schema import v1
from antiphon.testing import raw_pair
from antiphon.transports import ProcessTransport, memory_pair

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

# An agent of ours, as a user writes it.
AGENT = """
import asyncio, os, sys
from antiphon import Agent, Turn, serve_stdio, run_stdio

class Echo(Agent):
    info = ("echo", "1")

    async def prompt(self, turn: Turn) -> None:
        if turn.text == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if turn.text == "wait":
            await turn.say("waiting")
            await turn.wait_cancelled()
        elif turn.text == "loop":
            await turn.say(type(asyncio.get_running_loop()).__module__.split(".")[0])
        elif turn.text == "where":
            await turn.say(f"{os.getcwd()} {os.environ.get('WHAT')}")
        else:
            print("noise on stdout")
            print("a line of log", file=sys.stderr, flush=True)
            await turn.say("echo: " + turn.text)
"""
SERVE = "\nserve_stdio(Echo())\n"


def written(folder: Path, code: str) -> list[str]:
    """The command that runs this code."""
    path = folder / "agent.py"
    path.write_text(code, encoding="utf-8")
    return [sys.executable, str(path)]


def odd(code: str) -> list[str]:
    """The command of a program that is no agent of ours; starts fast."""
    return [sys.executable, "-S", "-c", f"import sys, time\n{code}"]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def run(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# ------------------------------------------------------------------ agents that do not come up


async def failing(argv: list[str], **limits: float) -> tuple[StartError, float]:
    """The error of an agent that cannot be started, and how long it took."""
    before = time.monotonic()
    with pytest.raises(StartError) as failed:
        async with spawn(argv, limits=Limits(**cast("Any", {"startup_timeout": 20, **limits}))):
            raise AssertionError
    return failed.value, time.monotonic() - before


async def test_a_command_that_does_not_exist_is_named_at_once() -> None:
    error, took = await failing(["no-such-agent-anywhere", "--acp"])
    assert "no-such-agent-anywhere" in str(error)
    assert error.command == ["no-such-agent-anywhere", "--acp"]
    assert error.exit_status is None
    assert took < 2


async def test_a_directory_that_does_not_exist_is_told_apart_from_the_command(
    tmp_path: Path,
) -> None:
    with pytest.raises(StartError, match="nowhere") as failed:
        await spawn([sys.executable], cwd=tmp_path / "nowhere")
    assert "director" in str(failed.value)


async def test_one_that_exits_at_once_shows_its_status_and_its_last_words() -> None:
    argv = odd("print('config missing: api_key', file=sys.stderr); sys.exit(3)")
    error, took = await failing(argv)
    assert error.exit_status == 3
    assert "config missing: api_key" in error.stderr_tail
    assert "config missing: api_key" in str(error)
    assert "exit status 3" in str(error)
    assert error.command == argv
    assert not error.timed_out
    assert took < 10


async def test_one_that_prints_a_sentence_and_exits_shows_the_sentence() -> None:
    """Quirk 5: one agent prints one sentence on stdout in place of the protocol."""
    error, _ = await failing(odd("print('Please run: agent login'); sys.exit(0)"))
    assert error.exit_status == 0
    assert "Please run: agent login" in str(error)


@pytest.mark.covers("FF-39")
async def test_one_that_stays_silent_is_ended_at_the_start_up_time() -> None:
    argv = odd("sys.stdin.read(1); sys.stdin.read()")
    error, took = await failing(argv, startup_timeout=0.3)
    assert "no answer to initialize within 0.3 s" in str(error)
    assert error.timed_out
    assert error.command == argv
    assert took < 10


async def test_one_that_prints_a_banner_and_falls_silent_shows_the_banner() -> None:
    code = "print('== Welcome to Agent ==', flush=True); print('> ', flush=True); sys.stdin.read()"
    error, _ = await failing(odd(code), startup_timeout=0.5)
    assert "no answer to initialize" in str(error)
    assert "== Welcome to Agent ==" in str(error)


async def test_one_that_closes_its_output_and_lives_on_is_ended() -> None:
    error, took = await failing(odd("import os; os.close(1); sys.stdin.read()"))
    assert "closed its output" in str(error)
    assert took < 10


def answering(answer: dict[str, Any]) -> list[str]:
    """An agent that gives this answer to its first request."""
    return odd(
        "import json\n"
        "message = json.loads(sys.stdin.readline())\n"
        f"answer = {{'jsonrpc': '2.0', 'id': message['id'], **{answer!r}}}\n"
        "print(json.dumps(answer), flush=True)\n"
        "sys.stdin.read()"
    )


@pytest.mark.covers("R1-27")
async def test_one_of_another_version_is_ended_and_the_versions_are_said() -> None:
    with pytest.raises(VersionMismatch, match="version 2"):
        await spawn(answering({"result": {"protocolVersion": 2}}))


async def test_one_that_refuses_is_ended_and_its_reason_is_said() -> None:
    refusal = {"error": {"code": -32000, "message": "no key", "data": {"env": "KEY"}}}
    with pytest.raises(AuthRequired, match="no key"):
        await spawn(answering(refusal))


@pytest.mark.parametrize("argv", ["agent --acp", b"agent"])
async def test_a_command_line_in_one_string_is_a_mistake_that_is_explained(argv: Any) -> None:
    with pytest.raises(TypeError, match=r"shlex\.split"):
        spawn(argv)


async def test_a_failed_start_leaves_no_recording_open(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        await spawn(["no-such-agent-anywhere"], record=tmp_path / "wire")
    assert (tmp_path / "wire").read_bytes() == b""
    with pytest.raises(FileNotFoundError):
        await spawn([sys.executable], record=tmp_path / "nowhere" / "wire")

    class Broken(Client):
        def observers(self, peer: Any) -> Any:
            raise ZeroDivisionError

    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            await spawn([sys.executable], client=Broken(), record=tmp_path / "wire")
        gc.collect()
    assert [str(warning.message) for warning in left] == []


# ------------------------------------------------------------------ a whole life


async def test_an_agent_is_started_prompted_watched_and_ended(tmp_path: Path) -> None:
    lines: list[str] = []
    record = tmp_path / "wire.ndjson"
    argv = written(tmp_path, AGENT + SERVE)
    env = {**os.environ, "WHAT": "that"}
    folder = tmp_path / "place"
    folder.mkdir()
    async with spawn(argv, cwd=folder, env=env, stderr=lines.append, record=record) as agent:
        pid = agent.process.pid
        assert not gone(pid)
        assert agent.process.exit_status is None
        assert agent.info == v1.Implementation(name="echo", version="1")
        assert "agent.py" in repr(agent) or str(pid) in repr(agent)
        session = await agent.new_session(cwd=tmp_path)
        assert (await session.prompt("hi")).text == "echo: hi"
        assert (await session.prompt("where")).text == f"{folder.resolve()} that"
        async with session.prompt("wait") as turn:
            async for update in turn:
                assert update.text == "waiting"
                await turn.cancel()
        assert turn.stop_reason == "cancelled"
    assert agent.process.exit_status == 0
    assert gone(pid)
    # What it printed went to standard error, and none of it into the protocol.
    assert "noise on stdout" in lines
    assert "a line of log" in agent.process.stderr_tail
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    recorded = [json.loads(line) for line in record.read_bytes().splitlines()]
    assert recorded[0]["dir"] == "out"
    assert all(isinstance(line["frame"], dict) for line in recorded)
    methods = [line["frame"]["method"] for line in recorded if line["dir"] == "out"]
    prompts = ["session/prompt"] * 3
    assert methods == ["initialize", "session/new", *prompts, "session/cancel"]


async def test_an_agent_that_dies_in_a_turn_fails_it_with_its_status_and_last_words(
    tmp_path: Path,
) -> None:
    async with spawn(written(tmp_path, AGENT + SERVE)) as agent:
        session = await agent.new_session(cwd=tmp_path)
        with pytest.raises(ConnectionClosed) as died:
            await session.prompt("die")
        assert died.value.exit_status == 7
        assert "last words" in died.value.stderr_tail
        with pytest.raises(ConnectionClosed, match="last words"):
            await agent.new_session(cwd=tmp_path)
        await agent.wait_closed()


async def test_a_connection_can_be_awaited_and_closed_by_hand(tmp_path: Path) -> None:
    agent = await spawn(written(tmp_path, AGENT + SERVE))
    assert (await (await agent.new_session()).prompt("x")).stop_reason == "end_turn"
    await asyncio.gather(agent.aclose(), agent.aclose())
    await agent.aclose()
    assert agent.process.exit_status == 0
    with pytest.raises(ConnectionClosed):
        await agent.new_session()


# ------------------------------------------------------------------ serving stdio


INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
NEW: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 2,
    "method": "session/new",
    "params": {"cwd": "/", "mcpServers": []},
}


def lines(*messages: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


@pytest.mark.covers("R1-17", "R1-19", "FF-36")
@pytest.mark.parametrize("start", [SERVE, "\nasyncio.run(run_stdio(Echo()))\n"])
def test_piped_requests_are_all_answered_and_the_end_of_input_is_the_end(
    tmp_path: Path, start: str
) -> None:
    done = subprocess.run(
        written(tmp_path, AGENT + start),
        input=lines(INITIALIZE, NEW)[:-1],  # even without a last line end
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[0]["result"]["agentInfo"] == {"name": "echo", "version": "1"}
    assert answers[1]["result"]["sessionId"]


class Piped:
    """A process whose lines are read as they come."""

    def __init__(self, argv: list[str]) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def send(self, *messages: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(lines(*messages))
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return cast("dict[str, Any]", json.loads(self.process.stdout.readline()))


def prompt(session_id: str, text: str) -> dict[str, Any]:
    params = {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}
    return {"jsonrpc": "2.0", "id": 3, "method": "session/prompt", "params": params}


def test_the_end_of_input_ends_a_turn_that_waits_for_it(tmp_path: Path) -> None:
    with Piped(written(tmp_path, AGENT + SERVE)) as agent:
        agent.send(INITIALIZE, NEW)
        agent.line()
        agent.send(prompt(agent.line()["result"]["sessionId"], "quick"))
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert agent.line()["params"]["update"]["content"]["text"] == "echo: quick"
        assert agent.line()["result"] == {"stopReason": "end_turn"}
        assert agent.process.wait(20) == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_ends_an_agent_well_in_a_turn_or_out_of_one(
    tmp_path: Path, signal_number: signal.Signals, busy: bool
) -> None:
    with Piped(written(tmp_path, AGENT + SERVE)) as agent:
        agent.send(INITIALIZE, NEW)
        agent.line()
        session_id = agent.line()["result"]["sessionId"]
        if busy:
            agent.send(prompt(session_id, "wait"))
            agent.line()
        agent.process.send_signal(signal_number)
        assert agent.process.wait(20) == 0
        assert agent.process.stderr is not None
        assert b"Traceback" not in agent.process.stderr.read()


async def test_an_agent_can_run_on_uvloop(tmp_path: Path) -> None:
    argv = written(tmp_path, AGENT + "\nserve_stdio(Echo(), uvloop=True)\n")
    async with spawn(argv) as agent:
        session = await agent.new_session()
        assert (await session.prompt("loop")).text == "uvloop"
    assert agent.process.exit_status == 0


def test_uvloop_that_is_not_installed_is_said_with_what_to_install(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['uvloop'] = None\n"
    done = subprocess.run(
        written(tmp_path, code + AGENT + "\nserve_stdio(Echo(), uvloop=True)\n"),
        input=b"",
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert b'pip install "antiphon[fast]"' in done.stderr
    assert MissingExtra.__name__.encode() in done.stderr
    assert done.stdout == b""


# ------------------------------------------------------------------ connecting to anything else


class Whose(Agent):
    """Says which of its sessions it was asked in, and by whom."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def prompt(self, turn: Turn) -> None:
        self.turns.append(turn)
        await turn.say(f"{turn.cwd} for {turn.peer.info and turn.peer.info.name}")
        if turn.text == "wait":
            await turn.wait_cancelled()


async def test_one_agent_serves_two_clients_that_know_nothing_of_each_other() -> None:
    agent = Whose()
    pairs = [memory_pair() for _ in range(2)]
    serving = [asyncio.create_task(serve(agent, theirs)) for _, theirs in pairs]

    class Named(Client):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.info = (name, "1")  # type: ignore[misc]

    async with (
        connect(pairs[0][0], client=Named("one")) as one,
        connect(pairs[1][0], client=Named("two")) as two,
    ):
        first, second = await one.new_session(cwd="/one"), await two.new_session(cwd="/two")
        assert (await first.prompt("x")).text == "/one for one"
        assert (await second.prompt("x")).text == "/two for two"
        # A session is known on its own connection alone, and so is its cancellation.
        async with first.prompt("wait") as turn:
            assert (await anext(turn)).text == "/one for one"
            await two.notify(v1.CancelNotification(session_id=first.session_id))
            with pytest.raises(RequestError) as unknown:
                await two.request(v1.PromptRequest(session_id=first.session_id, prompt=[]))
            assert unknown.value.code == -32002
            assert (await second.prompt("x")).stop_reason == "end_turn"
            await turn.cancel()
            assert [update async for update in turn] == []
        await one.aclose()
        assert (await second.prompt("x")).text == "/two for two"
    await asyncio.wait_for(asyncio.gather(*serving), 10)
    assert {id(turn.peer) for turn in agent.turns} == {
        id(agent.turns[0].peer),
        id(agent.turns[1].peer),
    }


class Guarded(Agent):
    capabilities = Capabilities(auth_methods=[v1.AuthMethodAgent(id="key", name="Key")])

    def __init__(self) -> None:
        self.signed: list[str] = []

    async def authenticate(self, params: Any, ctx: Any) -> v1.AuthenticateResponse:
        self.signed.append(params.method_id)
        return v1.AuthenticateResponse()


async def test_signing_in_is_part_of_connecting_where_it_is_asked_for() -> None:
    agent = Guarded()
    for method, fails in (("key", False), ("other", True)):
        ours, theirs = memory_pair()
        serving = asyncio.create_task(serve(agent, theirs))
        if fails:
            with pytest.raises(RequestError) as refused:
                await connect(ours, authenticate=method)
            assert refused.value.code == -32602
        else:
            async with connect(ours, authenticate=method) as peer:
                assert agent.signed == ["key"]
                await peer.new_session()
        await asyncio.wait_for(serving, 10)  # the link is closed in both cases
    assert agent.signed == ["key"]


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize("method", [None, "key"])
async def test_nothing_is_repeated_and_nobody_signs_in_unasked(method: str | None) -> None:
    """However often the agent wants a sign-in: one at most, right after the handshake, if asked for."""
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours, authenticate=method)))
        methods = {"authMethods": [{"id": "key", "name": "Key"}]}
        raw.answer(await raw.wait("initialize"), {"protocolVersion": 1, **methods})
        if method is not None:
            raw.answer(await raw.wait("authenticate"), {})
        async with await connecting as peer:
            for number in (1, 2):
                opening = asyncio.create_task(peer.new_session(cwd="/"))
                raw.refuse(await raw.wait("session/new", number), -32000, "sign in")
                with pytest.raises(AuthRequired, match="sign in"):
                    await opening
            opening = asyncio.create_task(peer.new_session(cwd="/"))
            raw.answer(await raw.wait("session/new", 3), {"sessionId": "s"})
            prompting = asyncio.create_task((await opening).prompt("go"))
            raw.refuse(await raw.wait("session/prompt"), -32000, "sign in")
            with pytest.raises(AuthRequired, match="sign in"):
                await prompting
            await raw.round_trip()
        counts = {name: len(raw.sent(name)) for name in ("authenticate", "session/prompt")}
        assert counts == {"authenticate": int(method is not None), "session/prompt": 1}
        assert len(raw.sent("session/new")) == 3


async def test_a_terminal_login_is_not_part_of_connecting() -> None:
    methods = [{"type": "terminal", "id": "t", "name": "T"}]
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours, authenticate="t")))
        request = await raw.wait("initialize")
        raw.answer(request, {"protocolVersion": 1, "authMethods": methods})
        with pytest.raises(LocalProtocolError, match="terminal login"):
            await connecting
        await asyncio.wait_for(raw.lost.wait(), 5)


STUBBORN = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
request = json.loads(sys.stdin.readline())
print(json.dumps({"id": request["id"], "result": {"protocolVersion": 1}}), flush=True)
time.sleep(60)
"""


@pytest.mark.covers("FF-36")
async def test_cancelling_the_end_of_a_block_kills_the_agent_at_once() -> None:
    transport = ProcessTransport([sys.executable, "-c", STUBBORN], stdin_grace=20, term_grace=20)
    leaves = asyncio.Event()

    async def lives() -> None:
        async with connect(transport):
            leaves.set()

    life = asyncio.create_task(lives())
    await leaves.wait()
    begin = time.monotonic()
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    await transport.aclose()

    assert time.monotonic() - begin < 10
    assert transport.exit_status == -signal.SIGKILL


async def test_an_error_in_the_block_closes_the_link_and_passes_through() -> None:
    ours, theirs = memory_pair()
    serving = asyncio.create_task(serve(Whose(), theirs))
    with pytest.raises(ZeroDivisionError):
        async with connect(ours):
            raise ZeroDivisionError
    await asyncio.wait_for(serving, 10)


async def test_the_block_can_be_left_while_a_turn_is_open() -> None:
    agent = Whose()
    ours, theirs = memory_pair()
    serving = asyncio.create_task(serve(agent, theirs))
    async with connect(ours) as peer:
        session = await peer.new_session()
        turn = asyncio.ensure_future(run(session.prompt("wait")))
        await anext(session.updates())
    with pytest.raises(ConnectionClosed):
        await turn
    await asyncio.wait_for(serving, 10)
    assert agent.turns[0].cancelled
    assert agent.turns[0].over


# What an editor that starts an agent need not wait for: the client's side, and what only some agents
# use or only odd frames need. Nothing of it may come back with a feature for somebody else.
NEEDLESS = {
    *("antiphon._client", "antiphon._launch", "antiphon._process", "antiphon._recording"),
    *("antiphon._serving", "antiphon._workers", "antiphon.content", "antiphon.schema._forgiving"),
    *("antiphon.sessions._agent_peer", "antiphon.sessions._attachment"),
    *("antiphon.sessions._client_router", "antiphon.sessions._durability"),
    *("antiphon.sessions._inbox", "antiphon.sessions._pieces", "antiphon.sessions._session"),
    *("antiphon.sessions._terminal", "antiphon.sessions._view"),
    *("antiphon.journal", "antiphon.services", "antiphon.sync", "antiphon.testing"),
    *("concurrent.futures.thread", "dataclasses", "hashlib", "json", "pathlib", "queue", "random"),
    *("secrets", "shutil", "sqlite3", "tempfile", "urllib.parse"),
}


def test_an_agent_that_has_answered_initialize_has_loaded_only_what_it_serves_with(
    tmp_path: Path,
) -> None:
    code = f"""
import sys
sys.path[1:1] = {[path for path in sys.path if path]!r}
from antiphon import Agent, RequestError, serve_stdio
from antiphon.schema import _codec

class Plain(Agent):
    async def new_session(self, params, ctx):  # the request after that
        made = sorted(kind.__name__ for kind in _codec._decoders)
        raise RequestError(-32000, "loaded", [sorted(sys.modules), made])

serve_stdio(Plain())
"""
    python, program = written(tmp_path, code)
    # -I and -S: neither the environment nor what is installed beside us loads anything.
    with Piped([python, "-I", "-S", program]) as agent:
        agent.send(INITIALIZE, NEW)
        assert "result" in agent.line()
        modules, decoders = agent.line()["error"]["data"]

    loaded = set(modules)
    assert {"antiphon.sessions._agent_router", "asyncio", "msgspec"} <= loaded
    assert sorted(loaded & NEEDLESS) == []
    # The types behind a decoder are looked into when it is made, which takes up to a millisecond.
    assert decoders == ["CancelNotification", "InitializeRequest", "NewSessionRequest"]


def test_who_keeps_no_journal_loads_none() -> None:
    code = """
import asyncio, sys
from antiphon import Agent, connect, serve
from antiphon.transports import memory_pair

class Echo(Agent):
    async def prompt(self, turn):
        await turn.say(turn.text)

async def main():
    here, there = memory_pair()
    serving = asyncio.create_task(serve(Echo(), there))
    async with connect(here) as agent:
        session = await agent.new_session(cwd="/")
        print((await session.prompt("hi")).text)
    await serving
    print([name for name in sys.modules if name == "sqlite3" or "journal" in name])

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=20
    )

    assert done.stdout == "hi\n[]\n"
