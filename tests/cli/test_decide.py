from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon.cli._decide import Decider, Policy
from antiphon.cli._output import Output
from antiphon.cli._plain import Quiet
from antiphon.cli._view import Question, View
from antiphon.schema import v1
from antiphon.services import Operation

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon import ClientContext

CONTEXT = cast("ClientContext", None)
ALLOW = ("ok", "Allow", "allow_once")
ALWAYS = ("always", "Always", "allow_always")
REJECT = ("no", "Reject", "reject_once")
NEVER = ("never", "Never", "reject_always")
NEW = ("new", "Reject until noon", "reject_until_noon")


class Person:
    """Answers with what was put in."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.questions: list[Question] = []
        self.asked = asyncio.Event()

    async def choose(self, question: Question) -> str | None:
        self.questions.append(question)
        self.asked.set()
        await asyncio.sleep(0)
        return self.answers.pop(0)


def decider(policy: Policy, person: Person | None = None) -> Decider:
    return Decider(policy, View(Quiet(Output())), person, reason=f"--permissions {policy}")


def request(*options: tuple[str, str, str], **tool: Any) -> v1.RequestPermissionRequest:
    return v1.RequestPermissionRequest(
        session_id="s",
        tool_call=v1.ToolCallUpdate(tool_call_id="t", **tool),
        options=[
            v1.PermissionOption(option_id=o, name=n, kind=cast("Any", k)) for o, n, k in options
        ],
    )


def write(path: object) -> Operation:
    return Operation(kind="write", session_id="s", title=f"Write {path}", path=str(path))


def execute(line: str) -> Operation:
    return Operation(kind="execute", session_id="s", title=line, command=line.split())


@pytest.mark.covers("R1-104")
@pytest.mark.parametrize(
    ("policy", "options", "chosen"),
    [
        ("allow", [REJECT, ALWAYS, ALLOW], "ok"),
        ("allow", [REJECT, ALWAYS], "always"),
        ("allow", [REJECT], "no"),
        ("allow", [], None),
        ("deny", [ALLOW, NEVER, REJECT], "no"),
        ("deny", [ALLOW, NEVER], "never"),
        ("deny", [ALLOW], None),
        ("deny", [ALLOW, NEW], None),
        ("deny", [], None),
        ("ask", [ALLOW, REJECT], "no"),
    ],
)
async def test_policy_picks_an_option_and_never_a_yes_by_fallback(
    policy: Policy, options: list[tuple[str, str, str]], chosen: str | None
) -> None:
    decides = decider(policy)

    assert await decides.permission(request(*options), CONTEXT) == chosen
    assert decides.requests == 1


@pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False), ("ask", False)])
async def test_writes_and_commands_follow_the_same_policy(policy: Policy, allowed: bool) -> None:
    decides = decider(policy)

    assert await decides.guard(write("/a")) is allowed
    assert await decides.guard(execute("ls")) is allowed
    assert decides.requests == 0


async def test_person_chooses_among_the_agents_own_options() -> None:
    person = Person("always")

    chosen = await decider("ask", person).permission(request(ALLOW, ALWAYS, REJECT), CONTEXT)

    assert chosen == "always"
    assert [key for key, _, _ in person.questions[0].options] == ["ok", "always", "no"]


async def test_no_answer_is_a_no_in_the_agents_words() -> None:
    assert await decider("ask", Person(None)).permission(request(ALLOW, REJECT), CONTEXT) == "no"
    assert await decider("ask", Person(None)).permission(request(ALLOW), CONTEXT) is None


async def test_person_may_allow_one_kind_of_work_for_the_whole_run() -> None:
    person = Person("always", "no")
    decides = decider("ask", person)

    assert await decides.guard(write("/a"))
    assert await decides.guard(write("/b"))
    assert not await decides.guard(execute("ls"))
    assert len(person.questions) == 2


async def test_a_yes_covers_the_shown_change_once(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    diff = v1.Diff(path=str(link), old_text="a", new_text="b")
    person = Person("ok", "no", "no")
    decides = decider("ask", person)
    await decides.permission(request(ALLOW, REJECT, kind="edit", content=[diff]), CONTEXT)

    assert not await decides.guard(write(tmp_path / "other"))
    assert await decides.guard(write(tmp_path / "file"))
    assert not await decides.guard(write(tmp_path / "file"))


async def test_a_yes_covers_the_shown_command_once() -> None:
    person = Person("ok", "no", "no")
    decides = decider("ask", person)
    tool = {"kind": "execute", "raw_input": {"command": "ls -l"}}
    await decides.permission(request(ALLOW, REJECT, **tool), CONTEXT)

    assert not await decides.guard(execute("rm -r"))
    assert await decides.guard(execute("ls -l"))
    assert not await decides.guard(execute("ls -l"))


async def test_a_no_covers_nothing() -> None:
    person = Person("no", "no")
    decides = decider("ask", person)
    diff = v1.Diff(path="/a", old_text="a", new_text="b")
    await decides.permission(request(ALLOW, REJECT, kind="edit", content=[diff]), CONTEXT)

    assert not await decides.guard(write("/a"))
    assert len(person.questions) == 2


async def test_questions_are_asked_one_at_a_time() -> None:
    person = Person("once", "no")
    decides = decider("ask", person)

    answers = await asyncio.gather(decides.guard(write("/a")), decides.guard(write("/b")))

    assert list(answers) == [True, False]
    assert decides.pending == 0


async def test_a_cancelled_question_leaves_room_for_the_next() -> None:
    person = Person("once", "once")
    decides = decider("ask", person)
    first = asyncio.create_task(decides.guard(write("/a")))
    await person.asked.wait()
    first.cancel()
    await asyncio.wait([first])

    assert await decides.guard(write("/b"))
    assert decides.pending == 0
