"""From a method's name to its handler, on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon.schema import v1, v1_unstable
from antiphon.sessions._extension import extension, find_extensions
from antiphon.sessions._side_router import SideRouter, session_of

if TYPE_CHECKING:
    from antiphon.core import Side
    from antiphon.runtime import RequestRoute
    from antiphon.sessions._extension import Extensions


class Everything:
    """A peer and its handlers in one: every handler is there, and answers its parameters."""

    unstable = True

    @extension("_test/ask")
    async def ask(self, params: Any, ctx: Any) -> Any:
        return params

    @extension("_test/tell", kind="notification")
    async def tell(self, params: Any, ctx: Any) -> None: ...

    def find_handler(self, name: str) -> Any:
        return self.ask

    def extensions(self) -> Extensions:
        return find_extensions(self)


class Router(SideRouter):
    served: list[str]

    def offer(self, tree: Any) -> None:
        self._offered = tree

    @property
    def remembered(self) -> set[str]:
        return set(self._routes)

    def _served(self, method: str, route: RequestRoute) -> RequestRoute:
        self.served.append(method)
        return route


def router(side: Side, *, unstable: bool = True) -> Router:
    everything = Everything()
    everything.unstable = unstable
    made = Router(side, cast("Any", everything), everything)
    made.served = []
    return made


@pytest.mark.covers("R1-8", "R1-9")
@pytest.mark.parametrize(
    ("side", "method", "tree"),
    [
        ("agent", "session/load", {"loadSession": True}),
        ("agent", "session/list", {"sessionCapabilities": {"list": {}}}),
        ("client", "fs/read_text_file", {"fs": {"readTextFile": True}}),
        ("client", "terminal/create", {"terminal": True}),
    ],
)
def test_a_request_is_served_once_it_is_offered_and_then_made_only_once(
    side: Side, method: str, tree: Any
) -> None:
    made = router(side)
    assert made.request_route(method) is None
    made.offer(tree)
    route = made.request_route(method)
    assert route is not None
    assert made.request_route(method) is route
    assert made.served == [method]


def test_a_notification_is_served_once_it_is_offered() -> None:
    made = router("agent")
    assert made.notice_route("mcp/message") is None
    made.offer({"mcpCapabilities": {"acp": True}})
    assert made.notice_route("mcp/message") is not None


@pytest.mark.parametrize("method", ["session/fork", "session/archive", "providers/list"])
def test_what_is_unstable_is_served_only_on_a_connection_that_is(method: str) -> None:
    tree: Any = {"sessionCapabilities": {"fork": {}, "archive": {}}, "providers": {}}
    for unstable in (True, False):
        made = router("agent", unstable=unstable)
        made.offer(tree)
        assert (made.request_route(method) is not None) is unstable


def test_names_of_the_other_side_or_of_nobody_are_not_served_and_not_remembered() -> None:
    made = router("agent")
    for method in ("fs/read_text_file", "no/such", "", "_test/nobody", "session/update"):
        assert made.request_route(method) is None
        assert made.notice_route(method) is None
    assert made.remembered == set()


@pytest.mark.parametrize("side", ["agent", "client"])
def test_extensions_are_served_as_what_they_are(side: Side) -> None:
    made = router(side)
    assert made.request_route("_test/ask") is not None
    assert made.notice_route("_test/ask") is None
    assert made.notice_route("_test/tell") is not None
    assert made.request_route("_test/tell") is None


def test_the_session_that_parameters_name() -> None:
    assert session_of(v1.CloseSessionRequest(session_id="s")) == "s"
    assert session_of(v1.LogoutRequest()) == ""
    assert session_of({"session_id": "s"}) == ""
    # Of an elicitation it may be absent.
    asked = v1_unstable.ElicitationUrlMode(
        message="m", url="x:y", elicitation_id="e", request_id="1"
    )
    assert session_of(asked) == ""
