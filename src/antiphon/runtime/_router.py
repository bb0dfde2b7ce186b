"""What a connection needs to know about methods: for each name, how to decode and whom to call.

Routers are built from the method table by `antiphon.sessions`; this module only fixes their shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.runtime._incoming import InboundCall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from antiphon._errors import ConnectionClosed
    from antiphon.runtime._context import Context
else:
    Protocol = object  # for type checkers alone; a class of it takes five times as long to make

__all__ = ["NoticeRoute", "RequestRoute", "Router"]


class RequestRoute(msgspec.Struct, frozen=True):
    """How one request method is served.

    `decode` and `encode` turn raw parameters into what the handler takes, and what it returns into a
    raw result; `encode` raises `TypeError` for a value that is none. `invoke` runs in a task of its
    own. `accept`, where given, is called in the reader before that task exists, so that what follows
    in the stream already finds its effect; it may raise `RequestError` to refuse at once, and what it
    returns takes the place of the parameters. If it has answered, and has no `withdraw`, no task is made.
    `withdraw` undoes it, where the peer cancels the request before its task begins: it is called in place
    of `invoke`. `at_once`, where given, is asked before all that, with the parameters and the call: True
    if it has answered, and nothing else is to be done.

    `begin`, where given, is called in place of `accept` for a method whose handler takes no context:
    with the parameters, their raw text and the call. `invoke` is then given None for a context.

    `conclude`, where given, is told how `invoke` ended: the parameters, what it has returned, and what it
    has raised or None. Its value is answered, or what it raises; where that takes waiting it returns a
    coroutine. What a side does around each handler needs none of its own that way.
    """

    decode: Callable[[Any], Any]
    invoke: Callable[[Any, Any], Awaitable[Any]]
    encode: Callable[[Any], bytes]
    accept: Callable[[Any, Any], Any] | None = None
    withdraw: Callable[[Any], None] | None = None
    at_once: Callable[[Any, InboundCall], bool] | None = None
    begin: Callable[[Any, Any, InboundCall], Any] | None = None
    conclude: Callable[[Any, Any, BaseException | None], Any] | None = None


class NoticeRoute(msgspec.Struct, frozen=True):
    """How one notification method is served.

    `immediate` is called in the reader and must not block; `handle` runs in wire order, one at a
    time, in the connection's notification task. Exactly one of them is given.
    """

    decode: Callable[[Any], Any]
    immediate: Callable[[Any, Any], None] | None = None
    handle: Callable[[Any, Any], Awaitable[None]] | None = None


class Router(Protocol):
    """The side (agent or client) that a connection serves."""

    def request_route(self, method: str) -> RequestRoute | None:
        """How to serve a request, or None for -32601."""

    def notice_route(self, method: str) -> NoticeRoute | None:
        """How to serve a notification, or None to ignore it."""

    def context(self, method: str, raw: Any, params: Any, call: InboundCall | None) -> Context:
        """What the handler of one request or notification is given besides its parameters."""
        raise NotImplementedError

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        """A `session/update` in wire order; `update` is raw JSON. Must not raise or block."""

    def updates_received(
        self, session_id: str, updates: Sequence[Any], frames: Sequence[Any]
    ) -> None:
        """Several of one session that came together: the same as `update_received` for each."""
        for update, frame in zip(updates, frames, strict=True):
            self.update_received(session_id, update, frame)

    def cancelled(self, call: InboundCall) -> bool:
        """`$/cancel_request` for `call`: True if the side deals with it, else its task is cancelled."""
        raise NotImplementedError

    def input_ended(self) -> None:
        """The peer sends nothing more: ask what runs to come to its end; it may still answer."""

    def connection_lost(self, error: ConnectionClosed) -> None:
        """The link is gone; every open call was failed already."""
