"""Forks of the process during a push, inside an operation, and with pending operations.

The file is long because most cases bring their own threads and locks into a certain state before the fork.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings

import numpy as np
import pytest

from weftplan import engine
from weftplan.engine import core, factory, failure, streams
from weftplan.engine.edges import forking
from weftplan.support import blas_threads
from weftplan.tasks.array_vars import registry


def check_in_child(check):
    """Fork and check that ``check()`` is true in the child, which must exit within 60 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while not (actual := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.005)
    assert actual[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_queue_created_between_stop_and_fork():
    """A child runs operations even if its parent created a queue between stop() and the fork.

    A push after stop() creates a queue whose worker sleeps. The child must not try to wake that worker, because its
    thread does not exist in the child.
    """
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, stop = eng.new_variable(), eng.stop

    def stop_then_late_push():
        stop()
        eng.push(lambda: None, (), [var])
        eng._wait_idle()

    def goes_on():
        assert eng.statistics().queues == ()
        eng._waiters_help = "0"
        eng.push(lambda: None, (), [var])
        eng.wait_for_var(var)
        return var.version == 2

    eng.stop = stop_then_late_push
    check_in_child(goes_on)
    del eng.stop
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    assert var.version == 2
    eng.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_push_between_stop_and_fork_completes(kind):
    """An operation pushed between stop() and the fork completes before the fork.

    The fork calls stop() again while the operation is pending. The child sees it completed and finds no thread inside
    the engine.
    """
    eng = engine.create(kind, cpu_workers=1)
    var, stop, gate, stops = eng.new_variable(), eng.stop, threading.Event(), []

    def stop_twice():
        stops.append(1)
        if len(stops) == 1:
            stop()
            eng.push(lambda: gate.wait(60), (), [var])
        else:
            gate.set()
            stop()

    def goes_on():
        del eng.stop
        assert (var.version, len(eng._region.token)) == (1, 1)
        eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        return (var.version, len(eng._region.token)) == (2, 1)

    eng.stop = stop_twice
    check_in_child(goes_on)
    del eng.stop
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert (var.version, len(eng._region.token), len(stops)) == (2, 1, 2)
    eng.stop()


def run_forking_program(text):
    """Run a program that forks in its own process; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
def test_a_fork_from_inside_an_operation(kind):
    """A fork inside an operation returns immediately in both processes.

    In the child, every call of that engine raises EngineError with the reason, and other engines run operations. The
    parent continues.
    """
    text = """
        import os
        from weftplan import engine
        from weftplan.errors import EngineError

        eng, other = engine.create(KIND), engine.create("ThreadedEnginePerDevice")
        var, theirs = eng.new_variable(), other.new_variable()
        other.push(lambda: None, (), [theirs])

        def child():
            for verb in (lambda: eng.push(print), lambda: eng.push_async(print), lambda: eng.wait_for_var(var),
                         eng.wait_for_all, lambda: eng.future(var), lambda: eng.delete_variable(var)):
                try:
                    verb()
                except EngineError as error:
                    assert "forked from inside" in str(error) and "make a new engine" in str(error)
                else:
                    raise AssertionError("not refused")
            assert theirs.version == 1
            other.push(lambda: None, (), [theirs])
            other.wait_for_var(theirs)
            assert theirs.version == 2

        def forks():
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child()
                    status = 0
                finally:
                    os._exit(status)
            print(os.waitpid(pid, 0)[1])

        eng.push(forks, (), [var])
        eng.wait_for_all()
        print(var.version, theirs.version)
    """
    assert run_forking_program(text.replace("KIND", repr(kind))).split() == ["0", "1", "1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def test_both_sides_go_on(kind):
    """A fork waits for pending work; child and parent have equal versions and failures, then run independently."""
    text = """
        import os
        from weftplan import engine

        eng = engine.create(KIND)
        good, bad, ran = eng.new_variable(), eng.new_variable(), []
        for _ in range(100):
            eng.push(lambda: ran.append(1), (), [good])
        try:
            eng.push(lambda: 1 / 0, (), [bad])
        except ZeroDivisionError:
            pass
        pid = os.fork()
        status = 1
        try:
            assert (good.version, bad.version, len(ran)) == (100, 1, 100)
            for var in (bad, bad):
                try:
                    eng.wait_for_var(var)
                except ZeroDivisionError:
                    pass
                else:
                    raise AssertionError("healed by the fork")
            eng.push(lambda: ran.append(2), [good], [bad])
            with eng.bulk(5):
                eng.push(lambda: ran.append(3), (), [good])
            eng.wait_for_all()
            assert (ran[100:], good.version, bad.version) == ([2, 3], 101, 2)
            assert len(eng._region.token) == 1  # with two tokens, two threads could be inside
            eng.stop()
            status = 0
        finally:
            if pid == 0:
                os._exit(status)
        print(os.waitpid(pid, 0)[1])
    """
    assert run_forking_program(text.replace("KIND", repr(kind))) == "0\n"


def test_gate_blocks_only_other_threads(monkeypatch):
    """During a fork, pushes of other threads block; pushes of the forking thread and of operations do not."""
    monkeypatch.setattr(forking, "_GATE_S", 3600)
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    mine, theirs, inner = (eng.new_variable() for _ in range(3))
    eng.push(lambda: None, (), [mine])
    eng.wait_for_var(mine)
    forking.hold_pushes(eng)
    late = threading.Thread(target=lambda: eng.push_async(lambda done: done(), (), [theirs]), daemon=True)
    late.start()
    eng.push(lambda: None, (), [mine])
    eng.push(lambda: eng.push_async(lambda done: done(), (), [inner]), (), [mine])
    while inner.version == 0:
        time.sleep(0.001)
    assert mine.version == 3
    assert late.is_alive()
    forking.let_pushes_go(eng)
    late.join(60)
    eng.wait_for_all()
    assert theirs.version == 1
    eng.stop()


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("begun", [False, True])
def test_completion_from_another_thread_passes_the_gate(monkeypatch, kind, begun):
    """During a fork, another thread can complete a started asynchronous operation, for which the fork waits."""
    monkeypatch.setattr(forking, "_GATE_S", 3600)
    eng = engine.create(kind, cpu_workers=1)
    var, ends = eng.new_variable(), []
    if begun:
        ends.append(eng.begin(lambda done: None, (), (var,), "waits", 0))
    else:
        eng.push_async(ends.append, (), (var,))
        while not ends:
            time.sleep(0.001)
    forking.hold_pushes(eng)
    other_thread = threading.Thread(target=ends[0], daemon=True)
    other_thread.start()
    other_thread.join(20)
    passed = not other_thread.is_alive()
    forking.let_pushes_go(eng)
    other_thread.join(20)
    eng.stop()
    assert passed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "lock", [core._delete_lock, factory._lock, streams._lock, blas_threads._lock, failure._note_lock]
)
def test_foreign_lock_is_free_in_child(lock):
    """A lock held by another thread at the fork is free in the child and still held in the parent."""
    held, go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    check_in_child(lambda: lock.acquire(blocking=False))
    assert not lock.acquire(blocking=False)
    go.set()
    thread.join(60)
    assert lock.acquire(blocking=False)
    lock.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_during_lookup_of_a_var():
    """A fork waits while another thread holds the lock of the array registry, so the child can look up arrays."""
    held, taking = threading.Event(), threading.Event()

    def hold():
        with registry._lock:
            held.set()
            taking.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    threading.Timer(0.2, taking.set).start()
    check_in_child(lambda: engine.var_of(np.zeros(3)) is not None)
    thread.join(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_during_change_of_bulk_registration():
    """A child drops the bulk members that a thread of its parent had collected.

    At the fork, one thread has collected a member and another thread holds the lock of the bulk registration.
    """
    eng, collected, held, go = engine.create("ThreadedEngine", cpu_workers=1), *(threading.Event() for _ in range(3))

    def collect():
        eng.set_bulk_size(10)
        eng.push(lambda: None)
        collected.set()
        go.wait(60)

    def hold():
        with eng._detours_lock:
            held.set()
            time.sleep(0.2)

    threads = [threading.Thread(target=collect), threading.Thread(target=hold)]
    threads[0].start()
    assert collected.wait(60)
    threads[1].start()
    assert held.wait(60)

    def goes_on():
        eng.push(lambda: None)
        eng.wait_for_all()
        return eng.statistics().completed == 1 and not eng._detours

    check_in_child(goes_on)
    go.set()
    for thread in threads:
        thread.join(60)
    eng.wait_for_all()
    assert eng.statistics().completed == 1
    eng.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_a_thread_enters_the_gate():
    """A child can push although a thread of its parent held the lock of the fork gate at the fork."""
    eng = engine.create("ThreadedEngine", cpu_workers=1)
    var, stop, held = eng.new_variable(), eng.stop, threading.Event()

    def enter():
        with eng._fork.gate._cond:
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=enter)

    def stop_with_a_thread_at_the_gate():
        stop()
        thread.start()
        assert held.wait(60)

    def goes_on():
        eng.push(lambda: None, (), [var])
        eng.wait_for_all()
        return var.version == 1

    eng.stop = stop_with_a_thread_at_the_gate
    check_in_child(goes_on)
    thread.join(60)
    del eng.stop
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert var.version == 1
    eng.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_of_naive_engines_under_load():
    """While three threads push to a naive engine, five forks succeed, and both processes continue."""
    eng = engine.create("NaiveEngine")
    stop = threading.Event()

    def load():
        var = eng.new_variable()
        while not stop.is_set():
            eng.push(lambda: None, (), [var])

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            var = eng.new_variable()

            def goes_on(var=var):
                eng.push(lambda: None, (), [var])
                eng.wait_for_all()
                return var.version == 1

            check_in_child(goes_on)
    finally:
        stop.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_during_a_lazy_import():
    """A child can import ``mx.nd`` although another thread was importing it at the fork."""
    program = """
        import os, signal, sys, threading, time
        import weftplan as mx

        inside = threading.Event()

        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "weftplan.ndarray.array":
                    inside.set()
                    time.sleep(0.3)

        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=lambda: mx.nd)
        thread.start()
        assert inside.wait(60)
        pid = os.fork()
        if not pid:
            signal.alarm(50)
            os._exit(0 if mx.nd.ones((2,)).asnumpy().sum() == 2 else 1)
        print(os.waitpid(pid, 0)[1])
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
