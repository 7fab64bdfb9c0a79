"""Who lacks memory lets others go first: which operations it runs meanwhile, and what counts as progress."""

import threading

import pytest

import weftplan as mx
from weftplan import device, engine
from weftplan.device.simulated import configure


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_looking_whether_anything_is_pending_is_no_progress(kind):
    """An operation that lacks memory looks again and again whether somebody's memory is idle, which the engine answers
    inside. It still runs what is ready behind it, since nothing has ended."""
    with engine.using(engine.create(kind, cpu_workers=1)) as current:
        pushed, ran, var = threading.Event(), [], current.new_variable()

        def lacking():
            pushed.wait(60)
            for _ in current.others_first(60.0):
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


def test_who_is_alone_is_told_that_nobody_will_help():
    """With nothing ready and nobody at work the others have been: after one more try it is over."""
    with engine.using(engine.create("ThreadedEngine", cpu_workers=1)) as current:
        tries, var = [], current.new_variable()

        def lacking():
            for _ in current.others_first(60.0):
                current.idle([var])
                tries.append(None)

        current.push(lacking, (), (var,), mx.cpu(0))
        current.wait_for_var(var)
        assert len(tries) == 1
    current.stop()


@pytest.mark.parametrize("wait", ["settle", "wait_for_all"])
def test_nothing_is_pending_only_when_devices_have_done_what_is_enqueued(wait):
    """An operation on a device ends when its work is enqueued. A device that runs nothing early has done none of that
    until somebody waits for the stream; who hears that nothing is pending may use its memory."""
    configure(0, order="lazy")
    with engine.using(engine.create("ThreadedEnginePerDevice", cpu_workers=1, gpu_workers=1)) as current:
        place, ran = device.get(mx.sim(0)), []
        current.push(lambda: place.launch(lambda: ran.append(1)), (), (current.new_variable(),), mx.sim(0))
        assert current.settle(60.0) if wait == "settle" else current.wait_for_all() is None
        assert ran == [1]
    current.stop()
