"""The agent that the cases prompt; run as a program it serves its own stdin and stdout.

What it does is said by the text of the prompt: see `CaseAgent.prompt`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon import Agent, AntiphonError, Capabilities, RequestError, Turn, serve_stdio
from antiphon.schema import v1

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["CaseAgent"]


class CaseAgent(Agent):
    """One command a prompt; paths are taken from the session's directory."""

    info = ("case-agent", "1")
    capabilities = Capabilities(embedded_context=True)

    async def prompt(self, turn: Turn) -> None:
        text = "".join(b.text for b in turn.blocks if isinstance(b, v1.TextContent)).strip()
        command, _, rest = text.partition(" ")
        match command:
            case "echo":
                await turn.say(rest or "(nothing to echo)")
            case "sleep":
                try:
                    async with asyncio.timeout(int(rest) / 1000):
                        await turn.wait_cancelled()
                except TimeoutError:
                    pass
            case "read":
                await turn.say(await self.told(self.read(turn, rest)))
            case "write":
                path, _, content = rest.partition(" ")
                await turn.say(await self.told(self.write(turn, path, content)))
            case "late-tool":
                delay, _, title = rest.partition(" ")
                await turn.say("writing now")
                await turn.say(f"scheduled {title}")
                turn.start_soon(self.tool(turn, int(delay) / 1000, title))
            case "inspect-prompt":
                described = [self.described(block) for block in turn.blocks]
                await turn.say(json.dumps(described, separators=(",", ":")))
            case _:
                await turn.say(f"unrecognized prompt: {text}")

    async def told(self, work: Coroutine[Any, Any, str]) -> str:
        """What came of a call to the client, in words."""
        try:
            return await work
        except RequestError as error:
            return f"error: {error.message}"
        except (AntiphonError, OSError) as error:
            return f"error: {error}"

    async def read(self, turn: Turn, path: str) -> str:
        return await turn.read_text_file(str(Path(turn.cwd, path)))

    async def write(self, turn: Turn, path: str, content: str) -> str:
        await turn.write_text_file(str(Path(turn.cwd, path)), content)
        return f"wrote {path}"

    async def tool(self, turn: Turn, delay: float, title: str) -> None:
        await asyncio.sleep(delay)
        async with turn.tool(title):
            pass

    def described(self, block: v1.ContentBlock) -> dict[str, Any]:
        if isinstance(block, v1.TextContent):
            return {"type": "text", "text": block.text}
        if isinstance(block, v1.EmbeddedResource):
            resource = block.resource
            has_text = isinstance(resource, v1.TextResourceContents)
            return {"type": "resource", "uri": resource.uri, "hasText": has_text}
        if isinstance(block, v1.ResourceLink):
            return {"type": "resource_link", "uri": block.uri, "hasText": False}
        return {"type": "other"}


if __name__ == "__main__":
    serve_stdio(CaseAgent())
