"""A loop in a thread, and threads that wait for it: outcomes, questions, interrupts and ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

from antiphon import ConnectionClosed, LocalProtocolError
from antiphon._background import Background, Resident

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncGenerator, Callable

BOUND = 20.0


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "antiphon sync"]


class Guest:
    """What lives on the loop, and what happened to it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @asynccontextmanager
    async def stay(
        self,
        *,
        at_door: Callable[[], object] = lambda: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[Guest]:
        self.log.append("came")
        try:
            if at_door() == "stay at the door":
                await asyncio.get_running_loop().create_future()
            yield self
        finally:
            self.log.append("left")
            at_end()

    async def thread(self) -> threading.Thread:
        return threading.current_thread()

    async def fail(self, error: BaseException) -> NoReturn:
        raise error

    async def hang(self, act: Callable[[], object] = lambda: None) -> None:
        try:
            act()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise


def fail(error: BaseException) -> Callable[[], NoReturn]:
    def act(*_: object) -> NoReturn:
        raise error

    return act


def test_a_call_runs_on_the_thread_and_its_outcome_comes_back() -> None:
    resident = Resident(Guest().stay())
    guest = resident.open()
    try:
        assert resident.call(guest.thread()) is threads()[0]
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            resident.call(guest.fail(error))
        assert caught.value is error
        assert not resident.ended
    finally:
        resident.close()
    assert guest.log == ["came", "left"]
    assert resident.ended
    assert not threads()


def test_what_fails_at_the_door_never_came() -> None:
    guest = Guest()
    with pytest.raises(ZeroDivisionError):
        Resident(guest.stay(at_door=fail(ZeroDivisionError()))).open()
    assert guest.log == ["came", "left"]
    assert not threads()


def test_a_failure_at_the_end_is_raised_once() -> None:
    resident = Resident(Guest().stay(at_end=fail(ZeroDivisionError())))
    resident.open()
    with pytest.raises(ZeroDivisionError):
        resident.close()
    resident.close()
    assert not threads()


def test_an_interrupt_at_the_door_sends_away() -> None:
    def press() -> str:
        interrupt()
        return "stay at the door"

    guest = Guest()
    with pytest.raises(KeyboardInterrupt):
        Resident(guest.stay(at_door=press)).open()
    assert guest.log == ["came", "left"]
    assert not threads()


def test_an_interrupt_cancels_the_call_and_waits_for_it() -> None:
    resident = Resident(Guest().stay())
    guest = resident.open()
    with pytest.raises(KeyboardInterrupt):
        resident.call(guest.hang(interrupt))
    assert guest.log == ["came", "cancelled"]
    assert resident.call(guest.thread())
    resident.close()


def test_what_another_signal_raises_cancels_the_call_too() -> None:
    def alarm(_number: int, _frame: object) -> NoReturn:
        raise ZeroDivisionError

    before = signal.signal(signal.SIGUSR1, alarm)
    resident = Resident(Guest().stay())
    guest = resident.open()
    main = threading.main_thread().ident
    assert main is not None
    try:
        with pytest.raises(ZeroDivisionError):
            resident.call(guest.hang(lambda: signal.pthread_kill(main, signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guest.log == ["came", "cancelled"]
    resident.close()


def test_who_has_left_cannot_be_called() -> None:
    resident = Resident(Guest().stay())
    guest = resident.open()
    resident.close()
    with pytest.raises(ConnectionClosed):
        resident.call(guest.thread())
    resident.post(fail(ZeroDivisionError()))
    resident.stop()


def test_calls_that_are_open_at_the_end_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon._background.CALL_GRACE", 0.01)
    resident = Resident(Guest().stay())
    guest = resident.open()
    caught: list[ConnectionClosed] = []
    hanging = threading.Event()

    def call() -> None:
        try:
            resident.call(guest.hang(hanging.set))
        except ConnectionClosed as error:
            caught.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    assert hanging.wait(BOUND)
    resident.close()
    calling.join(BOUND)
    assert len(caught) == 1
    assert guest.log == ["came", "left", "cancelled"]


@pytest.mark.covers("Inv-9")
def test_the_thread_cannot_wait_for_itself() -> None:
    async def call() -> None:
        for wait in (resident.close, lambda: resident.call(guest.thread())):
            with pytest.raises(LocalProtocolError, match="itself"):
                wait()

    resident = Resident(Guest().stay())
    guest = resident.open()
    resident.call(call())
    resident.close()


# ---------------------------------------------------------------------- questions


def test_a_question_is_asked_in_the_thread_that_waits() -> None:
    async def work() -> object:
        return await resident.ask(threading.current_thread)

    resident = Resident(Guest().stay())
    resident.open()
    assert resident.call(work()) is threading.current_thread()
    resident.close()


def test_a_question_may_ask_back() -> None:
    async def work(depth: int) -> int:
        if not depth:
            return 0
        return 1 + (await resident.ask(lambda: resident.call(work(depth - 1))) or 0)

    resident = Resident(Guest().stay())
    resident.open()
    assert resident.call(work(5)) == 5
    resident.close()


def test_what_a_question_raises_goes_to_who_asked() -> None:
    async def work() -> str:
        try:
            await resident.ask(fail(ZeroDivisionError()))
        except ZeroDivisionError:
            return "known"
        return "unknown"

    resident = Resident(Guest().stay())
    resident.open()
    assert resident.call(work()) == "known"
    resident.close()


def test_an_interrupt_at_a_question_goes_to_who_answers() -> None:
    async def work() -> None:
        await asyncio.shield(asking(fail(KeyboardInterrupt())))

    async def asking(ask: Callable[[], object]) -> None:
        answers.append(await resident.ask(ask))
        asked.set()

    answers: list[object] = []
    asked = threading.Event()
    resident = Resident(Guest().stay())
    resident.open()
    with pytest.raises(KeyboardInterrupt):
        resident.call(work())
    assert asked.wait(BOUND)
    assert answers == [None]
    resident.close()


def test_a_question_waits_for_a_thread_that_waits_and_asks() -> None:
    asked: list[str] = []
    answered: list[object] = []

    async def begin() -> None:
        task = asyncio.create_task(ask())
        tasks.append(task)

    async def ask() -> None:
        answered.append(await resident.ask(lambda: asked.append("asked")))

    async def end() -> None:
        await tasks[0]

    tasks: list[asyncio.Task[None]] = []
    resident = Resident(Guest().stay())
    guest = resident.open()
    resident.call(begin(), asking=False)
    resident.call(guest.thread(), asking=False)
    assert not asked
    resident.call(end())
    assert (asked, answered) == (["asked"], [None])
    resident.close()


def test_a_question_that_was_withdrawn_is_not_asked() -> None:
    asked: list[str] = []

    async def begin() -> None:
        task = asyncio.create_task(resident.ask(lambda: asked.append("asked")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    resident = Resident(Guest().stay())
    guest = resident.open()
    resident.call(begin(), asking=False)
    resident.call(guest.thread())
    assert not asked
    resident.close()


# ---------------------------------------------------------------------- the thread


def test_residents_share_a_thread_that_ends_with_the_last_and_begins_anew() -> None:
    for _ in range(3):
        residents = [Resident(Guest().stay()) for _ in range(3)]
        for resident in residents:
            resident.open()
        assert len(threads()) == 1
        for resident in residents:
            assert threads()
            resident.close()
        assert not threads()


def test_a_loop_that_is_ended_by_a_handler_ends_every_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Resident(Guest().stay()), Resident(Guest().stay())
    guest, other = first.open(), second.open()
    caught: list[Exception] = []
    hanging = threading.Event()

    def wait() -> None:
        try:
            second.call(other.hang(hanging.set))
        except ConnectionClosed as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert hanging.wait(BOUND)
    with pytest.raises((SystemExit, ConnectionClosed)):
        first.call(guest.fail(SystemExit("enough")))
    waiting.join(BOUND)
    first.close()
    second.close()

    assert not waiting.is_alive()
    assert len(caught) == 1
    assert not threads()
    assert "ended the background loop" in caplog.text
    with pytest.raises(ConnectionClosed):
        second.call(other.thread())

    third = Resident(Guest().stay())
    third.open()
    third.close()


def test_a_thread_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", fail(RuntimeError("no")))

    with pytest.raises(RuntimeError, match="no"):
        Resident(Guest().stay()).open()
    with pytest.raises(RuntimeError, match="no"):
        Background.join()


def test_the_log_says_nothing_of_an_orderly_life(caplog: pytest.LogCaptureFixture) -> None:
    resident = Resident(Guest().stay())
    resident.open()
    resident.close()

    records: list[logging.LogRecord] = caplog.records
    assert not [record for record in records if record.name == "antiphon.sync"]


def test_an_interrupt_before_the_call_was_begun_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = Resident(Guest().stay())
    guest = resident.open()
    post = resident.post
    try:

        def interrupted(act: Callable[[], object]) -> None:
            monkeypatch.setattr(resident, "post", post)
            raise KeyboardInterrupt

        monkeypatch.setattr(resident, "post", interrupted)
        ended = threading.Timer(BOUND / 2, resident.stop)  # or it would wait for ever
        ended.start()
        with pytest.raises(KeyboardInterrupt):
            resident.call(guest.hang())
        ended.cancel()
        ended.join()
        assert guest.log == ["came"]
    finally:
        resident.close()


def test_a_signal_handler_may_call_at_whatever_its_own_thread_is() -> None:
    resident = Resident(Guest().stay())
    guest = resident.open()
    found: list[threading.Thread] = []

    def wait() -> None:
        with resident._condition:  # as a handler finds it between two looks
            found.append(resident.call(guest.thread()))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(BOUND / 4)
    try:
        assert found == threads()
    finally:
        if not found:
            resident._condition.release()
        resident.close()
