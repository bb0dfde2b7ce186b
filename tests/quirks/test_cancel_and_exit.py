"""Quirks 18 to 20: how turns are cancelled, what `$/cancel_request` does, and how agents go."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
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
    InternalError,
    Limits,
    MethodNotFound,
    RequestError,
    RequestTimeout,
    Turn,
    connect,
    extension,
    spawn,
)
from antiphon.transports import ProcessTransport

CANCELLED = {"stopReason": "cancelled"}
ODD_AGENT = str(Path(__file__).parents[1] / "cli" / "odd_agent.py")
SHORT = Limits(cancel_backstop=0.2)


def ask(id_: Any, *kinds: str) -> dict[str, Any]:
    options = [{"optionId": kind, "name": kind, "kind": kind} for kind in kinds]
    params = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}, "options": options}
    return RawPeer.request(id_, "session/request_permission", params)


# ------------------------------------------------------------------ 18: answers to a cancel


@pytest.mark.covers("Q-18")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_agent_that_answers_a_cancel_at_once_ends_the_turn_at_once(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await turn.cancel()
            await raw.wait("session/cancel")
            raw.answer(request, CANCELLED)
            async with asyncio.timeout(5):
                assert [u async for u in turn] == []
        assert turn.stop_reason == "cancelled"


@pytest.mark.covers("Q-18")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("how", ["leave", "timeout", "cancelled task"])
async def test_one_that_does_not_answer_costs_the_back_stop_and_no_more(
    wire: str, how: str
) -> None:
    async with raw_agent(wire, limits=SHORT) as (peer, raw):
        session = await opened(peer, raw)
        begin = time.monotonic()
        if how == "leave":
            async with session.prompt("go"):
                await raw.wait("session/prompt")
        elif how == "timeout":
            with pytest.raises(RequestTimeout):
                await session.prompt("go", timeout=0.05)
        else:
            running = begun(session.prompt("go"))
            await raw.wait("session/prompt")
            running.cancel()
            await asyncio.wait([running])
        await raw.wait("session/cancel")
        # The next turn is possible, whatever the agent does with the old one.
        running = begun(session.prompt("again"))
        request = await raw.wait("session/prompt", 2)
        assert time.monotonic() - begin < 5
        raw.send(raw.update("s1", "new"), reply(request, END))
        assert (await running).text == "new"


@pytest.mark.covers("Q-18")
async def test_an_error_for_a_cancelled_prompt_and_a_next_prompt_that_ends_at_once() -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        with pytest.raises(InternalError):
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt")
                await turn.cancel()
                raw.refuse(request, -32603, "Internal error")
                async for _ in turn:
                    pass
        running = begun(session.prompt("again"))
        raw.answer(await raw.wait("session/prompt", 2), CANCELLED)
        assert (await running).stop_reason == "cancelled"
        running = begun(session.prompt("and again"))
        request = await raw.wait("session/prompt", 3)
        raw.send(raw.update("s1", "at last"), reply(request, END))
        assert (await running).text == "at last"


@pytest.mark.covers("Q-18")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("reason", ["cancelled", "end_turn"])
@pytest.mark.parametrize("offered", [("allow_once", "reject_once"), ("allow_once",)])
async def test_a_rejected_question_ends_the_turn_in_either_way(
    wire: str, reason: str, offered: tuple[str, ...]
) -> None:
    async with raw_agent(wire, Client(permissions="deny")) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(ask("q", *offered))
            outcome = (await raw.answer_to("q"))["result"]["outcome"]
            if "reject_once" in offered:
                assert outcome == {"outcome": "selected", "optionId": "reject_once"}
            else:
                assert outcome == {"outcome": "cancelled"}
            raw.send(raw.update("s1", "as you wish"), reply(request, {"stopReason": reason}))
            assert [u.text async for u in turn] == ["as you wish"]
        assert turn.stop_reason == reason
        # A rejection is no cancellation of ours.
        await raw.round_trip()
        assert not raw.sent("session/cancel")


@pytest.mark.covers("Q-18")
async def test_a_loop_detector_is_a_stop_reason_like_any_other() -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), {"stopReason": "max_turn_requests"})
        assert (await running).stop_reason == "max_turn_requests"


# ------------------------------------------------------------------ 19: `$/cancel_request`


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("how", ["cancel", "leave", "timeout", "cancelled task"])
async def test_a_turn_is_never_ended_by_cancel_request_alone(wire: str, how: str) -> None:
    async with raw_agent(wire, limits=SHORT) as (peer, raw):
        session = await opened(peer, raw)
        if how == "cancel":
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt")
                await turn.cancel()
                await raw.wait("session/cancel")
                raw.answer(request, CANCELLED)
                assert [u async for u in turn] == []
        elif how == "leave":
            async with session.prompt("go"):
                await raw.wait("session/prompt")
        elif how == "timeout":
            with pytest.raises(RequestTimeout):
                await session.prompt("go", timeout=0.05)
        else:
            running = begun(session.prompt("go"))
            await raw.wait("session/prompt")
            running.cancel()
            await asyncio.wait([running])
        cancel = await raw.wait("session/cancel")
        assert cancel["params"] == {"sessionId": "s1"}
        await raw.round_trip()
        assert len(raw.sent("session/cancel")) == 1


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_cancel_request_that_is_ignored_or_refused_is_no_matter(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        for n, reaction in enumerate(("silence", "error without id", "late result", "-32800")):
            asking = begun(peer.request_extension("_x/slow"))
            request = await raw.wait("_x/slow", n + 1)
            asking.cancel()
            await asyncio.wait([asking])
            cancel = await raw.wait("$/cancel_request", n + 1)
            assert cancel["params"] == {"requestId": request["id"]}
            before = len(raw.frames)
            if reaction == "error without id":
                raw.send({"jsonrpc": "2.0", "error": {"code": -32601, "message": "no"}})
            elif reaction == "late result":
                raw.answer(request, {})
            elif reaction == "-32800":
                raw.refuse(request, -32800)
            await raw.round_trip()
            assert len(raw.frames) == before + 1
        session = await opened(peer, raw)
        assert session.session_id == "s1"


class Extended(Agent):
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    async def prompt(self, turn: Turn) -> None:
        """Nothing."""

    @extension("_vendor/known")
    async def known(self, params: Any, ctx: Any) -> Any:
        return {"method": ctx.method}

    @extension("_vendor/told", kind="notification")
    async def hears(self, params: Any, ctx: Any) -> None:
        self.told.append((ctx.method, params))


UNKNOWN = ["$/progress", "$/cancelRequest", "$/", "_vendor/unknown", "_", "_vendor/known"]


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_unknown_notifications_are_ignored_and_unknown_requests_are_not_found_by_an_agent(
    wire: str,
) -> None:
    agent = Extended()
    async with raw_client(wire, agent) as raw:
        before = len(raw.frames)
        raw.send(*(raw.notification(method, {"x": 1}) for method in UNKNOWN))
        raw.send(raw.notification("_vendor/told", {"y": 2}))
        await raw.round_trip()
        assert len(raw.frames) == before + 1
        assert agent.told == [("_vendor/told", {"y": 2})]
        for method in ("$/progress", "_vendor/unknown", "_", "vendor/known", "_vendor/told"):
            answer = await raw.ask(method, {"x": 1})
            assert answer["error"]["code"] == -32601, method
        answer = await raw.ask("_vendor/known", {})
        assert answer["result"] == {"method": "_vendor/known"}  # with its underscore


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_and_by_a_client(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        before = len(raw.frames)
        raw.send(*(raw.notification(method, {"x": 1}) for method in UNKNOWN))
        await raw.round_trip()
        assert len(raw.frames) == before + 1
        for method in ("$/progress", "_vendor/unknown", "_"):
            assert (await raw.ask(method, {"x": 1}))["error"]["code"] == -32601
        await peer.notify_extension("_vendor/x", None)
        assert (await raw.wait("_vendor/x"))["method"] == "_vendor/x"


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"error": {"code": -32601, "message": "x"}}, MethodNotFound),
        ({"error": {"code": -32603, "message": "x"}}, InternalError),
        ({"result": None}, None),
        ({"result": {}}, {}),
        ({"result": {"error": "unknown method"}}, {"error": "unknown method"}),
    ],
)
async def test_every_answer_to_an_unknown_extension_is_told_as_it_is(
    answer: dict[str, Any], outcome: Any
) -> None:
    async with raw_agent("memory") as (peer, raw):
        asking = begun(peer.request_extension("_x/unknown"))
        request = await raw.wait("_x/unknown")
        raw.send({"jsonrpc": "2.0", "id": request["id"], **answer})
        if isinstance(outcome, type):
            with pytest.raises(RequestError) as failed:
                await asking
            assert type(failed.value) is outcome
        else:
            assert await asking == outcome


class Waiting(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.wait_cancelled()


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("also", [True, False])
async def test_our_agent_obeys_cancel_request_and_answers_once(wire: str, also: bool) -> None:
    async with raw_client(wire, Waiting()) as raw:
        session_id = await opened_in(raw)
        text = [{"type": "text", "text": "go"}]
        raw.send(raw.request(3, "session/prompt", {"sessionId": session_id, "prompt": text}))
        raw.send(raw.notification("$/cancel_request", {"requestId": 3}))
        if also:
            raw.send(raw.notification("session/cancel", {"sessionId": session_id}))
        assert (await raw.answer_to(3))["result"] == CANCELLED
        await raw.round_trip()
        assert len(raw.responses(3)) == 1


# ------------------------------------------------------------------ 20: the end of input


WRAPPER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", CHILD])
sys.stderr.write(f"child {child.pid}\\n"); sys.stderr.flush()
sys.exit(child.wait())
"""
DEAF = """
import signal, sys, time
line = sys.stdin.readline()
import json
id_ = json.loads(line)["id"]
print(json.dumps({"jsonrpc": "2.0", "id": id_, "result": {"protocolVersion": 1}}), flush=True)
time.sleep(60)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DEAF


def connected(command: list[str], *, brief: bool) -> Any:
    """`spawn`, or the same with shorter steps of its ladder."""
    if not brief:
        return spawn(command)
    return connect(ProcessTransport(command, stdin_grace=0.3, term_grace=0.3), limits=SHORT)


@pytest.mark.covers("Q-20")
@pytest.mark.parametrize("child", [DEAF, STUBBORN], ids=["deaf", "stubborn"])
@pytest.mark.parametrize("how", ["close", "exception", "cancelled task"])
async def test_an_agent_behind_a_wrapper_that_ignores_the_end_of_input_is_ended_whole(
    child: str, how: str
) -> None:
    command = [sys.executable, "-c", WRAPPER.replace("CHILD", repr(child))]
    pids: list[int] = []

    async def use() -> None:
        async with connected(command, brief=how != "close") as agent:
            group = [agent.process.pid]
            group += [p.pid for p in psutil.Process(agent.process.pid).children(recursive=True)]
            assert len(group) == 2
            pids.extend(group)
            if how == "exception":
                raise LookupError
            if how == "cancelled task":
                await asyncio.Event().wait()

    begin = time.monotonic()
    using = asyncio.ensure_future(use())
    if how == "cancelled task":
        while not pids:
            await asyncio.sleep(0.01)
        using.cancel()
    await asyncio.wait([using])
    assert time.monotonic() - begin < 8
    if how == "exception":
        assert isinstance(using.exception(), LookupError)
    else:
        assert using.cancelled() == (how == "cancelled task")
    assert not [pid for pid in pids if psutil.pid_exists(pid) and _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.covers("Q-20")
@pytest.mark.parametrize("kind", ["lingers", "deaf"])
async def test_an_agent_that_runs_on_after_the_end_is_gone_within_the_ladder(kind: str) -> None:
    begin = time.monotonic()
    async with connected([sys.executable, ODD_AGENT, kind], brief=True) as agent:
        session = await agent.new_session(cwd="/")
        async with session.prompt("go") as turn:
            first = await anext(turn)
            assert first.text
    assert agent.process.exit_status == -9
    assert time.monotonic() - begin < 5
