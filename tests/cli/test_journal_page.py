"""How parts of a session look, and that nothing in them can look like more than it is."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from antiphon.cli._journal_page import Page, PlainPaper, iso, moment
from antiphon.cli._journal_story import Story
from antiphon.cli._output import Output
from antiphon.journal import SessionInfo
from tests.cli.records import (
    BEGIN,
    WHOLE,
    chunk,
    completed,
    record,
    records,
    started,
    update,
)

INFO = SessionInfo("s-1", 24, BEGIN, BEGIN + 24_000, {"cwd": "/repo"}, "Repair it.", False)


def shown(*made: tuple[str, Any], capfd: pytest.CaptureFixture[str], live: bool = False) -> str:
    story, page = Story(), Page(PlainPaper(Output()), cwd="/repo")
    for one in records(*made):
        for change in story.add(one):
            if live:
                page.live(change)
    for part in story.rest():
        if not live:
            page.part(part)
    page.close()
    return capfd.readouterr().out


def at(offset: int) -> str:
    return moment(BEGIN + offset * 1000)


def test_a_whole_session_reads_like_a_conversation(capfd: pytest.CaptureFixture[str]) -> None:
    story, page = Story(), Page(PlainPaper(Output()), cwd="/repo")
    page.head(INFO)
    for made in WHOLE:
        story.add(made)
        for part in story.take():
            page.part(part)
    for part in story.rest():
        page.part(part)
    page.close()

    assert (
        capfd.readouterr().out
        == f"""\
session s-1
  title:    Repair it.
  folder:   /repo
  created:  {at(0)}
  changed:  {at(24)}
  records:  24

turn 1  {at(2)}, record 2

user:
  Repair it.

title: Repair it.

thinking:
  There is a test that fails.

agent:
  I look at *both*.

  Then I repair.

read: Read a.py [completed]

agent:
  Meanwhile.

edit: Repair a.py (a.py:2) [completed]
  a.py
   a
  -b
  +c

mode: swift

plan [x] Read
plan [x] Repair

turn 1 ended: end_turn  after 16.0 s, 15 updates, context 310 of 8,000 tokens, record 18

turn 2  {at(19)}, record 19

user:
  And now?

turn 2 ended: failed: Internal error (-32603)  after 2.0 s, 1 update, record 21

turn 3  {at(22)}, record 22

user:
  Once more.

agent:
  I beg

turn 3 ended: orphaned: whoever worked on it had gone; nothing more came of it  \
after 3.0 s, 2 updates, record 25
"""
    )


def test_a_session_that_is_followed_grows_piece_by_piece(
    capfd: pytest.CaptureFixture[str],
) -> None:
    story, page = Story(), Page(PlainPaper(Output()), cwd="/repo")
    for made in WHOLE[1:18]:
        for change in story.add(made):
            page.live(change)
    page.close()

    assert (
        capfd.readouterr().out
        == f"""\
turn 1  {at(2)}, record 2

user:
  Repair it.

title: Repair it.

thinking:
  There is a test that fails.

agent:
  I look at *both*.
  \n\
  Then I repair.

plan [>] Read
plan [ ] Repair

read: Read a.py [in_progress]

agent:
  Meanwhile.

read: Read a.py [completed]
edit: Repair a.py (a.py:2) [in_progress]
edit: Repair a.py (a.py:2) [completed]
  a.py
   a
  -b
  +c

mode: swift

plan [x] Read
plan [x] Repair

turn 1 ended: end_turn  after 16.0 s, 15 updates, context 310 of 8,000 tokens, record 18
"""
    )


def test_a_piece_is_on_the_paper_before_the_next_record(capfd: pytest.CaptureFixture[str]) -> None:
    story, page = Story(), Page(PlainPaper(Output()))
    for made, out in zip(
        records(chunk("agent_message", "one "), chunk("agent_message", "two\nthree")),
        ("agent:\n  one ", "two\n  three"),
        strict=True,
    ):
        for change in story.add(made):
            page.live(change)
        assert capfd.readouterr().out == out
    page.remark("ours")
    page.close()

    assert capfd.readouterr().out == "\nours\n"


#: What would forge a line of ours, end one, move the cursor, set a title, fill the clipboard.
HOSTILE = (
    "turn 9 ended: \x1b[2J\x1b]0;t\x07\x1b]52;c;AAAA\x07\r\nturn 9 ended: end_turn\rread: ~\x0bagent:"
    "\x85plan [x]\u2028mode: m\u2029user:\x9b31m\x7f\u202e"
)


def hostile_session() -> list[tuple[str, Any]]:
    h = HOSTILE
    return [
        started(1, prompt=[{"type": "text", "text": h}]),
        chunk("user_message", h),
        chunk("agent_thought", h),
        chunk("agent_message", h),
        update("agent_message_chunk", content={"type": "resource_link", "uri": h, "name": h}),
        update("agent_message_chunk", content={"type": "image", "data": "AAAA", "mimeType": h}),
        update(
            "tool_call",
            toolCallId=h,
            title=h,
            kind=h,
            status=h,
            locations=[{"path": h}],
            rawInput={"command": h + "2"},
            content=[
                {"type": "diff", "path": h, "oldText": h, "newText": h + h},
                {"type": "content", "content": {"type": "text", "text": h}},
            ],
        ),
        update(
            "tool_call_update",
            toolCallId=h,
            status="failed",
            _meta={"terminal_output": {"terminal_id": h, "data": h}},
        ),
        update("plan", entries=[{"content": h, "status": h, "priority": h}]),
        update("current_mode_update", currentModeId=h),
        update("session_info_update", title=h),
        update("available_commands_update", availableCommands=[{"name": h, "description": h}]),
        update("notice", severity=h, title=h, description=h),
        update("compaction_update", compactionId=h, status=h),
        update("usage_update", used=1, size=2, cost={"amount": 1, "currency": h}),
        update(h, x=h),
        ("steer", {"payload": {"text": h}}),
        (h, {"x": h}),
        completed(1, stop=h),
        started(2),
        ("turn_completed", {"turnId": 2, "error": {"code": h, "message": h}}),
    ]


#: How a line of ours may begin.
OURS = re.compile(
    r"turn \d|user:|user, meanwhile:|agent:|thinking:|other: |plan \[ \] |mode: |title: |commands: /"
    r"|notice: |history shortened: |an update of no known kind: |record: "
)


@pytest.mark.parametrize("live", [False, True])
def test_hostile_text_controls_nothing_and_looks_like_nothing_of_ours(
    live: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    out = shown(*hostile_session(), capfd=capfd, live=live)

    # None of C0, C1 and DEL but the line end; and each line is one for every reader.
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", out)
    for line in out.split("\n"):
        assert not line or line.startswith("  ") or OURS.match(line), line
    # What looks like a line of ours is the real one, or stands within one or further right.
    begun = [line for line in out.split("\n") if line.startswith("turn ")]
    assert [line.partition("  ")[0].partition(":")[0] for line in begun] == [
        "turn 1",
        "turn 1 ended",
        "turn 2",
        "turn 2 ended",
    ]
    assert out.count("\nplan [x]") == out.count("\nread:") == 0


def test_hostile_facts_of_a_session_are_lines_of_their_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    page = Page(PlainPaper(Output()), cwd=HOSTILE)
    page.head(SessionInfo(HOSTILE, 1, 0, 0, {}, HOSTILE, False))
    page.remark(HOSTILE)

    lines = capfd.readouterr().out.splitlines()
    labels = [line.split("turn 9")[0] for line in lines[:3]]
    assert labels == ["session ", "  title:    ", "  folder:   "]
    assert len(lines) == 7
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", "".join(lines))


def test_long_output_and_long_changes_are_cut_and_say_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    many = "\n".join(f"line {n}" for n in range(100))
    out = shown(
        update(
            "tool_call",
            toolCallId="t",
            title="Run",
            kind="execute",
            status="completed",
            content=[
                {"type": "content", "content": {"type": "text", "text": many}},
                {"type": "diff", "path": "/repo/b", "newText": many},
            ],
        ),
        capfd=capfd,
    )

    assert "  | … 80 lines before\n  | line 80\n" in out
    assert "  b (new file)\n" in out
    assert "  … 60 more lines\n" in out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_durations_are_for_people(
    seconds: float, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    story, page = Story(), Page(PlainPaper(Output()))
    first = record(1, *started())
    last = record(2, *completed())
    for made in (
        first,
        type(first)(2, "s", last.kind, last.payload, "", first.ts + round(seconds * 1000)),
    ):
        story.add(made)
    for part in story.rest():
        page.part(part)

    assert f"end_turn  after {text}, " in capfd.readouterr().out


def test_times_are_local_for_people_and_utc_for_programs() -> None:
    assert moment(BEGIN) == datetime.fromtimestamp(BEGIN / 1000).strftime("%Y-%m-%d %H:%M:%S")
    assert iso(BEGIN + 7) == "2026-07-17T12:06:40.007+00:00"


@pytest.mark.parametrize("ts", [2**62, -(2**62)])
def test_what_is_no_time_is_shown_as_it_is(ts: int) -> None:
    assert moment(ts) == f"{ts} ms"
    assert iso(ts) is None
