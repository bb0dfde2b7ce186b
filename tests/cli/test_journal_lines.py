"""Records as lines of JSON, and that an exported session is to a client what the live one was."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon import (
    DurableAgent,
    MessageView,
    SessionView,
    ToolCallView,
    Turn,
    connect,
    content,
)
from antiphon.cli._journal_lines import Recording, json_line, record_line
from antiphon.journal import SESSION_UPDATE, MemoryJournal, Record, SessionInfo
from antiphon.schema import decode_update, v1
from antiphon.testing import RawPeer, joined, raw_pair
from tests.cli.records import BEGIN, WHOLE, record, records, update

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def info(made: Sequence[Record], **more: Any) -> SessionInfo:
    last = made[-1]
    return SessionInfo(
        last.session_id, last.offset, made[0].ts, last.ts, {"cwd": "/repo", **more}, None, False
    )


def exported(*sessions: Sequence[Record]) -> list[dict[str, Any]]:
    recording = Recording()
    lines: list[bytes] = []
    for made in sessions:
        lines += recording.begin(info(made))
        lines += map(recording.record, made)
        lines += recording.end(made[-1].session_id, made[-1].offset, made[-1].ts)
    return [json.loads(line) for line in lines]


async def play(lines: Iterable[dict[str, Any]], raw: RawPeer) -> None:
    """A cassette in few words: says what is "in", and waits for what is "out"."""
    ids: dict[int, Any] = {}
    asked: dict[str, int] = {}
    for line in lines:
        frame = line["frame"]
        if line["dir"] == "out":
            asked[frame["method"]] = asked.get(frame["method"], 0) + 1
            request = await raw.wait(frame["method"], asked[frame["method"]])
            assert request["params"].get("sessionId") == frame["params"].get("sessionId")
            ids[frame["id"]] = request["id"]
        elif "method" in frame:
            raw.send(frame)
        else:
            raw.send({**frame, "id": ids.pop(frame["id"])})
    assert not ids


def folded(view: SessionView) -> list[Any]:
    """Everything that a view shows."""

    def entry(one: Any) -> Any:
        if isinstance(one, MessageView):
            return one.kind, one.message_id, one.text, one.blocks
        if isinstance(one, ToolCallView):
            return {name: getattr(one, name) for name in ToolCallView.__struct_fields__}
        return one

    facts = ("plan", "plans", "commands", "mode", "config_options", "usage", "title", "updated_at")
    return [[entry(one) for one in view.entries], *(getattr(view, name) for name in facts)]


def live_view(made: Sequence[Record]) -> SessionView:
    """What a client had who was there: prompts are its own, and turns begin and end."""
    view = SessionView()
    for one in made:
        if one.kind == "turn_started":
            view.begin_turn()
        elif one.kind == "turn_completed":
            view.end_turn(one.data.get("stopReason"))
        elif one.kind == SESSION_UPDATE:
            view.apply(decode_update(one.payload))
    return view


async def test_a_client_that_an_export_is_played_to_sees_the_session_as_it_was() -> None:
    made = [one for one in WHOLE if one.offset <= 21]  # the third turn was cancelled
    async with raw_pair() as (transport, raw):
        playing = asyncio.create_task(play(exported(made), raw))
        async with connect(transport) as agent:
            session = await agent.load_session("s-1", cwd="/repo")
            assert folded(session.view) == folded(live_view(made))
            assert len(session.view.entries) == 7
            await playing


class Busy(DurableAgent):
    """Says something of each kind."""

    async def prompt(self, turn: Turn) -> str | None:
        await turn.send(v1.SessionInfoUpdate(title="Busy"))
        await turn.think("Hm, ")
        await turn.think("yes.")
        await turn.plan([v1.PlanEntry(content="Do it", priority="low", status="in_progress")])
        async with turn.tool("Do it", kind="edit") as tool:
            await turn.say("Meanwhile, ")
            await turn.say("I say this.")
            diff = v1.Diff(path="/repo/a", old_text="a", new_text="b")
            await tool.update(content=[diff], raw_output={"done": True})
        await turn.usage(used=1, size=2)
        await turn.say(turn.text)
        return "refusal" if turn.text.startswith("no") else None


async def live_and_exported() -> tuple[SessionView, list[dict[str, Any]]]:
    """What a client saw that was there, and what its session's journal exports."""
    journal = MemoryJournal()
    async with joined(Busy(journal)) as agent:
        session = await agent.new_session(cwd="/repo")
        view = session.view  # folded from now on
        for text in ("yes", "no"):
            await session.prompt([text, content.text("more")])
    (known,) = await journal.sessions()
    log = await journal.open(known.session_id)
    return view, exported(await log.read(1, known.records))


async def played(lines: list[dict[str, Any]]) -> SessionView:
    """What a client sees that an export is played to."""
    session_id = lines[2]["frame"]["params"]["sessionId"]
    async with raw_pair() as (transport, raw):
        playing = asyncio.create_task(play(lines, raw))
        async with connect(transport) as agent:
            session = await agent.load_session(session_id, cwd="/repo")
            await playing
        return session.view


async def test_a_client_of_an_export_has_the_view_of_one_that_was_there() -> None:
    live, lines = await live_and_exported()

    assert folded(await played(lines)) == folded(live)
    assert len(live.entries) == 10
    assert (live.title, live.plan[0].content) == ("Busy", "Do it")


async def test_an_export_that_lacks_a_record_or_has_one_twice_gives_another_view() -> None:
    live, lines = await live_and_exported()
    at = next(n for n, line in enumerate(lines) if "I say this." in str(line))

    assert folded(await played(lines[:at] + lines[at + 1 :])) != folded(live)
    assert folded(await played(lines[: at + 1] + lines[at:])) != folded(live)


async def test_several_sessions_are_one_recording() -> None:
    one = records(("session_created", {}), update("current_mode_update", currentModeId="a"))
    two = records(update("current_mode_update", currentModeId="b"), session="s-2")
    async with raw_pair() as (transport, raw):
        playing = asyncio.create_task(play(exported(one, two), raw))
        async with connect(transport) as agent:
            first = await agent.load_session("s-1", cwd="/repo")
            second = await agent.load_session("s-2", cwd="/repo")
            assert (first.view.mode, second.view.mode) == ("a", "b")
            await playing


def test_an_export_is_the_recording_of_a_client_that_attaches_from_the_beginning() -> None:
    lines = exported(WHOLE)

    assert [line["dir"] for line in lines[:3]] == ["out", "in", "out"]
    assert {line["dir"] for line in lines[3:]} == {"in"}
    assert all(set(line) == {"t", "dir", "frame"} for line in lines)
    load = lines[2]["frame"]
    assert load["method"] == "session/load"
    assert load["params"] == {
        "sessionId": "s-1",
        "cwd": "/repo",
        "mcpServers": [],
        "_meta": {"raxol.io": {"fromOffset": 0, "historyPolicy": "from_offset"}},
    }
    caught_up, answer = (line["frame"] for line in lines[-2:])
    assert caught_up == {
        "jsonrpc": "2.0",
        "method": "_raxol/session.caught_up",
        "params": {"sessionId": "s-1", "offset": 26},
    }
    assert answer["id"] == load["id"]
    assert answer["result"] == {"_meta": {"raxol.io": {"highWatermark": 25}}}


def test_each_record_is_its_subscribers_frame_at_its_own_time() -> None:
    lines = exported(WHOLE)[3:-2]

    assert len(lines) == len(WHOLE)
    for line, one in zip(lines, WHOLE, strict=True):
        frame, stamp = line["frame"], {"offset": one.offset, "taint": one.taint, "ts": one.ts}
        assert line["t"] == one.ts / 1000
        if one.kind == SESSION_UPDATE:
            assert frame["method"] == "session/update"
            assert frame["params"] == {
                "sessionId": "s-1",
                "update": one.data,
                "_meta": {"raxol.io": stamp},
            }
        else:
            assert frame["method"] == "_raxol/session.record"
            record_itself = {"sessionId": "s-1", "kind": one.kind, "payload": one.data}
            assert frame["params"] == {**record_itself, **stamp}


def test_a_raw_record_has_every_field() -> None:
    assert json.loads(record_line(WHOLE[4])) == {
        "type": "record",
        "session_id": "s-1",
        "offset": 5,
        "kind": "session_update",
        "payload": WHOLE[4].data,
        "taint": "agent",
        "ts": BEGIN + 5000,
    }


#: What ends a line for some reader, controls a terminal, or turns text around.
ODD = "\x85\u2028\u2029\x9b2J\x7f\x80\xad\u200b\u202e\u2066\ufeff é€😀"


def raw_payload(text: str) -> bytes:
    # As an agent may write it: nothing escaped that need not be, and white space between tokens.
    return f'{{"sessionUpdate":\r\n\t"{text}","text":"{text}"}}'.encode()


@pytest.mark.parametrize("kind", ["session_update", "odd"])
def test_a_line_is_one_for_every_reader_and_controls_no_terminal(kind: str) -> None:
    one = Record(3, ODD, kind, raw_payload(ODD), ODD, BEGIN)
    recording = Recording()
    lines = [
        record_line(one),
        json_line({"title": ODD}),
        *recording.begin(SessionInfo(ODD, 3, BEGIN, BEGIN, {"cwd": ODD}, ODD, False)),
        recording.record(one),
        *recording.end(ODD, 3, BEGIN),
    ]

    for line in lines:
        text = line.decode()
        assert len(text.splitlines()) == 1
        assert not re.search(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u2028-\u202e\u2066\ufeff]", text
        )
        json.loads(line)
    assert json.loads(lines[0])["payload"] == one.data
    assert json.loads(lines[0])["session_id"] == ODD
    assert json.loads(lines[1]) == {"title": ODD}


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b'{"a":\x1b}', b"\xff", b"[" * 100_000, b"{}\n{}", b"NaN", b'{"a":"\x1b"}'],
)
def test_a_payload_that_is_no_json_breaks_no_line(payload: bytes) -> None:
    one = record(2, "session_update", payload)
    recording = Recording()
    recording.begin(info([one]))

    text = payload.decode("utf-8", "replace")
    assert json.loads(record_line(one))["payload"] == text
    frame = json.loads(recording.record(one))["frame"]
    assert isinstance(frame, str)
    assert " ".join(text.split()) in " ".join(frame.split())
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", record_line(one) + recording.record(one))


def test_numbers_that_python_does_not_hold_stay_as_they_are() -> None:
    payload = b'{"a":1e400,"b":123456789012345678901234567890,"c":1.0}'

    assert payload in record_line(record(2, "odd", payload))
    assert msgspec.json.decode(record_line(record(2, "odd", b'{"c":1.50}')))["payload"] == {
        "c": 1.5
    }
