"""Processes that write a journal are killed at any moment: what anybody saw is in the file.

`ANTIPHON_CRASHES` says how many are killed: by default 50 in CI, 12 elsewhere; `make crash` kills 500.
Wrong ways of writing are attacked in the same way, and found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import pytest
from tests.attacks.journal_book import Book, all_of, place_of

from antiphon.journal import Entry, Record, SqliteJournal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

KILLS: Final = int(os.environ.get("ANTIPHON_CRASHES") or (50 if os.environ.get("CI") else 12))
#: Two at a time: one is killed while the other is writing to the same files.
LANES: Final = 2
#: How long one may take for anything, on a machine that does much else besides.
PATIENCE: Final = 60.0
#: In which a wrong way must be found.
CONTROL_KILLS: Final = 30


class Child:
    """One process that writes; it begins with `go`, and is gone at the end of the block."""

    def __init__(
        self, folder: Path, journal: Path, name: str, variant: str, sessions: list[str]
    ) -> None:
        script = str(Path(__file__).with_name("journal_child.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, str(journal), name, variant, *sessions],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.said()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill_after(self, seconds: float, *, reap: bool) -> None:
        """Kill it then; it must not have ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            pytest.fail(f"a writer ended by itself: {self.said()}")
        self.process.kill()
        if reap:
            self.process.wait(PATIENCE)

    def end_well(self) -> None:
        said, complaint = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, said + complaint

    def said(self) -> str:
        """What it wrote to its standard error; it is killed for that."""
        self.process.kill()
        return self.process.communicate()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def subscriber(folder: Path) -> Generator[subprocess.Popen[str]]:
    """The process that sees what is published; it outlives the writers."""
    script = str(Path(__file__).with_name("journal_subscriber.py"))
    with subprocess.Popen(
        [sys.executable, "-S", script, "seen"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


class Lane:
    """One writer after the other on the same sessions, each killed but the last.

    It ends with the first thing that is wrong and says what is `wanted`.
    """

    def __init__(
        self, folder: Path, journal: Path, number: int, variant: str = "right", wanted: str = ""
    ) -> None:
        folder.mkdir()
        self.seen = self.killed_busy = self.killed = 0
        self._folder = folder
        self._journal = journal
        self._variant = variant
        self._wanted = wanted
        self._names = [f"lane-{number}/{name}" for name in ("a", "b", "c")]
        self.books = {name: Book(name) for name in self._names}
        self._random = random.Random()
        self._seen_bytes = 0
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def wrong(self) -> list[str]:
        return [what for book in self.books.values() for what in book.wrong]

    def run(self, kills: int, given_up: threading.Event) -> None:
        """Kill so many, looking at the file after each; then let one end well."""
        try:
            with subscriber(self._folder) as watching:
                assert watching.stdout is not None
                self._processes.append(watching)
                self._run(kills, watching.stdout, given_up)
        finally:
            if sys.exc_info()[0] is not None:
                given_up.set()

    def _run(self, kills: int, said: Iterator[str], given_up: threading.Event) -> None:
        with contextlib.ExitStack() as last:
            following = last.enter_context(self._child(0))
            for number in range(kills):
                following.ready()
                with last.pop_all():
                    # The next one starts meanwhile, is the next to connect, and waits for its turn.
                    child, following = following, last.enter_context(self._child(number + 1))
                    self._kill(child, said)
                asyncio.run(self._look())
                if given_up.is_set() or any(self._wanted in what for what in self.wrong):
                    given_up.set()
                    return
            following.ready()
            self._end(following, said)
        asyncio.run(self._look(whole=True))

    def _child(self, number: int) -> Child:
        child = Child(self._folder, self._journal, str(number), self._variant, self._names)
        self._processes.append(child.process)
        return child

    def kill_all(self) -> None:
        """End whatever a thread of it waits for."""
        for process in self._processes:
            process.kill()

    def _kill(self, child: Child, said: Iterator[str]) -> None:
        # One in four before anybody has seen anything of it: while it claims and repairs.
        child.go()
        early = self._random.random() < 0.25
        if not early:
            assert next(said) == "began\n", child.said()
        child.kill_after(self._random.uniform(0, 0.06), reap=self._random.random() < 0.5)
        count = next(said)
        if count == "began\n":
            count = next(said)
        self.killed += 1
        self.killed_busy += int(count) > 0
        child.process.wait(PATIENCE)

    def _end(self, child: Child, said: Iterator[str]) -> None:
        child.go()
        assert next(said) == "began\n", child.said()
        child.end_well()
        assert int(next(said)) > 0

    async def _look(self, *, whole: bool = False) -> None:
        """Compare what the file holds with what it held, and with what was seen."""
        journal = SqliteJournal(self._journal, read_only=True)
        for name, book in self.books.items():
            log = await journal.open(name)
            book.take(await all_of(log, len(book) + 1))
            if whole:
                book.again(await all_of(log))
            await log.aclose()
        await journal.aclose()
        with (self._folder / "seen").open("rb") as file:
            file.seek(self._seen_bytes)
            for frame in file.read().splitlines():
                name, offset = place_of(frame)
                self.books[name].see(offset, frame)
                self.seen += 1
            self._seen_bytes = file.tell()


def attack(folder: Path, kills: int, variant: str = "right", wanted: str = "") -> list[Lane]:
    """All lanes at once."""
    journal = folder / "journal"
    given_up = threading.Event()
    lanes = [Lane(folder / f"{n}", journal, n, variant, wanted) for n in range(LANES)]
    with ThreadPoolExecutor(LANES) as pool:
        running = [pool.submit(lane.run, kills // LANES, given_up) for lane in lanes]
        try:
            for one in running:
                one.result()
        except BaseException:
            # What a thread waits for comes from a process, or never.
            given_up.set()
            for lane in lanes:
                lane.kill_all()
            raise
    return lanes


@pytest.mark.covers("FF-49")
@pytest.mark.bound(60 + KILLS * 2)
def test_what_was_seen_of_a_writer_that_is_killed_is_in_the_file(tmp_path: Path) -> None:
    lanes = attack(tmp_path, KILLS)

    wrong = [what for lane in lanes for what in lane.wrong]
    assert not wrong
    books = [book for lane in lanes for book in lane.books.values()]
    # Whoever ended well left no turn open, and the repairs of the others are all there.
    assert not any(book.turn_open for book in books)
    assert sum(lane.killed for lane in lanes) == KILLS // LANES * LANES
    assert sum(lane.killed_busy for lane in lanes) >= KILLS // 3
    assert sum(book.orphans for book in books) > 0
    assert sum(lane.seen for lane in lanes) > KILLS
    print(
        f"{KILLS} killed: {sum(map(len, books))} records, {sum(lane.seen for lane in lanes)} seen, "
        f"{sum(book.orphans for book in books)} orphans"
    )


@pytest.mark.bound(60 + CONTROL_KILLS * 2)
@pytest.mark.parametrize(
    ("control", "finding"),
    [
        ("eager", "was shown and is not in the file"),
        ("hasty", "was shown and is not in the file"),
        ("forgetful", "starts a turn in an open one"),
    ],
)
def test_a_wrong_way_of_writing_is_found(tmp_path: Path, control: str, finding: str) -> None:
    lanes = attack(tmp_path, CONTROL_KILLS, control, finding)

    wrong = [what for lane in lanes for what in lane.wrong]
    assert any(finding in what for what in wrong), wrong[:20]


UPDATE = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"x"}}'


def records(*kinds: str) -> list[Record]:
    """A journal in short: `+` starts a turn, `-` completes it, `o` as an orphan, `u` is an update."""
    written: list[Record] = []
    turn = 0
    for offset, kind in enumerate(("session_created", *kinds), start=1):
        turn += kind == "+"
        payload = b'{"turnId":%d}' % turn
        entry = {
            "+": Entry("turn_started", payload, "user"),
            "-": Entry("turn_completed", payload, "system"),
            "o": Entry("turn_completed", payload[:-1] + b',"outcome":"orphaned"}', "system"),
            "u": Entry("session_update", UPDATE, "agent"),
        }.get(kind, Entry(kind, b"{}", "system"))
        written.append(Record(offset, "s", entry.kind, entry.payload, entry.taint, 0))
    return written


@pytest.mark.parametrize(
    ("held", "finding"),
    [
        (records("+", "u", "-", "+", "o"), None),
        (records("+", "u", "o", "o"), "completes no turn (orphan: True)"),
        (records("+", "u", "+", "o"), "starts a turn in an open one"),
        (records("+", "u", "o", "u"), "is outside of a turn"),
        (records("+", "-")[:2] + records("+", "-")[1:], "record 2 stands where 3 was to"),
        (records("+", "u", "-")[:2] + records("+", "u", "-")[3:], "stands where 3 was to"),
        (records("+", "-")[:-1] + records("+", "-", "+", "-")[-1:], "completes turn 2"),
        (records("+", "-") + records("+", "-", "+", "-", "+")[5:], "turn 3 comes after 1"),
        (records("+", "-")[1:], "record 2 stands where 1 was to"),
        (records("session_created"), "record 2 is a session_created"),
    ],
)
def test_a_book_finds_what_must_not_be(held: list[Record], finding: str | None) -> None:
    book = Book("s")

    book.take(held)

    assert bool(book.wrong) == (finding is not None)
    assert finding is None or any(finding in what for what in book.wrong), book.wrong
