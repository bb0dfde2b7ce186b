"""`antiphon policy test`, as it is typed, and what its `--call` means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.cli import main
from antiphon.cli._arguments import UsageError
from antiphon.cli._policy import read_call
from tests.cli.command import antiphon

if TYPE_CHECKING:
    from pathlib import Path

POLICY = """
default = "deny"

[[rule]]
name = "secrets"
decision = "deny"
path = "**/.env"

[[rule]]
name = "look"
decision = "allow"
command = "git"
args = ["status", "**"]

[[rule]]
decision = "ask"
kind = "edit"
path = "src/**"
deadline = 30
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return str(path)


def judged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str, *arguments: str
) -> tuple[int, list[dict[str, Any]]]:
    code = main(["policy", "test", file, "--json", "--cwd", str(tmp_path), *arguments])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("call", "decision", "number", "code"),
    [
        ("execute:git status", "allow", 2, 0),
        ("execute: git status ", "allow", 2, 0),
        ("execute:git status; rm -r x", "deny", None, 1),
        ("execute:/tmp/git status", "deny", None, 1),
        ('{"command": ["git", "status", "-s"]}', "allow", 2, 0),
        ('{"command": "git", "args": ["status"]}', "allow", 2, 0),
        ('{"command": ["git", "status"], "env": {"PATH": "/tmp"}}', "deny", None, 1),
        ("edit:src/a.py", "ask", 3, 3),
        ("edit:a.py", "deny", None, 1),
        ("edit:src/.env", "deny", 1, 1),
        ("edit:src/../.env", "deny", 1, 1),
        ('{"changes": ["src/a.py", "src/.env"]}', "deny", 1, 1),
        ("read:a.py", "allow", None, 0),
        ("read:.env", "deny", 1, 1),
        ("other:anything", "deny", None, 1),
    ],
)
def test_a_call_is_decided_by_the_first_rule_that_matches(
    call: str,
    decision: str,
    number: int | None,
    code: int,
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, lines = judged(capsys, tmp_path, file, "--call", call)

    assert (found, lines[0]["decision"], lines[0]["number"]) == (code, decision, number)
    assert (lines[0]["type"], lines[0]["call"]) == ("verdict", call)


@pytest.mark.parametrize(
    ("calls", "code"),
    [
        (["read:a", "execute:git status"], 0),
        (["read:a", "edit:src/a"], 3),
        (["edit:src/a", "read:.env"], 1),
    ],
)
def test_the_worst_of_several_calls_is_the_exit_code(
    calls: list[str],
    code: int,
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, lines = judged(capsys, tmp_path, file, *(w for call in calls for w in ("--call", call)))

    assert found == code
    assert [line["call"] for line in lines] == calls


def test_a_person_reads_the_decision_the_rule_and_why_not_the_earlier_ones(
    file: str, tmp_path: Path
) -> None:
    ran = antiphon(
        *("policy", "test", file, "--verbose", "--cwd", str(tmp_path), "--call", "edit:src/a.py")
    )

    assert ran.code == 3
    assert ran.out == (
        "ask    edit:src/a.py\n"
        f"       rule 3 matches ({file})\n"
        "       a person has to say yes within 30 s; where there is none it is refused\n"
        f"       rule 1 ('secrets'), deny: does not match by path ({tmp_path}/src/a.py)\n"
        "       rule 2 ('look'), allow: does not match by command and args (it runs none)\n"
    )
    assert ran.err == ""


@pytest.mark.parametrize(
    ("rule", "call", "why"),
    [
        ('kind = "read"', "edit:a", "does not match by kind (edit)"),
        ('title = "x"', "edit:a", "does not match by title (it has no title)"),
        ('session = "x"', "edit:a", "does not match by session ('test')"),
        ('cwd = "x"', "execute:ls", "does not match by cwd (ROOT)"),
        ('env = "X*"', '{"command": ["ls"], "env": {"A": ""}}', "does not match by env (A)"),
        ('args = ["x"]', "execute:ls y", "does not match by args (ls y)"),
        (
            'kind = "read"\npath = "b"',
            "edit:a",
            "does not match by kind (edit), path (ROOT/a)",
        ),
        (
            'command = "ls"',
            '{"command": ["ls"], "env": {"A": ""}}',
            "does not match: the call adds to the environment (A)",
        ),
    ],
)
def test_verbose_names_the_keys_that_do_not_match(
    rule: str, call: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f'[[rule]]\ndecision = "allow"\n{rule}\n')

    _, lines = judged(capsys, tmp_path, str(file), "--verbose", "--call", call)

    assert [rule["why"].replace(str(tmp_path), "ROOT") for rule in lines[0]["earlier"]] == [why]


def test_verbose_tells_a_rule_that_cannot_be_excluded(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = judged(
        capsys, tmp_path, file, "--verbose", "--permissions", "allow", "--call", "other:anything"
    )

    assert code == 3
    assert "cannot be excluded" in lines[0]["why"]
    code, lines = judged(capsys, tmp_path, file, "--verbose", "--call", "other:anything")
    assert "the call does not say its path" in lines[0]["earlier"][0]["why"]


def test_the_options_of_prompt_mean_the_same_here(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(capsys, tmp_path, file, "--permissions", "allow", "--call", "edit:a")[0] == 0
    assert judged(capsys, tmp_path, file, "--permissions", "ask", "--call", "edit:a")[0] == 3
    code, lines = judged(capsys, tmp_path, file, "--allow-write", "--call", "edit:a")
    assert (code, lines[0]["rule"]) == (0, "--allow-write")
    assert judged(capsys, tmp_path, file, "--allow-write", "--call", "edit:.env")[0] == 1
    assert judged(capsys, tmp_path, file, "--allow-write", "--call", "execute:ls")[0] == 1


def test_what_the_file_says_of_reads_and_deadlines_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("reads = 'deny'\ndeadline = 60\n[[rule]]\ndecision = 'allow'\npath = 'x'\n")

    code, lines = judged(capsys, tmp_path, str(file), "--call", "read:a", "--call", "execute:ls")

    assert (code, lines[0]["decision"], lines[1]["decision"]) == (1, "deny", "ask")
    assert [line["deadline"] for line in lines] == [None, 60]


def test_relative_globs_begin_in_each_folder(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    call = f"edit:{other}/src/a"

    assert judged(capsys, tmp_path, file, "--call", call)[0] == 1
    assert judged(capsys, tmp_path, file, "--root", str(other), "--call", call)[0] == 3


def test_a_file_that_is_not_lent_is_told(file: str, tmp_path: Path) -> None:
    ran = antiphon("policy", "test", file, "--cwd", str(tmp_path), "--call", "read:/etc/passwd")

    assert ran.code == 0
    assert "/etc/passwd lies outside of what is lent" in ran.out


def test_a_link_is_told_with_where_it_leads(file: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(".env")

    ran = antiphon("policy", "test", file, "--cwd", str(tmp_path), "--call", "read:link")

    assert f"{tmp_path}/link leads to {tmp_path}/.env" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "FILE, --call"),
        (["FILE"], "--call"),
        (["FILE", "--call", ""], "neither KIND:WHAT nor a JSON object"),
        (["FILE", "--call", "git status"], "neither KIND:WHAT nor a JSON object"),
        (["FILE", "--call", "run:git status"], "no such kind: 'run'; 'execute' is meant?"),
        (["FILE", "--call", "Edit:a"], "no such kind: 'Edit'; 'edit' is meant?"),
        (["FILE", "--call", "dance:a"], "no such kind: 'dance'; there are read, edit"),
        (["FILE", "--call", "edit:"], "nothing after edit:"),
        (["FILE", "--call", "{"], "truncated"),
        (["FILE", "--call", '{"kin": 1}'], "its keys are kind, title"),
        (["FILE", "--call", '{"kind": 1}'], "Expected `str`, got `int`"),
        (["FILE", "--call", '{"kind": "look"}'], "no such kind: 'look'"),
        (["FILE", "--call", '{"command": []}'], "the command is empty"),
        (["FILE", "--call", '{"command": " "}'], "the command is empty"),
        (["FILE", "--call", '{"args": ["a"]}'], "args without a command"),
        (["FILE", "--call", '{"paths": [""]}'], "a path is empty"),
        (["FILE", "--call", "[" * 2000], "neither"),
        (["FILE", "--call", '{"env":' * 3000], "--call"),
        (["/no/such/file", "--call", "read:a"], "/no/such/file: cannot be read"),
        (["/", "--call", "read:a"], "/: cannot be read"),
        (["FILE", "--cwd", "/no/such", "--call", "read:a"], "--cwd /no/such does not exist"),
        (["FILE", "--root", "/no/such", "--call", "read:a"], "--root /no/such does not exist"),
        (["FILE", "--permissions", "maybe", "--call", "read:a"], "invalid choice"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_why(
    arguments: list[str], words: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["policy", "test", *(file if word == "FILE" else word for word in arguments)])

    captured = capsys.readouterr()
    assert code == 2
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = 'maybe'", "policy.toml, default: one of 'allow'"),
        ("[[rule]]\ndecision = 'deny'\npaht = 'x'", "policy.toml, rule 1, paht: no such key"),
        ("[[rule]", "not TOML"),
    ],
)
def test_a_file_that_is_no_policy_is_exit_code_2_and_says_where(
    text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text(text)

    ran = antiphon("policy", "test", "policy.toml", "--json", "--call", "read:a", cwd=tmp_path)

    assert ran.code == 2
    assert words in ran.err
    assert ran.result["error"]["kind"] == "usage"


def test_the_help_shows_each_kind_of_call_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["policy", "test", "--help"]) == 0

    text = capsys.readouterr().out
    for words in ("execute:COMMAND LINE", "read:PATH", '{"kind": …', "exit codes:", "--call edit:"):
        assert words in text


def test_policy_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy"]) == 2
    assert "COMMAND" in capsys.readouterr().err
    assert main(["policy", "--help"]) == 0
    assert "test" in capsys.readouterr().out


def test_a_text_from_elsewhere_cannot_drive_the_terminal_or_break_a_line(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["policy", "test", file, "--cwd", str(tmp_path), "--call", "other:\x1b]0;x\x07"])
    assert "\x1b" not in capsys.readouterr().out
    main(["policy", "test", file, "--cwd", str(tmp_path), "--call", "execute:ls\nallow  rm"])
    assert capsys.readouterr().out.splitlines()[0] == "deny   execute:ls⏎allow  rm"
    main(["policy", "test", f"{file}\x1b[2J", "--call", "other:x"])
    assert "\x1b" not in capsys.readouterr().err
    _, lines = judged(capsys, tmp_path, file, "--call", "read:a\u2028\udcff")
    assert len(lines) == 1


def test_a_call_is_read_as_the_agents_own_request_would_be() -> None:
    roots = ("/project",)

    assert read_call("execute:a | b", roots).command == ("/bin/sh", "-c", "a | b")
    assert read_call("execute:a b", roots).command == ("a", "b")
    assert read_call('{"changes": ["a"]}', roots).kinds == ("edit",)
    assert read_call('{"path": "a", "paths": ["/b"]}', roots).paths == ("/project/a", "/b")
    assert read_call('{"command": "make", "cwd": "sub"}', roots).cwd == "/project/sub"
    assert "'..'" in read_call("read:a/../b", roots).doubt
    with pytest.raises(UsageError):
        read_call("a", roots)
