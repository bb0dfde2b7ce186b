"""`make bench-report` draws with this: curves and ratios as PNG, from the files that the runs leave.

The only program that needs matplotlib (dependency group `bench`).
"""

from __future__ import annotations

import argparse
import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter, NullLocator
from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[1]
OURS: Final = "#1f5fa8"
OTHERS: Final = "#d98a1f"
LIMIT: Final = "#c03a2b"
#: Of the others, in the ratio plot.
MARKS: Final = {"raw-asyncio": "|", "python-sdk": "o", "python-sdk-rc": "s"}


def scaling(told: dict[str, Any], path: Path) -> None:
    """A small plot for each curve: what one costs, over how many there are."""
    curves = told["curves"]
    columns = 4
    lines = -(-len(curves) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(10, 2.1 * lines), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, curve in zip(axes.flat, curves, strict=False):
        numbers = [number for number, *_ in curve["points"]]
        flat = curve["allowed"] == 0
        costs = [each * (number if flat else 1) for number, each, _ in curve["points"]]
        judged = [own * (number if flat else 1) for number, _, own in curve["points"]]
        axis.loglog(numbers, costs, "o-", color=OURS, markersize=3, linewidth=1.2)
        if judged != costs:  # without the collector of cycles
            axis.loglog(numbers, judged, ":", color=OURS, linewidth=1.2)
        # What would still be within the margin, from the first point of the upper two decades.
        upper = [at for at, number in enumerate(numbers) if number * 100 >= numbers[-1]]
        start = upper[0]
        bound = [judged[start] * (numbers[at] / numbers[start]) ** told["margin"] for at in upper]
        axis.loglog([numbers[at] for at in upper], bound, "--", color=LIMIT, linewidth=0.8)
        low, high = min(judged), max(costs)
        axis.set_ylim(low / 3, high * 3)
        axis.set_title(curve["title"], fontsize=8)
        unit = f"us per {curve['unit']}" if curve["unit"] else "us in all"
        axis.set_ylabel(unit, fontsize=7)
        axis.tick_params(labelsize=6)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(visible=True, linewidth=0.3)
        axis.text(
            0.97,
            0.05,
            f"exponent {curve['exponent']:.2f}",
            transform=axis.transAxes,
            fontsize=7,
            horizontalalignment="right",
        )
    figure.tight_layout()
    save(figure, path)


def ratios(told: dict[str, Any], path: Path) -> None:
    """CPU of everybody in that of ts-sdk, and the targets."""
    rows = [
        row
        for row in told["rows"]
        if row["target"]["figure"] == "cpu" and row["target"]["against"] == "ts-sdk"
    ]
    names = [
        row["target"]["row"] + (", durable" if row["target"]["of"] != "antiphon" else "")
        for row in rows
    ]
    figure, axis = plt.subplots(figsize=(8, 0.27 * len(rows) + 0.9))
    places = range(len(rows))
    axis.barh(places, [row["ratio"] for row in rows], color=OURS, height=0.62, label="Antiphon")
    bounds = [(at, row["target"]["at_most"]) for at, row in enumerate(rows)]
    bounds = [(at, bound) for at, bound in bounds if bound is not None]
    axis.vlines(
        [bound for _, bound in bounds],
        [at - 0.42 for at, _ in bounds],
        [at + 0.42 for at, _ in bounds],
        color=LIMIT,
        linewidth=2,
        label="target",
    )
    for peer, mark in MARKS.items():
        points = [(row["peers"][peer], at) for at, row in enumerate(rows) if peer in row["peers"]]
        if points:
            axis.scatter(*zip(*points, strict=True), marker=mark, s=30, color=OTHERS, label=peer)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(list(places), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1 = ts-sdk", "3"], fontsize=7)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("CPU, in that of the TypeScript SDK (logarithmic; less is better)", fontsize=7)
    axis.grid(visible=True, axis="x", linewidth=0.3)
    axis.legend(fontsize=7, loc="lower right", framealpha=1)
    figure.tight_layout()
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    # No date and no version inside: the same figures make the same file. Few colours: a third as large.
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90, metadata={"Software": None})
    Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
        path, optimize=True
    )
    plt.close(figure)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


DRAWN: Final = {
    "scaling.png": ("bench/results/scaling.json", scaling),
    "ratios.png": ("bench/results/ratios.json", ratios),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where the files are")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    for name, (path, draw) in DRAWN.items():
        file = given.cache / path
        if file.exists():
            draw(json.loads(file.read_text(encoding="utf-8")), given.into / name)
        else:
            print(f"{name} stays: no {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
