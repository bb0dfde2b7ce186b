"""`repair_text`, `check_utf8`, `json_depth_exceeds`: never raise, and agree with a slow reference."""

from __future__ import annotations

import json
from typing import Any

from antiphon.schema import check_utf8, json_depth_exceeds, repair_text


def check(data: bytes) -> None:
    repaired = repair_text(data)
    assert check_utf8(repaired)
    assert repair_text(repaired) == repaired
    try:
        data.decode()
    except UnicodeDecodeError:
        assert not check_utf8(data)
    else:
        assert check_utf8(data)
    for limit in (1, 3, 64):
        json_depth_exceeds(data, limit)
    try:
        value = json.loads(repaired)
    except (ValueError, RecursionError):
        return
    json.dumps(value, ensure_ascii=False).encode()  # no lone surrogate is left
    if b"\\" not in data and check_utf8(data):
        assert repaired == data
    depth = _depth(value)
    for limit in (1, 2, 3, 8, 64):
        # Members of one name are counted each, though only the last is kept.
        assert json_depth_exceeds(repaired, limit) or depth <= limit


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)  # pyright: ignore[reportUnknownArgumentType]
    return 0
