"""What rules say: against a plain model, in tables, and about requests as real agents and liars send them."""

from __future__ import annotations

import copy
import pickle
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.schema import v1, v1_unstable
from antiphon.services import Call, Operation, PolicyError, Rule
from antiphon.services import _rules as rules_module
from antiphon.services._rules import MAX_PATH, MAX_PATHS, MAX_RULES, MAX_TITLE, Policy, spelled

LINE = "git status; rm -rf ~"
SHELL = ("/bin/sh", "-c", LINE)


def call(**fields: Any) -> Call:
    known: dict[str, Any] = {"roots": ("/w",), "cwd": "/w", **fields}
    return Call(**known)


def decision(rules: list[Rule], of: Call, **options: Any) -> str:
    return Policy(rules, **options).judge(of).decision


# ------------------------------------------------------------------ against a model

PATHS = ("/w/a", "/w/s/b", "/x/c")
#: Which of them a glob matches, by hand.
FITS = {
    "**": {"/w/a", "/w/s/b"},
    "s/**": {"/w/s/b"},
    "/x/*": {"/x/c"},
    "/**": set(PATHS),
    "nothing": set[str](),
}
COMMANDS: tuple[tuple[str, ...] | None, ...] = (None, ("git", "x"), ("/bin/rm", "x"), SHELL)

globs = st.lists(st.sampled_from(sorted(FITS)), max_size=2)
some_rules = st.builds(
    Rule,
    st.sampled_from(["allow", "deny", "ask"]),
    kind=st.lists(st.sampled_from(["read", "edit", "execute", "other", "e*"]), max_size=2),
    path=globs,
    command=st.lists(st.sampled_from(["git", "rm", "/bin/*", "*"]), max_size=2),
    title=st.lists(st.sampled_from(["T", "*", "no"]), max_size=1),
    env=st.lists(st.sampled_from(["A", "B", "*"]), max_size=2),
)
some_calls = st.builds(
    call,
    kind=st.sampled_from(["read", "edit", "execute", "other", "think"]),
    title=st.sampled_from(["T", "U"]),
    paths=st.lists(st.sampled_from(PATHS), max_size=3, unique=True).map(tuple),
    changes=st.sampled_from([(), ("/w/a",)]),
    command=st.sampled_from(COMMANDS),
    env=st.sampled_from([{}, {"A": "1"}, {"A": "1", "C": "2"}]),
    doubt=st.sampled_from(["", "", "", "it is odd"]),
)


def plain_globs(globs: Any, text: str) -> bool:
    known = {"e*": {"edit", "execute"}}
    return any(glob in {"*", text} or text in known.get(glob, ()) for glob in globs)


def model_of_a_rule(rule: Rule, of: Call) -> str:
    """ "yes", "no" or "perhaps"."""
    allows = rule.decision == "allow"
    quantifier = all if allows else any
    kinds = {of.kind}
    kinds |= {"execute"} if of.command else set()
    kinds |= {"edit"} if of.changes else set()
    perhaps = False
    if rule.kind and not quantifier(plain_globs(rule.kind, kind) for kind in kinds):
        return "no"
    if rule.title and not plain_globs(rule.title, of.title):
        return "no"
    if rule.path:
        if of.paths:
            if not quantifier(any(path in FITS[glob] for glob in rule.path) for path in of.paths):
                return "no"
        elif not allows and kinds & {"read", "edit", "delete", "move", "search", "other"}:
            perhaps = True
        else:
            return "no"
    if rule.command:
        if of.command is None:
            if allows or not kinds & {"execute", "other"}:
                return "no"
            perhaps = True
        else:
            program = of.command[0]
            fits = any(
                (glob == "/bin/*" and program.startswith("/bin/"))
                or (glob == "*" and ("/" not in program or not allows))
                or glob == program
                or (not allows and glob == program.rpartition("/")[2])
                for glob in rule.command
            )
            # Bare, it may be found in any directory.
            may_be = "/bin/*" in rule.command and "/" not in program
            if not fits and (allows or not (program == "/bin/sh" or may_be)):
                return "no"
            perhaps = perhaps or not fits
    covered = [plain_globs(rule.env, name) for name in of.env]
    if rule.env and not quantifier(covered):
        return "no"
    if allows and rule.command and of.env and not rule.env:
        return "no"
    return "perhaps" if perhaps else "yes"


def model(rules: list[Rule], of: Call, default: str, reads: str) -> str:
    unclear = False
    word: str
    for rule in rules:
        answer = model_of_a_rule(rule, of)
        if answer == "yes":
            word = rule.decision
            break
        unclear = unclear or answer == "perhaps"
    else:
        only_reads = of.kind == "read" and of.command is None and not of.changes
        word = reads if only_reads else default
    if word == "allow" and rules and (of.doubt or unclear):
        return "ask"
    return word


words = st.sampled_from(["allow", "deny", "ask"])


@given(st.lists(some_rules, max_size=5), some_calls, words, words)
def test_the_first_rule_that_matches_decides_as_the_plain_model_says(
    rules: list[Rule], of: Call, default: Any, reads: Any
) -> None:
    policy = Policy(rules, default=default, reads=reads)
    assert policy.judge(of).decision == model(rules, of, default, reads)


@given(st.lists(some_rules, max_size=5), some_calls, words, words)
def test_what_allows_more_never_comes_of_saying_more(
    rules: list[Rule], of: Call, default: Any, reads: Any
) -> None:
    """A further path, another kind or a doubt can make a yes a no, and no allowance of what was none."""
    policy = Policy([Rule("deny", path="**"), *rules], default=default, reads=reads)
    more = msgspec.structs.replace(of, paths=(*of.paths, "/w/zzz"))
    assert policy.judge(more).decision == "deny"
    doubtful = msgspec.structs.replace(of, doubt="odd")
    assert policy.judge(doubtful).decision != "allow"


@given(st.lists(some_rules, max_size=5), words)
def test_reads_need_no_question_where_no_rule_concerns_them(rules: list[Rule], reads: Any) -> None:
    policy = Policy(rules, reads=reads)
    if policy.concerns_reads:
        return
    for path in PATHS:
        assert policy.judge(call(kind="read", paths=(path,), cwd=None)).decision == "allow"


def test_a_verdict_says_which_rule_it_was_and_why() -> None:
    policy = Policy(
        [Rule("deny", name="no", path="/x/**"), Rule("ask", kind="edit", deadline=3)],
        default="allow",
    )
    first = policy.judge(call(kind="edit", paths=("/x/y",)))
    assert (first.decision, first.number, first.why) == ("deny", 1, "rule 1 ('no') matches")
    second = policy.judge(call(kind="edit", paths=("/w/y",)))
    assert (second.rule, second.number, second.deadline) == (policy.rules[1], 2, 3)
    unclear = policy.judge(call(kind="move"))
    assert (unclear.decision, unclear.number) == ("ask", 1)
    assert "cannot be excluded" in unclear.why
    default = policy.judge(call(kind="think"))
    assert (default.decision, default.rule, default.number) == ("allow", None, None)
    assert "default = 'allow'" in default.why
    assert "reads = 'allow'" in policy.judge(call(kind="read", paths=("/w/y",))).why


# ------------------------------------------------------------------ keys, by table


@pytest.mark.parametrize(
    ("rule", "fields", "expected"),
    [
        # Commands: a bare name allows a bare name only, and forbids the program wherever it lies.
        (Rule("allow", command="git"), {"command": ("git", "status")}, "allow"),
        (Rule("allow", command="git"), {"command": ("/tmp/git", "status")}, "ask"),
        (Rule("allow", command="git"), {"command": ("./git", "status")}, "ask"),
        (Rule("allow", command="git"), {"command": ("git\n", "status")}, "ask"),
        (Rule("allow", command="git"), {"command": ("gⅰt", "status")}, "ask"),
        (Rule("allow", command="git"), {"command": SHELL}, "ask"),
        (Rule("allow", command="*"), {"command": SHELL}, "ask"),
        (Rule("deny", command="rm"), {"command": ("/bin/rm", "-r")}, "deny"),
        (Rule("allow", command="/usr/bin/*"), {"command": ("/usr/bin/git",)}, "allow"),
        (Rule("allow", command="/usr/bin/*"), {"command": ("/usr/bin/../../tmp/x",)}, "ask"),
        (Rule("allow", command="tools/*"), {"command": ("tools/x",)}, "allow"),
        (Rule("allow", command="tools/*"), {"command": ("./tools/x",)}, "allow"),
        (Rule("allow", command="tools/*"), {"command": ("./x",), "cwd": "/w/tools"}, "allow"),
        (Rule("allow", command="tools/*"), {"command": ("tools/x",), "cwd": "/tmp"}, "ask"),
        (Rule("allow", command="tools/*"), {"command": ("tools/../x",)}, "ask"),
        # Arguments, one each.
        (Rule("allow", command="git", args=["status"]), {"command": ("git", "status")}, "allow"),
        (Rule("allow", command="git", args=["status"]), {"command": ("git", "status", "x")}, "ask"),
        (Rule("allow", command="git", args=["status"]), {"command": ("git",)}, "ask"),
        (
            Rule("allow", command="git", args=["status"]),
            {"command": ("git", "--", "status")},
            "ask",
        ),
        (Rule("allow", command="git", args=[]), {"command": ("git",)}, "allow"),
        (Rule("allow", command="git", args=[]), {"command": ("git", "")}, "ask"),
        (Rule("allow", command="git", args=["a", "**"]), {"command": ("git", "a")}, "allow"),
        (
            Rule("allow", command="git", args=["a", "**"]),
            {"command": ("git", "a", "b", "c")},
            "allow",
        ),
        (Rule("allow", command="git", args=["a", "**"]), {"command": ("git", "b")}, "ask"),
        (Rule("allow", command="git", args=["a*"]), {"command": ("git", "a\nb")}, "allow"),
        (Rule("allow", command="x", args=[""]), {"command": ("x", "")}, "allow"),
        (Rule("allow", args=["x"]), {"command": ("anything", "x")}, "allow"),
        # Environment: PATH makes git another program.
        (Rule("allow", command="git"), {"command": ("git",), "env": {"PATH": "/tmp"}}, "ask"),
        (
            Rule("allow", command="git", env="GIT_*"),
            {"command": ("git",), "env": {"GIT_DIR": "x"}},
            "allow",
        ),
        (
            Rule("allow", command="git", env="GIT_*"),
            {"command": ("git",), "env": {"GIT_DIR": "x", "PATH": ""}},
            "ask",
        ),
        (Rule("allow", command="git", env="GIT_*"), {"command": ("git",)}, "allow"),
        (Rule("deny", env="PATH"), {"command": ("git",), "env": {"PATH": "", "A": ""}}, "deny"),
        # Without `command`, which programs are meant is nobody's concern, so neither is the PATH.
        (Rule("allow", kind="execute"), {"command": ("git",), "env": {"PATH": ""}}, "allow"),
        # Where it runs, who asks, what it is called.
        (Rule("allow", cwd="sub/**"), {"command": ("x",), "cwd": "/w/sub/d"}, "allow"),
        (Rule("allow", cwd="sub/**"), {"command": ("x",), "cwd": "/w"}, "ask"),
        (Rule("allow", session="s-*"), {"command": ("x",), "session_id": "s-1"}, "allow"),
        (Rule("allow", session="s-*", kind="*"), {"kind": "execute", "session_id": "s-1"}, "allow"),
        (Rule("deny", session="s-*"), {"command": ("x",), "session_id": "t"}, "ask"),
        (Rule("allow", title="Edit *"), {"kind": "edit", "title": "Edit a\nb"}, "allow"),
        (Rule("allow", title="Edit *"), {"kind": "edit", "title": "edit a"}, "ask"),
        # Paths: one that allows needs every one, others any.
        (Rule("allow", path="**"), {"kind": "edit", "paths": ("/w/a", "/x")}, "ask"),
        (Rule("allow", path=["**", "/x"]), {"kind": "edit", "paths": ("/w/a", "/x")}, "allow"),
        (Rule("deny", path="**/.env"), {"kind": "edit", "paths": ("/w/a", "/w/.env")}, "deny"),
        (Rule("deny", path="**/.env"), {"kind": "read", "paths": ("/w/d/.env",)}, "deny"),
        (Rule("deny", path="**/.env"), {"kind": "edit", "paths": ("/w//d/./../.env",)}, "deny"),
        (Rule("deny", path="/etc/**"), {"kind": "edit", "paths": ("//etc/passwd",)}, "deny"),
        (Rule("allow", path="*"), {"kind": "edit", "paths": ("/w/a/b",)}, "ask"),
        (Rule("allow", path="**"), {"kind": "edit", "paths": ("/w/*",)}, "allow"),
        (Rule("allow", path="s*"), {"kind": "edit", "paths": ("/w2/sx",)}, "ask"),
        (Rule("allow", path="**"), {"kind": "edit"}, "ask"),
    ],
)
def test_each_key_matches_what_it_says(rule: Rule, fields: dict[str, Any], expected: str) -> None:
    assert decision([rule], call(**{"kind": "execute", **fields})) == expected


def test_an_allowance_needs_every_kind_that_a_call_is() -> None:
    lies = call(kind="read", paths=("/w/a",), command=("rm", "a"))
    assert lies.kinds == ("read", "execute")
    assert decision([Rule("allow", kind="read")], lies, reads="allow") == "ask"
    assert decision([Rule("deny", kind="execute")], lies) == "deny"
    assert decision([Rule("allow", kind=["read", "execute"])], lies) == "allow"
    changes = call(kind="think", paths=("/w/a",), changes=("/w/a",))
    assert changes.kinds == ("think", "edit")
    assert decision([Rule("allow", kind="think")], changes) == "ask"
    assert decision([Rule("deny", kind="edit")], changes) == "deny"


def test_a_rule_that_forbids_a_program_makes_what_runs_others_unclear() -> None:
    rules = [Rule("deny", command="rm"), Rule("allow", kind="execute")]
    for words in (SHELL, ("env", "rm", "x"), ("/usr/bin/xargs", "rm"), ("busybox", "rm")):
        assert decision(rules, call(kind="execute", command=words)) == "ask"
    assert decision(rules, call(kind="execute", command=("ls",))) == "allow"
    # Nothing but its title is known: it may be rm.
    assert decision(rules, call(kind="execute", title="ls")) == "ask"
    assert decision(rules[::-1], call(kind="execute", command=SHELL)) == "allow"


def test_a_bare_name_may_be_the_program_that_a_rule_forbids_by_its_path() -> None:
    rules = [Rule("deny", command="/usr/bin/rm"), Rule("allow", kind="execute")]
    assert decision(rules, call(kind="execute", command=("/usr/bin/rm", "x"))) == "deny"
    assert decision(rules, call(kind="execute", command=("rm", "x"))) == "ask"
    assert decision(rules, call(kind="execute", command=("ls", "x"))) == "allow"
    assert decision(rules, call(kind="execute", command=("/bin/rm", "x"))) == "allow"


@pytest.mark.parametrize("program", ["link/../rm", "/w/link/../../usr/bin/rm", "../usr/bin/rm"])
def test_a_program_that_may_be_another_than_it_reads_is_neither_allowed_nor_let_by(
    program: str,
) -> None:
    # Where a link leads, `..` goes on from there: a repository can hold both, and the file.
    of = call(kind="execute", command=(program, "x"))
    assert decision([Rule("allow", command=["/usr/bin/*", "/w/*"])], of) == "ask"
    for glob in ("/usr/bin/rm", "/elsewhere/rm", "/usr/bin/*"):
        assert decision([Rule("deny", command=glob)], of, default="allow") in {"ask", "deny"}
    assert decision([Rule("deny", command="/usr/bin/git")], of, default="allow") == "allow"
    assert decision([Rule("allow", kind="execute")], of) == "allow"


@pytest.mark.parametrize(
    "word",
    ["coproc", "builtin", "noglob", "nocorrect", "trap", ".", "source", "alias", "jobs", "compgen"],
)
def test_a_shell_s_own_words_are_no_program(word: str) -> None:
    line = f"{word} rm x"
    assert Call.words(line) == ("/bin/sh", "-c", line)
    of = call(kind="execute", command=Call.words(line))
    assert decision([Rule("deny", command="rm")], of, default="allow") == "ask"
    assert decision([Rule("allow", command=word)], of) == "ask"


def test_roots_through_links_are_known_by_both_names() -> None:
    of = call(
        kind="edit",
        paths=("/real/a/.env",),
        roots=("/home/w", "/real"),
        aliases=(("/home/w", "/real"),),
    )
    for glob in ("/home/w/**", "/real/**", "a/*", "**/.env"):
        assert decision([Rule("deny", path=glob)], of) == "deny"
    assert spelled("/real/a", of.aliases) == "/home/w/a"
    assert spelled("/realm", of.aliases) == "/realm"
    assert spelled("/real", of.aliases) == "/home/w"


def test_where_case_is_nothing_it_slips_past_no_denial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = call(kind="edit", paths=("/w/.ENV",))
    assert decision([Rule("deny", path="**/.env")], of) == "ask"
    monkeypatch.setattr(rules_module, "_CASE_IS_NOTHING", True)
    assert decision([Rule("deny", path="**/.env")], of) == "deny"
    loud = call(kind="execute", command=("RM", "x"))
    assert decision([Rule("deny", command="rm")], loud) == "deny"
    # What is allowed is still exactly that.
    assert decision([Rule("allow", path="**/.env")], of) == "ask"
    assert decision([Rule("allow", command="rm")], loud) == "ask"


def test_the_home_in_a_rule_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    of = call(kind="edit", paths=("/home/me/.ssh/id",))
    assert decision([Rule("deny", path="~/.ssh/**")], of) == "deny"


@pytest.mark.parametrize(
    ("make", "key", "words"),
    [
        (lambda: Rule("perhaps"), "decision", "one of 'allow', 'deny', 'ask'"),  # type: ignore[arg-type]
        (lambda: Rule("deny", path=5), "path", "int 5"),  # type: ignore[arg-type]
        (lambda: Rule("deny", path=b"x"), "path", "bytes"),  # type: ignore[arg-type]
        (lambda: Rule("deny", path=["a", 5]), "path", "int 5 is none"),  # type: ignore[list-item]
        (lambda: Rule("deny", path="a/"), "path", "a/**"),
        (lambda: Rule("deny", command="bin/"), "command", "slash"),
        (lambda: Rule("deny", title="[a"), "title", "not closed"),
        (lambda: Rule("deny", args="x"), "args", "a list"),
        (lambda: Rule("deny", name=5), "name", "a text"),  # type: ignore[arg-type]
        (lambda: Rule("ask", deadline=0), "deadline", "more than 0"),
        (lambda: Rule("ask", deadline=float("nan")), "deadline", "more than 0"),
        (lambda: Rule("ask", deadline=True), "deadline", "bool True"),
        (lambda: Rule("deny", deadline=3), "deadline", "only a rule that asks"),
        (lambda: Rule("deny", kind="write"), "kind", "'edit' is meant?"),
        (lambda: Rule("deny", kind=["read", "Exec"]), "kind", "'Exec'; there are read, edit,"),
        (lambda: Rule("deny", command="rm -rf *"), "command", "arguments go into args"),
        (lambda: Rule("deny", command=["ls", "git\tx"]), "command", "one word"),
        (lambda: Policy([{"decision": "deny"}]), "", "rule 1: a Rule, not dict"),  # type: ignore[list-item]
        (lambda: Policy(default="maybe"), "default", "one of"),  # type: ignore[arg-type]
        (lambda: Policy(reads=None), "reads", "one of"),  # type: ignore[arg-type]
        (lambda: Policy([Rule("deny")] * (MAX_RULES + 1)), "", f"at most {MAX_RULES}"),
    ],
)
def test_what_means_nothing_is_an_error_about_its_key(make: Any, key: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make()
    assert caught.value.key == key
    assert words in str(caught.value)


def test_an_odd_kind_or_name_can_be_meant() -> None:
    for kind in ("_vendor/x", "[w]rite", "wr*"):
        rule = Rule("deny", kind=kind)
        assert decision([rule], call(kind=kind.replace("[w]", "w").replace("*", "ite"))) == "deny"
    for glob in ("my[ ]tool", "/opt/my tool", "/*/my tool"):
        of = call(kind="execute", command=("/opt/my tool",))
        assert decision([Rule("deny", command=glob)], of) == "deny"
    Rule("allow", command=r"C:\Program Files\git.exe")


def test_a_policy_error_keeps_its_facts_when_it_is_copied() -> None:
    error = PolicyError("bad", file="p.toml", rule="rule 1", key="path")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.file, other.rule, other.key, other.problem) == (
            "p.toml, rule 1, path: bad",
            "p.toml",
            "rule 1",
            "path",
            "bad",
        )


# ------------------------------------------------------------------ requests


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
