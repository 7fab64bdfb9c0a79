"""Corners of the engine that once hung, lost something or gave a wrong answer."""

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
    """Succeed."""


def test_the_caller_may_reuse_its_lists(eng):
    """A list changed after the push changes nothing."""
    a, b, gate = eng.new_variable(), eng.new_variable(), threading.Event()
    eng.push(gate.wait, (), [a])
    writes = [a]
    eng.push(nothing, (), writes)
    writes[0] = b
    gate.set()
    eng.wait_for_all()
    assert (a.version, b.version) == (2, 0)


@pytest.mark.parametrize("options", [{"ctx": "cpu"}, {"priority": "high"}, {"prop": 99}])
def test_bad_places_leave_nothing_half_done(eng, options):
    """A bad context, priority or property is refused before any var is touched."""
    var = eng.new_variable()
    with pytest.raises((EngineError, ValueError)):
        eng.push(nothing, (), [var], **options)
    eng.push(nothing, (), [var])
    eng.wait_for_var(var)
    assert eng.statistics().pushed == 1


def test_what_is_no_var(eng):
    """A var instead of a list, and things that are no vars, are explained."""
    var = eng.new_variable()
    for reads, writes in ((["x"], ()), ((), ["x"]), (var, ()), ((), var)):
        with pytest.raises(EngineError):
            eng.push(nothing, reads, writes)
    with pytest.raises(EngineError, match="got str"):
        eng.wait_for_var("x")


def test_versions_agree_on_every_engine_in_a_bulk():
    """Five writes are five versions, bulk or not."""
    for kind in KINDS:
        made = engine.create(kind)
        var = made.new_variable()
        with made.bulk(10):
            for _ in range(5):
                made.push(nothing, (), [var])
        made.wait_for_all()
        assert var.version == 5
        made.stop()


def test_a_traceback_does_not_grow(eng):
    """Raising the same failure fifty times leaves its traceback as short as after the second time."""
    var, depths = eng.new_variable(), []
    eng.push(boom, (), [var])
    for _ in range(50):
        with pytest.raises(Boom) as caught:
            eng.wait_for_var(var)
        depths.append(len(caught.traceback))
    assert depths[-1] == depths[0]


def test_errors_of_asynchronous_operations(eng):
    """It may raise after it said that it was done, or say something that is no exception: no worker dies."""
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


def test_odd_exceptions(eng):
    """One whose text and notes raise, and those that are no Exception."""

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
        var, other = eng.new_variable(), eng.new_variable()
        eng.push(boom, (), [other])
        eng.push(fn, (), [var])
        with pytest.raises(Boom):
            eng.wait_for_all()
        with pytest.raises(kind):
            eng.wait_for_var(var)


def test_destructors_push(eng):
    """The function that was run is destroyed outside the lock; its destructor may push."""
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


def test_a_wait_that_could_not_end_on_the_naive_engine():
    """Inside an operation, for its own var: an error that shows the fix, not a hang."""
    naive = engine.create("NaiveEngine")
    var = naive.new_variable()

    def waits():
        naive.push(nothing, (), [var])
        naive.wait_for_var(var)

    with pytest.raises(WaitInWorkerError, match="const_vars"):
        naive.push(waits, (), [var])
    with suppress(WaitInWorkerError):
        naive.wait_for_all()


def test_failures_of_pushes_inside_an_operation_on_the_naive_engine():
    """Operations that have to wait for the one that pushed them fail when it is over: its push raises the first, the
    other is left for a wait."""
    naive = engine.create("NaiveEngine")
    a, b, c, log = *(naive.new_variable() for _ in range(3)), []

    def outer():
        for number, var in enumerate((a, b)):
            naive.push(lambda number=number: log.append(number) or {}[number], (), [var], name=f"inner {number}")
        with pytest.raises(KeyError, match="9"):
            naive.push(lambda: {}[9], (), [c])  # it waits for nothing, so it is run, and raises, here
        log.append("outer")

    with pytest.raises(KeyError, match="0"):
        naive.push(outer, (), [a, b])
    assert log == ["outer", 0, 1]
    with pytest.raises(KeyError, match="1"):
        naive.wait_for_all()
    naive.wait_for_all()
    assert (a.version, b.version, c.version) == (2, 2, 1)
    assert naive.statistics().failed == 3


def test_an_operation_may_wait_on_another_engine(eng):
    """Only the own engine's workers may be what a wait needs."""
    other = engine.create("ThreadedEnginePerDevice")
    a, b = eng.new_variable(), other.new_variable()
    other.push(nothing, (), [b])
    eng.push(lambda: other.wait_for_var(b), (), [a])
    eng.wait_for_var(a)
    other.stop()


@pytest.mark.parametrize(
    "kinds", [("NaiveEngine", "NaiveEngine"), ("NaiveEngine", "Simulator"), ("Simulator", "NaiveEngine")]
)
def test_an_operation_of_an_inline_engine_may_wait_on_another(kinds):
    """What is inside an operation of one engine is outside those of the other."""
    eng, other = (engine.create(kind) for kind in kinds)
    a, b, log = eng.new_variable(), other.new_variable(), []

    def outer():
        other.push(lambda: log.append("inner"), (), [b])
        other.wait_for_var(b)
        other.wait_for_all()
        log.append("outer")

    eng.push(outer, (), [a])
    eng.wait_for_var(a)
    assert log == ["inner", "outer"]


def test_short_operations_run_at_the_push(eng):
    """ASYNC operations and deletes that are ready run on the pushing thread."""
    where = []
    note = lambda: where.append(threading.current_thread())  # noqa: E731
    eng.push(note, prop=FnProperty.ASYNC)
    eng.delete_variable(eng.new_variable(), note)
    assert where == [threading.current_thread()] * 2
    eng.wait_for_all()


def test_the_simulator_waits_for_other_threads():
    """An asynchronous operation that another thread ends; what depends on it runs."""
    sim = engine.create("Simulator")
    var, log = sim.new_variable(), []
    sim.push_async(lambda done: threading.Timer(0.05, done).start(), (), [var])
    sim.push(lambda: log.append(1), [var])
    sim.wait_for_all()
    assert log == [1]


def test_a_bulk_is_not_lost_with_its_thread(eng):
    """A thread that ends with members collected: they run."""
    log = []

    def work():
        eng.set_bulk_size(10)
        eng.push(lambda: log.append(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    eng.wait_for_all()
    assert log == [1]


def test_a_failing_bulk_member_without_writes_is_raised(eng):
    """It is stored on no var, and still not lost."""
    with eng.bulk(5):
        eng.push(boom)
        eng.push(nothing, (), [eng.new_variable()])
    with pytest.raises(Boom):
        eng.wait_for_all()


@pytest.mark.shows("WEFTPLAN_ERRORS")
def test_raise_once(monkeypatch):
    """WEFTPLAN_ERRORS=mxnet: one raise heals every array that holds the failure, as MXNet 1.9.1 does."""
    monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
    made = engine.create("ThreadedEnginePerDevice")
    a, b = made.new_variable(), made.new_variable()
    made.push(boom, (), [a])
    made.push(nothing, [a], [b])
    with pytest.raises(Boom):
        made.wait_for_var(b)
    made.wait_for_var(a)
    made.wait_for_var(b)
    made.wait_for_all()
    made.stop()


def test_await_and_futures(eng):
    """``await var`` suspends the task; a cancelled future harms nobody."""

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
def test_a_tracer_that_raises_is_taken_away(eng, monkeypatch, error):
    """It is told of once, and the engine goes on; no worker ends with an operation that it has not completed."""
    told = []

    def tracer(*record):
        raise error

    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr(eng, "_waiters_help", "0")  # on the main thread SystemExit would be raised by the wait
    eng.tracer = tracer
    for _ in range(3):
        eng.push(nothing)
    eng.wait_for_all()
    assert eng.tracer is None
    assert [t.exc_type for t in told] == [error]
