"""What an agent with a journal does with whatever its clients send: turns, loads, attaches, steers."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    Agent,
    Capabilities,
    Durability,
    Limits,
    RequestError,
    TelemetryEvent,
    Turn,
    extension,
)
from antiphon.journal import (
    Entry,
    Grant,
    JournalError,
    MemoryJournal,
    SessionInfo,
    SessionLog,
)
from antiphon.schema import v1
from antiphon.testing import RawPeer, raw_client
from tests.journal.ears import LogOver

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.journal import AttachContext, Record

NEW: dict[str, Any] = {"cwd": "/work", "mcpServers": []}


class Scripted(Agent):
    """Does what it is told by the prompt; waits for `go` where it is told to."""

    capabilities = Capabilities(
        modes=(v1.SessionMode(id="ask", name="Ask"), v1.SessionMode(id="code", name="Code"))
    )

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.steered: list[str | None] = []
        self.turns: list[Turn] = []
        self.answers: list[Any] = []

    async def prompt(self, turn: Turn) -> Any:
        self.turns.append(turn)
        for word in turn.text.split():
            match word:
                case "wait":
                    self.waiting.set()
                    await self.go.wait()
                case "until-cancelled":
                    self.waiting.set()
                    await turn.wait_cancelled()
                case "hang":
                    self.waiting.set()
                    await asyncio.get_running_loop().create_future()
                case "tool":
                    async with turn.tool("look", tool_call_id="t1"):
                        pass
                case "ask":
                    self.answers.append(await turn.ask_permission("may I?"))
                case "refuse":
                    raise RequestError(-32050, "not today", {"secret": "data"})
                case "crash":
                    raise RuntimeError("a secret")
                case "limit":
                    return "max_tokens"
                case _:
                    await turn.say(word)
        return None


class Steered(Scripted):
    """Takes new directions."""

    async def steer(self, turn: Turn, text: str | None) -> None:
        assert turn is self.turns[-1]
        self.steered.append(text)


@asynccontextmanager
async def client(
    agent: Agent, journal: Any, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[RawPeer]:
    async with raw_client(agent, capabilities, journal=journal, **options) as raw:
        yield raw


async def opened(raw: RawPeer, **params: Any) -> str:
    answer = await raw.ask("session/new", {**NEW, **params})
    return str(answer["result"]["sessionId"])


def prompt_of(session_id: str, text: str) -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


async def prompt(raw: RawPeer, session_id: str, text: str, id_: Any = None) -> dict[str, Any]:
    return await raw.ask("session/prompt", prompt_of(session_id, text), id_)


def rider(**members: Any) -> dict[str, Any]:
    return {"_meta": {"raxol.io": members}}


async def attach(raw: RawPeer, session_id: str, id_: Any = None, **members: Any) -> dict[str, Any]:
    params = {"sessionId": session_id, "cwd": "/work", **rider(**members)}
    return await raw.ask("_raxol/session.load", params, id_)


async def records(journal: MemoryJournal, session_id: str) -> list[Record]:
    log = await journal.open(session_id)
    found = await log.read(1, await log.high_watermark())
    assert [record.offset for record in found] == list(range(1, len(found) + 1))
    return found


def told(record: Record) -> str:
    """A record in one word: its kind, or what an update's text is."""
    if record.kind != "session_update":
        return record.kind
    content: Any = record.data.get("content") or {}
    text: str | None = content.get("text")
    return f"{record.tag}:{text}" if text else record.tag


def shown(frames: Sequence[dict[str, Any]]) -> list[Any]:
    """What a client got: texts of bare updates, (offset, text or kind) of copies, `response` ids."""
    found: list[Any] = []
    for frame in frames:
        params = frame.get("params", {})
        match frame.get("method"):
            case "session/update":
                update = params["update"]
                what = update.get("content", {}).get("text") or update["sessionUpdate"]
                meta = params.get("_meta")
                found.append(what if meta is None else (meta["raxol.io"]["offset"], what))
            case "_raxol/session.record":
                found.append((params["offset"], params["kind"]))
            case "_raxol/session.caught_up":
                found.append(("caught_up", params["offset"]))
            case "_raxol/session.lagged":
                found.append(("lagged", params["lastOffset"]))
            case "_raxol/session.closed":
                found.append(("closed", params["reason"]))
            case None:
                found.append(f"response {frame['id']}")
            case method:
                found.append(method)
    return found


# -------------------------------------------------------------------------------- turns


@pytest.mark.covers("J10")
async def test_a_turn_is_journaled_in_the_order_in_which_it_is_told() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        answer = await prompt(raw, session_id, "one tool two", "p")

        assert answer["result"] == {"stopReason": "end_turn"}
        assert shown(raw.frames) == ["one", "tool_call", "tool_call_update", "two", "response p"]
        found = await records(journal, session_id)
        assert [told(record) for record in found] == [
            "session_created",
            "turn_started",
            "user_message_chunk:one tool two",
            "agent_message_chunk:one",
            "tool_call",
            "tool_call_update",
            "agent_message_chunk:two",
            "turn_completed",
        ]
        assert [record.taint for record in found] == [
            "system",
            "user",
            "user",
            "agent",
            "external",
            "external",
            "agent",
            "system",
        ]
        assert found[0].data == {"cwd": "/work"}
        assert found[1].data == {"turnId": 1, "prompt": []}
        assert found[-1].data == {"turnId": 1, "stopReason": "end_turn"}


async def test_prompts_are_left_out_where_the_operator_says_so() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), Durability(journal, prompts=False)) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")

        kinds = [told(record) for record in await records(journal, session_id)]
        assert kinds == [
            "session_created",
            "turn_started",
            "agent_message_chunk:one",
            "turn_completed",
        ]


@pytest.mark.covers("J7")
@pytest.mark.parametrize(
    ("text", "completed", "answered"),
    [
        ("limit", {"turnId": 1, "stopReason": "max_tokens"}, {"stopReason": "max_tokens"}),
        (
            "refuse",
            {"turnId": 1, "error": {"code": -32050, "message": "not today"}},
            {"code": -32050, "message": "not today", "data": {"secret": "data"}},
        ),
        (
            "crash",
            {"turnId": 1, "error": {"code": -32603, "message": "Internal error"}},
            {"code": -32603, "message": "Internal error"},
        ),
    ],
)
async def test_a_completion_says_what_the_response_says(
    text: str, completed: dict[str, Any], answered: dict[str, Any]
) -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        answer = await prompt(raw, session_id, text)

        assert answer.get("result", answer.get("error")) == answered
        assert (await records(journal, session_id))[-1].data == completed


@pytest.mark.covers("J7")
async def test_a_cancelled_turn_is_completed_as_it_is_answered() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one until-cancelled")))
        await agent.waiting.wait()
        raw.send(raw.notification("session/cancel", {"sessionId": session_id}))
        await raw.until(lambda: raw.responses("p"))

        assert raw.responses("p")[0]["result"] == {"stopReason": "cancelled"}
        last = (await records(journal, session_id))[-1]
        assert last.data == {"turnId": 1, "stopReason": "cancelled"}


@pytest.mark.covers("J7")
@pytest.mark.virtual_time
async def test_a_turn_that_ignores_its_cancellation_is_completed_once_then_answered() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal, limits=Limits(cancel_backstop=5)) as raw:
        session_id = await opened(raw)
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one hang")))
        await agent.waiting.wait()
        raw.send(raw.notification("session/cancel", {"sessionId": session_id}))
        await raw.until(lambda: raw.responses("p"))

        assert [r["result"] for r in raw.responses("p")] == [{"stopReason": "cancelled"}]
        answer = await prompt(raw, session_id, "again", "q")
        assert answer["result"] == {"stopReason": "end_turn"}
    completions = [r.data for r in await records(journal, session_id) if r.kind == "turn_completed"]
    assert completions == [
        {"turnId": 1, "stopReason": "cancelled"},
        {"turnId": 2, "stopReason": "end_turn"},
    ]


async def test_a_prompt_that_is_cancelled_before_it_starts_writes_nothing() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        raw.send(
            raw.request("p", "session/prompt", prompt_of(session_id, "one")),
            raw.notification("session/cancel", {"sessionId": session_id}),
        )
        await raw.until(lambda: raw.responses("p"))

        assert raw.responses("p")[0]["result"] == {"stopReason": "cancelled"}
        log = await journal.open(session_id)
        assert not any(record.kind.startswith("turn") for record in await log.read(1, 100))


async def test_an_update_that_is_refused_writes_nothing() -> None:
    journal, agent = MemoryJournal(), Scripted()

    class Empty(Scripted):
        async def prompt(self, turn: Turn) -> None:
            await turn.say("")
            await turn.say("x")

    agent = Empty()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")

        texts = [told(record) for record in await records(journal, session_id)]
        assert texts.count("agent_message_chunk:x") == 1
        assert "agent_message_chunk" not in texts


async def test_turns_are_numbered_on_by_every_connection_and_after_a_restart() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), Durability(journal)) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
    async with client(Scripted(), Durability(journal)) as raw:
        await attach(raw, session_id)
        await prompt(raw, session_id, "two")

    started = [
        r.data["turnId"] for r in await records(journal, session_id) if r.kind == "turn_started"
    ]
    assert started == [1, 2]


async def test_a_question_leaves_behind_what_was_told_before_it() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one ask two")))
        question = await raw.wait("session/request_permission")

        assert shown(raw.frames) == ["one", "session/request_permission"]
        raw.answer(question, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        await raw.until(lambda: raw.responses("p"))
        assert agent.answers[0].allowed
        assert shown(raw.frames)[2:] == ["two", "response p"]


async def test_what_a_handler_sent_leaves_before_its_answer() -> None:
    class Renamed(Scripted):
        async def set_session_mode(self, params: Any, ctx: Any) -> Any:
            await ctx.session().info(title=params.mode_id)
            return await super().set_session_mode(params, ctx)

    journal = MemoryJournal()
    async with client(Renamed(), journal) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        await raw.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"}, "m")

        assert shown(raw.frames) == ["session_info_update", "response m"]
        kept = [told(record) for record in await records(journal, session_id)]
        assert kept == ["session_created", "session_info_update", "current_mode_update"]


async def test_what_an_agent_asks_or_tells_by_extension_leaves_behind_what_it_told_before() -> None:
    class Vendor(Scripted):
        async def prompt(self, turn: Turn) -> Any:
            await turn.say("one")
            await turn.peer.notify_extension("_vendor/note", {})
            await turn.say("two")
            await turn.peer.request_extension("_vendor/ask", {})

        @extension("_vendor/work")
        async def work(self, params: Any, ctx: Any) -> Any:
            await ctx.session(params["sessionId"]).info(title="three")
            return {}

    async with client(Vendor(), MemoryJournal()) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "go")))
        raw.answer(await raw.wait("_vendor/ask"), {})
        await raw.until(lambda: raw.responses("p"))
        await raw.ask("_vendor/work", {"sessionId": session_id}, "w")

        assert shown(raw.frames) == [
            "one",
            "_vendor/note",
            "two",
            "_vendor/ask",
            "response p",
            "session_info_update",
            "response w",
        ]


async def test_a_mode_that_its_handler_tells_of_itself_is_journaled_once() -> None:
    class Telling(Scripted):
        async def set_session_mode(self, params: Any, ctx: Any) -> Any:
            if params.mode_id == "code":
                await ctx.session().set_mode("code")
            return await super().set_session_mode(params, ctx)

    journal = MemoryJournal()
    async with client(Telling(), journal) as raw:
        session_id = await opened(raw)
        for mode in ("code", "ask", "code"):
            await raw.ask("session/set_mode", {"sessionId": session_id, "modeId": mode})

    modes = [r.data["currentModeId"] for r in await records(journal, session_id) if r.offset > 1]
    assert modes == ["code", "ask", "code"]


async def test_history_gives_an_agent_what_was_told() -> None:
    found: list[Any] = []

    class Remembers(Scripted):
        async def prompt(self, turn: Turn) -> Any:
            await turn.say(f"to {turn.text}")
            found[:] = [update async for update in turn.session.history()]

    journal = MemoryJournal()
    async with client(Remembers(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
        await prompt(raw, session_id, "two")

    assert [(type(update).__name__, update.content.text) for update in found] == [
        ("UserMessageChunk", "one"),
        ("AgentMessageChunk", "to one"),
        ("UserMessageChunk", "two"),
        ("AgentMessageChunk", "to two"),
    ]


async def test_an_agent_without_a_journal_has_no_history_and_no_extension() -> None:
    found: list[Any] = [None]

    class Remembers(Scripted):
        async def prompt(self, turn: Turn) -> Any:
            found[:] = [update async for update in turn.session.history()]

    async with raw_client(Remembers()) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
        answer = await attach(raw, session_id)

    assert found == []
    assert answer["error"]["code"] == -32601


@pytest.mark.covers("J11")
async def test_a_plain_agent_answers_an_attach_as_any_unknown_method_and_goes_on() -> None:
    async with raw_client(Scripted()) as raw:
        answer = await attach(raw, "nope")
        unknown = await raw.ask("_nobody/knows", {})

        assert answer["error"]["code"] == unknown["error"]["code"] == -32601
        assert "result" in await raw.ask("session/new", NEW)


# -------------------------------------------------------------------------------- the handshake


async def test_a_durable_agent_advertises_what_the_journal_serves() -> None:
    async with raw_client(Scripted(), journal=MemoryJournal()) as raw:
        result = raw.responses("hello")[0]["result"]

    capabilities = result["agentCapabilities"]
    assert capabilities["loadSession"] is True
    assert capabilities["sessionCapabilities"] == {"list": {}, "resume": {}, "delete": {}}
    assert result["_meta"] == {"raxol.io": {"resumable": True}}


# -------------------------------------------------------------------------------- attaching


async def test_history_comes_before_the_answer_and_live_records_behind_it() -> None:
    """The trace of resumable-sessions §14, with the prompt's block in it."""
    journal, agent = MemoryJournal(), Scripted()
    durability = Durability(journal, prompts=False)
    async with client(agent, durability) as origin, client(agent, durability) as other:
        session_id = await opened(origin)
        await prompt(origin, session_id, "a b")
        other.frames.clear()
        answer = await attach(other, session_id, "load", fromOffset=0)
        await prompt(origin, session_id, "c")
        await other.until(lambda: len(other.frames) == 10)

        assert answer["result"] == {"_meta": {"raxol.io": {"highWatermark": 5}}}
        assert shown(other.frames) == [
            (1, "session_created"),
            (2, "turn_started"),
            (3, "a"),
            (4, "b"),
            (5, "turn_completed"),
            ("caught_up", 6),
            "response load",
            (6, "turn_started"),
            (7, "c"),
            (8, "turn_completed"),
        ]


async def test_who_attaches_to_its_own_session_gets_each_update_once_in_front_of_the_answer() -> (
    None
):
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await attach(raw, session_id, "load")
        raw.frames.clear()
        await prompt(raw, session_id, "one two", "p")

        assert shown(raw.frames) == [
            (2, "turn_started"),
            (3, "one two"),
            (4, "one"),
            (5, "two"),
            (6, "turn_completed"),
            "response p",
        ]


async def test_attaching_in_an_own_turn_shows_bare_what_was_before_and_copies_from_there() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one wait two")))
        await agent.waiting.wait()
        await attach(raw, session_id, "load", historyPolicy="tip")
        agent.go.set()
        await raw.until(lambda: raw.responses("p"))

        assert shown(raw.frames) == [
            "one",
            ("caught_up", 5),
            "response load",
            (5, "two"),
            (6, "turn_completed"),
            "response p",
        ]


async def test_a_stock_client_that_loads_and_prompts_sees_nothing_twice() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
    async with client(Scripted(), journal) as raw:
        raw.frames.clear()
        answer = await raw.ask("session/load", {"sessionId": session_id, **NEW}, "load")
        await prompt(raw, session_id, "two", "p")

        assert shown(raw.frames) == [
            (3, "one"),
            (4, "one"),
            "response load",
            (8, "two"),
            "response p",
        ]
        assert answer["result"]["modes"]["currentModeId"] == "ask"
        assert answer["result"]["_meta"] == {"raxol.io": {"highWatermark": 5}}


@pytest.mark.covers("R1-52")
async def test_a_standard_load_replays_the_whole_conversation_and_then_answers() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
        await prompt(raw, session_id, "tool two")
    async with client(Scripted(), journal) as raw:
        raw.frames.clear()
        await raw.ask("session/load", {"sessionId": session_id, **NEW}, "load")

        updates = [frame["params"]["update"] for frame in raw.sent("session/update")]
        assert [(u["sessionUpdate"], u.get("content", {}).get("text")) for u in updates] == [
            ("user_message_chunk", "one"),
            ("agent_message_chunk", "one"),
            ("user_message_chunk", "tool two"),
            ("tool_call", None),
            ("tool_call_update", None),
            ("agent_message_chunk", "two"),
        ]
        assert shown(raw.frames)[-1] == "response load"


@pytest.mark.covers("FF-49")
async def test_a_replay_is_never_journaled_again() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
    before = await records(journal, session_id)
    for _ in range(2):
        async with client(Scripted(), journal) as raw:
            await raw.ask("session/load", {"sessionId": session_id, **NEW})
            await raw.ask("session/load", {"sessionId": session_id, **NEW})

    assert await records(journal, session_id) == before


async def test_what_an_agent_replays_itself_is_not_journaled() -> None:
    class Own(Scripted):
        async def load_session(self, params: Any, ctx: Any) -> None:
            await ctx.update(v1.AgentMessageChunk(content=v1.TextContent(text="from memory")))

    journal = MemoryJournal()
    async with client(Own(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
        before = await records(journal, session_id)
        raw.frames.clear()
        await raw.ask("session/load", {"sessionId": session_id, **NEW}, "load")

        assert shown(raw.frames) == ["from memory", "response load"]
        assert await records(journal, session_id) == before
        await prompt(raw, session_id, "two", "p")
        assert shown(raw.frames)[2:] == ["two", "response p"]


@pytest.mark.covers("R1-54")
async def test_resume_replays_nothing_and_then_shows_what_happens() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        other.frames.clear()
        answer = await other.ask("session/resume", {"sessionId": session_id, **NEW}, "r")
        await prompt(origin, session_id, "two")
        await other.until(lambda: len(other.frames) == 3)
        await prompt(other, session_id, "three", "p")

        assert answer["result"]["modes"]["currentModeId"] == "ask"
        assert shown(other.frames) == [
            "response r",
            (7, "two"),
            (8, "two"),
            (12, "three"),
            "response p",
        ]


async def test_modes_that_were_set_are_those_of_the_next_load() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await raw.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"})
    async with client(Scripted(), journal) as raw:
        for method in ("session/load", "session/resume"):
            answer = await raw.ask(method, {"sessionId": session_id, **NEW})
            assert answer["result"]["modes"]["currentModeId"] == "code"


@pytest.mark.covers("R1-55", "FF-49")
@pytest.mark.parametrize("method", ["session/load", "session/resume"])
@pytest.mark.parametrize("session_id", ["nope", "../../x", "", "a" * 5000])
async def test_a_session_that_nobody_knows_is_not_found_and_not_made(
    method: str, session_id: str
) -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        answer = await raw.ask(method, {"sessionId": session_id, **NEW})

        assert answer["error"]["code"] == -32002
        assert answer["error"]["data"] == {"sessionId": session_id}
        later = await prompt(raw, session_id, "x")
        assert later["error"]["code"] == -32002
    assert await journal.sessions() == []


@pytest.mark.covers("R1-57")
async def test_a_load_from_another_folder_is_refused() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
    async with client(Scripted(), journal) as raw:
        other: dict[str, Any] = {"sessionId": session_id, "cwd": "/elsewhere", "mcpServers": []}
        refused = await raw.ask("session/load", other)
        attached = await raw.ask("_raxol/session.load", {**other, **rider()})

        assert refused["error"]["code"] == -32602
        assert refused["error"]["data"]["reason"] == "cwd_mismatch"
        assert "result" in attached  # an attach ignores it


async def test_a_load_without_servers_is_an_attach_where_it_has_a_rider() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
    async with client(Scripted(), journal) as raw:
        params = {"sessionId": session_id, "cwd": "/work"}
        refused = await raw.ask("session/load", params)
        attached = await raw.ask("session/load", {**params, **rider(fromOffset=6)})

        assert refused["error"]["code"] == -32602
        assert attached["result"] == {"_meta": {"raxol.io": {"highWatermark": 5}}}


async def test_a_watermark_can_be_asked_for_without_attaching() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        unknown = await attach(other, "nope", historyPolicy="none")
        empty = await attach(other, session_id, historyPolicy="none")
        await prompt(origin, session_id, "one")
        other.frames.clear()
        answer = await attach(other, session_id, "probe", historyPolicy="none", fromOffset=99)
        await prompt(origin, session_id, "two")
        await other.ask("session/list", {}, "list")

        assert unknown["error"] == {"code": -32002, "message": "Resource not found"}
        assert empty["result"] == {"_meta": {"raxol.io": {"highWatermark": 1}}}
        assert answer["result"] == {"_meta": {"raxol.io": {"highWatermark": 5}}}
        assert shown(other.frames) == ["response probe", "response list"]


async def test_a_client_ahead_of_the_journal_is_told_its_watermark() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "one")
        raw.frames.clear()
        legal = await attach(raw, session_id, "legal", fromOffset=6)
        ahead = await attach(raw, session_id, "ahead", fromOffset=7)

        assert legal["result"] == {"_meta": {"raxol.io": {"highWatermark": 5}}}
        assert ahead["error"] == {
            "code": -32602,
            "message": "invalid params",
            "data": {"highWatermark": 5},
        }
        assert shown(raw.frames) == [("caught_up", 6), "response legal", "response ahead"]


async def test_detach_ends_the_tail_without_a_frame_and_updates_are_bare_again() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        await attach(raw, session_id)
        for _ in range(2):
            raw.send(raw.notification("_raxol/session.detach", {"sessionId": session_id}))
        raw.send(raw.notification("_raxol/session.detach", {"sessionId": "nope"}))
        raw.frames.clear()
        await prompt(raw, session_id, "one", "p")

        assert shown(raw.frames) == ["one", "response p"]


async def test_attaching_again_replaces_the_tail_of_the_connection() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        await attach(other, session_id)
        await attach(other, session_id, historyPolicy="tip")
        other.frames.clear()
        await prompt(origin, session_id, "one")
        await other.until(lambda: len(other.frames) >= 4)
        await other.ask("session/list", {}, "list")

        assert [shown_[0] for shown_ in shown(other.frames)[:-1]] == [2, 3, 4, 5]


@pytest.mark.covers("J1", "J6")
async def test_a_slow_client_lags_alone_and_heals_from_the_next_record() -> None:
    journal, agent = MemoryJournal(), Scripted()
    durability = Durability(journal, credit=4)
    async with client(agent, durability) as origin:
        session_id = await opened(origin)
        async with raw_client(agent, journal=durability) as other:
            await attach(other, session_id)
            ours = durability.links(session_id)[-1]
            ours.connection.pause_writing()
            await prompt(origin, session_id, " ".join("abcdefgh"))
            other.frames.clear()
            ours.connection.resume_writing()
            await other.until(lambda: other.sent("_raxol/session.lagged"))

            first = shown(other.frames)
            assert first[-1] == ("lagged", first[-2][0])
            raw_frames = len(other.frames)
            await attach(other, session_id, "heal", fromOffset=first[-1][1] + 1)
            healed = shown(other.frames[raw_frames:])
    offsets = [item[0] for item in (*first[:-1], *healed) if isinstance(item[0], int)]
    assert offsets == list(range(2, 13))


class Teller(Scripted):
    """Tells much without a pause of its own."""

    async def prompt(self, turn: Turn) -> None:
        for number in range(500):
            await turn.say(f"{number}".ljust(4000))


@pytest.mark.parametrize("credit", [1, 1024])
async def test_a_client_whose_link_takes_everything_never_lags_however_much_is_told_at_once(
    credit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.transports._memory.HIGH_WATER", 1 << 30)
    agent, durability = Teller(), Durability(MemoryJournal(), credit=credit)
    async with client(agent, durability) as origin, client(agent, durability) as other:
        session_id = await opened(origin)
        await attach(other, session_id)
        await prompt(origin, session_id, "go")
        await other.ask("session/list", {}, "list")

        assert other.sent("_raxol/session.lagged") == []
        texts = [item[1] for item in shown(other.frames) if isinstance(item[0], int)]
        told_ = [text for text in texts if text.strip().isdigit()]
        assert [int(text) for text in told_] == list(range(500))


async def test_an_attach_that_is_cancelled_leaves_nothing_behind() -> None:
    entered, hang = asyncio.Event(), asyncio.Event()

    async def policy(context: AttachContext) -> Grant:
        entered.set()
        await hang.wait()
        return Grant({"id": "late"}, context.session_id, "test")

    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
    durability = Durability(journal, policy=policy)
    async with client(agent, durability) as other:
        params = {"sessionId": session_id, "cwd": "/work", **rider()}
        other.send(other.request("load", "_raxol/session.load", params))
        await entered.wait()
        other.send(other.notification("$/cancel_request", {"requestId": "load"}))
        await other.until(lambda: other.responses("load"))

        assert other.responses("load")[0]["error"]["code"] == -32800
        assert durability.links(session_id) == ()
        later = await prompt(other, session_id, "x")
        assert later["error"]["code"] == -32002


# -------------------------------------------------------------------------------- many connections


async def test_one_turn_a_session_across_all_connections() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        origin.send(origin.request("p", "session/prompt", prompt_of(session_id, "one wait two")))
        await agent.waiting.wait()
        await attach(other, session_id)
        refused = await prompt(other, session_id, "three")
        agent.go.set()
        await origin.until(lambda: origin.responses("p"))
        accepted = await prompt(other, session_id, "four")

        assert refused["error"] == {"code": -32600, "message": "prompt already in flight"}
        assert accepted["result"] == {"stopReason": "end_turn"}
        told_ = [told(record) for record in await records(journal, session_id)]
        assert "user_message_chunk:three" not in told_


async def test_a_turn_is_cancelled_by_whoever_controls_the_session() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        origin.send(origin.request("p", "session/prompt", prompt_of(session_id, "until-cancelled")))
        await agent.waiting.wait()
        await attach(other, session_id)
        other.send(other.notification("session/cancel", {"sessionId": session_id}))
        await origin.until(lambda: origin.responses("p"))

        assert origin.responses("p")[0]["result"] == {"stopReason": "cancelled"}


async def test_a_turn_outlives_its_connection_and_is_read_by_the_next() -> None:
    journal, agent = MemoryJournal(), Scripted()
    durability = Durability(journal, outlive=True)
    async with client(agent, durability) as first:
        session_id = await opened(first)
        first.send(first.request("p", "session/prompt", prompt_of(session_id, "one wait ask two")))
        await agent.waiting.wait()
    async with client(agent, durability) as second:
        await attach(second, session_id, "load")
        held = await prompt(second, session_id, "three")
        agent.go.set()
        await second.until(lambda: (6, "turn_completed") in shown(second.frames))

        assert held["error"]["message"] == "prompt already in flight"
        assert shown(second.frames)[-2:] == [(5, "two"), (6, "turn_completed")]
        assert not agent.answers[0].allowed  # nobody was there to be asked
        assert (await records(journal, session_id))[-1].data == {
            "turnId": 1,
            "stopReason": "end_turn",
        }
        again = await prompt(second, session_id, "four")
        assert again["result"] == {"stopReason": "end_turn"}
    await durability.aclose()


async def test_a_turn_that_outlived_its_connection_can_be_cancelled_from_the_next() -> None:
    journal, agent = MemoryJournal(), Scripted()
    durability = Durability(journal, outlive=True)
    async with client(agent, durability) as first:
        session_id = await opened(first)
        first.send(first.request("p", "session/prompt", prompt_of(session_id, "until-cancelled")))
        await agent.waiting.wait()
    async with client(agent, durability) as second:
        await attach(second, session_id)
        second.send(second.notification("session/cancel", {"sessionId": session_id}))
        await second.until(lambda: (4, "turn_completed") in shown(second.frames))

        assert (await records(journal, session_id))[-1].data == {
            "turnId": 1,
            "stopReason": "cancelled",
        }
    await durability.aclose()


@pytest.mark.covers("J7", "J12")
async def test_a_turn_whose_program_ends_is_orphaned_once() -> None:
    journal, agent = MemoryJournal(), Scripted()
    durability = Durability(journal, outlive=True)
    async with client(agent, durability) as first:
        session_id = await opened(first)
        first.send(first.request("p", "session/prompt", prompt_of(session_id, "one hang")))
        await agent.waiting.wait()
    await durability.aclose()
    for _ in range(2):
        async with client(Scripted(), Durability(journal)) as next_:
            await attach(next_, session_id)

    completions = [r.data for r in await records(journal, session_id) if r.kind == "turn_completed"]
    assert completions == [{"turnId": 1, "outcome": "orphaned", "stopReason": "cancelled"}]


async def test_a_turn_ends_with_its_connection_where_nobody_else_can_come() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as first:
        session_id = await opened(first)
        first.send(
            first.request("p", "session/prompt", prompt_of(session_id, "one until-cancelled"))
        )
        await agent.waiting.wait()

    last = (await records(journal, session_id))[-1]
    assert last.data == {"turnId": 1, "stopReason": "cancelled"}


# -------------------------------------------------------------------------------- who may


def denies(context: AttachContext) -> Grant:
    raise RuntimeError(context.session_id)


@pytest.mark.covers("J9", "AP10", "CDI-5")
async def test_who_is_not_let_in_learns_nothing_and_leaves_no_trace() -> None:
    journal, agent = MemoryJournal(), Scripted()
    events: list[TelemetryEvent] = []
    async with client(agent, journal) as origin:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
    durability = Durability(journal, policy=denies)
    async with client(agent, durability, telemetry=events.append) as raw:
        raw.raw_frames.clear()
        asks = 0
        for asked in (session_id, "never seen"):
            for method in ("_raxol/session.load", "session/load", "session/resume"):
                params = {"sessionId": asked, **NEW, **rider(fromOffset=99)}
                if method == "session/resume":
                    del params["_meta"]
                asks += 1
                answer = await raw.ask(method, params, f"{asks:03}")
                assert answer["error"] == {"code": -32000, "message": "attach denied"}
        for method, params in (
            ("session/list", {}),
            ("session/delete", {"sessionId": session_id}),
        ):
            asks += 1
            answer = await raw.ask(method, params, f"{asks:03}")
            assert answer["error"] == {"code": -32000, "message": "attach denied"}

        # Byte for byte the same but for the id, and nothing else was sent.
        assert len(raw.raw_frames) == asks
        assert len({re.sub(rb'"id":"\d+"', b"", frame) for frame in raw.raw_frames}) == 1
        assert durability.links(session_id) == ()
        assert durability.writers.get(session_id) is None
    assert [e.facts["reason"] for e in events if e.name == "attach.denied"] == ["policy_crash"] * 8
    assert len(await journal.sessions()) == 1


def anybody_looks_on(_grant: Grant, _context: AttachContext) -> str:
    return "observer"


def nobody_knows(grant: Grant, _context: AttachContext) -> str:
    raise RuntimeError(grant.via)


@pytest.mark.parametrize("roles", [{"local": "observer"}, anybody_looks_on])
async def test_an_observer_looks_on_and_changes_nothing(roles: Any) -> None:
    journal, agent = MemoryJournal(), Steered()
    async with client(agent, Durability(journal)) as origin:
        session_id = await opened(origin)
        durability = Durability.of(Durability(journal, roles=roles))
        origin.send(origin.request("p", "session/prompt", prompt_of(session_id, "one")))
        await origin.until(lambda: origin.responses("p"))
    async with client(agent, durability) as raw:
        await attach(raw, session_id)
        refused = [
            await prompt(raw, session_id, "x"),
            await raw.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"}),
            await raw.ask("session/delete", {"sessionId": session_id}),
            await raw.ask(
                "_raxol/session.steer", {"sessionId": session_id, "expectedTurnId": 1, "text": "x"}
            ),
        ]

        assert [answer["error"]["code"] for answer in refused] == [-32600] * 4
        assert {answer["error"]["data"]["role"] for answer in refused} == {"observer"}
    assert len(await records(journal, session_id)) == 5


@pytest.mark.parametrize("roles", [{"local": "king"}, nobody_knows])
async def test_a_role_that_makes_no_sense_may_look_on(roles: Any) -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, Durability(journal)) as origin:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
    async with client(agent, Durability(journal, roles=roles)) as raw:
        await attach(raw, session_id)
        refused = await prompt(raw, session_id, "x")

        assert refused["error"]["data"]["role"] == "observer"


@pytest.mark.covers("CDI-6")
async def test_a_grant_that_ends_takes_the_session_away() -> None:
    now = [1000.0]

    def for_a_while(context: AttachContext) -> Grant:
        return Grant({"id": "guest"}, context.session_id, "test", expires_at=1000)

    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, Durability(journal)) as origin:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
    async with client(agent, Durability(journal, policy=for_a_while, clock=lambda: now[0])) as raw:
        raw.frames.clear()
        answer = await attach(raw, session_id, "load", historyPolicy="tip")
        await raw.until(lambda: raw.sent("_raxol/session.closed"))
        refused = await prompt(raw, session_id, "x")

        assert "result" in answer
        assert shown(raw.frames)[:3] == [("caught_up", 6), "response load", ("closed", "revoked")]
        assert refused["error"] == {"code": -32000, "message": "attach denied"}


# -------------------------------------------------------------------------------- lists and deletion


async def test_a_session_is_durable_when_its_client_is_told_of_it_and_listed_from_its_first_word_on() -> (
    None
):
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        assert [told(record) for record in await records(journal, session_id)] == [
            "session_created"
        ]
        assert (await raw.ask("session/list", {}))["result"]["sessions"] == []
    async with client(Scripted(), Durability(journal)) as raw:
        loaded = await raw.ask("session/load", {"sessionId": session_id, **NEW})
        assert loaded["result"]["_meta"] == {"raxol.io": {"highWatermark": 1}}
        await prompt(raw, session_id, "one")
        listed = (await raw.ask("session/list", {}))["result"]["sessions"]

    assert [each["sessionId"] for each in listed] == [session_id]


async def test_a_session_whose_journal_cannot_be_written_is_opened_all_the_same() -> None:
    journal = Failing()
    journal.full = True
    events: list[TelemetryEvent] = []
    async with client(Scripted(), journal, telemetry=events.append) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        await prompt(raw, session_id, "one", "p")

        assert shown(raw.frames) == ["one", "response p"]
    assert [e.name for e in events].count("journal.not_durable") == 1


async def test_sessions_are_listed_the_last_changed_first_by_folder_and_page() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        ids = [await opened(raw, cwd=f"/work/{number % 2}") for number in range(105)]
        for session_id in ids:
            await prompt(raw, session_id, "one")
        first = (await raw.ask("session/list", {}))["result"]
        second = (await raw.ask("session/list", {"cursor": first["nextCursor"]}))["result"]
        half = (await raw.ask("session/list", {"cwd": "/work/1/"}))["result"]
        wrong = await raw.ask("session/list", {"cursor": "x"})

    listed = [*first["sessions"], *second["sessions"]]
    assert sorted(each["sessionId"] for each in listed) == sorted(ids)
    assert len(first["sessions"]) == 100
    assert "nextCursor" not in second
    assert [each["updatedAt"] for each in listed] == sorted(
        (each["updatedAt"] for each in listed), reverse=True
    )
    assert {each["cwd"] for each in half["sessions"]} == {"/work/1"}
    assert wrong["error"]["code"] == -32602


async def test_a_session_that_changed_at_no_time_is_listed_without_one() -> None:
    class Foreign(MemoryJournal):
        async def sessions(self) -> list[SessionInfo]:
            return [SessionInfo("s-1", 2, 0, 1 << 62, {"cwd": "/"}, None, turn_open=False)]

    async with client(Scripted(), Foreign()) as raw:
        listed = (await raw.ask("session/list", {}))["result"]["sessions"]

    assert listed == [{"sessionId": "s-1", "cwd": "/"}]


@pytest.mark.covers("R1-61")
async def test_a_deleted_session_is_gone_for_every_connection() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        await attach(other, session_id)
        other.frames.clear()
        deleted = await origin.ask("session/delete", {"sessionId": session_id})
        await other.until(lambda: other.sent("_raxol/session.closed"))

        assert deleted["result"] == {}
        assert shown(other.frames) == [("closed", "deleted")]
        for raw in (origin, other):
            assert (await prompt(raw, session_id, "x"))["error"]["code"] == -32002
        assert (await origin.ask("session/list", {}))["result"]["sessions"] == []
        again = await origin.ask("session/delete", {"sessionId": session_id})
        assert again["error"]["code"] == -32002
    assert await journal.sessions() == []


async def test_a_session_is_not_deleted_under_a_turn_of_another_connection() -> None:
    journal, agent = MemoryJournal(), Scripted()
    async with client(agent, journal) as origin, client(agent, journal) as other:
        session_id = await opened(origin)
        origin.send(origin.request("p", "session/prompt", prompt_of(session_id, "one wait")))
        await agent.waiting.wait()
        refused = await other.ask("session/delete", {"sessionId": session_id})
        agent.go.set()
        await origin.until(lambda: origin.responses("p"))

        assert refused["error"]["code"] == -32600
        assert len(await records(journal, session_id)) == 5


# -------------------------------------------------------------------------------- steering


async def steer(raw: RawPeer, session_id: str, **params: Any) -> Any:
    answer = await raw.ask("_raxol/session.steer", {"sessionId": session_id, **params})
    return answer.get("result", answer.get("error"))


async def test_a_steer_is_decided_once_and_journaled_where_it_is_accepted() -> None:
    journal, agent = MemoryJournal(), Steered()
    async with client(agent, journal) as raw:
        session_id = await opened(raw)
        idle = await steer(raw, session_id, expectedTurnId=1, text="a", clientMsgId="m-0")
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one wait")))
        await agent.waiting.wait()
        first = await steer(raw, session_id, expectedTurnId=1, text="tabs", clientMsgId="m-1")
        stale = await steer(raw, session_id, expectedTurnId=1, text="spaces", clientMsgId="m-2")
        twice = await steer(raw, session_id, expectedTurnId=1, text="tabs", clientMsgId="m-1")
        other = await steer(raw, session_id, expectedTurnId=1, text="else", clientMsgId="m-1")
        second = await steer(raw, session_id, expectedTurnId=stale["actualTurnId"])
        true = await steer(raw, session_id, expectedTurnId=True)
        agent.go.set()
        await raw.until(lambda: raw.responses("p"))
        late = await steer(raw, session_id, expectedTurnId=1, text="tabs", clientMsgId="m-1")

    assert idle == {"outcome": "no_live_turn"}
    assert first == {"outcome": "accepted", "turnId": 1, "offset": 1, "clientMsgId": "m-1"}
    assert stale == {"outcome": "stale", "expectedTurnId": 1, "actualTurnId": "1.1"}
    assert twice == late == {**first, "outcome": "duplicate"}
    assert other == {"outcome": "client_msg_id_reuse"}
    assert second == {"outcome": "accepted", "turnId": "1.1", "offset": 2, "clientMsgId": None}
    assert true == {"outcome": "stale", "expectedTurnId": True, "actualTurnId": "1.2"}
    assert agent.steered == ["tabs", None]
    steers = [r.data for r in await records(journal, session_id) if r.kind == "steer"]
    assert steers == [
        {"turnId": 1, "offset": 1, "payload": {"clientMsgId": "m-1", "text": "tabs"}},
        {"turnId": "1.1", "offset": 2, "payload": {"clientMsgId": None, "text": None}},
    ]


async def test_an_agent_that_takes_no_directions_says_so() -> None:
    async with client(Scripted(), MemoryJournal()) as raw:
        session_id = await opened(raw)

        answer = await steer(raw, session_id, expectedTurnId=1)
        wrong = [
            await steer(raw, session_id, expectedTurnId=None),
            await steer(raw, session_id),
            await steer(raw, session_id, expectedTurnId=1, text=5),
        ]
    assert answer == {"outcome": "no_steer_channel"}
    assert [each["code"] for each in wrong] == [-32602] * 3


# -------------------------------------------------------------------------------- a journal that fails


class Failing(MemoryJournal):
    """Appends until it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False

    async def open(self, session_id: str) -> SessionLog:
        return FailingLog(self, await super().open(session_id))


class FailingLog(LogOver):
    """A log of it."""

    def __init__(self, journal: Failing, log: SessionLog) -> None:
        super().__init__(log)
        self._journal = journal

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        if self._journal.full:
            raise JournalError("no space")
        return await super().append(entries, flush=flush)


async def test_a_turn_goes_on_without_its_journal_and_the_operator_is_told_once() -> None:
    journal, agent = Failing(), Scripted()
    events: list[TelemetryEvent] = []
    async with client(agent, journal, telemetry=events.append) as raw:
        session_id = await opened(raw)
        await attach(raw, session_id)
        raw.frames.clear()
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "one wait two three")))
        await agent.waiting.wait()
        await raw.until(lambda: (4, "one") in shown(raw.frames))
        journal.full = True
        agent.go.set()
        await raw.until(lambda: raw.responses("p"))

        assert shown(raw.frames) == [
            (2, "turn_started"),
            (3, "one wait two three"),
            (4, "one"),
            ("closed", "writer_down"),
            "two",
            "three",
            "response p",
        ]
        assert raw.responses("p")[0]["result"] == {"stopReason": "end_turn"}
        raw.frames.clear()
        await prompt(raw, session_id, "four", "q")
        assert shown(raw.frames) == ["four", "response q"]
        journal.full = False
        await prompt(raw, session_id, "five", "r")
    names = [event.name for event in events if event.name.startswith("journal")]
    assert names.count("journal.not_durable") == 1
    found = [told(record) for record in await records(journal, session_id)]
    assert found[-7:] == [
        "turn_started",
        "user_message_chunk:one wait two three",
        "agent_message_chunk:one",
        "turn_completed",
        "turn_started",
        "user_message_chunk:five",
        "agent_message_chunk:five",
    ] or found[-4:] == [
        "turn_started",
        "user_message_chunk:five",
        "agent_message_chunk:five",
        "turn_completed",
    ]


@pytest.mark.covers("J7", "J12")
async def test_a_turn_that_has_lost_its_writer_is_completed_once_whoever_attaches_meanwhile() -> (
    None
):
    first, second = asyncio.Event(), asyncio.Event()

    class Slow(Scripted):
        async def prompt(self, turn: Turn) -> None:
            await turn.say("one")
            await first.wait()
            await turn.say("two")
            await second.wait()
            await turn.say("three")

    journal = Failing()
    async with client(Slow(), journal) as raw:
        session_id = await opened(raw)
        raw.frames.clear()
        raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "go")))
        await raw.until(lambda: "one" in shown(raw.frames))
        journal.full = True
        first.set()
        await raw.until(lambda: "two" in shown(raw.frames))
        journal.full = False
        await attach(raw, session_id, "load", historyPolicy="tip")
        second.set()
        await raw.until(lambda: raw.responses("p"))

        assert [each for each in shown(raw.frames) if isinstance(each, str)] == [
            "one",
            "two",
            "response load",
            "three",
            "response p",
        ]
        await prompt(raw, session_id, "again", "q")
    found = await records(journal, session_id)
    assert [told(record) for record in found if record.kind != "session_update"] == [
        "session_created",
        *("turn_started", "turn_completed"),
        *("turn_started", "turn_completed"),
    ]
    assert found[4].data["outcome"] == "orphaned"


async def test_a_session_of_another_process_is_read_and_not_prompted() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), Durability(journal)) as origin:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        # Another `Durability` on the same journal has writers of its own, as another process has.
        async with client(Scripted(), Durability(journal)) as other:
            other.frames.clear()
            await attach(other, session_id, "load")
            refused = await prompt(other, session_id, "x", "x")
            await prompt(origin, session_id, "two")
            await other.until(lambda: (9, "turn_completed") in shown(other.frames))

    assert refused["error"]["code"] == -32600
    assert refused["error"]["data"] == {"sessionId": session_id, "reason": "session_in_use"}
    offsets = [item[0] for item in shown(other.frames) if isinstance(item[0], int)]
    assert offsets == list(range(1, 10))


async def test_what_a_client_is_shown_is_what_is_kept() -> None:
    journal = MemoryJournal()
    async with client(Scripted(), journal) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "h\u00e9llo \U0001f600 tool")
        live = [frame["params"]["update"] for frame in raw.sent("session/update")]

    found = await records(journal, session_id)
    kept = [json.loads(record.payload) for record in found if record.kind == "session_update"]
    assert kept[1:] == live
