"""Agents as they should not be, and a few as they rarely are: `python odd_agent.py KIND`.

Standard library only and no line of the library under test: what they send is written out by hand.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

SESSION = "s-1"


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def raw(line: str) -> None:
    sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.flush()


def receive() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


def request() -> dict[str, Any]:
    """The next request or notification."""
    while "method" not in (message := receive()):
        pass
    return message


def answer(message: dict[str, Any], result: Any) -> None:
    send({"id": message["id"], "result": result})


def update(**members: Any) -> None:
    send({"method": "session/update", "params": {"sessionId": SESSION, "update": members}})


def say(text: str) -> None:
    update(sessionUpdate="agent_message_chunk", content={"type": "text", "text": text})


def call(number: int, method: str, **params: Any) -> dict[str, Any]:
    """Ask the client something and wait for its answer, whatever else comes."""
    send({"id": number, "method": method, "params": {"sessionId": SESSION, **params}})
    while (message := receive()).get("id") != number or "method" in message:
        pass
    return message


def initialize(**more: Any) -> None:
    answer(request(), {"protocolVersion": 1, "agentInfo": {"name": "odd", "version": "1"}, **more})


def open_session() -> str:
    message = request()
    answer(message, {"sessionId": SESSION})
    cwd: str = message["params"]["cwd"]
    return cwd


def prompt() -> dict[str, Any]:
    initialize()
    open_session()
    return request()


def end(message: dict[str, Any], reason: str = "end_turn") -> None:
    answer(message, {"stopReason": reason})


def until_the_client_leaves() -> None:
    while receive():
        pass


def ignore_everything() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


# -- those that never come up


def exits() -> None:
    sys.stderr.write("odd: no API key found\n")
    sys.exit(7)


def banner_and_exits() -> None:
    print("To use ACP mode, please log in first.")


def banner() -> None:
    print("Welcome to odd, the friendly agent!", flush=True)
    until_the_client_leaves()


def silent() -> None:
    until_the_client_leaves()


def stubborn() -> None:
    """Never answers, ignores the end of input and TERM, and has a child that does as well."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time, signal; signal.signal(15, 1); time.sleep(60)"]
    )
    note(f"child {child.pid}")
    ignore_everything()


def version() -> None:
    answer(request(), {"protocolVersion": 99, "agentCapabilities": {}})
    until_the_client_leaves()


def auth() -> None:
    methods = [
        {"id": "browser", "name": "Sign in with a browser", "description": "opens a page"},
        {"id": "tty", "name": "Sign in here", "type": "terminal", "args": ["login"]},
    ]
    initialize(authMethods=methods)
    message = request()
    send({"id": message["id"], "error": {"code": -32000, "message": "Authentication required"}})
    until_the_client_leaves()


# -- those whose turn does not end well


def dies() -> None:
    prompt()
    say("I will")
    sys.stderr.write("odd: out of memory\n")
    sys.stderr.flush()
    os._exit(9)


def refuses() -> None:
    message = prompt()
    end(message, "refusal")
    until_the_client_leaves()


def new_stop_reason() -> None:
    message = prompt()
    end(message, "went_for_lunch")
    until_the_client_leaves()


def error() -> None:
    message = prompt()
    details = {"detail": "the model said 500"}
    send({"id": message["id"], "error": {"code": 500, "message": "model failed", "data": details}})
    until_the_client_leaves()


def nonsense() -> None:
    message = prompt()
    answer(message, {"stopReason": 5})
    until_the_client_leaves()


def waits_for_cancel() -> None:
    message = prompt()
    say("working")
    while receive().get("method") != "session/cancel":
        pass
    end(message, "cancelled")
    until_the_client_leaves()


def thinks_for_long() -> None:
    """Shows nothing until its turn is cancelled."""
    message = prompt()
    while receive().get("method") != "session/cancel":
        pass
    end(message, "cancelled")
    until_the_client_leaves()


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def heard_interrupt(*_: object) -> None:
    note("heard SIGINT")


def hears() -> None:
    """Tells on standard error what reaches it while it asks."""
    signal.signal(signal.SIGINT, heard_interrupt)
    message = prompt()
    options = [{"optionId": "y", "name": "Yes", "kind": "allow_once"}]
    tool = {"toolCallId": "t-1", "title": "Launch"}
    params = {"sessionId": SESSION, "toolCall": tool, "options": options}
    send({"id": 1, "method": "session/request_permission", "params": params})
    while (heard := receive()).get("id") != 1 or "method" in heard:
        note(f"heard {heard['method']}")
        if heard["method"] == "session/cancel":
            message["cancelled"] = True
    note(f"outcome {heard['result']['outcome']['outcome']}")
    while "cancelled" not in message and receive().get("method") != "session/cancel":
        pass
    note("the turn ends")
    end(message, "cancelled")
    until_the_client_leaves()


def starts_for_ever() -> None:
    """Never answers, and leaves when its input ends."""
    signal.signal(signal.SIGINT, heard_interrupt)
    note("starting")
    until_the_client_leaves()


def deaf_at_a_question() -> None:
    prompt()
    options = [{"optionId": "y", "name": "Yes", "kind": "allow_once"}]
    tool = {"toolCallId": "t-1", "title": "Launch"}
    params = {"sessionId": SESSION, "toolCall": tool, "options": options}
    send({"id": 1, "method": "session/request_permission", "params": params})
    ignore_everything()


def deaf() -> None:
    """Has a turn that nothing ends, and goes only when it is killed."""
    prompt()
    say("working")
    ignore_everything()


# -- those that do their work in their own way


def lingers() -> None:
    message = prompt()
    say("done")
    end(message)
    ignore_everything()


def chatty() -> None:
    """Updates before the session is known, unknown kinds and members, odd characters."""
    initialize()
    head = '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s-1","update":'
    raw(head + '{"sessionUpdate":"current_mode_update","currentModeId":"m","_meta":{"a":[1.0]}}}}')
    open_session()
    message = request()
    raw(head + '{"sessionUpdate":"moon_phase", "phase":0.50,"deep":{"x":null}}}}')
    raw(
        head + '{"sessionUpdate":"agent_message_chunk",\r"content":{"type":"text","text":"one "}}}}'
    )
    raw(
        head + '{"sessionUpdate":"agent_message_chunk","content":'
        '{"type":"text","text":"two\u2028\u0085\\ud83d"},"extra":1e2}}}'
    )
    end(message)
    raw(head + '{"sessionUpdate":"session_info_update","title":"after the turn"}}}')
    until_the_client_leaves()


def echo() -> None:
    message = prompt()
    for block in message["params"]["prompt"]:
        for word in block["text"].split(" "):
            say(word + " ")
    end(message)
    until_the_client_leaves()


def sees() -> None:
    """Says what it sees of these variables."""
    message = prompt()
    say(
        " ".join(
            os.environ.get(name, "-") for name in message["params"]["prompt"][0]["text"].split()
        )
    )
    end(message)
    until_the_client_leaves()


def mutters() -> None:
    message = prompt()
    say("so")
    call(1, "fs/read_text_file", path="/")  # by its answer the text was shown
    sys.stderr.write("mutter\n")
    sys.stderr.flush()
    end(message)
    until_the_client_leaves()


def babbles() -> None:
    """Talks until it is told to stop."""
    message = prompt()
    while not select.select([0], [], [], 0)[0]:
        say("bla " * 100)
    end(message, "cancelled")
    until_the_client_leaves()


def escapes() -> None:
    message = prompt()
    say("\x1b]0;pwned\x07red \x1b[31mtext")
    end(message)
    until_the_client_leaves()


def asks() -> None:
    message = prompt()
    options = [
        {"optionId": "y", "name": "Yes, do it", "kind": "allow_once"},
        {"optionId": "n", "name": "No", "kind": "reject_once"},
    ]
    tool = {"toolCallId": "t-1", "title": "Launch"}
    outcome = call(1, "session/request_permission", toolCall=tool, options=options)
    say(json.dumps(outcome["result"]["outcome"]))
    end(message)
    until_the_client_leaves()


def asks_without_no() -> None:
    message = prompt()
    options = [{"optionId": "y", "name": "Yes", "kind": "allow_once"}]
    outcome = call(1, "session/request_permission", toolCall={"toolCallId": "t-1"}, options=options)
    say(json.dumps(outcome["result"]["outcome"]))
    end(message)
    until_the_client_leaves()


def writes_and_runs() -> None:
    """Asks nobody."""
    initialize()
    cwd = open_session()
    message = request()
    written = call(1, "fs/write_text_file", path=f"{cwd}/odd.txt", content="odd")
    started = call(2, "terminal/create", command="touch", args=[f"{cwd}/ran.txt"])
    if "result" in started:
        call(3, "terminal/wait_for_exit", terminalId=started["result"]["terminalId"])
    say(f"{'result' in written} {'result' in started}")
    end(message)
    until_the_client_leaves()


def runs_a_while() -> None:
    message = prompt()
    args = ["-c", "import time; time.sleep(0.8)"]
    started = call(1, "terminal/create", command=sys.executable, args=args)
    terminal = started["result"]["terminalId"]
    call(2, "terminal/wait_for_exit", terminalId=terminal)
    call(3, "terminal/release", terminalId=terminal)
    end(message)
    until_the_client_leaves()


def asks_then_writes() -> None:
    initialize()
    cwd = open_session()
    message = request()
    diff = {"type": "diff", "path": f"{cwd}/odd.txt", "oldText": None, "newText": "odd"}
    tool = {"toolCallId": "t-1", "title": "Write odd.txt", "kind": "edit", "content": [diff]}
    options = [
        {"optionId": "y", "name": "Yes", "kind": "allow_once"},
        {"optionId": "n", "name": "No", "kind": "reject_once"},
    ]
    call(1, "session/request_permission", toolCall=tool, options=options)
    call(2, "fs/write_text_file", path=f"{cwd}/odd.txt", content="odd")
    again = call(3, "fs/write_text_file", path=f"{cwd}/odd2.txt", content="odd")
    say(f"second {'result' in again}")
    end(message)
    until_the_client_leaves()


def works() -> None:
    """Does what the prompt says, and says what came of each step.

    The prompt is a JSON list of steps, each one of: ["read", path], ["write", path],
    ["run", params], ["ask", tool call, more params]; a path begins in the session's folder.
    With "directories" before it, the agent takes additional directories and says which it was told.
    """
    message = request()
    capabilities: dict[str, Any] = {}
    if "directories" in sys.argv:
        capabilities = {"sessionCapabilities": {"additionalDirectories": {}}}
    answer(message, {"protocolVersion": 1, "agentCapabilities": capabilities})
    client = message["params"]["clientCapabilities"]
    message = request()
    answer(message, {"sessionId": SESSION})
    cwd, told = message["params"]["cwd"], message["params"].get("additionalDirectories")
    message = request()
    outcomes = [
        step_of(number, cwd, *step)
        for number, step in enumerate(json.loads(message["params"]["prompt"][0]["text"]), 1)
    ]
    lent = {"terminal": client.get("terminal"), "fs": client.get("fs")}
    say(json.dumps({"outcomes": outcomes, "told": told, "lent": lent, "cwd": cwd}))
    end(message)
    until_the_client_leaves()


def step_of(number: int, cwd: str, verb: str, what: Any, more: Any = None) -> str:
    match verb:
        case "read":
            got = call(number, "fs/read_text_file", path=f"{cwd}/{what}")
        case "write":
            got = call(number, "fs/write_text_file", path=f"{cwd}/{what}", content="odd")
        case "run":
            got = call(number, "terminal/create", **what)
            if "result" in got:
                terminal = got["result"]["terminalId"]
                call(number + 1000, "terminal/wait_for_exit", terminalId=terminal)
                call(number + 2000, "terminal/release", terminalId=terminal)
        case _:
            options = [
                {"optionId": "y", "name": "Yes", "kind": "allow_once"},
                {"optionId": "n", "name": "No", "kind": "reject_once"},
            ]
            params = {"toolCall": {"toolCallId": "t-1", **what}, "options": options}
            got = call(number, "session/request_permission", **{**params, **(more or {})})
            outcome: str = got["result"]["outcome"].get("optionId", "cancelled")
            return outcome
    if "result" in got:
        return "done"
    data: Any = got["error"].get("data")
    return str(data["reason"] if "reason" in (data or "") else got["error"]["code"])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
