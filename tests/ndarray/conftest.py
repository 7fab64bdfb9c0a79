"""Engines for the array tests: each kind in turn, or an engine blocked by a gate."""

import pytest

from weftplan import engine
from weftplan.ndarray.memory.release import drain

KINDS = ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"]


@pytest.fixture(params=KINDS)
def each_engine(request):
    """Yield a new engine of each kind, which is the process-wide engine during the test."""
    eng = engine.create(request.param)
    with engine.using(eng):
        yield eng
        drain()
        eng.wait_for_all()
    eng.stop()


@pytest.fixture
def gate():
    """Yield a gate that blocks operations of a threaded engine, so that early execution is visible."""
    import threading

    eng = engine.create("ThreadedEngine")
    opened = threading.Event()

    class Gate:
        engine = eng
        open = staticmethod(opened.set)

        @staticmethod
        def close(*arrays):
            """Block all later reads and writes of ``arrays``."""
            eng.push(opened.wait, (), [array.var for array in arrays], arrays[0].context, name="gate")

    with engine.using(eng):
        yield Gate
        opened.set()
        drain()
        eng.wait_for_all()
    eng.stop()
