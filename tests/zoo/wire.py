"""What the agents of the zoo write and read, by hand: standard library, and no line of antiphon."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SESSION = "s-1"
#: With this in its environment, no agent ends its turn by itself.
OPEN = "ANTIPHON_ZOO_OPEN"


def write(data: bytes) -> None:
    """Put bytes on standard output, all of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]


def frame(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}).encode() + b"\n"


def send(**members: Any) -> None:
    write(frame(**members))


def receive() -> dict[str, Any]:
    """The next message; at the end of input the agent leaves, as a good one does."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


def request(method: str) -> Any:
    """The id of the next request of this method; whatever else comes is let by."""
    while (message := receive()).get("method") != method:
        pass
    return message["id"]


def answer(id_: Any, result: Any) -> None:
    send(id=id_, result=result)


def initialize() -> None:
    answer(request("initialize"), {"protocolVersion": 1, "agentCapabilities": {}})


def open_session() -> None:
    answer(request("session/new"), {"sessionId": SESSION})


def prompted() -> Any:
    """Do all that comes before the turn, in good order; the id of the prompt."""
    initialize()
    open_session()
    return request("session/prompt")


def chunk(text: str) -> bytes:
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    return frame(method="session/update", params={"sessionId": SESSION, "update": update})


def say(text: str) -> None:
    write(chunk(text))


def end(id_: Any) -> None:
    """End the turn, unless a test wants to find it open whenever it looks."""
    if OPEN not in os.environ:
        answer(id_, {"stopReason": "end_turn"})


def complain(text: str) -> None:
    os.write(2, text.encode() + b"\n")


def until_the_client_leaves() -> None:
    while True:
        receive()
