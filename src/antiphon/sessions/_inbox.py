"""Ordered delivery of one session's updates at the client: the heart of DESIGN §4.

The reader calls `Inbox.put` for each update, in wire order. From there it goes into every consumer's
own queue: the open turn's (or, outside a turn, the session's backlog), every subscriber's, and the
observers'. The reader never waits and decodes nothing.

* Order and exactly-once (§4.1) hold because there is one producer and each queue is a list.
* The response barrier (§4.2) needs no waiting for queues: the reader has put everything before it sees
  the response. Observers have a mark instead: `settled(mark)` waits until they have seen that many.
* The budget (§4.4) is counted in frame bytes on the connection, added here and given back by whoever
  consumes or discards.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import TYPE_CHECKING

from antiphon._errors import ENDING
from antiphon.sessions._update import Label, Update

if TYPE_CHECKING:
    import msgspec

    from antiphon.runtime import Connection

__all__ = ["Inbox", "Observer", "Subscription", "UpdateQueue"]

log = logging.getLogger("antiphon.session")

Observer = Callable[[Update], Awaitable[None] | None]

#: The inboxes whose observer the running task is, or was started by: it must not wait for itself.
_observing: contextvars.ContextVar[tuple[Inbox, ...]] = contextvars.ContextVar(
    "antiphon_observing", default=()
)


class UpdateQueue:
    """Updates between the reader and one consumer.

    The consumer swaps the whole list for an empty one and takes from its end after reversing it: as
    fast as a deque, lets go of what was taken, and an idle queue costs next to nothing.
    """

    __slots__ = ("_batch", "_batch_bytes", "connection", "items", "retired", "size", "waiter")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.items: list[Update] = []
        self.size = 0
        #: Nothing more will be put in.
        self.retired = False
        self.waiter: asyncio.Future[None] | None = None
        self._batch: list[Update] = []
        self._batch_bytes = 0

    def put(self, update: Update, size: int) -> None:
        """Add one; called by the reader alone."""
        self.items.append(update)
        self.size += size
        self.connection.queued_bytes += size
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def wake(self) -> None:
        """Let the consumer look again although nothing was added."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> Update | None:
        """The next update, or None if none is here now."""
        batch = self._batch
        if batch:
            return batch.pop()
        if self._batch_bytes:
            # Given back a batch at a time: what the consumer still has in hand counts as queued.
            self.connection.release(self._batch_bytes)
            self._batch_bytes = 0
        if not self.items:
            return None
        batch, self.items = self.items, []
        self._batch_bytes, self.size = self.size, 0
        batch.reverse()
        self._batch = batch
        return batch.pop()

    async def wait(self) -> None:
        """Wait for `put` or `wake`. One consumer at a time."""
        if self.waiter is not None and not self.waiter.done():
            msg = "two tasks iterate over the same updates"
            raise RuntimeError(msg)
        waiter = self.waiter = self.connection.create_future()
        try:
            await waiter
        finally:
            if self.waiter is waiter:
                self.waiter = None

    def discard(self) -> int:
        """Throw away what waits and give its budget back; returns how many updates that were."""
        count = len(self.items) + len(self._batch)
        if self.size or self._batch_bytes:
            self.connection.release(self.size + self._batch_bytes)
        self.items, self._batch = [], []
        self.size = self._batch_bytes = 0
        return count

    def __len__(self) -> int:
        return len(self.items) + len(self._batch)


class Sink(UpdateQueue):
    """Stands where a queue was whose consumer has left: counts what comes and keeps nothing."""

    __slots__ = ("dropped",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.dropped = 0

    def put(self, update: Update, size: int) -> None:
        self.dropped += 1


class Subscription(AsyncIterator[Update]):
    """An independent view of a session's updates; see `Session.updates`.

    One that nobody refers to any more, as after a `break`, is closed.
    """

    def __init__(self, inbox: Inbox, queue: UpdateQueue) -> None:
        self._inbox = inbox
        self._queue = queue
        self._closed = False

    def __del__(self) -> None:
        if self._closed:
            return
        inbox, queue = self._inbox, self._queue
        # Not here: this may be another thread, or the middle of a delivery.
        with suppress(RuntimeError):  # the loop is closed
            inbox.connection.call_soon_from_anywhere(lambda: inbox.forget(queue))

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Update:
        queue = self._queue
        while True:
            update = queue.take()
            if update is not None:
                return update
            if self._inbox.ended or queue.retired:
                self.close()
                raise StopAsyncIteration
            await queue.wait()

    def close(self) -> None:
        """Stop listening; what was not taken is let go. Idempotent."""
        self._closed = True
        self._inbox.forget(self._queue)

    async def aclose(self) -> None:
        """The same, so that `contextlib.aclosing` can be used."""
        self.close()


class Inbox:
    """One session's updates on one connection."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.connection = connection
        self.session_id = session_id
        #: What the reader writes on each update.
        self.label: Label = "session"
        #: Where an open turn takes its updates from.
        self.turn: UpdateQueue | None = None
        #: Updates outside a turn that nobody has asked for yet.
        self.backlog = UpdateQueue(connection)
        #: How many updates have arrived.
        self.received = 0
        #: The connection is gone: nothing more will come.
        self.ended = False
        self._subscribers: list[UpdateQueue] = []
        self._replays: list[UpdateQueue] = []  # those of them that end with the load
        # Each with the number of the first update that is for it.
        self._observers: list[tuple[Observer, int]] = []
        self._observed: UpdateQueue | None = None
        self._seen = 0
        self._settling: list[tuple[int, asyncio.Future[None]]] = []

    # -------------------------------------------------------------- the reader's side

    def put(self, raw: msgspec.Raw, frame: bytes) -> None:
        """Deliver one update to every consumer's queue."""
        self.received += 1
        update = Update(self.session_id, self.label, raw, frame)
        size = len(frame)
        turn = self.turn
        if turn is not None:
            turn.put(update, size)
        elif not self._subscribers and not self._observers:
            self.backlog.put(update, size)
        if self._subscribers:
            for queue in self._subscribers:
                queue.put(update, size)
        if self._observed is not None:
            self._observed.put(update, size)

    def end(self) -> None:
        """The connection is gone: let consumers come to the end of what they have."""
        self.ended = True
        for queue in self._subscribers:
            queue.wake()
        if self._observed is not None:
            self._observed.wake()

    def let_go(self) -> None:
        """The session is being closed: nobody wants its updates, so that reading can go on.

        What waits is let go with a log line, and what still comes outside a turn is not kept.
        Observers go on seeing everything, and an open turn keeps its updates.
        """
        for queue in (self.backlog, *self._subscribers):
            self.forget(queue)
        self.backlog = Sink(self.connection)

    def keep(self) -> None:
        """Undo `let_go`: the session was not closed after all. Idempotent."""
        if isinstance(self.backlog, Sink):
            self.backlog = UpdateQueue(self.connection)

    # -------------------------------------------------------------- subscribers

    def subscribe(self, *, replay: bool = False) -> Subscription:
        """A new consumer; the first one also gets the backlog.

        A `replay` gets only the history in it, and ends with the load.
        """
        queue = UpdateQueue(self.connection)
        if not isinstance(self.backlog, Sink):  # which keeps nothing, and would go on doing so
            queue, self.backlog = self.backlog, queue
        if replay:
            queue, others = UpdateQueue(self.connection), queue
            while (update := others.take()) is not None:
                chosen = queue if update.label == "replay" else self.backlog
                chosen.put(update, len(update.frame))
            if self.label != "replay":
                queue.retired = True
                return Subscription(self, queue)
            self._replays.append(queue)
        self._subscribers.append(queue)
        return Subscription(self, queue)

    def retire(self, queue: UpdateQueue) -> None:
        """Put nothing more into a consumer's queue; it may still take what is there. Idempotent."""
        queue.retired = True
        if queue in self._subscribers:
            self._subscribers.remove(queue)
        queue.wake()

    def forget(self, queue: UpdateQueue) -> None:
        """Retire a consumer's queue and let go of what is in it, with a log line. Idempotent."""
        self.retire(queue)
        dropped = queue.discard()
        if dropped:
            log.info("session %s: %d updates were not taken", self.session_id, dropped)

    def load_ended(self) -> None:
        """The history is complete, in the reader: what comes now is no replay."""
        if self.label == "replay":
            self.label = "session"
        replays, self._replays = self._replays, []
        for queue in replays:
            self.retire(queue)

    # -------------------------------------------------------------- observers

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` for each update from now on, in order; returns what ends that."""
        entry = (observer, 0 if self._observed is None else self.received)
        self._observers.append(entry)
        if self._observed is None and not self.ended:
            self._observed = queue = UpdateQueue(self.connection)
            self._seen = self.received
            # What waited for the first consumer is for it.
            while (update := self.backlog.take()) is not None:
                queue.put(update, len(update.frame))
                self._seen -= 1
            self.connection.create_task(self._show(queue), delivery=True)

        def stop() -> None:
            if entry in self._observers:
                self._observers.remove(entry)

        return stop

    async def _show(self, queue: UpdateQueue) -> None:
        """Hand updates to the observers, one at a time."""
        _observing.set((*_observing.get(), self))
        task = asyncio.current_task()
        try:
            while True:
                update = queue.take()
                if update is None:
                    if self.ended:
                        return
                    await queue.wait()
                    continue
                for observer, first in tuple(self._observers):
                    if first > self._seen:  # it joined when this update was here already
                        continue
                    try:
                        result = observer(update)
                        if isawaitable(result):
                            await result
                    except asyncio.CancelledError:
                        if task is None or task.cancelling():
                            raise
                        # Something the observer waited for was cancelled: its affair alone.
                        log.info("an observer of session %s was cancelled", self.session_id)
                    except ENDING:
                        raise
                    except BaseException:
                        log.exception("an observer of session %s failed", self.session_id)
                self._seen += 1
                self._settle()
        finally:
            queue.discard()
            self._observed = None
            self._seen = self.received
            self._settle()

    def _settle(self) -> None:
        if not self._settling:
            return
        waiting: list[tuple[int, asyncio.Future[None]]] = []
        for mark, future in self._settling:
            if mark > self._seen:
                waiting.append((mark, future))
            elif not future.done():
                future.set_result(None)
        self._settling = waiting

    @property
    def observed(self) -> bool:
        """Whether anybody observes; if not, `settled` has nothing to wait for."""
        return self._observed is not None

    async def settled(self, mark: int) -> None:
        """Wait until the observers have returned from the first `mark` updates (DESIGN §4.2).

        Returns at once in an observer of this session and in tasks it started: they would wait for
        themselves.
        """
        if self._observed is None or self._seen >= mark or self in _observing.get():
            return
        future = self.connection.create_future()
        self._settling.append((mark, future))
        await future
