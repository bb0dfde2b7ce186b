"""`antiphon login`, with agents that want one, on a terminal and without."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from antiphon.cli import _login, main
from tests.cli.command import BOUND, Ran, antiphon
from tests.cli.screen import Screen

AGENT = Path(__file__).with_name("asking_agent.py")
CTRL_C, CTRL_Z = "\x03", "\x1a"


def agent(tmp_path: Path, kind: str) -> str:
    return shlex.join([sys.executable, str(AGENT), kind, str(tmp_path / "state")])


def login(tmp_path: Path, kind: str, *more: str, **env: str) -> Screen:
    return Screen("login", "--agent", agent(tmp_path, kind), *more, term="dumb", **env)


def login_without_terminal(tmp_path: Path, kind: str, *more: str) -> Ran:
    return antiphon("login", "--agent", agent(tmp_path, kind), *more)


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "state.starts").read_text())


def client_of(tmp_path: Path) -> dict[str, object]:
    told: dict[str, object] = json.loads((tmp_path / "state.client").read_text())[
        "clientCapabilities"
    ]
    return told


# ------------------------------------------------------------------ on this terminal


@pytest.mark.covers("R1-145", "R1-147")
def test_a_terminal_way_runs_the_same_program_here_and_then_connects_anew(tmp_path: Path) -> None:
    with login(tmp_path, "works") as screen:
        screen.read_until("your name? ")
        assert "Running: " in screen.text
        assert "asking_agent.py works" in screen.text
        assert "login works\n" in screen.text
        assert "set by the agent: LOGIN_MARK" in screen.text
        assert "way works, mark set" in screen.text
        assert "foreground True, leader True" in screen.text
        screen.type("Jo\n")

        assert screen.end() == 0
        assert "hello Jo" in screen.text
        assert "you are signed in" in screen.text
    assert starts(tmp_path) == 2
    assert client_of(tmp_path)["auth"] == {"terminal": True}
    assert not (tmp_path / "state.authenticated").exists()


@pytest.mark.covers("R1-147")
@pytest.mark.parametrize(
    ("kind", "says"), [("fails", "it ended with exit code 3"), ("dies", "signal 9 ended it")]
)
def test_any_other_end_than_0_is_no_login(tmp_path: Path, kind: str, says: str) -> None:
    with login(tmp_path, kind) as screen:
        assert screen.end() == 4
        assert f"You are not signed in: {says}." in screen.text
    assert starts(tmp_path) == 1


def test_an_end_of_0_that_changed_nothing_is_no_login_either(tmp_path: Path) -> None:
    with login(tmp_path, "pretends") as screen:
        screen.read_until("your name? ")
        screen.type("Jo\n")

        assert screen.end() == 4
        assert "still wants a login: Authentication required" in screen.text


def test_ctrl_c_is_the_programs(tmp_path: Path) -> None:
    with login(tmp_path, "waits") as screen:
        screen.read_until("waiting")
        screen.type(CTRL_C)

        assert screen.end() == 4
        assert "it was me" in screen.text
        assert "it ended with exit code 9" in screen.text


def test_ctrl_c_that_the_program_leaves_to_the_system_is_an_interrupt(tmp_path: Path) -> None:
    with login(tmp_path, "leaves") as screen:
        screen.read_until("waiting")
        screen.type(CTRL_C)

        assert screen.end() == 130
    assert starts(tmp_path) == 1


def test_a_program_that_is_stopped_stops_us_and_goes_on_with_us(tmp_path: Path) -> None:
    with login(tmp_path, "waits") as screen:
        screen.read_until("waiting")
        screen.type(CTRL_Z)
        ours = psutil.Process(screen.process.pid)
        deadline = time.monotonic() + BOUND
        while ours.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, screen.text
            os.sched_yield()
        os.kill(screen.process.pid, signal.SIGCONT)
        while ours.status() == psutil.STATUS_STOPPED or any(
            child.status() == psutil.STATUS_STOPPED for child in ours.children()
        ):
            assert time.monotonic() < deadline, screen.text
            os.sched_yield()
        screen.type(CTRL_C)

        assert screen.end() == 4
        assert "it was me" in screen.text


def test_the_terminal_is_put_back_as_it_was(tmp_path: Path) -> None:
    with login(tmp_path, "messes") as screen:
        import termios

        before = termios.tcgetattr(screen._ours)
        assert screen.end() == 0
        assert termios.tcgetattr(screen._ours)[3] == before[3]
        assert before[3] & termios.ECHO


def test_a_terminal_way_needs_a_terminal(tmp_path: Path) -> None:
    ran = login_without_terminal(tmp_path, "works")

    assert ran.code == 4
    assert "needs a terminal" in ran.err
    assert "auth" not in client_of(tmp_path)


# ------------------------------------------------------------------ by the agent itself


@pytest.mark.covers("R1-134", "R1-135")
def test_an_agents_own_way_may_ask_to_open_a_page(tmp_path: Path) -> None:
    with login(tmp_path, "agent", BROWSER="/bin/true %s") as screen:
        screen.read_until("Signing in: Sign in with the web [oauth]: opens a page")
        screen.read_until("host: example.com")
        screen.read_until("without an answer\n> ")
        screen.type("1\n")

        assert screen.end() == 0
        assert "you are signed in" in screen.text
    assert (tmp_path / "state.authenticated").read_text() == "oauth"
    assert starts(tmp_path) == 1


def test_a_page_that_is_declined_is_no_login(tmp_path: Path) -> None:
    with login(tmp_path, "agent") as screen:
        screen.read_until("without an answer\n> ")
        screen.type("d\n")

        assert screen.end() == 4
        assert "did not sign you in: You said no (-32603)" in screen.text


def test_without_a_terminal_an_agents_own_way_goes_on_without_questions(tmp_path: Path) -> None:
    ran = login_without_terminal(tmp_path, "agent")

    assert ran.code == 0
    assert ran.out == ""
    assert "elicitation" not in client_of(tmp_path)


def test_an_interrupt_gives_up(tmp_path: Path) -> None:
    with login(tmp_path, "agent") as screen:
        screen.read_until("without an answer\n> ")
        screen.type(CTRL_C)

        assert screen.end() == 130


# ------------------------------------------------------------------ which way


def test_several_ways_are_a_choice(tmp_path: Path) -> None:
    with login(tmp_path, "several") as screen:
        screen.read_until("How do you want to sign in?")
        screen.read_until("2. Sign in \ufffd[31mhere [tty]\n> ")
        screen.type("2\n")
        screen.read_until("your name? ")
        screen.type("Jo\n")

        assert screen.end() == 0


def test_nothing_chosen_is_nothing_done(tmp_path: Path) -> None:
    with login(tmp_path, "several") as screen:
        screen.read_until("[tty]\n> ")
        screen.type("\x04")

        assert screen.end() == 4
        assert "Nothing was chosen" in screen.text
    assert not (tmp_path / "state.authenticated").exists()


@pytest.mark.parametrize("more", [(), ("--method", "nonsense")])
def test_without_a_choice_the_ways_are_listed_and_nothing_is_done(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    ran = login_without_terminal(tmp_path, "several", *more)

    assert ran.code == 2
    assert "[oauth]" in ran.err
    assert "[tty]" in ran.err
    assert ("a way that needs a terminal is not offered without one" in ran.err) == bool(more)
    assert "\x1b" not in ran.err
    assert not (tmp_path / "state.authenticated").exists()


def test_a_way_can_be_named(tmp_path: Path) -> None:
    ran = login_without_terminal(tmp_path, "several", "--method", "oauth")

    assert ran.code == 0
    assert (tmp_path / "state.authenticated").read_text() == "oauth"


def test_a_historic_way_by_variables_says_which(tmp_path: Path) -> None:
    ran = login_without_terminal(tmp_path, "variable")

    assert ran.code == 4
    assert "Set ODD_KEY in the environment" in ran.err
    assert not (tmp_path / "state.authenticated").exists()


def test_an_agent_without_ways_says_so(tmp_path: Path) -> None:
    ran = login_without_terminal(tmp_path, "none")
    assert ran.code == 4
    assert "names no way to sign in" in ran.err

    (tmp_path / "state").touch()
    ran = login_without_terminal(tmp_path, "none")
    assert ran.code == 0


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ((), 4, "did not open and close a session within 0.1 s"),
        (("--timeout", "0.1"), 5, "It did not end within 0.1 s"),
    ],
)
def test_an_agent_that_never_opens_a_session_is_given_up(
    tmp_path: Path,
    more: tuple[str, ...],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_login, "CHECK_SECONDS", 60.0 if more else 0.1)

    assert main(["login", "--agent", agent(tmp_path, "mute"), *more]) == code
    assert words in capsys.readouterr().err


def test_an_agent_that_cannot_be_started_is_exit_code_3(tmp_path: Path) -> None:
    ran = antiphon("login", "--agent", "no-such-program-anywhere")

    assert ran.code == 3
    assert "was not found" in ran.err


def test_a_prompt_that_needs_a_login_says_how(tmp_path: Path) -> None:
    words = agent(tmp_path, "several")
    ran = antiphon("prompt", "--agent", words, "x")

    assert ran.code == 4
    assert f"antiphon login --agent {shlex.quote(words)}" in ran.err
