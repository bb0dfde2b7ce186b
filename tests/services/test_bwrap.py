"""What a confined command can see, change and reach, tried in real sandboxes; and refusals of false ones."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.services.agent import Agent, Ctx, error_of, listen

from antiphon import _errors
from antiphon.schema import v1
from antiphon.services import Operation, Terminals, _bwrap
from antiphon.services._bwrap import Box, interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")


BWRAP = shutil.which("bwrap")


@pytest.fixture(autouse=True)
def _output_is_heard_of(  # pyright: ignore[reportUnusedFunction]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "w"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a secret in it."""
    folder = tmp_path.resolve() / "home"
    (folder / ".ssh").mkdir(parents=True)
    (folder / ".ssh" / "id_rsa").write_text("s3cret")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def confined(root: Path, **options: Any) -> tuple[Terminals, Agent]:
    options.setdefault("kill_grace", 0.5)
    terminals = Terminals(confine="bwrap", **options)
    return terminals, Agent(terminals, Ctx(root))


async def attempts(agent: Agent, script: str) -> dict[str, str]:
    """Run Python in the sandbox that tries things; what each came to."""
    program = (
        "import json, os, socket, sys\n"
        "found = {}\n"
        "def attempt(name, what):\n"
        "    try:\n"
        "        found[name] = str(what())\n"
        "    except BaseException as error:\n"
        "        found[name] = type(error).__name__\n"
        f"{script}\n"
        "print(json.dumps(found))\n"
    )
    found: dict[str, str] = json.loads(await agent.run(interpreter(), "-I", "-c", program))
    return found


# --- what is held -------------------------------------------------------------------------------


async def test_a_confined_command_changes_the_roots_and_nothing_else(
    root: Path, tmp_path: Path, home: Path
) -> None:
    terminals, agent = confined(root)
    outside = [
        *("/etc/x", "/usr/x", "/x", "/sys/x", "/proc/x", "/opt/x", "/var/x", "/run/../x"),
        *(str(Path(__file__).parent / "x"), "/home/x", "/proc/sys/kernel/hostname"),
    ]
    script = f"""
for path in {outside}:
    attempt(path, lambda: open(path, 'w'))
attempt('inside', lambda: open({str(root / "made")!r}, 'w').write('new'))
attempt('beside', lambda: open({str(tmp_path / "x")!r}, 'w').write('new'))
attempt('tmp', lambda: open('/tmp/x', 'w').write('new'))
attempt('home', lambda: open({str(home / "x")!r}, 'w').write('new'))
attempt('mkdir', lambda: os.mkdir('/made'))
attempt('remount', lambda: os.system('mount -o remount,rw / 2>/dev/null'))
attempt('chmod', lambda: os.chmod('/etc/passwd', 0o666))
attempt('chmod of the machine', lambda: os.chmod('/proc/meminfo', 0o444))
"""
    found = await attempts(agent, script)
    assert {path: found[path] for path in outside if found[path][:2] == "<_"} == {}
    assert {found[name] for name in ("inside", "beside", "tmp", "home")} == {"3"}
    assert {found[name] for name in ("mkdir", "chmod", "chmod of the machine")} <= {
        *("OSError", "PermissionError"),
    }
    assert found["remount"] != "0"
    assert (root / "made").read_text() == "new"
    # Its home and /tmp are its own, and gone with it.
    assert not (home / "x").exists()
    assert not Path("/tmp/x").exists()
    assert sorted(os.listdir(tmp_path)) == ["home", "w"]
    await terminals.aclose()


async def test_nothing_of_a_home_is_seen_and_little_else(
    root: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "neighbour").write_text("s3cret")
    terminals, agent = confined(root)
    script = f"""
attempt('key', lambda: open({str(home)!r} + '/.ssh/id_rsa').read())
attempt('through a link', lambda: open('link/.ssh/id_rsa').read())
attempt('through a process', lambda: open('/proc/1/root' + {str(home)!r} + '/.ssh/id_rsa').read())
attempt('home', lambda: os.listdir(os.path.expanduser('~')))
attempt('neighbour', lambda: open({str(tmp_path / "neighbour")!r}).read())
attempt('this file', lambda: open({__file__!r}).read())
attempt('shadow', lambda: open('/etc/shadow').read())
attempt('disk', lambda: [name for name in os.listdir('/dev') if name[:2] in ('sd', 'vd', 'nv')])
attempt('docker', lambda: os.path.exists('/var/run/docker.sock') or os.listdir('/run'))
attempt('tmp', lambda: [name for name in os.listdir('/tmp') if not {str(root)!r}.startswith('/tmp/' + name)])
attempt('passwd', lambda: 'root' in open('/etc/passwd').read())
"""
    (root / "link").symlink_to(home)
    found = await attempts(agent, script)
    denied = {"key", "through a link", "through a process", "neighbour", "this file", "shadow"}
    assert {found[name] for name in denied} <= {"FileNotFoundError", "PermissionError"}
    assert [found[name] for name in ("home", "disk", "docker", "tmp")] == ["[]"] * 4
    assert found["passwd"] == "True"
    await terminals.aclose()


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("network", [False, True])
async def test_the_network_is_there_only_if_it_was_lent(
    root: Path, listener: int, network: bool
) -> None:
    name = f"\0antiphon-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        terminals, agent = confined(root, network=network)
        script = f"""
attempt('loopback', lambda: socket.create_connection(('127.0.0.1', {listener})) and 'reached')
def unix():
    socket.socket(socket.AF_UNIX).connect({name!r})
    return 'reached'
attempt('abstract', unix)
attempt('devices', lambda: len(socket.if_nameindex()))
"""
        found = await attempts(agent, script)
        reached = "reached" if network else "ConnectionRefusedError"
        assert (found["loopback"], found["abstract"]) == (reached, reached)
        assert (found["devices"] == "1") or network
        await terminals.aclose()


async def test_a_socket_in_the_file_system_is_out_of_reach_unless_it_lies_in_a_root(
    root: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as inside, socket.socket(socket.AF_UNIX) as outside:
        inside.bind(os.path.relpath(root / "s"))
        outside.bind(os.path.relpath(tmp_path / "s"))
        inside.listen()
        outside.listen()
        terminals, agent = confined(root)
        script = """
def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)
    return 'reached'
attempt('inside', lambda: connect('s'))
attempt('outside', lambda: connect('../s'))
"""
        found = await attempts(agent, script)
        assert found == {"inside": "reached", "outside": "FileNotFoundError"}
        await terminals.aclose()


async def test_no_process_of_ours_is_seen_and_no_privilege_kept(root: Path) -> None:
    terminals, agent = confined(root)
    script = f"""
attempt('processes', lambda: len([name for name in os.listdir('/proc') if name.isdigit()]))
attempt('kill', lambda: os.kill({os.getpid()}, 0))
attempt('environment', lambda: open('/proc/1/environ', 'rb').read().count(b'MARKED'))
status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
attempt('capabilities', lambda: {{int(status[name], 16) for name in ('CapPrm', 'CapEff', 'CapBnd')}})
attempt('privileges', lambda: status['NoNewPrivs'].strip())
attempt('descriptors', lambda: sorted(os.listdir('/proc/self/fd')))
attempt('hostname', lambda: os.getpid() < 10)
"""
    found = await attempts(agent, script)
    assert found == {
        "processes": "2",
        "kill": "ProcessLookupError",
        "environment": "PermissionError",
        "capabilities": "{0}",
        "privileges": "1",
        "descriptors": "['0', '1', '2', '3']",  # the last is the listing itself
        "hostname": "True",
    }
    await terminals.aclose()


async def test_the_environment_is_the_policys_without_the_session_and_in_no_list_of_processes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "OURS"):
        monkeypatch.setenv(name, "s3cret-of-ours")
    terminals, agent = confined(root, env="inherit")
    entry = v1.EnvVariable(name="AGENTS", value="s3cret-of-the-agent")
    terminal_id = await agent.sh("env; echo end; exec sleep 60", env=[entry])
    await agent.until(terminal_id, "end\n")
    lines = (await agent.output(terminal_id)).output.splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    assert (env["OURS"], env["AGENTS"]) == ("s3cret-of-ours", "s3cret-of-the-agent")
    assert (env["TMPDIR"], env["PWD"], env["HOME"]) == ("/tmp", str(root), os.environ["HOME"])
    assert not {"DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"} & set(
        env
    )
    shown = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert shown
    assert "s3cret" not in str(shown)
    await terminals.aclose()
    terminals, agent = confined(root, env={"DISPLAY": ":7", "TMPDIR": "/var/tmp"})
    assert await agent.run("echo $DISPLAY $TMPDIR;") == ":7 /var/tmp\n"
    await terminals.aclose()


async def test_what_the_agent_puts_into_the_environment_acts_inside_only(
    root: Path, tmp_path: Path
) -> None:
    # Loaded by whatever starts with it: it must be nothing that stands outside of the sandbox.
    (root / "bwrap").write_text(f"#!/bin/sh\ntouch {tmp_path}/escaped\n")
    (root / "bwrap").chmod(0o755)
    terminals, agent = confined(root)
    env = [
        v1.EnvVariable(name="LD_PRELOAD", value=f"{root}/no.so"),
        v1.EnvVariable(name="PATH", value=f"{root}:/usr/bin:/bin"),
        v1.EnvVariable(name="PYTHONHOME", value=str(root)),
        v1.EnvVariable(name="PYTHONSTARTUP", value=str(root)),
    ]
    output = await agent.run("echo $PYTHONHOME;", env=env)
    assert output.endswith(f"{root}\n")
    # Said by the loader of the command itself, once, and by that of nothing before it.
    assert output.count("no.so") == 1
    assert not (tmp_path / "escaped").exists()
    await terminals.aclose()


async def test_what_is_made_visible_can_be_read_and_not_written(
    root: Path, home: Path, tmp_path: Path
) -> None:
    (home / "tools").mkdir()
    (home / "tools" / "t").write_text("a tool")
    (tmp_path / "linked").symlink_to(home / "tools")
    terminals, agent = confined(root, visible=[home / "tools", tmp_path / "linked"])
    script = f"""
attempt('read', lambda: open({str(home / "tools/t")!r}).read())
attempt('by its other name', lambda: open({str(tmp_path / "linked/t")!r}).read())
attempt('write', lambda: open({str(home / "tools/t")!r}, 'w'))
attempt('home', lambda: os.listdir({str(home)!r}))
"""
    assert await attempts(agent, script) == {
        "read": "a tool",
        "by its other name": "a tool",
        "write": "OSError",
        "home": "['tools']",
    }
    await terminals.aclose()


async def test_a_root_in_the_home_shows_that_root_and_not_the_home(home: Path) -> None:
    project = home / "project"
    project.mkdir()
    terminals, agent = confined(project)
    assert await agent.run("ls -A ~; touch made; ls") == "project\nmade\n"
    assert (project / "made").exists()
    await terminals.aclose()


async def test_roots_within_roots_and_under_other_names_are_all_there(
    root: Path, tmp_path: Path
) -> None:
    (root / "inner").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "alias").symlink_to(other)
    terminals = Terminals(root / "inner", root, tmp_path / "alias", confine="bwrap")
    agent = Agent(terminals, Ctx())
    line = f"echo 1 > {root}/inner/a && echo 2 > {root}/b && echo 3 > {tmp_path}/alias/c; pwd"
    assert await agent.run(line) == f"{root}/inner\n"
    assert [(root / "inner/a").exists(), (root / "b").exists(), (other / "c").exists()] == [
        True
    ] * 3
    await terminals.aclose()


# --- its end ------------------------------------------------------------------------------------


def living(marker: str) -> list[int]:
    """Processes that have `marker` among their words; a zombie has none."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or [])]


def lasting(marker: str) -> list[int]:
    """Those of `living` that do not end by themselves: one that was killed may yet have to notice."""
    for pid in living(marker):
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            select.select([end], [], [], 10)
            os.close(end)
    return living(marker)


#: A command that says "up" and stays, with the seconds among its words from its first moment on.
STAYS = "sh -c 'echo up; exec sleep $0'"


@pytest.mark.parametrize("way", ["kill", "release", "release_session", "aclose"])
async def test_a_daemon_ends_with_its_sandbox(root: Path, way: str) -> None:
    terminals, agent = confined(root)
    seconds = f"6{os.getpid()}"
    terminal_id = await agent.sh(f"setsid -f {STAYS} {seconds} & {STAYS} {seconds} & wait")
    await agent.until(terminal_id, "up\nup\n")
    assert len(living(seconds)) >= 2
    if way == "kill":
        await agent.kill(terminal_id)
        assert (await agent.wait(terminal_id)).signal == "SIGTERM"
    elif way == "release":
        await agent.release(terminal_id)
    elif way == "release_session":
        await terminals.release_session("s")
    else:
        await terminals.aclose()
    assert not lasting(seconds)
    await terminals.aclose()


async def test_the_first_process_of_a_sandbox_is_out_of_its_reach(root: Path) -> None:
    # Whoever could trace it could take it out of the group by which all in there is ended.
    terminals, agent = confined(root)
    script = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *args):
    if function(*args) < 0:
        raise OSError(ctypes.get_errno(), 'no')
    return 'done'
word = ctypes.create_string_buffer(8)
here = struct.pack('PL', ctypes.addressof(word), 8)
number = ctypes.c_ulong
attempt('attach', lambda: call(libc.ptrace, 16, 1, number(0), number(0)))
attempt('seize', lambda: call(libc.ptrace, 0x4206, 1, number(0), number(0)))
attempt('read', lambda: call(libc.process_vm_readv, 1, here, 1, here, 1, 0))
attempt('write', lambda: call(libc.process_vm_writev, 1, here, 1, here, 1, 0))
attempt('descriptor', lambda: call(libc.syscall, 438, os.pidfd_open(1), 0, 0))
attempt('memory', lambda: open('/proc/1/mem', 'rb'))
attempt('descriptors', lambda: os.readlink('/proc/1/fd/0'))
attempt('directory', lambda: os.stat('/proc/1/cwd/'))
attempt('itself', lambda: open('/proc/self/mem', 'rb').close())
os.kill(1, 9), os.kill(1, 19)
"""
    found = await attempts(agent, script)
    assert found.pop("itself") == "None"
    assert found == dict.fromkeys(found, "PermissionError")
    assert len(found) == 8
    await terminals.aclose()


@pytest.mark.skipif(
    platform.machine() not in {"x86_64", "aarch64"}, reason="the calls have other numbers"
)
async def test_no_key_of_the_session_is_in_reach(root: Path) -> None:
    terminals, agent = confined(root)
    add, request, keyctl = (248, 249, 250) if platform.machine() == "x86_64" else (217, 218, 219)
    script = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    if libc.syscall(*args) < 0:
        raise OSError(errno.errorcode[ctypes.get_errno()])
for session in (-2, -3, -4, -5):  # of the process, of the session, of the user
    attempt(f'find {{session}}', lambda: call({keyctl}, 0, session, 0))
attempt('add', lambda: call({add}, b'user', b'x', b'y', 1, -3))
attempt('request', lambda: call({request}, b'user', b'x', 0, -3))
attempt('other', lambda: call({keyctl} + 1000))
attempt('why', lambda: libc.syscall({keyctl}, 0, -3, 0) + ctypes.get_errno())
"""
    found = await attempts(agent, script)
    assert found.pop("why") == "37"  # no such call, 38, less one
    assert found == dict.fromkeys(found, "OSError")
    await terminals.aclose()


@pytest.mark.covers("R1-117")
async def test_what_a_confined_command_leaves_behind_lives_until_the_release(root: Path) -> None:
    terminals, agent = confined(root)
    seconds = f"7{os.getpid()}"
    terminal_id = await agent.sh(f"{STAYS} {seconds} & echo started")
    assert (await agent.wait(terminal_id)).exit_code == 0
    assert (await agent.output(terminal_id)).output.replace("up\n", "") == "started\n"
    await agent.until(terminal_id, "up\n")
    assert living(seconds)
    await agent.release(terminal_id)
    assert not lasting(seconds)
    await terminals.aclose()


@pytest.mark.covers("R1-118")
@pytest.mark.parametrize(
    ("script", "code", "name"),
    [
        ("exit 0", 0, None),
        ("exit 3", 3, None),
        ("exit 137", 137, None),
        ("exit 255", 255, None),
        ("kill -KILL $$", None, "SIGKILL"),
        ("kill -TERM $$", None, "SIGTERM"),
        ("kill -HUP $$", None, "SIGHUP"),
        ("ulimit -c 0; kill -SEGV $$", None, "SIGSEGV"),
        (f"kill -{signal.SIGRTMIN + 2} $$", None, "SIGRTMIN+2"),
    ],
)
async def test_the_end_of_a_confined_command_is_told_as_it_was(
    root: Path, script: str, code: int | None, name: str | None
) -> None:
    terminals, agent = confined(root)
    terminal_id = await agent.sh(script)
    assert await agent.wait(terminal_id) == v1.WaitForTerminalExitResponse(
        exit_code=code, signal=name
    )
    await terminals.aclose()


async def test_a_confined_command_that_ignores_term_is_killed(root: Path) -> None:
    terminals, agent = confined(root, kill_grace=0.05)
    script = "trap '' TERM; (trap '' TERM; while :; do sleep 60; done) & echo up; wait; sleep 60"
    terminal_id = await agent.sh(script)
    await agent.until(terminal_id, "up")
    await agent.kill(terminal_id)
    assert (await agent.wait(terminal_id)).signal == "SIGKILL"
    assert (await agent.output(terminal_id)).output == "up\n"
    await terminals.aclose()


async def test_a_confined_command_gets_term_and_time_to_say_good_bye(root: Path) -> None:
    terminals, agent = confined(root)
    terminal_id = await agent.sh(
        "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    )
    await agent.until(terminal_id, "up")
    await agent.kill(terminal_id)
    answer = await agent.output(terminal_id)
    assert answer.output.endswith("bye\n")
    assert answer.exit_status == v1.TerminalExitStatus(exit_code=4, signal=None)
    await terminals.aclose()


async def test_a_sandbox_that_somebody_else_kills_has_ended_by_a_kill(root: Path) -> None:
    terminals, agent = confined(root)
    terminal_id = await agent.sh("echo up; sleep 60")
    await agent.until(terminal_id, "up")
    command: Any = terminals._sessions["s"].terminals[terminal_id]._command
    os.kill(command._child.pid, signal.SIGKILL)
    assert (await agent.wait(terminal_id)).signal == "SIGKILL"
    await terminals.aclose()


async def test_commands_that_multiply_end_together(root: Path) -> None:
    terminals, agent = confined(root, kill_grace=0.05)
    seconds = f"8{os.getpid()}"
    # Each process makes two more, some of them out of every group, until there are sixty-three.
    (root / "grow").write_text(
        'if [ "$1" -gt 0 ]; then setsid sh grow $(($1 - 1)) & sh grow $(($1 - 1)) & fi\n'
        f"[ $1 = 0 ] && echo leaf; trap '' TERM; sleep {seconds} & wait; sleep {seconds}\n"
    )
    terminal_id = await agent.sh("sh grow 5")
    while (await agent.output(terminal_id)).output.count("leaf") < 32:
        agent.heard.clear()
        await agent.heard.wait()
    await agent.release(terminal_id)
    assert not lasting(seconds)
    await terminals.aclose()


@pytest.mark.covers("FF-35")
def test_a_sandbox_ends_with_a_program_that_is_killed(root: Path) -> None:
    seconds = f"9{os.getpid()}"
    os.mkfifo(root / "up")
    program = f"""
import asyncio, sys
from tests.services.agent import Agent, Ctx
from antiphon.services import Terminals
async def main():
    agent = Agent(Terminals(confine="bwrap"), Ctx({str(root)!r}))
    terminal_id = await agent.sh("setsid -f sh -c 'echo up > up; exec sleep $0' {seconds}; sleep {seconds}")
    print(terminal_id, flush=True)
    await agent.wait(terminal_id)
asyncio.run(main())
"""
    # Without the guard: the sandbox needs none.
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "ANTIPHON_GUARD": "off"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith(b"term-")
        assert (root / "up").read_text() == "up\n"
        assert living(seconds)
        inside = psutil.Process(running.pid).children(recursive=True)
        ends = [os.pidfd_open(process.pid) for process in inside]
        running.kill()
        running.wait()
        for end in ends:
            assert select.select([end], [], [], 10)[0]
            os.close(end)
        assert not living(seconds)


# --- its directory ------------------------------------------------------------------------------


async def test_a_confined_command_begins_in_the_directory_that_was_checked_or_nowhere(
    root: Path,
) -> None:
    (root / "d").mkdir()

    async def rename(operation: Operation) -> bool:
        (root / "d").rename(root / "moved")
        (root / "d").symlink_to("/etc")
        return True

    terminals, agent = confined(root, guard=rename)
    assert await agent.run("/bin/pwd", cwd=f"{root}/d") == f"{root}/moved\n"
    await terminals.aclose()


async def test_a_directory_that_is_exchanged_at_the_last_moment_is_not_entered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "d").mkdir()
    arguments = Box.arguments

    def swap(self: Box, *given: Any) -> list[bytes]:
        words = arguments(self, *given)
        (root / "d").rename(root / "moved")
        (root / "d").symlink_to("/etc")
        return words

    terminals, agent = confined(root)
    monkeypatch.setattr(Box, "arguments", swap)
    code, _, data = await error_of(agent.create("touch", "x", cwd=f"{root}/d"))
    assert (code, data["reason"]) == (-32602, "cannot_start")
    assert os.listdir(root / "moved") == []
    await terminals.aclose()


async def test_a_root_that_is_exchanged_at_the_last_moment_is_still_the_one_that_was_opened(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    terminals, agent = confined(root)
    arguments = Box.arguments

    def swap(self: Box, *given: Any) -> list[bytes]:
        words = arguments(self, *given)
        root.rename(tmp_path / "moved")
        root.symlink_to(other)
        return words

    monkeypatch.setattr(Box, "arguments", swap)
    await agent.run("touch", "x")
    assert os.listdir(tmp_path / "moved") == ["x"]
    assert os.listdir(other) == []
    await terminals.aclose()


async def test_a_root_that_is_gone_is_a_refusal(root: Path) -> None:
    terminals, agent = confined(root)
    await agent.run("true")
    root.rmdir()
    code, _, data = await error_of(agent.create("true"))
    assert (code, data["reason"], data["errno"]) == (-32603, "io_error", "ENOENT")
    await terminals.aclose()


async def test_what_is_visible_and_exchanged_for_a_link_shows_nothing_else(
    root: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "seen").mkdir()
    terminals, agent = confined(root, visible=[tmp_path / "seen"])
    assert await agent.run("ls", "-a", str(tmp_path / "seen")) == ".\n..\n"
    (tmp_path / "seen").rmdir()
    for target in (home / ".ssh", home / ".ssh" / "id_rsa"):
        (tmp_path / "seen").symlink_to(target)
        code, _, data = await error_of(agent.create("ls", str(tmp_path / "seen")))
        assert (code, data["reason"]) == (-32602, "cannot_start")
        (tmp_path / "seen").unlink()
    await terminals.aclose()


async def test_a_bwrap_that_a_command_could_exchange_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(root, f'exec {BWRAP} "$@"', monkeypatch)
    terminals, agent = confined(root)
    code, _, data = await error_of(agent.create("true"))
    assert (code, data["reason"]) == (-32602, "cannot_start")
    await terminals.aclose()


@pytest.mark.parametrize("command", ["no-such-program", "./missing", f"{Path.home()}/x"])
async def test_what_is_not_there_in_the_sandbox_is_refused_at_once(
    root: Path, command: str
) -> None:
    terminals, agent = confined(root, per_session=1)
    for _ in range(2):
        code, _, data = await error_of(agent.create(command))
        assert (code, data["reason"]) == (-32602, "command_not_found")
    await terminals.aclose()


async def test_a_start_does_not_tell_which_programs_there_are_outside(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = home / "bin"
    outside.mkdir()
    monkeypatch.setenv("PATH", f"{outside}:{os.environ['PATH']}")
    for name in ("tool", "my tool"):
        (outside / name).write_text("#!/bin/sh\n")
        (outside / name).chmod(0o755)
        (root / f"link to {name}").symlink_to(outside / name)
    (root / "link to no tool").symlink_to(outside / "no tool")
    path = v1.EnvVariable(name="PATH", value=f"{root}:{outside}:../home/bin")
    terminals, agent = confined(root)
    for there, absent in (
        (f"{outside}/tool", f"{outside}/nool"),
        (f"{outside}/my tool", f"{outside}/no tool"),
        ("../home/bin/tool", "../home/bin/nool"),
        (f"{root}/link to tool", f"{root}/link to no tool"),
        ("tool", "nool"),
        ("my tool", "no tool"),
    ):
        told: list[object] = []
        for command in (there, absent):
            try:
                terminal_id = await agent.create(command, env=[path])
            except _errors.RequestError as error:
                told.append((error.code, error.data["reason"]))
            else:
                told.append(await agent.wait(terminal_id))
        assert told[0] == told[1], there
    (root / "my tool").write_text("#!/bin/sh\necho mine\n")
    (root / "my tool").chmod(0o755)
    assert await agent.run(f"{root}/my tool") == "mine\n"
    assert await agent.run("./my tool") == "mine\n"
    assert await agent.run("my tool", env=[path]) == "mine\n"
    await terminals.aclose()


async def test_a_whole_line_is_run_by_a_shell_inside(root: Path) -> None:
    terminals, agent = confined(root)
    assert await agent.run("echo hi | tr h H; touch /x 2>&1 | grep -c Read-only") == "Hi\n1\n"
    await terminals.aclose()


# --- where there is none ------------------------------------------------------------------------


def fake(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(_bwrap, "_works", set[Any]())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'bwrap: No permissions to create new namespace, likely because' >&2; exit 1",
            "No permissions to create new namespace.*user.max_user_namespaces",
        ),
        (
            "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1",
            "apparmor_restrict_unprivileged_userns",
        ),
        ("echo 'bwrap: Unknown option --bind-fd' >&2; exit 1", "update bubblewrap"),
        ("exit 7", "it ended with 7 and nothing that holds"),
        # One that confines nothing, and two that are real and leave something out.
        ('shift 2; exec "$@"', "makes no sandbox here"),
        (f'fd=$2; shift 2; exec {BWRAP} --args $fd --share-net "$@"', "nothing that holds"),
        (f'fd=$2; shift 2; exec {BWRAP} --args $fd --bind /usr /usr "$@"', "nothing that holds"),
    ],
)
def test_a_sandbox_that_cannot_be_made_is_refused_at_once_with_what_is_missing(
    tmp_path: Path, script: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, script, monkeypatch)
    with pytest.raises(NotImplementedError, match=f'confine="bwrap": {tmp_path}/bwrap.*{said}'):
        Terminals(confine="bwrap")


def test_a_sandbox_that_is_never_made_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(_bwrap, "PROBE_SECONDS", 0.05)
    with pytest.raises(NotImplementedError, match="timed out"):
        Terminals(confine="bwrap")


def test_without_bubblewrap_its_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotImplementedError, match="install the package bubblewrap"):
        Terminals(confine="bwrap")


def test_on_another_system_it_says_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="needs Linux"):
        Box()


def test_whether_it_works_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Terminals(confine="bwrap")

    def never(_self: Box) -> None:
        raise AssertionError

    monkeypatch.setattr(Box, "_probe", never)
    Terminals(confine="bwrap")


def test_options_of_a_sandbox_without_one_are_a_mistake(tmp_path: Path) -> None:
    for options in ({"network": True}, {"visible": [tmp_path]}):
        with pytest.raises(ValueError, match='give confine="bwrap"'):
            Terminals(**options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="not 'docker'"):
        Terminals(confine="docker")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="whose root is /"):
        Terminals("/", confine="bwrap")
    with pytest.raises(FileNotFoundError):
        Terminals(confine="bwrap", visible=[tmp_path / "none"])


async def test_a_session_whose_root_is_everything_gets_no_sandbox() -> None:
    terminals, _ = confined(Path(tempfile.gettempdir()))
    code, _, data = await error_of(Agent(terminals, Ctx("/")).create("true"))
    assert (code, data["reason"]) == (-32602, "cannot_start")
    await terminals.aclose()
