"""Curves: their slopes, what is judged by them, and that each of them runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from bench import scaling as program
from bench.scaling import (
    CURVES,
    MARGIN,
    Curve,
    Point,
    Result,
    Spent,
    exponent_of,
    main,
    measured,
)

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = (10, 100, 1_000, 10_000)


def points_of(exponent: float, fixed: float = 0.0) -> list[Point]:
    each = [(fixed + n**exponent) / n for n in NUMBERS]
    return [Point(n, cost, cost) for n, cost in zip(NUMBERS, each, strict=True)]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.1, 2.0])
def test_a_slope_is_the_exponent_of_the_whole_cost(exponent: float) -> None:
    assert abs(exponent_of(points_of(exponent)) - exponent) < 1e-9


def test_what_costs_something_however_few_there_are_does_not_hide_a_square() -> None:
    # The lowest decade is all fixed cost: it is no part of the slope.
    assert exponent_of(points_of(1.0, fixed=100.0)) < 1.0
    assert exponent_of(points_of(2.0, fixed=100.0)) > 1.0 + MARGIN


def test_a_slope_takes_two_numbers() -> None:
    with pytest.raises(ValueError, match="two different numbers"):
        exponent_of([Point(5, 1.0, 1.0), Point(5, 2.0, 2.0)])


def once_of(exponent: float) -> Curve:
    async def once(number: int) -> Spent:
        return Spent(1e-6 * float(number**exponent))

    return Curve("made-up", "made up", "item", NUMBERS, once)


async def test_the_least_of_several_repetitions_counts() -> None:
    calls = [0]

    async def once(number: int) -> Spent:
        calls[0] += 1
        return Spent(number * (1e-3 if calls[0] % 2 else 5e-3))

    result = await measured(Curve("made-up", "", "item", (100, 1_000), once))

    assert [round(point.each) for point in result.points] == [1_000, 1_000]


async def test_the_collector_counts_unless_all_is_alive_at_once() -> None:
    async def once(number: int) -> Spent:
        collecting = 1e-6 * float(number**2)
        return Spent(1e-6 * number + collecting, collecting)

    part, whole = [
        await measured(Curve("made-up", "", "item", NUMBERS, once, alive=alive))
        for alive in (False, True)
    ]

    assert not part.ok
    assert whole.ok
    # What is shown is the whole cost.
    assert part.points[-1].each == whole.points[-1].each


async def test_a_curve_may_be_linear_and_not_more() -> None:
    linear, square = [await measured(once_of(exponent)) for exponent in (1.0, 2.0)]

    assert linear.ok
    assert not square.ok


def test_a_cost_that_must_not_depend_on_the_number_may_not_even_grow_slowly() -> None:
    curve = Curve("made-up", "", "", NUMBERS, once_of(1).once, 0)

    assert Result(curve, [], 0.1).ok
    assert not Result(curve, [], 0.5).ok


def test_a_curve_that_is_no_line_is_measured_again_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "CURVES", (once_of(1.0),))
    path = tmp_path / "scaling.json"
    arguments = ["--only", "made-up", "--json", str(path)]

    assert main(arguments) == 0
    told = json.loads(path.read_text("utf-8"))
    assert [curve["name"] for curve in told["curves"]] == ["made-up"]
    number, each, own = told["curves"][0]["points"][-1]
    assert (number, round(each, 6), own) == (10_000, 1.0, each)

    monkeypatch.setattr(program, "CURVES", (once_of(2.0),))
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "once more" in said
    assert "WRONG: made up grows with exponent 2.00\n" in said


@pytest.mark.bound(120)
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
async def test_each_curve_runs(curve: Curve) -> None:
    # Its own assertions count what came; how long it took says nothing here.
    assert (await curve.once(max(20, curve.numbers[0]))).cpu > 0
