"""Every array test runs on each engine, unless it requests one."""

import pytest

from weftplan import engine
from weftplan.ndarray.memory.release import drain

KINDS = ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"]


@pytest.fixture(params=KINDS)
def each_engine(request):
    """A new engine of each kind as the process-wide engine."""
    eng = engine.create(request.param)
    with engine.using(eng):
        yield eng
        drain()
        eng.wait_for_all()
    eng.stop()


@pytest.fixture
def gate():
    """A threaded engine whose cpu(0) operations wait for the gate, so that early execution is visible."""
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
