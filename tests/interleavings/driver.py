"""Many random programs on one loop, each from a number that makes it again; what fails is shrunk.

`ANTIPHON_SEED=1234` repeats a run, `ANTIPHON_SEED=1234/567` the one program of it that failed.
`ANTIPHON_INTERLEAVINGS` says how many there are: by default 10,000 in CI, 1,000 elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from random import Random
from typing import TYPE_CHECKING, Any

from antiphon.testing import VirtualTimeLoop
from tests.interleavings.world import random_program, run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.interleavings.world import Program, Step, World

    WorldMaker = Callable[[int], World]

__all__ = ["Failure", "Seed", "how_many", "run_many", "run_one"]

#: Tries of the shrinking: enough for a few steps to remain, and bounded.
SHRINKING = 600
#: The loop's clock goes on from program to program.
_FOR_EVER = 1e12


def how_many() -> int:
    default = 10_000 if os.environ.get("CI") else 1_000
    return int(os.environ.get("ANTIPHON_INTERLEAVINGS", default))


class Seed:
    """What a run was made from: a new number in each, unless `ANTIPHON_SEED` names one."""

    def __init__(self, text: str | None = None) -> None:
        given = os.environ.get("ANTIPHON_SEED", "") if text is None else text
        base, _, index = given.partition("/")
        self.base = int(base) if base else secrets.randbits(32)
        self.index = int(index) if index else None

    def numbers(self, count: int) -> Sequence[int]:
        return range(count) if self.index is None else (self.index,)

    def program(self, kind: str, index: int, weights: dict[str, int]) -> tuple[Program, int]:
        random = Random(f"{self.base}/{kind}/{index}")
        return random_program(random, weights, random.randint(5, 55)), random.randrange(1 << 16)


class Failure(AssertionError):
    """A program whose run broke the contract."""


class _Log(logging.Handler):
    """Takes what would otherwise be formatted and kept ten thousand times."""

    def emit(self, record: logging.LogRecord) -> None:
        pass


def run_many(
    kind: str,
    make: WorldMaker,
    weights: dict[str, int],
    count: int,
    seed: Seed,
    *,
    tries: int = SHRINKING,
) -> int:
    """Run `count` random programs; how many steps those were.

    Raises `Failure` for the first bad one, shrunk in at most `tries` further runs.
    """
    steps = 0
    quiet = _quiet()
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            for index in seed.numbers(count):
                program, variant = seed.program(kind, index, weights)
                steps += len(program)
                if violations := _run_in(runner, make, program, variant)[0]:
                    name = f"ANTIPHON_SEED={seed.base}/{index} ({kind}): {violations}"
                    raise Failure(_explain(name, make, program, variant, tries))
    finally:
        quiet()
    return steps


def run_one(make: WorldMaker, program: Program, variant: int) -> tuple[list[str], list[str]]:
    """Run one program on a loop of its own: what it found wrong, and what happened."""
    quiet = _quiet()
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            return _run_in(runner, make, program, variant)
    finally:
        quiet()


def _loop() -> VirtualTimeLoop:
    return VirtualTimeLoop(bound=_FOR_EVER)


def _run_in(
    runner: asyncio.Runner, make: WorldMaker, program: Program, variant: int
) -> tuple[list[str], list[str]]:
    unhandled: list[str] = []

    def note(_loop: Any, context: dict[str, Any]) -> None:
        unhandled.append(f"the loop had to handle {context.get('message')}")

    runner.get_loop().set_exception_handler(note)
    history: list[str] = []

    async def main() -> list[str]:
        world = make(variant)
        violations = await run_program(world, program)
        history.extend(world.history)
        return violations

    try:
        violations = runner.run(main())
    except Exception as error:
        violations = [f"the program raised {error!r}"]
    return violations + unhandled, history


def _quiet() -> Callable[[], None]:
    """What our side logs about odd peers is not looked at here; returns what undoes that."""
    logger = logging.getLogger("antiphon")
    handler, propagate = _Log(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False

    def undo() -> None:
        logger.removeHandler(handler)
        logger.propagate = propagate

    return undo


def shrink(make: WorldMaker, program: Program, variant: int, tries: int) -> Program:
    """Leave steps out, in ever smaller pieces, as long as the rest still fails."""
    size = max(1, len(program) // 2)
    while True:
        at, shorter = 0, False
        while at < len(program) and tries > 0:
            tries -= 1
            rest = program[:at] + program[at + size :]
            if run_one(make, rest, variant)[0]:
                program, shorter = rest, True
            else:
                at += size
        if tries <= 0 or (size == 1 and not shorter):
            return program
        size = max(1, size // 2)


def _explain(name: str, make: WorldMaker, program: Program, variant: int, tries: int) -> str:
    small = shrink(make, program, variant, tries)
    violations, history = run_one(make, small, variant)
    shown = ", ".join(map(_text, small))
    lines = "\n".join(f"    {line}" for line in history)
    return (
        f"{name}\n"
        f"shrunk from {len(program)} steps to {len(small)}, variant {variant}: [{shown}]\n"
        f"{violations or 'on a loop of its own nothing is wrong'}\n{lines}"
    )


def _text(step: Step) -> str:
    return f"Step({step.name!r}, {step.a}, {step.b})"
