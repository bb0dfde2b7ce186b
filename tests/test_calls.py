"""The generated call classes: delegation, and what importing them loads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from antiphon._calls import AgentCalls, ClientCalls
from antiphon.schema import UNSET, v1, v1_unstable


class Recorder(AgentCalls):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def _request(self, params: Any, timeout: Any) -> Any:
        self.seen.append((params, timeout))
        return v1_unstable.ListSessionsResponse(sessions=[])

    async def _notify(self, params: Any) -> None:
        self.seen.append(params)


async def test_calls_hand_over_params_and_timeout() -> None:
    peer = Recorder()
    listing, cancel = v1.ListSessionsRequest(), v1.CancelNotification(session_id="s")

    answer = await peer.request(listing)
    await peer.request(listing, timeout=None)
    await peer.request(listing, timeout=1.5)
    await peer.notify(cancel)

    assert answer.sessions == []
    assert peer.seen == [(listing, UNSET), (listing, None), (listing, 1.5), cancel]


async def test_calls_do_nothing_by_themselves() -> None:
    with pytest.raises(NotImplementedError):
        await AgentCalls().request(v1.ListSessionsRequest())
    with pytest.raises(NotImplementedError):
        await ClientCalls().notify(v1.CompleteElicitationNotification(elicitation_id="e"))


def test_import_loads_no_version_and_no_event_loop() -> None:
    code = (
        "import sys, antiphon._calls\n"
        "print([n for n in sys.modules if n == 'asyncio' or n.startswith('antiphon.schema.')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    assert run.stdout.strip() == "[]", run.stderr
