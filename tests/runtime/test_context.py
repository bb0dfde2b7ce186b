"""What a handler is given besides its parameters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.runtime.link import linked, turns

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
        call = InboundCall(b"1", "x/y", 1)
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
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)

        assert order == ["first", "second"]


@pytest.mark.parametrize("good", [True, False])
async def test_what_is_to_follow_a_response_that_is_queued_already_runs_at_once(
    good: bool,
) -> None:
    async with linked() as link:
        contexts: list[Context] = []
        order: list[str] = []

        async def handle(_params: Any, context: Context) -> Any:
            contexts.append(context)
            context.after_response(
                lambda: context.after_response(lambda: order.append("of the other"))
            )
            context.after_response(lambda: order.append("other"))
            if not good:
                raise ValueError("x")
            return {}

        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)
        contexts[0].after_response(lambda: order.append("late"))

        assert order == (["other", "of the other", "late"] if good else [])


async def test_a_result_that_nobody_can_await_is_no_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked() as link:

        async def handle(_params: Any, context: Context) -> Any:
            context.after_response(lambda: True)
            return {}

        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)
        await turns()

    assert caplog.text == ""


async def test_a_handler_knows_the_position_of_its_frame_among_all_that_came() -> None:
    """Malformed ones, faults, answers and updates count, and so does what waited for the handshake."""
    seen: list[tuple[str, int]] = []

    async def handle(_params: Any, context: Context) -> Any:
        seen.append((context.method, context.rx_seq))
        await turns(2)
        return {}

    async with linked(initialized=False, frame_bytes=1000) as link:
        for method in ("initialize", "x/y"):
            link.side.serve(method, handle)
        link.side.hear("x/n", handle)
        link.side.hear("x/now", at_once=lambda _p, c: seen.append((c.method, c.rx_seq)))
        link.peer.send(
            b'{"id":1,"method":"initialize"}',  # 1
            b'{"id":2,"method":"x/y"}',  # 2, waits
            b"{",  # 3
            b'{"id":77,"result":1}',  # 4
            b'{"t":"%s"}' % (b"x" * 1000),  # 5
            b'{"method":"x/n"}',  # 6, waits
        )
        await link.peer.answer_to(2)
        link.peer.send(b'{"id":3,"method":"x/y"}')
        await link.peer.answer_to(3)
        link.peer.send(b"[]", b'{"method":"x/now"}')
        await turns()

        assert sorted(seen, key=lambda entry: entry[1]) == [
            ("initialize", 1),
            ("x/y", 2),
            ("x/n", 6),
            ("x/y", 7),
            ("x/now", 9),
        ]
        assert link.connection.received == 9


async def test_updates_count_too() -> None:
    async with linked("client") as link:
        seen: list[int] = []

        async def handle(_params: Any, context: Context) -> Any:
            seen.append(context.rx_seq)
            return {}

        link.side.serve("x/y", handle)
        update = b'{"method":"session/update","params":{"sessionId":"s","update":{}}}'
        link.peer.send(update, update, b'{"id":1,"method":"x/y"}', update)
        await link.peer.answer_to(1)

        assert seen == [3]
        assert link.connection.received == 4
