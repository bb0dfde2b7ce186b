"""Real agents under our client, and real clients with our agent, offline: one table of what happened.

::

    export ACP_LAB=DIR            # where the lab has installed the programs
    export ACP_LAB_TOOLS=DIR      # the folder with lab.py, whose model server is running
    python tests/interop/lab.py [NAME ...] [--json FILE] [--records DIR]

Needs programs that no package of ours installs, so it is no test. What the peers do is their affair and
is printed; what is ours is judged: every update delivered once and in the order of the wire, every
request answered once, no process left. The exit code is 1 if something of that was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from antiphon import (
    AntiphonError,
    CapabilityError,
    Client,
    Limits,
    RequestError,
    spawn,
)
from antiphon.schema import v1
from antiphon.services import Files, Terminals

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from antiphon import AgentPeer, PromptTurn, Session, Update

LAB = Path(os.environ.get("ACP_LAB", "acp-lab"))
TOOLS = Path(os.environ.get("ACP_LAB_TOOLS", "lab"))
AGENTS = ("opencode", "fastagent", "zedclaude", "codex", "pi", "zedcodex", "kimi", "agentao")
CLIENTS = ("sdk-ts", "acp-client", "acpx")
NOTES = "alpha\nbeta\ngamma\n"
#: Agents that ask for nothing until they are put into this mode.
MODES = {"codex": "read-only"}
#: What is asked for, to be refused: a new file, or what else an agent asks about.
REFUSED = {"zedclaude": "edit", "agentao": "ask"}
BOUND = 90.0


class Wire:
    """Every frame of one connection, and what must be true of it."""

    def __init__(self, path: Path | None) -> None:
        self.updates: list[bytes] = []
        self.requests: Counter[str] = Counter()
        self.open_ours: dict[str, str] = {}
        self.open_theirs: dict[str, str] = {}
        self.stray = 0
        self.odd: list[str] = []
        self._file = None if path is None else path.open("w", encoding="utf-8")

    def __call__(self, direction: str, frame: bytes) -> None:
        if self._file is not None:
            line = {"dir": direction, "frame": frame.decode("utf-8", "replace")}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        try:
            message: Any = json.loads(frame)
        except ValueError:
            self.odd.append(frame[:60].decode("utf-8", "replace"))
            return
        if not isinstance(message, dict):
            self.odd.append(str(message)[:60])
        else:
            self._take(direction, cast("dict[str, Any]", message), frame)

    def _take(self, direction: str, message: dict[str, Any], frame: bytes) -> None:
        if "method" in message:
            self._asked(direction, message, frame)
        else:
            mine = self.open_ours if direction == "in" else self.open_theirs
            if mine.pop(json.dumps(message.get("id")), None) is None:
                self.stray += 1

    def _asked(self, direction: str, message: dict[str, Any], frame: bytes) -> None:
        method = message["method"]
        if "id" in message:
            mine = self.open_ours if direction == "out" else self.open_theirs
            mine[json.dumps(message["id"])] = method
            if direction == "in":
                self.requests[method] += 1
        elif method == "session/update" and direction == "in":
            self.updates.append(frame)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Seen:
    """What an observer of the whole connection was shown, and what was asked of a person."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.kinds: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.asked = 0
        self.answer = True
        #: Set while a person takes his time; `asking` tells when he is asked.
        self.thinking = False
        self.asking = asyncio.Event()

    def update(self, update: Update) -> None:
        self.frames.append(update.frame)
        self.kinds[update.kind or "?"] += 1
        self.labels[update.label] += 1

    async def decide(self, params: Any, ctx: Any) -> bool:
        self.asked += 1
        self.asking.set()
        if self.thinking:
            await asyncio.Event().wait()
        return self.answer


class Run:
    """One agent through all steps."""

    def __init__(self, name: str, records: Path | None) -> None:
        self.name = name
        self.records = records
        self.outcomes: dict[str, str] = {}
        self.faults: list[str] = []
        self.delivered = 0
        self.on_the_wire = 0
        self.asked = 0
        self.calls: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        (self.folder / "notes.txt").write_text(NOTES)
        subprocess.run(["git", "init", "-q"], cwd=self.folder, check=False)
        self._number = 0
        self._closed: set[str] = set()

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[tuple[AgentPeer, Seen]]:
        """The agent's own process, and a look at what crossed when it is gone."""
        self._number += 1
        path = None
        if self.records is not None:
            path = self.records / f"{self.name}-{self._number}.ndjson"
        wire, seen = Wire(path), Seen()
        client = Client(
            files=Files(), terminals=Terminals(), permissions=seen.decide, on_update=seen.update
        )
        begin = time.monotonic()
        command = [sys.executable, str(TOOLS / "lab.py"), "agent", self.name]
        limits = Limits(cancel_backstop=20)
        async with spawn(
            command, client=client, cwd=self.folder, record=wire, limits=limits
        ) as peer:
            if "start" not in self.outcomes:
                info = peer.info
                version = "" if info is None else f" {info.name} {info.version}"
                self.outcomes["start"] = f"{time.monotonic() - begin:.1f} s{version}"
            try:
                yield peer, seen
            finally:
                process = peer.process
                begin = time.monotonic()
                await peer.aclose()
                took = time.monotonic() - begin
                self.outcomes["exit"] = f"{process.exit_status} in {took:.1f} s"
                wire.close()
                self._look(wire, seen, peer)

    def _look(self, wire: Wire, seen: Seen, peer: AgentPeer) -> None:
        self.delivered += len(seen.frames)
        self.on_the_wire += len(wire.updates)
        self.asked += seen.asked
        self.calls += wire.requests
        self.kinds += seen.kinds
        known = set(peer.sessions) | self._closed
        expected = [f for f in wire.updates if json.loads(f)["params"]["sessionId"] in known]
        unknown = len(wire.updates) - len(expected)
        if unknown:
            self.outcomes["unknown"] = f"{unknown} updates of sessions not opened here"
        by_session: dict[str, list[bytes]] = {}
        for frames, sign in ((expected, ""), (seen.frames, "!")):
            for frame in frames:
                key = sign + str(json.loads(frame)["params"]["sessionId"])
                by_session.setdefault(key, []).append(frame)
        for session_id in known:
            if by_session.get(session_id, []) != by_session.get("!" + session_id, []):
                self.faults.append(f"updates of {session_id} were lost, doubled or shuffled")
        left = [m for m in wire.open_theirs.values() if m != "terminal/wait_for_exit"]
        if left and peer.process.exit_status is None:
            self.faults.append(f"without an answer: {left}")
        if wire.odd:
            self.outcomes["odd"] = f"{len(wire.odd)} lines that are no message: {wire.odd[0]!r}"

    async def step(self, name: str, work: Callable[[], Awaitable[str]]) -> None:
        """Do one thing and note what came of it."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(BOUND):
                outcome = await work()
        except TimeoutError:
            outcome = f"no end within {BOUND:g} s"
        except AntiphonError as error:
            outcome = _short(error)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:80]
            self.faults.append(f"{name}: {outcome}")
        self.outcomes[name] = f"{outcome} ({time.monotonic() - begin:.1f} s)"

    # -------------------------------------------------------------- the steps

    async def all(self) -> None:
        """Every step; the second process has only what the first one has left on the disk."""
        session_id = ""
        async with self.connected() as (peer, seen):
            session = await self._new(peer)
            session_id = session.session_id
            await self.step("turn", lambda: self._turn(session, seen))
            await self.step("cancel", lambda: self._cancel(peer))
            await self.step("early", lambda: self._cancel(peer, early=True))
            await self.step("leave", lambda: self._leave(peer))
            await self.step("reject", lambda: self._reject(peer, seen))
            await self.step("dialog", lambda: self._dialog(peer, seen))
            await self.step("bad", lambda: self._bad(peer))
            await self.step("after", lambda: self._hello(session))
            await self.step("list", lambda: self._list(peer))
        for method in ("load", "resume"):
            async with self.connected() as (peer, seen):
                opening = partial(self._open, peer, seen, method, session_id)
                await self.step(method, opening)
        async with self.connected() as (peer, _):
            await self.step("close", lambda: self._close(peer))
        async with self.connected() as (peer, _):
            session = await self._new(peer)
            turn = session.prompt(self._scenario("slow"))
            async with asyncio.timeout(BOUND):
                await turn.__aenter__()
                await anext(turn)
            # and the connection is closed in the middle of it
        self.outcomes["orphans"] = self._orphans()

    async def _new(self, peer: AgentPeer) -> Session:
        session = await peer.new_session(cwd=self.folder)
        if self.name in MODES:
            await session.set_mode(MODES[self.name])
        return session

    def _scenario(self, name: str) -> str:
        return f"scenario={name} cwd={self.folder}"

    async def _turn(self, session: Session, seen: Seen) -> str:
        seen.answer = True
        async with session.prompt(self._scenario("all")) as turn:
            got = [update async for update in turn]
        text = "".join(update.text for update in got)
        made = (self.folder / "made.txt").exists()
        edited = "ALPHA" in (self.folder / "notes.txt").read_text()
        done = "" if "All done" in text else ", no last text"
        return f"{turn.stop_reason}, {len(got)} updates{done}, wrote {made}, edited {edited}"

    async def _cancel(self, peer: AgentPeer, *, early: bool = False) -> str:
        """Cancelled after the first words of the model, or right behind the prompt."""
        session = await self._new(peer)
        async with session.prompt(self._scenario("slow")) as turn:
            begin = 0.0
            if early:
                begin = time.monotonic()
                await turn.cancel()
            try:
                async for update in turn:
                    # Some agents greet in the first turn: that is not the model yet.
                    if "tick" in update.text and not begin:
                        begin = time.monotonic()
                        await turn.cancel()
            except RequestError as error:
                return f"{_short(error)} after {time.monotonic() - begin:.1f} s"
        took = time.monotonic() - begin
        return f"{turn.stop_reason} after {took:.1f} s; then {await self._hello(session)}"

    async def _leave(self, peer: AgentPeer) -> str:
        session = await self._new(peer)
        async with session.prompt(self._scenario("slow")) as turn:
            async for update in turn:
                if "tick" in update.text:
                    break
        return f"{turn.stop_reason}; then {await self._hello(session)}"

    async def _reject(self, peer: AgentPeer, seen: Seen) -> str:
        seen.answer = False
        before = seen.asked
        session = await self._new(peer)
        self._clean()
        try:
            outcome = await session.prompt(self._scenario(REFUSED.get(self.name, "write")))
        finally:
            seen.answer = True
        return f"{seen.asked - before} asked, {outcome.stop_reason}, {self._written()}"

    async def _dialog(self, peer: AgentPeer, seen: Seen) -> str:
        """The turn is cancelled while a person is being asked."""
        session = await self._new(peer)
        self._clean()
        seen.thinking = True
        seen.asking.clear()
        try:
            async with session.prompt(self._scenario(REFUSED.get(self.name, "write"))) as turn:
                asked = asyncio.ensure_future(seen.asking.wait())
                took = asyncio.ensure_future(self._rest(turn))
                await asyncio.wait((asked, took), return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    asked.cancel()
                    await took
                    return f"never asked, {turn.stop_reason}"
                begin = time.monotonic()
                await turn.cancel()
                await took
                seconds = time.monotonic() - begin
        finally:
            seen.thinking = False
        return (
            f"{turn.stop_reason} after {seconds:.1f} s, {self._written()}; "
            f"then {await self._hello(session)}"
        )

    @staticmethod
    async def _rest(turn: PromptTurn) -> None:
        async for _ in turn:
            pass

    def _clean(self) -> None:
        (self.folder / "notes.txt").write_text(NOTES)
        for name in ("made.txt", "escalated.txt"):
            (self.folder / name).unlink(missing_ok=True)

    def _written(self) -> str:
        made = [n for n in ("made.txt", "escalated.txt") if (self.folder / n).exists()]
        untouched = (self.folder / "notes.txt").read_text() == NOTES and not made
        return "nothing written" if untouched else "written all the same"

    async def _bad(self, peer: AgentPeer) -> str:
        found: list[str] = []
        session = await self._new(peer)
        text = v1.TextContent(text="hi")
        tries: dict[str, Callable[[], Awaitable[Any]]] = {
            "ext": lambda: peer.request_extension("_antiphon.example/ping", {"x": 1}, timeout=15),
            "session": lambda: peer.request(
                v1.PromptRequest(session_id="nope", prompt=[text]), timeout=15
            ),
            "mode": lambda: session.set_mode("no-such-mode"),
            "option": lambda: session.set_config_option("no-such-option", "x"),
        }
        for name, call in tries.items():
            try:
                answer = await call()
            except RequestError as error:
                found.append(f"{name} {error.code}")
            except AntiphonError as error:
                found.append(f"{name} {type(error).__name__}")
            else:
                found.append(f"{name} {getattr(answer, 'stop_reason', 'ok')}")
        return ", ".join(found)

    async def _hello(self, session: Session) -> str:
        outcome = await session.prompt(self._scenario("hello"))
        said = "said hello" if "Hello" in outcome.text else f"said {outcome.text[:20]!r}"
        return f"{outcome.stop_reason}, {said}"

    async def _list(self, peer: AgentPeer) -> str:
        try:
            page = await peer.list_sessions(cwd=self.folder)
        except CapabilityError:
            return "not offered"
        return f"{len(page.sessions)} sessions"

    async def _open(self, peer: AgentPeer, seen: Seen, method: str, session_id: str) -> str:
        opening = peer.load_session if method == "load" else peer.resume_session
        try:
            session = await opening(session_id, cwd=self.folder)
        except CapabilityError:
            return "not offered"
        replayed = seen.labels["replay"]
        return f"{replayed} replayed; then {await self._hello(session)}"

    async def _close(self, peer: AgentPeer) -> str:
        session = await self._new(peer)
        try:
            await session.close()
        except CapabilityError:
            return "not offered"
        self._closed.add(session.session_id)
        return "closed"

    def _orphans(self) -> str:
        """Processes with this agent's home, which only what we started has; ended by their ids."""
        home = f"HOME={LAB / 'home' / self.name}".encode()
        found: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if home not in (entry / "environ").read_bytes().split(b"\0"):
                        continue
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    os.kill(int(entry.name), signal.SIGTERM)
                except OSError:
                    continue
                found.append(command[:60])
        if found:
            self.faults.append(f"left behind: {found}")
        return str(len(found))


def _short(error: AntiphonError) -> str:
    if isinstance(error, RequestError):
        return f"error {error.code} {error.message[:40]}"
    return f"{type(error).__name__}: {str(error)[:60]}"


# ------------------------------------------------------------------ their clients


#: What each client is told besides the prompt; our agent's pace, in seconds a word.
SCENES: dict[str, dict[str, tuple[list[str], float]]] = {
    "sdk-ts": {"turn": ([], 0.01)},
    "acp-client": {"turn": ([], 0.01)},
    "acpx": {
        "turn": (["--approve-all"], 0.01),
        "reject": (["--deny-all"], 0.01),
        "alone": (["--approve-all", "--no-fs", "--no-terminal"], 0.01),
        "cancel": (["--approve-all", "--timeout", "1"], 0.2),
    },
}


def client_command(name: str, agent: str, folder: Path, flags: list[str]) -> list[str]:
    """How one of the lab's clients is started on an agent's command."""
    prompt = "look around"
    node = LAB / "node24" / "node_modules" / "node" / "bin" / "node"
    if name == "acpx":
        tool = LAB / "acpx" / "node_modules" / ".bin" / "acpx"
        words = ["--agent", agent, "--cwd", str(folder), *flags, "exec", prompt]
        return [str(node), str(tool), *words]
    if name == "sdk-ts":
        return [str(node), str(LAB / "sdk-ts" / "tssdk_client.mjs"), agent, str(folder), prompt]
    python = LAB / "acp-client" / "bin" / "python"
    return [str(python), str(TOOLS / "clients" / "acp_client_ask.py"), agent, str(folder), prompt]


def run_client(name: str, records: Path | None) -> tuple[dict[str, str], list[str]]:
    """One client through its scenes with our demo agent, which records what it sees."""
    outcomes: dict[str, str] = {}
    faults: list[str] = []
    for scene, (flags, pace) in SCENES[name].items():
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        try:
            record = (records or folder) / f"{name}-{scene}.ndjson"
            outcome, wrong = _run_scene(name, folder, record, flags, pace)
        except (OSError, subprocess.TimeoutExpired) as error:
            outcome, wrong = f"{type(error).__name__}: {error}"[:200], []
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        outcomes[scene] = outcome
        faults += [f"{scene}: {fault}" for fault in wrong]
    return outcomes, faults


def _run_scene(
    name: str, folder: Path, record: Path, flags: list[str], pace: float
) -> tuple[str, list[str]]:
    (folder / "notes.txt").write_text(NOTES)
    agent = folder / "our-agent"  # some clients take one word
    words = [sys.executable, str(Path(__file__).with_name("lab_agent.py")), str(record), str(pace)]
    agent.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    agent.chmod(0o755)
    begin = time.monotonic()
    done = subprocess.run(
        client_command(name, str(agent), folder, flags),
        env={**os.environ, "LAB_CLIENT": str(folder), "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        timeout=BOUND,
        check=False,
    )
    took = time.monotonic() - begin
    if not record.exists():
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        return f"exit {done.returncode}", [f"our agent was not started, or did not start: {said}"]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    sent = [line["frame"] for line in lines if line["dir"] == "out"]
    came = [line["frame"] for line in lines if line["dir"] == "in"]
    asked = Counter(f["method"] for f in came if "method" in f)
    answers = Counter(json.dumps(f["id"]) for f in sent if "method" not in f)
    requests = [json.dumps(f["id"]) for f in came if "method" in f and "id" in f]
    faults = [f"{id_} got {answers[id_]} answers" for id_ in requests if answers[id_] != 1]
    results: list[Any] = [f["result"] for f in sent if "result" in f]
    stops = [result["stopReason"] for result in results if "stopReason" in result]
    updates = sum(f.get("method") == "session/update" for f in sent)
    left = [p for p in Path("/proc").iterdir() if _has(p, f"LAB_CLIENT={folder}")]
    faults += [f"process {entry.name} is left" for entry in left]
    for entry in left:
        os.kill(int(entry.name), signal.SIGTERM)
    text = ", ".join(f"{method} {count}" for method, count in asked.items())
    outcome = f"exit {done.returncode} in {took:.1f} s; {text}; {updates} updates; {stops}"
    refused = sum("error" in f for f in came)
    return outcome + (f"; {refused} errors of theirs" if refused else ""), faults


def _has(entry: Path, mark: str) -> bool:
    """Whether a process of /proc has this in its environment."""
    if not entry.name.isdigit():
        return False
    try:
        return mark.encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


# ------------------------------------------------------------------ the table


async def run_agent(name: str, records: Path | None) -> Run:
    """One agent; what cannot even be started is an outcome too."""
    run = Run(name, records)
    try:
        await run.all()
    except Exception as error:
        run.outcomes["stopped"] = f"{type(error).__name__}: {error}"[:200]
        run.outcomes["orphans"] = run._orphans()
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=[*AGENTS, *CLIENTS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if options.records is not None:
        options.records.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, Any]] = {}
    wrong = 0
    for name in options.names:
        if name in CLIENTS:
            outcomes, faults = run_client(name, options.records)
        else:
            run = asyncio.run(run_agent(name, options.records))
            faults = run.faults
            outcomes = {
                **run.outcomes,
                "updates": f"{run.delivered} of {run.on_the_wire}",
                "asked": str(run.asked),
                "calls": ", ".join(f"{m} {n}" for m, n in sorted(run.calls.items())),
                "kinds": ", ".join(f"{k} {n}" for k, n in sorted(run.kinds.items())),
            }
        table[name] = {"outcomes": outcomes, "faults": faults}
        wrong += len(faults)
        print(f"== {name}")
        for step, outcome in outcomes.items():
            print(f"   {step:<8} {outcome}")
        for fault in faults:
            print(f"   OURS?    {fault}")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1, ensure_ascii=False))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
