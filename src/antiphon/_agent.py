"""`Agent`: what an agent author subclasses."""

from __future__ import annotations

import os
import re
import sys
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from antiphon._capabilities import Capabilities, agent_tree, as_capabilities
from antiphon._errors import InvalidParams, MethodNotFound
from antiphon._handlers import AgentHandlers
from antiphon.schema import UNSET, v1, v1_unstable
from antiphon.sessions import Turn, find_extensions
from antiphon.sessions._methods import PROTOCOL_VERSION, allowed_by, table, tree_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from antiphon.journal import Journal
    from antiphon.sessions import AgentContext, Durability, Extensions

__all__ = ["Agent", "DurableAgent"]


class Agent(AgentHandlers):
    """An agent: override `prompt`, and whatever else yours can do.

    ::

        class Echo(Agent):
            async def prompt(self, turn: Turn) -> None:
                await turn.say(f"echo: {turn.text}")

    Handlers are named after the request type in snake case (`new_session`, `load_session`,
    `set_session_mode`, …) and take `(self, params, ctx)`; `ctx` is an `AgentContext`. Overriding one
    advertises what it implies; what is not overridden is not advertised and answered -32601. A handler
    answers with an error by raising `RequestError`; the text of any other exception stays here, in the
    log. Requests run concurrently, each in a task of its own; one turn per session at a time.

    One instance may serve many connections; state of a connection belongs into its sessions.

    Attributes:
        info: name and version, sent as `agentInfo`; None sends the class's name and "0".
        capabilities: what overriding cannot express.
    """

    info: ClassVar[tuple[str, str] | v1.Implementation | None] = None
    capabilities: ClassVar[Capabilities] = Capabilities()

    async def prompt(self, turn: Turn) -> str | v1.PromptResponse | None:
        """Answer one prompt; the turn's verbs stream what happens.

        Returns None for "end_turn", a stop reason, or a `PromptResponse`. Once `turn.cancelled` is
        set the answer is "cancelled" whatever is returned or raised (R1-95, R1-96).
        """
        del turn
        raise MethodNotFound("session/prompt")

    async def initialize(
        self, params: v1_unstable.InitializeRequest, ctx: AgentContext
    ) -> v1.InitializeResponse:
        """Agree on the version and advertise (R1-23..R1-26, R1-40). Seldom overridden."""
        unstable = ctx.peer.unstable
        signing_in_a_terminal = allowed_by(tree_of(params.client_capabilities), "auth.terminal")
        methods = [
            method
            for method in self.capabilities.auth_methods
            if signing_in_a_terminal or not isinstance(method, v1.AuthMethodTerminal)
        ]
        return v1_unstable.InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_capabilities=self.advertised(unstable=unstable),
            agent_info=_implementation(self.info, type(self).__name__),
            auth_methods=methods or UNSET,
        )

    async def new_session(
        self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        """Open a session: by default a random id, with the declared modes and options (R1-47)."""
        del params, ctx
        return v1_unstable.NewSessionResponse(
            session_id=uuid.uuid4().hex,
            modes=self.initial_modes() or UNSET,
            config_options=self.initial_config_options() or UNSET,
        )

    async def set_session_mode(
        self, params: v1_unstable.SetSessionModeRequest, ctx: AgentContext
    ) -> v1.SetSessionModeResponse:
        """Change the mode; by default served for the declared modes.

        The state is kept per session (`ctx.session().modes`); unknown modes are refused before
        (R1-119), and every mode in a session whose answer named none.
        """
        if ctx.session().modes is None:
            raise InvalidParams({"modeId": params.mode_id}, "unknown or unavailable mode")
        return v1.SetSessionModeResponse()

    async def set_session_config_option(
        self, params: v1_unstable.SetSessionConfigOptionRequest, ctx: AgentContext
    ) -> v1.SetSessionConfigOptionResponse:
        """Change an option; by default served for the declared options.

        They are kept per session (`ctx.session().config_options`); unknown options and values are
        refused before (R1-120, R1-121).
        """
        options = ctx.session().config_options
        if options is None:
            raise InvalidParams({"reason": "unknown config option", "configId": params.config_id})
        return v1_unstable.SetSessionConfigOptionResponse(
            config_options=[
                # The value was checked against the option's own kind before.
                msgspec.structs.replace(option, current_value=params.value)
                if option.id == params.config_id
                else option
                for option in options
            ]
        )

    async def steer(self, turn: Turn, text: str | None) -> None:
        """Take a new direction in a turn that runs (`_raxol/session.steer`; agents with a journal).

        Called when a steer was accepted: remember the text, and fold it in at the next boundary. Not
        overridden, every steer is answered "no_steer_channel".
        """
        del turn, text
        raise MethodNotFound("_raxol/session.steer")

    # -------------------------------------------------------------- for overriding handlers

    def initial_modes(self) -> v1.SessionModeState | None:
        """A fresh state of the declared modes, for a handler that opens sessions itself."""
        modes = list(self.capabilities.modes)
        if not modes:
            return None
        return v1.SessionModeState(current_mode_id=modes[0].id, available_modes=modes)

    def initial_config_options(self) -> list[v1_unstable.SessionConfigOption]:
        """A fresh copy of the declared options, for a handler that opens sessions itself."""
        from copy import deepcopy  # only who declares options loads it

        return [deepcopy(option) for option in self.capabilities.config_options]

    # -------------------------------------------------------------- for the runtime

    def find_handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]] | None:
        """The handler of that name, or None where it is not implemented."""
        handler: Any = getattr(self, name, None)
        mine: Any = getattr(type(self), name, None)
        if handler is None or mine is getattr(AgentHandlers, name, None):
            return None
        if mine is Agent.set_session_mode and not self.capabilities.modes:
            return None
        if mine is Agent.set_session_config_option and not self.capabilities.config_options:
            return None
        return handler  # type: ignore[no-any-return]

    def extensions(self) -> Extensions:
        """The extension methods by wire name and kind."""
        return find_extensions(self)

    @property
    def steers(self) -> bool:
        """Whether `steer` is implemented."""
        return type(self).steer is not Agent.steer

    def advertised(self, *, unstable: bool) -> v1_unstable.AgentCapabilities:
        """The capabilities to send."""
        tree = agent_tree(
            self.capabilities,
            table().requests["agent"].values(),
            lambda name: self.find_handler(name) is not None,
            unstable=unstable,
        )
        return as_capabilities(v1_unstable.AgentCapabilities, tree)


class DurableAgent(Agent):
    """An agent whose sessions survive: connections, its own process, the machine's next start.

    ::

        class Echo(DurableAgent):
            async def prompt(self, turn: Turn) -> None:
                await turn.say(f"echo: {turn.text}")

    What each turn tells is in a journal before any client sees it. Clients can load, list, resume and
    delete sessions without a handler for that, and those that know the extension (resumable-sessions)
    can attach to one at any record. What a session was told so far is `turn.session.history()`.

    Args:
        journal: where; by default a `SqliteJournal` in the user's state directory, in a folder named
            after the agent. A class may set it as an attribute, too: a `Journal`, or a `Durability`
            that also says who may attach, and as what.
    """

    journal: Journal | Durability | None = None

    def __init__(self, journal: Journal | Durability | None = None) -> None:
        if journal is not None:
            self.journal = journal
        elif self.journal is None:
            from antiphon.journal import SqliteJournal

            self.journal = SqliteJournal(state_directory(self.info, type(self).__name__))


def state_directory(info: tuple[str, str] | v1.Implementation | None, name: str) -> Path:
    """Where an agent keeps its sessions where nothing else is said.

    `$XDG_STATE_HOME/antiphon/NAME` (`~/.local/state` where that is not set), on macOS in
    `~/Library/Application Support`, on Windows in `%LOCALAPPDATA%`.
    """
    from pathlib import Path  # only who keeps files loads it

    known = _implementation(info, name).name
    # A name is no path: what is no letter, digit, dash or dot is written as its number.
    folder = re.sub(
        r"[^A-Za-z0-9.-]|^\.+", lambda odd: "".join(f"_{ord(c):x}" for c in odd[0]), known
    )
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "antiphon" / (folder or "agent")


def _implementation(
    info: tuple[str, str] | v1.Implementation | None, name: str
) -> v1.Implementation:
    if info is None:
        return v1.Implementation(name=name, version="0")
    if isinstance(info, tuple):
        return v1.Implementation(name=info[0], version=info[1])
    return info
