"""What all connections of a durable agent share, and who may do what."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from antiphon import Durability
from antiphon.journal import AttachContext, Denied, Grant, MemoryJournal
from antiphon.schema import v1
from antiphon.transports import memory_pair


class Link:
    """A transport, as far as this module looks at one."""

    def __init__(self, info: Any) -> None:
        self.info = info


def test_everything_that_is_served_with_a_journal_shares_it() -> None:
    journal, other = MemoryJournal(), MemoryJournal()
    shared = Durability.of(journal)

    assert Durability.of(journal) is shared
    assert Durability.of(shared) is shared
    assert Durability.of(other) is not shared


def test_a_journal_that_nobody_serves_is_not_held() -> None:
    journal = MemoryJournal()
    gone = weakref.ref(Durability.of(journal))
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize(
    ("info", "outlives"),
    [
        ({"kind": "stdio", "peer": None}, False),
        ({"kind": "process", "peer": None}, False),
        ({"kind": "unix", "peer": {"uid": 0}}, True),
        ({"kind": "tcp", "peer": None}, True),
        ({}, False),
        (None, False),
    ],
)
def test_a_turn_outlives_links_that_others_can_follow(info: Any, outlives: bool) -> None:
    link: Any = Link(info)

    assert Durability(MemoryJournal()).outlives(link) is outlives
    assert Durability(MemoryJournal(), outlive=True).outlives(link) is True
    assert Durability(MemoryJournal(), outlive=False).outlives(link) is False


def test_a_transport_that_says_nothing_of_itself_is_no_local_one() -> None:
    class Bare:
        pass

    link: Any = Bare()
    durability = Durability(MemoryJournal())

    assert durability.outlives(link) is False
    assert durability.context("s", link).transport is None


@pytest.mark.covers("AP3", "CDI-2")
async def test_who_is_let_in_is_decided_by_the_transport_where_nothing_is_said() -> None:
    durability = Durability(MemoryJournal())
    ours, _ = memory_pair()
    strange: Any = Link({"kind": "tcp", "peer": {"host": "::1", "port": 1}})

    local = await durability.admit(durability.context("s", ours))
    remote = await durability.admit(durability.context("s", strange, capability="a token"))

    assert isinstance(local, Grant)
    assert isinstance(remote, Denied)


def test_what_the_policy_is_asked_about_comes_from_here() -> None:
    durability = Durability(MemoryJournal(), surface="web")
    ours, _ = memory_pair()

    context = durability.context("s", ours, capability=["odd"], from_offset=7)

    assert context == AttachContext(
        session_id="s",
        actor=None,
        surface="web",
        capability=["odd"],
        from_offset=7,
        transport={"kind": "process", "peer": None},
    )


def test_roles_are_local_configuration() -> None:
    grant = Grant({"id": "alice", "role": "controller"}, "s", "test")
    context = Durability(MemoryJournal()).context("s", memory_pair()[0])

    def role(**options: Any) -> str:
        return Durability(MemoryJournal(), **options).role_of(grant, context)

    assert role() == "controller"
    assert role(default_role="observer") == "observer"
    assert role(roles={"alice": "observer"}) == "observer"
    assert role(roles={"bob": "observer"}) == "controller"

    def by_actor(granted: Grant, _: AttachContext) -> Any:
        return "observer" if granted.actor["id"] == "alice" else None

    def by_session(_: Grant, asked: AttachContext) -> Any:
        return None if asked.session_id else "observer"

    assert role(roles=by_actor) == "observer"
    assert role(roles=by_session) == "controller"


def test_a_prompt_is_journaled_block_by_block() -> None:
    blocks = [v1.TextContent(text="a"), v1.ResourceLink(name="n", uri="file:///n")]

    entries = Durability(MemoryJournal()).prompt_entries(blocks)

    assert [(entry.kind, entry.taint) for entry in entries] == [("session_update", "user")] * 2
    assert b'"user_message_chunk"' in entries[0].payload
    assert b'"uri":"file:///n"' in entries[1].payload
    assert Durability(MemoryJournal(), prompts=False).prompt_entries(blocks) == []


async def test_closing_ends_what_outlived_its_connection() -> None:
    durability = Durability(MemoryJournal())
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("work")

    durability.create_task(work())
    await asyncio.sleep(0)
    await durability.aclose()
    await durability.aclose()

    assert ended == ["work"]
