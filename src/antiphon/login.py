"""Signing in on a terminal: what has to be run, and running it.

An agent's terminal method is the agent's own program, started once more with arguments and variables
of its choice, for a person to talk to (R1-147). `terminal_login` says what that is, for an editor with
a terminal of its own; `TerminalLogin.run` carries it out on the terminal of this process. Leaves
choosing a method, `authenticate` and connecting anew to the caller.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from antiphon._errors import StartError
from antiphon._launch import environment, explain, with_variables, words_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from antiphon._launch import Environment
    from antiphon.schema import v1

__all__ = ["TerminalLogin", "terminal_login"]


class TerminalLogin(msgspec.Struct, frozen=True, kw_only=True):
    """What to run on a terminal to sign in.

    Attributes:
        argv: the agent's command with the method's arguments appended; no shell is involved.
        env: the whole environment of the program.
        cwd: its directory; None is ours.
        added: names of the variables that the method sets, for a person to see.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str | None = None
    added: tuple[str, ...] = ()

    def run(self) -> int:
        """Run it in the foreground of this process's terminal; its exit code, 0 alone is success.

        Blocks until it has ended. The program has a process group of its own in the foreground: Ctrl-C
        and Ctrl-Z are the program's, and stopping it stops this process as well, until a shell
        continues it. The terminal's modes are put back whatever the program left. Without a terminal on
        standard input it just runs. A program that a signal ended gives minus the signal's number.

        Call it in the main thread and outside of an event loop, which it would hold up.

        Raises:
            StartError: the program cannot be started.
        """
        with _terminal() as terminal:
            try:
                process = subprocess.Popen(
                    self.argv,
                    env=self.env,
                    cwd=self.cwd,
                    process_group=None if terminal is None else 0,
                )
            except (OSError, ValueError) as error:
                reason = explain(error, self.argv, self.cwd, self.env)
                raise StartError(reason, command=self.argv) from None
            return process.wait() if terminal is None else _attend(process, terminal)


def terminal_login(
    argv: Sequence[str],
    method: v1.AuthMethodTerminal,
    *,
    env: Environment = None,
    cwd: str | os.PathLike[str] | None = None,
) -> TerminalLogin:
    """What to run for a terminal method of the agent that `argv` starts.

    ::

        for method in agent.auth_methods:
            if isinstance(method, v1.AuthMethodTerminal):
                login = terminal_login(argv, method)
                code = await my_editor.run_in_a_terminal(login.argv, login.env)
                # 0: close this connection, `spawn` anew

    Client and agent agree on this with the client capability `auth.terminal`
    (`Capabilities(terminal_auth=True)`). A method's id is never sent to `authenticate` (R1-145).

    Args:
        argv: as it was given to `spawn`, with `env` and `cwd` the same as well.
        method: one of `agent.auth_methods`.
        env: as for `spawn`; the method's variables come over it.
        cwd: as for `spawn`.

    Raises:
        StartError: `argv` is empty.
        ValueError: the method sets variables that cannot exist.
    """
    words = words_of(argv)
    base = environment(env)
    base = dict(os.environ) if base is None else base
    # The same program, also where the method sets another PATH.
    if os.path.basename(words[0]) == words[0]:  # noqa: PTH119  (what a shell looks up)
        words[0] = shutil.which(words[0], path=base.get("PATH")) or words[0]
    added = dict(method.env or {})
    return TerminalLogin(
        argv=[*words, *(method.args or ())],
        env=with_variables(base, added),
        cwd=None if cwd is None else os.fspath(cwd),
        added=tuple(added),
    )


@contextlib.contextmanager
def _terminal() -> Generator[int | None]:
    """The terminal on standard input, put back as it was afterwards; None if there is none."""
    terminal = _controlling()
    if terminal is None or sys.platform == "win32":
        yield None
        return

    import termios

    modes = termios.tcgetattr(terminal)
    # Whoever is not in the foreground is stopped for touching the terminal, unless it ignores that.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield terminal
    finally:
        try:
            with contextlib.suppress(OSError, termios.error):
                os.tcsetpgrp(terminal, os.getpgrp())
                termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
        finally:
            signal.signal(signal.SIGTTOU, before)


def _controlling() -> int | None:
    """Standard input, where it is our terminal and we are in its foreground."""
    if sys.platform == "win32":
        return None
    try:
        terminal = sys.stdin.fileno()
        ours = os.isatty(terminal) and os.tcgetpgrp(terminal) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return None
    return terminal if ours else None


def _attend(process: subprocess.Popen[bytes], terminal: int) -> int:
    """Give the program the terminal and wait for its end; stop when it is stopped."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)

    handlers = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        _hand_over(process.pid, terminal)
        while True:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            # As a shell's job we stop, too; whoever continues us continues the program.
            os.tcsetpgrp(terminal, os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            _hand_over(process.pid, terminal)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode
    except BaseException:
        process.kill()
        with contextlib.suppress(ChildProcessError):
            process.wait()
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


#: What asks us to end is for the program to answer.
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else ()


def _hand_over(group: int, terminal: int) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        os.tcsetpgrp(terminal, group)
        # It may have been stopped for reading before the terminal was its own.
        os.killpg(group, signal.SIGCONT)
