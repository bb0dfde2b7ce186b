"""The agent's view of a turn: the verbs an agent author thinks in.

A turn belongs to one prompt of one session. It is *open* from the moment the prompt is read until its
response is settled; a cancelled one stays open while it winds down. After that it is *over*, and its
verbs raise `TurnOver` (DESIGN §4.8). What was accepted before is on the wire before the response, since
both go through the same writer. Leaves to `_turn_states` which of these a turn is and what that allows.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec

from antiphon._errors import (
    AntiphonError,
    CapabilityError,
    RequestCancelled,
    ResourceNotFound,
    TurnOver,
)
from antiphon.schema import UNSET, UnsetType, encode, encode_checked, v1, v1_unstable, variants
from antiphon.sessions._content import as_block, blocks_text
from antiphon.sessions._methods import allowed_by, tag_of
from antiphon.sessions._turn_states import Effect, Event

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence
    from types import TracebackType

    from antiphon.runtime import Connection, FutureCall, InboundCall
    from antiphon.sessions._agent_session import AgentSession
    from antiphon.sessions._client_peer import ClientPeer
    from antiphon.sessions._terminal import Terminal

__all__ = ["PermissionAnswer", "ToolCallVerbs", "Turn", "UrlElicitation"]

log = logging.getLogger("antiphon.agent")

Path: TypeAlias = str | os.PathLike[str]
Location: TypeAlias = Path | tuple[Path, int] | v1.ToolCallLocation
PlanItem: TypeAlias = "str | tuple[str, str] | tuple[str, str, str] | v1.PlanEntry"

_ALLOWING = ("allow_once", "allow_always")
# Taken for each question.
_ASK, _USE, _DENY = Event.ASK, Event.USE, Effect.DENY
_encode_text = msgspec.json.Encoder().encode


class PermissionAnswer(msgspec.Struct, frozen=True):
    """What came of `Turn.ask_permission`.

    Attributes:
        option_id: the option that was selected and had been offered, else None.
        allowed: whether that option allows. Everything else is a no: a reject, "cancelled", an option
            that was not offered, an error, a timeout, a lost connection, a cancelled turn (R1-103).
    """

    option_id: str | None
    allowed: bool

    def __bool__(self) -> bool:
        return self.allowed


class UrlElicitation:
    """What came of `Turn.elicit_url`.

    Attributes:
        elicitation_id: its id.
        answer: the client's: accept, decline, cancel, or one of a future kind.
        accepted: whether the user agreed to open the address; everything else is a no.
    """

    def __init__(
        self, peer: ClientPeer, elicitation_id: str, answer: v1_unstable.CreateElicitationResponse
    ) -> None:
        self._peer = peer
        self.elicitation_id = elicitation_id
        self.answer = answer
        self.accepted = isinstance(answer, v1.ElicitationAcceptAction)
        self._completed = False

    def __repr__(self) -> str:
        accepted = "accepted" if self.accepted else "not accepted"
        return f"<UrlElicitation {self.elicitation_id!r}, {accepted}>"

    async def complete(self) -> None:
        """Tell the client that it is done (`elicitation/complete`); also after the turn.

        Sent once, and not at all for an address that was not accepted. Raises `ConnectionClosed`.
        """
        if self._completed or not self.accepted:
            return
        self._completed = True
        await self._peer.notify(
            v1.CompleteElicitationNotification(elicitation_id=self.elicitation_id)
        )


class Turn:
    """One prompt being answered; the argument of `Agent.prompt`.

    The verbs send updates and wait only while the client is too slow to take them. They raise
    `TurnOver` once the turn is over and `ConnectionClosed` when the client is gone.

    Attributes:
        session: the session; its own updates (commands, mode, …) may be sent at any time.
        params: the `PromptRequest`, with everything this class does not name.
        cancelled: whether the client (or the connection) asked to stop. Commands of `run` are killed
            by that, and nothing else is interrupted: look at it between steps, or wait for it with
            `wait_cancelled`. After `Limits.cancel_backstop` seconds the turn's tasks are cancelled and
            it is over.
    """

    # What few turns ever change stands here, and is set in those that do.
    cancelled = False
    #: Empty texts that were asked for and not sent.
    empty = 0
    #: The back-stop's timer, and what the handler raised: the session's business.
    backstop: asyncio.TimerHandle | None = None
    failure: BaseException | None = None
    #: What the response waits for besides the handler.
    subtasks: set[asyncio.Task[Any]] | None = None
    _ended: asyncio.Future[None] | None = None
    _cancel_event: asyncio.Event | None = None
    #: Questions that are open, where there is more than one.
    _asks: set[FutureCall] | None = None
    #: Commands of `run` whose blocks are open: they enter and leave by themselves.
    _commands: set[Terminal] | None = None

    def __init__(
        self,
        session: AgentSession,
        params: v1_unstable.PromptRequest,
        raw: Any,
        call: InboundCall | None,
    ) -> None:
        self.session = session
        self.params = params
        #: The request being answered.
        self.call = call
        self._raw = raw
        self._link = session.link
        self._states = session.states
        self._head = session.head
        # What most turns change. Python 3.11 makes a dictionary for an object that is given attributes
        # later than many of its kind were made without them.
        #: Updates of the session that were sent while this turn was open.
        self.sent = 0
        #: What the handler returned: the session's business.
        self.result: Any = None
        #: The question that is open, where there is only one.
        self._asked: FutureCall | None = None

    def __repr__(self) -> str:
        state = "over" if self.over else "cancelled" if self.cancelled else "open"
        return f"<Turn of session {self.session_id!r}, {state}>"

    # -------------------------------------------------------------- what was asked

    @property
    def peer(self) -> ClientPeer:
        """The client: typed calls, extension calls."""
        return self.session.peer

    @property
    def _connection(self) -> Connection:
        return self.session.peer.connection

    @property
    def over(self) -> bool:
        """Whether its response is settled: nothing of this turn may follow."""
        return self._states.turn is not self

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def text(self) -> str:
        """The text blocks of the prompt, joined by line ends."""
        return blocks_text(self.params.prompt)

    @property
    def blocks(self) -> list[v1.ContentBlock]:
        """The prompt's content blocks."""
        return self.params.prompt

    @property
    def raw(self) -> bytes:
        """The prompt's own bytes as they came, unknown members and `_meta` included."""
        return b"{}" if self._raw is None else bytes(self._raw)

    @property
    def cwd(self) -> str:
        """The session's working directory: base of relative paths (R1-49)."""
        return self.session.cwd

    @property
    def roots(self) -> tuple[str, ...]:
        """`cwd` and the additional directories: what tools should stay within (R1-50)."""
        return self.session.roots

    @property
    def client_capabilities(self) -> v1_unstable.ClientCapabilities:
        """What the client advertised."""
        return self.peer.capabilities

    # -------------------------------------------------------------- updates

    async def send(self, update: v1_unstable.SessionUpdate) -> None:
        """Send any update of this session; an empty text is counted and not sent."""
        if self._states.turn is not self:
            raise TurnOver(self.session_id)
        link = self._link
        if update.__class__ in AS_THEY_ARE:
            # The same as `send_now` does, without a call for each of its steps.
            head, body = self._head, encode_checked(update)
            if len(body) > head.sure:
                link.check_frame(len(head.update) + len(body) + 2)
            if link.lost is not None:
                raise link.lost_error()
            self.sent += 1
            link.send(b"".join((head.update, body, b"}}")))
        else:
            self.session.send_now(update)
        if link.writing_paused:
            await link.drain()

    async def say(self, content: str | v1.ContentBlock, *, message_id: str | None = None) -> None:
        """A chunk of the agent's message. An empty text is counted and not sent (DESIGN §4.8)."""
        if message_id is None and type(content) is str:
            if self._text(self._head.say, content):
                await self._link.drain()
        else:
            await self._chunk(v1.AgentMessageChunk, content, message_id)

    async def think(self, content: str | v1.ContentBlock, *, message_id: str | None = None) -> None:
        """A chunk of the agent's reasoning. An empty text is counted and not sent."""
        if message_id is None and type(content) is str:
            if self._text(self._head.think, content):
                await self._link.drain()
        else:
            await self._chunk(v1.AgentThoughtChunk, content, message_id)

    def _text(self, head: bytes, text: str) -> bool:
        """The hot path: everything but the text was encoded when the session was opened.

        Returns whether the sender should wait for room: no coroutine is made for that each time.
        """
        # What the table says of a turn's update in every state: legal while the turn is the session's.
        if self._states.turn is not self:
            raise TurnOver(self.session_id)
        if not text:
            self.session.empty_text()
            return False
        try:
            body = _encode_text(text)
        except UnicodeEncodeError:
            body = encode(text)  # repairs lone surrogates
        link = self._link
        if len(body) > self._head.sure:
            link.check_frame(len(head) + len(body) + len(_TAIL))
        if link.lost is not None:
            raise link.lost_error()
        self.sent += 1
        link.send(head + body + _TAIL)
        return link.writing_paused

    async def _chunk(
        self,
        kind: type[v1.AgentMessageChunk | v1.AgentThoughtChunk],
        content: str | v1.ContentBlock,
        message_id: str | None,
    ) -> None:
        block = as_block(content)
        await self.send(kind(content=block, message_id=UNSET if message_id is None else message_id))

    async def plan(self, entries: Iterable[PlanItem]) -> None:
        """The whole plan as it is now (R1-87); it replaces the one before.

        An entry is a `PlanEntry`, a text, or a tuple (content, status) or (content, status, priority)
        with "pending", "in_progress", "completed" and "high", "medium", "low".
        """
        if isinstance(entries, str):  # each of its characters would be an entry
            msg = "a plan is a list of entries, not one text"
            raise TypeError(msg)
        await self.send(v1.Plan(entries=[_plan_entry(entry) for entry in entries]))

    async def usage(
        self, *, used: int, size: int, cost: v1.Cost | tuple[float, str] | None = None
    ) -> None:
        """Tokens in context, size of the window, cost of the session so far (amount, currency)."""
        await self.session.usage(used=used, size=size, cost=cost)

    def tool(
        self,
        title: str,
        *,
        kind: v1.ToolKind | UnsetType = UNSET,
        tool_call_id: str | None = None,
        status: v1.ToolCallStatus = "in_progress",
        locations: Sequence[Location] = (),
        content: Sequence[Any] = (),
        raw_input: Any = UNSET,
    ) -> ToolCallVerbs:
        """A tool call, as an async context manager.

        Entering sends `tool_call`; leaving sends status "completed", or "failed" if the block raised
        or the turn was cancelled meanwhile. Inside, use the verbs of `ToolCallVerbs`.

        Args:
            title: what a person sees.
            kind: "read", "edit", "execute", …
            tool_call_id: unique in the session; made up if not given.
            status: "pending" for one that must be permitted first.
            locations: files concerned: a path, (path, line), or `ToolCallLocation`.
            content: what the call shows: texts, content blocks, or tool call content.
            raw_input: the tool's own arguments, any JSON value.
        """
        if tool_call_id is None:
            tool_call_id = self.session.new_tool_call_id()
        call = v1.ToolCall(
            tool_call_id=tool_call_id,
            title=title,
            kind=kind,
            status=status,
            locations=[_location(item) for item in locations] or UNSET,
            content=[_tool_content(item) for item in content] or UNSET,
            raw_input=raw_input,
        )
        return ToolCallVerbs(self, call)

    # -------------------------------------------------------------- questions to the client

    async def ask_permission(
        self,
        tool_call: ToolCallVerbs | v1.ToolCallUpdate | str,
        options: Sequence[v1.PermissionOption] | None = None,
        *,
        timeout: float | None | UnsetType = UNSET,
    ) -> PermissionAnswer:
        """Ask the user, and take everything but a selected allowing option for a no.

        Never raises for what the client does: error, timeout and lost connection are a no. So is a
        turn that is cancelled or over, at once: nothing is asked then, and what was asked before is
        withdrawn (`$/cancel_request`). Cancelling the caller withdraws it, too.

        Args:
            tool_call: what is to be permitted; a text is the title of a call of its own.
            options: what can be chosen; by default allow once, always allow, reject.
            timeout: seconds; UNSET means `Limits.permission_timeout`.
        """
        # A copy, since the answer is held against it; a tuple, which the collector soon leaves alone.
        offered = _OPTIONS if options is None else tuple(options)
        for option in offered:
            if type(option) is not _OPTION:
                _check_type(option, _OPTION, "permission option")
        described = tool_call if type(tool_call) is _CALL else self._described(tool_call)
        try:
            # The same as `_ask` does, without a coroutine of its own.
            if self.session.durable is not None and not await self._told_before():
                return _DENIED
            call = self._put(
                _PERMISSION(  # not kept while the answer is waited for
                    session_id=self.session.session_id,
                    tool_call=described,
                    options=list(offered),
                ),
                timeout,
            )
            if call is None:
                return _DENIED
            try:
                response = self._read(call, _PERMISSION, await call.future)
            except BaseException as error:
                if not self._withdrawn(call, error):
                    raise
                return _DENIED
            finally:
                self._closed(call)
        except AntiphonError as error:
            log.info("a permission request counts as denied: %s", error)
            return _DENIED
        if response is None or not isinstance(response.outcome, v1.SelectedPermissionOutcome):
            return _DENIED
        selected = response.outcome.option_id
        found, allowed = False, True
        for option in offered:
            if option.option_id == selected:
                found = True
                # An id that was given to several options is a yes only if each of them is.
                if option.kind not in _ALLOWING:
                    allowed = False
        if not found:
            log.warning("the client selected an option that was not offered: %r", selected)
            return _DENIED
        return PermissionAnswer(selected, allowed)

    async def _ask(self, params: Any, timeout: float | None | UnsetType = UNSET) -> Any:
        """Ask the user something that ends with the turn; None where it is not to be asked any more."""
        if self.session.durable is not None and not await self._told_before():
            return None
        call = self._put(params, timeout)
        if call is None:
            return None
        try:
            return self._read(call, params.__class__, await call.future)
        except BaseException as error:
            if not self._withdrawn(call, error):
                raise
            return None
        finally:
            self._closed(call)

    async def _told_before(self) -> bool:
        """What was told before a question is seen before; whether it may be asked behind that."""
        # A cancellation meanwhile is one of what is asked: `_put` looks again.
        durable = self.session.durable
        if _DENY in self._states.fire(_ASK, self).effects:
            return False
        if durable is not None:
            await durable.settled()
        return True

    def _put(self, params: Any, timeout: float | None | UnsetType) -> FutureCall | None:
        """Send a question that ends with the turn; None where it is not to be asked any more."""
        # A step that asks nothing of the session.
        if _DENY in self._states.fire(_ASK, self).effects:
            return None
        session = self.session
        call = session.peer.open_question(params, timeout, session.durable)
        if self._asked is None and self._asks is None:
            self._asked = call
            return call
        if self._asks is None:
            self._asks = set()
        if self._asked is not None:
            self._asks.add(self._asked)
            self._asked = None
        self._asks.add(call)
        return call

    def _read(self, call: FutureCall, kind: type[Any], raw: Any) -> Any:
        """The answer, None where the question was withdrawn."""
        # A yes that a cancellation follows before anybody could act on it is none any more.
        if self._asked is call or self._is_open(call):
            return self.session.peer.result_of(kind, raw)
        return None

    def _withdrawn(self, call: FutureCall, error: BaseException) -> bool:
        """Whether a question ended with its turn, and not with an error of its own."""
        if isinstance(error, asyncio.CancelledError):
            self._connection.abandon(call)
        return isinstance(error, RequestCancelled) and not self._is_open(call)

    def _closed(self, call: FutureCall) -> None:
        if self._asked is call:
            self._asked = None
        elif self._asks is not None:
            self._asks.discard(call)

    def _is_open(self, call: FutureCall) -> bool:
        return self._asked is call or (self._asks is not None and call in self._asks)

    def _described(self, tool_call: ToolCallVerbs | v1.ToolCallUpdate | str) -> v1.ToolCallUpdate:
        if isinstance(tool_call, ToolCallVerbs):
            call = tool_call.call
            return v1.ToolCallUpdate(
                tool_call_id=call.tool_call_id,
                title=call.title,
                kind=call.kind,
                status="pending",
                content=call.content,
                locations=call.locations,
                raw_input=call.raw_input,
            )
        if isinstance(tool_call, str):
            return v1.ToolCallUpdate(
                tool_call_id=self.session.new_tool_call_id(), title=tool_call, status="pending"
            )
        return tool_call

    async def read_text_file(
        self, path: Path, *, line: int | None = None, limit: int | None = None
    ) -> str:
        """The text of a file as the client sees it, unsaved changes included.

        Args:
            path: absolute.
            line: first line, from 1.
            limit: number of lines.

        Raises:
            FileNotFoundError: there is no such file (the client answered -32002, in whatever words);
                its `filename` is the path.
            CapabilityError: the client does not lend files (R1-33).
            RequestError: it refused.
            TurnOver: the turn is over.
        """
        path = _path(path)
        self.session.fire(_USE, self)
        params = v1.ReadTextFileRequest(
            session_id=self.session_id,
            path=path,
            line=UNSET if line is None else line,
            limit=UNSET if limit is None else limit,
        )
        try:
            response: v1.ReadTextFileResponse = await self.peer.ask(params)
        except ResourceNotFound as error:
            message = "the client has no such file"
            raise FileNotFoundError(errno.ENOENT, message, path) from error
        return response.content

    async def write_text_file(self, path: Path, content: str) -> None:
        """Write a whole file through the client.

        Args:
            path: absolute.
            content: what is to stand there.

        Raises:
            UnicodeEncodeError: the path or the content has half a surrogate pair, which no client
                could write; nothing was sent.
            CapabilityError: the client does not lend files (R1-33).
            RequestError: it refused.
            TurnOver: the turn is over.
        """
        _check_type(content, str, "text of a file")
        path = _path(path)
        for text in (path, content):
            # On the wire it would become U+FFFD, and that would be written.
            if not text.isascii():
                text.encode()
        self.session.fire(Event.USE, self)
        await self.peer.request(
            v1.WriteTextFileRequest(session_id=self.session_id, path=path, content=content)
        )

    def run(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        output_byte_limit: int | None = None,
        timeout: float | None = None,
    ) -> Terminal:
        """A command in a terminal of the client, as an async context manager that releases it.

            async with turn.run("make", ["test"], timeout=600) as command:
                async for text in command:
                    await turn.say(text)
            print(command.status, command.timed_out)

        Entering raises `CapabilityError` where the client lends none (R1-34), `RequestError` where it
        refuses, `TurnOver` when the turn is over. One that was entered can be used and is released
        whatever has become of the turn (R1-116): also when its block, or entering it, ends with an
        exception or a cancellation. Cancelling the turn kills it.

        Args:
            command: the programme; its arguments are `args`.
            args: arguments, one each.
            cwd: absolute directory; None is the session's.
            env: variables to set.
            output_byte_limit: how much output the client keeps, counted from its end.
            timeout: seconds after which a command that has not ended is killed; it has `timed_out`
                then, and nothing is raised: its output and its status are there as ever.
        """
        _check_type(command, str, "command")
        if isinstance(args, str):  # each of its characters would be an argument
            msg = "arguments are a list, not one text"
            raise TypeError(msg)
        params = v1.CreateTerminalRequest(
            session_id=self.session_id,
            command=command,
            args=list(args) or UNSET,
            cwd=UNSET if cwd is None else _path(cwd),
            env=[v1.EnvVariable(name=k, value=v) for k, v in env.items()] if env else UNSET,
            output_byte_limit=UNSET if output_byte_limit is None else output_byte_limit,
        )
        from antiphon.sessions._terminal import Terminal  # most agents run nothing

        return Terminal(self, params, timeout)

    async def elicit(
        self, message: str, schema: v1.ElicitationSchema
    ) -> v1_unstable.CreateElicitationResponse:
        """Ask the user to fill in a form. Look at the answer's type: accept, decline or cancel.

        A turn that is cancelled or over gives cancel at once: a form that is open then is withdrawn
        (`$/cancel_request`).

        Raises:
            CapabilityError: the client does not take forms (R1-128).
        """
        params = v1.ElicitationFormMode(
            message=message, requested_schema=schema, session_id=self.session_id
        )
        response: v1_unstable.CreateElicitationResponse | None = await self._ask(params)
        return v1.ElicitationCancelAction() if response is None else response

    async def elicit_url(
        self, message: str, url: str, *, elicitation_id: str | None = None
    ) -> UrlElicitation:
        """Ask the user to open a web address, for what must not go through the client (R1-132).

        ::

            link = await turn.elicit_url("Connect your account", "https://example.com/connect?s=…")
            if link.accepted:
                await my_account_is_connected()
                await link.complete()

        Accepted means that the user agreed to open it; what became of it, your server knows. Use https
        and put no secret into the address (R1-137). A turn that is cancelled or over gives "cancel" at
        once, and withdraws a question that is open.

        Args:
            message: why.
            url: absolute.
            elicitation_id: unique among those that are open; by default one that nobody can guess
                (R1-140).

        Raises:
            CapabilityError: the client opens no addresses (R1-128).
            RequestError: it refused.
        """
        if elicitation_id is None:
            from secrets import token_urlsafe  # with all of hashlib: only who asks loads it

            elicitation_id = token_urlsafe(16)
        params = v1.ElicitationUrlMode(
            message=message, url=url, elicitation_id=elicitation_id, session_id=self.session_id
        )
        response: v1_unstable.CreateElicitationResponse | None = await self._ask(params)
        answer = v1.ElicitationCancelAction() if response is None else response
        return UrlElicitation(self.peer, elicitation_id, answer)

    # -------------------------------------------------------------- cancellation, subtasks

    async def wait_cancelled(self) -> None:
        """Wait until the turn is cancelled, or over without that: then nobody will cancel it any more.

        A subtask that waits for this alone waits for ever, and the response for it.
        """
        if self.cancelled or self.over:
            return
        if self._cancel_event is None:
            self._cancel_event = asyncio.Event()
        await self._cancel_event.wait()

    def start_soon(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the handler; the response waits for it (up to the cancel back-stop).

        What it raises is logged and does not change the turn's outcome. It may ask, and start others.
        It has to come to its end by itself: one that waits for `wait_cancelled` keeps a turn open that
        nobody cancels, and is better an `asyncio.create_task`, cancelled where the work is done. Raises `TurnOver` when the turn is over or cancelled.
        """
        try:
            self.session.fire(Event.SUBTASK, self)
        except TurnOver:
            work.close()
            raise
        task = self._link.create_task(work)
        if self.subtasks is None:
            self.subtasks = set()
        self.subtasks.add(task)
        task.add_done_callback(self._subtask_done)
        return task

    def _subtask_done(self, task: asyncio.Task[Any]) -> None:
        if self.subtasks is not None:
            self.subtasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self.cancelled:  # stopping has consequences, and `TurnOver` is one of them
            log.info("a subtask of a cancelled turn ended with an error", exc_info=error)
            return
        self._connection.handler_failed("subtask", "session/prompt", error)

    def command_entered(self, command: Terminal) -> None:
        """A command of `run` can be used, and is killed if the turn is cancelled."""
        if self._commands is None:
            self._commands = set()
        self._commands.add(command)

    def command_left(self, command: Terminal) -> None:
        """Its block was left."""
        if self._commands is not None:
            self._commands.discard(command)

    # -------------------------------------------------------------- for the session: effects

    def tell(self) -> None:
        """Tell whoever looks that it was cancelled; open questions end as a no and are withdrawn.

        Commands of `run` are killed.
        """
        self.cancelled = True
        for command in self._commands or ():
            command.kill_soon()
        if self._cancel_event is not None:
            self._cancel_event.set()
        self._withdraw()

    def _withdraw(self) -> None:
        asks: set[FutureCall] = set() if self._asks is None else self._asks
        if self._asked is not None:
            asks.add(self._asked)
        self._asked = self._asks = None
        for call in asks:
            self._connection.abandon(call)
            call.answered(None, RequestCancelled())

    def seal(self) -> None:
        """The response is settled: the back-stop has nothing to do any more, `wait_over` returns.

        Questions that a task asks for which the turn has not waited end as a no and are withdrawn.
        """
        if self.backstop is not None:
            self.backstop.cancel()
        if self._cancel_event is not None:
            self._cancel_event.set()
        if self._asked is not None or self._asks:
            self._withdraw()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def kill(self) -> None:
        """Cancel the subtasks that are left; nobody waits for them any more."""
        for task in self.subtasks or ():
            task.cancel()

    async def finish(self) -> None:
        """Wait for the subtasks."""
        while self.subtasks:
            await asyncio.wait(self.subtasks)

    async def wait_over(self) -> None:
        """Wait until the response of this turn is settled."""
        if self.over:
            return
        if self._ended is None:
            self._ended = self._connection.create_future()
        await asyncio.shield(self._ended)


class ToolCallVerbs:
    """A tool call that is under way; made by `Turn.tool`.

    Attributes:
        call: the call as it was announced.
    """

    def __init__(self, turn: Turn, call: v1.ToolCall) -> None:
        self.turn = turn
        self.call = call
        self._content: list[Any] = [] if isinstance(call.content, UnsetType) else list(call.content)
        self._final = False

    @property
    def id(self) -> str:
        """Its `toolCallId`."""
        return self.call.tool_call_id

    async def __aenter__(self) -> Self:
        await self.turn.send(self.call)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._final or self.turn.over:
            return
        failed = kind is not None or self.turn.cancelled
        try:
            await self.update(status="failed" if failed else "completed")
        except AntiphonError:
            if kind is None:
                raise

    async def update(
        self,
        *,
        status: v1.ToolCallStatus | UnsetType = UNSET,
        title: str | UnsetType = UNSET,
        content: Sequence[Any] | UnsetType = UNSET,
        locations: Sequence[Location] | UnsetType = UNSET,
        raw_output: Any = UNSET,
    ) -> None:
        """Change what is given; `content` and `locations` replace the whole list (R1-102)."""
        before = self._content, self._final
        if not isinstance(content, UnsetType):
            self._content = [_tool_content(item) for item in content]
        if status in ("completed", "failed"):
            self._final = True
        try:
            await self.turn.send(
                v1.ToolCallProgress(
                    tool_call_id=self.id,
                    status=status,
                    title=title,
                    content=UNSET if isinstance(content, UnsetType) else self._content,
                    locations=(
                        UNSET
                        if isinstance(locations, UnsetType)
                        else [_location(item) for item in locations]
                    ),
                    raw_output=raw_output,
                )
            )
        except Exception:
            # Nobody has seen it: too large, or no JSON.
            self._content, self._final = before
            raise

    async def add(self, content: Any) -> None:
        """Add to what the call shows: a text, a content block, a diff or a `Terminal`."""
        await self.update(content=[*self._content, content])

    async def diff(self, path: Path, old_text: str | None, new_text: str) -> None:
        """Show a change of a file; `old_text` None for a new one."""
        await self.add(v1.Diff(path=_path(path), old_text=old_text, new_text=new_text))


class Head:
    """The parts of a session's updates that never change.

    Attributes:
        update: before an update.
        say: before the text of a message.
        think: before the text of a thought.
        sure: bytes of an update, or of a text, whose frame is not over `frame_bytes` for sure.
    """

    __slots__ = ("say", "sure", "think", "update")

    def __init__(self, session_id: str, frame_bytes: int) -> None:
        start = (
            b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":'
            + encode(session_id)
            + b',"update":'
        )
        self.update = start
        start += b'{"sessionUpdate":"'
        content = b'","content":{"type":"text","text":'
        self.say = start + b"agent_message_chunk" + content
        self.think = start + b"agent_thought_chunk" + content
        self.sure = frame_bytes - len(self.think) - len(_TAIL) - _RIDER


_TAIL = b"}}}}"
#: More than a journal adds to a frame.
_RIDER = 256
_DENIED = PermissionAnswer(None, allowed=False)
#: What can be chosen where nothing else is offered; never changed.
_OPTIONS = (
    v1.PermissionOption(option_id="allow_once", name="Allow once", kind="allow_once"),
    v1.PermissionOption(option_id="allow_always", name="Always allow", kind="allow_always"),
    v1.PermissionOption(option_id="reject_once", name="Reject", kind="reject_once"),
)
# Used for each question.
_PERMISSION, _OPTION, _CALL = v1.RequestPermissionRequest, v1.PermissionOption, v1.ToolCallUpdate


def _check_type(value: Any, kind: type, what: str) -> None:
    """Raise `TypeError` for a value that would go out as what no client can read."""
    if not isinstance(value, kind):
        msg = f"{type(value).__name__} is no {what}"
        raise TypeError(msg)


def _path(path: Path) -> str:
    given = os.fspath(path)
    _check_type(given, str, "path of the protocol")
    return given


def _location(item: Location) -> v1.ToolCallLocation:
    if isinstance(item, str | os.PathLike):
        return v1.ToolCallLocation(path=_path(item))
    if isinstance(item, tuple):
        return v1.ToolCallLocation(path=_path(item[0]), line=item[1])
    _check_type(item, v1.ToolCallLocation, "location")
    return item


def _tool_content(item: Any) -> Any:
    if isinstance(item, (v1.Content, v1.Diff, v1.Terminal)):
        return item
    if not isinstance(item, str):
        from antiphon.sessions._terminal import Terminal

        if isinstance(item, Terminal):
            return item.as_content()
    return v1.Content(content=as_block(item))


def _plan_entry(entry: PlanItem) -> v1.PlanEntry:
    if isinstance(entry, str):
        return v1.PlanEntry(content=entry, priority="medium", status="pending")
    if isinstance(entry, tuple):
        content, status, *rest = entry
        return v1.PlanEntry(content=content, priority=rest[0] if rest else "medium", status=status)
    _check_type(entry, v1.PlanEntry, "plan entry")
    return entry


def check_offer(tree: Any, update: Any) -> None:
    """R1-36..R1-39: updates that a client must have asked for. Raises `CapabilityError`."""
    tag = tag_of(update)
    gate = gate_of_update(tag)
    if gate is not None and not allowed_by(tree, gate):
        raise CapabilityError(f"session/update {tag}", f"clientCapabilities.{gate}")


def gate_of_update(tag: str) -> str | None:
    """The client's capability without which an update of that kind must not be sent to it."""
    return _GATED_UPDATES.get(tag)


#: Of these an empty text says nothing, and some clients show an empty message for it.
TEXTS = frozenset(("agent_message_chunk", "agent_thought_chunk"))

#: Updates that change what the session keeps.
KEPT = frozenset(("current_mode_update", "config_option_update"))

_GATED_UPDATES = {
    "notice": "session.notices",
    "compaction_update": "session.compaction",
    "compaction_summary_chunk": "session.compaction",
    "plan_update": "plan",
    "plan_removed": "plan",
    "subagent_update": "subagents",
    "session_message": "subagents",
    "session_message_chunk": "subagents",
}

#: Updates that are sent as they are, whoever the client is: all that nothing else is said of here.
AS_THEY_ARE = frozenset(
    kind
    for kind in (*variants(v1.SessionUpdate), *variants(v1_unstable.SessionUpdate))
    if (tag := tag_of(kind)) and tag not in TEXTS | KEPT and gate_of_update(tag) is None
)
