"""Cutting bytes into frames: every chunking, both line ends, lines over the limit, bounded memory."""

from __future__ import annotations

import io
import itertools
import random
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core import Fault, LineFramer, _framer, join_frames

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 1 << 20
MARK = b"\xef\xbb\xbf"
# What stands for a line in the properties below: short, so that limits are met, without LF, and
# with what others split at.
LINES = st.lists(
    st.one_of(
        st.binary(max_size=24).map(lambda line: line.replace(b"\n", b"")),
        st.sampled_from(
            [b"", b"\r", b"\r\r", "\u2028\u2029\u0085€漢😀".encode(), b"{}", b"x" * 10]
        ),
    ),
    max_size=12,
)


def frames_of(data: bytes, *, limit: int = LIMIT, cuts: list[int] | None = None) -> list[Any]:
    """Everything that `data` gives, cut at `cuts`, the end of the stream included."""
    framer = LineFramer(limit)
    found: list[Any] = []
    edges = [0, *sorted(cuts or []), len(data)]
    for start, stop in itertools.pairwise(edges):
        found += framer.feed(data[start:stop])
    found += framer.end()
    assert framer.buffered == 0
    return found


def expected(data: bytes, limit: int) -> list[bytes | int]:
    """The same, written as simply as possible: frames, and the sizes of the refused lines."""
    lines = [line.removesuffix(b"\r") for line in data.removeprefix(MARK).split(b"\n")]
    return [line if len(line) <= limit else len(line) for line in lines if line]


def sizes_for_faults(frames: list[Any]) -> list[bytes | int]:
    return [frame.size if isinstance(frame, Fault) else frame for frame in frames]


@pytest.mark.covers("F1")
@pytest.mark.parametrize(
    "chunks",
    [
        [b'{"a":1}\n{"b":2}\n{"c":3}\n'],
        [b'{"a":1}\n', b'{"b":2}\n', b'{"c":3}\n'],
        [b'{"a"', b":1}", b'\n{"b":2}\n{"c', b'":3}', b"\n"],
        [b"", b'{"a":1}\n{"b":2}', b"", b"\n", b"", b'{"c":3}\n', b""],
        [bytes([byte]) for byte in b'{"a":1}\n{"b":2}\n{"c":3}\n'],
    ],
)
def test_framer_returns_the_same_frames_for_any_chunks(chunks: list[bytes]) -> None:
    framer = LineFramer(LIMIT)

    frames = [frame for chunk in chunks for frame in framer.feed(chunk)]

    assert frames == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    assert framer.buffered == 0
    assert framer.end() == []


@pytest.mark.covers("F1", "F2", "F3", "FF-03")
@pytest.mark.parametrize("limit", [4, 7, LIMIT])
def test_framer_returns_the_same_frames_wherever_the_stream_is_cut(limit: int) -> None:
    data = MARK + b"one\r\n\r\n\ntwo\nthree33\r\nfour444444\r\n\rfive\r\r\nsix"
    whole = sizes_for_faults(frames_of(data, limit=limit))

    assert whole == expected(data, limit)
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            again = frames_of(data, limit=limit, cuts=[first, second])
            assert sizes_for_faults(again) == whole, (first, second)


@pytest.mark.covers("F1", "F6")
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 300, 510, 511, 512, 513, 1200]), max_size=12),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n"]), min_size=12, max_size=12),
    limit=st.sampled_from([400, 512, 1199, 5000]),
    data=st.data(),
)
def test_framer_agrees_with_the_simple_reading_whatever_the_lengths_of_lines(
    sizes: list[int], ends: list[bytes], limit: int, data: st.DataObject
) -> None:
    """Chunks that begin with a long line are cut in another way, and may have any others behind it."""
    stream = b"".join(b"x" * size + end for size, end in zip(sizes, ends, strict=False)) + b"rest"
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))

    frames = frames_of(stream, limit=limit, cuts=cuts)

    assert sizes_for_faults(frames) == expected(stream, limit)


@pytest.mark.covers("F1", "F6")
@given(lines=LINES, limit=st.integers(1, 30), data=st.data())
def test_framer_agrees_with_the_simple_reading_however_the_stream_is_cut(
    lines: list[bytes], limit: int, data: st.DataObject
) -> None:
    stream = b"\n".join(lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))

    frames = frames_of(stream, limit=limit, cuts=cuts)

    assert sizes_for_faults(frames) == expected(stream, limit)
    assert all(type(frame) in {bytes, Fault} for frame in frames)


def pour(framer: LineFramer, data: bytes) -> list[Any]:
    """Give it `data` as a reader does: where there is room, there."""
    found: list[Any] = []
    while True:
        room = framer.room()
        if room is None:
            return found + framer.feed(data)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        found += framer.filled(count)
        data = data[count:]
        if not data:
            return found


@pytest.mark.covers("F1", "F6")
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 8, 9, 60, 300]), max_size=8),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n"]), min_size=8, max_size=8),
    limit=st.sampled_from([8, 64, 299, 5000]),
    data=st.data(),
)
def test_what_is_read_into_a_long_line_is_what_is_fed(
    sizes: list[int], ends: list[bytes], limit: int, data: st.DataObject
) -> None:
    stream = MARK + b"".join(b"x" * size + end for size, end in zip(sizes, ends, strict=False))
    stream += b"rest"
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    poured = data.draw(st.lists(st.booleans(), min_size=13, max_size=13))
    framer, other = LineFramer(limit), LineFramer(limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_framer, "LONG", 8)
        patch.setattr(_framer, "ROOM", 8)
        for (start, stop), into in zip(
            itertools.pairwise([0, *sorted(cuts), len(stream)]), poured, strict=False
        ):
            chunk = stream[start:stop]
            assert (pour(framer, chunk) if into else framer.feed(chunk)) == other.feed(chunk)
            assert framer.unfinished == other.unfinished
            assert framer.buffered == other.buffered
        assert framer.end() == other.end()
        assert framer.room() is None


def test_room_that_nothing_was_read_into_changes_nothing() -> None:
    framer = LineFramer(1 << 30)
    assert framer.filled(0) == []  # none was lent
    framer.feed(b"x" * 100_000)
    for _ in range(3):
        room = framer.room()
        assert room is not None
        assert len(room) == 1 << 16
        assert framer.filled(0) == []

    assert framer.buffered == 100_000
    assert framer.feed(b"y\nz") == [b"x" * 100_000 + b"y"]
    assert framer.end() == [b"z"]


def test_a_long_line_is_moved_only_now_and_then_while_it_is_read() -> None:
    framer = LineFramer(1 << 30)
    framer.feed(b"x" * (1 << 16))
    sizes: set[int] = set()
    while framer.buffered < 1 << 24:
        room = framer.room()
        assert room is not None
        room[:] = b"x" * (1 << 16)
        assert framer.filled(1 << 16) == []
        sizes.add(sys.getsizeof(framer._line))

    assert len(sizes) < 60  # of 255 times
    assert framer.feed(b"\n") == [b"x" * (1 << 24)]
    assert sys.getsizeof(framer._line) < 1 << 10


@pytest.mark.covers("F6", "FF-05")
@given(lines=LINES, limit=st.integers(1, 30), data=st.data())
def test_lf_and_crlf_give_the_same_frames(
    lines: list[bytes], limit: int, data: st.DataObject
) -> None:
    lines = [line.replace(b"\r", b"") for line in lines]
    with_lf = b"".join(line + b"\n" for line in lines)
    with_crlf = b"".join(line + b"\r\n" for line in lines)
    cuts = data.draw(st.lists(st.integers(0, len(with_crlf)), max_size=20))

    assert frames_of(with_crlf, limit=limit, cuts=cuts) == frames_of(with_lf, limit=limit)


@pytest.mark.covers("F2")
def test_one_cr_before_the_line_end_is_stripped_and_no_other() -> None:
    assert frames_of(b"a\r\nb\nc\r\r\nd\re\r\n\rf\n") == [b"a", b"b", b"c\r", b"d\re", b"\rf"]


@pytest.mark.covers("F2")
def test_cr_and_lf_in_different_chunks_are_one_line_end() -> None:
    framer = LineFramer(LIMIT)

    assert framer.feed(b"a\r") == []
    assert framer.feed(b"\nb\r\n") == [b"a", b"b"]


@pytest.mark.covers("F3")
def test_blank_lines_are_skipped() -> None:
    assert frames_of(b"\n\r\na\n\n\r\n\nb\n\n") == [b"a", b"b"]


@pytest.mark.covers("F4", "F2")
@pytest.mark.parametrize(
    "end", [[b"\n"], [b"\r\n"], [b"\r", b"\n"], [b"", b"\r", b"", b"\n"], [b""]]
)
@pytest.mark.parametrize("split", [False, True])
def test_a_line_of_exactly_the_limit_passes(end: list[bytes], split: bool) -> None:
    framer = LineFramer(8)
    chunks = [b"1234", b"5678", *end] if split else [b"12345678" + end[0], *end[1:]]

    frames = [frame for chunk in chunks for frame in framer.feed(chunk)] + framer.end()

    assert frames == [b"12345678"]


@pytest.mark.covers("F4", "FF-01")
@pytest.mark.parametrize("chunk", [1, 3, 100, 10_000, 1_000_000])
def test_framer_keeps_neighbours_of_an_over_long_line(chunk: int) -> None:
    long = b"H" * 5_000 + b"m" * 20_000 + b"T" * 5_000
    data = b"before\n" + long + b"\r\nafter\r\nlast"

    frames = frames_of(data, limit=10_000, cuts=list(range(0, len(data), chunk)))

    assert frames == [
        b"before",
        Fault("frame_too_large", 30_000, b"H" * 4096, b"T" * 4096),
        b"after",
        b"last",
    ]


@pytest.mark.covers("F4")
def test_a_line_over_the_limit_without_an_end_is_refused_at_the_end_of_the_stream() -> None:
    framer = LineFramer(4)

    assert framer.feed(b"ok\n12345") == [b"ok"]
    assert framer.feed(b"678") == []
    assert framer.end() == [Fault("frame_too_large", 8, b"12345678", b"12345678")]
    assert framer.end() == []


@pytest.mark.covers("F4")
def test_a_line_one_byte_over_the_limit_is_refused_once() -> None:
    fault = Fault("frame_too_large", 5, b"12345", b"12345")

    assert frames_of(b"12345\n", limit=4) == [fault]
    assert frames_of(b"12345\r\n1234\r\n12345\n", limit=4) == [fault, b"1234", fault]
    # With five bytes held, the fifth may have been the CR of a line end. It was not.
    assert frames_of(b"1234\r5\n", limit=4, cuts=[5]) == [
        Fault("frame_too_large", 6, b"1234\r5", b"1234\r5")
    ]


@pytest.mark.covers("F4", "F6")
def test_a_fault_is_the_same_however_the_stream_is_cut() -> None:
    for line in (b"12345", b"12345\r", b"h" * 4_095 + b"\r", b"h" * 4_097 + b"t" * 4_096):
        whole = frames_of(line + b"\r\n", limit=4)
        for cut in {*range(12), *range(len(line) - 3, len(line) + 3)}:
            assert frames_of(line + b"\r\n", limit=4, cuts=[cut, cut + 1]) == whole
        assert whole == [Fault("frame_too_large", len(line), line[:4_096], line[-4_096:])]


@pytest.mark.covers("F4")
@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "10", None])
def test_framer_refuses_a_limit_that_is_no_positive_integer(limit: Any) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        LineFramer(limit)


def test_memory_is_bounded_by_the_limit_however_long_the_line_is() -> None:
    framer = LineFramer(100_000)
    chunk = b"x" * 1_000
    most = 0
    tracemalloc.start()
    try:
        for _ in range(5_000):
            assert framer.feed(chunk) == []
            most = max(most, framer.buffered)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most <= 100_001
    assert peak < 500_000
    assert framer.buffered == 2 * 4_096 + 1
    assert [type(frame) for frame in framer.feed(b"\n")] == [Fault]
    assert framer.buffered == 0


def test_a_line_that_arrives_byte_by_byte_costs_no_object_for_each() -> None:
    framer = LineFramer(LIMIT)
    tracemalloc.start()
    try:
        for _ in range(50_000):
            framer.feed(b"xy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 300_000
    assert framer.feed(b"\n") == [b"xy" * 50_000]


@pytest.mark.covers("F5")
def test_framer_loses_nothing_of_10_000_frames_in_random_chunks() -> None:
    chance = random.Random(20_261_130)
    sent = [
        b"%d:" % n + chance.randbytes(chance.randrange(300)).hex().encode() for n in range(10_000)
    ]
    data = b"".join(frame + chance.choice([b"\n", b"\r\n"]) for frame in sent)
    framer = LineFramer(LIMIT)
    received: list[Any] = []
    at = 0
    while at < len(data):
        size = chance.choice([1, 7, 100, 4_096, 65_536])
        received += framer.feed(data[at : at + size])
        at += size

    assert received == sent
    assert framer.buffered == 0


@pytest.mark.covers("FF-08")
@pytest.mark.parametrize("chunk", [1, 7, 5000, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 4096, 10_000, 200_000])
def test_the_beginning_of_a_line_without_an_end_is_told(chunk: int, size: int) -> None:
    framer = LineFramer(100_000)
    assert framer.unfinished == b""
    line = b"Password: " + b"." * size
    for data in (b"first\n", *(line[n : n + chunk] for n in range(0, len(line), chunk))):
        framer.feed(data)
    assert framer.unfinished == line[:4096]
    framer.feed(b"\n")
    assert framer.unfinished == b""


@pytest.mark.covers("FF-02")
def test_time_grows_with_the_size_of_a_frame_and_not_with_its_square() -> None:
    chunk = b"x" * 4_096

    def seconds(feed: Callable[[bytes], object]) -> float:
        start = time.process_time()
        for _ in range(16 << 8):
            feed(chunk)
        feed(b"\n")
        return time.process_time() - start

    # Keeping 16 MiB has its own cost, which jumps where memory is mapped anew. Looking through all that
    # is there at each piece would take a thousand times as long.
    kept = min(seconds(io.BytesIO().write) for _ in range(3))
    assert min(seconds(LineFramer(1 << 30).feed) for _ in range(3)) < 20 * kept


@pytest.mark.covers("FF-05")
@pytest.mark.parametrize("cut", range(4))
def test_one_byte_order_mark_at_the_start_is_stripped(cut: int) -> None:
    data = MARK + b"{}\n" + MARK + b"{}\n"

    assert frames_of(data, cuts=[cut]) == [b"{}", MARK + b"{}"]


@pytest.mark.parametrize("data", [MARK, MARK + b"\n", MARK + b"\r\n"])
def test_a_stream_with_nothing_but_a_byte_order_mark_has_no_frame(data: bytes) -> None:
    assert frames_of(data) == []
    assert frames_of(data, cuts=list(range(len(data)))) == []


def test_half_a_byte_order_mark_is_text() -> None:
    assert frames_of(MARK[:2] + b"x\n", cuts=[1]) == [MARK[:2] + b"x"]
    assert frames_of(MARK[:2]) == [MARK[:2]]


def test_a_byte_order_mark_does_not_count_towards_the_limit() -> None:
    assert frames_of(MARK + b"1234\n", limit=4, cuts=[2, 5]) == [b"1234"]
    for cut in range(4):
        assert frames_of(MARK + b"1\n", limit=1, cuts=[cut]) == [b"1"]
        assert frames_of(MARK + b"\r\n", limit=1, cuts=[cut]) == []


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_lf_ends_a_line(separator: str) -> None:
    frame = f'{{"text":"a{separator}b"}}'.encode()

    assert frames_of(frame + b"\n") == [frame]


def test_a_framer_is_as_new_after_the_end() -> None:
    framer = LineFramer(4)
    framer.feed(MARK + b"a\nbc")

    assert framer.end() == [b"bc"]
    assert framer.feed(MARK + b"d\n") == [b"d"]


@pytest.mark.covers("R1-2")
def test_joined_frames_have_a_line_end_each() -> None:
    assert join_frames([]) == b""
    assert join_frames([b"{}"]) == b"{}\n"
    assert join_frames([b'{"a":1}', b'{"b":2}']) == b'{"a":1}\n{"b":2}\n'


def test_line_separators_are_escaped_and_their_neighbours_are_not() -> None:
    text = "\u2027\u2028x\u2029\u202a¨©漢😀"
    joined = join_frames([f'{{"t":"{text}"}}'.encode(), '"\u2029"'.encode()])

    assert joined.decode() == '{"t":"\u2027\\u2028x\\u2029\u202a¨©漢😀"}\n"\\u2029"\n'


@given(st.lists(st.text(max_size=20)))
def test_what_was_joined_is_cut_into_the_same_frames_again(texts: list[str]) -> None:
    frames = [b"{" + text.replace("\n", "").replace("\r", "").encode() + b"}" for text in texts]
    escaped = [
        frame.replace("\u2028".encode(), b"\\u2028").replace("\u2029".encode(), b"\\u2029")
        for frame in frames
    ]

    assert frames_of(join_frames(frames)) == escaped
