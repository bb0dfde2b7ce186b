"""Each law passes a store that keeps it, and names one that breaks it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec
import pytest

from antiphon.journal import (
    SESSION_CREATED,
    TURN_COMPLETED,
    TURN_STARTED,
    Entry,
    Journal,
    JournalError,
    JournalInUse,
    MemoryJournal,
    Record,
    SessionInfo,
    SessionLog,
    Subscriber,
    Writer,
)
from antiphon.testing import JournalLaw, journal_laws

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Generator,
        Iterator,
        Sequence,
    )
    from pathlib import Path

# ------------------------------------------------------------------ a store, and how to break it


class Disk:
    """What several "processes" share: records and owners by session."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = {}
        self.owners: dict[str, PlainLog] = {}
        self.order: dict[str, int] = {}
        self.count = itertools.count()


DISKS: dict[Path, Disk] = {}


class PlainLog(SessionLog):
    """The laws, kept as plainly as can be."""

    def __init__(self, journal: Plain, session_id: str) -> None:
        self.journal = journal
        self.disk = journal.disk
        self.session_id = session_id

    @property
    def records(self) -> list[Record]:
        return self.disk.records.get(self.session_id, [])

    async def claim(self) -> None:
        owner = self.disk.owners.setdefault(self.session_id, self)
        if owner is not self:
            raise JournalInUse(self.session_id, "another")

    async def release(self) -> None:
        if self.disk.owners.get(self.session_id) is self:
            del self.disk.owners[self.session_id]

    def check(self) -> None:
        self.journal.check()
        if self.disk.owners.get(self.session_id) is not self:
            raise JournalInUse(self.session_id, "another")

    def stamp(self, entries: Sequence[Entry], start: int) -> list[Record]:
        now = time.time_ns() // 1_000_000
        return [
            Record(offset, self.session_id, entry.kind, entry.payload, entry.taint, now)
            for offset, entry in enumerate(entries, start)
        ]

    def keep(self, records: Sequence[Record]) -> None:
        if records:
            self.disk.records.setdefault(self.session_id, []).extend(records)
            self.disk.order[self.session_id] = next(self.disk.count)

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.check()
        records = self.stamp(entries, len(self.records) + 1)
        self.keep(records)
        return records

    async def read(self, start: int, stop: int) -> list[Record]:
        return [record for record in self.records if start <= record.offset <= stop]

    async def high_watermark(self) -> int:
        return len(self.records)


class Plain(Journal):
    log: ClassVar[type[PlainLog]] = PlainLog

    def __init__(self, path: Path) -> None:
        self.disk = DISKS.setdefault(path, Disk())
        self.closed = False

    def check(self) -> None:
        if self.closed:
            raise JournalError("closed")

    async def open(self, session_id: str) -> SessionLog:
        self.check()
        return self.log(self, session_id)

    async def sessions(self) -> list[SessionInfo]:
        self.check()
        names = sorted(self.disk.order, key=self.disk.order.__getitem__, reverse=True)
        return [self.tell(name, self.disk.records[name]) for name in names]

    def tell(self, name: str, records: list[Record]) -> SessionInfo:
        first, last = records[0], records[-1]
        meta = first.data if first.kind == SESSION_CREATED else {}
        title, turn_open = None, False
        for record in records:
            if record.tag == "session_info_update":
                title = record.data.get("title", title)
            elif record.kind in (TURN_STARTED, TURN_COMPLETED):
                turn_open = record.kind == TURN_STARTED
        return SessionInfo(name, len(records), first.ts, last.ts, meta, title, turn_open=turn_open)

    async def delete(self, session_id: str) -> bool:
        self.check()
        self.disk.order.pop(session_id, None)
        return self.disk.records.pop(session_id, None) is not None

    async def aclose(self) -> None:
        self.closed = True
        for name, log in list(self.disk.owners.items()):
            if log.journal is self:
                del self.disk.owners[name]


def with_log(log: type[PlainLog]) -> type[Plain]:
    return cast("type[Plain]", type("Broken", (Plain,), {"log": log}))


class CountsForAll(PlainLog):
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.check()
        start = sum(map(len, self.disk.records.values())) + 1
        records = self.stamp(entries, start)
        self.keep(records)
        return records


class CountsForItself(PlainLog):
    size = 0

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.check()
        records = self.stamp(entries, self.size + 1)
        self.keep(records)
        self.size += len(records)
        return records


class OneByOne(PlainLog):
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        records: list[Record] = []
        for entry in entries:
            records += await super().append([entry])
            await asyncio.sleep(0)
        return records


class NewestFirst(PlainLog):
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        if not flush:
            await asyncio.sleep(0)
        return await super().append(entries)


class KeepsWhatItRefuses(PlainLog):
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        records = self.stamp(entries, len(self.records) + 1)
        self.keep(records)
        self.check()
        return records


class LosesOneAfterAnError(PlainLog):
    failed = False

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        try:
            self.check()
        except JournalError:
            self.failed = True
            raise
        if self.failed:
            self.failed = False
            return self.stamp(entries, len(self.records) + 1)
        return await super().append(entries)


class Halves(PlainLog):
    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.check()
        records = self.stamp(entries, len(self.records) + 1)
        self.keep(records[:1])
        await asyncio.sleep(0)
        self.keep(records[1:])
        return records


class CachesTheMark(PlainLog):
    mark: int | None = None

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        records = await super().append(entries)
        self.mark = len(self.records)
        return records

    async def high_watermark(self) -> int:
        if self.mark is None:
            self.mark = len(self.records)
        return self.mark


class ConfirmsAhead(PlainLog):
    """What `append` has returned is stored a moment later."""

    waiting: ClassVar[list[asyncio.Handle]] = []

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        self.check()
        records = self.stamp(entries, len(self.records) + 1)
        self.waiting.append(asyncio.get_running_loop().call_later(0.001, self.keep, records))
        return records


class LeavesTheLastOut(PlainLog):
    async def read(self, start: int, stop: int) -> list[Record]:
        return [record for record in self.records if start <= record.offset < stop]


class ReadsOnePage(PlainLog):
    async def read(self, start: int, stop: int) -> list[Record]:
        return (await super().read(start, stop))[:256]


class RoundsNumbers(PlainLog):
    def stamp(self, entries: Sequence[Entry], start: int) -> list[Record]:
        return [
            msgspec.structs.replace(
                record, payload=json.dumps(json.loads(record.payload, parse_int=float)).encode()
            )
            for record in super().stamp(entries, start)
        ]


class KnowsItsKinds(PlainLog):
    def stamp(self, entries: Sequence[Entry], start: int) -> list[Record]:
        known = {"user", "agent", "external", "system"}
        return [
            msgspec.structs.replace(
                record, taint=record.taint if record.taint in known else "system"
            )
            for record in super().stamp(entries, start)
        ]


class GivesItsListAway(PlainLog):
    async def read(self, start: int, stop: int) -> list[Record]:
        if (start, stop) == (1, len(self.records)):
            return self.records
        return await super().read(start, stop)


class LooksBackAPage(PlainLog):
    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        return {record.tag: record for record in self.records[-256:] if record.tag in tags}


class BelievesUpdates(PlainLog):
    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        named = [(record.data.get("sessionUpdate", record.tag), record) for record in self.records]
        return {tag: record for tag, record in named if tag in tags}


class ForgetsTitles(Plain):
    def tell(self, name: str, records: list[Record]) -> SessionInfo:
        told = [record.data for record in records if record.tag == "session_info_update"]
        title = told[-1].get("title") if told else None
        return msgspec.structs.replace(super().tell(name, records), title=title)


class InOrderOfBirth(Plain):
    async def sessions(self) -> list[SessionInfo]:
        return sorted(await super().sessions(), key=lambda info: info.created, reverse=True)


class IgnoresCase(Plain):
    async def open(self, session_id: str) -> SessionLog:
        return await super().open(session_id.lower())


class LeavesTheCount(Plain):
    async def delete(self, session_id: str) -> bool:
        found = session_id in self.disk.order
        self.disk.order.pop(session_id, None)
        return found


class RepairsForReaders(Plain):
    async def open(self, session_id: str) -> SessionLog:
        log = await super().open(session_id)
        assert isinstance(log, PlainLog)
        latest = await log.latest([TURN_STARTED, TURN_COMPLETED])
        if [*latest] == [TURN_STARTED]:
            log.keep(log.stamp([Entry(TURN_COMPLETED, b"{}", "system")], len(log.records) + 1))
        return log


class ClaimsForReaders(PlainLog):
    async def high_watermark(self) -> int:
        await self.claim()
        return await super().high_watermark()


class FollowsFromTheTip(Plain):
    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        log = await self.open(session_id)
        start = max(start, await log.high_watermark())
        async for run in super().follow(session_id, start):
            yield run


class FollowsForEver(Plain):
    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        async for run in super().follow(session_id, start):
            yield run
        await asyncio.get_running_loop().create_future()


class FollowsItself(Plain):
    """What other processes append is not seen."""

    async def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        async for run in super().follow(session_id, start):
            owner = self.disk.owners.get(session_id)
            if owner is None or owner.journal is self:
                yield run


class Anybody(PlainLog):
    async def claim(self) -> None:
        self.disk.owners[self.session_id] = self


class AnyProcess(PlainLog):
    """Owners are known to one process only."""

    async def claim(self) -> None:
        owner = self.disk.owners.get(self.session_id)
        if owner is not None and owner.journal is not self.journal:
            del self.disk.owners[self.session_id]
        await super().claim()


class StaysOpen(Plain):
    async def aclose(self) -> None:
        await super().aclose()
        self.closed = False


class KeepsItsClaims(Plain):
    async def aclose(self) -> None:
        self.closed = True


class KeepsNothing(Plain):
    """Its records live as long as the object."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.disk = Disk()


class Snapshot(Plain):
    """It reads the disk when it is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.whole = self.disk
        self.disk = Disk()
        for name, records in self.whole.records.items():
            self.disk.records[name] = list(records)
            self.disk.order[name] = self.whole.order[name]

    async def aclose(self) -> None:
        await super().aclose()
        self.whole.records.update(self.disk.records)
        self.whole.order.update(self.disk.order)


class LeavesATask(Plain):
    tasks: ClassVar[list[asyncio.Task[None]]] = []

    async def open(self, session_id: str) -> SessionLog:
        self.tasks.append(asyncio.get_running_loop().create_task(asyncio.sleep(60)))
        return await super().open(session_id)


STORES: list[tuple[str, type[Plain]]] = [
    ("offsets_begin_at_1_and_have_no_gaps", with_log(CountsForAll)),
    ("offsets_begin_at_1_and_have_no_gaps", LeavesATask),
    ("an_offset_is_never_given_twice", with_log(CountsForItself)),
    ("concurrent_appends_are_whole_and_in_order", with_log(OneByOne)),
    ("concurrent_appends_are_whole_and_in_order", with_log(NewestFirst)),
    ("a_refused_append_leaves_nothing_behind", with_log(KeepsWhatItRefuses)),
    ("a_refused_append_leaves_nothing_behind", with_log(LosesOneAfterAnError)),
    ("a_cancelled_append_is_whole_or_not_there", with_log(Halves)),
    ("the_mark_is_asked_of_the_store", with_log(CachesTheMark)),
    ("the_mark_is_asked_of_the_store", with_log(ConfirmsAhead)),
    ("reads_are_exact", with_log(LeavesTheLastOut)),
    ("long_histories_are_read_exactly", with_log(ReadsOnePage)),
    ("what_is_read_is_what_was_appended", with_log(RoundsNumbers)),
    ("what_is_read_is_what_was_appended", with_log(KnowsItsKinds)),
    ("what_is_kept_is_nobodys_to_change", with_log(GivesItsListAway)),
    ("the_newest_of_each_tag_is_found", with_log(LooksBackAPage)),
    ("the_newest_of_each_tag_is_found", with_log(BelievesUpdates)),
    ("sessions_are_told_as_they_are", ForgetsTitles),
    ("sessions_are_told_as_they_are", InOrderOfBirth),
    ("a_session_id_is_any_text", IgnoresCase),
    ("only_whole_sessions_are_deleted", LeavesTheCount),
    ("reading_never_writes", RepairsForReaders),
    ("reading_never_writes", with_log(ClaimsForReaders)),
    ("a_follower_gets_every_record_once", FollowsFromTheTip),
    ("following_ends_with_the_session", FollowsForEver),
    ("one_log_at_a_time_has_the_claim", with_log(Anybody)),
    ("a_closed_journal_refuses", StaysOpen),
    ("what_was_appended_is_there_after_a_restart", KeepsNothing),
    ("another_process_sees_what_append_returned", Snapshot),
    ("one_process_at_a_time_has_the_claim", with_log(AnyProcess)),
    ("closing_a_journal_gives_up_its_claims", KeepsItsClaims),
    ("what_another_process_appends_is_heard", FollowsItself),
]


# ------------------------------------------------------------------ writers that break theirs


def publishes_ahead(patch: pytest.MonkeyPatch) -> None:
    """Tell the tails when something is submitted, as if the store had it already."""
    submit, offsets = Writer.submit, itertools.count(2)

    def submit_and_tell(self: Writer, entry: Entry, *arguments: Any, **options: Any) -> None:
        name, offset = self.session_id, next(offsets)
        record = Record(offset, name, entry.kind, entry.payload, entry.taint, 0)
        self._give(record, list(self._seats.values()))
        submit(self, entry, *arguments, **options)

    patch.setattr(Writer, "submit", submit_and_tell)


def looks_at_the_tip_alone(patch: pytest.MonkeyPatch) -> None:
    """Repair only where the very last record is the start of a turn."""
    prepare = Writer._prepare

    async def prepare_for_the_tip(self: Writer) -> None:
        latest = self.log.latest

        async def of_the_tip(tags: Collection[str]) -> dict[str, Record]:
            mark = await self.log.high_watermark()
            return {t: r for t, r in (await latest(tags)).items() if r.offset == mark}

        patch.setattr(self.log, "latest", of_the_tip, raising=False)
        await prepare(self)

    patch.setattr(Writer, "_prepare", prepare_for_the_tip)


def repairs_each_time(patch: pytest.MonkeyPatch) -> None:
    """Complete the last turn whether or not it was completed."""
    prepare = Writer._prepare

    async def prepare_again(self: Writer) -> None:
        latest = self.log.latest

        async def of_starts(tags: Collection[str]) -> dict[str, Record]:
            return await latest([TURN_STARTED])

        patch.setattr(self.log, "latest", of_starts, raising=False)
        await prepare(self)

    patch.setattr(Writer, "_prepare", prepare_again)


def reads_the_mark_first(patch: pytest.MonkeyPatch) -> None:
    """Read the mark, then register: what comes between is lost."""
    attach = Subscriber.attach

    async def attach_late(self: Subscriber) -> int:
        mark = await self._log.high_watermark()

        async def known() -> int:
            return mark

        log = self._log
        self._log = cast("SessionLog", LogWithMark(log, known))
        return await attach(self)

    patch.setattr(Subscriber, "attach", attach_late)


class LogWithMark:
    def __init__(self, log: SessionLog, known: Callable[[], Any]) -> None:
        self.session_id = log.session_id
        self.read = log.read
        self.high_watermark = known


WRITERS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("what_a_writer_publishes_is_durable", publishes_ahead),
    ("a_turn_left_open_is_completed_once", looks_at_the_tip_alone),
    ("a_turn_left_open_is_completed_once", repairs_each_time),
    ("history_and_live_are_the_journal", reads_the_mark_first),
]


# ------------------------------------------------------------------ the tests


@pytest.fixture(autouse=True)
def disks() -> Iterator[None]:
    """Empty ones, and none is left."""
    yield
    DISKS.clear()


def law_named(name: str, factory: type[Plain]) -> JournalLaw:
    return next(law for law in journal_laws(factory, bound=0.7) if law.__name__ == name)


@pytest.mark.covers("J3", "J8", "J12", "CDI-4")
@pytest.mark.parametrize("law", journal_laws(MemoryJournal))
def test_a_journal_in_memory_keeps(law: JournalLaw) -> None:
    law()


@pytest.mark.parametrize("law", journal_laws(Plain))
def test_a_plain_store_keeps(law: JournalLaw) -> None:
    law()


@pytest.mark.covers("J8")
@pytest.mark.parametrize(
    ("name", "broken"), STORES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(STORES)]
)
def test_a_law_finds_the_store_that_breaks_it(name: str, broken: type[Plain]) -> None:
    with pytest.raises((AssertionError, JournalInUse, StopAsyncIteration)) as caught:
        law_named(name, broken)()

    assert str(caught.value)


@pytest.mark.covers("J3", "P-BUS6", "J12")
@pytest.mark.parametrize(("name", "fault"), WRITERS, ids=[fault.__name__ for _, fault in WRITERS])
def test_a_law_finds_the_writer_that_breaks_it(
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)

    with pytest.raises(AssertionError):
        law_named(name, Plain)()


def test_every_law_was_seen_to_fail() -> None:
    assert {name for name, _ in (*STORES, *WRITERS)} == {
        law.__name__ for law in journal_laws(Plain)
    }


def test_a_store_without_a_path_has_no_laws_about_several_processes() -> None:
    of_paths = {law.__name__ for law in journal_laws(Plain)}
    others = {law.__name__ for law in journal_laws(MemoryJournal)}

    assert others < of_paths
    assert "another_process_sees_what_append_returned" in of_paths - others


def test_laws_are_shown_by_their_words() -> None:
    law = journal_laws(MemoryJournal)[0]

    assert law.__name__ in repr(law)
    assert law.__doc__


async def test_a_law_can_be_awaited() -> None:
    await journal_laws(MemoryJournal)[0].check()


async def made_later(path: Path) -> Journal:
    await asyncio.sleep(0)
    return Plain(path)


@contextlib.contextmanager
def lent(path: Path) -> Generator[Journal]:
    journal = Plain(path)
    yield journal
    assert journal.closed


@contextlib.asynccontextmanager
async def lent_later(path: Path) -> AsyncGenerator[Journal]:
    with lent(path) as journal:
        yield journal


@pytest.mark.parametrize("factory", [made_later, lent, lent_later])
def test_a_factory_may_be_a_coroutine_function_or_a_context_manager(factory: Any) -> None:
    for law in journal_laws(factory):
        if law.__name__ in ("reads_are_exact", "another_process_sees_what_append_returned"):
            law()


@pytest.mark.parametrize("made", [None, contextlib.nullcontext(3)])
def test_a_factory_that_makes_something_else_is_told_so(made: Any) -> None:
    with pytest.raises(TypeError, match="the factory gives no Journal"):
        journal_laws(lambda: made)[0]()


class Hanging(PlainLog):
    async def high_watermark(self) -> int:
        await asyncio.get_running_loop().create_future()
        return 0


def test_a_store_that_hangs_breaks_the_law_within_a_bound() -> None:
    laws = journal_laws(with_log(Hanging), bound=0.05)

    with pytest.raises(AssertionError, match=r"not done after 0\.05 s"):
        next(law for law in laws if law.__name__ == "the_mark_is_asked_of_the_store")()
