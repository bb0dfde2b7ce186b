"""`antiphon demo --resume`: the story, its proof, and that the proof can fail."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon.cli._demo_resume import Plan, Witness, prove
from antiphon.journal._record import FrameHeads
from tests.cli.command import BOUND, COMMAND, antiphon, environment, left_by
from tests.cli.records import chunk, completed, orphaned, records, started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.cli._demo_resume import Proof
    from antiphon.journal import Record
    from tests.cli.command import Ran


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def ran(temporary: Path) -> Ran:
    return antiphon("demo", "--resume", "--json", env={"TMPDIR": str(temporary)})


def step(ran: Ran, name: str, number: int = 0) -> dict[str, Any]:
    return [line for line in ran.lines if line.get("step") == name][number]


@pytest.mark.covers("J7", "J10")
def test_nothing_is_lost_or_doubled_by_a_cut_link_and_a_killed_agent(ran: Ran) -> None:
    assert (ran.code, ran.err) == (0, "")
    result = ran.result
    assert result["ok"] is True
    for wrong in ("missing", "doubled", "invented", "different", "damages"):
        assert result[wrong] == []
    assert (result["turns"], result["orphans"], result["stop_reason"]) == (2, 1, "end_turn")
    assert result["history"] + result["live"] == result["records"]
    assert result["numbers"] == result["to"]


def test_both_accidents_happen_in_the_middle_of_a_turn(ran: Ran) -> None:
    cut, away, killed = step(ran, "cut"), step(ran, "away"), step(ran, "killed")
    first, second = step(ran, "reattached"), step(ran, "reattached", 1)

    assert 0 < cut["held"] < away["journal"] == first["mark"] < killed["held"]
    # What came while nobody was there came as history, and only that.
    assert (first["held"], first["history"]) == (cut["held"], first["mark"] - cut["held"])
    assert second["held"] == killed["held"] < second["mark"]
    assert step(ran, "prompted")["stop_reason"] == "cancelled"
    assert step(ran, "ended")["held"] == ran.result["records"] > second["mark"]
    assert step(ran, "started")["pid"] == killed["pid"] != step(ran, "restarted")["pid"]


def test_it_takes_a_few_seconds_and_leaves_nothing(ran: Ran, temporary: Path) -> None:
    assert ran.seconds < 15
    assert not list(temporary.iterdir())


def test_a_person_is_told_a_story_and_its_end() -> None:
    ran = antiphon("demo", "--resume", "--seed", "3")
    plan = Plan.of(3)

    assert (ran.code, ran.err) == (0, "")
    for words in (
        "1. An agent starts, a process of its own.",
        f"2. A client opens a session, attaches to its records, and asks: count to {plan.to}.",
        "3. The link is cut. The client holds the records up to offset ",
        "4. Nobody listens, and the agent goes on",
        "5. The client connects again and asks for what follows offset ",
        "6. The agent is killed (SIGKILL)",
        "7. The agent starts again with the same journal",
        "from the journal, at its end that the turn is orphaned",
        "9. The turn has ended (cancelled). The client asks: go on.",
        "10. The turn ends: end_turn",
        "no gap, no duplicate",
        f"ok: the loop saw every number from 1 to {plan.to}, once and in order",
        "ok: the interrupted turn ended once, as orphaned",
    ):
        assert words in ran.out
    assert "not ok" not in ran.out


def test_a_seed_is_a_plan_and_every_plan_can_be_carried_out() -> None:
    plans = [Plan.of(seed) for seed in range(200)]

    assert Plan.of(5) == plans[5]
    assert len(set(plans)) > 100
    for plan in plans:
        assert 5 < plan.cut < plan.away < plan.kill < plan.to <= 70


def test_where_paths_are_too_long_for_a_socket_it_goes_over_tcp(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()

    ran = antiphon("demo", "--resume", "--json", env={"TMPDIR": str(folder)})

    assert ran.code == 0
    assert ran.result["ok"] is True
    assert step(ran, "started")["address"].startswith("tcp:127.0.0.1:")
    assert not list(folder.iterdir())


# -- how it ends otherwise


@pytest.mark.parametrize(
    "arguments", [["--resume", "--cwd", "."], ["--seed", "1"], ["--resume", "--seed", "x"]]
)
def test_what_does_not_go_together_is_a_usage_error(arguments: list[str]) -> None:
    assert antiphon("demo", *arguments).code == 2


def test_it_has_a_time_limit(tmp_path: Path) -> None:
    ran = antiphon("demo", "--resume", "--json", "--timeout", "0.3", env={"TMPDIR": str(tmp_path)})

    assert ran.code == 5
    assert ran.result["error"]["kind"] == "timeout"
    assert ran.seconds < 8
    assert not list(tmp_path.iterdir())


def await_words(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stdout is not None
    assert any(words in line for line in iter(process.stdout.readline, b""))


def test_an_interrupt_leaves_no_agent_and_no_folder(tmp_path: Path) -> None:
    marked = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [*COMMAND, "demo", "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=marked
    ) as process:
        await_words(process, b"count to")
        process.send_signal(2)
        process.communicate(timeout=BOUND)

    assert process.returncode == 130
    assert not list(tmp_path.iterdir())
    assert not left_by(marked)


def test_an_agent_does_not_outlive_a_demo_that_is_killed(tmp_path: Path) -> None:
    marked = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [*COMMAND, "demo", "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=marked
    ) as process:
        await_words(process, b"count to")
        process.kill()
        process.communicate(timeout=BOUND)

    until = time.monotonic() + BOUND
    while left_by(marked):
        assert time.monotonic() < until


def test_a_show_that_cannot_be_written_is_no_success() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123  (a device)
        done = subprocess.run(
            [*COMMAND, "demo", "--resume"], stdout=full, stderr=subprocess.PIPE, timeout=BOUND
        )

    assert done.returncode == 130
    assert b"takes no more" in done.stderr


def test_an_agent_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    marked = environment(TMPDIR=str(tmp_path))
    done = played(
        "_demo_resume.module_command = lambda *words: "
        "[sys.executable, '-c', 'raise SystemExit(\"no luck\")']\n",
        marked,
    )

    assert done.returncode == 3
    result = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert result["error"]["kind"] == "start"
    assert "no luck" in result["error"]["stderr"]
    assert not list(tmp_path.iterdir())


# -- that the proof can fail


def played(change: str, marked: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """The demo with something in it changed."""
    program = (
        "import sys\n"
        "from antiphon.cli import main, _demo_resume\n"
        f"{change}"
        "sys.exit(main(['demo', '--resume', '--json', '--timeout', '15']))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=BOUND, env=marked
    )


#: How a client may go on wrongly after the first accident, and what is wrong then.
WRONG = {
    "from the last record instead of behind it": ("from_offset=session.offset", "doubled"),
    "from too far": ("from_offset=session.offset + 3", "missing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_client_that_goes_on_wrongly_fails(wrong: str) -> None:
    how, verdict = WRONG[wrong]
    marked = environment()
    done = played(
        "from antiphon import Session\n"
        "right, times = Session.reattach, []\n"
        "def reattach(session, *to, **options):\n"
        "    times.append(to)\n"
        "    if len(times) == 2:  # the first is the attach, the second after the first accident\n"
        f"        options.update({how})\n"
        "    return right(session, *to, **options)\n"
        "Session.reattach = reattach\n",
        marked,
    )

    assert done.returncode == 1, done.stderr
    result = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert result["ok"] is False
    assert result[verdict]
    assert not left_by(marked)


PLAN = Plan(to=4, cut=1, away=2, kill=3)
JOURNAL = records(
    ("session_created", {"cwd": "/"}),
    started(1),
    chunk("user_message", "Count."),
    chunk("agent_message", "1 "),
    chunk("agent_message", "2 "),
    orphaned(1),
    started(2),
    chunk("agent_message", "3 "),
    chunk("agent_message", "4 "),
    completed(2),
)


def proof_of(
    journal: Sequence[Record],
    frames: Sequence[bytes],
    numbers: Sequence[int] = (1, 2, 3, 4),
    **more: Any,
) -> Proof:
    witness = Witness()
    for frame in frames:
        witness("in", frame)
    return prove(journal, witness, numbers, PLAN, **{"stop_reason": "end_turn", **more})


def frames_of(journal: Sequence[Record]) -> list[bytes]:
    return [FrameHeads("s-1").frame(one) for one in journal]


def swapped(frames: list[bytes]) -> list[bytes]:
    return [*frames[:4], frames[5], frames[4], *frames[6:]]


BARE = b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s-1","update":{}}}'


def test_the_proof_holds_where_what_came_is_the_journal() -> None:
    others = [
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
        b'{"jsonrpc":"2.0","method":"_x","params":{}}',
    ]
    proof = proof_of(JOURNAL, [*frames_of(JOURNAL), *others])

    assert proof.holds
    assert (proof.records, proof.came, proof.turns, proof.orphans) == (10, 10, 2, 1)


def written(frames: list[bytes], old: bytes, new: bytes) -> list[bytes]:
    return [frame.replace(old, new) for frame in frames]


FRAMES = frames_of(JOURNAL)
CAME: list[tuple[list[bytes], str, list[int]]] = [
    (FRAMES[:6] + FRAMES[7:], "missing", [7]),
    (FRAMES[:-1], "missing", [10]),
    (FRAMES[1:], "missing", [1]),
    ([*FRAMES[:6], *FRAMES[5:]], "doubled", [6]),
    ([*FRAMES, FRAMES[0]], "doubled", [1]),
    (written(FRAMES, b"2 ", b"9 "), "different", [5]),
    (written(FRAMES, b'"taint":"agent"', b'"taint":"user"'), "different", [4, 5, 8, 9]),
    (written(FRAMES, b'"offset":10', b'"offset":11'), "invented", [11]),
]


@pytest.mark.parametrize(("frames", "wrong", "offsets"), CAME)
def test_the_proof_names_each_record_that_is_wrong(
    frames: list[bytes], wrong: str, offsets: list[int]
) -> None:
    proof = proof_of(JOURNAL, frames)

    assert getattr(proof, wrong) == offsets
    assert not proof.whole
    assert not proof.holds


def test_the_proof_fails_for_each_other_thing_that_is_wrong() -> None:
    frames = frames_of(JOURNAL)
    two_orphans = records(
        *((one.kind, one.data) for one in JOURNAL[:6]),
        orphaned(1),
        *((one.kind, one.data) for one in JOURNAL[6:]),
    )
    none = records(*((one.kind, one.data) for one in JOURNAL if "orphaned" not in str(one.data)))

    assert not proof_of(JOURNAL, swapped(frames)).ordered
    assert not proof_of(JOURNAL, [*frames, BARE]).whole
    assert not proof_of([], []).holds
    for numbers in ([1, 2, 4], [1, 2, 2, 3, 4], [1, 3, 2, 4], [1, 2, 3], [1, 2, 3, 4, 5]):
        proof = proof_of(JOURNAL, frames, numbers)
        assert proof.whole
        assert not proof.counted
        assert not proof.holds
    assert not proof_of(two_orphans, frames_of(two_orphans)).holds
    assert not proof_of(none, frames_of(none)).holds
    assert not proof_of(JOURNAL, frames, stop_reason="cancelled").holds
    assert not proof_of(JOURNAL, frames, damages=["x"]).holds
