"""Globs against a plain model, a table of what users may expect, and patterns that want to be slow."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services._globs import GlobError, PathGlob, escape, names_of, text_glob


def text(glob: str, subject: str) -> bool:
    return text_glob(glob)(subject)


def path(glob: str, subject: str, *, ignore_case: bool = False) -> bool:
    found = PathGlob(glob, home="/home/u", ignore_case=ignore_case)
    return found.matches([name for name in subject.split("/") if name])


# ------------------------------------------------------------------ against a model

# A glob as what it means: a character, "?" for any, "*" for any number, or a set.
Token = tuple[str, str]
tokens = st.one_of(
    st.tuples(st.just("one"), st.sampled_from("ab.]-*?[{")),
    st.tuples(st.just("any"), st.just("")),
    st.tuples(st.just("star"), st.just("")),
    st.tuples(st.just("in"), st.sampled_from(["ab", "]", "]a", "*", "[?", "a-", "^a"])),
    st.tuples(st.just("not in"), st.sampled_from(["ab", "]", "]a", "*", "!", "a-"])),
)
token_lists = st.lists(tokens, min_size=1, max_size=7)
subjects = st.text("ab.]-*?[{!^\n", max_size=9)


def written(tokens: list[Token]) -> str:
    found = ""
    for kind, value in tokens:
        match kind:
            case "one":
                found += f"[{value}]" if value in "*?[{" else value
            case "any":
                found += "?"
            case "star":
                found += "*"
            case "in":
                found += f"[{value}]"
            case _:
                found += f"[!{value}]"
    return found


def means(tokens: tuple[Token, ...], subject: str) -> bool:
    if not tokens:
        return not subject
    (kind, value), rest = tokens[0], tokens[1:]
    if kind == "star":
        return any(means(rest, subject[cut:]) for cut in range(len(subject) + 1))
    if not subject:
        return False
    fits = {
        "one": subject[0] == value,
        "any": True,
        "in": subject[0] in value,
        "not in": subject[0] not in value,
    }[kind]
    return fits and means(rest, subject[1:])


@given(token_lists, subjects)
def test_a_text_glob_means_what_its_parts_mean(parts: list[Token], subject: str) -> None:
    assert text(written(parts), subject) == means(tuple(parts), subject)


components = st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=3))
names = st.lists(st.text("ab.", min_size=1, max_size=3), max_size=6)


@given(st.lists(components, min_size=1, max_size=6), names)
def test_a_path_glob_means_what_its_components_mean(
    pattern: list[list[Token] | None], subject: list[str]
) -> None:
    # Two stars beside each other would be read as one thing.
    parts = [
        None
        if part is None
        else [
            token
            for n, token in enumerate(part)
            if not (n and token[0] == part[n - 1][0] == "star")
        ]
        for part in pattern
    ]
    shown = "/".join("**" if part is None else written(part) for part in parts)

    @lru_cache
    def fits(at: int, name: int) -> bool:
        if at == len(parts):
            return name == len(subject)
        part = parts[at]
        if part is None:
            return any(fits(at + 1, other) for other in range(name, len(subject) + 1))
        return name < len(subject) and means(tuple(part), subject[name]) and fits(at + 1, name + 1)

    if any(part in ([("one", ".")], [("one", "."), ("one", ".")]) for part in parts):
        return  # `.` and `..` are no names
    assert PathGlob(shown, home="/").matches(subject) == fits(0, 0)


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_an_escaped_text_matches_itself_and_nothing_else(one: str, other: str) -> None:
    assert text(escape(one), one)
    assert text(escape(one), other) == (one == other)


# ------------------------------------------------------------------ as a user reads it


@pytest.mark.parametrize(
    ("glob", "subject", "expected"),
    [
        ("src/**", "src", True),
        ("src/**", "src/a/b", True),
        ("src/**", "srcs/a", False),
        ("src/*", "src", False),
        ("src/*", "src/a", True),
        ("src/*", "src/a/b", False),
        ("**/.env", ".env", True),
        ("**/.env", "a/b/.env", True),
        ("**/.env", "a/.env/b", False),
        ("**/.env/**", "a/.env/b", True),
        ("*", ".hidden", True),
        ("**", ".git/config", True),
        ("**", "", True),
        ("/**", "", True),
        ("/", "", True),
        ("/", "a", False),
        ("./a", "a", True),
        ("a//b", "a/b", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("a*c", "a/c", False),
        ("[!a]", "b", True),
        ("README", "readme", False),
        ("[a-c]x", "bx", True),
        ("a/**/b/**/c", "a/b/b/c", True),
        ("a/**/b/**/c", "a/c/b", False),
        ("**/a/b", "a/a/b", True),
        ("**/b/**/b", "b", False),
        ("file[*]", "file*", True),
        ("file[*]", "fileX", False),
        ("{}", "{}", True),
        ("[{]a,b}", "{a,b}", True),
        ("ü", "u\u0308", False),
        ("a\nb", "a\nb", True),
    ],
)
def test_path_globs_stay_in_their_component_unless_they_are_two_stars(
    glob: str, subject: str, expected: bool
) -> None:
    assert path(glob, subject) is expected


def test_the_home_is_spelled_with_a_tilde_and_nobody_else_s_is() -> None:
    assert path("~/.ssh/**", "/home/u/.ssh/id")
    assert path("~", "/home/u")
    assert not path("~", "/home")
    assert PathGlob("a", home="").relative
    assert not PathGlob("~/a", home="/h").relative
    assert PathGlob("~/a*", home="/h*me").matches(names_of("/h*me/ab"))
    assert not PathGlob("~/a*", home="/h*me").matches(names_of("/home/ab"))


def test_case_can_be_taken_for_nothing() -> None:
    assert path("**/.env", "a/.ENV", ignore_case=True)
    assert path("**/[a-c]x", "a/BX", ignore_case=True)


@pytest.mark.parametrize(
    ("glob", "words"),
    [
        ("", "empty"),
        ("src/", "src/**"),
        ("a/../b", "'..'"),
        ("a**", "stands alone"),
        ("**.py", "stands alone"),
        ("*.{py,toml}", "several globs"),
        ("[a", "not closed"),
        ("a[/]b", "not closed"),
        ("[]", "not closed"),
        ("[z-a]", "backwards"),
        ("~root/x", "your own home"),
        ("a\0", "NUL"),
    ],
)
def test_a_glob_that_would_surprise_is_an_error_that_says_what_to_write(
    glob: str, words: str
) -> None:
    with pytest.raises(GlobError) as caught:
        path(glob, "x")
    assert words in str(caught.value)


def test_a_tilde_without_a_home_is_an_error() -> None:
    with pytest.raises(GlobError, match="no home"):
        PathGlob("~/x", home="~")


# ------------------------------------------------------------------ hostile subjects


@pytest.mark.parametrize(
    ("glob", "subject"),
    [
        ("*a" * 20 + "b", "a" * 100_000),
        ("*?" * 20 + "b", "a" * 100_000),
        ("*" * 200 + "b", "a" * 100_000),
        ("*[ab]" * 20 + "c", "ab" * 50_000),
        ("*ab" * 30, "a" * 100_000),
    ],
)
def test_no_subject_is_expensive_for_a_text_glob(glob: str, subject: str) -> None:
    began = time.process_time()
    assert not text(glob, subject)
    # Exponential or cubic work would take years or minutes; this takes milliseconds.
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "glob",
    ["**/a/" * 15 + "b", "**/a*a*a*" + "/**/a" * 10 + "/b", "**/**/**/**/b", "/**/a/**/b/**/c"],
)
def test_no_path_is_expensive_for_a_path_glob(glob: str) -> None:
    deep, long = ["a"] * 50_000, ["a" * 4000] * 200
    began = time.process_time()
    found = PathGlob(glob.removeprefix("/"), home="/")
    assert not found.matches(deep)
    assert not found.matches(long)
    assert time.process_time() - began < 3


def test_a_name_without_stars_is_found_quickly_among_very_many() -> None:
    # A policy has some globs like these, and an agent may ask a thousand times at once.
    names = ["a"] * 1_000_000
    began = time.process_time()
    assert not any(PathGlob(f"**/{n}/b/**", home="/").matches(names) for n in range(10))
    assert not PathGlob("**/.git/**", home="/").matches(names)
    assert PathGlob("**/.git/**", home="/").matches([*names, ".git", "x"])
    assert time.process_time() - began < 1.5  # about 0.1; 10 where each name is a call
