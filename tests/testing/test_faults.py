"""Bytes on their way are cut, late, repeated, lost or ended as a test says; our two sides stand it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import (
    Agent,
    AgentContext,
    AntiphonError,
    Client,
    ConnectionClosed,
    Limits,
    Turn,
    Update,
)
from antiphon.core import LineFramer, join_frames
from antiphon.schema import v1, v1_unstable
from antiphon.testing import ByteTransport, Faults, RawPeer, byte_pair, joined, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core import Fault

FRAMES = [b"one", "zwö \u2028".encode(), b"3" * 40, b"{}"]
WIRE = join_frames(FRAMES)
ARRIVES = [frame.replace("\u2028".encode(), b"\\u2028") for frame in FRAMES]

# ---------------------------------------------------------------------- what is said, and what comes


@dataclass
class Ends:
    """Both ends of a link, each with a raw peer."""

    here: RawPeer
    there: RawPeer
    near: ByteTransport
    far: ByteTransport


async def started(
    a_to_b: Faults | None = None, b_to_a: Faults | None = None, limits: Limits | None = None
) -> Ends:
    near, far = byte_pair(a_to_b, b_to_a, limits)
    ends = Ends(RawPeer(near), RawPeer(far), near, far)
    await ends.here.start()
    await ends.there.start()
    return ends


async def settled() -> None:
    """All that is to happen has happened: no delay in these tests is longer."""
    await asyncio.sleep(10_000)


def arrived(faults: Faults, *, end: Callable[[ByteTransport], None] | None = None) -> RawPeer:
    """What comes at the other end of FRAMES, all sent in one go."""

    async def main() -> RawPeer:
        ends = await started(faults)
        ends.here.send(*FRAMES)
        if end is not None:
            end(ends.near)
        await settled()
        return ends.there

    return run_virtual(main(), bound=1_000_000)


def test_nothing_is_wrong_unless_it_is_said() -> None:
    there = arrived(Faults())
    assert there.raw_frames == ARRIVES
    assert there.batches == [ARRIVES]
    assert not there.ended.is_set()


def test_a_cut_at_any_byte_changes_nothing() -> None:
    for cut in range(1, len(WIRE)):
        there = arrived(Faults(chunks=(cut, len(WIRE))))
        assert there.raw_frames == ARRIVES, cut
        whole = WIRE[:cut].count(b"\n")
        assert len(there.batches) == (1 if whole in {0, len(FRAMES)} else 2), cut


@pytest.mark.parametrize(
    "chunks",
    [1, 2, 7, (1, 3), (5, 1, 1), Random(5)],
    ids=["1", "2", "7", "1-3", "5-1-1", "random"],
)
def test_cuts_everywhere_change_nothing(chunks: Any) -> None:
    assert arrived(Faults(chunks=chunks)).raw_frames == ARRIVES


@given(
    frames=st.lists(st.binary(min_size=1).filter(lambda f: not set(b"\r\n") & set(f)), max_size=20),
    writes=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    delays=st.lists(st.floats(0, 9), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_without_damage_what_is_sent_arrives_whatever_the_cuts_and_delays(
    frames: list[bytes], writes: int, sizes: list[int], delays: list[float]
) -> None:
    async def main() -> None:
        faults = Faults(chunks=sizes, delay=lambda number: delays[number % len(delays)])
        ends = await started(faults, faults)
        for number in range(writes):
            ends.here.send(*frames[number::writes])
            await asyncio.sleep(number % 3)
        await settled()
        expected = [frame for number in range(writes) for frame in frames[number::writes]]
        reference = LineFramer(1 << 20)
        assert ends.there.raw_frames == reference.feed(join_frames(expected))

    run_virtual(main(), bound=1_000_000)


@pytest.mark.virtual_time
async def test_a_cut_stays_where_it_is_when_the_sender_pauses_inside_a_chunk() -> None:
    def delay(number: int) -> float:
        return [1.0, 1.0, 5.0, 0.0][number]

    ends = await started(Faults(chunks=(4, 4), delay=delay))
    loop = asyncio.get_running_loop()
    seen: list[tuple[float, int]] = []

    ends.there.on_frames = lambda _frames: seen.append((loop.time(), len(ends.there.raw_frames)))
    ends.near.send_bytes(b"a\nb")  # chunk 0 is these three, since no more is there
    await asyncio.sleep(0.5)
    ends.near.send_bytes(b"\ncd\nx\n")  # chunk 1 completes the four, chunk 2 is full, 3 is not
    await settled()
    assert seen == [(1.0, 1), (1.5, 2), (5.5, 3), (5.5, 4)]
    assert ends.there.raw_frames == [b"a", b"b", b"cd", b"x"]


@pytest.mark.virtual_time
async def test_a_delay_is_how_long_a_chunk_travels_and_none_overtakes_another() -> None:
    loop = asyncio.get_running_loop()
    ends = await started(Faults(delay=lambda number: [5.0, 1.0, 9.0][number]))
    seen: list[tuple[float, bytes | Fault]] = []
    ends.there.on_frames = lambda frames: seen.extend((loop.time(), f) for f in frames)
    for text in (b"first", b"second", b"third"):
        ends.here.send(text)
        await asyncio.sleep(0.5)
    await settled()
    assert seen == [(5.0, b"first"), (5.0, b"second"), (10.0, b"third")]


@pytest.mark.virtual_time
async def test_each_direction_has_its_own_faults() -> None:
    loop = asyncio.get_running_loop()
    ends = await started(Faults(delay=1.0), Faults(delay=20.0, drop={1}))
    ends.here.send(b"there")
    await ends.there.until(lambda: ends.there.raw_frames)
    assert loop.time() == 1.0
    ends.there.send(b"back")
    ends.there.bound = ends.here.bound = 50.0
    await ends.here.until(lambda: ends.here.raw_frames)
    assert loop.time() == 21.0
    ends.there.send(b"lost")
    ends.here.send(b"kept")
    await settled()
    assert ends.here.raw_frames == [b"back"]
    assert ends.there.raw_frames == [b"there", b"kept"]


def test_chunks_are_lost_or_repeated_by_their_numbers() -> None:
    text = b"a\nbb\nccc\n"
    chunks = [text[at : at + 2] for at in range(0, len(text), 2)]

    def through(faults: Faults) -> list[bytes]:
        async def main() -> list[bytes]:
            ends = await started(faults)
            ends.near.send_bytes(text)
            await settled()
            ends.near.end_output()
            await settled()
            return ends.there.raw_frames

        return run_virtual(main(), bound=1_000_000)

    for number in range(len(chunks)):
        left = b"".join(chunks[:number] + chunks[number + 1 :])
        twice = b"".join([*chunks[: number + 1], *chunks[number:]])
        assert through(Faults(chunks=2, drop={number})) == left.split()
        assert through(Faults(chunks=2, duplicate={number})) == twice.split()
    assert through(Faults(chunks=2, drop=range(100))) == []
    assert through(Faults(chunks=3, drop={1}, duplicate={0, 2})) == [b"a", b"ba", b"bcc", b"cc"]


def test_dying_at_any_byte_gives_what_came_before_and_loses_both_ends() -> None:
    async def main(position: int) -> Ends:
        ends = await started(Faults(chunks=5, delay=0.5, die_at=position))
        ends.here.send(*FRAMES)
        ends.here.send(b"and more")
        ends.there.send(b"other way")
        await settled()
        ends.here.send(b"too late")
        ends.there.send(b"too late")
        await settled()
        await ends.near.aclose()
        await ends.far.aclose()
        return ends

    for position in range(len(WIRE) + 1):
        ends = run_virtual(main(position), bound=1_000_000)
        assert ends.there.raw_frames == lines_until(position)
        for raw in (ends.here, ends.there):
            assert isinstance(raw.error, ConnectionClosed)
            assert f"the stream broke after byte {position}" in str(raw.error)


def lines_until(position: int) -> list[bytes]:
    """The frames before this byte, and the part of one that it is in."""
    return [line for line in WIRE[:position].split(b"\n") if line]


def test_a_direction_that_ends_at_any_byte_leaves_the_other_alive() -> None:
    async def main(position: int) -> Ends:
        ends = await started(Faults(chunks=5, end_at=position))
        ends.here.send(*FRAMES)
        ends.here.send(b"and more")
        await ends.there.until(ends.there.ended.is_set)
        ends.here.send(b"too late")
        ends.there.send(b"other way")
        await settled()
        assert not ends.there.lost.is_set()
        return ends

    for position in range(len(WIRE) + 1):
        ends = run_virtual(main(position), bound=1_000_000)
        assert ends.there.raw_frames == lines_until(position)
        assert ends.here.raw_frames == [b"other way"]


@pytest.mark.parametrize("way", ["end_output", "aclose"])
@pytest.mark.virtual_time
async def test_what_was_sent_arrives_before_the_end_whole_or_not(way: str) -> None:
    ends = await started(Faults(chunks=3, delay=2.0))
    ends.far.pause_reading()
    ends.near.send_bytes(b"whole\npart")
    if way == "aclose":
        await ends.near.aclose()
        await ends.near.aclose()
        assert ends.here.lost.is_set()
        # Who is gone is waited for by nobody: what is left comes although reading is paused.
        await ends.there.closed()
        assert ends.there.error is None
    else:
        ends.near.end_output()
        ends.near.end_output()
        await settled()
        assert ends.there.raw_frames == []
        ends.far.resume_reading()
        await ends.there.until(ends.there.ended.is_set)
        assert not ends.there.lost.is_set()
    assert ends.there.raw_frames == [b"whole", b"part"]
    ends.near.send_bytes(b"too late")
    await settled()
    assert len(ends.there.raw_frames) == 2
    await ends.near.aclose()
    await ends.there.closed()
    await ends.far.aclose()


@pytest.mark.virtual_time
async def test_a_stream_that_dies_before_an_end_has_started_tells_it_then() -> None:
    near, far = byte_pair(Faults(die_at=0))
    here, there = RawPeer(near), RawPeer(far)
    await there.start()
    await there.closed()
    await here.start()
    assert not here.lost.is_set()
    await here.closed()
    assert isinstance(here.error, ConnectionClosed)


@pytest.mark.virtual_time
async def test_what_arrives_before_the_start_or_in_a_pause_is_held() -> None:
    near, far = byte_pair(Faults(chunks=1))
    here, there = RawPeer(near), RawPeer(far)
    await here.start()
    here.send(*FRAMES)
    await settled()
    await there.start()
    far.pause_reading()
    await settled()
    assert there.raw_frames == []
    far.resume_reading()
    there.on_frames = lambda frames: far.pause_reading()
    for count in range(1, len(FRAMES) + 1):
        await settled()
        assert len(there.raw_frames) == count  # one frame a chunk, and a pause after each
        far.resume_reading()
    assert there.raw_frames == ARRIVES


@pytest.mark.virtual_time
async def test_a_pause_holds_what_is_about_to_be_delivered_too() -> None:
    ends = await started(Faults(delay=1.0))
    ends.here.send(b"a")
    asyncio.get_running_loop().call_later(1.0, ends.far.pause_reading)  # set before the arrival is
    await settled()
    assert ends.there.raw_frames == []
    ends.far.resume_reading()
    await settled()
    assert ends.there.raw_frames == [b"a"]


@pytest.mark.virtual_time
async def test_what_is_sent_too_late_goes_nowhere_and_waits_for_nothing() -> None:
    for way in ("end_output", "aclose", "aclose of the peer"):
        ends = await started()
        if way == "end_output":
            ends.near.end_output()
        elif way == "aclose":
            await ends.near.aclose()
        else:
            await ends.far.aclose()
        ends.here.send(b"too late")
        assert ends.near.unsent == 0, way
        await settled()
        ends.here.send(b"much too late")
        assert ends.near.unsent == 0, way
        await settled()
        assert ends.there.raw_frames == [], way
        await ends.near.aclose()
        await ends.far.aclose()


@pytest.mark.virtual_time
async def test_a_direction_ends_only_once() -> None:
    ends = await started(Faults(end_at=2))
    ends.here.send(b"abc")
    await ends.there.until(ends.there.ended.is_set)
    ends.near.end_output()
    await settled()
    await ends.near.aclose()
    await ends.there.closed()
    await ends.there.aclose()  # and no law was broken
    await ends.here.aclose()


@pytest.mark.virtual_time
async def test_a_peer_that_does_not_read_is_felt() -> None:
    ends = await started(Faults(chunks=1000))
    ends.far.pause_reading()
    ends.here.send(b"x" * 65535)
    await settled()
    assert ends.here.room == []
    ends.here.send(b"x")
    assert ends.here.room == ["pause"]
    ends.here.send(b"x")
    await settled()
    assert ends.near.unsent == 65540  # with the line ends
    ends.far.resume_reading()
    await settled()
    assert ends.near.unsent == 0
    assert ends.here.room == ["pause", "resume"]
    assert list(map(len, ends.there.raw_frames)) == [65535, 1, 1]


@pytest.mark.virtual_time
async def test_bytes_that_are_lost_leave_room() -> None:
    ends = await started(Faults(drop={0}, end_at=200_010))
    ends.here.send(b"x" * 200_000)
    ends.far.pause_reading()
    await settled()
    assert ends.here.room == ["pause", "resume"]
    ends.here.send(b"y" * 200_000)
    await settled()
    assert ends.here.room == ["pause", "resume"] * 2
    assert not ends.there.raw_frames


@pytest.mark.virtual_time
async def test_a_frame_over_the_limit_is_a_fault_in_its_place() -> None:
    ends = await started(limits=Limits(frame_bytes=10))
    ends.here.send(b"a", b"x" * 11, b"b" * 10)
    await settled()
    first, fault, last = ends.there.batches[0]
    assert (first, last) == (b"a", b"b" * 10)
    assert [fault] == ends.there.faults
    assert ends.there.faults[0].size == 11


@pytest.mark.virtual_time
async def test_an_end_closed_inside_a_delivery_gets_nothing_more() -> None:
    ends = await started(Faults(chunks=4))
    closing: list[asyncio.Task[None]] = []

    def close(frames: list[bytes | Fault]) -> None:
        closing.append(asyncio.ensure_future(ends.far.aclose()))

    ends.there.on_frames = close
    ends.here.send(b"aaa", b"bbb", b"ccc")
    await settled()
    await asyncio.gather(*closing)
    assert ends.there.raw_frames[0] == b"aaa"
    assert len(ends.there.raw_frames) < 3
    assert ends.here.lost.is_set()


async def test_it_is_named_and_says_where_bytes_can_be_sent() -> None:
    near, _ = byte_pair()
    assert near.describe() == "simulated stream"


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": 0},
        {"chunks": -1},
        {"chunks": ()},
        {"chunks": (3, 0)},
        {"delay": -0.5},
        {"die_at": -1},
        {"end_at": -1},
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"size|delay|position"):
        Faults(**wrong)


def test_a_seed_gives_the_same_faults_each_time() -> None:
    for seed in range(50):
        for damage in (False, True):
            assert Faults.from_seed(seed, damage=damage) == Faults.from_seed(seed, damage=damage)
        harmless = Faults.from_seed(seed)
        assert (harmless.drop, harmless.duplicate) == ((), ())
        assert (harmless.die_at, harmless.end_at) == (None, None)
    kinds = {
        name
        for seed in range(50)
        for name in ("drop", "duplicate", "die_at", "end_at")
        if getattr(Faults.from_seed(seed, damage=True), name) not in ((), None)
    }
    assert kinds == {"drop", "duplicate", "die_at", "end_at"}


# ---------------------------------------------------------------------- our two sides on such a stream


SESSION = "s1"


class Talker(Agent):
    """Answers with some updates, a permission round trip and some more."""

    async def new_session(
        self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id=SESSION)

    async def prompt(self, turn: Turn) -> None:
        for number in range(2):
            await turn.say(f"{turn.text}{number};")
        answer = await turn.ask_permission("May I?")
        for number in range(2, 4):
            await turn.say(f"{turn.text}{number}{'+' if answer.allowed else '-'};")


#: So that every wait of the two sides ends by itself, in virtual time.
PATIENT = Limits(
    request_timeout=100.0, startup_timeout=100.0, permission_timeout=100.0, cancel_backstop=20.0
)
TEXTS = [f"x{n};" for n in range(2)] + [f"x{n}+;" for n in range(2, 4)]


@dataclass
class Outcome:
    """What a client saw of a conversation, and what of it has crossed."""

    texts: list[str] = field(default_factory=list[str])
    iterated: list[Any] = field(default_factory=list[Any])
    stops: list[object] = field(default_factory=list[object])
    observed: list[Any] = field(default_factory=list[Any])
    errors: list[Exception] = field(default_factory=list[Exception])
    unhandled: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    incoming: list[bytes] = field(default_factory=list[bytes])
    bytes_sent: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})


def conversation(to_agent: Faults, to_client: Faults, *, turns: int = 1) -> Outcome:
    """Turns of a client of ours with an agent of ours, in virtual time."""
    outcome = Outcome()

    def record(direction: str, frame: bytes) -> None:
        outcome.bytes_sent[direction] += len(frame) + 1
        if direction == "in":
            outcome.incoming.append(frame)

    async def allow(params: object, ctx: object) -> bool:
        return True

    async def observe(update: Update) -> None:
        outcome.observed.append(json.loads(update.raw))

    async def talk() -> None:
        async with joined(
            Talker(),
            Client(permissions=allow, on_update=observe),
            transports=byte_pair(to_agent, to_client),
            limits=PATIENT,
            record=record,
        ) as agent:
            session = await agent.new_session(cwd="/")
            for _ in range(turns):
                async with session.prompt("x", timeout=200.0) as turn:
                    async for update in turn:
                        outcome.texts.append(update.text)
                        outcome.iterated.append(json.loads(update.raw))
                outcome.stops.append(turn.stop_reason)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: outcome.unhandled.append(context))
        try:
            await talk()
        except AntiphonError as error:
            outcome.errors.append(error)

    run_virtual(main(), bound=5000)
    return outcome


def assert_whole(outcome: Outcome, turns: int = 1) -> None:
    assert outcome.texts == TEXTS * turns
    assert outcome.stops == ["end_turn"] * turns
    assert [update["content"]["text"] for update in outcome.observed] == TEXTS * turns
    assert not outcome.errors
    assert not outcome.unhandled


def updates_in(frames: list[bytes]) -> list[Any]:
    """The updates of the session in what a client got, by the standard library."""
    found: list[Any] = []
    for frame in frames:
        try:
            message = json.loads(frame)
        except ValueError:
            continue
        match message:
            case {"jsonrpc": version} if version != "2.0":
                pass  # refused, and said so
            case {
                "method": "session/update",
                "params": {"sessionId": "s1", "update": {} as update},
            }:
                found.append(update)
            case _:
                pass
    return found


SENT = conversation(Faults(), Faults()).bytes_sent


@pytest.mark.covers("F1")
@pytest.mark.parametrize("direction", SENT)
def test_a_conversation_is_the_same_with_its_bytes_cut_anywhere(direction: str) -> None:
    """Every cut position of each direction, one at a time."""
    for cut in range(1, SENT[direction]):
        faults = Faults(chunks=(cut, 1 << 20))
        if direction == "out":
            assert_whole(conversation(faults, Faults()))
        else:
            assert_whole(conversation(Faults(), faults))


@pytest.mark.covers("F1")
@pytest.mark.parametrize("size", [1, 2, 3, 16, 100])
def test_a_conversation_is_the_same_in_small_pieces(size: int) -> None:
    faults = Faults(chunks=size)
    assert_whole(conversation(faults, faults, turns=2), turns=2)


@pytest.mark.covers("F6")
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
@settings(max_examples=80)
def test_a_conversation_is_the_same_with_any_cuts_and_delays(one: int, other: int) -> None:
    assert_whole(conversation(Faults.from_seed(one), Faults.from_seed(other), turns=3), turns=3)


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32), st.sampled_from(["out", "in", "both"]))
@settings(max_examples=200)
def test_on_a_damaged_stream_nothing_hangs_and_nothing_is_made_up(
    one: int, other: int, damaged: str
) -> None:
    outcome = conversation(
        Faults.from_seed(one, damage=damaged != "in"),
        Faults.from_seed(other, damage=damaged != "out"),
        turns=3,
    )
    assert_sound(outcome)


@pytest.mark.covers("FF-12")
@pytest.mark.parametrize("direction", SENT)
@pytest.mark.parametrize("kind", ["die_at", "end_at"])
def test_a_stream_that_ends_at_any_byte_leaves_nobody_waiting(kind: str, direction: str) -> None:
    for position in range(SENT[direction] + 1):
        faults = Faults(die_at=position) if kind == "die_at" else Faults(end_at=position)
        if direction == "out":
            outcome = conversation(faults, Faults())
        else:
            outcome = conversation(Faults(), faults)
        assert_sound(outcome)
        # Without the line end of its last frame, a stream has still brought that frame.
        if kind == "die_at" and position < SENT[direction] - 1:
            assert outcome.errors, position
            assert isinstance(outcome.errors[0], ConnectionClosed)


def assert_sound(outcome: Outcome) -> None:
    """What the contract leaves of a conversation whose bytes were damaged.

    It has ended, or `run_virtual` would have raised; with a documented error, or that had come out of
    `conversation`. The updates are those that crossed, in their order, each as often as it came.
    """
    assert not outcome.unhandled
    crossed = updates_in(outcome.incoming)
    assert outcome.observed == crossed[: len(outcome.observed)]
    if not outcome.errors:
        assert len(outcome.observed) == len(crossed)
    left = iter(crossed)
    assert all(update in left for update in outcome.iterated), "not in the order of the wire"
