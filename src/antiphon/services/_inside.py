"""The steps before a command that cannot be taken from outside: its terminal, its sandbox's first process.

`_launched` has a Python of its own read this text from standard input, apart from everything else
here, so it imports only what starts fast and knows nothing of this package. It reads one order from
a socket, then either becomes the command, or, as the first process of a sandbox, starts it, says how
it ended, and ends everything with itself. Leaves what to run, and where, to `_launched` and `_bwrap`.

To us, in lines: `begun`, then `failed STEP ERRNO`, or nothing more, or `started` and later
`exited STATUS` (as `wait` has it). From us, after the order: `T` asks everything to end.
"""

import fcntl
import os
import select
import signal
import sys
import termios

#: Digits in front of an order: how many bytes it has.
HEAD = 12
_PR_SET_DUMPABLE = 4


class Failed(Exception):
    """A step could not be taken."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(step, number)
        self.step = step
        self.number = number


def pack(
    *, supervise: bool, terminal: bool, place: str, argv: "list[bytes]", env: "dict[bytes, bytes]"
) -> bytes:
    """Write an order down; `place` is "device:inode" of the working directory, or "" to take any."""
    fields = [b"1" if supervise else b"", b"1" if terminal else b"", place.encode()]
    fields += [b"%d" % len(argv), *argv]
    fields += [name + b"=" + value for name, value in env.items()]
    body = b"\0".join(fields)
    return b"%0*d" % (HEAD, len(body)) + body


class Order:
    """An order as it was read."""

    def __init__(self, body: bytes) -> None:
        supervise, terminal, place, count, *rest = body.split(b"\0")
        self.supervise = bool(supervise)
        self.terminal = bool(terminal)
        self.place = place.decode()
        self.argv = rest[: int(count)]
        self.env = {
            name: value
            for name, _, value in (entry.partition(b"=") for entry in rest[int(count) :])
        }


def receive(control: int) -> Order:
    """Read one order. Raises EOFError if whoever gives it is gone."""
    return Order(_exactly(control, int(_exactly(control, HEAD))))


def _exactly(fd: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        data = os.read(fd, size - len(read))
        if not data:
            raise EOFError
        read += data
    return read


def say(control: int, line: str) -> None:
    """Tell us something; there may be nobody left to tell."""
    try:
        os.write(control, line.encode() + b"\n")
    except OSError:
        os._exit(1)


def become(order: Order, output: int) -> None:
    """Take the descriptors, the terminal and the signals of the command, then be it."""
    if order.terminal:
        try:
            fcntl.ioctl(output, termios.TIOCSCTTY, 0)
        except OSError as error:
            raise Failed("terminal", error.errno or 0) from error
        os.dup2(output, 0)
    else:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ", "SIGCHLD"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(order.argv[0], order.argv, order.env)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        raise Failed("exec", error.errno or 0) from error


def check_place(place: str) -> None:
    """See that the working directory, reached by its name, is the one that was checked."""
    if place:
        here = os.stat(".")
        if place != f"{here.st_dev}:{here.st_ino}":
            raise Failed("cwd", 0)


def stand_apart() -> None:
    """Let no other process trace this one, write into it, or take its descriptors.

    The command is the same user. It could have the first process of its sandbox leave the process
    group by which it is ended, and answer to nobody: all in there would live on after the release.
    """
    if sys.platform != "linux":
        return  # where there is no sandbox
    try:
        import ctypes  # nothing else here is slow to import, and nothing else needs it

        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError, TypeError) as error:
        raise Failed("apart", 0) from error
    if prctl(_PR_SET_DUMPABLE, *[ctypes.c_ulong(0)] * 4):
        raise Failed("apart", ctypes.get_errno())


def supervise(order: Order, control: int, output: int) -> None:
    """Start the command, tell of its end, and stay for what it leaves, until we are not wanted."""
    stand_apart()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            become(order, output)
        except Failed as failure:
            os.write(tell, f"{failure.step} {failure.number}".encode())
        finally:
            os._exit(127)
    os.close(tell)
    os.close(output)
    failure_told = os.read(told, 64).decode()
    if failure_told:
        step, number = failure_told.split()
        raise Failed(step, int(number))
    os.close(told)
    say(control, "started")
    _stay(pid, control, awake)


def _stay(pid: int, control: int, awake: int) -> None:
    ending = False
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(awake, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if control in ready:
            if not _heard(control):
                return  # who started us is gone, and everything here goes with us
            ending = True
            try:  # noqa: SIM105  (contextlib takes longer to import than this takes to run)
                os.kill(-1, signal.SIGTERM)  # everything in this namespace but ourselves
            except ProcessLookupError:
                pass
        if awake in ready:
            os.read(awake, 4096)
        if not _reap(pid, control) and ending:
            return


def _heard(control: int) -> bytes:
    try:
        return os.read(control, 64)
    except OSError:
        return b""


def _reap(pid: int, control: int) -> bool:
    """Take the statuses of what has ended; tell whether anything is left."""
    try:
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                return True
            if ended == pid:
                say(control, f"exited {status}")
    except ChildProcessError:
        return False


def main(control: int, output: int) -> None:
    """Do what we are told; ends the process."""
    os.set_inheritable(control, False)
    os.set_inheritable(output, False)
    say(control, "begun")
    try:
        order = receive(control)
        check_place(order.place)
        if order.supervise:
            supervise(order, control, output)
        else:
            become(order, output)
    except Failed as failure:
        say(control, f"failed {failure.step} {failure.number}")
    except EOFError:
        pass
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
