"""What a connection tells its operator: one table of events, a hook, and one named logger.

Responsible for the names, kinds and facts of events, for the log line of each (`antiphon.telemetry`,
with `acp_event` and `acp_facts` on the record), and for the guard around a user's hook. Leaves to
whoever emits one when that is; nothing here runs for an update that is delivered as it should be.

Facts are enough to act on and never more: no content of frames beyond a short beginning of what was no
message, no text of an exception that a handler raised (the log record has its traceback, the hook does
not).

Source: runtime-semantics §18, and what the table adds to it.
"""

from __future__ import annotations

import logging
from logging import DEBUG, ERROR, INFO, WARNING
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from antiphon._errors import ENDING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EVENTS", "EventSpec", "Telemetry", "TelemetryEvent", "shown_id", "shown_text"]

#: "invariant": only a mistake in this program can cause it. "peer": what the other program did.
#: "operational": what an operator may want to count, or to change a limit for.
Kind = Literal["invariant", "peer", "operational"]

log = logging.getLogger("antiphon.telemetry")

#: How much of a method's name, or of a decoder's complaint, is told.
_TEXT_CHARACTERS = 256
#: How much of an id, which may have kilobytes.
_ID_BYTES = 64


class TelemetryEvent(msgspec.Struct, frozen=True):
    """Something that an operator may want to know of; what `telemetry=` is called with.

    Attributes:
        name: one of the names in `docs/reference/telemetry.md`.
        kind: "invariant", "peer" or "operational".
        facts: what is known, by name; plain strings, numbers, booleans and None.
    """

    name: str
    kind: Kind
    facts: dict[str, Any]


class EventSpec(msgspec.Struct, frozen=True):
    """One row of the table: what an event says in the log, at which level, with which facts."""

    kind: Kind
    level: int
    says: str
    facts: tuple[str, ...] = ()


EVENTS: Final[dict[str, EventSpec]] = {
    # requests of the peer
    "duplicate_inflight_id": EventSpec(
        "peer", WARNING, "dropped a request whose id is in flight already", ("id", "method")
    ),
    "inbound_shed": EventSpec(
        "operational",
        WARNING,
        "refused a request: server busy",
        ("id", "method", "reason", "limit"),
    ),
    "handler_crash": EventSpec(
        "operational", ERROR, "a handler failed", ("what", "method", "error")
    ),
    "dup_reply": EventSpec(
        "invariant", ERROR, "a deferred request was replied to a second time", ("id", "method")
    ),
    # notifications of the peer
    "unknown_notification": EventSpec(
        "peer", DEBUG, "ignored a notification", ("method", "reason")
    ),
    "undecodable_notification": EventSpec(
        "peer", WARNING, "dropped a notification that cannot be decoded", ("method", "reason")
    ),
    "notification_shed": EventSpec(
        "operational",
        WARNING,
        "dropped a notification: its handlers do not keep up",
        ("method", "waiting", "limit"),
    ),
    # frames that are no message, or no message for us
    "invalid_request_frame": EventSpec(
        "peer", WARNING, "refused a frame", ("id", "reason", "limit", "size", "method")
    ),
    "parse_error": EventSpec(
        "peer",
        WARNING,
        "refused a frame that cannot be read",
        ("reason", "begins", "limit", "size", "method"),
    ),
    "noise": EventSpec("peer", INFO, "ignored what is no message", ("begins",)),
    "dispatch_failed": EventSpec("invariant", ERROR, "a frame could not be dispatched", ("error",)),
    # answers of the peer
    "late_response": EventSpec("peer", DEBUG, "ignored a response to no open call", ("id",)),
    "malformed_response": EventSpec("peer", WARNING, "a response is malformed", ("id", "reason")),
    # Some clients answer every update so, and go on (quirk 6): no line for each in a usual log.
    "refused_by_peer": EventSpec(
        "peer", INFO, "the peer could not read something of ours", ("error",)
    ),
    "call_timed_out": EventSpec(
        "operational", INFO, "a call was not answered in time", ("method", "seconds")
    ),
    # flow
    "reading_paused": EventSpec(
        "operational", DEBUG, "reading stops", ("queued_bytes", "queued_updates")
    ),
    "reading_resumed": EventSpec(
        "operational", DEBUG, "reading goes on", ("queued_bytes", "queued_updates")
    ),
    "calls_over_budget": EventSpec(
        "operational",
        WARNING,
        "calls fail: their answers are behind more than may wait",
        ("calls", "queued_bytes", "limit"),
    ),
    "peer_not_reading": EventSpec(
        "operational",
        WARNING,
        "the peer does not take what is written",
        ("unsent_bytes", "limit", "closed"),
    ),
    # the end
    "connection_lost": EventSpec(
        "operational", INFO, "the connection ended", ("reason", "exit_status")
    ),
    "task_left_behind": EventSpec(
        "operational", ERROR, "a task ignores cancellation and is left behind", ("task",)
    ),
    # sessions
    "delivery": EventSpec(
        "operational",
        DEBUG,
        "an update was queued for its turn, or updates were lost on their way to a consumer",
        ("session", "turn", "decision", "buffered", "ordinal", "delivered", "expected"),
    ),
    # journal and attach
    "attach.granted": EventSpec(
        "operational", INFO, "somebody was let in to a session", ("session", "surface", "via")
    ),
    "attach.denied": EventSpec(
        "operational",
        WARNING,
        "somebody was not let in to a session",
        ("session", "surface", "reason", "detail"),
    ),
    "journal.not_durable": EventSpec(
        "operational", ERROR, "what a session tells is not journaled", ("session", "error")
    ),
    "journal.writer_failed": EventSpec(
        "operational", ERROR, "a session's journal cannot be written", ("session", "error", "lost")
    ),
    "session_idle_reaped": EventSpec(
        "operational", INFO, "let go of a session that nobody uses", ("session",)
    ),
    "journal.non_holder_turn_completed": EventSpec(
        "operational", WARNING, "a turn was completed by who does not hold it", ("session", "turn")
    ),
    "empty_chunk_rejected": EventSpec(
        "operational", DEBUG, "an empty chunk was not sent", ("session",)
    ),
    # An invariant in raxol; here a handler that says nothing is allowed to.
    "zero_updates_turn": EventSpec(
        "operational", INFO, "a turn ended without any update", ("session", "stop_reason")
    ),
    "session_full": EventSpec(
        "operational",
        WARNING,
        "updates of a session wait and nobody takes them",
        ("session", "updates", "bytes"),
    ),
    "updates_discarded": EventSpec(
        "operational", INFO, "updates were not taken", ("session", "updates")
    ),
    "update_shed": EventSpec(
        "operational",
        WARNING,
        "dropped updates of sessions not known here",
        ("session", "lost"),
    ),
    # attached sessions, at the client
    "session_attached": EventSpec(
        "operational", INFO, "a session was attached", ("session", "offset", "high_watermark")
    ),
    "attach_failed": EventSpec(
        "operational", WARNING, "a session could not be attached", ("session", "offset", "error")
    ),
    "attachment_gap": EventSpec(
        "operational",
        WARNING,
        "records of an attached session are missing; it is attached again behind the last that came",
        ("session", "offset", "next"),
    ),
    "attachment_lagged": EventSpec(
        "operational",
        INFO,
        "the agent did not wait for us; the session is attached again behind the last that came",
        ("session", "offset"),
    ),
    "attachment_ahead": EventSpec(
        "operational",
        WARNING,
        "more of a session was held here than its journal has; it is read from the start",
        ("session", "offset", "high_watermark"),
    ),
    "attachment_closed": EventSpec(
        "operational", WARNING, "a session is attached no more", ("session", "offset", "reason")
    ),
    "turn_orphaned": EventSpec(
        "operational",
        WARNING,
        "the agent ended in the middle of a turn, which counts as cancelled",
        ("session", "offset"),
    ),
    "reattach_unsupported": EventSpec(
        "operational", INFO, "the agent attaches no sessions", ("session", "reason")
    ),
    "link_lost": EventSpec(
        "operational", WARNING, "the link is gone, and another is made", ("reason", "sessions")
    ),
    "link_attempt_failed": EventSpec(
        "operational", INFO, "an attempt to make another link failed", ("attempt", "error")
    ),
    "link_made": EventSpec("operational", INFO, "another link was made", ("attempts", "sessions")),
    "link_given_up": EventSpec(
        "operational", ERROR, "no other link could be made", ("attempts", "error")
    ),
}


class Telemetry:
    """Emits events: to the log, and to a user's hook if there is one.

    Args:
        hook: called with each `TelemetryEvent`, on the event loop; must not block. What it raises is
            logged, and nothing else comes of it.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[TelemetryEvent], None] | None) -> None:
        self.hook = hook

    def emit(
        self,
        name: str,
        *,
        cause: BaseException | None = None,
        level: int | None = None,
        **facts: Any,
    ) -> None:
        """Log one of `EVENTS`, and hand it to the hook.

        Args:
            name: which one.
            cause: gives the log record its traceback; the hook is not told of it.
            level: of the log record, where it is worse than the table has it.
            facts: what is known; those that the table lists for the event, or some of them.
        """
        spec = EVENTS[name]
        if level is None:
            level = spec.level
        if log.isEnabledFor(level):
            told = ", ".join(f"{key}={value!r}" for key, value in facts.items())
            log.log(
                level,
                "%s%s",
                spec.says,
                f" ({told})" if told else "",
                exc_info=cause,
                extra={"acp_event": name, "acp_facts": facts},
            )
        if self.hook is None:
            return
        try:
            self.hook(TelemetryEvent(name, spec.kind, facts))
        except ENDING:
            raise
        except BaseException:
            log.exception("the function given as telemetry= failed")


def shown_text(text: str) -> str:
    """A text that the peer has made, such as a method's name, as far as it is told."""
    return text if len(text) <= _TEXT_CHARACTERS else text[:_TEXT_CHARACTERS]


def shown_id(raw_id: bytes) -> str:
    """A raw id, as far as it is told."""
    return raw_id[:_ID_BYTES].decode("utf-8", "replace")
