"""The steps before a command, taken in a process of their own, as an order says."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from antiphon.services import _inside
from antiphon.services._inside import Order, pack

if TYPE_CHECKING:
    from collections.abc import Iterator


class Inside:
    """A process that waits for an order, as `_launched` starts it."""

    def __init__(self, folder: Path) -> None:
        self.control, other = socket.socketpair()
        self.control.settimeout(10)
        self.output, output = os.pipe()
        with other, Path(_inside.__file__).open("rb") as program:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-", str(other.fileno()), str(output)],
                stdin=program,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(other.fileno(), output),
                cwd=folder,
                env={"LEAK": "1"},
                start_new_session=True,
            )
        os.close(output)
        self.lines = self.control.makefile("rb")
        assert self.lines.readline() == b"begun\n"

    def order(
        self, *argv: str, supervise: bool = False, terminal: bool = False, place: str = ""
    ) -> None:
        words = [os.fsencode(word) for word in argv]
        env = {b"PATH": os.environb[b"PATH"], b"A": b"=\xff\n"}
        self.control.sendall(
            pack(supervise=supervise, terminal=terminal, place=place, argv=words, env=env)
        )

    def said(self) -> str:
        return self.lines.readline().decode().strip()

    def printed(self) -> bytes:
        with open(self.output, "rb", closefd=False) as file:
            return file.read()

    def close(self) -> None:
        self.lines.close()
        self.control.close()
        assert self.process.stderr is not None
        complaint = self.process.stderr.read()
        self.process.stderr.close()
        self.process.wait(10)
        os.close(self.output)
        assert complaint == b""


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    process = Inside(tmp_path)
    yield process
    process.close()


def test_an_order_is_read_as_it_was_written() -> None:
    argv, env = [b"a", b"", b"\xff b\n"], {b"A": b"=", b"\xfe": b""}
    packed = pack(supervise=True, terminal=False, place="1:2", argv=argv, env=env)
    order = Order(packed[_inside.HEAD :])
    assert int(packed[: _inside.HEAD]) == len(packed) - _inside.HEAD
    assert (order.supervise, order.terminal, order.place) == (True, False, "1:2")
    assert (order.argv, order.env) == (argv, env)
    empty = Order(pack(supervise=False, terminal=True, place="", argv=[b"x"], env={})[12:])
    assert (empty.argv, empty.env, empty.terminal) == ([b"x"], {}, True)


def test_it_needs_nothing_but_what_starts_fast() -> None:
    text = Path(_inside.__file__).read_text()
    imported = set(re.findall(r"^ *(?:import|from) (\S+)", text, re.MULTILINE))
    # The last one only where a sandbox's first process has to be out of reach.
    assert imported <= {"fcntl", "os", "select", "signal", "sys", "termios", "ctypes"}
    assert re.findall(r"^( *)import ctypes", text, re.MULTILINE) == [" " * 8]
    assert len(text) < 64 * 1024  # it is written to a pipe that nobody reads yet


def test_it_becomes_the_command_with_its_environment_and_nothing_else(inside: Inside) -> None:
    inside.order("sh", "-c", "env; ls /proc/self/fd | tr '\\n' ' '; trap; cat; exit 4")
    assert inside.said() == ""  # the socket closes: nothing more is said
    printed = inside.printed()
    assert b"A==\xff\n" in printed
    assert b"LEAK" not in printed
    assert printed.endswith(b"0 1 2 3 ")
    assert inside.process.wait(10) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [(["no-such-program"], "failed exec 2"), (["/"], "failed exec 13")],
)
@pytest.mark.parametrize("supervise", [False, True])
def test_a_command_that_cannot_be_run_is_told(
    inside: Inside, words: list[str], said: str, supervise: bool
) -> None:
    inside.order(*words, supervise=supervise)
    assert inside.said() == said
    assert inside.process.wait(10) == 0


def test_a_terminal_that_is_none_is_told(inside: Inside) -> None:
    inside.order("true", terminal=True)
    assert re.fullmatch(r"failed terminal \d+", inside.said())


def test_another_directory_than_the_one_meant_is_told(inside: Inside, tmp_path: Path) -> None:
    here = tmp_path.stat()
    inside.order("true", place=f"{here.st_dev}:{here.st_ino + 1}")
    assert inside.said() == "failed cwd 0"


def test_the_directory_that_was_meant_is_taken(inside: Inside, tmp_path: Path) -> None:
    here = tmp_path.stat()
    inside.order("pwd", place=f"{here.st_dev}:{here.st_ino}")
    assert inside.printed() == os.fsencode(f"{tmp_path.resolve()}\n")


def test_what_it_supervises_is_told_of_and_outlived(inside: Inside) -> None:
    inside.order("sh", "-c", "kill -9 $$", supervise=True)
    assert (inside.said(), inside.said()) == ("started", "exited 9")
    assert inside.printed() == b""
    assert inside.process.poll() is None
    inside.control.shutdown(socket.SHUT_RDWR)  # who started it is gone
    assert inside.process.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="there are sandboxes on Linux alone")
def test_a_first_process_that_cannot_stand_apart_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def prctl(self, *_: object) -> int:
            return -1

    for broken in (None, SimpleNamespace(), SimpleNamespace(CDLL=len)):
        monkeypatch.setitem(sys.modules, "ctypes", broken)
        with pytest.raises(_inside.Failed, match="apart"):
            _inside.stand_apart()
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    with pytest.raises(_inside.Failed, match="apart"):
        _inside.stand_apart()


def test_signals_are_as_for_any_new_process(inside: Inside) -> None:
    inside.order("sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status", supervise=True)
    printed = inside.printed().split()
    # Signals 32 and 33 are the C library's own: how they are inherited, no program can change.
    assert {int(mask, 16) & ~(3 << 31) for mask in printed[1::2]} == {0}
    inside.control.shutdown(socket.SHUT_RDWR)


def test_without_an_order_it_ends(inside: Inside) -> None:
    inside.control.shutdown(socket.SHUT_RDWR)
    assert inside.process.wait(10) == 0
