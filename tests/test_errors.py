"""The tree of exceptions: whose fault, which facts, what is said."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from antiphon import _errors
from antiphon._errors import (
    AntiphonError,
    AuthRequired,
    CapabilityError,
    ConnectionClosed,
    DeliveryGap,
    InternalError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    LocalProtocolError,
    MethodNotFound,
    MissingExtra,
    NotInitialized,
    ParseError,
    RemoteProtocolError,
    RequestCancelled,
    RequestError,
    RequestTimeout,
    ResourceNotFound,
    StartError,
    TurnInProgress,
    TurnOver,
    VersionMismatch,
)

NAMED: dict[int, type[RequestError]] = {
    -32700: ParseError,
    -32600: InvalidRequest,
    -32601: MethodNotFound,
    -32602: InvalidParams,
    -32603: InternalError,
    -32800: RequestCancelled,
    -32000: AuthRequired,
    -32002: ResourceNotFound,
}

# One of each that carries facts, the facts, and what it says.
TOLD: list[tuple[AntiphonError, dict[str, Any], str]] = [
    (TurnInProgress("s1"), {"session_id": "s1"}, "session 's1' already has an open turn"),
    (TurnOver("s1"), {"session_id": "s1"}, "the turn of session 's1' is over"),
    (
        VersionMismatch(1, 9),
        {"offered": 1, "answered": 9},
        "the agent speaks protocol version 9, this client speaks version 1",
    ),
    (RequestError(7, "Odd"), {"code": 7, "message": "Odd", "data": None}, "Odd (7)"),
    (RequestError(7, "Odd", {"a": 1}), {"data": {"a": 1}}, "Odd (7): {'a': 1}"),
    (InvalidParams("cwd"), {"code": -32602, "data": "cwd"}, "Invalid params (-32602): 'cwd'"),
    (ConnectionClosed("gone"), {"exit_status": None, "stderr_tail": ""}, "gone"),
    (
        ConnectionClosed("gone", exit_status=3, stderr_tail="\nno model\n"),
        {"reason": "gone", "exit_status": 3},
        "gone (exit status 3); its standard error ends with:\nno model",
    ),
    (ConnectionClosed("gone", exit_status=-9), {"exit_status": -9}, "gone (ended by signal 9)"),
    (StartError("no such command"), {"command": []}, "no such command"),
    (StartError("x", command=["a", "b"]), {"command": ["a", "b"]}, "x"),
    (
        RequestTimeout("session/new", 1.5),
        {"method": "session/new", "seconds": 1.5},
        "no answer to session/new within 1.5 s",
    ),
    (
        LimitExceeded("frame_bytes", 10, 12),
        {"limit": "frame_bytes", "maximum": 10, "size": 12},
        "limit frame_bytes of 10 exceeded (12)",
    ),
    (LimitExceeded("sessions", 10), {"size": None}, "limit sessions of 10 exceeded"),
    (
        CapabilityError("session/load", "agentCapabilities.loadSession"),
        {"method": "session/load", "capability": "agentCapabilities.loadSession"},
        "session/load needs agentCapabilities.loadSession, which the peer did not advertise",
    ),
    (
        DeliveryGap("s1", 1, 2),
        {"session_id": "s1", "delivered": 1, "expected": 2},
        "1 of 2 updates of session 's1' were delivered",
    ),
    (
        MissingExtra("cli", "the display"),
        {"extra": "cli", "feature": "the display"},
        'the display needs an extra: pip install "antiphon[cli]"',
    ),
]


def tree_of_the_docstring() -> dict[str, str]:
    """Name to parent, read from the drawing."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getdoc(_errors).splitlines():  # type: ignore[union-attr]
        drawn = re.match(r"^( {4}[│ ├└─]*)([A-Z]\w+)", line)
        if drawn is None:
            continue
        level = (len(drawn[1]) - 4) // 4
        del above[level:]
        if above:
            parents[drawn[2]] = above[-1]
        above.append(drawn[2])
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = tree_of_the_docstring()

    assert set(drawn) | {"AntiphonError"} == set(_errors.__all__)
    for name, parent in drawn.items():
        assert issubclass(getattr(_errors, name), getattr(_errors, parent)), (name, parent)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (NotInitialized, LocalProtocolError),
        (TurnInProgress, LocalProtocolError),
        (TurnOver, LocalProtocolError),
        (VersionMismatch, RemoteProtocolError),
        (StartError, ConnectionClosed),
        (RequestTimeout, TimeoutError),
        (MissingExtra, ImportError),
    ],
)
def test_an_exception_is_caught_as_whose_fault_it_is(
    kind: type[AntiphonError], fault: type[Exception]
) -> None:
    assert issubclass(kind, fault)
    assert issubclass(kind, AntiphonError)


@pytest.mark.parametrize(("error", "facts", "text"), TOLD, ids=lambda value: type(value).__name__)
def test_an_exception_keeps_facts_and_computes_its_text(
    error: AntiphonError, facts: dict[str, Any], text: str
) -> None:
    assert {name: getattr(error, name) for name in facts} == facts
    assert str(error) == text


@pytest.mark.parametrize(("code", "kind"), NAMED.items())
@pytest.mark.covers("R1-14")
def test_a_code_of_the_protocol_gives_its_named_class(code: int, kind: type[RequestError]) -> None:
    error = RequestError.of(code, "said so", {"a": 1})

    assert type(error) is kind
    assert (error.code, error.message, error.data) == (code, "said so", {"a": 1})


@pytest.mark.parametrize("code", [0, 1, -1, -32000 - 1, -32603 - 1, -32099, 2**63])
@pytest.mark.covers("R1-14")
def test_any_other_code_is_a_general_error(code: int) -> None:
    error = RequestError.of(code, "said so")

    assert type(error) is RequestError
    assert (error.code, error.data) == (code, None)


@pytest.mark.parametrize("kind", NAMED.values())
def test_a_named_error_has_a_message_of_its_own(kind: Any) -> None:
    error = kind()

    assert error.message == kind.MESSAGE
    assert error.data is None
