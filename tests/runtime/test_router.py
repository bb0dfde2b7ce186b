"""The shape of what serves a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.link import PlainSide, linked

from antiphon.runtime import NoticeRoute, RequestRoute
from antiphon.schema import encode, loads

if TYPE_CHECKING:
    from antiphon.runtime import Router


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
