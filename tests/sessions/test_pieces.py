"""What is given of a growing output, against a model that knows all of it."""

from __future__ import annotations

import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sessions._pieces import SURE, Pieces, overlap


def tail(output: str, limit: int) -> tuple[str, bool]:
    """What an honest client answers: the end of it, cut between characters, and whether it was cut."""
    data = output.encode()
    kept = data[max(0, len(data) - limit) :].decode(errors="ignore")
    return kept, len(data) > limit


def given_of(looks: list[tuple[str, bool]]) -> list[tuple[bool, str]]:
    """The pieces of these answers, the last of which is final, each with whether it has a gap."""
    pieces, found = Pieces(), list[tuple[bool, str]]()
    for number, (text, truncated) in enumerate(looks, 1):
        last = number == len(looks)
        before = pieces.gaps
        piece = pieces.take(text, truncated=truncated, last=last)
        if piece or pieces.gaps > before:
            assert (pieces.gaps > before) == pieces.gap
            found.append((pieces.gap, piece))
    return found


def is_possible(output: str, found: list[tuple[bool, str]]) -> bool:
    """Whether the output is these pieces, with anything at all in the gaps and nothing elsewhere."""
    pattern = "".join((".*" if gap else "") + re.escape(piece) for gap, piece in found)
    return re.fullmatch(pattern, output, re.DOTALL) is not None


def steps(chunks: list[str]) -> list[str]:
    return ["".join(chunks[:n]) for n in range(1, len(chunks) + 1)]


words = st.text(st.sampled_from("ab\n€😀�"), max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(words, min_size=1, max_size=12),
    st.integers(0, 120),
    st.data(),
)
def test_output_that_repeats_itself_never_loses_anything_without_a_gap(
    chunks: list[str], limit: int, data: st.DataObject
) -> None:
    seen = [s for s in steps(chunks)[:-1] if data.draw(st.booleans())]
    output = "".join(chunks)

    found = given_of([tail(text, limit) for text in (*seen, output)])

    # U+FFFD at a cut may be half a character: there it is dropped.
    assert is_possible(output.replace("�", ""), [(gap, p.replace("�", "")) for gap, p in found])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 1500), st.data())
def test_a_gap_is_told_exactly_where_output_was_lost(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    """With lines that are all different; what two answers have in common is then no chance."""
    numbers = iter(range(10_000))
    chunks = ["".join(f"{next(numbers):05} ä€\n" for _ in range(size)) for size in sizes]
    seen = [s for s in steps(chunks)[:-1] if data.draw(st.booleans())]
    output = "".join(chunks)
    looks = [tail(text, limit) for text in (*seen, output)]

    found = given_of(looks)

    assert is_possible(output, found)
    given_so_far = 0
    lost: list[int] = []
    for text, (kept, _) in zip((*seen, output), looks, strict=True):
        start = len(text) - len(kept)
        common = given_so_far - start
        # Where less is in common than can be told from chance, it is a gap for safety's sake.
        if start and common < SURE:
            lost.append(start)
        given_so_far = len(text)
    if not lost:
        assert "".join(piece for _, piece in found) == output
    assert any(gap for gap, _ in found) == bool(lost)


def test_what_fits_is_given_piece_by_piece_and_whole() -> None:
    pieces = Pieces()
    assert pieces.take("", truncated=False) == ""
    assert pieces.take("one\n", truncated=False) == "one\n"
    assert pieces.take("one\n", truncated=False) == ""
    assert pieces.take("one\ntwo\n", truncated=False) == "two\n"
    assert pieces.take("one\ntwo\n", truncated=False, last=True) == ""
    assert (pieces.gap, pieces.gaps) == (False, 0)


def test_what_slides_through_the_window_is_joined_without_a_gap() -> None:
    output = "".join(f"line {n}\n" for n in range(1000))
    pieces, got = Pieces(), ""
    for end in range(50, len(output) + 1, 50):
        text, truncated = tail(output[:end], 200)
        got += pieces.take(text, truncated=truncated)
        assert not pieces.gap
    assert got == output[: len(output) // 50 * 50]


def test_what_was_dropped_between_two_looks_is_a_gap() -> None:
    output = "".join(f"line {n}\n" for n in range(1000))
    pieces = Pieces()
    first = pieces.take(*tail(output[:1000], 300)[:1], truncated=True)
    assert (first, pieces.gap) == (output[700:1000], True)
    assert pieces.take(output[2000:2300], truncated=True) == output[2000:2300]
    assert (pieces.gap, pieces.gaps) == (True, 2)
    assert pieces.take(output[2100:2400], truncated=True) == output[2300:2400]
    assert (pieces.gap, pieces.gaps) == (False, 2)


@pytest.mark.parametrize("limit", [0, 1])
def test_output_of_which_nothing_is_kept_is_a_gap_at_the_end(limit: int) -> None:
    pieces = Pieces()
    assert pieces.take("", truncated=True) == ""
    assert pieces.gaps == 0
    assert pieces.take("x" * limit, truncated=True, last=True) == "x" * limit
    assert (pieces.gap, pieces.gaps) == (True, 1)


def test_an_end_that_lines_share_is_not_taken_for_the_same_place() -> None:
    """One line end in common is chance; what follows it may be a thousand lines later."""
    pieces = Pieces()
    pieces.take("a" * 200 + "\n", truncated=False)
    assert pieces.take("\n" + "b" * 200, truncated=True) == "b" * 200
    assert pieces.gap


def test_a_window_that_looks_the_same_may_have_moved_over_what_repeats_itself() -> None:
    pieces = Pieces()
    pieces.take("y\n" * 500, truncated=False)
    assert pieces.take("y\n" * 500, truncated=True) == ""
    assert pieces.take("y\n" * 499 + "z\n", truncated=True) == "z\n"
    assert pieces.gap


@pytest.mark.parametrize(("before", "after"), [("abab", "abab"), ("a", "a"), ("ab", "b")])
def test_what_a_small_window_shows_may_always_be_chance(before: str, after: str) -> None:
    """The end of "ababab", of "aba", of "abcb": the same again, after more."""
    pieces = Pieces()
    assert pieces.take(before, truncated=False) == before
    assert pieces.take(after, truncated=True, last=True) == ""
    assert (pieces.gap, pieces.gaps) == (True, 1)


@pytest.mark.parametrize("text", ["€", "😀", "ä"])
def test_half_a_character_is_held_back_until_it_is_whole(text: str) -> None:
    """As clients show it that decode what they have, with "replace"."""
    data = b"before " + text.encode() + b" after"
    pieces, got = Pieces(), list[str]()
    for end in range(1, len(data) + 1):
        got.append(pieces.take(data[:end].decode(errors="replace"), truncated=False))
    assert "".join(got) == f"before {text} after"
    assert pieces.gaps == 0
    assert "�" not in "".join(got)


def test_a_broken_character_that_stays_one_is_given_at_last() -> None:
    pieces = Pieces()
    assert pieces.take("a�", truncated=False) == "a"
    assert pieces.take("a�b", truncated=False) == "�b"
    assert pieces.take("a�b�", truncated=False) == ""
    assert pieces.take("a�b�", truncated=False, last=True) == "�"
    assert pieces.gaps == 0


def test_a_window_that_begins_within_a_character_is_joined_all_the_same() -> None:
    output = "".join(f"{n:04} €\n" for n in range(200))
    data = output.encode()
    pieces, got = Pieces(), ""
    for end in range(100, len(data), 7):
        window = data[max(0, end - 300) : end].decode(errors="replace")
        got += pieces.take(window, truncated=end > 300)
        assert not pieces.gap
    assert output.startswith(got)
    assert len(got.encode()) > len(data) - 20


def test_clients_that_begin_anew_or_lie_get_a_gap_and_no_exception() -> None:
    pieces = Pieces()
    pieces.take("some output that has been there", truncated=False)
    assert pieces.take("", truncated=False) == ""  # cleared
    assert pieces.take("new", truncated=False) == "new"
    assert pieces.gap
    assert pieces.take("ne", truncated=False) == "ne"  # shorter than it was
    assert pieces.gap
    # Cut without saying so.
    output = "".join(f"line {n}\n" for n in range(100))
    pieces = Pieces()
    assert pieces.take(output[:400], truncated=False) == output[:400]
    assert pieces.take(output[300:700], truncated=False) == output[400:700]
    assert not pieces.gap
    # A shorter end of the same.
    assert pieces.take(output[500:700], truncated=True) == ""
    assert pieces.take(output[500:710], truncated=True) == output[700:710]
    assert not pieces.gap


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a" * 1_000_000, "a" * 1_000_000),
        ("b" + "a" * 999_999, "a" * 999_998 + "cc"),
        ("ab" * 500_000, "ba" * 500_000),
        ("c" + "a" * 999_999, "b" + "a" * 999_999),
        ("x" * 999_900 + "y" * 100, "y" * 99 + "x" + "y" * 999_900),
    ],
)
def test_the_work_is_bounded_for_output_that_repeats_itself(before: str, after: str) -> None:
    started = time.process_time()
    common, sure = overlap(before, after)
    assert time.process_time() - started < 2
    assert not sure
    assert before.endswith(after[:common])


def test_no_more_is_kept_than_the_last_answer() -> None:
    pieces = Pieces()
    tracemalloc.start()
    try:
        for n in range(200):
            text = f"{n:03}" * 30_000
            pieces.take(text, truncated=True)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
