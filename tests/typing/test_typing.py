"""What a user's type checker says: good programs pass, and each wrong line is reported.

The programs stand in `accepted` and `rejected`. Both checkers run strictly, as many users do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ACCEPTED = sorted((FOLDER / "accepted").glob("*.py"))
REJECTED = sorted((FOLDER / "rejected").glob("*.py"))

# (file name, line) to what a checker says there.
Reports = dict[tuple[str, int], str]

pytestmark = pytest.mark.bound(240)  # a cold cache and a busy machine


def mypy() -> Reports:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context"]
    # The files live below the folder that pyproject.toml excludes; named, they are checked anyway.
    run = subprocess.run(
        [*command, *map(str, ACCEPTED + REJECTED)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    found = re.findall(r"^(\S+\.py):(\d+): error: (.*)$", run.stdout, re.MULTILINE)
    return {(Path(name).name, int(line)): text for name, line, text in found}


def pyright() -> Reports:
    # A project of its own: the repository's excludes these files.
    command = [sys.executable, "-m", "pyright", "--project", str(FOLDER / "pyrightconfig.json")]
    run = subprocess.run(
        [*command, "--pythonpath", sys.executable, "--outputjson"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    return {
        (Path(report["file"]).name, report["range"]["start"]["line"] + 1): report["message"]
        for report in json.loads(run.stdout)["generalDiagnostics"]
        if report["severity"] == "error"
    }


def expected() -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in REJECTED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# wrong")
    }


@pytest.fixture(params=["mypy", "pyright"])
def reports(request: pytest.FixtureRequest) -> Reports:
    return mypy() if request.param == "mypy" else pyright()


def test_a_checker_reports_the_wrong_lines_and_no_other(reports: Reports) -> None:
    unexpected = {place: text for place, text in reports.items() if place not in expected()}

    assert not unexpected
    assert not expected() - set(reports)
    assert len(expected()) > 10
