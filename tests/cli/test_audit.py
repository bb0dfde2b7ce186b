from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from antiphon.cli._audit import Audit
from antiphon.services import Call, Decision

if TYPE_CHECKING:
    from pathlib import Path

CALL = Call(
    kind="execute",
    title="line\u2028end \udcff",
    command=("make", "\udcff"),
    cwd="/project",
    env={"TOKEN": "s3cret"},
    session_id="s",
    roots=("/project",),
)


def test_each_decision_is_a_line_and_earlier_ones_stay(tmp_path: Path) -> None:
    file = tmp_path / "audit.ndjson"
    for outcome in ("allow", "deny"):
        audit = Audit(str(file))
        audit.write(Decision(call=CALL, outcome=outcome, by="rule", rule="make", waited=0.12345))
        audit.close()

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["allow", "deny"]
    assert lines[0]["time"].endswith("+00:00")
    assert (lines[0]["rule"], lines[0]["waited"]) == ("make", 0.123)
    assert (lines[0]["command"], lines[0]["cwd"]) == (["make", "?"], "/project")


def test_values_of_environment_variables_stay_out(tmp_path: Path) -> None:
    file = tmp_path / "audit.ndjson"
    audit = Audit(str(file))
    audit.write(Decision(call=CALL, outcome="allow", by="default"))
    audit.close()

    assert json.loads(file.read_text())["env"] == ["TOKEN"]
    assert "s3cret" not in file.read_text()


def test_a_file_that_takes_no_more_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("this system has no full device")
    audit = Audit("/dev/full")
    for _ in range(2):
        audit.write(Decision(call=CALL, outcome="allow", by="default"))
    audit.close()

    assert capsys.readouterr().err.count("decisions are no longer kept") == 1
