"""Bad agents, each with what becomes of it and how long that may take; nothing is left of any.

The table is the contract: an agent in `agents/`, what a client of ours sees of its turn, what
`antiphon prompt` makes of it, and a bound in seconds. Each is met twice, through `antiphon.spawn` and
through the command. What would leave a process, a task, a descriptor or a file fails as any test does
(tests/leaks.py); here it is also looked for by a mark that every descendant inherits.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
from tests.cli.command import BOUND, COMMAND, environment
from tests.zoo.wire import OPEN

from antiphon import AntiphonError, Client, Limits, spawn
from antiphon.transports import ProcessTransport, _spawned

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).parent / "agents"
MARK = "ANTIPHON_ZOO"
#: What the client grants an agent that will not answer, and one that will: a busy machine is slow.
IMPATIENCE, PATIENCE = 1.0, 10.0
#: A busy machine may take its time to start an interpreter or two.
SLACK = 3.0
#: The command has an interpreter and a display of its own to start, and several run at a time.
COMMAND_SLACK = 6.0


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of one agent.

    Attributes:
        ends: how its turn ends for a client: a stop reason, or the name of an exception.
        says: what stands in the exception's text.
        status: the exit status in the exception.
        heard: the texts of its updates.
        seconds: how long all of it may take, from the start to the end of the last process.
        code: the exit code of `antiphon prompt`.
        words: what stands in the command's standard error.
        timeout: what the command is given as `--timeout`, where the agent does not end by itself.
        whole_ladder: it needs the two seconds between the steps of its end; the others are ended with
            short ones, since they ignore the steps however long they are.
        escapes: how many processes leave its group and are not ours any more, as documented.
        prompt: the prompt.
    """

    ends: str = "end_turn"
    says: str = ""
    status: int | None = None
    heard: list[str] = field(default_factory=lambda: ["done"])
    seconds: float = 0.5
    code: int = 0
    words: str = ""
    timeout: float | None = None
    whole_ladder: bool = False
    escapes: int = 0
    prompt: str = "x"


def never_up(says: str = "", *, status: int | None = None, seconds: float = 0.5) -> Fate:
    """It ends before it has answered `initialize`."""
    words = says or "ended before it answered initialize"
    return Fate(
        ends="StartError", says=words, status=status, heard=[], seconds=seconds, code=3, words=words
    )


def silent(says: str = "", *, seconds: float = 1.5) -> Fate:
    """It does not answer `initialize` in time."""
    return Fate(
        ends="StartError",
        says=says or "no answer to initialize within",
        heard=[],
        seconds=seconds,
        code=5,
        words=says or "no answer to initialize within",
        timeout=3.0,
    )


def dies(heard: list[str], says: str, status: int, *, words: str = "", escapes: int = 0) -> Fate:
    """It ends in its turn."""
    return Fate(
        ends="ConnectionClosed",
        says=says,
        status=status,
        heard=heard,
        code=3,
        words=words or says,
        escapes=escapes,
    )


def malformed(says: str) -> Fate:
    """Its answer to `initialize` is none."""
    return Fate(ends="RemoteProtocolError", says=says, heard=[], code=4, words=says)


FATES: dict[str, Fate] = {
    # Noise, and odd ways to write what is right.
    "chatty_stderr": Fate(seconds=3.0),
    "banner": Fate(),
    "byte_order_mark": Fate(),
    "nul_bytes": Fate(),
    "answers_twice": Fate(),
    "wrong_ids": Fate(),
    "huge_update": Fate(heard=["do", "ne"], seconds=2.0),
    "huge_answer": Fate(
        ends="LimitExceeded", says="limit frame_bytes", seconds=2.0, code=4, words="frame_bytes"
    ),
    # Not up, and why.
    "silent_exit": never_up(status=0),
    "one_sentence": never_up("This version has no ACP mode.", status=0),
    "exits_with_reason": never_up("no API key in the environment", status=1),
    "wrapper_leaves": never_up(status=0),
    "never_initialises": silent(),
    "only_wrong_ids": silent(),
    "glued_banner": silent("it wrote what is no protocol message"),
    "endless_line": silent("it wrote what is no protocol message: 'loading ..."),
    "utf16": silent("it wrote what is no protocol message"),
    "starts_a_screen": silent("What shall I do?", seconds=2.0),
    "garbage_types": malformed("the answer to initialize is malformed"),
    "garbage_null": malformed("the answer to initialize is malformed"),
    "garbage_list": malformed("the answer to initialize is malformed"),
    "odd_error": malformed("error is malformed"),
    # Gone in its turn.
    "dies_mid_frame": dies(["whole"], "out of memory", 9),
    "killed": dies(["whole"], "ended by signal 9", -9),
    "complains_on_stdout": dies(
        ["working"],
        "the last it wrote is no protocol message: 'Error: quota exceeded.\\nTry again tomorrow.'",
        1,
    ),
    "exits_in_turn": dies([], "process ended", 0),
    "daemon_then_dies": dies(["now"], "exit status 7", 7, words="exit status: 7", escapes=1),
    "closes_output": Fate(
        ends="ConnectionClosed",
        says="the agent closed its output",
        heard=["last words"],
        seconds=1.5,
        code=3,
        words="closed its output",
        timeout=4.0,
    ),
    "closes_input": Fate(
        ends="ConnectionClosed",
        says="the agent closed its input",
        heard=["and another thing"],
        seconds=1.5,
        code=3,
        words="closed its input",
        timeout=4.0,
    ),
    # Does not end its turn.
    "deaf_to_cancel": Fate(
        ends="RequestTimeout",
        says="session/prompt",
        heard=["working"],
        seconds=1.5,
        code=5,
        words="did not end within",
        timeout=3.0,
    ),
    "stops_reading": Fate(
        ends="RequestTimeout",
        says="session/prompt",
        heard=[],
        seconds=2.0,
        code=5,
        words="did not end within",
        timeout=3.0,
        prompt="x" * (1 << 20),
    ),
    "stopped": Fate(
        ends="RequestTimeout",
        says="session/prompt",
        heard=["whole"],
        seconds=2.0,
        code=5,
        words="did not end within",
        timeout=3.0,
    ),
    # Ends its turn, and not itself.
    "slow_to_leave": Fate(seconds=1.5, whole_ladder=True),
    "ignores_term": Fate(seconds=5.0, whole_ladder=True, timeout=3.0),
    "tool_ignores_term": Fate(seconds=2.0),
    "daemonizes": Fate(escapes=1),
    "zombies": Fate(),
}


def command(agent: str) -> list[str]:
    # Without `site`, an interpreter is up in a third of the time.
    return [sys.executable, "-S", str(AGENTS / f"{agent}.py")]


class Marked:
    """An environment whose mark every process that an agent starts inherits."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.env = environment(**{MARK: self.mark, "PYTHONPATH": path})

    def left(self) -> list[psutil.Process]:
        """Who carries it, lives, and is not ourselves."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get(MARK) == self.mark
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end_escaped(self, expected: int) -> None:
        """Nobody is left but who is known to leave; those are ended here."""
        left = self.left()
        commands = [shlex.join(process.cmdline()) for process in left]
        for process in left:
            process.send_signal(signal.SIGKILL)
        assert len(left) == expected, commands


@pytest.fixture
def marked() -> Iterator[Marked]:
    made = Marked()
    yield made
    for process in made.left():
        process.send_signal(signal.SIGKILL)


def test_every_agent_of_the_zoo_is_in_the_table() -> None:
    assert {path.stem for path in AGENTS.glob("*.py")} == {*FATES, "floods"}


@pytest.mark.covers("FF-08", "FF-12", "FF-35", "FF-36", "FF-37", "FF-39", "R1-5")
@pytest.mark.parametrize("agent", FATES)
async def test_an_agent_meets_its_fate(
    agent: str, marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fate = FATES[agent]
    if not fate.whole_ladder:
        defaults: Any = ProcessTransport.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "stdin_grace", 0.2)
        monkeypatch.setitem(defaults, "term_grace", 0.2)
        monkeypatch.setattr(_spawned, "EXIT_GRACE", 0.2)
    limits = Limits(
        startup_timeout=IMPATIENCE
        if fate.ends == "StartError" and fate.status is None
        else PATIENCE,
        cancel_backstop=0.2,
    )
    timeout = IMPATIENCE if fate.ends == "RequestTimeout" else PATIENCE
    complaints: list[str] = []
    heard: list[str] = []
    error: AntiphonError | None = None
    ends = ""
    started = time.monotonic()
    try:
        async with spawn(
            command(agent), env=marked.env, limits=limits, stderr=complaints.append
        ) as peer:
            session = await peer.new_session(cwd=str(tmp_path))
            async with session.prompt(fate.prompt, timeout=timeout) as turn:
                async for update in turn:
                    heard.append(update.text)  # noqa: PERF401  (until it raises)
            ends = str(turn.stop_reason)
    except AntiphonError as caught:
        error, ends = caught, type(caught).__name__
    seconds = time.monotonic() - started

    marked.end_escaped(fate.escapes)
    assert ends == fate.ends, error
    assert fate.says in str(error)
    if agent == "closes_input":  # it goes on until the link is lost
        heard = heard[:1]
    assert heard == fate.heard
    assert getattr(error, "exit_status", None) == fate.status
    assert seconds < fate.seconds + SLACK
    if agent == "slow_to_leave":
        assert complaints == ["history saved"]


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize(
    ("agent", "number"),
    [
        ("deaf_to_cancel", signal.SIGKILL),
        ("floods", signal.SIGQUIT),
        ("ignores_term", signal.SIGKILL),
        ("stopped", signal.SIGKILL),
        ("tool_ignores_term", signal.SIGQUIT),
    ],
)
def test_nothing_is_left_of_an_agent_whose_client_is_killed(
    agent: str, number: signal.Signals, marked: Marked
) -> None:
    """No handler runs for either signal: whatever was started is ended by the guard."""
    with subprocess.Popen(
        [*COMMAND, "prompt", "--agent", shlex.join(command(agent)), "x"],
        # Whose turn was over might end its agent in good order, before it is killed.
        env={**marked.env, OPEN: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as client:
        assert client.stdout is not None
        client.stdout.read(1)  # the turn has begun, and the tool of an agent runs
        watched = [
            os.pidfd_open(process.pid) for process in marked.left() if process.pid != client.pid
        ]
        assert watched
        client.send_signal(number)
        assert client.wait(BOUND) == -number
        started = time.monotonic()

        for fd in watched:
            assert select.select([fd], [], [], BOUND)[0]
            os.close(fd)

    assert time.monotonic() - started < 2.0 + SLACK
    marked.end_escaped(0)


class Ran(NamedTuple):
    """What came of `antiphon prompt` with one agent."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[str]


def run(agent: str, folder: Path) -> Ran:
    fate, marked = FATES[agent], Marked()
    options = [] if fate.timeout is None else ["--timeout", f"{fate.timeout:g}"]
    started = time.monotonic()
    done = subprocess.run(
        [
            *(*COMMAND, "prompt", *options, "--cwd", str(folder)),
            *("--agent", shlex.join(command(agent)), "-"),
        ],
        env=marked.env,
        input=fate.prompt,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    seconds = time.monotonic() - started
    left = marked.left()
    commands = [shlex.join(process.cmdline()) for process in left]
    for process in left:
        process.send_signal(signal.SIGKILL)
    return Ran(done.returncode, done.stdout, done.stderr, seconds, commands)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Ran]]:
    """The command with every agent, several at a time: most of them do nothing but wait."""
    folder = tmp_path_factory.mktemp("session")
    with ThreadPoolExecutor(3) as pool:
        return {agent: pool.submit(run, agent, folder) for agent in FATES}


@pytest.mark.covers("FF-08", "FF-35", "FF-36", "FF-37", "FF-39")
@pytest.mark.parametrize("agent", FATES)
def test_the_command_says_what_became_of_an_agent(agent: str, runs: dict[str, Future[Ran]]) -> None:
    fate, ran = FATES[agent], runs[agent].result()

    assert ran.code == fate.code, ran.err
    assert fate.words.lower() in ran.err.lower()
    assert "Traceback" not in ran.err
    if agent == "closes_input":  # it goes on until the link is lost
        assert ran.out.startswith(fate.heard[0])
    else:
        assert ran.out.rstrip("\n") == "".join(fate.heard)
    assert ran.seconds < max(fate.seconds, fate.timeout or 0) + COMMAND_SLACK
    assert len(ran.left) == fate.escapes, ran.left


@pytest.mark.covers("FF-35")
@pytest.mark.parametrize("reads", [True, False])
async def test_a_flood_is_made_to_wait_and_ends_when_its_client_leaves(
    marked: Marked, tmp_path: Path, reads: bool
) -> None:
    waits = asyncio.Event()

    def complained(line: str) -> None:
        assert line == "made to wait"
        waits.set()

    limits = Limits(queue_bytes=1 << 20, cancel_backstop=0.2)
    process = psutil.Process()
    started = time.monotonic()
    most = before = process.memory_info().rss
    async with spawn(
        command("floods"), env=marked.env, limits=limits, stderr=complained, client=Client()
    ) as peer:
        session = await peer.new_session(cwd=str(tmp_path))
        async with session.prompt("x") as turn:
            if reads:
                count = 0
                async for _ in turn:
                    count += 1
                    if count % 1000 == 0:
                        most = max(most, process.memory_info().rss)
                    if count == 20_000:
                        break
            async with asyncio.timeout(10):
                await waits.wait()
            most = max(most, process.memory_info().rss)
    seconds = time.monotonic() - started

    marked.end_escaped(0)
    assert (most - before) >> 20 < 20
    assert seconds < 12 + SLACK
