"""`antiphon prompt`: one turn of any ACP agent, for people and for scripts.

Here the command line becomes a `Job`; running it is `_turn`'s work.
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.cli._arguments import UsageError
from antiphon.cli._ask import can_ask
from antiphon.cli._outcome import Failure, Outcome
from antiphon.cli._output import Output

if TYPE_CHECKING:
    import argparse

    from antiphon.cli._audit import Audit
    from antiphon.cli._decide import Asker, Decider
    from antiphon.cli._view import View
    from antiphon.services import Elicitation, Permissions

__all__ = [
    "agent_command",
    "agent_environment",
    "demo_agent_command",
    "folder",
    "folders",
    "module_command",
    "run",
]


def run(options: argparse.Namespace) -> int:
    """Run the turn; the exit codes are `_outcome`'s."""
    if options.connect is None:
        argv = agent_command(options.agent, "prompt")
    else:
        _check_connect(options)
        argv = []
    cwd, roots = folders(options)
    record = _record(options.record)
    env = agent_environment(options.env_policy, options.env, "prompt")
    permissions, asker, reason = _permissions(options)
    audit = _audit(options.audit)
    output = Output()
    deadline = None if options.timeout is None else options.started + options.timeout
    text = _text(options.text, deadline)

    from antiphon.cli._turn import Job, Run, report

    if text is None:
        failure = Failure(
            kind="timeout", message=f"Standard input did not end within {options.timeout:g} s."
        )
        outcome = Outcome(failure=failure)
        return report(outcome, output=output, as_json=options.json, with_text=True)

    from antiphon.cli._decide import Decider
    from antiphon.cli._show import choose_display
    from antiphon.cli._view import View

    display = choose_display(output, cwd=cwd, quiet=options.json)
    view = View(display)
    decider = Decider(
        permissions,
        view,
        asker,
        reason=reason,
        roots=tuple(dict.fromkeys((cwd, *roots))),
        record=None if audit is None else audit.write,
        protected=[
            os.path.realpath(file) for file in (options.policy, options.audit, record) if file
        ],
    )
    job = Job(
        argv=argv,
        address=options.connect,
        session_id=options.session,
        cwd=cwd,
        roots=roots,
        lends_terminals=not options.no_terminal,
        env=env,
        text=text,
        started=options.started,
        timeout=options.timeout,
        silence=options.silence,
        record=record,
        verbose=options.verbose,
        as_json=options.json,
    )
    try:
        run_ = Run(
            job,
            output=output,
            view=view,
            decider=decider,
            elicitation=_elicitation(view, decider, options.connect or shlex.join(argv)),
        )
        outcome = run_.play()
    finally:
        display.close()
        if audit is not None:
            audit.close()
    return report(outcome, output=output, as_json=options.json, with_text=True)


def _check_connect(options: argparse.Namespace) -> None:
    from antiphon.transports import parse_address

    try:
        parse_address(options.connect)
    except ValueError as error:
        raise UsageError(f"antiphon prompt: --connect {error}") from None
    if options.env or options.env_policy != "inherit":
        raise UsageError("antiphon prompt: --env and --env-policy are for an agent that is started")


def _elicitation(view: View, decider: Decider, agent: str) -> Elicitation | None:
    """Somebody to ask what the agent wants to know; without a terminal nothing is offered."""
    if not can_ask():
        return None

    from antiphon.cli._elicit import Elicit
    from antiphon.cli._show import choose_asker

    return Elicit(view.display, choose_asker(), decider.turn, agent).service()


def _permissions(options: argparse.Namespace) -> tuple[Permissions, Asker | None, str]:
    """The policy, somebody to ask, and why its default is what it is."""
    from antiphon.cli._policy import make_policy
    from antiphon.cli._show import choose_asker

    a_person = can_ask()
    # Without a policy nothing is left to a person who is not there.
    default = "ask" if a_person else "deny"
    permissions = make_policy(options, options.policy, default)
    reason = ""
    if options.permissions:
        reason = f"--permissions {options.permissions}"
    elif options.policy is None:
        reason = f"{default} without a terminal"
    asker = choose_asker() if a_person or options.permissions == "ask" else None
    return permissions, asker, reason


def demo_agent_command(*more: str) -> list[str]:
    """How to start the demo agent: this interpreter, this library."""
    return module_command("antiphon", "demo-agent", *more)


def module_command(module: str, *more: str) -> list[str]:
    """How to run a module of this library in a process of its own.

    With the safe path, so that nothing in the current folder is taken for the library; unless the
    library itself is found by the current folder.
    """
    import antiphon

    here = Path(antiphon.__file__).resolve().parents[1] == Path.cwd().resolve()
    return [sys.executable, *([] if here else ["-P"]), "-m", module, *more]


def folder(text: str, option: str = "--cwd") -> str:
    """A folder as an absolute path, links resolved. Raises `UsageError` for one that is none."""
    path = os.path.realpath(text)
    if not text or not os.path.isdir(path):  # noqa: PTH112  (a path with odd bytes stays text)
        problem = "is no folder" if os.path.lexists(path) else "does not exist"
        raise UsageError(f"antiphon: {option} {text or repr(text)} {problem}")
    return path


def folders(options: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """The session's folder, and what is lent in its place, if anything; each once."""
    roots = dict.fromkeys(folder(root, "--root") for root in options.root)
    return folder(options.cwd), tuple(roots)


def agent_command(text: str | None, command: str) -> list[str]:
    """The agent's words; None is the demo agent. Raises `UsageError` for what are none."""
    if text is None:
        return demo_agent_command()
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"antiphon {command}: --agent {text!r}: {error}") from None
    if not argv:
        raise UsageError(f"antiphon {command}: --agent is empty")
    return argv


def agent_environment(policy: str, added: list[str], command: str) -> dict[str, str] | None:
    """The agent's whole environment; None for ours as it is. Raises `UsageError`."""
    if policy == "inherit" and not added:
        return None

    from antiphon.transports import inherit_env

    words = [text.partition("=") for text in added]
    if odd := [name for name, equals, _ in words if not (name and equals)]:
        raise UsageError(f"antiphon {command}: --env {odd[0]!r} is no NAME=VALUE")
    extra = {name: value for name, _, value in words}  # of a name that comes twice, the last counts
    return {**os.environ, **extra} if policy == "inherit" else inherit_env(**extra)


def _record(text: str | None) -> str | None:
    """The record file, tried out now: nothing should start if it cannot be kept."""
    if text is None:
        return None
    try:
        with open(text, "ab"):  # noqa: PTH123  (as above)
            pass
    except OSError as error:
        raise UsageError(f"antiphon prompt: --record {text}: {error.strerror}") from None
    return text


def _audit(text: str | None) -> Audit | None:
    if text is None:
        return None

    from antiphon.cli._audit import Audit

    try:
        return Audit(text)
    except OSError as error:
        raise UsageError(f"antiphon prompt: --audit {text}: {error.strerror}") from None


def _text(text: str, deadline: float | None) -> str | None:
    """The prompt; None if standard input did not end in time."""
    if text == "-":
        data = _standard_input(deadline)
        if data is None:
            return None
        text = data.decode("utf-8", "replace")
    # Arguments that are no UTF-8 hold lone surrogates, which no frame can carry.
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not text.strip():
        raise UsageError("antiphon prompt: the prompt is empty")
    return text


def _standard_input(deadline: float | None) -> bytes | None:
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise UsageError("antiphon prompt: standard input is closed")
    descriptor = sys.stdin.fileno()
    pieces: list[bytes] = []
    while True:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
        piece = os.read(descriptor, 65536)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
