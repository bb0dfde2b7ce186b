"""A turn's iterator waits in itself, without the coroutine of `UpdateQueue.wait`: both behave the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon import ConnectionClosed, Limits, PromptTurn
from antiphon.schema import v1
from antiphon.sessions._content import as_blocks
from antiphon.testing import raw_agent

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from antiphon import Update
    from antiphon.testing import RawPeer

CLOSING: dict[str, Any] = {"sessionCapabilities": {"close": {}}}

ACTS = st.sampled_from(
    [
        *("say",) * 4,
        *("take",) * 5,
        *("settle",) * 3,
        *("cancel a consumer", "close a consumer", "wake", "answer", "refuse", "stop"),
        *("close", "closed", "not closed", "lose", "end", "resume", "leave"),
    ]
)


class General(PromptTurn):
    """A turn that is iterated as everything else that has a queue."""

    async def __anext__(self) -> Update:
        queue = self._queue
        assert queue is not None
        while True:
            update = queue.take()
            if update is not None:
                return update
            if self._mark >= 0:
                await self._finish()
                raise StopAsyncIteration
            await queue.wait()


class Played:
    """One turn to which things happen, and an account of all that can be seen of it."""

    def __init__(self, turn: PromptTurn, raw: RawPeer, request: Any) -> None:
        self.turn = turn
        self.raw = raw
        self.request = request
        self.account: list[Any] = []
        self._consumers: list[asyncio.Task[str]] = []
        self._closing: list[asyncio.Task[None]] = []
        self._answered = False
        self._closes = 0  # of those that were asked for, how many have an answer
        self._said = 0

    async def _next(self) -> str:
        try:
            return (await anext(self.turn)).text
        except StopAsyncIteration:  # which no task may raise
            return "the end"

    async def act(self, act: str, number: int) -> None:
        turn, raw, consumers = self.turn, self.raw, self._consumers
        session = turn.session
        match act:
            case "say":
                for _ in range(number + 1):
                    raw.send(raw.update("s1", str(self._said)))
                    self._said += 1
            case "take":
                consumers.append(asyncio.ensure_future(self._next()))
            case "cancel a consumer" if consumers:
                consumers[number % len(consumers)].cancel()
            case "close a consumer":
                self.account.append(begun_and_closed(anext(turn)))
            case "wake":
                assert turn._queue is not None
                turn._queue.wake()
            case "answer" | "refuse" if not self._answered:
                self._answered = True
                if act == "answer":
                    raw.answer(self.request, {"stopReason": "end_turn"})
                else:
                    raw.refuse(self.request, -32000)
            case "stop":
                await turn.cancel(backstop=None)
            case "close":
                self._closing.append(asyncio.ensure_future(session.close()))
            case "closed" | "not closed" if len(raw.sent("session/close")) > self._closes:
                asked = raw.sent("session/close")[self._closes]
                self._closes += 1
                if act == "closed":
                    raw.answer(asked, {})
                else:
                    raw.refuse(asked, -32000)
            case "lose":
                session.inbox.connection.connection_lost(ConnectionClosed("cut"))
            case "end":
                turn.end(None, ConnectionClosed("as its records say"))
            case "resume":
                self.account.append("goes on" if turn.resume() else "is over")
            case "leave":
                turn.close()
            case _:
                pass
        await settle(number if act == "settle" else 0)
        self.look()

    def look(self) -> None:
        """Write down what can be seen now."""
        turn = self.turn
        queue, connection = turn._queue, turn.session.inbox.connection
        assert queue is not None
        self.account.append(
            (
                [outcome(task) for task in (*self._consumers, *self._closing)],
                queue.waiter is None or queue.waiter.done(),
                (len(queue), queue.held, queue.passed, queue.cut, queue.lost),
                (connection.queued_updates, connection.queued_bytes),
                "let go" if turn.session.forgotten else "kept",
                (turn.ended, repr(turn.response), turn._raised, repr(turn.error)),
            )
        )

    async def finish(self) -> None:
        await settle(20)
        self.look()
        for task in (*self._consumers, *self._closing):
            task.cancel()
        await asyncio.gather(*self._consumers, *self._closing, return_exceptions=True)
        self.look()
        self.turn.session.inbox.connection.connection_lost(ConnectionClosed("over"))
        self.turn.end(None, ConnectionClosed("over"))


async def settle(turns: int) -> None:
    """Let the loop turn so often."""
    for _ in range(turns):
        await asyncio.sleep(0)


def outcome(task: asyncio.Task[Any]) -> str:
    if not task.done():
        return "waits"
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return repr(task.result() if error is None else error)


def begun_and_closed(coroutine: Coroutine[Any, Any, Update]) -> str:
    """What comes of a consumer that no task runs, and that is closed where it has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as given:
        return str(given.value.text)
    except (Exception, asyncio.CancelledError) as error:
        return repr(error)
    coroutine.close()
    return "closed"


async def played(kind: type[PromptTurn], steps: list[tuple[str, int]]) -> list[Any]:
    # So few that a session that is being closed lets go of its turn.
    limits = Limits(queue_updates=5)
    async with raw_agent(None, CLOSING, limits=limits) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        session = await opening
        params = v1.PromptRequest(session_id="s1", prompt=as_blocks("go"))
        turn = kind(session, params, None, None)
        async with asyncio.timeout(60):  # of this loop's time, which jumps
            await turn.__aenter__()
            play = Played(turn, raw, await raw.wait("session/prompt"))
            for act, number in steps:
                await play.act(act, number)
            await play.finish()
        return play.account


def steps_of(text: str) -> list[tuple[str, int]]:
    return [(step.rstrip("0123456789 "), int(step[-1])) for step in text.split(", ")]


@settings(max_examples=150)
@given(st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=30))
@example(steps_of("take 0, settle 2, say 0, settle 3, take 0, settle 1, answer 0, settle 3"))
@example(steps_of("take 0, settle 1, take 0, settle 1, say 0, settle 3, take 0, settle 1"))
@example(steps_of("take 0, settle 1, cancel a consumer 0, settle 2, take 0, say 1, settle 3"))
@example(steps_of("close a consumer 0, close a consumer 0, take 0, say 0, settle 3"))
@example(steps_of("say 3, say 3, settle 3, close 0, settle 3, take 0, answer 0, settle 3"))
@example(steps_of("take 0, settle 1, wake 0, settle 1, lose 0, settle 1, take 0, resume 0, take 0"))
async def test_a_turn_is_iterated_as_if_it_waited_as_every_other_consumer_does(
    steps: list[tuple[str, int]],
) -> None:
    assert await played(PromptTurn, steps) == await played(General, steps)


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ("take 0, settle 1, say 0, settle 3", "'0'"),
        ("take 0, settle 1, answer 0, settle 3", "'the end'"),
        ("take 0, settle 1, refuse 0, settle 3", "AuthRequired"),
        ("take 0, settle 1, lose 0, settle 2", "ConnectionClosed"),
        ("take 0, settle 1, take 0, settle 1", "two tasks iterate"),
        ("take 0, settle 1, cancel a consumer 0, settle 2", "'cancelled'"),
        ("close a consumer 0, close a consumer 0", "'closed'"),
        ("say 3, say 3, settle 3, close 0, settle 3, answer 0, settle 3, take 0", "DeliveryGap"),
        ("take 0, settle 1, close 0, settle 3, closed 0, settle 3", "'let go'"),
        ("take 0, lose 0, settle 2, resume 0, take 0, settle 1, lose 0, settle 2", "'goes on'"),
    ],
)
async def test_each_way_that_a_wait_can_end_is_among_those_that_are_compared(
    steps: str, seen: str
) -> None:
    for kind in (PromptTurn, General):
        assert seen in repr(await played(kind, steps_of(steps)))
