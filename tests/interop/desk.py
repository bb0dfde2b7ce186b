"""Our client at work: what it lends, decides and notes down, and how a test opens it on a peer."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from antiphon import AgentPeer, Capabilities, Client, Session, Update, extension, spawn
from antiphon.services import Elicitation, Files, Form, Terminals
from tests.interop.programs import agent_command, script

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from antiphon import Context
    from antiphon.schema import v1

NOTES = "alpha\nbeta\ngamma\n"


class Desk(Client):
    """Lends everything, answers permission requests by `decide`, notes what it was told."""

    info = ("interop-desk", "9.8")
    capabilities = Capabilities(boolean_config_options=True)

    def __init__(self, decision: str | bool | None = True) -> None:
        super().__init__(
            files=Files(),
            terminals=Terminals(),
            permissions=self.decide,
            elicitation=Elicitation(form=self.fill_in),
        )
        self.decision = decision
        self.asked: list[v1.RequestPermissionRequest] = []
        self.being_asked = asyncio.Event()
        #: Set to let a permission request wait for it.
        self.thinking: asyncio.Event | None = None
        self.elicited: list[Any] = []
        #: Who asked, by its own account.
        self.askers: list[str] = []
        self.form: dict[str, Any] | None = script("answer")
        self.ticks: list[Any] = []

    async def decide(self, params: v1.RequestPermissionRequest, ctx: Any) -> str | bool | None:
        self.asked.append(params)
        self.being_asked.set()
        if self.thinking is not None:
            await self.thinking.wait()
        return self.decision

    async def fill_in(self, form: Form, ctx: Any) -> dict[str, Any] | bool:
        self.elicited.append(form.params)
        self.askers.append(form.agent)
        return False if self.form is None else self.form

    @extension("_interop/echo")
    async def echo(self, params: Any, ctx: Context) -> Any:
        return {"method": ctx.method, "params": params}

    @extension("_interop/tick", kind="notification")
    async def tick(self, params: Any, ctx: Context) -> None:
        self.ticks.append(params)


@asynccontextmanager
async def connected(
    peer: str, tmp_path: Path, client: Client | None = None, **options: Any
) -> AsyncGenerator[AgentPeer]:
    """A peer's scripted agent; its sessions outlive it, for the next one in the same place."""
    (tmp_path / "notes.txt").write_text(NOTES, encoding="utf-8")
    command = agent_command(peer, tmp_path / "state.json")
    async with spawn(command, client=Desk() if client is None else client, **options) as agent:
        yield agent


async def opened(agent: AgentPeer, cwd: Path, **options: Any) -> Session:
    """A new session whose commands have been announced: nothing of it is under way any more."""
    session = await agent.new_session(cwd=cwd, **options)
    updates = session.updates()
    assert (await anext(updates)).kind == "available_commands_update"
    updates.close()
    return session


def wires(updates: Sequence[Update]) -> list[Any]:
    """The updates as they were on the wire."""
    return [json.loads(update.raw) for update in updates]


def texts(updates: Sequence[Update]) -> list[str]:
    return [update.text for update in updates]


async def told(session: Session, prompt: str) -> Any:
    """The JSON that a scene says at its end."""
    result = await session.prompt(prompt)
    return json.loads(result.updates[-1].text)


async def started(session: Session) -> None:
    """Wait until the scene `slow` of that session has begun."""
    async with aclosing(session.updates()) as updates:
        async for update in updates:
            if update.text == "started":
                return
