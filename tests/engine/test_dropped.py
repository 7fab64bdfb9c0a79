"""Unreferenced engines: their threads end, and destructors in the same garbage may still push."""

import gc
import threading
import time

import pytest

from weftplan import engine
from weftplan.device.context import cpu

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.fixture(params=KINDS)
def kind(request):
    """Each threaded engine."""
    return request.param


def ended(threads):
    """Return whether none of ``threads`` is alive, within a minute."""
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.001)
    return not any(thread.is_alive() for thread in threads)


def used(kind):
    """Return an engine with sleeping workers, and these threads.

    Workers report themselves, because other collected engines may start threads at any time.
    """
    eng, threads = engine.create(kind, cpu_workers=2), set()
    meet = threading.Barrier(3)
    for _ in range(2):
        eng.push(lambda: (threads.add(threading.current_thread()), meet.wait(60)))
    meet.wait(60)
    eng.wait_for_all()
    return eng, threads


def test_threads_end_with_the_engine(kind):
    """Without a stop."""
    eng, threads = used(kind)
    assert len(threads) == 2
    del eng
    assert ended(threads)


def test_threads_end_with_a_busy_engine(kind):
    """A running operation keeps the engine alive until it is done; then everything is collected."""
    eng, threads = used(kind)
    gate, ran = threading.Event(), []
    eng.push(lambda: (gate.wait(60), ran.append(1)))
    del eng
    gc.collect()
    assert any(thread.is_alive() for thread in threads)
    gate.set()
    assert ended(threads)
    assert ran == [1]


@pytest.mark.parametrize("how", ["push", "delete", "on another context"])
def test_destructor_resurrects_engine(kind, how):
    """Garbage: engine <-- object with a destructor that pushes <--> itself.

    The engine's finalizer runs first (weak references are cleared before destructors) and stops its workers. The
    destructor's push starts new workers, or an old one runs it. Then the engine ends a second time.
    """
    eng, threads = used(kind)
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
    assert ended({*threads, *later})
