"""The official Python SDK and ours at the two ends of a socket, and several of them at one agent."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Agent, Turn, connect, serve_tcp, serve_unix
from tests.interop.programs import PEERS, PROGRAMS, PYTHON_SDKS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

TEXTS = ["one", "two " * 5000, "drei \u2028 漢"]
PATIENCE = 25


class Echo(Agent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say(f"echo: {turn.text}")


def words(sdk: str, role: str, address: str) -> list[str]:
    return [str(PEERS / sdk / "bin" / "python"), str(PROGRAMS / "py_sdk_socket.py"), role, address]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_their_clients_share_our_agent(tmp_path: Path, kind: str) -> None:
    server = serve_unix(Echo(), tmp_path / "s") if kind == "unix" else serve_tcp(Echo())

    async def run(sdk: str) -> dict[str, Any]:
        done = await asyncio.to_thread(
            subprocess.run,
            words(sdk, "client", server.address),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    async with server, connect(server.address) as ours:
        reports = await asyncio.gather(*(run(sdk) for sdk in PYTHON_SDKS * 2))
        session = await ours.new_session(cwd="/")
        outcome = await session.prompt("and ours")

    assert outcome.text == "echo: and ours"
    for report in reports:
        assert report["heard"] == [f"echo: {text}" for text in TEXTS]
        assert report["reasons"] == ["end_turn"] * 3


@pytest.mark.parametrize("sdk", PYTHON_SDKS)
async def test_our_clients_share_their_agent(tmp_path: Path, sdk: str) -> None:
    address = f"unix:{tmp_path / 's'}"
    with subprocess.Popen(words(sdk, "agent", address), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"

        async def ask(number: int) -> list[str]:
            async with connect(address) as agent:
                session = await agent.new_session(cwd="/")
                return [(await session.prompt(f"{number} {text}")).text for text in TEXTS]

        answers = await asyncio.gather(*(ask(number) for number in range(3)))
        process.send_signal(signal.SIGTERM)

    assert answers == [[f"echo: {number} {text}" for text in TEXTS] for number in range(3)]
