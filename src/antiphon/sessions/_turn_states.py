"""Where a session of an agent stands, and what each event does to it: one table, and nothing else.

Responsible for every decision about turns: which prompt runs, which is refused, what a cancellation
reaches, when a turn is answered and with what, which verb is still legal. Leaves carrying it out to
`AgentSession` and `Turn`, which feed it events and do what the effects say. There is no task, clock or
message in here, so that any order of events can be tried without them.

A session has one state. A turn has none of its own: it is the session's, or it is over. What happens to
a turn that is over (a back-stop that comes late, a verb of a subtask that lived on) meets the row of an
idle session, whatever the session does by then.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Generic, TypeVar

__all__ = ["TABLE", "Effect", "Event", "State", "Step", "TurnStates"]

T = TypeVar("T")


class State(Enum):
    """What a session does."""

    __hash__ = object.__hash__  # they are keys in every step, and Enum's own is slow

    #: No turn is open.
    IDLE = auto()
    #: A turn is open, and its task has not begun.
    STARTING = auto()
    #: A turn is open, and its handler was called.
    PROMPTING = auto()
    #: The open turn was asked to stop and winds down.
    CANCELLING = auto()
    #: The same, because the session is to be closed or deleted, which waits for it.
    ENDING = auto()
    #: `session/load` is handled: no turn, but the history may be sent.
    LOADING = auto()
    #: `session/resume` is handled.
    RESUMING = auto()
    #: `session/close` or `session/delete` is handled, and no turn is open any more.
    CLOSING = auto()
    #: It was closed, or could not be loaded: no message finds it, nothing can be told about it.
    GONE = auto()


class Event(Enum):
    """What may happen. The ones of a turn come with it, so that those of a former turn are known."""

    __hash__ = object.__hash__  # they are keys in every step, and Enum's own is slow

    # of the session
    #: `session/prompt`, in the order of the wire.
    PROMPT = auto()
    #: `session/cancel`, in the order of the wire.
    CANCEL = auto()
    #: `session/load` or `session/resume` begins, and its handler has ended somehow.
    LOAD = auto()
    RESUME = auto()
    LOADED = auto()
    #: `session/close` or `session/delete` begins, and has ended somehow.
    CLOSE = auto()
    CLOSED = auto()
    #: The connection forgets the session: it is closed, or its load has failed.
    FORGOTTEN = auto()
    #: `session/set_mode` or `session/set_config_option`.
    SET_MODE = auto()
    #: An update about the session: commands, mode, options, info, usage, notices.
    SESSION_UPDATE = auto()
    #: The client will send nothing more.
    INPUT_ENDED = auto()
    #: The client is gone.
    LOST = auto()

    # of a turn
    #: `$/cancel_request` names its prompt.
    PROMPT_CANCELLED = auto()
    #: Its task begins to run.
    BEGIN = auto()
    #: Its handler returned.
    RESULT = auto()
    #: Its handler raised.
    CRASH = auto()
    #: Its handler ended with `CancelledError`.
    INTERRUPTED = auto()
    #: Its handler and all its subtasks have ended.
    DRAINED = auto()
    #: Its task was ended from outside: with the loop, with the programme.
    ABORTED = auto()
    #: The time that it had to wind down is up.
    BACKSTOP = auto()
    #: An update that tells what a turn does (also of the session, where no turn is named).
    TURN_UPDATE = auto()
    #: A question to the user: a permission, a form.
    ASK = auto()
    #: Something of the client's is to be used: a file, a terminal.
    USE = auto()
    #: A subtask is to be started.
    SUBTASK = auto()


class Effect(Enum):
    """What is to be done, in the order of the step's effects."""

    __hash__ = object.__hash__  # they are keys in every step, and Enum's own is slow

    #: The prompt's turn is the session's from here on.
    OPEN = auto()
    #: The handler is called.
    RUN = auto()
    #: What the handler ended with is kept for the answer.
    KEEP = auto()
    #: The turn is told that it was cancelled; open questions end as a no and are withdrawn.
    TELL = auto()
    #: The back-stop of this turn is armed.
    ARM = auto()
    #: The prompt is answered with what was kept.
    ANSWER = auto()
    #: Its task answers `cancelled`, whatever was kept; of a response, what it has used counts.
    ANSWER_CANCELLED = auto()
    #: The same, at once and in place of its task, which is not waited for.
    ANSWER_AT_ONCE = auto()
    #: It is answered with what ended the task, at the connection's boundary.
    ANSWER_ERROR = auto()
    #: The turn is over: it is no longer the session's, its back-stop is disarmed.
    SEAL = auto()
    #: The tasks of the turn that are left are cancelled, and waited for no more.
    KILL = auto()
    #: Served, sent, asked, started.
    ALLOW = auto()
    #: Not asked; it counts as a no.
    DENY = auto()
    #: `TurnOver` is raised.
    REFUSE_OVER = auto()
    #: `LocalProtocolError` is raised: there is no such session any more.
    REFUSE_GONE = auto()
    #: -32600, each with its own words.
    REFUSE_IN_FLIGHT = auto()
    REFUSE_LOADING = auto()
    REFUSE_CLOSING = auto()


#: What the caller of `AgentSession.fire` does, and what `TurnStates` has done by then.
OF_THE_CALLER: Final = frozenset(
    (
        Effect.OPEN,
        Effect.RUN,
        Effect.KEEP,
        Effect.ANSWER,
        Effect.ANSWER_CANCELLED,
        Effect.ANSWER_ERROR,
        Effect.ALLOW,
        Effect.DENY,
    )
)


class Step:
    """What one event does in one state.

    What a step asks for is worked out when the table is made: most steps of a turn ask for nothing,
    and four of them are taken for each prompt.

    Attributes:
        next: the state to go to; None where it stays.
        effects: what is to be done, in order.
        duties: those of them that are the session's, in order.
        opens: whether the turn becomes the session's.
        seals: whether it is so no longer.
    """

    __slots__ = ("duties", "effects", "next", "opens", "seals")

    def __init__(self, following: State | None, effects: tuple[Effect, ...]) -> None:
        self.next = following
        self.effects = effects
        self.duties = tuple(effect for effect in effects if effect not in OF_THE_CALLER)
        self.opens = Effect.OPEN in effects
        self.seals = Effect.SEAL in effects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return (self.next, self.effects) == (other.next, other.effects)

    def __hash__(self) -> int:
        return hash((self.next, self.effects))

    def __repr__(self) -> str:
        return f"Step({self.next}, {self.effects})"


def _to(state: State, *effects: Effect) -> Step:
    return Step(state, effects)


def _stay(*effects: Effect) -> Step:
    return Step(None, effects)


_NOTHING: Final = _stay()


def _row(
    *,
    idle: Step = _NOTHING,
    starting: Step | None = None,
    prompting: Step = _NOTHING,
    cancelling: Step = _NOTHING,
    ending: Step | None = None,
    loading: Step | None = None,
    resuming: Step | None = None,
    closing: Step | None = None,
    gone: Step | None = None,
) -> dict[State, Step]:
    """One event in every state.

    Where nothing else is said, a turn that starts is as one that runs, a session that ends as one that
    cancels, one that is loaded, resumed or closed as one that is idle, and one that is gone as one that
    is closed.
    """
    closing = idle if closing is None else closing
    return {
        State.IDLE: idle,
        State.STARTING: prompting if starting is None else starting,
        State.PROMPTING: prompting,
        State.CANCELLING: cancelling,
        State.ENDING: cancelling if ending is None else ending,
        State.LOADING: idle if loading is None else loading,
        State.RESUMING: idle if resuming is None else resuming,
        State.CLOSING: closing,
        State.GONE: closing if gone is None else gone,
    }


_IN_FLIGHT = _stay(Effect.REFUSE_IN_FLIGHT)
_IS_LOADING = _stay(Effect.REFUSE_LOADING)
_IS_CLOSING = _stay(Effect.REFUSE_CLOSING)
_ALLOWED = _stay(Effect.ALLOW)
_IS_OVER = _stay(Effect.REFUSE_OVER)
_STOP = _to(State.CANCELLING, Effect.TELL, Effect.ARM)
#: The handler was not called, so there is nothing to wait for: the next prompt finds an idle session.
_AT_ONCE = (Effect.TELL, Effect.SEAL, Effect.KILL, Effect.ANSWER_AT_ONCE)
_STILLBORN = _to(State.IDLE, *_AT_ONCE)

TABLE: Final[dict[Event, dict[State, Step]]] = {
    Event.PROMPT: _row(
        idle=_to(State.STARTING, Effect.OPEN),
        prompting=_IN_FLIGHT,
        cancelling=_IN_FLIGHT,
        loading=_IS_LOADING,
        resuming=_IS_LOADING,
        closing=_IS_CLOSING,
    ),
    # Idle: nothing is remembered, so that a stale one cannot reach the next prompt.
    Event.CANCEL: _row(starting=_STILLBORN, prompting=_STOP),
    Event.PROMPT_CANCELLED: _row(starting=_STILLBORN, prompting=_STOP),
    Event.INPUT_ENDED: _row(starting=_STILLBORN, prompting=_STOP),
    # No back-stop: the connection ends the tasks itself, and nobody is left to be answered.
    Event.LOST: _row(starting=_STILLBORN, prompting=_to(State.CANCELLING, Effect.TELL)),
    Event.BEGIN: _row(starting=_to(State.PROMPTING, Effect.RUN)),
    Event.RESULT: _row(
        starting=_NOTHING, prompting=_stay(Effect.KEEP), cancelling=_stay(Effect.KEEP)
    ),
    Event.CRASH: _row(
        starting=_NOTHING, prompting=_stay(Effect.KEEP), cancelling=_stay(Effect.KEEP)
    ),
    # Not by the client: the program has its own reasons, and the turn ends with them.
    Event.INTERRUPTED: _row(
        starting=_NOTHING,
        prompting=_to(State.IDLE, Effect.SEAL, Effect.KILL, Effect.ANSWER_ERROR),
        cancelling=_stay(Effect.KEEP),
    ),
    Event.DRAINED: _row(
        starting=_NOTHING,
        prompting=_to(State.IDLE, Effect.SEAL, Effect.ANSWER),
        cancelling=_to(State.IDLE, Effect.SEAL, Effect.ANSWER_CANCELLED),
        ending=_to(State.CLOSING, Effect.SEAL, Effect.ANSWER_CANCELLED),
    ),
    Event.ABORTED: _row(
        prompting=_to(State.IDLE, Effect.SEAL, Effect.KILL, Effect.ANSWER_ERROR),
        cancelling=_to(State.IDLE, Effect.SEAL, Effect.KILL, Effect.ANSWER_ERROR),
        ending=_to(State.CLOSING, Effect.SEAL, Effect.KILL, Effect.ANSWER_ERROR),
    ),
    # Armed by a cancellation only; a turn that was not cancelled is never ended by a clock.
    Event.BACKSTOP: _row(
        cancelling=_to(State.IDLE, Effect.SEAL, Effect.KILL, Effect.ANSWER_AT_ONCE),
        ending=_to(State.CLOSING, Effect.SEAL, Effect.KILL, Effect.ANSWER_AT_ONCE),
    ),
    Event.TURN_UPDATE: _row(
        idle=_IS_OVER,
        prompting=_ALLOWED,
        cancelling=_ALLOWED,
        loading=_ALLOWED,
        resuming=_IS_OVER,
        closing=_IS_OVER,
    ),
    Event.SESSION_UPDATE: _row(
        idle=_ALLOWED, prompting=_ALLOWED, cancelling=_ALLOWED, gone=_stay(Effect.REFUSE_GONE)
    ),
    Event.ASK: _row(idle=_stay(Effect.DENY), prompting=_ALLOWED, cancelling=_stay(Effect.DENY)),
    Event.USE: _row(idle=_IS_OVER, prompting=_ALLOWED, cancelling=_ALLOWED),
    Event.SUBTASK: _row(idle=_IS_OVER, prompting=_ALLOWED, cancelling=_IS_OVER),
    Event.SET_MODE: _row(idle=_ALLOWED, prompting=_ALLOWED, cancelling=_ALLOWED),
    Event.LOAD: _row(
        idle=_to(State.LOADING),
        prompting=_IN_FLIGHT,
        cancelling=_IN_FLIGHT,
        loading=_IS_LOADING,
        resuming=_IS_LOADING,
        closing=_IS_CLOSING,
    ),
    Event.RESUME: _row(
        idle=_to(State.RESUMING),
        prompting=_IN_FLIGHT,
        cancelling=_IN_FLIGHT,
        loading=_IS_LOADING,
        resuming=_IS_LOADING,
        closing=_IS_CLOSING,
    ),
    Event.LOADED: _row(loading=_to(State.IDLE), resuming=_to(State.IDLE)),
    Event.CLOSE: _row(
        idle=_to(State.CLOSING),
        starting=_to(State.CLOSING, *_AT_ONCE),
        prompting=_to(State.ENDING, Effect.TELL, Effect.ARM),
        cancelling=_to(State.ENDING),
        ending=_IS_CLOSING,
        loading=_IS_LOADING,
        resuming=_IS_LOADING,
        closing=_IS_CLOSING,
    ),
    # Whether it succeeded or not; one that gave up waiting leaves the turn to its own end.
    Event.CLOSED: _row(ending=_to(State.CANCELLING), closing=_to(State.IDLE), gone=_NOTHING),
    # While a turn is open a session is not forgotten.
    Event.FORGOTTEN: _row(idle=_to(State.GONE), gone=_NOTHING),
}


# Python 3.11 takes longer to find a member of an enumeration than for the rest of a step.
_PROMPT, _IDLE = Event.PROMPT, State.IDLE


class TurnStates(Generic[T]):
    """The state of one session, and its open turn.

    Attributes:
        state: what the session does.
        turn: its open turn, if there is one; a turn that is not here is over.
    """

    __slots__ = ("state", "turn")

    def __init__(self) -> None:
        self.state = State.IDLE
        self.turn: T | None = None

    def fire(self, event: Event, turn: T | None = None) -> Step:
        """Take the step of an event, and return it: what it asks for is the caller's to do.

        Args:
            event: what happened.
            turn: whose event it is, None for one of the session. For `Event.PROMPT`, the turn that
                is to be opened.
        """
        if turn is not None and turn is not self.turn and event is not _PROMPT:
            return TABLE[event][_IDLE]  # a turn that is over moves nothing
        step = TABLE[event][self.state]
        if step.next is not None:
            self.state = step.next
        if step.opens:
            self.turn = turn
        elif step.seals:
            self.turn = None
        return step
