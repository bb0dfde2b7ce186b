"""Random interleavings over real pipes: hundreds of prompts in the sessions of one child process.

The child says with each answer what it sent, so that what the consumers got can be held against it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Client, ConnectionClosed, spawn
from antiphon.sessions._methods import or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon import AgentPeer, PromptTurn, Session, Update
    from tests.interleavings.driver import Seed

HERE = Path(__file__).parent
CHILDREN = ["stdio_agent.py", "stdio_antiphon_agent.py"]
SESSIONS = 8
PROMPTS = 40


def number_of(update: Update) -> int:
    raw = json.loads(update.raw)
    return int(raw["content"]["text"])


class User:
    """One session's user: prompts one after the other, each consumed in another way."""

    def __init__(self, agent: AgentPeer, session: Session, random: Random) -> None:
        self.agent = agent
        self.session = session
        self.random = random
        self.numbers = 0
        self.observed: list[int] = []
        self.subscribed: list[int] = []
        self.sent: list[int] = []
        self.deaths = 0
        if random.random() < 0.5:
            session.on_update(self.observe)
        else:
            session.on_update(self.observe_slowly)
        self.subscription = session.updates()
        self.following = asyncio.ensure_future(self.follow())

    def observe(self, update: Update) -> None:
        self.observed.append(number_of(update))

    async def observe_slowly(self, update: Update) -> None:
        await asyncio.sleep(0)
        self.observed.append(number_of(update))

    async def follow(self) -> None:
        async for update in self.subscription:
            self.subscribed.append(number_of(update))

    def script(self) -> str:
        steps: list[tuple[str, int]] = []
        for _ in range(self.random.randrange(12)):
            self.numbers += 1
            name = self.random.choice(("tell", "tell", "tell", "odd", "noise", "ask"))
            steps.append((name, self.numbers))
        return json.dumps(steps)

    async def run(self, prompts: int) -> None:
        ways = (self.iterate, self.gather, self.leave, self.cancel, self.call)
        for _ in range(prompts):
            await self.random.choice(ways)(self.session.prompt(self.script()))

    def ended(self, response: Any, got: list[int] | None, *, cancelled: bool = False) -> None:
        """The contract at the moment when an answer is seen."""
        assert response is not None
        # One that was cancelled before its handler began has told nothing.
        meta: dict[str, Any] = or_none(response.meta) or {"sent": [], "answers": {}}
        sent: list[int] = meta["sent"]
        self.sent += sent
        if got is not None:
            assert got == sent
        assert self.observed == self.sent, "an answer was seen before an observer had returned"
        for said in meta["answers"].values():
            assert len(said) == 1, "a question has two answers"
            assert said[0] in (
                {"allow", "reject", "cancelled"} if cancelled else {"allow", "reject"}
            )

    async def iterate(self, prompt: PromptTurn) -> None:
        async with prompt as turn:
            got = [number_of(update) async for update in turn]
        self.ended(turn.response, got)

    async def gather(self, prompt: PromptTurn) -> None:
        outcome = await prompt
        self.ended(outcome.response, [number_of(update) for update in outcome.updates])

    async def leave(self, prompt: PromptTurn) -> None:
        count = self.random.randrange(1, 4)
        async with prompt as turn:
            async for _ in turn:
                count -= 1
                if not count:
                    break
        if turn.response is not None or not self.agent.connection.closed:
            self.ended(turn.response, None, cancelled=True)

    async def cancel(self, prompt: PromptTurn) -> None:
        got: list[int] = []
        count = self.random.randrange(1, 4)
        async with prompt as turn:
            async for update in turn:
                got.append(number_of(update))
                count -= 1
                if not count:
                    await turn.cancel()
        self.ended(turn.response, got, cancelled=True)

    async def call(self, prompt: PromptTurn) -> None:
        got: list[int] = []
        async with prompt as turn:
            async for update in turn:
                got.append(number_of(update))
                if len(got) < 3:
                    await self.agent.request_extension("_x/anything")
        self.ended(turn.response, got)


async def decide(params: Any, ctx: Any) -> bool:
    number = int(params.tool_call.title)
    if number % 3:
        await asyncio.sleep(0)
    return bool(number % 2)


class Asking(Client):
    def __init__(self) -> None:
        super().__init__(permissions=decide)


@pytest.mark.bound(60)
@pytest.mark.parametrize("child", CHILDREN)
async def test_every_consumer_gets_what_a_process_sent(
    child: str, seed: Seed, say: Callable[[str], None]
) -> None:
    random = Random(f"{seed.base}/{child}")
    command = [sys.executable, str(HERE / child), str(seed.base)]
    async with spawn(command, client=Asking()) as agent:
        sessions = [await agent.new_session() for _ in range(SESSIONS)]
        users = [User(agent, session, Random(random.random())) for session in sessions]
        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(user.run(PROMPTS))
        protocol = agent.connection.protocol
        assert not protocol.calls
        assert not protocol.requests
    for user in users:
        await user.following
        assert user.subscribed == user.sent == user.observed
    say(f"interleavings: stdio: {SESSIONS * PROMPTS} prompts of {child}")


@pytest.mark.bound(60)
@pytest.mark.parametrize("child", CHILDREN)
async def test_a_process_that_is_killed_fails_everything_at_once(child: str, seed: Seed) -> None:
    random = Random(f"{seed.base}/{child}/killed")
    for _ in range(4):
        command = [sys.executable, str(HERE / child), str(random.randrange(1 << 30))]
        async with spawn(command, client=Asking()) as agent:
            sessions = [await agent.new_session() for _ in range(SESSIONS)]
            users = [User(agent, session, Random(random.random())) for session in sessions]
            running = [asyncio.create_task(user.run(1000)) for user in users]
            prompts = random.randrange(60)
            while sum(len(user.sent) for user in users) < prompts:
                await asyncio.sleep(0.001)
            os.kill(agent.process.pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
            for task in running:
                error = task.exception()
                assert isinstance(error, ConnectionClosed)
                assert error.exit_status == -9
        for user in users:
            await user.following
            # What was read before the end was shown; nothing twice, nothing out of order.
            assert user.subscribed == user.observed
            assert user.observed[: len(user.sent)] == user.sent
            assert user.observed == sorted(set(user.observed))
