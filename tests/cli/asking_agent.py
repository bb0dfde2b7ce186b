"""Agents that ask a person and that want a login: `python asking_agent.py KIND [STATE] [WORDS…]`.

Standard library only. STATE is a file that exists once somebody has signed in. A turn asks for an
address a word, or the form as often as there are words.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SIGNED_IN = "signed-in"


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def receive() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


def say(text: str) -> None:
    content = {"type": "text", "text": text}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    send({"method": "session/update", "params": {"sessionId": "s", "update": update}})


def ask(**params: Any) -> Any:
    """Ask for one thing and wait; everything else that comes is dropped."""
    scope = {} if "requestId" in params else {"sessionId": "s"}
    send({"id": "q", "method": "elicitation/create", "params": {**scope, **params}})
    while (message := receive()).get("id") != "q" or "method" in message:
        if message.get("method") == "session/cancel":
            continue
    return message.get("result") or message["error"]


SCHEMAS: dict[str, dict[str, Any]] = {
    "form": {
        "title": "About you",
        "properties": {
            "name": {"type": "string", "title": "Name", "minLength": 2},
            "age": {"type": "integer", "minimum": 18, "default": 42},
            "colour": {
                "type": "string",
                "oneOf": [{"const": "r", "title": "Red"}, {"const": "b", "title": "Blue"}],
            },
            "tags": {"type": "array", "items": {"type": "string", "enum": ["x", "y", "z"]}},
            "keep": {"type": "boolean", "default": True},
        },
        "required": ["name", "colour"],
    },
    "one": {"properties": {"name": {"type": "string", "default": "Jo"}}},
    "lines": {
        "properties": {
            "text": {
                "type": "string",
                "description": "one\n> two",
                "default": "first\n[y] > second",
            }
        }
    },
    "endless": {"properties": {f"n{i}": {"type": "string"} for i in range(101)}},
    "unknown": {"properties": {"hue": {"type": "colour"}}, "required": ["hue"]},
    "hostile": {
        "title": "\x1b]0;owned\x07",
        "properties": {
            "a\x1b[2J": {
                "type": "string",
                "title": "Name\x1b[31m\n\n\nAllow?",
                "description": "\u202e gnihton",
                "pattern": "((a+)+)+$",
            }
        },
    },
}
MESSAGES = {"hostile": "Hello\x1b[2J\x1b]52;c;ZXZpbA==\x07\u202eevil"}


def form(kind: str) -> Any:
    message = MESSAGES.get(kind, "Please tell me.")
    return ask(mode="form", message=message, requestedSchema=SCHEMAS[kind])


def link(address: str) -> Any:
    result = ask(mode="url", message="Look here", url=address, elicitationId="e1")
    send({"method": "elicitation/complete", "params": {"elicitationId": "e1"}})
    return result


def terminal_login(state: Path, words: list[str]) -> None:
    """What is run on the terminal."""
    way = words[0]
    print(f"way {way}, mark {os.environ.get('LOGIN_MARK')}", flush=True)
    foreground = os.tcgetpgrp(0) == os.getpgrp()
    print(f"foreground {foreground}, leader {os.getpgrp() == os.getpid()}", flush=True)
    if way == "fails":
        sys.exit(3)
    if way == "waits":
        try:
            print("waiting", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("it was me", flush=True)
            sys.exit(9)
    if way == "leaves":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("waiting", flush=True)
        time.sleep(60)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "messes":
        import termios

        modes = termios.tcgetattr(0)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(0, termios.TCSANOW, modes)
    else:
        print(f"hello {input('your name? ')}", flush=True)
    if way != "pretends":
        state.touch()
    sys.exit(0)


METHODS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "mute": [],
    "agent": [{"id": "oauth", "name": "Sign in with the web", "description": "opens a page"}],
    "refuses": [{"id": "oauth", "name": "Sign in with the web"}],
    "variable": [{"id": "key", "name": "API key", "type": "env_var", "vars": [{"name": "ODD_KEY"}]}],
}  # fmt: skip


def methods(kind: str) -> list[dict[str, Any]]:
    if kind == "several":
        return [*METHODS["agent"], *methods("works")]
    if kind in METHODS:
        return METHODS[kind]
    return [
        {
            "id": "tty",
            "name": "Sign in \x1b[31mhere",
            "type": "terminal",
            "args": ["login", kind],
            "env": {"LOGIN_MARK": "set"},
        }
    ]


def main() -> None:
    kind, state, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if words[:1] == ["login"]:
        terminal_login(state, words[1:])
    while True:
        message = receive()
        result: Any = {}
        match message.get("method"):
            case "initialize":
                state.with_suffix(".starts").open("a").write("x")
                state.with_suffix(".client").write_text(json.dumps(message["params"]))
                result = {
                    "protocolVersion": 1,
                    "agentInfo": {"name": "odd\x1b[2J", "version": "1"},
                    "authMethods": methods(kind),
                    "agentCapabilities": {"sessionCapabilities": {"close": {}}},
                }
            case "authenticate":
                with state.with_suffix(".authenticated").open("a") as seen:
                    seen.write(message["params"]["methodId"])
                got = ask(
                    mode="url",
                    message="Sign in there",
                    url="https://example.com/login",
                    elicitationId="e",
                    requestId=message["id"],
                )
                if kind == "refuses" or got.get("action") not in {"accept", None}:
                    error = {"code": -32603, "message": "You said no"}
                    send({"id": message["id"], "error": error})
                    continue
                state.touch()
            case "session/new" if kind == "mute":
                continue
            case "session/new":
                if kind not in SCHEMAS and kind != "link" and not state.exists():
                    error = {"code": -32000, "message": "Authentication required"}
                    send({"id": message["id"], "error": error})
                    continue
                result = {"sessionId": "s"}
            case "session/prompt":
                for word in words or ["once"]:
                    say(json.dumps(link(word) if kind == "link" else form(kind)) + "\n")
                result = {"stopReason": "end_turn"}
            case _:
                pass
        if "id" in message and "method" in message:
            send({"id": message["id"], "result": result})


if __name__ == "__main__":
    main()
