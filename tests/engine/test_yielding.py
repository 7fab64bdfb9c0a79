"""Operations that yield because they lack memory: what runs meanwhile, and which events count as progress."""

import threading
import time

import pytest

import weftplan as mx
from weftplan import device, engine
from weftplan.device.simulated import configure


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_idle_checks_are_no_progress(kind):
    """A starved operation that repeatedly calls ``idle()`` still yields to a ready operation."""
    with engine.using(engine.create(kind, cpu_workers=1)) as current:
        pushed, ran, var = threading.Event(), [], current.new_variable()

        def lacking():
            pushed.wait(60)
            for _ in current.retries_after_progress(60.0):
                current.idle([var])
                if ran:
                    break
            ran.append("lacking")

        current.push(lacking, (), (var,), mx.cpu(0))
        current.push(lambda: ran.append("ready"), (), (current.new_variable(),), mx.cpu(0))
        pushed.set()
        current.wait_for_var(var)
        assert ran == ["ready", "lacking"]
    current.stop()


def test_lone_starved_thread_gives_up():
    """If no operation is ready and no worker is busy, a starved operation stops after one more attempt."""
    with engine.using(engine.create("ThreadedEngine", cpu_workers=1)) as current:
        tries, var = [], current.new_variable()

        def lacking():
            for _ in current.retries_after_progress(60.0):
                current.idle([var])
                tries.append(None)

        current.push(lacking, (), (var,), mx.cpu(0))
        current.wait_for_var(var)
        assert len(tries) == 1
    current.stop()


@pytest.mark.parametrize("wait", ["settle", "wait_for_all"])
def test_pending_includes_enqueued_device_work(wait):
    """Waits for everything include work that an operation has enqueued on a device.

    The operation itself ends earlier, but the caller may use its memory after the wait.
    """
    configure(0, order="lazy")
    with engine.using(engine.create("ThreadedEnginePerDevice", cpu_workers=1, gpu_workers=1)) as current:
        place, ran = device.get(mx.sim(0)), []
        current.push(lambda: place.launch(lambda: ran.append(1)), (), (current.new_variable(),), mx.sim(0))
        assert current.settle(60.0) if wait == "settle" else current.wait_for_all() is None
        assert ran == [1]
    current.stop()


def test_settle_inside_an_operation_returns_immediately():
    """An operation that settles its engine would wait for itself, so it does not wait."""
    with engine.using(engine.create("ThreadedEnginePerDevice", cpu_workers=1)) as current:
        results = []
        current.push(lambda: results.append((current.settle(30), time.monotonic())))
        begun = time.monotonic()
        current.wait_for_all()
        assert results[0][0] is False
        assert results[0][1] - begun < 20
    current.stop()
