"""Prints the seed of a run's random programs, so that a run that failed, or hung, can be repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interleavings.driver import Seed

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

_KEY = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> Seed:
    """One for the whole run, another in each."""
    made = Seed()
    pytestconfig.stash.setdefault(_KEY, []).append(f"interleavings: ANTIPHON_SEED={made.base}")
    return made


@pytest.fixture
def say(pytestconfig: pytest.Config) -> object:
    """Adds a line to what is printed at the end of the run."""
    return pytestconfig.stash.setdefault(_KEY, []).append


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_KEY, list[str]()):
        terminalreporter.write_line(line)
