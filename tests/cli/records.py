"""Records of a session by hand, as a writer would have appended them."""

from __future__ import annotations

import json
from typing import Any

from antiphon.journal import Record, taint_of_update

#: When the first record is appended, in milliseconds since 1970; each is a second later.
BEGIN = 1_784_290_000_000


def record(offset: int, kind: str, payload: dict[str, Any] | bytes, session: str = "s-1") -> Record:
    """One record; its taint as its kind has it."""
    tag = "" if isinstance(payload, bytes) else str(payload.get("sessionUpdate", ""))
    taint = taint_of_update(tag) if kind == "session_update" else "system"
    text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return Record(offset, session, kind, text, taint, BEGIN + offset * 1000)


def update(tag: str, **members: Any) -> tuple[str, Any]:
    """A `session_update` of this tag."""
    return "session_update", {"sessionUpdate": tag, **members}


def chunk(tag: str, text: str, **members: Any) -> tuple[str, Any]:
    """A chunk of a message: "agent_message", "agent_thought" or "user_message"."""
    return update(f"{tag}_chunk", content={"type": "text", "text": text}, **members)


def started(number: Any = 1, **members: Any) -> tuple[str, Any]:
    """A turn's beginning."""
    return "turn_started", {"turnId": number, "prompt": [], **members}


def completed(number: Any = 1, stop: str = "end_turn") -> tuple[str, Any]:
    """A turn's end."""
    return "turn_completed", {"turnId": number, "stopReason": stop}


def orphaned(number: Any = 1) -> tuple[str, Any]:
    """The end of a turn whose holder died."""
    payload = {"turnId": number, "outcome": "orphaned", "stopReason": "cancelled"}
    return "turn_completed", payload


def records(*made: tuple[str, Any], session: str = "s-1", start: int = 1) -> list[Record]:
    """Records with offsets from `start`."""
    return [
        record(offset, kind, payload, session)
        for offset, (kind, payload) in enumerate(made, start=start)
    ]


#: A session as it might be: a turn with everything, one that failed, one that was orphaned.
WHOLE = records(
    ("session_created", {"cwd": "/repo"}),
    started(1),
    chunk("user_message", "Repair it."),
    update("session_info_update", title="Repair it."),
    chunk("agent_thought", "There is a "),
    chunk("agent_thought", "test that fails."),
    chunk("agent_message", "I look "),
    chunk("agent_message", "at *both*.\n\nThen I repair."),
    update(
        "plan",
        entries=[
            {"content": "Read", "status": "in_progress", "priority": "low"},
            {"content": "Repair", "status": "pending", "priority": "low"},
        ],
    ),
    update("tool_call", toolCallId="t1", title="Read a.py", kind="read", status="in_progress"),
    chunk("agent_message", "Meanwhile."),
    update("tool_call_update", toolCallId="t1", status="completed"),
    update(
        "tool_call",
        toolCallId="t2",
        title="Repair a.py",
        kind="edit",
        status="in_progress",
        locations=[{"path": "/repo/a.py", "line": 2}],
        content=[{"type": "diff", "path": "/repo/a.py", "oldText": "a\nb\n", "newText": "a\nc\n"}],
    ),
    update("tool_call_update", toolCallId="t2", status="completed"),
    update("current_mode_update", currentModeId="swift"),
    update(
        "plan",
        entries=[
            {"content": "Read", "status": "completed", "priority": "low"},
            {"content": "Repair", "status": "completed", "priority": "low"},
        ],
    ),
    update("usage_update", used=310, size=8000),
    completed(1),
    started(2),
    chunk("user_message", "And now?"),
    ("turn_completed", {"turnId": 2, "error": {"code": -32603, "message": "Internal error"}}),
    started(3),
    chunk("user_message", "Once more."),
    chunk("agent_message", "I beg"),
    orphaned(3),
)
