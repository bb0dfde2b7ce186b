"""`Permissions`: one policy for permission requests, writes, commands and reads.

What the rules say is left to `_rules`, asking where they say "ask" to `_question`; here an answer
becomes one of the options that the agent offers, and what was answered is remembered. Carrying things
out is left to the services. Each request is decided once.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import msgspec

from antiphon._errors import ENDING
from antiphon.schema import v1
from antiphon.services._call import KINDS, Call, spelled
from antiphon.services._context import (  # a signature is read when it is run
    Operation,  # noqa: TC001
    ServiceContext,  # noqa: TC001
)
from antiphon.services._globs import escape
from antiphon.services._question import (
    ALLOWING,
    REJECTING,
    Ask,
    By,
    Outcome,
    Question,
    Request,
    Ruling,
    pick,
    unambiguous,
)
from antiphon.services._rules import Policy, Rule, Verdict, check_deadline
from antiphon.services._toml import read_policy, read_policy_file

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from antiphon.schema import v1_unstable
    from antiphon.services._rules import Word

__all__ = ["Decision", "Permissions"]

logger = logging.getLogger("antiphon.services")

#: Answers that are remembered; the oldest are forgotten first, and asked for again.
MAX_REMEMBERED: Final = 1000
#: What was allowed in permission requests of a session and not done yet.
MAX_GRANTS: Final = 256
#: Sessions that grants and roots are kept for.
MAX_SESSIONS: Final = 1024

#: What can be answered about a write, a command or a read that the agent did not ask about itself.
OPERATION_OPTIONS: Final = (
    v1.PermissionOption(option_id="allow_once", name="Allow", kind="allow_once"),
    v1.PermissionOption(option_id="allow_always", name="Always allow this", kind="allow_always"),
    v1.PermissionOption(option_id="reject_once", name="Refuse", kind="reject_once"),
    v1.PermissionOption(option_id="reject_always", name="Always refuse this", kind="reject_always"),
)

_Key: TypeAlias = tuple[Any, ...]
#: A session and its directories.
_Roots: TypeAlias = tuple[str, tuple[str, ...]]


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
        self._open: dict[str, set[Question]] = {}
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
        self, params: v1_unstable.RequestPermissionRequest, ctx: ServiceContext
    ) -> v1.RequestPermissionResponse:
        """Answer a permission request. Cancelled, it records that and answers nothing."""
        roots = tuple(ctx.roots)
        aliases = self._aliases_of(params.session_id, roots)
        call = Call.of_request(params, roots, known=self._known(params, ctx), aliases=aliases)
        options = unambiguous(params.options)
        outcome, verdict = await self._decide(call, options, params=params)
        option_id = outcome.option_id
        if option_id is None and outcome.outcome != "cancelled":
            option_id = pick(options, ALLOWING if outcome.outcome == "allow" else REJECTING)
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
    ) -> tuple[Ruling, Verdict]:
        verdict = self.judge(call)
        if verdict.decision != "ask":
            by: By = "default" if verdict.rule is None else "rule"
            return Ruling(verdict.decision, by), verdict
        if operation is not None and self._take_grant(call):
            return Ruling("allow", "granted"), verdict
        word = self._recall(call)
        if word is not None:
            return Ruling("allow" if word == "allow" else "deny", "remembered"), verdict
        if self.ask is None:
            return Ruling("deny", "nobody"), verdict
        deadline = self.deadline if verdict.deadline is None else verdict.deadline
        request = Request(
            call=call,
            options=options,
            verdict=verdict,
            deadline=deadline,
            params=params,
            operation=operation,
        )
        question = Question(self.ask, request, self._ignored)
        questions = self._open.setdefault(call.session_id, set())
        questions.add(question)
        about: Literal["permission", "operation"] = (
            "permission" if operation is None else "operation"
        )
        try:
            outcome = await question.outcome()
        except BaseException:
            # Whatever ends it from outside: the agent, the turn, the connection.
            cancelled = Ruling("cancelled", "cancelled", waited=question.waited)
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
        outcome: Ruling,
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

    def _known(self, params: v1_unstable.RequestPermissionRequest, ctx: ServiceContext) -> Any:
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
