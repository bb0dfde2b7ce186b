"""Links and directories change places in other processes while an agent reads, writes and starts.

`ANTIPHON_ATTACK_SECONDS` says how long: by default 60 in CI, 5 elsewhere. Naive controls lose the
same attack before it and after it, so that it is known to work, and to have worked to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.attacks.attacker import KINDS
from tests.attacks.swaps import (
    SECRET,
    WRITTEN,
    Attackers,
    naive_create,
    naive_read,
    naive_start,
    naive_write,
    outside,
    parent_by_the_system,
    plant,
)

from antiphon._errors import RequestError
from antiphon.schema import v1_unstable
from antiphon.services import Files, Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS: Final = float(
    os.environ.get("ANTIPHON_ATTACK_SECONDS") or (60 if os.environ.get("CI") else 5)
)
#: In which each control must have lost; it takes some hundred tries.
CONTROL_SECONDS: Final = 60.0

READS: Final = (
    "r/w/xd/f",
    "r/w/xd/sub/f",
    "r/w/xd/large",
    "r/w/xl/f",
    "r/w/xf",
    "r/w/xg",
    "r/w/n/d/f",
    "r/w/n/d/sub/../f",
    "r/w/pd/f",
    "r/w/pd/large",
    "r/w/pf",
    "r/w/m/i/../secret",
    "r/w/m/i/../../secret",
    "r/w/m/i/sub/../../secret",
    "q/w/f",
    "q/w/../w/f",
)
WRITES: Final = (
    "r/w/xd/f",
    "r/w/xd/made",
    "r/w/xd/new/f",
    "r/w/xf",
    "r/w/xg",
    "r/w/n/d/f",
    "r/w/pd/f",
    "r/w/pd/made",
    "r/w/pf",
    "r/w/p/new/f",
    "r/w/p/new/sub/f",
    "r/w/half/f",
    "q/w/f",
    "q/w/made",
)
CWDS: Final = ("r/w/xd", "r/w/xl", "r/w/xd/sub", "r/w/n/d", "r/w/pd", "r/w/pd/sub", "q/w")


class Ctx:
    """The session that is attacked."""

    session_id = "s"
    roots = ()


class Agent:
    """Asks as an agent does, over and over, and counts what it gets."""

    def __init__(self, base: Path) -> None:
        roots = (base / "r" / "w", base / "q" / "w")
        self.seen: Counter[str] = Counter()
        self.escapes: list[str] = []
        self._base = base
        self._files = Files(*roots)
        self._terminals = Terminals(*roots)
        # What is outside when nobody is at work; nothing that is made there later is missing
        # from the comparison at the end.
        self._outside = {base.stat().st_ino} | {
            Path(folder).stat().st_ino for folder, _, _ in os.walk(base / "out")
        }

    async def read(self, path: str) -> None:
        params = v1_unstable.ReadTextFileRequest(session_id="s", path=f"{self._base}/{path}")
        text = (await self._files.read_text_file(params, Ctx())).content
        if SECRET in text:
            self.escapes.append(f"read {path}")

    async def write(self, path: str) -> None:
        params = v1_unstable.WriteTextFileRequest(
            session_id="s", path=f"{self._base}/{path}", content=WRITTEN
        )
        await self._files.write_text_file(params, Ctx())

    async def start(self, path: str) -> None:
        created = await self._terminals.create_terminal(
            v1_unstable.CreateTerminalRequest(
                session_id="s", command="ls", args=["-di", "."], cwd=f"{self._base}/{path}"
            ),
            Ctx(),
        )
        term = created.terminal_id
        await self._terminals.wait_for_terminal_exit(
            v1_unstable.WaitForTerminalExitRequest(session_id="s", terminal_id=term), Ctx()
        )
        said = await self._terminals.terminal_output(
            v1_unstable.TerminalOutputRequest(session_id="s", terminal_id=term), Ctx()
        )
        await self._terminals.release_terminal(
            v1_unstable.ReleaseTerminalRequest(session_id="s", terminal_id=term), Ctx()
        )
        if int(said.output.split()[0]) in self._outside:
            self.escapes.append(f"cwd {path}")

    async def ask(self, what: str, path: str) -> None:
        """One call, counted by how it ended."""
        doing = {"read": self.read, "write": self.write, "cwd": self.start}[what]
        try:
            await doing(path)
        except RequestError as error:
            self.seen[f"{what} refused"] += 1
            # An answer must not carry anything of what is outside either.
            if SECRET in str(error.data) or f"{self._base}/out" in str(error.data):
                self.escapes.append(f"{what} {path}: {error.data}")
        else:
            self.seen[f"{what} done"] += 1

    async def aclose(self) -> None:
        await self._terminals.aclose()


def lost(attempt: Callable[[], bool], times: int) -> int:
    """Try until it has lost so often, or for too long; how often it has lost."""
    count = 0
    until = time.monotonic() + CONTROL_SECONDS
    while count < times and time.monotonic() < until:
        with contextlib.suppress(OSError):
            count += attempt()
    return count


def controls(base: Path) -> dict[str, Callable[[], bool]]:
    root = f"{base}/r/w"
    reads = itertools.cycle([f"{root}/{name}" for name in ("xd/f", "xf", "pd/f", "pf")])
    writes = itertools.cycle([f"{root}/{name}" for name in ("xd/f", "xf", "pd/f", "pf")])
    cwds = itertools.cycle([f"{root}/{name}" for name in ("xd", "pd")])
    targets = [base / "out" / "f", base / "out" / "secret"]
    out = (base / "out").stat().st_ino

    def write() -> bool:
        naive_write(root, next(writes))
        hit = [target for target in targets if target.read_text() != SECRET]
        for target in hit:
            target.write_text(SECRET)
        return bool(hit)

    def create() -> bool:
        naive_create(root, f"{root}/p/new/created")
        made = (base / "out" / "created").exists()
        (base / "out" / "created").unlink(missing_ok=True)
        return made

    def start() -> bool:
        return naive_start(root, next(cwds)) == out

    return {
        "read": lambda: SECRET in naive_read(root, next(reads)),
        "write": write,
        "create": create,
        "cwd": start,
        "parent": lambda: SECRET in parent_by_the_system(root, ["m", "i", "..", "secret"]),
    }


@pytest.mark.covers("FF-42")
@pytest.mark.bound(SECONDS + 500)
async def test_nothing_escapes_while_links_and_directories_change_places(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    plant(base)
    agent = Agent(base)
    naive = controls(base)
    with Attackers(base) as attackers:
        # One is enough where the attacker has to be faster twice.
        before = {
            name: lost(attempt, 1 if name == "create" else 3) for name, attempt in naive.items()
        }
        assert all(before.values()), f"the attack fails against naive controls: {before}"

        untouched = outside(base)
        until = time.monotonic() + SECONDS
        asked = [
            # A start takes much longer than the others.
            *[("read", path) for path in READS] * 10,
            *[("write", path) for path in WRITES] * 10,
            *(("cwd", path) for path in (CWDS if sys.platform == "linux" else ())),
        ]
        while time.monotonic() < until:
            # All at once: windows of large files and starts wait while others go on.
            await asyncio.gather(*(agent.ask(what, path) for what, path in asked))
            assert not agent.escapes
            assert attackers.alive(), "an attacker has given up"
        assert outside(base) == untouched
        # Not the controls that write: what is outside is compared once more.
        after = {
            name: lost(attempt, 1)
            for name, attempt in naive.items()
            if name not in {"write", "create"}
        }
        assert all(after.values()), f"the attack had ended before the test: {after}"
    await agent.aclose()

    assert outside(base) == untouched
    assert set(attackers.rounds) == set(KINDS)
    for what in ("read", "write", "cwd") if sys.platform == "linux" else ("read", "write"):
        assert agent.seen[f"{what} done"], f"no {what} ever succeeded: {agent.seen}"
        assert agent.seen[f"{what} refused"], f"the attack never met a {what}: {agent.seen}"
    print(f"{SECONDS:g} s: {dict(agent.seen)}, against {attackers.rounds}; controls lost {before}")
