"""One live connection against a raw peer: every answer, every race, every way it may end."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.raw_peer import BOUND, Gate, Link, RawPeer, linked, plain, turns

from antiphon._errors import (
    ConnectionClosed,
    InvalidParams,
    LimitExceeded,
    NotInitialized,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
)
from antiphon.core import Limits, Side
from antiphon.runtime import FutureCall, InboundCall, OutboundCall
from antiphon.schema import decode, encode_checked, v1_unstable
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDES: list[Side] = ["agent", "client"]


async def good(params: Any, context: Any) -> Any:
    return {"good": True}


async def bounded(awaitable: Any) -> Any:
    async with asyncio.timeout(BOUND):
        return await awaitable


def raw(value: Any) -> Any:
    return json.loads(bytes(value))


# --- whatever comes, the next good request is answered -------------------------------------------

# What each frame is answered with: (code, id), or None for silence. "either" where the two sides
# differ: what an agent prints on its stdout is no reason to answer it.
OVER = 1 << 18  # the limit of these tests, plus something
ODD_FRAMES: list[tuple[bytes, tuple[int, Any] | None | str]] = [
    (b"{", (-32700, None)),
    (b'{"id":1,"method":', (-32700, None)),
    (b"Welcome user", "agent only"),
    (b"[INFO] ready", "agent only"),
    (b"\xff\xfe", "agent only"),
    (b"null", (-32600, None)),
    (b"42", (-32600, None)),
    (b'"x"', (-32600, None)),
    (b"[]", (-32600, None)),
    (b'[{"id":3,"method":"good"}]', (-32600, None)),
    (b"{}", (-32600, None)),
    (b'{"id":4}', (-32600, 4)),
    (b'{"jsonrpc":"1.0","id":4,"method":"good"}', (-32600, 4)),
    (b'{"id":5,"method":7}', (-32600, 5)),
    (b'{"id":null,"method":"good"}', (-32600, None)),
    (b'{"id":1.5,"method":"good"}', (-32600, None)),
    (b'{"id":true,"method":"good"}', (-32600, None)),
    (b'{"id":{},"method":"good"}', (-32600, None)),
    (b'{"id":"\xff","method":"good"}', (-32600, None)),
    (b'{"id":2,"x":%s}' % (b"9" * 5000), (-32600, 2)),
    (b'{"id":%s,"method":"good"}' % (b"9" * 5000), (-32600, None)),
    (b"[" * 100_000, (-32700, None)),
    (b'{"id":7,"method":"good","params":%s}' % (b"[" * 300 + b"]" * 300), (-32600, 7)),
    (b'{"id":7,"method":"good","params":{"t":"%s"}}' % (b"x" * OVER), (-32600, 7)),
    (b'{"params":{"t":"%s"},"method":"good","id":7}' % (b"x" * OVER), (-32600, 7)),
    (b"x" * (OVER + 1), (-32700, None)),
    (b'{"method":7}', (-32600, None)),
    (b'{"id":6,"result":1,"error":{}}', None),
    (b'{"id":6,"error":7}', None),
    (b'{"error":{"code":-32602,"message":"m"},"id":null}', None),
    (b'{"result":1}', None),
    (b'{"jsonrpc":"1.0","id":6,"result":1}', None),
    (b'{"method":"unheard"}', None),
    (b'{"method":"_vendor/y","params":[]}', None),
    (b'{"method":"$/other"}', None),
    (b'{"method":"$/cancel_request"}', None),
    (b'{"method":"$/cancel_request","params":{"requestId":[1,{"a":"\\n"}]}}', None),
    (b'{"method":"$/cancel_request","params":{"requestId":999}}', None),
    (b'{"method":"session/update"}', None),
    (b'{"method":"session/update","params":{"sessionId":5,"update":{}}}', None),
    (b'{"method":"session/update","params":{"sessionId":"s"}}', None),
    (b'{"id":8,"method":"good","params":{"t":"\\ud800"}}', (0, 8)),
    (b'{"id":8,"method":"good","params":{"t":"\xff"}}', (0, 8)),
    (b'{"id":8,"method":"good","params":{"t":%s}}' % (b"9" * 4000), (0, 8)),
    (b'{"id":8,"method":"good","zzz":1,"_meta":"bad"}', (0, 8)),
]


@pytest.mark.covers(
    "R1-1", "R1-7", "R1-10", "R1-11", "R1-12", "R1-16", "R1-100", "R1-156", "R1-158", "FF-06"
)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("frame", "expected"), ODD_FRAMES)
async def test_an_odd_frame_gets_its_one_answer_or_none_and_the_next_request_is_served(
    side: Side, frame: bytes, expected: tuple[int, Any] | None | str
) -> None:
    async with linked(side, frame_bytes=OVER) as link:
        link.side.serve("good", good)

        link.peer.send(frame, b'{"jsonrpc":"2.0","id":9,"method":"good"}')

        assert (await link.peer.answer_to(9))["result"] == {"good": True}
        await turns()
        others = [m for m in link.peer.messages if m["id"] != 9]
        if expected is None or (expected == "agent only" and side == "client"):
            assert others == []
        else:
            code, id_ = (-32700, None) if isinstance(expected, str) else expected
            assert len(others) == 1
            assert others[0]["id"] == id_
            assert others[0].get("error", {"code": 0})["code"] == code


@pytest.mark.parametrize("side", SIDES)
async def test_all_odd_frames_at_once_are_answered_one_by_one(side: Side) -> None:
    async with linked(side, frame_bytes=OVER) as link:
        link.side.serve("good", good)
        frames = [frame for frame, expected in ODD_FRAMES if expected != (0, 8)]

        link.peer.send(*frames, b'{"jsonrpc":"2.0","id":9,"method":"good"}')

        await link.peer.answer_to(9)
        await turns()
        answered = [e for _, e in ODD_FRAMES if isinstance(e, tuple) and e != (0, 8)]
        noise = [e for _, e in ODD_FRAMES if e == "agent only"] if side == "agent" else []
        assert len(link.peer.frames) == len(answered) + len(noise) + 1


@pytest.mark.covers("FF-08")
async def test_what_an_agent_prints_is_kept_for_error_texts() -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        link.peer.send(b"Welcome user", b"[INFO] ready", b"{'a': 1}", b"x" * 10_000)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        assert len(link.connection.noise) == 4096
        link.peer.send(b"last words")
        link.peer.ask(2, "good")
        await link.peer.answer_to(2)
        assert link.connection.noise.endswith(b"xxx\nlast words")


@pytest.mark.parametrize("text", [b"Welcome user", b"[INFO] ready", b"{'a': 1}"])
async def test_any_kind_of_noise_is_kept(text: bytes) -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        link.peer.send(text)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        assert link.connection.noise.strip() == text


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
        await link.peer.have(1)
        link.peer.send(b'{"jsonrpc":"2.0","id":%s,"method":"bad"}' % id_)
        await link.peer.have(2)

        assert link.peer.frames[0] == b'{"jsonrpc":"2.0","id":%s,"result":{"good":true}}' % id_
        assert link.peer.frames[1].startswith(b'{"jsonrpc":"2.0","id":%s,"error":{' % id_)


@pytest.mark.covers("R1-6", "FF-15")
async def test_both_directions_may_use_the_same_id_at_once() -> None:
    gate = Gate("theirs")
    async with linked() as link:
        link.side.serve("slow", gate)
        link.peer.ask(1, "slow")
        await gate.entered()
        ours = asyncio.create_task(link.connection.request("x/y", None, None))
        assert (await link.peer.have(1))[0]["id"] == 1

        link.peer.answer(1, "ours")

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
        link.peer.ask(2, "good")
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

        link.peer.ask(1, method, {})

        error = (await link.peer.answer_to(1))["error"]
        assert (error["code"], error["data"]) == (-32601, method)


async def test_of_an_absurdly_long_name_only_the_beginning_is_repeated() -> None:
    async with linked() as link:
        link.peer.ask(1, "m" * 100_000)

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
        link.peer.ask(9, "good")
        await link.peer.answer_to(9)
        await turns()

        assert len(link.peer.frames) == 1
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

        link.peer.ask(1, "x/y", {})

        assert (await link.peer.answer_to(1))["error"]["code"] == code
        assert b"internal" not in link.peer.frames[0]


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

        link.peer.ask(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == code
        assert b"internal" not in link.peer.frames[0]
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


async def test_past_the_limit_of_requests_in_flight_the_answer_is_server_busy() -> None:
    gate = Gate()
    async with linked(inbound_requests=2) as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        link.peer.ask(1, "slow")
        link.peer.ask(2, "slow")
        link.peer.ask(3, "good")

        error = (await link.peer.answer_to(3))["error"]
        assert error == {
            "code": -32603,
            "message": "Server busy",
            "data": {"reason": "too many concurrent inbound requests", "limit": 2},
        }
        assert len(link.connection.protocol.requests) == 2
        gate.open()
        await link.peer.answer_to(2)
        link.peer.ask(3, "good")
        await link.peer.until(lambda: len(link.peer.responses(3)) == 2)
        assert link.peer.responses(3)[1]["result"] == {"good": True}


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
        link.peer.ask(1, "good")
        link.peer.ask(2, "unknown")

        for id_, method in ((1, "good"), (2, "unknown")):
            error = (await link.peer.answer_to(id_))["error"]
            assert error["code"] == -32600
            assert error["data"] == {"method": method, "reason": "initialize required"}
        assert not heard


@pytest.mark.covers("R1-32")
async def test_a_second_initialize_is_refused() -> None:
    async with linked(initialized=False) as link:
        link.side.serve("initialize", good)
        link.peer.ask(1, "initialize")
        await link.peer.answer_to(1)
        assert link.connection.initialized

        link.peer.ask(2, "initialize")

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
        link.peer.ask("i", "initialize")
        link.peer.ask(1, "x/y", 1)
        await gate.entered()
        link.peer.ask("i", "initialize")  # an id in flight: dropped, when its turn comes
        link.peer.ask(2, "x/y", 2)
        link.peer.ask(3, "initialize")
        link.peer.send(b"{}")  # what nobody serves is refused at once
        await link.peer.have(1)
        assert order == []
        assert link.connection.queued_bytes > 0

        gate.open()
        await link.peer.have(6)

        assert order == [1, 2]
        assert [m["id"] for m in link.peer.messages][:2] == [None, "i"]
        assert {m["id"] for m in link.peer.messages[2:]} == {1, 2, 3, "i"}
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

        link.peer.ask(1, "initialize")
        link.peer.ask(2, "good")
        link.peer.ask(3, "initialize")
        link.peer.ask(4, "good")
        await link.peer.have(4)

        assert "error" in (await link.peer.answer_to(1))
        assert (await link.peer.answer_to(2))["error"]["code"] == -32600
        assert "result" in (await link.peer.answer_to(3))
        assert "result" in (await link.peer.answer_to(4))


async def test_the_handshake_itself_can_be_cancelled() -> None:
    gate = Gate()
    async with linked(initialized=False) as link:
        link.side.serve("initialize", gate)
        link.peer.ask(1, "initialize")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["error"]["code"] == -32800
        assert not link.connection.initialized


async def test_a_cancellation_of_what_is_held_waits_behind_it() -> None:
    handshake, slow = Gate(), Gate()
    async with linked(initialized=False) as link:
        link.side.serve("initialize", handshake)
        link.side.serve("slow", slow)
        link.peer.ask(1, "initialize")
        link.peer.ask(2, "slow")
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
        link.peer.ask(1, "initialize")
        await gate.entered()
        for number in range(10):
            link.peer.ask(2 + number, "good", {"text": "x" * 100})
            await turns()

        assert link.transport.reading == ["pause"]
        gate.open()
        await link.peer.answer_to(11)
        assert link.transport.reading == ["pause", "resume"]
        assert link.connection.queued_bytes == 0


@pytest.mark.covers("R1-20")
async def test_calls_before_the_handshake_are_refused_and_send_nothing() -> None:
    async with linked("client", initialized=False) as link:
        with pytest.raises(NotInitialized, match="session/new"):
            await link.connection.request("session/new", None, 1)
        with pytest.raises(NotInitialized):
            link.connection.notify("session/cancel", None)
        task = asyncio.create_task(link.connection.request("initialize", b"{}", None))
        assert (await link.peer.have(1))[0]["method"] == "initialize"
        link.peer.answer(1, {})
        await bounded(task)
        assert len(link.peer.frames) == 1


# --- the boundary between exceptions and the wire ------------------------------------------------


class Hard(BaseException):
    """What test frameworks, gevent and Rust extensions raise: no `Exception`."""


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

        link.peer.ask(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert b"internal" not in link.peer.frames[0]
        record = caplog.records[-1]
        assert (record.levelname, record.name) == ("ERROR", "antiphon.connection")
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
            link.peer.ask(1, "x/y")
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

        link.peer.ask(1, "x/y")

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

        link.peer.ask(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32000, "message": "kept"}
        assert "cannot be encoded" in caplog.text


@pytest.mark.covers("FF-07")
async def test_a_file_name_that_is_no_unicode_does_not_cost_an_answer() -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise ResourceNotFound({"path": "\udcff.txt"}, "no file \udcff.txt")

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.ask(1, "x/y")

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

        link.peer.ask(1, "x/y")

        answer = await link.peer.answer_to(1)
        assert answer["error"] == {"code": -32603, "message": "Internal error"}
        assert "the handler of x/y failed" in caplog.text


async def test_a_handler_that_is_no_coroutine_function_is_an_internal_error() -> None:
    def handle(params: Any, context: Any) -> Any:
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)

        link.peer.ask(1, "x/y")

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603


async def test_a_result_over_the_frame_limit_is_refused_and_the_connection_lives() -> None:
    async def handle(params: Any, context: Any) -> Any:
        return "x" * params

    async with linked(frame_bytes=1000) as link:
        link.side.serve("x/y", handle)

        link.peer.ask(1, "x/y", 1000)
        link.peer.ask(2, "x/y", 900)

        error = (await link.peer.answer_to(1))["error"]
        assert error["code"] == -32603
        assert error["data"] == {"reason": "limit frame_bytes exceeded", "limit": 1000}
        assert len((await link.peer.answer_to(2))["result"]) == 900
        assert all(len(frame) <= 1000 for frame in link.peer.frames)


async def test_an_error_over_the_frame_limit_goes_without_its_data() -> None:
    async def handle(params: Any, context: Any) -> Any:
        raise RequestError(-32000, "kept", "x" * 1000)

    async with linked(frame_bytes=1000) as link:
        link.side.serve("x/y", handle)

        link.peer.ask(1, "x/y")

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

        link.peer.ask(1, "x/y")
        await link.peer.have(3)

        assert [m.get("method", m.get("id")) for m in link.peer.messages] == [
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
        link.peer.ask(1, "x/y")
        await link.peer.answer_to(1)
        await turns()

        assert followed == []


# --- concurrency ---------------------------------------------------------------------------------


@pytest.mark.covers("FF-14")
async def test_a_waiting_request_blocks_no_other() -> None:
    gate = Gate()
    async with linked() as link:
        link.side.serve("slow", gate)
        link.side.serve("good", good)
        link.peer.ask(1, "slow")
        await gate.entered()

        link.peer.ask(2, "good")

        await link.peer.answer_to(2)
        assert link.peer.responses(1) == []
        gate.open()
        await link.peer.answer_to(1)


@pytest.mark.covers("FF-13")
@pytest.mark.parametrize("side", SIDES)
async def test_a_handler_may_call_the_peer_which_calls_back(side: Side) -> None:
    async def outer(params: Any, context: Any) -> Any:
        return {"inner": raw(await context.connection.request("peer/x", None, BOUND))}

    async with linked(side) as link:
        link.side.serve("outer", outer)
        link.side.serve("good", good)
        link.peer.ask("o", "outer")
        (asked,) = await link.peer.have(1)

        link.peer.ask("n", "good")  # the peer's handler asks in turn before it answers
        await link.peer.answer_to("n")
        link.peer.answer(asked["id"], 42)

        assert (await link.peer.answer_to("o"))["result"] == {"inner": 42}


@pytest.mark.covers("FF-20")
async def test_notifications_are_handled_one_at_a_time_in_wire_order() -> None:
    order: list[str] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        order.append(f"begin {params}")
        await turns(params % 3)
        order.append(f"end {params}")
        if params == 99:
            ready.set()

    async with linked() as link:
        link.side.hear("x/y", hear)
        for number in range(50):
            link.peer.tell("x/y", number)
        await turns(3)
        for number in range(50, 100):
            link.peer.tell("x/y", number)
        await bounded(ready.wait())

        assert order == [f"{word} {n}" for n in range(100) for word in ("begin", "end")]
        assert link.connection.queued_bytes == 0


async def test_a_notification_handler_that_fails_or_is_cancelled_loses_only_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[int] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        if params == 1:
            raise ValueError("one")
        if params == 2:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        if params == 3:
            raise Hard
        heard.append(params)
        if params == 4:
            ready.set()

    async with linked() as link:
        link.side.hear("x/y", hear)
        link.peer.send(*(b'{"method":"x/y","params":%d}' % number for number in range(5)))
        await bounded(ready.wait())

        assert heard == [0, 4]
        assert link.connection.queued_bytes == 0
        assert "the handler of x/y failed" in caplog.text


async def test_notifications_that_wait_at_the_end_are_not_begun() -> None:
    gate = Gate()
    async with linked() as link:
        link.side.hear("x/y", gate)
        link.peer.send(b'{"method":"x/y"}', b'{"method":"x/y"}')
        await gate.entered()
        began = asyncio.get_running_loop().time()

        await bounded(link.connection.aclose())

        assert asyncio.get_running_loop().time() - began < link.connection.limits.close_grace
        assert gate.ended == ["cancelled"]


@pytest.mark.covers("FF-13")
async def test_a_notification_handler_may_call_the_peer() -> None:
    results: list[Any] = []
    ready = asyncio.Event()

    async def hear(params: Any, context: Any) -> None:
        results.append(raw(await context.connection.request("peer/x", None, BOUND)))
        ready.set()

    async with linked("client") as link:
        link.side.hear("x/y", hear)
        link.peer.tell("x/y", {})
        (asked,) = await link.peer.have(1)
        link.peer.answer(asked["id"], "answered")
        await bounded(ready.wait())

        assert results == ["answered"]


async def test_an_immediate_notification_acts_before_the_next_frame_and_may_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order: list[str] = []

    def at_once(params: Any, context: Any) -> None:
        order.append("at once")
        raise ValueError("internal")

    async with linked() as link:
        link.side.hear("x/now", at_once=at_once)

        def accept(params: Any, context: Any) -> Any:
            order.append("next")
            return params

        link.side.serve("good", good, accept=accept)

        link.peer.send(b'{"method":"x/now"}', b'{"id":1,"method":"good"}')
        await link.peer.answer_to(1)

        assert order == ["at once", "next"]
        assert len(link.peer.frames) == 1
        assert "could not be dispatched" in caplog.text


@pytest.mark.parametrize("fault", [ValueError("x"), KeyError("x"), RecursionError()])
async def test_an_undecodable_notification_is_dropped(fault: Exception) -> None:
    gate = Gate()

    def failing(raw: Any) -> Any:
        raise fault

    async with linked() as link:
        link.side.hear("x/y", gate, decode=failing)
        link.side.serve("good", good)

        link.peer.tell("x/y", {})
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        assert not gate.begun.is_set()


async def test_updates_go_straight_to_the_side_in_wire_order() -> None:
    async with linked("client") as link:
        link.side.serve("good", good)
        frames = [
            b'{"method":"session/update","params":{"sessionId":"%s","update":{"n":%d}}}' % (s, n)
            for n in range(100)
            for s in (b"a", b"b")
        ]
        repaired = (
            b'{"method":"session/update","params":{"sessionId":"a","update":{"n":"\\ud800"}}}'
        )

        link.peer.send(*frames, repaired, *frames)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        once = [(s, {"n": n}) for n in range(100) for s in ("a", "b")]
        assert [(s, u) for s, u, _ in link.side.updates] == [*once, ("a", {"n": "\ufffd"}), *once]
        assert [frame for _, _, frame in link.side.updates[:200]] == frames


async def test_a_side_that_fails_on_an_update_does_not_end_the_reading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked("client") as link:
        link.side.serve("good", good)

        def failing(session_id: str, update: Any, frame: bytes) -> None:
            raise ValueError("x")

        link.side.update_received = failing  # type: ignore[method-assign]
        link.peer.send(
            b'{"method":"session/update","params":{"sessionId":"a","update":{}}}',
            b'{"id":1,"method":"good"}',
        )

        await link.peer.answer_to(1)
        assert "could not be dispatched" in caplog.text


# --- $/cancel_request from the peer --------------------------------------------------------------


@pytest.mark.covers("R1-98", "R1-99")
@pytest.mark.parametrize("side", SIDES)
async def test_a_running_request_is_cancelled_and_answered_as_cancelled(side: Side) -> None:
    gate = Gate()
    async with linked(side) as link:
        link.side.serve("slow", gate)
        link.peer.ask("a", "slow")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": "a"})
        link.peer.tell("$/cancel_request", {"requestId": "a"})

        assert (await link.peer.answer_to("a"))["error"]["code"] == -32800
        link.peer.tell("$/cancel_request", {"requestId": "a"})
        await turns()
        assert len(link.peer.frames) == 1
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
        assert len(link.peer.frames) == 1
        assert not gate.begun.is_set()


@pytest.mark.covers("R1-100")
@pytest.mark.parametrize("id_", [999, "1", 1.0, True, None, [1], {"a": 1}, -1])
async def test_a_cancellation_that_names_no_open_request_is_harmless(id_: Any) -> None:
    gate = Gate("done")
    async with linked() as link:
        link.side.serve("slow", gate)
        link.peer.ask(1, "slow")
        await gate.entered()

        link.peer.tell("$/cancel_request", {"requestId": id_})
        await turns()
        gate.open()

        assert (await link.peer.answer_to(1))["result"] == "done"
        assert len(link.peer.frames) == 1


@pytest.mark.covers("R1-100")
async def test_a_cancellation_after_the_answer_is_harmless() -> None:
    async with linked() as link:
        link.side.serve("good", good)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        link.peer.tell("$/cancel_request", {"requestId": 1})
        link.peer.ask(2, "good")

        await link.peer.answer_to(2)
        assert len(link.peer.frames) == 2


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
        link.peer.ask(1, "slow")
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
        link.peer.ask(1, "slow")
        await bounded(entered.wait())

        link.peer.tell("$/cancel_request", {"requestId": 1})

        assert (await link.peer.answer_to(1))["error"]["code"] == -32603
        await turns()
        assert len(link.peer.frames) == 1


@pytest.mark.covers("R1-99")
async def test_a_handler_whose_own_work_was_cancelled_is_answered_as_cancelled() -> None:
    async def handle(params: Any, context: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")

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
        link.peer.ask(1, "slow")
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
            link.peer.ask(1, "slow")
            await gate.entered()
            link.peer.tell("$/cancel_request", {"requestId": 1})
        else:
            link.peer.send(
                b'{"id":1,"method":"slow"}',
                b'{"method":"$/cancel_request","params":{"requestId":1}}',
            )

        assert (await link.peer.answer_to(1))["result"] == "instead"
        await turns()
        assert len(link.peer.frames) == 1
        assert gate.ended == (["cancelled"] if begun else [])
        assert gate.begun.is_set() == begun
        assert not link.connection.answer(link_call(link), b"1")


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
                link.peer.ask(number, "x/y", params)
            elif action == "cancel":
                settled.add(number)
                link.peer.tell("$/cancel_request", {"requestId": number})
            elif action == "again" and number in asked - settled:
                link.peer.ask(number, "x/y", {"n": number, "stubborn": False})
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
        assert {m["id"] for m in link.peer.messages} <= asked


# --- our calls -----------------------------------------------------------------------------------


async def test_a_call_gets_its_raw_result_and_sends_its_params() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", b'{"a":1}', BOUND))
        assert await link.peer.have(1) == [
            {"jsonrpc": "2.0", "id": 1, "method": "x/y", "params": {"a": 1}}
        ]

        link.peer.send(b'{"id":1,"result": {"b": 2}}')

        assert bytes(await bounded(task)) == b'{"b": 2}'
        assert not link.connection.protocol.calls


@pytest.mark.covers("R1-16", "FF-15")
async def test_answers_that_only_look_like_ours_do_not_resolve_a_call() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        for id_ in (b'"1"', b"1.0", b"true", b"1e0", b"[1]", b"null", b"2", b"0"):
            link.peer.send(b'{"id":%s,"result":"wrong"}' % id_)
        await turns()
        assert not task.done()
        link.peer.send(b'{"id":1,"result":"right"}', b'{"id":1,"result":"late"}')

        assert raw(await bounded(task)) == "right"
        assert len(link.peer.frames) == 1


@pytest.mark.covers("R1-14", "FF-18")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (b'{"code":-32002,"message":"gone","data":[1]}', ResourceNotFound),
        (b'{"code":12345,"message":"odd","data":"text"}', RequestError),
        (b'{"code":-32603,"message":"m","data":null}', RequestError),
        (b'{"code":-32603,"message":"m","data":%s}' % (b"9" * 5000), RequestError),
        (b'{"code":-32603}', RemoteProtocolError),
        (b"null", RemoteProtocolError),
        (b'"text"', RemoteProtocolError),
    ],
)
async def test_an_error_answer_is_raised_in_the_caller(error: bytes, kind: type[Exception]) -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        link.peer.send(b'{"id":1,"error":' + error + b"}")

        with pytest.raises(kind) as caught:
            await bounded(task)
        if isinstance(caught.value, RequestError):
            assert caught.value.code in {-32002, 12345, -32603}


@pytest.mark.parametrize("frame", [b'{"id":1,"result":null}', b'{"id":1}'])
async def test_a_null_result_is_a_result(frame: bytes) -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        link.peer.send(frame)

        assert bytes(await bounded(task)) == b"null"


@pytest.mark.covers("FF-01")
@pytest.mark.parametrize(
    ("frame", "limit"),
    [
        (b'{"id":1,"result":%s}' % (b"[" * 300 + b"]" * 300), "json_depth"),
        (b'{"id":1,"result":{"t":"%s"}}' % (b"x" * OVER), "frame_bytes"),
        (b'{"result":{"t":"%s"},"id":1}' % (b"x" * OVER), "frame_bytes"),
    ],
)
async def test_an_answer_over_a_limit_fails_its_call(frame: bytes, limit: str) -> None:
    async with linked("client", frame_bytes=OVER) as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        link.peer.send(frame)

        with pytest.raises(LimitExceeded) as caught:
            await bounded(task)
        assert caught.value.limit == limit
        assert len(link.peer.frames) == 1


@pytest.mark.covers("FF-01")
async def test_a_call_over_the_frame_limit_is_refused_before_a_byte_is_written() -> None:
    async with linked("client", frame_bytes=200) as link:
        with pytest.raises(LimitExceeded):
            await link.connection.request("x/y", b'"%s"' % (b"x" * 200), BOUND)
        with pytest.raises(LimitExceeded):
            link.connection.notify("x/y", b'"%s"' % (b"x" * 200))
        with pytest.raises(LimitExceeded):
            link.connection.check_frame(201)
        link.connection.check_frame(200)

        link.connection.notify("x/z", None)
        assert [m["method"] for m in await link.peer.have(1)] == ["x/z"]
        assert not link.connection.protocol.calls


@pytest.mark.covers("FF-17")
async def test_a_timeout_tells_the_peer_and_a_late_answer_is_ignored() -> None:
    async with linked("client") as link:
        with pytest.raises(RequestTimeout) as caught:
            await link.connection.request("x/y", None, 0.01)
        assert (caught.value.method, caught.value.seconds) == ("x/y", 0.01)
        assert isinstance(caught.value, TimeoutError)
        messages = await link.peer.have(2)
        assert messages[1]["method"] == "$/cancel_request"
        assert messages[1]["params"] == {"requestId": 1}
        assert "id" not in messages[1]

        next_call = asyncio.create_task(link.connection.request("x/z", None, BOUND))
        await link.peer.have(3)
        link.peer.answer(1, "late")
        link.peer.answer(2, "in time")

        assert raw(await bounded(next_call)) == "in time"
        assert len(link.peer.frames) == 3


@pytest.mark.covers("FF-17")
async def test_a_cancelled_caller_tells_the_peer_and_a_late_answer_is_ignored() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert (await link.peer.have(2))[1]["params"] == {"requestId": 1}
        link.peer.answer(1, "late")
        await turns()
        assert not link.connection.protocol.calls
        assert len(link.peer.frames) == 2


@pytest.mark.parametrize(
    "frame", [b'{"id":1,"result":1}', b'{"id":1,"error":{"code":1,"message":"m"}}']
)
async def test_a_caller_cancelled_just_after_its_answer_came_tells_nobody(frame: bytes) -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        # In the reader, so that the answer is there and the caller has not run yet.
        link.connection.frames_received([frame])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        await turns()
        assert len(link.peer.frames) == 1


async def test_the_answer_stops_the_clock() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None, BOUND)
        timer = call.timer
        assert timer is not None
        await link.peer.have(1)

        link.peer.answer(1, "answered")
        await bounded(call.future)

        assert timer.cancelled()
        assert call.timer is None


async def test_abandoning_an_answered_call_is_harmless() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)
        await link.peer.have(1)
        link.peer.answer(1, "answered")
        await bounded(call.future)

        link.connection.abandon(call)
        await turns()

        assert len(link.peer.frames) == 1


async def test_an_answer_settles_its_call_before_the_next_frame_is_looked_at() -> None:
    order: list[str] = []

    class Noting(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None:
            order.append("answered")

    async with linked("client") as link:
        link.side.serve("good", good)
        link.connection.open_call(Noting("session/new"), None)
        await link.peer.have(1)

        link.peer.send(
            b'{"id":1,"result":{}}',
            b'{"method":"session/update","params":{"sessionId":"s","update":{}}}',
        )

        def update_received(session_id: str, update: Any, frame: bytes) -> None:
            order.append("update")

        link.side.update_received = update_received  # type: ignore[method-assign]
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)

        assert order == ["answered", "update"]


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("how", ["the peer closes", "we close"])
async def test_the_end_fails_every_call_within_one_turn_and_later_ones_at_once(how: str) -> None:
    async with linked("client") as link:
        calls = [FutureCall("x/y", asyncio.get_running_loop().create_future()) for _ in range(3)]
        for call in calls:
            link.connection.open_call(call, None, BOUND)

        if how == "we close":
            closing = asyncio.create_task(link.connection.aclose())
            await turns(1)
            assert all(call.future.done() for call in calls)
            await closing
        else:
            await link.peer.transport.aclose()
            await bounded(link.connection.wait_closed())

        errors = [call.future.exception() for call in calls]
        assert all(isinstance(error, ConnectionClosed) for error in errors)
        assert len(set(map(id, errors))) == 3  # each has its own traceback
        assert all(call.timer is None for call in calls)
        with pytest.raises(ConnectionClosed):
            await link.connection.request("x/y", None, BOUND)
        with pytest.raises(ConnectionClosed):
            link.connection.notify("x/y", None)
        with pytest.raises(ConnectionClosed):
            await link.connection.drain()
        assert link.connection.closed
        assert len(link.side.losses) == 1


async def test_what_is_known_of_the_loss_is_in_every_error() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)

        link.connection.connection_lost(
            ConnectionClosed("the agent ended", exit_status=3, stderr_tail="no key")
        )

        error = call.future.exception()
        assert isinstance(error, ConnectionClosed)
        assert (error.reason, error.exit_status, error.stderr_tail) == (
            "the agent ended",
            3,
            "no key",
        )
        assert link.connection.lost_error() is not link.connection.lost_error()
        await bounded(link.connection.wait_closed())


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, "the peer closed the connection"), (OSError(32, "Broken pipe"), "Broken pipe")],
)
async def test_the_reason_of_a_loss_is_told(error: Exception | None, text: str) -> None:
    async with linked("client") as link:
        link.connection.connection_lost(error)

        assert text in link.connection.lost_error().reason
        await bounded(link.connection.wait_closed())


async def test_an_answer_that_was_read_is_delivered_although_the_end_follows() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        link.peer.answer(1, "last words")
        await link.peer.transport.aclose()

        assert raw(await bounded(task)) == "last words"


@pytest.mark.covers("FF-12")
async def test_closing_is_shared_repeatable_and_outlives_a_caller_that_gives_up() -> None:
    async with linked() as link:
        cancelled = asyncio.Event()
        entered = asyncio.Event()

        async def slow_to_end(params: Any, context: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                await turns(10)
                cancelled.set()

        link.side.serve("slow", slow_to_end)
        link.peer.ask(1, "slow")
        await bounded(entered.wait())

        first, *others = [asyncio.create_task(link.connection.aclose()) for _ in range(3)]
        await turns(2)
        first.cancel()
        await bounded(asyncio.gather(*others))

        assert first.cancelled()
        assert cancelled.is_set()
        assert link.transport.closes == 1
        await bounded(link.connection.aclose())
        await bounded(link.connection.wait_closed())
        await link.peer.closed()
        assert link.peer.frames == []


async def test_a_handler_may_close_its_own_connection() -> None:
    ended: list[str] = []

    async def handle(params: Any, context: Any) -> Any:
        try:
            await context.connection.aclose()
        finally:
            ended.append("handler")

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")
        await bounded(link.connection.wait_closed())

        assert ended == ["handler"]


async def test_a_handler_that_ignores_cancellation_is_left_behind_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()
    entered = asyncio.Event()
    done = asyncio.Event()

    async def deaf(params: Any, context: Any) -> Any:
        entered.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        done.set()
        return {}

    async with linked(close_grace=0.05) as link:
        link.side.serve("deaf", deaf)
        link.peer.ask(1, "deaf")
        await bounded(entered.wait())
        began = asyncio.get_running_loop().time()

        await bounded(link.connection.aclose())

        assert asyncio.get_running_loop().time() - began < 1.0
        assert "ignores cancellation" in caplog.text
        release.set()
        await bounded(done.wait())
        await turns()
        assert link.peer.frames == []


async def test_a_request_that_comes_while_closing_is_not_begun() -> None:
    entered = asyncio.Event()
    late = Gate()

    async def slow_to_end(params: Any, context: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turns(10)

    async with linked() as link:
        link.side.serve("slow", slow_to_end)
        link.side.serve("late", late)
        link.peer.ask(1, "slow")
        await bounded(entered.wait())

        closing = asyncio.create_task(link.connection.aclose())
        await turns(1)
        link.peer.ask(2, "late")
        await bounded(closing)

        assert not late.begun.is_set()


async def test_what_a_handler_starts_while_it_is_cancelled_is_ended_too() -> None:
    entered = asyncio.Event()
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async with linked() as link:

        async def handle(params: Any, context: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                link.connection.create_task(forever())
                await turns(2)

        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")
        await bounded(entered.wait())

        await bounded(link.connection.aclose())

        assert ended == ["forever"]


async def test_deliveries_come_to_their_own_end_other_tasks_are_cancelled_at_once() -> None:
    ended: list[str] = []
    other_ended = asyncio.Event()

    async with linked("client") as link:

        async def deliver() -> None:
            await other_ended.wait()
            await turns(5)
            ended.append("delivered")

        async def other() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                other_ended.set()

        link.connection.create_task(deliver(), delivery=True)
        link.connection.create_task(other())
        await turns()

        await bounded(link.connection.aclose())

        assert ended == ["delivered"]


async def test_a_delivery_that_does_not_end_is_cancelled_after_the_grace() -> None:
    ended: list[str] = []

    async with linked("client", close_grace=0.02) as link:

        async def deliver() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        link.connection.create_task(deliver(), delivery=True)
        await turns()

        await bounded(link.connection.aclose())

        assert ended == ["cancelled"]


async def test_a_side_and_a_call_that_fail_at_the_end_do_not_keep_the_others_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None:
            raise ValueError("answered")

    async with linked("client") as link:
        link.connection.open_call(Failing("x/a"), None)
        call = FutureCall("x/b", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)

        def failing(error: Any) -> None:
            raise ValueError("lost")

        link.side.connection_lost = failing  # type: ignore[method-assign]
        await bounded(link.connection.aclose())

        assert isinstance(call.future.exception(), ConnectionClosed)
        assert "could not be failed" in caplog.text
        assert "could not take the loss" in caplog.text


@pytest.mark.parametrize("how", ["we close", "the peer closes"])
async def test_a_transport_that_cannot_be_closed_does_not_keep_anybody_waiting(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked("client") as link:

        async def failing() -> None:
            raise OSError(5, "Input/output error")

        link.transport.aclose = failing  # type: ignore[method-assign]
        if how == "we close":
            await bounded(link.connection.aclose())
        else:
            await link.peer.transport.aclose()

        await bounded(link.connection.wait_closed())
        assert "could not be closed" in caplog.text
        await link.transport.inner.aclose()


async def test_cancelling_the_wait_for_the_end_cancels_the_wait_alone() -> None:
    async with linked() as link:
        waiting = asyncio.create_task(link.connection.wait_closed())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])

        assert not link.connection.closed
        again = asyncio.create_task(link.connection.wait_closed())
        await link.connection.aclose()
        await bounded(again)


# --- the end of input while output still works (own stdio) ---------------------------------------


@pytest.mark.covers("R1-19")
async def test_both_requests_before_the_end_of_input_are_answered_then_the_link_closes() -> None:
    async def slow(params: Any, context: Any) -> Any:
        await turns(10)
        return {"sessionId": "s"}

    async with linked(initialized=False) as link:
        link.side.serve("initialize", slow)
        link.side.serve("session/new", slow)

        link.peer.ask(1, "initialize")
        link.peer.ask(2, "session/new")
        await turns(2)
        link.connection.input_ended()
        await link.peer.closed()

        assert [m["id"] for m in link.peer.messages if "result" in m] == [1, 2]
        await bounded(link.connection.wait_closed())


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_nothing_runs_so_the_link_closes_at_once() -> None:
    async with linked() as link:
        link.connection.input_ended()
        link.connection.input_ended()
        await bounded(link.connection.wait_closed())

        assert link.transport.closes == 1
        assert link.connection.lost_error().reason == "the peer closed its output"


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_open_calls_and_later_ones_fail_at_once() -> None:
    outcomes: list[str] = []

    async def handle(params: Any, context: Any) -> Any:
        for _ in range(2):
            try:
                await context.connection.request("peer/x", None, None)
            except ConnectionClosed as error:
                outcomes.append(error.reason)
        return "answered all the same"

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")
        await link.peer.have(1)

        link.connection.input_ended()

        assert (await link.peer.answer_to(1))["result"] == "answered all the same"
        assert outcomes == ["the peer closed its output"] * 2
        await link.peer.closed()
        assert len(link.peer.frames) == 2


@pytest.mark.covers("R1-19")
async def test_at_the_end_of_input_a_handler_gets_the_grace_and_no_more() -> None:
    gate = Gate()
    async with linked(close_grace=0.05) as link:
        link.side.serve("slow", gate)
        link.peer.ask(1, "slow")
        await gate.entered()

        link.connection.input_ended()
        await bounded(link.connection.wait_closed())

        assert gate.ended == ["cancelled"]
        assert link.peer.frames == []


async def test_a_loss_while_the_last_handlers_finish_closes_once() -> None:
    gate = Gate()
    async with linked(close_grace=0.1) as link:
        link.side.serve("slow", gate)
        link.peer.ask(1, "slow")
        await gate.entered()
        link.connection.input_ended()
        await turns()

        await link.peer.transport.aclose()
        await bounded(link.connection.wait_closed())

        assert gate.ended == ["cancelled"]
        assert len(link.side.losses) == 1
        assert link.transport.closes == 1


# --- the budget of what waits --------------------------------------------------------------------


def update(size: int) -> bytes:
    frame = b'{"method":"session/update","params":{"sessionId":"s","update":{"t":"%s"}}}'
    return frame % (b"x" * (size - len(frame) + 2))


async def test_reading_stops_past_the_budget_and_goes_on_when_room_is_made() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.side.serve("good", good)
        for _ in range(20):
            link.peer.send(update(100))
            await turns(2)

        assert len(link.side.updates) == 11  # the first past the budget is taken
        assert link.connection.queued_bytes == 1100
        assert link.transport.reading == ["pause"]

        link.connection.release(50)
        assert link.transport.reading == ["pause"]
        link.connection.release(50)
        assert link.transport.reading == ["pause", "resume"]
        # All the rest came together with the first, and is one delivery: the budget is looked at
        # once for each.
        await turns()
        assert len(link.side.updates) == 20
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.release(link.connection.queued_bytes)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)


async def test_while_a_call_may_be_awaited_reading_goes_on_into_the_overdraft() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        for _ in range(15):
            link.peer.send(update(100))
            await turns(2)
        assert link.transport.reading == []
        link.peer.answer(1, "behind the updates")

        assert raw(await bounded(task)) == "behind the updates"
        assert len(link.side.updates) == 15
        assert link.transport.reading == ["pause"]  # nobody waits for an answer any more
        link.connection.release(1500)


async def test_a_call_whose_caller_gave_up_keeps_no_reading_alive() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None, BOUND)
        timer = call.timer
        assert timer is not None

        link.connection.abandon(call)
        link.peer.send(*[update(100)] * 12)
        await turns(2)

        assert timer.cancelled()
        assert link.transport.reading == ["pause"]
        link.connection.release(1200)


async def test_a_call_made_while_reading_is_stopped_starts_it_again() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.peer.send(*[update(100)] * 12)
        await turns(2)
        assert link.transport.reading == ["pause"]

        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)
        link.peer.answer(1, "answered")

        assert raw(await bounded(task)) == "answered"
        assert link.transport.reading == ["pause", "resume", "pause"]
        link.connection.release(1200)
        assert link.transport.reading[-1] == "resume"


async def test_an_open_turn_does_not_keep_reading_alive() -> None:
    class Prompt(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None: ...

    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        link.connection.open_call(Prompt("session/prompt", blocking=False), None)
        link.peer.send(*[update(100)] * 12)
        await turns(2)

        assert link.transport.reading == ["pause"]
        link.connection.release(1200)


async def test_past_the_overdraft_the_call_fails_and_so_does_the_next() -> None:
    async with linked("client", queue_bytes=1000) as link:
        link.side.queue_updates = True
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.have(1)

        link.peer.send(*[update(100)] * 21)

        with pytest.raises(LimitExceeded) as caught:
            await bounded(task)
        assert (caught.value.limit, caught.value.maximum) == ("queue_bytes", 1000)
        assert caught.value.size == 2100
        assert link.transport.reading == ["pause"]
        assert (await link.peer.have(2))[1]["params"] == {"requestId": 1}
        with pytest.raises(LimitExceeded):
            await link.connection.request("x/y", None, BOUND)
        assert link.transport.reading == ["pause"]
        assert len(link.peer.frames) == 2

        link.connection.release(1000)  # in the overdraft still: a call is possible again
        task = asyncio.create_task(link.connection.request("x/z", None, BOUND))
        await link.peer.have(3)
        link.peer.answer(2, "answered")
        assert raw(await bounded(task)) == "answered"
        link.connection.release(1100)


async def test_a_flood_of_notifications_stops_the_reading_too() -> None:
    gate = Gate()
    async with linked(queue_bytes=1000) as link:
        link.side.hear("x/y", gate)
        link.side.serve("good", good)
        for _ in range(20):
            link.peer.tell("x/y", {"t": "x" * 100})
            await turns(2)

        assert link.transport.reading == ["pause"]
        assert len(link.side.contexts) < 20
        gate.open()
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)
        await link.peer.until(lambda: len(link.side.contexts) == 21)
        await turns()
        assert link.connection.queued_bytes == 0


# --- writing -------------------------------------------------------------------------------------


async def test_frames_of_one_turn_of_the_loop_leave_in_one_send() -> None:
    async with linked() as link:
        for number in range(5):
            link.connection.notify("x/y", b"%d" % number)
        assert link.transport.sent == []

        await turns(1)

        assert [len(frames) for frames in link.transport.sent] == [5]
        assert [m["params"] for m in await link.peer.have(5)] == [0, 1, 2, 3, 4]


async def test_the_only_call_and_the_only_answer_leave_at_once() -> None:
    async with linked() as link:
        link.side.serve("good", good)
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())

        link.connection.open_call(call, None)

        assert len(link.transport.sent) == 1
        await link.peer.have(1)
        link.peer.answer(1, None)
        await bounded(call.future)
        link.peer.ask(1, "good")
        await link.peer.answer_to(1)
        assert [len(frames) for frames in link.transport.sent] == [1, 1]


async def test_what_was_queued_before_leaves_before_a_lone_answer() -> None:
    async def handle(params: Any, context: Any) -> Any:
        context.connection.notify("x/first", None)
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")
        await link.peer.answer_to(1)

        assert [m.get("method", m.get("id")) for m in link.peer.messages] == ["x/first", 1]
        assert [len(frames) for frames in link.transport.sent] == [2]


async def test_what_frames_that_came_together_cause_leaves_together() -> None:
    async with linked() as link:
        link.peer.send(*(b'{"id":%d,"method":"unknown"}' % number for number in range(10)))
        await link.peer.have(10)

        assert [len(frames) for frames in link.transport.sent] == [10]


async def test_much_that_is_queued_does_not_wait_for_the_end_of_the_turn() -> None:
    async with linked() as link:
        for _ in range(10):
            link.connection.notify("x/y", b'"%s"' % (b"x" * 20_000))
        assert [len(frames) for frames in link.transport.sent] == [4, 4]

        await link.peer.have(10)
        assert [len(frames) for frames in link.transport.sent] == [4, 4, 2]


async def test_writing_goes_on_after_a_fault_in_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked("client", queue_bytes=100) as link:
        link.side.queue_updates = True

        def failing() -> None:
            raise ValueError("x")

        pause, link.transport.pause_reading = (  # type: ignore[method-assign]
            link.transport.pause_reading,
            failing,
        )
        with pytest.raises(ValueError, match="x"):
            link.connection.frames_received([update(200)])
        link.transport.pause_reading = pause  # type: ignore[method-assign]

        link.connection.notify("x/y", None)
        await link.peer.have(1)


async def test_draining_waits_for_room_once_and_is_failed_by_the_loss() -> None:
    async with linked() as link:
        connection = link.connection
        await bounded(connection.drain())
        connection.pause_writing()
        assert connection.writing_paused
        waiting = [asyncio.create_task(connection.drain()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in waiting)

        waiting[0].cancel()  # one that gives up takes nobody with it
        await turns()
        connection.resume_writing()
        await bounded(asyncio.gather(*waiting[1:]))
        assert waiting[0].cancelled()

        connection.pause_writing()
        waiting = [asyncio.create_task(connection.drain()) for _ in range(3)]
        await turns()
        waiting[0].cancel()
        connection.connection_lost(None)
        for task in waiting[1:]:
            with pytest.raises(ConnectionClosed):
                await bounded(task)
        await bounded(connection.wait_closed())


async def test_a_slow_peer_is_felt_through_the_transport() -> None:
    async with linked() as link:
        link.peer.transport.pause_reading()
        for _ in range(10):
            link.connection.notify("x/y", b'"%s"' % (b"x" * 20_000))
        await turns(1)
        assert link.connection.writing_paused
        waiting = asyncio.create_task(link.connection.drain())
        await turns()
        assert not waiting.done()

        link.peer.transport.resume_reading()
        await bounded(waiting)

        assert not link.connection.writing_paused


@pytest.mark.covers("R1-2")
async def test_every_frame_is_one_line_of_json() -> None:
    text = "a\nb\r\nc\u2028\u2029\u0085\x00d"

    async def handle(params: Any, context: Any) -> Any:
        if params["fail"]:
            raise RequestError(-32000, text, {text: text})
        return {text: text}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.connection.notify(text, encode_checked(text))
        link.peer.ask(text, "x/y", {"fail": True})
        link.peer.ask(1, "x/y", {"fail": False})
        link.peer.ask(2, text)
        await link.peer.have(4)

        assert not any(b"\n" in frame or b"\r" in frame for frame in link.peer.frames)
        assert (await link.peer.answer_to(text))["error"]["data"] == {text: text}
        assert (await link.peer.answer_to(1))["result"] == {text: text}


async def test_every_frame_is_recorded_once_in_its_order() -> None:
    seen: list[tuple[str, bytes]] = []

    def record(way: str, frame: bytes) -> None:
        seen.append((way, frame))

    async with linked(record=record) as link:
        link.side.serve("good", good)
        link.peer.send(b'{"id":1,"method":"good"}', b"{", b'{"method":"x"}')
        await link.peer.have(2)
        link.connection.notify("x/y", None)
        await link.peer.have(3)

        assert [frame for way, frame in seen if way == "in"] == [
            b'{"id":1,"method":"good"}',
            b"{",
            b'{"method":"x"}',
        ]
        assert [frame for way, frame in seen if way == "out"] == link.peer.frames
        assert seen[0] == ("in", b'{"id":1,"method":"good"}')


# --- two connections with each other, and the doubles themselves ---------------------------------


async def test_two_sides_call_each_other_through_any_number_of_levels() -> None:
    async with linked("agent") as link:
        # The raw peer's end, given to a real client.
        far = Link("client", Limits())
        far.connection = type(link.connection)(link.peer.transport, "client", far.side)
        far.side.connection = far.connection
        await far.connection.start()
        far.connection.initialized = True

        async def descend(params: Any, context: Any) -> Any:
            if params == 0:
                return ["the ground"]
            inner = await context.connection.request("down", b"%d" % (params - 1), BOUND)
            return [params, *raw(inner)]

        link.side.serve("down", descend)
        far.side.serve("down", descend)

        answers = await bounded(
            asyncio.gather(*(far.connection.request("down", b"20", BOUND) for _ in range(20)))
        )

        assert [raw(answer) for answer in answers] == [[*range(20, 0, -1), "the ground"]] * 20
        await bounded(far.connection.aclose())


async def test_the_raw_peer_sends_any_bytes_together_and_keeps_what_it_gets() -> None:
    near, far = memory_pair()
    one, other = RawPeer(near), RawPeer(far)
    await near.start(one)
    await far.start(other)

    one.send(b"{", b"\xff", b'{"a":1}')
    one.ask(True, "x", [1])
    one.tell("y")
    one.answer(1.0, None)

    await other.until(lambda: len(other.frames) == 6)
    assert other.frames[:3] == [b"{", b"\xff", b'{"a":1}']
    other.frames = other.frames[3:]
    assert other.messages == [
        {"jsonrpc": "2.0", "id": True, "method": "x", "params": [1]},
        {"jsonrpc": "2.0", "method": "y", "params": None},
        {"jsonrpc": "2.0", "id": 1.0, "result": None},
    ]
    other.frames = other.frames[2:]
    assert other.responses(1) == []
    assert other.responses(True) == []
    assert (await other.answer_to(1.0))["result"] is None
    assert one.frames == []
    await near.aclose()
    await other.closed()
    await far.aclose()


async def test_the_plain_side_gives_plain_values_both_ways() -> None:
    async def twice(params: Any, context: Any) -> Any:
        return [params, params]

    async with linked() as link:
        link.side.serve("twice", twice)
        link.peer.ask(1, "twice", {"a": None})
        link.peer.ask(2, "twice")

        assert (await link.peer.answer_to(1))["result"] == [{"a": None}] * 2
        assert (await link.peer.answer_to(2))["result"] == [{}, {}]
        assert plain(msgspec.Raw(b"[1]")) == [1]
        assert encode_checked([1]) == b"[1]"
