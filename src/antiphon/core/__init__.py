"""The protocol without I/O: frames to messages, ids, call states, limits.

No asyncio, no clock, no files: `transports` moves the bytes, `runtime` decides when.
"""

from antiphon.core._framer import Fault, LineFramer, escape_separators, join_frames
from antiphon.core._limits import Limits
from antiphon.core._protocol import (
    Event,
    Ignored,
    NotificationEvent,
    Protocol,
    Refusal,
    RequestEvent,
    ResponseEvent,
    Side,
    UpdateEvent,
    error_frame,
)

__all__ = [
    "Event",
    "Fault",
    "Ignored",
    "Limits",
    "LineFramer",
    "NotificationEvent",
    "Protocol",
    "Refusal",
    "RequestEvent",
    "ResponseEvent",
    "Side",
    "UpdateEvent",
    "error_frame",
    "escape_separators",
    "join_frames",
]
