"""A small run of `bench/stations.py`: every journey has its stations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bench.stations import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_small_run_goes_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stations.json"

    assert main(["--count", "300", "--repetitions", "1", "--json", str(path)]) == 0

    told = json.loads(path.read_text("utf-8"))
    journeys = [journey for journey, _, _ in told["stations"]]
    assert {journey: journeys.count(journey) for journey in journeys} == {
        "a chunk to a client": 5,
        "a chunk from an agent": 3,
        "a tool call's end from an agent": 2,
        "a round trip, without the link": 3,
    }
    assert len(capsys.readouterr().out.splitlines()) == len(journeys)
