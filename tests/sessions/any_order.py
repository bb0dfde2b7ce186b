"""One client and one scripted agent, and anything that may happen, in an order that a seed chooses.

The link is cut anywhere, subscriptions lag and are closed, frames are lost, other clients prompt, the
user attaches again by hand. The model is the journal: what subscribers, observers and turns were given
must be what it says, each record once and in order.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

from antiphon import ConnectionClosed, Reattach, RequestError, TurnInProgress, connect
from tests.sessions.journaled import JournaledAgent, settle

if TYPE_CHECKING:
    from antiphon import Session, Update

__all__ = ["AnyOrder"]

#: What may happen, as often as it is listed.
ACTS = (
    *("say",) * 6,
    *("prompt", "finish", "cut", "settle") * 2,
    *("other", "lag", "close", "lose", "reattach", "late", "flush", "cancel"),
)


def text_of(update: Update) -> str:
    return str(json.loads(update.raw)["content"]["text"])


class AnyOrder:
    """One run."""

    def __init__(self, seed: int, steps: int = 40) -> None:
        self.seed = seed
        self.steps = steps
        self.rng = random.Random(seed)
        self.agent = JournaledAgent(raxol=self.rng.random() < 0.5, prompts=self.rng.random() < 0.9)
        self.said = 0
        self.trace: list[str] = []
        self.turns: dict[str, asyncio.Task[tuple[list[str], str | Exception]]] = {}
        self.again: set[asyncio.Task[None]] = set()
        self.seen: list[str] = []
        self.observed: list[str] = []

    async def run(self) -> None:
        """Let it happen, and compare."""
        options = Reattach(delay=0, attempts=50)
        async with connect(self.agent.dial, reattach=options) as peer:
            session = await peer.new_session()
            updates = session.updates()
            watcher = asyncio.create_task(self._watch(session))
            session.on_update(lambda update: self.observed.append(text_of(update)))
            await settle(1)
            for _ in range(self.steps):
                act = self.rng.choice(ACTS)
                self.trace.append(act)
                await self._act(act, session)
                if self.rng.random() < 0.5:
                    await settle(self.rng.randrange(3))
            await self._end(session)
            updates.close()
            watcher.cancel()
            await asyncio.wait([watcher, *self.again])
        await self._compare()

    async def _watch(self, session: Session) -> None:
        async for update in session.updates():
            self.seen.append(text_of(update))

    async def _turn(self, session: Session, text: str) -> tuple[list[str], str | Exception]:
        given: list[str] = []
        try:
            async with session.prompt(text) as turn:
                async for update in turn:
                    given.append(text_of(update))
                    assert update.label == "turn", self.trace
                    if self.rng.random() < 0.3:
                        await asyncio.sleep(0)
            return given, str(turn.stop_reason)
        except (RequestError, ConnectionClosed, TurnInProgress) as error:
            return given, error

    async def _attach(self, session: Session) -> None:
        try:
            await session.reattach()
        except (RequestError, ConnectionClosed):
            return

    async def _act(self, act: str, session: Session) -> None:
        agent, rng = self.agent, self.rng
        link = agent.link
        is_open = "s1" in agent.open_turns
        match act:
            case "say" if is_open:
                self.said += 1
                agent.say("s1", f"u{self.said}")
            case "finish" if is_open:
                agent.finish("s1")
            case "other" if (
                not is_open and not agent.raxol
            ):  # whose records do not say whose they are
                self.said += 1
                agent.other_begins("s1", f"u{self.said}")
            case "prompt" if all(task.done() for task in self.turns.values()):
                text = f"p{len(self.turns)}"
                self.turns[text] = asyncio.create_task(self._turn(session, text))
                await settle(rng.randrange(4))
            case "cancel":
                await session.cancel(backstop=None)
            case "cut":
                if rng.random() < 0.3:
                    agent.refuse_links = rng.randrange(3)
                link.cut(rng.choice([0, 1, 2, 3, None]))
                await settle(rng.randrange(6))
            case "lag":
                agent.lag("s1")
            case "close":
                agent.close("s1", "writer_down")
            case "lose":
                numbered = [n for n, frame in enumerate(link.waiting) if _numbered(frame)]
                if numbered:
                    del link.waiting[rng.choice(numbered)]
            case "settle":
                await settle(rng.randrange(10))
            case "reattach":
                self.again.add(asyncio.create_task(self._attach(session)))
                await settle(rng.randrange(3))
            case "late" if agent.raxol and agent.late is None:
                agent.late = []
            case "flush" if agent.late is not None:
                agent.flush(rng.choice([None, 1, 2]))
            case _:
                pass

    async def _end(self, session: Session) -> None:
        """Let all come to its end."""
        agent = self.agent
        agent.flush()
        agent.refuse_links = 0
        for _ in range(200):
            await settle(50)
            if "s1" in agent.open_turns:
                agent.finish("s1")
            complete = session.offset == len(agent.journals["s1"])
            if complete and all(task.done() for task in self.turns.values()):
                break
            # What is missing at the end shows by what follows.
            agent.append("s1", "weather", {})
            await asyncio.sleep(1)
        await settle(50)
        assert all(task.done() for task in self.turns.values()), (self.seed, self.trace)
        assert session.offset == len(agent.journals["s1"]), (self.seed, self.trace)

    async def _compare(self) -> None:
        journal = self.agent.journals["s1"]
        flat = [p["content"]["text"] if kind == "session_update" else kind for kind, p in journal]
        shown = [
            text
            for text, (kind, _) in zip(flat, journal, strict=True)
            if kind == "session_update" and text not in self.turns
        ]
        assert self.seen == shown, (self.seed, self.trace)
        assert self.observed == shown, (self.seed, self.trace)
        for text, task in self.turns.items():
            given, end = await task
            if text in flat:
                begin = flat.index(text)
                expected = flat[begin + 1 : flat.index("turn_completed", begin)]
                assert (given, end) == (expected, "end_turn"), (self.seed, text, self.trace)
            elif self.agent.prompts:
                assert given == [], (self.seed, text, self.trace)
                assert not isinstance(end, str), (self.seed, text, end, self.trace)


def _numbered(frame: bytes) -> bool:
    """Whether a frame is a record."""
    return b'"offset"' in frame and b'"taint"' in frame
