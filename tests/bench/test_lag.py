"""The ticker of `bench.lag`: what it notes, and what it fails on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from bench import lag

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def holding_up(seconds: float, bound: float) -> Callable[[lag.Options], Awaitable[object]]:
    async def case(_: lag.Options) -> tuple[lag.Ticker, float]:
        async with lag.ticking() as ticker:
            time.sleep(seconds)
        return ticker, bound

    return case


@pytest.mark.parametrize(("bound", "status"), [(0.04, 1), (60.0, 0)])
def test_a_loop_that_is_held_up_for_longer_than_the_bound_fails(
    monkeypatch: pytest.MonkeyPatch, bound: float, status: int
) -> None:
    monkeypatch.setattr(lag, "CASES", {"held up": holding_up(0.1, bound)})

    assert lag.main([]) == status


def test_a_scale_makes_everything_smaller_but_nothing_too_small_to_measure() -> None:
    small = lag.Options().scaled(0.0001)

    assert small.frame >= lag.MIB
    assert min(small.updates, small.records) >= 1000
