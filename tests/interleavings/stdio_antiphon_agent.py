"""The same agent as `stdio_agent.py`, made with the library: each prompt is a script of what to tell."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from antiphon import Agent, Turn, extension, serve_stdio
from antiphon.schema import v1_unstable

CHOICE = random.Random(int(sys.argv[1]))


class Scripted(Agent):
    @extension("_x/anything")
    async def anything(self, params: Any, ctx: Any) -> dict[str, Any]:
        return {}

    async def prompt(self, turn: Turn) -> Any:
        sent: list[int] = []
        answers: dict[str, list[str]] = {}
        for name, number in json.loads(turn.text):
            if turn.cancelled:
                break
            if name in ("tell", "odd"):
                sent.append(number)
                await turn.say(str(number))
            elif name == "ask":
                answer = await turn.ask_permission(str(number))
                said = "allow" if answer else "cancelled" if answer.option_id is None else "reject"
                answers.setdefault(str(number), []).append(said)
            else:
                await asyncio.sleep(0)
            if CHOICE.random() < 0.3:
                await asyncio.sleep(0)
        return v1_unstable.PromptResponse(
            stop_reason="end_turn", meta={"sent": sent, "answers": answers}
        )


serve_stdio(Scripted())
