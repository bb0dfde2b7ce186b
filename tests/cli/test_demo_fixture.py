from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.cli import _demo_fixture as fixture

if TYPE_CHECKING:
    from pathlib import Path


def test_fixture_fails_until_it_is_repaired_and_passes_then(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)
    assert fixture.is_fixture(tmp_path)
    assert not fixture.is_fixed(tmp_path)
    assert not fixture.passes(tmp_path)

    (tmp_path / fixture.MODULE).write_text(fixture.FIXED)

    assert fixture.passes(tmp_path)
    assert fixture.is_fixed(tmp_path)
    assert not fixture.is_fixture(tmp_path)


def test_a_file_of_that_name_by_somebody_else_is_no_fixture(tmp_path: Path) -> None:
    assert not fixture.is_fixture(tmp_path)
    fixture.write_fixture(tmp_path)
    (tmp_path / fixture.MODULE).write_bytes(b"\xff")

    assert not fixture.is_fixture(tmp_path)
    assert not fixture.is_fixed(tmp_path)


def test_a_test_that_cannot_be_run_does_not_pass(tmp_path: Path) -> None:
    assert not fixture.passes(tmp_path / "nowhere")


def test_repair_changes_one_line() -> None:
    broken, fixed = fixture.BROKEN.splitlines(), fixture.FIXED.splitlines()

    assert len(broken) == len(fixed)
    assert sum(one != other for one, other in zip(broken, fixed, strict=True)) == 1
