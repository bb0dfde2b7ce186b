"""Questions on a terminal that can do nothing but lines (TERM=dumb)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.command import odd
from tests.cli.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"


def asking(agent: str, *more: str) -> Screen:
    return Screen("prompt", *more, "--agent", odd(agent), "x", term="dumb")


@pytest.mark.parametrize(
    ("typed", "chosen"), [("1\n", "y"), ("2\n", "n"), ("yes\n", "y"), ("No\n", "n")]
)
def test_an_answer_is_a_number_or_the_beginning_of_a_label(typed: str, chosen: str) -> None:
    with asking("asks") as screen:
        screen.read_until("The agent asks: Launch")
        screen.read_until("2. No\n> ")
        screen.type(typed)

        assert screen.end() == 0
        assert f'"optionId": "{chosen}"' in screen.text


def test_an_answer_that_fits_nothing_is_asked_for_again() -> None:
    with asking("asks") as screen:
        for typed in ("\n", "3\n", "maybe\n"):
            screen.read_until("> ")
            screen.raw = b""
            screen.type(typed)
            screen.read_until("a number from 1 to 2.")
        screen.type("1\n")

        assert screen.end() == 0
        assert '"optionId": "y"' in screen.text


def test_what_was_typed_before_a_question_does_not_answer_it() -> None:
    with asking("asks") as screen:
        screen.type("1\n")
        screen.read_until("2. No\n> ")
        screen.type("2\n")

        assert screen.end() == 0
        assert '"optionId": "n"' in screen.text


def test_the_end_of_input_is_a_no() -> None:
    with asking("asks") as screen:
        screen.read_until("> ")
        screen.type(CTRL_D)

        assert screen.end() == 0
        assert '"optionId": "n"' in screen.text


def test_ctrl_c_at_a_question_cancels_the_turn() -> None:
    with asking("asks") as screen:
        screen.read_until("> ")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "Interrupted." in screen.text


def test_what_nobody_asked_about_is_asked_about(tmp_path: Path) -> None:
    with asking("writes_and_runs", "--cwd", str(tmp_path)) as screen:
        screen.read_until(f"The agent wants to write: Write {tmp_path}/odd.txt")
        screen.read_until("3. Refuse\n> ")
        screen.raw = b""
        screen.type("1\n")
        screen.read_until(f"The agent wants to run: touch {tmp_path}/ran.txt")
        screen.read_until("3. Refuse\n> ")
        screen.type("3\n")

        assert screen.end() == 0
        assert "True False" in screen.text
    assert [path.name for path in tmp_path.iterdir()] == ["odd.txt"]


def test_a_yes_to_a_shown_change_covers_that_write_and_no_other(tmp_path: Path) -> None:
    with asking("asks_then_writes", "--cwd", str(tmp_path)) as screen:
        screen.read_until("odd.txt (new file)")
        screen.read_until("> ")
        screen.type("1\n")
        screen.read_until(f"The agent wants to write: Write {tmp_path}/odd2.txt")
        screen.read_until("3. Refuse\n> ")
        screen.type("3\n")

        assert screen.end() == 0
        assert "second False" in screen.text
    assert [path.name for path in tmp_path.iterdir()] == ["odd.txt"]


def test_a_rule_that_asks_says_so_and_a_late_answer_is_a_no(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "[[rule]]\nname = 'secrets'\ndecision = 'ask'\npath = '**/.env'\n"
        "[[rule]]\ndecision = 'ask'\npath = '**/late'\ndeadline = 0.2\n"
    )
    (tmp_path / ".env").write_text("x")
    steps = json.dumps([["read", ".env"], ["read", ".env"], ["write", "late"], ["write", "a"]])
    with Screen(
        *("prompt", "--cwd", str(tmp_path), "--policy", str(policy)),
        *("--agent", odd("works"), steps),
        term="dumb",
    ) as screen:
        screen.read_until(f"wants to read: Read {tmp_path}/.env (rule 1 ('secrets') matches)")
        screen.read_until("3. Refuse\n> ")
        screen.type("2\n")
        screen.read_until(
            f"wants to write: Write {tmp_path}/late (rule 2 matches; 0.2 s to answer)"
        )
        screen.read_until(f"\n> \nwrite: Write {tmp_path}/late -> Refuse (no answer in time)\n")
        screen.read_until(f"wants to write: Write {tmp_path}/a\n")
        screen.read_until("2. Allow every write of this run\n  3. Refuse\n> ")
        screen.type("1\n")

        assert screen.end() == 0
        assert '["done", "done", "permission_denied", "done"]' in screen.text


def test_questions_are_asked_under_json_too(tmp_path: Path) -> None:
    with asking("asks", "--json") as screen:
        screen.read_until("The agent asks: Launch")
        screen.read_until("> ")
        screen.type("1\n")

        assert screen.end() == 0
        assert '"permissions":1' in screen.text


def test_ctrl_c_on_a_terminal_reaches_the_command_and_not_the_agent() -> None:
    with asking("waits_for_cancel") as screen:
        screen.read_until("working")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "cancelling the turn" in screen.text
