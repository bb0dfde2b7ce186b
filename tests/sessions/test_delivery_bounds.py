"""What delivery may cost: memory while streaming, who waits for whom, and what a spent budget does.

The agent is a real process, so that "the sender feels it" means a pipe that is full.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Client, LimitExceeded, Limits, spawn
from antiphon.testing import raw_agent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from antiphon import AgentPeer, Update

AGENT = Path(__file__).with_name("flooding_agent.py")
MIB = 1 << 20


@contextmanager
def growth_below(limit: int) -> Generator[None]:
    """The most memory that was taken at any time inside, more than there was at its beginning."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < limit, f"{(peak - before) / MIB:.1f} MiB more"


class Progress:
    """How many updates the agent has written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        text = self.path.read_bytes() if self.path.exists() else b""
        return int(text) if text else 0

    async def stands_still(self) -> int:
        """Wait until the agent has begun and does not get on any more; how far it came."""
        before = -1
        for _ in range(100):
            now = self()
            if now and now == before:
                return now
            before = now
            # What is waited for is that nothing happens: only time shows that.
            await asyncio.sleep(0.2)
        pytest.fail("the agent never stops writing")


@asynccontextmanager
async def flooding(
    tmp_path: Path, client: Client | None = None, **options: Any
) -> AsyncGenerator[tuple[AgentPeer, Progress]]:
    progress = tmp_path / "progress"
    async with spawn([sys.executable, str(AGENT), str(progress)], client=client, **options) as peer:
        yield peer, Progress(progress)


def number(update: Update) -> int:
    return int(update.text.rstrip("."))


@pytest.mark.bound(120)
@pytest.mark.covers("FF-20")
async def test_a_hundred_thousand_updates_through_a_handler_that_awaits_need_little_memory(
    tmp_path: Path,
) -> None:
    expected = 0

    async def handler(update: Update) -> None:
        nonlocal expected
        await asyncio.sleep(0)
        assert number(update) == expected
        expected += 1

    async with flooding(tmp_path, Client(on_update=handler)) as (peer, _):
        session = await peer.new_session(cwd=tmp_path)
        with growth_below(20 * MIB):
            iterated = 0
            async with session.prompt("100000x20") as turn:
                async for _update in turn:
                    iterated += 1
        assert (iterated, expected) == (100_000, 100_000)
        assert peer.connection.queued_updates == 0


@pytest.mark.covers("FF-20")
async def test_a_session_that_nobody_iterates_delays_no_other_while_budget_is_left() -> None:
    asked = asyncio.Event()

    async def decide(params: Any, ctx: Any) -> bool:
        asked.set()
        return True

    async with raw_agent(Client(permissions=decide)) as (peer, raw):
        for name in ("idle", "busy"):
            opening = asyncio.create_task(peer.new_session(cwd="/"))
            raw.answer(await raw.wait("session/new", len(peer.sessions) + 1), {"sessionId": name})
            await opening
        async with peer.sessions["idle"].prompt("go"):
            prompt = await raw.wait("session/prompt")
            full = peer.connection.limits.session_updates + 1_000
            raw.send(*(raw.update("idle", "x" * 100) for _ in range(full)))
            options = [{"optionId": "y", "name": "Yes", "kind": "allow_once"}]
            ask = {"sessionId": "busy", "toolCall": {"toolCallId": "t"}, "options": options}
            async with asyncio.timeout(1):
                answer = await raw.ask("session/request_permission", ask)
            assert answer["result"]["outcome"]["optionId"] == "y"
            assert asked.is_set()
            assert peer.connection.queued_updates == full
            raw.answer(prompt, {"stopReason": "end_turn"})


@pytest.mark.parametrize("then", ["iterate", "close", "leave"])
async def test_a_spent_budget_blocks_the_agent_until_something_is_taken_or_closed(
    tmp_path: Path, then: str
) -> None:
    total = 30_000
    async with flooding(tmp_path, limits=Limits(queue_bytes=8 * MIB)) as (peer, progress):
        session = await peer.new_session(cwd=tmp_path)
        with growth_below(20 * MIB):
            async with session.prompt(f"{total}x1000") as turn:
                stuck_at = await progress.stands_still()
                assert 7_000 < stuck_at < 10_000  # 8 MiB of frames, and a pipe
                assert peer.connection.reading_paused
                if then == "close":
                    await session.close()
                    assert session.session_id not in peer.sessions
                elif then == "iterate":
                    assert [number(update) async for update in turn] == list(range(total))
                    assert turn.stop_reason == "end_turn"
        assert progress() == total
        assert peer.connection.queued_bytes == 0
        assert not peer.connection.reading_paused


async def test_many_small_updates_spend_the_budget_by_their_number(tmp_path: Path) -> None:
    async with flooding(tmp_path, limits=Limits(queue_updates=5_000)) as (peer, progress):
        session = await peer.new_session(cwd=tmp_path)
        async with session.prompt("20000x1") as turn:
            stuck_at = await progress.stands_still()
            assert 5_000 < stuck_at < 12_000  # the rest is in the pipe
            assert [number(update) async for update in turn] == list(range(20_000))


@pytest.mark.parametrize("seconds", [0.0, 0.0002])
async def test_a_history_larger_than_the_budget_is_loaded_when_it_is_iterated(
    tmp_path: Path, seconds: float
) -> None:
    # Slower than the agent writes it, so that it would be past the overdraft in no time.
    order = "2000x200"
    async with flooding(tmp_path, limits=Limits(queue_bytes=40_000)) as (peer, _):
        seen = 0
        async with peer.load_session(order, cwd=tmp_path) as session:
            async for update in session.replay():
                assert (number(update), update.label) == (seen, "replay")
                seen += 1
                await asyncio.sleep(seconds)
        assert seen == 2_000
        assert session.response is not None


async def test_a_consumer_may_load_another_session_past_the_budget_that_it_has_spent_itself(
    tmp_path: Path,
) -> None:
    """The load waits for no history of its own, so that it is read into the overdraft."""
    seen: list[str] = []
    client = Client(on_update=lambda update: seen.append(update.session_id))
    async with flooding(tmp_path, client, limits=Limits(queue_bytes=200_000)) as (peer, _):
        session = await peer.new_session(cwd=tmp_path)
        async with session.prompt("1000x100") as turn:
            async for update in turn:
                if number(update) == 0:
                    while not peer.connection.reading_paused and len(seen) < 1000:
                        await asyncio.sleep(0.01)
                    await peer.load_session("10x10", cwd=tmp_path)
        assert turn.stop_reason == "end_turn"
        assert (seen.count("s1"), seen.count("10x10")) == (1000, 10)


async def test_a_history_is_loaded_through_observers_and_into_the_view_as_well(
    tmp_path: Path,
) -> None:
    order, seen = "5000x200", list[int]()

    async def handler(update: Update) -> None:
        await asyncio.sleep(0)
        seen.append(number(update))

    limits = Limits(queue_bytes=100_000)
    async with flooding(tmp_path, Client(on_update=handler), limits=limits) as (peer, _):
        await peer.load_session(order, cwd=tmp_path)
        assert seen == list(range(5_000))
    async with flooding(tmp_path, limits=limits) as (peer, _):
        async with peer.load_session(order, cwd=tmp_path) as session:
            view = session.view
        assert len(view.messages[0].text) == 5_000 * 200
        assert peer.connection.queued_bytes == 0


async def test_a_history_larger_than_the_budget_that_nobody_takes_fails_the_load(
    tmp_path: Path,
) -> None:
    async with flooding(tmp_path, limits=Limits(queue_bytes=100_000)) as (peer, _):
        with pytest.raises(LimitExceeded) as failed:
            await peer.load_session("5000x200", cwd=tmp_path)
        assert failed.value.limit == "queue_bytes"
        assert peer.sessions == {}
        assert peer.connection.queued_bytes == 0
        await peer.new_session(cwd=tmp_path)  # the link goes on
