"""One live connection: reading, writing, dispatch and the one boundary between exceptions and the wire.

Previous station of a frame: `core.Protocol`; next: the handler, by way of a `Router`. What a session is
and in which order its updates are seen is left to `antiphon.sessions`.
"""

from antiphon.runtime._connection import Connection, FutureCall, InboundCall, OutboundCall
from antiphon.runtime._context import Context
from antiphon.runtime._router import NoticeRoute, RequestRoute, Router
from antiphon.runtime._telemetry import EVENTS, EventSpec, TelemetryEvent

__all__ = [
    "EVENTS",
    "Connection",
    "Context",
    "EventSpec",
    "FutureCall",
    "InboundCall",
    "NoticeRoute",
    "OutboundCall",
    "RequestRoute",
    "Router",
    "TelemetryEvent",
]
