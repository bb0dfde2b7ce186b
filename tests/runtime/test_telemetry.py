"""Every event is in the table, reaches the hook and the one logger, and can do no harm."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.runtime.raw_peer import linked

import antiphon
from antiphon.runtime import EVENTS, TelemetryEvent

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "antiphon"
PAGE = ROOT / "docs" / "reference" / "telemetry.md"


def emitted() -> dict[str, set[str]]:
    """The names that anything calls `emit` with, and the facts given with each."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.args[0] if node.args else None
            if node.func.attr == "emit" and isinstance(name, ast.Constant):
                facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                found.setdefault(str(name.value), set()).update(facts - {"cause"})
    return found


def test_what_is_emitted_is_in_the_table_with_its_facts() -> None:
    found = emitted()

    assert set(found) <= set(EVENTS)
    assert {name: facts - set(EVENTS[name].facts) for name, facts in found.items()} == {
        name: set() for name in found
    }


async def test_an_event_reaches_the_log_and_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[TelemetryEvent] = []
    caplog.set_level(logging.DEBUG, "antiphon")
    async with linked(telemetry=seen.append) as link:
        assert link.connection.observed
        caplog.clear()
        link.connection.emit("late_response", id="7")

    assert seen[0] == antiphon.TelemetryEvent("late_response", "peer", {"id": "7"})
    (record,) = (r for r in caplog.records if getattr(r, "acp_event", "") == "late_response")
    assert (record.name, record.levelno) == ("antiphon.telemetry", logging.DEBUG)
    assert record.getMessage() == "ignored a response to no open call (id='7')"
    facts: Any = vars(record)["acp_facts"]
    assert facts == {"id": "7"}


async def test_a_hook_that_fails_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    def hook(event: TelemetryEvent) -> None:
        asked.append(event.name)
        msg = "the hook's own fault"
        raise ValueError(msg)

    async with linked(telemetry=hook) as link:
        link.connection.emit("late_response", id="7")
        link.connection.emit("late_response", id="8")

        assert asked == ["late_response", "late_response"]
    assert "the hook's own fault" in caplog.text


async def test_without_a_hook_only_the_log_has_it() -> None:
    async with linked() as link:
        assert not link.connection.observed
        link.connection.emit("late_response", id="7")


def test_the_page_has_every_event_with_its_kind_level_and_facts() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]

    assert {row[0].strip("`"): row[1:4] for row in rows} == {
        name: [
            spec.kind,
            logging.getLevelName(spec.level).lower(),
            ", ".join(f"`{fact}`" for fact in spec.facts),
        ]
        for name, spec in EVENTS.items()
    }
    assert len(rows) == len(EVENTS)
