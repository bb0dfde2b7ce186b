"""What can be typed: the subcommands, their options, their help, and the way to their modules.

Imports argparse and nothing heavy; a subcommand's module is imported when it is chosen. A wrong
command line is exit code 2, with one line on standard error and, under `--json`, the result line
that a script waits for.
"""

from __future__ import annotations

import argparse
import os
import re
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
  antiphon prompt --agent CMD TEXT   ask any ACP agent something (--connect ADDRESS: that listens)
  antiphon policy test FILE --call … try out what a policy allows an agent
  antiphon login --agent CMD         sign in to an agent that wants it
  antiphon journal ls DIR            look into the sessions that a durable agent keeps
  antiphon token mint --session ID … let somebody join one session for a while
  antiphon run MODULE:AGENT          serve your own agent to an editor, or on a socket
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

_DEMO_EPILOG = """\
exit code 0 only if the turn ended well and the repaired test passes; with --resume, only if the
records that came are those of the journal, each once and in order
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

_RUN_ABOUT = """\
Import MODULE with the current folder first on the path and serve AGENT: an Agent, a class of one,
or a function that returns one. The descriptors are made safe before the import: nothing your code
prints can reach the wire.

With --listen many clients share the one agent. A Unix socket is for processes of your own user
alone; a TCP port is for everybody on this machine, and for nobody else.
"""

_RUN_CODES = """\
exit codes:
  0    the client left, or a signal came
  1    there is no such agent, or it cannot listen there
  2    the command line is wrong
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
_JSON_LINES = "one JSON object a line on standard output"

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


_JOURNAL_ABOUT = """\
Look into a journal: the sessions that a durable agent keeps in a directory. PATH is that directory
or one of the files in it. Everything but prune reads only, also while an agent writes. A session is
named by its id, or by any beginning of it that no other session has.
"""

_JOURNAL_CODES = """\
exit codes:
  0    done
  1    something is damaged, and named on standard error; or was left undone (prune)
  2    the command line is wrong
  3    the journal cannot be read (no such path, no journal, a newer format, no permission), or
       the output cannot be written
  4    no session has that id, or several begin with it
  5    --timeout was met (tail)
  130  interrupted (Ctrl-C), or nobody reads standard output any more
"""

_EXPORT_ABOUT = """\
Write a session as the recording of a client that attached to it from its first record: lines of
{"t", "dir", "frame"}, as antiphon.connect(…, record=FILE) writes them, that can be played to a
client. With --records, one JSON object for each record instead, with all its fields.
"""


_RXC1_ABOUT = """\
Make the keys and tokens that let somebody join a session, and look at them. A token opens one session,
for one holder, until it ends. Neither a private seed nor a token is ever taken from the command line,
which every user of the machine can read; a seed is never shown either.
"""

_RXC1_CODES = """\
examples:
  antiphon token keygen ~/secret/k1.seed --kid k1 --public keys/k1.pub
  antiphon token mint --seed-file ~/secret/k1.seed --kid k1 --session S --actor alice > token
  antiphon token inspect < token
  antiphon token verify --keyring keys --session S < token

exit codes:
  0    done; for verify: the token opens the session
  1    not minted, or the key was not made; for verify: the token does not open the session; for
       inspect: it is no token
  2    the command line is wrong, a seed, key or token cannot be read, or "antiphon[tokens]" is not
       installed
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
    demo.epilog = _DEMO_EPILOG
    demo.add_argument(
        "--cwd",
        metavar="DIR",
        help="the session's folder (default: a temporary one with the broken module in it); "
        "in a folder without that module the agent works elsewhere and changes nothing",
    )
    demo.add_argument("--json", action="store_true", help=_JSON_HELP)
    demo.add_argument("--timeout", type=_seconds, metavar="S", help="give up after S seconds")
    demo.add_argument(
        "--resume",
        action="store_true",
        help="show another thing: a conversation that goes on although its connection is cut and its "
        "agent killed, and a proof that nothing was lost or doubled",
    )
    demo.add_argument(
        "--seed", type=_count, metavar="N", help="with --resume: other numbers, other moments"
    )

    prompt = add("prompt", _prompt, "run one turn of any ACP agent")
    prompt.description = _PROMPT_ABOUT
    prompt.epilog = _CODES
    prompt.add_argument("text", metavar="TEXT", help="the prompt; - reads standard input")
    which = prompt.add_mutually_exclusive_group()
    which.add_argument(
        "--agent",
        metavar='"CMD ARGS"',
        help="how to start the agent, in one word (default: the demo agent)",
    )
    which.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="an agent that listens already, at unix:PATH or tcp:HOST:PORT",
    )
    prompt.add_argument(
        "--session",
        metavar="ID",
        help="go on with this session, which the agent keeps, in place of a new one (a durable agent's: "
        "antiphon journal ls); what was said before is not shown again",
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

    token = add("token", _token, "make and check the tokens that let somebody join a session")
    token.description = _RXC1_ABOUT
    token.epilog = _RXC1_CODES
    _add_token(token.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser)

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

    journal = add("journal", _journal, "look into the sessions that a durable agent keeps")
    journal.description = _JOURNAL_ABOUT
    journal.epilog = _JOURNAL_CODES
    actions = journal.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_journal(actions.add_parser)

    run = add("run", _run, "serve an agent of your own on standard input and output, or a socket")
    run.description = _RUN_ABOUT
    run.epilog = _RUN_CODES
    run.add_argument("agent", metavar="MODULE:AGENT", help="e.g. echo:Echo or my.package:make()")
    run.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="serve all who connect to unix:PATH or tcp:HOST:PORT (port 0: any) until a signal; "
        "where it listens is told on standard error",
    )
    run.add_argument(
        "--journal",
        metavar="DIR",
        help="keep its sessions in the journal in DIR, made if there is none: clients can load, list, "
        "resume and delete them, and attach to them (see antiphon journal --help)",
    )

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


def _add_journal(add_parser: Callable[..., _Parser]) -> None:
    def add(name: str, text: str, *, lines: bool = True) -> _Parser:
        command = add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            epilog=_JOURNAL_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(action=name, json=False)
        command.add_argument(
            "path", metavar="PATH", help="the journal's directory, or a file in it"
        )
        if lines:
            command.add_argument("--json", action="store_true", help=_JSON_LINES)
        return command

    add("ls", "list the sessions, the one that changed last first")

    show = add("show", "show a session as a conversation: turns, messages, tool calls, changes")
    show.add_argument("session", metavar="SESSION", help="an id, or its beginning")
    show.add_argument(
        "--from", dest="start", type=_count, metavar="N", help="begin with record N (default: 1)"
    )
    show.add_argument(
        "--to", dest="stop", type=_count, metavar="N", help="end with record N (default: the last)"
    )
    _add_kinds(show)

    tail = add("tail", "show what is appended to a session, as it is, until Ctrl-C")
    tail.add_argument("session", metavar="SESSION", help="an id, or its beginning")
    begin = tail.add_mutually_exclusive_group()
    begin.add_argument(
        "--from",
        dest="start",
        type=_count,
        metavar="N",
        help="begin with record N (default: where the last turn begins)",
    )
    begin.add_argument("--lines", type=_count, metavar="N", help="begin with the last N records")
    tail.add_argument("--until-idle", action="store_true", help="end as soon as no turn is open")
    tail.add_argument("--timeout", type=_seconds, metavar="S", help="end after S seconds")
    _add_kinds(tail)

    export = add(
        "export", "write sessions as NDJSON, to be played again or read by programs", lines=False
    )
    export.description = _EXPORT_ABOUT
    which = export.add_mutually_exclusive_group(required=True)
    which.add_argument("session", metavar="SESSION", nargs="?", help="an id, or its beginning")
    which.add_argument("--all", action="store_true", help="all sessions, the oldest first")
    export.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to FILE, which only you can read then (0600), and which is there when it is whole",
    )
    export.add_argument(
        "--records", action="store_true", help="the records themselves instead of a recording"
    )

    add("verify", "check every record, and name what is damaged")

    prune = add("prune", "delete whole sessions; those that a living process writes are left")
    chosen = prune.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--older-than",
        type=_age,
        metavar="AGE",
        help="sessions that have not changed for so long: 30d, 12h, 2w",
    )
    chosen.add_argument(
        "--session",
        metavar="ID",
        action="append",
        default=[],
        help="this session, by id or its beginning; may be repeated",
    )
    prune.add_argument(
        "--dry-run",
        action="store_true",
        help="only say what would be deleted, if no process writes it then",
    )
    prune.add_argument("--yes", action="store_true", help="delete without asking")


def _add_kinds(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kinds",
        type=_kinds,
        metavar="KIND,…",
        help="only records of these kinds, such as turn_completed, or updates such as tool_call",
    )


def _add_token(add_parser: Callable[..., _Parser]) -> None:
    def add(name: str, text: str) -> _Parser:
        action = add_parser(
            name,
            help=text,
            description=text,
            epilog=_RXC1_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        action.set_defaults(action=name)
        action.add_argument("--json", action="store_true", help="one JSON object, on one line")
        return action

    keygen = add("keygen", "make a private seed in a new file, and print its public key")
    keygen.add_argument(
        "file",
        metavar="FILE",
        help="where the seed is kept: made with mode 0600, never overwritten",
    )
    keygen.add_argument(
        "--kid", help="the id of the key (default: the first 8 digits of the public key)"
    )
    keygen.add_argument(
        "--public", metavar="FILE", help="also write the public key there, e.g. keys/KID.pub"
    )

    mint = add("mint", "print a token for one session")
    seed = mint.add_mutually_exclusive_group(required=True)
    seed.add_argument("--seed-file", metavar="FILE", help="where keygen put the private seed")
    seed.add_argument(
        "--seed-env", metavar="NAME", help="the variable that holds the seed, as 64 hex digits"
    )
    mint.add_argument(
        "--kid", help="the id by which verifiers know the key (default: as for keygen)"
    )
    mint.add_argument("--session", metavar="ID", required=True, help="the session that it opens")
    mint.add_argument("--actor", metavar="ID", required=True, help="who will hold it")
    mint.add_argument(
        "--actor-kind", metavar="KIND", default="user", help="what they are (default: user)"
    )
    mint.add_argument(
        "--ttl",
        type=_lifetime,
        metavar="TIME",
        default=3600,
        help="how long it is good for: seconds, or e.g. 10m, 1h, 30d (default: 1h, also the most)",
    )
    mint.add_argument("--archival", action="store_true", help="allow a --ttl of up to 30d")
    mint.add_argument(
        "--max-ttl", type=_lifetime, metavar="TIME", help="allow a --ttl of up to TIME instead"
    )
    mint.add_argument(
        "--surface",
        metavar="NAME",
        action="append",
        help="good for this surface alone; may be repeated",
    )

    inspect = add("inspect", "show what a token says, without checking that it is so")
    verify = add("verify", "say whether a token opens a session")
    verify.add_argument("--session", metavar="ID", required=True, help="the session")
    verify.add_argument(
        "--key",
        metavar="KID=KEY",
        action="append",
        default=[],
        help="a public key: 64 hex digits, or a file that holds one; may be repeated",
    )
    verify.add_argument(
        "--keyring", metavar="DIR", help="the public keys in DIR, each in a file KID.pub"
    )
    verify.add_argument("--surface", metavar="NAME", help="the surface at which it is shown")
    verify.add_argument("--actor", metavar="ID", help="who shows it")
    verify.add_argument(
        "--at", type=int, metavar="SECONDS", help="the time to judge by, in Unix seconds"
    )
    for action in (inspect, verify):
        action.add_argument("typed", nargs="*", help=argparse.SUPPRESS)  # to say why not
        source = action.add_mutually_exclusive_group()
        source.add_argument(
            "--file", metavar="FILE", help="a file that holds the token (default: standard input)"
        )
        source.add_argument("--env", metavar="NAME", help="a variable that holds the token")


def _token(options: argparse.Namespace) -> int:
    from antiphon.cli._token import run

    return run(options)


def _policy(options: argparse.Namespace) -> int:
    from antiphon.cli._policy import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    if options.resume:
        if options.cwd is not None:
            raise UsageError("antiphon demo: --resume works in a temporary folder; leave out --cwd")
        from antiphon.cli._demo_resume import run as resume

        return resume(options)
    if options.seed is not None:
        raise UsageError("antiphon demo: --seed goes with --resume")
    from antiphon.cli._demo import run

    return run(options)


def _prompt(options: argparse.Namespace) -> int:
    from antiphon.cli._prompt import run

    return run(options)


def _login(options: argparse.Namespace) -> int:
    from antiphon.cli._login import run

    return run(options)


def _journal(options: argparse.Namespace) -> int:
    from antiphon.cli._journal import run

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


def _lifetime(text: str) -> int:
    number, unit = (text[:-1], text[-1]) if text[-1:] in {"s", "m", "h", "d"} else (text, "s")
    if not (number.isascii() and number.isdigit() and len(number) < 12 and int(number)):
        msg = f"{text!r} is no time above 0 in whole seconds, minutes, hours or days, such as 600 or 10m"
        raise argparse.ArgumentTypeError(msg)
    return int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def _pace(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 60:
        msg = f"{text!r} is no number of seconds from 0 to 60"
        raise argparse.ArgumentTypeError(msg)
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        msg = f"{text!r} is no number such as 12"
        raise argparse.ArgumentTypeError(msg)
    return int(text[:18])


def _kinds(text: str) -> frozenset[str]:
    return frozenset(word for word in (part.strip() for part in text.split(",")) if word)


def _age(text: str) -> float:
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}.get(text[-1:], 0)
    value = _number(text[:-1]) * seconds
    if not 0 < value < float("inf"):
        msg = f"{text!r} is no age such as 30d, 12h or 2w"
        raise argparse.ArgumentTypeError(msg)
    return value


def _number(text: str) -> float:
    """NaN, which is within no bounds, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


# What is no secret any more once it was typed, and need not be in a log as well.
_SECRET = re.compile(r"RXC1\.[\w.=-]+|(?<![0-9A-Fa-f])[0-9A-Fa-f]{64}(?![0-9A-Fa-f])")


def _refuse(message: str, *, as_json: bool) -> int:
    from antiphon.cli._output import Output, readable, tell

    message = _SECRET.sub("…", message)
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
