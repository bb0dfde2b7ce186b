"""What a side offers: told by what it overrides, and by `Capabilities` for what that cannot express."""

from __future__ import annotations

# At run time, too: a struct's signature is made from its annotations.
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from antiphon.schema import decode, encode_checked, v1, v1_unstable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.schema import Method

__all__ = ["Capabilities"]

T = TypeVar("T", v1_unstable.AgentCapabilities, v1_unstable.ClientCapabilities)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The `capabilities` of an `Agent` or `Client`; merged with what overriding a handler implies.

    For agents: `image`, `audio`, `embedded_context` (content of prompts), `mcp_http`, `mcp_sse`,
    `additional_directories`, `auth_methods`, `modes` and `config_options` (given to each session
    whose handler leaves them absent in its answer; `session/set_mode` and
    `session/set_config_option` are then answered by the library).
    For clients: `elicitation_form`, `elicitation_url`, `boolean_config_options`, `notices`,
    `compaction`, `terminal_auth`, and with `unstable=True` `plan` and `subagents`.
    For both: `meta`, the `_meta` of the capability object, where extensions are advertised (R1-154).
    """

    image: bool = False
    audio: bool = False
    embedded_context: bool = False
    mcp_http: bool = False
    mcp_sse: bool = False
    additional_directories: bool = False
    auth_methods: Sequence[v1_unstable.AuthMethod] = ()
    modes: Sequence[v1.SessionMode] = ()
    config_options: Sequence[v1_unstable.SessionConfigOption] = ()
    elicitation_form: bool = False
    elicitation_url: bool = False
    boolean_config_options: bool = False
    notices: bool = False
    compaction: bool = False
    terminal_auth: bool = False
    plan: bool = False
    subagents: bool = False
    meta: dict[str, Any] | None = None


#: Which path in the wire's capability tree each field sets, and whether with true or an object.
_AGENT: dict[str, tuple[str, Any]] = {
    "image": ("promptCapabilities.image", True),
    "audio": ("promptCapabilities.audio", True),
    "embedded_context": ("promptCapabilities.embeddedContext", True),
    "mcp_http": ("mcpCapabilities.http", True),
    "mcp_sse": ("mcpCapabilities.sse", True),
    "additional_directories": ("sessionCapabilities.additionalDirectories", {}),
}
_CLIENT: dict[str, tuple[str, Any]] = {
    "elicitation_form": ("elicitation.form", {}),
    "elicitation_url": ("elicitation.url", {}),
    "boolean_config_options": ("session.configOptions.boolean", {}),
    "notices": ("session.notices", {}),
    "compaction": ("session.compaction", {}),
    "terminal_auth": ("auth.terminal", True),
}
_CLIENT_UNSTABLE: dict[str, tuple[str, Any]] = {
    "plan": ("plan", {}),
    "subagents": ("subagents", {}),
}

#: Gates whose value is a boolean on the wire; all others are objects.
_BOOLEAN_GATES = frozenset(
    ("loadSession", "fs.readTextFile", "fs.writeTextFile", "terminal", "mcpCapabilities.acp")
)
#: Gates that a handler alone does not open: which mode a client takes must be said.
_DECLARED_GATES = frozenset(("elicitation", "elicitation.url"))


def agent_tree(
    declared: Capabilities,
    rows: Iterable[Method],
    implements: Callable[[str], bool],
    *,
    unstable: bool,
) -> dict[str, Any]:
    """An agent's capabilities as the wire's tree."""
    tree = _implied(rows, implements, unstable=unstable)
    _declare(tree, declared, _AGENT)
    return tree


def client_tree(
    declared: Capabilities,
    rows: Iterable[Method],
    implements: Callable[[str], bool],
    *,
    unstable: bool,
) -> dict[str, Any]:
    """A client's capabilities as the wire's tree."""
    tree = _implied(rows, implements, unstable=unstable)
    _declare(tree, declared, _CLIENT)
    if not implements("create_elicitation"):  # modes of nothing
        tree.pop("elicitation", None)
    if unstable:
        _declare(tree, declared, _CLIENT_UNSTABLE)
    return tree


def as_capabilities(kind: type[T], tree: dict[str, Any]) -> T:
    """The wire struct of a tree that was made here: what `decode` would make of its JSON.

    A decoder of all that can be advertised takes half a millisecond to make, and each agent that
    starts would need it once.
    """
    if "_meta" in tree:  # what a user gave: any JSON, or none
        return decode(kind, encode_checked(tree))
    made: T = _built(kind, tree)
    return made


def _built(kind: Any, tree: dict[str, Any]) -> Any:
    members: dict[str, Any] = {}
    for name, wire in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        if wire in tree:
            value = tree[wire]
            members[name] = value if value is True else _built(_struct_of(kind, name), value)
    return kind(**members)


def _struct_of(kind: type, name: str) -> Any:
    """The struct that a member holds."""
    annotation = next(
        base.__annotations__[name] for base in kind.__mro__ if name in base.__annotations__
    )
    return next(choice for choice in get_args(annotation) if issubclass(choice, msgspec.Struct))


def _implied(
    rows: Iterable[Method], implements: Callable[[str], bool], *, unstable: bool
) -> dict[str, Any]:
    """The gates of which every method is implemented: one open gate promises all of them."""
    gates: dict[str, bool] = {}
    for row in rows:
        if row.gate is None or row.gate in _DECLARED_GATES or (not row.stable and not unstable):
            continue
        gates[row.gate] = gates.get(row.gate, True) and implements(row.handler)
    tree: dict[str, Any] = {}
    for gate, open_ in gates.items():
        if open_:
            _set(tree, gate, gate in _BOOLEAN_GATES or {})
    return tree


def _declare(
    tree: dict[str, Any], declared: Capabilities, paths: dict[str, tuple[str, Any]]
) -> None:
    for name, (path, value) in paths.items():
        if getattr(declared, name):
            _set(tree, path, value)
    if declared.meta is not None:
        tree["_meta"] = declared.meta


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    if not isinstance(tree.get(last), dict):
        tree[last] = {} if isinstance(value, dict) else value
