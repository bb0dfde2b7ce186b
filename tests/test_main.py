"""`python -m antiphon`; what it does is tested with the modules of `cli`."""

from __future__ import annotations

import subprocess
import sys

from antiphon import __version__


def test_module_runs_the_command() -> None:
    # A process of its own: pytest loads what has a plugin for it in a way that `runpy` does not know.
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", "--version"], capture_output=True, text=True, timeout=20
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, f"antiphon {__version__}\n", "")
