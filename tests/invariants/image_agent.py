"""An agent that tells what it got of an image; run as a program it serves its own stdin and stdout."""

from __future__ import annotations

import hashlib

from antiphon import Agent, Capabilities, Turn, serve_stdio
from antiphon.schema import v1


class ImageAgent(Agent):
    capabilities = Capabilities(image=True)

    async def prompt(self, turn: Turn) -> None:
        for block in turn.blocks:
            if isinstance(block, v1.ImageContent):
                digest = hashlib.sha256(block.data.encode()).hexdigest()
                await turn.say(f"{len(block.data)} {digest} {block.mime_type}")


if __name__ == "__main__":
    serve_stdio(ImageAgent())
