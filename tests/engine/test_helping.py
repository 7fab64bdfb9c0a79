"""A thread that waits stands in for a sleeping worker: when, how many at a time, and what Ctrl-C does to it."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tests.contract.engines import together
from weftplan import engine
from weftplan.engine import FnProperty, OprBlock, threaded
from weftplan.engine.workers import WorkerQueue
from weftplan.errors import WaitInWorkerError
from weftplan.support import core_sharing

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


def warm(eng, var):
    """Until the engine has seen a short operation on a worker: then waits may help."""
    for _ in range(3):
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)


def plain_queue(eng):
    """That of operations pushed without options; there is one once there was one of these."""
    return eng._plain_queues[OprBlock]


def thread_of_next(eng, var, **options):
    """The thread on which an operation runs that is waited for at once."""
    ran = []
    eng.push(lambda: ran.append(threading.get_ident()), (), [var], **options)
    eng.wait_for_var(var)
    return ran[0]


@pytest.fixture(autouse=True)
def all_functions(monkeypatch):
    """What is pushed here are a user's functions."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", "all")


@pytest.fixture(params=KINDS)
def eng(request):
    """A threaded engine with one worker."""
    made = engine.create(request.param, cpu_workers=1)
    yield made
    made.stop()


def test_a_short_operation_runs_on_the_waiting_thread(eng):
    """Often: a worker may be quicker."""
    var = eng.new_variable()
    warm(eng, var)
    me = threading.get_ident()
    assert sum(thread_of_next(eng, var) == me for _ in range(200)) > 20


def test_all_that_is_ready_in_wait_for_all(eng):
    """Each of a chain of operations runs once, in order, whoever runs it; the counts include them."""
    var, ran = eng.new_variable(), []
    warm(eng, var)
    before = sum(q.completed for q in eng.statistics().queues)
    for i in range(1000):
        eng.push(lambda i=i: ran.append(i), (), [var])
    eng.wait_for_all()
    assert ran == list(range(1000))
    assert sum(q.completed for q in eng.statistics().queues) == before + 1000


def test_never_after_a_long_operation(eng):
    """What took long last is left to the worker, where Ctrl-C does not reach it."""
    var = eng.new_variable()
    warm(eng, var)
    for _ in range(3):
        eng.push(lambda: time.sleep(0.02), (), [var])
        eng.wait_for_var(var)
    eng.push(lambda: time.sleep(0.02), (), [var])
    assert thread_of_next(eng, var) != threading.get_ident()


def test_never_before_anything_was_measured(eng, monkeypatch):
    """The first operation of an engine may be a long one: it is left to a worker, however late that one comes."""
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
def test_what_stands_before_what_is_waited_for(workers, monkeypatch):
    """With one worker it would be run first in any case, so it is; with more it is left to one of them."""
    eng = engine.create("ThreadedEngine", cpu_workers=workers)
    first, second, ran = eng.new_variable(), eng.new_variable(), []
    warm(eng, first)
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
def test_a_wait_beside_a_busy_worker_sleeps(eng, what):
    """It does not ask again and again whether the worker has come to its end."""
    var, begun = eng.new_variable(), threading.Event()
    warm(eng, var)
    eng.push(lambda: (begun.set(), time.sleep(0.2)), (), [var])
    assert begun.wait(60)
    plain_queue(eng).quick = True  # as if what the worker runs had looked short
    eng.push(lambda: None)
    eng.push(lambda: None, (), [var])
    before = time.thread_time()
    eng.wait_for_var(var) if what == "var" else eng.wait_for_all()
    assert time.thread_time() - before < 0.03


@pytest.mark.shows("WEFTPLAN_ENGINE_WAITERS_HELP")
def test_never_when_switched_off(monkeypatch):
    """WEFTPLAN_ENGINE_WAITERS_HELP=0."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", "0")
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var = eng.new_variable()
    warm(eng, var)
    me = threading.get_ident()
    assert all(thread_of_next(eng, var) != me for _ in range(100))
    eng.stop()


def test_priorities_are_left_to_their_workers():
    """A priority queue orders what is ready; a waiting thread does not take from it."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var = eng.new_variable()
    warm(eng, var)
    me = threading.get_ident()
    assert all(thread_of_next(eng, var, prop=FnProperty.CPU_PRIORITIZED) != me for _ in range(20))
    eng.stop()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_never_more_at_a_time_than_workers(workers):
    """Six threads push and wait; the operations of the queue overlap at most as often as it has workers."""
    eng = engine.create("ThreadedEngine", cpu_workers=workers)
    guard, inside, most, count = threading.Lock(), [0], [0], [0]

    def work():
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0)  # lets another thread come
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


def test_the_waiting_threads_context_does_not_reach_the_operation(eng):
    """NumPy's errstate of the waiting thread stays with it, as if a worker ran the operation."""
    var, zero = eng.new_variable(), np.zeros(1)
    warm(eng, var)
    seen = []
    with np.errstate(divide="raise", invalid="raise"):
        for _ in range(50):
            eng.push(lambda: seen.append(np.geterr()["divide"]), [], [var])
            eng.wait_for_var(var)
        with pytest.raises(FloatingPointError):
            zero / zero
    assert "raise" not in seen


def test_a_wait_inside_is_refused_there_too(eng):
    """An operation that waits for its engine is told so, on whatever thread it runs."""
    var, other = eng.new_variable(), eng.new_variable()
    warm(eng, var)
    eng.push(lambda: eng.wait_for_var(other), (), [var])
    with pytest.raises(WaitInWorkerError):
        eng.wait_for_var(var)


def test_an_operation_that_waits_for_another_engine(eng):
    """It may run one of that engine's in its turn, on the same thread."""
    other = engine.create("ThreadedEngine", cpu_workers=1)
    outer, inner, ran = eng.new_variable(), other.new_variable(), []
    warm(eng, outer)
    warm(other, inner)

    def work():
        other.push(lambda: ran.append(threading.get_ident()), (), [inner])
        other.wait_for_var(inner)

    for _ in range(200):
        eng.push(work, (), [outer])
        eng.wait_for_var(outer)
    assert len(ran) == 200
    assert ran.count(threading.get_ident()) > 20
    other.stop()


def test_failures_are_as_on_a_worker(eng):
    """The wait raises the failure; what depends on it is skipped; the failed var can be written again."""
    var, ran = eng.new_variable(), []
    warm(eng, var)
    for _ in range(20):
        eng.push(lambda: 1 / 0, (), [var])
        eng.push(lambda: ran.append(1), [var])
        with pytest.raises(ZeroDivisionError):
            eng.wait_for_var(var)
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)
    eng.wait_for_all()
    assert ran == []


_HANDLER = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Background jobs of a shell ignore SIGINT, and so do their children."""


def script(text):
    """Run a program in a process of its own; its output."""
    done = subprocess.run(
        [sys.executable, "-c", _HANDLER + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_ctrl_c_waits_for_a_short_operation():
    """It is not torn apart: its second half runs, then the wait raises KeyboardInterrupt, and the var is fine."""
    assert script("""
        import os, signal, threading
        from weftplan.support import core_sharing as cores
        from weftplan import engine
        from weftplan.engine import shield

        shield.PATIENCE_NS = 60_000_000_000  # however busy the machine is, the operation counts as short
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


def test_ctrl_c_ends_a_long_operation_after_a_short_one_within():
    """The operation of another engine that it has run, while it waited, does not change that it takes long."""
    assert script("""
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


def test_ctrl_c_ends_a_long_operation_that_looked_short():
    """It fails with KeyboardInterrupt; the wait raises that at once, and the var can be written again."""
    assert script("""
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
    """As they help the worker whose place it is: not where there is to be one thread. Afterwards the thread is the
    user's again."""
    eng = engine.create("ThreadedEnginePerDevice", **options)
    var, found = eng.new_variable(), []
    warm(eng, var)
    meeting = threading.Barrier(together, timeout=60)
    mine = threading.get_ident()

    def work():
        found.append((threading.get_ident(), core_sharing.idle_cores()))
        core_sharing.split(lambda part: meeting.wait(), together)

    for _ in range(200):
        eng.push(work, (), [var])
        eng.wait_for_var(var)
        warm(eng, var)
    assert {idle for _, idle in found} == {together - 1}
    assert sum(who == mine for who, _ in found) > 20
    assert core_sharing.idle_cores() == 0
    eng.stop()


def test_a_worker_that_has_been_woken_may_begin(eng, monkeypatch):
    """The thread that has woken it lets go of the interpreter; not where no worker waits for that."""
    var, slept = eng.new_variable(), []
    warm(eng, var)
    queue = plain_queue(eng)
    while queue.waking:
        time.sleep(0.001)
    monkeypatch.setattr(threaded.time, "sleep", slept.append)
    eng.give_way()
    assert slept == []
    queue.waking = True
    eng.give_way()
    queue.waking = False
    assert len(slept) == 1
    with engine.using(engine.create("NaiveEngine")):
        engine.get().give_way()


def test_operation_without_queue_is_waited_for():
    """An operation that the pusher starts itself is in no queue: a waiting thread sleeps until it is done."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, started = eng.new_variable(), []
    warm(eng, var)
    eng.push_async(started.append, (), [var], prop=FnProperty.NO_SKIP)
    timer = threading.Timer(0.05, started[0])
    timer.start()
    eng.wait_for_var(var)
    timer.join()
    assert var.version == 4
    eng.stop()
