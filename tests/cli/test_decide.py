from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import pytest

from antiphon.cli._decide import Decider
from antiphon.cli._output import Output
from antiphon.cli._plain import Plain
from antiphon.cli._view import Question, View
from antiphon.schema import v1
from antiphon.services import Operation, Permissions, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.services import Decision

ROOT = "/project"
ALLOW = ("ok", "Allow", "allow_once")
ALWAYS = ("always", "Always", "allow_always")
REJECT = ("no", "Reject", "reject_once")
NEVER = ("never", "Never", "reject_always")
NEW = ("new", "Reject until noon", "reject_until_noon")

Word = Literal["ask", "allow", "deny"]


class Here:
    session_id = "s"
    roots: Sequence[str] = (ROOT,)


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


class Decides(Decider):
    """Answers with an option's id, and keeps what was shown and decided."""

    def __init__(self, policy: Word | Permissions, person: Person | None = None) -> None:
        self.shown = io.StringIO()
        self.decisions: list[Decision] = []
        reason = f"--permissions {policy}" if isinstance(policy, str) else ""
        super().__init__(
            Permissions(default=policy) if isinstance(policy, str) else policy,
            View(Plain(Output(), self.shown)),
            person,
            reason=reason,
            roots=[ROOT],
            record=self.decisions.append,
        )

    async def chosen(self, *options: tuple[str, str, str], **tool: Any) -> str | None:
        answer = await self.permission(request(*options, **tool), Here())
        outcome = answer.outcome
        return outcome.option_id if isinstance(outcome, v1.SelectedPermissionOutcome) else None


def request(*options: tuple[str, str, str], **tool: Any) -> v1.RequestPermissionRequest:
    return v1.RequestPermissionRequest(
        session_id="s",
        tool_call=v1.ToolCallUpdate(tool_call_id="t", **tool),
        options=[
            v1.PermissionOption(option_id=o, name=n, kind=cast("Any", k)) for o, n, k in options
        ],
    )


def write(path: str) -> Operation:
    return Operation(
        kind="write", session_id="s", title=f"Write {path}", path=path, roots=("/elsewhere",)
    )


def read(path: str) -> Operation:
    return msgspec.structs.replace(write(path), kind="read", title=f"Read {path}")


def execute(line: str) -> Operation:
    return Operation(
        kind="execute", session_id="s", title=line, command=line.split(), cwd=ROOT, roots=(ROOT,)
    )


@pytest.mark.covers("R1-104")
@pytest.mark.parametrize(
    ("policy", "options", "chosen"),
    [
        ("allow", [REJECT, ALWAYS, ALLOW], "ok"),
        ("allow", [REJECT, ALWAYS], "always"),
        ("allow", [REJECT], None),
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
    policy: Word, options: list[tuple[str, str, str]], chosen: str | None
) -> None:
    decides = Decides(policy)

    assert await decides.chosen(*options) == chosen
    assert decides.requests == 1


@pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False), ("ask", False)])
async def test_writes_and_commands_follow_the_same_policy(policy: Word, allowed: bool) -> None:
    decides = Decides(policy)

    assert await decides.guard(write("/project/a")) is allowed
    assert await decides.guard(execute("ls")) is allowed
    assert decides.requests == 0


async def test_person_chooses_among_the_agents_own_options() -> None:
    person = Person("always")

    chosen = await Decides("ask", person).chosen(ALLOW, ALWAYS, REJECT)

    assert chosen == "always"
    assert [key for key, _, _ in person.questions[0].options] == ["ok", "always", "no"]


async def test_no_answer_is_a_no_in_the_agents_words() -> None:
    assert await Decides("ask", Person(None)).chosen(ALLOW, REJECT) == "no"
    assert await Decides("ask", Person(None)).chosen(ALLOW) is None


async def test_nothing_to_choose_from_is_no_question() -> None:
    person = Person()

    assert await Decides("ask", person).chosen() is None
    assert not person.questions


async def test_options_that_are_neither_yes_nor_no_are_not_offered() -> None:
    person = Person("no")

    assert await Decides("ask", person).chosen(NEW, ALLOW, REJECT) == "no"
    assert [key for key, _, _ in person.questions[0].options] == ["ok", "no"]
    assert await Decides("ask", Person()).chosen(NEW) is None


@pytest.mark.parametrize("swapped", [False, True])
async def test_options_with_one_id_are_refused_unasked_and_grant_nothing(swapped: bool) -> None:
    person = Person("no")
    decides = Decides("ask", person)
    options = [("same", "Yes", "allow_once"), ("same", "No", "reject_once")]
    diff = v1.Diff(path="/project/a", old_text="a", new_text="b")

    await decides.chosen(*(options[::-1] if swapped else options), kind="edit", content=[diff])

    assert decides.decisions[0].outcome == "deny"
    assert not person.questions
    assert not await decides.guard(write("/project/a"))
    assert len(person.questions) == 1


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "permission: Go -> cancelled (the agent offers no option)\n"),
        (
            [("one", "Yes", "allow_once"), ("one", "No", "reject_once")],
            "permission: Go -> cancelled (two options of the agent have one id)\n",
        ),
    ],
)
async def test_a_person_is_told_what_was_not_asked_and_why(
    options: list[tuple[str, str, str]], shown: str
) -> None:
    decides = Decides("ask", Person())
    await decides.chosen(*options, title="Go")
    assert decides.shown.getvalue() == shown


async def test_person_may_allow_one_kind_of_work_for_the_whole_run() -> None:
    person = Person("more", "no")
    decides = Decides("ask", person)

    assert await decides.guard(write("/project/a"))
    assert await decides.guard(write("/project/b"))
    assert not await decides.guard(execute("ls"))
    assert len(person.questions) == 2


async def test_a_yes_to_all_also_answers_what_waited_for_its_turn() -> None:
    person = Person("more")
    decides = Decides("ask", person)

    answers = await asyncio.gather(*(decides.guard(write(f"/project/{n}")) for n in range(3)))

    assert answers == [True, True, True]
    assert len(person.questions) == 1


async def test_a_yes_to_all_is_no_answer_to_what_a_rule_asks_or_denies() -> None:
    person = Person("more", "no")
    rules = [Rule("deny", path="**/*.key"), Rule("ask", path="**/.env")]
    decides = Decides(Permissions(rules), person)

    assert await decides.guard(write("/project/a"))
    assert not await decides.guard(write("/project/.env"))
    assert not await decides.guard(write("/project/a.key"))
    assert len(person.questions) == 2


async def test_what_a_rule_asks_about_may_be_allowed_for_exactly_this() -> None:
    person = Person("more", "no")
    decides = Decides(Permissions([Rule("ask", path="**/.env")]), person)

    assert await decides.guard(write("/project/.env"))
    assert await decides.guard(write("/project/.env"))
    assert not await decides.guard(write("/project/b/.env"))
    assert person.questions[0].headline == (
        "The agent wants to write: Write /project/.env (rule 1 matches)"
    )
    assert [label for _, label, _ in person.questions[0].options] == [
        "Allow this write",
        "Allow exactly this, now and again",
        "Refuse",
    ]


async def test_a_yes_covers_the_shown_change_once() -> None:
    diff = v1.Diff(path="/project/file", old_text="a", new_text="b")
    decides = Decides("ask", Person("ok", "no", "no"))
    await decides.chosen(ALLOW, REJECT, kind="edit", content=[diff])

    assert not await decides.guard(write("/project/other"))
    assert await decides.guard(write("/project/file"))
    assert not await decides.guard(write("/project/file"))


async def test_a_yes_covers_the_shown_command_once() -> None:
    decides = Decides("ask", Person("ok", "no", "no"))
    await decides.chosen(ALLOW, REJECT, kind="execute", raw_input={"command": "ls -l"})

    assert not await decides.guard(execute("rm -r"))
    assert await decides.guard(execute("ls -l"))
    assert not await decides.guard(execute("ls -l"))


async def test_a_no_covers_nothing() -> None:
    person = Person("no", "no")
    decides = Decides("ask", person)
    diff = v1.Diff(path="/project/a", old_text="a", new_text="b")
    await decides.chosen(ALLOW, REJECT, kind="edit", content=[diff])

    assert not await decides.guard(write("/project/a"))
    assert len(person.questions) == 2


@pytest.mark.parametrize(("path", "chosen"), [("/project/ok/a", "ok"), ("/project/a", "no")])
async def test_a_request_is_judged_by_all_that_was_said_of_its_tool_call(
    path: str, chosen: str
) -> None:
    decides = Decides(Permissions([Rule("allow", path="ok/**")], default="deny"))
    said = v1.ToolCallUpdate(
        tool_call_id="t", content=[v1.Diff(path=path, old_text="a", new_text="b")]
    )
    decides._view.fold("s", said)  # pyright: ignore[reportPrivateUsage]

    assert await decides.chosen(ALLOW, REJECT) == chosen


async def test_relative_globs_begin_in_what_is_lent_whatever_the_agent_takes() -> None:
    decides = Decides(Permissions([Rule("deny", path="secret/**")], default="allow"))

    assert not await decides.guard(write("/project/secret/a"))
    assert await decides.guard(write("/elsewhere/secret/a"))


async def test_questions_are_asked_one_at_a_time() -> None:
    person = Person("once", "no")
    decides = Decides("ask", person)

    answers = await asyncio.gather(
        decides.guard(write("/project/a")), decides.guard(write("/project/b"))
    )

    assert list(answers) == [True, False]
    assert decides.pending == 0


async def test_a_cancelled_question_leaves_room_for_the_next() -> None:
    person = Person("once", "once")
    decides = Decides("ask", person)
    first = asyncio.create_task(decides.guard(write("/project/a")))
    await person.asked.wait()
    first.cancel()
    await asyncio.wait([first])

    assert await decides.guard(write("/project/b"))
    assert decides.pending == 0
    assert [decision.by for decision in decides.decisions] == ["cancelled", "asked"]


async def test_a_person_is_told_of_a_doubt_and_of_the_time_there_is() -> None:
    person = Person("no")
    decides = Decides(Permissions([Rule("deny", title="x")], default="allow", deadline=60), person)
    path = [v1.ToolCallLocation(path="/project/../etc/passwd")]

    await decides.chosen(ALLOW, REJECT, title="Read", locations=path)

    assert "with '..'" in person.questions[0].headline
    assert "60 s to answer" in person.questions[0].headline


async def test_a_person_is_told_of_the_time_also_where_no_rule_asks() -> None:
    person = Person("no", "no")
    decides = Decides(Permissions(deadline=7.5), person)

    await decides.chosen(ALLOW, REJECT, title="Dance", kind="other")
    assert not await decides.guard(write("/project/a"))

    assert [question.headline for question in person.questions] == [
        "The agent asks: Dance (7.5 s to answer)",
        "The agent wants to write: Write /project/a (7.5 s to answer)",
    ]


@pytest.mark.parametrize(
    ("permissions", "answers", "shown"),
    [
        (Permissions(), ["ok"], "permission: Go -> Allow\n"),
        (Permissions(), None, "Go -> Reject (no rule matches: default = 'ask', and there is n"),
        (Permissions([Rule("deny", name="never")]), None, "Go -> Reject (rule 1 ('never') matches"),
        (Permissions(default="deny"), None, "Go -> Reject (no rule matches: default = 'deny')"),
        (Permissions(), ["nonsense"], "permission: Go -> Reject (asking failed)"),
    ],
)
async def test_a_decision_is_shown_with_what_made_it(
    permissions: Permissions, answers: list[str] | None, shown: str
) -> None:
    decides = Decides(permissions, None if answers is None else Person(*answers))

    await decides.chosen(ALLOW, REJECT, title="Go")

    assert shown in decides.shown.getvalue()
    assert len(decides.decisions) == 1


async def test_a_late_answer_is_shown_as_none() -> None:
    class Nobody(Person):
        async def choose(self, question: Question) -> str | None:
            await asyncio.Event().wait()
            return await super().choose(question)

    decides = Decides(Permissions(deadline=0.01), Nobody())
    shown = asyncio.Event()
    resume = decides._view.display.resume  # pyright: ignore[reportPrivateUsage]

    def resumed() -> None:
        # While the question is on the screen, nothing else may be written there.
        assert "->" not in decides.shown.getvalue()
        resume()
        asyncio.get_running_loop().call_soon(shown.set)

    decides._view.display.resume = resumed  # type: ignore[method-assign] # pyright: ignore[reportPrivateUsage]

    assert await decides.chosen(ALLOW, REJECT, title="Go") == "no"
    async with asyncio.timeout(10):
        await shown.wait()
    assert "Go -> Reject (no answer in time)" in decides.shown.getvalue()


async def test_nothing_is_shown_while_a_question_is_on_the_screen() -> None:
    here, answer = asyncio.Event(), asyncio.Event()

    class Thinks(Person):
        async def choose(self, question: Question) -> str | None:
            here.set()
            await answer.wait()
            return await super().choose(question)

    rules = [Rule("deny", path="**/.env"), Rule("ask", path="**/slow", deadline=0.01)]
    decides = Decides(Permissions(rules), Thinks("once"))
    first = asyncio.create_task(decides.guard(write("/project/a")))
    await here.wait()
    before = decides.shown.getvalue()

    assert not await decides.guard(write("/project/.env"))
    assert not await decides.guard(write("/project/slow"))
    assert decides.shown.getvalue() == before
    answer.set()
    assert await first
    assert decides.shown.getvalue().removeprefix(before).splitlines() == [
        "write: Write /project/.env -> Refuse (rule 1 matches)",
        "write: Write /project/slow -> Refuse (no answer in time)",
        "write: Write /project/a -> Allow this write",
    ]


async def test_what_an_agent_says_cannot_pass_for_lines_of_ours_or_turn_around() -> None:
    person = Person("ok", "once")
    decides = Decides("ask", person)

    title = "Read\nThe agent asks: nothing\u2028x \u202ehsilop\x1b[A"
    await decides.chosen(("ok", "Yes\n  2. No", "allow_once"), title=title)
    await decides.guard(msgspec.structs.replace(execute("ls"), title="ls\r\nrm"))

    assert person.questions[0].headline == (
        "The agent asks: Read⏎The agent asks: nothing⏎x \ufffdhsilop\ufffd[A"
    )
    assert person.questions[0].options[0][1] == "Yes⏎  2. No [allows it]"
    assert person.questions[1].headline == "The agent wants to run: ls⏎rm"
    assert len(decides.shown.getvalue().splitlines()) == 4


async def test_whatever_it_is_called_a_person_sees_what_an_option_does_and_a_yes_covers() -> None:
    person = Person("a")
    decides = Decides("ask", person)
    options = (
        ("a", "No, never", "allow_once"),
        ("b", "Allow once", "allow_always"),
        ("c", "Yes", "reject_once"),
        ("d", "\u0410llow", "allow_once"),  # not a Latin letter
        ("e", "ALLOW ONCE", "allow_once"),
        ("f", "Never", "reject_always"),
        ("g", "Never", "allow_always"),
    )
    raw = {"command": "ls", "cwd": "/project/evil", "env": {"PATH": "."}}
    places = [v1.ToolCallLocation(path="/project/.bashrc"), v1.ToolCallLocation(path="/project/b")]
    await decides.chosen(
        *options, title="Format /project/b", kind="edit", raw_input=raw, locations=places
    )
    asked = person.questions[0]
    assert [name for _, name, _ in asked.options] == [
        "No, never [allows it]",
        "Allow once [allows it from now on]",
        "Yes [refuses it]",
        "\u0410llow [allows it]",
        "ALLOW ONCE",
        "Never",
        "Never [allows it from now on]",
    ]
    assert asked.headline == (
        "The agent asks: Format /project/b"
        " (about /project/.bashrc; in /project/evil; with PATH='.')"
    )


@pytest.mark.parametrize(
    "tool",
    [
        {"kind": "edit", "content": [v1.Diff(path="/project/b", new_text="")]},
        {"kind": "execute", "raw_input": {"command": "ls"}},
        {"kind": "think"},
    ],
)
async def test_a_person_is_told_nothing_twice(tool: dict[str, Any]) -> None:
    person = Person("a")
    await Decides("ask", person).chosen(("a", "Yes", "allow_once"), title="Work", **tool)
    assert person.questions[0].headline == "The agent asks: Work"


async def test_a_person_sees_where_a_command_runs_and_what_it_adds() -> None:
    person = Person("no", "no")
    decides = Decides(Permissions([Rule("ask", command="make")]), person)
    odd = {"cwd": "/tmp", "env": {"PATH": "/tmp", "LD_PRELOAD": "x\ny"}}

    await decides.guard(msgspec.structs.replace(execute("ls"), **odd))
    await decides.guard(msgspec.structs.replace(execute("make"), **odd))

    seen = "in /tmp; with LD_PRELOAD='x\\ny', PATH='/tmp'"
    assert person.questions[0].headline == f"The agent wants to run: ls ({seen})"
    assert person.questions[1].headline.startswith(f"The agent wants to run: make ({seen}; rule 1")


async def test_what_is_allowed_anyway_is_not_shown_and_what_is_refused_is() -> None:
    allow = Rule("allow", path="ok/**")
    decides = Decides(Permissions([allow], default="deny", reads="deny"))

    await decides.guard(write("/project/ok/a"))
    await decides.guard(write("/project/b"))
    await decides.guard(read("/project/c"))

    assert decides.guards_reads
    assert decides.shown.getvalue() == (
        "write: Write /project/b -> Refuse (no rule matches: default = 'deny')\n"
        "read: Read /project/c -> Refuse (no rule matches: reads = 'deny')\n"
    )
