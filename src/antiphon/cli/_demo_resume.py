"""`antiphon demo --resume`: a conversation that survives a cut link and a killed agent, and the proof.

The agent (`_demo_durable`) is a process of its own that keeps a journal and listens at a socket. A client
lets it count, loses its link in the middle, loses the agent itself (SIGKILL), and goes on each time
behind the last record that it holds. Two witnesses who know nothing of all that are compared at the end:
the frames as they came over all links, and the journal as it is on disk. How a client goes on is the
library's (`Session.reattach`); here are the accidents, the telling and the proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from antiphon import AgentPeer, ConnectionClosed, Session, StartError, connect
from antiphon.cli._journal_lines import json_line
from antiphon.cli._outcome import OK, OTHER_STOP, Failure, Outcome, explain
from antiphon.cli._output import Output
from antiphon.cli._prompt import module_command
from antiphon.cli._show import choose_paper
from antiphon.cli._turn import report
from antiphon.journal import SESSION_UPDATE, TURN_COMPLETED, TURN_STARTED, SqliteJournal
from antiphon.schema import loads
from antiphon.transports import SocketTransport, TcpAddress, UnixAddress, parse_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.cli._journal_page import Paper
    from antiphon.journal import Record

__all__ = ["Plan", "Proof", "Witness", "prove", "run"]

#: How many numbers the agent may be ahead when an accident happens: it goes on meanwhile.
_AHEAD: Final = 3
#: Seconds between two numbers: to watch, and where nobody does.
_PACE: Final = 0.04
_FAST: Final = 0.002
#: What the whole may take where nothing else was said, in seconds: it takes three or four.
_BOUND: Final = 60.0
#: How long a process may take to end when it is asked to, in seconds.
_GRACE: Final = 10.0
#: The longest path of a Unix socket, less than any system's.
_SOCKET_PATH: Final = 100
_COLUMNS: Final = 72
#: Characters of the agent's last words.
_TAIL: Final = 4000


class Plan(msgspec.Struct, frozen=True):
    """What happens at which number; the agent may be a few ahead of the client, never more.

    Attributes:
        to: the last number.
        cut: when the client has seen this one, its link is cut.
        away: when the journal has this one, the client comes back.
        kill: when the client has seen this one, the agent is killed.
    """

    to: int
    cut: int
    away: int
    kill: int

    @classmethod
    def of(cls, seed: int) -> Plan:
        """One of many, always the same for a seed."""
        chance = random.Random(seed)  # noqa: S311  (a story, no secret)
        cut = chance.randint(8, 14)
        away = cut + _AHEAD + chance.randint(3, 7)
        kill = away + chance.randint(6, 12)
        return cls(kill + _AHEAD + chance.randint(10, 16), cut, away, kill)


class Witness:
    """Writes down every record that comes over any link, in the order of its coming.

    Attributes:
        seen: offset and content of each: kind, payload, taint and time.
        bare: how many updates came without an offset: second copies of what is in the journal.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[Any, ...]]] = []
        self.bare = 0

    def __call__(self, direction: str, frame: bytes) -> None:
        """Take a frame: `record=` of a connection."""
        if direction != "in":
            return
        message: dict[str, Any] = loads(frame)
        params: Any = message.get("params")
        if message.get("method") == "session/update":
            meta: dict[str, Any] = params.get("_meta") or {}
            stamp = meta.get("raxol.io")
            if stamp is None:
                self.bare += 1
            else:
                self.take(SESSION_UPDATE, params["update"], stamp)
        elif message.get("method") == "_raxol/session.record":
            self.take(params["kind"], params["payload"], params)

    def take(self, kind: str, payload: Any, stamp: Any) -> None:
        """Note one record."""
        self.seen.append((stamp["offset"], (kind, payload, stamp["taint"], stamp["ts"])))


class Proof(msgspec.Struct, kw_only=True):
    """What the two witnesses agree on, and what not; offsets throughout.

    Attributes:
        records: how many the journal has.
        came: how many came, each counted as often as it did.
        missing: in the journal, and never came.
        doubled: came more than once.
        invented: came, and are not in the journal.
        different: came with another content.
        ordered: whether they came in their order.
        bare: updates that came without an offset.
        orphans: turns that were marked as orphaned; exactly one was.
        turns: turns that began.
        numbers: what the user's own loop saw.
        to: what it should have seen: every number up to this one, once and in order.
        stop_reason: how the last turn ended.
        damages: what is wrong with the journal's files.
    """

    records: int
    came: int
    missing: list[int]
    doubled: list[int]
    invented: list[int]
    different: list[int]
    ordered: bool
    bare: int
    orphans: int
    turns: int
    numbers: list[int]
    to: int
    stop_reason: str
    damages: list[str]

    @property
    def whole(self) -> bool:
        """History plus live is the journal: no gap, no duplicate."""
        wrong = (self.missing, self.doubled, self.invented, self.different)
        return self.records > 0 and not any(wrong) and self.ordered and self.bare == 0

    @property
    def counted(self) -> bool:
        """The user saw each number once, in order."""
        return self.numbers == list(range(1, self.to + 1))

    @property
    def settled(self) -> bool:
        """The turn whose agent was killed ended once, as orphaned, and the next one by itself."""
        return (self.turns, self.orphans, self.stop_reason) == (2, 1, "end_turn")

    @property
    def holds(self) -> bool:
        """All of it."""
        return self.whole and self.counted and self.settled and not self.damages


def prove(
    journal: Sequence[Record],
    witness: Witness,
    numbers: Sequence[int],
    plan: Plan,
    *,
    stop_reason: str,
    damages: Sequence[str] = (),
) -> Proof:
    """Compare what came with what is in the journal; believes neither the client nor the agent."""
    kept = {one.offset: (one.kind, one.data, one.taint, one.ts) for one in journal}
    offsets = [offset for offset, _ in witness.seen]
    came = dict(witness.seen)
    completions = [one.data for one in journal if one.kind == TURN_COMPLETED]
    return Proof(
        records=len(journal),
        came=len(offsets),
        missing=sorted(set(kept) - set(came)),
        doubled=sorted({offset for offset in came if offsets.count(offset) > 1}),
        invented=sorted(set(came) - set(kept)),
        different=sorted(
            {offset for offset, content in witness.seen if kept.get(offset, content) != content}
        ),
        ordered=offsets == sorted(offsets) and [*kept] == [*range(1, len(journal) + 1)],
        bare=witness.bare,
        orphans=sum(one.get("outcome") == "orphaned" for one in completions),
        turns=sum(one.kind == TURN_STARTED for one in journal),
        numbers=list(numbers),
        to=plan.to,
        stop_reason=stop_reason,
        damages=list(damages),
    )


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 only if the proof holds."""
    logging.getLogger("antiphon").addHandler(logging.NullHandler())
    output = Output()
    place = Path(tempfile.mkdtemp(prefix="antiphon-resume-"))
    plan = Plan.of(options.seed or 0)
    try:
        with asyncio.Runner() as runner:
            return runner.run(_bounded(options, output, plan, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def _bounded(options: argparse.Namespace, output: Output, plan: Plan, place: Path) -> int:
    task = asyncio.current_task()
    assert task is not None
    output.on_lost = task.cancel
    bound = options.timeout or _BOUND
    try:
        async with asyncio.timeout(bound):
            teller = _Teller(output, as_json=options.json)
            pace = _FAST if options.json else _PACE
            proof = await _Play(teller, plan, place, pace).play()
    except TimeoutError:
        failure = Failure(kind="timeout", message=f"The demo did not end within {bound:g} s.")
    except asyncio.CancelledError:
        if not output.lost:
            raise
        task.uncancel()
        failure = Failure(kind="interrupted", message="Standard output takes no more.")
    except Exception as error:
        found = explain(error)
        if found is None:
            raise
        failure = found
    else:
        return OK if proof.holds else OTHER_STOP
    return report(Outcome(failure=failure), output=output, as_json=options.json, with_text=False)


# -- the telling


class _Teller:
    """Tells what happens: as a story, or as a line of JSON for each step."""

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output = output
        self._paper: Paper | None = None if as_json else choose_paper(output)
        self._steps = 0
        self._column = 0

    def begin(self, title: str) -> None:
        if self._paper is not None:
            self._paper.line((title, "bold"))

    def step(self, name: str, text: str, *lines: str, **facts: Any) -> None:
        """Something happens: what, in a sentence, and more lines about it."""
        self._steps += 1
        if self._paper is None:
            self._output.write(json_line({"type": "step", "step": name, **facts}))
            return
        self._end_numbers()
        self._paper.line(("", ""))
        self._paper.line((f"{self._steps}. ", "bold cyan"), (text, "bold"))
        for line in lines:
            self._paper.line((f"   {line}", "dim"))

    def number(self, number: int) -> None:
        """The user's own loop got a number."""
        if self._paper is None:
            return
        text = f"{number} "
        if not self._column or self._column + len(text) > _COLUMNS:
            self._end_numbers()
            self._paper.piece("   ", "")
            self._column = 3
        self._paper.piece(text, "green")
        self._column += len(text)

    def _end_numbers(self) -> None:
        if self._column and self._paper is not None:
            self._paper.piece("\n", "")
            self._column = 0

    def verdict(self, proof: Proof, history: int) -> None:
        """The proof, and what it says."""
        if self._paper is None:
            facts = msgspec.structs.asdict(proof)
            facts["numbers"] = len(proof.numbers)
            result = {"type": "result", "ok": proof.holds, **facts, "history": history}
            self._output.write(json_line({**result, "live": proof.came - history}))
            return
        self._end_numbers()
        self._paper.line(("", ""))
        for good, text in _verdict(proof, history):
            mark = ("ok: ", "bold green") if good else ("not ok: ", "bold red")
            self._paper.line(mark, (text, ""))


def _verdict(proof: Proof, history: int) -> list[tuple[bool, str]]:
    wrong = [
        f"{len(found)} {what} ({', '.join(map(str, found[:8]))}{', …' if len(found) > 8 else ''})"
        for what, found in (
            ("missing", proof.missing),
            ("doubled", proof.doubled),
            ("not in the journal", proof.invented),
            ("with another content", proof.different),
        )
        if found
    ]
    if proof.bare:
        wrong.append(f"{proof.bare} without an offset")
    if not proof.ordered:
        wrong.append("out of order")
    whole = (
        f"{history} records came as history and {proof.came - history} live; together they are "
        f"the journal: offsets 1 to {proof.records}, no gap, no duplicate"
    )
    lines = [
        (proof.whole, whole if proof.whole else f"of the journal's records, {'; '.join(wrong)}")
    ]
    seen = f"every number from 1 to {proof.to}, once and in order"
    if not proof.counted:
        seen = f"not {seen}: {' '.join(map(str, proof.numbers))}"
    lines.append((proof.counted, f"the loop saw {seen}"))
    settled = "the interrupted turn ended once, as orphaned; the next one with end_turn"
    if not proof.settled:
        settled = (
            f"not as it should: {proof.turns} turns, {proof.orphans} orphaned, "
            f"the last ended with {proof.stop_reason}"
        )
    lines.append((proof.settled, settled))
    lines += [(False, f"the journal is damaged: {text}") for text in proof.damages]
    return lines


# -- what happens


class _Agent:
    """The agent's process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @property
    def pid(self) -> int:
        return self.process.pid

    def allow(self, number: int) -> None:
        """Let it count on to a number."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % number)

    async def kill(self) -> None:
        """End it in the middle of whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        """Close its input, which ends it; kill it if it does not. Idempotent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE):
                await self.process.wait()
        except TimeoutError:
            await self.kill()


class _Link:
    """One connection to the agent, and the cable that it goes over."""

    def __init__(self, peer: AgentPeer, cable: socket.socket) -> None:
        self.peer = peer
        self._cable = cable

    def cut(self) -> None:
        """Nothing goes through any more, in the middle of whatever did; neither side has closed it."""
        with contextlib.suppress(OSError):
            self._cable.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        self._cable.close()
        await self.peer.aclose()


class _Play:
    """The story, once."""

    def __init__(self, teller: _Teller, plan: Plan, place: Path, pace: float) -> None:
        self._teller = teller
        self._plan = plan
        self._place = place
        self._pace = pace
        self._journal = place / "journal"
        self._secret = secrets.token_urlsafe(16)
        self._witness = Witness()
        self._numbers: list[int] = []
        self._history = 0
        self._agent: _Agent | None = None
        self._links: list[_Link] = []

    async def play(self) -> Proof:
        """All of it; the agent and its folder are gone at the end, whatever happens."""
        try:
            stop_reason = await self._converse()
        finally:
            for link in self._links:
                await link.aclose()
            if self._agent is not None:
                await self._agent.end()
        proof = await self._prove(stop_reason)
        self._teller.verdict(proof, self._history)
        return proof

    async def _converse(self) -> str:
        teller, plan = self._teller, self._plan
        teller.begin("Antiphon demo: a conversation survives a cut link and a killed agent")
        agent = await self._start()
        teller.step(
            "started",
            "An agent starts, a process of its own. What its sessions tell, it keeps in a journal.",
            f"agent    process {agent.pid}, listening at {agent.address}",
            f"journal  {self._journal}; every record in it has a number, its offset",
            pid=agent.pid,
            address=agent.address,
            journal=str(self._journal),
        )
        link = await self._connect()
        session = await link.peer.new_session(cwd=str(self._place))
        mark = await session.reattach(capability=self._secret)
        self._history = mark
        teller.step(
            "attached",
            f"A client opens a session, attaches to its records, and asks: count to {plan.to}.",
            session_id=session.session_id,
            history=mark,
        )
        agent.allow(plan.cut + _AHEAD)
        async with session.prompt(f"Count to {plan.to}.") as turn:
            while True:
                try:
                    async for update in turn:
                        self._saw(update.text)
                        last = self._numbers[-1] if self._numbers else 0
                        if last >= plan.cut and len(self._links) == 1:
                            link.cut()
                        if last >= plan.kill and len(self._links) == 2 and agent is self._agent:
                            await agent.kill()
                    break
                except ConnectionClosed:
                    if len(self._links) == 1:
                        await self._come_back(session, agent)
                    else:
                        await self._after_the_kill(session, agent)
        return await self._go_on(session, str(turn.stop_reason))

    def _saw(self, text: str) -> None:
        for word in re.findall(r"\d+", text):
            self._numbers.append(int(word))
            self._teller.number(int(word))

    async def _come_back(self, session: Session, agent: _Agent) -> None:
        teller, held = self._teller, session.offset
        teller.step(
            "cut",
            f"The link is cut. The client holds the records up to offset {held}.",
            held=held,
        )
        agent.allow(self._plan.away)
        there = await self._journal_reaches(session.session_id, self._plan.away)
        teller.step(
            "away",
            f"Nobody listens, and the agent goes on: its journal is at offset {there} by now.",
            held=held,
            journal=there,
        )
        mark = await self._reattach(session)
        teller.step(
            "reattached",
            f"The client connects again and asks for what follows offset {held}.",
            f"{_records(held, mark)} from the journal, and from there on it is live; the same loop",
            "goes on:",
            held=held,
            history=mark - held,
            mark=mark,
        )
        agent.allow(self._plan.kill + _AHEAD)

    async def _after_the_kill(self, session: Session, agent: _Agent) -> None:
        teller, held = self._teller, session.offset
        teller.step(
            "killed",
            f"The agent is killed (SIGKILL), in the middle of its turn; the client holds offset {held}.",
            pid=agent.pid,
            held=held,
        )
        again = await self._start()
        again.allow(self._plan.to)
        teller.step(
            "restarted",
            f"The agent starts again with the same journal: process {again.pid}.",
            pid=again.pid,
        )
        mark = await self._reattach(session)
        teller.step(
            "reattached",
            f"The client connects again and asks for what follows offset {held}.",
            f"{_records(held, mark)} from the journal, at its end that the turn is orphaned: whoever",
            "worked on it is gone, so it is over, and nobody waits for ever",
            held=held,
            history=mark - held,
            mark=mark,
        )

    async def _go_on(self, session: Session, stop_reason: str) -> str:
        self._teller.step(
            "prompted",
            f"The turn has ended ({stop_reason}). The client asks: go on.",
            "The agent reads in its journal how far it came:",
            stop_reason=stop_reason,
        )
        async with session.prompt("Go on.") as turn:
            async for update in turn:
                self._saw(update.text)
        self._teller.step(
            "ended",
            f"The turn ends: {turn.stop_reason}, at offset {session.offset}.",
            stop_reason=turn.stop_reason,
            held=session.offset,
        )
        return str(turn.stop_reason)

    async def _prove(self, stop_reason: str) -> Proof:
        """Look into the journal on disk, now that the agent is gone."""
        journal = SqliteJournal(self._journal, read_only=True)
        try:
            (session,) = await journal.sessions()
            log = await journal.open(session.session_id)
            records = await log.read(1, session.records)
            damages = [damage.reason for damage in await journal.verify()]
        finally:
            await journal.aclose()
        return prove(
            records,
            self._witness,
            self._numbers,
            self._plan,
            stop_reason=stop_reason,
            damages=damages,
        )

    # -- processes and links

    async def _start(self) -> _Agent:
        plan = self._plan
        path = str(self._place / "agent.sock")
        unix = sys.platform != "win32" and len(os.fsencode(path)) <= _SOCKET_PATH
        words = [
            *("--journal", str(self._journal)),
            *("--to", str(plan.to)),
            *("--pace", str(self._pace)),
            *(("--listen", path) if unix else ()),
        ]
        log = self._place / "agent.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *module_command("antiphon.cli._demo_durable", *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._agent = _Agent(process, "")
        process.stdin.write(f"{self._secret}\n".encode())
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            raise StartError("the agent of the demo did not start", stderr_tail=tail)
        self._agent.address = address
        return self._agent

    async def _connect(self) -> _Link:
        assert self._agent is not None
        match parse_address(self._agent.address):
            case UnixAddress(path=path):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(path)
            case TcpAddress(host=host, port=port):
                sock = socket.create_connection((host, port))
        cable = sock.dup()
        try:
            peer = await connect(SocketTransport(sock, accepted=False), record=self._witness)
        except BaseException:
            cable.close()
            raise
        link = _Link(peer, cable)
        self._links.append(link)
        return link

    async def _reattach(self, session: Session) -> int:
        """Connect anew and attach behind what is held; the journal's mark, up to which it is history."""
        held = session.offset
        link = await self._connect()
        mark = await session.reattach(link.peer, capability=self._secret)
        self._history += mark - held
        return mark

    async def _journal_reaches(self, session_id: str, number: int) -> int:
        """Wait until the agent has said a number, as somebody who only looks at the disk sees it."""
        journal = SqliteJournal(self._journal, read_only=True)
        try:
            async with contextlib.aclosing(_followed(journal, session_id)) as records:
                async for record in records:
                    if f'"{number} "'.encode() in record.payload:
                        return record.offset
            raise ConnectionClosed("the session is gone from the journal")
        finally:
            await journal.aclose()


def _records(held: int, mark: int) -> str:
    if mark == held + 1:
        return f"record {mark} comes"
    return f"records {held + 1} to {mark} come" if mark > held else "nothing comes"


async def _followed(journal: SqliteJournal, session_id: str) -> AsyncGenerator[Record]:
    async with contextlib.aclosing(journal.follow(session_id)) as runs:
        async for run in runs:
            for record in run:
                yield record
