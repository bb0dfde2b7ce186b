"""One live connection: reading, writing, dispatch and the one boundary between exceptions and the wire.

Previous station of a frame: `core.Protocol`; next: the handler, by way of a `Router`. What a session is
and in which order its updates are seen is left to `antiphon.sessions`.
"""

from antiphon.runtime._connection import Connection
from antiphon.runtime._context import Context
from antiphon.runtime._incoming import InboundCall
from antiphon.runtime._outgoing import FutureCall, OutboundCall
from antiphon.runtime._reply import DEFERRED, Reply, deferrable
from antiphon.runtime._router import NoticeRoute, RequestRoute, Router
from antiphon.runtime._telemetry import EVENTS, EventSpec, TelemetryEvent

__all__ = [
    "DEFERRED",
    "EVENTS",
    "Connection",
    "Context",
    "EventSpec",
    "FutureCall",
    "InboundCall",
    "NoticeRoute",
    "OutboundCall",
    "Reply",
    "RequestRoute",
    "Router",
    "TelemetryEvent",
    "deferrable",
]
