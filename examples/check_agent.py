"""An agent that runs the tests of a folder, shows their output as it comes, and writes a report."""

from antiphon import Agent, RequestError, Turn, serve_stdio


class Check(Agent):
    info = ("check", "1.0")

    async def prompt(self, turn: Turn) -> None:
        if not turn.client_capabilities.terminal:
            await turn.say("Lend me a terminal first.\n")
            return
        async with (
            turn.tool("Run the tests", kind="execute") as tool,
            # Released when the block is left, killed if it takes too long or the turn is cancelled.
            turn.run("python3", ["-m", "unittest"], timeout=60) as command,
        ):
            await tool.add(command)
            async for text in command:
                if command.gap:
                    await turn.say("[...]\n")  # more than the client keeps
                await turn.say(text)
        if command.timed_out:
            verdict = "took too long"
        else:
            passed = command.status is not None and command.status.exit_code == 0
            verdict = "passed" if passed else "failed"
        await turn.say(f"The tests {verdict}.\n")
        try:
            await turn.write_text_file(f"{turn.cwd}/report.txt", f"The tests {verdict}.\n")
        except RequestError as error:
            await turn.say(f"No report: {error.message}.\n")


if __name__ == "__main__":
    serve_stdio(Check())
