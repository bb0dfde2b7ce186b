"""What an agent of ours does with whatever a client sends: handshake, gates, sessions, turns."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import (
    DEFERRED,
    Agent,
    AgentContext,
    AgentSession,
    Capabilities,
    InvalidParams,
    Limits,
    Reply,
    RequestError,
    ResourceNotFound,
    TelemetryEvent,
    Turn,
    TurnOver,
    extension,
)
from antiphon.runtime import RequestRoute
from antiphon.schema import v1, v1_unstable
from antiphon.sessions import _client_peer
from antiphon.sessions._agent_router import AgentRouter
from antiphon.testing import RawPeer, raw_client, unshaken_client

NEW: dict[str, Any] = {"cwd": "/work", "mcpServers": []}
HELLO = {"protocolVersion": 1}


class Echo(Agent):
    """Says what it is told; waits where it is told to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()

    async def prompt(self, turn: Turn) -> Any:
        self.texts.append(turn.text)
        await turn.say(turn.text)
        if turn.text == "wait":
            self.waiting.set()
            await self.gate.wait()
        elif turn.text == "until cancelled":
            self.waiting.set()
            await turn.wait_cancelled()
        elif turn.text == "raise":
            raise RuntimeError("a secret")
        return None


async def opened(raw: RawPeer, **params: Any) -> str:
    """A session of the raw client."""
    answer = await raw.ask("session/new", {**NEW, **params})
    session_id = answer["result"]["sessionId"]
    assert isinstance(session_id, str)
    return session_id


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": t} for t in texts]


def prompt(raw: RawPeer, id_: Any, session_id: str, *texts: str) -> dict[str, Any]:
    return raw.request(id_, "session/prompt", {"sessionId": session_id, "prompt": text(*texts)})


def cancel(raw: RawPeer, session_id: str) -> dict[str, Any]:
    return raw.notification("session/cancel", {"sessionId": session_id})


def cancel_request(raw: RawPeer, id_: Any) -> dict[str, Any]:
    return raw.notification("$/cancel_request", {"requestId": id_})


def updates(raw: RawPeer, session_id: str) -> list[str]:
    """The texts of a session's updates, in the order they came."""
    return [
        frame["params"]["update"]["content"]["text"]
        for frame in raw.sent("session/update")
        if frame["params"]["sessionId"] == session_id
    ]


def order(raw: RawPeer) -> list[Any]:
    """What came, in order: ids of answers, texts of updates, names of other methods."""
    return [
        frame["id"]
        if "method" not in frame
        else frame["params"]["update"]
        .get("content", {})
        .get("text", frame["params"]["update"]["sessionUpdate"])
        if frame["method"] == "session/update"
        else frame["method"]
        for frame in raw.frames
    ]


# ------------------------------------------------------------------ handshake


@pytest.mark.covers("R1-23", "R1-24", "R1-25", "R1-26", "FF-34")
@pytest.mark.parametrize("version", [1, 0, 2, 99, 65535])
async def test_whatever_version_is_offered_the_answer_is_the_one_spoken(version: int) -> None:
    async with unshaken_client(Echo()) as raw:
        answer = await raw.ask("initialize", {"protocolVersion": version})
        assert answer["result"] == {
            "protocolVersion": 1,
            "agentCapabilities": {},
            "agentInfo": {"name": "Echo", "version": "0"},
        }


@pytest.mark.covers("R1-13")
@pytest.mark.parametrize("version", ["1", None, -1, 65536, 1.5, True, [], {}])
async def test_a_version_that_is_none_is_refused_and_the_next_try_counts(version: Any) -> None:
    async with unshaken_client(Echo()) as raw:
        answer = await raw.ask("initialize", {"protocolVersion": version})
        assert answer["error"]["code"] == -32602
        assert "protocolVersion" in answer["error"]["data"]
        assert (await raw.ask("session/new", NEW))["error"]["code"] == -32600
        assert "result" in await raw.ask("initialize", HELLO)
        assert await opened(raw)


async def test_a_version_left_out_is_refused() -> None:
    async with unshaken_client(Echo()) as raw:
        for params in ("{}", "null", '{"clientCapabilities":{}}'):
            answer = await raw.ask("initialize", json.loads(params))
            assert answer["error"]["code"] == -32602
            assert "protocolVersion" in answer["error"]["data"]


@pytest.mark.covers("R1-31", "R1-158", "R1-156")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"clientCapabilities": 5},
        {"clientCapabilities": None},
        {"clientCapabilities": []},
        {"clientCapabilities": {"fs": "x", "terminal": 1, "session": [], "auth": None}},
        {"clientCapabilities": {"fs": {"readTextFile": "yes"}}},
        {"clientInfo": {}},
        {"clientInfo": "zed"},
        {"clientInfo": {"name": "zed"}},
        {"capabilities": {"fs": True}, "zzz": [1]},
        {"_meta": "bad"},
        {"_meta": {"traceparent": "00-1"}},
    ],
)
async def test_optional_members_do_not_fail_the_handshake(more: dict[str, Any]) -> None:
    tried: list[Any] = []

    class Curious(Agent):
        async def prompt(self, turn: Turn) -> None:
            tried.append((turn.peer.offers("fs.readTextFile"), turn.peer.offers("terminal")))

    async with unshaken_client(Curious()) as raw:
        answer = await raw.ask("initialize", {**HELLO, **more})
        assert answer["result"]["protocolVersion"] == 1
        raw.send(prompt(raw, "p", await opened(raw)))
        await raw.answer_to("p")
    assert tried == [(False, False)]  # what does not decode is not offered


@pytest.mark.covers("R1-28", "R1-33")
@pytest.mark.parametrize(
    ("capabilities", "paths"),
    [
        ({"fileSystem": {"readTextFile": True}}, "fs.readTextFile"),
        ({"fileSystem": {"readTextFile": 1, "writeTextFile": True}}, "fs.writeTextFile"),
        (
            {"fs": {"writeTextFile": True}, "fileSystem": {"readTextFile": True}},
            "fs.writeTextFile",
        ),
        ({"fs": {}, "fileSystem": {"readTextFile": True}}, ""),
        ({"fileSystem": True}, ""),
        ({"fileSystem": None}, ""),
        ({"filesystem": {"readTextFile": True}}, ""),
    ],
    ids=str,
)
async def test_an_older_name_of_what_lends_files_counts_where_the_right_one_is_absent(
    capabilities: dict[str, Any], paths: str
) -> None:
    lent = {*paths.split()}
    seen: list[set[str]] = []

    class Curious(Agent):
        async def initialize(self, params: Any, ctx: AgentContext) -> v1.InitializeResponse:
            fs = params.client_capabilities.fs
            if isinstance(fs, v1.FileSystemCapabilities):
                names = {"readTextFile": fs.read_text_file, "writeTextFile": fs.write_text_file}
                seen.append({f"fs.{name}" for name, given in names.items() if given is True})
            else:
                seen.append(set())
            both = ("fs.readTextFile", "fs.writeTextFile")
            seen.append({path for path in both if ctx.peer.offers(path)})
            return await super().initialize(params, ctx)

    async with raw_client(Curious(), capabilities):
        assert seen == [lent, lent]


@pytest.mark.covers("R1-30", "FF-34")
async def test_before_the_handshake_requests_are_refused_and_notifications_dropped() -> None:
    heard: list[Any] = []

    class Mine(Echo):
        @extension("_x/tell", kind="notification")
        async def tell(self, params: Any, ctx: Any) -> None:
            heard.append(params)

    async with unshaken_client(Mine()) as raw:
        for method in ("session/new", "session/prompt", "_x/y", "no/such", "authenticate"):
            answer = await raw.ask(method, {})
            assert answer["error"]["code"] == -32600
            assert answer["error"]["data"] == {"method": method, "reason": "initialize required"}
        raw.send(
            raw.notification("_x/tell", 1),
            raw.notification("session/cancel", {"sessionId": "s"}),
            cancel_request(raw, 5),
        )
        await raw.ask("initialize", HELLO)
        raw.send(raw.notification("_x/tell", 2))
        await raw.round_trip()
    assert heard == [2]


async def test_what_comes_right_behind_initialize_is_served_after_it() -> None:
    async with unshaken_client(Echo()) as raw:
        raw.send(
            raw.request(1, "initialize", HELLO),
            raw.request(2, "session/new", NEW),
            raw.request(3, "initialize", HELLO),
        )
        await raw.answer_to(3)
        assert "result" in await raw.answer_to(2)
        assert raw.frames[0]["id"] == 1


@pytest.mark.covers("R1-32")
async def test_a_second_initialize_is_refused_and_changes_nothing() -> None:
    class Reader(Agent):
        async def prompt(self, turn: Turn) -> None:
            await turn.say(str(turn.peer.offers("terminal")))

    async with raw_client(Reader(), {"terminal": True}) as raw:
        answer = await raw.ask("initialize", {**HELLO, "clientCapabilities": {}})
        assert answer["error"]["code"] == -32600
        assert answer["error"]["data"] == {"reason": "already initialized"}
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id))
        await raw.answer_to("p")
        assert updates(raw, session_id) == ["True"]


async def test_a_handshake_that_the_agent_refuses_can_be_tried_again() -> None:
    class Choosy(Echo):
        async def initialize(
            self, params: v1_unstable.InitializeRequest, ctx: AgentContext
        ) -> v1.InitializeResponse:
            if isinstance(params.client_info, v1.Implementation):
                return await super().initialize(params, ctx)
            raise InvalidParams({"reason": "who are you?"})

    async with unshaken_client(Choosy()) as raw:
        assert (await raw.ask("initialize", HELLO))["error"]["data"] == {"reason": "who are you?"}
        assert (await raw.ask("session/new", NEW))["error"]["code"] == -32600
        again = {**HELLO, "clientInfo": {"name": "x", "version": "1"}}
        assert "result" in await raw.ask("initialize", again)
        await opened(raw)


@pytest.mark.covers("R1-40")
async def test_a_terminal_login_is_named_only_to_a_client_that_can_do_it() -> None:
    class Guarded(Agent):
        capabilities = Capabilities(
            auth_methods=[
                v1.AuthMethodAgent(id="key", name="Key"),
                v1.AuthMethodTerminal(id="tui", name="Login", args=["login"]),
            ]
        )

    key = {"id": "key", "name": "Key"}
    tui = {"type": "terminal", "id": "tui", "name": "Login", "args": ["login"]}
    for offered, methods in (
        ({}, [key]),
        ({"auth": {"terminal": False}}, [key]),
        ({"auth": {"terminal": True}}, [key, tui]),
    ):
        async with unshaken_client(Guarded()) as raw:
            params = {**HELLO, "clientCapabilities": offered}
            assert (await raw.ask("initialize", params))["result"]["authMethods"] == methods


@pytest.mark.covers("R1-144", "R1-145", "R1-146")
async def test_only_the_methods_that_were_named_can_be_used_to_sign_in() -> None:
    tried: list[str] = []

    class Guarded(Echo):
        capabilities = Capabilities(
            auth_methods=[
                v1.AuthMethodAgent(id="key", name="Key"),
                v1.AuthMethodTerminal(id="tui", name="Login"),
            ]
        )

        async def authenticate(self, params: Any, ctx: Any) -> Any:
            tried.append(params.method_id)

        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            if not tried:
                raise RequestError.of(-32000, "Authentication required")
            return await super().new_session(params, ctx)

    async with raw_client(Guarded(), {"auth": {"terminal": True}}) as raw:
        assert (await raw.ask("session/new", NEW))["error"]["code"] == -32000
        for method_id in ("tui", "other", ""):
            answer = await raw.ask("authenticate", {"methodId": method_id})
            assert answer["error"]["code"] == -32602
            assert answer["error"]["data"]["methodId"] == method_id
        assert (await raw.ask("authenticate", {"methodId": "key"}))["result"] == {}
        assert await opened(raw)
    assert tried == ["key"]


# ------------------------------------------------------------------ gates


GATED = [
    "session/load",
    "session/resume",
    "session/list",
    "session/close",
    "session/delete",
    "logout",
    "session/fork",
    "session/archive",
    "session/status",
    "session/set_title",
    "providers/list",
    "auth/status",
]


@pytest.mark.covers("R1-8", "R1-9")
@pytest.mark.parametrize(
    "method", [*GATED, "no/such", "", "_x/y", "authenticate", "session/set_mode"]
)
async def test_what_is_not_advertised_is_not_found_whatever_its_parameters(method: str) -> None:
    async with raw_client(Echo(), unstable=True) as raw:
        for params in ({}, None, {"sessionId": 5}, {"sessionId": "s", "cwd": "/"}):
            answer = await raw.ask(method, params)
            assert answer["error"] == {
                "code": -32601,
                "message": "Method not found",
                "data": method,
            }


@pytest.mark.covers("R1-7", "R1-8", "R1-10")
async def test_a_message_of_the_wrong_kind_or_for_the_other_side_has_no_effect() -> None:
    async with raw_client(Echo()) as raw:
        for method in (
            "session/cancel",
            "$/cancel_request",
            "session/update",
            "fs/read_text_file",
            "session/request_permission",
        ):
            assert (await raw.ask(method, {"sessionId": "s"}))["error"]["code"] == -32601
        before = len(raw.frames)
        for method in ("session/new", "session/prompt", "initialize", "$/other", "x", "_x/y"):
            raw.send(raw.notification(method, {"sessionId": "s"}))
        await raw.round_trip()
        assert len(raw.frames) == before + 1


async def test_unstable_methods_are_served_on_an_unstable_connection_only() -> None:
    class New(Echo):
        async def session_status(self, params: Any, ctx: Any) -> Any:
            return v1_unstable.SessionStatusResponse(status="open")

    for unstable in (False, True):
        async with unshaken_client(New(), unstable=unstable) as raw:
            hello = await raw.ask("initialize", HELLO)
            assert hello["result"]["agentCapabilities"] == (
                {"sessionCapabilities": {"status": {}}} if unstable else {}
            )
            answer = await raw.ask("session/status", {"sessionId": "s"})
            if unstable:
                assert answer["result"] == {"status": "open"}
            else:
                assert answer["error"]["code"] == -32601


@pytest.mark.covers("R1-13")
@pytest.mark.parametrize(
    ("method", "params", "names"),
    [
        ("session/new", {"mcpServers": []}, "cwd"),
        ("session/new", {"cwd": 5, "mcpServers": []}, "cwd"),
        ("session/new", {"cwd": "/"}, "mcpServers"),
        ("session/new", {"cwd": "/", "mcpServers": [{"name": "x"}]}, "mcpServers"),
        ("session/new", {**NEW, "additionalDirectories": [5]}, "additionalDirectories"),
        ("session/new", [], ""),
        ("session/prompt", {"sessionId": "s", "prompt": "x"}, "prompt"),
        ("session/prompt", {"sessionId": "s", "prompt": [5]}, "prompt"),
        ("session/prompt", {"sessionId": "s", "prompt": [{"type": "hologram"}]}, "prompt"),
        ("session/prompt", {"sessionId": None, "prompt": []}, "sessionId"),
        ("session/prompt", {"content": [], "sessionId": "s"}, "prompt"),
        ("session/prompt", None, ""),
    ],
)
async def test_parameters_that_do_not_decode_are_refused_by_name(
    method: str, params: Any, names: str
) -> None:
    async with raw_client(Echo()) as raw:
        answer = await raw.ask(method, params)
        assert answer["error"]["code"] == -32602
        assert names in str(answer["error"]["data"])
        await opened(raw)  # the connection lives


# ------------------------------------------------------------------ opening sessions


@pytest.mark.covers("R1-46", "R1-47")
async def test_every_new_session_has_an_id_of_its_own() -> None:
    async with raw_client(Echo()) as raw:
        assert len({await opened(raw) for _ in range(50)}) == 50


@pytest.mark.covers("R1-48", "R1-51")
@pytest.mark.parametrize(
    "path", ["", "work", "./work", "../x", "~", "~/x", "C:", "C:x", "\\x", "file:///x"]
)
async def test_a_relative_directory_is_refused_wherever_one_is_given(path: str) -> None:
    class Full(Echo):
        capabilities = Capabilities(additional_directories=True)

        async def load_session(self, params: Any, ctx: Any) -> Any:
            raise AssertionError

        async def resume_session(self, params: Any, ctx: Any) -> Any:
            raise AssertionError

        async def list_sessions(self, params: Any, ctx: Any) -> v1.ListSessionsResponse:
            return v1.ListSessionsResponse(sessions=[])

    refusal = {"reason": "path_not_absolute", "path": path}
    async with raw_client(Full()) as raw:
        for method in ("session/new", "session/load", "session/resume"):
            for params in ({"cwd": path}, {"cwd": "/", "additionalDirectories": ["/ok", path]}):
                answer = await raw.ask(method, {"sessionId": "s", "mcpServers": [], **params})
                assert answer["error"]["code"] == -32602
                assert answer["error"]["data"] == refusal
        answer = await raw.ask("session/list", {"cwd": path})
        assert answer["error"]["data"] == refusal
        assert (await raw.ask("session/list", {"cwd": None}))["result"] == {"sessions": []}
        assert (await raw.ask("session/list", None))["result"] == {"sessions": []}


@pytest.mark.covers("R1-48", "R1-49", "R1-50")
@pytest.mark.parametrize("path", ["/work", "C:\\work", "c:/work", "\\\\host\\share"])
async def test_absolute_directories_of_every_system_are_the_session_s_roots(path: str) -> None:
    roots: list[Any] = []

    class Mine(Agent):
        async def prompt(self, turn: Turn) -> None:
            roots.append((turn.cwd, turn.roots))

    async with raw_client(Mine()) as raw:
        session_id = await opened(raw, cwd=path, additionalDirectories=["/more"])
        raw.send(prompt(raw, "p", session_id))
        await raw.answer_to("p")
    assert roots == [(path, (path, "/more"))]


HTTP: dict[str, Any] = {"type": "http", "name": "h", "url": "http://localhost", "headers": []}
SSE: dict[str, Any] = {**HTTP, "type": "sse"}
ACP = {"type": "acp", "name": "a", "serverId": "1"}
STDIO: dict[str, Any] = {"name": "s", "command": "/bin/x", "args": [], "env": []}


@pytest.mark.covers("R1-44", "R1-74", "R1-76")
async def test_servers_of_a_transport_that_was_not_advertised_are_refused() -> None:
    seen: list[Any] = []

    class Mine(Echo):
        capabilities = Capabilities(mcp_http=True)

        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            seen.append([type(server).__name__ for server in params.mcp_servers])
            return await super().new_session(params, ctx)

    async with raw_client(Mine(), unstable=True) as raw:
        await opened(raw, mcpServers=[STDIO, HTTP])
        await opened(raw, mcpServers=None)
        for server in (SSE, ACP):
            answer = await raw.ask("session/new", {**NEW, "mcpServers": [STDIO, server]})
            assert answer["error"]["code"] == -32602
            assert answer["error"]["data"]["type"] == server["type"]
        for kind in ("pigeon", "", 5, "http.x"):  # what is unknown is no stdio server
            odd = {**STDIO, "type": kind}
            answer = await raw.ask("session/new", {**NEW, "mcpServers": [odd]})
            assert answer["error"]["code"] == -32602
        await opened(raw, mcpServers=[{**STDIO, "type": "stdio"}, {**STDIO, "type": None}])
    assert seen == [["McpServerStdio", "McpServerHttp"], [], ["McpServerStdio", "McpServerStdio"]]


async def test_an_id_that_is_open_is_not_given_to_a_second_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Same(Echo):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            return v1.NewSessionResponse(session_id="same")

    agent = Same()
    async with raw_client(agent) as raw:
        await opened(raw)
        raw.send(prompt(raw, "p", "same", "wait"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        answer = await raw.ask("session/new", NEW)
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert "is open already" in caplog.text
        agent.gate.set()
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "end_turn"}


async def test_sessions_of_one_connection_are_bounded_before_the_handler_runs() -> None:
    made: list[Any] = []

    class Counting(Echo):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            made.append(params)
            return await super().new_session(params, ctx)

    async with raw_client(Counting(), limits=Limits(sessions=2)) as raw:
        await opened(raw)
        await opened(raw)
        answer = await raw.ask("session/new", NEW)
        assert answer["error"]["code"] == -32603
        assert answer["error"]["data"] == {"reason": "limit sessions exceeded", "limit": 2}
    assert len(made) == 2


async def test_what_follows_a_response_is_sent_behind_it() -> None:
    class Announcing(Echo):
        async def new_session(self, params: Any, ctx: AgentContext) -> v1.NewSessionResponse:
            response = await super().new_session(params, ctx)

            async def announce() -> None:
                command = v1.AvailableCommand(name="x", description="y")
                await ctx.session(response.session_id).commands([command])

            ctx.after_response(announce)
            return response

    async with raw_client(Announcing()) as raw:
        for number in range(3):
            session_id = await opened(raw)
            update = await raw.wait("session/update", number + 1)
            assert update["params"]["sessionId"] == session_id
        assert order(raw)[1:] == [
            *("ask-1", "available_commands_update"),
            *("ask-2", "available_commands_update"),
            *("ask-3", "available_commands_update"),
        ]


@pytest.mark.covers("R1-89")
async def test_commands_are_announced_for_a_session_and_come_as_text_of_a_prompt() -> None:
    asked: list[list[v1.ContentBlock]] = []

    class Commands(Echo):
        async def new_session(self, params: Any, ctx: AgentContext) -> v1.NewSessionResponse:
            response = await super().new_session(params, ctx)
            command = v1.AvailableCommand(name="plan", description="Plan it")
            ctx.after_response(lambda: ctx.session(response.session_id).commands([command]))
            return response

        async def prompt(self, turn: Turn) -> None:
            asked.append(turn.blocks)

    async with raw_client(Commands()) as raw:
        session_id = await opened(raw)
        told = (await raw.wait("session/update"))["params"]
        assert told["sessionId"] == session_id
        assert [c["name"] for c in told["update"]["availableCommands"]] == ["plan"]
        link = {"type": "resource_link", "name": "notes", "uri": "file:///notes"}
        blocks = [{"type": "text", "text": "/plan the garden"}, link]
        await raw.ask("session/prompt", {"sessionId": session_id, "prompt": blocks})

    assert asked == [
        [
            v1.TextContent(text="/plan the garden"),
            v1.ResourceLink(name="notes", uri="file:///notes"),
        ]
    ]


async def test_what_follows_a_response_stands_behind_it_whatever_else_is_written() -> None:
    """Two turns stream, many sessions are opened, and the client is slow to take any of it."""
    streaming = asyncio.Event()

    class Busy(Echo):
        async def new_session(self, params: Any, ctx: AgentContext) -> v1.NewSessionResponse:
            response = await super().new_session(params, ctx)

            async def announce() -> None:
                await ctx.session(response.session_id).commands([])

            if streaming.is_set():
                ctx.after_response(announce)
                ctx.after_response(announce)
            return response

        async def prompt(self, turn: Turn) -> None:
            streaming.set()
            while not turn.cancelled:
                await turn.say("x" * 1000)
                await asyncio.sleep(0)

    async with raw_client(Busy()) as raw:
        streams = [await opened(raw), await opened(raw)]
        raw.send(*(prompt(raw, f"p-{s}", s) for s in streams))
        await asyncio.wait_for(streaming.wait(), 5)
        raw.transport.pause_reading()
        ids = [f"new-{number}" for number in range(50)]
        for id_ in ids:
            raw.send(raw.request(id_, "session/new", NEW))
            await asyncio.sleep(0)
        raw.transport.resume_reading()
        for id_ in ids:
            await raw.answer_to(id_)
        raw.send(*(cancel(raw, s) for s in streams))
        for s in streams:
            await raw.answer_to(f"p-{s}")
        await raw.round_trip()

    seen: dict[str, list[str]] = {}
    for frame in raw.frames:
        if str(frame.get("id")).startswith("new-"):
            seen.setdefault(frame["result"]["sessionId"], []).append("response")
        elif frame.get("method") == "session/update":
            kind = frame["params"]["update"]["sessionUpdate"]
            seen.setdefault(frame["params"]["sessionId"], []).append(kind)
    new = [s for s in seen if s not in streams]
    assert len(new) == 50
    command = "available_commands_update"
    assert [seen[s] for s in new] == [["response", command, command]] * 50


@pytest.mark.parametrize("how", ["an error", "the client goes"])
async def test_what_is_to_follow_a_response_that_is_never_sent_does_not_happen(how: str) -> None:
    acts: list[str] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    class Late(Echo):
        async def new_session(self, params: Any, ctx: AgentContext) -> v1.NewSessionResponse:
            ctx.after_response(lambda: acts.append("done"))
            begun.set()
            if how == "an error":
                raise RequestError.of(-32000, "no")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # its answer comes all the same, and finds nobody
                return await super().new_session(params, ctx)
            finally:
                ended.set()
            raise AssertionError

    async with raw_client(Late()) as raw:
        raw.send(raw.request("n", "session/new", NEW))
        await asyncio.wait_for(begun.wait(), 5)
        if how == "an error":
            await raw.answer_to("n")
            await raw.round_trip()
    await asyncio.wait_for(begun.wait(), 5)
    if how != "an error":
        await asyncio.wait_for(ended.wait(), 5)
    assert acts == []


# ------------------------------------------------------------------ loading, resuming, closing


class Stored(Echo):
    """Loads, resumes, lists, closes and deletes sessions named s1 and s2."""

    capabilities = Capabilities(additional_directories=True)

    def __init__(self) -> None:
        super().__init__()
        self.stored = {"s1": "/one", "s2": "/two"}
        self.loading = asyncio.Event()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.roots: list[Any] = []

    async def load_session(self, params: Any, ctx: Any) -> Any:
        if params.session_id not in self.stored:
            raise ResourceNotFound({"sessionId": params.session_id})
        for number in range(3):
            chunk = v1.UserMessageChunk(content=v1.TextContent(text=f"old {number}"))
            await ctx.update(chunk)
        self.loading.set()
        await self.load_gate.wait()
        if params.session_id == "s2":
            return {"not": "a response"}
        return None

    async def resume_session(self, params: Any, ctx: Any) -> v1.ResumeSessionResponse:
        if params.session_id not in self.stored:
            raise ResourceNotFound({"sessionId": params.session_id})
        with pytest.raises(TurnOver):
            await ctx.update(v1.AgentMessageChunk(content=v1.TextContent(text="old")))
        await ctx.update(v1.SessionInfoUpdate(title="t"))
        self.roots.append(ctx.session().roots)
        modes = [v1.SessionMode(id="a", name="A")]
        return v1.ResumeSessionResponse(
            modes=v1.SessionModeState(current_mode_id="a", available_modes=modes)
        )

    async def list_sessions(self, params: Any, ctx: Any) -> v1.ListSessionsResponse:
        infos = [v1.SessionInfo(session_id=k, cwd=cwd) for k, cwd in self.stored.items()]
        return v1.ListSessionsResponse(sessions=infos)

    async def close_session(self, params: Any, ctx: Any) -> Any:
        if params.session_id == "bad":
            raise RuntimeError

    async def delete_session(self, params: Any, ctx: Any) -> Any:
        self.stored.pop(params.session_id, None)

    async def set_session_mode(self, params: Any, ctx: Any) -> Any:
        return None


def setup(session_id: str, **more: Any) -> dict[str, Any]:
    return {"sessionId": session_id, "cwd": "/work", "mcpServers": [], **more}


@pytest.mark.covers("R1-23", "R1-29")
async def test_what_is_overridden_is_advertised() -> None:
    async with unshaken_client(Stored()) as raw:
        hello = await raw.ask("initialize", HELLO)
        assert hello["result"]["agentCapabilities"] == {
            "loadSession": True,
            "sessionCapabilities": {
                "list": {},
                "delete": {},
                "resume": {},
                "close": {},
                "additionalDirectories": {},
            },
        }


@pytest.mark.covers("R1-52")
async def test_loading_replays_the_history_and_answers_last() -> None:
    async with raw_client(Stored()) as raw:
        raw.send(raw.request("l", "session/load", setup("s1")))
        assert (await raw.answer_to("l"))["result"] == {}
        assert order(raw)[1:] == ["old 0", "old 1", "old 2", "l"]
        raw.send(prompt(raw, "p", "s1", "and now"))
        await raw.answer_to("p")
        assert order(raw)[-2:] == ["and now", "p"]


async def test_a_load_that_is_answered_later_replays_until_then() -> None:
    """What is to be known of a session and done to it waits for the answer, not for the handler."""

    class Later(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.replies: dict[str, Reply] = {}
            self.sessions: dict[str, AgentSession] = {}

        async def load_session(self, params: Any, ctx: AgentContext) -> Any:
            self.replies[params.session_id] = ctx.defer()
            self.sessions[params.session_id] = ctx.session()
            return DEFERRED

        async def new_session(self, params: Any, ctx: AgentContext) -> Any:
            self.replies["new"] = ctx.defer()
            return DEFERRED

    old = v1.UserMessageChunk(content=v1.TextContent(text="old"))
    agent = Later()
    async with raw_client(agent) as raw:
        raw.send(
            raw.request("n", "session/new", NEW), raw.request("l", "session/load", setup("s1"))
        )
        await raw.round_trip()
        session = agent.sessions["s1"]
        await session.update(old)
        raw.send(prompt(raw, "p", "s1", "x"), raw.request("m", "session/load", setup("s1")))
        for id_ in ("p", "m"):
            error = (await raw.answer_to(id_))["error"]
            assert (error["code"], error["message"]) == (-32600, "the session is being loaded")
        await session.update(old)
        agent.replies["s1"].send(v1.LoadSessionResponse())
        agent.replies["new"].send(v1.NewSessionResponse(session_id="s2"))
        assert "result" in await raw.answer_to("l")
        with pytest.raises(TurnOver):
            await session.update(old)
        assert (await raw.answer_to("n"))["result"] == {"sessionId": "s2"}
        for session_id in ("s1", "s2"):
            raw.send(prompt(raw, session_id, session_id, "go"))
            assert "result" in await raw.answer_to(session_id)
        assert updates(raw, "s1") == ["old", "old", "go"]

        raw.send(raw.request("k", "session/load", setup("s3")))
        await raw.round_trip()
        agent.replies["s3"].fail(RequestError.of(-32002, "gone"))
        assert (await raw.answer_to("k"))["error"]["code"] == -32002
        raw.send(prompt(raw, "q", "s3", "x"))
        assert (await raw.answer_to("q"))["error"]["code"] == -32002


@pytest.mark.covers("R1-54")
async def test_resuming_replays_nothing_and_opens_the_session_with_its_new_roots() -> None:
    agent = Stored()
    async with raw_client(agent) as raw:
        more = setup("s1", cwd="/x", additionalDirectories=["/y"])
        answer = await raw.ask("session/resume", more)
        assert answer["result"]["modes"]["currentModeId"] == "a"
        await raw.ask("session/resume", setup("s1"))
        kinds = [frame["params"]["update"]["sessionUpdate"] for frame in raw.sent("session/update")]
        assert kinds == ["session_info_update"] * 2
        answer = await raw.ask("session/set_mode", {"sessionId": "s1", "modeId": "zz"})
        assert answer["error"]["code"] == -32602
        assert (await raw.ask("session/set_mode", {"sessionId": "s1", "modeId": "a"}))[
            "result"
        ] == {}
    assert agent.roots == [("/x", "/y"), ("/work",)]


@pytest.mark.covers("R1-55", "R1-56")
async def test_a_session_nobody_knows_is_not_found_by_its_id() -> None:
    async with raw_client(Stored()) as raw:
        for method, params in (
            ("session/load", setup("nobody")),
            ("session/resume", setup("nobody")),
            ("session/prompt", {"sessionId": "nobody", "prompt": text("x")}),
            ("session/prompt", {"sessionId": "s1", "prompt": text("x")}),  # stored, but not open
            ("session/set_mode", {"sessionId": "nobody", "modeId": "a"}),
        ):
            answer = await raw.ask(method, params)
            assert answer["error"]["code"] == -32002
            assert answer["error"]["data"] == {"sessionId": params["sessionId"]}
        # A load that failed leaves nothing behind.
        answer = await raw.ask("session/prompt", {"sessionId": "nobody", "prompt": text("x")})
        assert answer["error"]["code"] == -32002


async def test_a_load_that_fails_after_its_history_is_forgotten_too() -> None:
    async with raw_client(Stored()) as raw:
        answer = await raw.ask("session/load", setup("s2"))  # the handler answers with no response
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        answer = await raw.ask("session/prompt", {"sessionId": "s2", "prompt": []})
        assert answer["error"]["code"] == -32002


async def test_a_failed_load_of_an_open_session_leaves_it_as_it_was() -> None:
    roots: list[Any] = []

    class Mine(Stored):
        async def prompt(self, turn: Turn) -> None:
            roots.append(turn.roots)

    agent = Mine()
    async with raw_client(agent) as raw:
        await raw.ask("session/resume", setup("s2", cwd="/first", additionalDirectories=["/a"]))
        answer = await raw.ask("session/load", setup("s2", cwd="/second"))
        assert answer["error"]["code"] == -32603
        raw.send(prompt(raw, "p", "s2"))
        await raw.answer_to("p")
    assert roots == [("/first", "/a")]


async def test_nothing_else_is_done_to_a_session_while_it_is_being_loaded() -> None:
    agent = Stored()
    agent.load_gate.clear()
    async with raw_client(agent) as raw:
        raw.send(raw.request("l", "session/load", setup("s1")))
        await asyncio.wait_for(agent.loading.wait(), 5)
        for method, params in (
            ("session/prompt", {"sessionId": "s1", "prompt": text("x")}),
            ("session/load", setup("s1")),
            ("session/resume", setup("s1")),
            ("session/close", {"sessionId": "s1"}),
        ):
            answer = await raw.ask(method, params)
            assert answer["error"]["code"] == -32600
            assert answer["error"]["message"] == "the session is being loaded"
        await opened(raw)  # another session does not wait
        agent.load_gate.set()
        assert "result" in await raw.answer_to("l")
        raw.send(prompt(raw, "p", "s1", "x"))
        assert "result" in await raw.answer_to("p")


@pytest.mark.covers("R1-98")
async def test_a_cancelled_load_is_forgotten() -> None:
    agent = Stored()
    agent.load_gate.clear()
    async with raw_client(agent) as raw:
        raw.send(raw.request("l", "session/load", setup("s1")))
        await asyncio.wait_for(agent.loading.wait(), 5)
        raw.send(cancel_request(raw, "l"))
        assert (await raw.answer_to("l"))["error"]["code"] == -32800
        answer = await raw.ask("session/prompt", {"sessionId": "s1", "prompt": text("x")})
        assert answer["error"]["code"] == -32002
        agent.load_gate.set()
        assert "result" in await raw.ask("session/load", setup("s1"))


async def test_history_is_replayed_before_the_answer_only() -> None:
    contexts: list[Any] = []

    class Keeping(Stored):
        async def load_session(self, params: Any, ctx: Any) -> Any:
            contexts.append(ctx)
            return await super().load_session(params, ctx)

    async with raw_client(Keeping()) as raw:
        await raw.ask("session/load", setup("s1"))
        with pytest.raises(TurnOver):
            await contexts[0].update(v1.AgentMessageChunk(content=v1.TextContent(text="late")))
        await contexts[0].update(v1.SessionInfoUpdate(title="t"))


@pytest.mark.covers("R1-58")
async def test_closing_cancels_the_turn_and_answers_it_first() -> None:
    agent = Stored()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "until cancelled"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(raw.request("c", "session/close", {"sessionId": session_id}))
        assert (await raw.answer_to("c"))["result"] == {}
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        assert order(raw)[-3:] == ["until cancelled", "p", "c"]
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": []})
        assert answer["error"]["code"] == -32002


@pytest.mark.parametrize("method", ["session/close", "session/delete"])
async def test_a_close_right_behind_a_prompt_ends_it_before_it_runs(method: str) -> None:
    agent = Stored()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(
            prompt(raw, "p", session_id, "x"),
            raw.request("c", method, {"sessionId": session_id}),
            prompt(raw, "q", session_id, "y"),
        )
        assert "result" in await raw.answer_to("c")
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        assert agent.texts == []
        assert (await raw.answer_to("q"))["error"]["code"] == -32600
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": []})
        assert answer["error"]["code"] == -32002


@pytest.mark.covers("R1-98")
async def test_a_close_that_is_cancelled_while_it_waits_leaves_the_session_to_its_turn() -> None:
    class Deaf(Stored):
        async def prompt(self, turn: Turn) -> None:
            self.waiting.set()
            await self.gate.wait()

    agent = Deaf()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(raw.request("c", "session/close", {"sessionId": session_id}))
        await raw.round_trip()
        second = await raw.ask("session/close", {"sessionId": session_id})
        assert second["error"]["message"] == "the session is being closed"
        raw.send(cancel_request(raw, "c"))
        assert (await raw.answer_to("c"))["error"]["code"] == -32800
        raw.send(prompt(raw, "q", session_id))
        assert (await raw.answer_to("q"))["error"]["message"] == "prompt already in flight"
        agent.gate.set()
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        raw.send(prompt(raw, "r", session_id))
        assert (await raw.answer_to("r"))["result"] == {"stopReason": "end_turn"}


async def test_closing_is_bounded_by_the_back_stop_and_takes_no_prompt_meanwhile() -> None:
    agent = Stored()
    async with raw_client(agent, limits=Limits(cancel_backstop=0.05)) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "wait"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(raw.request("c", "session/close", {"sessionId": session_id}))
        answer = await raw.ask("session/close", {"sessionId": session_id})
        assert answer["error"]["code"] == -32600
        assert "result" in await raw.answer_to("c")
        assert order(raw)[-2:] == ["p", "c"]


@pytest.mark.covers("R1-59", "R1-60", "R1-61")
async def test_what_a_handler_says_about_closing_and_deleting_counts() -> None:
    class Mine(Stored):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            return v1.NewSessionResponse(session_id="bad")

    async with raw_client(Mine()) as raw:
        await opened(raw)
        assert "error" in await raw.ask("session/close", {"sessionId": "bad"})
        raw.send(prompt(raw, "p", "bad", "still here"))
        assert "result" in await raw.answer_to("p")
        assert "result" in await raw.ask("session/close", {"sessionId": "unknown"})
        for _ in range(2):
            assert (await raw.ask("session/delete", {"sessionId": "s1"}))["result"] == {}
        listed = await raw.ask("session/list", {})
        assert [info["sessionId"] for info in listed["result"]["sessions"]] == ["s2"]
        assert "result" in await raw.ask("session/delete", {"sessionId": "bad"})
        answer = await raw.ask("session/prompt", {"sessionId": "bad", "prompt": []})
        assert answer["error"]["code"] == -32002


async def test_a_fork_opens_a_session_of_its_own() -> None:
    class Forking(Optional):
        async def fork_session(
            self, params: v1_unstable.ForkSessionRequest, ctx: AgentContext
        ) -> v1_unstable.ForkSessionResponse:
            if params.session_id == "nobody":
                raise ResourceNotFound({"sessionId": "nobody"})
            return v1_unstable.ForkSessionResponse(
                session_id=f"fork of {params.session_id}", config_options=list(OPTIONS)
            )

    async with raw_client(Forking(), unstable=True) as raw:
        source = await opened(raw)
        fork: dict[str, Any] = {"sessionId": source, "cwd": "/fork", "mcpServers": []}
        answer = await raw.ask("session/fork", {**fork, "cwd": "fork"})
        assert answer["error"]["data"]["reason"] == "path_not_absolute"
        answer = await raw.ask("session/fork", fork)
        assert [o["id"] for o in answer["result"]["configOptions"]] == ["model", "grouped"]
        for id_, session_id in (("a", source), ("b", answer["result"]["sessionId"])):
            raw.send(prompt(raw, id_, session_id, id_))
            assert "result" in await raw.answer_to(id_)
            assert updates(raw, session_id) == [id_]
        answer = await raw.ask("session/fork", {**fork, "sessionId": "nobody"})
        assert answer["error"]["code"] == -32002


# ------------------------------------------------------------------ modes and options


MODES = [v1.SessionMode(id="ask", name="Ask"), v1.SessionMode(id="code", name="Code")]
OPTIONS: list[v1_unstable.SessionConfigOption] = [
    v1.SessionConfigSelect(
        id="model",
        name="Model",
        current_value="a",
        options=[
            v1.SessionConfigSelectOption(value="a", name="A"),
            v1.SessionConfigSelectOption(value="b", name="B"),
        ],
    ),
    v1.SessionConfigSelect(
        id="grouped",
        name="Grouped",
        current_value="x",
        options=[
            v1.SessionConfigSelectGroup(
                group="g", name="G", options=[v1.SessionConfigSelectOption(value="x", name="X")]
            )
        ],
    ),
    v1.SessionConfigBoolean(id="fast", name="Fast", current_value=False),
]
BOOLEAN: dict[str, Any] = {"session": {"configOptions": {"boolean": {}}}}


class Optional(Echo):
    capabilities = Capabilities(modes=MODES, config_options=OPTIONS)


@pytest.mark.covers("R1-119", "R1-120", "R1-121", "R1-122", "R1-123")
async def test_declared_modes_and_options_are_kept_per_session() -> None:
    async with raw_client(Optional(), BOOLEAN) as raw:
        first = (await raw.ask("session/new", NEW))["result"]
        second = (await raw.ask("session/new", NEW))["result"]
        assert [m["id"] for m in first["modes"]["availableModes"]] == ["ask", "code"]
        assert first["modes"]["currentModeId"] == "ask"
        assert [(o["id"], o["currentValue"]) for o in first["configOptions"]] == [
            ("model", "a"),
            ("grouped", "x"),
            ("fast", False),
        ]
        one, two = first["sessionId"], second["sessionId"]

        async def change(session_id: str, config_id: str, value: Any) -> Any:
            params = {"sessionId": session_id, "configId": config_id, "value": value}
            if isinstance(value, bool):
                params["type"] = "boolean"
            answer = await raw.ask("session/set_config_option", params)
            if "error" in answer:
                return answer["error"]["code"]
            return [o["currentValue"] for o in answer["result"]["configOptions"]]

        assert await change(one, "model", "b") == ["b", "x", False]
        assert await change(one, "fast", True) == ["b", "x", True]
        assert await change(one, "grouped", "x") == ["b", "x", True]
        assert await change(two, "model", "a") == ["a", "x", False]
        for config_id, value in (
            ("nope", "a"),
            ("model", "c"),
            ("model", True),
            ("fast", "yes"),
            ("grouped", "g"),
        ):
            assert await change(one, config_id, value) == -32602
        assert await change("nobody", "model", "a") == -32002
        for mode, code in (("code", None), ("zz", -32602), ("", -32602)):
            answer = await raw.ask("session/set_mode", {"sessionId": one, "modeId": mode})
            assert answer.get("error", {}).get("code") == code
        # A new session begins as declared.
        third = (await raw.ask("session/new", NEW))["result"]
        assert third["modes"]["currentModeId"] == "ask"
        assert third["configOptions"][0]["currentValue"] == "a"
    assert OPTIONS[0].current_value == "a"


@pytest.mark.covers("R1-35")
async def test_boolean_options_are_sent_only_to_a_client_that_takes_them() -> None:
    shared = v1.NewSessionResponse(session_id="s", config_options=list(OPTIONS))

    class Fixed(Optional):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            return shared

        async def resume_session(self, params: Any, ctx: Any) -> v1.ResumeSessionResponse:
            return v1.ResumeSessionResponse(config_options=list(OPTIONS))

        async def prompt(self, turn: Turn) -> None:
            await turn.session.set_config_options(OPTIONS)
            await turn.send(v1.ConfigOptionUpdate(config_options=list(OPTIONS)))

    agent = Fixed()
    without, full = ["model", "grouped"], ["model", "grouped", "fast"]
    null: dict[str, Any] = {"session": {"configOptions": {"boolean": None}}}
    for offered, ids in (
        ({}, without),
        (BOOLEAN, full),
        (null, without),
    ):
        async with raw_client(agent, offered) as raw:
            lists = [
                (await raw.ask("session/new", NEW))["result"],
                (await raw.ask("session/resume", setup("r")))["result"],
            ]
            change = {"sessionId": "s", "configId": "model", "value": "b"}
            lists += [(await raw.ask("session/set_config_option", change))["result"]]
            raw.send(prompt(raw, "p", "s"))
            await raw.answer_to("p")
            lists += [frame["params"]["update"] for frame in raw.sent("session/update")]
            assert [[o["id"] for o in told["configOptions"]] for told in lists] == [ids] * 5
            refused = {**change, "configId": "fast", "type": "boolean", "value": True}
            answer = await raw.ask("session/set_config_option", refused)
            assert ("error" in answer) is (ids == without)
    assert isinstance(shared.config_options, list)
    assert len(shared.config_options) == 3  # the handler's own objects are not changed
    assert OPTIONS[0].current_value == "a"


async def test_a_mode_state_given_to_many_sessions_is_not_changed_by_one() -> None:
    shared = v1.SessionModeState(current_mode_id="ask", available_modes=MODES)

    class Sharing(Optional):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            response = await super().new_session(params, ctx)
            return v1.NewSessionResponse(session_id=response.session_id, modes=shared)

    async with raw_client(Sharing()) as raw:
        session_id = await opened(raw)
        answer = await raw.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"})
        assert "result" in answer
    assert shared.current_mode_id == "ask"


async def test_a_session_that_says_it_has_no_modes_or_options_takes_none() -> None:
    class Bare(Optional):
        async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
            return v1.NewSessionResponse(session_id="s", modes=None, config_options=None)

    async with raw_client(Bare()) as raw:
        await opened(raw)
        for method, params in (
            ("session/set_mode", {"sessionId": "s", "modeId": "ask"}),
            ("session/set_config_option", {"sessionId": "s", "configId": "model", "value": "a"}),
        ):
            assert (await raw.ask(method, params))["error"]["code"] == -32602


# ------------------------------------------------------------------ prompts


@pytest.mark.covers("R1-79", "R1-80")
async def test_only_content_that_was_advertised_is_taken() -> None:
    class Seeing(Echo):
        capabilities = Capabilities(image=True)

    async with raw_client(Seeing()) as raw:
        session_id = await opened(raw)
        link = {"type": "resource_link", "uri": "file:///a", "name": "a"}
        image = {"type": "image", "data": "", "mimeType": "image/png"}
        audio = {"type": "audio", "data": "", "mimeType": "audio/wav"}
        resource = {"type": "resource", "resource": {"uri": "file:///a", "text": "x"}}
        for blocks, missing in (
            ([*text("a"), link, image], None),
            ([], None),
            ([*text("a"), audio], "audio"),
            ([resource, audio], "embeddedContext"),
        ):
            params = {"sessionId": session_id, "prompt": blocks}
            answer = await raw.ask("session/prompt", params)
            if missing is None:
                assert answer["result"]["stopReason"] == "end_turn"
            else:
                assert answer["error"]["code"] == -32602
                assert answer["error"]["data"]["capability"] == missing


@pytest.mark.covers("R1-81", "R1-82")
@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        (None, {"stopReason": "end_turn"}),
        ("refusal", {"stopReason": "refusal"}),
        ("max_tokens", {"stopReason": "max_tokens"}),
        (v1.PromptResponse(stop_reason="max_turn_requests"), {"stopReason": "max_turn_requests"}),
        (
            v1_unstable.PromptResponse(
                stop_reason="end_turn",
                usage=v1_unstable.Usage(total_tokens=3, input_tokens=1, output_tokens=2),
            ),
            {
                "stopReason": "end_turn",
                "usage": {"totalTokens": 3, "inputTokens": 1, "outputTokens": 2},
            },
        ),
    ],
)
async def test_what_prompt_returns_is_the_answer(returned: Any, answer: Any) -> None:
    class Mine(Agent):
        async def prompt(self, turn: Turn) -> Any:
            await turn.say("x")
            return returned

    async with raw_client(Mine()) as raw:
        raw.send(prompt(raw, "p", await opened(raw)))
        assert (await raw.answer_to("p"))["result"] == answer
        assert order(raw)[-2:] == ["x", "p"]


async def test_a_response_with_a_number_that_json_cannot_say_is_an_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mine(Agent):
        async def prompt(self, turn: Turn) -> Any:
            return v1.PromptResponse(stop_reason="end_turn", meta={"score": float("nan")})

    async with raw_client(Mine()) as raw:
        raw.send(prompt(raw, "p", await opened(raw)))
        answer = await raw.answer_to("p")
    assert answer["error"] == {"code": -32603, "message": "Internal error"}
    assert "NaN" in caplog.text


@pytest.mark.covers("FF-29")
@pytest.mark.parametrize(
    "returned", [5, True, {"stopReason": "end_turn"}, [], v1.NewSessionRequest, "Hello!", ""]
)
async def test_what_prompt_must_not_return_is_an_internal_error_and_frees_the_session(
    returned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Echo):
        async def prompt(self, turn: Turn) -> Any:
            return returned if turn.text == "odd" else await super().prompt(turn)

    async with raw_client(Mine()) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "odd"))
        answer = await raw.answer_to("p")
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert "prompt returned" in caplog.text
        raw.send(prompt(raw, "q", session_id, "x"))
        assert "result" in await raw.answer_to("q")


async def test_an_agent_without_prompt_says_so() -> None:
    async with raw_client(Agent()) as raw:
        raw.send(prompt(raw, "p", await opened(raw)))
        assert (await raw.answer_to("p"))["error"]["code"] == -32601


@pytest.mark.covers("I12", "FF-28")
async def test_a_second_prompt_is_refused_and_the_first_unharmed() -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        one, two = await opened(raw), await opened(raw)
        raw.send(
            prompt(raw, "p1", one, "wait"),
            prompt(raw, "p2", one, "again"),
            prompt(raw, "q", two, "other"),
        )
        refused = (await raw.answer_to("p2"))["error"]
        assert (refused["code"], refused["message"]) == (-32600, "prompt already in flight")
        assert refused["data"] == {"sessionId": one}
        assert "result" in await raw.answer_to("q")
        assert agent.texts == ["wait", "other"]
        agent.gate.set()
        assert (await raw.answer_to("p1"))["result"] == {"stopReason": "end_turn"}
        raw.send(prompt(raw, "p3", one, "third"))
        assert "result" in await raw.answer_to("p3")
        assert updates(raw, one) == ["wait", "third"]


@pytest.mark.covers("FF-28")
@pytest.mark.parametrize("how", ["raise", "until cancelled", "wait"])
async def test_a_turn_that_failed_or_was_cancelled_makes_room_for_the_next(how: str) -> None:
    agent = Echo()
    async with raw_client(agent, limits=Limits(cancel_backstop=0.05)) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p1", session_id, how))
        if how != "raise":
            await asyncio.wait_for(agent.waiting.wait(), 5)
            raw.send(cancel(raw, session_id))
        first = await raw.answer_to("p1")
        if how == "raise":
            assert first["error"] == {"code": -32603, "message": "Internal error"}
        else:
            assert first["result"] == {"stopReason": "cancelled"}
        raw.send(prompt(raw, "p2", session_id, "next"))
        assert (await raw.answer_to("p2"))["result"] == {"stopReason": "end_turn"}


@pytest.mark.covers("FF-14")
async def test_a_turn_does_not_hold_up_other_sessions_or_its_own_requests() -> None:
    """Field fault 14: one waiting request blocks nothing."""
    agent = Optional()
    async with raw_client(agent) as raw:
        one = await opened(raw)
        raw.send(prompt(raw, "p1", one, "wait"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        two = await opened(raw)
        raw.send(prompt(raw, "p2", two, "x"))
        assert "result" in await raw.answer_to("p2")
        answer = await raw.ask("session/set_mode", {"sessionId": one, "modeId": "code"})
        assert "result" in answer
        agent.gate.set()
        await raw.answer_to("p1")


# ------------------------------------------------------------------ cancellation


@pytest.mark.covers("R1-95", "FF-25")
async def test_a_cancel_in_the_same_write_as_the_prompt_hits_it() -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "wait"), cancel(raw, session_id))
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        assert agent.texts == []  # born cancelled: nothing was run
        raw.send(cancel(raw, session_id), prompt(raw, "q", session_id, "next"))
        assert (await raw.answer_to("q"))["result"] == {"stopReason": "end_turn"}


@pytest.mark.covers("I16", "R1-95", "R1-98", "FF-24", "FF-25")
@pytest.mark.parametrize("how", ["session/cancel", "$/cancel_request"])
async def test_a_prompt_behind_one_that_was_cancelled_before_it_began_runs(how: str) -> None:
    """One write: nothing was run for the first, so that there is nothing to wait for."""
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        stop = cancel(raw, session_id) if how == "session/cancel" else cancel_request(raw, 7)
        raw.send(
            prompt(raw, 7, session_id, "first"),
            stop,
            stop,
            prompt(raw, 8, session_id, "second"),
        )
        assert (await raw.answer_to(7))["result"] == {"stopReason": "cancelled"}
        assert (await raw.answer_to(8))["result"] == {"stopReason": "end_turn"}
        assert agent.texts == ["second"]
        # The same id: it was free at once.
        stop = cancel(raw, session_id) if how == "session/cancel" else cancel_request(raw, 9)
        raw.send(prompt(raw, 9, session_id, "third"), stop, prompt(raw, 9, session_id, "fourth"))
        await raw.wait(None, len(raw.sent(None)) + 2)
        await raw.round_trip()
        answers = [frame["result"]["stopReason"] for frame in raw.sent(None) if frame["id"] == 9]
        assert answers == ["cancelled", "end_turn"]
        assert agent.texts == ["second", "fourth"]
        assert updates(raw, session_id) == ["second", "fourth"]


@pytest.mark.covers("I6", "FF-24")
async def test_a_cancel_right_behind_the_end_of_a_turn_does_not_hit_the_next() -> None:
    """Both were on their way when the turn ended, at whatever moment that was seen."""
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        for number in range(20):
            raw.send(prompt(raw, f"p{number}", session_id, "x"))
            await raw.answer_to(f"p{number}")
            raw.send(
                cancel(raw, session_id),
                cancel_request(raw, f"p{number}"),
                prompt(raw, f"q{number}", session_id, "y"),
            )
            assert (await raw.answer_to(f"q{number}"))["result"] == {"stopReason": "end_turn"}
        assert agent.texts == ["x", "y"] * 20


@pytest.mark.covers("FF-24")
async def test_a_cancel_of_nothing_does_nothing() -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        before = len(raw.frames)
        raw.send(
            cancel(raw, session_id),
            cancel(raw, "nobody"),
            raw.notification("session/cancel", {}),
            raw.notification("session/cancel", None),
            raw.notification("session/cancel", {"sessionId": 5}),
        )
        raw.send(prompt(raw, "p", session_id, "x"), cancel(raw, "nobody"))
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "end_turn"}
        raw.send(cancel(raw, session_id), cancel(raw, session_id))
        raw.send(prompt(raw, "q", session_id, "y"))
        assert (await raw.answer_to("q"))["result"] == {"stopReason": "end_turn"}
        assert len(raw.frames) == before + 4


@pytest.mark.covers("I7", "R1-6", "R1-96")
async def test_cancelled_twice_is_answered_once() -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "until cancelled"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(
            cancel(raw, session_id),
            cancel_request(raw, "p"),
            cancel(raw, session_id),
            cancel_request(raw, "p"),
        )
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        raw.send(cancel(raw, session_id), cancel_request(raw, "p"))
        await raw.round_trip()
        assert order(raw).count("p") == 1


async def test_an_agent_may_listen_to_cancellation_itself() -> None:
    heard: list[str] = []

    class Listening(Echo):
        async def cancel(self, params: Any, ctx: Any) -> None:
            heard.append(params.session_id)
            raise RuntimeError("is only logged")

    agent = Listening()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "until cancelled"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(cancel(raw, session_id), cancel(raw, "nobody"))
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
    assert heard == [session_id]


class Storing(Echo):
    """Loads, resumes, closes and deletes, and says what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    async def load_session(self, params: Any, ctx: AgentContext) -> v1.LoadSessionResponse:
        self.did.append("load")
        return v1.LoadSessionResponse()

    async def resume_session(self, params: Any, ctx: AgentContext) -> v1.ResumeSessionResponse:
        self.did.append("resume")
        return v1.ResumeSessionResponse()

    async def close_session(self, params: Any, ctx: AgentContext) -> v1.CloseSessionResponse:
        self.did.append("close")
        return v1.CloseSessionResponse()

    async def delete_session(self, params: Any, ctx: AgentContext) -> v1.DeleteSessionResponse:
        self.did.append("delete")
        return v1.DeleteSessionResponse()


DOINGS = {"load": "loaded", "resume": "loaded", "close": "closed", "delete": "closed"}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("doing", DOINGS)
async def test_a_prompt_right_behind_what_happens_to_its_session_comes_too_early(
    doing: str, known: bool
) -> None:
    """In the order of the wire: it is the prompt that is refused, and not what was asked first."""
    agent = Storing()
    async with raw_client(agent) as raw:
        session_id = await opened(raw) if known else "stored"
        params = {"sessionId": session_id, **NEW}
        raw.send(raw.request(1, f"session/{doing}", params), prompt(raw, 2, session_id, "x"))
        refused = (await raw.answer_to(2))["error"]
        if known or DOINGS[doing] == "loaded":
            expected = (-32600, f"the session is being {DOINGS[doing]}")
        else:
            expected = (-32002, "Session not found")
        assert (refused["code"], refused["message"]) == expected
        assert "result" in await raw.answer_to(1)
        assert agent.did == [doing]
        assert agent.texts == []


@pytest.mark.covers("R1-98")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("doing", DOINGS)
async def test_what_is_cancelled_before_its_task_begins_has_done_nothing_to_the_session(
    doing: str, known: bool
) -> None:
    agent = Storing()
    async with raw_client(agent) as raw:
        session_id = await opened(raw) if known else "stored"
        params = {"sessionId": session_id, **NEW}
        raw.send(raw.request(1, f"session/{doing}", params), cancel_request(raw, 1))
        assert (await raw.answer_to(1))["error"]["code"] == -32800
        assert agent.did == []
        answer = await raw.ask("session/prompt", {"sessionId": session_id, "prompt": []})
        assert ("result" in answer) == known
        # A later one is served.
        assert "result" in await raw.ask(f"session/{doing}", params)
        assert agent.did == [doing]


async def test_a_listener_to_cancellation_that_hangs_is_no_way_to_fill_the_memory() -> None:
    """It is a handler of a notification: one at a time, in order, and within their bounds."""
    heard: list[int] = []
    shed: list[str] = []
    gate = asyncio.Event()

    class Listening(Echo):
        async def cancel(self, params: Any, ctx: AgentContext) -> None:
            await gate.wait()
            heard.append(ctx.rx_seq)

    def watch(event: TelemetryEvent) -> None:
        shed.append(event.name)

    limits = Limits(queue_notifications=10, notification_timeout=0.05)
    agent = Listening()
    async with raw_client(agent, limits=limits, telemetry=watch) as raw:
        session_id = await opened(raw)
        await raw.round_trip()
        before = len(asyncio.all_tasks())
        for _ in range(10):
            raw.send(*[cancel(raw, session_id)] * 10)
            await raw.round_trip()
        assert len(asyncio.all_tasks()) <= before + 1
        assert "notification_shed" in shed
        # Turns are cancelled all the same.
        raw.send(prompt(raw, "p", session_id, "until cancelled"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(cancel(raw, session_id))
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
        gate.set()
        await raw.round_trip()
        assert 10 <= len(heard) <= 30
        assert heard == sorted(heard)


@pytest.mark.covers("I17", "R1-98", "R1-100")
@pytest.mark.parametrize("moment", ["before its task", "while it runs", "when it is over"])
async def test_cancelling_the_request_of_a_prompt_cancels_its_turn(moment: str) -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        if moment == "before its task":
            raw.send(prompt(raw, 7, session_id, "wait"), cancel_request(raw, 7))
            expected = "cancelled"
        elif moment == "while it runs":
            raw.send(prompt(raw, 7, session_id, "until cancelled"))
            await asyncio.wait_for(agent.waiting.wait(), 5)
            raw.send(cancel_request(raw, "7"), cancel_request(raw, 7.0))  # other ids
            await raw.round_trip()
            assert not order(raw).count(7)
            raw.send(cancel_request(raw, 7))
            expected = "cancelled"
        else:
            raw.send(prompt(raw, 7, session_id, "x"))
            await raw.answer_to(7)
            raw.send(cancel_request(raw, 7))
            expected = "end_turn"
        assert (await raw.answer_to(7))["result"] == {"stopReason": expected}
        raw.send(prompt(raw, 8, session_id, "next"))
        assert (await raw.answer_to(8))["result"] == {"stopReason": "end_turn"}
        assert order(raw).count(7) == 1


class Slow(Stored):
    """Every request waits until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.began = asyncio.Event()

    async def _wait(self, name: str) -> Any:
        self.ran.append(name)
        self.began.set()
        await asyncio.Event().wait()

    async def new_session(self, params: Any, ctx: Any) -> Any:
        return await self._wait("session/new")

    async def resume_session(self, params: Any, ctx: Any) -> Any:
        return await self._wait("session/resume")

    async def list_sessions(self, params: Any, ctx: Any) -> Any:
        return await self._wait("session/list")

    async def close_session(self, params: Any, ctx: Any) -> Any:
        return await self._wait("session/close")

    async def logout(self, params: Any, ctx: Any) -> Any:
        return await self._wait("logout")

    @extension("_x/slow")
    async def slow(self, params: Any, ctx: Any) -> Any:
        return await self._wait("_x/slow")


@pytest.mark.covers("R1-98", "R1-99")
@pytest.mark.parametrize(
    "method",
    ["session/new", "session/resume", "session/list", "session/close", "logout", "_x/slow"],
)
async def test_any_request_can_be_cancelled_at_any_moment(method: str) -> None:
    agent = Slow()
    async with raw_client(agent) as raw:
        params = setup("s1")
        raw.send(raw.request(1, method, params), cancel_request(raw, 1))
        assert (await raw.answer_to(1))["error"]["code"] == -32800
        assert agent.ran == []  # it had not begun
        raw.send(raw.request(2, method, params))
        await asyncio.wait_for(agent.began.wait(), 5)
        raw.send(cancel_request(raw, 2), cancel_request(raw, 2))
        assert (await raw.answer_to(2))["error"]["code"] == -32800
        assert agent.ran == [method]
        answer = await raw.ask("session/prompt", {"sessionId": "s1", "prompt": text("x")})
        assert answer["error"]["code"] == -32002


@pytest.mark.covers("R1-94", "R1-97")
async def test_a_turn_whose_client_goes_is_cancelled_and_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []

    class Mine(Echo):
        async def prompt(self, turn: Turn) -> None:
            async def subtask() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("subtask")

            turn.start_soon(subtask())
            self.waiting.set()
            await turn.wait_cancelled()
            ended.append("prompt")

    agent = Mine()
    async with raw_client(agent) as raw:
        raw.send(prompt(raw, "p", await opened(raw)))
        await asyncio.wait_for(agent.waiting.wait(), 5)
    assert sorted(ended) == ["prompt", "subtask"]
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_what_a_cancelled_turn_has_used_is_told_all_the_same() -> None:
    class Counting(Echo):
        async def prompt(self, turn: Turn) -> Any:
            self.waiting.set()
            await turn.wait_cancelled()
            usage = v1_unstable.Usage(total_tokens=3, input_tokens=1, output_tokens=2)
            return v1_unstable.PromptResponse(
                stop_reason="end_turn", usage=usage, meta={"example.com": 1}
            )

    agent = Counting()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(cancel(raw, session_id))
        assert (await raw.answer_to("p"))["result"] == {
            "stopReason": "cancelled",
            "usage": {"totalTokens": 3, "inputTokens": 1, "outputTokens": 2},
            "_meta": {"example.com": 1},
        }


async def test_a_client_that_goes_right_behind_its_prompt_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Echo()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(
            prompt(raw, "p", session_id, "wait"),
            cancel(raw, session_id),
            prompt(raw, "q", session_id, "wait"),
        )
        await raw.transport.aclose()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_without_a_back_stop_s_time_a_cancelled_turn_ends_at_once() -> None:
    ended: list[str] = []

    class Slow(Echo):
        async def prompt(self, turn: Turn) -> None:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled" if turn.cancelled and turn.over else "not told")

    agent = Slow()
    async with raw_client(agent, limits=Limits(cancel_backstop=0)) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(cancel(raw, session_id))
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled"}
    assert ended == ["cancelled"]


@pytest.mark.covers("R1-94", "FF-29")
@pytest.mark.parametrize("ends", ["in time", "at the back-stop"])
@pytest.mark.parametrize(
    "cost", [1, float("nan"), object(), "x" * 5000], ids=lambda v: type(v).__name__
)
async def test_what_a_turn_has_used_is_told_unless_it_cannot_be(
    cost: Any, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the answer is `cancelled` all the same, and no error."""
    tellable = cost == 1

    class Counting(Echo):
        async def prompt(self, turn: Turn) -> Any:
            in_time = ends == "in time"
            turn.start_soon(turn.wait_cancelled() if in_time else asyncio.Event().wait())
            self.waiting.set()
            return v1.PromptResponse(stop_reason="refusal", meta={"example.com/cost": cost})

    agent = Counting()
    limits = Limits(cancel_backstop=30 if ends == "in time" else 0.02, frame_bytes=5000)
    async with raw_client(agent, limits=limits) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        await raw.round_trip()
        raw.send(cancel(raw, session_id))
        more = {"_meta": {"example.com/cost": 1}} if tellable else {}
        assert (await raw.answer_to("p"))["result"] == {"stopReason": "cancelled", **more}
    assert ("cannot be told" in caplog.text) != tellable


async def test_a_handler_that_cancels_itself_ends_its_turn_and_its_subtasks() -> None:
    """Nobody asked for it, so it is not `cancelled` to the client (R1-99)."""
    ended = asyncio.Event()

    class Own(Echo):
        async def prompt(self, turn: Turn) -> None:
            async def beside() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    with pytest.raises(TurnOver):
                        await turn.say("late")
                    ended.set()

            turn.start_soon(beside())
            await asyncio.sleep(0)
            if turn.text == "x":
                raise asyncio.CancelledError

    async with raw_client(Own()) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "x"))
        assert (await raw.answer_to("p"))["error"]["code"] == -32800
        await asyncio.wait_for(ended.wait(), 5)
        raw.send(prompt(raw, "q", session_id, "y"))
        await raw.round_trip()
        raw.send(cancel(raw, session_id), raw.request("c", "session/new", NEW))
        await raw.answer_to("c")
        assert [frame["id"] for frame in raw.sent(None) if frame["id"] in "pq"] == ["p"]


@pytest.mark.covers("R1-94", "R1-97")
async def test_subtasks_of_a_cancelled_turn_may_finish_until_the_back_stop() -> None:
    ended: list[str] = []

    class Parallel(Echo):
        async def prompt(self, turn: Turn) -> None:
            async def flush() -> None:
                await turn.wait_cancelled()
                await turn.say("flushed by a subtask")
                ended.append("flush")

            async def deaf() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("deaf")

            turn.start_soon(flush())
            if turn.text == "deaf":
                turn.start_soon(deaf())
            self.waiting.set()

    agent = Parallel()
    async with raw_client(agent, limits=Limits(cancel_backstop=0.1)) as raw:
        session_id = await opened(raw)
        for text_, expected in (("quick", ["flush"]), ("deaf", ["flush", "deaf"])):
            ended.clear()
            agent.waiting.clear()
            raw.send(prompt(raw, text_, session_id, text_))
            await asyncio.wait_for(agent.waiting.wait(), 5)
            raw.send(cancel(raw, session_id))
            assert (await raw.answer_to(text_))["result"] == {"stopReason": "cancelled"}
            await raw.round_trip()
            assert ended == expected
            assert order(raw)[-3:-1] == ["flushed by a subtask", text_]


async def test_nothing_is_kept_of_what_is_over() -> None:
    turns: list[Turn] = []

    class Noting(Stored):
        async def prompt(self, turn: Turn) -> None:
            turns.append(turn)
            await turn.say("x")
            if turn.text == "until cancelled":
                self.waiting.set()
                await turn.wait_cancelled()

    agent = Noting()
    async with raw_client(agent) as raw:
        session_id = await opened(raw)
        raw.send(prompt(raw, "p", session_id, "until cancelled"))
        await asyncio.wait_for(agent.waiting.wait(), 5)
        raw.send(cancel(raw, session_id))
        await raw.answer_to("p")
        for number in range(20):
            raw.send(prompt(raw, number, session_id, "x"), cancel_request(raw, number))
            raw.send(raw.request(f"l{number}", "session/load", setup("nobody")))
            await raw.answer_to(f"l{number}")
            await raw.answer_to(number)
        assert "result" in await raw.ask("session/close", {"sessionId": session_id})
        connection = turns[0].peer.connection
        assert turns[0].peer.sessions == {}
        assert (connection.protocol.requests, connection.protocol.calls) == ({}, {})
        assert connection.queued_bytes == 0
        assert connection.tasks == set()
        assert turns[0].backstop is not None
        assert turns[0].backstop.cancelled()


# ------------------------------------------------------------------ extensions and _meta


@pytest.mark.covers("R1-155", "R1-156", "R1-157")
async def test_extensions_get_plain_values_and_their_own_errors() -> None:
    told: list[Any] = []

    class Mine(Echo):
        @extension("_v/echo")
        async def echo(self, params: Any, ctx: AgentContext) -> Any:
            return {"params": params, "raw": ctx.raw.decode()}

        @extension("_v/nothing")
        async def nothing(self, params: Any, ctx: Any) -> None:
            return None

        @extension("_v/typed", params=v1.TextContent)
        async def typed(self, params: v1.TextContent, ctx: Any) -> Any:
            return [params.text]

        @extension("_v/fails")
        async def fails(self, params: Any, ctx: Any) -> Any:
            raise RequestError.of(-1, "mine", {"k": [None]})

        @extension("_v/breaks")
        async def breaks(self, params: Any, ctx: Any) -> Any:
            raise ValueError("a secret")

        @extension("_v/tell", kind="notification")
        async def tell(self, params: Any, ctx: Any) -> None:
            told.append(params)
            if params == "bad":
                raise ValueError("a secret")

    async with raw_client(Mine()) as raw:
        meta = {"a": [1, None], "_meta": {"traceparent": "00-x"}}
        answer = await raw.ask("_v/echo", meta)
        assert answer["result"]["params"] == meta
        assert '"traceparent"' in answer["result"]["raw"]
        assert (await raw.ask("_v/echo", None))["result"] == {"params": None, "raw": "{}"}
        assert (await raw.ask("_v/nothing", []))["result"] == {}
        assert (await raw.ask("_v/typed", {"type": "text", "text": "x"}))["result"] == ["x"]
        assert (await raw.ask("_v/typed", {"type": "text"}))["error"]["code"] == -32602
        assert (await raw.ask("_v/typed", None))["error"]["code"] == -32602
        assert (await raw.ask("_v/fails", {}))["error"] == {
            "code": -1,
            "message": "mine",
            "data": {"k": [None]},
        }
        answer = await raw.ask("_v/breaks", {})
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        # The kinds are told apart: what is a notification is no request, and the other way round.
        assert (await raw.ask("_v/tell", 1))["error"]["code"] == -32601
        before = len(raw.frames)
        raw.send(
            *(raw.notification("_v/tell", value) for value in (1, "bad", [2], None)),
            raw.notification("_v/echo", 3),
            raw.notification("_v/unknown", 4),
        )
        await raw.round_trip()
        assert len(raw.frames) == before + 1
    assert told == [1, "bad", [2], None]


@pytest.mark.covers("R1-156", "R1-158")
async def test_meta_and_unknown_members_reach_a_handler_and_never_its_arguments() -> None:
    seen: list[Any] = []

    class Mine(Echo):
        async def new_session(
            self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
        ) -> v1.NewSessionResponse:
            seen.append((params.meta, b"zzz" in ctx.raw, ctx.method, ctx.session_id))
            return await super().new_session(params, ctx)

    async with raw_client(Mine()) as raw:
        await opened(raw, _meta={"cwd": "/evil", "ctx": 1}, zzz=1, cwd_="/evil")
        await opened(raw, _meta="bad")
        await opened(raw, _meta=None)
    assert seen[0] == ({"cwd": "/evil", "ctx": 1}, True, "session/new", "")
    assert len(seen) == 3


# ------------------------------------------------------------------ any order of anything


ACTS = st.sampled_from(["prompt", "prompt", "cancel", "cancel request", "close", "finish", "wait"])


@settings(max_examples=60)
@given(st.lists(st.tuples(ACTS, st.integers(0, 1)), max_size=25))
async def test_in_any_order_of_prompts_cancels_and_closes_each_request_gets_one_answer(
    steps: list[tuple[str, int]],
) -> None:
    """Two sessions of one connection; updates of each in order, none lost, none after its answer."""
    gates: dict[str, asyncio.Event] = {}
    told: dict[str, list[str]] = {}

    class Counting(Stored):
        async def prompt(self, turn: Turn) -> None:
            said = told.setdefault(turn.session_id, [])
            for part in range(3):
                said.append(f"{turn.text}.{part}")
                await turn.say(said[-1])
                if part == 1:
                    gate = gates[turn.text] = asyncio.Event()
                    waiting = [
                        asyncio.ensure_future(gate.wait()),
                        asyncio.ensure_future(turn.wait_cancelled()),
                    ]
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for wait in waiting:
                        wait.cancel()

    sent: list[str] = []
    async with raw_client(Counting()) as raw:
        sessions = [await opened(raw), await opened(raw)]
        for number, (act, which) in enumerate(steps):
            session_id = sessions[which]
            id_ = f"{act}-{number}"
            if act == "prompt":
                sent.append(id_)
                raw.send(prompt(raw, id_, session_id, f"{number}"))
            elif act == "cancel":
                raw.send(cancel(raw, session_id))
            elif act == "cancel request" and sent:
                raw.send(cancel_request(raw, sent[-1]))
            elif act == "close":
                sent.append(id_)
                raw.send(raw.request(id_, "session/close", {"sessionId": session_id}))
            elif act == "finish":
                for gate in gates.values():
                    gate.set()
            elif act == "wait":
                await raw.round_trip()
        # Whatever is open still now ends by being closed.
        for which, session_id in enumerate(sessions):
            sent.append(f"last-{which}")
            raw.send(raw.request(sent[-1], "session/close", {"sessionId": session_id}))
        for id_ in sent:
            await raw.answer_to(id_)
        answered = [frame["id"] for frame in raw.sent(None)]
        assert sorted(id_ for id_ in answered if id_ in sent) == sorted(sent)
        assert len(answered) == len(set(answered))
        for session_id in sessions:
            assert updates(raw, session_id) == told.get(session_id, [])
        positions = {entry: index for index, entry in enumerate(order(raw))}
        for entry, position in positions.items():
            if "." in str(entry):
                assert position < positions[f"prompt-{str(entry).split('.')[0]}"]


# ------------------------------------------------------------------ a turn in a coroutine of its own


class _Around(AgentRouter):
    """Serves turns as a side does that has something to do around them: in a coroutine of its own."""

    def _prompt_route(self, route: RequestRoute) -> RequestRoute:
        plain = super()._prompt_route(route)

        async def run(turn: Turn, _: None) -> Any:
            return await self._run_turn(turn)

        return RequestRoute(plain.decode, run, plain.encode, begin=plain.begin)


class _Various(Agent):
    """Its turns end in all the ways there are; a word each."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()

    async def new_session(
        self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id="s")

    async def close_session(
        self, params: v1_unstable.CloseSessionRequest, ctx: AgentContext
    ) -> None:
        """Nothing to do."""

    async def prompt(self, turn: Turn) -> Any:
        words = turn.text.split()
        if "subtask" in words:
            turn.start_soon(self._beside(turn))
        if "say" in words:
            await turn.say("said")
        if "wait" in words:
            self.waiting.set()
            await turn.wait_cancelled()
        if "deaf" in words:
            self.waiting.set()
            await asyncio.Event().wait()
        if "fail" in words:
            raise RuntimeError("a secret")
        if "refuse" in words:
            raise RequestError(-32001, "no", {"why": "so"})
        if "interrupt" in words:
            raise asyncio.CancelledError
        if "refusal" in words:
            return "refusal"
        return 5 if "odd" in words else None

    async def _beside(self, turn: Turn) -> None:
        await asyncio.sleep(0)
        if not turn.over:
            await turn.say("said beside")


WORDS = ["say", "subtask", "wait", "deaf", "fail", "refuse", "interrupt", "refusal", "odd"]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=3, unique=True), min_size=1, max_size=4),
    st.sampled_from(["session/cancel", "$/cancel_request", "session/close"]),
    st.booleans(),
)
async def test_a_turn_runs_as_one_in_a_coroutine_of_its_own_does(
    turns: list[list[str]],
    how: str,
    at_once: bool,
) -> None:
    told: list[list[Any]] = []
    for router in (AgentRouter, _Around):
        agent, events = _Various(), list[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_client_peer, "AgentRouter", router)

            def watch(event: TelemetryEvent, events: list[str] = events) -> None:
                events.append(event.name)

            async with raw_client(agent, limits=Limits(cancel_backstop=0), telemetry=watch) as raw:
                session_id = await opened(raw)
                for number, words in enumerate(turns):
                    agent.waiting.clear()
                    id_ = f"p{number}"
                    stops = {
                        "session/cancel": cancel(raw, session_id),
                        "$/cancel_request": cancel_request(raw, id_),
                        "session/close": raw.request(
                            "c", "session/close", {"sessionId": session_id}
                        ),
                    }
                    frames = [prompt(raw, id_, session_id, " ".join(words))]
                    stopped = bool({"wait", "deaf"} & set(words))
                    if stopped and at_once:
                        frames.append(stops[how])
                    raw.send(*frames)
                    if stopped and not at_once:
                        await asyncio.wait_for(agent.waiting.wait(), 5)
                        raw.send(stops[how])
                    await raw.answer_to(id_)
                    if stopped and how == "session/close":
                        break
                await raw.round_trip()
                told.append([*raw.frames, events])
    assert told[0] == told[1]
