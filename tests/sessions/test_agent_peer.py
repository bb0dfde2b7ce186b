"""An agent as a client of ours sees it: handshake, what may be called, sessions, replay, the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import (
    AgentPeer,
    AuthRequired,
    CapabilityError,
    Client,
    ConnectionClosed,
    LimitExceeded,
    Limits,
    LocalProtocolError,
    MethodNotFound,
    NotInitialized,
    PromptOutcome,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
    Session,
    StartError,
    TurnInProgress,
    Update,
    VersionMismatch,
    connect,
)
from antiphon.schema import UNSET, v1, v1_unstable
from antiphon.testing import RawPeer, raw_agent, raw_pair

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EVERYTHING: dict[str, Any] = {
    "loadSession": True,
    "promptCapabilities": {"image": True, "audio": True, "embeddedContext": True},
    "mcpCapabilities": {"http": True, "sse": True, "acp": True},
    "sessionCapabilities": {
        "list": {},
        "resume": {},
        "close": {},
        "delete": {},
        "additionalDirectories": {},
        "fork": {},
        "archive": {},
        "status": {},
        "title": {},
        "systemPrompt": {"mode": {"override": {}}},
    },
    "auth": {"logout": {}, "status": {}},
    "providers": {},
}


async def opened(peer: AgentPeer, raw: RawPeer, session_id: str = "s1") -> Session:
    opening = asyncio.create_task(peer.new_session(cwd="/"))
    raw.answer(await raw.wait("session/new", len(raw.sent("session/new")) + 1), named(session_id))
    return await opening


def named(session_id: str) -> dict[str, str]:
    return {"sessionId": session_id}


def result(request: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": value}


def texts(updates: list[Update]) -> list[str]:
    return [update.text for update in updates]


async def run(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# ------------------------------------------------------------------ handshake


@pytest.mark.covers("R1-20", "R1-21", "R1-22")
async def test_the_first_frame_is_initialize_with_version_capabilities_and_name() -> None:
    async with raw_agent() as (peer, raw):
        request = raw.frames[0]
        assert request["method"] == "initialize"
        assert request["params"]["protocolVersion"] == 1
        assert type(request["params"]["protocolVersion"]) is int
        assert request["params"]["clientInfo"]["version"]
        assert request["params"]["clientCapabilities"] == {}
        assert len(raw.frames) == 1
        assert peer.connection.initialized


@pytest.mark.covers("R1-27", "FF-34")
@pytest.mark.parametrize("version", [0, 2, 99, 65535])
async def test_a_version_we_cannot_speak_closes_the_link_and_says_which(version: int) -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        raw.answer(await raw.wait("initialize"), {"protocolVersion": version})
        with pytest.raises(VersionMismatch, match=f"version {version}.*version 1") as mismatch:
            await connecting
        assert (mismatch.value.offered, mismatch.value.answered) == (1, version)
        await asyncio.wait_for(raw.lost.wait(), 5)
        assert len(raw.frames) == 1  # nothing was sent to a peer that speaks something else


@pytest.mark.parametrize(
    "answer",
    [
        {"protocolVersion": "1"},
        {},
        None,
        {"protocolVersion": None},
        {"protocolVersion": 1.5},
        {"protocolVersion": -1},
        {"protocolVersion": True},
        {"protocolVersion": 65536},
        [],
        "1",
        1,
    ],
)
async def test_an_answer_without_a_version_is_malformed_and_closes_the_link(answer: Any) -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        raw.answer(await raw.wait("initialize"), answer)
        with pytest.raises(RemoteProtocolError, match="initialize is malformed") as malformed:
            await connecting
        assert not isinstance(malformed.value, VersionMismatch)
        await asyncio.wait_for(raw.lost.wait(), 5)


async def test_a_refused_handshake_is_the_agent_s_error_and_closes_the_link() -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        raw.refuse(await raw.wait("initialize"), -32000, "sign in", data={"url": "x"})
        with pytest.raises(AuthRequired, match="sign in") as refused:
            await connecting
        assert refused.value.data == {"url": "x"}
        await asyncio.wait_for(raw.lost.wait(), 5)


@pytest.mark.covers("R1-28", "R1-31", "R1-158")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"agentCapabilities": 5},
        {"agentCapabilities": None},
        {"agentCapabilities": {"loadSession": "yes", "promptCapabilities": 1, "zzz": {}}},
        {"agentCapabilities": {"sessionCapabilities": {"list": None, "close": False}}},
        {"agentInfo": {}, "authMethods": 5},
        {"agentInfo": None, "authMethods": None},
        {"authMethods": [1, {"id": "x"}, "y"]},
        {"_meta": [], "schema_version": 3},
    ],
)
async def test_optional_members_of_the_answer_do_not_fail_it(more: dict[str, Any]) -> None:
    async with raw_agent(initialized=more) as (peer, raw):
        assert peer.info is None
        assert list(peer.auth_methods) == []
        for path in ("loadSession", "sessionCapabilities.list", "sessionCapabilities.close"):
            assert not peer.offers(path)
        with pytest.raises(CapabilityError):
            await peer.list_sessions()
        assert len(raw.frames) == 1


async def test_what_the_agent_says_of_itself_is_at_hand() -> None:
    more = {
        "agentInfo": {"name": "a", "version": "2", "title": "A"},
        "authMethods": [{"id": "k", "name": "K"}, 5, {"type": "env_var", "id": "e", "name": "E"}],
    }
    async with raw_agent(capabilities=EVERYTHING, initialized=more) as (peer, _):
        assert peer.info == v1.Implementation(name="a", version="2", title="A")
        assert [method.id for method in peer.auth_methods] == ["k", "e"]
        assert peer.capabilities.load_session is True
        assert peer.offers("sessionCapabilities.resume")
        assert peer.offers("promptCapabilities.image")
        assert not peer.offers("promptCapabilities.smell")
        assert peer.initialize_result.protocol_version == 1
        assert peer.process is None
        assert "AgentPeer" in repr(peer)


async def test_the_very_next_frame_after_the_answer_is_taken() -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        request = await raw.wait("initialize")
        asked = raw.request("x", "_nobody/knows", {})
        raw.send(result(request, {"protocolVersion": 1}), raw.update("s", "early"), asked)
        peer = await connecting
        assert (await raw.answer_to("x"))["error"]["code"] == -32601
        session = await opened(peer, raw, "s")
        assert (await anext(session.updates())).text == "early"
        await peer.aclose()


@pytest.mark.covers("R1-20", "FF-34")
async def test_nothing_is_lent_to_an_agent_that_has_not_shaken_hands() -> None:
    """Which protocol it speaks is not known yet, so nothing it asks means anything."""
    lent: list[str] = []

    class Lending(Client):
        async def read_text_file(self, params: Any, ctx: Any) -> v1.ReadTextFileResponse:
            lent.append(params.path)
            return v1.ReadTextFileResponse(content="")

    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours, client=Lending())))
        hello = await raw.wait("initialize")
        read = {"sessionId": "s", "path": "/a"}
        answer = await raw.ask("fs/read_text_file", read)
        assert answer["error"]["code"] == -32600
        reason = {"method": "fs/read_text_file", "reason": "initialize required"}
        assert answer["error"]["data"] == reason
        assert (await raw.ask("initialize", {"protocolVersion": 1}))["error"]["code"] == -32601
        assert lent == []

        raw.answer(hello, {"protocolVersion": 1})
        raw.send(raw.request("read", "fs/read_text_file", read))  # right behind the answer
        assert (await raw.answer_to("read"))["result"] == {"content": ""}
        assert (await raw.ask("initialize", {"protocolVersion": 1}))["error"]["code"] == -32600
        await (await connecting).aclose()


async def test_nothing_can_be_called_before_the_handshake() -> None:
    async with raw_pair() as (ours, _):
        peer = AgentPeer(ours, Client())
        with pytest.raises(NotInitialized):
            await peer.request_extension("_x/y")
        with pytest.raises(NotInitialized):
            await peer.notify_extension("_x/y")
        with pytest.raises(NotInitialized):
            await peer.new_session()
        await peer.aclose()


async def test_an_agent_that_goes_before_it_answers_never_came_up() -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        await raw.wait("initialize")
        raw.send(b"Usage: agent [options]", b"  --help")
        await raw.transport.aclose()
        with pytest.raises(StartError, match="ended before it answered") as failed:
            await connecting
        assert "Usage: agent [options]" in str(failed.value)
        assert not failed.value.timed_out


async def test_an_agent_that_stays_silent_is_given_up_after_the_start_up_time() -> None:
    async with raw_pair() as (ours, raw):
        with pytest.raises(StartError, match=r"no answer to initialize within 0.05 s") as failed:
            await connect(ours, limits=Limits(startup_timeout=0.05))
        assert failed.value.timed_out
        await asyncio.wait_for(raw.lost.wait(), 5)


async def test_a_handshake_that_is_cancelled_leaves_nothing_open() -> None:
    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(run(connect(ours)))
        await raw.wait("initialize")
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await asyncio.wait_for(raw.lost.wait(), 5)


# ------------------------------------------------------------------ what may be called


Calls = list[tuple[str, "Callable[[AgentPeer], Awaitable[Any]]", str]]

HTTP = v1.McpServerHttp(name="h", url="http://localhost", headers=[])
SSE = v1.McpServerSse(name="s", url="http://localhost", headers=[])
STDIO = v1.McpServerStdio(name="x", command="/bin/x", args=[], env=[])
IMAGE = v1.ImageContent(data="", mime_type="image/png")
TEXT = v1.TextContent(text="x")


def setting_up(**more: Any) -> v1_unstable.NewSessionRequest:
    return v1_unstable.NewSessionRequest(cwd="/", mcp_servers=[], **more)


def prompting(mode: str, *content: Any) -> v1_unstable.NewSessionRequest:
    return setting_up(system_prompt=v1_unstable.SystemPrompt(mode=mode, content=list(content)))


GATED: Calls = [
    ("session/load", lambda p: p.load_session("s"), "loadSession"),
    ("session/resume", lambda p: p.resume_session("s"), "sessionCapabilities.resume"),
    ("session/list", lambda p: p.list_sessions(), "sessionCapabilities.list"),
    ("session/close", lambda p: p.close_session("s"), "sessionCapabilities.close"),
    ("session/delete", lambda p: p.delete_session("s"), "sessionCapabilities.delete"),
    ("logout", lambda p: p.logout(), "auth.logout"),
    (
        "session/fork",
        lambda p: p.request(v1_unstable.ForkSessionRequest(session_id="s", cwd="/")),
        "sessionCapabilities.fork",
    ),
    (
        "session/status",
        lambda p: p.request(v1_unstable.SessionStatusRequest(session_id="s")),
        "sessionCapabilities.status",
    ),
    ("session/new", lambda p: p.new_session(mcp_servers=[STDIO, HTTP]), "mcpCapabilities.http"),
    ("session/new", lambda p: p.new_session(mcp_servers=[SSE]), "mcpCapabilities.sse"),
    (
        "session/new",
        lambda p: p.new_session(mcp_servers=[v1_unstable.McpServerAcp(name="a", server_id="1")]),
        "mcpCapabilities.acp",
    ),
    (
        "session/new",
        lambda p: p.new_session(additional_directories=["/x"]),
        "sessionCapabilities.additionalDirectories",
    ),
    (
        "session/new",
        lambda p: p.request(setting_up(additional_directories=["/x"])),
        "sessionCapabilities.additionalDirectories",
    ),
    (
        "session/new",
        lambda p: p.request(prompting("append", TEXT)),
        "sessionCapabilities.systemPrompt",
    ),
    (
        "session/prompt",
        lambda p: p.request(v1.PromptRequest(session_id="s", prompt=[TEXT, IMAGE])),
        "promptCapabilities.image",
    ),
]


@pytest.mark.covers("R1-28", "R1-41", "R1-42", "R1-43", "R1-44", "R1-45", "R1-148", "FF-34")
@pytest.mark.parametrize(("method", "call", "capability"), GATED)
async def test_what_the_agent_did_not_offer_is_refused_here_and_never_sent(
    method: str, call: Callable[[AgentPeer], Awaitable[Any]], capability: str
) -> None:
    async with raw_agent(unstable=True) as (peer, raw):
        with pytest.raises(CapabilityError) as refused:
            await call(peer)
        assert refused.value.method == method
        assert refused.value.capability == f"agentCapabilities.{capability}"
        assert len(raw.frames) == 1
        assert peer.sessions == {}
    # And is sent where it did.
    async with raw_agent(capabilities=EVERYTHING, unstable=True) as (peer, raw):
        calling = asyncio.ensure_future(run(call(peer)))
        raw.refuse(await raw.wait(method), -32603)
        with pytest.raises(RequestError):
            await calling


@pytest.mark.covers("R1-45", "R1-73")
async def test_a_system_prompt_is_sent_in_the_modes_and_blocks_that_are_legal() -> None:
    only_append: dict[str, Any] = {"sessionCapabilities": {"systemPrompt": {}}}
    async with raw_agent(capabilities=only_append, unstable=True) as (peer, raw):
        with pytest.raises(CapabilityError, match="override"):
            await peer.request(prompting("override", TEXT))
        for content in ((), (TEXT, v1.ResourceLink(uri="file:///a", name="a"))):
            with pytest.raises(LocalProtocolError, match="text blocks"):
                await peer.request(prompting("append", *content))
        assert len(raw.frames) == 1
        calling = asyncio.ensure_future(run(peer.request(prompting("append", TEXT))))
        request = await raw.wait("session/new")
        assert request["params"]["systemPrompt"]["mode"] == "append"
        raw.answer(request, named("s"))
        assert (await calling).session_id == "s"


async def test_unstable_methods_are_not_called_on_a_stable_connection() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        with pytest.raises(LocalProtocolError, match="unstable=True"):
            await peer.request(v1_unstable.SessionStatusRequest(session_id="s"))
        assert len(raw.frames) == 1


@pytest.mark.covers("R1-145")
async def test_a_terminal_login_is_never_sent() -> None:
    methods = [{"id": "k", "name": "K"}, {"type": "terminal", "id": "t", "name": "T"}]
    async with raw_agent(initialized={"authMethods": methods}) as (peer, raw):
        with pytest.raises(LocalProtocolError, match="terminal login"):
            await peer.authenticate("t")
        assert len(raw.frames) == 1
        signing = asyncio.create_task(peer.authenticate("k"))
        request = await raw.wait("authenticate")
        assert request["params"] == {"methodId": "k"}
        raw.answer(request, None)
        await signing


@pytest.mark.covers("R1-150")
async def test_after_a_logout_a_running_session_may_fail_and_go_on_after_the_next_login() -> None:
    methods = [{"id": "k", "name": "K"}]
    async with raw_agent(capabilities=EVERYTHING, initialized={"authMethods": methods}) as (
        peer,
        raw,
    ):
        opening = asyncio.ensure_future(_new_session(peer))
        raw.answer(await raw.wait("session/new"), {"sessionId": "s"})
        session = await opening
        leaving = asyncio.create_task(peer.logout())
        raw.answer(await raw.wait("logout"), {})
        await leaving

        prompting = asyncio.ensure_future(_prompt(session))
        raw.refuse(await raw.wait("session/prompt"), -32000)
        with pytest.raises(AuthRequired):
            await prompting
        assert peer.sessions["s"] is session

        signing = asyncio.create_task(peer.authenticate("k"))
        raw.answer(await raw.wait("authenticate"), {})
        await signing
        prompting = asyncio.ensure_future(_prompt(session))
        raw.answer(await raw.wait("session/prompt", 2), {"stopReason": "end_turn"})
        assert (await prompting).stop_reason == "end_turn"


async def _new_session(peer: AgentPeer) -> Session:
    return await peer.new_session(cwd="/")


async def _prompt(session: Session) -> PromptOutcome:
    return await session.prompt("x")


@pytest.mark.covers("R1-14", "FF-18")
async def test_every_error_answer_keeps_its_code_message_and_data() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        for number, (code, data, kind) in enumerate(
            (
                (-32601, "session/list", MethodNotFound),
                (-32000, {"methods": [1]}, AuthRequired),
                (-32002, {"sessionId": "s"}, ResourceNotFound),
                (12345, ["x", None], RequestError),
                (-31999, 0, RequestError),
            ),
            1,
        ):
            listing = asyncio.create_task(peer.list_sessions())
            request = await raw.wait("session/list", number)
            raw.refuse(request, code, f"no {number}", data=data)
            expected: type[RequestError] = kind
            with pytest.raises(expected, match=f"no {number}") as refused:
                await listing
            assert (refused.value.code, refused.value.data) == (code, data)


async def test_an_answer_that_is_none_is_an_error_of_the_agent() -> None:
    async with raw_agent(capabilities=EVERYTHING, unstable=True) as (peer, raw):
        calling = asyncio.ensure_future(
            run(peer.request(v1_unstable.SessionStatusRequest(session_id="s")))
        )
        raw.answer(await raw.wait("session/status"), {"status": 5})
        with pytest.raises(RemoteProtocolError, match=r"session/status is malformed.*status"):
            await calling


async def test_a_call_without_an_answer_in_time_is_given_up_and_its_late_answer_ignored() -> None:
    limits = Limits(request_timeout=0.05)
    async with raw_agent(capabilities=EVERYTHING, limits=limits) as (peer, raw):
        with pytest.raises(RequestTimeout, match="session/list"):
            await peer.list_sessions()
        request = raw.sent("session/list")[0]
        gone = await raw.wait("$/cancel_request")
        assert gone["params"] == {"requestId": request["id"]}
        raw.answer(request, {"sessions": [{"sessionId": "late", "cwd": "/"}]})
        listing = asyncio.create_task(peer.list_sessions())
        raw.answer(await raw.wait("session/list", 2), {"sessions": []})
        assert (await listing).sessions == []


async def test_a_cancelled_caller_tells_the_agent() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        for number, call in enumerate(
            (peer.list_sessions, peer.new_session, lambda: peer.request_extension("_x/y")), 1
        ):
            calling = asyncio.ensure_future(run(cast("Any", call)()))
            methods = ("session/list", "session/new", "_x/y")
            request = await raw.wait(methods[number - 1])
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            gone = await raw.wait("$/cancel_request", number)
            assert gone["params"] == {"requestId": request["id"]}
        raw.answer(raw.sent("session/new")[0], named("nobody waits"))
        await raw.round_trip()
        assert peer.sessions == {}


async def test_a_lost_link_fails_every_open_call_and_every_later_one_at_once() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        calls = [
            asyncio.ensure_future(run(call))
            for call in (
                peer.list_sessions(),
                peer.new_session(),
                peer.load_session("x"),
                session.prompt("go"),
                peer.request_extension("_x/y"),
            )
        ]
        await raw.wait("_x/y")
        await raw.transport.aclose()
        for call in calls:
            with pytest.raises(ConnectionClosed):
                await call
        for later in (
            peer.list_sessions(),
            peer.new_session(),
            peer.load_session("x"),
            session.prompt("go"),
            peer.notify_extension("_x/y"),
        ):
            with pytest.raises(ConnectionClosed):
                await later
        await session.cancel()
        await peer.wait_closed()
        assert set(peer.sessions) == {"s1"}


# ------------------------------------------------------------------ new sessions


async def test_a_number_that_json_cannot_say_is_refused_before_a_session_is_asked_for() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        with pytest.raises(ValueError, match="NaN"):
            await peer.new_session(meta={"score": float("nan")})
        await raw.round_trip()
        assert not raw.sent("session/new")


async def test_a_new_session_sends_absolute_paths_servers_and_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        opening = asyncio.create_task(
            peer.new_session(
                cwd="sub",
                mcp_servers=[STDIO, HTTP],
                additional_directories=[Path("more"), "/abs"],
                meta={"k": 1},
            )
        )
        request = await raw.wait("session/new")
        assert request["params"] == {
            "cwd": str(tmp_path / "sub"),
            "mcpServers": [
                {"name": "x", "command": "/bin/x", "args": [], "env": []},
                {"type": "http", "name": "h", "url": "http://localhost", "headers": []},
            ],
            "additionalDirectories": [str(tmp_path / "more"), "/abs"],
            "_meta": {"k": 1},
        }
        raw.answer(request, {**named("s"), "models": {"x": 1}, "modes": None})
        session = await opening
        assert session.session_id == "s"
        assert session.roots == (str(tmp_path / "sub"), str(tmp_path / "more"), "/abs")
        assert peer.sessions == {"s": session}
        assert session.modes is None
    async with raw_agent() as (peer, raw):
        opening = asyncio.create_task(peer.new_session())
        request = await raw.wait("session/new")
        # Required lists are there although empty, nothing else is (field fault 31).
        assert request["params"] == {"cwd": str(tmp_path), "mcpServers": []}
        raw.answer(request, named("s"))
        await opening


async def test_a_session_without_an_id_is_none() -> None:
    async with raw_agent() as (peer, raw):
        answers: list[Any] = [None, {}, {"sessionId": 5}, []]
        for number, answer in enumerate(answers, 1):
            opening = asyncio.create_task(peer.new_session())
            raw.answer(await raw.wait("session/new", number), answer)
            with pytest.raises(RemoteProtocolError, match="session/new is malformed"):
                await opening
        assert peer.sessions == {}


async def test_an_id_given_a_second_time_makes_a_new_session_unless_the_old_one_is_busy() -> None:
    async with raw_agent() as (peer, raw):
        first = await opened(peer, raw)
        updates = first.updates()
        second = await opened(peer, raw)
        assert second is not first
        raw.send(raw.update("s1", "for the second"))
        assert (await anext(second.updates())).text == "for the second"
        with pytest.raises(StopAsyncIteration):
            await anext(updates)
        async with second.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            with pytest.raises(RemoteProtocolError, match="of one in use"):
                await opened(peer, raw)
            raw.send(raw.update("s1", "a"), result(request, {"stopReason": "end_turn"}))
            assert texts([update async for update in turn]) == ["a"]


async def test_sessions_are_bounded_before_anything_is_sent() -> None:
    async with raw_agent(capabilities=EVERYTHING, limits=Limits(sessions=2)) as (peer, raw):
        await opened(peer, raw, "s1")
        await opened(peer, raw, "s2")
        with pytest.raises(LimitExceeded, match="sessions"):
            await peer.new_session()
        with pytest.raises(LimitExceeded, match="sessions"):
            await peer.load_session("s3")
        assert len(raw.sent("session/new")) == 2
        assert raw.sent("session/load") == []
        closing = asyncio.create_task(peer.close_session("s1"))
        raw.answer(await raw.wait("session/close"), {})
        await closing
        await opened(peer, raw, "s3")


async def test_a_new_session_waits_for_observers_of_what_came_before_it_alone() -> None:
    ready = asyncio.Event()
    seen: list[str] = []

    async def observer(update: Update) -> None:
        if update.text == "behind":
            await ready.wait()
        seen.append(update.text)

    async with raw_agent(Client(on_update=observer)) as (peer, raw):
        opening = asyncio.create_task(peer.new_session())
        request = await raw.wait("session/new")
        raw.send(raw.update("s", "before"), result(request, named("s")), raw.update("s", "behind"))
        await asyncio.wait_for(opening, 5)
        assert seen == ["before"]
        ready.set()


# ------------------------------------------------------------------ loading and resuming


def modes(current: str) -> dict[str, Any]:
    return {"modes": {"currentModeId": current, "availableModes": [{"id": "a", "name": "A"}]}}


@pytest.mark.covers("R1-52", "R1-54")
@pytest.mark.parametrize("method", ["session/load", "session/resume"])
async def test_an_awaited_load_gives_the_session_with_its_history_labelled(method: str) -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        opening = peer.load_session if method == "session/load" else peer.resume_session
        loading = asyncio.ensure_future(
            run(opening("s", cwd="/w", additional_directories=["/m"], mcp_servers=[STDIO]))
        )
        request = await raw.wait(method)
        assert request["params"] == {
            "sessionId": "s",
            "cwd": "/w",
            "mcpServers": [{"name": "x", "command": "/bin/x", "args": [], "env": []}],
            "additionalDirectories": ["/m"],
        }
        raw.send(
            raw.update("s", "old"),
            result(request, {**modes("a"), "sessionId": "s"}),
            raw.update("s", "new"),
        )
        session = await loading
        assert session.roots == ("/w", "/m")
        assert session.modes is not None
        updates = session.updates()
        assert [(u.text, u.label) for u in [await anext(updates), await anext(updates)]] == [
            ("old", "replay"),
            ("new", "session"),
        ]
        async with session.prompt("go") as turn:
            raw.send(
                raw.update("s", "x"), result(await raw.wait("session/prompt"), {"stopReason": "x"})
            )
            assert [u.label async for u in turn] == ["turn"]


@pytest.mark.covers("FF-21")
async def test_history_can_be_iterated_before_the_answer_is_there() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        async with peer.load_session("s") as session:
            assert session.response is None
            assert session.loading
            request = await raw.wait("session/load")
            replay = session.replay()
            for number in range(3):
                raw.send(raw.update("s", f"old {number}"))
                update = await anext(replay)
                assert (update.text, update.label) == (f"old {number}", "replay")
            raw.send(raw.update("s", "last"), result(request, None), raw.update("s", "after"))
            assert [update.text async for update in replay] == ["last"]
        assert isinstance(session.response, v1.LoadSessionResponse)
        assert not session.loading
        update = await anext(session.updates())
        assert (update.text, update.label) == ("after", "session")
        # After the answer a replay has nothing to wait for.
        assert [update async for update in session.replay()] == []


async def test_a_load_behind_what_another_session_leaves_lying_fails_past_the_overdraft() -> None:
    client = Client(on_update=lambda update: None)  # takes the history: that is not the reason
    async with raw_agent(client, EVERYTHING, limits=Limits(queue_bytes=10_000)) as (peer, raw):
        hog = await opened(peer, raw, "hog")
        async with hog.prompt("go") as turn:
            prompt = await raw.wait("session/prompt")
            loading = asyncio.ensure_future(peer.load_session("s1", cwd="/"))
            await raw.wait("session/load")
            for _ in range(30):
                raw.send(*(raw.update("hog", "x" * 100) for _ in range(10)))
                await asyncio.sleep(0)
            with pytest.raises(LimitExceeded):
                await asyncio.wait_for(loading, 5)
            assert peer.connection.reading_paused
            raw.answer(prompt, {"stopReason": "end_turn"})
            async for _update in turn:
                pass
        assert turn.stop_reason == "end_turn"


async def test_a_load_is_not_sent_and_nothing_registered_until_it_is_used() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        opening = peer.load_session("s")
        assert peer.sessions == {}
        await raw.round_trip()
        assert raw.sent("session/load") == []
        opening.close()


@pytest.mark.parametrize("name", ["load_session", "resume_session"])
async def test_a_load_that_was_forgotten_is_told_of(name: str) -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, _raw):
        with pytest.warns(RuntimeWarning) as told:
            getattr(peer, name)("s")
    assert [str(warning.message) for warning in told] == [
        f"agent.{name}(…) was never awaited or entered"
    ]


@pytest.mark.parametrize("form", ["await", "async with"])
async def test_a_load_that_fails_forgets_the_session(form: str) -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):

        async def load() -> None:
            if form == "await":
                await peer.load_session("s")
            else:
                async with peer.load_session("s") as session:
                    assert [u.text async for u in session.replay()] == ["half"]

        for number, answer in enumerate(("refused", "malformed"), 1):
            loading = asyncio.create_task(load())
            request = await raw.wait("session/load", number)
            assert set(peer.sessions) == {"s"}
            raw.send(raw.update("s", "half"))
            if answer == "refused":
                raw.refuse(request, -32002, data={"sessionId": "s"})
            else:
                raw.answer(request, [])
            with pytest.raises(ResourceNotFound if answer == "refused" else RemoteProtocolError):
                await loading
            assert peer.sessions == {}
            assert peer.connection.queued_bytes == 0
        session = await opened(peer, raw, "s")  # the id is free again
        assert session.inbox.label == "session"


async def test_leaving_a_load_by_an_error_gives_it_up_unless_it_was_answered() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        with pytest.raises(ZeroDivisionError):
            async with peer.load_session("s"):
                raise ZeroDivisionError
        request = await raw.wait("session/load")
        gone = await raw.wait("$/cancel_request")
        assert gone["params"] == {"requestId": request["id"]}
        assert peer.sessions == {}
        with pytest.raises(ZeroDivisionError):
            async with peer.load_session("s") as session:
                raw.answer(await raw.wait("session/load", 2), modes("a"))
                assert [update async for update in session.replay()] == []
                raise ZeroDivisionError
        assert peer.sessions["s"].modes is not None
        await raw.round_trip()
        assert len(raw.sent("$/cancel_request")) == 1


async def test_a_cancelled_load_is_given_up() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        loading = asyncio.ensure_future(run(peer.resume_session("s")))
        await raw.wait("session/resume")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await raw.wait("$/cancel_request")
        assert peer.sessions == {}


async def test_loading_a_known_session_again_renews_it_and_a_failure_changes_nothing() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        session = await opened(peer, raw, "s")
        option: dict[str, Any] = {
            "id": "o",
            "name": "O",
            "type": "select",
            "currentValue": "1",
            "options": [],
        }
        changing = asyncio.create_task(session.set_config_option("o", "1"))
        raw.answer(await raw.wait("session/set_config_option"), {"configOptions": [option]})
        await changing
        loading = asyncio.ensure_future(run(peer.load_session("s", cwd="/new")))
        raw.refuse(await raw.wait("session/load"), -32603)
        with pytest.raises(RequestError):
            await loading
        assert peer.sessions == {"s": session}
        assert list(session.roots) == ["/"]
        assert not session.loading
        loading = asyncio.ensure_future(
            run(peer.load_session("s", cwd="/new", additional_directories=["/m"]))
        )
        request = await raw.wait("session/load", 2)
        with pytest.raises(LocalProtocolError, match="being loaded"):
            await peer.load_session("s")
        with pytest.raises(LocalProtocolError, match="being loaded"):
            await session.prompt("go")
        assert list(session.roots) == ["/new", "/m"]  # what the agent asks for meanwhile is in them
        raw.send(raw.update("s", "old"), result(request, {"configOptions": []}))
        assert await loading is session
        assert session.config_options == []
        assert (await anext(session.updates())).label == "replay"


async def test_a_session_with_an_open_turn_is_not_loaded() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            request = await raw.wait("session/prompt")
            with pytest.raises(TurnInProgress):
                await peer.load_session("s1")
            assert raw.sent("session/load") == []
            raw.answer(request, {"stopReason": "end_turn"})
            assert [update async for update in turn] == []


# ------------------------------------------------------------------ lists, closing, deleting


@pytest.mark.covers("R1-65")
async def test_pages_of_a_list_are_followed_to_the_one_without_a_cursor() -> None:
    def page(first: int, **more: Any) -> dict[str, Any]:
        infos = [{"sessionId": f"{n}", "cwd": "/"} for n in range(first, first + 2)]
        return {"sessions": [*infos, {"no": "session"}], **more}

    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        seen: list[str] = []

        async def collect() -> None:
            async for info in peer.iter_sessions(cwd="/w"):
                seen.append(info.session_id)  # noqa: PERF401  (one at a time is the point)

        collecting = asyncio.create_task(collect())
        for number, (answer, params) in enumerate(
            (
                (page(0, nextCursor="c1"), {"cwd": "/w"}),
                (page(2, nextCursor="0"), {"cwd": "/w", "cursor": "c1"}),
                (page(4, nextCursor=None), {"cwd": "/w", "cursor": "0"}),
            ),
            1,
        ):
            request = await raw.wait("session/list", number)
            assert request["params"] == params
            raw.answer(request, answer)
        await collecting
        assert seen == [str(n) for n in range(6)]

        listing = asyncio.create_task(peer.list_sessions())
        request = await raw.wait("session/list", 4)
        assert request["params"] == {}
        raw.answer(request, None)  # quirk 8
        only = await listing
        assert only.sessions == []
        assert only.next_cursor is UNSET


async def test_a_list_that_goes_in_a_circle_ends_in_an_error() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):

        async def collect() -> list[Any]:
            return [info async for info in peer.iter_sessions()]

        collecting = asyncio.create_task(collect())
        for number in (1, 2):
            request = await raw.wait("session/list", number)
            raw.answer(request, {"sessions": [], "nextCursor": "same"})
        with pytest.raises(RemoteProtocolError, match="same"):
            await collecting


class Lent(Client):
    """Notes which sessions' belongings are taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    async def sessions_closed(self, session_ids: Any) -> None:
        self.taken += sorted(session_ids)

    async def create_terminal(self, params: Any, ctx: Any) -> v1.CreateTerminalResponse:
        return v1.CreateTerminalResponse(terminal_id="t")

    async def terminal_output(self, params: Any, ctx: Any) -> Any:
        raise AssertionError

    wait_for_terminal_exit = kill_terminal = release_terminal = terminal_output


@pytest.mark.covers("R1-59", "R1-60")
@pytest.mark.parametrize("how", ["close", "close unknown", "delete", "session.close"])
async def test_a_session_that_is_closed_or_deleted_is_forgotten_and_its_loans_taken_back(
    how: str,
) -> None:
    client = Lent()
    async with raw_agent(client, EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        updates = session.updates()
        method = "session/delete" if how == "delete" else "session/close"
        ending = asyncio.ensure_future(
            session.close()
            if how == "session.close"
            else peer.delete_session("s1")
            if how == "delete"
            else peer.close_session("s1")
        )
        request = await raw.wait(method)
        assert request["params"] == {"sessionId": "s1"}
        if how == "close unknown":
            raw.refuse(request, -32002)
        else:
            raw.answer(request, {})
        await ending
        assert peer.sessions == {}
        assert client.taken == ["s1"]
        assert [update async for update in updates] == []
    assert client.taken == ["s1"]


async def test_a_close_that_is_refused_leaves_the_session_open() -> None:
    client = Lent()
    async with raw_agent(client, EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        closing = asyncio.create_task(session.close())
        raw.refuse(await raw.wait("session/close"), -32603)
        with pytest.raises(RequestError):
            await closing
        assert peer.sessions == {"s1": session}
        assert client.taken == []
    assert client.taken == ["s1"]


@pytest.mark.covers("R1-58")
async def test_closing_during_a_prompt_lets_the_turn_end_first() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        async with session.prompt("go") as turn:
            prompt = await raw.wait("session/prompt")
            closing = asyncio.create_task(session.close())
            close = await raw.wait("session/close")
            raw.send(
                raw.update("s1", "flushed"),
                result(prompt, {"stopReason": "cancelled"}),
                result(close, {}),
            )
            await closing
            assert texts([update async for update in turn]) == ["flushed"]
        assert turn.stop_reason == "cancelled"


async def test_the_end_of_the_connection_takes_back_what_was_lent_to_anybody() -> None:
    client = Lent()
    async with raw_agent(client) as (peer, raw):
        await opened(peer, raw, "s1")
        for session_id in ("s1", "a stranger", "a stranger", "another"):
            params = {"sessionId": session_id, "command": "true"}
            assert (await raw.ask("terminal/create", params))["result"] == {"terminalId": "t"}
        closing = [asyncio.create_task(peer.aclose()) for _ in range(2)]
        await asyncio.gather(*closing)
        assert set(client.taken) == {"s1", "a stranger", "another"}


async def test_strangers_that_want_terminals_are_bounded() -> None:
    async with raw_agent(Lent(), limits=Limits(sessions=2)) as (_, raw):
        for number, refused in enumerate((False, False, True)):
            answer = await raw.ask("terminal/create", {"sessionId": f"{number}", "command": "x"})
            assert ("error" in answer) is refused


async def test_a_stranger_s_endless_id_is_not_remembered() -> None:
    async with raw_agent(Lent()) as (_, raw):
        answer = await raw.ask("terminal/create", {"sessionId": "x" * 5000, "command": "x"})
        assert answer["error"]["data"] == {"reason": "session unknown"}


# ------------------------------------------------------------------ extensions


@pytest.mark.covers("R1-155")
async def test_extensions_are_asked_and_told_with_any_json() -> None:
    async with raw_agent() as (peer, raw):
        for number, (params, answer) in enumerate(
            (
                (None, {"a": [None]}),
                ({"x": 1}, None),
                ([1], "text"),
                (v1.EnvVariable(name="a", value="b"), 5),
            ),
            1,
        ):
            asking = asyncio.create_task(peer.request_extension("_x/y", params))
            request = await raw.wait("_x/y", number)
            if params is None:
                assert "params" not in request
            elif isinstance(params, v1.EnvVariable):
                assert request["params"] == {"name": "a", "value": "b"}
            else:
                assert request["params"] == params
            raw.answer(request, answer)
            assert await asking == answer
        await peer.notify_extension("_x/tell", {"k": "v"})
        told = await raw.wait("_x/tell")
        assert told["params"] == {"k": "v"}
        assert "id" not in told
        for call in (peer.request_extension("x/y"), peer.notify_extension("x/y")):
            with pytest.raises(LocalProtocolError, match="underscore"):
                await call


async def test_a_raw_notification_is_sent_as_it_is() -> None:
    async with raw_agent() as (peer, raw):
        await peer.notify(v1.CancelNotification(session_id="any"))
        assert (await raw.wait("session/cancel"))["params"] == {"sessionId": "any"}


# ------------------------------------------------------------------ which answers wait for observers


ABOUT_A_SESSION: dict[str, Callable[[AgentPeer, Session], Awaitable[Any]]] = {
    "session/prompt": lambda peer, session: session.prompt("go"),
    "session/set_mode": lambda peer, session: session.set_mode("m"),
    "session/set_config_option": lambda peer, session: session.set_config_option("o", "v"),
    "session/close": lambda peer, session: session.close(),
    "session/delete": lambda peer, session: peer.delete_session("s1"),
    "session/load": lambda peer, session: peer.load_session("s1", cwd="/"),
    "session/resume": lambda peer, session: peer.resume_session("s1", cwd="/"),
    "_x/y": lambda peer, session: peer.request_extension("_x/y", named("s1")),
}
ABOUT_NONE: dict[str, Callable[[AgentPeer, Session], Awaitable[Any]]] = {
    "session/list": lambda peer, session: peer.list_sessions(),
    "session/new": lambda peer, session: peer.new_session(cwd="/"),
    "session/set_mode": lambda peer, session: peer.sessions["s2"].set_mode("m"),
    "authenticate": lambda peer, session: peer.authenticate("a"),
    "_x/y": lambda peer, session: peer.request_extension("_x/y", {"other": 1}),
    "_x/z": lambda peer, session: peer.request_extension("_x/z"),
    "_x/s2": lambda peer, session: peer.request_extension("_x/s2", named("s2")),
    "_x/unknown": lambda peer, session: peer.request_extension("_x/unknown", named("s9")),
}
RESULTS: dict[str, Any] = {
    "session/prompt": {"stopReason": "end_turn"},
    "session/set_config_option": {"configOptions": []},
    "session/list": {"sessions": []},
    "session/new": {"sessionId": "s3"},
}


@pytest.mark.covers("FF-19")
@pytest.mark.parametrize("method", ABOUT_A_SESSION)
async def test_an_answer_about_a_session_waits_until_its_observers_have_seen_what_was_before_it(
    method: str,
) -> None:
    gate, seen = asyncio.Event(), list[str]()

    async def observer(update: Update) -> None:
        await gate.wait()
        seen.append(update.text)

    async with raw_agent(Client(on_update=observer), EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        asking = asyncio.ensure_future(ABOUT_A_SESSION[method](peer, session))
        request = await raw.wait(method)
        raw.send(
            raw.update("s1", "before"),
            result(request, RESULTS.get(method, {})),
            raw.update("s1", "behind"),
        )
        await raw.round_trip()
        await asyncio.sleep(0.01)
        assert not asking.done()
        gate.set()
        await asyncio.wait_for(asking, 5)
        assert seen[0] == "before"


@pytest.mark.covers("FF-20")
@pytest.mark.parametrize("method", ABOUT_NONE)
async def test_an_answer_about_no_session_or_another_waits_for_no_observer(method: str) -> None:
    gate = asyncio.Event()

    async def observer(update: Update) -> None:
        if update.session_id == "s1":
            await gate.wait()

    async with raw_agent(
        Client(on_update=observer), EVERYTHING, initialized={"authMethods": [AUTH]}
    ) as (peer, raw):
        session = await opened(peer, raw)
        await opened(peer, raw, "s2")
        raw.send(raw.update("s1", "stuck"))
        asking = asyncio.ensure_future(ABOUT_NONE[method](peer, session))
        count = 3 if method == "session/new" else 1
        request = await raw.wait(method, count)
        raw.answer(request, RESULTS.get(method, {}))
        await asyncio.wait_for(asking, 5)
        gate.set()


AUTH = {"id": "a", "name": "A"}


# ------------------------------------------------------------------ sessions that came another way


async def test_a_session_that_was_made_by_a_raw_request_is_adopted_with_what_came_before() -> None:
    async with raw_agent(capabilities=EVERYTHING, unstable=True) as (peer, raw):
        making = asyncio.create_task(peer.request(v1.NewSessionRequest(cwd="/w", mcp_servers=[])))
        request = await raw.wait("session/new")
        raw.send(
            raw.update("raw", "a"),
            result(request, {"sessionId": "raw"}),
            raw.update("raw", "b"),
            raw.update("child", "of a subagent"),
        )
        response = await making
        session = peer.adopt_session(
            response.session_id, cwd="/w", additional_directories=["/more"]
        )
        assert peer.sessions["raw"] is session
        assert session.roots == ("/w", "/more")
        assert session.response is None
        raw.send(raw.update("raw", "c"))
        updates = session.updates()
        assert texts([await anext(updates) for _ in range(3)]) == ["a", "b", "c"]
        child = peer.adopt_session("child", cwd="/w").updates()
        assert (await anext(child)).text == "of a subagent"
        running = asyncio.create_task(session.prompt("go"))
        raw.answer(await raw.wait("session/prompt"), {"stopReason": "end_turn"})
        assert (await running).stop_reason == "end_turn"
        with pytest.raises(LocalProtocolError, match="is known"):
            peer.adopt_session("raw", cwd="/")


async def test_adopted_sessions_are_bounded_and_made_absolute() -> None:
    async with raw_agent(limits=Limits(sessions=1)) as (peer, _):
        assert Path(peer.adopt_session("a", cwd=".").cwd).is_absolute()
        with pytest.raises(LimitExceeded):
            peer.adopt_session("b", cwd=".")


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("closes", [True, False])
async def test_a_session_that_opens_too_late_is_closed_at_the_agent(
    how: str, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "antiphon.client")
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}} if closes else {}
    async with raw_agent(capabilities=capabilities) as (peer, raw):
        timeout = 0.05 if how == "timed out" else 60
        opening = asyncio.create_task(peer.new_session(cwd="/", timeout=timeout))
        request = await raw.wait("session/new")
        if how == "cancelled":
            opening.cancel()
        with pytest.raises((RequestTimeout, asyncio.CancelledError)):
            await opening
        await raw.wait("$/cancel_request")
        raw.send(raw.update("late", "hello"), result(request, {"sessionId": "late"}))
        await raw.round_trip()
        assert peer.sessions == {}
        if closes:
            closing = await raw.wait("session/close")
            assert closing["params"] == {"sessionId": "late"}
            raw.answer(closing, {})
            await raw.round_trip()
        else:
            assert raw.sent("session/close") == []
            assert "closes none" in caplog.text
        # Nothing was kept for it.
        late = peer.adopt_session("late", cwd="/").updates()
        raw.send(raw.update("late", "new"))
        assert (await anext(late)).text == "new"


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"code": -32800, "message": "Request cancelled"}},
        {"result": {"sessionId": 5}},
        {"result": {"sessionId": "s1"}},
        None,
    ],
)
async def test_a_late_answer_that_opens_nothing_closes_nothing(answer: Any) -> None:
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    async with raw_agent(capabilities=capabilities) as (peer, raw):
        session = await opened(peer, raw, "s1")
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        request = await raw.wait("session/new", 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        if answer is not None:  # else the link goes while it is still awaited
            raw.send({"jsonrpc": "2.0", "id": request["id"], **answer})
            await raw.round_trip()
        assert peer.sessions == {"s1": session}
        assert raw.sent("session/close") == []


async def test_a_caller_that_is_cancelled_at_the_moment_of_the_answer_leaves_no_session() -> None:
    capabilities: dict[str, Any] = {"sessionCapabilities": {"close": {}}}
    seen = asyncio.Event()

    async def observer(update: Update) -> None:
        seen.set()
        await asyncio.Event().wait()

    async with raw_agent(
        Client(on_update=observer), capabilities, limits=Limits(close_grace=0.05)
    ) as (peer, raw):
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        # The answer is here, and visible only when the observer has returned: never.
        raw.send(raw.update("s1", "stuck"), result(request, {"sessionId": "s1"}))
        await asyncio.wait_for(seen.wait(), 5)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert (await raw.wait("session/close"))["params"] == {"sessionId": "s1"}
        assert peer.sessions == {}


# ------------------------------------------------------------------ what lists say of directories


@pytest.mark.covers("R1-66")
async def test_directories_in_a_list_are_a_report_and_nobody_s_roots() -> None:
    async with raw_agent(capabilities=EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        infos: list[v1_unstable.SessionInfo] = []
        for count, more in ((1, {"additionalDirectories": ["/lent"]}), (2, {})):
            listing = asyncio.create_task(peer.list_sessions())
            entry = {"sessionId": "s1", "cwd": "/elsewhere", **more}
            raw.answer(await raw.wait("session/list", count), {"sessions": [entry]})
            infos += (await listing).sessions
        assert [info.additional_directories for info in infos] == [["/lent"], UNSET]
        assert session.roots == ("/",)  # neither merged nor inferred
        loading = asyncio.create_task(peer.load_session("s1", cwd="/w"))
        request = await raw.wait("session/load")
        assert "additionalDirectories" not in request["params"]
        raw.answer(request, {})
        assert (await loading).roots == ("/w",)


# ------------------------------------------------------------------ any order of anything


ACTS = st.sampled_from(["prompt", "update", "update", "update", "cancel", "answer", "read"])


@settings(max_examples=60)
@given(st.lists(st.tuples(ACTS, st.integers(0, 1)), max_size=30))
async def test_in_any_order_every_update_is_delivered_once_and_before_the_answer_behind_it(
    steps: list[tuple[str, int]],
) -> None:
    """Two sessions; every consumer sees its session's updates in wire order, and nothing is lost."""
    observed: dict[str, list[str]] = {"s0": [], "s1": []}

    def observer(update: Update) -> None:
        observed[update.session_id].append(update.text)

    async with raw_agent(Client(on_update=observer), EVERYTHING) as (peer, raw):
        sessions = [await opened(peer, raw, "s0"), await opened(peer, raw, "s1")]
        subscriptions = [session.updates() for session in sessions]
        turns: list[asyncio.Task[Any] | None] = [None, None]
        sent: dict[str, list[str]] = {"s0": [], "s1": []}
        expected: list[list[str]] = [[], []]  # of the open turn
        prompts = 0

        async def end(which: int) -> None:
            """Answer the open prompt; its outcome holds exactly what came since it was sent."""
            turn = turns[which]
            if turn is None:
                return
            (request,) = [
                frame
                for frame in raw.sent("session/prompt")
                if frame["params"]["prompt"][0]["text"] == turn.get_name()
            ]
            raw.answer(request, {"stopReason": "end_turn"})
            outcome = await turn
            assert texts(outcome.updates) == expected[which]
            assert observed[f"s{which}"] == sent[f"s{which}"]
            turns[which] = None

        for number, (act, which) in enumerate(steps):
            session_id = f"s{which}"
            if act == "prompt" and turns[which] is None:
                prompts += 1
                name = f"turn {prompts}"
                turns[which] = asyncio.create_task(run(sessions[which].prompt(name)), name=name)
                await raw.wait("session/prompt", prompts)
                expected[which] = []
            elif act == "update":
                text = f"{number}"
                sent[session_id].append(text)
                expected[which].append(text)
                raw.send(raw.update(session_id, text))
            elif act == "cancel":
                await sessions[which].cancel()
            elif act == "read":
                await raw.round_trip()
            elif act == "answer":
                await raw.round_trip()
                await end(which)
        for which in (0, 1):
            await end(which)
        await raw.round_trip()
        await raw.transport.aclose()
        for which, subscription in enumerate(subscriptions):
            assert texts([update async for update in subscription]) == sent[f"s{which}"]
    assert observed == sent
    assert peer.connection.queued_bytes == 0


async def test_a_session_whose_opener_was_cancelled_as_the_answer_came_is_closed_and_forgotten() -> (
    None
):
    async with raw_agent(None, EVERYTHING) as (peer, raw):
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        request = await raw.wait("session/new")
        opening.cancel()  # it has not run on when the answer is read
        peer.connection.frames_received(
            [b'{"jsonrpc":"2.0","id":%d,"result":{"sessionId":"unwanted"}}' % request["id"]]
        )
        with pytest.raises(asyncio.CancelledError):
            await opening

        close = await raw.wait("session/close")
        assert close["params"] == {"sessionId": "unwanted"}
        assert not peer.sessions
        raw.answer(close, {})
        await raw.round_trip()
        assert not peer.connection.protocol.calls


async def test_a_close_that_was_answered_counts_although_its_caller_was_cancelled() -> None:
    let_go: list[str] = []

    class Lending(Client):
        async def sessions_closed(self, session_ids: Any) -> None:
            let_go.extend(session_ids)

    async with raw_agent(Lending(), EVERYTHING) as (peer, raw):
        session = await opened(peer, raw)
        closing = asyncio.create_task(session.close())
        request = await raw.wait("session/close")
        closing.cancel()  # it has not run on when the answer is read
        peer.connection.frames_received([b'{"jsonrpc":"2.0","id":%d,"result":{}}' % request["id"]])
        raw.send(raw.update(session.session_id, "nobody's"))
        with pytest.raises(asyncio.CancelledError):
            await closing
        await raw.round_trip()

        assert not peer.sessions
        assert peer.connection.queued_bytes == 0
        assert let_go == [session.session_id]


async def test_a_session_for_which_there_is_no_room_any_more_is_closed_at_the_agent() -> None:
    async with raw_agent(None, EVERYTHING, limits=Limits(sessions=1)) as (peer, raw):
        first = asyncio.create_task(peer.new_session(cwd="/"))
        second = asyncio.create_task(peer.new_session(cwd="/"))
        requests = [await raw.wait("session/new", count) for count in (1, 2)]
        raw.send(result(requests[0], named("a")), result(requests[1], named("b")))
        await first
        with pytest.raises(LimitExceeded):
            await second
        assert (await raw.wait("session/close"))["params"] == {"sessionId": "b"}
        assert set(peer.sessions) == {"a"}


async def test_a_session_whose_answer_came_past_the_overdraft_is_closed_at_the_agent() -> None:
    limits = Limits(queue_bytes=1000)
    async with raw_agent(None, EVERYTHING, limits=limits) as (peer, raw):
        lazy = await opened(peer, raw)
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        request = await raw.wait("session/new", 2)
        # In one read, and the answer in the next, before anybody could run.
        flood = [json.dumps(raw.update("s1", "x" * 100)).encode() for _ in range(20)]
        peer.connection.frames_received(list(flood))
        peer.connection.frames_received([json.dumps(result(request, named("late"))).encode()])
        with pytest.raises(LimitExceeded):
            await opening
        lazy.updates().close()
        assert (await raw.wait("session/close"))["params"] == {"sessionId": "late"}


async def test_the_late_history_of_a_load_that_was_given_up_is_not_the_next_one_s() -> None:
    async with raw_agent(None, EVERYTHING) as (peer, raw):
        loading = asyncio.create_task(run(peer.load_session("s")))
        request = await raw.wait("session/load")
        raw.send(raw.update("s", "one"))
        await raw.round_trip()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        again = asyncio.create_task(run(peer.load_session("s")))
        raw.send(raw.update("s", "two"))
        await raw.round_trip()
        assert len(raw.sent("session/load")) == 1  # it waits for the answer to the first
        raw.send(raw.update("s", "three"), result(request, {}))
        second = await raw.wait("session/load", 2)
        assert raw.sent("session/close") == []
        raw.send(raw.update("s", "one"), raw.update("s", "two"), result(second, {}))
        session = await again
        assert texts([update async for update in session.replay()]) == ["one", "two"]
        assert peer.connection.queued_bytes == 0


async def test_a_load_that_was_refused_takes_nothing_from_the_next_that_came_before_it_was_told() -> (
    None
):
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_update: Update) -> None:
        held.set()
        await go_on.wait()

    async with raw_agent(Client(on_update=hold), EVERYTHING) as (peer, raw):
        first = asyncio.create_task(run(peer.load_session("s")))
        request = await raw.wait("session/load")
        raw.send(raw.update("s", "one"))
        raw.refuse(request, -32603)
        await held.wait()  # so that the refusal is seen only when the observer has returned
        await raw.round_trip()
        second = asyncio.create_task(run(peer.load_session("s")))
        again = await raw.wait("session/load", 2)
        go_on.set()
        with pytest.raises(RequestError):
            await first
        raw.answer(again, {})
        session = await second
        assert peer.sessions == {"s": session}
        raw.send(raw.update("s", "two"))
        assert (await anext(session.updates())).text == "two"


@pytest.mark.virtual_time
async def test_a_load_given_up_delays_the_next_by_the_back_stop_at_most() -> None:
    async with raw_agent(None, EVERYTHING, limits=Limits(cancel_backstop=5)) as (peer, raw):
        with pytest.raises(RequestTimeout):
            await peer.load_session("s", timeout=1)
        before = asyncio.get_running_loop().time()
        loading = asyncio.create_task(run(peer.load_session("s")))
        raw.answer(await raw.wait("session/load", 2), {})
        session = await loading
        assert asyncio.get_running_loop().time() - before == pytest.approx(5, abs=0.1)
        assert peer.sessions == {"s": session}


@pytest.mark.parametrize("moment", ["later", "read"])
async def test_a_load_that_opens_its_session_too_late_has_it_closed(moment: str) -> None:
    let_go: list[str] = []

    class Lending(Client):
        async def sessions_closed(self, session_ids: Any) -> None:
            let_go.extend(session_ids)

    async with raw_agent(Lending(), EVERYTHING) as (peer, raw):
        loading = asyncio.create_task(run(peer.load_session("s")))
        request = await raw.wait("session/load")
        loading.cancel()
        if moment == "read":
            peer.connection.frames_received([json.dumps(result(request, {})).encode()])
        with pytest.raises(asyncio.CancelledError):
            await loading
        if moment == "later":
            raw.answer(request, {})
        assert (await raw.wait("session/close"))["params"] == {"sessionId": "s"}
        await raw.round_trip()
        assert let_go == ["s"]
        assert not peer.sessions


async def test_a_load_that_fails_after_its_session_was_closed_leaves_the_next_one_alone() -> None:
    async with raw_agent(None, EVERYTHING) as (peer, raw):
        first = asyncio.create_task(run(peer.load_session("s")))
        request = await raw.wait("session/load")
        closing = asyncio.create_task(peer.close_session("s"))
        raw.answer(await raw.wait("session/close"), {})
        await closing
        second = asyncio.create_task(run(peer.load_session("s")))
        later = await raw.wait("session/load", 2)
        raw.refuse(request, -32002)
        with pytest.raises(ResourceNotFound):
            await first
        raw.send(raw.update("s", "x"), result(later, {}))
        session = await second
        assert peer.sessions == {"s": session}
        assert (await anext(session.updates())).text == "x"


async def answers_all(raw: RawPeer, given: list[str]) -> None:
    """Answer whatever comes, with updates before and behind; `given` gets the ids of new sessions."""
    for seen in range(1_000_000):
        while len(raw.frames) <= seen:
            await asyncio.sleep(0)
        frame = raw.frames[seen]
        method, session_id = frame.get("method"), frame.get("params", {}).get("sessionId", "")
        around: list[list[str]] = [[], []]
        answer: dict[str, Any] = {}
        match method:
            case "session/new":
                session_id = f"n{len(given)}"
                given.append(session_id)
                answer, around = named(session_id), [["early"], ["behind"]]
            case "session/load":
                around = [["one", "two"], ["behind"]]
            case "session/prompt":
                answer, around = {"stopReason": "end_turn"}, [["a", "b"], ["tail"]]
            case _:
                pass
        if "id" in frame and method is not None:
            before, behind = ([raw.update(session_id, text) for text in part] for part in around)
            raw.send(*before, result(frame, answer), *behind)


@pytest.mark.parametrize("what", ["new", "load", "replay", "prompt", "iterate", "close"])
async def test_a_task_that_is_cancelled_at_any_step_leaves_nothing_open(what: str) -> None:
    async def act(peer: AgentPeer, session: Session) -> None:
        match what:
            case "new":
                await peer.new_session(cwd="/")
            case "load":
                await peer.load_session("old")
            case "replay":
                async with peer.load_session("old") as old:
                    assert texts([update async for update in old.replay()]) == ["one", "two"]
            case "prompt":
                await session.prompt("go")
            case "iterate":
                async with session.prompt("go") as turn:
                    assert (await anext(turn)).text == "a"
            case _:
                await session.close()

    async def settled(peer: AgentPeer) -> None:
        for _ in range(4):
            await peer.request_extension("_x/ping")

    for step in range(25):
        async with raw_agent(None, EVERYTHING) as (peer, raw):
            given: list[str] = []
            answering = asyncio.create_task(answers_all(raw, given))
            session = await peer.new_session(cwd="/")
            acting = asyncio.create_task(act(peer, session))
            for _ in range(step):
                await asyncio.sleep(0)
            acting.cancel()
            await asyncio.wait([acting])
            await settled(peer)

            assert not peer.connection.protocol.calls
            # What the agent has open is known here.
            ended = {frame["params"]["sessionId"] for frame in raw.sent("session/close")}
            opened_there = {*given, *(["old"] if raw.sent("session/load") else [])}
            assert opened_there - ended <= set(peer.sessions)
            if what != "close":  # one that was given up may have been closed all the same
                assert opened_there - ended == set(peer.sessions)
                assert texts((await session.prompt("next")).updates) == ["a", "b"]
            if "old" not in peer.sessions:
                async with peer.load_session("old") as old:
                    assert texts([update async for update in old.replay()]) == ["one", "two"]
            await settled(peer)
            for each in list(peer.sessions.values()):
                await each.close()
            assert peer.connection.queued_bytes == 0
            answering.cancel()
            await asyncio.wait([answering])
