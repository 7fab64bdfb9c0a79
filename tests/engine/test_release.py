"""What an operation holds is let go exactly once, and never early: MXNet's tests of pushed functions with deleters.

There a deleter frees what a pushed function needs; here the function object and what it captures are destroyed. Each
test says when: after the run, the failure or the skip, at shutdown, and when the push itself refuses.
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
    """What a function captures; its log gets a word when it runs and a word when it is destroyed."""

    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails
        weakref.finalize(self, log.append, "released").atexit = False

    def open(self):
        """The work."""
        self.log.append("run")
        if self.fails:
            raise Boom("boom")


def function(parcel):
    """A function that holds a parcel, and nothing else does; its own end is logged, too."""
    log = parcel.log

    def run():
        parcel.open()

    weakref.finalize(run, log.append, "function released").atexit = False
    return run


def starter(parcel):
    """The same for push_async: it is done when it returns."""
    log = parcel.log

    def start(on_complete):
        parcel.open()
        on_complete()

    weakref.finalize(start, log.append, "function released").atexit = False
    return start


def keeper(parcel, kept):
    """The same, and it is done when somebody calls what it puts into ``kept``."""

    def start(on_complete):
        parcel.open()
        kept.append(on_complete)

    return start


def until(condition):
    """A worker lets go of an operation after it has told whoever waits: a minute at most.

    Without the GIL, references that a thread gives back to objects of another, sleeping one are counted when that one
    wakes up, or by a collection.
    """
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
        if FREE_THREADED:
            gc.collect()


def settled(log):
    """The log, once it has both ends, which come in either order."""
    until(lambda: {"released", "function released"} <= set(log))
    return log


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind."""
    made = DRIVERS[request.param]()
    yield made
    made.stop()


@pytest.fixture
def counted(monkeypatch):
    """Nothing is left to the garbage collector: what ends here ends because nobody holds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("counted")
class TestAfterTheRun:
    """Without failures no cycle may hold anything: reference counts alone let go."""

    @together()
    @pytest.mark.parametrize("prop", PROPS)
    @pytest.mark.parametrize("push", ["sync", "async"])
    @pytest.mark.parametrize(("reads", "writes"), [(0, 0), (1, 0), (0, 1), (3, 2), (19, 1)])
    def test_pushed(self, eng, push, reads, writes, prop):
        """Run, then released, once; with no vars, with reads, with writes, with both, with duplicate reads."""
        log = []
        const_vars = [eng.new_variable() for _ in range(reads)]
        mutable_vars = [eng.new_variable() for _ in range(writes)]
        call, make = (eng.push, function) if push == "sync" else (eng.push_async, starter)
        call(make(Parcel(log)), const_vars + const_vars[:1], mutable_vars, cpu(0), prop=prop)
        eng.wait_for_all()
        assert sorted(settled(log)) == ["function released", "released", "run"]
        assert log[0] == "run"

    def test_not_before_its_turn(self):
        """Held back by a write, a function is neither run nor let go."""
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        gate, var, log = threading.Event(), eng.new_variable(), []
        eng.push(gate.wait, (), [var])
        eng.push(function(Parcel(log)), [var])
        eng.push(function(Parcel(log)), (), [var])
        gc.collect()
        assert log == []
        gate.set()
        eng.wait_for_all()
        until(lambda: len(log) == 6)
        assert log[0] == "run"
        assert sorted(log) == ["function released"] * 2 + ["released"] * 2 + ["run"] * 2
        eng.stop()

    def test_asynchronous_work_that_ends_later(self, eng):
        """The function lives at least until it has said that it is done, and goes when nobody can say so any more."""
        if eng.kind in ("Simulator", "NaiveEngine"):
            pytest.skip("a wait is what runs the operation, so nothing can be looked at before its end")
        log, kept = [], []
        eng.push_async(keeper(Parcel(log), kept), (), [eng.new_variable()])
        until(lambda: kept)
        assert log == ["run"]
        kept.pop()()
        eng.wait_for_all()
        until(lambda: "released" in log)
        assert log == ["run", "released"]

    def test_a_stored_operator(self, eng):
        """It keeps its function through twenty runs, its deletion lets them finish, and then the function goes."""
        log = []
        operator = eng.new_operator(function(Parcel(log)), (), [eng.new_variable()], name="stored")
        for _ in range(10):
            eng.push(operator)
        eng.wait_for_all()
        assert log == ["run"] * 10
        for _ in range(10):
            eng.push(operator)
        eng.delete_operator(operator)
        del operator
        eng.wait_for_all()
        assert settled(log)[:20] == ["run"] * 20
        assert sorted(log[20:]) == ["function released", "released"]

    def test_the_function_of_a_delete(self, eng):
        """delete_variable's function runs after every use, once, and is let go like any other."""
        log, var = [], eng.new_variable()
        for _ in range(5):
            eng.push(lambda: log.append("use"), [var])
        eng.delete_variable(var, function(Parcel(log)))
        eng.wait_for_all()
        assert settled(log)[:6] == ["use"] * 5 + ["run"]
        assert sorted(log[6:]) == ["function released", "released"]

    def test_pushed_from_inside(self, eng):
        """An operation that pushes another: both go."""
        inner, outer, var = [], [], eng.new_variable()

        def both(parcel):
            run = function(parcel)

            def push_and_run():
                eng.push(function(Parcel(inner)), (), [var])
                run()

            return push_and_run

        eng.push(both(Parcel(outer)), (), [var])
        eng.wait_for_all()
        for log in (inner, outer):
            assert sorted(settled(log)) == ["function released", "released", "run"]
            assert log[0] == "run"


@pytest.mark.parametrize("size", [1, 10, 100])
def test_members_of_a_bulk(eng, size):
    """25 functions in bulks of ten, of one, and in one that the wait flushes: each is let go once, after its run."""
    logs, var = [[] for _ in range(25)], eng.new_variable()
    with eng.bulk(size):
        for log in logs:
            eng.push(function(Parcel(log)), (), [var])
        eng.wait_for_all()
    until(lambda: gc.collect() is None or all(len(log) == 3 for log in logs))  # a bulk and its operation are a cycle
    for log in logs:
        assert sorted(log) == ["function released", "released", "run"]
        assert log[0] == "run"


class TestWithFailures:
    """A failure keeps what its traceback shows until it is healed or dropped; nothing keeps it longer."""

    def raised(self, eng, call):
        """Call, then wait for all; swallow what is raised, with every frame of it."""
        with pytest.raises(Boom):  # noqa: PT012 - the naive engine raises at the push, the others at the wait
            call()
            eng.wait_for_all()

    @pytest.mark.parametrize("writes", [0, 1])
    @pytest.mark.parametrize("push", ["sync", "async"])
    def test_after_a_failure(self, eng, push, writes):
        """A later write heals the var, if there is one; then nobody holds the failed function."""
        log, writes = [], [eng.new_variable() for _ in range(writes)]
        call, make = (eng.push, function) if push == "sync" else (eng.push_async, starter)
        self.raised(eng, lambda: call(make(Parcel(log, fails=True)), (), writes))
        eng.push(lambda: None, (), writes)
        eng.wait_for_all()
        until(lambda: gc.collect() is None or len(log) == 3)
        assert log[0] == "run"
        assert sorted(log) == ["function released", "released", "run"]

    def test_what_a_failure_skips(self, eng):
        """A dependant never runs, and is let go at once: the failure is another operation's."""
        if eng.kind == "NaiveEngine":
            pytest.skip("its push raises: the next test")
        log, source, target = [], eng.new_variable(), eng.new_variable()

        def boom():
            raise Boom("boom")

        eng.push(boom, (), [source])
        eng.push(function(Parcel(log)), [source], [target])
        eng.push_async(starter(Parcel(log)), [source], [target])
        self.raised(eng, lambda: None)
        until(lambda: len(log) == 4)
        assert sorted(log) == ["function released"] * 2 + ["released"] * 2

    def test_what_a_failure_skips_at_the_push(self):
        """On the naive engine the push raises, and its frames hold the function no longer than the error lives."""
        naive, log = engine.create("NaiveEngine"), []
        var = naive.new_variable()

        def boom():
            raise Boom("boom")

        self.raised(naive, lambda: naive.push(boom, (), [var]))
        self.raised(naive, lambda: naive.push(function(Parcel(log)), [var]))
        naive.push(lambda: None, (), [var])
        gc.collect()
        assert sorted(log) == ["function released", "released"]

    def test_a_bulk_with_a_bad_member(self, eng):
        """The bad one, the one that it blocks and the unrelated one: all three go."""
        bad, blocked, fine = [], [], []
        a, b, c = (eng.new_variable() for _ in range(3))

        def three():
            with eng.bulk(10):
                eng.push(function(Parcel(bad, fails=True)), (), [a])
                eng.push(function(Parcel(blocked)), [a], [b])
                eng.push(function(Parcel(fine)), (), [c])

        if eng.kind == "NaiveEngine":
            pytest.skip("it knows no bulks: the push raises")
        self.raised(eng, three)
        for var in (a, b, c):
            eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        until(lambda: gc.collect() is None or (len(bad), len(blocked), len(fine)) == (3, 2, 3))
        assert (bad[0], fine[0]) == ("run", "run")
        assert "run" not in blocked

    def test_a_deleted_var_lets_its_failure_go(self, eng):
        """The var of a failed operation is deleted, failed or not: its function and the failed one both go."""
        failed, deleter = [], []

        def both(var):
            try:
                eng.push(function(Parcel(failed, fails=True)), (), [var])
            finally:
                eng.delete_variable(var, function(Parcel(deleter)))

        self.raised(eng, lambda: both(eng.new_variable()))
        until(lambda: gc.collect() is None or (len(failed), len(deleter)) == (3, 3))
        assert sorted(failed) == sorted(deleter) == ["function released", "released", "run"]


@pytest.mark.usefixtures("counted")
class TestWithoutARun:
    """Functions that never get their turn."""

    def test_a_push_that_is_refused(self, eng):
        """A var twice, a var of another engine, no context, a deleted operator: the function goes with the error."""
        log, var, other = [], eng.new_variable(), engine.create("NaiveEngine").new_variable()

        def push_a_deleted_operator():
            gone = eng.new_operator(function(Parcel(log)), (), [var])
            eng.delete_operator(gone)
            eng.push(gone)

        for call in (
            lambda: eng.push(function(Parcel(log)), (), [var, var]),
            lambda: eng.push(function(Parcel(log)), [var], [var]),
            lambda: eng.push(function(Parcel(log)), [other]),
            lambda: eng.push(function(Parcel(log)), (), [var], "cpu"),
            lambda: eng.push_async(starter(Parcel(log)), [var], [var]),
            lambda: eng.new_operator(function(Parcel(log)), [var], [var]),
            lambda: eng.delete_variable(other, function(Parcel(log))),
            push_a_deleted_operator,
        ):
            with pytest.raises((DuplicateVarError, EngineError)):
                call()
        gc.collect()
        assert sorted(log) == ["function released"] * 8 + ["released"] * 8
        eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        assert var.version == 1

    def test_shutdown(self, eng):
        """After notify_shutdown functions are dropped without a run and let go; deletes still run."""
        log, deleter, var = [], [], eng.new_variable()
        eng.notify_shutdown()
        for _ in range(10):
            eng.push(function(Parcel(log)), (), [var])
            eng.push_async(starter(Parcel(log)), [var])
        eng.delete_variable(var, function(Parcel(deleter)))
        eng.wait_for_all()
        until(lambda: len(log) == 40)
        assert sorted(log) == ["function released"] * 20 + ["released"] * 20
        assert sorted(settled(deleter)) == ["function released", "released", "run"]
        assert deleter[0] == "run"

    def test_shutdown_while_busy(self):
        """The running operation ends, what stands behind it is dropped and let go."""
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        started, gate, var, running, waiting = threading.Event(), threading.Event(), eng.new_variable(), [], []

        def held(run):
            return lambda: (started.set(), gate.wait(), run())

        eng.push(held(function(Parcel(running))), (), [var])
        assert started.wait(60)
        for _ in range(50):
            eng.push(function(Parcel(waiting)), (), [var])
        eng.notify_shutdown()
        assert (running, waiting) == ([], [])
        gate.set()
        eng.wait_for_all()
        until(lambda: len(waiting) == 100)
        assert sorted(settled(running)) == ["function released", "released", "run"]
        assert running[0] == "run"
        assert "run" not in waiting
        eng.stop()

    def test_a_simulator_that_is_dropped(self):
        """Nobody will ever run its operations: they go with it."""
        sim, log = engine.create("Simulator"), []
        for _ in range(10):
            sim.push(function(Parcel(log)), (), [sim.new_variable()])
        del sim
        gc.collect()
        assert sorted(log) == ["function released"] * 10 + ["released"] * 10

    def test_an_engine_that_is_dropped_while_busy(self):
        """What it still has to do is done, then let go."""
        eng, log = engine.create("ThreadedEnginePerDevice", cpu_workers=2), []
        gate = threading.Event()
        eng.push(gate.wait)
        for _ in range(20):
            eng.push(function(Parcel(log)))
        del eng
        gate.set()
        until(lambda: len(log) == 60)
        assert sorted(log) == ["function released"] * 20 + ["released"] * 20 + ["run"] * 20
