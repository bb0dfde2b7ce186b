from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import antiphon
from antiphon import _errors, services, testing
from antiphon.cli import main
from antiphon.cli._rules import rules
from antiphon.schema import v1

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "usage-rules.md"


def test_rules_prints_the_page(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    assert capfd.readouterr().out == PAGE.read_text(encoding="utf-8")


def test_a_built_package_prints_the_page_it_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "usage-rules.md").write_text("# packed", encoding="utf-8")

    def files(package: object) -> Path:
        return tmp_path

    monkeypatch.setattr(importlib.resources, "files", files)

    assert rules() == "# packed"


def test_the_page_is_one_page() -> None:
    assert len(rules().splitlines()) <= 130


def test_the_agent_and_the_client_on_the_page_run_against_each_other(tmp_path: Path) -> None:
    agent, client = re.findall(r"```python\n(.*?)```", rules(), re.DOTALL)
    (tmp_path / "fixer.py").write_text(agent)
    (tmp_path / "app.py").write_text("teh = the = 1\nassert the\n")
    body = textwrap.indent(client, "    ")
    program = f"import asyncio\nasync def main():\n{body}\nasyncio.run(main())\n"

    done = subprocess.run(
        [sys.executable, "-c", program.replace('"python3"', repr(sys.executable))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )

    assert done.stderr == ""
    assert "Done, app.py exits with 0." in done.stdout
    assert done.stdout.endswith("end_turn\n")
    assert (tmp_path / "app.py").read_text() == "the = the = 1\nassert the\n"


def test_every_name_on_the_page_exists() -> None:
    page = rules()

    for name in re.findall(r"`(\w+)\(", page):
        assert any(hasattr(door, name) for door in (antiphon, services, testing)), name
    for row in re.findall(r"^\| `\w+`.*?\| (.*?) \|", page, re.MULTILINE):
        for name in re.findall(r"`([A-Z]\w+)`", row):
            assert hasattr(v1, name) or hasattr(_errors, name), name
    errors = page.partition("## Errors")[2].partition("##")[0]
    for name in re.findall(r"`([A-Z][a-z]\w+)`", errors):
        assert hasattr(_errors, name), name
    handlers = page.partition("Every other handler")[2].partition("Return the matching")[0]
    names = re.findall(r"`([a-z_]+_[a-z_]+)`", handlers)
    assert len(names) > 5
    for name in names:
        assert hasattr(antiphon.Agent, name), name
    verbs = page.partition("- `turn` has")[2].partition("\n")[0]
    for name in re.findall(r"`([a-z_]+)`", verbs):
        assert hasattr(antiphon.Turn, name) or name in {"params", "peer", "cancelled"}, name


def test_every_update_kind_is_on_the_page() -> None:
    page = rules()

    kinds = {
        kind.__struct_config__.tag
        for kind in vars(v1).values()
        if getattr(getattr(kind, "__struct_config__", None), "tag_field", "") == "sessionUpdate"
    }
    assert len(kinds) >= 14
    assert not {kind for kind in kinds if f"`{kind}`" not in page}
