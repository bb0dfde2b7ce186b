"""Sessions that survive: the append-only journal of a session, who may write it, who may read it.

Responsible for the journal's laws, stores, writers, subscribers, attach policies and tokens
(resumable-sessions). Leaves turns to `sessions` and frames' ways to transports: it knows no
connection. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon._errors import JournalDamaged, JournalError, JournalInUse, TurnHeld
    from antiphon.journal._record import (
        SESSION_CREATED,
        SESSION_UPDATE,
        STEER,
        TURN_COMPLETED,
        TURN_STARTED,
        Entry,
        FrameHeads,
        Record,
        tag_of_update,
        taint_of_update,
    )
    from antiphon.journal._store import Journal, SessionInfo, SessionLog

__all__ = [
    "SESSION_CREATED",
    "SESSION_UPDATE",
    "STEER",
    "TURN_COMPLETED",
    "TURN_STARTED",
    "Entry",
    "FrameHeads",
    "Journal",
    "JournalDamaged",
    "JournalError",
    "JournalInUse",
    "Record",
    "SessionInfo",
    "SessionLog",
    "TurnHeld",
    "tag_of_update",
    "taint_of_update",
]

#: Where each public name lives; what is not here is of `_record`.
_HOMES = {
    "Journal": "_store",
    "SessionInfo": "_store",
    "SessionLog": "_store",
}
_ERRORS = frozenset(("JournalDamaged", "JournalError", "JournalInUse", "TurnHeld"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    room = "antiphon._errors" if name in _ERRORS else f"{__name__}.{_HOMES.get(name, '_record')}"
    value = getattr(import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
