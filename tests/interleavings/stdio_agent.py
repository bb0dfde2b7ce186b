"""A program that is an agent without any library: each prompt is a script of what to write.

Run as `python stdio_agent.py SEED`. The prompts of all sessions are carried out together, one step of a
random one at a time, and the bytes leave in pieces of random size. Each answer says what was sent and how
its questions were answered, so that the client's side can be held against it.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from typing import Any

CHOICE = random.Random(int(sys.argv[1]))
OPTIONS = [
    {"optionId": "allow", "name": "yes", "kind": "allow_once"},
    {"optionId": "reject", "name": "no", "kind": "reject_once"},
]
pending = b""
questions = 0


def write(message: Any) -> None:
    """Put a message behind what has not left yet."""
    global pending  # noqa: PLW0603  (one program, one stream)
    line = message if isinstance(message, bytes) else json.dumps(message).encode()
    pending += line + b"\n"


def let_go(everything: bool) -> None:
    """Write some of what has not left, or all of it."""
    global pending  # noqa: PLW0603  (one program, one stream)
    while pending:
        size = CHOICE.choice((1, 5, 30, 300, 5000))
        written = os.write(1, pending[:size])
        pending = pending[written:]
        if not everything and CHOICE.random() < 0.5:
            return


class Script:
    """A prompt that is being answered."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = request["id"]
        self.session_id = request["params"]["sessionId"]
        self.steps: list[list[Any]] = json.loads(request["params"]["prompt"][0]["text"])
        self.sent: list[int] = []
        self.answers: dict[str, list[str]] = {}
        self.open: set[str] = set()
        self.cancelled = False

    def step(self) -> bool:
        """Do one thing; whether that was the last."""
        if self.cancelled and self.steps and self.steps[0][0] != "tell":
            self.steps = [step for step in self.steps if step[0] == "tell"]
        if not self.steps:
            if self.open:
                return False
            reason = "cancelled" if self.cancelled else "end_turn"
            meta = {"sent": self.sent, "answers": self.answers}
            result = {"stopReason": reason, "_meta": meta}
            write({"jsonrpc": "2.0", "id": self.id, "result": result})
            return True
        name, number = self.steps.pop(0)
        if name in ("tell", "odd"):
            self.sent.append(number)
            kind = "agent_message_chunk" if name == "tell" else "something_new"
            update = {"sessionUpdate": kind, "content": {"type": "text", "text": str(number)}}
            params = {"sessionId": self.session_id, "update": update | {"n": number}}
            write({"jsonrpc": "2.0", "method": "session/update", "params": params})
        elif name == "noise":
            write(b"[INFO] working")
        elif name == "ask":
            self.ask(number)
        return False

    def ask(self, number: int) -> None:
        global questions  # noqa: PLW0603  (one program, one stream)
        questions += 1
        key = f"{self.id}/{questions}"
        self.open.add(key)
        asked[key] = self
        call = {"toolCallId": key, "title": str(number)}
        params = {"sessionId": self.session_id, "toolCall": call, "options": OPTIONS}
        method = "session/request_permission"
        write({"jsonrpc": "2.0", "id": key, "method": method, "params": params})

    def answered(self, key: str, message: dict[str, Any]) -> None:
        outcome = message.get("result", {}).get("outcome", {})
        what = outcome.get("optionId") or outcome.get("outcome") or "error"
        self.answers.setdefault(key, []).append(what)
        self.open.discard(key)


asked: dict[str, Script] = {}
scripts: dict[Any, Script] = {}
sessions = 0


def receive(message: dict[str, Any]) -> None:
    global sessions  # noqa: PLW0603  (one program, one stream)
    method: str | None = message.get("method")
    id_: Any = message.get("id")
    if method is None:
        asked[id_].answered(id_, message)
    elif method == "session/prompt":
        scripts[id_] = Script(message)
    elif method == "session/cancel":
        for script in scripts.values():
            script.cancelled |= script.session_id == message["params"]["sessionId"]
    elif method == "session/new":
        sessions += 1
        write({"jsonrpc": "2.0", "id": id_, "result": {"sessionId": f"s{sessions}"}})
    elif method == "initialize":
        write({"jsonrpc": "2.0", "id": id_, "result": {"protocolVersion": 1}})
    elif id_ is not None:
        write({"jsonrpc": "2.0", "id": id_, "result": {}})


def main() -> None:
    buffered = b""
    while True:
        wait = None if not scripts and not pending else 0
        if wait == 0 and all(not s.steps and s.open for s in scripts.values()) and not pending:
            wait = None  # everybody waits for an answer
        readable, _, _ = select.select([0], [], [], wait)
        if readable:
            data = os.read(0, 65536)
            if not data:
                return
            buffered += data
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                receive(json.loads(line))
        if scripts:
            id_ = CHOICE.choice(list(scripts))
            if scripts[id_].step():
                del scripts[id_]
        let_go(everything=not scripts)


if __name__ == "__main__":
    main()
