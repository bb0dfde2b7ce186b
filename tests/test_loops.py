"""Loops of ours end within a bound, whatever tasks and worker threads do."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import _loops, _workers
from antiphon._loops import bounded_runner
from antiphon._workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.async_tests import LoopFactory

    Work = Callable[[Callable[[], Any]], asyncio.Future[Any]]


# ------------------------------------------------------------------ the loop


def test_a_loop_runs_and_leaves_nothing(loop_factory: LoopFactory) -> None:
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("task")

    async def generate() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.append("generator")

    async def main() -> int:
        task = asyncio.create_task(linger())
        generator = generate()
        await anext(generator)
        kept.extend([task, generator])
        return await asyncio.to_thread(threading.get_ident)

    kept: list[Any] = []
    with bounded_runner(loop_factory) as runner:
        loop = runner.get_loop()
        assert runner.run(main()) != threading.get_ident()
    assert loop.is_closed()
    assert sorted(ended) == ["generator", "task"]


def test_without_a_factory_the_loop_is_asyncios_own() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with bounded_runner() as runner:
        assert isinstance(runner.run(main()), asyncio.SelectorEventLoop)


@pytest.mark.parametrize("told_before", [False, True])
@pytest.mark.parametrize("deaf_to", ["cancellation", "the end of its generator"])
def test_what_ignores_its_end_is_left_behind_and_reported(
    told_before: bool,
    deaf_to: str,
    loop_factory: LoopFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_loops, "GRACE", 0.05)
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def generate() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            await deaf()

    async def main() -> None:
        if deaf_to == "cancellation":
            task = asyncio.create_task(deaf())
            await asyncio.sleep(0)
            if told_before:
                task.cancel()
            kept.append(task)
        else:
            kept.append(generate())
            await anext(kept[0])

    kept: list[Any] = []
    caplog.set_level(logging.ERROR, "antiphon.loops")
    start = time.monotonic()
    with bounded_runner(loop_factory) as runner:
        runner.run(main())
    assert time.monotonic() - start < 3
    if deaf_to == "cancellation" and not told_before:
        assert "ignores cancellation" in caplog.text
    release.set()
    kept.clear()
    with caplog.at_level(logging.CRITICAL, "asyncio"):
        gc.collect()


def test_a_task_that_fails_while_it_is_ended_is_reported() -> None:
    reported: list[BaseException] = []

    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("at the end")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        kept.append(asyncio.create_task(fails()))
        await asyncio.sleep(0)

    kept: list[Any] = []
    with bounded_runner() as runner:
        runner.run(main())
    assert [str(error) for error in reported] == ["at the end"]


def test_a_worker_that_does_not_return_is_left_behind(
    loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loops, "WORKER_GRACE", 0.05)
    release, begun = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        begun.set()
        release.wait(20)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, hang)
        await loop.run_in_executor(None, begun.wait, 10)

    with bounded_runner(loop_factory) as runner:
        runner.run(main())
    assert "does not return" in caplog.text
    (thread,) = threads
    assert thread.daemon
    release.set()
    thread.join(10)


# ------------------------------------------------------------------ workers


def test_the_first_work_employs_workers_and_the_loop_is_as_it_was(
    loop_factory: LoopFactory,
) -> None:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        assert getattr(loop, "_default_executor", None) is None
        first = await asyncio.to_thread(threading.current_thread)
        assert "run_in_executor" not in vars(loop)
        return [first, await loop.run_in_executor(None, threading.current_thread)]

    with bounded_runner(loop_factory) as runner:
        first, second = runner.run(main())
    assert first.daemon
    assert first.name == second.name == "antiphon worker"


def test_an_executor_of_a_user_is_used_for_what_it_is_given(loop_factory: LoopFactory) -> None:
    async def main() -> list[str]:
        loop, names = asyncio.get_running_loop(), list[str]()

        def note() -> None:
            names.append(threading.current_thread().name)

        with ThreadPoolExecutor(1, "named") as theirs, ThreadPoolExecutor(1, "default") as default:
            await loop.run_in_executor(theirs, note)
            loop.set_default_executor(default)
            await loop.run_in_executor(theirs, note)
            await loop.run_in_executor(None, note)
        return names

    with bounded_runner(loop_factory) as runner:
        assert runner.run(main()) == ["named_0", "named_0", "default_0"]


def _by_position(loop: asyncio.AbstractEventLoop) -> Work:
    return lambda work: loop.run_in_executor(None, work)


def _by_name(loop: asyncio.AbstractEventLoop) -> Work:
    return lambda work: loop.run_in_executor(executor=None, func=work)


def _found_once(loop: asyncio.AbstractEventLoop) -> Work:
    return partial(loop.run_in_executor, None)


def _wrapped(loop: asyncio.AbstractEventLoop) -> Work:
    own = loop.run_in_executor

    def traced(executor: Any, work: Callable[[], Any]) -> asyncio.Future[Any]:
        seen.append(work)
        return own(executor, work)

    seen: list[Any] = []
    loop.run_in_executor = traced  # type: ignore[method-assign, assignment]

    def give(work: Callable[[], Any]) -> asyncio.Future[Any]:
        future = loop.run_in_executor(None, work)
        assert seen.pop() is work  # who has put something over it still sees each
        return future

    return give


def _from_threads(loop: asyncio.AbstractEventLoop) -> Work:
    def give(work: Callable[[], Any]) -> asyncio.Future[Any]:
        def run() -> None:
            together.wait(10)
            futures.append(loop.run_in_executor(None, work))

        futures: list[asyncio.Future[Any]] = []
        together = threading.Barrier(4)
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return asyncio.ensure_future(_last(futures))

    return give


async def _last(futures: list[asyncio.Future[Any]]) -> Any:
    return [await future for future in futures][-1]


@pytest.mark.parametrize("way", [_by_position, _by_name, _found_once, _wrapped, _from_threads])
@pytest.mark.parametrize("default", ["none", "refused", "theirs"])
def test_however_work_is_given_there_is_one_crew_for_it(
    way: Callable[[asyncio.AbstractEventLoop], Work],
    default: str,
    loop_factory: LoopFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counted(Workers):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    made: list[Workers] = []
    monkeypatch.setattr(_workers, "Workers", Counted)

    async def main() -> set[str]:
        loop = asyncio.get_running_loop()
        give = way(loop)
        if default == "theirs":
            loop.set_default_executor(executor=ThreadPoolExecutor(1, "theirs"))
        elif default == "refused" and isinstance(loop, asyncio.BaseEventLoop):
            with pytest.raises(TypeError):
                loop.set_default_executor("none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return {(await give(threading.current_thread)).name for _ in range(3)}

    with bounded_runner(loop_factory) as runner:
        names = runner.run(main())
    assert names == ({"theirs_0"} if default == "theirs" else {"antiphon worker"})
    assert len(made) == (default != "theirs")
    assert not any(thread.is_alive() for workers in made for thread in workers._crew)


def test_a_loop_that_takes_no_attributes_has_workers_at_once() -> None:
    class Closed(asyncio.SelectorEventLoop):
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with bounded_runner(Closed) as runner:
        assert isinstance(runner.get_loop()._default_executor, Workers)  # type: ignore[attr-defined]
        work = asyncio.to_thread(threading.current_thread)
        assert runner.run(work).daemon


# ------------------------------------------------------------------ whole programs

STUCK = """
import asyncio, threading
from antiphon import Agent, Limits, serve_stdio

class Stuck(Agent):
    async def prompt(self, turn):
        await turn.say("stuck")
        if turn.text == "thread":
            await asyncio.to_thread(threading.Event().wait)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

serve_stdio(Stuck(), limits=Limits(close_grace=0.1))
print("after serving")
"""


@pytest.mark.covers("FF-36")
@pytest.mark.parametrize("how", ["thread", "task"])
@pytest.mark.parametrize("end", ["end of input", "signal"])
def test_an_agent_that_is_stuck_ends_with_its_client(how: str, end: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    assert agent.stderr is not None
    with agent:

        def ask(id_: int, method: str, **params: Any) -> Any:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(json.dumps({"id": id_, "method": method, "params": params}) + "\n")
            agent.stdin.flush()
            return json.loads(agent.stdout.readline())

        ask(1, "initialize", protocolVersion=1)
        session = ask(2, "session/new", cwd="/", mcpServers=[])["result"]["sessionId"]
        text = {"type": "text", "text": how}
        assert ask(3, "session/prompt", sessionId=session, prompt=[text])["method"]
        if end == "signal":
            agent.terminate()
        else:
            agent.stdin.close()
        assert agent.wait(15) == 0
        assert "after serving" in agent.stderr.read()
