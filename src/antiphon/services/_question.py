"""A question for a person: how it is put, what ends it, and what the answer means.

Whatever ends the wait, an answer, a deadline, a cancellation, the session's end, ends it for good: what
the person says later is ignored. Fails closed: what means nothing is a no. When to ask, and what is
done with the answer, is left to `_permissions`; showing the question to `ask`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import msgspec

from antiphon._errors import ENDING
from antiphon.schema import v1
from antiphon.services._call import Call
from antiphon.services._context import Operation
from antiphon.services._rules import Verdict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = ["Answer", "Ask", "Question", "Request", "answer_of", "asking_thread"]

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

ALLOWING: Final = ("allow_once", "allow_always")
REJECTING: Final = ("reject_once", "reject_always")

#: Where plain functions that ask are to be called, if not on the loop (`antiphon.sync`).
asking_thread: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]] | None] = ContextVar(
    "antiphon_asking_thread", default=None
)


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


#: Asks a person; async or not. None is no choice ("cancelled"), a text an option's id.
Ask: TypeAlias = "Callable[[Request], _Answered | Awaitable[_Answered]]"
_Answered: TypeAlias = "Answer | bool | str | None"


class Ruling(msgspec.Struct):
    """What was decided, before it is an option."""

    outcome: Outcome
    by: By
    option_id: str | None = None
    remember: Literal["session", "always"] | None = None
    waited: float = 0.0


async def answer_of(hook: Callable[..., Any], *about: object) -> Any:
    """What a hook answers, async or not; a plain one is called in `asking_thread`, if there is one.

    Raises what the hook raises.
    """
    thread = asking_thread.get()
    if thread is not None and not iscoroutinefunction(hook):
        answer = await thread(lambda: hook(*about))
    else:
        answer = hook(*about)
    return await answer if isawaitable(answer) else answer


class Question:
    """One question that is open.

    Args:
        ask: puts it to a person.
        request: what is asked.
        ignored: keeps what goes on although nobody wants the answer: a task nobody holds may vanish.
    """

    def __init__(self, ask: Ask, request: Request, ignored: set[asyncio.Task[Any]]) -> None:
        self._request = request
        self._ignored = ignored
        self._withdrawn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        self._task = asyncio.create_task(answer_of(ask, request))

    @property
    def waited(self) -> float:
        """Seconds since it was put."""
        return time.monotonic() - self._began

    def withdraw(self) -> None:
        """Its session is over."""
        if not self._withdrawn.done():
            self._withdrawn.set_result(None)

    async def outcome(self) -> Ruling:
        """Wait for its end. Cancelled, it is over, and what comes of `ask` later is ignored."""
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
            return Ruling("cancelled", "cancelled", waited=self.waited)
        if not self._task.done():
            self._abandon()
            logger.info("nobody answered within %g s: refused", self._request.deadline)
            return Ruling("deny", "deadline", waited=self.waited)
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

    def _read(self) -> Ruling:
        """What the answer means; one that means nothing is a no."""
        try:
            answer: object = self._task.result()
        except ENDING:
            raise
        except BaseException:
            logger.exception("asking failed; refused")
            return Ruling("deny", "error")
        remember: Literal["session", "always"] | None = None
        option_id: str | None = None
        match answer:
            case None:
                return Ruling("cancelled", "asked")
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
        return Ruling("allow" if allow else "deny", "asked", option_id, remember)

    def _refused(self, answer: object) -> Ruling:
        logger.warning("%r is no answer to what was asked; refused", answer)
        return Ruling("deny", "error")


def unambiguous(options: Iterable[v1.PermissionOption]) -> tuple[v1.PermissionOption, ...]:
    """The options whose ids mean one thing: a no must not be another option's yes."""
    kinds: dict[str, set[str]] = {}
    for option in options:
        kinds.setdefault(option.option_id, set()).add(option.kind)
    return tuple(option for option in options if len(kinds[option.option_id]) == 1)


def _kind(options: Iterable[v1.PermissionOption], option_id: str) -> str:
    return next((option.kind for option in options if option.option_id == option_id), "")


def pick(options: Iterable[v1.PermissionOption], kinds: Iterable[str]) -> str | None:
    """The first option of the first of these kinds that there is (field fault 27)."""
    return next(
        (option.option_id for kind in kinds for option in options if option.kind == kind), None
    )
