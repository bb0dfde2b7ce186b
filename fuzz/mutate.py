"""New cases from known ones: bytes changed, moved and repeated, JSON taken apart and put together.

The words that matter (member names, tags, numbers at the edges) are taken from the schema itself.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.schema import v1_unstable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

__all__ = ["mutated"]

_LONGEST = 1 << 13
_TOKENS = [
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"\\u", b"\\ud800", b"\\udc00", b"\\n", b"null",
    b"true", b"false", b"0", b"-1", b"1e999", b"-0", b"3.0", b"9223372036854775807", b"1" * 40,
    b'"id":', b'"id":1', b'"id":null', b'"method":', b'"params":', b'"result":', b'"error":',
    b'"jsonrpc":"2.0"', b'"session/update"', b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff", b"\xc3",
    b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"[" * 300, b'{"a":' * 40,
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 3.0, 1e300, 2**63, -(2**70), "", "x", "\ud800", "\U0001f600", [], {},
    [[]], [None], {"": 0}, "2026-11-30T00:00:00Z", "/", "C:\\x", "end_turn", "text",
]  # fmt: skip


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    """Wire names of all members, and all tags."""
    names: set[str] = set()
    tags: set[str] = set()
    for kind in vars(v1_unstable).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            names.update(kind.__struct_encode_fields__)
            config = kind.__struct_config__
            if config.tag_field is not None:
                names.add(config.tag_field)
                tags.add(str(config.tag))
    return sorted(names), sorted(tags)


def mutated(data: bytes, pool: Sequence[bytes], random: Random) -> bytes:
    """A case near `data`, perhaps with a part of another of the pool."""
    if random.random() < 0.5:
        head, text = data[:1], data[1:]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(random.choice((1, 1, 2, 4))):
                value = _changed(value, random, 0)
            try:
                return (head + json.dumps(value, ensure_ascii=random.random() < 0.8).encode())[
                    :_LONGEST
                ]
            except (UnicodeEncodeError, RecursionError):
                pass
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        data = _bytes_changed(data, pool, random)
    return data[:_LONGEST]


def _bytes_changed(data: bytes, pool: Sequence[bytes], random: Random) -> bytes:
    at = random.randint(0, len(data))
    to = min(len(data), at + random.choice((1, 1, 2, 4, 16, 64)))
    match random.randrange(9):
        case 0:
            return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
        case 1:
            return data[:at] + bytes([random.randrange(256)]) + data[at:]
        case 2:
            return data[:at] + data[to:]
        case 3:
            return data[:at] + random.choice(_TOKENS) + data[at:]
        case 4:
            return data[:at] + random.choice(_TOKENS) + data[to:]
        case 5:
            return data[:to] + data[at:to] * random.choice((1, 2, 30)) + data[to:]
        case 6:
            other = random.choice(pool)
            return data[:at] + other[random.randint(0, len(other)) :]
        case 7:
            names, tags = _words()
            word = random.choice(random.choice((names, tags)))
            return data[:at] + json.dumps(word).encode() + data[at:]
        case _:
            cut = random.randint(0, len(data))
            return data[min(at, cut) : max(at, cut)] if random.random() < 0.2 else data[::1]


def _changed(value: Any, random: Random, depth: int) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        found: dict[str, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
        key = random.choice(list(found))
        names, tags = _words()
        match random.randrange(8):
            case 0:
                del found[key]
            case 1:
                found[random.choice(names)] = found.pop(key)
            case 2:
                found[random.choice(names)] = random.choice(_VALUES)
            case 3:
                found[key] = random.choice(tags)
            case 4:
                found[random.choice(names)] = found[key]
            case _:
                found[key] = _changed(found[key], random, depth + 1)
        return found
    if isinstance(value, list) and value and random.random() < 0.85:
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        at = random.randrange(len(items))
        match random.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, random.choice(_VALUES))
            case 2:
                items += items[at : at + 1] * random.choice((1, 5))
            case _:
                items[at] = _changed(items[at], random, depth + 1)
        return items
    wrapped: list[Any] = [[value], {"type": value}]
    return random.choice(wrapped + _VALUES)
