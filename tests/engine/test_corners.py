"""Corner cases of the engine that once hung, lost work or gave a wrong result."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from tests.contract.engines import Boom, boom
from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import EngineError, WaitInWorkerError

KINDS = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator")


def nothing():
    """Do nothing."""


def test_the_caller_may_reuse_its_lists(eng):
    """If the caller changes its list of written vars after a push, the operation still writes the original var."""
    a, b, gate = eng.new_variable(), eng.new_variable(), threading.Event()
    eng.push(gate.wait, (), [a])
    writes = [a]
    eng.push(nothing, (), writes)
    writes[0] = b
    gate.set()
    eng.wait_for_all()
    assert (a.version, b.version) == (2, 0)


@pytest.mark.parametrize("options", [{"ctx": "cpu"}, {"priority": "high"}, {"prop": 99}])
def test_bad_arguments_leave_nothing_half_done(eng, options):
    """A push with a bad context, priority or property raises EngineError or ValueError before it changes any var."""
    var = eng.new_variable()
    with pytest.raises((EngineError, ValueError)):
        eng.push(nothing, (), [var], **options)
    eng.push(nothing, (), [var])
    eng.wait_for_var(var)
    assert eng.statistics().pushed == 1


def test_non_vars_are_explained(eng):
    """A var in place of a list, and an object that is not a var, raise EngineError."""
    var = eng.new_variable()
    for reads, writes in ((["x"], ()), ((), ["x"]), (var, ()), ((), var)):
        with pytest.raises(EngineError):
            eng.push(nothing, reads, writes)
    with pytest.raises(EngineError, match="got str"):
        eng.wait_for_var("x")


def test_versions_agree_on_every_engine_in_a_bulk():
    """Five writes in a bulk increase the version by five on every engine."""
    for kind in KINDS:
        eng = engine.create(kind)
        var = eng.new_variable()
        with eng.bulk(10):
            for _ in range(5):
                eng.push(nothing, (), [var])
        eng.wait_for_all()
        assert var.version == 5
        eng.stop()


def test_a_traceback_does_not_grow(eng):
    """If fifty waits raise the same failure, its traceback is as long after the last wait as after the first."""
    var, depths = eng.new_variable(), []
    eng.push(boom, (), [var])
    for _ in range(50):
        with pytest.raises(Boom) as caught:
            eng.wait_for_var(var)
        depths.append(len(caught.traceback))
    assert depths[-1] == depths[0]


def test_errors_of_asynchronous_operations(eng):
    """A wait raises an error that follows completion, and EngineError after ``done("oops")``; later operations run."""
    var = eng.new_variable()

    def late(done):
        done()
        raise Boom("late")

    eng.push_async(late, (), [var])
    with pytest.raises(Boom, match="late"):
        eng.wait_for_all()
    assert eng.statistics().failed == 1
    assert (eng.statistics().skipped, var.version) == (0, 1)
    eng.push_async(lambda done: done("oops"), (), [var])
    with pytest.raises(EngineError, match="expects an exception or nothing, got 'oops'"):
        eng.wait_for_var(var)
    eng.push(nothing, (), [var])
    eng.wait_for_var(var)


def test_exceptions_with_broken_methods(eng):
    """A wait raises an operation's SystemExit, or its error whose ``__str__`` and ``add_note`` raise."""

    class Odd(Exception):
        def __str__(self):
            raise ValueError("no text")

        def add_note(self, note):
            raise ValueError("no notes")

    def odd():
        raise Odd

    def leave():
        raise SystemExit(3)

    for fn, kind in ((odd, Odd), (leave, SystemExit)):
        var, second = eng.new_variable(), eng.new_variable()
        eng.push(boom, (), [second])
        eng.push(fn, (), [var])
        with pytest.raises(Boom):
            eng.wait_for_all()
        with pytest.raises(kind):
            eng.wait_for_var(var)


def test_destructor_of_a_function_may_push(eng):
    """An operation that the destructor of an operation's function pushes runs."""
    var, log = eng.new_variable(), []

    class Last:
        def __call__(self):
            log.append("run")

        def __del__(self):
            eng.push(lambda: log.append("destroyed"), (), [var])

    eng.push(Last(), (), [var])
    end = time.monotonic() + 60
    while len(log) < 2 and time.monotonic() < end:
        eng.wait_for_all()
        time.sleep(0.001)
    assert log == ["run", "destroyed"]


def test_endless_wait_on_naive_engine_raises():
    """On the naive engine, an operation that waits for the var it writes gets WaitInWorkerError with the fix."""
    naive = engine.create("NaiveEngine")
    var = naive.new_variable()

    def waits():
        naive.push(nothing, (), [var])
        naive.wait_for_var(var)

    with pytest.raises(WaitInWorkerError, match="const_vars"):
        naive.push(waits, (), [var])
    with suppress(WaitInWorkerError):
        naive.wait_for_all()


def test_nested_push_failures_on_naive_engine():
    """On the naive engine, nested operations that wait for their pusher run after it.

    If they fail, the outer push raises the first failure and a wait the second.
    """
    naive = engine.create("NaiveEngine")
    a, b, c, log = *(naive.new_variable() for _ in range(3)), []

    def outer():
        for number, var in enumerate((a, b)):
            naive.push(lambda number=number: log.append(number) or {}[number], (), [var], name=f"inner {number}")
        with pytest.raises(KeyError, match="9"):
            naive.push(lambda: {}[9], (), [c])  # it waits for nothing, so it runs and raises here
        log.append("outer")

    with pytest.raises(KeyError, match="0"):
        naive.push(outer, (), [a, b])
    assert log == ["outer", 0, 1]
    with pytest.raises(KeyError, match="1"):
        naive.wait_for_all()
    naive.wait_for_all()
    assert (a.version, b.version, c.version) == (2, 2, 1)
    assert naive.statistics().failed == 3


def test_operation_may_wait_on_another_engine(eng):
    """An operation that waits for a var of another engine completes without an error."""
    other_engine = engine.create("ThreadedEnginePerDevice")
    a, b = eng.new_variable(), other_engine.new_variable()
    other_engine.push(nothing, (), [b])
    eng.push(lambda: other_engine.wait_for_var(b), (), [a])
    eng.wait_for_var(a)
    other_engine.stop()


@pytest.mark.parametrize(
    "kinds", [("NaiveEngine", "NaiveEngine"), ("NaiveEngine", "Simulator"), ("Simulator", "NaiveEngine")]
)
def test_inline_operation_may_wait_on_another_engine(kinds):
    """An operation on a naive engine or simulator may wait for another such engine; both operations run."""
    eng, second = (engine.create(kind) for kind in kinds)
    a, b, log = eng.new_variable(), second.new_variable(), []

    def outer():
        second.push(lambda: log.append("inner"), (), [b])
        second.wait_for_var(b)
        second.wait_for_all()
        log.append("outer")

    eng.push(outer, (), [a])
    eng.wait_for_var(a)
    assert log == ["inner", "outer"]


def test_short_operations_run_at_the_push(eng):
    """Ready ASYNC operations and deletes run on the pushing thread."""
    where = []
    note = lambda: where.append(threading.current_thread())  # noqa: E731
    eng.push(note, prop=FnProperty.ASYNC)
    eng.delete_variable(eng.new_variable(), note)
    assert where == [threading.current_thread()] * 2
    eng.wait_for_all()


def test_the_simulator_waits_for_other_threads():
    """The simulator waits until another thread completes an asynchronous operation; then its dependants run."""
    sim = engine.create("Simulator")
    var, log = sim.new_variable(), []
    sim.push_async(lambda done: threading.Timer(0.05, done).start(), (), [var])
    sim.push(lambda: log.append(1), [var])
    sim.wait_for_all()
    assert log == [1]


def test_bulk_survives_its_thread(eng):
    """Members that a thread collected for a bulk run after the thread has ended."""
    log = []

    def work():
        eng.set_bulk_size(10)
        eng.push(lambda: log.append(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    eng.wait_for_all()
    assert log == [1]


def test_bulk_member_failure_without_writes_is_raised(eng):
    """A wait for all raises the failure of a bulk member that writes no var."""
    with eng.bulk(5):
        eng.push(boom)
        eng.push(nothing, (), [eng.new_variable()])
    with pytest.raises(Boom):
        eng.wait_for_all()


@pytest.mark.shows("WEFTPLAN_ERRORS")
def test_one_raise_heals_all_arrays(monkeypatch):
    """With WEFTPLAN_ERRORS=mxnet, one raise clears the failure of every array, as in MXNet 1.9.1."""
    monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
    eng = engine.create("ThreadedEnginePerDevice")
    a, b = eng.new_variable(), eng.new_variable()
    eng.push(boom, (), [a])
    eng.push(nothing, [a], [b])
    with pytest.raises(Boom):
        eng.wait_for_var(b)
    eng.wait_for_var(a)
    eng.wait_for_var(b)
    eng.wait_for_all()
    eng.stop()


def test_await_and_futures(eng):
    """``await var`` returns the var or raises its failure; after a future is cancelled, wait_for_all raises nothing."""

    async def main():
        a, b, gate = eng.new_variable(), eng.new_variable(), threading.Event()
        eng.push(gate.wait, (), [a])
        asyncio.get_running_loop().call_later(0.02, gate.set)
        assert await a is a
        eng.push(boom, (), [b])
        with pytest.raises(Boom):
            await b

    asyncio.run(main())
    var, gate = eng.new_variable(), threading.Event()
    eng.push(gate.wait, (), [var])
    future = eng.future(var)
    assert future.cancel()
    gate.set()
    eng.wait_for_all()


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_raising_tracer_is_removed(eng, monkeypatch, error):
    """A tracer that raises is removed, its error is reported once, and every operation completes."""
    told = []

    def tracer(*record):
        raise error

    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr(eng, "_waiters_help", "0")  # on the main thread the wait would raise SystemExit
    eng.tracer = tracer
    for _ in range(3):
        eng.push(nothing)
    eng.wait_for_all()
    assert eng.tracer is None
    assert [t.exc_type for t in told] == [error]
