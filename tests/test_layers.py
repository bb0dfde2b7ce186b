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

# A part is a folder, or a module beside the folders. Each may import the parts in its row.
ARROWS: dict[str, dict[str, str]] = {
    "_errors": {},
    "_version": {},
    "schema": {},
    "core": {
        "_errors": "limits, misuse and a peer's error answer are the library's own exceptions",
        "schema": "repairing text is the codec's knowledge",
    },
    "_descriptors": {},
    "_guard": {},
    "_launch": {
        "_errors": "a program that cannot be started is a StartError",
    },
    "_process": {
        "_descriptors": "pipes are read and written without blocking the loop",
        "_errors": "a process that ended too early is a StartError",
        "_guard": "what we start must end even if we are killed",
        "_launch": "starting it",
        "_windows_job": "what we start must end, on Windows",
    },
    "_windows_job": {},
    "transports": {
        "_descriptors": "moving bytes",
        "_errors": "what is known of a lost link is in ConnectionClosed",
        "_launch": "how a peer may be started",
        "_process": "a peer's process and a terminal's are supervised alike",
        "core": "bytes are cut into frames before they are handed up",
    },
    "runtime": {
        "_errors": "the one boundary between exceptions and the wire",
        "core": "the next station towards the bytes",
        "schema": "raw results and depth",
        "transports": "the contract of what moves frames",
    },
    "_calls": {
        "schema": "calls are typed by the method table",
    },
    "journal": {
        "_errors": "what cannot be read or written is a JournalError",
        "schema": "records and frames are JSON by the one codec",
    },
    "sessions": {
        "_errors": "turns that are over, sessions that are closed",
        "_calls": "a peer has the generated typed calls",
        "core": "limits",
        "journal": "what a durable session tells is appended before it leaves",
        "runtime": "calls and updates come from a connection",
        "schema": "the method table, types and the codec",
        "transports": "a peer is made of one",
    },
    "services": {
        "_descriptors": "a terminal's output is read like any pipe",
        "_errors": "a refusal is an error answer",
        "_launch": "a command that cannot be started says why",
        "_process": "a terminal is a supervised process",
        "schema": "parameter and result types",
    },
    "_handlers": {
        "_errors": "what nobody overrides answers MethodNotFound",
        "schema": "handlers are typed by the method table",
        "sessions": "handlers take an AgentContext or a ClientContext",
    },
    "_capabilities": {
        "schema": "the method table says what overriding implies",
    },
    "_loops": {
        "_workers": "work for a loop's default executor",
    },
    "_workers": {},
    "login": {
        "_errors": "a program that cannot be started is a StartError",
        "_launch": "the same program in the same environment as for spawn",
        "schema": "the method, in annotations",
    },
    "_recording": {
        "_errors": "what a recording function raises must not reach the connection",
    },
    "_agent": {
        "_capabilities": "what it offers",
        "_errors": "refusals of its own defaults",
        "_handlers": "the handlers to override",
        "journal": "where a durable agent keeps its sessions",
        "schema": "parameter and result types",
        "sessions": "turns",
    },
    "_client": {
        "_capabilities": "what it offers",
        "_errors": "what may end a programme from inside a deciding function",
        "_handlers": "the handlers to override",
        "schema": "parameter and result types",
        "services": "what it lends, in annotations",
        "sessions": "updates",
    },
    "_connect": {
        "_agent": "whom to serve",
        "_client": "who asks",
        "_errors": "a handshake that fails",
        "_loops": "an agent's process ends when its client has gone",
        "_recording": "keeping the wire",
        "_version": "clientInfo",
        "core": "limits",
        "journal": "what keeps an agent's sessions, in annotations",
        "runtime": "what telemetry= is called with, in annotations",
        "schema": "the handshake",
        "sessions": "what a user is given",
        "transports": "own streams, spawned processes",
    },
    "_serving": {
        "_agent": "whom to serve",
        "_connect": "each connection is one `serve`",
        "_errors": "what ends the programme goes on; a server that was closed",
        "core": "limits",
        "journal": "what keeps an agent's sessions, in annotations",
        "sessions": "how it does, in annotations",
        "transports": "sockets, and those who connect to them",
    },
    "content": {
        "_errors": "a file over the limit",
        "schema": "the blocks",
    },
    "_background": {
        "_loops": "whatever runs on the loop, closing the last agent is bounded",
        "_errors": "what was asked of a loop that has ended",
    },
    "sync": {
        "_background": "the loop in a thread that everything runs on",
        "_client": "what answers the agent",
        "_connect": "it is spawn and connect, waited for",
        "_errors": "a session whose loop has ended",
        "core": "limits",
        "schema": "parameter and result types",
        "services": "where a policy's plain function is called",
        "sessions": "the sessions that it wraps",
        "transports": "what may be connected",
    },
    "__init__": {
        "_agent": "the door, lazily",
        "_capabilities": "the door, lazily",
        "_client": "the door, lazily",
        "_connect": "the door, lazily",
        "_errors": "the door, lazily",
        "_serving": "the door, lazily",
        "_version": "the door; a number costs nothing",
        "core": "the door, lazily: Limits",
        "runtime": "the door, lazily: Context, Reply, TelemetryEvent",
        "schema": "the door, lazily: UNSET, UnknownUpdate",
        "sessions": "the door, lazily",
    },
    "testing": {
        "__init__": "whoever tests an agent or a client is a user of the public API",
        "core": "what stands for a refused frame",
        "journal": "the laws of journals' stores",
        "transports": "both ends of a link",
    },
    "cli": {
        "__init__": "the command is a user of the public API",
        "_connect": "a module that `antiphon run` imports must not serve itself meanwhile",
        "_errors": "exit codes by exception, without loading more",
        "_version": "--version",
        "journal": "looking into journals, and a demo of one",
        "login": "a terminal login",
        "schema": "showing updates",
        "services": "lending files and terminals",
        "transports": "securing the streams before a user's module is imported",
    },
    "__main__": {"cli": "python -m antiphon is the command"},
}
# Rooms that are entered from outside their folder, and why the door does not show them.
ENTERED: dict[str, str] = {
    "journal._record": "an export writes the frames that a subscriber sends: nothing for users",
    "sessions._methods": "the method table as both sides use it: nothing for users",
    "transports._listener": "opening and accepting is what a server is made of: nothing for users",
    "services._question": "in which thread a plain function asks is antiphon.sync's business alone",
}
# What would give a part a clock, a loop, a file or chance; and for each pure part what it may have.
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
PURE: dict[str, dict[str, str]] = {
    "core": {"io": "BytesIO, which is memory and no file, finds the ends of lines fastest"},
    "schema": {"threading": "a lock around building decoders, which any thread may need first"},
}


@dataclass(frozen=True)
class Import:
    """One import of a module or of a name in it, as written in `where`."""

    where: str
    target: str
    line: int

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
    """Every import, late ones and those for annotations included."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.extend(Import(name_of(path), name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                inside = full.removeprefix("antiphon.")
                target = full if full != inside and is_module(inside) else str(node.module)
                found.append(Import(name_of(path), target, node.lineno))
    return found


def own(found: Import) -> str | None:
    """The part that is imported, or None where it is not this library."""
    if found.target == "antiphon":
        return "__init__"
    inside = found.target.removeprefix("antiphon.")
    return None if inside == found.target else part_of(inside)


ALL = list(dict.fromkeys(found for path in modules() for found in imports(path)))


def arrows() -> set[tuple[str, str]]:
    pairs = ((part_of(found.where), own(found)) for found in ALL)
    return {(part, target) for part, target in pairs if target is not None and target != part}


def test_every_part_is_in_the_table() -> None:
    parts = {part_of(name_of(path)) for path in modules()}

    assert parts == set(ARROWS)


def test_imports_point_down() -> None:
    def allowed(found: Import) -> bool:
        part = part_of(found.where)
        return own(found) in {None, part, *ARROWS.get(part, {})}

    assert not [str(found) for found in ALL if not allowed(found)]


def test_every_arrow_is_used_and_has_its_reason() -> None:
    drawn = {(part, target) for part, row in ARROWS.items() for target in row}

    assert not drawn - arrows()
    assert all(reason for row in ARROWS.values() for reason in row.values())


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
        if part_of(found.where) == part
        and found.target.partition(".")[0] in IMPURE - set(PURE[part])
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

    assert sorted(found.target for found in imports(file)) == [
        "antiphon",
        "antiphon.cli",
        "antiphon.core",
        "antiphon.core",
        "antiphon.core._framer",
        "time",
        "typing",
    ]
