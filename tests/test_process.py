"""A supervised process: its exit is seen, its group ends with it, its standard error is drained."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from antiphon import StartError, _process
from antiphon._launch import spawn
from antiphon._process import Child

PYTHON = [sys.executable, "-S", "-E", "-c"]
READY = "import os, signal, sys, time\n"


async def shell(text: str, **options: Any) -> Child:
    options = {"stdout": "null", "stderr": "null"} | options
    return await Child.start(["sh", "-c", text], **options)


class Heard(asyncio.Event):
    """Set by the first line of standard error."""

    def __call__(self, line: str) -> None:
        self.set()


async def line_of(child: Child) -> str:
    """What the child has written first, which is its way to say that it is ready."""
    fd = child.take_stdout()
    try:
        return (await asyncio.to_thread(os.read, fd, 1000)).decode().strip()
    finally:
        os.close(fd)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_since(start: float) -> float:
    return time.monotonic() - start


# ------------------------------------------------------------------ exit


@pytest.mark.parametrize(
    ("text", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", -15), ("kill -9 $$", -9)]
)
async def test_the_exit_status_is_seen(text: str, status: int, loop_factory: Any) -> None:
    child = await shell(text)

    assert await child.wait() == status
    assert child.returncode == status
    assert await child.wait() == status
    assert await child.end() == status


async def test_grandchildren_that_hold_the_pipes_do_not_delay_the_exit() -> None:
    start = time.monotonic()
    child = await shell("sleep 30 & exit 3", stdout="pipe", stderr="pipe")

    assert await child.wait() == 3
    assert await child.end() == 3

    assert seconds_since(start) < 2


async def test_watchers_are_called_once_with_the_status_known() -> None:
    child = await shell("exit 3")
    seen: list[int | None] = []
    child.on_exit(lambda: seen.append(child.returncode))
    await child.wait()
    child.on_exit(lambda: seen.append(child.returncode))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert seen == [3, 3]
    await child.end()


async def test_a_cancelled_waiter_disturbs_no_other() -> None:
    child = await shell("read line; exit 3")
    waiting = [asyncio.create_task(child.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()

    await child.end()

    assert await waiting[0] == await waiting[2] == 3


async def test_waiting_within_a_bound_tells_whether_the_exit_came() -> None:
    child = await shell("read line; exit 3")

    assert not await child.wait_within(0)
    assert not await child.wait_within(0.01)
    os.close(child.take_stdin())
    assert await child.wait_within(10)
    await child.end()


async def test_the_number_stays_ours_until_the_end() -> None:
    child = await shell("exit 0")
    await child.wait()

    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    await child.end()
    assert not psutil.pid_exists(child.pid)


async def test_a_status_that_other_code_has_taken_is_255(caplog: pytest.LogCaptureFixture) -> None:
    child = await shell("read line")
    os.close(child.take_stdin())
    os.waitpid(child.pid, 0)

    assert await child.wait() == 255
    assert await child.end() == 255
    assert "was taken by other code" in caplog.text


@pytest.fixture
def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("no_pidfd")
async def test_a_thread_sees_the_exit_where_there_is_no_pidfd() -> None:
    child = await shell("exit 3")

    assert await child.wait() == 3
    assert await child.end() == 3


@pytest.mark.usefixtures("no_pidfd")
async def test_a_thread_sees_the_exit_where_there_is_no_waitid_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "waitid")
    child = await shell("kill -TERM $$")

    assert await child.wait() == -15
    assert await child.end() == -15


@pytest.mark.usefixtures("no_pidfd")
async def test_cancelling_kills_where_there_is_no_pidfd() -> None:
    child = await shell("trap '' TERM; sleep 30")
    ending = asyncio.create_task(child.end())
    await asyncio.sleep(0)
    ending.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ending

    assert child.returncode == -9
    assert not psutil.pid_exists(child.pid)


# ------------------------------------------------------------------ starting


@pytest.mark.covers("FF-39")
@pytest.mark.parametrize("argv", [["no-such-agent"], ["/"], [__file__]])
async def test_what_cannot_be_started_is_a_start_error_within_milliseconds(
    argv: list[str],
) -> None:
    start = time.monotonic()

    with pytest.raises(StartError) as caught:
        await Child.start(argv)

    assert seconds_since(start) < 2
    assert caught.value.command == argv
    assert caught.value.exit_status is None
    assert argv[0] in str(caught.value)


async def test_running_out_of_descriptors_is_a_start_error_that_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", pipe)

    with pytest.raises(StartError, match="cannot make pipes: Too many open files") as caught:
        await Child.start(["cat"])

    assert caught.value.command == ["cat"]


async def test_an_environment_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    asks = "import os; print(os.environ.get('SECRET_X'), os.environ.get('OWN'))"
    inherits = await Child.start([*PYTHON, asks])
    given = await Child.start([*PYTHON, asks], env={"OWN": "2"})

    assert await line_of(inherits) == "1 None"
    assert await line_of(given) == "None 2"
    await inherits.end()
    await given.end()


async def test_the_working_directory_is_set(tmp_path: Path) -> None:
    child = await Child.start(["pwd"], cwd=tmp_path)

    assert await line_of(child) == str(tmp_path)
    await child.end()


async def test_a_child_has_our_pipes_and_no_other_descriptor() -> None:
    os.set_inheritable(extra := os.dup(0), True)
    child = await Child.start([*PYTHON, "import os; print(sorted(os.listdir('/proc/self/fd')))"])

    # The fourth is the one that lists the folder.
    assert await line_of(child) == "['0', '1', '2', '3']"
    os.close(extra)
    await child.end()


async def test_standard_input_is_never_ours() -> None:
    child = await Child.start(["cat"], stdin="null", stdout="null")

    assert await child.wait() == 0
    assert await child.end() == 0


async def test_the_two_outputs_can_be_joined() -> None:
    child = await Child.start(["sh", "-c", "echo out; echo err >&2"], stderr="stdout")
    fd = child.take_stdout()
    await child.wait()

    assert os.read(fd, 100) == b"out\nerr\n"
    os.close(fd)
    assert child.stderr_tail == ""
    await child.end()


async def test_standard_error_can_be_left_where_ours_goes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child = await shell("echo err >&2", stderr="inherit")
    await child.wait()
    await child.end()

    assert capfd.readouterr().err == "err\n"


# ------------------------------------------------------------------ ending


async def test_a_child_that_exits_at_the_end_of_input_gets_no_signal() -> None:
    child = await shell("trap 'exit 9' TERM; read line; exit 4")

    assert await child.end() == 4


async def test_a_child_that_flushes_for_a_while_is_waited_for() -> None:
    child = await shell("trap 'exit 9' TERM; read line; sleep 0.3; exit 4")

    assert await child.end() == 4


async def test_a_child_that_ignores_the_end_of_input_gets_term() -> None:
    child = await Child.start(
        [
            *PYTHON,
            READY + "signal.signal(15, lambda *_: os._exit(5)); print(1, flush=True)\n"
            "while True: time.sleep(9)",
        ],
    )
    await line_of(child)

    assert await child.end(stdin_grace=0.05) == 5


@pytest.mark.covers("FF-36")
async def test_a_child_that_ignores_term_is_killed_within_the_bounds() -> None:
    child = await shell("trap '' TERM; echo; while :; do sleep 1; done", stdout="pipe")
    await line_of(child)
    start = time.monotonic()

    assert await child.end(stdin_grace=0.1, term_grace=0.1) == -9

    assert 0.2 <= seconds_since(start) < 3


async def test_a_stopped_child_is_ended() -> None:
    child = await shell("kill -STOP $$")

    assert await child.end(stdin_grace=0.05, term_grace=0.05) == -9


async def test_ending_twice_and_at_once_is_one_ending() -> None:
    child = await shell("read line; sleep 0.1; exit 4")

    assert set(await asyncio.gather(child.end(), child.end(), child.end())) == {4}
    assert await child.end() == 4


async def test_ending_after_the_exit_is_quick() -> None:
    child = await shell("exit 4")
    await child.wait()
    start = time.monotonic()

    assert await child.end() == 4
    assert seconds_since(start) < 1


TREES = {
    "a tool in the group": "sleep 30 & echo $!; wait",
    "a wrapper that is gone": "sleep 30 & echo $!; exit 0",
    "one that ignores TERM": "sh -c 'trap \"\" TERM; echo $$; sleep 30; sleep 30' & wait",
    "a wrapper that is gone, and one that ignores TERM": (
        "sh -c 'trap \"\" TERM; echo $$; sleep 30; sleep 30' & read line; exit 0"
    ),
}


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("tree", TREES)
async def test_nothing_of_the_group_survives(tree: str) -> None:
    child = await shell(TREES[tree], stdout="pipe")
    grandchild = int(await line_of(child))
    assert alive(grandchild)

    await child.end(stdin_grace=0.5, term_grace=0.3)

    assert not alive(grandchild)


async def test_what_outlives_its_leader_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    saved = tmp_path / "history"
    agent = (
        f"signal.signal(15, lambda *_: (open({str(saved)!r}, 'w').write('saved'), os._exit(0)))\n"
        "print(1, flush=True)\nwhile True: time.sleep(9)"
    )
    child = await Child.start(["sh", "-c", '"$@" & exit 0', "sh", *PYTHON, READY + agent])
    await line_of(child)

    await child.end()

    assert saved.read_text() == "saved"


async def test_a_process_that_left_the_group_is_not_ours(tmp_path: Path) -> None:
    child = await shell("setsid sh -c 'echo $$; exec sleep 30' & wait", stdout="pipe")
    escaped = int(await line_of(child))
    try:
        await child.end(stdin_grace=0.05)
        assert alive(escaped)
    finally:
        os.kill(escaped, signal.SIGKILL)


async def test_a_cancelled_ending_kills_at_once_and_leaves_nothing(loop_factory: Any) -> None:
    child = await shell("trap '' TERM; sleep 30 & echo $!; wait; wait", stdout="pipe")
    grandchild = int(await line_of(child))
    ending = asyncio.create_task(child.end(stdin_grace=30))
    await asyncio.sleep(0)
    start = time.monotonic()
    ending.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ending

    assert seconds_since(start) < 1
    assert child.returncode == -9
    assert not psutil.pid_exists(child.pid)
    assert not alive(grandchild)
    assert await child.end() == -9


async def test_cancelling_one_of_several_who_end_it_makes_all_quick() -> None:
    child = await shell("trap '' TERM; sleep 30")
    first = asyncio.create_task(child.end(stdin_grace=30))
    await asyncio.sleep(0)
    second = asyncio.create_task(child.end())
    await asyncio.sleep(0)
    second.cancel()

    with pytest.raises(asyncio.CancelledError):
        await second
    assert await first == -9


async def test_cancelling_during_the_sweep_kills_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    child = await shell(TREES["a wrapper that is gone, and one that ignores TERM"], stdout="pipe")
    stubborn = int(await line_of(child))
    os.close(child.take_stdin())
    await child.wait()
    asked = asyncio.Event()
    real = os.killpg

    def killpg(group: int, number: int) -> None:
        real(group, number)
        if number == signal.SIGTERM:
            asked.set()

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", killpg)
        ending = asyncio.create_task(child.end())
        await asked.wait()
        assert alive(stubborn)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    assert not alive(stubborn)


async def test_aborting_needs_no_loop_and_leaves_nothing() -> None:
    child = await shell("trap '' TERM; sleep 30", stderr="pipe", stdout="pipe")

    child.abort()
    child.abort()

    assert child.returncode == -9
    assert await child.end() == -9
    assert await child.wait() == -9


async def test_signals_reach_the_group() -> None:
    child = await shell("sleep 30 & echo $!; wait", stdout="pipe")
    grandchild = int(await line_of(child))

    child.signal_group(signal.SIGKILL)

    assert await child.wait() == -9
    await child.end()
    assert not alive(grandchild)


async def test_signalling_a_group_that_is_gone_hits_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = await shell("exit 0")
    await child.end()

    def killpg(group: int, number: int) -> None:
        pytest.fail("the number may be somebody else's by now")

    monkeypatch.setattr(os, "killpg", killpg)
    child.signal_group(signal.SIGTERM)


async def test_a_group_that_may_not_be_signalled_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = await shell("read line")
    real = os.killpg

    def killpg(group: int, number: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", killpg)
        child.signal_group(signal.SIGTERM)
    assert os.killpg is real
    await child.end()


async def test_a_process_that_hangs_in_the_kernel_is_given_up_and_reaped_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_process, "KILL_WAIT", 0.05)
    monkeypatch.setattr(_process, "BLOCKING_KILL_WAIT", 0.01)
    child = await shell("exec sleep 30")

    def unheard(group: int, number: int) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", unheard)
        assert await child.end(stdin_grace=0.01, term_grace=0.01) is None
    assert "does not end after being killed" in caplog.text

    os.kill(child.pid, signal.SIGKILL)

    assert await child.wait() == -9
    assert not psutil.pid_exists(child.pid)


def test_children_that_are_left_at_the_interpreters_exit_are_killed() -> None:
    code = (
        "import asyncio, sys\n"
        "from antiphon._process import Child\n"
        "async def main():\n"
        "    child = await Child.start(['sh', '-c', 'trap \"\" TERM; sleep 30'], stderr='null')\n"
        "    print(child.pid)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    assert not alive(int(done.stdout))


async def test_a_forked_copy_of_us_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    child = await shell("read line; exit 4")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        child.kill_now()

    assert await child.end() == 4


# Orphans come to it, as they do to the first process of a container.
FIRST = """
import asyncio, ctypes, os
from antiphon._guard import guard
from antiphon._process import Child

PR_SET_CHILD_SUBREAPER = 36
TREES = ["sleep 60 & exit 3", "(sleep 60 & sleep 60 &); exit 3", "(true &); sleep 0.1; exit 3"]

async def main():
    for tree in TREES:
        child = await Child.start(["sh", "-c", tree], stdin="null", stdout="null", stderr="null")
        await child.wait()
        assert await child.end() == 3
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            assert file.read().split() == [str(guard.pid)]

assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
asyncio.run(main())
"""


@pytest.mark.covers("FF-35")
def test_no_zombie_is_left_where_orphans_come_to_us() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=30, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


async def test_a_dead_process_that_a_debugger_holds_is_not_asked_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = _process._peek, 0
    again = asyncio.Event()

    def held(pid: int) -> tuple[int, bool] | None:
        nonlocal asked
        asked += 1
        if asked < 3:
            return None
        again.set()
        return real(pid)

    monkeypatch.setattr(_process, "_peek", held)
    start = time.monotonic()
    child = await shell("exit 3")

    assert await child.wait() == 3
    assert again.is_set()
    assert seconds_since(start) >= 2 * _process._TRACED_POLL
    assert await child.end() == 3


@pytest.mark.usefixtures("no_pidfd")
async def test_a_process_that_cannot_be_watched_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def noted(*arguments: Any) -> Any:
        process = spawn(*arguments)
        made.append(process.pid)
        return process

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_process, "spawn", noted)
    monkeypatch.setattr(threading.Thread, "start", no_more)

    with pytest.raises(StartError, match="cannot watch the process: can't start new thread"):
        await shell("sleep 60 & sleep 60")

    assert not psutil.pid_exists(made[0])


# ------------------------------------------------------------------ standard error


@pytest.mark.covers("R1-5", "FF-37")
@pytest.mark.parametrize(
    "write",
    [
        "sys.stderr.buffer.write(b'x' * (5 << 20))",
        "sys.stderr.buffer.write(b'\\xff\\xfe' * (1 << 20))",
        "[sys.stderr.write(f'line {n}\\n') for n in range(100_000)]",
    ],
)
async def test_a_flood_on_standard_error_blocks_nobody_and_only_the_end_is_kept(
    write: str,
) -> None:
    child = await Child.start([*PYTHON, READY + write + "; sys.stderr.write('the end')"])

    assert await child.wait() == 0

    tail = child.stderr_tail
    assert tail.endswith("the end")
    assert len(tail.encode("utf-8", "replace")) <= 3 * 65_536
    assert len(tail) <= 65_536
    await child.end()
    assert child.stderr_tail == tail


async def test_lines_of_standard_error_are_given_as_they_come() -> None:
    lines: list[str] = []
    child = await Child.start(
        ["sh", "-c", r"printf 'one\ntwo\r\n\n\342\202\254 \377\nlast' >&2"],
        on_stderr_line=lines.append,
    )
    await child.wait()
    await child.end()

    assert lines == ["one", "two", "", "€ \ufffd", "last"]


async def test_standard_error_can_go_to_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    path.write_bytes(b"before\n")
    lines: list[str] = []
    child = await Child.start(
        ["sh", "-c", r"printf 'one\n\377two' >&2"], stderr_file=path, on_stderr_line=lines.append
    )
    await child.wait()

    assert child.stderr_tail == "one\n\ufffdtwo"
    await child.end()
    assert path.read_bytes() == b"before\none\n\xfftwo"
    assert lines == ["one", "\ufffdtwo"]


async def test_a_new_file_for_standard_error_is_for_its_owner_only(tmp_path: Path) -> None:
    child = await Child.start(["true"], stderr_file=tmp_path / "agent.log")
    await child.end()

    assert (tmp_path / "agent.log").stat().st_mode & 0o777 == 0o600


async def test_a_file_for_standard_error_that_takes_no_more_changes_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Heard()
    child = await shell(
        "echo one >&2; read line; echo two >&2; exit 3",
        stderr="pipe",
        stderr_file=Path("/dev/full"),
        on_stderr_line=one,
    )
    await one.wait()

    assert await child.end() == 3
    assert child.stderr_tail == "one\ntwo\n"
    assert caplog.text.count("standard error is no longer copied to its file: No space left") == 1


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "Is a directory"),
        ("no/folder", "No such file or directory"),
        ("pipe", "No such device"),
    ],
)
async def test_a_file_for_standard_error_that_cannot_be_written_is_a_start_error(
    place: str, said: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")  # that nobody reads: it must not be waited for

    with pytest.raises(StartError, match="cannot write standard error to '.*': " + said) as caught:
        await Child.start(["true"], stderr_file=tmp_path / place)

    assert caught.value.command == ["true"]


@pytest.mark.parametrize("what", ["pipe", "spawn"])
async def test_a_start_that_fails_leaves_no_file_for_standard_error_open(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os if what == "pipe" else _process, what, fail)

    with pytest.raises(StartError, match="Too many open files"):
        await Child.start(["true"], stderr_file=tmp_path / "agent.log")


async def test_a_character_that_comes_in_pieces_is_one_character() -> None:
    got: list[str] = []
    lines = _process._Lines(got.append)
    for byte in "a€漢😀\n".encode() + b"\xe2\x82":
        lines.feed(bytes([byte]))
    lines.feed(b"", final=True)

    assert got == ["a€漢😀", "\ufffd"]


async def test_a_line_without_an_end_comes_in_pieces() -> None:
    got: list[str] = []
    lines = _process._Lines(got.append)
    for _ in range(5):
        lines.feed(b"x" * 20_000)

    assert [len(piece) for piece in got] == [80_000]


async def test_a_function_for_lines_that_fails_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(line: str) -> None:
        raise ValueError(line)

    child = await shell("echo one >&2; echo two >&2; exit 3", stderr="pipe", on_stderr_line=fail)

    assert await child.wait() == 3
    assert child.stderr_tail == "one\ntwo\n"
    await child.end()
    assert caplog.text.count("the function for lines of standard error failed") == 1


async def test_a_tail_is_cut_between_characters() -> None:
    tail = _process._Tail(10)
    for _ in range(100):
        tail.add("€".encode())

    assert tail.text() == "€€€"


async def test_a_grandchild_on_standard_error_delays_no_tail() -> None:
    child = await shell("echo first >&2; (sleep 30) & exit 1", stderr="pipe")
    await child.wait()

    assert child.stderr_tail == "first\n"
    await child.end()


async def test_the_tail_grows_while_the_child_runs() -> None:
    early = Heard()
    child = await shell("echo early >&2; read line", stderr="pipe", on_stderr_line=early)

    await early.wait()

    assert child.stderr_tail == "early\n"
    await child.end()
