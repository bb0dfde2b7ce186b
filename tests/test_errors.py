"""One tree of exceptions, each of which keeps its facts, computes its text, and can be copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from antiphon import _errors
from antiphon._errors import (
    AntiphonError,
    AttachmentClosed,
    AuthRequired,
    CapabilityError,
    ConnectionClosed,
    DeliveryGap,
    InternalError,
    InvalidParams,
    InvalidRequest,
    JournalDamaged,
    JournalError,
    JournalInUse,
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
    SilenceTimeout,
    StartError,
    TurnHeld,
    TurnInProgress,
    TurnOver,
    VersionMismatch,
)

CODES = {
    -32700: ParseError,
    -32600: InvalidRequest,
    -32601: MethodNotFound,
    -32602: InvalidParams,
    -32603: InternalError,
    -32800: RequestCancelled,
    -32000: AuthRequired,
    -32002: ResourceNotFound,
}

# One of each kind, its facts, and its text.
SAMPLES: list[tuple[AntiphonError, dict[str, Any], str]] = [
    (AntiphonError("x"), {}, "x"),
    (LocalProtocolError("used wrongly"), {}, "used wrongly"),
    (NotInitialized("session/new before initialize"), {}, "session/new before initialize"),
    (TurnInProgress("s1"), {"session_id": "s1"}, "session 's1' already has an open turn"),
    (TurnOver("s1"), {"session_id": "s1"}, "the turn of session 's1' is over"),
    (RemoteProtocolError("the answer is malformed"), {}, "the answer is malformed"),
    (
        VersionMismatch(1, 99),
        {"offered": 1, "answered": 99},
        "the agent speaks protocol version 99, this client speaks version 1",
    ),
    (
        RequestError(400, "bad", {"a": [1]}),
        {"code": 400, "message": "bad", "data": {"a": [1]}},
        "bad (400): {'a': [1]}",
    ),
    (RequestError(0, "m"), {"code": 0, "message": "m", "data": None}, "m (0)"),
    (ParseError(), {"code": -32700, "data": None}, "Parse error (-32700)"),
    (
        InvalidRequest({"reason": "r"}),
        {"code": -32600},
        "Invalid request (-32600): {'reason': 'r'}",
    ),
    (MethodNotFound("x/y"), {"code": -32601, "data": "x/y"}, "Method not found (-32601): 'x/y'"),
    (
        InvalidParams({"modeId": "m"}, "unknown or unavailable mode"),
        {"code": -32602, "message": "unknown or unavailable mode", "data": {"modeId": "m"}},
        "unknown or unavailable mode (-32602): {'modeId': 'm'}",
    ),
    (
        InternalError({"details": "model not found"}),
        {"code": -32603, "message": "Internal error"},
        "Internal error (-32603): {'details': 'model not found'}",
    ),
    (RequestCancelled(), {"code": -32800}, "Request cancelled (-32800)"),
    (AuthRequired(), {"code": -32000}, "Authentication required (-32000)"),
    (ResourceNotFound(), {"code": -32002}, "Resource not found (-32002)"),
    (
        ConnectionClosed("the agent closed its output"),
        {"reason": "the agent closed its output", "exit_status": None, "stderr_tail": ""},
        "the agent closed its output",
    ),
    (
        ConnectionClosed("it ended", exit_status=3, stderr_tail="no key\n"),
        {"exit_status": 3, "stderr_tail": "no key\n"},
        "it ended (exit status 3); its standard error ends with:\nno key",
    ),
    (
        StartError("it ended", command=["a", "b"], exit_status=-9, stderr_tail=" \n"),
        {"command": ["a", "b"], "exit_status": -9, "reason": "it ended"},
        "it ended (ended by signal 9)",
    ),
    (StartError("no such command"), {"command": []}, "no such command"),
    (
        AttachmentClosed("s1", "revoked", 7),
        {"session_id": "s1", "reason": "revoked", "offset": 7},
        "session 's1' is attached no more (revoked); the last record was 7",
    ),
    (
        RequestTimeout("session/new", 60.0),
        {"method": "session/new", "seconds": 60.0, "errno": None},
        "no answer to session/new within 60 s",
    ),
    (
        SilenceTimeout("session/prompt", 600.0),
        {"method": "session/prompt", "seconds": 600.0, "errno": None},
        "no sign of life in session/prompt for 600 s",
    ),
    (
        LimitExceeded("frame_bytes", 16777216, 16777217),
        {"limit": "frame_bytes", "maximum": 16777216, "size": 16777217},
        "limit frame_bytes of 16777216 exceeded (16777217)",
    ),
    (
        LimitExceeded("json_depth", 256),
        {"size": None},
        "limit json_depth of 256 exceeded",
    ),
    (
        CapabilityError("session/load", "agentCapabilities.loadSession"),
        {"method": "session/load", "capability": "agentCapabilities.loadSession"},
        "session/load needs agentCapabilities.loadSession, which the peer did not advertise",
    ),
    (
        DeliveryGap("s1", 4, 5),
        {"session_id": "s1", "delivered": 4, "expected": 5},
        "4 of 5 updates of session 's1' were delivered",
    ),
    (JournalError("no space"), {"reason": "no space"}, "no space"),
    (
        JournalInUse("s1", "process 4711"),
        {"session_id": "s1", "owner": "process 4711"},
        "session 's1' is written by process 4711",
    ),
    (
        JournalDamaged("3.db", "the checksum is wrong", session_id="s1", offset=7),
        {"file": "3.db", "session_id": "s1", "offset": 7},
        "3.db, session 's1', record 7: the checksum is wrong",
    ),
    (
        JournalDamaged("3.db", "not a database"),
        {"file": "3.db", "session_id": None, "offset": None},
        "3.db: not a database",
    ),
    (
        TurnHeld("s1"),
        {"session_id": "s1"},
        "the turn of session 's1' is held by another",
    ),
    (
        MissingExtra("cli", "the pleasant display"),
        {"extra": "cli", "feature": "the pleasant display"},
        'the pleasant display needs an extra: pip install "antiphon[cli]"',
    ),
]


def classes() -> set[type]:
    return {
        value
        for name, value in vars(_errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and not name.startswith("_")
    }


def drawn_tree() -> dict[str, str | None]:
    """Class to parent, as the module's docstring draws them."""
    found: dict[str, str | None] = {}
    path: list[str] = []
    for line in (_errors.__doc__ or "").splitlines():
        bare = line.lstrip(" │├└─")
        depth = (len(line) - len(bare) - 4) // 4
        name = bare.split(" ", 1)[0]
        if name in vars(_errors) and line.startswith("    "):
            path[depth:] = [name]
            found[name] = path[depth - 1] if depth else None
    return found


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    named = {_errors._Named.__name__: RequestError.__name__}
    actual = {
        kind.__name__: named.get(kind.__bases__[0].__name__, kind.__bases__[0].__name__)
        for kind in classes() - {AntiphonError}
    }

    assert drawn_tree() == {"AntiphonError": None, **actual}


def test_every_public_name_is_an_exception_and_every_exception_public() -> None:
    assert {kind.__name__ for kind in classes()} == set(_errors.__all__)
    assert all(issubclass(kind, AntiphonError) for kind in classes())


def test_there_is_a_sample_of_every_kind() -> None:
    assert {type(error) for error, _, _ in SAMPLES} == classes()


@pytest.mark.parametrize(("error", "facts", "text"), SAMPLES)
def test_facts_are_attributes_and_the_text_tells_them(
    error: AntiphonError, facts: dict[str, Any], text: str
) -> None:
    assert {name: getattr(error, name) for name in facts} == facts
    assert str(error) == text
    assert repr(error)


@pytest.mark.parametrize(("error", "facts", "text"), SAMPLES)
@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_an_error_survives_being_copied(
    error: AntiphonError, facts: dict[str, Any], text: str, way: str
) -> None:
    error = copy.copy(error)
    error.add_note("seen on the way")

    if way == "pickle":
        again = pickle.loads(pickle.dumps(error))
    else:
        again = copy.copy(error) if way == "copy" else copy.deepcopy(error)

    assert again is not error
    assert type(again) is type(error)
    assert {name: getattr(again, name) for name in facts} == facts
    assert (str(again), again.args) == (text, error.args)
    assert again.__notes__ == ["seen on the way"]


@pytest.mark.parametrize(("code", "kind"), CODES.items())
def test_a_code_of_the_protocol_gives_its_named_class(code: int, kind: type[RequestError]) -> None:
    made = RequestError.of(code, "theirs", [1])

    assert type(made) is kind
    assert (made.code, made.message, made.data) == (code, "theirs", [1])
    assert code == kind.CODE


@pytest.mark.covers("R1-14")
@pytest.mark.parametrize("code", [0, 1, -1, 12345, -32001, -32099, -33000])
def test_any_other_code_gives_the_general_class(code: int) -> None:
    made = RequestError.of(code, "odd")

    assert type(made) is RequestError
    assert (made.code, made.message, made.data) == (code, "odd", None)


def test_a_missing_answer_is_a_timeout_and_a_missing_extra_an_import_error() -> None:
    with pytest.raises(TimeoutError):
        raise RequestTimeout("x/y", 0.5)
    with pytest.raises(ImportError):
        raise MissingExtra("fast", "uvloop")


@pytest.mark.parametrize("data", ["text", ["list"], {"details": "no key"}, 0, False])
def test_code_message_and_data_are_all_in_the_text(data: Any) -> None:
    text = str(RequestError.of(-32603, "Internal error", data))

    assert "-32603" in text
    assert "Internal error" in text
    assert repr(data) in text
