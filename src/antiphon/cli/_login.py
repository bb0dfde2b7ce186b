"""`antiphon login`: sign in to an agent, by whichever of its ways a person chooses.

An agent's own way is `authenticate`, with its questions put to the person; a terminal way is the same
program once more, on this terminal, which `antiphon.login` carries out. Either is believed only after
a session could be opened. What failures are called and which exit codes they have is `_outcome`'s.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from antiphon import AuthRequired, Capabilities, Client, Limits, spawn
from antiphon._errors import RequestError
from antiphon.cli._arguments import UsageError
from antiphon.cli._ask import can_ask
from antiphon.cli._elicit import Elicit
from antiphon.cli._outcome import PROTOCOL, Failure, explain
from antiphon.cli._output import Output, harmless, readable, tell
from antiphon.cli._plain import Plain
from antiphon.cli._prompt import agent_command, agent_environment, folder
from antiphon.cli._show import choose_asker
from antiphon.cli._view import Question, ToolView
from antiphon.login import terminal_login
from antiphon.schema import v1

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon import AgentPeer
    from antiphon._connect import Connecting
    from antiphon.services import Elicitation

__all__ = ["run"]

#: For opening the session that proves it, and for closing it.
CHECK_SECONDS: Final = 60.0


class _Failed(Exception):
    """It did not come to a sign-in: what a person should read."""


class _Job(msgspec.Struct, kw_only=True):
    argv: list[str]
    cwd: str
    env: dict[str, str] | None
    method: str | None
    timeout: float | None
    verbose: bool


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to sign in. `needs`: the variables of a historic `env_var` method."""

    method: v1.AuthMethod
    needs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.needs:
            return "variables"
        return "terminal" if isinstance(self.method, v1.AuthMethodTerminal) else "agent"

    @property
    def line(self) -> str:
        about = self.method.description
        name = harmless(self.method.name, 200, one_line=True)
        id_ = harmless(self.method.id, 200, one_line=True)
        more = (
            f": {harmless(about, 500, one_line=True)}" if isinstance(about, str) and about else ""
        )
        return f"{name} [{id_}]{more}"


#: Without a terminal an agent is not told that there is one, and most then name no way that needs it.
_HERE = {True: "", False: " (a way that needs a terminal is not offered without one)"}


def run(options: argparse.Namespace) -> int:
    """Sign in; 0 only if a session could be opened afterwards."""
    job = _Job(
        argv=agent_command(options.agent, "login"),
        cwd=folder(options.cwd),
        env=agent_environment("inherit", options.env, "login"),
        method=options.method,
        timeout=options.timeout,
        verbose=options.verbose,
    )
    try:
        chosen = _in_time(job, lambda: _ask_agent(job))
        if chosen is not None:
            _on_terminal(job, chosen)
            _in_time(job, lambda: _check_anew(job))
    except _Failed as failed:
        tell(f"antiphon: {readable(str(failed))}\n")
        return PROTOCOL
    except UsageError:
        raise
    except Exception as error:
        failure = explain(error)
        if failure is None and isinstance(error, TimeoutError) and job.timeout is not None:
            failure = Failure(kind="timeout", message=f"It did not end within {job.timeout:g} s.")
        if failure is None:
            raise
        tell(f"antiphon: {readable(failure.text())}\n")
        return failure.exit_code
    return 0


def _in_time(job: _Job, work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(job.timeout):
            return await work()

    return asyncio.run(bounded())


async def _ask_agent(job: _Job) -> v1.AuthMethodTerminal | None:
    """Find the way, and go it where it is the agent's own; a terminal way is given back."""
    wire = _Wire()
    display = Plain(Output(), sys.stderr, cwd=job.cwd)
    elicitation = None
    if can_ask():
        command = shlex.join(job.argv)
        elicitation = Elicit(display, choose_asker(), asyncio.Lock(), command).service()
    client = _client(elicitation)
    async with _start(job, client, wire) as agent:
        offers = [
            _Offer(method=method, needs=wire.variables(method.id)) for method in agent.auth_methods
        ]
        if not offers:
            await _nothing_to_choose(agent, job)
            return None
        offer = await _choose(offers, job)
        match offer.kind:
            case "terminal":
                return cast("v1.AuthMethodTerminal", offer.method)
            case "variables":
                names = ", ".join(offer.needs)
                msg = f"{offer.line}\nSet {names} in the environment, or with --env; there is nothing else to do."
                raise _Failed(msg)
            case _:
                pass
        tell(f"Signing in: {offer.line}\n")
        try:
            await agent.authenticate(offer.method.id)
        except RequestError as error:
            msg = f"The agent did not sign you in: {error.message} ({error.code})"
            raise _Failed(msg) from error
        await _check(agent, job)
    return None


async def _nothing_to_choose(agent: AgentPeer, job: _Job) -> None:
    if job.method is not None:
        raise UsageError(
            f"antiphon login: the agent has no way to sign in, so none is {job.method!r}"
        )
    tell("The agent names no way to sign in.\n")
    try:
        await _check(agent, job)
    except _Failed as failed:
        msg = f"{failed}\nSee its own documentation for what it needs."
        raise _Failed(msg) from None


async def _choose(offers: Sequence[_Offer], job: _Job) -> _Offer:
    if job.method is not None:
        for offer in offers:
            if offer.method.id == job.method:
                return offer
        raise UsageError(
            _listed(f"antiphon login: there is no --method {job.method}{_HERE[can_ask()]}", offers)
        )
    if len(offers) == 1:
        return offers[0]
    if not can_ask():
        raise UsageError(_listed("antiphon login: choose one with --method ID", offers))
    tell("How do you want to sign in?\n")
    options = tuple((str(n), offer.line, "allow_once") for n, offer in enumerate(offers))
    question = Question(kind="permission", tool=ToolView(id="login"), options=options)
    key = await choose_asker().choose(question)
    if key is None:
        raise _Failed("Nothing was chosen; nothing was done.")
    return offers[int(key)]


def _listed(message: str, offers: Sequence[_Offer]) -> str:
    return "\n".join([f"{message}; it offers:", *(f"  {offer.line}" for offer in offers)])


def _on_terminal(job: _Job, method: v1.AuthMethodTerminal) -> None:
    if not can_ask():
        raise _Failed("This way to sign in needs a terminal, and there is none.")
    try:
        login = terminal_login(job.argv, method, env=job.env, cwd=job.cwd)
    except (ValueError, TypeError) as error:
        msg = f"The agent asks for what cannot be run: {error}"
        raise _Failed(msg) from error
    tell(f"Running: {harmless(shlex.join(login.argv), one_line=True)}\n")
    if login.added:
        names = ", ".join(harmless(name, 100, one_line=True) for name in login.added)
        tell(f"  with these variables set by the agent: {names}\n")
    code = login.run()
    if code == -signal.SIGINT:  # the person's Ctrl-C, which the program left to the system
        raise KeyboardInterrupt
    if code:
        how = f"signal {-code} ended it" if code < 0 else f"it ended with exit code {code}"
        msg = f"You are not signed in: {how}."
        raise _Failed(msg)


async def _check_anew(job: _Job) -> None:
    async with _start(job, _client(), None) as agent:
        await _check(agent, job)


async def _check(agent: AgentPeer, job: _Job) -> None:
    """Believe it when a session can be opened."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            session = await agent.new_session(cwd=job.cwd)
            if agent.offers("sessionCapabilities.close"):
                await session.close()
    except AuthRequired as error:
        msg = f"The agent still wants a login: {error.message}"
        raise _Failed(msg) from error
    except TimeoutError as error:
        msg = f"The agent did not open and close a session within {CHECK_SECONDS:g} s."
        raise _Failed(msg) from error
    tell("The agent opened a session: you are signed in.\n")


class _OnTerminal(Client):
    capabilities = Capabilities(terminal_auth=True)


def _client(elicitation: Elicitation | None = None) -> Client:
    """Terminal ways are taken only where there is a terminal to go them on."""
    return (_OnTerminal if can_ask() else Client)(elicitation=elicitation)


class _Wire:
    """What the typed answer to `initialize` does not keep: historic `env_var` methods."""

    def __init__(self) -> None:
        self._variables: dict[str, tuple[str, ...]] = {}
        self._over = False

    def __call__(self, direction: str, frame: bytes) -> None:
        if direction != "in" or self._over:
            return
        try:
            methods = msgspec.json.decode(frame, type=_Answer).result.auth_methods
        except (msgspec.DecodeError, RecursionError):
            return
        self._over = True
        for method in methods:
            if isinstance(method, dict):
                self._note(cast("dict[str, Any]", method))

    def variables(self, method_id: str) -> tuple[str, ...]:
        """The variables that a method needs, if it is such a one."""
        return self._variables.get(method_id, ())

    def _note(self, method: dict[str, Any]) -> None:
        if method.get("type") != "env_var":
            return
        given: list[Any] = [method.get("varName")]
        if isinstance(method.get("vars"), list):
            given += method["vars"]
        names: list[Any] = [
            cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else entry
            for entry in given
        ]
        shown = [harmless(n, 100, one_line=True) for n in names if isinstance(n, str) and n]
        self._variables[str(method.get("id"))] = tuple(shown) or ("what its documentation names",)


class _Result(msgspec.Struct):
    auth_methods: list[Any] = msgspec.field(name="authMethods")


class _Answer(msgspec.Struct):
    result: _Result


def _start(job: _Job, client: Client, wire: _Wire | None) -> Connecting:
    return spawn(
        job.argv,
        client=client,
        cwd=job.cwd,
        env=job.env,
        stderr=(lambda line: tell(f"stderr: {readable(line.rstrip())}\n")) if job.verbose else None,
        limits=Limits(permission_timeout=None),
        record=wire,
    )
