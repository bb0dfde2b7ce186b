"""What a service knows of the call it serves, and the question it asks before it acts.

Services do not know the runtime: they take any context with a session id and that session's roots.
Deciding is left to the guard (a person, a rule, `Permissions`), carrying out to the services.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Literal, Protocol, TypeVar

import msgspec

from antiphon._errors import InternalError, InvalidParams, RequestError

__all__ = ["Guard", "Operation", "ServiceContext", "given", "permit", "refusal"]

_T = TypeVar("_T")


class ServiceContext(Protocol):
    """The part of a handler's `ctx` that services use."""

    @property
    def session_id(self) -> str:
        """The session on whose behalf the agent calls."""
        ...

    @property
    def roots(self) -> Sequence[str]:
        """The session's `cwd`, then its `additionalDirectories`: absolute paths."""
        ...


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent wants done, in the words in which a person or a rule decides it.

    Attributes:
        kind: "read" or "write" for a file, "execute" for a command.
        session_id: the session on whose behalf the agent asks.
        title: one line for a person. For a command it is the whole line that will run.
        path: of a file: the one that will be read or written, every link resolved.
        requested: of a file: the path as the agent wrote it. It is for showing; what is decided
            is `path`.
        command: of a command: the argument list exactly as it will be run, shell included.
        cwd: of a command: the directory it will run in, every link resolved.
        env: of a command: what the agent adds to its environment. It can change the meaning of a
            command that looks harmless (`PATH`, `LD_PRELOAD`).
        roots: the session's directories, as it names them, its `cwd` first; then all directories
            that are lent, by their real paths.
    """

    kind: Literal["read", "write", "execute"]
    session_id: str
    title: str
    path: str | None = None
    requested: str | None = None
    command: list[str] | None = None
    cwd: str | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    roots: tuple[str, ...] = ()


#: Asked before every write and every command, and before reads where that is wanted; anything but
#: True refuses. Async, or a plain function, which must not block.
Guard = Callable[[Operation], Awaitable[bool] | bool]


def given(value: _T | msgspec.UnsetType | None, otherwise: _T) -> _T:
    """What the peer gave for an optional member; `otherwise` where it is absent or null."""
    return otherwise if value is None or value is msgspec.UNSET else value


def refusal(reason: str, **facts: object) -> RequestError:
    """-32602: the parameters ask for what this service will not do, `data.reason` says why."""
    return InvalidParams({"reason": reason, **facts})


async def permit(guard: Guard | None, operation: Operation) -> None:
    """Return if `guard` allows the operation or there is none to ask.

    Raises:
        RequestError: -32603 with reason `permission_denied`, for every answer but True.

    What the guard itself raises passes through, so that a broken guard allows nothing.
    """
    if guard is None:
        return
    answer: object = guard(operation)
    if isawaitable(answer):
        answer = await answer
    if answer is not True:
        raise denied()


def denied() -> RequestError:
    """The answer to an operation that was not allowed."""
    return InternalError({"reason": "permission_denied"}, "Permission denied")
