"""Who may attach to a session: the one funnel that every attach goes through (resumable-sessions §11).

Responsible for asking a policy, which is other people's code, so that whatever it does admits nobody
except by a well-formed grant for this session. Leaves the decision to the policy (`LocalNode`,
`Token`, a user's own), the answer to the agent's side and what is then sent to `_subscriber`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from antiphon._errors import RequestError

__all__ = [
    "AttachContext",
    "AttachRefused",
    "Denied",
    "Grant",
    "Policy",
    "admit",
    "attach_denied",
]

log = logging.getLogger("antiphon.journal")

#: What a grant may be for. Grow-only; there are no finer rights (§11.2).
_SCOPES: Final = frozenset(("attach",))
#: How long, in seconds, a policy that was cancelled may take to end before it is left behind.
_GRACE: Final = 0.05
#: Threads in which policies hang at once, in the whole process: more of them, and no policy is asked
#: in a thread until one returns.
_HANGING: Final = 64


class AttachContext(msgspec.Struct, frozen=True):
    """What a policy decides about (resumable-sessions §7.1).

    Attributes:
        session_id: the session that is asked for. It need not exist.
        actor: who asks, as far as that is known: an object with an `id`, or None.
        surface: the name that this side has for the place that is attached by, "unknown" without one.
        capability: what the client sent as its token, unchanged: any JSON value, None without one.
        from_offset: the first record that is asked for.
        transport: what this side knows of the link: `{"kind": …, "peer": …}` or None. It never comes
            from a frame.
    """

    session_id: str
    actor: Any
    surface: Any
    capability: Any
    from_offset: int
    transport: Any

    def __repr__(self) -> str:
        # A token opens a session, and what is shown ends in logs.
        shown = "None" if self.capability is None else "…"
        return (
            f"AttachContext(session_id={self.session_id!r}, actor={self.actor!r}, "
            f"surface={self.surface!r}, capability={shown}, from_offset={self.from_offset}, "
            f"transport={self.transport!r})"
        )


class Grant(msgspec.Struct):
    """What a policy returns to admit somebody, to history and live records both (§11.2).

    Attributes:
        actor: who it is: an object with a string `id`.
        session_id: the session that was asked for.
        via: by what it was granted: anything but None, e.g. "local_node".
        scope: "attach".
        expires_at: until when, in whole seconds since 1970, or None.
        lens: reserved.
    """

    actor: Any
    session_id: Any
    via: Any
    scope: Any = "attach"
    expires_at: int | None = None
    lens: None = None


class AttachRefused(Exception):
    """What a policy raises to say no. The reason is for logs: every refusal looks alike on the wire.

    Attributes:
        reason: one word or a few.
    """

    def __init__(self, reason: str = "refused") -> None:
        super().__init__(reason)
        self.reason = reason


class Denied(msgspec.Struct, frozen=True):
    """Nobody is admitted; why, for logs alone (§11.1).

    Attributes:
        reason: "policy_error" (it said no), "policy_crash", "policy_timeout", "policy_infra" (it could
            not be asked), "non_conforming_return", "malformed_grant", "scope_not_allowed" or
            "grant_session_mismatch".
        detail: what is known besides: the policy's own reason, the type of its exception, the
            member that is wrong.
    """

    reason: str
    detail: str = ""


#: An `async` or a plain function, or an object that is called like one. A plain one is called in a
#: thread of its own, where it may block.
Policy: TypeAlias = Callable[[AttachContext], Grant | Awaitable[Grant]]


def attach_denied() -> RequestError:
    """The one answer to whoever is not admitted, for whatever reason: -32000, without data (§12)."""
    return RequestError(-32000, "attach denied")


async def admit(
    policy: Policy | None, context: AttachContext, *, timeout: float = 5.0
) -> Grant | Denied:
    """Ask a policy; the one way to be admitted (resumable-sessions §11.1, CDI-1, CDI-3, AP1).

    It never raises for anything that a policy does, not for `SystemExit` either. A policy that is not
    done in time is cancelled, and left behind if that does not end it; a plain function that hangs
    keeps a daemon thread until it returns, and neither the loop nor the end of the process waits.
    An `async` policy that blocks blocks the loop, like any other coroutine.

    Cancelling it cancels the policy.

    Args:
        policy: whom to ask; None denies.
        context: about what.
        timeout: how long it may take, in seconds.

    Returns:
        A grant of its own, which no policy holds, or why there is none.
    """
    verdict = await _ask(policy, context, timeout)
    if isinstance(verdict, Denied):
        # A policy that says no does its work; all else is a fault of it, or of its surroundings.
        log.log(
            logging.INFO if verdict.reason == "policy_error" else logging.WARNING,
            "an attach to session %r was denied: %s (%s)",
            context.session_id,
            verdict.reason,
            verdict.detail,
        )
    return verdict


async def _ask(policy: Policy | None, context: AttachContext, timeout: float) -> Grant | Denied:
    if policy is None:
        return Denied("policy_crash", "there is no policy")
    asking = _asking(policy, context)
    try:
        task = asyncio.get_running_loop().create_task(asking, name="antiphon attach policy")
    except Exception as error:  # noqa: BLE001  (a task factory is other people's code, too)
        asking.close()
        return Denied("policy_infra", type(error).__name__)
    _asked.add(task)
    task.add_done_callback(_ended)
    try:
        await asyncio.wait([task], timeout=timeout)
        if task.done() and not task.cancelled():
            return _verdict(task.result(), context)
        task.cancel()
        await asyncio.wait([task], timeout=_GRACE)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        log.error("an attach policy ignores its cancellation and is left behind: %r", task)
    return Denied("policy_timeout", f"{timeout:g} s")


#: The tasks that ask; the loop keeps none that nobody holds.
_asked: set[asyncio.Task[_Outcome]] = set()


class _Outcome(NamedTuple):
    """What a policy returned, or what it raised, or why it was not asked."""

    value: Any = None
    error: BaseException | None = None
    infra: str = ""


def _ended(task: asyncio.Task[_Outcome]) -> None:
    _asked.discard(task)
    if not task.cancelled():
        task.exception()


async def _asking(policy: Policy, context: AttachContext) -> _Outcome:
    """Call it and wait for it, and return what it raises: nothing of it may reach the loop."""
    try:
        if _is_async(policy):
            returned: Any = policy(context)
        else:
            outcome = await _in_thread(policy, context)
            if outcome.error is not None or outcome.infra:
                return outcome
            returned = outcome.value
        return _Outcome(await returned if inspect.isawaitable(returned) else returned)
    except BaseException as error:  # noqa: BLE001  (the boundary)
        return _Outcome(error=error)


def _is_async(policy: Policy) -> bool:
    """Whether calling it only makes a coroutine, which is nothing that can block."""
    called = inspect.getattr_static(type(policy), "__call__", None)
    return inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(called)


class _Hanging:
    """How many threads have been left behind in a policy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


_hanging = _Hanging()


async def _in_thread(policy: Policy, context: AttachContext) -> _Outcome:
    """Call a plain function where it may hang. Cancelled, it leaves the thread behind."""
    if _hanging.count >= _HANGING:
        return _Outcome(infra=f"{_HANGING} policies hang")
    call = _Call(policy, context)
    try:
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(call.run,),
            name="antiphon attach policy",
            daemon=True,
        ).start()
    except RuntimeError as error:  # no more threads
        return _Outcome(infra=str(error))
    try:
        return await call.outcome
    except asyncio.CancelledError:
        call.leave()
        raise


class _Call:
    """One call in a thread: its outcome is brought to the loop, if anybody still waits for it."""

    def __init__(self, policy: Policy, context: AttachContext) -> None:
        self._policy = policy
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[_Outcome] = self._loop.create_future()
        # Both under `_hanging.lock`: a call has returned, or is counted, or neither.
        self._returned = False
        self._left = False

    def run(self) -> None:
        try:
            outcome = _Outcome(self._policy(self._context))
        except BaseException as error:  # noqa: BLE001  (the boundary)
            outcome = _Outcome(error=error)
        with _hanging.lock:
            self._returned = True
            if self._left:
                _hanging.count -= 1
        try:
            self._loop.call_soon_threadsafe(self._settle, outcome)
        except RuntimeError:  # the loop has ended
            _forget(outcome)

    def _settle(self, outcome: _Outcome) -> None:
        if self.outcome.done():
            _forget(outcome)
        else:
            self.outcome.set_result(outcome)

    def leave(self) -> None:
        with _hanging.lock:
            if not self._returned:
                self._left = True
                _hanging.count += 1


def _forget(outcome: _Outcome) -> None:
    """A coroutine that nobody will await says so, at length."""
    if inspect.iscoroutine(outcome.value):
        outcome.value.close()


# ------------------------------------------------------------------ what a policy's outcome means


def _verdict(outcome: _Outcome, context: AttachContext) -> Grant | Denied:
    try:
        if outcome.infra:
            return Denied("policy_infra", outcome.infra)
        if outcome.error is not None:
            return _raised(outcome.error)
        return _returned(outcome.value, context)
    except BaseException as error:  # noqa: BLE001  (a value that is looked at may still be code)
        return Denied("malformed_grant", type(error).__name__)


def _raised(error: BaseException) -> Denied:
    if isinstance(error, AttachRefused):
        return Denied("policy_error", str(error.reason))
    log.warning("an attach policy failed", exc_info=error)
    return Denied("policy_crash", type(error).__name__)


def _returned(value: Any, context: AttachContext) -> Grant | Denied:
    name = type(value).__name__
    if isinstance(value, Grant):
        return _checked(value, context)
    if isinstance(value, Denied):
        return Denied("policy_error", value.reason)
    if isinstance(value, AttachRefused):
        return Denied("policy_error", str(value.reason))
    if isinstance(value, BaseException):
        return Denied("policy_error", name)
    if isinstance(value, Mapping) or _is_wrapped(value):
        return Denied("malformed_grant", name)
    return Denied("non_conforming_return", name)


def _is_wrapped(value: Any) -> bool:
    """`("ok", …)`, the way in which other languages return."""
    if not isinstance(value, (tuple, list)):
        return False
    items = cast("Sequence[Any]", value)
    return len(items) == 2 and isinstance(items[0], str) and items[0] == "ok"


def _checked(grant: Grant, context: AttachContext) -> Grant | Denied:
    # Each member is read once: what is admitted is what was looked at.
    actor, session_id, via = grant.actor, grant.session_id, grant.via
    scope, expires_at, lens = grant.scope, grant.expires_at, cast("Any", grant.lens)
    if isinstance(scope, str) and scope not in _SCOPES:
        return Denied("scope_not_allowed", scope)
    if not isinstance(scope, str):
        return Denied("malformed_grant", "scope")
    if not isinstance(actor, Mapping):
        return Denied("malformed_grant", "actor")
    who = dict(cast("Mapping[str, Any]", actor))
    if not isinstance(who.get("id"), str):
        return Denied("malformed_grant", "actor")
    if not isinstance(session_id, str):
        return Denied("malformed_grant", "session_id")
    if via is None or via is msgspec.UNSET:
        return Denied("malformed_grant", "via")
    if expires_at is not None and type(expires_at) is not int:
        return Denied("malformed_grant", "expires_at")
    if lens is not None:
        # Nothing here can narrow what is shown, so a grant that asks for it opens nothing.
        return Denied("malformed_grant", "lens")
    if session_id != context.session_id:
        return Denied("grant_session_mismatch")
    return Grant(who, session_id, via, scope, expires_at)
