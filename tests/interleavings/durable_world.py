"""A durable agent against clients that come, go, prompt, attach and lag in any order; one program.

The journal is in memory behind a gate that the steps open and close. Handlers say what the steps tell
them; what was said is held against the journal, and what each connection was sent against both:

* a journal begins with its genesis, its turns are closed once each, and hold what was said in them;
* an attach gets history and live records once each, in the order of offsets, its answer between them,
  and at rest everything;
* who prompts sees each text of its turn, in order and before the answer: bare, or as a copy, once;
* one turn a session, across all connections.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from antiphon import Agent, Durability
from antiphon.journal import Grant, MemoryJournal, SessionLog
from antiphon.sessions import ClientPeer
from tests.interleavings.link import Link
from tests.interleavings.world import World
from tests.journal.ears import LogOver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon import Turn
    from antiphon.journal import AttachContext, Entry, Record

__all__ = ["DurableWorld"]

_POLICIES = ("from_offset", "tip", "from_offset", "none")


class GatedJournal(MemoryJournal):
    """A journal in memory on which appends, and what an attach reads, wait while their gates are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.reading = asyncio.Event()
        self.open_gates()

    def open_gates(self) -> None:
        self.gate.set()
        self.reading.set()

    async def open(self, session_id: str) -> SessionLog:
        return _GatedLog(self, await super().open(session_id))


class _GatedLog(LogOver):
    def __init__(self, journal: GatedJournal, log: SessionLog) -> None:
        super().__init__(log)
        self._journal = journal

    async def append(self, entries: Sequence[Entry], *, flush: bool = False) -> list[Record]:
        await self._journal.gate.wait()
        return await super().append(entries, flush=flush)

    async def read(self, start: int, stop: int) -> list[Record]:
        # A store on disk takes its time.
        await asyncio.sleep(0)
        await self._journal.reading.wait()
        return await super().read(start, stop)

    async def high_watermark(self) -> int:
        await asyncio.sleep(0)
        return await super().high_watermark()


async def _anybody(context: AttachContext) -> Grant:
    """Decides on the loop, so that a program is the same each time."""
    await asyncio.sleep(0)
    return Grant({"id": "somebody"}, context.session_id, "test")


@dataclass(eq=False)
class Said:
    """One turn: what its handler said, and how it came to its end."""

    session_id: str
    texts: list[str] = field(default_factory=list[str])
    #: Texts whose verb was given up before it returned: they may have been told, or not.
    given_up: set[str] = field(default_factory=set[str])
    commands: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    waiting: asyncio.Future[None] | None = None
    over: bool = False


@dataclass(eq=False)
class Prompt:
    """A prompt of a connection: its turn once that has begun, and its answers."""

    session_id: str
    text: str
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(eq=False)
class Tail:
    """An attach of a connection: what it has to get next, and where."""

    id: str
    session_id: str
    policy: str
    start: int
    aware: bool
    #: The next offset, 0 where the answer will say it.
    next: int = 0
    mark: int = -1
    over: str = ""
    #: Whether it was answered, with whatever.
    answered: bool = False
    #: Whether it may be over: another was to replace it, and was withdrawn, nobody knows how late.
    loose: bool = False


class Client:
    """One connection, and the client at its other end."""

    def __init__(self, world: DurableWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.link = Link(self.written, lambda _: None, world.failed)
        self.peer = ClientPeer(
            self.link, world.agent, telemetry=world.hear, durability=world.durability
        )
        self.prompts: dict[str, Prompt] = {}
        self.news: set[str] = set()
        self.sessions: set[str] = set()
        self.tails: dict[str, Tail] = {}
        self.loads: dict[str, Tail] = {}
        #: Texts of own turns as they were first seen here, by session; and how often each was.
        self.seen: dict[str, list[str]] = {}
        self.counts: dict[str, int] = {}
        #: Texts that an attach with history may repeat.
        self.may_repeat: set[str] = set()
        self.ids = 0
        self.serving = world.start(self.peer.run())

    def ask(self, method: str, params: dict[str, Any], kind: str) -> str:
        self.ids += 1
        id_ = f"{kind}{self.ids}"
        self.link.put({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
        return id_

    def tell(self, method: str, params: dict[str, Any]) -> None:
        self.link.put({"jsonrpc": "2.0", "method": method, "params": params})

    # -------------------------------------------------------------- what comes

    def written(self, frame: dict[str, Any]) -> None:
        self.world.note(f"  {self.number}< {json.dumps(frame)[:160]}")
        method, params = frame.get("method"), frame.get("params", {})
        session_id = params.get("sessionId", "")
        match method:
            case None:
                self._answered(str(frame.get("id")), frame)
            case "session/update":
                meta: dict[str, Any] = params.get("_meta") or {}
                rider: Any = meta.get("raxol.io")
                if rider is None:
                    self._bare(session_id, params["update"])
                else:
                    self._record(session_id, rider["offset"], params["update"])
            case "_raxol/session.record":
                self._record(session_id, params["offset"], params["payload"], params["kind"])
            case "_raxol/session.caught_up":
                self._caught_up(session_id, params["offset"])
            case "_raxol/session.lagged" | "_raxol/session.closed":
                self._ended(session_id, params)
            case "session/request_permission":
                self.link.put(
                    {
                        "jsonrpc": "2.0",
                        "id": frame["id"],
                        "result": {"outcome": {"outcome": "cancelled"}},
                    }
                )
            case "$/cancel_request":
                pass  # the question of a turn that was cancelled
            case _:
                self.world.violated(f"{method} was sent")

    def _bare(self, session_id: str, update: dict[str, Any]) -> None:
        text = _text_of(update)
        if text is None:
            return
        if any(load.policy == "from_offset" for load in self.loads.values()):
            self.may_repeat.add(text)
        loading = any(load.session_id == session_id for load in self.loads.values())
        tail = self.tails.get(session_id)
        if tail is not None and not tail.loose and not loading:
            self.world.violated(f"{text} came bare to a connection that is attached")
        self._saw(session_id, text)

    def _saw(self, session_id: str, text: str) -> None:
        count = self.counts[text] = self.counts.get(text, 0) + 1
        if count == 1:
            self.seen.setdefault(session_id, []).append(text)
        elif text not in self.may_repeat:
            self.world.violated(f"{text} came {count} times to connection {self.number}")

    def _record(
        self, session_id: str, offset: int, payload: dict[str, Any], kind: str = "session_update"
    ) -> None:
        loading = [load for load in self.loads.values() if load.session_id == session_id]
        old = tail = self.tails.get(session_id)
        if loading:
            # Until the new attach is let in, the one that it replaces goes on.
            tail = loading[0]
            if old is not None and not tail.next:
                follows = offset == old.next if old.aware else offset >= old.next
                tail = old if follows else tail
        if tail is None or tail.over:
            self.world.violated(f"record {offset} came to nobody")
            return
        if tail.aware or tail.next == 0:
            if tail.next and offset != tail.next:
                self.world.violated(f"record {offset} came in the place of {tail.next}")
        elif offset < tail.next:
            self.world.violated(f"record {offset} came after {tail.next}")
        tail.next = offset + 1
        self.world.holds(session_id, offset, kind, payload)
        text = _text_of(payload) if kind == "session_update" else None
        if text is not None:
            self._saw(session_id, text)
            if loading and loading[0].policy == "from_offset":
                self.may_repeat.add(text)

    def _caught_up(self, session_id: str, offset: int) -> None:
        loads = [load for load in self.loads.values() if load.session_id == session_id]
        if not loads or loads[0].answered or not loads[0].aware:
            self.world.violated("caught_up came to nobody")
        elif loads[0].policy == "from_offset" and loads[0].next not in {0, offset}:
            self.world.violated(f"caught_up {offset} behind record {loads[0].next - 1}")

    def _ended(self, session_id: str, params: dict[str, Any]) -> None:
        tail = self.tails.get(session_id)
        if tail is None:
            self.world.violated(f"{params} came to nobody")
            return
        last = params.get("lastOffset")
        if last is not None and tail.aware and last != tail.next - 1:
            self.world.violated(f"lagged at {last}, and the last record was {tail.next - 1}")
        tail.over = "lagged" if last is not None else params["reason"]
        del self.tails[session_id]

    def _answered(self, id_: str, frame: dict[str, Any]) -> None:
        if id_ in self.prompts:
            prompt = self.prompts[id_]
            prompt.answers.append(frame)
            self.world.answered(self, prompt)
        elif id_ in self.news:
            self.sessions.add(frame["result"]["sessionId"])
            self.world.sessions.append(frame["result"]["sessionId"])
        elif id_ in self.loads:
            self._load_answered(self.loads.pop(id_), frame)

    def _load_answered(self, load: Tail, frame: dict[str, Any]) -> None:
        load.answered = True
        if "error" in frame:
            load.over = "refused"
            old = self.tails.get(load.session_id)
            if old is not None and frame["error"]["code"] == -32800:
                old.loose = True
            if frame["error"]["code"] == -32602 and load.next > 1:
                self.world.violated("records came before a refusal")
            return
        mark = frame["result"]["_meta"]["raxol.io"]["highWatermark"]
        self.sessions.add(load.session_id)
        if load.policy == "none":
            return
        if load.policy == "from_offset":
            first = max(load.start, 1)
            if load.aware and load.next not in {0, mark + 1}:
                self.world.violated(f"history ended before {load.next}, the mark is {mark}")
            old = self.tails.get(load.session_id)
            as_old = old is not None and old.next == mark + 1
            if load.aware and load.next == 0 and first <= mark and not as_old:
                self.world.violated(f"no history came, from {first} to {mark}")
        load.mark = mark
        load.next = mark + 1
        if load.id.startswith("attach"):
            self.tails[load.session_id] = load


class Puppet(Agent):
    """Says what the steps tell it."""

    def __init__(self, world: DurableWorld) -> None:
        self.world = world

    async def prompt(self, turn: Turn) -> Any:
        world = self.world
        said = Said(turn.session_id)
        if any(not other.over for other in world.running(turn.session_id)):
            world.violated(f"two turns of session {turn.session_id} run")
        world.turns_by_prompt[turn.text] = said
        world.all_turns.append(said)
        try:
            while True:
                while not said.commands:
                    said.waiting = world.loop.create_future()
                    await said.waiting
                command, argument = said.commands.pop(0)
                if command == "say":
                    text = f"t{world.number()}"
                    said.texts.append(text)
                    said.given_up.add(text)
                    await turn.say(text)
                    said.given_up.discard(text)
                elif command == "ask":
                    await turn.ask_permission("may I?")
                elif command == "end":
                    if argument % 4 == 3:
                        raise ValueError("on purpose")
                    return None if argument % 4 else "refusal"
        finally:
            said.over = True


class DurableWorld(World):
    """Several connections to one durable agent."""

    meant = ("zero_updates_turn",)
    weights = {  # noqa: RUF012  (a table)
        "connect": 3,
        "new": 1,
        "prompt": 10,
        "say": 16,
        "ask": 2,
        "end": 10,
        "attach": 10,
        "load": 2,
        "detach": 2,
        "cancel": 2,
        "withdraw": 3,
        "lose": 2,
        "slow": 3,
        "quick": 5,
        "shut": 2,
        "open": 6,
        "stall": 2,
        "read": 6,
        "overtake": 3,
        "turn": 12,
        "rest": 4,
        "restart": 1,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self.variant = variant
        #: Where there are few, their steps meet more often.
        self.most_clients, self.most_sessions = (2, 1) if variant & 256 else (4, 3)
        self.journal = GatedJournal()
        self.agent = Puppet(self)
        self.durability = self._durability()
        self.clients: list[Client] = []
        self.sessions: list[str] = []
        self.turns_by_prompt: dict[str, Said] = {}
        self.all_turns: list[Said] = []
        self.told: list[tuple[str, int, str, Any]] = []
        self._numbers = 0

    def _durability(self) -> Durability:
        return Durability(
            self.journal,
            policy=_anybody,
            outlive=bool(self.variant & 1),
            credit=(1 if self.variant & 32 else 4) if self.variant & 2 else 1024,
            prompts=bool(self.variant & 4),
        )

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def running(self, session_id: str) -> list[Said]:
        return [turn for turn in self.all_turns if turn.session_id == session_id and not turn.over]

    def holds(self, session_id: str, offset: int, kind: str, payload: Any) -> None:
        """Remember what was told, to be held against the journal at the end."""
        self.told.append((session_id, offset, kind, payload))

    async def begin(self) -> None:
        """Two connections, and a session that both know and that has a turn behind it."""
        await self.do_connect(0, 0)
        await self.do_new(0, 0)
        await self._rest()
        await self.do_prompt(0, 0)
        await self.do_say(0, 0)
        await self.do_end(0, 1)
        await self.do_connect(0, 0)
        await self.do_attach(1, 0)
        await self._rest()

    # -------------------------------------------------------------- steps

    async def do_connect(self, a: int, b: int) -> None:
        if len([c for c in self.clients if not c.link.lost]) >= self.most_clients:
            return
        client = Client(self, len(self.clients))
        self.clients.append(client)
        await asyncio.sleep(0)
        client.ask("initialize", {"protocolVersion": 1, "clientCapabilities": {}}, "hello")
        await self._rest()

    def _client(self, a: int) -> Client | None:
        live = [client for client in self.clients if not client.link.lost]
        return live[a % len(live)] if live else None

    async def do_new(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is not None and len(self.sessions) < self.most_sessions:
            client.news.add(client.ask("session/new", {"cwd": "/w", "mcpServers": []}, "new"))
            self._deliver(client)

    async def do_prompt(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is None or not client.sessions:
            return
        session_id = sorted(client.sessions, key=self.sessions.index)[b % len(client.sessions)]
        text = f"p{self.number()}"
        blocks = [{"type": "text", "text": text}]
        id_ = client.ask("session/prompt", {"sessionId": session_id, "prompt": blocks}, "prompt")
        client.prompts[id_] = Prompt(session_id, text)
        self._deliver(client)

    def _command(self, a: int, command: str, argument: int = 0) -> None:
        running = [turn for turn in self.all_turns if not turn.over]
        if running:
            said = running[a % len(running)]
            said.commands.append((command, argument))
            if said.waiting is not None and not said.waiting.done():
                said.waiting.set_result(None)

    async def do_say(self, a: int, b: int) -> None:
        for _ in range(1 + b % 3):
            self._command(a, "say")

    async def do_ask(self, a: int, b: int) -> None:
        self._command(a, "ask")

    async def do_end(self, a: int, b: int) -> None:
        self._command(a, "end", b)

    async def do_attach(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is None or not self.sessions:
            return
        session_id = self.sessions[b % len(self.sessions)]
        if any(load.session_id == session_id for load in client.loads.values()):
            return
        policy = _POLICIES[a % 4]
        held = client.tails.get(session_id)
        start = (0, held.next if held else 1, b, 1)[b % 4]
        rider = {"fromOffset": start, "historyPolicy": policy}
        self._load(client, session_id, policy, start, aware=True, rider=rider)

    async def do_load(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is None or not self.sessions:
            return
        session_id = self.sessions[b % len(self.sessions)]
        busy = any(load.session_id == session_id for load in client.loads.values())
        if not busy:
            self._load(client, session_id, "from_offset", 0, aware=False, rider=None)

    def _load(
        self,
        client: Client,
        session_id: str,
        policy: str,
        start: int,
        *,
        aware: bool,
        rider: dict[str, Any] | None,
    ) -> None:
        params: dict[str, Any] = {"sessionId": session_id, "cwd": "/w", "mcpServers": []}
        if rider is not None:
            params["_meta"] = {"raxol.io": rider}
        id_ = client.ask("session/load", params, "attach")
        client.loads[id_] = Tail(id_, session_id, policy, start, aware)
        if policy == "from_offset":
            # Whatever was said so far may come once more, as history.
            client.may_repeat.update(
                text
                for said in self.all_turns
                if said.session_id == session_id
                for text in said.texts
            )
            client.may_repeat.update(client.counts)
        self._deliver(client)

    async def do_detach(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is None or not client.tails or client.loads:
            return
        session_id = list(client.tails)[b % len(client.tails)]
        if client.peer.connection.writing_paused:
            return
        client.tell("_raxol/session.detach", {"sessionId": session_id})
        self._deliver(client)
        client.tails.pop(session_id, None)

    async def do_cancel(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is not None and client.sessions:
            session_id = sorted(client.sessions, key=self.sessions.index)[b % len(client.sessions)]
            client.tell("session/cancel", {"sessionId": session_id})
            self._deliver(client)

    async def do_withdraw(self, a: int, b: int) -> None:
        """A load that is not answered yet is not wanted any more."""
        client = self._client(a)
        if client is not None and client.loads:
            id_ = list(client.loads)[b % len(client.loads)]
            client.tell("$/cancel_request", {"requestId": id_})
            self._deliver(client)

    async def do_lose(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is not None:
            client.link.die(None)

    async def do_slow(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is not None:
            client.peer.connection.pause_writing()

    async def do_quick(self, a: int, b: int) -> None:
        client = self._client(a)
        if client is not None:
            client.peer.connection.resume_writing()

    async def do_shut(self, a: int, b: int) -> None:
        self.journal.gate.clear()

    async def do_open(self, a: int, b: int) -> None:
        self.journal.gate.set()

    async def do_stall(self, a: int, b: int) -> None:
        """Reading takes its time: an attach that is under way stays so."""
        self.journal.reading.clear()

    async def do_read(self, a: int, b: int) -> None:
        self.journal.reading.set()

    async def do_overtake(self, a: int, b: int) -> None:
        """An attach that reads for long, while the turn there is ends and its own connection's begins."""
        await self.do_stall(a, b)
        await self.do_attach(a, b)
        for _ in range(b % 4):
            await self.turns(4)
            await self.do_say(a, b)
        await self.turns(4)
        await self.do_end(a, b)
        await self.turns(8)
        await self.do_prompt(a, b)
        await self.turns(8)
        await self.do_say(a, b)

    async def do_rest(self, a: int, b: int) -> None:
        """Everything that can happen by itself does."""
        if self.journal.gate.is_set():
            await self._rest()

    async def do_restart(self, a: int, b: int) -> None:
        """The program ends, in order, and another one opens the journal."""
        self.journal.open_gates()
        for client in self.clients:
            client.link.die(None)
        await self.durability.aclose()
        await asyncio.gather(*(client.serving for client in self.clients))
        self.durability = self._durability()
        await self.do_connect(0, 0)

    def _deliver(self, client: Client) -> None:
        client.link.deliver(1 << 20)

    async def _rest(self) -> None:
        """Until nothing moves."""
        before = -1
        while before != (before := sum(client.link.crossed for client in self.clients)):
            for client in self.clients:
                client.link.deliver(1 << 20)
            await self.turns(25)

    # -------------------------------------------------------------- what has to hold

    def answered(self, client: Client, prompt: Prompt) -> None:
        """A prompt has its answer: everything that its turn said was seen before."""
        if len(prompt.answers) > 1:
            self.violated(f"prompt {prompt.text} was answered twice")
        said = self.turns_by_prompt.get(prompt.text)
        answer = prompt.answers[0]
        if said is None:
            if "result" in answer and answer["result"] != {"stopReason": "cancelled"}:
                self.violated(f"prompt {prompt.text} was answered and never ran")
            return
        if not said.over and "error" in answer:
            self.violated(f"prompt {prompt.text} failed while its turn ran")
        missing = [
            text for text in said.texts if text not in client.counts and text not in said.given_up
        ]
        if missing:
            self.violated(f"{missing} of {prompt.text} came not before its answer")
        seen = [text for text in client.seen.get(prompt.session_id, []) if text in set(said.texts)]
        if seen != [text for text in said.texts if text in client.counts]:
            self.violated(f"{prompt.text}: {seen} were seen, and said were {said.texts}")

    async def end(self) -> None:
        self.journal.open_gates()
        for client in self.clients:
            if not client.link.lost:
                client.peer.connection.resume_writing()
        await self._rest()
        for said in self.all_turns:
            if not said.over:
                said.commands.append(("end", 1))
                if said.waiting is not None and not said.waiting.done():
                    said.waiting.set_result(None)
        await self._rest()
        await self._look_at_rest()
        for client in self.clients:
            client.link.die(None)
        await asyncio.gather(*(client.serving for client in self.clients))
        await self.durability.aclose()
        for session_id in self.sessions:
            await self._look_at_journal(session_id)

    async def _records(self, session_id: str) -> list[Record]:
        log = await self.journal.open(session_id)
        return await log.read(1, await log.high_watermark())

    async def _look_at_rest(self) -> None:
        for client in self.clients:
            if client.link.lost:
                continue
            for prompt in client.prompts.values():
                if not prompt.answers:
                    self.violated(f"prompt {prompt.text} has no answer at rest")
            for load in client.loads.values():
                self.violated(f"load {load.id} has no answer at rest")
            for session_id, tail in client.tails.items():
                mark = len(await self._records(session_id))
                if tail.aware and not tail.loose and tail.next != mark + 1:
                    self.violated(
                        f"connection {client.number} has session {session_id} up to "
                        f"{tail.next - 1} of {mark}"
                    )

    async def _look_at_journal(self, session_id: str) -> None:
        records = await self._records(session_id)
        if [record.offset for record in records] != list(range(1, len(records) + 1)):
            self.violated("the offsets have gaps")
        if records and records[0].kind != "session_created":
            self.violated("the journal does not begin with its genesis")
        for told in self.told:
            if told[0] == session_id:
                record = records[told[1] - 1]
                if record.kind != told[2] or record.data != told[3]:
                    self.violated(f"record {told[1]} was told as {told[2:]}, and is {record}")
        opened: list[str] | None = None
        turns: list[list[str]] = []
        for record in records:
            if record.kind == "turn_started":
                if opened is not None:
                    self.violated(f"record {record.offset} begins a turn inside a turn")
                opened = []
                turns.append(opened)
            elif record.kind == "turn_completed":
                if opened is None:
                    self.violated(f"record {record.offset} completes no turn")
                opened = None
            elif record.kind == "session_update":
                text = _text_of(record.data)
                if text is not None and opened is None:
                    self.violated(f"{text} stands outside of a turn")
                elif text is not None and opened is not None:
                    opened.append(text)
        if opened is not None:
            self.violated("a turn is open at the end")
        kept = {text for texts in turns for text in texts}
        said = [
            [text for text in turn.texts if text in kept or text not in turn.given_up]
            for turn in self.all_turns
            if turn.session_id == session_id
        ]
        if [texts for texts in turns if texts] != [texts for texts in said if texts]:
            self.violated(f"said were {said}, and kept are {turns}")


def _text_of(update: dict[str, Any]) -> str | None:
    if update.get("sessionUpdate") != "agent_message_chunk":
        return None
    return str(update["content"]["text"])
