"""An agent as its author should not have written it, for tests that need a whole process.

`python agent.py`, or `python -m antiphon run agent.py:agent`. It prints when it is imported, and a
prompt's first word says what else it does. Everything else is echoed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import Any

from antiphon import Agent, Turn, extension, serve_stdio

if "late" not in sys.argv:  # the command has secured the descriptors before it imports this
    print("printed at import")
    # Its handler keeps the stream that is standard output now.
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)


class Careless(Agent):
    async def prompt(self, turn: Turn) -> str | None:
        word, _, rest = turn.text.partition(" ")
        match word:
            case "print":
                print("hi")
                print("漢 without an end", end="", flush=True)
                os.write(1, b"x")
                sys.stdout.buffer.write(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')
                subprocess.run(["echo", "y"], check=True)
                logging.getLogger("careless").info("logged")
            case "child":
                subprocess.run(rest.split(), check=False)
            case "env":
                await turn.say(str(os.environ.get(rest)))
            case "big":
                await turn.say("x" * int(rest))
            case "wait":
                await turn.say("waiting")
                await turn.wait_cancelled()
            case "read":
                await turn.say(await turn.read_text_file(rest))
            case "errors":
                for _ in range(int(rest) // 1000):
                    sys.stderr.write("e" * 1000)
                sys.stderr.flush()
            case "sleep":
                await asyncio.sleep(float(rest))
            case _:
                pass
        await turn.say(turn.text)
        return None

    @extension("_test/same")
    async def same(self, params: Any, ctx: Any) -> Any:
        return params


agent = Careless()

if __name__ == "__main__":
    serve_stdio(agent)
