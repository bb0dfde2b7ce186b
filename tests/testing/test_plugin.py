"""The pytest plugin gives what it says to a user's tests, and costs those who use none of it nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import antiphon.testing

if TYPE_CHECKING:
    import pytest


def run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    """Run a user's test file in a process of its own."""
    pytester.makepyfile(test)
    return pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=25)


def test_pytest_finds_the_plugin_where_antiphon_is_installed() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="pytest11")}

    assert found["antiphon"] == "antiphon.testing.plugin"


def test_loading_it_loads_nothing_else() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import antiphon.testing.plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=25
    )

    assert done.stdout.split() == [
        "antiphon",
        "antiphon._version",
        "antiphon.testing",
        "antiphon.testing.plugin",
    ]


def test_nothing_of_the_library_loads_it() -> None:
    code = "import antiphon, sys; from antiphon import *; print('antiphon.testing' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=25
    )

    assert done.stdout.strip() == "False"


def test_every_name_of_the_door_resolves() -> None:
    assert sorted(antiphon.testing._HOMES) == antiphon.testing.__all__
    for name in antiphon.testing.__all__:
        value = getattr(antiphon.testing, name)
        assert value.__name__ == name
    assert not hasattr(antiphon.testing, "no_such_name")


def test_an_agent_can_be_tested_with_nothing_but_fixtures(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from antiphon import Agent

        class Echo(Agent):
            async def prompt(self, turn):
                await turn.say(turn.text)

        def test_it_says_what_it_hears(antiphon_raw_client, antiphon_virtual):
            async def main():
                async with antiphon_raw_client(Echo()) as raw:
                    opened = await raw.ask("session/new", {"cwd": "/", "mcpServers": []})
                    prompt = {
                        "sessionId": opened["result"]["sessionId"],
                        "prompt": [{"type": "text", "text": "hello"}],
                    }
                    raw.send(raw.request(2, "session/prompt", prompt))
                    update = {"content": {"text": "hello"}}
                    await raw.expect("session/update", params={"update": update})
                    await raw.expect(id=2, result={"stopReason": "end_turn"})
            antiphon_virtual(main())
        """,
    )
    result.assert_outcomes(passed=1)


def test_a_client_can_be_tested_with_nothing_but_fixtures(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        import asyncio

        def test_it_opens_a_session(antiphon_raw_agent):
            async def main():
                async with antiphon_raw_agent() as (agent, raw):
                    opening = asyncio.create_task(agent.new_session(cwd="/"))
                    raw.answer(await raw.expect("session/new"), {"sessionId": "s"})
                    assert (await opening).session_id == "s"
            asyncio.run(main())
        """,
    )
    result.assert_outcomes(passed=1)


def test_a_failure_shows_the_frame_and_what_differs(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from antiphon.testing import RawPeer

        def test_it_fails(antiphon_memory_pair, antiphon_virtual):
            async def main():
                one, other = antiphon_memory_pair()
                async with RawPeer(one) as here, RawPeer(other) as there:
                    here.send(here.request(1, "a", {"x": [1, 2]}))
                    await there.expect("a", params={"x": [1, 3]})
            antiphon_virtual(main())
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: the next frame is another one than was expected",
            '*expected: {"method": "a", "params": {"x": ?1, 3?}}',
            '*came:     {"jsonrpc": "2.0", "id": 1, "method": "a", "params": {"x": ?1, 2?}}',
            "*params.x?1?: came 2, expected 3",
        ]
    )
    # What is shown is the user's line, not how the peer looks at frames.
    result.stdout.fnmatch_lines([">*antiphon_virtual(main())", '*await there.expect("a", *'])
    result.stdout.no_fnmatch_line("*raise AssertionError*")
