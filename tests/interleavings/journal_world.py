"""Sessions of a journal: appends, turns, attaches, lag, deaths and restarts in any order.

The model is what the store has confirmed, record by record (`Book`). Against it are held: the store's
contents, what everybody was told of their entries, every frame of every attach, and the pairs of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Literal

from antiphon import ConnectionClosed, InvalidParams, ResourceNotFound
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
    MemoryJournal,
    Record,
    Rider,
    SessionLog,
    Subscriber,
    TurnHeld,
    Writer,
    Writers,
)
from tests.interleavings.world import World
from tests.journal.ears import LogOver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from antiphon.journal import SessionInfo

__all__ = ["JournalWorld"]

SESSIONS: tuple[str, ...] = ("one", "two")
CLIENTS = 4
CREDIT = 4
HISTORIES: tuple[Literal["from_offset", "tip", "none"], ...] = (
    *("from_offset", "from_offset"),
    *("tip", "none"),
)


class Book:
    """The model: what is durable, by session and life (a deletion ends one), and what is to go wrong."""

    def __init__(self, world: JournalWorld) -> None:
        self.world = world
        self.lives = dict.fromkeys(SESSIONS, 0)
        self.records: dict[tuple[str, int], dict[int, Record]] = {}
        #: How many of the next appends of a session fail, and how many turns of the loop they take.
        self.failing = dict.fromkeys(SESSIONS, 0)
        self.slow = dict.fromkeys(SESSIONS, 0)

    def of(self, session_id: str) -> dict[int, Record]:
        return self.records.setdefault((session_id, self.lives[session_id]), {})

    def confirmed(self, records: Sequence[Record]) -> None:
        for record in records:
            kept = self.of(record.session_id)
            if record.offset != len(kept) + 1:
                self.world.violated(f"record {record.offset} follows {len(kept)}")
            kept[record.offset] = record

    def knows(self, record: Record, life: int) -> bool:
        """Whether it is durable, in this life or a later one."""
        name = record.session_id
        return any(
            self.records.get((name, later), {}).get(record.offset) == record
            for later in range(life, self.lives[name] + 1)
        )


class BookedLog(LogOver):
    """A log that keeps the book, is slow and fails as it is told, and dies with its process."""

    def __init__(self, log: SessionLog, book: Book) -> None:
        super().__init__(log)
        self.book = book
        self.dead = False

    def check(self) -> None:
        if self.dead:
            raise JournalError("this process is dead")

    async def claim(self) -> None:
        self.check()
        await self.log.claim()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        name, book = self.session_id, self.book
        for _ in range(book.slow[name]):
            await asyncio.sleep(0)
        self.check()
        if book.failing[name]:
            book.failing[name] -= 1
            raise JournalError("no space")
        records = await self.log.append(entries, flush=flush)
        book.confirmed(records)
        for _ in range(book.slow[name] // 2):
            await asyncio.sleep(0)
        self.check()
        return records

    async def read(self, start: int, stop: int) -> list[Record]:
        self.check()
        return await self.log.read(start, stop)

    async def high_watermark(self) -> int:
        self.check()
        return await self.log.high_watermark()

    async def latest(self, tags: Collection[str]) -> dict[str, Record]:
        self.check()
        return await self.log.latest(tags)

    async def aclose(self) -> None:
        await self.log.aclose()


class BookedJournal(Journal):
    """One process's view of the store."""

    def __init__(self, journal: Journal, book: Book) -> None:
        self.journal = journal
        self.book = book
        self.logs: list[BookedLog] = []

    async def open(self, session_id: str) -> SessionLog:
        log = BookedLog(await self.journal.open(session_id), self.book)
        self.logs.append(log)
        return log

    async def sessions(self) -> list[SessionInfo]:
        return await self.journal.sessions()

    async def delete(self, session_id: str) -> bool:
        found = await self.journal.delete(session_id)
        if found != bool(self.book.of(session_id)):
            self.book.world.violated(f"deleting {session_id!r} says {found}")
        self.book.lives[session_id] += 1
        return found

    async def aclose(self) -> None:
        """The store outlives its processes."""

    def follow(self, session_id: str, start: int = 1) -> AsyncIterator[list[Record]]:
        return self.journal.follow(session_id, start)

    async def die(self) -> None:
        """As a kill does: from now on nothing works here, and claims are free."""
        for log in self.logs:
            log.dead = True
        for log in self.logs:
            await log.release()


class Sent:
    """An entry that somebody submitted, and what they were told of it."""

    def __init__(self, world: JournalWorld, writer: Writer, number: int) -> None:
        self.world = world
        self.writer = writer
        self.number = number
        self.life = world.book.lives[writer.session_id]
        self.told = False
        #: Whether the process was killed meanwhile.
        self.dead = False

    def __call__(self, record: Record | None) -> None:
        world, writer = self.world, self.writer
        if self.told:
            world.violated(f"somebody was told twice of entry {self.number}")
        self.told = True
        queue = world.sent[writer]
        if queue.pop(0) is not self:
            world.violated(f"somebody was told of entry {self.number} before an earlier one")
        if self.dead:
            return  # nobody is left to be told
        if record is None:
            if writer.failed is None and not writer.closing:
                world.violated(f"a living writer gave up entry {self.number}")
            world.lost.add(self.number)
        elif record.data.get("n") != self.number or not world.book.knows(record, self.life):
            world.violated(f"entry {self.number} was said to be {record}")


class Turn:
    """A turn that somebody holds."""

    def __init__(self, writer: Writer, number: int) -> None:
        self.writer = writer
        self.number = number


class Attach(Subscriber):
    """One attach, and all that came of it; its frames are looked at as they come."""

    def __init__(
        self, client: Client, log: SessionLog, source: Writer | Follower | None, rider: Rider
    ) -> None:
        world = client.world
        self.client = client
        self.world = world
        self.name = log.session_id
        self.life = world.book.lives[self.name]
        self.source = source
        #: How many records it was given and has not paid for.
        self.owed = 0
        self.mark: int | None = None
        self.caught_up: int | None = None
        self.offsets: list[int] = []
        self.last: str | None = None
        self.link = client.link
        super().__init__(
            log,
            None if source is None else Counted(source, self),
            rider,
            aware=client.aware,
            send=self.take,
            writable=self.link.writable,
            drain=self.link.drain,
            reply=self.answered,
        )

    def received(self, record: Record) -> None:
        self.owed += 1
        if self.owed > CREDIT:
            self.world.violated(f"a tail got a record that it had no credit for: {record.offset}")
        if not self.world.book.knows(record, self.life):
            self.world.violated(f"record {record.offset} was published before it was durable")
        super().received(record)

    def lagged(self) -> None:
        if len(self._inbox) < CREDIT:
            self.world.violated(f"a tail with credit left lags: {len(self._inbox)} wait")
        super().lagged()

    def answered(self, mark: int) -> None:
        if self.mark is not None:
            self.world.violated("a load was answered twice")
        self.mark = mark

    def take(self, frame: bytes) -> None:
        self.link.spend()
        message = json.loads(frame)
        params = message["params"]
        if self.last is not None:
            self.world.violated(f"after {self.last} came {message}")
        if message["method"] == "session/update":
            rider = params["_meta"]["raxol.io"]
            self.see(rider, SESSION_UPDATE, params["update"])
        elif message["method"] == "_raxol/session.record":
            self.see(params, params["kind"], params["payload"])
        elif message["method"] == "_raxol/session.caught_up":
            if self.mark is not None or self.caught_up is not None or not self.client.aware:
                self.world.violated("caught_up is out of its place")
            self.caught_up = params["offset"]
        else:
            self.last = message["method"].removeprefix("_raxol/session.")
            forwarded = max([self.mark or 0, *self.offsets])
            if self.last == "lagged" and self.client.aware and params["lastOffset"] != forwarded:
                self.world.violated(f"lastOffset is {params['lastOffset']}, not {forwarded}")

    def see(self, rider: dict[str, Any], kind: str, payload: Any) -> None:
        offset = rider["offset"]
        if self.offsets:
            wanted = self.offsets[-1] + 1
        elif self.mark is not None:
            wanted = self.mark + 1
        else:
            wanted = max(self.rider.from_offset, 1)
        right = offset == wanted if self.client.aware else offset >= wanted
        if not right or (self.mark is not None and offset <= self.mark):
            self.world.violated(f"offset {offset} came after {self.offsets}, mark {self.mark}")
        self.offsets.append(offset)
        made = Record(
            *(offset, self.name, kind, json.dumps(payload, separators=(",", ":")).encode()),
            *(rider["taint"], rider["ts"]),
        )
        if not self.world.book.knows(made, self.life):
            self.world.violated(f"a frame shows what is not durable: {made}")


class Counted:
    """A source that counts what is given back."""

    def __init__(self, source: Writer | Follower, attach: Attach) -> None:
        self.source = source
        self.attach = attach

    async def subscribe(self, tail: Any, /) -> None:
        await self.source.subscribe(tail)

    def unsubscribe(self, tail: Any, /) -> None:
        self.source.unsubscribe(tail)

    def credit(self, tail: Any, /) -> None:
        self.attach.owed -= 1
        self.source.credit(tail)


class Link:
    """One connection of a client, which may be slow and may go."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.lost = False
        self.changed = asyncio.Event()

    def spend(self) -> None:
        if self.lost:
            raise ConnectionClosed("the client has gone")
        if self.room is not None:
            self.room -= 1

    def writable(self) -> bool:
        return not self.lost and (self.room is None or self.room > 0)

    async def drain(self) -> None:
        while not self.writable():
            if self.lost:
                raise ConnectionClosed("the client has gone")
            self.changed.clear()
            await self.changed.wait()

    def change(self, *, room: int | None = None, lost: bool = False) -> None:
        self.room, self.lost = room, lost
        self.changed.set()


class Client:
    """Somebody who attaches, is lost, and attaches again after what they hold."""

    def __init__(self, world: JournalWorld, number: int) -> None:
        self.world = world
        self.name = SESSIONS[number % len(SESSIONS)]
        self.aware = number < CLIENTS - 1
        self.link = Link()
        self.attach: Attach | None = None
        self.attaching: asyncio.Task[None] | None = None

    @property
    def holds(self) -> int:
        """The last offset that is held, of the session as it is now."""
        attach = self.attach
        if attach is None or attach.life != self.world.book.lives[self.name]:
            return 0
        return max([attach.forwarded, *attach.offsets])

    def leave(self) -> None:
        if self.attaching is not None:
            self.attaching.cancel()
            self.attaching = None
        if self.attach is not None:
            self.attach.detach()


class JournalWorld(World):
    """A store, one process with its writers at a time, and now and then another process."""

    weights = {  # noqa: RUF012  (a table)
        "say": 30,
        "attach": 12,
        "begin": 8,
        "complete": 8,
        "turn": 20,
        "open": 8,
        "leave": 3,
        "detach": 3,
        "room": 8,
        "lose": 3,
        "slow": 4,
        "fail": 3,
        "holder_dies": 3,
        "stranger_completes": 2,
        "other_process": 2,
        "restart": 2,
        "close": 1,
        "delete": 2,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self.book = Book(self)
        self.count = 0
        self.sent: dict[Writer, list[Sent]] = {}
        #: Entries that somebody was told are not in the journal.
        self.lost: set[int] = set()
        self.turns_held: dict[str, Turn] = {}
        self.clients = [Client(self, number) for number in range(CLIENTS)]

    async def make_store(self) -> Journal:
        return MemoryJournal()

    async def begin(self) -> None:
        self.store = await self.make_store()
        self.boot()

    def boot(self) -> None:
        self.process = BookedJournal(self.store, self.book)
        self.writers = Writers(self.process, credit=CREDIT)
        self.turns_held.clear()

    # ------------------------------------------------------------------ steps

    async def do_open(self, a: int, b: int) -> None:
        self.start(self.ensure(SESSIONS[a % 2], b % 2))

    async def ensure(self, name: str, user: object) -> Writer | None:
        writers = self.writers
        try:
            return await writers.ensure(name, user, {"cwd": "/"})
        except JournalError:
            return None  # another process has it, or this one died

    async def do_leave(self, a: int, b: int) -> None:
        self.writers.leave(SESSIONS[a % 2], b % 2)

    async def do_say(self, a: int, b: int) -> None:
        name = SESSIONS[a % 2]
        writer = self.writers.get(name)
        if writer is None:
            await self.do_open(a, b)
            return
        for _ in range(1 + (b % 5 == 0) * b % 7):
            self.submit(writer, flush=b % 3 == 0)

    def submit(self, writer: Writer, *, flush: bool = False) -> None:
        self.count += 1
        sent = Sent(self, writer, self.count)
        self.sent.setdefault(writer, []).append(sent)
        payload = b'{"sessionUpdate":"agent_message_chunk","n":%d}' % self.count
        writer.submit(Entry(SESSION_UPDATE, payload, "agent"), sent, flush=flush)
        if sent.told:
            self.violated("somebody was told inside submit")

    async def do_begin(self, a: int, b: int) -> None:
        writer = self.writers.get(SESSIONS[a % 2])
        if writer is not None:
            self.start(self.begin_turn(writer, self.writers))

    async def begin_turn(self, writer: Writer, writers: Writers) -> None:
        turn = Turn(writer, 0)
        try:
            turn.number = await writer.begin_turn(turn)
        except TurnHeld:
            if writer.turn_holder is None:
                self.violated("a free turn was refused")
            return
        except JournalError:
            return
        if writers is self.writers:
            self.turns_held[writer.session_id] = turn

    async def do_complete(self, a: int, b: int) -> None:
        turn = self.turns_held.pop(SESSIONS[a % 2], None)
        if turn is not None:
            turn.writer.complete_turn(turn, turn.number, stop_reason="end_turn")

    async def do_stranger_completes(self, a: int, b: int) -> None:
        turn = self.turns_held.get(SESSIONS[a % 2])
        if turn is None or turn.writer.turn_holder is not turn:
            return
        try:
            turn.writer.complete_turn(self, turn.number, stop_reason="end_turn")
        except TurnHeld:
            return
        self.violated("a stranger completed a turn")

    async def do_holder_dies(self, a: int, b: int) -> None:
        turn = self.turns_held.pop(SESSIONS[a % 2], None)
        if turn is not None:
            turn.writer.release_turn(turn)
            if turn.writer.turn_holder is turn:
                self.violated("the dead hold a turn")

    async def do_attach(self, a: int, b: int) -> None:
        client = self.clients[a % CLIENTS]
        client.leave()
        client.link.change(lost=True)
        client.link = Link()
        if b % 4 == 0:
            client.link.change(room=b % 3)
        begins = (client.holds + 1, 0, client.holds + 3, 1)[a // 16]
        history = HISTORIES[b // 16]
        rider = Rider(from_offset=begins, history=history)
        client.attaching = self.start(self.attach(client, rider, follow=b % 7 == 0))

    async def attach(self, client: Client, rider: Rider, *, follow: bool) -> None:
        source: Writer | Follower | None = self.writers.get(client.name)
        if follow:
            source = Follower(self.process, client.name, credit=CREDIT)
        log = source.log if isinstance(source, Writer) else await self.process.open(client.name)
        attach = client.attach = Attach(client, log, source, rider)
        try:
            mark = await attach.attach()
            self.check_answer(attach, mark)
        except (ResourceNotFound, InvalidParams) as error:
            self.check_refusal(attach, error)
        except (JournalError, ConnectionClosed):
            pass  # deleted, dead or gone meanwhile
        finally:
            if not isinstance(source, Writer):
                await log.aclose()

    def check_answer(self, attach: Attach, mark: int) -> None:
        if attach.mark != mark:
            self.violated(f"the answer is {mark}, the reply was {attach.mark}")
        history = [offset for offset in attach.offsets if offset <= mark]
        wanted = list(range(max(attach.rider.from_offset, 1), mark + 1))
        if attach.rider.history != "from_offset":
            wanted = []
        if history != wanted and (attach.client.aware or not set(history) <= set(wanted)):
            self.violated(f"the history up to {mark} is {history}, not {wanted}")
        caught_up = attach.client.aware and attach.rider.history != "none"
        if attach.caught_up != (mark + 1 if caught_up else None):
            self.violated(f"caught_up is {attach.caught_up}, the mark {mark}")

    def check_refusal(self, attach: Attach, error: Exception) -> None:
        if attach.offsets or attach.mark is not None or attach.caught_up is not None:
            self.violated(f"a refused attach was shown something: {error!r}")
        if attach.source is not None and attach.source.publishes_to(attach):
            self.violated("a refused attach is registered")
        if isinstance(error, InvalidParams) and attach.rider.history == "none":
            self.violated("a probe was refused for its offset")

    async def do_detach(self, a: int, b: int) -> None:
        self.clients[a % CLIENTS].leave()

    async def do_room(self, a: int, b: int) -> None:
        self.clients[a % CLIENTS].link.change(room=(None, 0, 1, 3)[b % 4])

    async def do_lose(self, a: int, b: int) -> None:
        client = self.clients[a % CLIENTS]
        client.link.change(lost=True)
        if b % 2:
            client.leave()

    async def do_slow(self, a: int, b: int) -> None:
        self.book.slow[SESSIONS[a % 2]] = b % 5

    async def do_fail(self, a: int, b: int) -> None:
        self.book.failing[SESSIONS[a % 2]] = 1 + b % 2

    async def do_other_process(self, a: int, b: int) -> None:
        self.start(self.other_process(SESSIONS[a % 2], by_force=b % 2 == 0))

    async def other_process(self, name: str, *, by_force: bool) -> None:
        """Somebody else writes the session, if it is free, or takes it (a lease that ran out)."""
        if by_force:
            for log in self.process.logs:
                if log.session_id == name:
                    await log.release()
        theirs = await BookedJournal(self.store, self.book).open(name)
        writer = Writer(theirs)
        with contextlib.suppress(JournalError):
            await writer.append(Entry("theirs", b"{}", "system"))
        await writer.aclose()
        await theirs.aclose()

    async def do_restart(self, a: int, b: int) -> None:
        """The process is killed: links, writers and what waits go with it."""
        for client in self.clients:
            client.link.change(lost=True)
            client.leave()
        old, writers = self.process, self.writers
        for queue in self.sent.values():
            for sent in queue:
                sent.dead = True
        await old.die()
        self.boot()
        self.start(writers.aclose())

    async def do_close(self, a: int, b: int) -> None:
        """The process ends as it should."""
        await self.writers.aclose()
        self.boot()

    async def do_delete(self, a: int, b: int) -> None:
        self.start(self.delete(SESSIONS[a % 2]))

    async def delete(self, name: str) -> None:
        with contextlib.suppress(JournalInUse):  # another process writes it
            await self.writers.delete(name)

    # ------------------------------------------------------------------ the end

    async def end(self) -> None:
        for name in SESSIONS:
            self.book.slow[name] = self.book.failing[name] = 0
        for client in self.clients:
            if not client.link.lost:
                client.link.change()
        await self.rest()
        for name in SESSIONS:
            await self.go_on(name)
        await self.rest()
        for client in self.clients:
            await self.check_tail(client)
            await self.heal(client)
        for client in self.clients:
            client.leave()
        await self.rest()
        await self.writers.aclose()
        for name in SESSIONS:
            await self.check_store(name)
        for writer, queue in self.sent.items():
            if queue:
                numbers = [sent.number for sent in queue]
                self.violated(f"nobody was told of {numbers} of {writer.session_id!r}")
        await self.store.aclose()

    async def rest(self) -> None:
        """Wait for what is under way."""
        while tasks := [task for task in self.tasks if not task.done()]:
            done, left = await asyncio.wait(tasks, timeout=60)
            if not done:
                self.violated(f"these never end: {left}")
                return
        for task in self.tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.failed(error)
        self.tasks.clear()

    async def go_on(self, name: str) -> None:
        """Whatever happened: a session can be written to, after a new writer at most."""
        for _ in range(2):
            writer = await self.ensure(name, self)
            if writer is None:
                self.violated(f"session {name!r} cannot be written to any more")
                return
            self.submit(writer)
            try:
                await writer.flush()
            except JournalError:
                continue
            return
        self.violated(f"session {name!r} lost two writers in a row")

    async def check_tail(self, client: Client) -> None:
        """Who is attached has everything up to now, once."""
        attach = client.attach
        if attach is None or not attach.live or client.link.lost:
            return
        mark = max(self.book.of(client.name), default=0)
        try:
            async with asyncio.timeout(60):
                await attach.reached(mark)
        except TimeoutError:
            self.violated(f"an attach never got {mark}: {attach.offsets}")
        if attach.live and attach.life == self.book.lives[client.name]:
            self.check_complete(attach, mark)

    def check_complete(self, attach: Attach, mark: int) -> None:
        start = max(attach.rider.from_offset, 1)
        if attach.rider.history != "from_offset":
            start = (attach.mark or 0) + 1
        records = self.book.of(attach.name)
        wanted = [
            offset
            for offset in range(start, mark + 1)
            if attach.client.aware or records[offset].kind == SESSION_UPDATE
        ]
        if attach.offsets != wanted:
            self.violated(f"an attach has {attach.offsets}, not {wanted}")

    async def heal(self, client: Client) -> None:
        """Whoever lags, or was cut off, gets exactly the rest from the next offset on."""
        before = client.attach
        held = client.holds
        client.leave()
        client.link = Link()
        mark = max(self.book.of(client.name), default=0)
        await self.attach(client, Rider(from_offset=held + 1), follow=False)
        attach = client.attach
        if attach is None or attach is before:
            self.violated("nobody can attach any more")
        elif mark:
            self.check_complete(attach, max(self.book.of(client.name)))

    async def check_store(self, name: str) -> None:
        log = await self.store.open(name)
        records = await log.read(1, await log.high_watermark())
        await log.aclose()
        if records != list(self.book.of(name).values()):
            self.violated(f"session {name!r} has {records}, not what was confirmed")
        if [record.offset for record in records if record.kind == SESSION_CREATED] != [1]:
            self.violated(f"session {name!r} does not begin with its genesis, once")
        numbers = [record.data["n"] for record in records if record.kind == SESSION_UPDATE]
        if numbers != sorted(set(numbers)) or self.lost & set(numbers):
            self.violated(f"the entries of {name!r} are {numbers}, and {self.lost} were lost")
        self.check_turns(records)

    def check_turns(self, records: Sequence[Record]) -> None:
        """At most one is open, each has one completion, and their numbers go on."""
        last, is_open = 0, False
        for record in records:
            if record.kind == TURN_STARTED:
                if is_open or record.data["turnId"] != last + 1:
                    self.violated(f"turn {record.data['turnId']} begins after {last}, {is_open=}")
                last, is_open = record.data["turnId"], True
            elif record.kind == TURN_COMPLETED:
                if not is_open or record.data["turnId"] != last:
                    self.violated(f"turn {record.data['turnId']} ends; {last}, {is_open=}")
                is_open = False
        if is_open:
            self.violated(f"turn {last} was never completed")
