"""The way of a durable session's updates: to the journal, then to the wire, in one order."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import (
    DEFERRED,
    Agent,
    Capabilities,
    ConnectionClosed,
    Durability,
    LimitExceeded,
    Limits,
    Turn,
    extension,
)
from antiphon.journal import Entry, JournalError, MemoryJournal, SessionLog
from antiphon.schema import encode_checked, v1
from antiphon.sessions._durable_link import DurableLink
from antiphon.testing import RawPeer, raw_client
from tests.journal.ears import LogOver

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.journal import Record

NEW: dict[str, Any] = {"cwd": "/work", "mcpServers": []}


class Gated(MemoryJournal):
    """A journal on which nothing becomes durable while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.hurried = 0
        self.broken = False

    async def open(self, session_id: str) -> SessionLog:
        return GatedLog(self, await super().open(session_id))


class GatedLog(LogOver):
    """A log of it."""

    def __init__(self, journal: Gated, log: SessionLog) -> None:
        super().__init__(log)
        self._journal = journal

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self._journal.asked.set()
        self._journal.hurried += flush
        await self._journal.gate.wait()
        if self._journal.broken:
            raise JournalError("broken")
        return await super().append(entries, flush=flush)

    def hurry(self) -> None:
        self._journal.hurried += 1


class Scripted(Agent):
    """Runs what it is given as its turn."""

    def __init__(self, script: Any) -> None:
        self.script = script

    async def prompt(self, turn: Turn) -> Any:
        return await self.script(turn)


@asynccontextmanager
async def session(script: Any, journal: Any, **options: Any) -> AsyncGenerator[tuple[RawPeer, str]]:
    async with raw_client(Scripted(script), journal=journal, **options) as raw:
        answer = await raw.ask("session/new", NEW)
        yield raw, answer["result"]["sessionId"]


def prompt(raw: RawPeer, session_id: str, id_: str = "p") -> None:
    blocks = [{"type": "text", "text": "go"}]
    raw.send(raw.request(id_, "session/prompt", {"sessionId": session_id, "prompt": blocks}))


def texts(raw: RawPeer) -> list[str]:
    return [frame["params"]["update"]["content"]["text"] for frame in raw.sent("session/update")]


async def turns_of_the_loop(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_leaves_before_it_is_durable() -> None:
    journal = Gated()
    said = asyncio.Event()

    async def script(turn: Turn) -> None:
        journal.gate.clear()
        journal.asked.clear()
        await turn.say("one")
        await turn.say("two")
        said.set()

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await said.wait()
        await journal.asked.wait()
        await turns_of_the_loop()
        assert texts(raw) == []
        assert not raw.responses("p")

        journal.gate.set()
        await raw.until(lambda: raw.responses("p"))
        assert texts(raw) == ["one", "two"]


async def test_one_that_cannot_leave_hinders_none_of_those_that_became_durable_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(turn: Turn) -> None:
        link = turn.session.link
        assert isinstance(link, DurableLink)
        connection = link.connection
        send = connection.send

        def fails_for_two(frame: bytes, **options: Any) -> None:
            if b'"two"' in frame or b"behind two" in frame:
                raise OSError("too much")
            send(frame, **options)

        connection.send = fails_for_two
        for text in ("one", "two", "three"):
            await turn.say(text)
        link.send_behind(b'{"jsonrpc":"2.0","method":"_x/behind two"}')
        link.send_behind(b'{"jsonrpc":"2.0","method":"_x/behind"}')
        await turn.say("four")

    async with session(script, MemoryJournal()) as (raw, session_id):
        prompt(raw, session_id)
        await raw.until(lambda: raw.responses("p"))

        assert texts(raw) == ["one", "three", "four"]
        after = [frame["method"] for frame in raw.frames if "method" in frame][-2:]
        assert after == ["_x/behind", "session/update"]
    assert "did not leave" in caplog.text


async def test_saying_returns_when_it_is_queued_and_waits_where_too_much_is() -> None:
    journal = Gated()
    told: list[int] = []
    waits = asyncio.Event()

    async def script(turn: Turn) -> None:
        journal.gate.clear()
        for number in range(3000):
            if number == 1000:
                waits.set()
            await turn.say(str(number))
            told.append(number)

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await waits.wait()
        await turns_of_the_loop()
        assert len(told) < 1100

        journal.gate.set()
        await raw.until(lambda: raw.responses("p"))
        assert texts(raw) == [str(number) for number in range(3000)]


async def test_the_end_of_a_turn_and_a_question_hurry_the_journal() -> None:
    journal = Gated()

    async def script(turn: Turn) -> None:
        before = journal.hurried
        await turn.say("one")
        await turn.ask_permission("may I?")
        assert journal.hurried > before

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        question = await raw.wait("session/request_permission")
        assert texts(raw) == ["one"]
        before = journal.hurried
        raw.answer(question, {"outcome": {"outcome": "cancelled"}})
        await raw.until(lambda: raw.responses("p"))
        assert journal.hurried > before


async def test_a_question_of_a_turn_that_is_cancelled_while_it_waits_is_not_asked() -> None:
    journal = Gated()
    answers: list[Any] = []
    held = asyncio.Event()

    async def script(turn: Turn) -> None:
        journal.gate.clear()
        await turn.say("one")
        held.set()
        answers.append(await turn.ask_permission("may I?"))

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await held.wait()
        raw.send(raw.notification("session/cancel", {"sessionId": session_id}))
        await turns_of_the_loop()
        journal.gate.set()
        await raw.until(lambda: raw.responses("p"))

        assert not raw.sent("session/request_permission")
        assert [answer.allowed for answer in answers] == [False]


async def test_a_released_terminal_is_released_behind_the_updates_that_show_it() -> None:
    journal = Gated()
    held = asyncio.Event()

    async def script(turn: Turn) -> None:
        async with turn.run("make") as command:
            journal.gate.clear()
            await turn.send(
                v1.ToolCall(tool_call_id="t", title="make", content=[command.as_content()])
            )
            held.set()

    async with raw_client(Scripted(script), {"terminal": True}, journal=journal) as raw:
        session_id = (await raw.ask("session/new", NEW))["result"]["sessionId"]
        prompt(raw, session_id)
        raw.answer(await raw.wait("terminal/create"), {"terminalId": "x"})
        await held.wait()
        await turns_of_the_loop()
        assert not raw.sent("terminal/release")
        journal.gate.set()
        release = await raw.wait("terminal/release")
        methods = [frame.get("method") for frame in raw.frames]
        assert methods.index("session/update") < methods.index("terminal/release")
        raw.answer(release, {})
        await raw.until(lambda: raw.responses("p"))


async def test_a_frame_over_the_limit_is_refused_before_it_is_journaled() -> None:
    journal = MemoryJournal()
    raised: list[BaseException] = []

    async def script(turn: Turn) -> None:
        try:
            await turn.say("x" * 200_000)
        except LimitExceeded as error:
            raised.append(error)

    async with session(script, journal, limits=Limits(frame_bytes=100_000)) as (raw, session_id):
        prompt(raw, session_id)
        await raw.until(lambda: raw.responses("p"))
        log = await journal.open(session_id)
        kinds = [record.tag for record in await log.read(1, 100)]

    assert len(raised) == 1
    assert kinds == ["session_created", "turn_started", "user_message_chunk", "turn_completed"]


async def test_an_update_sent_as_a_notification_is_journaled_too() -> None:
    journal = MemoryJournal()

    async def script(turn: Turn) -> None:
        update = v1.AgentMessageChunk(content=v1.TextContent(text="by hand"))
        await turn.peer.notify(v1.SessionNotification(session_id=turn.session_id, update=update))

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await raw.until(lambda: raw.responses("p"))
        log = await journal.open(session_id)
        found = [record.tag for record in await log.read(1, 100)]

        assert texts(raw) == ["by hand"]
        assert found.count("agent_message_chunk") == 1


async def test_updates_that_nobody_knows_are_kept_with_their_own_tag() -> None:
    journal = MemoryJournal()

    async def script(turn: Turn) -> None:
        await turn.plan(["one"])
        await turn.usage(used=1, size=2)
        await turn.think("hm")

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await raw.until(lambda: raw.responses("p"))
        log = await journal.open(session_id)
        found = [(record.tag, record.taint) for record in await log.read(4, 6)]

    assert found == [
        ("plan", "agent"),
        ("usage_update", "system"),
        ("agent_thought_chunk", "agent"),
    ]


async def test_verbs_fail_with_the_link_where_the_turn_ends_with_it() -> None:
    ended: list[BaseException] = []
    began, over = asyncio.Event(), asyncio.Event()

    async def script(turn: Turn) -> None:
        began.set()
        try:
            await turn.wait_cancelled()
            await turn.say("too late")
        except ConnectionClosed as error:
            ended.append(error)
        finally:
            over.set()

    async with session(script, MemoryJournal()) as (raw, session_id):
        prompt(raw, session_id)
        await began.wait()
    await over.wait()

    assert len(ended) == 1


async def test_subtasks_go_on_with_a_turn_that_outlives_its_link() -> None:
    journal = MemoryJournal()
    durability = Durability(journal, outlive=True)
    began, go = asyncio.Event(), asyncio.Event()

    async def work(turn: Turn) -> None:
        await go.wait()
        await turn.say("from a subtask")

    async def script(turn: Turn) -> None:
        turn.start_soon(work(turn))
        began.set()

    async with session(script, durability) as (raw, session_id):
        prompt(raw, session_id)
        await began.wait()
    go.set()
    async for run in journal.follow(session_id, 4):
        if run[-1].kind == "turn_completed":
            break
    log = await journal.open(session_id)
    await durability.aclose()

    last = (await log.read(4, 9))[-2:]
    assert last[0].data["content"]["text"] == "from a subtask"
    assert last[1].data == {"turnId": 1, "stopReason": "end_turn"}


@pytest.mark.virtual_time
async def test_a_session_that_nobody_uses_is_let_go_of_and_its_journal_stays() -> None:
    journal = MemoryJournal()
    events: list[str] = []
    release = asyncio.Event()

    async def script(turn: Turn) -> None:
        await release.wait()
        await turn.say("one")

    def told(event: Any) -> None:
        if event.name == "session_idle_reaped":
            events.append(event.facts["session"])

    durability = Durability(journal, idle=30)
    async with session(script, durability, telemetry=told) as (raw, session_id):
        prompt(raw, session_id)
        await asyncio.sleep(100)  # a running turn is never idle, however quiet
        release.set()
        await raw.until(lambda: raw.responses("p"))
        for _ in range(5):  # whatever is asked begins its time anew
            await asyncio.sleep(25)
            answer = await raw.ask("session/load", {"sessionId": session_id, **NEW})
            assert "result" in answer
        writer = durability.writers.get(session_id)
        assert writer is not None
        await asyncio.sleep(70)
        await raw.until(lambda: raw.sent("_raxol/session.closed"))

        assert events == [session_id]
        assert raw.sent("_raxol/session.closed")[0]["params"]["reason"] == "idle"
        await turns_of_the_loop()
        assert durability.writers.get(session_id) is None
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": []})
        assert answer["error"]["code"] == -32002
        again = await raw.ask("session/load", {"sessionId": session_id, **NEW})
        assert again["result"]["_meta"]["raxol.io"]["highWatermark"] == 5


@pytest.mark.virtual_time
async def test_a_journal_that_hangs_does_not_keep_a_connection_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = Gated()
    held = asyncio.Event()

    async def script(turn: Turn) -> None:
        journal.gate.clear()
        await turn.say("one")
        held.set()

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await held.wait()

    assert "still being written" in caplog.text
    journal.gate.set()
    await Durability.of(journal).aclose()
    assert [record.tag for record in await (await journal.open(session_id)).read(4, 9)] == [
        "agent_message_chunk",
        "turn_completed",
    ]


STEPS = st.lists(
    st.sampled_from(["say", "ask", "close", "open", "yield", "attach", "detach", "tool"]),
    max_size=25,
)


@pytest.mark.covers("J10")
@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_whatever_happens_on_the_way_each_update_is_seen_once_in_the_order_of_the_journal(
    steps: list[str],
) -> None:
    """Bare or as a copy, before questions and the answer that follow it."""
    asyncio.run(_any_order(steps))


async def _any_order(steps: list[str]) -> None:
    journal = Gated()
    said: list[str] = []
    questions: list[int] = []

    async def script(turn: Turn) -> None:
        for step in steps:
            match step:
                case "say":
                    said.append(f"s{len(said)}")
                    await turn.say(said[-1])
                case "tool":
                    said.append(f"s{len(said)}")
                    await turn.think(said[-1])
                case "ask":
                    questions.append(len(said))
                    journal.gate.set()
                    await turn.ask_permission("?")
                case "close":
                    journal.gate.clear()
                case "open":
                    journal.gate.set()
                case "attach":
                    journal.gate.set()
                    await ask("_raxol/session.load", {"historyPolicy": "tip"})
                case "detach":
                    raw.send(raw.notification("_raxol/session.detach", {"sessionId": session_id}))
                    await turns_of_the_loop(4)
                case _:
                    await turns_of_the_loop(3)
        journal.gate.set()

    async def ask(method: str, rider: dict[str, Any]) -> None:
        params = {"sessionId": session_id, "cwd": "/work", "_meta": {"raxol.io": rider}}
        assert "result" in await raw.ask(method, params)

    async with session(script, journal) as (raw, session_id):
        answering = asyncio.create_task(
            _answer_questions(raw, len([s for s in steps if s == "ask"]))
        )
        prompt(raw, session_id)
        await raw.until(lambda: raw.responses("p"))
        await answering
        log = await journal.open(session_id)
        records = await log.read(1, 1000)

    kept = [
        record.data["content"]["text"]
        for record in records
        if record.tag in {"agent_message_chunk", "agent_thought_chunk"}
    ]
    assert kept == said
    seen: list[str] = []
    asked: list[int] = []
    for frame in raw.frames:
        if frame.get("method") == "session/update":
            update = frame["params"]["update"]
            if update["sessionUpdate"] != "user_message_chunk":
                seen.append(update["content"]["text"])
        elif frame.get("method") == "session/request_permission":
            asked.append(len(seen))
        elif frame.get("id") == "p":
            assert seen == said
    assert seen == said
    assert asked == questions


async def _answer_questions(raw: RawPeer, count: int) -> None:
    for number in range(count):
        await raw.until(lambda: len(raw.sent("session/request_permission")) > number)  # noqa: B023
        question = raw.sent("session/request_permission")[number]
        raw.answer(question, {"outcome": {"outcome": "cancelled"}})


# -------------------------------------------------------------------------------- frames and their order


class Extended(Scripted):
    """Has methods of its own, which say something about the session."""

    def __init__(self) -> None:
        super().__init__(None)
        self.later: list[Any] = []

    @extension("_test/now")
    async def now(self, params: Any, ctx: Any) -> dict[str, Any]:
        await ctx.session().set_mode("code")
        return {"ok": True}

    @extension("_test/later")
    async def defer(self, params: Any, ctx: Any) -> Any:
        await ctx.session().set_mode("code")
        self.later.append(ctx.defer())
        return DEFERRED


@pytest.mark.parametrize("method", ["_test/now", "_test/later"])
async def test_an_extensions_answer_leaves_behind_what_its_handler_has_said(method: str) -> None:
    journal, agent = Gated(), Extended()
    async with raw_client(agent, journal=journal) as raw:
        session_id = (await raw.ask("session/new", NEW))["result"]["sessionId"]
        raw.forget()
        journal.gate.clear()
        journal.asked.clear()
        raw.send(raw.request("e", method, {"sessionId": session_id}))
        await journal.asked.wait()
        if agent.later:
            agent.later.pop().send({"ok": True})
        await raw.round_trip()
        assert not raw.responses("e")
        journal.gate.set()
        await raw.answer_to("e")

        kinds = [frame.get("method", frame.get("id")) for frame in raw.frames]
        assert kinds.index("session/update") < kinds.index("e")


async def test_what_withdraws_a_question_does_not_overtake_it() -> None:
    journal = Gated()

    async def script(turn: Turn) -> None:
        async def speak() -> None:
            # It goes on in the same step as the question, and before it.
            link = turn.session.durable
            assert link is not None
            await link.settled()
            journal.gate.clear()
            await turn.say("two")

        await turn.say("one")
        journal.gate.clear()
        speaking = asyncio.create_task(speak())
        await turns_of_the_loop(2)
        asking = asyncio.create_task(turn.ask_permission("may I?"))
        await turns_of_the_loop(2)
        journal.gate.set()
        await asyncio.gather(speaking, asking)

    async with session(script, journal) as (raw, session_id):
        prompt(raw, session_id)
        await raw.until(lambda: texts(raw) == ["one"])
        await raw.round_trip()
        assert not raw.sent("session/request_permission")  # "two" is in front of it
        raw.send(raw.notification("session/cancel", {"sessionId": session_id}))
        await raw.round_trip()
        journal.gate.set()
        await raw.answer_to("p")

        asked = [f["method"] for f in raw.frames if "method" in f and "update" not in f["method"]]
        assert asked == ["session/request_permission", "$/cancel_request"]


@pytest.mark.parametrize("spare", range(0, 200, 10))
async def test_what_is_kept_fits_into_a_frame_as_a_copy_too(spare: int) -> None:
    limits = Limits(frame_bytes=100_000)

    async def script(turn: Turn) -> None:
        empty = encode_checked(v1.AgentMessageChunk(content=v1.TextContent(text="")))
        room = limits.frame_bytes - len(turn.session.head.update) - len(empty) - 2 - spare
        await turn.say("x" * room)

    journal = MemoryJournal()
    agent = Scripted(script)
    async with (
        raw_client(agent, journal=journal, limits=limits) as raw,
        raw_client(agent, journal=journal, limits=limits) as other,
    ):
        session_id = (await raw.ask("session/new", NEW))["result"]["sessionId"]
        text = {"type": "text", "text": ""}
        ask = raw.request("p", "session/prompt", {"sessionId": session_id, "prompt": [text]})
        text["text"] = "é" * ((limits.frame_bytes - len(json.dumps(ask)) - spare) // 2)
        raw.send(json.dumps(ask, ensure_ascii=False).encode())
        answer = await raw.answer_to("p")
        params: dict[str, Any] = {
            "sessionId": session_id,
            "cwd": "/work",
            "_meta": {"raxol.io": {}},
        }
        await other.ask("_raxol/session.load", params)

        # Either it was refused to whoever said it, or everybody can be told.
        told = [frame["params"]["update"] for frame in other.sent("session/update")]
        own = [u for u in told if u["sessionUpdate"] == "agent_message_chunk"]
        assert len(own) == ("result" in answer)
        assert max(len(frame) for frame in other.raw_frames) <= limits.frame_bytes
        prompted = [
            u["content"]["text"] for u in told if u["sessionUpdate"] == "user_message_chunk"
        ]
        assert "".join(prompted) == text["text"]


async def test_a_block_that_no_frame_has_room_for_is_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(frame_bytes=100_000)
    journal = MemoryJournal()

    async def script(turn: Turn) -> None:
        await turn.say(str(len(turn.blocks)))

    async with raw_client(Pictures(script), journal=journal, limits=limits) as raw:
        session_id = (await raw.ask("session/new", NEW))["result"]["sessionId"]
        image = {"type": "image", "mimeType": "image/png", "data": ""}
        blocks = [{"type": "text", "text": "see"}, image]
        ask = raw.request("p", "session/prompt", {"sessionId": session_id, "prompt": blocks})
        image["data"] = "A" * (limits.frame_bytes - len(json.dumps(ask)))
        raw.send(ask)
        assert "result" in await raw.answer_to("p")
    log = await journal.open(session_id)
    records = await log.read(1, await log.high_watermark())

    assert [record.tag for record in records] == [
        "session_created",
        "turn_started",
        "user_message_chunk",
        "agent_message_chunk",
        "turn_completed",
    ]
    assert "a block of a prompt is not kept" in caplog.text


@pytest.mark.covers("J7", "R1-98")
@pytest.mark.parametrize("outlive", [True, False])
async def test_a_turn_that_is_over_is_answered_as_it_is_kept_whoever_cancels_it(
    *, outlive: bool
) -> None:
    journal = Gated()

    async def script(turn: Turn) -> None:
        await turn.say("one")
        assert turn.session.durable is not None
        await turn.session.durable.settled()
        journal.gate.clear()

    durability = Durability(journal, outlive=outlive)
    async with session(script, durability) as (raw, session_id):
        prompt(raw, session_id)
        link = durability.links(session_id)[0]
        await raw.until(lambda: texts(raw) == ["one"])
        await turns_of_the_loop()
        assert link.session.turn is None
        raw.send(
            raw.notification("session/cancel", {"sessionId": session_id}),
            raw.notification("$/cancel_request", {"requestId": "p"}),
        )
        await raw.round_trip()
        journal.gate.set()
        answer = await raw.answer_to("p")
    log = await journal.open(session_id)
    last = (await log.read(1, await log.high_watermark()))[-1]

    assert answer["result"] == {"stopReason": "end_turn"}
    assert last.data == {"turnId": 1, "stopReason": "end_turn"}


class Pictures(Scripted):
    """Takes images."""

    capabilities = Capabilities(image=True)
