"""What one connection may cost, with the reason for each number. Every refusal names its field."""

from __future__ import annotations

import math

import msgspec

MIB = 1 << 20

__all__ = ["Limits"]


#: What may be None. The other limits keep a peer from taking all memory or time.
_OPTIONAL = frozenset(
    {"request_timeout", "startup_timeout", "permission_timeout", "silence_timeout"}
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one connection; pass a changed copy as `limits=Limits(frame_bytes=…)`.

    Sizes are bytes, times are seconds, None is "no limit" where the type allows it.
    """

    #: One frame, either direction, without its line end. Real agents send half-megabyte frames;
    #: the TypeScript SDK stops at 32 MiB.
    frame_bytes: int = 16 * MIB
    #: Nested arrays and objects in what is kept untyped; typed decoding bounds itself.
    json_depth: int = 256
    #: Requests of the peer being handled at once; one more is answered -32603 "Server busy".
    inbound_requests: int = 1000
    #: Their frames, together: a thousand questions of 16 MiB, which wait for a person, would be 16 GiB.
    #: One alone is always handled.
    inbound_bytes: int = 64 * MIB
    #: Sessions known on one connection.
    sessions: int = 1000
    #: Undelivered updates of all sessions together, in frame bytes. When it is spent, reading
    #: stops until something is consumed, so the sender feels it.
    queue_bytes: int = 64 * MIB
    #: The same, counted in updates: small ones cost more memory than their frames have bytes.
    queue_updates: int = 32_768
    #: Undelivered updates of one session. Above it the session is reported as full, once; as long as
    #: the two limits above hold, nothing else happens.
    session_updates: int = 4096
    #: The same in frame bytes.
    session_bytes: int = 16 * MIB
    #: Updates that arrive for a session not yet known.
    unknown_session_updates: int = 256
    #: Notifications of the peer (updates are none of them) that wait for their handlers, which run one
    #: at a time. Above it reading stops, so the sender feels it, for `notification_timeout` at most.
    queue_notifications: int = 4096
    #: The same in frame bytes.
    notification_bytes: int = 16 * MIB
    #: A handler that keeps as many waiting for as long: then reading goes on and what comes is let go.
    notification_timeout: float = 10.0
    #: Output that the peer has not taken. Above it further requests are answered -32603 "Server busy";
    #: above twice as much the connection is closed: the peer asks and does not read.
    unsent_bytes: int = 64 * MIB
    #: An answer to any request but `session/prompt` and those of `permission_timeout`; None waits for
    #: ever.
    request_timeout: float | None = 60.0
    #: From starting the peer to its answer to `initialize`.
    startup_timeout: float | None = 60.0
    #: An answer that a person may have to give: a permission (a later one counts as denied), a form,
    #: a login, a file or a command to be lent.
    permission_timeout: float | None = 600.0
    #: How long an open turn may give no sign of life: no update of its session, and no request of the
    #: agent for it that waits for us.
    silence_timeout: float | None = None
    #: From `session/cancel` to the hard cancellation of the turn's tasks.
    cancel_backstop: float = 30.0
    #: Handlers that are still running at close get this long after being cancelled.
    close_grace: float = 2.0

    def __post_init__(self) -> None:
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int and (type(value) is not float or type(default) is int):
                kind = "an integer" if type(default) is int else "a number"
                msg = f"Limits.{name} must be {kind}, not {value!r}"
                raise TypeError(msg)
            if not (0 < value < math.inf or (value == 0 and name == "cancel_backstop")):
                msg = f"Limits.{name} must be positive and finite, not {value!r}"
                raise ValueError(msg)
