"""Credit measures how far behind a tail is; who has none left is told once and forgotten."""

from __future__ import annotations

import pytest

from antiphon.journal import MemoryJournal, Record, Writer
from antiphon.journal._tails import Audience
from tests.journal.ears import Ears, say


async def writer(credit: int) -> Writer:
    return Writer(await MemoryJournal().open("s"), credit=credit)


@pytest.mark.covers("P-BUS6")
async def test_a_tail_without_credit_is_told_once_and_never_again() -> None:
    made = await writer(2)
    slow, quick = Ears(), Ears()
    await made.subscribe(slow)
    await made.subscribe(quick)

    for number in range(5):
        await made.append(say(str(number)))
        made.credit(quick)
        made.credit(slow, 0)

    assert slow.heard == [2, 3, "lagged"]
    assert quick.heard == [2, 3, 4, 5, 6]
    await made.aclose()
    assert slow.heard == [2, 3, "lagged"]


async def test_what_is_in_one_append_costs_as_much_as_in_many() -> None:
    made = await writer(3)
    tail = Ears()
    await made.subscribe(tail)

    for number in range(5):
        made.submit(say(str(number)))
    await made.append(say("last"))

    assert tail.heard == [2, 3, 4, "lagged"]
    await made.aclose()


async def test_credit_that_is_given_back_is_used_again_and_never_more_than_there_was() -> None:
    made = await writer(2)
    tail = Ears()
    await made.subscribe(tail)

    for number in range(50):
        await made.append(say(str(number)))
        made.credit(tail)
    made.credit(tail, 1000)
    for _ in range(3):
        await made.append(say("no credit comes back"))

    assert tail.heard == [*range(2, 54), "lagged"]
    await made.aclose()


async def test_a_tail_that_gives_credit_back_while_it_is_told_never_lags() -> None:
    made = await writer(1)

    class Forwarding(Ears):
        def received(self, record: Record) -> None:
            super().received(record)
            made.credit(self)

    tail = Forwarding()
    await made.subscribe(tail)
    for number in range(20):
        made.submit(say(str(number)))
    await made.append(say("last"))

    assert tail.heard == list(range(2, 23))
    await made.aclose()


async def test_a_tail_that_lagged_can_subscribe_anew_with_new_credit() -> None:
    made = await writer(1)
    tail = Ears()
    await made.subscribe(tail)
    await made.append(say("a"))
    await made.append(say("b"))
    await made.subscribe(tail)
    await made.append(say("c"))

    assert tail.heard == [2, "lagged", 4]
    await made.aclose()


async def test_subscribing_again_gives_no_new_credit() -> None:
    made = await writer(1)
    tail = Ears()
    await made.subscribe(tail)
    await made.append(say("a"))
    await made.subscribe(tail)
    await made.append(say("b"))

    assert tail.heard == [2, "lagged"]
    await made.aclose()


async def test_credit_for_an_unknown_tail_is_ignored() -> None:
    made = await writer(1)
    tail = Ears()

    made.credit(tail, 5)
    made.exempt(tail, True)
    made.unsubscribe(tail)
    await made.subscribe(tail)
    await made.append(say("a"))
    await made.append(say("b"))

    assert tail.heard == [2, "lagged"]
    await made.aclose()


async def test_an_exempt_tail_keeps_its_credit() -> None:
    made = await writer(1)
    tail = Ears()
    await made.subscribe(tail)
    made.exempt(tail, True)
    for _ in range(10):
        await made.append(say("exempt"))
    made.exempt(tail, False)
    await made.append(say("paid"))
    await made.append(say("not paid"))

    assert tail.heard == [*range(2, 13), "lagged"]
    await made.aclose()


async def test_a_tail_may_be_exempt_before_it_is_let_in_and_until_it_is_unsubscribed() -> None:
    made = await writer(1)
    tail = Ears()
    made.exempt(tail, True)
    await made.subscribe(tail)
    for _ in range(3):
        await made.append(say("exempt"))
    made.unsubscribe(tail)
    await made.subscribe(tail)
    await made.append(say("paid"))
    await made.append(say("not paid"))

    assert tail.heard == [2, 3, 4, 5, "lagged"]
    await made.aclose()


class Broken(Ears):
    def received(self, record: Record) -> None:
        super().received(record)
        raise ValueError("broken")

    def ended(self, reason: str) -> None:
        super().ended(reason)
        raise ValueError("broken at its end, too")


async def test_a_tail_that_raises_is_ended_and_nobody_else_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = await writer(10)
    broken, whole = Broken(), Ears()
    await made.subscribe(broken)
    await made.subscribe(whole)

    await made.append(say("a"))
    await made.append(say("b"))

    assert broken.heard == [2, "writer_down"]
    assert whole.heard == [2, 3]
    assert made.failed is None
    assert "a tail of session 's' failed" in caplog.text
    await made.aclose()


async def test_a_tail_that_goes_while_others_are_told_is_told_no_more() -> None:
    made = await writer(10)
    second = Ears()

    class Ending(Ears):
        def received(self, record: Record) -> None:
            super().received(record)
            made.unsubscribe(second)
            made.unsubscribe(self)

    first = Ending()
    await made.subscribe(first)
    await made.subscribe(second)
    made.submit(say("a"))
    await made.append(say("b"))

    assert (first.heard, second.heard) == ([2], [])
    assert not made.publishes_to(first)
    await made.aclose()


@pytest.mark.parametrize("credit", [0, -1])
def test_credit_is_at_least_1(credit: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Audience(credit)
