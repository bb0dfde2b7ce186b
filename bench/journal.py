"""`make bench-journal`: what a journal costs, and that nothing grows with what nobody asked for.

Appends of one session and of a thousand, how long a record waits until it is published, replay, attaching
to histories of a thousand to a million records, idle sessions, many subscribers. Prints a table and, with
`--json FILE`, writes the figures. Times depend on the machine and are only told; what has to hold on any
machine is how they grow, and where that is broken the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from antiphon.journal import (
    SESSION_UPDATE,
    Entry,
    MemoryJournal,
    Record,
    Rider,
    SqliteJournal,
    Subscriber,
    Writer,
    Writers,
)
from antiphon.schema import encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from antiphon.journal import Journal

__all__ = ["Figures", "Options", "main", "measure"]

MIB: Final = 1 << 20
#: Of what a token of 32 characters is on the wire.
UPDATE: Final = Entry(
    SESSION_UPDATE,
    encode(
        {
            "sessionUpdate": "agent_message_chunk",
            "content": {"type": "text", "text": "The quick fox jumps over a dog. "},
        }
    ),
    "agent",
)

#: How many an agent says before the loop has its turn: as many as one read of a model's stream brings.
A_TURN: Final = 64


@dataclass(frozen=True)
class Options:
    """How much of everything.

    Attributes:
        records: how many are appended, and replayed.
        sessions: how many there are where there are many.
        histories: how long those are that are attached to, ascending.
        subscribers: how many there are where there are many.
        paced: how many records a second are appended where publishing is timed, and for how many seconds.
        attaches: how often each history is attached to.
    """

    records: int = 100_000
    sessions: int = 1_000
    histories: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    subscribers: tuple[int, ...] = (1, 10, 100)
    paced: tuple[int, float] = (1_000, 3.0)
    attaches: int = 30


@dataclass
class Figures:
    """What was measured, and what of it must not be.

    Attributes:
        rows: measure, what of it, figure, unit.
        wrong: sentences about how something grows.
    """

    rows: list[tuple[str, str, float, str]] = field(
        default_factory=list[tuple[str, str, float, str]]
    )
    wrong: list[str] = field(default_factory=list[str])

    def add(self, measure: str, case: str, value: float, unit: str) -> None:
        self.rows.append((measure, case, value, unit))

    def bound(self, what: str, few: float, many: float, factor: float) -> None:
        """What must not grow by more than so much."""
        if many > few * factor:
            self.wrong.append(
                f"{what} grew from {few:,.1f} to {many:,.1f}, by more than {factor:g}"
            )


class Clock:
    """Wall and processor time of this process, all threads, while its block runs."""

    def __enter__(self) -> Self:
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._begin[0]
        self.cpu = time.process_time() - self._begin[1]


class Timed:
    """A tail that gives its credit back, counts, and knows when each record came."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.count = 0
        self.times: list[float] = []

    def received(self, record: Record) -> None:
        self.count += 1
        self.times.append(time.perf_counter())
        self.writer.credit(self)

    def lagged(self) -> None:
        raise AssertionError("credit is given back at once")

    def ended(self, reason: str) -> None:
        assert reason == "closed", reason


class Link:
    """Stands for a connection that takes whatever it is given."""

    def __init__(self) -> None:
        self.frames = 0
        self.mark: int | None = None

    def send(self, frame: bytes) -> None:
        self.frames += 1

    def writable(self) -> bool:
        return True

    async def drain(self) -> None:
        return

    def reply(self, mark: int) -> None:
        self.mark = mark


Stores = dict[str, "Callable[[Path], Journal]"]
STORES: Final[Stores] = {
    "sqlite": SqliteJournal,
    "sqlite, process": lambda folder: SqliteJournal(folder, durability="process"),
    "memory": lambda _folder: MemoryJournal(),
}


@asynccontextmanager
async def opened(store: str) -> AsyncGenerator[Journal]:
    """A journal of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        journal = STORES[store](Path(folder) / "journal")
        try:
            yield journal
        finally:
            await journal.aclose()


async def append_many(writers: Sequence[Writer], count: int) -> None:
    """So many records in all, one after the other to each, as fast as they are taken."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = [len(writers)]

    def last(record: Record | None) -> None:
        assert record is not None
        left[0] -= 1
        if not left[0]:
            done.set_result(None)

    each, submitted = max(1, count // len(writers)), 0
    for number in range(each):
        end = number == each - 1
        for writer in writers:
            writer.submit(UPDATE, last if end else None, flush=end)
            submitted += 1
            if writer.full:
                await writer.room()
            elif submitted % A_TURN == 0:
                await asyncio.sleep(0)
    await done


async def fill(journal: Journal, session: str, count: int) -> None:
    """A history of exactly so many records, in runs."""
    log = await journal.open(session)
    await log.claim()
    entries = [Entry("session_created", b"{}", "system")]
    turn = b'{"turnId":1}'
    entries.append(Entry("turn_started", turn, "user"))
    while count > 0:
        run = [*entries, *[UPDATE] * (min(count, 4_096) - len(entries))]
        if count <= 4_096:
            run[-1] = Entry("turn_completed", turn, "system")
        await log.append(run)
        count -= len(run)
        entries = []
    await log.aclose()


# ------------------------------------------------------------------ measures


async def appends(store: str, options: Options, figures: Figures) -> None:
    """How many records a second become durable and are published."""
    each: dict[int, float] = {}
    for sessions in (1, options.sessions):
        async with opened(store) as journal:
            writers = Writers(journal, credit=options.records + 10)
            user = object()
            live = [await writers.ensure(f"s{n}", user) for n in range(sessions)]
            tails = [Timed(writer) for writer in live]
            for writer, tail in zip(live, tails, strict=True):
                await writer.subscribe(tail)
            with Clock() as clock:
                await append_many(live, options.records)
            count = sum(tail.count for tail in tails)
            await writers.aclose()
        name = f"{sessions:,} session{'s' * (sessions > 1)}"
        each[sessions] = clock.cpu / count * 1e6
        figures.add("append", name, count / clock.wall, "records/s")
        figures.add("append", name, each[sessions], "us CPU each")
    if store == "sqlite":
        # Nothing but the pages that different sessions touch may come on top.
        figures.bound(
            "CPU per append, of 1 and of many sessions,", each[1], each[options.sessions], 20
        )


async def latency(store: str, options: Options, figures: Figures) -> None:
    """How long a record waits until it is durable and published."""
    async with opened(store) as journal:
        writers = Writers(journal)
        user = object()
        writer = await writers.ensure("s", user)
        lone: list[float] = []
        for _ in range(200):
            begin = time.perf_counter()
            await writer.append(UPDATE)
            lone.append(time.perf_counter() - begin)
        tail = Timed(writer)
        await writer.subscribe(tail)
        rate, seconds = options.paced
        submitted: list[float] = []
        with Clock() as clock:
            begin = time.perf_counter()
            while (now := time.perf_counter() - begin) < seconds:
                while len(submitted) < now * rate:
                    submitted.append(time.perf_counter())
                    writer.submit(UPDATE)
                await asyncio.sleep(0.0005)
            await writer.append(UPDATE)
        waited = [there - here for here, there in zip(submitted, tail.times, strict=False)]
        await writers.aclose()
    for name, laps in (("waited for", lone), (f"{rate:,} records/s", waited)):
        laps.sort()
        figures.add("publish", name, statistics.median(laps) * 1e3, "ms p50")
        figures.add("publish", name, laps[len(laps) * 99 // 100] * 1e3, "ms p99")
    figures.add("publish", f"{rate:,} records/s", clock.cpu / len(submitted) * 1e6, "us CPU each")


async def attach(
    journal: Journal, source: Writer | None, session: str, rider: Rider
) -> tuple[Clock, Link]:
    """Attach once: how long until the answer, and what came before it."""
    link = Link()
    log = await journal.open(session)
    with Clock() as clock:
        subscriber = Subscriber(
            log,
            source,
            rider,
            aware=True,
            send=link.send,
            writable=link.writable,
            drain=link.drain,
            reply=link.reply,
        )
        mark = await subscriber.attach()
    subscriber.detach()
    await log.aclose()
    assert mark == link.mark
    return clock, link


async def replay(store: str, options: Options, figures: Figures) -> None:
    """A whole history, as frames."""
    async with opened(store) as journal:
        await fill(journal, "s", options.records)
        clock, link = await attach(journal, None, "s", Rider(from_offset=1))
        assert link.frames >= options.records
    figures.add("replay", "as frames", options.records / clock.wall, "records/s")
    figures.add("replay", "as frames", clock.cpu / options.records * 1e6, "us CPU each")


async def attaches(store: str, options: Options, figures: Figures) -> None:
    """Attaching to the end of a history, opening a writer on it, and listing, however long it is."""
    laps: dict[str, list[tuple[float, float]]] = {}
    async with opened(store) as journal:
        for length in options.histories:
            session = f"of {length}"
            await fill(journal, session, length)
            await one_history(journal, session, length, options.attaches, laps)
            for name, times in laps.items():
                figures.add(name, f"{length:,} records", times[-1][0] * 1e3, "ms")
    for name, times in laps.items():
        # By processor time, which is less noisy. A tree of a million is two levels deeper than one
        # of a thousand.
        few, many = (times[at][1] * 1e3 for at in (0, -1))
        figures.bound(f"{name} (ms CPU)", few + 0.3, many, 5)


async def one_history(
    journal: Journal,
    session: str,
    length: int,
    times: int,
    laps: dict[str, list[tuple[float, float]]],
) -> None:
    """The medians of one length, wall and processor, added to those of the shorter ones."""
    here: dict[str, list[Clock]] = {}

    async def attached(name: str, rider: Rider, frames: int) -> None:
        clock, link = await attach(journal, None, session, rider)
        assert link.frames == frames + 1, link.frames
        here.setdefault(name, []).append(clock)

    for _ in range(times):
        await attached("attach: from now on", Rider(history="tip"), 0)
        await attached("attach: the last ten", Rider(from_offset=length - 9), 10)
        with Clock() as clock:
            await journal.info(session)
        here.setdefault("info of a session", []).append(clock)
        log = await journal.open(session)
        with Clock() as clock:
            writer = Writer(log)
            await writer.ready()
        here.setdefault("writer: claim, look at the end", []).append(clock)
        await writer.aclose()
        await log.aclose()
    for name, clocks in here.items():
        laps.setdefault(name, []).append(
            (
                statistics.median(clock.wall for clock in clocks),
                statistics.median(clock.cpu for clock in clocks),
            )
        )


async def idle(store: str, options: Options, figures: Figures) -> None:
    """What a session costs that has been written to and is not now."""
    process = psutil.Process()
    async with opened(store) as journal:
        writers = Writers(journal)
        user = object()
        first = [await writers.ensure(f"first {n}", user) for n in range(10)]
        for writer in first:
            await writer.append(UPDATE)
        gc.collect()
        before, descriptors = process.memory_info().rss, process.num_fds()
        tasks, threads = len(asyncio.all_tasks()), process.num_threads()
        live = [await writers.ensure(f"s{n}", user) for n in range(options.sessions)]
        for writer in live:
            await writer.append(UPDATE)
        gc.collect()
        await asyncio.sleep(0)
        grown = process.memory_info().rss - before
        for what, now, then in (
            ("tasks", len(asyncio.all_tasks()), tasks),
            ("threads", process.num_threads(), threads),
        ):
            if now > then + 16:
                figures.wrong.append(f"{options.sessions} idle sessions have {now - then} {what}")
        held = process.num_fds() - descriptors
        await writers.aclose()
    figures.add(
        "idle", f"{options.sessions:,} writers", grown / options.sessions / 1024, "KiB each"
    )
    figures.add(
        "idle", f"{options.sessions:,} writers", held / options.sessions, "descriptors each"
    )


@asynccontextmanager
async def watched(
    journal: Journal, count: int, credit: int
) -> AsyncGenerator[tuple[Writer, list[Link]]]:
    """One session, its writer, and so many that look on from now."""
    writers = Writers(journal, credit=credit)
    user = object()
    writer = await writers.ensure("s", user)
    links = [Link() for _ in range(count)]
    subscribers = [
        Subscriber(
            await journal.open("s"),
            writer,
            Rider(history="tip"),
            aware=True,
            send=link.send,
            writable=link.writable,
            drain=link.drain,
            reply=link.reply,
        )
        for link in links
    ]
    for subscriber in subscribers:
        await subscriber.attach()
    try:
        yield writer, links
    finally:
        for subscriber in subscribers:
            subscriber.detach()
        await writers.aclose()


async def fan_out(store: str, options: Options, figures: Figures) -> None:
    """One session, and several that look on."""
    each: list[float] = []
    for count in options.subscribers:
        async with (
            opened(store) as journal,
            watched(journal, count, options.records + 10) as (writer, links),
        ):
            with Clock() as clock:
                await append_many([writer], options.records // 10)
            sent = sum(link.frames - 1 for link in links)
            assert sent == count * (options.records // 10), sent
        each.append(clock.cpu / sent * 1e6)
        figures.add("fan-out", f"{count:,} subscribers", sent / clock.wall, "frames/s")
        figures.add("fan-out", f"{count:,} subscribers", each[-1], "us CPU each")
    figures.bound("CPU per frame, with more subscribers,", each[0], each[-1], 1.5)


MEASURES: Final[dict[str, Any]] = {
    "append": appends,
    "publish": latency,
    "replay": replay,
    "attach": attaches,
    "idle": idle,
    "fan-out": fan_out,
}


async def measure(
    stores: Sequence[str], names: Sequence[str], options: Options
) -> dict[str, Figures]:
    """Each store's figures."""
    found: dict[str, Figures] = {}
    for store in stores:
        figures = found[store] = Figures()
        for name in names:
            await MEASURES[name](store, options, figures)
    return found


def table(found: dict[str, Figures]) -> str:
    """One row a figure, one column a store."""
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    for store, figures in found.items():
        for name, case, value, unit in figures.rows:
            rows.setdefault((name, case, unit), {})[store] = value
    lines = [
        f"| | | | {' | '.join(found)} |",
        f"|---|---|---|{'--:|' * len(found)}",
    ]
    for (name, case, unit), values in rows.items():
        shown = [shown_as(values[store]) if store in values else "-" for store in found]
        lines.append(f"| {name} | {case} | {unit} | {' | '.join(shown)} |")
    return "\n".join(lines)


def shown_as(value: float) -> str:
    """Three figures or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-journal ARGS=…", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--store", nargs="+", choices=list(STORES), default=["sqlite", "memory"])
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of records")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args(arguments)
    whole = Options()
    options = Options(
        records=max(1_000, int(whole.records * given.scale)),
        sessions=max(10, int(whole.sessions * given.scale)),
        histories=tuple(max(20, int(length * given.scale)) for length in whole.histories),
        paced=(whole.paced[0], whole.paced[1] * min(1.0, given.scale)),
    )
    found = asyncio.run(measure(given.store, given.only, options))
    print(table(found))
    if given.json is not None:
        figures = {store: [list(row) for row in figures.rows] for store, figures in found.items()}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    wrong = [f"{store}: {what}" for store, figures in found.items() for what in figures.wrong]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
