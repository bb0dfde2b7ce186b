"""The small broken module that the demo repairs: its text, the repair, and the proof.

Both sides of the demo rely on it: the agent recognises the folder by it, the command checks with it
that the work was real. Standard library only, so that the test runs wherever the command does.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "BROKEN",
    "FIXED",
    "MODULE",
    "TEST",
    "TEST_COMMAND",
    "TEST_MODULE",
    "is_fixed",
    "is_fixture",
    "passes",
    "write_fixture",
]

MODULE: Final = "leap.py"
TEST_MODULE: Final = "test_leap.py"

#: The faulty line stands alone, so that the repair is a diff of one line.
FAULTY_LINE: Final = "    return year % 4 == 0\n"
FIXED_LINE: Final = "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n"

BROKEN: Final = f'''\
"""Leap years of the Gregorian calendar."""


def is_leap(year: int) -> bool:
    """Tell whether `year` has a 29th of February."""
{FAULTY_LINE}'''
FIXED: Final = BROKEN.replace(FAULTY_LINE, FIXED_LINE)

TEST: Final = """\
import unittest

from leap import is_leap


class LeapYears(unittest.TestCase):
    def test_every_fourth_year(self):
        self.assertTrue(is_leap(2024))
        self.assertFalse(is_leap(2026))

    def test_full_centuries_are_common_years(self):
        self.assertFalse(is_leap(1900))

    def test_but_every_fourth_century_is_not(self):
        self.assertTrue(is_leap(2000))


if __name__ == "__main__":
    unittest.main()
"""

#: Without bytecode: a stale cache of the broken module could outlive the repair, which may leave
#: size and second of the file as they were.
TEST_COMMAND: Final = (sys.executable, "-B", TEST_MODULE)


def write_fixture(folder: Path) -> None:
    """Write the broken module and its failing test into `folder`."""
    (folder / MODULE).write_text(BROKEN, encoding="utf-8")
    (folder / TEST_MODULE).write_text(TEST, encoding="utf-8")


def is_fixture(folder: Path) -> bool:
    """Whether `folder` holds exactly the broken module and its test: nobody else's file counts."""
    try:
        return (folder / MODULE).read_text(encoding="utf-8") == BROKEN and (
            folder / TEST_MODULE
        ).read_text(encoding="utf-8") == TEST
    except (OSError, ValueError):
        return False


def is_fixed(folder: Path) -> bool:
    """Whether the module in `folder` is the repaired one."""
    try:
        return (folder / MODULE).read_text(encoding="utf-8") == FIXED
    except (OSError, ValueError):
        return False


def passes(folder: Path, *, timeout: float = 30.0) -> bool:
    """Run the test in `folder`, in a process of its own; False also if it cannot be run."""
    try:
        done = subprocess.run(
            TEST_COMMAND,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
