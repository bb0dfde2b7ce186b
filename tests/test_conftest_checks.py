"""Each check that every test goes through, proved able to fail."""

from __future__ import annotations

import gc
import signal
import textwrap

import pytest

from tests.signals import DEFAULTS

INI = """
[pytest]
addopts = -p no:cacheprovider
filterwarnings = error
markers =
    alarms: names
    bound: seconds
    virtual_time: on a loop whose time jumps
"""
HEAD = """
import asyncio, os, subprocess, sys, tempfile, threading, time
import pytest
"""


def run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makeini(INI)
    pytester.makeconftest(
        "pytest_plugins = ['tests.alarms', 'tests.async_tests', 'tests.leaks', 'tests.no_skips', "
        "'tests.signals']"
    )
    pytester.makepyfile(HEAD + textwrap.dedent(test))
    return pytester.runpytest_inprocess("-p", "no:hypothesispytest")


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("async def test_it(): await asyncio.sleep(0)", id="async"),
        pytest.param("def test_it(): pass", id="plain"),
        pytest.param(
            """
            @pytest.mark.virtual_time
            @pytest.mark.bound(5)
            async def test_it(): await asyncio.sleep(3600)
            """,
            id="virtual time",
        ),
        pytest.param(
            """
            @pytest.fixture
            def seven(): return 7
            async def test_it(seven): assert seven == 7
            """,
            id="fixture",
        ),
        pytest.param(
            """
            async def child(): await asyncio.sleep(0)
            async def test_it():
                a = asyncio.create_task(child())
                b = asyncio.create_task(asyncio.wait([a]))
            """,
            id="tasks about to end",
        ),
        pytest.param(
            """
            def test_it():
                subprocess.Popen([sys.executable, "-c", ""]).wait()
                with tempfile.TemporaryDirectory(): pass
                os.close(os.open("/dev/null", os.O_RDONLY))
            """,
            id="everything put away",
        ),
        pytest.param(
            """
            @pytest.fixture(scope="module")
            def server():
                shell = "sleep 100 & echo started; wait"
                with subprocess.Popen(
                    ["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True
                ) as child:
                    child.stdout.readline()
                    yield
                    os.killpg(child.pid, 9)
            def test_it(server): subprocess.run(["true"])
            """,
            id="a module's process and its child",
        ),
        pytest.param(
            """
            from antiphon._guard import guard
            def test_it():
                guard.close()
                guard.add(2_000_000_000)
                guard.remove(2_000_000_000)
            """,
            id="the guard of this process, and another in its place",
        ),
    ],
)
def test_a_clean_test_passes(pytester: pytest.Pytester, test: str) -> None:
    run(pytester, test).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("async def test_it(): assert 1 == 2", "assert 1 == 2"),
        ("async def test_it(): raise asyncio.CancelledError", "CancelledError"),
        (
            """
            async def deep(): await asyncio.Event().wait()
            async def test_it():
                t = asyncio.create_task(deep(), name="forgotten")
                await asyncio.sleep(0)
            """,
            "*forgotten*",
        ),
        (
            """
            async def broken(): raise ValueError("inside")
            async def test_it():
                t = asyncio.create_task(broken())
                await asyncio.sleep(0)
            """,
            "*never retrieved*",
        ),
        (
            """
            async def test_it():
                asyncio.get_running_loop().call_soon(lambda: 1 / 0)
                await asyncio.sleep(0)
            """,
            "*ZeroDivisionError*",
        ),
        (
            """
            async def deep(): await asyncio.Event().wait()
            @pytest.mark.bound(0.05)
            async def test_it(): await deep()
            """,
            "*async def deep*",
        ),
        (
            """
            async def deep(): await asyncio.Event().wait()
            @pytest.mark.virtual_time
            async def test_it(): await deep()
            """,
            "*nothing is scheduled and nothing is ready*",
        ),
        (
            """
            @pytest.mark.virtual_time
            async def test_it():
                t = asyncio.create_task(asyncio.sleep(3600), name="forgotten")
                await asyncio.sleep(1)
            """,
            "*forgotten*",
        ),
        (
            """
            def test_it():
                import warnings
                warnings.warn("old", DeprecationWarning)
            """,
            "*DeprecationWarning: old*",
        ),
        ("async def test_it(): asyncio.sleep(0)", "*was never awaited*"),
        (
            """
            class Noisy:
                def __del__(self): raise ValueError("in del")
            def test_it(): Noisy()
            """,
            "*in del*",
        ),
        (
            """
            def test_it():
                thread = threading.Thread(target=lambda: 1 / 0)
                thread.start()
                thread.join()
            """,
            "*ZeroDivisionError*",
        ),
    ],
)
def test_a_faulty_test_fails(pytester: pytest.Pytester, test: str, told: str) -> None:
    result = run(pytester, test)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{told}*"])


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("def test_it(): subprocess.Popen(['sleep', '100']).returncode = 0", "process * 100"),
        (
            """
            def test_it():
                shell = "sleep 100 >/dev/null & echo started"
                assert subprocess.check_output(["setsid", "-w", "sh", "-c", shell])
            """,
            "process * 100",
        ),
        (
            """
            def test_it():
                child = subprocess.Popen(["true"])
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
                child.returncode = 0
            """,
            "process *zombie",
        ),
        (
            """
            @pytest.fixture(scope="module")
            def later():
                opened = []
                yield opened
                os.close(opened[0])
            def test_it(later): later.append(os.open("/dev/null", os.O_RDONLY))
            """,
            "descriptor */dev/null",
        ),
        (
            """
            from antiphon._guard import Guard
            @pytest.fixture(scope="module")
            def second():
                guard = Guard()
                yield guard
                guard.close()
            def test_it(second): second.add(2_000_000_000)
            """,
            "process *# antiphon: when process",
        ),
        ("def test_it(): tempfile.mkdtemp(prefix='kept')", "temporary file kept"),
        ("def test_it(): os.close(tempfile.mkstemp(prefix='kept')[0])", "temporary file kept"),
        (
            """
            @pytest.fixture(scope="module")
            def later():
                done = threading.Event()
                thread = threading.Thread(target=done.wait, name="late")
                yield thread
                done.set()
                thread.join()
            def test_it(later): later.start()
            """,
            "thread late",
        ),
    ],
)
def test_a_test_that_leaves_something_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str, told: str
) -> None:
    monkeypatch.setattr("tests.leaks.GRACE", 0.2)

    result = run(pytester, test)

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*{told}*"])


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_test_that_blocks_is_interrupted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tests.async_tests.ALARM_DELAY", 0.0)

    result = run(
        pytester,
        f"""
        @pytest.mark.bound(0.2)
        {kind} test_it(): time.sleep(20)
        """,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*blocked past its bound of 0.2 s*", "*time.sleep(20)*"])


def test_each_example_of_a_property_gets_a_loop(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from hypothesis import given, settings, strategies as st
        loops = set()
        @settings(max_examples=5, database=None)
        @given(st.integers())
        async def test_it(n):
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
        def test_there_were_several(): assert len(loops) > 1
        @settings(max_examples=5, database=None)
        @given(st.integers())
        async def test_fails(n): assert n != 0
        """,
    )

    result.assert_outcomes(passed=2, failed=1)


@pytest.mark.usefixtures("uvloop_factory")
def test_a_test_can_ask_for_both_loops(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        seen = []
        async def test_it(loop_factory):
            seen.append(type(asyncio.get_running_loop()).__module__.split(".")[0])
        def test_both(): assert seen == ["asyncio", "uvloop"]
        """,
    )

    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    "test",
    [
        "def test_it(): pytest.skip('no tool')",
        "pytest.importorskip('a_module_that_nobody_has')",
    ],
)
@pytest.mark.parametrize("ci", [False, True])
def test_a_skip_fails_the_run_in_ci_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str, ci: bool
) -> None:
    monkeypatch.setenv("CI", "true" if ci else "")

    result = run(pytester, test + "\ndef test_other(): pass")

    result.assert_outcomes(skipped=1, passed=int("def" in test))
    assert (result.ret == pytest.ExitCode.TESTS_FAILED) is ci


@pytest.mark.alarms("dup_reply", "dispatch_failed", "delivery")  # runs in this process
@pytest.mark.parametrize("meant", [False, True])
@pytest.mark.parametrize(
    ("event", "told"),
    [
        ('"dup_reply", id="1"', "alarms: dup_reply"),
        ('"dispatch_failed", error="KeyError"', "alarms: dispatch_failed"),
        ('"delivery", decision="fail", level=40', "alarms: delivery"),
        ('"delivery", decision="emit"', None),
        ('"handler_crash", error="ValueError"', None),
    ],
)
def test_a_test_in_which_we_are_told_of_our_own_mistake_fails(
    pytester: pytest.Pytester, event: str, told: str | None, meant: bool
) -> None:
    names = "'dup_reply', 'dispatch_failed', 'delivery'" if meant else "'handler_crash'"

    result = run(
        pytester,
        f"""
        from antiphon.runtime._telemetry import Telemetry

        @pytest.mark.alarms({names})
        def test_it(): Telemetry(None).emit({event})
        """,
    )

    if told is None or meant:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines([f"*{told}*"])


@pytest.mark.parametrize("number", DEFAULTS, ids=lambda number: number.name)
def test_a_signal_that_a_background_run_ignores_is_not_ignored(
    pytester: pytest.Pytester, number: signal.Signals
) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        result = run(
            pytester,
            f"""
            def test_it():
                wait = "import signal; print(flush=True); signal.pause()"
                with subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE) as child:
                    child.stdout.readline()
                    child.send_signal({int(number)})
                    assert child.wait(10) != 0
            """,
        )
    finally:
        signal.signal(number, before)

    result.assert_outcomes(passed=1)


def test_what_was_there_before_the_first_test_costs_no_collector_anything() -> None:
    assert gc.get_freeze_count() > 10_000
