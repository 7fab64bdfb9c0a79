"""Engines without references: their threads end, and destructors collected with them may still push."""

import gc
import threading
import time

import pytest

from weftplan import engine
from weftplan.device.context import cpu

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.fixture(params=KINDS)
def kind(request):
    """The name of each threaded engine."""
    return request.param


def wait_for_end(threads):
    """Return whether all of ``threads`` end within a minute."""
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.001)
    return not any(thread.is_alive() for thread in threads)


def make_used_engine(kind):
    """Return an engine with two sleeping workers, and the set of their threads.

    The workers add their threads themselves, because other engines may start threads at any time.
    """
    eng, threads = engine.create(kind, cpu_workers=2), set()
    meet = threading.Barrier(3)
    for _ in range(2):
        eng.push(lambda: (threads.add(threading.current_thread()), meet.wait(60)))
    meet.wait(60)
    eng.wait_for_all()
    return eng, threads


def test_threads_end_with_the_engine(kind):
    """The threads of an engine end when its last reference is dropped, without a stop."""
    eng, threads = make_used_engine(kind)
    assert len(threads) == 2
    del eng
    assert wait_for_end(threads)


def test_threads_end_with_a_busy_engine(kind):
    """A running operation keeps its engine alive until it has ended; then the threads end."""
    eng, threads = make_used_engine(kind)
    gate, ran = threading.Event(), []
    eng.push(lambda: (gate.wait(60), ran.append(1)))
    del eng
    gc.collect()
    assert any(thread.is_alive() for thread in threads)
    gate.set()
    assert wait_for_end(threads)
    assert ran == [1]


@pytest.mark.parametrize("how", ["push", "delete", "on another context"])
def test_destructor_resurrects_engine(kind, how):
    """A destructor that refers to a dropped engine can still push; afterwards all threads end.

    The engine's finalizer runs first and stops the workers, because weak references are cleared before destructors run.
    The push starts new workers, or an old worker runs it; then the engine is stopped a second time.
    """
    eng, threads = make_used_engine(kind)
    ran = []

    class Last:
        def __init__(self, eng):
            self.me, self.engine, self.var = self, eng, eng.new_variable()

        def __del__(self):
            note = lambda: ran.append(threading.current_thread())  # noqa: E731
            if how == "delete":
                self.engine.delete_variable(self.var, note)
            else:
                self.engine.push(note, (), [self.var], cpu(5) if how == "on another context" else cpu(0))

    Last(eng)
    del eng
    gc.collect()
    end = time.monotonic() + 60
    while not ran and time.monotonic() < end:
        time.sleep(0.001)
    assert len(ran) == 1
    later = [thread for thread in ran if thread is not threading.current_thread()]
    assert wait_for_end({*threads, *later})
