"""The guard: what we have started ends with us, whatever ends us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from antiphon import _guard
from antiphon._guard import Guard, guard
from antiphon._process import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def status_of(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def alive(pid: int) -> bool:
    return status_of(pid) not in {"gone", psutil.STATUS_ZOMBIE}


def gone_within(seconds: float, *pids: int) -> bool:
    """Wait for the end of processes that may not be ours; tell whether it came in time."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([fd], [], [], left)[0]:
                return False
        finally:
            os.close(fd)
    return True


class Group:
    """A process with a group of its own, as `Child` starts them; says that it is ready."""

    def __init__(self, text: str = "echo; exec sleep 60") -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", text], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().strip().decode()
        self.pid = self.process.pid

    def end(self) -> int:
        """Reap it, by force if it is still there; its exit status."""
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(10)


@pytest.fixture
def groups() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(*text: str) -> Group:
        made.append(Group(*text))
        return made[-1]

    yield make
    for group in made:
        group.end()


@pytest.fixture
def own() -> Iterator[Guard]:
    """A guard apart from that of this process, which may be hurt."""
    made = Guard()
    yield made
    made.close()


def die(guard: Guard) -> int:
    """Let the guard see what it sees when its owner dies; its process id, for who waits for it."""
    pid, ours = guard._pid, guard._socket
    assert pid is not None
    assert ours is not None
    ours.close()
    guard._socket = guard._pid = None
    guard._groups.clear()
    return pid


# ------------------------------------------------------------------ one guard


def test_there_is_none_before_the_first_group(own: Guard) -> None:
    assert own.pid is None
    assert own.fileno is None
    own.remove(4711)
    own.close()
    assert own.pid is None


@pytest.mark.covers("FF-35")
def test_groups_end_with_their_owner_and_those_that_were_taken_back_do_not(
    own: Guard, groups: Callable[..., Group]
) -> None:
    left, taken_back, also_left = groups(), groups(), groups()
    for group in (left, taken_back, also_left):
        own.add(group.pid)
    own.remove(taken_back.pid)

    pid = die(own)

    assert gone_within(5, left.pid, also_left.pid)
    assert (left.end(), also_left.end()) == (-signal.SIGTERM, -signal.SIGTERM)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert alive(taken_back.pid)


# Those that stand at /bin/sh on some system, as far as they are here; each acts as `sh` by that name.
SHELLS = [name for name in ("dash", "bash", "busybox", "mksh", "zsh") if shutil.which(name)]


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.covers("FF-35")
def test_any_shell_will_do(
    name: str,
    own: Guard,
    groups: Callable[..., Group],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = tmp_path / "sh"
    shell.symlink_to(str(shutil.which(name)))
    monkeypatch.setattr(_guard, "SHELL", str(shell))
    polite, taken_back = groups(), groups()
    stubborn = groups("trap '' TERM; echo; while :; do sleep 60; done")
    for group in (polite, taken_back, stubborn):
        own.add(group.pid)
    own.remove(taken_back.pid)

    started = time.monotonic()
    pid = die(own)

    assert gone_within(10, polite.pid, stubborn.pid)
    assert time.monotonic() - started >= 1.5  # what ignores TERM is killed after two seconds
    assert (polite.end(), stubborn.end()) == (-signal.SIGTERM, -signal.SIGKILL)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert alive(taken_back.pid)


def test_a_group_is_asked_before_it_is_killed(
    own: Guard, groups: Callable[..., Group], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    polite = groups(f"trap 'echo yes > {saved}; exit 0' TERM; (echo; exec sleep 60) & wait")
    own.add(polite.pid)

    pid = die(own)
    assert gone_within(5, polite.pid)
    polite.end()
    # Not to be cut short: what was just forked may miss TERM, and needs the guard to be killed.
    assert os.waitpid(pid, 0) == (pid, 0)

    assert saved.read_text() == "yes\n"


def test_the_whole_group_ends(own: Guard, groups: Callable[..., Group]) -> None:
    tree = groups("sleep 60 & echo $!; sleep 60")
    own.add(tree.pid)

    pid = die(own)

    assert gone_within(5, tree.pid, int(tree.first))
    tree.end()
    os.killpg(pid, signal.SIGKILL)  # it waits for whoever reaps the tool, which may take a while
    os.waitpid(pid, 0)


def test_half_a_message_counts_for_nothing(own: Guard, groups: Callable[..., Group]) -> None:
    group = groups()
    own.add(2_000_000_000)
    assert own._socket is not None
    own._socket.sendall(f"+{group.pid}".encode())

    pid = die(own)
    os.waitpid(pid, 0)

    assert alive(group.pid)


def test_signals_of_a_terminal_do_not_end_it(own: Guard) -> None:
    own.add(2_000_000_000)
    assert own.pid is not None
    assert os.getsid(own.pid) == own.pid
    begun(own.pid)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        os.kill(own.pid, number)
    before = own.pid
    own.add(2_000_000_001)

    assert own.pid == before


def begun(pid: int) -> None:
    """Wait until the guard has set its traps, of which nothing but the kernel's own table tells."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        ignored = text.partition("SigIgn:")[2].split()[0]
        if int(ignored, 16) & 1 << (signal.SIGTERM - 1):
            return
        time.sleep(0.001)
    pytest.fail("the guard does not begin")


def test_it_holds_nothing_of_ours(own: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    os.set_inheritable(extra := os.dup(1), True)
    try:
        own.add(2_000_000_000)
    finally:
        os.close(extra)
    assert own.pid is not None
    begun(own.pid)
    process = psutil.Process(own.pid)

    assert set(process.environ()) <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert process.cwd() == "/"
    held = {path.name: str(path.readlink()) for path in Path(f"/proc/{own.pid}/fd").iterdir()}
    assert held.pop("0").startswith("socket:")
    assert held == {"1": "/dev/null", "2": "/dev/null"}


def test_its_command_line_says_what_it_is(own: Guard) -> None:
    own.add(2_000_000_000)
    assert own.pid is not None
    begun(own.pid)

    words = psutil.Process(own.pid).cmdline()

    assert words[2].startswith(f"# antiphon: when process {os.getpid()} has died")
    assert words[-1] == "antiphon-guard"


def test_closing_ends_it_and_leaves_no_zombie_and_no_group_harmed(
    own: Guard, groups: Callable[..., Group]
) -> None:
    group = groups()
    own.add(group.pid)
    pid = own.pid
    assert pid is not None

    own.close()
    own.close()

    assert own.pid is None
    assert status_of(pid) == "gone"
    assert alive(group.pid)


def test_closing_reaches_it_even_if_a_copy_of_the_socket_is_held_elsewhere(own: Guard) -> None:
    own.add(2_000_000_000)
    assert own.fileno is not None
    copy = os.dup(own.fileno)
    pid = own.pid
    assert pid is not None
    try:
        own.close()
        assert status_of(pid) == "gone"
    finally:
        os.close(copy)


def test_one_that_was_killed_is_replaced_and_told_everything(
    own: Guard, groups: Callable[..., Group]
) -> None:
    old, new = groups(), groups()
    own.add(old.pid)
    first = own.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert gone_within(5, first)

    own.add(new.pid)

    assert own.pid not in {None, first}
    assert status_of(first) == "gone"
    pid = die(own)
    assert gone_within(5, old.pid, new.pid)
    old.end()
    new.end()
    os.waitpid(pid, 0)


def test_one_that_was_killed_is_not_replaced_for_nothing(own: Guard) -> None:
    own.add(2_000_000_000)
    assert own.pid is not None
    os.kill(own.pid, signal.SIGKILL)
    assert gone_within(5, own.pid)

    own.remove(2_000_000_000)

    assert own.pid is None


def test_one_that_does_not_listen_is_replaced_before_it_can_take_us_for_dead(
    own: Guard, groups: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "SEND_WAIT", 0.01)
    group = groups()
    own.add(group.pid)
    first = own.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)

    number = 2_000_000_000
    while own.pid == first:
        own.add(number)
        number += 1
        assert number < 2_000_100_000

    assert status_of(first) == "gone"
    assert alive(group.pid)


def test_the_number_of_one_that_is_gone_is_never_signalled(
    own: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.add(2_000_000_000)
    first = own.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)  # by other code: the number may be anybody's now

    def kill(pid: int, number: int) -> None:
        pytest.fail("this may be another process by now")

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill)
        own.add(2_000_000_001)

    assert own.pid not in {None, first}


def test_a_broken_socket_raises_no_signal(own: Guard) -> None:
    own.add(2_000_000_000)
    assert own.pid is not None
    os.kill(own.pid, signal.SIGKILL)
    assert gone_within(5, own.pid)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        own.add(2_000_000_001)
    finally:
        signal.signal(signal.SIGPIPE, before)

    assert own.pid is not None


def test_without_a_shell_it_is_said_once_and_never_tried_again(
    own: Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_guard, "SHELL", "/no/such/sh")
    descriptors = len(os.listdir("/proc/self/fd"))

    own.add(2_000_000_000)
    monkeypatch.setattr(_guard, "SHELL", "/bin/sh")
    own.add(2_000_000_001)
    own.remove(2_000_000_000)

    assert own.pid is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the processes that it has started go on" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("what", ["socketpair", "Popen"])
def test_without_descriptors_it_is_said_once_and_tried_again(
    what: str, own: Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket if what == "socketpair" else subprocess, what, fail)
        own.add(2_000_000_000)
        own.add(2_000_000_001)
    assert own.pid is None
    own.add(2_000_000_002)

    assert own.pid is not None
    assert caplog.text.count("no guard can be started") == 1


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "false"])
def test_it_can_be_switched_off(
    word: str, own: Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ANTIPHON_GUARD", word)

    own.add(2_000_000_000)

    assert own.pid is None
    assert not caplog.text


# ------------------------------------------------------------------ that of this process


async def test_the_first_child_brings_it_and_all_others_share_it() -> None:
    children = [await Child.start(["cat"], stderr="null") for _ in range(3)]
    pid = guard.pid
    assert pid is not None
    assert {child.pid for child in children} <= guard._groups

    for child in children:
        await child.end()

    assert guard.pid == pid
    assert not {child.pid for child in children} & guard._groups


async def test_no_child_has_its_socket() -> None:
    child = await Child.start(["ls", "/proc/self/fd"], stderr="null")
    fd = child.take_stdout()
    await child.wait()

    assert os.read(fd, 1000).split() == [b"0", b"1", b"2", b"3"]
    os.close(fd)
    await child.end()


async def test_what_outlives_its_leader_is_guarded_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def add(group: int) -> None:
        calls.append(f"add {status_of(group)}")

    def remove(group: int) -> None:
        calls.append(f"remove {status_of(group)}")

    monkeypatch.setattr(guard, "add", add)
    monkeypatch.setattr(guard, "remove", remove)
    child = await Child.start(
        ["sh", "-c", "sh -c 'trap \"\" TERM; echo; sleep 60' & read line; exit 0"], stderr="null"
    )
    fd = child.take_stdout()
    await asyncio.to_thread(os.read, fd, 10)
    os.close(child.take_stdin())
    await child.wait()

    await child.end()

    assert calls[0].startswith("add")
    # Without a gap: the group keeps its number after its leader is reaped.
    assert calls[1:] == ["remove gone"]
    os.close(fd)


@pytest.mark.covers("FF-35")
async def test_no_moment_of_an_ending_leaves_what_outlives_its_leader_unguarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[set[int]] = []
    remove = guard.remove

    def members(group: int) -> set[int]:
        found: set[int] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) == group and alive(process.pid):
                    found.add(process.pid)
        return found

    def noted(group: int) -> None:
        left.append(members(group))
        remove(group)

    monkeypatch.setattr(guard, "remove", noted)
    child = await Child.start(
        ["sh", "-c", "sh -c 'trap \"\" TERM; echo; sleep 60; sleep 60' & exec sleep 60"],
        stdin="null",
        stderr="null",
    )
    fd = child.take_stdout()
    await asyncio.to_thread(os.read, fd, 1)
    os.close(fd)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert members(child.pid)

    await child.end()

    assert left
    assert not any(left)


async def test_a_forked_copy_of_us_holds_nothing_and_ends_nothing() -> None:
    child = await Child.start(["cat"], stderr="null")
    theirs, ours = os.pipe()
    fd = guard.fileno
    assert fd is not None
    forked = os.fork()
    if not forked:  # nothing but plain calls in here
        held = guard.pid is not None or bool(guard._groups)
        try:
            os.fstat(fd)
            held = True
        except OSError:
            pass
        guard.close()
        os.write(ours, b"held" if held else b"nothing")
        os._exit(0)
    os.waitpid(forked, 0)

    assert os.read(theirs, 100) == b"nothing"
    assert child.returncode is None
    assert alive(child.pid)
    os.close(theirs)
    os.close(ours)
    await child.end()


# ------------------------------------------------------------------ a whole program

# The agent is a wrapper, the real one and a tool in the group, and one that has left it.
PROGRAM = """
import asyncio, os, signal, sys
from antiphon._process import Child

TREE = '''
sh -c 'sleep 61 & echo tool $!; echo agent $$; wait' &
{setsid}
echo wrapper $$
wait
'''

async def main():
    child = await Child.start(["sh", "-c", TREE.format(setsid=sys.argv[2])], stderr="null")
    fd = child.take_stdout()
    os.set_blocking(fd, True)
    text = b""
    while text.count(b"\\n") < int(sys.argv[3]):
        text += os.read(fd, 1000)
    from antiphon._guard import guard
    print(text.decode() + f"guard {guard.pid}", flush=True)
    try:
        await globals()[sys.argv[1]](child)
    finally:
        if sys.argv[1] not in FORGETS:
            await child.end(stdin_grace=0.1)

FORGETS = ["forgotten", "forked"]

async def waits(child):
    await asyncio.sleep(60)

async def raises(child):
    raise ZeroDivisionError

async def cancelled(child):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)

async def returns(child):
    pass

async def forgotten(child):
    pass

async def forked(child):
    if not os.fork():
        # A copy that lives on must not keep the guard from seeing our end.
        print("copy", os.getpid(), flush=True)
        signal.pause()
    await asyncio.sleep(60)

async def leaves(child):
    os._exit(3)

async def executes(child):
    os.execvp("sleep", ["sleep", "60"])

asyncio.run(main())
"""


class Program:
    """A program of a user of ours, and the processes it has started, by their part."""

    def __init__(self, way: str, setsid: str = "", **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, way, setsid, str(3 + bool(setsid))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **env},
        )
        self.pids: dict[str, int] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, pid = line.decode().split()
            if pid != "None":
                self.pids[name] = int(pid)
            if name == ("copy" if way == "forked" else "guard"):
                break

    def ended(self) -> int:
        """Its exit status."""
        assert self.process.stdout is not None
        status = self.process.wait(20)
        self.process.stdout.close()
        return status

    def gone(self, *names: str) -> bool:
        """Whether these end within the guard's two seconds and a bit."""
        return gone_within(6, *(self.pids[name] for name in names))


TREE = ("wrapper", "agent", "tool")


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_of_the_tree_survives_a_client_that_is_killed(number: int) -> None:
    program = Program("waits")
    program.process.send_signal(number)

    assert program.ended() != 0
    assert program.gone(*TREE)
    if number == signal.SIGKILL:
        assert program.gone("guard")


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize(
    ("way", "status"),
    [("returns", 0), ("raises", 1), ("cancelled", 1), ("forgotten", 0), ("leaves", 3)],
)
def test_nothing_of_the_tree_survives_a_client_that_ends(way: str, status: int) -> None:
    program = Program(way)

    assert program.ended() == status
    assert program.gone(*TREE)


@pytest.mark.parametrize("way", ["returns", "raises", "forgotten"])
def test_after_an_orderly_end_the_guard_is_gone_already(way: str) -> None:
    program = Program(way)
    program.ended()

    assert status_of(program.pids["guard"]) == "gone"


def test_nothing_survives_a_client_that_becomes_another_program() -> None:
    program = Program("executes")

    assert program.gone(*TREE)
    program.process.kill()
    program.ended()


def test_a_copy_of_the_client_that_lives_on_keeps_nothing_alive() -> None:
    program = Program("forked")
    program.process.kill()
    try:
        assert program.gone(*TREE)
        assert alive(program.pids["copy"])
    finally:
        os.kill(program.pids["copy"], signal.SIGKILL)
        program.ended()


@pytest.mark.covers("FF-35")
def test_what_has_left_the_group_survives_as_is_documented() -> None:
    program = Program("waits", setsid="setsid sh -c 'echo escaped $$; exec sleep 62' &")
    try:
        program.process.kill()
        program.ended()

        assert program.gone(*TREE)
        assert alive(program.pids["escaped"])
    finally:
        os.kill(program.pids["escaped"], signal.SIGKILL)


def test_without_a_guard_the_tree_survives() -> None:
    """The control: it is the guard that the other tests see."""
    program = Program("waits", ANTIPHON_GUARD="off")
    assert "guard" not in program.pids
    program.process.kill()
    program.ended()
    try:
        assert alive(program.pids["tool"])
    finally:
        os.killpg(program.pids["wrapper"], signal.SIGKILL)
    assert program.gone(*TREE)
