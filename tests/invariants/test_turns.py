"""What holds of a session and its turns at the agent (I2 to I19), each against a side that is wrong.

I1 and I10 were never given. Idle reaping, which stands in the same table, belongs to the journal.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    ClientPeer,
    Limits,
    PermissionAnswer,
    Turn,
    TurnOver,
)
from antiphon.schema import v1
from antiphon.sessions import _agent_session, _side_router
from antiphon.sessions._agent_session import AgentSession
from antiphon.sessions._side_router import SideRouter
from antiphon.sessions._turn_states import TABLE, Effect, Event, State, Step, TurnStates
from antiphon.testing import RawPeer, raw_client
from tests.invariants.controls import changed, controlled, on_the_wire, together
from tests.invariants.sides import Played, cancel, chunk, new_session, prompt, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon import AgentContext
    from tests.invariants.controls import Wrong

pytestmark = pytest.mark.virtual_time

Json = dict[str, Any]


def now() -> float:
    return asyncio.get_running_loop().time()


def late(event: Event, seconds: float) -> Wrong:
    """The event reaches its session all the same, only not at once."""

    def fire(original: Any, self: AgentSession, fired: Event, turn: Turn | None = None) -> Any:
        if fired is not event:
            return original(self, fired, turn)
        asyncio.get_running_loop().call_later(seconds, original, self, fired, turn)
        return ()

    return changed(AgentSession, "fire", fire)


def step(event: Event, state: State, *effects: Effect, to: State | None = None) -> Wrong:
    """Another step stands in the table of a session's states."""

    @contextmanager
    def change() -> Generator[list[object]]:
        used: list[object] = []
        original = TurnStates[Any].fire

        def fire(self: TurnStates[Any], fired: Event, turn: Any = None) -> Any:
            if fired is event and self.state is state:
                used.append(fired)
            return original(self, fired, turn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TABLE[event], state, Step(to, effects))
            patch.setattr(TurnStates, "fire", fire)
            yield used

    return change


DEAF = step(Event.CANCEL, State.PROMPTING)


def answer_before_the_update(frames: list[Json]) -> list[Json]:
    """A response overtakes what was written just before it."""
    for index, frame in enumerate(frames[1:], 1):
        if "stopReason" in str(frame.get("result")) and "update" in str(frames[index - 1]):
            frames[index - 1], frames[index] = frame, frames[index - 1]
    return frames


def answered_twice(frames: list[Json]) -> list[Json]:
    return [
        f for frame in frames for f in ((frame, frame) if "stopReason" in str(frame) else (frame,))
    ]


def not_answered(frames: list[Json]) -> list[Json]:
    return [frame for frame in frames if "stopReason" not in str(frame)]


# ---------------------------------------------------------------- I2: registered before it is named


def registers_late(_original: Any, self: ClientPeer, session_id: str, cwd: str, more: Any) -> Any:
    session = AgentSession(self, session_id, cwd, more)
    asyncio.get_running_loop().call_later(1, self.sessions.__setitem__, session_id, session)
    return session


@pytest.mark.covers("I2")
@controlled(registers_late=changed(ClientPeer, "open_session", registers_late))
async def test_a_session_can_be_found_as_soon_as_its_id_is_told() -> None:
    seen: list[Any] = []

    class Looks(Played):
        async def new_session(self, params: Any, ctx: AgentContext) -> Any:
            answer = await super().new_session(params, ctx)
            ctx.after_response(lambda: seen.append(ctx.peer.sessions.get(answer.session_id)))
            return answer

    async with raw_client(Looks()) as raw:
        session_id = await new_session(raw)
        answer = await raw.ask("session/prompt", prompt(0, session_id)["params"])

        assert answer.get("result") == {"stopReason": "end_turn"}
        assert [getattr(session, "session_id", None) for session in seen] == [session_id]


# ---------------------------------------------------------------- I3: nothing follows the response


async def speaks_too_late(_original: Any, self: Turn, text: str) -> None:
    self.session.send_now(chunk(text))


@pytest.mark.covers("I3")
@controlled(
    answer_first=on_the_wire(answer_before_the_update),
    speaks_too_late=changed(Turn, "say", speaks_too_late),
)
async def test_what_a_turn_says_stands_before_its_response_and_later_words_are_refused() -> None:
    turns: list[Turn] = []

    async def play(turn: Turn) -> None:
        turns.append(turn)
        await turn.say("one")
        await turn.say("two")

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await raw.answer_to(7)
        with pytest.raises(TurnOver):
            await turns[0].say("late")
        await raw.round_trip()

        assert texts(raw)[2:5] == ["one", "two", "=7"]
        assert len(raw.sent("session/update")) == 2


# ---------------------------------------------------------------- I4, I5: subtasks


async def waits_for_nobody(_original: Any, self: Turn) -> None:
    pass


@pytest.mark.covers("I4")
@controlled(waits_for_nobody=changed(Turn, "finish", waits_for_nobody))
async def test_there_is_no_response_until_the_last_subtask_has_ended() -> None:
    async def work(turn: Turn) -> None:
        await asyncio.sleep(3)
        await turn.say("done")

    async def play(turn: Turn) -> None:
        turn.start_soon(work(turn))

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        began = now()
        raw.send(prompt(7, session_id))
        answer = await raw.answer_to(7)

        assert now() - began >= 3
        assert answer["result"] == {"stopReason": "end_turn"}
        assert texts(raw)[2:] == ["done", "=7"]


@pytest.mark.covers("I5")
@controlled(deaf=DEAF)
async def test_a_cancel_between_the_result_and_the_last_subtask_makes_it_cancelled() -> None:
    returned = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(3)

    async def play(turn: Turn) -> str:
        turn.start_soon(work())
        asyncio.get_running_loop().call_later(1, returned.set)
        return "end_turn"

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await returned.wait()
        raw.send(cancel(session_id))

        assert (await raw.answer_to(7))["result"] == {"stopReason": "cancelled"}


# ---------------------------------------------------------------- I6, I7: cancelling


@pytest.mark.covers("I6")
@controlled(hits_the_next=late(Event.CANCEL, 2))
async def test_a_cancel_of_an_idle_session_is_silent_and_hits_no_later_turn() -> None:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(5)

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(cancel(session_id))
        await raw.expect_nothing(1)
        raw.send(prompt(7, session_id))

        assert (await raw.answer_to(7))["result"] == {"stopReason": "end_turn"}
        await raw.expect_nothing()


@pytest.mark.covers("I7")
@controlled(
    deaf=DEAF,
    answers_twice=on_the_wire(answered_twice),
)
async def test_a_turn_cancelled_twice_is_answered_once() -> None:
    async def play(turn: Turn) -> None:
        await turn.say("begun")
        async with asyncio.timeout(5):
            await turn.wait_cancelled()

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await raw.wait("session/update")
        raw.send(cancel(session_id), cancel(session_id))
        answer = await raw.answer_to(7)
        raw.send(cancel(session_id))
        await raw.round_trip()

        assert answer.get("result") == {"stopReason": "cancelled"}
        assert len(raw.responses(7)) == 1


# ---------------------------------------------------------------- I8, I9: permissions


async def fails_open(original: Any, self: Turn, *args: Any, **named: Any) -> PermissionAnswer:
    answer: PermissionAnswer = await original(self, *args, **named)
    return PermissionAnswer("allow_once", True) if answer.option_id is None else answer


async def denies_all(original: Any, self: Turn, *args: Any, **named: Any) -> PermissionAnswer:
    await original(self, *args, **named)
    return PermissionAnswer(None, False)


SELECTED = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
REFUSED = {"outcome": {"outcome": "selected", "optionId": "reject_once"}}
NOT_OFFERED = {"outcome": {"outcome": "selected", "optionId": "anything"}}
CANCELLED = {"outcome": {"outcome": "cancelled"}}
#: What the client does with the question, by its name.
ANSWERS: dict[str, Callable[[RawPeer, Json], object]] = {
    "selected": lambda raw, ask: raw.answer(ask, SELECTED),
    "a reject": lambda raw, ask: raw.answer(ask, REFUSED),
    "not offered": lambda raw, ask: raw.answer(ask, NOT_OFFERED),
    "cancelled": lambda raw, ask: raw.answer(ask, CANCELLED),
    "a peer error": lambda raw, ask: raw.refuse(ask, -32603),
    "undecodable": lambda raw, ask: raw.answer(ask, {"outcome": "selected"}),
    "empty": lambda raw, ask: raw.answer(ask, {}),
    "a timeout": lambda _raw, _ask: None,
    "closed": lambda raw, _ask: asyncio.ensure_future(raw.transport.aclose()),
}


@pytest.mark.covers("I8")
@controlled(
    fails_open=changed(Turn, "ask_permission", fails_open),
    denies_all=changed(Turn, "ask_permission", denies_all),
)
async def test_only_a_selected_option_that_allows_is_a_yes() -> None:
    allowed: dict[str, bool] = {}

    for name, answers in ANSWERS.items():
        done = asyncio.Event()

        async def play(turn: Turn, name: str = name, done: asyncio.Event = done) -> None:
            answer = await turn.ask_permission("Dig a hole")
            allowed[name] = bool(answer)
            done.set()

        async with raw_client(Played(play), limits=Limits(permission_timeout=60)) as raw:
            raw.bound = 100
            raw.send(prompt(7, await new_session(raw)))
            ask = await raw.wait("session/request_permission")
            answers(raw, ask)
            async with asyncio.timeout(100):
                await done.wait()

    assert allowed == {name: name == "selected" for name in ANSWERS}


@pytest.mark.covers("I9")
@controlled(
    tells_the_turn_late=late(Event.CANCEL, 5),
    tells_no_client=on_the_wire(
        lambda frames: [f for f in frames if f.get("method") != "$/cancel_request"]
    ),
)
async def test_a_cancel_ends_an_open_question_at_once_and_withdraws_it() -> None:
    answers: list[tuple[bool, float]] = []

    async def play(turn: Turn) -> None:
        answer = await turn.ask_permission("Dig a hole")
        answers.append((bool(answer), now()))

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        ask = await raw.wait("session/request_permission")
        cancelled_at = now()
        raw.send(cancel(session_id))
        answer = await raw.answer_to(7)
        withdrawn = raw.sent("$/cancel_request")
        raw.answer(ask, SELECTED)  # too late
        await raw.round_trip()

        assert answer["result"] == {"stopReason": "cancelled"}
        assert answers == [(False, cancelled_at)]
        assert [frame["params"] for frame in withdrawn] == [{"requestId": ask["id"]}]


# ---------------------------------------------------------------- I11: what was closed is gone


class KeepsEverything(dict[str, Any]):
    def __delitem__(self, key: str) -> None:
        """Keep it."""


def keeps_everything(original: Any, self: ClientPeer, *args: Any, **named: Any) -> None:
    original(self, *args, **named)
    self.sessions = KeepsEverything()


@pytest.mark.covers("I11")
@pytest.mark.parametrize("method", ["session/close", "session/delete"])
@controlled(keeps_everything=changed(ClientPeer, "__init__", keeps_everything))
async def test_of_a_session_that_was_ended_nothing_is_kept(method: str) -> None:
    peers: list[ClientPeer] = []

    class Closes(Played):
        async def close_session(self, params: Any, ctx: AgentContext) -> None:
            peers.append(ctx.peer)

        delete_session = close_session

        async def list_sessions(self, params: Any, ctx: AgentContext) -> v1.ListSessionsResponse:
            return v1.ListSessionsResponse(sessions=[])

    async with raw_client(Closes()) as raw:
        session_id = await new_session(raw)
        assert (await raw.ask(method, {"sessionId": session_id})).get("result") == {}
        answer = await raw.ask("session/prompt", prompt(0, session_id)["params"])

        assert answer.get("error", {}).get("code") == -32002
        assert not peers[0].sessions


# ---------------------------------------------------------------- I12: one turn at a time


@pytest.mark.covers("I12")
@controlled(
    forgets_the_first=step(Event.PROMPT, State.PROMPTING, Effect.OPEN),
    answers_twice=on_the_wire(answered_twice),
)
async def test_a_second_prompt_is_refused_and_the_first_goes_on_unharmed() -> None:
    go_on = asyncio.Event()

    async def play(turn: Turn) -> None:
        await turn.say("before")
        await go_on.wait()
        await turn.say("after")

    agent = Played(play)
    async with raw_client(agent) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id, "first"))
        await raw.wait("session/update")
        raw.send(prompt(8, session_id, "second"))
        await raw.round_trip()
        go_on.set()
        first, second = await raw.answer_to(7), await raw.answer_to(8)

        assert second.get("error", {}).get("code") == -32600
        assert first.get("result") == {"stopReason": "end_turn"}
        assert texts(raw, session_id)[-4:] == ["=8", "=ask-2", "after", "=7"]
        assert agent.begun == ["first"]
        assert len(raw.responses(7)) == len(raw.responses(8)) == 1


# ---------------------------------------------------------------- I13: the back-stop


NO_BACK_STOP = step(Event.CANCEL, State.PROMPTING, Effect.TELL, to=State.CANCELLING)


@pytest.mark.covers("I13")
@controlled(no_back_stop=NO_BACK_STOP)
async def test_a_turn_that_ignores_its_cancellation_is_ended_by_the_back_stop() -> None:
    begun = asyncio.Event()
    ended: list[float] = []

    async def play(turn: Turn) -> None:
        if turn.text == "again":
            return
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(now())

    async with raw_client(Played(play), limits=Limits(cancel_backstop=30)) as raw:
        raw.bound = 100
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await begun.wait()
        cancelled_at = now()
        raw.send(cancel(session_id))
        answer = await raw.answer_to(7)
        answered_after = now() - cancelled_at
        again = await raw.ask("session/prompt", prompt(0, session_id, "again")["params"])

        assert answer["result"] == {"stopReason": "cancelled"}
        assert answered_after == pytest.approx(30)
        assert [moment - cancelled_at for moment in ended] == [pytest.approx(30)]
        assert again["result"] == {"stopReason": "end_turn"}


@contextmanager
def stays_armed() -> Generator[list[object]]:
    used: list[object] = []

    def seal(turn: Turn) -> None:
        used.append(turn)
        turn.backstop = None
        Turn.seal(turn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_agent_session._ACTS, Effect.SEAL, seal)
        yield used


def hits_whatever_runs(original: Any, self: AgentSession, turn: Turn) -> None:
    original(self, self.turn or turn)


@pytest.mark.covers("I13")
@controlled(
    hits_whatever_runs=together(
        stays_armed, changed(AgentSession, "backstop_reached", hits_whatever_runs)
    )
)
async def test_the_back_stop_of_an_earlier_turn_does_not_touch_a_later_one() -> None:
    interrupted: list[str] = []

    async def play(turn: Turn) -> None:
        await turn.wait_cancelled()
        if turn.text == "second":
            try:
                await asyncio.sleep(25)  # less than its own back-stop
            except asyncio.CancelledError:
                interrupted.append(turn.text)
                raise

    async with raw_client(Played(play), limits=Limits(cancel_backstop=30)) as raw:
        raw.bound = 100
        session_id = await new_session(raw)
        began = now()
        raw.send(prompt(7, session_id, "first"))
        await raw.round_trip()
        raw.send(cancel(session_id))
        assert (await raw.answer_to(7))["result"] == {"stopReason": "cancelled"}
        raw.send(prompt(8, session_id, "second"))
        await asyncio.sleep(20)
        raw.send(cancel(session_id))
        answer = await raw.answer_to(8)

        assert answer["result"] == {"stopReason": "cancelled"}
        assert interrupted == []
        assert now() - began == pytest.approx(45)


# ---------------------------------------------------------------- I14: no process-wide growth


def process_wide() -> int:
    """How much the library's modules and classes hold on to, by what can be counted."""
    total = 0
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "antiphon":
            continue
        holders: list[Any] = [vars(module)]
        holders += [vars(value) for value in vars(module).values() if isinstance(value, type)]
        for held in holders:
            for value in list(held.values()):
                if isinstance(value, (dict, list, set, frozenset, tuple)):
                    total += len(value)  # pyright: ignore[reportUnknownArgumentType]
                elif hasattr(value, "cache_info"):
                    total += value.cache_info().currsize
    return total


def remembers(original: Any, self: ClientPeer, session_id: str) -> Any:
    ClientPeer.__dict__["remembered"].add(session_id)
    return original(self, session_id)


@contextmanager
def with_a_place_to_remember() -> Generator[list[object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientPeer, "remembered", set[str](), raising=False)
        yield ["there"]


@pytest.mark.covers("I14")
@controlled(
    remembers=together(with_a_place_to_remember, changed(ClientPeer, "session_of", remembers))
)
async def test_the_sessions_that_come_and_go_leave_no_trace_in_the_process() -> None:
    async with raw_client(Played()) as raw:
        first = await new_session(raw)
        await raw.ask("session/prompt", prompt(0, first)["params"])
        await raw.ask("session/prompt", prompt(0, "unknown")["params"])
        before = process_wide()
        for number in range(300):
            raw.send(cancel(f"unknown-{number}"), prompt(number, f"unknown-{number}"))
            await new_session(raw)
        await raw.round_trip()

        assert process_wide() == before


# ---------------------------------------------------------------- I15: two sessions at once


def under_one_name(frames: list[Json]) -> list[Json]:
    for frame in frames:
        if frame.get("method") == "session/update":
            frame["params"]["sessionId"] = "s1"
    return frames


@pytest.mark.covers("I15")
@controlled(
    answer_first=on_the_wire(answer_before_the_update),
    under_one_name=on_the_wire(under_one_name),
)
async def test_interleaved_sessions_keep_their_own_order() -> None:
    steps = {"one": asyncio.Event(), "two": asyncio.Event()}

    async def play(turn: Turn) -> None:
        me, other = ("one", "two") if turn.text == "one" else ("two", "one")
        for number in range(3):
            await turn.say(f"{me} {number}")
            steps[other].set()
            if turn.text == "two" or number < 2:
                await steps[me].wait()
                steps[me].clear()
        steps[other].set()

    async with raw_client(Played(play)) as raw:
        one, two = await new_session(raw), await new_session(raw)
        raw.send(prompt(7, one, "one"), prompt(8, two, "two"))
        async with asyncio.timeout(5):
            await raw.answer_to(7)
            await raw.answer_to(8)

        assert [t for t in texts(raw, one) if t[0] in "o=" and t != "=8"][3:] == [
            *(f"one {number}" for number in range(3)),
            "=7",
        ]
        assert [t for t in texts(raw, two) if t[0] in "t=" and t != "=7"][3:] == [
            *(f"two {number}" for number in range(3)),
            "=8",
        ]


# ---------------------------------------------------------------- I16, I17: cancels and prompts by the wire


@pytest.mark.covers("I16")
@controlled(late=late(Event.CANCEL, 0.001))
async def test_a_cancel_right_behind_a_prompt_hits_it_before_it_runs_and_no_later_one() -> None:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(1)

    agent = Played(play)
    async with raw_client(agent) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id, "first"), cancel(session_id))
        first = await raw.answer_to(7)
        raw.send(prompt(8, session_id, "second"))
        second = await raw.answer_to(8)

        assert agent.begun == ["second"]
        assert first["result"] == {"stopReason": "cancelled"}
        assert second["result"] == {"stopReason": "end_turn"}


@pytest.mark.covers("I17")
@controlled(
    not_answered=on_the_wire(not_answered),
    answered_twice=on_the_wire(answered_twice),
    deaf=step(Event.PROMPT_CANCELLED, State.PROMPTING),
)
async def test_a_prompt_whose_request_is_cancelled_is_answered_once_and_its_id_is_free() -> None:
    async def play(turn: Turn) -> None:
        if turn.text == "first":
            await turn.say("begun")
            async with asyncio.timeout(5):
                await turn.wait_cancelled()

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id, "first"))
        await raw.wait("session/update")
        raw.send(raw.notification("$/cancel_request", {"requestId": 7}))
        first = await raw.answer_to(7)
        await raw.round_trip()
        answers = len(raw.responses(7))
        raw.send(prompt(7, session_id, "second"))
        await raw.until(lambda: len(raw.responses(7)) > answers)

        assert answers == 1
        assert first.get("result") == {"stopReason": "cancelled"}
        assert raw.responses(7)[-1].get("result") == {"stopReason": "end_turn"}


# ---------------------------------------------------------------- I18, I19: gates


class Resumes(Played):
    """Can resume; `offers` says whether it tells."""

    def __init__(self, *, offers: bool) -> None:
        super().__init__()
        self.offers = offers

    async def initialize(self, params: Any, ctx: AgentContext) -> Any:
        answer = await super().initialize(params, ctx)
        if not self.offers:
            answer.agent_capabilities = v1.AgentCapabilities()
        return answer

    async def resume_session(self, params: Any, ctx: AgentContext) -> None:
        self.begun.append(params.session_id)


def serves_all(_original: Any, _tree: Any, _gate: str | None) -> bool:
    return True


@pytest.mark.covers("I18")
@controlled(serves_all=changed(_side_router, "allowed_by", serves_all))
async def test_resuming_is_served_where_it_was_offered_and_nowhere_else() -> None:
    for offers in (True, False):
        agent = Resumes(offers=offers)
        async with raw_client(agent) as raw:
            params: Json = {"sessionId": "old", "cwd": "/", "mcpServers": []}
            answer = await raw.ask("session/resume", params)

            assert agent.begun == (["old"] if offers else [])
            assert answer.get("error", {}).get("code") == (None if offers else -32601)


def gated(original: Any, self: SideRouter, method: str) -> Any:
    return None if method == "session/set_config_option" else original(self, method)


@pytest.mark.covers("I19")
@controlled(gated=changed(SideRouter, "request_route", gated))
async def test_setting_an_option_is_decoded_and_served_without_a_gate() -> None:
    given: list[Any] = []

    class Has(Played):
        async def set_session_config_option(self, params: Any, ctx: AgentContext) -> Any:
            given.append((params.config_id, params.value))
            return v1.SetSessionConfigOptionResponse(config_options=[])

    async with raw_client(Has()) as raw:
        session_id = await new_session(raw)
        params = {"sessionId": session_id, "configId": "model", "value": "small"}
        answer = await raw.ask("session/set_config_option", params)

        assert answer.get("result") == {"configOptions": []}
        assert given == [("model", "small")]
