"""Delivery of one session's updates: queues, subscriptions, observers, marks, and the budget."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sessions._inbox import Inbox, Subscription, UpdateQueue
from antiphon.sessions._update import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Link:
    """What an inbox uses of a connection; counts the budget and remembers the tasks."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.tasks: list[asyncio.Task[Any]] = []

    def release(self, size: int) -> None:
        assert size > 0
        self.queued_bytes -= size
        assert self.queued_bytes >= 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def create_task(
        self, work: Coroutine[Any, Any, Any], *, delivery: bool = False
    ) -> asyncio.Task[Any]:
        assert delivery
        task = asyncio.ensure_future(work)
        self.tasks.append(task)
        return task

    def call_soon_from_anywhere(self, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(act)


def made() -> tuple[Link, Inbox]:
    link = Link()
    return link, Inbox(cast("Any", link), "s")


def put(inbox: Inbox, *texts: str) -> None:
    for text in texts:
        content = {"type": "text", "text": text}
        body = json.dumps({"sessionUpdate": "agent_message_chunk", "content": content}).encode()
        inbox.put(msgspec.Raw(body), b"frame " + body)


async def ended(link: Link, inbox: Inbox) -> None:
    """End the session and wait for what still is shown to observers."""
    inbox.end()
    await asyncio.gather(*link.tasks)


def texts(updates: list[Update]) -> list[str]:
    return [update.text for update in updates]


async def rest(subscription: Subscription) -> list[str]:
    return [update.text async for update in subscription]


# ------------------------------------------------------------------ queues


async def test_a_queue_gives_what_was_put_in_order_and_counts_its_bytes() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))
    raw = msgspec.Raw(b"{}")
    updates = [Update("s", "session", raw, b"x" * n) for n in range(1, 7)]
    for update in updates[:3]:
        queue.put(update, len(update.frame))
    assert len(queue) == 3
    assert link.queued_bytes == 6
    assert queue.take() is updates[0]
    # The three are one batch: what the consumer has in hand counts until it asks for more.
    assert link.queued_bytes == 6
    for update in updates[3:]:
        queue.put(update, len(update.frame))
    assert [queue.take() for _ in range(2)] == updates[1:3]
    assert link.queued_bytes == 21
    assert queue.take() is updates[3]
    assert link.queued_bytes == 15
    assert [queue.take() for _ in range(2)] == updates[4:]
    assert queue.take() is None
    assert link.queued_bytes == 0
    assert queue.take() is None


async def test_what_is_discarded_gives_its_bytes_back_once() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))
    for _ in range(3):
        queue.put(Update("s", "session", msgspec.Raw(b"{}"), b"x"), 1)
    queue.take()
    queue.put(Update("s", "session", msgspec.Raw(b"{}"), b"x"), 1)
    assert queue.discard() == 3
    assert link.queued_bytes == 0
    assert queue.discard() == 0
    assert len(queue) == 0


async def test_a_waiting_consumer_is_woken_by_an_update_or_on_purpose() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))

    def add() -> None:
        queue.put(Update("s", "session", msgspec.Raw(b"{}"), b"x"), 1)

    for wake in (add, queue.wake):
        waiting = asyncio.create_task(queue.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        wake()
        await asyncio.wait_for(waiting, 5)
    queue.wake()  # nobody waits


async def test_two_consumers_of_one_queue_are_told_and_a_cancelled_one_makes_room() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))
    first = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks iterate"):
        await queue.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    queue.wake()
    await asyncio.wait_for(second, 5)


# ------------------------------------------------------------------ subscriptions


async def test_the_first_subscriber_also_gets_what_nobody_has_seen() -> None:
    link, inbox = made()
    put(inbox, "a", "b")
    first, second = inbox.subscribe(), inbox.subscribe()
    put(inbox, "c")
    await ended(link, inbox)
    assert await rest(first) == ["a", "b", "c"]
    assert await rest(second) == ["c"]
    assert link.queued_bytes == 0


async def test_updates_of_a_turn_are_the_turn_s_and_every_subscriber_s() -> None:
    link, inbox = made()
    turn = inbox.turn = UpdateQueue(cast("Any", link))
    put(inbox, "a")
    subscription = inbox.subscribe()
    put(inbox, "b")
    inbox.turn = None
    put(inbox, "c")
    await ended(link, inbox)
    assert [update.text for update in iter(turn.take, None)] == ["a", "b"]
    assert await rest(subscription) == ["b", "c"]  # the turn's first was seen by the turn
    assert link.queued_bytes == 0


async def test_a_closed_subscription_ends_its_waiting_iterator_and_gives_back_its_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, inbox = made()
    subscription = inbox.subscribe()
    waiting = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    subscription.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    put(inbox, "kept for the next")
    other = inbox.subscribe()
    put(inbox, "x", "y")
    with caplog.at_level(logging.INFO, "antiphon.session"):
        await other.aclose()
        await other.aclose()
    assert "3 updates were not taken" in caplog.text
    assert len(caplog.records) == 1
    assert link.queued_bytes == 0
    put(inbox, "z")
    assert (await anext(inbox.subscribe())).text == "z"


async def test_a_subscription_that_nobody_holds_is_closed() -> None:
    link, inbox = made()
    subscription = inbox.subscribe()
    put(inbox, "a", "b")
    assert (await anext(subscription)).text == "a"
    del subscription
    gc.collect()
    await asyncio.sleep(0)
    assert link.queued_bytes == 0
    put(inbox, "c")
    assert (await anext(inbox.subscribe())).text == "c"


async def test_a_replay_ends_where_the_load_ended() -> None:
    link, inbox = made()
    inbox.label = "replay"
    put(inbox, "old 0")
    replay, other = inbox.subscribe(replay=True), inbox.subscribe()
    put(inbox, "old 1")
    inbox.load_ended()
    put(inbox, "new")
    assert await rest(replay) == ["old 0", "old 1"]
    updates = [await anext(other) for _ in range(2)]
    assert [(update.text, update.label) for update in updates] == [
        ("old 1", "replay"),
        ("new", "session"),
    ]
    put(inbox, "newer")
    assert await rest(inbox.subscribe(replay=True)) == []
    await ended(link, inbox)
    assert await rest(other) == ["newer"]
    assert link.queued_bytes == 0


# ------------------------------------------------------------------ observers and marks


async def test_observers_see_each_update_one_after_the_other() -> None:
    link, inbox = made()
    seen: list[str] = []
    gate = asyncio.Event()

    async def slow(update: Update) -> None:
        seen.append(f"slow {update.text}")
        await gate.wait()

    put(inbox, "early")
    inbox.observe(slow)
    inbox.observe(lambda update: seen.append(f"fast {update.text}"))
    put(inbox, "later")
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["slow early"]  # the second observer waits for the first, and so does "later"
    gate.set()
    await ended(link, inbox)
    # What waited was for the first; the second sees what came after it.
    assert seen == ["slow early", "slow later", "fast later"]
    assert link.queued_bytes == 0


async def test_an_observer_sees_nothing_that_came_before_it_however_busy_another_is() -> None:
    link, inbox = made()
    seen: list[str] = []
    gate = asyncio.Event()

    async def slow(update: Update) -> None:
        await gate.wait()

    inbox.observe(slow)
    put(inbox, "before", "before, too")
    await asyncio.sleep(0)
    inbox.observe(lambda update: seen.append(update.text))
    put(inbox, "after")
    gate.set()
    await ended(link, inbox)

    assert seen == ["after"]


async def test_a_subscriber_that_joins_while_updates_are_let_go_gets_what_comes_then() -> None:
    link, inbox = made()
    inbox.let_go()
    put(inbox, "let go")
    subscription = inbox.subscribe()
    put(inbox, "one")
    inbox.keep()
    inbox.keep()
    put(inbox, "two")
    await ended(link, inbox)

    assert await rest(subscription) == ["one", "two"]


async def test_a_mark_is_reached_when_the_observers_have_returned_from_so_many() -> None:
    link, inbox = made()
    gate = asyncio.Event()

    async def observer(update: Update) -> None:
        await gate.wait()

    await inbox.settled(5)  # nobody observes: nothing to wait for
    put(inbox, "a")
    inbox.observe(observer)
    assert inbox.observed
    put(inbox, "b")
    await inbox.settled(0)
    marks = [asyncio.create_task(inbox.settled(mark)) for mark in (1, 2, 1)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(mark.done() for mark in marks)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*marks), 5)
    await inbox.settled(2)
    await ended(link, inbox)
    assert not inbox.observed
    await inbox.settled(99)


async def test_an_observer_and_its_children_do_not_wait_for_themselves() -> None:
    link, inbox = made()
    other = Inbox(cast("Any", link), "other")
    done: list[str] = []

    async def observer(update: Update) -> None:
        await inbox.settled(1)
        await asyncio.create_task(inbox.settled(1))
        done.append(update.text)

    async def elsewhere(update: Update) -> None:
        await inbox.settled(1)  # another session's observer does wait
        done.append(update.text)

    other.observe(elsewhere)
    inbox.observe(observer)
    put(other, "second")
    for _ in range(5):
        await asyncio.sleep(0)
    put(inbox, "first")
    inbox.end()
    await ended(link, other)
    assert sorted(done) == ["first", "second"]


async def test_what_an_observer_raises_is_logged_and_the_next_update_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, inbox = made()
    seen: list[str] = []

    async def observer(update: Update) -> None:
        seen.append(update.text)
        if update.text == "cancel":
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone
        raise ValueError(update.text)

    inbox.observe(observer)
    put(inbox, "a", "cancel", "b")
    await ended(link, inbox)
    assert seen == ["a", "cancel", "b"]
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == [
        "ERROR",
        "ERROR",
    ]


async def test_an_observer_can_be_taken_away_even_by_itself() -> None:
    link, inbox = made()
    seen: list[str] = []
    stop: list[Callable[[], None]] = []

    def once(update: Update) -> None:
        seen.append(update.text)
        stop[0]()
        stop[0]()

    stop.append(inbox.observe(once))
    put(inbox, "a", "b")
    for _ in range(5):
        await asyncio.sleep(0)
    put(inbox, "for whoever asks first")
    await asyncio.wait_for(inbox.settled(3), 5)  # nobody observes any more
    subscription = inbox.subscribe()
    await ended(link, inbox)
    assert seen == ["a"]
    assert await rest(subscription) == ["for whoever asks first"]
    assert link.queued_bytes == 0


async def test_an_observer_that_never_returns_ends_with_its_task_and_frees_who_waits() -> None:
    link, inbox = made()

    async def stuck(update: Update) -> None:
        await asyncio.Event().wait()

    inbox.observe(stuck)
    put(inbox, "a", "b")
    waiting = asyncio.create_task(inbox.settled(2))
    for _ in range(3):
        await asyncio.sleep(0)
    (task,) = link.tasks
    task.cancel()
    await asyncio.wait_for(waiting, 5)
    assert link.queued_bytes == 0


# ------------------------------------------------------------------ any order of anything


ACTS = st.sampled_from(
    ["put", "put", "put", "subscribe", "take", "close", "turn", "turn ends", "observe", "yield"]
)


@settings(max_examples=150)
@given(st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=40))
async def test_in_any_order_every_consumer_gets_its_own_in_order_and_the_budget_comes_out_even(
    steps: list[tuple[str, int]],
) -> None:
    link, inbox = made()
    consumers: list[tuple[Subscription, list[str], list[str]]] = []  # (it, expected, taken)
    unseen: list[str] = []
    turn: tuple[UpdateQueue, list[str]] | None = None
    shown: list[tuple[list[str], list[str]]] = []  # (expected, seen) of each observer
    for number, (act, which) in enumerate(steps):
        if act == "put":
            text = str(number)
            put(inbox, text)
            for _, expected, _ in consumers:
                expected.append(text)
            for expected, _ in shown:
                expected.append(text)
            if turn is not None:
                turn[1].append(text)
            elif not consumers and not shown:
                unseen.append(text)
        elif act == "subscribe":
            consumers.append((inbox.subscribe(), unseen, []))
            unseen = []
        elif act == "take" and consumers:
            subscription, expected, taken = consumers[which % len(consumers)]
            if len(taken) < len(expected):
                taken.append((await anext(subscription)).text)
        elif act == "close" and consumers:
            subscription, expected, taken = consumers.pop(which % len(consumers))
            assert taken == expected[: len(taken)]
            subscription.close()
        elif act == "turn" and turn is None:
            inbox.turn = UpdateQueue(cast("Any", link))
            turn = (inbox.turn, list[str]())
        elif act == "turn ends" and turn is not None:
            inbox.turn = None
            assert texts(list(iter(turn[0].take, None))) == turn[1]
            turn = None
        elif act == "observe" and not shown:
            expected, seen = unseen, list[str]()
            unseen = []
            inbox.observe(lambda update, seen=seen: seen.append(update.text))  # type: ignore[misc]
            shown.append((expected, seen))
        elif act == "yield":
            await asyncio.sleep(0)
    if turn is not None:
        assert texts(list(iter(turn[0].take, None))) == turn[1]
    await ended(link, inbox)
    for subscription, expected, taken in consumers:
        assert taken + await rest(subscription) == expected
    for expected, seen in shown:
        assert seen == expected
    assert inbox.backlog.discard() == len(unseen)
    assert link.queued_bytes == 0
