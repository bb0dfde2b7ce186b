"""The verbs of a turn, as the client sees them, and when they are refused."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
from contextlib import asynccontextmanager, suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon import (
    Agent,
    AntiphonError,
    Capabilities,
    CapabilityError,
    Client,
    ConnectionClosed,
    Context,
    LimitExceeded,
    Limits,
    PermissionAnswer,
    RequestError,
    Turn,
    TurnOver,
    UrlElicitation,
)
from antiphon.schema import UNSET, Unknown, v1, v1_unstable
from antiphon.testing import RawPeer, raw_client
from tests.journal.ears import HeldJournal
from tests.sessions.pairs import Wire, joined

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from antiphon.runtime import TelemetryEvent


class Scripted(Agent):
    """An agent whose prompt is one function."""

    def __init__(self, act: Callable[[Turn], Awaitable[Any]]) -> None:
        self.act = act
        self.turns: list[Turn] = []

    async def prompt(self, turn: Turn) -> Any:
        self.turns.append(turn)
        return await self.act(turn)


async def updates_of(
    act: Callable[[Turn], Awaitable[Any]], client: Client | None = None, **options: Any
) -> list[dict[str, Any]]:
    """What one turn sends, as JSON."""
    async with joined(Scripted(act), client, **options) as (peer, _):
        session = await peer.new_session(cwd="/")
        outcome = await session.prompt("go")
        return [json.loads(update.raw) for update in outcome.updates]


async def test_the_turn_knows_what_was_asked() -> None:
    async def act(turn: Turn) -> None:
        assert turn.text == "one\ntwo"
        assert [block.text for block in turn.blocks if isinstance(block, v1.TextContent)] == [
            "one",
            "two",
        ]
        assert turn.cwd == "/work"
        assert turn.roots == ("/work",)
        assert json.loads(turn.raw)["_meta"] == {"k": [1]}
        assert turn.params.meta == {"k": [1]}
        assert not turn.cancelled
        assert "open" in repr(turn)
        await turn.say("seen")

    async with joined(Scripted(act)) as (peer, _):
        session = await peer.new_session(cwd="/work")
        outcome = await session.prompt(["one", "two"], meta={"k": [1]})
        assert outcome.text == "seen"


@pytest.mark.covers("R1-82")
async def test_saying_and_thinking_send_chunks_in_order_before_the_answer() -> None:
    async def act(turn: Turn) -> None:
        await turn.think("hm")
        await turn.say("a")
        await turn.say(v1.ImageContent(data="", mime_type="image/png"))
        await turn.say("b", message_id="m1")
        await turn.think("c", message_id="m2")

    kinds = await updates_of(act)
    assert [(u["sessionUpdate"], u["content"].get("text"), u.get("messageId")) for u in kinds] == [
        ("agent_thought_chunk", "hm", None),
        ("agent_message_chunk", "a", None),
        ("agent_message_chunk", None, None),
        ("agent_message_chunk", "b", "m1"),
        ("agent_thought_chunk", "c", "m2"),
    ]


@pytest.mark.parametrize(
    "text", ["x", 'a "b" \\ \n\t\x00', "€漢😀", "\u2028\u2029\u0085", "y" * 70000]
)
@pytest.mark.covers("R1-2")
async def test_the_short_way_of_a_text_gives_the_same_frame_as_the_general_one(text: str) -> None:
    async def act(turn: Turn) -> None:
        await turn.say(text)
        await turn.send(v1.AgentMessageChunk(content=v1.TextContent(text=text)))
        await turn.think(text)
        await turn.send(v1.AgentThoughtChunk(content=v1.TextContent(text=text)))

    async with joined(Scripted(act)) as (peer, _):
        frames: list[bytes] = []
        session = await peer.new_session(cwd="/")
        session.on_update(lambda update: frames.append(update.frame))
        await session.prompt("go")
        assert frames[0] == frames[1]
        assert frames[2] == frames[3]


async def test_a_text_that_no_wire_can_carry_is_repaired_not_lost() -> None:
    async def act(turn: Turn) -> None:
        await turn.say("ok \ud83d")

    (update,) = await updates_of(act)
    assert update["content"]["text"] == "ok \ufffd"


async def test_an_empty_text_is_counted_and_not_sent() -> None:
    empty = v1.TextContent(text="")

    async def say_nothing(turn: Turn) -> None:
        await turn.say("")
        await turn.think("")
        await turn.say("", message_id="m")
        await turn.say(empty)
        await turn.send(v1.AgentMessageChunk(content=empty))
        await turn.session.update(v1.AgentThoughtChunk(content=empty))
        await turn.send(v1.UserMessageChunk(content=empty))  # what the user said is passed on

    agent = Scripted(say_nothing)
    events: list[TelemetryEvent] = []
    async with raw_client(agent, telemetry=events.append) as raw:
        new = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        session_id = new["result"]["sessionId"]
        await raw.ask("session/prompt", {"sessionId": session_id, "prompt": []})
        (sent,) = raw.sent("session/update")
        assert sent["params"]["update"]["sessionUpdate"] == "user_message_chunk"
    assert (agent.turns[0].empty, agent.turns[0].sent) == (6, 1)
    assert [(e.name, e.facts) for e in events if e.kind == "operational"][:6] == [
        ("empty_chunk_rejected", {"session": session_id})
    ] * 6


#: What is asked, what the handler does, the stop reason of what is reported.
EMPTY_TURNS: dict[str, tuple[str, Callable[[Turn], Any], str | None]] = {
    "nothing": ("go", lambda turn: None, "end_turn"),
    "another reason": ("go", lambda turn: "refusal", "refusal"),
    "an empty text": ("go", lambda turn: turn.say(""), "end_turn"),
    "a text": ("go", lambda turn: turn.say("x"), None),
    "of the session": ("go", lambda turn: turn.session.info(title="x"), None),
    "empty prompt": ("", lambda turn: None, None),
}


@pytest.mark.parametrize("which", EMPTY_TURNS)
async def test_an_answer_to_something_without_any_update_is_reported(which: str) -> None:
    prompt, act, reason = EMPTY_TURNS[which]

    async def doing(turn: Turn) -> Any:
        result = act(turn)
        return await result if inspect.isawaitable(result) else result

    events: list[TelemetryEvent] = []
    async with raw_client(Scripted(doing), telemetry=events.append) as raw:
        new = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        session_id = new["result"]["sessionId"]
        blocks = [{"type": "text", "text": prompt}] if prompt else []
        await raw.ask("session/prompt", {"sessionId": session_id, "prompt": blocks})
        assert [(e.kind, e.facts) for e in events if e.name == "zero_updates_turn"] == [
            ("operational", {"session": session_id, "stop_reason": reason})
        ] * (reason is not None)


async def test_a_turn_that_failed_or_was_cancelled_is_not_reported_as_empty() -> None:
    async def act(turn: Turn) -> None:
        if turn.text == "cancelled":
            await turn.wait_cancelled()
        else:
            raise RequestError.of(-32603, "no")

    events: list[TelemetryEvent] = []
    async with raw_client(Scripted(act), telemetry=events.append) as raw:
        new = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        session = {"sessionId": new["result"]["sessionId"]}
        for text in ("failed", "cancelled"):
            params = {**session, "prompt": [{"type": "text", "text": text}]}
            raw.send(raw.request(text, "session/prompt", params))
            raw.send(raw.notification("session/cancel", session))
            await raw.answer_to(text)
        assert [e.name for e in events if e.name == "zero_updates_turn"] == []


async def test_an_over_long_text_is_refused_and_nothing_of_it_is_written() -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(Exception, match="frame_bytes"):
            await turn.say("x" * 200_000)
        await turn.say("still here")

    limits = Limits(frame_bytes=100_000)
    updates = await updates_of(act, limits=limits)
    assert [u["content"]["text"] for u in updates] == ["still here"]


@pytest.mark.parametrize("limit", [1000, 70_000])
async def test_what_a_turn_sends_is_held_to_the_frame_limit_to_the_byte(limit: int) -> None:
    around = len(
        b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":,"update":'
        b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":""}}}}'
    )

    async def act(turn: Turn) -> None:
        room = limit - around - len(json.dumps(turn.session_id))
        verbs: list[Callable[[str], Awaitable[None]]] = [
            turn.say,
            turn.think,  # its tag is as long
            lambda text: turn.send(v1.AgentMessageChunk(content=v1.TextContent(text=text))),
            lambda text: turn.send(v1.UserMessageChunk(content=v1.TextContent(text=text + " "))),
        ]
        for verb in verbs:
            await verb("x" * room)
            with pytest.raises(LimitExceeded, match="frame_bytes"):
                await verb("x" * (room + 1))

    assert len(await updates_of(act, limits=Limits(frame_bytes=limit))) == 4


UPDATES: list[Any] = [
    v1.ToolCall(tool_call_id="t", title="T", locations=[v1.ToolCallLocation(path="/a", line=1)]),
    v1.ToolCallProgress(
        tool_call_id="t", raw_output=None, content=[v1.Diff(path="/a", new_text="\u2028")]
    ),
    v1.ToolCallUpdate(tool_call_id="t", title=None, status="completed"),
    v1.Plan(entries=[v1.PlanEntry(content="\ud83d", priority="low", status="pending")]),
    v1.UsageUpdate(used=1, size=2, cost=v1.Cost(amount=0.5, currency="EUR")),
    v1.SessionInfoUpdate(title=None),
    v1.AvailableCommandsUpdate(available_commands=[]),
    v1.CurrentModeUpdate(current_mode_id="m"),
    v1.ConfigOptionUpdate(config_options=[]),
    v1.UserMessageChunk(content=v1.TextContent(text="")),
    v1.AgentMessageChunk(content=v1.TextContent(text="x")),
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: type(update).__name__)
async def test_any_update_is_sent_as_the_connection_would_send_its_notification(
    update: Any,
) -> None:
    class Own(type(update)):  # type: ignore[misc]
        """As a user's own class, which takes the general way."""

    async def act(turn: Turn) -> None:
        await turn.send(update)
        turn.session.send_now(update)
        if type(update) is not v1.ToolCallUpdate:
            await turn.send(Own(**msgspec.structs.asdict(update)))
        else:
            update_ = v1.ToolCallProgress(**msgspec.structs.asdict(update))
            await turn.peer.notify(
                v1.SessionNotification(session_id=turn.session_id, update=update_)
            )
        assert turn.sent >= 2

    async with joined(Scripted(act)) as (peer, _):
        frames: list[bytes] = []
        session = await peer.new_session(cwd="/")
        session.on_update(lambda update: frames.append(update.frame))
        await session.prompt("go")
        assert len(frames) == 3
        assert len(set(frames)) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_a_number_that_json_lacks_is_refused_and_nothing_is_sent(number: float) -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(ValueError, match="NaN or infinite"):
            await turn.send(v1.ToolCall(tool_call_id="t", title="t", raw_input=[number]))
        assert turn.sent == 0

    assert await updates_of(act) == []


@pytest.mark.covers("R1-87")
async def test_a_plan_is_sent_whole_whatever_its_entries_are_written_as() -> None:
    async def act(turn: Turn) -> None:
        await turn.plan(
            [
                "a",
                ("b", "completed"),
                ("c", "in_progress", "high"),
                v1.PlanEntry(content="d", priority="low", status="pending"),
            ]
        )

    (plan,) = await updates_of(act)
    assert plan["entries"] == [
        {"content": "a", "priority": "medium", "status": "pending"},
        {"content": "b", "priority": "medium", "status": "completed"},
        {"content": "c", "priority": "high", "status": "in_progress"},
        {"content": "d", "priority": "low", "status": "pending"},
    ]


@pytest.mark.covers("R1-83", "R1-101")
async def test_a_tool_call_is_announced_changed_and_completed() -> None:
    async def act(turn: Turn) -> None:
        async with turn.tool(
            "Edit", kind="edit", locations=["/a", ("/b", 3)], raw_input={"x": None}
        ) as tool:
            await tool.diff("/a", "old", "new")
            await tool.add("a text")
            await tool.update(title="Edited", raw_output=[1])
        async with turn.tool("Other") as other:
            assert other.id != tool.id

    updates = await updates_of(act)
    first = updates[0]
    assert first["sessionUpdate"] == "tool_call"
    assert first["status"] == "in_progress"
    assert first["locations"] == [{"path": "/a"}, {"path": "/b", "line": 3}]
    assert first["rawInput"] == {"x": None}
    diff = {"type": "diff", "path": "/a", "oldText": "old", "newText": "new"}
    text = {"type": "content", "content": {"type": "text", "text": "a text"}}
    assert updates[1]["content"] == [diff]
    assert updates[2]["content"] == [diff, text]
    assert "content" not in updates[3]
    assert updates[3]["title"] == "Edited"
    assert updates[4]["status"] == "completed"
    assert {u["toolCallId"] for u in updates[:5]} == {first["toolCallId"]}


async def test_a_tool_call_whose_block_raises_has_failed() -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(ValueError, match="no"):
            async with turn.tool("Edit"):
                raise ValueError("no")

    assert (await updates_of(act))[-1]["status"] == "failed"


async def test_a_tool_call_that_said_its_end_itself_is_not_ended_again() -> None:
    async def act(turn: Turn) -> None:
        async with turn.tool("Edit", content=["x"]) as tool:
            await tool.update(status="failed")

    updates = await updates_of(act)
    assert [u.get("status") for u in updates] == ["in_progress", "failed"]


@pytest.mark.parametrize("changes", [{"content": ["x" * 3000]}, {"raw_output": {1j}}])
async def test_a_change_of_a_tool_call_that_cannot_be_sent_has_not_happened(changes: Any) -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises((LimitExceeded, TypeError)):
            async with turn.tool("Edit") as tool:
                await tool.update(status="completed", **changes)
        async with turn.tool("Look") as tool:
            with pytest.raises(LimitExceeded):
                await tool.add("y" * 3000)
            await tool.add("small")

    updates = await updates_of(act, limits=Limits(frame_bytes=2000))
    assert [u["status"] for u in updates[:2]] == ["in_progress", "failed"]
    shown = [item["content"]["text"] for u in updates for item in u.get("content", ())]
    assert shown == ["small"]


async def test_usage_goes_to_the_session() -> None:
    async def act(turn: Turn) -> None:
        await turn.usage(used=5, size=10, cost=(0.5, "EUR"))

    (usage,) = await updates_of(act)
    assert usage == {
        "sessionUpdate": "usage_update",
        "used": 5,
        "size": 10,
        "cost": {"amount": 0.5, "currency": "EUR"},
    }


# ------------------------------------------------------------------ permission


class Asked(Client):
    """A client that answers permission requests with one function."""

    def __init__(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> None:
        super().__init__()
        self.answer = answer
        self.requests: list[v1_unstable.RequestPermissionRequest] = []

    async def request_permission(
        self, params: v1_unstable.RequestPermissionRequest, ctx: Context
    ) -> v1.RequestPermissionResponse:
        self.requests.append(params)
        result = await self.answer(params, ctx)
        assert isinstance(result, v1.RequestPermissionResponse)
        return result


def selects(option_id: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(params: Any, ctx: Any) -> Any:
        return v1.RequestPermissionResponse(
            outcome=v1.SelectedPermissionOutcome(option_id=option_id)
        )

    return answer


async def asked(client: Client, **options: Any) -> list[Any]:
    """The answers the agent got for one question, asked about a tool call."""
    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        async with turn.tool("Edit", kind="edit", status="pending") as tool:
            answers.append(await turn.ask_permission(tool))

    await updates_of(act, client, **options)
    return answers


@pytest.mark.parametrize(
    ("option", "allowed"),
    [("allow_once", True), ("allow_always", True), ("reject_once", False)],
)
async def test_a_selected_option_allows_only_if_its_kind_does(option: str, allowed: bool) -> None:
    client = Asked(selects(option))
    (answer,) = await asked(client)
    assert (answer.option_id, answer.allowed, bool(answer)) == (option, allowed, allowed)
    request = client.requests[0]
    assert request.tool_call.title == "Edit"
    assert request.tool_call.kind == "edit"
    assert [o.kind for o in request.options] == ["allow_once", "allow_always", "reject_once"]


@pytest.mark.covers("R1-103", "FF-27")
async def test_everything_but_a_selected_allowing_option_is_a_no(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cancelled(params: Any, ctx: Any) -> Any:
        return v1.RequestPermissionResponse(outcome=v1.CancelledPermissionOutcome())

    async def error(params: Any, ctx: Any) -> Any:
        raise RequestError.of(-32603, "no")

    for answer in (selects("something_else"), selects(""), cancelled, error):
        (got,) = await asked(Asked(answer))
        assert not got.allowed
        assert got.option_id is None


async def test_a_client_that_never_answers_is_a_no_after_the_limit() -> None:
    async def never(params: Any, ctx: Any) -> Any:
        await asyncio.Event().wait()

    (got,) = await asked(Asked(never), limits=Limits(permission_timeout=0.05))
    assert not got.allowed


async def test_permission_can_be_asked_for_a_title_or_any_tool_call() -> None:
    client = Asked(selects("yes"))

    async def act(turn: Turn) -> None:
        options = [v1.PermissionOption(option_id="yes", name="Yes", kind="allow_once")]
        assert await turn.ask_permission("May I?", options)
        call = v1.ToolCallUpdate(tool_call_id="mine")
        assert await turn.ask_permission(call, options)

    await updates_of(act, client)
    assert client.requests[0].tool_call.title == "May I?"
    assert client.requests[1].tool_call.tool_call_id == "mine"


class Prompted:
    """A session of a raw client, with one prompt open: the wire of a turn, frame by frame."""

    def __init__(self, raw: RawPeer, session_id: str) -> None:
        self.raw = raw
        self.session_id = session_id

    def prompt(self, id_: str = "p") -> dict[str, Any]:
        blocks = [{"type": "text", "text": id_}]
        params = {"sessionId": self.session_id, "prompt": blocks}
        return self.raw.request(id_, "session/prompt", params)

    def cancel(self) -> dict[str, Any]:
        return self.raw.notification("session/cancel", {"sessionId": self.session_id})

    async def reason(self, id_: str = "p") -> str:
        result = (await self.raw.answer_to(id_))["result"]
        assert len([f for f in self.raw.sent(None) if f["id"] == id_]) == 1
        reason = result["stopReason"]
        assert isinstance(reason, str)
        return reason

    def told(self) -> list[str]:
        return [
            frame["params"]["update"]["content"]["text"]
            for frame in self.raw.sent("session/update")
        ]


@asynccontextmanager
async def prompted(
    act: Callable[[Turn], Awaitable[Any]],
    capabilities: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[Prompted]:
    """A session in which the prompt "p" was sent."""
    async with raw_client(Scripted(act), capabilities, **options) as raw:
        new = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        session = Prompted(raw, new["result"]["sessionId"])
        raw.send(session.prompt())
        yield session


@pytest.mark.covers("I9", "R1-103", "FF-26")
async def test_a_question_that_is_open_at_cancellation_is_withdrawn_on_the_wire() -> None:
    """Its answer comes too late, and is no answer to anything."""
    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        answers.append(await turn.ask_permission("May I?"))
        answers.append(await turn.ask_permission("And now?"))
        await turn.say("goes on")

    async with prompted(act) as session:
        raw = session.raw
        asked = await raw.wait("session/request_permission")
        raw.send(session.cancel())
        withdrawn = await raw.wait("$/cancel_request")
        assert withdrawn["params"] == {"requestId": asked["id"]}
        raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        assert await session.reason() == "cancelled"
        assert [(a.option_id, a.allowed) for a in answers] == [(None, False)] * 2
        assert len(raw.sent("session/request_permission")) == 1
        assert session.told() == ["goes on"]


@pytest.mark.parametrize("answered", [(), (0,), (1,), (0, 1), (2, 0), (0, 1, 2)])
async def test_of_questions_asked_at_once_those_that_are_open_are_withdrawn(
    answered: tuple[int, ...],
) -> None:
    answers: dict[int, bool] = {}

    async def ask(turn: Turn, number: int) -> None:
        answers[number] = bool(await turn.ask_permission(f"{number}?"))

    async def act(turn: Turn) -> None:
        await asyncio.gather(*(ask(turn, number) for number in range(3)))
        await turn.wait_cancelled()
        await ask(turn, 3)

    async with prompted(act) as session:
        raw = session.raw
        questions = [await raw.wait("session/request_permission", n + 1) for n in range(3)]
        for number in answered:
            chosen = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
            raw.answer(questions[number], chosen)
        await raw.round_trip()
        raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        assert answers == {number: number in answered for number in range(4)}
        withdrawn = {frame["params"]["requestId"] for frame in raw.sent("$/cancel_request")}
        assert withdrawn == {q["id"] for n, q in enumerate(questions) if n not in answered}


@pytest.mark.covers("R1-103")
@pytest.mark.parametrize("end", ["returns", "raises", "is cancelled"])
async def test_a_question_of_a_task_that_the_turn_does_not_wait_for_ends_with_it(end: str) -> None:
    """A yes to it would permit something in the name of a turn that is over."""
    answers: list[Any] = []
    asking: list[asyncio.Task[None]] = []

    async def ask(turn: Turn) -> None:
        answers.append(await turn.ask_permission("May I?"))

    async def act(turn: Turn) -> None:
        asking.append(asyncio.create_task(ask(turn)))
        await asyncio.sleep(0)
        if end == "raises":
            raise RequestError.of(-1, "no")
        if end == "is cancelled":
            raise asyncio.CancelledError

    async with prompted(act) as session:
        raw = session.raw
        asked = await raw.wait("session/request_permission")
        answer = await raw.answer_to("p")
        assert ("result" in answer) == (end == "returns")
        withdrawn = await raw.wait("$/cancel_request")
        assert withdrawn["params"] == {"requestId": asked["id"]}
        assert raw.frames.index(withdrawn) < raw.frames.index(answer)
        raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        await asyncio.wait_for(asking[0], 5)
        assert [(a.option_id, a.allowed) for a in answers] == [(None, False)]


@pytest.mark.covers("FF-26")
async def test_a_late_yes_does_not_answer_the_next_question() -> None:
    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        answers.append(await turn.ask_permission(turn.text))

    async with prompted(act) as session:
        raw = session.raw
        first = await raw.wait("session/request_permission")
        raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        raw.send(session.prompt("q"))
        second = await raw.wait("session/request_permission", 2)
        assert second["id"] != first["id"]
        yes = {"outcome": {"outcome": "selected", "optionId": "allow_always"}}
        raw.answer(first, yes)
        raw.answer(first, yes)
        await raw.round_trip()
        assert len(answers) == 1
        raw.answer(second, {"outcome": {"outcome": "selected", "optionId": "reject_once"}})
        assert await session.reason("q") == "end_turn"
        assert [(a.option_id, a.allowed) for a in answers] == [
            (None, False),
            ("reject_once", False),
        ]


@pytest.mark.covers("FF-26", "R1-103")
@pytest.mark.parametrize("first", ["the yes", "the cancellation"])
async def test_a_yes_and_a_cancellation_that_arrive_together_are_a_no(first: str) -> None:
    """Whichever stands first on the wire: nobody could have begun what was allowed."""
    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        answers.append(await turn.ask_permission("May I?"))
        assert turn.cancelled

    async with prompted(act) as session:
        asked = await session.raw.wait("session/request_permission")
        yes = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
        both = [{"jsonrpc": "2.0", "id": asked["id"], "result": yes}, session.cancel()]
        session.raw.send(*(both if first == "the yes" else reversed(both)))
        assert await session.reason() == "cancelled"
        assert [answer.allowed for answer in answers] == [False]


async def test_a_caller_that_is_cancelled_withdraws_its_question_and_gets_no_answer() -> None:
    async def act(turn: Turn) -> str:
        try:
            async with asyncio.timeout(0.02):
                await turn.ask_permission("Quick?")
        except TimeoutError:
            # The task was cancelled and is not any more: its next question is one like any other.
            return "refusal" if await turn.ask_permission("Slow?") else "end_turn"
        return "max_tokens"

    async with prompted(act) as session:
        raw = session.raw
        first = await raw.wait("session/request_permission")
        assert (await raw.wait("$/cancel_request"))["params"] == {"requestId": first["id"]}
        second = await raw.wait("session/request_permission", 2)
        raw.answer(second, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        assert await session.reason() == "refusal"


@pytest.mark.covers("FF-27")
async def test_an_id_given_to_a_yes_and_a_no_is_a_no() -> None:
    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        options = [
            v1.PermissionOption(option_id="same", name="Yes", kind="allow_once"),
            v1.PermissionOption(option_id="same", name="No", kind="reject_once"),
        ]
        answers.append(await turn.ask_permission("Which?", options))
        answers.append(await turn.ask_permission("Nothing to choose", []))

    async with prompted(act) as session:
        raw = session.raw
        for number, option in enumerate(("same", "allow_once"), 1):
            asked = await raw.wait("session/request_permission", number)
            raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": option}})
        assert await session.reason() == "end_turn"
        assert [(a.option_id, a.allowed) for a in answers] == [("same", False), (None, False)]


async def test_a_form_that_is_open_at_cancellation_counts_as_cancelled() -> None:
    answers: list[Any] = []
    schema = v1.ElicitationSchema(properties={})

    async def act(turn: Turn) -> None:
        answers.append(await turn.elicit("Name?", schema))
        answers.append(await turn.elicit("And now?", schema))

    async with prompted(act, {"elicitation": {"form": {}}}) as session:
        asked = await session.raw.wait("elicitation/create")
        session.raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        withdrawn = await session.raw.wait("$/cancel_request")
        assert withdrawn["params"] == {"requestId": asked["id"]}
        assert answers == [v1.ElicitationCancelAction()] * 2
        assert len(session.raw.sent("elicitation/create")) == 1


async def test_a_form_that_the_client_cancels_by_itself_is_its_error() -> None:
    """Only what this side has withdrawn counts as cancelled."""
    errors: list[RequestError] = []

    async def act(turn: Turn) -> None:
        try:
            await turn.elicit("Name?", v1.ElicitationSchema(properties={}))
        except RequestError as error:
            errors.append(error)

    async with prompted(act, {"elicitation": {"form": {}}}) as session:
        session.raw.refuse(await session.raw.wait("elicitation/create"), -32800)
        assert await session.reason() == "end_turn"
        assert [error.code for error in errors] == [-32800]


@pytest.mark.covers("R1-128", "R1-134", "R1-140")
async def test_an_address_is_asked_for_and_completed_once_if_it_was_accepted() -> None:
    outcomes: list[Any] = []
    links: list[UrlElicitation] = []

    async def act(turn: Turn) -> None:
        for _ in range(4):
            link = await turn.elicit_url("Look", "https://example.com/")
            links.append(link)
            outcomes.append((link.accepted, link.answer))
            await link.complete()
            await link.complete()
        with pytest.raises(CapabilityError):
            await turn.elicit("Name?", v1.ElicitationSchema(properties={}))

    async with prompted(act, {"elicitation": {"url": {}}}) as session:
        raw = session.raw
        for number, action in enumerate(("accept", "decline", "cancel", "later"), 1):
            request = await raw.wait("elicitation/create", number)
            assert request["params"]["url"] == "https://example.com/"
            assert "sessionId" in request["params"]
            raw.answer(request, {"action": action})
        assert await session.reason() == "end_turn"
        done = raw.sent("elicitation/complete")

    assert [accepted for accepted, _ in outcomes] == [True, False, False, False]
    assert isinstance(outcomes[3][1], Unknown)
    assert [frame["params"] for frame in done] == [{"elicitationId": links[0].elicitation_id}]
    assert len({link.elicitation_id for link in links}) == 4
    assert all(len(link.elicitation_id) > 20 for link in links)
    assert [repr(link).endswith(", accepted>") for link in links] == [True, False, False, False]


async def test_an_address_that_is_open_at_cancellation_counts_as_cancelled() -> None:
    answers: list[bool] = []

    async def act(turn: Turn) -> None:
        answers.append((await turn.elicit_url("Look", "https://x/", elicitation_id="e")).accepted)

    async with prompted(act, {"elicitation": {"url": {}}}) as session:
        asked = await session.raw.wait("elicitation/create")
        assert asked["params"]["elicitationId"] == "e"
        session.raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        assert answers == [False]


@pytest.mark.covers("R1-134")
async def test_a_form_may_be_filled_in_declined_cancelled_or_fail() -> None:
    outcomes: list[Any] = []

    async def act(turn: Turn) -> None:
        for _ in range(4):
            try:
                outcomes.append(await turn.elicit("Name?", v1.ElicitationSchema(properties={})))
            except RequestError as error:
                outcomes.append(error.code)

    async with prompted(act, {"elicitation": {"form": {}}}) as session:
        raw = session.raw
        answers: list[Any] = [
            {"action": "accept", "content": {"name": "x"}},
            {"action": "decline"},
            {"action": "cancel"},
        ]
        for number, answer in enumerate(answers, 1):
            raw.answer(await raw.wait("elicitation/create", number), answer)
        raw.refuse(await raw.wait("elicitation/create", 4), -32603)
        assert await session.reason() == "end_turn"

    assert outcomes == [
        v1.ElicitationAcceptAction(content={"name": "x"}),
        v1.ElicitationDeclineAction(),
        v1.ElicitationCancelAction(),
        -32603,
    ]


ASKING = st.sampled_from(
    [
        *("ask",) * 4,
        *("yes", "no", "settle") * 2,
        *("ask shortly", "unknown option", "error", "nonsense", "say", "wait"),
        *("hold the journal", "let it go on"),
        *("cancel", "cancel the prompt", "cancel an asker", "return", "lose"),
    ]
)
CHOICES = [
    v1.PermissionOption(option_id="yes", name="Yes", kind="allow_once"),
    v1.PermissionOption(option_id="no", name="No", kind="reject_once"),
]


class AsksLikeForms(Turn):
    """A turn whose permissions are asked for in the way that its forms are."""

    async def ask_permission(
        self,
        tool_call: Any,
        options: Any = None,
        *,
        timeout: Any = UNSET,
    ) -> PermissionAnswer:
        params = v1.RequestPermissionRequest(
            session_id=self.session_id, tool_call=self._described(tool_call), options=list(options)
        )
        selected = None
        with suppress(AntiphonError):
            response = await self._ask(params, timeout)
            selected = getattr(getattr(response, "outcome", None), "option_id", None)
        known = selected if selected in {"yes", "no"} else None
        return PermissionAnswer(known, allowed=known == "yes")


async def asked_in_any_order(
    kind: type[Turn], steps: list[tuple[str, int]], journal: HeldJournal | None
) -> list[Any]:
    """What can be seen of a turn that asks while anything happens to it."""
    account: list[Any] = []
    askers: list[asyncio.Task[PermissionAnswer]] = []
    begun, returns = asyncio.Event(), asyncio.Event()

    async def act(turn: Turn) -> None:
        turn.__class__ = kind
        begun.set()
        await returns.wait()

    options: dict[str, Any] = {} if journal is None else {"journal": journal}
    agent = Scripted(act)
    async with raw_client(agent, **options) as raw:
        new = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
        session = Prompted(raw, new["result"]["sessionId"])
        raw.send(session.prompt())
        await begun.wait()
        (turn,) = agent.turns
        answered = 0
        for step, number in steps:
            match step:
                case "ask" | "ask shortly":
                    # What is given may change while it is asked for.
                    choices = CHOICES.copy()
                    timeout: Any = UNSET if step == "ask" else 0.5
                    call = v1.ToolCallUpdate(tool_call_id="t")
                    asking = turn.ask_permission(call, choices, timeout=timeout)
                    askers.append(asyncio.ensure_future(asking))
                    await asyncio.sleep(0)
                    choices.clear()
                case "yes" | "no" | "unknown option" | "error" | "nonsense":
                    questions = raw.sent("session/request_permission")[answered:]
                    for question in questions[:1]:
                        answered += 1
                        if step == "error":
                            raw.refuse(question, -32603)
                        elif step == "nonsense":
                            raw.answer(question, {"outcome": 7})
                        else:
                            outcome = {"outcome": "selected", "optionId": step}
                            raw.answer(question, {"outcome": outcome})
                case "cancel":
                    raw.send(session.cancel())
                case "cancel the prompt":
                    raw.send(raw.notification("$/cancel_request", {"requestId": "p"}))
                case "cancel an asker" if askers:
                    askers[number % len(askers)].cancel()
                case "say" if not turn.over:
                    with suppress(TurnOver, ConnectionClosed):
                        await turn.say(f"{number}")
                case "wait":
                    await asyncio.sleep(1)
                case "hold the journal" | "let it go on" if journal is not None:
                    for log in journal.logs:
                        (log.gate.clear if step == "hold the journal" else log.gate.set)()
                case "return":
                    returns.set()
                case "lose":
                    turn._connection.connection_lost(ConnectionClosed("cut"))
                case _:
                    for _ in range(number):
                        await asyncio.sleep(0)
            account.append(seen_of(turn, askers, raw))
        for log in journal.logs if journal is not None else ():
            log.gate.set()
        for _ in range(20):
            await asyncio.sleep(0)
        account.append(seen_of(turn, askers, raw))
        for asker in askers:
            asker.cancel()
        returns.set()
        await asyncio.gather(*askers, return_exceptions=True)
        account.append(seen_of(turn, askers, raw))
    return account


def seen_of(turn: Turn, askers: list[asyncio.Task[Any]], raw: RawPeer) -> Any:
    outcomes = [
        "waits"
        if not t.done()
        else "cancelled"
        if t.cancelled()
        else repr(t.exception() or t.result())
        for t in askers
    ]
    open_ones = (turn._asked is not None, len(turn._asks or ()))
    # Those of one moment are withdrawn in any order.
    withdrawn = sorted(frame["params"]["requestId"] for frame in raw.sent("$/cancel_request"))
    others = [frame for frame in raw.frames if frame.get("method") != "$/cancel_request"]
    wire = repr(others).replace(turn.session_id, "s")
    return outcomes, open_ones, turn.over, turn.cancelled, withdrawn, wire


@pytest.mark.parametrize("durable", [False, True])
@settings(max_examples=100)
@given(st.lists(st.tuples(ASKING, st.integers(0, 5)), max_size=25))
@example([("ask", 0), ("settle", 5), ("yes", 0), ("settle", 5)])
@example([("ask", 0), ("ask", 0), ("settle", 5), ("cancel", 0), ("yes", 0), ("settle", 5)])
@example([("ask", 0), ("settle", 5), ("yes", 0), ("cancel", 0), ("settle", 5), ("ask", 0)])
@example([("ask", 0), ("settle", 5), ("cancel an asker", 0), ("yes", 0), ("settle", 5)])
@example([("ask", 0), ("settle", 5), ("return", 0), ("settle", 5), ("yes", 0), ("settle", 5)])
@example([("ask shortly", 0), ("settle", 5), ("wait", 0), ("ask", 0), ("lose", 0)])
@example([("hold the journal", 0), ("say", 0), ("ask", 0), ("settle", 5), ("let it go on", 0)])
@example([("hold the journal", 0), ("say", 0), ("ask", 0), ("cancel", 0), ("let it go on", 0)])
async def test_a_permission_is_asked_for_as_a_form_is_whatever_happens_meanwhile(
    durable: bool, steps: list[tuple[str, int]]
) -> None:
    """The one has steps of the other in itself, to be a coroutine less."""
    short, general = [
        await asked_in_any_order(kind, steps, HeldJournal() if durable else None)
        for kind in (Turn, AsksLikeForms)
    ]
    assert short == general


# ------------------------------------------------------------------ cancellation


async def cancel_during(
    act: Callable[[Turn], Awaitable[Any]], client: Client | None = None, **options: Any
) -> tuple[str, Wire, Turn]:
    """Run a turn, cancel it after its first update; the stop reason, the frames, the turn."""
    agent = Scripted(act)
    async with joined(agent, client, **options) as (peer, wire):
        session = await peer.new_session(cwd="/")
        async with session.prompt("go") as turn:
            async for _ in turn:
                await turn.cancel()
        assert turn.stop_reason is not None
        return turn.stop_reason, wire, agent.turns[0]


@pytest.mark.covers("R1-95", "R1-97")
async def test_a_cancelled_turn_may_flush_and_then_ends_as_cancelled() -> None:
    async def act(turn: Turn) -> str:
        await turn.say("begin")
        await turn.wait_cancelled()
        assert turn.cancelled
        await turn.wait_cancelled()  # at once
        await turn.say("flushed")
        return "end_turn"

    reason, wire, turn = await cancel_during(act)
    assert reason == "cancelled"
    assert len(wire.received("session/update")) == 2
    assert turn.over


@pytest.mark.covers("R1-96", "FF-25")
@pytest.mark.parametrize("since", ["before the end", "after it"])
async def test_who_waits_for_a_cancellation_waits_no_longer_than_the_turn(since: str) -> None:
    waiting: list[asyncio.Task[None]] = []

    async def act(turn: Turn) -> None:
        if since == "before the end":
            waiting.append(asyncio.create_task(turn.wait_cancelled()))
            await asyncio.sleep(0)

    agent = Scripted(act)
    async with joined(agent) as (peer, _):
        session = await peer.new_session(cwd="/")
        assert (await session.prompt("go")).stop_reason == "end_turn"
        if since == "after it":
            waiting.append(asyncio.create_task(agent.turns[0].wait_cancelled()))
        await asyncio.wait_for(waiting[0], 5)
        assert not agent.turns[0].cancelled


async def test_an_error_of_a_cancelled_turn_is_still_cancelled() -> None:
    async def act(turn: Turn) -> None:
        await turn.say("begin")
        await turn.wait_cancelled()
        raise RuntimeError("aborted")

    assert (await cancel_during(act))[0] == "cancelled"


@pytest.mark.covers("FF-26")
async def test_an_open_question_ends_as_a_no_as_soon_as_the_turn_is_cancelled() -> None:
    async def never(params: Any, ctx: Any) -> Any:
        await asyncio.Event().wait()

    answers: list[Any] = []

    async def act(turn: Turn) -> None:
        await turn.say("begin")
        answers.append(await turn.ask_permission("May I?"))
        answers.append(await turn.ask_permission("And now?"))

    reason, wire, _ = await cancel_during(act, Asked(never))
    assert reason == "cancelled"
    assert [answer.allowed for answer in answers] == [False, False]
    assert len(wire.received("session/request_permission")) == 1


@pytest.mark.covers("R1-94", "FF-25")
async def test_a_turn_that_ignores_its_cancellation_is_over_after_the_back_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = asyncio.Event()

    async def act(turn: Turn) -> None:
        await turn.say("begin")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(TurnOver):
                await turn.say("too late")
            refused.set()
            raise

    reason, _, turn = await cancel_during(act, agent_limits=Limits(cancel_backstop=0.05))
    assert reason == "cancelled"
    await asyncio.wait_for(refused.wait(), 5)
    assert turn.over
    assert "ignored its cancellation" in caplog.text


async def test_a_tool_call_that_is_open_at_cancellation_has_failed() -> None:
    async def act(turn: Turn) -> None:
        async with turn.tool("Long"):
            await turn.wait_cancelled()

    _, wire, _ = await cancel_during(act)
    assert wire.received("session/update")[-1]["update"]["status"] == "failed"


# ------------------------------------------------------------------ subtasks and the end


async def test_the_answer_waits_for_subtasks_and_their_updates_come_before_it() -> None:
    async def act(turn: Turn) -> None:
        gate = asyncio.Event()

        async def later() -> None:
            await gate.wait()
            await turn.say("from a subtask")

        turn.start_soon(later())
        asyncio.get_running_loop().call_soon(gate.set)

    (update,) = await updates_of(act)
    assert update["content"]["text"] == "from a subtask"


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_failing_subtask_is_reported_and_changes_nothing(
    stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails because the turn was cancelled is no crash."""
    events: list[TelemetryEvent] = []

    async def act(turn: Turn) -> None:
        async def bad() -> None:
            await turn.say("x")
            if stopped:
                await turn.wait_cancelled()
            raise RuntimeError("subtask trouble")

        turn.start_soon(bad())

    async with prompted(act, telemetry=events.append) as session:
        await session.raw.wait("session/update")
        if stopped:
            session.raw.send(session.cancel())
        assert await session.reason() == ("cancelled" if stopped else "end_turn")
    facts = {"what": "subtask", "method": "session/prompt", "error": "RuntimeError"}
    crashes = [event.facts for event in events if event.name == "handler_crash"]
    assert crashes == ([] if stopped else [facts])
    assert ("subtask trouble" in caplog.text) != stopped


@pytest.mark.covers("I4", "R1-97")
async def test_a_subtask_may_ask_start_another_and_outlive_the_handler() -> None:
    finish = asyncio.Event()

    async def act(turn: Turn) -> str:
        async def last() -> None:
            await finish.wait()
            await turn.say("last")

        async def first() -> None:
            answer = await turn.ask_permission("May I?")
            await turn.say(f"{answer.option_id}")
            turn.start_soon(last())
            raise RuntimeError("is logged, and does not count")

        turn.start_soon(first())
        return "max_tokens"

    async with prompted(act) as session:
        asked = await session.raw.wait("session/request_permission")
        session.raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        await session.raw.wait("session/update")
        await session.raw.round_trip()
        assert not [f for f in session.raw.sent(None) if f["id"] == "p"]
        session.raw.send(session.prompt("q"))  # it is not over yet
        assert (await session.raw.answer_to("q"))["error"]["message"] == "prompt already in flight"
        finish.set()
        assert await session.reason() == "max_tokens"
        assert session.told() == ["allow_once", "last"]


@pytest.mark.covers("FF-26", "R1-95")
async def test_a_subtask_s_question_ends_with_its_turn_and_cancelled_beats_the_handler_s_word() -> (
    None
):
    answers: list[Any] = []

    async def act(turn: Turn) -> str:
        async def ask() -> None:
            answers.append(await turn.ask_permission("May I?"))
            with pytest.raises(TurnOver):
                turn.start_soon(asyncio.sleep(0))  # it only winds down
            await turn.say("flushed")

        turn.start_soon(ask())
        return "refusal"

    async with prompted(act) as session:
        await session.raw.wait("session/request_permission")
        await session.raw.round_trip()
        session.raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        assert [answer.allowed for answer in answers] == [False]
        assert session.told() == ["flushed"]


@pytest.mark.covers("I13", "R1-94", "FF-25", "FF-29")
@pytest.mark.parametrize("who", ["the handler", "a subtask"])
async def test_what_ignores_even_its_own_cancellation_holds_neither_id_nor_turn(who: str) -> None:
    """It is answered for at the back-stop; what it says later is not sent, its verbs raise."""
    release, late, over = asyncio.Event(), list[str](), asyncio.Event()

    async def act(turn: Turn) -> Any:
        if turn.text == "q":
            await turn.say("next")
            return None
        if who == "the handler":
            await deaf(turn)
        else:
            turn.start_soon(deaf(turn))
        return "refusal"

    async def deaf(turn: Turn) -> None:
        await turn.say("begin")
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                late.append("swallowed")
        for verb in (
            lambda: turn.say("late"),
            lambda: turn.think("late"),
            lambda: turn.plan([]),
            lambda: turn.tool("late").__aenter__(),
        ):
            with pytest.raises(TurnOver):
                await verb()
        with pytest.raises(TurnOver):
            turn.start_soon(asyncio.sleep(0))
        assert not await turn.ask_permission("late")
        late.append("done")
        over.set()

    async with prompted(act, limits=Limits(cancel_backstop=0.05)) as session:
        raw = session.raw
        await raw.wait("session/update")
        raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        # The session and the very same id are free while it is still there.
        raw.send(session.prompt("q"))
        assert await session.reason("q") == "end_turn"
        raw.forget()
        raw.send(session.prompt("q"))
        assert await session.reason("q") == "end_turn"
        raw.forget()
        release.set()
        await asyncio.wait_for(over.wait(), 5)
        await raw.round_trip()
        assert len(raw.frames) == 1  # the round trip's own
        assert late == ["swallowed", "done"]


@pytest.mark.covers("I13", "R1-94")
async def test_the_back_stop_of_a_turn_that_is_over_does_not_hit_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns: list[Turn] = []
    finish = asyncio.Event()

    async def act(turn: Turn) -> None:
        turns.append(turn)
        await turn.say(turn.text)
        if turn.text == "p":
            await turn.wait_cancelled()
        else:
            await finish.wait()

    async with prompted(act, limits=Limits(cancel_backstop=30)) as session:
        await session.raw.wait("session/update")
        session.raw.send(session.cancel())
        assert await session.reason() == "cancelled"
        session.raw.send(session.prompt("q"))
        await session.raw.wait("session/update", 2)
        (over, running), handle = turns, turns[0].backstop
        assert handle is not None
        assert handle.cancelled()
        over.session.backstop_reached(over)  # as if it had come all the same
        assert not running.cancelled
        assert not running.over
        finish.set()
        assert await session.reason("q") == "end_turn"
        assert "ignored its cancellation" not in caplog.text


@pytest.mark.covers("I3", "R1-82")
async def test_verbs_are_refused_once_the_turn_is_over() -> None:
    agent = Scripted(lambda turn: turn.say("x"))
    async with joined(agent) as (peer, wire):
        session = await peer.new_session(cwd="/")
        await session.prompt("go")
        turn = agent.turns[0]
        assert "over" in repr(turn)

        async def nothing() -> None:
            return None

        for verb in (
            lambda: turn.say("late"),
            lambda: turn.think("late"),
            lambda: turn.plan([]),
            lambda: turn.send(v1.Plan(entries=[])),
            lambda: turn.tool("late").__aenter__(),
            lambda: turn.read_text_file("/late"),
            lambda: turn.write_text_file("/late", ""),
            lambda: turn.run("late").__aenter__(),
        ):
            with pytest.raises(TurnOver):
                await verb()
        with pytest.raises(TurnOver):
            turn.start_soon(nothing())
        await turn.usage(used=1, size=2)  # about the session: always legal
        assert not await turn.ask_permission("late")  # a no is no worse than an error
        assert len(wire.received("session/request_permission")) == 0


# ------------------------------------------------------------------ files, terminals, forms


class Lending(Client):
    """A client that lends a file and a terminal of its own making."""

    capabilities = Capabilities(elicitation_form=True)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    async def read_text_file(self, params: Any, ctx: Context) -> v1.ReadTextFileResponse:
        self.calls.append(("read", (params.path, params.line, params.limit)))
        if params.path == "/gone":
            raise RequestError.of(-32002, "odd wording", {"uri": "file:///gone"})
        if params.path == "/shut":
            raise RequestError.of(-32603, "No such file or directory", {"errno": "ENOENT"})
        return v1.ReadTextFileResponse(content="text")

    async def write_text_file(self, params: Any, ctx: Context) -> v1.WriteTextFileResponse:
        self.calls.append(("write", (params.path, params.content)))
        return v1.WriteTextFileResponse()

    async def create_terminal(self, params: Any, ctx: Context) -> v1.CreateTerminalResponse:
        self.calls.append(("create", params))
        return v1.CreateTerminalResponse(terminal_id="t1")

    async def terminal_output(self, params: Any, ctx: Context) -> v1.TerminalOutputResponse:
        return v1.TerminalOutputResponse(output="out", truncated=False)

    async def wait_for_terminal_exit(
        self, params: Any, ctx: Context
    ) -> v1.WaitForTerminalExitResponse:
        return v1.WaitForTerminalExitResponse(exit_code=3)

    async def kill_terminal(self, params: Any, ctx: Context) -> v1.KillTerminalResponse:
        self.calls.append(("kill", params.terminal_id))
        return v1.KillTerminalResponse()

    async def release_terminal(self, params: Any, ctx: Context) -> v1.ReleaseTerminalResponse:
        self.calls.append(("release", params.terminal_id))
        return v1.ReleaseTerminalResponse()

    async def create_elicitation(
        self, params: Any, ctx: Context
    ) -> v1.ElicitationAcceptAction | v1.ElicitationDeclineAction | v1.ElicitationCancelAction:
        return v1.ElicitationAcceptAction(content={"name": "x"})


@pytest.mark.covers("FF-43")
async def test_files_are_read_and_written_through_the_client() -> None:
    client = Lending()

    async def act(turn: Turn) -> None:
        assert await turn.read_text_file("/a", line=2, limit=3) == "text"
        await turn.write_text_file("/a", "new")
        with pytest.raises(FileNotFoundError) as gone:
            await turn.read_text_file("/gone")
        assert (gone.value.filename, gone.value.errno) == ("/gone", errno.ENOENT)
        # By its code, and never by its words.
        with pytest.raises(RequestError, match="-32603"):
            await turn.read_text_file("/shut")

    await updates_of(act, client)
    assert client.calls[:2] == [("read", ("/a", 2, 3)), ("write", ("/a", "new"))]


async def test_paths_may_be_path_objects() -> None:
    client = Lending()

    async def act(turn: Turn) -> None:
        folder = PurePosixPath(turn.cwd)
        await turn.read_text_file(folder / "a")
        await turn.write_text_file(folder / "a", "new")
        async with turn.run("make", cwd=folder) as command:
            await command.wait()
        async with turn.tool("x", locations=[folder / "a", (folder / "b", 2)]) as tool:
            await tool.diff(folder / "c", None, "new")
        wrong: Any = b"/a"
        for refused in (turn.read_text_file(wrong), turn.write_text_file(wrong, "")):
            with pytest.raises(TypeError, match="bytes is no path"):
                await refused
        with pytest.raises(TypeError, match="bytes is no path"):
            turn.run("make", cwd=wrong)

    began, changed, *_ = await updates_of(act, client)
    assert began["locations"] == [{"path": "/a"}, {"path": "/b", "line": 2}]
    assert changed["content"][0]["path"] == "/c"
    assert [call[0] for call in client.calls[:2]] == ["read", "write"]


async def test_half_a_surrogate_pair_is_not_written_as_something_else() -> None:
    client = Lending()

    async def act(turn: Turn) -> None:
        for path, content in (("/a", "a\ud800"), ("/a\udcff", "a")):
            with pytest.raises(UnicodeEncodeError):
                await turn.write_text_file(path, content)
        await turn.write_text_file("/ä", "\U0001f600")

    await updates_of(act, client)
    assert client.calls == [("write", ("/ä", "\U0001f600"))]


@pytest.mark.covers("R1-116")
async def test_a_terminal_is_released_whatever_happens_in_its_block() -> None:
    client = Lending()

    async def act(turn: Turn) -> None:
        async with turn.run("make", ["test"], env={"A": "1"}, cwd="/w") as terminal:
            assert terminal.id == "t1"
            assert terminal.as_content() == v1.Terminal(terminal_id="t1")
            status = await terminal.wait()
            assert (status.exit_code, status.signal) == (3, None)
            assert (await terminal.output()).output == "out"
            await terminal.kill()
        with pytest.raises(ValueError, match="no"):
            async with turn.run("x"):
                raise ValueError("no")

    await updates_of(act, client)
    assert [name for name, _ in client.calls] == ["create", "kill", "release", "create", "release"]
    created = client.calls[0][1]
    assert (created.command, created.args, created.cwd) == ("make", ["test"], "/w")
    assert created.env == [v1.EnvVariable(name="A", value="1")]


@pytest.mark.covers("R1-116")
async def test_a_release_is_not_called_back_when_its_task_is_cancelled_again() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def use(turn: Turn) -> None:
        async with turn.run("make"):
            await asyncio.Event().wait()

    async def act(turn: Turn) -> None:
        tasks.append(turn.start_soon(use(turn)))

    async with prompted(act, {"terminal": True}) as session:
        raw = session.raw
        raw.answer(await raw.wait("terminal/create"), {"terminalId": "t"})
        await raw.round_trip()
        tasks[0].cancel()
        release = await raw.wait("terminal/release")
        tasks[0].cancel()
        assert await session.reason() == "end_turn"
        await raw.round_trip()
        assert raw.sent("$/cancel_request") == []
        raw.answer(release, {})


async def test_a_form_is_answered_by_the_client() -> None:
    async def act(turn: Turn) -> None:
        answer = await turn.elicit("Who?", v1.ElicitationSchema(properties={}))
        assert isinstance(answer, v1.ElicitationAcceptAction)
        assert answer.content == {"name": "x"}

    await updates_of(act, Lending())


@pytest.mark.covers("R1-28", "R1-33", "R1-34", "R1-128")
async def test_what_the_client_did_not_offer_is_refused_here_and_never_sent() -> None:
    async def act(turn: Turn) -> None:
        for call in (
            lambda: turn.read_text_file("/a"),
            lambda: turn.write_text_file("/a", ""),
            lambda: turn.run("x").__aenter__(),
            lambda: turn.elicit("Who?", v1.ElicitationSchema()),
        ):
            with pytest.raises(CapabilityError):
                await call()

    async with joined(Scripted(act)) as (peer, wire):
        session = await peer.new_session(cwd="/")
        await session.prompt("go")
        sent = {frame.get("method") for direction, frame in wire.frames if direction == "in"}
        assert sent == {None}


async def test_a_number_that_json_cannot_say_is_refused_at_the_call() -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(ValueError, match="NaN"):
            await turn.usage(used=1, size=2, cost=(float("nan"), "EUR"))
        async with turn.tool("x") as tool:
            with pytest.raises(ValueError, match="infinite"):
                await tool.update(raw_output={"a": [float("inf")]})
        await turn.say("still here")

    updates = await updates_of(act)
    assert updates[-1]["content"]["text"] == "still here"


async def test_what_no_client_could_read_is_refused_where_it_is_said() -> None:
    async def act(turn: Turn) -> None:
        wrong: Any = b"bytes"
        for refused in (
            turn.say(wrong),
            turn.think(wrong),
            turn.plan([wrong]),
            turn.plan("one text"),
            turn.ask_permission("x", [wrong]),
            turn.write_text_file("/x", wrong),
        ):
            with pytest.raises(TypeError, match=r" is no |not one text"):
                await refused
        with pytest.raises(TypeError, match="bytes is no location"):
            turn.tool("x", locations=[wrong])
        with pytest.raises(TypeError, match="bytes is no content"):
            turn.tool("x", content=[wrong])
        await turn.say("still here")

    assert [update["sessionUpdate"] for update in await updates_of(act, Lending())] == [
        "agent_message_chunk"
    ]


async def test_what_is_no_update_is_refused_and_an_untagged_tool_update_gets_its_tag() -> None:
    async def act(turn: Turn) -> None:
        with pytest.raises(TypeError, match="Cost is no session update"):
            await turn.send(v1.Cost(amount=1.0, currency="EUR"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        body: Any = v1.ToolCallUpdate(tool_call_id="t", status="completed")
        await turn.send(body)

    assert await updates_of(act) == [
        {"sessionUpdate": "tool_call_update", "toolCallId": "t", "status": "completed"}
    ]


async def test_verbs_say_so_when_the_client_is_gone() -> None:
    gone = asyncio.Event()
    failures: list[str] = []

    async def act(turn: Turn) -> None:
        await turn.say("x")
        try:
            await turn.wait_cancelled()
            with pytest.raises(ConnectionClosed):
                await turn.say("late")
            with pytest.raises(ConnectionClosed):
                await turn.plan([])
            failures.append("refused")
        finally:
            gone.set()

    async with joined(Scripted(act)) as (peer, wire):
        session = await peer.new_session(cwd="/")
        with pytest.raises(ConnectionClosed):
            async with session.prompt("go"):
                await wire.wait_for("session/update")
                await peer.transport.aclose()
        await asyncio.wait_for(gone.wait(), 5)
    assert failures == ["refused"]


async def test_closing_the_connection_tells_a_turn_at_work_at_once() -> None:
    told = asyncio.Event()

    async def act(turn: Turn) -> None:
        await turn.say("x")
        await turn.wait_cancelled()
        told.set()

    async with joined(Scripted(act)) as (peer, wire):
        session = await peer.new_session(cwd="/")
        with pytest.raises(ConnectionClosed):
            async with session.prompt("go"):
                await wire.wait_for("session/update")
                await peer.aclose()
    await asyncio.wait_for(told.wait(), 5)
    assert len(wire.sent("session/cancel")) == 1


async def test_a_turn_is_told_when_nothing_more_will_be_read() -> None:
    begun = asyncio.Event()

    async def act(turn: Turn) -> None:
        begun.set()
        await turn.wait_cancelled()

    agent = Scripted(act)
    async with joined(agent, agent_limits=Limits(close_grace=0.2)) as (peer, _):
        session = await peer.new_session(cwd="/")
        async with session.prompt("go") as turn:
            await asyncio.wait_for(begun.wait(), 5)
            agent.turns[0].peer.connection.input_ended()
            assert [update async for update in turn] == []
        assert turn.stop_reason == "cancelled"
