"""What the delivery contract (DESIGN §4) demands, as lists: written from its words, not from our code.

`DeliveryModel` is told of every frame at the moment it crosses our side's edge and of every consumer
that joins or leaves. From that alone it says what each consumer must have been given, in which order
and under which label, and what must have been delivered before a response may be seen. It holds no
reference to the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Consumer", "DeliveryModel", "Entry", "SessionModel", "TurnModel"]

#: An update: its number on the wire, and where it belongs.
Entry: TypeAlias = "tuple[int, str]"


@dataclass(eq=False)
class Consumer:
    """Somebody who is owed updates: what it must get, and what it got."""

    name: str
    observes: bool = False
    replay_only: bool = False
    expected: list[Entry] = field(default_factory=list[Entry])
    got: list[Entry] = field(default_factory=list[Entry])
    #: Observers only: how many updates it has returned from.
    returned: int = 0
    live: bool = True
    #: What waits for it may have been let go: it left, or its session was closed.
    may_miss_the_rest: bool = False
    #: Its session was closed: whether it sees what still comes until the user knows is not said.
    open_end: bool = False
    #: With the budget spent, what it had not taken was let go for a close, which then failed.
    may_have_a_hole: bool = False

    def fault(self, *, complete: bool) -> str | None:
        """What is wrong with what it got so far; `complete` asks for everything it is owed."""
        got, expected = self.got, self.expected
        if self.may_have_a_hole:
            expected = [entry for entry in expected if entry in got]
        if self.open_end:
            got = got[: len(expected)]
        if got != expected[: len(got)]:
            return f"{self.name} got {got}, and was to get {expected}"
        if complete and not self.may_miss_the_rest and len(got) != len(expected):
            return f"{self.name} misses {expected[len(got) :]} after {got}"
        return None


@dataclass(eq=False)
class TurnModel:
    """A prompt that was sent."""

    number: int
    consumer: Consumer
    over: bool = False


@dataclass(eq=False)
class SessionModel:
    """One session at the client."""

    session_id: str
    turn: TurnModel | None = None
    #: A turn that was given up and whose answer has not come: its updates are nobody's but watchers'.
    winding_down: int | None = None
    winding_until: float = 0.0
    #: The turn that was given up last, and when.
    given_up: tuple[Any, float] | None = None
    #: Whether the agent has said that it is open: one whose load is given up before is forgotten.
    opened: bool = False
    loading: bool = False
    closing: bool = False
    #: When it last gave a sign of life: an update, a prompt sent.
    heard_at: float = 0.0
    backlog: list[Entry] = field(default_factory=list[Entry])
    consumers: list[Consumer] = field(default_factory=list[Consumer])

    def watched(self) -> bool:
        return any(consumer.live for consumer in self.consumers)

    def deliver(self, number: int, now: float) -> None:
        self.heard_at = now
        if self.winding_down is not None and now >= self.winding_until:
            self.winding_down = None
        turn = self.turn
        if turn is not None or self.winding_down is not None:
            label = "turn"
        else:
            label = "replay" if self.loading else "session"
        entry = (number, label)
        if turn is not None:
            turn.consumer.expected.append(entry)
        elif self.winding_down is None and not self.watched() and not self.closing:
            self.backlog.append(entry)
        for consumer in self.consumers:
            if consumer.live:
                consumer.expected.append(entry)

    # -------------------------------------------------------------- consumers

    def subscribe(self, name: str) -> Consumer:
        """The first consumer gets what arrived outside a turn and was seen by nobody."""
        consumer = Consumer(name, expected=self.backlog)
        self.backlog = []
        self.consumers.append(consumer)
        return consumer

    def watch_replay(self, name: str) -> Consumer:
        consumer = Consumer(name, replay_only=True)
        consumer.expected = [entry for entry in self.backlog if entry[1] == "replay"]
        self.backlog = [entry for entry in self.backlog if entry[1] != "replay"]
        consumer.live = self.loading
        self.consumers.append(consumer)
        return consumer

    def observe(self, name: str, *, first: bool) -> Consumer:
        """The first observer gets the backlog as well.

        `first` after others have left is told, not concluded: the last of them may still be busy.
        """
        consumer = Consumer(name, observes=True)
        if first:
            consumer.expected, self.backlog = self.backlog, []
        self.consumers.append(consumer)
        return consumer

    # -------------------------------------------------------------- the session's life

    def load_ends(self) -> None:
        self.loading = False
        for consumer in self.consumers:
            if consumer.replay_only:
                consumer.live = False

    def close_begins(self) -> None:
        """What waits is let go, subscriptions end (DESIGN §4.4)."""
        self.closing = True
        self.backlog = []
        for consumer in self.consumers:
            if not consumer.observes:
                consumer.live = False
                consumer.may_miss_the_rest = True
        if self.turn is not None:
            self.turn.consumer.may_miss_the_rest = True

    def end(self) -> None:
        for consumer in self.consumers:
            consumer.live = False

    def closed(self) -> None:
        self.close_begins()
        for consumer in self.consumers:
            consumer.open_end = True
        if self.turn is not None:
            self.turn.consumer.open_end = True
        self.end()


@dataclass(eq=False)
class CallModel:
    """A request of our client."""

    method: str
    number: int
    session_id: str | None
    answered: bool = False
    given_up: bool = False
    given_up_at: float = 0.0
    #: For each consumer of the session: how much it must have before the answer is seen.
    mark: list[tuple[Consumer, int]] | None = None


class DeliveryModel:
    """Everything a client's connection owes its consumers."""

    def __init__(self, backstop: float) -> None:
        self.sessions: dict[str, SessionModel] = {}
        self.calls: dict[Any, CallModel] = {}
        self.turns: dict[int, TurnModel] = {}
        self.lost = False
        #: Consumers of sessions that are gone as well.
        self.consumers: list[Consumer] = []
        #: Observes every session that becomes known.
        self.watches_all = False
        self._backstop = backstop
        self._strays: list[tuple[str, int]] = []

    # -------------------------------------------------------------- frames

    def sent_request(self, id_: Any, method: str, params: dict[str, Any]) -> CallModel:
        """Our client's request leaves."""
        session_id = params.get("sessionId")
        call = self.calls[id_] = CallModel(method, _number_of(method, params), session_id)
        session = self.sessions.get(session_id) if session_id is not None else None
        if method in ("session/load", "session/resume") and session_id is not None:
            if session is None:
                session = self._open(session_id, 0.0)
            session.loading = True
        elif method == "session/prompt":
            number = call.number
            turn = self.turns[number] = TurnModel(number, Consumer(f"turn {number}"))
            self.consumers.append(turn.consumer)
            if session is None:  # it was closed meanwhile: the agent will say so
                turn.consumer.open_end = True
            else:
                session.turn = turn
        elif session is None:
            pass
        elif method == "session/close":
            session.close_begins()
        return call

    def gave_up(self, id_: Any, now: float) -> None:
        """`$/cancel_request` leaves: nobody waits for that answer any more."""
        call = self.calls.get(id_)
        if call is None or call.answered:
            return
        call.given_up, call.given_up_at = True, now
        session = self.sessions.get(call.session_id or "")
        if session is None:
            return
        if call.method == "session/prompt":
            if session.turn is not None and session.turn.number == call.number:
                session.turn.over = True
                session.turn = None
                session.given_up = (id_, now)
        elif call.method in ("session/load", "session/resume"):
            session.load_ends()
            if not session.opened:
                self.forget(session.session_id)
        elif call.method == "session/close":
            session.closing = False

    def cancel_sent(self, session_id: str, now: float) -> None:
        """`session/cancel` leaves; with it a turn that was just given up begins to wind down."""
        session = self.sessions.get(session_id)
        if session is not None and session.given_up is not None:
            id_, when = session.given_up
            session.given_up = None
            if when == now:
                session.winding_down = id_
                session.winding_until = now + self._backstop

    def answered(self, id_: Any, *, ok: bool, result: dict[str, Any], now: float) -> None:
        """A response reaches our client."""
        call = self.calls.get(id_)
        if call is None or call.answered or self.lost:
            return
        session = self.sessions.get(call.session_id or "")
        if call.given_up:
            if session is not None and session.winding_down == id_:
                session.winding_down = None
            call.answered = True
            return
        call.answered = True
        if call.method == "session/new" and ok:
            session = self._open(result["sessionId"], now)
            session.opened = True
        if session is not None:
            call.mark = [(c, len(c.expected)) for c in session.consumers if c.live]
        else:
            call.mark = []
        if session is None:
            return
        if call.method == "session/prompt":
            if session.turn is not None and session.turn.number == call.number:
                call.mark.append((session.turn.consumer, len(session.turn.consumer.expected)))
                session.turn.over = True
                session.turn = None
        elif call.method in ("session/load", "session/resume"):
            session.load_ends()
            if ok:
                session.opened = True
            elif not session.opened:
                self.forget(session.session_id)
        elif call.method == "session/close":
            if ok:
                self.forget(session.session_id)
            else:
                session.closing = False

    def update(self, session_id: str, number: int, now: float) -> None:
        """A `session/update` reaches our client."""
        if self.lost:
            return
        session = self.sessions.get(session_id)
        if session is None:
            if not self._late_history(session_id, now):
                self._strays.append((session_id, number))
        else:
            session.deliver(number, now)

    def _late_history(self, session_id: str, now: float) -> bool:
        """Whether it may be history of a load that was given up: the next load shall not show it."""
        return any(
            call.given_up
            and not call.answered
            and call.session_id == session_id
            and call.method in ("session/load", "session/resume")
            and now < call.given_up_at + self._backstop
            for call in self.calls.values()
        )

    def connection_lost(self) -> None:
        self.lost = True
        for session in self.sessions.values():
            session.end()

    # -------------------------------------------------------------- sessions

    def forget(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.closed()

    def _open(self, session_id: str, now: float) -> SessionModel:
        """A session becomes known; what came for it before is its (DESIGN §4.3)."""
        session = self.sessions[session_id] = SessionModel(session_id)
        if self.watches_all:
            self.joined(session.observe(f"the client's observer of {session_id}", first=True))
        strays, self._strays = self._strays, []
        for stray_id, number in strays:
            if stray_id == session_id:
                session.deliver(number, now)
            else:
                self._strays.append((stray_id, number))
        return session

    def joined(self, consumer: Consumer) -> Consumer:
        self.consumers.append(consumer)
        return consumer

    def observer_of(self, session_id: str) -> Consumer | None:
        """The client's own observer of a session, the newest of that name."""
        name = f"the client's observer of {session_id}"
        for consumer in reversed(self.consumers):
            if consumer.name == name:
                return consumer
        return None


def _number_of(method: str, params: dict[str, Any]) -> int:
    """The number that the world hid in the parameters of a call."""
    match method:
        case "session/prompt":
            return int(params["prompt"][0]["text"])
        case "session/set_mode":
            return int(params["modeId"])
        case "session/new" | "session/load" | "session/resume":
            return int(params["cwd"].rsplit("/", 1)[1])
        case _:
            return -1
