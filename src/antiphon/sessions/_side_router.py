"""What is alike on both sides about serving the peer: from a method's name to its handler.

Responsible for the order of the questions: is it an extension, is it in the method table, was it
offered, is it implemented. Leaves to `AgentRouter` and `ClientRouter` what serving some methods means
beyond calling their handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from antiphon.runtime import NoticeRoute, RequestRoute, deferrable
from antiphon.schema import params_decoder
from antiphon.sessions._extension import extension_routes
from antiphon.sessions._methods import allowed_by, encode_result_of, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Protocol

    from antiphon.core import Side
    from antiphon.schema import Method
    from antiphon.sessions._extension import Extensions
    from antiphon.sessions._peer import Peer
else:
    Protocol = object  # for type checkers alone; a class of it takes five times as long to make

__all__ = ["HandlersLike", "SideRouter", "session_of"]


class HandlersLike(Protocol):
    """What this module needs of an `Agent` or `Client`."""

    def find_handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
        """The handler of that name, or None where it is not implemented."""

    def extensions(self) -> Extensions:
        """The extension methods by wire name and kind."""
        raise NotImplementedError


class SideRouter:
    """Base of the two routers: the first two methods of `runtime.Router`.

    Args:
        side: which one serves.
        peer: whom it serves.
        handlers: what serves.
    """

    def __init__(self, side: Side, peer: Peer, handlers: HandlersLike) -> None:
        self._unstable = peer.unstable
        self._find_handler = handlers.find_handler
        self._requests = table().requests[side]
        self._notifications = table().notifications[side]
        self._extensions = extension_routes(
            handlers.extensions(), lambda: peer.connection.limits.json_depth
        )
        #: What was advertised, as builtins: only that is served (R1-9).
        self._offered: Any = {}
        self._routes: dict[str, RequestRoute] = {}

    def request_route(self, method: str) -> RequestRoute | None:
        route = self._routes.get(method)
        if route is not None:
            return route
        if method.startswith("_"):
            return self._extensions.requests.get(method)
        row = self._requests.get(method)
        handler = None if row is None else self._handler_of(row)
        # Nothing is remembered of names that the peer makes up, nor of what is not offered yet.
        if row is not None and handler is not None:
            # What a side does with a result it does with one that comes later, too.
            plain = RequestRoute(
                params_decoder(row.params), deferrable(handler), encode_result_of(row)
            )
            route = self._routes[method] = self._served(method, plain)
        return route

    def notice_route(self, method: str) -> NoticeRoute | None:
        if method.startswith("_"):
            return self._extensions.notices.get(method)
        row = self._notifications.get(method)
        handler = None if row is None else self._handler_of(row)
        if row is None or handler is None:
            return None
        return NoticeRoute(params_decoder(row.params), handle=handler)

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        """What serving this method means beyond calling its handler."""
        raise NotImplementedError

    def _handler_of(self, row: Method) -> Callable[[Any, Any], Awaitable[Any]] | None:
        if not row.stable and not self._unstable:
            return None
        if not allowed_by(self._offered, row.gate):
            return None
        return self._find_handler(row.handler)


def session_of(params: Any) -> str:
    """The id of the session that parameters name, or ""; an extension's are plain JSON."""
    # Asked for each request, so not what an abstract class would have to be asked.
    session_id: object = getattr(params, "session_id", None)
    if session_id is None and isinstance(params, Mapping):
        session_id = cast("Mapping[str, Any]", params).get("sessionId")
    return session_id if isinstance(session_id, str) else ""
