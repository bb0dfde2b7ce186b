"""What a durable session writes to in place of its connection: first the journal, then the wire.

An update is appended, and leaves when it is durable; what has to come behind it (a request of the same
session, the turn's response) waits for that. The one frame of an update goes to its connection bare,
unless that is attached to the session: then its subscriber's copy is the only one (resumable-sessions
§5). Responsible for the order of all that, and for what a turn tells the journal. Leaves who may attach
to `_durability`, and which message means what to `_durable_router`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import (
    ConnectionClosed,
    InvalidRequest,
    JournalError,
    JournalInUse,
    RequestError,
    ResourceNotFound,
    TurnHeld,
)
from antiphon.journal import SESSION_UPDATE, Entry, Sender, tag_of_update, taint_of_update
from antiphon.schema import decode_update, encode_checked, v1
from antiphon.sessions._methods import tag_of
from antiphon.sessions._turn_states import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from antiphon.journal import Record, Subscriber, Writer
    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._durability import Durability
    from antiphon.sessions._turn import Turn

__all__ = ["DurableLink"]

log = logging.getLogger("antiphon.journal")

#: Records that are read at once.
_PAGE = 256
#: What an update's frame is longer in a subscriber's copy, at most.
RIDER_BYTES = len(
    b',"_meta":{"raxol.io":{"offset":%d,"taint":"external","ts":%d}}' % (1 << 63, 1 << 63)
)
#: How the updates begin that turns send most by far.
_OF_AGENT = (b'{"sessionUpdate":"agent_message_chunk"', b'{"sessionUpdate":"agent_thought_chunk"')


class DurableLink(Sender):
    """A session's way to its journal and its connection; has of a connection what turns use.

    Attributes:
        writer: the session's writer as last known here, None before the first use.
        attached: the connection's own subscriber of the session, while it has one.
        role: what its client may do here: "controller" or "observer"; None after its grant has ended, or
            before anybody has let it in.
        asked: whether nobody has let it in so far.
        coming: how many attaches are under way.
        closed: whether the connection is gone, or the session is closed on it.
        outlives: whether an open turn goes on when the connection is lost.
        touched: whether anything was asked about the session since somebody looked.
        replaying: whether the agent itself tells the history, which is no news for the journal.
    """

    __slots__ = (
        "_behind",
        "_behind_pending",
        "_head",
        "_held_back",
        "_idle",
        "_news",
        "_noted",
        "_offset",
        "_pending",
        "_prompt",
        "_role",
        "_said",
        "_start",
        "_turn",
        "_turn_id",
        "_uncovered",
        "_until",
        "_waiting",
        "asked",
        "attached",
        "closed",
        "coming",
        "connection",
        "durability",
        "options",
        "outlives",
        "replaying",
        "session",
        "touched",
        "writer",
    )

    def __init__(self, session: AgentSession, durability: Durability) -> None:
        self.session = session
        self.connection = session.peer.connection
        self.durability = durability
        self.writer: Writer | None = None
        self.attached: Subscriber | None = None
        self.asked = False
        self._role: str | None = None
        self._until: int | None = None
        self.outlives = durability.outlives(session.peer.transport)
        self.replaying = False
        self._head = session.head.update
        self._start = len(self._head)
        #: Frames of updates that are not durable yet, in order; behind them, in tuples, what must follow.
        self._pending: deque[bytes | tuple[bytes]] = deque()
        self._behind_pending = 0  # how many those are
        self._waiting: list[asyncio.Future[None]] = []
        #: What was told last of each kind that is about the session and not about a turn.
        self._said: dict[str, bytes] = {}
        #: Own updates that an attach under way has a copy of, by offset: bare, should it come to nothing.
        self._held_back: dict[int, bytes] = {}
        #: Up to where the attach shows nothing: own updates up to there are sent bare.
        self._uncovered = 0
        self._offset = 0  # of the last update of ours that was published
        self._turn: Turn | None = None
        self._turn_id = 0
        #: Offsets of the blocks of the last own prompt.
        self._prompt = range(0)
        #: Modes and options that were set on other connections while this one is loading.
        self._news: dict[str, Any] | None = None
        #: Whether something was noted since it was last waited for.
        self._noted = False
        self.closed = False
        self.coming = 0
        #: The session's options, as last known, whether this client is shown them or not.
        self.options: list[Any] | None = None
        #: Whether it was told that updates are not kept.
        self._behind = False
        self.touched = False
        self._idle: asyncio.TimerHandle | None = None
        self._watch_idle()

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def role(self) -> str | None:
        """What its client may do, by a grant that has not ended: whatever became of its attach."""
        if self._until is not None and self.durability.clock() >= self._until:
            self._role = self._until = None
        return self._role

    def allow(self, role: str, until: int | None = None) -> None:
        """The client was let in, until then, in seconds since 1970."""
        self.asked = False
        self._role, self._until = role, until

    # -------------------------------------------------------------- as a connection

    @property
    def lost(self) -> ConnectionClosed | None:
        """Why nothing can be sent any more; a turn that outlives its connection is never told so."""
        return None if self.outlives else self.connection.lost

    def lost_error(self) -> ConnectionClosed:
        """A fresh exception that says why the link is gone."""
        return self.connection.lost_error()

    def check_frame(self, size: int) -> None:
        """Raise `LimitExceeded` for a frame of that size, or if a copy of it would be too large."""
        self.connection.check_frame(size + RIDER_BYTES)

    def _check_update(self, update: bytes) -> None:
        """Raise `LimitExceeded` for an update that no frame has room for."""
        self.check_frame(self._start + len(update) + 2)

    @property
    def writing_paused(self) -> bool:
        """Whether who can wait should: for the client, or for the disk."""
        writer = self.writer
        return self.connection.writing_paused or (writer is not None and writer.full)

    async def drain(self) -> None:
        """Wait for room where there is none. Raises `ConnectionClosed` if the link goes."""
        connection, writer = self.connection, self.writer
        if writer is not None and writer.full:
            await writer.room()
        if connection.lost is None:
            if not connection.writing_paused:
                return
            try:
                await connection.drain()
            except ConnectionClosed:
                if not self.outlives:
                    raise
        elif not self.outlives:
            raise connection.lost_error()

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that ends with the connection, or with the turn that outlives it."""
        if self.outlives:
            return self.durability.create_task(work)
        return self.connection.create_task(work)

    def send(self, frame: bytes, kept: bytes | None = None) -> None:
        """Append the update of a frame; the frame leaves when it is durable.

        With `kept` that is appended in its place: of what the client is shown a part of.
        """
        writer = self.writer
        if writer is None or self.replaying:
            self.connection.send(frame)
            return
        start = self._start
        update = frame[start:-2] if kept is None else kept
        taint = "agent" if frame.startswith(_OF_AGENT, start) else self._taint(update)
        self._pending.append(frame)
        writer.submit(Entry(SESSION_UPDATE, update, taint), self)

    def _taint(self, update: bytes) -> str:
        tag = tag_of_update(update)
        taint = taint_of_update(tag)
        if taint == "system":
            self._said[tag] = update
        return taint

    def send_behind(self, frame: bytes) -> None:
        """Send a frame of another kind behind what was sent before."""
        if self._pending:
            self._pending.append((frame,))
            self._behind_pending += 1
            self._hurry()
        else:
            self.connection.send(frame, now=True)

    def change_begins(self) -> None:
        """A client asks for another mode or option: what is said of them from here on is about that."""
        self._said.clear()

    def note(self, update: Any) -> None:
        """Append an update that the client need not be told: it has asked for what it says.

        A handler that has told it itself, since `change_begins`, has said it once for all.
        """
        body = self.whole_of(update)
        tag = tag_of_update(body)
        if self.writer is not None and self._said.get(tag) != body:
            self._noted = True
            self.writer.submit(Entry(SESSION_UPDATE, body, taint_of_update(tag)))

    def whole_of(self, update: Any) -> bytes:
        """What is kept of another mode, or other options; every connection's view of it changes.

        The options are all of them: also those that this connection's client takes no part in.
        """
        if isinstance(update, v1.ConfigOptionUpdate):
            update = msgspec.structs.replace(
                update, config_options=self._all(update.config_options)
            )
            self.options = update.config_options
        self.durability.keep(self, update)
        return encode_checked(update)

    def _all(self, options: Sequence[Any]) -> list[Any]:
        """Options with those that the client was never shown, in their places."""
        options = list(options)
        whole, known = self.options, {option.id for option in options}
        if whole is None or self.session.peer.allowed_options(whole) == whole:
            return options
        for at, option in enumerate(whole):
            if option.id not in known and not self.session.peer.allowed_options([option]):
                options.insert(at, option)
        return options

    def keep(self, update: Any) -> None:
        """Somebody else has set the session's mode, or its options."""
        if isinstance(update, v1.ConfigOptionUpdate):
            self.options = update.config_options
        if self._news is not None:
            self._news[tag_of(update)] = update
        self.session.keep(update)

    def restoring(self) -> None:
        """What is set from here on is newer than what is about to be read."""
        self._news = {}

    def restored(
        self, modes: v1.SessionModeState | None, options: list[Any] | None
    ) -> tuple[v1.SessionModeState | None, list[Any] | None]:
        """What was read, with what was set meanwhile."""
        news, self._news = self._news or {}, None
        mode = news.get("current_mode_update")
        if modes is not None and mode is not None:
            modes = msgspec.structs.replace(modes, current_mode_id=mode.current_mode_id)
        option = news.get("config_option_update")
        if options is not None and option is not None:
            options = list(option.config_options)
        self.options = options
        return modes, options

    def published(self, records: Sequence[Record]) -> None:
        """Updates of ours are durable: their frames may leave."""
        pending = self._pending
        for record in records:
            frame: Any = pending.popleft()
            self._offset = record.offset
            try:
                if self.attached is None:
                    self.connection.send(frame)
                else:
                    self._show(record, frame, self.attached)
            except Exception:
                log.exception("an update of session %r did not leave", self.session_id)
            if self._behind_pending:
                self._send_behind_pending()
        self._settle()

    def refused(self) -> None:
        """An update of ours is not kept: its frame leaves all the same, and it is said."""
        frame: Any = self._pending.popleft()
        self._not_kept()
        self.connection.send(frame)
        if self._behind_pending:
            self._send_behind_pending()
        self._settle()

    def _show(self, record: Record, frame: bytes, attached: Subscriber) -> None:
        writer = self.writer
        if writer is None:
            self.connection.send(frame)
        elif not attached.live:
            # The attach under way has it in its history, or behind its mark.
            self._held_back[record.offset] = frame
        elif not writer.publishes_to(attached):
            # It lags, and what it still has to say comes before this.
            attached.detach(flush=True)
            self.connection.send(frame)
        elif record.offset <= self._uncovered:
            # It was durable before the mark was read, and is told of only now.
            self.connection.send(frame)

    def _send_behind_pending(self) -> None:
        """Send what had to wait for the update that has left, up to the next one that has not."""
        pending = self._pending
        while pending and isinstance(pending[0], tuple):
            (frame,) = pending[0]
            del pending[0]
            self._behind_pending -= 1
            try:
                self.connection.send(frame)
            except Exception:
                log.exception("what was said in session %r did not leave", self.session_id)

    def _settle(self) -> None:
        if not self._pending and self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def attach_answered(self, uncovered: int, mark: int) -> None:
        """An attach is about to be answered: it has every own update behind `uncovered`.

        The others, which it has no history of, are sent bare, now. One that has lagged before its answer
        has none behind the mark but those that it was given until then: they wait for its end.
        """
        held, self._held_back = self._held_back, {}
        self._uncovered = uncovered
        for offset, frame in held.items():
            if offset <= uncovered:
                self.connection.send(frame)
        writer, attached = self.writer, self.attached
        if writer is not None and attached is not None and not writer.publishes_to(attached):
            self._held_back = {offset: held[offset] for offset in held if offset > mark}

    def attach_ended(self, attached: Subscriber) -> None:
        """An attach that was answered is over: what it has not forwarded is sent bare."""
        if self.attached is attached:
            self.attached = None
            self._send_held_back(attached.forwarded)

    def attach_failed(self) -> None:
        """An attach came to nothing: what it has a copy of is sent bare."""
        self.attached = None
        self._send_held_back()

    def _send_held_back(self, above: int = 0) -> None:
        held, self._held_back = self._held_back, {}
        for offset, frame in held.items():
            if offset > above:
                self.connection.send(frame)

    def _hurry(self) -> None:
        if self.writer is not None:
            self.writer.hurry()

    async def settled(self) -> None:
        """Wait until what was sent before is durable, and with the connection in its order."""
        if self._pending:
            future: asyncio.Future[None] = self.connection.create_future()
            self._waiting.append(future)
            self._hurry()
            await future
        if self._noted and self.writer is not None:
            self._noted = False
            with suppress(JournalError):  # then it is not kept, which is told elsewhere
                await self.writer.flush()
        await self._reached(self._offset)

    async def _reached(self, offset: int) -> None:
        """Wait until the connection was given the record, by the attach that it has or the next one."""
        while (attached := self.attached) is not None:
            await attached.reached(offset)
            if self.attached is attached:
                return

    # -------------------------------------------------------------- the writer

    async def open(self) -> Writer | None:
        """The session's live writer; None, which is logged, where the journal cannot be used."""
        try:
            return await self._open()
        finally:
            self.leave_if_closed()

    async def create(self) -> None:
        """Have a new session in the journal; where that cannot be, which is logged, it goes on without."""
        writer = await self.open()
        if writer is not None:
            try:
                await writer.ready()
            except JournalError as error:
                self._not_kept(error)

    async def _open(self) -> Writer | None:
        writer = self.durability.writers.get(self.session_id)
        if writer is None or writer is not self.writer:
            try:
                writer = await self.durability.writers.ensure(self.session_id, self, self._meta())
            except JournalInUse:
                raise
            except JournalError as error:
                self._not_kept(error)
                writer = None
            if self._turn is None:
                self.writer = writer
            # Else an own turn has lost its writer: it was orphaned in the journal by the next one, and
            # what it still tells has no place there any more.
        return writer

    def _meta(self) -> dict[str, Any]:
        session = self.session
        meta: dict[str, Any] = {"cwd": session.cwd}
        if session.additional_directories:
            meta["additionalDirectories"] = list(session.additional_directories)
        return meta

    def _not_kept(self, error: Exception | None = None) -> None:
        """What is told from now on is not in the journal: said once, until it is again."""
        if self._behind:
            return
        self._behind = True
        if error is None and self.writer is not None:
            error = self.writer.failed
        self.connection.emit(
            "journal.not_durable", cause=error, session=self.session_id, error=type(error).__name__
        )

    # -------------------------------------------------------------- sessions that nobody uses

    def _watch_idle(self) -> None:
        seconds = self.durability.idle
        if seconds is not None:
            self._idle = self.connection.loop.call_later(seconds, self._look_idle, self._offset)

    def _look_idle(self, offset: int) -> None:
        """Let go of a session to which nothing has happened since."""
        in_use = self.session.turn is not None or self.session.states.state is not State.IDLE
        if in_use or self.touched or self._pending or self._offset != offset:
            self.touched = False
            self._watch_idle()
            return
        self.connection.emit("session_idle_reaped", session=self.session_id)
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.ended("idle")
        self.session.peer.forget_session(self.session)

    def close(self) -> None:
        """The session is closed on the connection."""
        self.detach()
        self._close()

    def _close(self) -> None:
        self.closed = True
        if self._idle is not None:
            self._idle.cancel()
        self.durability.forget(self)

    def lose(self) -> None:
        """The connection is lost; what runs may say a last word yet.

        The attach goes on until the connection has come to its end: what this client has set itself is shown
        by that alone, and has its place before what is told behind it.
        """
        attached = self.attached
        if attached is None or not attached.live:
            self.close()
            return
        attached.part()
        self._close()
        self.durability.create_task(self._detach_at_end())

    async def _detach_at_end(self) -> None:
        await self.connection.wait_closed()
        self.detach()

    def detach(self) -> None:
        """End the connection's tail of the session; no frame says so."""
        attached, self.attached = self.attached, None
        if attached is not None:
            # Whoever prompts sees all of its turn, in this way or that.
            attached.detach(flush=True)
            self._send_held_back(attached.forwarded)

    async def history(self) -> AsyncIterator[Any]:
        """The updates in the journal, typed, oldest first."""
        if self.writer is not None:
            with suppress(JournalError):  # then what is there has to do
                await self.writer.flush()
        journal_log = await self.durability.journal.open(self.session_id)
        try:
            start, stop = 1, await journal_log.high_watermark()
            while start <= stop:
                records = await journal_log.read(start, min(stop, start + _PAGE - 1))
                start += len(records)
                for record in records:
                    if record.kind == SESSION_UPDATE:
                        yield decode_update(record.payload)
                if not records:
                    return
        finally:
            await journal_log.aclose()

    # -------------------------------------------------------------- turns

    async def begin_turn(self, turn: Turn) -> None:
        """Take the session's turn latch and journal the turn's beginning.

        Raises:
            InvalidRequest: the turn is another connection's, or another process writes the session.
        """
        session_id = self.session_id
        try:
            await self._take_turn(turn)
        except TurnHeld:
            raise InvalidRequest(None, "prompt already in flight") from None
        except JournalInUse as error:
            log.warning("a prompt is refused: %s", error)
            reason = {"sessionId": session_id, "reason": "session_in_use"}
            raise InvalidRequest(reason, "the session is in use by another process") from None
        finally:
            self.leave_if_closed()

    def leave_if_closed(self) -> bool:
        """Leave the writer that it came to use after it had left it; whether it had."""
        if self.closed:
            self.durability.writers.leave(self.session_id, self)
        return self.closed

    async def _take_turn(self, turn: Turn) -> None:
        durability = self.durability
        self._check_turn()
        turn_id, writer = 0, await self._open()
        try:
            if writer is not None:
                await writer.ready()
            # No await from here on: nothing can come between the question and the latch.
            self._check_turn()
            if writer is not None:
                entries = durability.prompt_entries(turn.params.prompt, self._check_update)

                def begun(record: Record | None) -> None:
                    self._prompt = range(0)
                    if record is not None:
                        first = record.offset + 1
                        self._prompt = range(first, first + len(entries))

                turn_id = await writer.begin_turn(turn, entries, begun)
                self._behind = False
        except (JournalInUse, TurnHeld):
            raise
        except JournalError as error:
            self._not_kept(error)
            self.writer = None
            self._check_turn()
        self._turn, self._turn_id = turn, turn_id
        durability.turn_begun(self, turn, turn_id)
        self.attached_in_turn()

    def _check_turn(self) -> None:
        """Refuse a turn of a session that has one, is being deleted, or was meanwhile."""
        self.durability.check_free(self.session_id)
        if self.session.peer.sessions.get(self.session_id) is not self.session:
            raise ResourceNotFound({"sessionId": self.session_id}, "Session not found")

    def attached_in_turn(self) -> None:
        """Whoever prompts slows its own turn down instead of lagging behind it."""
        if self._turn is not None and self.writer is not None and self.attached is not None:
            self.writer.exempt(self.attached, True)

    def is_own_prompt(self, record: Record) -> bool:
        """Whether a live record is a block of the prompt that this connection has sent last."""
        return record.offset in self._prompt

    def _complete(
        self, turn: Turn, stop_reason: str | None, error: tuple[int, str] | None
    ) -> asyncio.Future[Record | None] | None:
        writer = self.writer
        if self._turn is not turn:
            return None
        self._turn = None
        self.durability.turn_over(self, turn)
        if writer is None or not self._turn_id:
            return None
        done: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()

        def published(record: Record | None) -> None:
            # It has all of its own turn; from here on it is one that may lag like any other.
            if self.attached is not None and self._turn is None:
                writer.exempt(self.attached, False)
            if not done.done():
                done.set_result(record)

        try:
            writer.complete_turn(
                turn, self._turn_id, stop_reason=stop_reason, error=error, published=published
            )
        except TurnHeld:
            log.exception("a turn was completed that is not held")
            return None
        return done

    async def _seen(self, done: asyncio.Future[Record | None]) -> None:
        """Wait until a completion is durable, and what precedes it with the connection."""
        record = await done
        if record is not None:
            await self._reached(record.offset)

    async def end_turn(
        self, turn: Turn, *, stop_reason: str | None = None, failure: BaseException | None = None
    ) -> None:
        """Journal the turn's end, and wait until the response may follow."""
        error = None
        if failure is not None:
            if isinstance(failure, RequestError):
                error = failure.code, failure.message
            else:
                error = -32603, "Internal error"
        done = self._complete(turn, stop_reason, error)
        if done is None:  # the turn is not kept; what it told last may still be on its way
            await self.settled()
        else:
            await self._seen(done)

    def completed(self, turn: Turn, response: v1.PromptResponse) -> bool:
        """A cancelled turn ran out of time: journal its end, then answer; False if it is not kept."""
        done = self._complete(turn, response.stop_reason, None)
        if done is None:
            return False
        call, body = turn.call, encode_checked(response)

        async def answer() -> None:
            await self._seen(done)
            if call is not None:
                self.connection.answer(call, body)

        self.durability.create_task(answer())
        return True

    def abandon_turn(self, turn: Turn) -> None:
        """The turn ended without an end of its own (the program stops): it is orphaned."""
        if self._turn is not turn:
            return
        self._turn = None
        self.durability.turn_over(self, turn)
        if self.writer is not None:
            self.writer.release_turn(turn)
