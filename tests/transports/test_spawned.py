"""A spawned agent: how it starts, how it is lost, how it is ended."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from antiphon import ConnectionClosed, Limits, LocalProtocolError, StartError, _descriptors
from antiphon.core import Fault
from antiphon.testing import Recorder
from antiphon.transports import ProcessTransport, _spawned, _stream, inherit_env

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PYTHON = [sys.executable, "-S", "-E", "-c"]


def python(code: str, **options: Any) -> ProcessTransport:
    return ProcessTransport([*PYTHON, "import os, signal, sys, time\n" + code], **options)


def shell(text: str, **options: Any) -> ProcessTransport:
    return ProcessTransport(["sh", "-c", text], **options)


def end_of(receiver: Recorder) -> ConnectionClosed:
    """Why the connection was lost."""
    assert isinstance(receiver.error, ConnectionClosed)
    return receiver.error


async def begin(transport: ProcessTransport) -> Recorder:
    receiver = Recorder()
    await transport.start(receiver)
    return receiver


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------ starting


async def test_frames_go_to_the_process_and_back(loop_factory: Any) -> None:
    transport = ProcessTransport(["cat"])
    assert transport.pid is None
    assert transport.exit_status is None
    assert transport.stderr_tail == ""
    assert transport.describe() == "process (cat)"
    receiver = await begin(transport)
    assert transport.describe() == f"process {transport.pid} (cat)"

    transport.send([b'{"id":1}', b'{"id":2}'])

    assert await receiver.have(2) == [b'{"id":1}', b'{"id":2}']
    await transport.aclose()
    assert transport.exit_status == 0
    assert receiver.error is None


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (["no-such-agent"], None, "the command 'no-such-agent' was not found on PATH"),
        (["cat"], "/no/such/folder", "the working directory '/no/such/folder' does not exist"),
        ([], None, "no command was given"),
    ],
)
async def test_what_cannot_be_started_says_why_at_once(
    argv: list[str], cwd: str | None, said: str
) -> None:
    transport, receiver = ProcessTransport(argv, cwd=cwd), Recorder()
    start = time.monotonic()

    with pytest.raises(StartError) as caught:
        await transport.start(receiver)

    assert time.monotonic() - start < 2
    assert str(caught.value) == said
    assert caught.value.command == transport.argv == argv
    await transport.aclose()
    transport.send([b"a"])


async def test_a_transport_starts_once() -> None:
    transport = ProcessTransport(["cat"])
    await begin(transport)

    with pytest.raises(LocalProtocolError):
        await begin(transport)

    await transport.aclose()


@pytest.mark.parametrize("opener", ["open_reader", "open_writer"])
async def test_a_start_that_fails_half_way_leaves_nothing(
    opener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    transport = ProcessTransport(["sleep", "60"])  # would not end by itself
    monkeypatch.setattr(_stream, opener, fail)

    with pytest.raises(OSError, match="Too many"):
        await begin(transport)

    assert transport.exit_status == -9


async def test_noise_on_standard_output_is_handed_up_as_it_is() -> None:
    transport = shell(
        r"""printf 'Welcome user\n\n\033]0;t\007{"id":0}\n'; head -c 200000 /dev/zero"""
    )
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert receiver.received[:2] == [b"Welcome user", b'\x1b]0;t\x07{"id":0}']
    assert receiver.received[2:] == [bytes(200_000)]
    await transport.aclose()


async def test_limits_are_kept() -> None:
    transport = shell("echo 1234567890; echo 12345", limits=Limits(frame_bytes=5))
    receiver = await begin(transport)
    await receiver.lost.wait()

    fault, frame = receiver.received
    assert isinstance(fault, Fault)
    assert frame == b"12345"
    await transport.aclose()


async def test_a_slow_process_pauses_the_sender() -> None:
    transport = python("sys.stdin.buffer.readline(); print(1, flush=True); sys.stdin.read()")
    receiver = await begin(transport)
    count = 0
    while not receiver.room:
        transport.send([b"x" * 10_000])
        count += 1
        assert count < 100
    await receiver.until(lambda: receiver.room == ["pause", "resume"])

    await transport.aclose()


@pytest.mark.covers("FF-01")
async def test_large_frames_pass_both_ways(loop_factory: Any) -> None:
    transport = ProcessTransport(["cat"])
    receiver = await begin(transport)
    frames = [bytes([65 + n]) * (n << 20) for n in range(1, 5)]

    transport.send(frames)

    assert await receiver.have(4) == frames
    await transport.aclose()


# ------------------------------------------------------------------ losing it


@pytest.mark.parametrize(("text", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
async def test_a_process_that_ends_is_lost_with_its_status_and_last_words(
    text: str, status: int, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 60)  # which must not be waited for
    transport = shell(f"echo a; printf b; echo the reason >&2; {text}")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert receiver.received == [b"a", b"b"]
    assert isinstance(receiver.error, ConnectionClosed)
    assert end_of(receiver).reason == "the agent's process ended"
    assert end_of(receiver).exit_status == status
    assert end_of(receiver).stderr_tail == "the reason\n"
    await transport.aclose()
    assert transport.exit_status == status
    assert transport.stderr_tail == "the reason\n"


async def test_everything_that_was_written_comes_before_the_end() -> None:
    transport = python("sys.stdout.write('frame\\n' * 100_000); sys.stdout.flush(); os._exit(1)")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert len(receiver.received) == 100_000
    await transport.aclose()


async def test_a_grandchild_that_holds_the_output_delays_the_end_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 60)
    transport = shell("echo a; sleep 60 & printf b; exit 3")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert receiver.received == [b"a", b"b"]
    assert end_of(receiver).exit_status == 3
    await transport.aclose()


async def test_a_grandchild_that_goes_on_writing_is_not_listened_to_for_ever() -> None:
    transport = shell("yes & echo $!; exit 3")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert end_of(receiver).exit_status == 3
    await transport.aclose()
    first = receiver.received[0]
    assert isinstance(first, bytes)
    assert not alive(int(first))


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("pausing_again", [False, True])
@pytest.mark.parametrize("by_thread", [False, True])
async def test_the_end_does_not_wait_for_a_receiver_that_has_paused(
    by_thread: bool, pausing_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> bool:
        return False

    if by_thread:
        monkeypatch.setattr(_descriptors, "_can_poll", refuse)
    transport = shell("echo a; read go; seq 10000; exit 3")
    receiver = await begin(transport)
    await receiver.have(1)
    transport.pause_reading()

    def pause_again(_frames: list[bytes | Fault]) -> None:
        transport.pause_reading()

    if pausing_again:
        receiver.on_frames = pause_again
    transport.send([b"go"])
    await receiver.lost.wait()

    assert receiver.received == [b"a", *(b"%d" % n for n in range(1, 10_001))]
    assert end_of(receiver).exit_status == 3
    await transport.aclose()


async def test_closed_output_is_reported_with_the_status_that_follows() -> None:
    transport = shell("exec >&-; sleep 0.1; echo why >&2; exit 4")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert end_of(receiver).exit_status == 4
    assert end_of(receiver).stderr_tail == "why\n"
    await transport.aclose()


@pytest.mark.covers("FF-39")
async def test_the_end_of_standard_error_quotes_no_secret_of_the_environment() -> None:
    lines: list[str] = []
    transport = shell(
        'echo "no account for $THE_TOKEN" >&2; exit 3',
        env={"THE_TOKEN": "sk-12345678"},
        stderr=lines.append,
    )
    receiver = await begin(transport)
    await receiver.lost.wait()
    await transport.aclose()

    assert "no account for [THE_TOKEN]" in str(end_of(receiver))
    assert transport.stderr_tail == "no account for [THE_TOKEN]\n"
    assert [line.strip() for line in lines] == ["no account for sk-12345678"]


async def test_closed_output_of_a_process_that_stays_is_reported_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 0.05)
    transport = shell("exec >&-; read line; exit 5")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert end_of(receiver).reason == "the agent closed its output"
    assert end_of(receiver).exit_status is None
    await transport.aclose()
    assert transport.exit_status == 5


async def test_closed_input_is_reported_after_what_was_still_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 0.05)
    transport = shell("exec <&-; echo ready; exec sleep 30", stdin_grace=0.05)
    receiver = await begin(transport)
    await receiver.have(1)
    transport.send([b"a"])
    await receiver.lost.wait()

    assert end_of(receiver).reason == "the agent closed its input"
    await transport.aclose()
    assert transport.exit_status == -15


async def test_sending_to_a_process_that_is_gone_loses_it_once() -> None:
    transport = shell("exit 3")
    receiver = await begin(transport)
    for _ in range(1000):
        transport.send([b"x" * 1000])
        await asyncio.sleep(0)
    await receiver.lost.wait()

    assert end_of(receiver).exit_status == 3
    await transport.aclose()


async def test_lines_of_standard_error_are_passed_on() -> None:
    lines: list[str] = []
    transport = shell("echo one >&2; echo two >&2", stderr=lines.append)
    receiver = await begin(transport)
    await receiver.lost.wait()
    await transport.aclose()

    assert lines == ["one", "two"]


def test_a_path_for_standard_error_as_text_is_refused_and_not_taken_for_inherit() -> None:
    path: Any = "agent.log"
    with pytest.raises(ValueError, match=r"pathlib\.Path or a function, not 'agent\.log'"):
        ProcessTransport(["agent"], stderr=path)


async def test_standard_error_can_be_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    transport = shell("echo one >&2", stderr="inherit")
    receiver = await begin(transport)
    await receiver.lost.wait()
    await transport.aclose()

    assert capfd.readouterr().err == "one\n"
    assert transport.stderr_tail == ""


async def test_standard_error_can_go_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    transport = shell("echo one >&2; echo two >&2", stderr=path)
    receiver = await begin(transport)
    await receiver.lost.wait()
    await transport.aclose()

    assert path.read_text() == "one\ntwo\n"
    assert end_of(receiver).stderr_tail == "one\ntwo\n"


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize(
    ("env", "seen"),
    [
        (lambda: None, "s3cret,here,"),
        (lambda: "inherit", "s3cret,here,"),
        (lambda: "essential", ",here,"),
        (lambda: {"ADDED": "1"}, ",here,1"),
        (lambda: {"LANG": None}, ",,"),
        (lambda: inherit_env("SECRET_*", ADDED="1"), "s3cret,here,1"),
        (lambda: inherit_env(ADDED="1"), ",here,1"),
    ],
)
async def test_what_is_seen_of_our_environment_is_what_was_allowed(
    env: Callable[[], Any], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_X", "s3cret")
    monkeypatch.setenv("LANG", "here")
    transport = ProcessTransport(
        ["/bin/sh", "-c", 'echo "$SECRET_X,$LANG,$ADDED"; read line'], env=env()
    )
    receiver = await begin(transport)

    assert await receiver.have(1) == [seen.encode()]
    await transport.aclose()


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_an_environment_that_is_none_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ValueError, match="an environment variable cannot be called"):
        ProcessTransport(["cat"], env={name: "1"})


@pytest.mark.covers("R1-5")
async def test_a_flood_on_standard_error_stops_no_frame() -> None:
    transport = python(
        "sys.stderr.buffer.write(b'\\xff' * (5 << 20)); sys.stderr.flush()\n"
        "print('answer', flush=True); sys.stdin.read()"
    )
    receiver = await begin(transport)

    assert await receiver.have(1) == [b"answer"]
    await transport.aclose()


async def test_where_a_thread_reads_the_end_is_reported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int) -> bool:
        return False

    monkeypatch.setattr(_descriptors, "_can_poll", refuse)
    transport = shell("echo a; read go; printf b; exit 3")
    receiver = await begin(transport)
    await receiver.have(1)
    transport.send([b"go"])
    await receiver.lost.wait()

    assert receiver.received == [b"a", b"b"]
    assert end_of(receiver).exit_status == 3
    await transport.aclose()


async def test_where_a_thread_reads_a_grandchild_delays_the_end_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int) -> bool:
        return False

    monkeypatch.setattr(_descriptors, "_can_poll", refuse)
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 0.05)
    transport = shell("echo a; sleep 30 & exit 3")
    receiver = await begin(transport)
    await receiver.lost.wait()

    assert receiver.received == [b"a"]
    assert end_of(receiver).exit_status == 3
    await transport.aclose()


# ------------------------------------------------------------------ closing


@pytest.mark.covers("R1-4")
async def test_what_was_sent_is_read_by_the_process_before_its_input_ends(tmp_path: Path) -> None:
    path = tmp_path / "input"
    transport = shell(f"sleep 0.1; cat > {path}")
    await begin(transport)
    transport.send([b"x" * 300_000, b"last"])

    await transport.aclose()

    assert path.read_bytes() == b"x" * 300_000 + b"\nlast\n"
    assert transport.exit_status == 0


async def test_a_process_that_writes_while_it_ends_is_not_stuck() -> None:
    transport = python("sys.stdin.read(); sys.stdout.write('x' * (1 << 20)); sys.exit(4)")
    receiver = await begin(transport)
    transport.pause_reading()

    await transport.aclose()

    assert transport.exit_status == 4
    assert receiver.received == []


async def test_a_process_that_takes_no_input_is_ended_within_the_bounds() -> None:
    transport = shell("echo; exec sleep 30", stdin_grace=0.1, term_grace=0.1)
    receiver = await begin(transport)
    await asyncio.sleep(0)
    transport.send([b"x" * 1_000_000])
    start = time.monotonic()

    await transport.aclose()

    assert time.monotonic() - start < 1
    assert transport.exit_status == -15
    assert receiver.error is None


async def test_a_process_that_ignores_everything_is_killed() -> None:
    transport = shell(
        "trap '' TERM; echo; while :; do sleep 1; done", stdin_grace=0.05, term_grace=0.05
    )
    await begin(transport)

    await transport.aclose()

    assert transport.exit_status in {-9, -15}  # -15 if it came before the trap was set


async def test_the_end_is_told_before_the_process_is_waited_for() -> None:
    transport = shell("read line; sleep 0.2; exit 4")
    receiver = await begin(transport)
    closing = asyncio.create_task(transport.aclose())
    await receiver.lost.wait()

    assert transport.exit_status is None
    await closing
    assert transport.exit_status == 4


@pytest.mark.parametrize("backlog", [False, True])
async def test_a_cancelled_close_kills_at_once_and_leaves_nothing(
    backlog: bool, loop_factory: Any
) -> None:
    transport = shell("trap '' TERM; sleep 30 & echo $!; wait; wait")
    receiver = await begin(transport)
    await receiver.have(1)
    if backlog:
        transport.send([b"x" * 1_000_000])
    closing = asyncio.create_task(transport.aclose())
    also = asyncio.create_task(transport.aclose())
    await asyncio.sleep(0.01)
    start = time.monotonic()
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing
    await also

    assert time.monotonic() - start < 1
    assert transport.exit_status == -9
    first = receiver.received[0]
    assert isinstance(first, bytes)
    assert not alive(int(first))
    await transport.aclose()


async def test_one_of_two_who_close_may_give_up() -> None:
    transport = shell("read line; sleep 0.2; exit 4")
    await begin(transport)
    closing = asyncio.create_task(transport.aclose())
    impatient = asyncio.create_task(transport.aclose())
    await asyncio.sleep(0)
    impatient.cancel()

    await closing

    assert transport.exit_status == 4
    assert impatient.cancelled()


async def test_closing_in_the_moment_of_loss_says_the_end_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spawned, "EXIT_GRACE", 0.02)
    transport = shell("exec >&-; read line")
    receiver = await begin(transport)
    await asyncio.sleep(0.01)

    await transport.aclose()
    await asyncio.sleep(0.03)

    assert receiver.lost.is_set()
