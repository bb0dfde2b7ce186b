from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from antiphon import (
    Reattach,
    connect,
)
from tests.sessions.journaled import JournaledAgent, settle

if TYPE_CHECKING:
    from antiphon import PromptTurn

AT_ONCE = Reattach(delay=0)


@pytest.fixture(params=["ours", "raxol"])
def agent(request: pytest.FixtureRequest) -> JournaledAgent:
    return JournaledAgent(raxol=request.param == "raxol")


async def all_of(turn: PromptTurn) -> list[str]:
    return [update.text async for update in turn]


async def test_an_own_turn_of_an_attached_session_is_seen_once(agent: JournaledAgent) -> None:
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        session = await peer.new_session()
        assert session.attached
        async with session.prompt("go") as turn:
            for text in "abc":
                agent.say("s1", text)
            agent.finish("s1")
            assert await all_of(turn) == ["a", "b", "c"]

        assert turn.stop_reason == "end_turn"
        assert session.offset == len(agent.journals["s1"])


async def test_a_turn_goes_on_over_another_link_without_a_gap(agent: JournaledAgent) -> None:
    async with connect(agent.dial, reattach=AT_ONCE) as peer:
        session = await peer.new_session()
        labels: list[str] = []
        async with session.prompt("go") as turn:
            agent.say("s1", "a")
            first = await anext(turn)
            agent.say("s1", "b")
            agent.link.cut(0)
            agent.say("s1", "c")
            await agent.until_sent("initialize", 2)
            await settle()
            agent.say("s1", "d")
            agent.finish("s1", "max_tokens")
            rest = [update async for update in turn]
            labels = [update.label for update in rest]

        assert [first.text, *(update.text for update in rest)] == ["a", "b", "c", "d"]
        assert set(labels) == {"turn"}
        assert turn.stop_reason == "max_tokens"
        assert len(agent.links) == 2
