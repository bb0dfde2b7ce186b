"""Sessions of both sides: turns, ordered delivery, the permission round trip.

Leaves storage to the journal and the wire to `runtime`. Names are loaded on first use: an agent loads
nothing of the client's side, and without a journal nothing of that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.sessions._agent_peer import AgentPeer, SessionOpening
    from antiphon.sessions._agent_router import AgentContext
    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._attach_frames import History, SessionRecord
    from antiphon.sessions._attachment import Capability
    from antiphon.sessions._client_peer import ClientPeer
    from antiphon.sessions._client_router import ClientContext, as_observer
    from antiphon.sessions._durability import Durability, Role
    from antiphon.sessions._extension import Extensions, extension, find_extensions
    from antiphon.sessions._inbox import Observer, Subscription
    from antiphon.sessions._relink import Reattach
    from antiphon.sessions._session import PromptOutcome, PromptTurn, Session
    from antiphon.sessions._terminal import ExitStatus, Terminal
    from antiphon.sessions._turn import PermissionAnswer, ToolCallVerbs, Turn, UrlElicitation
    from antiphon.sessions._update import Label, Update
    from antiphon.sessions._view import CompactionView, MessageView, SessionView, ToolCallView

__all__ = [
    "AgentContext",
    "AgentPeer",
    "AgentSession",
    "Capability",
    "ClientContext",
    "ClientPeer",
    "CompactionView",
    "Durability",
    "ExitStatus",
    "Extensions",
    "History",
    "Label",
    "MessageView",
    "Observer",
    "PermissionAnswer",
    "PromptOutcome",
    "PromptTurn",
    "Reattach",
    "Role",
    "Session",
    "SessionOpening",
    "SessionRecord",
    "SessionView",
    "Subscription",
    "Terminal",
    "ToolCallVerbs",
    "ToolCallView",
    "Turn",
    "Update",
    "UrlElicitation",
    "as_observer",
    "extension",
    "find_extensions",
]

#: Where each public name lives.
_HOMES = {
    "AgentContext": "_agent_router",
    "AgentPeer": "_agent_peer",
    "AgentSession": "_agent_session",
    "Capability": "_attachment",
    "ClientContext": "_client_router",
    "ClientPeer": "_client_peer",
    "CompactionView": "_view",
    "Durability": "_durability",
    "ExitStatus": "_terminal",
    "Extensions": "_extension",
    "History": "_attach_frames",
    "Label": "_update",
    "MessageView": "_view",
    "Observer": "_inbox",
    "PermissionAnswer": "_turn",
    "PromptOutcome": "_session",
    "PromptTurn": "_session",
    "Reattach": "_relink",
    "Role": "_durability",
    "Session": "_session",
    "SessionOpening": "_agent_peer",
    "SessionRecord": "_attach_frames",
    "SessionView": "_view",
    "Subscription": "_inbox",
    "Terminal": "_terminal",
    "ToolCallVerbs": "_turn",
    "ToolCallView": "_view",
    "Turn": "_turn",
    "Update": "_update",
    "UrlElicitation": "_turn",
    "as_observer": "_client_router",
    "extension": "_extension",
    "find_extensions": "_extension",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
