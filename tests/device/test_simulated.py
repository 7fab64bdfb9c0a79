"""The simulated device: ordering bugs give wrong values in every run, and the virtual clock adds up."""

import weakref

import numpy as np
import pytest

from weftplan import device
from weftplan.device import simulated
from weftplan.device.simulated import CostModel, SimDevice
from weftplan.errors import DeviceError, OutOfMemoryError


@pytest.fixture(params=["lazy", "random"])
def place(request):
    return SimDevice(device.sim(90), order=request.param)


def test_stream_work_runs_in_order_at_waits(place):
    """Launched work runs at the synchronization, in the order of the launches."""
    stream, log = place.new_stream(), []
    with stream:
        for step in range(4):
            place.launch(lambda step=step: log.append(step))
    assert log == []
    assert stream.pending == 4
    stream.synchronize()
    assert log == [0, 1, 2, 3]
    assert stream.pending == 0


def write_then_read(place, *, wait):
    """Write x = 1 on stream a, copy x to y on stream b, which waits for an event of a if ``wait``; return y."""
    x, y = np.zeros(1), np.full(1, -1.0)
    a, b = place.new_stream(), place.new_stream()
    with a:
        place.launch(lambda: x.fill(1))
    event = a.record()
    if wait:
        b.wait(event)
    with b:
        place.copy(y, x)
    b.synchronize()
    place.synchronize()
    return y[0]


def test_an_event_orders_two_streams(place):
    """With an event between the streams, the read sees the write in all of twenty runs."""
    assert [write_then_read(place, wait=True) for _ in range(20)] == [1] * 20


def test_missing_event_always_gives_wrong_value():
    """In lazy order, without an event, the read never sees the write."""
    lazy = SimDevice(device.sim(91))
    assert [write_then_read(lazy, wait=False) for _ in range(20)] == [0] * 20


def test_missing_event_in_random_order_depends_on_seed():
    """In random order, without an event, some reads miss the write, and the seed decides which."""

    def runs(seed):
        place = SimDevice(device.sim(92), order="random", seed=seed)
        return [write_then_read(place, wait=False) for _ in range(20)]

    assert runs(1) == runs(1)
    assert set(runs(1)) == {0, 1}


def test_write_after_read_race_is_visible():
    """Without a wait, stream b overwrites x before stream a has read it; with a wait it does not."""
    results = {}
    for wait in (False, True):
        place = SimDevice(device.sim(93))
        x, y = np.ones(1), np.zeros(1)
        a, b = place.new_stream(), place.new_stream()
        with a:
            place.copy(y, x)
        if wait:
            b.wait(a.record())
        with b:
            place.launch(lambda x=x: x.fill(9))
        b.synchronize()
        a.synchronize()
        results[wait] = y[0]
    assert results == {False: 9, True: 1}


def test_streams_that_wait_for_each_other_are_refused():
    """Two streams that wait for each other's later events raise DeviceError instead of hanging."""
    place = SimDevice(device.sim(94))
    a, b = place.new_stream(), place.new_stream()
    first, second = simulated.SimEvent(a), simulated.SimEvent(b)
    a.wait(second)
    b.wait(first)
    with pytest.raises(DeviceError, match="can never complete"):
        a.synchronize()


def test_freed_memory_is_poisoned():
    """A pending copy from freed memory gives NaN."""
    place = SimDevice(device.sim(95))
    raw = place.allocate(16)
    values = raw.view(np.float32)
    values.fill(1)
    out, stream = np.zeros(4, np.float32), place.new_stream()
    with stream:
        place.copy(out, values)
    place.free(raw)
    stream.synchronize()
    assert np.isnan(out).all()
    assert np.isnan(place.allocate(16).view(np.float32)).all()


def test_capacity_is_enforced():
    """An allocation beyond the capacity raises OutOfMemoryError; a capacity below the bytes in use, DeviceError."""
    place = simulated.configure(96, capacity=1000)
    raw = place.allocate(600)
    with pytest.raises(OutOfMemoryError, match=r"sim\(96\): 500 bytes requested, 400 of 1,000 free"):
        place.allocate(500)
    with pytest.raises(DeviceError, match="below the 600 bytes in use"):
        simulated.configure(96, capacity=599)
    place.free(place.allocate(400))  # exactly the free bytes
    simulated.configure(96, capacity=600)
    simulated.configure(96, capacity=1000)
    place.free(raw)
    assert place.memory_info() == (1000, 1000)


def test_memory_that_the_host_refuses_is_not_counted():
    """An allocation that the host refuses does not change the device's free bytes."""
    place = simulated.configure(87, capacity=1 << 62)
    with pytest.raises(OutOfMemoryError, match="the system refused"):
        place.allocate(1 << 61)
    assert place.memory_info() == (1 << 62, 1 << 62)


def test_configure_changes_given_settings():
    """``configure`` sets order and cost of sim(i); an unknown order raises DeviceError with the legal orders."""
    cost = CostModel(launch=2.0)
    place = simulated.configure(89, order="random", seed=3, cost=cost)
    assert (place.order, place.cost, place is device.get(device.sim(89))) == ("random", cost, True)
    with pytest.raises(DeviceError, match="'lazy' or 'random'"):
        simulated.configure(96, order="fifo")


def test_work_without_a_stream_waits_for_everything():
    """Work without a stream runs after all earlier work and has completed when the call returns, as in CUDA."""
    place = SimDevice(device.sim(97))
    log, stream = [], place.new_stream()
    with stream:
        place.launch(lambda: log.append("stream"))
    place.launch(lambda: log.append("default"))
    assert log == ["stream", "default"]


def test_the_clock_follows_the_cost_model():
    """Streams overlap in virtual time, and a stream that waits for an event continues at the event's time."""
    place = SimDevice(device.sim(98))
    place.cost = CostModel(launch=1.0, latency=0.5, bandwidth=8.0)
    a, b = place.new_stream(), place.new_stream()
    with a:
        place.launch(int)
        place.copy(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    with b:
        place.launch(int)
    place.synchronize()
    assert (a.time, b.time, place.clock) == (3.5, 1.0, 3.5)
    b.wait(a.record())
    b.enqueue(int, seconds=2.0)
    place.synchronize()
    assert b.time == 5.5


def test_an_exception_is_raised_once_at_synchronisation(place):
    """Work that raises does not stop its stream; the next wait raises the first error, once."""
    stream, log = place.new_stream(), []
    with stream:
        place.launch(lambda: 1 // 0)
        place.launch(lambda: log.append("after"))
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    assert log == ["after"]
    stream.synchronize()


def test_a_host_stream_waits_for_a_device(place):
    """A host stream's wait for a device's event returns when the event is complete."""
    x, stream = np.zeros(1), place.new_stream()
    with stream:
        place.launch(lambda: x.fill(1))
    event = stream.record()
    device.get(device.cpu()).new_stream().wait(event)
    assert event.completed
    assert x[0] == 1


def test_event_wait_raises_error_of_its_stream(place):
    """A wait for an event raises the error of earlier work on its stream, once."""
    stream = place.new_stream()
    stream.enqueue(lambda: 1 // 0)
    event = stream.record()
    with pytest.raises(ZeroDivisionError):
        event.synchronize()
    event.synchronize()
    stream.synchronize()


def test_a_seed_can_be_set_again():
    """The same seed gives the same order of work, and another seed another order; a call without a seed keeps it."""
    place = simulated.configure(86, order="random")
    streams = [place.new_stream() for _ in range(4)]

    def order(seed):
        simulated.configure(86, seed=seed)
        log = []
        for number, stream in enumerate(streams * 5):
            stream.enqueue(lambda number=number: log.append(number % 4))
        place.synchronize()
        return log

    first = order(1)
    simulated.configure(86)  # without a seed
    assert order(1) == first
    assert order(2) != first


def test_polling_an_event_ends(place):
    """Repeated queries of an event make the work before it progress; the event is complete within 50 queries."""
    stream = place.new_stream()
    for _ in range(5):
        stream.enqueue(int)
    event = stream.record()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 50
    assert event.query()


def test_dropped_stream_runs_its_work(place):
    """A dropped stream still runs its work and raises its error; afterwards it is freed."""
    log = []
    stream = place.new_stream()
    stream.enqueue(lambda: log.append(1), seconds=2.0)
    stream.enqueue(lambda: 1 // 0, seconds=1.0)
    dropped = weakref.ref(stream)
    del stream
    with pytest.raises(ZeroDivisionError):
        place.synchronize()
    assert log == [1]
    assert dropped() is None
    place.synchronize()
    assert place.clock == 3.0


def test_floating_point_is_silent(place):
    """Infinities and NaN in simulated work give no warning at the wait."""
    stream, x = place.new_stream(), np.full(2, -200.0, np.float32)
    with stream:
        place.launch(lambda: np.exp(-x, out=x))
        place.launch(lambda: np.divide(x, 0, out=x))
    stream.synchronize()
    assert np.isinf(x).all()


def test_seconds_do_not_depend_on_earlier_work():
    """``seconds_of`` gives the same seconds, whatever ran on the devices before."""
    contexts = [device.sim(91), device.sim(92)]
    first, second = (device.get(ctx) for ctx in contexts)
    ahead, behind = first.new_stream(), first.new_stream()
    ahead.enqueue(int, seconds=50.0)
    another = second.new_stream()

    def work():
        behind.enqueue(int, seconds=1.0)
        another.wait(behind.record())
        another.enqueue(int, seconds=0.5)

    assert [simulated.seconds_of(work, contexts) for _ in range(2)] == [1.5, 1.5]
    assert first.clock == 52.5
    assert second.clock == 53.0


@pytest.mark.parametrize("contexts", [[], [device.sim(91), device.cpu()]])
def test_seconds_need_simulated_devices(contexts):
    """``seconds_of`` raises DeviceError for no devices or for a device that is not simulated."""
    with pytest.raises(DeviceError, match="needs simulated devices"):
        simulated.seconds_of(int, contexts)
