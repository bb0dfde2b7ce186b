"""Terminals for commands: real ones, of the size asked for, at which nobody sits."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.services.agent import Agent, Ctx, error_of, listen

from antiphon.services import Terminals, _pty
from antiphon.services._pty import Silence, checked_size, open_pty

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _output_is_heard_of(  # pyright: ignore[reportUnusedFunction]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "w"
    folder.mkdir()
    return folder


@pytest.fixture(params=[None, "bwrap"])
def confine(request: pytest.FixtureRequest) -> Any:
    return request.param


def lent(root: Path, **options: Any) -> tuple[Terminals, Agent]:
    options = {"pty": True, "kill_grace": 0.5, **options}
    terminals = Terminals(**options)
    return terminals, Agent(terminals, Ctx(root))


# --- a real terminal ----------------------------------------------------------------------------


async def test_a_command_has_a_terminal_of_its_own_of_the_size_asked_for(
    root: Path, confine: Any, loop_factory: object
) -> None:
    terminals, agent = lent(root, pty=(7, 33), confine=confine)
    script = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && stty size && : < /dev/tty && echo theirs; exit 3"
    terminal_id = await agent.sh(script)
    assert (await agent.wait(terminal_id)).exit_code == 3
    assert (await agent.output(terminal_id)).output == "7 33\r\ntheirs\r\n"
    await terminals.aclose()
    terminals, agent = lent(root, confine=confine)
    assert await agent.run("stty size;") == "24 80\r\n"
    await terminals.aclose()


async def test_it_leads_its_session_and_is_in_the_foreground(root: Path) -> None:
    terminals, agent = lent(root)
    script = (
        "import os; print(os.getsid(0) == os.getpid() == os.getpgrp() == os.tcgetpgrp(0),"
        " os.ctermid(), os.ttyname(0) != '', sorted(map(int, os.listdir('/proc/self/fd'))))"
    )
    output = await agent.run(sys.executable, "-c", script)
    assert output == "True /dev/tty True [0, 1, 2, 3]\r\n"
    await terminals.aclose()


async def test_the_environment_is_the_policys_and_knows_of_a_terminal(
    root: Path, confine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LANG", "C")
    for name in ("LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    terminals, agent = lent(root, confine=confine, env={"A": "ü=1\n2"})
    env = (await agent.run("env", "-0")).split("\0")
    # What starts the command is a Python, which would set a variable of the C locale.
    assert {name.partition("=")[0] for name in env} & {"SECRET_X", "LC_CTYPE"} == set()
    assert "TERM=xterm-256color" in env
    assert "A=ü=1\r\n2" in env
    await terminals.aclose()
    monkeypatch.setenv("TERM", "vt100")
    for given, seen in (({}, "vt100"), ({"TERM": "dumb"}, "dumb"), ({"TERM": None}, "")):
        terminals, agent = lent(root, confine=confine, env=given)
        assert await agent.run("/bin/sh", "-c", "printenv TERM") == (f"{seen}\r\n" if seen else "")
        await terminals.aclose()


async def test_output_is_decoded_and_its_end_kept_as_from_a_pipe(root: Path, confine: Any) -> None:
    terminals, agent = lent(root, confine=confine)
    terminal_id = await agent.create("printf", "aaa€€€€", output_byte_limit=7)
    await agent.wait(terminal_id)
    answer = await agent.output(terminal_id)
    assert (answer.output, answer.truncated) == ("€€", True)
    many = await agent.sh("i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo line $i; done")
    await agent.wait(many)
    whole = "".join(f"line {number}\r\n" for number in range(1, 3001))
    assert (await agent.output(many)).output == whole
    half = await agent.create("printf", r"a\342")
    await agent.wait(half)
    assert (await agent.output(half)).output == "a\ufffd"  # its end is the end of the output
    await terminals.aclose()


@pytest.mark.covers("R1-118")
async def test_its_end_is_told_as_without_a_terminal(root: Path, confine: Any) -> None:
    terminals, agent = lent(root, confine=confine)
    for script, code, name in (("exit 137", 137, None), ("kill -KILL $$", None, "SIGKILL")):
        answer = await agent.wait(await agent.sh(script))
        assert (answer.exit_code, answer.signal) == (code, name)
    await terminals.aclose()


@pytest.mark.parametrize("script", ["sleep 60 & echo $!; wait", "trap '' HUP; sleep 60 & echo $!"])
async def test_a_kill_ends_all_that_a_command_in_a_terminal_has_started(
    root: Path, script: str
) -> None:
    terminals, agent = lent(root)
    terminal_id = await agent.sh(script)
    await agent.until(terminal_id, "\n")
    child = psutil.Process(int((await agent.output(terminal_id)).output))
    await agent.kill(terminal_id)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    await terminals.aclose()


async def test_a_command_that_closes_its_terminal_is_still_watched(
    root: Path, confine: Any
) -> None:
    terminals, agent = lent(root, confine=confine)
    os.mkfifo(root / "go")
    script = "echo out; exec <&- >&- 2>&-; read line < go; echo later > /dev/tty; exit 5"
    terminal_id = await agent.sh(script)
    await agent.until(terminal_id, "out\r\n")
    waiting = asyncio.create_task(agent.wait(terminal_id))
    await asyncio.to_thread((root / "go").write_text, "go\n")
    assert (await waiting).exit_code == 5
    assert (await agent.output(terminal_id)).output == "out\r\nlater\r\n"
    await terminals.aclose()


@pytest.mark.parametrize("command", ["no-such-program", "./missing", "./folder"])
async def test_what_cannot_be_run_is_refused_and_leaves_no_terminal(
    root: Path, confine: Any, command: str
) -> None:
    (root / "folder").mkdir()
    terminals, agent = lent(root, confine=confine, per_session=1)
    for _ in range(2):
        code, _, data = await error_of(agent.create(command))
        assert (code, data["reason"]) == (-32602, "command_not_found")
    code, _, data = await error_of(agent.create("echo", "x" * (3 << 20)))
    assert (code, data["reason"]) == (-32602, "command_invalid")
    await terminals.aclose()


async def test_the_directory_that_was_checked_is_entered(root: Path) -> None:
    (root / "d").mkdir()

    async def swap(_operation: object) -> bool:
        (root / "d").rename(root / "moved")
        (root / "d").symlink_to("/etc")
        return True

    terminals, agent = lent(root, guard=swap)
    assert await agent.run("/bin/pwd", cwd=f"{root}/d") == f"{root}/moved\r\n"
    await terminals.aclose()


# --- nobody sits at it --------------------------------------------------------------------------


async def test_what_reads_gets_an_end_of_file(
    root: Path, confine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pty, "QUIET", 0.05)
    terminals, agent = lent(root, confine=confine)
    assert await agent.run("cat; read line; echo $?; cat < /dev/tty") == "1\r\n"
    await terminals.aclose()


async def test_what_reads_at_once_gets_it_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pty, "QUIET", 60)
    terminals, agent = lent(root)
    assert await agent.run("cat") == ""
    await terminals.aclose()


async def test_a_question_that_throws_away_what_was_typed_is_answered_by_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pty, "QUIET", 0.05)
    terminals, agent = lent(root)
    script = (
        "import termios; termios.tcflush(0, termios.TCIFLUSH)\n"
        "try: input('password? ')\n"
        "except EOFError: print('none')"
    )
    terminal_id = await agent.python(script)
    assert (await agent.wait(terminal_id)).exit_code == 0
    assert (await agent.output(terminal_id)).output == "password? none\r\n"
    await terminals.aclose()


async def test_keys_are_not_typed_into_a_program_that_takes_single_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pty, "QUIET", 0.01)
    terminals, agent = lent(root)
    script = (
        "import os, select, sys, tty; tty.setraw(0)\n"
        # What was typed while input was read by lines may be on its way still.
        "while select.select([0], [], [], 0.05)[0]: os.read(0, 100)\n"
        "print('raw', flush=True)\n"
        "print(select.select([0], [], [], 0.3)[0], flush=True)"
    )
    terminal_id = await agent.python(script)
    await agent.wait(terminal_id)
    assert (await agent.output(terminal_id)).output == "raw\n[]\n"
    await terminals.aclose()


async def test_the_pauses_double_until_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pty, "QUIET", 0.01)
    monkeypatch.setattr(_pty, "LONGEST_PAUSE", 0.04)
    typed: list[float] = []
    enough = asyncio.Event()

    class Watched(Silence):
        def _type(self) -> None:
            typed.append(time.monotonic())
            if len(typed) >= 6:
                enough.set()

    ours, theirs = open_pty((24, 80))
    silence = Watched(asyncio.get_running_loop(), ours, theirs)
    await enough.wait()
    gaps = [later - earlier for earlier, later in pairwise(typed)]
    for gap, least in zip(gaps, (0.01, 0.02, 0.04, 0.04, 0.04), strict=True):
        assert gap > least * 0.9
    assert silence._pause == 0.04
    silence.shown()
    assert silence._pause == 0.01
    silence.close()
    silence.close()
    silence.shown()
    os.close(ours)
    os.close(theirs)


async def test_an_end_of_file_is_typed_to_nobody_without_harm() -> None:
    ours, theirs = open_pty((24, 80))
    silence = Silence(asyncio.get_running_loop(), ours, theirs)
    for _ in range(10_000):
        silence._type()  # more than fits: nothing blocks and nothing is raised
    os.close(theirs)
    silence._type()
    silence.close()
    os.close(ours)


# --- its making ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pty", [(0, 80), (24, 65536), (24,), (24, 80, 1), (24.0, 80), (True, 80)])
def test_a_size_that_no_terminal_has_is_a_mistake(pty: Any) -> None:
    with pytest.raises(ValueError, match="pty is True or"):
        Terminals(pty=pty)


def test_sizes() -> None:
    assert checked_size(False) is None
    assert checked_size(True) == (24, 80)
    assert checked_size((1, 2)) == (1, 2)


def test_where_there_are_no_terminals_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert checked_size(False) is None
    with pytest.raises(NotImplementedError, match="pseudo-terminals"):
        checked_size(True)


def test_a_terminal_that_cannot_be_sized_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_fd: int, _size: object) -> None:
        raise termios.error(5, "no")

    monkeypatch.setattr(termios, "tcsetwinsize", fail)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="no"):
        open_pty((24, 80))
    assert len(os.listdir("/dev/fd")) == before
