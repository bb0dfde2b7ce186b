"""The table of a session's states, entry by entry and in any order of events."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sessions import _turn_states
from antiphon.sessions._turn_states import TABLE, Effect, Event, State, Step, TurnStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITH_A_TURN = frozenset((State.STARTING, State.PROMPTING, State.CANCELLING, State.ENDING))
OF_A_TURN = frozenset(
    (
        Event.PROMPT_CANCELLED,
        Event.BEGIN,
        Event.RESULT,
        Event.CRASH,
        Event.INTERRUPTED,
        Event.DRAINED,
        Event.ABORTED,
        Event.BACKSTOP,
        Event.TURN_UPDATE,
        Event.ASK,
        Event.USE,
        Event.SUBTASK,
    )
)
#: What a session may tell as well, with no turn named.
FROM_SESSIONS = frozenset((Event.TURN_UPDATE,))
REFUSALS = frozenset((Effect.REFUSE_IN_FLIGHT, Effect.REFUSE_LOADING, Effect.REFUSE_CLOSING))
ANSWERS = frozenset(
    (Effect.ANSWER, Effect.ANSWER_CANCELLED, Effect.ANSWER_AT_ONCE, Effect.ANSWER_ERROR)
)


def entries() -> Iterator[tuple[Event, State, Step]]:
    for event, row in TABLE.items():
        for state, step in row.items():
            yield event, state, step


# ------------------------------------------------------------------ the table as it is written


def test_it_has_no_loop_no_clock_and_no_message_in_it() -> None:
    source = Path(_turn_states.__file__).read_text(encoding="utf-8")
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert imported == {"__future__", "collections.abc", "typing"}


def test_every_event_is_defined_in_every_state() -> None:
    assert set(TABLE) == set(Event)
    for event, row in TABLE.items():
        assert set(row) == set(State), event


def test_every_effect_is_of_use_and_every_state_is_reached_and_left() -> None:
    assert {effect for _, _, step in entries() for effect in step.effects} == set(Effect)
    moves = {(state, step.next) for _, state, step in entries() if step.next not in (None, state)}
    assert {state for state, _ in moves} == set(State) - {State.GONE}
    assert {state for _, state in moves} == set(State)


def test_a_refusal_changes_nothing() -> None:
    for event, state, step in entries():
        if (REFUSALS | {Effect.REFUSE_OVER, Effect.REFUSE_GONE}) & {*step.effects}:
            assert step == Step(None, step.effects[:1]), (event, state)


def test_an_answer_ends_the_turn_and_nothing_else_does() -> None:
    for event, state, step in entries():
        answers = ANSWERS & {*step.effects}
        assert len(answers) == (Effect.SEAL in step.effects), (event, state)
        leaves = state in WITH_A_TURN and step.next not in (None, *WITH_A_TURN)
        assert bool(answers) == leaves, (event, state)
        if answers:
            assert step.effects[-1] in answers


def test_only_a_turn_that_was_not_cancelled_is_answered_with_what_its_handler_said() -> None:
    for event, state, step in entries():
        if Effect.ANSWER in step.effects:
            assert (event, state) == (Event.DRAINED, State.PROMPTING)


@pytest.mark.parametrize("event", [Event.BEGIN, Event.RESULT])
def test_a_handler_s_beginning_and_its_result_ask_nothing_of_the_session(event: Event) -> None:
    # So that the router may take these two steps of each prompt without it.
    assert all(step.duties == () for step in TABLE[event].values())


def test_a_turn_is_told_once_that_it_is_cancelled() -> None:
    for event, state, step in entries():
        stopped = state is State.PROMPTING and step.next in (State.CANCELLING, State.ENDING)
        unborn = state is State.STARTING and Effect.ANSWER_AT_ONCE in step.effects
        assert (Effect.TELL in step.effects) == (stopped or unborn), (event, state)


def test_what_happens_to_a_turn_that_is_over_moves_nothing() -> None:
    for event in OF_A_TURN:
        step = TABLE[event][State.IDLE]
        assert step.next is None, event
        assert not {*step.effects} - {Effect.DENY, Effect.REFUSE_OVER}, event


def test_an_update_of_a_turn_is_legal_exactly_while_it_is_the_session_s() -> None:
    """The verbs look at that alone, since a look into the table is dear there."""
    for state, step in TABLE[Event.TURN_UPDATE].items():
        if state is not State.LOADING:  # no turn, but history
            assert (step.effects == (Effect.ALLOW,)) == (state in WITH_A_TURN), state
    assert TABLE[Event.TURN_UPDATE][State.LOADING].effects == (Effect.ALLOW,)


# ------------------------------------------------------------------ the table as it is told

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "cancellation.md"
COLUMNS = (State.IDLE, State.STARTING, State.PROMPTING, State.CANCELLING)
#: What the page calls an event, and what is allowed where an event is.
EVENTS: dict[str, tuple[Event, str]] = {
    "`session/prompt`": (Event.PROMPT, ""),
    "its task begins": (Event.BEGIN, ""),
    "`session/cancel`": (Event.CANCEL, ""),
    "`$/cancel_request` for the prompt": (Event.PROMPT_CANCELLED, ""),
    "handler and subtasks have ended": (Event.DRAINED, ""),
    "back-stop": (Event.BACKSTOP, ""),
    "message, thought, plan, tool call": (Event.TURN_UPDATE, "sent"),
    "update about the session": (Event.SESSION_UPDATE, "sent"),
    "question to the user": (Event.ASK, "sent"),
    "file or terminal of the client": (Event.USE, "sent"),
    "new subtask": (Event.SUBTASK, "started"),
    "`session/set_mode`": (Event.SET_MODE, "served"),
    "`session/load`": (Event.LOAD, ""),
    "`session/close`": (Event.CLOSE, ""),
}
WORDS: dict[Effect, str] = {
    Effect.OPEN: "",
    Effect.RUN: "handler called",
    Effect.TELL: "told",
    Effect.ARM: "",
    Effect.SEAL: "",
    Effect.KILL: "tasks cancelled",
    Effect.ANSWER: "answered",
    Effect.ANSWER_CANCELLED: "answered cancelled",
    Effect.ANSWER_AT_ONCE: "answered cancelled",
    Effect.DENY: "a no",
    Effect.REFUSE_OVER: "`TurnOver`",
    Effect.REFUSE_IN_FLIGHT: "refused",
}


def in_words(step: Step, state: State, allowed: str) -> str:
    """One cell of the page."""
    effects = list(step.effects)
    if state is State.STARTING and Effect.ANSWER_AT_ONCE in effects:
        effects = [Effect.ANSWER_AT_ONCE]  # there is hardly anybody to tell, nor a task
    words = [allowed if effect is Effect.ALLOW else WORDS[effect] for effect in effects]
    said = ", ".join(word for word in words if word)
    if step.next is not None:
        said = f"{said} → {step.next.name.lower()}".strip()
    return said or "nothing"


def test_the_page_about_cancellation_shows_the_table() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    heading = ["Event", *(state.name.lower() for state in COLUMNS)]
    rows = rows[rows.index(heading) + 2 :]

    assert [row[0] for row in rows] == list(EVENTS)
    for name, *cells in rows:
        event, allowed = EVENTS[name]
        assert cells == [in_words(TABLE[event][s], s, allowed) for s in COLUMNS], name


# ------------------------------------------------------------------ any order of events


@dataclass
class Prompt:
    """One prompt, as a client and an observer of its tasks see it."""

    number: int
    cancelled: bool = False
    begun: bool = False
    running: bool = False
    ended: bool = False
    subtasks: int = 0
    drained: bool = False
    armed: bool = False
    replies: list[str] = field(default_factory=list[str])


class World:
    """Feeds `TurnStates` as its drivers do, and knows by itself what has to come of it."""

    def __init__(self) -> None:
        self.states: TurnStates[Prompt] = TurnStates()
        self.prompts: list[Prompt] = []
        self.setup: str | None = None
        self.closing = False
        self.gone = False

    @property
    def open(self) -> Prompt | None:
        """The prompt that has no reply yet."""
        waiting = [prompt for prompt in self.prompts if not prompt.replies]
        assert len(waiting) <= 1, "two turns at once"
        return waiting[0] if waiting else None

    def fire(self, event: Event, prompt: Prompt | None = None) -> frozenset[Effect]:
        concerned = self.states.turn if prompt is None else prompt
        over = concerned is not None and bool(concerned.replies)
        before = self.states.state, self.states.turn
        effects = frozenset(self.states.fire(event, prompt).effects)
        if REFUSALS & effects:
            assert (self.states.state, self.states.turn) == before, "a refusal moved something"
        if concerned is not None:
            if Effect.TELL in effects:
                assert not over, "told after it was over"
            if Effect.ARM in effects:
                concerned.armed = True
            if Effect.SEAL in effects:
                assert self.states.turn is None
            self.answered(concerned, effects)
        assert (self.states.turn is None) == (self.states.state not in WITH_A_TURN)
        assert self.states.turn is self.open, "the open turn is the one without a reply"
        return effects

    def answered(self, prompt: Prompt, effects: frozenset[Effect]) -> None:
        for effect in ANSWERS & effects:
            prompt.replies.append(effect.name)
            assert len(prompt.replies) == 1, "a second reply"
            if effect is Effect.ANSWER:
                assert not prompt.cancelled, "cancelled, and answered as if it were not"
                assert prompt.ended
                assert not prompt.subtasks, "answered before its subtasks ended"
            elif effect is not Effect.ANSWER_ERROR:
                assert prompt.cancelled, "nobody cancelled it"

    # -- what may happen; `prompt` is any one there was

    def act_prompt(self) -> None:
        busy = self.open is not None or self.setup is not None or self.closing
        prompt = Prompt(len(self.prompts))
        effects = frozenset(self.states.fire(Event.PROMPT, prompt).effects)
        assert busy == bool(REFUSALS & effects)
        if Effect.OPEN in effects:
            self.prompts.append(prompt)
        else:
            assert self.states.turn is not prompt

    def act_cancel(self, event: Event = Event.CANCEL) -> None:
        unborn = self.open if self.open is not None and not self.open.begun else None
        if self.open is not None:
            self.open.cancelled = True
        self.fire(event)
        assert unborn is None or unborn.replies, "nothing to wait for, and no reply"

    def act_input_ended(self) -> None:
        self.act_cancel(Event.INPUT_ENDED)

    def act_lost(self) -> None:
        self.act_cancel(Event.LOST)

    def act_cancel_request(self, prompt: Prompt) -> None:
        prompt.cancelled |= not prompt.replies
        self.fire(Event.PROMPT_CANCELLED, prompt)

    def act_begin(self, prompt: Prompt) -> None:
        if not prompt.begun:
            prompt.begun = True
            expected = not prompt.cancelled and not prompt.replies
            assert (Effect.RUN in self.fire(Event.BEGIN, prompt)) == expected
            prompt.running = expected

    def act_end(self, prompt: Prompt, event: Event = Event.RESULT) -> None:
        if prompt.running and not prompt.ended:
            prompt.ended = True
            live, error = not prompt.replies, not prompt.cancelled
            effects = self.fire(event, prompt)
            if event is Event.INTERRUPTED and live and error:
                assert Effect.ANSWER_ERROR in effects
            else:
                assert (Effect.KEEP in effects) == live

    def act_crash(self, prompt: Prompt) -> None:
        self.act_end(prompt, Event.CRASH)

    def act_interrupted(self, prompt: Prompt) -> None:
        self.act_end(prompt, Event.INTERRUPTED)

    def act_drain(self, prompt: Prompt) -> None:
        done = prompt.begun and (prompt.ended or not prompt.running) and not prompt.subtasks
        if done and not prompt.drained:
            prompt.drained = True
            self.fire(Event.DRAINED, prompt)
            assert prompt.replies, "drained, and no reply"

    def act_abort(self, prompt: Prompt) -> None:
        prompt.begun = True
        self.fire(Event.ABORTED, prompt)
        assert prompt.replies, "its task is gone, and no reply"

    def act_backstop(self, prompt: Prompt) -> None:
        if prompt.armed:
            prompt.armed = False
            others = self.open if self.open is not prompt else None
            self.fire(Event.BACKSTOP, prompt)
            assert prompt.replies, "past the back-stop, and no reply"
            assert others is None or not others.replies, "hit another turn"

    def act_update(self, prompt: Prompt) -> None:
        effects = self.fire(Event.TURN_UPDATE, prompt)
        expected = Effect.REFUSE_OVER if prompt.replies else Effect.ALLOW
        assert effects == {expected}, "an update after the reply, or refused before it"
        assert self.fire(Event.USE, prompt) == {expected}

    def act_session_tells(self) -> None:
        expected = Effect.REFUSE_GONE if self.gone else Effect.ALLOW
        assert self.fire(Event.SESSION_UPDATE) == {expected}
        allowed = self.open is not None or self.setup == "load"
        effects = self.fire(Event.TURN_UPDATE)
        assert effects == {Effect.ALLOW if allowed else Effect.REFUSE_OVER}

    def act_ask(self, prompt: Prompt) -> None:
        effects = self.fire(Event.ASK, prompt)
        allowed = not prompt.replies and not prompt.cancelled
        assert effects == {Effect.ALLOW if allowed else Effect.DENY}

    def act_subtask(self, prompt: Prompt) -> None:
        if not prompt.ended or prompt.subtasks:  # else nobody is left who could
            allowed = not prompt.replies and not prompt.cancelled
            effects = self.fire(Event.SUBTASK, prompt)
            assert effects == {Effect.ALLOW if allowed else Effect.REFUSE_OVER}
            prompt.subtasks += allowed

    def act_subtask_ends(self, prompt: Prompt) -> None:
        prompt.subtasks = max(0, prompt.subtasks - 1)

    def act_set_mode(self) -> None:
        assert self.fire(Event.SET_MODE) == {Effect.ALLOW}

    def act_load(self, event: Event = Event.LOAD) -> None:
        busy = self.open is not None or self.setup is not None or self.closing
        assert bool(REFUSALS & self.fire(event)) == busy
        if not busy:
            self.setup = event.name.lower()

    def act_resume(self) -> None:
        self.act_load(Event.RESUME)

    def act_loaded(self, *, fails: bool = False) -> None:
        if self.setup is not None:
            self.setup = None
            self.forget(fails)
            self.fire(Event.LOADED)

    def act_load_fails(self) -> None:
        self.act_loaded(fails=True)

    def act_close(self) -> None:
        busy = self.setup is not None or self.closing
        if self.open is not None and not busy:
            self.open.cancelled = True
        assert bool(REFUSALS & self.fire(Event.CLOSE)) == busy
        self.closing |= not busy

    def act_closed(self, *, succeeds: bool = False) -> None:
        if self.closing:
            self.closing = False
            self.forget(succeeds and self.open is None)
            self.fire(Event.CLOSED)

    def act_close_succeeds(self) -> None:
        self.act_closed(succeeds=True)

    def forget(self, really: bool) -> None:
        if really:
            self.gone = True
            self.fire(Event.FORGOTTEN)

    # -- the end

    def settle(self) -> None:
        """Let what is open come to its end, and see that the session takes a prompt again."""
        self.act_loaded()
        if self.open is not None:
            prompt = self.open
            self.act_begin(prompt)
            self.act_end(prompt)
            prompt.subtasks = 0
            self.act_drain(prompt)
        self.act_closed()
        assert [len(prompt.replies) for prompt in self.prompts] == [1] * len(self.prompts)
        if self.gone:
            self.act_session_tells()
            return
        assert self.states.state is State.IDLE
        self.act_prompt()
        assert self.open is not None
        self.act_begin(self.open)
        assert self.prompts[-1].running, "a cancellation of something else reached it"


#: What happens to a turn, and to the session.
TO_TURNS: list[Callable[[World, Prompt], None]] = [
    World.act_cancel_request,
    World.act_begin,
    World.act_end,
    World.act_crash,
    World.act_interrupted,
    World.act_drain,
    World.act_abort,
    World.act_backstop,
    World.act_update,
    World.act_ask,
    World.act_subtask,
    World.act_subtask_ends,
]
TO_SESSIONS: list[Callable[[World], None]] = [
    World.act_prompt,
    World.act_prompt,
    World.act_cancel,
    World.act_input_ended,
    World.act_lost,
    World.act_session_tells,
    World.act_set_mode,
    World.act_load,
    World.act_resume,
    World.act_loaded,
    World.act_close,
    World.act_closed,
    World.act_load_fails,
    World.act_close_succeeds,
]
#: What happens without a message that names the session: all that can if it is gone.
UNNAMED = (World.act_session_tells, World.act_lost, World.act_input_ended)

#: (what, to which prompt counted from the newest)
Script = list[tuple[int, int]]


def play(script: Script) -> None:
    world = World()
    for what, which in script:
        if what < len(TO_SESSIONS):
            act = TO_SESSIONS[what]
            if not world.gone or act in UNNAMED:
                act(world)
        elif which < len(world.prompts):
            TO_TURNS[what - len(TO_SESSIONS)](world, world.prompts[-1 - which])
    world.settle()


ACTS = st.integers(0, len(TO_SESSIONS) + len(TO_TURNS) - 1)


@pytest.mark.covers("R1-6", "R1-95", "R1-96", "FF-24", "FF-25", "FF-28", "FF-29")
@settings(max_examples=300)
@given(st.lists(st.tuples(ACTS, st.integers(0, 2)), max_size=40))
def test_in_any_order_of_events_each_prompt_has_one_reply_and_the_right_one(script: Script) -> None:
    """One reply each, no update after it, cancelled beats all, nothing reaches another turn."""
    play(script)


def reachable() -> list[tuple[Event, State]]:
    """The entries that do something; without a turn of its own, a turn meets the idle row alone."""
    return [
        (event, state)
        for event, state, step in entries()
        if step != Step(None, ())
        and (state is State.IDLE or state in WITH_A_TURN or event not in OF_A_TURN - FROM_SESSIONS)
        # A session that is gone is found by no message, and forgotten only by those that were.
        and (state is not State.GONE or event in (Event.SESSION_UPDATE, Event.TURN_UPDATE))
        and (event, state) != (Event.FORGOTTEN, State.IDLE)
    ]


@pytest.mark.parametrize(("event", "state"), reachable(), ids=lambda value: value.name.lower())
def test_the_orders_of_events_would_show_any_entry_to_be_missing(
    event: Event, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this entry some order of events breaks what holds in every order (a dead control)."""
    monkeypatch.setitem(TABLE[event], state, Step(None, ()))
    chance = random.Random(f"{event}{state}")
    with pytest.raises(AssertionError):
        for _ in range(20_000):
            play([(chance.randrange(26), chance.randrange(3)) for _ in range(14)])
