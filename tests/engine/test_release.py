"""Release of operations: the engine releases every object of an operation exactly once, and not before its end.

Modelled on MXNet's tests of functions with deleters. There a deleter frees the function's resources. In this file the
function object and the objects that it captures are destroyed. Each test states when: after the run, after a failure or
a skip, at shutdown, or when the engine refuses the push.
"""

import gc
import sys
import threading
import time
import weakref

import pytest

from tests.contract.engines import DRIVERS, Boom
from tests.support.together import together
from weftplan import engine
from weftplan.device.context import cpu
from weftplan.engine import FnProperty
from weftplan.errors import DuplicateVarError, EngineError

FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
PROPS = (FnProperty.NORMAL, FnProperty.CPU_PRIORITIZED, FnProperty.ASYNC, FnProperty.NO_SKIP, FnProperty.COPY_TO_GPU)


class Parcel:
    """An object captured by an operation's function; its log records its run and its destruction."""

    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails
        weakref.finalize(self, log.append, "released").atexit = False

    def open(self):
        """Log the run; raise Boom if ``fails``."""
        self.log.append("run")
        if self.fails:
            raise Boom("boom")


def make_function(parcel):
    """Return a function that owns ``parcel`` alone; the log also records the destruction of the function."""
    log = parcel.log

    def run():
        parcel.open()

    weakref.finalize(run, log.append, "function released").atexit = False
    return run


def make_async_function(parcel):
    """Return a function for push_async that completes the operation before it returns."""
    log = parcel.log

    def start(on_complete):
        parcel.open()
        on_complete()

    weakref.finalize(start, log.append, "function released").atexit = False
    return start


def make_pending_function(parcel, kept):
    """Return a function for push_async that appends its completion callback to ``kept`` and does not call it."""

    def start(on_complete):
        parcel.open()
        kept.append(on_complete)

    return start


def until(condition):
    """Wait up to 60 seconds until ``condition()`` is true.

    The wait is necessary because a worker releases an operation after it has notified the waiting thread. Without the
    GIL, references that are returned to objects of a sleeping thread are counted when that thread wakes up, or by a
    garbage collection.
    """
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
        if FREE_THREADED:
            gc.collect()


def wait_until_released(log):
    """Return the log after both the parcel and its function have been released, in either order."""
    until(lambda: {"released", "function released"} <= set(log))
    return log


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind, stopped after the test."""
    eng = DRIVERS[request.param]()
    yield eng
    eng.stop()


@pytest.fixture
def without_collector(monkeypatch):
    """Disable Python's cycle collector, so that only reference counts can release objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
class TestAfterTheRun:
    """After a run without failures, no reference cycle may keep the operation's objects alive."""

    @together()
    @pytest.mark.parametrize("prop", PROPS)
    @pytest.mark.parametrize("push", ["sync", "async"])
    @pytest.mark.parametrize(("reads", "writes"), [(0, 0), (1, 0), (0, 1), (3, 2), (19, 1)])
    def test_pushed_function_is_released_after_its_run(self, eng, push, reads, writes, prop):
        """The function runs once and is then released: without vars, with reads, writes, both, and a duplicate read."""
        log = []
        const_vars = [eng.new_variable() for _ in range(reads)]
        mutable_vars = [eng.new_variable() for _ in range(writes)]
        call, make = (eng.push, make_function) if push == "sync" else (eng.push_async, make_async_function)
        call(make(Parcel(log)), const_vars + const_vars[:1], mutable_vars, cpu(0), prop=prop)
        eng.wait_for_all()
        assert sorted(wait_until_released(log)) == ["function released", "released", "run"]
        assert log[0] == "run"

    def test_blocked_function_is_not_released(self):
        """While a write blocks functions, they are neither run nor released; after the write both happen."""
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        gate, var, log = threading.Event(), eng.new_variable(), []
        eng.push(gate.wait, (), [var])
        eng.push(make_function(Parcel(log)), [var])
        eng.push(make_function(Parcel(log)), (), [var])
        gc.collect()
        assert log == []
        gate.set()
        eng.wait_for_all()
        until(lambda: len(log) == 6)
        assert log[0] == "run"
        assert sorted(log) == ["function released"] * 2 + ["released"] * 2 + ["run"] * 2
        eng.stop()

    def test_asynchronous_function_lives_until_completion(self, eng):
        """An asynchronous function is released only after its completion, when its callback is unreachable."""
        if eng.kind in ("Simulator", "NaiveEngine"):
            pytest.skip("a wait is what runs the operation, so nothing can be looked at before its end")
        log, kept = [], []
        eng.push_async(make_pending_function(Parcel(log), kept), (), [eng.new_variable()])
        until(lambda: kept)
        assert log == ["run"]
        kept.pop()()
        eng.wait_for_all()
        until(lambda: "released" in log)
        assert log == ["run", "released"]

    def test_stored_operator_releases_after_deletion(self, eng):
        """A deleted operator completes its twenty pushed runs, and only then releases its function."""
        log = []
        operator = eng.new_operator(make_function(Parcel(log)), (), [eng.new_variable()], name="stored")
        for _ in range(10):
            eng.push(operator)
        eng.wait_for_all()
        assert log == ["run"] * 10
        for _ in range(10):
            eng.push(operator)
        eng.delete_operator(operator)
        del operator
        eng.wait_for_all()
        assert wait_until_released(log)[:20] == ["run"] * 20
        assert sorted(log[20:]) == ["function released", "released"]

    def test_delete_function_runs_and_is_released(self, eng):
        """The function given to delete_variable runs once, after every use of the var, and is then released."""
        log, var = [], eng.new_variable()
        for _ in range(5):
            eng.push(lambda: log.append("use"), [var])
        eng.delete_variable(var, make_function(Parcel(log)))
        eng.wait_for_all()
        assert wait_until_released(log)[:6] == ["use"] * 5 + ["run"]
        assert sorted(log[6:]) == ["function released", "released"]

    def test_nested_push_is_released(self, eng):
        """If an operation pushes a second operation, the functions of both are released after their runs."""
        inner, outer, var = [], [], eng.new_variable()

        def both(parcel):
            run = make_function(parcel)

            def push_and_run():
                eng.push(make_function(Parcel(inner)), (), [var])
                run()

            return push_and_run

        eng.push(both(Parcel(outer)), (), [var])
        eng.wait_for_all()
        for log in (inner, outer):
            assert sorted(wait_until_released(log)) == ["function released", "released", "run"]
            assert log[0] == "run"


@pytest.mark.parametrize("size", [1, 10, 100])
def test_bulk_members_are_released(eng, size):
    """Each of 25 functions in bulks of 1, 10 or 100 is released once, after its run."""
    logs, var = [[] for _ in range(25)], eng.new_variable()
    with eng.bulk(size):
        for log in logs:
            eng.push(make_function(Parcel(log)), (), [var])
        eng.wait_for_all()
    until(lambda: gc.collect() is None or all(len(log) == 3 for log in logs))  # a bulk and its operation are a cycle
    for log in logs:
        assert sorted(log) == ["function released", "released", "run"]
        assert log[0] == "run"


class TestWithFailures:
    """A failure keeps its traceback's objects alive until the failure is cleared; then they are released."""

    def raised(self, eng, call):
        """Run ``call()`` and wait for all operations; expect Boom and discard it with its traceback."""
        with pytest.raises(Boom):  # noqa: PT012 - the naive engine raises at the push, the others at the wait
            call()
            eng.wait_for_all()

    @pytest.mark.parametrize("writes", [0, 1])
    @pytest.mark.parametrize("push", ["sync", "async"])
    def test_failed_function_is_released_after_healing(self, eng, push, writes):
        """A failed function is released after a write clears its var's failure or, without vars, after the wait."""
        log, writes = [], [eng.new_variable() for _ in range(writes)]
        call, make = (eng.push, make_function) if push == "sync" else (eng.push_async, make_async_function)
        self.raised(eng, lambda: call(make(Parcel(log, fails=True)), (), writes))
        eng.push(lambda: None, (), writes)
        eng.wait_for_all()
        until(lambda: gc.collect() is None or len(log) == 3)
        assert log[0] == "run"
        assert sorted(log) == ["function released", "released", "run"]

    def test_skipped_function_is_released(self, eng):
        """A skipped operation never runs, and its function is released before the failure is cleared."""
        if eng.kind == "NaiveEngine":
            pytest.skip("its push raises: the next test")
        log, source, target = [], eng.new_variable(), eng.new_variable()

        def boom():
            raise Boom("boom")

        eng.push(boom, (), [source])
        eng.push(make_function(Parcel(log)), [source], [target])
        eng.push_async(make_async_function(Parcel(log)), [source], [target])
        self.raised(eng, lambda: None)
        until(lambda: len(log) == 4)
        assert sorted(log) == ["function released"] * 2 + ["released"] * 2

    def test_skipped_function_is_released_at_the_push(self):
        """On the naive engine a dependant's push raises; its function is released once the error is discarded."""
        naive, log = engine.create("NaiveEngine"), []
        var = naive.new_variable()

        def boom():
            raise Boom("boom")

        self.raised(naive, lambda: naive.push(boom, (), [var]))
        self.raised(naive, lambda: naive.push(make_function(Parcel(log)), [var]))
        naive.push(lambda: None, (), [var])
        gc.collect()
        assert sorted(log) == ["function released", "released"]

    def test_bulk_with_failed_member_is_released(self, eng):
        """The functions of the failing, the skipped and the unrelated member of a bulk are all released."""
        bad, blocked, fine = [], [], []
        a, b, c = (eng.new_variable() for _ in range(3))

        def three():
            with eng.bulk(10):
                eng.push(make_function(Parcel(bad, fails=True)), (), [a])
                eng.push(make_function(Parcel(blocked)), [a], [b])
                eng.push(make_function(Parcel(fine)), (), [c])

        if eng.kind == "NaiveEngine":
            pytest.skip("it knows no bulks: the push raises")
        self.raised(eng, three)
        for var in (a, b, c):
            eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        until(lambda: gc.collect() is None or (len(bad), len(blocked), len(fine)) == (3, 2, 3))
        assert (bad[0], fine[0]) == ("run", "run")
        assert "run" not in blocked

    def test_deleted_var_releases_its_failure(self, eng):
        """After a failed var is deleted, both the failed function and the delete function are released."""
        failed, deleter = [], []

        def both(var):
            try:
                eng.push(make_function(Parcel(failed, fails=True)), (), [var])
            finally:
                eng.delete_variable(var, make_function(Parcel(deleter)))

        self.raised(eng, lambda: both(eng.new_variable()))
        until(lambda: gc.collect() is None or (len(failed), len(deleter)) == (3, 3))
        assert sorted(failed) == sorted(deleter) == ["function released", "released", "run"]


@pytest.mark.usefixtures("without_collector")
class TestWithoutARun:
    """Refused pushes, shutdown and dropped engines: every function is released."""

    def test_refused_push_releases_its_function(self, eng):
        """A refused push raises DuplicateVarError or EngineError and releases its function.

        The causes are duplicate and foreign vars, a bad context and a deleted operator.
        """
        log, var, second = [], eng.new_variable(), engine.create("NaiveEngine").new_variable()

        def push_a_deleted_operator():
            gone = eng.new_operator(make_function(Parcel(log)), (), [var])
            eng.delete_operator(gone)
            eng.push(gone)

        for call in (
            lambda: eng.push(make_function(Parcel(log)), (), [var, var]),
            lambda: eng.push(make_function(Parcel(log)), [var], [var]),
            lambda: eng.push(make_function(Parcel(log)), [second]),
            lambda: eng.push(make_function(Parcel(log)), (), [var], "cpu"),
            lambda: eng.push_async(make_async_function(Parcel(log)), [var], [var]),
            lambda: eng.new_operator(make_function(Parcel(log)), [var], [var]),
            lambda: eng.delete_variable(second, make_function(Parcel(log))),
            push_a_deleted_operator,
        ):
            with pytest.raises((DuplicateVarError, EngineError)):
                call()
        gc.collect()
        assert sorted(log) == ["function released"] * 8 + ["released"] * 8
        eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        assert var.version == 1

    def test_shutdown_releases_unrun_functions(self, eng):
        """After notify_shutdown, pushed functions are released without a run; delete functions still run."""
        log, deleter, var = [], [], eng.new_variable()
        eng.notify_shutdown()
        for _ in range(10):
            eng.push(make_function(Parcel(log)), (), [var])
            eng.push_async(make_async_function(Parcel(log)), [var])
        eng.delete_variable(var, make_function(Parcel(deleter)))
        eng.wait_for_all()
        until(lambda: len(log) == 40)
        assert sorted(log) == ["function released"] * 20 + ["released"] * 20
        assert sorted(wait_until_released(deleter)) == ["function released", "released", "run"]
        assert deleter[0] == "run"

    def test_shutdown_releases_queued_functions(self):
        """At shutdown, the running operation completes; the operations queued after it are released without a run."""
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        started, gate, var, running, waiting = threading.Event(), threading.Event(), eng.new_variable(), [], []

        def held(run):
            return lambda: (started.set(), gate.wait(), run())

        eng.push(held(make_function(Parcel(running))), (), [var])
        assert started.wait(60)
        for _ in range(50):
            eng.push(make_function(Parcel(waiting)), (), [var])
        eng.notify_shutdown()
        assert (running, waiting) == ([], [])
        gate.set()
        eng.wait_for_all()
        until(lambda: len(waiting) == 100)
        assert sorted(wait_until_released(running)) == ["function released", "released", "run"]
        assert running[0] == "run"
        assert "run" not in waiting
        eng.stop()

    def test_dropped_simulator_releases_its_operations(self):
        """A simulator that is dropped releases its pending operations without running them."""
        sim, log = engine.create("Simulator"), []
        for _ in range(10):
            sim.push(make_function(Parcel(log)), (), [sim.new_variable()])
        del sim
        gc.collect()
        assert sorted(log) == ["function released"] * 10 + ["released"] * 10

    def test_dropped_busy_engine_finishes_and_releases(self):
        """A threaded engine that is dropped runs its pending operations and then releases them."""
        eng, log = engine.create("ThreadedEnginePerDevice", cpu_workers=2), []
        gate = threading.Event()
        eng.push(gate.wait)
        for _ in range(20):
            eng.push(make_function(Parcel(log)))
        del eng
        gate.set()
        until(lambda: len(log) == 60)
        assert sorted(log) == ["function released"] * 20 + ["released"] * 20 + ["run"] * 20
