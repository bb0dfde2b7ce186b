"""Field faults 19 to 21: what was sent before an answer is seen before it, in its order."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.faults.wires import (
    AGENT_WIRES,
    CLIENT_WIRES,
    END,
    begun,
    opened,
    opened_in,
    raw_agent,
    raw_client,
    reply,
)

from antiphon import Agent, Client, ConnectionClosed, RequestError, Turn, extension

if TYPE_CHECKING:
    from antiphon import Session, Update

FULL: dict[str, Any] = {"loadSession": True, "sessionCapabilities": {"resume": {}, "close": {}}}


class Slow:
    """An observer that takes its time, and what it has come to the end of."""

    def __init__(self, seconds: float = 0.02, *, fails: bool = False) -> None:
        self.seconds = seconds
        self.fails = fails
        self.seen: list[str] = []

    async def __call__(self, update: Update) -> None:
        await asyncio.sleep(self.seconds)
        self.seen.append(update.text)
        if self.fails:
            raise LookupError


# ------------------------------------------------------------------ 19


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("then", ["nothing", "end of file", "more"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", ["client", "session"])
async def test_the_answer_to_a_prompt_waits_for_the_handlers_of_what_came_before_it(
    wire: str, then: str, fails: bool, where: str
) -> None:
    slow = Slow(fails=fails)
    client = Client(on_update=slow) if where == "client" else None
    async with raw_agent(wire, client) as (peer, raw):
        session = await opened(peer, raw)
        if where == "session":
            session.on_update(slow)
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        frames = [raw.update("s1", "A"), raw.update("s1", "B"), reply(request, END)]
        raw.send(*frames, *([raw.update("s1", "C")] * 20 if then == "more" else []))
        if then == "end of file":
            await raw.aclose()
        outcome = await running
        # By the mark of the answer in the stream, and not by an empty queue.
        assert slow.seen[:2] == ["A", "B"]
        assert len(slow.seen) < 20
        assert (outcome.text, outcome.stop_reason) == ("AB", "end_turn")


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_of_two_prompts_at_once_each_waits_for_its_own_session_alone(wire: str) -> None:
    stuck = asyncio.Event()
    seen: list[str] = []

    async def observe(update: Update) -> None:
        if update.session_id == "s1":
            await stuck.wait()
        seen.append(update.text)

    async with raw_agent(wire, Client(on_update=observe)) as (peer, raw):
        first, second = await opened(peer, raw, "s1"), await opened(peer, raw, "s2")
        one, two = begun(first.prompt("go")), begun(second.prompt("go"))
        p1, p2 = await raw.wait("session/prompt"), await raw.wait("session/prompt", 2)
        if p1["params"]["sessionId"] != "s1":
            p1, p2 = p2, p1
        raw.send(raw.update("s1", "a"), raw.update("s2", "b"), reply(p1, END), reply(p2, END))
        async with asyncio.timeout(5):
            assert (await two).text == "b"
        await raw.round_trip()
        assert not one.done()
        stuck.set()
        assert (await one).text == "a"
        assert seen == ["b", "a"]


@pytest.mark.covers("FF-19", "FF-13")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_handler_that_asks_meanwhile_is_waited_for_and_never_waits_for_itself(
    wire: str,
) -> None:
    seen: list[Any] = []
    holder: list[Session] = []

    async def observe(update: Update) -> None:
        seen.append(await holder[0].peer.request_extension("_x/ask", update.text))

    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        holder.append(session)
        session.on_update(observe)
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "A"), raw.update("s1", "B"), reply(request, END))
        for n, text in enumerate(("A", "B")):
            asked = await raw.wait("_x/ask", n + 1)
            assert asked["params"] == text
            await raw.round_trip()
            assert not running.done()
            raw.answer(asked, text.lower())
        assert (await running).text == "AB"
        assert seen == ["a", "b"]


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("answer", ["error", "end of file"])
async def test_an_error_or_the_end_comes_after_the_updates_before_it_too(
    wire: str, answer: str
) -> None:
    slow = Slow()
    async with raw_agent(wire, Client(on_update=slow)) as (peer, raw):
        session = await opened(peer, raw)
        got: list[str] = []

        async def iterate() -> None:
            async with session.prompt("go") as turn:
                async for update in turn:
                    got.extend([update.text])

        running = asyncio.ensure_future(iterate())
        request = await raw.wait("session/prompt")
        raw.send(*(raw.update("s1", str(n)) for n in range(10)))
        if answer == "error":
            raw.refuse(request, -32603)
        else:
            await raw.aclose()
        with pytest.raises(RequestError if answer == "error" else ConnectionClosed):
            await running
        assert got == [str(n) for n in range(10)]
        assert answer != "error" or slow.seen == got


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("method", ["load", "resume", "set_mode", "new", "set_config_option"])
async def test_every_other_answer_about_a_session_waits_too(wire: str, method: str) -> None:
    slow = Slow()
    async with raw_agent(wire, Client(on_update=slow), FULL) as (peer, raw):
        session_id, params = "s2", {}
        if method in ("load", "resume"):
            work: Any = getattr(peer, f"{method}_session")("s2", cwd="/")
        elif method == "new":
            work, params = peer.new_session(cwd="/"), {"sessionId": "s2"}
        else:
            session = await opened(peer, raw)
            session_id = "s1"
            more = ("m",) if method == "set_mode" else ("a", "b")
            work = getattr(session, method)(*more)
        count = len(raw.sent("session/new")) + 1 if method == "new" else 1
        running = begun(work)
        request = await raw.wait(f"session/{method}", count)
        raw.send(*(raw.update(session_id, str(n)) for n in range(5)), reply(request, params))
        await running
        assert slow.seen == ["0", "1", "2", "3", "4"]


class Streams(Agent):
    async def prompt(self, turn: Turn) -> None:
        for n in range(int(turn.text)):
            await turn.say(str(n))

    @extension("_test/stream")
    async def stream(self, params: Any, ctx: Any) -> Any:
        for n in range(50):
            await ctx.peer.notify_extension("_x/n", n)
        return "after"


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("count", [1, 2, 1000])
async def test_what_an_agent_said_before_it_returned_stands_before_its_answer(
    wire: str, count: int
) -> None:
    async with raw_client(wire, Streams()) as raw:
        session_id = await opened_in(raw)
        text = [{"type": "text", "text": str(count)}]
        await raw.ask("session/prompt", {"sessionId": session_id, "prompt": text}, "turn")
        order = [f.get("id") or f["params"]["update"]["content"]["text"] for f in raw.frames]
        assert order[-count - 1 :] == [*(str(n) for n in range(count)), "turn"]
        await raw.ask("_test/stream", None, "stream")
        order = [f["params"] if "params" in f else f["id"] for f in raw.frames[-51:]]
        assert order == [*range(50), "stream"]


# ------------------------------------------------------------------ 20


@pytest.mark.covers("FF-20")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_thousand_chunks_of_two_sessions_keep_their_order_each(wire: str) -> None:
    jitter = random.Random(7)
    seen: dict[str, list[str]] = {"s1": [], "s2": []}

    async def observe(update: Update) -> None:
        if int(update.text) % 50 == 0:
            await asyncio.sleep(jitter.random() * 0.003)
        elif jitter.random() < 0.3:
            await asyncio.sleep(0)
        seen[update.session_id].append(update.text)

    async with raw_agent(wire, Client(on_update=observe)) as (peer, raw):
        sessions = [await opened(peer, raw, "s1"), await opened(peer, raw, "s2")]
        running = [begun(session.prompt("go")) for session in sessions]
        await raw.wait("session/prompt", 2)
        for n in range(1000):
            raw.send(raw.update("s1", str(n)), raw.update("s2", str(n)))
            if n % 97 == 0:
                await asyncio.sleep(0)
        for request in raw.sent("session/prompt"):
            raw.answer(request, END)
        outcomes = [await task for task in running]
    expected = [str(n) for n in range(1000)]
    assert seen == {"s1": expected, "s2": expected}
    assert [[u.text for u in outcome.updates] for outcome in outcomes] == [expected, expected]


class Notes(Agent):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def prompt(self, turn: Turn) -> None:
        await turn.wait_cancelled()

    @extension("_test/note", kind="notification")
    async def note(self, params: Any, ctx: Any) -> None:
        for _ in range(params % 5):
            await asyncio.sleep(0)
        self.heard.append(params)


@pytest.mark.covers("FF-20")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_hears_notifications_in_their_order_and_a_cancel_passes_them(
    wire: str,
) -> None:
    agent = Notes()
    async with raw_client(wire, agent) as raw:
        session_id = await opened_in(raw)
        text = [{"type": "text", "text": "go"}]
        raw.send(
            raw.request(3, "session/prompt", {"sessionId": session_id, "prompt": text}),
            *(raw.notification("_test/note", n) for n in range(200)),
            raw.notification("session/cancel", {"sessionId": session_id}),
        )
        assert (await raw.answer_to(3))["result"] == {"stopReason": "cancelled"}
        await raw.round_trip()
        async with asyncio.timeout(5):
            while len(agent.heard) < 200:
                await asyncio.sleep(0)
        assert agent.heard == list(range(200))


# ------------------------------------------------------------------ 21


@pytest.mark.covers("FF-21")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("count", [1, 100, 1000])
async def test_updates_right_behind_the_answer_to_session_new_are_all_there(
    wire: str, count: int
) -> None:
    async with raw_agent(wire) as (peer, raw):
        opening = begun(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        raw.send(
            reply(request, {"sessionId": "s1"}), *(raw.update("s1", str(n)) for n in range(count))
        )
        session: Session = await opening
        updates = session.updates()
        async with asyncio.timeout(10):
            got = [(await anext(updates)).text for _ in range(count)]
        assert got == [str(n) for n in range(count)]


@pytest.mark.covers("FF-21")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("method", ["load", "resume"])
@pytest.mark.parametrize("form", ["await", "async with"])
async def test_updates_of_a_session_being_loaded_are_its_own_from_the_first(
    wire: str, method: str, form: str
) -> None:
    async with raw_agent(wire, None, FULL) as (peer, raw):
        opening = getattr(peer, f"{method}_session")("s1", cwd="/")
        history = [raw.update("s1", str(n)) for n in range(300)]

        async def answer() -> None:
            request = await raw.wait(f"session/{method}")
            raw.send(*history[:150])
            await asyncio.sleep(0)
            raw.send(*history[150:], reply(request, {}))

        answering = asyncio.ensure_future(answer())
        if form == "await":
            session: Session = await opening
            replayed = [u.text async for u in session.replay()]
        else:
            async with opening as session:
                replayed = [u.text async for u in session.replay()]
        await answering
        assert replayed == [str(n) for n in range(300)]


@pytest.mark.covers("FF-21")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_s_first_updates_stand_behind_the_answer_that_names_the_session(
    wire: str,
) -> None:
    class Greets(Agent):
        async def new_session(self, params: Any, ctx: Any) -> Any:
            response = await super().new_session(params, ctx)
            session_id = response.session_id

            async def greet() -> None:
                await ctx.session(session_id).info(title="hello")

            ctx.after_response(greet)
            return response

        async def prompt(self, turn: Turn) -> None:
            """Nothing."""

    async with raw_client(wire, Greets()) as raw:
        session_id = await opened_in(raw)
        update = await raw.wait("session/update")
        assert update["params"]["sessionId"] == session_id
        assert [f.get("method") for f in raw.frames] == [None, None, "session/update"]


@pytest.mark.covers("FF-20")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_fifty_turns_of_an_agent_at_once_keep_their_order_each(wire: str) -> None:
    class Streams(Agent):
        async def prompt(self, turn: Turn) -> None:
            for n in range(20):
                await turn.say(str(n))
                if n % 7 == 0:
                    await asyncio.sleep(0)

    async with raw_client(wire, Streams()) as raw:
        sessions = [await opened_in(raw) for _ in range(50)]
        text = [{"type": "text", "text": "go"}]
        raw.send(
            *(
                raw.request(session_id, "session/prompt", {"sessionId": session_id, "prompt": text})
                for session_id in sessions
            )
        )
        for session_id in sessions:
            assert (await raw.answer_to(session_id))["result"] == END
        said: dict[str, list[str]] = {session_id: [] for session_id in sessions}
        for frame in raw.sent("session/update"):
            params = frame["params"]
            said[params["sessionId"]].append(params["update"]["content"]["text"])
    assert all(texts == [str(n) for n in range(20)] for texts in said.values())
