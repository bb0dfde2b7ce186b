"""What a client says about an attach: the rider in the load's `_meta` (resumable-sessions §3).

Responsible for reading it, whatever is there. Leaves whether the client may to `_attach`, and what it
then gets to `_subscriber`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

__all__ = ["RAXOL", "HistoryPolicy", "Rider", "read_rider"]

#: The member of `_meta` that is this extension's.
RAXOL: Final = "raxol.io"

HistoryPolicy: TypeAlias = Literal["from_offset", "tip", "none"]

_POLICIES: Final[tuple[HistoryPolicy, ...]] = ("from_offset", "tip", "none")


class Rider(msgspec.Struct, frozen=True):
    """The rider of a load; all of its defaults where there is none.

    Attributes:
        from_offset: the first record that is wanted; 0 and 1 mean the same.
        history: "from_offset" (history from there, then live), "tip" (live only) or "none" (the high
            watermark only).
        capability: the token as the client gave it, also where it is no string: to refuse that is the
            policy's part. None where there is none.
        present: whether the load has a rider at all, which tells a client that knows offsets from one
            that does not (§6).
    """

    from_offset: int = 0
    history: HistoryPolicy = "from_offset"
    capability: Any = None
    present: bool = False

    def __repr__(self) -> str:
        # A token opens a session, and what is shown ends in logs.
        shown = "None" if self.capability is None else "…"
        return (
            f"Rider(from_offset={self.from_offset}, history={self.history!r}, "
            f"capability={shown}, present={self.present})"
        )


_ABSENT: Final = Rider()


def read_rider(meta: Any) -> Rider:
    """The rider in the `_meta` of a load's params, whatever is there; it never raises.

    What has no meaning where it stands is as if it were absent: garbling can narrow what a client
    gets, never widen it.

    Args:
        meta: the `_meta` as builtins, or None or `UNSET` where there is none.
    """
    raw = cast("dict[str, Any]", meta).get(RAXOL) if isinstance(meta, dict) else None
    if not isinstance(raw, dict):
        return _ABSENT
    rider = cast("dict[str, Any]", raw)
    start = rider.get("fromOffset")
    history = rider.get("historyPolicy")
    return Rider(
        # A bool is an int, and no offset.
        from_offset=start if type(start) is int and start >= 0 else 0,
        history=history if type(history) is str and history in _POLICIES else "from_offset",
        capability=rider.get("capability"),
        present=True,
    )
