"""Field faults 12 to 18: who is answered, when the peer goes, ids, unknown methods, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
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
    unshaken_agent,
)

from antiphon import (
    Agent,
    Client,
    ConnectionClosed,
    Limits,
    RequestError,
    RequestTimeout,
    StartError,
    Turn,
    extension,
    spawn,
)
from antiphon.services import Files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from antiphon import AgentPeer, ClientContext, Session, Update

CANCELLED = {"stopReason": "cancelled"}
FULL: dict[str, Any] = {"loadSession": True, "sessionCapabilities": {"list": {}, "close": {}}}
OPTIONS = [
    {"optionId": "y", "name": "Yes", "kind": "allow_once"},
    {"optionId": "n", "name": "No", "kind": "reject_once"},
]


def prompt(session_id: str, text: str = "go") -> dict[str, Any]:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}


def ask(id_: Any, session_id: str = "s1") -> dict[str, Any]:
    params = {"sessionId": session_id, "toolCall": {"toolCallId": "t"}, "options": OPTIONS}
    return RawPeer.request(id_, "session/request_permission", params)


# ------------------------------------------------------------------ 12

CALLS: dict[str, Callable[[AgentPeer, Session], Any]] = {
    "session/new": lambda peer, session: peer.new_session(cwd="/"),
    "session/prompt": lambda peer, session: session.prompt("go"),
    "session/load": lambda peer, session: peer.load_session("s2", cwd="/"),
    "session/list": lambda peer, session: peer.list_sessions(),
    "session/set_mode": lambda peer, session: session.set_mode("m"),
    "session/close": lambda peer, session: session.close(),
    "_x/y": lambda peer, session: peer.request_extension("_x/y"),
}


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("last", [b"", b'{"jsonrpc":"2.0","id":3,"res', b'{"half'])
async def test_when_an_agent_goes_every_open_call_fails_and_every_later_one_at_once(
    wire: str, last: bytes
) -> None:
    async with raw_agent(wire, None, FULL) as (peer, raw):
        session = await opened(peer, raw)
        running = [begun(call(peer, session)) for call in CALLS.values()]
        for method in CALLS:
            await raw.wait(method, 2 if method == "session/new" else 1)
        if last and wire == "process":
            raw.send_bytes(last)
        await raw.aclose()
        done, pending = await asyncio.wait(running, timeout=5)
        assert not pending
        assert len(done) == len(CALLS)
        for task in running:
            assert isinstance(task.exception(), ConnectionClosed)
        begin = time.monotonic()
        for call in CALLS.values():
            with pytest.raises(ConnectionClosed):
                await call(peer, session)
        assert time.monotonic() - begin < 1
        if wire == "process":
            error = running[0].exception()
            assert isinstance(error, ConnectionClosed)
            assert error.exit_status == 0
        await asyncio.gather(peer.aclose(), peer.aclose())
        await peer.aclose()


GOES: dict[str, str] = {
    "exits": "sys.stdin.readline(); sys.stderr.write('no API key\\n'); sys.exit(7)",
    "exits before reading": "sys.stderr.write('no API key\\n'); sys.exit(7)",
    "dies": "sys.stdin.readline(); sys.stderr.write('no API key\\n'); sys.stderr.flush(); "
    "os.kill(os.getpid(), 9)",
    "half a frame": 'sys.stdin.readline(); sys.stdout.write(\'{"id":1,"resu\'); '
    "sys.stdout.flush(); sys.stderr.write('no API key\\n'); sys.exit(7)",
}


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("how", GOES)
async def test_an_agent_that_goes_during_its_start_is_told_with_its_last_words(how: str) -> None:
    begin = time.monotonic()
    with pytest.raises(StartError) as failed:
        await spawn([sys.executable, "-S", "-c", f"import os, sys; {GOES[how]}"])
    assert time.monotonic() - begin < 5
    assert failed.value.exit_status == (-9 if how == "dies" else 7)
    assert "no API key" in failed.value.stderr_tail
    assert not failed.value.timed_out


LIVES_ON = """
import json, os, sys, time
request = json.loads(sys.stdin.readline())
print(json.dumps({"id": request["id"], "result": {"protocolVersion": 1}}), flush=True)
sys.stdin.readline()
%s
os.close(1); os.dup2(2, 1)
time.sleep(60)
"""


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("last", ["", "sys.stdout.write('{\"id\":2,'); sys.stdout.flush()"])
async def test_an_agent_that_closes_its_output_and_lives_on_fails_its_callers_too(
    last: str,
) -> None:
    begin = time.monotonic()
    async with spawn([sys.executable, "-S", "-c", LIVES_ON % last]) as peer:
        with pytest.raises(ConnectionClosed):
            await peer.new_session(cwd="/")
        assert time.monotonic() - begin < 3
    assert peer.process.exit_status is not None


class Asker(Agent):
    """Has every kind of question open at its client."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.all_ended = asyncio.Event()

    async def prompt(self, turn: Turn) -> None:
        async def note(name: str, work: Awaitable[Any]) -> None:
            try:
                await work
                self.ended.append(f"{name} answered")
            except ConnectionClosed:
                self.ended.append(name)
            except asyncio.CancelledError:
                self.ended.append(f"{name} cancelled")
                raise

        async def permission() -> None:
            if not await turn.ask_permission("?"):
                raise ConnectionClosed("denied")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(note("read", turn.read_text_file("/x")))
                group.create_task(note("write", turn.write_text_file("/x", "y")))
                group.create_task(note("extension", turn.peer.request_extension("_x/y")))
                group.create_task(note("permission", permission()))
        finally:
            self.all_ended.set()


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_when_a_client_goes_nothing_that_an_agent_asked_waits(wire: str) -> None:
    agent = Asker()
    lends = {"fs": {"readTextFile": True, "writeTextFile": True}}
    async with raw_client(wire, agent, lends) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        for method in ("fs/read_text_file", "_x/y", "session/request_permission"):
            await raw.wait(method)
        await raw.aclose()
        async with asyncio.timeout(5):
            await agent.all_ended.wait()
    assert len(agent.ended) == 4
    assert not [entry for entry in agent.ended if "answered" in entry]


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_call_that_is_made_while_the_link_goes_is_failed_like_the_others(
    wire: str,
) -> None:
    for turns in range(12):
        async with raw_agent(wire) as (peer, raw):
            await raw.aclose()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                with pytest.raises(ConnectionClosed):
                    await peer.request_extension("_x/y", timeout=None)


# ------------------------------------------------------------------ 13


@pytest.mark.covers("FF-13")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("where", ["observer of the session", "observer of the client"])
async def test_a_handler_of_updates_may_ask_the_agent_about_its_own_session(
    wire: str, where: str
) -> None:
    done: list[str] = []
    holder: list[Session] = []

    async def on_update(update: Update) -> None:
        if update.text:
            await holder[0].set_mode(update.text)
            done.append(update.text)

    client = Client(on_update=on_update) if where == "observer of the client" else None
    async with raw_agent(wire, client) as (peer, raw):
        session = await opened(peer, raw)
        holder.append(session)
        if client is None:
            session.on_update(on_update)
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(*(raw.update("s1", str(n)) for n in range(3)), reply(request, END))
        for n in range(3):
            raw.answer(await raw.wait("session/set_mode", n + 1), {})
        async with asyncio.timeout(5):
            assert (await running).text == "012"
        assert done == ["0", "1", "2"]


@pytest.mark.covers("FF-13")
async def test_a_handler_of_updates_may_prompt_the_same_session_after_the_turn() -> None:
    """The nested prompt waits for its own updates, and not for the handler that it runs in."""
    outcomes: list[str] = []
    holder: list[Session] = []

    async def on_update(update: Update) -> None:
        if update.text == "again?":
            outcomes.append((await holder[0].prompt("nested")).text)

    async with raw_agent("memory") as (peer, raw):
        session = await opened(peer, raw)
        holder.append(session)
        session.on_update(on_update)
        raw.send(raw.update("s1", "again?"))  # outside a turn
        request = await raw.wait("session/prompt")
        raw.send(raw.update("s1", "inner"), reply(request, END))
        async with asyncio.timeout(5):
            while not outcomes:
                await asyncio.sleep(0)
        assert outcomes == ["inner"]


@pytest.mark.covers("FF-13", "FF-21")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_load_whose_first_update_comes_before_its_answer_never_hangs(wire: str) -> None:
    seen: list[str] = []

    async def on_update(update: Update) -> None:
        await asyncio.sleep(0)
        seen.append(update.text)

    async with raw_agent(wire, Client(on_update=on_update), FULL) as (peer, raw):
        loading = begun(peer.load_session("s1", cwd="/"))
        request = await raw.wait("session/load")
        raw.send(*(raw.update("s1", str(n)) for n in range(200)), reply(request, {}))
        async with asyncio.timeout(5):
            await loading
        assert seen == [str(n) for n in range(200)]


class Caller(Agent):
    async def prompt(self, turn: Turn) -> None:
        text = await turn.read_text_file("/x")
        await turn.say(text)

    async def load_session(self, params: Any, ctx: Any) -> None:
        await ctx.peer.request_extension("_x/history")

    @extension("_test/told", kind="notification")
    async def told(self, params: Any, ctx: Any) -> None:
        await ctx.peer.request_extension("_x/asked", params)


@pytest.mark.covers("FF-13")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_every_handler_of_an_agent_may_ask_its_client(wire: str) -> None:
    async with raw_client(wire, Caller(), {"fs": {"readTextFile": True}}) as raw:
        session_id = await opened_in(raw)
        raw.send(
            raw.request(1, "session/prompt", prompt(session_id)),
            raw.request(2, "session/load", {"sessionId": "old", "cwd": "/", "mcpServers": []}),
            raw.notification("_test/told", 1),
            raw.notification("_test/told", 2),
        )
        raw.answer(await raw.wait("_x/asked"), {})
        raw.answer(await raw.wait("_x/asked", 2), {})
        raw.answer(await raw.wait("_x/history"), {})
        raw.answer(await raw.wait("fs/read_text_file"), {"content": "text"})
        assert (await raw.answer_to(1))["result"] == END
        assert "result" in await raw.answer_to(2)
        assert [f["params"] for f in raw.sent("_x/asked")] == [1, 2]


# ------------------------------------------------------------------ 14


class Dialog(Agent):
    async def prompt(self, turn: Turn) -> str | None:
        if turn.text == "ask":
            allowed = await turn.ask_permission("?")
            await turn.say(f"allowed {bool(allowed)}")
        return None

    async def list_sessions(self, params: Any, ctx: Any) -> Any:
        raise RequestError(-1, "listed")


@pytest.mark.covers("FF-14")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_an_open_dialog_of_one_session_holds_up_nothing_at_the_agent(wire: str) -> None:
    async with raw_client(wire, Dialog()) as raw:
        first = await opened_in(raw)
        raw.send(raw.request("turn", "session/prompt", prompt(first, "ask")))
        question = await raw.wait("session/request_permission")
        async with asyncio.timeout(1):
            second = await opened_in(raw)
            assert (await raw.ask("session/prompt", prompt(second)))["result"] == END
            assert (await raw.ask("session/list", {}))["error"]["code"] == -1
            raw.send(raw.notification("session/cancel", {"sessionId": first}))
            assert (await raw.answer_to("turn"))["result"] == CANCELLED
        raw.answer(question, {"outcome": {"outcome": "selected", "optionId": "allow_once"}})
        await raw.round_trip()
        assert len(raw.responses("turn")) == 1


@pytest.mark.covers("FF-14")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_nor_at_the_client_and_its_other_sessions_go_on(wire: str, tmp_path: Path) -> None:
    never = asyncio.Event()

    async def decide(params: Any, ctx: ClientContext) -> bool:
        await never.wait()
        return True

    (tmp_path / "a").write_text("text")
    async with raw_agent(wire, Client(permissions=decide, files=Files())) as (peer, raw):
        first = await opened(peer, raw, "s1", tmp_path)
        running = begun(first.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(ask("q"))
        async with asyncio.timeout(5):
            second = await opened(peer, raw, "s2", tmp_path)
            other = begun(second.prompt("go"))
            raw.answer(await raw.wait("session/prompt", 2), END)
            assert (await other).stop_reason == "end_turn"
            params = {"sessionId": "s1", "path": str(tmp_path / "a")}
            assert "result" in await raw.ask("fs/read_text_file", params)
            await first.cancel()
            assert (await raw.answer_to("q"))["result"]["outcome"] == {"outcome": "cancelled"}
            raw.answer(request, CANCELLED)
            assert (await running).stop_reason == "cancelled"


# ------------------------------------------------------------------ 15

LEGAL_IDS: list[Any] = [0, "", -1, 2**53 + 1, 2**63 - 1, -(2**63), 1, "1", "6f1c-9a", "true", "ä\n"]
ILLEGAL_IDS = [b"1.5", b"true", b"null", b"1e3", b"[]", b"{}", b"1.0", b"false"]


@pytest.mark.covers("FF-15")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_every_legal_id_comes_back_of_its_own_type_and_value(wire: str) -> None:
    async with raw_client(wire, Dialog()) as raw:
        for id_ in LEGAL_IDS:
            raw.send(raw.request(id_, "session/list", {}))
        for id_ in LEGAL_IDS:
            await raw.answer_to(id_)
            assert len(raw.responses(id_)) == 1


@pytest.mark.covers("FF-15")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_question_with_a_string_id_is_asked_and_answered(wire: str) -> None:
    async with raw_agent(wire, Client(permissions="allow")) as (peer, raw):
        await opened(peer, raw)
        for id_ in (*LEGAL_IDS, "6f1c0f2e-7a52-4a39-8a53-5b0f5a1a4f0e"):
            raw.send(ask(id_))
            answer = await raw.answer_to(id_)
            assert answer["result"]["outcome"]["optionId"] == "y"


@pytest.mark.covers("FF-15")
@pytest.mark.parametrize("side", ["agent", "client"])
async def test_an_illegal_id_is_refused_without_it(side: str) -> None:
    async def check(raw: RawPeer) -> None:
        for id_ in ILLEGAL_IDS:
            raw.send(b'{"jsonrpc":"2.0","method":"session/list","id":' + id_ + b"}")
        await raw.round_trip()
        assert [f["error"]["code"] for f in raw.responses(None)] == [-32600] * len(ILLEGAL_IDS)

    if side == "agent":
        async with raw_client("memory", Dialog()) as raw:
            await check(raw)
    else:
        async with raw_agent("memory") as (_, raw):
            await check(raw)


@pytest.mark.covers("FF-15")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_an_answer_whose_id_only_looks_like_ours_is_no_answer(wire: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        asking = begun(peer.request_extension("_x/y"))
        id_ = (await raw.wait("_x/y"))["id"]
        for other in (f'"{id_}"', f"{id_}.0", f"{id_}e0", "true", f"[{id_}]", f"0{id_}", "null"):
            raw.send(b'{"jsonrpc":"2.0","result":"wrong","id":' + other.encode() + b"}")
        await raw.round_trip()
        assert not asking.done()
        raw.send({"jsonrpc": "2.0", "id": id_, "result": "right"})
        assert await asking == "right"
        raw.send({"jsonrpc": "2.0", "id": id_, "result": "twice"})
        await raw.round_trip()


@pytest.mark.covers("FF-15")
async def test_both_sides_may_use_the_same_id_at_the_same_time() -> None:
    async with raw_agent("memory", Client(permissions="allow")) as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(ask(request["id"]), raw.update("s1", "a"))
        answer = await raw.answer_to(request["id"])
        assert answer["result"]["outcome"]["outcome"] == "selected"
        assert not running.done()
        raw.answer(request, END)
        assert (await running).text == "a"


# ------------------------------------------------------------------ 16

UNKNOWN_REQUESTS = ["_vendor/x", "ping", "terminal/create", "session/unheard", "$/x", ""]
UNKNOWN_NOTICES = ["_vendor/y", "session/unheard", "$/other", "ping", "initialize", ""]


@pytest.mark.covers("FF-16")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_client_answers_unknown_requests_and_no_unknown_notification(wire: str) -> None:
    async with raw_agent(wire) as (_, raw):
        await meets_the_unknown(raw)


@pytest.mark.covers("FF-16")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_so_does_an_agent(wire: str) -> None:
    async with raw_client(wire, Caller()) as raw:
        await meets_the_unknown(raw)


async def meets_the_unknown(raw: RawPeer) -> None:
    given: list[Any] = [{}, None, [], {"sessionId": 5}]
    for params in given:
        for method in UNKNOWN_NOTICES:
            raw.send(raw.notification(method, params))
        for method in UNKNOWN_REQUESTS:
            error = (await raw.ask(method, params))["error"]
            assert (error["code"], error["data"]) == (-32601, method)
    assert raw.responses(None) == []


# ------------------------------------------------------------------ 17


@pytest.mark.covers("FF-17")
async def test_serving_that_is_cancelled_a_hundred_times_leaves_nothing() -> None:
    """No task, no warning: the test's own checks look for them."""
    from antiphon import serve
    from antiphon.transports import memory_pair

    for turns in range(100):
        ours, theirs = memory_pair()
        raw = RawPeer(theirs)
        await raw.start()
        serving = asyncio.ensure_future(serve(Waiting(), ours))
        raw.send(raw.request(0, "initialize", {"protocolVersion": 1}))
        raw.send(raw.request(1, "session/new", {"cwd": "/", "mcpServers": []}))
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        await raw.aclose()


class Waiting(Agent):
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    async def prompt(self, turn: Turn) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                await turn.wait_cancelled()
                raise TimeoutError
        except* TimeoutError:
            await turn.say("stopped")

    async def list_sessions(self, params: Any, ctx: Any) -> Any:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            self.errors.append(error)
            raise


class Impatient(Agent):
    async def prompt(self, turn: Turn) -> None:
        try:
            await asyncio.wait_for(turn.read_text_file("/x"), 0.01)
        except TimeoutError:
            await turn.say("too late")
        await turn.say(await turn.read_text_file("/y"))


@pytest.mark.covers("FF-17")
@pytest.mark.parametrize("wire", AGENT_WIRES)
async def test_a_late_answer_to_a_call_that_was_given_up_is_not_the_next_one_s(wire: str) -> None:
    async with raw_client(wire, Impatient(), {"fs": {"readTextFile": True}}) as raw:
        session_id = await opened_in(raw)
        raw.send(raw.request(3, "session/prompt", prompt(session_id)))
        first = await raw.wait("fs/read_text_file")
        cancel = await raw.wait("$/cancel_request")
        assert cancel["params"] == {"requestId": first["id"]}
        second = await raw.wait("fs/read_text_file", 2)
        raw.send(reply(first, {"content": "late"}), reply(second, {"content": "right"}))
        await raw.answer_to(3)
        said = [f["params"]["update"]["content"]["text"] for f in raw.sent("session/update")]
        assert said == ["too late", "right"]


@pytest.mark.covers("FF-17")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize("how", ["wait_for", "timeout", "task group"])
async def test_so_at_a_client_however_it_gave_up(wire: str, how: str) -> None:
    async with raw_agent(wire) as (peer, raw):
        if how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(peer.request_extension("_x/a"), 0.01)
        elif how == "timeout":
            with pytest.raises(RequestTimeout):
                await peer.request_extension("_x/a", timeout=0.01)
        else:
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(peer.request_extension("_x/a"))
                    await raw.wait("_x/a")
                    raise LookupError
        first = await raw.wait("_x/a")
        assert (await raw.wait("$/cancel_request"))["params"] == {"requestId": first["id"]}
        asking = begun(peer.request_extension("_x/b"))
        second = await raw.wait("_x/b")
        raw.send(reply(first, "late"), reply(second, "right"))
        assert await asking == "right"


@pytest.mark.covers("FF-17")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize("when", ["before", "same write", "during", "after", "twice", "other type"])
async def test_a_cancellation_of_a_request_at_any_time_leaves_it_one_answer(
    wire: str, when: str
) -> None:
    agent = Waiting()
    async with raw_client(wire, agent) as raw:
        cancel = raw.notification("$/cancel_request", {"requestId": 3})
        request = raw.request(3, "session/list", {})
        if when == "before":
            raw.send(cancel)
            raw.send(request)
            await raw.round_trip()
            assert not raw.responses(3)
            raw.send(cancel)
        elif when == "same write":
            raw.send(request, cancel)
        elif when == "other type":
            raw.send(request, raw.notification("$/cancel_request", {"requestId": "3"}))
            await raw.round_trip()
            assert not raw.responses(3)
            raw.send(cancel)
        else:
            raw.send(request)
            await raw.round_trip()
            raw.send(*([cancel] * (2 if when == "twice" else 1)))
        assert (await raw.answer_to(3))["error"]["code"] == -32800
        if when == "after":
            raw.send(cancel)
        await raw.round_trip()
        assert len(raw.responses(3)) == 1
        # the reader lives, and the id may be used again
        raw.send(raw.request(3, "session/new", {"cwd": "/", "mcpServers": []}))
        await raw.until(lambda: len(raw.responses(3)) == 2)


# ------------------------------------------------------------------ 18


@pytest.mark.covers("FF-18")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
@pytest.mark.parametrize(
    "data", [{"details": "model not found"}, "model not found", ["model not found", 1], None, ...]
)
async def test_an_error_is_shown_with_all_that_was_said(wire: str, data: Any) -> None:
    error = {"code": -32603, "message": "Internal error"} | ({} if data is ... else {"data": data})
    async with raw_agent(wire) as (peer, raw):
        session = await opened(peer, raw)
        for work, method in (
            (session.prompt("go"), "session/prompt"),
            (peer.request_extension("_x/y"), "_x/y"),
        ):
            running = begun(work)
            request = await raw.wait(method)
            raw.send({"jsonrpc": "2.0", "id": request["id"], "error": error})
            with pytest.raises(RequestError) as failed:
                await running
            shown = str(failed.value)
            assert "Internal error" in shown
            assert "-32603" in shown
            assert failed.value.data == (None if data is ... else data)
            assert data in (None, ...) or "model not found" in shown


@pytest.mark.covers("FF-18")
async def test_an_error_without_a_message_still_tells_what_it_has() -> None:
    async with raw_agent("memory") as (peer, raw):
        running = begun(peer.request_extension("_x/y"))
        request = await raw.wait("_x/y")
        raw.send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": 7, "data": "why"}})
        with pytest.raises(Exception, match="why"):
            await running


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Failing(Agent):
    async def prompt(self, turn: Turn) -> None:
        raise {
            "value": ValueError("secret: no such model"),
            "unspeakable": Unspeakable(object()),
            "unserialisable": RequestError(7, "told", object()),
            "base": BaseExceptionGroup("secret", [KeyError("secret")]),
            "told": RequestError(-32603, "no such model", {"model": "x"}),
        }[turn.text]


@pytest.mark.covers("FF-18")
@pytest.mark.parametrize("wire", AGENT_WIRES)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("value", {"code": -32603, "message": "Internal error"}),
        ("unspeakable", {"code": -32603, "message": "Internal error"}),
        ("base", {"code": -32603, "message": "Internal error"}),
        ("unserialisable", {"code": 7, "message": "told"}),
        ("told", {"code": -32603, "message": "no such model", "data": {"model": "x"}}),
    ],
)
async def test_an_exception_s_text_stays_here_and_what_is_meant_for_the_peer_goes(
    wire: str, kind: str, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with raw_client(wire, Failing()) as raw:
        session_id = await opened_in(raw)
        answer = await raw.ask("session/prompt", prompt(session_id, kind))
        assert answer["error"] == expected
        assert len([f for f in raw.frames if "error" in f]) == 1
        assert b"secret" not in b"".join(raw.raw_frames)
        await opened_in(raw)
    if kind == "value":
        assert "no such model" in caplog.text


@pytest.mark.covers("FF-18")
@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("session/new", {"mcpServers": []}, "cwd"),
        ("session/new", {"cwd": 5, "mcpServers": []}, "cwd"),
        ("session/prompt", {"sessionId": "s"}, "prompt"),
        ("session/prompt", {"sessionId": "s", "prompt": [{"type": "text"}]}, "text"),
        ("session/set_mode", {"sessionId": "s"}, "modeId"),
    ],
)
async def test_parameters_that_are_refused_name_the_field(
    method: str, params: dict[str, Any], field: str
) -> None:
    class Moded(Dialog):
        async def set_session_mode(self, params: Any, ctx: Any) -> Any:
            return None

    async with raw_client("memory", Moded()) as raw:
        error = (await raw.ask(method, params))["error"]
        assert error["code"] == -32602
        assert field in json.dumps(error)


@pytest.mark.covers("FF-12", "FF-17")
async def test_a_client_that_is_cancelled_while_it_starts_leaves_no_process() -> None:
    for _ in range(5):
        async with unshaken_agent("process", limits=Limits(close_grace=0.1)) as (raw, opening):
            await raw.wait("initialize")
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()


@pytest.mark.covers("FF-13")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_a_handler_of_updates_may_close_the_connection_it_runs_on(wire: str) -> None:
    holder: list[AgentPeer] = []

    async def on_update(update: Update) -> None:
        await holder[0].aclose()

    async with raw_agent(wire, Client(on_update=on_update)) as (peer, raw):
        holder.append(peer)
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        await raw.wait("session/prompt")
        raw.send(raw.update("s1", "a"))
        async with asyncio.timeout(8):
            with pytest.raises(ConnectionClosed):
                await running
            await peer.wait_closed()


@pytest.mark.covers("FF-13", "FF-14")
@pytest.mark.parametrize("wire", CLIENT_WIRES)
async def test_whoever_decides_may_ask_the_agent_itself_in_another_session(wire: str) -> None:
    async def decide(params: Any, ctx: ClientContext) -> bool:
        other = await ctx.peer.new_session(cwd="/")
        return (await other.prompt("is this safe?")).text == "yes"

    async with raw_agent(wire, Client(permissions=decide)) as (peer, raw):
        session = await opened(peer, raw)
        running = begun(session.prompt("go"))
        request = await raw.wait("session/prompt")
        raw.send(ask("q"))
        raw.answer(await raw.wait("session/new", 2), {"sessionId": "s2"})
        second = await raw.wait("session/prompt", 2)
        raw.send(raw.update("s2", "yes"), reply(second, END))
        assert (await raw.answer_to("q"))["result"]["outcome"]["optionId"] == "y"
        raw.answer(request, END)
        assert (await running).text == ""
