"""An agent that writes as many updates as it is told, as fast as they are taken.

    python flooding_agent.py PROGRESS

A prompt, or the id of a session to load, says how many of which size: "1000x200". The file PROGRESS
always holds how many were written so far: a writer that is blocked makes no progress. Blocking and
without any library, so that what is felt is the pipe.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CAPABILITIES: dict[str, Any] = {"loadSession": True, "sessionCapabilities": {"close": {}}}


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def say(message: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def flood(session_id: str, order: str, progress: int) -> None:
    count, size = (int(part) for part in order.split("x"))
    update = {
        "sessionUpdate": "agent_message_chunk",
        "content": {"type": "text", "text": "TEXT"},
    }
    params = {"sessionId": session_id, "update": update}
    frame = json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}) + "\n"
    before, after = frame.split("TEXT")
    together = max(1, 16_384 // (len(frame) + size))
    for begin in range(0, count, together):
        end = min(begin + together, count)
        write("".join(before + f"{n}".ljust(size, ".") + after for n in range(begin, end)).encode())
        os.pwrite(progress, b"%10d" % end, 0)


def main() -> None:
    progress = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    sessions = 0
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        params: dict[str, Any] = message.get("params") or {}
        result: dict[str, Any] = {}
        match message.get("method"):
            case "initialize":
                result = {"protocolVersion": 1, "agentCapabilities": CAPABILITIES}
            case "session/new":
                sessions += 1
                result = {"sessionId": f"s{sessions}"}
            case "session/load":
                flood(params["sessionId"], params["sessionId"], progress)
            case "session/prompt":
                flood(params["sessionId"], params["prompt"][0]["text"], progress)
                result = {"stopReason": "end_turn"}
            case _:
                pass
        if "id" in message and "method" in message:
            say({"id": message["id"], "result": result})


if __name__ == "__main__":
    main()
