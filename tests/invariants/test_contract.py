"""What holds between the parts of a connection (IC-1 to IC-8), each against a side that is wrong.

IC-1 speaks of one task that owns every table. Here the loop is that task: what touches a table is never
suspended in the middle, which the tests show from outside.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Client, ConnectionClosed, Limits, RequestTimeout, Turn
from antiphon.core import Protocol
from antiphon.runtime import Connection
from antiphon.sessions._agent_router import AgentRouter
from antiphon.sessions._peer import Peer
from antiphon.sessions._turn_states import Event
from antiphon.testing import raw_agent, raw_client
from tests.invariants.controls import changed, controlled, on_the_wire
from tests.invariants.sides import Played, cancel, new_session, prompt, texts, turns
from tests.invariants.test_connection import WAITS_FOR_HANDLERS, Serves, reaps_nothing, twice
from tests.invariants.test_turns import late, not_answered, waits_for_nobody

if TYPE_CHECKING:
    from antiphon import AgentContext

pytestmark = pytest.mark.virtual_time

Json = dict[str, Any]


def now() -> float:
    return asyncio.get_running_loop().time()


# ---------------------------------------------------------------- IC-1: one authority


def forgets_to_count(original: Any, self: Protocol, method: str, *args: Any) -> Any:
    if self._last_id and self._last_id % 50 == 0:
        self._last_id -= 1
    return original(self, method, *args)


@pytest.mark.covers("IC-1")
@controlled(forgets_to_count=changed(Protocol, "request", forgets_to_count))
async def test_callers_at_once_get_ids_of_their_own_and_each_its_own_answer() -> None:
    async with raw_agent() as (peer, raw):

        async def call(number: int) -> int:
            answer: int = await peer.request_extension("_test/any", number)
            return answer

        calls = [asyncio.create_task(call(number)) for number in range(200)]
        await raw.wait("_test/any", 200)
        requests = raw.sent("_test/any")
        ids = [request["id"] for request in requests]
        for request in reversed(requests):
            raw.answer(request, request["params"] * 2)
        async with asyncio.timeout(5):
            assert await asyncio.gather(*calls) == [number * 2 for number in range(200)]

        assert ids == sorted(set(ids))
        assert not peer.connection.protocol.calls


# ---------------------------------------------------------------- IC-2: a context for each dispatch


_first: list[Any] = []


def shares(original: Any, self: AgentRouter, method: str, *args: Any) -> Any:
    context = original(self, method, *args)
    if method != "session/set_mode":
        return context
    _first.append(context)
    return _first[0]


@pytest.mark.covers("IC-2")
@controlled(shares=changed(AgentRouter, "context", shares))
async def test_each_message_is_handled_with_a_context_of_its_own() -> None:
    _first.clear()
    seen: list[AgentContext] = []
    both = asyncio.Event()

    class Notes(Serves):
        async def set_session_mode(self, params: Any, ctx: AgentContext) -> Any:
            seen.append(ctx)
            if len(seen) == 2:
                both.set()
            async with asyncio.timeout(5):
                await both.wait()

    async with raw_client(Notes(), {"terminal": True}) as raw:
        sessions = [await new_session(raw), await new_session(raw)]
        for id_, session_id in enumerate(sessions):
            params = {"sessionId": session_id, "modeId": f"m{id_}", "_meta": {"n": id_}}
            raw.send(raw.request(id_, "session/set_mode", params))
        for id_ in (0, 1):
            await raw.answer_to(id_)

        one, other = seen
        assert one is not other
        assert [ctx.method for ctx in seen] == ["session/set_mode"] * 2
        assert [ctx.session_id for ctx in seen] == sessions
        assert [ctx.call is not None and ctx.call.id for ctx in seen] == [b"0", b"1"]
        assert [b'"n": 0' in ctx.raw or b'"n":0' in ctx.raw for ctx in seen] == [True, False]
        assert one.connection is other.connection
        assert all(ctx.peer.offers("terminal") for ctx in seen)
        assert one.session().session_id == sessions[0]
        assert one.rx_seq + 1 == other.rx_seq


# ---------------------------------------------------------------- IC-3: one authority over time


def forever(_original: Any, self: Peer, method: str, given: Any) -> None:
    return None


def prompts_too(_original: Any, self: Peer, method: str, given: Any) -> float:
    return 5.0


@pytest.mark.covers("IC-3")
@controlled(forever=changed(Peer, "_timeout", forever))
async def test_only_a_prompt_may_wait_for_ever_and_all_wait_in_one_table() -> None:
    async with raw_agent(limits=Limits(request_timeout=5)) as (peer, raw):
        raw.bound = 200_000
        opening = asyncio.create_task(peer.new_session())
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        session = await opening
        prompting = asyncio.ensure_future(session.prompt("go"))
        setting = asyncio.create_task(session.set_mode("m"))
        request = await raw.wait("session/prompt")
        await raw.wait("session/set_mode")
        assert sorted(call.method for call in peer.connection.protocol.calls.values()) == [
            "session/prompt",
            "session/set_mode",
        ]
        began = now()
        with pytest.raises(RequestTimeout):
            async with asyncio.timeout(100):
                await setting
        assert now() - began == pytest.approx(5)
        await asyncio.sleep(10_000)
        assert not prompting.done()
        raw.answer(request, {"stopReason": "end_turn"})
        assert (await prompting).stop_reason == "end_turn"


# ---------------------------------------------------------------- IC-4, IC-5: one lane


@pytest.mark.covers("IC-4")
@controlled(waits_for_nobody=changed(Turn, "finish", waits_for_nobody))
async def test_the_session_decides_when_it_answers_and_the_answer_keeps_its_place() -> None:
    async def speak(turn: Turn) -> None:
        for number in range(50):
            await turn.say(f"{number} {'x' * 5000}")  # more than the link takes at once
        await asyncio.sleep(1)
        await turn.say("last")

    async def play(turn: Turn) -> None:
        turn.start_soon(speak(turn))

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await raw.answer_to(7)

        said = [text.partition(" ")[0] for text in texts(raw)[2:]]
        assert said == [*map(str, range(50)), "last", "=7"]


_held: list[Json] = []


def reply_before_the_update(frames: list[Json]) -> list[Json]:
    """Updates are held back until a response passes."""
    _held.extend(frame for frame in frames if frame.get("method") == "session/update")
    others = [frame for frame in frames if frame.get("method") != "session/update"]
    if not any(frame.get("result") == "answer" for frame in others):
        return others
    return [*others, *_held]


@pytest.mark.covers("IC-4")
@controlled(reply_first=on_the_wire(reply_before_the_update))
async def test_an_answer_that_was_deferred_stands_behind_what_was_sent_before_it() -> None:
    _held.clear()
    agent = Serves()
    async with raw_client(agent) as raw:
        session_id = await new_session(raw)
        raw.send(raw.request(7, "_defer", {}))
        await raw.round_trip()
        session = agent.sessions_of[session_id]
        await session.info(title="before")
        assert agent.replies[0].send("answer")
        await raw.answer_to(7)
        await session.info(title="behind")
        await raw.round_trip()

        order = [
            frame["result"] if frame.get("id") == 7 else frame["params"]["update"]["title"]
            for frame in raw.frames
            if frame.get("id") == 7 or frame.get("method") == "session/update"
        ]
        assert order == ["before", "answer", "behind"]


@pytest.mark.covers("IC-5")
@controlled(late=late(Event.CANCEL, 0.5))
async def test_a_cancel_concerns_what_stands_before_it_and_nothing_behind() -> None:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(2)

    agent = Played(play)
    async with raw_client(agent) as raw:
        one, two = await new_session(raw), await new_session(raw)
        raw.send(prompt(7, one, "before"), cancel(one), cancel(two), prompt(8, two, "behind"))
        before, behind = await raw.answer_to(7), await raw.answer_to(8)

        assert before["result"] == {"stopReason": "cancelled"}
        assert behind["result"] == {"stopReason": "end_turn"}
        assert agent.begun == ["behind"]


# ---------------------------------------------------------------- IC-6: one response for each id


@pytest.mark.covers("IC-6", "Inv-4")
@controlled(twice=on_the_wire(twice), not_answered=on_the_wire(not_answered))
async def test_every_request_has_one_response_cancelled_or_not() -> None:
    async def play(turn: Turn) -> None:
        async with asyncio.timeout(5):
            await turn.wait_cancelled()

    agent = Serves(play)
    async with raw_client(agent) as raw:
        session_id = await new_session(raw)
        raw.send(
            raw.request(1, "_echo", {}),
            raw.request(2, "_wait", {}),
            prompt(3, session_id),
            raw.request(4, "_echo", {}),
            raw.request(5, "_defer", {}),
            raw.request(6, "_defer", {}),
        )
        await agent.waiting.wait()
        await raw.round_trip()
        replies = agent.replies
        replies[0].on_cancel(lambda: None)
        for id_ in (1, 2, 3, 4, 5, 6, 2, 3):
            raw.send(raw.notification("$/cancel_request", {"requestId": id_}))
        await raw.round_trip()
        assert replies[0].send("all the same")
        assert not replies[1].send("too late")
        answers = {id_: await raw.answer_to(id_) for id_ in range(1, 7)}
        await raw.round_trip()

        assert answers[1].get("result") == answers[4].get("result") == {}
        assert answers[2].get("error", {}).get("code") == -32800
        assert answers[3].get("result") == {"stopReason": "cancelled"}
        assert answers[5].get("result") == "all the same"
        assert answers[6].get("error", {}).get("code") == -32800
        assert [len(raw.responses(id_)) for id_ in range(1, 7)] == [1] * 6


# ---------------------------------------------------------------- IC-7: nothing blocks


@pytest.mark.covers("IC-7")
@controlled(waits_for_handlers=WAITS_FOR_HANDLERS)
async def test_a_handler_that_never_ends_keeps_nobody_waiting() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "_wait", {}))
        await agent.waiting.wait()
        began = now()
        assert (await raw.ask("_echo", {"x": 1}))["result"] == {"x": 1}
        assert now() == began


# ---------------------------------------------------------------- IC-8: one life


@pytest.mark.covers("IC-8")
@controlled(reaps_nothing=changed(Connection, "_reap", reaps_nothing))
async def test_all_of_a_connection_ends_with_it_and_none_of_it_begins_again() -> None:
    waiting = asyncio.Event()

    class Waits(Client):
        async def request_permission(self, params: Any, ctx: Any) -> Any:
            waiting.set()
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    async with raw_agent(Waits(on_update=lambda update: None)) as (peer, raw):
        opening = asyncio.create_task(peer.new_session())
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        session = await opening
        ask: Json = {"sessionId": "s1", "toolCall": {"toolCallId": "c"}, "options": []}
        raw.send(raw.request(1, "session/request_permission", ask))
        await waiting.wait()
        await peer.aclose()
        await turns()

        left = asyncio.all_tasks() - before
        assert not left, left
        with pytest.raises(ConnectionClosed):
            await session.prompt("again")
        with pytest.raises(ConnectionClosed):
            await peer.new_session()
        assert raw.responses(1) == []
