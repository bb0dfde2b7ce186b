"""What makes an agent durable: its journal, who may attach, and what all its connections share.

Responsible for the options, for the turns that are open in this process (whichever connection they
came by), and for tasks that outlive a connection. Leaves one session on one connection to
`_durable_link`, messages to `_durable_router`, records to `journal`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import msgspec

from antiphon._errors import InvalidRequest, LimitExceeded, TurnHeld
from antiphon.journal import (
    SESSION_UPDATE,
    STEER,
    AttachContext,
    Denied,
    Entry,
    Grant,
    Journal,
    LocalNode,
    Policy,
    Writers,
    admit,
)
from antiphon.schema import encode_checked, v1
from antiphon.sessions._turn_states import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from antiphon.sessions._durable_link import DurableLink
    from antiphon.sessions._turn import Turn
    from antiphon.transports import Transport

__all__ = ["Durability", "Role", "Roles"]

log = logging.getLogger("antiphon.journal")

Role: TypeAlias = Literal["controller", "observer"]
Roles: TypeAlias = "Mapping[str, Role] | Callable[[Grant, AttachContext], Role | None]"

#: How often, and for how many seconds, what does not end is asked to.
_PATIENCE = 5
#: What a steer's record is longer than its request's parameters, at most.
_STEER_BYTES = 512
#: How many sessions that nobody has open are remembered for what was accepted in them.
_STEERED = 1024
#: Links that end with their process: what runs for them has nobody left.
_OF_A_PROCESS = frozenset(("stdio", "process", None))


class Durability:
    """How an agent keeps its sessions; give it, or a plain `Journal`, as `journal=`.

    ::

        serve_stdio(MyAgent(), journal=Durability(SqliteJournal("sessions"), prompts=False))

    Everything that is served with the same object (or the same journal) shares its sessions: one writer
    and one open turn a session, whichever connection it came by.

    Args:
        journal: where records are kept. It stays the caller's to close; `serve_stdio` closes it.
        policy: decides who may attach, load, resume, list and delete, also where the agent has handlers
            of its own for that; None stands for `LocalNode()`: who reaches the agent from this
            machine's own user, by pipes or a Unix socket. There is no policy that lets everybody in.
        roles: what somebody who was let in may do, by the `id` of the grant's actor, or a function of
            (grant, context). A "controller" prompts, cancels and changes; an "observer" looks on. It is
            local configuration and never taken from a token.
        default_role: of whom `roles` does not name.
        surface: the name of this place, which tokens may be bound to.
        credit: how many records a subscriber may be behind before it is told that it lags.
        policy_timeout: seconds in which the policy has to decide.
        prompts: whether the blocks of each prompt are journaled as `user_message_chunk` records, so that
            a standard `session/load` replays both sides of the conversation (R1-52).
        outlive: whether an open turn goes on when its connection is lost. None: where others can attach
            to the session (sockets), but not where the process ends with the connection (stdio).
        idle: seconds after which a session without a turn, and that nobody asked about, is let go of on
            its connection, and its writer with it: the journal stays, and the client loads it again.
            None: never.
        clock: seconds since 1970; for the expiry of grants.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        policy: Policy | None = None,
        roles: Roles | None = None,
        default_role: Role = "controller",
        surface: str = "unknown",
        credit: int = 1024,
        policy_timeout: float = 5.0,
        prompts: bool = True,
        outlive: bool | None = None,
        idle: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.journal = journal
        self.policy: Policy = LocalNode() if policy is None else policy
        self.clock = clock
        self.idle = idle
        self.writers = Writers(journal, credit=credit, on_event=self._report)
        self._roles = roles
        self._default_role: Role = default_role
        self._surface = surface
        self._policy_timeout = policy_timeout
        self._prompts = prompts
        self._outlive = outlive
        #: Every connection's link to a session, by the session's id.
        self._links: dict[str, list[DurableLink]] = {}
        #: The open turn of a session, and what it may be steered by.
        self._turns: dict[str, _OpenTurn] = {}
        self._steers: dict[str, _Steers] = {}
        #: Sessions that are being deleted: no turn begins in them.
        self.deleting: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Durability on {self.journal!r}>"

    @classmethod
    def of(cls, journal: Journal | Durability) -> Durability:
        """The one of a journal: everything served with that journal shares it."""
        if isinstance(journal, Durability):
            return journal
        found = _SHARED.get(id(journal))
        if found is None:
            found = _SHARED[id(journal)] = cls(journal)
        return found

    # -------------------------------------------------------------- life

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that no connection ends; `aclose` does."""
        task = asyncio.Task(work, loop=asyncio.get_running_loop())
        # The loop itself does not keep tasks alive, and a connection that is gone keeps nothing.
        _BUSY.add(self)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            _BUSY.discard(self)
        if not task.cancelled() and task.exception() is not None:
            # Its connection has told the operator, or was gone by then.
            log.debug("a turn ended with an error", exc_info=task.exception())

    async def flush(self, seconds: float) -> None:
        """Wait until nothing is left of connections that are gone: their writers are closed.

        A journal that takes longer (a disk that hangs) goes on by itself, which is logged.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.writers.settled()
        except TimeoutError:
            log.warning("what a client's sessions told is still being written after %g s", seconds)

    async def aclose(self) -> None:
        """End the turns that outlived their connections, and make durable what they told. Idempotent.

        A turn that ignores its cancellation for a few seconds is left behind, which is logged.
        """
        for _ in range(_PATIENCE):
            if not self._tasks:
                break
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1.0)
        else:
            log.warning("%d turns do not end, and are left behind", len(self._tasks))
        await self.writers.aclose()

    def outlives(self, transport: Transport) -> bool:
        """Whether a turn that came by this transport goes on without it."""
        if self._outlive is not None:
            return self._outlive
        info: Any = getattr(transport, "info", None)
        kind: Any = cast("Mapping[str, Any]", info).get("kind") if info else None
        return kind not in _OF_A_PROCESS

    # -------------------------------------------------------------- sessions and turns

    def add(self, link: DurableLink) -> None:
        """A connection has the session open."""
        self._links.setdefault(link.session_id, []).append(link)

    def forget(self, link: DurableLink) -> None:
        """It has it no more; an open turn of it keeps the writer."""
        links = self._links.get(link.session_id)
        if links is not None and link in links:
            links.remove(link)
            if not links:
                del self._links[link.session_id]
                self._forget_steers()
        self.writers.leave(link.session_id, link)

    def _forget_steers(self) -> None:
        """Keep what was accepted in sessions that nobody has open in bounds: the oldest goes."""
        if len(self._steers) <= _STEERED:
            return
        for session_id in self._steers:
            if session_id not in self._links and session_id not in self._turns:
                del self._steers[session_id]
                return

    def links(self, session_id: str) -> Sequence[DurableLink]:
        """The links of all connections to a session."""
        return tuple(self._links.get(session_id, ()))

    def prompt_entries(
        self, blocks: Sequence[Any], check: Callable[[bytes], None] | None = None
    ) -> list[Entry]:
        """What is journaled of a prompt besides its beginning.

        A block that fits into its prompt may be too large for the frame of an update, by a few bytes: a
        text is kept in pieces then, and anything else is left out, which is logged.

        Args:
            blocks: the prompt's.
            check: raises `LimitExceeded` for an update that is too large to be told.
        """
        if not self._prompts:
            return []
        entries: list[Entry] = []
        waiting = list(reversed(blocks))
        while waiting:
            block = waiting.pop()
            update = encode_checked(v1.UserMessageChunk(content=block))
            try:
                if check is not None:
                    check(update)
            except LimitExceeded as error:
                text: str = getattr(block, "text", "") if isinstance(block, v1.TextContent) else ""
                if len(text) > 1:
                    middle = len(text) // 2
                    pieces = text[middle:], text[:middle]
                    waiting += [msgspec.structs.replace(block, text=piece) for piece in pieces]
                else:
                    log.warning("a block of a prompt is not kept: %s", error)
                continue
            entries.append(Entry(SESSION_UPDATE, update, "user"))
        return entries

    def turn_begun(self, link: DurableLink, turn: Turn, turn_id: int) -> None:
        """A turn runs; it holds the latch of its session, where that has a writer."""
        self._turns[link.session_id] = _OpenTurn(link, turn, turn_id)

    def turn_over(self, link: DurableLink, turn: Turn) -> None:
        """It does no more."""
        found = self._turns.get(link.session_id)
        if found is not None and found.turn is turn:
            del self._turns[link.session_id]

    def open_turn(self, session_id: str) -> Turn | None:
        """The turn that is open in this process, whichever connection it came by."""
        found = self._turns.get(session_id)
        return None if found is None else found.turn

    def check_free(self, session_id: str) -> None:
        """Refuse a second turn, also where the first has lost its writer and so its latch.

        Raises:
            TurnHeld: there is one.
            InvalidRequest: the session is being deleted.
        """
        if session_id in self._turns:
            raise TurnHeld(session_id)
        if session_id in self.deleting:
            raise InvalidRequest({"sessionId": session_id}, "the session is being deleted")

    def in_turn(self, session_id: str, but: object) -> bool:
        """Whether a prompt is open, on a connection other than that of the peer `but`."""
        found = self._turns.get(session_id)
        if found is not None and found.link.session.peer is not but:
            return True
        return any(
            link.session.turn is not None
            for link in self._links.get(session_id, ())
            if link.session.peer is not but
        )

    async def delete(self, session_id: str, but: object) -> bool:
        """Delete a session, and forget it on all connections but that of the peer `but`.

        Cancelled, it goes on by itself: until it is done, no turn begins in the session.

        Returns:
            Whether there was one.

        Raises:
            JournalInUse: another process writes it.
            JournalError: the store cannot be written.
        """
        return await asyncio.shield(self.create_task(self._delete(session_id, but)))

    async def _delete(self, session_id: str, but: object) -> bool:
        deleting = self.deleting
        deleting[session_id] = deleting.get(session_id, 0) + 1
        try:
            deleted = await self.writers.delete(session_id)
        finally:
            deleting[session_id] -= 1
            if not deleting[session_id]:
                del deleting[session_id]
        # One that is made under its id knows nothing of it.
        self._steers.pop(session_id, None)
        for link in self.links(session_id):
            peer = link.session.peer
            if deleted and peer is not but:
                peer.forget_session(link.session)
        return deleted

    def keep(self, link: DurableLink, update: Any) -> None:
        """Another mode, or other options: the session's, so those of every connection's view of it."""
        for other in self._links.get(link.session_id, ()):
            if other is not link:
                other.keep(update)

    def cancel(self, session_id: str) -> None:
        """`session/cancel` by a connection that did not send the prompt."""
        found = self._turns.get(session_id)
        if found is not None:
            found.link.session.fire(Event.CANCEL)

    # -------------------------------------------------------------- who may

    def context(
        self, session_id: str, transport: Transport, *, capability: Any = None, from_offset: int = 0
    ) -> AttachContext:
        """What the policy is asked about. Nothing of it but the capability comes from the frame."""
        return AttachContext(
            session_id=session_id,
            actor=None,
            surface=self._surface,
            capability=capability,
            from_offset=from_offset,
            transport=getattr(transport, "info", None),
        )

    async def admit(self, context: AttachContext) -> Grant | Denied:
        """Ask the policy: the single way in."""
        return await admit(self.policy, context, timeout=self._policy_timeout)

    def role_of(self, grant: Grant, context: AttachContext) -> Role:
        """What somebody who was let in may do; what `roles` makes no sense of may look on."""
        roles = self._roles
        if roles is None:
            return self._default_role
        if callable(roles):
            try:
                role = roles(grant, context)
            except Exception:
                log.exception("roles= failed; somebody who was let in may only look on")
                return "observer"
        else:
            role = roles.get(grant.actor["id"])
        if role is None:
            return self._default_role
        return role if role in ("controller", "observer") else "observer"

    # -------------------------------------------------------------- steering

    async def steer(
        self,
        session_id: str,
        params: SteerParams,
        take: Callable[[Turn, str | None], Any] | None,
    ) -> dict[str, Any]:
        """Decide a steer, in this step, and journal one that is accepted (resumable-sessions §10).

        Args:
            session_id: the session.
            params: what was asked.
            take: given the open turn and the text where it is accepted; None where there is no such
                channel.
        """
        if take is None:
            return {"outcome": "no_steer_channel"}
        steers = self._steers.get(session_id) or _Steers()
        key = None if params.client_msg_id is None else _digest(params.client_msg_id)
        content = _digest([params.text, params.expected_turn_id])
        if key is not None and key in steers.seen:
            before, answer = steers.seen[key]
            if before == content:
                return {**answer, "outcome": "duplicate"}
            return {"outcome": "client_msg_id_reuse"}
        found = self._turns.get(session_id)
        if found is None or found.turn.cancelled:
            return {"outcome": "no_live_turn"}
        actual = found.token
        if not _same(params.expected_turn_id, actual):
            return {
                "outcome": "stale",
                "expectedTurnId": params.expected_turn_id,
                "actualTurnId": actual,
            }
        # The record says a little more than the request did.
        found.link.check_frame(len(encode_checked(params)) + _STEER_BYTES)
        self._steers[session_id] = steers
        steers.count += 1
        found.steered += 1
        answer = {
            "outcome": "accepted",
            "turnId": actual,
            "offset": steers.count,
            "clientMsgId": params.client_msg_id,
        }
        if key is not None:
            steers.seen[key] = (content, answer)
        writer = found.link.writer
        payload = {
            "turnId": actual,
            "offset": steers.count,
            "payload": {"clientMsgId": params.client_msg_id, "text": params.text},
        }
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if writer is None:
            done.set_result(None)
        else:
            entry = Entry(STEER, encode_checked(payload), "user")
            writer.submit(
                entry, lambda _: None if done.done() else done.set_result(None), flush=True
            )

        async def hand() -> None:
            await done
            await take(found.turn, params.text)

        # Accepted is accepted: whoever asked may give up waiting, or be gone.
        await asyncio.shield(self.create_task(hand()))
        return answer

    # -------------------------------------------------------------- telemetry

    def _report(self, name: str, facts: dict[str, Any]) -> None:
        """An event of a writer, told by the connections that have its session."""
        session = str(facts["session"])
        for link in self.links(session):
            connection = link.connection
            if connection.closed:
                continue
            if name == "journal.writer_failed":
                connection.emit(
                    "journal.writer_failed",
                    session=session,
                    error=facts["error"],
                    lost=facts["lost"],
                )
            else:
                connection.emit(
                    "journal.non_holder_turn_completed", session=session, turn=facts["turn"]
                )
            return
        log.warning("%s %s", name, facts)


class SteerParams(msgspec.Struct, rename="camel"):
    """Parameters of `_raxol/session.steer`."""

    session_id: str
    expected_turn_id: Any
    text: str | None = None
    client_msg_id: Any = None

    def __post_init__(self) -> None:
        if self.expected_turn_id is None:
            msg = "expectedTurnId must not be null"
            raise ValueError(msg)


class _OpenTurn:
    """A turn that is open, and how often it was steered."""

    __slots__ = ("link", "steered", "turn", "turn_id")

    def __init__(self, link: DurableLink, turn: Turn, turn_id: int) -> None:
        self.link = link
        self.turn = turn
        self.turn_id = turn_id
        self.steered = 0

    @property
    def token(self) -> int | str:
        """What a steer has to name; another after each that was accepted."""
        return f"{self.turn_id}.{self.steered}" if self.steered else self.turn_id


class _Steers:
    """What was accepted in a session's life: the window in which a repetition is known."""

    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[bytes, tuple[bytes, dict[str, Any]]] = {}


def _digest(value: Any) -> bytes:
    """A JSON value in 16 bytes: what is remembered of texts that may be long."""
    return hashlib.blake2b(encode_checked(value), digest_size=16).digest()


def _same(expected: Any, actual: int | str) -> bool:
    """Equality of JSON values: true is not 1."""
    return type(expected) is type(actual) and expected == actual


#: Those with a task that runs.
_BUSY: set[Durability] = set()
#: By the journal's id, which is its own as long as its `Durability` lives, since that holds it.
_SHARED: weakref.WeakValueDictionary[int, Durability] = weakref.WeakValueDictionary()
