"""Quirks 12 to 17: updates, questions and tool calls in every order."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.faults.wires import (
    CLIENT_WIRES,
    END,
    RawPeer,
    begun,
    opened,
    raw_agent,
    reply,
)

from antiphon import Client, Limits, Update
from antiphon.cli._view import View
from antiphon.schema import decode_update, v1, v1_unstable
from antiphon.services import Files, Terminals

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon import ClientContext

FULL: dict[str, Any] = {"loadSession": True, "sessionCapabilities": {"resume": {}, "fork": {}}}
OPTIONS = [
    {"optionId": "y", "name": "Yes", "kind": "allow_once"},
    {"optionId": "n", "name": "No", "kind": "reject_once"},
]


def update(session_id: str, tag: str, **members: Any) -> dict[str, Any]:
    params = {"sessionId": session_id, "update": {"sessionUpdate": tag, **members}}
    return {"jsonrpc": "2.0", "method": "session/update", "params": params}


def ask(id_: Any, session_id: str = "s1", **tool: Any) -> dict[str, Any]:
    params = {"sessionId": session_id, "toolCall": tool, "options": OPTIONS}
    return RawPeer.request(id_, "session/request_permission", params)


COMMANDS = update("s1", "available_commands_update", availableCommands=[])
USAGE = update("s1", "usage_update", used=5, size=10)
INFO = update("s1", "session_info_update", title="t")
MODE = update("s1", "current_mode_update", currentModeId="m")
CONFIG = update("s1", "config_option_update", configOptions=[])
BANNER = update("s1", "agent_message_chunk", content={"type": "text", "text": "Welcome"})
TOOL = update("s1", "tool_call", toolCallId="model", title="Model changed", status="completed")


async def take(session: Any, count: int) -> list[Update]:
    got: list[Update] = []
    updates = session.updates()
    async with asyncio.timeout(10):
        while len(got) < count:
            got += [await anext(updates)]
    updates.close()
    return got


def kinds(updates: list[Update]) -> list[str]:
    return [update.kind for update in updates]


# ------------------------------------------------------------------ 12: before the session is known


@pytest.mark.covers("Q-12")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("together", [True, False])
async def test_updates_before_the_answer_that_names_their_session_are_its_first(
    wire: str, together: bool
) -> None:
    early = [COMMANDS, USAGE, MODE]
    async with raw_agent(wire) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        answer = reply(request, {"sessionId": "s1"})
        if together:
            raw.send(*early, answer, INFO)
        else:
            for frame in early:
                raw.send(frame)
                await raw.round_trip()
            raw.send(answer)
            raw.send(INFO)
        session = await opening
        got = await take(session, 4)
        assert kinds(got) == [
            "available_commands_update",
            "usage_update",
            "current_mode_update",
            "session_info_update",
        ]
        assert {update.label for update in got} == {"session"}


@pytest.mark.covers("Q-12")
async def test_two_sessions_opened_at_once_get_each_its_own_early_updates() -> None:
    async with raw_agent("memory") as (peer, raw):
        first = asyncio.ensure_future(peer.new_session(cwd="/"))
        second = asyncio.ensure_future(peer.new_session(cwd="/"))
        one, two = await raw.wait("session/new"), await raw.wait("session/new", 2)
        early = [raw.update(f"s{1 + n % 2}", str(n)) for n in range(20)]
        raw.send(*early, reply(two, {"sessionId": "s2"}), reply(one, {"sessionId": "s1"}))
        sessions = [await first, await second]
        texts = [[u.text for u in await take(session, 10)] for session in sessions]
        assert texts == [[str(n) for n in range(0, 20, 2)], [str(n) for n in range(1, 20, 2)]]


@pytest.mark.covers("Q-12")
async def test_an_observer_of_the_client_sees_them_before_the_session_is_returned() -> None:
    seen: list[str] = []
    client = Client(on_update=lambda update: seen.append(update.kind))
    async with raw_agent("memory", client) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        raw.send(COMMANDS, USAGE, reply(request, {"sessionId": "s1"}))
        await opening
        assert seen == ["available_commands_update", "usage_update"]


@pytest.mark.covers("Q-12")
async def test_a_fork_s_history_before_its_answer_waits_for_whoever_resumes_it() -> None:
    async with raw_agent("memory", None, FULL, unstable=True) as (peer, raw):
        await opened(peer, raw)
        params = v1_unstable.ForkSessionRequest(session_id="s1", cwd="/")
        forking = asyncio.ensure_future(peer.request(params))
        request = await raw.wait("session/fork")
        history = [raw.update("s2", str(n)) for n in range(50)]
        raw.send(*history, reply(request, {"sessionId": "s2"}))
        fork = await forking
        assert fork.session_id == "s2"
        resuming = begun(peer.resume_session("s2", cwd="/"))
        raw.answer(await raw.wait("session/resume"), {})
        session = await resuming
        assert [u.text for u in await take(session, 50)] == [str(n) for n in range(50)]


# ------------------------------------------------------------------ 13: between turns


@pytest.mark.covers("Q-13")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_what_comes_between_turns_is_the_session_s_and_no_turn_s(wire: str) -> None:
    between = [COMMANDS, CONFIG, MODE, USAGE, INFO, TOOL, BANNER]
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        everything = session.updates()
        raw.send(*between)
        await raw.round_trip()
        for n in (1, 2):
            running = begun(session.prompt("go"))
            request = await raw.wait("session/prompt", n)
            raw.send(raw.update("s1", f"turn {n}"), reply(request, END), *between)
            outcome = await running
            assert outcome.text == f"turn {n}"
            assert [u.label for u in outcome.updates] == ["turn"]
        await raw.round_trip()
        total = 3 * len(between) + 2
        got = [await anext(everything) for _ in range(total)]
        assert [u.label for u in got].count("turn") == 2
        assert kinds(got)[: len(between)] == [
            f["params"]["update"]["sessionUpdate"] for f in between
        ]


@pytest.mark.covers("Q-13")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("method", ["load", "resume"])
async def test_history_runs_before_the_answer_and_is_labelled(wire: str, method: str) -> None:
    async with raw_agent(wire, None, FULL) as (peer, raw):
        opening = getattr(peer, f"{method}_session")("s1", cwd="/")
        async with opening as session:
            request = await raw.wait(f"session/{method}")
            raw.send(*(raw.update("s1", str(n)) for n in range(100)), reply(request, {}), COMMANDS)
            replayed = [u.text async for u in session.replay()]
        assert replayed == [str(n) for n in range(100)]
        (after,) = await take(session, 1)
        assert (after.kind, after.label) == ("available_commands_update", "session")


# ------------------------------------------------------------------ 14: questions about unknown calls


@pytest.mark.covers("Q-14")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"title": "Write x", "kind": "edit", "status": "pending", "rawInput": {"path": "x"}},
        {"kind": None, "title": None, "content": None, "locations": None},
        {"kind": "deploy", "status": "unheard", "content": [{"type": "hologram"}]},
        {"title": 5, "locations": "none"},
    ],
    ids=json.dumps,
)
async def test_a_question_about_a_call_that_nobody_announced_is_asked_and_answered(
    wire: str, tool: dict[str, Any]
) -> None:
    seen: list[Any] = []

    async def decide(params: v1.RequestPermissionRequest, ctx: ClientContext) -> bool:
        seen.append(params)
        return True

    async with raw_agent(wire, Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(ask("q", toolCallId="t1", **tool))
            answer = await raw.answer_to("q")
            assert answer["result"] == {"outcome": {"outcome": "selected", "optionId": "y"}}
            raw.answer(request, END)
            assert [u async for u in turn] == []
        assert seen[0].tool_call.tool_call_id == "t1"


@pytest.mark.covers("Q-14")
async def test_the_update_before_the_question_is_in_the_turn_s_queue_when_it_is_asked() -> None:
    """Title and kind may have to come from it."""
    asked = asyncio.Event()

    async def decide(params: v1.RequestPermissionRequest, ctx: ClientContext) -> bool:
        asked.set()
        return False

    async with raw_agent("memory", Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            call = update("s1", "tool_call", toolCallId="t1", title="Run it", kind="execute")
            raw.send(call, ask("q", toolCallId="t1"))
            await asked.wait()
            async with asyncio.timeout(1):
                first = await anext(turn)
            assert isinstance(first.value, v1.ToolCall)
            assert (first.value.title, first.value.kind) == ("Run it", "execute")
            await raw.answer_to("q")
            raw.answer(request, END)


# ------------------------------------------------------------------ 15: tool calls in any order

ODD_CALLS: dict[str, list[dict[str, Any]]] = {
    "update alone": [update("s1", "tool_call_update", toolCallId="t", status="completed")],
    "update before": [
        update("s1", "tool_call_update", toolCallId="t", status="in_progress"),
        update("s1", "tool_call", toolCallId="t", title="Late"),
    ],
    "call twice": [
        update("s1", "tool_call", toolCallId="t", title="One", status="pending"),
        update("s1", "tool_call", toolCallId="t", title="Two", status="in_progress"),
    ],
    "no status": [update("s1", "tool_call", toolCallId="t", title="One", kind="read")],
    "no kind": [update("s1", "tool_call", toolCallId="t", title="One", status="pending")],
    "after its end": [
        update("s1", "tool_call", toolCallId="t", title="One", status="completed"),
        update("s1", "tool_call_update", toolCallId="t", status="in_progress"),
    ],
}


@pytest.mark.covers("Q-15")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("case", ODD_CALLS)
async def test_tool_calls_in_any_order_arrive_typed_as_they_came(wire: str, case: str) -> None:
    frames = ODD_CALLS[case]
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(*frames, reply(request, END))
            got = [u async for u in turn]
    assert [json.loads(u.raw) for u in got] == [f["params"]["update"] for f in frames]
    assert all(isinstance(u.value, v1.ToolCall | v1.ToolCallProgress) for u in got)
    assert {u.value.tool_call_id for u in got} == {"t"}  # type: ignore[union-attr]


FOLDED = {
    "update alone": ("", "completed"),
    "update before": ("Late", "in_progress"),
    "call twice": ("Two", "in_progress"),
    "no status": ("One", "pending"),
    "no kind": ("One", "pending"),
    "after its end": ("One", "in_progress"),
}


@pytest.mark.covers("Q-15")
@pytest.mark.parametrize("case", ODD_CALLS)
async def test_the_command_shows_one_call_put_together_from_all_of_it(case: str) -> None:
    view = View(cast("Any", None))
    frames = [json.dumps(frame["params"]["update"]).encode() for frame in ODD_CALLS[case]]
    *_, tool = [view.fold("s1", cast("Any", decode_update(frame))) for frame in frames]
    assert (tool.title, tool.status) == FOLDED[case]
    assert tool.id == "t"


@pytest.mark.covers("Q-15")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("case", ODD_CALLS)
async def test_so_does_a_session_s_view(wire: str, case: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        view = session.view
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(*ODD_CALLS[case], reply(request, END))
        await running
        (call,) = view.tool_calls.values()
        assert [entry for entry in view.entries if entry is call] == [call]
    assert (call.title, call.status) == FOLDED[case]
    assert call.tool_call_id == "t"


@pytest.mark.covers("Q-13")
async def test_a_banner_before_the_first_prompt_is_a_message_of_its_own_in_the_view() -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        view = session.view
        raw.send(BANNER, COMMANDS, MODE, USAGE, INFO, TOOL)
        await raw.round_trip()
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "an"), raw.update("s1", "swer"), reply(request, END))
        await running
        assert [(m.kind, m.text) for m in view.messages] == [
            ("agent", "Welcome"),
            ("user", "go"),
            ("agent", "answer"),
        ]
        assert (view.mode, view.title) == ("m", "t")
        assert list(view.tool_calls) == ["model"]


@pytest.mark.covers("Q-15", "Q-14")
async def test_update_question_update_and_only_then_the_call() -> None:
    async with raw_agent("memory", Client(permissions="allow")) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(
                update("s1", "tool_call_update", toolCallId="t", status="pending"),
                ask("q", toolCallId="t"),
                update("s1", "tool_call_update", toolCallId="t", status="in_progress"),
                update("s1", "tool_call", toolCallId="t", title="At last", status="completed"),
            )
            await raw.answer_to("q")
            raw.answer(request, END)
            got = [u async for u in turn]
    assert kinds(got) == ["tool_call_update", "tool_call_update", "tool_call"]
    assert [u.value.status for u in got] == [  # type: ignore[union-attr]
        "pending",
        "in_progress",
        "completed",
    ]


# ------------------------------------------------------------------ 16: calls beside a question


@pytest.mark.covers("Q-16")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_everything_is_served_while_a_question_is_open(wire: str, tmp_path: Path) -> None:
    decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def decide(params: Any, ctx: ClientContext) -> bool:
        return await decided

    (tmp_path / "notes.txt").write_text("alpha\n")
    client = Client(permissions=decide, files=Files(), terminals=Terminals())
    async with raw_agent(wire, client) as (peer, raw):
        session = await opened(peer, raw, cwd=tmp_path)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            path = str(tmp_path / "notes.txt")
            raw.send(ask("q", toolCallId="t"), ask("q2", toolCallId="t2"))
            got = await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": path})
            assert got["result"] == {"content": "alpha\n"}
            made = await raw.ask("terminal/create", {"sessionId": "s1", "command": "true"})
            told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
            assert (await raw.ask("terminal/wait_for_exit", told))["result"]["exitCode"] == 0
            await raw.ask("terminal/release", told)
            raw.send(raw.update("s1", "meanwhile"))
            async with asyncio.timeout(5):
                assert (await anext(turn)).text == "meanwhile"
            assert not raw.responses("q")
            decided.set_result(True)
            await raw.answer_to("q")
            await raw.answer_to("q2")
            raw.answer(request, END)
            assert [u async for u in turn] == []


# ------------------------------------------------------------------ 17: waits, kills and cancels


@pytest.mark.covers("Q-17")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("verb", ["kill", "release"])
async def test_killing_completes_the_wait(wire: str, verb: str, tmp_path: Path) -> None:
    async with raw_agent(wire, Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        params = {"sessionId": "s1", "command": "sleep", "args": ["60"]}
        made = await raw.ask("terminal/create", params)
        told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
        raw.send(
            raw.request("wait", "terminal/wait_for_exit", told),
            raw.request("end", f"terminal/{verb}", told),
        )
        waited = await raw.answer_to("wait")
        assert waited["result"].get("signal") in ("SIGTERM", "SIGKILL")
        assert "result" in await raw.answer_to("end")
        after = await raw.ask("terminal/output", told)
        assert ("error" in after) == (verb == "release")


@pytest.mark.covers("Q-17")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_terminal_that_is_never_released_ends_with_its_session_s_connection(
    wire: str, tmp_path: Path
) -> None:
    """And the wait that is left pending keeps nobody: the test's own check finds leftovers."""
    async with raw_agent(wire, Client(terminals=Terminals())) as (peer, raw):
        session = await opened(peer, raw, cwd=tmp_path)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            params = {"sessionId": "s1", "command": "sh", "args": ["-c", "sleep 60 & wait"]}
            made = await raw.ask("terminal/create", params)
            told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
            raw.send(raw.request("wait", "terminal/wait_for_exit", told))
            await turn.cancel()
            await raw.wait("session/cancel")
            raw.answer(request, {"stopReason": "cancelled"})
            assert [u async for u in turn] == []
        assert turn.stop_reason == "cancelled"
        await raw.round_trip()
        assert not raw.responses("wait")


@pytest.mark.covers("Q-17")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_updates_and_requests_that_follow_a_cancel_are_taken(
    wire: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text")
    client = Client(permissions="allow", files=Files())
    async with raw_agent(wire, client, limits=Limits(cancel_backstop=5)) as (peer, raw):
        session = await opened(peer, raw, cwd=tmp_path)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await turn.cancel()
            await raw.wait("session/cancel")
            path = str(tmp_path / "a.txt")
            raw.send(raw.update("s1", "one"), ask("q", toolCallId="t"))
            got = await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": path})
            assert got["result"] == {"content": "text"}
            raw.send(raw.update("s1", "two"), reply(request, {"stopReason": "cancelled"}))
            assert [u.text async for u in turn] == ["one", "two"]
        # however the client would decide: the turn is being cancelled
        assert (await raw.answer_to("q"))["result"] == {"outcome": {"outcome": "cancelled"}}


@pytest.mark.covers("Q-13")
@pytest.mark.parametrize("replays", [True, False])
async def test_a_resume_that_replays_the_history_does_not_double_it_in_the_view(
    replays: bool,
) -> None:
    """fastagent sends the whole history before its answer to `session/resume`, pi only a banner."""
    async with raw_agent("memory", None, {"sessionCapabilities": {"resume": {}}}) as (peer, raw):
        session = await opened(peer, raw)
        view = session.view
        running = asyncio.create_task(session.prompt("hello"))
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "hi"), reply(request, END))
        await running

        resuming = asyncio.create_task(peer.resume_session("s1", cwd="/"))
        request = await raw.wait("session/resume")
        asked = update("s1", "user_message_chunk", content={"type": "text", "text": "hello"})
        history = [INFO, asked, raw.update("s1", "hi")] if replays else [BANNER]
        raw.send(*history, reply(request, {}))
        await resuming

        shown = [(message.kind, message.text) for message in view.messages]
        assert shown[:2] == [("user", "hello"), ("agent", "hi")]
        assert shown[2:] == ([] if replays else [("agent", "Welcome")])
