r"""Scans over the bytes of a frame: is it UTF-8, how deep does it nest, mend what no decoder takes.

Responsible for questions about JSON that are answered without decoding it, each in one linear
pass. Leaves decoding to `_codec`, and to the caller when to ask: a scan costs more than typed
decoding (DESIGN §5), so nothing here runs on frames that decode and are not kept.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TypeAlias

import msgspec

__all__ = ["Frame", "check_utf8", "json_depth_exceeds", "repair_text"]

#: What the codec reads: a frame, or a part of one that msgspec left undecoded.
Frame: TypeAlias = bytes | bytearray | memoryview | msgspec.Raw

# One escape sequence. A true surrogate pair and any other escape match outside the group, so that
# an escaped backslash before "ud800" is never taken for an escaped surrogate.
# It and the next are compiled (and then kept by `re`) where the first such frame comes.
_ESCAPE = (
    rb"(?s)\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|.)"
)

# One string, its end optional: with a mandatory one, an unfinished string full of escaped quotes
# would be searched again from each of them.
_STRING = rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+"?'

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_utf8(raw: Frame) -> bool:
    """Whether the bytes are UTF-8 throughout.

    To be asked before a raw value is kept or forwarded: msgspec looks neither into members that it
    skips nor into `Raw` values (DESIGN §3.1).
    """
    if isinstance(raw, bytes) and raw.isascii():
        return True
    try:
        str(raw, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def repair_text(raw: Frame) -> bytes:
    r"""The same JSON with U+FFFD for every escaped lone surrogate and for bytes that are no UTF-8.

    True surrogate pairs, `\\ud800` (a backslash and five letters) and everything else stay as they
    are; bytes that need no repair come back equal. Never raises. Replacing never touches a byte
    below 0x80, so that the structure of the JSON survives it.
    """
    data = bytes(raw)
    if data.find(b"\\u") >= 0:
        data = re.sub(_ESCAPE, lambda match: b"\\ufffd" if match[1] else match[0], data)
    if data.isascii():
        return data
    return data.decode("utf-8", "replace").encode()


def json_depth_exceeds(raw: Frame, limit: int) -> bool:
    """Whether arrays and objects nest deeper than `limit`; brackets inside strings do not count.

    Short input is cleared by its length alone. For input that is not JSON the answer means nothing,
    but it comes, in linear time.
    """
    # Opening and closing `limit + 1` levels takes this many bytes.
    if len(raw) < 2 * (limit + 1):
        return False
    data = bytes(raw)
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    brackets = re.sub(_STRING, b"", data).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > limit
