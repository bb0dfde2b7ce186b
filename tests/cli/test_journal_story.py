"""What records add up to, for a reader who comes afterwards and for one who watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from antiphon.cli._journal_story import (
    Note,
    PlanPart,
    Said,
    Story,
    ToolPart,
    TurnBegin,
    TurnEnd,
)
from tests.cli.records import (
    BEGIN,
    WHOLE,
    chunk,
    completed,
    orphaned,
    record,
    records,
    started,
    update,
)

if TYPE_CHECKING:
    from antiphon.cli._journal_story import Part


def told(*made: tuple[str, Any]) -> list[Part]:
    story = Story()
    for made_record in records(*made):
        story.add(made_record)
    return story.rest()


def shape(parts: list[Part]) -> list[Any]:
    """What each part is, in few words."""
    found: list[Any] = []
    for part in parts:
        match part:
            case TurnBegin():
                found.append(("turn", part.number))
            case TurnEnd():
                found.append(("end", part.how.partition(":")[0]))
            case Said():
                found.append((part.who, part.text))
            case ToolPart():
                found.append(("tool", part.tool.name, part.tool.status))
            case PlanPart():
                found.append(("plan", [line.status for line in part.lines]))
            case Note():
                found.append(("note", part.text))
    return found


def test_a_whole_session_is_told_turn_by_turn_with_each_thing_in_its_place() -> None:
    story = Story()
    for made in WHOLE:
        story.add(made)

    assert shape(story.rest()) == [
        ("turn", 1),
        ("user", "Repair it."),
        ("note", "title: Repair it."),
        ("thought", "There is a test that fails."),
        ("agent", "I look at *both*.\n\nThen I repair."),
        ("tool", "Read a.py", "completed"),
        ("agent", "Meanwhile."),
        ("tool", "Repair a.py", "completed"),
        ("note", "mode: swift"),
        ("plan", ["completed", "completed"]),
        ("end", "end_turn"),
        ("turn", 2),
        ("user", "And now?"),
        ("end", "failed"),
        ("turn", 3),
        ("user", "Once more."),
        ("agent", "I beg"),
        ("end", "orphaned"),
    ]


def test_a_turn_knows_how_long_it_took_and_what_it_came_to() -> None:
    ends = [part for part in told(*_of(WHOLE)) if isinstance(part, TurnEnd)]

    assert [(end.seconds, end.updates, end.good, end.number) for end in ends] == [
        (16.0, 15, True, 1),
        (2.0, 1, False, 2),
        (3.0, 2, False, 3),
    ]
    assert ends[0].context == "310 of 8,000 tokens"
    assert ends[1].how == "failed: Internal error (-32603)"
    assert ends[1].context == ""


def _of(made: Any) -> list[tuple[str, Any]]:
    return [(one.kind, one.data) for one in made]


def test_parts_are_given_out_once_and_not_before_their_turn_has_ended() -> None:
    story = Story()
    given: list[Part] = []
    for made in WHOLE:
        story.add(made)
        before = len(given)
        given += story.take()
        if made.kind in {"session_update", "turn_started"}:
            assert len(given) == before
    assert story.rest() == []

    again = Story()
    for made in WHOLE:
        again.add(made)
    assert shape(given) == shape(again.rest())


def test_what_is_told_at_once_adds_up_to_the_same_messages() -> None:
    story = Story()
    live: dict[int, str] = {}
    order: list[Said] = []
    for made in WHOLE:
        for change in story.add(made):
            if isinstance(change.part, Said):
                if change.new:
                    order.append(change.part)
                live[id(change.part)] = live.get(id(change.part), "") + change.piece

    assert [live[id(part)] for part in order] == [part.text for part in order]
    assert len(order) == 7


@pytest.mark.parametrize("stop", ["cancelled", "refusal", "max_tokens", "something_new"])
def test_another_stop_reason_is_neither_good_nor_bad(stop: str) -> None:
    end = told(started(), completed(stop=stop))[-1]

    assert isinstance(end, TurnEnd)
    assert (end.how, end.good) == (stop, None)


def test_a_tool_call_that_was_running_when_its_turn_was_cancelled_is_cancelled() -> None:
    call = update("tool_call", toolCallId="t", title="Wait", kind="execute", status="in_progress")

    assert shape(told(started(), call, completed(stop="cancelled")))[1] == (
        "tool",
        "Wait",
        "cancelled",
    )
    assert shape(told(started(), call, orphaned()))[1][2] == "cancelled"
    assert shape(told(started(), call, completed()))[1][2] == "in_progress"


def test_a_turn_that_begins_inside_another_ends_that_one() -> None:
    parts = told(started(1), chunk("agent_message", "a"), started(2), completed(2))

    assert shape(parts) == [
        ("turn", 1),
        ("agent", "a"),
        ("end", "never completed"),
        ("turn", 2),
        ("end", "end_turn"),
    ]
    end = parts[2]
    assert isinstance(end, TurnEnd)
    assert (end.offset, end.ts, end.good) == (2, BEGIN + 2000, False)


def test_an_end_without_a_beginning_has_no_duration_and_its_own_number() -> None:
    (end,) = told(completed(7))

    assert isinstance(end, TurnEnd)
    assert (end.number, end.seconds, end.updates) == (7, None, 0)


def test_a_turn_that_is_open_stays_so() -> None:
    story = Story()
    for made in records(started(), chunk("agent_message", "a")):
        story.add(made)

    assert story.turn_is_open
    assert story.take() == []
    assert shape(story.rest()) == [("turn", 1), ("agent", "a")]
    assert story.turn_is_open


def test_text_that_comes_behind_the_end_of_its_turn_is_told_there_and_alone() -> None:
    parts = told(started(), chunk("agent_message", "one"), completed(), chunk("agent_message", "x"))

    assert shape(parts)[-2:] == [("end", "end_turn"), ("agent", "x")]


def test_chunks_of_one_message_id_are_one_message_whatever_comes_between() -> None:
    parts = told(
        started(),
        chunk("agent_message", "a", messageId="m1"),
        update("tool_call", toolCallId="t", title="T"),
        chunk("agent_message", "b", messageId="m1"),
        chunk("agent_message", "c", messageId="m2"),
    )

    assert shape(parts)[1:] == [("agent", "ab"), ("tool", "T", "pending"), ("agent", "c")]


def test_a_prompt_that_the_writer_kept_in_its_turn_is_the_users_message() -> None:
    prompt = [
        {"type": "text", "text": "Hello"},
        {"type": "image", "data": "AAAA", "mimeType": "x/y"},
    ]

    assert shape(told(started(prompt=prompt)))[1:] == [("user", "Hello\n[x/y, 3 bytes]\n")]


def test_a_tool_call_goes_on_in_the_turn_after_and_keeps_its_title() -> None:
    parts = told(
        started(1),
        update("tool_call", toolCallId="t", title="Long", kind="execute", status="in_progress"),
        completed(1),
        started(2),
        update("tool_call_update", toolCallId="t", status="completed"),
        completed(2),
    )

    assert shape(parts)[4] == ("tool", "Long", "completed")


def test_output_that_an_agent_streams_for_its_terminal_is_kept_with_the_call() -> None:
    def output(data: str) -> tuple[str, Any]:
        meta = {"terminal_output": {"terminal_id": "x", "data": data}}
        return update("tool_call_update", toolCallId="t", _meta=meta)

    call = update("tool_call", toolCallId="t", title="Run", kind="execute")
    part = told(started(), call, output("one\n"), output("two\n"))[1]

    assert isinstance(part, ToolPart)
    assert part.printed == ["one\n", "two\n"]


NOTES: list[tuple[tuple[str, Any], str]] = [
    (update("current_mode_update", currentModeId="m"), "mode: m"),
    (
        update("available_commands_update", availableCommands=[{"name": "a", "description": ""}]),
        "commands: /a",
    ),
    (update("available_commands_update", availableCommands=[]), "commands: none"),
    (
        update(
            "config_option_update",
            configOptions=[
                {
                    "id": "o",
                    "name": "Mode",
                    "type": "select",
                    "currentValue": "v",
                    "options": [],
                }
            ],
        ),
        "options: Mode = v",
    ),
    (update("notice", severity="warning", title="T", description="D"), "notice: warning: T: D"),
    (
        update("compaction_update", compactionId="c", status="completed"),
        "history shortened: completed",
    ),
    (update("subagent_update", sessionId="c"), "update: subagent_update"),
    (
        update("from_the_future", x=1),
        'an update of no known kind: {"sessionUpdate": "from_the_future", "x": 1}',
    ),
    (("session_update", b"[1]"), "an update of no known kind: [1]"),
    (("session_update", b"{"), "an update of no known kind: {"),
    (("from_the_future", {"a": 1}), 'record: from_the_future {"a": 1}'),
    (("session_created", {}), "record: session_created {}"),
    (("x", {"a": "b" * 400}), "record: x " + ('{"a": "' + "b" * 400)[:300] + "…"),
]


@pytest.mark.parametrize(("made", "text"), NOTES)
def test_anything_else_is_a_note(made: tuple[str, Any], text: str) -> None:
    kind, payload = made
    story = Story()
    story.add(record(2, kind, payload))

    assert shape(story.rest()) == [("note", text)]


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b"null", b'{"turnId":true}', b'{"turnId":"1","prompt":3,"stopReason":4}'],
)
def test_payloads_that_are_no_records_of_ours_break_nothing(payload: bytes) -> None:
    story = Story()
    for offset, kind in enumerate(("turn_started", "steer", "turn_completed", "steer"), start=2):
        story.add(record(offset, kind, payload))
    parts = story.rest()

    assert shape(parts) == [("turn", None), ("steer", ""), ("end", "completed"), ("steer", "")]


def test_a_steer_is_what_the_user_said_meanwhile() -> None:
    payload = {"turnId": 1, "offset": 1, "payload": {"clientMsgId": None, "text": "use tabs"}}

    assert shape(told(started(), ("steer", payload)))[1:] == [("steer", "use tabs")]


def test_what_is_kept_does_not_grow_with_the_session() -> None:
    story = Story()

    def keep(turns: int) -> int:
        for n in range(turns):
            made = records(
                started(n),
                chunk("agent_message", "text"),
                update("tool_call", toolCallId=f"t{n}", title="T", status="completed"),
                completed(n),
            )
            for one in made:
                story.add(one)
            story.take()
        inner = (story._view.entries, story._view.tool_calls, story._parts, story._by_entry)
        return sum(map(len, inner))

    assert keep(1) == keep(50)
