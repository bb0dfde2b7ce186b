"""The agent's view of a session: what it may tell about it, and what its turns' states are driven by.

Responsible for carrying out what `_turn_states` decides: telling a turn, arming its back-stop, answering
in a handler's place. Leaves to `AgentRouter` to say which message is which event, and to `Turn` its verbs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon._errors import InvalidRequest, LocalProtocolError, TurnOver
from antiphon.schema import UNSET, UnknownUpdate, UnsetType, encode_checked, v1, v1_unstable
from antiphon.sessions._methods import tag_of
from antiphon.sessions._turn import AS_THEY_ARE, KEPT, TEXTS, Head, Turn, check_offer
from antiphon.sessions._turn_states import Effect, Event, TurnStates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from antiphon.runtime import Connection
    from antiphon.sessions._client_peer import ClientPeer
    from antiphon.sessions._durable_link import DurableLink

__all__ = ["AgentSession"]

log = logging.getLogger("antiphon.agent")

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
#: What a response is longer than its result, its id aside.
_ENVELOPE = len(b'{"jsonrpc":"2.0","id":,"result":}')

#: What a request that comes at the wrong moment is told, as -32600.
_REFUSALS = {
    Effect.REFUSE_IN_FLIGHT: "prompt already in flight",
    Effect.REFUSE_LOADING: "the session is being loaded",
    Effect.REFUSE_CLOSING: "the session is being closed",
}


class AgentSession:
    """One session at the agent, on one connection.

    Its updates about the session itself may be sent at any time after the reply that made it known,
    until it is closed; what a turn does is sent through `Turn`.

    Attributes:
        session_id: its id.
        cwd: its absolute working directory.
        additional_directories: further absolute roots.
        modes: the modes as last told to the client.
        config_options: the options as last told to the client.
    """

    def __init__(
        self, peer: ClientPeer, session_id: str, cwd: str, additional_directories: Sequence[str]
    ) -> None:
        self.peer = peer
        #: What its updates are written to: the connection, or a journal in front of it.
        self.link: Connection | DurableLink = peer.connection
        #: The same where there is a journal.
        self.durable: DurableLink | None = None
        self.session_id = session_id
        self.cwd = cwd
        self.additional_directories = tuple(additional_directories)
        self.modes: v1.SessionModeState | None = None
        self.config_options: list[v1_unstable.SessionConfigOption] | None = None
        #: Where it stands; only `fire` moves it.
        self.states: TurnStates[Turn] = TurnStates()
        self._tool_calls = 0
        self._tool_calls_of = ""
        self.head = Head(session_id, peer.connection.limits.frame_bytes)

    def __repr__(self) -> str:
        return f"<AgentSession {self.session_id!r} in {self.cwd!r}>"

    @property
    def turn(self) -> Turn | None:
        """The open turn, if there is one."""
        return self.states.turn

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories."""
        return (self.cwd, *self.additional_directories)

    def new_tool_call_id(self) -> str:
        """An id for a tool call that no other has, nor one of the session's history (R1-101)."""
        if not self._tool_calls:
            self._tool_calls_of = os.urandom(4).hex()
        self._tool_calls += 1
        return f"call_{self._tool_calls_of}_{self._tool_calls}"

    async def update(self, update: v1_unstable.SessionUpdate) -> None:
        """Send an update about the session.

        Raises:
            TurnOver: it tells what a turn does (message, thought, tool, plan), and no turn is open
                and no history is replayed.
            LocalProtocolError: the session was closed.
            CapabilityError: the client did not ask for its kind (R1-36..R1-39).
        """
        told_by_turn = _kind(update) in _TURN_UPDATES
        self.fire(Event.TURN_UPDATE if told_by_turn else Event.SESSION_UPDATE)
        self.send_now(update)
        await self.link.drain()

    async def commands(self, commands: Sequence[v1.AvailableCommand]) -> None:
        """The slash commands, all of them."""
        await self.update(v1.AvailableCommandsUpdate(available_commands=list(commands)))

    async def set_mode(self, mode_id: str) -> None:
        """The agent changed its mode itself."""
        await self.update(v1.CurrentModeUpdate(current_mode_id=mode_id))

    async def set_config_options(self, options: Sequence[v1_unstable.SessionConfigOption]) -> None:
        """The configuration options, all of them, after the agent changed one itself."""
        await self.update(v1.ConfigOptionUpdate(config_options=list(options)))

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

    async def history(self) -> AsyncIterator[v1_unstable.SessionUpdate | UnknownUpdate]:
        """What the session was told so far, from its journal.

        Prompts, messages, tool calls and all else, oldest first, up to what is durable now; the blocks of the open prompt are among it. Nothing
        where the agent has no journal.

            messages = [update async for update in turn.session.history()]

        Raises:
            JournalDamaged: it cannot be read further.
        """
        if self.durable is not None:
            async for update in self.durable.history():
                yield update

    def cancel(self) -> None:
        """Stop the open turn as a `session/cancel` of the client does; nothing where there is none."""
        self.fire(Event.CANCEL)

    def send_now(self, update: v1_unstable.SessionUpdate) -> None:
        """Queue an update without looking whether a turn is open; an empty text is only counted."""
        if update.__class__ in AS_THEY_ARE:
            self._send(update)
            return
        peer = self.peer
        kind, whole = _kind(update), update
        if type(update) is v1.ToolCallUpdate:
            # The body of a permission request has no tag: as an update it is its tagged subclass.
            update = v1.ToolCallProgress(**msgspec.structs.asdict(update))
        elif kind in TEXTS and _is_empty(update):
            self.empty_text()
            return
        elif not kind and not isinstance(update, UnknownUpdate):
            msg = f"{type(update).__name__} is no session update"
            raise TypeError(msg)
        elif isinstance(update, v1.ConfigOptionUpdate):
            options = peer.allowed_options(update.config_options)
            update = msgspec.structs.replace(update, config_options=options)
        check_offer(peer.tree, update)
        if kind not in KEPT:
            self._send(update)
            return
        self._send(update, whole)
        self.keep(update)

    def _send(self, update: Any, whole: Any = None) -> None:
        """Queue an update as it is; with `whole` that is what a journal keeps in its place."""
        head, body, link = self.head, encode_checked(update), self.link
        frame = head.update + body + b"}}"
        if len(body) > head.sure:
            link.check_frame(len(frame))
        if link.lost is not None:
            raise link.lost_error()
        turn = self.states.turn
        if turn is not None:
            turn.sent += 1
        if whole is None or self.durable is None:
            link.send(frame)
        else:
            self.durable.send(frame, self.durable.whole_of(whole))

    def keep(self, update: Any) -> None:
        """Remember what the client was told, by whichever verb: what it asks for is held against it."""
        if isinstance(update, v1.ConfigOptionUpdate):
            self.config_options = self.peer.allowed_options(update.config_options)
        elif isinstance(update, v1.CurrentModeUpdate) and self.modes is not None:
            self.modes.current_mode_id = update.current_mode_id

    def empty_text(self) -> None:
        """Count an empty text, which is not sent."""
        if self.states.turn is not None:
            self.states.turn.empty += 1
        self.peer.connection.emit("empty_chunk_rejected", session=self.session_id)

    # -------------------------------------------------------------- the turn's states

    def fire(self, event: Event, turn: Turn | None = None) -> tuple[Effect, ...]:
        """Take the step of an event, and do what of its effects is the session's business.

        Returns the effects, for what is the caller's: to run a handler, to answer, not to ask.

        Args:
            event: what happened.
            turn: whose event it is, None for one of the session.

        Raises:
            InvalidRequest: it is a request that comes at the wrong moment.
            TurnOver: it is a verb, and the turn is over.
            LocalProtocolError: it is about a session that was closed.
        """
        states = self.states
        concerned = states.turn if turn is None else turn
        step = states.fire(event, turn)
        if step.duties:
            self.carry_out(step.duties, concerned)
        return step.effects

    def carry_out(self, duties: tuple[Effect, ...], turn: Turn | None) -> None:
        """Do what of a step's effects is the session's business; raises what `fire` does."""
        for duty in duties:
            act = _ACTS.get(duty)
            if act is None:
                raise self._refusal(duty)
            if turn is not None:
                act(turn)

    def _refusal(self, effect: Effect) -> Exception:
        if effect is Effect.REFUSE_OVER:
            return TurnOver(self.session_id)
        if effect is Effect.REFUSE_GONE:
            return LocalProtocolError(f"session {self.session_id!r} was closed")
        return InvalidRequest({"sessionId": self.session_id}, _REFUSALS[effect])

    def backstop_reached(self, turn: Turn) -> None:
        """The time that a cancelled turn had to wind down is up."""
        if Effect.ANSWER_AT_ONCE in self.fire(Event.BACKSTOP, turn):
            log.warning("%r ignored its cancellation; its tasks are cancelled", turn)


def _arm(turn: Turn) -> None:
    """Give a cancelled turn `Limits.cancel_backstop` seconds to come to its end."""
    session = turn.session
    seconds = session.peer.connection.limits.cancel_backstop
    loop = asyncio.get_running_loop()
    turn.backstop = loop.call_later(seconds, session.backstop_reached, turn)


def _answer(turn: Turn) -> None:
    """Answer a cancelled prompt in place of its task, which is cancelled if it has begun."""
    response = cancelled_response(turn)
    call, connection = turn.call, turn.peer.connection
    durable = turn.session.durable
    if durable is not None and durable.completed(turn, response):
        return  # it is answered behind the journal
    if call is not None:
        connection.answer(call, encode_checked(response))


_ACTS: dict[Effect, Callable[[Turn], None]] = {
    Effect.ANSWER_AT_ONCE: _answer,
    Effect.TELL: Turn.tell,
    Effect.ARM: _arm,
    Effect.SEAL: Turn.seal,
    Effect.KILL: Turn.kill,
}


def cancelled_response(turn: Turn) -> v1.PromptResponse:
    """The answer to a cancelled prompt: what its handler says it has used counts all the same.

    Unless that cannot be sent: `cancelled` is the answer whatever happens (R1-96).
    """
    if isinstance(turn.result, v1.PromptResponse):
        response = msgspec.structs.replace(turn.result, stop_reason="cancelled")
        try:
            size = len(encode_checked(response)) + _ENVELOPE
            turn.peer.connection.check_frame(size + (len(turn.call.id) if turn.call else 0))
        except Exception:
            log.exception("what a cancelled turn has used cannot be told")
        else:
            return response
    return v1.PromptResponse(stop_reason="cancelled")


def _is_empty(update: Any) -> bool:
    content = update.content
    return isinstance(content, v1.TextContent) and not content.text


def _kind(update: Any) -> str:
    """The wire tag of a session update, "" for a value of any other type."""
    if type(update) is v1.ToolCallUpdate:
        return "tool_call_update"
    config = getattr(update, "__struct_config__", None)
    return tag_of(update) if config is not None and config.tag_field == "sessionUpdate" else ""
