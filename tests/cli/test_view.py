from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from antiphon import Update
from antiphon.cli._view import FileChange, PlanLine, ToolView, View, block_text
from antiphon.schema import v1

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.cli._view import Display


class Told:
    """A display that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def told(*args: Any, **more: Any) -> None:
            copies = [
                msgspec.structs.replace(arg) if isinstance(arg, ToolView) else arg for arg in args
            ]
            self.calls.append((name, *copies, *more.values()))

        return told


def update(text: str) -> Update:
    return Update("s", "turn", msgspec.Raw(text.encode()), b"")


def show(*texts: str) -> list[tuple[Any, ...]]:
    told = Told()
    view = View(cast("Display", told))
    for text in texts:
        view.show(update(text))
    return told.calls


def last_tool(*texts: str) -> ToolView:
    tool: ToolView = show(*texts)[-1][1]
    return tool


CHUNK = '{"sessionUpdate":"%s","content":{"type":"text","text":"hi"}}'


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (CHUNK % "agent_message_chunk", ("message", "hi")),
        (CHUNK % "agent_thought_chunk", ("thought", "hi")),
        (
            '{"sessionUpdate":"plan","entries":[{"content":"c","status":"pending","priority":"low"}]}',
            ("plan", [PlanLine("c", "pending", "low")]),
        ),
        ('{"sessionUpdate":"usage_update","used":1,"size":2}', ("usage", 1, 2, "")),
        (
            '{"sessionUpdate":"usage_update","used":1,"size":2,"cost":{"amount":0.5,"currency":"EUR"}}',
            ("usage", 1, 2, "0.5 EUR"),
        ),
        ('{"sessionUpdate":"current_mode_update","currentModeId":"m"}', ("note", "mode: m")),
        (
            '{"sessionUpdate":"notice","severity":"warning","title":"hot"}',
            ("note", "warning: hot"),
        ),
        ('{"sessionUpdate":"moon_phase"}', ("note", "update: moon_phase")),
    ],
)
def test_each_kind_of_update_is_told_in_its_own_way(text: str, call: tuple[Any, ...]) -> None:
    assert show(text) == [call]


@pytest.mark.parametrize(
    "text",
    [
        CHUNK % "user_message_chunk",
        '{"sessionUpdate":"session_info_update","title":"t"}',
        '{"sessionUpdate":"config_option_update","configOptions":[]}',
    ],
)
def test_what_nobody_needs_to_see_is_not_shown(text: str) -> None:
    assert show(text) == []


def test_tool_call_is_put_together_from_its_updates() -> None:
    tool = last_tool(
        '{"sessionUpdate":"tool_call","toolCallId":"1","title":"Edit","kind":"edit",'
        '"locations":[{"path":"/a","line":3}],"rawInput":{"command":["ls","a b"]}}',
        '{"sessionUpdate":"tool_call_update","toolCallId":"1","status":"completed","title":null,'
        '"content":[{"type":"diff","path":"/a","oldText":null,"newText":"x"},'
        '{"type":"terminal","terminalId":"t"},'
        '{"type":"content","content":{"type":"text","text":"out"}}]}',
    )

    assert tool == ToolView(
        id="1",
        title="Edit",
        kind="edit",
        status="completed",
        locations=("/a:3",),
        changes=(FileChange("/a", None, "x"),),
        terminals=("t",),
        text="out",
        command="ls 'a b'",
    )
    assert tool.is_over


def test_tool_call_that_was_never_announced_is_one_all_the_same() -> None:
    tool = last_tool('{"sessionUpdate":"tool_call_update","toolCallId":"1","status":"in_progress"}')

    assert (tool.name, tool.kind, tool.is_over) == ("1", "other", False)


def test_second_announcement_of_a_tool_call_changes_the_first() -> None:
    tool = last_tool(
        '{"sessionUpdate":"tool_call","toolCallId":"1","title":"A","kind":"read"}',
        '{"sessionUpdate":"tool_call","toolCallId":"1","title":"B"}',
    )

    assert (tool.title, tool.kind) == ("B", "read")


def test_output_of_a_terminal_that_nobody_here_started_is_shown() -> None:
    calls = show(
        '{"sessionUpdate":"tool_call_update","toolCallId":"1",'
        '"content":[{"type":"terminal","terminalId":"1"}],'
        '"_meta":{"terminal_output":{"terminal_id":"1","data":"hello"}}}'
    )

    assert calls[-1] == ("output", "1", "hello")


@pytest.mark.parametrize("meta", ["5", '{"terminal_output":5}', '{"terminal_output":{"data":"x"}}'])
def test_meta_of_another_shape_is_nothing(meta: str) -> None:
    text = '{"sessionUpdate":"tool_call_update","toolCallId":"1","_meta":%s}'

    assert len(show(text % meta)) == 1


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (v1.TextContent(text="t"), "t"),
        (v1.ResourceLink(name="n", uri="file:///n"), "[n](file:///n)"),
        (v1.ImageContent(data="AAAA", mime_type="image/png"), "[image/png, 3 bytes]"),
        (
            v1.EmbeddedResource(resource=v1.TextResourceContents(uri="file:///x", text="x")),
            "[file:///x]",
        ),
        (object(), ""),
    ],
)
def test_block_text(block: object, text: str) -> None:
    assert block_text(block) == text


def chunk(text: str, message_id: str | None = None) -> str:
    named = f',"messageId":"{message_id}"' if message_id else ""
    content = f'{{"type":"text","text":"{text}"}}'
    return f'{{"sessionUpdate":"agent_message_chunk","content":{content}{named}}}'


TOOL = '{"sessionUpdate":"tool_call","toolCallId":"1","title":"t"}'


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([chunk("a"), chunk("b")], "ab"),
        ([chunk("a"), TOOL, chunk("b")], "a\nb"),
        ([chunk("a\\n"), TOOL, chunk("b")], "a\nb"),
        ([chunk("a"), CHUNK % "agent_thought_chunk", chunk("b")], "a\nb"),
        ([chunk("a", "1"), chunk("b", "2")], "a\nb"),
        ([chunk("a", "1"), TOOL, chunk("b", "1")], "ab"),
        ([TOOL, chunk("a")], "a"),
        ([chunk("a"), TOOL, chunk(""), chunk("b")], "a\nb"),
    ],
)
def test_separate_messages_stand_on_separate_lines(texts: list[str], shown: str) -> None:
    assert "".join(call[1] for call in show(*texts) if call[0] == "message") == shown
