"""What the three worlds have in common: a program of small steps, tasks, and what was found wrong.

A program is a list of `Step`s: a name and two small numbers, which each world reads as it can (the
third session of those that there are). So any part of a program is a program, which is what makes
shrinking easy.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from random import Random

    from antiphon import TelemetryEvent

__all__ = ["Program", "Step", "World", "random_program", "run_program"]


class Step(NamedTuple):
    """One event of a program."""

    name: str
    a: int = 0
    b: int = 0


Program = list[Step]


class World:
    """Base of the worlds: runs the steps of a program and keeps what is found wrong."""

    #: Events that the world itself provokes.
    meant: tuple[str, ...] = ()
    #: Events that the world's own handlers are not to cause.
    mistakes: tuple[str, ...] = ()
    #: Names of the steps it understands, each with its weight among random ones.
    weights: dict[str, int]

    def __init__(self, variant: int = 0) -> None:
        del variant
        self.loop = asyncio.get_running_loop()
        #: Each sentence says what was found against the contract.
        self.violations: list[str] = []
        #: What happened, for whoever reads a failing program.
        self.history: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()

    def note(self, text: str) -> None:
        self.history.append(text)

    def violated(self, text: str) -> None:
        self.note(f"VIOLATION: {text}")
        self.violations.append(text)

    def failed(self, error: BaseException) -> None:
        """Something raised what it must not: our side, or this world."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        self.violated(f"{error!r} was raised in {place}")

    def hear(self, event: TelemetryEvent) -> None:
        """A telemetry hook: some events can only come of a mistake in the library."""
        wrong = event.kind == "invariant" or event.facts.get("decision") == "fail"
        if (wrong or event.name in self.mistakes) and event.name not in self.meant:
            self.violated(f"the library noticed a mistake: {event}")

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        return task

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def begin(self) -> None:
        """Connect and shake hands."""
        raise NotImplementedError

    async def step(self, step: Step) -> None:
        """Do one step; one that makes no sense now does nothing."""
        self.note(f"{step.name} {step.a} {step.b}")
        await getattr(self, f"do_{step.name}")(step.a, step.b)

    async def end(self) -> None:
        """Come to rest, close, and hold everything against the contract."""
        raise NotImplementedError

    async def do_turn(self, a: int, b: int) -> None:
        await self.turns(1 + a % 4)

    async def do_time(self, a: int, b: int) -> None:
        """Time goes by: mostly little, now and then past every bound."""
        await asyncio.sleep((0.013, 0.21, 3.1, 8.3, 37.7)[a % 5])


def random_program(random: Random, weights: dict[str, int], length: int) -> Program:
    names = random.choices(list(weights), list(weights.values()), k=length)
    return [Step(name, random.randrange(64), random.randrange(64)) for name in names]


async def run_program(world: World, program: Sequence[Step]) -> list[str]:
    """Run a whole program in a world; what it found wrong, empty if nothing."""
    before = asyncio.all_tasks()
    try:
        await world.begin()
        for step in program:
            await world.step(step)
            if world.violations:
                break
        await world.end()
    except Exception as error:
        world.failed(error)
    for _ in range(5):
        if asyncio.all_tasks() <= before:
            break
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - before:
        world.violated(f"a task is left: {task!r}")
        task.cancel()
    return world.violations
