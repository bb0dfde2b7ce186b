"""Deferred replies: whoever answers, however it ends, each id gets exactly one response."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.link import Link, bounded, good, linked, turns

import antiphon
from antiphon._errors import InvalidParams, LocalProtocolError, RequestError
from antiphon.runtime import DEFERRED, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

CANCELLED = {"code": -32800, "message": "Request cancelled"}
INTERNAL = {"code": -32603, "message": "Internal error"}


class Desk:
    """A handler that defers every request and keeps the replies."""

    def __init__(self, adopter: Callable[[], asyncio.Task[Any]] | None = None) -> None:
        self.replies: list[Reply] = []
        self.contexts: list[Any] = []
        self._adopter = adopter
        self._came = asyncio.Event()

    async def __call__(self, params: Any, context: Any) -> Any:
        adopter = None if self._adopter is None else self._adopter()
        self.replies.append(context.defer(adopter))
        self.contexts.append(context)
        self._came.set()
        return DEFERRED

    async def reply(self) -> Reply:
        """The first reply, once there is one; its handler has returned then."""
        await bounded(self._came.wait())
        await turns()
        return self.replies[0]


async def exchanged(link: Link) -> None:
    """Whatever was on its way in both directions has arrived."""
    link.side.serve("test/good", good)
    link.peer.call("exchanged", "test/good")
    await link.peer.answer_to("exchanged")
    await turns()


def cancel(link: Link, id_: Any) -> None:
    link.peer.tell("$/cancel_request", {"requestId": id_})


async def test_a_deferred_request_is_answered_later_and_blocks_nobody() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        await exchanged(link)
        assert link.peer.responses(1) == []
        assert repr(reply) == "<Reply to x/y, open>"

        assert reply.send({"late": True})

        assert (await link.peer.answer_to(1))["result"] == {"late": True}
        assert repr(reply) == "<Reply to x/y, over>"
        assert not link.connection.protocol.requests
        assert not link.connection.tasks


async def test_a_deferred_request_may_be_refused() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")

        assert (await desk.reply()).fail(InvalidParams({"why": "no"}))

        assert (await link.peer.answer_to(1))["error"] == {
            "code": -32602,
            "message": "Invalid params",
            "data": {"why": "no"},
        }


async def test_what_an_adopter_fails_with_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")

        assert (await desk.reply()).fail(ValueError("secret"))

        assert (await link.peer.answer_to(1))["error"] == INTERNAL
    assert "secret" in caplog.text


async def test_a_reply_may_be_sent_before_the_handler_returns() -> None:
    async def handle(params: Any, context: Any) -> Any:
        assert context.defer().send(7)
        return DEFERRED

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["result"] == 7


async def test_a_handler_that_deferred_may_return_nothing() -> None:
    replies: list[Reply] = []

    async def handle(params: Any, context: Any) -> Any:
        replies.append(context.defer())

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await exchanged(link)

        assert replies[0].send(7)

        assert (await link.peer.answer_to(1))["result"] == 7


async def test_what_was_sent_before_the_reply_is_on_the_wire_before_it_and_hooks_after() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        desk.contexts[0].after_response(lambda: link.connection.notify("x/after", None))

        link.connection.notify("x/before", None)
        reply.send(7)

        messages = await link.peer.messages(3)
        assert [m.get("method", "response") for m in messages] == [
            "x/before",
            "response",
            "x/after",
        ]


# --- what a handler may not do -------------------------------------------------------------------


async def test_deferred_without_a_reply_is_an_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(params: Any, context: Any) -> Any:
        return antiphon.DEFERRED

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"] == INTERNAL
    assert "without ctx.defer()" in caplog.text


async def test_a_handler_that_defers_and_returns_a_result_is_an_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replies: list[Reply] = []

    async def handle(params: Any, context: Any) -> Any:
        replies.append(context.defer())
        return {}

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"] == INTERNAL
        assert not replies[0].send(7)
        assert replies[0].cancelled
        await exchanged(link)
        assert len(link.peer.responses(1)) == 1
    assert "instead of DEFERRED" in caplog.text


async def test_a_handler_that_defers_and_raises_answers_with_that_error() -> None:
    replies: list[Reply] = []

    async def handle(params: Any, context: Any) -> Any:
        replies.append(context.defer())
        raise RequestError(7, "changed my mind")

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"] == {"code": 7, "message": "changed my mind"}
        assert not replies[0].send(7)
        await exchanged(link)
        assert len(link.peer.responses(1)) == 1


async def test_a_request_is_deferred_once_and_a_notification_not_at_all() -> None:
    refused: list[str] = []
    replies: list[Reply] = []

    async def handle(params: Any, context: Any) -> Any:
        if context.call is not None:
            replies.append(context.defer())
        with pytest.raises(LocalProtocolError) as caught:
            context.defer()
        refused.append(str(caught.value))
        return DEFERRED

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.side.hear("x/n", handle)
        link.peer.call(1, "x/y")
        link.peer.tell("x/n")
        await exchanged(link)

        assert refused == ["x/y is deferred already", "x/n has no answer"]
        replies[0].send()


@pytest.mark.alarms("dup_reply")
async def test_a_second_reply_is_told_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    events: list[antiphon.TelemetryEvent] = []
    async with linked(telemetry=events.append) as link:
        link.side.serve("x/y", desk)
        link.peer.call("é", "x/y")
        reply = await desk.reply()

        assert reply.send(1)
        assert not reply.send(2)
        assert not reply.fail(ValueError())

        assert (await link.peer.answer_to("é"))["result"] == 1
        await exchanged(link)
        assert len(link.peer.responses("é")) == 1
        assert [event.facts for event in events if event.name == "dup_reply"] == [
            {"id": '"\\u00e9"', "method": "x/y"}
        ] * 2
    assert {r.levelno for r in caplog.records if "second time" in r.message} == {logging.ERROR}


async def test_a_late_result_that_is_no_json_is_an_internal_error() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")

        assert (await desk.reply()).send(object())

        assert (await link.peer.answer_to(1))["error"] == INTERNAL


# --- nobody will reply ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["returns", "raises", "is cancelled"])
async def test_an_adopter_that_ends_leaves_no_request_unanswered(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    async def adopt() -> None:
        await gate.wait()
        if end == "raises":
            raise ValueError("adopter trouble")

    adopter = asyncio.create_task(adopt())
    desk = Desk(lambda: adopter)
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()

        if end == "is cancelled":
            adopter.cancel()
        gate.set()

        assert (await link.peer.answer_to(1))["error"] == INTERNAL
        assert not reply.send(7)
        with suppress(ValueError, asyncio.CancelledError):
            await adopter
    assert "the task that was to reply has ended" in caplog.text
    assert ("adopter trouble" in caplog.text) == (end == "raises")


async def test_an_adopter_that_had_ended_before_is_none() -> None:
    adopter = asyncio.create_task(turns())
    await adopter
    desk = Desk(lambda: adopter)
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["error"] == INTERNAL


async def test_an_adopter_gathers_nothing_of_what_was_answered() -> None:
    """One worker for all deferred requests of a programme's life must not grow with each."""
    watched: list[Any] = []

    class Watched(asyncio.Task[Any]):
        def add_done_callback(self, fn: Any, /, **options: Any) -> None:
            watched.append(fn)
            super().add_done_callback(fn, **options)

        def remove_done_callback(self, fn: Any, /) -> int:
            watched.remove(fn)
            return super().remove_done_callback(fn)

    adopter: asyncio.Task[Any] = Watched(asyncio.Event().wait())
    desk = Desk(lambda: adopter)
    async with linked() as link:
        link.side.serve("x/y", desk)
        for number in range(3):
            link.peer.call(number, "x/y")
        await exchanged(link)
        assert len(watched) == 3
        desk.replies[0].send(1)
        cancel(link, 1)
        desk.replies.pop()  # thrown away
        await turns()
        gc.collect()
        for number in range(3):
            await link.peer.answer_to(number)
        await turns()
        assert watched == []

        link.peer.call(3, "x/y")
        await exchanged(link)
        assert len(watched) == 1
    await turns()
    assert watched == []
    adopter.cancel()
    with suppress(asyncio.CancelledError):
        await adopter


@pytest.mark.parametrize("well", [True, False])
async def test_what_is_answered_already_cannot_be_deferred(well: bool) -> None:
    contexts: list[Any] = []

    async def handle(params: Any, context: Any) -> Any:
        contexts.append(context)
        if not well:
            raise InvalidParams("no")

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await link.peer.answer_to(1)

        with pytest.raises(LocalProtocolError, match="x/y is answered already"):
            contexts[0].defer()


async def test_who_listens_may_answer_in_one_expression(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        reply.on_cancel(lambda: reply.fail(InvalidParams("stopped")))
        cancel(link, 1)

        assert (await link.peer.answer_to(1))["error"]["data"] == "stopped"
        await turns()
    assert caplog.text == ""


async def test_an_adopter_may_reply_and_end() -> None:
    async def adopt(context: Any, reply: list[Reply]) -> None:
        reply[0].send("adopted")

    async def handle(params: Any, context: Any) -> Any:
        reply: list[Reply] = []
        task = link.connection.create_task(adopt(context, reply))
        reply.append(context.defer(task))
        return DEFERRED

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")

        assert (await link.peer.answer_to(1))["result"] == "adopted"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_reply_that_is_thrown_away_leaves_no_request_unanswered(
    elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        await desk.reply()

        def forget() -> None:
            desk.replies.clear()
            gc.collect()

        if elsewhere:
            thread = threading.Thread(target=forget)
            thread.start()
            await asyncio.to_thread(thread.join)
        else:
            forget()

        assert (await link.peer.answer_to(1))["error"] == INTERNAL
    assert "its Reply was thrown away" in caplog.text


def test_a_reply_that_outlives_its_loop_is_thrown_away_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desks: list[Desk] = []

    async def main() -> None:
        desks.append(desk := Desk())
        async with linked() as link:
            link.side.serve("x/y", desk)
            link.peer.call(1, "x/y")
            await desk.reply()

    asyncio.run(main())
    assert not desks[0].replies[0].send(1)
    desks.clear()
    gc.collect()

    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# --- cancelled by the peer -----------------------------------------------------------------------


async def test_a_cancelled_request_with_nobody_listening_is_answered_at_once() -> None:
    desk = Desk()
    events: list[antiphon.TelemetryEvent] = []
    async with linked(telemetry=events.append) as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        assert not reply.cancelled

        cancel(link, 1)

        assert (await link.peer.answer_to(1))["error"] == CANCELLED
        assert reply.cancelled
        assert not reply.send("too late")
        assert "dup_reply" not in {event.name for event in events}
        await exchanged(link)
        assert len(link.peer.responses(1)) == 1


@pytest.mark.parametrize("answer", ["result", "error"])
async def test_who_listens_is_told_of_a_cancellation_and_answers(answer: str) -> None:
    desk = Desk()
    told: list[str] = []
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()

        def stop() -> None:
            told.append("stop")
            if answer == "result":
                assert reply.send("so far")
            else:
                assert reply.fail(RequestError(-32800, "stopped"))

        reply.on_cancel(stop)
        cancel(link, 1)
        cancel(link, 1)

        response = await link.peer.answer_to(1)
        assert told == ["stop"]
        assert (response.get("result") == "so far") == (answer == "result")
        assert reply.cancelled


async def test_who_waits_for_a_cancellation_listens() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        waiting = asyncio.create_task(reply.wait_cancelled())
        await turns()

        cancel(link, 1)
        await bounded(waiting)
        await exchanged(link)
        assert link.peer.responses(1) == []
        await bounded(reply.wait_cancelled())  # it is

        assert reply.send("after all")
        assert (await link.peer.answer_to(1))["result"] == "after all"


async def test_who_has_stopped_waiting_does_not_listen() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        waiting = asyncio.create_task(reply.wait_cancelled())
        await turns()
        waiting.cancel()
        await turns()

        cancel(link, 1)

        assert (await link.peer.answer_to(1))["error"] == CANCELLED


async def test_the_wait_for_a_cancellation_ends_with_the_answer() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        waiting = asyncio.create_task(reply.wait_cancelled())
        await turns()

        reply.send(7)

        await bounded(waiting)
        await bounded(reply.wait_cancelled())
        assert not reply.cancelled


async def test_a_listener_that_comes_late_is_told_at_once_and_after_the_answer_never() -> None:
    desk = Desk()
    told: list[str] = []
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        link.peer.call(2, "x/y")
        await exchanged(link)
        one, two = desk.replies
        cancel(link, 1)
        await link.peer.answer_to(1)

        one.on_cancel(lambda: told.append("one"))
        assert told == ["one"]

        two.send(7)
        two.on_cancel(lambda: told.append("two"))
        cancel(link, 2)
        assert (await link.peer.answer_to(2))["result"] == 7
        await exchanged(link)
        assert told == ["one"]


async def test_a_cancellation_behind_the_reply_does_not_take_it_back() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()

        assert reply.send(7)
        link.connection.frames_received([b'{"method":"$/cancel_request","params":{"requestId":1}}'])

        assert (await link.peer.answer_to(1))["result"] == 7


async def test_a_cancellation_ends_a_handler_that_has_deferred_and_goes_on() -> None:
    replies: list[Reply] = []

    async def handle(params: Any, context: Any) -> Any:
        replies.append(context.defer())
        await asyncio.Event().wait()

    async with linked() as link:
        link.side.serve("x/y", handle)
        link.peer.call(1, "x/y")
        await exchanged(link)

        cancel(link, 1)

        assert (await link.peer.answer_to(1))["error"] == CANCELLED
        assert not replies[0].send(7)


async def test_an_adopter_that_ends_after_a_cancellation_leaves_it_answered_as_cancelled() -> None:
    gate = asyncio.Event()
    adopter = asyncio.create_task(gate.wait())
    desk = Desk(lambda: adopter)
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        (await desk.reply()).on_cancel(lambda: None)

        cancel(link, 1)
        await exchanged(link)
        assert link.peer.responses(1) == []
        gate.set()

        assert (await link.peer.answer_to(1))["error"] == CANCELLED
        await adopter


async def test_a_listener_that_fails_is_logged_and_the_next_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    told: list[str] = []

    def trouble() -> None:
        raise ValueError("listener trouble")

    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        reply.on_cancel(trouble)
        reply.on_cancel(lambda: told.append("next"))

        cancel(link, 1)
        await exchanged(link)

        assert told == ["next"]
        reply.send(7)
    assert "listener trouble" in caplog.text
    assert "what was to run at a cancellation failed" in caplog.text


async def test_an_answer_in_the_handlers_place_tells_who_listens() -> None:
    desk = Desk()
    told: list[str] = []
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        reply.on_cancel(lambda: told.append("told"))

        assert link.connection.answer(desk.contexts[0].call, b'"in its place"')

        assert (await link.peer.answer_to(1))["result"] == "in its place"
        await turns()
        assert told == ["told"]
        assert reply.cancelled
        assert not reply.send(7)


# --- the end of the connection -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["we close", "they close"])
async def test_the_end_of_the_connection_releases_in_silence_and_tells_who_listens(
    how: str,
) -> None:
    desk = Desk()
    told: list[str] = []
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()
        reply.on_cancel(lambda: told.append("told"))
        waiting = asyncio.create_task(reply.wait_cancelled())
        await turns()

        if how == "we close":
            await bounded(link.connection.aclose())
        else:
            await link.peer.transport.aclose()
            await bounded(link.connection.wait_closed())

        await bounded(waiting)
        assert told == ["told"]
        assert reply.cancelled
        assert not reply.send(7)
        assert link.peer.responses(1) == []
        assert not link.connection.tasks


async def test_at_the_end_of_input_a_deferred_request_may_still_be_answered() -> None:
    desk = Desk()
    async with linked() as link:
        link.side.serve("x/y", desk)
        link.peer.call(1, "x/y")
        reply = await desk.reply()

        link.connection.input_ended()
        await turns()
        assert reply.send("in time")

        assert (await link.peer.answer_to(1))["result"] == "in time"
        await bounded(link.connection.wait_closed())
