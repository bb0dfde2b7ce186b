"""What a handler is given besides its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from antiphon._errors import LocalProtocolError
from antiphon.runtime._reply import Obligation, Reply

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from antiphon.runtime._connection import Connection
    from antiphon.runtime._incoming import InboundCall

__all__ = ["Context"]


class Context:
    """One request or notification being handled.

    Attributes:
        method: its wire name.
        session_id: the session its parameters name, or "".
        rx_seq: position of its frame among all that came on this connection, from 1: what came
            earlier has a smaller one, of whatever kind it was. 0 in `session_update`: what an update
            has passed on its way is not counted for each.
    """

    __slots__ = ("call", "connection", "method", "raw_params", "rx_seq", "session_id")

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
        self.rx_seq = 0 if call is None else call.rx_seq

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

    def defer(self, adopter: asyncio.Task[Any] | None = None) -> Reply:
        """Answer later: the handler then returns `antiphon.DEFERRED`, and whoever has the reply sends it.

        ::

            async def read_text_file(self, params, ctx):
                self.reads.put_nowait((params, ctx.defer()))
                return DEFERRED

        Until then the request counts as being handled. A handler that raises after this answers with
        that error, and the reply is void.

        Args:
            adopter: who will answer. When it ends without having done so, the request is answered
                -32603, or -32800 if the peer has cancelled it.

        Raises:
            LocalProtocolError: it is a notification, or deferred or answered already.
        """
        call = self.call
        if call is None or call.deferred is not None or call.answered:
            what = (
                "has no answer"
                if call is None
                else "is answered already"
                if call.answered
                else "is deferred already"
            )
            msg = f"{self.method} {what}"
            raise LocalProtocolError(msg)
        call.deferred = obligation = Obligation(self.connection, call)
        if adopter is not None:
            obligation.adopted_by(adopter)
        return Reply(obligation)

    @property
    def roots(self) -> Sequence[str]:
        """Absolute directories of the session: its `cwd` first, then the additional ones."""
        return ()

    def after_response(self, act: Callable[[], object]) -> None:
        """Run `act` once the response is queued for the wire: for what must follow it.

        An awaitable it returns runs in a task of the connection. On a notification, and when the
        response is queued already, `act` runs at once. Not run if the request ends with an error.
        """
        if self.call is None or self.call.followed:
            self.connection.run_soon(act)
        elif self.call.after is None:
            self.call.after = [act]
        else:
            self.call.after.append(act)
