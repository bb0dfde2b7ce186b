"""The controls themselves: a check that cannot fail, and a variant that is never met, are found."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from antiphon.transports import memory_pair
from tests.invariants.controls import changed, controlled, on_the_wire


class Sum:
    def of(self, one: int, other: int) -> int:
        return one + other


def product(_original: Any, _self: Sum, one: int, other: int) -> int:
    return one * other


WRONG = changed(Sum, "of", product)


@controlled(product=WRONG)
async def test_a_check_runs_on_the_right_and_fails_on_the_wrong() -> None:
    assert Sum().of(2, 3) == 5


async def run(test: Any, control: str) -> None:
    await test(control=control)


async def test_a_check_that_does_not_notice_the_wrong_variant_is_found() -> None:
    @controlled(product=WRONG)
    async def blind() -> None:
        assert Sum().of(2, 2) == 4

    await run(blind, "right")
    with pytest.raises(AssertionError, match="the wrong variant product passes"):
        await run(blind, "product")


async def test_a_variant_that_is_never_met_is_found() -> None:
    @controlled(product=WRONG)
    async def elsewhere() -> None:
        raise AssertionError

    with pytest.raises(AssertionError, match="product was never met"):
        await run(elsewhere, "product")


@pytest.mark.parametrize("caught", [True, False])
async def test_a_variant_that_breaks_instead_of_being_wrong_is_found(caught: bool) -> None:
    def broken(_original: Any, _self: Sum, _one: int, _other: int) -> int:
        raise AttributeError("a name that has changed")

    @controlled(broken=changed(Sum, "of", broken))
    async def check() -> None:
        with suppress(AttributeError):
            Sum().of(1, 2)
        assert not caught

    with pytest.raises(AssertionError, match="broken is broken itself"):
        await run(check, "broken")


async def test_a_variant_that_breaks_while_it_is_awaited_is_found() -> None:
    async def broken(_original: Any, _self: Sum, _one: int, _other: int) -> int:
        raise TypeError("another signature")

    @controlled(broken=changed(Sum, "of", broken))
    async def check() -> None:
        waits: Any = Sum().of(1, 2)
        with suppress(TypeError):
            await waits
        raise AssertionError

    with pytest.raises(AssertionError, match="broken is broken itself"):
        await run(check, "broken")


async def test_a_check_that_breaks_instead_of_failing_is_no_check() -> None:
    @controlled(product=WRONG)
    async def check() -> None:
        assert Sum().of(2, 3) == 6
        raise KeyError("a name that has changed")

    with pytest.raises(KeyError):
        await run(check, "product")


async def test_what_a_wrong_variant_leaves_running_is_ended() -> None:
    @controlled(product=WRONG)
    async def leaves() -> None:
        started.append(asyncio.create_task(asyncio.Event().wait()))
        await asyncio.sleep(0)
        assert Sum().of(2, 3) == 5

    started: list[asyncio.Task[Any]] = []
    await run(leaves, "product")

    assert started[0].cancelled()


def test_the_original_is_back_afterwards() -> None:
    original = Sum.of
    with WRONG() as used:
        assert Sum().of(2, 3) == 6
        assert used
    assert Sum.of is original


async def test_frames_are_changed_on_their_way_and_others_pass() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.frames: list[Any] = []

        def frames_received(self, frames: list[Any]) -> None:
            self.frames += frames

        def input_ended(self) -> None: ...

        def connection_lost(self, error: Exception | None) -> None: ...

        def pause_writing(self) -> None: ...

        def resume_writing(self) -> None: ...

    one, other = memory_pair()
    kept = Keeps()
    await one.start(Keeps())
    await other.start(kept)
    with on_the_wire(lambda frames: [f for f in frames if f.get("id") != 2])() as used:
        one.send([b'{"id": 1}'])
        one.send([b"no json"])
        one.send([b"[2]"])
        assert not used
        one.send([b'{"id": 2}', b'{"id": 3}'])
        assert used
        await asyncio.sleep(0)
    await one.aclose()
    await other.aclose()

    assert kept.frames == [b'{"id": 1}', b"no json", b"[2]", b'{"id": 3}']
