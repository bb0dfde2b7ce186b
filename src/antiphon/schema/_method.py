"""The row of the method table, and the base of every wire struct.

The rows themselves are generated (`v1.METHODS`, `v1_unstable.METHODS`); routing, typed calls,
capability gates and handler classes all derive from them, so that they cannot disagree.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["Method", "Wire"]


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One method of the protocol.

    A wire name may stand in two rows: as a request and as a notification, or once for each side.
    """

    #: Wire name, e.g. "session/new".
    name: str
    #: Who handles it.
    side: Literal["agent", "client", "both"]
    kind: Literal["request", "notification"]
    #: Type of the parameters: a struct, or a union whose structs `variants` lists.
    params: Any
    #: Type of the result; None for a notification.
    result: Any
    #: Dotted path, in wire names, inside the handling side's capabilities, e.g.
    #: "sessionCapabilities.list". What stands there must be true or an object. None: no such gate.
    gate: str | None
    #: Name of the Python method of a handler class.
    handler: str
    #: False while upstream calls it unstable.
    stable: bool


class Wire(msgspec.Struct, rename="camel", gc=False, repr_omit_defaults=True):
    """Base of every generated struct.

    A member that was absent is `UNSET` (false in a condition), null is None, and what is set is
    always written, an empty list too. Unknown members are dropped when decoding. The cycle
    collector does not track the structs: they hold JSON values, which form no cycles.
    """
