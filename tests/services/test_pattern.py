"""Patterns from agents: right where they are understood, bounded where they are hostile."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services._pattern import MAX_LENGTH, compile_pattern

UNDERSTOOD = [
    "a", "^a$", "(a|b)*c", "^(ab){2,3}$", "a{0,2}b", r"^[a-z0-9_-]+@[^.\s]+\.(com|org)$", "(a+)+$",
    r"\bab\b", "a?b??c", r"^\d{4}-\d{2}$", "a||b", "^$", "^a{2,}$", "^(a?){3}$", "(?:ab|c)*d",
    r"^[\w.]+$", r"\x61\u0062", r"[^\d]$", "[a-]", r"[\-a]", r"\Bb", "^.$", r"\/\.", "a{0}b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", UNDERSTOOD)
@given(text=st.text(alphabet="abcd0-_.@ /\n", max_size=12))
def test_what_is_understood_fits_the_same_texts_as_a_plain_engine(pattern: str, text: str) -> None:
    ours = compile_pattern(pattern)
    assert ours is not None

    plain = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    assert ours.search(text) == bool(plain.search(text))


def test_differences_to_python_are_decided_as_in_a_browser() -> None:
    def found(pattern: str, text: str) -> bool | None:
        ours = compile_pattern(pattern)
        assert ours is not None
        return ours.search(text)

    assert not found("^a$", "a\n")
    assert not found(r"^\d$", "٣")
    assert not found(r"^\w$", "é")
    assert found(r"^\s$", "\ufeff")
    assert found("^[^]$", "\n")
    assert found("^(?<year>a)b$", "ab")
    assert not found("^.$", "\u2028")


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?<!a)b", "(a", "a)", "[a", "*", "a**", r"(a)\1", r"\p{L}", "a{99999}", "(a{50}){50}",
     "(" * 100, "a{2", "\\", "{", "[z-a]", "a" * (MAX_LENGTH + 1), r"\u{61}", r"\00", "(?i)a",
     r"[\D]", "a{3,2}", r"\ud800"],
)  # fmt: skip
def test_what_is_not_understood_is_not_evaluated(pattern: str) -> None:
    assert compile_pattern(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("((a+)+)+$", "a" * 5000 + "b"),
        ("(a|a)*$", "a" * 5000 + "b"),
        ("^(a?){30}a{30}$", "a" * 31),
        ("a*a*a*a*a*b", "a" * 5000),
        ("(a?){200}b", "a" * 20_000),
        ("[" + "".join(f"{chr(c)}-{chr(c)}" for c in range(256, 500)) + "]" * 1, "x" * 100_000),
        ("(x" + "?" + ")" + "{300}", "y" * 1000),
    ],
)
def test_a_hostile_pattern_takes_no_longer_than_a_moment(pattern: str, text: str) -> None:
    started = time.thread_time()
    ours = compile_pattern(pattern)
    if ours is not None:
        ours.search(text)

    assert time.thread_time() - started < 2


@given(st.text(alphabet="ab()[]{}|*+?^$\\.,0123-dws:<>=!", max_size=40), st.text(max_size=20))
def test_no_pattern_raises(pattern: str, text: str) -> None:
    ours = compile_pattern(pattern)

    assert ours is None or ours.search(text) in {True, False, None}
