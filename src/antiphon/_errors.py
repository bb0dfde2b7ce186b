"""Every exception this library raises, in one tree split by whose fault it is.

::

    AntiphonError
    ├── LocalProtocolError        this program used the protocol or the library wrongly
    │   ├── NotInitialized        a call before the handshake
    │   ├── TurnInProgress        a second prompt on a session whose turn is open
    │   └── TurnOver              a turn verb after the turn was drained
    ├── RemoteProtocolError       the peer sent what the protocol forbids
    │   └── VersionMismatch       the peer answered a protocol version we cannot speak
    ├── RequestError              the peer's answer is an error, or a handler answers with one
    │   ├── ParseError            -32700
    │   ├── InvalidRequest        -32600
    │   ├── MethodNotFound        -32601
    │   ├── InvalidParams         -32602
    │   ├── InternalError         -32603
    │   ├── RequestCancelled      -32800
    │   ├── AuthRequired          -32000
    │   └── ResourceNotFound      -32002
    ├── ConnectionClosed          the link is gone
    │   └── StartError            the peer never came up: not started, or ended before the handshake
    ├── RequestTimeout            no answer in time (also a TimeoutError)
    │   └── SilenceTimeout        no sign of life in an open turn
    ├── AttachmentClosed          the agent sends nothing more of a session that was attached
    ├── LimitExceeded             one of the limits of `antiphon.Limits` was met
    ├── CapabilityError           the peer did not offer what the call needs; nothing was sent
    ├── DeliveryGap               a turn lost updates to a close with the budget spent; else a bug of ours
    ├── JournalError              a journal could not be read or written
    │   ├── JournalInUse          another process (or log) appends to the session
    │   ├── JournalDamaged        a record on disk is not what was written
    │   └── TurnHeld              the session's one turn is somebody else's
    └── MissingExtra              an optional dependency is not installed (also an ImportError)

Exceptions keep facts as attributes and compute their text from them. `RequestError` is the only one
whose content goes over the wire; the text of any other exception never reaches the peer.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AntiphonError",
    "AttachmentClosed",
    "AuthRequired",
    "CapabilityError",
    "ConnectionClosed",
    "DeliveryGap",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "JournalDamaged",
    "JournalError",
    "JournalInUse",
    "LimitExceeded",
    "LocalProtocolError",
    "MethodNotFound",
    "MissingExtra",
    "NotInitialized",
    "ParseError",
    "RemoteProtocolError",
    "RequestCancelled",
    "RequestError",
    "RequestTimeout",
    "ResourceNotFound",
    "SilenceTimeout",
    "StartError",
    "TurnHeld",
    "TurnInProgress",
    "TurnOver",
    "VersionMismatch",
]


#: What ends the programme or a coroutine, and so goes on where other people's code raises it. All else
#: is a failure of that code alone: test frameworks, gevent and extensions in Rust derive theirs from
#: `BaseException` too, and the peer still waits for its answer.
ENDING = (KeyboardInterrupt, SystemExit, GeneratorExit)


class AntiphonError(Exception):
    """Base of all exceptions of this library. They can be copied and pickled, facts and notes too."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors take the facts by other names, and in another order, than `args` has them.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[AntiphonError], args: tuple[Any, ...], facts: dict[str, Any]
) -> AntiphonError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class LocalProtocolError(AntiphonError):
    """This program broke a rule of the protocol or of the library; nothing was sent."""


class NotInitialized(LocalProtocolError):
    """A call was made before the handshake (`initialize`) was complete."""


class TurnInProgress(LocalProtocolError):
    """A second prompt was started on a session whose turn is still open; nothing was sent.

    Attributes:
        session_id: the session.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"session {self.session_id!r} already has an open turn"


class TurnOver(LocalProtocolError):
    """A turn verb (message, thought, tool, plan, …) was used after the turn was drained.

    Attributes:
        session_id: the session.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"the turn of session {self.session_id!r} is over"


class RemoteProtocolError(AntiphonError):
    """The peer sent something that the protocol forbids and that this call cannot survive."""


class VersionMismatch(RemoteProtocolError):
    """The agent answered `initialize` with a protocol version that this client cannot speak.

    Attributes:
        offered: the version this client offered.
        answered: the version the agent answered with.
    """

    def __init__(self, offered: int, answered: int) -> None:
        super().__init__(offered, answered)
        self.offered = offered
        self.answered = answered

    def __str__(self) -> str:
        return (
            f"the agent speaks protocol version {self.answered}, "
            f"this client speaks version {self.offered}"
        )


class RequestError(AntiphonError):
    """An error answer: received from the peer, or raised by a handler to be sent to it.

    A handler that raises one answers its request with exactly this code, message and data. For a
    code of the protocol, `RequestError.of(code, …)` gives the named subclass, as received ones are.

    Attributes:
        code: the JSON-RPC error code, any integer.
        message: one sentence.
        data: any JSON value, or None where the peer sent none.
    """

    #: The code of a named subclass; 0 on the general class.
    CODE: ClassVar[int] = 0
    #: The message a named subclass sends when none is given.
    MESSAGE: ClassVar[str] = "Error"

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    @staticmethod
    def of(code: int, message: str, data: Any = None) -> RequestError:
        """The error for `code`: the named subclass where the protocol defines one."""
        kind = _NAMED.get(code)
        return RequestError(code, message, data) if kind is None else kind(data, message)

    def __str__(self) -> str:
        text = f"{self.message} ({self.code})"
        return text if self.data is None else f"{text}: {self.data!r}"


class _Named(RequestError):
    def __init__(self, data: Any = None, message: str | None = None) -> None:
        super().__init__(self.CODE, self.MESSAGE if message is None else message, data)


class ParseError(_Named):
    """-32700: the frame was no JSON."""

    CODE = -32700
    MESSAGE = "Parse error"


class InvalidRequest(_Named):
    """-32600: JSON, but not a request that is legal here and now."""

    CODE = -32600
    MESSAGE = "Invalid request"


class MethodNotFound(_Named):
    """-32601: unknown method, or one that was not advertised. `data` is the method name."""

    CODE = -32601
    MESSAGE = "Method not found"


class InvalidParams(_Named):
    """-32602: the parameters are malformed or ask for something unsupported."""

    CODE = -32602
    MESSAGE = "Invalid params"


class InternalError(_Named):
    """-32603: anything else went wrong at the peer."""

    CODE = -32603
    MESSAGE = "Internal error"


class RequestCancelled(_Named):
    """-32800: the request was cancelled by `$/cancel_request` or from inside."""

    CODE = -32800
    MESSAGE = "Request cancelled"


class AuthRequired(_Named):
    """-32000: the agent wants `authenticate` (or a terminal login) first."""

    CODE = -32000
    MESSAGE = "Authentication required"


class ResourceNotFound(_Named):
    """-32002: unknown session, missing file or unknown terminal."""

    CODE = -32002
    MESSAGE = "Resource not found"


_NAMED: dict[int, type[_Named]] = {
    kind.CODE: kind
    for kind in (
        ParseError,
        InvalidRequest,
        MethodNotFound,
        InvalidParams,
        InternalError,
        RequestCancelled,
        AuthRequired,
        ResourceNotFound,
    )
}


class ConnectionClosed(AntiphonError):
    """The link to the peer is gone: every open call fails with this, later calls at once.

    Attributes:
        reason: one short sentence, e.g. "the agent closed its output".
        exit_status: exit code of the peer's process (negative: the signal that ended it), or None
            where it is not a process of ours or has not ended.
        stderr_tail: the last text the process wrote to its standard error ("" if none or unknown).
    """

    def __init__(
        self, reason: str, *, exit_status: int | None = None, stderr_tail: str = ""
    ) -> None:
        super().__init__(reason, exit_status, stderr_tail)
        self.reason = reason
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        text = self.reason
        if self.exit_status is not None:
            text += (
                f" (exit status {self.exit_status})"
                if self.exit_status >= 0
                else f" (ended by signal {-self.exit_status})"
            )
        if self.stderr_tail.strip():
            text += f"; its standard error ends with:\n{self.stderr_tail.strip()}"
        return text


class StartError(ConnectionClosed):
    """The peer never came up: it could not be started, or ended or stayed silent before the handshake.

    Attributes:
        command: the argument list that was to be run ([] if it is not a process).
        timed_out: whether it stayed silent until `Limits.startup_timeout`.
    """

    def __init__(
        self,
        reason: str,
        *,
        command: list[str] | None = None,
        timed_out: bool = False,
        exit_status: int | None = None,
        stderr_tail: str = "",
    ) -> None:
        super().__init__(reason, exit_status=exit_status, stderr_tail=stderr_tail)
        self.command = command or []
        self.timed_out = timed_out


class AttachmentClosed(AntiphonError):
    """The agent sends nothing more of a session that was attached; raised to who iterates over it.

    `session.reattach(…)` may attach it again from `offset + 1`. Its cause, if there is one, is the
    answer that refused the last attempt.

    Attributes:
        session_id: the session.
        reason: "revoked" (the permission to attach has ended), "refused" (another attach was
            refused, or failed again and again), "deleted" (the session is no more), "gap" (records are missing that the agent does not send), "ahead" (more was held
            here than the agent's journal has: it is another journal, or has lost its end), or what
            else the agent said.
        offset: of the last record that came.
    """

    def __init__(self, session_id: str, reason: str, offset: int) -> None:
        super().__init__(session_id, reason, offset)
        self.session_id = session_id
        self.reason = reason
        self.offset = offset

    def __str__(self) -> str:
        return (
            f"session {self.session_id!r} is attached no more ({self.reason});"
            f" the last record was {self.offset}"
        )


class RequestTimeout(AntiphonError, TimeoutError):
    """No answer came in time; `$/cancel_request` was sent and a late answer will be ignored.

    Attributes:
        method: wire name of the request.
        seconds: how long was waited.
    """

    def __init__(self, method: str, seconds: float) -> None:
        # One argument: a TimeoutError is an OSError, which takes two for errno and strerror.
        super().__init__((method, seconds))
        self.method = method
        self.seconds = seconds

    def __str__(self) -> str:
        return f"no answer to {self.method} within {self.seconds:g} s"


class SilenceTimeout(RequestTimeout):
    """In an open turn no update came, and no request of the agent was open, for too long.

    The turn was cancelled. `seconds` is how long a silence may be.
    """

    def __str__(self) -> str:
        return f"no sign of life in {self.method} for {self.seconds:g} s"


class LimitExceeded(AntiphonError):
    """One of the limits of `antiphon.Limits` was met.

    Attributes:
        limit: the field name of the limit, e.g. "frame_bytes".
        maximum: its value.
        size: what was met, in the same unit; a lower bound where counting stopped early.
    """

    def __init__(self, limit: str, maximum: float, size: float | None = None) -> None:
        super().__init__(limit, maximum, size)
        self.limit = limit
        self.maximum = maximum
        self.size = size

    def __str__(self) -> str:
        met = "" if self.size is None else f" ({self.size})"
        return f"limit {self.limit} of {self.maximum} exceeded{met}"


class CapabilityError(AntiphonError):
    """The peer did not advertise what this call needs; nothing was sent.

    Attributes:
        method: wire name of the call.
        capability: the missing path, e.g. "agentCapabilities.loadSession".
    """

    def __init__(self, method: str, capability: str) -> None:
        super().__init__(method, capability)
        self.method = method
        self.capability = capability

    def __str__(self) -> str:
        return f"{self.method} needs {self.capability}, which the peer did not advertise"


class DeliveryGap(AntiphonError):
    """Fewer or more updates were delivered than received.

    Raised where a turn ends whose updates were let go, because its session was being closed while the
    connection's budget was spent (DESIGN §4.4). Anywhere else it is an internal alarm: please report it.

    Attributes:
        session_id: the session.
        delivered: how many a consumer got.
        expected: how many there were.
    """

    def __init__(self, session_id: str, delivered: int, expected: int) -> None:
        super().__init__(session_id, delivered, expected)
        self.session_id = session_id
        self.delivered = delivered
        self.expected = expected

    def __str__(self) -> str:
        return (
            f"{self.delivered} of {self.expected} updates of session "
            f"{self.session_id!r} were delivered"
        )


class JournalError(AntiphonError):
    """A journal could not be read or written: no space, no permission, closed, another format.

    Attributes:
        reason: what is wrong, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class JournalInUse(JournalError):
    """A session cannot be appended to here, because somebody else does.

    Attributes:
        session_id: the session.
        owner: who has it, in words, e.g. "process 4711".
    """

    def __init__(self, session_id: str, owner: str) -> None:
        super().__init__(f"session {session_id!r} is written by {owner}")
        self.session_id = session_id
        self.owner = owner


class JournalDamaged(JournalError):
    """What is stored is not what was appended.

    Attributes:
        file: name of the damaged file.
        session_id: the session, None where the damage cannot be assigned.
        offset: the first damaged record, None where it cannot be told.
    """

    def __init__(
        self, file: str, reason: str, *, session_id: str | None = None, offset: int | None = None
    ) -> None:
        place = file
        if session_id is not None:
            place += f", session {session_id!r}"
        if offset is not None:
            place += f", record {offset}"
        super().__init__(f"{place}: {reason}")
        self.file = file
        self.session_id = session_id
        self.offset = offset


class TurnHeld(JournalError):
    """A turn was begun, or completed, by somebody who does not hold the session's turn.

    Attributes:
        session_id: the session.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the turn of session {session_id!r} is held by another")
        self.session_id = session_id


class MissingExtra(AntiphonError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        extra: what to install, e.g. "cli" for `pip install "antiphon[cli]"`.
    """

    def __init__(self, extra: str, feature: str) -> None:
        super().__init__(extra, feature)
        self.extra = extra
        self.feature = feature

    def __str__(self) -> str:
        return f'{self.feature} needs an extra: pip install "antiphon[{self.extra}]"'
