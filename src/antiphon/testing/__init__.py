"""For tests of agents and clients: peers that say anything, pairs, faults, time that jumps, laws.

Sits on top of everything and is imported by nothing of the library. The names are loaded on first
use, because the pytest plugin beside them is loaded in every pytest run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.testing._faults import ByteTransport, Faults, byte_pair
    from antiphon.testing._journal_laws import JournalLaw, journal_laws
    from antiphon.testing._pairs import (
        joined,
        raw_agent,
        raw_client,
        raw_pair,
        unshaken_agent,
        unshaken_client,
    )
    from antiphon.testing._raw_peer import RawPeer, Recorder
    from antiphon.testing._virtual_time import Stuck, VirtualTimeLoop, run_virtual
    from antiphon.transports import memory_pair

__all__ = [
    "ByteTransport",
    "Faults",
    "JournalLaw",
    "RawPeer",
    "Recorder",
    "Stuck",
    "VirtualTimeLoop",
    "byte_pair",
    "joined",
    "journal_laws",
    "memory_pair",
    "raw_agent",
    "raw_client",
    "raw_pair",
    "run_virtual",
    "unshaken_agent",
    "unshaken_client",
]

_HOMES = {
    "ByteTransport": "antiphon.testing._faults",
    "Faults": "antiphon.testing._faults",
    "JournalLaw": "antiphon.testing._journal_laws",
    "RawPeer": "antiphon.testing._raw_peer",
    "Recorder": "antiphon.testing._raw_peer",
    "Stuck": "antiphon.testing._virtual_time",
    "VirtualTimeLoop": "antiphon.testing._virtual_time",
    "byte_pair": "antiphon.testing._faults",
    "joined": "antiphon.testing._pairs",
    "journal_laws": "antiphon.testing._journal_laws",
    "memory_pair": "antiphon.transports",
    "raw_agent": "antiphon.testing._pairs",
    "raw_client": "antiphon.testing._pairs",
    "raw_pair": "antiphon.testing._pairs",
    "run_virtual": "antiphon.testing._virtual_time",
    "unshaken_agent": "antiphon.testing._pairs",
    "unshaken_client": "antiphon.testing._pairs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
