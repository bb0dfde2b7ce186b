"""Ends what we have started when we die without a chance to do it ourselves.

Responsible for one small process beside ours, the guard, started with the first child: a few lines
of POSIX shell that wait for the end of a socket which only we hold. It ends with us, whatever ends us
(SIGKILL and the kernel's killing for memory included), and then the guard sends TERM to the process
groups that it was told of and not told to forget, waits for two seconds at most, and sends KILL.
Leaves every ending that we live to see to `_process`; on Windows a job object does the same.

* The guard is a child of ours in a session of its own: it ignores what a terminal sends, holds none
  of our descriptors but its end of the socket, and has our PATH as its whole environment.
* A forked copy of us gives its copy of the socket up, and starts a guard of its own when it starts
  a child: children belong to the process that has started them. So do a daemon's that forks itself
  into the background after its first child: the guard ends them with their parent.
* A guard that was killed is replaced when it is next needed, and the new one is told everything.
* Where there is no `/bin/sh`, one warning is logged and there is no guard. `ANTIPHON_GUARD=off` in
  the environment asks for none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

__all__ = ["Guard", "guard"]

logger = logging.getLogger("antiphon.process")

SHELL = "/bin/sh"
#: This variable set to one of these: no guard.
SWITCH = "ANTIPHON_GUARD"
OFF = frozenset(["off", "no", "0", "false"])

#: A message is eight bytes and the guard does nothing but read: if it takes none for so long, it is
#: stopped or stuck, and replaced.
SEND_WAIT = 0.2
#: An idle guard ends within a millisecond of our saying so.
CLOSE_WAIT = 0.5

# A line that has no end is one that we died over, and counts for nothing: it may be half a number.
# What is gone is forgotten at once, so that its number cannot be somebody else's when KILL is sent.
# `kill -s TERM -- -1` is what POSIX has; BusyBox does not know it, and every shell knows this way.
_SCRIPT = """\
# antiphon: when process {pid} has died, this ends the process groups that it leaves behind.
trap '' HUP INT QUIT TERM
own=' '
while read -r line; do
  group=${{line#?}}
  case $line in
  +*) own="$own$group " ;;
  -*) case $own in *" $group "*) own="${{own%%" $group "*}} ${{own#*" $group "}}" ;; esac ;;
  esac
done
for group in $own; do kill -TERM "-$group"; done
for tenth in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  left=
  for group in $own; do kill -0 "-$group" && left="$left $group"; done
  own=$left
  [ "$own" ] || exit 0
  sleep 0.1 || sleep 2
done
for group in $own; do kill -KILL "-$group"; done
"""

# Not every system has it; where it is missing, the interpreter ignores SIGPIPE all the same.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Guard:
    """The guard of this process; started by the first `add`. May be used from any thread.

    Nothing here raises or waits for longer than a moment: a child that cannot be guarded runs
    without.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may end a child while its thread is in here.
        self._lock = threading.RLock()
        self._groups: set[int] = set()
        self._socket: socket.socket | None = None
        self._pid: int | None = None
        self._impossible = False
        self._warned = False

    @property
    def pid(self) -> int | None:
        """The guard's process id; None while there is none."""
        return self._pid

    @property
    def fileno(self) -> int | None:
        """Our end of the socket to it; None while there is none."""
        return None if self._socket is None else self._socket.fileno()

    def add(self, group: int) -> None:
        """End this process group if we die before `remove`."""
        with self._lock:
            if self._impossible or os.environ.get(SWITCH, "").lower() in OFF:
                return
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a group; to be called while its number cannot be anybody else's. Idempotent."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
                self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and nothing else: for the interpreter's exit. Waits for half a second at most.

        A later `add` starts another.
        """
        with self._lock:
            for group in list(self._groups):
                self.remove(group)
            if self._socket is None or self._pid is None:
                return
            # Not only closed: code that forks by itself may have a copy.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            deadline = time.monotonic() + CLOSE_WAIT
            while not _gone(self._pid) and time.monotonic() < deadline:
                time.sleep(0.0005)
            self._forget()

    # ------------------------------------------------------------------ the process

    def _tell(self, line: str) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(line.encode(), _NO_SIGNAL)
            except OSError as error:
                self._discard(error)
            else:
                return
        # A new one is told of all groups, those of this line included.
        if self._groups:
            self._start()

    def _start(self) -> None:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._warn(error)
            return
        ours.settimeout(SEND_WAIT)
        try:
            process = subprocess.Popen(
                [SHELL, "-c", _SCRIPT.format(pid=os.getpid()), "antiphon-guard"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.pathsep.join([os.defpath, os.environ.get("PATH", "")])},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            ours.close()
            # A shell that is not there will not come; descriptors and memory may.
            self._impossible = isinstance(error, (FileNotFoundError, PermissionError))
            self._warn(error)
            return
        finally:
            theirs.close()
        # Waiting for it is ours: Popen would complain that it is forgotten while it runs.
        process.returncode = 0
        self._socket, self._pid = ours, process.pid
        try:
            for group in self._groups:
                ours.sendall(f"+{group}\n".encode(), _NO_SIGNAL)
        except OSError as error:
            self._discard(error)
            self._warn(error)

    def _discard(self, error: OSError) -> None:
        """Give up a guard that is gone, or that does not listen."""
        if sys.platform != "win32" and self._pid is not None:
            # One that holds its end of the socket lives, so the number is its own; it has to be
            # killed before we close ours, or it would take us for dead.
            if isinstance(error, TimeoutError):
                with contextlib.suppress(OSError):
                    os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(self._pid, 0)
        self._forget()

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._pid = None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "no guard can be started (%s): if this process is killed, "
                "the processes that it has started go on",
                error,
            )

    # ------------------------------------------------------------------ fork

    def before_fork(self) -> None:
        """No copy may be made of a socket that nobody has noted yet."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Give up what is the parent's, without ending it."""
        self._lock = threading.RLock()
        self._groups.clear()
        self._forget()


def _gone(pid: int) -> bool:
    if sys.platform == "win32":
        raise NotImplementedError
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except OSError:  # somebody waits for all children
        return True


#: The one of this process.
guard = Guard()

if sys.platform != "win32":
    os.register_at_fork(
        before=guard.before_fork,
        after_in_parent=guard.after_fork_in_parent,
        after_in_child=guard.after_fork_in_child,
    )
