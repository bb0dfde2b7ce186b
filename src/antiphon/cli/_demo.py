"""`antiphon demo`: a whole turn between two real processes, and a proof that its work was real.

The turn is `_turn`'s, the agent `_demo_agent`; here are the workspace, the automatic "yes" (it is our
own workspace) and the proof: the repaired file is read and its test run once more, by this process.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.cli import _demo_fixture as fixture
from antiphon.cli._output import Output
from antiphon.cli._prompt import demo_agent_command, folder
from antiphon.schema import v1_unstable as v1

if TYPE_CHECKING:
    import argparse

    from antiphon import Update
    from antiphon.cli._outcome import Outcome

__all__ = ["run"]

PROMPT = (
    f"The test in {fixture.TEST_MODULE} fails. Find out why, repair it and show me that it passes."
)


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 only if the turn ended with `end_turn` and the repaired test passes."""
    if options.cwd is not None:
        return _play(options, folder(options.cwd))
    workspace = Path(tempfile.mkdtemp(prefix="antiphon-workspace-")).resolve()
    try:
        fixture.write_fixture(workspace)
        return _play(options, str(workspace))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _play(options: argparse.Namespace, cwd: str) -> int:
    from antiphon.cli._decide import Decider
    from antiphon.cli._show import choose_display
    from antiphon.cli._turn import Job, Run, report
    from antiphon.cli._view import View
    from antiphon.services import Permissions

    output = Output()
    display = choose_display(output, cwd=cwd, quiet=options.json, on_stdout=True)
    view = View(display)
    # Our own agent in our own workspace.
    yes = Permissions(default="allow")
    decider = Decider(yes, view, None, reason="the demo says yes by itself")
    proof = _Proof()
    job = Job(
        # A script has nobody to be pleasant to.
        argv=demo_agent_command(*(["--pace", "0"] if options.json else [])),
        cwd=cwd,
        text=PROMPT,
        started=options.started,
        timeout=options.timeout,
        as_json=options.json,
    )
    try:
        display.begin(
            title="Antiphon demo: an agent and a client, two processes, one real turn",
            facts=(("agent", "antiphon demo-agent"), ("folder", cwd), ("prompt", PROMPT)),
        )
        outcome = Run(
            job,
            output=output,
            view=view,
            decider=decider,
            afterwards=proof.look,
            on_update=proof.watch,
        ).play()
        outcome.proven = proof.passed and outcome.permissions == 1
        outcome.extra = {"test_passed": proof.passed, "file": proof.file}
        if outcome.failure is None:
            display.end(_summary(outcome, proof))
    finally:
        display.close()
    return report(outcome, output=output, as_json=options.json, with_text=False)


class _Proof:
    """Looks for the file that the agent says it changed, and runs the test beside it."""

    def __init__(self) -> None:
        self.file: str | None = None
        self.passed = False

    def watch(self, update: Update) -> None:
        """Take the path from the tool call's diff: the agent may work in a folder of its own."""
        match update.value:
            case v1.ToolCall(content=list(content)) | v1.ToolCallUpdate(content=list(content)):
                for item in content:
                    if isinstance(item, v1.Diff) and Path(item.path).name == fixture.MODULE:
                        self.file = item.path
            case _:
                pass

    async def look(self, outcome: Outcome) -> None:
        """Read the file and run the test again, while the agent (and its folder) is still there."""
        if self.file is None or outcome.stop_reason != "end_turn":
            return
        place = Path(self.file).parent
        self.passed = fixture.is_fixed(place) and await asyncio.to_thread(fixture.passes, place)


def _summary(outcome: Outcome, proof: _Proof) -> list[tuple[bool | None, str]]:
    requests = f"{outcome.permissions} permission request{'s' * (outcome.permissions != 1)}"
    return [
        (
            outcome.stop_reason == "end_turn",
            f"{outcome.stop_reason} after {outcome.updates} updates and {requests}",
        ),
        (
            proof.passed,
            f"{fixture.TEST_MODULE} passes with the repaired {fixture.MODULE}, run once more by "
            "the client"
            if proof.passed
            else f"{fixture.TEST_MODULE} does not pass",
        ),
    ]
