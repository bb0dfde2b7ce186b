"""Sessions of both sides: turns, ordered delivery, the permission round trip.

Leaves storage to the journal and the wire to `runtime`. Importing it loads the protocol's types.
"""

from typing import TYPE_CHECKING, Any

from antiphon.sessions._agent_peer import AgentPeer, SessionOpening
from antiphon.sessions._agent_router import AgentContext
from antiphon.sessions._agent_session import AgentSession
from antiphon.sessions._attach_frames import History, SessionRecord
from antiphon.sessions._attachment import Capability
from antiphon.sessions._client_peer import ClientPeer
from antiphon.sessions._client_router import ClientContext, as_observer
from antiphon.sessions._extension import Extensions, extension, find_extensions
from antiphon.sessions._inbox import Observer, Subscription
from antiphon.sessions._relink import Reattach
from antiphon.sessions._session import PromptOutcome, PromptTurn, Session
from antiphon.sessions._terminal import ExitStatus, Terminal
from antiphon.sessions._turn import PermissionAnswer, ToolCallVerbs, Turn, UrlElicitation
from antiphon.sessions._update import Label, Update
from antiphon.sessions._view import CompactionView, MessageView, SessionView, ToolCallView

if TYPE_CHECKING:
    from antiphon.sessions._durability import Durability, Role

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


def __getattr__(name: str) -> Any:
    # An agent without a journal does not load it.
    if name not in {"Durability", "Role"}:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from antiphon.sessions import _durability

    return getattr(_durability, name)
