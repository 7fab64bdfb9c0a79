"""Every test of arrays runs on each engine, unless it asks for one."""

import pytest

from weftplan import engine
from weftplan.ndarray.memory.release import drain

KINDS = ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"]


@pytest.fixture(params=KINDS)
def each_engine(request):
    """A fresh engine of each kind as the process-wide one."""
    made = engine.create(request.param)
    with engine.using(made):
        yield made
        drain()
        made.wait_for_all()
    made.stop()


@pytest.fixture
def gate():
    """A threaded engine whose cpu(0) operations wait until the gate is opened: what runs early shows."""
    import threading

    made = engine.create("ThreadedEngine")
    opened = threading.Event()

    class Gate:
        engine = made
        open = staticmethod(opened.set)

        @staticmethod
        def close(*arrays):
            """Hold back everything that writes or reads ``arrays`` from now on."""
            made.push(opened.wait, (), [array.var for array in arrays], arrays[0].context, name="gate")

    with engine.using(made):
        yield Gate
        opened.set()
        drain()
        made.wait_for_all()
    made.stop()
