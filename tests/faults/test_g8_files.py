"""Field faults 42 to 44: escapes from lent directories, missing files, windows of lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import tempfile
import tracemalloc
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import UNSET

from antiphon._errors import RequestError
from antiphon.schema import v1_unstable
from antiphon.services import Files, Operation, Terminals
from antiphon.services._files import HELD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Iterator

SECRET = "TOP SECRET"
MIB = 1 << 20
Answer = tuple[int, str, Any]


class Ctx:
    def __init__(self, *roots: str | Path, session_id: str = "s") -> None:
        self.session_id = session_id
        self.roots = [str(root) for root in roots]


async def read(files: Files, path: str | Path, ctx: Ctx | None = None, **window: Any) -> str:
    params = v1_unstable.ReadTextFileRequest(session_id="s", path=str(path), **window)
    return (await files.read_text_file(params, ctx or Ctx())).content


async def write(files: Files, path: str | Path, content: str, ctx: Ctx | None = None) -> None:
    params = v1_unstable.WriteTextFileRequest(session_id="s", path=str(path), content=content)
    await files.write_text_file(params, ctx or Ctx())


async def start(terminals: Terminals, cwd: str | Path, ctx: Ctx | None = None) -> None:
    params = v1_unstable.CreateTerminalRequest(session_id="s", command="true", cwd=str(cwd))
    await terminals.create_terminal(params, ctx or Ctx())


async def error_of(doing: Awaitable[object]) -> Answer:
    with pytest.raises(RequestError) as caught:
        await doing
    return caught.value.code, caught.value.message, caught.value.data


async def refused(root: Path, path: str | Path) -> Answer:
    """The one answer to a read, a write and a start there, but for what a start says of a file."""
    answers = [
        await error_of(read(Files(root), path)),
        await error_of(write(Files(root), path, "by the agent")),
        await error_of(start(Terminals(root), path)),
    ]
    assert answers[0] == answers[1] == answers[2]
    return answers[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "r" / "w"
    folder.mkdir(parents=True)
    (folder / "f").write_text("inside")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "out"
    folder.mkdir()
    (folder / "f").write_text(SECRET)
    return folder


def everything(folder: Path) -> dict[str, str | None]:
    return {str(path): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


# --- 42: escapes --------------------------------------------------------------------------------


@pytest.mark.covers("FF-42")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{w}/l", "symlink_escape"),  # a link to a file
        ("{w}/l/", "symlink_escape"),
        ("{w}/d", "symlink_escape"),
        ("{w}/d/f", "symlink_escape"),
        ("{w}/d/n", "symlink_escape"),  # a new file behind a link
        ("{w}/d/n/n", "symlink_escape"),
        ("{w}/g", "symlink_escape"),  # a link to nothing: writing would make it
        ("{w}/g/n", "symlink_escape"),
        ("{w}/twice", "symlink_escape"),
        ("{w}/there/and/back/f", "symlink_escape"),
        ("{w}/deep/../t", "symlink_escape"),  # the kernel's parent, not the text's
        ("{w}/deep/..", "symlink_escape"),
        ("{w}/d/../r/w/f", "symlink_escape"),
        ("{w}/none/../d/f", "symlink_escape"),
        ("{w}2/x", "path_traversal"),
        ("{w}/../w2/x", "path_traversal"),
        ("{w}/..", "path_traversal"),
        ("{w}/../..", "path_traversal"),
        ("{w}/./../w/../w2/x", "path_traversal"),
        ("/{w}/f", "path_traversal"),
        ("//{w}/f", "path_traversal"),
        ("{W}/f", "path_traversal"),
        ("w/f", "path_not_absolute"),
        (".", "path_not_absolute"),
        ("..", "path_not_absolute"),
        ("~/f", "path_not_absolute"),
        ("~root/f", "path_not_absolute"),
        ("file://{w}/f", "path_not_absolute"),
        ("C:\\f", "path_not_absolute"),
        ("{w}/f\0", "path_not_text"),
        ("{w}\0/../../out/f", "path_not_text"),
        ("{w}/" + "./" * 2048 + "f", "path_too_long"),
        ("/dev/zero", "path_traversal"),
        ("/proc/self/environ", "path_traversal"),
        ("/proc/self/root{w}/f", "path_traversal"),
        ("/proc/self/cwd", "path_traversal"),
    ],
)
async def test_a_way_out_is_refused_for_reads_writes_and_starts(
    root: Path, out: Path, path: str, reason: str
) -> None:
    (out / "deep" / "er").mkdir(parents=True)
    (out / "deep" / "t").write_text(SECRET)
    (root.parent / "w2").mkdir()
    (root.parent / "w2" / "x").write_text(SECRET)
    (root / "sub").mkdir()
    links: dict[str, str | Path] = {
        "l": out / "f",
        "d": out,
        "g": out / "new",
        "twice": "l",
        "there": out / "back",
        "deep": out / "deep" / "er",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (out / "back").mkdir()
    (out / "back" / "and").mkdir()
    (out / "back" / "and" / "back").symlink_to(root)
    before = everything(out), everything(root.parent)
    path = path.replace("{w}", str(root)).replace("{W}", str(root).swapcase())
    code, message, data = await refused(root, path)
    assert (code, message, data["reason"]) == (-32602, "Invalid params", reason)
    assert SECRET not in str(data)
    assert (everything(out), everything(root.parent)) == before


@pytest.mark.covers("FF-42")
async def test_an_empty_path_is_no_file(root: Path) -> None:
    assert (await error_of(read(Files(root), "")))[2]["reason"] == "path_not_absolute"
    assert (await error_of(write(Files(root), "", "x")))[2]["reason"] == "path_not_absolute"


@pytest.mark.covers("FF-42")
async def test_one_session_reaches_nothing_of_another_nor_what_it_had_before(
    tmp_path: Path,
) -> None:
    one, two, more = (tmp_path.resolve() / name for name in ("1", "2", "more"))
    for folder in (one, two, more):
        folder.mkdir()
        (folder / "f").write_text(folder.name)
    (two / "l").symlink_to(one / "f")
    files = Files()
    first, second = Ctx(one, more, session_id="1"), Ctx(two, session_id="2")
    assert await read(files, more / "f", first) == "more"
    for path in (one / "f", more / "f", two / "l"):
        answer = await error_of(read(files, path, second))
        assert answer == await error_of(write(files, path, "x", second))
        assert answer[0] == -32602
    # Additional directories hold for as long as the session has them.
    assert (await error_of(read(files, more / "f", Ctx(one, session_id="1"))))[0] == -32602
    # A directory in another one that is lent as well: either name of it leads there.
    nested = Ctx(two, one, tmp_path.resolve() / "1", session_id="3")
    assert await read(files, two / "l", nested) == "1"


class Looks:
    """Every path that is given to the system, absolute, while it is installed."""

    WATCHED = (
        *("open", "stat", "lstat", "readlink", "access", "listdir", "scandir", "chdir", "mkdir"),
        *("unlink", "rename", "link", "symlink", "chmod", "utime", "statvfs", "rmdir", "truncate"),
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in self.WATCHED:
            patch.setattr(os, name, self._watching(getattr(os, name), os.readlink))
        patch.setattr(os, "supports_dir_fd", {os.open, os.readlink})

    def _watching(self, real: Any, readlink: Any) -> Any:
        def watching(path: Any, *args: Any, **kwargs: Any) -> Any:
            dir_fd = kwargs.get("dir_fd") or kwargs.get("src_dir_fd")
            folder = readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else str(Path.cwd())
            self.seen.append(os.path.normpath(Path(folder, os.fsdecode(path))))
            return real(path, *args, **kwargs)

        return watching


@pytest.mark.covers("FF-42")
async def test_a_refusal_neither_tells_nor_looks_whether_an_outside_file_exists(
    root: Path, out: Path
) -> None:
    (out / "d").mkdir()
    (out / "l").symlink_to("f")
    (out / "loop").symlink_to("loop")
    os.mkfifo(out / "fifo")
    targets = ("f", "none", "d", "d/none", "none/none", "l", "loop", "fifo", "f/none", "x" * 255)
    answers: list[set[str]] = []
    looked: list[str] = []
    for spelling in ("{out}/{t}", "{w}/../../out/{t}", "{w}/l", "{w}/rel", "{w}/dir/{t}"):
        of_spelling: set[str] = set()
        for target in targets:
            for name, leads in {
                "l": f"{out}/{target}",
                "rel": f"../../out/{target}",
                "dir": str(out),
            }.items():
                (root / name).unlink(missing_ok=True)
                (root / name).symlink_to(leads)
            path = spelling.format(out=out, w=root, t=target)
            files, terminals = Files(root), Terminals(root)
            with pytest.MonkeyPatch.context() as patch:
                looks = Looks(patch)
                for doing in (read(files, path), write(files, path, "x"), start(terminals, path)):
                    code, message, data = await error_of(doing)
                    assert data.pop("path") == path
                    of_spelling.add(repr((code, message, data)))
            looked += looks.seen
        answers.append(of_spelling)
    assert [len(of_spelling) for of_spelling in answers] == [1] * 5, answers
    assert looked
    assert not [path for path in looked if path == str(out) or path.startswith(f"{out}/")]


@pytest.mark.covers("FF-42")
async def test_what_looks_is_seen_by_the_test_above(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    os.lstat(out / "f")
    folder = os.open(out, os.O_RDONLY)
    with contextlib.suppress(FileNotFoundError):
        os.readlink(b"none", dir_fd=folder)
    os.close(folder)
    assert looks.seen == [f"{out}/f", str(out), f"{out}/none"]


@pytest.mark.covers("FF-42")
async def test_magic_links_of_proc_lead_only_where_their_text_does(root: Path, out: Path) -> None:
    opened = os.open(out, os.O_RDONLY)
    try:
        for path in (
            f"/proc/self/root{out}/f",
            f"/proc/self/fd/{opened}/f",
            f"/proc/{os.getpid()}/cwd/../{out}/f",
        ):
            answer = await error_of(read(Files("/proc"), path))
            assert answer[2]["reason"] == "symlink_escape"
        # Where all is lent, all of it may be read, but as what it is.
        assert await read(Files("/"), f"/proc/self/root{out}/f") == SECRET
    finally:
        os.close(opened)
    # Files of /proc say that they are empty.
    assert "Name:" in await read(Files("/proc"), f"/proc/{os.getpid()}/status", limit=1)


@pytest.mark.covers("FF-42")
async def test_normal_forms_of_unicode_are_names_of_their_own(root: Path) -> None:
    composed = unicodedata.normalize("NFC", "é")
    decomposed = unicodedata.normalize("NFD", "é")
    (root / composed).write_text("composed")
    files = Files(root)
    if (root / decomposed).exists():  # the file system takes them for one
        assert await read(files, root / decomposed) == "composed"
        return
    assert (await error_of(read(files, root / decomposed)))[0] == -32002
    await write(files, root / decomposed, "decomposed")
    assert await read(files, root / composed) == "composed"
    # A wide full stop or slash is no step and no separator.
    for name in ("\uff0e\uff0e", "\u2025", "a\u2215b", "..\u200b", ".. ", "...", "..;"):
        await write(files, root / name, name)
        assert (root / name).read_text() == name


@pytest.mark.covers("FF-42")
async def test_a_hard_link_is_the_file_and_a_write_parts_it_from_the_other_name(
    root: Path, out: Path
) -> None:
    (root / "hard").hardlink_to(out / "f")
    files = Files(root)
    assert await read(files, root / "hard") == SECRET
    await write(files, root / "hard", "by the agent")
    assert (out / "f").read_text() == SECRET


@pytest.mark.covers("FF-42")
async def test_a_root_that_goes_away_takes_the_lending_with_it(root: Path, out: Path) -> None:
    files = Files(root)
    root.rename(root.parent / "moved")
    for doing in (read(files, root / "f"), write(files, root / "f", "x")):
        code, _, data = await error_of(doing)
        assert (code, data["reason"], data["errno"]) == (-32603, "io_error", "ENOENT")
    assert not root.exists()
    root.symlink_to(out)
    for doing in (read(files, root / "f"), write(files, root / "f", "x")):
        code, _, data = await error_of(doing)
        assert (code, data["reason"]) == (-32603, "io_error")
    assert (out / "f").read_text() == SECRET
    root.unlink()
    root.mkdir()
    await write(files, root / "f", "in the new directory")
    assert await read(files, root / "f") == "in the new directory"


# --- 43: missing files, and other failures -------------------------------------------------------


@pytest.mark.covers("FF-43", "R1-106", "R1-107")
async def test_only_what_is_absent_is_not_found(root: Path) -> None:
    (root / "empty").touch()
    (root / "d").mkdir()
    (root / "dangling").symlink_to("nothing")
    files = Files(root, read_bytes=4)
    assert await read(files, root / "empty") == ""
    for name in ("none", "new/none", "d/none", "dangling"):
        assert await error_of(read(files, root / name)) == (
            -32002,
            "Resource not found",
            {"uri": f"file://{root}/{name}"},
        )
        await write(files, root / name, "made")
        assert await read(files, root / name) == "made"
    for path, reason in (
        (root / "d", "not_a_regular_file"),
        (root, "not_a_regular_file"),
        (root / "f" / "none", "not_a_directory"),
        (root / "f", "file_too_large"),
    ):
        code, message, data = await error_of(read(files, path))
        assert (code, message) == (-32602, "Invalid params")
        assert (data["reason"], data["path"]) == (reason, str(path))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can reach, and that user's identity where we are root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the suite's own is ours alone
        path = Path(folder).resolve()
        path.chmod(0o777)
        (path / "w").mkdir(mode=0o777)
        (path / "w").chmod(0o777)
        yield path / "w"


@contextlib.contextmanager
def as_nobody() -> Generator[None]:
    """As a user whom permissions hold."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.covers("FF-43")
async def test_what_permissions_forbid_is_a_failure_with_its_name_and_nothing_is_left(
    shared: Path,
) -> None:
    with as_nobody():
        for name in ("closed", "frozen", "passing"):
            (shared / name).mkdir()
            (shared / name / "f").write_text("old")
        (shared / "secret").write_text("old")
        (shared / "secret").chmod(0)
        (shared / "readonly").write_text("old")
        (shared / "readonly").chmod(0o400)
        (shared / "closed").chmod(0)
        (shared / "frozen").chmod(0o555)
        (shared / "passing").chmod(0o111)
        files = Files(shared)
        denied = {"errno": "EACCES"}
        for doing, reason in (
            (read(files, shared / "secret"), "io_error"),
            (read(files, shared / "closed" / "f"), "io_error"),
            (read(files, shared / "closed" / "none"), "io_error"),
            (write(files, shared / "secret", "new"), "write_failed"),
            (write(files, shared / "readonly", "new"), "write_failed"),
            (write(files, shared / "closed" / "f", "new"), "io_error"),
            # The file could be written, but not whole or not at all.
            (write(files, shared / "frozen" / "f", "new"), "write_failed"),
            (write(files, shared / "frozen" / "new" / "f", "new"), "write_failed"),
        ):
            code, message, data = await error_of(doing)
            assert (code, message) == (-32603, "Internal error")
            assert data == {**data, **denied, "reason": reason}
        if hasattr(os, "O_PATH"):  # as the kernel does, where only passing is allowed
            assert await read(files, shared / "passing" / "f") == "old"
        assert await read(files, shared / "frozen" / "f") == "old"
        assert os.listdir(shared / "frozen") == ["f"]
        (shared / "closed").chmod(0o700)
        (shared / "passing").chmod(0o700)
        (shared / "frozen").chmod(0o700)


@contextlib.contextmanager
def limited(what: int, most: int) -> Generator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.covers("FF-43")
@pytest.mark.parametrize("size", [64 * 1024, 2 * MIB])
async def test_a_write_for_which_there_is_no_room_leaves_the_old_file(
    root: Path, size: int
) -> None:
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # as Python has it
    files = Files(root)
    for name in ("f", "new"):
        with limited(resource.RLIMIT_FSIZE, 32 * 1024):
            answer = await error_of(write(files, root / name, "x" * size))
        facts = {"reason": "write_failed", "path": f"{root}/{name}", "errno": "EFBIG"}
        assert answer == (-32603, "Internal error", facts)
    assert everything(root) == {f"{root}/f": "inside"}


@pytest.mark.covers("FF-43")
async def test_without_a_descriptor_left_nothing_is_taken_for_missing(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "f").write_text("inside")
    files = Files(root)
    seen: set[object] = set()
    lowest = os.dup(0)
    os.close(lowest)
    for spare in range(8):
        with limited(resource.RLIMIT_NOFILE, lowest + spare):
            for doing in (
                read(files, root / "a" / "b" / "f"),
                write(files, root / "a" / "b" / "f", "inside"),
            ):
                try:
                    await doing
                except RequestError as error:
                    seen.add((error.code, error.data["reason"], error.data["errno"]))
                else:
                    seen.add("done")
    failed = {(-32603, "io_error", "EMFILE"), (-32603, "write_failed", "EMFILE")}
    assert seen - failed == {"done"}
    assert (-32603, "io_error", "EMFILE") in seen
    assert everything(root)[f"{root}/a/b/f"] == "inside"
    assert os.listdir(root / "a" / "b") == ["f"]


@pytest.mark.covers("FF-43")
async def test_however_many_calls_wait_for_a_person_others_find_descriptors(root: Path) -> None:
    asked: list[Operation] = []
    go = asyncio.Event()

    async def guard(operation: Operation) -> bool:
        asked.append(operation)
        await go.wait()
        return True

    files = Files(root, guard=guard, guard_reads=True)
    lowest = os.dup(0)
    os.close(lowest)
    with limited(resource.RLIMIT_NOFILE, lowest + 200):
        waiting = [
            asyncio.create_task(write(files, root / f"n{number % 300}", str(number)))
            for number in range(600)
        ]
        reading = [asyncio.create_task(read(files, root / "f")) for _ in range(300)]
        while len(asked) < HELD:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(asked) == HELD
        assert await read(Files(root), root / "f") == "inside"
        # Those that are given up make room, and leave the order of the others.
        for task in waiting[:10]:
            task.cancel()
        go.set()
        await asyncio.wait([*waiting, *reading])
    assert [task for task in waiting if task.cancelled()] == waiting[:10]
    assert {task.result() for task in reading} == {"inside"}
    assert all((root / f"n{number}").read_text() == str(number + 300) for number in range(300))
    # The same service may serve on another loop.
    await asyncio.to_thread(lambda: asyncio.run(write(files, root / "f", "elsewhere")))
    assert await read(files, root / "f") == "elsewhere"


# --- 44: windows of lines ------------------------------------------------------------------------


@pytest.mark.covers("FF-44", "R1-108")
@pytest.mark.parametrize("end", ["", "\n"])
async def test_every_window_is_the_exact_slice(root: Path, end: str) -> None:
    text = f"a\nb\r\nc{end}"
    (root / "f").write_bytes(text.encode())
    files = Files(root)
    lines = ["a\n", "b\r\n", f"c{end}"]
    for line in (UNSET, None, 0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1):
        for limit in (UNSET, None, 0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1):
            first = max(line, 1) - 1 if isinstance(line, int) else 0
            last = first + limit if isinstance(limit, int) else None
            expected = "".join(lines[first:last])
            assert await read(files, root / "f", line=line, limit=limit) == expected
    wrong: list[dict[str, Any]] = [{"line": -1}, {"limit": -1}, {"line": 2**32}, {"limit": 2**32}]
    for window in wrong:
        code, _, data = await error_of(read(files, root / "f", **window))
        assert (code, data["reason"]) == (-32602, "line_invalid")
    for size in (1, 2, 3):
        windows = [
            await read(files, root / "f", line=line, limit=size) for line in range(1, 5, size)
        ]
        assert "".join(windows) == text


@pytest.mark.covers("FF-44")
@pytest.mark.bound(120)
async def test_windows_of_two_gibibytes_take_little_memory(root: Path) -> None:
    with (root / "f").open("wb") as file:
        file.write("first\r\nzweite Zeile: é\n".encode())
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast")
    files = Files(root)
    tracemalloc.start()
    try:
        assert await read(files, root / "f", line=1, limit=1) == "first\r\n"
        assert await read(files, root / "f", limit=2) == "first\r\nzweite Zeile: é\n"
        assert await read(files, root / "f", line=4, limit=1) == "last but one\n"
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
        assert (await error_of(read(files, root / "f")))[2]["reason"] == "file_too_large"
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
        # A line that is too long is noticed when the limit is passed, not at its end.
        too_long: list[dict[str, Any]] = [{"line": 3}, {"line": 3, "limit": 1}]
        for window in too_long:
            answer = await error_of(read(files, root / "f", **window))
            assert answer[2]["reason"] == "file_too_large"
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.covers("FF-44")
async def test_one_line_of_fifty_mebibytes_is_refused_and_passed_over(root: Path) -> None:
    (root / "f").write_bytes(b"x" * (50 * MIB) + b"\nafter\n")
    files = Files(root)
    windows: list[dict[str, Any]] = [{}, {"line": 1}, {"limit": 1}, {"line": 1, "limit": 1}]
    for window in windows:
        code, _, data = await error_of(read(files, root / "f", **window))
        assert (code, data["reason"]) == (-32602, "file_too_large")
    assert await read(files, root / "f", line=2) == "after\n"


@pytest.mark.covers("FF-44")
async def test_a_file_that_grows_or_shrinks_while_it_is_read_gives_what_was_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_bytes(b"line\n" * 100_000)
    real_read = os.read

    def appending(fd: int, size: int) -> bytes:
        chunk = real_read(fd, size)
        if chunk:
            with (root / "f").open("ab") as file:
                file.write(b"line\n" * 60_000)
        return chunk

    monkeypatch.setattr(os, "read", appending)
    files = Files(root)
    assert await read(files, root / "f", limit=90_000) == "line\n" * 90_000
    # It grows faster than it is read: the limit ends that.
    assert (await error_of(read(files, root / "f", line=2)))[2]["reason"] == "file_too_large"

    def emptying(fd: int, size: int) -> bytes:
        chunk = real_read(fd, size)
        os.truncate(root / "f", 0)
        return chunk

    monkeypatch.setattr(os, "read", emptying)
    (root / "f").write_bytes(b"line\n" * 100_000)
    assert await read(files, root / "f") == ("line\n" * 100_000)[: 256 * 1024]


@pytest.mark.covers("FF-44")
@pytest.mark.bound(120)
async def test_many_windows_far_into_huge_files_delay_no_other_read(root: Path) -> None:
    with (root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (root / "large").write_text("x" * MIB)
    files = Files(root)
    slow = [asyncio.create_task(read(files, root / "huge", line=2, limit=1)) for _ in range(40)]
    for _ in range(5):
        assert await read(files, root / "large") == "x" * MIB
        assert await read(files, root / "f") == "inside"
        await write(files, root / "written", "y" * MIB)
    assert await asyncio.to_thread(lambda: "others") == "others"
    assert not [task for task in slow if task.done()]
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
    assert all(task.cancelled() for task in slow)
