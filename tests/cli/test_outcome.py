from __future__ import annotations

import pytest

from antiphon._errors import (
    AuthRequired,
    ConnectionClosed,
    LimitExceeded,
    RemoteProtocolError,
    RequestError,
    RequestTimeout,
    StartError,
    VersionMismatch,
)
from antiphon.cli._outcome import Failure, Outcome, explain


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (StartError("no command 'x'"), "start", 3),
        (StartError("no answer to initialize within 1 s", timed_out=True), "timeout", 5),
        (ConnectionClosed("the agent's process ended", exit_status=1), "died", 3),
        (VersionMismatch(1, 99), "version", 4),
        (AuthRequired(), "auth", 4),
        (RequestError.of(-32603, "Internal error"), "answer", 4),
        (RequestError.of(500, "model failed"), "answer", 4),
        (RequestTimeout("session/new", 60), "timeout", 5),
        (RemoteProtocolError("odd"), "protocol", 4),
        (LimitExceeded("frame_bytes", 5), "protocol", 4),
    ],
)
def test_each_error_has_its_kind_and_exit_code(error: Exception, kind: str, code: int) -> None:
    failure = explain(error)

    assert failure is not None
    assert (failure.kind, failure.exit_code) == (kind, code)
    assert failure.message[0].isupper()


def test_a_bug_of_ours_is_no_failure_of_the_agent() -> None:
    assert explain(ZeroDivisionError()) is None


def test_failure_holds_in_json_only_what_is_known() -> None:
    bare = Failure(kind="start", message="No.")
    full = Failure(
        kind="died", message="Gone.", code=-1, data={"a": 1}, exit_status=-9, stderr="last words"
    )

    assert bare.as_json() == {"kind": "start", "message": "No."}
    assert full.as_json() == {
        "kind": "died",
        "message": "Gone.",
        "code": -1,
        "data": {"a": 1},
        "exit_status": -9,
        "stderr": "last words",
    }


def test_failure_reads_as_a_message_with_status_and_last_words() -> None:
    text = Failure(kind="died", message="It ended.", exit_status=7, stderr="a\nb\n").text()

    assert text == "It ended.\nexit status: 7\nits standard error ends with:\n  a\n  b"
    assert "signal 9" in Failure(kind="died", message="It ended.", exit_status=-9).text()


@pytest.mark.parametrize(
    ("reason", "proven", "code"),
    [("end_turn", True, 0), ("end_turn", False, 1), ("refusal", True, 1), ("new_one", True, 1)],
)
def test_only_a_proven_end_turn_is_success(reason: str, proven: bool, code: int) -> None:
    outcome = Outcome(stop_reason=reason, proven=proven)

    assert outcome.exit_code == code
    assert outcome.as_json(with_text=False)["ok"] is (code == 0)


def test_result_line_of_a_failure_has_no_stop_reason_and_says_why() -> None:
    outcome = Outcome(updates=2, failure=Failure(kind="timeout", message="Too late."))

    assert outcome.as_json(with_text=True) == {
        "type": "result",
        "ok": False,
        "stop_reason": None,
        "updates": 2,
        "permissions": 0,
        "text": "",
        "error": {"kind": "timeout", "message": "Too late."},
    }
