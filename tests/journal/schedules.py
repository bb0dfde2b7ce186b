"""Anything in any order: appends, attaches, slow links, lost ones, restarts; and what must come of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from antiphon import ConnectionClosed
from antiphon.journal import (
    SESSION_UPDATE,
    Follower,
    JournalError,
    MemoryJournal,
    Rider,
    SessionLog,
    Subscriber,
    Writer,
)
from tests.journal.attachments import SESSION, Link, offset_of, update

if TYPE_CHECKING:
    from antiphon.journal._subscriber import Source

__all__ = ["Place", "Reader", "hold", "steps"]


class Place:
    """A session that is written, by one writer after the other, and read by whatever source."""

    def __init__(self, credit: int, *, follows: bool) -> None:
        self.journal = MemoryJournal()
        self.credit = credit
        self.follows = follows
        self.writer: Writer
        self.log: SessionLog
        self.follower = Follower(self.journal, SESSION, credit=credit)

    async def start(self) -> None:
        self.writer = Writer(await self.journal.open(SESSION), credit=self.credit)
        self.log = await self.journal.open(SESSION)
        await self.writer.ready()

    async def restart(self) -> None:
        await self.writer.aclose()
        await self.start()

    @property
    def source(self) -> Source:
        return self.follower if self.follows else self.writer

    async def aclose(self) -> None:
        await self.writer.aclose()
        await self.follower.aclose()


class Reader:
    """A client that attaches, is slow, lags, goes and comes again; it heals from what it holds."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.held: list[int] = []
        self.updates: list[Any] = []
        self.link = Link()
        self.subscriber: Subscriber | None = None
        self.attaching: asyncio.Task[int] | None = None

    def attach(self, room: int | None) -> None:
        if self.attaching is None:
            self.link = Link(room=room)
            start = self.held[-1] + 1 if self.held else 0
            place = self.place
            self.subscriber = self.link.subscriber(place.log, place.source, Rider(start))
            self.attaching = asyncio.create_task(self.subscriber.attach())

    def leave(self) -> None:
        if self.attaching is not None and self.subscriber is not None:
            self.attaching.cancel()
            self.subscriber.detach()
            self.take_over()

    def lose(self) -> None:
        if self.attaching is not None:
            self.link.lose()

    def take_over(self) -> None:
        """What the link was given is what the client holds."""
        self.check()
        if self.attaching is not None and self.attaching.done() and not self.attaching.cancelled():
            self.attaching.exception()
        self.held += self.link.offsets
        self.updates += [m for m in self.link.messages if offset_of(m) is not None]
        self.link = Link()
        self.attaching = self.subscriber = None

    def over(self) -> bool:
        if self.attaching is None or self.subscriber is None:
            return False
        return self.subscriber.over is not None and self.attaching.done()

    async def catch_up(self, last: int) -> None:
        """Attach, as often as it takes, until everything is held."""
        rounds = 0
        while not self.held or self.held[-1] < last:
            rounds += 1
            assert rounds < 500, f"{last} never comes; held: {self.held}"
            if self.attaching is None:
                self.attach(None)
                continue
            self.link.take()
            with suppress(ConnectionClosed, JournalError):
                await self.attaching
            if self.subscriber is not None:
                await self.subscriber.reached(last)
                self.subscriber.detach()
            self.take_over()

    def check(self) -> None:
        """One answer at most, history in front of it, the last word behind everything."""
        shown = self.link.shown
        said: dict[str, int] = {
            item[0]: index for index, item in enumerate(shown) if isinstance(item, tuple)
        }
        assert list(said)[:2] in (ALL_SAID[:count] for count in range(3))
        assert list(said)[2:] in ([], ["lagged"], ["closed"])
        if "reply" in said:
            at, mark = said["reply"], shown[said["reply"]][1]
            assert shown[at - 1] == ("caught_up", mark + 1)
            assert all(offset <= mark for offset in shown[: at - 1])
            assert all(offset > mark for offset in self.link.offsets[at - 1 :])
            if "lagged" in said:
                assert shown[-1] == ("lagged", max(mark, *self.link.offsets, 0))
            for last in ("lagged", "closed"):
                assert said.get(last, len(shown) - 1) == len(shown) - 1


ALL_SAID = ["caught_up", "reply"]


steps: st.SearchStrategy[list[tuple[str, Any]]] = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 12)),
        st.tuples(st.just("attach"), st.none() | st.integers(0, 6)),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("lose"), st.none()),
        st.tuples(st.just("take"), st.none() | st.integers(0, 9)),
        st.tuples(st.just("run"), st.integers(1, 4)),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=30,
)


async def step(reader: Reader, action: str, value: Any) -> None:
    place = reader.place
    match action:
        case "append":
            for number in range(value):
                place.writer.submit(update(f"{number}"))
        case "attach":
            reader.attach(value)
        case "leave":
            reader.leave()
        case "lose":
            reader.lose()
        case "take":
            reader.link.take(value)
        case "restart":
            await place.restart()
        case _:
            for _ in range(value):
                await asyncio.sleep(0)
    if reader.over():
        reader.take_over()


async def hold(
    schedules: list[list[tuple[str, Any]]], *, credit: int, before: int, follows: bool
) -> None:
    """Play the schedules side by side, and assert that everybody then holds the same records."""
    place = Place(credit, follows=follows)
    await place.start()
    for number in range(before):
        place.writer.submit(update(f"{number}"))
    readers = [Reader(place) for _ in schedules]
    for turn in range(max(map(len, schedules))):
        for reader, schedule in zip(readers, schedules, strict=True):
            action, value = schedule[turn] if turn < len(schedule) else ("run", 1)
            await step(reader, action, value)
    last = (await place.writer.append(update("the last"))).offset
    for reader in readers:
        await reader.catch_up(last)
        assert reader.held == list(range(1, last + 1))
        stored = [one.data for one in await place.log.read(1, last) if one.kind == SESSION_UPDATE]
        told = [m["params"]["update"] for m in reader.updates if m["method"] == "session/update"]
        assert told == stored
    await place.aclose()
