"""What a handler is given besides its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.runtime._connection import Connection, InboundCall

__all__ = ["Context"]


class Context:
    """One request or notification being handled.

    Attributes:
        method: its wire name.
        session_id: the session its parameters name, or "".
    """

    __slots__ = ("call", "connection", "method", "raw_params", "session_id")

    def __init__(
        self,
        connection: Connection,
        method: str,
        session_id: str,
        raw: Any,
        call: InboundCall | None,
    ) -> None:
        self.connection = connection
        self.method = method
        self.session_id = session_id
        #: The same as `raw`, not copied: `msgspec.Raw`, or None where the peer sent none.
        self.raw_params = raw
        self.call = call

    @property
    def raw(self) -> bytes:
        """The parameters' own bytes as they came, unknown members and `_meta` included.

        `b"{}"` where the peer sent none.
        """
        return b"{}" if self.raw_params is None else bytes(self.raw_params)

    @property
    def cancelled(self) -> bool:
        """Whether the peer asked to cancel this request (`$/cancel_request`)."""
        return self.call is not None and self.call.cancelled

    @property
    def roots(self) -> Sequence[str]:
        """Absolute directories of the session: its `cwd` first, then the additional ones."""
        return ()

    def after_response(self, act: Callable[[], Awaitable[None] | None]) -> None:
        """Run `act` once the response is queued for the wire: for what must follow it.

        An awaitable it returns runs in a task of the connection. On a notification `act` runs at
        once after the handler. Not run if the request ends with an error.
        """
        if self.call is None:
            self.connection.run_soon(act)
        else:
            self.call.after.append(act)
