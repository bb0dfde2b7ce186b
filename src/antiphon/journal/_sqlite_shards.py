"""The shards of a SQLite journal, on the loop: which there are, and the threads of those in use.

Responsible for what every use begins with (the loop, the process, closed or not), for making the
directory, and for the journal's owner. Leaves logs and sessions to `_sqlite`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from antiphon._errors import JournalDamaged, JournalError
from antiphon.journal._sqlite_damage import Damage, find_damages
from antiphon.journal._sqlite_format import id_bytes
from antiphon.journal._sqlite_owners import Owner
from antiphon.journal._sqlite_schema import MAX_SHARDS, OWNERS, Loss, make_directory, read_shape
from antiphon.journal._sqlite_thread import Place, Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator
    from pathlib import Path

    from antiphon.journal._sqlite_schema import Durability, Mode

__all__ = ["Shards"]

log = logging.getLogger("antiphon.journal")


class Shards:
    """All of a journal object but its face.

    Attributes:
        directory: where it is.
        losses: what was found to be missing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability,
        shards: int,
        gather: float,
        read_only: bool,
    ) -> None:
        self.directory = directory
        self.losses: list[Loss] = []
        self._durability: Durability = durability
        self._shards = shards
        self._gather = gather
        self._read_only = read_only
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shape: int | None = None
        self._shaping: asyncio.Future[int | None] | None = None
        self._made = False
        self._writers: dict[int, Writer] = {}
        self._readers: dict[int, Reader] = {}
        self._owner: Owner | None = None
        self._guard = threading.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._waking: set[asyncio.Event] = set()

    @property
    def closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._closing is not None

    # What everything begins with.

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise JournalError("the journal is used on another event loop than before")
        return loop

    def check(self) -> None:
        """Raise `JournalError` where this object is of no use: closed, forked, or on another loop."""
        if os.getpid() != self._pid:
            raise JournalError("the journal was opened before a fork: open it anew")
        self._bind()
        if self._closing is not None:
            raise JournalError("the journal is closed")

    def refuse_writing(self) -> None:
        """Raise `JournalError` if it was opened for reading only."""
        if self._read_only:
            raise JournalError(f"the journal in {self.directory} was opened for reading only")

    async def known(self) -> int | None:
        """How many shards there are, None while there is no journal."""
        self.check()
        await self._shaped(make=False)
        return self._shape

    async def _shaped(self, *, make: bool) -> None:
        """Look which shards there are, or make the directory; once for all that wait for it.

        Cancelled, it leaves the others that wait what comes of it.
        """
        while not self._made and (make or self._shape is None):
            shaping = self._shaping
            if shaping is None:
                look = (
                    partial(make_directory, self.directory, self._shards)
                    if make
                    else partial(read_shape, self.directory)
                )
                shaping = self._shaping = _in_thread(look)
                shaping.add_done_callback(partial(self._looked, made=make))
            await asyncio.shield(shaping)
            if self._shaping is shaping:
                # It was done already, and awaiting it gave `_looked` no turn: without one this spins.
                await asyncio.sleep(0)
            self.check()
            if not make:
                return

    def _looked(self, shaping: asyncio.Future[int | None], *, made: bool) -> None:
        self._shaping = None
        if shaping.exception() is None:
            self._shape, self._made = shaping.result(), made

    async def reader_of(self, session_id: str) -> Reader | None:
        """What reads the session's shard, None while there is no journal."""
        shards = await self.known()
        return None if shards is None else self._reader(_shard_of(session_id, shards))

    async def all_readers(self) -> list[Reader]:
        """What reads each shard."""
        shards = await self.known()
        return [] if shards is None else [self._reader(shard) for shard in range(shards)]

    def _reader(self, shard: int) -> Reader:
        self.check()
        reader = self._readers.get(shard)
        if reader is None:
            reader = self._readers[shard] = Reader(
                Place(self.directory, shard), self._bind(), look=self._read_only, lost=self._lost
            )
        return reader

    async def make(self) -> int:
        """Make the directory where there is none; how many shards there are."""
        self.refuse_writing()
        self.check()
        await self._shaped(make=True)
        assert self._shape is not None
        return self._shape

    async def writer_of(self, session_id: str) -> Writer:
        """What writes to the session's shard; makes the directory where there is none."""
        shard = _shard_of(session_id, await self.make())
        writer = self._writers.get(shard)
        if writer is None:
            writer = self._writers[shard] = Writer(
                Place(self.directory, shard),
                self._bind(),
                durability=self._durability,
                gather=self._gather,
                owner=self._own,
                lost=self._lost,
            )
        return writer

    async def verify(self, sessions: Collection[str] | None) -> list[Damage]:
        """What is wrong in all shards, or with these sessions."""
        found: list[Damage] = []
        try:
            shards = await self.known() or 0
        except JournalDamaged as error:
            # Which shards there are can be seen in the directory, too.
            found.append(Damage(error.file, None, None, str(error).removeprefix(f"{error.file}: ")))
            shards = MAX_SHARDS
        if sessions is None or found:
            chosen = list(range(shards))
        else:
            chosen = sorted({_shard_of(session_id, shards) for session_id in sessions if shards})
        stop = threading.Event()
        mode: Mode = "look" if self._read_only else "read"
        try:
            for shard in chosen:
                self.check()
                look = partial(find_damages, self.directory, shard, mode, sessions, stop.is_set)
                found += await asyncio.shield(_in_thread(look))
        finally:
            stop.set()
        return found

    @contextlib.contextmanager
    def waking(self, news: asyncio.Event) -> Generator[None]:
        """Have the event set when the journal is closed, too."""
        self._waking.add(news)
        try:
            yield
        finally:
            self._waking.discard(news)

    def hurry(self, session_id: str) -> None:
        """Have what waits for the session's shard committed at once."""
        writer = (
            None if self._shape is None else self._writers.get(_shard_of(session_id, self._shape))
        )
        if writer is not None:
            writer.hurry()

    def _own(self) -> Owner:
        """The owner under which this journal claims; called by the writers' threads."""
        with self._guard:
            if self._owner is None:
                try:
                    self._owner = Owner(self.directory / OWNERS)
                except OSError as error:
                    raise JournalError(f"no owner file can be made: {error.strerror}") from error
            return self._owner

    def _lost(self, loss: Loss) -> None:
        with self._guard:
            if loss in self.losses:
                return
            self.losses.append(loss)
        log.error("%s: %d acknowledged commits are missing at its end", loss.file, loss.commits)

    async def aclose(self) -> None:
        """Make durable what was handed over, and end all threads. Idempotent."""
        if self._closing is None:
            self._bind()
            self._closing = asyncio.ensure_future(self._close())
            for news in self._waking:
                news.set()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if os.getpid() != self._pid:
            return  # the threads are the parent's
        if self._shaping is not None:
            await asyncio.wait([self._shaping])
        for reader in self._readers.values():
            reader.close()
        for writer in self._writers.values():
            writer.close()
        for thread in (*self._readers.values(), *self._writers.values()):
            await thread.ended()
        if self._owner is not None:
            self._owner.close()


def _in_thread(look: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run something short that may touch the disk, beside the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            value, error = look(), None
        except Exception as raised:  # noqa: BLE001 - it is whoever waits that is to be told
            value, error = None, raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    # Whoever waits may have been cancelled, and `shield` forgets the rest: that is no error by itself.
    future.add_done_callback(_retrieved)
    threading.Thread(target=run, name="antiphon-journal", daemon=True).start()
    return future


def _retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _shard_of(session_id: str, shards: int) -> int:
    digest = hashlib.sha256(id_bytes(session_id)).digest()
    return int.from_bytes(digest[:8], "big") % shards
