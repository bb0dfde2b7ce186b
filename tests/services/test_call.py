"""How calls are read: from requests as real agents and liars send them, and from what services will do."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.schema import v1, v1_unstable
from antiphon.services import Call, Operation, Rule
from antiphon.services._call import MAX_PATH, MAX_PATHS, MAX_TITLE
from antiphon.services._rules import MAX_RULES, Policy

LINE = "git status; rm -rf ~"
SHELL = ("/bin/sh", "-c", LINE)


def decision(rules: list[Rule], of: Call, **options: Any) -> str:
    return Policy(rules, **options).judge(of).decision


def request(**tool: Any) -> v1_unstable.RequestPermissionRequest:
    raw: dict[str, Any] = {
        "sessionId": "s1",
        "toolCall": {"toolCallId": "t1", **tool},
        "options": [],
    }
    return msgspec.convert(raw, v1_unstable.RequestPermissionRequest)


def of_request(**tool: Any) -> Call:
    return Call.of_request(request(**tool), ("/w", "/v"))


@pytest.mark.parametrize(
    ("raw", "command"),
    [
        # A line of plain words is these words; anything else is what a shell makes of it.
        ("git status", ("git", "status")),
        ("git log --oneline -n5 a/b=c", ("git", "log", "--oneline", "-n5", "a/b=c")),
        (LINE, SHELL),
        ("git status\nrm -rf ~", ("/bin/sh", "-c", "git status\nrm -rf ~")),
        ("git  status", ("/bin/sh", "-c", "git  status")),
        ("git status ", ("/bin/sh", "-c", "git status ")),
        ("git\tstatus", ("/bin/sh", "-c", "git\tstatus")),
        ("PATH=/tmp git status", ("/bin/sh", "-c", "PATH=/tmp git status")),
        ("git $(x)", ("/bin/sh", "-c", "git $(x)")),
        ("git `x`", ("/bin/sh", "-c", "git `x`")),
        ("git 'a b'", ("/bin/sh", "-c", "git 'a b'")),
        ("git ~", ("/bin/sh", "-c", "git ~")),
        ("git *", ("/bin/sh", "-c", "git *")),
        ("git #", ("/bin/sh", "-c", "git #")),
        ("-x git", ("/bin/sh", "-c", "-x git")),
        ("gıt status", ("/bin/sh", "-c", "gıt status")),
        ("git\u00a0status", ("/bin/sh", "-c", "git\u00a0status")),
        ({"command": "git status"}, ("git", "status")),
        ({"command": LINE}, SHELL),
        ({"command": ["git", "commit", "-m", "a; b"]}, ("git", "commit", "-m", "a; b")),
        ({"command": "git", "args": ["status"]}, ("git", "status")),
        ({"command": "git", "args": []}, ("git",)),
        ({"command": "git status", "args": ["x"]}, ("git status", "x")),
        ({"cmd": "git status"}, ("git", "status")),
        ({"cmd": ["ls"]}, ("ls",)),
        ({"argv": ["ls", "-l"]}, ("ls", "-l")),
        (["ls", "-l"], ("ls", "-l")),
        ({"command": ["bash", "-lc", LINE]}, SHELL),
        ({"command": ["/bin/bash", "-c", LINE]}, SHELL),
        ({"command": ["sh", "-c", "git status"]}, ("git", "status")),
        ({"command": "bash", "args": ["-lc", LINE]}, SHELL),
        ({"command": ["zsh", "-l", "-c", LINE]}, SHELL),
        ({"command": ["bash", "-c", LINE, "x"]}, ("bash", "-c", LINE, "x")),
        ({"command": ["./bash", "-c", "git status"]}, ("./bash", "-c", "git status")),
        ({"command": ["bash", "-ic", "git status"]}, ("bash", "-ic", "git status")),
    ],
)
def test_the_commands_of_real_agents_are_read_as_they_will_be_run(raw: Any, command: Any) -> None:
    of = of_request(kind="execute", title="Run", rawInput=raw)
    assert (of.command, of.doubt) == (command, "")
    assert of.cwd == "/w"
    allowed = decision([Rule("allow", command="git")], of)
    assert (allowed == "allow") == (command[0] == "git")


@pytest.mark.parametrize(
    "raw",
    [
        {"command": ""},
        {"command": "  "},
        {"command": []},
        {"command": [""]},
        {"command": 5},
        {"command": {"program": "git"}},
        {"command": ["git", 5]},
        {"command": "git", "args": "status"},
        {"command": "git", "args": [5]},
        {"command": "git\0"},
        {"command": ["git", "a\0b"]},
        {"command": "git", "cmd": "rm"},
        {"command": ["git"], "argv": ["rm", "x"]},
        {"command": "git", "env": 5},
        {"command": "git", "env": [5]},
    ],
)
def test_a_command_that_cannot_be_read_is_never_allowed_by_a_rule(raw: Any) -> None:
    of = of_request(kind="execute", title="git", rawInput=raw)
    assert of.doubt
    for rule in (Rule("allow"), Rule("allow", command="*"), Rule("allow", kind="execute")):
        assert decision([rule], of, default="allow") == "ask"


def test_a_request_s_environment_and_directory_are_read() -> None:
    raw = {"command": "git status", "cwd": "sub", "env": {"PATH": "/tmp"}}
    of = of_request(kind="execute", rawInput=raw)
    assert (of.cwd, of.env) == ("/w/sub", {"PATH": "/tmp"})
    assert decision([Rule("allow", command="git")], of) == "ask"
    for env in ([{"name": "PATH", "value": "x"}], ["PATH=x"], [{"name": "PATH"}]):
        of = of_request(rawInput={"command": "git", "env": env, "workdir": "/w/d"})
        assert (list(of.env), of.cwd, of.kind) == (["PATH"], "/w/d", "execute")


def test_all_paths_count_wherever_a_request_names_them() -> None:
    diff = {"type": "diff", "path": "/w/d", "newText": ""}
    of = of_request(
        kind="edit",
        content=[diff, {"type": "content", "content": {"type": "text", "text": "/w/no"}}],
        locations=[{"path": "/w/l", "line": 3}, {"path": "/w/./l"}],
        rawInput={"file_path": "/w/.env", "paths": ["a", "/w/p"], "content": "/w/no"},
    )
    assert of.paths == ("/w/d", "/w/l", "/w/.env", "/w/a", "/w/p")
    assert of.changes == ("/w/d",)
    assert decision([Rule("deny", path="**/.env"), Rule("allow", kind="edit")], of) == "deny"


def test_a_request_that_says_less_than_a_denial_needs_is_asked() -> None:
    rules = [
        Rule("deny", path="**/.env"),
        Rule("allow", kind=["edit", "execute", "other", "think"]),
    ]
    assert decision(rules, of_request(kind="edit", title="Edit something")) == "ask"
    assert decision(rules, of_request(title="Something")) == "ask"
    assert decision(rules, of_request()) == "ask"
    assert decision(rules, of_request(kind="think")) == "allow"
    assert decision(rules, of_request(kind="edit", locations=[{"path": "/w/a"}])) == "allow"


def test_what_was_said_before_completes_a_request_that_is_only_a_patch() -> None:
    known = SimpleNamespace(
        title="Run",
        kind="execute",
        content=[],
        locations=[v1.ToolCallLocation(path="/w/a")],
        raw_input={"command": LINE},
    )
    of = Call.of_request(request(), ("/w",), known=known)
    assert (of.kind, of.title, of.paths, of.command) == ("execute", "Run", ("/w/a",), SHELL)
    # What the request says itself is what counts.
    patched = Call.of_request(request(rawInput={"command": "ls"}), ("/w",), known=known)
    assert patched.command == ("ls",)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "a\0b",
            "",
            "/w/x/../../.env",
            "../.env",
            "~/.ssh/id",
            "file:///etc/passwd",
            "C:\\x",
            "C:/x",
        ),
        *("/" + "a" * MAX_PATH, "\ud800"),
    ],
)
def test_a_path_that_may_be_another_one_is_in_doubt(path: str) -> None:
    params = request(kind="edit")
    params.tool_call.locations = [v1.ToolCallLocation(path=path)]
    of = Call.of_request(params, ("/w",))
    assert of.doubt
    assert decision([Rule("allow", path="/**"), Rule("allow")], of) == "ask"


def test_parent_directories_in_a_path_are_gone_before_it_is_compared() -> None:
    of = of_request(kind="edit", locations=[{"path": "/w/x/../.env"}])
    assert of.paths == ("/w/.env",)
    assert decision([Rule("deny", path="**/.env")], of) == "deny"


@pytest.mark.covers("FF-42")
def test_a_relative_path_is_below_the_first_directory() -> None:
    assert of_request(locations=[{"path": "a/b"}]).paths == ("/w/a/b",)
    unknown = Call.of_request(request(locations=[{"path": "a"}]), ())
    assert unknown.doubt


def test_without_known_directories_nothing_with_a_place_is_allowed_by_a_rule() -> None:
    of = Call.of_request(request(kind="edit", locations=[{"path": "/w/a"}]), ())
    assert decision([Rule("allow", kind="edit")], of) == "ask"
    assert not Call.of_request(request(kind="think"), ()).doubt


def test_a_huge_request_is_cut_and_in_doubt_and_costs_little() -> None:
    many = [{"path": f"/w/{n}"} for n in range(50_000)]
    began = time.process_time()
    of = of_request(kind="edit", title="x" * 1_000_000, locations=many)
    policy = Policy(
        [Rule("deny", path=f"**/x{n}/**/y*") for n in range(MAX_RULES)], default="allow"
    )
    assert policy.judge(of).decision == "ask"
    assert time.process_time() - began < 5
    assert len(of.paths) == MAX_PATHS
    assert len(of.title) == MAX_TITLE
    assert of.doubt


@pytest.mark.parametrize(
    "fields",
    [
        {"locations": [{"path": "/w/" + "a/" * 2_000_000}]},
        {"locations": [{"path": f"/w/{n}/" + "a/" * 2_000} for n in range(MAX_PATHS)]},
        {"rawInput": {"command": "a " * 2_000_000}},
        {"rawInput": {"command": ["rm"] * 1_000_000}},
        {"rawInput": {"command": "rm", "args": ["a" * 100_000] * 20}},
        {"rawInput": {"command": "rm", "env": {str(n): "" for n in range(100_000)}}},
        {"rawInput": {"command": "rm", "env": [str(n) for n in range(100_000)]}},
        {"content": [{"type": "diff", "path": "/w/a" * 1_000_000, "newText": ""}]},
    ],
)
def test_whatever_is_huge_is_in_doubt_and_costs_little(fields: dict[str, Any]) -> None:
    wanted = request(kind="execute" if "rawInput" in fields else "edit", **fields)
    policy = Policy([Rule("deny", path=f"**/{n}/**/y") for n in range(10)], default="allow")
    began = time.process_time()
    of = Call.of_request(wanted, ("/w", "/v"))
    assert policy.judge(of).decision == "ask"
    assert time.process_time() - began < 1
    assert of.doubt
    assert sum(map(len, (*of.paths, *of.changes, *(of.command or ())))) < 256 * 1024
    assert len(of.env) <= 1024


def test_an_operation_is_what_a_service_is_about_to_do() -> None:
    write = Operation(kind="write", session_id="s", title="Write /w/a", path="/w/a")
    assert Call.of_operation(write, ("/w",)) == Call(
        kind="edit", title="Write /w/a", paths=("/w/a",), session_id="s", roots=("/w",)
    )
    run = Operation(
        kind="execute",
        session_id="s",
        title="x",
        command=["/bin/sh", "-c", "git status"],
        cwd="/w/d",
        env={"A": "1"},
    )
    of = Call.of_operation(run, ("/w",))
    assert (of.kind, of.command, of.cwd, of.env) == (
        "execute",
        ("git", "status"),
        "/w/d",
        {"A": "1"},
    )
    assert Call.of_operation(run).doubt
    read = Operation(kind="read", session_id="s", title="Read /w/a", path="/w/a")
    assert Call.of_operation(read, ("/w",)).kinds == ("read",)


def test_a_line_s_words_are_those_that_it_will_be_judged_by() -> None:
    assert Call.words("git status") == ("git", "status")
    assert Call.words(LINE) == SHELL


strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["command", "cmd", "args", "path", "env", "cwd", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(strange, st.sampled_from(["execute", "edit", "read", "other"]))
def test_no_raw_input_breaks_the_reading_of_a_request(raw: Any, kind: str) -> None:
    of = Call.of_request(
        v1_unstable.RequestPermissionRequest(
            session_id="s",
            tool_call=v1.ToolCallUpdate(tool_call_id="t", kind=kind, raw_input=raw),
            options=[],
        ),
        ("/w",),
    )
    policy = Policy([Rule("allow", command="git"), Rule("deny", path="**/.env")], default="deny")
    policy.judge(of)
    match raw:
        case {"command": command} if command is not None:
            assert of.command is not None or of.doubt
        case _:
            pass
