"""What every test gets: an event loop, a bound, and a look at what it left behind.

The parts live beside this file: `async_tests` runs coroutines and bounds every test, `leaks` fails a
test that leaves a process, descriptor, thread or temporary file, `no_skips` a run that skipped one
in CI, `signals` undoes what a run in the background inherits, and `alarms` fails a test in which we
were told of a mistake of our own. All are themselves tested, in `test_conftest_checks.py`.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = [
    "pytester",
    "tests.alarms",
    "tests.async_tests",
    "tests.leaks",
    "tests.no_skips",
    "tests.signals",
]

# No deadline per example: the machine may be busy, and each test has its bound already. In CI the
# examples are the same in every run, so that a red build can be repeated.
hypothesis.settings.register_profile(
    "antiphon", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("antiphon")

#: Folders of tests that wait for timers only, if at all: there time is virtual, so that a bound of
#: 50 ms is neither slow nor, on a busy machine, too short; and a wait that nothing can end fails at once.
VIRTUAL_TIME = {Path(__file__).parent / "runtime", Path(__file__).parent / "sessions"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, unless they choose their loops themselves."""
    for item in items:
        if item.path.parent in VIRTUAL_TIME and "loop_factory" not in getattr(
            item, "fixturenames", ()
        ):
            item.add_marker(pytest.mark.virtual_time)


def pytest_collection_finish() -> None:
    """Keep the modules and items of all tests from the collector of cycles: a third of a second each time."""
    gc.collect()
    gc.freeze()
