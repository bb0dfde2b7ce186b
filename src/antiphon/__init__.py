"""Antiphon: the Agent Client Protocol (ACP) for Python, both roles.

An agent subclasses `Agent` and is served by `serve_stdio`; a client calls `spawn` and prompts
`Session`s. Names are loaded on first use: `import antiphon` loads no protocol version, no asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from antiphon._version import __version__

if TYPE_CHECKING:
    from antiphon._agent import Agent, DurableAgent
    from antiphon._capabilities import Capabilities
    from antiphon._client import Client
    from antiphon._connect import connect, run_stdio, serve, serve_stdio, spawn
    from antiphon._errors import (
        AntiphonError,
        AttachmentClosed,
        AuthRequired,
        CapabilityError,
        ConnectionClosed,
        DeliveryGap,
        InternalError,
        InvalidParams,
        InvalidRequest,
        JournalDamaged,
        JournalError,
        JournalInUse,
        LimitExceeded,
        LocalProtocolError,
        MethodNotFound,
        MissingExtra,
        NotInitialized,
        ParseError,
        RemoteProtocolError,
        RequestCancelled,
        RequestError,
        RequestTimeout,
        ResourceNotFound,
        SilenceTimeout,
        StartError,
        TurnHeld,
        TurnInProgress,
        TurnOver,
        VersionMismatch,
    )
    from antiphon._serving import AgentServer, serve_tcp, serve_unix
    from antiphon.core import Limits
    from antiphon.runtime import DEFERRED, Context, Reply, TelemetryEvent
    from antiphon.schema import UNSET, UnknownUpdate
    from antiphon.sessions import (
        AgentContext,
        AgentPeer,
        AgentSession,
        ClientContext,
        ClientPeer,
        CompactionView,
        Durability,
        ExitStatus,
        MessageView,
        PermissionAnswer,
        PromptOutcome,
        PromptTurn,
        Reattach,
        Session,
        SessionRecord,
        SessionView,
        Terminal,
        ToolCallView,
        Turn,
        Update,
        UrlElicitation,
        extension,
    )

__all__ = [
    "DEFERRED",
    "UNSET",
    "Agent",
    "AgentContext",
    "AgentPeer",
    "AgentServer",
    "AgentSession",
    "AntiphonError",
    "AttachmentClosed",
    "AuthRequired",
    "Capabilities",
    "CapabilityError",
    "Client",
    "ClientContext",
    "ClientPeer",
    "CompactionView",
    "ConnectionClosed",
    "Context",
    "DeliveryGap",
    "Durability",
    "DurableAgent",
    "ExitStatus",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "JournalDamaged",
    "JournalError",
    "JournalInUse",
    "LimitExceeded",
    "Limits",
    "LocalProtocolError",
    "MessageView",
    "MethodNotFound",
    "MissingExtra",
    "NotInitialized",
    "ParseError",
    "PermissionAnswer",
    "PromptOutcome",
    "PromptTurn",
    "Reattach",
    "RemoteProtocolError",
    "Reply",
    "RequestCancelled",
    "RequestError",
    "RequestTimeout",
    "ResourceNotFound",
    "Session",
    "SessionRecord",
    "SessionView",
    "SilenceTimeout",
    "StartError",
    "TelemetryEvent",
    "Terminal",
    "ToolCallView",
    "Turn",
    "TurnHeld",
    "TurnInProgress",
    "TurnOver",
    "UnknownUpdate",
    "Update",
    "UrlElicitation",
    "VersionMismatch",
    "__version__",
    "connect",
    "extension",
    "run_stdio",
    "serve",
    "serve_stdio",
    "serve_tcp",
    "serve_unix",
    "spawn",
]

#: Where each public name lives; what is not here is an error of `antiphon._errors`.
_HOMES = {
    "Agent": "_agent",
    "DurableAgent": "_agent",
    "Capabilities": "_capabilities",
    "Client": "_client",
    "connect": "_connect",
    "run_stdio": "_connect",
    "serve": "_connect",
    "serve_stdio": "_connect",
    "spawn": "_connect",
    "AgentServer": "_serving",
    "serve_tcp": "_serving",
    "serve_unix": "_serving",
    "Limits": "core",
    "Context": "runtime",
    "DEFERRED": "runtime",
    "Reply": "runtime",
    "TelemetryEvent": "runtime",
    "UNSET": "schema",
    "UnknownUpdate": "schema",
    "AgentContext": "sessions",
    "AgentPeer": "sessions",
    "AgentSession": "sessions",
    "ClientContext": "sessions",
    "ClientPeer": "sessions",
    "CompactionView": "sessions",
    "Durability": "sessions",
    "ExitStatus": "sessions",
    "MessageView": "sessions",
    "PermissionAnswer": "sessions",
    "PromptOutcome": "sessions",
    "PromptTurn": "sessions",
    "Reattach": "sessions",
    "Session": "sessions",
    "SessionRecord": "sessions",
    "SessionView": "sessions",
    "Terminal": "sessions",
    "ToolCallView": "sessions",
    "Turn": "sessions",
    "Update": "sessions",
    "UrlElicitation": "sessions",
    "extension": "sessions",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    home = import_module(f"antiphon.{_HOMES.get(name, '_errors')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
