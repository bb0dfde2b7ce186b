r"""`LineFramer`: however the bytes are cut, the same frames, and those that the rules of F1-F6 say.

The first byte chooses the sizes of the chunks, the second how long a frame may be.
"""

from __future__ import annotations

from antiphon.core import Fault, LineFramer, join_frames

_KEPT = 4096


def check(data: bytes) -> None:
    if len(data) < 2:
        return
    # A byte order mark that comes in pieces is held like a line until it is known for one.
    how, longest, stream = data[0], 3 + data[1], data[2:]
    expected = _by_the_rules(stream, longest)

    framer = LineFramer(longest)
    frames: list[bytes | Fault] = []
    at = 0
    while at < len(stream):
        size = 1 + (how * (at + 7) >> 3) % (1 + how)
        frames += framer.feed(stream[at : at + size])
        at += size
        assert framer.buffered <= max(longest + 1, 2 * _KEPT + 1), "it keeps more than it may"
    frames += framer.end()

    assert frames == expected, f"{frames!r} instead of {expected!r}"
    _check_round_trip(frames, longest)


def _by_the_rules(stream: bytes, longest: int) -> list[bytes | Fault]:
    lines = stream.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found: list[bytes | Fault] = []
    for line in lines:
        text = line.removesuffix(b"\r")
        if len(text) > longest:
            found.append(Fault("frame_too_large", len(text), text[:_KEPT], text[-_KEPT:]))
        elif text:
            found.append(text)
    return found


def _check_round_trip(frames: list[bytes | Fault], longest: int) -> None:
    """What is written for frames is read as the same frames, with the line separators escaped."""
    whole = [f for f in frames if isinstance(f, bytes) and not f.endswith(b"\r")]
    if whole and whole[0].startswith(b"\xef\xbb\xbf"):  # a mark is only stripped, never written
        return
    written = join_frames(whole)
    assert b"\xe2\x80\xa8" not in written
    assert b"\xe2\x80\xa9" not in written
    escaped = [
        f.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029") for f in whole
    ]
    assert LineFramer(longest * 3 + 6).feed(written) == escaped
