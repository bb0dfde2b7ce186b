"""`antiphon journal`: look into the sessions that a durable agent keeps in a directory.

Finds the journal and the session that is meant, and turns what goes wrong into words and an exit code.
What records tell, `_journal_story` knows, how that looks `_journal_page`, how it is exported
`_journal_lines`. All of it reads only, and beside a running agent; `prune`, which deletes, is in
`_journal_prune`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from antiphon._errors import JournalDamaged, JournalError
from antiphon.cli._journal_lines import Recording, json_line, record_line
from antiphon.cli._journal_page import Page, iso, moment
from antiphon.cli._journal_prune import agreed, delete, say
from antiphon.cli._journal_story import Story
from antiphon.cli._outcome import INTERRUPTED, TIMEOUT
from antiphon.cli._output import Output, as_line, readable, tell
from antiphon.cli._show import choose_paper

if TYPE_CHECKING:
    import argparse
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Coroutine,
        Generator,
        Sequence,
    )

    from antiphon.journal import Damage, Journal, Record, SessionInfo, SqliteJournal

__all__ = ["DAMAGED", "DONE", "NO_SESSION", "UNREADABLE", "Failed", "Look", "run"]

T = TypeVar("T")

DONE: Final = 0
#: Something is damaged, or was not done (a session that is in use); what was possible was done.
DAMAGED: Final = 1
#: The journal, or the file that is to be written, cannot be used at all.
UNREADABLE: Final = 3
#: No session has that id, or several begin with it.
NO_SESSION: Final = 4

#: Columns of a title or folder in a list.
_MAX_CELL: Final = 48
#: And of an id: what is left of a longer one names it all the same.
_MAX_ID: Final = 80
#: How often it is looked whether a session that nothing happens in is still there.
_LOOK: Final = 1.0


class Failed(Exception):
    """Nothing more can be done: what a person should read, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(options: argparse.Namespace) -> int:
    """Carry out the action of a command line; the exit code."""
    # The library's log is for who writes agents; a person gets what counts in words.
    logging.getLogger("antiphon").addHandler(logging.NullHandler())
    output = Output()
    try:
        with asyncio.Runner() as runner:
            if options.action == "prune":
                code = _prune(options, output, runner)
            else:
                action = _ACTIONS[options.action]
                code = runner.run(_bounded(action(options, output), output))
    except JournalDamaged as error:
        return _fail(output, options, str(error), DAMAGED)
    except JournalError as error:
        return _fail(output, options, str(error), UNREADABLE)
    except Failed as error:
        return _fail(output, options, str(error), error.code)
    except _UnreadError:
        code = INTERRUPTED
    if output.lost and output.was_there:
        if not output.is_pipe:
            return _fail(output, options, "standard output takes no more", UNREADABLE)
        return INTERRUPTED
    return code


def _fail(output: Output, options: argparse.Namespace, message: str, code: int) -> int:
    tell(f"antiphon journal: {readable(message)}\n")
    if options.json:
        output.write(json_line({"type": "error", "message": message}))
    return code


async def _bounded(work: Coroutine[Any, Any, T], output: Output) -> T:
    """The result of `work`, unless nobody reads any more what it prints: then `_UnreadError`."""
    doing = asyncio.create_task(work)
    output.on_lost = doing.cancel
    try:
        return await doing
    except asyncio.CancelledError:
        if output.lost and doing.cancelled():
            raise _UnreadError from None
        raise
    finally:
        # An interrupt cancels whoever waits here, and what is cancelled puts its things away.
        doing.cancel()
        await asyncio.wait((doing,))


class _UnreadError(Exception):
    """Standard output is lost."""


class Look:
    """A journal that is looked into, and how much of it was found damaged.

    Attributes:
        journal: open for reading only.
        damages: how many were told of.
    """

    def __init__(self, journal: SqliteJournal, output: Output, *, as_json: bool) -> None:
        self.journal = journal
        self.damages = 0
        self._output = output
        self._as_json = as_json

    @property
    def code(self) -> int:
        """The exit code, as far as damage decides it."""
        return DAMAGED if self.damages else DONE

    def damaged(self, damage: Damage) -> None:
        """Tell of damage."""
        place = [damage.file]
        if damage.session_id is not None:
            place.append(f"session {damage.session_id}")
        if damage.offset is not None:
            place.append(f"record {damage.offset}")
        self._tell(f"{', '.join(place)}: {damage.reason}", msgspec.structs.asdict(damage))

    def _tell(self, text: str, facts: dict[str, Any]) -> None:
        self.damages += 1
        tell(as_line(f"damaged: {text}") + "\n")
        if self._as_json:
            self._output.write(json_line({"type": "damage", **facts}))

    async def sessions(self) -> list[SessionInfo]:
        """All that can be read; what is left out is told of."""
        heard = _Heard()
        logger = logging.getLogger("antiphon.journal")
        logger.addHandler(heard)
        try:
            return await self.journal.sessions()
        finally:
            logger.removeHandler(heard)
            for text in heard.texts:
                facts = {"file": None, "session_id": None, "offset": None, "reason": text}
                self._tell(text, facts)

    async def find(self, prefix: str) -> SessionInfo:
        """The session with this id, or the only one whose id begins so."""
        session = await self.journal.info(prefix)
        if session is not None:
            return session
        sessions = await self.sessions()
        fitting = [one for one in sessions if one.session_id.startswith(prefix)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            known = f"it has {len(sessions):,}" if sessions else "it has none"
            if self.damages:
                known += " that can be read"
            code = DAMAGED if self.damages else NO_SESSION
            raise Failed(f"no session begins with {as_line(prefix)!r}; {known}", code)
        ids = "".join(f"\n  {as_line(one.session_id)}" for one in fitting[:20])
        more = f"\n  … and {len(fitting) - 20} more" if len(fitting) > 20 else ""
        raise Failed(f"several sessions begin with {as_line(prefix)!r}:{ids}{more}", NO_SESSION)


class _Heard(logging.Handler):
    """What the journal has to say while it lists its sessions: its contract is to log what it leaves out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.asynccontextmanager
async def _opened(options: argparse.Namespace, output: Output) -> AsyncGenerator[Look]:
    from antiphon.journal import SqliteJournal

    journal = SqliteJournal(directory(options.path), read_only=True)
    try:
        yield Look(journal, output, as_json=options.json)
    finally:
        await journal.aclose()


def directory(path: str) -> Path:
    """The directory of the journal that a path names: itself, or that of one of its files.

    Raises:
        Failed: there is nothing there, or nothing that we may read.
    """
    place = Path(path)
    try:
        mode = place.stat().st_mode
        if not stat.S_ISDIR(mode):
            place = place.parent
        names = os.listdir(place)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror or error}", UNREADABLE) from None
    except ValueError:
        raise Failed(f"{path!r} is no path", UNREADABLE) from None
    if "journal.json" not in names and not any(name.startswith("shard-") for name in names):
        raise Failed(f"{path}: there is no journal here (no journal.json, no shards)", UNREADABLE)
    return place


# -- ls


async def _ls(options: argparse.Namespace, output: Output) -> int:
    async with _opened(options, output) as look:
        sessions = await look.sessions()
        if options.json:
            for session in sessions:
                output.write(json_line(_as_json(session)))
        elif sessions:
            output.text(_table(sessions))
        else:
            output.text("no sessions\n")
        return look.code


def _as_json(session: SessionInfo) -> dict[str, Any]:
    return {
        "type": "session",
        "session_id": session.session_id,
        "title": session.title,
        "cwd": _cwd(session) or None,
        "records": session.records,
        "created": iso(session.created),
        "updated": iso(session.updated),
        "turn_open": session.turn_open,
        "meta": session.meta,
    }


def _cwd(session: SessionInfo) -> str:
    cwd = session.meta.get("cwd")
    return cwd if isinstance(cwd, str) else ""


def _table(sessions: Sequence[SessionInfo]) -> str:
    rows = [("SESSION", "CHANGED", "CREATED", "RECORDS", "TURN", "TITLE", "FOLDER")]
    rows += [
        (
            _cell(one.session_id, _MAX_ID),
            moment(one.updated),
            moment(one.created),
            f"{one.records:,}",
            "open" if one.turn_open else "-",
            _cell(one.title or "-"),
            _cell(_cwd(one) or "-"),
        )
        for one in sessions
    ]
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            " " * (width - _width(cell)) + cell
            if column == 3
            else cell + " " * (width - _width(cell))
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _cell(text: str, most: int = _MAX_CELL) -> str:
    text = as_line(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _width(text: str) -> int:
    """Columns on a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


# -- show and tail


def _wanted(options: argparse.Namespace) -> Callable[[Record], bool]:
    kinds: frozenset[str] | None = options.kinds
    if kinds is None:
        return lambda _: True
    return lambda record: record.kind in kinds or record.tag in kinds


async def _show(options: argparse.Namespace, output: Output) -> int:
    wanted = _wanted(options)
    async with _opened(options, output) as look:
        session = await look.find(options.session)
        start = max(options.start or 1, 1)
        stop = session.records if options.stop is None else min(options.stop, session.records)
        story, page = Story(), Page(choose_paper(output), cwd=_cwd(session))
        if not options.json:
            page.head(session)
            if start > 1 or stop < session.records:
                page.remark(f"records {start:,} to {stop:,} of {session.records:,}")
        async for record in _readable(look, session.session_id, start, stop):
            if not wanted(record):
                continue
            if options.json:
                output.write(record_line(record))
                continue
            story.add(record)
            for part in story.take():
                page.part(part)
        for part in story.rest():
            page.part(part)
        if story.turn_is_open and not options.json:
            page.remark(_OPEN if stop == session.records else "the turn goes on after this")
        return look.code


async def _readable(look: Look, session_id: str, start: int, stop: int) -> AsyncGenerator[Record]:
    """What can be read of a range, in order; of what cannot, somebody is told."""
    if start > stop:
        return

    def damaged(damage: Damage) -> None:
        if damage.offset is None or damage.offset <= stop:
            look.damaged(damage)

    runs = look.journal.export(session_id, start=start, damaged=damaged)
    async with contextlib.aclosing(runs):
        async for records in runs:
            for record in records:
                if record.offset > stop:
                    return
                yield record


_OPEN: Final = (
    "the turn is open: somebody works on it, or has ended without a word (then it is marked as "
    "orphaned when the session is next used)"
)


async def _tail(options: argparse.Namespace, output: Output) -> int:
    try:
        async with asyncio.timeout(options.timeout):
            return await _follow(options, output)
    except TimeoutError:
        return TIMEOUT


async def _follow(options: argparse.Namespace, output: Output) -> int:
    wanted = _wanted(options)
    async with _opened(options, output) as look:
        session = await look.find(options.session)
        start = await _start_of_tail(options, look, session)
        story, page = Story(), Page(choose_paper(output), cwd=_cwd(session))

        def show(record: Record) -> None:
            if not wanted(record):
                return
            if options.json:
                output.write(record_line(record))
                return
            for change in story.add(record):
                page.live(change)
            story.take()

        try:
            if not options.json:
                page.head(session)
                if start > 1:
                    page.remark(f"from record {start:,}")
            # What is there already is read as `show` does: damage in it hides nothing else.
            async for record in _readable(look, session.session_id, start, session.records):
                show(record)
            last = max(start - 1, session.records)
            if options.until_idle and await _is_idle(look.journal, session.session_id, last):
                return look.code
            async for records in _coming(look.journal, session, last + 1):
                for record in records:
                    show(record)
                last = records[-1].offset
                if options.until_idle and await _is_idle(look.journal, session.session_id, last):
                    return look.code
            if not options.json:
                page.remark("the session was deleted")
            return look.code
        finally:
            page.close()


async def _coming(
    journal: SqliteJournal, session: SessionInfo, start: int
) -> AsyncGenerator[list[Record]]:
    """What is appended to a session from `start` on; it ends when the session is deleted.

    `Journal.follow` waits for a session that is not there: it cannot know that one was deleted before it
    looked first. Once it has given something, it does.
    """
    log = await journal.open(session.session_id)
    async with contextlib.aclosing(journal.follow(session.session_id, start)) as runs:
        first = asyncio.ensure_future(anext(runs, None))
        try:
            while not first.done():
                await asyncio.wait([first], timeout=_LOOK)
                if not first.done() and await log.high_watermark() < session.records:
                    return
        finally:
            first.cancel()
            await asyncio.wait([first])
        run = first.result()
        while run is not None:
            yield run
            run = await anext(runs, None)


async def _start_of_tail(options: argparse.Namespace, look: Look, session: SessionInfo) -> int:
    """Where to begin: as was said, or where the last turn did."""
    start: int | None = options.start
    lines: int | None = options.lines
    if start is not None:
        return max(start, 1)
    if lines is not None:
        return max(session.records - lines + 1, 1)
    log = await look.journal.open(session.session_id)
    turn = (await log.latest({"turn_started"})).get("turn_started")
    return 1 if turn is None else turn.offset


async def _is_idle(journal: Journal, session_id: str, shown: int) -> bool:
    """Whether no turn is open and everything was shown."""
    session = await journal.info(session_id)
    return session is None or (not session.turn_open and session.records <= shown)


# -- export


async def _export(options: argparse.Namespace, output: Output) -> int:
    async with _opened(options, output) as look:
        if options.all:
            sessions = sorted(await look.sessions(), key=lambda one: one.created)
        else:
            sessions = [await look.find(options.session)]
        with _written(options.output, output) as write:
            recording = None if options.records else Recording()
            for session in sessions:
                await _export_session(look, session, recording, write)
        return look.code


async def _export_session(
    look: Look, session: SessionInfo, recording: Recording | None, write: Callable[[bytes], None]
) -> None:
    if recording is not None:
        write(b"".join(recording.begin(session)))
    line = record_line if recording is None else recording.record
    async for record in _readable(look, session.session_id, 1, session.records):
        write(line(record))
    if recording is not None:
        ended = recording.end(session.session_id, session.records, session.updated)
        write(b"".join(ended))


@contextlib.contextmanager
def _written(path: str | None, output: Output) -> Generator[Callable[[bytes], Any]]:
    """Where an export goes: standard output, or a file that is there when it is whole.

    The file is ours alone (0600) whatever was there before: sessions hold prompts and files.
    """
    if path is None or path == "-":
        yield output.write
        return
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            # A pipe or a device is written to, not replaced.
            with target.open("wb", buffering=0) as file:
                yield file.write
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file.write
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Failed(f"{path}: {error.strerror or error}", UNREADABLE) from None


# -- verify


async def _verify(options: argparse.Namespace, output: Output) -> int:
    async with _opened(options, output) as look:
        # First: a journal that cannot be read is not a damaged one. What cannot be listed is named below.
        sessions = await look.journal.sessions()
        for damage in await look.journal.verify():
            look.damaged(damage)
        files = sum(1 for _ in look.journal.directory.glob("shard-*.db"))
        records = sum(session.records for session in sessions)
        if options.json:
            facts = {"files": files, "sessions": len(sessions), "records": records}
            result = {"type": "result", "ok": not look.damages, **facts, "damages": look.damages}
            output.write(json_line(result))
        else:
            verdict = f"{look.damages} damaged" if look.damages else "all is as it was written"
            counts = ((files, "file"), (len(sessions), "session"), (records, "record"))
            what = ", ".join(f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts)
            output.text(f"checked {what}: {verdict}\n")
        return look.code


async def _choose(options: argparse.Namespace, output: Output) -> tuple[int, list[SessionInfo]]:
    """The exit code so far, and what is to be deleted."""
    async with _opened(options, output) as look:
        if options.older_than is not None:
            sessions = await look.sessions()
            return look.code, [one for one in sessions if one.updated < options.before]
        found = [await look.find(prefix) for prefix in options.session]
        return look.code, list({one.session_id: one for one in found}.values())


async def _delete(
    options: argparse.Namespace, output: Output, chosen: Sequence[SessionInfo]
) -> int:
    from antiphon.journal import SqliteJournal

    journal = SqliteJournal(directory(options.path))
    try:
        return DONE if await delete(journal, chosen, options, output) else DAMAGED
    finally:
        await journal.aclose()


def _prune(options: argparse.Namespace, output: Output, runner: asyncio.Runner) -> int:
    options.before = None
    if options.older_than is not None:
        options.before = int((time.time() - options.older_than) * 1000)
    code, chosen = runner.run(_bounded(_choose(options, output), output))
    if not chosen:
        if not options.json:
            output.text("nothing to delete\n")
        return code
    if options.dry_run:
        for session in chosen:
            say(options, output, session, "would delete")
        return code
    # Outside of the loop, which would hear of an interrupt only after the answer.
    if not options.yes and not agreed(chosen):
        tell("nothing was deleted\n")
        return DAMAGED
    return max(code, runner.run(_bounded(_delete(options, output, chosen), output)))


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Output], Coroutine[Any, Any, int]]]] = {
    "ls": _ls,
    "show": _show,
    "tail": _tail,
    "export": _export,
    "verify": _verify,
}
