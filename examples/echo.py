# echo.py
from antiphon import Agent, Turn, serve_stdio


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(f"echo: {turn.text}")


serve_stdio(Echo())
