"""Our calls: every door they leave by, each once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.runtime.link import (
    BOUND,
    bounded,
    good,
    linked,
    raw,
    turns,
)

from antiphon._errors import (
    LimitExceeded,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
)
from antiphon.runtime import FutureCall, OutboundCall

OVER = 1 << 18  # the limit of these tests, plus something


async def test_a_call_gets_its_raw_result_and_sends_its_params() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", b'{"a":1}', BOUND))
        assert await link.peer.messages(1) == [
            {"jsonrpc": "2.0", "id": 1, "method": "x/y", "params": {"a": 1}}
        ]

        link.peer.send(b'{"id":1,"result": {"b": 2}}')

        assert bytes(await bounded(task)) == b'{"b": 2}'
        assert not link.connection.protocol.calls


class _Untold(msgspec.Struct):
    value: Any


@pytest.mark.parametrize(
    ("params", "timeout", "error"),
    [
        (None, "5", TypeError),
        (None, [], TypeError),
        (b'"%s"' % (b"x" * OVER), 5.0, LimitExceeded),
        (_Untold("x" * OVER), 5.0, LimitExceeded),
        (_Untold(object()), 5.0, TypeError),
        (_Untold(float("nan")), 5.0, ValueError),
    ],
)
async def test_a_call_that_cannot_be_made_leaves_nothing_open(
    params: Any, timeout: Any, error: type[Exception]
) -> None:
    async with linked("client", frame_bytes=OVER) as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        with pytest.raises(error):
            link.connection.open_call(call, params, timeout)

        assert not link.connection.protocol.calls
        assert link.connection.blocking_calls == 0
        assert call.patience is None
        await turns()
        assert link.peer.raw_frames == []
        await link.connection.aclose()
        assert link.connection.blocking_calls == 0
        assert not call.future.done()


@pytest.mark.covers("R1-16", "FF-15")
async def test_answers_that_only_look_like_ours_do_not_resolve_a_call() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        for id_ in (b'"1"', b"1.0", b"true", b"1e0", b"[1]", b"null", b"2", b"0"):
            link.peer.send(b'{"id":%s,"result":"wrong"}' % id_)
        await turns()
        assert not task.done()
        link.peer.send(b'{"id":1,"result":"right"}', b'{"id":1,"result":"late"}')

        assert raw(await bounded(task)) == "right"
        assert len(link.peer.raw_frames) == 1


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
        await link.peer.messages(1)

        link.peer.send(b'{"id":1,"error":' + error + b"}")

        with pytest.raises(kind) as caught:
            await bounded(task)
        if isinstance(caught.value, RequestError):
            assert caught.value.code in {-32002, 12345, -32603}


@pytest.mark.parametrize("frame", [b'{"id":1,"result":null}', b'{"id":1}'])
async def test_a_null_result_is_a_result(frame: bytes) -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

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
        await link.peer.messages(1)

        link.peer.send(frame)

        with pytest.raises(LimitExceeded) as caught:
            await bounded(task)
        assert caught.value.limit == limit
        assert len(link.peer.raw_frames) == 1


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
        assert [m["method"] for m in await link.peer.messages(1)] == ["x/z"]
        assert not link.connection.protocol.calls


@pytest.mark.covers("FF-17")
async def test_a_timeout_tells_the_peer_and_a_late_answer_is_ignored() -> None:
    async with linked("client") as link:
        with pytest.raises(RequestTimeout) as caught:
            await link.connection.request("x/y", None, 0.01)
        assert (caught.value.method, caught.value.seconds) == ("x/y", 0.01)
        assert isinstance(caught.value, TimeoutError)
        messages = await link.peer.messages(2)
        assert messages[1]["method"] == "$/cancel_request"
        assert messages[1]["params"] == {"requestId": 1}
        assert "id" not in messages[1]

        next_call = asyncio.create_task(link.connection.request("x/z", None, BOUND))
        await link.peer.messages(3)
        link.peer.respond(1, "late")
        link.peer.respond(2, "in time")

        assert raw(await bounded(next_call)) == "in time"
        assert len(link.peer.raw_frames) == 3


@pytest.mark.covers("FF-17")
async def test_a_cancelled_caller_tells_the_peer_and_a_late_answer_is_ignored() -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert (await link.peer.messages(2))[1]["params"] == {"requestId": 1}
        link.peer.respond(1, "late")
        await turns()
        assert not link.connection.protocol.calls
        assert len(link.peer.raw_frames) == 2


@pytest.mark.parametrize(
    "frame", [b'{"id":1,"result":1}', b'{"id":1,"error":{"code":1,"message":"m"}}']
)
async def test_a_caller_cancelled_just_after_its_answer_came_tells_nobody(frame: bytes) -> None:
    async with linked("client") as link:
        task = asyncio.create_task(link.connection.request("x/y", None, BOUND))
        await link.peer.messages(1)

        # In the reader, so that the answer is there and the caller has not run yet.
        link.connection.frames_received([frame])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        await turns()
        assert len(link.peer.raw_frames) == 1


async def test_the_answer_stops_the_clock() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None, BOUND)
        assert call.patience == BOUND
        await link.peer.messages(1)

        link.peer.respond(1, "answered")
        await bounded(call.future)

        assert call.patience is None


async def test_abandoning_an_answered_call_is_harmless() -> None:
    async with linked("client") as link:
        call = FutureCall("x/y", asyncio.get_running_loop().create_future())
        link.connection.open_call(call, None)
        await link.peer.messages(1)
        link.peer.respond(1, "answered")
        await bounded(call.future)

        link.connection.abandon(call)
        await turns()

        assert len(link.peer.raw_frames) == 1


async def test_an_answer_settles_its_call_before_the_next_frame_is_looked_at() -> None:
    order: list[str] = []

    class Noting(OutboundCall):
        def answered(self, result: Any, error: Exception | None) -> None:
            order.append("answered")

    async with linked("client") as link:
        link.side.serve("good", good)
        link.connection.open_call(Noting("session/new"), None)
        await link.peer.messages(1)

        link.peer.send(
            b'{"id":1,"result":{}}',
            b'{"method":"session/update","params":{"sessionId":"s","update":{}}}',
        )

        def update_received(session_id: str, update: Any, frame: bytes) -> None:
            order.append("update")

        link.side.update_received = update_received  # type: ignore[method-assign]
        link.peer.call(1, "good")
        await link.peer.answer_to(1)

        assert order == ["answered", "update"]
