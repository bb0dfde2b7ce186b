"""The protocol without I/O: frames to messages, ids, call states, limits.

No asyncio, no clock, no files: `transports` moves the bytes, `runtime` decides when.
"""

from antiphon.core._framer import Fault, LineFramer, join_frames
from antiphon.core._limits import Limits

__all__ = ["Fault", "Limits", "LineFramer", "join_frames"]
