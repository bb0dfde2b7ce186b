from __future__ import annotations

import pytest

from antiphon import Reattach, connect
from antiphon.transports import memory_pair


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 0.0), (2, 0.5), (3, 1.5), (4, 4.5), (5, 8.0), (5000, 8.0)]
)
def test_pauses_grow_up_to_a_bound(attempt: int, seconds: float) -> None:
    assert Reattach(delay=0.5, backoff=3, max_delay=8).pause(attempt) == seconds


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"delay": -1.0}, {"backoff": 0.5}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Reattach needs"):
        Reattach(**wrong)  # type: ignore[arg-type]


async def test_a_transport_cannot_be_made_again() -> None:
    ours, _ = memory_pair()

    with pytest.raises(ValueError, match="an address or a function"):
        connect(ours, reattach=True)
