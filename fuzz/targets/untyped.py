"""`loads`: the value that the standard library reads, for whatever both take for JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from antiphon.schema import loads


def check(data: bytes) -> None:
    try:
        value = loads(data)
    except msgspec.DecodeError:
        return
    try:
        expected = json.loads(data.decode())
    except (ValueError, RecursionError):
        return  # text that was mended
    if not _has_surrogates(expected):
        assert value == expected


def _has_surrogates(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
