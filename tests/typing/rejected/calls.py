"""Calls of the wrong type; a line that must be reported ends with `wrong`."""

from __future__ import annotations

from antiphon import Turn, spawn
from antiphon.schema import v1


async def client() -> None:
    async with spawn(["python", "agent.py"]) as agent:
        session = await agent.new_session(cwd=1)  # wrong
        await session.prompt(1)  # wrong
        await agent.request(v1.NewSessionResponse(session_id="s"))  # wrong
        answer = await agent.request(v1.ListSessionsRequest())
        answer.stop_reason  # wrong


async def agent(turn: Turn) -> None:
    await turn.say(1)  # wrong
    await turn.plan([1])  # wrong
    await turn.tool("Edit", colour="red")  # wrong
    v1.ToolCall(tool_call_id="1")  # wrong
    v1.NewSessionResponse("s")  # wrong
