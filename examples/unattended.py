"""Let an agent run the tests of this folder while nobody looks: rules decide, a log keeps it.

python unattended.py [--report]
"""

import asyncio
import sys
from pathlib import Path

from antiphon import Client, spawn
from antiphon.services import Decision, Files, Permissions, Rule, Terminals

AGENT = [sys.executable, str(Path(__file__).with_name("check_agent.py"))]

RULES = [Rule("allow", name="tests", command="python3", args=["-m", "unittest", "**"])]
if "--report" in sys.argv:
    RULES.append(Rule("allow", name="report", kind="edit", path="report.txt"))


def note(decision: Decision) -> None:
    print(f"[{decision.outcome} by {decision.by}: {decision.rule or decision.why}]")


async def main() -> None:
    client = Client(
        files=Files(),  # the session's folder, and nothing outside
        terminals=Terminals(life=600),  # add confine="bwrap" to confine the commands as well
        permissions=Permissions(RULES, default="deny", on_decision=note),
    )
    async with spawn(AGENT, client=client) as agent:
        session = await agent.new_session(cwd=".")
        async with session.prompt("Run the tests.") as turn:
            async for update in turn:
                print(update.text, end="")


asyncio.run(main())
