from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.cli import _demo_fixture as fixture
from tests.cli.command import BOUND, COMMAND, antiphon, environment, left_by

if TYPE_CHECKING:
    from tests.cli.command import Ran


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def ran(temporary: Path) -> Ran:
    return antiphon("demo", "--json", env={"TMPDIR": str(temporary)})


def updates(ran: Ran, kind: str) -> list[dict[str, Any]]:
    found = (line["update"] for line in ran.lines[:-1])
    return [update for update in found if update["sessionUpdate"] == kind]


def test_demo_ends_well_and_proves_that_the_work_was_real(ran: Ran) -> None:
    assert ran.code == 0
    result = ran.result
    assert result["ok"] is True
    assert result["stop_reason"] == "end_turn"
    assert result["updates"] == len(ran.lines) - 1
    assert result["permissions"] == 1
    assert result["test_passed"] is True
    assert ran.err == ""


def test_demo_streams_text_and_thoughts_in_several_pieces(ran: Ran) -> None:
    assert len(updates(ran, "agent_message_chunk")) > 5
    assert len(updates(ran, "agent_thought_chunk")) > 5


def test_demo_shows_a_plan_that_advances_to_its_end(ran: Ran) -> None:
    plans = [[entry["status"] for entry in plan["entries"]] for plan in updates(ran, "plan")]

    assert plans[0] == ["in_progress", "pending", "pending"]
    assert plans[-1] == ["completed"] * 3
    assert len(plans) == 4


def test_demo_shows_tool_calls_with_kind_place_diff_and_terminal(ran: Ran) -> None:
    calls = updates(ran, "tool_call")
    changes = updates(ran, "tool_call_update")

    assert [call["kind"] for call in calls] == ["read", "read", "edit", "execute"]
    assert all(Path(call["locations"][0]["path"]).is_absolute() for call in calls)
    assert calls[2]["locations"][0]["line"] == 6
    diff = calls[2]["content"][0]
    assert (diff["type"], diff["oldText"], diff["newText"]) == (
        "diff",
        fixture.BROKEN,
        fixture.FIXED,
    )
    content = [item for change in changes for item in change.get("content", [])]
    assert "terminal" in {item["type"] for item in content}
    ended = {change["toolCallId"] for change in changes if change.get("status") == "completed"}
    assert ended == {call["toolCallId"] for call in calls}
    assert updates(ran, "usage_update")


def test_demo_cleans_up_after_itself(ran: Ran, temporary: Path) -> None:
    assert ran.code == 0
    assert not list(temporary.iterdir())


def test_demo_shows_everything_on_standard_output() -> None:
    ran = antiphon("demo")

    assert (ran.code, ran.err) == (0, "")
    for words in (
        "Antiphon demo",
        "thinking: ",
        "plan [x] Run the test",
        "edit: Repair leap.py [completed]",
        "+    return year % 4 == 0 and (year % 100 != 0",
        "permission: Repair leap.py -> Repair it [allows it]",
        "| OK",
        "ok: end_turn",
        "ok: test_leap.py passes",
    ):
        assert words in ran.out


def test_demo_in_a_folder_of_somebody_else_touches_nothing_there(tmp_path: Path) -> None:
    (tmp_path / fixture.MODULE).write_text("def is_leap(year): ...\n")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.iterdir())}

    ran = antiphon("demo", "--json", "--cwd", str(tmp_path))

    assert ran.code == 0
    assert ran.result["test_passed"] is True
    assert not Path(ran.result["file"]).is_relative_to(tmp_path)
    assert not Path(ran.result["file"]).exists()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.iterdir())}


def test_demo_in_a_folder_with_its_module_repairs_it_there(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)

    ran = antiphon("demo", "--json", "--cwd", str(tmp_path))

    assert ran.code == 0
    assert fixture.is_fixed(tmp_path)
    assert Path(ran.result["file"]).parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == [fixture.MODULE, fixture.TEST_MODULE]


def test_demo_fails_where_the_test_does_not_pass_afterwards(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)
    program = (
        "from antiphon.cli import main, _demo_fixture\n"
        "_demo_fixture.passes = lambda folder: False\n"
        f"raise SystemExit(main(['demo', '--json', '--cwd', {str(tmp_path)!r}]))\n"
    )

    done = subprocess.run(
        [COMMAND[0], "-c", program], capture_output=True, text=True, timeout=BOUND
    )

    assert done.returncode == 1
    assert '"ok":false,"stop_reason":"end_turn"' in done.stdout
    assert '"test_passed":false' in done.stdout


def test_demo_in_no_folder_is_a_usage_error() -> None:
    assert antiphon("demo", "--cwd", "/no/such/folder").code == 2


def test_demo_whose_show_cannot_be_written_is_no_success() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "demo"], stdout=full, stderr=subprocess.PIPE, timeout=BOUND
        )

    assert done.returncode == 130
    assert b"takes no more" in done.stderr


def test_demo_has_a_time_limit() -> None:
    ran = antiphon("demo", "--timeout", "0.5")

    assert ran.code == 5
    assert ran.seconds < 3


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    marked = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [*COMMAND, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=marked
    ) as process:
        assert process.stdout is not None
        while b"plan" not in process.stdout.readline():
            pass
        started = time.monotonic()
        process.send_signal(2)
        process.communicate(timeout=BOUND)

    assert process.returncode == 130
    assert time.monotonic() - started < 2
    assert not list(tmp_path.iterdir())
    assert not left_by(marked)
