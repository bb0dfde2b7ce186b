"""`--audit FILE`: every decision about the agent as a line of JSON, for whoever reads it afterwards.

What was decided and by what is `antiphon.services.Decision`; here it becomes a line. Values of
environment variables stay out: they may be secrets.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.cli._output import one_line, tell

if TYPE_CHECKING:
    from antiphon.services import Decision

__all__ = ["Audit"]


class Audit:
    """Appends decisions to a file, each whole and at once.

    Raises:
        OSError: the file cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed = False
        # Unbuffered: what is decided is in the file before it is done.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123  (stays open; a path with odd bytes stays text)

    def write(self, decision: Decision) -> None:
        """One line; a person is told once of a file that takes no more."""
        line = msgspec.json.encode(as_json(decision))
        try:
            self._file.write(one_line(line) + b"\n")
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                problem = getattr(error, "strerror", None) or str(error)
                tell(f"antiphon: --audit {self._path}: {problem}; decisions are no longer kept\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def as_json(decision: Decision) -> dict[str, Any]:
    """What a line says; the time is UTC, to the millisecond."""
    call = decision.call
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return {
        "time": now,
        "outcome": decision.outcome,
        "by": decision.by,
        "rule": decision.rule,
        "why": decision.why,
        "about": decision.about,
        "option_id": _text(decision.option_id),
        "waited": round(decision.waited, 3),
        "session_id": _text(call.session_id),
        "kind": _text(call.kind),
        "title": _text(call.title),
        "paths": [_text(path) for path in call.paths],
        "command": None if call.command is None else [_text(word) for word in call.command],
        "cwd": _text(call.cwd),
        "env": sorted(map(str, map(_text, call.env))),
    }


def _text(text: str | None) -> str | None:
    # Lone surrogates, from odd file names or odd agents, are no UTF-8.
    return None if text is None else text.encode("utf-8", "replace").decode()
