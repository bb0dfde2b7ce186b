"""Let an agent change files below this folder, and decide about each change yourself.

python ask_first.py FILE ...
"""

import sys
from pathlib import Path

import antiphon.sync
from antiphon import Client, content
from antiphon.services import Files, Permissions, Request

AGENT = [sys.executable, str(Path(__file__).with_name("tidy_agent.py"))]


def ask(request: Request) -> str | bool:
    """Called in this thread while it waits for the agent, so `input` is fine."""
    print(request.call.title)
    for number, option in enumerate(request.options, 1):
        print(f"  {number}  {option.name}")
    choice = input("Number, or nothing for no: ")
    return request.options[int(choice) - 1].option_id if choice else False


# Nothing outside this folder can be read or written, and nothing is written that was not asked about.
lent = Client(files=Files("."), permissions=Permissions(ask=ask))
with antiphon.sync.spawn(AGENT, client=lent) as agent:
    session = agent.new_session(cwd=".")
    links = [content.from_path(name, embed=False) for name in sys.argv[1:]]
    with session.prompt(["Tidy these files.", *links]) as turn:
        for update in turn:
            print(update.text, end="")
    print(turn.stop_reason)
