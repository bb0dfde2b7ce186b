"""Owners: alive as long as their process is, and not a moment longer."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from antiphon.journal._sqlite_owners import Owner, is_alive, owner_text, tidy

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import sys
from pathlib import Path
from antiphon.journal._sqlite_owners import Owner
owner = Owner(Path(sys.argv[1]))
print(owner.name, flush=True)
sys.stdin.read()
"""


def child(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_an_owner_is_alive_until_it_is_closed(tmp_path: Path) -> None:
    owner = Owner(tmp_path)

    assert is_alive(tmp_path, owner.name)
    assert owner_text(owner.name) == f"process {os.getpid()}"
    owner.close()
    owner.close()
    assert not is_alive(tmp_path, owner.name)
    assert os.listdir(tmp_path) == []


def test_another_process_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    process, name = child(tmp_path)
    try:
        assert is_alive(tmp_path, name)
        tidy(tmp_path)
        assert is_alive(tmp_path, name)
    finally:
        end(process)

    assert not is_alive(tmp_path, name)
    assert os.listdir(tmp_path) == [name]  # it was killed and could not
    tidy(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.covers("FF-49")
def test_a_file_with_the_id_of_a_living_process_is_no_owner(tmp_path: Path) -> None:
    name = f"{os.getpid()}-0123456789abcdef"
    (tmp_path / name).touch()

    assert not is_alive(tmp_path, name)


def test_an_owner_that_nobody_can_find_is_dead(tmp_path: Path) -> None:
    assert not is_alive(tmp_path, "1-0123456789abcdef")


def test_looking_at_an_owner_of_this_process_does_not_end_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for _ in range(3):
        assert is_alive(tmp_path, owner.name)
        tidy(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from antiphon.journal._sqlite_owners import is_alive;"
        "sys.exit(not is_alive(Path(sys.argv[1]), sys.argv[2]))"
    )
    seen = subprocess.run([sys.executable, "-c", code, str(tmp_path), owner.name], check=False)
    owner.close()

    assert seen.returncode == 0


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    for mask in (0o000, 0o077, 0o277, 0o777):
        before = os.umask(mask)
        try:
            owner = Owner(tmp_path)
        finally:
            os.umask(before)
        assert (tmp_path / owner.name).stat().st_mode & 0o7777 == 0o600
        owner.close()


def test_a_child_that_lives_on_does_not_keep_a_dead_parent_alive(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from antiphon.journal._sqlite_owners import Owner
owner = Owner(Path(sys.argv[1]))
ready, told = os.pipe()
if os.fork() == 0:
    os.write(told, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
print(owner.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    name = process.stdout.readline().strip()
    process.wait()
    alive = is_alive(tmp_path, name)
    process.stdin.close()
    process.stdout.read()  # until the child has ended, too
    process.stdout.close()

    assert not alive


def test_a_child_can_own_whatever_a_thread_of_its_parent_was_doing(tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading, time
from pathlib import Path
from antiphon.journal._sqlite_owners import Owner, _guard
guarded = threading.Event()
def work():
    with _guard:
        guarded.set()
        time.sleep(0.1)  # a fork that does not wait for it comes in between
working = threading.Thread(target=work)
working.start()
guarded.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)
    Owner(Path(sys.argv[1])).close()
    os._exit(0)
print(os.waitpid(child, 0)[1])
working.join()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=25,
        check=True,
    )

    assert done.stdout == "0\n"
