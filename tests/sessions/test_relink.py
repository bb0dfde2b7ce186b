"""Another link in place of a lost one: what goes on, what ends, and what waits meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    Agent,
    AgentContext,
    AttachmentClosed,
    Client,
    ConnectionClosed,
    InternalError,
    Limits,
    LocalProtocolError,
    Reattach,
    RequestError,
    RequestTimeout,
    SilenceTimeout,
    TelemetryEvent,
    Turn,
    connect,
    serve_unix,
    spawn,
)
from antiphon.journal import MemoryJournal
from antiphon.schema import v1
from antiphon.transports import SocketTransport, memory_pair
from tests.sessions.journaled import JournaledAgent, settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon import AgentPeer, PromptTurn, Session, Update

AT_ONCE = Reattach(delay=0)


@pytest.fixture(params=["ours", "raxol"])
def agent(request: pytest.FixtureRequest) -> JournaledAgent:
    return JournaledAgent(raxol=request.param == "raxol")


def text_of(update: Update) -> str:
    return str(json.loads(update.raw)["content"]["text"])


async def all_of(turn: PromptTurn) -> list[str]:
    return [update.text async for update in turn]


class Events(list[tuple[str, dict[str, Any]]]):
    """What a connection told."""

    def __call__(self, event: TelemetryEvent) -> None:
        self.append((event.name, dict(event.facts)))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [facts for event, facts in self if event == name]


@asynccontextmanager
async def linked(
    agent: JournaledAgent, reattach: Reattach = AT_ONCE, **options: Any
) -> AsyncGenerator[tuple[AgentPeer, Session, Events]]:
    events = Events()
    async with connect(agent.dial, reattach=reattach, telemetry=events, **options) as peer:
        yield peer, await peer.new_session(), events


# -------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 0.0), (2, 0.5), (3, 1.5), (4, 4.5), (5, 8.0), (5000, 8.0)]
)
def test_pauses_grow_up_to_a_bound(attempt: int, seconds: float) -> None:
    assert Reattach(delay=0.5, backoff=3, max_delay=8).pause(attempt) == seconds


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"delay": -1.0}, {"backoff": 0.5}, {"max_delay": -1.0}, {"deadline": 0.0}],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Reattach needs"):
        Reattach(**wrong)  # type: ignore[arg-type]


async def test_a_transport_cannot_be_made_again() -> None:
    ours, _ = memory_pair()

    with pytest.raises(ValueError, match="an address or a function"):
        connect(ours, reattach=True)


# -------------------------------------------------------------------- a turn goes on


async def test_a_turn_goes_on_over_another_link_without_a_gap(agent: JournaledAgent) -> None:
    async with linked(agent) as (peer, session, events):
        seen: list[str] = []
        session.on_update(lambda update: seen.append(text_of(update)))
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            first = await anext(turn)
            agent.say("s1", "b")
            agent.link.cut(0)
            agent.say("s1", "c")
            await agent.until_sent("_raxol/session.load", 2)
            await settle()
            agent.say("s1", "d")
            agent.finish("s1", "max_tokens")
            rest = [update async for update in turn]

        assert [text_of(update) for update in (first, *rest)] == ["a", "b", "c", "d"]
        assert {update.label for update in rest} == {"turn"}
        assert turn.stop_reason == "max_tokens"
        assert seen == ["a", "b", "c", "d"]
        assert (peer.sessions, peer.connection.closed) == ({"s1": session}, False)
        assert [facts["sessions"] for facts in events.named("link_made")] == [1]


async def test_a_turn_that_ended_meanwhile_ends_by_its_record(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.link.cut(0)
            agent.finish("s1")
            assert await all_of(turn) == ["a"]
        assert turn.stop_reason == "end_turn"

        async with session.prompt("again") as turn:
            agent.say("s1", "b")
            agent.finish("s1")
            assert await all_of(turn) == ["b"]


async def test_an_answer_that_was_lost_with_the_link_is_in_the_record(
    agent: JournaledAgent,
) -> None:
    async with linked(agent) as (_, session, _):
        async with session.prompt("go") as turn:
            await settle()
            agent.finish("s1", "max_tokens")
            answer = b'"result":{"stopReason"'.replace(b":", b": ")
            agent.link.waiting = [w for w in agent.link.waiting if answer not in w]
            agent.link.cut()
            assert await all_of(turn) == []
        assert turn.stop_reason == "max_tokens"


async def test_a_turn_that_failed_meanwhile_fails_by_its_record(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _), session.prompt("go") as turn:
        agent.say("s1", "a")
        agent.link.cut(0)
        agent.finish("s1", error={"code": -32042, "message": "too warm"})
        with pytest.raises(RequestError) as caught:
            await all_of(turn)
        assert (caught.value.code, caught.value.message) == (-32042, "too warm")


@pytest.mark.covers("J7", "J12")
async def test_a_turn_whose_agent_died_counts_as_cancelled_and_says_so(
    agent: JournaledAgent,
) -> None:
    async with linked(agent) as (_, session, events):
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.link.cut(0)
            agent.finish("s1", outcome="orphaned", stopReason="cancelled")
            assert await all_of(turn) == ["a"]

        assert turn.response is not None
        assert turn.stop_reason == "cancelled"
        assert turn.response.meta == {"raxol.io": {"outcome": "orphaned"}}
        assert len(events.named("turn_orphaned")) == 1


async def test_a_prompt_that_the_agent_never_began_is_not_sent_again(
    agent: JournaledAgent,
) -> None:
    async with linked(agent) as (_, session, _):
        agent.held.add("session/prompt")
        async with session.prompt("go") as turn:
            agent.link.cut(0)
            with pytest.raises(ConnectionClosed, match="before the agent began"):
                await all_of(turn)
        assert len(agent.sent("session/prompt")) == 1

        agent.held.clear()
        async with session.prompt("again") as turn:
            agent.finish("s1")
            assert await all_of(turn) == []


async def test_a_link_that_is_lost_again_and_again_loses_nothing(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        async with session.prompt("go") as turn:
            for number in range(6):
                agent.say("s1", str(number))
                agent.link.cut(number % 3)
                await agent.until_sent("initialize", number + 2)
                agent.say("s1", f"{number}+")
                await settle(number * 2)
            await asyncio.sleep(1)
            agent.finish("s1")
            given = await all_of(turn)

        assert given == [f"{number}{end}" for number in range(6) for end in ("", "+")]


async def test_a_turn_that_is_cancelled_without_a_link_is_cancelled_over_the_next(
    agent: JournaledAgent,
) -> None:
    async with linked(agent) as (_, session, _):
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.refuse_links = 2
            agent.link.cut()
            await settle(5)
            await turn.cancel()
            await agent.until_sent("session/cancel")
            agent.finish("s1", "cancelled")
            assert await all_of(turn) == ["a"]
        assert turn.stop_reason == "cancelled"


async def test_a_turns_bound_holds_over_all_its_links(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with session.prompt("go", timeout=5) as turn:
            await asyncio.sleep(1)
            agent.link.cut()
            with pytest.raises(RequestTimeout):
                await all_of(turn)
        assert 5 <= loop.time() - begun < 6
        await agent.until_sent("session/cancel")


async def test_silence_is_measured_over_all_links(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _), session.prompt("go", silence=4) as turn:
        agent.link.cut()
        with pytest.raises(SilenceTimeout):
            await all_of(turn)


async def test_two_sessions_go_on_over_one_link(agent: JournaledAgent) -> None:
    async with linked(agent) as (peer, one, _):
        other = await peer.new_session()
        async with one.prompt("one") as first, other.prompt("two") as second:
            await settle()
            agent.say("s1", "a")
            agent.say("s2", "b")
            agent.link.cut(0)
            agent.say("s1", "c")
            agent.say("s2", "d")
            await agent.until_sent("_raxol/session.load", 4)
            agent.finish("s1")
            agent.finish("s2")
            assert await all_of(first) == ["a", "c"]
            assert await all_of(second) == ["b", "d"]
        assert len(agent.links) == 2


async def test_an_observer_that_is_busy_goes_on_with_the_next_link(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        seen: list[str] = []
        go_on = asyncio.Event()

        async def watch(update: Update) -> None:
            await go_on.wait()
            seen.append(text_of(update))

        session.on_update(watch)
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            await settle()
            agent.link.cut()
            await agent.until_sent("_raxol/session.load", 2)
            await asyncio.sleep(60)  # longer than any grace
            agent.say("s1", "b")
            agent.finish("s1")
            await settle()
            assert seen == []
            go_on.set()
            assert await all_of(turn) == ["a", "b"]
        assert seen == ["a", "b"]


# -------------------------------------------------------------------- all else


async def test_calls_that_were_open_fail_and_new_ones_wait(agent: JournaledAgent) -> None:
    async with linked(agent) as (peer, session, _):
        agent.held.add("session/set_mode")
        mode = asyncio.create_task(session.set_mode("fast"))
        await settle()
        agent.refuse_links = 1
        agent.link.cut()
        with pytest.raises(ConnectionClosed):
            await mode

        agent.held.clear()
        assert peer.connection.closed
        await session.set_mode("slow")
        assert agent.sent("session/set_mode")[-1]["modeId"] == "slow"
        assert len(agent.links) == 3


async def test_a_prompt_waits_for_the_link_and_its_session(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        agent.link.cut()
        await settle(3)
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.finish("s1")
            assert await all_of(turn) == ["a"]
        methods = [message.get("method") for message in agent.received]
        assert methods.index("session/prompt") > methods.index("_raxol/session.load", 3)


async def test_a_session_that_is_not_attached_ends_with_its_link(agent: JournaledAgent) -> None:
    async with linked(agent) as (peer, session, _):
        other = peer.adopt_session("s9", cwd=".")
        updates = other.updates()
        agent.link.cut()
        with pytest.raises(StopAsyncIteration):
            await anext(updates)
        await agent.until_sent("_raxol/session.load", 2)
        assert peer.sessions == {"s1": session}


async def test_the_agent_is_signed_in_to_again(agent: JournaledAgent) -> None:
    async with linked(agent, authenticate="key"):
        agent.link.cut()
        await agent.until_sent("_raxol/session.load", 2)

        methods = [message.get("method") for message in agent.received]
        again = methods[methods.index("initialize", 1) :]
        assert again[:3] == ["initialize", "authenticate", "_raxol/session.load"]


async def test_a_session_that_may_not_be_attached_any_more_ends(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, events):
        updates = session.updates()
        async with session.prompt("go") as turn:
            agent.refuse["_raxol/session.load"] = (-32000, "attach denied")
            agent.link.cut()
            with pytest.raises(AttachmentClosed) as caught:
                await all_of(turn)
        assert caught.value.reason == "refused"
        assert isinstance(caught.value.__cause__, RequestError)
        with pytest.raises(AttachmentClosed):
            [update async for update in updates]
        assert len(events.named("attach_failed")) == 1


# -------------------------------------------------------------------- agents that cannot


@pytest.mark.covers("J11")
async def test_with_an_agent_that_attaches_nothing_all_is_as_without_it() -> None:
    agent = JournaledAgent(raxol=True)
    agent.refuse["_raxol/session.load"] = (-32601, "Method not found")
    events = Events()
    async with connect(agent.dial, reattach=AT_ONCE, telemetry=events) as peer:
        session = await peer.new_session()
        await peer.new_session()
        assert len(agent.sent("_raxol/session.load")) == 1
        assert len(events.named("reattach_unsupported")) == 1
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.link.cut()
            with pytest.raises(ConnectionClosed):
                await all_of(turn)
        await peer.wait_closed()
    assert len(agent.links) == 1


async def test_an_agent_that_says_no_is_not_asked() -> None:
    agent = JournaledAgent()
    agent.says = {"resumable": False}
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        await peer.new_session()
        assert not agent.sent("_raxol/session.load")


async def test_an_attach_that_is_denied_leaves_the_session_usable(agent: JournaledAgent) -> None:
    agent.refuse["_raxol/session.load"] = (-32000, "attach denied")
    async with linked(agent) as (_, session, events):
        assert not session.attached
        assert len(events.named("attach_failed")) == 1
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.finish("s1")
            assert await all_of(turn) == ["a"]


# -------------------------------------------------------------------- no other link


async def test_when_all_attempts_have_failed_everything_ends(agent: JournaledAgent) -> None:
    events = Events()
    options = Reattach(attempts=3, delay=1)
    async with connect(agent.dial, reattach=options, telemetry=events) as peer:
        session = await peer.new_session()
        updates = session.updates()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.refuse_links = 99
            agent.link.cut()
            await settle(5)
            mode = asyncio.create_task(session.set_mode("fast"))
            with pytest.raises(ConnectionClosed, match="no other link could be made"):
                await all_of(turn)
        with pytest.raises(ConnectionClosed):
            await mode
        assert [text_of(update) async for update in updates] == ["a"]
        await peer.wait_closed()
        with pytest.raises(ConnectionClosed):
            await peer.new_session()
    assert len(agent.links) == 4
    assert events.named("link_given_up")[0]["attempts"] == 3


async def test_attempts_end_with_their_deadline(agent: JournaledAgent) -> None:
    options = Reattach(attempts=None, delay=1, backoff=1, deadline=10)
    async with linked(agent, options) as (_, session, _), session.prompt("go") as turn:
        agent.refuse_links = 999
        loop = asyncio.get_running_loop()
        begun = loop.time()
        agent.link.cut()
        with pytest.raises(ConnectionClosed):
            await all_of(turn)
        assert 9 <= loop.time() - begun <= 11


async def test_closing_without_a_link_is_prompt(agent: JournaledAgent) -> None:
    loop = asyncio.get_running_loop()
    async with linked(agent, Reattach(attempts=None, delay=100)) as (peer, session, _):
        turn = session.prompt("go")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_outcome(turn))
            await settle()
            agent.refuse_links = 99
            agent.link.cut()
            await settle()
            begun = loop.time()
            await peer.aclose()
            assert isinstance(await running, ConnectionClosed)
            assert loop.time() - begun < 1
        await peer.wait_closed()


async def _outcome(turn: PromptTurn) -> Exception | None:
    try:
        await turn
    except ConnectionClosed as error:
        return error
    return None


# -------------------------------------------------------------------- by hand


async def test_a_session_goes_on_over_another_peer(agent: JournaledAgent) -> None:
    """Without the option: the turn raises, is attached over another connection, and goes on."""
    async with connect(agent.dial()) as one, connect(agent.dial()) as two:
        session = await one.new_session()
        seen: list[str] = []
        session.on_update(lambda update: seen.append(text_of(update)))
        view = session.view
        first, second = agent.links
        agent.links.reverse()
        await session.reattach()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            given = [(await anext(turn)).text]
            first.cut(0)
            agent.say("s1", "b")
            with pytest.raises(ConnectionClosed):
                await anext(turn)
            await session.reattach(two)
            agent.say("s1", "c")
            agent.finish("s1")
            given += await all_of(turn)

        assert given == ["a", "b", "c"]
        assert turn.stop_reason == "end_turn"
        assert seen == ["a", "b", "c"]
        assert (session.peer, one.sessions, two.sessions) == (two, {}, {"s1": session})
        assert "".join(getattr(entry, "text", "") for entry in view.entries) == "goabc"
        assert second.alive


async def test_a_session_that_was_never_attached_goes_on_over_another_peer(
    agent: JournaledAgent,
) -> None:
    async with connect(agent.dial()) as one, connect(agent.dial()) as two:
        session = await one.new_session()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            given = [(await anext(turn)).text]
            agent.links[0].cut(0)
            agent.say("s1", "b")
            with pytest.raises(ConnectionClosed):
                await anext(turn)
            await session.reattach(two)
            agent.finish("s1")
            given += await all_of(turn)
        assert given == ["a", "b"]


async def test_an_open_turn_is_carried_over_while_its_link_lives(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as one, connect(agent.dial()) as two:
        session = await one.new_session()
        await session.reattach()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            await session.reattach(two)
            agent.say("s1", "b")
            agent.finish("s1")
            assert await all_of(turn) == ["a", "b"]
        assert not agent.sent("$/cancel_request")
        await one.aclose()
        async with session.prompt("again") as turn:
            agent.finish("s1")
            assert await all_of(turn) == []


async def test_an_attach_that_fails_leaves_the_turn_ended(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as one, connect(agent.dial()) as two:
        session = await one.new_session()
        async with session.prompt("go") as turn:
            agent.links[0].cut()
            with pytest.raises(ConnectionClosed):
                await anext(turn)
            agent.refuse["_raxol/session.load"] = (-32000, "attach denied")
            with pytest.raises(RequestError, match="attach denied"):
                await session.reattach(two)
            with pytest.raises(ConnectionClosed):
                await anext(turn)


async def test_a_peer_that_has_a_session_of_that_id_takes_no_other(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as one, connect(agent.dial()) as two:
        session = await one.new_session()
        await two.attach_session("s1")
        with pytest.raises(LocalProtocolError, match="known on that connection"):
            await session.reattach(two)
        assert one.sessions == {"s1": session}


# -------------------------------------------------------------------- a real process

# -------------------------------------------------------------------- lost at a bad moment


async def test_a_new_session_whose_attach_is_lost_shows_nothing_twice(
    agent: JournaledAgent,
) -> None:
    agent.says = {"resumable": True}
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        agent.held.add("_raxol/session.load")
        opening = asyncio.create_task(peer.new_session())
        await agent.until_sent("_raxol/session.load")
        # Told on its own link, as an agent tells its commands; what it tells then is lost.
        agent.append("s1", "session_update", agent.chunk("told"))
        agent.link.tell(agent.frame("s1", 2, rider=False))
        await settle()
        agent.append("s1", "session_update", agent.chunk("lost"))
        agent.held.clear()
        agent.link.cut()

        session = await opening
        updates = session.updates()
        await session.reattach()
        assert [text_of(await anext(updates)) for _ in range(2)] == ["told", "lost"]
        assert session.inbox.received == 2
        assert session.offset == 3


async def test_a_session_that_is_resumed_is_not_replayed_where_its_attach_is_lost(
    agent: JournaledAgent,
) -> None:
    agent.says = {"resumable": True}
    agent.journals["s1"] = [("session_created", {}), ("session_update", agent.chunk("old"))]
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        agent.held.add("_raxol/session.load")

        async def resume() -> Session:
            return await peer.resume_session("s1")

        opening = asyncio.create_task(resume())
        await agent.until_sent("_raxol/session.load")
        agent.held.clear()
        agent.link.cut()
        session = await opening
        await session.reattach()
        agent.append("s1", "session_update", agent.chunk("new"))

        assert text_of(await anext(session.updates())) == "new"
        assert session.inbox.received == 1


async def test_a_session_whose_link_is_lost_right_behind_its_load_goes_on(
    agent: JournaledAgent,
) -> None:
    agent.says = {"resumable": True}
    agent.journals["s1"] = [("session_created", {}), ("session_update", agent.chunk("old"))]
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        agent.held.add("session/load")

        async def load() -> Session:
            return await peer.load_session("s1")

        opening = asyncio.create_task(load())
        await agent.until_sent("session/load")
        agent.held.clear()
        for link, message in agent.waiting:
            agent.serve(link, message)
        agent.link.cut()  # with the answer: nobody has asked to attach yet
        await settle(2)
        updates = peer.sessions["s1"].updates()
        session = await opening
        await session.reattach()
        agent.append("s1", "session_update", agent.chunk("new"))

        assert [text_of(await anext(updates)) for _ in range(2)] == ["old", "new"]
        assert session.inbox.received == 2


@pytest.mark.parametrize("prompted", [True, False])
async def test_what_an_agent_tells_without_an_offset_when_it_goes_is_not_shown_again(
    *, prompted: bool
) -> None:
    agent = JournaledAgent()
    async with linked(agent) as (_, session, _):
        updates = session.updates()
        turn = None
        if prompted:
            turn = asyncio.create_task(session.prompt("go"))
            await agent.until_sent("session/prompt")
        agent.detach("s1")  # without a word: its journal is being closed
        for text in ("a", "b"):
            offset = agent.append("s1", "session_update", agent.chunk(text), silent=True)
            agent.link.tell(agent.frame("s1", offset, rider=False))
        await settle()
        agent.append("s1", "session_update", agent.chunk("c"), silent=True)
        agent.link.cut()
        await agent.until_sent("_raxol/session.load", 2)
        await settle()
        # Once there are numbers again, the same words are others.
        agent.append("s1", "session_update", agent.chunk("a"))
        if turn is not None:
            agent.finish("s1")
            assert (await turn).text == "abca"
        assert [text_of(await anext(updates)) for _ in range(4)] == ["a", "b", "c", "a"]
        assert session.inbox.received == 4


@pytest.mark.parametrize("how", ["leave", "timeout", "silence"])
async def test_a_turn_that_ends_here_without_a_link_is_cancelled_over_the_next(
    agent: JournaledAgent, how: str
) -> None:
    options = Reattach(attempts=2, delay=0.3)
    limits = Limits(cancel_backstop=0.1)
    async with linked(agent, options, limits=limits) as (_, session, _):
        bounds: dict[str, Any] = {"timeout": {"timeout": 0.1}}.get(how, {})
        prompt = session.prompt("go", **bounds)
        turn = asyncio.create_task(prompt)
        await agent.until_sent("session/prompt")
        agent.say("s1", "a")
        await settle()
        agent.refuse_links = 1
        agent.link.cut()
        await settle()
        if how == "leave":
            turn.cancel()
        elif how == "silence":
            prompt.end(None, SilenceTimeout("session/prompt", 1.0))
        await asyncio.wait([turn])
        assert not agent.sent("session/cancel")
        again = asyncio.create_task(session.prompt("again"))

        await agent.until_sent("session/cancel")
        assert len(agent.sent("session/prompt")) == 1
        agent.finish("s1", "cancelled")
        await agent.until_sent("session/prompt", 2)
        agent.finish("s1")
        assert (await again).stop_reason == "end_turn"
        if how == "leave":
            assert turn.cancelled()
        else:
            assert isinstance(turn.exception(), RequestTimeout)


async def test_a_turn_that_goes_on_at_an_agent_that_does_not_stop_is_given_up(
    agent: JournaledAgent,
) -> None:
    options = Reattach(attempts=2, delay=0.2)
    async with linked(agent, options, limits=Limits(cancel_backstop=0.1)) as (_, session, _):
        turn = asyncio.create_task(session.prompt("go", timeout=0.1))
        await agent.until_sent("session/prompt")
        await settle()
        agent.refuse_links = 1
        agent.link.cut()
        with pytest.raises(RequestTimeout):
            await turn
        with pytest.raises(RequestError, match="already in flight"):
            await session.prompt("again")
        assert len(agent.sent("session/cancel")) == 1


async def test_a_call_made_while_the_link_is_about_to_go_waits_for_the_next(
    agent: JournaledAgent,
) -> None:
    asked = asyncio.Event()

    async def decide(params: v1.RequestPermissionRequest, ctx: Any) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    limits = Limits(close_grace=0.2)
    client = Client(permissions=decide)
    async with linked(agent, limits=limits, client=client) as (peer, session, _):
        agent.link.tell(
            {
                "jsonrpc": "2.0",
                "id": 7,
                "method": "session/request_permission",
                "params": {"sessionId": "s1", "toolCall": {"toolCallId": "c"}, "options": []},
            }
        )
        await asked.wait()
        # Whoever is asked is given a moment before the link is closed.
        assert agent.link.receiver is not None
        agent.link.receiver.input_ended()
        await settle()
        assert not peer.connection.closed

        turn = asyncio.create_task(session.prompt("go"))
        mode = asyncio.create_task(session.set_mode("m"))
        await agent.until_sent("session/prompt")
        assert len(agent.links) == 2
        agent.finish("s1")
        assert (await turn).stop_reason == "end_turn"
        await mode


async def test_a_turn_that_nobody_ended_is_over_when_another_begins(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, events):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        agent.say("s1", "a")
        await settle()
        agent.open_turns.clear()  # its agent died, and its journal is not repaired
        agent.link.cut()
        await agent.until_sent("_raxol/session.load", 2)
        await settle()
        assert not turn.done()
        updates = session.updates()
        agent.other_begins("s1", "from elsewhere")
        agent.say("s1", "b")

        outcome = await turn
        assert (outcome.text, outcome.stop_reason) == ("a", "cancelled")
        assert outcome.response.meta == {"raxol.io": {"outcome": "orphaned"}}
        assert len(events.named("turn_orphaned")) == 1
        told = ["b"] if agent.raxol else ["from elsewhere", "b"]
        shown = [await anext(updates) for _ in told]
        assert [(u.label, text_of(u)) for u in shown] == [("session", text) for text in told]


async def test_an_agent_that_fails_to_attach_is_asked_again(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, events):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        agent.say("s1", "a")
        await settle()
        agent.refuse["_raxol/session.load"] = (-32603, "Internal error")
        agent.link.cut()
        await agent.until_sent("_raxol/session.load", 3)
        agent.refuse.clear()
        await session.reattach()
        agent.finish("s1")

        assert (await turn).text == "a"
        assert len(events.named("attach_failed")) >= 2
        assert not events.named("attachment_closed")


async def test_an_agent_that_always_fails_to_attach_is_given_up(agent: JournaledAgent) -> None:
    async with linked(agent) as (_, session, _):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        await settle()
        agent.refuse["_raxol/session.load"] = (-32603, "Internal error")
        agent.link.cut()
        with pytest.raises(AttachmentClosed) as caught:
            await turn
        assert caught.value.reason == "refused"
        assert isinstance(caught.value.__cause__, InternalError)


@pytest.mark.parametrize("away", [True, False])
async def test_a_session_that_is_deleted_elsewhere_says_so(
    agent: JournaledAgent, *, away: bool
) -> None:
    async with linked(agent) as (peer, session, _):
        updates = session.updates()
        if away:
            agent.journals["s1"] = []
            agent.link.cut()
        else:
            agent.close("s1", "deleted")
        with pytest.raises(AttachmentClosed) as caught:
            await anext(updates)
        assert caught.value.reason == "deleted"
        assert (await peer.new_session()).attached
        assert len(agent.attaches("s1")) == 1 + away


# -------------------------------------------------------------------- how often


async def test_an_agent_that_dies_of_being_attached_is_given_up(agent: JournaledAgent) -> None:
    options = Reattach(attempts=4, delay=0, max_delay=0)
    async with linked(agent, options) as (_, session, events):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        serve, agent.serve = agent.serve, lambda *_: None  # type: ignore[method-assign]

        def die(link: Any, message: dict[str, Any]) -> None:
            if message.get("method") == "_raxol/session.load":
                link.cut(0)
            else:
                serve(link, message)

        agent.serve = die  # type: ignore[method-assign]
        agent.link.cut()
        with pytest.raises(ConnectionClosed, match="no other link could be made"):
            await turn
        assert len(agent.links) == 1 + 4
        assert events.named("link_given_up")[0]["attempts"] == 4


async def test_links_that_are_of_use_are_not_counted(agent: JournaledAgent) -> None:
    async with linked(agent, Reattach(attempts=2, delay=0)) as (_, session, events):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        agent.say("s1", "a")
        serve, cuts = agent.serve, [0]

        def cut_behind_a_record(link: Any, message: dict[str, Any]) -> None:
            serve(link, message)
            if message.get("method") == "_raxol/session.load" and cuts[0] < 20:
                cuts[0] += 1
                agent.say("s1", str(cuts[0]))
                link.waiting.append(json.dumps(agent.frame("s1", session.offset + 1)).encode())
                link.cut()

        agent.serve = cut_behind_a_record  # type: ignore[method-assign]
        agent.link.cut()
        async with asyncio.timeout(10):
            while cuts[0] < 20:
                await asyncio.sleep(0.001)
        await settle(60)
        agent.finish("s1")
        assert (await turn).text == "a" + "".join(str(n) for n in range(1, 21))
        assert not events.named("link_given_up")


async def test_a_link_that_is_lost_before_it_brings_anything_may_be_so_as_often_as_is_said(
    agent: JournaledAgent,
) -> None:
    async with linked(agent, Reattach(attempts=30, delay=0)) as (_, session, _):
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        agent.say("s1", "a")
        await settle()
        serve, cuts = agent.serve, [0]

        def cut_at_once(link: Any, message: dict[str, Any]) -> None:
            if message.get("method") == "_raxol/session.load" and cuts[0] < 20:
                cuts[0] += 1
                link.cut(0)
            else:
                serve(link, message)

        agent.serve = cut_at_once  # type: ignore[method-assign]
        agent.link.cut()
        async with asyncio.timeout(10):
            while cuts[0] < 20:
                await asyncio.sleep(0.001)
        await settle(60)
        agent.finish("s1")
        assert (await turn).text == "a"


@pytest.mark.parametrize("error", [LookupError("no address"), TimeoutError("slow")])
async def test_whatever_is_raised_where_a_link_is_made_is_a_failed_attempt(
    agent: JournaledAgent, error: Exception
) -> None:
    calls = [0]

    def dial() -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise error
        return agent.dial()

    async with connect(dial, reattach=Reattach(attempts=3, delay=0)) as peer:
        session = await peer.new_session()
        turn = asyncio.create_task(session.prompt("go"))
        await agent.until_sent("session/prompt")
        agent.link.cut()
        with pytest.raises(ConnectionClosed, match=str(error)) as caught:
            await turn
        assert caught.value.__cause__ is error
        assert calls[0] == 4
        with pytest.raises(ConnectionClosed):
            await peer.new_session()


DURABLE = """
import sys
from antiphon import Agent, serve_stdio
from antiphon.journal import SqliteJournal
from antiphon.schema import v1


class Teller(Agent):
    async def new_session(self, params, ctx):
        return v1.NewSessionResponse(session_id="tale")

    async def prompt(self, turn):
        for number in range(int(turn.text)):
            await turn.say(f"{number} ")
        if turn.text == "3":
            await turn.wait_cancelled()


serve_stdio(Teller(), journal=SqliteJournal(sys.argv[1]))
"""


async def test_an_agent_that_is_killed_is_started_again(tmp_path: Path) -> None:
    program = tmp_path / "teller.py"
    program.write_text(DURABLE)
    argv = [sys.executable, str(program), str(tmp_path / "journal")]
    async with spawn(argv, reattach=Reattach(delay=0.05)) as agent:
        session = await agent.new_session(cwd=tmp_path)
        assert session.attached
        process = agent.process
        given: list[str] = []
        async with session.prompt("3") as turn:
            async for update in turn:
                given.append(update.text)
                if len(given) == 3:
                    os.kill(process.pid, signal.SIGKILL)
        assert turn.stop_reason == "cancelled"
        assert given == ["0 ", "1 ", "2 "]
        assert agent.process.pid != process.pid

        second = await session.prompt("2")
        assert (second.text, second.stop_reason) == ("0 1 ", "end_turn")


# -------------------------------------------------------------------- a real socket


class Counter(Agent):
    """Counts, a step each time that it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = asyncio.Semaphore(0)

    async def new_session(
        self, params: v1.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id="count")

    async def prompt(self, turn: Turn) -> str:
        for number in range(int(turn.text)):
            await self.steps.acquire()
            await turn.say(str(number))
        return "max_tokens"


async def test_over_a_socket_a_turn_outlives_its_links_and_others_follow_it(
    tmp_path: Path,
) -> None:
    counter, journal = Counter(), MemoryJournal()
    path = tmp_path / "a.sock"
    made: list[SocketTransport] = []

    def dial() -> SocketTransport:
        made.append(SocketTransport(f"unix:{path}"))
        return made[-1]

    async with (
        serve_unix(counter, path, journal=journal),
        connect(dial, reattach=AT_ONCE) as peer,
        connect(f"unix:{path}") as other,
    ):
        session = await peer.new_session()
        assert session.attached
        follower = await other.attach_session("count")
        followed = follower.updates()
        given: list[str] = []
        async with session.prompt("30") as turn:
            counter.steps.release()
            async for update in turn:
                given.append(update.text)
                if len(given) % 10 == 5:
                    await made[-1].aclose()
                counter.steps.release()
        assert given == [str(number) for number in range(30)]
        assert turn.stop_reason == "max_tokens"
        assert len(made) == 4

        told = [text_of(await anext(followed)) for _ in range(31)]
        assert told == ["30", *given]  # the prompt, which was not its own
        assert follower.offset <= session.offset


async def test_a_session_that_is_loaded_and_prompted_shows_nothing_twice(tmp_path: Path) -> None:
    counter, journal = Counter(), MemoryJournal()
    path = tmp_path / "a.sock"
    async with serve_unix(counter, path, journal=journal):
        async with connect(f"unix:{path}") as peer:
            await peer.new_session()
            for _ in range(9):
                counter.steps.release()
            await peer.sessions["count"].prompt("2")
        async with connect(f"unix:{path}", reattach=True) as peer:
            async with peer.load_session("count") as session:
                updates = session.updates()
            assert session.attached
            outcome = await session.prompt("3")

            assert outcome.text == "012"
            shown = [await anext(updates) for _ in range(6)]
            assert [(update.label, text_of(update)) for update in shown] == [
                ("replay", "2"),
                ("replay", "0"),
                ("replay", "1"),
                ("turn", "0"),
                ("turn", "1"),
                ("turn", "2"),
            ]
            assert len(updates._queue) == 0  # pyright: ignore[reportPrivateUsage]
