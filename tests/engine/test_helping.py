"""Waiting threads that run operations in place of a worker: when, how many at a time, and the effect of Ctrl-C."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tests.contract.engines import together
from tests.stress.programs import HANDLER
from weftplan import engine
from weftplan.engine import FnProperty, OprBlock, threaded
from weftplan.engine.workers import WorkerQueue
from weftplan.errors import WaitInWorkerError
from weftplan.support import core_sharing

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


def run_short_operations(eng, var):
    """Run three operations, so that the engine has measured a short one; only then may waiting threads help."""
    for _ in range(3):
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)


def plain_queue(eng):
    """Return the queue of pushes without options; it exists after the first such push."""
    return eng._plain_queues[OprBlock]


def thread_of_next(eng, var, **options):
    """Push an operation, wait for it immediately, and return the identifier of the thread that ran it."""
    ran = []
    eng.push(lambda: ran.append(threading.get_ident()), (), [var], **options)
    eng.wait_for_var(var)
    return ran[0]


@pytest.fixture(autouse=True)
def all_functions(monkeypatch):
    """Let waiting threads run all operations: pushes in this file are user functions."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", "all")


@pytest.fixture(params=KINDS)
def eng(request):
    """A threaded engine with one worker."""
    eng = engine.create(request.param, cpu_workers=1)
    yield eng
    eng.stop()


def test_a_short_operation_runs_on_the_waiting_thread(eng):
    """If the caller waits immediately, its thread runs more than 20 of 200 short operations; a worker runs the rest."""
    var = eng.new_variable()
    run_short_operations(eng, var)
    me = threading.get_ident()
    assert sum(thread_of_next(eng, var) == me for _ in range(200)) > 20


def test_wait_for_all_runs_ready_operations(eng):
    """During wait_for_all, 1000 operations on one var each run once, in order, and the statistics count them."""
    var, ran = eng.new_variable(), []
    run_short_operations(eng, var)
    before = sum(q.completed for q in eng.statistics().queues)
    for i in range(1000):
        eng.push(lambda i=i: ran.append(i), (), [var])
    eng.wait_for_all()
    assert ran == list(range(1000))
    assert sum(q.completed for q in eng.statistics().queues) == before + 1000


def test_no_help_after_a_long_operation(eng):
    """After a long operation the worker runs the next one, because a waiting thread would delay Ctrl-C."""
    var = eng.new_variable()
    run_short_operations(eng, var)
    for _ in range(3):
        eng.push(lambda: time.sleep(0.02), (), [var])
        eng.wait_for_var(var)
    eng.push(lambda: time.sleep(0.02), (), [var])
    assert thread_of_next(eng, var) != threading.get_ident()


def test_no_help_before_the_first_measurement(eng, monkeypatch):
    """A waiting thread leaves the first operation of an engine to a worker, because it may be long."""
    var, ran = eng.new_variable(), []
    with monkeypatch.context() as late:
        late.setattr(WorkerQueue, "wake", lambda queue, engine: None)
        eng.push(lambda: ran.append(threading.get_ident()), (), [var])
        eng._before_wait(var)
        eng._before_wait()
        assert ran == []
    plain_queue(eng).wake(eng)
    eng.wait_for_var(var)
    assert ran[0] != threading.get_ident()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_earlier_operations_run_with_one_worker(workers, monkeypatch):
    """With one worker, a waiting thread runs earlier operations first; with several, it leaves them to the workers."""
    eng = engine.create("ThreadedEngine", cpu_workers=workers)
    first, second, ran = eng.new_variable(), eng.new_variable(), []
    run_short_operations(eng, first)
    while len(plain_queue(eng).idle) < len(plain_queue(eng).started):
        time.sleep(0.001)
    plain_queue(eng).quick = True
    with monkeypatch.context() as asleep:
        asleep.setattr(WorkerQueue, "wake", lambda queue, engine: None)
        eng.push(lambda: ran.append("first"), (), [first])
        eng.push(lambda: ran.append("second"), (), [second])
        eng._before_wait(second)
    assert ran == (["first", "second"] if workers == 1 else [])
    plain_queue(eng).wake(eng)
    eng.wait_for_all()
    assert sorted(ran) == ["first", "second"]
    eng.stop()


@pytest.mark.parametrize("what", ["var", "all"])
def test_wait_for_a_busy_worker_sleeps(eng, what):
    """A thread that waits for a running operation sleeps and does not poll: it uses less than 0.03 s of CPU time."""
    var, begun = eng.new_variable(), threading.Event()
    run_short_operations(eng, var)
    eng.push(lambda: (begun.set(), time.sleep(0.2)), (), [var])
    assert begun.wait(60)
    plain_queue(eng).quick = True  # as if the worker had measured a short operation
    eng.push(lambda: None)
    eng.push(lambda: None, (), [var])
    before = time.thread_time()
    eng.wait_for_var(var) if what == "var" else eng.wait_for_all()
    assert time.thread_time() - before < 0.03


@pytest.mark.shows("WEFTPLAN_ENGINE_WAITERS_HELP")
def test_no_help_when_switched_off(monkeypatch):
    """With WEFTPLAN_ENGINE_WAITERS_HELP=0, the waiting thread never runs an operation."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", "0")
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var = eng.new_variable()
    run_short_operations(eng, var)
    me = threading.get_ident()
    assert all(thread_of_next(eng, var) != me for _ in range(100))
    eng.stop()


def test_priorities_are_left_to_their_workers():
    """A waiting thread does not take operations from a priority queue, which orders them."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var = eng.new_variable()
    run_short_operations(eng, var)
    me = threading.get_ident()
    assert all(thread_of_next(eng, var, prop=FnProperty.CPU_PRIORITIZED) != me for _ in range(20))
    eng.stop()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_help_keeps_the_concurrency_limit(workers):
    """If six threads push and wait, the queue never runs more operations at a time than it has workers."""
    eng = engine.create("ThreadedEngine", cpu_workers=workers)
    guard, inside, most, count = threading.Lock(), [0], [0], [0]

    def work():
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0)  # lets another thread run
        with guard:
            inside[0] -= 1
            count[0] += 1

    def load():
        var = eng.new_variable()
        for i in range(150):
            eng.push(work, (), [var])
            eng.wait_for_var(var)
            if i % 10 == 0:
                eng.wait_for_all()

    together(load, 6)
    eng.wait_for_all()
    eng.stop()
    assert count[0] == 900
    assert most[0] <= workers


def test_operation_does_not_see_the_waiters_context(eng):
    """An operation that a waiting thread runs does not see that thread's NumPy errstate, as on a worker."""
    var, zero = eng.new_variable(), np.zeros(1)
    run_short_operations(eng, var)
    seen = []
    with np.errstate(divide="raise", invalid="raise"):
        for _ in range(50):
            eng.push(lambda: seen.append(np.geterr()["divide"]), [], [var])
            eng.wait_for_var(var)
        with pytest.raises(FloatingPointError):
            zero / zero
    assert "raise" not in seen


def test_nested_wait_is_refused_in_the_seat(eng):
    """If an operation waits for its own engine, a wait for its var raises WaitInWorkerError."""
    var, second = eng.new_variable(), eng.new_variable()
    run_short_operations(eng, var)
    eng.push(lambda: eng.wait_for_var(second), (), [var])
    with pytest.raises(WaitInWorkerError):
        eng.wait_for_var(var)


def test_operation_waits_for_another_engine(eng):
    """An operation that waits for another engine may run an operation of that engine on the same thread."""
    other_engine = engine.create("ThreadedEngine", cpu_workers=1)
    outer, inner, ran = eng.new_variable(), other_engine.new_variable(), []
    run_short_operations(eng, outer)
    run_short_operations(other_engine, inner)

    def work():
        other_engine.push(lambda: ran.append(threading.get_ident()), (), [inner])
        other_engine.wait_for_var(inner)

    for _ in range(200):
        eng.push(work, (), [outer])
        eng.wait_for_var(outer)
    assert len(ran) == 200
    assert ran.count(threading.get_ident()) > 20
    other_engine.stop()


def test_failures_in_the_seat_match_a_worker(eng):
    """On the waiting thread as on a worker, the wait raises the failure, dependants are skipped, a write clears it."""
    var, ran = eng.new_variable(), []
    run_short_operations(eng, var)
    for _ in range(20):
        eng.push(lambda: 1 / 0, (), [var])
        eng.push(lambda: ran.append(1), [var])
        with pytest.raises(ZeroDivisionError):
            eng.wait_for_var(var)
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)
    eng.wait_for_all()
    assert ran == []


def run_program(text):
    """Run a program in its own process with a SIGINT handler; return the words of its output."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLER + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_ctrl_c_waits_for_a_short_operation():
    """After Ctrl-C a short operation completes; then the wait raises KeyboardInterrupt, and the var has no failure."""
    assert run_program("""
        import os, signal, threading
        from weftplan.support import core_sharing as cores
        from weftplan import engine
        from weftplan.engine import shield

        shield.PATIENCE_NS = 60_000_000_000  # so that the operation counts as short even on a busy machine
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        var, halves, torn, told = eng.new_variable(), [], 0, 0
        for _ in range(3):
            eng.push(lambda: None, (), [var])
            eng.wait_for_var(var)

        def work():
            halves.append(threading.get_ident())
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                pass
            halves.append(threading.get_ident())

        for _ in range(50):
            before = signal.getsignal(signal.SIGINT)
            eng.push(work, (), [var])
            try:
                eng.wait_for_var(var)
                for _ in range(1000):
                    pass
            except KeyboardInterrupt:
                told += 1
            eng.wait_for_var(var)
            assert signal.getsignal(signal.SIGINT) is before
        assert len(halves) == 100 and var.version == 53
        print(told, threading.get_ident() in halves)
    """) == ["50", "True"]


def test_ctrl_c_ends_operation_after_nested_operation():
    """Ctrl-C interrupts a long operation even if it has run a short operation of another engine."""
    assert run_program("""
        import os, signal, threading
        from weftplan.support import core_sharing as cores
        from weftplan import engine

        eng, other = (engine.create("ThreadedEngine", cpu_workers=1) for _ in range(2))
        var, theirs = eng.new_variable(), other.new_variable()
        for one, what in (eng, var), (other, theirs):
            for _ in range(3):
                one.push(lambda: None, (), [what])
                one.wait_for_var(what)
        gate, inside = threading.Event(), [False]

        def work():
            before = other._all_queues[0].helped
            other.push(lambda: None, (), [theirs])
            other.wait_for_var(theirs)
            me = threading.current_thread() is threading.main_thread()
            inside[0] = me and other._all_queues[0].helped > before
            if inside[0]:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                gate.wait(60)

        try:
            while not inside[0]:
                eng.push(work, (), [var])
                eng.wait_for_var(var)
            print("too late")
        except KeyboardInterrupt:
            print("interrupted")
    """) == ["interrupted"]


def test_ctrl_c_ends_an_unexpectedly_long_operation():
    """After Ctrl-C a long operation fails, the wait raises KeyboardInterrupt, and the var can be written again."""
    assert run_program("""
        import os, signal, threading, time
        from weftplan.support import core_sharing as cores
        from weftplan import engine

        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
        var = eng.new_variable()
        for _ in range(3):
            eng.push(lambda: None, (), [var])
            eng.wait_for_var(var)
        began, gate = threading.Event(), threading.Event()

        def hangs():
            began.set()
            gate.wait()

        def interrupt():
            began.wait()
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        eng.push(hangs, (), [var])
        try:
            eng.wait_for_var(var)
        except KeyboardInterrupt:
            print("interrupted")
        gate.set()
        eng.push(lambda: print("goes on"), (), [var])
        eng.wait_for_var(var)
    """) == ["interrupted", "goes", "on"]


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("options", "together"), [({}, 4), ({"cpu_workers": 1}, 1)])
def test_idle_cores_help_in_the_seat(options, together):
    """On the waiting thread, an operation may use idle cores unless its engine is single-threaded.

    After the wait, the user's thread has no idle cores again.
    """
    eng = engine.create("ThreadedEnginePerDevice", **options)
    var, actual = eng.new_variable(), []
    run_short_operations(eng, var)
    meeting = threading.Barrier(together, timeout=60)
    mine = threading.get_ident()

    def work():
        actual.append((threading.get_ident(), core_sharing.idle_cores()))
        core_sharing.split(lambda part: meeting.wait(), together)

    for _ in range(200):
        eng.push(work, (), [var])
        eng.wait_for_var(var)
        run_short_operations(eng, var)
    assert {idle for _, idle in actual} == {together - 1}
    assert sum(who == mine for who, _ in actual) > 20
    assert core_sharing.idle_cores() == 0
    eng.stop()


def test_give_way_lets_a_woken_worker_begin(eng, monkeypatch):
    """``yield_to_worker()`` sleeps once if a woken worker has not started yet; otherwise it does not sleep."""
    var, slept = eng.new_variable(), []
    run_short_operations(eng, var)
    queue = plain_queue(eng)
    while queue.waking:
        time.sleep(0.001)
    monkeypatch.setattr(threaded.time, "sleep", slept.append)
    eng.yield_to_worker()
    assert slept == []
    queue.waking = True
    eng.yield_to_worker()
    queue.waking = False
    assert len(slept) == 1
    with engine.using(engine.create("NaiveEngine")):
        engine.get().yield_to_worker()


def test_operation_without_queue_is_waited_for():
    """A thread that waits for an operation outside all queues, started by its pusher, returns after its completion."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, started = eng.new_variable(), []
    run_short_operations(eng, var)
    eng.push_async(started.append, (), [var], prop=FnProperty.NO_SKIP)
    timer = threading.Timer(0.05, started[0])
    timer.start()
    eng.wait_for_var(var)
    timer.join()
    assert var.version == 4
    eng.stop()
