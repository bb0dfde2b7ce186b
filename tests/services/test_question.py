"""One question by itself: how it is put, what ends it, and what an answer means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from antiphon.schema import v1
from antiphon.services import Answer, Call, Request, Verdict
from antiphon.services._question import (
    Question,
    Ruling,
    answer_of,
    asking_thread,
    pick,
    unambiguous,
)

OPTIONS = tuple(
    v1.PermissionOption(option_id=id_, name=id_, kind=kind)
    for id_, kind in (("once", "allow_once"), ("always", "allow_always"), ("no", "reject_once"))
)


def request(deadline: float | None = None) -> Request:
    verdict = Verdict(decision="ask", why="it must be")
    return Request(call=Call(), options=OPTIONS, verdict=verdict, deadline=deadline)


def short(ruling: Ruling) -> tuple[str, str]:
    return ruling.outcome, ruling.by


@pytest.mark.parametrize(
    ("answer", "ruling"),
    [
        (True, Ruling("allow", "asked")),
        (False, Ruling("deny", "asked")),
        (None, Ruling("cancelled", "asked")),
        ("once", Ruling("allow", "asked", "once")),
        ("always", Ruling("allow", "asked", "always", "session")),
        ("no", Ruling("deny", "asked", "no")),
        ("other", Ruling("deny", "error")),
        (Answer(allow=True, remember="always"), Ruling("allow", "asked", None, "always")),
        (Answer(allow=True, option_id="no"), Ruling("deny", "error")),
        (Answer(allow=False, option_id="once"), Ruling("deny", "error")),
        (Answer(allow=1), Ruling("deny", "error")),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (1, Ruling("deny", "error")),
    ],
)
async def test_an_answer_means_what_it_says_and_what_means_nothing_is_a_no(
    answer: Any, ruling: Ruling
) -> None:
    question = Question(lambda _: answer, request(), set())
    found = await question.outcome()
    assert found.waited >= 0
    found.waited = 0.0
    assert found == ruling


async def test_whatever_ends_a_question_ends_it_for_good() -> None:
    ignored: set[asyncio.Task[Any]] = set()
    cancelled: list[int] = []

    def never(number: int) -> Any:
        async def ask(_request: Request) -> bool:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
            return True

        return ask

    late = Question(never(1), request(deadline=0.01), ignored)
    assert short(await late.outcome()) == ("deny", "deadline")
    withdrawn = Question(never(2), request(), ignored)
    asyncio.get_running_loop().call_soon(withdrawn.withdraw)
    assert short(await withdrawn.outcome()) == ("cancelled", "cancelled")
    withdrawn.withdraw()
    given_up = asyncio.create_task(Question(never(3), request(), ignored).outcome())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await asyncio.gather(*ignored)
    await asyncio.sleep(0)  # what is called at a task's end comes in the next turn of the loop
    assert cancelled == [1, 2, 3]
    assert not ignored


async def test_a_hook_is_asked_in_the_thread_there_is_for_plain_ones() -> None:
    called: list[str] = []

    async def thread(call: Any) -> Any:
        called.append("thread")
        return call()

    async def waits(one: int, two: int) -> int:
        return one + two

    token = asking_thread.set(thread)
    try:
        assert await answer_of(int.__add__, 1, 2) == 3
        assert await answer_of(waits, 1, 2) == 3
        assert await answer_of(lambda: waits(1, 2)) == 3
    finally:
        asking_thread.reset(token)
    assert called == ["thread", "thread"]
    assert await answer_of(lambda: waits(1, 2)) == 3
    assert called == ["thread", "thread"]


def test_an_option_is_the_first_of_the_first_kind_and_its_id_means_one_thing() -> None:
    assert pick(OPTIONS, ("allow_always", "allow_once")) == "always"
    assert pick(OPTIONS, ("reject_always",)) is None
    twice = v1.PermissionOption(option_id="no", name="no", kind="allow_once")
    assert [option.option_id for option in unambiguous((*OPTIONS, twice))] == ["once", "always"]
