"""Reads `src/antiphon/schema/notes.toml`: decisions of people that the official JSON lacks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

METHOD_KEYS = frozenset({"gate", "handler", "side"})


@dataclass(frozen=True)
class Notes:
    """What `notes.toml` says.

    `variants`: "Union.tag" → class name. `closed`: union → the tag that its untagged variant must not
    have, and the one value of it that is accepted all the same. `methods`: wire name or "wire name (kind)" → facts.
    """

    variants: dict[str, str]
    closed: dict[str, tuple[str, str]]
    methods: dict[str, dict[str, str]]

    def of_method(self, name: str, kind: str) -> dict[str, str]:
        """Facts about one method; an entry with the kind wins over one without."""
        return {**self.methods.get(name, {}), **self.methods.get(f"{name} ({kind})", {})}


def load_notes(path: Path) -> Notes:
    """Read the notes; raises ValueError on a table or key that nothing would read."""
    data: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    if unknown := set(data) - {"variants", "closed", "methods"}:
        raise ValueError(f"{path}: unknown table {sorted(unknown)}")
    methods: dict[str, dict[str, str]] = data.get("methods", {})
    for name, facts in methods.items():
        if unknown := set(facts) - METHOD_KEYS:
            raise ValueError(f"{path}: method {name!r} has unknown keys {sorted(unknown)}")
    return Notes(
        variants=data.get("variants", {}),
        closed={name: (key, word) for name, (key, word) in data.get("closed", {}).items()},
        methods=methods,
    )
