"""Who answers when the agent asks, reads, writes or runs something: a policy, shown and asked here.

What is decided, remembered and told to the agent is `antiphon.services.Permissions`' work; how a
question looks, the display's and the asker's. In between, here: a request becomes a question, one
question is put at a time, and what was decided is shown and counted.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from antiphon.cli._output import as_line
from antiphon.cli._view import Question, ToolView
from antiphon.services import Answer, Call, Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from antiphon.cli._view import View
    from antiphon.schema import v1_unstable as v1
    from antiphon.services import Operation, Permissions, Request, ServiceContext

__all__ = ["Asker", "Decider"]

#: What a person can say to an operation: once; the widest "yes" that fits; no.
_WORDS = {
    "read": ("Allow this read", "Allow every read of this run"),
    "write": ("Allow this write", "Allow every write of this run"),
    "execute": ("Allow this command", "Allow every command of this run"),
}
#: What choosing an option of the agent's does, whatever the agent calls it.
_OPTION_KINDS = {
    "allow_once": "allows it",
    "allow_always": "allows it from now on",
    "reject_once": "refuses it",
    "reject_always": "refuses it from now on",
}
#: Names that say so themselves, in lower case.
_PLAIN_NAMES = {
    "allow_once": {"allow", "allow once", "yes", "accept", "approve", "ok", "proceed"},
    "allow_always": {"allow always", "always allow", "always", "yes, always"},
    "reject_once": {"reject", "reject once", "no", "deny", "refuse", "decline", "cancel"},
    "reject_always": {"reject always", "always reject", "never", "no, never"},
}
_AGAIN = "Allow exactly this, now and again"
_KINDS = {"read": "read", "write": "edit", "execute": "execute"}


class Asker(Protocol):
    """Puts a question to a person."""

    async def choose(self, question: Question) -> str | None:
        """The key of the chosen option; None for no choice at all. Cancellable."""
        ...


class _Where(NamedTuple):
    """What the policy needs of a handler's `ctx`."""

    session_id: str
    roots: Sequence[str]


class _Asked(msgspec.Struct):
    """What is being decided, and which option a person has chosen, or why nobody was asked."""

    question: Question
    key: str | None = None
    unasked: str = ""


_NOW: ContextVar[_Asked] = ContextVar("antiphon_cli_asked")


class Decider:
    """Answers permission requests and guards the services by one policy, and shows what it decides.

    Args:
        permissions: the policy; its `ask`, `on_decision` and `describe` are set here.
        view: where questions and decisions are shown.
        asker: puts questions to a person; None: there is nobody, and what the policy leaves to a
            person is refused.
        reason: why the default is what it is, as it is shown; "" for the policy's own words.
        roots: the directories that relative globs of the policy begin in, instead of those that
            the agent was told of: what it takes must not change what a rule means.
        record: is given every decision as well.
        protected: real paths of files that this run goes by, which the agent may not write
            through the client whatever the policy says.

    Attributes:
        requests: how many permission requests the agent made.
        pending: questions a person has not answered yet.
    """

    def __init__(
        self,
        permissions: Permissions,
        view: View,
        asker: Asker | None,
        *,
        reason: str = "",
        roots: Sequence[str] = (),
        record: Callable[[Decision], None] | None = None,
        protected: Collection[str] = (),
    ) -> None:
        self.requests = 0
        self.pending = 0
        self._view = view
        self._asker = asker
        self._reason = reason
        self._roots = tuple(roots)
        self._record = record
        self._protected = frozenset(protected)
        # What is to be shown when the terminal is ours again.
        self._asking = False
        self._waiting: list[Callable[[], None]] = []
        # One question at a time; a second dialog would answer the first one's keys.
        #: Held while a person is asked anything.
        self.turn = asyncio.Lock()
        # What a person who watches has let go on without being asked: kinds of operations.
        self._every: set[str] = set()
        permissions.ask = None if asker is None else self._ask
        permissions.on_decision = self._decided
        permissions.describe = self._described
        self._permissions = permissions

    @property
    def guards_reads(self) -> bool:
        """Whether a read could be refused."""
        return self._permissions.concerns_reads

    async def permission(
        self, params: v1.RequestPermissionRequest, ctx: ServiceContext
    ) -> v1.RequestPermissionResponse:
        """Answer `session/request_permission`."""
        self.requests += 1
        question = Question(
            kind="permission",
            tool=self._view.fold(params.session_id, params.tool_call),
            # What is neither a yes nor a no, no answer could be told by.
            options=tuple(
                (o.option_id, _label(o), o.kind) for o in params.options if o.kind in _OPTION_KINDS
            ),
        )
        token = _NOW.set(_Asked(question))
        try:
            where = _Where(params.session_id, self._roots or ctx.roots)
            return await self._permissions(params, where)
        finally:
            _NOW.reset(token)

    async def guard(self, operation: Operation) -> bool:
        """Whether the agent may read or write this file or run this command now."""
        if self._roots:
            operation = msgspec.structs.replace(operation, roots=self._roots)
        if operation.kind == "write" and operation.path in self._protected:
            return self._protect(operation)
        token = _NOW.set(_Asked(_question(operation)))
        try:
            return await self._permissions.guard(operation)
        finally:
            _NOW.reset(token)

    async def release_session(self, session_id: str) -> None:
        """Forget what was remembered for a session."""
        await self._permissions.release_session(session_id)

    async def _ask(self, request: Request) -> Answer | str | bool | None:
        asked = _NOW.get()
        question = asked.question
        # A person's yes to all of a kind is no answer to what a rule wants to be asked about.
        sweeping = request.verdict.rule is None and not request.call.doubt
        if request.operation is None:
            covers = _covered(request.call, question.tool)
            question = asked.question = msgspec.structs.replace(
                question, why=_join(question.why, covers)
            )
        options = question.options
        if request.operation is not None and not sweeping:
            options = (options[0], ("more", _AGAIN, "allow_always"), options[2])
        bound = "" if request.deadline is None else f"{request.deadline:g} s to answer"
        question = asked.question = msgspec.structs.replace(
            question,
            options=options,
            why=_join(question.why, "" if sweeping else request.verdict.why, bound),
        )
        if not question.options:
            asked.unasked = "the agent offers no option"
            return None
        if len({key for key, _, _ in question.options}) < len(question.options):
            # A person's no could be told, or taken, as a yes.
            asked.unasked = "two options of the agent have one id"
            return False
        self.pending += 1
        try:
            async with self.turn:
                if request.operation is not None and sweeping and question.kind in self._every:
                    return True
                key = asked.key = await self._put(asked)
        finally:
            self.pending -= 1
        if key is None:
            # "No" in the agent's own words, where it offers any: a denial must not end the turn.
            return False
        if request.operation is None:
            return key
        if key == "more" and sweeping:
            self._every.add(question.kind)
        return Answer(
            allow=key != "no", remember="session" if key == "more" and not sweeping else None
        )

    async def _put(self, asked: _Asked) -> str | None:
        assert self._asker is not None
        display = self._view.display
        display.suspend(asked.question)
        self._asking = True
        try:
            return await self._asker.choose(asked.question)
        finally:
            self._asking = False
            display.resume()
            while self._waiting:
                self._waiting.pop(0)()

    def _protect(self, operation: Operation) -> bool:
        decision = Decision(
            call=Call.of_operation(operation, operation.roots),
            outcome="deny",
            by="rule",
            why="this run goes by that file",
            about="operation",
        )
        token = _NOW.set(_Asked(_question(operation)))
        try:
            self._decided(decision)
        finally:
            _NOW.reset(token)
        return False

    def _described(self, params: v1.RequestPermissionRequest, ctx: object) -> object:
        del ctx
        return self._view.known(params.session_id, params.tool_call)

    def _decided(self, decision: Decision) -> None:
        if self._record is not None:
            self._record(decision)
        asked = _NOW.get()
        question = asked.question
        allowed = decision.outcome == "allow"
        if decision.by == "cancelled" or (
            question.kind != "permission"
            and allowed
            # What is allowed anyway is seen when it happens.
            and (decision.by != "asked" or asked.key is None)
        ):
            return
        key = decision.option_id if question.kind == "permission" else asked.key
        if question.kind != "permission" and key is None:
            key = "no"
        label = next((name for k, name, _ in question.options if k == key), "cancelled")
        reason = self._told(decision)
        show = partial(self._view.display.decided, question, label, allowed=allowed, reason=reason)
        if self._asking:
            # A question is on the screen, perhaps this one, decided by the clock: it goes first.
            self._waiting.append(show)
        else:
            show()

    def _told(self, decision: Decision) -> str:
        match decision.by:
            case "asked":
                return _NOW.get().unasked
            case "default":
                return self._reason or decision.why
            case "rule":
                return decision.why
            case "remembered":
                return "as answered before"
            case "nobody":
                return f"{decision.why}, and there is nobody to ask"
            case "deadline":
                return "no answer in time"
            case _:
                return "asking failed"


def _question(operation: Operation) -> Question:
    """A write, command or read as a person is asked about it."""
    once, more = _WORDS[operation.kind]
    tool = ToolView(
        id=operation.title,
        title=operation.title,
        kind=_KINDS[operation.kind],
        locations=(operation.path,) if operation.path else (),
    )
    # A command that looks harmless can be something else in another place, with other variables.
    elsewhere = operation.cwd if operation.cwd != next(iter(operation.roots), None) else None
    return Question(
        kind=operation.kind,
        tool=tool,
        options=(
            ("once", once, "allow_once"),
            ("more", more, "allow_always"),
            ("no", "Refuse", "reject_once"),
        ),
        why=_join(f"in {elsewhere}" if elsewhere else "", _added(operation.env)),
    )


def _label(option: v1.PermissionOption) -> str:
    """An option as a person reads it: "No" over one that allows would be taken at its word."""
    name = as_line(option.name)
    if name.lower() in _PLAIN_NAMES[option.kind]:
        return name
    return f"{name} [{_OPTION_KINDS[option.kind]}]"


def _covered(call: Call, tool: ToolView) -> str:
    """What a yes to a request covers and the question does not show: the title may say anything."""
    shown = {change.path for change in tool.changes}
    paths = [path for path in call.paths if path not in shown and path not in tool.name.split()]
    elsewhere = call.command is not None and call.cwd != next(iter(call.roots), None)
    return _join(
        f"about {', '.join(paths)}" if paths else "",
        f"in {call.cwd}" if elsewhere else "",
        _added(call.env) if call.command is not None else "",
    )


def _added(env: Mapping[str, str]) -> str:
    added = ", ".join(f"{name}={value!r}" for name, value in sorted(env.items()))
    return f"with {added}" if added else ""


def _join(*parts: str) -> str:
    return "; ".join(filter(None, parts))
