"""An attached session at the client: each record once, in order, whatever the agent and the link do."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    AttachmentClosed,
    InvalidParams,
    LocalProtocolError,
    MethodNotFound,
    Reattach,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
    TelemetryEvent,
    TurnInProgress,
    connect,
)
from antiphon.sessions._attachment import Attachment
from antiphon.sessions._own_turn import OwnTurn
from antiphon.testing import run_virtual
from tests.sessions.any_order import AnyOrder
from tests.sessions.journaled import JournaledAgent, settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from antiphon import AgentPeer, PromptTurn, Session, Update

AT_ONCE = Reattach(delay=0)


@pytest.fixture(params=["ours", "raxol"])
def agent(request: pytest.FixtureRequest) -> JournaledAgent:
    return JournaledAgent(raxol=request.param == "raxol")


async def all_of(turn: PromptTurn) -> list[str]:
    return [update.text async for update in turn]


class World:
    """A client attached to a session of a scripted agent."""

    def __init__(self, agent: JournaledAgent, peer: AgentPeer, session: Session) -> None:
        self.agent = agent
        self.peer = peer
        self.session = session
        self.events: list[tuple[str, dict[str, Any]]] = []

    def named(self, name: str) -> list[dict[str, Any]]:
        """The facts of the events of that name."""
        return [facts for event, facts in self.events if event == name]

    async def caught_up(self) -> None:
        """Wait until the client holds all that the journal has."""
        journal = self.agent.journals["s1"]
        async with asyncio.timeout(10):
            while self.session.offset < len(journal):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def attached(agent: JournaledAgent, **options: Any) -> AsyncGenerator[World]:
    events: list[tuple[str, dict[str, Any]]] = []

    def note(event: TelemetryEvent) -> None:
        events.append((event.name, dict(event.facts)))

    options.setdefault("reattach", AT_ONCE)
    async with connect(agent.dial, telemetry=note, **options) as peer:
        session = await peer.new_session()
        world = World(agent, peer, session)
        world.events = events
        assert session.attached
        yield world


class Watcher:
    """Takes every update of a session as it comes."""

    def __init__(self, session: Session) -> None:
        self.updates: list[Update] = []
        self.subscription = session.updates()
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for update in self.subscription:
            self.updates.append(update)

    @property
    def texts(self) -> list[str]:
        return [text_of(update) for update in self.updates]

    @property
    def labelled(self) -> list[tuple[str, str]]:
        return [(update.label, text_of(update)) for update in self.updates]

    async def stop(self) -> None:
        self.subscription.close()
        await self.task


def text_of(update: Update) -> str:
    return str(json.loads(update.raw)["content"]["text"])


# -------------------------------------------------------------------- one turn, one link


async def test_an_own_turn_of_an_attached_session_is_seen_once(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        async with world.session.prompt("go") as turn:
            for text in "abc":
                agent.say("s1", text)
            agent.finish("s1")
            assert await all_of(turn) == ["a", "b", "c"]

        assert turn.stop_reason == "end_turn"
        assert world.session.offset == len(agent.journals["s1"])
        await settle()
        assert watcher.labelled == [("turn", "a"), ("turn", "b"), ("turn", "c")]
        await watcher.stop()


async def test_the_prompt_that_is_journaled_is_not_shown_to_who_sent_it() -> None:
    agent = JournaledAgent()
    async with attached(agent) as world:
        view = world.session.view
        async with world.session.prompt(["one", "two"]) as turn:
            agent.say("s1", "a")
            agent.finish("s1")
            assert await all_of(turn) == ["a"]
        # session_created, turn_started, two blocks, an update, turn_completed
        assert world.session.offset == 6
        assert [getattr(entry, "text", "") for entry in view.entries] == ["onetwo", "a"]


async def test_what_another_client_does_is_the_sessions(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.other_begins("s1", "theirs")
        agent.say("s1", "a")
        agent.finish("s1")
        await world.caught_up()
        await settle()

        shown = ["a"] if agent.raxol else ["theirs", "a"]
        assert watcher.labelled == [("session", text) for text in shown]
        await watcher.stop()


async def test_who_is_attached_can_ask_for_the_end_of_anothers_turn(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        await world.session.cancel()
        assert await agent.until_sent("session/cancel") == {"sessionId": "s1"}
        # From then on it is nobody's turn that we could know of.
        await world.session.detach()
        await world.session.cancel()
        await settle()

        assert len(agent.sent("session/cancel")) == 1


async def test_a_turn_of_another_client_is_not_taken_for_ours() -> None:
    agent = JournaledAgent()
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.held.add("session/prompt")
        async with world.session.prompt("ours") as turn:
            agent.other_begins("s1", "theirs")
            agent.say("s1", "a")
            agent.finish("s1")
            await settle()
            agent.held.clear()
            agent.serve(*agent.waiting[0])
            agent.say("s1", "b")
            agent.finish("s1", "refusal")
            assert await all_of(turn) == ["b"]

        assert turn.stop_reason == "refusal"
        await settle()
        assert watcher.labelled == [("session", "theirs"), ("session", "a"), ("turn", "b")]
        await watcher.stop()


async def test_a_refused_prompt_ends_at_once(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        agent.other_begins("s1")
        await world.caught_up()
        with pytest.raises(RequestError, match="already in flight"):
            await world.session.prompt("go")


async def test_a_turn_ends_after_its_records_where_its_answer_comes_before_them() -> None:
    agent = JournaledAgent(raxol=True)
    async with attached(agent) as world:
        agent.late = []
        async with world.session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.say("s1", "b")
            agent.finish("s1")
            await settle()
            assert not turn.ended
            agent.flush(2)
            await settle()
            assert not turn.ended
            agent.flush()
            assert await all_of(turn) == ["a", "b"]

        assert turn.stop_reason == "end_turn"


async def test_a_turn_that_could_not_be_stored_is_shown_all_the_same() -> None:
    agent = JournaledAgent(raxol=True)
    async with attached(agent) as world:
        async with world.session.prompt("go") as turn:
            agent.say("s1", "a")
            await settle()
            # The journal takes nothing more: what comes is told to the origin alone.
            kept = len(agent.journals["s1"])
            agent.late = []
            agent.say("s1", "b")
            agent.finish("s1")
            del agent.journals["s1"][kept:]
            agent.late = None
            assert await all_of(turn) == ["a", "b"]

        assert turn.stop_reason == "end_turn"


async def test_an_update_that_could_not_be_stored_keeps_its_place() -> None:
    agent = JournaledAgent(raxol=True)
    async with attached(agent) as world, world.session.prompt("go") as turn:
        agent.late = []
        agent.say("s1", "a")
        agent.link.tell(JournaledAgent.update_frame("s1", "b"))
        agent.say("s1", "c")
        agent.flush()
        agent.link.tell(JournaledAgent.update_frame("s1", "d"))
        agent.finish("s1")
        assert await all_of(turn) == ["a", "b", "c", "d"]


async def test_a_copy_that_differs_in_the_order_of_its_members_is_a_copy() -> None:
    agent = JournaledAgent(raxol=True)
    async with attached(agent) as world, world.session.prompt("go") as turn:
        agent.link.tell(JournaledAgent.update_frame("s1", "a", swapped=True))
        agent.append("s1", "session_update", JournaledAgent.chunk("a"), silent=True)
        agent.finish("s1")
        assert await all_of(turn) == ["a"]


# -------------------------------------------------------------------- offsets


@pytest.mark.covers("J6")
async def test_what_was_missed_after_a_lag_comes_once(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.other_begins("s1")
        agent.say("s1", "a")
        agent.lag("s1")
        agent.say("s1", "b")
        agent.say("s1", "c")
        await world.caught_up()
        agent.say("s1", "d")
        await world.caught_up()
        await settle()

        assert watcher.texts[-4:] == ["a", "b", "c", "d"]
        asked = agent.attaches("s1")[-1]
        assert asked["fromOffset"] == world.named("attachment_lagged")[0]["offset"] + 1
        await watcher.stop()


async def test_a_gap_is_filled_in_order(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.other_begins("s1")
        agent.say("s1", "a")
        await world.caught_up()
        agent.say("s1", "b")
        agent.link.waiting.clear()
        agent.say("s1", "c")
        await world.caught_up()
        await settle()

        assert watcher.texts[-3:] == ["a", "b", "c"]
        assert [gap["next"] - gap["offset"] for gap in world.named("attachment_gap")] == [2]
        await watcher.stop()


async def test_records_that_came_before_are_dropped(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.other_begins("s1")
        offset = agent.say("s1", "a")
        agent.link.tell(agent.frame("s1", offset))
        agent.link.tell(agent.frame("s1", 1))
        agent.say("s1", "b")
        await world.caught_up()
        await settle()

        assert watcher.texts[-2:] == ["a", "b"]
        assert not world.named("attachment_gap")
        await watcher.stop()


async def test_records_of_any_kind_are_passed_over_and_told(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        told: list[tuple[int, str]] = []
        stop = world.session.on_record(lambda record: told.append((record.offset, record.kind)))
        world.session.on_record(lambda _: 1 / 0)
        agent.append("s1", "weather", {"sky": "blue"})
        agent.append("s1", "steer", {"turnId": 1})
        await world.caught_up()
        stop()
        agent.append("s1", "weather", {})
        await world.caught_up()

        assert told == [(2, "weather"), (3, "steer")]


async def test_a_record_that_cannot_be_read_is_dropped_and_asked_for_again(
    agent: JournaledAgent,
) -> None:
    async with attached(agent) as world:
        agent.append("s1", "weather", {})
        frame = json.loads(agent.link.waiting.pop())
        frame["params"]["payload"] = None
        agent.link.tell(frame)
        agent.append("s1", "weather", {})
        await world.caught_up()

        assert [fact["method"] for fact in world.named("undecodable_notification")] == [
            "_raxol/session.record"
        ]
        assert len(world.named("attachment_gap")) == 1


async def test_records_that_never_come_end_the_attachment(agent: JournaledAgent) -> None:
    """An agent whose history has a hole is asked a few times, and then no more."""
    async with attached(agent) as world:
        agent.hidden.add(("s1", 2))
        watcher = Watcher(world.session)
        agent.append("s1", "weather", {})
        agent.append("s1", "weather", {})
        with pytest.raises(AttachmentClosed) as caught:
            await watcher.task

        assert (caught.value.reason, caught.value.offset) == ("gap", 1)
        assert not world.session.attached
        assert len(agent.attaches("s1")) < 10


# -------------------------------------------------------------------- the end of an attachment


@pytest.mark.covers("CDI-6")
async def test_a_revoked_attachment_is_raised_to_who_iterates(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.other_begins("s1")
        agent.say("s1", "a")
        agent.close("s1", "revoked")
        with pytest.raises(AttachmentClosed) as caught:
            await watcher.task

        assert watcher.texts[-1:] == ["a"]
        assert (caught.value.reason, caught.value.offset) == ("revoked", world.session.offset)
        # Once raised it is raised again, as for who looks twice.
        with pytest.raises(AttachmentClosed):
            await anext(watcher.subscription)
        watcher.subscription.close()
        with pytest.raises(StopAsyncIteration):
            await anext(watcher.subscription)


async def test_a_turn_goes_on_without_offsets_after_its_session_was_revoked(
    agent: JournaledAgent,
) -> None:
    async with attached(agent) as world, world.session.prompt("go") as turn:
        agent.say("s1", "a")
        agent.close("s1", "revoked")
        agent.say("s1", "b")
        agent.finish("s1")
        assert await all_of(turn) == ["a", "b"]


async def test_what_says_revoked_may_be_an_earlier_attach(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        await world.session.reattach()
        agent.link.tell(agent.notice("closed", {"sessionId": "s1", "reason": "revoked"}))
        await settle()
        agent.other_begins("s1")
        agent.say("s1", "a")
        await world.caught_up()
        await settle()
        assert watcher.texts[-1:] == ["a"]

        agent.refuse["_raxol/session.load"] = (-32000, "attach denied")
        agent.close("s1", "revoked")
        with pytest.raises(AttachmentClosed) as caught:
            await watcher.task
        assert caught.value.reason == "revoked"
        assert isinstance(caught.value.__cause__, RequestError)


async def test_an_attachment_that_the_agent_closes_is_made_again_with_the_option(
    agent: JournaledAgent,
) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.close("s1", "writer_down")
        agent.other_begins("s1")
        agent.say("s1", "a")
        await world.caught_up()
        await settle()

        assert watcher.texts[-1:] == ["a"]
        await watcher.stop()


async def test_an_attachment_that_the_agent_closes_is_over_without_the_option(
    agent: JournaledAgent,
) -> None:
    async with connect(agent.dial()) as peer:
        session = await peer.new_session()
        await session.reattach()
        watcher = Watcher(session)
        agent.close("s1", "writer_down")
        with pytest.raises(AttachmentClosed) as caught:
            await watcher.task
        assert caught.value.reason == "writer_down"


async def test_a_journal_that_ends_before_what_is_held_is_read_from_its_start(
    agent: JournaledAgent,
) -> None:
    async with attached(agent) as world:
        view = world.session.view
        agent.other_begins("s1", "old")
        for text in "abc":
            agent.say("s1", text)
        agent.finish("s1")
        await world.caught_up()
        watcher = Watcher(world.session)
        del agent.journals["s1"][1:]
        agent.other_begins("s1", "new")
        agent.say("s1", "d")
        agent.link.cut()
        await agent.until_sent("initialize", 2)
        await settle(60)

        assert world.session.offset == len(agent.journals["s1"])
        assert world.named("attachment_ahead")[0]["high_watermark"] == len(agent.journals["s1"])
        shown = ["d"] if agent.raxol else ["new", "d"]
        assert watcher.labelled == [("replay", text) for text in shown]
        assert [getattr(entry, "text", "") for entry in view.entries] == shown
        await watcher.stop()


async def test_an_open_turn_that_is_not_in_the_journal_ends(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        async with world.session.prompt("go") as turn:
            agent.say("s1", "a")
            first = await anext(turn)
            await world.caught_up()
            del agent.journals["s1"][1:]
            agent.link.cut()
            with pytest.raises(AttachmentClosed) as caught:
                await anext(turn)

        assert text_of(first) == "a"
        assert caught.value.reason == "ahead"


async def test_a_closed_session_is_attached_no_more(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        await world.session.close()
        agent.close("s1", "writer_down")
        agent.link.cut()
        await agent.until_sent("initialize", 2)
        await settle()

        assert [attach["fromOffset"] for attach in agent.attaches("s1")] == [1]


async def test_a_detached_session_is_attached_no_more(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        await world.session.detach()
        await world.session.detach()
        await settle()

        assert agent.sent("_raxol/session.detach") == [{"sessionId": "s1"}]
        assert not world.session.attached
        async with world.session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.finish("s1")
            assert await all_of(turn) == ["a"]


# -------------------------------------------------------------------- attaching by hand


async def test_an_agent_that_attaches_nothing_says_so() -> None:
    agent = JournaledAgent()
    agent.refuse["_raxol/session.load"] = (-32601, "Method not found")
    async with connect(agent.dial()) as peer:
        session = await peer.new_session()
        with pytest.raises(MethodNotFound):
            await session.reattach()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.finish("s1")
            assert await all_of(turn) == ["a"]


async def test_a_session_is_attached_in_the_middle_of_its_turn(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as peer:
        session = await peer.new_session()
        watcher = Watcher(session)
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            agent.say("s1", "b")
            await settle()
            assert await session.reattach() == len(agent.journals["s1"])
            agent.say("s1", "c")
            agent.finish("s1")
            assert await all_of(turn) == ["a", "b", "c"]
        await settle()
        assert watcher.texts == ["a", "b", "c"]
        assert session.offset == len(agent.journals["s1"])
        await watcher.stop()


async def test_a_session_is_attached_from_now_on_in_the_middle_of_its_turn() -> None:
    agent = JournaledAgent()
    async with connect(agent.dial()) as peer:
        session = await peer.new_session()
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            await settle()
            await session.reattach(history="tip")
            agent.say("s1", "b")
            agent.finish("s1")
            assert await all_of(turn) == ["a", "b"]


async def test_the_mark_is_asked_for_without_attaching(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as peer:
        session = await peer.new_session()
        agent.append("s1", "weather", {})

        assert await session.reattach(history="none") == 2
        assert not session.attached
        assert session.offset == 0


async def test_an_earlier_offset_gives_records_again(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        view = world.session.view
        agent.other_begins("s1", "theirs")
        agent.say("s1", "a")
        agent.finish("s1")
        await world.caught_up()
        watcher = Watcher(world.session)
        await world.session.reattach(from_offset=1)
        agent.other_begins("s1", "again")
        agent.say("s1", "b")
        await world.caught_up()
        await settle()

        theirs, again = ([], []) if agent.raxol else (["theirs"], ["again"])
        assert watcher.labelled == [
            *(("replay", text) for text in [*theirs, "a"]),
            *(("session", text) for text in [*again, "b"]),
        ]
        assert "".join(getattr(entry, "text", "") for entry in view.entries) == "".join(
            [*theirs, "a", *again, "b"]
        )
        await watcher.stop()


async def test_what_an_open_turn_has_had_is_not_given_again(agent: JournaledAgent) -> None:
    async with attached(agent) as world, world.session.prompt("go") as turn:
        agent.say("s1", "a")
        await world.caught_up()
        with pytest.raises(TurnInProgress):
            await world.session.reattach(from_offset=1)
        agent.finish("s1")
        assert await all_of(turn) == ["a"]


async def test_an_offset_ahead_of_the_journal_is_refused(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        with pytest.raises(InvalidParams) as caught:
            await world.session.reattach(from_offset=99)
        assert caught.value.data == {"highWatermark": 1}


async def test_a_refused_attach_leaves_the_session_as_it_was(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        watcher = Watcher(world.session)
        agent.refuse["_raxol/session.load"] = (-32000, "attach denied")
        with pytest.raises(RequestError, match="attach denied"):
            await world.session.reattach()
        agent.other_begins("s1")
        agent.say("s1", "a")
        await world.caught_up()
        await settle()

        assert watcher.texts[-1:] == ["a"]
        await watcher.stop()


async def test_what_permits_is_asked_each_time(agent: JournaledAgent) -> None:
    asked: list[str] = []

    async def permit(session_id: str) -> str:
        asked.append(session_id)
        await asyncio.sleep(0)
        return f"RXC1.{len(asked)}"

    async with attached(agent, reattach=Reattach(delay=0, capability=permit)) as world:
        agent.lag("s1")
        agent.append("s1", "weather", {})
        await world.caught_up()
        await world.session.reattach(capability="RXC1.mine")

        assert asked == ["s1", "s1"]
        assert [attach.get("capability") for attach in agent.attaches("s1")] == [
            "RXC1.1",
            "RXC1.2",
            "RXC1.mine",
        ]


async def test_what_permits_and_fails_narrows(agent: JournaledAgent) -> None:
    def permit(_: str) -> str:
        msg = "no key"
        raise RuntimeError(msg)

    async with attached(agent, reattach=Reattach(delay=0, capability=permit)):
        assert "capability" not in agent.attaches("s1")[0]


# -------------------------------------------------------------------- opening by an attach


async def test_a_session_of_others_is_attached_with_its_history(agent: JournaledAgent) -> None:
    agent.journals["s7"] = []
    agent.append("s7", "session_created", {})
    agent.other_begins("s7", "theirs")
    agent.say("s7", "a")
    agent.held.add("_raxol/session.load")
    async with connect(agent.dial()) as peer:
        async with peer.attach_session("s7", cwd="/srv") as session:
            updates = session.updates()
            await settle()
            agent.held.clear()
            agent.serve(*agent.waiting[0])
            history = [text_of(update) async for update in session.replay()]
        assert history == (["a"] if agent.raxol else ["theirs", "a"])
        assert (session.attached, session.offset) == (True, len(agent.journals["s7"]))
        agent.say("s7", "b")
        live = [await anext(updates) for _ in range(len(history) + 1)][-1]
        assert (live.label, text_of(live)) == ("session", "b")
        assert agent.sent("_raxol/session.load")[0]["cwd"] == "/srv"


async def test_a_session_that_is_known_is_not_attached_as_a_new_one(agent: JournaledAgent) -> None:
    async with attached(agent) as world:
        with pytest.raises(LocalProtocolError, match="known"):
            await world.peer.attach_session("s1")


async def test_a_session_that_cannot_be_attached_is_forgotten(agent: JournaledAgent) -> None:
    async with connect(agent.dial()) as peer:
        with pytest.raises(ResourceNotFound):
            await peer.attach_session("s9")
        assert "s9" not in peer.sessions

        agent.journals["s9"] = []
        agent.append("s9", "session_created", {})
        session = await peer.attach_session("s9", history="tip", capability="RXC1.x")
        assert session.offset == 1
        assert agent.attaches("s9")[-1] == {
            "fromOffset": 1,
            "historyPolicy": "tip",
            "capability": "RXC1.x",
        }


async def test_an_attach_that_is_given_up_closes_no_session_of_others(
    agent: JournaledAgent,
) -> None:
    agent.journals["s7"] = []
    agent.append("s7", "session_created", {})
    agent.held.add("_raxol/session.load")
    async with connect(agent.dial()) as peer:
        with pytest.raises(RequestTimeout):
            await peer.attach_session("s7", timeout=1)
        agent.held.clear()
        agent.serve(*agent.waiting[0])
        await agent.until_sent("_raxol/session.detach")

        assert peer.sessions == {}
        assert not agent.sent("session/close")
        session = await peer.attach_session("s7")
        assert session.offset == 1


async def test_a_load_of_a_durable_session_is_attached_behind_its_history(
    agent: JournaledAgent,
) -> None:
    agent.journals["s1"] = []
    agent.append("s1", "session_created", {})
    agent.other_begins("s1", "theirs")
    agent.say("s1", "a")
    agent.finish("s1")
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        async with peer.load_session("s1") as session:
            watcher = Watcher(session)
        agent.other_begins("s1", "more")
        agent.say("s1", "b")
        async with asyncio.timeout(10):
            while session.offset < len(agent.journals["s1"]):
                await asyncio.sleep(0.001)
        await settle()

        theirs, more = ([], []) if agent.raxol else (["theirs"], ["more"])
        assert watcher.labelled == [
            *(("replay", text) for text in [*theirs, "a"]),
            *(("session", text) for text in [*more, "b"]),
        ]
        assert session.attached
        await watcher.stop()


async def test_a_history_without_offsets_is_not_given_again(agent: JournaledAgent) -> None:
    agent.journals["s1"] = []
    agent.append("s1", "session_created", {})
    agent.other_begins("s1", "theirs")
    agent.say("s1", "a")
    agent.finish("s1")
    agent.riders = False
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        async with peer.load_session("s1") as session:
            watcher = Watcher(session)
        await settle()

        assert watcher.texts == (["a"] if agent.raxol else ["theirs", "a"])
        assert agent.attaches("s1")[-1]["historyPolicy"] == "tip"
        await watcher.stop()


async def test_a_resumed_session_is_attached_from_now_on(agent: JournaledAgent) -> None:
    agent.journals["s1"] = []
    agent.append("s1", "session_created", {})
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        session = await peer.resume_session("s1")

        assert session.attached
        assert agent.attaches("s1")[-1]["historyPolicy"] == "tip"


# -------------------------------------------------------------------- any order


@pytest.mark.covers("J1")
@pytest.mark.parametrize("block", range(6))
def test_whatever_happens_each_record_is_seen_once_and_in_order(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        run_virtual(AnyOrder(seed).run())


def break_duplicates(patch: pytest.MonkeyPatch) -> None:
    """Take every record that is not older than the last, instead of the next one alone."""

    def take(self: Attachment, offset: int) -> bool:
        self.offset = max(self.offset, offset)
        return True

    patch.setattr(Attachment, "_take", take)


def break_gaps(patch: pytest.MonkeyPatch) -> None:
    """Go on behind a gap."""

    def take(self: Attachment, offset: int) -> bool:
        newer = offset > self.offset
        self.offset = max(self.offset, offset)
        return newer

    patch.setattr(Attachment, "_take", take)


def break_copies(patch: pytest.MonkeyPatch) -> None:
    """Show both copies of an update."""
    patch.setattr(Attachment, "_told", Attachment._give)


def break_prompts(patch: pytest.MonkeyPatch) -> None:
    """Take any turn that begins for ours."""
    plain = OwnTurn.started

    def started(self: OwnTurn) -> None:
        plain(self)
        self._expected = ()

    patch.setattr(OwnTurn, "started", started)


def break_healing(patch: pytest.MonkeyPatch) -> None:
    """Attach again from one too late."""
    plain = Attachment._ask_once

    async def ask(self: Attachment, start: int, *more: Any, **options: Any) -> int:
        return await plain(self, start + (start > 1), *more, **options)

    patch.setattr(Attachment, "_ask_once", ask)


@pytest.mark.parametrize(
    "fault",
    [break_duplicates, break_gaps, break_copies, break_prompts, break_healing],
    ids=lambda fault: fault.__name__,
)
def test_a_client_that_is_wrong_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        for seed in range(60):
            run_virtual(AnyOrder(seed).run())
