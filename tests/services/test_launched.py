"""The start of a command behind another program: its failures, its cancellation, what it may be told."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest

from antiphon import StartError
from antiphon._process import Child
from antiphon.services import _bwrap, _launched
from antiphon.services._bwrap import Box
from antiphon.services._confine import Roots
from antiphon.services._launched import _Control, start_launched  # pyright: ignore[reportPrivateUsage]


async def start(root: Path, *argv: str, boxed: bool, size: tuple[int, int] | None = None) -> Any:
    roots = Roots([root])
    with roots.locate(str(root)) as place:
        return await start_launched(
            argv,
            dict(os.environ),
            place=place,
            size=size,
            box=Box() if boxed else None,
            roots=roots,
        )


async def let_go(command: Any) -> None:
    await command.end(0.2)
    os.close(command.output)
    if command.silence is not None:
        command.silence.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def replace_program(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(_launched, "_program", text.encode)


WAYS = pytest.mark.parametrize(
    ("boxed", "size"), [(True, None), (False, (24, 80)), (True, (24, 80))]
)


@WAYS
async def test_a_command_is_started_watched_and_ended(
    root: Path, boxed: bool, size: tuple[int, int] | None, loop_factory: object
) -> None:
    command = await start(root, "sleep", "60", boxed=boxed, size=size)
    assert command.returncode is None
    seen: list[str] = []
    command.on_exit(functools.partial(seen.append, "early"))
    await command.end(1)
    await command.end(1)
    assert command.returncode == -15
    told = asyncio.Event()
    command.on_exit(told.set)
    await told.wait()
    assert seen == ["early"]
    await let_go(command)


@WAYS
async def test_an_abort_leaves_nothing(
    root: Path, boxed: bool, size: tuple[int, int] | None
) -> None:
    command = await start(root, "sh", "-c", "trap '' TERM; sleep 60", boxed=boxed, size=size)
    command.abort()
    assert command._child.returncode is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os; os._exit(0)", "ended with no word"),
        ("import sys; sys.exit('a word of explanation')", "a word of explanation"),
        ("import os, sys; os.write(int(sys.argv[1]), b'failed exec 13\\n')", "Permission denied"),
        ("import os, sys; os.write(int(sys.argv[1]), b'failed terminal 1\\n')", "its terminal"),
        ("import os, sys; os.write(int(sys.argv[1]), b'failed cwd 0\\n')", "exchanged"),
        ("import os, sys; os.write(int(sys.argv[1]), b'x\\n')", "ended with no word"),
    ],
)
@WAYS
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    root: Path,
    boxed: bool,
    size: tuple[int, int] | None,
    text: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_program(monkeypatch, text)
    with pytest.raises(StartError, match=said):
        await start(root, "true", boxed=boxed, size=size)


@WAYS
async def test_a_start_that_takes_for_ever_is_given_up(
    root: Path, boxed: bool, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launched, "START_SECONDS", 0.1)
    replace_program(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(StartError, match="ended with no word"):
        await start(root, "true", boxed=boxed, size=size)


@WAYS
async def test_what_stands_before_a_command_sees_nothing_of_its_environment(
    root: Path, boxed: bool, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bwrap, which is not in the sandbox, would load what LD_PRELOAD says.
    seen: list[Any] = []
    real = Child.start

    async def watched(*words: Any, **options: Any) -> Child:
        seen.append(options["env"])
        return await real(*words, **options)

    monkeypatch.setattr(Child, "start", watched)
    monkeypatch.setenv("AGENTS", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    command = await start(root, "true", boxed=boxed, size=size)
    assert [{"AGENTS", "LD_PRELOAD"} & set(env) for env in seen] == [set()]
    await let_go(command)


@WAYS
async def test_words_that_no_system_takes_are_told(
    root: Path, boxed: bool, size: tuple[int, int] | None
) -> None:
    with pytest.raises(StartError, match="surrogates not allowed"):
        await start(root, "echo", "\ud800", boxed=boxed, size=size)


@WAYS
async def test_a_cancelled_start_leaves_nothing(
    root: Path, boxed: bool, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(root / "fifo")
    program = f"import time; open({str(root / 'fifo')!r}, 'w').close(); time.sleep(60)"
    replace_program(monkeypatch, program)
    starting = asyncio.create_task(start(root, "true", boxed=boxed, size=size))
    await asyncio.to_thread((root / "fifo").read_bytes)  # it runs now
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [child for child in psutil.Process().children() if "-S" in child.cmdline()] == []


@WAYS
async def test_a_start_at_any_shortage_of_descriptors_leaves_nothing(
    root: Path, boxed: bool, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Box()  # has been tried before
    calls = ["pipe", "openpty", "dup", "memfd_create"]
    real = {name: getattr(os, name) for name in calls}
    left = [0]

    def counted(name: str) -> Any:
        def call(*words: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(24, "Too many open files")
            return real[name](*words)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, counted(name))
    for allowed in range(20):
        left[0] = allowed
        try:
            command = await start(root, "true", boxed=boxed, size=size)
        except StartError as error:
            assert "Too many open files" in str(error)  # noqa: PT017  (it may also start)
        else:
            left[0] = 1000
            await let_go(command)
            break
    else:
        pytest.fail("it never started")


async def test_a_box_that_ends_without_a_word_was_killed(root: Path) -> None:
    command = await start(root, "sleep", "60", boxed=True)
    gone = asyncio.Event()
    command.on_exit(gone.set)
    os.kill(command._child.pid, 9)
    await gone.wait()
    assert command.returncode == -9
    await let_go(command)


async def test_what_else_comes_over_the_socket_means_nothing(root: Path) -> None:
    ours, theirs = socket.socketpair()
    control = _Control(ours)
    heard: list[list[str]] = []
    with theirs:
        theirs.sendall(b"begun\nstarted\n" + b"early\n" * 9)
        assert await control.answer() == ["started"]
        control.listen(heard.append)
        assert heard == [["early"]] * 4
        theirs.sendall(b"x" * 100_000 + b"\n\xff\n\nexited 9\n")
        while ["exited", "9"] not in heard:
            await asyncio.sleep(0)
        assert max(len(words[0]) for words in heard if words) <= 256
    control.close()
    control.close()
    assert (
        await start_and_tell(root, ["exited", "x"], ["exited"], ["exited", "99999999999"])
    ) is None


async def start_and_tell(root: Path, *lines: list[str]) -> int | None:
    command = await start(root, "sleep", "60", boxed=True)
    for words in lines:
        command._told(words)
    code: int | None = command.returncode
    await let_go(command)
    return code


def test_the_program_is_the_module() -> None:
    text = resources.files("antiphon.services").joinpath("_inside.py").read_bytes()
    assert _launched._program() == text  # pyright: ignore[reportPrivateUsage]


def test_an_interpreter_is_ours_or_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(_bwrap.interpreter()).is_file()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotImplementedError, match="Python interpreter"):
        _bwrap.interpreter()
