"""`python -m fuzz.run`: fuzz each target for a bounded time, or run one input again.

A case that reaches a line of the library that none had reached joins the pool that new ones are made
from. A case that breaks a law is made shorter as long as it goes on breaking it, kept in a file and
told with the command that runs it again. Where `atheris` is installed, `--engine atheris` has libFuzzer
choose the cases.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import secrets
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Self

from fuzz import targets
from fuzz.mutate import mutated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path(__file__).parent / "corpus"
KEPT = ROOT / ".cache" / "fuzz"
#: What a case may take in seconds of processor time, plus so much for each of its bytes.
BASE, PER_BYTE = 1.0, 50e-6
#: A pool larger than this is not more varied, only slower.
POOL = 400

__all__ = ["Found", "Lines", "Report", "corpus_of", "fuzz", "main", "too_slow"]


class Found(Exception):
    """A case that breaks a law of its target."""

    def __init__(self, target: str, data: bytes, error: BaseException) -> None:
        super().__init__(target, data, error)
        self.target = target
        self.data = data
        self.error = error

    def __str__(self) -> str:
        return f"{self.target}: {type(self.error).__name__}: {self.error}\n  data: {self.data!r}"


class Report:
    """What came of fuzzing one target."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.executions = 0
        self.lines = 0
        self.pool = 0

    def __str__(self) -> str:
        return (
            f"{self.target}: {self.executions:,} executions, {self.lines} lines of the library, "
            f"{self.pool} cases in the pool"
        )


class Lines:
    """Which lines of the library have run. A context: nothing is watched outside of it.

    Python 3.12 tells of each line once, at no cost afterwards; 3.11 is asked for every line.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self._folder = str(ROOT / "src" / "antiphon")

    def __enter__(self) -> Self:
        if sys.version_info >= (3, 12):
            watch: Any = sys.monitoring
            watch.use_tool_id(watch.COVERAGE_ID, "antiphon-fuzz")
            watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, self._line)
            watch.set_events(watch.COVERAGE_ID, watch.events.LINE)
            watch.restart_events()  # the lines that another target has reached are new to this one
        else:
            sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.version_info >= (3, 12):
            watch: Any = sys.monitoring
            watch.set_events(watch.COVERAGE_ID, 0)
            watch.free_tool_id(watch.COVERAGE_ID)
        else:
            sys.settrace(None)

    def _line(self, code: Any, line: int) -> object:
        if code.co_filename.startswith(self._folder):
            self.seen.add((code.co_filename, line))
        return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]

    def _trace(self, frame: Any, event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._folder):
            return None
        if event == "line":
            self.seen.add((name, frame.f_lineno))
        return self._trace


def corpus_of(target: str) -> list[bytes]:
    """The checked-in cases of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def too_slow(seconds: float, size: int) -> bool:
    """Whether a case of that size took more than linear time can explain."""
    return seconds > BASE + PER_BYTE * size


def run(target: str, check: Callable[[bytes], None], data: bytes) -> None:
    """Hold one case against the laws of its target. Raises `Found`."""
    begin = time.process_time()
    try:
        check(data)
    except Exception as error:
        raise Found(target, data, error) from error
    seconds = time.process_time() - begin
    if too_slow(seconds, len(data)):
        raise Found(target, data, TimeoutError(f"{seconds:.1f} s for {len(data)} bytes"))


def fuzz(
    target: str,
    seconds: float,
    seed: int,
    *,
    most: int | None = None,
    check: Callable[[bytes], None] | None = None,
) -> Report:
    """Fuzz one target for so long, or with so many cases, beginning with its corpus.

    Raises `Found`, shortened.
    """
    law = targets.load(target) if check is None else check
    random = Random(f"{seed}/{target}")
    report, end = Report(target), time.monotonic() + seconds
    pool: list[bytes] = []
    try:
        with Lines() as lines:
            for data in _cases(corpus_of(target), pool, random):
                before = len(lines.seen)
                run(target, law, data)
                report.executions += 1
                if len(lines.seen) > before and data not in pool:
                    pool.append(data)
                    if len(pool) > POOL:
                        del pool[random.randrange(POOL)]
                if report.executions == most:
                    break
                if report.executions % 64 == 0 and time.monotonic() > end:
                    break
            report.lines, report.pool = len(lines.seen), len(pool)
    except Found as found:
        raise Found(target, *_shortened(target, law, found)) from found.error
    return report


def _cases(corpus: Sequence[bytes], pool: list[bytes], random: Random) -> Iterator[bytes]:
    for data in corpus:
        yield data
        if data not in pool:
            pool.append(data)
    while True:
        yield mutated(random.choice(pool), pool, random)


def _shortened(
    target: str, check: Callable[[bytes], None], found: Found
) -> tuple[bytes, BaseException]:
    """The case with everything left out that is not needed to fail in the same way."""
    data, error = found.data, found.error
    size, tries = max(1, len(data) // 2), 2000
    while size and tries:
        at = 0
        while at < len(data) and tries:
            tries -= 1
            shorter = data[:at] + data[at + size :]
            try:
                run(target, check, shorter)
            except Found as again:
                if type(again.error) is type(error):
                    data, error = shorter, again.error
                    continue
            at += size
        size //= 2
    return data, error


def _keep(found: Found) -> Path:
    KEPT.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(found.data).hexdigest()[:12]
    path = KEPT / f"{found.target}-{name}"
    path.write_bytes(found.data)
    return path


def _with_atheris(target: str, seconds: float, seed: int) -> int:
    """Have libFuzzer do it, in a process of its own: it ends the process."""
    pool = KEPT / f"pool-{target}"  # libFuzzer adds to the first folder it is given
    pool.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz.atheris_target", target]
    command += [
        f"-max_total_time={seconds:.0f}",
        f"-seed={seed % (1 << 31)}",
        "-print_final_stats=1",
    ]
    command += [f"-artifact_prefix={KEPT}/{target}-", str(pool), str(CORPUS / target)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=…", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="for each target (10)")
    parser.add_argument("--target", choices=targets.NAMES, action="append", help="by default all")
    parser.add_argument("--seed", type=int, help="makes the same cases again")
    parser.add_argument("--input", type=Path, help="run this one file, with one --target")
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    options = parser.parse_args(arguments)
    logging.getLogger("antiphon").addHandler(logging.NullHandler())
    logging.getLogger("antiphon").propagate = False
    chosen: Sequence[str] = options.target or targets.NAMES
    if options.input is not None:
        if len(chosen) != 1:
            parser.error("--input needs one --target")
        run(chosen[0], targets.load(chosen[0]), options.input.read_bytes())
        print(f"{chosen[0]}: {options.input} breaks no law")
        return 0
    if options.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install --group fuzz")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}")
    failed = 0
    for target in chosen:
        if options.engine == "atheris":
            failed += _with_atheris(target, options.seconds, seed) != 0
            continue
        try:
            print(fuzz(target, options.seconds, seed), flush=True)
        except Found as found:
            failed += 1
            print(f"{found}\n  again: make fuzz ARGS='--target {target} --input {_keep(found)}'")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
