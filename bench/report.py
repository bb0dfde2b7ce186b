"""`make bench-report`: put what was measured into docs/performance.md, between its markers.

A page has, for each table, `<!-- figures: NAME -->` and `<!-- end -->`; what stands between is written
anew from the JSON file of that name, and stays where there is no such file. The files are what
`make bench`, `bench-scaling`, `bench-lag`, `bench-journal` and `soak` leave in .cache/bench/results;
`ratios-3.13` is that of `make bench VENV=.venv-3.13`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.ratios import row_of, shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SECTIONS", "filled", "main"]

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "performance.md"
SECTION: Final = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def ratios(told: Any) -> str:
    """The ratio table, what it was measured on, and how many targets are missed."""
    found = [row_of(row) for row in told["rows"]]
    judged = [row for row in found if row.ok is not None]
    missed = [row for row in judged if not row.ok]
    count = f"{len(judged) - len(missed)} of {len(judged)} targets are met."
    return "\n\n".join([*told["notes"], table(found), count])


def scaling(told: Any) -> str:
    """A row for each curve: what one costs when there are few and when there are many."""
    lines = [
        "| what grows | from | to | us CPU each | exponent | at most |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for curve in told["curves"]:
        (first, few, _), (last, many, _) = curve["points"][0], curve["points"][-1]
        if curve["unit"]:
            each = f"{small(few)} → {small(many)}"
        else:  # what the number must not matter to
            each = f"{small(few * first)} → {small(many * last)} in all"
        limit = curve["allowed"] + told["margin"]
        lines.append(
            f"| {curve['title']} | {first:,} | {last:,} | {each} | {curve['exponent']:.2f} | {limit:.2f} |"
        )
    return "\n\n".join([told["note"], "\n".join(lines)])


def lag(told: Any) -> str:
    """How late a ticker came while the loop had something to do."""
    lines = ["| while | seconds | median ms | p99 ms | worst ms | bound ms |", "|---|" + "--:|" * 5]
    for case in told["cases"]:
        figures = (case[key] for key in ("seconds", "median", "p99", "worst", "bound"))
        lines.append("| " + " | ".join([case["case"], *map(shown, figures)]) + " |")
    return "\n\n".join([f"Python {told['python']}", "\n".join(lines)])


def journal(told: Any) -> str:
    """What `bench/journal.py` measured, a column for each store."""
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    for store, figures in told.items():
        for name, case, value, unit in figures:
            rows.setdefault((name, case, unit), {})[store] = value
    lines = [f"| | | | {' | '.join(told)} |", f"|---|---|---|{'--:|' * len(told)}"]
    for (name, case, unit), values in rows.items():
        cells = [name, case, unit, *(shown(values.get(store)) for store in told)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stations(told: Any) -> str:
    """A journey after the other, station by station."""
    lines = ["| journey | station | us CPU |", "|---|---|--:|"]
    before = ""
    for journey, name, us in told["stations"]:
        lines.append(f"| {journey if journey != before else ''} | {name} | {small(us)} |")
        before = journey
    return "\n\n".join([told["note"], "\n".join(lines)])


def soak(told: Any) -> str:
    """Memory over a soak."""
    lines = ["| updates so far | resident, MiB |", "|--:|--:|"]
    lines += [f"| {updates:,} | {mib:.1f} |" for updates, mib in told["memory"]]
    grown = f"Grown after the first tenth: {told['growth']:.1f} MiB; a run fails above {told['bound']:.0f}."
    return "\n\n".join([told["note"], "\n".join(lines), grown])


#: By the name in the marker: where its file is below .cache, and what makes text of it.
SECTIONS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "ratios": ("bench/results/ratios.json", ratios),
    "ratios-3.13": ("bench-3.13/results/ratios.json", ratios),
    "scaling": ("bench/results/scaling.json", scaling),
    "lag": ("bench/results/lag.json", lag),
    "journal": ("bench/results/journal.json", journal),
    "stations": ("bench/results/stations.json", stations),
    "soak": ("bench/results/soak.json", soak),
}


def small(value: float) -> str:
    """Two figures of what may be far below one."""
    return f"{value:.2g}" if value < 1 else shown(value)


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with these texts between their markers.

    Raises:
        ValueError: a text has no place, or a marker no end.
    """
    if len(SECTION.findall(page)) != page.count("<!-- figures:"):
        raise ValueError("a marker without its end")
    places = {found[2] for found in SECTION.finditer(page)}
    if unknown := sorted(set(texts) - places):
        raise ValueError(f"the page has no place for {', '.join(unknown)}")

    def put(found: re.Match[str]) -> str:
        text = texts.get(found[2])
        return found[0] if text is None else f"{found[1]}\n{text}\n\n{found[3]}"

    return SECTION.sub(put, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--into", type=Path, default=PAGE, help="the page (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where the files are")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    given = parser.parse_args(arguments)
    texts: dict[str, str] = {}
    for name in given.only:
        path, render = SECTIONS[name]
        file = given.cache / path
        if file.exists():
            texts[name] = render(json.loads(file.read_text(encoding="utf-8")))
        print(f"{name:12} {file if name in texts else f'stays: no {file}'}")
    page = given.into.read_text(encoding="utf-8")
    given.into.write_text(filled(page, texts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
