"""Random programs of prompts, updates, requests, answers, cancels and closes keep the delivery contract.

Each kind of world runs thousands of them (`driver` says how many), and each law is shown to be able to
fail: with one fault put into the library, the same programs find it.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.core import Protocol
from antiphon.sessions._client_router import ClientRouter
from antiphon.sessions._inbox import Inbox, UpdateQueue
from antiphon.sessions._turn import Turn
from antiphon.sessions._turn_states import TABLE, Event, State
from antiphon.sessions._turn_states import Step as TurnStep
from tests.interleavings.agent_world import AgentWorld
from tests.interleavings.client_world import ClientWorld
from tests.interleavings.driver import Failure, Seed, how_many, run_many, run_one
from tests.interleavings.joined_world import JoinedWorld
from tests.interleavings.world import Step, World, random_program

if TYPE_CHECKING:
    from collections.abc import Callable

WORLDS: dict[str, type[World]] = {
    "client": ClientWorld,
    "agent": AgentWorld,
    "joined": JoinedWorld,
}
#: How the programs are divided among the worlds, in percent.
SHARES = {"client": 40, "agent": 35, "joined": 25}


@pytest.mark.alarms("dup_reply")
@pytest.mark.bound(300)
@pytest.mark.parametrize("kind", WORLDS)
def test_no_random_interleaving_breaks_the_delivery_contract(
    kind: str, seed: Seed, say: Callable[[str], None]
) -> None:
    world, count = WORLDS[kind], how_many() * SHARES[kind] // 100

    steps = run_many(kind, world, world.weights, count, seed)

    say(f"interleavings: {kind}: {count} programs of {steps} steps")
    assert steps >= 5 * len(seed.numbers(count))


#: Programs that found a fault once: its world, and what it was.
FOUND = {
    "a close that timed out, and a second one: the last updates of the turn between were lost": (
        "client",
        5888,
        [
            *(Step("prompt", 11, 36), Step("observe", 45, 37), Step("update", 39, 8)),
            *(Step("update", 24, 55), Step("deliver", 52, 55), Step("close", 9, 52)),
            *(Step("time", 54, 38), Step("time", 24, 60), Step("cancel", 38, 10)),
            *(Step("update", 36, 4), Step("close", 0, 0)),
        ],
    ),
    "two closes, of which the second is refused: what came then for the closed session stayed": (
        "client",
        40870,
        [
            *(Step("close", 33, 26), Step("close", 49, 28), Step("new", 60, 7)),
            *(Step("new", 30, 62), Step("load", 39, 23), Step("turn", 8, 40)),
            *(Step("answer", 62, 30), Step("answer", 26, 51), Step("answer", 33, 18)),
            *(Step("answer", 34, 15), Step("update", 61, 63)),
        ],
    ),
}


@pytest.mark.alarms("dup_reply")
@pytest.mark.parametrize("fault", FOUND)
def test_what_was_found_once_stays_mended(fault: str) -> None:
    kind, variant, program = FOUND[fault]

    assert run_one(WORLDS[kind], program, variant)[0] == []


# ------------------------------------------------------------------ each law can fail


def barrier_off(patch: pytest.MonkeyPatch) -> None:
    async def settled(self: Inbox, mark: int) -> None:
        """Wait for nobody."""

    patch.setattr(Inbox, "settled", settled)


def order_reversed(patch: pytest.MonkeyPatch) -> None:
    put = UpdateQueue.put

    def put_before(self: UpdateQueue, *arguments: Any) -> None:
        put(self, *arguments)
        self.items.insert(0, self.items.pop())

    patch.setattr(UpdateQueue, "put", put_before)


def update_dropped(patch: pytest.MonkeyPatch) -> None:
    put, count = UpdateQueue.put, [0]

    def put_some(self: UpdateQueue, *arguments: Any) -> None:
        count[0] += 1
        if count[0] % 7:
            put(self, *arguments)

    patch.setattr(UpdateQueue, "put", put_some)


def update_twice(patch: pytest.MonkeyPatch) -> None:
    put, count = UpdateQueue.put, [0]

    def put_twice(self: UpdateQueue, *arguments: Any) -> None:
        count[0] += 1
        put(self, *arguments)
        if not count[0] % 7:
            put(self, *arguments)

    patch.setattr(UpdateQueue, "put", put_twice)


def response_twice(patch: pytest.MonkeyPatch) -> None:
    result, count = Protocol.result, [0]

    def result_twice(self: Protocol, id_: bytes, body: bytes) -> bytes | None:
        frame = result(self, id_, body)
        count[0] += 1
        return frame if frame is None or count[0] % 5 else frame + b"\n" + frame

    patch.setattr(Protocol, "result", result_twice)


def response_missing(patch: pytest.MonkeyPatch) -> None:
    result, count = Protocol.result, [0]

    def result_of_some(self: Protocol, id_: bytes, body: bytes) -> bytes | None:
        frame = result(self, id_, body)
        count[0] += 1
        return frame if count[0] % 9 else None

    patch.setattr(Protocol, "result", result_of_some)


def cancel_ignored(patch: pytest.MonkeyPatch) -> None:
    nothing = TurnStep(None, ())
    patch.setitem(TABLE, Event.CANCEL, dict.fromkeys(State, nothing))


def permissions_left_open(patch: pytest.MonkeyPatch) -> None:
    def forget(self: ClientRouter, session_id: str) -> None:
        """Answer none."""

    patch.setattr(ClientRouter, "cancel_questions", forget)


def late_updates_sent(patch: pytest.MonkeyPatch) -> None:
    def text(self: Turn, head: bytes, text: str) -> bool:
        """Look at nothing."""
        self.peer.connection.send(head + json.dumps(text).encode() + b"}}}}")
        return False

    patch.setattr(Turn, "_text", text)


def budget_kept(patch: pytest.MonkeyPatch) -> None:
    def discard(self: UpdateQueue) -> int:
        count = len(self)
        self.items, self.batch = [], []
        return count

    patch.setattr(UpdateQueue, "discard", discard)


def backlog_forgotten(patch: pytest.MonkeyPatch) -> None:
    subscribe = Inbox.subscribe

    def subscribe_anew(self: Inbox, **options: Any) -> Any:
        self.backlog.discard()
        return subscribe(self, **options)

    patch.setattr(Inbox, "subscribe", subscribe_anew)


def label_wrong(patch: pytest.MonkeyPatch) -> None:
    def load_ended(self: Inbox) -> None:
        """Go on as if it had not."""

    patch.setattr(Inbox, "load_ended", load_ended)


def calls_left_open(patch: pytest.MonkeyPatch) -> None:
    def close(self: Protocol) -> list[Any]:
        return []

    patch.setattr(Protocol, "close", close)


FAULTS = [
    ("client", barrier_off),
    ("client", order_reversed),
    ("joined", order_reversed),
    ("client", update_dropped),
    ("joined", update_dropped),
    ("client", update_twice),
    ("client", response_twice),
    ("agent", response_twice),
    ("joined", response_twice),
    ("agent", response_missing),
    ("agent", cancel_ignored),
    ("joined", cancel_ignored),
    ("client", permissions_left_open),
    ("client", budget_kept),
    ("client", backlog_forgotten),
    ("client", label_wrong),
    ("client", calls_left_open),
    ("agent", late_updates_sent),
]


@pytest.mark.alarms("delivery", "dispatch_failed", "dup_reply")
@pytest.mark.bound(60)
@pytest.mark.parametrize(
    ("kind", "control"), FAULTS, ids=[f"{kind}-{fault.__name__}" for kind, fault in FAULTS]
)
def test_a_fault_in_the_library_is_found(
    kind: str,
    control: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    seed: Seed,
) -> None:
    control(monkeypatch)
    world = WORLDS[kind]

    with pytest.raises(Failure, match="ANTIPHON_SEED="):
        run_many(kind, world, world.weights, 1500, Seed(str(seed.base)), tries=0)


# ------------------------------------------------------------------ seeds and shrinking


@pytest.mark.alarms("dup_reply")
@pytest.mark.parametrize("kind", WORLDS)
def test_a_seed_names_a_run_exactly(kind: str, seed: Seed) -> None:
    world = WORLDS[kind]
    program, variant = Seed(f"{seed.base}").program(kind, 7, world.weights)
    again = Seed(f"{seed.base}/7").program(kind, 7, world.weights)

    assert (program, variant) == again
    assert run_one(world, program, variant) == run_one(world, *again)


class Counting(World):
    """Fails where `b` came after `a`."""

    weights = {"a": 1, "b": 1, "c": 5}  # noqa: RUF012  (a table)

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.seen_a = False

    async def begin(self) -> None:
        await asyncio.sleep(1)

    async def do_a(self, a: int, b: int) -> None:
        self.seen_a = True

    async def do_b(self, a: int, b: int) -> None:
        if self.seen_a:
            self.violated("b after a")

    async def do_c(self, a: int, b: int) -> None:
        await self.turns(1)

    async def end(self) -> None:
        """Nothing is open."""


def test_a_program_that_fails_is_shrunk_and_told_with_its_seed() -> None:
    with pytest.raises(Failure) as caught:
        run_many("counting", Counting, Counting.weights, 500, Seed("5"))

    text = str(caught.value)
    assert text.startswith("ANTIPHON_SEED=5/")
    assert "steps to 2, variant" in text
    assert text.index("Step('a'") < text.index("Step('b'")


class Leaving(Counting):
    async def do_a(self, a: int, b: int) -> None:
        self.loop.create_task(asyncio.sleep(1e6))

    async def do_b(self, a: int, b: int) -> None:
        await self.loop.create_future()


@pytest.mark.parametrize(("step", "told"), [("a", "a task is left"), ("b", "this would never end")])
def test_a_task_that_is_left_and_a_wait_without_end_are_findings(step: str, told: str) -> None:
    violations, _ = run_one(Leaving, [Step(step)], 0)

    assert told in violations[0]


@pytest.mark.alarms("dup_reply")
def test_a_step_that_means_nothing_now_does_nothing() -> None:
    for kind, world in WORLDS.items():
        program = random_program(Random(kind), world.weights, 5)
        assert not run_one(world, program, 1)[0]
