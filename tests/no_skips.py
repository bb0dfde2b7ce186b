"""In CI (`CI=true`) a skipped test fails the run: a tool that is missing there is a broken machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter


def _skipped(config: pytest.Config) -> int:
    reporter: TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", ())) if reporter and os.environ.get("CI") else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip counts as a failure, whole modules included."""
    green = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if session.exitstatus in green and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Say so, above the closing line."""
    if count := _skipped(config):
        terminalreporter.write_line(f"FAILED: {count} skipped, and nothing may be in CI", red=True)
