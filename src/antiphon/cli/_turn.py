"""One run: start an agent, one session, one turn, end the agent; whatever happens, within bounds.

`demo` and `prompt` are both this, with different surroundings. What may end a run early is here and
nowhere else: the time limit of the whole run, the silence limit, an interrupt, a reader that went
away. Each of them first cancels the turn, so that the agent can put its tools away, then leaves it,
then kills its process group; no process is left behind. What the turn *is*, `antiphon.spawn` and
`Session.prompt` know; how it looks, the `View`; what a failure means, `_outcome`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shlex
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from antiphon import Capabilities, Client, Limits, connect, spawn
from antiphon._errors import AntiphonError, AuthRequired, SilenceTimeout
from antiphon.cli._outcome import TIMEOUT, Failure, Outcome, explain
from antiphon.cli._output import readable, tell, update_line
from antiphon.cli._services import LentTerminals
from antiphon.schema import v1_unstable as v1
from antiphon.services import Files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from antiphon import AgentPeer, Session, Update
    from antiphon.cli._decide import Decider
    from antiphon.cli._output import Output
    from antiphon.cli._view import View
    from antiphon.services import Elicitation

__all__ = ["Job", "Run", "report"]

#: From `session/cancel` to leaving the turn, for an agent that does not answer it.
CANCEL_GRACE = 5.0
#: The end of the run is bounded even where nothing else works (a terminal that takes no output).
LAST_RESORT = 2.0


class Job(msgspec.Struct, kw_only=True):
    """What is to be run.

    `started` is when the command was called (`time.monotonic`): `timeout` counts from there.
    `roots` are the folders whose files, and in which commands, are lent (none: `cwd`). `session_id` is
    the session to go on with, None for a new one.
    """

    argv: list[str]
    cwd: str
    text: str
    started: float
    address: str | None = None
    session_id: str | None = None
    roots: tuple[str, ...] = ()
    lends_terminals: bool = True
    env: dict[str, str] | None = None
    timeout: float | None = None
    silence: float | None = 600.0
    record: str | None = None
    verbose: bool = False
    as_json: bool = False


class Run:
    """One run of a `Job`; `play` may be called once."""

    def __init__(
        self,
        job: Job,
        *,
        output: Output,
        view: View,
        decider: Decider,
        elicitation: Elicitation | None = None,
        afterwards: Callable[[Outcome], Awaitable[None]] | None = None,
        on_update: Callable[[Update], None] | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._job = job
        self._output = output
        self._view = view
        self._decider = decider
        self._elicitation = elicitation
        self._afterwards = afterwards
        self._on_update = on_update
        self._main: asyncio.Task[None] | None = None
        self._agent: AgentPeer | None = None
        self._session: Session | None = None
        self._turn_is_open = False
        self._why: Failure | None = None
        self._failed: AntiphonError | None = None
        self._interrupts = 0
        self._asides: set[asyncio.Task[None]] = set()

    def play(self) -> Outcome:
        """Run to the end and say how it went. Blocks; must be called in the main thread."""
        if not self._job.verbose:
            # The library's log is for who writes agents; a person gets the outcome in words.
            logging.getLogger("antiphon").addHandler(logging.NullHandler())
        with asyncio.Runner() as runner:
            runner.run(self._play())
        return self.outcome

    # -- the run and its bounds

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        self._output.on_lost = self._output_lost
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Who started us may have meant them to be ignored (nohup, a script's background job).
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._interrupted)
        main = self._main = asyncio.create_task(self._one_turn())
        if self._output.lost and self._output.was_there:
            self._output_lost()
        with self._bounds(loop):
            await asyncio.wait({main})
        self._conclude(main)

    @contextlib.contextmanager
    def _bounds(self, loop: asyncio.AbstractEventLoop) -> Generator[None]:
        timers: list[asyncio.TimerHandle] = []
        last_resort: threading.Timer | None = None
        if self._job.timeout is not None:
            left = self._left()
            timers.append(loop.call_later(left - self._reserve(), self._timed_out))
            timers.append(loop.call_later(left, self._kill))
            last_resort = threading.Timer(left + LAST_RESORT, self._abandon)
            last_resort.daemon = True
            last_resort.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            if last_resort is not None:
                last_resort.cancel()

    def _left(self) -> float:
        """Seconds to the end of the run."""
        assert self._job.timeout is not None
        return max(self._job.started + self._job.timeout - time.monotonic(), 0.01)

    def _reserve(self) -> float:
        """What the end of a run that times out may take: for cancelling and for closing."""
        return min(2.0, 0.1 * (self._job.timeout or 0.0))

    def _conclude(self, main: asyncio.Task[None]) -> None:
        outcome = self.outcome
        error = self._failed if main.cancelled() else main.exception()
        if self._why is not None:
            outcome.failure = self._why
        elif error is not None:
            outcome.failure = self._explain(error)
            if outcome.failure is None:
                # Ours. A script still gets its result line, and whoever mends it the traceback.
                traceback.print_exception(error)
                message = f"This is a fault in antiphon: {error!r}"
                outcome.failure = Failure(kind="internal", message=message)
        elif outcome.stop_reason is None:
            what = "The agent was not ready" if self._agent is None else "The run did not end"
            message = f"{what} within {self._job.timeout:g} s."
            outcome.failure = Failure(kind="timeout", message=message)
        if outcome.failure is not None:
            outcome.stop_reason = None
        outcome.permissions = self._decider.requests

    # -- what ends it early

    def _stop(self, why: Failure, grace: float) -> None:
        """End the run because of `why`; the first reason counts."""
        if self._is_over() or self._why is not None or self._main is None:
            return
        self._why = why
        if self._session is not None and self._turn_is_open:
            self._aside(self._session.cancel(backstop=grace))
        else:
            self._main.cancel()

    def _is_over(self) -> bool:
        """The turn has ended, well or not, and only the agent's end is left."""
        return self.outcome.stop_reason is not None or self._failed is not None

    def _kill(self) -> None:
        """No more time: closing that is cancelled kills the agent's process group at once.

        The first cancellation may only lead into closing, so it is repeated until all is over.
        """
        if self._main is not None and not self._main.done():
            self._main.cancel()
            asyncio.get_running_loop().call_later(0.05, self._kill)

    def _timed_out(self) -> None:
        if self._agent is None:
            # The start-up has the same limit, and knows more: what the agent wrote instead.
            return
        what = (
            "The agent did not open a session" if self._session is None else "The turn did not end"
        )
        failure = Failure(kind="timeout", message=f"{what} within {self._job.timeout:g} s.")
        self._stop(self._with_stderr(failure), self._reserve() / 2)

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1 or self._is_over():
            self._kill()
            return
        what = "cancelling the turn" if self._turn_is_open else "ending the agent"
        self._view.display.note(f"{what}; interrupt again to stop at once")
        self._stop(Failure(kind="interrupted", message="Interrupted."), CANCEL_GRACE)

    def _output_lost(self) -> None:
        # Nobody reads the answer: like an interrupt, but without anybody to tell.
        why = Failure(kind="interrupted", message="Standard output takes no more.")
        self._stop(why, CANCEL_GRACE)

    def _abandon(self) -> None:
        # In a thread of its own: the event loop itself hangs, most likely in a write that nobody
        # reads, so this is all that can still be done. What runs at exit kills every process.
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        os._exit(TIMEOUT)

    # -- the run itself

    async def _one_turn(self) -> None:
        try:
            await self._start_and_prompt()
        except asyncio.CancelledError as cancelled:
            # Where closing after a failure was cut short, the failure is what counts.
            self._failed = self._failed or _failure_behind(cancelled)
            raise

    async def _start_and_prompt(self) -> None:
        job, outcome = self._job, self.outcome
        decider = self._decider
        guard, roots = decider.guard, job.roots or (job.cwd,)
        client = _Lender(
            files=Files(*roots, guard=guard, guard_reads=decider.guards_reads),
            terminals=LentTerminals(*roots, guard=guard, show=self._view.display.output)
            if job.lends_terminals
            else None,
            permissions=decider.permission,
            elicitation=self._elicitation,
            on_update=self._update,
        )
        # `self._stop` has waited already for an answer to `session/cancel`.
        limits = Limits(cancel_backstop=0.0)
        if job.timeout is not None:
            # One bound for the whole run takes the place of those of its parts.
            startup = max(round(self._left() - self._reserve(), 2), 0.01)
            limits = msgspec.structs.replace(limits, startup_timeout=startup, request_timeout=None)
        if job.address is None:
            opening = spawn(
                job.argv,
                client=client,
                env=job.env,
                limits=limits,
                record=job.record,
                stderr=self._agent_stderr if job.verbose else None,
            )
        else:
            opening = connect(job.address, client=client, limits=limits, record=job.record)
        async with opening as agent:
            self._agent = agent
            outcome.agent = _name(agent)
            try:
                await self._prompt(agent)
            except AntiphonError as error:
                # Ending the agent may take a while: what happens meanwhile is not the reason.
                self._failed = error
                raise
            if self._afterwards is not None:
                await self._afterwards(outcome)

    async def _prompt(self, agent: AgentPeer) -> None:
        job, outcome = self._job, self.outcome
        self._session = session = await _opened(agent, job)
        outcome.session_id = session.session_id
        async with session.prompt(job.text, silence=job.silence) as turn:
            self._turn_is_open = True
            # An agent may think for long before it says anything.
            self._view.display.resume()
            async for _ in turn:
                # `_update` has seen it; iterating only keeps the turn's queue empty.
                pass
        self._turn_is_open = False
        outcome.stop_reason = str(turn.stop_reason)

    def _update(self, update: Update) -> None:
        if update.label == "replay":
            return  # of an earlier run, which has shown it
        self.outcome.updates += 1
        if update.kind == "agent_message_chunk":
            self.outcome.text.append(update.text)
        if self._job.as_json:
            self._output.write(update_line(update.raw))
        if self._on_update is not None:
            self._on_update(update)
        self._view.show(update)

    def _agent_stderr(self, line: str) -> None:
        self._view.display.note(f"stderr: {line.rstrip()}")

    def _explain(self, error: BaseException) -> Failure | None:
        failure = explain(error)
        if isinstance(error, SilenceTimeout):
            message = f"The agent said nothing for {error.seconds:g} s."
            failure = Failure(kind="timeout", message=message)
        if isinstance(error, AuthRequired) and failure is not None and self._agent is not None:
            ways = _ways_to_log_in(self._agent, self._job)
            failure = msgspec.structs.replace(failure, message=f"{failure.message}\n{ways}")
        return None if failure is None else self._with_stderr(failure)

    def _with_stderr(self, failure: Failure) -> Failure:
        """The failure with the agent's last words, where it has none of its own."""
        process = None if self._agent is None else self._agent.process
        if process is None or failure.stderr:
            return failure
        return msgspec.structs.replace(failure, stderr=process.stderr_tail)

    def _aside(self, work: Awaitable[None]) -> None:
        async def quietly() -> None:
            # The link may be gone already, which ends the turn by itself.
            with contextlib.suppress(Exception):
                await work

        task = asyncio.ensure_future(quietly())
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)


class _Lender(Client):
    # What the displays can show, and what nobody is asked to understand.
    capabilities = Capabilities(notices=True, compaction=True)


def report(outcome: Outcome, *, output: Output, as_json: bool, with_text: bool) -> int:
    """Write the last line, tell a person about a failure, and return the exit code."""
    if as_json:
        output.line(outcome.as_json(with_text=with_text))
    if outcome.failure is not None:
        tell(f"antiphon: {readable(outcome.failure.text())}\n")
    return outcome.exit_code


def _failure_behind(error: BaseException) -> AntiphonError | None:
    context = error.__context__
    while context is not None and not isinstance(context, AntiphonError):
        context = context.__context__
    return context


def _name(agent: AgentPeer) -> str | None:
    info = agent.info
    return None if info is None else f"{info.title or info.name} {info.version}".strip()


async def _opened(agent: AgentPeer, job: Job) -> Session:
    """A new session, or the one that is named: without its history where the agent can do without."""
    more = _more_roots(agent, job)
    if job.session_id is None:
        return await agent.new_session(cwd=job.cwd, additional_directories=more)
    if agent.offers("sessionCapabilities.resume"):
        return await agent.resume_session(job.session_id, cwd=job.cwd, additional_directories=more)
    async with agent.load_session(
        job.session_id, cwd=job.cwd, additional_directories=more
    ) as session:
        async for _ in session.replay():
            pass
    return session


def _more_roots(agent: AgentPeer, job: Job) -> list[str]:
    """The roots that the session's folder does not hold, for an agent that takes any."""
    offered = agent.capabilities.session_capabilities
    if not (
        isinstance(offered, v1.SessionCapabilities)
        and isinstance(offered.additional_directories, v1.SessionAdditionalDirectoriesCapabilities)
    ):
        return []
    inside = job.cwd.rstrip("/") + "/"
    return [root for root in job.roots if not f"{root}/".startswith(inside)]


def _ways_to_log_in(agent: AgentPeer, job: Job) -> str:
    lines: list[str] = []
    for method in agent.initialize_result.auth_methods or ():
        about = f": {method.description}" if method.description else ""
        if isinstance(method, v1.AuthMethodTerminal) and job.address is None:
            command = " ".join([*job.argv, *(method.args or [])])
            about += f" (run `{command}` in a terminal)"
        lines.append(f"  - {method.name} [{method.id}]{about}")
    if not lines:
        return "It names no way to log in; see its own documentation."
    if job.address is not None:
        return "\n".join(["Its ways to log in, where it runs:", *lines])
    how = f"Log in with: antiphon login --agent {shlex.quote(shlex.join(job.argv))}"
    return "\n".join(["Its ways to log in:", *lines, how])
