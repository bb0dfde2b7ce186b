"""Delivery of one session's updates: queues, subscriptions, observers, marks, and the budget."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import DeliveryGap, Limits, SessionView
from antiphon.sessions._inbox import Inbox, Sink, Subscription, TracedQueue, UpdateQueue
from antiphon.sessions._update import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Link:
    """What an inbox uses of a connection; counts the budget and remembers the tasks."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.queued_updates = 0
        self.limits = Limits(session_updates=10, session_bytes=2000)
        self.budget_spent = False
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def release(self, size: int, updates: int) -> None:
        assert size > 0
        assert updates > 0
        self.queued_bytes -= size
        self.queued_updates -= updates
        assert self.queued_bytes >= 0
        assert (self.queued_bytes == 0) is (self.queued_updates == 0)

    def emit(self, name: str, **facts: Any) -> None:
        self.events.append((name, facts))

    def look_soon(self) -> None:
        pass

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


def chunk(text: str) -> bytes:
    content = {"type": "text", "text": text}
    return json.dumps({"sessionUpdate": "agent_message_chunk", "content": content}).encode()


def put(inbox: Inbox, *texts: str) -> None:
    for text in texts:
        body = chunk(text)
        inbox.put(msgspec.Raw(body), b"frame " + body)


def put_together(inbox: Inbox, *texts: str) -> None:
    bodies = [chunk(text) for text in texts]
    inbox.put_all([msgspec.Raw(body) for body in bodies], [b"frame " + body for body in bodies])


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


async def waiting_for(queue: UpdateQueue) -> None:
    await queue.wait()


async def test_a_waiting_consumer_is_woken_by_an_update_or_on_purpose() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))

    def add() -> None:
        queue.put(Update("s", "session", msgspec.Raw(b"{}"), b"x"), 1)

    for wake in (add, queue.wake):
        waiting = asyncio.create_task(waiting_for(queue))
        await asyncio.sleep(0)
        assert not waiting.done()
        wake()
        await asyncio.wait_for(waiting, 5)
    queue.wake()  # nobody waits


async def test_two_consumers_of_one_queue_are_told_and_a_cancelled_one_makes_room() -> None:
    link, _ = made()
    queue = UpdateQueue(cast("Any", link))
    first = asyncio.create_task(waiting_for(queue))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks iterate"):
        await waiting_for(queue)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(waiting_for(queue))
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


async def test_a_closed_subscription_ends_its_waiting_iterator_and_gives_back_its_bytes() -> None:
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
    await other.aclose()
    await other.aclose()
    assert link.events == [("updates_discarded", {"session": "s", "updates": 3})]
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


@pytest.mark.parametrize("consumer", ["observer", "subscription", "view"])
async def test_a_replay_has_all_of_a_load_or_what_nobody_has_taken_after_it(consumer: str) -> None:
    link, inbox = made()
    other: Subscription | None = None
    match consumer:
        case "observer":
            inbox.observe(lambda _: None)
        case "subscription":
            other = inbox.subscribe()
        case _:
            inbox.fold(SessionView())
    inbox.label = "replay"
    whole = inbox.subscribe(replay=True)
    put(inbox, "old 0", "old 1")
    inbox.load_ended()
    assert await rest(whole) == ["old 0", "old 1"]
    assert await rest(inbox.subscribe(replay=True)) == []
    await ended(link, inbox)
    if other is not None:
        assert await rest(other) == ["old 0", "old 1"]


async def test_a_subscription_shows_what_waits_in_it_and_whether_it_is_over() -> None:
    link, inbox = made()
    subscription, left = inbox.subscribe(), inbox.subscribe()
    put(inbox, "a", "b")
    await anext(subscription)
    assert repr(subscription) == "<Subscription to session 's', open, 1 waiting>"
    left.close()
    assert repr(left) == "<Subscription to session 's', closed, 0 waiting>"
    await ended(link, inbox)
    assert repr(subscription) == "<Subscription to session 's', over, 1 waiting>"
    assert await rest(subscription) == ["b"]
    assert repr(subscription) == "<Subscription to session 's', closed, 0 waiting>"


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


# ------------------------------------------------------------------ the view


async def test_a_view_folds_what_nobody_has_taken_and_then_what_comes() -> None:
    link, inbox = made()
    put(inbox, "early ")
    view = SessionView()
    inbox.fold(view)
    assert link.queued_updates == 0
    put(inbox, "late")
    assert [message.text for message in view.messages] == ["early late"]
    assert link.queued_updates == 0  # it is the consumer of what comes outside a turn
    subscription = inbox.subscribe()
    put(inbox, "r")
    await ended(link, inbox)
    assert await rest(subscription) == ["r"]
    assert [message.text for message in view.messages] == ["early later"]


@pytest.mark.parametrize("consumer", ["observer", "subscription", "replay"])
async def test_a_view_has_what_others_took_before_it_was_looked_at(consumer: str) -> None:
    link, inbox = made()
    put(inbox, "a")
    inbox.label = "replay"
    put(inbox, "b")
    subscription: Subscription | None = None
    if consumer == "observer":
        inbox.observe(lambda update: None)
    else:
        subscription = inbox.subscribe(replay=consumer == "replay")
    put(inbox, "c")
    inbox.turn = UpdateQueue(cast("Any", link))
    put(inbox, "of a turn that it has missed")
    inbox.turn.discard()
    inbox.turn = None
    put(inbox, "d")
    inbox.load_ended()
    if consumer == "subscription" and subscription is not None:
        assert [(await anext(subscription)).text for _ in range(3)] == ["a", "b", "c"]
    view = SessionView()
    inbox.fold(view)
    put(inbox, "e")
    assert "".join(m.text for m in view.messages).replace("a", "") == "bcde"
    assert sum(m.text.count("a") for m in view.messages) == 1
    if subscription is not None:
        subscription.close()
    await ended(link, inbox)
    assert link.queued_updates == 0


@pytest.mark.parametrize(("count", "size"), [(65, 1), (2, 70_000)])
async def test_little_is_kept_for_a_view_that_may_never_be_looked_at(count: int, size: int) -> None:
    link, inbox = made()
    inbox.observe(lambda update: None)
    for _ in range(count):
        put(inbox, "x" * size)
    view = SessionView()
    inbox.fold(view)
    put(inbox, "new")
    assert [m.text for m in view.messages] == ["new"]
    await ended(link, inbox)


async def test_a_view_that_fails_costs_nobody_an_update(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SessionView):
        def apply(self, update: Any) -> None:
            raise ValueError("view trouble")

    link, inbox = made()
    inbox.fold(Broken())
    subscription = inbox.subscribe()
    put(inbox, "a")
    await ended(link, inbox)
    assert await rest(subscription) == ["a"]
    assert "view trouble" in caplog.text


# ------------------------------------------------------------------ the session's share, the alarm


async def test_a_full_session_is_reported_once_until_half_of_it_was_taken() -> None:
    link, inbox = made()  # 10 updates, or 2000 bytes
    subscription = inbox.subscribe()

    def reports() -> list[dict[str, Any]]:
        return [facts for name, facts in link.events if name == "session_full"]

    put(inbox, *"0123456789")
    inbox.look()
    assert reports() == []
    put(inbox, "x")
    inbox.look()
    inbox.look()
    (report,) = reports()
    assert (report["session"], report["updates"]) == ("s", 11)
    assert report["bytes"] == link.queued_bytes
    for _ in range(11):
        await anext(subscription)
    put(inbox, *"0123456789x")  # only now the batch is given back, and more is here already
    await anext(subscription)
    inbox.look()
    assert len(reports()) == 1
    for _ in range(10):
        await anext(subscription)
    waiting = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    put(inbox, *"0123456789x")
    inbox.look()
    assert len(reports()) == 2
    waiting.cancel()
    subscription.close()  # what is let go counts as taken
    put(inbox, "x" * 2000)
    inbox.look()
    assert [facts["updates"] for facts in reports()] == [11, 11, 1]


async def test_what_waits_for_all_consumers_of_a_session_counts_together() -> None:
    link, inbox = made()
    inbox.turn = UpdateQueue(cast("Any", link))
    subscriptions = [inbox.subscribe() for _ in range(2)]
    inbox.observe(lambda update: None)
    put(inbox, "a", "b", "c")
    inbox.look()
    assert [facts["updates"] for name, facts in link.events if name == "session_full"] == [12]
    inbox.turn.discard()
    for subscription in subscriptions:
        subscription.close()
    await ended(link, inbox)
    assert link.queued_updates == 0


def lose_one(inbox: Inbox) -> None:
    """What only a mistake of ours could do."""
    queue = inbox._subscribers[-1]
    update = queue.items.pop()
    queue.size -= len(update.frame)
    cast("Any", inbox.connection).release(len(update.frame), 1)


def double_one(inbox: Inbox) -> None:
    queue = inbox._subscribers[-1]
    queue.put(queue.items[-1], len(queue.items[-1].frame))


@pytest.mark.parametrize(("mistake", "delivered"), [(lose_one, 2), (double_one, 4)])
@pytest.mark.parametrize("replay", [False, True])
async def test_a_subscription_that_was_given_other_than_what_arrived_raises_an_alarm(
    mistake: Callable[[Inbox], None], delivered: int, replay: bool
) -> None:
    link, inbox = made()
    if replay:
        inbox.label = "replay"
    put(inbox, "a")
    subscription = inbox.subscribe(replay=replay)
    put(inbox, "b", "c")
    mistake(inbox)
    if replay:
        inbox.load_ended()
    else:
        inbox.end()
    taken: list[str] = []
    with pytest.raises(DeliveryGap) as gap:
        async for update in subscription:
            taken.append(update.text)  # noqa: PERF401  (also when it raises)
    assert (gap.value.session_id, gap.value.delivered, gap.value.expected) == ("s", delivered, 3)
    assert len(taken) == delivered
    (told,) = [facts for name, facts in link.events if name == "delivery"]
    assert told["decision"] == "fail"
    assert (told["delivered"], told["expected"]) == (delivered, 3)
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)  # it is told once
    assert link.queued_updates == 0


async def test_observers_that_miss_an_update_are_an_alarm_and_hold_up_nobody() -> None:
    link, inbox = made()
    seen: list[str] = []
    inbox.observe(lambda update: seen.append(update.text))
    put(inbox, "a", "b")
    assert inbox._observed is not None
    lost = inbox._observed.items.pop()
    inbox._observed.size -= len(lost.frame)
    link.release(len(lost.frame), 1)
    await asyncio.wait_for(inbox.settled(2), 5)
    assert seen == ["a"]
    (told,) = [facts for name, facts in link.events if name == "delivery"]
    assert (told["decision"], told["delivered"], told["expected"]) == ("fail", 1, 2)
    put(inbox, "c")
    await ended(link, inbox)
    assert seen == ["a", "c"]


@pytest.mark.parametrize("deliver", [put, put_together])
async def test_a_traced_queue_reports_each_update_with_its_place(deliver: Any) -> None:
    link, inbox = made()
    turn = inbox.turn = TracedQueue(inbox, 3)
    deliver(inbox, "a", "b")
    assert [facts for name, facts in link.events if name == "delivery"] == [
        {"session": "s", "turn": 3, "decision": "emit", "ordinal": n, "buffered": n + 1}
        for n in (0, 1)
    ]
    assert texts(list(iter(turn.take, None))) == ["a", "b"]


@pytest.mark.parametrize("consumer", ["turn", "backlog", "subscriber", "observer", "sink", "view"])
async def test_updates_that_come_together_leave_the_same_account_as_one_by_one(
    consumer: str,
) -> None:
    accounts: list[Any] = []
    for deliver in (put, put_together):
        link, inbox = made()
        inbox.label = "turn" if consumer == "turn" else "session"
        if consumer == "turn":
            inbox.turn = UpdateQueue(cast("Any", link))
        elif consumer == "sink":
            inbox.turn = Sink(cast("Any", link))
        elif consumer == "subscriber":
            inbox.subscribe()
        elif consumer == "view":
            inbox.fold(SessionView())
        elif consumer == "observer":
            inbox.observe(lambda _: None)
        deliver(inbox, "a", "bb", "ccc")
        waiting = [
            (u.session_id, u.label, u.raw, u.frame) for q in inbox._queues() for u in q.items
        ]
        dropped = inbox.turn.dropped if isinstance(inbox.turn, Sink) else None
        early = texts(inbox._early or [])
        account = inbox.received, inbox.held(), link.queued_bytes, link.queued_updates
        accounts.append((*account, waiting, dropped, early))
        await ended(link, inbox)
    assert accounts[0] == accounts[1]


class Acting(Link):
    """A link whose telemetry hook does something when it is told of one update."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.act: Callable[[], object] = list

    def emit(self, name: str, **facts: Any) -> None:
        super().emit(name, **facts)
        if name == "delivery" and facts["ordinal"] == self._at:
            self.act()


@pytest.mark.parametrize("act", ["subscribe", "close", "view", "leave", "end"])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_what_a_hook_does_at_an_update_holds_for_the_next_that_came_with_it(
    act: str, at: int
) -> None:
    accounts: list[Any] = []
    for deliver in (put, put_together):
        link = Acting(at)
        inbox = Inbox(cast("Any", link), "s")
        inbox.label = "turn"
        turn = inbox.turn = TracedQueue(inbox, 1)
        subscription, view = inbox.subscribe(), SessionView()
        others: list[Subscription] = []
        acts: dict[str, Callable[[], object]] = {
            "subscribe": partial(others.extend, map(Inbox.subscribe, [inbox])),
            "close": subscription.close,
            "view": partial(inbox.fold, view),
            "leave": partial(inbox.leave, turn),
            "end": inbox.turn_ended,
        }
        link.act = acts[act]
        deliver(inbox, "a", "b", "c")
        waiting = [[(u.label, u.text) for u in queue.items] for queue in inbox._queues()]
        shown = [repr(entry) for entry in view.entries]
        accounts.append((inbox.received, link.queued_bytes, link.events, waiting, shown))
        subscription.close()
        await ended(link, inbox)
    assert accounts[0] == accounts[1]


@pytest.mark.parametrize("deliver", [put, put_together])
@pytest.mark.parametrize("consumer", ["subscription", "observer", "view"])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_what_is_begun_in_a_hook_begins_with_the_next_update_and_misses_none(
    at: int, consumer: str, deliver: Any
) -> None:
    link = Acting(at)
    inbox = Inbox(cast("Any", link), "s")
    inbox.label = "turn"
    turn = inbox.turn = TracedQueue(inbox, 1)
    before, view = inbox.subscribe(), SessionView()
    opened: list[Subscription] = []
    seen: list[str] = []
    acts: dict[str, Callable[[], object]] = {
        "subscription": lambda: opened.append(inbox.subscribe()),
        "observer": lambda: inbox.observe(lambda update: seen.append(update.text)),
        "view": lambda: inbox.fold(view),
    }
    link.act = acts[consumer]
    deliver(inbox, "a", "b", "c")
    assert inbox.turn_ended() is turn
    deliver(inbox, "d")
    await ended(link, inbox)

    assert texts(list(iter(turn.take, None))) == ["a", "b", "c"]
    assert await rest(before) == ["a", "b", "c", "d"]
    if consumer == "view":
        seen = [message.text for message in view.messages]
        assert "".join(seen) == "abcd"[at + 1 :]
    else:
        for subscription in opened:
            seen += await rest(subscription)  # which raises where the count is wrong
        assert seen == ["a", "b", "c", "d"][at + 1 :]
    assert {facts["decision"] for name, facts in link.events if name == "delivery"} == {"emit"}
    assert link.queued_bytes == 0


# ------------------------------------------------------------------ closing


@pytest.mark.parametrize("spent", [True, False])
async def test_a_session_being_closed_lets_go_of_its_turn_only_where_the_budget_needs_it(
    spent: bool,
) -> None:
    link, inbox = made()
    turn = inbox.turn = UpdateQueue(cast("Any", link))
    view = SessionView()
    inbox.fold(view)
    put(inbox, "a", "b")
    link.budget_spent = spent
    inbox.let_go()
    put(inbox, "c")
    assert texts(list(iter(turn.take, None))) == ([] if spent else ["a", "b", "c"])
    inbox.keep()  # refused
    inbox.keep()
    assert inbox.turn is turn
    put(inbox, "d")
    assert texts(list(iter(turn.take, None))) == ["d"]
    assert turn.cut is spent  # it is not whole
    assert not turn.retired
    assert view.messages[0].text == "abcd"
    counts = [facts["updates"] for name, facts in link.events if name == "updates_discarded"]
    assert counts == ([2, 1] if spent else [])
    assert link.queued_updates == 0


async def test_an_inbox_knows_whether_anybody_takes_what_comes() -> None:
    link, inbox = made()
    assert not inbox.consumed
    subscription = inbox.subscribe()
    assert inbox.consumed
    stop = inbox.observe(lambda update: None)
    subscription.close()
    assert inbox.consumed
    stop()
    assert not inbox.consumed
    inbox.fold(SessionView())
    assert inbox.consumed
    await ended(link, inbox)


# ------------------------------------------------------------------ observers that wait for each other


async def test_observers_of_two_sessions_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    link, first = made()
    second, third = Inbox(cast("Any", link), "2"), Inbox(cast("Any", link), "3")
    circle = (first, second, third)
    done: list[str] = []

    def waits_for(other: Inbox) -> Callable[[Update], Any]:
        async def observer(update: Update) -> None:
            await other.settled(1)
            done.append(update.text)

        return observer

    for index, inbox in enumerate(circle):
        inbox.observe(waits_for(circle[(index + 1) % 3]))
        put(inbox, str(index))
    await asyncio.wait_for(asyncio.gather(*(ended(link, inbox) for inbox in circle)), 5)
    assert sorted(done) == ["0", "1", "2"]
    assert done[0] == "2"  # the one that would have closed the circle
    assert not any(inbox._awaiting for inbox in circle)


async def test_what_comes_between_two_observers_is_for_the_second() -> None:
    link, inbox = made()
    seen: list[str] = []
    stop = inbox.observe(lambda update: seen.append(f"first {update.text}"))
    put(inbox, "a")
    await asyncio.wait_for(inbox.settled(1), 5)
    stop()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not inbox.observed
    put(inbox, "b")
    inbox.observe(lambda update: seen.append(f"second {update.text}"))
    put(inbox, "c")
    await ended(link, inbox)
    assert seen == ["first a", "second b", "second c"]
    assert link.queued_updates == 0


async def test_an_observer_that_another_has_ended_sees_nothing_more() -> None:
    link, inbox = made()
    seen: list[str] = []
    stop: list[Callable[[], None]] = []
    inbox.observe(lambda update: stop[0]())
    stop.append(inbox.observe(lambda update: seen.append(update.text)))
    put(inbox, "a", "b")
    await ended(link, inbox)
    assert seen == []


# ------------------------------------------------------------------ any order of anything


ACTS = st.sampled_from(
    [
        *(
            "put",
            "put",
            "put several",
            "subscribe",
            "take",
            "close",
            "turn",
            "turn ends",
            "observe",
        ),
        *("stop observing", "load", "load ends", "replay", "view", "yield"),
    ]
)


class Follower:
    """What one consumer should get, and what it got."""

    def __init__(self, expected: list[str], take: Subscription | None = None) -> None:
        self.expected = expected
        self.got: list[str] = []
        self.subscription = take
        self.stop: Callable[[], None] = lambda: None


@settings(max_examples=300)
@given(st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=50))
async def test_in_any_order_every_consumer_gets_its_own_in_order_and_the_budget_comes_out_even(
    steps: list[tuple[str, int]],
) -> None:
    link, inbox = made()
    subscriptions: list[Follower] = []
    replays: list[Follower] = []  # those that end with the load
    observers: list[Follower] = []
    unseen: list[tuple[str, str]] = []  # (text, label) of what nobody has taken
    turn: tuple[UpdateQueue, list[str]] | None = None
    view: SessionView | None = None
    folded = ""
    everything = ""

    def consumers() -> list[Follower]:
        return [*subscriptions, *replays, *observers]

    for number, (act, which) in enumerate(steps):
        if act.startswith("put"):
            # Those that come together are for the same as those that come one by one.
            several = [f"{number};"] if act == "put" else [f"{number}.{n};" for n in range(which)]
            everything += "".join(several)
            (put if act == "put" else put_together)(inbox, *several)
            for follower in consumers():
                follower.expected += several
            folded += "".join(several)
            if turn is not None:
                turn[1].extend(several)
            elif not consumers() and view is None:
                unseen += [(text, inbox.label) for text in several]
        elif act == "subscribe":
            subscriptions.append(Follower([text for text, _ in unseen], inbox.subscribe()))
            unseen = []
        elif act == "replay":
            history = [text for text, label in unseen if label == "replay"]
            unseen = [entry for entry in unseen if entry[1] != "replay"]
            follower = Follower(history, inbox.subscribe(replay=True))
            if inbox.label == "replay":
                replays.append(follower)
            else:
                assert follower.subscription is not None
                assert await rest(follower.subscription) == history
        elif act == "take" and subscriptions:
            follower = subscriptions[which % len(subscriptions)]
            if len(follower.got) < len(follower.expected) and follower.subscription is not None:
                follower.got.append((await anext(follower.subscription)).text)
        elif act == "close" and subscriptions:
            follower = subscriptions.pop(which % len(subscriptions))
            assert follower.got == follower.expected[: len(follower.got)]
            assert follower.subscription is not None
            follower.subscription.close()
        elif act == "turn" and turn is None and inbox.label != "replay":
            inbox.turn = UpdateQueue(cast("Any", link))
            turn = (inbox.turn, list[str]())
            inbox.label = "turn"
        elif act == "turn ends" and turn is not None:
            inbox.turn = None
            inbox.label = "session"
            assert texts(list(iter(turn[0].take, None))) == turn[1]
            turn = None
        elif act == "load" and turn is None:
            inbox.label = "replay"
        elif act == "load ends":
            inbox.load_ended()
            for follower in replays:
                assert follower.subscription is not None
                assert await rest(follower.subscription) == follower.expected
            replays = []
        elif act == "observe":
            # The first gets what nobody has taken; who joins it gets what comes from now on.
            follower = Follower([] if inbox.observed else [text for text, _ in unseen])
            if not inbox.observed:
                unseen = []
            follower.stop = inbox.observe(
                lambda update, follower=follower: follower.got.append(update.text)  # type: ignore[misc]
            )
            observers.append(follower)
        elif act == "stop observing" and observers:
            follower = observers.pop(which % len(observers))
            follower.stop()
            assert follower.got == follower.expected[: len(follower.got)]
            follower.got.append("nothing more")
            unchanged = list(follower.got)
            await asyncio.sleep(0)
            assert follower.got == unchanged
        elif act == "view" and view is None:
            view = SessionView()
            inbox.fold(view)
            unseen = []
            folded = ""
        elif act == "yield":
            await asyncio.sleep(0)
    if turn is not None:
        assert texts(list(iter(turn[0].take, None))) == turn[1]
    if inbox.label == "replay":
        inbox.load_ended()
    await ended(link, inbox)
    for follower in (*subscriptions, *replays):
        assert follower.subscription is not None
        assert follower.got + await rest(follower.subscription) == follower.expected
    for follower in observers:
        assert follower.got == follower.expected
    if view is not None:
        told = "".join(message.text for message in view.messages)
        assert told.endswith(folded)
        # What came before is a part of what there was, in its order and each once.
        before = iter(everything.split(";"))
        assert all(text in before for text in told.split(";"))
    assert inbox.backlog.discard() == len(unseen)
    assert link.queued_bytes == link.queued_updates == 0
    assert not [name for name, _ in link.events if name == "delivery"]


async def test_a_refused_close_leaves_the_turn_alone_that_has_begun_meanwhile() -> None:
    link, inbox = made()
    first = inbox.turn = UpdateQueue(cast("Any", link))
    link.budget_spent = True
    inbox.let_go()
    assert inbox.turn_ended() is not first
    second = inbox.turn = Sink(cast("Any", link))  # a turn that was left
    inbox.keep()
    put(inbox, "x")
    assert inbox.turn is second
    assert link.queued_updates == 0


async def test_a_turn_is_let_go_of_as_soon_as_a_session_being_closed_has_spent_the_budget() -> None:
    link, inbox = made()
    turn = inbox.turn = UpdateQueue(cast("Any", link))
    inbox.let_go()
    put(inbox, "a", "b")
    inbox.look()
    assert len(turn) == 2
    link.budget_spent = True
    inbox.look()
    assert len(turn) == 0
    assert link.queued_updates == 0


async def test_a_turn_that_outlives_a_close_keeps_its_last_updates_from_the_next() -> None:
    link, inbox = made()
    turn = inbox.turn = UpdateQueue(cast("Any", link))
    link.budget_spent = True
    inbox.let_go()
    inbox.keep()  # it was not answered
    put(inbox, "a", "b")
    assert inbox.turn_ended() is turn
    inbox.let_go()
    assert turn.held[0] == link.queued_updates == 2


async def test_a_session_that_is_closed_is_not_kept_by_another_close_that_is_refused() -> None:
    link, inbox = made()
    inbox.let_go()
    inbox.let_go()
    inbox.let_go(for_good=True)  # the first was answered
    inbox.keep()  # and the second was refused
    put(inbox, "a", "b")
    assert inbox.held()[0] == link.queued_updates == 0


async def test_a_history_that_is_complete_and_not_taken_is_let_go_with_its_session() -> None:
    link, inbox = made()
    inbox.label = "replay"
    replay = inbox.subscribe(replay=True)
    put(inbox, *"abcdefghijkl")
    inbox.load_ended()
    assert inbox.held()[0] == link.queued_updates == 12
    inbox.look()
    assert [name for name, _ in link.events] == ["session_full"]
    inbox.let_go()
    assert await rest(replay) == []
    assert link.queued_updates == 0
    late = inbox.subscribe(replay=True)
    assert await rest(late) == []


async def test_an_observer_that_another_session_s_observer_began_waits_for_that_one() -> None:
    link, outer = made()
    inner = Inbox(cast("Any", link), "inner")
    gate, asked, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def ask(update: Update) -> None:
        asked.set()
        await outer.settled(2)
        answered.set()

    async def begin(update: Update) -> None:
        if update.text == "begin":
            inner.observe(ask)
        else:
            await gate.wait()

    outer.observe(begin)
    put(outer, "begin", "slow")
    while not inner.observed:
        await asyncio.sleep(0)
    put(inner, "x")
    await asked.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not answered.is_set()  # the observer of the other has not returned
    gate.set()
    await asyncio.wait_for(answered.wait(), 5)
    inner.end()
    await ended(link, outer)
