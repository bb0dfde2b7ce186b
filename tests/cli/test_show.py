from __future__ import annotations

import io
import os
import sys

import pytest

from antiphon.cli._ask import PlainAsker
from antiphon.cli._output import Output
from antiphon.cli._plain import Plain, Quiet
from antiphon.cli._show import choose_asker, choose_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not as a fixture: pytest puts its own streams there once more before the test itself.
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())


def test_a_person_on_a_terminal_gets_what_is_pleasant(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)

    assert type(choose_display(Output(), cwd="/")).__name__ == "Pleasant"
    assert type(choose_asker()).__name__ == "PleasantAsker"


@pytest.mark.parametrize("missing", ["rich", "rich.live", "prompt_toolkit"])
def test_without_the_extra_everything_is_there_in_plain_text(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.delitem(sys.modules, "antiphon.cli._pleasant", raising=False)
    package = missing.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    assert type(choose_display(Output(), cwd="/")) is Plain
    assert type(choose_asker()) is PlainAsker


def test_a_pipe_a_dumb_terminal_and_a_closed_stream_get_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert type(choose_display(Output(), cwd="/")) is Plain
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(choose_display(Output(), cwd="/")) is Plain
    assert type(choose_asker()) is PlainAsker
    monkeypatch.setattr(sys, "stderr", None)
    assert type(choose_display(Output(), cwd="/")) is Plain


def test_a_reader_of_the_text_may_write_to_the_terminal_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_terminal(monkeypatch)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w", encoding="utf-8") as piped:
        monkeypatch.setattr(sys, "stdout", piped)
        display = choose_display(Output(), cwd="/")
        assert type(display) is Plain

        # As after `| tee`: each line begins on a line of its own.
        display.message("text")
        display.note("noted")

    assert isinstance(sys.stderr, Terminal)
    assert sys.stderr.getvalue() == "\nnoted\n"


def test_json_gets_no_display_but_questions() -> None:
    assert type(choose_display(Output(), cwd="/", quiet=True)) is Quiet
