"""Gives the tests the signals that a person's terminal would give them.

A run in the background (`nohup`, a shell's `&`, some CI machines) inherits signals that are ignored,
and so would every process that a test starts: the tests that interrupt one would wait in vain.
"""

from __future__ import annotations

import signal
from typing import Any

DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}


def pytest_configure() -> None:
    """Undo what was inherited; a handler that somebody installed stays."""
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
