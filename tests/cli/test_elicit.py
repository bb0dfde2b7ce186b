"""What an agent asks a person: forms and addresses, on both kinds of terminal."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.command import antiphon
from tests.cli.screen import Screen

AGENT = Path(__file__).with_name("asking_agent.py")
CTRL_C, CTRL_D = "\x03", "\x04"
PLAIN, PLEASANT = "dumb", "xterm-256color"


def words(tmp_path: Path, kind: str, *more: str) -> str:
    return shlex.join([sys.executable, str(AGENT), kind, str(tmp_path / "state"), *more])


def asking(tmp_path: Path, kind: str, *more: str, term: str = PLAIN, **env: str) -> Screen:
    return Screen("prompt", "--agent", words(tmp_path, kind, *more), "x", term=term, **env)


def answer(screen: Screen, *typed: tuple[str, str]) -> None:
    """Wait for each text, behind the one before, then type."""
    for seen, keys in typed:
        screen.read_until(seen)
        plain = screen.raw.replace(b"\r\n", b"\n")
        screen.raw = plain[plain.index(seen.encode()) + len(seen.encode()) :]
        if keys:
            screen.type(keys)


@pytest.mark.covers("R1-130", "R1-131")
def test_a_form_is_filled_in_field_by_field_and_reviewed(tmp_path: Path) -> None:
    with asking(tmp_path, "form") as screen:
        screen.read_until("asked by odd")
        screen.read_until("Please tell me.")
        screen.read_until("About you")
        answer(
            screen,
            ("Name (required)\n  text, at least 2 characters\n> ", "J\n"),
            ("What you typed is shorter than 2 characters.\n> ", "\n"),
            ("An answer is required.\n> ", "Jo\n"),
            ("age\n  a whole number, at least 18\n[42, or - for nothing] > ", "\n"),
            ("2. Blue\n", ""),
            ("> ", "blue\n"),
            ("tags", ""),
            ("> ", "3, x\n"),
            ("[yes, or - for nothing] > ", "-\n"),
        )
        screen.read_until("Your answers:")
        screen.read_until("1. Send")
        for line in (
            "1. Name: Jo",
            "2. age: 42",
            "3. colour: Blue",
            "4. tags: z, x",
            "5. keep: (left out)",
        ):
            assert line in screen.text
        answer(screen, ("> ", "1\n"))

        assert screen.end() == 0
        content = {"name": "Jo", "age": 42, "colour": "b", "tags": ["z", "x"]}
        assert json.dumps({"action": "accept", "content": content}) in screen.text  # fmt: skip


@pytest.mark.covers("R1-130")
def test_a_review_can_send_decline_or_cancel(tmp_path: Path) -> None:
    typed = {"s\n": "accept", "d\n": "decline", "c\n": "cancel", CTRL_D: "cancel"}
    with asking(tmp_path, "one", *typed.values()) as screen:
        for keys, action in typed.items():
            answer(screen, ("[Jo, or - for nothing] > ", "\n"), ("Cancel: close", ""), ("> ", keys))
            answer(screen, (f'"action": "{action}"', ""))

        assert screen.end() == 0


def test_an_answer_can_be_changed_before_it_is_sent(tmp_path: Path) -> None:
    with asking(tmp_path, "one") as screen:
        answer(
            screen,
            ("> ", "\n"),
            ("Your answers:", ""),
            ("> ", "edit\n"),
            ("Which one", ""),
            ("> ", "1\n"),
            ("[Jo, or - for nothing] > ", "Mo\n"),
            ("1. name: Mo", ""),
            ("> ", "1\n"),
        )

        assert screen.end() == 0
        assert '{"name": "Mo"}' in screen.text


def test_stopping_in_the_middle_leads_to_the_review_where_nothing_can_be_sent_yet(
    tmp_path: Path,
) -> None:
    with asking(tmp_path, "form") as screen:
        answer(screen, ("Name (required)", ""), ("> ", CTRL_D))
        screen.read_until("Cancel: close")
        assert "Send these answers" not in screen.text
        answer(screen, ("> ", "go\n"), ("Name (required)", ""), ("> ", CTRL_D))
        answer(screen, ("Cancel: close", ""), ("> ", "d\n"))

        assert screen.end() == 0
        assert '{"action": "decline"}' in screen.text


@pytest.mark.covers("R1-142")
def test_a_form_with_an_unknown_kind_can_only_be_refused(tmp_path: Path) -> None:
    with asking(tmp_path, "unknown") as screen:
        answer(
            screen, ("of a kind that is not known here.", ""), ("Cancel: close", ""), ("> ", "1\n")
        )

        assert screen.end() == 0
        assert '{"action": "decline"}' in screen.text


@pytest.mark.parametrize("term", [PLAIN, PLEASANT])
def test_ctrl_c_cancels_the_turn_and_the_question(tmp_path: Path, term: str) -> None:
    with asking(tmp_path, "one", term=term) as screen:
        screen.read_until("name")
        screen.read_until("Jo")
        screen.type(CTRL_C)

        assert screen.end() == 130
        assert "accept" not in screen.text


@pytest.mark.parametrize("term", [PLAIN, PLEASANT])
def test_what_an_agent_says_cannot_act_on_the_terminal(tmp_path: Path, term: str) -> None:
    with asking(tmp_path, "hostile", term=term) as screen:
        screen.read_until("Name")
        screen.read_until("text, of the form")
        screen.read_until("> " if term == PLAIN else "❯")
        assert b"\x1b]" not in screen.raw.replace(b"\x1b]0;\x07", b"")
        assert b"\x1b[2J" not in screen.raw
        assert "\u202e" not in screen.text
        assert "\n\nAllow?" not in screen.text
        screen.type("a" * 30 + "b\r")
        screen.read_until("What you typed does not have the form")
        screen.type(CTRL_C)

        assert screen.end() == 130


def test_the_pleasant_form_can_be_edited_in_place(tmp_path: Path) -> None:
    with asking(tmp_path, "one", term=PLEASANT) as screen:
        screen.read_until("❯ Jo")
        screen.type("hn\r")
        screen.read_until("1. name: John")
        screen.read_until("Send these answers")
        screen.read_until("Esc says no")
        screen.type("1")

        assert screen.end() == 0
        assert '{"name": "John"}' in screen.text


@pytest.mark.parametrize("term", [PLAIN, PLEASANT])
def test_no_line_of_an_agent_passes_for_one_of_ours(tmp_path: Path, term: str) -> None:
    with asking(tmp_path, "lines", term=term) as screen:
        screen.read_until("  | one\n  | > two\n")
        screen.read_until("first [y] > second")
        screen.type("\r")
        screen.read_until("1. text: first [y] > second")
        screen.read_until("without an answer\n> " if term == PLAIN else "Esc says no")
        screen.type("1\r" if term == PLAIN else "1")

        assert screen.end() == 0
        assert json.dumps({"text": "first\n[y] > second"}) in screen.text


def test_a_form_without_end_is_not_begun(tmp_path: Path) -> None:
    with asking(tmp_path, "endless") as screen:
        answer(screen, ("more than 100 fields", ""), ("Cancel: close", ""), ("> ", "2\n"))

        assert screen.end() == 0
        assert '{"action": "cancel"}' in screen.text


def test_without_a_terminal_nothing_is_offered_to_the_agent(tmp_path: Path) -> None:
    ran = antiphon("prompt", "--agent", words(tmp_path, "one"), "x")

    assert ran.code == 0
    assert "-32601" in ran.out
    client = json.loads((tmp_path / "state.client").read_text())
    assert "elicitation" not in client["clientCapabilities"]
    assert "auth" not in client["clientCapabilities"]


# ------------------------------------------------------------------ addresses


def browser(tmp_path: Path) -> str:
    """A browser that writes down what it is given, and prints."""
    script = tmp_path / "browser"
    script.write_text(
        f'#!/bin/sh\necho noise; echo noise >&2\nprintf %s "$1" > {tmp_path}/opened\n'
    )
    script.chmod(0o755)
    return f"{script} %s"


@pytest.mark.covers("R1-130", "R1-135", "R1-136")
@pytest.mark.parametrize("term", [PLAIN, PLEASANT])
def test_an_address_is_opened_only_after_a_yes(tmp_path: Path, term: str) -> None:
    address = "http://xn--pple-43d.com/login?x=1"
    with asking(tmp_path, "link", address, term=term, BROWSER=browser(tmp_path)) as screen:
        screen.read_until("Cancel: close")
        assert f"  {address}\n" in screen.text
        assert "host: xn--pple-43d.com\n" in screen.text
        assert "which reads: аpple.com" in screen.text
        assert "not encrypted" in screen.text
        assert "punycode" in screen.text
        assert not (tmp_path / "opened").exists()
        screen.read_until("without an answer\n> " if term == PLAIN else "Esc says no")
        screen.type("1\n" if term == PLAIN else "1")

        assert screen.end() == 0
        assert '{"action": "accept"}' in screen.text
        assert "noise" not in screen.text
        assert (tmp_path / "opened").read_text() == address


@pytest.mark.covers("R1-135")
def test_nothing_is_opened_without_consent(tmp_path: Path) -> None:
    typed = {"y\n": "accept", "d\n": "decline", "c\n": "cancel", CTRL_D: "cancel"}
    addresses = ["https://example.com/"] * len(typed)
    with asking(tmp_path, "link", *addresses, BROWSER=browser(tmp_path)) as screen:
        for keys, action in typed.items():
            answer(screen, ("Cancel: close", ""), ("> ", keys), (f'"action": "{action}"', ""))
            assert not (tmp_path / "opened").exists()

        assert screen.end() == 0


def test_without_a_browser_a_person_is_told_to_open_it(tmp_path: Path) -> None:
    with asking(tmp_path, "link", "https://example.com/", BROWSER="/nonexistent/browser") as screen:
        answer(
            screen,
            ("Cancel: close", ""),
            ("> ", "1\n"),
            ("No browser could be opened here.", ""),
            ("1. Yes, but I open it myself", ""),
            ("> ", "1\n"),
        )

        assert screen.end() == 0
        assert '{"action": "accept"}' in screen.text


def test_what_is_no_web_address_is_not_even_shown(tmp_path: Path) -> None:
    with asking(tmp_path, "link", "file:///etc/passwd") as screen:
        assert screen.end() == 0
        assert "-32602" in screen.text
        assert "wants this page" not in screen.text
