"""The ratio table: targets, ratios of interleaved rounds, and what is said of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from bench.ratios import (
    Target,
    as_json,
    main,
    merged,
    ratio_of,
    read_targets,
    row_of,
    rows,
    shown,
    table,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bench.ratios import Samples

SAMPLES: Samples = {
    "agent/stream-32": {
        "raw-asyncio": [{"cpu_us": 0.8}, {"cpu_us": 0.9}, {"cpu_us": 1.0}],
        "ts-sdk": [{"cpu_us": 10.0}, {"cpu_us": 20.0}, {"cpu_us": 10.0}],
        "antiphon": [{"cpu_us": 1.0}, {"cpu_us": 2.0}, {"cpu_us": 0.5}],
        "antiphon-durable": [{"cpu_us": 6.0}, {"cpu_us": 12.0}, {"cpu_us": 5.5}],
    },
    "client/large": {
        "ts-sdk": [{"cpu_us": 8000.0, "peak_mb": 330.0}],
        "antiphon": [{"cpu_us": 2400.0, "peak_mb": 119.5}],
    },
    "import": {"ts-sdk": [{"cpu_ms": 170.0}], "antiphon": [{"cpu_ms": 22.0}]},
    "codec": {
        "raw-msgspec": [{"decode a": 100.0, "decode b": 100.0, "encode a": 50.0}],
        "antiphon": [{"decode a": 90.0, "decode b": 70.0, "encode a": 60.0}],
    },
}


def test_the_targets_that_are_kept_name_measures_that_there_are() -> None:
    targets = read_targets()

    assert len(targets) > 20
    assert {target.row.partition("/")[0].partition(" ")[0] for target in targets} == {
        "agent",
        "client",
        "codec",
        "import",
    }
    assert Target("agent/stream-32", "cpu", "antiphon", "ts-sdk", 0.10) in targets
    assert Target("agent/stream-32", "cpu", "antiphon-durable", "ts-sdk", 0.5) in targets


@pytest.mark.parametrize(
    "entry",
    [
        'row = "import"\nfigure = "cpu"\natmost = 1',
        'row = "import"\nfigure = "cost"',
        'row = "import"\nfigure = "cpu"\nat_most = 1\nat_least = 1',
        'row = "codec decode"\nfigure = "cpu"',
    ],
)
def test_a_target_that_no_table_could_show_is_refused(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f"[[target]]\n{entry}\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"^targets\.toml: "):
        read_targets(path)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    taken = SAMPLES["agent/stream-32"]

    # The disturbed round disturbed both: 0.1, 0.1, 0.05.
    assert round(ratio_of(taken["antiphon"], taken["ts-sdk"], "cpu_us") or 0, 3) == 0.1
    assert ratio_of([], taken["ts-sdk"], "cpu_us") is None
    assert ratio_of([{"cpu_us": 1.0}], [{"cpu_us": 0.0}], "cpu_us") is None


def test_each_target_stands_beside_what_was_measured() -> None:
    found = rows(
        [
            Target("agent/stream-32", "cpu", against="ts-sdk", at_most=0.10),
            Target("agent/stream-32", "cpu", against="raw-asyncio", at_most=1.0),
            Target("agent/stream-32", "cpu", of="antiphon-durable", against="ts-sdk", at_most=0.5),
            Target("client/large", "peak", at_most=110),
            Target("import", "cpu", against="ts-sdk"),
            Target("codec decode", "rate", against="raw-msgspec", at_least=0.85),
            Target("codec encode", "rate", against="raw-msgspec", at_least=0.85),
            Target("agent/tools", "cpu", against="ts-sdk", at_most=0.12),  # not measured
            Target("client/large", "p50", against="ts-sdk"),  # has no such figure
        ],
        SAMPLES,
    )

    assert [(row.target.row, round(row.ratio, 2), row.ok) for row in found] == [
        ("agent/stream-32", 0.1, True),
        ("agent/stream-32", 1.25, False),
        ("agent/stream-32", 0.6, False),
        ("client/large", 119.5, False),
        ("import", 0.13, None),
        ("codec decode", 0.7, False),
        ("codec encode", 1.2, True),
    ]
    assert [(name, round(ratio, 3)) for name, ratio in found[0].peers.items()] == [
        ("raw-asyncio", 0.08)
    ]
    assert found[5].note == "b"
    assert table(found).splitlines()[2:5] == [
        "| agent/stream-32 | us CPU | 1.00 | 10.0 | 0.100 | ≤ 0.1 | ok | 0.08 |",
        "| agent/stream-32, against raw-asyncio | us CPU | 1.00 | 0.90 | 1.250 | ≤ 1 | **miss** |  |",
        "| agent/stream-32, antiphon-durable | us CPU | 6.00 | 10.0 | 0.600 | ≤ 0.5 | **miss** |  |",
    ]


def test_the_ratio_of_every_message_stands_below_the_worst() -> None:
    targets = [
        Target("import", "cpu", against="ts-sdk"),
        Target("codec decode", "rate", against="raw-msgspec", at_least=0.85),
        Target("codec encode", "rate", against="raw-msgspec", at_least=0.85),
    ]

    found = rows(targets, SAMPLES)

    assert [row.each for row in found] == [{}, {"a": 0.9, "b": 0.7}, {"a": 1.2}]
    assert table(found).splitlines()[-5:] == [
        "",
        "| codec | decode, against raw-msgspec | encode, against raw-msgspec |",
        "|---|--:|--:|",
        "| a | 0.900 | 1.200 |",
        "| b | 0.700 |  |",
    ]
    assert [row_of(row) for row in as_json([], found)["rows"]] == found
    assert "| codec |" not in table(found[:1])


def test_a_figure_has_three_digits_or_so() -> None:
    assert [shown(value) for value in (None, 0.0731, 1.25, 31.26, 7921.3)] == [
        *("", "0.07", "1.25", "31.3", "7,921")
    ]


def test_a_run_in_pieces_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces: list[dict[str, Any]] = [
        {"note": "a machine", "samples": {name: SAMPLES[name]}}
        for name in ("agent/stream-32", "import")
    ]
    for number, piece in enumerate(pieces):
        (tmp_path / f"{number}.json").write_text(json.dumps(piece), encoding="utf-8")

    notes, samples = merged(pieces)
    status = main(
        [
            *(str(tmp_path / "0.json"), str(tmp_path / "1.json")),
            *("--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "rows.md")),
        ]
    )

    assert status == 0
    assert notes == ["a machine"]
    assert set(samples) == {"agent/stream-32", "import"}
    told = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert told["notes"] == ["a machine"]
    assert told["rows"][0]["target"]["row"] == "agent/stream-32"
    assert (tmp_path / "rows.md").read_text("utf-8").startswith("a machine\n\n| measure |")
    assert "4 rows, 1 over their target" in capsys.readouterr().out
