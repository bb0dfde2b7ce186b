"""One decision for each request: who is asked, what the agent is told, what is remembered, what is logged."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon import Client
from antiphon.schema import v1
from antiphon.services import (
    Answer,
    Call,
    Decision,
    Files,
    Operation,
    Permissions,
    PolicyError,
    Request,
    Rule,
    Terminals,
)
from antiphon.services import _permissions as module
from antiphon.testing import raw_agent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from antiphon import Session
    from antiphon.testing import RawPeer

CANCELLED = {"outcome": "cancelled"}
USUAL = (
    ("once", "allow_once"),
    ("always", "allow_always"),
    ("no", "reject_once"),
    ("never", "reject_always"),
)


def selected(option_id: str) -> dict[str, Any]:
    return {"outcome": "selected", "optionId": option_id}


def asking(*options: tuple[str, str], session_id: str = "s1", **tool: Any) -> dict[str, Any]:
    return {
        "sessionId": session_id,
        "toolCall": {"toolCallId": "t1", **tool},
        "options": [{"optionId": id_, "name": id_, "kind": kind} for id_, kind in options or USUAL],
    }


@dataclass
class Ctx:
    """What is used of a handler's context."""

    session_id: str
    roots: tuple[str, ...]


class Log:
    """What was decided."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def __call__(self, decision: Decision) -> None:
        self.decisions.append(decision)

    @property
    def short(self) -> list[tuple[str, str]]:
        return [(decision.outcome, decision.by) for decision in self.decisions]


class Person:
    """Is asked, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.cancelled = 0
        self.deaf = False
        self._came = asyncio.Event()
        self._answers: list[asyncio.Future[Any]] = []

    async def __call__(self, request: Request) -> Any:
        self.asked.append(request)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._came.set()
        while True:
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                self.cancelled += 1
                if not self.deaf:
                    raise

    async def wait(self, count: int = 1) -> None:
        while len(self.asked) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), 5)

    def answer(self, value: Any, number: int = 0) -> None:
        self._answers[number].set_result(value)


@asynccontextmanager
async def opened(
    client: Client, root: Path | str = "/w", **options: Any
) -> AsyncGenerator[tuple[Session, RawPeer]]:
    """A session "s1" in that directory, at a raw agent."""
    async with raw_agent(client, {"sessionCapabilities": {"close": {}}}, **options) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd=root))
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        yield await opening, raw


async def told(permissions: Permissions, *options: tuple[str, str], **tool: Any) -> Any:
    """What an agent is answered."""
    async with opened(Client(permissions=permissions)) as (_, raw):
        return (await raw.ask("session/request_permission", asking(*options, **tool)))["result"][
            "outcome"
        ]


def write(
    path: str = "/w/a", session_id: str = "s1", roots: tuple[str, ...] = ("/w",)
) -> Operation:
    return Operation(
        kind="write", session_id=session_id, title=f"Write {path}", path=path, roots=roots
    )


def run(*words: str, cwd: str = "/w", env: dict[str, str] | None = None) -> Operation:
    return Operation(
        kind="execute",
        session_id="s1",
        title=" ".join(words),
        command=list(words),
        cwd=cwd,
        env=env or {},
        roots=("/w",),
    )


# ------------------------------------------------------------------ what the agent is told


@pytest.mark.covers("R1-104", "R1-105", "FF-27")
@pytest.mark.parametrize("denying", ["rule", "default", "nobody", "asked", "error"])
@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        (USUAL, selected("no")),
        (USUAL[::-1], selected("no")),
        ((USUAL[0], USUAL[3]), selected("never")),
        # Only allowing options: never the first that is offered.
        (USUAL[:1], CANCELLED),
        (USUAL[:2], CANCELLED),
        ((("a", "reject_once"), ("b", "reject_once")), selected("a")),
        ((("a", "reject_forever"),), CANCELLED),
        ((("a", "reject_forever"), ("b", "allow_once")), CANCELLED),
        # An id that would be read as a yes as well says nothing.
        ((("x", "allow_once"), ("x", "reject_once")), CANCELLED),
        ((("x", "reject_once"), ("x", "allow_once"), ("y", "reject_always")), selected("y")),
    ],
)
async def test_a_no_is_told_by_an_option_that_rejects_or_by_none(
    denying: str, options: Any, outcome: Any
) -> None:
    def broken(request: Request) -> bool:
        raise RuntimeError("dialog trouble")

    makers: dict[str, Callable[[], Permissions]] = {
        "rule": lambda: Permissions([Rule("deny")]),
        "default": lambda: Permissions(default="deny"),
        "nobody": Permissions,
        "asked": lambda: Permissions(ask=lambda request: False),
        "error": lambda: Permissions(ask=broken),
    }
    permissions = makers[denying]()
    log = permissions.on_decision = Log()
    assert await told(permissions, *options) == outcome
    assert log.short == [("deny", denying)]
    assert log.decisions[0].option_id == outcome.get("optionId")


@pytest.mark.covers("FF-27")
async def test_no_options_at_all_are_answered_as_cancelled() -> None:
    for permissions in (Permissions(default="allow"), Permissions(default="deny")):
        async with opened(Client(permissions=permissions)) as (_, raw):
            params: dict[str, Any] = {**asking(), "options": []}
            answer = await raw.ask("session/request_permission", params)
            assert answer["result"]["outcome"] == CANCELLED


@pytest.mark.covers("R1-104", "FF-27")
@pytest.mark.parametrize(
    ("options", "outcome", "logged"),
    [
        (USUAL, selected("once"), "allow"),
        (USUAL[::-1], selected("once"), "allow"),
        (USUAL[1:], selected("always"), "allow"),
        (USUAL[2:], CANCELLED, "cancelled"),
        ((("x", "allow_once"), ("x", "reject_once")), CANCELLED, "cancelled"),
    ],
)
async def test_a_yes_is_told_by_an_option_that_allows_or_is_none(
    options: Any, outcome: Any, logged: str
) -> None:
    log = Log()
    permissions = Permissions([Rule("allow", name="all")], on_decision=log)
    assert await told(permissions, *options) == outcome
    assert [(d.outcome, d.by, d.rule) for d in log.decisions] == [(logged, "rule", "all")]


@pytest.mark.parametrize(
    ("answer", "outcome", "by"),
    [
        (True, selected("once"), "asked"),
        (False, selected("no"), "asked"),
        (None, CANCELLED, "asked"),
        ("always", selected("always"), "asked"),
        ("never", selected("never"), "asked"),
        (Answer(allow=True), selected("once"), "asked"),
        (Answer(allow=True, option_id="always"), selected("always"), "asked"),
        (Answer(allow=True, remember="always"), selected("once"), "asked"),
        (Answer(allow=False, remember="session"), selected("no"), "asked"),
        # What means nothing, or two things, is a no.
        ("made up", selected("no"), "error"),
        ("", selected("no"), "error"),
        (1, selected("no"), "error"),
        (0, selected("no"), "error"),
        (["once"], selected("no"), "error"),
        (Answer(allow=True, option_id="no"), selected("no"), "error"),
        (Answer(allow=False, option_id="once"), selected("no"), "error"),
        (Answer(allow=True, option_id="made up"), selected("no"), "error"),
        (Answer(allow=cast("Any", 1)), selected("no"), "error"),
        (Answer(allow=cast("Any", "no")), selected("no"), "error"),
        (Answer(allow=True, remember=cast("Any", "ever")), selected("no"), "error"),
        (
            v1.PermissionOption(option_id="once", name="", kind="allow_once"),
            selected("no"),
            "error",
        ),
    ],
)
async def test_what_a_person_answers_is_told_and_what_means_nothing_is_a_no(
    answer: Any, outcome: Any, by: str
) -> None:
    async def later(request: Request) -> Any:
        await asyncio.sleep(0)
        return answer

    def now(request: Request) -> Any:
        return answer

    for ask in (later, now):
        log = Log()
        assert await told(Permissions(ask=ask, on_decision=log), *USUAL) == outcome
        assert [decision.by for decision in log.decisions] == [by]


async def test_a_question_says_what_is_asked_and_why() -> None:
    person = Person()
    rules = [Rule("ask", name="edits", kind="edit", deadline=50)]
    permissions = Permissions(rules, ask=person, deadline=5)
    async with opened(Client(permissions=permissions)) as (_, raw):
        tool: dict[str, Any] = {"kind": "edit", "title": "Edit a", "locations": [{"path": "/w/a"}]}
        raw.send(raw.request(1, "session/request_permission", asking(**tool)))
        await person.wait()
        request = person.asked[0]
        assert (request.call.kind, request.call.paths, request.call.roots) == (
            "edit",
            ("/w/a",),
            ("/w",),
        )
        assert [option.option_id for option in request.options] == [id_ for id_, _ in USUAL]
        assert (request.verdict.rule, request.deadline) == (rules[0], 50)
        assert request.params is not None
        assert request.operation is None
        person.answer(True)
        assert (await raw.answer_to(1))["result"]["outcome"] == selected("once")
    asked: list[Request] = []
    permissions = Permissions(ask=asked.append)
    assert not await permissions.guard(write())
    assert asked[0].operation == write()
    assert [option.kind for option in asked[0].options] == [kind for _, kind in USUAL]


async def test_an_ask_that_is_cancelled_by_its_own_dialog_is_a_no(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(request: Request) -> bool:
        dialog: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        dialog.cancel()
        return await dialog

    log = Log()
    assert await told(Permissions(ask=ask, on_decision=log), *USUAL) == selected("no")
    assert log.short == [("deny", "error")]
    assert "asking failed" in caplog.text


# ------------------------------------------------------------------ exactly one answer


def answers_of(raw: RawPeer, id_: Any) -> list[Any]:
    return [frame["result"]["outcome"] for frame in raw.responses(id_)]


@pytest.mark.covers("R1-92", "FF-26")
@pytest.mark.parametrize("deaf", [False, True])
async def test_a_turn_that_is_cancelled_ends_its_question_and_a_late_yes_is_nothing(
    deaf: bool, caplog: pytest.LogCaptureFixture
) -> None:
    person, log = Person(), Log()
    person.deaf = deaf
    permissions = Permissions(ask=person, on_decision=log)
    with caplog.at_level(logging.INFO, "antiphon.services"):
        async with opened(Client(permissions=permissions)) as (session, raw):
            turn = asyncio.ensure_future(_outcome(session))
            prompt = await raw.wait("session/prompt")
            tool: dict[str, Any] = {"kind": "edit", "locations": [{"path": "/w/a"}]}
            raw.send(raw.request("q", "session/request_permission", asking(**tool)))
            await person.wait()
            await session.cancel()
            await raw.wait("session/cancel")
            await raw.answer_to("q")
            while not person.cancelled:
                await raw.round_trip()
            if deaf:
                person.answer(Answer(allow=True, remember="session"))
            await raw.round_trip()
            raw.answer(prompt, {"stopReason": "cancelled"})
            await turn
            assert answers_of(raw, "q") == [CANCELLED]
            # Neither a grant nor a memory came of it.
            assert permissions.remembered == ()
            permissions.ask = None
            assert not await permissions.guard(write())
    assert log.short == [("cancelled", "cancelled"), ("deny", "nobody")]
    assert ("it is ignored" in caplog.text) == deaf


async def _outcome(session: Session) -> Any:
    return await session.prompt("go")


@pytest.mark.covers("FF-26")
async def test_a_request_that_is_withdrawn_is_answered_once() -> None:
    person, log = Person(), Log()
    async with opened(Client(permissions=Permissions(ask=person, on_decision=log))) as (_, raw):
        raw.send(raw.request("q", "session/request_permission", asking()))
        await person.wait()
        raw.send(raw.notification("$/cancel_request", {"requestId": "q"}))
        await raw.answer_to("q")
        await raw.round_trip()
        assert answers_of(raw, "q") == [CANCELLED]
        assert person.cancelled == 1
    assert log.short == [("cancelled", "cancelled")]


async def test_a_session_that_closes_takes_its_questions_along_and_no_other_s() -> None:
    person, log = Person(), Log()
    permissions = Permissions(ask=person, on_decision=log)
    async with opened(Client(permissions=permissions)) as (session, raw):
        raw.send(raw.request("other", "session/request_permission", asking(session_id="s2")))
        await person.wait()
        raw.send(raw.request("q", "session/request_permission", asking()))
        await person.wait(2)
        writing = asyncio.ensure_future(permissions.guard(write()))
        await person.wait(3)
        closing = asyncio.ensure_future(session.close())
        raw.answer(await raw.wait("session/close"), {})
        await closing
        assert (await raw.answer_to("q"))["result"]["outcome"] == CANCELLED
        assert not await writing
        assert not raw.responses("other")
        person.answer(True)
        assert (await raw.answer_to("other"))["result"]["outcome"] == selected("once")
        assert answers_of(raw, "q") == [CANCELLED]
    assert sorted(log.short) == [
        ("allow", "asked"),
        ("cancelled", "cancelled"),
        ("cancelled", "cancelled"),
    ]


async def test_a_connection_that_is_lost_ends_its_questions() -> None:
    person, log = Person(), Log()
    async with opened(Client(permissions=Permissions(ask=person, on_decision=log))) as (_, raw):
        raw.send(raw.request("q", "session/request_permission", asking()))
        await person.wait()
    assert person.cancelled == 1
    assert log.short == [("cancelled", "cancelled")]


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_deadline_denies_and_what_comes_later_is_nothing(
    deaf: bool, caplog: pytest.LogCaptureFixture
) -> None:
    person, log = Person(), Log()
    person.deaf = deaf
    permissions = Permissions(ask=person, deadline=0.02, on_decision=log)
    with caplog.at_level(logging.INFO, "antiphon.services"):
        async with opened(Client(permissions=permissions)) as (_, raw):
            answer = await raw.ask("session/request_permission", asking(), "q")
            assert answer["result"]["outcome"] == selected("no")
            await raw.round_trip()
            assert person.cancelled == 1
            if deaf:
                person.answer(True)
            await raw.round_trip()
            assert len(raw.responses("q")) == 1
    assert log.short == [("deny", "deadline")]
    assert 0.01 < log.decisions[0].waited < 5
    assert ("it is ignored" in caplog.text) == deaf


async def test_what_fails_after_its_deadline_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(request: Request) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("closing trouble")

    assert not await Permissions(ask=ask, deadline=0.01).guard(write())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "closing trouble" in caplog.text


async def test_a_rule_s_deadline_counts_instead_of_the_policy_s() -> None:
    rules = [Rule("ask", kind="edit", deadline=0.01)]
    log = Log()
    permissions = Permissions(rules, ask=Person(), deadline=1000, on_decision=log)
    assert not await permissions.guard(write())
    assert log.short == [("deny", "deadline")]


async def test_several_questions_may_be_open_at_once() -> None:
    person = Person()
    async with opened(Client(permissions=Permissions(ask=person))) as (_, raw):
        for id_ in ("a", "b"):
            raw.send(raw.request(id_, "session/request_permission", asking(title=id_)))
        await person.wait(2)
        person.answer(False, 1)
        assert (await raw.answer_to("b"))["result"]["outcome"] == selected("no")
        person.answer(True, 0)
        assert (await raw.answer_to("a"))["result"]["outcome"] == selected("once")


async def test_what_waits_for_an_answer_that_cannot_come_any_more_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cancelling the guard's caller cancels the question."""
    person, log = Person(), Log()
    writing = asyncio.ensure_future(Permissions(ask=person, on_decision=log).guard(write()))
    await person.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await asyncio.sleep(0)
    assert person.cancelled == 1
    assert log.short == [("cancelled", "cancelled")]
    assert not caplog.records


# ------------------------------------------------------------------ what is remembered


async def answered(permissions: Permissions, *operations: Operation) -> list[bool]:
    return [await permissions.guard(operation) for operation in operations]


async def test_an_answer_is_remembered_for_exactly_what_it_was_about() -> None:
    asked: list[str] = []

    def ask(request: Request) -> Answer | bool:
        asked.append(request.call.title)
        return len(asked) == 1 and Answer(allow=True, remember="session")

    permissions = Permissions(ask=ask)
    assert await answered(permissions, write(), write(), write("/w/b")) == [True, True, False]
    assert asked == ["Write /w/a", "Write /w/b"]
    other = Permissions(ask=ask)
    asked.clear()
    assert await answered(
        other,
        run("make"),
        run("make"),
        run("make", "x"),
        run("make", cwd="/w/d"),
        run("make", env={"PATH": "/tmp"}),
        run("/bin/sh", "-c", "make; x"),
    ) == [True, True, False, False, False, False]
    assert len(asked) == 5


@pytest.mark.parametrize(("option", "outcome"), [("allow_always", True), ("reject_always", False)])
async def test_an_always_option_is_remembered_for_the_session(option: str, outcome: bool) -> None:
    asked: list[Request] = []

    def ask(request: Request) -> str:
        asked.append(request)
        return option

    log = Log()
    permissions = Permissions(ask=ask, on_decision=log)
    assert await answered(permissions, write(), write()) == [outcome, outcome]
    assert len(asked) == 1
    assert [decision.by for decision in log.decisions] == ["asked", "remembered"]
    assert await permissions.guard(write(session_id="s2")) is outcome
    assert len(asked) == 2
    await permissions.release_session("s1")
    await answered(permissions, write(), write(session_id="s2"))
    assert len(asked) == 3


async def test_what_is_remembered_for_ever_outlives_the_session_until_it_is_forgotten() -> None:
    asked: list[Request] = []

    def ask(request: Request) -> Answer:
        asked.append(request)
        return Answer(allow=True, remember="always")

    permissions = Permissions(ask=ask)
    assert await permissions.guard(write())
    await permissions.release_session("s1")
    permissions.forget("s1")
    assert await permissions.guard(write(session_id="s2"))
    assert len(asked) == 1
    permissions.forget()
    assert permissions.remembered == ()
    assert await permissions.guard(write())
    assert len(asked) == 2


async def test_no_answer_that_is_remembered_outranks_a_rule() -> None:
    permissions = Permissions(ask=lambda request: Answer(allow=True, remember="always"))
    assert await permissions.guard(write())
    strict = Permissions([Rule("deny", path="**/a")], ask=permissions.ask)
    strict._remembered = permissions._remembered
    assert not await strict.guard(write())
    lenient = Permissions([Rule("allow", path="**/a")])
    lenient._remember(Call.of_operation(write(), ("/w",)), "deny", "always")
    assert await lenient.guard(write())


async def test_what_is_remembered_is_shown_as_rules_that_say_the_same() -> None:
    permissions = Permissions(ask=lambda request: Answer(allow=True, remember="session"))
    await permissions.guard(write("/w/*[a]"))
    await permissions.guard(run("make", "*", env={"A": "1"}))
    async with opened(Client(permissions=permissions)) as (_, raw):
        await raw.ask("session/request_permission", asking(title="Think {a,b}", kind="think"))
        shown = permissions.remembered
        judge = Permissions(shown).judge
        assert len(shown) == 3
        assert {rule.name for rule in shown} == {"remembered"}
        of = Call.of_operation(write("/w/*[a]"), ("/w",))
        assert judge(of).decision == "allow"
        assert judge(Call.of_operation(write("/w/xa"), ("/w",))).decision == "ask"
        assert (
            judge(Call.of_operation(run("make", "*", env={"A": "1"}), ("/w",))).decision == "allow"
        )
        assert judge(Call.of_operation(run("make", "x"), ("/w",))).decision == "ask"
        title = Call(kind="think", title="Think {a,b}", session_id="s1")
        assert judge(title).decision == "allow"
        assert judge(Call(kind="think", title="Think a", session_id="s1")).decision == "ask"


async def test_what_is_remembered_of_odd_words_is_shown_as_a_rule_too() -> None:
    permissions = Permissions(ask=lambda request: Answer(allow=True, remember="always"))
    tool = run("my tool", "x")
    await permissions.guard(tool)
    async with opened(Client(permissions=permissions)) as (_, raw):
        await raw.ask("session/request_permission", asking(title="Dance", kind="dance"))
    judge = Permissions(permissions.remembered).judge
    assert judge(Call.of_operation(tool, ("/w",))).decision == "allow"
    assert judge(Call.of_operation(run("mytool", "x"), ("/w",))).decision == "ask"
    assert judge(Call(kind="dance", title="Dance")).decision == "allow"
    assert judge(Call(kind="dancer", title="Dance")).decision == "ask"


@pytest.mark.parametrize("name", ["ask", "on_decision", "describe"])
def test_what_is_no_function_is_refused_when_it_is_given(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is a function, not 5"):
        Permissions(**{name: 5})  # type: ignore[arg-type]


async def test_memory_is_bounded_and_the_oldest_answers_are_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    permissions = Permissions(ask=lambda request: Answer(allow=True, remember="session"))
    await answered(permissions, *(write(f"/w/{n}") for n in range(5)))
    assert len(permissions.remembered) == 3
    permissions.ask = None
    assert await answered(permissions, write("/w/1"), write("/w/2")) == [False, True]


async def test_what_is_in_doubt_is_never_remembered() -> None:
    asked: list[Request] = []

    def ask(request: Request) -> str:
        asked.append(request)
        return "always"

    async with opened(Client(permissions=Permissions(ask=ask))) as (_, raw):
        for _ in range(2):
            params = asking(kind="edit", locations=[{"path": "/w/../etc/passwd"}])
            await raw.ask("session/request_permission", params)
    assert len(asked) == 2


# ------------------------------------------------------------------ what a request grants


async def grant(permissions: Permissions, root: str = "/w", **tool: Any) -> Any:
    """Make one permission request and leave the session open, as far as the policy knows."""
    params = asking(**tool)
    ctx = Ctx("s1", (root,))
    from antiphon.schema import decode, encode_checked, v1_unstable

    request = decode(v1_unstable.RequestPermissionRequest, encode_checked(params))
    return (await permissions(request, ctx)).outcome


def once(person: list[Request]) -> Callable[[Request], bool]:
    """Says yes to the first question and no to all others."""

    def ask(request: Request) -> bool:
        person.append(request)
        return len(person) == 1

    return ask


DIFF = {"type": "diff", "path": "/w/a", "newText": "x"}


@pytest.mark.parametrize(
    ("tool", "operations", "expected"),
    [
        # Exactly what it names, once.
        ({"kind": "edit", "content": [DIFF]}, [write(), write()], [True, False]),
        (
            {"kind": "edit", "locations": [{"path": "/w/a"}]},
            [write("/w/b"), write()],
            [False, True],
        ),
        ({"kind": "edit", "rawInput": {"path": "a"}}, [write()], [True]),
        ({"kind": "edit", "content": [DIFF]}, [write(session_id="s2")], [False]),
        ({"kind": "edit", "content": [DIFF]}, [write(roots=())], [False]),
        # Where a change is shown, a mere location is not.
        (
            {"kind": "edit", "content": [DIFF], "locations": [{"path": "/w/b"}]},
            [write("/w/b"), write()],
            [False, True],
        ),
        # Only kinds that are a write grant one.
        ({"kind": "read", "locations": [{"path": "/w/a"}]}, [write()], [False]),
        ({"kind": "delete", "locations": [{"path": "/w/a"}]}, [write()], [False]),
        ({"locations": [{"path": "/w/a"}]}, [write()], [False]),
        ({"content": [DIFF]}, [write()], [True]),
        ({"kind": "edit", "title": "/w/a"}, [write()], [False]),
        # Commands: the words, the directory and the variables.
        ({"rawInput": {"command": "make x"}}, [run("make", "x"), run("make", "x")], [True, False]),
        ({"rawInput": {"command": "make x"}}, [run("/bin/sh", "-c", "make x")], [True]),
        ({"rawInput": {"command": "make"}}, [run("make", "x")], [False]),
        ({"rawInput": {"command": "make"}}, [run("make", cwd="/w/d")], [False]),
        ({"rawInput": {"command": "make", "cwd": "d"}}, [run("make", cwd="/w/d")], [True]),
        ({"rawInput": {"command": "make"}}, [run("make", env={"PATH": "."})], [False]),
        ({"rawInput": {"command": "make; x"}}, [run("/bin/sh", "-c", "make; x")], [True]),
        ({"rawInput": {"command": "make; x"}}, [run("make"), run("make;", "x")], [False, False]),
        # What is in doubt grants nothing.
        ({"kind": "edit", "rawInput": {"path": "/w/d/../a"}}, [write()], [False]),
        ({"rawInput": {"command": "make", "cmd": "rm"}}, [run("make")], [False]),
    ],
)
async def test_an_allowed_request_covers_exactly_what_it_names_once(
    tool: dict[str, Any], operations: list[Operation], expected: list[bool]
) -> None:
    log = Log()
    permissions = Permissions(reads="ask", ask=once([]), on_decision=log)
    outcome = await grant(permissions, **tool)
    assert outcome.option_id == "once"
    assert await answered(permissions, *operations) == expected
    granted = [decision.by == "granted" for decision in log.decisions[1:]]
    assert granted == expected


async def test_what_was_granted_answers_no_further_request() -> None:
    log = Log()
    permissions = Permissions(ask=once([]), on_decision=log)
    for expected in ("once", "no"):
        outcome = await grant(permissions, kind="edit", content=[DIFF])
        assert outcome.option_id == expected
    assert [decision.by for decision in log.decisions] == ["asked", "asked"]
    assert await permissions.guard(write())


async def test_a_request_that_was_not_allowed_covers_nothing() -> None:
    for answer in (False, None):
        answers: list[Any] = [True, answer]

        def ask(request: Request, answers: list[Any] = answers) -> Any:
            return answers.pop()

        log = Log()
        permissions = Permissions(ask=ask, on_decision=log)
        await grant(permissions, kind="edit", content=[DIFF])
        # It is asked about, and so was not covered.
        assert await permissions.guard(write())
        assert [decision.by for decision in log.decisions] == ["asked", "asked"]
    # Allowed, but the agent offers no option that says so.
    permissions = Permissions(ask=once([]))
    async with opened(Client(permissions=permissions)) as (_, raw):
        params = asking(("no", "reject_once"), kind="edit", content=[DIFF])
        reply = await raw.ask("session/request_permission", params)
        assert reply["result"]["outcome"] == CANCELLED
        assert not await permissions.guard(write())


async def test_a_rule_that_denies_refuses_what_was_granted() -> None:
    permissions = Permissions(ask=lambda request: True)
    await grant(permissions, kind="edit", content=[DIFF])
    strict = Permissions([Rule("deny", path="**/a")])
    strict._grants = permissions._grants
    assert not await strict.guard(write())


async def test_grants_go_with_their_session_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    permissions = Permissions(ask=lambda request: request.params is not None)
    await grant(permissions, kind="edit", content=[DIFF])
    await permissions.release_session("s1")
    assert not await permissions.guard(write())
    await grant(permissions, kind="edit", content=[DIFF])
    permissions.forget("s1")
    assert not await permissions.guard(write())
    monkeypatch.setattr(module, "MAX_GRANTS", 2)
    paths = [{"path": f"/w/{n}"} for n in range(5)]
    await grant(permissions, kind="edit", locations=paths)
    assert await answered(permissions, *(write(f"/w/{n}") for n in range(5))) == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert not any(permissions._grants.values())


async def test_sessions_that_grants_are_kept_for_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    permissions = Permissions(default="allow")
    for number in range(5):
        permissions._grant(Call(kind="edit", paths=("/w/a",), session_id=f"s{number}"))
    assert list(permissions._grants) == ["s3", "s4"]


@pytest.mark.covers("FF-42")
async def test_a_grant_is_no_use_for_another_file_through_a_link(tmp_path: Path) -> None:
    root = tmp_path / "w"
    root.mkdir()
    (root / "d").mkdir()
    (root / "secret").mkdir()
    log = Log()
    permissions = Permissions(ask=lambda request: request.params is not None, on_decision=log)
    client = Client(files=Files(), permissions=permissions)
    async with opened(client, root) as (_, raw):
        path = str(root / "d" / "f")
        params = asking(kind="edit", locations=[{"path": path}])
        answer = await raw.ask("session/request_permission", params)
        assert answer["result"]["outcome"] == selected("once")
        # After the yes, the directory becomes a link to another.
        (root / "d").rmdir()
        (root / "d").symlink_to("secret")
        writing = {"sessionId": "s1", "path": path, "content": "x"}
        answer = await raw.ask("fs/write_text_file", writing)
        assert answer["error"]["data"] == {"reason": "permission_denied"}
        assert not (root / "secret" / "f").exists()
        (root / "d").unlink()
        (root / "d").mkdir()
        assert (await raw.ask("fs/write_text_file", writing))["result"] == {}
    assert log.short == [("allow", "asked"), ("deny", "asked"), ("allow", "granted")]


async def test_a_session_s_directory_may_itself_be_reached_through_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    root = tmp_path / "w"
    root.symlink_to("real")
    rules = [Rule("deny", path=f"{root}/no/**"), Rule("allow", path="yes/**")]
    permissions = Permissions(rules, ask=lambda request: request.params is not None)
    client = Client(files=Files(), terminals=Terminals(), permissions=permissions)
    async with opened(client, root) as (_, raw):

        async def written(name: str) -> bool:
            params = {"sessionId": "s1", "path": f"{root}/{name}", "content": "x"}
            return "result" in await raw.ask("fs/write_text_file", params)

        assert await written("yes/a")
        assert not await written("no/a")
        assert not await written("b")
        params = asking(kind="edit", locations=[{"path": f"{root}/b"}])
        await raw.ask("session/request_permission", params)
        assert await written("b")
        params = asking(kind="execute", rawInput={"command": "true", "cwd": str(root)})
        await raw.ask("session/request_permission", params)
        creating = {"sessionId": "s1", "command": "true"}
        assert "result" in await raw.ask("terminal/create", creating)
        assert "error" in await raw.ask("terminal/create", creating)


@pytest.mark.parametrize("named", ["w", "real"])
async def test_a_request_may_name_a_root_either_way_and_is_granted_and_remembered(
    tmp_path: Path, named: str
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "w").symlink_to("real")
    root, real = str(tmp_path / "w"), str(tmp_path / "real")
    operation = write(f"{real}/a", roots=(root, real))
    diff = {**DIFF, "path": f"{tmp_path}/{named}/a"}
    log = Log()
    answers: list[Any] = [Answer(allow=True, remember="session"), True]

    def ask(request: Request) -> Any:
        return answers.pop()

    permissions = Permissions(ask=ask, on_decision=log)
    for _ in range(2):
        await grant(permissions, root, kind="edit", content=[diff])
    assert await answered(permissions, operation, operation, operation) == [True] * 3
    assert [decision.by for decision in log.decisions] == [
        *("asked", "asked", "granted", "granted", "remembered")
    ]


async def test_a_root_that_leads_elsewhere_for_another_session_is_looked_at_again(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    root = tmp_path / "w"
    permissions = Permissions([Rule("deny", path=f"{root}/no/**")], default="allow")
    for name in ("one", "two"):
        root.unlink(missing_ok=True)
        root.symlink_to(name)
        real = str(tmp_path / name)
        roots = (str(root), real)
        assert not await permissions.guard(write(f"{real}/no/a", roots=roots))
        assert await permissions.guard(write(f"{real}/yes/a", roots=roots))
        outcome = await grant(
            permissions, str(root), kind="edit", locations=[{"path": f"{real}/no/a"}]
        )
        assert outcome.option_id == "no"
        await permissions.release_session("s1")


async def test_roots_that_are_looked_at_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    permissions = Permissions(default="allow")
    await answered(permissions, *(write(session_id=f"s{number}") for number in range(5)))
    assert len(permissions._aliases) == 2


# ------------------------------------------------------------------ one policy before all services


@pytest.mark.covers("R1-104")
async def test_one_policy_holds_for_requests_writes_commands_and_reads(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("secret")
    (tmp_path / "a").write_text("text")
    rules = [
        Rule("deny", name="secrets", path="**/.env"),
        Rule("allow", kind="edit", path="*"),
        Rule("allow", command="true"),
    ]
    log = Log()
    client = Client(
        files=Files(), terminals=Terminals(), permissions=Permissions(rules, on_decision=log)
    )
    async with opened(client, tmp_path) as (_, raw):

        async def may(method: str, **params: Any) -> bool:
            answer = await raw.ask(method, {"sessionId": "s1", **params})
            if "error" in answer:
                assert answer["error"]["data"]["reason"] == "permission_denied"
            return "result" in answer

        assert await may("fs/read_text_file", path=f"{tmp_path}/a")
        assert not await may("fs/read_text_file", path=f"{tmp_path}/.env")
        assert await may("fs/write_text_file", path=f"{tmp_path}/a", content="")
        assert not await may("fs/write_text_file", path=f"{tmp_path}/.env", content="")
        assert not await may("fs/write_text_file", path=f"{tmp_path}/d/a", content="")
        assert await may("terminal/create", command="true")
        assert not await may("terminal/create", command="true; true")
        assert not await may(
            "terminal/create", command="true", env=[{"name": "PATH", "value": str(tmp_path)}]
        )
    assert (tmp_path / ".env").read_text() == "secret"
    assert [decision.rule for decision in log.decisions] == [
        None,
        "secrets",
        "rule 2",
        "secrets",
        None,
        "rule 3",
        None,
        None,
    ]
    assert {decision.about for decision in log.decisions} == {"operation"}


async def test_reads_are_asked_about_only_where_a_rule_could_concern_them(tmp_path: Path) -> None:
    for rules, options, reads in [
        ([], {}, False),
        (
            [Rule("deny", command="rm"), Rule("allow", path="**"), Rule("ask", kind="edit")],
            {},
            False,
        ),
        ([Rule("deny", path="**/.env")], {}, True),
        ([Rule("ask", kind="r*")], {}, True),
        ([], {"reads": "deny"}, True),
    ]:
        files = Files(tmp_path)
        permissions = Permissions(cast("Any", rules), **cast("Any", options))
        Client(files=files, permissions=permissions)
        assert files.guard == permissions.guard
        assert files.guard_reads is reads


async def test_a_guard_of_one_s_own_stays(tmp_path: Path) -> None:
    async def mine(operation: Operation) -> bool:
        return True

    files = Files(tmp_path, guard=mine)
    Client(files=files, permissions=Permissions(default="deny"))
    assert files.guard is mine


async def test_a_policy_guards_services_without_a_client(tmp_path: Path) -> None:
    from antiphon.schema import v1_unstable

    permissions = Permissions([Rule("allow", path="yes")])
    files = Files(tmp_path, guard=permissions.guard)
    ctx = Ctx("s", ())
    for name in ("yes", "no"):
        params = v1_unstable.WriteTextFileRequest(
            session_id="s", path=str(tmp_path / name), content=""
        )
        if name == "yes":
            await files.write_text_file(params, ctx)
        else:
            with pytest.raises(Exception, match="Permission denied"):
                await files.write_text_file(params, ctx)
    assert os.listdir(tmp_path) == ["yes"]


async def test_what_happens_to_a_write_that_waits_for_a_person_when_its_session_closes(
    tmp_path: Path,
) -> None:
    person = Person()
    client = Client(files=Files(), permissions=Permissions(ask=person))
    async with opened(client, tmp_path) as (session, raw):
        params = {"sessionId": "s1", "path": f"{tmp_path}/a", "content": ""}
        raw.send(raw.request("w", "fs/write_text_file", params))
        await person.wait()
        closing = asyncio.ensure_future(session.close())
        raw.answer(await raw.wait("session/close"), {})
        await closing
        answer = await raw.answer_to("w")
        assert answer["error"]["data"] == {"reason": "permission_denied"}
    assert not os.listdir(tmp_path)


# ------------------------------------------------------------------ what a request leaves out


@pytest.mark.covers("Q-14")
async def test_what_the_view_knows_of_a_tool_call_completes_a_request() -> None:
    asked: list[Call] = []

    def ask(request: Request) -> bool:
        asked.append(request.call)
        return False

    permissions = Permissions([Rule("deny", path="**/.env"), Rule("allow", kind="edit")], ask=ask)
    async with opened(Client(permissions=permissions)) as (session, raw):
        for viewed in (False, True):
            if viewed:
                assert session.view is not None
            update = {
                "sessionUpdate": "tool_call",
                "toolCallId": "t1",
                "title": "Edit",
                "kind": "edit",
                "locations": [{"path": "/w/.env"}],
            }
            raw.send(raw.notification("session/update", {"sessionId": "s1", "update": update}))
            answer = await raw.ask("session/request_permission", asking())
            assert answer["result"]["outcome"] == selected("no")
    # Without a view nothing was known, so it was asked; with it, the rule denies.
    assert [(call.kind, call.paths) for call in asked] == [("other", ())]


async def test_an_application_can_say_what_it_knows_of_a_tool_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = SimpleNamespace(
        title="Run", kind="execute", content=[], locations=[], raw_input={"command": "make"}
    )

    def describe(params: Any, ctx: Any) -> Any:
        return said.pop()

    said: list[Any] = [None, known]
    permissions = Permissions([Rule("allow", command="make")], describe=describe)
    assert await told(permissions) == selected("once")
    assert await told(permissions) == selected("no")

    def broken(params: Any, ctx: Any) -> Any:
        raise RuntimeError("describing trouble")

    log = permissions.on_decision = Log()
    permissions.describe = broken
    assert await told(permissions) == selected("no")
    assert "describing trouble" in caplog.text
    assert len(log.decisions) == 1


# ------------------------------------------------------------------ what is observed


async def test_an_observer_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(decision: Decision) -> None:
        raise RuntimeError("disk full")

    permissions = Permissions(default="allow", on_decision=broken)
    assert await told(permissions, *USUAL) == selected("once")
    assert await permissions.guard(write())
    assert [record.message for record in caplog.records] == [
        "observing a decision failed; it stands"
    ] * 2


def test_an_observer_that_nobody_would_wait_for_is_refused() -> None:
    async def observe(decision: Decision) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="plain function"):
        Permissions(on_decision=observe)
    with pytest.raises(TypeError, match="plain function"):
        Permissions.from_toml("", on_decision=observe)


async def test_a_decision_says_what_it_was_about() -> None:
    log = Log()
    permissions = Permissions([Rule("deny", name="n", kind="edit")], on_decision=log)
    await told(permissions, *USUAL, kind="edit", title="Edit")
    await permissions.guard(write())
    first, second = log.decisions
    assert (first.about, first.option_id, first.call.title) == ("permission", "no", "Edit")
    assert (second.about, second.option_id, second.call.paths) == ("operation", None, ("/w/a",))
    assert (first.rule, first.waited) == ("n", 0)
    assert "rule 1 ('n') matches" in second.why


# ------------------------------------------------------------------ made from a text


def test_a_policy_is_loaded_with_whom_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('default = "allow"\ndeadline = 3\n[[rule]]\ndecision = "deny"\nkind = "_x"\n')

    def ask(request: Request) -> bool:
        return True

    for permissions in (
        Permissions.load(path, ask=ask, on_decision=print),
        Permissions.from_toml(path.read_text(), ask=ask, on_decision=print),
    ):
        assert permissions.rules == (Rule("deny", kind="_x"),)
        assert (permissions.policy.default, permissions.deadline) == ("allow", 3)
        assert permissions.ask is ask
        assert permissions.on_decision is print
        assert permissions.judge(Call(kind="_x")).decision == "deny"
    with pytest.raises(PolicyError, match=r"gone\.toml: cannot be read"):
        Permissions.load(tmp_path / "gone.toml")
    with pytest.raises(PolicyError, match="default"):
        Permissions.from_toml("default = 1")
    with pytest.raises(PolicyError, match="deadline"):
        Permissions(deadline=-1)


# ------------------------------------------------------------------ an agent that wants its way

POLICY = [
    Rule("deny", name="secrets", path=["**/.env", "**/.git/**"]),
    Rule("allow", kind="edit", path="src/**"),
    Rule("allow", kind="think"),
    Rule("allow", command="git", args=["status"]),
]


def write_attempts(root: Path) -> list[str]:
    """Names of `.env`, of what lies in `.git`, and of files that nothing allows."""
    named = [
        *(
            "/.env",
            "//.env",
            "/./.env",
            "/src/../.env",
            "/src//../src/./../.env",
            "/.env/",
            "/.env/.",
        ),
        *("/src/up/.env", "/src/link", "/src/deep/er/../../../.env", "/src/nowhere/../../.env"),
        *("/.git/config", "/src/up/.git/config", "/src/../.git/hooks/pre-commit"),
        *(
            "/other",
            "/srcs/a",
            "/src*",
            "/src?/a",
            "/[s]rc/a",
            "/SRC/a",
            "/src\u200b/a",
            "/\u017frc/a",
        ),
        *(
            "/src/.env",
            "/src/a/.env",
            "/src/.git/x",
            "/src/up/src/.env",
            "/src\\..\\.env",
            "/~/.env",
        ),
        *("/src/a\0/../../.env", "/.env\0", "/.env\n/../.env"),
    ]
    outside = ["/etc/antiphon-never", "~/.env", ".env", "src/../.env", "file:///tmp/x", ""]
    return [f"{root}{name}" for name in named] + [f"/{root}/.env", *outside]


def command_attempts(root: Path) -> list[dict[str, Any]]:
    """Ways to have `touch marker` run where only `git status` may."""
    touch = f"touch {root}/marker"
    evil = f"{root}/src/bin"
    env = [{"name": "PATH", "value": evil}]
    lines = [
        *(touch, f"git status; {touch}", f"git status\n{touch}", f"git status && {touch}"),
        *(f"git status | {touch}", f"git status & {touch}", f"{touch} # git status"),
        *(f"git status $({touch})", f"git status `{touch}`", f"PATH={evil} git status"),
        *("./src/bin/git status", f"{evil}/git status", "src/bin/git status", "git  status;x"),
        *(
            f"git -c alias.status=!{evil}/git status",
            "\u0261it status",
            "git\u00a0status",
            "git status\0",
        ),
        *(f"env PATH={evil} git status", f"bash -c '{touch}'", f"eval {touch}", f". {evil}/git"),
        *("git status --", "git -- status", "git status .", " ./src/bin/git status"),
    ]
    return [
        *({"command": line} for line in lines),
        {"command": "git", "args": ["status"], "env": env},
        {"command": "git status", "env": env},
        {"command": "git", "args": ["status"], "env": [{"name": "GIT_DIR", "value": evil}]},
        {"command": "git", "args": ["-c", f"alias.status=!{evil}/git", "status"]},
        {"command": "git", "args": ["-c", f"core.fsmonitor={evil}/git", "status"]},
        {"command": "git", "args": ["status", "--", f"; {touch}"]},
        {"command": "git", "args": [f"status; {touch}"]},
        {"command": "git", "args": []},
        {"command": f"{evil}/git", "args": ["status"]},
        {"command": "./git", "args": ["status"], "cwd": evil},
        {"command": "../bin/git", "args": ["status"], "cwd": evil},
        {"command": "sh", "args": ["-c", touch]},
        {"command": "bash", "args": ["-lc", f"git status; {touch}"]},
        {"command": "env", "args": ["-S", touch]},
        {"command": "env", "args": ["git", "status"]},
        {"command": "xargs", "args": ["git", "status"]},
        {"command": "touch", "args": [f"{root}/marker"]},
    ]


def requests_before(said: dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent may say first, to be let do what it will do then."""
    options: list[dict[str, Any]] = []
    for kind in ("read", "think", "edit", "execute", "search", "other", None, "switch_mode"):
        tool: dict[str, Any] = {"title": "git status", **said}
        options.append({**tool, "kind": kind} if kind else tool)
    return options


@pytest.mark.covers("FF-27", "FF-42")
async def test_no_phrasing_gets_a_write_or_a_command_past_the_policy(tmp_path: Path) -> None:
    root = tmp_path / "w"
    for folder in ("src/bin", "src/deep/er", ".git/hooks"):
        (root / folder).mkdir(parents=True)
    (root / ".env").write_text("secret")
    (root / ".git/config").write_text("")
    (root / "src/up").symlink_to("..")
    (root / "src/link").symlink_to("../.env")
    evil = root / "src/bin/git"
    evil.write_text(f"#!/bin/sh\ntouch {root}/marker\n")
    evil.chmod(0o755)

    def seen() -> dict[str, str]:
        return {
            str(path.relative_to(tmp_path)): "" if path.is_dir() else path.read_text()
            for path in sorted(tmp_path.rglob("*"))
            if not path.is_symlink()
        }

    before = seen()
    log = Log()
    terminals = Terminals()
    client = Client(
        files=Files(), terminals=terminals, permissions=Permissions(POLICY, on_decision=log)
    )
    async with opened(client, root) as (_, raw):
        for number, path in enumerate(write_attempts(root)):
            for tool in requests_before({"locations": [{"path": path}]})[number % 8 :: 8]:
                await raw.ask("session/request_permission", asking(**tool))
            params = {"sessionId": "s1", "path": path, "content": "evil"}
            assert "error" in await raw.ask("fs/write_text_file", params), path
        for number, attempt in enumerate(command_attempts(root)):
            for tool in requests_before({"rawInput": attempt})[number % 8 :: 8]:
                answer = await raw.ask("session/request_permission", asking(**tool))
                assert answer["result"]["outcome"] == selected("no"), attempt
            params = {"sessionId": "s1", **attempt}
            assert "error" in await raw.ask("terminal/create", params), attempt
        # It is the policy that refuses, not a world in which nothing works.
        fine = {"sessionId": "s1", "path": f"{root}/src/new", "content": "fine"}
        assert "result" in await raw.ask("fs/write_text_file", fine)
        for attempt in ({"command": "git", "args": ["status"]}, {"command": "git status"}):
            created = await raw.ask("terminal/create", {"sessionId": "s1", **attempt})
            terminal = {"sessionId": "s1", "terminalId": created["result"]["terminalId"]}
            await raw.ask("terminal/wait_for_exit", terminal)
    await terminals.aclose()
    assert seen() == {**before, "w/src/new": "fine"}
    assert {d.by for d in log.decisions} <= {"rule", "default", "nobody"}


async def test_a_lie_about_the_kind_is_told_and_opens_nothing(tmp_path: Path) -> None:
    """What a request can lie about, it can lie about: the agent is told yes, and still held."""
    log = Log()
    permissions = Permissions([Rule("allow", kind="think")], on_decision=log)
    client = Client(files=Files(), terminals=Terminals(), permissions=permissions)
    async with opened(client, tmp_path) as (_, raw):
        lie: dict[str, Any] = {
            "kind": "think",
            "title": "Think",
            "locations": [{"path": f"{tmp_path}/a"}],
        }
        answer = await raw.ask("session/request_permission", asking(**lie))
        assert answer["result"]["outcome"] == selected("once")
        params = {"sessionId": "s1", "path": f"{tmp_path}/a", "content": ""}
        assert "error" in await raw.ask("fs/write_text_file", params)
    assert log.short == [("allow", "rule"), ("deny", "nobody")]
