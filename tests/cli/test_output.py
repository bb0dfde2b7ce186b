from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from antiphon.cli._output import Output, as_line, harmless, readable, update_line


@pytest.mark.parametrize(
    "raw",
    [
        '{"sessionUpdate":"x","n":1.50,"big":12345678901234567890,"u":"é","e":"\\ud83d"}',
        '{ "sessionUpdate" : "x" , "_meta" : {"a" : [ ] } }',
    ],
)
def test_update_line_holds_the_bytes_of_the_update(raw: str) -> None:
    assert update_line(raw.encode()) == b'{"type":"update","update":' + raw.encode() + b"}\n"


def test_update_line_is_one_line_for_every_reader_and_means_the_same() -> None:
    raw = '{"a":\r"x\u2028y\u2029z\u0085"}'

    line = update_line(raw.encode()).decode()

    assert line.splitlines() == [line.removesuffix("\n")]
    assert json.loads(line)["update"] == json.loads(raw)


def test_readable_text_cannot_talk_to_the_terminal() -> None:
    assert readable("a\x1b]0;t\x07b\tc\r\nd\re\x9b") == "a\ufffd]0;t\ufffdb\tc\nd\ufffde\ufffd"


def test_text_with_lone_surrogates_is_written_all_the_same(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    Output().text("a\ud83db")

    assert capfdbinary.readouterr().out == "a\ufffdb".encode()


def test_output_whose_reader_left_is_lost_quietly_and_reported_once() -> None:
    program = (
        "import sys\n"
        "from antiphon.cli._output import Output\n"
        "output = Output(lambda: print('lost', file=sys.stderr))\n"
        "for _ in range(3): output.write(b'x' * 100)\n"
        "assert output.lost\n"
    )
    reading, writing = os.pipe()
    os.close(reading)

    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, timeout=20
        )
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (0, b"lost\n")


def test_output_that_was_never_there_is_lost_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    output = Output()
    output.text("x")

    assert output.lost


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\r\nc\rd\u2028e\x85f", "a⏎b⏎c⏎d⏎e⏎f"),
        ("a\u202eb\u2066c\u200bd", "a\ufffdb\ufffdc\ufffdd"),
        ("a\u00adb\ufeff\U000e0041", "a\ufffdb\ufffd\ufffd"),
        ("\x1b[2J", "\ufffd[2J"),
        ("naïve 👩\u200d💻 שלום", "naïve 👩\u200d💻 שלום"),
    ],
)
def test_a_line_is_one_line_in_the_order_it_has(text: str, line: str) -> None:
    assert as_line(text) == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\ufffd[2Jb"),
        ("a\u202eb\u200bc\u2066", "a\ufffdb\ufffdc\ufffd"),
        ("x" * 20, "x" * 10 + "…"),
        ("שלום 👩\u200d💻", "שלום 👩\u200d💻"),
        ("\ufeffa\u00adb", "\ufffda\ufffdb"),
    ],
)
def test_harmless_text(text: str, shown: str) -> None:
    assert harmless(text, 10) == shown
