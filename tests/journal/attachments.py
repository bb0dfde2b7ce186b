"""What a subscriber knows of a connection, played: frames end in a list, and the link can be slow or go."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from antiphon import ConnectionClosed
from antiphon.journal import SESSION_UPDATE, Entry, MemoryJournal, Rider, Subscriber, Writer

if TYPE_CHECKING:
    from antiphon.journal import SessionLog
    from antiphon.journal._subscriber import Source

__all__ = ["SESSION", "Link", "offset_of", "session", "update", "written"]

Json = dict[str, Any]
SESSION = "s-41"


class Link:
    """One connection; `messages` is all that it was given, the load's answer included."""

    def __init__(self, *, room: int | None = None) -> None:
        self.messages: list[Json] = []
        self.frames: list[bytes] = []
        self.ended: list[str] = []
        #: How many more frames it takes, None for any number.
        self.room = room
        self.lost = False
        self._changed = asyncio.Event()

    def send(self, frame: bytes) -> None:
        if self.lost:
            raise ConnectionClosed("the client has gone")
        assert b"\n" not in frame
        self.frames.append(frame)
        self.messages.append(json.loads(frame))
        if self.room is not None:
            self.room -= 1
        self._changed.set()

    def reply(self, mark: int) -> None:
        self.send(b'{"id":2,"result":{"_meta":{"raxol.io":{"highWatermark":%d}}}}' % mark)

    def writable(self) -> bool:
        return not self.lost and (self.room is None or self.room > 0)

    async def drain(self) -> None:
        while not self.writable():
            if self.lost:
                raise ConnectionClosed("the client has gone")
            self._changed.clear()
            await self._changed.wait()

    def take(self, room: int | None = None) -> None:
        """It takes so many frames again."""
        self.room = room
        self._changed.set()

    def lose(self) -> None:
        self.lost = True
        self._changed.set()

    async def until(self, count: int) -> None:
        """Wait until it was given so many frames."""
        while len(self.messages) < count:
            self._changed.clear()
            await self._changed.wait()

    def over(self, _subscriber: Subscriber, reason: str) -> None:
        self.ended.append(reason)
        self._changed.set()

    async def until_ended(self) -> None:
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()

    def subscriber(
        self,
        log: SessionLog,
        source: Source | None,
        rider: Rider | None = None,
        *,
        aware: bool = True,
        **more: Any,
    ) -> Subscriber:
        return Subscriber(
            log,
            source,
            rider or Rider(),
            aware=aware,
            send=self.send,
            writable=self.writable,
            drain=self.drain,
            reply=self.reply,
            on_end=self.over,
            **more,
        )

    # ------------------------------------------------------------------ what it was given

    @property
    def shown(self) -> list[Any]:
        """Each frame in short: an offset, or a name and what it says."""
        return [_short(message) for message in self.messages]

    @property
    def offsets(self) -> list[int]:
        return [offset for offset in map(offset_of, self.messages) if offset is not None]


def offset_of(message: Json) -> int | None:
    """The offset of the record that a frame is about."""
    params = message.get("params", {})
    if message.get("method") == "session/update":
        told = params.get("_meta", {}).get("raxol.io", {}).get("offset")
    elif message.get("method") == "_raxol/session.record":
        told = params["offset"]
    else:
        return None
    return None if told is None else int(told)


def _short(message: Json) -> Any:
    offset = offset_of(message)
    if offset is not None:
        return offset
    if "id" in message:
        return ("reply", message["result"]["_meta"]["raxol.io"]["highWatermark"])
    params = message["params"]
    name = message["method"].removeprefix("_raxol/session.")
    said = [value for key, value in params.items() if key != "sessionId"]
    return (name, *said)


def update(text: str = "", tag: str = "agent_message_chunk", taint: str = "agent") -> Entry:
    content = {"type": "text", "text": text}
    body = {"sessionUpdate": tag, "content": content}
    return Entry(SESSION_UPDATE, json.dumps(body, separators=(",", ":")).encode(), taint)


async def session(journal: MemoryJournal | None = None, **more: Any) -> tuple[Writer, SessionLog]:
    """A writer of the session, and a log to read it by."""
    journal = journal or MemoryJournal()
    return Writer(await journal.open(SESSION), **more), await journal.open(SESSION)


async def written(count: int, **more: Any) -> tuple[Writer, SessionLog]:
    """A session with so many records, genesis included."""
    writer, log = await session(**more)
    await writer.ready()
    for number in range(2, count + 1):
        await writer.append(update(f"chunk {number}"))
    return writer, log
