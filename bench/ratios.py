"""The ratio table: what `run.py` measured, each of bench/targets.toml's targets beside it.

`python -m bench.ratios SAMPLES…` reads one or more files of `run.py --json` (a run in pieces is one run:
a later file adds measures), prints the table and, with `--json` and `--markdown`, writes it. It judges
nothing: a target that was missed is a row that says so. `bench/check.py` is what can fail.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Row",
    "Target",
    "main",
    "merged",
    "ratio_of",
    "read_targets",
    "row_of",
    "rows",
    "shown",
    "table",
]

HERE: Final = Path(__file__).resolve().parent
TARGETS: Final = HERE / "targets.toml"
OURS: Final = "antiphon"
#: Whose ratios to the same reference stand at the right of the table, where they take part.
PEERS: Final = ("raw-asyncio", "python-sdk", "python-sdk-rc")
#: Keys of a sample by the figure's name, the first that it has.
KEYS: Final = {
    "cpu": ("cpu_us", "cpu_ms"),
    "rate": ("per_s",),
    "p50": ("p50_us",),
    "peak": ("peak_mb",),
    "growth": ("growth_mb",),
}
UNITS: Final = {
    "cpu_us": "us CPU",
    "cpu_ms": "ms CPU",
    "per_s": "a second",
    "p50_us": "us p50",
    "peak_mb": "MiB peak",
    "growth_mb": "MiB growth",
}

#: measure: implementation: one sample a round.
Samples = dict[str, dict[str, list[dict[str, float]]]]


class Target(NamedTuple):
    """One entry of targets.toml, which says what its members mean."""

    row: str
    figure: str
    of: str = OURS
    against: str | None = None
    at_most: float | None = None
    at_least: float | None = None


class Row(NamedTuple):
    """A target and what was measured for it.

    Attributes:
        target: the entry.
        unit: of the two figures.
        figure: the implementation's median.
        reference: that of what it is held against, if anything.
        ratio: the median of the ratios of the rounds, else the figure itself.
        ok: whether the target is met; None without a target.
        peers: ratios of others to the same reference, where the row is not about another one.
        note: which message it was, of a codec.
        each: the ratio of every message, of a codec that is held against another.
    """

    target: Target
    unit: str
    figure: float
    reference: float | None
    ratio: float
    ok: bool | None
    peers: dict[str, float]
    note: str
    each: dict[str, float]


def read_targets(path: Path = TARGETS) -> list[Target]:
    """The entries, in their order.

    Raises:
        ValueError: one says something that no table could show.
    """
    found: list[Target] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["target"]:
        if unknown := set(entry) - set(Target._fields):
            raise ValueError(f"{path.name}: {', '.join(sorted(unknown))} of {entry}")
        target = Target(**entry)
        if target.figure not in KEYS:
            raise ValueError(f"{path.name}: no figure {target.figure!r} in {entry}")
        if target.at_most is not None and target.at_least is not None:
            raise ValueError(f"{path.name}: at_most and at_least in {entry}")
        if target.row.startswith("codec ") and target.figure != "rate":
            raise ValueError(f"{path.name}: a codec has rates alone: {entry}")
        found.append(target)
    return found


def merged(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], Samples]:
    """The notes of several runs, each once, and their samples: of a measure, the last run's."""
    samples: Samples = {}
    for run in runs:
        samples.update(run["samples"])
    return list(dict.fromkeys(run["note"] for run in runs)), samples


def ratio_of(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], key: str
) -> float | None:
    """The median of the ratios of the rounds: what disturbs a round disturbs both."""
    pairs = zip(ours, theirs, strict=False)
    ratios = [one[key] / other[key] for one, other in pairs if key in one and other.get(key)]
    return statistics.median(ratios) if ratios else None


def rows(targets: Sequence[Target], samples: Samples) -> list[Row]:
    """Each target with its figures; one that was not measured is left out."""
    found = (_row(target, samples) for target in targets)
    return [row for row in found if row is not None]


def _row(target: Target, samples: Samples) -> Row | None:
    measure, _, way = target.row.partition(" ")
    taken = samples.get(measure, {})
    ours = taken.get(target.of, [])
    theirs = taken.get(target.against or "", [])
    if not ours or (target.against is not None and not theirs):
        return None
    each: dict[str, float] = {}
    if way:
        for name in ours[0]:
            if name.startswith(way + " ") and (one := ratio_of(ours, theirs, name)) is not None:
                each[name.partition(" ")[2]] = one
        key = f"{way} {min(each, key=lambda name: (each[name], name))}" if each else ""
    else:
        key = next((key for key in KEYS[target.figure] if key in ours[0]), "")
    if not key:
        return None
    figure = _median(ours, key)
    ratio = figure if target.against is None else ratio_of(ours, theirs, key)
    if ratio is None:
        return None
    ok: bool | None = None
    if target.at_most is not None:
        ok = ratio <= target.at_most
    elif target.at_least is not None:
        ok = ratio >= target.at_least
    peers: dict[str, float] = {}
    usual = target.of == OURS and target.against in {None, "ts-sdk"}  # others stand there once
    for name in PEERS if usual else ():
        others = taken.get(name, [])
        if others and key in others[0]:
            other = _median(others, key) if not theirs else ratio_of(others, theirs, key)
            if other is not None:
                peers[name] = other
    return Row(
        target,
        UNITS.get(key, "a second"),
        figure,
        _median(theirs, key) if theirs else None,
        ratio,
        ok,
        peers,
        key.partition(" ")[2] if way else "",
        each,
    )


def _median(samples: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples if key in sample)


def shown(value: float | None, digits: int = 3) -> str:
    """Three figures or so."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.{max(0, digits - 2)}f}"
    return f"{value:.{digits - 1}f}"


def name_of(row: Row) -> str:
    """Measure, and whatever is not as in most rows."""
    target = row.target
    name = target.row
    if row.note:
        name += f" (worst: {row.note})"
    if target.of != OURS:
        name += f", {target.of}"
    if target.against not in {None, "ts-sdk"}:
        name += f", against {target.against}"
    return name


def bound_of(target: Target) -> str:
    if target.at_most is not None:
        return f"≤ {target.at_most:g}"
    return "" if target.at_least is None else f"≥ {target.at_least:g}"


def table(found: Sequence[Row]) -> str:
    """All rows in Markdown, and below them the ratios of a codec's messages."""
    peers = [name for name in PEERS if any(name in row.peers for row in found)]
    lines = [
        "| measure | unit | Antiphon | reference | ratio | target | |"
        + "".join(f" {name} |" for name in peers),
        "|---|---|--:|--:|--:|--:|---|" + "--:|" * len(peers),
    ]
    for row in found:
        verdict = "" if row.ok is None else "ok" if row.ok else "**miss**"
        cells = [
            name_of(row),
            row.unit,
            shown(row.figure),
            shown(row.reference),
            "" if row.target.against is None else f"{row.ratio:.3f}",
            bound_of(row.target),
            verdict,
            *(shown(row.peers.get(name)) for name in peers),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_messages([row for row in found if row.each])])


def _messages(found: Sequence[Row]) -> list[str]:
    """The lines of a table with a row for each message that a codec was given."""
    if not found:
        return []
    ways = (f"{row.target.row.partition(' ')[2]}, against {row.target.against}" for row in found)
    lines = ["", f"| codec | {' | '.join(ways)} |", "|---|" + "--:|" * len(found)]
    for name in dict.fromkeys(name for row in found for name in row.each):
        ratios = (f"{row.each[name]:.3f}" if name in row.each else "" for row in found)
        lines.append(f"| {name} | {' | '.join(ratios)} |")
    return lines


def as_json(notes: Sequence[str], found: Sequence[Row]) -> dict[str, Any]:
    """The same for programs."""
    listed = [row._asdict() | {"target": row.target._asdict()} for row in found]
    return {"notes": list(notes), "rows": listed}


def row_of(told: Mapping[str, Any]) -> Row:
    """A row of what `as_json` made, also before it told of each message."""
    members: dict[str, Any] = {"each": {}, **told, "target": Target(**told["target"])}
    return Row(**members)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ratios", description=__doc__)
    parser.add_argument("samples", nargs="+", type=Path, help="files that run.py --json wrote")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    given = parser.parse_args(arguments)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in given.samples]
    notes, samples = merged(runs)
    found = rows(read_targets(), samples)
    text = "\n\n".join([*notes, table(found)])
    missed = [row for row in found if row.ok is False]
    print(f"{text}\n\n{len(found)} rows, {len(missed)} over their target")
    if given.json is not None:
        whole = json.dumps(as_json(notes, found), indent=1)
        given.json.write_text(whole + "\n", encoding="utf-8")
    if given.markdown is not None:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
