"""What a client of ours does with whatever an agent sends: gates, services, permission, updates."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from antiphon import (
    AgentPeer,
    Capabilities,
    Client,
    ClientContext,
    Limits,
    RequestError,
    Session,
    UnknownUpdate,
    Update,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.schema._codec import encode
from antiphon.testing import RawPeer, raw_agent


async def opened(peer: AgentPeer, raw: RawPeer, session_id: str = "s1", cwd: str = "/") -> Session:
    opening = asyncio.create_task(peer.new_session(cwd=cwd))
    request = await raw.wait("session/new", len(raw.sent("session/new")) + 1)
    raw.answer(request, {"sessionId": session_id})
    return await opening


def result(request: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": value}


def cancel_request(raw: RawPeer, id_: Any) -> dict[str, Any]:
    return raw.notification("$/cancel_request", {"requestId": id_})


# ------------------------------------------------------------------ gates


NOT_OFFERED = [
    "fs/read_text_file",
    "fs/write_text_file",
    "terminal/create",
    "terminal/output",
    "terminal/wait_for_exit",
    "terminal/kill",
    "terminal/release",
    "elicitation/create",
    "mcp/message",
]


@pytest.mark.covers("R1-8", "R1-9")
@pytest.mark.parametrize(
    "method",
    [*NOT_OFFERED, "session/update", "session/new", "session/prompt", "_x/y", "no/such", ""],
)
async def test_what_was_not_offered_is_not_found_whatever_its_parameters(method: str) -> None:
    async with raw_agent() as (_, raw):
        for text in ("{}", "null", '{"sessionId":5}', '{"sessionId":"s","path":"/x"}', "[]"):
            answer = await raw.ask(method, json.loads(text))
            assert answer["error"] == {
                "code": -32601,
                "message": "Method not found",
                "data": method,
            }
        # A client is not asked to initialize; now it is too late as well.
        assert "error" in await raw.ask("initialize", {"protocolVersion": 1})


@pytest.mark.covers("R1-7", "R1-10")
async def test_notifications_that_nobody_knows_are_met_with_silence() -> None:
    async with raw_agent() as (_, raw):
        before = len(raw.frames)
        for method in (
            "_vendor/y",
            "session/unheard",
            "$/other",
            "elicitation/complete",
            "auth/status_update",
            "terminal/create",
            "fs/read_text_file",
            "session/cancel",
            "",
        ):
            raw.send(raw.notification(method, {"sessionId": "s"}))
        await raw.round_trip()
        assert len(raw.frames) == before + 1


class Lending(Client):
    """Serves everything itself and notes what it was asked."""

    capabilities = Capabilities(elicitation_form=True, elicitation_url=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[Any, ClientContext]] = []
        self.told = asyncio.Event()

    def note(self, params: Any, ctx: ClientContext) -> None:
        self.seen.append((params, ctx))

    async def read_text_file(self, params: Any, ctx: ClientContext) -> v1.ReadTextFileResponse:
        self.note(params, ctx)
        return v1.ReadTextFileResponse(content="the text")

    async def write_text_file(self, params: Any, ctx: ClientContext) -> Any:
        self.note(params, ctx)

    async def create_terminal(self, params: Any, ctx: ClientContext) -> v1.CreateTerminalResponse:
        self.note(params, ctx)
        return v1.CreateTerminalResponse(terminal_id="t1")

    async def terminal_output(self, params: Any, ctx: ClientContext) -> v1.TerminalOutputResponse:
        self.note(params, ctx)
        status = v1.TerminalExitStatus(exit_code=0)
        return v1.TerminalOutputResponse(output="out", truncated=True, exit_status=status)

    async def wait_for_terminal_exit(
        self, params: Any, ctx: ClientContext
    ) -> v1.WaitForTerminalExitResponse:
        self.note(params, ctx)
        return v1.WaitForTerminalExitResponse(signal="SIGKILL")

    async def kill_terminal(self, params: Any, ctx: ClientContext) -> v1.KillTerminalResponse:
        self.note(params, ctx)
        return v1.KillTerminalResponse()

    async def release_terminal(self, params: Any, ctx: ClientContext) -> v1.ReleaseTerminalResponse:
        self.note(params, ctx)
        return v1.ReleaseTerminalResponse()

    async def create_elicitation(self, params: Any, ctx: ClientContext) -> Any:
        self.note(params, ctx)
        return v1.ElicitationAcceptAction(content={"n": 1, "s": "x", "l": ["a"]})

    async def complete_elicitation(self, params: Any, ctx: ClientContext) -> None:
        self.note(params, ctx)
        self.told.set()


FORM: dict[str, Any] = {
    "mode": "form",
    "message": "Who?",
    "requestedSchema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
URL: dict[str, Any] = {
    "mode": "url",
    "message": "Go",
    "elicitationId": "e",
    "url": "https://a.example",
}


@pytest.mark.parametrize(
    ("method", "params", "answer"),
    [
        ("fs/read_text_file", {"path": "/a", "line": 2, "limit": 3}, {"content": "the text"}),
        ("fs/write_text_file", {"path": "/a", "content": "x\n"}, {}),
        (
            "terminal/create",
            {"command": "ls", "args": ["-l"], "env": [{"name": "A", "value": "b"}], "cwd": "/x"},
            {"terminalId": "t1"},
        ),
        (
            "terminal/output",
            {"terminalId": "t1"},
            {"output": "out", "truncated": True, "exitStatus": {"exitCode": 0}},
        ),
        ("terminal/wait_for_exit", {"terminalId": "t1"}, {"signal": "SIGKILL"}),
        ("terminal/kill", {"terminalId": "t1"}, {}),
        ("terminal/release", {"terminalId": "t1"}, {}),
        (
            "elicitation/create",
            FORM,
            {"action": "accept", "content": {"n": 1, "s": "x", "l": ["a"]}},
        ),
        (
            "elicitation/create",
            URL,
            {"action": "accept", "content": {"n": 1, "s": "x", "l": ["a"]}},
        ),
    ],
)
async def test_a_handler_gets_the_typed_parameters_and_its_result_is_the_answer(
    method: str, params: dict[str, Any], answer: dict[str, Any]
) -> None:
    client = Lending()
    async with raw_agent(client, {"loadSession": True}) as (peer, raw):
        session = await opened(peer, raw, "s1", "/w")
        full = {"sessionId": "s1", **params}
        got = await raw.ask(method, {**full, "zzz": 1, "_meta": {"k": [1]}})
        assert got["result"] == answer
        ((seen, ctx),) = client.seen
        assert seen.meta == {"k": [1]}
        seen.meta = None
        sent = json.loads(encode(seen))
        sent.pop("_meta")
        assert sent == full
        assert (ctx.method, ctx.session_id, list(ctx.roots)) == (method, "s1", ["/w"])
        assert ctx.session is session
        assert ctx.peer is peer
        assert ctx.agent_capabilities.load_session is True
        assert json.loads(ctx.raw)["zzz"] == 1
        assert not ctx.cancelled


async def test_a_session_nobody_opened_has_no_roots_and_no_object() -> None:
    client = Lending()
    async with raw_agent(client) as (_, raw):
        answer = await raw.ask("fs/read_text_file", {"sessionId": "child", "path": "/a"})
        assert "result" in answer
        ((_, ctx),) = client.seen
        assert ctx.session is None
        assert list(ctx.roots) == []


@pytest.mark.covers("R1-13")
@pytest.mark.parametrize(
    ("method", "params", "names"),
    [
        ("fs/read_text_file", {"path": "/a", "line": -1}, "line"),
        ("fs/read_text_file", {"path": "/a", "limit": "3"}, "limit"),
        ("fs/read_text_file", {"path": 5}, "path"),
        ("fs/write_text_file", {"path": "/a"}, "content"),
        ("terminal/create", {"command": ["ls"]}, "command"),
        ("terminal/create", {"command": "ls", "args": [5]}, "args"),
        ("terminal/output", {}, "terminalId"),
        ("session/request_permission", {"options": []}, "toolCall"),
        ("elicitation/create", {**URL, "url": None}, "url"),
        ("elicitation/create", {"mode": 5}, ""),
    ],
)
async def test_parameters_that_do_not_decode_are_refused_by_name(
    method: str, params: dict[str, Any], names: str
) -> None:
    client = Lending()
    async with raw_agent(client) as (_, raw):
        answer = await raw.ask(method, {"sessionId": "s", **params})
        assert answer["error"]["code"] == -32602
        assert names in str(answer["error"]["data"])
    assert client.seen == []


async def test_what_a_handler_raises_stays_here_unless_it_is_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Lending):
        async def read_text_file(self, params: Any, ctx: ClientContext) -> v1.ReadTextFileResponse:
            if params.path == "/mine":
                raise RequestError.of(-32002, "gone", {"uri": "file:///mine"})
            raise OSError("a secret path")

        async def terminal_output(self, params: Any, ctx: ClientContext) -> Any:
            return {"output": "", "truncated": False}

    async with raw_agent(Failing()) as (_, raw):
        answer = await raw.ask("fs/read_text_file", {"sessionId": "s", "path": "/mine"})
        assert answer["error"] == {
            "code": -32002,
            "message": "gone",
            "data": {"uri": "file:///mine"},
        }
        for method, params in (
            ("fs/read_text_file", {"path": "/other"}),
            ("terminal/output", {"terminalId": "t"}),
        ):
            answer = await raw.ask(method, {"sessionId": "s", **params})
            assert answer["error"] == {"code": -32603, "message": "Internal error"}
    assert "a secret path" in caplog.text
    assert "not a result" in caplog.text


# ------------------------------------------------------------------ elicitation


@pytest.mark.covers("R1-128", "R1-142")
async def test_only_the_modes_that_were_offered_are_served() -> None:
    class Forms(Lending):
        capabilities = Capabilities(elicitation_form=True)

    class Links(Lending):
        capabilities = Capabilities(elicitation_url=True)

    for kind, served, other in ((Forms, FORM, URL), (Links, URL, FORM)):
        client = kind()
        async with raw_agent(client) as (_, raw):
            assert raw.frames[0]["params"]["clientCapabilities"]["elicitation"] == {
                served["mode"]: {}
            }
            assert "result" in await raw.ask("elicitation/create", {"sessionId": "s", **served})
            for params in (other, {**FORM, "mode": "telepathy"}):
                answer = await raw.ask("elicitation/create", {"sessionId": "s", **params})
                assert answer["error"]["code"] == -32602
        assert len(client.seen) == 1


async def test_a_form_that_belongs_to_a_request_needs_no_session() -> None:
    client = Lending()
    async with raw_agent(client) as (_, raw):
        assert "result" in await raw.ask("elicitation/create", {**FORM, "requestId": 7})
        ((params, ctx),) = client.seen
        assert params.request_id == 7
        assert ctx.session_id == ""


@pytest.mark.covers("R1-141")
async def test_completion_is_told_only_where_links_were_offered() -> None:
    class Forms(Lending):
        capabilities = Capabilities(elicitation_form=True)

    forms, links = Forms(), Lending()
    async with raw_agent(forms) as (_, raw):
        raw.send(raw.notification("elicitation/complete", {"elicitationId": "e"}))
        await raw.round_trip()
    assert forms.seen == []
    async with raw_agent(links) as (_, raw):
        raw.send(
            raw.notification("elicitation/complete", {}),  # is dropped
            raw.notification("elicitation/complete", {"elicitationId": "e"}),
        )
        await asyncio.wait_for(links.told.wait(), 5)
    assert [params.elicitation_id for params, _ in links.seen] == ["e"]


@pytest.mark.covers("R1-98")
async def test_a_question_can_be_withdrawn_at_any_moment() -> None:
    asked = asyncio.Event()

    class Slow(Lending):
        async def create_elicitation(self, params: Any, ctx: ClientContext) -> Any:
            self.note(params, ctx)
            asked.set()
            await asyncio.Event().wait()

    client = Slow()
    async with raw_agent(client) as (_, raw):
        params = {"sessionId": "s", **FORM}
        raw.send(raw.request(1, "elicitation/create", params), cancel_request(raw, 1))
        assert (await raw.answer_to(1))["error"]["code"] == -32800
        assert client.seen == []
        raw.send(raw.request(2, "elicitation/create", params))
        await asyncio.wait_for(asked.wait(), 5)
        raw.send(cancel_request(raw, 2))
        assert (await raw.answer_to(2))["error"]["code"] == -32800


async def test_unstable_methods_are_served_on_an_unstable_connection_only() -> None:
    told = asyncio.Event()

    class Binding(Client):
        async def message_mcp(self, params: Any, ctx: ClientContext) -> Any:
            return v1_unstable.MessageMcpResponseResult(result=None)

        async def auth_status_update(self, params: Any, ctx: ClientContext) -> None:
            assert params.state == "authenticated"
            told.set()

    params = {"serverId": "1", "requestId": "2", "method": "tools/list"}
    async with raw_agent(Binding()) as (_, raw):
        assert (await raw.ask("mcp/message", params))["error"]["code"] == -32601
        raw.send(raw.notification("auth/status_update", {"state": "authenticated"}))
        await raw.round_trip()
        assert not told.is_set()
    async with raw_agent(Binding(), unstable=True) as (_, raw):
        assert (await raw.ask("mcp/message", params))["result"] == {"result": None}
        raw.send(raw.notification("auth/status_update", {"state": "authenticated"}))
        await asyncio.wait_for(told.wait(), 5)


# ------------------------------------------------------------------ extensions


@pytest.mark.covers("R1-155", "R1-156")
async def test_an_agent_may_use_a_client_s_extensions() -> None:
    told: list[Any] = []

    class Mine(Client):
        @extension("_v/ask")
        async def ask(self, params: Any, ctx: ClientContext) -> Any:
            return {"of": ctx.session_id, "params": params, "peer": ctx.peer.offers("loadSession")}

        @extension("_v/typed", params=v1.EnvVariable)
        async def typed(self, params: v1.EnvVariable, ctx: ClientContext) -> Any:
            return params

        @extension("_v/tell", kind="notification")
        async def tell(self, params: Any, ctx: ClientContext) -> None:
            told.append(params)

        @extension("_v/typed", kind="notification", params=v1.EnvVariable)
        async def tell_typed(self, params: v1.EnvVariable, ctx: ClientContext) -> None:
            told.append(params)

    async with raw_agent(Mine()) as (_, raw):
        answer = await raw.ask("_v/ask", {"_meta": {"k": 1}, "sessionId": "x"})
        assert answer["result"] == {
            "of": "x",
            "params": {"_meta": {"k": 1}, "sessionId": "x"},
            "peer": False,
        }
        variable = {"name": "a", "value": "b"}
        assert (await raw.ask("_v/typed", variable))["result"] == variable
        assert (await raw.ask("_v/typed", [variable]))["error"]["code"] == -32602
        values: list[Any] = [1, None, {"x": []}]
        for value in values:
            raw.send(raw.notification("_v/tell", value))
        before = len(raw.frames)
        typed: list[Any] = [{"name": 5}, None, [], variable]  # asked or told; silence for bad ones
        for value in typed:
            raw.send(raw.notification("_v/typed", value))
        await raw.round_trip()
        assert len(raw.frames) == before + 1
        assert (await raw.ask("_v/other", {}))["error"]["code"] == -32601
    assert told == [1, None, {"x": []}, v1.EnvVariable(name="a", value="b")]


# ------------------------------------------------------------------ permission


def ask(session_id: str = "s1") -> dict[str, Any]:
    return {
        "sessionId": session_id,
        "toolCall": {"toolCallId": "never announced"},
        "options": [{"optionId": "y", "name": "Yes", "kind": "allow_once"}],
    }


YES = {"outcome": {"outcome": "selected", "optionId": "y"}}
CANCELLED = {"outcome": {"outcome": "cancelled"}}


class Dialog:
    """A person who answers when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.count = 0
        self.ended = 0

    async def __call__(self, params: Any, ctx: Any) -> bool:
        self.count += 1
        self.asked.set()
        try:
            await self.answer.wait()
        finally:
            self.ended += 1
        return True


@pytest.mark.covers("R1-92")
async def test_a_cancelled_turn_answers_its_own_questions_and_no_others() -> None:
    dialog = Dialog()
    async with raw_agent(Client(permissions=dialog)) as (peer, raw):
        one, two = await opened(peer, raw, "s1"), await opened(peer, raw, "s2")
        async with one.prompt("go") as first, two.prompt("go") as second:
            requests = [await raw.wait("session/prompt", n) for n in (1, 2)]
            raw.send(
                *(
                    raw.request(f"{session_id}-{n}", "session/request_permission", ask(session_id))
                    for session_id in ("s1", "s2")
                    for n in range(2)
                )
            )
            await raw.round_trip()
            await first.cancel()
            for n in range(2):
                assert (await raw.answer_to(f"s1-{n}"))["result"] == CANCELLED
            raw.send(raw.request("late", "session/request_permission", ask("s1")))
            assert (await raw.answer_to("late"))["result"] == CANCELLED
            dialog.answer.set()
            for n in range(2):
                assert (await raw.answer_to(f"s2-{n}"))["result"] == YES
            raw.send(*(result(request, {"stopReason": "end_turn"}) for request in requests))
            assert [update async for update in first] == []
            assert [update async for update in second] == []
        answers = [frame["id"] for frame in raw.sent(None) if frame["id"] != "ask-1"]
        assert sorted(answers) == ["late", "s1-0", "s1-1", "s2-0", "s2-1"]
        # The next turn of the session asks again.
        async with one.prompt("again") as third:
            request = await raw.wait("session/prompt", 3)
            assert (await raw.ask("session/request_permission", ask("s1")))["result"] == YES
            raw.send(result(request, {"stopReason": "end_turn"}))
            assert [update async for update in third] == []
        assert dialog.count == dialog.ended == 5


@pytest.mark.covers("R1-98")
@pytest.mark.parametrize("moment", ["before its task", "while it waits", "when it is answered"])
async def test_a_withdrawn_question_is_answered_once(moment: str) -> None:
    dialog = Dialog()
    async with raw_agent(Client(permissions=dialog)) as (peer, raw):
        await opened(peer, raw)
        request = raw.request("p", "session/request_permission", ask())
        if moment == "before its task":
            raw.send(request, cancel_request(raw, "p"), cancel_request(raw, "p"))
            expected = CANCELLED
        elif moment == "while it waits":
            raw.send(request)
            await asyncio.wait_for(dialog.asked.wait(), 5)
            raw.send(cancel_request(raw, "p"))
            expected = CANCELLED
        else:
            dialog.answer.set()
            raw.send(request)
            await raw.answer_to("p")
            raw.send(cancel_request(raw, "p"))
            expected = YES
        assert (await raw.answer_to("p"))["result"] == expected
        dialog.answer.set()  # an answer that comes late is nobody's
        await raw.round_trip()
        assert [frame["id"] for frame in raw.sent(None)].count("p") == 1
        assert dialog.count == (0 if moment == "before its task" else 1)


async def test_a_question_whose_turn_timed_out_is_answered_too() -> None:
    dialog = Dialog()
    async with raw_agent(Client(permissions=dialog)) as (peer, raw):
        session = await opened(peer, raw)
        turn = asyncio.ensure_future(_outcome(session, timeout=0.2))
        await raw.wait("session/prompt")
        raw.send(raw.request("p", "session/request_permission", ask()))
        with pytest.raises(TimeoutError):
            await turn
        assert (await raw.answer_to("p"))["result"] == CANCELLED


async def _outcome(session: Session, **options: Any) -> Any:
    return await session.prompt("go", **options)


@pytest.mark.covers("R1-92")
@pytest.mark.parametrize("policy", ["fixed", "asked"])
@pytest.mark.parametrize("silence", [None, 80])
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("state", ["open", "stopping", "no turn", "unknown session"])
async def test_a_question_is_shown_once_and_answered_in_one_way_whoever_decides(
    policy: str, silence: int | None, looked_at: bool, state: str
) -> None:
    async def always(params: Any, ctx: Any) -> bool:
        return True

    async with raw_agent(Client(permissions="allow" if policy == "fixed" else always)) as (
        peer,
        raw,
    ):
        session = await opened(peer, raw)
        turn = session.prompt("go", silence=silence)
        if state in {"open", "stopping"}:
            await turn.__aenter__()
        if state == "stopping":
            await turn.cancel(backstop=None)
        view = session.view if looked_at else None
        before = 0 if view is None else view.revision
        asked = ask("s2" if state == "unknown session" else "s1")
        answer = await raw.ask("session/request_permission", asked)

        assert answer["result"] == (CANCELLED if state == "stopping" else YES)
        if view is not None:
            shown = state != "unknown session"
            assert view.revision - before == shown
            assert list(view.tool_calls) == ["never announced"] * shown
        assert peer._router._questions == {}
        if turn.unsent:
            turn.close()
        else:
            raw.answer(await raw.wait("session/prompt"), {"stopReason": "end_turn"})
            assert [update async for update in turn] == []


async def test_what_decides_is_looked_for_once_and_decides_as_its_policy_is_then() -> None:
    looked: list[str] = []

    class Looking(Client):
        def find_handler(self, name: str) -> Any:
            looked.append(name)
            return super().find_handler(name)

    client = Looking(permissions="allow")
    async with raw_agent(client) as (peer, raw):
        await opened(peer, raw)
        looked.clear()
        found = [(await raw.ask("session/request_permission", ask("s1")))["result"]]
        client.permissions = "deny"
        found += [
            (await raw.ask("session/request_permission", ask("s1")))["result"] for _ in range(2)
        ]

    assert found == [YES, CANCELLED, CANCELLED]
    assert looked.count("request_permission") <= 2  # the handler, and what decides in its place


async def test_an_open_question_holds_up_neither_files_nor_updates() -> None:
    """Quirk 16: an agent reads a file while its own question is unanswered."""
    dialog = Dialog()
    client = Lending(permissions=dialog)
    async with raw_agent(client) as (peer, raw):
        session = await opened(peer, raw)
        raw.send(raw.request("p", "session/request_permission", ask()), raw.update("s1", "x"))
        await asyncio.wait_for(dialog.asked.wait(), 5)
        assert "result" in await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": "/a"})
        assert (await anext(session.updates())).text == "x"
        dialog.answer.set()
        assert (await raw.answer_to("p"))["result"] == YES


async def test_a_handler_may_call_the_agent_back() -> None:
    class Curious(Lending):
        async def read_text_file(self, params: Any, ctx: ClientContext) -> v1.ReadTextFileResponse:
            value = await ctx.peer.request_extension("_a/text")
            return v1.ReadTextFileResponse(content=value["text"])

    async with raw_agent(Curious()) as (_, raw):
        raw.send(raw.request("r", "fs/read_text_file", {"sessionId": "s", "path": "/a"}))
        raw.answer(await raw.wait("_a/text"), {"text": "from the agent"})
        assert (await raw.answer_to("r"))["result"] == {"content": "from the agent"}


async def test_nothing_is_kept_of_what_was_asked() -> None:
    dialog = Dialog()
    async with raw_agent(Lending(permissions=dialog)) as (peer, raw):
        await opened(peer, raw)
        for number in range(20):
            request = raw.request(number, "session/request_permission", ask(f"session {number}"))
            raw.send(request, cancel_request(raw, number))
            await raw.answer_to(number)
        dialog.answer.set()
        assert (await raw.ask("session/request_permission", ask()))["result"] == YES
        assert "result" in await raw.ask("fs/read_text_file", {"sessionId": "s1", "path": "/a"})
        connection = peer.connection
        assert peer._router._questions == {}
        assert (connection.protocol.requests, connection.protocol.calls) == ({}, {})
        assert connection.queued_bytes == 0
        assert connection.tasks == set()


async def test_handlers_end_with_the_connection() -> None:
    dialog = Dialog()
    async with raw_agent(Client(permissions=dialog)) as (peer, raw):
        await opened(peer, raw)
        raw.send(raw.request("p", "session/request_permission", ask()))
        await asyncio.wait_for(dialog.asked.wait(), 5)
    assert dialog.ended == 1


# ------------------------------------------------------------------ updates


async def test_updates_of_a_session_not_yet_known_wait_for_it() -> None:
    async with raw_agent() as (peer, raw):
        raw.send(*(raw.update(s, f"{s}{n}") for n in range(3) for s in ("a", "b")))
        await raw.round_trip()
        for session_id in ("b", "a"):
            session = await opened(peer, raw, session_id)
            updates = session.updates()
            assert [(await anext(updates)).text for _ in range(3)] == [
                f"{session_id}{n}" for n in range(3)
            ]
            raw.send(raw.update(session_id, "next"))
            assert (await anext(updates)).text == "next"


async def test_too_many_of_them_push_out_the_oldest_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(unknown_session_updates=4)
    async with raw_agent(limits=limits) as (peer, raw):
        with caplog.at_level(logging.WARNING, "antiphon.telemetry"):
            raw.send(*(raw.update("chatty", f"{n}") for n in range(4)))
            await raw.round_trip()
            assert caplog.records == []
            raw.send(raw.update("new", "a"), raw.update("new", "b"))
            await raw.round_trip()
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert "'chatty'" in caplog.text
        for session_id, expected in (("new", ["a", "b"]), ("chatty", ["2", "3"])):
            updates = (await opened(peer, raw, session_id)).updates()
            assert [(await anext(updates)).text for _ in range(2)] == expected


async def test_a_flood_of_them_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with raw_agent(limits=Limits(unknown_session_updates=4)) as (_, raw):
        raw.send(*(raw.update("ghost", "x") for _ in range(1004)))
        await raw.round_trip()

    lost = [record.__dict__["acp_facts"]["lost"] for record in caplog.records]
    assert lost == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


async def test_they_are_bounded_in_bytes_as_well(caplog: pytest.LogCaptureFixture) -> None:
    async with raw_agent(limits=Limits(queue_bytes=10_000)) as (peer, raw):
        raw.send(*(raw.update("s", f"{n}" + "x" * 2000) for n in range(10)))
        await raw.round_trip()
        lost = [record.__dict__["acp_facts"]["lost"] for record in caplog.records]
        assert lost == [1, 2, 4]  # of six
        updates = (await opened(peer, raw, "s")).updates()
        assert [(await anext(updates)).text[0] for _ in range(4)] == ["6", "7", "8", "9"]


@pytest.mark.covers("R1-86", "R1-156", "R1-158")
async def test_updates_that_are_odd_are_delivered_and_the_connection_lives() -> None:
    odd: list[dict[str, Any]] = [
        {"sessionUpdate": "brand_new", "x": [1]},
        {"sessionUpdate": "agent_message_chunk"},
        {"sessionUpdate": "tool_call", "toolCallId": "t", "title": "T", "kind": "deploy"},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "hologram"}},
        {"sessionUpdate": 5},
        {},
        {"sessionUpdate": "tool_call_update", "toolCallId": "never announced", "zzz": 1},
    ]
    async with raw_agent() as (peer, raw):
        session = await opened(peer, raw)
        updates = session.updates()
        for body in odd:
            params = {"sessionId": "s1", "update": body, "_meta": "bad", "schema_version": 1}
            raw.send(raw.notification("session/update", params))
        raw.send(
            # What has no session or no update at all is dropped.
            raw.notification("session/update", {"update": {}}),
            raw.notification("session/update", {"sessionId": 5, "update": {}}),
            raw.notification("session/update", {"sessionId": "s1"}),
            raw.notification("session/update", None),
            raw.update("s1", "good"),
        )
        got = [await anext(updates) for _ in odd]
        assert [json.loads(update.raw) for update in got] == odd
        unknown = [isinstance(update.value, UnknownUpdate) for update in got]
        assert unknown == [True, True, False, True, True, True, False]
        assert got[2].value.kind == "deploy"  # type: ignore[union-attr]
        assert (await anext(updates)).text == "good"
        assert len(raw.frames) == 2  # nothing of it was answered


async def test_an_overridden_update_handler_gets_the_context_of_the_update() -> None:
    seen: list[Any] = []

    class Mine(Client):
        async def session_update(self, params: Any, ctx: ClientContext) -> None:
            seen.append((params.meta, ctx.method, ctx.session_id, json.loads(ctx.raw), ctx.session))

    async with raw_agent(Mine()) as (peer, raw):
        session = await opened(peer, raw)
        update = raw.update("s1", "x")
        for meta in ({"k": 1}, "bad", None):
            update["params"]["_meta"] = meta
            raw.send(update)
        await raw.round_trip()
        await session.inbox.settled(3)
    metas = [entry[0] for entry in seen]
    assert metas[0] == {"k": 1}
    assert len(metas) == 3
    assert {entry[1:3] for entry in seen} == {("session/update", "s1")}
    assert [entry[3].get("_meta") for entry in seen] == [{"k": 1}, "bad", None]
    assert all(entry[3]["update"] == update["params"]["update"] for entry in seen)
    assert all(entry[4] is session for entry in seen)


async def test_an_observer_of_the_client_sees_what_came_before_the_session_was_known() -> None:
    seen: list[str] = []

    def note(update: Update) -> None:
        seen.append(update.text)

    async with raw_agent(Client(on_update=note)) as (peer, raw):
        raw.send(raw.update("s1", "early"))
        await raw.round_trip()
        session = await opened(peer, raw)
        assert seen == ["early"]
        raw.send(raw.update("s1", "later"))
        await raw.round_trip()
        await session.inbox.settled(2)
        assert seen == ["early", "later"]
