from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from antiphon import RequestError
from antiphon.cli._services import SHOWN_CHARS, LentTerminals
from antiphon.schema import v1_unstable as v1

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon.services import Operation


class Here:
    session_id = "s"

    def __init__(self, root: Path) -> None:
        self.roots = [str(root)]


class Ears:
    """Hears what is printed."""

    def __init__(self) -> None:
        self.printed = ""
        self.something = asyncio.Event()

    def show(self, terminal_id: str, text: str) -> None:
        del terminal_id
        self.printed += text
        self.something.set()


async def yes(operation: Operation) -> bool:
    return True


async def no(operation: Operation) -> bool:
    return False


@pytest.fixture
def ears() -> Ears:
    return Ears()


async def opened(root: Path, ears: Ears) -> AsyncGenerator[LentTerminals]:
    terminals = LentTerminals(str(root), guard=yes, show=ears.show)
    yield terminals
    await terminals.aclose()


def python(program: str) -> v1.CreateTerminalRequest:
    return v1.CreateTerminalRequest(session_id="s", command=sys.executable, args=["-uc", program])


async def test_output_is_shown_while_the_command_runs(tmp_path: Path, ears: Ears) -> None:
    async for terminals in opened(tmp_path, ears):
        created = await terminals.create_terminal(
            python("print('one'); input() if 0 else __import__('time').sleep(60)"), Here(tmp_path)
        )
        async with asyncio.timeout(10):
            while "\n" not in ears.printed:
                ears.something.clear()
                await ears.something.wait()
        assert ears.printed == "one\n"
        release = v1.ReleaseTerminalRequest(session_id="s", terminal_id=created.terminal_id)
        await terminals.release_terminal(release, Here(tmp_path))


async def test_output_is_shown_to_its_end_and_once(tmp_path: Path, ears: Ears) -> None:
    async for terminals in opened(tmp_path, ears):
        created = await terminals.create_terminal(
            python("for n in range(100): print(n)"), Here(tmp_path)
        )
        wait = v1.WaitForTerminalExitRequest(session_id="s", terminal_id=created.terminal_id)
        assert (await terminals.wait_for_terminal_exit(wait, Here(tmp_path))).exit_code == 0
        release = v1.ReleaseTerminalRequest(session_id="s", terminal_id=created.terminal_id)
        await terminals.release_terminal(release, Here(tmp_path))

    assert ears.printed == "".join(f"{n}\n" for n in range(100))


async def test_looking_costs_the_agent_nothing(tmp_path: Path, ears: Ears) -> None:
    def broken(terminal_id: str, text: str) -> None:
        raise OSError

    terminals = LentTerminals(str(tmp_path), guard=yes, show=broken)
    created = await terminals.create_terminal(python("print('x')"), Here(tmp_path))
    wait = v1.WaitForTerminalExitRequest(session_id="s", terminal_id=created.terminal_id)

    assert (await terminals.wait_for_terminal_exit(wait, Here(tmp_path))).exit_code == 0
    await terminals.aclose()


async def test_of_much_output_the_beginning_is_shown(tmp_path: Path, ears: Ears) -> None:
    async for terminals in opened(tmp_path, ears):
        created = await terminals.create_terminal(python("print('x' * 300_000)"), Here(tmp_path))
        told = v1.TerminalOutputRequest(session_id="s", terminal_id=created.terminal_id)
        wait = v1.WaitForTerminalExitRequest(session_id="s", terminal_id=created.terminal_id)
        await terminals.wait_for_terminal_exit(wait, Here(tmp_path))

        assert ears.printed == "x" * SHOWN_CHARS
        assert len((await terminals.terminal_output(told, Here(tmp_path))).output) == 300_001


async def test_a_command_that_may_not_run_leaves_nothing(tmp_path: Path, ears: Ears) -> None:
    terminals = LentTerminals(str(tmp_path), guard=no, show=ears.show)

    with pytest.raises(RequestError):
        await terminals.create_terminal(python("print(1)"), Here(tmp_path))
    await terminals.aclose()
