"""`antiphon demo-agent`: a scripted coding agent without a model, for the demo and for trying clients.

It can do one thing: repair the small module of `_demo_fixture`, as a real coding agent would go
about it, and say what it does. Where the session's folder holds that module and the client lends
files and terminals, it works there and through the client; anywhere else it makes a copy in a
temporary folder of its own and touches nothing in the session's folder. It shows what the library's
agent side is like to write against, so it uses the public API only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from antiphon import Agent, InvalidParams, RequestError, ResourceNotFound, Turn, serve_stdio
from antiphon._version import __version__
from antiphon.cli import _demo_fixture as fixture
from antiphon.schema import v1

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Sequence

    from antiphon import AgentContext

__all__ = ["DemoAgent", "run"]

_T = TypeVar("_T")

_MODES = (
    v1.SessionMode(id="careful", name="Careful", description="Asks before it changes a file"),
    v1.SessionMode(id="swift", name="Swift", description="Changes files without asking"),
)
_MODE_OPTION = "mode"
_OPTIONS = (
    v1.PermissionOption(option_id="repair", name="Repair it", kind="allow_once"),
    v1.PermissionOption(option_id="leave", name="Leave it as it is", kind="reject_once"),
)
_PAGE = 50
#: What the pretended context window holds; one word counts as one token.
_CONTEXT_SIZE = 8000

_STEPS = (
    "Read the module and its test",
    "Repair the module",
    "Run the test",
)


def run(options: argparse.Namespace) -> int:
    """Serve on standard input and output until the client leaves; 0."""
    agent = DemoAgent(pace=options.pace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve_stdio(agent)
    finally:
        agent.clear()
    return 0


class _Memory(msgspec.Struct, kw_only=True):
    """One session as the agent remembers it, for as long as its process lives."""

    id: str
    cwd: str
    mode: str = "careful"
    title: str | None = None
    updated_at: str = ""
    history: list[Any] = []
    words: int = 0
    workshop: Path | None = None


class DemoAgent(Agent):
    """The agent; `pace` is the pause between two pieces of text, in seconds."""

    info = ("antiphon-demo", __version__)

    def __init__(self, pace: float = 0.02) -> None:
        super().__init__()
        self._pace = pace
        self._sessions: dict[str, _Memory] = {}

    def clear(self) -> None:
        """Remove the folders it has worked in."""
        for memory in self._sessions.values():
            _clear(memory)

    async def new_session(
        self, params: v1.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        memory = _Memory(id=str(uuid.uuid4()), cwd=params.cwd, updated_at=_now())
        self._sessions[memory.id] = memory
        return v1.NewSessionResponse(
            session_id=memory.id, modes=_modes(memory), config_options=_options(memory)
        )

    async def load_session(
        self, params: v1.LoadSessionRequest, ctx: AgentContext
    ) -> v1.LoadSessionResponse:
        memory = self._known(params.session_id, params.cwd)
        for update in memory.history:
            await ctx.update(update)
        return v1.LoadSessionResponse(modes=_modes(memory), config_options=_options(memory))

    async def resume_session(
        self, params: v1.ResumeSessionRequest, ctx: AgentContext
    ) -> v1.ResumeSessionResponse:
        memory = self._known(params.session_id, params.cwd)
        return v1.ResumeSessionResponse(modes=_modes(memory), config_options=_options(memory))

    async def list_sessions(
        self, params: v1.ListSessionsRequest, ctx: AgentContext
    ) -> v1.ListSessionsResponse:
        fitting = [m for m in self._sessions.values() if not params.cwd or m.cwd == params.cwd]
        start = _start_of_page(params.cursor, len(fitting))
        response = v1.ListSessionsResponse(
            sessions=[
                v1.SessionInfo(session_id=m.id, cwd=m.cwd, title=m.title, updated_at=m.updated_at)
                for m in fitting[start : start + _PAGE]
            ]
        )
        if start + _PAGE < len(fitting):
            response.next_cursor = str(start + _PAGE)
        return response

    async def close_session(
        self, params: v1.CloseSessionRequest, ctx: AgentContext
    ) -> v1.CloseSessionResponse:
        # The history stays: a closed session can be loaded again.
        memory = self._known(params.session_id)
        _clear(memory)
        return v1.CloseSessionResponse()

    async def delete_session(
        self, params: v1.DeleteSessionRequest, ctx: AgentContext
    ) -> v1.DeleteSessionResponse:
        memory = self._sessions.pop(params.session_id, None)
        if memory is not None:
            _clear(memory)
        return v1.DeleteSessionResponse()

    async def set_session_mode(
        self, params: v1.SetSessionModeRequest, ctx: AgentContext
    ) -> v1.SetSessionModeResponse:
        memory = self._known(params.session_id)
        _set_mode(memory, params.mode_id)
        session = ctx.session()
        ctx.after_response(lambda: session.set_config_options(_options(memory)))
        return v1.SetSessionModeResponse()

    async def set_session_config_option(
        self, params: v1.SetSessionConfigOptionRequest, ctx: AgentContext
    ) -> v1.SetSessionConfigOptionResponse:
        memory = self._known(params.session_id)
        if params.config_id != _MODE_OPTION:
            raise _invalid("unknown_config_option", configId=params.config_id)
        _set_mode(memory, params.value)
        session = ctx.session()
        ctx.after_response(lambda: session.set_mode(memory.mode))
        return v1.SetSessionConfigOptionResponse(config_options=_options(memory))

    async def prompt(self, turn: Turn) -> str | None:
        memory = self._known(turn.session_id)
        memory.history += [v1.UserMessageChunk(content=block) for block in turn.blocks]
        memory.words += len(turn.text.split())
        memory.updated_at = _now()
        if memory.title is None:
            memory.title = _title(turn.text)
        try:
            await _Scene(turn, memory, self._pace).play()
        except _Stopped:
            return "cancelled"
        return None

    def _known(self, session_id: str, cwd: str | None = None) -> _Memory:
        memory = self._sessions.get(session_id)
        if memory is None:
            raise ResourceNotFound({"sessionId": session_id}, "Session not found")
        if cwd is not None and cwd != memory.cwd:
            raise _invalid("cwd_mismatch", cwd=memory.cwd)
        return memory


class _Stopped(Exception):
    """The client cancelled the turn."""


class _Hands(Protocol):
    """How the work is done: through the client, or by the agent itself."""

    folder: Path

    async def read(self, path: Path) -> str: ...
    async def write(self, path: Path, content: str) -> None: ...
    async def test(self, scene: _Scene, tool: Any) -> tuple[bool, list[Any]]: ...


class _ClientHands:
    """Files and terminals of the client, in the session's own folder."""

    def __init__(self, turn: Turn) -> None:
        self.folder = Path(turn.cwd)
        self._turn = turn

    async def read(self, path: Path) -> str:
        return await self._turn.read_text_file(str(path))

    async def write(self, path: Path, content: str) -> None:
        await self._turn.write_text_file(str(path), content)

    async def test(self, scene: _Scene, tool: Any) -> tuple[bool, list[Any]]:
        command, *args = fixture.TEST_COMMAND
        async with self._turn.run(command, args, cwd=str(self.folder)) as terminal:
            content = [v1.Terminal(terminal_id=terminal.id)]
            await tool.update(content=content)
            status = await scene.unless_cancelled(terminal.wait())
            output = await terminal.output()
        shown = v1.Content(content=v1.TextContent(text=output.output))
        return status.exit_code == 0, [*content, shown]


class _OwnHands:
    """A copy of the module in a temporary folder: nothing of the client's is needed or touched."""

    def __init__(self, memory: _Memory) -> None:
        if memory.workshop is None:
            memory.workshop = Path(tempfile.mkdtemp(prefix="antiphon-demo-"))
        self.folder = memory.workshop
        fixture.write_fixture(self.folder)

    async def read(self, path: Path) -> str:
        return await asyncio.to_thread(path.read_text, encoding="utf-8")

    async def write(self, path: Path, content: str) -> None:
        await asyncio.to_thread(path.write_text, content, encoding="utf-8")

    async def test(self, scene: _Scene, tool: Any) -> tuple[bool, list[Any]]:
        process = await asyncio.create_subprocess_exec(
            *fixture.TEST_COMMAND,
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await scene.unless_cancelled(process.communicate())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        content = [v1.Content(content=v1.TextContent(text=output.decode("utf-8", "replace")))]
        await tool.update(content=content)
        return process.returncode == 0, content


class _Scene:
    """One turn: what is said and done, and what of it is remembered."""

    def __init__(self, turn: Turn, memory: _Memory, pace: float) -> None:
        self._turn = turn
        self._memory = memory
        self._pace = pace

    async def play(self) -> None:
        """The whole script. Raises `_Stopped` soon after `session/cancel`."""
        turn, memory = self._turn, self._memory
        hands = self._hands()
        await turn.send(v1.SessionInfoUpdate(title=memory.title, updated_at=memory.updated_at))
        await self.think(
            "There is a small module here and a test that fails. "
            "I will read both before I change anything."
        )
        await self.say(self._greeting(hands))
        await self._plan(0)

        module, test = hands.folder / fixture.MODULE, hands.folder / fixture.TEST_MODULE
        source = await self._read(hands, module)
        await self._read(hands, test)
        await self.think(
            "1900 is divisible by 4, yet no leap year: the rule for centuries is missing."
        )
        await self.say(
            "`is_leap` knows every fourth year, but not the two rules for full centuries: "
            "1900 was a common year, 2000 was not.\n\n"
        )
        await self._plan(1)
        repaired = source.replace(fixture.FAULTY_LINE, fixture.FIXED_LINE)
        try:
            if not await self._edit(hands, module, source, repaired):
                await self.say("Understood: I leave the file as it is.\n")
                return
            await self._plan(2)
            passed = await self._test(hands)
        except RequestError as refusal:
            # The client may refuse to write or to run whatever was answered before.
            await self.say(f"I cannot go on, the client says: {refusal.message}.\n")
            return
        await self._plan(3)
        await turn.usage(used=min(memory.words, _CONTEXT_SIZE), size=_CONTEXT_SIZE)
        await self.say(
            "The test passes now. One line of the module has changed.\n"
            if passed
            else "The test still fails; I would not ship this.\n"
        )

    def _hands(self) -> _Hands:
        turn = self._turn
        capabilities = turn.client_capabilities
        lent = (
            capabilities.fs
            and capabilities.fs.read_text_file
            and capabilities.fs.write_text_file
            and capabilities.terminal
        )
        if lent and fixture.is_fixture(Path(turn.cwd)):
            return _ClientHands(turn)
        return _OwnHands(self._memory)

    def _greeting(self, hands: _Hands) -> str:
        if isinstance(hands, _ClientHands):
            return f"I see `{fixture.MODULE}` and a failing test. Let me look at both.\n\n"
        asked = _title(self._turn.text)
        return (
            f"You wrote: “{asked}”. I am the demo agent: there is no model behind me, and I can do "
            f"one thing, which is to repair a small module. I do it in a folder of my own, "
            f"`{hands.folder}`, and touch nothing in yours.\n\n"
        )

    # -- what it says

    async def say(self, text: str) -> None:
        """Stream text, a word or two at a time."""
        await self._stream(text, v1.AgentMessageChunk, self._turn.say)

    async def think(self, text: str) -> None:
        """Stream reasoning."""
        await self._stream(text, v1.AgentThoughtChunk, self._turn.think)

    async def _stream(self, text: str, kind: Any, send: Any) -> None:
        for piece in re.findall(r"\s*\S+\s+\S+\s*|\s*\S+\s*", text):
            await self._pause(self._pace)
            await send(piece)
        self._memory.words += len(text.split())
        self._remember(kind(content=v1.TextContent(text=text)))

    async def _plan(self, done: int) -> None:
        entries = [
            v1.PlanEntry(
                content=step,
                priority="medium",
                status="completed" if n < done else "in_progress" if n == done else "pending",
            )
            for n, step in enumerate(_STEPS)
        ]
        await self._turn.plan(entries)
        if done == len(_STEPS):
            self._remember(v1.Plan(entries=entries))

    # -- what it does

    async def _read(self, hands: _Hands, path: Path) -> str:
        title = f"Read {path.name}"
        where = [v1.ToolCallLocation(path=str(path))]
        async with self._turn.tool(title, kind="read", locations=where) as tool:
            await self._pause(self._pace * 5)
            source = await self.unless_cancelled(hands.read(path))
            content = [v1.Content(content=v1.TextContent(text=source))]
            await tool.update(content=content)
        self._remember_tool(tool.id, title, "read", where, content)
        return source

    async def _edit(self, hands: _Hands, path: Path, old: str, new: str) -> bool:
        title = f"Repair {path.name}"
        line = old[: old.find(fixture.FAULTY_LINE)].count("\n") + 1
        where = [v1.ToolCallLocation(path=str(path), line=line)]
        content = [v1.Diff(path=str(path), old_text=old, new_text=new)]
        careful = self._memory.mode == "careful"
        async with self._turn.tool(
            title,
            kind="edit",
            status="pending" if careful else "in_progress",
            locations=where,
            content=content,
        ) as tool:
            allowed = not careful or await self._may(tool)
            if allowed:
                await tool.update(status="in_progress")
                await self._pause(self._pace * 5)
                await self.unless_cancelled(hands.write(path, new))
            else:
                await tool.update(status="failed")
        status = "completed" if allowed else "failed"
        self._remember_tool(tool.id, title, "edit", where, content, status)
        return allowed

    async def _may(self, tool: Any) -> bool:
        answer = await self._turn.ask_permission(tool, _OPTIONS)
        if answer.option_id is None:
            # No option at all is how a client answers what it has cancelled (acp-v1 §7).
            raise _Stopped
        return answer.allowed

    async def _test(self, hands: _Hands) -> bool:
        title = f"Run {fixture.TEST_MODULE}"
        where = [v1.ToolCallLocation(path=str(hands.folder / fixture.TEST_MODULE))]
        raw_input = {"command": list(fixture.TEST_COMMAND), "cwd": str(hands.folder)}
        async with self._turn.tool(
            title, kind="execute", locations=where, raw_input=raw_input
        ) as tool:
            passed, content = await hands.test(self, tool)
            await tool.update(raw_output={"passed": passed})
        self._remember_tool(tool.id, title, "execute", where, content[-1:])
        return passed

    # -- cancelling, and remembering

    async def _pause(self, seconds: float) -> None:
        """Wait a little, less if the turn is cancelled meanwhile."""
        if seconds and not self._turn.cancelled:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._turn.wait_cancelled()
        if self._turn.cancelled:
            raise _Stopped

    async def unless_cancelled(self, work: Awaitable[_T]) -> _T:
        """The result of `work`; raises `_Stopped`, and cancels it, as soon as the turn is cancelled."""
        doing = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._turn.wait_cancelled())
        try:
            await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise _Stopped
            return doing.result()
        finally:
            for task in (doing, waiting):
                task.cancel()
            await asyncio.gather(doing, waiting, return_exceptions=True)

    def _remember(self, update: Any) -> None:
        self._memory.history.append(update)

    def _remember_tool(
        self,
        tool_id: str,
        title: str,
        kind: str,
        where: Sequence[v1.ToolCallLocation],
        content: Sequence[Any],
        status: str = "completed",
    ) -> None:
        self._remember(
            v1.ToolCall(
                tool_call_id=tool_id,
                title=title,
                kind=kind,
                status=status,
                locations=list(where),
                content=list(content),
            )
        )


def _modes(memory: _Memory) -> v1.SessionModeState:
    return v1.SessionModeState(current_mode_id=memory.mode, available_modes=list(_MODES))


def _options(memory: _Memory) -> list[Any]:
    """The mode once more, as a config option: clients that know these ignore modes (acp-v1 §9)."""
    return [
        v1.SessionConfigSelect(
            id=_MODE_OPTION,
            name="Mode",
            category="mode",
            current_value=memory.mode,
            options=[
                v1.SessionConfigSelectOption(
                    value=mode.id, name=mode.name, description=mode.description
                )
                for mode in _MODES
            ],
        )
    ]


def _set_mode(memory: _Memory, mode: object) -> None:
    if not any(known.id == mode for known in _MODES):
        raise _invalid("unknown_mode", modes=[known.id for known in _MODES])
    memory.mode = str(mode)


def _start_of_page(cursor: object, count: int) -> int:
    if not isinstance(cursor, str):
        return 0
    if not cursor.isdecimal() or int(cursor) > count:
        raise _invalid("bad_cursor")
    return int(cursor)


def _invalid(reason: str, **facts: object) -> RequestError:
    return InvalidParams({"reason": reason, **facts})


def _clear(memory: _Memory) -> None:
    if memory.workshop is not None:
        shutil.rmtree(memory.workshop, ignore_errors=True)
        memory.workshop = None


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
