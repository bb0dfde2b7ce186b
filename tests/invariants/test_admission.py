"""What holds of who may attach (CDI, AP, P-BUS4), each against a funnel or an agent that is wrong.

Every row of the funnel's table (resumable-sessions §11.1) goes through a whole agent: the verdict is in
its telemetry and nowhere else. What a policy may return or raise besides is in
tests/journal/test_attach.py, tokens are in test_tokens.py.
"""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest

import antiphon.journal
from antiphon import Agent, Durability, RequestError
from antiphon.journal import (
    AttachContext,
    AttachRefused,
    Denied,
    Grant,
    Journal,
    LocalNode,
    MemoryJournal,
    Rider,
    Subscriber,
    Writer,
    _attach,
    _policy,
    admit,
)
from antiphon.sessions import _durable_router
from antiphon.testing import RawPeer, raw_client
from antiphon.transports import MemoryTransport
from tests.invariants.controls import changed, controlled
from tests.journal.attachments import Link, update, written
from tests.test_layers import modules, name_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon import TelemetryEvent

SESSION = "s-41"
ACTOR = {"id": "alice@example", "kind": "user"}
BOUND = 0.08
DENIED = {"code": -32000, "message": "attach denied"}
Policy = Callable[[AttachContext], Any]


def granted(**wrong: Any) -> Any:
    members: dict[str, Any] = {"actor": ACTOR, "session_id": SESSION, "via": "test"}
    return Grant(**{**members, **wrong})


def lets_in(_context: AttachContext) -> Any:
    return granted()


def returning(value: Any) -> Policy:
    def policy(_context: AttachContext) -> Any:
        return value

    return policy


def raising(error: BaseException) -> Policy:
    def policy(_context: AttachContext) -> NoReturn:
        raise error

    return policy


async def hangs(_context: AttachContext) -> Any:
    await asyncio.Event().wait()


async def throws(_context: AttachContext) -> Any:
    await asyncio.sleep(0)
    raise BaseException


class Spied(MemoryJournal):
    """A journal that shows whether anybody looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in PUBLIC:
            self.asked.append(name)
        return super().__getattribute__(name)


PUBLIC = {name for name in dir(Journal) if not name.startswith("_")} - {"aclose"}


class Door:
    """An agent behind a policy, and what came through."""

    def __init__(self, policy: Policy | None, **options: Any) -> None:
        self.journal = Spied()
        # On a busy machine a policy that decides at once may take a while to be asked.
        options = {"policy_timeout": BOUND if policy is hangs else 20.0, **options}
        self.durability = Durability(self.journal, policy=policy, **options)
        self.events: list[TelemetryEvent] = []
        self.raw: RawPeer

    async def filled(self) -> None:
        """Give the session three records."""
        writer = Writer(await self.journal.open(SESSION))
        for text in ("one", "two"):
            await writer.append(update(text))
        await writer.aclose()
        self.journal.asked.clear()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[RawPeer]:
        agent, tell = Agent(), self.events.append
        async with raw_client(agent, journal=self.durability, telemetry=tell) as self.raw:
            self.journal.asked.clear()
            self.raw.raw_frames.clear()
            yield self.raw

    async def attach(self, id_: str = "7", **rider: Any) -> Any:
        params = {"sessionId": SESSION, "cwd": "/", "_meta": {"raxol.io": rider}}
        return await self.raw.ask("_raxol/session.load", params, id_)

    @property
    def verdicts(self) -> list[Any]:
        return [event.facts["reason"] for event in self.events if event.name == "attach.denied"]


# ------------------------------------------------------------------ the table of the funnel


ROWS: list[tuple[str, Policy | None]] = [
    ("grant_session_mismatch", returning(granted(session_id="s-4"))),
    ("scope_not_allowed", returning(granted(scope="admin"))),
    ("malformed_grant", returning(granted(actor="alice"))),
    ("malformed_grant", returning(granted(actor={"id": 5}))),
    ("malformed_grant", returning(granted(session_id=None))),
    ("malformed_grant", returning(granted(via=None))),
    ("malformed_grant", returning(("ok", {"actor": ACTOR}))),
    ("policy_error", returning(AttachRefused("no"))),
    ("policy_error", raising(AttachRefused("no"))),
    ("non_conforming_return", returning("ok")),
    ("non_conforming_return", returning(True)),
    ("non_conforming_return", returning(None)),
    ("non_conforming_return", returning(("ok", granted(), "extra"))),
    ("policy_crash", raising(ValueError("no"))),
    ("policy_crash", raising(RequestError(-32099, "look here", {"secret": 1}))),
    ("policy_crash", throws),
    ("policy_crash", raising(SystemExit(0))),
    ("policy_crash", raising(KeyboardInterrupt())),
    ("policy_timeout", hangs),
]


def truthy(original: Any, value: Any, context: AttachContext) -> Any:
    return granted() if value else original(value, context)


def unchecked(_original: Any, grant: Grant, _context: AttachContext) -> Grant:
    return grant


def crashes_admit(_original: Any, _error: BaseException) -> Any:
    """What goes wrong is let through."""
    return granted()


def tells_why(_original: Any) -> RequestError:
    return RequestError(-32000, "attach denied", {"reason": "policy"})


async def looks_first(original: Any, self: Any, session_id: str, rider: Any) -> Any:
    await self._durability.journal.info(session_id)
    return await original(self, session_id, rider)


def answers_null(original: Any) -> RequestError:
    error: RequestError = original()
    error.data = {}
    return error


@pytest.mark.covers("J9", "P-BUS4", "CDI-5", "AP1", "AP10", "AP15", "AP16")
@controlled(
    tells_why=changed(_durable_router, "attach_denied", tells_why),
    answers_null=changed(_durable_router, "attach_denied", answers_null),
    looks_first=changed(_durable_router.DurableRouter, "_admitted", looks_first),
)
@pytest.mark.parametrize(("verdict", "policy"), ROWS)
async def test_whatever_denies_looks_alike_and_leaves_no_trace(
    verdict: str, policy: Policy | None
) -> None:
    door = Door(policy)
    await door.filled()
    async with door.opened() as raw:
        for id_ in "78":
            await door.attach(id_, fromOffset=99, capability="RXC1.a.b")
        assert [re.sub(rb'"id":"\d"', b'"id":"?"', frame) for frame in raw.raw_frames] == [
            b'{"jsonrpc":"2.0","id":"?","error":{"code":-32000,"message":"attach denied"}}'
        ] * 2
        assert door.journal.asked == []
        assert door.durability.writers.get(SESSION) is None
        assert door.durability.links(SESSION) == ()
    assert door.verdicts == [verdict] * 2


@pytest.mark.covers("AP1", "AP15", "AP16", "CDI-3")
@controlled(
    truthy=changed(_attach, "_returned", truthy),
)
async def test_only_the_shape_of_a_grant_admits() -> None:
    for verdict, policy in ROWS:
        door = Door(policy)
        async with door.opened():
            answer = await door.attach()
        assert answer["error"] == DENIED, verdict
    door = Door(lets_in)
    await door.filled()
    async with door.opened():
        answer = await door.attach(fromOffset=2)
        assert answer["result"] == {"_meta": {"raxol.io": {"highWatermark": 3}}}
    assert door.verdicts == []


@pytest.mark.covers("AP15", "AP16")
@controlled(unchecked=changed(_attach, "_checked", unchecked))
@pytest.mark.parametrize(
    "wrong",
    [{"scope": "admin"}, {"actor": {}}, {"actor": {"id": 5}}, {"session_id": "s-4"}, {"via": None}],
    ids=repr,
)
async def test_a_grant_with_one_wrong_member_admits_nobody(wrong: dict[str, Any]) -> None:
    door = Door(returning(granted(**wrong)))
    async with door.opened():
        assert (await door.attach()).get("error") == DENIED


@pytest.mark.covers("CDI-3")
@controlled(crashes_admit=changed(_attach, "_raised", crashes_admit))
async def test_what_goes_wrong_admits_nobody() -> None:
    for policy in (raising(ValueError("no")), throws, raising(SystemExit(0))):
        door = Door(policy)
        async with door.opened():
            assert (await door.attach()).get("error") == DENIED


# ------------------------------------------------------------------ how long, and where


async def waits_for_it(_original: Any, tasks: Any, timeout: float | None = None) -> Any:
    """Wait far longer than was said."""
    return await WAIT(tasks, timeout=None if timeout is None else 20 * timeout)


WAIT = asyncio.wait


def never_cancelled(_original: Any, _task: Any) -> None: ...


class Asked:
    """A policy that hangs, and what became of it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.over = False

    async def __call__(self, _context: AttachContext) -> Any:
        self.task = asyncio.current_task()
        try:
            await asyncio.Event().wait()
        finally:
            self.over = True


@pytest.mark.covers("CDI-1")
@pytest.mark.virtual_time
@controlled(waits_for_it=changed(asyncio, "wait", waits_for_it))
async def test_a_policy_that_hangs_is_over_when_its_time_is() -> None:
    policy = Asked()
    context = AttachContext(SESSION, None, "unknown", None, 0, None)
    loop = asyncio.get_running_loop()
    began = loop.time()
    verdict = await admit(policy, context, timeout=BOUND)

    assert began + BOUND <= loop.time() < began + 2 * BOUND
    assert verdict == Denied("policy_timeout", "0.08 s")
    assert policy.over
    assert policy.task is not None
    assert policy.task.done()
    assert policy.task not in asyncio.all_tasks()


async def on_the_loop(_original: Any, policy: Policy, context: AttachContext) -> Any:
    """Call a plain function where everything else runs."""
    return _attach._Outcome(policy(context))


@pytest.mark.covers("CDI-1")
@controlled(on_the_loop=changed(_attach, "_in_thread", on_the_loop))
async def test_a_plain_policy_that_hangs_stops_nobody_else() -> None:
    release, turns = threading.Event(), [0]
    threads: list[threading.Thread] = []

    def blocks(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        release.wait(1)
        return granted()

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0.001)

    other = asyncio.create_task(others())
    door = Door(blocks, policy_timeout=0.3)
    async with door.opened():
        before = turns[0]
        answer = await door.attach()
        assert turns[0] > before + 3
    other.cancel()
    assert answer["error"] == DENIED
    assert door.verdicts == ["policy_timeout"]
    assert threads[0].daemon
    release.set()
    threads[0].join(10)


def no_thread(_self: Any) -> NoReturn:
    raise RuntimeError("can't start new thread")


async def without_a_host(original: Any, policy: Policy, context: AttachContext) -> Any:
    """Where there are no threads, ask on the loop all the same."""
    outcome = await original(policy, context)
    return _attach._Outcome(policy(context)) if outcome.infra else outcome


@pytest.mark.covers("CDI-1", "CDI-5")
@controlled(without_a_host=changed(_attach, "_in_thread", without_a_host))
async def test_where_a_policy_cannot_be_asked_nobody_is_let_in() -> None:
    door = Door(lets_in)
    await door.filled()
    async with door.opened():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            answer = await door.attach()
    assert answer.get("error") == DENIED
    assert door.verdicts == ["policy_infra"]


# ------------------------------------------------------------------ CDI-1: one funnel, no second guard


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else name_in(node.func)) == name
    ]


def name_in(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def guards_around(tree: ast.AST, name: str) -> list[ast.Try]:
    """The `try` statements that end in anything else than raising what they caught."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(calls_of(statement, name) for statement in node.body)
        and not all(
            isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
            for handler in node.handlers
        )
    ]


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in modules()}


@pytest.mark.covers("CDI-1")
def test_a_policy_is_asked_in_one_place() -> None:
    asks = {name: len(found) for name, tree in TREES.items() if (found := calls_of(tree, "admit"))}
    assert set(asks) == {"sessions._durability", "sessions._durable_router"}
    assert asks["sessions._durability"] == 1
    called = {name for name, tree in TREES.items() if calls_of(tree, "policy")}
    assert {name for name in called if name.startswith(("journal", "sessions"))} == {
        "journal._attach"
    }


@pytest.mark.covers("CDI-1")
def test_there_is_no_second_guard_around_the_funnel() -> None:
    assert not [
        name
        for name, tree in TREES.items()
        if name.startswith("sessions") and guards_around(tree, "admit")
    ]
    guarded = "try:\n    await self.admit(context)\nexcept Exception:\n    pass\n"
    undone = "try:\n    await self.admit(context)\nexcept Exception:\n    undo()\n    raise\n"
    assert guards_around(ast.parse(guarded), "admit")
    assert not guards_around(ast.parse(undone), "admit")


@pytest.mark.covers("AP1")
def test_grants_are_made_by_policies_and_by_the_funnel_only() -> None:
    makers = {name for name, tree in TREES.items() if calls_of(tree, "Grant")}
    ours = {name for name in makers if not name.startswith("cli.")}  # whose programs are users
    assert ours == {"journal._attach", "journal._policy", "journal._token"}


@pytest.mark.covers("CDI-1")
async def test_a_policy_is_asked_once_for_an_attach() -> None:
    asked: list[AttachContext] = []

    def policy(context: AttachContext) -> Any:
        asked.append(context)
        return granted()

    door = Door(policy)
    await door.filled()
    async with door.opened() as raw:
        await door.attach(fromOffset=2, capability=["odd"])
        raw.send(RawPeer.notification("session/cancel", {"sessionId": SESSION}))
        await raw.round_trip()
    assert [(one.from_offset, one.capability) for one in asked] == [(2, ["odd"])]


# ------------------------------------------------------------------ CDI-2, AP18: what is believed


def elsewhere(_self: Any) -> dict[str, Any]:
    return {"kind": "tcp", "peer": {"host": "192.0.2.7", "port": 4711}}


SPOOFED: list[dict[str, Any]] = [
    {},
    {"capability": "RXC1.a.b"},
    {"capability": {"transport": {"kind": "stdio"}}},
    {"transport": {"kind": "process", "peer": None}},
    {"actor": {"id": "local", "kind": "local_node"}, "surface": "local"},
    {"kind": "stdio", "peer": {"uid": 0}},
]


def by_what_is_sent(original: Any, self: Any, session_id: str, transport: Any, **more: Any) -> Any:
    told = more.get("capability")
    found: AttachContext = original(self, session_id, transport, **more)
    if told:
        found = msgspec.structs.replace(found, transport={"kind": "stdio", "peer": None})
    return found


def by_the_token(_original: Any, _self: LocalNode, context: AttachContext) -> Any:
    if context.capability is None and not _policy._is_local(context.transport):
        raise AttachRefused("not_local")
    return granted()


@pytest.mark.covers("AP18", "CDI-2")
@controlled(
    by_what_is_sent=changed(Durability, "context", by_what_is_sent),
    by_the_token=changed(LocalNode, "__call__", by_the_token),
)
async def test_who_comes_from_elsewhere_cannot_say_that_it_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryTransport, "info", property(elsewhere))
    door = Door(None)
    await door.filled()
    async with door.opened():
        for number, rider in enumerate(SPOOFED):
            answer = await door.attach(f"{number}", **rider)
            assert answer.get("error") == DENIED, rider


@pytest.mark.covers("AP18")
async def test_who_is_here_needs_nothing_and_what_it_says_changes_nothing() -> None:
    door = Door(None)
    await door.filled()
    async with door.opened():
        for number, rider in enumerate(SPOOFED):
            answer = await door.attach(f"{number}", **rider)
            assert answer["result"]["_meta"]["raxol.io"]["highWatermark"] == 3, rider


@pytest.mark.covers("CDI-2")
@controlled(by_what_is_sent=changed(Durability, "context", by_what_is_sent))
async def test_what_a_policy_is_told_of_the_link_is_this_side_s_knowledge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryTransport, "info", property(elsewhere))
    asked: list[AttachContext] = []

    def policy(context: AttachContext) -> Any:
        asked.append(context)
        return None

    door = Door(policy, surface="desk")
    async with door.opened():
        for number, rider in enumerate(SPOOFED):
            await door.attach(f"{number}", **rider)
    assert {repr(context.transport) for context in asked} == {repr(elsewhere(None))}
    assert {(context.surface, context.actor) for context in asked} == {("desk", None)}
    assert [context.capability for context in asked] == [
        rider.get("capability") for rider in SPOOFED
    ]


@pytest.mark.covers("CDI-2")
async def test_a_transport_that_says_nothing_is_told_as_unknown_and_is_not_local(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(MemoryTransport, "info")
    door = Door(None)
    await door.filled()
    async with door.opened():
        assert (await door.attach())["error"] == DENIED
    told = dict.fromkeys(AttachContext.__struct_fields__)
    assert AttachContext(**{**told, "transport": None}).transport is None  # type: ignore[arg-type]
    del told["transport"]
    with pytest.raises(TypeError, match="transport"):
        AttachContext(**told)  # type: ignore[arg-type]


# ------------------------------------------------------------------ AP3: no door is open by itself


def anybody(_original: Any, _self: LocalNode, _context: AttachContext) -> Any:
    return granted()


@pytest.mark.covers("AP3")
@controlled(anybody=changed(LocalNode, "__call__", anybody))
async def test_where_nobody_names_a_policy_it_is_the_local_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = MemoryJournal()
    assert isinstance(Durability(journal).policy, LocalNode)
    assert isinstance(Durability.of(journal).policy, LocalNode)
    monkeypatch.setattr(MemoryTransport, "info", property(elsewhere))
    door = Door(None)
    await door.filled()
    async with door.opened():
        assert (await door.attach()).get("error") == DENIED
    assert door.verdicts == ["policy_error"]


@pytest.mark.covers("AP3")
async def test_no_policy_of_ours_lets_everybody_in() -> None:
    """A stranger without a token: whatever this library has that is called with a context says no."""
    stranger = AttachContext(SESSION, None, "unknown", None, 0, elsewhere(None))
    made: dict[str, Any] = {"LocalNode": LocalNode()}
    if "Token" in antiphon.journal.__all__:
        made["Token"] = antiphon.journal.Token(antiphon.journal.Keyring({}))
    callables = {
        name
        for name in antiphon.journal.__all__
        if isinstance(found := getattr(antiphon.journal, name), type) and "__call__" in vars(found)
    }
    assert callables == set(made)
    for policy in made.values():
        assert isinstance(await admit(policy, stranger), Denied)
    assert isinstance(await admit(None, stranger), Denied)


# ------------------------------------------------------------------ CDI-6: until when


def no_timer(_original: Any, self: Subscriber) -> None: ...


def the_newest(original: Any, self: Subscriber, reason: str, *rest: Any) -> None:
    """One timer for a session: it ends whoever attached last."""
    if reason == "revoked":
        newest = NEWEST[-1]
        original(newest, reason, *rest)
    else:
        original(self, reason, *rest)


NEWEST: list[Subscriber] = []


def ends_unsaid(original: Any, self: Subscriber, reason: str, *rest: Any) -> None:
    if reason == "revoked":
        self.detach()
    else:
        original(self, reason, *rest)


@pytest.mark.virtual_time
@pytest.mark.covers("CDI-6")
@controlled(
    no_timer=changed(Subscriber, "_watch_grant", no_timer),
    the_newest=changed(Subscriber, "_finish", the_newest),
    ends_unsaid=changed(Subscriber, "_finish", ends_unsaid),
)
async def test_a_grant_that_ends_closes_its_own_attach_and_no_other() -> None:
    NEWEST.clear()
    writer, log = await written(2)
    loop = asyncio.get_running_loop()
    links = [Link(), Link(), Link()]
    for link, ends in zip(links, (10, 20, None), strict=True):
        subscriber = link.subscriber(log, writer, Rider(3), expires_at=ends, clock=loop.time)
        NEWEST.append(subscriber)
        await subscriber.attach()
    closed: list[tuple[float, int]] = []
    for _ in range(30):
        await writer.append(update())
        await asyncio.sleep(1)
        closed += [
            (loop.time(), number)
            for number, link in enumerate(links)
            if ("closed", "revoked") in link.shown and number not in dict(closed).values()
        ]

    assert [number for _, number in closed] == [0, 1]
    assert [link.shown[-1] for link in links] == [("closed", "revoked")] * 2 + [32]
    assert [len(link.offsets) for link in links] == [10, 20, 30]
    assert [link.ended for link in links] == [["revoked"], ["revoked"], []]


@pytest.mark.covers("CDI-6")
@controlled(no_timer=changed(Subscriber, "_watch_grant", no_timer))
async def test_a_grant_that_is_over_already_closes_behind_the_answer() -> None:
    door = Door(returning(granted(expires_at=1_700_000_000)), clock=lambda: 1_700_000_000.5)
    await door.filled()
    async with door.opened() as raw:
        await door.attach(fromOffset=3)
        await raw.round_trip()
        methods = [frame.get("method") for frame in raw.frames[1:6]]
    assert methods[:4] == [
        "session/update",
        "_raxol/session.caught_up",
        None,
        "_raxol/session.closed",
    ]
    assert [frame["params"] for frame in raw.sent("_raxol/session.closed")] == [
        {"sessionId": SESSION, "reason": "revoked"}
    ]


def test_the_spy_sees_every_way_into_a_journal() -> None:
    assert {"open", "sessions", "delete", "info", "follow"} <= PUBLIC
    journal = Spied()
    journal.open(SESSION).close()
    assert journal.asked == ["open"]
