"""`Client`: what a client author configures or subclasses."""

from __future__ import annotations

import asyncio
import functools
import logging
from inspect import isawaitable
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import msgspec

from antiphon._capabilities import Capabilities, as_capabilities, client_tree
from antiphon._errors import ENDING
from antiphon._handlers import ClientHandlers
from antiphon.schema import v1, v1_unstable
from antiphon.sessions import as_observer, find_extensions
from antiphon.sessions._methods import table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.services import Elicitation, Files, Terminals
    from antiphon.sessions import AgentPeer, ClientContext, Extensions, Observer

__all__ = ["Client", "Deciding"]

log = logging.getLogger("antiphon.client")

Decision: TypeAlias = "str | bool | v1.RequestPermissionResponse | None"
Decide: TypeAlias = "Callable[[v1.RequestPermissionRequest, Any], Decision | Awaitable[Decision]]"
#: How permission requests are decided: always the same way, or by asking a function.
Deciding: TypeAlias = "Literal['allow', 'deny'] | Decide"

#: An id of an option is kept together with its answer where it is no longer.
_SHORT_ID = 256
_ALLOWING = ("allow_once", "allow_always")
_REJECTING = ("reject_once", "reject_always")
_FILES = ("read_text_file", "write_text_file")
_TERMINALS = (
    "create_terminal",
    "terminal_output",
    "wait_for_terminal_exit",
    "kill_terminal",
    "release_terminal",
)
_ELICITATION = ("create_elicitation", "complete_elicitation")


class Client(ClientHandlers):
    """What a client lends an agent, and how it answers. Use it as it is, or subclass it.

    Handlers are named after the request type in snake case (`read_text_file`, `create_terminal`,
    `create_elicitation`, …) and take `(self, params, ctx)`; `ctx` is a `ClientContext`. Overriding one,
    or giving a service for it, advertises what it implies; everything else is not advertised and is
    answered -32601. A handler answers with an error by raising `RequestError`.

    Args:
        files: serves `fs/*`, e.g. `antiphon.services.Files(".")`.
        terminals: serves `terminal/*`, e.g. `antiphon.services.Terminals()`.
        permissions: "deny" (the default), "allow", `antiphon.services.Permissions`, or a function of
            (params, ctx), async or sync, that returns an offered option's id, True or False (an
            option is picked by its kind), None for "cancelled", or a whole response. What it raises
            refuses. A denial picks a reject option, else "cancelled", never an option that allows
            (R1-104). A sync one must not block: it holds up the event loop (with `antiphon.sync` it
            may). What has a `guard`, as `Permissions` has, becomes the guard of `files` and
            `terminals` that have none.
        elicitation: asks a person what the agent wants to know, by `antiphon.services.Elicitation`.
        on_update: called with each `Update` of every session, in order; sync or async. The next
            update and the answers about that session wait for it.

    Raises:
        ValueError: `permissions` is nothing of that, or a policy that could not guard `files` or
            `terminals`: another one does, or `files` writes without asking (`allow_write=True`).
        TypeError: `files` or `terminals` is a path or True, and no service.

    Attributes:
        info: name and version, sent as `clientInfo`; None sends "antiphon" and its version.
        capabilities: what overriding cannot express.
    """

    info: ClassVar[tuple[str, str] | v1.Implementation | None] = None
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(
        self,
        *,
        files: Files | None = None,
        terminals: Terminals | None = None,
        permissions: Deciding = "deny",
        elicitation: Elicitation | None = None,
        on_update: Observer | None = None,
    ) -> None:
        if permissions not in ("allow", "deny") and not callable(permissions):
            msg = f'permissions is "allow", "deny" or a function, not {permissions!r}'
            raise ValueError(msg)
        for name, lent in (("files", files), ("terminals", terminals)):
            if isinstance(cast("object", lent), str | PathLike | bool):
                raise TypeError(
                    f"{name} is an antiphon.services.{name.title()}, such as {name.title()}(), "
                    f"not {lent!r}"
                )
        self.files = files
        self.terminals = terminals
        self.permissions = permissions
        self.elicitation = elicitation
        if hasattr(permissions, "guard"):
            _guard(permissions, files, terminals)
        self.on_update = on_update

    async def request_permission(
        self, params: v1_unstable.RequestPermissionRequest, ctx: ClientContext
    ) -> v1.RequestPermissionResponse:
        """Decide as `permissions` says, failing closed."""
        decision: Decision
        if callable(self.permissions):
            try:
                answer: Any = self.permissions(params, ctx)
                decision = await answer if isawaitable(answer) else answer
            except ENDING:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (
                    task is None or task.cancelling()
                ):
                    raise
                log.exception("deciding a permission request failed; it is refused")
                decision = False
        else:
            decision = self.permissions == "allow"
        if isinstance(decision, v1.RequestPermissionResponse):
            outcome = decision.outcome
            if not isinstance(outcome, v1.SelectedPermissionOutcome):
                return decision
            if _offered(outcome.option_id, params.options):
                return decision
            decision = outcome.option_id
        return _outcome(_choose(decision, params.options))

    # -------------------------------------------------------------- for the runtime

    def decider(
        self,
    ) -> (
        Callable[[v1_unstable.RequestPermissionRequest], v1.RequestPermissionResponse | None] | None
    ):
        """What may decide in place of `request_permission`; None where something else is served for it.

        A subclass, an instance or `find_handler` may have put another there. Asked where the handler is
        looked for, which is once on a connection.
        """
        handler = self.find_handler("request_permission")
        own = (
            getattr(handler, "__func__", None) is Client.request_permission
            and getattr(handler, "__self__", None) is self
        )
        return self._decide_at_once if own else None

    def _decide_at_once(
        self, params: v1_unstable.RequestPermissionRequest
    ) -> v1.RequestPermissionResponse | None:
        """What `request_permission` answers where that is always the same; None where it has to run."""
        permissions = self.permissions
        if callable(permissions):
            return None
        option_id = _choose(permissions == "allow", params.options)
        # The same object for the same option, which need not be written twice.
        short = option_id is not None and len(option_id) <= _SHORT_ID
        return _kept_outcome(option_id) if short else _outcome(option_id)

    def find_handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
        """The handler of that name, or None where it is not implemented."""
        handler: Any = getattr(self, name, None)
        if handler is not None and getattr(type(self), name, None) is not getattr(
            ClientHandlers, name, None
        ):
            return cast("Callable[[Any, Any], Awaitable[Any]]", handler)
        if self.files is not None and name in _FILES:
            if name == "write_text_file" and not getattr(self.files, "writable", True):
                return None
            return getattr(self.files, name)  # type: ignore[no-any-return]
        if self.terminals is not None and name in _TERMINALS:
            return getattr(self.terminals, name)  # type: ignore[no-any-return]
        if self.elicitation is not None and name in _ELICITATION:
            return getattr(self.elicitation, name)  # type: ignore[no-any-return]
        return None

    def extensions(self) -> Extensions:
        """The extension methods by wire name and kind."""
        return find_extensions(self)

    def observers(self, peer: AgentPeer) -> Sequence[Observer]:
        """Who watches the updates of all sessions of a connection."""
        found: list[Observer] = []
        if self.on_update is not None:
            found.append(self.on_update)
        if type(self).session_update is not ClientHandlers.session_update:
            found.append(as_observer(self.session_update, peer))
        return found

    def advertised(self, *, unstable: bool) -> v1_unstable.ClientCapabilities:
        """The capabilities to send."""
        declared, asking = self.capabilities, self.elicitation
        if (
            asking is not None
            and type(self).create_elicitation is ClientHandlers.create_elicitation
        ):
            declared = msgspec.structs.replace(
                declared,
                elicitation_form=asking.form is not None,
                elicitation_url=asking.url is not None,
            )
        tree = client_tree(
            declared,
            table().requests["client"].values(),
            lambda name: self.find_handler(name) is not None,
            unstable=unstable,
        )
        return as_capabilities(v1_unstable.ClientCapabilities, tree)

    async def sessions_closed(self, session_ids: Sequence[str]) -> None:
        """Let go of what was lent to these sessions: their terminals end, their roots are forgotten.

        So are the answers that `Permissions` remembers for them.
        """
        for service in (self.files, self.terminals, self.permissions, self.elicitation):
            release = getattr(service, "release_session", None)
            if release is not None:
                for session_id in session_ids:
                    try:
                        await release(session_id)
                    except (*ENDING, asyncio.CancelledError):
                        raise
                    except BaseException:
                        log.exception("what was lent to session %s was not let go", session_id)


def _guard(policy: Any, *services: Any) -> None:
    """Put one policy before what the agent asks about and what it does without asking."""
    for service in services:
        other = getattr(getattr(service, "guard", None), "__self__", policy)
        if other is not policy and isinstance(other, type(policy)):
            # That one would go on deciding, and this one would seem to.
            msg = f"another policy guards these {type(service).__name__}: give each its own"
            raise ValueError(msg)
        if getattr(service, "allow_write", None) is True:
            msg = (
                "Files(allow_write=True) writes without asking, so no rule would hold a write: "
                'leave it out, and let a rule allow them, such as Rule("allow", kind="edit")'
            )
            raise ValueError(msg)
        if hasattr(service, "guard_with"):
            service.guard_with(policy.guard, reads=bool(getattr(policy, "concerns_reads", True)))


def _offered(option_id: str, options: Sequence[v1.PermissionOption]) -> bool:
    return any(option.option_id == option_id for option in options)


def _choose(decision: object, options: Sequence[v1.PermissionOption]) -> str | None:
    """The option that stands for a decision, None for "cancelled" (field fault 27).

    Only what was asked for allows: the id of an offered option, or True itself. A value of another
    type is a mistake in the deciding function, and refuses however true it looks.
    """
    if decision is None:
        return None
    if isinstance(decision, str) and _offered(decision, options):
        return decision
    if not isinstance(decision, bool):
        log.warning("%r is no offered option; the request is refused", decision)
    for kind in _ALLOWING if decision is True else _REJECTING:
        for option in options:
            if option.kind == kind:
                return option.option_id
    return None


@functools.lru_cache(maxsize=8)
def _kept_outcome(option_id: str | None) -> v1.RequestPermissionResponse:
    """The same, for who does not change it; kept, so that it is always the same object."""
    return _outcome(option_id)


def _outcome(option_id: str | None) -> v1.RequestPermissionResponse:
    if option_id is None:
        return v1.RequestPermissionResponse(outcome=v1.CancelledPermissionOutcome())
    return v1.RequestPermissionResponse(outcome=v1.SelectedPermissionOutcome(option_id=option_id))
