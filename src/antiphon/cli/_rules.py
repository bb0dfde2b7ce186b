"""`antiphon rules`: print the usage rules, the one page that the package carries with it."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

import antiphon
from antiphon.cli._output import Output

if TYPE_CHECKING:
    import argparse

__all__ = ["rules", "run"]

_NAME = "usage-rules.md"


def run(options: argparse.Namespace) -> int:
    """Print the page; 0."""
    del options
    Output().text(rules())
    return 0


def rules() -> str:
    """The text of `docs/usage-rules.md`.

    A built package has it inside; an editable install finds it where it is written, in the
    repository's `docs` folder. Raises FileNotFoundError if neither is there.
    """
    packaged = importlib.resources.files(antiphon) / _NAME
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    root = Path(antiphon.__file__).resolve().parents[2]
    return (root / "docs" / _NAME).read_text(encoding="utf-8")
