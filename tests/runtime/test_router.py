"""The shape of what serves a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.link import BOUND, Peer, PlainSide, linked

from antiphon.runtime import Connection, Context, NoticeRoute, RequestRoute, Router
from antiphon.schema import encode, loads
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from antiphon._errors import ConnectionClosed
    from antiphon.runtime import InboundCall


async def handle(params: Any, context: Any) -> Any:
    return params


def test_a_route_is_decided_once() -> None:
    request = RequestRoute(loads, handle, encode)
    notice = NoticeRoute(loads, handle=handle)

    assert request.accept is None
    assert notice.immediate is None
    with pytest.raises(AttributeError):
        request.accept = handle  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        notice.handle = None  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def test_anything_of_that_shape_is_a_router() -> None:
    side: Router = PlainSide()

    assert side.request_route("x/y") is None
    assert side.notice_route("x/y") is None


async def test_routes_are_looked_up_for_each_message_so_that_they_may_change() -> None:
    async def other(params: Any, context: Any) -> Any:
        return "other"

    async with linked() as link:
        link.peer.call(1, "x/y", "one")
        assert "error" in await link.peer.answer_to(1)
        link.side.serve("x/y", handle)
        link.peer.call(2, "x/y", "one")
        assert (await link.peer.answer_to(2))["result"] == "one"
        link.side.serve("x/y", other)
        link.peer.call(3, "x/y", "one")
        assert (await link.peer.answer_to(3))["result"] == "other"


async def test_a_request_and_a_notification_of_one_name_are_served_apart() -> None:
    heard: list[Any] = []

    def hear(params: Any, context: Any) -> None:
        heard.append(params)

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.side.hear("x/y", at_once=hear)

        link.peer.tell("x/y", "told")
        link.peer.call(1, "x/y", "asked")

        assert (await link.peer.answer_to(1))["result"] == "asked"
        assert heard == ["told"]


class OneByOne(Router):
    """A router of one's own that serves one request, and takes updates one by one."""

    connection: Connection

    def __init__(self) -> None:
        self.told: list[tuple[str, bytes, bytes]] = []

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        self.told.append((session_id, bytes(update), frame))

    def request_route(self, method: str) -> RequestRoute | None:
        return RequestRoute(loads, handle, encode)

    def notice_route(self, method: str) -> NoticeRoute | None:
        return None

    def context(self, method: str, raw: Any, params: Any, call: InboundCall | None) -> Context:
        return Context(self.connection, method, "", raw, call)

    def cancelled(self, call: InboundCall) -> bool:
        return False

    def input_ended(self) -> None:
        return

    def connection_lost(self, error: ConnectionClosed) -> None:
        return


async def test_a_router_that_takes_updates_one_by_one_loses_none_that_come_together() -> None:
    side, (near, far) = OneByOne(), memory_pair()
    side.connection = Connection(near, "client", side)
    peer = Peer(far, BOUND)
    frames = [
        b'{"method":"session/update","params":{"sessionId":"%s","update":{"n":%d}}}' % (s, n)
        for s in (b"a", b"b")
        for n in range(50)
    ]
    await side.connection.start()
    await far.start(peer)
    try:
        peer.send(*frames)
        peer.call(1, "x/y", "one")
        await peer.answer_to(1)
    finally:
        await side.connection.aclose()
        await far.aclose()

    assert side.told == [
        (s, b'{"n":%d}' % n, frames[at * 50 + n]) for at, s in enumerate("ab") for n in range(50)
    ]
