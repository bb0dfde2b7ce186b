"""What is alike on both sides about calling the peer."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon import (
    Agent,
    AgentContext,
    AgentPeer,
    Capabilities,
    CapabilityError,
    Client,
    ClientPeer,
    LocalProtocolError,
    extension,
)
from antiphon.schema import v1, v1_unstable
from antiphon.testing import raw_agent, raw_pair
from tests.sessions.pairs import joined

UNGATED = v1_unstable.MessageMcpNotification(server_id="s", request_id="r", method="m")


class Doubling(Client):
    @extension("_test/double")
    async def double(self, params: Any, ctx: Any) -> Any:
        return params * 2


class Asking(Agent):
    @extension("_test/ask")
    async def ask(self, params: Any, ctx: AgentContext) -> Any:
        return await ctx.peer.request_extension("_test/double", params)


async def test_extensions_are_asked_in_both_directions() -> None:
    async with joined(Asking(), Doubling()) as (peer, _):
        assert await peer.request_extension("_test/ask", 4) == 8


@pytest.mark.parametrize("name", ["session/new", "x", ""])
async def test_an_extension_begins_with_an_underscore_on_either_side(name: str) -> None:
    async with raw_pair() as (ours, raw):
        for peer in (AgentPeer(ours, Client()), ClientPeer(ours, Agent())):
            with pytest.raises(LocalProtocolError, match="underscore"):
                await peer.request_extension(name)
            with pytest.raises(LocalProtocolError, match="underscore"):
                await peer.notify_extension(name)
        assert raw.frames == []


async def test_a_peer_is_told_by_its_class_and_its_link() -> None:
    async with raw_pair() as (ours, _):
        assert repr(AgentPeer(ours, Client())) == "<AgentPeer on memory>"
        assert repr(ClientPeer(ours, Agent())) == "<ClientPeer on memory>"


@pytest.mark.covers("R1-28")
async def test_a_notification_that_the_peer_did_not_offer_to_take_is_not_sent() -> None:
    async with raw_agent(unstable=True) as (peer, raw):
        with pytest.raises(CapabilityError, match=r"agentCapabilities\.mcpCapabilities\.acp"):
            await peer.notify(UNGATED)
        await raw.round_trip()
        assert not raw.sent("mcp/message")
    async with raw_agent(unstable=True, capabilities={"mcpCapabilities": {"acp": True}}) as (
        peer,
        raw,
    ):
        await peer.notify(UNGATED)
        assert (await raw.wait("mcp/message"))["params"]["serverId"] == "s"


@pytest.mark.covers("R1-128")
async def test_each_mode_of_an_elicitation_has_a_gate_of_its_own() -> None:
    refused: list[str] = []

    class Eliciting(Agent):
        async def new_session(
            self, params: v1.NewSessionRequest, ctx: AgentContext
        ) -> v1.NewSessionResponse:
            with pytest.raises(CapabilityError) as caught:
                await ctx.peer.request(
                    v1.ElicitationUrlMode(
                        message="m", url="x:y", elicitation_id="e", session_id="s"
                    )
                )
            refused.append(caught.value.capability)
            assert ctx.peer.offers("elicitation.form")
            return v1.NewSessionResponse(session_id="s")

    class Filling(Client):
        capabilities = Capabilities(elicitation_form=True)

        async def create_elicitation(self, params: Any, ctx: Any) -> Any:
            raise NotImplementedError

    async with joined(Eliciting(), Filling()) as (peer, _):
        await peer.new_session()
    assert refused == ["clientCapabilities.elicitation.url"]
