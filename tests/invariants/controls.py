"""Dead controls: what a test asserts is asserted again of a side that is wrong, and must not hold.

`controlled(name=wrong, ...)` makes a test run once as it stands ("right") and once more under each
wrong variant, where the very same assertions have to fail. A variant is a context: `changed` puts
something else in the place of an attribute of ours, `on_the_wire` changes frames on their way. One
that was never used proves nothing, and fails.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import DeliveryGap
from antiphon.transports import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from contextlib import AbstractContextManager

    Test = Callable[..., Coroutine[Any, Any, None]]
    Wrong = Callable[[], AbstractContextManager[list[object]]]

__all__ = ["changed", "controlled", "on_the_wire", "together"]

#: How a check says no, our own alarm among them. Anything else is a fault of the control itself.
_NO = (AssertionError, TimeoutError, DeliveryGap, pytest.fail.Exception)

#: What a control that fits no longer raises.
_BROKEN = (AttributeError, KeyError, NameError, TypeError)


def controlled(**variants: Wrong) -> Callable[[Test], Test]:
    """Run an `async def` test as it stands, and once under each wrong variant, where it must fail."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        async def run(*, control: str, **given: Any) -> None:
            if control == "right":
                await test(**given)
            else:
                await _must_fail(lambda: test(**given), variants[control], control)

        signature = inspect.signature(test)
        more = inspect.Parameter("control", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), more]
        )
        pytest.mark.parametrize("control", ["right", *variants])(run)
        return run

    return decorate


async def _must_fail(
    test: Callable[[], Coroutine[Any, Any, None]], wrong: Wrong, control: str
) -> None:
    # A side that is wrong may leave anything behind, and nobody need hear of it.
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    before = asyncio.all_tasks()
    caught = False
    with wrong() as used:
        try:
            await test()
        except _NO:
            caught = True
        finally:
            left = asyncio.all_tasks() - before
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=60)
    assert used, f"the wrong variant {control} was never met"
    broken = [thing for thing in used if isinstance(thing, BaseException)]
    assert not broken, f"the wrong variant {control} is broken itself: {broken!r}"
    assert caught, f"the wrong variant {control} passes"


def changed(owner: Any, name: str, wrong: Callable[..., Any]) -> Wrong:
    """`wrong(original, …)` stands for a function or method of ours; it gets the arguments."""

    @contextmanager
    def change() -> Generator[list[object]]:
        original: Any = inspect.getattr_static(owner, name)
        used: list[object] = []

        def instead(*args: Any, **named: Any) -> Any:
            used.append(args)
            try:
                result = wrong(original, *args, **named)
            except _BROKEN as error:
                used.append(error)  # which the side under test may catch, or be ended by
                raise
            return waited_for(result) if inspect.iscoroutine(result) else result

        async def waited_for(result: Coroutine[Any, Any, Any]) -> Any:
            try:
                return await result
            except _BROKEN as error:
                used.append(error)
                raise

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, instead)
            if name == "put" and hasattr(owner, "put_all"):
                patch.setattr(owner, "put_all", one_by_one)
            yield used

    return change


def one_by_one(self: Any, several: Any, second: Any) -> None:
    """A `put_all` that is `put` for each, so that what stands for the one stands for both."""
    frames = [update.frame for update in several] if isinstance(second, int) else second
    for item, frame in zip(several, frames, strict=True):
        self.put(item, len(frame) if isinstance(second, int) else frame)


def together(*wrongs: Wrong) -> Wrong:
    """Several changes that are only wrong together."""

    @contextmanager
    def change() -> Generator[list[object]]:
        with ExitStack() as stack:
            each = [stack.enter_context(wrong()) for wrong in wrongs]
            used: list[object] = []
            yield used
            if all(each):
                used += each

    return change


def on_the_wire(alter: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Wrong:
    """`alter` changes the frames of each write of either side; it is used when it changes one.

    What is no JSON object passes.
    """

    @contextmanager
    def change() -> Generator[list[object]]:
        used: list[object] = []
        original = MemoryTransport.send

        def send(self: MemoryTransport, frames: list[bytes]) -> None:
            try:
                messages: list[Any] = [json.loads(frame) for frame in frames]
            except ValueError:
                original(self, frames)
                return
            if not all(isinstance(message, dict) for message in messages):
                original(self, frames)
                return
            altered = alter(copy.deepcopy(messages))
            if altered != messages:
                used.append(altered)
                frames = [json.dumps(message).encode() for message in altered]
            original(self, frames)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryTransport, "send", send)
            yield used

    return change
