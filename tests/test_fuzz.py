"""The fuzz targets over their corpus, and the machine that runs them: does it find what is there?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from fuzz import run, targets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = [
    pytest.param(target, data, id=f"{target}-{number}")
    for target in targets.NAMES
    for number, data in enumerate(run.corpus_of(target))
]


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {path.name for path in run.CORPUS.iterdir()} == set(targets.NAMES)
    assert {path.stem for path in (run.ROOT / "fuzz" / "targets").glob("[a-z]*.py")} == set(
        targets.NAMES
    )
    assert all(len(run.corpus_of(target)) >= 3 for target in targets.NAMES)


@pytest.mark.parametrize(("target", "data"), CASES)
def test_no_case_of_the_corpus_breaks_a_law(target: str, data: bytes) -> None:
    run.run(target, targets.load(target), data)


@pytest.mark.parametrize("target", targets.NAMES)
def test_no_case_near_the_corpus_breaks_a_law(target: str) -> None:
    report = run.fuzz(target, 60, seed=1, most=400)  # the same ones in each run

    assert report.executions == 400
    assert report.lines > 5
    assert str(report).startswith(f"{target}: 400 executions")


GROWTHS = {
    "brackets": b"[",
    "members": b'{"id":1,',
    "quotes": b'"',
    "backslashes": b"\\",
    "surrogates": b"\\ud800",
    "spaces": b" ",
    "carriage returns": b"\r",
    "not UTF-8": b"\xff",
    "updates": b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"x"}}\n',
}


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("target", targets.NAMES)
def test_eight_times_the_bytes_take_about_eight_times_as_long(target: str, growth: str) -> None:
    check, piece = targets.load(target), GROWTHS[growth]

    def seconds(count: int) -> float:
        data = b'0{"a":"' + piece * count + b'"}'
        taken: list[float] = []
        for _ in range(3):
            begin = time.process_time()
            check(data)
            taken.append(time.process_time() - begin)
        return min(taken)

    # Quadratic time would be 64 times as long; a machine that is busy is not.
    assert seconds(8000) <= max(0.03, 32 * seconds(1000))


# ------------------------------------------------------------------ the machine itself


def broken(data: bytes) -> None:
    assert b'"method"' not in data or b"\xff" not in data, "both together"


def test_a_fault_is_found_made_short_and_told() -> None:
    with pytest.raises(run.Found) as caught:
        run.fuzz("envelope", 60, seed=1, check=broken)

    found = caught.value
    assert set(found.data) == set(b'"method"\xff')
    assert len(found.data) == len(b'"method"\xff')
    assert "both together" in str(found)


def test_a_case_that_takes_too_long_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.too_slow(1.2, 100)
    assert not run.too_slow(1.2, 100_000)

    def slow(seconds: float, size: int) -> bool:
        return size == 3

    monkeypatch.setattr(run, "too_slow", slow)

    with pytest.raises(run.Found, match=r"TimeoutError: .* for 3 bytes"):
        run.run("scan", lambda data: None, b"abc")


def test_the_lines_that_run_are_seen_and_only_while_they_are_watched() -> None:
    check = targets.load("scan")
    with run.Lines() as before:
        check(b'"\\ud800"')
    with run.Lines() as lines:
        check(b'"\\ud800"')
    assert lines.seen == before.seen, "each watch begins anew"
    seen = len(lines.seen)
    check(b"[" * 200)

    assert any(name.endswith("_scan.py") for name, _ in lines.seen)
    assert len(lines.seen) == seen


def test_the_command_keeps_what_it_found_and_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "KEPT", tmp_path)

    def load(name: str) -> Callable[[bytes], None]:
        return broken

    monkeypatch.setattr(targets, "load", load)

    assert run.main(["--target", "envelope", "--seconds", "60", "--seed", "1"]) == 1
    (kept,) = tmp_path.iterdir()
    told = capsys.readouterr().out
    assert "seed 1\n" in told
    assert f"make fuzz ARGS='--target envelope --input {kept}'" in told
    with pytest.raises(run.Found):
        run.main(["--target", "envelope", "--input", str(kept)])


def test_the_command_tells_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--target", "scan", "--seconds", "0.05", "--seed", "3"]) == 0

    assert "executions" in capsys.readouterr().out
