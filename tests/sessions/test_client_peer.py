"""A client as an agent of ours sees it: what it offered, what may be asked of it, how it answers."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import (
    Agent,
    CapabilityError,
    ClientPeer,
    ConnectionClosed,
    Limits,
    LocalProtocolError,
    MethodNotFound,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
    Turn,
    serve,
)
from antiphon.schema import UNSET, encode, v1, v1_unstable
from antiphon.testing import RawPeer, raw_client, unshaken_client
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EVERYTHING: dict[str, Any] = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
    "elicitation": {"form": {}, "url": {}},
    "session": {"notices": {}, "compaction": {}, "configOptions": {"boolean": {}}},
}


class Asking(Agent):
    """Runs one function as its prompt."""

    def __init__(self, act: Callable[[Turn], Awaitable[Any]]) -> None:
        self.act = act
        self.failed: list[BaseException] = []

    async def prompt(self, turn: Turn) -> None:
        try:
            await self.act(turn)
        except (AssertionError, pytest.fail.Exception) as error:
            self.failed.append(error)


async def started(raw: RawPeer) -> str:
    """Prompt a new session; its id."""
    answer = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
    session_id = answer["result"]["sessionId"]
    params = {"sessionId": session_id, "prompt": [{"type": "text", "text": "go"}]}
    raw.send(raw.request("p", "session/prompt", params))
    return str(session_id)


async def ended(agent: Asking, raw: RawPeer) -> None:
    assert (await raw.answer_to("p"))["result"]["stopReason"] == "end_turn"
    if agent.failed:
        raise agent.failed[0]


async def test_what_the_client_says_of_itself_is_at_hand() -> None:
    seen: list[Any] = []

    async def act(turn: Turn) -> None:
        peer = turn.peer
        seen.append((peer.info, peer.capabilities.terminal, peer.offers("fs.readTextFile")))
        assert turn.client_capabilities == peer.capabilities
        assert "ClientPeer" in repr(peer)

    for params, expected in (
        ({}, (None, UNSET, False)),
        (
            {
                "clientInfo": {"name": "ed", "version": "1"},
                "clientCapabilities": {"terminal": True, "fs": {"readTextFile": True}},
            },
            (v1.Implementation(name="ed", version="1"), True, True),
        ),
    ):
        agent = Asking(act)
        async with unshaken_client(agent) as raw:
            await raw.ask("initialize", {"protocolVersion": 1, **params})
            await started(raw)
            await ended(agent, raw)
        info, terminal, offers = seen.pop()
        assert (info, offers) == (expected[0], expected[2])
        assert bool(terminal) is bool(expected[1])


FORM = v1.ElicitationFormMode(
    message="Who?", requested_schema=v1.ElicitationSchema(), session_id="s"
)
URL = v1.ElicitationUrlMode(message="Go", elicitation_id="e", url="https://a", session_id="s")

REQUESTS: list[tuple[str, Any, Any, str | None]] = [
    (
        "fs/read_text_file",
        v1.ReadTextFileRequest(session_id="s", path="/a", line=2),
        {"content": "x"},
        "fs.readTextFile",
    ),
    (
        "fs/write_text_file",
        v1.WriteTextFileRequest(session_id="s", path="/a", content="x"),
        {},
        "fs.writeTextFile",
    ),
    (
        "terminal/create",
        v1.CreateTerminalRequest(session_id="s", command="ls", args=["-l"]),
        {"terminalId": "t"},
        "terminal",
    ),
    (
        "terminal/output",
        v1.TerminalOutputRequest(session_id="s", terminal_id="t"),
        {"output": "x", "truncated": False},
        "terminal",
    ),
    (
        "terminal/wait_for_exit",
        v1.WaitForTerminalExitRequest(session_id="s", terminal_id="t"),
        {"exitCode": 3},
        "terminal",
    ),
    ("terminal/kill", v1.KillTerminalRequest(session_id="s", terminal_id="t"), {}, "terminal"),
    (
        "terminal/release",
        v1.ReleaseTerminalRequest(session_id="s", terminal_id="t"),
        {},
        "terminal",
    ),
    ("elicitation/create", FORM, {"action": "decline"}, "elicitation.form"),
    ("elicitation/create", URL, {"action": "accept"}, "elicitation.url"),
    (
        "session/request_permission",
        v1.RequestPermissionRequest(
            session_id="s", tool_call=v1.ToolCallUpdate(tool_call_id="t"), options=[]
        ),
        {"outcome": {"outcome": "cancelled"}},
        None,
    ),
]


@pytest.mark.covers("R1-28", "R1-33", "R1-34", "R1-128", "R1-153")
@pytest.mark.parametrize(("method", "params", "answer", "gate"), REQUESTS)
async def test_every_request_is_gated_typed_both_ways_and_sent_as_it_is(
    method: str, params: Any, answer: Any, gate: str | None
) -> None:
    got: list[Any] = []

    async def act(turn: Turn) -> None:
        got.append(await turn.peer.request(params))

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING) as raw:
        await started(raw)
        request = await raw.wait(method)
        assert request["params"] == json.loads(encode(params))
        raw.answer(request, {**answer, "zzz": 1})
        await ended(agent, raw)
        assert json.loads(encode(got[0])) == answer
    if gate is None:
        return

    async def refused(turn: Turn) -> None:
        with pytest.raises(CapabilityError) as error:
            await turn.peer.request(params)
        assert error.value.capability == f"clientCapabilities.{gate}"
        assert error.value.method == method

    agent = Asking(refused)
    async with raw_client(agent) as raw:
        await started(raw)
        await ended(agent, raw)
        assert raw.sent(method) == []


@pytest.mark.parametrize(
    ("params", "method", "nothing"),
    [
        (
            v1.WriteTextFileRequest(session_id="s", path="/a", content=""),
            "fs/write_text_file",
            v1.WriteTextFileResponse(),
        ),
        (
            v1.KillTerminalRequest(session_id="s", terminal_id="t"),
            "terminal/kill",
            v1.KillTerminalResponse(),
        ),
        (
            v1.ReleaseTerminalRequest(session_id="s", terminal_id="t"),
            "terminal/release",
            v1.ReleaseTerminalResponse(),
        ),
    ],
)
async def test_an_answer_that_says_nothing_is_enough_for_a_request_that_asks_nothing(
    params: Any, method: str, nothing: Any
) -> None:
    """Quirk 7: `null` for an object; field fault 31: no `result` at all."""
    got: list[Any] = []

    async def act(turn: Turn) -> None:
        got.extend([await turn.peer.request(params) for _ in range(2)])

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING) as raw:
        await started(raw)
        raw.answer(await raw.wait(method), None)
        request = await raw.wait(method, 2)
        raw.send({"jsonrpc": "2.0", "id": request["id"]})
        await ended(agent, raw)
    assert got == [nothing, nothing]


@pytest.mark.covers("R1-116")
async def test_a_terminal_that_is_created_for_a_cancelled_task_is_released() -> None:
    entered = asyncio.Event()

    async def act(turn: Turn) -> None:
        async def enter() -> None:
            async with turn.run("sleep", ["60"]):
                raise AssertionError

        for _ in range(2):
            task = asyncio.create_task(enter())
            await entered.wait()
            entered.clear()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING) as raw:
        session_id = await started(raw)
        first = await raw.wait("terminal/create")
        entered.set()
        second = await raw.wait("terminal/create", 2)
        entered.set()
        await ended(agent, raw)
        raw.refuse(first, -32603)  # was not created: nothing to release
        raw.answer(second, {"terminalId": "t2"})
        release = await raw.wait("terminal/release")
        assert release["params"] == {"sessionId": session_id, "terminalId": "t2"}
        raw.answer(release, {})
        await raw.round_trip()
        assert len(raw.sent("terminal/release")) == 1
    async with raw_client(Asking(act), EVERYTHING) as raw:  # the link goes before the answer comes
        await started(raw)
        await raw.wait("terminal/create")
        entered.set()
        await raw.wait("terminal/create", 2)
        entered.set()
        await raw.answer_to("p")


@pytest.mark.covers("R1-103")
@pytest.mark.parametrize(
    "answer",
    [
        {"outcome": "selected", "optionId": "y"},  # flat, as some clients write it
        {"outcome": {"outcome": "selected", "optionId": "z"}},
        {"outcome": {"outcome": "selected"}},
        {"outcome": {"outcome": "selected", "optionId": None}},
        {"outcome": {"outcome": "cancelled"}},
        {"outcome": {"outcome": "approved", "optionId": "y"}},
        {"outcome": None},
        {"allowed": True},
        True,
        None,
        {"outcome": {"outcome": "selected", "optionId": "n"}},
    ],
)
async def test_every_answer_but_an_offered_option_that_allows_is_a_no(answer: Any) -> None:
    got: list[bool] = []
    options = [
        v1.PermissionOption(option_id="y", name="Yes", kind="allow_once"),
        v1.PermissionOption(option_id="n", name="No", kind="reject_once"),
    ]

    async def act(turn: Turn) -> None:
        permission = await turn.ask_permission("May I?", options)
        got.append(permission.allowed)

    agent = Asking(act)
    async with raw_client(agent) as raw:
        await started(raw)
        raw.answer(await raw.wait("session/request_permission"), answer)
        await ended(agent, raw)
    assert got == [False]


async def test_an_option_of_an_unknown_kind_does_not_allow() -> None:
    got: list[Any] = []
    options = [v1.PermissionOption(option_id="x", name="X", kind="allow_forever")]

    async def act(turn: Turn) -> None:
        permission = await turn.ask_permission("May I?", options)
        got.append((permission.option_id, permission.allowed))

    agent = Asking(act)
    async with raw_client(agent) as raw:
        await started(raw)
        request = await raw.wait("session/request_permission")
        raw.answer(request, {"outcome": {"outcome": "selected", "optionId": "x"}})
        await ended(agent, raw)
    assert got == [("x", False)]


async def test_a_malformed_answer_is_the_client_s_fault_and_an_error_its_answer() -> None:
    async def act(turn: Turn) -> None:
        read = v1.ReadTextFileRequest(session_id="s", path="/a")
        with pytest.raises(RemoteProtocolError, match=r"fs/read_text_file is malformed.*content"):
            await turn.peer.request(read)
        with pytest.raises(ResourceNotFound) as missing:
            await turn.peer.request(read)
        assert missing.value.data == "x"
        with pytest.raises(RequestError) as odd:
            await turn.peer.request(read)
        assert odd.value.code == 400

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING) as raw:
        await started(raw)
        raw.answer(await raw.wait("fs/read_text_file"), {"content": 5})
        raw.refuse(await raw.wait("fs/read_text_file", 2), -32002, data="x")
        raw.refuse(await raw.wait("fs/read_text_file", 3), 400)
        await ended(agent, raw)


async def test_what_was_asked_before_is_gated_and_read_as_at_the_first_time() -> None:
    """A second question of a kind goes a shorter way."""

    class Own(v1.ReadTextFileRequest):
        """As a user's own class."""

    async def act(turn: Turn) -> None:
        for kind in (v1.ReadTextFileRequest, Own, v1.ReadTextFileRequest):
            params = kind(session_id=turn.session_id, path="/a")
            assert await turn.peer.request(params) == v1.ReadTextFileResponse(content="1")
            with pytest.raises(
                RemoteProtocolError, match=r"fs/read_text_file is malformed.*content"
            ):
                await turn.peer.request(params)
            assert (await turn.peer.request(params)).content == "\ufffd"
            for _ in range(2):
                with pytest.raises(CapabilityError, match="writeTextFile"):
                    await turn.write_text_file("/a", "x")

    agent = Asking(act)
    async with raw_client(agent, capabilities={"fs": {"readTextFile": True}}) as raw:
        await started(raw)
        answers = [b'{"content":"1"}', b'{"content":1}', b'{"content":"\\ud800"}'] * 3
        for number, answer in enumerate(answers, 1):
            asked = await raw.wait("fs/read_text_file", number)
            raw.send(b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (asked["id"], answer))
        await ended(agent, raw)


async def test_patience_is_that_of_the_limits_unless_the_caller_says() -> None:
    look = v1.TerminalOutputRequest(session_id="s", terminal_id="t")
    wait = v1.WaitForTerminalExitRequest(session_id="s", terminal_id="t")

    async def act(turn: Turn) -> None:
        with pytest.raises(RequestTimeout, match=r"within 0.05 s"):
            await turn.peer.request(look)
        with pytest.raises(RequestTimeout, match=r"within 0.02 s"):
            await turn.peer.request(wait, timeout=0.02)
        with pytest.raises(RequestTimeout, match=r"_x/y within 0.05 s"):
            await turn.peer.request_extension("_x/y")
        with pytest.raises(RequestTimeout, match=r"_x/y within 0.02 s"):
            await turn.peer.request_extension("_x/y", timeout=0.02)
        # A command may run for ever, and a person may think for longer than a program.
        waiting = asyncio.ensure_future(_run(turn.peer.request(wait)))
        asking = asyncio.ensure_future(_run(turn.peer.request(FORM)))
        done, _ = await asyncio.wait([waiting, asking], timeout=0.1)
        assert not done
        waiting.cancel()
        asking.cancel()
        await asyncio.wait([waiting, asking])

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING, limits=Limits(request_timeout=0.05)) as raw:
        await started(raw)
        await ended(agent, raw)
        withdrawn = [frame["params"]["requestId"] for frame in raw.sent("$/cancel_request")]
        asked = [frame["id"] for frame in raw.frames if "method" in frame and "id" in frame]
        assert sorted(withdrawn) == sorted(asked)


async def _run(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def test_a_lost_client_fails_what_was_asked_of_it() -> None:
    failed: list[type[BaseException]] = []

    async def act(turn: Turn) -> None:
        for ask in (
            turn.peer.request(v1.ReadTextFileRequest(session_id="s", path="/a")),
            turn.peer.request_extension("_x/y"),
            turn.peer.notify_extension("_x/y"),
            turn.peer.notify(v1.CompleteElicitationNotification(elicitation_id="e")),
        ):
            try:
                await ask
            except ConnectionClosed as error:
                failed.append(type(error))

    agent = Asking(act)
    async with raw_client(agent, EVERYTHING) as raw:
        await started(raw)
        await raw.wait("fs/read_text_file")
    assert failed == [ConnectionClosed] * 4


@pytest.mark.covers("R1-155")
async def test_extensions_are_asked_and_told_with_any_json() -> None:
    async def act(turn: Turn) -> None:
        assert await turn.peer.request_extension("_x/y") == {"a": [None]}
        assert await turn.peer.request_extension("_x/y", {"k": 1}) is None
        with pytest.raises(MethodNotFound):
            await turn.peer.request_extension("_x/y", [1])
        await turn.peer.notify_extension("_x/tell")
        await turn.peer.notify_extension("_x/tell", v1.EnvVariable(name="a", value="b"))
        with pytest.raises(LocalProtocolError, match="underscore"):
            await turn.peer.request_extension("x/y")
        with pytest.raises(LocalProtocolError, match="underscore"):
            await turn.peer.notify_extension("fs/read_text_file")

    agent = Asking(act)
    async with raw_client(agent) as raw:
        await started(raw)
        first = await raw.wait("_x/y")
        assert "params" not in first
        raw.answer(first, {"a": [None]})
        second = await raw.wait("_x/y", 2)
        assert second["params"] == {"k": 1}
        raw.answer(second, None)
        raw.refuse(await raw.wait("_x/y", 3), -32601)
        await ended(agent, raw)
        told = raw.sent("_x/tell")
        assert [frame.get("params") for frame in told] == [None, {"name": "a", "value": "b"}]
        assert not any("id" in frame for frame in told)


async def test_completion_is_told_only_where_links_were_offered() -> None:
    done = v1.CompleteElicitationNotification(elicitation_id="e")

    async def act(turn: Turn) -> None:
        await turn.peer.notify(done)

    async def refused(turn: Turn) -> None:
        with pytest.raises(CapabilityError, match=r"elicitation\.url"):
            await turn.peer.notify(done)

    cases: list[tuple[dict[str, Any], Any, int]] = [
        (EVERYTHING, act, 1),
        ({"elicitation": {"form": {}}}, refused, 0),
        ({"elicitation": {}}, refused, 0),
    ]
    for offered, scene, count in cases:
        agent = Asking(scene)
        async with raw_client(agent, offered) as raw:
            await started(raw)
            await ended(agent, raw)
            assert len(raw.sent("elicitation/complete")) == count


async def test_unstable_methods_are_called_on_an_unstable_connection_only() -> None:
    message = v1_unstable.MessageMcpRequest(server_id="1", request_id="2", method="tools/list")
    status = v1_unstable.AuthStatusUpdateNotification(state="unknown")

    async def refused(turn: Turn) -> None:
        with pytest.raises(LocalProtocolError, match="unstable=True"):
            await turn.peer.request(message)
        with pytest.raises(LocalProtocolError, match="unstable=True"):
            await turn.peer.notify(status)

    async def act(turn: Turn) -> None:
        answer = await turn.peer.request(message)
        assert isinstance(answer, v1_unstable.MessageMcpResponseResult)
        await turn.peer.notify(status)

    agent = Asking(refused)
    async with raw_client(agent) as raw:
        await started(raw)
        await ended(agent, raw)
    agent = Asking(act)
    async with raw_client(agent, unstable=True) as raw:
        await started(raw)
        raw.answer(await raw.wait("mcp/message"), {"result": {"tools": []}})
        await ended(agent, raw)
        assert raw.sent("auth/status_update")[0]["params"] == {"state": "unknown"}


async def test_serving_ends_with_the_client_or_with_its_own_cancellation() -> None:
    ours, theirs = memory_pair()
    await theirs.start(RawPeer(theirs))
    serving = asyncio.create_task(serve(Agent(), ours))
    await theirs.aclose()
    await asyncio.wait_for(serving, 5)

    ours, theirs = memory_pair()
    raw = RawPeer(theirs)
    await theirs.start(raw)
    serving = asyncio.create_task(serve(Agent(), ours))
    await raw.ask("initialize", {"protocolVersion": 1})
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()
    await asyncio.wait_for(raw.lost.wait(), 5)
    await theirs.aclose()


async def test_an_agent_that_raises_cancellation_itself_answers_that_the_request_was_cancelled() -> (
    None
):
    async def act(turn: Turn) -> None:
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    async with raw_client(Asking(act)) as raw:
        session_id = await started(raw)
        assert (await raw.answer_to("p"))["error"]["code"] == -32800
        params: dict[str, Any] = {"sessionId": session_id, "prompt": []}
        again = await raw.ask("session/prompt", params)
        assert again["error"]["code"] == -32800


def test_a_peer_before_the_handshake_offers_nothing() -> None:
    async def look() -> None:
        ours, theirs = memory_pair()
        peer = ClientPeer(ours, Agent())
        assert peer.info is None
        assert peer.capabilities == v1_unstable.ClientCapabilities()
        assert not peer.offers("terminal")
        await theirs.aclose()
        await ours.aclose()

    asyncio.run(look())
