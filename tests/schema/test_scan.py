"""Tests of antiphon.schema._scan: scans over bytes that no decoder has looked at."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.schema._report import is_array, is_object
from antiphon.schema._scan import check_utf8, json_depth_exceeds, repair_text

#: Pieces of strings as a peer may escape them, and what they must be after the repair.
PIECES = [
    (b"plain", b"plain"),
    ("漢😀\u2028".encode(), "漢😀\u2028".encode()),
    (rb"\\", rb"\\"),
    (rb"\"", rb"\""),
    (rb"\n", rb"\n"),
    (rb"\u0041", rb"\u0041"),
    (rb"\ud83d\ude00", rb"\ud83d\ude00"),
    (rb"\uD83D\uDE00", rb"\uD83D\uDE00"),
    (rb"\ud83d", rb"\ufffd"),
    (rb"\uDE00", rb"\ufffd"),
    (rb"\\ud800", rb"\\ud800"),
    (b"\xff", "\ufffd".encode()),
    (b"\xe2\x82", "\ufffd".encode()),
]


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_repair_replaces_what_is_no_unicode_and_nothing_else(
    pieces: list[tuple[bytes, bytes]],
) -> None:
    # The bars keep a lone high surrogate from meeting a lone low one, which would make a pair.
    raw = b"|".join(piece for piece, _ in pieces)
    expected = b"|".join(mended for _, mended in pieces)

    assert repair_text(raw) == expected


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans())
def test_repaired_json_decodes(pieces: list[tuple[bytes, bytes]], as_key: bool) -> None:
    template = b'{"%b":1}' if as_key else b'{"x":["%b"]}'
    raw = template % b"|".join(piece for piece, _ in pieces)
    expected = template % b"|".join(mended for _, mended in pieces)

    assert msgspec.json.decode(repair_text(raw)) == msgspec.json.decode(expected)


def test_repair_keeps_the_quote_that_follows_a_cut_character() -> None:
    assert repair_text(b'{"a":"\xf0\x9f\x98","b":2}') == '{"a":"\ufffd","b":2}'.encode()


def test_repair_mends_a_surrogate_that_was_written_as_utf8() -> None:
    assert msgspec.json.decode(repair_text(b'"\xed\xa0\x80"')) == "\ufffd" * 3


@given(st.binary(max_size=40))
def test_repair_takes_any_bytes_and_gives_utf8(raw: bytes) -> None:
    assert check_utf8(repair_text(raw))
    assert repair_text(bytearray(raw)) == repair_text(memoryview(raw)) == repair_text(raw)


@given(st.binary(max_size=12) | st.text(max_size=12).map(str.encode))
def test_utf8_check_agrees_with_the_decoder(raw: bytes) -> None:
    try:
        raw.decode()
        expected = True
    except UnicodeDecodeError:
        expected = False

    assert check_utf8(raw) is expected
    assert check_utf8(msgspec.Raw(raw)) is expected


def nested(depth: int, opening: str = "[") -> bytes:
    member = "" if opening == "[" else '"m":'
    closing = "]" if opening == "[" else "}"
    return (opening + member).encode() * (depth - 1) + b"[]" + closing.encode() * (depth - 1)


@pytest.mark.parametrize("opening", ["[", "{"])
@pytest.mark.parametrize("limit", [1, 2, 3, 256])
def test_depth_is_exceeded_one_past_the_limit(limit: int, opening: str) -> None:
    assert not json_depth_exceeds(nested(limit, opening), limit)
    assert json_depth_exceeds(nested(limit + 1, opening), limit)


def test_depth_does_not_count_what_stands_beside_each_other() -> None:
    assert not json_depth_exceeds(b"[" + b",".join([b"[{}]"] * 5000) + b"]", 3)
    assert json_depth_exceeds(b"[" + b",".join([b"[{}]"] * 5000) + b"]", 2)


def test_depth_does_not_count_brackets_in_strings() -> None:
    text = json.dumps(["[" * 1000, {'{\\"[[[' * 100: '"[' * 300 + "\\"}])

    assert not json_depth_exceeds(text.encode(), 3)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.text('"\\[]{}a', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"[{', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if is_object(value):
        return 1 + max(map(depth_of, value.values()), default=0)
    if is_array(value):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(json_values, st.integers(0, 6))
def test_depth_agrees_with_a_walk_over_the_value(value: Any, limit: int) -> None:
    assert json_depth_exceeds(json.dumps(value).encode(), limit) is (depth_of(value) > limit)


@pytest.mark.parametrize(
    "unit",
    [b"[", b'"\\"', b'\\"', b'"', b"\\", b'["\\"",', b"\\ud800", b"\xff", b"]["],
    ids=repr,
)
def test_scans_take_linear_time_whatever_the_input(unit: bytes) -> None:
    def spent(size: int) -> float:
        raw = b"[" * 300 + unit * (size // len(unit))
        times: list[float] = []
        for _ in range(3):
            begin = time.thread_time()
            json_depth_exceeds(raw, 256)
            repair_text(raw)
            times.append(time.thread_time() - begin)
        return min(times)

    # Quadratic time would be 64 times as long; linear 8 times, with room for a busy machine.
    assert spent(8 * 40_000) < 32 * max(spent(40_000), 1e-4)
