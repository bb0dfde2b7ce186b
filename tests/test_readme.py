"""The README's ten-line agent and client, copied out of it, talk to each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def example(name: str) -> str:
    """The `python` block whose first line is the comment `# NAME`."""
    blocks: list[str] = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    found = [block for block in blocks if block.startswith(f"# {name}\n")]
    assert len(found) == 1, f"{len(found)} blocks for {name}"
    return found[0]


def lines_of_code(source: str) -> int:
    return sum(1 for line in source.splitlines() if line.strip() and not line.startswith("#"))


@pytest.mark.parametrize("name", ["echo.py", "hello.py"])
def test_an_example_has_ten_lines_at_most(name: str) -> None:
    assert lines_of_code(example(name)) <= 10


@pytest.mark.parametrize("name", ["echo.py", "hello.py"])
def test_an_example_is_also_a_file(name: str) -> None:
    assert (ROOT / "examples" / name).read_text(encoding="utf-8") == example(name)


def test_the_first_screen_shows_exactly_two_commands() -> None:
    first = README.read_text(encoding="utf-8").partition("```python")[0]
    commands = re.findall(r"^```sh\n(.*?)^```$", first, re.MULTILINE | re.DOTALL)

    assert [[line.split("#")[0].strip() for line in block.splitlines()] for block in commands] == [
        ["make demo", "make test"]
    ]


@pytest.mark.covers("R1-17")
def test_the_client_of_the_readme_prompts_its_agent(tmp_path: Path) -> None:
    for name in ("echo.py", "hello.py"):
        (tmp_path / name).write_text(example(name), encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    run = subprocess.run(
        [sys.executable, "hello.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=25,
    )

    assert (run.stdout, run.stderr, run.returncode) == ("echo: hello\nend_turn\n", "", 0)
