"""The agent's view of a session: what it may tell about it, at any time after the session is known."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import TurnOver
from antiphon.schema import UNSET, UnknownUpdate, UnsetType, encode_checked, v1, v1_unstable
from antiphon.sessions._methods import tag_of
from antiphon.sessions._turn import Head, Turn, check_offer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.sessions._client_peer import ClientPeer

__all__ = ["AgentSession"]

#: Updates that tell what a turn does; everything else is about the session and always legal.
_TURN_UPDATES = frozenset(
    (
        "user_message_chunk",
        "agent_message_chunk",
        "agent_thought_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
        "plan_update",
        "plan_removed",
    )
)


class AgentSession:
    """One session at the agent, on one connection.

    Its updates about the session itself may be sent at any time after the reply that made it known;
    what a turn does is sent through `Turn`.

    Attributes:
        session_id: its id.
        cwd: its absolute working directory.
        additional_directories: further absolute roots.
        turn: the open turn, if there is one.
        modes: the modes as last told to the client.
        config_options: the options as last told to the client.
    """

    def __init__(
        self, peer: ClientPeer, session_id: str, cwd: str, additional_directories: Sequence[str]
    ) -> None:
        self.peer = peer
        self.session_id = session_id
        self.cwd = cwd
        self.additional_directories = tuple(additional_directories)
        self.turn: Turn | None = None
        self.modes: v1.SessionModeState | None = None
        self.config_options: list[v1_unstable.SessionConfigOption] | None = None
        #: What is being done to the session as a whole, None if nothing: no prompt is taken then.
        self.busy: str | None = None
        self._tool_calls = 0
        self._tool_calls_of = ""
        self.head = Head(session_id)

    def __repr__(self) -> str:
        return f"<AgentSession {self.session_id!r} in {self.cwd!r}>"

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories."""
        return (self.cwd, *self.additional_directories)

    def new_tool_call_id(self) -> str:
        """An id for a tool call that no other has, nor one of the session's history (R1-101)."""
        if not self._tool_calls:
            self._tool_calls_of = secrets.token_hex(4)
        self._tool_calls += 1
        return f"call_{self._tool_calls_of}_{self._tool_calls}"

    async def update(self, update: v1_unstable.SessionUpdate) -> None:
        """Send an update about the session.

        Raises:
            TurnOver: it tells what a turn does (message, thought, tool, plan) and none is open.
            CapabilityError: the client did not ask for its kind (R1-36..R1-39).
        """
        if self.turn is None and _kind(update) in _TURN_UPDATES:
            raise TurnOver(self.session_id)
        self.send_now(update)
        await self.peer.connection.drain()

    async def commands(self, commands: Sequence[v1.AvailableCommand]) -> None:
        """The slash commands, all of them."""
        await self.update(v1.AvailableCommandsUpdate(available_commands=list(commands)))

    async def set_mode(self, mode_id: str) -> None:
        """The agent changed its mode itself."""
        if self.modes is not None:
            self.modes.current_mode_id = mode_id
        await self.update(v1.CurrentModeUpdate(current_mode_id=mode_id))

    async def set_config_options(self, options: Sequence[v1_unstable.SessionConfigOption]) -> None:
        """The configuration options, all of them, after the agent changed one itself."""
        self.config_options = self.peer.allowed_options(list(options))
        await self.update(v1.ConfigOptionUpdate(config_options=self.config_options))

    async def info(
        self,
        *,
        title: str | None | UnsetType = UNSET,
        updated_at: str | None | UnsetType = UNSET,
    ) -> None:
        """Title and time of change (ISO 8601); None clears, what is not given stays."""
        await self.update(v1.SessionInfoUpdate(title=title, updated_at=updated_at))

    async def usage(
        self, *, used: int, size: int, cost: v1.Cost | tuple[float, str] | None = None
    ) -> None:
        """Tokens in context, size of the window, cost of the session so far (amount, currency)."""
        if isinstance(cost, tuple):
            cost = v1.Cost(amount=cost[0], currency=cost[1])
        await self.update(
            v1.UsageUpdate(used=used, size=size, cost=UNSET if cost is None else cost)
        )

    async def notice(
        self, title: str, *, severity: str = "info", description: str | None = None
    ) -> None:
        """A notice for the user; raises `CapabilityError` where the client takes none."""
        await self.update(
            v1.Notice(
                severity=severity,
                title=title,
                description=UNSET if description is None else description,
            )
        )

    def send_now(self, update: v1_unstable.SessionUpdate) -> None:
        """Queue an update without looking whether a turn is open."""
        peer = self.peer
        if type(update) is v1.ToolCallUpdate:
            # The body of a permission request has no tag: as an update it is its tagged subclass.
            update = v1.ToolCallProgress(**msgspec.structs.asdict(update))
        elif not _kind(update) and not isinstance(update, UnknownUpdate):
            msg = f"{type(update).__name__} is no session update"
            raise TypeError(msg)
        elif isinstance(update, v1.ConfigOptionUpdate):
            options = peer.allowed_options(update.config_options)
            update = msgspec.structs.replace(update, config_options=options)
        check_offer(peer.tree, update)
        frame = self.head.update + encode_checked(update) + b"}}"
        peer.connection.check_frame(len(frame))
        if peer.connection.closed:
            raise peer.connection.lost_error()
        peer.connection.send(frame)

    def cancel(self) -> None:
        """`session/cancel`: no effect without an open turn (a stale one must not hit the next)."""
        turn = self.turn
        if turn is None or turn.cancelled:
            return
        turn.cancel()
        self.peer.arm_backstop(self, turn)


def _kind(update: Any) -> str:
    """The wire tag of a session update, "" for a value of any other type."""
    if type(update) is v1.ToolCallUpdate:
        return "tool_call_update"
    config = getattr(update, "__struct_config__", None)
    return tag_of(update) if config is not None and config.tag_field == "sessionUpdate" else ""
