"""Every requirement is proved by a test or says why not, and no test proves what does not exist.

`FAMILIES` says which ids there are; a test names those it proves in `@pytest.mark.covers(...)`, and
docs/conformance.md is made of both.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
FOLDER = TESTS / "requirements"


def listed() -> list[str]:
    return (FOLDER / "requirement_ids.txt").read_text(encoding="utf-8").split()


def reasons() -> dict[str, str]:
    """Id to reason; a table of the file is one subject."""
    tables = tomllib.loads((FOLDER / "reasons.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for table in tables.values():
        for name, reason in table.items():
            assert name not in found, f"{name} has two reasons"
            found[name] = reason
    return found


def markers(source: str, where: str) -> Iterator[tuple[str, str]]:
    """(id, place) of each `pytest.mark.covers` in a module, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.covers":
            for argument in node.args:
                place = f"{where}:{argument.lineno}"
                assert isinstance(argument, ast.Constant), f"{place}: ids are written out"
                yield str(argument.value), place


@functools.cache
def covered() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        where = str(path.relative_to(TESTS))
        for name, place in markers(path.read_text(encoding="utf-8"), where):
            found.setdefault(name, []).append(place)
    return found


#: (how an id is written, first number, last number, numbers that were never given), in the list's order.
FAMILIES: list[tuple[str, int, int, set[int]]] = [
    ("R1-{}", 1, 160, set()),
    ("F{}", 1, 6, set()),
    ("FF-{:02}", 1, 50, {4, 11, 22, 23, 30, 33, 38, 40, 45, 48}),
    ("ACPX-{:03}", 1, 21, set()),
    ("I{}", 2, 19, {10}),
    ("Inv-{}", 1, 21, set()),
    ("IC-{}", 1, 8, set()),
    ("Q-{:02}", 1, 28, set()),
]


def test_the_list_is_complete_and_has_no_id_twice() -> None:
    expected = [
        form.format(number)
        for form, first, last, missing in FAMILIES
        for number in range(first, last + 1)
        if number not in missing
    ]

    assert listed() == expected


def test_every_requirement_is_covered_or_says_why_not() -> None:
    assert not [name for name in listed() if name not in covered() and name not in reasons()]


def test_no_requirement_is_covered_and_excused() -> None:
    assert not {name: covered()[name] for name in reasons() if name in covered()}


def test_every_id_that_is_named_exists() -> None:
    known = set(listed())

    assert not {name: places for name, places in covered().items() if name not in known}
    assert not set(reasons()) - known


def test_every_reason_is_a_sentence() -> None:
    assert not {name: text for name, text in reasons().items() if len(text.split()) < 4}


def test_the_search_for_markers_finds_them_on_functions_classes_and_parameters() -> None:
    source = (
        "@pytest.mark.covers('A', 'B')\ndef test_x(): ...\n"
        "@pytest.mark.covers('C')\nclass TestX: ...\n"
        "pytestmark = pytest.mark.covers('D')\n"
        "rows = [pytest.param(1, marks=[pytest.mark.covers('E')])]\n"
    )

    assert [name for name, _ in markers(source, "x")] == ["A", "B", "C", "D", "E"]


def test_an_id_that_is_computed_is_refused() -> None:
    with pytest.raises(AssertionError, match="written out"):
        list(markers("@pytest.mark.covers(*ids)\ndef test_x(): ...\n", "x"))
