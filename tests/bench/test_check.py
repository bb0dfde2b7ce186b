"""What CI fails on: a row far above what is on record, twice."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest
from bench import check as program
from bench.check import ALL, GROSS, check, judge, main, ratios_of, read_recorded, recorded_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.ratios import Samples


def samples_of(**ratios: float) -> Samples:
    return {
        row: {"ts-sdk": [{"cpu_us": 10.0}], "antiphon": [{"cpu_us": 10.0 * ratio}]}
        for row, ratio in ratios.items()
    }


class Runs:
    """Stands for run.py: gives one answer after the other, and keeps what it was asked."""

    def __init__(self, *answers: Samples) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> Samples:
        self.asked.append(list(arguments))
        return self.answers.pop(0)


def test_ratios_are_by_cpu_and_the_durable_agent_has_a_row_of_its_own() -> None:
    found = ratios_of(
        {
            "agent/stream-32": {
                "ts-sdk": [{"cpu_us": 10.0}],
                "antiphon": [{"cpu_us": 1.0}],
                "antiphon-durable": [{"cpu_us": 4.0}],
            },
            "import": {"ts-sdk": [{"cpu_ms": 100.0}], "antiphon": [{"cpu_ms": 20.0}]},
            "agent/tools": {"ts-sdk": [], "antiphon": [{"cpu_us": 1.0}]},
        }
    )

    assert {row: round(ratio, 3) for row, ratio in found.items()} == {
        "agent/stream-32": 0.1,
        "agent/stream-32, durable": 0.4,
        "import": 0.2,
    }


def test_only_a_gross_loss_is_wrong() -> None:
    verdicts = judge({"a": 0.15, "b": 0.1501, "c": 9.0}, {"a": 0.1, "b": 0.1})

    assert GROSS == 1.5
    assert [verdict.ok for verdict in verdicts] == [True, False, True]
    assert "over 1.5 times" in str(verdicts[1])
    assert "not on record" in str(verdicts[2])


def test_a_row_that_was_slow_once_is_measured_again_and_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = Runs(samples_of(a=0.1, b=0.4), samples_of(b=0.12))

    assert check({"a": 0.1, "b": 0.1}, runs) == 0

    assert runs.asked == [["--only", *ALL], ["--only", "b"]]
    assert "WRONG" not in capsys.readouterr().out


def test_a_row_that_was_slow_twice_fails(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(samples_of(a=0.1, b=0.4), samples_of(b=0.3))

    assert check({"a": 0.1, "b": 0.1}, runs) == 1

    assert "WRONG: b costs more than 1.5 times what is on record, twice\n" in (
        capsys.readouterr().out
    )


def test_a_row_that_was_slow_and_then_failed_altogether_fails() -> None:
    assert check({"a": 0.1}, Runs(samples_of(a=0.4), {})) == 1


def test_a_row_on_record_that_was_not_measured_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert check({"a": 0.1, "b": 0.1}, Runs(samples_of(a=0.1))) == 1
    assert "WRONG: b was not measured\n" in capsys.readouterr().out

    # Nobody asked for it here.
    assert check({"a": 0.1, "b": 0.1}, Runs(samples_of(a=0.1)), ["a"]) == 0


def test_what_is_recorded_is_read_again_and_other_versions_stay() -> None:
    first = recorded_text("", "3.13", "one", {"agent/stream-32": 0.07})
    both = recorded_text(first, "3.11", 'two "quoted"', {"import": 0.1234})

    assert tomllib.loads(both) == {
        "3.11": {"machine": 'two "quoted"', "ratios": {"import": 0.123}},
        "3.13": {"machine": "one", "ratios": {"agent/stream-32": 0.07}},
    }
    assert both == recorded_text(both, "3.13", "one", {"agent/stream-32": 0.07})


def test_a_version_that_is_not_on_record_is_held_against_the_newest_that_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recorded.toml"
    with pytest.raises(ValueError, match="make bench-record"):
        read_recorded("3.11", path)
    text = recorded_text("", "3.13", "one", {"a": 0.2})
    path.write_text(recorded_text(text, "3.11", "two", {"a": 0.1}), encoding="utf-8")

    assert read_recorded("3.11", path) == ("two", {"a": 0.1})
    assert read_recorded("3.12", path) == ("one", {"a": 0.2})


def test_the_record_is_written_by_a_run_and_then_held_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "RECORDED", tmp_path / "recorded.toml")
    monkeypatch.setattr(program, "measured", Runs(samples_of(a=0.1), samples_of(a=0.12)))

    assert main(["--record"]) == 0
    assert main([]) == 0

    assert "recorded 0.100   ok" in capsys.readouterr().out


def test_what_is_on_record_covers_what_is_measured() -> None:
    machine, ratios = read_recorded("3.11")

    assert "CPUs" in machine
    assert {row.partition("/")[0] for row in ratios} == {*ALL}
    assert "agent/stream-32, durable" in ratios
    assert all(0 < ratio < 1 for ratio in ratios.values())
