"""Every event is in the table, reaches the hook and the one logger, and can do no harm."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import pytest
from tests.runtime.link import BOUND, Gate, Hard, bounded, good, linked, turns, update
from tests.runtime.test_connection import ODD_FRAMES, OVER

import antiphon
from antiphon.core import Ignored, Refusal
from antiphon.runtime import EVENTS, FutureCall, TelemetryEvent

if TYPE_CHECKING:
    from antiphon.core import Side

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "antiphon"
PAGE = ROOT / "docs" / "reference" / "telemetry.md"


def emitted() -> dict[str, set[str]]:
    """The names that anything calls `emit` with, and the facts given with each."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.args[0] if node.args else None
            if node.func.attr == "emit" and isinstance(name, ast.Constant):
                facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                found.setdefault(str(name.value), set()).update(facts - {"cause", "level"})
    return found


def of_the_core() -> set[str]:
    """Those that `core` names and the connection passes on."""
    hints = (get_type_hints(kind)["event"] for kind in (Refusal, Ignored))
    return {name for hint in hints for name in get_args(hint)}


def test_the_table_is_what_can_be_emitted_both_ways() -> None:
    assert set(emitted()) | of_the_core() == set(EVENTS)


def test_what_is_emitted_has_the_facts_of_the_table() -> None:
    found = emitted()

    assert {name: facts - set(EVENTS[name].facts) for name, facts in found.items()} == {
        name: set() for name in found
    }
    # And the other way: no fact is promised that nobody gives.
    assert {name: set(EVENTS[name].facts) - facts for name, facts in found.items()} == {
        name: set() for name in found
    }


async def test_an_event_reaches_the_log_and_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[TelemetryEvent] = []
    caplog.set_level(logging.DEBUG, "antiphon")
    async with linked(telemetry=seen.append) as link:
        assert link.connection.observed
        caplog.clear()
        link.connection.emit("late_response", id="7")

    assert seen[0] == antiphon.TelemetryEvent("late_response", "peer", {"id": "7"})
    (record,) = (r for r in caplog.records if getattr(r, "acp_event", "") == "late_response")
    assert (record.name, record.levelno) == ("antiphon.telemetry", logging.DEBUG)
    assert record.getMessage() == "ignored a response to no open call (id='7')"
    facts: Any = vars(record)["acp_facts"]
    assert facts == {"id": "7"}


async def test_a_hook_that_fails_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    def hook(event: TelemetryEvent) -> None:
        asked.append(event.name)
        msg = "the hook's own fault"
        raise ValueError(msg)

    async with linked(telemetry=hook) as link:
        link.connection.emit("late_response", id="7")
        link.connection.emit("late_response", id="8")

        assert asked == ["late_response", "late_response"]
    assert "the hook's own fault" in caplog.text


def test_what_must_not_happen_is_an_error_in_the_log() -> None:
    """Which is never off, and so is heard in every test (`tests/alarms.py`)."""
    invariants = {name: spec.level for name, spec in EVENTS.items() if spec.kind == "invariant"}

    assert set(invariants) == {"dispatch_failed", "dup_reply"}
    assert set(invariants.values()) == {logging.ERROR}


async def test_without_a_hook_only_the_log_has_it() -> None:
    async with linked() as link:
        assert not link.connection.observed
        link.connection.emit("late_response", id="7")


# --- each event, and what causes it ---------------------------------------------------------------


def named(events: list[TelemetryEvent], name: str) -> list[dict[str, Any]]:
    return [event.facts for event in events if event.name == name]


FRAMES: list[tuple[Side, bytes, str, dict[str, Any]]] = [
    ("agent", b"{", "parse_error", {"reason": "no JSON", "begins": "{"}),
    ("agent", b"[INFO] \xff" + b"x" * 900, "parse_error", {"reason": "no JSON"}),
    ("client", b"[INFO] ready", "noise", {"begins": "[INFO] ready"}),
    ("client", b"{", "parse_error", {"reason": "no JSON"}),
    (
        "client",
        b'{"method":"session/update","params":{"t":"%s"}}' % (b"x" * OVER),
        "parse_error",
        {"reason": "frame_too_large", "method": "session/update", "limit": OVER, "size": OVER + 45},
    ),
    ("agent", b"[" * 100_000, "parse_error", {"reason": "too_deep", "limit": 256, "method": None}),
    (
        "agent",
        b'{"id":7,"method":"good","params":{"t":"%s"}}' % (b"x" * OVER),
        "invalid_request_frame",
        {"id": "7", "reason": "frame_too_large", "method": "good"},
    ),
    ("agent", b"[]", "invalid_request_frame", {"id": None, "reason": "batch_array"}),
    ("agent", b"42", "invalid_request_frame", {"id": None, "reason": "not an object"}),
    ("agent", b'{"id":4}', "invalid_request_frame", {"id": "4", "reason": "no method"}),
    ("agent", b'{"id":null,"method":"m"}', "invalid_request_frame", {"reason": "illegal id"}),
    ("agent", b'{"id":6,"result":1}', "late_response", {"id": "6"}),
    ("agent", b'{"id":"%s","result":1}' % (b"y" * 900), "late_response", {}),
    ("agent", b'{"result":1}', "malformed_response", {"id": None, "reason": "no id"}),
    ("agent", b'{"jsonrpc":"1","id":6,"result":1}', "malformed_response", {"id": "6"}),
    (
        "agent",
        b'{"id":null,"error":{"code":-32700,"message":"Parse error"}}',
        "refused_by_peer",
        {"error": '{"code":-32700,"message":"Parse error"}'},
    ),
    ("agent", b'{"method":"x/y"}', "unknown_notification", {"method": "x/y", "reason": "unknown"}),
    ("client", b'{"method":"session/update"}', "undecodable_notification", {}),
    ("agent", b'{"method":"x/typed","params":5}', "undecodable_notification", {}),
]


@pytest.mark.parametrize(("side", "frame", "name", "facts"), FRAMES)
async def test_a_frame_that_is_out_of_the_ordinary_is_one_event(
    side: Side, frame: bytes, name: str, facts: dict[str, Any]
) -> None:
    events: list[TelemetryEvent] = []

    def typed(_raw: Any) -> Any:
        msg = "Expected `object`"
        raise ValueError(msg)

    async with linked(side, frame_bytes=OVER, telemetry=events.append) as link:
        link.side.serve("good", good)
        link.side.hear("x/typed", Gate(), decode=typed)
        link.peer.send(frame, b'{"id":1,"method":"good"}')
        await link.peer.answer_to(1)

        assert [event.name for event in events] == [name]
        told = events[0].facts
        assert told | facts == told
        assert all(len(fact) <= 256 for fact in told.values() if isinstance(fact, str))


@pytest.mark.parametrize("side", ["agent", "client"])
async def test_whatever_comes_the_facts_are_those_of_the_table_and_plain(side: Side) -> None:
    events: list[TelemetryEvent] = []
    async with linked(side, frame_bytes=OVER, telemetry=events.append) as link:
        link.side.serve("good", good)
        link.peer.send(*(frame for frame, _ in ODD_FRAMES), b'{"id":99,"method":"good"}')
        await link.peer.answer_to(99)

    assert len(events) >= 30
    for event in events:
        spec = EVENTS[event.name]
        assert event.kind == spec.kind
        assert set(event.facts) <= set(spec.facts), event
        assert all(isinstance(v, str | int | bool | None) for v in event.facts.values()), event


async def test_a_peer_that_reuses_an_id_or_asks_too_much_is_told_of() -> None:
    events: list[TelemetryEvent] = []
    gate = Gate()
    async with linked(inbound_requests=2, telemetry=events.append) as link:
        link.side.serve("x/wait", gate)
        link.peer.call(1, "x/wait")
        link.peer.call(2, "x/wait")
        link.peer.call(1, "x/wait")
        link.peer.call(3, "x" * 1000)
        await link.peer.answer_to(3)

        assert named(events, "duplicate_inflight_id") == [{"id": "1", "method": "x/wait"}]
        assert named(events, "inbound_shed") == [
            {
                "id": "3",
                "method": "x" * 256,
                "reason": "too many concurrent inbound requests",
                "limit": 2,
            }
        ]
        gate.open()
        await link.peer.answer_to(2)


async def test_a_handler_that_fails_is_told_of_without_what_it_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[TelemetryEvent] = []

    async def fail(params: Any, context: Any) -> Any:
        raise Hard("a secret path") if params == "hard" else ValueError("a secret path")

    async with linked(telemetry=events.append) as link:
        link.side.serve("x/ask", fail)
        link.side.hear("x/tell", fail)
        link.peer.call(1, "x/ask")
        await link.peer.answer_to(1)
        link.peer.tell("x/tell", "hard")
        await turns(10)

    crashes = named(events, "handler_crash")
    assert crashes == [
        {"what": "request", "method": "x/ask", "error": "ValueError"},
        {"what": "notification", "method": "x/tell", "error": "Hard"},
    ]
    records = [r for r in caplog.records if vars(r).get("acp_event") == "handler_crash"]
    assert all(r.exc_info is not None for r in records)
    assert "a secret path" not in " ".join(r.getMessage() for r in records)


async def test_a_refusal_that_a_handler_means_is_no_event() -> None:
    events: list[TelemetryEvent] = []

    async def refuse(params: Any, context: Any) -> Any:
        raise antiphon.InvalidParams("no")

    async with linked(telemetry=events.append) as link:
        link.side.serve("x/ask", refuse)
        link.peer.call(1, "x/ask")
        await link.peer.answer_to(1)
        link.peer.call(2, "x/unknown")
        await link.peer.answer_to(2)

    assert [event.name for event in events] == ["connection_lost"]


@pytest.mark.alarms("dispatch_failed")
async def test_a_side_that_fails_on_a_frame_is_told_of() -> None:
    events: list[TelemetryEvent] = []

    def fail(params: Any, context: Any) -> None:
        raise KeyError("inside")

    async with linked(telemetry=events.append) as link:
        link.side.hear("x/now", at_once=fail)
        link.peer.tell("x/now")
        await turns()

    assert named(events, "dispatch_failed") == [{"error": "KeyError"}]
    assert [e.kind for e in events if e.name == "dispatch_failed"] == ["invariant"]


@pytest.mark.virtual_time
async def test_a_call_without_an_answer_is_told_of() -> None:
    events: list[TelemetryEvent] = []
    async with linked(telemetry=events.append) as link:
        with pytest.raises(antiphon.RequestTimeout):
            await link.connection.request("x/y", None, 2.5)

    assert named(events, "call_timed_out") == [{"method": "x/y", "seconds": 2.5}]


async def test_a_malformed_answer_is_told_of_by_the_id_of_its_call() -> None:
    events: list[TelemetryEvent] = []
    async with linked(telemetry=events.append) as link:
        calls = [FutureCall("x/y", link.connection.create_future()) for _ in range(2)]
        for call in calls:
            link.connection.open_call(call, None, BOUND)
        link.peer.send(b'{"id":1,"error":7}', b'{"id":2,"error":{"code":1,"message":"no"}}')
        for call in calls:
            with pytest.raises(antiphon.AntiphonError):
                await bounded(call.future)

    (told,) = named(events, "malformed_response")
    assert told["id"] == "1"
    assert "malformed" in told["reason"]


async def test_reading_that_stops_goes_on_and_fails_calls_is_told_of() -> None:
    events: list[TelemetryEvent] = []
    async with linked("client", queue_bytes=1000, telemetry=events.append) as link:
        link.side.queue_updates = True
        call = FutureCall("x/y", link.connection.create_future())
        link.connection.open_call(call, None, BOUND)
        link.peer.send(*[update(100)] * 30)
        with pytest.raises(antiphon.LimitExceeded):
            await bounded(call.future)
        link.connection.release(3000, 30)

    flow = [(e.name, e.facts) for e in events if e.name != "connection_lost"]
    assert flow == [
        ("reading_paused", {"queued_bytes": 3000, "queued_updates": 30}),
        ("calls_over_budget", {"calls": 1, "queued_bytes": 3000, "limit": 1000}),
        ("reading_resumed", {"queued_bytes": 0, "queued_updates": 0}),
    ]


@pytest.mark.virtual_time
async def test_a_task_that_is_left_behind_is_told_of_by_name() -> None:
    events: list[TelemetryEvent] = []
    released = asyncio.Event()

    async def stay(params: Any, context: Any) -> Any:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
        return {}

    async with linked(telemetry=events.append, close_grace=0.5) as link:
        link.side.serve("x/stay", stay)
        link.peer.call(1, "x/stay")
        await turns(10)
        await link.connection.aclose()
        released.set()
        await turns(10)

    (told,) = named(events, "task_left_behind")
    assert "Incoming._serve" in told["task"]
    assert named(events, "connection_lost") == [
        {"reason": "this side closed the connection", "exit_status": None}
    ]


async def test_the_end_of_a_process_is_told_of_with_its_status() -> None:
    events: list[TelemetryEvent] = []
    async with linked(telemetry=events.append) as link:
        link.connection.connection_lost(
            antiphon.ConnectionClosed("it ended", exit_status=3, stderr_tail="a secret")
        )
        link.connection.connection_lost(None)
        await bounded(link.connection.wait_closed())

    assert named(events, "connection_lost") == [{"reason": "it ended", "exit_status": 3}]


def test_the_page_has_every_event_with_its_kind_level_and_facts() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]

    assert {row[0].strip("`"): row[1:4] for row in rows} == {
        name: [
            spec.kind,
            logging.getLevelName(spec.level).lower(),
            ", ".join(f"`{fact}`" for fact in spec.facts),
        ]
        for name, spec in EVENTS.items()
    }
    assert len(rows) == len(EVENTS)
