"""One session's attachment at the client: its offsets, and what follows from them.

Stands where the session's inbox stood for the router, so that a session that is not attached pays
nothing for it, and updates and records keep one order. Responsible for the highest offset held, for
duplicates (dropped) and gaps (the session is attached again behind the last that came), for the end
of an attachment, and for which copies of the open turn of ours are shown (`_own_turn`). Leaves delivery
to `_inbox`, what a turn's end means to `_session`, and lost links to `_relink`.

Whichever subscriptions the agent has for us, only the record with the next offset is taken; whatever
is in front of it comes again by the attach that is under way. So each is seen once, in order.

Source: resumable-sessions §2-§4, §7.5, §9.3.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from antiphon._errors import (
    ENDING,
    AntiphonError,
    AttachmentClosed,
    ConnectionClosed,
    InternalError,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
)
from antiphon.runtime import OutboundCall
from antiphon.schema import UNSET, UnsetType
from antiphon.sessions._attach_frames import (
    LOAD,
    CaughtUp,
    Closed,
    History,
    Lagged,
    SessionRecord,
    attach_params,
    read_watermark,
    refused_watermark,
)
from antiphon.sessions._attach_frames import offset_of as offset_in
from antiphon.sessions._own_turn import Copies, OwnTurn, Place, Told

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec

    from antiphon.runtime import Connection
    from antiphon.sessions._inbox import Inbox
    from antiphon.sessions._session import PromptTurn, Session

__all__ = ["Attachment", "Capability"]

log = logging.getLogger("antiphon.session")

#: What permits to attach: a token, or what gives one for a session each time it is asked.
Capability: TypeAlias = str | Callable[[str], str | Awaitable[str | None] | None] | None

#: How often in a row a session is attached again without that anything new comes, and the first pause
#: between two of them, in seconds; each is twice as long as the one before.
_TRIES = 6
_PAUSE = 0.05
#: After so many seconds in which an attachment had nothing left to bring, the count begins again.
_RESTED = 5.0

#: How long the copies of a turn that have an offset may be behind those that have none, in seconds.
_BEHIND = 1.0


class _AttachCall(OutboundCall):
    """An attach under way; `future` has the high watermark, or why there is none."""

    __slots__ = ("attachment", "from_offset", "future", "history")

    def __init__(
        self, attachment: Attachment, from_offset: int, history: History, *, blocking: bool
    ) -> None:
        super().__init__(LOAD, blocking=blocking)
        self.attachment = attachment
        self.from_offset = from_offset
        self.history: History = history
        self.future: asyncio.Future[int] = attachment.connection.create_future()

    def can_wait(self) -> bool:
        """A history that somebody takes may be longer than any budget (DESIGN §4.4)."""
        inbox = self.attachment.inbox
        taken = inbox.consumed or inbox.turn is not None
        return taken and inbox.held()[1] > inbox.connection.limits.queue_bytes

    def answered(self, result: Any, error: Exception | None) -> None:
        mark = 0
        if error is None:
            try:
                mark = read_watermark(result)
            except RemoteProtocolError as fault:
                error = fault
        if self.history != "none":
            self.attachment.attached(self.from_offset, self.history, mark, error)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(mark)
        else:
            self.future.set_exception(error)
            self.future.exception()  # a caller that was cancelled meanwhile is no news


class _Stray:
    """A turn that is over here, and not at the agent."""

    __slots__ = ("_loop", "_timer", "over", "own")

    def __init__(self, attachment: Attachment, own: OwnTurn) -> None:
        self.own = own
        self._loop = attachment.connection.loop
        self._timer: asyncio.TimerHandle | None = None
        self.over = attachment.connection.create_future()

    def end_within(self, seconds: float) -> None:
        """It has been told: give it that long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.end)

    def end(self) -> None:
        """It has ended, or is given up. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.over.done():
            self.over.set_result(None)


class Attachment:
    """The attachment of one session; see the module.

    Attributes:
        session: whose.
        offset: of the last record that was taken; 0 before the first.
        live: the agent sends what comes.
        wanted: the session is to be attached again when it no longer is.
        ended: why it is not, once that is so.
        capability: what permits it.
        history: what of it is to be sent, until it is attached.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.inbox: Inbox = session.inbox
        self.offset = 0
        self.live = False
        self.wanted = False
        self.ended: AttachmentClosed | None = None
        self.capability: Capability = None
        self.history: History = "from_offset"
        self._asked = False  # an attach is under way, and not answered
        self._loose = True  # the records that are no updates are left out
        self._call: _AttachCall | None = None
        self._over: asyncio.Future[None] | None = None  # of what is under way
        self._tries = 0  # in a row, without anything new
        self._attaches = 0  # that were granted, on this link
        self._settled = (
            0.0  # when the last of them had nothing left to bring, in the loop's seconds
        )
        self._said: str | None = None  # why it was closed while it was being attached again
        self._revoked = False  # the agent said so, and a new capability may be had
        self._own: OwnTurn | None = None
        self._was: OwnTurn | None = None  # the last that is over
        # One that was cancelled and is over here, and may still run at the agent, which is to be told.
        self._stray: _Stray | None = None
        self._late: asyncio.TimerHandle | None = None
        #: Copies without an offset of a turn that was given up here still come.
        self._ignoring = False
        self._loaded = 0  # updates that had come when a plain load began
        # What was told without an offset, and comes with one should the link be lost now: by a new
        # session before it was attached, and by an agent that has ended an attach on its own.
        self._unnumbered: Copies | None = None
        self._at_tip = False  # of a turn that began before: what has no offset is behind us
        self._mark = 0  # up to which the last attach was to bring everything
        self._again_wanted = False  # once what is under way is over
        self._observers: tuple[Callable[[SessionRecord], object], ...] = ()

    @property
    def connection(self) -> Connection:
        """The session's."""
        return self.inbox.connection

    @property
    def attaching(self) -> bool:
        """Whether an attach is under way, and its answer not here."""
        return self._asked

    @property
    def _doubles(self) -> bool:
        """Whether the agent sends the updates of a turn of ours twice (§4.1); none of ours does."""
        return not self.session.peer.resumable

    # -------------------------------------------------------------- the reader's side

    def put(self, raw: msgspec.Raw, frame: bytes) -> None:
        """Take one `session/update`: the router's."""
        offset = offset_in(frame)
        if not offset:
            self._told(raw, frame)
        elif self._take(offset):
            if self._unnumbered is None or not self._again(raw):
                self._update(raw, frame)
            self._reached()

    def notice(self, notice: SessionRecord | CaughtUp | Lagged | Closed) -> None:
        """Take a notification of the attachment, in its place among the updates: the router's."""
        if isinstance(notice, SessionRecord):
            if self._take(notice.offset):
                self._record(notice)
                self._reached()
        elif isinstance(notice, Lagged):
            if self.attaching:
                self.live = False
            elif self.live:
                self.connection.emit(
                    "attachment_lagged", session=self.session.session_id, offset=self.offset
                )
                self.live = False
                self._attach_again()
        elif isinstance(notice, Closed) and self.live:
            if self.attaching:
                self.live, self._said = False, notice.reason
            else:
                self._closed(notice.reason)

    def _take(self, offset: int) -> bool:
        """Whether a record is the next."""
        held = self.offset
        if offset == held + 1:
            self.offset = offset
            self._tries = 0
            self._at_tip = False
            return True
        if offset <= held:
            return False
        if self._loose:  # those of a plain load
            self.offset = offset
            return True
        if self.live and not self.attaching:
            self.connection.emit(
                "attachment_gap", session=self.session.session_id, offset=held, next=offset
            )
            self._attach_again()
        return False

    def _again(self, raw: msgspec.Raw) -> bool:
        """Whether an update has come without an offset before."""
        if self.live and not self.attaching:  # then nothing comes again
            self._unnumbered = None
        return self._unnumbered is not None and bool(self._unnumbered.until(raw))

    def _note(self, raw: msgspec.Raw, frame: bytes) -> None:
        """An update without an offset is given: it may come again, with one."""
        if self._unnumbered is None:
            attached = self.live or self._over is not None
            if self._doubles or self._at_tip or not attached:
                return
            self._unnumbered = Copies()
        self._unnumbered.add(Told(raw, frame, given=True))

    def _update(self, raw: msgspec.Raw, frame: bytes) -> None:
        own, inbox = self._own, self.inbox
        if self._stray is not None and self._stray.own.running:
            self._stray.own.place(raw)
        if own is not None and own.running:
            place = own.place(raw)
            if place is Place.turn:
                missed, given = own.before(raw, doubles=self._doubles)
                for copy in missed:
                    self._give(copy.raw, copy.frame)
                if not given:
                    self._give(raw, frame)
            elif place is Place.outside:
                self._outside(own, raw, frame)
        elif own is not None:
            self._outside(own, raw, frame)
        elif self.attaching and inbox.turn is None:
            inbox.put_as(raw, frame, "replay", None)
        else:
            inbox.put(raw, frame)

    def _outside(self, own: OwnTurn, raw: msgspec.Raw, frame: bytes) -> None:
        """An update that came while a turn of ours is open, and is no part of it."""
        own.turn.passed_by()
        self.inbox.put_as(raw, frame, "replay" if self.attaching else "session", None)

    def _told(self, raw: msgspec.Raw, frame: bytes) -> None:
        """An update without an offset."""
        own = self._own
        if own is None:
            if not self._ignoring:
                self._note(raw, frame)
                self.inbox.put(raw, frame)
            return
        if own.outcome is not None:
            if not self._doubles:
                self._note(raw, frame)
                self._outside(own, raw, frame)
            elif own.told(raw, frame, given=True):  # not the second copy of one of the turn's last
                self._give(raw, frame)
            return
        if (self.live and not self._doubles) or own.told_only:
            # Of a record that is no newer than the mark at which it was attached, without its history;
            # or the agent has ended the attach, and is about to go.
            self._note(raw, frame)
            self._give(raw, frame)
            return
        # While the session is being attached, what is in front of it may be on its way.
        given = not self.live and self._over is None
        if given:
            self._release(own)
        if not own.told(raw, frame, given=given):
            return
        if given:
            self._give(raw, frame)
            return
        if own.full:
            self._release(own)
        if self._late is None:
            self._late = self.connection.loop.call_later(_BEHIND, self._behind)

    def _give(self, raw: msgspec.Raw, frame: bytes) -> None:
        self.inbox.put_as(raw, frame, "turn", self.inbox.turn)

    def _release(self, own: OwnTurn) -> None:
        """No other copies come: show those that are held."""
        for copy in own.release():
            self._give(copy.raw, copy.frame)

    def _behind(self) -> None:
        """What came without an offset does not come with one: nobody sends it."""
        self._late = None
        own = self._own
        if own is None or not own.held or not self.live:
            return
        if self.attaching or self._tries < 2:
            self._attach_again()
            self._late = self.connection.loop.call_later(_BEHIND, self._behind)
        else:  # the agent could not store them
            self._release(own)
            own.told_only = True

    def observe(self, observer: Callable[[SessionRecord], object]) -> Callable[[], None]:
        """Call `observer` with each record that is no update; returns what ends that."""
        self._observers = (*self._observers, observer)

        def stop() -> None:
            self._observers = tuple(kept for kept in self._observers if kept is not observer)

        return stop

    def _record(self, record: SessionRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except ENDING:
                raise
            except BaseException:
                log.exception("an observer of session %s failed", record.session_id)
        own, stray = self._own, self._stray
        if stray is not None:
            if record.kind == "turn_started":
                stray.own.started()
            elif record.kind == "turn_completed" and stray.own.running:
                self._stray_ends()
        if record.kind == "turn_started":
            if own is not None and own.adrift and own.running:
                # One turn at a time is open: nobody has ended ours, as where an agent died and its
                # journal was not repaired.
                self._completed(
                    own, {"outcome": "orphaned", "stopReason": "cancelled"}, record.offset
                )
            elif own is not None and (own.outcome is None or own.answer is None):
                own.started()
        elif record.kind == "turn_completed":
            self._ignoring = False
            if own is not None and own.running:
                self._completed(own, record.payload, record.offset)

    def _completed(self, own: OwnTurn, payload: dict[str, Any], offset: int) -> None:
        self._release(own)  # those that could not be stored
        outcome = own.completed(payload)
        if outcome.orphaned:
            self.connection.emit("turn_orphaned", session=self.session.session_id, offset=offset)
        if own.answer is not None:
            self._end(own, *own.answer)
        elif own.adrift:
            self._end(own, outcome.result, outcome.error)

    def _reached(self) -> None:
        own = self._own
        if own is None or own.needed is None or self.offset < own.needed or own.answer is None:
            return
        self._end(own, *own.answer)

    # -------------------------------------------------------------- a turn of ours

    def turn_sent(self, turn: PromptTurn) -> None:
        """A prompt is about to be sent."""
        self._ignoring = self._at_tip = False
        if self.live or self._over is not None:
            self._own = self._new_own(turn, 0)

    def _new_own(self, turn: PromptTurn, delivered: int) -> OwnTurn:
        return OwnTurn(turn, delivered, prompts=self.session.peer.resumable is True)

    def turn_answered(self, result: Any, error: Exception | None) -> bool:
        """The answer to the prompt, in its place in the stream: True if the turn goes on behind it.

        So it does while records of it are on their way (and, without a link, if it can be attached
        again); an answer that is none, a timeout for example, ends it.
        """
        own = self._own
        if own is None:
            return False
        if isinstance(error, ConnectionClosed):
            return self._set_adrift(own)
        if error is not None and not isinstance(error, (RequestError, RemoteProtocolError)):
            return False
        if own.outcome is not None or not (self.live or self._over is not None):
            return False
        if not own.running and self.live and self._over is None and not self._doubles:
            return False  # refused, or cancelled before it began
        own.answer = (result, error)
        self._ask_mark(own)
        return self._own is own

    def turn_resumes(self, turn: PromptTurn) -> None:
        """The link it was prompted on is gone, and it goes on: what is left of it comes as records."""
        own = self._own or self._was
        if own is None or own.turn is not turn:
            own = self._new_own(turn, turn.received)
        own.adrift = True
        self._own = own

    def _set_adrift(self, own: OwnTurn) -> bool:
        if own.outcome is not None:
            self._end(own, own.outcome.result, own.outcome.error)
            return True
        if not self.session.survives:
            return False
        own.adrift = True
        return True

    def _ask_mark(self, own: OwnTurn) -> None:
        """Ask up to which offset records of the turn may come: its answer stands behind all of them."""
        connection = self.connection
        call = _AttachCall(self, self.offset, "none", blocking=False)

        def known(future: asyncio.Future[int]) -> None:
            if self._own is not own or own.outcome is not None or own.answer is None:
                return
            if future.cancelled() or future.exception() is not None:
                if not own.adrift and not connection.closed:
                    self._end(own, *own.answer)
                return
            own.needed = future.result()
            self._reached()
            if self._own is own and self._late is None:
                self._late = connection.loop.call_later(_BEHIND, self._still_needed)

        async def ask() -> None:
            try:
                self._open(call, await self.permit())
            except ConnectionClosed:
                call.future.cancel()
            except AntiphonError as error:
                call.answered(None, error)

        call.future.add_done_callback(known)
        connection.create_task(ask())

    def _still_needed(self) -> None:
        self._late = None
        own = self._own
        if own is None or own.needed is None or own.adrift:
            return
        if self._tries >= _TRIES:
            self.close("gap", None)
        else:
            if not self.attaching:
                self._attach_again()
            self._late = self.connection.loop.call_later(_BEHIND, self._still_needed)

    def turn_over(self) -> None:
        """The turn has ended, however."""
        own, self._own = self._own, None
        self._was = own or self._was
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if own is None or own.outcome is not None:
            return
        if self.live:
            self._ignoring = self._doubles and own.answer is None
        stopped = own.turn.cancelling or isinstance(own.turn.error, RequestTimeout)
        if own.answer is None and stopped:
            self._stray_ends()
            self._stray = _Stray(self, own)
            if self.live and not self.attaching:  # it has been told
                self._stray_known()

    def _stray_known(self) -> None:
        """Whether the turn that is over here runs at the agent is known, which has been told to stop."""
        stray = self._stray
        if stray is not None and stray.own.running:
            stray.end_within(self.connection.limits.cancel_backstop)
        else:
            self._stray_ends()

    def _stray_ends(self) -> None:
        stray, self._stray = self._stray, None
        if stray is not None:
            stray.end()

    @property
    def stray(self) -> bool:
        """Whether a turn that ended here may still run at the agent, which is to be told to stop."""
        return self._stray is not None

    async def stray_over(self) -> None:
        """Wait until the agent is done with a turn that ended here before it was told to stop.

        That takes at most `Limits.cancel_backstop` from when it is told.
        """
        if self._stray is not None:
            await asyncio.shield(self._stray.over)

    def _end(self, own: OwnTurn, result: Any, error: Exception | None) -> None:
        """End the turn with its answer, or with what its records say."""
        if own.outcome is None:
            self._release(own)
        own.turn.end(result, error)

    # -------------------------------------------------------------- attaching

    async def attach(
        self,
        *,
        from_offset: int | None = None,
        history: History = "from_offset",
        timeout: float | None | UnsetType = UNSET,
    ) -> int:
        """Attach, and wait for the answer; returns the journal's high watermark.

        Where nothing is said of `from_offset`, it is the one behind the last that is held; a journal
        that has less is then read from its start. Raises what a call raises.
        """
        while self._over is not None:
            await asyncio.shield(self._over)
        if history == "none":
            call = _AttachCall(self, 0, history, blocking=True)
            self._open(call, await self.permit(), timeout)
            return await self._answer(call)
        self._begin()
        self._tries, self.wanted = 0, True
        self.history = history
        try:
            mark = await self._ask(from_offset, history, timeout, blocking=True)
            self._tries = 0
            return mark
        except (RequestError, RemoteProtocolError):
            self.wanted = self.live
            if self._own is not None and not self.live:
                self._release(self._own)
            raise
        finally:
            self._finished()

    def _begin(self) -> None:
        self._asked, self._loose = True, False
        self._over = self.connection.create_future()

    def _finished(self) -> None:
        self._asked = False
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)
        again, self._again_wanted = self._again_wanted, False
        if (again and self.wanted) or (self.live and self.offset < self._mark):
            self._attach_again()
        elif self._said is not None and not self.wanted:
            self.close(self._said, None)

    async def _ask(
        self,
        from_offset: int | None,
        history: History,
        timeout: float | None | UnsetType,
        *,
        blocking: bool,
    ) -> int:
        self._tries += 1
        permit = await self.permit()
        start = self.offset + 1 if from_offset is None else max(from_offset, 1)
        try:
            return await self._ask_once(start, history, permit, timeout, blocking=blocking)
        except RequestError as error:
            mark = refused_watermark(error)
            if mark is None or from_offset is not None:
                raise
            self.connection.emit(
                "attachment_ahead",
                session=self.session.session_id,
                offset=self.offset,
                high_watermark=mark,
            )
            self._discard(error)
            return await self._ask_once(1, "from_offset", permit, timeout, blocking=blocking)

    async def _ask_once(
        self,
        from_offset: int,
        history: History,
        permit: str | None,
        timeout: float | None | UnsetType,
        *,
        blocking: bool,
    ) -> int:
        self._asked = True
        call = self._call = _AttachCall(self, from_offset, history, blocking=blocking)
        if self._own is None and self.session.turn is not None:
            # Its prompt was sent before the session was attached.
            self._own = self._new_own(self.session.turn, self.session.turn.received)
        if history == "from_offset":
            skipped = from_offset > self.offset + 1
            self.offset = from_offset - 1
            if skipped and self._own is not None:
                self._own.from_now_on()
        try:
            self._open(call, permit, timeout)
            return await self._answer(call)
        finally:
            if self._call is call:
                self._call = None

    def _open(
        self, call: _AttachCall, permit: str | None, timeout: float | None | UnsetType = UNSET
    ) -> None:
        session = self.session
        params = attach_params(
            session.session_id,
            session.cwd,
            from_offset=call.from_offset,
            history=call.history,
            capability=permit,
            additional_directories=session.additional_directories,
        )
        if isinstance(timeout, UnsetType):
            timeout = self.connection.limits.request_timeout
        self.connection.open_call(call, params, timeout)

    async def _answer(self, call: _AttachCall) -> int:
        try:
            return await call.future
        except asyncio.CancelledError:
            self.connection.abandon(call)
            raise

    async def permit(self) -> str | None:
        """What the capability is now; one that cannot be given is none: it may narrow, never widen."""
        given = self.capability
        if given is None or isinstance(given, str):
            return given
        try:
            made = given(self.session.session_id)
            return await made if inspect.isawaitable(made) else made
        except (*ENDING, asyncio.CancelledError):
            raise
        except BaseException:
            log.exception("no capability was given for session %s", self.session.session_id)
            return None

    def begin_load(self) -> None:
        """A plain load begins: it is read from its start, and the numbers of its records noted."""
        self.offset, self.live, self._loose = 0, False, True
        self._loaded = self.inbox.received

    def want(self, history: History) -> None:
        """The session was opened in another way, and is to be attached: in the reader."""
        self.wanted, self.history = True, history

    @property
    def covers_load(self) -> bool:
        """Whether what a plain load replayed, if anything, had offsets."""
        return self.offset > 0 or self.inbox.received == self._loaded

    def begin_new(self, told: Iterable[tuple[msgspec.Raw, bytes]]) -> None:
        """A session is new, and has told this so far without offsets; it is to be attached."""
        self._unnumbered = Copies()
        self.want("tip")
        for raw, frame in told:
            self._unnumbered.add(Told(raw, frame, given=True))

    def opens(self, from_offset: int) -> None:
        """An attach that opens the session here begins."""
        self._begin()
        self.offset, self.wanted = from_offset - 1, True

    def opened(self) -> None:
        """It is over. Idempotent."""
        if self._over is not None:
            self._finished()

    def attached(
        self, from_offset: int, history: History, mark: int, error: Exception | None
    ) -> None:
        """The answer to an attach, in its place in the stream: what comes now is live."""
        own, self._asked = self._own, False
        if error is not None:
            return
        self.live = self.wanted = self.session.peer.has_attached = True
        self.ended, self._said, self._revoked = None, None, False
        self._unnumbered, self.history = None, "from_offset"
        self._at_tip = history == "tip" and own is not None
        self._attaches += 1
        if self.inbox.view is not None:
            self.inbox.view.end_load()
        if history == "tip":
            if own is not None:
                own.from_now_on()
            self.offset = max(self.offset, mark)
        self.connection.emit(
            "session_attached",
            session=self.session.session_id,
            offset=from_offset,
            high_watermark=mark,
        )
        self._mark = mark
        if self.offset >= mark:
            self._settled = self.connection.loop.time()
        else:
            self.connection.emit(
                "attachment_gap", session=self.session.session_id, offset=self.offset, next=mark
            )
        if self.offset >= mark and self._stray is not None:
            if self._stray.own.running:
                self.session.peer.notify_cancel(self.session.session_id)
            self._stray_known()
        if own is None or self.offset < mark:
            return
        if not self._doubles:  # what is in no record was not stored
            self._release(own)
        if own.adrift and own.answer is not None:
            self._end(own, *own.answer)
        elif own.adrift and not own.running:
            lost = ConnectionClosed("the link was lost before the agent began the turn")
            self._end(own, None, lost)
        elif own.adrift and own.turn.cancelling:
            self.session.peer.notify_cancel(self.session.session_id)

    def _discard(self, error: RequestError) -> None:
        """The journal is another, or has lost its end: what was held here is not of it."""
        own = self._own
        if own is not None:
            closed = AttachmentClosed(self.session.session_id, "ahead", self.offset)
            closed.__cause__ = error
            self._end(own, None, closed)
        self._stray_ends()
        self.offset = 0
        if self.inbox.view is not None:
            self.inbox.view.begin_load()

    # -------------------------------------------------------------- attaching again

    def renew(self) -> None:
        """Attach behind the last record that came, over a link that was made for that."""
        if self._over is not None:
            self._again_wanted = True
        elif self.wanted and not self.live:
            self._attach_again()

    def _attach_again(self) -> None:
        """Attach behind the last record that came, in a task: we are in the reader."""
        if self.attaching or self.connection.closed:
            return
        if self._over is not None:
            self._again_wanted = True
            return
        if self.connection.loop.time() - self._settled > _RESTED:
            self._tries = 0
        self._begin()
        task = self.connection.create_task(self._until_attached())
        # Not at the end of the task itself, which may be cancelled before it has begun.
        task.add_done_callback(lambda _: self._finished())

    async def _until_attached(self) -> None:
        connection = self.connection
        failed: Exception | None = None  # why the last attach was none
        while not connection.closed and self.wanted:
            if self._tries >= _TRIES:
                if failed is None:
                    self.close("gap", None)
                else:
                    self._refused(failed)
                return
            if self._tries:
                await asyncio.sleep(_PAUSE * 2 ** (self._tries - 1))
            try:
                # What a new session has told is known; of others, what is told behind the last number.
                whole = self.offset or self._unnumbered is not None
                history = "from_offset" if whole else self.history
                mark = await self._ask(None, history, UNSET, blocking=False)
            except ConnectionClosed:
                return  # that is the link's affair
            except AntiphonError as error:
                self.connection.emit(
                    "attach_failed",
                    session=self.session.session_id,
                    offset=self.offset,
                    error=str(error),
                )
                failed = error
                # An agent that is busy, or whose disk failed it, may not be so the next time.
                refused = isinstance(error, (RequestError, RemoteProtocolError))
                if refused and not isinstance(error, InternalError):
                    self._refused(error)
                    return
            else:
                failed = None
                if self.offset >= mark:
                    return

    def _refused(self, error: Exception) -> None:
        """It cannot be attached again."""
        reason = "revoked" if self._revoked else "refused"
        if isinstance(error, ResourceNotFound) and self.offset:
            reason = "deleted"
        self.close(reason, error)

    def _closed(self, reason: str) -> None:
        """The agent sends nothing more."""
        again = self.session.peer.reattaches and reason != "deleted"
        if reason == "revoked":
            # What says so may also be the end of an earlier attach, which is not told apart on the wire.
            again = self._revoked = self._attaches > 1 or callable(self.capability)
        if again:
            self.connection.emit(
                "attachment_closed",
                session=self.session.session_id,
                offset=self.offset,
                reason=reason,
            )
            self.live = False
            self._attach_again()
        else:
            self.close(reason, None)

    # -------------------------------------------------------------- its end

    def close(self, reason: str, cause: Exception | None) -> None:
        """It is over: tell who iterates over the session."""
        offset = self.offset

        def make() -> AttachmentClosed:
            error = AttachmentClosed(self.session.session_id, reason, offset)
            error.__cause__ = cause
            return error

        closed = make()
        self.ended, self.live, self.wanted, self._loose = closed, False, False, True
        self._said = None
        self.connection.emit(
            "attachment_closed", session=self.session.session_id, offset=self.offset, reason=reason
        )
        self.inbox.fail_subscribers(make)
        self._stray_ends()
        own = self._own
        if own is None:
            return
        if own.adrift:
            self._end(own, None, closed)
        else:
            self._release(own)
            if own.answer is not None:
                self._end(own, *own.answer)

    def stop(self) -> None:
        """The session is closed here, or was detached: nothing is attached again."""
        self.live, self.wanted, self._loose = False, False, True
        self._stray_ends()
        own = self._own
        if own is not None:
            self._release(own)
            if own.answer is not None:
                self._end(own, *own.answer)

    def link_lost(self) -> None:
        """The link is gone: what was under way is over, and how often another is tried is `Relink`'s."""
        self.live, self._attaches, self._tries = False, 0, 0
        if self._late is not None:
            self._late.cancel()
            self._late = None
        own = self._own
        if own is not None:
            own.adrift = True

    def give_up(self, error: ConnectionClosed) -> None:
        """No other link is made: the turn of ours ends with that."""
        self.live = False
        own = self._own
        if own is not None:
            own.turn.end(None, error)
        self._stray_ends()

    async def ready(self) -> None:
        """Wait until an attach that is under way is over; who waits lets reading go on meanwhile."""
        while self._over is not None:
            if self._call is not None:
                self.connection.set_blocking(self._call, blocking=True)
            await asyncio.shield(self._over)
