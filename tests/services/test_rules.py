"""What rules say: against a plain model, and in tables."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services import Call, PolicyError, Rule
from antiphon.services import _rules as rules_module
from antiphon.services._call import spelled
from antiphon.services._rules import MAX_RULES, Policy

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
