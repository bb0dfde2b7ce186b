"""Our agent against a client that says anything: one world, one connection, one program.

The client is nothing but messages that the steps lay on the link. The agent's handlers do what the
steps tell them, one command at a time: say, ask, start a subtask, return, fail, take no notice of a
cancellation. What they said is held against what was written, frame by frame.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from antiphon import (
    DEFERRED,
    Agent,
    AntiphonError,
    ConnectionClosed,
    Limits,
    RequestError,
    TurnOver,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.sessions import ClientPeer
from tests.interleavings.link import Link
from tests.interleavings.world import World

if TYPE_CHECKING:
    from antiphon import Turn

__all__ = ["AgentWorld"]

BACKSTOP = 30.0
_ENDS = ("end_turn", "refusal", "fail", "error", "end_turn")


@dataclass(eq=False)
class Asked:
    """A request of the client, by its id."""

    id: Any
    method: str
    session_id: str
    number: int = 0
    sent: int = 1
    delivered: int = 0
    responses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    #: The turn must end as cancelled, or may.
    cancelled: bool = False
    may_be_cancelled: bool = False
    withdrawn: bool = False
    #: Whether the prompt may be, or must be, refused because of what the session is doing.
    may_be_refused: bool = False
    must_be_refused: bool = False
    cancelled_at: float = -1.0
    #: What the deferred reply was sent with, once that was taken.
    replied: int | None = None

    @property
    def over(self) -> bool:
        return bool(self.responses)


class Handler:
    """One call of `Agent.prompt` that does what it is told."""

    def __init__(self, world: AgentWorld, turn: Turn, asked: Asked) -> None:
        self.world = world
        self.turn = turn
        self.asked = asked
        self.commands: list[tuple[str, int]] = []
        self.waiting: asyncio.Future[None] | None = None
        self.returned: str | None = None
        self.asking = 0
        self.subtasks: list[asyncio.Event] = []
        self.open_subtasks = 0

    def tell(self, command: str, argument: int) -> None:
        self.commands.append((command, argument))
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    async def run(self) -> Any:
        while True:
            while not self.commands:
                self.waiting = self.world.loop.create_future()
                await self.waiting
            command, argument = self.commands.pop(0)
            match command:
                case "say":
                    await self.world.say(self)
                case "ask":
                    await self._ask()
                case "tell":
                    await self.world.tell_mode(self.turn.session, self.asked.session_id)
                case "subtask":
                    self._start_subtask()
                case _:
                    return self._end(_ENDS[argument % len(_ENDS)])

    def _end(self, how: str) -> Any:
        self.returned = how
        if how == "fail":
            msg = "the handler fails"
            raise ValueError(msg)
        if how == "error":
            raise RequestError(-32050, "on purpose")
        return None if how == "end_turn" else how

    async def _ask(self) -> None:
        world, asked = self.world, self.asked
        key = f"q{world.number()}"
        tool_call = v1.ToolCallUpdate(tool_call_id=key, title="x")
        self.asking += 1
        try:
            answer = await self.turn.ask_permission(tool_call)
        except TurnOver:
            if not asked.over:
                world.violated(f"a question of the open turn {asked.number} raised TurnOver")
            return
        finally:
            self.asking -= 1
        allowed = world.answers.get(key) == "allow_once"
        if answer.allowed and not allowed:
            world.violated(f"{key} was allowed by nobody")

    def _start_subtask(self) -> None:
        event = asyncio.Event()
        self.subtasks.append(event)

        async def work() -> None:
            self.open_subtasks += 1
            try:
                await event.wait()
                await self.world.say(self)
            finally:
                self.open_subtasks -= 1

        try:
            self.turn.start_soon(work())
        except TurnOver:
            if not self.asked.over and not self.turn.cancelled:
                self.world.violated("a subtask of an open turn was refused")


class Puppet(Agent):
    """Hands each prompt to a `Handler`."""

    def __init__(self, world: AgentWorld) -> None:
        self.world = world

    async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
        await asyncio.sleep(0)
        return v1_unstable.NewSessionResponse(session_id=f"s{params.cwd[1:]}")

    async def load_session(self, params: Any, ctx: Any) -> v1.LoadSessionResponse:
        for _ in range(len(params.cwd) % 4):
            await self.world.replay(ctx, params.session_id)
            await asyncio.sleep(0)
        return v1_unstable.LoadSessionResponse()

    async def close_session(self, params: Any, ctx: Any) -> v1.CloseSessionResponse:
        await asyncio.sleep(0)
        return v1_unstable.CloseSessionResponse()

    async def set_session_mode(self, params: Any, ctx: Any) -> v1.SetSessionModeResponse:
        for _ in range(len(params.mode_id)):
            await asyncio.sleep(0)
        if params.mode_id == "none":
            msg = "no such mode"
            raise KeyError(msg)
        return v1.SetSessionModeResponse()

    @extension("_x/defer")
    async def defer(self, params: Any, ctx: Any) -> Any:
        """Answered by a step, by a task that ends without, or never."""
        world = self.world
        asked = world.by_id[str(_id_of(ctx))]
        adopter = None
        if asked.number % 4 == 0:
            adopter = world.start(world.adopt(asked))
        world.replies.append((asked, ctx.defer(adopter)))
        if asked.number % 5 == 0:
            await asyncio.sleep(0)
        return DEFERRED

    async def prompt(self, turn: Turn) -> Any:
        world = self.world
        handler = Handler(world, turn, world.prompts[int(turn.text)])
        world.handlers.append(handler)
        handler.asked.may_be_refused = handler.asked.must_be_refused = False
        while True:
            try:
                return await handler.run()
            except asyncio.CancelledError:
                if handler.asked.number % 3 or world.ending:
                    raise  # the others take no notice, as long as that is possible


class AgentWorld(World):
    """Steps of the client, of the link and of the agent's handlers."""

    meant = ("dup_reply",)
    weights = {  # noqa: RUF012  (a table)
        "deliver": 30,
        "turn": 14,
        "time": 3,
        "new": 3,
        "prompt": 12,
        "act": 30,
        "subtask_goes_on": 6,
        "late": 3,
        "answer": 9,
        "answer_wrongly": 3,
        "cancel": 6,
        "cancel_request": 4,
        "again": 2,
        "set_mode": 4,
        "defer": 4,
        "reply": 6,
        "load": 3,
        "close": 2,
        "noise": 2,
        "end_input": 1,
        "die": 1,
        "aclose": 1,
    }

    def __init__(self, variant: int = 0) -> None:
        super().__init__(variant)
        self.link = Link(self._written, self._arriving, self.failed)
        self.peer = ClientPeer(
            self.link,
            Puppet(self),
            limits=Limits(cancel_backstop=BACKSTOP, request_timeout=None),
            telemetry=self.hear,
        )
        self.link.before = self.sync
        self.by_id: dict[str, Asked] = {}
        self.prompts: dict[int, Asked] = {}
        self.handlers: list[Handler] = []
        self.questions: list[dict[str, Any]] = []
        #: Requests whose answer was put off, and what they are to be answered through.
        self.replies: list[tuple[Asked, Any]] = []
        self.adopted: list[asyncio.Event] = []
        self.answered: list[Any] = []
        #: What our agent was answered, by the tool call that it asked for.
        self.answers: dict[str, str] = {}
        #: Per session: (number of the update, number of its prompt; 0 outside turns) as accepted.
        self.accepted: dict[str, list[tuple[int, int]]] = {}
        self.written: dict[str, list[tuple[int, int]]] = {}
        self.known: list[str] = []
        self.gone = False  # the link is lost or this side closes
        self.input_ended = False
        self.ending = False
        self._numbers = 0
        self._serving: asyncio.Task[None] | None = None

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def sync(self) -> None:
        self.peer.connection.flush()

    async def step(self, step: Any) -> None:
        self.sync()
        await super().step(step)

    # -------------------------------------------------------------- the edge

    def _written(self, frame: dict[str, Any]) -> None:
        method = frame.get("method")
        if method == "session/update":
            params = frame["params"]
            update = params["update"]
            text = update.get("currentModeId") or update["content"]["text"]
            number, prompt = (int(part) for part in text.split("/"))
            self.note(f"  out update {params['sessionId']} #{number} of prompt {prompt}")
            self.written.setdefault(params["sessionId"], []).append((number, prompt))
            if prompt > 0 and self.prompts[prompt].over:
                self.violated(f"update {number} of prompt {prompt} follows its response")
            return
        self.note(f"  out {frame}"[:200])
        if method is None:
            self._response_written(frame)
        elif method == "session/request_permission":
            self.questions.append(frame)

    def _response_written(self, frame: dict[str, Any]) -> None:
        asked = self.by_id.get(str(frame["id"]))
        if asked is None:
            if frame["id"] is not None:
                self.violated(f"a response to what was not asked: {frame}")
            return
        if type(frame["id"]) is not type(asked.id):
            self.violated(f"the id {asked.id!r} came back as {frame['id']!r}")
        asked.responses.append(frame)
        if len(asked.responses) > asked.delivered:
            self.violated(f"request {asked.id} has the responses {asked.responses}")
        if asked.sent > 1:
            return
        if asked.method == "session/prompt":
            self._check_outcome(asked, frame)
        elif asked.method == "_x/defer":
            self._check_deferred(asked, frame)
        elif asked.method == "session/close" and "result" in frame:
            for other in self.prompts.values():
                open_ = other.delivered and not other.over and not other.may_be_refused
                if other.session_id == asked.session_id and open_:
                    self.violated(f"session/close was answered before prompt {other.number}")
            self.known = [known for known in self.known if known != asked.session_id]
        elif asked.method == "session/new" and "result" in frame:
            self.known.append(frame["result"]["sessionId"])
        elif asked.method == "session/load" and "result" in frame:
            if asked.session_id not in self.known:
                self.known.append(asked.session_id)
            if self._unwritten(asked.session_id, -asked.number):
                self.violated(f"{asked.method} was answered before its history was written")

    def _check_deferred(self, asked: Asked, frame: dict[str, Any]) -> None:
        code = frame.get("error", {}).get("code")
        if asked.replied is not None:
            if asked.replied not in (frame.get("result", {}).get("n"), code):
                self.violated(f"{asked.id} was answered with {asked.replied}: {frame}")
        elif code == -32800:
            if not asked.withdrawn:
                self.violated(f"{asked.id} was withdrawn by nobody: {frame}")
        elif code != -32603:
            self.violated(f"{asked.id} was answered by nobody: {frame}")

    def _unwritten(self, session_id: str, prompt: int) -> list[tuple[int, int]]:
        written = set(self.written.get(session_id, ()))
        return [
            entry
            for entry in self.accepted.get(session_id, ())
            if entry[1] == prompt and entry not in written
        ]

    def _check_outcome(self, asked: Asked, frame: dict[str, Any]) -> None:
        number = asked.number
        if left := self._unwritten(asked.session_id, number):
            self.violated(f"prompt {number} was answered before {left} were written")
        code = frame.get("error", {}).get("code")
        if code in (-32600, -32002):
            if not asked.may_be_refused and not asked.must_be_refused:
                self.violated(f"prompt {number} was refused: {frame}")
            return
        if asked.must_be_refused:
            self.violated(f"prompt {number} was to be refused, and was answered {frame}")
            return
        handler = next((h for h in self.handlers if h.asked is asked), None)
        reason = frame.get("result", {}).get("stopReason")
        expired = 0 <= asked.cancelled_at <= self.loop.time() - BACKSTOP
        waits = not expired and not asked.may_be_cancelled
        if handler is not None and handler.open_subtasks and waits:
            self.violated(f"prompt {number} was answered before its subtasks had ended")
        if reason == "cancelled" or (code == -32800 and asked.withdrawn):
            if not asked.cancelled and not asked.may_be_cancelled:
                self.violated(f"prompt {number} was cancelled by nobody")
            return
        if asked.cancelled:
            self.violated(f"the cancelled prompt {number} was answered {frame}")
        returned = None if handler is None else handler.returned
        expected = {"fail": -32603, "error": -32050}.get(returned or "", returned)
        if expected is None or expected not in (reason, code):
            self.violated(f"prompt {number} returned {returned} and was answered {frame}")

    def _arriving(self, frame: dict[str, Any]) -> None:
        self.note(f"  in {frame}"[:200])
        if self.gone or self.input_ended:
            return
        method = frame.get("method")
        if method is None:
            return
        if method == "session/cancel":
            for asked in self.prompts.values():
                if asked.session_id == frame["params"]["sessionId"] and asked.delivered:
                    self._cancel(asked)
        elif method == "$/cancel_request":
            id_ = frame["params"]["requestId"]
            named = self.by_id.get(str(id_))
            if named is None or not named.delivered or named.over:
                return
            if type(id_) is type(named.id):
                named.withdrawn = True
                self._cancel(named)
        elif "id" in frame:
            asked = self.by_id[str(frame["id"])]
            asked.delivered += 1
            if method == "session/prompt" and asked.delivered == 1:
                self._judge(asked)
            elif method == "session/close":
                for other in self.prompts.values():
                    if other.session_id == asked.session_id and not other.over:
                        other.may_be_cancelled = True

    def _cancel(self, asked: Asked) -> None:
        if asked.over or asked.cancelled:
            return
        asked.cancelled = True
        asked.cancelled_at = self.loop.time()

    def _judge(self, asked: Asked) -> None:
        """Whether a prompt that arrives now is to be refused."""
        doing = [
            other
            for other in self.by_id.values()
            if other.session_id == asked.session_id
            and other is not asked
            and other.delivered
            and not other.over
            and not other.must_be_refused
        ]
        if any(other.method in ("session/close", "session/load") for other in doing):
            asked.may_be_refused = True  # whether their handlers have begun is theirs
            asked.may_be_cancelled = True
        elif asked.session_id not in self.known:
            asked.must_be_refused = True
        elif others := [other for other in doing if other.method == "session/prompt"]:
            # One that is cancelled before its handler began may be over at once, in the reader.
            asked.must_be_refused = any(
                not other.may_be_refused and not other.cancelled for other in others
            )
            asked.may_be_refused = True

    # -------------------------------------------------------------- what the agent says

    async def say(self, handler: Handler) -> None:
        asked = handler.asked
        number = self.number()
        self.sync()
        over = asked.over
        entries = self.accepted.setdefault(asked.session_id, [])
        entry = (number, asked.number)
        entries.append(entry)
        try:
            await handler.turn.say(f"{number}/{asked.number}")
        except TurnOver:
            entries.remove(entry)
            if not over and not self.gone and not self.input_ended:
                self.violated(f"the open turn {asked.number} raised TurnOver")
            return
        except ConnectionClosed:
            entries.remove(entry)
            if not self.gone and not self.input_ended and not self.link.lost:
                self.violated("the link is there, and ConnectionClosed was raised")
            return
        if over:
            self.violated(f"the turn {asked.number} is over, and took update {number}")

    async def tell_mode(self, session: Any, session_id: str) -> None:
        number = self.number()
        entry = (number, 0)
        entries = self.accepted.setdefault(session_id, [])
        entries.append(entry)
        try:
            await session.set_mode(f"{number}/0")
        except AntiphonError as error:
            entries.remove(entry)
            if session_id in self.known and not isinstance(error, ConnectionClosed):
                self.violated(f"{session_id} is open, and an update about it raised {error!r}")

    async def replay(self, ctx: Any, session_id: str) -> None:
        number = self.number()
        prompt = next(a for a in self.by_id.values() if a.id == _id_of(ctx)).number
        self.accepted.setdefault(session_id, []).append((number, -prompt))
        content = v1.TextContent(text=f"{number}/{-prompt}")
        try:
            await ctx.update(v1.UserMessageChunk(content=content))
        except ConnectionClosed:
            self.accepted[session_id].pop()

    # -------------------------------------------------------------- the client's steps

    async def begin(self) -> None:
        self._serving = self.start(self.peer.run())
        await self.turns(2)
        params: dict[str, Any] = {"protocolVersion": 1, "clientCapabilities": {}}
        self.ask("initialize", "", params)
        self.link.deliver(1 << 20)
        await self.turns(4)
        await self.do_new(0, 0)
        self.link.deliver(1 << 20)
        await self.turns(4)

    def ask(self, method: str, session_id: str, params: dict[str, Any]) -> Asked:
        number = self.number()
        id_: Any = number if number % 3 else f"id-{number}"
        asked = self.by_id[str(id_)] = Asked(id_, method, session_id, number)
        if session_id:
            params = {"sessionId": session_id, **params}
        if method == "session/prompt":
            params["prompt"] = [{"type": "text", "text": str(number)}]
            self.prompts[number] = asked
        self.link.put({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
        return asked

    def session_at(self, a: int) -> str:
        return self.known[a % len(self.known)] if self.known and a < 60 else f"s{a}"

    async def do_new(self, a: int, b: int) -> None:
        self.ask("session/new", "", {"cwd": f"/{self.number()}", "mcpServers": []})

    async def do_prompt(self, a: int, b: int) -> None:
        self.ask("session/prompt", self.session_at(a), {})

    async def do_cancel(self, a: int, b: int) -> None:
        params = {"sessionId": self.session_at(a)}
        self.link.put({"jsonrpc": "2.0", "method": "session/cancel", "params": params})

    async def do_cancel_request(self, a: int, b: int) -> None:
        some = list(self.by_id.values())[-8:]
        asked = some[a % len(some)]
        if asked.method in ("session/new", "session/load", "initialize", "session/close"):
            return
        id_: Any = str(asked.id) if b % 5 == 4 else asked.id
        params = {"requestId": id_}
        self.link.put({"jsonrpc": "2.0", "method": "$/cancel_request", "params": params})

    async def do_again(self, a: int, b: int) -> None:
        """An id a second time, while its request may be open or long answered."""
        some = [asked for asked in self.by_id.values() if asked.method == "session/set_mode"]
        if some:
            asked = some[a % len(some)]
            asked.sent += 1
            params = {"sessionId": asked.session_id, "modeId": "again"}
            frame = {"jsonrpc": "2.0", "id": asked.id, "method": asked.method, "params": params}
            self.link.put(frame)

    async def do_set_mode(self, a: int, b: int) -> None:
        self.ask("session/set_mode", self.session_at(a), {"modeId": ("a", "bcd", "none")[b % 3]})

    async def do_load(self, a: int, b: int) -> None:
        session_id = self.session_at(a) if b % 2 else f"old{a}"
        self.ask("session/load", session_id, {"cwd": "/" + "x" * (b % 5), "mcpServers": []})

    async def do_close(self, a: int, b: int) -> None:
        if b % 2:
            self.ask("session/close", self.session_at(a), {})

    async def do_answer(self, a: int, b: int) -> None:
        """Answer one of our agent's questions: yes, no, an error, nonsense."""
        if not self.questions:
            return
        question = self.questions.pop(a % len(self.questions))
        self.answered.append(question["id"])
        options = ("allow_once", "reject_once", "cancelled", "error", "nonsense", "not_offered")
        self._answer(question, options[b % 6])

    def _answer(self, question: dict[str, Any], how: str) -> None:
        frame = {"jsonrpc": "2.0", "id": question["id"]}
        key = question["params"]["toolCall"]["toolCallId"]
        self.answers.setdefault(key, how)
        match how:
            case "error":
                frame["error"] = {"code": -32603, "message": "no"}
            case "nonsense":
                frame["result"] = {"outcome": 7}
            case "cancelled":
                frame["result"] = {"outcome": {"outcome": "cancelled"}}
            case _:
                frame["result"] = {"outcome": {"outcome": "selected", "optionId": how}}
        self.link.put(frame)

    async def do_answer_wrongly(self, a: int, b: int) -> None:
        """Late, a second time, or to an id that nobody used: each a yes."""
        if b % 2 and self.answered:
            id_: Any = self.answered[a % len(self.answered)]
        elif self.questions:
            id_ = str(self.questions[a % len(self.questions)]["id"])
        else:
            id_ = 90_000 + a
        outcome = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
        self.link.put({"jsonrpc": "2.0", "id": id_, "result": outcome})

    async def do_noise(self, a: int, b: int) -> None:
        noise = (b"", b"ready.", b"\xff\xfe", b"null", b"[]", b'{"jsonrpc":"2.0"', b" ")
        self.link.put(noise[a % len(noise)])

    # -------------------------------------------------------------- the link's steps

    async def do_deliver(self, a: int, b: int) -> None:
        sizes = (1, 7, 40, 150, 400, 1000, 1 << 20)
        for _ in range(1 + a % 3):
            self.link.deliver(sizes[b % len(sizes)])
        if a % 2:
            await self.turns(7)
            self._check_that_cancelled_questions_ended()

    def _check_that_cancelled_questions_ended(self) -> None:
        """Runtime-semantics §12.2: they end with the cancellation, not with their timeout."""
        for handler in self.handlers:
            if handler.asked.cancelled and handler.asking and not self.gone:
                self.violated(f"prompt {handler.asked.number} is cancelled and still asks")

    async def do_end_input(self, a: int, b: int) -> None:
        if a < 40 or self.input_ended or self.gone:
            return
        self.input_ended = True
        for asked in self.prompts.values():
            asked.may_be_cancelled = True
        self.link.end_input()

    async def do_die(self, a: int, b: int) -> None:
        if a < 40 or self.gone:
            return
        self.gone = True
        self.link.die(None if b % 2 else OSError("the link broke"))
        await self.turns(8)
        for handler in self.handlers:
            if handler.asking:
                self.violated("a question waits although the link is gone")

    async def do_aclose(self, a: int, b: int) -> None:
        if a >= 40 and not self.gone:
            self.start(self._close())

    async def _close(self) -> None:
        self.sync()
        self.gone = True
        await self.peer.connection.aclose()

    # -------------------------------------------------------------- the agent's steps

    async def do_act(self, a: int, b: int) -> None:
        running = [handler for handler in self.handlers if handler.returned is None]
        if running:
            names = ("say", "say", "say", "ask", "subtask", "tell", "end")
            running[a % len(running)].tell(names[b % 7], a)

    async def adopt(self, asked: Asked) -> None:
        """Will answer, until a step ends it."""
        event = asyncio.Event()
        self.adopted.append(event)
        if not self.ending:
            await event.wait()

    async def do_defer(self, a: int, b: int) -> None:
        self.ask("_x/defer", "", {})

    async def do_reply(self, a: int, b: int) -> None:
        """Send a deferred reply, perhaps once more; let one go; end a task that had taken one on."""
        if b % 8 == 7 and self.adopted:
            self.adopted.pop(0).set()
        elif b % 8 == 6 and self.replies:
            self.replies.pop(a % len(self.replies))
        elif self.replies:
            self._reply(*self.replies[a % len(self.replies)], fail=b % 8 == 5)

    def _reply(self, asked: Asked, reply: Any, *, fail: bool) -> None:
        number = self.number()
        taken = reply.fail(RequestError(number, "no")) if fail else reply.send({"n": number})
        if taken:
            if asked.replied is not None or asked.over:
                self.violated(f"{asked.id} took a second answer")
            asked.replied = number
        elif asked.replied is None and not asked.over:
            free = asked.withdrawn or self.gone or self.input_ended or asked.number % 4 == 0
            if not free:
                self.violated(f"{asked.id} is open, and took no answer")

    async def do_subtask_goes_on(self, a: int, b: int) -> None:
        for handler in self.handlers:
            if handler.subtasks:
                handler.subtasks.pop(0).set()
                return

    async def do_late(self, a: int, b: int) -> None:
        """Somebody who kept a turn says something, whenever that is."""
        if self.handlers:
            await self.say(self.handlers[a % len(self.handlers)])

    # -------------------------------------------------------------- the end

    async def end(self) -> None:
        self.ending = True
        if not self.gone and not self.input_ended and not self.violations:
            await self._come_to_rest()
        if not self.gone and not self.input_ended and not self.violations:
            self._check_rest()
        closing = self.start(self._close())
        for handler in self.handlers:
            handler.tell("end", 0)
            for event in handler.subtasks:
                event.set()
        assert self._serving is not None
        for event in self.adopted:
            event.set()
        await closing
        await self._serving
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.turns(4)
        connection = self.peer.connection
        if connection.protocol.requests or connection.protocol.calls:
            self.violated("a closed connection keeps calls")
        for session_id, written in self.written.items():
            if written != self.accepted.get(session_id, [])[: len(written)]:
                self.violated(
                    f"{session_id}: {self.accepted.get(session_id)} were said, {written} written"
                )

    async def _come_to_rest(self) -> None:
        for _ in range(40):
            if self.gone:
                return
            crossed = self.link.crossed
            for handler in self.handlers:
                handler.tell("end", 0)
                while handler.subtasks:
                    handler.subtasks.pop().set()
            for asked, reply in self.replies:
                self._reply(asked, reply, fail=False)
            self.replies.clear()
            while self.questions:
                self._answer(self.questions.pop(), "reject_once")
            self.link.deliver(1 << 20)
            await self.turns(8)
            if self.link.crossed == crossed and not self.link.incoming and not self.questions:
                if all(asked.over for asked in self.by_id.values()):
                    return
                await asyncio.sleep(BACKSTOP + 1)
        waiting = [asked.id for asked in self.by_id.values() if not asked.over]
        self.violated(f"{waiting} are never answered")

    def _check_rest(self) -> None:
        for asked in self.by_id.values():
            if asked.sent == 1 and len(asked.responses) != 1:
                self.violated(f"request {asked.id} has {len(asked.responses)} responses")
        connection = self.peer.connection
        for what, open_ones in (
            ("calls", connection.protocol.calls),
            ("requests", connection.protocol.requests),
        ):
            if open_ones:
                self.violated(f"at rest there are {what}: {open_ones}")
        if connection.queued_bytes:
            self.violated(f"at rest {connection.queued_bytes} bytes are queued")
        for session_id, accepted in self.accepted.items():
            if self.written.get(session_id, []) != accepted:
                written = self.written.get(session_id)
                self.violated(f"{session_id}: {accepted} were said, {written} written")
        for session_id, session in self.peer.sessions.items():
            if session.turn is not None:
                self.violated(f"at rest {session_id} has an open turn")


def _id_of(ctx: Any) -> Any:
    raw = ctx.call.id
    return raw.decode().strip('"') if raw[:1] == b'"' else int(raw)
