"""An agent that strips trailing blanks from the files a prompt links to, if it may."""

from antiphon import Agent, Turn, serve_stdio
from antiphon.content import path_of
from antiphon.schema import v1


class Tidy(Agent):
    info = ("tidy", "1.0")

    async def prompt(self, turn: Turn) -> None:
        if not (turn.client_capabilities.fs and turn.client_capabilities.fs.write_text_file):
            await turn.say("Lend me your files first.\n")
            return
        for block in turn.blocks:
            if isinstance(block, v1.ResourceLink):
                await self.tidy(turn, path_of(block.uri))

    async def tidy(self, turn: Turn, path: str) -> None:
        async with turn.tool(f"Tidy {path}", kind="edit", locations=[path]) as tool:
            old = await turn.read_text_file(path)
            new = "".join(f"{line.rstrip()}\n" for line in old.splitlines())
            if new == old:
                await turn.say(f"{path} is tidy.\n")
                return
            await tool.diff(path, old, new)
            answer = await turn.ask_permission(tool)
            if answer.allowed:
                await turn.write_text_file(path, new)
            await turn.say(f"{path}: {'tidied' if answer.allowed else 'left as it is'}.\n")


if __name__ == "__main__":
    serve_stdio(Tidy())
