"""What must not matter (rows C-01 to C-24 of the failure modes, in their order), against wrong sides.

C-16 goes over real pipes and stands in test_over_stdio.py. Of C-13 and C-23 our sense is another one
than raxol's: what is not known is kept in the bytes of the message, and delivered.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon import (
    DEFERRED,
    Agent,
    CapabilityError,
    Client,
    Limits,
    RemoteProtocolError,
    RequestTimeout,
    Turn,
    UnknownUpdate,
    extension,
)
from antiphon.core import Protocol, _protocol
from antiphon.runtime import Connection
from antiphon.runtime._outgoing import Outgoing
from antiphon.runtime._reply import Obligation
from antiphon.schema import UNSET, encode, v1
from antiphon.sessions import _agent_peer, _peer, _side_router
from antiphon.sessions._agent_router import AgentRouter
from antiphon.sessions._inbox import Inbox
from antiphon.sessions._side_router import SideRouter
from antiphon.sessions._turn_states import Event
from antiphon.testing import raw_agent, raw_client, unshaken_client
from tests.invariants.controls import changed, controlled, on_the_wire
from tests.invariants.sides import Played, cancel, new_session, prompt, turns
from tests.invariants.test_connection import (
    Counting,
    Serves,
    keeps_the_call,
    never,
    retyped,
    stops_at_garbage,
)
from tests.invariants.test_delivery import opened
from tests.invariants.test_turns import Resumes, serves_all

if TYPE_CHECKING:
    from antiphon import AgentContext, AgentPeer

pytestmark = pytest.mark.virtual_time

Json = dict[str, Any]


class Hears(Serves):
    """Notes the notifications that it is told."""

    @extension("_told", kind="notification")
    async def told(self, params: Any, ctx: Any) -> None:
        self.heard.append("_told")


# ---------------------------------------------------------------- C-01, C-02


def hears_all(original: Any, self: Connection, event: Any, rx_seq: int) -> None:
    before, self.initialized = self.initialized, True
    original(self, event, rx_seq)
    self.initialized = before


@pytest.mark.covers("C-01")
@controlled(hears_all=changed(Connection, "_notification_received", hears_all))
async def test_a_notification_before_the_handshake_is_dropped_and_the_link_usable() -> None:
    agent = Hears()
    async with unshaken_client(agent) as raw:
        raw.send(raw.notification("_told"), raw.notification("session/cancel", {"sessionId": "s"}))
        hello = await raw.ask("initialize", {"protocolVersion": 1})
        await turns()
        assert "result" in hello
        assert agent.heard == []
        raw.send(raw.notification("_told"))
        await raw.round_trip()
        await turns()
        assert agent.heard == ["_told"]
        await raw.expect_nothing()


def any_id(_original: Any, _raw: bytes) -> bool:
    return True


@pytest.mark.covers("C-02")
@controlled(any_id=changed(_protocol, "_legal_id", any_id))
async def test_a_request_whose_id_is_null_is_refused_and_not_handled() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(None, "_echo", {}))
        answer = await raw.answer_to(None)

        assert answer.get("error", {}).get("code") == -32600
        assert agent.heard == []


# ---------------------------------------------------------------- C-03


def forgiven(frames: list[Json]) -> list[Json]:
    for frame in frames:
        if frame.get("error", {}).get("code") == -32603:
            del frame["error"]
            frame["result"] = {}
    return frames


@pytest.mark.covers("C-03")
@controlled(forgiven=on_the_wire(forgiven))
async def test_a_handler_that_returns_nonsense_is_an_internal_error() -> None:
    class Nonsense(Played):
        async def new_session(self, params: Any, ctx: AgentContext) -> Any:
            if params.cwd == "/good":
                return await super().new_session(params, ctx)
            return {"/text": "text", "/number": 5, "/nothing": None}[params.cwd]

        @extension("_object")
        async def object(self, params: Any, ctx: Any) -> Any:
            return object()

        @extension("_deferred")
        async def deferred(self, params: Any, ctx: Any) -> Any:
            return DEFERRED  # and nobody has the reply

    async def play(turn: Turn) -> Any:
        return {"number": 5, "reason": "because", "bytes": b"end_turn"}[turn.text]

    async with raw_client(Nonsense(play)) as raw:
        answers = [
            await raw.ask("session/new", {"cwd": cwd, "mcpServers": []})
            for cwd in ("/text", "/number", "/nothing")
        ]
        answers += [await raw.ask("_object"), await raw.ask("_deferred")]
        good = await raw.ask("session/new", {"cwd": "/good", "mcpServers": []})
        session_id = good["result"]["sessionId"]
        answers += [
            await raw.ask("session/prompt", prompt(0, session_id, text)["params"])
            for text in ("number", "reason", "bytes")
        ]

        assert [answer.get("error", {}).get("code") for answer in answers] == [-32603] * 8


# ---------------------------------------------------------------- C-04, C-05, C-06: answers of the peer


def any_type(original: Any, self: Protocol, envelope: Any) -> Any:
    if envelope.id is not UNSET:
        envelope.id = msgspec.Raw(bytes(envelope.id).strip(b'"'))
    return original(self, envelope)


@pytest.mark.covers("C-04")
@controlled(any_type=changed(Protocol, "_classify_answer", any_type))
async def test_a_response_with_an_id_of_another_type_is_ignored() -> None:
    async with raw_agent(limits=Limits(request_timeout=5)) as (peer, raw):
        asking = asyncio.create_task(peer.request_extension("_test/any"))
        request = await raw.wait("_test/any")
        raw.send({"jsonrpc": "2.0", "id": str(request["id"]), "result": "for another"})
        with pytest.raises(RequestTimeout):
            await asking


def reads_anything(original: Any, method: str, kind: Any, raw: Any) -> Any:
    if method == "session/new":
        return v1.NewSessionResponse(session_id="made up")
    return original(method, kind, raw)


@pytest.mark.covers("C-05")
@controlled(reads_anything=changed(_agent_peer, "read_result", reads_anything))
async def test_a_response_that_does_not_match_its_schema_fails_its_call_alone() -> None:
    async with raw_agent() as (peer, raw):
        for number, result in enumerate(({"sessionId": 5}, {}, [], "s1"), 1):
            opening = asyncio.create_task(peer.new_session())
            raw.answer(await raw.wait("session/new", number), result)
            with pytest.raises(RemoteProtocolError):
                await opening
        opening = asyncio.create_task(peer.new_session())
        raw.answer(await raw.wait("session/new", 5), {"sessionId": "s1"})
        assert (await opening).session_id == "s1"


def keeps_calls(original: Any, self: Protocol, envelope: Any) -> Any:
    calls = dict(self.calls)
    event = original(self, envelope)
    self.calls.update(calls)
    return event


@pytest.mark.covers("C-06")
@controlled(keeps_calls=changed(Protocol, "_classify_answer", keeps_calls))
async def test_a_second_answer_and_one_to_nobody_are_ignored() -> None:
    async with raw_agent() as (peer, raw):
        call = Counting()
        peer.connection.open_call(call, None)
        request = await raw.wait("_test/any")
        raw.answer(request, "first")
        raw.answer(request, "second")
        raw.refuse(request, -32603)
        raw.send({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "what?"}})
        await raw.round_trip()

        assert call.outcomes == ["first"]
        await raw.expect_nothing()


# ---------------------------------------------------------------- C-07, C-08: cancels that hit nothing


def any_type_of_request(original: Any, self: Protocol, id_: bytes) -> Any:
    return original(self, id_.strip(b'"'))


@pytest.mark.covers("C-07")
@controlled(any_type=changed(Protocol, "request_of", any_type_of_request))
async def test_a_cancel_of_no_open_request_does_nothing() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        raw.send(raw.request(1, "_wait", {}))
        await agent.waiting.wait()
        ids: list[Any] = ["1", 2, 1.5, None, [1], {}]
        for id_ in ids:
            raw.send(raw.notification("$/cancel_request", {"requestId": id_}))
        raw.send(raw.notification("$/cancel_request", {}), raw.notification("$/cancel_request"))
        answer = await raw.ask("$/cancel_request", {"requestId": 1})

        assert answer["error"]["code"] == -32601
        assert raw.responses(1) == []
        assert agent.heard == ["_wait"]


def cancels_all(_original: Any, self: AgentRouter, params: Any, context: Any) -> None:
    for session in self._peer.sessions.values():
        session.fire(Event.CANCEL)


@pytest.mark.covers("C-08")
@controlled(cancels_all=changed(AgentRouter, "_cancel_received", cancels_all))
async def test_a_session_cancel_of_no_session_does_nothing() -> None:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(2)

    async with raw_client(Played(play)) as raw:
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id), cancel("unknown"), raw.notification("session/cancel", {}))
        asked = await raw.ask("session/cancel", {"sessionId": session_id})
        answer = await raw.answer_to(7)

        assert asked["error"]["code"] == -32601
        assert answer.get("result") == {"stopReason": "end_turn"}
        await raw.expect_nothing()


# ---------------------------------------------------------------- C-09, C-11, C-12: what is gone


@pytest.mark.covers("C-09")
@controlled(keeps_the_call=changed(Protocol, "abandon", keeps_the_call))
async def test_giving_up_a_call_that_was_never_made_sends_nothing() -> None:
    async with raw_agent() as (peer, raw):
        peer.connection.abandon(Counting())
        await raw.expect_nothing(1)


# ---------------------------------------------------------------- C-10: who was to answer is gone


def watches_nobody(_original: Any, _self: Obligation, _adopter: Any) -> None:
    pass


@pytest.mark.covers("C-10")
@controlled(watches_nobody=changed(Obligation, "adopted_by", watches_nobody))
async def test_a_request_whose_adopter_ends_is_answered_all_the_same() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        for id_, cancelled in ((1, False), (2, True)):
            agent.adopter = asyncio.create_task(asyncio.Event().wait())
            raw.send(raw.request(id_, "_defer", {}))
            await raw.round_trip()
            agent.replies[-1].on_cancel(lambda: None)  # somebody listens, and says nothing
            if cancelled:
                raw.send(raw.notification("$/cancel_request", {"requestId": id_}))
                await raw.round_trip()
            assert raw.responses(id_) == []
            agent.adopter.cancel()
            answer = await raw.answer_to(id_)
            await raw.round_trip()
            assert answer["error"]["code"] == (-32800 if cancelled else -32603)
            assert len(raw.responses(id_)) == 1


def lives_on(original: Any, self: Connection, frames: Any) -> None:
    lost, self.lost = self.lost, None
    original(self, frames)
    self.lost = lost


@pytest.mark.covers("C-11")
@controlled(lives_on=changed(Connection, "frames_received", lives_on))
async def test_a_frame_of_a_link_that_is_gone_is_ignored() -> None:
    agent = Serves()
    peers: list[Any] = []

    class Shows(Serves):
        async def initialize(self, params: Any, ctx: AgentContext) -> Any:
            peers.append(ctx.peer)
            return await super().initialize(params, ctx)

    agent = Shows()
    async with raw_client(agent) as raw:
        await raw.aclose()
        await peers[0].connection.wait_closed()
        peers[0].connection.frames_received([b'{"jsonrpc":"2.0","id":1,"method":"_echo"}'])
        await turns()

        assert agent.heard == []
        assert not peers[0].connection.protocol.requests


@pytest.mark.covers("C-12")
@controlled(never=changed(Outgoing, "abandon", never))
async def test_the_call_of_a_caller_that_is_gone_is_cleared() -> None:
    async with raw_agent() as (peer, raw):
        parked = asyncio.create_task(peer.request_extension("_test/parked"))
        await raw.wait("_test/parked")
        parked.cancel()
        await asyncio.wait([parked])
        peer.connection.open_call(Counting(), None)  # nobody holds it but the table
        raw.answer(await raw.wait("_test/any"), 1)
        await raw.round_trip()

        assert parked.cancelled()
        assert len(raw.sent("$/cancel_request")) == 1
        assert not peer.connection.protocol.calls


# ---------------------------------------------------------------- C-13, C-14: what nobody knows


def without_the_future(frames: list[Json]) -> list[Json]:
    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: pruned(v) for k, v in value.items() if k != "future"}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [pruned(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    return [pruned(frame) for frame in frames]


@pytest.mark.covers("C-13")
@controlled(without_the_future=on_the_wire(without_the_future))
async def test_members_that_nobody_knows_are_kept_where_they_stood() -> None:
    raws: list[bytes] = []

    class Notes(Played):
        async def initialize(self, params: Any, ctx: AgentContext) -> Any:
            raws.append(ctx.raw)
            return await super().initialize(params, ctx)

        async def prompt(self, turn: Turn) -> Any:
            raws.append(turn.raw)
            raws.append(encode(turn.params))

    hello = {
        "protocolVersion": 1,
        "future": [1],
        "clientCapabilities": {"fs": {"readTextFile": True, "future": {"a": 2}}},
    }
    async with unshaken_client(Notes()) as raw:
        assert "result" in await raw.ask("initialize", hello)
        params = prompt(0, await new_session(raw))["params"]
        params["prompt"][0]["future"] = {"b": 3}
        assert "result" in await raw.ask("session/prompt", params)

    assert json.loads(raws[0]) == hello
    assert json.loads(raws[1]) == params
    assert b"future" not in raws[2]  # a typed value has only what its type has


PARAMS: list[Any] = [{}, [1, 2], None]
NAMES = ["x" * 10_000, "sëssion/n€w", "", "_vendor/thing", "session/prompt ", "\u0000"]


def serves_anything(original: Any, self: SideRouter, method: str) -> Any:
    return original(self, method) or original(self, "_echo")


@pytest.mark.covers("C-14")
@controlled(serves_anything=changed(SideRouter, "request_route", serves_anything))
async def test_methods_that_nobody_knows_are_not_found_whatever_they_look_like() -> None:
    agent = Serves()
    async with raw_client(agent) as raw:
        for index, name in enumerate(NAMES):
            for params in PARAMS:
                answer = await raw.ask(name, params, f"{index} {params}")
                assert answer.get("error", {}).get("code") == -32601, name
        assert agent.heard == []


# ---------------------------------------------------------------- C-15, C-17, C-18: the envelope


async def echoes_the_version(original: Any, self: Agent, params: Any, ctx: Any) -> Any:
    answer = await original(self, params, ctx)
    answer.protocol_version = params.protocol_version
    return answer


@pytest.mark.covers("C-15")
@controlled(echoes_the_version=changed(Agent, "initialize", echoes_the_version))
async def test_a_client_of_a_later_version_is_told_ours() -> None:
    async with unshaken_client(Played()) as raw:
        answer = await raw.ask("initialize", {"protocolVersion": 999})
        assert answer["result"]["protocolVersion"] == 1
        assert await new_session(raw) == "s1"


IDS: list[Any] = [1, "1", 0, -1, 2**53 - 1, -(2**53) + 1, "", "ünïcödé €", "0", "-1"]


@pytest.mark.covers("C-17")
@controlled(retyped=on_the_wire(retyped))
async def test_ids_that_look_alike_are_independent_and_come_back_exactly() -> None:
    begun: list[str] = []
    go_on = asyncio.Event()

    class Holds(Played):
        @extension("_hold")
        async def hold(self, params: Any, ctx: Any) -> Any:
            begun.append(params)
            await go_on.wait()
            return params

    async with raw_client(Holds()) as raw:
        for id_ in IDS:
            raw.send(raw.request(id_, "_hold", repr(id_)))
        await raw.round_trip()
        assert begun == [repr(id_) for id_ in IDS]  # all at once
        go_on.set()
        for id_ in IDS:
            assert (await raw.answer_to(id_))["result"] == repr(id_)
            assert len(raw.responses(id_)) == 1


def no_null_ids(frames: list[Json]) -> list[Json]:
    return [frame for frame in frames if frame.get("id", 0) is not None]


@pytest.mark.covers("C-18")
@controlled(no_null_ids=on_the_wire(no_null_ids))
async def test_a_lone_null_id_is_refused_and_the_link_usable() -> None:
    async with raw_client(Serves()) as raw:
        raw.send({"id": None})
        answer = await raw.answer_to(None)
        assert answer["error"]["code"] == -32600
        assert (await raw.ask("_echo", {"x": 1}))["result"] == {"x": 1}


# ---------------------------------------------------------------- C-19: absent, null, a value


def without_nulls(frames: list[Json]) -> list[Json]:
    for frame in frames:
        update = frame.get("params", {}).get("update")
        if update is not None:
            frame["params"]["update"] = {k: v for k, v in update.items() if v is not None}
    return frames


@pytest.mark.covers("C-19")
@controlled(without_nulls=on_the_wire(without_nulls))
async def test_absent_null_and_a_value_are_told_apart_on_the_whole_way() -> None:
    states: list[Any] = [UNSET, None, "x"]
    pairs = [(title, at) for title in states for at in states]

    async def play(turn: Turn) -> None:
        for title, at in pairs:
            await turn.session.info(title=title, updated_at=at)

    async with raw_client(Played(play)) as raw, opened() as (session, agent):
        session_id = await new_session(raw)
        raw.send(prompt(7, session_id))
        await raw.answer_to(7)
        sent = [frame["params"]["update"] for frame in raw.sent("session/update")]
        stream = session.updates()
        for update in sent:
            params = {"sessionId": "s1", "update": update}
            agent.send(agent.notification("session/update", params))
        values: list[Any] = [(await anext(stream)).value for _ in sent]
        stream.close()

        assert [(value.title, value.updated_at) for value in values] == pairs
        assert [json.loads(encode(value)) for value in values] == sent


# ---------------------------------------------------------------- C-20: garbage


GARBAGE: list[Any] = [
    5,
    "text",
    None,
    True,
    [],
    [1, {"method": "x"}],
    {},
    {"id": []},
    {"method": 5},
    {"id": 1, "method": None},
    {"id": "unknown", "result": {}},
    {"id": 4711, "error": {"code": "x"}},
    {"jsonrpc": 2, "id": 1, "method": "_echo"},
    {"id": 1.5, "method": "_echo"},
    {"error": 5},
    {"method": "session/update", "params": 5},
    b"{",
    b"\xff\xfe",
    b'{"id": 1, "method": "\xed\xa0\x80"}',
]


class Echoes(Client):
    @extension("_echo")
    async def echo(self, params: Any, ctx: Any) -> Any:
        return params


@pytest.mark.covers("C-20")
@pytest.mark.parametrize("side", ["agent", "client"])
@controlled(stops_at_garbage=changed(Connection, "frames_received", stops_at_garbage))
async def test_thousands_of_garbage_frames_leave_the_link_alive(side: str) -> None:
    chance = random.Random(20)
    async with raw_client(Serves()) as client, raw_agent(Echoes()) as (_, agent):
        raw = client if side == "agent" else agent
        raw.send(*(chance.choice(GARBAGE) for _ in range(5000)))
        assert (await raw.ask("_echo", {"x": 1}))["result"] == {"x": 1}
        assert not raw.lost.is_set()


# ---------------------------------------------------------------- C-21, C-22: gates


TAKES_ALL = changed(_peer, "allowed_by", lambda *_: True)
VALUES: list[Any] = [0, "", "false", [], 1, "yes", None, False, {}, True]


@pytest.mark.covers("C-21")
@controlled(takes_all=TAKES_ALL)
async def test_only_true_opens_a_gate_of_a_client() -> None:
    outcomes: dict[str, str] = {}

    async def play(turn: Turn) -> None:
        try:
            outcomes[turn.text] = await turn.read_text_file("/x")
        except CapabilityError:
            outcomes[turn.text] = "closed"

    for value in VALUES:
        async with raw_client(Played(play), {"fs": {"readTextFile": value}}) as raw:
            session_id = await new_session(raw)
            raw.send(prompt(7, session_id, repr(value)))
            if value is True:
                raw.answer(await raw.wait("fs/read_text_file"), {"content": "open"})
            await raw.answer_to(7)
            assert len(raw.sent("fs/read_text_file")) == (value is True), value

    assert outcomes == {repr(value): "open" if value is True else "closed" for value in VALUES}


@pytest.mark.covers("C-21")
@controlled(takes_all=TAKES_ALL)
async def test_only_true_opens_a_gate_of_an_agent() -> None:
    for value in VALUES:
        async with raw_agent(capabilities={"loadSession": value}) as (peer, raw):
            loading = asyncio.ensure_future(load(peer))
            if value is True:
                raw.answer(await raw.wait("session/load"), {})
            with nullcontext() if value is True else pytest.raises(CapabilityError):
                await loading
            assert len(raw.sent("session/load")) == (value is True), value


async def load(peer: AgentPeer) -> None:
    async with asyncio.timeout(5):
        await peer.load_session("old")


@pytest.mark.covers("C-22")
@controlled(serves_all=changed(_side_router, "allowed_by", serves_all))
async def test_a_method_that_was_not_offered_is_not_found_before_its_parameters_are_looked_at() -> (
    None
):
    async with raw_client(Resumes(offers=False)) as raw:
        answer = await raw.ask("session/resume", {"sessionId": 5})
        assert answer["error"]["code"] == -32601


# ---------------------------------------------------------------- C-23, C-24: updates and subscribers


def no_strangers(frames: list[Json]) -> list[Json]:
    return [frame for frame in frames if "telepathy" not in str(frame)]


@pytest.mark.covers("C-23")
@controlled(no_strangers=on_the_wire(no_strangers))
async def test_an_update_of_an_unknown_kind_is_delivered_like_any_other() -> None:
    async with opened() as (session, raw):
        stream = session.updates()
        odd = {"sessionUpdate": "telepathy", "strength": 5}
        raw.send(
            raw.notification("session/update", {"sessionId": "s1", "update": odd}),
            raw.update("s1", "next"),
        )
        async with asyncio.timeout(5):
            first, second = await anext(stream), await anext(stream)
        stream.close()

        assert isinstance(first.value, UnknownUpdate)
        assert first.kind == "telepathy"
        assert b'"strength"' in first.raw
        assert second.text == "next"


def only_the_last(original: Any, self: Inbox, **named: Any) -> Any:
    self._subscribers.clear()
    return original(self, **named)


@pytest.mark.covers("C-24")
@controlled(only_the_last=changed(Inbox, "subscribe", only_the_last))
async def test_every_subscription_is_served_until_it_is_closed() -> None:
    observed: list[str] = []

    async with opened() as (session, raw):
        one, other = session.updates(), session.updates()
        stops = [session.on_update(lambda update: observed.append(update.text)) for _ in range(2)]
        raw.send(raw.update("s1", "first"))
        async with asyncio.timeout(5):
            assert [(await anext(stream)).text for stream in (one, other)] == ["first"] * 2
        await turns()
        one.close()
        stops[0]()
        raw.send(raw.update("s1", "second"))
        assert (await anext(other)).text == "second"
        assert [update async for update in one] == []
        await turns()
        other.close()
        stops[1]()
        raw.send(raw.update("s1", "third"))
        await raw.round_trip()
        await turns()

    assert observed == ["first", "first", "second"]
