"""The generated handler classes: defaults, and what importing them loads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from antiphon._errors import MethodNotFound
from antiphon._handlers import AgentHandlers, ClientHandlers
from antiphon.schema import v1, v1_unstable

NOBODY: Any = None


async def test_request_that_nobody_overrides_is_not_found_by_its_wire_name() -> None:
    handlers: tuple[tuple[str, Any], ...] = (
        ("agent", AgentHandlers()),
        ("client", ClientHandlers()),
    )
    asked = 0
    for side, handler in handlers:
        for row in v1_unstable.METHODS:
            if (
                row.kind == "request"
                and row.side in {side, "both"}
                and row.name != "session/prompt"
            ):
                with pytest.raises(MethodNotFound) as caught:
                    await getattr(handler, row.handler)(NOBODY, NOBODY)
                assert caught.value.data == row.name
                asked += 1

    assert asked > 30


async def test_notification_that_nobody_overrides_is_ignored() -> None:
    await AgentHandlers().cancel(v1.CancelNotification(session_id="s"), NOBODY)
    await ClientHandlers().session_update(NOBODY, NOBODY)


def test_import_loads_no_version_and_no_event_loop() -> None:
    code = (
        "import sys, antiphon._handlers\n"
        "print([n for n in sys.modules if n == 'asyncio' or n.startswith('antiphon.schema.')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    assert run.stdout.strip() == "[]", run.stderr
