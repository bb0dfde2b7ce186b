"""`fs/read_text_file` and `fs/write_text_file`, confined to directories that were lent.

Finding a path is left to `_confine`, deciding to the guard, what is not saved yet to the overlay.
What is done here is done relative to the descriptor of the place found: exact windows of lines in
bounded memory, and writes that are seen whole or not at all.

Small files (up to 256 KiB) are read and written on the event loop: a hop to a thread and back costs
more than the work. Larger ones, and windows of larger ones, go to the loop's threads, and back to
the end of the queue there after each 16 MiB: so any number of windows far into 2 GiB files delay
others by a few slices, and not until they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import io
import os
import secrets
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar, cast

import msgspec

from antiphon.schema import v1
from antiphon.services._confine import Pins, not_found, os_failure
from antiphon.services._context import Operation, denied, permit, refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.schema import v1_unstable
    from antiphon.services._confine import Place
    from antiphon.services._context import Guard, ServiceContext

__all__ = ["Files", "Overlay"]

MIB: Final = 1 << 20
#: The most that one read answers, in bytes of the file (DESIGN §5).
READ_BYTES: Final = 8 * MIB
#: The most that an answer may take as JSON: a frame of 16 MiB less its envelope. A text of control
#: characters is six times as long on the wire.
ANSWER_BYTES: Final = 16 * MIB - 64 * 1024
#: Up to this size the work is done on the event loop.
INLINE_BYTES: Final = 256 * 1024
_CHUNK: Final = 256 * 1024
#: Calls that may wait for a guard, an overlay or one another with a place held open, each by a
#: descriptor; the others wait without one. Most systems give a process 1024.
HELD: Final = 128
#: Reads that may go on at a time, each with its file open; the others wait.
READING: Final = 256
#: Reads that may keep what they answer at a time. It is as large as `READ_BYTES`, three times over while
#: it becomes a frame, and a peer may ask for a thousand at once.
KEEPING: Final = 4
# Read in one go before others have their turn: about 10 ms.
_SLICE_CHUNKS: Final = 64
# What the schema means by line and limit.
_UNSIGNED_32: Final = 2**32 - 1

# A FIFO must not block the open, a terminal must not become ours, a link is never followed here.
_OPEN: Final = (
    os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | os.O_NOCTTY
    if hasattr(os, "O_CLOEXEC")
    else 0
)

# Forbidden; unknown in this user namespace; unknown to this file system.
_NOT_OURS_TO_GIVE: Final = frozenset(
    {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)

_T = TypeVar("_T")


class Overlay(Protocol):
    """What an editor holds of files and has not saved: given as `Files(overlay=…)`.

    Both methods may be plain or async, and are called on the event loop. They are asked only about
    paths inside the roots, after the guard has allowed it. `path` is the real path, every link
    resolved: an editor that knows a text by another name compares with `os.path.realpath` of that.
    The file need not exist. A class that inherits from this one may leave out either method.
    Source: R1-110.

        class Unsaved(Overlay):
            def __init__(self) -> None:
                self.texts: dict[str, str] = {}

            def read(self, path: str) -> str | None:
                return self.texts.get(path)

            def write(self, path: str, content: str) -> bool:
                if path not in self.texts:
                    return False
                self.texts[path] = content
                return True

    What they raise fails the agent's call: a `RequestError` as it is, anything else as -32603.
    A call that is cancelled cancels what it waits for here.
    """

    def read(self, path: str) -> str | None | Awaitable[str | None]:
        """The text as it stands in the editor; None: there is none but what is on the disk."""
        del path
        return None

    def write(self, path: str, content: str) -> bool | Awaitable[bool]:
        """Take the new text and return True; anything else: it is to be written to the disk."""
        del path, content
        return False


class Files:
    """Lends files to an agent: the handlers `read_text_file` and `write_text_file`.

    A path must be absolute and lie, links resolved, inside a root; anything else is refused with
    -32602 and a reason (`Roots.locate`), and nothing outside is read, made or looked at. Hard
    links cannot be told from the file and are read; a write replaces the name and leaves the other
    name's file as it was. Texts are strict UTF-8; line ends and a byte order mark are kept.

    Args:
        roots: directories to lend. None given: the session's own (`cwd` and additional
            directories). Each is pinned to its real path, the session's at their first use.
        allow_write: None asks the guard, and allows where there is none; True allows without
            asking; False refuses every write.
        guard: asked before each write (see `Operation`); anything but True refuses. Async, or a
            plain function, which must not block.
        guard_reads: ask the guard before each read as well.
        create_parents: whether a write makes the missing directories above the file.
        read_bytes: the most that one read answers, in bytes of the file.
        overlay: texts that an editor has not saved yet; they are read, and may be written, in
            place of the files.

    Raises:
        OSError: a root does not exist or is no directory.
        TypeError: `allow_write` is something else.
        NotImplementedError: this system has no directory descriptors.
    """

    def __init__(
        self,
        *roots: str | os.PathLike[str],
        allow_write: bool | None = None,
        guard: Guard | None = None,
        guard_reads: bool = False,
        create_parents: bool = True,
        read_bytes: int = READ_BYTES,
        overlay: Overlay | None = None,
    ) -> None:
        if allow_write is not None and not isinstance(cast("object", allow_write), bool):
            raise TypeError(f"allow_write is True, False or None, not {allow_write!r}")
        self.allow_write = allow_write
        self.guard = guard
        self.guard_reads = guard_reads
        self.create_parents = create_parents
        self.read_bytes = read_bytes
        self.overlay = overlay
        self._pins = Pins(roots)
        self._writing: dict[str, asyncio.Future[None]] = {}
        self._held: asyncio.Semaphore | None = None
        self._read: asyncio.Semaphore | None = None
        self._kept: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def writable(self) -> bool:
        """Whether `fs.writeTextFile` should be advertised."""
        return self.allow_write is not False

    def guard_with(self, guard: Guard, *, reads: bool) -> None:
        """Let `guard` decide where none was given, and about reads too if `reads`.

        A guard that was given stays, and what it is asked about. So one policy can be put before
        every service of a client without taking a decision away from whoever made it.
        """
        if self.guard is None:
            self.guard = guard
            self.guard_reads = self.guard_reads or reads

    async def read_text_file(
        self, params: v1_unstable.ReadTextFileRequest, ctx: ServiceContext
    ) -> v1.ReadTextFileResponse:
        r"""Answer the text, or the lines asked for: an exact slice, line ends included.

        `line` counts from 1 (0 is taken for 1), `limit` counts lines; a line ends after "\n" and
        nowhere else. `limit` 0, and a `line` past the end, give "". Source: R1-107 to R1-109.

        Raises:
            RequestError: -32002 with `data.uri` where nothing exists; -32602 with the reasons of
                `Roots.locate`, `not_a_regular_file`, `file_too_large`, `not_utf8` or
                `line_invalid`; -32603 `permission_denied` if the guard refused, `io_error` with
                an errno's name for the rest.

        Cancelled, it stops reading within a chunk.
        """
        line = _count(params.line, 1)
        limit = _count(params.limit, None)
        waits = self.guard_reads or self.overlay is not None
        async with self._holding() if waits else self._reading():
            source = await self._source(params.path, ctx)
            window = _Window(source, params.path, max(line or 1, 1), limit, self.read_bytes)
            return v1.ReadTextFileResponse(content=await window.read(self._keeping))

    async def write_text_file(
        self, params: v1_unstable.WriteTextFileRequest, ctx: ServiceContext
    ) -> v1.WriteTextFileResponse:
        """Replace the file's content, or create it: all or nothing, permissions kept.

        The text goes to a new file beside the old one, which is then renamed over it; a link
        inside the roots is followed and stays. That is safe against a crash of this process, not
        against a loss of power. A process that is killed meanwhile leaves the old file as it was,
        and beside it a `.antiphon-` and 16 hexadecimal digits, which nothing needs any more.
        Writes to one file happen one after the other in the order in which they came; of those of
        several processes, the file has one, whole. Source: R1-106.

        Raises:
            RequestError: -32602 with the reasons of `Roots.locate`, `not_a_regular_file` or
                `not_utf8`; -32603 `permission_denied` if it was not allowed, `write_failed` with
                an errno's name if the system refused; -32002 if the directory is missing and
                `create_parents` is off.

        Cancelled, the file has the old content or the new.
        """
        if not self.writable:
            raise denied()
        try:
            content = params.content.encode()
        except UnicodeEncodeError as error:
            raise refusal("not_utf8", path=params.path) from error
        async with self._holding():
            await self._write(params.path, params.content, content, ctx)
        return v1.WriteTextFileResponse()

    async def _write(self, path: str, text: str, content: bytes, ctx: ServiceContext) -> None:
        place = self._pins.roots(ctx).locate(path)
        handed_over = False
        try:
            _check_replaceable(place, path)
            if place.missing and not self.create_parents:
                raise not_found(path)
            turn = _WriteTurn(self._writing, place.path)
            try:
                await turn.wait()
                if self.allow_write is None:
                    await self._ask("write", place, path, ctx)
                if (
                    self.overlay is not None
                    and await _value(self.overlay.write(place.path, text)) is True
                ):
                    return
                work = partial(_replace, place, content, path)
                handed_over = True
                if len(content) <= INLINE_BYTES:
                    work()
                else:
                    await _in_thread(work, turn.hold())
            finally:
                turn.end()
        finally:
            if not handed_over:
                place.close()

    async def _ask(
        self, kind: Literal["read", "write"], place: Place, requested: str, ctx: ServiceContext
    ) -> None:
        await permit(
            self.guard,
            Operation(
                kind=kind,
                session_id=ctx.session_id,
                title=f"{kind.capitalize()} {place.path}",
                path=place.path,
                requested=requested,
                roots=self._pins.named(ctx),
            ),
        )

    def _holding(self) -> asyncio.Semaphore:
        """Waits until few enough places are held open; for each loop anew."""
        self._meet_loop()
        assert self._held is not None
        return self._held

    def _reading(self) -> asyncio.Semaphore:
        """Waits until few enough files are open; for each loop anew."""
        self._meet_loop()
        assert self._read is not None
        return self._read

    def _keeping(self) -> asyncio.Semaphore:
        """Waits until few enough answers are kept; for each loop anew."""
        self._meet_loop()
        assert self._kept is not None
        return self._kept

    def _meet_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._held, self._read = asyncio.Semaphore(HELD), asyncio.Semaphore(READING)
            self._kept = asyncio.Semaphore(KEEPING)

    async def _source(self, path: str, ctx: ServiceContext) -> _Descriptor | _Buffer:
        with self._pins.roots(ctx).locate(path) as place:
            if self.guard_reads:
                # Asked first: a refusal by the guard does not tell what is there.
                await self._ask("read", place, path, ctx)
            return await self._unsaved(place, path) or _Descriptor(_open_regular(place, path))

    async def _unsaved(self, place: Place, path: str) -> _Buffer | None:
        if self.overlay is None or place.leaf is None or place.wants_directory:
            return None
        text = await _value(self.overlay.read(place.path))
        if text is None:
            return None
        if not isinstance(text, str):
            what = f"the overlay's read answered {type(text).__name__}, not str or None"
            raise TypeError(what)
        return _Buffer(text, path)

    async def release_session(self, session_id: str) -> None:
        """Forget what the session's roots were pinned to. Idempotent, never suspended."""
        self._pins.release(session_id)


class _WriteTurn:
    """One write's place in the line of those to the same file."""

    def __init__(self, line: dict[str, asyncio.Future[None]], path: str) -> None:
        self._line = line
        self._path = path
        self._before = line.get(path)
        self._mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held = False
        line[path] = self._mine

    async def wait(self) -> None:
        if self._before is not None:
            # Not awaited itself: a cancellation of this write must not cancel that one.
            await asyncio.wait([self._before])

    def hold(self) -> Callable[[], None]:
        """Keep the turn beyond the handler; the result ends it, on the loop."""
        self._held = True
        return self._pass_on

    def end(self) -> None:
        if not self._held:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._before is not None and not self._before.done():
            # Cancelled while waiting: who comes next waits for the one before instead.
            self._before.add_done_callback(lambda _: self._pass_on())
            return
        if not self._mine.done():
            self._mine.set_result(None)
        if self._line.get(self._path) is self._mine:
            del self._line[self._path]


async def _in_thread(work: Callable[[], _T], done: Callable[[], None] | None = None) -> _T:
    """Run `work` in the loop's threads to its end, also if this call is cancelled.

    `work` owns descriptors, so it must always run. `done` is called on the loop when it has.
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        # No thread could be started. Others may still take the work up, so what it owns stays
        # open, but nobody waits for it.
        if done is not None:
            done()
        raise
    if done is not None:
        future.add_done_callback(lambda _: done())
    return await asyncio.shield(future)


def _count(value: int | msgspec.UnsetType | None, default: int | None) -> int | None:
    if value is None or value is msgspec.UNSET:
        return default
    if not 0 <= value <= _UNSIGNED_32:
        raise refusal("line_invalid", value=value)
    return value


async def _value(answer: object) -> object:
    """What a function of the overlay answers, which may be plain or async."""
    return await answer if inspect.isawaitable(answer) else answer


def _open_regular(place: Place, path: str) -> int:
    if place.leaf is not None and not place.exists:
        raise not_found(path)
    if place.leaf is None:
        raise refusal("not_a_regular_file", path=path)
    try:
        # Looked at first, because opening a device may already do something.
        _require_regular(os.lstat(place.leaf, dir_fd=place.directory), path)
        fd = os.open(place.leaf, os.O_RDONLY | _OPEN, dir_fd=place.directory)
    except FileNotFoundError as error:
        raise not_found(path) from error
    except OSError as error:
        raise os_failure("io_error", path, error) from error
    try:
        # What counts is what was opened.
        _require_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_replaceable(place: Place, path: str) -> None:
    """Refuse what can be no file before anybody is asked about it."""
    if place.leaf is None or place.wants_directory:
        raise refusal("not_a_regular_file", path=path)
    if place.exists:
        try:
            _require_regular(os.lstat(place.leaf, dir_fd=place.directory), path)
        except FileNotFoundError:
            pass  # removed meanwhile: it will be created
        except OSError as error:
            raise os_failure("write_failed", path, error) from error


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise refusal("not_a_regular_file", path=path)


class _Descriptor:
    """An open regular file (owned)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, size: int) -> bytes:
        return os.read(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)


class _Buffer:
    """A text that is not saved, in the bytes that it would have in the file."""

    def __init__(self, text: str, path: str) -> None:
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise refusal("not_utf8", path=path) from error
        self._size = len(content)
        self._content = io.BytesIO(content)

    def size(self) -> int:
        return self._size

    def read(self, size: int) -> bytes:
        return self._content.read(size)

    def close(self) -> None:
        self._content.close()


class _Window:
    """Reads lines `line` to `line + limit - 1` of a source (owned), holding no others."""

    def __init__(
        self, source: _Descriptor | _Buffer, path: str, line: int, limit: int | None, most: int
    ) -> None:
        self._source = source
        self._path = path
        self._skip = line - 1
        self._wanted = limit
        self._most = most
        self._kept = bytearray()
        # The source is closed by whoever is the last to use it: the loop or, if the call is
        # cancelled during a slice, the thread.
        self._lock = threading.Lock()
        self._in_slice = False
        self._given_up = False

    async def read(self, keeping: Callable[[], asyncio.Semaphore]) -> str:
        """The text of the window. `keeping` is waited for before much of it is kept.

        Raises:
            RequestError: it is too large, no UTF-8, or the system failed.
        """
        try:
            size = self._source.size()
            if not self._skip and self._wanted is None and size > self._most:
                raise self._too_large()
            # A file that says it is small may be none: those of /proc say 0.
            if size <= INLINE_BYTES and self._advance(2):
                return self._text()
            # Whoever only passes lines over keeps nothing, and may take long.
            while self._skip:
                if (text := await _in_thread(partial(self._slice, skipping=True))) is not None:
                    return text
            async with keeping():
                while (text := await _in_thread(self._slice)) is None:
                    pass
                return text
        except OSError as error:
            raise os_failure("io_error", self._path, error) from error
        finally:
            self._give_up()

    def _slice(self, *, skipping: bool = False) -> str | None:
        """Read on for a while, in a thread; the text if the window is complete."""
        with self._lock:
            if self._given_up:
                return ""
            self._in_slice = True
        try:
            return self._text() if self._advance(_SLICE_CHUNKS, skipping=skipping) else None
        finally:
            with self._lock:
                self._in_slice = False
                if self._given_up:
                    self._source.close()

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if not self._in_slice:
                self._source.close()

    def _advance(self, chunks: int, *, skipping: bool = False) -> bool:
        """Read up to so many chunks, or to the window's begin; whether the window is complete."""
        for _ in range(chunks):
            if self._wanted == 0 or self._given_up:
                return True
            if skipping and not self._skip:
                return False
            chunk = self._source.read(_CHUNK)
            if not chunk:
                return True
            self._take(chunk)
        return False

    def _take(self, chunk: bytes) -> None:
        start = 0
        if self._skip:
            ends = chunk.count(b"\n")
            if ends < self._skip:
                self._skip -= ends
                return
            start = _after_line(chunk, 0, self._skip)
            self._skip = 0
        end = len(chunk)
        if self._wanted is not None:
            ends = chunk.count(b"\n", start)
            if ends >= self._wanted:
                end = _after_line(chunk, start, self._wanted)
            self._wanted -= min(ends, self._wanted)
        self._kept += memoryview(chunk)[start:end]
        if len(self._kept) > self._most:
            raise self._too_large()

    def _text(self) -> str:
        content = self._kept
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise refusal("not_utf8", path=self._path) from error
        # Counted only where the longest escape (`\u0000`) could matter.
        if len(content) * 6 > ANSWER_BYTES and _json_bytes(text) > ANSWER_BYTES:
            raise self._too_large()
        return text

    def _too_large(self) -> Exception:
        return refusal("file_too_large", path=self._path, limit=self._most)


def _after_line(chunk: bytes, start: int, count: int) -> int:
    """Where the line after the next `count` ends begins; there are at least so many."""
    for _ in range(count):
        start = chunk.index(b"\n", start) + 1
    return start


def _json_bytes(text: str) -> int:
    # The writer escapes U+2028 and U+2029: three bytes become six.
    breaks = text.count("\u2028") + text.count("\u2029")
    return len(msgspec.json.encode(text)) + 3 * breaks


def _replace(place: Place, content: bytes, path: str) -> None:
    """Put `content` where `place` (owned) leads."""
    try:
        place.make_parents()
        _write_beside_and_rename(place, content, path)
    except OSError as error:
        raise os_failure("write_failed", path, error) from error
    finally:
        place.close()


def _write_beside_and_rename(place: Place, content: bytes, path: str) -> None:
    directory, leaf = place.directory, place.leaf
    assert leaf is not None
    old: os.stat_result | None = None
    try:
        _require_regular(os.lstat(leaf, dir_fd=directory), path)
        # Renaming over a file needs no right to write it; opening it does.
        fd = os.open(leaf, os.O_WRONLY | _OPEN, dir_fd=directory)
    except FileNotFoundError:
        pass
    else:
        try:
            old = os.fstat(fd)
        finally:
            os.close(fd)
        _require_regular(old, path)
    beside = b".antiphon-" + secrets.token_hex(8).encode()
    mode = 0o666 if old is None else 0o600
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, mode, dir_fd=directory)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            if old is not None:
                _take_over(fd, old)
        finally:
            os.close(fd)
        os.rename(beside, leaf, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        # It may be gone already, and that is not what failed.
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=directory)
        raise


def _take_over(fd: int, old: os.stat_result) -> None:
    """Owner and permissions of the file that is replaced; set-id bits go, as with any write."""
    new = os.fstat(fd)
    mode = stat.S_IMODE(old.st_mode) & 0o777
    # Only root may give a file away, but to a group of one's own anybody may. Whoever was let
    # write a file may also have replaced it, so what cannot be kept is no reason to refuse.
    if not _owned(fd, old.st_uid, old.st_gid, new) and not _owned(fd, -1, old.st_gid, new):
        # The rights of that group are not for another one.
        mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    # Some file systems have one mode for all files, and refuse to hear of it.
    if stat.S_IMODE(new.st_mode) != mode:
        os.fchmod(fd, mode)


def _owned(fd: int, owner: int, group: int, now: os.stat_result) -> bool:
    if owner in {-1, now.st_uid} and group == now.st_gid:
        return True
    try:
        os.fchown(fd, owner, group)
    except OSError as error:
        if error.errno not in _NOT_OURS_TO_GIVE:
            raise
        return False
    return True
