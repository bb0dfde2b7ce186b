"""Joined ends: our side against a raw peer, or both our sides, with or without the handshake.

Responsible for starting and ending both ends, whatever a test does in between. Unlike a real link all
runs on one loop, and in memory by default; `transports=` takes `byte_pair(…)` or any other pair.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from antiphon import Agent, AgentPeer, Client, connect, serve
from antiphon.testing._raw_peer import RawPeer
from antiphon.transports import Transport, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = ["joined", "raw_agent", "raw_client", "raw_pair", "unshaken_agent", "unshaken_client"]

#: How long our own side may take to end when its link is closed, in seconds of the loop.
_END = 30.0

Pair = tuple[Transport, Transport]


@asynccontextmanager
async def raw_pair(transports: Pair | None = None) -> AsyncGenerator[tuple[Transport, RawPeer]]:
    """Make a transport for a side of ours, not started, and a started raw peer at its other end."""
    ours, theirs = memory_pair() if transports is None else transports
    async with RawPeer(theirs) as raw:
        yield ours, raw


@asynccontextmanager
async def raw_agent(
    client: Client | None = None,
    capabilities: Mapping[str, Any] | None = None,
    *,
    initialized: Mapping[str, Any] | None = None,
    transports: Pair | None = None,
    **options: Any,
) -> AsyncGenerator[tuple[AgentPeer, RawPeer]]:
    """Shake hands between our client and a raw agent; gives `(agent_peer, raw)`.

    Both are closed when the block is left.

    Args:
        client: under test; by default one that lends nothing and refuses.
        capabilities: the `agentCapabilities` of the raw agent's answer.
        initialized: further members of its answer, or others in place of the usual ones.
        transports: the client's end and the raw agent's; by default a memory pair.
        options: as for `antiphon.connect`.

    Raises:
        AntiphonError: the handshake failed, as from `antiphon.connect`.
    """
    answer = {"protocolVersion": 1, "agentCapabilities": dict(capabilities or {})}
    answer.update(initialized or {})
    async with unshaken_agent(client, transports=transports, **options) as (connecting, raw):
        initialize = asyncio.ensure_future(raw.wait("initialize"))
        try:
            # Either may end the handshake: what cannot be sent never comes.
            await asyncio.wait((initialize, connecting), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raw.answer(await initialize, answer)
            yield await connecting, raw
        finally:
            await _end(initialize)


@asynccontextmanager
async def unshaken_agent(
    client: Client | None = None, *, transports: Pair | None = None, **options: Any
) -> AsyncGenerator[tuple[asyncio.Task[AgentPeer], RawPeer]]:
    """Let our client connect to a raw agent that has said nothing yet; gives `(connecting, raw)`.

    `await connecting` for the `AgentPeer`, or for what the handshake raises, once the raw agent has
    answered. Both are closed when the block is left.

    Args:
        client: under test; by default one that lends nothing and refuses.
        transports: the client's end and the raw agent's; by default a memory pair.
        options: as for `antiphon.connect`.
    """

    async def connected() -> AgentPeer:
        return await connect(ours, client=client, **options)

    async with raw_pair(transports) as (ours, raw):
        connecting = asyncio.create_task(connected(), name="connect")
        try:
            yield connecting, raw
        finally:
            await _end(connecting)
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().aclose()


@asynccontextmanager
async def raw_client(
    agent: Agent,
    capabilities: Mapping[str, Any] | None = None,
    *,
    transports: Pair | None = None,
    **options: Any,
) -> AsyncGenerator[RawPeer]:
    """Shake hands between our agent and a raw client, which it gives.

    Both are closed when the block is left.

    Args:
        agent: under test.
        capabilities: the `clientCapabilities` that the raw client sends.
        transports: the agent's end and the raw client's; by default a memory pair.
        options: as for `antiphon.serve`.

    Raises:
        AssertionError: the agent refused `initialize`.
    """
    async with unshaken_client(agent, transports=transports, **options) as raw:
        params = {"protocolVersion": 1, "clientCapabilities": dict(capabilities or {})}
        answer = await raw.ask("initialize", params, "hello")
        if "result" not in answer:
            msg = f"the agent refused initialize: {answer.get('error')}"
            raise AssertionError(msg)
        yield raw


@asynccontextmanager
async def unshaken_client(
    agent: Agent, *, transports: Pair | None = None, **options: Any
) -> AsyncGenerator[RawPeer]:
    """Serve our agent to a raw client that has said nothing yet; gives the raw client.

    Both are closed when the block is left.

    Args:
        agent: under test.
        transports: the agent's end and the raw client's; by default a memory pair.
        options: as for `antiphon.serve`.
    """
    async with raw_pair(transports) as (ours, raw):
        serving = asyncio.create_task(serve(agent, ours, **options), name="serve")
        try:
            yield raw
        finally:
            await raw.transport.aclose()
            await asyncio.wait_for(serving, _END)


@asynccontextmanager
async def joined(
    agent: Agent,
    client: Client | None = None,
    *,
    transports: Pair | None = None,
    agent_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[AgentPeer]:
    """Shake hands between our agent and our client; gives the client's `AgentPeer`.

    Both are closed when the block is left.

    Args:
        agent: one side.
        client: the other; by default one that lends nothing and refuses.
        transports: the client's end and the agent's; by default a memory pair.
        agent_options: as for `antiphon.serve`; by default `unstable` and `limits` of `options`.
        options: as for `antiphon.connect`.

    Raises:
        AntiphonError: the handshake failed, as from `antiphon.connect`.
    """
    ours, theirs = memory_pair() if transports is None else transports
    both: dict[str, Any] = {
        name: options[name] for name in ("unstable", "limits") if name in options
    }
    both.update(agent_options or {})
    serving = asyncio.create_task(serve(agent, theirs, **both), name="serve")
    try:
        async with connect(ours, client=client, **options) as peer:
            yield peer
    finally:
        await asyncio.wait_for(serving, _END)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel it, and wait until it has ended; how is looked at elsewhere."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
