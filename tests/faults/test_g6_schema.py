"""Field faults 31 to 34: null, absent and empty; unknown values; versions and capabilities."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, cast

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
    unshaken_agent,
    unshaken_client,
)

from antiphon import (
    Agent,
    AuthRequired,
    CapabilityError,
    Client,
    RemoteProtocolError,
    RequestError,
    Turn,
    UnknownUpdate,
    VersionMismatch,
)
from antiphon.schema import UNSET, v1
from antiphon.services import Files, Terminals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL: dict[str, Any] = {
    "loadSession": True,
    "sessionCapabilities": {"list": {}, "resume": {}, "close": {}, "delete": {}},
}


def nulls(value: Any, path: str = "") -> list[str]:
    """Where there is a null."""
    if value is None:
        return [path]
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = [*cast("dict[str, Any]", value).items()]
    elif isinstance(value, list):
        items = [(str(n), item) for n, item in enumerate(cast("Any", value))]
    else:
        return []
    return [place for name, item in items for place in nulls(item, f"{path}.{name}")]


# ------------------------------------------------------------------ 31, out


@pytest.mark.covers("FF-31")
async def test_a_client_writes_what_is_required_and_no_null_for_what_is_unset() -> None:
    async with raw_agent("memory", Client(files=Files(".")), FULL) as (peer, raw):
        session = await opened(peer, raw)
        calls: dict[str, Any] = {
            "session/prompt": lambda: session.prompt("go"),
            "session/load": lambda: peer.load_session("s2", cwd="/"),
            "session/resume": lambda: peer.resume_session("s3", cwd="/"),
            "session/list": peer.list_sessions,
            "session/set_mode": lambda: session.set_mode("m"),
            "session/set_config_option": lambda: session.set_config_option("a", "b"),
            "authenticate": lambda: peer.authenticate("x"),
            "session/close": session.close,
        }
        for method, call in calls.items():
            running = begun(call())
            raw.answer(await raw.wait(method), END if method == "session/prompt" else {})
            await running
        assert nulls(raw.frames) == []
        assert raw.sent("session/new")[0]["params"] == {"cwd": "/", "mcpServers": []}
        for method in ("session/load", "session/resume"):
            assert raw.sent(method)[0]["params"]["mcpServers"] == []


class Careful(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.session.info(title=None)
        await turn.session.info(title="")
        await turn.session.info(title="x")
        async with turn.tool("t", tool_call_id="1") as tool:
            await tool.update(title="u")
            await tool.diff("/x", None, "new")
        await turn.plan([])
        await turn.usage(used=0, size=0)


@pytest.mark.covers("FF-31")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_keeps_clearing_leaving_and_setting_apart(wire: str) -> None:
    async with raw_client(wire, Careful()) as raw:
        session_id = await opened_in(raw)
        text = [{"type": "text", "text": "go"}]
        await raw.ask("session/prompt", {"sessionId": session_id, "prompt": text})
        updates = [f["params"]["update"] for f in raw.sent("session/update")]
        info = [u for u in updates if u["sessionUpdate"] == "session_info_update"]
        assert [u["title"] for u in info] == [None, "", "x"]
        assert [u for u in updates if u["sessionUpdate"] == "plan"] == [
            {"sessionUpdate": "plan", "entries": []}
        ]
        # Clearing a title is the only null; a new file's old text is absent or null.
        places = {place.rsplit(".", 1)[-1] for place in nulls(updates)}
        assert places <= {"title", "oldText"}


# ------------------------------------------------------------------ 31, in

WHERE: dict[str, Any] = {"cwd": "/", "mcpServers": []}
OPTIONAL_NULLS: list[tuple[str, dict[str, Any]]] = [
    ("initialize", {"protocolVersion": 1, "clientCapabilities": None, "clientInfo": None}),
    ("initialize", {"protocolVersion": 1, "_meta": None}),
    (
        "initialize",
        {
            "protocolVersion": 1,
            "clientCapabilities": {"fs": None, "terminal": None, "session": None, "_meta": None},
            "clientInfo": {"name": "x", "version": "1", "title": None},
        },
    ),
    ("session/new", WHERE | {"additionalDirectories": None, "_meta": None}),
    ("session/new", {"cwd": "/", "mcpServers": None}),
]


@pytest.mark.covers("FF-31")
@pytest.mark.parametrize(("method", "params"), OPTIONAL_NULLS, ids=str)
async def test_an_optional_null_is_as_good_as_absent_to_an_agent(
    method: str, params: dict[str, Any]
) -> None:
    async with unshaken_client("memory", Careful()) as raw:
        if method != "initialize":
            await raw.ask("initialize", {"protocolVersion": 1})
        assert "result" in await raw.ask(method, params)


@pytest.mark.covers("FF-31")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_and_to_a_client_in_every_request_and_answer(wire: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text\n")
    client = Client(files=Files(), terminals=Terminals(), permissions="allow")
    more = {"agentInfo": None, "authMethods": None, "_meta": None}
    capabilities: dict[str, Any] = {
        "loadSession": None,
        "sessionCapabilities": {"list": {}, "close": None},
    }
    async with raw_agent(wire, client, capabilities, initialized=more) as (peer, raw):
        assert peer.auth_methods == ()
        assert not peer.offers("sessionCapabilities.close")
        session = await opened(peer, raw, cwd=tmp_path, modes=None, configOptions=None, _meta=None)
        assert session.modes is None
        reading = {"sessionId": "s1", "path": str(tmp_path / "a"), "line": None, "limit": None}
        assert (await raw.ask("fs/read_text_file", reading))["result"] == {"content": "text\n"}
        command = {"sessionId": "s1", "command": "true", "args": None, "env": None, "cwd": None}
        command |= {"outputByteLimit": None, "_meta": None}
        made = await raw.ask("terminal/create", command)
        told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"], "_meta": None}
        assert "result" in await raw.ask("terminal/release", told)
        tool = {"toolCallId": "t", "title": None, "kind": None, "status": None, "content": None}
        options = [{"optionId": "y", "name": "Y", "kind": "allow_once", "_meta": None}]
        asked = {"sessionId": "s1", "toolCall": tool, "options": options}
        answer = await raw.ask("session/request_permission", asked)
        assert answer["result"]["outcome"]["optionId"] == "y"
        listing = begun(peer.list_sessions())
        sessions = [{"sessionId": "x", "cwd": "/", "title": None, "updatedAt": None}]
        raw.answer(await raw.wait("session/list"), {"sessions": sessions, "nextCursor": None})
        assert [info.session_id for info in (await listing).sessions] == ["x"]
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), END | {"usage": None, "_meta": None})
        assert (await running).usage is None


@pytest.mark.covers("FF-31")
async def test_the_three_states_are_told_apart_in_an_update() -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for members in ({}, {"title": None}, {"title": "x"}, {"title": ""}):
                body = {"sessionUpdate": "session_info_update", **members}
                raw.send(raw.notification("session/update", {"sessionId": "s1", "update": body}))
            raw.answer(request, END)
            values: list[Any] = [u.value async for u in turn]
        assert [value.title for value in values] == [UNSET, None, "x", ""]


# ------------------------------------------------------------------ 32

GOOD = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "good"}}
CALL = {"sessionUpdate": "tool_call", "toolCallId": "t", "title": "Tool"}
ODD_UPDATES: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    ({"sessionUpdate": "brand_new", "x": 1}, lambda v: isinstance(v, UnknownUpdate)),
    ({"sessionUpdate": 5}, lambda v: isinstance(v, UnknownUpdate)),
    ({}, lambda v: isinstance(v, UnknownUpdate)),
    (CALL | {"kind": "deploy"}, lambda v: (v.kind, v.title) == ("deploy", "Tool")),
    (CALL | {"status": "cancelled"}, lambda v: v.status == "cancelled"),
    (CALL | {"kind": 5, "status": {}}, lambda v: v.title == "Tool"),
    (CALL | {"locations": [{"path": "/a"}, 5, {"path": 6}]}, lambda v: len(v.locations) == 1),
    (
        CALL
        | {
            "content": [
                {"type": "content", "content": {"type": "text", "text": "a"}},
                {"type": "hologram"},
                {"type": "diff", "path": "/x", "newText": "y"},
            ]
        },
        lambda v: [type(c).__name__ for c in v.content] == ["Content", "Diff"],
    ),
    (
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "hologram", "url": "x"}},
        lambda v: v is not None,
    ),
    (
        {
            "sessionUpdate": "plan",
            "entries": [
                {"content": "a", "priority": "urgent", "status": "pending"},
                {"content": "b", "priority": "low", "status": "paused"},
            ],
        },
        lambda v: (
            [(e.content, e.priority, e.status) for e in v.entries]
            == [("a", "urgent", "pending"), ("b", "low", "paused")]
        ),
    ),
    ({"sessionUpdate": "session_info_update", "title": 5}, lambda v: v.title is UNSET),
    (GOOD | {"extra": {"a": [1]}, "_meta": {"x": 1}}, lambda v: v.content.text == "good"),
    (GOOD | {"_meta": "bad"}, lambda v: v.content.text == "good"),
    ({"sessionUpdate": "usage_update", "used": "many", "size": 5}, lambda v: v is not None),
]


@pytest.mark.covers("FF-32")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("case", range(len(ODD_UPDATES)))
async def test_one_unknown_value_costs_no_message_and_none_beside_it(
    wire: str, case: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "antiphon")
    body, expected = ODD_UPDATES[case]
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for update in (GOOD, body, GOOD):
                raw.send(raw.notification("session/update", {"sessionId": "s1", "update": update}))
            raw.answer(request, END)
            got = [u async for u in turn]
        assert [u.text for u in got][::2] == ["good", "good"]
        odd = got[1]
        assert expected(odd.value), odd.value
        assert json.loads(odd.raw) == body  # whatever was not understood is kept as it came


@pytest.mark.covers("FF-32")
async def test_what_was_left_out_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "antiphon")
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            body = CALL | {"title": "t", "locations": [5], "kind": []}
            raw.send(raw.notification("session/update", {"sessionId": "s1", "update": body}))
            raw.answer(request, END)
            for value in [u.value async for u in turn]:
                assert value
    assert "locations" in caplog.text
    assert "kind" in caplog.text


@pytest.mark.covers("FF-32")
@pytest.mark.parametrize("reason", ["error", "went_for_lunch", "", "END_TURN"])
async def test_an_unknown_stop_reason_is_told_as_it_is(reason: str) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), {"stopReason": reason, "extra": 1})
        assert (await running).stop_reason == reason


@pytest.mark.covers("FF-32")
async def test_an_unknown_error_code_is_told_as_it_is() -> None:
    async with raw_agent("memory") as (peer, raw):
        running = begun(peer.request_extension("_x/y"))
        raw.refuse(await raw.wait("_x/y"), -31999, "odd", data=[1])
        with pytest.raises(RequestError) as failed:
            await running
        assert (failed.value.code, failed.value.message, failed.value.data) == (-31999, "odd", [1])


@pytest.mark.covers("FF-32")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_agent_takes_unknown_members_and_refuses_what_it_cannot_know(wire: str) -> None:
    class Seen(Agent):
        async def prompt(self, turn: Turn) -> None:
            await turn.say(turn.raw.decode())

    async with raw_client(wire, Seen()) as raw:
        session_id = await opened_in(raw)
        params = {
            "sessionId": session_id,
            "prompt": [{"type": "text", "text": "x", "annotations": {"audience": ["robot"]}}],
            "brand_new": {"a": None},
            "_meta": {"b": 1.0},
        }
        assert (await raw.ask("session/prompt", params))["result"] == END
        (update,) = raw.sent("session/update")
        assert json.loads(update["params"]["update"]["content"]["text"]) == params
        params["prompt"] = [{"type": "hologram"}]
        answer = await raw.ask("session/prompt", params)
        assert answer["error"]["code"] == -32602


@pytest.mark.covers("FF-32")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_what_we_say_ourselves_is_strict(wire: str) -> None:
    refused: list[str] = []

    class Loose(Agent):
        async def prompt(self, turn: Turn) -> str | None:
            wrong: dict[str, Any] = {
                "say": lambda: turn.say(5),  # type: ignore[arg-type]
                "plan": lambda: turn.plan("none"),
                "entry": lambda: turn.plan([5]),  # type: ignore[list-item]
                "tool": lambda: turn.tool("t", locations=[5]).__aenter__(),  # type: ignore[list-item]
                "content": lambda: turn.tool("t", content=[5]).__aenter__(),
                "ask": lambda: turn.ask_permission("?", options=["yes"]),  # type: ignore[list-item]
                "send": lambda: turn.send({"sessionUpdate": "plan"}),  # type: ignore[arg-type]
            }
            for name, call in wrong.items():
                try:
                    await call()
                except (TypeError, ValueError):
                    refused.append(name)
            assert refused == list(wrong)
            return "went_for_lunch"  # and so is this

    async with raw_client(wire, Loose()) as raw:
        session_id = await opened_in(raw)
        text = [{"type": "text", "text": "go"}]
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": text})
        assert answer["error"]["code"] == -32603
        assert len(refused) == 7
        assert not raw.sent("session/update")
        assert not raw.sent("session/request_permission")


# ------------------------------------------------------------------ 34


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("version", [2, 0, 65535, -1, "1", None, 1.5, True, ...])
async def test_an_answer_of_another_version_closes_the_link_and_says_so(
    wire: str, version: Any
) -> None:
    async with unshaken_agent(wire) as (raw, opening):
        request = await raw.wait("initialize")
        assert request["params"]["protocolVersion"] == 1
        raw.answer(request, {} if version is ... else {"protocolVersion": version})
        with pytest.raises(Exception, match=r"version|Version") as failed:
            await opening
        if type(version) is int and version >= 0:
            assert isinstance(failed.value, VersionMismatch)
            assert str(version) in str(failed.value)
        await raw.closed()
        assert len(raw.frames) == 1  # nothing was sent to a peer that we cannot speak to


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("version", [1, 2, 99, 65535, 0])
async def test_an_agent_answers_its_own_version_whatever_is_asked_for(
    wire: str, version: int
) -> None:
    async with unshaken_client(wire, Careful()) as raw:
        answer = await raw.ask("initialize", {"protocolVersion": version})
        assert answer["result"]["protocolVersion"] == 1


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_calls_before_the_handshake_and_a_second_one_are_refused(wire: str) -> None:
    async with unshaken_client(wire, Careful()) as raw:
        for method in ("session/new", "session/prompt", "session/load", "_x/y", "authenticate"):
            assert (await raw.ask(method, WHERE))["error"]["code"] == -32600
        await raw.ask("initialize", {"protocolVersion": 1})
        session_id = await opened_in(raw)
        again = await raw.ask("initialize", {"protocolVersion": 1})
        assert again["error"]["code"] == -32600
        text = [{"type": "text", "text": "go"}]
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": text})
        assert answer["result"] == END


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize(
    "capabilities",
    [{}, {"loadSession": False}, {"sessionCapabilities": None}, {"promptCapabilities": {}}],
    ids=json.dumps,
)
async def test_a_client_refuses_here_what_was_not_offered_there(capabilities: Any) -> None:
    async with raw_agent("memory", None, capabilities) as (peer, raw):
        session = await opened(peer, raw)
        image = v1.ImageContent(data="AAAA", mime_type="image/png")
        audio = v1.AudioContent(data="AAAA", mime_type="audio/wav")
        resource = v1.EmbeddedResource(resource=v1.TextResourceContents(uri="file:///x", text="y"))
        server = v1.McpServerHttp(name="x", url="http://x.example", headers=[])
        calls: list[Any] = [
            lambda: peer.load_session("s1", cwd="/"),
            lambda: peer.resume_session("s1", cwd="/"),
            peer.list_sessions,
            session.close,
            lambda: peer.delete_session("s1"),
            peer.logout,
            lambda: session.prompt(image),
            lambda: session.prompt(["text", audio]),
            lambda: session.prompt(resource),
            lambda: peer.new_session(cwd="/", mcp_servers=[server]),
            lambda: peer.new_session(cwd="/", additional_directories=["/x"]),
        ]
        before = len(raw.frames)
        for call in calls:
            with pytest.raises(CapabilityError):
                await call()
        await raw.round_trip()
        assert len(raw.frames) == before + 1


@pytest.mark.covers("FF-34")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_login_is_asked_for_by_the_caller_and_nothing_is_repeated_by_itself(
    wire: str,
) -> None:
    async with raw_agent(wire) as (peer, raw):
        for n in range(2):
            opening = begun(peer.new_session(cwd="/"))
            raw.refuse(await raw.wait("session/new", n + 1), -32000, "Authentication required")
            with pytest.raises(AuthRequired):
                await opening
            signing = begun(peer.authenticate("key"))
            raw.answer(await raw.wait("authenticate", n + 1), {})
            await signing
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        raw.refuse(await raw.wait("session/prompt"), -32000, "Authentication required")
        with pytest.raises(AuthRequired):
            await running
        await raw.round_trip()
        assert len(raw.sent("session/prompt")) == 1
        assert len(raw.sent("authenticate")) == 2


@pytest.mark.covers("FF-32", "FF-34")
@pytest.mark.parametrize(
    ("answer", "methods"),
    [
        ({"agentCapabilities": []}, []),
        ({"agentCapabilities": "all", "agentInfo": "x", "authMethods": "y"}, []),
        ({"authMethods": [5, {"id": "a"}, {"id": "b", "name": "B"}]}, ["b"]),
        ({"agentCapabilities": {"loadSession": "yes", "sessionCapabilities": 5}}, []),
    ],
)
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_answer_to_the_handshake_with_odd_members_is_an_answer(
    wire: str, answer: dict[str, Any], methods: list[str]
) -> None:
    async with raw_agent(wire, initialized=answer) as (peer, raw):
        assert [method.id for method in peer.auth_methods] == methods
        assert not peer.offers("loadSession")
        assert peer.info is None
        await opened(peer, raw)


@pytest.mark.covers("FF-32")
@pytest.mark.parametrize("usage", ["x", {"totalTokens": "x"}, [], 5], ids=json.dumps)
async def test_odd_usage_does_not_cost_the_answer_to_a_prompt(usage: Any) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), END | {"usage": usage})
        outcome = await running
        assert (outcome.stop_reason, outcome.usage) == ("end_turn", None)


@pytest.mark.covers("FF-31", "FF-32")
@pytest.mark.parametrize(
    "answer", [{"stopReason": 5}, {"stopReason": None}, [], "end_turn", True], ids=json.dumps
)
async def test_what_is_no_answer_to_a_prompt_fails_that_turn_alone(answer: Any) -> None:
    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), answer)
        with pytest.raises(RemoteProtocolError):
            await running
        running = begun(session.prompt("again"))
        raw.answer(await raw.wait("session/prompt", 2), END)
        assert (await running).stop_reason == "end_turn"
