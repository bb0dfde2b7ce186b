"""How a run ended: exit codes, failures in words, and the result line of `--json`.

Every way a turn can go wrong becomes one `Failure` here, and a `Failure` alone decides exit code,
text and JSON, so that the three cannot disagree. What went wrong is found out by the layers below
(`antiphon._errors`); when to stop is `_turn`'s business.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from antiphon._errors import (
    AntiphonError,
    AuthRequired,
    ConnectionClosed,
    RequestError,
    RequestTimeout,
    StartError,
    VersionMismatch,
)

__all__ = [
    "DIED",
    "INTERRUPTED",
    "OK",
    "OTHER_STOP",
    "PROTOCOL",
    "TIMEOUT",
    "USAGE",
    "Failure",
    "Outcome",
    "explain",
]

#: The turn ended with `end_turn`.
OK: Final = 0
#: The turn ended with any other stop reason.
OTHER_STOP: Final = 1
#: The command line was wrong; nothing was started.
USAGE: Final = 2
#: The agent could not be started, or died.
DIED: Final = 3
#: The agent broke the protocol or answered with an error, login and version included.
PROTOCOL: Final = 4
#: `--timeout`, the start-up limit or the silence limit was met.
TIMEOUT: Final = 5
#: Interrupted from outside (128 + SIGINT), also by SIGTERM and SIGHUP.
INTERRUPTED: Final = 130

_CODES: Final = {
    "usage": USAGE,
    "start": DIED,
    "died": DIED,
    "auth": PROTOCOL,
    "version": PROTOCOL,
    "answer": PROTOCOL,
    "protocol": PROTOCOL,
    "internal": PROTOCOL,
    "timeout": TIMEOUT,
    "interrupted": INTERRUPTED,
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no stop reason.

    Attributes:
        kind: usage, start, died, auth, version, answer, protocol, timeout, interrupted, or
            internal for a fault of ours.
        message: what a person reads first; one sentence, more lines only for a list of choices.
        code: the JSON-RPC error code of an error answer.
        data: the error answer's data, any JSON value.
        exit_status: exit code of the agent's process (negative: its signal), where it has ended.
        stderr: the last text of the agent's standard error ("" if none).
    """

    kind: str
    message: str
    code: int | None = None
    data: Any = None
    exit_status: int | None = None
    stderr: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return _CODES[self.kind]

    def as_json(self) -> dict[str, Any]:
        """The `error` object of the result line: what is not known is not in it."""
        error: dict[str, Any] = {"kind": self.kind, "message": self.message}
        if self.code is not None:
            error["code"] = self.code
        if self.data is not None:
            error["data"] = self.data
        if self.exit_status is not None:
            error["exit_status"] = self.exit_status
        if self.stderr.strip():
            error["stderr"] = self.stderr
        return error

    def text(self) -> str:
        """The same for a person, several lines where there is a tail to show."""
        lines = [self.message]
        if self.data is not None:
            lines.append(f"details: {_readable(self.data)}")
        if self.exit_status is not None:
            lines.append(
                f"exit status: {self.exit_status}"
                if self.exit_status >= 0
                else f"ended by signal {-self.exit_status}"
            )
        if self.stderr.strip():
            lines.append("its standard error ends with:")
            lines.extend(f"  {line}" for line in self.stderr.strip().split("\n")[-20:])
        return "\n".join(lines)


class Outcome(msgspec.Struct, kw_only=True):
    """What one run came to, filled while it goes on.

    `stop_reason` is the agent's, as on the wire; `failure` says why there is none, or why the run
    was stopped although there is one.
    """

    stop_reason: str | None = None
    updates: int = 0
    permissions: int = 0
    text: list[str] = []
    session_id: str | None = None
    agent: str | None = None
    failure: Failure | None = None
    #: Further members of the result line.
    extra: dict[str, Any] = {}
    #: What must be true besides `end_turn` (the demo's own proof).
    proven: bool = True

    @property
    def exit_code(self) -> int:
        """0 only for `end_turn` without any failure."""
        if self.failure is not None:
            return self.failure.exit_code
        return OK if self.stop_reason == "end_turn" and self.proven else OTHER_STOP

    def as_json(self, *, with_text: bool) -> dict[str, Any]:
        """The last line of `--json`."""
        result: dict[str, Any] = {
            "type": "result",
            "ok": self.exit_code == OK,
            "stop_reason": self.stop_reason,
            "updates": self.updates,
            "permissions": self.permissions,
        }
        if with_text:
            result["text"] = "".join(self.text)
        result.update(self.extra)
        if self.session_id is not None:
            result["session_id"] = self.session_id
        if self.agent is not None:
            result["agent"] = self.agent
        if self.failure is not None:
            result["error"] = self.failure.as_json()
        return result


def explain(error: BaseException) -> Failure | None:
    """The failure that `error` means, or None if it is no fault of the agent or the link.

    Sources: docs/decisions/0006 for the exit codes, DESIGN §8 for whose fault is whose.
    """
    match error:
        case StartError(timed_out=True):
            return _of_link("timeout", error)
        case StartError():
            return _of_link("start", error)
        case ConnectionClosed():
            return _of_link("died", error)
        case VersionMismatch():
            return Failure(kind="version", message=_sentence(str(error)))
        case RequestTimeout():
            return Failure(kind="timeout", message=_sentence(f"the agent gave {error}"))
        case AuthRequired():
            return Failure(
                kind="auth",
                message=f"The agent wants a login first: {error.message}",
                code=error.code,
                data=error.data,
            )
        case RequestError():
            return Failure(
                kind="answer",
                message=f"The agent answered with error {error.code}: {error.message}",
                code=error.code,
                data=error.data,
            )
        case AntiphonError():
            return Failure(kind="protocol", message=_sentence(str(error)))
        case msgspec.DecodeError():
            return Failure(kind="protocol", message=f"The agent sent a malformed answer: {error}")
        case _:
            return None


def _of_link(kind: str, error: ConnectionClosed) -> Failure:
    return Failure(
        kind=kind,
        message=_sentence(error.reason),
        exit_status=error.exit_status,
        stderr=error.stderr_tail,
    )


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", ":")) or "\n" in text else text + "."


def _readable(data: Any) -> str:
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()
