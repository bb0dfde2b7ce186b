"""What is advertised: what overriding implies, what is declared, and every combination of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import Agent, Capabilities, Client
from antiphon._capabilities import agent_tree, as_capabilities, client_tree
from antiphon.schema import decode, encode, v1_unstable
from antiphon.sessions._methods import allowed_by, table
from tests.sessions.pairs import joined

if TYPE_CHECKING:
    from collections.abc import Callable

AGENT_ROWS = list(table().requests["agent"].values())
CLIENT_ROWS = list(table().requests["client"].values())


def implementing(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def of_agent(*handlers: str, unstable: bool = False, **declared: Any) -> dict[str, Any]:
    made = implementing(*handlers)
    return agent_tree(Capabilities(**declared), AGENT_ROWS, made, unstable=unstable)


def of_client(*handlers: str, unstable: bool = False, **declared: Any) -> dict[str, Any]:
    made = implementing(*handlers)
    return client_tree(Capabilities(**declared), CLIENT_ROWS, made, unstable=unstable)


def test_nothing_is_offered_by_default() -> None:
    assert of_agent() == {}
    assert of_client() == {}


@pytest.mark.covers("R1-23")
@pytest.mark.parametrize(
    ("handler", "tree"),
    [
        ("load_session", {"loadSession": True}),
        ("list_sessions", {"sessionCapabilities": {"list": {}}}),
        ("resume_session", {"sessionCapabilities": {"resume": {}}}),
        ("close_session", {"sessionCapabilities": {"close": {}}}),
        ("delete_session", {"sessionCapabilities": {"delete": {}}}),
        ("logout", {"auth": {"logout": {}}}),
        ("new_session", {}),
        ("authenticate", {}),
        ("set_session_mode", {}),
        ("fork_session", {}),
    ],
)
def test_a_handler_of_an_agent_opens_its_own_gate(handler: str, tree: dict[str, Any]) -> None:
    assert of_agent(handler) == tree


@pytest.mark.parametrize(
    ("handlers", "tree"),
    [
        (("fork_session",), {"sessionCapabilities": {"fork": {}}}),
        (("session_status",), {"sessionCapabilities": {"status": {}}}),
        (("set_session_title",), {"sessionCapabilities": {"title": {}}}),
        (("auth_status",), {"auth": {"status": {}}}),
        # One word for several methods is given only when all of them are there.
        (("archive_session",), {}),
        (("archive_session", "unarchive_session"), {"sessionCapabilities": {"archive": {}}}),
        (("list_providers", "set_provider"), {}),
        (("list_providers", "set_provider", "disable_provider"), {"providers": {}}),
    ],
)
def test_unstable_gates_open_on_unstable_connections_only(
    handlers: tuple[str, ...], tree: dict[str, Any]
) -> None:
    assert of_agent(*handlers, unstable=True) == tree
    assert of_agent(*handlers) == {}


TERMINAL = (
    "create_terminal",
    "terminal_output",
    "wait_for_terminal_exit",
    "kill_terminal",
    "release_terminal",
)


def test_a_client_s_gates_open_each_on_their_own_terminals_all_together() -> None:
    assert of_client("read_text_file") == {"fs": {"readTextFile": True}}
    assert of_client("write_text_file") == {"fs": {"writeTextFile": True}}
    assert of_client(*TERMINAL) == {"terminal": True}
    for missing in TERMINAL:
        assert of_client(*(name for name in TERMINAL if name != missing)) == {}


@pytest.mark.parametrize(
    ("declared", "tree"),
    [
        ("image", {"promptCapabilities": {"image": True}}),
        ("audio", {"promptCapabilities": {"audio": True}}),
        ("embedded_context", {"promptCapabilities": {"embeddedContext": True}}),
        ("mcp_http", {"mcpCapabilities": {"http": True}}),
        ("mcp_sse", {"mcpCapabilities": {"sse": True}}),
        ("additional_directories", {"sessionCapabilities": {"additionalDirectories": {}}}),
    ],
)
def test_what_an_agent_declares_has_its_place(declared: str, tree: dict[str, Any]) -> None:
    assert of_agent(**{declared: True}) == tree
    assert of_client(**{declared: True}) == {}  # and means nothing at the other side


@pytest.mark.parametrize(
    ("declared", "tree"),
    [
        ("boolean_config_options", {"session": {"configOptions": {"boolean": {}}}}),
        ("notices", {"session": {"notices": {}}}),
        ("compaction", {"session": {"compaction": {}}}),
        ("terminal_auth", {"auth": {"terminal": True}}),
    ],
)
def test_what_a_client_declares_has_its_place(declared: str, tree: dict[str, Any]) -> None:
    assert of_client(**{declared: True}) == tree
    assert of_agent(**{declared: True}) == {}


def test_drafts_are_declared_on_unstable_connections_only() -> None:
    assert of_client(plan=True, subagents=True) == {}
    assert of_client(plan=True, subagents=True, unstable=True) == {"plan": {}, "subagents": {}}


@pytest.mark.covers("R1-128")
def test_a_mode_of_elicitation_needs_both_the_word_and_the_handler() -> None:
    assert of_client("create_elicitation") == {}
    assert of_client(elicitation_form=True, elicitation_url=True) == {}
    assert of_client("create_elicitation", elicitation_form=True) == {"elicitation": {"form": {}}}
    assert of_client("create_elicitation", elicitation_url=True) == {"elicitation": {"url": {}}}


@pytest.mark.covers("R1-154")
def test_extensions_are_advertised_beside_the_rest() -> None:
    meta = {"example.com": {"steer": True}}
    assert of_agent("load_session", meta=meta) == {"loadSession": True, "_meta": meta}
    assert of_client(meta=meta) == {"_meta": meta}


HANDLERS = (
    "load_session",
    "list_sessions",
    "resume_session",
    "close_session",
    "delete_session",
    "logout",
    "session_status",
)
FLAGS = tuple(
    name for name in Capabilities.__struct_fields__ if getattr(Capabilities(), name) is False
)


@pytest.mark.covers("R1-29")
@given(
    handlers=st.sets(st.sampled_from(HANDLERS)),
    flags=st.sets(st.sampled_from(FLAGS)),
    lent=st.sets(st.sampled_from(("read_text_file", "write_text_file", "create_elicitation"))),
    unstable=st.booleans(),
)
async def test_every_combination_is_understood_by_the_other_side(
    handlers: set[str], flags: set[str], lent: set[str], unstable: bool
) -> None:
    async def handler(self: Any, params: Any, ctx: Any) -> Any:
        raise AssertionError

    declared = Capabilities(**cast("Any", dict.fromkeys(flags, True)))
    agent: Any = type("A", (Agent,), dict.fromkeys(handlers, handler) | {"capabilities": declared})
    client: Any = type("C", (Client,), dict.fromkeys(lent, handler) | {"capabilities": declared})
    async with joined(agent(), client(), unstable=unstable) as (peer, wire):
        sent = wire.sent("initialize")[0]["clientCapabilities"]
        answered = wire.answers()[0]["result"]["agentCapabilities"]
        assert sent == client_tree(declared, CLIENT_ROWS, lent.__contains__, unstable=unstable)
        assert answered == agent_tree(
            declared, AGENT_ROWS, handlers.__contains__, unstable=unstable
        )
        for path in _paths(answered):
            assert peer.offers(path)
        assert peer.offers("loadSession") is ("load_session" in handlers)


@given(
    handlers=st.sets(st.sampled_from([row.handler for row in (*AGENT_ROWS, *CLIENT_ROWS)])),
    flags=st.sets(st.sampled_from(FLAGS)),
    meta=st.sampled_from((None, {}, {"vendor": {"x": [1, None]}})),
    unstable=st.booleans(),
)
def test_the_structs_of_a_tree_are_what_its_json_decodes_to(
    handlers: set[str], flags: set[str], meta: dict[str, Any] | None, unstable: bool
) -> None:
    declared = Capabilities(**cast("Any", dict.fromkeys(flags, True)), meta=meta)
    for_agent = agent_tree(declared, AGENT_ROWS, handlers.__contains__, unstable=unstable)
    for_client = client_tree(declared, CLIENT_ROWS, handlers.__contains__, unstable=unstable)

    agent = as_capabilities(v1_unstable.AgentCapabilities, for_agent)
    client = as_capabilities(v1_unstable.ClientCapabilities, for_client)
    assert agent == decode(v1_unstable.AgentCapabilities, encode(for_agent))
    assert client == decode(v1_unstable.ClientCapabilities, encode(for_client))
    assert msgspec.to_builtins(agent) == for_agent
    assert msgspec.to_builtins(client) == for_client


def test_what_a_user_adds_is_read_as_any_json_is() -> None:
    """What is shared with the user's own could change later, and what is no JSON is told at once."""
    meta: dict[str, Any] = {"vendor": {}}
    tree = of_agent(meta=meta)
    made = as_capabilities(v1_unstable.AgentCapabilities, tree)
    assert made.meta == meta
    assert made.meta is not meta
    with pytest.raises(ValueError, match="NaN"):
        as_capabilities(v1_unstable.AgentCapabilities, of_agent(meta={"x": float("nan")}))


def _paths(tree: Any, head: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [head]
    found = [head] if head else []
    for name, value in tree.items():  # pyright: ignore[reportUnknownVariableType]
        found += _paths(value, f"{head}.{name}" if head else str(name))  # pyright: ignore[reportUnknownArgumentType]
    return found


def test_a_gate_is_open_for_true_and_for_any_object_only() -> None:
    values: list[tuple[Any, bool]] = [
        (True, True),
        ({}, True),
        ({"x": None}, True),
        (False, False),
        (None, False),
        (0, False),
        (1, False),
        ("yes", False),
        ([], False),
    ]
    for value, is_open in values:
        assert allowed_by({"a": {"b": value}}, "a.b") is is_open
    assert not allowed_by({}, "a.b")
    assert not allowed_by({"a": True}, "a.b")
    assert allowed_by({}, None)


def test_no_path_is_misspelt() -> None:
    """Everything at once comes back from the types whole: what has no place there would be lost."""
    declared = Capabilities(**cast("Any", dict.fromkeys(FLAGS, True)))
    everything = agent_tree(declared, AGENT_ROWS, lambda _: True, unstable=True)
    decoded = decode(v1_unstable.AgentCapabilities, encode(everything))
    assert msgspec.to_builtins(decoded) == everything
    for row in AGENT_ROWS:
        assert allowed_by(everything, row.gate), row.name

    everything = client_tree(declared, CLIENT_ROWS, lambda _: True, unstable=True)
    client = decode(v1_unstable.ClientCapabilities, encode(everything))
    assert msgspec.to_builtins(client) == everything
    for row in CLIENT_ROWS:
        assert allowed_by(everything, row.gate), row.name


def test_capabilities_are_frozen_and_named() -> None:
    with pytest.raises(AttributeError):
        Capabilities().image = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        Capabilities(smell=True)  # type: ignore[call-arg]
