"""Quirks 21 to 28: what agents ask a client for, members and methods of no schema, bad handshakes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

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
    unshaken_client,
)

from antiphon import (
    Agent,
    AuthRequired,
    Capabilities,
    CapabilityError,
    Client,
    SessionView,
    Turn,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.services import Files, Terminals

if TYPE_CHECKING:
    from pathlib import Path

FULL: dict[str, Any] = {
    "loadSession": True,
    "sessionCapabilities": {"list": {}, "resume": {}, "close": {}, "fork": {}},
}


def prompt(session_id: Any, text: str = "go") -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


# ------------------------------------------------------------------ 21: commands


async def ran(raw: RawPeer, **params: Any) -> tuple[Any, str]:
    """Exit code and output of a command that a raw agent runs."""
    made = await raw.ask("terminal/create", {"sessionId": "s1", **params})
    told = {"sessionId": "s1", "terminalId": made["result"]["terminalId"]}
    code = (await raw.ask("terminal/wait_for_exit", told))["result"]["exitCode"]
    output = (await raw.ask("terminal/output", told))["result"]["output"]
    assert "result" in await raw.ask("terminal/release", told)
    return code, output


LINE = "echo out; echo err 1>&2; exit 3"


@pytest.mark.covers("Q-21")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    "command",
    [
        {"command": LINE},
        {"command": LINE, "args": []},
        {"command": LINE, "args": None, "env": None, "cwd": None},
        {"command": "/bin/sh", "args": ["-lc", LINE]},
        {"command": "/bin/sh", "args": ["-lc", LINE], "env": []},
    ],
    ids=json.dumps,
)
async def test_a_command_is_run_as_it_is_meant_in_the_session_s_folder(
    wire: str, command: dict[str, Any], tmp_path: Path
) -> None:
    async with raw_agent(wire, Client(terminals=Terminals())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        assert await ran(raw, **command) == (3, "out\nerr\n")
        assert await ran(raw, command="pwd && true") == (0, f"{tmp_path}\n")


# ------------------------------------------------------------------ 22: terminals of the agent's own


@pytest.mark.covers("Q-22")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_terminal_that_only_the_agent_knows_is_shown_and_no_error(
    wire: str, tmp_path: Path
) -> None:
    content = [{"type": "terminal", "terminalId": "call-1"}]
    frames = [
        {"sessionUpdate": "tool_call", "toolCallId": "call-1", "title": "ls", "content": content}
        | {"_meta": {"terminal_info": {"terminal_id": "call-1", "cwd": "/"}}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "call-1"}
        | {"_meta": {"terminal_output": {"terminal_id": "call-1", "data": "notes.txt\n"}}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "call-1", "status": "completed"}
        | {"_meta": {"terminal_exit": {"terminal_id": "call-1", "exit_code": 0, "signal": None}}},
    ]
    async with raw_agent(wire, Client(terminals=Terminals())) as (peer, raw):
        session = await opened(peer, raw, cwd=tmp_path)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for frame in frames:
                raw.send(raw.notification("session/update", {"sessionId": "s1", "update": frame}))
            raw.answer(request, END)
            got = [u async for u in turn]
        assert [json.loads(u.raw) for u in got] == frames
        view = SessionView()
        for update in got:
            view.apply(update)
        assert view.tool_calls["call-1"].terminals == ["call-1"]
        assert view.tool_calls["call-1"].status == "completed"
        call: Any = got[0].value
        assert isinstance(call, v1.ToolCall)
        assert call.content == [v1.Terminal(terminal_id="call-1")]
        assert call.meta == {"terminal_info": {"terminal_id": "call-1", "cwd": "/"}}
        # Asked about, it is unknown, and nothing breaks.
        for verb in ("output", "wait_for_exit", "kill", "release"):
            told = {"sessionId": "s1", "terminalId": "call-1"}
            assert (await raw.ask(f"terminal/{verb}", told))["error"]["code"] == -32002
        assert await ran(raw, command="true") == (0, "")


# ------------------------------------------------------------------ 23: new files


@pytest.mark.covers("Q-23")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_file_that_is_not_there_is_said_so_and_can_be_written(
    wire: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "new.txt")
    async with raw_agent(wire, Client(files=Files())) as (peer, raw):
        await opened(peer, raw, cwd=tmp_path)
        answer = await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": path})
        assert answer["error"]["code"] == -32002
        assert answer["error"]["data"]["uri"].endswith("/new.txt")
        written = {"sessionId": "s1", "path": path, "content": "new"}
        assert "result" in await raw.ask("fs/write_text_file", written)
        answer = await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": path})
        assert answer["result"] == {"content": "new"}


class WritesOnly(Client):
    def __init__(self) -> None:
        super().__init__()
        self.lent = Files()

    async def write_text_file(self, params: Any, ctx: Any) -> Any:
        return await self.lent.write_text_file(params, ctx)


@pytest.mark.covers("Q-23")
async def test_writing_can_be_lent_without_reading(tmp_path: Path) -> None:
    """Which is what one agent needs to make a new file."""
    path = str(tmp_path / "new.txt")
    async with raw_agent("memory", WritesOnly()) as (peer, raw):
        hello = (await raw.wait("initialize"))["params"]["clientCapabilities"]
        assert hello["fs"].get("readTextFile", False) is False
        assert hello["fs"]["writeTextFile"] is True
        await opened(peer, raw, cwd=tmp_path)
        answer = await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": path})
        assert answer["error"]["code"] == -32601
        written = {"sessionId": "s1", "path": path, "content": "new"}
        assert "result" in await raw.ask("fs/write_text_file", written)


# ------------------------------------------------------------------ 24: what was never offered


@pytest.mark.covers("Q-24")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("fs/write_text_file", {"sessionId": "s1", "path": "/x", "content": "y"}),
        ("fs/read_text_file", {"sessionId": "s1", "path": "/x"}),
        ("terminal/create", {"sessionId": "s1", "command": "ls"}),
        ("elicitation/create", {"sessionId": "s1", "mode": "form", "message": "?"}),
        ("fs/write_text_file", None),
    ],
)
async def test_a_call_that_was_never_offered_is_answered_and_the_turn_goes_on(
    wire: str, method: str, params: Any
) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            answer = await raw.ask(method, params)
            assert answer["error"]["code"] == -32601
            raw.send(raw.update("s1", "anyway"), reply(request, END))
            assert [u.text async for u in turn] == ["anyway"]


class Greedy(Agent):
    """Ours asks a client for nothing that it does not lend."""

    async def prompt(self, turn: Turn) -> None:
        refused = 0
        for call in (
            lambda: turn.write_text_file("/x", "y"),
            lambda: turn.read_text_file("/x"),
            lambda: turn.run("ls").__aenter__(),
        ):
            try:
                await call()
            except CapabilityError:
                refused += 1
        await turn.say(str(refused))


@pytest.mark.covers("Q-24")
@pytest.mark.parametrize("lends", [None, {}, {"fs": {}}, {"fs": None, "terminal": False}])
async def test_our_agent_never_asks_for_what_was_not_lent(lends: Any) -> None:
    async with unshaken_client("memory", Greedy()) as raw:
        hello = {"protocolVersion": 1} | ({} if lends is None else {"clientCapabilities": lends})
        assert "result" in await raw.ask("initialize", hello)
        session_id = await opened_in(raw)
        await raw.ask("session/prompt", prompt(session_id))
        (update,) = raw.sent("session/update")
        assert update["params"]["update"]["content"]["text"] == "3"
        assert {f.get("method") for f in raw.frames} == {None, "session/update"}


# ------------------------------------------------------------------ 25: methods of no schema

REQUESTS = ["craft/drainMidTurnQueue", "session/set_model", "ping", "", "terminal/", "a" * 5000]
NOTICES = [
    "qwen/notify/session/mode-update",
    "qwen/notify/session/model-update",
    "_auth/status_update",
    "session/updated",
    "",
]


@pytest.mark.covers("Q-25")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_methods_of_no_schema_are_not_found_or_ignored_in_a_turn(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            for n, method in enumerate(NOTICES):
                params = {"sessionId": "s1", "n": n}
                raw.send(raw.notification(method, params), raw.update("s1", str(n)))
            for method in REQUESTS:
                answer = await raw.ask(method, {"sessionId": "s1"})
                assert answer["error"]["code"] == -32601
                assert answer["error"]["data"] == method[:256]
            raw.answer(request, END)
            assert [u.text async for u in turn] == [str(n) for n in range(len(NOTICES))]


class Hears(Client):
    def __init__(self) -> None:
        super().__init__()
        self.status: list[Any] = []

    @extension("_auth/status_update", kind="notification")
    async def status_update(self, params: Any, ctx: Any) -> None:
        self.status.append(params)


@pytest.mark.covers("Q-25")
async def test_a_vendor_s_notification_can_be_heard() -> None:
    client = Hears()
    async with raw_agent("memory", client) as (_, raw):
        raw.send(raw.notification("_auth/status_update", {"loggedIn": True}))
        await raw.round_trip()
        assert client.status == [{"loggedIn": True}]


# ------------------------------------------------------------------ 26: members of no schema

ODD_MEMBERS: dict[str, Any] = {
    "models": {"currentModelId": "a", "availableModels": [{"modelId": "a"}]}
}
AUTH = [
    {"id": "key", "name": "API key", "type": "env_var", "vars": [{"name": "OPENAI_API_KEY"}]},
    {"id": "chatgpt", "name": "Sign in", "type": "unheard-of", "vars": ["X"], "link": 5},
    {"id": "https://x.example/login", "name": "Plain"},
]


@pytest.mark.covers("Q-26")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_members_that_no_schema_names_refuse_no_answer(wire: str) -> None:
    capabilities: dict[str, Any] = FULL | {
        "mcpCapabilities": {"http": True, "sse": False, "acp": {}},
        "providers": {"x": 1},
        "sessionCapabilities": FULL["sessionCapabilities"] | {"title": {}, "systemPrompt": True},
    }
    more = {"authMethods": AUTH, "schema_version": 3, "_meta": {"field_meta": None}}
    async with raw_agent(wire, None, capabilities, initialized=more, unstable=True) as (peer, raw):
        assert [getattr(method, "id", None) for method in peer.auth_methods][::2] == [
            "key",
            "https://x.example/login",
        ]
        assert peer.offers("sessionCapabilities.list")
        session = await opened(peer, raw, **ODD_MEMBERS, timestamp=1.5)
        calls: list[tuple[str, Any, dict[str, Any]]] = [
            ("session/load", peer.load_session("s2", cwd="/"), {"sessionId": "s2"} | ODD_MEMBERS),
            ("session/resume", peer.resume_session("s3", cwd="/"), {"sessionId": "?"}),
            ("session/set_mode", session.set_mode("m"), {"modeId": "m"}),
            (
                "session/fork",
                peer.request(v1_unstable.ForkSessionRequest(session_id="s1", cwd="/")),
                {"sessionId": "s4"} | ODD_MEMBERS,
            ),
            (
                "session/prompt",
                session.prompt("go"),
                END | {"usage": {"totalTokens": 3, "inputTokens": 1, "outputTokens": 2}, "cost": 5},
            ),
            (
                "session/list",
                peer.list_sessions(),
                {"sessions": [{"sessionId": "s1", "cwd": "/", "model": "a"}], "total": 1},
            ),
        ]
        got: dict[str, Any] = {}
        for method, work, result in calls:
            running = begun(work)
            raw.answer(await raw.wait(method), result)
            got[method] = await running
        assert got["session/load"].session_id == "s2"
        assert got["session/fork"].session_id == "s4"
        assert got["session/prompt"].usage.total_tokens == 3
        assert [info.session_id for info in got["session/list"].sessions] == ["s1"]


@pytest.mark.covers("Q-26")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_members_that_no_schema_names_stay_in_an_update(wire: str) -> None:
    body = {
        "schema_version": 2,
        "sessionUpdate": "agent_message_chunk",
        "content": {"type": "text", "text": "a", "_meta": {"field_meta": 1}, "cache": True},
        "timestamp": 1764470000123,
        "field_meta": None,
    }
    frame = {
        "jsonrpc": "2.0",
        "method": "session/update",
        "params": {"timestamp": 5, "sessionId": "s1", "update": body, "_meta": {"a": [1.0]}},
        "extra": {},
    }
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            text = json.dumps(frame).encode()
            raw.send(text, reply(request, END))
            (got,) = [u async for u in turn]
    assert got.text == "a"
    assert got.frame == text
    assert json.loads(got.raw) == body
    assert got.meta == {"a": [1.0]}


# ------------------------------------------------------------------ 27: bad clients


class Plain(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(str(turn.peer.info))


WHERE: dict[str, Any] = {"cwd": "/", "mcpServers": []}


@pytest.mark.covers("Q-27")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_requests_of_the_wrong_shape_name_the_field_and_harm_nothing(wire: str) -> None:
    async with unshaken_client(wire, Plain()) as raw:
        early = await raw.ask("session/prompt", prompt("s"))
        assert early["error"]["code"] == -32600
        bad = await raw.ask("initialize", {"protocolVersion": "1"})
        assert bad["error"]["code"] == -32602
        assert "protocolVersion" in json.dumps(bad["error"])
        # A client that goes on all the same is refused until it has shaken hands.
        assert (await raw.ask("session/new", WHERE))["error"]["code"] == -32600
        assert (await raw.ask("initialize", {"protocolVersion": 1}))["result"]
        session_id = await opened_in(raw)
        for params, field in (
            ({"sessionId": session_id, "content": [{"type": "text", "text": "x"}]}, "prompt"),
            (prompt(None), "sessionId"),
            (prompt(5), "sessionId"),
            ({"sessionId": session_id, "prompt": "x"}, "prompt"),
            ({"sessionId": session_id, "prompt": None}, "prompt"),
            ({}, "sessionId"),
            (None, "sessionId"),
        ):
            answer = await raw.ask("session/prompt", params)
            assert answer["error"]["code"] == -32602
            assert field in json.dumps(answer["error"])
        assert (await raw.ask("session/prompt", prompt(session_id)))["result"] == END


@pytest.mark.covers("Q-27")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize(
    "hello",
    [
        {"protocolVersion": 1},
        {"protocolVersion": 1, "capabilities": {"fs": True}, "clientCapabilities": {}},
        {"protocolVersion": 1, "clientInfo": None, "clientCapabilities": None},
        {"protocolVersion": 1, "clientInfo": {"name": "x", "version": "1", "icon": 5}},
        {"protocolVersion": 1, "clientInfo": "chuk", "clientCapabilities": "all"},
        {"protocolVersion": 1, "clientCapabilities": {"fs": {"readTextFile": "yes"}}},
    ],
    ids=json.dumps,
)
async def test_a_handshake_that_says_little_or_too_much_is_a_handshake(
    wire: str, hello: dict[str, Any]
) -> None:
    async with unshaken_client(wire, Plain()) as raw:
        answer = await raw.ask("initialize", hello)
        assert answer["result"]["protocolVersion"] == 1
        session_id = await opened_in(raw)
        assert (await raw.ask("session/prompt", prompt(session_id)))["result"] == END


@pytest.mark.covers("Q-27")
@pytest.mark.parametrize("code", [-32002, -32600, -32603])
async def test_an_agent_that_refuses_what_comes_early_meets_a_client_that_never_is(
    code: int,
) -> None:
    """Ours sends nothing before the handshake, so no such refusal can be its fault."""
    async with raw_agent("memory") as (peer, raw):
        assert [f["method"] for f in raw.frames] == ["initialize"]
        assert raw.frames[0]["params"]["protocolVersion"] == 1
        assert type(raw.frames[0]["params"]["protocolVersion"]) is int
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        raw.refuse(await raw.wait("session/new"), code, "Not initialized")
        with pytest.raises(Exception, match="Not initialized"):
            await opening


# ------------------------------------------------------------------ 28: sign-in and odd ids


@pytest.mark.covers("Q-28")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_session_that_is_refused_for_want_of_a_login_says_so_and_is_not_repeated(
    wire: str,
) -> None:
    methods = [{"id": "outside", "name": "Run `login` in a shell"}]
    async with raw_agent(wire, initialized={"authMethods": methods}) as (peer, raw):
        opening = asyncio.ensure_future(peer.new_session(cwd="/"))
        raw.refuse(await raw.wait("session/new"), -32000, "Authentication required")
        with pytest.raises(AuthRequired):
            await opening
        await raw.round_trip()
        assert [f.get("method") for f in raw.frames].count("session/new") == 1
        assert not raw.sent("authenticate")
        # Signing in is the caller's decision, and then it works.
        signing = asyncio.ensure_future(peer.authenticate("outside"))
        raw.answer(await raw.wait("authenticate"), None)
        await signing
        assert (await opened(peer, raw)).session_id == "s1"


@pytest.mark.covers("Q-28")
async def test_nobody_has_to_sign_in_because_there_are_ways_to() -> None:
    methods = [{"id": "key", "name": "API key"}, {"id": "web", "name": "Browser"}]
    async with raw_agent("memory", initialized={"authMethods": methods}) as (peer, raw):
        assert (await opened(peer, raw)).session_id == "s1"
        assert not raw.sent("authenticate")


ODD_ID = "file:///home/ä b/?x=1#y\u2028../..\\0"


@pytest.mark.covers("Q-28")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_ids_are_any_text(wire: str) -> None:
    mode = "https://agentclientprotocol.example/modes#plan"
    modes = {"currentModeId": mode, "availableModes": [{"id": mode, "name": "Plan"}]}
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw, ODD_ID, modes=modes)
        assert session.session_id == ODD_ID
        setting = asyncio.ensure_future(session.set_mode(mode))
        request = await raw.wait("session/set_mode")
        assert request["params"] == {"sessionId": ODD_ID, "modeId": mode}
        raw.answer(request, {})
        await setting
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update(ODD_ID, "here"), reply(request, END))
            assert [u.text async for u in turn] == ["here"]


@pytest.mark.covers("Q-28")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_id_made_of_the_folder_comes_again_and_is_a_new_session(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        first = await opened(peer, raw, "folder-1")
        raw.send(raw.update("folder-1", "for the first"))
        await raw.round_trip()
        second = await opened(peer, raw, "folder-1")
        assert second is not first
        assert peer.sessions == {"folder-1": second}
        async with second.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            raw.send(raw.update("folder-1", "for the second"), reply(request, END))
            assert [u.text async for u in turn] == ["for the second"]


class Signed(Agent):
    capabilities = Capabilities(auth_methods=[v1.AuthMethodAgent(id="urn:x:key", name="Key")])

    def __init__(self) -> None:
        self.signed_in = False

    async def authenticate(self, params: Any, ctx: Any) -> None:
        self.signed_in = True

    async def new_session(self, params: Any, ctx: Any) -> Any:
        if not self.signed_in:
            raise AuthRequired
        return await super().new_session(params, ctx)

    async def prompt(self, turn: Turn) -> None:
        """Nothing."""


@pytest.mark.covers("Q-28")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_our_agent_can_ask_for_a_login_once(wire: str) -> None:
    async with raw_client(wire, Signed()) as raw:
        assert (await raw.ask("session/new", WHERE))["error"]["code"] == -32000
        assert (await raw.ask("authenticate", {"methodId": "other"}))["error"]["code"] == -32602
        assert "result" in await raw.ask("authenticate", {"methodId": "urn:x:key"})
        assert await opened_in(raw)
        assert len(raw.responses("hello")) == 1
