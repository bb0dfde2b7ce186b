from __future__ import annotations

import io
from typing import Any

import pytest

from antiphon.cli._output import Output
from antiphon.cli._plain import Plain, Quiet, change_lines, relative
from antiphon.cli._view import FileChange, PlanLine, Question, ToolView


@pytest.fixture
def aside() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def plain(aside: io.StringIO) -> Plain:
    return Plain(Output(), aside, cwd="/repo")


def tool(**members: Any) -> ToolView:
    return ToolView(id="1", title="Edit a.py", kind="edit", **members)


def test_agent_text_is_all_that_goes_to_standard_output(
    plain: Plain, aside: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    plain.message("one ")
    plain.note("noted")
    plain.message("two")
    plain.close()

    assert capfd.readouterr().out == "one two"
    assert aside.getvalue() == "noted\n"


def test_thoughts_are_one_line_for_each_train_of_thought(plain: Plain, aside: io.StringIO) -> None:
    plain.thought("Let ")
    plain.thought("me\nthink.")
    plain.note("noted")
    plain.thought("Again.")
    plain.close()

    assert aside.getvalue() == ("thinking: Let me\n          think.\nnoted\nthinking: Again.\n")


def test_plan_is_told_whole_and_then_by_what_changes(plain: Plain, aside: io.StringIO) -> None:
    def lines(*statuses: str) -> list[PlanLine]:
        return [PlanLine(f"step {n}", status, "low") for n, status in enumerate(statuses)]

    plain.plan(lines("in_progress", "pending"))
    plain.plan(lines("completed", "in_progress"))
    plain.plan(lines("completed", "completed"))

    assert aside.getvalue().splitlines() == [
        "plan [>] step 0",
        "plan [ ] step 1",
        "plan [x] step 0",
        "plan [>] step 1",
        "plan [x] step 1",
    ]


def test_tool_call_is_told_at_each_step_and_its_change_once(
    plain: Plain, aside: io.StringIO
) -> None:
    change = (FileChange("/repo/a.py", "a\nb\n", "a\nc\n"),)
    plain.tool(tool(locations=("/repo/a.py:2",), changes=change))
    plain.tool(tool(locations=("/repo/a.py:2",), changes=change))
    plain.tool(tool(locations=("/repo/a.py:2",), changes=change, status="completed"))

    assert aside.getvalue().splitlines() == [
        "edit: Edit a.py (a.py:2)",
        "  a.py",
        "   a",
        "  -b",
        "  +c",
        "edit: Edit a.py [completed]",
    ]


def test_output_of_a_terminal_is_told_with_the_tool_it_belongs_to(
    plain: Plain, aside: io.StringIO
) -> None:
    plain.output("t", "line 1\nli")
    plain.output("t", "ne 2\n")
    plain.tool(tool(terminals=("t",), status="completed"))

    assert aside.getvalue().splitlines()[1:] == ["  | line 1", "  | line 2"]


def ran(text: str, **members: Any) -> ToolView:
    return ToolView(id="1", title="Run it", kind="execute", text=text, **members)


def test_text_of_a_tool_is_told_at_its_end_though_it_came_before(
    plain: Plain, aside: io.StringIO
) -> None:
    plain.tool(ran(""))
    plain.tool(ran("3 passed\n"))
    plain.tool(ran("3 passed\n", status="completed"))
    plain.tool(ran("3 passed\n", status="completed"))

    assert aside.getvalue().splitlines() == [
        "execute: Run it",
        "execute: Run it [completed]",
        "  | 3 passed",
    ]


def test_text_that_repeats_a_terminal_or_the_file_that_was_read_is_not_told(
    plain: Plain, aside: io.StringIO
) -> None:
    plain.output("t", "from the terminal\n")
    plain.tool(ran("repeated", terminals=("t",), status="completed"))
    plain.tool(ToolView(id="2", title="Read", kind="read", text="a file", status="completed"))

    assert [line for line in aside.getvalue().splitlines() if line.startswith("  |")] == [
        "  | from the terminal"
    ]


def test_long_output_keeps_its_end(plain: Plain, aside: io.StringIO) -> None:
    plain.tool(ran("\n".join(map(str, range(100))), status="completed"))

    assert aside.getvalue().splitlines()[-1] == "  | 99"
    assert len(aside.getvalue().splitlines()) == 21


def test_question_is_shown_with_what_it_is_about(plain: Plain, aside: io.StringIO) -> None:
    question = Question(
        kind="permission", tool=tool(changes=(FileChange("/x", None, "new"),)), options=()
    )
    plain.suspend(question)
    plain.resume()
    plain.decided(question, "Yes", allowed=True, reason="")
    plain.decided(question, "No", allowed=False, reason="--permissions deny")

    assert aside.getvalue().splitlines() == [
        "The agent asks: Edit a.py",
        "  /x (new file)",
        "  +new",
        "permission: Edit a.py -> Yes",
        "permission: Edit a.py -> No (--permissions deny)",
    ]


def test_quiet_shows_questions_only(aside: io.StringIO) -> None:
    quiet = Quiet(Output(), aside)
    quiet.message("x")
    quiet.tool(tool())
    quiet.note("x")
    quiet.suspend(Question(kind="execute", tool=tool(command="rm x"), options=()))

    assert aside.getvalue() == "The agent wants to run: Edit a.py\n  $ rm x\n"


def test_controls_in_texts_of_the_agent_are_not_passed_on(plain: Plain, aside: io.StringIO) -> None:
    plain.thought("\x1b[2J")
    plain.tool(ToolView(id="1", title="\x07"))

    assert "\x1b" not in aside.getvalue()
    assert "\x07" not in aside.getvalue()


def test_a_standard_error_that_is_gone_ends_nothing(plain: Plain, aside: io.StringIO) -> None:
    aside.close()

    plain.note("x")


def test_change_lines_leave_out_what_is_far_from_the_change_and_what_is_too_much() -> None:
    old = "\n".join(str(n) for n in range(30))
    new = old.replace("3\n", "x\n", 1).replace("25\n", "y\n")

    assert list(change_lines(FileChange("/a", old, new), "", 40)) == (
        ["/a", " 1", " 2", "-3", "+x", " 4", " 5", "⋮", " 23", " 24", "-25", "+y", " 26", " 27"]
    )
    assert list(change_lines(FileChange("/a", old, new), "", 2)) == [
        "/a",
        " 1",
        " 2",
        "… 11 more lines",
    ]


def test_paths_are_shown_from_the_folder_of_the_session() -> None:
    assert relative("/repo/src/a.py", "/repo") == "src/a.py"
    assert relative("/repository/a.py", "/repo") == "/repository/a.py"
    assert relative("/a", "/") == "a"
    assert relative("/a", "") == "/a"
