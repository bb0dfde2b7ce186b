"""Our client and our agent at the two ends of one byte stream, cut and delayed as the steps say.

What one side said is held against what the other side's consumers got: nothing in between is trusted.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from antiphon import Agent, AntiphonError, Client, ConnectionClosed, Limits, RequestTimeout, connect
from antiphon.schema import v1, v1_unstable
from antiphon.sessions import ClientPeer
from tests.interleavings.link import Link
from tests.interleavings.world import World

if TYPE_CHECKING:
    from antiphon import AgentPeer, Session, Turn

__all__ = ["JoinedWorld"]

BACKSTOP = 30.0
_SIZES = (1, 13, 60, 200, 900, 1 << 20)


class Exchange:
    """One prompt: what the agent said in it, what the client's consumers got of it."""

    def __init__(self, number: int, session_id: str) -> None:
        self.number = number
        self.session_id = session_id
        self.said: list[str] = []
        self.got: list[str] = []
        self.turn: Turn | None = None
        self.commands: list[int] = []
        self.waiting: asyncio.Future[None] | None = None
        self.prompt_id: Any = None
        self.responded = False
        self.cancelled = False
        self.left = False
        self.stop_reason: str | None = None
        self.returned = False
        self.answered = False
        self.task: asyncio.Task[None] | None = None

    def tell(self, command: int) -> None:
        self.commands.append(command)
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class Worker(Agent):
    """Does in each prompt what the world's steps say."""

    def __init__(self, world: JoinedWorld) -> None:
        self.world = world

    async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
        session_id = f"s{self.world.number()}"

        async def announce() -> None:
            await self.world.tell_mode(ctx.session(session_id))

        ctx.after_response(announce)
        return v1_unstable.NewSessionResponse(session_id=session_id)

    async def close_session(self, params: Any, ctx: Any) -> v1.CloseSessionResponse:
        return v1.CloseSessionResponse()

    async def set_session_mode(self, params: Any, ctx: Any) -> v1.SetSessionModeResponse:
        await self.world.tell_mode(ctx.session())
        return v1.SetSessionModeResponse()

    async def prompt(self, turn: Turn) -> str | None:
        exchange = self.world.exchanges[int(turn.text)]
        exchange.turn = turn
        while not turn.cancelled:
            while not exchange.commands:
                exchange.waiting = self.world.loop.create_future()
                canceller = asyncio.ensure_future(turn.wait_cancelled())
                await asyncio.wait(
                    (exchange.waiting, canceller), return_when=asyncio.FIRST_COMPLETED
                )
                canceller.cancel()
                if turn.cancelled:
                    break
            if turn.cancelled:
                break
            command = exchange.commands.pop(0) % 8
            if command == 7:
                break
            if command == 6:
                await self.world.tell_mode(turn.session)
            elif command == 5:
                await self._ask(exchange, turn)
            else:
                await self.world.say(exchange, turn)
        if exchange.number % 2:
            await self.world.say(exchange, turn)  # winding down may tell something, too
        exchange.returned = True
        return None

    async def _ask(self, exchange: Exchange, turn: Turn) -> None:
        number = f"{exchange.number}"
        # With an id of ours: one that the library makes up would be another in each run.
        call = v1.ToolCallUpdate(tool_call_id=f"call {self.world.number()}", title=number)
        answer = await turn.ask_permission(call)
        if bool(answer) and (exchange.number % 3 or turn.cancelled):
            self.world.violated(f"prompt {exchange.number} was allowed what nobody allowed")


class JoinedWorld(World):
    """Steps of both users and of the stream between."""

    mistakes = ("handler_crash",)  # none of ours is meant to fail
    weights = {  # noqa: RUF012  (a table)
        "to_agent": 20,
        "to_client": 22,
        "turn": 14,
        "time": 2,
        "new": 3,
        "prompt": 10,
        "act": 40,
        "cancel": 4,
        "set_mode": 4,
        "subscribe": 3,
        "close": 1,
        "die": 1,
        "aclose": 1,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self.client_link = Link(self._from_client, self._reaching_client, self.failed)
        self.agent_link = Link(self._from_agent, self._reaching_agent, self.failed)
        limits = Limits(cancel_backstop=BACKSTOP)
        self.client_peer = ClientPeer(
            self.agent_link, Worker(self), limits=limits, telemetry=self.hear
        )
        self.agent_link.before = self.client_peer.connection.flush
        self.agent_peer: AgentPeer
        self.exchanges: dict[int, Exchange] = {}
        self.sessions: list[Session] = []
        #: Per session, everything that was said, in order; and what those who watch have got.
        self.said: dict[str, list[str]] = {}
        self.watched: dict[str, list[str]] = {}
        self.arrived: dict[str, int] = {}
        #: Session, how much of it had arrived when it joined, what it got.
        self.subscribers: list[tuple[str, int, list[str]]] = []
        self.dead = False
        #: A turn was given up that goes on at the agent: what is whose cannot be told any more.
        self.impatient = False
        self.closed: set[str] = set()
        self.open_calls: set[int] = set()
        self._watching = variant % 2
        self._numbers = 0
        self._responses: dict[Any, int] = {}

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -------------------------------------------------------------- the stream

    def _from_client(self, frame: dict[str, Any]) -> None:
        self.note(f"  client: {frame}"[:160])
        self._count(frame, "client")
        self.agent_link.incoming += json.dumps(frame).encode() + b"\n"

    def _from_agent(self, frame: dict[str, Any]) -> None:
        self.note(f"  agent: {frame}"[:160])
        self._count(frame, "agent")
        self.client_link.incoming += json.dumps(frame).encode() + b"\n"

    def _reaching_agent(self, frame: dict[str, Any]) -> None:
        method = frame.get("method")
        if method == "session/prompt":
            number = int(frame["params"]["prompt"][0]["text"])
            self.exchanges[number].prompt_id = frame["id"]
        elif method == "session/cancel":
            for exchange in self.exchanges.values():
                if exchange.session_id == frame["params"]["sessionId"]:
                    open_ = exchange.prompt_id is not None and not exchange.responded
                    exchange.cancelled |= open_

    def _reaching_client(self, frame: dict[str, Any]) -> None:
        if frame.get("method") == "session/update":
            session_id = frame["params"]["sessionId"]
            self.arrived[session_id] = self.arrived.get(session_id, 0) + 1

    def _count(self, frame: dict[str, Any], side: str) -> None:
        """DESIGN §4.7, seen from the wire."""
        if "method" in frame:
            return
        for exchange in self.exchanges.values():
            if side == "agent" and exchange.prompt_id == frame["id"]:
                exchange.responded = True
        key = (side, frame["id"])
        self._responses[key] = self._responses.get(key, 0) + 1
        if self._responses[key] > 1:
            self.violated(f"a second response to {frame['id']} by the {side}")

    async def do_to_agent(self, a: int, b: int) -> None:
        self.agent_link.deliver(_SIZES[b % len(_SIZES)])

    async def do_to_client(self, a: int, b: int) -> None:
        for _ in range(1 + a % 3):
            self.client_link.deliver(_SIZES[b % len(_SIZES)])

    async def pump(self, rounds: int) -> None:
        for _ in range(rounds):
            self.agent_link.deliver(1 << 20)
            self.client_link.deliver(1 << 20)
            await self.turns(4)

    # -------------------------------------------------------------- life

    async def begin(self) -> None:
        self.start(self.client_peer.run())
        on_update = self._watch if self._watching else None
        client = Client(permissions=self._decide, on_update=on_update)
        opening = self.loop.create_task(self._connect(client))
        await self.turns(2)
        await self.pump(3)
        self.agent_peer = await opening
        self.client_link.before = self.agent_peer.connection.flush
        await self.do_new(0, 0)
        await self.turns(2)
        await self.pump(3)

    async def _connect(self, client: Client) -> AgentPeer:
        limits = Limits(cancel_backstop=BACKSTOP)
        return await connect(self.client_link, client=client, limits=limits, telemetry=self.hear)

    async def _decide(self, params: Any, ctx: Any) -> bool:
        await asyncio.sleep(0)
        return int(params.tool_call.title) % 3 == 0

    def _watch(self, update: Any) -> None:
        self.watched.setdefault(update.session_id, []).append(_text(update))

    # -------------------------------------------------------------- the agent's side

    async def say(self, exchange: Exchange, turn: Turn) -> None:
        text = f"{self.number()}"
        await self._tell(exchange.session_id, text, turn.say(text), exchange)

    async def tell_mode(self, session: Any) -> None:
        text = f"m{self.number()}"
        await self._tell(session.session_id, text, session.set_mode(text), None)

    async def _tell(
        self, session_id: str, text: str, telling: Any, exchange: Exchange | None
    ) -> None:
        """Note what is told before it is, and take the note back where it was refused."""
        said = self.said.setdefault(session_id, [])
        said.append(text)
        if exchange is not None:
            exchange.said.append(text)
        try:
            await telling
        except AntiphonError:
            said.remove(text)
            if exchange is not None:
                exchange.said.remove(text)

    async def do_act(self, a: int, b: int) -> None:
        running = [e for e in self.exchanges.values() if e.turn is not None and not e.returned]
        if running:
            running[a % len(running)].tell(b)

    # -------------------------------------------------------------- the client's side

    def session_at(self, a: int) -> Session | None:
        return self.sessions[a % len(self.sessions)] if self.sessions else None

    async def _call(self, work: Any) -> None:
        number = self.number()
        self.open_calls.add(number)
        try:
            await work
        except ConnectionClosed:
            if not self.dead:
                self.violated("a call raised ConnectionClosed, and the link is there")
        except AntiphonError as error:
            self.note(f"  a call raised {error!r}")
            self.impatient |= isinstance(error, RequestTimeout)
        finally:
            self.open_calls.discard(number)

    async def do_new(self, a: int, b: int) -> None:
        async def new() -> None:
            self.sessions.append(await self.agent_peer.new_session(cwd="/"))

        if len(self.sessions) < 4:
            self.start(self._call(new()))

    async def do_set_mode(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is not None:
            self.start(self._call(session.set_mode("x")))

    async def do_close(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is not None and b % 2:
            self.closed.add(session.session_id)
            self.sessions.remove(session)
            self.start(self._call(session.close()))

    async def do_prompt(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or session.turn is not None:
            return
        exchange = Exchange(self.number(), session.session_id)
        self.exchanges[exchange.number] = exchange
        leave = 2 if b % 5 == 4 else -1
        exchange.task = self.start(self._call(self._prompt(exchange, session, leave)))

    async def _prompt(self, exchange: Exchange, session: Session, leave: int) -> None:
        async with session.prompt(str(exchange.number)) as turn:
            async for update in turn:
                if update.label != "turn":
                    self.violated(
                        f"an update of prompt {exchange.number} is labelled {update.label}"
                    )
                text = _text(update)
                if not text.startswith("m"):
                    exchange.got.append(text)
                if not self.impatient and exchange.got != exchange.said[: len(exchange.got)]:
                    self.violated(
                        f"prompt {exchange.number}: said {exchange.said}, got {exchange.got}"
                    )
                if len(exchange.got) == leave:
                    exchange.left = True
                    break
        exchange.stop_reason = turn.stop_reason
        exchange.answered = True
        if exchange.left and turn.stop_reason is None:  # given up, and perhaps still running there
            self.impatient = True
        if exchange.left or self.impatient or session.session_id in self.closed:
            return
        if exchange.got != exchange.said:
            self.violated(f"prompt {exchange.number}: said {exchange.said}, got {exchange.got}")
        if self._watching:
            missing = set(exchange.said) - set(self.watched.get(session.session_id, ()))
            if missing:
                self.violated(f"prompt {exchange.number} ended before {missing} was observed")

    async def do_cancel(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or session.turn is None or self.dead:
            return
        await session.cancel()

    async def do_subscribe(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or self.dead:
            return
        subscription = session.updates()
        got: list[str] = []
        joined = self.arrived.get(session.session_id, 0)
        self.subscribers.append((session.session_id, joined, got))

        async def follow() -> None:
            async for update in subscription:
                got.append(_text(update))  # noqa: PERF401  (seen one by one, not at the end)

        self.start(follow())

    async def do_die(self, a: int, b: int) -> None:
        if a >= 40 and not self.dead:
            self.dead = True
            self.client_link.die(None)
            self.agent_link.die(OSError("the link broke"))
            await self.turns(12)
            if self.open_calls:
                self.violated(f"{len(self.open_calls)} calls wait although the link is gone")

    async def do_aclose(self, a: int, b: int) -> None:
        if a >= 40 and not self.dead:
            self.start(self._close(client=bool(b % 2)))

    async def _close(self, *, client: bool) -> None:
        self.dead = True
        if client:
            await self.agent_peer.aclose()
            self.agent_link.die(None)
        else:
            await self.client_peer.connection.aclose()
            self.client_link.die(None)

    # -------------------------------------------------------------- the end

    async def end(self) -> None:
        for _ in range(40):
            if self.dead or self.violations:
                break
            crossed = self.client_link.crossed + self.agent_link.crossed
            for exchange in self.exchanges.values():
                exchange.tell(7)
            await self.pump(2)
            if self.client_link.crossed + self.agent_link.crossed == crossed:
                if not self.open_calls:
                    break
                await asyncio.sleep(BACKSTOP + 1)
        else:
            self.violated(f"{len(self.open_calls)} calls are never answered")
        at_rest = not self.dead and not self.violations
        if at_rest:
            self._check_rest()
        await self._close(client=True)
        await self.turns(10)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if at_rest:
            self._check_watchers()

    def _check_rest(self) -> None:
        for exchange in self.exchanges.values():
            if exchange.answered and not exchange.left and exchange.session_id not in self.closed:
                expected = "cancelled" if exchange.cancelled else "end_turn"
                if exchange.stop_reason != expected:
                    self.violated(f"prompt {exchange.number} ended as {exchange.stop_reason}")
        for side, connection in (
            ("client", self.agent_peer.connection),
            ("agent", self.client_peer.connection),
        ):
            if connection.protocol.calls or connection.protocol.requests:
                self.violated(f"at rest the {side} has open calls")
        # One whose close was not answered in time is known here still.
        for session in self.agent_peer.sessions.values():
            subscription = session.updates()
            while True:
                taking = subscription.__anext__()
                try:
                    taking.send(None)
                except (StopIteration, StopAsyncIteration) as taken:
                    if isinstance(taken, StopAsyncIteration):
                        break
                else:
                    taking.close()
                    break
            subscription.close()
        if self.agent_peer.connection.queued_bytes:
            self.violated(f"at rest {self.agent_peer.connection.queued_bytes} bytes are queued")

    def _check_watchers(self) -> None:
        for session in self.sessions:
            session_id = session.session_id
            said = self.said.get(session_id, [])
            watched = self.watched.get(session_id, [])
            if self._watching and watched != said:
                self.violated(f"{session_id}: said {said}, observed {watched}")
        for session_id, joined, got in self.subscribers:
            said = self.said.get(session_id, [])
            head = len(got) - len(said[joined:])
            # Before what came from then on, the first one has what nobody else had seen.
            earlier = [text for text in said[:joined] if text in got[: max(head, 0)]]
            if session_id not in self.closed and got != earlier + said[joined:]:
                self.violated(f"{session_id}: said {said}, a subscriber at {joined} got {got}")


def _text(update: Any) -> str:
    value = update.value
    if isinstance(value, v1.CurrentModeUpdate):
        return value.current_mode_id
    return str(value.content.text)
