"""The bounds of a run, in this process: what counts as silence, and what is tried last."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest

from antiphon.cli._decide import Decider
from antiphon.cli._output import Output
from antiphon.cli._plain import Quiet
from antiphon.cli._turn import Job, Run, report
from antiphon.cli._view import View
from antiphon.services import Permissions
from tests.cli.command import BOUND, ODD_AGENT, environment, left_by, odd
from tests.cli.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from antiphon.cli._outcome import Outcome
    from antiphon.cli._view import Question


class Slow:
    """A person who thinks for a while and then says yes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def choose(self, question: Question) -> str | None:
        await asyncio.sleep(self.seconds)
        return question.options[0][0]


def play(
    kind: str,
    cwd: Path,
    *,
    policy: Literal["ask", "allow"] = "allow",
    asker: Slow | None = None,
    afterwards: Callable[[Outcome], Awaitable[None]] | None = None,
    **more: Any,
) -> Outcome:
    output = Output()
    view = View(Quiet(output))
    job = Job(
        argv=[sys.executable, str(ODD_AGENT), kind],
        cwd=str(cwd),
        text="x",
        started=time.monotonic(),
        **more,
    )
    decider = Decider(Permissions(default=policy), view, asker, reason=policy)
    return Run(job, output=output, view=view, decider=decider, afterwards=afterwards).play()


def test_outcome_tells_what_happened(tmp_path: Path) -> None:
    outcome = play("asks", tmp_path)

    assert outcome.exit_code == 0
    assert (outcome.stop_reason, outcome.permissions, outcome.updates) == ("end_turn", 1, 1)
    assert (outcome.agent, outcome.session_id) == ("odd 1", "s-1")


def test_a_person_who_thinks_is_no_silence(tmp_path: Path) -> None:
    outcome = play("asks", tmp_path, policy="ask", asker=Slow(0.6), silence=0.3)

    assert outcome.exit_code == 0


def test_a_command_of_ours_that_runs_is_no_silence(tmp_path: Path) -> None:
    outcome = play("runs_a_while", tmp_path, silence=0.3)

    assert outcome.exit_code == 0


def test_no_word_for_too_long_is_a_timeout(tmp_path: Path) -> None:
    outcome = play("waits_for_cancel", tmp_path, silence=0.2)

    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.exit_code) == ("timeout", 5)


def test_a_terminal_that_takes_no_output_cannot_outlast_the_time_limit() -> None:
    marked = environment()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "antiphon", "prompt", "--timeout", "0.5"),
            *("--agent", odd("babbles"), "x"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=marked,
    ) as process:
        # Nobody reads: the pipe is full soon, and the command is stuck in a write.
        assert process.wait(BOUND) == 5
    assert not left_by(marked)


# A person at a terminal: the agent is not in the terminal's foreground group, so that Ctrl-C is for
# the command alone, and reaches the agent as the protocol says it.
CTRL_C = "\x03"
TERMINALS = ["xterm-256color", "dumb"]


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("term", TERMINALS)
def test_ctrl_c_in_a_turn_cancels_it_and_is_no_signal_to_the_agent(term: str) -> None:
    with Screen(
        "prompt", "--verbose", "--agent", odd("waits_for_cancel"), "x", term=term
    ) as screen:
        screen.read_until("working")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "cancelling the turn" in screen.text
        assert "Interrupted." in screen.text


def test_a_person_sees_that_an_agent_is_at_work_before_it_says_anything() -> None:
    with Screen("prompt", "--agent", odd("thinks_for_long"), "x") as screen:
        screen.read_until("working  1 s  Ctrl-C cancels")
        screen.type(CTRL_C)

        assert screen.end() == 130


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("term", TERMINALS)
def test_ctrl_c_at_a_question_answers_it_with_cancelled_and_cancels_the_turn(term: str) -> None:
    options = ["--verbose", "--permissions", "ask"]
    with Screen("prompt", *options, "--agent", odd("hears"), "x", term=term) as screen:
        screen.read_until("Esc says no" if term != "dumb" else "> ")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "outcome cancelled" in screen.text
        assert "the turn ends" in screen.text
        assert "heard SIGINT" not in screen.text


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("term", TERMINALS)
def test_ctrl_c_while_the_agent_starts_ends_the_agent(term: str) -> None:
    with Screen("prompt", "--verbose", "--agent", odd("starts_for_ever"), "x", term=term) as screen:
        screen.read_until("starting")
        started = time.monotonic()
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert time.monotonic() - started < 3  # it ends with its input; nobody waits for an answer
        assert "ending the agent" in screen.text
        assert "Traceback" not in screen.text
        assert "heard SIGINT" not in screen.text


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("term", TERMINALS)
@pytest.mark.parametrize(
    ("agent", "words"),
    [("deaf", "working"), ("deaf_at_a_question", "Launch"), ("stubborn", "stderr: child")],
)
def test_a_second_ctrl_c_stops_hard_whatever_the_agent_does(
    agent: str, words: str, term: str
) -> None:
    options = ["--verbose", "--permissions", "ask"]
    with Screen("prompt", *options, "--agent", odd(agent), "x", term=term) as screen:
        screen.read_until(words)
        if agent == "deaf_at_a_question":
            screen.read_until("Esc says no" if term != "dumb" else "> ")
        screen.type(CTRL_C)
        screen.read_until("interrupt again")
        started = time.monotonic()
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert time.monotonic() - started < 1.5
        assert "Traceback" not in screen.text


def test_a_fault_of_ours_is_a_result_too_and_has_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def after(outcome: Outcome) -> None:
        raise ZeroDivisionError

    outcome = play("echo", tmp_path, afterwards=after)

    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.exit_code) == ("internal", 4)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_report_says_in_words_what_went_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = report(play("dies", tmp_path), output=Output(), as_json=True, with_text=True)

    out, err = capfd.readouterr()
    assert code == 3
    assert out.endswith('"stderr":"odd: out of memory\\n"}}\n')
    assert err == (
        "antiphon: The agent's process ended.\nexit status: 9\n"
        "its standard error ends with:\n  odd: out of memory\n"
    )
