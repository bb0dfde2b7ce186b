"""The laws of a journal's store, each as a test: whoever writes a store runs them on it.

Responsible for what `antiphon.journal` promises of any store (resumable-sessions §13), and for what a
writer and a subscriber make of it (§7, §8). Leaves running them to any test runner: a law is a plain
function. It uses the public names of `antiphon.journal` alone, as a store's author would.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from antiphon.journal import (
    SESSION_CREATED,
    SESSION_UPDATE,
    TURN_COMPLETED,
    TURN_STARTED,
    Entry,
    Follower,
    Journal,
    JournalError,
    JournalInUse,
    Record,
    Rider,
    SessionLog,
    Subscriber,
    Writers,
)

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Sequence,
    )
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    _Made: TypeAlias = (
        Journal
        | Awaitable[Journal]
        | AbstractContextManager[Journal]
        | AbstractAsyncContextManager[Journal]
    )
    _Factory: TypeAlias = Callable[[], _Made] | Callable[[Path], _Made]

__all__ = ["JournalLaw", "journal_laws"]


class JournalLaw:
    """One law, over one kind of store. Calling it tests the store on a loop of its own.

    It raises an `AssertionError` that says what was promised and what was seen, or whatever the store
    raised. `await law.check()` does the same on the loop that runs.

    Attributes:
        __name__: the law, in words; test runners show it.
    """

    def __init__(
        self, check: Callable[[_Place], Awaitable[None]], factory: _Factory, bound: float
    ) -> None:
        self.__name__ = getattr(check, "__name__", "")
        self.__doc__ = check.__doc__
        self._check = check
        self._factory = factory
        self._bound = bound

    def __call__(self) -> None:
        """Test the store."""
        asyncio.run(self.check())

    def __repr__(self) -> str:
        return f"<law {self.__name__}>"

    async def check(self) -> None:
        """Test the store; cancelling it closes what was opened."""
        before = asyncio.all_tasks()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-law-"))
            async with contextlib.AsyncExitStack() as opened:
                place = _Place(self._factory, Path(folder) / "journal", opened)
                try:
                    async with asyncio.timeout(self._bound):
                        await self._check(place)
                except TimeoutError as error:
                    raise AssertionError(f"it is not done after {self._bound:g} s") from error
        for _ in range(5):
            await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - before if not task.done()}
        _expect(not left, f"a closed journal leaves no task: {left}")


def journal_laws(factory: _Factory, *, bound: float = 30.0) -> list[JournalLaw]:
    """The laws that a store has to keep, to be parametrised over in one line.

    ::

        @pytest.mark.parametrize("law", journal_laws(MyJournal))
        def test_my_journal_keeps(law):
            law()

    Any other runner calls each of them: `for law in journal_laws(MyJournal): law()`.

    Args:
        factory: makes a store. With a parameter it is given a path, which does not exist yet, in a
            folder of its own for each law: the same path again must open the same store, as another
            process would. Without a parameter each call makes an empty store, and the laws about
            several processes and restarts are left out. It returns a `Journal`, an awaitable of
            one, or a context manager, plain or async, that gives one. The journal is closed after
            the law, before the context manager is left.
        bound: how long one law may take, in seconds.

    Returns:
        One law after the other.
    """
    laws = [*_LAWS, *_LAWS_OF_PLACES] if _takes_path(factory) else _LAWS
    return [JournalLaw(check, factory, bound) for check in laws]


def _takes_path(factory: _Factory) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        for parameter in inspect.signature(factory).parameters.values()
    )


class _Place:
    """Where one law is tested: a store, opened as often as is wanted."""

    def __init__(self, factory: _Factory, path: Path, opened: contextlib.AsyncExitStack) -> None:
        self._factory = factory
        self._path = path
        self._opened = opened

    async def journal(self) -> Journal:
        """The store. Where it takes a path, each call opens it anew, as another process would."""
        make = cast("Callable[..., Any]", self._factory)
        made = make(self._path) if _takes_path(self._factory) else make()
        if inspect.isawaitable(made):
            made = await made
        if not isinstance(made, Journal):
            made = await self._entered(made)
        self._opened.push_async_callback(made.aclose)
        return made

    async def _entered(self, made: Any) -> Journal:
        given: Any = made
        if hasattr(made, "__aenter__"):
            given = await self._opened.enter_async_context(made)
        elif hasattr(made, "__enter__"):
            given = self._opened.enter_context(made)
        if not isinstance(given, Journal):
            msg = f"the factory gives no Journal: {given!r}"
            raise TypeError(msg)
        return given


# ------------------------------------------------------------------ the words of the laws


def _expect(condition: bool, text: str) -> None:  # noqa: FBT001  (an assert with a text)
    if not condition:
        raise AssertionError(text)


async def _refused(work: Awaitable[Any], what: str) -> JournalInUse:
    try:
        got = await work
    except JournalInUse as error:
        return error
    raise AssertionError(f"{what} raises JournalInUse, and gave {got!r}")


def _say(text: str, **more: Any) -> Entry:
    content = {"type": "text", "text": text, **more}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    return Entry(SESSION_UPDATE, json.dumps(update).encode(), "agent")


def _other(kind: str, payload: Any, taint: str = "system") -> Entry:
    return Entry(kind, json.dumps(payload).encode(), taint)


async def _claimed(journal: Journal, session_id: str = "s") -> SessionLog:
    log = await journal.open(session_id)
    await log.claim()
    return log


async def _all(log: SessionLog) -> list[Record]:
    return await log.read(1, await log.high_watermark())


def _check_run(records: Sequence[Record], start: int, what: str) -> None:
    offsets = [record.offset for record in records]
    wanted = list(range(start, start + len(records)))
    _expect(offsets == wanted, f"{what} have the offsets {wanted}, and have {offsets}")


def _check_same(got: Sequence[Record], wanted: Sequence[Record], what: str) -> None:
    _expect(
        len(got) == len(wanted), f"{what}: there are {len(wanted)} records, {len(got)} were seen"
    )
    for one, other in zip(got, wanted, strict=True):
        facts = [
            (record.offset, record.session_id, record.kind, record.taint, record.ts)
            for record in (one, other)
        ]
        _expect(facts[0] == facts[1], f"{what}: {facts[1]} is stored, {facts[0]} was seen")
        _expect(
            _value(one.payload) == _value(other.payload),
            f"{what}: {other.payload!r} is stored at {other.offset}, {one.payload!r} was seen",
        )


def _value(payload: bytes) -> str:
    """One text for each value: members have no order, and 1.0 is 1, but true is not."""
    return json.dumps(json.loads(payload, parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


class _Tail:
    """Hears a writer or a follower, and lets a test wait for so many records."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.end: str | None = None
        self._heard = asyncio.Event()

    def received(self, record: Record) -> None:
        self.records.append(record)
        self._heard.set()

    def lagged(self) -> None:
        self.ended("lagged")

    def ended(self, reason: str) -> None:
        self.end = reason
        self._heard.set()

    async def heard(self, count: int) -> list[Record]:
        while len(self.records) < count and self.end is None:
            self._heard.clear()
            await self._heard.wait()
        return self.records


# ------------------------------------------------------------------ offsets (1)


async def offsets_begin_at_1_and_have_no_gaps(place: _Place) -> None:
    """Of each session by itself, whatever is appended at once (1)."""
    journal = await place.journal()
    logs = [await _claimed(journal, name) for name in ("one", "two")]
    size = 0
    for count in (1, 3, 0, 1, 40):
        for log in logs:
            records = await log.append([_say(str(number)) for number in range(count)])
            _expect(len(records) == count, f"{count} entries give {count} records")
            _check_run(records, size + 1, "the records of an append")
            names = {record.session_id for record in records} - {log.session_id}
            _expect(not names, f"a record has its session's id, not one of {names}")
        size += count
    for log in logs:
        mark = await log.high_watermark()
        _expect(mark == size, f"the mark is {size} after so many records, and was {mark}")
        _check_run(await _all(log), 1, "all records")


async def an_offset_is_never_given_twice(place: _Place) -> None:
    """Also by a log that had the claim, lost sight of the session, and has it again (1)."""
    journal = await place.journal()
    first, second = await _claimed(journal), await journal.open("s")
    kept = await first.append([_say("a"), _say("b")])
    await first.release()
    await second.claim()
    kept += await second.append([_say("c")])
    await second.release()
    await first.claim()
    kept += await first.append([_say("d")])
    _check_run(kept, 1, "the records of logs that take turns")
    _check_same(await _all(second), kept, "what logs that take turns have appended")


async def concurrent_appends_are_whole_and_in_order(place: _Place) -> None:
    """Each append's records follow one another; appends stay in the order of their calls (1)."""
    journal = await place.journal()
    log = await _claimed(journal)
    sizes = [1, 5, 2, 1, 9, 1, 3] * 5
    runs = await asyncio.gather(
        *(
            log.append([_say(f"{number}.{part}") for part in range(size)], flush=number % 3 == 0)
            for number, size in enumerate(sizes)
        )
    )
    records = [record for run in runs for record in run]
    _check_run(records, 1, "the records of concurrent appends, in the order of the calls")
    texts = [record.data["content"]["text"] for record in await _all(log)]
    wanted = [f"{number}.{part}" for number, size in enumerate(sizes) for part in range(size)]
    _expect(texts == wanted, f"the texts are {wanted}, in this order, and were {texts}")


async def a_refused_append_leaves_nothing_behind(place: _Place) -> None:
    """No record, no gap, and the next append is none the worse for it (1, 7)."""
    journal = await place.journal()
    first, second = await _claimed(journal), await journal.open("s")
    kept = await first.append([_say("a")])
    await _refused(second.append([_say("no"), _say("no")]), "an append without the claim")
    mark = await first.high_watermark()
    _expect(mark == 1, f"a refused append adds nothing: the mark is 1, and was {mark}")
    kept += await first.append([_say("b")])
    await first.release()
    await _refused(first.append([_say("no")]), "an append after the release")
    await second.claim()
    kept += await second.append([_say("c")])
    _check_run(kept, 1, "the records around refused appends")
    _check_same(await _all(first), kept, "after refused appends")


async def a_cancelled_append_is_whole_or_not_there(place: _Place) -> None:
    """Whoever waited is gone; what was handed over may be appended, but not half of it (1)."""
    journal = await place.journal()
    log = await _claimed(journal)
    await log.append([_say("before")])
    for number in range(6):
        task = asyncio.ensure_future(log.append([_say(f"{number}.{part}") for part in range(3)]))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await log.append([_say("after")], flush=True)
    records = await _all(log)
    _check_run(records, 1, "the records around cancelled appends")
    texts = [record.data["content"]["text"] for record in records]
    _expect(texts[-1] == "after", f"the last append is the last record, and that was {texts[-1]!r}")
    inner = texts[1:-1]
    whole = [f"{text[0]}.{part}" for text in inner[::3] for part in range(3)]
    _expect(inner == whole, f"cancelled appends are whole or not there, and left {inner}")


# ------------------------------------------------------------------ the mark, and reading (2, 3, 4)


async def the_mark_is_asked_of_the_store(place: _Place) -> None:
    """Another log sees each append, also one that has asked before (2, 4)."""
    journal = await place.journal()
    writing = await _claimed(journal)
    reading = await journal.open("s")
    for size in range(5):
        for log in (reading, writing):
            mark = await log.high_watermark()
            _expect(mark == size, f"the mark is {size} after so many records, and was {mark}")
        kept = await writing.append([_say(str(size))])
        _check_same(await reading.read(size + 1, size + 1), kept, "right after an append")


async def reads_are_exact(place: _Place) -> None:
    """What lies between both ends, ends included, ascending; nothing for an inverted range (3)."""
    journal = await place.journal()
    log = await _claimed(journal)
    _expect(await log.read(1, 5) == [], "of nothing there is nothing to read")
    kept = await log.append([_say(str(number)) for number in range(4)])
    kept += await log.append([_say("4")])
    for start in range(-1, 8):
        for stop in range(-2, 8):
            wanted = [record for record in kept if start <= record.offset <= stop]
            _check_same(await log.read(start, stop), wanted, f"read({start}, {stop})")


async def long_histories_are_read_exactly(place: _Place) -> None:
    """Whatever a store does in pages, blocks or runs (3)."""
    journal = await place.journal()
    log = await _claimed(journal)
    kept: list[Record] = []
    for size in (1, 299, 256, 255, 1, 513):
        kept += await log.append([_say(f"{size}/{number}") for number in range(size)])
    total = len(kept)
    for start, stop in ((1, total), (2, 2), (256, 257), (255, 513), (total, total + 9), (300, 812)):
        got = await log.read(start, stop)
        _check_same(got, kept[start - 1 : stop], f"read({start}, {stop})")


async def what_is_read_is_what_was_appended(place: _Place) -> None:
    """Every JSON object comes back equal in value, and so do kind, taint and time (3)."""
    journal = await place.journal()
    log = await _claimed(journal)
    payloads: list[Any] = [
        {},
        {"": None},
        {"a": [1, -1, 0, 2**53 + 1, 1e-7, 1.5, True, False, None, [], {}]},
        {"text": '\u2028\u2029\x00\x1f"\\/\u00e9e\u0301 \U0001f600', "\u00fc": "\ufffd"},
        {"deep": json.loads("[" * 60 + "]" * 60)},
        {"long": "x" * 300_000},
    ]
    entries = [_other("a_kind_of_tomorrow", payload, "a taint of its own") for payload in payloads]
    entries += [
        Entry("plain", b' {\t"a" : 1.0 ,\n "b":"\\u0041" } ', "user"),
        Entry("\u00fcber", b"{}", ""),
        _say("hello"),
    ]
    before = time.time_ns() // 1_000_000
    kept = await log.append(entries)
    for entry, record in zip(entries, kept, strict=True):
        told = (record.kind, record.taint)
        _expect(told == (entry.kind, entry.taint), f"kind and taint are kept, and were {told}")
        _expect(
            _value(record.payload) == _value(entry.payload),
            f"a payload is kept: {entry.payload[:200]!r} became {record.payload[:200]!r}",
        )
        # A server's clock may be another; but it is a clock, in milliseconds.
        near = type(record.ts) is int and abs(record.ts - before) < 86_400_000
        _expect(near, f"the time of a record is in milliseconds since 1970, and was {record.ts!r}")
    _check_same(await (await journal.open("s")).read(1, len(kept)), kept, "read again")


async def what_is_kept_is_nobodys_to_change(place: _Place) -> None:
    """Lists that were given or returned belong to the caller; the store has its own (3, 5)."""
    journal = await place.journal()
    log = await _claimed(journal)
    entries = [_say("a"), _say("b")]
    returned = await log.append(entries)
    kept = list(returned)
    entries[:] = [_say("changed")]
    returned.clear()
    _check_same(await _all(log), kept, "after the caller used its lists again")
    (await _all(log)).clear()
    _check_same(await _all(log), kept, "after a reader used its list again")


async def the_newest_of_each_tag_is_found(place: _Place) -> None:
    """However far back it is, and whatever an update calls itself."""
    journal = await place.journal()
    log = await _claimed(journal)
    tags = (TURN_STARTED, TURN_COMPLETED, "plan", "agent_message_chunk", "nothing")
    _expect(await log.latest(tags) == {}, "of nothing there is no newest")
    await log.append([_other(TURN_STARTED, {"turnId": number}) for number in (1, 2)])
    await log.append([_other(SESSION_UPDATE, {"sessionUpdate": "plan"})])
    await log.append([_say(str(number)) for number in range(300)])
    forged = {"content": 1, "sessionUpdate": TURN_COMPLETED}
    await log.append([_other(SESSION_UPDATE, forged), _other("other", {})])
    found = await (await journal.open("s")).latest(tags)
    offsets = {tag: record.offset for tag, record in found.items()}
    wanted = {TURN_STARTED: 2, "plan": 3, "agent_message_chunk": 303}
    _expect(offsets == wanted, f"the newest of each tag are {wanted}, and were {offsets}")
    record = found[TURN_STARTED]
    _check_same([record], await log.read(2, 2), "the newest turn_started")


# ------------------------------------------------------------------ sessions (5)


async def sessions_are_told_as_they_are(place: _Place) -> None:
    """Who they are, since when, under which title; the one that changed last first."""
    journal = await place.journal()
    _expect(await journal.sessions() == [], "an empty journal has no sessions")
    _expect(await journal.info("old") is None, "nothing is known of an unknown session")
    old, new = await _claimed(journal, "old"), await _claimed(journal, "new")
    meta = {"cwd": "/x", "more": [1]}
    created = (await old.append([_other(SESSION_CREATED, meta)]))[0]
    await _later()
    titles: list[dict[str, Any]] = [
        {"sessionUpdate": "session_info_update", "title": "first"},
        {"sessionUpdate": "session_info_update", "title": "second"},
        {"sessionUpdate": "session_info_update", "updatedAt": "2026-01-01T00:00:00Z"},
    ]
    await new.append([_say("no genesis"), *(_other(SESSION_UPDATE, title) for title in titles)])
    names = [info.session_id for info in await journal.sessions()]
    _expect(names == ["new", "old"], f"what changed last comes first, and the order was {names}")
    await _later()
    last = (await old.append([_other(TURN_STARTED, {"turnId": 1}), _say("x")]))[-1]
    infos = await journal.sessions()
    names = [info.session_id for info in infos]
    _expect(names == ["old", "new"], f"what changed last comes first, and the order was {names}")
    told = infos[0]
    _expect(told.records == 3, f"it has 3 records, and was said to have {told.records}")
    times = (created.ts, last.ts)
    _expect((told.created, told.updated) == times, f"its times are {times}: {told}")
    _expect(told.meta == meta, f"its meta is its genesis, {meta}, and was {told.meta}")
    _expect(told.turn_open, "a turn that was started and not completed is open")
    _expect(told.title is None, f"nobody gave it a title, and it was {told.title!r}")
    _expect(infos[1].meta == {}, f"without genesis its meta is {{}}, and was {infos[1].meta}")
    _expect(not infos[1].turn_open, "where no turn was started none is open")
    _expect(
        infos[1].title == "second",
        f"a session_info_update without a title keeps it: 'second', not {infos[1].title!r}",
    )
    for info in infos:
        _expect(await journal.info(info.session_id) == info, "info tells what sessions tells")
    await old.append([_other(TURN_COMPLETED, {"turnId": 1})])
    gone = {"sessionUpdate": "session_info_update", "title": None}
    await new.append([_other(SESSION_UPDATE, gone)])
    closed, untitled = await journal.info("old"), await journal.info("new")
    _expect(closed is not None and not closed.turn_open, "a completed turn is not open")
    _expect(untitled is not None and untitled.title is None, "a title of null is none any more")


async def _later() -> None:
    """Until the next append has another time."""
    now = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 - now < 2:  # noqa: ASYNC110  (a clock has no event)
        await asyncio.sleep(0.001)


async def a_session_id_is_any_text(place: _Place) -> None:
    """Never a path, and never mistaken for another one that looks like it (§13.2, 7)."""
    journal = await place.journal()
    names = ["s", "S", "s ", " s", "s/t", "../s", "/s", "s\\t", ".", "con", "s.", "%73", "x" * 2000]
    names += [
        "e\u0301",
        "\u00e9",
        "\U0001f600",
        "s\nt",
        "s'",
        's"',
        "s%",
        "s_",
        "s*",
        "-s",
        "0",
        "00",
    ]
    for name in names:
        log = await _claimed(journal, name)
        await log.append([_other("name", {"name": name})])
        await log.aclose()
    for name in names:
        records = await _all(await journal.open(name))
        told = [(record.session_id, record.data.get("name")) for record in records]
        _expect(told == [(name, name)], f"session {name!r} has its record alone, and had {told}")
    listed = sorted(info.session_id for info in await journal.sessions())
    _expect(listed == sorted(names), f"the sessions are {sorted(names)}, and were {listed}")


async def only_whole_sessions_are_deleted(place: _Place) -> None:
    """One goes, with all its records; the others stay; its id begins anew (5)."""
    journal = await place.journal()
    for name in ("gone", "kept"):
        log = await _claimed(journal, name)
        await log.append([_say("a"), _say("b")])
        await log.aclose()
    _expect(await journal.delete("gone"), "deleting a session says that there was one")
    _expect(not await journal.delete("gone"), "deleting it again says that there was none")
    _expect(not await journal.delete("never"), "deleting what never was says so")
    log = await journal.open("gone")
    mark, records = await log.high_watermark(), await log.read(1, 9)
    _expect((mark, records) == (0, []), f"of a deleted session nothing is left: {mark}, {records}")
    _expect(await log.latest(["agent_message_chunk"]) == {}, "nor the newest of its records")
    names = [info.session_id for info in await journal.sessions()]
    _expect(names == ["kept"], f"the others stay: ['kept'], not {names}")
    _check_run(await _all(await journal.open("kept")), 1, "the records of the other")
    await log.claim()
    _check_run(await log.append([_say("anew")]), 1, "the records of an id that begins anew")


# ------------------------------------------------------------------ reading never writes (6)


async def reading_never_writes(place: _Place) -> None:
    """No genesis, no repair, no claim, no session that was only looked for (6)."""
    journal = await place.journal()
    _expect(await _look(journal, "never") == [], "a session that never was has no records")
    _expect(await journal.sessions() == [], "looking for a session does not make it")
    log = await _claimed(journal)
    kept = await log.append([_other(TURN_STARTED, {"turnId": 1}), _say("half a turn")])
    await log.aclose()
    for _ in range(2):
        _check_same(await _look(journal, "s"), kept, "an open turn is not repaired by a reader")
    await (await _claimed(journal)).aclose()
    _check_same(await _look(journal, "s"), kept, "nor by a claim")


async def _look(journal: Journal, name: str) -> list[Record]:
    """Everything that reads; then a claim must still be free."""
    log = await journal.open(name)
    await log.latest([TURN_STARTED, TURN_COMPLETED])
    await journal.sessions()
    await journal.info(name)
    mark = await log.high_watermark()
    async with _runs(journal, name, mark + 1) as runs:
        waiting = asyncio.ensure_future(anext(runs))
        await asyncio.sleep(0)
        records = await _all(log)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    claimed = await _claimed(journal, name)
    await claimed.release()
    return records


@contextlib.asynccontextmanager
async def _runs(
    journal: Journal, name: str, start: int
) -> AsyncGenerator[AsyncIterator[list[Record]]]:
    runs = journal.follow(name, start)
    try:
        yield runs
    finally:
        aclose = getattr(runs, "aclose", None)
        if aclose is not None:
            await aclose()


async def a_follower_gets_every_record_once(place: _Place) -> None:
    """History from where it begins, then what is appended, in order and without a gap."""
    journal = await place.journal()
    await _follow(journal, journal)


async def _follow(writing: Journal, reading: Journal) -> None:
    log = await _claimed(writing)
    kept = await log.append([_say(str(number)) for number in range(300)])
    async with _runs(reading, "s", 3) as runs:
        got: list[Record] = []
        for size in (300, 301, 304):
            kept += await log.append([_say("live") for _ in range(size - len(kept))], flush=True)
            while len(got) < size - 2:
                run = await anext(runs)
                _expect(bool(run), "a run that follow gives is not empty")
                got += run
        _check_same(got, kept[2:], "what follow gives from 3 on")


async def following_ends_with_the_session(place: _Place) -> None:
    """Who follows a session that is deleted is not left to wait."""
    journal = await place.journal()
    log = await _claimed(journal)
    await log.append([_say("a")])
    await log.aclose()
    async with _runs(journal, "s", 1) as runs:
        await anext(runs)
        waiting = asyncio.ensure_future(anext(runs, None))
        await asyncio.sleep(0)
        await journal.delete("s")
        got = await waiting
        _expect(got is None, f"following a deleted session ends, and gave {got}")


# ------------------------------------------------------------------ one appends (7)


async def one_log_at_a_time_has_the_claim(place: _Place) -> None:
    """The others are told who has it, and may read (7)."""
    journal = await place.journal()
    await _one_at_a_time(journal, journal)


async def _one_at_a_time(here: Journal, there: Journal) -> None:
    first, second = await here.open("s"), await there.open("s")
    await _refused(first.append([_say("no")]), "an append without a claim")
    await first.claim()
    await first.claim()
    kept = await first.append([_say("a")])
    for _ in range(2):
        error = await _refused(second.claim(), "a claim of what another log has")
        _expect(error.session_id == "s", f"the error names the session, not {error.session_id!r}")
        _expect(bool(error.owner), "the error names the owner")
    await _refused(second.append([_say("no")]), "an append of a log whose claim was refused")
    await second.release()
    _check_same(await _all(second), kept, "a log without the claim reads all the same")
    kept += await first.append([_say("b")])
    other = await there.open("another")
    await other.claim()
    await other.append([_say("x")])
    await first.release()
    await first.release()
    await second.claim()
    await _refused(first.append([_say("no")]), "an append after the claim went to another")
    await _refused(first.claim(), "a claim of what another log has")
    kept += await second.append([_say("c")])
    await second.aclose()
    await second.aclose()
    await first.claim()
    kept += await first.append([_say("d")])
    _check_run(kept, 1, "the records of those who had the claim")
    _check_same(await _all(first), kept, "what those who had the claim appended")


async def a_closed_journal_refuses(place: _Place) -> None:
    """With a `JournalError`, and nothing that was appended is lost with it."""
    journal = await place.journal()
    log = await _claimed(journal)
    await log.append([_say("a")])
    await journal.aclose()
    await journal.aclose()
    attempts: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("append", lambda: log.append([_say("no")])),
        ("open", lambda: journal.open("s")),
        ("sessions", journal.sessions),
        ("delete", lambda: journal.delete("s")),
    ]
    for name, attempt in attempts:
        try:
            await attempt()
        except JournalError:
            continue
        raise AssertionError(f"{name} of a closed journal raises JournalError")
    await log.aclose()


# ------------------------------------------------------------------ a writer on top (§8)


class _Ears(_Tail):
    """Checks that whatever is published was durable before (J3)."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def received(self, record: Record) -> None:
        _expect(
            record.offset in self.watch.durable,
            f"record {record.offset} was published before the store had it",
        )
        super().received(record)


class _Watch(SessionLog):
    """A log that knows what its store has confirmed."""

    def __init__(self, log: SessionLog) -> None:
        self.session_id = log.session_id
        self.log = log
        self.durable: set[int] = set()

    async def claim(self) -> None:
        await self.log.claim()

    async def release(self) -> None:
        await self.log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        records = await self.log.append(entries, flush=flush)
        self.durable.update(record.offset for record in records)
        return records

    def hurry(self) -> None:
        self.log.hurry()

    async def read(self, start: int, stop: int) -> list[Record]:
        return await self.log.read(start, stop)

    async def high_watermark(self) -> int:
        return await self.log.high_watermark()

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        return await self.log.latest(tags)

    async def aclose(self) -> None:
        await self.log.aclose()


class _Watched(Journal):
    """A journal whose logs are watched."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.last: _Watch | None = None

    async def open(self, session_id: str) -> SessionLog:
        self.last = _Watch(await self.journal.open(session_id))
        return self.last

    async def sessions(self) -> list[Any]:
        return await self.journal.sessions()

    async def delete(self, session_id: str) -> bool:
        return await self.journal.delete(session_id)

    async def aclose(self) -> None:
        """It is another's to close."""


async def what_a_writer_publishes_is_durable(place: _Place) -> None:
    """Genesis is history; every later record is told once, in order, when the store has it (§8.1)."""
    watched = _Watched(await place.journal())
    writers = Writers(watched)
    writer = await writers.ensure("s", place, {"cwd": "/x"})
    watch = watched.last
    if watch is None:
        raise AssertionError("the writer opens a log")
    ears = _Ears(watch)
    await writer.subscribe(ears)
    told: list[int] = []

    def published(record: Record | None) -> None:
        told.append(0 if record is None else record.offset)

    turn = await writer.begin_turn(place, [_say("prompt")])
    for number in range(50):
        writer.submit(_say(str(number)), published, flush=number % 7 == 0)
        if number % 5 == 0:
            await asyncio.sleep(0)
    writer.complete_turn(place, turn, stop_reason="end_turn", published=published)
    records = list(await ears.heard(53))
    await writers.aclose()
    _expect(ears.end == "closed", f"a closed writer ends its tails with 'closed', not {ears.end!r}")
    _expect(told == list(range(4, 55)), f"who submitted is told in order, and was told {told}")
    kept = await _all(await watched.journal.open("s"))
    _check_run(kept, 1, "a writer's records")
    kinds = [kept[0].kind, kept[1].kind, kept[-1].kind]
    wanted = [SESSION_CREATED, TURN_STARTED, TURN_COMPLETED]
    _expect(kinds == wanted, f"first, second and last are {wanted}, and were {kinds}")
    _expect(kept[0].data == {"cwd": "/x"}, f"genesis has the meta, and had {kept[0].data}")
    _check_same(records, kept[1:], "what was published, against what is stored")


async def a_turn_left_open_is_completed_once(place: _Place) -> None:
    """However often a writer begins over it, and wherever in the turn its death was (§8.2, J12)."""
    journal = await place.journal()
    log = await _claimed(journal)
    await log.append([_other(SESSION_CREATED, {}), _other(TURN_STARTED, {"turnId": 7}, "user")])
    await log.append([_say("in the middle")])
    await log.aclose()
    for _ in range(3):
        writers = Writers(journal)
        writer = await writers.ensure("s", place)
        tail = _Tail()
        await writer.subscribe(tail)
        await writers.aclose()
        _expect(tail.records == [], "a repair is history, not live")
    kept = await _all(await journal.open("s"))
    kinds = [record.kind for record in kept]
    wanted = [SESSION_CREATED, TURN_STARTED, SESSION_UPDATE, TURN_COMPLETED]
    _expect(kinds == wanted, f"an open turn gets one completion: {wanted}, not {kinds}")
    orphan = {"turnId": 7, "outcome": "orphaned", "stopReason": "cancelled"}
    _expect(kept[-1].data == orphan, f"it is {orphan}, and was {kept[-1].data}")
    writers = Writers(journal)
    number = await (await writers.ensure("s", place)).begin_turn(place)
    await writers.aclose()
    _expect(number == 8, f"the next turn has the next number, 8, not {number}")


async def history_and_live_are_the_journal(place: _Place) -> None:
    """Whoever attaches while a session grows sees each record once, in order (§7.4)."""
    journal = await place.journal()
    writers = Writers(journal)
    writer = await writers.ensure("s", place)
    seen: list[tuple[Subscriber, list[bytes]]] = []
    for number in range(60):
        if number % 8:
            writer.submit(_say(str(number)))
        else:
            await writer.append(_say("and nothing waits"))
        if number % 4 == 0:
            frames: list[bytes] = []
            subscriber = Subscriber(
                writer.log,
                writer,
                Rider(from_offset=number // 2),
                aware=True,
                send=frames.append,
                writable=lambda: True,
                drain=_nothing,
                reply=lambda _: None,
            )
            seen.append((subscriber, frames))
            attaching = asyncio.ensure_future(subscriber.attach())
            writer.submit(_say("meanwhile"))
            await asyncio.sleep(0)
            writer.submit(_say("meanwhile"))
            await attaching
    await writer.append(_say("last"))
    kept = await _all(writer.log)
    for subscriber, frames in seen:
        offsets = [offset for frame in frames if (offset := _offset_of(frame)) is not None]
        start = max(subscriber.rider.from_offset, 1)
        wanted = list(range(start, len(kept) + 1))
        _expect(offsets == wanted, f"from {start} each comes once, in order: {offsets}")
        subscriber.detach()
    await writers.aclose()


async def _nothing() -> None:
    """The link is never full."""


def _offset_of(frame: bytes) -> int | None:
    message = json.loads(frame)
    params = message["params"]
    if message["method"] == "session/update":
        return cast("int", params["_meta"]["raxol.io"]["offset"])
    return cast("int", params["offset"]) if message["method"] == "_raxol/session.record" else None


# ------------------------------------------------------------------ several processes


async def what_was_appended_is_there_after_a_restart(place: _Place) -> None:
    """All of it, as it was, for the next to go on with (4, 5)."""
    journal = await place.journal()
    log = await _claimed(journal)
    kept = await log.append([_other(SESSION_CREATED, {"cwd": "/x"}), _say("\u00e9\u2028")])
    kept += await log.append([_say("c")], flush=True)
    before = await journal.info("s")
    await journal.aclose()
    for text in ("d", "e"):
        journal = await place.journal()
        info = await journal.info("s")
        _expect(info == before, f"a session is known again: {before}, not {info}")
        log = await _claimed(journal)
        _check_same(await _all(log), kept, "after a restart")
        kept += await log.append([_say(text)])
        _check_run(kept, 1, "the records before and after a restart")
        before = await journal.info("s")
        await journal.aclose()


async def another_process_sees_what_append_returned(place: _Place) -> None:
    """At once: mark, records, sessions, newest of a tag (2, 4)."""
    writing, reading = await place.journal(), await place.journal()
    log, other = await _claimed(writing), await reading.open("s")
    _expect(await other.high_watermark() == 0, "an empty session has the mark 0")
    for size in range(1, 6):
        kept = await log.append([_say(str(size))], flush=size % 2 == 0)
        mark = await other.high_watermark()
        _expect(mark == size, f"the mark is {size} after so many records, and was {mark}")
        _check_same(await other.read(size, size), kept, "read by another process")
        _check_same(list((await other.latest([kept[0].tag])).values()), kept, "the newest")
        info = await reading.info("s")
        _expect(info is not None and info.records == size, f"{size} records are told: {info}")


async def one_process_at_a_time_has_the_claim(place: _Place) -> None:
    """The others are told who has it, and may read (7)."""
    await _one_at_a_time(await place.journal(), await place.journal())


async def closing_a_journal_gives_up_its_claims(place: _Place) -> None:
    """Also of logs that were not closed (7)."""
    journal = await place.journal()
    log = await _claimed(journal)
    await log.append([_say("a")])
    await journal.aclose()
    after = await _claimed(await place.journal())
    _check_run(await after.append([_say("b")]), 2, "the records after another process closed")


async def what_another_process_appends_is_heard(place: _Place) -> None:
    """By `follow`, and by the tails of a `Follower` (CDI-4)."""
    writing, reading = await place.journal(), await place.journal()
    await _follow(writing, reading)
    log = await _claimed(writing, "t")
    await log.append([_say("history")])
    follower, tail = Follower(reading, "t"), _Tail()
    await follower.subscribe(tail)
    kept = await log.append([_say("a"), _say("b")], flush=True)
    kept += await log.append([_say("c")], flush=True)
    got = [record for record in await tail.heard(3) if record.offset > 1]
    await follower.aclose()
    _check_same(got, kept, "what a follower tells its tails")


_LAWS: list[Callable[[_Place], Awaitable[None]]] = [
    offsets_begin_at_1_and_have_no_gaps,
    an_offset_is_never_given_twice,
    concurrent_appends_are_whole_and_in_order,
    a_refused_append_leaves_nothing_behind,
    a_cancelled_append_is_whole_or_not_there,
    the_mark_is_asked_of_the_store,
    reads_are_exact,
    long_histories_are_read_exactly,
    what_is_read_is_what_was_appended,
    what_is_kept_is_nobodys_to_change,
    the_newest_of_each_tag_is_found,
    sessions_are_told_as_they_are,
    a_session_id_is_any_text,
    only_whole_sessions_are_deleted,
    reading_never_writes,
    a_follower_gets_every_record_once,
    following_ends_with_the_session,
    one_log_at_a_time_has_the_claim,
    a_closed_journal_refuses,
    what_a_writer_publishes_is_durable,
    a_turn_left_open_is_completed_once,
    history_and_live_are_the_journal,
]
_LAWS_OF_PLACES: list[Callable[[_Place], Awaitable[None]]] = [
    what_was_appended_is_there_after_a_restart,
    another_process_sees_what_append_returned,
    one_process_at_a_time_has_the_claim,
    closing_a_journal_gives_up_its_claims,
    what_another_process_appends_is_heard,
]
