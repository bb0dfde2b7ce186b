"""`fs/read_text_file` and `fs/write_text_file`, confined to directories that were lent.

Finding a path is left to `_confine`, deciding about a write to the guard. What is done here is done
relative to the descriptor of the place found: exact windows of lines in bounded memory, and writes
that are seen whole or not at all.

Small files (up to 256 KiB) are read and written on the event loop: a hop to a thread and back costs
more than the work. Larger ones, and windows of larger ones, go to the loop's threads, so that a
2 GiB file delays nobody.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from antiphon.schema import v1
from antiphon.services._confine import Pins, not_found, os_failure
from antiphon.services._context import Operation, denied, permit, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.schema import v1_unstable
    from antiphon.services._confine import Place
    from antiphon.services._context import Guard, ServiceContext

__all__ = ["Files"]

MIB: Final = 1 << 20
#: The most that one read answers, in bytes of the file (DESIGN §5).
READ_BYTES: Final = 8 * MIB
#: The most that an answer may take as JSON: a frame of 16 MiB less its envelope. A text of control
#: characters is six times as long on the wire.
ANSWER_BYTES: Final = 16 * MIB - 64 * 1024
#: Up to this size the work is done on the event loop.
INLINE_BYTES: Final = 256 * 1024
_CHUNK: Final = 256 * 1024
# What the schema means by line and limit.
_UNSIGNED_32: Final = 2**32 - 1

# A FIFO must not block the open, a terminal must not become ours, a link is never followed here.
_OPEN: Final = (
    os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | os.O_NOCTTY
    if hasattr(os, "O_CLOEXEC")
    else 0
)

_T = TypeVar("_T")


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
        guard: asked before each write (see `Operation`); anything but True refuses.
        guard_reads: ask the guard before each read as well.
        create_parents: whether a write makes the missing directories above the file.
        read_bytes: the most that one read answers, in bytes of the file.

    Raises:
        OSError: a root does not exist or is no directory.
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
    ) -> None:
        self.allow_write = allow_write
        self.guard = guard
        self.guard_reads = guard_reads
        self.create_parents = create_parents
        self.read_bytes = read_bytes
        self._pins = Pins(roots)
        self._writing: dict[str, asyncio.Future[None]] = {}

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
        with self._pins.roots(ctx).locate(params.path) as place:
            if self.guard_reads:
                # Asked first: a refusal by the guard does not tell what is there.
                await self._ask("read", place, params.path, ctx)
            fd, status = _open_regular(place, params.path)
        window = _Window(fd, params.path, max(line or 1, 1), limit, self.read_bytes)
        if status.st_size <= INLINE_BYTES:
            return v1.ReadTextFileResponse(content=window.read())
        try:
            return v1.ReadTextFileResponse(content=await _in_thread(window.read))
        finally:
            window.stop.set()

    async def write_text_file(
        self, params: v1_unstable.WriteTextFileRequest, ctx: ServiceContext
    ) -> v1.WriteTextFileResponse:
        """Replace the file's content, or create it: all or nothing, permissions kept.

        The text goes to a new file beside the old one, which is then renamed over it; a link
        inside the roots is followed and stays. That is safe against a crash of this process, not
        against a loss of power. Writes to one file happen one after the other in the order in
        which they came. Source: R1-106.

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
        place = self._pins.roots(ctx).locate(params.path)
        handed_over = False
        try:
            _check_replaceable(place, params.path)
            if place.missing and not self.create_parents:
                raise not_found(params.path)
            turn = _WriteTurn(self._writing, place.path)
            try:
                await turn.wait()
                if self.allow_write is None:
                    await self._ask("write", place, params.path, ctx)
                work = partial(_replace, place, content, params.path)
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
        return v1.WriteTextFileResponse()

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
            ),
        )

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
    future = asyncio.get_running_loop().run_in_executor(None, work)
    if done is not None:
        future.add_done_callback(lambda _: done())
    return await asyncio.shield(future)


def _count(value: int | msgspec.UnsetType | None, default: int | None) -> int | None:
    if value is None or value is msgspec.UNSET:
        return default
    if not 0 <= value <= _UNSIGNED_32:
        raise refusal("line_invalid", value=value)
    return value


def _open_regular(place: Place, path: str) -> tuple[int, os.stat_result]:
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
        status = os.fstat(fd)
        _require_regular(status, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


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


class _Window:
    """Reads lines `line` to `line + limit - 1` of an open file (owned), holding no others."""

    def __init__(self, fd: int, path: str, line: int, limit: int | None, most: int) -> None:
        self._fd = fd
        self._path = path
        self._skip = line - 1
        self._limit = limit
        self._most = most
        self.stop = threading.Event()

    def read(self) -> str:
        try:
            return self._text(self._bytes())
        except OSError as error:
            raise os_failure("io_error", self._path, error) from error
        finally:
            os.close(self._fd)

    def _bytes(self) -> bytearray:
        kept = bytearray()
        skip, wanted = self._skip, self._limit
        if wanted == 0:
            return kept
        if not skip and wanted is None and os.fstat(self._fd).st_size > self._most:
            raise self._too_large()
        while not self.stop.is_set() and (chunk := os.read(self._fd, _CHUNK)):
            start = 0
            if skip:
                ends = chunk.count(b"\n")
                if ends < skip:
                    skip -= ends
                    continue
                start = _after_line(chunk, 0, skip)
                skip = 0
            if wanted is None:
                kept += memoryview(chunk)[start:]
            else:
                ends = chunk.count(b"\n", start)
                end = _after_line(chunk, start, wanted) if ends >= wanted else len(chunk)
                kept += memoryview(chunk)[start:end]
                wanted -= min(ends, wanted)
            if len(kept) > self._most:
                raise self._too_large()
            if wanted == 0:
                break
        return kept

    def _text(self, content: bytearray) -> str:
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
        os.unlink(beside, dir_fd=directory)
        raise


def _take_over(fd: int, old: os.stat_result) -> None:
    """Owner and permissions of the file that is replaced; set-id bits go, as with any write."""
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except OSError as error:
            # Only root may give a file away. Whoever was let write it may also have replaced it.
            if error.errno != errno.EPERM:
                raise
    os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)
