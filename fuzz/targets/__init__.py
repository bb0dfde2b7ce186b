"""One module a parser: `check(data)` holds it against its laws for any bytes.

A law that does not hold raises `AssertionError`, a parser that fails raises whatever it raised. What a
target takes for granted (chunk sizes, which method) it reads from the first bytes of the data, so that
one file is one case.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMES", "load"]

NAMES = (
    "framer",
    "envelope",
    "oversized",
    "params",
    "result",
    "update",
    "forgiving",
    "scan",
    "untyped",
    "view",
    "token",
)


def load(name: str) -> Callable[[bytes], None]:
    """The target's `check`."""
    check: Callable[[bytes], None] = import_module(f"fuzz.targets.{name}").check
    return check
