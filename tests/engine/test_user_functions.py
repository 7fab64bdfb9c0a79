"""User functions run on workers, never on the waiting thread, so they see none of its state."""

import contextvars
import sys
import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.engine import FnProperty

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")
word = contextvars.ContextVar("word", default="nobody's")


@pytest.fixture(params=KINDS)
def eng(request):
    """A threaded engine with one worker that has measured short operations, so that waits could run some."""
    eng = engine.create(request.param, cpu_workers=1)
    var = eng.new_variable()
    for _ in range(5):
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)
    yield eng
    eng.stop()


def push_and_wait(eng, work, count=60):
    """Push ``work`` ``count`` times, and after each push wait, in turn for all operations and for its var."""
    var = eng.new_variable()
    for i in range(count):
        eng.push(work, (), [var])
        eng.wait_for_var(var) if i % 2 else eng.wait_for_all()


def test_user_function_runs_on_the_worker(eng):
    """A pushed function runs only on the worker's thread."""
    threads = set()
    push_and_wait(eng, lambda: threads.add(threading.current_thread().name))
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_submitted_function_runs_on_the_worker(eng):
    """A submitted function never runs on the waiting thread."""
    threads, a = set(), np.zeros(3)

    def work(out):
        threads.add(threading.get_ident())

    with engine.using(eng):
        for _ in range(100):
            engine.submit(work, out=a)
            engine.wait(a)
    assert threading.get_ident() not in threads


def test_lock_of_the_waiting_thread_excludes_functions(eng):
    """A function cannot acquire an RLock that the waiting thread owns, as it could on that thread."""
    lock, entered = threading.RLock(), []

    def work():
        taken = lock.acquire(blocking=False)
        entered.append(taken)
        if taken:
            lock.release()

    with lock:
        push_and_wait(eng, work)
    assert entered == [False] * 60


def test_functions_do_not_see_the_waiters_context(eng):
    """Functions do not see the device and the context variables of the waiting thread."""
    seen = set()
    token = word.set("the waiting thread's")
    try:
        with mx.cpu(7):
            push_and_wait(eng, lambda: seen.add((mx.current_context(), word.get())))
    finally:
        word.reset(token)
    assert seen == {(mx.cpu(0), "nobody's")}


def test_functions_have_the_workers_recursion_depth(eng):
    """A function can recurse as deeply as on the worker, however deep the waiting thread's stack is."""

    def down(frames):
        return down(frames - 1) if frames else 0

    def wait_deep(frames):
        if frames:
            return wait_deep(frames - 1)
        return push_and_wait(eng, lambda: down(sys.getrecursionlimit() - 300), 10)

    wait_deep(sys.getrecursionlimit() // 2)


@pytest.mark.parametrize("helping", ["1", "all"])
def test_nested_push_is_waited_for(monkeypatch, helping):
    """A push inside an operation is not collected into the waiting thread's bulk, and ``wait_for_all`` waits for it."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", helping)
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, second, ran = eng.new_variable(), eng.new_variable(), []

    def outer():
        eng.push(lambda: ran.append("inner"), (), [second])

    for _ in range(5):
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)
    for i in range(20):
        with eng.bulk(100):
            eng.push(outer, (), [var])
            eng.wait_for_all()
            assert len(ran) == i + 1
    eng.stop()


def test_own_operations_run_on_the_waiting_thread():
    """The waiting thread itself runs more than 10 of the library's operations on an array of 10,000 elements."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    with engine.using(eng):
        a = mx.nd.zeros((10000,))
        for _ in range(100):
            a += 1
            a.wait_to_read()
        assert (a.asnumpy() == 100).all()
    assert sum(queue.helped for queue in eng._all_queues) > 10
    eng.stop()


def test_user_operation_before_an_own_operation():
    """A user function that precedes an array operation runs on the worker."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    threads = set()
    with engine.using(eng):
        a = mx.nd.zeros((4,))
        for _ in range(100):
            eng.push(lambda: threads.add(threading.get_ident()), (), [a.var])
            a += 1
            a.wait_to_read()
    assert threading.get_ident() not in threads
    eng.stop()


@pytest.mark.parametrize(
    "options", [{}, {"priority": 1}, {"name": "named"}, {"prop": FnProperty.CPU_PRIORITIZED}], ids=str
)
def test_no_push_variant_runs_on_the_waiter(options):
    """A function pushed with a priority, a name or a property never runs on the waiting thread."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, threads = eng.new_variable(), set()
    for _ in range(100):
        eng.push(lambda: threads.add(threading.get_ident()), (), [var], **options)
        eng.wait_for_var(var)
    assert threading.get_ident() not in threads
    eng.stop()
