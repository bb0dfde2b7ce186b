"""Requests of the peer: what is refused, answered, cancelled, and that each gets exactly one response."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.link import (
    SIDES,
    Gate,
    Hard,
    Link,
    bounded,
    good,
    linked,
    raw,
    turns,
)

from antiphon._errors import (
    ConnectionClosed,
    InvalidParams,
    NotInitialized,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
)
from antiphon.runtime import DEFERRED
from antiphon.schema import decode, v1_unstable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.core import Side
    from antiphon.runtime import InboundCall, TelemetryEvent


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.covers("R1-6", "FF-15")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "id_",
    [
        b"0",
        b"-1",
        b"9007199254740992",
        b"9007199254740993",
        b'""',
        b'"1"',
        b'"\\u00fc\\n"',
        '"ü€😀"'.encode(),
        b"1" * 100,
    ],
)
async def test_ids_come_back_byte_for_byte_in_results_and_errors(side: Side, id_: bytes) -> None:
    async with linked(side) as link:
        link.side.serve("good", good)

        link.peer.send(b'{"jsonrpc":"2.0","id":%s,"method":"good"}' % id_)
        await link.peer.messages(1)
        link.peer.send(b'{"jsonrpc":"2.0","id":%s,"method":"bad"}' % id_)
        await link.peer.messages(2)

        assert link.peer.raw_frames[0] == b'{"jsonrpc":"2.0","id":%s,"result":{"good":true}}' % id_
        assert link.peer.raw_frames[1].startswith(b'{"jsonrpc":"2.0","id":%s,"error":{' % id_)


@pytest.mark.covers("R1-6", "FF-15")
async def test_both_directions_may_use_the_same_id_at_once() -> None:
    gate = Gate("theirs")
    async with linked() as link:
        link.side.serve("slow", gate)
        link.peer.call(1, "slow")
        await gate.entered()
        ours = asyncio.create_task(link.connection.request("x/y", None, None))
        assert (await link.peer.messages(1))[0]["id"] == 1

        link.peer.respond(1, "ours")

        assert raw(await bounded(ours)) == "ours"
        assert link.peer.responses(1) == []
        gate.open()
        assert (await link.peer.answer_to(1))["result"] == "theirs"


@pytest.mark.covers("R1-6")
@pytest.mark.parametrize("side", SIDES)
async def test_a_request_with_an_id_in_flight_is_dropped(side: Side) -> None:
    gate = Gate("first")
    async with linked(side) as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        link.peer.send(b'{"id":"a","method":"slow"}')
        await gate.entered()

        # Whatever is asked with it: its answer would be a second one.
        link.peer.send(
            b'{"id":"a","method":"slow"}',
            b'{"id":"\\u0061","method":"good"}',
            b'{"id":"a","method":"unknown"}',
            b'{"id":"a","method":"initialize"}',
        )
        link.peer.call(2, "good")
        await link.peer.answer_to(2)
        gate.open()
        await link.peer.answer_to("a")
        await turns()

        assert [m["result"] for m in link.peer.responses("a")] == ["first"]
        link.peer.send(b'{"id":"a","method":"good"}')  # free again
        await link.peer.until(lambda: len(link.peer.responses("a")) == 2)


# --- what is refused before its handler runs -----------------------------------------------------


@pytest.mark.covers("R1-8", "R1-155", "FF-16")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "method", ["foo/bar", "_x/y", "", "ping", "$/cancel_request", "é", "good "]
)
async def test_an_unknown_request_is_method_not_found_with_its_name(
    side: Side, method: str
) -> None:
    async with linked(side) as link:
        link.side.serve("good", good)

        link.peer.call(1, method, {})

        error = (await link.peer.answer_to(1))["error"]
        assert (error["code"], error["data"]) == (-32601, method)


async def test_of_an_absurdly_long_name_only_the_beginning_is_repeated() -> None:
    async with linked() as link:
        link.peer.call(1, "m" * 100_000)

        assert (await link.peer.answer_to(1))["error"]["data"] == "m" * 256


@pytest.mark.covers("R1-7", "R1-10", "FF-16")
@pytest.mark.parametrize("side", SIDES)
async def test_notifications_are_never_answered(side: Side) -> None:
    heard: list[Any] = []

    async def hear(params: Any, context: Any) -> None:
        heard.append(params)

    async def fail(params: Any, context: Any) -> None:
        raise RequestError.of(-32000, "no")

    async with linked(side) as link:
        link.side.hear("known", hear)
        link.side.hear("failing", fail)
        link.side.serve("good", good)

        for method in ("known", "failing", "unknown", "_vendor/x", "$/x", "good", "initialize"):
            link.peer.tell(method, {"a": 1})
        link.peer.call(9, "good")
        await link.peer.answer_to(9)
        await turns()

        assert len(link.peer.raw_frames) == 1
        assert heard == [{"a": 1}]


@pytest.mark.covers("R1-13")
@pytest.mark.parametrize(
    ("params", "field"),
    [
        (b"{}", "cwd"),
        (b'{"cwd":5,"mcpServers":[]}', "$.cwd"),
        (b'{"cwd":null,"mcpServers":[]}', "$.cwd"),
        (b"[]", "object"),
        (b"7", "object"),
        (b"null", "cwd"),
    ],
)
async def test_bad_params_are_refused_naming_the_field(params: bytes, field: str) -> None:
    async with linked() as link:
        link.side.serve(
            "session/new",
            good,
            decode=lambda raw: decode(v1_unstable.NewSessionRequest, raw or b"{}"),
        )

        link.peer.send(b'{"id":1,"method":"session/new","params":%s}' % params)

        error = (await link.peer.answer_to(1))["error"]
        assert error["code"] == -32602
        assert field in error["data"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (RecursionError("internal"), -32602),
        (KeyError("internal"), -32603),
        (TypeError("internal"), -32603),
        (InvalidParams({"reason": "path_not_absolute"}), -32602),
    ],
)
async def test_whatever_a_decoder_does_the_request_is_answered(fault: Exception, code: int) -> None:
    def failing(raw: Any) -> Any:
        raise fault

    async with linked() as link:
        link.side.serve("x/y", good, decode=failing)

        link.peer.call(1, "x/y", {})

        assert (await link.peer.answer_to(1))["error"]["code"] == code
        assert b"internal" not in link.peer.raw_frames[0]


@pytest.mark.parametrize(
    ("fault", "code"), [(ValueError("internal"), -32603), (ResourceNotFound("s"), -32002)]
)
async def test_what_is_refused_on_acceptance_is_answered_and_never_runs(
    fault: Exception, code: int
) -> None:
    gate = Gate()

    def refuse(params: Any, context: Any) -> Any:
        raise fault

    async with linked() as link:
        link.side.serve("x/y", gate, accept=refuse)

        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == code
        assert b"internal" not in link.peer.raw_frames[0]
        assert not gate.begun.is_set()
        assert not link.connection.protocol.requests


async def test_what_acceptance_returns_takes_the_place_of_the_params() -> None:
    order: list[str] = []

    def accept(params: Any, context: Any) -> Any:
        order.append(f"accept {params['n']}")
        return params["n"]

    async def handle(number: Any, context: Any) -> Any:
        order.append(f"handle {number}")
        return number

    async with linked() as link:
        link.side.serve("x/y", handle, accept=accept)

        link.peer.send(
            b'{"id":1,"method":"x/y","params":{"n":1}}', b'{"id":2,"method":"x/y","params":{"n":2}}'
        )
        await link.peer.answer_to(2)

        assert order == ["accept 1", "accept 2", "handle 1", "handle 2"]


async def test_a_method_that_takes_no_context_is_begun_in_the_reader_and_given_none() -> None:
    order: list[Any] = []
    calls: list[InboundCall] = []

    def begin(params: Any, raw: Any, call: InboundCall) -> Any:
        order.append(("begin", params["n"], bytes(raw)))
        calls.append(call)
        return params["n"]

    async def handle(number: Any, context: Any) -> Any:
        order.append(("handle", number, context))
        return number

    async with linked() as link:
        link.side.serve("x/y", handle, begin=begin)

        link.peer.send(
            b'{"id":1,"method":"x/y","params":{"n":1}}', b'{"id":2,"method":"x/y","params":{"n":2}}'
        )
        await link.peer.answer_to(2)

        begun = [("begin", 1, b'{"n":1}'), ("begin", 2, b'{"n":2}')]
        assert order == [*begun, ("handle", 1, None), ("handle", 2, None)]
        assert [call.id for call in calls] == [b"1", b"2"]
        assert not link.side.contexts


@pytest.mark.parametrize("fault", [InvalidParams("no"), RuntimeError("internal")])
async def test_what_is_refused_where_it_begins_is_answered_and_never_runs(fault: Exception) -> None:
    gate = Gate()

    def refuse(params: Any, raw: Any, call: InboundCall) -> Any:
        raise fault

    async with linked() as link:
        link.side.serve("x/y", gate, begin=refuse)

        link.peer.call(1, "x/y")

        assert "error" in await link.peer.answer_to(1)
        assert b"internal" not in link.peer.raw_frames[0]
        assert not gate.begun.is_set()
        assert not link.connection.protocol.requests


async def test_deferring_without_a_context_is_a_fault_of_the_handler() -> None:
    async def handle(params: Any, context: Any) -> Any:
        return DEFERRED

    async with linked() as link:
        link.side.serve("x/y", handle, begin=lambda params, _raw, _call: params)

        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603


@pytest.mark.parametrize("waits", [False, True])
async def test_who_concludes_is_told_how_the_handler_ended_and_says_what_is_answered(
    *, waits: bool
) -> None:
    told: list[Any] = []
    fault = RuntimeError("a secret")

    async def handle(params: Any, context: Any) -> Any:
        if params["n"] == 2:
            raise fault
        return params["n"]

    async def later(value: Any) -> Any:
        await turns()
        if value == "raise":
            raise InvalidParams({"why": "concluded"})
        return value

    def conclude(params: Any, value: Any, error: BaseException | None) -> Any:
        told.append((params["n"], value, error))
        if params["n"] == 3:
            if waits:
                return later("raise")
            raise InvalidParams({"why": "concluded"})
        return later([value]) if waits else [value]

    async with linked() as link:
        link.side.serve("x/y", handle, conclude=conclude)
        for number in (1, 2, 3):
            link.peer.call(number, "x/y", {"n": number})

        assert (await link.peer.answer_to(1))["result"] == [1]
        assert (await link.peer.answer_to(2))["result"] == [None]
        assert (await link.peer.answer_to(3))["error"]["data"] == {"why": "concluded"}
        assert told == [(1, 1, None), (2, None, fault), (3, 3, None)]
        assert not link.connection.tasks
        assert not link.connection.protocol.requests


@pytest.mark.parametrize("waits", [False, True])
async def test_who_concludes_may_let_a_cancellation_pass(*, waits: bool) -> None:
    gate = Gate()

    async def later(error: BaseException) -> Any:
        raise error

    def conclude(params: Any, value: Any, error: BaseException | None) -> Any:
        assert isinstance(error, asyncio.CancelledError)
        if waits:
            return later(error)
        raise error

    async with linked() as link:
        link.side.serve("x/y", gate, conclude=conclude)
        link.peer.call(1, "x/y")
        await gate.entered()
        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["error"]["code"] == -32800
        assert not link.connection.tasks


async def test_what_is_kept_of_a_request_is_no_business_of_the_collector() -> None:
    """A thousand prompts may be handled at once: each object more is looked at again and again."""
    gate = Gate()
    calls: list[InboundCall] = []

    def begin(params: Any, raw: Any, call: InboundCall) -> Any:
        calls.append(call)
        return params

    async with linked() as link:
        link.side.serve("x/y", gate, begin=begin)
        link.peer.call("an id", "x/y", {"n": 1})
        await gate.entered()

        (call,) = calls
        assert not gc.is_tracked(call)
        gate.open()
        await link.peer.answer_to("an id")


async def test_the_task_of_a_request_has_the_name_of_its_method() -> None:
    names: list[str] = []

    async def handle(params: Any, context: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        names.append(task.get_name())
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)

        assert names == ["x/y"]


async def test_what_acceptance_has_answered_runs_no_handler_and_counts_no_more() -> None:
    gate = Gate()
    async with linked(inbound_requests=1) as link:

        def accept(params: Any, context: Any) -> Any:
            link.connection.answer(context.call, b'{"n":%d}' % params["n"])
            return params

        link.side.serve("x/y", gate, accept=accept)

        link.peer.send(
            b'{"id":1,"method":"x/y","params":{"n":1}}', b'{"id":2,"method":"x/y","params":{"n":2}}'
        )

        assert (await link.peer.answer_to(1))["result"] == {"n": 1}
        assert (await link.peer.answer_to(2))["result"] == {"n": 2}
        await turns()
        assert len(link.peer.raw_frames) == 2
        assert not gate.begun.is_set()
        assert not link.connection.protocol.requests
        assert not link.connection.tasks


async def test_past_the_limit_of_requests_in_flight_the_answer_is_server_busy() -> None:
    gate = Gate()
    async with linked(inbound_requests=2) as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        link.peer.call(1, "slow")
        link.peer.call(2, "slow")
        link.peer.call(3, "good")

        error = (await link.peer.answer_to(3))["error"]
        assert error == {
            "code": -32603,
            "message": "Server busy",
            "data": {"reason": "too many concurrent inbound requests", "limit": 2},
        }
        assert len(link.connection.protocol.requests) == 2
        gate.open()
        await link.peer.answer_to(2)
        link.peer.call(3, "good")
        await link.peer.until(lambda: len(link.peer.responses(3)) == 2)
        assert link.peer.responses(3)[1]["result"] == {"good": True}


async def test_large_requests_in_flight_are_bounded_by_bytes_and_one_is_always_handled() -> None:
    gate = Gate()
    async with linked(inbound_bytes=10_000) as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        large = {"text": "x" * 6000}
        link.peer.call(1, "slow", large)
        for id_ in (2, 3):
            link.peer.call(id_, "good", large)
            assert (await link.peer.answer_to(id_))["error"] == {
                "code": -32603,
                "message": "Server busy",
                "data": {"reason": "limit inbound_bytes exceeded", "limit": 10_000},
            }
        link.peer.call(4, "good")
        assert (await link.peer.answer_to(4))["result"] == {"good": True}
        # What is cancelled, or over, counts no more; nor does what was refused.
        link.peer.send({"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": 1}})
        assert (await link.peer.answer_to(1))["error"]["code"] == -32800
        for id_ in (5, 6, 7):
            link.peer.call(id_, "good", {"text": "x" * 60_000})
            assert (await link.peer.answer_to(id_))["result"] == {"good": True}


async def test_requests_let_in_at_once_are_not_served_when_their_answers_are_not_taken() -> None:
    served: list[int] = []

    async def serve(params: Any, _context: Any) -> str:
        served.append(params["n"])
        return "x" * 100_000

    async with linked(unsent_bytes=250_000) as link:
        link.side.serve("x/big", serve)
        link.peer.transport.pause_reading()
        link.peer.send(*(link.peer.request(n, "x/big", {"n": n}) for n in range(500)))
        await turns()
        assert link.connection.transport.unsent < 600_000
        link.peer.transport.resume_reading()
        answers = [await link.peer.answer_to(n) for n in range(500)]
        assert not link.connection.closed
    refused = [answer["error"] for answer in answers if "error" in answer]
    assert 0 < len(served) < 10
    assert len(refused) == 500 - len(served)
    assert {error["data"]["reason"] for error in refused} == {"limit unsent_bytes exceeded"}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("method", ["session/cancel", "$/cancel_request", "session/update", ""])
async def test_what_is_only_ever_told_is_no_request(side: Side, method: str) -> None:
    async with linked(side) as link:
        link.side.hear(method, good)
        link.peer.call(1, method, {"sessionId": "s", "requestId": 1})

        assert (await link.peer.answer_to(1))["error"] == {
            "code": -32601,
            "message": "Method not found",
            "data": method,
        }


async def test_a_request_that_is_told_instead_is_not_served() -> None:
    async with linked(initialized=False) as link:
        link.side.serve("initialize", good)
        link.side.serve("good", good)
        link.peer.tell("initialize", {})
        await turns()
        assert not link.side.contexts
        link.connection.initialized = True
        link.peer.tell("good", {})
        link.peer.call(1, "good")

        await link.peer.answer_to(1)
        assert len(link.side.contexts) == 1


CHECKS: list[tuple[str, bool, dict[str, Any], int]] = [
    # What is wrong with the request besides, and which code says so: the first that applies.
    ("x/unknown", False, {"bad": True}, -32600),  # the handshake beats the method
    ("x/typed", False, {"bad": True}, -32600),  # and the parameters
    ("initialize", True, {"bad": True}, -32600),  # a second handshake is not even decoded
    ("x/unknown", True, {"bad": True}, -32601),  # the method beats the parameters
    ("x/typed", True, {"bad": True}, -32602),
    ("x/typed", True, {}, 0),
]


@pytest.mark.parametrize(("method", "initialized", "params", "code"), CHECKS)
async def test_of_all_that_is_wrong_the_first_is_told(
    method: str, initialized: bool, params: dict[str, Any], code: int
) -> None:
    def typed(params: Any) -> Any:
        if b"bad" in bytes(params):
            msg = "Expected `str` - at `$.bad`"
            raise ValueError(msg)
        return {}

    async with linked(initialized=initialized) as link:
        for known in ("x/typed", "initialize"):
            link.side.serve(known, good, decode=typed)
        link.peer.call(1, method, params)

        assert (await link.peer.answer_to(1)).get("error", {"code": 0})["code"] == code


async def test_a_busy_side_says_so_before_it_looks_at_the_method_and_a_free_one_again_after() -> (
    None
):
    gate = Gate()
    async with linked(inbound_requests=1) as link:
        link.side.serve("x/wait", gate)
        link.peer.call(1, "x/wait")
        link.peer.call(2, "x/unknown")
        busy = (await link.peer.answer_to(2))["error"]
        link.peer.call(2, "x/unknown")  # a refused id is free at once
        assert (await link.peer.answer_to(2))["error"] == busy
        gate.open()
        await link.peer.answer_to(1)
        link.peer.call(3, "x/unknown")

        assert busy["code"] == -32603
        assert (await link.peer.answer_to(3))["error"]["code"] == -32601


async def test_a_frame_that_is_none_answers_no_request_that_runs_with_its_id() -> None:
    gate = Gate()
    async with linked() as link:
        link.side.serve("x/wait", gate)
        link.peer.call(1, "x/wait")
        link.peer.send(b'{"id":1,"method":7}', b'{"id":1}')
        link.peer.call(2, "x/unknown")
        await link.peer.answer_to(2)
        assert link.peer.responses(1) == []
        assert len(link.peer.responses(None)) == 2

        gate.open()

        assert (await link.peer.answer_to(1))["result"] == {}


# --- the handshake -------------------------------------------------------------------------------


@pytest.mark.covers("R1-30")
async def test_an_agent_refuses_requests_and_drops_notifications_before_the_handshake() -> None:
    heard: list[Any] = []

    async def hear(params: Any, context: Any) -> None:
        heard.append(params)

    async with linked(initialized=False) as link:
        link.side.serve("good", good)
        link.side.hear("known", hear)

        link.peer.tell("known", {})
        link.peer.call(1, "good")
        link.peer.call(2, "unknown")

        for id_, method in ((1, "good"), (2, "unknown")):
            error = (await link.peer.answer_to(id_))["error"]
            assert error["code"] == -32600
            assert error["data"] == {"method": method, "reason": "initialize required"}
        assert not heard


@pytest.mark.covers("R1-32")
async def test_a_second_initialize_is_refused() -> None:
    async with linked(initialized=False) as link:
        link.side.serve("initialize", good)
        link.peer.call(1, "initialize")
        await link.peer.answer_to(1)
        assert link.connection.initialized

        link.peer.call(2, "initialize")

        error = (await link.peer.answer_to(2))["error"]
        assert (error["code"], error["data"]) == (-32600, {"reason": "already initialized"})


async def test_what_follows_the_handshake_waits_for_it_and_is_served_in_order() -> None:
    gate = Gate()
    order: list[Any] = []

    async def handle(params: Any, context: Any) -> Any:
        order.append(params)
        return params

    async with linked(initialized=False) as link:
        link.side.serve("initialize", gate)
        link.side.serve("x/y", handle)
        link.side.hear("x/z", handle, at_once=None)
        link.peer.call("i", "initialize")
        link.peer.call(1, "x/y", 1)
        await gate.entered()
        link.peer.call("i", "initialize")  # an id in flight: dropped, when its turn comes
        link.peer.call(2, "x/y", 2)
        link.peer.call(3, "initialize")
        link.peer.send(b"{}")  # what nobody serves is refused at once
        await link.peer.messages(1)
        assert order == []
        assert link.connection.queued_bytes > 0

        gate.open()
        await link.peer.messages(6)

        assert order == [1, 2]
        assert [m["id"] for m in link.peer.frames][:2] == [None, "i"]
        assert {m["id"] for m in link.peer.frames[2:]} == {1, 2, 3, "i"}
        assert (await link.peer.answer_to(3))["error"]["data"] == {"reason": "already initialized"}
        assert link.connection.queued_bytes == 0


async def test_a_failed_handshake_may_be_tried_again() -> None:
    outcomes: list[Any] = [RequestError.of(-32000, "not yet"), {"ok": True}]

    async def initialize(params: Any, context: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async with linked(initialized=False) as link:
        link.side.serve("initialize", initialize)
        link.side.serve("good", good)

        link.peer.call(1, "initialize")
        link.peer.call(2, "good")
        link.peer.call(3, "initialize")
        link.peer.call(4, "good")
        await link.peer.messages(4)

        assert "error" in (await link.peer.answer_to(1))
        assert (await link.peer.answer_to(2))["error"]["code"] == -32600
        assert "result" in (await link.peer.answer_to(3))
        assert "result" in (await link.peer.answer_to(4))


async def test_the_handshake_itself_can_be_cancelled() -> None:
    gate = Gate()
    async with linked(initialized=False) as link:
        link.side.serve("initialize", gate)
        link.peer.call(1, "initialize")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["error"]["code"] == -32800
        assert not link.connection.initialized


async def test_a_cancellation_of_what_is_held_waits_behind_it() -> None:
    handshake, slow = Gate(), Gate()
    async with linked(initialized=False) as link:
        link.side.serve("initialize", handshake)
        link.side.serve("slow", slow)
        link.peer.call(1, "initialize")
        link.peer.call(2, "slow")
        link.peer.tell("$/cancel_request", {"requestId": 2})
        await handshake.entered()
        await turns()

        handshake.open()

        assert (await link.peer.answer_to(2))["error"]["code"] == -32800
        assert not slow.begun.is_set()


async def test_what_is_held_during_the_handshake_counts_against_the_budget() -> None:
    gate = Gate()
    async with linked(initialized=False, queue_bytes=1000) as link:
        link.side.serve("initialize", gate)
        link.side.serve("good", good)
        link.peer.call(1, "initialize")
        await gate.entered()
        for number in range(10):
            link.peer.call(2 + number, "good", {"text": "x" * 100})
            await turns()

        assert link.transport.reading == ["pause"]
        gate.open()
        await link.peer.answer_to(11)
        assert link.transport.reading == ["pause", "resume"]
        assert link.connection.queued_bytes == 0


async def test_what_is_held_during_the_handshake_counts_by_its_number_too() -> None:
    """A small message costs more than it has bytes."""
    gate = Gate()
    async with linked(initialized=False, queue_updates=5) as link:
        link.side.serve("initialize", gate)
        link.peer.call(1, "initialize")
        await gate.entered()
        for _ in range(10):
            link.peer.tell("x")
            await turns()

        assert link.transport.reading == ["pause"]
        gate.open()
        await link.peer.answer_to(1)
        await turns()
        assert link.transport.reading == ["pause", "resume"]
        assert link.connection.queued_updates == 0


@pytest.mark.covers("R1-20")
async def test_calls_before_the_handshake_are_refused_and_send_nothing() -> None:
    async with linked("client", initialized=False) as link:
        with pytest.raises(NotInitialized, match="session/new"):
            await link.connection.request("session/new", None, 1)
        with pytest.raises(NotInitialized):
            link.connection.notify("session/cancel", None)
        task = asyncio.create_task(link.connection.request("initialize", b"{}", None))
        assert (await link.peer.messages(1))[0]["method"] == "initialize"
        link.peer.respond(1, {})
        await bounded(task)
        assert len(link.peer.raw_frames) == 1


# --- the boundary between exceptions and the wire ------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("internal")


@pytest.mark.covers("FF-18")
@pytest.mark.parametrize(
    "fault",
    [
        ValueError("internal"),
        KeyError("internal"),
        Unprintable("internal"),
        OSError(2, "internal", "/internal/path"),
        RecursionError("internal"),
        ConnectionClosed("internal", stderr_tail="internal"),
        RemoteProtocolError("internal"),
        TimeoutError("internal"),
        StopAsyncIteration("internal"),
        ExceptionGroup("internal", [ValueError("internal")]),
        AssertionError(),
        Hard("internal"),
        BaseExceptionGroup("internal", [Hard()]),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_an_exception_is_an_internal_error_and_only_our_log_knows_more(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise fault

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert b"internal" not in link.peer.raw_frames[0]
        record = caplog.records[-1]
        assert (record.levelname, record.name) == ("ERROR", "antiphon.telemetry")
        assert record.exc_info is not None
        assert record.exc_info[1] is fault
        assert "in handle" in caplog.text


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_handler_that_ends_the_programme_is_answered_first(end: BaseException) -> None:
    links: list[Link] = []

    async def handle(params: Any, context: Any) -> Any:
        raise end

    async def main() -> None:
        async with linked() as link:
            links.append(link)
            link.side.serve("x/y", handle)
            link.peer.call(1, "x/y")
            await link.peer.closed()

    with pytest.raises(type(end)), asyncio.Runner() as runner:
        runner.run(main())

    sent = [json.loads(frame) for frames in links[0].transport.sent for frame in frames]
    assert [(m["id"], m["error"]["code"]) for m in sent] == [(1, -32603)]


@pytest.mark.covers("R1-14")
@pytest.mark.parametrize(
    "error",
    [
        RequestError(12345, "odd", {"a": [1, None]}),
        RequestError.of(-32002, "gone", {"uri": "file:///x"}),
        RequestError(-1, "no data"),
        InvalidParams("text"),
        InvalidParams(0),
        InvalidParams(False),
        InvalidParams([]),
        InvalidParams(""),
    ],
    ids=repr,
)
async def test_a_request_error_goes_out_as_it_is(error: RequestError) -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise error

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        expected: dict[str, Any] = {"code": error.code, "message": error.message}
        if error.data is not None:
            expected["data"] = error.data
        assert (await link.peer.answer_to(1))["error"] == expected


@pytest.mark.parametrize("data", [object(), float("nan"), {"a": float("inf")}, {1j}])
async def test_error_data_that_is_no_json_is_left_out(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise RequestError(-32000, "kept", data)

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32000, "message": "kept"}
        assert "cannot be encoded" in caplog.text


@pytest.mark.covers("FF-07")
async def test_a_file_name_that_is_no_unicode_does_not_cost_an_answer() -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise ResourceNotFound({"path": "\udcff.txt"}, "no file \udcff.txt")

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        error = (await link.peer.answer_to(1))["error"]
        assert error["message"] == "no file \ufffd.txt"
        assert error["data"] == {"path": "\ufffd.txt"}


@pytest.mark.parametrize("result", [object(), float("nan"), {"a": {1: object()}}, {1j}])
async def test_a_result_that_is_no_json_is_an_internal_error(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(params: Any, context: Any) -> Any:
        return result

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert "a handler failed (what='request', method='x/y'" in caplog.text


async def test_a_handler_that_is_no_coroutine_function_is_an_internal_error() -> None:
    def handle(params: Any, context: Any) -> Any:
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603


async def test_a_result_over_the_frame_limit_is_refused_and_the_connection_lives() -> None:
    async def handle(params: Any, context: Any) -> Any:
        return "x" * params

    async with linked(frame_bytes=1000) as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y", 1000)
        link.peer.call(2, "x/y", 900)

        error = (await link.peer.answer_to(1))["error"]
        assert error["code"] == -32603
        assert error["data"] == {"reason": "limit frame_bytes exceeded", "limit": 1000}
        assert len((await link.peer.answer_to(2))["result"]) == 900
        assert all(len(frame) <= 1000 for frame in link.peer.raw_frames)


async def test_an_error_over_the_frame_limit_goes_without_its_data() -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise RequestError(-32000, "kept", "x" * 1000)

    async with linked(frame_bytes=1000) as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")

        error = (await link.peer.answer_to(1))["error"]
        assert error == {"code": -32000, "message": "kept"}


async def test_what_was_to_follow_a_response_follows_it_also_when_some_of_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(params: Any, context: Any) -> Any:
        connection = context.connection

        async def later() -> None:
            connection.notify("x/later", None)

        async def failing() -> None:
            raise ValueError("later")

        def broken() -> None:
            raise ValueError("at once")

        context.after_response(broken)
        context.after_response(failing)
        context.after_response(lambda: connection.notify("x/at once", None))
        context.after_response(later)
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.call(1, "x/y")
        await link.peer.messages(3)

        assert [m.get("method", m.get("id")) for m in link.peer.frames] == [
            1,
            "x/at once",
            "x/later",
        ]
        assert caplog.text.count("what was to run after a response failed") == 2


@pytest.mark.parametrize("fault", [ValueError("x"), RequestError(-1, "x")])
async def test_nothing_follows_a_request_that_failed(fault: Exception) -> None:
    followed: list[int] = []

    async def handle(params: Any, context: Any) -> Any:
        context.after_response(lambda: followed.append(1))
        raise fault

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)
        await turns()

        assert followed == []


# --- $/cancel_request from the peer --------------------------------------------------------------


@pytest.mark.covers("R1-98", "R1-99")
@pytest.mark.parametrize("side", SIDES)
async def test_a_running_request_is_cancelled_and_answered_as_cancelled(side: Side) -> None:
    gate = Gate()
    async with linked(side) as link:
        link.side.serve("slow", gate)
        link.peer.call("a", "slow")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": "a"})
        link.peer.tell("$/cancel_request", {"requestId": "a"})

        assert (await link.peer.answer_to("a"))["error"]["code"] == -32800
        link.peer.tell("$/cancel_request", {"requestId": "a"})
        await turns()
        assert len(link.peer.raw_frames) == 1
        assert gate.ended == ["cancelled"]


@pytest.mark.covers("R1-98")
@pytest.mark.parametrize("accepted", [False, True])
async def test_a_request_cancelled_before_its_task_began_never_runs(accepted: bool) -> None:
    gate = Gate()
    async with linked() as link:
        link.side.serve("slow", gate, accept=(lambda p, _c: p) if accepted else None)

        link.peer.send(
            b'{"id":1,"method":"slow"}', b'{"method":"$/cancel_request","params":{"requestId":1}}'
        )

        assert (await link.peer.answer_to(1))["error"]["code"] == -32800
        await turns()
        assert len(link.peer.raw_frames) == 1
        assert not gate.begun.is_set()


@pytest.mark.covers("R1-100")
@pytest.mark.parametrize("id_", [999, "1", 1.0, True, None, [1], {"a": 1}, -1])
async def test_a_cancellation_that_names_no_open_request_is_harmless(id_: Any) -> None:
    gate = Gate("done")
    async with linked() as link:
        link.side.serve("slow", gate)
        link.peer.call(1, "slow")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": id_})
        await turns()
        gate.open()

        assert (await link.peer.answer_to(1))["result"] == "done"
        assert len(link.peer.raw_frames) == 1


@pytest.mark.covers("R1-100")
async def test_a_cancellation_after_the_answer_is_harmless() -> None:
    async with linked() as link:
        link.side.serve("good", good)
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        link.peer.tell("$/cancel_request", {"requestId": 1})
        link.peer.call(2, "good")

        await link.peer.answer_to(2)
        assert len(link.peer.raw_frames) == 2


@pytest.mark.covers("R1-98")
async def test_a_handler_that_finishes_all_the_same_has_its_result_answered() -> None:
    entered = asyncio.Event()

    async def stubborn(params: Any, context: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert context.cancelled
            return "partial"

    async with linked() as link:
        link.side.serve("slow", stubborn)
        link.peer.call(1, "slow")
        await bounded(entered.wait())

        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["result"] == "partial"


@pytest.mark.covers("R1-98")
async def test_a_handler_that_fails_while_it_is_cancelled_is_answered_once() -> None:
    entered = asyncio.Event()

    async def failing(params: Any, context: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("in the clean-up")

    async with linked() as link:
        link.side.serve("slow", failing)
        link.peer.call(1, "slow")
        await bounded(entered.wait())

        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603
        await turns()
        assert len(link.peer.raw_frames) == 1


@pytest.mark.covers("R1-99")
async def test_a_handler_whose_own_work_was_cancelled_is_answered_as_cancelled() -> None:
    async def handle(params: Any, context: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == -32800


async def test_a_side_may_deal_with_a_cancellation_itself() -> None:
    gate = Gate("ended well")
    async with linked() as link:
        link.side.serve("slow", gate)
        asked: list[bytes] = []

        def deal(call: InboundCall) -> bool:
            asked.append(call.id)
            return True

        link.side.on_cancel = deal
        link.peer.call(1, "slow")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": 1})
        link.peer.tell("$/cancel_request", {"requestId": 1})
        await turns()
        gate.open()

        assert (await link.peer.answer_to(1))["result"] == "ended well"
        assert asked == [b"1"]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_in_the_handlers_place_ends_the_handler(begun: bool) -> None:
    gate = Gate()
    async with linked("client") as link:
        link.side.serve("slow", gate)
        link.side.on_cancel = lambda call: link.connection.answer(call, b'"instead"')
        if begun:
            link.peer.call(1, "slow")
            await gate.entered()
            link.peer.tell("$/cancel_request", {"requestId": 1})
        else:
            link.peer.send(
                b'{"id":1,"method":"slow"}',
                b'{"method":"$/cancel_request","params":{"requestId":1}}',
            )

        assert (await link.peer.answer_to(1))["result"] == "instead"
        await turns()
        assert len(link.peer.raw_frames) == 1
        assert gate.ended == (["cancelled"] if begun else [])
        assert gate.begun.is_set() == begun
        assert not link.connection.answer(link_call(link), b"1")


@pytest.mark.covers("R1-6")
@pytest.mark.parametrize("how", ["returns", "raises", "is answered for"])
async def test_who_was_answered_for_does_not_answer_the_next_request_of_that_id(how: str) -> None:
    """A peer may use an id again once it has the response; a handler may ignore its cancellation."""
    release, second = asyncio.Event(), Gate("the second's")
    calls: list[InboundCall] = []
    ended = asyncio.Event()

    async def deaf(params: Any, context: Any) -> Any:
        calls.append(context.call)
        context.after_response(lambda: pytest.fail("nothing follows an answer that was not sent"))
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                ended.set()
        if how == "raises":
            raise ResourceNotFound("the first's")
        return "the first's"

    async with linked() as link:
        link.side.serve("deaf", deaf)
        link.side.serve("second", second)
        link.peer.call("a", "deaf")
        await turns()
        assert link.connection.answer(calls[0], b'"instead"')
        assert (await link.peer.answer_to("a"))["result"] == "instead"
        await bounded(ended.wait())

        link.peer.forget()
        link.peer.call("a", "second")
        await second.entered()
        if how == "is answered for":
            assert not link.connection.answer(calls[0], b'"again"')
        release.set()
        await turns()
        assert link.peer.raw_frames == []
        second.open()

        assert (await link.peer.answer_to("a"))["result"] == "the second's"
        assert len(link.peer.raw_frames) == 1


async def test_a_handler_that_raises_what_ends_a_coroutine_is_answered_for() -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def odd(params: Any, context: Any) -> Any:
        tasks.append(asyncio.current_task())
        raise GeneratorExit

    async with linked() as link:
        link.side.serve("x/y", odd)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603
        (task,) = tasks
        assert task is not None
        assert isinstance(task.exception(), GeneratorExit)


async def test_a_handler_that_is_told_that_the_peer_is_gone_has_not_crashed() -> None:
    events: list[str] = []
    begun = asyncio.Event()

    async def handle(params: Any, context: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            context.connection.notify("x/late", None)

    def watch(event: TelemetryEvent) -> None:
        events.append(event.name)

    async with linked(telemetry=watch) as link:
        link.side.serve("x/y", handle)
        link.side.hear("x/z", handle)
        link.peer.call(1, "x/y")
        link.peer.tell("x/z")
        await bounded(begun.wait())
        await turns()
        await link.peer.transport.aclose()
        await bounded(link.connection.aclose())

    assert events == ["connection_lost"]


def link_call(link: Link) -> Any:
    return link.side.contexts[0].call


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "cancel", "finish", "fail", "again", "turn", "stubborn"]),
        st.integers(0, 4),
    ),
    max_size=30,
)


@pytest.mark.covers("R1-6", "R1-98", "FF-17")
@settings(max_examples=100)
@given(ACTIONS, st.booleans())
async def test_under_every_race_a_request_gets_exactly_one_response(
    actions: Sequence[tuple[str, int]], close: bool
) -> None:
    """Any interleaving of requests, cancellations, handlers that end, duplicates and a close."""
    ending: dict[int, asyncio.Future[Any]] = {}
    asked: set[int] = set()
    settled: set[int] = set()  # whose handler was told to end, or which were cancelled

    async def handle(params: Any, context: Any) -> Any:
        future = ending.setdefault(params["n"], asyncio.get_running_loop().create_future())
        while True:
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not params["stubborn"]:
                    raise

    async with linked() as link:
        link.side.serve("x/y", handle)

        def end(number: int) -> asyncio.Future[Any]:
            return ending.setdefault(number, asyncio.get_running_loop().create_future())

        for action, number in actions:
            if action in {"ask", "stubborn"} and number not in asked:
                asked.add(number)
                params = {"n": number, "stubborn": action == "stubborn"}
                link.peer.call(number, "x/y", params)
            elif action == "cancel":
                settled.add(number)
                link.peer.tell("$/cancel_request", {"requestId": number})
            elif action == "again" and number in asked - settled:
                link.peer.call(number, "x/y", {"n": number, "stubborn": False})
                await turns(2)  # it has arrived, and the first is in flight
            elif action in {"finish", "fail"} and not end(number).done():
                settled.add(number)
                if action == "finish":
                    end(number).set_result({})
                else:
                    end(number).set_exception(ValueError("x"))
                    end(number).exception()
            elif action == "turn":
                await turns(number)
        if close:
            await bounded(link.connection.aclose())
        for number in asked:
            if not end(number).done():
                end(number).set_result({})
        if not close:
            for number in asked:
                await link.peer.answer_to(number)
            assert not link.connection.protocol.requests
        await turns(20)
        for number in asked:
            responses = link.peer.responses(number)
            assert len(responses) <= 1 if close else len(responses) == 1
        assert {m["id"] for m in link.peer.frames} <= asked
