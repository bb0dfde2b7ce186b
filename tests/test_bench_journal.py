"""A small run of `bench/journal.py`: that it measures every store, and finds what grows."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from bench import journal as program
from bench.journal import Figures, Options, main, measure

from antiphon.journal._memory import _MemoryLog

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest

    from antiphon.journal import Record

SMALL = Options(
    records=2_000,
    sessions=20,
    histories=(50, 2_000),
    subscribers=(1, 5),
    paced=(1_000, 0.1),
    attaches=3,
)


async def test_a_small_run_measures_everything_of_every_store() -> None:
    found = await measure(list(program.STORES), list(program.MEASURES), SMALL)

    measured = {store: {row[:2] for row in figures.rows} for store, figures in found.items()}
    assert measured["sqlite"] == measured["sqlite, process"] == measured["memory"]
    assert {name.partition(":")[0] for name, _ in measured["memory"]} == {
        "append",
        "attach",
        "fan-out",
        "idle",
        "info of a session",
        "publish",
        "replay",
        "writer",
    }
    assert all(value >= 0 for figures in found.values() for *_, value, _ in figures.rows)


async def search(self: _MemoryLog, tags: Collection[str]) -> dict[str, Record]:
    """Look through all of a session, at length, for its last turn."""
    found: dict[str, Record] = {}
    for record in await self.read(1, await self.high_watermark()):
        for _ in range(5):
            found[record.tag] = record
    return {tag: found[tag] for tag in tags if tag in found}


async def test_what_grows_with_a_history_that_nobody_asked_for_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_MemoryLog, "latest", search)

    found = await measure(["memory"], ["attach"], SMALL)

    (sentence,) = found["memory"].wrong
    assert sentence.startswith("writer: claim, look at the end (ms CPU) grew")


def test_what_is_wrong_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def grows(store: str, options: Options, figures: Figures) -> None:
        await asyncio.sleep(0)
        figures.add("append", f"{options.records}", 12.5, "records/s")
        figures.bound("it", 1, 5, 2 if store == "sqlite" else 10)

    monkeypatch.setitem(program.MEASURES, "append", grows)
    arguments = ["--only", "append", "--json", str(tmp_path / "figures"), "--scale", "0.5"]

    assert main(arguments) == 1
    assert main([*arguments, "--store", "memory"]) == 0

    told: dict[str, Any] = json.loads((tmp_path / "figures").read_text())
    assert told == {"memory": [["append", "50000", 12.5, "records/s"]]}
    said = capsys.readouterr().out
    assert "WRONG: sqlite: it grew from 1.0 to 5.0, by more than 2\n" in said
    assert "| append | 50000 | records/s | 12.5 | 12.5 |" in said
