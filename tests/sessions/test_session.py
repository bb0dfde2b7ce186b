"""Prompts and turns at the client: what arrives, in which order, and how a turn ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    Agent,
    Client,
    ConnectionClosed,
    DeliveryGap,
    Limits,
    LocalProtocolError,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    SilenceTimeout,
    TelemetryEvent,
    Turn,
    TurnInProgress,
    Update,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.testing import RawPeer, raw_agent
from tests.sessions.pairs import joined

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from antiphon import AgentPeer, PromptTurn, Session
    from antiphon.sessions import Subscription


async def opened(peer: AgentPeer, raw: RawPeer, session_id: str = "s1", **result: Any) -> Session:
    """A session of a raw agent."""
    opening = asyncio.create_task(peer.new_session(cwd="/"))
    count = len([f for f in raw.frames if f.get("method") == "session/new"]) + 1
    raw.answer(await raw.wait("session/new", count), {"sessionId": session_id, **result})
    return await opening


async def round_trip(peer: AgentPeer, raw: RawPeer) -> None:
    """Everything the raw side sent before has been read once this returns."""
    count = len([f for f in raw.frames if f.get("method") == "_x/ping"]) + 1
    asking = asyncio.create_task(peer.request_extension("_x/ping"))
    raw.answer(await raw.wait("_x/ping", count), {})
    await asking


def ends(request: dict[str, Any], reason: str = "end_turn", **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": {"stopReason": reason, **more}}


async def texts(updates: AsyncIterable[Update]) -> list[str]:
    return [update.text async for update in updates]


async def test_a_turn_gives_its_updates_in_order_and_then_its_answer() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            assert request["params"] == {
                "sessionId": "s1",
                "prompt": [{"type": "text", "text": "go"}],
            }
            usage = {"totalTokens": 3, "inputTokens": 1, "outputTokens": 2}
            raw.send(*(raw.update("s1", str(n)) for n in range(100)), ends(request, usage=usage))
            assert turn.stop_reason is None
            assert turn.response is None
            assert turn.usage is None
            assert await texts(turn) == [str(n) for n in range(100)]
        assert turn.stop_reason == "end_turn"
        assert turn.ended
        assert isinstance(turn.usage, v1_unstable.Usage)
        assert turn.usage.total_tokens == 3


async def test_an_awaited_prompt_gives_updates_and_answer() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "a"), raw.update("s1", "b"), ends(request, "max_tokens"))
        outcome = await running
        assert outcome.text == "ab"
        assert outcome.stop_reason == "max_tokens"
        assert outcome.usage is None
        updates, response = outcome
        assert [update.text for update in updates] == ["a", "b"]
        assert response.stop_reason == "max_tokens"


async def _outcome(session: Session) -> Any:
    return await session.prompt("go")


async def test_a_prompt_is_sent_on_entering_and_not_before() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        turn = session.prompt("go")
        with pytest.raises(LocalProtocolError, match="async with"):
            await anext(turn)
        assert session.turn is None
        async with turn:
            assert session.turn is turn
            raw.send(ends(await raw.wait("session/prompt")))
            assert await texts(turn) == []
        with pytest.raises(LocalProtocolError, match="sent already"):
            async with turn:
                pass


async def test_a_second_prompt_while_a_turn_is_open_is_refused_here() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            with pytest.raises(TurnInProgress) as refused:
                await session.prompt("again")
            assert refused.value.session_id == "s1"
            raw.send(ends(await raw.wait("session/prompt")))
            assert await texts(turn) == []
        assert len([f for f in raw.frames if f.get("method") == "session/prompt"]) == 1
        async with session.prompt("again") as second:  # the refusal left nothing behind
            raw.send(ends(await raw.wait("session/prompt", 2)))
            assert await texts(second) == []


async def test_an_error_answer_is_raised_after_the_updates_before_it() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        seen: list[str] = []
        with pytest.raises(RequestError) as failed:
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt")
                error = {"code": 400, "message": "quota", "data": ["x"]}
                raw.send(
                    raw.update("s1", "a"), {"jsonrpc": "2.0", "id": request["id"], "error": error}
                )
                async for update in turn:
                    seen += [update.text]
        assert seen == ["a"]
        assert (failed.value.code, failed.value.data) == (400, ["x"])
        assert session.turn is None


async def test_an_error_nobody_iterated_to_is_raised_when_the_block_is_left() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(RequestError):
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt")
                raw.send(
                    {"jsonrpc": "2.0", "id": request["id"], "error": {"code": 1, "message": ""}}
                )
                while not turn.ended:
                    await asyncio.sleep(0)


async def test_a_malformed_answer_is_an_error_of_the_peer() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        raw.answer(request, {"stopReason": 5})
        with pytest.raises(RemoteProtocolError, match="stopReason"):
            await running


@pytest.mark.covers("R1-91")
async def test_leaving_the_block_early_cancels_the_turn_and_waits_for_its_end() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)

        async def agent() -> None:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "a"), raw.update("s1", "b"))
            await raw.wait("session/cancel")
            raw.send(raw.update("s1", "late"), ends(request, "cancelled"))

        playing = asyncio.create_task(agent())
        async with session.prompt("go") as turn:
            async for update in turn:
                assert update.text == "a"
                break
        await playing
        assert turn.ended
        assert turn.stop_reason == "cancelled"
        assert session.turn is None
        assert peer.connection.queued_bytes == 0


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"code": -32000, "message": "no"}},
        {"error": {"code": -32800, "message": "Request cancelled"}},
        {"result": {"stopReason": 5}},
        {"result": None},
    ],
)
async def test_what_is_no_good_answer_to_a_turn_that_was_left_is_let_go(answer: object) -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)

        async def agent() -> None:
            request = await raw.wait("session/prompt")
            await raw.wait("session/cancel")
            assert isinstance(answer, dict)
            raw.send({"jsonrpc": "2.0", "id": request["id"], **answer})

        playing = asyncio.create_task(agent())
        async with session.prompt("go") as turn:
            pass
        await playing
        assert turn.ended
        assert turn.stop_reason is None
        assert session.turn is None


async def test_a_turn_that_was_left_shows_its_answer_when_its_observers_have_seen_all() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        seen: list[str] = []

        async def slow(update: Update) -> None:
            await asyncio.sleep(0)
            seen.append(update.text)

        session.on_update(slow)

        async def agent() -> None:
            request = await raw.wait("session/prompt")
            await raw.wait("session/cancel")
            raw.send(raw.update("s1", "late"), ends(request, "cancelled"))

        playing = asyncio.create_task(agent())
        async with session.prompt("go") as turn:
            pass
        await playing
        assert (turn.stop_reason, seen) == ("cancelled", ["late"])


@pytest.mark.covers("FF-29")
async def test_an_agent_that_never_answers_a_cancelled_turn_costs_the_back_stop_at_most() -> None:
    async with raw_agent(limits=Limits(cancel_backstop=0.05)) as (peer, raw):
        session = await opened(peer, raw)
        async with asyncio.timeout(5):
            async with session.prompt("go"):
                await raw.wait("session/prompt")
        assert session.turn is None
        await raw.wait("$/cancel_request")


async def test_an_error_in_the_middle_of_a_turn_cancels_it_and_goes_on_to_its_catcher() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        everything = session.updates()

        async def agent() -> None:
            request = await raw.wait("session/prompt")
            raw.send(*(raw.update("s1", str(n)) for n in range(5)))
            await raw.wait("session/cancel")
            raw.send(raw.update("s1", "late"), ends(request, "cancelled"))

        playing = asyncio.create_task(agent())
        turn = session.prompt("go")
        with pytest.raises(ValueError, match="trouble"):
            async with turn:
                async for update in turn:
                    if update.text == "2":
                        raise ValueError("trouble")
        await playing
        assert turn.stop_reason == "cancelled"
        # Who only looks on misses nothing of it.
        seen = [(await anext(everything)).text for _ in range(6)]
        assert seen == ["0", "1", "2", "3", "4", "late"]
        everything.close()
        assert peer.connection.queued_updates == 0


async def test_a_cancelled_task_leaves_a_turn_that_is_cancelled_too() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        running.cancel()
        await raw.wait("session/cancel")
        raw.send(ends(request, "cancelled"))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert session.turn is None


async def test_a_turn_that_was_given_up_twice_keeps_nothing_of_what_still_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "antiphon.telemetry")
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        running.cancel()
        await raw.wait("session/cancel")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        raw.send(*[raw.update("s1", "x" * 100) for _ in range(200)])
        await round_trip(peer, raw)
        assert peer.connection.queued_bytes == 0
        with pytest.raises(TurnInProgress):
            await session.prompt("too early")
        raw.send(ends(request, "cancelled"))
        await round_trip(peer, raw)
        assert "updates were not taken (session='s1', updates=200)" in caplog.text
        running = asyncio.ensure_future(_outcome(session))
        raw.send(raw.update("s1", "new"), ends(await raw.wait("session/prompt", 2)))
        assert (await running).text == "new"


async def test_leaving_a_block_ends_the_iteration_of_another_task_with_the_answer() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            reading = asyncio.create_task(texts(turn))
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "a"))
            await round_trip(peer, raw)
            canceller = asyncio.create_task(raw.wait("session/cancel"))
            canceller.add_done_callback(lambda _: raw.send(ends(request, "cancelled")))
        assert await asyncio.wait_for(reading, 5) == ["a"]
        assert turn.stop_reason == "cancelled"


@pytest.mark.covers("R1-90", "FF-24")
async def test_cancelling_keeps_the_updates_coming_until_the_answer() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await turn.cancel()
            await turn.cancel()
            await raw.wait("session/cancel")
            raw.send(raw.update("s1", "flushed"), ends(request, "cancelled"))
            assert await texts(turn) == ["flushed"]
        assert turn.stop_reason == "cancelled"
        await turn.cancel()  # over: nothing is sent (field fault 24)
        await session.cancel()
        async with session.prompt("go") as second:
            raw.send(ends(await raw.wait("session/prompt", 2)))
            assert await texts(second) == []
        cancels = [f for f in raw.frames if f.get("method") == "session/cancel"]
        assert len(cancels) == 2  # both came while the turn was open


@pytest.mark.covers("R1-92", "FF-26")
async def test_cancelling_answers_the_open_permission_requests_as_cancelled() -> None:
    asked, late = asyncio.Event(), asyncio.Event()

    async def decide(params: Any, ctx: Any) -> bool:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            late.set()
        return True

    async with raw_agent(Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            options = [{"optionId": "y", "name": "Yes", "kind": "allow_once"}]
            ask = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}, "options": options}
            raw.send(raw.request("p1", "session/request_permission", ask))
            await asyncio.wait_for(asked.wait(), 5)
            await turn.cancel()
            answer = await raw.answer_to("p1")
            assert answer["result"] == {"outcome": {"outcome": "cancelled"}}
            # One that crosses the cancel on the wire is answered the same way, without asking.
            raw.send(raw.request("p2", "session/request_permission", ask))
            answer = await raw.answer_to("p2")
            assert answer["result"] == {"outcome": {"outcome": "cancelled"}}
            await asyncio.wait_for(late.wait(), 5)
            raw.send(ends(request, "cancelled"))
            assert await texts(turn) == []
        assert len([f for f in raw.frames if f.get("id") in ("p1", "p2")]) == 2


@pytest.mark.covers("FF-29")
async def test_a_whole_turn_may_be_bounded_in_time() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(RequestTimeout, match="session/prompt"):
            await session.prompt("go", timeout=0.05)
        await raw.wait("$/cancel_request")
        await raw.wait("session/cancel")  # quirk 19: most agents know only this one


@pytest.mark.covers("FF-24")
async def test_what_still_comes_of_a_turn_that_timed_out_is_not_the_next_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "antiphon.telemetry")
    async with raw_agent(Client(permissions="allow"), {"loadSession": True}) as (peer, raw):
        session = await opened(peer, raw)
        everything = session.updates()
        with pytest.raises(RequestTimeout):
            await session.prompt("first", timeout=0.05)
        first = await raw.wait("session/prompt")
        second = asyncio.ensure_future(_outcome(session))
        third = asyncio.ensure_future(_outcome(session))
        given_up = asyncio.ensure_future(_outcome(session))
        raw.send(raw.update("s1", "late"))
        asked: dict[str, Any] = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}}
        asked["options"] = []
        answer = await raw.ask("session/request_permission", asked)
        assert answer["result"] == {"outcome": {"outcome": "cancelled"}}
        given_up.cancel()
        await round_trip(peer, raw)
        assert given_up.cancelled()
        assert len(raw.sent("session/prompt")) == 1
        with pytest.raises(TurnInProgress):
            await peer.load_session("s1", cwd="/")
        raw.send(ends(first, "cancelled"), raw.update("s1", "between"))
        raw.send(raw.update("s1", "new"), ends(await raw.wait("session/prompt", 2)))
        assert (await second).text == "new"
        with pytest.raises(TurnInProgress):
            await third
        seen = [((update := await anext(everything)).text, update.label) for _ in range(3)]
        assert seen == [("late", "turn"), ("between", "session"), ("new", "turn")]
        assert "updates were not taken (session='s1', updates=1)" in caplog.text
        everything.close()
        assert peer.connection.queued_bytes == 0


async def test_a_turn_that_timed_out_delays_the_next_prompt_by_the_back_stop_at_most() -> None:
    async with raw_agent(limits=Limits(cancel_backstop=0.05)) as (peer, raw):
        session = await opened(peer, raw)
        for count in (1, 2):
            with pytest.raises(RequestTimeout):
                await session.prompt("go", timeout=0.05)
            first = await raw.wait("session/prompt", count)
        last = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt", 3)
        raw.send(ends(first, "cancelled"), raw.update("s1", "x"), ends(request))
        assert (await last).text == "x"


async def test_whoever_waits_for_the_end_of_a_turn_that_timed_out_learns_of_a_lost_connection() -> (
    None
):
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(RequestTimeout):
            await session.prompt("go", timeout=0.05)
        waiting = asyncio.ensure_future(_outcome(session))
        await round_trip(peer, raw)
        await raw.transport.aclose()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(waiting, 5)


async def test_a_lost_connection_ends_the_turn_after_what_was_received() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        seen: list[str] = []
        with pytest.raises(ConnectionClosed):
            async with session.prompt("go") as turn:
                await raw.wait("session/prompt")
                raw.send(raw.update("s1", "a"))
                await raw.transport.aclose()
                async for update in turn:
                    seen += [update.text]
        assert seen == ["a"]


@pytest.mark.covers("FF-12")
async def test_the_end_reaches_a_turn_although_another_session_has_spent_the_budget() -> None:
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        await opened(peer, raw, "idle")
        busy = await opened(peer, raw, "busy")
        running = asyncio.ensure_future(_outcome(busy))
        await raw.wait("session/prompt")
        for _ in range(3):  # in several deliveries: reading stops after one
            raw.send(*[raw.update("idle", "x" * 100) for _ in range(100)])
            await asyncio.sleep(0)
        await raw.transport.aclose()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(running, 5)


@pytest.mark.covers("FF-19")
async def test_an_answer_that_was_read_is_given_although_the_link_is_gone() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "a"), ends(request))
            await raw.transport.aclose()
            await peer.wait_closed()
            assert await texts(turn) == ["a"]
        assert turn.stop_reason == "end_turn"


# ------------------------------------------------------------------ outside of turns


async def test_updates_outside_a_turn_go_to_the_session_labelled() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        subscription = session.updates()
        raw.send(raw.update("s1", "between"))
        first = await anext(subscription)
        assert (first.text, first.label) == ("between", "session")
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "in"), ends(request), raw.update("s1", "after"))
            assert [(u.text, u.label) async for u in turn] == [("in", "turn")]
        assert [
            (u.text, u.label) for u in (await anext(subscription), await anext(subscription))
        ] == [
            ("in", "turn"),
            ("after", "session"),
        ]
        subscription.close()
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


@pytest.mark.covers("FF-21")
async def test_an_update_right_behind_the_answer_to_session_new_is_not_lost() -> None:
    async with raw_agent() as (peer, raw):
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": {"sessionId": "s1"}}
        raw.send(raw.update("s1", "before"), answer, raw.update("s1", "behind"))
        session = await opening
        updates = session.updates()
        assert [(await anext(updates)).text for _ in range(2)] == ["before", "behind"]


async def test_every_subscriber_sees_every_update_once_and_in_order() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        subscriptions = [session.updates() for _ in range(3)]
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(*(raw.update("s1", str(n)) for n in range(50)), ends(request))
            expected = [str(n) for n in range(50)]
            assert await texts(turn) == expected
            for subscription in subscriptions:
                assert [(await anext(subscription)).text for _ in expected] == expected
        await raw.transport.aclose()
        for subscription in subscriptions:
            assert [update async for update in subscription] == []


async def test_a_subscription_that_was_left_by_a_break_keeps_nothing() -> None:
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        session = await opened(peer, raw)
        raw.send(raw.update("s1", "a"), raw.update("s1", "b"))
        async for update in session.updates():
            assert update.text == "a"
            break
        await round_trip(peer, raw)
        assert peer.connection.queued_bytes == 0
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for _ in range(200):
                raw.send(raw.update("s1", "x" * 100))
                assert (await anext(turn)).text == "x" * 100
            raw.send(ends(request))
            assert await texts(turn) == []
        assert peer.connection.queued_bytes == 0


async def test_a_session_can_be_iterated_itself() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        raw.send(raw.update("s1", "x"))
        async for update in session:
            assert update.text == "x"
            break


async def test_two_sessions_do_not_mix() -> None:
    async with raw_agent() as (peer, raw):
        one, two = await opened(peer, raw, "s1"), await opened(peer, raw, "s2")
        async with one.prompt("go") as first, two.prompt("go") as second:
            a, b = await raw.wait("session/prompt"), await raw.wait("session/prompt", 2)
            raw.send(
                *(raw.update(s, f"{s}-{n}") for n in range(20) for s in ("s1", "s2")),
                ends(b),
                ends(a),
            )
            assert await texts(second) == [f"s2-{n}" for n in range(20)]
            assert await texts(first) == [f"s1-{n}" for n in range(20)]


# ------------------------------------------------------------------ observers and the barrier


@pytest.mark.covers("FF-20")
async def test_observers_sync_and_async_see_all_updates_in_order() -> None:
    seen: list[str] = []
    labels: list[str] = []

    async def slow(update: Update) -> None:
        await asyncio.sleep(0)
        seen.append(update.text)

    def fast(update: Update) -> None:
        labels.append(update.label)

    async with raw_agent(Client(on_update=slow)) as (peer, raw):
        session = await opened(peer, raw)
        stop = session.on_update(fast)
        raw.send(raw.update("s1", "before"))
        await round_trip(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(*(raw.update("s1", str(n)) for n in range(20)), ends(request))
            assert len(await texts(turn)) == 20
            assert seen == ["before", *(str(n) for n in range(20))]
        stop()
        stop()
        raw.send(raw.update("s1", "unseen"))
        await round_trip(peer, raw)
        assert labels == ["session", *["turn"] * 20]


@pytest.mark.covers("FF-19")
async def test_an_answer_is_visible_only_after_the_observers_returned() -> None:
    gate, seen = asyncio.Event(), list[str]()

    async def observer(update: Update) -> None:
        await gate.wait()
        seen.append(update.text)

    async with raw_agent(Client(on_update=observer)) as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "a"), raw.update("s1", "b"), ends(request))
        mode = asyncio.create_task(session.set_mode("m"))
        raw.answer(await raw.wait("session/set_mode"), {})
        done, _ = await asyncio.wait([running, mode], timeout=0.05)
        assert not done
        gate.set()
        await asyncio.wait_for(asyncio.gather(running, mode), 5)
        assert seen == ["a", "b"]


@pytest.mark.covers("FF-13")
async def test_an_observer_may_call_the_agent_about_its_own_session() -> None:
    done = asyncio.Event()
    session: Session

    async def observer(update: Update) -> None:
        await session.set_mode("m")
        await asyncio.create_task(session.set_mode("child"))
        done.set()

    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        session.on_update(observer)
        raw.send(raw.update("s1", "x"))
        raw.answer(await raw.wait("session/set_mode"), {})
        raw.answer(await raw.wait("session/set_mode", 2), {})
        await asyncio.wait_for(done.wait(), 5)


async def test_an_observer_that_fails_is_logged_and_the_next_update_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    def observer(update: Update) -> None:
        seen.append(update.text)
        if update.text == "a":
            raise ValueError("observer trouble")

    async with raw_agent(Client(on_update=observer)) as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "a"), raw.update("s1", "b"), ends(request))
        await running
    assert seen == ["a", "b"]
    assert "observer trouble" in caplog.text


class Hard(BaseException):
    """What test frameworks, gevent and Rust extensions raise: no `Exception`."""


async def cancels_its_own_work(update: Update) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def raises_hard(update: Update) -> None:
    raise Hard


def returns_what_nobody_awaits(update: Update) -> Any:
    return update.text


@pytest.mark.covers("FF-17")
@pytest.mark.parametrize("act", [cancels_its_own_work, raises_hard, returns_what_nobody_awaits])
async def test_whatever_an_observer_does_it_sees_the_next_update(act: Any) -> None:
    seen: list[str] = []

    def observer(update: Update) -> Any:
        seen.append(update.text)
        return act(update)

    async with raw_agent(Client(on_update=observer)) as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "a"), raw.update("s1", "b"), ends(request))
        await running
        assert seen == ["a", "b"]
        assert peer.connection.queued_bytes == 0


async def test_an_overridden_session_update_handler_is_an_observer() -> None:
    seen: list[Any] = []

    class Mine(Client):
        async def session_update(self, params: v1_unstable.SessionNotification, ctx: Any) -> None:
            seen.append((params.session_id, params.update, params.meta, ctx.session.session_id))

    async with raw_agent(Mine()) as (peer, raw):
        session = await opened(peer, raw)
        running = asyncio.ensure_future(_outcome(session))
        request = await raw.wait("session/prompt")
        notification = raw.update("s1", "a")
        notification["params"]["_meta"] = {"k": 1}
        raw.send(notification, ends(request))
        await running
    ((session_id, update, meta, known),) = seen
    assert session_id == known == "s1"
    assert isinstance(update, v1.AgentMessageChunk)
    assert meta == {"k": 1}


async def test_iterating_and_calling_never_deadlocks_even_over_the_budget() -> None:
    limits = Limits(queue_bytes=150_000)

    class Chatty(Agent):
        async def prompt(self, turn: Turn) -> None:
            for number in range(3000):
                await turn.say(f"{number} " + "x" * 200)

        async def set_session_mode(self, params: Any, ctx: Any) -> v1.SetSessionModeResponse:
            return v1.SetSessionModeResponse()

    async with joined(Chatty(), limits=limits) as (peer, _):
        session = await peer.new_session(cwd="/")
        count = 0
        async with session.prompt("go") as turn:
            async for _update in turn:
                if count % 500 == 0:
                    await session.set_mode("m")
                count += 1
        assert count == 3000
        assert turn.stop_reason == "end_turn"


# ------------------------------------------------------------------ what a session knows


async def test_modes_and_options_are_those_of_the_answers() -> None:
    modes = {"currentModeId": "a", "availableModes": [{"id": "a", "name": "A"}]}
    option = {
        "id": "o",
        "name": "O",
        "type": "select",
        "currentValue": "1",
        "options": [{"value": "1", "name": "One"}, {"value": "2", "name": "Two"}],
    }
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw, modes=modes, configOptions=[option])
        assert session.modes is not None
        assert session.modes.current_mode_id == "a"
        assert session.config_options is not None
        assert session.config_options[0].current_value == "1"
        changing = asyncio.create_task(session.set_config_option("o", "2"))
        request = await raw.wait("session/set_config_option")
        assert request["params"] == {"sessionId": "s1", "configId": "o", "value": "2"}
        raw.answer(request, {"configOptions": [{**option, "currentValue": "2"}]})
        assert (await changing)[0].current_value == "2"
        assert session.config_options[0].current_value == "2"
        switching = asyncio.create_task(session.set_config_option("b", True))
        request = await raw.wait("session/set_config_option", 2)
        assert request["params"] == {
            "sessionId": "s1",
            "configId": "b",
            "type": "boolean",
            "value": True,
        }
        # Nothing, where the full list is due: what was known, with the change (quirk 8).
        raw.answer(request, {})
        assert [(o.id, o.current_value) for o in await switching] == [("o", "2")]
        changing = asyncio.create_task(session.set_config_option("o", "1"))
        raw.answer(await raw.wait("session/set_config_option", 3), {})
        assert [(o.id, o.current_value) for o in await changing] == [("o", "1")]
        assert session.config_options[0].current_value == "1"
        bare = await opened(peer, raw, "s2")
        assert bare.modes is None
        assert bare.config_options is None
        assert repr(bare) == "<Session 's2' in '/'>"


# ------------------------------------------------------------------ load


async def test_replayed_history_is_labelled_and_ends_where_the_answer_stands() -> None:
    async with raw_agent(capabilities={"loadSession": True}) as (peer, raw):
        async with peer.load_session("s1", cwd="/") as session:
            request = await raw.wait("session/load")
            raw.send(
                raw.update("s1", "old 1"),
                raw.update("s1", "old 2"),
                {"jsonrpc": "2.0", "id": request["id"], "result": None},
                raw.update("s1", "new"),
            )
            replay = session.replay()
            assert [(u.text, u.label) async for u in replay] == [
                ("old 1", "replay"),
                ("old 2", "replay"),
            ]
            fresh = await anext(session.updates())
            assert (fresh.text, fresh.label) == ("new", "session")
        assert session.response is not None
        assert [u async for u in session.replay()] == []


async def test_a_loaded_session_keeps_its_history_for_whoever_asks_later() -> None:
    async with raw_agent(capabilities={"loadSession": True}) as (peer, raw):
        loading = asyncio.ensure_future(_load(peer))
        request = await raw.wait("session/load")
        raw.send(raw.update("s1", "old"), {"jsonrpc": "2.0", "id": request["id"], "result": {}})
        session = await loading
        assert [(u.text, u.label) async for u in session.replay()] == [("old", "replay")]


async def _load(peer: AgentPeer) -> Session:
    return await peer.load_session("s1", cwd="/")


async def test_a_replay_leaves_what_is_no_history_to_the_next_subscriber() -> None:
    async with raw_agent(capabilities={"loadSession": True}) as (peer, raw):
        session = await opened(peer, raw)
        raw.send(raw.update("s1", "commands"))
        await round_trip(peer, raw)
        loading = asyncio.ensure_future(_load(peer))
        request = await raw.wait("session/load")
        raw.send(
            raw.update("s1", "old"),
            {"jsonrpc": "2.0", "id": request["id"], "result": {}},
            raw.update("s1", "new"),
        )
        assert await loading is session
        await round_trip(peer, raw)
        assert [u.text async for u in session.replay()] == ["old"]
        updates = session.updates()
        assert [(await anext(updates)).text for _ in range(2)] == ["commands", "new"]


async def test_closing_a_session_lets_go_of_what_nobody_took_and_reading_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "antiphon.telemetry")
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    async with raw_agent(capabilities=capabilities, limits=Limits(queue_bytes=2000)) as (peer, raw):
        idle, other = await opened(peer, raw), await opened(peer, raw, "s2")
        lazy = idle.updates()
        raw.send(*(raw.update("s1", "x" * 100) for _ in range(30)))
        while peer.connection.queued_bytes < 2000:
            await asyncio.sleep(0)
        raw.send(*(raw.update("s1", "behind") for _ in range(30)), raw.update("s2", "unread"))
        closing = asyncio.create_task(idle.close())
        raw.answer(await raw.wait("session/close"), {})
        await closing
        assert [update async for update in lazy] == []
        assert "updates were not taken (session='s1', updates=30)" in caplog.text
        assert (await anext(other.updates())).text == "unread"
        assert peer.connection.queued_bytes < 2000


async def test_a_lost_link_ends_a_turn_at_once_whatever_an_observer_is_doing() -> None:
    async with raw_agent() as (agent, raw):
        session = await opened(agent, raw)
        gate, begun = asyncio.Event(), asyncio.Event()

        async def slow(update: Update) -> None:
            begun.set()
            await gate.wait()

        session.on_update(slow)
        raw.send(raw.update("s1", "x"))
        await begun.wait()

        async def prompt() -> None:
            with pytest.raises(ConnectionClosed):
                await session.prompt("hello")

        prompting = asyncio.create_task(prompt())
        await raw.wait("session/prompt")
        await raw.transport.aclose()
        await asyncio.wait(
            [prompting], timeout=0.5
        )  # the observer alone may take the closing grace
        over = prompting.done()
        gate.set()
        await prompting

        assert over


@pytest.mark.parametrize("what", ["set_mode", "load"])
async def test_an_error_answer_is_visible_only_after_the_observers_returned(what: str) -> None:
    async with raw_agent(None, {"loadSession": True}) as (agent, raw):
        session = await opened(agent, raw)
        gate = asyncio.Event()
        seen: list[str] = []

        async def slow(update: Update) -> None:
            await gate.wait()
            seen.append(update.text)

        session.on_update(slow)

        async def call() -> list[str]:
            with pytest.raises(RequestError):
                await (agent.load_session("s1") if what == "load" else session.set_mode("m"))
            return list(seen)

        calling = asyncio.create_task(call())
        request = await raw.wait(f"session/{what}")
        raw.send(raw.update("s1", "before"))
        raw.refuse(request, -32602)
        await raw.round_trip()
        gate.set()

        assert await calling == ["before"]


async def test_what_follows_a_refused_close_in_the_same_read_is_delivered() -> None:
    async with raw_agent(None, {"sessionCapabilities": {"close": {}}}) as (agent, raw):
        session = await opened(agent, raw)

        async def close() -> None:
            with pytest.raises(RequestError):
                await session.close()

        closing = asyncio.create_task(close())
        request = await raw.wait("session/close")
        refusal = {"id": request["id"], "error": {"code": -32603, "message": "no"}}
        raw.send({"jsonrpc": "2.0", **refusal}, raw.update("s1", "after"))
        await closing

        assert (await anext(session.updates())).text == "after"


# ------------------------------------------------------------------ a prompt is a coroutine as well


async def test_a_prompt_can_be_given_to_tasks_and_groups_like_a_coroutine() -> None:
    async with raw_agent() as (peer, raw):
        sessions = [await opened(peer, raw, f"s{n}") for n in range(3)]
        tasks = [asyncio.create_task(sessions[0].prompt("go"))]
        assert "coro=<PromptTurn()" in repr(tasks[0])
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(sessions[1].prompt("go")))
            both = asyncio.gather(tasks[0], sessions[2].prompt("go"))
            for count in (1, 2, 3):
                request = await raw.wait("session/prompt", count)
                session_id = request["params"]["sessionId"]
                raw.send(raw.update(session_id, session_id), ends(request))
            outcomes = await both
        assert [outcome.text for outcome in (*outcomes, tasks[1].result())] == ["s0", "s2", "s1"]


async def test_a_task_that_is_cancelled_before_it_begins_sends_no_prompt() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        task = asyncio.create_task(session.prompt("go"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        turn = session.prompt("never used")
        turn.close()  # as whoever was given a coroutine and has no use for it
        await round_trip(peer, raw)
        assert raw.sent("session/prompt") == []
        task = asyncio.create_task(session.prompt("go"))
        request = await raw.wait("session/prompt")
        task.cancel()
        await raw.wait("session/cancel")
        raw.send(ends(request, "cancelled"))
        with pytest.raises(asyncio.CancelledError):
            await task


# ------------------------------------------------------------------ how long a cancelled turn may take


@pytest.mark.covers("FF-29")
@pytest.mark.parametrize("through", ["turn", "session"])
async def test_a_turn_that_was_cancelled_and_is_not_answered_ends_at_the_back_stop(
    through: str,
) -> None:
    async with raw_agent(limits=Limits(cancel_backstop=0.05)) as (peer, raw):
        session = await opened(peer, raw)
        seen: list[str] = []
        with pytest.raises(RequestTimeout, match="session/prompt"):
            async with session.prompt("go") as turn:
                await raw.wait("session/prompt")
                await (turn if through == "turn" else session).cancel()
                raw.send(raw.update("s1", "still"))
                async for update in turn:
                    seen += [update.text]
        assert seen == ["still"]
        assert session.turn is None
        await raw.wait("$/cancel_request")
        running = asyncio.ensure_future(_outcome(session))
        raw.send(ends(await raw.wait("session/prompt", 2)))
        assert (await running).stop_reason == "end_turn"


@pytest.mark.virtual_time
async def test_the_bound_of_a_cancelled_turn_can_be_chosen_and_only_shortened() -> None:
    loop = asyncio.get_running_loop()
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        for bounds, lasts in (((100.0, 7.0, 50.0), 7.0), ((2.0, None), 2.0)):
            begin = loop.time()
            with pytest.raises(RequestTimeout):
                async with session.prompt("go") as turn:
                    for bound in bounds:
                        await turn.cancel(backstop=bound)
                    await texts(turn)
            assert loop.time() - begin == pytest.approx(lasts)


@pytest.mark.virtual_time
async def test_an_agent_of_the_same_patience_is_heard_when_its_own_back_stop_is_over() -> None:
    class Deaf(Agent):
        async def prompt(self, turn: Turn) -> None:
            await asyncio.Event().wait()

    async with joined(Deaf()) as (peer, _):
        session = await peer.new_session(cwd="/")
        async with session.prompt("go") as turn:
            await turn.cancel()
            assert await texts(turn) == []
        assert turn.stop_reason == "cancelled"


@pytest.mark.virtual_time
async def test_without_a_bound_a_cancelled_turn_waits_until_it_is_left() -> None:
    loop = asyncio.get_running_loop()
    async with raw_agent(limits=Limits(cancel_backstop=30.0)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            await turn.cancel(backstop=None)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(turn), 3600)
            begin = loop.time()
        assert loop.time() - begin == pytest.approx(30.0)


@pytest.mark.virtual_time
async def test_cancelling_and_then_leaving_takes_the_back_stop_once() -> None:
    loop = asyncio.get_running_loop()
    async with raw_agent(limits=Limits(cancel_backstop=30.0)) as (peer, raw):
        session = await opened(peer, raw)
        begin = loop.time()
        async with session.prompt("go") as turn:
            await turn.cancel()
            await asyncio.sleep(20)
        assert loop.time() - begin == pytest.approx(31.0)
        assert session.turn is None


async def test_an_answer_in_time_ends_the_bound_with_the_turn() -> None:
    async with raw_agent(limits=Limits(cancel_backstop=0.05)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await turn.cancel()
            raw.send(ends(request, "cancelled"))
            assert await texts(turn) == []
        async with session.prompt("again") as second:
            request = await raw.wait("session/prompt", 2)
            await asyncio.sleep(0.1)  # the first turn's bound would have been met by now
            raw.send(ends(request))
            assert await texts(second) == []
        assert second.stop_reason == "end_turn"


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("how", ["left", "cancelled"])
async def test_a_turn_being_cancelled_gets_its_answer_past_a_budget_that_another_has_spent(
    how: str,
) -> None:
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        idle, busy = await opened(peer, raw, "idle"), await opened(peer, raw, "busy")
        async with busy.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(*[raw.update("idle", "x" * 100) for _ in range(60)])
            while not peer.connection.reading_paused:
                await asyncio.sleep(0)
            raw.send(raw.update("idle", "one more"), ends(request, "cancelled"))
            if how == "cancelled":
                await turn.cancel()
                assert await texts(turn) == []
        assert turn.stop_reason == "cancelled"
        idle.updates().close()
        assert peer.connection.queued_bytes == 0


async def test_a_turn_that_was_cancelled_may_be_iterated_however_much_still_comes() -> None:
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await turn.cancel()
            for number in range(30):
                raw.send(*(raw.update("s1", f"{number}-{n}") for n in range(10)))
                await asyncio.sleep(0)
            assert peer.connection.reading_paused
            raw.send(ends(request, "cancelled"))
            got: list[str] = []
            async for update in turn:
                got.append(update.text)
                await asyncio.sleep(0)
        assert got == [f"{number}-{n}" for number in range(30) for n in range(10)]
        assert turn.stop_reason == "cancelled"
        assert peer.connection.queued_bytes == 0


# ------------------------------------------------------------------ silence


@pytest.mark.virtual_time
@pytest.mark.covers("FF-29")
async def test_an_agent_that_gives_no_sign_of_life_is_given_up() -> None:
    loop = asyncio.get_running_loop()
    async with raw_agent(Client()) as (peer, raw):
        session = await opened(peer, raw)
        begin = loop.time()
        seen: list[str] = []
        with pytest.raises(SilenceTimeout) as silent:
            async with session.prompt("go", silence=80) as turn:
                await raw.wait("session/prompt")
                raw.send(raw.update("s1", "a"))
                async for update in turn:
                    seen += [update.text]
        assert seen == ["a"]
        assert isinstance(silent.value, RequestTimeout)
        assert silent.value.seconds == 80
        assert 80 <= loop.time() - begin <= 90  # an eighth more at most
        await raw.wait("$/cancel_request")
        await raw.wait("session/cancel")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "sign", ["update", "request", "open request", "decided request", "notification"]
)
async def test_an_agent_that_gives_signs_of_life_may_take_its_time(sign: str) -> None:
    released = asyncio.Event()

    async def decide(params: Any, ctx: Any) -> bool:
        await released.wait()
        return True

    class Listening(Client):
        @extension("_x/beat")
        async def beat(self, params: Any, ctx: Any) -> None:
            return None

        @extension("_x/hello", kind="notification")
        async def hello(self, params: Any, ctx: Any) -> None:
            return None

    loop = asyncio.get_running_loop()
    ask: dict[str, Any] = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}, "options": []}
    policy: Any = "deny" if sign == "decided request" else decide
    async with raw_agent(Listening(permissions=policy)) as (peer, raw):
        session = await opened(peer, raw)
        begin = loop.time()

        async def agent() -> None:
            request = await raw.wait("session/prompt")
            if sign == "open request":
                raw.send(raw.request("p", "session/request_permission", ask))
            for number in range(10):
                await asyncio.sleep(70)
                if sign == "update":
                    raw.send(raw.update("s1", "x"))
                elif sign == "request":
                    raw.send(raw.request(number, "_x/beat", {"sessionId": "s1"}))
                elif sign == "decided request":
                    assert "result" in await raw.ask("session/request_permission", ask)
                elif sign == "notification":
                    raw.send(raw.notification("_x/hello", {"sessionId": "s1"}))
            released.set()
            raw.send(ends(request))

        playing = asyncio.create_task(agent())
        async with session.prompt("go", silence=80) as turn:
            await texts(turn)
        await playing
        assert turn.stop_reason == "end_turn"
        assert loop.time() - begin == pytest.approx(700)


@pytest.mark.virtual_time
async def test_what_other_sessions_do_is_no_sign_of_life() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        await opened(peer, raw, "s2")

        async def other() -> None:
            while True:
                await asyncio.sleep(20)
                raw.send(raw.update("s2", "x"), raw.request("r", "_x/y", {"sessionId": "s2"}))

        talking = asyncio.create_task(other())
        with pytest.raises(SilenceTimeout):
            await session.prompt("go", silence=80)
        talking.cancel()


@pytest.mark.virtual_time
async def test_a_client_that_does_not_listen_takes_nothing_for_silence() -> None:
    async with raw_agent(limits=Limits(queue_bytes=1000)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go", silence=80) as turn:
            request = await raw.wait("session/prompt")
            raw.send(*(raw.update("s1", "x" * 100) for _ in range(20)))
            await asyncio.sleep(10)
            raw.send(ends(request))
            await asyncio.sleep(1000)
            assert peer.connection.reading_paused
            assert len(await texts(turn)) == 20
        assert turn.stop_reason == "end_turn"


@pytest.mark.virtual_time
async def test_silence_has_a_default_and_ends_with_the_turn_or_its_cancellation() -> None:
    loop = asyncio.get_running_loop()
    async with raw_agent(limits=Limits(silence_timeout=8.0)) as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(SilenceTimeout):
            await session.prompt("go")
        raw.send(ends(await raw.wait("session/prompt"), "cancelled"))
        begin = loop.time()
        with pytest.raises(RequestTimeout) as late:
            async with session.prompt("go") as turn:
                await turn.cancel(backstop=100)
                await texts(turn)
        assert type(late.value) is RequestTimeout
        assert loop.time() - begin == pytest.approx(100)
        async with session.prompt("go", silence=None) as turn:
            request = await raw.wait("session/prompt", 3)
            await asyncio.sleep(1000)
            raw.send(ends(request))
            assert await texts(turn) == []
        assert session.watch is None


# ------------------------------------------------------------------ the view


@pytest.mark.covers("R1-93")
async def test_the_view_of_a_session_follows_its_turns() -> None:
    async with raw_agent(Client(permissions="allow")) as (peer, raw):
        session = await opened(peer, raw, modes=MODES)
        raw.send(raw.update("s1", "welcome"))
        await round_trip(peer, raw)
        view = session.view
        assert session.view is view
        assert view.mode == "a"
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            call = {"sessionUpdate": "tool_call", "toolCallId": "t1", "title": "Run"}
            raw.send(raw.update("s1", "I will"), update("s1", call))
            asked: dict[str, Any] = {"sessionId": "s1", "options": []}
            asked["toolCall"] = {"toolCallId": "t2", "title": "Asked for"}
            await raw.ask("session/request_permission", asked)
            assert [call.title for call in view.tool_calls.values()] == ["Run", "Asked for"]
            await turn.cancel()
            assert [call.state for call in view.tool_calls.values()] == ["cancelled"] * 2
            raw.send(raw.update("s1", "stopped"), ends(request, "cancelled"))
            await texts(turn)
        async with session.prompt("again") as turn:
            request = await raw.wait("session/prompt", 2)
            call = {"sessionUpdate": "tool_call", "toolCallId": "t3", "title": "Stopped"}
            raw.send(raw.update("s1", "yes"), update("s1", call), ends(request, "cancelled"))
            await texts(turn)
        assert [(message.kind, message.text) for message in view.messages] == [
            ("agent", "welcome"),
            ("user", "go"),
            ("agent", "I will"),
            ("agent", "stopped"),
            ("user", "again"),
            ("agent", "yes"),
        ]
        assert view.tool_calls["t3"].state == "cancelled"  # the answer says so
        assert peer.connection.queued_updates == 0


@pytest.mark.covers("R1-93")
async def test_a_turn_that_times_out_marks_its_tool_calls_in_the_view() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        view = session.view
        with pytest.raises(RequestTimeout):
            async with session.prompt("go", timeout=0.05) as turn:
                await raw.wait("session/prompt")
                call = {"sessionUpdate": "tool_call", "toolCallId": "t1", "title": "Run"}
                raw.send(update("s1", call))
                await texts(turn)
        assert view.tool_calls["t1"].state == "cancelled"
        request = await raw.wait("session/prompt")
        late = {"sessionUpdate": "tool_call", "toolCallId": "t2", "title": "Late"}
        raw.send(update("s1", late), ends(request, "cancelled"))
        await round_trip(peer, raw)
        assert view.tool_calls["t2"].state == "cancelled"
        another = {"sessionUpdate": "tool_call", "toolCallId": "t3", "title": "Between"}
        raw.send(update("s1", another))
        await round_trip(peer, raw)
        assert view.tool_calls["t3"].state == "pending"


async def test_what_is_changed_from_here_shows_in_the_view_in_its_place() -> None:
    option = {"id": "o", "name": "O", "type": "boolean", "currentValue": False}
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw, modes=MODES, configOptions=[option])
        view = session.view
        changing = asyncio.create_task(session.set_mode("b"))
        request = await raw.wait("session/set_mode")
        # The agent changes it again in the same breath: what stands last on the wire counts.
        again = {"sessionUpdate": "current_mode_update", "currentModeId": "a"}
        raw.send({"jsonrpc": "2.0", "id": request["id"], "result": {}}, update("s1", again))
        await changing
        await round_trip(peer, raw)
        assert view.mode == "a"
        for answer, value in (
            ({"configOptions": [{**option, "currentValue": True}]}, True),
            ({}, False),
        ):
            setting = asyncio.create_task(session.set_config_option("o", value))
            count = len(raw.sent("session/set_config_option")) + 1
            raw.answer(await raw.wait("session/set_config_option", count), answer)
            await setting
            assert view.config_options is not None
            assert [each.current_value for each in view.config_options] == [value]
        refused = asyncio.create_task(session.set_mode("zzz"))
        raw.refuse(await raw.wait("session/set_mode", 2), -32602)
        with pytest.raises(RequestError):
            await refused
        assert view.mode == "a"


async def test_a_view_that_is_looked_at_during_a_load_has_the_history_and_the_new_modes() -> None:
    async with raw_agent(capabilities={"loadSession": True}) as (peer, raw):
        for count, history in ((1, ["old"]), (2, ["old", "newer"]), (3, [])):
            async with peer.load_session("s1", cwd="/") as session:
                view = session.view
                request = await raw.wait("session/load", count)
                answer = {"jsonrpc": "2.0", "id": request["id"], "result": {"modes": MODES}}
                raw.send(*(raw.update("s1", text) for text in history), answer)
            assert view.mode == "a"
            # One that replays nothing leaves what is known.
            assert [m.text for m in view.messages] == ["".join(history) or "oldnewer"]
        await round_trip(peer, raw)
        raw.send(raw.update("s1", "live"))
        await round_trip(peer, raw)
        assert [m.text for m in view.messages] == ["oldnewer", "live"]


async def test_a_view_in_the_middle_of_a_turn_begins_there() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "missed"))
            assert (await anext(turn)).text == "missed"
            view = session.view
            raw.send(raw.update("s1", "seen"), ends(request))
            assert await texts(turn) == ["seen"]
        assert [m.text for m in view.messages] == ["seen"]


# ------------------------------------------------------------------ telemetry


async def test_with_a_hook_each_update_of_a_turn_is_told_with_its_place() -> None:
    events: list[TelemetryEvent] = []
    async with raw_agent(telemetry=events.append) as (peer, raw):
        session = await opened(peer, raw)
        raw.send(raw.update("s1", "of no turn"))
        await round_trip(peer, raw)
        for number in (1, 2):
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt", number)
                raw.send(raw.update("s1", "a"), raw.update("s1", "b"), ends(request))
                assert await texts(turn) == ["a", "b"]
    told = [event.facts for event in events if event.name == "delivery"]
    assert [(facts["turn"], facts["ordinal"], facts["decision"]) for facts in told] == [
        (turn, ordinal, "emit") for turn in (1, 2) for ordinal in (0, 1)
    ]


async def test_a_subscription_made_in_a_hook_begins_with_the_next_update() -> None:
    subscriptions: list[Subscription] = []
    session: Session | None = None

    def hook(event: TelemetryEvent) -> None:
        if session is not None and event.name == "delivery" and event.facts["ordinal"] == 1:
            subscriptions.append(session.updates())

    async with raw_agent(telemetry=hook) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(*(raw.update("s1", text) for text in "abcd"), ends(request))
            assert await texts(turn) == ["a", "b", "c", "d"]
    (subscription,) = subscriptions
    assert await texts(subscription) == ["c", "d"]


@pytest.mark.parametrize("many", ["updates", "bytes"])
async def test_a_session_that_nobody_iterates_is_reported_once_it_is_full(
    many: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[TelemetryEvent] = []
    small = Limits(session_updates=50) if many == "updates" else Limits(session_bytes=5_000)
    async with raw_agent(limits=small, telemetry=events.append) as (peer, raw):
        session = await opened(peer, raw)
        for _ in range(3):
            raw.send(*(raw.update("s1", "x") for _ in range(60)))
            await round_trip(peer, raw)
        (report,) = [event.facts for event in events if event.name == "session_full"]
        assert (report["session"], report["updates"]) == ("s1", 60)
        assert [r.levelname for r in caplog.records if "'s1'" in r.getMessage()] == ["WARNING"]
        updates = session.updates()
        for _ in range(180):
            await anext(updates)
        emptied = asyncio.ensure_future(anext(updates))
        await round_trip(peer, raw)
        raw.send(*(raw.update("s1", "x") for _ in range(60)))
        await emptied
        await round_trip(peer, raw)
        assert len([event for event in events if event.name == "session_full"]) == 2


@pytest.mark.alarms("delivery")
@pytest.mark.parametrize("form", ["iterated", "awaited", "left"])
async def test_a_turn_that_was_not_given_all_that_arrived_raises_an_alarm(form: str) -> None:
    events: list[TelemetryEvent] = []
    async with raw_agent(telemetry=events.append) as (peer, raw):
        session = await opened(peer, raw)

        async def lose() -> None:
            """What only a mistake of ours could do."""
            request = await raw.wait("session/prompt")
            raw.send(raw.update("s1", "a"), raw.update("s1", "b"))
            await round_trip(peer, raw)
            queue = session.inbox.turn
            assert queue is not None
            if form != "awaited":
                lost = queue.items.pop()
                queue.size -= len(lost.frame)
                peer.connection.release(len(lost.frame), 1)
            else:
                queue.passed += 1  # as if one had been delivered twice
            raw.send(ends(request))
            await round_trip(peer, raw)

        losing = asyncio.create_task(lose())
        with pytest.raises(DeliveryGap) as gap:
            if form == "awaited":
                await session.prompt("go")
            else:
                async with session.prompt("go") as turn:
                    await losing
                    if form == "iterated":
                        await texts(turn)
        await losing
        delivered = 3 if form == "awaited" else 1
        assert (gap.value.delivered, gap.value.expected) == (delivered, 2)
        (told,) = [e.facts for e in events if e.facts.get("decision") == "fail"]
        assert (told["session"], told["turn"], told["expected"]) == ("s1", 1, 2)
        assert session.turn is None


@pytest.mark.parametrize("closes", [1, 2])
@pytest.mark.parametrize("how", ["iterated", "left"])
@pytest.mark.parametrize("agreed", [False, True])
async def test_a_turn_that_a_close_cut_with_the_budget_spent_ends_with_a_gap(
    how: str,
    closes: int,
    agreed: bool,
) -> None:
    paused = asyncio.Event()

    def hear(event: TelemetryEvent) -> None:
        if event.name == "reading_paused":
            paused.set()

    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    limits = Limits(queue_bytes=1000)
    async with raw_agent(None, capabilities, limits=limits, telemetry=hear) as (peer, raw):
        session = await opened(peer, raw)
        prompt = session.prompt("x")
        await prompt.__aenter__()
        request = await raw.wait("session/prompt")
        raw.send(*[raw.update("s1", str(number)) for number in range(8)])
        await paused.wait()
        closing = [asyncio.create_task(session.close()) for _ in range(closes)]
        for count in range(1, closes + 1):
            close = await raw.wait("session/close", count)
            if agreed and count == closes:
                raw.answer(close, {})
            else:
                raw.refuse(close, -32000)
        errors = await asyncio.gather(*closing, return_exceptions=True)
        assert [
            error for error in errors if error is not None and not isinstance(error, RequestError)
        ] == []
        errors = await asyncio.gather(*closing, return_exceptions=True)
        assert all(error is None or isinstance(error, RequestError) for error in errors)
        raw.send(raw.update("s1", "late"), ends(request))
        if how == "left":
            await prompt.__aexit__(None, None, None)
            assert prompt.stop_reason == "end_turn"
        else:
            with pytest.raises(DeliveryGap) as gap:
                await texts(prompt)
            assert (gap.value.expected, gap.value.delivered < 9) == (9, True)


@pytest.mark.parametrize("spent", [False, True])
async def test_a_turn_that_was_left_is_not_given_back_what_a_refused_close_kept(
    spent: bool,
) -> None:
    paused = asyncio.Event()
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    limits = Limits(queue_bytes=1000 if spent else 100_000)

    def hear(_event: TelemetryEvent) -> None:
        paused.set()

    async with raw_agent(None, capabilities, limits=limits, telemetry=hear) as (peer, raw):
        session = await opened(peer, raw)

        async def leave() -> None:
            async with session.prompt("x"):
                await raw.wait("session/close")

        leaving = asyncio.create_task(leave())
        request = await raw.wait("session/prompt")
        paused.clear()
        raw.send(*[raw.update("s1", str(number)) for number in range(8)])
        await paused.wait()  # they were read: each is told of, or that reading stops
        closing = asyncio.create_task(session.close())
        close = await raw.wait("session/close")
        await raw.wait("session/cancel")
        raw.refuse(close, -32000)
        with pytest.raises(RequestError):
            await closing
        raw.send(raw.update("s1", "late"), ends(request, "cancelled"))
        await leaving

        assert peer.connection.queued_bytes == 0
        assert peer.connection.queued_updates == 0


async def test_a_turn_that_was_left_and_fails_for_the_budget_waits_for_no_observer() -> None:
    async with raw_agent(limits=Limits(queue_bytes=1000)) as (peer, raw):
        session = await opened(peer, raw)
        seen, go_on = asyncio.Event(), asyncio.Event()

        async def observe(_update: Update) -> None:
            seen.set()
            await go_on.wait()

        session.on_update(observe)

        async def leave() -> None:
            async with session.prompt("go"):
                await seen.wait()

        leaving = asyncio.create_task(leave())
        await raw.wait("session/prompt")
        raw.send(raw.update("s1", "first"))
        await raw.wait("session/cancel")
        for _ in range(3):
            raw.send(*[raw.update("s1", "x" * 100) for _ in range(100)])
            await asyncio.sleep(0)
        await raw.wait("$/cancel_request")  # it is given up for the budget
        await asyncio.wait_for(leaving, 5)
        go_on.set()


MODES = {
    "currentModeId": "a",
    "availableModes": [{"id": "a", "name": "A"}, {"id": "b", "name": "B"}],
}


def update(session_id: str, body: dict[str, Any]) -> dict[str, Any]:
    params = {"sessionId": session_id, "update": body}
    return {"jsonrpc": "2.0", "method": "session/update", "params": params}


CLOSES: dict[str, Any] = {"loadSession": True, "sessionCapabilities": {"close": {}}}


async def closed(session: Session, raw: RawPeer, *behind: dict[str, Any]) -> None:
    """Close it, with something right behind the answer."""
    closing = asyncio.create_task(session.close())
    close = await raw.wait("session/close")
    raw.send({"jsonrpc": "2.0", "id": close["id"], "result": {}}, *behind)
    await closing


async def test_a_session_that_was_closed_takes_no_prompt() -> None:
    async with raw_agent(None, CLOSES) as (peer, raw):
        session = await opened(peer, raw)
        await closed(session, raw)
        with pytest.raises(LocalProtocolError, match="was closed"):
            await session.prompt("go")
        await raw.round_trip()
        assert raw.sent("session/prompt") == []
        again = await opened(peer, raw)  # some agents make the id from the folder
        await opened(peer, raw)
        with pytest.raises(LocalProtocolError, match="was closed"):
            await again.prompt("go")


async def test_a_turn_gets_what_an_agent_sends_of_it_behind_the_answer_to_a_close() -> None:
    async with raw_agent(None, CLOSES) as (peer, raw):
        session = await opened(peer, raw)
        asking = asyncio.create_task(_outcome(session))
        request = await raw.wait("session/prompt")
        await closed(session, raw, raw.update("s1", "tail"), ends(request, "cancelled"))
        outcome = await asking
        assert (outcome.text, outcome.stop_reason) == ("tail", "cancelled")
        raw.send(raw.update("s1", "nobody's"))
        await raw.round_trip()
        assert session.inbox.received == 1


@pytest.mark.virtual_time
async def test_a_turn_whose_session_is_closed_ends_although_the_agent_never_answers_it() -> None:
    asked = asyncio.Event()

    async def ask(params: v1.RequestPermissionRequest, ctx: Any) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    async with raw_agent(Client(permissions=ask), CLOSES) as (peer, raw):
        session = await opened(peer, raw)
        asking = asyncio.create_task(_outcome(session))
        await raw.wait("session/prompt")
        call = {"toolCallId": "t", "title": "x"}
        params: dict[str, Any] = {"sessionId": "s1", "toolCall": call, "options": []}
        raw.send(raw.request(7, "session/request_permission", params))
        await asked.wait()
        await closed(session, raw)
        answer = await raw.answer_to(7)
        assert answer["result"] == {"outcome": {"outcome": "cancelled"}}
        with pytest.raises(RequestTimeout):
            await asking


async def test_a_prompt_that_was_forgotten_is_told_of_where_it_was() -> None:
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        with pytest.warns(RuntimeWarning) as told:
            session.prompt("forgotten")
        await raw.round_trip()
        assert raw.sent("session/prompt") == []
    assert [str(warning.message) for warning in told] == [
        "session.prompt(…) was never awaited or entered"
    ]
    assert told[0].filename == __file__


async def test_a_prompt_that_was_begun_or_closed_is_not_told_of() -> None:
    async def whole(turn: PromptTurn) -> None:
        await turn

    async def entered(turn: PromptTurn) -> None:
        async with turn:
            pass

    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            session.prompt("closed").close()
            cut_off = asyncio.create_task(session.prompt("cancelled before its first step"))
            cut_off.cancel()
            await asyncio.wait([cut_off])
            running = asyncio.create_task(session.prompt("sent"))
            request = await raw.wait("session/prompt")
            for begin in (whole, entered):
                with pytest.raises(TurnInProgress):
                    await begin(session.prompt("too early"))
            raw.answer(request, {"stopReason": "end_turn"})
            await running
            del cut_off, running
            gc.collect()
        assert told == []
        assert len(raw.sent("session/prompt")) == 1


def test_a_prompt_that_the_interpreter_s_end_finds_is_not_told_of() -> None:
    program = """
        import asyncio
        from antiphon.testing import raw_agent

        async def main():
            async with raw_agent() as (peer, raw):
                opening = asyncio.create_task(peer.new_session(cwd="/"))
                raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
                return (await opening).prompt("kept to the end")

        kept = asyncio.run(main())
        print(kept.unsent)
    """

    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=20,
    )

    assert ran.stdout == "session.prompt(…) was never awaited or entered\n"
    assert ran.stderr == ""
