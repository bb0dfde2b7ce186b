"""Every example runs, offline, and does what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
BOUND = 60.0

#: Which test runs which example.
RUN = {
    "ask_first.py": "test_a_file_is_changed_only_after_a_yes",
    "check_agent.py": "test_tests_are_run_while_nobody_looks_and_no_more",
    "echo.py": "test_the_echo_agent_answers_its_client",
    "first_turn.ipynb": "test_the_notebook_runs_from_top_to_bottom",
    "hello.py": "test_the_echo_agent_answers_its_client",
    "tidy_agent.py": "test_a_file_is_changed_only_after_a_yes",
    "unattended.py": "test_tests_are_run_while_nobody_looks_and_no_more",
}


def run(*argv: str | Path, cwd: Path, typed: str = "", noise: str = r"(?!)", **more: str) -> str:
    """What a program prints; its end must be 0 and its standard error empty, `noise` aside."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, "PATH": path, **more},
        input=typed,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (re.sub(noise, "", done.stderr), done.returncode) == ("", 0)
    return done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == set(RUN)
    assert set(RUN.values()) <= set(globals())


def test_the_echo_agent_answers_its_client() -> None:
    assert run("hello.py", cwd=FOLDER) == "echo: hello\nend_turn\n"


@pytest.mark.parametrize(
    ("typed", "after", "said"),
    [
        ("1\n", "a\nb\n", "tidied"),
        ("3\n", "a  \nb\t\n", "left as it is"),
        ("\n", "a  \nb\t\n", "left as it is"),
    ],
)
def test_a_file_is_changed_only_after_a_yes(
    tmp_path: Path, typed: str, after: str, said: str
) -> None:
    file = tmp_path / "notes and more.txt"
    file.write_text("a  \nb\t\n", encoding="utf-8")

    printed = run(FOLDER / "ask_first.py", file.name, cwd=tmp_path, typed=typed)

    assert file.read_text(encoding="utf-8") == after
    assert printed.startswith(f"Tidy {file}\n  1  Allow once\n")
    assert printed.endswith(f"{file}: {said}.\nend_turn\n")


RUDE = """
from antiphon import Agent, RequestError, Turn, serve_stdio

class Rude(Agent):
    async def prompt(self, turn: Turn) -> None:
        try:
            await turn.write_text_file(f"{turn.cwd}/f", "rude")
        except RequestError as error:
            await turn.say(f"{error.data['reason']}\\n")

serve_stdio(Rude())
"""


@pytest.mark.parametrize(("typed", "said"), [("1\n", ""), ("\n", "permission_denied\n")])
def test_a_change_that_an_agent_does_not_ask_about_is_asked_about(
    tmp_path: Path, typed: str, said: str
) -> None:
    shutil.copy(FOLDER / "ask_first.py", tmp_path)
    (tmp_path / "tidy_agent.py").write_text(RUDE, encoding="utf-8")

    printed = run("ask_first.py", cwd=tmp_path, typed=typed)

    assert printed.startswith(f"Write {tmp_path}/f\n  1  Allow\n")
    assert printed.endswith(f"for no: {said}end_turn\n")
    assert (tmp_path / "f").exists() is not bool(said)


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_tests_are_run_while_nobody_looks_and_no_more(
    tmp_path: Path, *, right: bool, report: bool
) -> None:
    case = f"""
        import unittest

        class Sums(unittest.TestCase):
            def test_one(self):
                self.assertEqual(1 + 1, {2 if right else 3})
    """
    (tmp_path / "test_sums.py").write_text(textwrap.dedent(case), encoding="utf-8")

    printed = run(FOLDER / "unattended.py", *(["--report"] if report else []), cwd=tmp_path)

    verdict = f"The tests {'passed' if right else 'failed'}.\n"
    assert printed.startswith("[allow by rule: tests]\n")
    assert "Ran 1 test in" in printed
    written = tmp_path / "report.txt"
    if report:
        assert printed.endswith(f"{verdict}[allow by rule: report]\n")
        assert written.read_text(encoding="utf-8") == verdict
    else:
        assert printed.endswith("No report: Permission denied.\n")
        assert not written.exists()


# ---------------------------------------------------------------------- notebooks

# A process of its own: the kernel's manager leaves a loop and sockets behind in the one it is in.
RUN_NOTEBOOK = textwrap.dedent("""
    import json, sys
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    book = nbformat.read(sys.argv[1], as_version=4)
    nbformat.validate(book)
    # Sockets in the file system: no port is opened, on no network.
    config = Config(KernelManager={"transport": "ipc", "ip": sys.argv[2]})
    NotebookClient(book, kernel_name="python3", timeout=50, config=config).execute()
    outputs = {
        cell.id: "".join(
            out.text if out.output_type == "stream" else out.data["text/plain"]
            for out in cell.outputs
        )
        for cell in book.cells
        if cell.cell_type == "code"
    }
    print(json.dumps(outputs))
""")


def cells() -> list[dict[str, Any]]:
    book = json.loads((FOLDER / "first_turn.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return book["cells"]  # type: ignore[no-any-return]


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in cells():
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.bound(90)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    # Nothing is read from or written to the home of who runs the tests.
    homes = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }

    printed = run(
        *("-c", RUN_NOTEBOOK, FOLDER / "first_turn.ipynb", tmp_path / "k"),
        cwd=tmp_path,
        # libzmq in a kernel that was told to end, once in many runs: every cell has run by then.
        noise=r"\AAssertion failed: pfd\.revents & POLLIN \(src/signaler\.cpp:\d+\)\n\Z",
        **homes,
    )

    outputs = json.loads(printed)
    assert outputs["first"].endswith("Understood: I leave the file as it is.\n'end_turn'")
    assert "'agent_message_chunk'" in outputs["kinds"]
    assert outputs["ask"].startswith("['Repair leap.py']\nThe test passes now.")
    assert outputs["async"] == "['end_turn', 'end_turn', 'end_turn']"
    assert list(outputs) == [cell["id"] for cell in cells() if cell["cell_type"] == "code"]
