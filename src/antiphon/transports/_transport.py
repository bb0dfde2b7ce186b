"""The contract between what moves frames and what understands them.

A *frame* is one JSON text as bytes, without any line end. A transport knows nothing of its meaning.
The runtime (`runtime.Connection`) is the receiver; tests and proxies may be one too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from antiphon.core import Fault

__all__ = ["Receiver", "Transport"]


class Receiver(Protocol):
    """Who gets the frames. All methods are called on the event loop and must not raise or block."""

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        """Frames that arrived together, in wire order; a `Fault` stands where a frame was refused."""

    def input_ended(self) -> None:
        """The peer will send nothing more, but may still read (end of file on stdin).

        Called at most once, after the last frame and before `connection_lost`. Only a transport whose
        two directions end separately calls it (own stdio); `send` keeps working until the receiver
        closes the transport.
        """

    def connection_lost(self, error: Exception | None) -> None:
        """The peer is gone, or this side closed: called exactly once, and nothing after it.

        `error` is None for an orderly end of input; else why (`ConnectionClosed` with what is known
        of the process, or the OS error).
        """

    def pause_writing(self) -> None:
        """More is buffered than the peer takes: senders that can wait should."""

    def resume_writing(self) -> None:
        """There is room again."""


class Transport(Protocol):
    """Moves frames in both directions, in order, each at most once.

    Laws: frames accepted by `send` arrive in that order or the connection is lost; `connection_lost`
    comes once and is last; `start` is called once, and nothing is delivered before it; after
    `connection_lost` or `aclose`, `send` is a no-op.

    One may also have a property `info`, which says what kind it is and who the peer is, as this end knows
    it and never by the peer's word: `{"kind": "process" | "stdio" | "unix" | "tcp", "peer": None}`, of a
    Unix socket with `{"uid", "gid", "pid"}` and of TCP with `{"host", "port"}` as the peer. Who may attach
    to a session is decided by it; a transport without one is no kind that is trusted.
    """

    async def start(self, receiver: Receiver) -> None:
        """Open and begin to deliver. Raises `StartError` or `OSError`."""

    def send(self, frames: list[bytes]) -> None:
        """Take frames (without line ends) and write as much as possible now, the rest when it can."""

    @property
    def unsent(self) -> int:
        """Bytes that `send` took and the peer has not taken yet, as far as this end can know.

        Between `pause_writing` and `resume_writing` it is what senders that cannot wait pile up.
        """
        ...

    def pause_reading(self) -> None:
        """Deliver nothing more for now; what is buffered below may fill up. Idempotent.

        Once the peer is known to be gone, what it has left (some mebibytes at most) and the end are
        delivered all the same.
        """

    def resume_reading(self) -> None:
        """Undo `pause_reading`. Idempotent."""

    async def aclose(self) -> None:
        """Flush what was sent, close, end what was started. Idempotent, bounded, cancel-safe."""

    def describe(self) -> str:
        """One short phrase for logs and errors, e.g. "stdio" or "process 4711 (my-agent)"."""
        ...
