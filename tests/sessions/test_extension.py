"""Extension methods: how they are marked, found and routed."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from antiphon import extension
from antiphon.sessions._extension import ExtensionRoutes, extension_routes, find_extensions


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Handlers:
    @extension("_demo/any")
    async def any_value(self, params: Any, ctx: Any) -> Any:
        return params

    @extension("_demo/point", params=Point)
    async def point(self, params: Point, ctx: Any) -> Point:
        return params

    @extension("_demo/told", kind="notification")
    async def told(self, params: Any, ctx: Any) -> None:
        return None

    async def unmarked(self) -> None:
        return None


def routes_of(handlers: object, depth: int = 256) -> ExtensionRoutes:
    return extension_routes(find_extensions(handlers), lambda: depth)


def test_marked_methods_are_found_by_wire_name_and_kind() -> None:
    assert set(find_extensions(Handlers())) == {
        ("_demo/any", "request"),
        ("_demo/point", "request"),
        ("_demo/told", "notification"),
    }


def test_a_name_without_underscore_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="starts with an underscore"):
        extension("demo/any")


def test_one_name_may_be_asked_and_told() -> None:
    class Both:
        @extension("_demo/x")
        async def asked(self, params: Any, ctx: Any) -> str:
            return "asked"

        @extension("_demo/x", kind="notification")
        async def told(self, params: Any, ctx: Any) -> None:
            return None

    routes = routes_of(Both())
    assert set(routes.requests) == {"_demo/x"}
    assert set(routes.notices) == {"_demo/x"}


def test_an_overriding_method_replaces_the_marked_one() -> None:
    class Mine(Handlers):
        @extension("_demo/any")
        async def any_value(self, params: Any, ctx: Any) -> Any:
            return "mine"

    found = find_extensions(Mine())
    assert cast("Any", found["_demo/any", "request"][1]).__func__ is Mine.any_value


def test_parameters_are_plain_values_or_of_the_declared_type() -> None:
    routes = routes_of(Handlers()).requests
    assert routes["_demo/any"].decode(msgspec.Raw(b'{"a":[1]}')) == {"a": [1]}
    assert routes["_demo/any"].decode(None) is None
    assert routes["_demo/point"].decode(msgspec.Raw(b'{"x":1}')) == Point(1)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.x"):
        routes["_demo/point"].decode(msgspec.Raw(b'{"x":"no"}'))


def test_parameters_nested_beyond_the_limit_are_refused() -> None:
    route = routes_of(Handlers()).requests["_demo/any"]
    assert route.decode(msgspec.Raw(b"[" * 256 + b"]" * 256)) is not None
    with pytest.raises(ValueError, match="json_depth"):
        route.decode(msgspec.Raw(b"[" * 257 + b"]" * 257))
    shallow = routes_of(Handlers(), depth=2).requests["_demo/any"]
    assert shallow.decode(msgspec.Raw(b"[[]]")) == [[]]
    with pytest.raises(ValueError, match="json_depth of 2"):
        shallow.decode(msgspec.Raw(b"[[[]]]"))


def test_a_result_may_be_any_json_value_a_struct_or_nothing() -> None:
    encode = routes_of(Handlers()).requests["_demo/any"].encode
    assert encode({"a": None}) == b'{"a":null}'
    assert encode([1]) == b"[1]"
    assert encode(Point(1, 2)) == b'{"x":1,"y":2}'
    assert encode(None) == b"{}"
