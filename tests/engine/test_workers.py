"""Worker threads: how many run at a time, that none sleeps while operations are queued, and a lack of threads."""

import threading

import pytest

from weftplan import engine
from weftplan.device.context import cpu
from weftplan.engine import FnProperty
from weftplan.errors import EngineError

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")
MANY = 4


@pytest.fixture(params=KINDS)
def kind(request):
    """The name of each threaded engine."""
    return request.param


@pytest.fixture(params=KINDS)
def eng(request):
    """An engine with four workers per queue, on which waiting threads run no operations."""
    eng = engine.create(request.param, cpu_workers=MANY, priority_workers=MANY)
    eng._waiters_help = "0"
    yield eng
    eng.stop()


def start_all_workers(eng, **options):
    """Run operations until all workers have started, and wait until they sleep."""
    meet = threading.Barrier(MANY, timeout=60)
    for _ in range(MANY):
        eng.push(meet.wait, **options)
    eng.wait_for_all()
    (queue,) = eng._all_queues
    while len(queue.idle) < MANY:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("prop", [FnProperty.NORMAL, FnProperty.CPU_PRIORITIZED])
@pytest.mark.parametrize("started", [False, True], ids=["new threads", "sleeping threads"])
def test_operations_ready_together_run_concurrently(eng, started, prop):
    """Four operations that become ready after one write run at the same time.

    The worker that ran the write takes one operation and wakes or starts the next worker, which does the same.
    """
    if started:
        start_all_workers(eng, prop=prop)
    var, meet, gate = eng.new_variable(), threading.Barrier(MANY, timeout=60), threading.Event()
    eng.push(gate.wait, (), [var], prop=prop)
    for _ in range(MANY):
        eng.push(meet.wait, [var], prop=prop)
    gate.set()
    eng.wait_for_all()
    assert meet.n_waiting == 0
    assert [queue.workers for queue in eng.statistics().queues] == [MANY]


@pytest.mark.parametrize("started", [False, True], ids=["new threads", "sleeping threads"])
def test_consecutive_pushes_run_concurrently(eng, started):
    """Four consecutive pushes run at the same time, on new and on sleeping threads."""
    if started:
        start_all_workers(eng)
    meet = threading.Barrier(MANY, timeout=60)
    for _ in range(MANY):
        eng.push(meet.wait)
    eng.wait_for_all()


def test_free_worker_takes_successors_of_a_busy_worker(eng):
    """While a worker runs a long operation, a sleeping worker takes the operation that became ready with it."""
    start_all_workers(eng)
    a, done, gate = eng.new_variable(), threading.Event(), threading.Event()
    eng.push(lambda: None, (), [a])
    eng.push(lambda: done.wait(60), [a])
    eng.push(lambda: gate.set(), [a])
    assert gate.wait(60)
    done.set()
    eng.wait_for_all()


def test_worker_count_is_never_exceeded(eng):
    """At most four of fifty operations run at a time; ThreadedEnginePerDevice has the device in its thread names."""
    guard, inside, most = threading.Lock(), [0], [0]

    def work():
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        with guard:
            inside[0] -= 1

    for _ in range(50):
        eng.push(work)
    eng.wait_for_all()
    assert most[0] == MANY
    where = "" if eng.kind == "ThreadedEngine" else " cpu(0)"
    names = {f"weftplan{where} worker {i}" for i in range(MANY)}
    assert {thread.name for thread in threading.enumerate()} >= names
    (queue,) = eng.statistics().queues
    assert (queue.queue, queue.completed, queue.depth, queue.workers) == ("worker", 50, 0, MANY)
    for _ in range(3):
        eng.push_async(lambda on_complete: on_complete())
    eng.wait_for_all()
    assert eng.statistics().queues[0].completed == 53


class TestNoThreadToBeHad:
    """Behaviour when ``Thread.start`` raises RuntimeError because the system has no more threads."""

    @pytest.fixture
    def refuse(self, monkeypatch):
        """Return a function that makes the given number of next thread starts fail."""
        left, start = [0], threading.Thread.start

        def refused(thread):
            if left[0] and thread.name.startswith("weftplan"):
                left[0] -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)
        return lambda count: left.__setitem__(0, count)

    def test_existing_workers_suffice(self, eng, refuse):
        """If no further thread can start, the existing worker runs all operations without an error."""
        var, gate, ran = eng.new_variable(), threading.Event(), []
        eng.push(gate.wait)
        refuse(1000)
        for i in range(20):
            eng.push(lambda i=i: ran.append(i), (), [var])
        gate.set()
        eng.wait_for_all()
        assert ran == list(range(20))
        assert eng.statistics().queues[0].workers == 1
        refuse(0)
        meet = threading.Barrier(MANY, timeout=60)
        for _ in range(MANY):
            eng.push(meet.wait)
        eng.wait_for_all()  # threads are available again

    def test_queue_without_any_worker(self, eng, refuse):
        """Without any worker an operation stays queued, and a wait raises EngineError until a push starts a thread."""
        var, ran = eng.new_variable(), []
        refuse(1000)
        eng.push(lambda: ran.append("first"), (), [var])
        for wait in (eng.wait_for_all, lambda: eng.wait_for_var(var)):
            with pytest.raises(EngineError, match=r"no thread can be started .* can't start new thread"):
                wait()
        assert ran == []
        refuse(0)
        eng.push(lambda: ran.append("second"), (), [var])
        eng.push(lambda: ran.append("elsewhere"))
        eng.wait_for_all()
        assert sorted(ran) == ["elsewhere", "first", "second"]
        assert var.version == 2

    @pytest.mark.parametrize("wait", ["wait_for_var", "wait_for_all"])
    def test_wait_starts_missing_workers(self, eng, refuse, wait):
        """A wait starts the missing worker if threads are available again."""
        var, ran = eng.new_variable(), []
        refuse(1)
        eng.push(lambda: ran.append("first"), (), [var])
        assert ran == []
        eng.wait_for_var(var) if wait == "wait_for_var" else eng.wait_for_all()
        assert ran == ["first"]


@pytest.mark.parametrize("place", ["_dispatch", "_run_outside"])
def test_worker_survives_errors_of_the_region(kind, monkeypatch, place):
    """A MemoryError in the engine's code on a worker is reported to threading.excepthook, and the worker continues."""
    eng, told, plain = engine.create(kind, cpu_workers=1), [], []
    eng._waiters_help = "0"
    method = getattr(eng, place)
    monkeypatch.setattr(threading, "excepthook", lambda info: told.append(info.exc_type))

    def raises():
        method()
        if threading.current_thread().name.startswith("weftplan") and len(plain) < 3:
            plain.append(1)
            raise MemoryError

    monkeypatch.setattr(eng, place, raises)
    var = eng.new_variable()
    for _ in range(20):
        eng.push(lambda: None, (), [var])
        if place == "_run_outside":
            eng.push(lambda: None, (), [var], prop=FnProperty.ASYNC)
    eng.wait_for_all()
    assert told == [MemoryError] * len(plain)
    assert eng.statistics().pending == 0
    assert [queue.workers for queue in eng.statistics().queues] == [1]
    eng.stop()


def test_contexts_do_not_wait_for_each_other():
    """A long operation on cpu(1) does not delay operations on cpu(0), on cpu(2) or in the priority queue."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1, priority_workers=1)
    gate, ran = threading.Event(), []
    eng.push(lambda: gate.wait(60), (), [], cpu(1))
    marks = [eng.new_variable() for _ in range(3)]
    eng.push(lambda: ran.append(0), (), [marks[0]])
    eng.push(lambda: ran.append(2), (), [marks[1]], cpu(2))
    eng.push(lambda: ran.append("priority"), (), [marks[2]], prop=FnProperty.CPU_PRIORITIZED)
    for var in marks:
        eng.wait_for_var(var)
    assert set(ran) == {0, 2, "priority"}
    assert eng.statistics().pending == 1
    gate.set()
    eng.stop()
