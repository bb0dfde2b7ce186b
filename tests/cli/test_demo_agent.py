"""The demo agent as a peer of any client, over a pair in memory."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Client, InvalidParams, RequestError, ResourceNotFound, connect, serve
from antiphon.cli import _demo_fixture as fixture
from antiphon.cli._demo_agent import DemoAgent
from antiphon.schema import v1
from antiphon.services import Files, Terminals
from antiphon.transports import memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon import AgentPeer, Update


@asynccontextmanager
async def demo_agent(client: Client | None = None, pace: float = 0) -> AsyncGenerator[AgentPeer]:
    theirs, ours = memory_pair()
    demo = DemoAgent(pace)
    serving = asyncio.create_task(serve(demo, theirs))
    try:
        async with connect(ours, client=client) as agent:
            yield agent
    finally:
        await serving
        demo.clear()


def kinds(updates: Sequence[Update]) -> set[str]:
    return {update.kind for update in updates}


def edited(updates: Sequence[Update]) -> Path:
    """The file of the diff that was shown."""
    for update in updates:
        if isinstance(update.value, v1.ToolCall):
            for item in update.value.content or ():
                if isinstance(item, v1.Diff):
                    return Path(item.path)
    raise AssertionError("no diff")


async def test_agent_works_in_the_session_where_client_lends_what_it_needs(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)
    client = Client(files=Files(tmp_path), terminals=Terminals(tmp_path), permissions="allow")

    async with demo_agent(client) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("go")

    assert result.stop_reason == "end_turn"
    assert fixture.is_fixed(tmp_path)
    assert {
        "plan",
        "tool_call",
        "tool_call_update",
        "usage_update",
        "agent_thought_chunk",
    } <= kinds(result.updates)


@pytest.mark.covers("R1-33", "R1-34")
async def test_agent_works_elsewhere_without_the_clients_files_or_terminals(tmp_path: Path) -> None:
    fixture.write_fixture(tmp_path)

    async with demo_agent(Client(permissions="allow")) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("what now?")
        place = edited(result.updates).parent
        assert fixture.is_fixed(place)

    assert result.stop_reason == "end_turn"
    assert "“what now?”" in result.text
    assert "folder of my own" in result.text
    assert "The test passes now." in result.text
    assert fixture.is_fixture(tmp_path)
    assert place != tmp_path


async def test_agent_leaves_the_file_alone_when_it_may_not_change_it(tmp_path: Path) -> None:
    async with demo_agent(Client(permissions="deny")) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("x")
        assert fixture.is_fixture(edited(result.updates).parent)

    assert result.stop_reason == "end_turn"
    assert "I leave the file as it is" in result.text


async def test_agent_stops_where_its_question_is_answered_with_cancelled(tmp_path: Path) -> None:
    async def cancelled(params: Any, ctx: Any) -> None:
        return None

    async with demo_agent(Client(permissions=cancelled)) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("x")
        assert fixture.is_fixture(edited(result.updates).parent)

    assert result.stop_reason == "cancelled"


async def test_agent_says_so_when_the_client_refuses_what_it_lends(tmp_path: Path) -> None:
    async def refuse(operation: object) -> bool:
        return False

    fixture.write_fixture(tmp_path)
    client = Client(
        files=Files(tmp_path, guard=refuse),
        terminals=Terminals(tmp_path, guard=refuse),
        permissions="allow",
    )
    async with demo_agent(client) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("x")

    assert result.stop_reason == "end_turn"
    assert "I cannot go on" in result.text
    assert fixture.is_fixture(tmp_path)


async def test_agent_does_not_ask_in_swift_mode(tmp_path: Path) -> None:
    async with demo_agent(Client(permissions="deny")) as agent:
        session = await agent.new_session(cwd=tmp_path)
        await session.set_mode("swift")
        result = await session.prompt("x")
        assert fixture.is_fixed(edited(result.updates).parent)


@pytest.mark.parametrize("steps", [1, 8, 20, 40])
async def test_agent_obeys_cancel_at_any_step(steps: int, tmp_path: Path) -> None:
    async with demo_agent(Client(permissions="allow"), pace=0.001) as agent:
        session = await agent.new_session(cwd=tmp_path)
        async with asyncio.timeout(5), session.prompt("x") as turn:
            async for _ in turn:
                steps -= 1
                if steps == 0:
                    await turn.cancel()
        again = await session.prompt("y")

    assert turn.stop_reason == "cancelled"
    assert again.stop_reason == "end_turn"


async def test_agent_obeys_cancel_while_its_question_is_open(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never(params: Any, ctx: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with demo_agent(Client(permissions=never)) as agent:
        session = await agent.new_session(cwd=tmp_path)

        async def cancel_when_asked() -> None:
            await asked.wait()
            await session.cancel()

        async with asyncio.timeout(5):
            result, _ = await asyncio.gather(session.prompt("x"), cancel_when_asked())

    assert result.stop_reason == "cancelled"


async def test_agent_obeys_cancel_while_the_test_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (fixture.TEST_COMMAND[0], "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(fixture, "TEST_COMMAND", command)
    async with demo_agent(Client(permissions="allow")) as agent:
        session = await agent.new_session(cwd=tmp_path)
        async with asyncio.timeout(5), session.prompt("x") as turn:
            async for update in turn:
                if isinstance(update.value, v1.ToolCall) and update.value.kind == "execute":
                    await turn.cancel()

    assert turn.stop_reason == "cancelled"


async def test_mode_and_config_option_are_two_faces_of_one_state(tmp_path: Path) -> None:
    seen: list[Any] = []
    client = Client(on_update=lambda update: seen.append(update.value))
    async with demo_agent(client) as agent:
        session = await agent.new_session(cwd=tmp_path)
        assert session.modes is not None
        assert [mode.id for mode in session.modes.available_modes] == ["careful", "swift"]
        await session.set_mode("swift")
        await session.set_config_option("mode", "careful")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while len(seen) < 2:
                    await asyncio.sleep(0)

    first, second = seen
    assert isinstance(first, v1.ConfigOptionUpdate)
    assert isinstance(first.config_options[0], v1.SessionConfigSelect)
    assert first.config_options[0].current_value == "swift"
    assert isinstance(second, v1.CurrentModeUpdate)
    assert second.current_mode_id == "careful"


async def test_unknown_modes_options_and_cursors_are_refused(tmp_path: Path) -> None:
    async with demo_agent() as agent:
        session = await agent.new_session(cwd=tmp_path)
        for refused in (
            session.set_mode("reckless"),
            session.set_config_option("mode", "reckless"),
            session.set_config_option("colour", "red"),
            agent.list_sessions(cursor="garbage"),
        ):
            with pytest.raises(InvalidParams):
                await refused


@pytest.mark.covers("R1-52", "R1-54")
async def test_load_replays_the_conversation_and_resume_does_not(tmp_path: Path) -> None:
    client = Client(permissions="allow")
    async with demo_agent(client) as agent:
        session = await agent.new_session(cwd=tmp_path)
        result = await session.prompt("first words")
        await agent.close_session(session.session_id)

        async with agent.load_session(session.session_id, cwd=tmp_path) as loaded:
            replayed = [update async for update in loaded.replay()]
        await agent.close_session(session.session_id)
        resumed = await agent.resume_session(session.session_id, cwd=tmp_path)
        again = await resumed.prompt("second words")

    assert replayed[0].kind == "user_message_chunk"
    text = "".join(update.text for update in replayed)
    assert text == result.text
    assert [u.value.title for u in replayed if isinstance(u.value, v1.ToolCall)] == [
        "Read leap.py",
        "Read test_leap.py",
        "Repair leap.py",
        "Run test_leap.py",
    ]
    assert "user_message_chunk" not in kinds(again.updates)


async def test_sessions_are_listed_by_folder_until_they_are_deleted(tmp_path: Path) -> None:
    other = tmp_path / "other"
    async with demo_agent() as agent:
        mine = await agent.new_session(cwd=tmp_path)
        await agent.new_session(cwd=other)
        for _ in range(60):
            await agent.new_session(cwd=tmp_path)

        listed = [info.session_id async for info in agent.iter_sessions(cwd=tmp_path)]
        assert len(listed) == len(set(listed)) == 61
        assert mine.session_id in listed
        assert [info.cwd async for info in agent.iter_sessions(cwd=other)] == [str(other)]

        await agent.delete_session(mine.session_id)
        await agent.delete_session(mine.session_id)
        assert mine.session_id not in {s.session_id async for s in agent.iter_sessions()}


@pytest.mark.covers("R1-55", "R1-57")
async def test_unknown_sessions_and_other_folders_are_refused(tmp_path: Path) -> None:
    async with demo_agent() as agent:
        with pytest.raises(ResourceNotFound) as unknown:
            await agent.load_session("nope", cwd=tmp_path)
        session = await agent.new_session(cwd=tmp_path)
        await agent.close_session(session.session_id)
        with pytest.raises(RequestError) as elsewhere:
            await agent.resume_session(session.session_id, cwd=tmp_path / "elsewhere")

    assert unknown.value.data == {"sessionId": "nope"}
    assert elsewhere.value.code == -32602
