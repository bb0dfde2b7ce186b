"""`antiphon journal`, as it is typed: what each command says, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import pytest

from antiphon.cli import main
from antiphon.journal import Entry, SqliteJournal, Writer
from tests.cli.command import BOUND, COMMAND, antiphon, environment
from tests.cli.journals import append, write
from tests.cli.records import WHOLE, chunk, completed, records, started
from tests.cli.test_journal_page import HOSTILE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon.journal import Record

OPEN = records(
    ("session_created", {"cwd": "/other"}), started(1), chunk("agent_message", "at work")
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "journal"
    write(directory, {"alpha-1": WHOLE, "alpha-2": OPEN, "beta": WHOLE[:18]})
    return directory


Said = tuple[int, str, str]


def says(capfd: pytest.CaptureFixture[str], *arguments: str) -> Said:
    code = main(["journal", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def lines(said: Said) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said[1].splitlines()]


# -- which journal, which session


def test_a_journal_is_its_directory_or_any_file_in_it(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = says(capfd, "ls", str(kept))

    assert whole[0] == 0
    for file in kept.iterdir():
        assert says(capfd, "ls", str(file / "..") if file.is_dir() else str(file)) == whole


def test_what_is_no_journal_is_said_and_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no journal")
    newer = tmp_path / "newer"
    write(newer, {"s": WHOLE})
    for file in newer.glob("*.db"):
        with sqlite3.connect(file) as database:
            database.execute("PRAGMA user_version=99")
        database.close()
    for path, words in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "there is no journal here"),
        (tmp_path / "notes.txt", "there is no journal here"),
        (newer, "newer version"),
    ):
        for action in (["ls"], ["show", "s"], ["tail", "s"], ["export", "s"], ["verify"]):
            code, out, err = says(capfd, action[0], str(path), *action[1:])

            assert (code, out) == (3, ""), (path, action, err)
            assert err.startswith("antiphon journal: ")
            assert words in err
            assert err.count("\n") == 1


def test_a_path_with_a_null_byte_is_no_path(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = says(capfd, "ls", "a\0b")

    assert code == 3
    assert "no path" in err


def test_a_journal_that_may_not_be_read_is_said(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)  # root may read everything
    code, _, err = says(capfd, "ls", str(kept))

    assert code == 3
    assert err == f"antiphon journal: {kept}: Permission denied\n"


def test_an_error_is_a_line_for_programs_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = says(capfd, "ls", "--json", str(tmp_path))

    assert said[0] == 3
    assert [line["type"] for line in lines(said)] == ["error"]


@pytest.mark.parametrize(
    ("prefix", "code", "words"),
    [
        ("beta", 0, "session beta"),
        ("b", 0, "session beta"),
        ("alpha-1", 0, "session alpha-1"),
        ("alpha", 4, "several sessions begin with 'alpha':\n  alpha-"),
        ("gamma", 4, "no session begins with 'gamma'; it has 3"),
        ("BETA", 4, "no session begins with 'BETA'"),
        ("", 4, "several sessions"),
    ],
)
def test_a_session_is_named_by_any_beginning_that_is_its_alone(
    kept: Path, prefix: str, code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found, out, err = says(capfd, "show", str(kept), prefix)

    assert found == code
    assert words in out + err


def test_a_whole_id_is_that_session_although_others_begin_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "j", {"a": OPEN, "ab": OPEN})

    assert says(capfd, "show", str(tmp_path / "j"), "a")[1].startswith("session a\n")


# -- ls


def test_ls_is_a_table_with_what_changed_last_first(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = says(capfd, "ls", str(kept))

    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["SESSION", "CHANGED", "CREATED", "RECORDS", "TURN", "TITLE", "FOLDER"]
    found = {row[0]: row[5:] for row in rows[1:]}
    assert found == {
        "alpha-1": ["25", "-", "Repair", "it.", "/repo"],
        "alpha-2": ["3", "open", "-", "/other"],
        "beta": ["18", "-", "Repair", "it.", "/repo"],
    }


def test_ls_json_has_every_fact_and_times_in_utc(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = lines(says(capfd, "ls", "--json", str(kept)))

    assert [line["updated"] for line in found] == sorted(
        (line["updated"] for line in found), reverse=True
    )
    (session,) = [line for line in found if line["session_id"] == "alpha-2"]
    assert session["created"].endswith("+00:00")
    assert {key: session[key] for key in session if key not in {"created", "updated"}} == {
        "type": "session",
        "session_id": "alpha-2",
        "title": None,
        "cwd": "/other",
        "records": 3,
        "turn_open": True,
        "meta": {"cwd": "/other"},
    }


def test_ls_of_hostile_sessions_is_one_line_each_and_controls_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    title = ("session_update", {"sessionUpdate": "session_info_update", "title": HOSTILE})
    write(tmp_path / "j", {HOSTILE: records(("session_created", {"cwd": HOSTILE}), title)})

    for arguments in ([], ["--json"]):
        code, out, _ = says(capfd, "ls", str(tmp_path / "j"), *arguments)
        assert code == 0
        assert len(out.splitlines()) == 2 - len(arguments)
        assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in out.replace("\n", ""))


def test_a_long_id_is_cut_and_what_is_left_names_the_session(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "j", {"x" * 500: OPEN, "宽" * 3: OPEN})

    rows = says(capfd, "ls", str(tmp_path / "j"))[1].splitlines()
    shown = next(row.split()[0] for row in rows if row.startswith("x"))
    assert shown == "x" * 79 + "…"
    assert says(capfd, "show", str(tmp_path / "j"), shown.removesuffix("…"))[0] == 0
    # A wide character takes two columns.
    wide = next(row for row in rows if row.startswith("宽"))
    assert wide[3:].startswith(" " * (80 - 6 + 2) + "2")


def test_an_empty_journal_has_no_sessions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "j", {"s": OPEN})
    assert says(capfd, "prune", str(tmp_path / "j"), "--session", "s", "--yes")[0] == 0

    assert says(capfd, "ls", str(tmp_path / "j")) == (0, "no sessions\n", "")
    assert says(capfd, "ls", "--json", str(tmp_path / "j")) == (0, "", "")
    assert says(capfd, "show", str(tmp_path / "j"), "s")[0] == 4


# -- show


def test_show_tells_a_session_turn_by_turn(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = says(capfd, "show", str(kept), "alpha-1")

    assert (code, err) == (0, "")
    for words in (
        "session alpha-1\n  title:    Repair it.\n  folder:   /repo\n",
        "user:\n  Repair it.\n",
        "thinking:\n  There is a test that fails.\n",
        "agent:\n  I look at *both*.\n\n  Then I repair.\n",
        "edit: Repair a.py (a.py:2) [completed]\n  a.py\n   a\n  -b\n  +c\n",
        "plan [x] Repair\n",
        "turn 1 ended: end_turn",
        "turn 2 ended: failed: Internal error (-32603)",
        "turn 3 ended: orphaned",
    ):
        assert words in out


def test_show_says_that_a_turn_is_open(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = says(capfd, "show", str(kept), "alpha-2")[1]

    assert out.splitlines()[-1].startswith("the turn is open: ")
    assert "the turn is open" not in says(capfd, "show", str(kept), "beta")[1]
    assert says(capfd, "show", str(kept), "beta", "--to", "9")[1].endswith(
        "the turn goes on after this\n"
    )


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        ([], range(1, 26)),
        (["--from", "20"], range(20, 26)),
        (["--from", "0", "--to", "3"], range(1, 4)),
        (["--from", "3", "--to", "3"], [3]),
        (["--from", "30"], []),
        (["--from", "5", "--to", "4"], []),
        (["--to", "99999999999999999999999"], range(1, 26)),
        (["--kinds", "turn_started,turn_completed"], [2, 18, 19, 21, 22, 25]),
        (["--kinds", "tool_call"], [10, 13]),
        (["--kinds", " steer , session_created,"], [1]),
        (["--kinds", ""], []),
    ],
)
def test_show_json_gives_the_records_that_were_asked_for(
    kept: Path, arguments: list[str], offsets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    said = says(capfd, "show", str(kept), "alpha-1", "--json", *arguments)

    assert said[0] == 0
    assert [line["offset"] for line in lines(said)] == list(offsets)
    for line in lines(said):
        assert line["payload"] == WHOLE[int(line["offset"]) - 1].data


def test_show_of_a_part_says_that_it_is_one(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = says(capfd, "show", str(kept), "alpha-1", "--from", "19", "--to", "21")[1]

    assert "\nrecords 19 to 21 of 25\n" in out
    assert "turn 2 ended" in out
    assert "turn 1" not in out


# -- export


def test_export_gives_the_recording_and_with_records_the_records(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recording = lines(says(capfd, "export", str(kept), "beta"))
    raw = lines(says(capfd, "export", str(kept), "beta", "--records"))

    assert [set(line) for line in recording] == [{"t", "dir", "frame"}] * (18 + 5)
    assert [line["offset"] for line in raw] == list(range(1, 19))
    assert {line["type"] for line in raw} == {"record"}


def test_export_all_has_every_session_whole_and_the_oldest_first(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = [line["frame"] for line in lines(says(capfd, "export", str(kept), "--all"))]

    asked = [
        frame["params"]["sessionId"] for frame in found if frame.get("method") == "session/load"
    ]
    assert asked == ["alpha-1", "alpha-2", "beta"]
    marks = [
        frame["result"]["_meta"]["raxol.io"]["highWatermark"]
        for frame in found
        if "highWatermark" in str(frame.get("result"))
    ]
    assert marks == [25, 3, 18]


@pytest.mark.parametrize("before", [None, 0o644])
def test_export_to_a_file_is_for_its_user_alone_and_whole(
    kept: Path, tmp_path: Path, before: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.ndjson"
    if before is not None:
        target.write_text("old")
        target.chmod(before)
    code, out, err = says(capfd, "export", str(kept), "--all", "-o", str(target))

    assert (code, out, err) == (0, "", "")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert target.read_text() == says(capfd, "export", str(kept), "--all")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out.ndjson"]


def test_export_that_fails_leaves_what_was_there(
    kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "missing" / "out.ndjson"

    code, _, err = says(capfd, "export", str(kept), "beta", "-o", str(target))
    assert code == 3
    assert "No such file" in err
    assert says(capfd, "export", str(kept), "gamma", "-o", str(tmp_path / "x"))[0] == 4
    assert not list(tmp_path.iterdir())


def test_export_into_a_device_writes_there(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert says(capfd, "export", str(kept), "beta", "-o", "/dev/null")[0] == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116  (a device)
    code, _, err = says(capfd, "export", str(kept), "--all", "-o", "/dev/full")
    assert code == 3
    assert "No space left" in err


# -- tail


def test_tail_begins_where_the_last_turn_did_and_ends_when_nothing_goes_on(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = says(capfd, "tail", str(kept), "alpha-1", "--until-idle")

    assert (code, err) == (0, "")
    assert "\nfrom record 22\n" in out
    assert "turn 3 ended: orphaned" in out
    assert "turn 2" not in out


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (["--from", "24"], [24, 25]),
        (["--lines", "3"], [23, 24, 25]),
        (["--lines", "0"], []),
        (["--lines", "99"], range(1, 26)),
        (["--from", "20", "--kinds", "turn_completed"], [21, 25]),
    ],
)
def test_tail_json_begins_where_it_is_told_to(
    kept: Path, arguments: list[str], offsets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    said = says(capfd, "tail", str(kept), "alpha-1", "--json", "--until-idle", *arguments)

    assert said[0] == 0
    assert [line["offset"] for line in lines(said)] == list(offsets)


def test_tail_of_an_open_turn_ends_with_its_time(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = says(capfd, "tail", str(kept), "alpha-2", "--until-idle", "--timeout", "0.3")

    assert code == 5
    assert out.endswith("agent:\n  at work\n")


class Tailing:
    """`antiphon journal tail` as a process, read line by line."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "journal", "tail", str(directory), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND):
            return (await asyncio.to_thread(self.process.stdout.readline)).decode()

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(BOUND):
            out, err = await asyncio.to_thread(self.process.communicate)
        assert err == b""
        return self.process.returncode, out.decode()


def entries(made: list[Record]) -> list[Entry]:
    return [Entry(one.kind, one.payload, one.taint) for one in made]


async def test_tail_follows_another_process_and_ends_when_the_turn_has(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    journal = SqliteJournal(directory, shards=1, durability="process")
    writer = Writer(await journal.open("s"), meta={"cwd": "/repo"})
    try:
        for entry in entries(records(started(1), chunk("agent_message", "one "))):
            await writer.append(entry)
        with Tailing(directory, "s", "--json", "--until-idle") as tail:
            assert json.loads(await tail.line())["kind"] == "turn_started"
            assert json.loads(await tail.line())["offset"] == 3
            for offset, text in enumerate(("two ", "three"), start=4):
                await writer.append(entries(records(chunk("agent_message", text)))[0])
                found = json.loads(await tail.line())
                assert found["offset"] == offset
                assert found["payload"]["content"]["text"] == text
            await writer.append(entries(records(completed(1)))[0])
            code, rest = await tail.end()
        assert code == 0
        assert [json.loads(line)["kind"] for line in rest.splitlines()] == ["turn_completed"]
    finally:
        await writer.aclose()
        await journal.aclose()


async def test_tail_ends_with_an_interrupt_and_finishes_its_line(tmp_path: Path) -> None:
    await append(tmp_path / "j", {"s": OPEN})
    with Tailing(tmp_path / "j", "s") as tail:
        while "agent:" not in await tail.line():
            pass
        tail.process.send_signal(2)
        code, rest = await tail.end()

    assert (code, rest) == (130, "  at work\n")


async def test_tail_of_a_session_that_is_deleted_says_so_and_ends(tmp_path: Path) -> None:
    await append(tmp_path / "j", {"s": OPEN})
    with Tailing(tmp_path / "j", "s") as tail:
        while "agent:" not in await tail.line():
            pass
        journal = SqliteJournal(tmp_path / "j")
        await journal.delete("s")
        await journal.aclose()
        code, rest = await tail.end()

    assert (code, rest) == (0, "  at work\nthe session was deleted\n")


def test_tail_of_a_session_that_is_deleted_before_it_is_followed_ends_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "j", {"s": OPEN})
    follow = SqliteJournal.follow

    async def follow_too_late(
        self: SqliteJournal, session_id: str, start: int = 1
    ) -> AsyncGenerator[list[Record]]:
        journal = SqliteJournal(tmp_path / "j")
        await journal.delete("s")
        await journal.aclose()
        async with contextlib.aclosing(follow(self, session_id, start)) as runs:
            async for run in runs:
                yield run

    monkeypatch.setattr(SqliteJournal, "follow", follow_too_late)
    code, out, _ = says(capfd, "tail", str(tmp_path / "j"), "s")

    assert code == 0
    assert out.endswith("agent:\n  at work\nthe session was deleted\n")


# -- nobody reads


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long") / "journal"
    made = [chunk("agent_message", "word " * 200 + "\n") for _ in range(2000)]
    write(directory, {"s": records(started(1), *made, completed(1))})
    return directory


@pytest.mark.parametrize("action", ["show", "export", "tail"])
def test_a_reader_that_goes_away_ends_it_without_a_word(long: Path, action: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "journal", action, str(long), "s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(BOUND) == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("action", ["ls", "show", "export", "verify"])
def test_output_that_cannot_be_written_is_no_success(kept: Path, action: str) -> None:
    words = ["beta"] if action in {"show", "export"} else []
    with open("/dev/full", "wb") as full:  # noqa: PTH123  (a device)
        done = subprocess.run(
            [*COMMAND, "journal", action, str(kept), *words],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=BOUND,
        )

    assert done.returncode == 3
    assert b"standard output takes no more" in done.stderr


# -- damage


def damage(directory: Path, session_id: str, old: bytes, new: bytes) -> str:
    """Change bytes in the row that holds `old`; the file's name."""
    assert len(old) == len(new)
    for file in sorted(directory.glob("shard-*.db")):
        database = sqlite3.connect(file)
        try:
            rows = database.execute(
                "SELECT key, body FROM records WHERE key >> 40 ="
                " (SELECT number FROM sessions WHERE id=?)",
                (session_id.encode(),),
            ).fetchall()
            for key, body in rows:
                if old in body:
                    database.execute(
                        "UPDATE records SET body=? WHERE key=?", (body.replace(old, new), key)
                    )
                    database.commit()
                    return file.name
        finally:
            database.close()
    raise AssertionError("there is no such row")


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, str]:
    directory = tmp_path / "damaged"
    write(directory, {"s-1": WHOLE, "s-2": WHOLE})
    return directory, damage(directory, "s-1", b"I look ", b"I lied ")


def test_a_damaged_record_is_named_and_the_others_are_shown(
    damaged: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, file = damaged
    code, out, err = says(capfd, "show", str(directory), "s-1")

    assert code == 1
    assert err == f"damaged: {file}, session s-1, record 7: the checksum does not fit\n"
    assert "I lied" not in out
    assert "  at *both*." in out
    assert "turn 3 ended: orphaned" in out
    assert says(capfd, "show", str(directory), "s-2")[::2] == (0, "")


def test_tail_names_a_damaged_record_and_shows_the_others(
    damaged: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, file = damaged
    arguments = ("tail", str(directory), "s-1", "--from", "1", "--until-idle", "--json")
    said = says(capfd, *arguments)

    assert said[0] == 1
    assert said[2] == f"damaged: {file}, session s-1, record 7: the checksum does not fit\n"
    offsets = [line["offset"] for line in lines(said) if line["type"] == "record"]
    assert offsets == [*range(1, 7), *range(8, 26)]


def test_damage_is_a_line_for_programs(
    damaged: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, file = damaged
    said = says(capfd, "show", str(directory), "s-1", "--json")
    found = lines(said)

    assert said[0] == 1
    assert [line["offset"] for line in found if line["type"] == "record"] == [
        n for n in range(1, 26) if n != 7
    ]
    assert [line for line in found if line["type"] == "damage"] == [
        {
            "type": "damage",
            "file": file,
            "session_id": "s-1",
            "offset": 7,
            "reason": "the checksum does not fit",
        }
    ]


def test_an_export_has_what_can_be_read_and_says_what_it_lacks(
    damaged: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = damaged
    target = tmp_path / "out"
    code, _, err = says(capfd, "export", str(directory), "--all", "--records", "-o", str(target))

    assert code == 1
    assert "record 7" in err
    assert len(target.read_bytes().splitlines()) == 2 * 25 - 1


def test_verify_names_every_damage_and_what_was_looked_at(
    damaged: tuple[Path, str], kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, file = damaged
    code, out, err = says(capfd, "verify", str(directory))

    assert code == 1
    assert f"{file}, session s-1, record 7: " in err
    assert out == "checked 2 files, 2 sessions, 50 records: 1 damaged\n"
    assert says(capfd, "verify", str(kept))[::2] == (0, "")


def test_several_damages_in_a_row_are_one_and_all_others_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "j"
    made = [chunk("agent_message", f"<{n:04}>") for n in range(1, 601)]
    write(directory, {"s": records(*made)})
    for n in (300, 301, 302, 600):
        damage(directory, "s", b"<%04d>" % n, b"!%04d!" % n)

    code, out, err = says(capfd, "show", str(directory), "s")

    assert code == 1
    assert [f"<{n:04}>" in out for n in range(1, 601)].count(False) == 4
    assert len(err.splitlines()) == 2
    assert "record 300" in err
    assert "record 600" in err
    code, _, err = says(capfd, "show", str(directory), "s", "--from", "303", "--to", "599")
    assert (code, err) == (0, "")


def test_a_shard_that_is_none_is_named_and_the_other_sessions_are_listed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "j"
    ids = [f"session-{n}" for n in range(8)]
    write(directory, dict.fromkeys(ids, OPEN))
    (directory / "shard-00.db").write_bytes(b"no database" * 1000)

    listed = says(capfd, "ls", str(directory), "--json")
    left = [line["session_id"] for line in lines(listed) if line["type"] == "session"]

    assert listed[0] == 1
    assert "shard-00.db" in listed[2]
    assert 0 < len(left) < 8
    assert [line["type"] for line in lines(listed)].count("damage") == 1
    for session_id in ids:
        code, out, err = says(capfd, "show", str(directory), session_id)
        assert code == (0 if session_id in left else 1)
        assert ("at work" in out) == (session_id in left)
        assert ("shard-00.db" in err) == (session_id not in left)
    code, _, err = says(capfd, "show", str(directory), "nobody")
    assert code == 1  # it may be among those that cannot be read
    assert f"no session begins with 'nobody'; it has {len(left)} that can be read" in err
    code, out, err = says(capfd, "verify", str(directory))
    assert code == 1
    assert "damaged: shard-00.db: " in err
    assert f"checked 2 files, {len(left)} sessions, {3 * len(left)} records" in out
    export = says(capfd, "export", str(directory), "--all", "--records")
    assert export[0] == 1
    assert {line["session_id"] for line in lines(export)} == set(left)


# -- what is typed


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ls"],
        ["show", "p"],
        ["show", "p", "s", "--from", "-1"],
        ["show", "p", "s", "--from", "x"],
        ["tail", "p", "s", "--from", "1", "--lines", "1"],
        ["tail", "p", "s", "--timeout", "0"],
        ["export", "p"],
        ["export", "p", "s", "--all"],
        ["prune", "p"],
        ["prune", "p", "--older-than", "30"],
        ["prune", "p", "--older-than", "0d"],
        ["prune", "p", "--older-than", "30d", "--session", "s"],
        ["unknown", "p"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = says(capfd, *arguments)

    assert code == 2
    assert "antiphon journal" in err


@pytest.mark.parametrize("action", ["ls", "show", "tail", "export", "verify", "prune"])
def test_help_has_the_exit_codes(action: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = says(capfd, action, "--help")

    assert code == 0
    assert "exit codes:" in out


def test_reading_changes_no_file(kept: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in kept.rglob("*")
            if path.is_file() and not path.name.endswith("-shm")
        }

    before = state()
    for words in (["ls"], ["show", "beta"], ["export", "--all"], ["verify"]):
        assert antiphon("journal", words[0], str(kept), *words[1:]).code == 0

    assert state() == before


def test_the_command_loads_no_display_for_lines_of_json(kept: Path) -> None:
    program = (
        "import sys; from antiphon.cli import main\n"
        f"main(['journal', 'export', {str(kept)!r}, '--all', '-o', '/dev/null'])\n"
        "print(sorted(name for name in ('rich', 'prompt_toolkit') if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=BOUND)

    assert done.stdout == b"[]\n"
