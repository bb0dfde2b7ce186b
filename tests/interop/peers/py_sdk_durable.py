"""A client on the official Python SDK that knows nothing of journals, with an agent that has one.

`py_sdk_durable.py CWD AGENT [ARGUMENT ...]` starts the agent three times, and prints what each showed.
"""

from __future__ import annotations

import asyncio
import json
import sys

import acp
from acp import schema

CWD, *AGENT = sys.argv[1:]


def wire(model):
    return (
        None if model is None else model.model_dump(mode="json", by_alias=True, exclude_none=True)
    )


class Host:
    def __init__(self):
        self.updates = []

    async def session_update(self, session_id, update, **meta):
        self.updates.append(wire(update))

    def on_connect(self, conn):
        pass


def said(text):
    request = {"sessionId": "", "prompt": [{"type": "text", "text": text}]}
    return schema.PromptRequest.model_validate(request).prompt


async def with_agent(work):
    """Start the agent, let it work, and tell what was shown."""
    host = Host()
    async with acp.spawn_agent_process(host, *AGENT, use_unstable_protocol=True) as (agent, _):
        hello = await agent.initialize(
            protocol_version=acp.PROTOCOL_VERSION,
            client_capabilities=schema.ClientCapabilities(),
        )
        result = await work(agent)
        # Handlers of notifications run beside each other, and may end after the answer.
        await asyncio.sleep(0.05)
    return {"hello": wire(hello), "result": result, "updates": host.updates}


async def main():
    session = None

    async def first(agent):
        nonlocal session
        session = (await agent.new_session(cwd=CWD, mcp_servers=[])).session_id
        await agent.prompt(session_id=session, prompt=said("one"))
        await agent.set_session_mode(session_id=session, mode_id="code")
        return session

    async def second(agent):
        listed = await agent.list_sessions(cwd=CWD)
        loaded = await agent.load_session(cwd=CWD, session_id=session, mcp_servers=[])
        await agent.prompt(session_id=session, prompt=said("two"))
        return {"listed": [wire(info) for info in listed.sessions], "loaded": wire(loaded)}

    async def third(agent):
        resumed = await agent.resume_session(session_id=session, cwd=CWD, mcp_servers=[])
        await agent.prompt(session_id=session, prompt=said("three"))
        return {"resumed": wire(resumed)}

    print(json.dumps([await with_agent(work) for work in (first, second, third)]))


asyncio.run(main())
