"""What can be typed: the subcommands, their options, their help, and the way to their modules.

Imports argparse and nothing heavy; a subcommand's module is imported when it is chosen. A wrong
command line is exit code 2, with one line on standard error and, under `--json`, the result line
that a script waits for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from antiphon._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UsageError", "dispatch"]

_ABOUT = """\
Antiphon speaks the Agent Client Protocol, in both roles.

  antiphon demo                      watch an agent and a client run a whole turn
  antiphon prompt --agent CMD TEXT   ask any ACP agent something
  antiphon policy test FILE --call … try out what a policy allows an agent
  antiphon login --agent CMD         sign in to an agent that wants it
  antiphon run MODULE:AGENT          serve your own agent to an editor
  antiphon rules                     one page: how to write agents and clients with this library
"""

_CODES = """\
exit codes:
  0    the turn ended with end_turn
  1    it ended with any other stop reason (max_tokens, refusal, cancelled, …)
  2    the command line is wrong
  3    the agent could not be started, or died; its exit status and last words are shown
  4    the agent broke the protocol or answered with an error (login and version included)
  5    a time limit was met
  130  interrupted (Ctrl-C; once cancels the turn, twice stops at once)
"""

_PROMPT_ABOUT = """\
Run one turn of an ACP agent. The agent's text goes to standard output, everything else (its
thoughts, plan, tool calls, questions) to standard error.

The agent is lent the files below --cwd, or below each --root in its place, and a terminal for
commands there. What it may read, write and run is decided in this order: the rules of --policy,
then --allow-write, then --permissions for what no rule matches (reads: the policy's `reads`,
which allows them if it is not given). A command that runs is not confined, and neither is what
the agent's own process does by itself.
"""

_POLICY_ABOUT = """\
Say what a policy decides about a call of an agent, and which rule decides it. Nothing is asked,
started or changed, so a policy can be tried out before an agent is.
"""

_POLICY_EPILOG = """\
a policy is TOML, and the first rule that matches decides (docs/reference/policy.md has it all):
  default = "ask"               # what no rule matches; also "allow" or "deny"
  reads = "allow"               # the same for what only reads
  [[rule]]
  decision = "deny"
  path = ["**/.env", "~/.ssh/**"]
  [[rule]]
  decision = "allow"            # keys: kind, title, path, command, args, cwd, session, env
  command = "git"
  args = ["status", "**"]

a call is a shorthand, KIND:WHAT, or a JSON object:
  read:PATH, edit:PATH, delete:PATH, move:PATH, search:PATH
  execute:COMMAND LINE
  fetch:TITLE, think:TITLE, switch_mode:TITLE, other:TITLE
  {"kind": …, "title": …, "path": …, "paths": […], "changes": […], "command": … (a line or a
   list), "args": […], "cwd": …, "env": {…}, "session_id": …}, each key optional

examples:
  antiphon policy test policy.toml --call 'execute:git status'
  antiphon policy test policy.toml --verbose --call edit:src/app.py --call read:.env
  antiphon policy test policy.toml --json \\
      --call '{"kind": "execute", "command": ["make"], "env": {"PATH": "/tmp"}}'

exit codes:
  0    every call is allowed
  1    at least one is denied
  2    the command line is wrong, or the file is no policy
  3    none is denied, and at least one is left to a person
"""

_JSON_HELP = (
    'one JSON object a line on standard output: {"type": "update", …} for each update, '
    'exactly as on the wire, and last {"type": "result", …}'
)


_LOGIN_ABOUT = """\
Sign in to an agent. Its own ways are carried out by the agent, which may ask you for a form or to
open a web page; for a terminal way the same program is run once more, here. Afterwards a session is
opened to see whether it worked.
"""

_LOGIN_CODES = """\
exit codes:
  0    you are signed in: the agent opened a session
  2    the command line is wrong, or there are several ways and no terminal to ask on
  3    the agent could not be started, or died
  4    you are not signed in: refused, given up, or the program ended with another exit code than 0
  5    --timeout was met
  130  interrupted
"""


class UsageError(Exception):
    """The command line is wrong: what a person should read, in one sentence."""


class _Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print and leave the process."""

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage()
        raise UsageError(f"{usage}{self.prog}: {message}")


def dispatch(argv: Sequence[str] | None) -> int:
    """Parse and run; returns the exit code."""
    started = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _parser().print_help(sys.stderr)
        return 2
    try:
        options = _parser().parse_args(words)
        options.started = started
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except UsageError as error:
        return _refuse(str(error), as_json="--json" in words)
    except SystemExit as leaving:
        # argparse leaves this way after --help and --version, with its text still in the buffer.
        _flush_stdout()
        return leaving.code if isinstance(leaving.code, int) else 0
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="antiphon", description=_ABOUT, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> _Parser:
        command = commands.add_parser(
            name, help=text, description=text, formatter_class=raw, allow_abbrev=False
        )
        command.set_defaults(command=run)
        return command

    demo = add("demo", _demo, "run a whole turn with the agent that comes along; proves its work")
    demo.description = (
        "Start the demo agent as a process of its own, in a temporary folder with a small Python\n"
        "module whose test fails, and let it repair the module: streamed text and thoughts, a plan,\n"
        "tool calls, a permission, files and a terminal lent by the client. At the end the test is\n"
        "run once more, independently. Needs no model and no network."
    )
    demo.epilog = "exit code 0 only if the turn ended well and the repaired test passes"
    demo.add_argument(
        "--cwd",
        metavar="DIR",
        help="the session's folder (default: a temporary one with the broken module in it); "
        "in a folder without that module the agent works elsewhere and changes nothing",
    )
    demo.add_argument("--json", action="store_true", help=_JSON_HELP)
    demo.add_argument("--timeout", type=_seconds, metavar="S", help="give up after S seconds")

    prompt = add("prompt", _prompt, "run one turn of any ACP agent")
    prompt.description = _PROMPT_ABOUT
    prompt.epilog = _CODES
    prompt.add_argument("text", metavar="TEXT", help="the prompt; - reads standard input")
    prompt.add_argument(
        "--agent",
        metavar='"CMD ARGS"',
        help="how to start the agent, in one word (default: the demo agent)",
    )
    prompt.add_argument(
        "--cwd", metavar="DIR", default=".", help="the session's folder (default: here)"
    )
    prompt.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        default=[],
        help="lend the files in DIR instead of those in --cwd, and run commands nowhere else; may "
        "be repeated. The session's folder stays --cwd; agents that take further folders are told "
        "of these",
    )
    prompt.add_argument(
        "--no-terminal",
        action="store_true",
        help="lend no terminal: the agent is not told of one, and can run nothing through us",
    )
    prompt.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a variable in the agent's environment; may be repeated",
    )
    prompt.add_argument(
        "--env-policy",
        choices=("inherit", "essential"),
        default="inherit",
        help="what the agent sees of your environment: all of it (the default: agents take their "
        "keys from there), or PATH, HOME, LANG and the like alone",
    )
    prompt.add_argument("--json", action="store_true", help=_JSON_HELP)
    prompt.add_argument(
        "--permissions",
        choices=("ask", "allow", "deny"),
        help="what the agent may write and run, and how its permission requests are answered, "
        "where no rule matches (default: as the policy says; without one, ask on a terminal, else "
        "deny)",
    )
    prompt.add_argument(
        "--policy",
        metavar="FILE",
        help="decide by the rules in FILE first (TOML; see antiphon policy test --help)",
    )
    _add_allow_write(prompt)
    prompt.add_argument(
        "--audit",
        metavar="FILE",
        help="append each decision to FILE as a line of JSON: what the agent wanted, what was "
        "decided, by what",
    )
    prompt.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="bound the whole run, from start-up to shutdown, to S seconds",
    )
    prompt.add_argument(
        "--silence",
        type=_seconds,
        metavar="S",
        default=600.0,
        help="give up when the agent says nothing for S seconds (default: 600)",
    )
    prompt.add_argument(
        "--record", metavar="FILE", help="keep every frame of the wire in FILE, as NDJSON"
    )
    prompt.add_argument(
        "--verbose", action="store_true", help="show the agent's standard error as it comes"
    )

    policy = add("policy", _policy, "try out a policy")
    policy.description = _POLICY_ABOUT
    actions = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_policy_test(actions.add_parser("test", help="say what it decides, and by which rule"))

    login = add("login", _login, "sign in to an agent")
    login.description = _LOGIN_ABOUT
    login.epilog = _LOGIN_CODES
    login.add_argument(
        "--agent", metavar='"CMD ARGS"', required=True, help="how to start the agent, in one word"
    )
    login.add_argument("--method", metavar="ID", help="which way to go (default: asks)")
    login.add_argument(
        "--cwd", metavar="DIR", default=".", help="where the agent is started (default: here)"
    )
    login.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a variable in the agent's environment; may be repeated",
    )
    login.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="give up after S seconds; what runs on the terminal is not bounded",
    )
    login.add_argument(
        "--verbose", action="store_true", help="show the agent's standard error as it comes"
    )

    run = add("run", _run, "serve an agent of your own on standard input and output")
    run.description = (
        "Import MODULE with the current folder first on the path and serve AGENT: an Agent, a class\n"
        "of one, or a function that returns one. The descriptors are made safe before the import:\n"
        "nothing your code prints can reach the wire."
    )
    run.epilog = "exit codes: 0 the client left or SIGTERM; 1 no agent there; 2 wrong command line"
    run.add_argument("agent", metavar="MODULE:AGENT", help="e.g. echo:Echo or my.package:make()")

    add("rules", _rules, "print the usage rules: one page on agents and clients with this library")

    agent = add("demo-agent", _demo_agent, "the agent of the demo, on standard input and output")
    agent.description = (
        "A scripted coding agent without a model: it repairs one small Python module and can be\n"
        "asked anything. Start it from a client, not from a shell."
    )
    agent.add_argument(
        "--pace",
        type=_pace,
        metavar="S",
        default=0.02,
        help="seconds between two pieces of text (default: 0.02)",
    )
    return parser


def _add_allow_write(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-write",
        action="store_true",
        help="allow what only writes files and no rule of the policy decides",
    )


def _add_policy_test(test: argparse.ArgumentParser) -> None:
    test.description = _POLICY_ABOUT
    test.epilog = _POLICY_EPILOG
    test.formatter_class = argparse.RawDescriptionHelpFormatter
    test.allow_abbrev = False
    test.add_argument("file", metavar="FILE", help="the policy, as for antiphon prompt --policy")
    test.add_argument(
        "--call",
        metavar="CALL",
        action="append",
        required=True,
        help="what the agent wants; may be repeated",
    )
    test.add_argument(
        "--cwd",
        metavar="DIR",
        default=".",
        help="the session's folder, where relative paths and globs begin (default: here)",
    )
    test.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        default=[],
        help="another folder where relative globs begin; may be repeated",
    )
    test.add_argument(
        "--permissions",
        choices=("ask", "allow", "deny"),
        help="what no rule matches, instead of the policy's default, as in antiphon prompt",
    )
    _add_allow_write(test)
    test.add_argument(
        "--verbose", action="store_true", help="say why the earlier rules do not match"
    )
    test.add_argument(
        "--json",
        action="store_true",
        help='one JSON object a line for each call: {"type": "verdict", …}',
    )


def _policy(options: argparse.Namespace) -> int:
    from antiphon.cli._policy import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    from antiphon.cli._demo import run

    return run(options)


def _prompt(options: argparse.Namespace) -> int:
    from antiphon.cli._prompt import run

    return run(options)


def _login(options: argparse.Namespace) -> int:
    from antiphon.cli._login import run

    return run(options)


def _run(options: argparse.Namespace) -> int:
    from antiphon.cli._run import run

    return run(options)


def _rules(options: argparse.Namespace) -> int:
    from antiphon.cli._rules import run

    return run(options)


def _demo_agent(options: argparse.Namespace) -> int:
    from antiphon.cli._demo_agent import run

    return run(options)


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        msg = f"{text!r} is no number of seconds above 0, such as 600 or 0.5"
        raise argparse.ArgumentTypeError(msg)
    return value


def _pace(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 60:
        msg = f"{text!r} is no number of seconds from 0 to 60"
        raise argparse.ArgumentTypeError(msg)
    return value


def _number(text: str) -> float:
    """NaN, which is within no bounds, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _refuse(message: str, *, as_json: bool) -> int:
    from antiphon.cli._output import Output, readable, tell

    tell(readable(f"{message}\n"))
    if as_json:
        from antiphon.cli._outcome import Failure, Outcome

        last = message.rsplit("\n", 1)[-1]
        outcome = Outcome(failure=Failure(kind="usage", message=last))
        Output().line(outcome.as_json(with_text=True))
    return 2


def _flush_stdout() -> None:
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        return
    try:
        sys.stdout.flush()
    except OSError:
        _forget_stdout()


def _forget_stdout() -> None:
    # What is still buffered would fail once more at exit, with a message and exit code 120.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
