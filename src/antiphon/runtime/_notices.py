"""Notifications that have a handler: one at a time, in wire order, in one task.

Requests and updates do not wait for them. Responsible for the bounded queue in front of the handlers:
when it is full, reading stops, so that the peer feels it; when the handler at its head then makes no
progress within `Limits.notification_timeout`, reading goes on and what comes is let go, with an event
for each. Leaves to the `Router` which handler that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import ENDING
from antiphon.runtime._context import Context
from antiphon.runtime._telemetry import shown_text

if TYPE_CHECKING:
    from antiphon.runtime._connection import Connection

__all__ = ["Notices"]

log = logging.getLogger("antiphon.connection")


class _Notice(msgspec.Struct):
    """A notification that waits for its handler."""

    handle: Callable[[Any, Context], Awaitable[None]]
    params: Any
    context: Context
    size: int


class Notices:
    """The notifications of one connection that wait for their handlers, the one being handled too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._limits = connection.limits
        self._waiting: list[_Notice] = []
        self._count = 0
        self._bytes = 0
        self._handled = 0  # ever
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # while reading waits for room here
        #: Its handler made no progress while reading waited for it.
        self._stuck = False

    def put(
        self,
        handle: Callable[[Any, Any], Awaitable[None]],
        params: Any,
        context: Context,
        size: int,
    ) -> None:
        """Let one wait for its turn, or let it go if there is no room and will be none."""
        if self._hopeless:
            limits = self._limits
            self._connection.emit(
                "notification_shed",
                method=shown_text(context.method),
                waiting=self._count,
                limit=limits.queue_notifications
                if self._count >= limits.queue_notifications
                else limits.notification_bytes,
            )
            return
        self._waiting.append(_Notice(handle, params, context, size))
        self._count += 1
        self._bytes += size
        if self._timer is None and self._full(1) and not self._stuck:
            self._wait_for_progress()
        if self._task is None:
            self._task = self._connection.create_task(self._handle())

    def _full(self, times: int) -> bool:
        limits = self._limits
        return (
            self._count >= times * limits.queue_notifications
            or self._bytes >= times * limits.notification_bytes
        )

    @property
    def _hopeless(self) -> bool:
        # While somebody waits for an answer reading goes on, so then the queue has a hard end.
        return self._full(1) and (
            self._stuck or (self._connection.blocking_calls > 0 and self._full(2))
        )

    async def _handle(self) -> None:
        task = asyncio.current_task()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                for notice in batch:
                    try:
                        await notice.handle(notice.params, notice.context)
                    except asyncio.CancelledError:
                        if task is None or task.cancelling():
                            raise
                        # Something the handler waited for was cancelled: its affair alone.
                        log.info("the handler of %s was cancelled", notice.context.method)
                    except ENDING:
                        raise
                    except BaseException as error:  # noqa: BLE001  (the boundary)
                        self._connection.handler_failed(
                            "notification", notice.context.method, error
                        )
                    self._done(notice)
        finally:
            self._task = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    # ------------------------------------------------------------------ when it is full

    def _done(self, notice: _Notice) -> None:
        self._handled += 1
        self._count -= 1
        self._bytes -= notice.size
        if self._timer is None and not self._stuck:
            return
        if not self._full(1):
            self._stuck = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._pause(wanted=False)
        elif self._stuck:
            self._stuck = False
            self._wait_for_progress()

    def _wait_for_progress(self) -> None:
        self._timer = self._loop.call_later(
            self._limits.notification_timeout, self._looked_at, self._handled
        )
        self._pause(wanted=True)

    def _looked_at(self, handled: int) -> None:
        if self._handled != handled:
            self._wait_for_progress()
            return
        self._timer = None
        self._stuck = True
        self._pause(wanted=False)

    def _pause(self, *, wanted: bool) -> None:
        """Have reading stopped on our account, or not."""
        self._connection.notices_full = wanted
        self._connection.check_budget()
