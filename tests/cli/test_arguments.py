from __future__ import annotations

import subprocess
import sys

import pytest

from antiphon import __version__
from antiphon.cli import main
from tests.cli.command import antiphon, environment


def test_help_names_the_commands_and_costs_no_heavy_import() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "antiphon", "--help"],
        capture_output=True,
        text=True,
        timeout=20,
    )

    assert done.returncode == 0
    for command in ("demo", "prompt", "run", "rules"):
        assert f"antiphon {command}" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "antiphon.cli._arguments" in imported
    assert not imported & {"rich", "prompt_toolkit", "msgspec", "asyncio", "antiphon.schema"}


def test_help_of_prompt_explains_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompt", "--help"]) == 0

    text = capsys.readouterr().out
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "130 "):
        assert f"\n  {code}" in text


@pytest.mark.parametrize("command", ["demo", "run", "rules", "demo-agent"])
def test_each_command_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: antiphon {command}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"antiphon {__version__}\n"


def test_nothing_typed_shows_what_could_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "antiphon demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["dance"], ["prompt"], ["rules", "--json"], ["demo-agent", "--pace", "-1"]]
)
def test_a_wrong_command_line_is_two_and_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "antiphon" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_help_that_leaves_is_no_traceback(option: str, unbuffered: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "antiphon", option],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_script_and_the_module_are_the_same_command() -> None:
    assert antiphon("--version").out == f"antiphon {__version__}\n"
