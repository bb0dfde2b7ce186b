"""`make soak`: a client and its agents at work for long, with everything that may go wrong going wrong.

Many sessions in a few agent processes: prompts that are iterated, gathered, left and cancelled, observers
and subscribers beside them, permission requests, agents that are killed, links that are closed. Every
update is counted and its order checked. At the end memory must be where it was after the first tenth,
and no task, process or descriptor may be left. Prints a summary; exits with 1 where a bound was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import platform
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psutil

from antiphon import Agent, AgentPeer, Client, ConnectionClosed, Turn, serve_stdio, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon import PromptTurn, Session, Update

__all__ = ["Options", "Soak", "as_json", "main"]

MIB = 1 << 20
#: Sessions that are at work at the same time, on all connections.
AT_WORK = 48
#: What the process may grow by after the first tenth of the updates.
GROWTH = 20 * MIB


@dataclass(frozen=True)
class Options:
    sessions: int = 1000
    updates: int = 1_000_000
    agents: int = 4
    seed: int = 0
    #: An agent is killed, or a link closed, after so many prompts on the average.
    deaths_every: int = 120


@dataclass
class Counts:
    updates: int = 0
    observed: int = 0
    subscribed: int = 0
    prompts: int = 0
    cancelled: int = 0
    left: int = 0
    permissions: int = 0
    kills: int = 0
    closed: int = 0
    cut_short: int = 0  # turns that a death ended
    sessions: int = 0
    faults: list[str] = field(default_factory=list[str])
    memory: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (updates, RSS)


class Worker(Agent):
    """Says so many things, and asks so often, as each prompt tells."""

    async def prompt(self, turn: Turn) -> None:
        plan = json.loads(turn.text)
        asks = set(plan["asks"])
        for number in range(plan["first"], plan["first"] + plan["updates"]):
            if turn.cancelled:
                return
            await turn.say(f"{number} {plan['fill']}")
            if number in asks and not await turn.ask_permission(str(number)):
                return
            if number % 16 == 0:
                await asyncio.sleep(0)


class Place:
    """One agent process and the sessions in it."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        self.agent: AgentPeer | None = None
        self.lock = asyncio.Lock()

    async def opened(self) -> AgentPeer:
        """The agent, started anew where it has died."""
        async with self.lock:
            agent = self.agent
            if agent is None or agent.connection.closed:
                if agent is not None:
                    await agent.aclose()
                command = [sys.executable, str(Path(__file__)), "--agent"]
                self.agent = agent = await spawn(command, client=self.soak.client)
            return agent

    async def die(self, random: Random) -> None:
        agent = self.agent
        if agent is None or agent.connection.closed:
            return
        if random.random() < 0.5:
            self.soak.counts.kills += 1
            os.kill(agent.process.pid, signal.SIGKILL)
        else:
            self.soak.counts.closed += 1
            await agent.aclose()


class Soak:
    """The run: sessions that take their turns until enough updates have come."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.random = Random(options.seed)
        self.counts = Counts()
        self.client = Client(permissions=self.decide)
        self.places = [Place(self) for _ in range(options.agents)]
        self.process = psutil.Process()

    async def decide(self, params: Any, ctx: Any) -> bool:
        self.counts.permissions += 1
        if self.random.random() < 0.3:
            await asyncio.sleep(0)
        return self.random.random() < 0.9

    # -------------------------------------------------------------- one session

    async def session(self, number: int, share: int) -> None:
        """Prompt until the share of updates has come, in a new session wherever one was lost."""
        random = Random(f"{self.options.seed}/{number}")
        place = self.places[number % len(self.places)]
        came = 0
        while came < share:
            try:
                agent = await place.opened()
                session = await agent.new_session(cwd="/")
                self.counts.sessions += 1
                came += await self.life(session, random, share - came)
                if agent.connection.closed:
                    continue
                agent.forget(session.session_id)
            except ConnectionClosed:
                self.counts.cut_short += 1

    async def life(self, session: Session, random: Random, share: int) -> int:
        came = first = 0
        subscription = session.updates() if random.random() < 0.2 else None
        following = (
            None if subscription is None else asyncio.ensure_future(self.follow(subscription))
        )
        if random.random() < 0.3:
            session.on_update(self.observe)
        try:
            while came < share:
                updates = min(random.choice((1, 20, 100, 400)), share - came)
                asks = [first + random.randrange(updates)] if random.random() < 0.15 else []
                fill = "x" * random.choice((0, 20, 300))
                plan = {"first": first, "updates": updates, "asks": asks, "fill": fill}
                self.counts.prompts += 1
                turn = session.prompt(json.dumps(plan))
                count = 0
                try:
                    count = await self.consume(turn, random, first, None if asks else updates)
                finally:
                    came += max(count, 1)
                first += updates
                if random.randrange(self.options.deaths_every) == 0:
                    await random.choice(self.places).die(random)
        finally:
            if subscription is not None and following is not None:
                subscription.close()
                following.cancel()
        return came

    async def consume(
        self, prompt: PromptTurn, random: Random, first: int, whole: int | None
    ) -> int:
        """One prompt in one of four ways; how many updates came of it, of `whole` if that is known."""
        way = random.random()
        if way < 0.2:
            outcome = await prompt
            for offset, update in enumerate(outcome.updates):
                self.check(update, first + offset)
            self.check_end(len(outcome.updates), whole)
            return len(outcome.updates)
        stop = random.randrange(1, 30) if way < 0.35 else -1
        leave = way < 0.27
        count = 0
        async with prompt as turn:
            async for update in turn:
                self.check(update, first + count)
                count += 1
                if count == stop:
                    if leave:
                        self.counts.left += 1
                        break
                    self.counts.cancelled += 1
                    await turn.cancel()
        if not 0 < stop <= count:
            self.check_end(count, whole)
        return count

    def check_end(self, count: int, whole: int | None) -> None:
        """A turn that nobody has stopped is to have all of its updates."""
        if whole is not None and count != whole and len(self.counts.faults) < 20:
            self.counts.faults.append(f"{count} updates came of {whole}")

    def check(self, update: Update, expected: int) -> None:
        counts = self.counts
        counts.updates += 1
        number = int(update.text.partition(" ")[0])
        if number != expected and len(counts.faults) < 20:
            counts.faults.append(f"update {number} came where {expected} was to come")
        if counts.updates % max(1, self.options.updates // 100) == 0:
            counts.memory.append((counts.updates, self.memory()))

    def memory(self) -> int:
        """Resident bytes of this process."""
        return int(self.process.memory_info().rss)

    def observe(self, update: Update) -> None:
        self.counts.observed += 1

    async def follow(self, subscription: Any) -> None:
        async for _ in subscription:
            self.counts.subscribed += 1

    # -------------------------------------------------------------- the whole

    async def run(self) -> None:
        numbers = iter(range(self.options.sessions))
        share = -(-self.options.updates // self.options.sessions)

        async def at_work() -> None:
            for number in numbers:
                await self.session(number, share)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_WORK, self.options.sessions)):
                    group.create_task(at_work())
        finally:
            for place in self.places:
                if place.agent is not None:
                    await place.agent.aclose()

    def growth(self) -> int:
        """How far memory went past where it was after the first tenth, in bytes."""
        return growth(self.counts.memory)


def growth(memory: Sequence[tuple[int, int]]) -> int:
    """The largest of the last half, less the largest of the first tenth."""
    tenth = max(1, len(memory) // 10)
    early = max((rss for _, rss in memory[:tenth]), default=0)
    late = max((rss for _, rss in memory[len(memory) // 2 :]), default=0)
    return late - early


def as_json(run: Soak, seconds: float) -> dict[str, Any]:
    """How memory went, at a tenth of the samples, for bench/report.py."""
    memory, counts = run.counts.memory, run.counts
    step = max(1, len(memory) // 10)
    return {
        "note": (
            f"{counts.updates:,} updates in {seconds:.0f} s: {counts.sessions:,} sessions, "
            f"{counts.prompts:,} prompts, {counts.cancelled:,} cancelled, {counts.left:,} left, "
            f"{counts.kills} agents killed, {counts.closed} links closed; Python "
            f"{platform.python_version()}"
        ),
        "memory": [[updates, rss / MIB] for updates, rss in memory[step - 1 :: step]],
        "growth": run.growth() / MIB,
        "bound": GROWTH / MIB,
    }


async def soak(options: Options) -> tuple[Soak, list[str]]:
    """Run it; what is wrong afterwards, one sentence each."""
    before = asyncio.all_tasks()
    descriptors = _descriptors()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    run = Soak(options)
    await run.run()
    for _ in range(20):
        if asyncio.all_tasks() <= before:
            break
        await asyncio.sleep(0)
    gc.collect()
    wrong = list(run.counts.faults)
    wrong += [f"a task is left: {task!r}" for task in asyncio.all_tasks() - before]
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in children]
    wrong += [f"a process is left: {child!r}" for child in left if not _is_guard(child)]
    # What the first child needs for good (its guard, the loop's own) stays.
    if _descriptors() > descriptors + 4:
        wrong.append(f"{_descriptors() - descriptors} descriptors are left")
    if run.growth() > GROWTH:
        wrong.append(f"memory grew by {run.growth() / MIB:.1f} MiB after the first tenth")
    if run.counts.updates < options.updates * 0.5:
        wrong.append(f"only {run.counts.updates} updates came")
    return run, wrong


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def _is_guard(child: psutil.Process) -> bool:
    """The one process that lives as long as we do, to end the others when we are killed."""
    try:
        return child.name() == "sh"
    except psutil.NoSuchProcess:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak ARGS=…", description=__doc__)
    parser.add_argument("--sessions", type=int, default=Options.sessions)
    parser.add_argument("--updates", type=int, default=Options.updates)
    parser.add_argument("--agents", type=int, default=Options.agents)
    parser.add_argument("--deaths-every", type=int, default=Options.deaths_every)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write there how memory went")
    given = parser.parse_args(arguments)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    options = Options(given.sessions, given.updates, given.agents, seed, given.deaths_every)
    print(f"seed {seed}", flush=True)
    # An agent that is killed ends in the middle of a frame, and each of those is told.
    logging.getLogger("antiphon").setLevel(logging.ERROR)
    begin = time.monotonic()
    run, wrong = asyncio.run(soak(options))
    seconds, counts = time.monotonic() - begin, run.counts
    first, last = counts.memory[0][1] / MIB, counts.memory[-1][1] / MIB
    print(
        f"{counts.updates:,} updates to iterators ({counts.observed:,} to observers, "
        f"{counts.subscribed:,} to subscribers) in {seconds:.1f} s\n"
        f"{counts.sessions:,} sessions, {counts.prompts:,} prompts, {counts.permissions:,} questions, "
        f"{counts.cancelled:,} cancelled, {counts.left:,} left\n"
        f"{counts.kills} agents killed, {counts.closed} links closed, {counts.cut_short} cut short\n"
        f"memory {first:.1f} MiB at first, {last:.1f} MiB at last, "
        f"growth after the first tenth {run.growth() / MIB:.1f} MiB (bound {GROWTH / MIB:.0f})"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(run, seconds)) + "\n", encoding="utf-8")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    if not wrong:
        print("nothing was left, nothing was lost")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--agent"]:
        serve_stdio(Worker())
    else:
        sys.exit(main())
