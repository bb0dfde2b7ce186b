"""What a handler is given besides its parameters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.runtime.raw_peer import linked, turns

from antiphon.runtime import Context, InboundCall


@pytest.mark.covers("R1-156", "R1-157", "R1-158")
@pytest.mark.parametrize(
    "params",
    [
        b'{"sessionId":"s","_meta":{"traceparent":"00-1-2-01","k":[1]},"zzz": 1.0}',
        b'{"_meta":"bad"}',
        b"[1, 2]",
        b'"x"',
        b"0",
    ],
)
async def test_a_handler_sees_the_params_as_they_came(params: bytes) -> None:
    async with linked() as link:
        seen: list[Context] = []

        async def handle(_params: Any, context: Context) -> Any:
            seen.append(context)
            return {}

        link.side.serve("_x/y", handle)
        link.peer.send(b'{"id":1,"method":"_x/y","params": ' + params + b" }")
        await link.peer.answer_to(1)

        (context,) = seen
        assert context.raw == params
        assert isinstance(context.raw, bytes)
        assert bytes(context.raw_params) == params
        assert context.method == "_x/y"
        assert context.session_id == ("s" if b"sessionId" in params else "")
        assert context.connection is link.connection
        assert list(context.roots) == []


@pytest.mark.parametrize("params", [b"", b',"params":null'])
async def test_without_params_the_raw_ones_are_an_empty_object(params: bytes) -> None:
    async with linked() as link:
        seen: list[Context] = []

        async def handle(_params: Any, context: Context) -> Any:
            seen.append(context)
            return {}

        link.side.serve("_x/y", handle)
        link.peer.send(b'{"id":1,"method":"_x/y"' + params + b"}")
        await link.peer.answer_to(1)

        assert seen[0].raw == b"{}"
        assert seen[0].raw_params is None


async def test_a_handler_can_ask_whether_it_was_cancelled() -> None:
    async with linked() as link:
        call = InboundCall(b"1", "x/y")
        context = Context(link.connection, "x/y", "", msgspec.Raw(b"{}"), call)
        notified = Context(link.connection, "x/y", "", None, None)

        assert not context.cancelled
        call.cancelled = True
        assert context.cancelled
        assert not notified.cancelled


async def test_what_is_to_follow_a_notification_runs_at_once() -> None:
    async with linked() as link:
        order: list[str] = []
        context = Context(link.connection, "x/y", "", None, None)

        async def later() -> None:
            order.append("later")

        def fail() -> None:
            raise ValueError("x")

        context.after_response(lambda: order.append("now"))
        context.after_response(fail)
        context.after_response(later)
        assert order == ["now"]

        await turns()
        assert order == ["now", "later"]


async def test_what_is_to_follow_a_response_waits_for_it() -> None:
    async with linked() as link:
        order: list[str] = []

        async def handle(_params: Any, context: Context) -> Any:
            context.after_response(lambda: order.append("first"))
            context.after_response(lambda: order.append("second"))
            await turns()
            assert order == []
            return {}

        link.side.serve("x/y", handle)
        link.peer.ask(1, "x/y")
        await link.peer.answer_to(1)

        assert order == ["first", "second"]
