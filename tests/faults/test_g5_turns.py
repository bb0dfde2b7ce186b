"""Field faults 24 to 29: cancels early, late and twice, questions around them, turns that hang."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.command import antiphon, odd
from tests.faults.wires import (
    AGENT_WIRES,
    CLIENT_WIRES,
    END,
    RawPeer,
    begun,
    opened,
    opened_in,
    raw_agent,
    raw_client,
    reply,
)

from antiphon import (
    Agent,
    Client,
    Limits,
    RequestError,
    RequestTimeout,
    SilenceTimeout,
    Turn,
    TurnInProgress,
    TurnOver,
)

if TYPE_CHECKING:
    from antiphon import ClientContext

CANCELLED = {"stopReason": "cancelled"}
SHORT = Limits(cancel_backstop=0.2)


def prompt(id_: Any, session_id: str, text: str = "go") -> dict[str, Any]:
    blocks = [{"type": "text", "text": text}]
    return RawPeer.request(id_, "session/prompt", {"sessionId": session_id, "prompt": blocks})


def cancel(session_id: str) -> dict[str, Any]:
    return RawPeer.notification("session/cancel", {"sessionId": session_id})


def question(id_: Any, *kinds: str, session_id: str = "s1") -> dict[str, Any]:
    options = [{"optionId": f"{n}", "name": k, "kind": k} for n, k in enumerate(kinds)]
    params = {"sessionId": session_id, "toolCall": {"toolCallId": "t"}, "options": options}
    return RawPeer.request(id_, "session/request_permission", params)


def said(raw: RawPeer) -> list[str]:
    return [f["params"]["update"]["content"]["text"] for f in raw.sent("session/update")]


class Scripted(Agent):
    """Does what the prompt's text says."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.ran: list[str] = []

    async def prompt(self, turn: Turn) -> str | None:
        self.ran.append(turn.text)
        self.running.set()
        match turn.text:
            case "wait":
                await turn.wait_cancelled()
            case "slow start":
                await asyncio.sleep(0.2)
                if turn.cancelled:
                    return None
            case "swallow":
                while not turn.cancelled:
                    await asyncio.sleep(0.01)
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    await turn.say("after the end")
            case "error":
                await turn.wait_cancelled()
                raise ValueError("secret")
            case "told error":
                await turn.wait_cancelled()
                raise RequestError(7, "told")
            case "refuse":
                await turn.wait_cancelled()
                return "refusal"
            case "fail":
                raise ValueError("secret")
            case "ask":
                allowed = await turn.ask_permission("?")
                self.ran.append(f"allowed {bool(allowed)}")
            case "deaf":
                await asyncio.sleep(60)
            case _:
                await turn.say(turn.text)
        return None


# ------------------------------------------------------------------ 24


@pytest.mark.covers("FF-24")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("when", ["idle", "idle, same write", "after", "after twice", "unknown"])
async def test_a_cancel_of_no_turn_does_not_touch_the_next_one(wire: str, when: str) -> None:
    async with raw_client(wire, Scripted()) as raw:
        session_id = await opened_in(raw)
        if when == "idle":
            raw.send(cancel(session_id))
            await raw.round_trip()
        elif when == "idle, same write":
            raw.send(cancel(session_id), cancel(session_id), prompt(1, session_id, "first"))
            assert (await raw.answer_to(1))["result"] == END
        elif when == "unknown":
            raw.send(cancel("nobody"), cancel(""))
        else:
            raw.send(prompt(1, session_id, "first"))
            assert (await raw.answer_to(1))["result"] == END
            raw.send(*([cancel(session_id)] * (2 if when.endswith("twice") else 1)))
        raw.send(prompt(2, session_id, "second"))
        assert (await raw.answer_to(2))["result"] == END
        assert said(raw)[-1] == "second"


@pytest.mark.covers("FF-24")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_second_cancel_of_the_same_turn_does_nothing_more(wire: str) -> None:
    async with raw_client(wire, Scripted()) as raw:
        session_id = await opened_in(raw)
        raw.send(prompt(1, session_id, "wait"), cancel(session_id), cancel(session_id))
        assert (await raw.answer_to(1))["result"] == CANCELLED
        raw.send(cancel(session_id), prompt(2, session_id, "next"))
        assert (await raw.answer_to(2))["result"] == END
        assert len(raw.responses(1)) == 1


@pytest.mark.covers("FF-24")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_that_cancels_a_turn_that_ended_sends_nothing(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        await session.cancel()
        async with session.prompt("go") as turn:
            raw.answer(await raw.wait("session/prompt"), END)
            assert [u async for u in turn] == []
            await turn.cancel()
        await turn.cancel()
        await session.cancel()
        await raw.round_trip()
        assert not raw.sent("session/cancel")


@pytest.mark.covers("FF-24")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_the_next_prompt_waits_until_the_cancel_is_settled(wire: str) -> None:
    async with raw_agent(wire, limits=Limits(cancel_backstop=5)) as (peer, raw):
        session = await opened(peer, raw)
        first = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        first.cancel()
        await raw.wait("session/cancel")
        second = begun(session.prompt("next"))
        await raw.round_trip()
        # Refused here, or held back: sent it is not while the agent is at the first.
        assert len(raw.sent("session/prompt")) == 1
        raw.send(raw.update("s1", "of the first"), reply(request, CANCELLED))
        await asyncio.wait([first, second], timeout=1)
        if second.done():
            assert isinstance(second.exception(), TurnInProgress)
            second = begun(session.prompt("next"))
        request = await raw.wait("session/prompt", 2)
        raw.send(raw.update("s1", "of the second"), reply(request, END))
        assert (await second).text == "of the second"


# ------------------------------------------------------------------ 25


@pytest.mark.covers("FF-25")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("text", ["wait", "slow start", "error", "told error", "refuse", "ask"])
@pytest.mark.parametrize("when", ["same write", "running"])
async def test_a_cancel_hits_a_turn_from_its_first_moment_and_is_never_an_error(
    wire: str, text: str, when: str
) -> None:
    agent = Scripted()
    async with raw_client(wire, agent) as raw:
        session_id = await opened_in(raw)
        if when == "same write":
            raw.send(prompt(1, session_id, text), cancel(session_id))
        else:
            raw.send(prompt(1, session_id, text))
            await agent.running.wait()
            raw.send(cancel(session_id))
        assert (await raw.answer_to(1))["result"] == CANCELLED
        raw.send(prompt(2, session_id, "next"))
        assert (await raw.answer_to(2))["result"] == END
        assert "allowed True" not in agent.ran
        assert said(raw) == ["next"]


@pytest.mark.covers("FF-25")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("text", ["swallow", "deaf"])
async def test_a_handler_that_takes_no_notice_is_ended_and_what_it_says_then_is_not_sent(
    wire: str, text: str
) -> None:
    agent = Scripted()
    async with raw_client(wire, agent, limits=SHORT) as raw:
        session_id = await opened_in(raw)
        raw.send(prompt(1, session_id, text))
        await agent.running.wait()
        begin = time.monotonic()
        raw.send(cancel(session_id))
        assert (await raw.answer_to(1))["result"] == CANCELLED
        assert 0.1 < time.monotonic() - begin < 3
        raw.send(prompt(2, session_id, "next"))
        assert (await raw.answer_to(2))["result"] == END
        assert said(raw) == ["next"]


# ------------------------------------------------------------------ 26


@pytest.mark.covers("FF-26")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("person", ["late", "never", "raises", "withdrawn too", "had answered"])
async def test_an_open_question_is_answered_once_whatever_the_person_does_then(
    wire: str, person: str
) -> None:
    answered = asyncio.Event()

    async def decide(params: Any, ctx: ClientContext) -> bool:
        if person == "had answered":
            return True
        await answered.wait()
        if person == "raises":
            raise LookupError
        if person == "never":
            await asyncio.Event().wait()
        return True

    async with raw_agent(wire, Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(question(3, "allow_once", "reject_once"))
            if person == "had answered":
                await raw.answer_to(3)
            else:
                await raw.round_trip()
            await turn.cancel()
            await raw.wait("session/cancel")
            if person == "withdrawn too":
                raw.send(raw.notification("$/cancel_request", {"requestId": 3}))
            outcome = (await raw.answer_to(3))["result"]["outcome"]
            if person == "had answered":
                assert outcome == {"outcome": "selected", "optionId": "0"}
            else:
                assert outcome == {"outcome": "cancelled"}
            answered.set()
            raw.answer(request, CANCELLED)
            assert [u async for u in turn] == []
        await raw.round_trip()
        assert len(raw.responses(3)) == 1


@pytest.mark.covers("FF-26")
async def test_a_dialog_of_one_connection_answers_nothing_on_the_next() -> None:
    """The second agent uses the same ids, for another thing."""
    answers: list[asyncio.Future[bool]] = []

    async def decide(params: Any, ctx: ClientContext) -> bool:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    client = Client(permissions=decide)
    async with raw_agent("memory", client) as (peer, raw):
        await opened(peer, raw)
        raw.send(question(3, "allow_once"))
        await raw.round_trip()
    async with raw_agent("memory", client) as (peer, raw):
        await opened(peer, raw)
        raw.send(question(3, "allow_once", "reject_once"))
        await raw.round_trip()
        assert len(answers) == 2
        assert answers[0].cancelled()
        answers[1].set_result(False)
        outcome = (await raw.answer_to(3))["result"]["outcome"]
        assert outcome == {"outcome": "selected", "optionId": "1"}


class Steps(Agent):
    """Asks before each of three tools."""

    def __init__(self) -> None:
        self.did: list[int] = []

    async def prompt(self, turn: Turn) -> None:
        for n in range(3):
            async with turn.tool(f"step {n}") as tool:
                if turn.cancelled or not await turn.ask_permission(tool):
                    return
                self.did.append(n)


@pytest.mark.covers("FF-26")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize(
    "order", ["answer first", "cancel first", "no answer", "answer is an error"]
)
async def test_an_agent_runs_no_further_tool_of_a_step_that_was_cancelled(
    wire: str, order: str
) -> None:
    agent = Steps()
    async with raw_client(wire, agent) as raw:
        session_id = await opened_in(raw)
        raw.send(prompt(1, session_id))
        asked = await raw.wait("session/request_permission")
        raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        asked = await raw.wait("session/request_permission", 2)
        cancelled = reply(asked, {"outcome": {"outcome": "cancelled"}})
        if order == "answer first":
            raw.send(cancelled, cancel(session_id))
        elif order == "cancel first":
            raw.send(cancel(session_id), cancelled)
        else:
            raw.send(cancel(session_id))
            if order == "answer is an error":
                raw.refuse(asked, -32800, "Request cancelled")
        assert (await raw.answer_to(1))["result"] == CANCELLED
        assert agent.did == [0]
        assert len(raw.sent("session/request_permission")) == 2


# ------------------------------------------------------------------ 27

OFFERS = [
    (("allow_once",), None),
    (("allow_once", "allow_always"), None),
    ((), None),
    (("reject_once", "reject_once"), "0"),
    (("allow_once", "reject_always"), "1"),
    (("reject_always", "allow_once", "reject_once"), "2"),
    (("reject_forever",), None),
    (("allow_all", "reject_forever"), None),
]


@pytest.mark.covers("FF-27")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("how", ["default", "deny", "False", "raises", "not offered", "wrong type"])
async def test_a_no_is_never_a_yes_and_a_reject_where_there_is_one(wire: str, how: str) -> None:
    async def decide(params: Any, ctx: ClientContext) -> Any:
        if how == "raises":
            raise LookupError
        return {"False": False, "not offered": "99", "wrong type": 1}[how]

    client = None if how == "default" else Client(permissions="deny" if how == "deny" else decide)
    async with raw_agent(wire, client) as (peer, raw):
        await opened(peer, raw)
        for n, (kinds, expected) in enumerate(OFFERS):
            raw.send(question(n, *kinds))
            outcome = (await raw.answer_to(n))["result"]["outcome"]
            if expected is None:
                assert outcome == {"outcome": "cancelled"}, kinds
            else:
                assert outcome == {"outcome": "selected", "optionId": expected}, kinds


@pytest.mark.covers("FF-27")
@pytest.mark.parametrize("flags", [("deny",), ("allow",)])
def test_the_command_s_flags_mean_what_they_say(flags: tuple[str, ...]) -> None:
    ran = antiphon("prompt", "--agent", odd("asks"), "--permissions", *flags, "go")
    chosen = "y" if flags == ("allow",) else "n"
    assert f'"optionId": "{chosen}"' in ran.out
    ran = antiphon("prompt", "--agent", odd("asks_without_no"), "--permissions", "deny", "go")
    assert '"cancelled"' in ran.out


NO: list[Any] = [
    {"outcome": "selected", "optionId": "allow_once"},  # flat
    {"outcome": {"outcome": "selected", "optionId": "reject_once"}},
    {"outcome": {"outcome": "selected", "optionId": "unheard"}},
    {"outcome": {"outcome": "selected", "optionId": None}},
    {"outcome": {"outcome": "selected"}},
    {"outcome": {"outcome": "cancelled", "optionId": "allow_once"}},
    {"outcome": {"outcome": "approved", "optionId": "allow_once"}},
    {"outcome": "allow_once"},
    {"optionId": "allow_once"},
    {"outcome": {"optionId": "allow_once"}},
    {"outcome": {"outcome": "selected", "optionId": ["allow_once"]}},
    {},
    None,
    True,
    "allow_once",
]


@pytest.mark.covers("FF-27")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_takes_nothing_but_an_offered_option_that_allows_for_a_yes(
    wire: str,
) -> None:
    agent = Scripted()
    async with raw_client(wire, agent) as raw:
        session_id = await opened_in(raw)
        for n, answer in enumerate(NO):
            raw.send(prompt(n, session_id, "ask"))
            raw.answer(await raw.wait("session/request_permission", n + 1), answer)
            assert (await raw.answer_to(n))["result"] == END
        assert "allowed True" not in agent.ran
        assert agent.ran.count("allowed False") == len(NO)
        raw.send(prompt("yes", session_id, "ask"))
        asked = await raw.wait("session/request_permission", len(NO) + 1)
        raw.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        await raw.answer_to("yes")
        assert agent.ran[-1] == "allowed True"


# ------------------------------------------------------------------ 28


@pytest.mark.covers("FF-28")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("end", ["cancelled", "request cancelled", "answered"])
async def test_a_second_prompt_is_refused_and_others_are_served(wire: str, end: str) -> None:
    agent = Scripted()
    async with raw_client(wire, agent) as raw:
        one, two = await opened_in(raw), await opened_in(raw)
        first = "slow start" if end == "answered" else "wait"
        raw.send(prompt(1, one, first), prompt(2, one, "second"), prompt(3, two, "other"))
        refused = (await raw.answer_to(2))["error"]
        assert refused["code"] == -32600
        assert (await raw.answer_to(3))["result"] == END
        if end == "cancelled":
            raw.send(cancel(one))
        elif end == "request cancelled":
            raw.send(raw.notification("$/cancel_request", {"requestId": 1}))
        assert (await raw.answer_to(1))["result"] == (END if end == "answered" else CANCELLED)
        raw.send(prompt(4, one, "third"))
        assert (await raw.answer_to(4))["result"] == END
        assert "second" not in agent.ran


@pytest.mark.covers("FF-28")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_handler_that_raised_frees_its_session(wire: str) -> None:
    async with raw_client(wire, Scripted()) as raw:
        session_id = await opened_in(raw)
        for n in range(5):
            raw.send(prompt(n, session_id, "fail"))
            assert (await raw.answer_to(n))["error"]["code"] == -32603
        raw.send(prompt("last", session_id, "third"))
        assert (await raw.answer_to("last"))["result"] == END


@pytest.mark.covers("FF-28")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_our_client_never_sends_a_second_prompt(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        first = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        for _ in range(3):
            with pytest.raises(TurnInProgress):
                await session.prompt("again")
        other = await opened(peer, raw, "s2")
        second = begun(other.prompt("go"))
        raw.answer(await raw.wait("session/prompt", 2), END)
        await second
        raw.answer(request, END)
        assert (await first).stop_reason == "end_turn"
        assert len(raw.sent("session/prompt")) == 2


# ------------------------------------------------------------------ 29


@pytest.mark.covers("FF-29")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_turn_that_streams_all_and_never_answers_ends_at_the_caller_s_bound(
    wire: str,
) -> None:
    async with raw_agent(wire, limits=SHORT) as (peer, raw):
        session = await opened(peer, raw)
        got: list[str] = []

        async def iterate() -> None:
            async with session.prompt("go", timeout=0.2) as turn:
                async for update in turn:
                    got.extend([update.text])

        running = asyncio.ensure_future(iterate())
        await raw.wait("session/prompt")
        raw.send(*(raw.update("s1", str(n)) for n in range(10)))
        with pytest.raises(RequestTimeout):
            await running
        assert got == [str(n) for n in range(10)]
        # escalated: told to stop, given its grace, and the session is free again
        await raw.wait("session/cancel")
        second = begun(session.prompt("next"))
        request = await raw.wait("session/prompt", 2)
        raw.answer(request, END)
        assert (await second).stop_reason == "end_turn"


@pytest.mark.covers("FF-29")
@pytest.mark.virtual_time
@pytest.mark.parametrize("by", ["prompt", "limits"])
async def test_a_turn_may_take_long_but_not_be_silent_for_long(by: str) -> None:
    limits = Limits(cancel_backstop=5, silence_timeout=60 if by == "limits" else None)
    async with raw_agent("memory", limits=limits) as (peer, raw):
        session = await opened(peer, raw)
        more: dict[str, Any] = {"silence": 60} if by == "prompt" else {}
        running = begun(session.prompt("go", **more))
        await raw.wait("session/prompt")
        for n in range(20):
            raw.send(raw.update("s1", str(n)))
            await asyncio.sleep(50)
        assert not running.done()
        with pytest.raises(SilenceTimeout):
            await running
        await raw.wait("session/cancel")


@pytest.mark.covers("FF-29")
@pytest.mark.virtual_time
async def test_a_person_who_thinks_is_no_silence() -> None:
    decided = asyncio.Event()

    async def decide(params: Any, ctx: ClientContext) -> bool:
        await decided.wait()
        return True

    async with raw_agent("memory", Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go", silence=10))
        request = await raw.wait("session/prompt")
        raw.send(question(3, "allow_once"))
        await asyncio.sleep(300)
        assert not running.done()
        decided.set()
        await raw.answer_to(3)
        raw.answer(request, END)
        assert (await running).stop_reason == "end_turn"


@pytest.mark.covers("FF-29")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_every_way_out_of_a_handler_is_an_answer(wire: str) -> None:
    class Ways(Agent):
        async def prompt(self, turn: Turn) -> Any:
            match turn.text:
                case "none":
                    return None
                case "text":
                    return "not a stop reason"
                case "number":
                    return 5
                case "raise":
                    raise LookupError
                case "cancelled error":
                    raise asyncio.CancelledError
                case "exit":
                    raise BaseExceptionGroup("x", [asyncio.CancelledError()])
                case "subtask":
                    turn.start_soon(asyncio.sleep(0.01))
                    return None
                case _:
                    turn.start_soon(asyncio.wait_for(asyncio.Event().wait(), 0.01))
                    return None

    expected = {
        "none": END,
        "text": -32603,
        "number": -32603,
        "raise": -32603,
        "cancelled error": -32800,
        "exit": -32603,
        "subtask": END,
        "failing subtask": END,
    }
    async with raw_client(wire, Ways()) as raw:
        session_id = await opened_in(raw)
        for text, outcome in expected.items():
            raw.send(prompt(text, session_id, text))
            answer = await raw.answer_to(text)
            assert answer.get("result", answer.get("error", {}).get("code")) == outcome, text


@pytest.mark.covers("FF-29")
def test_the_command_has_an_exit_code_for_a_turn_that_does_not_settle() -> None:
    # On a busy machine the start itself may need nearly all of that; then the limit is another.
    for limit in ("0.5", "2.5", "7.5"):
        ran = antiphon("prompt", "--agent", odd("deaf"), "--timeout", limit, "go")
        if "initialize" not in ran.err:
            break

    assert ran.code not in (0, 1)
    assert limit in ran.err
    assert ran.seconds < 15


@pytest.mark.covers("FF-25")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_what_an_agent_s_own_task_says_behind_the_answer_is_refused_and_not_sent(
    wire: str,
) -> None:
    tasks: list[asyncio.Task[None]] = []

    class Forgetful(Agent):
        async def prompt(self, turn: Turn) -> None:
            async def late() -> None:
                await asyncio.sleep(0.01)
                await turn.say("late")

            tasks.append(asyncio.create_task(late()))  # and not `turn.start_soon`
            await turn.say("in time")

    async with raw_client(wire, Forgetful()) as raw:
        session_id = await opened_in(raw)
        raw.send(prompt(1, session_id))
        assert (await raw.answer_to(1))["result"] == END
        await asyncio.wait(tasks)
        assert isinstance(tasks[0].exception(), TurnOver)
        await raw.round_trip()
        assert said(raw) == ["in time"]
