"""Their clients with our agent: each client plays every scene once and reports; tests look at parts.

Each plays them a second time with an agent that journals everything first: nothing may look different.

Besides what a client reports there is the wire, as our agent recorded it.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.interop.desk import NOTES
from tests.interop.programs import (
    OURS,
    PYTHON_SDKS,
    THEIRS,
    TYPESCRIPT_SDK,
    agent_command,
    client_command,
    script,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

Json = dict[str, Any]
#: Seconds that a client has for all of its scenes; it takes two or three.
PATIENCE = 28


class Run(NamedTuple):
    """One client's run: where it worked, what it reported, what was on the wire of each connection."""

    peer: str
    cwd: Path
    report: Json
    wires: list[list[tuple[str, Json]]]


@pytest.fixture(scope="session", params=[*THEIRS, *(f"{peer} durable" for peer in THEIRS)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    peer, _, durable = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(peer)
    cwd = folder / "work"
    cwd.mkdir()
    (cwd / "notes.txt").write_bytes(NOTES.encode())
    agent = agent_command(OURS, folder / "state.json", str(folder / "record"))
    if durable:
        agent.append(str(folder / "journal"))
    done = subprocess.run(
        client_command(peer, cwd, agent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wires: list[list[tuple[str, Json]]] = []
    # Not splitlines: what is said in here has U+2028 in it.
    for line in (folder / "record").read_bytes().rstrip(b"\n").split(b"\n"):
        entry = json.loads(line)
        frame = entry["frame"]
        # Both SDKs count their ids from 0: a connection begins here.
        if entry["dir"] == "in" and (frame.get("method"), frame.get("id")) == ("initialize", 0):
            wires.append([])
        wires[-1].append((entry["dir"], frame))
    return Run(peer, cwd, json.loads(done.stdout), wires)


def said(text: str, kind: str = "agent_message_chunk") -> Json:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def last_words(turn: Json) -> Any:
    return json.loads(turn["updates"][-1]["content"]["text"])


def some(value: Json) -> Json:
    """Without what is null: the SDKs differ in whether they write it."""
    return {name: item for name, item in value.items() if item is not None}


def test_every_step_was_made(run: Run) -> None:
    parts: dict[str, Json] = {k: v for k, v in run.report.items() if isinstance(v, dict)}
    failed = {name: part["failed"] for name, part in parts.items() if "failed" in part}

    assert not failed
    assert len(run.report) == 27
    assert len(run.wires) == 2


# ---------------------------------------------------------------- handshake and sessions


@pytest.mark.covers("R1-23", "R1-24", "R1-25")
def test_the_handshake_tells_each_side_about_the_other(run: Run) -> None:
    answer, state = run.report["initialize"], run.report["new"]["state"]
    methods = script("auth_methods")
    if run.peer == "py-1.0.0rc3":
        # It takes a method without a type for a terminal login; ours goes without on the wire,
        # as the schema wants it.
        methods[0]["type"] = "terminal"

    assert answer["protocolVersion"] == 1
    assert answer["agentInfo"] == script("agent")
    assert answer["authMethods"] == methods
    offered = answer["agentCapabilities"]
    assert offered["loadSession"] is True
    assert offered["promptCapabilities"]["image"] is True
    assert offered["promptCapabilities"].get("audio", False) is False
    assert set(offered["sessionCapabilities"]) == {
        "additionalDirectories",
        "close",
        "delete",
        "list",
        "resume",
    }
    assert offered["auth"] == {"logout": {}}
    assert run.wires[0][1][1]["result"]["authMethods"] == script("auth_methods")
    assert state["client"]["info"] == script("client")
    assert state["client"]["capabilities"]["fs"] == {"readTextFile": True, "writeTextFile": True}


@pytest.mark.covers("R1-46", "R1-89", "R1-156", "R1-157")
def test_a_new_session_has_and_is_given_everything(run: Run) -> None:
    new = run.report["new"]

    assert new["response"] == {
        "sessionId": "session-1",
        "modes": script("modes"),
        "configOptions": script("config_options"),
    }
    assert new["updates"] == [
        {
            "sessionUpdate": "available_commands_update",
            "availableCommands": script("commands"),
        }
    ]
    state = new["state"]
    assert (state["cwd"], state["more"]) == (str(run.cwd), [str(run.cwd / "more")])
    assert state["servers"] == ["files"]
    assert state["meta"] == {"traceparent": "00-1", "x": [1, {"y": None}]}
    assert new["stop"] == "end_turn"


@pytest.mark.covers("R1-56", "R1-119", "R1-120", "R1-121")
def test_modes_and_options_change(run: Run) -> None:
    modes = run.report["modes"]
    expected = script("config_options")
    expected[0]["currentValue"], expected[1]["currentValue"] = "deep", True

    assert modes["options"] == expected
    assert modes["unknown mode"]["code"] == -32602
    assert modes["unknown option"]["code"] == -32602
    assert modes["unknown value"]["code"] == -32602
    assert modes["state"]["mode"] == "code"
    assert modes["state"]["options"] == {"model": "deep", "verbose": True}
    assert run.report["errors"]["mode of nobody"]["code"] == -32002


@pytest.mark.covers("R1-58", "R1-60", "R1-61", "R1-62", "R1-63")
def test_sessions_are_listed_closed_and_deleted(run: Run) -> None:
    sessions = run.report["sessions"]
    folder = str(run.cwd / "folder")
    names = sessions["names"]

    pages = [[some(info) for info in page] for page in sessions["pages"]]
    assert pages == [
        [
            {"sessionId": names[0], "cwd": folder, "title": "A scripted turn"},
            {"sessionId": names[1], "cwd": folder},
        ],
        [{"sessionId": names[2], "cwd": folder}, {"sessionId": names[3], "cwd": folder}],
    ]
    assert sessions["nowhere"] == {"sessions": []}
    assert sessions["garbage"]["code"] == -32602
    assert sessions["closed"]["code"] == -32002
    assert sessions["closed"]["data"] == {"sessionId": names[1]}
    # The TypeScript SDK takes "not found" for done, as the protocol recommends to clients.
    again = sessions["close again"]
    if run.peer == TYPESCRIPT_SDK:
        assert again == {"result": {}}
    else:
        assert again["code"] == -32002
    ended = sessions["closed while running"]
    assert ended["response"] == {"stopReason": "cancelled"}
    assert ended["updates"] == [said("started"), said("stopping")]
    assert sessions["deleted"] == [{}, {}]
    assert sessions["left"] == [names[2]]


@pytest.mark.covers("R1-52", "R1-54", "R1-55", "R1-57")
def test_another_process_loads_and_resumes_the_session(run: Run) -> None:
    reopened = run.report["reopened"]
    expected = [said("stream", "user_message_chunk"), *script("stream", run.cwd / "folder")]

    assert reopened["replayed"] == expected
    assert reopened["loaded"]["modes"] == script("modes")
    assert reopened["echoed"] == [said("echo")]
    assert reopened["resumed"]["modes"] == script("modes")
    assert reopened["after resume"] == []
    assert reopened["unknown"]["code"] == -32002
    assert reopened["unknown"]["data"] == {"sessionId": "no such session"}
    assert reopened["elsewhere"]["code"] == -32602


@pytest.mark.covers("R1-144", "R1-146", "R1-149")
def test_signing_out_closes_the_door_for_new_sessions(run: Run) -> None:
    auth = run.report["auth"]

    assert auth["signed out"]["code"] == -32000
    assert auth["signed out"]["data"] == {"authMethods": ["login"]}
    assert auth["unknown method"]["code"] == -32602
    assert auth["after"] == [said("echo")]


# ---------------------------------------------------------------- turns


@pytest.mark.covers("R1-81", "R1-83", "R1-84", "R1-87")
def test_a_turn_is_seen_whole_and_in_order(run: Run) -> None:
    stream = run.report["stream"]

    assert stream["updates"] == script("stream", run.cwd)
    assert stream["response"] == {
        "stopReason": "end_turn",
        "usage": {"totalTokens": 30, "inputTokens": 10, "outputTokens": 20, "thoughtTokens": 5},
    }


@pytest.mark.covers("R1-79")
def test_every_kind_of_content_survives_both_ways(run: Run) -> None:
    echo = run.report["echo"]

    assert [update["content"] for update in echo["updates"]] == script("blocks")
    assert echo["response"] == {"stopReason": "end_turn"}


def test_many_and_long_updates_keep_their_order_and_their_text(run: Run) -> None:
    assert run.report["burst"] == "".join(f"{n} " for n in range(1000))
    assert run.report["big"] == [True, True]


def test_sessions_run_side_by_side(run: Run) -> None:
    assert run.report["side_by_side"] == ["".join(f"{n} " for n in range(200))] * 2


def test_the_reason_for_a_turns_end_is_told(run: Run) -> None:
    assert run.report["stops"] == ["max_tokens", "max_turn_requests", "refusal"]


@pytest.mark.covers("R1-94", "R1-95", "R1-97")
def test_a_cancelled_turn_ends_with_what_still_came(run: Run) -> None:
    cancel = run.report["cancel"]

    assert cancel["turn"] == {
        "response": {"stopReason": "cancelled"},
        "updates": [said("started"), said("stopping")],
    }
    assert cancel["after"]["updates"] == [said("echo")]


def test_cancelling_ends_an_open_question(run: Run) -> None:
    cancelled = run.report["cancel_permission"]

    assert cancelled["response"] == {"stopReason": "cancelled"}
    assert cancelled["updates"][1]["status"] == "failed"
    assert last_words(cancelled) == {"outcome": "cancelled"}


# ---------------------------------------------------------------- what the client lends


@pytest.mark.covers("R1-103")
@pytest.mark.parametrize(
    ("decision", "status"),
    [
        ("yes", "completed"),
        ("always", "completed"),
        ("no", "failed"),
        ("not offered", "failed"),
        ("None", "failed"),
    ],
)
def test_only_an_allowing_option_is_a_permission(run: Run, decision: str, status: str) -> None:
    part = run.report["permission"][decision]
    call, options = script("permission")["toolCall"], script("permission")["options"]

    assert part["asked"]["toolCall"] == call
    assert part["asked"]["options"] == options
    assert part["updates"][:2] == [
        {"sessionUpdate": "tool_call", **call},
        {"sessionUpdate": "tool_call_update", "toolCallId": "ask1", "status": status},
    ]
    offered = {option["optionId"] for option in options}
    selected = {"outcome": "selected", "optionId": decision}
    assert last_words(part) == (selected if decision in offered else {"outcome": "cancelled"})
    assert part["response"] == {"stopReason": "end_turn"}


def test_files_are_read_and_written(run: Run) -> None:
    text = "ü\u2028\r\n" + NOTES

    assert run.report["files"] == {
        "whole": NOTES,
        "part": "beta\n",
        "again": text,
        "missing": -32002,
        "relative": -32602,
        "outside": -32602,
        "write outside": -32602,
    }
    assert (run.cwd / "new" / "copy.txt").read_bytes() == text.encode()


def test_a_command_runs_in_a_terminal(run: Run) -> None:
    terminal = run.report["terminal"]
    done = last_words(terminal)

    assert terminal["updates"][0]["content"] == [{"type": "terminal", "terminalId": done["id"]}]
    assert some(done["exit"]) == {"exitCode": 3}
    assert done["output"]["output"] == f"a b ü {run.cwd}\nerr\n"
    assert some(done["output"]["exitStatus"]) == {"exitCode": 3}
    assert done["released"] == -32002
    assert (done["limited"]["output"], done["limited"]["truncated"]) == ("öü", True)
    assert done["missing command"] == -32602


@pytest.mark.covers("R1-116")
def test_output_of_a_running_command_comes_as_it_is_written(run: Run) -> None:
    streamed = last_words(run.report["terminal"])["streamed"]

    assert "".join(streamed["pieces"]) == "€\n" * 10
    assert len(streamed["pieces"]) > 1
    assert (streamed["gaps"], streamed["exit"]) == (0, 4)


def test_a_running_command_is_killed_and_released(run: Run) -> None:
    kill = run.report["kill"]

    assert kill["before"]["output"] == "ready\n"
    assert kill["before"].get("exitStatus") is None
    assert [some(ended) for ended in kill["ended"]] == [{"signal": "SIGKILL"}] * 2
    assert kill["after"]["output"] == "ready\n"
    assert some(kill["released"]) == {"signal": "SIGKILL"}
    assert kill["gone"] == -32002


@pytest.mark.covers("R1-116")
def test_every_terminal_is_released_also_after_a_cancel(run: Run) -> None:
    assert run.report["cancel_command"]["response"] == {"stopReason": "cancelled"}
    for name in ("terminal", "kill", "cancel_command"):
        assert run.report[name]["left"] == []


@pytest.mark.covers("R1-134")
def test_a_form_is_filled_in_or_declined(run: Run) -> None:
    elicit = run.report["elicit"]
    form = script("elicitation")

    assert elicit["accepted"] == {"action": "accept", "content": script("answer")}
    assert elicit["declined"] == {"action": "decline"}
    assert len(elicit["elicited"]) == 2
    for asked in elicit["elicited"]:
        assert asked["message"] == form["message"]
        # The type of a form is optional and has one value: only some write it.
        schema = {"type": "object", **asked["requestedSchema"]}
        assert schema == form["requestedSchema"]


@pytest.mark.covers("R1-28", "R1-33", "R1-34", "R1-35", "R1-128")
def test_a_client_that_lends_nothing_is_asked_for_nothing(run: Run) -> None:
    bare = run.report["bare"]
    error = "CapabilityError"
    asked = {frame["method"] for way, frame in run.wires[1] if way == "out" and "method" in frame}

    assert [option["type"] for option in bare["options"]] == ["select"]
    assert bare["tools"] == {"read": error, "write": error, "terminal": error}
    assert bare["elicit"]["code"] == -32603
    assert asked == {"session/update", "_interop/echo"}


# ---------------------------------------------------------------- extensions and errors


@pytest.mark.covers("R1-10", "R1-155")
def test_extension_methods_work_both_ways(run: Run) -> None:
    part = run.report["extension"]
    params = {"a": [1, None, {"ü": True}]}
    # The Python SDK takes the underscore away before it calls the handler (quirk 19).
    seen = "" if run.peer in PYTHON_SDKS else "_"

    assert part["echo"] == {"method": "_interop/echo", "params": params}
    assert part["null"] == {}
    assert part["unknown"]["code"] == -32601
    assert part["told"] == {
        "answer": {"method": f"{seen}interop/echo", "params": params},
        "unknown": -32601,
    }
    # The TypeScript SDK shows `$/cancel_request` to the handler for everything else, too.
    ticks = [tick for tick in part["ticks"] if not tick[0].startswith("$/")]
    assert ticks == [[f"{seen}interop/tick", {"n": 1}]]
    assert [told[0] for told in part["state"]] == ["_interop/tick", "_interop/poke"]
    assert part["state"][0] == ["_interop/tick", {"n": 2}]


@pytest.mark.covers("R1-8", "R1-13", "R1-32", "R1-48", "R1-51", "R1-80")
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("second prompt", -32600),
        ("second initialize", -32600),
        ("unknown method", -32601),
        ("unknown scene", -32602),
        ("audio", -32602),
        ("relative cwd", -32602),
        ("relative directory", -32602),
        ("no prompt", -32602),
        ("text for blocks", -32602),
        ("no cwd", -32602),
        ("unknown session", -32002),
    ],
)
def test_a_bad_request_is_refused_with_its_code(run: Run, what: str, code: int) -> None:
    assert run.report["errors"][what]["code"] == code


def test_an_own_error_arrives_as_it_is_and_a_crash_tells_nothing(run: Run) -> None:
    errors = run.report["errors"]

    assert errors["own error"] == {"code": 4242, "message": "Out of quota", "data": {"left": 0}}
    assert errors["crash"] == {"code": -32603, "message": "Internal error", "data": None}
    assert errors["unknown session"]["data"] == {"sessionId": "no such session"}
    assert errors["after"] == [said("echo")]


def test_an_agent_ends_with_its_client_and_a_client_learns_of_its_death(run: Run) -> None:
    assert run.report["exit"] == 0
    assert run.report["death"]["last"] == "going"
    assert run.report["death"]["error"] in {"ConnectionError", "Error"}
    assert run.report["death exit"] == 7


def test_their_handlers_do_not_wait_for_each_other(run: Run) -> None:
    # Both SDKs run a task or promise for each notification, so a handler that awaits can note updates
    # out of order; what our agent sends is in order on the wire (see below). And no answer but the
    # Python SDK's to a prompt waits for handlers: a loaded session's history comes in after the answer.
    handlers = run.report["handlers"]

    assert handlers["noted"] == ["1 ", "0 "]
    assert handlers["noted at the answer"] < len(handlers["noted at last"]) == 3
    assert handlers["noted at last"][-1] == "0 "


# ---------------------------------------------------------------- the wire


@pytest.mark.covers("R1-6", "R1-7")
def test_each_request_is_answered_once_and_nothing_else_is(run: Run) -> None:
    wire = run.wires[0]
    asked = [frame["id"] for way, frame in wire if way == "in" and is_request(frame)]
    answered = [frame["id"] for way, frame in wire if way == "out" and "method" not in frame]

    assert len(asked) > 90
    assert sorted(answered) == asked
    assert all(type(name) is int for name in answered)


@pytest.mark.covers("R1-82")
def test_a_turns_updates_are_on_the_wire_before_its_response(run: Run) -> None:
    of_turns = {entry["sessionUpdate"] for entry in script("stream")[:8]}
    running: dict[str, Any] = {}
    turns = 0
    for way, frame in run.wires[0]:
        method, params = frame.get("method"), frame.get("params", {})
        if way == "in" and method in {"session/prompt", "session/load"}:
            # A refused second prompt changes nothing.
            running.setdefault(params["sessionId"], frame["id"])
        elif way == "out" and method == "session/update":
            if params["update"]["sessionUpdate"] in of_turns:
                assert params["sessionId"] in running
        elif way == "out" and method is None:
            ended = [name for name, request in running.items() if request == frame["id"]]
            for name in ended:
                del running[name]
                turns += 1

    assert turns > 40
    assert not running


def is_request(frame: Json) -> bool:
    return "method" in frame and "id" in frame
