"""Commands of a turn: released whatever happens, and their output as it comes."""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import (
    Agent,
    AgentContext,
    AntiphonError,
    Client,
    ConnectionClosed,
    Context,
    LimitExceeded,
    Limits,
    RequestError,
    RequestTimeout,
    Session,
    Turn,
)
from antiphon.schema import v1
from antiphon.services import Terminals
from antiphon.sessions import ExitStatus, Terminal
from antiphon.testing import RawPeer, raw_client, run_virtual
from tests.sessions.pairs import joined
from tests.sessions.test_pieces import is_possible, tail

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    Act = Callable[[Turn], Awaitable[Any]]

#: How messages of terminals are counted.
LIFE = ("terminal/create", "terminal/release")


class Scripted(Agent):
    """An agent whose prompt is one function."""

    def __init__(self, act: Act) -> None:
        self.act = act

    async def new_session(self, params: Any, ctx: AgentContext) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id="s")

    async def prompt(self, turn: Turn) -> Any:
        return await self.act(turn)


@asynccontextmanager
async def prompted(act: Act, **options: Any) -> AsyncGenerator[RawPeer]:
    """A client that lends terminals, answers nothing by itself, and has sent the prompt "p"."""
    async with raw_client(Scripted(act), {"terminal": True}, **options) as raw:
        await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        prompt = {"sessionId": "s", "prompt": [{"type": "text", "text": "go"}]}
        raw.send({"id": "p", "method": "session/prompt", "params": prompt})
        yield raw


def cancel(raw: RawPeer) -> None:
    raw.send({"method": "session/cancel", "params": {"sessionId": "s"}})


async def reason(raw: RawPeer) -> str:
    return str((await raw.answer_to("p"))["result"]["stopReason"])


async def created(raw: RawPeer, name: str = "t") -> None:
    raw.answer(await raw.wait("terminal/create"), {"terminalId": name})


async def released(raw: RawPeer, name: str = "t") -> None:
    release = await raw.wait("terminal/release")
    assert release["params"] == {"sessionId": "s", "terminalId": name}
    raw.answer(release, {})


def life(raw: RawPeer) -> list[int]:
    """How many terminals were created and released."""
    return [len(raw.sent(method)) for method in LIFE]


# ---------------------------------------------------------------------- released


@pytest.mark.covers("R1-116")
@pytest.mark.parametrize("end", ["left", "raised", "returned", "killed", "output refused"])
async def test_a_terminal_is_released_however_its_block_ends(end: str) -> None:
    failed: list[type[BaseException]] = []

    async def use(turn: Turn) -> None:
        async with turn.run("make", ["test"]) as command:
            if end == "raised":
                raise ValueError(end)
            if end == "returned":
                return
            if end == "killed":
                await command.kill()
            if end == "output refused":
                await command.output()

    async def act(turn: Turn) -> None:
        try:
            await use(turn)
        except (ValueError, RequestError) as error:
            failed.append(type(error))

    async with prompted(act) as raw:
        await created(raw)
        if end == "killed":
            raw.answer(await raw.wait("terminal/kill"), {})
        if end == "output refused":
            raw.refuse(await raw.wait("terminal/output"), -32603)
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert life(raw) == [1, 1]
    assert bool(failed) == (end in {"raised", "output refused"})


@pytest.mark.covers("R1-116")
@pytest.mark.parametrize("moment", ["creating", "inside", "waiting", "iterating", "releasing"])
async def test_a_terminal_is_released_wherever_its_task_is_cancelled(moment: str) -> None:
    tasks: list[asyncio.Task[None]] = []
    inside = asyncio.Event()

    async def use(turn: Turn) -> None:
        async with turn.run("make") as command:
            inside.set()
            if moment == "waiting":
                await command.wait()
            elif moment == "iterating":
                async for _ in command:
                    pass
            elif moment != "releasing":
                await asyncio.Event().wait()

    async def act(turn: Turn) -> None:
        tasks.append(turn.start_soon(use(turn)))

    async with prompted(act) as raw:
        create = await raw.wait("terminal/create")
        if moment != "creating":
            raw.answer(create, {"terminalId": "t"})
            await inside.wait()
        if moment == "waiting":
            await raw.wait("terminal/wait_for_exit")
        if moment == "iterating":
            await raw.wait("terminal/output")
        if moment == "releasing":
            await raw.wait("terminal/release")
        tasks[0].cancel()
        if moment == "creating":
            assert await reason(raw) == "end_turn"
            assert life(raw) == [1, 0]
            raw.answer(create, {"terminalId": "t"})
        await released(raw)
        assert await reason(raw) == "end_turn"
        await raw.round_trip()
        assert life(raw) == [1, 1]
        # Neither the create, whose id would be lost, nor the release is called back.
        withdrawn = [frame["params"]["requestId"] for frame in raw.sent("$/cancel_request")]
        kept = {frame["id"] for method in LIFE for frame in raw.sent(method)}
        assert not kept & set(withdrawn)
        assert tasks[0].cancelled()


@pytest.mark.covers("R1-116")
@pytest.mark.parametrize("answer", [{"terminalId": "t"}, {"terminalId": 5}, None])
async def test_what_is_created_after_the_patience_was_over_is_released(answer: Any) -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(RequestTimeout):
            async with turn.run("make"):
                raise AssertionError

    async with prompted(act, limits=Limits(permission_timeout=0.02)) as raw:
        create = await raw.wait("terminal/create")
        assert await reason(raw) == "end_turn"
        assert life(raw) == [1, 0]
        if answer is None:
            raw.refuse(create, -32603)
        else:
            raw.answer(create, answer)
        if answer == {"terminalId": "t"}:
            await released(raw)
        await raw.round_trip()
        assert life(raw) == [1, answer == {"terminalId": "t"}]


@pytest.mark.covers("R1-116")
async def test_what_was_not_created_is_not_released() -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(RequestError, match="-32602"):
            async with turn.run("make"):
                raise AssertionError

    async with prompted(act) as raw:
        raw.refuse(await raw.wait("terminal/create"), -32602)
        assert await reason(raw) == "end_turn"
        assert life(raw) == [1, 0]


async def test_a_release_that_is_refused_spoils_nothing() -> None:
    async def act(turn: Turn) -> None:
        async with turn.run("make"):
            pass

    async with prompted(act) as raw:
        await created(raw)
        raw.refuse(await raw.wait("terminal/release"), -32002)
        assert await reason(raw) == "end_turn"


@pytest.mark.parametrize("where", ["waiting", "iterating", "reading"])
async def test_a_client_that_goes_ends_every_wait(where: str) -> None:
    failed: list[BaseException] = []
    done = asyncio.Event()

    async def use(turn: Turn) -> None:
        async with turn.run("make") as command:
            if where == "waiting":
                await command.wait()
            elif where == "reading":
                await command.read()
            else:
                async for _ in command:
                    pass

    async def act(turn: Turn) -> None:
        try:
            await use(turn)
        except (ConnectionClosed, asyncio.CancelledError) as error:
            failed.append(error)  # the handler is cancelled as well, and that may come first
        finally:
            done.set()

    async with prompted(act) as raw:
        await created(raw)
        await raw.wait("terminal/wait_for_exit")
        await raw.aclose()
        await asyncio.wait_for(done.wait(), 5)
    assert len(failed) == 1


@pytest.mark.covers("R1-116")
async def test_a_release_that_finds_no_room_is_sent_when_there_is() -> None:
    """The client reads nothing for a while, so that no request can be made at all."""
    left = asyncio.Event()

    async def act(turn: Turn) -> None:
        async with turn.run("make"):
            peer = turn.peer
            refuse = True

            def open_request(params: Any, timeout: Any) -> Any:
                nonlocal refuse
                if refuse and isinstance(params, v1.ReleaseTerminalRequest):
                    refuse = False
                    raise LimitExceeded("unsent_bytes", 1, 2)
                return type(peer).open_request(peer, params, timeout)

            peer.open_request = open_request  # type: ignore[method-assign]
        left.set()

    async with prompted(act) as raw:
        await created(raw)
        await asyncio.wait_for(left.wait(), 5)
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert life(raw) == [1, 1]


@pytest.mark.covers("R1-116")
async def test_what_was_created_is_released_though_its_end_cannot_be_watched() -> None:
    async def act(turn: Turn) -> None:
        peer = turn.peer

        def open_request(params: Any, timeout: Any) -> Any:
            if isinstance(params, v1.WaitForTerminalExitRequest):
                raise LimitExceeded("unsent_bytes", 1, 2)
            return type(peer).open_request(peer, params, timeout)

        peer.open_request = open_request  # type: ignore[method-assign]
        with pytest.raises(LimitExceeded):
            async with turn.run("make", timeout=5):
                raise AssertionError

    async with prompted(act) as raw:
        await created(raw)
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert life(raw) == [1, 1]


async def test_a_command_is_run_once() -> None:
    async def act(turn: Turn) -> None:
        command = turn.run("make")
        async with command:
            pass
        with pytest.raises(RuntimeError, match="run once"):
            async with command:
                raise AssertionError

    async with prompted(act) as raw:
        await created(raw)
        await released(raw)
        assert await reason(raw) == "end_turn"


async def test_arguments_are_no_text_and_a_command_is_one() -> None:
    async def act(turn: Turn) -> None:
        for seconds in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout is a number of seconds"):
                turn.run("make", timeout=seconds)
        with pytest.raises(TypeError, match="arguments are a list"):
            turn.run("make", "test")
        with pytest.raises(TypeError, match="list is no command"):
            turn.run(["make"])  # type: ignore[arg-type]

    async with prompted(act) as raw:
        assert await reason(raw) == "end_turn"


# ---------------------------------------------------------------------- its end


async def test_however_many_wait_the_client_is_asked_once() -> None:
    seen: list[ExitStatus] = []

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            seen.extend(await asyncio.gather(command.wait(), command.wait()))
            seen.append(await command.wait())
            assert command.status == seen[0]

    async with prompted(act) as raw:
        await created(raw)
        raw.answer(await raw.wait("terminal/wait_for_exit"), {"exitCode": None, "signal": "SIGHUP"})
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert len(raw.sent("terminal/wait_for_exit")) == 1
    assert seen == [ExitStatus(None, "SIGHUP")] * 3


async def test_one_who_waits_is_not_disturbed_by_another_that_is_cancelled() -> None:
    seen: list[ExitStatus] = []

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            first = asyncio.create_task(command.wait())
            second = asyncio.create_task(command.wait())
            await asyncio.sleep(0)
            first.cancel()
            seen.append(await second)
            third = asyncio.create_task(Terminal.wait(command))
            assert (await third) == seen[0]

    async with prompted(act) as raw:
        await created(raw)
        wait = await raw.wait("terminal/wait_for_exit")
        await raw.round_trip()
        raw.answer(wait, {"exitCode": 0})
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert raw.sent("$/cancel_request") == []
    assert seen == [ExitStatus(0, None)]


async def test_a_wait_that_nobody_waits_for_is_withdrawn() -> None:
    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(command.wait(), 0.01)
            await command.wait()  # asks anew

    async with prompted(act) as raw:
        await created(raw)
        first = await raw.wait("terminal/wait_for_exit")
        withdrawn = await raw.wait("$/cancel_request")
        assert withdrawn["params"] == {"requestId": first["id"]}
        raw.answer(await raw.wait("terminal/wait_for_exit", 2), {"exitCode": 1})
        await released(raw)
        assert await reason(raw) == "end_turn"


@pytest.mark.parametrize("answer", [-32601, ["no"]])
async def test_a_client_that_cannot_wait_fails_the_wait(answer: Any) -> None:
    failed: list[str] = []

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            try:
                await command.wait()
            except AntiphonError as error:
                failed.append(type(error).__name__)

    async with prompted(act) as raw:
        await created(raw)
        wait = await raw.wait("terminal/wait_for_exit")
        if isinstance(answer, int):
            raw.refuse(wait, answer)
        else:
            raw.answer(wait, answer)
        await released(raw)
        assert await reason(raw) == "end_turn"
    assert failed == ["MethodNotFound" if answer == -32601 else "RemoteProtocolError"]


async def test_a_turn_that_is_cancelled_kills_its_commands() -> None:
    seen: list[ExitStatus] = []

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            seen.append(await command.wait())
        assert turn.cancelled

    async with prompted(act) as raw:
        await created(raw)
        wait = await raw.wait("terminal/wait_for_exit")
        cancel(raw)
        kill = await raw.wait("terminal/kill")
        assert kill["params"] == {"sessionId": "s", "terminalId": "t"}
        raw.answer(kill, {})
        raw.answer(wait, {"signal": "SIGTERM"})
        await released(raw)
        assert await reason(raw) == "cancelled"
    assert seen == [ExitStatus(None, "SIGTERM")]


async def test_a_command_that_is_being_created_when_the_turn_is_cancelled_is_killed() -> None:
    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            assert [text async for text in command] == []

    async with prompted(act) as raw:
        create = await raw.wait("terminal/create")
        cancel(raw)
        await raw.round_trip()
        raw.answer(create, {"terminalId": "t"})
        raw.answer(await raw.wait("terminal/kill"), {})
        raw.answer(await raw.wait("terminal/wait_for_exit"), {"signal": "SIGTERM"})
        raw.answer(await raw.wait("terminal/output"), {"output": "", "truncated": False})
        raw.answer(
            await raw.wait("terminal/output", 2),
            {"output": "", "truncated": False, "exitStatus": {"signal": "SIGTERM"}},
        )
        await released(raw)
        assert await reason(raw) == "cancelled"


async def test_what_is_run_after_the_cancellation_is_not_killed() -> None:
    async def act(turn: Turn) -> None:
        await turn.wait_cancelled()
        async with turn.run("git", ["stash", "pop"]) as command:
            await command.wait()

    async with prompted(act) as raw:
        await raw.round_trip()
        cancel(raw)
        await created(raw)
        raw.answer(await raw.wait("terminal/wait_for_exit"), {"exitCode": 0})
        await released(raw)
        assert await reason(raw) == "cancelled"
        assert raw.sent("terminal/kill") == []


@pytest.mark.parametrize("waits", [True, False])
async def test_a_command_that_takes_too_long_is_killed(waits: bool) -> None:
    seen: list[Any] = []

    async def act(turn: Turn) -> None:
        async with turn.run("make", timeout=0.01) as command:
            if waits:
                seen.append(await command.read())
            else:
                seen.extend([text async for text in command])
            seen.append((command.status, command.timed_out))

    async with prompted(act) as raw:
        await created(raw)
        wait = await raw.wait("terminal/wait_for_exit")
        if not waits:
            answer = {"output": "so ", "truncated": False}
            raw.answer(await raw.wait("terminal/output"), answer)
        kill = await raw.wait("terminal/kill")
        raw.answer(wait, {"signal": "SIGKILL"})
        raw.answer(kill, {})
        for number in range(1 + (not waits), 9):
            ended = {"output": "so far", "truncated": False, "exitStatus": {"signal": "SIGKILL"}}
            raw.answer(await raw.wait("terminal/output", number), ended)
            if number > len(raw.sent("terminal/output")) or raw.sent("terminal/release"):
                break
            await raw.round_trip()
            if raw.sent("terminal/release"):
                break
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert len(raw.sent("terminal/wait_for_exit")) == 1
    assert "".join(seen[:-1]) == "so far"
    assert seen[-1] == (ExitStatus(None, "SIGKILL"), True)


async def test_a_command_that_has_ended_in_time_is_not_killed() -> None:
    async def act(turn: Turn) -> None:
        async with turn.run("make", timeout=0.02) as command:
            await command.wait()
            await asyncio.sleep(0.04)
            assert not command.timed_out

    async with prompted(act) as raw:
        await created(raw)
        raw.answer(await raw.wait("terminal/wait_for_exit"), {"exitCode": 0})
        await released(raw)
        assert await reason(raw) == "end_turn"
        assert raw.sent("terminal/kill") == []


@pytest.mark.parametrize("why", ["time", "cancelled"])
async def test_whoever_waits_for_a_command_that_cannot_be_killed_is_told(why: str) -> None:
    async def act(turn: Turn) -> None:
        async with turn.run("make", timeout=0.01 if why == "time" else None) as command:
            with pytest.raises(RequestError, match="-32050"):
                await command.wait()

    async with prompted(act) as raw:
        await created(raw)
        await raw.wait("terminal/wait_for_exit")
        if why == "cancelled":
            cancel(raw)
        raw.refuse(await raw.wait("terminal/kill"), -32050)
        await released(raw)
        assert await reason(raw) == ("end_turn" if why == "time" else "cancelled")


# ---------------------------------------------------------------------- its output as it comes


class Lender(Client):
    """A client whose one command is played by the loop's clock."""

    def __init__(self, limit: int = 1 << 20, **how: Any) -> None:
        super().__init__()
        self.written = ""
        self.limit = limit
        self.exit = asyncio.Event()
        self.how = how
        self.looks: list[float] = []
        self.calls: list[str] = []

    async def create_terminal(self, params: Any, ctx: Context) -> v1.CreateTerminalResponse:
        self.calls.append("create")
        return v1.CreateTerminalResponse(terminal_id="t")

    async def terminal_output(self, params: Any, ctx: Context) -> v1.TerminalOutputResponse:
        self.looks.append(asyncio.get_running_loop().time())
        if len(self.looks) == self.how.get("fails_at"):
            raise RequestError.of(-32603, "no")
        text, truncated = tail(self.written, self.limit)
        answer = v1.TerminalOutputResponse(output=text, truncated=truncated)
        if self.exit.is_set() and not self.how.get("no_exit_status"):
            answer.exit_status = v1.TerminalExitStatus(exit_code=0)
        return answer

    async def wait_for_terminal_exit(
        self, params: Any, ctx: Context
    ) -> v1.WaitForTerminalExitResponse:
        if self.how.get("cannot_wait"):
            raise RequestError.of(-32601, "no")
        if self.how.get("never_tells"):
            await asyncio.Event().wait()
        await self.exit.wait()
        return v1.WaitForTerminalExitResponse(exit_code=0)

    async def kill_terminal(self, params: Any, ctx: Context) -> v1.KillTerminalResponse:
        self.calls.append("kill")
        self.exit.set()
        return v1.KillTerminalResponse()

    async def release_terminal(self, params: Any, ctx: Context) -> v1.ReleaseTerminalResponse:
        self.calls.append("release")
        return v1.ReleaseTerminalResponse()


@asynccontextmanager
async def lent(act: Act, client: Client) -> AsyncGenerator[asyncio.Task[str]]:
    """A turn that uses what the client lends; its stop reason."""
    async with joined(Scripted(act), client) as (peer, _):
        session = await peer.new_session(cwd="/")

        async def prompt() -> str:
            return (await session.prompt("go")).stop_reason

        task = asyncio.create_task(prompt())
        yield task
        await task


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", [{}, {"no_exit_status": True}, {"never_tells": True}], ids=str)
async def test_output_comes_as_it_is_written_and_ends_with_the_command(
    how: dict[str, bool],
) -> None:
    client, got = Lender(**how), list[tuple[float, str]]()
    loop = asyncio.get_running_loop()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append((loop.time(), text))
            assert command.status == ExitStatus(0, None)
            assert (command.gap, command.gaps, command.truncated) == (False, 0, False)
            assert await command.wait() == command.status
            assert [text async for text in command] == []

    async with lent(act, client):
        for number in range(10):
            await asyncio.sleep(number / 4)
            client.written += f"line {number}\n"
        written = loop.time()
        await asyncio.sleep(0.1)
        client.written += "last"
        client.exit.set()
    assert "".join(text for _, text in got) == client.written
    assert len(got) >= 10
    # The exit is not waited for with the next look, except where nothing else tells of it.
    assert loop.time() - written < (0.8 if how.get("never_tells") else 0.3)
    assert client.calls == ["create", "release"]


@pytest.mark.virtual_time
async def test_a_command_that_says_nothing_is_looked_at_twice_a_second_and_its_end_is_seen_at_once() -> (
    None
):
    client = Lender()
    loop = asyncio.get_running_loop()

    async def act(turn: Turn) -> None:
        async with turn.run("sleep", ["600"]) as command:
            assert [text async for text in command] == []

    async with lent(act, client) as turn:
        await asyncio.sleep(600.123)
        client.exit.set()
        await turn
        assert loop.time() == pytest.approx(600.123)
    assert client.looks[0] == pytest.approx(0)
    pauses = [after - before for before, after in itertools.pairwise(client.looks)]
    assert pauses[0] < 0.1
    assert all(a < b + 1e-6 for a, b in itertools.pairwise(pauses[:-1]))
    assert max(pauses) == pytest.approx(0.5)


@pytest.mark.virtual_time
async def test_much_output_is_looked_at_less_often_than_little() -> None:
    client = Lender(limit=1 << 22)
    client.written = "x" * (1 << 22)

    async def act(turn: Turn) -> None:
        async with turn.run("yes") as command:
            async for _ in command:
                client.written += "y"

    async with lent(act, client):
        await asyncio.sleep(5.5)
        assert len(client.looks) == 6
        client.exit.set()


@pytest.mark.virtual_time
async def test_a_cancelled_turn_ends_the_iteration_with_what_the_command_said_last() -> None:
    client, got = Lender(), list[str]()
    client.written = "begun\n"

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append(text)
            assert command.status == ExitStatus(0, None)

    async with joined(Scripted(act), client) as (peer, _):
        session = await peer.new_session(cwd="/")
        prompt = asyncio.ensure_future(prompted_by(session))
        await asyncio.sleep(1)
        client.written += "interrupted\n"
        await session.cancel()
        assert await prompt == "cancelled"
    assert "".join(got) == "begun\ninterrupted\n"
    assert client.calls == ["create", "kill", "release"]


async def prompted_by(session: Session) -> str:
    return (await session.prompt("go")).stop_reason


@pytest.mark.virtual_time
async def test_a_look_that_is_refused_ends_the_iteration_and_the_next_goes_on() -> None:
    client, got = Lender(fails_at=2), list[str]()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            with pytest.raises(RequestError):
                async for text in command:
                    got.append(text)
            client.written += "two"
            client.exit.set()
            async for text in command:
                got.append(text)

    client.written = "one"
    async with lent(act, client):
        pass
    assert got == ["one", "two"]
    assert client.calls == ["create", "release"]


@pytest.mark.virtual_time
async def test_a_client_that_does_not_tell_of_the_end_fails_the_iteration_after_what_is_new() -> (
    None
):
    client, got = Lender(cannot_wait=True), list[str]()
    client.written = "one"

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            with pytest.raises(RequestError, match="-32601"):
                async for text in command:
                    got.append(text)

    async with lent(act, client):
        pass
    assert got == ["one"]


@pytest.mark.virtual_time
async def test_a_client_that_only_tells_of_the_end_with_the_output_is_enough() -> None:
    client, got = Lender(cannot_wait=True), list[str]()
    client.written = "one"
    client.exit.set()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            got.extend([text async for text in command])
            assert await command.wait() == ExitStatus(0, None)

    async with lent(act, client):
        pass
    assert got == ["one"]


@pytest.mark.virtual_time
async def test_output_that_goes_on_after_the_exit_ends_the_iteration_all_the_same() -> None:
    """Of what the command has left running, at a client that does not say with it that it is over."""
    client, got = Lender(no_exit_status=True), list[str]()
    client.exit.set()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append(text)
                client.written += "more "

    client.written = "more "
    async with lent(act, client):
        pass
    assert 1 < len(got) < 50
    assert client.calls == ["create", "release"]


@pytest.mark.virtual_time
async def test_a_loop_that_was_left_goes_on_where_it_was() -> None:
    client, got = Lender(), list[str]()
    client.written = "one"

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append(text)
                break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await anext(command)
            client.written += "two"
            client.exit.set()
            async for text in command:
                got.append(text)

    async with lent(act, client):
        pass
    assert got == ["one", "two"]


@pytest.mark.virtual_time
async def test_two_tasks_do_not_iterate_at_once() -> None:
    client = Lender()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            first = asyncio.ensure_future(anext(command))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task"):
                await anext(command)
            client.exit.set()
            with pytest.raises(StopAsyncIteration):
                await first

    async with lent(act, client):
        pass


@pytest.mark.virtual_time
async def test_a_gap_is_told_with_the_piece_after_it() -> None:
    client, got = Lender(limit=500), list[tuple[bool, str]]()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append((command.gap, text))
            assert (command.gaps, command.truncated) == (1, True)

    async with lent(act, client):
        client.written = "".join(f"line {n}\n" for n in range(10))
        await asyncio.sleep(5)
        client.written += "".join(f"line {n}\n" for n in range(10, 500))
        await asyncio.sleep(5)
        client.written += "end\n"
        await asyncio.sleep(5)
        client.exit.set()
    assert [gap for gap, _ in got] == [False, True, False]
    assert is_possible(client.written, got)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1.5), st.integers(0, 30)), max_size=20),
    st.integers(0, 2000),
    st.lists(st.sampled_from(["a", "b\n", "€", "😀"]), min_size=1, max_size=3),
)
def test_whatever_is_written_when_the_pieces_and_the_gaps_are_the_output(
    script: list[tuple[float, int]], limit: int, alphabet: list[str]
) -> None:
    """Random output, limits and moments, over the wire: never a piece twice, never a silent loss."""
    client, got = Lender(limit=limit), list[tuple[bool, str]]()

    async def act(turn: Turn) -> None:
        async with turn.run("make") as command:
            async for text in command:
                got.append((command.gap, text))
            if command.gaps > sum(gap for gap, _ in got):
                got.append((True, ""))

    async def main() -> None:
        async with lent(act, client):
            for number, (pause, count) in enumerate(script):
                await asyncio.sleep(pause)
                client.written += alphabet[number % len(alphabet)] * count + str(number)
            client.exit.set()

    run_virtual(main())
    assert is_possible(client.written, got)
    if len(client.written.encode()) <= limit:
        assert not any(gap for gap, _ in got)


@pytest.mark.covers("R1-116")
@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["task", "turn", "both"])
async def test_at_whatever_step_it_is_cancelled_what_was_created_is_released(how: str) -> None:
    """At each turn of the loop between the first message and the last."""
    steps = 0
    while True:
        client, tasks = Lender(), list[asyncio.Task[None]]()
        begun = asyncio.Event()
        client.written = "text"
        asyncio.get_running_loop().call_later(0.2, client.exit.set)

        async def use(turn: Turn) -> None:
            async with turn.run("make", timeout=60) as command:
                async for _ in command:
                    pass
                await command.read()

        async def act(turn: Turn, tasks: Any = tasks, begun: Any = begun, use: Any = use) -> None:
            tasks.append(turn.start_soon(use(turn)))
            begun.set()

        async with joined(Scripted(act), client) as (peer, _):
            session = await peer.new_session(cwd="/")
            prompt = asyncio.ensure_future(prompted_by(session))
            await begun.wait()
            for _ in range(steps):
                await asyncio.sleep(0 if steps % 2 else 0.002)
            in_time = not tasks[0].done()
            if how != "task":
                await session.cancel()
            if how != "turn":
                tasks[0].cancel()
            assert await prompt == ("end_turn" if how == "task" or not in_time else "cancelled")
            # What was created too late is released in the background.
            for _ in range(20):
                await asyncio.sleep(0)
        counted = [client.calls.count(name) for name in ("create", "release")]
        assert counted in ([0, 0], [1, 1]), (steps, client.calls)
        if not in_time:
            break
        steps += 1
    assert steps > 20


# ---------------------------------------------------------------------- real processes


SLOWLY = """
import sys, time
for number in range({lines}):
    sys.stdout.buffer.write("zeile {{}} ä€\\n".format(number).encode())
    sys.stdout.flush()
    time.sleep({pause})
"""


@pytest.mark.covers("R1-111", "R1-116")
async def test_the_output_of_a_real_process_comes_whole_and_in_order(tmp_path: Path) -> None:
    got: list[str] = []
    terminals = Terminals()

    async def act(turn: Turn) -> None:
        program = SLOWLY.format(lines=60, pause=0.005)
        async with turn.run(sys.executable, ["-c", program], cwd=str(tmp_path)) as command:
            got.extend([text async for text in command])
            assert command.status == ExitStatus(0, None)
            assert command.gaps == 0

    async with real(act, terminals, tmp_path):
        pass
    assert "".join(got) == "".join(f"zeile {n} ä€\n" for n in range(60))
    assert len(got) > 1


async def test_output_that_runs_away_from_its_limit_has_gaps_and_a_true_end(
    tmp_path: Path,
) -> None:
    got: list[tuple[bool, str]] = []
    terminals = Terminals()

    async def act(turn: Turn) -> None:
        line = "seq 1 200000"
        async with turn.run("sh", ["-c", line], output_byte_limit=10_000) as command:
            got.extend([(command.gap, text) async for text in command])
            assert command.truncated

    async with real(act, terminals, tmp_path):
        pass
    output = "".join(f"{n}\n" for n in range(1, 200_001))
    assert got[-1][1].endswith(output[-9_000:])
    assert any(gap for gap, _ in got)
    position = 0
    for _, text in got:
        position = output.index(text, position) + len(text)
    assert position == len(output)


@pytest.mark.parametrize("line", ["sleep 300", "trap '' TERM; echo here; sleep 300"])
async def test_a_real_process_that_takes_too_long_is_killed_and_leaves_nothing(
    line: str, tmp_path: Path
) -> None:
    seen: list[Any] = []
    terminals = Terminals(kill_grace=0.1)

    async def act(turn: Turn) -> None:
        async with turn.run("sh", ["-c", line], timeout=0.2) as command:
            seen.append(await command.read())
            seen.append(command.timed_out)
            seen.append(command.status and command.status.signal)

    async with real(act, terminals, tmp_path):
        pass
    ignores = "trap" in line
    assert seen == ["here\n" if ignores else "", True, "SIGKILL" if ignores else "SIGTERM"]


@asynccontextmanager
async def real(act: Act, terminals: Terminals, cwd: Path) -> AsyncGenerator[None]:
    """A turn over real processes; nothing is left afterwards (conftest checks it)."""
    async with joined(Scripted(act), Client(terminals=terminals)) as (peer, _):
        session = await peer.new_session(cwd=str(cwd))
        assert (await session.prompt("go")).stop_reason == "end_turn"
        yield
    await terminals.aclose()
