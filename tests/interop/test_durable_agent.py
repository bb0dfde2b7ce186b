"""Their clients, which know nothing of journals, with an agent of ours that has its sessions in one.

The agent is started three times: a session is made and prompted; listed, loaded and prompted; resumed and
prompted. The agent has no handler for any of that but prompts.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.interop.programs import THEIRS, durable_command

pytestmark = pytest.mark.interop

Json = dict[str, Any]
PATIENCE = 25


@pytest.fixture(scope="session", params=THEIRS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    folder = tmp_path_factory.mktemp("durable")
    done = subprocess.run(
        durable_command(request.param, folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs: list[Json] = json.loads(done.stdout)
    return runs


def shown(run: Json) -> list[str]:
    return sorted(
        f"{update['sessionUpdate']} {update.get('content', {}).get('text') or ''}".strip()
        if update["sessionUpdate"].endswith("chunk")
        else update["sessionUpdate"]
        for update in run["updates"]
    )


TURN = ["tool_call", "tool_call_update"]


def test_the_agent_offers_what_its_journal_serves(report: list[Json]) -> None:
    for run in report:
        capabilities = run["hello"]["agentCapabilities"]
        assert capabilities["loadSession"] is True
        assert {"list", "resume"} <= set(capabilities["sessionCapabilities"])


def test_a_turn_looks_as_without_a_journal(report: list[Json]) -> None:
    assert shown(report[0]) == sorted(["agent_message_chunk one, behind 0", *TURN])


def test_another_process_lists_the_session_and_loads_both_sides_of_it(report: list[Json]) -> None:
    result = report[1]["result"]

    assert [info["sessionId"] for info in result["listed"]] == [report[0]["result"]]
    assert result["loaded"]["modes"]["currentModeId"] == "code"
    assert shown(report[1]) == sorted(
        [
            "user_message_chunk one",
            "agent_message_chunk one, behind 0",
            *TURN,
            "current_mode_update",
            # The next turn, each of its updates once, and not what was typed here.
            "agent_message_chunk two, behind 5",
            *TURN,
        ]
    )


def test_a_resumed_session_shows_nothing_of_before(report: list[Json]) -> None:
    assert report[2]["result"]["resumed"]["modes"]["currentModeId"] == "code"
    assert shown(report[2]) == sorted(["agent_message_chunk three, behind 9", *TURN])
