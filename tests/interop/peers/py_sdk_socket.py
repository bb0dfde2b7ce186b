"""A client and an agent on the official Python SDK, over asyncio's streams of a socket.

`py_sdk_socket.py client ADDRESS` prompts three times and prints what it was told, as JSON;
`py_sdk_socket.py agent ADDRESS` listens, prints "ready", and echoes for everybody who connects.
"""

from __future__ import annotations

import asyncio
import json
import sys

import acp
from acp import schema

ROLE, ADDRESS = sys.argv[1:]
KIND, _, WHERE = ADDRESS.partition(":")
TEXTS = ["one", "two " * 5000, "drei \u2028 漢"]


class Host:
    def __init__(self):
        self.heard = []

    async def session_update(self, session_id, update, **meta):
        self.heard.append(update.content.text)


async def client():
    if KIND == "unix":
        reader, writer = await asyncio.open_unix_connection(WHERE, limit=1 << 20)
    else:
        host, _, port = WHERE.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    host = Host()
    agent = acp.connect_to_agent(host, writer, reader)
    await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
    session = await agent.new_session(cwd="/", mcp_servers=[])
    reasons = []
    for text in TEXTS:
        block = schema.TextContentBlock(type="text", text=text)
        answer = await agent.prompt(session_id=session.session_id, prompt=[block])
        reasons.append(answer.stop_reason)
    print(json.dumps({"heard": host.heard, "reasons": reasons}))
    writer.close()
    await writer.wait_closed()


class Echo(acp.Agent):
    def on_connect(self, conn):
        self.conn = conn

    async def initialize(
        self, protocol_version, client_capabilities=None, client_info=None, **meta
    ):
        return schema.InitializeResponse(protocol_version=protocol_version)

    async def new_session(self, cwd, mcp_servers=None, **meta):
        return schema.NewSessionResponse(session_id="s")

    async def prompt(self, prompt, session_id, **meta):
        chunk = schema.AgentMessageChunk(
            session_update="agent_message_chunk",
            content=schema.TextContentBlock(type="text", text=f"echo: {prompt[0].text}"),
        )
        await self.conn.session_update(session_id=session_id, update=chunk)
        return schema.PromptResponse(stop_reason="end_turn")


async def agent():
    async def serve(reader, writer):
        await acp.run_agent(Echo(), writer, reader)
        writer.close()

    server = await asyncio.start_unix_server(serve, WHERE, limit=1 << 20)
    print("ready", flush=True)
    await server.serve_forever()


asyncio.run(client() if ROLE == "client" else agent())
