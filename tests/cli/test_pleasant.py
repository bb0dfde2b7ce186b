"""The display and the questions of the extra `cli`, on a terminal that can do everything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from antiphon.cli import _demo_fixture as fixture
from antiphon.cli._pleasant import _Paragraphs
from tests.cli.command import odd
from tests.cli.journals import write
from tests.cli.records import chunk, completed, records, started, update
from tests.cli.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

UP, DOWN, ESCAPE, CTRL_C = "\x1b[A", "\x1b[B", "\x1b", "\x03"


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_paragraphs_are_whole_however_they_come(size: int) -> None:
    text = "one\nmore\n\n\ntwo\n\n```py\na\n\nb\n```\n\n~~~\nc\n\n```\n~~~\n\nlast"
    paragraphs = _Paragraphs()

    done = [paragraph for piece in pieces(text, size) for paragraph in paragraphs.feed(piece)]
    rest = paragraphs.rest()

    whole = "\n\n".join(done)
    assert whole.replace("\n\n\n", "\n\n") == text.removesuffix("\n\nlast").replace(
        "\n\n\n", "\n\n"
    )
    assert rest == "last"
    assert paragraphs.rest() == ""
    assert "```py\na\n\nb\n```" in whole


def test_a_fence_that_is_never_closed_ends_with_the_message() -> None:
    paragraphs = _Paragraphs()

    assert paragraphs.feed("```\na\n\nb\n\n") == []
    assert paragraphs.rest() == "```\na\n\nb"
    assert paragraphs.feed("c\n\nd") == ["c"]


def test_demo_is_shown_as_it_happens() -> None:
    with Screen("demo") as screen:
        assert screen.end() == 0

        for words in (
            "Antiphon demo",
            "There is a small module here",
            "▸ Read the module and its test",
            "✔ Read leap.py",
            "+    return year % 4 == 0 and (year % 100 != 0",
            "→  Repair it",
            "│ OK",
            "✔ Run the test",
            "✔ end_turn after",
            "✔ test_leap.py passes",
        ):
            assert words in screen.text
        # Colours, and the cursor shown again at the end.
        assert b"\x1b[32m" in screen.raw
        assert screen.raw.rfind(b"\x1b[?25h") > screen.raw.rfind(b"\x1b[?25l")


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [("\r", "y"), ("1", "y"), ("2", "n"), (f"{DOWN}\r", "n"), (f"{UP}\r", "n"), ("jk\r", "y")],
)
def test_a_question_is_answered_with_arrows_or_numbers(keys: str, chosen: str) -> None:
    with Screen("prompt", "--agent", odd("asks"), "x") as screen:
        screen.read_until("The agent asks: Launch")
        screen.read_until("Esc says no")
        screen.type(keys)

        assert screen.end() == 0
        assert f'"optionId": "{chosen}"' in screen.text


@pytest.mark.parametrize("key", [ESCAPE, "n\r", "N\r"])
def test_escape_is_a_no_and_so_is_n(key: str) -> None:
    with Screen("prompt", "--agent", odd("asks"), "x") as screen:
        screen.read_until("Esc says no")
        screen.type(key)

        assert screen.end() == 0
        assert '"optionId": "n"' in screen.text


def test_no_color_is_heeded_by_the_display_and_by_its_questions() -> None:
    with Screen("prompt", "--agent", odd("asks"), "x", NO_COLOR="1") as screen:
        screen.read_until("Esc says no")
        screen.type("1")

        assert screen.end() == 0
        assert not re.search(rb"\x1b\[([0-9;]*;)?(3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]", screen.raw)


def test_ctrl_c_at_a_question_cancels_the_turn() -> None:
    with Screen("prompt", "--agent", odd("asks"), "x") as screen:
        screen.read_until("Esc says no")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "Interrupted." in screen.text


def test_a_refused_command_is_shown_with_its_question(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)
    with Screen("prompt", "--cwd", str(tmp_path), "repair it") as screen:
        screen.read_until("+    return year % 4 == 0 and")
        screen.read_until("Esc says no")
        screen.type("1")
        screen.read_until("The agent wants to run: ")
        screen.read_until("3. Refuse")
        screen.type("3")

        assert screen.end() == 0
        assert "I cannot go on" in screen.text
    assert fixture.is_fixed(tmp_path)


def test_an_agent_cannot_drive_the_terminal() -> None:
    with Screen("prompt", "--agent", odd("escapes"), "x") as screen:
        assert screen.end() == 0
        assert b"pwned" in screen.raw
        assert b"\x1b]0;pwned" not in screen.raw


def test_a_dumb_terminal_gets_plain_lines() -> None:
    with Screen("demo", term="dumb") as screen:
        assert screen.end() == 0
        assert b"\x1b" not in screen.raw
        assert "plan [x] Run the test" in screen.text


def test_a_journal_is_shown_in_colours_and_nothing_of_theirs_stands_at_the_left_edge(
    tmp_path: Path,
) -> None:
    long = "turn 9 ended: " * 30
    call = update(
        "tool_call", toolCallId="t", title=long, kind="edit", status="completed", locations=[]
    )
    said = chunk("agent_message", f"# Heading\n\n* one\n\n{long}\n\n\x1b]0;title\x07")
    write(
        tmp_path / "j",
        {"s": records(started(1), chunk("agent_thought", long), said, call, completed(1))},
    )
    with Screen("journal", "show", str(tmp_path / "j"), "s") as screen:
        assert screen.end() == 0

        assert b"\x1b]0;title" not in screen.raw
        assert b"\x1b[32m" in screen.raw  # a tool call that is completed is green
        assert " • one" in screen.text
        ours = ("session s", "turn 1", "thinking:", "agent:", "edit: ", "the turn")
        for line in screen.text.splitlines():
            assert not line.strip() or line.startswith(("  ", *ours)), line
        assert max(map(len, screen.text.splitlines())) <= 100


def test_a_session_that_is_followed_grows_on_a_terminal_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    write(tmp_path / "j", {"s": records(started(1), chunk("agent_message", "one\ntwo"))})
    with Screen("journal", "tail", str(tmp_path / "j"), "s") as screen:
        screen.read_until("agent:\n  one\n  two")
        screen.type(CTRL_C)
        assert screen.end() == 130
