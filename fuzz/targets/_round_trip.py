"""The law of every typed value: what is written for it is read as the same."""

from __future__ import annotations

import json
from typing import Any

from antiphon.schema import decode_reporting, encode

__all__ = ["check_round_trip"]


def check_round_trip(kind: Any, value: Any) -> None:
    written = encode(value)
    assert b"\n" not in written
    again, repairs = decode_reporting(kind, written)
    # A variant that is not known keeps the text that it came in.
    assert json.loads(encode(again)) == json.loads(written)
    if "Unknown" not in repr(again):
        assert not repairs, f"what we write ourselves was repaired: {repairs}"
