"""Imports point down only, doors are used from outside, and the core does no I/O.

The tables are the architecture: an arrow that is not here does not exist, and one that nothing
uses has to go. Reasons are for whoever wants to add one.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "antiphon"

# Part of the library: a folder, or a module beside the folders. Keys may import their values.
ARROWS: dict[str, dict[str, str]] = {
    "_errors": {},
    "_version": {},
    "schema": {},
    "core": {
        "_errors": "limits and misuse are reported with the library's own exceptions",
        "schema": "text repair and depth are the codec's knowledge",
    },
    "_process": {
        "_errors": "a process that cannot be started is a StartError",
    },
    "transports": {
        "_errors": "what is known of a lost link is in ConnectionClosed",
        "_process": "a peer's process and a terminal's are supervised alike",
        "core": "bytes are cut into frames before they are handed up",
    },
    "runtime": {
        "_errors": "the one boundary between exceptions and the wire",
        "core": "the next station towards the bytes",
        "schema": "types by method, and the codec",
        "transports": "the contract of what moves frames",
    },
    "sessions": {
        "_errors": "turns that are over, sessions that are closed",
        "core": "limits",
        "runtime": "calls and updates come from a connection",
        "schema": "update types",
    },
    "services": {
        "_errors": "a refusal is an error answer",
        "_process": "a terminal is a supervised process",
        "schema": "parameter and result types",
    },
    "_handlers": {
        "_errors": "what nobody overrides answers MethodNotFound",
    },
    "_agent": {
        "_errors": "",
        "_handlers": "",
        "_version": "",
        "core": "",
        "runtime": "",
        "schema": "",
        "sessions": "",
        "transports": "",
    },
    "_client": {},
    "_connect": {},
    "content": {},
    "sync": {},
    "cli": {},
    "__main__": {"cli": "python -m antiphon is the command"},
    "__init__": {},
}
# What may also be named in an annotation, upwards included: nothing is loaded by it.
ANNOTATIONS: dict[str, dict[str, str]] = {
    "_handlers": {
        "runtime": "handlers take a Context",
        "schema": "and typed parameters",
    },
}
# Rooms that are entered from outside their folder, and why the door will not do.
ENTERED: dict[str, str] = {}
# What would give a pure part a clock, a loop, a file or a chance.
IMPURE = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "glob",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "secrets",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uuid",
    ]
)
PURE = ["core", "schema"]


@dataclass(frozen=True)
class Import:
    """One import of a module or of a name in it, as written in `where`."""

    where: str
    target: str
    line: int
    annotation: bool

    def __str__(self) -> str:
        return f"{self.where}:{self.line} imports {self.target}"


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def part_of(module: str) -> str:
    return module.partition(".")[0]


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, *, annotation: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                visit(statement, annotation=True)
            for statement in node.orelse:
                visit(statement, annotation=annotation)
            return
        if isinstance(node, ast.Import):
            found.extend(
                Import(name_of(path), name.name, node.lineno, annotation) for name in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                inside = full.removeprefix("antiphon.")
                target = full if full != inside and is_module(inside) else str(node.module)
                found.append(Import(name_of(path), target, node.lineno, annotation))
        for child in ast.iter_child_nodes(node):
            visit(child, annotation=annotation)

    visit(ast.parse(path.read_text(encoding="utf-8")), annotation=False)
    return found


def own(found: Import) -> str | None:
    """The part that is imported, or None where it is not this library."""
    if found.target == "antiphon":
        return "__init__"
    inside = found.target.removeprefix("antiphon.")
    return None if inside == found.target else part_of(inside)


ALL = list(dict.fromkeys(found for path in modules() for found in imports(path)))


def arrows(*, annotation: bool) -> set[tuple[str, str]]:
    return {
        (part_of(found.where), target)
        for found in ALL
        if found.annotation is annotation
        and (target := own(found)) is not None
        and target != part_of(found.where)
    }


def test_every_part_is_in_the_table() -> None:
    parts = {part_of(name_of(path)) for path in modules()}

    assert parts == set(ARROWS)


def test_imports_point_down() -> None:
    def allowed(found: Import) -> bool:
        part, target = part_of(found.where), own(found)
        annotations = ANNOTATIONS.get(part, {}) if found.annotation else {}
        return target in {None, part, *ARROWS.get(part, {}), *annotations}

    assert not [str(found) for found in ALL if not allowed(found)]


def test_every_arrow_is_used_and_has_its_reason() -> None:
    drawn = {(part, target) for part, row in ARROWS.items() for target in row}
    annotated = {(part, target) for part, row in ANNOTATIONS.items() for target in row}
    loaded, named = arrows(annotation=False), arrows(annotation=True)

    assert not drawn - loaded - named
    assert not annotated - named
    assert not annotated & loaded
    assert all(
        reason
        for table in (ARROWS, ANNOTATIONS)
        for row in table.values()
        for reason in row.values()
    )


def test_no_part_can_be_reached_from_below() -> None:
    left = {part: set(row) for part, row in ARROWS.items()}
    while left:
        bottom = {part for part, row in left.items() if not row & set(left)}
        assert bottom, f"a circle of arrows among {sorted(left)}"
        left = {part: row for part, row in left.items() if part not in bottom}


def test_a_room_is_entered_through_its_door() -> None:
    def through_the_door(found: Import) -> bool:
        inside = found.target.removeprefix("antiphon.").split(".")
        return (
            own(found) in {None, part_of(found.where)}
            or ".".join(inside) in ENTERED
            or not any(name.startswith("_") for name in inside[1:])
        )

    assert not [str(found) for found in ALL if not through_the_door(found)]
    assert not set(ENTERED) - {found.target.removeprefix("antiphon.") for found in ALL}


@pytest.mark.parametrize("part", PURE)
def test_a_pure_part_has_no_clock_loop_file_or_chance(part: str) -> None:
    impure = [
        str(found)
        for found in ALL
        if part_of(found.where) == part and found.target.split(".")[0] in IMPURE
    ]

    assert not impure


def test_the_conformance_tester_never_uses_our_runtime() -> None:
    """Else our own faults would hide in its verdicts."""
    reached, left = set[str](), {"conformance"} & set(ARROWS)
    while left:
        reached |= left
        left = {target for part in left for target in ARROWS[part]} - reached

    assert not reached & {"runtime", "sessions"}


def test_the_parser_of_imports_sees_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "_framer.py").touch()
    file = tmp_path / "core" / "_x.py"
    file.write_text(
        "import time, antiphon.core\n"
        "from typing import TYPE_CHECKING\n"
        "from antiphon.core import _framer, Limits\n"
        "if TYPE_CHECKING:\n    from antiphon import Agent\n"
        "def late():\n    from antiphon.cli import main\n",
        encoding="utf-8",
    )

    assert [(found.target, found.annotation) for found in imports(file)] == [
        ("time", False),
        ("antiphon.core", False),
        ("typing", False),
        ("antiphon.core._framer", False),
        ("antiphon.core", False),
        ("antiphon", True),
        ("antiphon.cli", False),
    ]
