"""Fails a test in which an event is emitted that only a mistake of ours can cause.

Those are the events of kind "invariant", and a `delivery` that fails. A test that plays such a mistake
says so: `@pytest.mark.alarms("dup_reply")` names the events that it may cause.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.runtime import EVENTS

if TYPE_CHECKING:
    from collections.abc import Generator

_LOGGER = logging.getLogger("antiphon.telemetry")


class _Heard(logging.Handler):
    """Hears the one logger that has every event; alarms are errors there, which are never off."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        name: Any = vars(record).get("acp_event")
        if name is None:
            return
        if EVENTS[name].kind == "invariant" or vars(record)["acp_facts"].get("decision") == "fail":
            self.names.add(name)


@pytest.fixture(autouse=True)
def _no_alarm(request: pytest.FixtureRequest) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    heard = _Heard()
    _LOGGER.addHandler(heard)
    try:
        yield
    finally:
        _LOGGER.removeHandler(heard)
    marker = request.node.get_closest_marker("alarms")
    meant: set[str] = set() if marker is None else set(marker.args)
    # A dead control plays a mistake, and so may cause anything besides.
    control = getattr(request.node, "callspec", None)
    played = control is not None and control.params.get("control", "right") != "right"
    if heard.names - meant and not played:
        pytest.fail(f"alarms: {', '.join(sorted(heard.names - meant))}", pytrace=False)
