"""`--permissions`: who answers when the agent asks, writes or runs something.

One rule for all three, so that an agent gains nothing by not asking. Fails closed: what cannot be
asked is refused, an allowing choice is never a fallback (field fault 27), and only a rejecting
option or "cancelled" says no. The services confine and carry out; how a question looks is the
display's and the asker's business.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Literal, Protocol

from antiphon.cli._view import Question, ToolView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon import ClientContext
    from antiphon.cli._view import View
    from antiphon.schema import v1_unstable as v1
    from antiphon.services import Operation

__all__ = ["Asker", "Decider", "Policy"]

Policy = Literal["ask", "allow", "deny"]

_ALLOWING = ("allow_once", "allow_always")
_REJECTING = ("reject_once", "reject_always")
_OPERATION_OPTIONS = {
    "write": (
        ("once", "Allow this write", "allow_once"),
        ("always", "Allow every write of this run", "allow_always"),
        ("no", "Refuse", "reject_once"),
    ),
    "execute": (
        ("once", "Allow this command", "allow_once"),
        ("always", "Allow every command of this run", "allow_always"),
        ("no", "Refuse", "reject_once"),
    ),
}


class Asker(Protocol):
    """Puts a question to a person."""

    async def choose(self, question: Question) -> str | None:
        """The key of the chosen option; None for no choice at all. Cancellable."""
        ...


class Decider:
    """Answers permission requests, and guards writes and commands, by one policy.

    Attributes:
        requests: how many permission requests the agent made.
        pending: questions a person has not answered yet.
    """

    def __init__(self, policy: Policy, view: View, asker: Asker | None, *, reason: str) -> None:
        self.requests = 0
        self.pending = 0
        self._policy: Policy = policy
        self._view = view
        self._asker = asker
        self._reason = reason
        # One question at a time; a second dialog would answer the first one's keys.
        self._turn = asyncio.Lock()
        self._always: set[str] = set()
        # What a person allowed in a permission request, to be done once without asking again.
        self._granted: set[tuple[str, str, str]] = set()

    async def permission(
        self, params: v1.RequestPermissionRequest, ctx: ClientContext
    ) -> str | None:
        """Answer `session/request_permission`: an option's id, or None for "cancelled"."""
        del ctx
        self.requests += 1
        tool = self._view.fold(params.session_id, params.tool_call)
        question = Question(
            kind="permission",
            tool=tool,
            options=tuple((o.option_id, o.name, o.kind) for o in params.options),
        )
        key = await self._answer(question)
        if key is not None and _kind(question, key) in _ALLOWING:
            self._granted.update(_named_by(params.session_id, tool))
        return key

    async def guard(self, operation: Operation) -> bool:
        """Whether the agent may write this file or run this command now."""
        kind = operation.kind
        subject = operation.path if kind == "write" else operation.title
        done = (operation.session_id, kind, subject or "")
        if done in self._granted:
            # The person has just said yes to a tool call that named exactly this.
            self._granted.discard(done)
            return True
        if kind in self._always:
            return True
        tool = ToolView(
            id=operation.title,
            title=operation.title,
            kind="edit" if kind == "write" else "execute",
            locations=(operation.path,) if operation.path else (),
        )
        question = Question(kind=kind, tool=tool, options=_OPERATION_OPTIONS[kind])
        key = await self._answer(question)
        if key == "always" and self._policy == "ask":
            self._always.add(kind)
        return key is not None and _kind(question, key) in _ALLOWING

    async def _answer(self, question: Question) -> str | None:
        reason = self._reason
        if self._policy == "ask" and self._asker is not None:
            key, reason = await self._ask(question, self._asker), ""
        elif self._policy == "allow":
            key = _first(question, _ALLOWING)
        else:
            key = None
        if key is None:
            # "No" in the agent's own words, where it offers any: a denial must not end the turn.
            key = _first(question, _REJECTING)
        label = next((name for k, name, _ in question.options if k == key), "cancelled")
        allowed = key is not None and _kind(question, key) in _ALLOWING
        if question.kind == "permission" or not allowed or not reason:
            # What is allowed anyway is seen when it happens.
            self._view.display.decided(question, label, allowed=allowed, reason=reason)
        return key

    async def _ask(self, question: Question, asker: Asker) -> str | None:
        self.pending += 1
        try:
            async with self._turn:
                self._view.display.suspend(question)
                try:
                    return await asker.choose(question)
                finally:
                    self._view.display.resume()
        finally:
            self.pending -= 1


def _kind(question: Question, key: str) -> str:
    return next((kind for k, _, kind in question.options if k == key), "")


def _first(question: Question, kinds: Iterable[str]) -> str | None:
    for wanted in kinds:
        for key, _, kind in question.options:
            if kind == wanted:
                return key
    return None


def _named_by(session_id: str, tool: ToolView) -> set[tuple[str, str, str]]:
    """The writes and commands that a tool call names exactly."""
    named: set[tuple[str, str, str]] = set()
    if tool.kind in {"edit", "delete", "move", "other"}:
        for change in tool.changes:
            named.add((session_id, "write", os.path.realpath(change.path)))
    if tool.kind in {"execute", "other"} and tool.command:
        named.add((session_id, "execute", tool.command))
    return named
