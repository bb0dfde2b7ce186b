"""`Permissions`: one policy for permission requests, writes, commands and reads.

What the rules say is left to `_rules`; here somebody is asked where they say "ask", an answer becomes
one of the options that the agent offers, and what was answered is remembered. Showing a question is
left to `ask`, carrying things out to the services.

Each request is decided once. Whatever ends the wait for a person, an answer, a deadline, a
cancellation, the session's end, ends it for good: what the person says later is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import OrderedDict
from contextvars import ContextVar
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, cast

import msgspec

from antiphon._errors import ENDING
from antiphon.schema import v1
from antiphon.services._call import KINDS, Call, spelled
from antiphon.services._context import Operation  # noqa: TC001 - a signature is read when it is run
from antiphon.services._globs import escape
from antiphon.services._rules import Policy, Rule, Verdict, check_deadline
from antiphon.services._toml import read_policy, read_policy_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from antiphon.schema import v1_unstable
    from antiphon.services._rules import Word

__all__ = ["Answer", "Ask", "Decision", "Permissions", "Request", "asking_thread"]

logger = logging.getLogger("antiphon.services")

By: TypeAlias = Literal[
    "rule",
    "remembered",
    "granted",
    "asked",
    "default",
    "deadline",
    "nobody",
    "error",
    "cancelled",
]
Outcome: TypeAlias = Literal["allow", "deny", "cancelled"]

#: Answers that are remembered; the oldest are forgotten first, and asked for again.
MAX_REMEMBERED: Final = 1000
#: What was allowed in permission requests of a session and not done yet.
MAX_GRANTS: Final = 256
#: Sessions that grants and roots are kept for.
MAX_SESSIONS: Final = 1024

ALLOWING: Final = ("allow_once", "allow_always")
REJECTING: Final = ("reject_once", "reject_always")
#: What can be answered about a write, a command or a read that the agent did not ask about itself.
OPERATION_OPTIONS: Final = (
    v1.PermissionOption(option_id="allow_once", name="Allow", kind="allow_once"),
    v1.PermissionOption(option_id="allow_always", name="Always allow this", kind="allow_always"),
    v1.PermissionOption(option_id="reject_once", name="Refuse", kind="reject_once"),
    v1.PermissionOption(option_id="reject_always", name="Always refuse this", kind="reject_always"),
)

#: Where plain functions that ask are to be called, if not on the loop (`antiphon.sync`).
asking_thread: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]] | None] = ContextVar(
    "antiphon_asking_thread", default=None
)

_Key: TypeAlias = tuple[Any, ...]
#: A session and its directories.
_Roots: TypeAlias = tuple[str, tuple[str, ...]]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A question for a person.

    Attributes:
        call: what the agent wants, as the rules see it.
        options: what can be answered: the agent's own, or ours for an operation.
        verdict: why it is asked.
        deadline: seconds in which an answer counts, None for as long as it takes.
        params: the permission request, if it is one.
        operation: what a service is about to do, if it is that.
    """

    call: Call
    options: tuple[v1.PermissionOption, ...]
    verdict: Verdict
    deadline: float | None = None
    params: v1.RequestPermissionRequest | None = None
    operation: Operation | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A person's answer, where True, False and an option's id do not say enough.

    Attributes:
        allow: whether the agent may.
        option_id: one of the options offered, of a kind that says the same as `allow`; None
            picks one.
        remember: answer the same again by itself: "session" until the session ends, "always" as
            long as this `Permissions` lives. An always-option that is chosen is remembered for
            the session without it.
    """

    allow: bool
    option_id: str | None = None
    remember: Literal["session", "always"] | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request or operation, for an audit log.

    Attributes:
        call: what the agent wanted.
        outcome: "allow", "deny", or "cancelled": withdrawn, or a person chose neither, or nothing
            that the agent offered would have said what was decided.
        by: what decided. "rule" and "default" (`default` or `reads`) are the policy's; "remembered"
            an earlier answer; "granted" a permission request that named this write or command;
            "asked" a person, "deadline" one who was too late; "nobody": there was none to ask;
            "error": `ask` failed; "cancelled": the agent, the turn, the session or the
            connection ended the question.
        rule: the rule's name, or "rule 3" for one without; None where no rule matched.
        why: the verdict in words.
        option_id: what the agent was told; None for "cancelled", and for operations.
        waited: seconds from the question to its end; 0 if nobody was asked.
        about: "permission" for a request, "operation" for what a service was about to do.
    """

    call: Call
    outcome: Outcome
    by: By
    rule: str | None = None
    why: str = ""
    option_id: str | None = None
    waited: float = 0.0
    about: Literal["permission", "operation"] = "permission"


#: Asks a person; async or not. None is no choice ("cancelled"), a text an option's id.
Ask: TypeAlias = "Callable[[Request], _Answered | Awaitable[_Answered]]"
_Answered: TypeAlias = "Answer | bool | str | None"


class _Context(Protocol):
    """What is used of a handler's `ctx`: see `ServiceContext`."""

    @property
    def session_id(self) -> str: ...

    @property
    def roots(self) -> Sequence[str]: ...


class _Outcome(msgspec.Struct):
    """What was decided, before it is an option."""

    outcome: Outcome
    by: By
    option_id: str | None = None
    remember: Literal["session", "always"] | None = None
    waited: float = 0.0


class Permissions:
    """Decides what an agent may do: `Client(permissions=Permissions(…))`, or any service's guard.

    The rules decide first; what they leave to a person is looked up among the answers that are
    remembered, then asked. One policy holds for permission requests and, given to `Client` or as
    `guard=permissions.guard`, for every write, command and (where a rule could concern them) read
    of the services: an agent gains nothing by not asking. It fails closed: nobody to ask, an
    exception, a deadline that has passed, an answer that means nothing are a no. A no is told by
    an option that rejects, else "cancelled"; never by one that allows (R1-104, R1-105).

    A permission request that was allowed covers the writes and commands that it names exactly,
    once each, unless a rule denies them. It says nothing about what is written.

    Sessions of different agents are told apart by their ids alone: give agents that are not
    trusted alike a `Permissions` each.

    Args:
        rules: in their order; the first that matches decides.
        default: what no rule matches: "ask", "allow" or "deny".
        reads: the same for what is nothing but a read.
        ask: asked where the rules say "ask"; async, or a plain function, which must not block (with
            `antiphon.sync` it may). Several questions may be open at once. It is cancelled when the
            answer is not wanted any more.
        deadline: seconds for an answer; None waits. A plain function is not bounded by it.
        on_decision: a plain function, called with every `Decision`, exactly once, for a log. What
            it raises is logged and changes nothing.
        describe: called with (params, ctx) of a permission request: what is known of its tool call
            (`title`, `kind`, `content`, `locations`, `raw_input`), or None, for agents that
            send nothing but its id. By default, what the session's view knows, if it has been
            looked at.

    Raises:
        PolicyError: a rule, word or deadline that means nothing.
        TypeError: `on_decision` is async.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        default: Word = "ask",
        reads: Word = "allow",
        ask: Ask | None = None,
        deadline: float | None = None,
        on_decision: Callable[[Decision], object] | None = None,
        describe: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._set(Policy(rules, default=default, reads=reads), deadline)
        if iscoroutinefunction(on_decision):
            msg = "on_decision is a plain function: nobody would wait for an async one"
            raise TypeError(msg)
        for name, given in (("ask", ask), ("on_decision", on_decision), ("describe", describe)):
            if given is not None and not callable(given):
                raise TypeError(f"{name} is a function, not {given!r}")
        self.ask = ask
        self.on_decision = on_decision
        self.describe = describe

    def _set(self, policy: Policy, deadline: float | None) -> None:
        self.policy = policy
        self.deadline = None if deadline is None else check_deadline(deadline)
        self._remembered: OrderedDict[tuple[str | None, _Key], tuple[Word, Call]] = OrderedDict()
        self._grants: OrderedDict[str, OrderedDict[_Key, int]] = OrderedDict()
        self._aliases: OrderedDict[_Roots, tuple[tuple[str, str], ...]] = OrderedDict()
        self._open: dict[str, set[_Question]] = {}
        # Questions that go on although nobody wants the answer: a task nobody holds may vanish.
        self._ignored: set[asyncio.Task[Any]] = set()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        ask: Ask | None = None,
        on_decision: Callable[[Decision], object] | None = None,
        describe: Callable[[Any, Any], Any] | None = None,
    ) -> Self:
        """A policy from a TOML file, read once (docs/reference/policy.md).

        Raises:
            PolicyError: it cannot be read, or is no policy; says where.
        """
        return cls._made(read_policy_file(path), ask, on_decision, describe)

    @classmethod
    def from_toml(
        cls,
        text: str,
        *,
        ask: Ask | None = None,
        on_decision: Callable[[Decision], object] | None = None,
        describe: Callable[[Any, Any], Any] | None = None,
    ) -> Self:
        """A policy from the text of such a file.

        Raises:
            PolicyError: it is no policy; says where.
        """
        return cls._made(read_policy(text), ask, on_decision, describe)

    @classmethod
    def _made(cls, settings: Any, ask: Any, on_decision: Any, describe: Any) -> Self:
        made = cls(ask=ask, on_decision=on_decision, describe=describe)
        made._set(settings.policy, settings.deadline)
        return made

    # -------------------------------------------------------------- what is decided

    @property
    def concerns_reads(self) -> bool:
        """Whether reads have to be asked about; if not, services need not ask."""
        return self.policy.concerns_reads

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in their order."""
        return self.policy.rules

    def judge(self, call: Call) -> Verdict:
        """What the rules say about a call. Asks nobody, remembers nothing."""
        return self.policy.judge(call)

    async def __call__(
        self, params: v1_unstable.RequestPermissionRequest, ctx: _Context
    ) -> v1.RequestPermissionResponse:
        """Answer a permission request. Cancelled, it records that and answers nothing."""
        roots = tuple(ctx.roots)
        aliases = self._aliases_of(params.session_id, roots)
        call = Call.of_request(params, roots, known=self._known(params, ctx), aliases=aliases)
        options = _unambiguous(params.options)
        outcome, verdict = await self._decide(call, options, params=params)
        option_id = outcome.option_id
        if option_id is None and outcome.outcome != "cancelled":
            option_id = _pick(options, ALLOWING if outcome.outcome == "allow" else REJECTING)
            if option_id is None and outcome.outcome == "allow":
                # It could not be told, so it is not allowed.
                outcome.outcome = "cancelled"
        if outcome.outcome == "allow":
            self._grant(call)
        self._observe(call, outcome, verdict, option_id, "permission")
        if option_id is None:
            return v1.RequestPermissionResponse(outcome=v1.CancelledPermissionOutcome())
        selected = v1.SelectedPermissionOutcome(option_id=option_id)
        return v1.RequestPermissionResponse(outcome=selected)

    async def guard(self, operation: Operation) -> bool:
        """Whether a service may do this now. Cancelled, it records that."""
        roots = tuple(operation.roots)
        aliases = self._aliases_of(operation.session_id, roots)
        call = Call.of_operation(operation, roots, aliases=aliases)
        outcome, verdict = await self._decide(call, OPERATION_OPTIONS, operation=operation)
        self._observe(call, outcome, verdict, None, "operation")
        return outcome.outcome == "allow"

    async def release_session(self, session_id: str) -> None:
        """Forget what was remembered and granted for a session; its open questions are cancelled."""
        for key in [key for key in self._remembered if key[0] == session_id]:
            del self._remembered[key]
        self._grants.pop(session_id, None)
        for key in [key for key in self._aliases if key[0] == session_id]:
            del self._aliases[key]
        for question in list(self._open.get(session_id, ())):
            question.withdraw()

    # -------------------------------------------------------------- what is remembered

    @property
    def remembered(self) -> tuple[Rule, ...]:
        """The answers that are remembered, as rules that say the same."""
        return tuple(
            _as_rule(word, call, session) for (session, _), (word, call) in self._remembered.items()
        )

    def forget(self, session_id: str | None = None) -> None:
        """Forget all answers, or those of one session; what was granted goes with them."""
        if session_id is None:
            self._remembered.clear()
            self._grants.clear()
            return
        for key in [key for key in self._remembered if key[0] == session_id]:
            del self._remembered[key]
        self._grants.pop(session_id, None)

    def _recall(self, call: Call) -> Word | None:
        if call.doubt:
            return None
        key = _key(call)
        for session in (call.session_id, None):
            found = self._remembered.get((session, key))
            if found is not None:
                return found[0]
        return None

    def _remember(self, call: Call, word: Word, scope: Literal["session", "always"]) -> None:
        if call.doubt:
            return
        key = (call.session_id if scope == "session" else None, _key(call))
        self._remembered[key] = word, call
        self._remembered.move_to_end(key)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def _grant(self, call: Call) -> None:
        keys = _granted_by(call)
        if call.doubt or not keys:
            return
        grants = self._grants.setdefault(call.session_id, OrderedDict())
        self._grants.move_to_end(call.session_id)
        for key in keys:
            grants[key] = grants.pop(key, 0) + 1
        while len(grants) > MAX_GRANTS:
            grants.popitem(last=False)
        while len(self._grants) > MAX_SESSIONS:
            self._grants.popitem(last=False)

    def _take_grant(self, call: Call) -> bool:
        grants = self._grants.get(call.session_id)
        if not grants or call.doubt:
            return False
        key = _grant_wanted(call)
        left = grants.get(key, 0)
        if not left:
            return False
        if left == 1:
            del grants[key]
        else:
            grants[key] = left - 1
        return True

    # -------------------------------------------------------------- how

    async def _decide(
        self,
        call: Call,
        options: tuple[v1.PermissionOption, ...],
        *,
        params: v1_unstable.RequestPermissionRequest | None = None,
        operation: Operation | None = None,
    ) -> tuple[_Outcome, Verdict]:
        verdict = self.judge(call)
        if verdict.decision != "ask":
            by: By = "default" if verdict.rule is None else "rule"
            return _Outcome(verdict.decision, by), verdict
        if operation is not None and self._take_grant(call):
            return _Outcome("allow", "granted"), verdict
        word = self._recall(call)
        if word is not None:
            return _Outcome("allow" if word == "allow" else "deny", "remembered"), verdict
        if self.ask is None:
            return _Outcome("deny", "nobody"), verdict
        deadline = self.deadline if verdict.deadline is None else verdict.deadline
        request = Request(
            call=call,
            options=options,
            verdict=verdict,
            deadline=deadline,
            params=params,
            operation=operation,
        )
        question = _Question(self.ask, request, self._ignored)
        questions = self._open.setdefault(call.session_id, set())
        questions.add(question)
        about: Literal["permission", "operation"] = (
            "permission" if operation is None else "operation"
        )
        try:
            outcome = await question.outcome()
        except BaseException:
            # Whatever ends it from outside: the agent, the turn, the connection.
            cancelled = _Outcome("cancelled", "cancelled", waited=question.waited)
            self._observe(call, cancelled, verdict, None, about)
            raise
        finally:
            questions.discard(question)
            if not questions and self._open.get(call.session_id) is questions:
                del self._open[call.session_id]
        if outcome.remember is not None and outcome.outcome != "cancelled":
            self._remember(call, outcome.outcome, outcome.remember)
        return outcome, verdict

    def _observe(
        self,
        call: Call,
        outcome: _Outcome,
        verdict: Verdict,
        option_id: str | None,
        about: Literal["permission", "operation"],
    ) -> None:
        if self.on_decision is None:
            return
        rule = None if verdict.rule is None else verdict.rule.name or f"rule {verdict.number}"
        decision = Decision(
            call=call,
            outcome=outcome.outcome,
            by=outcome.by,
            rule=rule,
            why=verdict.why,
            option_id=option_id,
            waited=outcome.waited,
            about=about,
        )
        try:
            self.on_decision(decision)
        except ENDING:
            raise
        except BaseException:
            logger.exception("observing a decision failed; it stands")

    def _aliases_of(self, session_id: str, roots: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Where roots that are reached through links really are, as services see them."""
        key = session_id, roots
        found = self._aliases.get(key)
        if found is None:
            found = tuple(
                (root, real)
                for root in roots
                if root.startswith("/") and (real := os.path.realpath(root)) != root
            )
            self._aliases[key] = found
            while len(self._aliases) > MAX_SESSIONS:
                self._aliases.popitem(last=False)
        return found

    def _known(self, params: v1_unstable.RequestPermissionRequest, ctx: _Context) -> Any:
        if self.describe is not None:
            try:
                return self.describe(params, ctx)
            except ENDING:
                raise
            except BaseException:
                # What is not known makes the call say less, and less is allowed by itself.
                logger.exception("describing a tool call failed; it is taken as it came")
                return None
        known = getattr(ctx, "known_tool_call", None)
        return None if known is None else known(params.tool_call.tool_call_id)


class _Question:
    """One question that is open."""

    def __init__(self, ask: Ask, request: Request, ignored: set[asyncio.Task[Any]]) -> None:
        self._request = request
        self._ignored = ignored
        self._withdrawn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        self._task = asyncio.create_task(self._put(ask))

    @property
    def waited(self) -> float:
        """Seconds since it was put."""
        return time.monotonic() - self._began

    async def _put(self, ask: Ask) -> Any:
        thread = asking_thread.get()
        answer: Any
        if thread is not None and not iscoroutinefunction(ask):
            answer = await thread(lambda: ask(self._request))
        else:
            answer = ask(self._request)
        return await answer if isawaitable(answer) else answer

    def withdraw(self) -> None:
        """Its session is over."""
        if not self._withdrawn.done():
            self._withdrawn.set_result(None)

    async def outcome(self) -> _Outcome:
        try:
            await asyncio.wait(
                {self._task, self._withdrawn},
                timeout=self._request.deadline,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except BaseException:
            self._abandon()
            raise
        if self._withdrawn.done():
            self._abandon()
            return _Outcome("cancelled", "cancelled", waited=self.waited)
        if not self._task.done():
            self._abandon()
            logger.info("nobody answered within %g s: refused", self._request.deadline)
            return _Outcome("deny", "deadline", waited=self.waited)
        self._withdrawn.cancel()
        outcome = self._read()
        outcome.waited = self.waited
        return outcome

    def _abandon(self) -> None:
        self._withdrawn.cancel()
        self._task.cancel()
        self._ignored.add(self._task)
        self._task.add_done_callback(self._late)

    def _late(self, task: asyncio.Task[Any]) -> None:
        self._ignored.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            logger.info("an answer came when the question was over; it is ignored")
        else:
            logger.warning("asking failed when the question was over", exc_info=error)

    def _read(self) -> _Outcome:
        """What the answer means; one that means nothing is a no."""
        try:
            answer: object = self._task.result()
        except ENDING:
            raise
        except BaseException:
            logger.exception("asking failed; refused")
            return _Outcome("deny", "error")
        remember: Literal["session", "always"] | None = None
        option_id: str | None = None
        match answer:
            case None:
                return _Outcome("cancelled", "asked")
            case True | False:
                allow = answer
            case str():
                option_id = answer
                kind = _kind(self._request.options, option_id)
                if kind not in (*ALLOWING, *REJECTING):
                    return self._refused(answer)
                allow = kind in ALLOWING
            case Answer():
                allow, option_id, remember = answer.allow, answer.option_id, answer.remember
                kinds = ALLOWING if allow is True else REJECTING
                if option_id is not None and _kind(self._request.options, option_id) not in kinds:
                    return self._refused(answer)
                if not isinstance(cast("object", allow), bool) or remember not in {
                    None,
                    "session",
                    "always",
                }:
                    return self._refused(answer)
            case _:
                return self._refused(answer)
        if remember is None and option_id is not None:
            kind = _kind(self._request.options, option_id)
            remember = "session" if kind in {"allow_always", "reject_always"} else None
        return _Outcome("allow" if allow else "deny", "asked", option_id, remember)

    def _refused(self, answer: object) -> _Outcome:
        logger.warning("%r is no answer to what was asked; refused", answer)
        return _Outcome("deny", "error")


def _unambiguous(options: Iterable[v1.PermissionOption]) -> tuple[v1.PermissionOption, ...]:
    """The options whose ids mean one thing: a no must not be another option's yes."""
    kinds: dict[str, set[str]] = {}
    for option in options:
        kinds.setdefault(option.option_id, set()).add(option.kind)
    return tuple(option for option in options if len(kinds[option.option_id]) == 1)


def _kind(options: Iterable[v1.PermissionOption], option_id: str) -> str:
    return next((option.kind for option in options if option.option_id == option_id), "")


def _pick(options: Iterable[v1.PermissionOption], kinds: Iterable[str]) -> str | None:
    """The first option of the first of these kinds that there is (field fault 27)."""
    return next(
        (option.option_id for kind in kinds for option in options if option.kind == kind), None
    )


def _key(call: Call) -> _Key:
    """What has to be the same for an answer to be remembered: all that was decided about."""
    aliases = call.aliases
    cwd = None if call.cwd is None else spelled(call.cwd, aliases)
    paths = frozenset(spelled(path, aliases) for path in call.paths)
    title = "" if paths or call.command is not None else call.title
    return (
        frozenset(call.kinds),
        paths,
        call.command,
        cwd if call.command is not None else None,
        frozenset(call.env.items()),
        title,
    )


def _granted_by(call: Call) -> list[_Key]:
    """The writes and commands that a call names exactly."""
    keys: list[_Key] = []
    if "edit" in call.kinds:
        # Where it shows changes, nothing else was shown.
        keys += [("edit", spelled(path, call.aliases)) for path in call.changes or call.paths]
    if call.command is not None:
        keys.append(_command_key(call))
    return keys


def _grant_wanted(call: Call) -> _Key:
    if call.command is not None:
        return _command_key(call)
    return (call.kind, spelled(call.paths[0], call.aliases) if call.paths else "")


def _command_key(call: Call) -> _Key:
    cwd = None if call.cwd is None else spelled(call.cwd, call.aliases)
    return ("execute", call.command, cwd, frozenset(call.env.items()))


def _as_rule(word: Word, call: Call, session: str | None) -> Rule:
    named = bool(call.paths) or call.command is not None
    command = call.command or ()
    return Rule(
        word,
        name="remembered",
        # A rule takes these for mistakes, unless they are written as globs.
        kind=[
            escape(kind) if kind in KINDS else re.sub(r"^[A-Za-z]", r"[\g<0>]", escape(kind))
            for kind in call.kinds
        ],
        title=[] if named or not call.title else escape(call.title),
        path=[escape(path) for path in call.paths],
        command=[re.sub(r"\s", r"[\g<0>]", escape(command[0]))] if command else [],
        args=[escape(arg) for arg in command[1:]] if command else None,
        cwd=[escape(call.cwd)] if command and call.cwd else [],
        session=[] if session is None else escape(session),
        env=[escape(name) for name in call.env],
    )
