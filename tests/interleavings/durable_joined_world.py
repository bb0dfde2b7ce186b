"""Two of our clients and one of our durable agents, over links that are cut anywhere; one program.

The journal is the truth. Links are cut in the middle of frames, at both ends or at one first, refused,
and the agent is killed: what was not durable is lost, and another takes its place. At rest, whatever
happened:

* who watches a session was given each of its updates once, in the journal's order, and no own prompt;
* a turn's iterator was given what is between its prompt and its end, and ended as the journal says;
* what is a turn of ours is labelled so, and nothing else is;
* everything that waited has ended, and each attached session holds all that the journal has.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from antiphon import (
    Agent,
    AntiphonError,
    AttachmentClosed,
    Client,
    ConnectionClosed,
    Durability,
    JournalError,
    Limits,
    Reattach,
    RequestError,
    TurnInProgress,
    connect,
)
from antiphon.journal import Grant, MemoryJournal, SessionLog
from antiphon.schema import v1
from antiphon.sessions import ClientPeer
from tests.interleavings.link import Link
from tests.interleavings.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon import AgentPeer, Session, Turn, Update
    from antiphon.journal import AttachContext, Entry, Record

__all__ = ["DurableJoinedWorld"]

_SIZES = (1, 13, 60, 200, 900, 1 << 20)
#: Nothing is given up for being slow: time is what the steps say.
_PATIENT = 100_000.0


class Disk(MemoryJournal):
    """A journal whose process can be killed: another is made of what was durable then."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def open(self, session_id: str) -> SessionLog:
        return _DiskLog(self, await super().open(session_id))

    def killed(self) -> Disk:
        """Nothing is stored any more; what is, another journal has."""
        self.dead = True
        self.gate.set()
        other = Disk()
        for session_id, kept in self._shelf.all.items():
            if kept.records:
                other._shelf.keep(session_id).records = list(kept.records)
        return other

    def records(self, session_id: str) -> list[Record]:
        kept = self._shelf.all.get(session_id)
        return [] if kept is None else kept.records


class _DiskLog(SessionLog):
    def __init__(self, disk: Disk, log: SessionLog) -> None:
        self.session_id = log.session_id
        self._disk = disk
        self._log = log

    async def claim(self) -> None:
        await self._log.claim()

    async def release(self) -> None:
        await self._log.release()

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        await self._disk.gate.wait()
        if self._disk.dead:
            raise JournalError("killed")
        return await self._log.append(entries, flush=flush)

    async def read(self, start: int, stop: int) -> list[Record]:
        await asyncio.sleep(0)
        return await self._log.read(start, stop)

    async def high_watermark(self) -> int:
        await asyncio.sleep(0)
        return await self._log.high_watermark()


async def _anybody(context: AttachContext) -> Grant:
    await asyncio.sleep(0)
    return Grant({"id": "somebody"}, context.session_id, "test")


@dataclass(eq=False)
class Exchange:
    """One prompt: what its iterator got, how it ended."""

    text: str
    user: User
    session_id: str
    leave: int = -1
    got: list[str] = field(default_factory=list[str])
    stop_reason: str | None = None
    error: Exception | None = None
    left: bool = False
    cancelled: bool = False
    over: bool = False
    #: It was told that the agent did not begin it, which a link that is slow to die may disprove.
    disowned: bool = False


@dataclass(eq=False)
class Work:
    """A turn at the agent, and what it is told to do."""

    text: str
    commands: list[int] = field(default_factory=list[int])
    waiting: asyncio.Future[None] | None = None
    over: bool = False

    def tell(self, command: int) -> None:
        self.commands.append(command)
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


@dataclass(eq=False)
class Watch:
    """Who watches a session at a client."""

    user: User
    session_id: str
    #: It is given what is behind this offset.
    behind: int
    kind: str
    got: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    #: How it ended, where it has.
    ended: str = ""


class Worker(Agent):
    """Does in each prompt what the world's steps say."""

    def __init__(self, world: DurableJoinedWorld) -> None:
        super().__init__()
        self.world = world
        self.works: list[Work] = []

    async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
        session_id = f"s{self.world.number()}"

        async def announce() -> None:
            await ctx.session(session_id).set_mode(f"m{self.world.number()}")

        if self.world.number() % 2:
            ctx.after_response(announce)
        return v1.NewSessionResponse(session_id=session_id)

    async def set_session_mode(self, params: Any, ctx: Any) -> v1.SetSessionModeResponse:
        return v1.SetSessionModeResponse()

    async def prompt(self, turn: Turn) -> str | None:
        work = Work(turn.text)
        self.works.append(work)
        try:
            return await self._work(work, turn)
        finally:
            work.over = True

    async def _work(self, work: Work, turn: Turn) -> str | None:
        reason = None
        while not turn.cancelled:
            if not work.commands:
                work.waiting = self.world.loop.create_future()
                canceller = asyncio.ensure_future(turn.wait_cancelled())
                await asyncio.wait((work.waiting, canceller), return_when=asyncio.FIRST_COMPLETED)
                canceller.cancel()
                continue
            command = work.commands.pop(0) % 16
            if command == 15:
                reason = "max_tokens"
                break
            if command == 14:
                break
            if command == 13:
                raise RequestError(-32001, "it went wrong")
            if command == 12:
                await turn.session.set_mode(f"m{self.world.number()}")
            elif command == 11:
                try:
                    call = v1.ToolCallUpdate(tool_call_id=f"call {self.world.number()}", title="?")
                    await turn.ask_permission(call)
                except ConnectionClosed:
                    pass  # whoever could have said so is gone
            else:
                await turn.say(f"u{self.world.number()}")
        if self.world.number() % 2:
            await turn.say(f"u{self.world.number()}")
        return reason


class Wire:
    """One link: both its ends, and what is on its way."""

    def __init__(self, world: DurableJoinedWorld, user: User) -> None:
        self.world = world
        self.refused = False
        self.client = _ClientEnd(self, self._from_client, _unseen, world.failed)
        self.agent = _AgentEnd(self, self._from_agent, _unseen, world.failed)
        self.user = user
        self.peer: ClientPeer | None = None
        #: The agent has closed its end.
        self.hung_up = False
        self.serving: asyncio.Task[Any] | None = None

    def _from_client(self, frame: dict[str, Any]) -> None:
        self.world.note(f"  {self.user.name} sends {json.dumps(frame)[:170]}")
        self.agent.incoming += json.dumps(frame).encode() + b"\n"

    def _from_agent(self, frame: dict[str, Any]) -> None:
        self.world.note(f"  {self.user.name} is sent {json.dumps(frame)[:170]}")
        self.client.incoming += json.dumps(frame).encode() + b"\n"

    def serve(self) -> None:
        world = self.world
        peer = ClientPeer(
            self.agent,
            world.agent,
            limits=world.limits,
            telemetry=world.hear,
            durability=world.durability,
        )
        self.agent.before = peer.connection.flush
        self.peer = peer
        self.serving = world.start(peer.run())

    def to_client(self, size: int) -> None:
        self.client.deliver(size)
        if self.hung_up and not self.client.incoming:
            self.client.end_input()

    def die(self, error: Exception | None = None) -> None:
        self.client.die(error)
        self.agent.die(None)


class _AgentEnd(Link):
    def __init__(self, wire: Wire, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wire = wire

    async def aclose(self) -> None:
        self._wire.hung_up = True  # behind what was written before
        self.die(None)

    async def start(self, receiver: Any) -> None:
        await super().start(receiver)
        if self.lost:
            self.die_again()

    def die_again(self) -> None:
        """Tell who has come too late to hear it."""
        self.lost = False
        self.die(None)


class _ClientEnd(Link):
    def __init__(self, wire: Wire, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wire = wire

    async def start(self, receiver: Any) -> None:
        if self._wire.user.refusals:
            self._wire.user.refusals -= 1
            self.lost = True
            msg = "nobody listens"
            raise ConnectionRefusedError(msg)
        await super().start(receiver)
        self._wire.serve()

    async def aclose(self) -> None:
        self.die(None)
        self._wire.agent.die(None)


class User:
    """One client."""

    def __init__(self, world: DurableJoinedWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.wires: list[Wire] = []
        self.refusals = 0
        self.peer: AgentPeer
        self.observed: dict[str, Watch] = {}
        self.sessions: dict[str, Session] = {}
        self.opening: set[str] = set()
        self.events: list[str] = []

    @property
    def wire(self) -> Wire:
        return self.wires[-1]

    def dial(self) -> Link:
        wire = Wire(self.world, self)
        self.wires.append(wire)
        return wire.client

    def hear(self, event: Any) -> None:
        self.world.hear(event)
        self.events.append(event.name)
        if event.name == "attachment_closed" and not event.facts["offset"]:
            # The link was lost, or the agent killed, before the new session was stored.
            self.sessions.pop(str(event.facts["session"]), None)
        elif event.name in ("attachment_closed", "attachment_ahead", "link_given_up"):
            self.world.violated(f"{self.name} was told {event.name} {event.facts}")

    async def connect(self) -> None:
        client = Client(permissions=self.decide, on_update=self.observe)
        self.peer = await connect(
            self.dial,
            client=client,
            limits=self.world.limits,
            telemetry=self.hear,
            reattach=Reattach(attempts=None, deadline=None, delay=0.1, max_delay=0.5),
        )

    async def decide(self, params: Any, ctx: Any) -> bool:
        await asyncio.sleep(0.05)
        return True

    def observe(self, update: Update) -> None:
        watch = self.observed.get(update.session_id)
        if watch is None:
            watch = self.observed[update.session_id] = Watch(self, update.session_id, 0, "observer")
            self.world.watches.append(watch)
        watch.got.append((text_of(update.raw), update.label))


class DurableJoinedWorld(World):
    """Steps of two users, the agent, the disk and the links between."""

    meant = ("handler_crash", "zero_updates_turn")
    weights = {  # noqa: RUF012  (a table)
        "to_agent": 20,
        "to_client": 22,
        "turn": 14,
        "time": 3,
        "new": 2,
        "join": 4,
        "prompt": 10,
        "act": 40,
        "cancel": 3,
        "set_mode": 3,
        "subscribe": 3,
        "reattach": 1,
        "disk": 3,
        "cut": 10,
        "refuse": 2,
        "kill": 2,
        "hang_up": 3,
        "rush": 8,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self.limits = Limits(
            cancel_backstop=_PATIENT, request_timeout=_PATIENT, permission_timeout=_PATIENT
        )
        self.disk = Disk()
        #: With a small one, subscribers lag all the time.
        self._credit = 1024 if variant % 2 else 1 + variant // 2 % 4
        self.durability = self._durability()
        self.agent = Worker(self)
        self.killed: list[Durability] = []
        self.users = [User(self, "A"), User(self, "B")]
        self.exchanges: list[Exchange] = []
        self.watches: list[Watch] = []
        self.calls: set[str] = set()
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _durability(self) -> Durability:
        return Durability(self.disk, policy=_anybody, credit=self._credit)

    # -------------------------------------------------------------- life

    async def begin(self) -> None:
        for user in self.users:
            opening = self.loop.create_task(user.connect())
            while not opening.done():
                await self.pump(1)
            await opening
        await self.do_new(0, 0)
        await self.pump(6)

    async def pump(self, rounds: int) -> None:
        for _ in range(rounds):
            for user in self.users:
                for wire in user.wires:
                    wire.agent.deliver(1 << 20)
                    wire.to_client(1 << 20)
            await self.turns(6)

    def user_at(self, a: int) -> User:
        return self.users[a % 2]

    # -------------------------------------------------------------- the links

    async def do_to_agent(self, a: int, b: int) -> None:
        wires = self.user_at(a).wires
        wires[-1 - (a // 2) % min(2, len(wires))].agent.deliver(_SIZES[b % len(_SIZES)])

    async def do_to_client(self, a: int, b: int) -> None:
        if not self.user_at(a).wires:
            return
        for _ in range(1 + a % 3):
            self.user_at(a).wire.to_client(_SIZES[b % len(_SIZES)])
            await self.turns(b // 32)

    async def do_rush(self, a: int, b: int) -> None:
        await self.pump(1 + a % 3)

    async def do_cut(self, a: int, b: int) -> None:
        wire = self.user_at(a).wire
        error = OSError("the link broke") if b % 2 else None
        match a // 2 % 6:
            case 0:
                wire.to_client(1 + b * 7)
                wire.die(error)
            case 1:
                wire.client.die(error)  # its other end does not notice yet
            case 2:
                wire.agent.deliver(1 << 20)
                wire.die(error)
            case 3:
                wire.agent.die(error)
                wire.client.end_input()
            case 4:
                wire.client.end_input()
            case _:
                wire.agent.end_input()

    async def do_refuse(self, a: int, b: int) -> None:
        self.user_at(a).refusals = b % 4

    async def do_disk(self, a: int, b: int) -> None:
        if a % 3:
            self.disk.gate.set()
        else:
            self.disk.gate.clear()

    async def do_kill(self, a: int, b: int) -> None:
        old, self.disk = self.durability, self.disk.killed()
        self.killed.append(old)
        self.agent = Worker(self)
        self.durability = self._durability()
        for user in self.users:
            for wire in user.wires:
                if a % 2:
                    wire.to_client(1 + b * 9)
                wire.die()
        self.start(old.aclose())

    async def do_hang_up(self, a: int, b: int) -> None:
        """The agent closes its end, as when it is told to stop: what runs may say a last word."""
        wires = self.user_at(a).wires
        if wires and wires[-1].peer is not None:
            self.start(wires[-1].peer.connection.aclose())

    # -------------------------------------------------------------- the agent's side

    async def do_act(self, a: int, b: int) -> None:
        works = [work for work in self.agent.works if not work.over]
        if works:
            works[a % len(works)].tell(b)

    # -------------------------------------------------------------- the clients' side

    async def _call(self, name: str, work: Any) -> Any:
        name = f"{name} {self.number()}"
        self.calls.add(name)
        try:
            return await work
        except (AntiphonError, AssertionError) as error:
            self.note(f"  {name} raised {error!r}")
            if isinstance(error, AttachmentClosed) and not error.offset:
                return None  # the session was lost before it was stored
            if not isinstance(error, (ConnectionClosed, RequestError, TurnInProgress)):
                self.violated(f"{name} raised {error!r}")
        finally:
            self.calls.discard(name)

    async def do_new(self, a: int, b: int) -> None:
        user = self.user_at(a)

        async def new() -> None:
            session = await user.peer.new_session(cwd="/")
            user.sessions[session.session_id] = session

        if sum(len(user.sessions) for user in self.users) < 4:
            self.start(self._call("new", new()))

    def session_at(self, a: int, b: int) -> tuple[User, Session] | None:
        user = self.user_at(a)
        sessions = list(user.sessions.values())
        return (user, sessions[b % len(sessions)]) if sessions else None

    async def do_join(self, a: int, b: int) -> None:
        user, other = self.user_at(a), self.user_at(a + 1)
        strange = [each for each in other.sessions if each not in user.sessions]
        strange = [each for each in strange if each not in user.opening]
        if not strange:
            return
        session_id = strange[b % len(strange)]
        user.opening.add(session_id)

        async def join() -> None:
            try:
                load = b // 8 % 2
                # What a join that was given up has told was told before.
                user.observed.pop(session_id, None)
                if load:
                    opening = user.peer.load_session(session_id, cwd="/")
                else:
                    opening = user.peer.attach_session(session_id, cwd="/")
                async with opening as session:
                    pass
                user.sessions[session_id] = session
            except BaseException:
                watch = user.observed.get(session_id)
                if watch is not None:
                    self.watches.remove(watch)
                    del user.observed[session_id]
                raise
            finally:
                user.opening.discard(session_id)

        self.start(self._call("join", join()))

    async def do_reattach(self, a: int, b: int) -> None:
        found = self.session_at(a, b)
        if found is not None:
            self.start(self._call("reattach", found[1].reattach()))

    async def do_set_mode(self, a: int, b: int) -> None:
        found = self.session_at(a, b)
        if found is not None:
            self.start(self._call("set_mode", found[1].set_mode(f"m{self.number()}")))

    async def do_cancel(self, a: int, b: int) -> None:
        found = self.session_at(a, b)
        if found is not None:
            user, session = found
            for exchange in self.exchanges:
                if exchange.user is user and exchange.session_id == session.session_id:
                    exchange.cancelled |= not exchange.over
            await session.cancel(backstop=None)

    async def do_subscribe(self, a: int, b: int) -> None:
        found = self.session_at(a, b)
        if found is None:
            return
        user, session = found
        if any(w.user is user and w.kind == "subscriber" for w in self.watches):
            return
        watch = Watch(user, session.session_id, -1, "subscriber")
        # What came before is the observer's alone, which may not have been shown it yet.
        watch.behind = session.inbox.received
        self.watches.append(watch)
        subscription = session.updates()

        async def follow() -> None:
            try:
                async for update in subscription:
                    watch.got.append((text_of(update.raw), update.label))
                watch.ended = "end"
            except AntiphonError as error:
                watch.ended = repr(error)

        self.start(follow())

    async def do_prompt(self, a: int, b: int) -> None:
        found = self.session_at(a, b)
        if found is None or found[1].turn is not None:
            return
        user, session = found
        if any(
            e.user is user and e.session_id == session.session_id and not e.over
            for e in self.exchanges
        ):
            return
        exchange = Exchange(f"p{self.number()}", user, session.session_id)
        exchange.leave = 2 if b // 4 % 8 == 7 else -1
        self.exchanges.append(exchange)
        self.start(self._call("prompt", self._prompt(exchange, session)))

    async def _prompt(self, exchange: Exchange, session: Session) -> None:
        try:
            async with session.prompt(exchange.text) as turn:
                async for update in turn:
                    if update.label != "turn":
                        self.violated(f"an update of {exchange.text} is labelled {update.label}")
                    exchange.got.append(text_of(update.raw))
                    if len(exchange.got) == exchange.leave:
                        exchange.left = True
                        break
            exchange.stop_reason = turn.stop_reason
        except Exception as error:
            exchange.error = error
            exchange.disowned = isinstance(error, ConnectionClosed)
            raise
        finally:
            exchange.over = True

    # -------------------------------------------------------------- the end

    async def end(self) -> None:
        for user in self.users:
            user.refusals = 0
            for wire in user.wires:
                if wire.client.lost:
                    wire.agent.deliver(1 << 20)
                    wire.agent.die(None)
                if wire.agent.lost or wire.agent.ended:
                    wire.die()
        self.disk.gate.set()
        for _ in range(60):
            if self.violations:
                break
            for work in self.agent.works:
                work.tell(14)
            await self.pump(4)
            await asyncio.sleep(3)
            if not self.calls and self._complete():
                break
        else:
            self.violated(f"at rest wait {sorted(self.calls)}, and hold {self._held()}")
        await self.pump(4)
        if not self.violations:
            self._check()
        for user in self.users:
            closing = self.loop.create_task(user.peer.aclose())
            while not closing.done():
                await self.pump(1)
                await asyncio.sleep(0.1)
        for wire in [wire for user in self.users for wire in user.wires]:
            wire.die()
        await self.durability.aclose()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _held(self) -> list[tuple[str, str, int, int]]:
        return [
            (user.name, session_id, session.offset, len(self.disk.records(session_id)))
            for user in self.users
            for session_id, session in user.sessions.items()
        ]

    def _complete(self) -> bool:
        return all(
            offset == mark and not self._open(session_id)
            for _, session_id, offset, mark in self._held()
        )

    def _open(self, session_id: str) -> bool:
        kinds = [record.kind for record in self.disk.records(session_id)]
        return kinds.count("turn_started") != kinds.count("turn_completed")

    def _check(self) -> None:
        exchanges = {exchange.text: exchange for exchange in self.exchanges}
        told: dict[str, list[tuple[str, str]]] = {}
        ran: set[str] = set()
        for session_id in {sid for user in self.users for sid in user.sessions}:
            shown: list[tuple[str, str]] = []
            told[session_id] = shown
            prompt = ""
            got: list[str] = []
            for record in self.disk.records(session_id):
                if record.kind == "turn_started":
                    prompt, got = "?", list[str]()
                elif record.kind == "turn_completed":
                    if prompt in exchanges:
                        ran.add(prompt)
                        self._check_turn(exchanges[prompt], got, json.loads(record.payload))
                    prompt = ""
                elif record.kind == "session_update":
                    text = text_of(record.payload)
                    if prompt == "?":
                        prompt = text
                    elif prompt:
                        got.append(text)
                    shown.append((text, prompt))
        for exchange in self.exchanges:
            unborn = exchange.left or (exchange.cancelled and exchange.stop_reason == "cancelled")
            if exchange.text not in ran and exchange.error is None and not unborn:
                self.violated(f"{exchange.text} is in no journal, and ended without an error")
            if exchange.text not in ran and exchange.got:
                self.violated(f"{exchange.text} is in no journal, and was given {exchange.got}")
        for watch in self.watches:
            if watch.session_id in watch.user.sessions:
                self._check_watch(watch, told[watch.session_id], exchanges)

    def _check_turn(self, exchange: Exchange, got: list[str], payload: dict[str, Any]) -> None:
        text = exchange.text
        if exchange.left:
            got = got[: exchange.leave]
        elif exchange.disowned:
            self.note(f"{text} was disowned: {exchange.error!r}")
            if "before the agent began" not in str(exchange.error):
                self.violated(f"{text} ended with {exchange.error!r}, and the journal has its end")
            got = []
        elif exchange.error is not None:
            if "error" not in payload or payload["error"]["code"] != getattr(
                exchange.error, "code", None
            ):
                self.violated(f"{text} raised {exchange.error!r}, and the journal says {payload}")
        elif exchange.stop_reason != payload.get("stopReason"):
            self.violated(f"{text} ended {exchange.stop_reason}, and the journal says {payload}")
        if exchange.got != got:
            self.violated(f"{text} was given {exchange.got}, and the journal has {got}")

    def _check_watch(
        self, watch: Watch, told: list[tuple[str, str]], exchanges: dict[str, Exchange]
    ) -> None:
        user, who = watch.user, f"{watch.user.name}'s {watch.kind} of {watch.session_id}"
        if watch.kind != "observer" and watch.ended:
            self.violated(f"{who} ended with {watch.ended}")
        # Own prompts are not shown; one that was disowned may be.
        expected: list[tuple[str, str]] = []
        given = {text for text, _ in watch.got}
        for text, prompt in told:
            own = exchanges.get(text)
            if own is not None and own.user is user and not (own.disowned and text in given):
                continue
            expected.append((text, prompt))
        got = watch.got
        if watch.kind == "subscriber":
            observed = user.observed.get(watch.session_id)
            got = ([] if observed is None else observed.got[: watch.behind]) + got
        if [text for text, _ in got] != [text for text, _ in expected]:
            self.violated(f"{who} was given {got}, and the journal has {expected}")
            return
        for (text, label), (_, prompt) in zip(got, expected, strict=True):
            exchange = exchanges.get(prompt)
            mine = exchange is not None and exchange.user is user
            if mine and (exchange.disowned or exchange.left):  # type: ignore[union-attr]
                continue
            if (label == "turn") != mine:
                self.violated(f"{who} was given {text} of {prompt or 'no turn'} as {label}")


def _unseen(_: dict[str, Any]) -> None:
    """For what arrives: what comes of it is looked at."""


def text_of(raw: Any) -> str:
    update = json.loads(raw)
    if "currentModeId" in update:
        return str(update["currentModeId"])
    return str(update["content"]["text"])
