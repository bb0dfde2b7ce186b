"""What the updates of a session add up to, on its own and of a live session."""

from __future__ import annotations

import gc
import json
import sys
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon import UNSET, SessionView, Update
from antiphon.schema import v1, v1_unstable
from antiphon.sessions import _view
from antiphon.sessions._view import CompactionView, MessageView, ToolCallView

if TYPE_CHECKING:
    from antiphon.sessions import Label


def update(variant: str, label: Label = "turn", **members: Any) -> Update:
    body = json.dumps({"sessionUpdate": variant, **members}).encode()
    return Update("s", label, msgspec.Raw(body), body)


def chunk(text: str, kind: str = "agent_message_chunk", **more: Any) -> Update:
    return update(kind, content={"type": "text", "text": text}, **more)


def tool(variant: str = "tool_call", id_: str = "t1", **members: Any) -> Update:
    return update(variant, toolCallId=id_, **members)


def folded(*updates: Update) -> SessionView:
    view = SessionView()
    for each in updates:
        view.apply(each)
    return view


def transcript(view: SessionView) -> list[tuple[str, str]]:
    return [
        (entry.kind, entry.text)
        if isinstance(entry, MessageView)
        else ("tool", entry.title or entry.tool_call_id)
        if isinstance(entry, ToolCallView)
        else (type(entry).__name__, "")
        for entry in view.entries
    ]


# ------------------------------------------------------------------ messages


def test_chunks_that_follow_each_other_are_one_message() -> None:
    view = folded(
        chunk("Let me ", "agent_thought_chunk"),
        chunk("see.", "agent_thought_chunk"),
        chunk("It "),
        chunk("works.\r\n"),
    )
    assert transcript(view) == [("thought", "Let me see."), ("agent", "It works.\r\n")]
    assert [message.text for message in view.messages] == ["Let me see.", "It works.\r\n"]
    assert repr(view.messages[0]) == "MessageView('thought', None, 'Let me see.')"


@pytest.mark.covers("R1-84")
def test_an_equal_id_is_the_same_message_wherever_it_stands() -> None:
    view = folded(
        chunk("a1", messageId="a"),
        chunk("b1", messageId="b"),
        tool(title="between"),
        chunk("a2", messageId="a"),
        chunk("thinking", "agent_thought_chunk", messageId="a"),
        chunk("b2", messageId="b"),
        chunk("no id"),
        chunk(", goes on"),
    )
    assert transcript(view) == [
        ("agent", "a1a2"),
        ("agent", "b1b2"),
        ("tool", "between"),
        ("thought", "thinking"),
        ("agent", "no id, goes on"),
    ]
    assert view.messages[0].message_id == "a"


@pytest.mark.parametrize(
    "between",
    [
        chunk("hm", "agent_thought_chunk"),
        chunk("named", messageId="m"),
        tool(title="x"),
        update("plan", entries=[]),
        update("notice", severity="info", title="x"),
        update("compaction_update", compactionId="c", status="in_progress"),
    ],
    ids=lambda each: str(each.kind),
)
def test_a_message_without_id_ends_when_something_else_comes_between(between: Update) -> None:
    view = folded(chunk("one"), between, chunk("two"))
    ours = [m.text for m in view.messages if m.kind == "agent" and m.message_id is None]
    assert ours == ["one", "two"]


@pytest.mark.parametrize(
    "between",
    [
        update("usage_update", used=1, size=2),
        update("session_info_update", title="x"),
        update("current_mode_update", currentModeId="m"),
        update("available_commands_update", availableCommands=[]),
        update("config_option_update", configOptions=[]),
        update("future_thing"),
    ],
    ids=lambda each: str(each.kind),
)
def test_what_has_no_place_in_the_transcript_ends_no_message(between: Update) -> None:
    assert [m.text for m in folded(chunk("one "), between, chunk("word")).messages] == ["one word"]


def test_a_new_turn_begins_a_new_message_and_a_tail_behind_the_answer_belongs_to_the_last() -> None:
    view = folded(chunk("banner", label="session"), chunk("first"))
    view.end_turn("end_turn")
    view.apply(chunk(" tail", label="session"))
    view.begin_turn()
    view.apply(chunk("second"))
    assert [m.text for m in view.messages] == ["banner", "first tail", "second"]


def test_live_messages_do_not_go_on_with_the_replayed_history() -> None:
    view = folded(chunk("old", label="replay"), chunk("banner", label="session"))
    assert [m.text for m in view.messages] == ["old", "banner"]


def test_a_prompt_sent_here_is_the_user_s_message() -> None:
    view = SessionView()
    view.begin_turn([v1.TextContent(text="fix "), v1.TextContent(text="it")])
    view.apply(chunk("done"))
    assert transcript(view) == [("user", "fix it"), ("agent", "done")]


@pytest.mark.parametrize("message_id", [None, "u1"])
def test_an_agent_that_repeats_the_prompt_does_not_double_it(message_id: str | None) -> None:
    view = SessionView()
    view.begin_turn([v1.TextContent(text="fix it")])
    more = {} if message_id is None else {"messageId": message_id}
    view.apply(chunk("fix ", "user_message_chunk", **more))
    view.apply(chunk("it", "user_message_chunk", **more))
    view.apply(chunk("done"))
    assert transcript(view) == [("user", "fix it"), ("agent", "done")]
    assert view.messages[0].message_id == message_id


def test_blocks_that_are_no_plain_text_keep_their_place_in_a_message() -> None:
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    noted = {"type": "text", "text": "noted", "annotations": {"priority": 1.0}}
    view = folded(
        chunk("a"),
        chunk("b"),
        update("agent_message_chunk", content=image),
        chunk("c"),
        update("agent_message_chunk", content=noted),
        chunk("d"),
    )
    (message,) = view.messages
    assert [getattr(block, "text", "<image>") for block in message.blocks] == [
        *("ab", "<image>", "c", "noted", "d")
    ]
    assert message.text == "abcnotedd"


# ------------------------------------------------------------------ tool calls


@pytest.mark.covers("R1-102")
def test_a_patch_changes_what_it_names_and_replaces_whole_lists() -> None:
    text = {"type": "content", "content": {"type": "text", "text": "x"}}
    view = folded(
        tool(title="Read", kind="read", content=[text, text], locations=[{"path": "/a"}]),
        tool("tool_call_update", status="in_progress", title=None, content=None, kind=None),
        tool("tool_call_update", rawInput={"path": "/a"}, locations=[{"path": "/b", "line": 3}]),
        tool("tool_call_update", rawInput=None, rawOutput=[1], content=[], name="read_file"),
        tool("tool_call_update", status="completed", _meta={"k": 1}),
    )
    call = view.tool_calls["t1"]
    assert view.entries == [call]
    assert (call.title, call.kind, call.status, call.name) == (
        *("Read", "read", "completed", "read_file"),
    )
    assert (call.content, [at.path for at in call.locations]) == ([], ["/b"])
    assert (call.raw_input, call.raw_output, call.meta) == ({"path": "/a"}, [1], {"k": 1})
    assert (call.is_over, call.state) == (True, "completed")


def test_an_update_may_come_before_its_call_and_the_call_twice() -> None:
    view = folded(
        tool("tool_call_update", status="in_progress"),
        tool(title="Run", kind="execute"),
        tool("tool_call_update", status="completed"),
        tool(title="Run tests"),
        tool("tool_call_update", id_="t2"),
    )
    call, other = view.tool_calls.values()
    assert (call.title, call.kind, call.status) == ("Run tests", "execute", "completed")
    assert (other.title, other.kind, other.status) == ("", "other", "pending")
    assert view.entries == [call, other]


def test_what_a_permission_request_says_about_a_call_is_folded_in() -> None:
    view = SessionView()
    shown = v1.ToolCallUpdate(tool_call_id="t1", title="Delete all", kind="delete")
    assert view.apply_tool_call(shown) is view.tool_calls["t1"]
    view.apply(tool("tool_call_update", status="completed"))
    assert [(c.title, c.status) for c in view.tool_calls.values()] == [("Delete all", "completed")]


def test_embedded_terminals_are_remembered_when_the_content_is_replaced() -> None:
    terminals = [{"type": "terminal", "terminalId": name} for name in ("x1", "x2")]
    text = {"type": "content", "content": {"type": "text", "text": "exit 0"}}
    view = folded(
        tool(title="Run", content=[terminals[0]]),
        tool("tool_call_update", content=terminals),
        tool("tool_call_update", content=[text], status="completed"),
    )
    call = view.tool_calls["t1"]
    assert call.terminals == ["x1", "x2"]
    assert [type(item) for item in call.content] == [v1.Content]


@pytest.mark.covers("R1-93")
def test_a_cancelled_turn_marks_its_unfinished_tool_calls_at_once() -> None:
    view = folded(
        tool(title="done", id_="a", status="completed"),
        tool(title="failed", id_="b", status="failed"),
        tool(title="runs", id_="c", status="in_progress"),
        tool(title="waits", id_="d"),
    )
    view.cancel_turn()
    assert [call.state for call in view.tool_calls.values()] == [
        *("completed", "failed", "cancelled", "cancelled"),
    ]
    view.apply(tool("tool_call_update", id_="c", status="completed"))  # it was quicker
    view.apply(tool("tool_call_update", id_="d", status="in_progress"))  # it has not heard yet
    view.apply(tool(title="late", id_="e"))
    assert [view.tool_calls[id_].state for id_ in "cde"] == ["completed", "cancelled", "cancelled"]
    assert all(call.is_over for call in view.tool_calls.values())
    view.end_turn("cancelled")
    view.begin_turn()
    view.apply(tool("tool_call_update", id_="d", status="in_progress"))
    view.apply(tool("tool_call_update", id_="e", title="renamed"))
    assert [view.tool_calls[id_].state for id_ in "de"] == ["in_progress", "cancelled"]


def test_an_answer_that_says_cancelled_marks_them_too_and_any_other_does_not() -> None:
    for reason, state in (("cancelled", "cancelled"), ("end_turn", "pending"), (None, "pending")):
        view = folded(tool(title="waits"))
        view.end_turn(reason)
        assert view.tool_calls["t1"].state == state


# ------------------------------------------------------------------ the rest of the state


@pytest.mark.covers("R1-88")
def test_each_plan_takes_the_place_of_the_one_before() -> None:
    def entry(content: str, status: str) -> dict[str, str]:
        return {"content": content, "status": status, "priority": "high"}

    view = folded(
        update("plan", entries=[entry("a", "pending"), entry("b", "pending")]),
        update("plan", entries=[entry("b", "completed")]),
    )
    assert [(each.content, each.status) for each in view.plan] == [("b", "completed")]
    view.apply(update("plan", entries=[]))
    assert view.plan == []
    assert view.entries == []


def test_commands_mode_options_and_usage_are_the_newest() -> None:
    option = {"id": "o", "name": "O", "type": "boolean", "currentValue": True}
    view = folded(
        update("available_commands_update", availableCommands=[{"name": "a", "description": ""}]),
        update("available_commands_update", availableCommands=[{"name": "b", "description": ""}]),
        update("current_mode_update", currentModeId="plan"),
        update("config_option_update", configOptions=[option]),
        update("usage_update", used=10, size=100),
        update("usage_update", used=20, size=100, cost={"amount": 0.5, "currency": "EUR"}),
    )
    assert [command.name for command in view.commands] == ["b"]
    assert view.mode == "plan"
    assert view.config_options is not None
    assert [each.id for each in view.config_options] == ["o"]
    assert view.usage is not None
    assert (view.usage.used, view.usage.size) == (20, 100)
    assert isinstance(view.usage.cost, v1.Cost)


def test_title_and_time_are_unknown_cleared_or_given() -> None:
    view = SessionView()
    assert (view.title, view.updated_at) == (UNSET, UNSET)
    view.apply(update("session_info_update", title="One", updatedAt="2026-01-01T00:00:00Z"))
    view.apply(update("session_info_update", title=None))
    assert (view.title, view.updated_at) == (None, "2026-01-01T00:00:00Z")
    view.apply(update("session_info_update", updatedAt=None))
    assert (view.title, view.updated_at) == (None, None)
    view.apply(update("session_info_update", title="Two"))
    assert view.title == "Two"


def test_notices_and_compactions_have_their_place_in_the_transcript() -> None:
    text = {"type": "text", "text": "short"}
    view = folded(
        update("notice", severity="warning", title="Low"),
        update("compaction_summary_chunk", compactionId="c", content=text),
        chunk("on"),
        update("compaction_summary_chunk", compactionId="c", content=text),
        update("compaction_update", compactionId="c", status="failed", error="no model"),
        update("compaction_update", compactionId="d", status="in_progress", summary=[text]),
        update("compaction_update", compactionId="d", status="completed", error=None),
    )
    notice, first, _, second = view.entries
    assert isinstance(notice, v1.Notice)
    assert isinstance(first, CompactionView)
    assert isinstance(second, CompactionView)
    assert repr(first) == "CompactionView('c', 'failed')"
    assert (first.error, [b.text for b in first.summary if isinstance(b, v1.TextContent)]) == (
        *("no model", ["shortshort"]),
    )
    assert (second.status, second.error, len(second.summary)) == ("completed", None, 1)
    view.apply(update("compaction_update", compactionId="d", status="completed", summary=None))
    assert second.summary == []


def test_unstable_plans_subagents_and_messages_between_sessions_are_folded() -> None:
    text = {"type": "text", "text": "hi"}
    view = folded(
        update("plan_update", plan={"type": "markdown", "planId": "p", "content": "old"}),
        update("plan_update", plan={"type": "markdown", "planId": "p", "content": "new"}),
        update("plan_update", plan={"type": "file", "planId": "q", "uri": "file:///q"}),
        update("plan_removed", planId="q"),
        update("plan_removed", planId="q"),
        update("subagent_update", sessionId="child", title="Tests", cwd="/w"),
        update("subagent_update", sessionId="child", title=None, state={"state": "running"}),
        update("session_message_chunk", messageId="m", content=text),
        update("session_message", messageId="m", senderSessionId="child"),
        update("session_message_chunk", messageId="m", content=text),
    )
    (plan,) = view.plans.values()
    assert isinstance(plan, v1_unstable.PlanMarkdown)
    assert plan.content == "new"
    child = view.subagents["child"]
    assert (child.title, child.cwd) == (None, "/w")
    assert isinstance(child.state, v1_unstable.RunningStateUpdate)
    (message,) = view.messages
    assert (message.kind, message.text) == ("session", "hihi")
    assert message.info is not None
    assert message.info.sender_session_id == "child"
    view.apply(update("session_message", messageId="m", content=[text]))
    assert message.text == "hi"


@pytest.mark.covers("R1-86")
def test_what_is_unknown_or_broken_is_kept_as_it_came() -> None:
    view = folded(
        update("future_thing", x=1),
        update("agent_message_chunk", content={"type": "hologram"}),
        chunk("on"),
    )
    assert [json.loads(each.raw)["sessionUpdate"] for each in view.unknown] == [
        *("future_thing", "agent_message_chunk"),
    ]
    assert transcript(view) == [("agent", "on")]


def test_an_update_names_the_entry_it_has_changed_and_counts_as_a_change() -> None:
    view = SessionView()
    assert view.revision == 0
    assert view.apply(update("usage_update", used=1, size=2)) is None
    message = view.apply(chunk("a"))
    assert message is view.apply(chunk("b")) is view.entries[0]
    assert view.revision == 3
    assert repr(view) == "<SessionView: 1 entries, revision 3>"
    # Typed values fold as well, e.g. those of a recording.
    assert view.apply(v1.AgentMessageChunk(content=v1.TextContent(text="c"))) is message


def test_history_that_is_replayed_again_takes_the_place_of_the_transcript() -> None:
    everything = [
        chunk("question", "user_message_chunk", label="replay"),
        tool(title="Read", label="replay"),
        update("compaction_update", "replay", compactionId="c", status="completed"),
        update("session_message_chunk", "replay", messageId="m", content={**TEXT}),
    ]
    for first in everything:
        view = folded(*everything, update("usage_update", used=1, size=2))
        before = transcript(view)
        view.begin_load()
        view.apply(update("usage_update", "replay", used=3, size=4))
        assert transcript(view) == before  # until there is something to put in its place
        view.apply(first)
        assert len(view.entries) == 1
        view.apply(chunk("more", label="replay"))
        view.end_load()
        assert len(view.entries) == 2
        assert view.usage is not None
        assert view.usage.used == 3


TEXT = {"type": "text", "text": "hi"}


def test_a_load_that_replays_nothing_leaves_the_transcript_alone() -> None:
    view = folded(chunk("a"))
    view.begin_load()
    view.end_load()
    view.apply(chunk("b"))
    assert transcript(view) == [("agent", "a"), ("agent", "b")]


# ------------------------------------------------------------------ what it costs


class CountingText(StringIO):
    """A buffer that counts what passes through it."""

    written = 0
    joined = 0

    def write(self, text: str) -> int:
        CountingText.written += len(text)
        return super().write(text)

    def getvalue(self) -> str:
        value = super().getvalue()
        CountingText.joined += len(value)
        return value


def work(view: SessionView, updates: list[Update]) -> int:
    """How many functions are called to fold updates in, built-in ones included."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    # What a collection in between finalizes is left by other tests, and counts as calls as well.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        for each in updates:
            view.apply(each)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_long_message_costs_what_its_chunks_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_view, "StringIO", CountingText)
    monkeypatch.setattr(CountingText, "written", 0)
    monkeypatch.setattr(CountingText, "joined", 0)
    view = SessionView()
    view.apply(chunk("0123456789"))
    few = work(view, [chunk("0123456789") for _ in range(1_000)])
    many = work(view, [chunk("0123456789") for _ in range(20_000)])
    assert many <= 20 * few  # the later chunks of a long message cost no more than the first
    view2 = SessionView()
    shared = chunk("0123456789")
    for _ in range(100_000):
        view2.apply(shared)
    assert (CountingText.written, CountingText.joined) == (10 * 121_001, 0)  # nothing was joined
    assert len(view2.messages[0].text) == 1_000_000


def test_many_tool_calls_and_messages_cost_what_their_updates_cost() -> None:
    def some(begin: int, end: int) -> list[Update]:
        return [
            each
            for number in range(begin, end)
            for each in (
                tool(id_=f"t{number}", title="x", status="in_progress"),
                chunk("x", messageId=f"m{number}"),
                tool("tool_call_update", id_=f"t{number}", status="completed"),
                chunk("x", messageId=f"m{number // 2}"),
            )
        ]

    view = SessionView()
    first = work(view, some(0, 200))
    later = work(view, some(200, 4_200))
    assert later <= 20 * first + 100


def test_many_terminals_of_one_call_cost_what_they_are() -> None:
    class Id(str):
        """An id that counts what it is compared with."""

        __slots__ = ()
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Id.compared += 1
            return str.__eq__(self, other)

    ids = [Id(f"t{number}") for number in range(1_000)]
    call = v1.ToolCall(
        tool_call_id="t", title="x", content=[v1.Terminal(terminal_id=id_) for id_ in ids]
    )
    view = SessionView()
    view.apply(call)
    view.apply(call)
    assert view.tool_calls["t"].terminals == ids
    assert Id.compared < 10 * len(ids)
