"""The page of requirements and tests: what is on it, and that the one in docs/ is of today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import generate_conformance
import pytest
from generate_conformance import Family, Marker, family_of, main, markers, page

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_in_the_documentation_is_of_today() -> None:
    assert main(["--check"]) == 0


def test_a_page_that_is_out_of_date_or_missing_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {"R1-1": [Marker("R1-1", "x.py:1", "x.py::test_x")]}
    monkeypatch.setattr(generate_conformance, "proofs", lambda: some)
    target = tmp_path / "conformance.md"
    assert main(["--check"], target) == 1
    assert "run python scripts/generate_conformance.py" in capsys.readouterr().err

    assert main([], target) == 0
    assert main(["--check"], target) == 0
    assert "`x.py::test_x`" in target.read_text(encoding="utf-8")
    some["R1-2"] = [Marker("R1-2", "x.py:9", "x.py::test_x")]
    assert main(["--check"], target) == 1


# ---------------------------------------------------------------------- markers


def found(source: str) -> list[tuple[str, str]]:
    return [(marker.name, marker.test) for marker in markers(source, "x.py")]


def test_markers_are_found_on_functions_classes_modules_and_rows() -> None:
    source = (
        "ROWS = [pytest.param(1, marks=pytest.mark.covers('E'))]\n"
        "@pytest.mark.covers('A', 'B')\ndef test_x(): ...\n"
        "@pytest.mark.covers('C')\nclass TestX:\n"
        "    @pytest.mark.covers('F')\n    async def test_y(self): ...\n"
        "pytestmark = pytest.mark.covers('D')\n"
        "@pytest.mark.parametrize('row', ROWS)\nasync def test_rows(row): ...\n"
        "@pytest.mark.parametrize('row', [*ROWS, 2])\ndef test_more(row): ...\n"
        "@pytest.mark.parametrize('row', [pytest.param(1, marks=[pytest.mark.covers('G')])])\n"
        "def test_own_rows(row): ...\n"
    )

    assert sorted(found(source)) == [
        ("A", "x.py::test_x"),
        ("B", "x.py::test_x"),
        ("C", "x.py::TestX"),
        ("D", "x.py"),
        ("E", "x.py::test_more"),
        ("E", "x.py::test_rows"),
        ("F", "x.py::TestX::test_y"),
        ("G", "x.py::test_own_rows"),
    ]


def test_a_marker_knows_its_line() -> None:
    source = "\n\n@pytest.mark.covers(\n    'A',\n)\ndef test_x(): ...\n"

    assert [marker.place for marker in markers(source, "x.py")] == ["x.py:4"]


def test_an_id_that_is_computed_is_refused() -> None:
    with pytest.raises(AssertionError, match="written out"):
        list(markers("@pytest.mark.covers(*ids)\ndef test_x(): ...\n", "x.py"))


@pytest.mark.parametrize(
    ("name", "family"),
    [("R1-48", "R1"), ("F6", "F"), ("FF-07", "FF"), ("I9", "I"), ("Inv-1", "Inv"), ("C-03", "C")],
)
def test_an_id_tells_its_family(name: str, family: str) -> None:
    assert family_of(name) == family


# ---------------------------------------------------------------------- the page


def test_the_page_names_each_test_once_and_gives_a_reason_where_there_is_none() -> None:
    proved = {
        "A-1": [
            Marker("A-1", "x.py:3", "x.py::test_x"),
            Marker("A-1", "x.py:4", "x.py::test_x"),
            Marker("A-1", "y.py:1", "y.py::test_y"),
        ]
    }
    known = {
        "A": Family("Firsts", "What comes first.", {"A-1": "one | two"}),
        "B": Family("Seconds", "What comes then.", {}),
    }

    text = page(["A-1", "A-2", "B1"], proved, {"A-2": "nobody can", "B1": "not yet"}, known)

    assert text.startswith(generate_conformance.INTRODUCTION.strip())
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert text.partition("| Ids |")[2].splitlines()[2:6] == [
        "| `A-1` … `A-2` | Firsts | 2 | 1 | 1 |",
        "| `B1` … `B1` | Seconds | 1 | 0 | 1 |",
        "|  | all | 3 | 1 | 2 |",
        "",
    ]
    assert (
        "## Firsts\n\nWhat comes first.\n\n"
        "| Id | What | Proved by |\n| --- | --- | --- |\n"
        "| `A-1` | one \\| two | `x.py::test_x`<br>`y.py::test_y` |\n"
        "| `A-2` |  | none: nobody can |\n"
    ) in text
    assert "| Id | Proved by |\n| --- | --- |\n| `B1` | none: not yet |\n" in text
