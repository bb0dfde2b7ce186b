"""Our client with their agents: every scene that the scripted agents play.

The last peer is our own agent: what these tests expect is not what a peer happens to do.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    AuthRequired,
    CapabilityError,
    Client,
    ConnectionClosed,
    InternalError,
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    RequestError,
    ResourceNotFound,
    TurnInProgress,
    UnknownUpdate,
)
from antiphon.schema import encode, v1
from tests.interop.desk import NOTES, Desk, connected, opened, started, texts, told, wires
from tests.interop.programs import OURS, PYTHON_SDKS, THEIRS, TYPESCRIPT_SDK, script

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon import Update

pytestmark = pytest.mark.interop

AGENTS = (*THEIRS, OURS)
# 0.12.1 has no route for session/delete and logout.
WITHOUT_DELETE_AND_LOGOUT = "py-0.12.1"


@pytest.fixture(params=AGENTS)
def peer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wire(value: object) -> Any:
    return json.loads(encode(value))


# ---------------------------------------------------------------- handshake


@pytest.mark.covers("R1-20", "R1-21", "R1-22")
async def test_the_handshake_tells_each_side_about_the_other(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        state = await told(session, "state")

        assert agent.initialize_result.protocol_version == 1
        assert wire(agent.info) == script("agent")
        assert wire(agent.auth_methods) == script("auth_methods")
        assert agent.capabilities.load_session is True
        assert wire(agent.capabilities.prompt_capabilities) == {
            "image": True,
            "embeddedContext": True,
        }
        for name in ("list", "resume", "close", "additionalDirectories"):
            assert agent.offers(f"sessionCapabilities.{name}")
        for path in ("sessionCapabilities.delete", "auth.logout"):
            assert agent.offers(path) is (peer != WITHOUT_DELETE_AND_LOGOUT)

        assert state["client"]["info"] == {"name": "interop-desk", "version": "9.8"}
        offered = state["client"]["capabilities"]
        assert offered["fs"] == {"readTextFile": True, "writeTextFile": True}
        assert offered["terminal"] is True
        assert offered["elicitation"] == {"form": {}}
        assert offered["session"] == {"configOptions": {"boolean": {}}}


async def test_an_agent_ends_with_the_connection(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        await opened(agent, tmp_path)
        process = agent.process

    assert process.exit_status == 0


# ---------------------------------------------------------------- sessions


async def test_a_new_session_has_the_modes_the_options_and_the_commands(
    peer: str, tmp_path: Path
) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await agent.new_session(cwd=tmp_path)
        announced = await anext(session.updates())
        other = await opened(agent, tmp_path)

        assert wire(session.modes) == script("modes")
        assert wire(session.config_options) == script("config_options")
        assert announced.label == "session"
        assert json.loads(announced.raw) == {
            "sessionUpdate": "available_commands_update",
            "availableCommands": script("commands"),
        }
        assert other.session_id != session.session_id


@pytest.mark.covers("R1-157")
async def test_what_a_session_is_given_arrives(peer: str, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    server = v1.McpServerStdio(
        name="files", command="/bin/true", args=["-v"], env=[v1.EnvVariable(name="A", value="ü")]
    )
    meta = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x": [1]}

    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path, additional_directories=[more], mcp_servers=[server])
        result = await session.prompt("state", meta=meta)
        state = json.loads(result.text)

    assert (state["cwd"], state["more"]) == (str(tmp_path), [str(more)])
    assert state["servers"] == ["files"]
    assert state["meta"] == meta


async def test_modes_and_options_change(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        await session.set_mode("code")
        await session.set_config_option("model", "deep")
        options = await session.set_config_option("verbose", value=True)
        state = await told(session, "state")
        with pytest.raises(InvalidParams):
            await session.set_mode("no such mode")
        with pytest.raises(InvalidParams):
            await session.set_config_option("model", "no such model")
        with pytest.raises(InvalidParams):
            await session.set_config_option("no such option", "deep")
        after = await told(session, "state")

        expected = script("config_options")
        expected[0]["currentValue"], expected[1]["currentValue"] = "deep", True
        assert wire(options) == wire(session.config_options) == expected
        assert (state["mode"], state["options"]) == ("code", {"model": "deep", "verbose": True})
        assert (after["mode"], after["options"]) == (state["mode"], state["options"])


@pytest.mark.covers("R1-65")
async def test_sessions_are_listed_page_by_page(peer: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with connected(peer, tmp_path) as agent:
        sessions = [await opened(agent, tmp_path) for _ in range(4)]
        sessions.append(await opened(agent, elsewhere))
        await sessions[1].prompt("stream")

        page = await agent.list_sessions()
        listed = [info async for info in agent.iter_sessions()]
        there = [info async for info in agent.iter_sessions(cwd=elsewhere)]
        nowhere = await agent.list_sessions(cwd=tmp_path / "nowhere")
        with pytest.raises(InvalidParams):
            await agent.list_sessions(cursor="garbage")

        assert [info.session_id for info in page.sessions] == ["session-1", "session-2"]
        assert page.next_cursor == "2"
        assert [info.session_id for info in listed] == [s.session_id for s in sessions]
        assert [info.cwd for info in listed] == [str(tmp_path)] * 4 + [str(elsewhere)]
        assert listed[1].title == "A scripted turn"
        assert [info.session_id for info in there] == [sessions[4].session_id]
        assert nowhere.sessions == []


async def test_a_loaded_session_is_replayed_whole_by_another_process(
    peer: str, tmp_path: Path
) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        await session.prompt("stream")
        await session.prompt("echo")

    def said(kind: str, text: str) -> dict[str, Any]:
        return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}

    expected = [
        said("user_message_chunk", "stream"),
        *script("stream", tmp_path),
        said("user_message_chunk", "echo"),
        said("agent_message_chunk", "echo"),
    ]
    async with connected(peer, tmp_path) as agent:
        async with agent.load_session(session.session_id, cwd=tmp_path) as loaded:
            replayed = [update async for update in loaded.replay()]
        again = await loaded.prompt("echo")

        assert wires(replayed) == expected
        assert {update.label for update in replayed} == {"replay"}
        assert wire(loaded.modes) == script("modes")
        assert again.text == "echo"
        with pytest.raises(ResourceNotFound) as unknown:
            await agent.load_session("no such session", cwd=tmp_path)
        assert unknown.value.data == {"sessionId": "no such session"}
        with pytest.raises(InvalidParams):
            await agent.load_session(session.session_id, cwd=tmp_path / "elsewhere")


async def test_a_resumed_session_goes_on_without_replay(peer: str, tmp_path: Path) -> None:
    seen: list[Update] = []
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        await session.prompt("stream")

    desk = Desk()
    desk.on_update = seen.append
    async with connected(peer, tmp_path, desk) as agent:
        resumed = await agent.resume_session(session.session_id, cwd=tmp_path)
        assert seen == []
        result = await resumed.prompt("echo")

        assert wire(resumed.config_options) == script("config_options")
        assert result.text == "echo"
        assert wires(seen) == wires(result.updates)
        with pytest.raises(ResourceNotFound):
            await agent.resume_session("no such session", cwd=tmp_path)


async def test_a_closed_session_is_gone(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        await session.close()
        raw = v1.PromptRequest(session_id=session.session_id, prompt=[v1.TextContent(text="echo")])
        with pytest.raises(ResourceNotFound) as gone:
            await agent.request(raw)
        other = await opened(agent, tmp_path)

        assert gone.value.data == {"sessionId": session.session_id}
        assert (await other.prompt("echo")).text == "echo"


async def test_closing_a_session_cancels_its_turn(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        async with session.prompt("slow") as turn:
            assert (await anext(turn)).text == "started"
            # Closing lets go of the session; what still comes of the turn belongs to the turn.
            await session.close()
            rest = [update async for update in turn]

    assert turn.stop_reason == "cancelled"
    assert texts(rest) == ["stopping"]


async def test_a_deleted_session_is_not_listed(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        first, second = await opened(agent, tmp_path), await opened(agent, tmp_path)
        if peer == WITHOUT_DELETE_AND_LOGOUT:
            with pytest.raises(CapabilityError):
                await agent.delete_session(first.session_id)
            return
        await agent.delete_session(first.session_id)
        await agent.delete_session(first.session_id)
        listed = [info.session_id async for info in agent.iter_sessions()]

        assert listed == [second.session_id]


@pytest.mark.covers("R1-148")
async def test_a_client_signs_out_and_in(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path, authenticate="login") as agent:
        with pytest.raises(InvalidParams):
            await agent.authenticate("no such method")
        if peer == WITHOUT_DELETE_AND_LOGOUT:
            with pytest.raises(CapabilityError):
                await agent.logout()
            return
        await agent.logout()
        with pytest.raises(AuthRequired) as refused:
            await agent.new_session(cwd=tmp_path)
        await agent.authenticate("login")
        session = await opened(agent, tmp_path)

        assert refused.value.data == {"authMethods": ["login"]}
        assert (await session.prompt("echo")).text == "echo"


# ---------------------------------------------------------------- turns


@pytest.mark.covers("R1-102", "R1-156")
async def test_a_turn_is_seen_whole_in_order_and_by_all(peer: str, tmp_path: Path) -> None:
    seen: list[Update] = []
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        subscription = session.updates()
        session.on_update(seen.append)
        result = await session.prompt("stream")
        count = len(seen)
        subscribed = [await anext(subscription) for _ in result.updates]

        expected = script("stream", tmp_path)
        assert wires(result.updates) == expected
        assert [update.kind for update in result.updates] == [e["sessionUpdate"] for e in expected]
        assert {update.label for update in result.updates} == {"turn"}
        assert [wire(update.value) for update in result.updates] == expected
        assert count == len(expected)
        assert wires(seen) == wires(subscribed) == expected
        assert result.text == "Hello " + expected[2]["content"]["text"]
        assert result.stop_reason == "end_turn"
        assert wire(result.usage) == {
            "totalTokens": 30,
            "inputTokens": 10,
            "outputTokens": 20,
            "thoughtTokens": 5,
        }


async def test_every_kind_of_content_survives_both_ways(peer: str, tmp_path: Path) -> None:
    blocks = script("blocks")
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        result = await session.prompt([_block(block) for block in blocks])

    assert [update["content"] for update in wires(result.updates)] == blocks
    assert result.text == "echo" + blocks[1]["text"]


def _block(block: dict[str, Any]) -> v1.ContentBlock:
    from antiphon.schema import decode

    made: v1.ContentBlock = decode(v1.ContentBlock, json.dumps(block).encode())
    return made


async def test_many_updates_at_once_keep_their_order(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        result = await session.prompt("burst 1000")

    assert texts(result.updates) == [f"{n} " for n in range(1000)]


async def test_a_frame_of_more_than_half_a_megabyte_passes_both_ways(
    peer: str, tmp_path: Path
) -> None:
    long = "echo " + "ö" * 300_000
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        big = await session.prompt("big 300000")
        echo = await session.prompt(long)

    assert texts(big.updates) == ["ä" * 300_000]
    assert texts(echo.updates) == [long]


async def test_sessions_run_side_by_side(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        sessions = [await opened(agent, tmp_path) for _ in range(3)]
        slow = asyncio.create_task(_outcome(sessions[0].prompt("slow")))
        await started(sessions[0])
        first, second = await asyncio.gather(
            _outcome(sessions[1].prompt("burst 200")), _outcome(sessions[2].prompt("burst 200"))
        )
        await sessions[0].cancel()
        cancelled = await slow

    assert texts(first.updates) == texts(second.updates) == [f"{n} " for n in range(200)]
    assert {update.session_id for update in first.updates} == {sessions[1].session_id}
    assert texts(cancelled.updates) == ["started", "stopping"]


async def _outcome(prompt: Any) -> Any:
    return await prompt


async def test_the_reason_for_a_turns_end_is_told(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        for reason in ("max_tokens", "max_turn_requests", "refusal"):
            result = await session.prompt(f"stop {reason}")

            assert (result.stop_reason, result.updates) == (reason, [])


@pytest.mark.covers("R1-86", "R1-158")
async def test_updates_of_the_future_are_delivered_as_they_came(tmp_path: Path) -> None:
    # The Python SDK cannot send them: its models know neither.
    async with connected(TYPESCRIPT_SDK, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        result = await session.prompt("future")

    assert wires(result.updates) == [
        {"sessionUpdate": "hologram", "beam": [1, 2]},
        {"sessionUpdate": "tool_call", "title": "no id"},
        {
            "sessionUpdate": "agent_message_chunk",
            "content": {"type": "text", "text": "after"},
            "zzz": {"unknown": "member"},
        },
    ]
    unknown = [isinstance(update.value, UnknownUpdate) for update in result.updates]
    assert unknown == [True, True, False]
    assert result.text == "after"


# ---------------------------------------------------------------- cancelling


@pytest.mark.covers("R1-90", "R1-91")
async def test_a_cancelled_turn_ends_with_what_still_came(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        async with session.prompt("slow") as turn:
            first = await anext(turn)
            await turn.cancel()
            rest = [update async for update in turn]
        after = await session.prompt("echo")

    assert (first.text, texts(rest)) == ("started", ["stopping"])
    assert turn.stop_reason == "cancelled"
    assert (after.text, after.stop_reason) == ("echo", "end_turn")


async def test_leaving_a_turn_cancels_it(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        async with session.prompt("slow") as turn:
            async for _ in turn:
                break
        after = await session.prompt("echo")

    assert texts(after.updates) == ["echo"]


@pytest.mark.covers("R1-92")
async def test_cancelling_answers_an_open_permission_request(peer: str, tmp_path: Path) -> None:
    desk = Desk()
    desk.thinking = asyncio.Event()
    async with connected(peer, tmp_path, desk) as agent:
        session = await opened(agent, tmp_path)
        prompt = asyncio.create_task(_outcome(session.prompt("permission")))
        await desk.being_asked.wait()
        await session.cancel()
        result = await prompt
        desk.thinking = None
        after = await session.prompt("permission")

    assert result.stop_reason == "cancelled"
    assert json.loads(result.text) == {"outcome": "cancelled"}
    assert wires(result.updates)[1]["status"] == "failed"
    assert json.loads(after.text) == {"outcome": "selected", "optionId": "yes"}


@pytest.mark.covers("R1-98")
async def test_a_withdrawn_request_harms_nobody(peer: str, tmp_path: Path) -> None:
    # `$/cancel_request` is unknown to 0.12.1, which logs it; 1.0.0rc3 cancels the handler, the
    # TypeScript SDK aborts a signal that the scene does not look at.
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        raw = v1.PromptRequest(session_id=session.session_id, prompt=[v1.TextContent(text="slow")])
        waiting = asyncio.create_task(agent.request(raw))
        await started(session)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other = await opened(agent, tmp_path)

        assert (await other.prompt("echo")).text == "echo"


# ---------------------------------------------------------------- what a client lends


@pytest.mark.covers("R1-103", "R1-104", "R1-105")
async def test_a_permission_is_what_was_chosen(peer: str, tmp_path: Path) -> None:
    call, options = script("permission")["toolCall"], script("permission")["options"]
    # What is decided, which option that is on the wire, and what becomes of the tool call.
    decisions: list[tuple[str | bool | None, str | None, str]] = [
        (True, "yes", "completed"),
        ("always", "always", "completed"),
        (False, "no", "failed"),
        ("not offered", "no", "failed"),
        (None, None, "failed"),
    ]
    desk = Desk()
    async with connected(peer, tmp_path, desk) as agent:
        session = await opened(agent, tmp_path)
        for desk.decision, option, status in decisions:
            result = await session.prompt("permission")

            assert [wire(asked) for asked in desk.asked] == [
                {"sessionId": session.session_id, "toolCall": call, "options": options}
            ]
            desk.asked.clear()
            assert wires(result.updates)[:2] == [
                {"sessionUpdate": "tool_call", **call},
                {"sessionUpdate": "tool_call_update", "toolCallId": "ask1", "status": status},
            ]
            selected = {"outcome": "selected", "optionId": option}
            assert json.loads(result.text) == (selected if option else {"outcome": "cancelled"})
            # The scripts take a cancelled question for a cancelled turn; our agent was not told to
            # stop.
            stop = "end_turn" if option or peer == OURS else "cancelled"
            assert result.stop_reason == stop


@pytest.mark.covers("R1-106", "R1-107", "R1-108", "R1-109")
async def test_files_are_read_and_written(peer: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_bytes(NOTES.encode())
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, work)
        done = await told(session, "files ü\u2028\r\n")

    assert done == {
        "whole": NOTES,
        "part": "beta\n",
        "again": "ü\u2028\r\n" + NOTES,
        "missing": -32002,
        "relative": -32602,
        "outside": -32602,
        "write outside": -32602,
    }
    assert (work / "new" / "copy.txt").read_bytes() == ("ü\u2028\r\n" + NOTES).encode()
    assert not (tmp_path / "escaped.txt").exists()


@pytest.mark.covers("R1-9", "R1-33", "R1-34")
async def test_what_is_not_lent_is_refused(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path, Client()) as agent:
        session = await opened(agent, tmp_path)
        done = await told(session, "tools")

    # Our agent does not even ask.
    code = "CapabilityError" if peer == OURS else -32601
    assert done == {"read": code, "write": code, "terminal": code}
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.covers("R1-112", "R1-113", "R1-114", "R1-118")
async def test_a_command_runs_in_a_terminal(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        result = await session.prompt("terminal")
        done = json.loads(result.text)

    shown = {
        "sessionUpdate": "tool_call",
        "toolCallId": "term1",
        "title": "sh",
        "kind": "execute",
        "status": "in_progress",
        "content": [{"type": "terminal", "terminalId": done["id"]}],
    }
    assert wires(result.updates)[0] == shown
    assert some(done["exit"]) == {"exitCode": 3}
    assert done["output"]["output"] == f"a b ü {tmp_path}\nerr\n"
    assert done["output"]["truncated"] is False
    assert some(done["output"]["exitStatus"]) == {"exitCode": 3}
    assert done["released"] == -32002
    assert (done["limited"]["output"], done["limited"]["truncated"]) == ("öü", True)
    assert done["missing command"] == -32602


@pytest.mark.covers("R1-111", "R1-117")
async def test_a_running_command_is_killed_and_released(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        done = await told(session, "kill")

    assert done["before"]["output"] == "ready\n"
    assert done["before"].get("exitStatus") is None
    assert [some(ended) for ended in done["ended"]] == [{"signal": "SIGTERM"}] * 2
    assert done["after"]["output"] == "ready\n"
    assert some(done["after"]["exitStatus"]) == {"signal": "SIGTERM"}
    assert some(done["released"]) == {"signal": "SIGTERM"}
    assert done["gone"] == -32002


def some(status: dict[str, Any]) -> dict[str, Any]:
    """What is known of an exit: the Python SDK leaves out what is null."""
    return {name: value for name, value in status.items() if value is not None}


@pytest.mark.covers("R1-130", "R1-131")
async def test_a_form_is_filled_in_or_declined(peer: str, tmp_path: Path) -> None:
    desk = Desk()
    async with connected(peer, tmp_path, desk) as agent:
        session = await opened(agent, tmp_path)
        accepted = await told(session, "elicit")
        desk.form = {"name": "", "count": 10}  # does not fit, and never leaves
        cancelled = await told(session, "elicit")
        desk.form = None
        declined = await told(session, "elicit")

    form = script("elicitation")
    if peer in PYTHON_SDKS:  # leaves out what is the default
        del form["requestedSchema"]["type"]
    expected = {"mode": "form", "sessionId": session.session_id, **form}
    assert [wire(params) for params in desk.elicited] == [expected] * 3
    assert len(set(desk.askers)) == 1
    assert desk.askers[0]
    assert cancelled == {"action": "cancel"}
    assert accepted == {"action": "accept", "content": script("answer")}
    assert declined == {"action": "decline"}


# ---------------------------------------------------------------- extensions


@pytest.mark.covers("R1-155")
async def test_extension_methods_work_both_ways(peer: str, tmp_path: Path) -> None:
    desk = Desk()
    params = {"a": [1, None, {"ü": True}]}
    async with connected(peer, tmp_path, desk) as agent:
        session = await opened(agent, tmp_path)
        echo = await agent.request_extension("_interop/echo", params)
        null = await agent.request_extension("_interop/null")
        with pytest.raises(MethodNotFound):
            await agent.request_extension("_interop/unknown", {})
        await agent.notify_extension("_interop/tick", {"n": 2})
        done = await told(session, "extension")
        state = await told(session, "state")

    # The Python SDK takes the underscore away before it calls the handler (quirk 19).
    seen = "" if peer in PYTHON_SDKS else "_"
    assert echo == {"method": f"{seen}interop/echo", "params": params}
    assert null == ({} if peer == OURS else None)
    assert done == {
        "answer": {"method": "_interop/echo", "params": params},
        "unknown": -32601,
    }
    assert desk.ticks == [{"n": 1}]
    assert state["told"] == [[f"{seen}interop/tick", {"n": 2}]]


async def test_an_update_between_turns_is_the_sessions(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        await session.prompt("echo")
        updates = session.updates()
        await agent.notify_extension(
            "_interop/poke", {"sessionId": session.session_id, "title": "Poked"}
        )
        update = await anext(updates)

    assert (update.label, json.loads(update.raw)) == (
        "session",
        {"sessionUpdate": "session_info_update", "title": "Poked"},
    )


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.covers("R1-14")
async def test_an_agents_own_error_arrives_as_it_is(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        with pytest.raises(RequestError) as failed:
            await session.prompt("fail")
        with pytest.raises(InvalidParams):
            await session.prompt("no-such-scene")
        after = await session.prompt("echo")

    error = failed.value
    assert (error.code, error.message, error.data) == (4242, "Out of quota", {"left": 0})
    assert after.text == "echo"


async def test_a_crash_in_an_agent_fails_the_turn_only(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        with pytest.raises(InternalError) as crashed:
            await session.prompt("crash")
        after = await session.prompt("echo")

    # Both SDKs send the text of the exception to the client; ours keeps it.
    assert crashed.value.data == (None if peer == OURS else {"details": "a secret"})
    assert after.text == "echo"


async def test_a_second_prompt_is_refused(peer: str, tmp_path: Path) -> None:
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        async with session.prompt("slow") as turn:
            await anext(turn)
            with pytest.raises(TurnInProgress):
                await session.prompt("echo")
            raw = v1.PromptRequest(
                session_id=session.session_id, prompt=[v1.TextContent(text="echo")]
            )
            with pytest.raises(InvalidRequest):
                await agent.request(raw)
            await turn.cancel()
            rest = [update async for update in turn]

    assert (texts(rest), turn.stop_reason) == (["stopping"], "cancelled")


async def test_an_agent_that_dies_fails_what_is_open(peer: str, tmp_path: Path) -> None:
    seen: list[Update] = []
    async with connected(peer, tmp_path) as agent:
        session = await opened(agent, tmp_path)
        session.on_update(seen.append)
        with pytest.raises(ConnectionClosed) as died:
            await session.prompt("exit")
        with pytest.raises(ConnectionClosed):
            await agent.new_session(cwd=tmp_path)

    assert texts(seen) == ["going"]
    assert died.value.exit_status == 7
    assert died.value.stderr_tail.endswith("last words\n")
