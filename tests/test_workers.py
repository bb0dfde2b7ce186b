"""Worker threads that are daemons do what those of the base class do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from antiphon._workers import Workers

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def workers() -> Generator[Workers]:
    crew = Workers()
    yield crew
    crew.shutdown()


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
