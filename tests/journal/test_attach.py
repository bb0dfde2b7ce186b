"""The funnel: whatever a policy does, only a well-formed grant for this session admits (§11.1)."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import UserDict
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import RequestError
from antiphon.core import error_frame
from antiphon.journal import (
    AttachContext,
    AttachRefused,
    Denied,
    Grant,
    _attach,
    admit,
    attach_denied,
)
from antiphon.schema import UNSET

if TYPE_CHECKING:
    from collections.abc import Generator

SECRET = "RXC1.secret.secret"
CONTEXT = AttachContext("s-41", None, "unknown", SECRET, 7, None)
ACTOR = {"id": "alice@example", "kind": "user"}
BOUND = 0.08


def grant(**changed: Any) -> Any:
    members: dict[str, Any] = {"actor": ACTOR, "session_id": "s-41", "via": "test"} | changed
    return Grant(**members)


def returns(value: Any) -> Any:
    def policy(_context: AttachContext) -> Any:
        return value

    return policy


async def verdict_on(value: Any) -> Any:
    """What comes of a policy that returns this: the same, whatever kind of function it is."""

    async def asynchronous(_context: AttachContext) -> Any:
        return value

    verdicts = [await admit(policy, CONTEXT) for policy in (returns(value), asynchronous)]
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


# ------------------------------------------------------------------ what is returned


@pytest.mark.parametrize("expires_at", [None, 0, 1_700_003_600, 2**70])
async def test_a_well_formed_grant_for_this_session_admits(expires_at: int | None) -> None:
    admitted = await verdict_on(grant(expires_at=expires_at))

    assert admitted == Grant(ACTOR, "s-41", "test", "attach", expires_at)


async def test_what_is_admitted_is_out_of_the_policy_s_reach() -> None:
    actor, kept = dict(ACTOR), grant()
    kept.actor = actor
    admitted = await admit(returns(kept), CONTEXT)
    kept.session_id, kept.expires_at, actor["id"] = "s-42", None, "mallory"

    assert admitted == Grant(ACTOR, "s-41", "test")


@pytest.mark.parametrize("other", ["", "s-4", "s-411", "S-41", "s-41 "])
async def test_a_grant_for_another_session_is_a_mismatch(other: str) -> None:
    assert await verdict_on(grant(session_id=other)) == Denied("grant_session_mismatch")


@pytest.mark.parametrize("scope", ["", "admin", "attach ", "Attach", "read"])
@pytest.mark.parametrize("more", [{}, {"actor": None}, {"session_id": "s-42"}, {"via": None}])
async def test_a_scope_that_is_not_listed_is_told_first(scope: str, more: Any) -> None:
    assert await verdict_on(grant(scope=scope, **more)) == Denied("scope_not_allowed", scope)


MALFORMED: dict[str, list[Any]] = {
    "scope": [None, 5, True, ["attach"], b"attach"],
    "actor": [None, "alice", 5, [], {}, {"id": 5}, {"id": None}, {"ID": "a"}],
    "session_id": [None, 41, b"s-41", ["s-41"]],
    "via": [None, UNSET],
    "expires_at": [True, 1.5, "1700003600", float("inf")],
    "lens": [{"kinds": []}, False],
}


@pytest.mark.parametrize(
    ("member", "odd"), [(member, odd) for member, row in MALFORMED.items() for odd in row]
)
async def test_a_grant_with_a_wrong_member_is_malformed(member: str, odd: Any) -> None:
    assert await verdict_on(grant(**{member: odd})) == Denied("malformed_grant", member)


async def test_a_malformed_grant_for_another_session_is_malformed() -> None:
    assert await verdict_on(grant(session_id="s-42", via=None)) == Denied("malformed_grant", "via")


@pytest.mark.parametrize(
    "value",
    [
        {"actor": ACTOR, "session_id": "s-41", "via": "test", "scope": "attach"},
        MappingProxyType({"actor": ACTOR}),
        ("ok", grant()),
        ("ok", None),
        ["ok", {"actor": ACTOR}],
    ],
    ids=repr,
)
async def test_ok_around_what_is_no_grant_is_malformed(value: Any) -> None:
    assert (await verdict_on(value)).reason == "malformed_grant"


@pytest.mark.parametrize(
    "value",
    [AttachRefused("not_today"), Denied("not_today"), ValueError("not today"), SystemExit(0)],
    ids=repr,
)
async def test_an_error_that_is_returned_is_an_error(value: Any) -> None:
    assert (await verdict_on(value)).reason == "policy_error"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        1,
        "ok",
        "",
        b"ok",
        (),
        ("ok",),
        ("ok", grant(), "extra"),
        (grant(),),
        [grant()],
        ("error", "no"),
        (grant(), True),
        Grant,
        AttachRefused,
        object(),
        CONTEXT,
    ],
    ids=repr,
)
async def test_whatever_else_is_returned_does_not_conform(value: Any) -> None:
    assert (await verdict_on(value)).reason == "non_conforming_return"


async def test_an_awaitable_is_awaited_once() -> None:
    async def later(value: Any) -> Any:
        return value

    assert await admit(lambda _context: later(grant()), CONTEXT) == grant()
    inner = later(grant())
    verdict = await admit(lambda _context: later(inner), CONTEXT)
    assert verdict == Denied("non_conforming_return", "coroutine")
    inner.close()


async def test_a_value_that_fails_when_it_is_looked_at_is_malformed() -> None:
    class Trap(UserDict[str, Any]):
        def __iter__(self) -> NoReturn:
            raise SystemExit(3)

    class Id(str):
        __slots__ = ()

        def __ne__(self, other: object) -> bool:
            raise KeyboardInterrupt

        def __eq__(self, other: object) -> bool:
            raise KeyboardInterrupt

        __hash__ = str.__hash__

    assert await verdict_on(grant(actor=Trap())) == Denied("malformed_grant", "SystemExit")
    verdict = await verdict_on(grant(session_id=Id("s-41")))
    assert verdict == Denied("malformed_grant", "KeyboardInterrupt")


# ------------------------------------------------------------------ what is raised


RAISED: list[BaseException] = [
    ValueError("secret"),
    RequestError(-32000, "look here"),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseException("secret"),
    StopIteration(1),
    StopAsyncIteration(1),
    asyncio.CancelledError(),
    TimeoutError(),
    MemoryError(),
    BaseExceptionGroup("secret", [SystemExit(1), ValueError("secret")]),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
async def test_whatever_a_policy_raises_is_a_crash(error: BaseException) -> None:
    def plain(_context: AttachContext) -> NoReturn:
        raise error

    async def asynchronous(_context: AttachContext) -> NoReturn:
        await asyncio.sleep(0)
        raise error

    # A coroutine cannot raise StopIteration; it comes out as a RuntimeError.
    stopped = isinstance(error, StopIteration)
    assert await admit(plain, CONTEXT) == Denied("policy_crash", type(error).__name__)
    assert await admit(asynchronous, CONTEXT) == Denied(
        "policy_crash", "RuntimeError" if stopped else type(error).__name__
    )


async def test_a_policy_that_says_no_is_an_error_with_its_reason() -> None:
    def plain(_context: AttachContext) -> NoReturn:
        raise AttachRefused("sig_invalid")

    async def asynchronous(_context: AttachContext) -> NoReturn:
        raise AttachRefused

    assert await admit(plain, CONTEXT) == Denied("policy_error", "sig_invalid")
    assert await admit(asynchronous, CONTEXT) == Denied("policy_error", "refused")


@pytest.mark.parametrize("policy", [5, "LocalNode", grant(), grant])
async def test_what_cannot_be_called_crashes(policy: Any) -> None:
    assert await admit(policy, CONTEXT) == Denied("policy_crash", "TypeError")


async def test_no_policy_admits_nobody() -> None:
    assert (await admit(None, CONTEXT)).reason == "policy_crash"  # type: ignore[union-attr]


async def test_a_policy_that_cancels_itself_cancels_nobody_else() -> None:
    async def suicide(_context: AttachContext) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return grant()

    assert await admit(suicide, CONTEXT) == Denied("policy_crash", "CancelledError")


# ------------------------------------------------------------------ how long it takes


@contextmanager
def about(seconds: float) -> Generator[None]:
    began = asyncio.get_running_loop().time()
    yield
    assert seconds <= asyncio.get_running_loop().time() - began < seconds + 1


TIMEOUT = Denied("policy_timeout", "0.08 s")


async def test_an_async_policy_that_hangs_is_cancelled_in_time() -> None:
    seen: list[Any] = []

    async def hangs(_context: AttachContext) -> Any:
        seen.append(asyncio.current_task())
        assert seen[0] in _attach._asked  # else nothing might hold it
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cancelled")

    with about(BOUND):
        assert await admit(hangs, CONTEXT, timeout=BOUND) == TIMEOUT
    assert seen[1] == "cancelled"
    assert seen[0].done()
    assert seen[0] not in asyncio.all_tasks()


async def test_a_policy_that_grants_when_it_is_cancelled_grants_nothing() -> None:
    async def stubborn(_context: AttachContext) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return grant()

    assert await admit(stubborn, CONTEXT, timeout=BOUND) == TIMEOUT


async def test_a_policy_that_ignores_its_cancellation_is_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release, ended = asyncio.Event(), asyncio.Event()

    async def ignores(_context: AttachContext) -> Any:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        raise SystemExit

    with about(BOUND):
        assert await admit(ignores, CONTEXT, timeout=BOUND) == TIMEOUT
    assert "ignores its cancellation" in caplog.text
    assert SECRET not in caplog.text
    release.set()
    await ended.wait()


async def test_a_plain_policy_that_hangs_blocks_neither_the_loop_nor_the_end() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []
    turns = 0

    def hangs(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        release.wait(30)
        return grant()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    other = asyncio.create_task(others())
    with about(BOUND):
        assert await admit(hangs, CONTEXT, timeout=BOUND) == TIMEOUT
    other.cancel()
    assert turns > 10
    assert threads[0].daemon
    release.set()
    threads[0].join(10)
    assert not threads[0].is_alive()
    await asyncio.sleep(0)  # its outcome is nobody's


async def test_a_coroutine_that_comes_too_late_is_closed() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    async def late() -> Any:
        return grant()

    coroutine = late()

    def hangs(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        release.wait(30)
        return coroutine

    assert await admit(hangs, CONTEXT, timeout=BOUND) == TIMEOUT
    release.set()
    threads[0].join(10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited"):
        coroutine.send(None)


def test_a_thread_whose_loop_has_ended_ends_quietly() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    async def late() -> Any:
        return grant()

    def hangs(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        release.wait(30)
        return late()

    assert asyncio.run(admit(hangs, CONTEXT, timeout=BOUND)) == TIMEOUT
    release.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


async def test_policies_that_hang_in_threads_are_counted_and_then_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_attach, "_HANGING", 3)
    release = threading.Event()
    threads: list[threading.Thread] = []

    def hangs(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        release.wait(30)
        return grant()

    for _ in range(3):
        assert await admit(hangs, CONTEXT, timeout=0.001) == Denied("policy_timeout", "0.001 s")
    assert await admit(hangs, CONTEXT) == Denied("policy_infra", "3 policies hang")
    assert await admit(returns(grant()), CONTEXT) == Denied("policy_infra", "3 policies hang")
    assert len(threads) == 3
    release.set()
    for thread in threads:
        thread.join(10)
    assert await admit(returns(grant()), CONTEXT) == grant()
    assert _attach._hanging.count == 0


async def test_a_policy_that_returned_just_before_it_was_left_does_not_hang() -> None:
    call = _attach._Call(returns(grant()), CONTEXT)
    call.run()
    call.leave()
    assert _attach._hanging.count == 0
    assert (await call.outcome).value == grant()


async def test_cancelling_the_attach_cancels_the_policy() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hangs(_context: AttachContext) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    attaching = asyncio.create_task(admit(hangs, CONTEXT))
    await started.wait()
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    await cancelled.wait()


async def test_cancelling_the_attach_does_not_wait_for_a_thread() -> None:
    started, release = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def hangs(_context: AttachContext) -> Any:
        threads.append(threading.current_thread())
        started.set()
        release.wait(30)

    attaching = asyncio.create_task(admit(hangs, CONTEXT))
    assert await asyncio.to_thread(started.wait, 10)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    assert threads[0].is_alive()
    release.set()
    threads[0].join(10)


# ------------------------------------------------------------------ where it runs


async def test_a_plain_policy_sees_the_caller_s_context_variables() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    seen: list[str] = []

    def policy(_context: AttachContext) -> Any:
        seen.append(variable.get())
        variable.set("the policy's")
        return grant()

    variable.set("the caller's")
    assert await admit(policy, CONTEXT) == grant()
    assert seen == ["the caller's"]
    assert variable.get() == "the caller's"


async def test_async_policies_of_any_make_run_on_the_loop() -> None:
    here = threading.get_ident()
    seen: list[int] = []

    class Called:
        async def __call__(self, _context: AttachContext) -> Any:
            seen.append(threading.get_ident())
            return grant()

    async def with_more(_more: int, _context: AttachContext) -> Any:
        seen.append(threading.get_ident())
        return grant()

    policies: list[Any] = [Called(), Called().__call__, partial(with_more, 5), partial(Called())]
    for policy in policies:
        assert await admit(policy, CONTEXT) == grant()
    assert seen == [here] * 4


async def test_an_async_policy_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asynchronous(_context: AttachContext) -> Any:
        return grant()

    class Called:
        async def __call__(self, _context: AttachContext) -> Any:
            return grant()

    def no_more(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    for policy in (asynchronous, Called()):
        assert await admit(policy, CONTEXT) == grant()


async def test_a_thread_that_cannot_be_started_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert await admit(returns(grant()), CONTEXT) == Denied(
        "policy_infra", "can't start new thread"
    )


async def test_a_loop_that_makes_no_tasks_denies() -> None:
    def none(*_args: Any, **_named: Any) -> NoReturn:
        raise RuntimeError("no more tasks")

    loop = asyncio.get_running_loop()
    loop.set_task_factory(none)
    try:
        verdict = await admit(returns(grant()), CONTEXT)
    finally:
        loop.set_task_factory(None)
    assert verdict == Denied("policy_infra", "RuntimeError")


async def test_nothing_of_a_policy_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "antiphon.journal")
    before = threading.active_count(), len(asyncio.all_tasks())

    def crashes(_context: AttachContext) -> NoReturn:
        raise ValueError

    began = time.monotonic()
    for policy in [returns(grant()), returns(None), crashes] * 50:
        await admit(policy, CONTEXT)
    while threading.active_count() > before[0]:
        assert time.monotonic() < began + 20
        await asyncio.sleep(0.001)
    assert len(asyncio.all_tasks()) == before[1]
    assert not _attach._asked


# ------------------------------------------------------------------ what is told, and to whom


@pytest.mark.parametrize(
    ("policy", "level"),
    [
        (returns(True), logging.WARNING),
        (returns(grant(via=None)), logging.WARNING),
        (returns(AttachRefused("no")), logging.INFO),
        (None, logging.WARNING),
    ],
)
async def test_denials_are_logged_without_the_token(
    policy: Any, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    verdict = await admit(policy, CONTEXT)

    assert isinstance(verdict, Denied)
    (logged,) = caplog.records
    assert logged.name == "antiphon.journal"
    assert logged.levelno == level
    assert verdict.reason in logged.getMessage()
    assert SECRET not in caplog.text


async def test_a_crash_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def crashes(_context: AttachContext) -> NoReturn:
        raise ValueError("what was wrong")

    await admit(crashes, CONTEXT)

    assert "ValueError: what was wrong" in caplog.text
    assert SECRET not in caplog.text


async def test_who_is_admitted_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await admit(returns(grant()), CONTEXT)

    assert not [logged for logged in caplog.records if logged.name == "antiphon.journal"]


def test_a_token_is_not_shown() -> None:
    assert SECRET not in repr(CONTEXT)
    assert repr(AttachContext("s", None, "u", None, 0, None)) == (
        "AttachContext(session_id='s', actor=None, surface='u', capability=None, "
        "from_offset=0, transport=None)"
    )


@pytest.mark.parametrize("missing", ["transport", "capability", "surface"])
def test_what_a_policy_decides_about_is_all_told(missing: str) -> None:
    told: dict[str, Any] = dict.fromkeys(AttachContext.__struct_fields__)
    del told[missing]
    with pytest.raises(TypeError, match=missing):
        AttachContext(**told)


def test_the_answer_to_whoever_is_denied_has_no_data() -> None:
    error = attach_denied()

    assert error_frame(b"12", error.code, error.message, error.data) == (
        b'{"jsonrpc":"2.0","id":12,"error":{"code":-32000,"message":"attach denied"}}'
    )


# ------------------------------------------------------------------ anything at all


members: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "actor": st.none()
        | st.dictionaries(st.sampled_from(["id", "kind"]), st.text() | st.none()),
        "session_id": st.sampled_from(["s-41", "s-42", None, 41]),
        "via": st.none() | st.text(),
        "scope": st.sampled_from(["attach", "admin", None]),
        "expires_at": st.none() | st.integers() | st.floats() | st.booleans(),
    }
)
values: st.SearchStrategy[Any] = (
    members.map(lambda told: Grant(**told))
    | members
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(st.just("ok"), inner),
    )
)


def has_id(actor: Any) -> bool:
    return actor is not None and isinstance(actor.get("id"), str)


@given(values)
async def test_only_the_shape_of_a_grant_admits(value: Any) -> None:
    async def policy(_context: AttachContext) -> Any:
        return value

    verdict = await admit(policy, CONTEXT)
    well_formed = (
        isinstance(value, Grant)
        and has_id(value.actor)
        and value.session_id == "s-41"
        and value.via is not None
        and value.scope == "attach"
        and (value.expires_at is None or type(value.expires_at) is int)
    )
    assert isinstance(verdict, Grant) is well_formed
    if well_formed:
        assert verdict == value
