"""An agent of ours that keeps no sessions itself: `our_durable_agent.py JOURNAL` has them in a journal."""

from __future__ import annotations

import sys

from antiphon import Agent, Capabilities, Turn, serve_stdio
from antiphon.journal import SqliteJournal
from antiphon.schema import v1


class Notes(Agent):
    """Says what it was told, and how much it was told before."""

    capabilities = Capabilities(
        modes=(v1.SessionMode(id="ask", name="Ask"), v1.SessionMode(id="code", name="Code"))
    )

    async def prompt(self, turn: Turn) -> None:
        before = [update async for update in turn.session.history()]
        async with turn.tool("count", tool_call_id=f"t{len(before)}"):
            await turn.say(f"{turn.text}, behind {len(before) - 1}")


if __name__ == "__main__":
    serve_stdio(Notes(), journal=SqliteJournal(sys.argv[1]))
