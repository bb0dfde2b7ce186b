"""A scripted agent that keeps one journal for each session, in the frames of resumable-sessions.

It speaks like one of ours (an attached connection gets only a subscriber's copies) or like raxol's (the
connection that prompts gets each update bare as well, and an attach adds a subscriber). Its links can
be cut anywhere: what was sent and is not delivered yet is lost from a frame on.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.core import Fault
    from antiphon.transports import Receiver

__all__ = ["JournaledAgent", "Link", "settle"]

Message = dict[str, Any]


async def settle(turns: int = 30) -> None:
    """Let what is to happen at once happen."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Link:
    """The client's end of one link, with the agent behind it; satisfies `Transport`."""

    def __init__(self, agent: JournaledAgent) -> None:
        self.agent = agent
        self.receiver: Receiver | None = None
        self.waiting: list[bytes] = []
        self.alive = True
        self.ended = False
        self.paused = False
        self.prompts: dict[str, Message] = {}  # open, by session
        self.subscribers: list[Subscriber] = []
        self._loop = asyncio.get_running_loop()
        self._scheduled = False

    # -------------------------------------------------------------- Transport

    async def start(self, receiver: Receiver) -> None:
        if self.agent.refuse_links:
            self.agent.refuse_links -= 1
            msg = "nobody listens"
            raise ConnectionRefusedError(msg)
        self.receiver = receiver

    def send(self, frames: list[bytes]) -> None:
        for frame in frames if self.alive else ():
            self.agent.receive(self, json.loads(frame))

    @property
    def unsent(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        self._schedule()

    async def aclose(self) -> None:
        self.cut(0)
        await asyncio.sleep(0)

    def describe(self) -> str:
        return "a link of a scripted agent"

    # -------------------------------------------------------------- the agent's side

    def tell(self, message: Message) -> None:
        """Send one frame to the client."""
        if self.alive:
            self.waiting.append(json.dumps(message).encode())
            self._schedule()

    def cut(self, kept: int | None = None) -> None:
        """Break the link; of what is on its way the first `kept` still arrive (None: all)."""
        if not self.alive:
            return
        self.alive = False
        if kept is not None:
            del self.waiting[kept:]
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self.ended:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self.receiver is None or (self.paused and self.alive):
            return
        if self.waiting:
            frames: list[bytes | Fault] = [*self.waiting]
            self.waiting = []
            self.receiver.frames_received(frames)
        if not self.alive and not self.waiting and not self.ended:
            self.ended = True
            self.receiver.connection_lost(None)


class Subscriber:
    """One attach of one link."""

    def __init__(self, link: Link, session: str, high: int) -> None:
        self.link = link
        self.session = session
        self.high = high


class JournaledAgent:
    """The agent; `dial` is what `connect` is given.

    Attributes:
        raxol: whether it speaks like raxol's.
        journals: the records of each session: (kind, payload).
        links: every link there was.
        received: every frame that came.
        refuse_links: so many links are refused from now on.
        refuse: methods that are answered with an error: its code and message.
        held: methods that are not answered; their frames wait in `waiting`.
        late: where set, what subscribers get waits for `flush`.
        hidden: records that nobody is ever sent: (session, offset).
        riders: whether a plain load shows offsets.
        says: what it says of the extension in its answer to `initialize`.
    """

    def __init__(self, *, raxol: bool = False, prompts: bool = True) -> None:
        self.raxol = raxol
        self.prompts = prompts and not raxol
        self.journals: dict[str, list[tuple[str, Message]]] = {}
        self.links: list[Link] = []
        self.received: list[Message] = []
        self.refuse_links = 0
        self.refuse: dict[str, tuple[int, str]] = {}
        self.held: set[str] = set()
        self.waiting: list[tuple[Link, Message]] = []
        self.late: list[tuple[Link, Message]] | None = None
        self.hidden: set[tuple[str, int]] = set()
        self.riders = True
        self.says: Message = {} if raxol else {"resumable": True}
        self.open_turns: dict[str, tuple[int, Link]] = {}
        self.turns = 0
        self.new_sessions = 0

    def dial(self) -> Link:
        """Make a link."""
        self.links.append(Link(self))
        return self.links[-1]

    @property
    def link(self) -> Link:
        """The newest."""
        return self.links[-1]

    def sent(self, method: str) -> list[Message]:
        """Parameters of what came with this method, on any link."""
        return [m.get("params", {}) for m in self.received if m.get("method") == method]

    async def until_sent(self, method: str, count: int = 1) -> Message:
        """Wait until so many frames of this method came; the last of them."""
        async with asyncio.timeout(10):
            while len(self.sent(method)) < count:
                await asyncio.sleep(0.001)
        return self.sent(method)[count - 1]

    # -------------------------------------------------------------- what comes

    def receive(self, link: Link, message: Message) -> None:
        self.received.append(message)
        method = message.get("method", "")
        if method in self.held and "id" in message:
            self.waiting.append((link, message))
            return
        self.serve(link, message)

    def serve(self, link: Link, message: Message) -> None:
        """Do what a frame asks for."""
        method, params = message.get("method"), message.get("params", {})
        session = params.get("sessionId", "")
        if method in self.refuse:
            code, text = self.refuse[method]
            self.fail(link, message, code, text)
        elif method == "initialize":
            meta = {"_meta": {"raxol.io": self.says}} if self.says else {}
            more: Message = {
                "loadSession": True,
                "sessionCapabilities": {"resume": {}, "close": {}},
            }
            self.answer(link, message, {"protocolVersion": 1, "agentCapabilities": more, **meta})
        elif method == "session/new":
            self.new_sessions += 1
            session = f"s{self.new_sessions}"
            self.answer(link, message, {"sessionId": session})
            self.journals[session] = []
            self.append(session, "session_created", {})
        elif method == "_raxol/session.load":
            self.attach(link, message, session, params)
        elif method == "_raxol/session.detach":
            link.subscribers = [s for s in link.subscribers if s.session != session]
        elif method == "session/load":
            self.load(link, message, session)
        elif method == "session/prompt":
            self.begin(link, message, session)
        elif method is not None and "id" in message:
            self.answer(link, message, {})

    def answer(self, link: Link, request: Message, result: Any) -> None:
        link.tell({"jsonrpc": "2.0", "id": request["id"], "result": result})

    def fail(self, link: Link, request: Message, code: int, text: str, **more: Any) -> None:
        error = {"code": code, "message": text, **more}
        link.tell({"jsonrpc": "2.0", "id": request["id"], "error": error})

    def load(self, link: Link, message: Message, session: str) -> None:
        """A plain load: the updates alone, with their riders."""
        for offset, (kind, _) in enumerate(self.journals[session], 1):
            if kind == "session_update":
                link.tell(self.frame(session, offset, rider=self.riders))
        self.answer(link, message, {})

    def attach(self, link: Link, message: Message, session: str, params: Message) -> None:
        """An attach, as resumable-sessions §7.2 has it."""
        rider = params.get("_meta", {}).get("raxol.io", {})
        start, history = rider.get("fromOffset", 0), rider.get("historyPolicy", "from_offset")
        journal = self.journals.get(session, [])
        high = len(journal)
        if not high:
            self.fail(link, message, -32002, "Resource not found")
            return
        if history != "none" and start > high + 1:
            data = {"highWatermark": high}
            self.fail(link, message, -32602, "invalid params", data=data)
            return
        if history != "none":
            if not self.raxol:
                link.subscribers = [s for s in link.subscribers if s.session != session]
            if history == "from_offset":
                for offset in range(max(start, 1), high + 1):
                    if (session, offset) not in self.hidden:
                        link.tell(self.frame(session, offset))
            link.tell(self.notice("caught_up", {"sessionId": session, "offset": high + 1}))
        self.answer(link, message, {"_meta": {"raxol.io": {"highWatermark": high}}})
        if history != "none":
            link.subscribers.append(Subscriber(link, session, high))

    # -------------------------------------------------------------- what it says

    def frame(self, session: str, offset: int, *, rider: bool = True) -> Message:
        """The frame of a record."""
        kind, payload = self.journals[session][offset - 1]
        stamp = {"offset": offset, "taint": "agent", "ts": 1784290000000 + offset}
        if kind != "session_update":
            return self.notice(
                "record", {"sessionId": session, "kind": kind, "payload": payload, **stamp}
            )
        params: Message = {"sessionId": session, "update": payload}
        if rider:
            params["_meta"] = {"raxol.io": stamp}
        return {"jsonrpc": "2.0", "method": "session/update", "params": params}

    @staticmethod
    def chunk(text: str, *, swapped: bool = False) -> Message:
        """A chunk of the agent's message; `swapped`: with its members in another order."""
        content = {"text": text, "type": "text"} if swapped else {"type": "text", "text": text}
        return {"sessionUpdate": "agent_message_chunk", "content": content}

    @classmethod
    def update_frame(cls, session: str, text: str, *, swapped: bool = False) -> Message:
        """One as a frame without an offset."""
        params = {"sessionId": session, "update": cls.chunk(text, swapped=swapped)}
        return {"jsonrpc": "2.0", "method": "session/update", "params": params}

    def attaches(self, session: str) -> list[Message]:
        """The riders of the attaches that came for a session."""
        loads = self.sent("_raxol/session.load")
        return [p["_meta"]["raxol.io"] for p in loads if p["sessionId"] == session]

    def detach(self, session: str) -> bool:
        """Send nothing more of a session on the newest link; whether anything was sent before."""
        link = self.link
        gone = [s for s in link.subscribers if s.session == session]
        link.subscribers = [s for s in link.subscribers if s.session != session]
        return bool(gone) and link.alive

    def lag(self, session: str) -> None:
        """Give up the newest link's subscribers for being too slow."""
        if self.late is None and self.detach(session):
            last = len(self.journals[session])
            self.link.tell(self.notice("lagged", {"sessionId": session, "lastOffset": last}))

    def close(self, session: str, reason: str) -> None:
        """End the newest link's subscribers."""
        if self.late is None and self.detach(session):
            self.link.tell(self.notice("closed", {"sessionId": session, "reason": reason}))

    @staticmethod
    def notice(name: str, params: Message) -> Message:
        return {"jsonrpc": "2.0", "method": f"_raxol/session.{name}", "params": params}

    def append(self, session: str, kind: str, payload: Message, *, silent: bool = False) -> int:
        """Store a record and publish it; `silent`: its origin is not told of it beside."""
        journal = self.journals[session]
        journal.append((kind, payload))
        offset = len(journal)
        _, origin = self.open_turns.get(session, (0, None))
        attached = False
        for link in self.links:
            for subscriber in link.subscribers if link.alive else ():
                if subscriber.session == session and offset > subscriber.high:
                    attached |= link is origin
                    if (session, offset) in self.hidden:
                        continue
                    self.publish(link, self.frame(session, offset))
        told = self.raxol or not attached  # the origin, beside its subscriber
        if kind == "session_update" and origin is not None and told and not silent:
            origin.tell(self.frame(session, offset, rider=False))
        return offset

    def publish(self, link: Link, frame: Message) -> None:
        if self.late is None:
            link.tell(frame)
        else:
            self.late.append((link, frame))

    def flush(self, count: int | None = None) -> None:
        """Let subscribers have what waited for them, or the first few of it."""
        late = self.late or []
        for link, frame in late[:count]:
            link.tell(frame)
        self.late = None if count is None else late[count:]

    def begin(self, link: Link, message: Message, session: str) -> None:
        """Begin a turn for a prompt."""
        if session in self.open_turns:
            self.fail(link, message, -32600, "prompt already in flight")
            return
        link.prompts[session] = message
        self.turns += 1
        self.open_turns[session] = self.turns, link
        self.append(session, "turn_started", {"turnId": self.turns, "prompt": []})
        for block in message["params"]["prompt"] if self.prompts else ():
            update = {"sessionUpdate": "user_message_chunk", "content": block}
            self.append(session, "session_update", update, silent=True)

    def other_begins(self, session: str, text: str = "from elsewhere") -> None:
        """Begin the turn of a client that we do not see."""
        self.turns += 1
        elsewhere = Link(self)
        elsewhere.alive = False
        self.open_turns[session] = self.turns, elsewhere
        self.append(session, "turn_started", {"turnId": self.turns, "prompt": []})
        if self.prompts:
            block = {"type": "text", "text": text}
            update = {"sessionUpdate": "user_message_chunk", "content": block}
            self.append(session, "session_update", update)

    def say(self, session: str, text: str) -> int:
        """Say something."""
        return self.append(session, "session_update", self.chunk(text))

    def finish(self, session: str, stop_reason: str = "end_turn", **payload: Any) -> None:
        """End the open turn, and answer its prompt where its link is alive."""
        turn, link = self.open_turns[session]
        body = payload or {"stopReason": stop_reason}
        self.append(session, "turn_completed", {"turnId": turn, **body})
        del self.open_turns[session]
        message = link.prompts.pop(session, None)
        if message is None:
            return
        if "error" in payload:
            error = payload["error"]
            self.fail(link, message, error["code"], error["message"])
        else:
            self.answer(link, message, {"stopReason": stop_reason})
