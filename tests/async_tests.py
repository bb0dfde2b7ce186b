"""Runs `async def` tests, each on a loop of its own, and bounds every test.

A test that is not done after its bound (30 s, or `@pytest.mark.bound(seconds)`) fails with the
stack of every task. One that blocks the loop, or has no loop, is interrupted by an alarm signal
and fails with the stack it was in. After an `async def` test no task may be left, and nothing may
have reached the loop's exception handler.

A test that asks for the fixture `loop_factory` runs once on asyncio's loop and once on uvloop's. One
marked `virtual_time` runs on a loop whose time jumps, and has only the alarm for a bound: there a wait
that nothing can end fails by itself.
What a test leaves outside its loop is the business of `leaks`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import traceback
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon.testing._virtual_time import VirtualTimeLoop, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import FrameType

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]
    AsyncTest = Callable[..., Coroutine[Any, Any, None]]

BOUND = 30.0
# The alarm is the second line: it comes later, so that a test that merely waits is reported by
# its loop, with all tasks.
ALARM_DELAY = 3.0
# A task whose end is already scheduled when the test returns is no leak. Each turn of the loop
# brings an ended child one step nearer to the task that awaits it.
SETTLING_TURNS = 5


@pytest.fixture(scope="session")
def uvloop_factory() -> LoopFactory:
    """uvloop's, warm: its first loop opens descriptors that stay for the life of the process."""
    import uvloop  # only where it is used: it also starts processes, unseen by audit hooks

    uvloop.new_event_loop().close()
    return uvloop.new_event_loop


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest, uvloop_factory: LoopFactory) -> LoopFactory:
    """Runs the test once on each kind of loop."""
    return asyncio.new_event_loop if request.param == "asyncio" else uvloop_factory


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test; leave every other to pytest."""
    test = pyfuncitem.obj
    arguments: dict[str, Any] = {
        name: pyfuncitem.funcargs[name]
        for name in pyfuncitem._fixtureinfo.argnames  # the only place where pytest keeps them
    }
    factory = cast("LoopFactory | None", pyfuncitem.funcargs.get("loop_factory"))
    seconds: float | None = _bound(pyfuncitem)
    if pyfuncitem.get_closest_marker("virtual_time") is not None:
        factory, seconds = VirtualTimeLoop, None
    # hypothesis calls the inner test once for each example: each gets a loop.
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", None)
    if inspect.iscoroutinefunction(inner):
        test.hypothesis.inner_test = _as_plain_test(inner, factory, seconds)
        return None
    if not inspect.iscoroutinefunction(test):
        return None
    _as_plain_test(test, factory, seconds)(**arguments)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Interrupt whatever blocks the main thread past the bound."""
    seconds = _bound(item)

    def alarm(_signal: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame))
        pytest.fail(f"the test blocked past its bound of {seconds:g} s, in:\n{stack}", False)

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_DELAY)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _bound(item: pytest.Item) -> float:
    marker = item.get_closest_marker("bound")
    return BOUND if marker is None else float(marker.args[0])


def _as_plain_test(
    test: AsyncTest, factory: LoopFactory | None, seconds: float | None
) -> Callable[..., None]:
    @functools.wraps(test)
    def plain(*args: object, **kwargs: object) -> None:
        unhandled: list[str] = []
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_exception_handler(
                lambda _loop, context: unhandled.append(_describe(context))
            )
            left = runner.run(_bounded(test(*args, **kwargs), seconds))
        # Only now: closing the loop is what brings forgotten exceptions to its handler.
        if left:
            pytest.fail("the test left tasks behind:\n" + "\n".join(left), False)
        if unhandled:
            pytest.fail("the loop had to handle:\n" + "\n".join(unhandled), False)

    return plain


async def _bounded(test: Coroutine[Any, Any, None], seconds: float | None) -> list[str]:
    task = asyncio.create_task(test, name="the test")
    here = asyncio.current_task()
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        stacks = [stack_of(other) for other in asyncio.all_tasks() if other is not here]
        task.cancel()
        pytest.fail(f"not done after {seconds:g} s; the tasks:\n" + "\n".join(stacks), False)
    task.result()
    for _ in range(SETTLING_TURNS):
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0)
    return [stack_of(other) for other in asyncio.all_tasks() if other is not here]


def _describe(context: dict[str, Any]) -> str:
    text = str(context.get("message"))
    error = context.get("exception")
    if isinstance(error, BaseException):
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return text
