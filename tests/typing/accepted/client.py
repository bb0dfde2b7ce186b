"""A client that runs a turn and lends files of its own."""

from __future__ import annotations

import asyncio
from typing import assert_type

from antiphon import (
    Client,
    CompactionView,
    MessageView,
    PromptOutcome,
    Session,
    ToolCallView,
    spawn,
)
from antiphon.runtime import Context
from antiphon.schema import UnknownUpdate, v1, v1_unstable
from antiphon.services import Files, Terminals


class Editor(Client):
    async def read_text_file(
        self, params: v1_unstable.ReadTextFileRequest, ctx: Context
    ) -> v1.ReadTextFileResponse:
        return v1.ReadTextFileResponse(content=params.path)


async def decide(params: v1_unstable.RequestPermissionRequest, ctx: Context) -> str | None:
    return params.options[0].option_id if params.options else None


async def main() -> None:
    lent = Client(files=Files("."), terminals=Terminals(), permissions=decide)
    async with spawn(["python", "agent.py"], client=lent) as agent:
        session = await agent.new_session(cwd=".")
        assert_type(session, Session)
        async with session.prompt("hello") as turn:
            async for update in turn:
                if isinstance(update.value, v1.AgentMessageChunk):
                    assert_type(update.value.content, v1.ContentBlock)
                elif isinstance(update.value, UnknownUpdate):
                    print(update.raw)
        assert_type(turn.stop_reason, str | None)
        result = await session.prompt("again")
        assert_type(result.text, str)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(session.prompt("beside others", silence=60))
        assert_type(task, asyncio.Task[PromptOutcome])
        for entry in session.view.entries:
            match entry:
                case MessageView() | ToolCallView():
                    print(entry.kind)
                case CompactionView():
                    print(entry.status)
                case _:
                    assert_type(entry, v1.Notice)
        answer = await agent.request(v1.ListSessionsRequest())
        assert_type(answer, v1_unstable.ListSessionsResponse)
