"""An agent as the terminals see it: the calls of one session, and a word for new output."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import _errors
from antiphon.schema import v1, v1_unstable
from antiphon.services import _terminal
from antiphon.services._terminal import OutputTail

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from antiphon.services import Terminals


class Ctx:
    def __init__(self, *roots: str | Path, session_id: str = "s") -> None:
        self.session_id = session_id
        self.roots = [str(root) for root in roots]


class Agent:
    """The calls an agent makes, as one session of it."""

    #: Set whenever any terminal has kept some output; a new one for each test.
    heard: asyncio.Event

    def __init__(self, terminals: Terminals, ctx: Ctx) -> None:
        self.terminals = terminals
        self.ctx = ctx

    async def create(self, command: str, *args: str, **more: Any) -> str:
        params = v1_unstable.CreateTerminalRequest(
            session_id="s", command=command, args=list(args), **more
        )
        return (await self.terminals.create_terminal(params, self.ctx)).terminal_id

    async def sh(self, script: str, **more: Any) -> str:
        return await self.create("sh", "-c", script, **more)

    async def python(self, script: str, **more: Any) -> str:
        return await self.create(sys.executable, "-c", script, **more)

    async def output(self, terminal_id: str) -> v1.TerminalOutputResponse:
        params = v1_unstable.TerminalOutputRequest(session_id="s", terminal_id=terminal_id)
        return await self.terminals.terminal_output(params, self.ctx)

    async def wait(self, terminal_id: str) -> v1.WaitForTerminalExitResponse:
        params = v1_unstable.WaitForTerminalExitRequest(session_id="s", terminal_id=terminal_id)
        return await self.terminals.wait_for_terminal_exit(params, self.ctx)

    async def kill(self, terminal_id: str) -> None:
        params = v1_unstable.KillTerminalRequest(session_id="s", terminal_id=terminal_id)
        assert await self.terminals.kill_terminal(params, self.ctx) == v1.KillTerminalResponse()

    async def release(self, terminal_id: str) -> None:
        params = v1_unstable.ReleaseTerminalRequest(session_id="s", terminal_id=terminal_id)
        answer = await self.terminals.release_terminal(params, self.ctx)
        assert answer == v1.ReleaseTerminalResponse()

    async def run(self, command: str, *args: str, **more: Any) -> str:
        terminal_id = await self.create(command, *args, **more)
        await self.wait(terminal_id)
        return (await self.output(terminal_id)).output

    async def until(self, terminal_id: str, text: str) -> None:
        """Wait until the output contains `text`; the test's own bound ends it otherwise."""
        while text not in (await self.output(terminal_id)).output:
            self.heard.clear()
            await self.heard.wait()


async def error_of(doing: Awaitable[object]) -> tuple[int, str, Any]:
    with pytest.raises(_errors.RequestError) as caught:
        await doing
    return caught.value.code, caught.value.message, caught.value.data


async def ended(pid: int) -> None:
    """Wait until a process has ended, whoever is to reap it and however late."""
    over = asyncio.Event()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(process, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


def listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol has no word for new output: an agent has to ask. A test need not."""
    heard = asyncio.Event()

    class HeardTail(OutputTail):
        def add(self, data: bytes) -> str:
            text = super().add(data)
            heard.set()
            return text

        def end(self) -> str:
            text = super().end()
            heard.set()
            return text

    monkeypatch.setattr(Agent, "heard", heard, raising=False)
    monkeypatch.setattr(_terminal, "OutputTail", HeardTail)
