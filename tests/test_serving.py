"""An agent that listens: who may connect, many at once, none harms another, and an end within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from antiphon import (
    Agent,
    AgentServer,
    ConnectionClosed,
    Limits,
    LocalProtocolError,
    StartError,
    Turn,
    connect,
    serve_tcp,
    serve_unix,
)
from antiphon import _serving as serving
from antiphon.transports import _listener, _socket

if TYPE_CHECKING:
    from collections.abc import Callable


class Echo(Agent):
    """Says what it is told."""

    async def prompt(self, turn: Turn) -> None:
        await turn.say(f"echo: {turn.text}")


class Slow(Agent):
    """Works until it is told to stop, or until it is let go."""

    def __init__(self) -> None:
        self.at_work = asyncio.Event()
        self.go = asyncio.Event()
        self.stubborn = False

    async def prompt(self, turn: Turn) -> None:
        self.at_work.set()
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        await turn.say("done")


Listen: TypeAlias = "Callable[..., AgentServer]"


@pytest.fixture(params=["unix", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> Listen:
    """Makes a server of either kind."""

    def make(agent: Any, **options: Any) -> AgentServer:
        if request.param == "unix":
            return serve_unix(agent, tmp_path / "s", **options)
        return serve_tcp(agent, **options)

    return make


async def ask(address: str, text: str = "hi", **options: Any) -> str:
    async with connect(address, **options) as agent:
        session = await agent.new_session(cwd="/")
        return (await session.prompt(text)).text


async def until(condition: Callable[[], object]) -> None:
    """Wait until it is so; the test's bound bounds it."""
    while not condition():
        await asyncio.sleep(0.005)


def plain(address: str) -> socket.socket:
    """A client that is none of ours."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address.removeprefix("unix:"))
        except OSError:
            sock.close()
            raise
        return sock
    host, port = address.removeprefix("tcp:").split(":")
    return socket.create_connection((host, int(port)))


def plain_family(address: str) -> socket.AddressFamily:
    return socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET


async def call(sock: socket.socket, number: int, method: str, **params: Any) -> bytes:
    """Ask something; the beginning of what comes then."""
    request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    sock.sendall(json.dumps(request).encode() + b"\n")
    return await asyncio.to_thread(sock.recv, 65536)


# ------------------------------------------------------------------ serving


async def test_a_client_is_served(listen: Listen, loop_factory: Any) -> None:
    async with listen(Echo()) as server:
        assert await ask(server.address) == "echo: hi"
        assert await ask(server.address, "again") == "echo: again"
        await until(lambda: not server.connections)


async def test_many_clients_are_served_at_once(listen: Listen, loop_factory: Any) -> None:
    async with listen(Echo()) as server:
        texts = await asyncio.gather(*(ask(server.address, str(n)) for n in range(100)))

    assert texts == [f"echo: {n}" for n in range(100)]


async def test_an_agent_is_shared_and_a_class_or_function_makes_one_for_each(
    listen: Listen,
) -> None:
    class Counting(Agent):
        def __init__(self) -> None:
            self.count = 0

        async def prompt(self, turn: Turn) -> None:
            self.count += 1
            await turn.say(str(self.count))

    shared = Counting()
    answers: dict[str, list[str]] = {}
    for name, agent in {"one": shared, "class": Counting, "function": lambda: shared}.items():
        async with listen(agent) as server:
            answers[name] = [await ask(server.address), await ask(server.address)]

    assert answers == {"one": ["1", "2"], "class": ["1", "1"], "function": ["3", "4"]}


async def test_the_links_are_told_with_who_is_there(listen: Listen) -> None:
    async with listen(Echo()) as server:
        assert not server.connections
        async with connect(server.address) as agent:
            [link] = server.connections
            assert link.info["kind"] == server.address.partition(":")[0]
            assert repr(server) == f"<AgentServer at {server.address}, 1 connections>"

            await link.aclose()

            await until(lambda: agent.connection.closed)
            await until(lambda: not server.connections)


async def test_a_connection_is_recorded_in_a_file_of_its_own(
    listen: Listen, tmp_path: Path
) -> None:
    seen: list[str] = []

    def note(direction: str, _: bytes) -> None:
        seen.append(direction)

    async with listen(Echo(), record=tmp_path / "wire.ndjson") as server:
        await ask(server.address)
        await ask(server.address)
    async with listen(Echo(), record=note) as server:
        await ask(server.address)

    for number in (1, 2):
        lines = (tmp_path / f"wire-{number}.ndjson").read_text().splitlines()
        assert json.loads(lines[0])["frame"]["method"] == "initialize"
    assert not (tmp_path / "wire.ndjson").exists()
    assert set(seen) == {"in", "out"}


async def test_the_options_of_serve_are_passed_on(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    async def note(agent: Agent, transport: Any, **options: Any) -> None:
        given.append(options)

    def telemetry(_: object) -> None: ...

    monkeypatch.setattr(serving, "serve", note)
    limits, journal = Limits(sessions=3), object()
    options = {"unstable": True, "telemetry": telemetry, "journal": journal}
    for more in (options, {}):
        async with listen(Echo(), limits=limits, **more) as server:
            plain(server.address).close()
            await until(lambda: len(given) == (1 if more else 2))  # noqa: B023

    assert given[0] == {**options, "limits": limits, "record": None}
    assert given[1] == {"unstable": False, "limits": limits, "record": None}


@pytest.mark.covers("R1-19")
async def test_a_client_that_ends_its_writing_side_gets_its_answers(
    listen: Listen,
) -> None:
    async with listen(Echo()) as server:
        with plain(server.address) as client:
            client.sendall(
                b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'
            )
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while data := await asyncio.to_thread(client.recv, 65536):
                answer += data

    assert json.loads(answer)["result"]["agentInfo"]["name"] == "Echo"


# ------------------------------------------------------------------ life


async def test_it_listens_when_it_is_entered_awaited_or_served_for_ever(
    listen: Listen,
) -> None:
    async with listen(Echo()) as entered:
        assert await ask(entered.address)
    awaited = await listen(Echo())
    assert await ask(awaited.address)
    await awaited.aclose()
    for_ever = listen(Echo())
    task = asyncio.create_task(for_ever.serve_forever())
    await until(lambda: not for_ever.address.endswith(":0"))
    await until(lambda: _listens(for_ever.address))
    assert await ask(for_ever.address)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _listens(for_ever.address)


async def test_one_whose_listening_is_not_wanted_after_all_listens_no_more(
    listen: Listen, tmp_path: Path
) -> None:
    told: list[str] = []

    def refuse(address: str) -> None:
        told.append(address)
        raise RuntimeError("not here")

    with pytest.raises(RuntimeError, match="not here"):
        await listen(Echo(), on_listening=refuse)

    assert not _listens(told[0])
    assert os.listdir(tmp_path) == []


def _listens(address: str) -> bool:
    with contextlib.suppress(OSError):
        plain(address).close()
        return True
    return False


async def test_serving_for_ever_ends_when_it_is_closed(listen: Listen) -> None:
    async with listen(Echo()) as server:
        task = asyncio.create_task(server.serve_forever())
        await asyncio.sleep(0)
        await server.aclose()
        await server.aclose()
        await task

        with pytest.raises(LocalProtocolError, match="was closed"):
            await server


async def test_a_server_that_was_never_opened_can_be_closed(
    listen: Listen,
) -> None:
    await listen(Echo()).aclose()


async def test_leaving_closes_those_who_do_nothing_at_once(
    listen: Listen,
) -> None:
    loop = asyncio.get_running_loop()
    async with listen(Echo()) as server:
        agents = [await connect(server.address) for _ in range(5)]
        session = await agents[0].new_session(cwd="/")
        assert (await session.prompt("hi")).text == "echo: hi"
        begin = loop.time()

    assert loop.time() - begin < 1
    for agent in agents:
        await agent.connection.wait_closed()
        await agent.aclose()
    with pytest.raises(StartError):
        await connect(server.address)


async def test_leaving_lets_a_turn_be_answered(listen: Listen) -> None:
    slow = Slow()
    server = await listen(slow)
    asked = asyncio.create_task(ask(server.address))
    await slow.at_work.wait()
    closing = asyncio.create_task(server.aclose())
    await until(lambda: not _listens(server.address))

    slow.go.set()

    assert await asked == "done"
    await closing


async def test_leaving_waits_for_an_open_turn_but_not_for_ever(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    slow.stubborn = True
    limits = Limits(close_grace=0.1)
    server = await listen(slow, limits=limits)
    asked = asyncio.create_task(ask(server.address))
    await slow.at_work.wait()

    async with asyncio.timeout(5):
        await server.aclose()

    with pytest.raises(ConnectionClosed):
        await asked
    assert server.connections == ()
    slow.go.set()


async def test_who_is_accepted_while_it_closes_is_closed_at_once() -> None:
    loop = asyncio.get_running_loop()
    server = await serve_tcp(Echo())
    here, there = socket.socketpair()
    begin = loop.time()
    closing = asyncio.create_task(server.aclose())
    await asyncio.sleep(0)
    server._accepted(here)  # as the loop does that has seen the server and the client in one turn

    await closing

    assert loop.time() - begin < 2
    assert there.recv(1) == b""
    there.close()


async def test_closing_that_is_cancelled_is_done_at_once(
    listen: Listen,
) -> None:
    slow = Slow()
    loop = asyncio.get_running_loop()
    before = len(asyncio.all_tasks())
    server = await listen(slow, limits=Limits(close_grace=60))
    asked = asyncio.create_task(ask(server.address))
    await slow.at_work.wait()
    closing = asyncio.create_task(server.aclose())
    await asyncio.sleep(0.05)
    begin = loop.time()

    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await server.aclose()

    assert loop.time() - begin < 10
    with pytest.raises(ConnectionClosed):
        await asked
    slow.go.set()  # handlers keep their grace; it is the links that are closed
    await until(lambda: len(asyncio.all_tasks()) == before)


# ------------------------------------------------------------------ none harms another


NOISE = [
    b"",
    b"\n",
    b"{",
    b"}\n" * 1000,
    b"\xff\xfe\x00\n",
    b'{"jsonrpc":"2.0","id":1,"method":"session/prompt"}\n' * 50,
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n{"jsonr',
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 100_000 + b"\n",
]


async def test_whatever_a_client_says_others_are_served(listen: Listen, loop_factory: Any) -> None:
    async with listen(Echo()) as server:
        async with connect(server.address) as agent:
            session = await agent.new_session(cwd="/")
            for noise in NOISE * 3:
                client = plain(server.address)
                with contextlib.suppress(OSError):
                    client.sendall(noise)
                assert (await session.prompt("hi")).text == "echo: hi"
                client.close()
        assert await ask(server.address) == "echo: hi"
        await until(lambda: not server.connections)


async def test_a_client_that_does_not_read_delays_no_other(
    listen: Listen,
) -> None:
    class Chatty(Agent):
        async def prompt(self, turn: Turn) -> None:
            if turn.text == "much":
                while True:
                    await turn.say("x" * 100_000)
            await turn.say("little")

    async with listen(Chatty(), limits=Limits(close_grace=0.1)) as server:
        with plain(server.address) as client:
            await call(client, 0, "initialize", protocolVersion=1)
            opened = await call(client, 1, "session/new", cwd="/", mcpServers=[])
            session_id = json.loads(opened)["result"]["sessionId"]
            text = {"type": "text", "text": "much"}
            await call(client, 2, "session/prompt", sessionId=session_id, prompt=[text])
            await until(lambda: server.connections[0].unsent)

            assert await ask(server.address) == "little"


async def test_an_agent_that_cannot_be_made_is_logged_and_others_are_served(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    made = 0

    def make() -> Agent:
        nonlocal made
        made += 1
        if made == 1:
            raise ValueError("no model")
        return Echo()

    async with listen(make) as server:
        with pytest.raises(StartError):
            await connect(server.address)
        assert await ask(server.address) == "echo: hi"

    (told,) = [record for record in caplog.records if record.name == "antiphon.server"]
    assert "could not be served" in told.message
    assert "no model" in str(told.exc_info)
    caplog.clear()


async def test_connections_past_the_limit_are_told_so(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    async with listen(Echo(), max_connections=2) as server:
        async with connect(server.address), connect(server.address):
            with plain(server.address) as third:
                told = json.loads(await asyncio.to_thread(third.recv, 65536))
                assert told["error"] == {"code": -32603, "message": "Too many connections"}
            for _ in range(3):
                with pytest.raises(StartError):
                    await connect(server.address)
        await until(lambda: not server.connections)
        assert await ask(server.address) == "echo: hi"

        assert caplog.text.count("max_connections of 2 are open") == 1
        async with connect(server.address), connect(server.address):
            with pytest.raises(StartError):
                await connect(server.address)
        assert caplog.text.count("max_connections of 2 are open") == 2


async def test_a_client_that_says_nothing_is_disconnected(
    listen: Listen,
) -> None:
    limits = Limits(startup_timeout=0.05)
    async with listen(Echo(), limits=limits) as server, connect(server.address) as agent:
        with plain(server.address) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""
        session = await agent.new_session(cwd="/")
        assert (await session.prompt("hi")).text == "echo: hi"


async def test_many_that_come_and_go_leave_nothing(listen: Listen) -> None:
    async with listen(Echo()) as server:
        before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for _ in range(20):
            for client in [plain(server.address) for _ in range(50)]:
                client.close()
            await until(lambda: not server.connections)
        assert await ask(server.address) == "echo: hi"
        await until(lambda: not server.connections)

        assert (len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())) == before


# ------------------------------------------------------------------ who may connect


@pytest.fixture
def other_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """The user who connects is not ours."""
    uid = os.geteuid() + 1
    info_of = _socket.info_of

    def other(sock: socket.socket) -> dict[str, Any]:
        found = info_of(sock)
        return {**found, "peer": {**found["peer"], "uid": uid}}

    monkeypatch.setattr(_socket, "info_of", other)
    return uid


async def test_another_user_is_refused(
    tmp_path: Path, other_user: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_unix(Echo(), tmp_path / "s") as server:
        with pytest.raises(StartError):
            await connect(server.address)
        assert server.connections == ()

    assert f"was refused: of user {other_user}" in caplog.text


async def test_users_can_be_allowed(tmp_path: Path, other_user: int) -> None:
    async with serve_unix(Echo(), tmp_path / "a", allow_users={other_user}) as server:
        assert await ask(server.address) == "echo: hi"
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666
    async with serve_unix(Echo(), tmp_path / "b", allow_other_users=True) as server:
        assert await ask(server.address) == "echo: hi"
        assert (tmp_path / "b").stat().st_mode & 0o777 == 0o666
    async with serve_unix(Echo(), tmp_path / "c", allow_users={other_user + 1}) as server:
        with pytest.raises(StartError):
            await connect(server.address)


async def test_who_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(_: socket.socket) -> None: ...

    monkeypatch.setattr(_socket, "peer_credentials", nothing)
    async with serve_unix(Echo(), tmp_path / "s") as server:
        with pytest.raises(StartError):
            await connect(server.address)

    assert "it is not known whose it is" in caplog.text


SOMEBODY_ELSE = """
import os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.connect("\\0" + sys.argv[1].removeprefix("unix:@"))
print(client.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_real_other_user_is_refused_by_the_kernel_s_word(tmp_path: Path) -> None:
    folder = Path(os.path.realpath(tmp_path))
    async with serve_unix(Echo(), f"@antiphon-test-{os.getpid()}") as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", SOMEBODY_ELSE, server.address],
            capture_output=True,
            cwd=folder,
            timeout=20,
        )

    assert done.stdout == b"b''\n" or b"Reset" in done.stderr, done.stderr


async def test_tcp_stays_on_this_machine_unless_it_is_allowed_not_to() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ValueError, match="allow_remote=True"):
            serve_tcp(Echo(), host)
    async with serve_tcp(Echo(), "0.0.0.0", allow_remote=True) as server:
        port = server.address.rpartition(":")[2]
        assert await ask(f"tcp:127.0.0.1:{port}") == "echo: hi"


# ------------------------------------------------------------------ mistakes


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    no_agent: Any = 5
    with pytest.raises(TypeError, match="an Agent is served"):
        serve_unix(no_agent, tmp_path / "s")
    with pytest.raises(ValueError, match="max_connections is at least 1"):
        serve_tcp(Echo(), max_connections=0)
    with pytest.raises(ValueError, match="no path of a socket"):
        serve_unix(Echo(), "")
    with pytest.raises(ValueError, match="no port"):
        serve_tcp(Echo(), port=70000)


async def test_an_address_that_is_taken_is_an_os_error(listen: Listen) -> None:
    async with listen(Echo()) as server:
        if server.address.startswith("unix:"):
            again = listen(Echo())
        else:
            again = serve_tcp(Echo(), port=int(server.address.rpartition(":")[2]))
        with pytest.raises(OSError) as caught:
            await again
        assert caught.value.errno == errno.EADDRINUSE
        await again.aclose()
        assert await ask(server.address) == "echo: hi"


# ------------------------------------------------------------------ as processes


PROGRAM = """
import asyncio, sys
from antiphon import Agent, Limits, Turn, serve_tcp, serve_unix


class Worker(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(f"echo: {turn.text}")
        if turn.text == "work":
            await asyncio.sleep(3600)


options = {
    "on_listening": lambda address: print(address, flush=True),
    "limits": Limits(close_grace=0.5),
}
kind, path, *uvloop = sys.argv[1:]
make = serve_unix(Worker(), path, **options) if kind == "unix" else serve_tcp(Worker(), **options)
make.run(uvloop=bool(uvloop))
"""

CLIENT = """
import asyncio, sys
from antiphon import connect


async def main() -> None:
    async with connect(sys.argv[1]) as agent:
        session = await agent.new_session(cwd="/")
        async with session.prompt(sys.argv[2]) as turn:
            async for update in turn:
                print(update.text, flush=True)


asyncio.run(main())
"""


class Program:
    """An agent's process that listens."""

    def __init__(self, kind: str, folder: Path, *more: str) -> None:
        self._words = [sys.executable, "-c", PROGRAM, kind, str(folder / "s"), *more]

    async def __aenter__(self) -> str:
        self.process = await asyncio.create_subprocess_exec(*self._words, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.communicate()


@pytest.fixture(params=["unix", "tcp"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    return Program(request.param, tmp_path)


async def client_process(address: str, text: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, text, stdout=subprocess.PIPE
    )


async def test_many_processes_are_the_clients_of_one(program: Program) -> None:
    async with program as address:
        clients = [await client_process(address, str(number)) for number in range(4)]
        told = [(await client.communicate())[0] for client in clients]

        assert told == [b"echo: %d\n" % number for number in range(4)]
        assert [client.returncode for client in clients] == [0] * 4
        program.process.terminate()
        assert await program.process.wait() == 0


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_program_on_uvloop_serves_and_ends_alike(tmp_path: Path, kind: str) -> None:
    program = Program(kind, tmp_path, "uvloop")
    async with program as address:
        assert await ask(address) == "echo: hi"
        program.process.terminate()
        assert await program.process.wait() == 0
    assert not (tmp_path / "s").exists()


async def test_a_client_that_is_killed_harms_nobody(program: Program) -> None:
    async with program as address:
        victim = await client_process(address, "work")
        assert victim.stdout is not None
        assert await victim.stdout.readline() == b"echo: work\n"
        async with connect(address) as agent:
            session = await agent.new_session(cwd="/")

            victim.kill()
            await victim.wait()

            assert (await session.prompt("hi")).text == "echo: hi"
        program.process.terminate()
        assert await program.process.wait() == 0


async def test_an_agent_that_is_killed_is_lost_at_once_and_can_be_started_again(
    program: Program, tmp_path: Path
) -> None:
    async with program as address:
        agent = await connect(address)
        session = await agent.new_session(cwd="/")
        turn = session.prompt("work")
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionClosed):
                async with turn:
                    async for update in turn:
                        assert update.text == "echo: work"
                        program.process.kill()
        await agent.aclose()
        await program.process.wait()
        with pytest.raises(StartError, match="nobody listens there"):
            await connect(address)
    if address.startswith("unix:"):
        assert (tmp_path / "s").exists()  # left over

    async with program as address:
        assert await ask(address) == "echo: hi"


async def test_a_program_ends_within_a_bound_whatever_its_clients_do(program: Program) -> None:
    async with program as address:
        busy = await client_process(address, "work")
        assert busy.stdout is not None
        assert await busy.stdout.readline() == b"echo: work\n"
        silent = plain(address)

        async with asyncio.timeout(15):
            program.process.terminate()
            assert await program.process.wait() == 0

        silent.close()
        await busy.communicate()


async def test_a_server_outlives_a_time_without_descriptors(
    listen: Listen,
    loop_factory: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_listener, "_FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(_listener, "_LAST_PAUSE", 3600.0)
    async with listen(Echo()) as server:
        first = await connect(server.address)
        late = [socket.socket(plain_family(server.address)) for _ in range(5)]
        where: Any = server.address.removeprefix("unix:")
        if where.startswith("tcp:"):
            where = "127.0.0.1", int(where.rpartition(":")[2])
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        fillers = [os.open(os.devnull, os.O_RDONLY)]
        while fillers[-1] < highest:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, before[1]))
        try:
            for client in late:
                client.connect(where)
            await until(lambda: "no connection can be accepted" in caplog.text)
            session = await first.new_session(cwd="/")
            assert (await session.prompt("hi")).text == "echo: hi"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for filler in fillers:
                os.close(filler)
        await first.aclose()  # which makes it try again at once
        await until(lambda: len(server.connections) == 5)
        for client in late:
            client.close()
        assert await ask(server.address) == "echo: hi"
        await until(lambda: not server.connections)
