"""`antiphon journal prune`: what goes, what stays, and that nothing goes unasked."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon.cli import main
from antiphon.journal import Entry, SqliteJournal, Writer
from antiphon.journal._sqlite_format import index_columns, index_of
from tests.cli.command import antiphon
from tests.cli.journals import write
from tests.cli.records import WHOLE, chunk, completed, records, started
from tests.cli.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

#: A day, in milliseconds.
DAY = 86_400_000


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    directory = tmp_path / "journal"
    write(directory, {"a-old": WHOLE, "a-older": WHOLE, "b-new": WHOLE})
    for session_id, days in (("a-old", 10), ("a-older", 40)):
        age(directory, session_id, days)
    return directory


def age(directory: Path, session_id: str, days: int) -> None:
    """Have a session have changed so many days before it did."""
    for file in directory.glob("shard-*.db"):
        database = sqlite3.connect(file)
        row = database.execute(
            "SELECT records, created, updated, meta, title, latest, sum FROM sessions WHERE id = ?",
            (session_id.encode(),),
        ).fetchone()
        if row is not None:
            index, _ = index_of(row, file.name, session_id)
            older = msgspec.structs.replace(index, updated=index.updated - days * DAY)
            check = index_columns(older, session_id)[-1]
            database.execute(
                "UPDATE sessions SET updated = ?, sum = ? WHERE id = ?",
                (older.updated, check, session_id.encode()),
            )
        database.commit()
        database.close()


def prune(
    capfd: pytest.CaptureFixture[str], directory: Path, *arguments: str
) -> tuple[int, str, str]:
    code = main(["journal", "prune", str(directory), *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def left(capfd: pytest.CaptureFixture[str], directory: Path) -> set[str]:
    main(["journal", "ls", "--json", str(directory)])
    return {json.loads(line)["session_id"] for line in capfd.readouterr().out.splitlines()}


def test_old_sessions_go_and_the_others_stay_whole(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = prune(capfd, kept, "--older-than", "30d", "--yes")

    assert (code, err) == (0, "")
    assert out.startswith("deleted: a-older  25 records, changed ")
    assert len(out.splitlines()) == 1
    assert left(capfd, kept) == {"a-old", "b-new"}
    assert main(["journal", "verify", str(kept)]) in {
        0,
        1,
    }  # the times were changed behind its back
    assert "50 records" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        (["--older-than", "9d"], {"a-old", "a-older"}),
        (["--older-than", "1w"], {"a-old", "a-older"}),
        (["--older-than", "240h"], {"a-old", "a-older"}),
        (["--older-than", "100d"], set[str]()),
        (["--session", "a-older"], {"a-older"}),
        (["--session", "b"], {"b-new"}),
        (["--session", "b", "--session", "a-old", "--session", "b-new"], {"b-new", "a-old"}),
    ],
)
def test_what_is_chosen_goes(
    kept: Path, arguments: list[str], gone: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = left(capfd, kept)

    dry = prune(capfd, kept, *arguments, "--dry-run")
    assert dry[0] == 0
    assert {line.split()[2] for line in dry[1].splitlines() if "would delete" in line} == gone
    assert left(capfd, kept) == before
    assert prune(capfd, kept, *arguments, "--yes")[0] == 0
    assert left(capfd, kept) == before - gone


@pytest.mark.parametrize(
    ("prefix", "words"), [("a-", "several sessions begin with"), ("x", "no session begins with")]
)
def test_one_name_that_fits_badly_keeps_all_sessions(
    kept: Path, prefix: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = prune(capfd, kept, "--session", "b-new", "--session", prefix, "--yes")

    assert code == 4
    assert words in err
    assert len(left(capfd, kept)) == 3


def test_lines_of_json_say_what_became_of_each(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def found(*arguments: str) -> list[dict[str, Any]]:
        out = prune(capfd, kept, "--older-than", "1d", "--json", *arguments)[1]
        return [json.loads(line) for line in out.splitlines()]

    assert [(line["session_id"], line["deleted"]) for line in found("--dry-run")] == [
        ("a-old", False),
        ("a-older", False),
    ]
    assert [(line["type"], line["session_id"], line["deleted"]) for line in found("--yes")] == [
        ("pruned", "a-old", True),
        ("pruned", "a-older", True),
    ]
    assert found("--yes") == []


def test_without_anybody_to_ask_nothing_goes(kept: Path) -> None:
    ran = antiphon("journal", "prune", str(kept), "--session", "b-new", stdin=b"y\n")

    assert ran.code == 2
    assert "--yes" in ran.err
    assert len(antiphon("journal", "ls", "--json", str(kept)).lines) == 3


@pytest.mark.parametrize(("keys", "code", "count"), [("y\r", 0, 2), ("\r", 1, 3), ("no\r", 1, 3)])
def test_a_person_is_shown_what_goes_and_asked(
    kept: Path, keys: str, code: int, count: int
) -> None:
    with Screen("journal", "prune", str(kept), "--session", "b-new") as screen:
        screen.read_until("delete 1 session with 25 records for good? [y/N]")
        assert "b-new  25 records, changed " in screen.text
        screen.type(keys)
        assert screen.end() == code

    assert len(antiphon("journal", "ls", "--json", str(kept)).lines) == count


def test_an_interrupt_instead_of_an_answer_deletes_nothing(kept: Path) -> None:
    with Screen("journal", "prune", str(kept), "--session", "b-new") as screen:
        screen.read_until("[y/N]")
        screen.type("\x03")
        assert screen.end() == 130

    assert len(antiphon("journal", "ls", "--json", str(kept)).lines) == 3


async def test_a_session_that_a_living_process_writes_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    journal = SqliteJournal(directory, durability="process")
    writers = [Writer(await journal.open(name)) for name in ("busy", "idle")]
    for writer in writers:
        for one in records(started(1), chunk("agent_message", "x"), completed(1)):
            await writer.append(Entry(one.kind, one.payload, one.taint))
    await writers[1].aclose()
    try:
        ran = await asyncio.to_thread(
            antiphon,
            "journal",
            "prune",
            str(directory),
            "--older-than",
            "0.001s",
            "--yes",
            "--json",
        )
        found = {line["session_id"]: (line["deleted"], line["why"]) for line in ran.lines}
        assert ran.code == 1
        assert found["idle"] == (True, "deleted")
        assert found["busy"][0] is False
        assert "writes it" in found["busy"][1]
        # It goes on undisturbed.
        record = await writers[0].append(Entry("session_update", b"{}", "system"))
        assert record.offset == 5
    finally:
        await writers[0].aclose()
        await journal.aclose()
    assert (await asyncio.to_thread(antiphon, "journal", "verify", str(directory))).code == 0


def test_a_path_without_a_journal_is_not_made_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert prune(capfd, path, "--older-than", "1d", "--yes")[0] == 3

    assert not list(tmp_path.iterdir())
