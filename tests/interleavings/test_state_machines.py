"""The same worlds, steered by hypothesis: it looks for a short program that breaks the contract.

The examples are new in each run, also in CI; `ANTIPHON_SEED` repeats them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from antiphon.sessions._inbox import UpdateQueue
from antiphon.testing import VirtualTimeLoop
from tests.interleavings.agent_world import AgentWorld
from tests.interleavings.client_world import ClientWorld
from tests.interleavings.joined_world import JoinedWorld
from tests.interleavings.world import Step, World

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.interleavings.driver import Seed

WORLDS: list[type[World]] = [ClientWorld, AgentWorld, JoinedWorld]
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=False,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

#: Shrinking would take the time; `driver` has a shrinking of its own, which is tested.
UNSHRUNK = settings(SETTINGS, phases=[Phase.generate], print_blob=False)


def machine_of(world_type: type[World]) -> type[RuleBasedStateMachine]:
    names = [name for name, weight in world_type.weights.items() for _ in range(weight)]

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = VirtualTimeLoop(bound=1e9)
            self.world: World | None = None

        def run(self, work: Coroutine[Any, Any, None]) -> None:
            self.loop.run_until_complete(work)
            assert self.world is not None
            assert not self.world.violations, "\n".join(self.world.history)

        @initialize(variant=st.integers(0, 11))
        def begin(self, variant: int) -> None:
            async def make() -> None:
                self.world = world_type(variant)
                await self.world.begin()

            self.run(make())

        @rule(name=st.sampled_from(names), a=st.integers(0, 63), b=st.integers(0, 63))
        def step(self, name: str, a: int, b: int) -> None:
            assert self.world is not None
            self.run(self.world.step(Step(name, a, b)))

        def teardown(self) -> None:
            try:
                if self.world is not None:
                    self.run(self.world.end())
                    self.loop.run_until_complete(asyncio.sleep(0))
                    assert not asyncio.all_tasks(self.loop)
            finally:
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.run_until_complete(asyncio.sleep(0))
                self.loop.close()

    Machine.__name__ = Machine.__qualname__ = world_type.__name__
    return Machine


@pytest.mark.alarms("dup_reply")
@pytest.mark.bound(120)
@pytest.mark.parametrize("world_type", WORLDS)
def test_no_machine_finds_a_program_that_breaks_the_contract(
    world_type: type[World], seed: Seed
) -> None:
    machine = seeded(seed.base)(machine_of(world_type))

    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.alarms("delivery", "dispatch_failed", "dup_reply")
@pytest.mark.alarms("delivery")
@pytest.mark.bound(120)
def test_a_machine_finds_a_fault_in_the_library(
    seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = UpdateQueue.put

    def put_some(self: UpdateQueue, *arguments: Any) -> None:
        if sum(arguments[0].frame) % 3:  # the same ones in each try
            put(self, *arguments)

    monkeypatch.setattr(UpdateQueue, "put", put_some)
    machine = seeded(seed.base)(machine_of(ClientWorld))

    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=UNSHRUNK)
