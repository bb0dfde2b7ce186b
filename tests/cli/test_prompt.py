"""The command as a whole, as a script sees it: exit codes, lines, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.cli import main
from tests.cli.command import BOUND, COMMAND, antiphon, environment, left_by, odd

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.cli.command import Ran


def test_agent_text_goes_to_stdout_and_everything_else_to_stderr() -> None:
    ran = antiphon("prompt", "--agent", odd("echo"), "hello out there")

    assert (ran.code, ran.out) == (0, "hello out there ")


def test_a_line_never_begins_inside_the_text_where_both_go_to_one_place() -> None:
    done = subprocess.run(
        [*COMMAND, "prompt", "--agent", odd("mutters"), "--verbose", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND,
    )

    assert done.stdout == "so\nstderr: mutter\n"


KEEPS = """
import sys
from antiphon import Agent, Turn, serve_stdio
from antiphon.journal import SqliteJournal
from antiphon.schema import v1

class Keeps(Agent):
    async def prompt(self, turn: Turn) -> None:
        said = [one async for one in turn.session.history() if isinstance(one, v1.UserMessageChunk)]
        await turn.say(f"prompt {len(said)}")

class Loads(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say("and more")

    async def load_session(self, params, context):
        await context.update(v1.AgentMessageChunk(content=v1.TextContent(text="as before")))
        return v1.LoadSessionResponse()

if sys.argv[1] == "keeps":
    serve_stdio(Keeps(), journal=SqliteJournal("sessions"))
else:
    serve_stdio(Loads())
"""


def test_a_session_that_the_agent_keeps_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    agent = ("--agent", f"{sys.executable} keeps.py keeps")

    first = antiphon("prompt", *agent, "--json", "one", cwd=tmp_path)
    session_id = json.loads(first.out.splitlines()[-1])["session_id"]
    second = antiphon("prompt", *agent, "--session", session_id, "--json", "two", cwd=tmp_path)

    update, result = map(json.loads, second.out.splitlines())
    assert update["update"]["content"]["text"] == "prompt 2"
    assert (result["session_id"], result["updates"]) == (session_id, 1)


def test_what_an_agent_replays_is_not_shown_again(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    agent = ("--agent", f"{sys.executable} keeps.py loads")

    ran = antiphon("prompt", *agent, "--session", "s-1", "--json", "go on", cwd=tmp_path)

    update, result = map(json.loads, ran.out.splitlines())
    assert update["update"]["content"]["text"] == "and more"
    assert (ran.code, result["text"], result["session_id"]) == (0, "and more", "s-1")


def test_an_agent_that_keeps_no_session_cannot_go_on_with_one(tmp_path: Path) -> None:
    ran = antiphon("prompt", "--agent", odd("echo"), "--session", "s-1", "x", cwd=tmp_path)

    assert ran.code == 4
    assert "loadSession" in ran.err


def test_a_turn_of_the_demo_agent_needs_no_agent_and_changes_nothing(tmp_path: Path) -> None:
    ran = antiphon("prompt", "--cwd", str(tmp_path), "what can you do?")

    assert ran.code == 0
    assert "what can you do?" in ran.out
    assert "I leave the file as it is" in ran.out
    assert (
        "permission: Repair leap.py -> Leave it as it is [refuses it] (deny without a terminal)"
        in ran.err
    )
    assert not list(tmp_path.iterdir())


def test_prompt_is_read_from_standard_input() -> None:
    ran = antiphon("prompt", "--agent", odd("echo"), "-", stdin="zeile eins: ä".encode())

    assert (ran.code, ran.out) == (0, "zeile eins: ä ")


def test_json_lines_hold_each_update_as_on_the_wire_from_session_new_on() -> None:
    ran = antiphon("prompt", "--json", "--agent", odd("chatty"), "x")

    assert ran.code == 0
    assert ran.out.splitlines() == ran.out.split("\n")[:-1]
    updates = [line["update"] for line in ran.lines[:-1]]
    assert updates[0]["_meta"] == {"a": [1.0]}
    assert updates[1] == {"sessionUpdate": "moon_phase", "phase": 0.5, "deep": {"x": None}}
    assert '"phase":0.50,"deep"' in ran.out
    assert '"extra":1e2' in ran.out
    assert ran.result["updates"] == len(updates)
    assert ran.result["text"] == "one two\u2028\u0085\ufffd"
    assert (ran.result["ok"], ran.result["stop_reason"]) == (True, "end_turn")
    assert "error" not in ran.result


@pytest.mark.parametrize(
    ("kind", "code", "stop_reason"),
    [("refuses", 1, "refusal"), ("new_stop_reason", 1, "went_for_lunch")],
)
def test_another_stop_reason_is_exit_code_1(kind: str, code: int, stop_reason: str) -> None:
    ran = antiphon("prompt", "--json", "--agent", odd(kind), "x")

    assert ran.code == code
    assert (ran.result["ok"], ran.result["stop_reason"]) == (False, stop_reason)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("no-such-command --at all", "'no-such-command' was not found"),
        (os.devnull, "not executable"),
        (odd("exits"), "no API key found"),
        (odd("banner_and_exits"), "To use ACP mode, please log in first."),
    ],
)
def test_an_agent_that_does_not_start_is_exit_code_3_with_its_words(agent: str, words: str) -> None:
    ran = antiphon("prompt", "--json", "--agent", agent, "x")

    assert ran.code == 3
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert ran.result["stop_reason"] is None
    assert ran.result["error"]["kind"] == "start"
    assert ran.seconds < 5


def test_an_agent_that_dies_in_its_turn_is_exit_code_3_with_status_and_last_words() -> None:
    ran = antiphon("prompt", "--json", "--agent", odd("dies"), "x")

    assert ran.code == 3
    assert ran.result["text"] == "I will"
    error = ran.result["error"]
    assert (error["kind"], error["exit_status"]) == ("died", 9)
    assert error["stderr"] == "odd: out of memory\n"
    assert "exit status: 9" in ran.err


@pytest.mark.parametrize(
    ("agent", "kind", "words"),
    [
        ("version", "version", "version 99"),
        ("error", "answer", "model failed"),
        ("nonsense", "protocol", "stopReason"),
    ],
)
def test_an_error_answer_or_a_broken_protocol_is_exit_code_4(
    agent: str, kind: str, words: str
) -> None:
    ran = antiphon("prompt", "--json", "--agent", odd(agent), "x")

    assert ran.code == 4
    error = ran.result["error"]
    assert error["kind"] == kind
    assert words in ran.err
    if agent == "error":
        assert (error["code"], error["data"]) == (500, {"detail": "the model said 500"})


def test_a_login_that_is_needed_is_exit_code_4_and_lists_the_ways() -> None:
    ran = antiphon("prompt", "--json", "--agent", odd("auth"), "x")

    assert ran.code == 4
    assert (ran.result["error"]["kind"], ran.result["error"]["code"]) == ("auth", -32000)
    assert "Sign in with a browser [browser]: opens a page" in ran.err
    assert "auth login` in a terminal" in ran.err


def test_an_agent_that_listens_is_asked_and_goes_on_listening(tmp_path: Path) -> None:
    with served("echo", tmp_path / "s") as address:
        for _ in range(2):
            ran = antiphon("prompt", "--json", "--connect", address, "hello")

            assert ran.code == 0, ran.err
            assert ran.result["text"] == "hello "
            assert ran.result["agent"] is not None


def test_where_nobody_listens_is_exit_code_3() -> None:
    ran = antiphon("prompt", "--json", "--connect", "unix:/no/such/socket", "hello")

    assert ran.code == 3
    assert ran.result["error"]["kind"] == "start"
    assert "annot connect to unix:/no/such/socket: there is no such socket" in ran.err


def test_a_login_that_an_agent_that_listens_needs_is_told_without_a_command(
    tmp_path: Path,
) -> None:
    with served("auth", tmp_path / "s") as address:
        ran = antiphon("prompt", "--connect", address, "hello")

    assert ran.code == 4
    assert "Its ways to log in, where it runs:" in ran.err
    assert "Sign in with a browser [browser]: opens a page" in ran.err
    assert "antiphon login" not in ran.err
    assert "in a terminal" not in ran.err


@contextlib.contextmanager
def served(kind: str, path: Path) -> Generator[str]:
    """One of the odd agents, a process for each who connects, as inetd would do it."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def accept() -> None:
            while True:
                client, _ = server.accept()
                if over.is_set():
                    client.close()
                    return
                words, fd = shlex.split(odd(kind)), client.fileno()
                with client:
                    processes.append(subprocess.Popen(words, stdin=fd, stdout=fd))

        processes: list[subprocess.Popen[bytes]] = []
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"unix:{path}"
        finally:
            over.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()
            for process in processes:
                process.wait(BOUND)


def test_timeout_bounds_the_whole_run_and_is_exit_code_5() -> None:
    def run(kind: str) -> Ran:
        return antiphon("prompt", "--json", "--timeout", "1", "--agent", odd(kind), "x")

    kinds = ["silent", "stubborn", "deaf", "waits_for_cancel"]
    with ThreadPoolExecutor(len(kinds)) as pool:
        for ran in pool.map(run, kinds):
            assert ran.code == 5
            assert ran.result["error"]["kind"] == "timeout"
            assert ran.seconds < 4


def test_timeout_shows_what_the_agent_wrote_in_place_of_an_answer() -> None:
    ran = antiphon("prompt", "--json", "--timeout", "1", "--agent", odd("banner"), "x")

    assert ran.code == 5
    assert ran.result["error"]["kind"] == "timeout"
    assert "Welcome to odd" in ran.err
    assert ran.seconds < 4


def test_timeout_bounds_the_end_of_a_run_too() -> None:
    # On a busy machine the turn itself may need more than that; then the limit is another.
    for limit in (1, 2, 4, 8):
        ran = antiphon("prompt", "--json", "--timeout", f"{limit}", "--agent", odd("lingers"), "x")
        if ran.code != 5:
            break

    assert ran.code == 0
    assert ran.seconds < limit + 3


def test_timeout_bounds_reading_the_prompt() -> None:
    with subprocess.Popen(
        [*COMMAND, "prompt", "--json", "--timeout", "0.5", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.wait(BOUND) == 5
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["error"]["kind"] == "timeout"


@pytest.mark.covers("FF-29")
def test_silence_of_the_agent_has_a_limit_of_its_own() -> None:
    ran = antiphon("prompt", "--json", "--silence", "0.3", "--agent", odd("waits_for_cancel"), "x")

    assert ran.code == 5
    assert "said nothing for 0.3 s" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "TEXT"),
        ([""], "empty"),
        (["-"], "empty"),
        (["--agent", "'", "x"], "No closing quotation"),
        (["--agent", "", "x"], "empty"),
        (["--cwd", "/no/such/folder", "x"], "does not exist"),
        (["--cwd", os.devnull, "x"], "is no folder"),
        (["--timeout", "soon", "x"], "--timeout: 'soon' is no number of seconds above 0"),
        (["--timeout", "0", "x"], "--timeout: '0' is no number of seconds above 0"),
        (["--silence", "0", "x"], "--silence: '0' is no number of seconds above 0"),
        (["--silence", "inf", "x"], "--silence: 'inf' is no number of seconds above 0"),
        (["--permissions", "maybe", "x"], "invalid choice"),
        (["--record", "/no/such/folder/x", "x"], "--record"),
        (["--env", "NAME", "x"], "--env 'NAME' is no NAME=VALUE"),
        (["--env", "=secret", "x"], "--env '' is no NAME=VALUE"),
        (["--env-policy", "none", "x"], "invalid choice"),
        (["--no-such-option", "x"], "unrecognized"),
        (["--root", "/no/such/folder", "x"], "--root /no/such/folder does not exist"),
        (["--root", os.devnull, "x"], "--root /dev/null is no folder"),
        (["--root", "", "x"], "--root '' is no folder"),
        (["--policy", "/no/such/policy", "x"], "/no/such/policy: cannot be read"),
        (["--policy", os.devnull, "--permissions", "often", "x"], "invalid choice"),
        (["--audit", "/no/such/folder/x", "x"], "--audit /no/such/folder/x"),
        (["--connect", "agent.sock", "x"], "--connect 'agent.sock' is no address"),
        (["--connect", "unix:s", "--agent", "a", "x"], "not allowed with argument"),
        (["--connect", "unix:s", "--env", "A=b", "x"], "are for an agent that is started"),
        (["--connect", "unix:s", "--env-policy", "essential", "x"], "for an agent that is started"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_why(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Path(os.devnull).open(encoding="ascii") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code = main(["prompt", "--json", *arguments])

    assert code == 2
    out, err = capfd.readouterr()
    assert words in err
    (line,) = map(json.loads, out.splitlines())
    assert (line["type"], line["error"]["kind"]) == ("result", "usage")


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        ([], {"outcome": "selected", "optionId": "n"}),
        (["--permissions", "deny"], {"outcome": "selected", "optionId": "n"}),
        (["--permissions", "ask"], {"outcome": "selected", "optionId": "n"}),
        (["--permissions", "allow"], {"outcome": "selected", "optionId": "y"}),
    ],
)
def test_permission_requests_are_answered_by_policy(
    policy: list[str], outcome: dict[str, str]
) -> None:
    ran = antiphon("prompt", "--json", *policy, "--agent", odd("asks"), "x")

    assert json.loads(ran.result["text"]) == outcome
    assert ran.result["permissions"] == 1


def test_a_denial_without_a_rejecting_option_is_cancelled_and_never_a_yes() -> None:
    ran = antiphon("prompt", "--json", "--agent", odd("asks_without_no"), "x")

    assert json.loads(ran.result["text"]) == {"outcome": "cancelled"}


@pytest.mark.parametrize(("policy", "done"), [("deny", False), ("ask", False), ("allow", True)])
def test_writes_and_commands_that_nobody_asked_about_are_decided_by_the_same_policy(
    policy: str, done: bool, tmp_path: Path
) -> None:
    ran = antiphon(
        *("prompt", "--permissions", policy, "--cwd", str(tmp_path)),
        *("--agent", odd("writes_and_runs"), "x"),
    )

    assert ran.out == f"{done} {done}"
    assert (tmp_path / "odd.txt").exists() is done
    assert (tmp_path / "ran.txt").exists() is done


POLICY = """
[[rule]]
name = "secrets"
decision = "deny"
path = "**/.env"

[[rule]]
name = "sources"
decision = "allow"
kind = "edit"
path = "src/**"

[[rule]]
decision = "allow"
command = "true"

[[rule]]
name = "careful"
decision = "ask"
command = "touch"
"""
TOP = {"kind": "edit", "content": [{"type": "diff", "path": "ROOT/top", "newText": "x"}]}
SECRET = {"kind": "edit", "content": [{"type": "diff", "path": "ROOT/.env", "newText": "x"}]}
#: What an agent tries, asked and unasked; the last three say less than they want.
STEPS: list[list[object]] = [
    ["read", "a.txt"],
    ["read", ".env"],
    ["write", "src/a"],
    ["write", "src/.env"],
    ["ask", TOP],
    ["write", "top"],
    ["ask", SECRET],
    ["run", {"command": "true"}],
    ["run", {"command": "true", "env": [{"name": "A", "value": "b"}]}],
    ["run", {"command": "true; touch evil"}],
    ["run", {"command": "touch", "args": ["evil"]}],
    ["ask", {"kind": "read", "title": "Read", "rawInput": {"command": "cat ROOT/.env"}}],
    ["ask", {"kind": "think", **{key: SECRET[key] for key in ("content",)}}],
    ["ask", {}],
]
NO = "permission_denied"


def works(folder: Path, *arguments: str, steps: list[list[object]], agent: str = "") -> Any:
    """What came of the steps of an agent, and what it was told."""
    (folder / "src").mkdir(exist_ok=True)
    for name in ("a.txt", ".env"):
        (folder / name).write_text("old")
    (folder / "policy.toml").write_text(POLICY)
    text = json.dumps(steps).replace("ROOT", str(folder))
    ran = antiphon(
        *("prompt", "--cwd", str(folder), *arguments, "--agent", f"{odd('works')} {agent}", text),
        cwd=folder,
    )
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


RULED = ["--policy", "policy.toml"]


@pytest.mark.covers("FF-27")
@pytest.mark.parametrize(
    ("arguments", "outcomes"),
    [
        ([], ["done", "done", NO, NO, "n", NO, "n", NO, NO, NO, NO, "n", "n", "n"]),
        (
            ["--allow-write"],
            ["done", "done", "done", "done", "y", "done", "y", NO, NO, NO, NO, "n", "n", "n"],
        ),
        (["--permissions", "allow"], [*["done"] * 4, "y", "done", "y", *["done"] * 4, *"yyy"]),
        (RULED, ["done", NO, "done", NO, "n", NO, "n", "done", NO, NO, NO, "n", "n", "n"]),
        (
            [*RULED, "--permissions", "deny"],
            ["done", NO, "done", NO, "n", NO, "n", "done", NO, NO, NO, "n", "n", "n"],
        ),
        (
            [*RULED, "--allow-write"],
            ["done", NO, "done", NO, "y", "done", "n", "done", NO, NO, NO, "n", "n", "n"],
        ),
        (
            [*RULED, "--permissions", "allow"],
            ["done", NO, "done", NO, "y", "done", "n", "done", "done", NO, NO, "n", "n", "n"],
        ),
    ],
)
def test_rules_come_first_then_allow_write_then_permissions(
    arguments: list[str], outcomes: list[str], tmp_path: Path
) -> None:
    assert works(tmp_path, *arguments, steps=STEPS)["outcomes"] == outcomes
    if arguments != ["--permissions", "allow"]:
        assert not (tmp_path / "evil").exists()
    if RULED[0] in arguments:
        assert (tmp_path / ".env").read_text() == "old"
        assert not (tmp_path / "src" / ".env").exists()


def test_roots_are_lent_in_place_of_the_sessions_folder(tmp_path: Path) -> None:
    here, one, two = (tmp_path / name for name in ("here", "one", "two"))
    for folder in (here, one, two):
        folder.mkdir()
    steps: list[list[object]] = [
        ["read", "a.txt"],
        ["write", "../one/a"],
        ["write", f"../../{tmp_path.name}/two/a"],
        ["run", {"command": "true"}],
        ["run", {"command": "true", "cwd": str(two)}],
    ]
    roots = ["--root", str(one), "--root", f"{two}/", "--root", str(one), "--root", "src"]

    (here / "src").mkdir()
    said = works(here, "--permissions", "allow", *roots, steps=steps)

    outside = said["outcomes"][0]
    assert outside not in {"done", NO}
    assert said["outcomes"][3:] == [outside, "done"]
    assert (said["cwd"], said["told"]) == (str(here), None)
    said = works(here, *roots, steps=[], agent="directories")
    assert said["told"] == [str(one), str(two)]


def test_a_relative_rule_holds_in_each_root_whatever_the_agent_takes(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    (other / "src").mkdir(parents=True)
    steps: list[list[object]] = [
        ["ask", {"kind": "edit", "locations": [{"path": f"{other}/.env"}]}],
        ["ask", {"kind": "edit", "locations": [{"path": f"{other}/src/a"}]}],
        ["ask", {"kind": "edit", "locations": [{"path": f"{tmp_path}/src/a"}]}],
    ]
    for agent in ("", "directories"):
        said = works(here, *RULED, "--root", str(other), steps=steps, agent=agent)

        assert said["outcomes"] == ["n", "y", "n"]


@pytest.mark.parametrize(("arguments", "lent"), [([], True), (["--no-terminal"], False)])
def test_a_terminal_that_is_not_lent_is_not_advertised(
    arguments: list[str], lent: bool, tmp_path: Path
) -> None:
    steps: list[list[object]] = [["run", {"command": "true"}]]
    said = works(tmp_path, "--permissions", "allow", *arguments, steps=steps)

    assert bool(said["lent"]["terminal"]) is lent
    assert said["lent"]["fs"] == {"readTextFile": True, "writeTextFile": True}
    assert said["outcomes"] == ["done" if lent else "-32601"]


def test_an_audit_has_a_line_for_each_decision(tmp_path: Path) -> None:
    audit = tmp_path / "audit.ndjson"

    said = works(tmp_path, *RULED, "--audit", str(audit), steps=STEPS)

    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert len(lines) == len(STEPS)
    yes = {"done": "allow", "y": "allow", NO: "deny", "n": "deny"}
    assert [line["outcome"] for line in lines] == [yes[what] for what in said["outcomes"]]
    assert (lines[1]["by"], lines[1]["rule"]) == ("rule", "secrets")
    assert lines[1]["paths"] == [f"{tmp_path}/.env"]
    assert lines[9]["command"] == ["/bin/sh", "-c", "true; touch evil"]


def test_the_files_that_a_run_goes_by_are_not_the_agents_to_write(tmp_path: Path) -> None:
    (tmp_path / "policy.link").symlink_to("policy.toml")
    steps: list[list[object]] = [
        ["write", name]
        for name in ("policy.toml", "policy.link", "audit.ndjson", "src/../wire.ndjson", "a.txt")
    ]
    files = ["--audit", "audit.ndjson", "--record", "wire.ndjson"]

    said = works(tmp_path, "--policy", "policy.link", *files, "--permissions", "allow", steps=steps)

    assert said["outcomes"][:3] == [NO, NO, NO]
    assert said["outcomes"][3] != "done"
    assert said["outcomes"][4] == "done"
    assert (tmp_path / "policy.toml").read_text() == POLICY
    lines = [json.loads(line) for line in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert {line["why"] for line in lines if line["outcome"] == "deny"} == {
        "this run goes by that file"
    }


def test_a_session_that_is_not_its_own_is_no_way_round_the_policy(tmp_path: Path) -> None:
    steps: list[list[object]] = [["ask", TOP, {"sessionId": "s-2"}], ["write", "top"]]

    said = works(tmp_path, "--policy", "policy.toml", steps=steps)

    assert said["outcomes"] == ["n", NO]


def test_a_policy_that_is_none_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[[rule]]\ndecision = "deny"\npaht = "x"\n')
    agent = shlex.join([sys.executable, "-c", "open('started', 'w')"])

    ran = antiphon("prompt", "--policy", "bad.toml", "--agent", agent, "x", cwd=tmp_path)

    assert ran.code == 2
    assert "bad.toml, rule 1, paht: no such key" in ran.err
    assert not (tmp_path / "started").exists()


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ([], "s3cret here -"),
        (["--env", "ADDED=a=b c"], "s3cret here a=b c"),
        (["--env-policy", "inherit", "--env", "SECRET_X=", "--env", "ADDED=1"], " here 1"),
        (["--env-policy", "essential"], "- here -"),
        (["--env-policy", "essential", "--env", "ADDED=1", "--env", "ADDED=2"], "- here 2"),
    ],
)
def test_the_agent_sees_of_our_environment_what_it_may(options: list[str], seen: str) -> None:
    ran = antiphon(
        *("prompt", "--agent", odd("sees"), *options, "SECRET_X LANG ADDED"),
        env={"SECRET_X": "s3cret", "LANG": "here"},
    )

    assert ran.out.rstrip("\n") == seen


def test_the_help_says_what_the_agent_sees_of_our_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["prompt", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())

    assert "all of it (the default" in text
    assert "--env NAME=VALUE" in text


def test_record_keeps_the_wire_in_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "wire.ndjson"

    antiphon("prompt", "--record", str(file), "--agent", odd("echo"), "x")

    frames = [json.loads(line) for line in file.read_text().splitlines()]
    methods = [frame["frame"].get("method") for frame in frames]
    assert methods[0] == "initialize"
    assert "session/update" in methods
    assert len({frame["dir"] for frame in frames}) == 2


def test_verbose_shows_the_agents_standard_error() -> None:
    silent = antiphon("prompt", "--agent", odd("mutters"), "x")
    verbose = antiphon("prompt", "--verbose", "--agent", odd("mutters"), "x")

    assert "mutter" not in silent.err
    assert "stderr: mutter" in verbose.err


def test_text_in_a_pipe_is_untouched_and_text_elsewhere_cannot_drive_the_terminal() -> None:
    ran = antiphon("prompt", "--agent", odd("escapes"), "x")

    assert ran.out == "\x1b]0;pwned\x07red \x1b[31mtext"
    assert "\x1b" not in ran.err


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_cancels_the_turn_and_is_exit_code_130(number: signal.Signals) -> None:
    marked = environment()
    with subprocess.Popen(
        [*COMMAND, "prompt", "--json", "--agent", odd("waits_for_cancel"), "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=marked,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=BOUND)

    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert b"Interrupted." in err
    assert not left_by(marked)


def test_a_second_interrupt_stops_at_once() -> None:
    marked = environment()
    with subprocess.Popen(
        [*COMMAND, "prompt", "--agent", odd("deaf"), "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=marked,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(7) == b"working"
        process.send_signal(signal.SIGINT)
        assert b"interrupt again" in process.stderr.readline()
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=BOUND)

    assert process.returncode == 130
    assert time.monotonic() - started < 1.5
    assert not left_by(marked)


def test_an_interrupt_during_the_start_ends_the_agent_too() -> None:
    marked = environment()
    with subprocess.Popen(
        [*COMMAND, "prompt", "--verbose", "--agent", odd("stubborn"), "x"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=marked,
    ) as process:
        assert process.stderr is not None
        assert b"stderr: child" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert b"interrupt again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=BOUND)

    assert process.returncode == 130
    assert not left_by(marked)


def test_a_reader_that_leaves_ends_the_turn_without_a_traceback() -> None:
    marked = environment()
    with subprocess.Popen(
        [*COMMAND, "prompt", "--agent", odd("babbles"), "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=marked,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(BOUND) == 130

    assert b"Traceback" not in err
    assert not left_by(marked)


@pytest.mark.parametrize(
    ("closed", "agent", "code"),
    [(0, "echo", 0), (1, "echo", 0), (2, "echo", 0), (2, "dies", 3)],
)
def test_closed_standard_streams_change_nothing_else(closed: int, agent: str, code: int) -> None:
    done = subprocess.run(
        [
            *("/bin/sh", "-c", f'exec "$0" "$@" {closed}>&-'),
            *(*COMMAND, "prompt", "--agent", odd(agent), "x"),
        ],
        capture_output=True,
        timeout=BOUND,
    )

    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_the_command_is_run_where_the_user_stands_and_the_session_has_its_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "mein ä agent.py").write_text(
        "import json, os, sys\n"
        "def read(): return json.loads(sys.stdin.readline())\n"
        "def answer(m, r): print(json.dumps({'jsonrpc': '2.0', 'id': m['id'], 'result': r}), flush=True)\n"
        "answer(read(), {'protocolVersion': 1})\n"
        "m = read(); cwd = m['params']['cwd']; answer(m, {'sessionId': 's'})\n"
        "m = read()\n"
        "text = os.getcwd() + ' ' + cwd\n"
        "update = {'sessionUpdate': 'agent_message_chunk', 'content': {'type': 'text', 'text': text}}\n"
        "print(json.dumps({'jsonrpc': '2.0', 'method': 'session/update',"
        " 'params': {'sessionId': 's', 'update': update}}), flush=True)\n"
        "answer(m, {'stopReason': 'end_turn'})\n"
    )
    (tmp_path / "project").mkdir()

    ran = antiphon(
        *("prompt", "--agent", shlex.join([sys.executable, "mein ä agent.py"])),
        *("--cwd", "project", "x"),
        cwd=tmp_path,
    )

    assert ran.out.split() == [str(tmp_path), str(tmp_path / "project")]
