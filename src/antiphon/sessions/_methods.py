"""The method table as the two sides use it: rows, gates, patience, and what results are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from antiphon._errors import LocalProtocolError, RemoteProtocolError
from antiphon.schema import (
    Method,
    UnsetType,
    Wire,
    decode_result,
    encode_checked,
    v1_unstable,
    variants,
)

if TYPE_CHECKING:
    from antiphon.core import Limits

__all__ = [
    "PROTOCOL_VERSION",
    "Table",
    "allowed_by",
    "default_timeout",
    "encode_result_of",
    "or_none",
    "read_result",
    "refuse_unstable",
    "table",
    "tag_of",
    "tree_of",
]

T = TypeVar("T")

#: The newest protocol version this library speaks; v1 has one.
PROTOCOL_VERSION = 1

#: Requests that a person answers, in so much time as for a permission. Before a file is lent or a
#: command is run, a client may ask one as well.
_ASKED = frozenset(
    (
        *("authenticate", "elicitation/create", "session/request_permission"),
        *("fs/read_text_file", "fs/write_text_file", "terminal/create"),
    )
)
#: Requests that take as long as what they wait for.
_ENDLESS = frozenset(("session/prompt", "terminal/wait_for_exit", "mcp/message"))


class Table:
    """All methods of the superset, `v1_unstable`."""

    def __init__(self, methods: tuple[Method, ...]) -> None:
        self.requests: dict[str, dict[str, Method]] = {"agent": {}, "client": {}}
        self.notifications: dict[str, dict[str, Method]] = {"agent": {}, "client": {}}
        self._by_params: dict[type[Any], list[Method]] = {}
        self._found: dict[tuple[type[Any], str, str], Method] = {}
        for row in methods:
            kinds = self.requests if row.kind == "request" else self.notifications
            for side in ("agent", "client") if row.side == "both" else (row.side,):
                kinds[side][row.name] = row
            for variant in variants(row.params):
                self._by_params.setdefault(variant, []).append(row)

    def row_of(self, params: Any, kind: str, side: str) -> Method:
        """The row that parameters of this type belong to, sent to `side`.

        Raises:
            TypeError: no method of that side takes them.
        """
        return self.row_of_class(params.__class__, kind, side)

    def row_of_class(self, cls: type[Any], kind: str, side: str) -> Method:
        """The same by the class of the parameters."""
        key = (cls, kind, side)
        row = self._found.get(key)
        if row is None:
            row = self._find(cls, kind, side)
            if row is not None and issubclass(cls, Wire):  # a bound on what is remembered
                self._found[key] = row
        if row is not None:
            return row
        msg = f"no {kind} to the {side} takes {cls.__name__}"
        raise TypeError(msg)

    def _find(self, params: type[Any], kind: str, side: str) -> Method | None:
        # The row of the class itself or of a base (a user's subclass), else that of a subclass: a v1
        # class stands for its superset in the table.
        kin = [*params.__mro__, *(known for known in self._by_params if issubclass(known, params))]
        for known in kin:
            for row in self._by_params.get(known, ()):
                if row.kind == kind and row.side in (side, "both"):
                    return row
        return None


@functools.cache
def table() -> Table:
    """The table, made on first use."""
    return Table(v1_unstable.METHODS)


def allowed_by(capabilities: Any, gate: str | None) -> bool:
    """Whether a gate is open in a capability tree (runtime-semantics §13).

    `capabilities` is the tree as builtins. What stands at the path must be true or an object: an
    empty one counts, null and false do not.
    """
    if gate is None:
        return True
    node: Any = capabilities
    for name in gate.split("."):
        if not isinstance(node, Mapping):
            return False
        node = cast("Mapping[str, Any]", node).get(name)
    return node is True or isinstance(node, Mapping)


def tree_of(capabilities: Any) -> Any:
    """A capability struct as builtins, for `allowed_by`."""
    return None if isinstance(capabilities, UnsetType) else msgspec.to_builtins(capabilities)


def or_none(value: T | UnsetType) -> T | None:
    """A member of a struct, None where it is absent."""
    return None if isinstance(value, UnsetType) else value


def default_timeout(limits: Limits, method: str) -> float | None:
    """How long to wait for an answer when the caller does not say."""
    if method in _ENDLESS:
        return None
    return limits.permission_timeout if method in _ASKED else limits.request_timeout


def refuse_unstable(row: Method, *, unstable: bool) -> None:
    """Raise `LocalProtocolError` for an unstable method on a connection without `unstable=True`."""
    if not row.stable and not unstable:
        msg = f"{row.name} is unstable: pass unstable=True to use it"
        raise LocalProtocolError(msg)


def read_result(method: str, result_type: Any, raw: Any) -> Any:
    """The typed result in an answer to `method`. Raises `RemoteProtocolError` for a malformed one."""
    try:
        return decode_result(result_type, raw)
    except msgspec.DecodeError as fault:
        raise RemoteProtocolError(f"the answer to {method} is malformed: {fault}") from None


def encode_result_of(row: Method) -> Callable[[Any], bytes]:
    """How a handler's value becomes the result: the method's own struct, or None for a void method."""
    if row.result is Any:  # what is forwarded may be any JSON
        return encode_checked
    empty_allowed = not _required_members(row.result)
    # A struct of v1 may stand for its superset, and a subclass of a user for either: what they have in
    # common is a class of the protocol.
    kin = {known for kind in variants(row.result) for known in kind.__mro__} - set(Wire.__mro__)

    def encode_value(value: Any) -> bytes:
        if value is None and empty_allowed:
            return b"{}"
        if kin.isdisjoint(type(value).__mro__):
            msg = f"the handler of {row.name} returned {type(value).__name__}, not a result of it"
            raise TypeError(msg)
        return encode_checked(value)

    return encode_value


def _required_members(result: Any) -> bool:
    if not isinstance(result, msgspec.StructMeta):  # a union: every variant has its tag
        return True
    # Not `msgspec.structs.fields`, which resolves the types of all members.
    defaults = result.__struct_defaults__
    return len(defaults) < len(result.__struct_fields__) or msgspec.NODEFAULT in defaults


def tag_of(value: Any) -> str:
    """The tag of a variant, "" for what has none (e.g. `UnknownUpdate`)."""
    config = getattr(value, "__struct_config__", None)
    tag = None if config is None else config.tag
    return tag if isinstance(tag, str) else ""
