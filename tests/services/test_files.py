"""Reading and writing files for an agent: windows, encodings, all-or-nothing writes, refusals."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from antiphon import _errors, services
from antiphon.schema import v1, v1_unstable
from antiphon.services import Files, Operation, Overlay
from antiphon.services import _files as files_module

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "path_reject_vectors.json").read_text("utf-8")
)["vectors"]
MIB = 1 << 20
SECRET = "TOP SECRET"


class Ctx:
    def __init__(self, *roots: str | Path, session_id: str = "s") -> None:
        self.session_id = session_id
        self.roots = [str(root) for root in roots]


async def read(files: Files, path: str | Path, ctx: Ctx | None = None, **window: Any) -> str:
    params = v1_unstable.ReadTextFileRequest(session_id="s", path=str(path), **window)
    return (await files.read_text_file(params, ctx or Ctx())).content


async def write(files: Files, path: str | Path, content: str, ctx: Ctx | None = None) -> None:
    params = v1_unstable.WriteTextFileRequest(session_id="s", path=str(path), content=content)
    answer = await files.write_text_file(params, ctx or Ctx())
    assert answer == v1.WriteTextFileResponse()


async def error_of(doing: Awaitable[object]) -> tuple[int, str, Any]:
    with pytest.raises(_errors.RequestError) as caught:
        await doing
    return caught.value.code, caught.value.message, caught.value.data


def allow(asked: list[Operation]) -> Callable[[Operation], Awaitable[bool]]:
    async def guard(operation: Operation) -> bool:
        asked.append(operation)
        return True

    return guard


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "w"
    folder.mkdir()
    return folder


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "a",
        "a\n",
        "\r\n",
        "a\nb\r\nc",
        "a\nb\r\nc\n",
        "\ufeffbom\r\n",
        "one\u2028line\u2029with\x85no\x0bline\x0cend\x1cat\rall",
        "€漢😀\n\0\x7f",
        "x" * 300_000 + "\n" + "é" * 300_000,
    ],
)
async def test_a_whole_text_comes_as_it_is(root: Path, content: str) -> None:
    (root / "f").write_bytes(content.encode())
    assert await read(Files(root), root / "f") == content
    assert await read(Files(root), root / "f", line=None, limit=None) == content


@pytest.mark.parametrize("content", [b"a\nb\r\nc", b"a\nb\r\nc\n"])
@pytest.mark.covers("R1-108")
async def test_a_window_is_an_exact_slice(root: Path, content: bytes) -> None:
    (root / "f").write_bytes(content)
    lines = content.decode().splitlines(keepends=True)
    counts: list[Any] = [UNSET, None, 0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1]
    for line, limit in itertools.product(counts, counts):
        first = line - 1 if line else 0
        after = None if limit in (UNSET, None) else first + limit
        expected = "".join(lines[first:after])
        assert await read(Files(root), root / "f", line=line, limit=limit) == expected


@pytest.mark.parametrize("window", [{"line": -1}, {"limit": -1}, {"line": 2**32}])
async def test_a_window_out_of_the_numbers_range_is_refused(
    root: Path, window: dict[str, Any]
) -> None:
    (root / "f").touch()
    code, _, data = await error_of(read(Files(root), root / "f", **window))
    assert (code, data["reason"]) == (-32602, "line_invalid")


@settings(max_examples=150)
@given(
    content=st.text(st.sampled_from("ab\n\r\né漢😀\u2028\ufeff"), max_size=60),
    line=st.integers(0, 12),
    limit=st.none() | st.integers(0, 12),
    chunk=st.integers(1, 9),
)
@pytest.mark.covers("R1-108")
def test_windows_equal_a_plain_reference_wherever_the_chunks_are_cut(
    content: str, line: int, limit: int | None, chunk: int
) -> None:
    parts = content.split("\n")
    lines = [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    first = max(line, 1) - 1
    expected = "".join(lines[first:] if limit is None else lines[first : first + limit])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "_CHUNK", chunk)
        path = Path(folder) / "f"
        path.write_bytes(content.encode())
        reading = read(Files(folder), path, line=line, limit=limit)
        assert asyncio.run(reading) == expected


@pytest.mark.covers("FF-44")
@settings(max_examples=30)
@given(content=st.text(st.sampled_from("a\n"), max_size=30), limit=st.integers(1, 5))
def test_windows_one_after_the_other_are_the_file(content: str, limit: int) -> None:
    async def all_windows(files: Files, path: Path) -> str:
        return "".join(
            [await read(files, path, line=line, limit=limit) for line in range(1, 32, limit)]
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_bytes(content.encode())
        assert asyncio.run(all_windows(Files(folder), path)) == content


async def test_a_window_of_a_huge_file_is_read_without_the_rest(root: Path) -> None:
    with (root / "f").open("wb") as file:
        file.write(b"first\nsecond\n")
        file.truncate(2 << 30)
    files = Files(root)
    assert await read(files, root / "f", line=1, limit=1) == "first\n"
    assert await read(files, root / "f", line=2, limit=1) == "second\n"
    code, _, data = await error_of(read(files, root / "f", line=3, limit=1))
    assert (code, data["reason"]) == (-32602, "file_too_large")
    code, _, data = await error_of(read(files, root / "f"))
    assert data == {"reason": "file_too_large", "path": f"{root}/f", "limit": 8 * MIB}


async def test_a_window_far_into_a_large_file(root: Path) -> None:
    (root / "f").write_bytes(b"".join(b"%d\n" % number for number in range(2_000_000)))
    files = Files(root)
    assert await read(files, root / "f", line=1_900_001, limit=2) == "1900000\n1900001\n"
    assert await read(files, root / "f", line=2_000_001) == ""


async def test_a_read_up_to_the_cap_is_answered_and_one_byte_more_is_not(root: Path) -> None:
    files = Files(root, read_bytes=10)
    (root / "f").write_bytes(b"123456789\n")
    assert await read(files, root / "f") == "123456789\n"
    (root / "f").write_bytes(b"123456789\nx")
    assert await read(files, root / "f", limit=1) == "123456789\n"
    windows: list[dict[str, Any]] = [{}, {"line": 1}, {"limit": 2}]
    for window in windows:
        code, _, data = await error_of(read(files, root / "f", **window))
        assert (code, data["reason"]) == (-32602, "file_too_large")


async def test_a_text_that_would_not_fit_a_frame_is_refused(root: Path) -> None:
    files = Files(root)
    (root / "f").write_bytes(b"\1" * (3 * MIB))  # 18 MiB as JSON
    code, _, data = await error_of(read(files, root / "f"))
    assert (code, data["reason"]) == (-32602, "file_too_large")
    (root / "f").write_bytes(b"x" * (3 * MIB))
    assert len(await read(files, root / "f")) == 3 * MIB
    (root / "f").write_text("\u2028" * (8 * MIB // 3))  # 16 MiB as it is written
    assert (await error_of(read(files, root / "f")))[2]["reason"] == "file_too_large"


@pytest.mark.parametrize("content", [b"\xff", b"a\xe2\x82", b"\xed\xa0\x80", b"\0\x80"])
async def test_what_is_no_utf8_is_an_error_and_never_replaced(root: Path, content: bytes) -> None:
    (root / "f").write_bytes(content)
    code, _, data = await error_of(read(Files(root), root / "f"))
    assert (code, data) == (-32602, {"reason": "not_utf8", "path": f"{root}/f"})


async def test_only_the_lines_asked_for_must_be_utf8(root: Path) -> None:
    (root / "f").write_bytes(b"good\n\xff\ngood\n")
    assert await read(Files(root), root / "f", line=3) == "good\n"


@pytest.mark.covers("R1-107", "FF-43")
async def test_a_missing_file_is_not_found_with_its_uri(root: Path) -> None:
    (root / "dangling").symlink_to("nowhere")
    for name in ("no file", "no/file", "dangling"):
        code, message, data = await error_of(read(Files(root), root / name, limit=0))
        assert (code, message) == (-32002, "Resource not found")
        assert data == {"uri": f"file://{root}/{name}".replace(" ", "%20")}


@pytest.mark.covers("FF-42")
async def test_what_is_no_regular_file_is_refused_without_blocking(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "d").mkdir()
    (root / "to fifo").symlink_to("fifo")
    (root / "socket").symlink_to("fifo")
    if sys.platform == "linux":
        (root / "socket").unlink()
        os.mknod(root / "socket", stat.S_IFSOCK | 0o600)
    files = Files(root)
    paths = [str(root), f"{root}/d", f"{root}/d/"]
    for path in (*paths, f"{root}/fifo", f"{root}/to fifo", f"{root}/socket"):
        for doing in (read(files, path), write(files, path, "x")):
            code, _, data = await error_of(doing)
            assert (code, data) == (-32602, {"reason": "not_a_regular_file", "path": str(path)})
    for path in ("/dev/zero", "/dev/null", "/dev/tty"):
        code, _, data = await error_of(read(Files("/dev"), path))
        assert data["reason"] == "not_a_regular_file"
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode)


async def test_a_fifo_put_in_place_of_the_file_is_refused_without_blocking(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").touch()
    os.mkfifo(root / "fifo")
    real_lstat = os.lstat

    def swapping(path: Any, **kwargs: Any) -> os.stat_result:
        status = real_lstat(path, **kwargs)
        if path == b"f":
            (root / "fifo").rename(root / "f")
        return status

    monkeypatch.setattr(os, "lstat", swapping)
    code, _, data = await error_of(read(Files(root), root / "f"))
    assert (code, data["reason"]) == (-32602, "not_a_regular_file")


async def test_other_failures_are_not_taken_for_a_missing_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").touch()
    real_open = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == b"f" and not args[0] & os.O_DIRECTORY:
            raise PermissionError(13, "secret text")
        return real_open(path, *args, **kwargs)

    files = Files(root)
    monkeypatch.setattr(os, "open", refusing)
    for doing, reason in (
        (read(files, root / "f"), "io_error"),
        (write(files, root / "f", "x"), "write_failed"),
    ):
        code, message, data = await error_of(doing)
        assert (code, message) == (-32603, "Internal error")
        assert data == {"reason": reason, "path": f"{root}/f", "errno": "EACCES"}


async def test_a_cancelled_read_stops_and_gives_its_descriptor_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (root / "f").open("wb") as file:
        file.truncate(1 << 40)
    started = threading.Event()
    real_read = os.read

    def noting(fd: int, size: int) -> bytes:
        started.set()
        return real_read(fd, size)

    monkeypatch.setattr(os, "read", noting)
    reading = asyncio.create_task(read(Files(root), root / "f", line=2))
    await asyncio.to_thread(started.wait, 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("window", [{}, {"line": 2}, {"line": 2, "limit": 10}])
async def test_many_large_reads_at_once_keep_few_answers(root: Path, window: Any) -> None:
    lines = "x" * (1 << 20) + "\n"
    (root / "large").write_text("\n" + lines * 4)
    files = Files(root)

    async def one() -> int:
        return len(await read(files, root / "large", **window))

    tracemalloc.start()
    try:
        lengths = await asyncio.gather(*(one() for _ in range(128)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(lengths) == {4 * len(lines) + (not window)}
    assert most < 160 << 20  # all of them would be 512 MiB, and as much again as text


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nobody tells the descriptors")
@pytest.mark.parametrize("asks", [False, True])
async def test_a_thousand_reads_at_once_open_few_files(
    root: Path, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def guard(_operation: Operation) -> bool:
        await asyncio.sleep(0)
        return True

    (root / "f").write_text("x" * 300_000)
    files = Files(root, guard=guard, guard_reads=asks)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    real_open = files_module._open_regular

    def noting(place: Any, path: str) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return real_open(place, path)

    monkeypatch.setattr(files_module, "_open_regular", noting)

    async def one() -> int:
        return len(await read(files, root / "f"))

    assert await asyncio.gather(*(one() for _ in range(1000))) == [300_000] * 1000
    assert most - before < 300


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.covers("R1-106")
async def test_a_write_creates_the_file_and_its_parents(root: Path) -> None:
    old = os.umask(0o027)
    try:
        await write(Files(root), root / "a" / "b" / "f", "text\r\n\ufeff\u2028")
    finally:
        os.umask(old)
    assert (root / "a" / "b" / "f").read_bytes() == "text\r\n\ufeff\u2028".encode()
    assert stat.S_IMODE((root / "a" / "b" / "f").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o750
    assert os.listdir(root / "a" / "b") == ["f"]


async def test_parents_are_made_only_if_wanted(root: Path) -> None:
    files = Files(root, create_parents=False)
    code, _, data = await error_of(write(files, root / "a" / "f", "x"))
    assert (code, data) == (-32002, {"uri": f"file://{root}/a/f"})
    assert os.listdir(root) == []
    await write(files, root / "f", "x")


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o664])
async def test_a_write_keeps_the_permissions(root: Path, mode: int) -> None:
    (root / "f").write_text("old and longer")
    (root / "f").chmod(mode | stat.S_ISUID)
    await write(Files(root), root / "f", "new")
    assert (root / "f").read_text() == "new"
    assert stat.S_IMODE((root / "f").stat().st_mode) == mode


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 5 * MIB])
async def test_a_write_of_any_size_is_whole(root: Path, size: int) -> None:
    files = Files(root)
    await write(files, root / "f", "x" * size)
    assert (root / "f").read_bytes() == b"x" * size
    assert await read(files, root / "f") == "x" * size
    assert os.listdir(root) == ["f"]


async def test_a_write_follows_links_inside_and_leaves_them(root: Path) -> None:
    (root / "d").mkdir()
    (root / "l").symlink_to("d/target")
    files = Files(root)
    for content in ("created through a dangling link", "replaced"):
        await write(files, root / "l", content)
        assert (root / "l").is_symlink()
        assert not (root / "d" / "target").is_symlink()
        assert (root / "d" / "target").read_text() == content


async def test_a_write_leaves_the_other_name_of_a_hard_link_as_it_was(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("old")
    (root / "f").hardlink_to(tmp_path / "outside")
    await write(Files(root), root / "f", "new")
    assert (tmp_path / "outside").read_text() == "old"
    assert (root / "f").read_text() == "new"


async def test_a_lone_surrogate_is_not_written(root: Path) -> None:
    code, _, data = await error_of(write(Files(root), root / "f", "\ud800"))
    assert (code, data["reason"]) == (-32602, "not_utf8")
    assert os.listdir(root) == []


@pytest.mark.parametrize("step", ["write", "fchmod", "rename"])
async def test_a_failing_step_leaves_the_old_file_and_nothing_else(
    root: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_text("old")

    def failing(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "no space")

    files = Files(root)
    monkeypatch.setattr(os, step, failing)
    code, message, data = await error_of(write(files, root / "f", "new"))
    assert (code, message) == (-32603, "Internal error")
    assert data == {"reason": "write_failed", "path": f"{root}/f", "errno": "ENOSPC"}
    assert (root / "f").read_text() == "old"
    assert os.listdir(root) == ["f"]


async def test_a_file_that_may_not_be_written_is_not_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_text("old")
    real_open = os.open

    def as_another_user(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == b"f" and flags & os.O_WRONLY:
            raise PermissionError(13, "no")
        return real_open(path, flags, *args, **kwargs)

    files = Files(root)
    monkeypatch.setattr(os, "open", as_another_user)
    assert (await error_of(write(files, root / "f", "new")))[2]["errno"] == "EACCES"
    assert (root / "f").read_text() == "old"


@pytest.mark.parametrize(
    ("owner", "allowed", "mode"),
    [
        # The file's own owner and group, whether the whole and whether the group can be kept.
        ((0, 0), "nothing", 0o664),
        ((4711, 0), "nothing", 0o664),
        ((4711, 42), "all", 0o664),
        ((4711, 42), "group", 0o664),
        ((0, 42), "all", 0o664),
        ((4711, 42), "nothing", 0o644),  # of "rw-rw-r--" what others may
        ((0, 42), "nothing", 0o644),
    ],
)
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOTSUP])
async def test_owner_and_group_are_kept_where_that_is_allowed_and_no_other_group_gains(
    root: Path,
    owner: tuple[int, int],
    allowed: str,
    mode: int,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (root / "f").write_text("old")
    (root / "f").chmod(0o664)
    given: list[tuple[int, int]] = []
    real_fstat = os.fstat

    def owned(fd: int) -> os.stat_result:
        status = real_fstat(fd)
        ids = owner if status.st_size else (0, 0)
        return os.stat_result((*status[:4], *ids, *status[6:10]))

    def fchown(fd: int, *ids: int) -> None:
        if allowed == "all" or (allowed == "group" and ids[0] == -1):
            given.append((ids[0], ids[1]))
        else:
            raise OSError(number, "not yours")

    files = Files(root)
    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "fchown", fchown)
    await write(files, root / "f", "")
    expected = {"nothing": [], "all": [owner], "group": [(-1, owner[1])]}
    assert given == expected[allowed]
    assert (root / "f").read_text() == ""
    assert stat.S_IMODE((root / "f").stat().st_mode) == mode


async def test_a_mode_that_is_right_already_is_not_set(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fchmod(fd: int, mode: int) -> None:
        raise PermissionError(1, "this file system has no modes")

    (root / "f").write_text("old")
    (root / "f").chmod(0o600)  # as every new file is here
    files = Files(root)
    monkeypatch.setattr(os, "fchmod", fchmod)
    await write(files, root / "f", "new")
    assert (root / "f").read_text() == "new"


async def test_a_write_for_which_no_thread_starts_fails_and_delays_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(executor: object, work: Any) -> Any:
        work.args[0].close()  # it never runs
        raise RuntimeError("can't start new thread")

    files = Files(root)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await write(files, root / "f", "x" * MIB)
    assert files._writing == {}
    await write(files, root / "f", "y" * MIB)
    assert (root / "f").read_text() == "y" * MIB


async def test_readers_see_the_old_text_or_the_new_and_nothing_between(root: Path) -> None:
    files = Files(root)
    texts = {letter * MIB for letter in "abc"}
    await write(files, root / "f", "a" * MIB)
    stop = threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not stop.is_set():
            seen.add((root / "f").read_text())

    watching = asyncio.get_running_loop().run_in_executor(None, watch)
    for _ in range(10):
        await asyncio.gather(*(write(files, root / "f", text) for text in texts))
    stop.set()
    await watching
    assert seen <= texts


async def test_writes_to_one_file_happen_in_the_order_they_came(root: Path) -> None:
    files = Files(root)
    for last in ("small", "x" * (2 * MIB)):
        await asyncio.gather(
            *(write(files, root / "new" / "f", str(n) * MIB) for n in range(4)),
            write(files, root / "new" / ".." / "new" / "f", last),
        )
        assert (root / "new" / "f").read_text() == last
    assert files._writing == {}


async def test_a_cancelled_write_lets_the_next_one_pass_in_order(root: Path) -> None:
    asked: list[str] = []
    go = asyncio.Event()

    async def guard(operation: Operation) -> bool:
        asked.append(operation.title)
        await go.wait()
        return True

    files = Files(root, guard=guard)
    tasks = [asyncio.create_task(write(files, root / "f", str(n))) for n in range(4)]
    while not asked:
        await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks[1:3])
    assert len(asked) == 1  # the last one still waits for the first
    go.set()
    await asyncio.gather(tasks[0], tasks[3])
    assert (root / "f").read_text() == "3"
    assert files._writing == {}


async def test_a_large_write_that_is_cancelled_ends_before_the_next_begins(root: Path) -> None:
    files = Files(root)
    first = asyncio.create_task(write(files, root / "f", "x" * (8 * MIB)))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(write(files, root / "f", "second"))
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert (root / "f").read_text() == "second"
    assert os.listdir(root) == ["f"]


# --- unsaved texts ------------------------------------------------------------------------------


class Editor(Overlay):
    """Open texts by their path, and every question it was asked."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.asked: list[str] = []

    def read(self, path: str) -> str | None:
        self.asked.append(path)
        return self.texts.get(path)

    def write(self, path: str, content: str) -> bool:
        self.asked.append(path)
        if path not in self.texts:
            return False
        self.texts[path] = content
        return True


class AsyncEditor(Editor):
    async def read(self, path: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().read(path)

    async def write(self, path: str, content: str) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().write(path, content)


@pytest.mark.covers("R1-110")
@pytest.mark.parametrize("kind", [Editor, AsyncEditor])
async def test_an_unsaved_text_is_read_and_written_in_place_of_the_file(
    root: Path, kind: type[Editor]
) -> None:
    (root / "open").write_text("saved")
    (root / "other").write_text("saved")
    (root / "link").symlink_to("open")
    editor = kind({f"{root}/open": "not saved", f"{root}/new/file": "never saved"})
    files = Files(root, overlay=editor)
    assert await read(files, root / "open") == "not saved"
    assert await read(files, root / "link") == "not saved"
    assert await read(files, root / "new" / "file") == "never saved"
    assert await read(files, root / "other") == "saved"
    for name in ("link", "new/file", "other"):
        await write(files, root / name, "by the agent")
    assert set(editor.texts.values()) == {"by the agent"}
    assert (root / "open").read_text() == "saved"
    assert (root / "other").read_text() == "by the agent"
    assert sorted(os.listdir(root)) == ["link", "open", "other"]
    assert await read(files, root / "open") == "by the agent"


async def test_an_overlay_may_leave_out_either_method(root: Path) -> None:
    class ReadOnly(Overlay):
        def read(self, path: str) -> str | None:
            return "not saved"

    class WriteOnly(Overlay):
        def write(self, path: str, content: str) -> bool:
            return True

    (root / "f").write_text("saved")
    await write(Files(root, overlay=WriteOnly()), root / "f", "taken")
    assert await read(Files(root, overlay=WriteOnly()), root / "f") == "saved"
    await write(Files(root, overlay=ReadOnly()), root / "f", "written")
    assert await read(Files(root, overlay=ReadOnly()), root / "f") == "not saved"
    assert (root / "f").read_text() == "written"


async def test_an_overlay_is_never_asked_about_what_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(SECRET)
    (root / "l").symlink_to(tmp_path / "out")
    (root / "d").mkdir()
    editor = Editor({f"{tmp_path}/out": SECRET, f"{root}/d": SECRET, str(root): SECRET})
    paths = [f"{tmp_path}/out", f"{root}/l", f"{root}/../out", "out", str(root), f"{root}/d/"]
    for files in (Files(root, overlay=editor), Files(root, overlay=editor, allow_write=False)):
        for path in paths:
            await error_of(read(files, path))
            await error_of(write(files, path, "x"))
    await error_of(write(Files(root, overlay=editor), f"{root}/new/", "x"))
    assert editor.asked == []


async def test_an_overlay_is_asked_only_for_what_the_guard_allows(root: Path) -> None:
    answers = iter([False, False, True, True])
    kinds: list[str] = []

    async def guard(operation: Operation) -> bool:
        kinds.append(operation.kind)
        assert editor.asked == []
        return next(answers)

    path = f"{root}/f"
    editor = Editor({path: "not saved"})
    files = Files(root, overlay=editor, guard=guard, guard_reads=True)
    assert (await error_of(read(files, path)))[2] == {"reason": "permission_denied"}
    assert (await error_of(write(files, path, "x")))[2] == {"reason": "permission_denied"}
    assert await read(files, path) == "not saved"
    editor.asked.clear()
    await write(files, path, "x")
    assert kinds == ["read", "write", "read", "write"]
    assert editor.texts == {path: "x"}


@settings(max_examples=60)
@given(
    content=st.text(st.sampled_from("ab\n\r\né漢😀\u2028\ufeff"), max_size=40),
    line=st.none() | st.integers(0, 9),
    limit=st.none() | st.integers(0, 9),
)
@pytest.mark.covers("R1-108", "R1-110")
def test_a_window_of_an_unsaved_text_is_that_of_a_file_that_has_it(
    content: str, line: int | None, limit: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder).resolve() / "f")
        Path(path).write_bytes(content.encode())
        unsaved = Files(folder, overlay=Editor({path: content}))
        Path(f"{path}2").write_bytes(content.encode())
        texts = [
            asyncio.run(read(unsaved, name, line=line, limit=limit)) for name in (path, f"{path}2")
        ]
    assert texts[0] == texts[1]


async def test_an_unsaved_text_keeps_to_the_limits_of_a_file(root: Path) -> None:
    path = f"{root}/f"
    text = "".join(f"{number}\n" for number in range(1_000_000))
    files = Files(root, overlay=Editor({path: text}), read_bytes=1000)
    assert await read(files, path, line=900_001, limit=2) == "900000\n900001\n"
    windows: list[dict[str, Any]] = [{}, {"line": 2}, {"limit": 1001}]
    for window in windows:
        assert (await error_of(read(files, path, **window)))[2]["reason"] == "file_too_large"
    files = Files(root, overlay=Editor({path: "\ud800"}))
    assert await error_of(read(files, path)) == (
        -32602,
        "Invalid params",
        {"reason": "not_utf8", "path": path},
    )


async def test_what_an_overlay_raises_fails_the_call_and_nothing_is_written(root: Path) -> None:
    class Broken(Overlay):
        def read(self, path: str) -> str | None:
            raise ZeroDivisionError

        async def write(self, path: str, content: str) -> bool:
            raise _errors.RequestError(-32000, "Locked")

    files = Files(root, overlay=Broken())
    with pytest.raises(ZeroDivisionError):
        await read(files, root / "f")
    assert (await error_of(write(files, root / "f", "x")))[:2] == (-32000, "Locked")
    assert os.listdir(root) == []
    assert files._writing == {}


@pytest.mark.parametrize("answer", [b"bytes", 1, True])
async def test_what_is_no_text_is_an_error_of_the_overlay(root: Path, answer: Any) -> None:
    class Wrong(Overlay):
        def read(self, path: str) -> str | None:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="not str or None"):
        await read(Files(root, overlay=Wrong()), root / "f")


@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
async def test_only_true_of_an_overlay_keeps_a_write_from_the_disk(root: Path, answer: Any) -> None:
    class Wrong(Overlay):
        def write(self, path: str, content: str) -> bool:
            return answer  # type: ignore[no-any-return]

    await write(Files(root, overlay=Wrong()), root / "f", "x")
    assert (root / "f").read_text() == "x"


async def test_writes_that_an_overlay_takes_keep_their_order_with_the_others(root: Path) -> None:
    events: list[str] = []
    go = asyncio.Event()

    class Slow(Overlay):
        async def write(self, path: str, content: str) -> bool:
            events.append(f"begin {content}")
            if content == "1":
                await go.wait()
            events.append(f"end {content}")
            return content != "2"

    files = Files(root, overlay=Slow())
    tasks = [asyncio.create_task(write(files, root / "f", str(n))) for n in (1, 2, 3)]
    while not events:
        await asyncio.sleep(0)
    assert events == ["begin 1"]
    go.set()
    await asyncio.gather(*tasks)
    assert events == [f"{word} {n}" for n in (1, 2, 3) for word in ("begin", "end")]
    assert (root / "f").read_text() == "2"


async def test_cancelling_a_call_cancels_what_the_overlay_waits_for(root: Path) -> None:
    ended: list[str] = []
    started = asyncio.Event()

    class Stuck(Overlay):
        async def read(self, path: str) -> str | None:
            await self.wait("read")
            return None

        async def write(self, path: str, content: str) -> bool:
            await self.wait("write")
            return False

        async def wait(self, what: str) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(what)

    files = Files(root, overlay=Stuck())
    for doing in (read(files, root / "f"), write(files, root / "f", "x")):
        started.clear()
        task = asyncio.ensure_future(doing)
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert ended == ["read", "write"]
    assert os.listdir(root) == []
    assert files._writing == {}


# --- confinement --------------------------------------------------------------------------------


@pytest.mark.covers("FF-42")
@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if "ref_format" not in v], ids=lambda v: v["name"]
)
async def test_a_reject_vector_is_neither_read_nor_written(
    vector: dict[str, Any], tmp_path: Path
) -> None:
    for entry in vector["setup"]:
        if "dir" in entry:
            (tmp_path / entry["dir"]).mkdir(parents=True)
        elif "file" in entry:
            (tmp_path / entry["file"]).write_text(entry["content"])
        else:
            (tmp_path / entry["symlink"]).symlink_to(entry["target"])
    before = sorted(tmp_path.rglob("*"))
    root = tmp_path / vector["root"]
    path = f"{root}/{vector['requested']}"
    for files, ctx in ((Files(root), Ctx()), (Files(), Ctx(root))):
        for doing in (read(files, path, ctx), write(files, path, "overwritten", ctx)):
            code, message, data = await error_of(doing)
            assert (code, message) == (-32602, "Invalid params")
            assert data == {"reason": vector["expect"], "path": path}
    assert sorted(tmp_path.rglob("*")) == before
    assert all(f.read_text() == SECRET for f in before if f.is_file() and not f.is_symlink())


@pytest.mark.covers("R1-109")
async def test_a_relative_path_is_refused_though_it_would_be_inside(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    (root / "f").touch()
    for doing in (read(Files(root), "f"), write(Files(root), "f", "x")):
        code, _, data = await error_of(doing)
        assert (code, data) == (-32602, {"reason": "path_not_absolute", "path": "f"})


async def test_each_session_reads_in_its_own_directories(tmp_path: Path) -> None:
    one, two, extra = tmp_path / "one", tmp_path / "two", tmp_path / "extra"
    for folder in (one, two, extra):
        folder.mkdir()
        (folder / "f").write_text(folder.name)
    files = Files()
    first, second = Ctx(one, extra, session_id="1"), Ctx(two, session_id="2")
    assert await read(files, one / "f", first) == "one"
    assert await read(files, extra / "f", first) == "extra"
    assert await read(files, two / "f", second) == "two"
    for path in (one / "f", extra / "f"):
        assert (await error_of(read(files, path, second)))[2]["reason"] == "path_traversal"
    assert (await error_of(read(files, one / "f", Ctx())))[2]["reason"] == "path_traversal"
    await files.release_session("1")
    assert await read(files, one / "f", first) == "one"


def test_a_root_that_does_not_exist_is_an_error_when_it_is_lent(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Files(root / "none")


# --- being asked --------------------------------------------------------------------------------


async def test_the_guard_is_asked_before_each_write_with_the_real_path(root: Path) -> None:
    (root / "d").mkdir()
    (root / "l").symlink_to("d/f")
    asked: list[Operation] = []
    files = Files(root, guard=allow(asked))
    await write(files, root / "l", "x")
    await read(files, root / "l")
    title, path = f"Write {root}/d/f", f"{root}/d/f"
    assert asked == [
        Operation(
            kind="write",
            session_id="s",
            title=title,
            path=path,
            requested=f"{root}/l",
            roots=(str(root),),
        )
    ]


async def test_the_guard_is_asked_before_reads_only_if_that_is_wanted(root: Path) -> None:
    (root / "f").write_text("text")
    (root / "l").symlink_to("f")
    asked: list[Operation] = []
    assert await read(Files(root, guard=allow(asked)), root / "l") == "text"
    assert asked == []
    files = Files(root, guard=allow(asked), guard_reads=True)
    assert await read(files, root / "l") == "text"
    title, path = f"Read {root}/f", f"{root}/f"
    assert asked == [
        Operation(
            kind="read",
            session_id="s",
            title=title,
            path=path,
            requested=f"{root}/l",
            roots=(str(root),),
        )
    ]


async def test_a_read_that_is_not_allowed_does_not_tell_what_is_there(root: Path) -> None:
    async def refuse(operation: Operation) -> bool:
        return False

    (root / "f").write_text("text")
    (root / "d").mkdir()
    files = Files(root, guard=refuse, guard_reads=True)
    for name in ("f", "d", "none"):
        assert await error_of(read(files, root / name)) == (
            -32603,
            "Permission denied",
            {"reason": "permission_denied"},
        )


async def test_one_guard_can_be_put_before_a_service_that_has_none(root: Path) -> None:
    (root / "f").write_text("text")
    own: list[Operation] = []
    policy: list[Operation] = []
    files = Files(root)
    files.guard_with(allow(policy), reads=True)
    await read(files, root / "f")
    await write(files, root / "f", "x")
    assert [operation.kind for operation in policy] == ["read", "write"]
    files = Files(root, guard=allow(own))
    files.guard_with(allow(policy), reads=True)
    await read(files, root / "f")
    await write(files, root / "f", "x")
    assert [operation.kind for operation in own] == ["write"]
    assert len(policy) == 2
    files = Files(root, guard_reads=True)
    files.guard_with(allow(policy), reads=False)
    await read(files, root / "f")
    assert len(policy) == 3


@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
async def test_anything_but_true_refuses_and_leaves_everything(root: Path, answer: Any) -> None:
    async def guard(operation: Operation) -> bool:
        return answer  # type: ignore[no-any-return]

    code, message, data = await error_of(write(Files(root, guard=guard), root / "a" / "f", "x"))
    assert (code, message) == (-32603, "Permission denied")
    assert data == {"reason": "permission_denied"}
    assert os.listdir(root) == []


async def test_a_guard_that_fails_allows_nothing(root: Path) -> None:
    async def guard(operation: Operation) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write(Files(root, guard=guard), root / "f", "x")
    assert os.listdir(root) == []


@pytest.mark.parametrize("given", ["no", 0, 1])
def test_what_does_not_say_who_may_write_is_refused(root: Path, given: Any) -> None:
    with pytest.raises(TypeError, match="allow_write is True, False or None, not"):
        Files(root, allow_write=given)


async def test_the_guard_is_not_asked_about_what_is_refused_anyway(root: Path) -> None:
    asked: list[Operation] = []
    files = Files(root, guard=allow(asked))
    for path in ("/etc/passwd", root, f"{root}/new/"):
        await error_of(write(files, path, "x"))
    assert asked == []


async def test_write_access_can_be_given_or_withheld_without_asking(root: Path) -> None:
    asked: list[Operation] = []
    await write(Files(root, allow_write=True, guard=allow(asked)), root / "f", "x")
    files = Files(root, allow_write=False, guard=allow(asked))
    assert not files.writable
    assert Files(root).writable
    assert (await error_of(write(files, root / "f", "y")))[2] == {"reason": "permission_denied"}
    assert asked == []
    assert await read(files, root / "f") == "x"


async def test_the_place_that_was_allowed_is_the_one_written_whatever_is_swapped_meanwhile(
    root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "out"
    outside.mkdir()
    (root / "d").mkdir()

    async def guard(operation: Operation) -> bool:
        (root / "d").rename(root / "moved")
        (root / "d").symlink_to(outside)
        return True

    await write(Files(root, guard=guard), root / "d" / "f", "x")
    assert os.listdir(outside) == []
    assert (root / "moved" / "f").read_text() == "x"


async def test_a_link_put_in_place_of_the_file_while_asking_is_not_written_through(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text(SECRET)
    (root / "f").write_text("old")

    async def guard(operation: Operation) -> bool:
        (root / "f").unlink()
        (root / "f").symlink_to(tmp_path / "out")
        return True

    files = Files(root, guard=guard)
    assert (await error_of(write(files, root / "f", "x")))[2]["reason"] == "not_a_regular_file"
    assert (tmp_path / "out").read_text() == SECRET
    assert sorted(os.listdir(root)) == ["f"]


def test_who_lends_files_alone_loads_neither_forms_nor_policies_nor_commands() -> None:
    program = """
import sys
from antiphon import services
def loaded():
    return [name.rpartition(".")[2] for name in sys.modules if name.startswith("antiphon.services._")]
print(loaded())
services.Files
print(sorted(loaded()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "[]\n['_confine', '_context', '_files']\n")


def test_a_name_that_no_service_has_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        services.Nothing
    assert set(dir(services)) >= {"Files", "Terminals", "Permissions", "Elicitation"}
