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
    from antiphon.journal._attach import (
        AttachContext,
        AttachRefused,
        Denied,
        Grant,
        Policy,
        admit,
        attach_denied,
    )
    from antiphon.journal._claims import Claims, unverified_claims
    from antiphon.journal._follower import Follower
    from antiphon.journal._issuer import Issuer, IssuerError, new_seed
    from antiphon.journal._keyring import Keyring, KeyringError
    from antiphon.journal._memory import MemoryJournal
    from antiphon.journal._policy import LocalNode
    from antiphon.journal._record import (
        SESSION_CREATED,
        SESSION_UPDATE,
        STEER,
        TURN_COMPLETED,
        TURN_STARTED,
        Entry,
        Record,
        tag_of_update,
        taint_of_update,
    )
    from antiphon.journal._rider import Rider, read_rider
    from antiphon.journal._sqlite import Damage, Loss, Pruned, SqliteJournal
    from antiphon.journal._store import Journal, SessionInfo, SessionLog
    from antiphon.journal._subscriber import Subscriber
    from antiphon.journal._tails import Tail
    from antiphon.journal._token import Token, verify_token
    from antiphon.journal._writer import Sender, Writer
    from antiphon.journal._writers import Writers

__all__ = [
    "SESSION_CREATED",
    "SESSION_UPDATE",
    "STEER",
    "TURN_COMPLETED",
    "TURN_STARTED",
    "AttachContext",
    "AttachRefused",
    "Claims",
    "Damage",
    "Denied",
    "Entry",
    "Follower",
    "Grant",
    "Issuer",
    "IssuerError",
    "Journal",
    "JournalDamaged",
    "JournalError",
    "JournalInUse",
    "Keyring",
    "KeyringError",
    "LocalNode",
    "Loss",
    "MemoryJournal",
    "Policy",
    "Pruned",
    "Record",
    "Rider",
    "Sender",
    "SessionInfo",
    "SessionLog",
    "SqliteJournal",
    "Subscriber",
    "Tail",
    "Token",
    "TurnHeld",
    "Writer",
    "Writers",
    "admit",
    "attach_denied",
    "new_seed",
    "read_rider",
    "tag_of_update",
    "taint_of_update",
    "unverified_claims",
    "verify_token",
]

#: Where each public name lives; what is not here is of `_record`.
_HOMES = {
    "AttachContext": "_attach",
    "AttachRefused": "_attach",
    "Claims": "_claims",
    "Damage": "_sqlite",
    "Denied": "_attach",
    "Follower": "_follower",
    "Grant": "_attach",
    "Issuer": "_issuer",
    "IssuerError": "_issuer",
    "Journal": "_store",
    "Keyring": "_keyring",
    "KeyringError": "_keyring",
    "LocalNode": "_policy",
    "Loss": "_sqlite",
    "MemoryJournal": "_memory",
    "Policy": "_attach",
    "Pruned": "_sqlite",
    "Rider": "_rider",
    "Sender": "_writer",
    "SessionInfo": "_store",
    "SessionLog": "_store",
    "SqliteJournal": "_sqlite",
    "Subscriber": "_subscriber",
    "Tail": "_tails",
    "Token": "_token",
    "Writer": "_writer",
    "Writers": "_writers",
    "admit": "_attach",
    "attach_denied": "_attach",
    "new_seed": "_issuer",
    "read_rider": "_rider",
    "unverified_claims": "_claims",
    "verify_token": "_token",
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
