"""Terminals for an agent: their life from create to release, their output, and what is refused."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from msgspec import UNSET, json
from tests.services.agent import Agent, Ctx, ended, error_of, listen

from antiphon import _errors
from antiphon.schema import v1
from antiphon.services import Operation, Terminals

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "w"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _output_is_heard_of(  # pyright: ignore[reportUnusedFunction]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen(monkeypatch)


@pytest.fixture
def terminals() -> Terminals:
    return Terminals(kill_grace=0.5)


@pytest.fixture
def agent(terminals: Terminals, root: Path) -> Agent:
    return Agent(terminals, Ctx(root))


@pytest.fixture
def impatient(root: Path) -> Agent:
    """For commands that ignore TERM, so that the grace before KILL only takes time."""
    return Agent(Terminals(kill_grace=0.05), Ctx(root))


# --- life ---------------------------------------------------------------------------------------


@pytest.mark.covers("R1-111", "R1-113", "R1-114", "FF-47")
async def test_a_terminal_from_create_to_release(agent: Agent, loop_factory: object) -> None:
    terminal_id = await agent.sh("echo out; echo err >&2; read line; exit 3")
    assert await agent.wait(terminal_id) == v1.WaitForTerminalExitResponse(exit_code=3, signal=None)
    assert await agent.output(terminal_id) == v1.TerminalOutputResponse(
        output="out\nerr\n",
        truncated=False,
        exit_status=v1.TerminalExitStatus(exit_code=3, signal=None),
    )
    await agent.release(terminal_id)
    for doing in (agent.output, agent.wait, agent.kill, agent.release):
        code, message, data = await error_of(doing(terminal_id))
        assert (code, message) == (-32002, "Resource not found")
        assert data == {"terminalId": terminal_id}


@pytest.mark.covers("R1-111", "R1-113", "FF-47")
async def test_a_running_command_has_output_and_no_status(agent: Agent) -> None:
    terminal_id = await agent.sh("echo begun; exec sleep 60")
    await agent.until(terminal_id, "begun\n")
    answer = await agent.output(terminal_id)
    assert answer.exit_status is UNSET
    assert b"exitStatus" not in json.encode(answer)
    await agent.release(terminal_id)


@pytest.mark.covers("R1-114")
async def test_a_killed_terminal_keeps_its_id(agent: Agent) -> None:
    terminal_id = await agent.sh("echo begun; sleep 60")
    await agent.until(terminal_id, "begun")
    await agent.kill(terminal_id)
    for _ in range(2):
        answer = await agent.output(terminal_id)
        assert answer.output == "begun\n"
        assert answer.exit_status == v1.TerminalExitStatus(exit_code=None, signal="SIGTERM")
        assert (await agent.wait(terminal_id)).signal == "SIGTERM"
        await agent.kill(terminal_id)
    await agent.release(terminal_id)


@pytest.mark.covers("R1-118")
async def test_a_command_that_ignores_term_is_killed(impatient: Agent) -> None:
    terminal_id = await impatient.sh("trap '' TERM; echo begun; while :; do sleep 60; done")
    await impatient.until(terminal_id, "begun")
    await impatient.kill(terminal_id)
    answer = json.encode((await impatient.output(terminal_id)).exit_status)
    assert json.decode(answer) == {"exitCode": None, "signal": "SIGKILL"}
    await impatient.release(terminal_id)


@pytest.mark.covers("R1-118", "FF-47")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGHUP"])
async def test_a_death_by_signal_is_told_by_its_name(agent: Agent, name: str) -> None:
    terminal_id = await agent.sh(f"ulimit -c 0; kill -{name.removeprefix('SIG')} $$")
    assert await agent.wait(terminal_id) == v1.WaitForTerminalExitResponse(
        exit_code=None, signal=name
    )
    await agent.release(terminal_id)


@pytest.mark.covers("R1-117")
async def test_all_who_wait_are_answered_and_late_ones_at_once(agent: Agent, root: Path) -> None:
    os.mkfifo(root / "fifo")
    terminal_id = await agent.create("cat", "fifo")
    waiting = [asyncio.create_task(agent.wait(terminal_id)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.to_thread((root / "fifo").write_text, "x")
    assert [(await task).exit_code for task in waiting[1:]] == [0, 0]
    assert waiting[0].cancelled()
    assert (await agent.wait(terminal_id)).exit_code == 0
    await agent.release(terminal_id)


async def test_a_release_ends_a_wait(agent: Agent) -> None:
    terminal_id = await agent.sh("sleep 60")
    waiting = asyncio.create_task(agent.wait(terminal_id))
    await asyncio.sleep(0)
    await agent.release(terminal_id)
    assert (await waiting).signal == "SIGTERM"


async def test_an_id_is_of_no_use_while_its_terminal_is_being_released(impatient: Agent) -> None:
    terminal_id = await impatient.sh("trap '' TERM; echo begun; while :; do sleep 60; done")
    await impatient.until(terminal_id, "begun")
    releasing = asyncio.create_task(impatient.release(terminal_id))
    await asyncio.sleep(0)
    assert (await error_of(impatient.output(terminal_id)))[0] == -32002
    await releasing


@pytest.mark.parametrize("verb", ["kill", "release"])
async def test_a_cancelled_ending_goes_on(impatient: Agent, verb: str) -> None:
    terminal_id = await impatient.sh("trap '' TERM; echo begun; while :; do sleep 60; done")
    await impatient.until(terminal_id, "begun")
    waiting = asyncio.create_task(impatient.wait(terminal_id))
    ending = asyncio.create_task(getattr(impatient, verb)(terminal_id))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ending.cancel()
    assert (await waiting).signal == "SIGKILL"
    assert ending.cancelled()
    await impatient.terminals.aclose()


@pytest.mark.covers("FF-35")
async def test_the_exit_is_told_though_a_child_of_the_command_holds_its_output(
    agent: Agent, loop_factory: object
) -> None:
    terminal_id = await agent.sh("sleep 60 & echo started $!")
    assert (await agent.wait(terminal_id)).exit_code == 0
    output = (await agent.output(terminal_id)).output
    assert output.startswith("started ")
    child = psutil.Process(int(output.split()[1]))
    assert child.is_running()
    await agent.release(terminal_id)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("script", ["sleep 60 & echo $!; wait", "sleep 60 & echo $!"])
async def test_a_kill_ends_the_whole_tree(agent: Agent, script: str) -> None:
    terminal_id = await agent.sh(script)
    await agent.until(terminal_id, "\n")
    child = psutil.Process(int((await agent.output(terminal_id)).output))
    await agent.kill(terminal_id)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert (await agent.output(terminal_id)).exit_status is not UNSET
    await agent.release(terminal_id)


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("script", ["sleep 60 & echo $!; wait", "sleep 60 & echo $!"])
async def test_a_release_ends_the_whole_tree(agent: Agent, script: str) -> None:
    terminal_id = await agent.sh(script)
    await agent.until(terminal_id, "\n")
    child = psutil.Process(int((await agent.output(terminal_id)).output))
    await agent.release(terminal_id)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.covers("FF-35")
async def test_a_daemon_outside_of_a_sandbox_is_not_followed(agent: Agent) -> None:
    # Documented, and what `confine` is for.
    terminal_id = await agent.sh("setsid sh -c 'echo $$; exec sleep 60' & wait")
    await agent.until(terminal_id, "\n")
    daemon = psutil.Process(int((await agent.output(terminal_id)).output))
    await agent.release(terminal_id)
    assert daemon.is_running()
    daemon.kill()
    await ended(daemon.pid)


async def test_what_a_child_writes_after_the_exit_is_kept_too(agent: Agent, root: Path) -> None:
    os.mkfifo(root / "go")
    terminal_id = await agent.sh("(cat go; echo later) & echo first")
    await agent.wait(terminal_id)
    assert (await agent.output(terminal_id)).output == "first\n"
    await asyncio.to_thread((root / "go").write_text, "go\n")
    await agent.until(terminal_id, "go\nlater\n")
    await agent.release(terminal_id)


async def test_a_late_read_after_the_output_was_emptied_does_not_wait_for_who_holds_it(
    agent: Agent, terminals: Terminals
) -> None:
    terminal_id = await agent.sh("sleep 60 & echo started")
    await agent.wait(terminal_id)
    # The loop had seen the pipe readable, and calls only now.
    reader: Any = terminals._sessions["s"].terminals[terminal_id]._reader
    reader._ready()
    assert (await agent.output(terminal_id)).output == "started\n"
    await agent.release(terminal_id)


# --- sessions -----------------------------------------------------------------------------------


async def test_a_terminal_is_unknown_to_other_sessions(terminals: Terminals, root: Path) -> None:
    one = Agent(terminals, Ctx(root, session_id="1"))
    two = Agent(terminals, Ctx(root, session_id="2"))
    terminal_id = await one.create("true")
    await two.run("true")
    for doing in (two.output, two.wait, two.kill, two.release):
        assert (await error_of(doing(terminal_id)))[0] == -32002
    assert (await one.wait(terminal_id)).exit_code == 0
    await terminals.aclose()


async def test_an_unknown_id_before_any_terminal_is_not_found(agent: Agent) -> None:
    # Agents show terminals that are theirs alone (`_meta.terminal_info`); asking is no accident.
    assert (await error_of(agent.output("toolu_1")))[0] == -32002


async def test_releasing_a_session_ends_its_terminals_only(
    terminals: Terminals, root: Path
) -> None:
    one = Agent(terminals, Ctx(root, session_id="1"))
    two = Agent(terminals, Ctx(root, session_id="2"))
    ids = [await one.sh("sleep 60") for _ in range(3)]
    other = await two.sh("sleep 60")
    waiting = [asyncio.create_task(one.wait(terminal_id)) for terminal_id in ids]
    await asyncio.sleep(0)
    await terminals.release_session("1")
    await terminals.release_session("1")
    assert [(await task).signal for task in waiting] == ["SIGTERM"] * 3
    assert (await error_of(one.output(ids[0])))[0] == -32002
    assert (await two.output(other)).exit_status is UNSET
    await terminals.aclose()
    await terminals.aclose()


async def test_closing_waits_for_what_is_already_being_released(impatient: Agent) -> None:
    terminal_id = await impatient.sh("trap '' TERM; echo $$; while :; do sleep 60; done")
    await impatient.until(terminal_id, "\n")
    pid = int((await impatient.output(terminal_id)).output)
    releasing = asyncio.create_task(impatient.release(terminal_id))
    await asyncio.sleep(0)
    await impatient.terminals.aclose()
    assert not psutil.pid_exists(pid)
    await releasing


async def test_a_session_has_a_bounded_number_of_terminals(root: Path) -> None:
    terminals = Terminals(per_session=2)
    agent = Agent(terminals, Ctx(root))
    first = await agent.create("true")
    await agent.create("true")
    code, message, data = await error_of(agent.create("true"))
    assert (code, message) == (-32603, "Too many terminals")
    assert data == {"reason": "too_many_terminals", "limit": 2}
    await Agent(terminals, Ctx(root, session_id="2")).create("true")
    await agent.release(first)
    await agent.create("true")
    await terminals.aclose()
    assert Terminals().per_session == 32


@pytest.mark.parametrize("pty", [False, True])
async def test_all_sessions_together_have_a_bounded_number_of_terminals(
    root: Path, pty: bool
) -> None:
    terminals = Terminals(in_all=2, pty=pty, kill_grace=0.2)
    agents = [Agent(terminals, Ctx(root, session_id=str(number))) for number in range(3)]
    first = await agents[0].sh("trap '' TERM; echo begun; while :; do sleep 60; done")
    await agents[1].create("true")
    code, _, data = await error_of(agents[2].create("true"))
    assert (code, data) == (-32603, {"reason": "too_many_terminals", "limit": 2})
    await agents[0].until(first, "begun")
    releasing = asyncio.create_task(agents[0].release(first))
    await asyncio.sleep(0)
    # What is being ended is still there: else it could be outrun.
    assert (await error_of(agents[2].create("true")))[2]["reason"] == "too_many_terminals"
    await releasing
    await agents[2].create("true")
    await terminals.aclose()
    assert Terminals().in_all == 128


async def test_two_hundred_terminals_work_at_once(root: Path) -> None:
    terminals = Terminals(per_session=1000, in_all=1000)
    agent = Agent(terminals, Ctx(root))
    ids = [await agent.sh(f"echo {number}; exec sleep 60") for number in range(200)]
    for number, terminal_id in enumerate(ids):
        await agent.until(terminal_id, f"{number}\n")
    waiting = [asyncio.create_task(agent.wait(terminal_id)) for terminal_id in ids]
    await asyncio.sleep(0)
    await terminals.aclose()
    assert {(await task).signal for task in waiting} == {"SIGTERM"}


async def test_a_thousand_who_wait_are_all_answered(agent: Agent, terminals: Terminals) -> None:
    terminal_id = await agent.create("cat", "/dev/null")
    waiting = [asyncio.create_task(agent.wait(terminal_id)) for _ in range(1000)]
    assert {(await task).exit_code for task in waiting} == {0}
    await terminals.aclose()


async def test_where_there_are_no_more_descriptors_a_command_is_refused(
    agent: Agent, terminals: Terminals
) -> None:
    await agent.run("true")  # the guard is there now
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/dev/fd"))) + 1
    open_before = len(os.listdir("/dev/fd"))
    try:
        for more in range(8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
            try:
                await agent.create("sleep", "60")
            except _errors.RequestError as error:
                assert error.data["reason"] in {"cannot_start", "io_error"}  # noqa: PT017
            except OSError as error:
                pytest.fail(f"with {more} left: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await terminals.aclose()
    assert len(os.listdir("/dev/fd")) == open_before


# --- life ---------------------------------------------------------------------------------------


WAYS = pytest.mark.parametrize(
    "way", [{}, {"pty": True}, {"confine": "bwrap"}], ids=["plain", "pty", "bwrap"]
)


@WAYS
async def test_a_command_that_lives_too_long_is_ended_as_by_a_kill(
    root: Path, caplog: pytest.LogCaptureFixture, way: dict[str, Any]
) -> None:
    terminals = Terminals(life=0.2, kill_grace=0.2, **way)
    agent = Agent(terminals, Ctx(root))
    slow = await agent.sh("echo begun; exec sleep 60")
    stubborn = await agent.sh("trap '' TERM; while :; do sleep 60; done")
    quick = await agent.sh("exit 3")
    assert (await agent.wait(slow)).signal == "SIGTERM"
    assert (await agent.wait(stubborn)).signal == "SIGKILL"
    assert (await agent.wait(quick)).exit_code == 3
    assert (await agent.output(slow)).output.startswith("begun")  # the terminal stays
    assert terminals.expired == 2
    said = "a command of the agent is ended: it has run for 0.2 s"
    assert [record.message for record in caplog.records if said in record.message] == [said] * 2
    await agent.kill(slow)
    await agent.release(slow)
    await terminals.aclose()
    assert terminals.expired == 2


async def test_what_a_command_has_left_behind_lives_no_longer(root: Path) -> None:
    terminals = Terminals(life=0.2)
    agent = Agent(terminals, Ctx(root))
    terminal_id = await agent.sh("sleep 60 & echo $!")
    await agent.wait(terminal_id)
    child = psutil.Process(int((await agent.output(terminal_id)).output))
    assert child.is_running()
    await ended(child.pid)
    assert terminals.expired == 0
    await terminals.aclose()


async def test_a_terminal_that_is_released_expires_no_more(root: Path) -> None:
    terminals = Terminals(life=0.05)
    agent = Agent(terminals, Ctx(root))
    await agent.release(await agent.sh("exec sleep 60"))
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, later.set)
    await later.wait()
    assert terminals.expired == 0


@pytest.mark.parametrize("life", [0, -1, float("nan")])
def test_a_life_that_is_none_is_a_mistake(life: float) -> None:
    with pytest.raises(ValueError, match="life is a number of seconds above 0"):
        Terminals(life=life)


@WAYS
async def test_a_stopped_command_is_ended_too(root: Path, way: dict[str, Any]) -> None:
    terminals = Terminals(kill_grace=0.1, **way)
    agent = Agent(terminals, Ctx(root))
    terminal_id = await agent.sh("echo stopping; kill -STOP $$; sleep 60")
    await agent.until(terminal_id, "stopping")
    assert (await agent.output(terminal_id)).exit_status is UNSET  # stopped is not ended
    await agent.kill(terminal_id)
    assert (await agent.wait(terminal_id)).signal in {"SIGKILL", "SIGTERM"}
    await terminals.aclose()


@WAYS
async def test_a_command_whose_directory_is_removed_runs_on(
    root: Path, way: dict[str, Any]
) -> None:
    terminals = Terminals(**way)
    agent = Agent(terminals, Ctx(root))
    (root / "d").mkdir()
    os.mkfifo(root / "go")
    terminal_id = await agent.sh("echo up; cat ../go; echo done", cwd=f"{root}/d")
    await agent.until(terminal_id, "up")
    (root / "d").rmdir()
    await asyncio.to_thread((root / "go").write_text, "gone ")
    await agent.wait(terminal_id)
    assert "done" in (await agent.output(terminal_id)).output
    await terminals.aclose()


@WAYS
async def test_a_directory_that_is_removed_while_a_person_decides_is_not_replaced(
    root: Path, way: dict[str, Any]
) -> None:
    (root / "d").mkdir()

    async def guard(_operation: Operation) -> bool:
        (root / "d").rmdir()
        (root / "d").mkdir()
        return True

    terminals = Terminals(guard=guard, **way)
    agent = Agent(terminals, Ctx(root))
    # In the one that was checked, where nothing can be made any more, or not at all.
    try:
        await agent.run("touch", "made", cwd=f"{root}/d")
    except _errors.RequestError as error:
        assert error.data["reason"] == "cannot_start"  # noqa: PT017
    assert os.listdir(root / "d") == []
    await terminals.aclose()


@WAYS
async def test_an_output_closed_early_is_no_end(root: Path, way: dict[str, Any]) -> None:
    terminals = Terminals(**way)
    agent = Agent(terminals, Ctx(root))
    os.mkfifo(root / "go")
    terminal_id = await agent.sh("echo out; exec >&- 2>&-; read line < go; exit 7")
    await agent.until(terminal_id, "out")
    assert (await agent.output(terminal_id)).exit_status is UNSET
    await asyncio.to_thread((root / "go").write_text, "x\n")
    assert (await agent.wait(terminal_id)).exit_code == 7
    await terminals.aclose()


@WAYS
@pytest.mark.parametrize("how", ["release", "cancel"])
async def test_a_start_that_is_no_longer_wanted_leaves_nothing(
    root: Path, way: dict[str, Any], how: str
) -> None:
    # At every step of a start: the loop runs once more before each next attempt.
    for steps in range(12):
        terminals = Terminals(**way)
        agent = Agent(terminals, Ctx(root))
        creating = asyncio.create_task(agent.create("sleep", "60"))
        for _ in range(steps * 2):
            await asyncio.sleep(0.002 if way else 0)
        if how == "cancel":
            creating.cancel()
        else:
            await terminals.release_session("s")
        try:
            await creating
        except asyncio.CancelledError:
            assert how == "cancel"
        except _errors.RequestError as error:
            assert error.data == {"reason": "session_released"}  # noqa: PT017  (or it came in time)
        await terminals.aclose()
        assert not [
            child for child in psutil.Process().children(recursive=True) if "60" in child.cmdline()
        ]


# --- being shown --------------------------------------------------------------------------------


@WAYS
async def test_a_display_is_told_what_is_printed_as_it_is_printed(
    root: Path, way: dict[str, Any]
) -> None:
    shown: list[tuple[str, str, str]] = []
    told = asyncio.Event()

    def show(session_id: str, terminal_id: str, text: str) -> None:
        shown.append((session_id, terminal_id, text))
        told.set()

    terminals = Terminals(on_output=show, **way)
    agent = Agent(terminals, Ctx(root))
    os.mkfifo(root / "go")
    terminal_id = await agent.sh(
        r"printf 'one\342\202'; cat go; printf '\254\377'", output_byte_limit=2
    )
    await told.wait()
    assert shown == [("s", terminal_id, "one")]
    await asyncio.to_thread((root / "go").write_text, "")
    await agent.wait(terminal_id)
    # All of it, in whole characters, whatever the agent wants kept.
    assert "".join(text for _, _, text in shown) == "one€\ufffd"
    assert {(session, terminal) for session, terminal, _ in shown} == {("s", terminal_id)}
    await terminals.aclose()
    assert "".join(text for _, _, text in shown) == "one€\ufffd"


async def test_a_display_that_fails_is_told_of_once_and_changes_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def show(_session_id: str, _terminal_id: str, _text: str) -> None:
        raise ZeroDivisionError

    terminals = Terminals(on_output=show)
    agent = Agent(terminals, Ctx(root))
    script = "for n in range(3): print('x' * 70_000)"
    terminal_id = await agent.python(script)
    assert (await agent.wait(terminal_id)).exit_code == 0
    assert len((await agent.output(terminal_id)).output) == 3 * 70_001
    assert [record.message for record in caplog.records] == [
        "on_output failed, and is no longer told of this terminal"
    ]
    await terminals.aclose()


@pytest.mark.covers("FF-47")
@pytest.mark.parametrize("way", [{}, {"confine": "bwrap"}], ids=["plain", "bwrap"])
async def test_a_hundred_mebibytes_leave_their_exact_tail_and_cost_no_more(
    root: Path, way: dict[str, Any]
) -> None:
    terminals = Terminals(**way)
    agent = Agent(terminals, Ctx(root))
    await agent.run("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # 1 MiB + 1 a line, so that no piece is like the one before.
    line = "yes 0123456789abcdef | tr -d '\\n' | head -c 1048576; echo"
    terminal_id = await agent.sh(
        f"i=0; while [ $i -lt 100 ]; do {line}; i=$((i+1)); done; echo the end",
        output_byte_limit=MIB,
    )
    assert (await agent.wait(terminal_id)).exit_code == 0
    answer = await agent.output(terminal_id)
    whole_line = "0123456789abcdef" * (MIB // 16) + "\n"
    assert answer.output == (whole_line * 2 + "the end\n")[-MIB:]
    assert answer.truncated
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 * 1024  # KiB
    await terminals.aclose()


# --- being asked --------------------------------------------------------------------------------


@pytest.mark.covers("FF-46")
async def test_the_guard_is_asked_for_the_command_as_it_will_run(root: Path) -> None:
    asked: list[Operation] = []

    async def guard(operation: Operation) -> bool:
        asked.append(operation)
        return True

    (root / "d").mkdir()
    (root / "l").symlink_to("d")
    terminals = Terminals(guard=guard)
    agent = Agent(terminals, Ctx(root))
    env = [v1.EnvVariable(name="X", value="1")]
    await agent.create("echo", "a b", cwd=f"{root}/l", env=env)
    await agent.create("echo hi | wc -c")
    assert asked == [
        Operation(
            kind="execute",
            session_id="s",
            title="echo 'a b'",
            command=["echo", "a b"],
            cwd=f"{root}/d",
            env={"X": "1"},
            roots=(str(root),),
        ),
        Operation(
            kind="execute",
            session_id="s",
            title="echo hi | wc -c",
            command=["/bin/sh", "-c", "echo hi | wc -c"],
            cwd=str(root),
            roots=(str(root),),
        ),
    ]
    await terminals.aclose()


@pytest.mark.parametrize("answer", [False, None, 1])
async def test_anything_but_true_starts_nothing(root: Path, answer: Any) -> None:
    async def guard(operation: Operation) -> bool:
        return answer  # type: ignore[no-any-return]

    agent = Agent(Terminals(guard=guard), Ctx(root))
    code, message, data = await error_of(agent.create("touch", "made"))
    assert (code, message) == (-32603, "Permission denied")
    assert data == {"reason": "permission_denied"}
    assert os.listdir(root) == []


async def test_commands_being_decided_about_count_as_terminals(root: Path) -> None:
    go = asyncio.Event()

    async def guard(operation: Operation) -> bool:
        await go.wait()
        return True

    terminals = Terminals(guard=guard, per_session=2)
    agent = Agent(terminals, Ctx(root))
    creating = [asyncio.create_task(agent.create("true")) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await error_of(agent.create("true")))[2]["reason"] == "too_many_terminals"
    creating[0].cancel()
    await asyncio.wait(creating[:1])
    creating.append(asyncio.create_task(agent.create("true")))
    go.set()
    await asyncio.gather(*creating[1:])
    await terminals.aclose()


async def test_a_command_allowed_after_its_session_was_released_is_not_started(
    root: Path,
) -> None:
    async def guard(operation: Operation) -> bool:
        await lent.release_session("s")
        return True

    lent = Terminals(guard=guard)
    code, _, data = await error_of(Agent(lent, Ctx(root)).create("touch", "made"))
    assert (code, data) == (-32603, {"reason": "session_released"})
    assert os.listdir(root) == []


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.covers("FF-46")
@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("echo out; echo err 1>&2; exit 3", "out\nerr\n"),
        ("echo hi | wc -c", "3\n"),
        ("echo $HOME_OF_NOBODY.", ".\n"),
        ("echo 'a  b'", "a  b\n"),
        ("echo one\necho two", "one\ntwo\n"),
        ("pwd", "{root}\n"),
        ("{root}/my tool", "tool in {root}\n"),
        ("./my tool", "tool in {root}\n"),
    ],
)
async def test_a_whole_line_as_command_is_run_by_a_shell(
    agent: Agent, terminals: Terminals, root: Path, command: str, output: str
) -> None:
    (root / "my tool").write_text("#!/bin/sh\necho tool in $PWD\n")
    (root / "my tool").chmod(0o755)
    command = command.replace("{root}", str(root))
    answer = (await agent.run(command)).replace(" ", "") if "wc" in command else None
    expected = output.replace("{root}", str(root))
    assert (answer or await agent.run(command)) == expected
    await terminals.aclose()


@pytest.mark.covers("FF-46")
async def test_arguments_never_reach_a_shell(agent: Agent, terminals: Terminals) -> None:
    words = ["a; touch made", "$(touch made)", "'\"\n", "a b", ""]
    script = "import sys; print(sys.argv[1:])"
    assert await agent.run(sys.executable, "-c", script, *words) == f"{words}\n"
    code, _, data = await error_of(agent.create("echo hi;", "x"))
    assert (code, data) == (-32602, {"reason": "command_not_found", "command": "echo hi;"})
    assert os.listdir(agent.ctx.roots[0]) == []
    await terminals.aclose()


@pytest.mark.covers("FF-46")
async def test_the_shell_can_be_switched_off(root: Path) -> None:
    terminals = Terminals(shell_fallback=False)
    agent = Agent(terminals, Ctx(root))
    code, _, data = await error_of(agent.create("echo hi"))
    assert (code, data) == (-32602, {"reason": "command_not_found", "command": "echo hi"})
    assert await agent.run("echo", "hi") == "hi\n"
    await terminals.aclose()


@pytest.mark.parametrize(
    ("words", "env", "reason"),
    [
        (["x" * 131_072], {}, "command_invalid"),
        (["a b" * 50_000], {}, "command_invalid"),
        (["no-such-program", *["x"] * 1_000_000], {}, "command_invalid"),
        (["no-such-program", *["x" * 131_000] * 17], {}, "command_invalid"),
        (["a b"], {"X": "x" * 131_072}, "env_invalid"),
        (["a b"], {"x" * 131_072: ""}, "env_invalid"),
        (["a b"], {f"X{n}": "" for n in range(100_000)}, "env_invalid"),
        # Each folder would be looked into before anybody is asked, and again to say what is missing.
        (["a b"], {"PATH": ":".join(f"/{n}" for n in range(20_000))}, "env_invalid"),
        (["no-such-program"], {"PATH": ":" * 2_000_000}, "env_invalid"),
    ],
)
async def test_more_than_a_system_takes_is_refused_at_once_and_nobody_is_asked(
    root: Path, words: list[str], env: dict[str, str], reason: str
) -> None:
    async def guard(_operation: Operation) -> bool:
        raise AssertionError

    terminals = Terminals(guard=guard)
    agent = Agent(terminals, Ctx(root))
    variables = [v1.EnvVariable(name=name, value=value) for name, value in env.items()]
    began = time.process_time()
    code, _, data = await error_of(agent.create(words[0], *words[1:], env=variables))
    assert (code, data["reason"]) == (-32602, reason)
    assert len(str(data)) < 1000
    assert time.process_time() - began < 0.2
    await terminals.aclose()


async def test_as_much_as_a_system_takes_is_run(root: Path) -> None:
    terminals = Terminals()
    agent = Agent(terminals, Ctx(root))
    env = [v1.EnvVariable(name=f"X{n}", value="") for n in range(1000)]
    path = v1.EnvVariable(name="PATH", value=":".join([*["/nowhere"] * 1000, "/usr/bin", "/bin"]))
    count = ("sh", "-c", "echo $#", *["x" * 100] * 10_001)
    assert await agent.run(*count, env=[*env, path]) == "10000\n"
    await terminals.aclose()


@pytest.mark.covers("FF-46")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "command_invalid"),
        ("a\0b", "command_invalid"),
        ("no-such-program-anywhere", "command_not_found"),
        ("./missing", "command_not_found"),
        ("./plain", "command_not_found"),
        ("./folder", "command_not_found"),
        ("./broken", "cannot_start"),
    ],
)
async def test_what_cannot_be_run_is_refused_and_leaves_no_terminal(
    root: Path, command: str, reason: str
) -> None:
    (root / "plain").touch()
    (root / "folder").mkdir()
    (root / "broken").write_text("#!/no/such/interpreter\n")
    (root / "broken").chmod(0o755)
    terminals = Terminals(per_session=1)
    agent = Agent(terminals, Ctx(root))
    for _ in range(2):
        code, message, data = await error_of(agent.create(command))
        assert (code, message, data["reason"]) == (-32602, "Invalid params", reason)
    if "\0" not in command:
        await error_of(agent.create("echo", "a\0b"))
    await agent.run("true")
    await terminals.aclose()


async def test_arguments_that_are_too_long_are_refused(agent: Agent) -> None:
    code, _, data = await error_of(agent.create("echo", "x" * (3 * MIB)))
    assert (code, data) == (-32602, {"reason": "command_invalid"})


async def test_a_command_gets_no_input_of_ours(agent: Agent, terminals: Terminals) -> None:
    assert await agent.run("cat") == ""
    await terminals.aclose()


# --- environment --------------------------------------------------------------------------------


async def environment(agent: Agent, **more: Any) -> dict[str, str]:
    text = await agent.run("/usr/bin/env", "-0", **more)
    return dict(entry.split("=", 1) for entry in text.split("\0") if entry)


@pytest.mark.covers("FF-41")
async def test_the_environment_is_the_essential_one_then_ours_then_the_agents(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    terminals = Terminals(env={"OURS": "1", "BOTH": "ours"})
    agent = Agent(terminals, Ctx(root))
    entries = [("AGENTS", "a=b c"), ("BOTH", "agent's"), ("TWICE", "1"), ("TWICE", "2")]
    env = await environment(
        agent, env=[v1.EnvVariable(name=name, value=value) for name, value in entries]
    )
    assert "SECRET_X" not in env
    assert env["PATH"] == os.environ["PATH"]
    assert env["PWD"] == str(root)
    assert env["OURS"] == "1"
    assert env["BOTH"] == "agent's"
    assert env["AGENTS"] == "a=b c"
    assert env["TWICE"] == "2"
    await terminals.aclose()
    assert env["HOME"] == os.environ["HOME"]
    for all_of_it in (os.environ, "inherit"):
        terminals = Terminals(env=all_of_it)
        assert (await environment(Agent(terminals, Ctx(root))))["SECRET_X"] == "1"
        await terminals.aclose()
    for essential in (None, "essential", dict[str, str]()):
        terminals = Terminals(env=essential)
        env = await environment(Agent(terminals, Ctx(root)))
        assert "SECRET_X" not in env
        assert (env["PATH"], env["HOME"]) == (os.environ["PATH"], os.environ["HOME"])
        await terminals.aclose()


@pytest.mark.covers("FF-41")
async def test_a_variable_that_is_none_is_left_out_unless_the_agent_gives_it(root: Path) -> None:
    terminals = Terminals(env={"HOME": None, "LOGNAME": None})
    agent = Agent(terminals, Ctx(root))
    assert not {"HOME", "LOGNAME"} & set(await environment(agent))
    assert (await environment(agent, env=[v1.EnvVariable(name="HOME", value="")]))["HOME"] == ""
    await terminals.aclose()


@pytest.mark.covers("FF-41")
async def test_an_environment_that_changes_is_seen_as_it_is_when_a_command_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminals = Terminals(env="inherit")
    monkeypatch.setenv("LATER", "1")
    assert (await environment(Agent(terminals, Ctx(root))))["LATER"] == "1"
    await terminals.aclose()


def test_an_environment_for_commands_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="cannot be called ''"):
        Terminals(env={"": "1"})


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize(("name", "value"), [("", "1"), ("A=B", "1"), ("A\0", "1"), ("A", "\0")])
async def test_a_variable_that_cannot_exist_is_refused(agent: Agent, name: str, value: str) -> None:
    env = [v1.EnvVariable(name=name, value=value)]
    code, _, data = await error_of(agent.create("true", env=env))
    assert (code, data) == (-32602, {"reason": "env_invalid", "name": name})


async def test_a_program_is_searched_on_the_path_that_the_command_gets(
    agent: Agent, terminals: Terminals, root: Path
) -> None:
    (root / "my tool").write_text("#!/bin/sh\necho found\n")
    (root / "my tool").chmod(0o755)
    env = [v1.EnvVariable(name="PATH", value=f"{root}:/bin:/usr/bin")]
    assert await agent.run("my tool", env=env) == "found\n"
    await terminals.aclose()


# --- working directory --------------------------------------------------------------------------


@pytest.mark.covers("R1-118")
async def test_a_command_runs_in_its_cwd_or_the_first_directory_of_its_session(
    terminals: Terminals, root: Path, tmp_path: Path
) -> None:
    extra = tmp_path.resolve() / "extra"
    extra.mkdir()
    (root / "d").mkdir()
    (root / "l").symlink_to("d")
    agent = Agent(terminals, Ctx(root, extra))
    for cwd, expected in (
        (UNSET, root),
        (None, root),
        (str(root), root),
        (f"{root}/d/", root / "d"),
        (f"{root}/l", root / "d"),
        (str(extra), extra),
    ):
        assert await agent.run("/bin/pwd", cwd=cwd) == f"{expected}\n"
    await terminals.aclose()


@pytest.mark.parametrize(
    ("cwd", "expected"),
    [
        ("d", (-32602, "path_not_absolute")),
        ("/", (-32602, "path_traversal")),
        ("{root}/..", (-32602, "path_traversal")),
        ("{root}2", (-32602, "path_traversal")),
        ("{root}/out", (-32602, "symlink_escape")),
        ("{root}/f", (-32602, "not_a_directory")),
        ("{root}/none", (-32002, None)),
        ("{root}/none/", (-32002, None)),
    ],
)
async def test_a_cwd_is_confined_like_a_file(
    agent: Agent, root: Path, cwd: str, expected: tuple[int, str | None]
) -> None:
    (root / "f").touch()
    (root / "out").symlink_to("/")
    code, _, data = await error_of(agent.create("true", cwd=cwd.replace("{root}", str(root))))
    assert (code, data.get("reason")) == expected


async def test_roots_of_its_own_hold_against_the_sessions(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    terminals = Terminals(root)
    agent = Agent(terminals, Ctx(other))
    assert (await error_of(agent.create("true")))[2]["reason"] == "path_traversal"
    assert await agent.run("/bin/pwd", cwd=str(root)) == f"{root}\n"
    assert await Agent(terminals, Ctx()).run("/bin/pwd") == f"{root}\n"
    await terminals.aclose()


async def test_without_any_directory_nothing_is_run(terminals: Terminals) -> None:
    assert (await error_of(Agent(terminals, Ctx()).create("true")))[2]["reason"] == (
        "path_traversal"
    )


async def test_the_directory_that_was_allowed_is_the_one_entered_whatever_is_swapped(
    root: Path, tmp_path: Path
) -> None:
    (root / "d").mkdir()

    async def guard(operation: Operation) -> bool:
        (root / "d").rename(root / "moved")
        (root / "d").symlink_to(tmp_path)
        return True

    terminals = Terminals(guard=guard)
    agent = Agent(terminals, Ctx(root))
    assert await agent.run("/bin/pwd", cwd=f"{root}/d") == f"{root}/moved\n"
    await terminals.aclose()


async def test_where_descriptors_have_no_names_the_real_path_is_entered(
    agent: Agent, terminals: Terminals, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    terminal_id = await agent.create("/bin/pwd")
    monkeypatch.undo()
    await agent.wait(terminal_id)
    assert (await agent.output(terminal_id)).output == f"{root}\n"
    await terminals.aclose()


# --- output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(0, ""), (1, ""), (2, ""), (3, "€"), (4, "€"), (7, "€€"), (14, "a€€€€"), (15, None)],
)
@pytest.mark.covers("R1-112", "FF-47")
async def test_the_end_of_the_output_is_kept_cut_between_characters(
    agent: Agent, terminals: Terminals, limit: int, kept: str | None
) -> None:
    terminal_id = await agent.create("printf", "aaa€€€€", output_byte_limit=limit)
    await agent.wait(terminal_id)
    answer = await agent.output(terminal_id)
    whole = "aaa€€€€"
    # Thirteen bytes of which the last twelve are four characters: 13 and more keep letters.
    expected = whole[-(limit - 12 + 4) :] if kept is None or limit > 12 else kept
    assert answer.output == expected
    assert answer.truncated == (limit < 15)
    await terminals.aclose()


async def test_a_limit_of_zero_on_no_output_has_lost_nothing(
    agent: Agent, terminals: Terminals
) -> None:
    terminal_id = await agent.create("true", output_byte_limit=0)
    await agent.wait(terminal_id)
    answer = await agent.output(terminal_id)
    assert (answer.output, answer.truncated) == ("", False)
    await terminals.aclose()


@pytest.mark.covers("FF-47")
@pytest.mark.parametrize("limit", [UNSET, None, 1000, 10**12])
async def test_no_more_is_kept_than_we_allow(root: Path, limit: Any) -> None:
    terminals = Terminals(output_bytes=1000)
    agent = Agent(terminals, Ctx(root))
    terminal_id = await agent.python("print('x' * 5000)", output_byte_limit=limit)
    await agent.wait(terminal_id)
    assert (await agent.output(terminal_id)).output == "x" * 999 + "\n"
    await terminals.aclose()
    assert Terminals().output_bytes == MIB


async def test_the_tail_of_much_output_is_exact_and_complete_at_the_exit(
    agent: Agent, terminals: Terminals
) -> None:
    script = "for n in range(400_000): print('line', n)"
    terminal_id = await agent.python(script, output_byte_limit=100_000)
    assert (await agent.wait(terminal_id)).exit_code == 0
    answer = await agent.output(terminal_id)
    whole = "".join(f"line {number}\n" for number in range(400_000))
    assert answer.output == whole[-100_000:]
    assert answer.truncated
    await terminals.aclose()


@pytest.mark.covers("FF-03")
async def test_half_a_character_is_held_back_until_it_is_whole(
    agent: Agent, terminals: Terminals, root: Path
) -> None:
    os.mkfifo(root / "go")
    os.mkfifo(root / "done")
    script = (
        "import sys\n"
        "for byte in b'<', b'\\xe2', b'\\x82', b'\\xac', b'>', b'\\xe2':\n"
        "    open('go').read()\n"
        "    sys.stdout.buffer.raw.write(byte)\n"
        "    open('done', 'w').close()"
    )
    terminal_id = await agent.python(script)
    for expected in ("<", "<", "<", "<€", "<€>"):
        await asyncio.to_thread((root / "go").write_text, "x")
        await asyncio.to_thread((root / "done").read_text)
        await agent.until(terminal_id, expected)
        assert (await agent.output(terminal_id)).output == expected
    await asyncio.to_thread((root / "go").write_text, "x")
    await asyncio.to_thread((root / "done").read_text)
    await agent.wait(terminal_id)
    await agent.until(terminal_id, "<€>\ufffd")  # nothing completes it any more
    await terminals.aclose()


@pytest.mark.covers("FF-47")
async def test_output_that_is_no_text_stays_within_the_limit(
    agent: Agent, terminals: Terminals
) -> None:
    script = "import os; os.write(1, bytes(range(128, 256)) * 8)"
    terminal_id = await agent.python(script, output_byte_limit=500)
    await agent.wait(terminal_id)
    answer = await agent.output(terminal_id)
    assert 497 < len(answer.output.encode()) <= 500
    assert set(answer.output) == {"\ufffd"}
    assert answer.truncated
    await terminals.aclose()


async def test_endless_output_holds_up_nothing_else(agent: Agent, terminals: Terminals) -> None:
    endless = await agent.create("yes")
    await agent.until(endless, "y\ny\n")
    assert await agent.run("echo", "hi") == "hi\n"
    await agent.kill(endless)
    assert set((await agent.output(endless)).output) <= {"y", "\n"}
    await terminals.aclose()


async def test_an_endless_writer_left_behind_does_not_delay_the_exit(
    agent: Agent, terminals: Terminals
) -> None:
    terminal_id = await agent.sh("yes & echo started")
    assert (await agent.wait(terminal_id)).exit_code == 0
    await agent.release(terminal_id)
    await terminals.aclose()
