"""`make bench-check`: a short run beside the TypeScript SDK that fails only on a gross loss.

Each row's CPU ratio to ts-sdk is held against the one in bench/recorded.toml, which
`make bench-record` writes from a run of the same size on a machine that does nothing else. A row fails
above 1.5 times its recorded ratio, and only if it does so twice: machines are noisy, and what a CI fails
on must be the change. Targets are another matter: the ratio table has them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.ratios import OURS, Samples, ratio_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Verdict", "judge", "main", "ratios_of", "read_recorded", "recorded_text"]

HERE: Final = Path(__file__).resolve().parent
RECORDED: Final = HERE / "recorded.toml"
BASELINE: Final = "ts-sdk"
DURABLE: Final = "antiphon-durable"
#: How far above what is recorded a ratio may be.
GROSS: Final = 1.5
#: Of the whole workloads: enough for the baseline's compiler to have warmed up as it did on record.
SCALE: Final = 0.3
ROUNDS: Final = 3

HEAD: Final = """\
# CPU ratios to ts-sdk that `make bench-check` holds a change against, by version of Python.
# Written by `make bench-record`; the size of the run is bench/check.py's.
"""
#: What run.py is asked for, codec rates aside, which are no CPU ratios.
ALL: Final = ("agent", "client", "import")


class Verdict(NamedTuple):
    """One row: its ratio now and on record."""

    row: str
    ratio: float
    recorded: float | None

    @property
    def ok(self) -> bool:
        """Whether it is within what noise may do; a row that is not on record cannot be wrong."""
        return self.recorded is None or self.ratio <= self.recorded * GROSS

    def __str__(self) -> str:
        if self.recorded is None:
            return f"{self.row:28} {self.ratio:6.3f}   not on record"
        told = "ok" if self.ok else f"over {GROSS:g} times"
        return f"{self.row:28} {self.ratio:6.3f}   recorded {self.recorded:.3f}   {told}"


def ratios_of(samples: Samples) -> dict[str, float]:
    """The CPU ratio to the baseline of each measure, and of the durable agent's."""
    found: dict[str, float] = {}
    for measure, taken in samples.items():
        for name, row in ((OURS, measure), (DURABLE, f"{measure}, durable")):
            for key in ("cpu_us", "cpu_ms"):
                ratio = ratio_of(taken.get(name, []), taken.get(BASELINE, []), key)
                if ratio is not None:
                    found[row] = ratio
    return found


def judge(ratios: Mapping[str, float], recorded: Mapping[str, float]) -> list[Verdict]:
    return [Verdict(row, ratio, recorded.get(row)) for row, ratio in ratios.items()]


def missing(ratios: Iterable[str], recorded: Mapping[str, float]) -> list[str]:
    """What is on record and was not measured: an implementation that failed must not pass."""
    return sorted(set(recorded) - set(ratios))


def read_recorded(python: str, path: Path | None = None) -> tuple[str, dict[str, float]]:
    """The machine and the ratios on record for a minor version of Python, else for the last listed.

    Raises:
        ValueError: nothing is on record.
    """
    path = RECORDED if path is None else path
    tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not tables:
        raise ValueError(f"nothing is on record in {path.name}: run `make bench-record`")
    table = tables.get(python) or tables[list(tables)[-1]]
    return str(table["machine"]), dict(table["ratios"])


def recorded_text(text: str, python: str, machine: str, ratios: Mapping[str, float]) -> str:
    """What the file is to hold: the other versions as they were, this one anew."""
    tables = {
        name: (table["machine"], table["ratios"]) for name, table in tomllib.loads(text).items()
    }
    tables[python] = (machine, ratios)
    parts = [HEAD]
    for name in sorted(tables, key=lambda name: [int(part) for part in name.split(".")]):
        where, values = tables[name]
        lines = [f"{json.dumps(row)} = {value:.3f}" for row, value in values.items()]
        parts.append(
            f"[{json.dumps(name)}]\nmachine = {json.dumps(where)}\n\n"
            f"[{json.dumps(name)}.ratios]\n" + "\n".join(lines) + "\n"
        )
    return "\n".join(parts)


def measured(arguments: Sequence[str]) -> Samples:
    """Run run.py as `make bench` does, and read what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        command = [
            *(sys.executable, str(HERE / "run.py"), "--impls", str(HERE / "antiphon.toml")),
            *("--impl", BASELINE, OURS, f"{DURABLE}:agent/stream-32"),
            *("--scale", str(SCALE), "--rounds", str(ROUNDS), "--json", str(path)),
        ]
        done = subprocess.run(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if done.returncode or not path.exists():
            print(done.stdout)
            raise SystemExit(f"run.py failed with {done.returncode}")
        failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
        print("\n".join(failed), end="\n" if failed else "")
        samples: Samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
        return samples


def check(
    recorded: Mapping[str, float],
    run: Callable[[Sequence[str]], Samples],
    only: Sequence[str] = ALL,
) -> int:
    """Measure, measure again what is over, and say what came of it: the exit status."""
    verdicts = judge(ratios_of(run(["--only", *only])), recorded)
    for verdict in verdicts:
        print(verdict)
    # With all rows wanted, each that is on record must be there.
    whole = set(only) >= set(ALL)
    lost = missing((verdict.row for verdict in verdicts), recorded) if whole else []
    over = [verdict for verdict in verdicts if not verdict.ok]
    if over:
        print("once more, what is over:")
        again = [verdict.row.partition(",")[0] for verdict in over]
        found = judge(ratios_of(run(["--only", *again])), recorded)
        for verdict in found:
            print(verdict)
        twice = {verdict.row for verdict in found if not verdict.ok}
        came = {verdict.row for verdict in found}
        over = [verdict for verdict in over if verdict.row in twice or verdict.row not in came]
    for row in lost:
        print(f"WRONG: {row} was not measured")
    for verdict in over:
        print(f"WRONG: {verdict.row} costs more than {GROSS:g} times what is on record, twice")
    return 1 if over or lost else 0


def machine_line() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}; "
        f"Python {platform.python_version()}; {ROUNDS} rounds, scale {SCALE:g}; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-check ARGS=…", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what is measured instead")
    parser.add_argument("--only", nargs="+", default=ALL, help="as for run.py")
    given = parser.parse_args(arguments)
    python = ".".join(platform.python_version_tuple()[:2])
    begin = time.monotonic()
    if given.record:
        text = RECORDED.read_text(encoding="utf-8") if RECORDED.exists() else ""
        ratios = ratios_of(measured(["--only", *given.only]))
        old = tomllib.loads(text).get(python, {}).get("ratios", {})
        whole = recorded_text(text, python, machine_line(), old | ratios)
        RECORDED.write_text(whole, encoding="utf-8")
        for row, ratio in ratios.items():
            print(f"{row:28} {ratio:6.3f}")
        return 0
    machine, recorded = read_recorded(python)
    print(f"CPU ratios to {BASELINE}; fails above {GROSS:g} times those recorded on {machine}")
    status = check(recorded, measured, given.only)
    print(f"{'WRONG' if status else 'ok'}, in {time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
