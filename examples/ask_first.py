"""Let an agent change files below this folder, and decide about each change yourself.

python ask_first.py FILE ...
"""

import sys
from pathlib import Path
from typing import Any

import antiphon.sync
from antiphon import Client, content
from antiphon.schema import v1
from antiphon.services import Files

AGENT = [sys.executable, str(Path(__file__).with_name("tidy_agent.py"))]


def ask(params: v1.RequestPermissionRequest, _ctx: Any) -> str | None:
    """Called in this thread while it waits for the agent, so `input` is fine."""
    print(params.tool_call.title)
    for number, option in enumerate(params.options, 1):
        print(f"  {number}  {option.name}")
    choice = input("Number, or nothing for no: ")
    return params.options[int(choice) - 1].option_id if choice else None


lent = Client(files=Files("."))  # nothing outside this folder can be read or written
with antiphon.sync.spawn(AGENT, client=lent, permissions=ask) as agent:
    session = agent.new_session(cwd=".")
    links = [content.from_path(name, embed=False) for name in sys.argv[1:]]
    with session.prompt(["Tidy these files.", *links]) as turn:
        for update in turn:
            print(update.text, end="")
    print(turn.stop_reason)
