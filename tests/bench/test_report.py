"""The page of figures: what stands between its markers, and what is made of each file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.ratios import Row, Target, as_json
from bench.report import SECTIONS, filled, main

PAGE = """# Figures

<!-- figures: ratios -->
old
<!-- end -->

between

<!-- figures: soak -->
<!-- end -->
"""
TOLD: dict[str, Any] = {
    "ratios": as_json(
        ["a machine"],
        [
            Row(
                Target("import", "cpu", against="ts-sdk", at_most=0.4),
                *("ms CPU", 22.0, 170.0, 0.129, True, {"python-sdk": 3.0}, "", {}),
            ),
            Row(
                Target("client/large", "peak", at_most=110),
                *("MiB peak", 119.5, None, 119.5, False, {}, "", {}),
            ),
            Row(
                Target("codec decode", "rate", against="raw-msgspec"),
                *("a second", 9.0, 10.0, 0.9, None, {}, "a", {"a": 0.9, "b": 1.1}),
            ),
        ],
    ),
    "scaling": {
        "note": "a machine",
        "margin": 0.15,
        "curves": [
            {
                "name": "chunks",
                "title": "chunks of a turn",
                "unit": "chunk",
                "allowed": 1,
                "exponent": 1.004,
                "ok": True,
                "points": [[1_000, 2.276, 2.0], [1_000_000, 0.0123, 0.01]],
            },
            {
                "name": "attach",
                "title": "history",
                "unit": "",
                "allowed": 0,
                "exponent": 0.01,
                "ok": True,
                "points": [[1_000, 0.2, 0.2], [100_000, 0.002, 0.002]],
            },
        ],
    },
    "lag": {
        "python": "3.11.7",
        "cases": [
            {
                "case": "a large frame",
                "seconds": 1.5,
                "ticks": 150,
                "median": 0.1,
                "p99": 1.0,
                "worst": 7.25,
                "bound": 25.0,
            }
        ],
    },
    "journal": {
        "sqlite": [["append", "1 session", 3.9, "us CPU each"], ["idle", "", 0.5, "KiB"]],
        "memory": [["append", "1 session", 1.0, "us CPU each"]],
    },
    "stations": {
        "note": "a machine",
        "stations": [["a chunk", "cut", 0.0894], ["a chunk", "decode", 1.25]],
    },
    "soak": {"note": "1,000 updates", "memory": [[100, 40.25]], "growth": 0.5, "bound": 20.0},
}


def test_what_stands_between_the_markers_is_written_anew() -> None:
    page = filled(PAGE, {"ratios": "new"})

    assert page == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert filled(page, {"ratios": "new"}) == page


def test_a_text_without_a_place_and_a_marker_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="no place for lag"):
        filled(PAGE, {"lag": "new"})
    with pytest.raises(ValueError, match="without its end"):
        filled(PAGE.replace("<!-- end -->", "", 1), {})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ratios", "| import | ms CPU | 22.0 | 170 | 0.129 | ≤ 0.4 | ok | 3.00 |"),
        ("ratios", "| client/large | MiB peak | 120 |  |  | ≤ 110 | **miss** |  |"),
        ("ratios", "| b | 1.100 |"),
        ("ratios", "1 of 2 targets are met."),
        ("scaling", "| chunks of a turn | 1,000 | 1,000,000 | 2.28 → 0.012 | 1.00 | 1.15 |"),
        ("scaling", "| history | 1,000 | 100,000 | 200 → 200 in all | 0.01 | 0.15 |"),
        ("lag", "| a large frame | 1.50 | 0.10 | 1.00 | 7.25 | 25.0 |"),
        ("journal", "| append | 1 session | us CPU each | 3.90 | 1.00 |"),
        ("journal", "| idle |  | KiB | 0.50 |  |"),
        ("stations", "| a chunk | cut | 0.089 |"),
        ("stations", "|  | decode | 1.25 |"),
        ("soak", "| 100 | 40.2 |"),
    ],
)
def test_each_file_becomes_its_table(name: str, line: str) -> None:
    _, render = SECTIONS[name]

    assert line in render(TOLD[name]).splitlines()


def test_the_page_is_filled_from_the_files_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE, encoding="utf-8")
    file = tmp_path / SECTIONS["soak"][0]
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(TOLD["soak"]), encoding="utf-8")

    assert main(["--into", str(page), "--cache", str(tmp_path)]) == 0

    text = page.read_text("utf-8")
    assert "\nold\n" in text
    assert "Grown after the first tenth: 0.5 MiB" in text
    assert "ratios       stays: no " in capsys.readouterr().out


def test_the_page_that_is_kept_has_a_place_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text("utf-8")

    assert filled(page, dict.fromkeys(SECTIONS, "")) != page
