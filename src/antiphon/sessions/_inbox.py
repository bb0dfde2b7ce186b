"""Ordered delivery of one session's updates at the client: the heart of DESIGN §4.

The reader calls `Inbox.put` for each update, in wire order. From there it goes into every consumer's
own queue: the open turn's (or, outside a turn, the session's backlog), every subscriber's, and the
observers'. The reader never waits and decodes nothing.

* Order and exactly-once (§4.1) hold because there is one producer and each queue is a list. That it
  is so is checked where a turn, a replay or a subscription ends: what passed through its queue against
  what arrived (`DeliveryGap`). Counted by the batch, so that an update costs nothing more.
* The response barrier (§4.2) needs no waiting for queues: the reader has put everything before it sees
  the response. Observers have a mark instead: `settled(mark)` waits until they have seen that many.
* The budget (§4.4) is counted in frame bytes and updates on the connection, added here and given back
  by whoever consumes or discards. A session's own share has no effect but a report (`look`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from inspect import isawaitable
from itertools import repeat
from typing import TYPE_CHECKING, Any

from antiphon._errors import ENDING, DeliveryGap
from antiphon.sessions._update import Label, Update

if TYPE_CHECKING:
    import msgspec

    from antiphon.runtime import Connection
    from antiphon.sessions._view import SessionView

__all__ = ["Inbox", "Observer", "Sink", "Subscription", "TracedQueue", "UpdateQueue"]

log = logging.getLogger("antiphon.session")

#: Of what others have taken before the view is looked at, so much is kept for it in each session.
_EARLY_UPDATES = 64
_EARLY_BYTES = 1 << 16

#: What a queue has where nothing is, in which most stand most of the time; never changed.
_NONE: list[Update] = []

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

    __slots__ = (
        "_batch_bytes",
        "_batch_count",
        "batch",
        "connection",
        "cut",
        "error",
        "full",
        "items",
        "lost",
        "passed",
        "retired",
        "size",
        "until",
        "waiter",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.items: list[Update] = _NONE
        self.size = 0
        #: How many have left it: taken (a batch at a time) or discarded.
        self.passed = 0
        #: Nothing more will be put in, and how many the session had received when that was said.
        self.retired = False
        self.until = 0
        #: A turn's that was let go before its consumer had taken everything, and how much was in it.
        self.cut = False
        self.lost = 0
        #: The session that is marked as full because of what waits here and in its other queues.
        self.full: Inbox | None = None
        self.waiter: asyncio.Future[None] | None = None
        #: Makes what is raised behind the last that is in it, once nothing more will be put in.
        self.error: Callable[[], Exception] | None = None
        #: What was taken out of it together, in reverse order: its consumer may `pop` while there is any.
        self.batch: list[Update] = _NONE
        self._batch_bytes = 0
        self._batch_count = 0

    def put(self, update: Update, size: int) -> bool:
        """Add one; called by the reader alone. True if that has given it to all other consumers, too."""
        if self.items:
            self.items.append(update)
        else:
            self.items = [update]
        self.size += size
        connection = self.connection
        connection.queued_bytes += size
        connection.queued_updates += 1
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
        return False

    def put_all(self, updates: list[Update], size: int) -> None:
        """Add several that came together, of `size` bytes in all; the same as `put` for each."""
        if self.items:
            self.items += updates
        else:
            self.items = updates.copy()  # the other consumers have theirs
        self.size += size
        connection = self.connection
        connection.queued_bytes += size
        connection.queued_updates += len(updates)
        if self.waiter is not None:
            self.wake()

    def wake(self) -> None:
        """Let the consumer look again although nothing was added."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> Update | None:
        """The next update, or None if none is here now."""
        batch = self.batch
        if batch:
            return batch.pop()
        if self._batch_count:
            # Given back a batch at a time: what the consumer still has in hand counts as queued.
            self.connection.release(self._batch_bytes, self._batch_count)
            self._batch_bytes = self._batch_count = 0
            if self.full is not None:
                self.full.look()
        if not self.items:
            return None
        batch = self.items
        self._batch_bytes, self.size = self.size, 0
        self._batch_count = count = len(batch)
        self.passed += count
        self.items = _NONE
        if count == 1:
            return batch.pop()
        batch.reverse()
        self.batch = batch
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
        left = len(self.items)
        count = left + len(self.batch)
        self.passed += left
        size, left = self.size + self._batch_bytes, left + self._batch_count
        self.items = self.batch = _NONE
        self.size = self._batch_bytes = self._batch_count = 0
        if left:
            self.connection.release(size, left)
        if self.full is not None:
            self.full.look()
        return count

    @property
    def held(self) -> tuple[int, int]:
        """What it takes of the budget: updates, and their frame bytes."""
        return len(self.items) + self._batch_count, self.size + self._batch_bytes

    def __len__(self) -> int:
        return len(self.items) + len(self.batch)


class TracedQueue(UpdateQueue):
    """A turn's queue that reports each update; used only where a telemetry hook is set.

    It does so once every consumer has the update: what a hook does about them, a new subscription for
    one, holds from the next on. Updates that come together are put into it one by one, by `Inbox.put_all`.
    """

    __slots__ = ("inbox", "ordinal", "turn")

    def __init__(self, inbox: Inbox, turn: int) -> None:
        super().__init__(inbox.connection)
        self.inbox = inbox
        self.turn = turn
        self.ordinal = 0

    def put(self, update: Update, size: int) -> bool:
        super().put(update, size)
        self.inbox.put_beside_turn(update, size)
        self.connection.emit(
            "delivery",
            session=self.inbox.session_id,
            turn=self.turn,
            decision="emit",
            ordinal=self.ordinal,
            buffered=len(self),
        )
        self.ordinal += 1
        return True


class Sink(UpdateQueue):
    """Stands where a queue was whose consumer has left: counts what comes and keeps nothing."""

    __slots__ = ("dropped",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.dropped = 0

    def put(self, update: Update, size: int) -> bool:
        self.dropped += 1
        return False

    def put_all(self, updates: list[Update], size: int) -> None:
        self.dropped += len(updates)


class _Folding(UpdateQueue):
    """Stands among the subscribers' queues: folds each update into a view, and keeps nothing."""

    __slots__ = ("view",)

    def __init__(self, connection: Connection, view: SessionView) -> None:
        super().__init__(connection)
        self.view = view

    def put(self, update: Update, size: int) -> bool:
        try:
            self.view.apply(update)
        except Exception:
            # The queues behind this one must not miss the update for it.
            log.exception("an update of session %s could not be folded", update.session_id)
        return False

    def put_all(self, updates: list[Update], size: int) -> None:
        for update in updates:
            self.put(update, 0)


class Subscription(AsyncIterator[Update]):
    """An independent view of a session's updates; see `Session.updates`.

    One that nobody refers to any more, as after a `break`, is closed.
    """

    def __init__(self, inbox: Inbox, queue: UpdateQueue) -> None:
        self._inbox = inbox
        self._queue = queue
        # What came before: the difference to what arrives until its end has to pass through.
        self._before = inbox.received - len(queue) - queue.passed
        self._closed = False

    def __del__(self) -> None:
        if self._closed:
            return
        inbox, queue = self._inbox, self._queue
        # Not here: this may be another thread, or the middle of a delivery.
        with suppress(RuntimeError):  # the loop is closed
            inbox.connection.call_soon_from_anywhere(lambda: inbox.forget(queue))

    def __repr__(self) -> str:
        over = self._inbox.ended or self._queue.retired
        state = "closed" if self._closed else "over" if over else "open"
        waiting = f"{len(self._queue)} waiting"
        return f"<Subscription to session {self._inbox.session_id!r}, {state}, {waiting}>"

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Update:
        queue = self._queue
        while True:
            update = queue.take()
            if update is not None:
                return update
            inbox = self._inbox
            if inbox.ended or queue.retired:
                closed = self._closed
                self._end()
                if not closed:
                    until = queue.until if queue.retired else inbox.received
                    inbox.check_delivery(queue.passed, until - self._before)
                if queue.error is not None:
                    raise queue.error()
                raise StopAsyncIteration
            await queue.wait()

    def close(self) -> None:
        """Stop listening; what was not taken is let go. Idempotent."""
        self._queue.error = None
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._inbox.forget(self._queue)

    async def aclose(self) -> None:
        """The same, so that `contextlib.aclosing` can be used."""
        self.close()


class Inbox:
    """One session's updates on one connection."""

    __slots__ = (
        "_awaiting",
        "_early",
        "_early_bytes",
        "_full",
        "_gone",
        "_left_over",
        "_let_go_sink",
        "_let_go_turn",
        "_observed",
        "_observers",
        "_replays",
        "_seen",
        "_settling",
        "_showing",
        "_subscribers",
        "backlog",
        "connection",
        "ended",
        "label",
        "received",
        "session_id",
        "turn",
        "view",
    )

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
        self._showing: asyncio.Task[None] | None = None
        self._seen = 0
        self._settling: list[tuple[int, asyncio.Future[None]]] = []
        # Sessions whose observers ours (or their children) wait for now.
        self._awaiting: list[Inbox] = []
        # What came outside of turns and was taken before anybody asked for the view: the agent's
        # commands, mode and title are announced once. None when that was too much.
        self._early: list[Update] | None = []
        self._early_bytes = 0
        #: The folded state, once somebody has asked for it.
        self.view: SessionView | None = None
        # The queue of a turn in which the session is being closed; and what stands in its place.
        self._let_go_turn: UpdateQueue | None = None
        self._let_go_sink: Sink | None = None
        # Queues that nothing more is put into, and that were not empty then.
        self._left_over: list[UpdateQueue] = []
        self._full = False
        #: The session is closed: it is not kept any more, whoever else wanted to close it and was refused.
        self._gone = False

    # -------------------------------------------------------------- the reader's side

    def put(self, raw: msgspec.Raw, frame: bytes) -> None:
        """Deliver one update to every consumer's queue."""
        self.received += 1
        update = Update(self.session_id, self.label, raw, frame)
        size = len(frame)
        turn = self.turn
        if turn is not None:
            if turn.put(update, size):
                return
        elif not self._subscribers and not self._observers:
            self.backlog.put(update, size)
        elif self._early is not None:
            self._keep_early(update, size)
        if self._subscribers:
            for queue in self._subscribers:
                queue.put(update, size)
        if self._observed is not None:
            self._observed.put(update, size)

    def put_beside_turn(self, update: Update, size: int) -> None:
        """Deliver an update of the open turn to all but that."""
        for queue in self._subscribers:
            queue.put(update, size)
        if self._observed is not None:
            self._observed.put(update, size)

    def put_all(self, raws: Sequence[msgspec.Raw], frames: Sequence[bytes]) -> None:
        """Deliver several updates that came together; the same as `put` for each."""
        if isinstance(self.turn, TracedQueue):
            # What is told of one may change who takes the next: a hook closes a subscription, say.
            for raw, frame in zip(raws, frames, strict=True):
                self.put(raw, frame)
            return
        self.received += len(raws)
        label: Any = self.label
        updates = list(map(Update, repeat(self.session_id), repeat(label), raws, frames))
        size = sum(map(len, frames))
        turn = self.turn
        if turn is not None:
            turn.put_all(updates, size)
        elif not self._subscribers and not self._observers:
            self.backlog.put_all(updates, size)
        else:
            for update in updates:
                self._keep_early(update, len(update.frame))
        for queue in self._subscribers:
            queue.put_all(updates, size)
        if self._observed is not None:
            self._observed.put_all(updates, size)

    def put_as(
        self, raw: msgspec.Raw, frame: bytes, label: Label, turn: UpdateQueue | None
    ) -> None:
        """Deliver one update under another label than is set, to another turn's queue or none."""
        before = self.label, self.turn
        self.label, self.turn = label, turn
        try:
            self.put(raw, frame)
        finally:
            self.label, self.turn = before

    def _keep_early(self, update: Update, size: int) -> None:
        """Another has this update; the view may want it as well."""
        if self._early is None:
            return
        self._early.append(update)
        self._early_bytes += size
        if len(self._early) > _EARLY_UPDATES or self._early_bytes > _EARLY_BYTES:
            self._early = None

    def _keep_backlog_early(self, taken: UpdateQueue) -> None:
        """Another takes the backlog, now `taken`."""
        for update in taken.items:
            if self._early is not None and update not in self._early:
                self._keep_early(update, len(update.frame))

    def end(self) -> None:
        """The connection is gone: let consumers come to the end of what they have."""
        self.ended = True
        for queue in self._subscribers:
            queue.wake()
        if self._observed is not None:
            self._observed.wake()

    def fail_subscribers(self, error: Callable[[], Exception]) -> None:
        """Nothing more will come: subscriptions raise what it makes, behind what is there already."""
        for queue in [q for q in self._subscribers if not isinstance(q, _Folding)]:
            queue.error = error
            self.retire(queue)
        self._replays.clear()

    # -------------------------------------------------------------- from one link to another

    def held_back(self) -> asyncio.Task[Any] | None:
        """The link is gone, and another will come: the task that shows updates outlives the first."""
        showing = self._showing
        return None if showing is None or showing.done() else showing

    def move(self, connection: Connection) -> None:
        """Deliver for another connection from now on, with all that waits."""
        before = self.connection
        queues = [*self._queues(), self._let_go_turn]
        for queue in {id(queue): queue for queue in queues if queue is not None}.values():
            updates, size = queue.held
            queue.connection = connection
            connection.queued_bytes += size
            connection.queued_updates += updates
            before.release(size, updates)
        self.connection = connection
        self.ended = False
        showing = self.held_back()
        if showing is not None:
            before.disown_task(showing)
            connection.own_task(showing)
        elif self._observers:
            self._observed = queue = UpdateQueue(connection)
            self._seen = self.received
            self._showing = connection.create_task(self._show(queue), delivery=True)

    def let_go(self, *, for_good: bool = False) -> None:
        """The session is being closed: nobody wants its updates, so that reading can go on.

        What waits is let go with an event, and what still comes outside a turn is not kept.
        Observers and the view go on seeing everything. An open turn keeps its updates as long as the
        budget lasts: it may be iterated to its end. With the budget spent they are let go, too, and the
        turn ends with `DeliveryGap`. One that has ended is its holder's.

        `for_good`: it is closed, and `keep` undoes nothing any more.
        """
        self._gone |= for_good
        replays = [queue for queue in self._left_over if queue.retired]
        for queue in (self.backlog, *self._subscribers, *replays):
            if not isinstance(queue, _Folding):
                self.forget(queue)
        self.backlog = Sink(self.connection)
        turn = self.turn
        if turn is not None and not isinstance(turn, Sink):
            self._let_go_turn = turn
            self._let_turn_go(turn)

    def _let_turn_go(self, turn: UpdateQueue) -> None:
        """The turn of a session that is being closed shall not keep others from being read."""
        if self.connection.budget_spent:
            self.turn = self._let_go_sink = Sink(self.connection)
            turn.cut = True
            turn.lost += len(turn)
            # Not retired: if the session is not closed after all, the turn goes on with it.
            self.report(turn.discard())

    def keep(self) -> None:
        """Undo `let_go`: the session was not closed after all. Idempotent."""
        if self._gone:
            return
        if isinstance(self.backlog, Sink):
            self.backlog = UpdateQueue(self.connection)
        turn, self._let_go_turn = self._let_go_turn, None
        sink, self._let_go_sink = self._let_go_sink, None
        # It may have ended meanwhile, and another have begun.
        if sink is not None and self.turn is sink:
            self.report(sink.dropped)
            self.turn = turn

    def leave(self, turn: UpdateQueue) -> None:
        """The open turn's consumer has left: what still comes for it is counted, and not kept."""
        if self.turn is turn:
            self.turn = Sink(self.connection)
        if self._let_go_turn is turn:  # nobody wants it back if the session is not closed after all
            self._let_go_turn = self._let_go_sink = None
        self.report(turn.discard())

    def turn_ended(self) -> UpdateQueue | None:
        """What comes now belongs to no turn; returns where its updates went."""
        queue, self.turn = self.turn, None
        self.label = "session"
        if queue is not None:
            if self._left_over or queue.held[0]:
                self._leave_over(queue)
            if isinstance(queue, Sink):
                self.report(queue.dropped)
        return queue

    def turn_resumes(self, queue: UpdateQueue) -> None:
        """Undo `turn_ended`: a turn that a lost link has ended goes on."""
        self._left_over = [other for other in self._left_over if other is not queue]
        self.turn, self.label = queue, "turn"

    def _leave_over(self, queue: UpdateQueue) -> None:
        """Nothing more is put into it, but what waits there still counts."""
        self._left_over = [other for other in self._left_over if other.held[0]]
        if queue.held[0] and queue not in self._left_over:
            self._left_over.append(queue)

    def report(self, dropped: int) -> None:
        """Say that updates were let go."""
        if dropped:
            self.connection.emit("updates_discarded", session=self.session_id, updates=dropped)

    # -------------------------------------------------------------- how much waits

    def _queues(self) -> list[UpdateQueue]:
        queues = [self.backlog, *self._subscribers, *self._left_over]
        queues += [queue for queue in (self.turn, self._observed) if queue is not None]
        return queues

    def held(self) -> tuple[int, int]:
        """What it takes of the budget: updates, and their frame bytes, of all its consumers."""
        updates = size = 0
        for queue in self._queues():
            held = queue.held
            updates += held[0]
            size += held[1]
        return updates, size

    def look(self) -> None:
        """Report the session when more waits for its consumers than is its share (DESIGN §4.4).

        Once; again only after less than half of it was waiting. While the connection's budget
        lasts, nothing else happens.
        """
        if self.turn is not None and self.turn is self._let_go_turn:
            self._let_turn_go(self.turn)
        updates, size = self.held()
        limits = self.connection.limits
        if not self._full:
            if updates > limits.session_updates or size > limits.session_bytes:
                self._mark(full=True)
                self.connection.emit(
                    "session_full", session=self.session_id, updates=updates, bytes=size
                )
        elif updates <= limits.session_updates // 2 and size <= limits.session_bytes // 2:
            self._mark(full=False)
            self.connection.look_soon()
        else:
            self._mark(full=True)  # some may be newer than the mark

    def _mark(self, *, full: bool) -> None:
        self._full = full
        for queue in self._queues():
            queue.full = self if full else None

    def check_delivery(self, delivered: int, expected: int, turn: int | None = None) -> None:
        """Raise `DeliveryGap` if a consumer was given other than what arrived for it."""
        if delivered != expected:
            self._gap(delivered, expected, turn)
            raise DeliveryGap(self.session_id, delivered, expected)

    def _gap(self, delivered: int, expected: int, turn: int | None) -> None:
        self.connection.emit(
            "delivery",
            level=logging.ERROR,
            session=self.session_id,
            turn=turn,
            decision="fail",
            delivered=delivered,
            expected=expected,
        )

    # -------------------------------------------------------------- subscribers

    def subscribe(self, *, replay: bool = False) -> Subscription:
        """A new consumer; the first one also gets the backlog.

        A `replay` gets only the history in it, and ends with the load.
        """
        queue = UpdateQueue(self.connection)
        if not isinstance(self.backlog, Sink):  # which keeps nothing, and would go on doing so
            queue, self.backlog = self.backlog, queue
        self._keep_backlog_early(queue)
        if replay:
            # What is no history is still for the next who asks.
            queue, others = UpdateQueue(self.connection), queue
            while (update := others.take()) is not None:
                chosen = queue if update.label == "replay" else self.backlog
                chosen.put(update, len(update.frame))
            if self.label != "replay":
                queue.retired, queue.until = True, self.received
                self._leave_over(queue)
                return Subscription(self, queue)
            self._replays.append(queue)
        self._subscribers.append(queue)
        return Subscription(self, queue)

    def retire(self, queue: UpdateQueue) -> None:
        """Put nothing more into a consumer's queue; it may still take what is there. Idempotent."""
        if not queue.retired:
            queue.retired, queue.until = True, self.received
        if queue in self._subscribers:
            self._subscribers.remove(queue)
            self._leave_over(queue)
        queue.wake()

    def forget(self, queue: UpdateQueue) -> None:
        """Retire a consumer's queue and let go of what is in it, with an event. Idempotent."""
        self.retire(queue)
        self.report(queue.discard())
        if queue in self._left_over:
            self._left_over.remove(queue)

    def fold(self, view: SessionView) -> None:
        """Fold what comes into `view`, and what waited for the first consumer before it."""
        self.view = view
        feed = _Folding(self.connection, view)
        early, self._early = self._early or [], None
        for seen in early:
            feed.put(seen, 0)
        while (update := self.backlog.take()) is not None:
            if update not in early:
                feed.put(update, 0)
        self._subscribers.append(feed)

    @property
    def consumed(self) -> bool:
        """Whether anybody takes what comes outside a turn."""
        return bool(self._subscribers or self._observers)

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
            self._keep_backlog_early(queue)
            self._showing = self.connection.create_task(self._show(queue), delivery=True)

        def stop() -> None:
            if entry in self._observers:
                self._observers.remove(entry)
                if not self._observers and self._observed is not None:
                    self._observed.wake()

        return stop

    async def _show(self, queue: UpdateQueue) -> None:
        """Hand updates to the observers, one at a time."""
        # Whoever asked for it, an observer of another session perhaps, does not wait for this one.
        _observing.set((self,))
        task = asyncio.current_task()
        try:
            # Without observers, what comes is for the next who asks.
            while self._observers:
                update = queue.take()
                if update is None:
                    if self._seen != self.received:
                        # Without this, whoever waits for a mark would wait for ever.
                        self._gap(self._seen, self.received, None)
                        self._seen = self.received
                        self._settle()
                    if self.ended:
                        return
                    await queue.wait()
                    continue
                for entry in tuple(self._observers):
                    observer, first = entry
                    # It joined when this update was here already, or another has just ended it.
                    if first > self._seen or entry not in self._observers:
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
        themselves. So it does where that closes a circle over observers of other sessions.
        """
        if self._observed is None or self._seen >= mark:
            return
        within = _observing.get()
        if within and self._waits_for(within):
            return
        future = self.connection.create_future()
        self._settling.append((mark, future))
        for inbox in within:
            inbox._awaiting.append(self)
        try:
            await future
        finally:
            for inbox in within:
                inbox._awaiting.remove(self)

    def _waits_for(self, others: tuple[Inbox, ...]) -> bool:
        """Whether this session's observers are, or wait for, one of `others`."""
        reached: list[Inbox] = [self]
        for inbox in reached:
            if inbox in others:
                return True
            reached += [other for other in inbox._awaiting if other not in reached]
        return False
