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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import _loops
from antiphon._loops import Workers, bounded_runner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from tests.async_tests import LoopFactory


@pytest.fixture
def workers() -> Generator[Workers]:
    crew = Workers()
    yield crew
    crew.shutdown()


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


def test_workers_give_results_and_errors(workers: Workers) -> None:
    def fail() -> None:
        raise KeyError("work")

    assert workers.submit(pow, 2, 3, mod=5).result(5) == 3
    with pytest.raises(KeyError, match="work"):
        workers.submit(fail).result(5)
    assert list(workers.map(str, range(100), timeout=5)) == [str(n) for n in range(100)]


def test_an_idle_worker_is_used_again_and_there_are_never_too_many(workers: Workers) -> None:
    first = workers.submit(threading.get_ident).result(5)
    assert workers._unemployed.acquire(timeout=5)  # it says so a moment after the result
    workers._unemployed.release()
    assert workers.submit(threading.get_ident).result(5) == first
    gate = threading.Event()
    waiting = [workers.submit(gate.wait, 10) for _ in range(workers._most + 20)]
    assert len(workers._crew) == workers._most
    gate.set()
    assert all(future.result(10) for future in waiting)


def test_work_that_was_cancelled_in_time_is_not_done(workers: Workers) -> None:
    gate = threading.Event()
    busy = [workers.submit(gate.wait, 10) for _ in range(workers._most)]
    late = workers.submit(gate.set)
    assert late.cancel()
    gate.set()
    assert all(future.result(10) for future in busy)
    assert late.cancelled()


def test_after_the_end_nothing_is_taken_and_what_was_taken_is_done_or_cancelled() -> None:
    for cancel in (False, True):
        crew, gate = Workers(), threading.Event()
        busy = [crew.submit(gate.wait, 10) for _ in range(crew._most)]
        late = crew.submit(str)
        crew.shutdown(wait=False, cancel_futures=cancel)
        assert not crew.join(0)
        with pytest.raises(RuntimeError, match="sent home"):
            crew.submit(str)
        gate.set()
        crew.shutdown()
        assert all(future.done() for future in busy)
        assert late.cancelled() is cancel


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
