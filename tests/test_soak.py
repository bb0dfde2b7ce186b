"""A soak of a few seconds: what `make soak` does for a million updates, and that it can find something."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from bench import soak as program
from bench.soak import MIB, Options, Soak, as_json, growth, soak

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = Options(sessions=24, updates=6000, agents=2, seed=5, deaths_every=12)


@pytest.fixture(autouse=True)
def _deaths_are_expected() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """An agent that is killed ends in the middle of a frame; the log need not say so each time."""
    logger = logging.getLogger("antiphon")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.bound(60)
async def test_a_small_soak_loses_nothing_and_leaves_nothing() -> None:
    run, wrong = await soak(SMALL)

    counts = run.counts
    assert wrong == []
    assert counts.updates >= 3000
    assert counts.sessions >= 24
    assert counts.kills + counts.closed > 0
    assert counts.cancelled + counts.left > 0
    assert counts.observed > 0
    assert counts.subscribed > 0


@pytest.mark.bound(60)
async def test_an_update_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check, count = Soak.check, [0]

    def forgetful(self: Soak, update: Any, expected: int) -> None:
        count[0] += 1
        check(self, update, expected + (count[0] == 50))

    monkeypatch.setattr(Soak, "check", forgetful)

    _, wrong = await soak(Options(sessions=4, updates=400, agents=1, seed=5))

    assert len(wrong) == 1
    assert wrong[0].startswith("update ")


@pytest.mark.bound(60)
async def test_memory_that_grows_and_a_task_that_is_left_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[asyncio.Task[Any]] = []
    memory = Soak.memory

    def hoarding(self: Soak) -> int:
        if not left:
            left.append(asyncio.ensure_future(asyncio.sleep(60)))
        return memory(self) + self.counts.updates * 8192

    monkeypatch.setattr(Soak, "memory", hoarding)
    monkeypatch.setattr(program, "GROWTH", 4 * MIB)

    _, wrong = await soak(Options(sessions=4, updates=2000, agents=1, seed=5, deaths_every=10**6))

    left[0].cancel()
    assert any(sentence.startswith("memory grew by") for sentence in wrong)
    assert any(sentence.startswith("a task is left") for sentence in wrong)


def test_growth_is_measured_from_the_first_tenth_to_the_last_half() -> None:
    flat = [(n, 100) for n in range(100)]
    rising = [(n, 100 + n) for n in range(100)]

    assert growth(flat) == 0
    assert growth(rising) == 199 - 109
    assert growth([]) == 0


async def test_memory_is_told_ten_times_for_the_page_of_figures() -> None:
    run = Soak(SMALL)
    run.counts.memory = [(n, n * MIB) for n in range(1, 101)]

    told = as_json(run, 1.5)

    assert told["memory"] == [[n, float(n)] for n in range(10, 101, 10)]
    assert told["growth"] == 90.0
    assert told["bound"] == 20.0
    assert "0 updates in 2 s" in told["note"]
