"""`python -m antiphon`; what it does is tested with the modules of `cli`."""

from __future__ import annotations

import runpy
import sys

import pytest

from antiphon import __version__


def test_module_runs_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["antiphon", "--version"])

    with pytest.raises(SystemExit) as leaving:
        runpy.run_module("antiphon", run_name="__main__")

    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"antiphon {__version__}\n"
