"""`antiphon journal prune`: delete whole sessions, those that somebody names or that are old.

The only journal command that writes. What is deleted is shown and asked about first. That a session
which a living process writes is left, and an old one that has changed meanwhile, is the store's to know.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from antiphon.cli._arguments import UsageError
from antiphon.cli._journal_lines import json_line
from antiphon.cli._journal_page import iso, moment
from antiphon.cli._output import as_line, is_terminal, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from antiphon.cli._output import Output
    from antiphon.journal import SessionInfo, SqliteJournal

__all__ = ["agreed", "delete", "say"]


async def delete(
    journal: SqliteJournal,
    sessions: Sequence[SessionInfo],
    options: argparse.Namespace,
    output: Output,
) -> bool:
    """Delete these sessions, say what becomes of each; whether all of them are gone.

    Args:
        journal: open for writing.
        sessions: as they were chosen.
        options: with `json`, and `before`: one that has changed since then is left, None for none.
        output: gets a line for each session.
    """
    ids = [session.session_id for session in sessions]
    pruned = await journal.prune(sessions=ids, older_than=options.before)
    good = True
    for session in sessions:
        owner = pruned.in_use.get(session.session_id)
        if owner is not None:
            good = False
            say(options, output, session, "left", f"{owner} writes it")
        elif session.session_id in pruned.removed:
            say(options, output, session, "deleted")
        elif await journal.info(session.session_id) is None:
            say(options, output, session, "gone", "somebody else has deleted it")
        else:
            good = False
            say(options, output, session, "left", "it has changed meanwhile")
    return good


def say(
    options: argparse.Namespace, output: Output, session: SessionInfo, state: str, why: str = ""
) -> None:
    """What becomes of a session, as a line."""
    if options.json:
        line = {
            "type": "pruned",
            "session_id": session.session_id,
            "records": session.records,
            "updated": iso(session.updated),
            "deleted": state == "deleted",
            "why": why or state,
        }
        output.write(json_line(line))
    else:
        output.text(f"{state}: {_line(session)}{f' ({as_line(why)})' if why else ''}\n")


def agreed(sessions: Sequence[SessionInfo]) -> bool:
    """Ask whoever is at the terminal.

    Raises:
        UsageError: nobody is.
    """
    if not is_terminal(sys.stdin):
        raise UsageError("antiphon journal prune: nobody is there to ask; say --yes or --dry-run")
    for session in sessions:
        tell(f"  {_line(session)}\n")
    count, records = len(sessions), sum(session.records for session in sessions)
    what = f"{count:,} session{'s' * (count != 1)} with {records:,} record{'s' * (records != 1)}"
    tell(f"delete {what} for good? [y/N] ")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _line(session: SessionInfo) -> str:
    title = f"  {as_line(session.title)}" if session.title else ""
    facts = f"{session.records:,} records, changed {moment(session.updated)}"
    return f"{as_line(session.session_id)}  {facts}{title}"
