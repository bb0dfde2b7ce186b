"""A policy as text: what it means, and that nothing but a policy gets through."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from antiphon.services import Call, PolicyError, Rule
from antiphon.services._rules import MAX_RULES
from antiphon.services._toml import MAX_BYTES, read_policy, read_policy_file

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = """
default = "deny"
reads = "ask"
deadline = 1.5

[[rule]]
decision = "allow"
name = "all keys"
kind = "execute"
title = ["a", "b*"]
path = "src/**"
command = ["git", "/usr/bin/*"]
args = ["status", "**"]
cwd = "**"
session = "s"
env = "GIT_*"

[[rule]]
decision = "ask"
deadline = 3
"""


def test_a_policy_is_what_its_text_says() -> None:
    settings = read_policy(WHOLE)
    policy = settings.policy
    assert (policy.default, policy.reads, settings.deadline) == ("deny", "ask", 1.5)
    assert policy.rules == (
        Rule(
            "allow",
            name="all keys",
            kind="execute",
            title=["a", "b*"],
            path="src/**",
            command=["git", "/usr/bin/*"],
            args=["status", "**"],
            cwd="**",
            session="s",
            env="GIT_*",
        ),
        Rule("ask", deadline=3),
    )


def test_an_empty_text_asks_for_all_but_reads() -> None:
    settings = read_policy("")
    assert (settings.policy.rules, settings.deadline) == ((), None)
    assert settings.policy.judge(Call(kind="edit")).decision == "ask"
    assert settings.policy.judge(Call(kind="read")).decision == "allow"


RULE = '[[rule]]\ndecision = "deny"\n'


@pytest.mark.parametrize(
    ("text", "rule", "key", "words"),
    [
        ("x = = 1", "", "", "line 1"),
        ('"a\\nb" = 1', "", r"'a\nb'", "no such key"),
        ("a = 1\na = 2", "", "", "not TOML"),
        ("x = " + "[" * 5000, "", "", "not TOML"),
        ("rules = 1", "", "rules", "there are: default, reads, deadline, rule"),
        ('default = "yes"', "", "default", "one of 'allow', 'deny', 'ask', not 'yes'"),
        ("default = true", "", "default", "not True"),
        ("reads = []", "", "reads", "one of"),
        ("deadline = 0", "", "deadline", "more than 0"),
        ("deadline = -1", "", "deadline", "more than 0"),
        ("deadline = nan", "", "deadline", "more than 0"),
        ("deadline = inf", "", "deadline", "at most a year"),
        ('deadline = "1"', "", "deadline", "a number of seconds, not str '1'"),
        ("deadline = true", "", "deadline", "bool"),
        ("[rule]\nx = 1", "", "rule", "[[rule]]"),
        ("rule = [1]", "rule 1", "", "[[rule]]"),
        ("[[rule]]", "rule 1", "decision", "missing"),
        ('[[rule]]\nname = "n"', "rule 1 ('n')", "decision", "missing"),
        ('[[rule]]\ndecision = "Deny"', "rule 1", "decision", "not 'Deny'"),
        ("[[rule]]\ndecision = 1", "rule 1", "decision", "not 1"),
        (RULE + 'paths = "x"', "rule 1", "paths", "no such key; there are: decision, name"),
        (RULE + RULE + "path = 5", "rule 2", "path", "not int 5"),
        (RULE + "path = [1]", "rule 1", "path", "int 1 is none"),
        (RULE + "path = []", "rule 1", "path", "an empty list matches nothing"),
        (RULE + 'path = ""', "rule 1", "path", "empty"),
        (RULE + 'path = "src/"', "rule 1", "path", "src/**"),
        (RULE + 'path = "*.{py,md}"', "rule 1", "path", "several globs"),
        (RULE + 'name = "n"\ntitle = "["', "rule 1 ('n')", "title", "not closed"),
        (RULE + "name = 5", "rule 1", "name", "a text"),
        (RULE + 'kind = "write"', "rule 1", "kind", "'edit' is meant?"),
        (RULE + 'command = "git status"', "rule 1", "command", "arguments go into args"),
        (RULE + 'args = "x"', "rule 1", "args", "a list"),
        (RULE + "args = {}", "rule 1", "args", "dict"),
        (RULE + "env = 1979-05-27", "rule 1", "env", "date"),
        (RULE + "deadline = 5", "rule 1", "deadline", "only a rule that asks"),
        (RULE * (MAX_RULES + 1), "", "", f"at most {MAX_RULES}"),
        ("#" * (MAX_BYTES + 1), "", "", "longer than"),
    ],
)
def test_what_is_no_policy_says_where_and_what_was_expected(
    text: str, rule: str, key: str, words: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        read_policy(text, file="p.toml")
    error = caught.value
    assert (error.file, error.rule, error.key) == ("p.toml", rule, key)
    assert words in str(error)
    assert str(error).startswith(", ".join(part for part in ("p.toml", rule, key) if part) + ": ")
    assert "\n" not in str(error)
    with pytest.raises(PolicyError) as nameless:
        read_policy(text)
    assert nameless.value.file is None


def test_a_file_is_read_with_or_without_a_mark_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for mark in ("", "\ufeff"):
        path.write_text(f"{mark}default = 'deny'", encoding="utf-8")
        assert read_policy_file(path).policy.default == "deny"


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# fine\n# \xe9\n")
    long = tmp_path / "long.toml"
    long.write_bytes(b"#" * (MAX_BYTES + 1))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[rule]]\ndecision = 1\n")
    for path, words in [
        (tmp_path / "absent.toml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "a\0b", "cannot be read"),
        (latin, "line 2 is not UTF-8"),
        (long, "longer than"),
        (wrong, "rule 1, decision: one of"),
    ]:
        with pytest.raises(PolicyError) as caught:
            read_policy_file(path)
        assert caught.value.file == str(path)
        assert words in str(caught.value)


# ------------------------------------------------------------------ anything at all


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    with suppress(PolicyError):
        read_policy(text)


scalars = st.sampled_from(
    [
        '"allow"',
        '"deny"',
        '"ask"',
        '"**"',
        '"[a"',
        '"a/../b"',
        '"~x"',
        "5",
        "-1",
        "0.5",
        "nan",
        "true",
        "[]",
        '["a", "**"]',
        "[1]",
        '[["a"]]',
        "{}",
        "{a = 1}",
        "1979-05-27",
        '"\\u0000"',
        "''",
        "9e99",
    ]
)
keys = st.sampled_from(
    ["default", "reads", "extra", *(field.name for field in msgspec.structs.fields(Rule))]
)
tables = st.dictionaries(keys, scalars, max_size=5)


@given(tables, st.lists(tables, max_size=4), st.sampled_from(["[[rule]]", "[rule]", "[[rules]]"]))
def test_any_values_are_a_policy_that_judges_or_a_policy_error(
    top: dict[str, str], rules: list[dict[str, str]], header: str
) -> None:
    lines = [f"{key} = {value}" for key, value in top.items()]
    for rule in rules:
        lines += [header, *(f"{key} = {value}" for key, value in rule.items())]
    text = "\n".join(lines)
    try:
        settings = read_policy(text, file="p.toml")
    except PolicyError as error:
        event("no policy" if error.file == "p.toml" else "an error that names no file")
        assert str(error).startswith("p.toml")  # noqa: PT017  (either outcome is a fine one)
        return
    # What was taken has no key that was left out, and can be used.
    assert set(tomllib.loads(text)) <= {"default", "reads", "deadline", "rule"}
    assert len(settings.policy.rules) == len(rules)
    call = Call(kind="edit", paths=("/w/a",), command=("x",), cwd="/w", roots=("/w",))
    assert settings.policy.judge(call).decision in {"allow", "deny", "ask"}
