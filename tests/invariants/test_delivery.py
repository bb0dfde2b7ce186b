"""What holds of the delivery of updates at the client (D1 to D9), each against a side that is wrong.

D4 and D8 were never given. D1 and D9 are meant of owners that get ordinals; an iterator has a queue of
its own, whose order and count stand for them. Unlike there, several subscribers keep the order, too.
"""

from __future__ import annotations

import ast
import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import antiphon.sessions
from antiphon import Client, DeliveryGap, Session
from antiphon.schema import loads
from antiphon.sessions._inbox import Inbox, TracedQueue, UpdateQueue
from antiphon.sessions._session import PromptTurn
from antiphon.testing import raw_agent
from tests.invariants.controls import changed, controlled, on_the_wire, one_by_one
from tests.invariants.sides import turns
from tests.invariants.test_turns import under_one_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from antiphon import AgentPeer, TelemetryEvent, Update
    from antiphon.testing import RawPeer

pytestmark = pytest.mark.virtual_time

Json = dict[str, Any]
DONE = {"stopReason": "end_turn"}


def now() -> float:
    return asyncio.get_running_loop().time()


async def open_session(peer: AgentPeer, raw: RawPeer, session_id: str = "s1") -> Session:
    opening = asyncio.create_task(peer.new_session())
    number = len(raw.sent("session/new")) + 1
    raw.answer(await raw.wait("session/new", number), {"sessionId": session_id})
    return await opening


@asynccontextmanager
async def opened(
    client: Client | None = None, **options: Any
) -> AsyncGenerator[tuple[Session, RawPeer]]:
    """A session of our client at a raw agent."""
    async with raw_agent(client, **options) as (peer, raw):
        yield await open_session(peer, raw), raw


# ---------------------------------------------------------------- D1: in order for everybody


def in_front(_original: Any, self: UpdateQueue, update: Update, size: int) -> None:
    self.items.insert(0, update)
    self.size += size
    self.connection.queued_bytes += size
    self.wake()


def swapped(frames: list[Json]) -> list[Json]:
    ours = [frame for frame in frames if frame.get("method") == "session/update"]
    return [*reversed(ours), *frames[len(ours) :]] if len(ours) > 1 else frames


@pytest.mark.covers("D1")
@controlled(in_front=changed(UpdateQueue, "put", in_front), swapped=on_the_wire(swapped))
async def test_a_slow_observer_changes_nobodys_order() -> None:
    observed: list[str] = []

    async def observe(update: Update) -> None:
        await asyncio.sleep(5 if update.text == "one" else 0)
        observed.append(update.text)

    async with opened(Client(on_update=observe)) as (session, raw):
        subscribers = [session.updates(), session.updates()]
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "one"), raw.update("s1", "two"))
            began = now()
            iterated = [(await anext(turn)).text, (await anext(turn)).text]
            assert iterated == ["one", "two"]
            assert now() == began  # without waiting for the observer
            raw.answer(request, DONE)
            assert [update async for update in turn] == []
        assert observed == ["one", "two"]  # and the answer has waited for it
        for subscriber in subscribers:
            assert [(await anext(subscriber)).text, (await anext(subscriber)).text] == iterated
            subscriber.close()


# ---------------------------------------------------------------- D2, D9: what is lost is noticed


@contextmanager
def losing(text: str, *, times: int = 0) -> Generator[None]:
    """Every queue gets updates of this text so often instead of once."""
    original = UpdateQueue.put

    def put(self: UpdateQueue, update: Update, size: int) -> None:
        for _ in range(times if update.text == text else 1):
            original(self, update, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateQueue, "put", put)
        patch.setattr(UpdateQueue, "put_all", one_by_one)
        yield


def never(_original: Any, *_args: Any, **_named: Any) -> None:
    """What is not done at all."""


def untraced(_original: Any, self: TracedQueue, update: Update, size: int) -> None:
    UpdateQueue.put(self, update, size)


def told_twice(original: Any, *args: Any, **named: Any) -> None:
    original(*args, **named)
    original(*args, **named)


async def play(session: Session, raw: RawPeer, *said: str) -> list[str]:
    """A turn in which this is said; what its iterator gave."""
    number = len(raw.sent("session/prompt")) + 1
    async with session.prompt("go") as turn:
        request = await raw.wait("session/prompt", number)
        raw.send(*(raw.update("s1", text) for text in said))
        raw.answer(request, DONE)
        return [update.text async for update in turn]


@pytest.mark.alarms("delivery")
@pytest.mark.covers("D2")
@controlled(counts_nothing=changed(Inbox, "check_delivery", never))
async def test_a_turn_that_is_given_other_than_what_came_fails_and_never_ends_as_if_whole() -> None:
    async with opened() as (session, raw):
        assert await play(session, raw, "one", "two") == ["one", "two"]
        for times, delivered in ((0, 1), (2, 3)):
            with losing("two", times=times), pytest.raises(DeliveryGap) as caught:
                await play(session, raw, "one", "two")
            assert (caught.value.delivered, caught.value.expected) == (delivered, 2)
        assert await play(session, raw, "one", "two") == ["one", "two"]


@pytest.mark.alarms("delivery")
@pytest.mark.covers("D9")
@controlled(
    untraced=changed(TracedQueue, "put", untraced),
    counts_nothing=changed(Inbox, "check_delivery", never),
    told_twice=changed(Inbox, "_gap", told_twice),
)
async def test_each_delivery_is_told_once_and_so_is_a_gap() -> None:
    told: list[Json] = []

    def tell(event: TelemetryEvent) -> None:
        if event.name == "delivery":
            told.append(event.facts)

    async with opened(telemetry=tell) as (session, raw):
        await play(session, raw, "one", "two", "three")
        emitted = [(fact["decision"], fact["ordinal"], fact["session"]) for fact in told]
        assert emitted == [("emit", number, "s1") for number in range(3)]
        told.clear()
        with losing("two"), suppress(DeliveryGap):
            await play(session, raw, "one", "two")
        failed = [fact for fact in told if fact["decision"] == "fail"]
        assert [(fact["delivered"], fact["expected"]) for fact in failed] == [(1, 2)]
        assert {fact["decision"] for fact in told} == {"emit", "fail"}


# ---------------------------------------------------------------- D3: no delay anywhere


async def settles(original: Any, self: PromptTurn) -> None:
    await asyncio.sleep(0.05)
    await original(self)


@pytest.mark.covers("D3")
@controlled(settles=changed(PromptTurn, "_finish", settles))
async def test_updates_and_answers_are_seen_without_any_delay() -> None:
    async with opened() as (session, raw):
        began = now()
        for text in ("one", "two"):
            prompting = asyncio.ensure_future(session.prompt("go"))
            request = await raw.wait("session/prompt", len(raw.sent("session/prompt")) + 1)
            raw.send(raw.update("s1", text))
            raw.answer(request, DONE)
            outcome = await prompting
            assert outcome.text == text
        # This loop's time moves only where somebody waits for it.
        assert now() == began


@pytest.mark.covers("D3")
def test_no_code_of_the_delivery_looks_at_a_clock() -> None:
    folder = Path(antiphon.sessions.__file__).parent
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for module in ("_inbox.py", "_update.py")
        for node in ast.walk(ast.parse((folder / module).read_text(encoding="utf-8")))
        if isinstance(node, (ast.Attribute, ast.Name))
    }

    assert "take" in names
    assert not names & {
        "sleep",
        "call_later",
        "call_at",
        "timeout",
        "timeout_at",
        "wait_for",
        "time",
    }


# ---------------------------------------------------------------- D5: numbers of the peer mean nothing


def sorted_by_number(_original: Any, self: UpdateQueue, update: Update, size: int) -> None:
    self.items.append(update)
    self.items.sort(key=lambda item: item.meta["seq"])
    self.size += size
    self.connection.queued_bytes += size
    self.wake()


def without_meta(frames: list[Json]) -> list[Json]:
    for frame in frames:
        frame.get("params", {}).pop("_meta", None)
    return frames


@pytest.mark.covers("D5")
@controlled(
    sorted_by_number=changed(UpdateQueue, "put", sorted_by_number),
    without_meta=on_the_wire(without_meta),
)
async def test_sequence_numbers_of_the_peer_order_nothing_and_arrive_as_they_were() -> None:
    numbers = [3, 1, 2, 1, -5]
    handled: list[Any] = []

    class Looks(Client):
        async def session_update(self, params: Any, ctx: Any) -> None:
            handled.append(params.meta)

    async with opened(Looks()) as (session, raw):
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            frames: list[Json] = []
            for index, number in enumerate(numbers):
                frame = raw.update("s1", str(index))
                frame["params"]["_meta"] = {"seq": number}
                frames.append(frame)
            raw.send(*frames)
            raw.answer(request, DONE)
            seen = [(update.text, update.meta) async for update in turn]

        assert [text for text, _ in seen] == ["0", "1", "2", "3", "4"]
        assert [meta for _, meta in seen] == [{"seq": number} for number in numbers]
        assert handled == [{"seq": number} for number in numbers]


# ---------------------------------------------------------------- D6: streaming keeps nothing


_kept: list[object] = []


def keeps_all(original: Any, self: Inbox, raw: Any, frame: bytes) -> None:
    original(self, raw, frame)
    _kept.append(frame)
    self.connection.queued_bytes += len(frame)


@pytest.mark.covers("D6")
@controlled(keeps_all=changed(Inbox, "put", keeps_all))
async def test_each_update_is_seen_before_the_answer_and_none_is_kept() -> None:
    observed: list[str] = []

    async with opened(Client(on_update=lambda update: observed.append(update.text))) as (
        session,
        raw,
    ):
        connection = session.inbox.connection
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for number in range(100):
                raw.send(raw.update("s1", str(number)))
                update = await anext(turn)
                await turns()
                assert (update.text, observed[-1]) == (str(number), str(number))
                # What is in the hands of the consumer still counts, and nothing else does.
                assert connection.queued_bytes <= 2 * len(update.frame)
            assert not turn.ended
            raw.answer(request, DONE)
            assert [update async for update in turn] == []

        assert observed == [str(number) for number in range(100)]
        assert connection.queued_bytes == 0
        assert len(session.inbox.backlog) == 0


# ---------------------------------------------------------------- D7: to the turn they belong to


def to_the_last_turn(original: Any, self: Inbox, raw: Any, frame: bytes) -> None:
    """What comes late still goes to the turn that is over."""
    if not _kept and self.turn is not None:
        _kept.append(self.turn)
    mine, self.turn = self.turn, cast("Any", _kept[0]) if _kept else None
    original(self, raw, frame)
    self.turn = mine


@pytest.mark.covers("D7")
@controlled(to_the_last_turn=changed(Inbox, "put", to_the_last_turn))
async def test_what_comes_after_the_answer_is_of_no_turn_and_the_next_begins_anew() -> None:
    _kept.clear()
    async with opened() as (session, raw):
        stream = session.updates()
        first = session.prompt("one")
        async with first:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "in one"))
            raw.answer(request, DONE)
            raw.send(raw.update("s1", "late"))
            await raw.round_trip()
            assert [update.text async for update in first] == ["in one"]
        async with session.prompt("two") as second:
            request = await raw.wait("session/prompt", 2)
            raw.send(raw.update("s1", "in two"))
            raw.answer(request, DONE)
            async with asyncio.timeout(5):
                assert [update.text async for update in second] == ["in two"]

        seen = [await anext(stream) for _ in range(3)]
        assert [(update.text, update.label) for update in seen] == [
            ("in one", "turn"),
            ("late", "session"),
            ("in two", "turn"),
        ]
        stream.close()


@pytest.mark.covers("D7")
@controlled(under_one_name=on_the_wire(under_one_name))
async def test_interleaved_sessions_get_their_own_and_only_their_own() -> None:
    async with raw_agent() as (peer, raw):
        one, two = await open_session(peer, raw, "s1"), await open_session(peer, raw, "s2")
        prompting = [asyncio.ensure_future(session.prompt("go")) for session in (one, two)]
        requests = [await raw.wait("session/prompt", count) for count in (1, 2)]
        for number in range(10):
            raw.send(raw.update("s1", f"a{number}"), raw.update("s2", f"b{number}"))
        for request in reversed(requests):
            raw.answer(request, DONE)
        outcomes = [await prompt for prompt in prompting]

        for outcome, letter in zip(outcomes, "ab", strict=True):
            assert [update.text for update in outcome.updates] == [
                f"{letter}{number}" for number in range(10)
            ]
            assert {loads(update.frame)["params"]["sessionId"] for update in outcome.updates} == {
                f"s{'ab'.index(letter) + 1}"
            }
