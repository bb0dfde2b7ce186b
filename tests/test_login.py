"""`antiphon.login`: what is run to sign in on a terminal. Running it on one: tests/cli/test_login.py."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from antiphon import StartError
from antiphon.login import TerminalLogin, terminal_login
from antiphon.schema import v1

if TYPE_CHECKING:
    from pathlib import Path

METHOD = v1.AuthMethodTerminal(id="t", name="T", args=["--login", "a b"], env={"MARK": "x=y"})


@pytest.mark.covers("R1-147")
def test_it_is_the_same_program_with_arguments_appended_and_variables_over_it(
    tmp_path: Path,
) -> None:
    login = terminal_login(
        [sys.executable, "-x"], METHOD, env={"MARK": "old", "OTHER": "1"}, cwd=tmp_path
    )

    assert login.argv == [sys.executable, "-x", "--login", "a b"]
    assert login.env["MARK"] == "x=y"
    assert login.env["OTHER"] == "1"
    assert login.env["PATH"] == os.environ["PATH"]
    assert (login.cwd, login.added) == (str(tmp_path), ("MARK",))


def test_by_default_it_sees_all_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD_SECRET", "s")

    assert terminal_login(["x"], METHOD).env["ODD_SECRET"] == "s"
    assert "ODD_SECRET" not in terminal_login(["x"], METHOD, env="essential").env


@pytest.mark.covers("R1-147")
def test_another_path_does_not_make_it_another_program(tmp_path: Path) -> None:
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / "agent"
        program.write_text(f"#!/bin/sh\nexit {1 if folder == 'theirs' else 0}\n")
        program.chmod(0o755)
    method = v1.AuthMethodTerminal(id="t", name="T", env={"PATH": str(tmp_path / "theirs")})
    login = terminal_login(["agent"], method, env={"PATH": str(tmp_path / "ours")})

    assert login.argv == [str(tmp_path / "ours" / "agent")]
    assert login.env["PATH"] == str(tmp_path / "theirs")
    assert login.run() == 0


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_variables_that_cannot_exist_are_refused(name: str) -> None:
    method = v1.AuthMethodTerminal(id="t", name="T", env={name: "x"})
    with pytest.raises(ValueError, match="env"):
        terminal_login(["x"], method)


def test_no_command_and_no_program_are_start_errors() -> None:
    with pytest.raises(StartError):
        terminal_login([], METHOD)
    with pytest.raises(StartError, match="was not found"):
        terminal_login(["no-such-program-anywhere"], METHOD).run()


@pytest.mark.parametrize(("code", "ends"), [("raise SystemExit(3)", 3), ("", 0), ("import os; os.kill(os.getpid(), 9)", -9)])  # fmt: skip
def test_without_a_terminal_it_just_runs_and_gives_its_end(code: str, ends: int) -> None:
    login = TerminalLogin(argv=[sys.executable, "-c", code], env=dict(os.environ))

    assert login.run() == ends
