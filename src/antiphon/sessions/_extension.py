"""Extension methods and notifications: names that start with `_` (acp-v1 §18)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from antiphon._errors import LimitExceeded
from antiphon.runtime import NoticeRoute, RequestRoute
from antiphon.schema import decode, encode_checked, json_depth_exceeds

__all__ = ["Extension", "Extensions", "extension", "extension_routes", "find_extensions"]

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

_MARK = "__antiphon_extension__"


class Extension(msgspec.Struct, frozen=True):
    """One extension method: its wire name, whether it is asked or told, its parameters' type."""

    method: str
    kind: Literal["request", "notification"]
    params: Any = Any


#: Extension and bound handler by (wire name, kind).
Extensions = Mapping[tuple[str, str], tuple[Extension, Callable[[Any, Any], Awaitable[Any]]]]


def extension(
    method: str, *, kind: Literal["request", "notification"] = "request", params: Any = Any
) -> Callable[[F], F]:
    """Mark a method of an `Agent` or `Client` as the handler of an extension.

    The handler's signature is `(self, params, ctx)`. `params` are plain JSON values, or a value of
    the msgspec type given as `params=`; the bytes as they came are `ctx.raw`. A request's handler
    returns JSON values, a msgspec struct, or None for `{}`.

    Args:
        method: wire name, beginning with `_` and usually a vendor's name: "_vendor/method".
        kind: "request" or "notification".
        params: what to decode the parameters to; a mismatch is answered -32602.
    """
    if not method.startswith("_"):
        msg = f"an extension method starts with an underscore, not {method!r}"
        raise ValueError(msg)

    def mark(handler: F) -> F:
        setattr(handler, _MARK, Extension(method, kind, params))
        return handler

    return mark


def find_extensions(handlers: object) -> Extensions:
    """The marked methods of an object, by wire name and kind."""
    found: dict[tuple[str, str], tuple[Extension, Callable[[Any, Any], Awaitable[Any]]]] = {}
    for name in dir(type(handlers)):
        mark = getattr(getattr(type(handlers), name, None), _MARK, None)
        if isinstance(mark, Extension):
            found[mark.method, mark.kind] = (mark, getattr(handlers, name))
    return found


class ExtensionRoutes(msgspec.Struct):
    """The routes made from them."""

    requests: dict[str, RequestRoute]
    notices: dict[str, NoticeRoute]


def extension_routes(extensions: Extensions, json_depth: Callable[[], int]) -> ExtensionRoutes:
    """Routes for a connection; `json_depth` is asked when something is decoded."""
    routes = ExtensionRoutes({}, {})
    for (method, kind), (mark, handler) in extensions.items():
        decoder = _decoder(mark.params, json_depth)
        if kind == "request":
            routes.requests[method] = RequestRoute(decoder, handler, _encode_result)
        else:
            routes.notices[method] = NoticeRoute(decoder, handle=handler)
    return routes


def _decoder(params: Any, json_depth: Callable[[], int]) -> Callable[[Any], Any]:
    def decode_params(raw: Any) -> Any:
        if raw is None:
            return None if params is Any else decode(params, b"{}")
        limit = json_depth()
        if json_depth_exceeds(bytes(raw), limit):  # kept untyped, so its depth is ours to bound
            raise ValueError(str(LimitExceeded("json_depth", limit)))
        return decode(params, raw)

    return decode_params


def _encode_result(value: Any) -> bytes:
    return b"{}" if value is None else encode_checked(value)
