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

from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TABLE", "Effect", "Event", "State", "Step", "TurnStates"]

T = TypeVar("T")


class Names(type):
    """Class of a closed set of names, one for each annotation; iterating gives them in their order.

    In place of `Enum`, of which every agent that starts waits a millisecond for these three.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> None:
        super().__init__(name, bases, namespace)
        for member in cls.__annotations__:
            setattr(cls, member, cls(member))

    def __iter__(cls: type[T]) -> Iterator[T]:
        return (getattr(cls, member) for member in cls.__annotations__)


class Name(metaclass=Names):
    """One of them: the same as itself, and as nothing else."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class State(Name):
    """What a session does."""

    __slots__ = ()

    #: No turn is open.
    IDLE: ClassVar[State]
    #: A turn is open, and its task has not begun.
    STARTING: ClassVar[State]
    #: A turn is open, and its handler was called.
    PROMPTING: ClassVar[State]
    #: The open turn was asked to stop and winds down.
    CANCELLING: ClassVar[State]
    #: The same, because the session is to be closed or deleted, which waits for it.
    ENDING: ClassVar[State]
    #: `session/load` is handled: no turn, but the history may be sent.
    LOADING: ClassVar[State]
    #: `session/resume` is handled.
    RESUMING: ClassVar[State]
    #: `session/close` or `session/delete` is handled, and no turn is open any more.
    CLOSING: ClassVar[State]
    #: It was closed, or could not be loaded: no message finds it, nothing can be told about it.
    GONE: ClassVar[State]


class Event(Name):
    """What may happen. The ones of a turn come with it, so that those of a former turn are known."""

    __slots__ = ()

    # of the session
    #: `session/prompt`, in the order of the wire.
    PROMPT: ClassVar[Event]
    #: `session/cancel`, in the order of the wire.
    CANCEL: ClassVar[Event]
    #: `session/load` or `session/resume` begins, and its handler has ended somehow.
    LOAD: ClassVar[Event]
    RESUME: ClassVar[Event]
    LOADED: ClassVar[Event]
    #: `session/close` or `session/delete` begins, and has ended somehow.
    CLOSE: ClassVar[Event]
    CLOSED: ClassVar[Event]
    #: The connection forgets the session: it is closed, or its load has failed.
    FORGOTTEN: ClassVar[Event]
    #: `session/set_mode` or `session/set_config_option`.
    SET_MODE: ClassVar[Event]
    #: An update about the session: commands, mode, options, info, usage, notices.
    SESSION_UPDATE: ClassVar[Event]
    #: The client will send nothing more.
    INPUT_ENDED: ClassVar[Event]
    #: The client is gone.
    LOST: ClassVar[Event]

    # of a turn
    #: `$/cancel_request` names its prompt.
    PROMPT_CANCELLED: ClassVar[Event]
    #: Its task begins to run.
    BEGIN: ClassVar[Event]
    #: Its handler returned.
    RESULT: ClassVar[Event]
    #: Its handler raised.
    CRASH: ClassVar[Event]
    #: Its handler ended with `CancelledError`.
    INTERRUPTED: ClassVar[Event]
    #: Its handler and all its subtasks have ended.
    DRAINED: ClassVar[Event]
    #: Its task was ended from outside: with the loop, with the programme.
    ABORTED: ClassVar[Event]
    #: The time that it had to wind down is up.
    BACKSTOP: ClassVar[Event]
    #: An update that tells what a turn does (also of the session, where no turn is named).
    TURN_UPDATE: ClassVar[Event]
    #: A question to the user: a permission, a form.
    ASK: ClassVar[Event]
    #: Something of the client's is to be used: a file, a terminal.
    USE: ClassVar[Event]
    #: A subtask is to be started.
    SUBTASK: ClassVar[Event]


class Effect(Name):
    """What is to be done, in the order of the step's effects."""

    __slots__ = ()

    #: The prompt's turn is the session's from here on.
    OPEN: ClassVar[Effect]
    #: The handler is called.
    RUN: ClassVar[Effect]
    #: What the handler ended with is kept for the answer.
    KEEP: ClassVar[Effect]
    #: The turn is told that it was cancelled; open questions end as a no and are withdrawn.
    TELL: ClassVar[Effect]
    #: The back-stop of this turn is armed.
    ARM: ClassVar[Effect]
    #: The prompt is answered with what was kept.
    ANSWER: ClassVar[Effect]
    #: Its task answers `cancelled`, whatever was kept; of a response, what it has used counts.
    ANSWER_CANCELLED: ClassVar[Effect]
    #: The same, at once and in place of its task, which is not waited for.
    ANSWER_AT_ONCE: ClassVar[Effect]
    #: It is answered with what ended the task, at the connection's boundary.
    ANSWER_ERROR: ClassVar[Effect]
    #: The turn is over: it is no longer the session's, its back-stop is disarmed.
    SEAL: ClassVar[Effect]
    #: The tasks of the turn that are left are cancelled, and waited for no more.
    KILL: ClassVar[Effect]
    #: Served, sent, asked, started.
    ALLOW: ClassVar[Effect]
    #: Not asked; it counts as a no.
    DENY: ClassVar[Effect]
    #: `TurnOver` is raised.
    REFUSE_OVER: ClassVar[Effect]
    #: `LocalProtocolError` is raised: there is no such session any more.
    REFUSE_GONE: ClassVar[Effect]
    #: -32600, each with its own words.
    REFUSE_IN_FLIGHT: ClassVar[Effect]
    REFUSE_LOADING: ClassVar[Effect]
    REFUSE_CLOSING: ClassVar[Effect]


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


# Found at each step.
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
