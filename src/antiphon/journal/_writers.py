"""A journal's writers in this process: at most one live one for each session.

Responsible for making them, sharing them among the connections that serve a session, replacing one that
failed, and closing those that nobody uses. Leaves what a writer does to `Writer`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from antiphon._errors import JournalError
from antiphon.journal._tails import CREDIT
from antiphon.journal._writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from antiphon.journal._store import Journal

__all__ = ["Writers"]

log = logging.getLogger("antiphon.journal")


class _Place:
    """One session's writer, who uses it, and what is being done to it."""

    __slots__ = ("busy", "session_id", "users", "writer")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.writer: Writer | None = None
        self.users: dict[int, object] = {}
        #: Opening, closing or deleting: one at a time, and it ends with what came of it.
        self.busy: asyncio.Task[Writer | Exception | bool] | None = None


class Writers:
    """All writers of one journal in this process.

    Users are told apart by identity. A writer that has no user, and whose turn nobody holds, closes in
    the background, so that another process may write the session.
    """

    __slots__ = ("_closed", "_credit", "_journal", "_on_event", "_places")

    def __init__(
        self,
        journal: Journal,
        *,
        credit: int = CREDIT,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        """No writer yet. `credit` and `on_event` are those of each `Writer`."""
        self._journal = journal
        self._credit = credit
        self._on_event = on_event
        self._places: dict[str, _Place] = {}
        self._closed = False

    def get(self, session_id: str) -> Writer | None:
        """The session's live writer, None where there is none."""
        place = self._places.get(session_id)
        return None if place is None else _live(place)

    async def ensure(
        self, session_id: str, user: object, meta: Mapping[str, Any] | None = None
    ) -> Writer:
        """The session's live writer, made where there is none; concurrent callers share it.

        It has the claim, and has written nothing: genesis and repair come with its first operation.

        Args:
            session_id: the session.
            user: who keeps it alive, until `leave`.
            meta: the payload of `session_created`, where this is the first writer ever.

        Raises:
            JournalInUse: another process writes the session.
            JournalError: the store cannot be read or written, or `aclose` was called.
        """
        place = self._place(session_id)
        came = id(user) not in place.users
        try:
            return await self._ensure(session_id, user, meta)
        except BaseException:
            if came:
                self.leave(session_id, user)
            raise

    async def _ensure(
        self, session_id: str, user: object, meta: Mapping[str, Any] | None
    ) -> Writer:
        while True:
            place = self._place(session_id)
            place.users[id(user)] = user
            if self._closed:
                raise JournalError("the journal's writers are closed")
            if place.busy is None:
                writer = _live(place)
                if writer is not None:
                    return writer
                self._begin(place, partial(self._open, place, meta))
            outcome = await _outcome(place)
            if isinstance(outcome, Exception):
                raise outcome.with_traceback(None)

    def leave(self, session_id: str, user: object) -> None:
        """The user needs the session's writer no more; one that is unknown is none."""
        place = self._places.get(session_id)
        if place is not None:
            place.users.pop(id(user), None)
            self._settle(place)

    async def delete(self, session_id: str) -> bool:
        """End the session's tails with "deleted", and delete it whole; whether there was one.

        What waits is made durable first, and goes with the rest. Cancelled, it goes on by itself.

        Raises:
            JournalInUse: another process writes it.
            JournalError: the store cannot be written.
        """
        while (place := self._place(session_id)).busy is not None:
            await _outcome(place)
        self._begin(place, partial(self._delete, place))
        outcome = await _outcome(place)
        if isinstance(outcome, Exception):
            raise outcome.with_traceback(None)
        return outcome is True

    async def settled(self) -> None:
        """Wait until what closes in the background is closed."""
        while busy := [place.busy for place in self._places.values() if place.busy is not None]:
            await asyncio.wait(busy)

    async def aclose(self) -> None:
        """Close all writers: what waits is made durable, tails are ended with "closed". Idempotent."""
        self._closed = True
        while self._places:
            for place in list(self._places.values()):
                place.users.clear()
                if place.busy is None:
                    self._begin(place, partial(self._close, place))
            await asyncio.wait([place.busy for place in self._places.values() if place.busy])

    # ------------------------------------------------------------------ one at a time

    def _place(self, session_id: str) -> _Place:
        place = self._places.get(session_id)
        if place is None:
            place = self._places[session_id] = _Place(session_id)
        return place

    def _begin(
        self, place: _Place, work: Callable[[], Coroutine[Any, Any, Writer | Exception | bool]]
    ) -> None:
        async def alone() -> Writer | Exception | bool:
            try:
                return await work()
            except Exception as error:  # noqa: BLE001  (it is raised where somebody waits)
                return error

        def ended(_: object) -> None:
            place.busy = None
            self._settle(place)

        place.busy = asyncio.Task(alone(), loop=asyncio.get_running_loop())
        # Not in the task itself: one that is cancelled before its first step does not take it.
        place.busy.add_done_callback(ended)

    def _settle(self, place: _Place) -> None:
        """Close a writer that nobody needs; forget a place where nothing is."""
        if place.busy is not None or place.users:
            return
        if place.writer is None:
            if self._places.get(place.session_id) is place:
                del self._places[place.session_id]
        elif place.writer.turn_holder is None:
            self._begin(place, partial(self._close, place))

    async def _open(self, place: _Place, meta: Mapping[str, Any] | None) -> Writer:
        await self._drop(place, "closed")
        opened = await self._journal.open(place.session_id)
        try:
            await opened.claim()
        except BaseException:
            await opened.aclose()
            raise
        writer = Writer(opened, meta=meta, credit=self._credit, on_event=self._on_event)
        writer.freed = lambda: self._settle(place)
        place.writer = writer
        return writer

    async def _close(self, place: _Place) -> bool:
        writer = place.writer
        # Somebody may have come, or begun a turn, since this was thought of.
        if self._closed or (not place.users and (writer is None or writer.turn_holder is None)):
            await self._drop(place, "closed")
        return False

    async def _delete(self, place: _Place) -> bool:
        await self._drop(place, "deleted")
        place.users.clear()
        return await self._journal.delete(place.session_id)

    async def _drop(self, place: _Place, reason: str) -> None:
        writer = place.writer
        if writer is None:
            return
        await writer.aclose(reason)
        place.writer = None
        try:
            await writer.log.aclose()
        except Exception:
            log.exception("the log of session %r was not closed", place.session_id)


def _live(place: _Place) -> Writer | None:
    writer = place.writer
    return None if writer is None or writer.failed is not None or writer.closing else writer


async def _outcome(place: _Place) -> Writer | Exception | bool:
    """What comes of what is being done; it goes on where the caller is cancelled."""
    busy = place.busy
    if busy is None:
        return False
    await asyncio.wait([busy])
    return JournalError("cancelled") if busy.cancelled() else busy.result()
