"""Quirks 6 to 11: answers to nothing, answers without a value, errors of all kinds."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.faults.wires import (
    AGENT_WIRES,
    CLIENT_WIRES,
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
    Capabilities,
    CapabilityError,
    MethodNotFound,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
    Turn,
)
from antiphon.schema import v1, v1_unstable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon import AgentPeer, Session

FULL: dict[str, Any] = {
    "loadSession": True,
    "sessionCapabilities": {"list": {}, "resume": {}, "close": {}, "delete": {}},
}
LENDS = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}


def prompt(session_id: str, text: str = "go") -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


async def asked(raw: RawPeer, method: str, work: Awaitable[Any], answer: dict[str, Any]) -> Any:
    """What becomes of a call of ours that is answered so."""
    count = len(raw.sent(method)) + 1
    running = begun(work)
    request = await raw.wait(method, count)
    raw.send({"jsonrpc": "2.0", "id": request["id"], **answer})
    return await running


# ------------------------------------------------------------------ 6: errors for notifications


class Talker(Agent):
    async def prompt(self, turn: Turn) -> None:
        for n in range(500):
            await turn.say(str(n))
        if turn.client_capabilities.fs:
            await turn.read_text_file("/x")


@pytest.mark.covers("Q-06")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_client_that_answers_every_update_with_an_error_gets_them_all(
    wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # what a user sees who has not asked for more
    async with raw_client(wire, Talker(), {"fs": {"readTextFile": True}}) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        reading = await raw.wait("fs/read_text_file")
        error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "Invalid"}}
        raw.send(*(error for _ in raw.sent("session/update")), reply(reading, {"content": ""}))
        assert (await raw.answer_to(3))["result"] == {"stopReason": "end_turn"}
        texts = [f["params"]["update"]["content"]["text"] for f in raw.sent("session/update")]
        assert texts == [str(n) for n in range(500)]
        assert raw.responses(None) == []
    assert not caplog.records  # and so not a line for each


@pytest.mark.covers("Q-06")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_agent_that_answers_notifications_with_errors_is_put_up_with(
    wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        await peer.notify_extension("_vendor/unknown", {"a": 1})
        await raw.wait("_vendor/unknown")
        raw.send({"jsonrpc": "2.0", "error": {"code": -32601, "message": "Method not found"}})
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            await session.cancel()
            await raw.wait("session/cancel")
            raw.send({"jsonrpc": "2.0", "error": {"code": -32601, "message": "session/cancel"}})
            raw.send(raw.update("s1", "late"), reply(request, {"stopReason": "cancelled"}))
            assert [update.text async for update in turn] == ["late"]
        assert turn.stop_reason == "cancelled"
        await raw.round_trip()
        assert not [f for f in raw.frames if "error" in f and f["id"] != "ask-1"]
        assert not caplog.records


# ------------------------------------------------------------------ 7: null for an object

NOTHING: list[dict[str, Any]] = [{"result": None}, {"result": {}}, {}]


VOID_CALLS: dict[str, Callable[[AgentPeer, Session], Any]] = {
    "session/set_mode": lambda peer, session: session.set_mode("m"),
    "session/close": lambda peer, session: session.close(),
    "session/delete": lambda peer, session: peer.delete_session("s1"),
    "authenticate": lambda peer, session: peer.authenticate("key"),
    "session/load": lambda peer, session: peer.load_session("s9", cwd="/"),
    "session/resume": lambda peer, session: peer.resume_session("s9", cwd="/"),
    "session/list": lambda peer, session: peer.list_sessions(),
    "session/set_config_option": lambda peer, session: session.set_config_option("model", "b"),
}


@pytest.mark.covers("Q-07", "Q-08")
@pytest.mark.parametrize("answer", NOTHING, ids=json.dumps)
@pytest.mark.parametrize("method", VOID_CALLS)
async def test_null_for_an_object_is_an_empty_object_to_a_client(
    method: str, answer: dict[str, Any]
) -> None:
    async with raw_agent("memory", None, FULL) as (peer, raw):
        session = await opened(peer, raw)
        got = await asked(raw, method, VOID_CALLS[method](peer, session), answer)
        if method == "session/list":
            assert got.sessions == []
        if method in ("session/load", "session/resume"):
            assert got.session_id == "s9"
            assert got.modes is None


@pytest.mark.covers("Q-07")
@pytest.mark.parametrize("result", [None, {}, [], "", {"error": "no"}, {"error": {"code": 1}}])
async def test_whatever_an_extension_answers_reaches_the_caller(result: Any) -> None:
    async with raw_agent("memory") as (peer, raw):
        work = peer.request_extension("_vendor/x")
        assert await asked(raw, "_vendor/x", work, {"result": result}) == result


class Worker(Agent):
    """Uses everything whose answer says nothing."""

    async def prompt(self, turn: Turn) -> None:
        await turn.write_text_file("/x", "text")
        async with turn.run("true") as terminal:
            await terminal.kill()
        await turn.say("done")


@pytest.mark.covers("Q-07")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("nothing", NOTHING, ids=json.dumps)
async def test_and_to_an_agent(wire: str, nothing: dict[str, Any]) -> None:
    async with raw_client(wire, Worker(), LENDS) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        for method in (
            "fs/write_text_file",
            "terminal/create",
            "terminal/kill",
            "terminal/release",
        ):
            request = await raw.wait(method)
            answer = {"result": {"terminalId": "t"}} if method == "terminal/create" else nothing
            raw.send({"jsonrpc": "2.0", "id": request["id"], **answer})
        assert (await raw.answer_to(3))["result"] == {"stopReason": "end_turn"}
        assert len(raw.sent("session/update")) == 1


@pytest.mark.covers("Q-07")
@pytest.mark.parametrize("answer", NOTHING, ids=json.dumps)
async def test_where_a_value_is_needed_nothing_is_an_error_and_no_wait(
    answer: dict[str, Any],
) -> None:
    async with raw_agent("memory") as (peer, raw):
        with pytest.raises(RemoteProtocolError):
            await asked(raw, "session/new", peer.new_session(cwd="/"), answer)
        session = await opened(peer, raw)
        with pytest.raises(RemoteProtocolError):
            await asked(raw, "session/prompt", session.prompt("go"), answer)
        # and the session is as good as before
        got = await asked(
            raw, "session/prompt", session.prompt("go"), {"result": {"stopReason": "end_turn"}}
        )
        assert got.stop_reason == "end_turn"


# ------------------------------------------------------------------ 8: incomplete results


@pytest.mark.covers("Q-08")
async def test_an_option_that_was_set_without_an_answer_of_options_is_known_all_the_same() -> None:
    options = [
        {
            "id": "model",
            "name": "Model",
            "type": "select",
            "currentValue": "a",
            "options": [{"value": "a", "name": "A"}, {"value": "b", "name": "B"}],
        },
        {
            "id": "depth",
            "name": "Depth",
            "type": "select",
            "currentValue": "x",
            "options": [{"value": "x", "name": "X"}],
        },
    ]
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw, configOptions=options)
        work = session.set_config_option("model", "b")
        got = await asked(raw, "session/set_config_option", work, {"result": {}})
        assert [(option.id, option.current_value) for option in got] == [
            ("model", "b"),
            ("depth", "x"),
        ]
        assert session.config_options == got


@pytest.mark.covers("Q-08")
async def test_a_list_that_was_not_advertised_is_asked_for_only_by_force() -> None:
    async with raw_agent("memory") as (peer, raw):
        with pytest.raises(CapabilityError) as refused:
            await peer.list_sessions()
        assert refused.value.capability == "agentCapabilities.sessionCapabilities.list"
        await raw.round_trip()
        assert not raw.sent("session/list")


class Half(Agent):
    """Returns nothing where something is due."""

    async def new_session(self, params: Any, ctx: Any) -> Any:
        return None

    async def list_sessions(self, params: Any, ctx: Any) -> Any:
        return None

    async def load_session(self, params: Any, ctx: Any) -> Any:
        return None

    async def prompt(self, turn: Turn) -> None:
        """Nothing."""


@pytest.mark.covers("Q-08")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_missing_return_never_leaves_our_agent_as_an_incomplete_result(
    wire: str,
) -> None:
    where: dict[str, Any] = {"cwd": "/", "mcpServers": []}
    async with raw_client(wire, Half()) as raw:
        # Both have members that a result must have: an error, and no null.
        for method in ("session/new", "session/list"):
            assert (await raw.ask(method, where))["error"]["code"] == -32603
        # Nothing is required of a load.
        answer = await raw.ask("session/load", {"sessionId": "s", **where})
        assert answer["result"] == {}
        assert (await raw.ask("session/prompt", prompt("s")))["result"]["stopReason"] == "end_turn"


# ------------------------------------------------------------------ 9: sessions and modes nobody knows


@pytest.mark.covers("Q-09")
@pytest.mark.parametrize("code", [-32602, -32002, -32603, -32600])
async def test_an_unknown_session_is_an_error_of_any_code(code: int) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        answer = {"error": {"code": code, "message": "Session not found"}}
        with pytest.raises(RequestError) as failed:
            await asked(raw, "session/prompt", session.prompt("go"), answer)
        assert failed.value.code == code
        assert isinstance(failed.value, ResourceNotFound) == (code == -32002)
        assert session.turn is None


@pytest.mark.covers("Q-09")
@pytest.mark.parametrize("reason", ["refusal", "cancelled", "end_turn"])
async def test_or_a_result_and_then_an_empty_turn(reason: str) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        work = session.prompt("go")
        got = await asked(raw, "session/prompt", work, {"result": {"stopReason": reason}})
        assert (got.stop_reason, got.updates, got.text) == (reason, [], "")


@pytest.mark.covers("Q-09")
@pytest.mark.parametrize("answer", NOTHING, ids=json.dumps)
async def test_a_mode_nobody_knows_may_be_accepted(answer: dict[str, Any]) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        await asked(raw, "session/set_mode", session.set_mode("no-such-mode"), answer)


class Moded(Agent):
    capabilities = Capabilities(modes=[v1.SessionMode(id="ask", name="Ask")])

    async def prompt(self, turn: Turn) -> None:
        """Nothing."""


@pytest.mark.covers("Q-09")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_our_agent_stays_strict_about_both(wire: str) -> None:
    async with raw_client(wire, Moded()) as raw:
        session_id = await opened_in(raw)
        for unknown in ("nope", "", "../../x", session_id + " "):
            answer = await raw.ask("session/prompt", prompt(unknown))
            assert answer["error"]["code"] == -32002
        for mode in ("no-such-mode", "", "ASK"):
            params = {"sessionId": session_id, "modeId": mode}
            assert (await raw.ask("session/set_mode", params))["error"]["code"] == -32602


# ------------------------------------------------------------------ 10: codes and data


@pytest.mark.covers("Q-10")
@pytest.mark.parametrize("code", [400, 429, 500, 0, 1, -1, -31999, -32000, -32768, 2**31])
@pytest.mark.parametrize("data", ["text", ["a", 1], {"a": None}, 5, None], ids=json.dumps)
async def test_every_code_and_data_reach_the_caller(code: int, data: Any) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        error = {"code": code, "message": "model failed", "data": data}
        with pytest.raises(RequestError) as failed:
            await asked(raw, "session/prompt", session.prompt("go"), {"error": error})
        assert (failed.value.code, failed.value.data) == (code, data)
        shown = str(failed.value)
        assert "model failed" in shown
        assert str(code) in shown
        assert data is None or str(data) in shown


@pytest.mark.covers("Q-10")
@pytest.mark.parametrize(
    "text", ["Method not found", '"Method not found": x', "Unknown method: x", "", "漢"]
)
async def test_a_method_that_is_not_found_is_known_by_its_code_alone(text: str) -> None:
    async with raw_agent("memory") as (peer, raw):
        work = peer.request_extension("_vendor/x")
        with pytest.raises(MethodNotFound):
            await asked(raw, "_vendor/x", work, {"error": {"code": -32601, "message": text}})
        work = peer.request_extension("_vendor/x")
        with pytest.raises(RequestError) as other:
            await asked(
                raw, "_vendor/x", work, {"error": {"code": -32603, "message": "Method not found"}}
            )
        assert not isinstance(other.value, MethodNotFound)


class Reader(Agent):
    """Says how the client answered."""

    async def prompt(self, turn: Turn) -> None:
        try:
            await turn.read_text_file("/x")
        except FileNotFoundError:
            await turn.say("no file")
        except RequestError as error:
            await turn.say(f"{error.code} {json.dumps(error.data)}")


@pytest.mark.covers("Q-10")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"code": 400, "message": "x", "data": ["a"]}, '400 ["a"]'),
        ({"code": -32002, "message": "weird words", "data": "x"}, "no file"),
        ({"code": -32603, "message": "Resource not found"}, "-32603 null"),
    ],
)
async def test_and_reach_the_agent_s_author(error: dict[str, Any], said: str) -> None:
    async with raw_client("memory", Reader(), LENDS) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        request = await raw.wait("fs/read_text_file")
        raw.send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        await raw.answer_to(3)
        (update,) = raw.sent("session/update")
        assert update["params"]["update"]["content"]["text"] == said


# ------------------------------------------------------------------ 11: failed model calls


@pytest.mark.covers("Q-11")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    ("updates", "answer"),
    [
        (["half"], {"error": {"code": -32603, "message": "Internal error", "data": "401"}}),
        (["API error: 401"], {"result": {"stopReason": "end_turn"}}),
        ([], {"result": {"stopReason": "end_turn"}}),
        (["cut"], {"result": {"stopReason": "max_tokens"}}),
        (["cut"], {"result": {"stopReason": "end_turn"}}),
    ],
)
async def test_a_failed_model_call_ends_the_turn_in_any_of_its_ways(
    wire: str, updates: list[str], answer: dict[str, Any]
) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        got: list[str] = []

        async def run() -> str | None:
            async with session.prompt("go") as turn:
                request = await raw.wait("session/prompt")
                raw.send(
                    *(raw.update("s1", text) for text in updates),
                    {"jsonrpc": "2.0", "id": request["id"], **answer},
                )
                async for update in turn:
                    got.extend([update.text])
            return turn.stop_reason

        if "error" in answer:
            with pytest.raises(RequestError) as failed:
                await run()
            assert (failed.value.code, failed.value.data) == (-32603, "401")
        else:
            assert await run() == answer["result"]["stopReason"]
        assert got == updates
        # and the next turn is a turn like any other
        work = session.prompt("again")
        outcome = await asked(raw, "session/prompt", work, {"result": {"stopReason": "end_turn"}})
        assert outcome.stop_reason == "end_turn"


class Limited(Agent):
    async def prompt(self, turn: Turn) -> v1.PromptResponse | str:
        return (
            turn.text
            if turn.text != "raise"
            else v1_unstable.PromptResponse(stop_reason="max_tokens")
        )


@pytest.mark.covers("Q-11")
@pytest.mark.parametrize("reason", ["max_tokens", "max_turn_requests", "refusal", "raise"])
async def test_our_agent_can_say_why_it_stopped(reason: str) -> None:
    async with raw_client("memory", Limited()) as raw:
        session_id = await opened_in(raw)
        answer = await raw.ask("session/prompt", prompt(session_id, reason))
        expected = "max_tokens" if reason == "raise" else reason
        assert answer["result"] == {"stopReason": expected}
