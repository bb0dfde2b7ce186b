"""An agent whose turns a test plays, and the frames that a raw client prompts it with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from antiphon import Agent, Turn
from antiphon.schema import v1
from antiphon.testing import RawPeer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon import AgentSession

__all__ = ["Played", "cancel", "chunk", "new_session", "prompt", "texts"]


class Played(Agent):
    """Its turns are what `play` does; sessions are called s1, s2, …."""

    def __init__(self, play: Callable[[Turn], Awaitable[Any]] | None = None) -> None:
        self.play = play
        self.sessions = 0
        #: The sessions of the last connection, by id.
        self.sessions_of: dict[str, AgentSession] = {}
        #: The texts of the prompts whose handler began.
        self.begun: list[str] = []

    async def new_session(self, params: Any, ctx: Any) -> Any:
        self.sessions += 1
        self.sessions_of = ctx.peer.sessions
        return v1.NewSessionResponse(session_id=f"s{self.sessions}")

    async def prompt(self, turn: Turn) -> Any:
        self.begun.append(turn.text)
        return None if self.play is None else await self.play(turn)


async def new_session(raw: RawPeer) -> str:
    """Open a session."""
    answer = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
    session_id: str = answer["result"]["sessionId"]
    return session_id


def prompt(id_: Any, session_id: str, text: str = "go") -> dict[str, Any]:
    """A prompt, to be sent."""
    params = {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}
    return RawPeer.request(id_, "session/prompt", params)


def cancel(session_id: str) -> dict[str, Any]:
    """A `session/cancel`, to be sent."""
    return RawPeer.notification("session/cancel", {"sessionId": session_id})


def chunk(text: str) -> v1.AgentMessageChunk:
    """An update of an agent of ours."""
    return v1.AgentMessageChunk(content=v1.TextContent(text=text))


def texts(raw: RawPeer, session_id: str | None = None) -> list[str]:
    """What the chunks that came say, in order, of one session or all; a response is `"="` and its id."""
    found: list[str] = []
    for frame in raw.frames:
        if frame.get("method") == "session/update":
            params = frame["params"]
            if session_id in {None, params["sessionId"]}:
                found.append(params["update"]["content"]["text"])
        elif "method" not in frame:
            found.append(f"={frame['id']}")
    return found


async def turns(count: int = 5) -> None:
    """Let the loop turn: what is to happen at once has happened then."""
    for _ in range(count):
        await asyncio.sleep(0)
