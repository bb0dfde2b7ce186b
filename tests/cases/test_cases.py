"""The 21 cases that other agents are tested with, on both kinds of link; and each check, failing."""

from __future__ import annotations

import asyncio
import copy
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import Agent, Client, Limits, RequestError, Turn, connect, serve, spawn
from antiphon.schema import v1
from antiphon.transports import memory_pair
from tests.cases.case_agent import CaseAgent
from tests.cases.engine import CASES, Case, CaseClient, play

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from antiphon import AgentContext, AgentPeer, TelemetryEvent

PROGRAM = Path(__file__).with_name("case_agent.py")

ROWS = [
    pytest.param("acp.v1.initialize.handshake", marks=pytest.mark.covers("ACPX-001")),
    pytest.param("acp.v1.session.new.basic", marks=pytest.mark.covers("ACPX-002")),
    pytest.param("acp.v1.session.prompt.single_turn", marks=pytest.mark.covers("ACPX-003")),
    pytest.param("acp.v1.session.update.termination", marks=pytest.mark.covers("ACPX-004")),
    pytest.param("acp.v1.session.cancel.in_flight", marks=pytest.mark.covers("ACPX-005")),
    pytest.param("acp.v1.errors.invalid_params", marks=pytest.mark.covers("ACPX-006")),
    pytest.param("acp.v1.errors.permission_denied", marks=pytest.mark.covers("ACPX-007")),
    pytest.param("acp.v1.errors.unknown_session", marks=pytest.mark.covers("ACPX-008")),
    pytest.param("acp.v1.session.cancel.idle", marks=pytest.mark.covers("ACPX-009")),
    pytest.param("acp.v1.session.prompt.multi_turn", marks=pytest.mark.covers("ACPX-010")),
    pytest.param("acp.v1.errors.invalid_prompt_session_type", marks=pytest.mark.covers("ACPX-011")),
    pytest.param("acp.v1.errors.permission_denied.write", marks=pytest.mark.covers("ACPX-012")),
    pytest.param("acp.v1.session.prompt.echo_empty", marks=pytest.mark.covers("ACPX-013")),
    pytest.param("acp.v1.session.prompt.unrecognized", marks=pytest.mark.covers("ACPX-014")),
    pytest.param("acp.v1.errors.invalid_params.cwd_null", marks=pytest.mark.covers("ACPX-015")),
    pytest.param("acp.v1.session.prompt.structured_blocks", marks=pytest.mark.covers("ACPX-016")),
    pytest.param("acp.v1.permissions.read.approved", marks=pytest.mark.covers("ACPX-017")),
    pytest.param("acp.v1.permissions.write.approved", marks=pytest.mark.covers("ACPX-018")),
    pytest.param(
        "acp.v1.session.prompt.background_completion", marks=pytest.mark.covers("ACPX-019")
    ),
    pytest.param("acp.v1.session.cancel.followup_prompt", marks=pytest.mark.covers("ACPX-020")),
    pytest.param("acp.v1.session.prompt.post_success_drain", marks=pytest.mark.covers("ACPX-021")),
]


def in_memory(
    agent: Agent, told: list[TelemetryEvent] | None = None
) -> Callable[[CaseClient, Limits, Any], Any]:
    """Opens a link in memory; `told` gets the events of both sides."""
    tell = None if told is None else told.append

    @asynccontextmanager
    async def open_(client: Client, limits: Limits, record: Any) -> AsyncGenerator[AgentPeer]:
        ours, theirs = memory_pair()
        serving = asyncio.create_task(
            serve(agent, theirs, limits=Limits(cancel_backstop=1), telemetry=tell)
        )
        try:
            async with connect(
                ours, client=client, limits=limits, record=record, telemetry=tell
            ) as peer:
                yield peer
        finally:
            await asyncio.wait_for(serving, 5)

    return open_


def over_stdio(client: CaseClient, limits: Limits, record: Any) -> Any:
    return spawn([sys.executable, str(PROGRAM)], client=client, limits=limits, record=record)


def odd(told: list[TelemetryEvent]) -> list[str]:
    """What a case has to say in advance, if it happens: empty turns, and faults of ours."""
    return [
        event.name
        for event in told
        if event.kind == "invariant" or event.name == "zero_updates_turn"
    ]


@pytest.mark.parametrize("case_id", ROWS)
async def test_every_case_comes_out_as_it_says_in_memory(case_id: str, tmp_path: Path) -> None:
    case = CASES[case_id]
    told: list[TelemetryEvent] = []

    failures, _ = await play(case, tmp_path, in_memory(CaseAgent(), told))

    assert failures == []
    assert odd(told) == case.events


@pytest.mark.parametrize("case_id", ROWS)
async def test_every_case_comes_out_as_it_says_over_stdio(case_id: str, tmp_path: Path) -> None:
    failures, _ = await play(CASES[case_id], tmp_path, over_stdio)

    assert failures == []


def test_every_case_of_the_file_is_played_under_its_number() -> None:
    played = [(row.values[0], mark.args[0]) for row in ROWS for mark in row.marks]

    assert played == [(case.id, case.number) for case in CASES.values()]
    assert [number for _, number in played] == [f"ACPX-{n:03}" for n in range(1, 22)]


async def test_an_event_that_a_case_does_not_say_is_seen(tmp_path: Path) -> None:
    told: list[TelemetryEvent] = []

    await play(CASES["acp.v1.session.prompt.single_turn"], tmp_path, in_memory(Silent(), told))

    assert odd(told) == ["zero_updates_turn"]


# ---------------------------------------------------------------- each check can fail


class Silent(CaseAgent):
    async def prompt(self, turn: Turn) -> None:
        """Say nothing."""


class Other(CaseAgent):
    async def prompt(self, turn: Turn) -> None:
        await turn.say("something else")


class Refusing(CaseAgent):
    async def prompt(self, turn: Turn) -> Any:
        await super().prompt(turn)
        return "refusal"


class Hasty(CaseAgent):
    """Is done before it can be cancelled."""

    async def prompt(self, turn: Turn) -> None:
        await turn.say("done")


class Stray(CaseAgent):
    """Sends a copy of each update to a session of its own making."""

    async def prompt(self, turn: Turn) -> None:
        chunk = v1.AgentMessageChunk(content=v1.TextContent(text="astray"))
        await turn.peer.notify(v1.SessionNotification(session_id="another", update=chunk))
        await super().prompt(turn)


class Nameless(CaseAgent):
    async def new_session(
        self, params: v1.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id="")


class Wordy(CaseAgent):
    async def initialize(self, params: Any, ctx: AgentContext) -> Any:
        answer = await super().initialize(params, ctx)
        answer.protocol_version = "1"  # type: ignore[assignment]
        return answer


class Toolless(CaseAgent):
    async def tool(self, turn: Turn, delay: float, title: str) -> None:
        await turn.say("done, and")
        await turn.say("more than enough was said")


class Liar(CaseAgent):
    """Tells of files that it never touched."""

    async def read(self, turn: Turn, path: str) -> str:
        return "error: permission denied, acpx"

    async def write(self, turn: Turn, path: str, content: str) -> str:
        return f"wrote {path}"


WRONG: list[tuple[str, str, Agent]] = [
    ("initialize_protocol_version_number", "acp.v1.initialize.handshake", Wordy()),
    ("saved_non_empty_string", "acp.v1.session.new.basic", Nameless()),
    ("saved_stop_reason_in", "acp.v1.session.prompt.single_turn", Refusing()),
    ("saved_stop_reason_in", "acp.v1.session.cancel.in_flight", Hasty()),
    ("updates_count_at_least", "acp.v1.session.prompt.single_turn", Silent()),
    ("updates_all_session", "acp.v1.session.update.termination", Stray()),
    ("updates_text_includes", "acp.v1.session.prompt.structured_blocks", Other()),
    (
        "updates_session_update_includes",
        "acp.v1.session.prompt.post_success_drain",
        Toolless(),
    ),
    ("filesystem_operation", "acp.v1.errors.permission_denied", Liar()),
    ("filesystem_operation", "acp.v1.permissions.write.approved", Liar()),
]


@pytest.mark.parametrize(
    ("check", "case_id", "agent"),
    WRONG,
    ids=lambda value: type(value).__name__ if isinstance(value, Agent) else None,
)
async def test_a_wrong_agent_fails_the_check_that_is_about_it(
    check: str, case_id: str, agent: Agent, tmp_path: Path
) -> None:
    failures, _ = await play(CASES[case_id], tmp_path, in_memory(agent))

    assert [failure for failure in failures if failure.startswith(f"{check}:")]


def test_every_kind_of_check_is_seen_to_fail() -> None:
    # The one below needs no wrong agent: it is the case that is wrong.
    seen = {check for check, _, _ in WRONG} | {"saved_error_present"}

    assert seen == {check["type"] for case in CASES.values() for check in case.checks}


async def test_a_case_without_an_error_fails_the_check_that_there_was_one(tmp_path: Path) -> None:
    case = changed("acp.v1.errors.invalid_params", cwd="/", expect_error={})

    failures, _ = await play(case, tmp_path, in_memory(CaseAgent()))

    assert [failure.partition(":")[0] for failure in failures] == ["step", "saved_error_present"]


def changed(case_id: str, **step: Any) -> Case:
    """A case whose first step is another."""
    case = copy.deepcopy(CASES[case_id])
    case.steps[0].update(step)
    return case


@pytest.mark.parametrize(
    ("expect_error", "passes"),
    [
        ({}, True),
        ({"codes": [-32602, 1]}, True),
        ({"codes": [-32603]}, False),
        ({"message_any": ["INVALID", "nothing"]}, True),
        ({"message_any": ["nothing of the kind"]}, False),
        (None, False),
    ],
)
async def test_an_expected_error_is_looked_at_closely(
    expect_error: Any, passes: bool, tmp_path: Path
) -> None:
    case = changed("acp.v1.errors.invalid_params", expect_error=expect_error)

    failures, _ = await play(case, tmp_path, in_memory(CaseAgent()))

    assert (failures == []) is passes


class Refuser(CaseAgent):
    async def prompt(self, turn: Turn) -> None:
        raise RequestError(-32050, "Not today")


async def test_a_prompt_that_fails_unexpectedly_fails_its_case(tmp_path: Path) -> None:
    case = CASES["acp.v1.session.prompt.single_turn"]

    failures, _ = await play(case, tmp_path, in_memory(Refuser()))

    assert failures[0] == "step: prompt failed: Not today (-32050)"


class Stuck(CaseAgent):
    async def new_session(self, params: Any, ctx: AgentContext) -> Any:
        await asyncio.Event().wait()

    async def prompt(self, turn: Turn) -> None:
        await turn.wait_cancelled()


class StuckInTurns(Stuck):
    new_session = CaseAgent.new_session


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Stuck(), "step: new_session failed: RequestTimeout"),
        (StuckInTurns(), "step: prompt failed: RequestTimeout"),
    ],
    ids=["request", "prompt"],
)
async def test_an_agent_that_does_not_answer_fails_its_case_in_time(
    agent: Agent, said: str, tmp_path: Path
) -> None:
    case = copy.deepcopy(CASES["acp.v1.session.prompt.single_turn"])
    case.request_timeout = case.update_timeout = 0.05

    failures, _ = await play(case, tmp_path, in_memory(agent))

    assert failures[0].startswith(said)
