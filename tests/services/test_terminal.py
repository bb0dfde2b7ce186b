"""The end of a command's output wherever it is cut, and the names of signals.

A terminal's life is tried with real commands, in `test_terminals`.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services._terminal import OutputTail, signal_name


@settings(max_examples=200)
@given(
    pieces=st.lists(
        st.one_of(st.binary(max_size=6), st.text("a€😀é", max_size=6).map(str.encode)), max_size=12
    ),
    most=st.integers(0, 24),
)
def test_a_tail_is_the_end_of_the_whole_wherever_it_is_cut(pieces: list[bytes], most: int) -> None:
    tail = OutputTail(most)
    for piece in pieces:
        tail.add(piece)
        assert len(tail.text().encode()) <= most
    tail.end()
    tail.end()
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert whole.endswith(tail.text())
    assert tail.truncated == (len(whole.encode()) > most)
    if tail.truncated:
        longer = whole[len(whole) - len(tail.text()) - 1 :]
        assert len(longer.encode()) > most
    else:
        assert tail.text() == whole


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (9, "SIGKILL"),
        (int(signal.SIGTERM), "SIGTERM"),
        (int(signal.SIGRTMIN) + 2, "SIGRTMIN+2"),
        (33, "SIG33"),
    ],
)
def test_signals_have_the_names_of_the_system(number: int, name: str) -> None:
    assert signal_name(number) == name
