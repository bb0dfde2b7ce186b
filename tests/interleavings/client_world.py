"""Our client against an agent that says anything: one world, one connection, one program.

The agent is nothing but messages that the steps lay on the link. The client's user is a set of tasks:
prompts that are iterated, awaited or left, subscribers that take when a step says so, observers that
return when a step says so, calls, closes.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from antiphon import (
    AntiphonError,
    Client,
    ConnectionClosed,
    DeliveryGap,
    Limits,
    RequestError,
    RequestTimeout,
    SilenceTimeout,
    connect,
)
from tests.interleavings.link import Link
from tests.interleavings.model import CallModel, Consumer, DeliveryModel
from tests.interleavings.world import Step, World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon import AgentPeer, Session, Update

__all__ = ["ClientWorld"]

BACKSTOP = 30.0
PROMPT_BOUND = 7.3
SILENCE = 6.1
_NUMBER = re.compile(rb"#(\d+)#")
_CAPABILITIES: dict[str, Any] = {
    "loadSession": True,
    "sessionCapabilities": {"close": {}, "resume": {}},
}


class UserCall:
    """A task of the user that waits for an answer."""

    def __init__(self, number: int, what: str, *, observing: bool = False) -> None:
        self.number = number
        self.what = what
        self.observing = observing
        #: Of a close: the session's.
        self.session_id = ""
        #: What the user's own code waits for in the middle of it.
        self.inner: UserCall | None = None
        self.task: asyncio.Task[Any] | None = None
        self.left = False
        self.error: BaseException | None = None
        self.got: list[tuple[int, str]] = []

    def __repr__(self) -> str:
        return f"{self.what} {self.number}"


class Question:
    """A request of the agent."""

    def __init__(self, id_: Any, method: str, session_id: str) -> None:
        self.id = id_
        self.method = method
        self.session_id = session_id
        self.sent = 1
        self.delivered = 0
        self.responses: list[dict[str, Any]] = []
        #: Set where the contract leaves but one answer.
        self.must_be_cancelled = False
        #: Set where a decision and a cancellation may cross.
        self.may_be_cancelled = False
        self.withdrawn = False
        self.decided: str | None = None
        self.decision: asyncio.Future[str | None] | None = None

    @property
    def undecided(self) -> bool:
        return self.decision is not None and not self.decision.done()


class Watcher(Client):
    """Answers permission requests when the world says so."""

    def __init__(self, world: ClientWorld) -> None:
        super().__init__(on_update=world.watch if world.model.watches_all else None)
        self.world = world

    async def request_permission(self, params: Any, ctx: Any) -> Any:
        question = self.world.questions[params.tool_call.tool_call_id]
        question.decision = self.world.loop.create_future()
        try:
            decision = await question.decision
        except asyncio.CancelledError:
            if question.id % 2:  # some handlers take no notice
                return await self._decide("allow", params, ctx)
            raise
        if decision == "fail":
            msg = "the handler fails"
            raise ValueError(msg)
        return await self._decide(decision, params, ctx)

    async def _decide(self, decision: str | None, params: Any, ctx: Any) -> Any:
        async def decide(_params: Any, _ctx: Any) -> str | None:
            return decision

        return await Client(permissions=decide).request_permission(params, ctx)


class ClientWorld(World):
    """Steps of the agent, of the link and of the client's user, against `DeliveryModel`."""

    weights = {  # noqa: RUF012  (a table)
        "deliver": 30,
        "turn": 12,
        "time": 3,
        "update": 22,
        "answer": 14,
        "answer_wrongly": 3,
        "ask": 6,
        "withdraw": 2,
        "noise": 2,
        "prompt": 12,
        "subscribe": 4,
        "take": 8,
        "unsubscribe": 2,
        "observe": 3,
        "unobserve": 1,
        "release": 5,
        "cancel": 4,
        "cancel_task": 2,
        "set_mode": 5,
        "new": 3,
        "load": 3,
        "close": 2,
        "decide": 6,
        "die": 1,
        "aclose": 1,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self._variant = variant
        self.model = DeliveryModel(BACKSTOP)
        self.model.watches_all = variant % 4 == 0
        self.link = Link(self._written, self._arriving, self.failed)
        self.sessions: dict[str, Session] = {}
        self.calls: list[UserCall] = []
        self.by_number: dict[int, UserCall] = {}
        self.questions: dict[str, Question] = {}
        self.by_id: dict[Any, Question] = {}
        #: What our client asked and the agent has not answered: (id, method, params).
        self.asked: list[tuple[Any, str, dict[str, Any]]] = []
        self.answered: list[Any] = []
        self.subscriptions: list[tuple[Consumer, Any]] = []
        self.observers: list[tuple[Consumer, Callable[[], None]]] = []
        self.gates: list[asyncio.Future[None]] = []
        self._numbers = 0
        self._ids = 0
        self._sessions_made = 0
        self._burned: set[str] = set()
        self._closing_of: set[str] = set()
        self._closing: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def _tight(self) -> bool:
        """Whether the budget is spent all the time."""
        return self._variant % 6 in (1, 2)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -------------------------------------------------------------- the edge

    def _written(self, frame: dict[str, Any]) -> None:
        self.note(f"  out {_short(frame)}")
        method = frame.get("method")
        if method is None:
            self._response_written(frame)
        elif "id" in frame:
            if method != "initialize":
                self.model.sent_request(frame["id"], method, frame.get("params") or {})
            if method == "session/close" and frame["params"]["sessionId"] not in self._closing_of:
                # Opened for a user who no longer waits: it is closed, and forgotten at once.
                self.model.forget(frame["params"]["sessionId"])
                self._burned.add(frame["params"]["sessionId"])
            self.asked.append((frame["id"], method, frame.get("params") or {}))
        elif method == "$/cancel_request":
            self.model.gave_up(frame["params"]["requestId"], self.loop.time())
        elif method == "session/cancel":
            session_id = frame["params"]["sessionId"]
            self.model.cancel_sent(session_id, self.loop.time())
            for question in self.questions.values():
                if question.session_id == session_id and question.delivered:
                    self._expect_cancelled(question)

    def _expect_cancelled(self, question: Question) -> None:
        if not question.responses and question.sent == 1:
            question.may_be_cancelled = True
            question.must_be_cancelled = question.decided is None

    def _response_written(self, frame: dict[str, Any]) -> None:
        question = self.by_id.get(frame["id"])
        if question is None:
            if frame["id"] is not None:
                self.violated(f"a response to what was not asked: {frame}")
            return
        question.responses.append(frame)
        if len(question.responses) > question.sent or not question.delivered:
            self.violated(f"request {question.id} has the responses {question.responses}")
        if question.method == "session/request_permission" and question.sent == 1:
            self._check_permission(question, frame)
        elif question.method != "session/request_permission" and "error" not in frame:
            self.violated(f"what is not served was answered: {frame}")

    def _check_permission(self, question: Question, frame: dict[str, Any]) -> None:
        outcome = frame.get("result", {}).get("outcome", {})
        selected = outcome.get("optionId") if outcome.get("outcome") == "selected" else None
        if question.must_be_cancelled and outcome.get("outcome") != "cancelled":
            self.violated(f"a question in a cancelled turn was answered {frame}")
        if selected == "allow" and question.decided != "allow":
            self.violated(f"a question was allowed by nobody: {frame}")
        firm = not question.may_be_cancelled and not question.withdrawn
        if firm and question.decided in ("allow", "reject") and selected != question.decided:
            self.violated(f"a question was decided {question.decided} and answered {frame}")

    def _arriving(self, frame: dict[str, Any]) -> None:
        self.note(f"  in {_short(frame)}")
        if self.model.lost:
            return
        method, now = frame.get("method"), self.loop.time()
        if method == "session/update":
            params = frame["params"]
            self.model.update(params["sessionId"], params["update"]["n"], now)
        elif method == "$/cancel_request":
            question = self.by_id.get(frame["params"]["requestId"])
            if question is not None:
                question.withdrawn = True
        elif method is not None:
            question = self.by_id[frame["id"]]
            question.delivered += 1
            session = self.model.sessions.get(question.session_id)
            turn = None if session is None else session.turn
            if session is not None and session.winding_down is not None:
                if self.loop.time() < session.winding_until:
                    self._expect_cancelled(question)
            elif turn is not None and self._is_cancelled(turn.number):
                self._expect_cancelled(question)
        elif "id" in frame:
            ok = "error" not in frame
            call = self.model.calls.get(frame["id"])
            closes = call is not None and call.method == "session/close"
            if ok and call is not None and closes and not (call.answered or call.given_up):
                self._questions_end_with(call.session_id)
            result: dict[str, Any] = frame.get("result") or {}
            self.model.answered(frame["id"], ok=ok, result=result, now=now)

    def _questions_end_with(self, session_id: str | None) -> None:
        """A session is closed in the middle of a turn: nobody is asked for it any more."""
        session = self.model.sessions.get(session_id or "")
        if session is None or session.turn is None:
            return
        for question in self.questions.values():
            if question.session_id == session_id and question.delivered:
                self._expect_cancelled(question)

    def _is_cancelled(self, number: int) -> bool:
        return number in self._cancelled_turns

    # -------------------------------------------------------------- life

    async def begin(self) -> None:
        self._cancelled_turns: set[int] = set()
        limits = Limits(cancel_backstop=BACKSTOP)
        if self._variant % 6 == 1:  # reading stops and goes on all the time
            limits = Limits(cancel_backstop=BACKSTOP, queue_bytes=1200, session_bytes=500)
        elif self._variant % 6 == 2:
            limits = Limits(cancel_backstop=BACKSTOP, queue_updates=4, session_updates=2)
        opening = self.loop.create_task(self._connect(limits))
        await self.turns(2)
        asked = self.asked.pop()
        self.link.put(_result(asked[0], {"protocolVersion": 1, "agentCapabilities": _CAPABILITIES}))
        self.link.deliver(1 << 20)
        self.peer: AgentPeer = await opening
        self.link.before = self.peer.connection.flush
        self.start_call("session/new", self._new)
        await self.turns(2)
        self._answer(0, 0)
        self.link.deliver(1 << 20)
        await self.turns(3)

    async def _connect(self, limits: Limits) -> AgentPeer:
        # With a hook every update is told to it as well, which is another way through.
        hook = self.hear if self._variant % 5 else None
        return await connect(self.link, client=Watcher(self), limits=limits, telemetry=hook)

    async def step(self, step: Step) -> None:
        self.sync()
        await super().step(step)

    def sync(self) -> None:
        """Let the model see what was written, before anything else is held against it."""
        self.peer.connection.flush()

    def session_at(self, index: int) -> Session | None:
        known = list(self.sessions.values())
        return known[index % len(known)] if known else None

    def some_session_id(self, index: int) -> str:
        ids = [*self.model.sessions, *sorted(self._burned), f"s{self._sessions_made + 1}"]
        return ids[index % len(ids)]

    # -------------------------------------------------------------- the agent's steps

    async def do_update(self, a: int, b: int) -> None:
        """One to three updates, for any session; some of kinds that nobody knows."""
        known = list(self.model.sessions)
        for _ in range(1 + b % 3):
            # What is kept for sessions not yet known is bounded by the budget as well.
            familiar = a < 58 or self._variant % 6 == 1
            if not known and self._variant % 6 == 1:
                return
            session_id = known[a % len(known)] if known and familiar else self.some_session_id(a)
            number = self.number()
            update: dict[str, Any] = {"n": number, "text": f"#{number}#"}
            match (a + b) % 7:
                case 0:
                    update["sessionUpdate"] = "something_new"
                case 1:
                    update |= {"sessionUpdate": "tool_call", "toolCallId": 7}
                case _:
                    content = {"type": "text", "text": "words"}
                    update |= {"sessionUpdate": "agent_message_chunk", "content": content}
            params = {"sessionId": session_id, "update": update}
            self.link.put({"jsonrpc": "2.0", "method": "session/update", "params": params})

    async def do_answer(self, a: int, b: int) -> None:
        self._answer(a, b)

    def _answer(self, a: int, b: int) -> None:
        if not self.asked:
            return
        id_, method, params = self.asked.pop(a % len(self.asked))
        self.answered.append(id_)
        if b % 8 == 7:
            if method in ("session/load", "session/resume"):
                self._burned.add(params["sessionId"])
            error = {"code": -32000, "message": "no"}
            self.link.put({"jsonrpc": "2.0", "id": id_, "error": error})
            return
        result: dict[str, Any] = {}
        if method == "session/new":
            self._sessions_made += 1
            result["sessionId"] = f"s{self._sessions_made}"
        elif method == "session/prompt":
            result["stopReason"] = "end_turn"
        elif method == "session/close":
            self._burned.add(params["sessionId"])
        self.link.put(_result(id_, result))

    async def do_answer_wrongly(self, a: int, b: int) -> None:
        """An id that was answered already, of another type, or of nobody."""
        match b % 3:
            case 0 if self.answered:
                id_: Any = self.answered[a % len(self.answered)]
            case 1 if self.asked:
                id_ = str(self.asked[a % len(self.asked)][0])
            case _:
                id_ = 70_000 + a
        self.link.put(_result(id_, {"stopReason": "end_turn", "sessionId": "stranger"}))

    async def do_ask(self, a: int, b: int) -> None:
        """A request of the agent: permission, a file that nobody lends, an id a second time."""
        if b % 9 == 8 and self.questions:
            question = list(self.questions.values())[a % len(self.questions)]
            question.sent += 1
        else:
            self._ids += 1
            method = "fs/read_text_file" if b % 5 == 4 else "session/request_permission"
            question = Question(self._ids, method, self.some_session_id(a))
            self.questions[f"t{self._ids}"] = question
            self.by_id[self._ids] = question
        params: dict[str, Any] = {"sessionId": question.session_id}
        if question.method == "fs/read_text_file":
            params["path"] = "/etc/motd"
        else:
            params["toolCall"] = {"toolCallId": f"t{question.id}", "title": "x"}
            params["options"] = [
                {"optionId": "allow", "name": "yes", "kind": "allow_once"},
                {"optionId": "reject", "name": "no", "kind": "reject_once"},
            ]
        frame = {"jsonrpc": "2.0", "id": question.id, "method": question.method}
        self.link.put(frame | {"params": params})

    async def do_withdraw(self, a: int, b: int) -> None:
        if self.questions:
            question = list(self.questions.values())[a % len(self.questions)]
            params = {"requestId": question.id if b % 4 else str(question.id)}
            self.link.put({"jsonrpc": "2.0", "method": "$/cancel_request", "params": params})

    async def do_noise(self, a: int, b: int) -> None:
        noise = (
            b"",
            b"ready.",
            b"[INFO] x",
            b"\xff\xfe",
            b"null",
            b"[]",
            b'{"jsonrpc":"2.0"',
            b" ",
        )
        self.link.put(noise[a % len(noise)])

    # -------------------------------------------------------------- the link's steps

    async def do_deliver(self, a: int, b: int) -> None:
        sizes = (1, 7, 40, 150, 400, 1000, 1 << 20)
        for _ in range(1 + a % 3):
            self.link.deliver(sizes[b % len(sizes)])

    async def do_time(self, a: int, b: int) -> None:
        if self.model.lost:
            # The closing grace is over for observers that do not return.
            for consumer in self.model.consumers:
                consumer.may_miss_the_rest |= consumer.observes
        await super().do_time(a, b)

    async def do_die(self, a: int, b: int) -> None:
        if a < 40:  # seldom: the rest of such a program is short
            return
        if not self.link.lost:
            self.model.connection_lost()
            self.link.die(None if b % 2 else OSError("the link broke"))
            await self._everything_fails_at_once()

    async def do_aclose(self, a: int, b: int) -> None:
        if a >= 40:
            await self._aclose()

    async def _aclose(self) -> None:
        if self._closing is None:
            self._closing = self.start(self._close_peer())
        await self._everything_fails_at_once()

    async def _close_peer(self) -> None:
        self.sync()
        self.model.connection_lost()
        await self.peer.aclose()

    async def _everything_fails_at_once(self) -> None:
        """DESIGN §4.6: no call waits longer than it takes to run its task."""
        await self.turns(12)
        for call in self.calls:
            if call.task is None or call.task.done() or call.observing:
                continue
            inner = call.inner
            if inner is not None and inner.task is not None and not inner.task.done():
                continue  # which is looked at itself
            if all(model.mark is None for model in self._models_of(call)):
                self.violated(f"{call!r} still waits although the link is gone")

    # -------------------------------------------------------------- the user's steps

    def start_call(
        self,
        what: str,
        run: Callable[[UserCall], Awaitable[None]],
        *,
        observing: bool = False,
    ) -> UserCall:
        call = UserCall(self.number(), what, observing=observing)
        self.calls.append(call)
        self.by_number[call.number] = call
        call.task = self.start(self._run(call, run))
        return call

    async def _run(self, call: UserCall, run: Callable[[UserCall], Awaitable[None]]) -> None:
        try:
            await run(call)
            self.note(f"  {call!r} returned")
        except asyncio.CancelledError as error:
            call.error = error
            self.note(f"  {call!r} was cancelled")
        except AntiphonError as error:
            call.error = error
            self.note(f"  {call!r} raised {error!r}")
            if isinstance(error, ConnectionClosed) and not self.model.lost:
                self.violated(f"{call!r} raised {error!r}, and the link is there")
        except Exception as error:
            call.error = error
            self.violated(f"{call!r} raised {error!r}")
        if call.error is None or isinstance(call.error, RequestError):
            self.visible(call)

    def _models_of(self, call: UserCall) -> list[CallModel]:
        """Its request; of several closes of one session nothing tells which is which."""
        return [
            model
            for model in self.model.calls.values()
            if model.method == call.what
            and (model.number, model.session_id or "")
            in ((call.number, model.session_id or ""), (-1, call.session_id))
        ]

    def visible(self, call: UserCall) -> None:
        """A response is seen: DESIGN §4.2 says what must have been delivered before."""
        self.sync()
        models = self._models_of(call)
        if all(model.mark is None for model in models):
            if call.what != "session/close":
                self.violated(f"{call!r} has an answer that never came")
            return
        if call.observing or len(models) > 1:
            return
        model = models[0]
        assert model.mark is not None
        for consumer, count in model.mark:
            if consumer.observes:
                if consumer.live and consumer.returned < count:
                    self.violated(
                        f"{call!r} was answered before {consumer.name} had returned from "
                        f"{consumer.expected[consumer.returned : count]}"
                    )
            elif consumer.live:
                for other, subscription in self.subscriptions:
                    if other is consumer:
                        self._take_all(consumer, subscription)
                        if len(consumer.got) < count:
                            self.violated(
                                f"{call!r} was answered before {consumer.name} had "
                                f"{consumer.expected[len(consumer.got) : count]} in its queue"
                            )

    def _see(self, consumer: Consumer, update: Update) -> None:
        found = _NUMBER.search(update.raw)
        assert found is not None
        consumer.got.append((int(found[1]), update.label))
        if fault := consumer.fault(complete=False):
            self.violated(fault)

    async def do_new(self, a: int, b: int) -> None:
        if len(self.model.sessions) < 4:
            self.start_call("session/new", self._new)

    async def _new(self, call: UserCall) -> None:
        session = await self.peer.new_session(cwd=f"/{call.number}")
        self.sessions[session.session_id] = session

    async def do_set_mode(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is not None:
            self.start_call("session/set_mode", lambda call: session.set_mode(str(call.number)))

    async def do_close(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or b % 2:
            return
        model = self.model.sessions.get(session.session_id)
        if model is None or model.closing or model.loading:
            return

        async def close(call: UserCall) -> None:
            call.session_id = session.session_id
            for consumer in model.consumers:
                if not consumer.observes:  # let go before the request leaves, if it does
                    consumer.live = False
                    consumer.may_miss_the_rest = True
            model.backlog = []
            if model.turn is not None:
                model.turn.consumer.may_miss_the_rest = True
                model.turn.consumer.may_have_a_hole = self._tight
            self._closing_of.add(session.session_id)
            await session.close()
            self.sessions.pop(session.session_id, None)

        self.start_call("session/close", close)

    async def do_load(self, a: int, b: int) -> None:
        """Load or resume: awaited, or entered and its replay iterated."""
        # Not one whose `session/new` is answered and whose opener does not know yet.
        known = [i for i in self.model.sessions if i in self.sessions and i not in self._burned]
        session_id = known[a % len(known)] if known and a % 2 else f"old{a}"
        if session_id in self._burned:
            return
        model = self.model.sessions.get(session_id)
        if model is not None and (model.closing or model.turn is not None or model.loading):
            return
        what = "session/load" if b % 3 else "session/resume"

        async def load(call: UserCall) -> None:
            opener = self.peer.load_session if b % 3 else self.peer.resume_session
            opening = opener(session_id, cwd=f"/{call.number}")
            if b % 2:
                session = await opening
            else:
                async with opening as session:
                    await self._replay(session)
            self.sessions[session_id] = session

        self.start_call(what, load)

    async def _replay(self, session: Session) -> None:
        self.sync()
        model = self.model.sessions[session.session_id]
        replay = session.replay()
        consumer = self.model.joined(model.watch_replay(f"the replay of {session.session_id}"))
        self.note(f"  {consumer.name} begins")
        try:
            async for update in replay:
                self._see(consumer, update)
        except asyncio.CancelledError:
            consumer.may_miss_the_rest = True
            raise
        finally:
            replay.close()
        if self.model.lost or model.closing:
            return
        if fault := consumer.fault(complete=True):
            self.violated(fault)

    # prompts

    async def do_prompt(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None:
            return
        model = self.model.sessions.get(session.session_id)
        if model is None or model.loading or (model.turn is not None and a % 8):
            return
        run = (
            self._await_prompt,
            self._iterate_prompt,
            self._iterate_prompt,
            self._leave_prompt,
            self._call_while_iterating,
            self._cancel_while_iterating,
            self._iterate_bounded_prompt,
            self._iterate_prompt_that_must_not_be_silent,
        )[b % 8]
        self.start_call("session/prompt", lambda call: run(call, session, 1 + b % 3))

    def _turn_of(self, call: UserCall, session: Session) -> Consumer:
        self.sync()
        consumer = self.model.turns[call.number].consumer
        consumer.may_have_a_hole |= self._tight and session.session_id in self._closing_of
        return consumer

    async def _await_prompt(self, call: UserCall, session: Session, count: int) -> None:
        outcome = await session.prompt(str(call.number))
        consumer = self._turn_of(call, session)
        for update in outcome.updates:
            self._see(consumer, update)
        self._turn_ended_well(consumer)

    def _turn_is_complete(self, consumer: Consumer) -> None:
        if fault := consumer.fault(complete=True):
            self.violated(fault)

    def _turn_ended_well(self, consumer: Consumer) -> None:
        """Without an error: then nothing is missing, not even of a session that was being closed."""
        consumer.may_miss_the_rest = consumer.may_have_a_hole = False
        self._turn_is_complete(consumer)

    async def _iterate_prompt(
        self,
        call: UserCall,
        session: Session,
        count: int,
        timeout: float | None = None,
        silence: float | None = None,
    ) -> None:
        consumer: Consumer | None = None
        try:
            prompt = session.prompt(str(call.number), timeout=timeout, silence=silence)
            async with prompt as turn:
                consumer = self._turn_of(call, session)
                if session.session_id in self.model.sessions:
                    self.model.sessions[session.session_id].heard_at = self.loop.time()
                async for update in turn:
                    self._see(consumer, update)
        except asyncio.CancelledError:
            raise
        except DeliveryGap:
            if consumer is None or not consumer.may_have_a_hole:
                self.violated(f"{call!r} has a gap that nothing has caused")
            raise
        except AntiphonError:
            if consumer is not None:
                self._turn_is_complete(consumer)
            raise
        self._turn_ended_well(consumer)

    async def _iterate_bounded_prompt(self, call: UserCall, session: Session, count: int) -> None:
        with suppress(RequestTimeout):
            await self._iterate_prompt(call, session, count, PROMPT_BOUND)
            return
        call.error = RequestTimeout("session/prompt", PROMPT_BOUND)

    async def _iterate_prompt_that_must_not_be_silent(
        self, call: UserCall, session: Session, count: int
    ) -> None:
        model = self.model.sessions.get(session.session_id)
        try:
            await self._iterate_prompt(call, session, count, silence=SILENCE)
        except SilenceTimeout as error:
            call.error = error
            if model is not None and self.loop.time() < model.heard_at + SILENCE - 0.001:
                self.violated(f"{call!r} was called silent at {self.loop.time()}: {model.heard_at}")
        except RequestTimeout as error:  # it was cancelled, and not answered
            call.error = error

    async def _leave_prompt(self, call: UserCall, session: Session, count: int) -> None:
        async with session.prompt(str(call.number)) as turn:
            consumer = self._turn_of(call, session)
            async for update in turn:
                self._see(consumer, update)
                count -= 1
                if not count:
                    consumer.may_miss_the_rest = call.left = True
                    break
        if call.left and turn.stop_reason is None:
            call.error = RequestTimeout("session/prompt", BACKSTOP)

    async def _call_while_iterating(self, call: UserCall, session: Session, count: int) -> None:
        async with session.prompt(str(call.number)) as turn:
            consumer = self._turn_of(call, session)
            async for update in turn:
                self._see(consumer, update)
                if count:
                    count -= 1
                    call.inner = inner = self.start_call(
                        "session/set_mode", lambda call: session.set_mode(str(call.number))
                    )
                    assert inner.task is not None
                    await inner.task
        self._turn_ended_well(consumer)

    async def _cancel_while_iterating(self, call: UserCall, session: Session, count: int) -> None:
        async with session.prompt(str(call.number)) as turn:
            consumer = self._turn_of(call, session)
            async for update in turn:
                self._see(consumer, update)
                count -= 1
                if not count:
                    await turn.cancel()
        self._turn_ended_well(consumer)

    async def do_cancel(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is not None and not self.model.lost:
            await session.cancel()

    async def do_cancel_task(self, a: int, b: int) -> None:
        running = [c for c in self.calls if c.task is not None and not c.task.done()]
        if running:
            call = running[a % len(running)]
            assert call.task is not None
            turn = self.model.turns.get(call.number)
            if turn is not None:
                turn.consumer.may_miss_the_rest = True
            call.task.cancel()
            if call.what in ("session/new", "session/load", "session/resume"):
                # Whether its answer still counts is decided by who comes first; here the user does.
                await self.turns(3)
                for session_id in [s for s in self.model.sessions if s not in self.peer.sessions]:
                    self.model.forget(session_id)

    # consumers

    async def do_subscribe(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or self.model.lost:
            return
        model = self.model.sessions.get(session.session_id)
        if model is None or model.closing:
            return
        consumer = self.model.joined(model.subscribe(f"subscriber {self.number()}"))
        self.subscriptions.append((consumer, session.updates()))

    def _take_all(self, consumer: Consumer, subscription: Any) -> None:
        while self._take(consumer, subscription):
            pass

    def _take(self, consumer: Consumer, subscription: Any) -> bool:
        """One update if one is in the queue: a consumer's own step, taken without waiting."""
        self.sync()
        taking = subscription.__anext__()
        try:
            taking.send(None)
        except StopIteration as taken:
            self._see(consumer, taken.value)
            return True
        except StopAsyncIteration:
            if consumer.live:
                self.violated(f"{consumer.name} ended")
            return False
        taking.close()
        return False

    async def do_take(self, a: int, b: int) -> None:
        if self.subscriptions:
            consumer, subscription = self.subscriptions[a % len(self.subscriptions)]
            if not consumer.may_miss_the_rest:
                for _ in range(1 + b % 4):
                    self._take(consumer, subscription)

    async def do_unsubscribe(self, a: int, b: int) -> None:
        if self.subscriptions:
            consumer, subscription = self.subscriptions.pop(a % len(self.subscriptions))
            consumer.live = False
            consumer.may_miss_the_rest = True
            subscription.close()

    def watch(self, update: Update) -> None:
        """The client's own observer, of all sessions."""
        consumer = self.model.observer_of(update.session_id)
        if consumer is None:
            self.violated(f"an update of the unknown session {update.session_id} is observed")
            return
        self._see(consumer, update)
        consumer.returned += 1

    async def do_observe(self, a: int, b: int) -> None:
        session = self.session_at(a)
        if session is None or self.model.lost or len(self.observers) > 4:
            return
        model = self.model.sessions.get(session.session_id)
        if model is None or model.closing:
            return
        first = not session.inbox.observed
        consumer = self.model.joined(model.observe(f"observer {self.number()}", first=first))

        def sync(update: Update) -> None:
            self._see(consumer, update)
            consumer.returned += 1

        async def gated(update: Update) -> None:
            self._see(consumer, update)
            try:
                if not self._ended and not self.model.lost:
                    gate = self.loop.create_future()
                    self.gates.append(gate)
                    await gate
            finally:
                consumer.returned += 1

        async def calling(update: Update) -> None:
            self._see(consumer, update)
            try:
                if not self._ended and len(consumer.got) < 3:
                    inner = self.start_call(
                        "session/set_mode",
                        lambda call: session.set_mode(str(call.number)),
                        observing=True,
                    )
                    assert inner.task is not None
                    await inner.task
            finally:
                consumer.returned += 1

        observer: Any = (sync, gated, calling)[b % 3]
        self.observers.append((consumer, session.on_update(observer)))

    async def do_unobserve(self, a: int, b: int) -> None:
        if self.observers:
            consumer, stop = self.observers.pop(a % len(self.observers))
            consumer.live = False
            consumer.may_miss_the_rest = True
            stop()

    async def do_release(self, a: int, b: int) -> None:
        if self.gates:
            gate = self.gates.pop(0)
            if not gate.done():
                gate.set_result(None)

    async def do_decide(self, a: int, b: int) -> None:
        waiting = [question for question in self.questions.values() if question.undecided]
        if waiting:
            self._decide(waiting[a % len(waiting)], ("allow", "reject", None, "fail")[b % 4])

    def _decide(self, question: Question, decision: str | None) -> None:
        assert question.decision is not None
        if not question.responses and not question.must_be_cancelled:
            question.decided = decision
        question.decision.set_result(decision)

    # -------------------------------------------------------------- the end

    async def end(self) -> None:
        self._ended = True
        if not self.model.lost and not self.violations:
            await self._come_to_rest()
        if not self.model.lost and not self.violations:
            self._check_backlogs()
        if not self.violations:
            await self._check_questions()
        for consumer, subscription in self.subscriptions:
            if not self.violations and not consumer.may_miss_the_rest:
                self._take_all(consumer, subscription)
                if fault := consumer.fault(complete=True):
                    self.violated(fault)
            subscription.close()
        connection = self.peer.connection
        if not self.model.lost and not self.violations:
            for what, table in (
                ("calls", connection.protocol.calls),
                ("requests", connection.protocol.requests),
            ):
                if table:
                    self.violated(f"at rest there are {what}: {table}")
            if connection.queued_bytes:
                self.violated(f"at rest {connection.queued_bytes} bytes are queued")
        await self._aclose()
        self._release_all()
        if self._closing is not None:
            await self._closing
        await self.turns(12)
        for call in self.calls:
            if call.task is not None and not call.task.done():
                self.violated(f"{call!r} outlives its connection")
                call.task.cancel()
        if not self.violations:
            for consumer in self.model.consumers:
                if consumer.observes and (fault := consumer.fault(complete=True)):
                    self.violated(fault)
        if not self.violations and (connection.protocol.calls or connection.protocol.requests):
            self.violated("a closed connection keeps calls")
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _release_all(self) -> None:
        for gate in self.gates:
            if not gate.done():
                gate.set_result(None)
        self.gates.clear()
        for question in self.questions.values():
            if question.undecided:
                self._decide(question, None)

    async def _come_to_rest(self) -> None:
        """Everything is delivered, answered, decided and taken until nothing more happens."""
        for _ in range(60):
            crossed = self.link.crossed
            self._release_all()
            while self.asked:
                self._answer(0, 0)
            for consumer, subscription in self.subscriptions:
                if not consumer.may_miss_the_rest:
                    self._take_all(consumer, subscription)
            if self.link.paused:
                self._take_over_backlogs()
            self.link.deliver(1 << 20)
            await self.turns(6)
            quiet = self.link.crossed == crossed and not self.link.incoming and not self.asked
            waiting = [c for c in self.calls if c.task is not None and not c.task.done()]
            held = self.gates or any(q.undecided for q in self.questions.values())
            if quiet and not waiting and not held:
                return
            if quiet and not held:
                await asyncio.sleep(2 * BACKSTOP)
        waiting = [c for c in self.calls if c.task is not None and not c.task.done()]
        self.violated(f"{waiting} never end, although everything is answered")

    def _take_over_backlogs(self) -> None:
        """Reading has stopped: somebody has to take what waits for nobody yet."""
        for session_id, model in self.model.sessions.items():
            session = self.peer.sessions.get(session_id)
            if session is not None and not model.closing and model.backlog:
                consumer = self.model.joined(model.subscribe(f"subscriber {self.number()}"))
                self.subscriptions.append((consumer, session.updates()))

    def _check_backlogs(self) -> None:
        """What arrived outside a turn and was seen by nobody is there for who comes first."""
        for session_id, model in list(self.model.sessions.items()):
            session = self.peer.sessions.get(session_id)
            if session is None:
                self.violated(f"session {session_id} is not known")
                continue
            if model.closing:
                continue
            consumer = model.subscribe(f"the last subscriber of {session_id}")
            subscription = session.updates()
            self._take_all(consumer, subscription)
            if fault := consumer.fault(complete=True):
                self.violated(fault)
            subscription.close()

    async def _check_questions(self) -> None:
        if self.model.lost:
            return
        for question in self.questions.values():
            if question.delivered and not question.responses:
                self.violated(f"request {question.id} ({question.method}) has no response")


def _result(id_: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "result": result}


def _short(frame: dict[str, Any]) -> str:
    if frame.get("method") == "session/update":
        return f"update {frame['params']['sessionId']} #{frame['params']['update'].get('n')}"
    text = str({k: v for k, v in frame.items() if k != "jsonrpc"})
    return text if len(text) < 160 else text[:160] + "…"
