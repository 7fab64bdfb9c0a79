"""Memory that goes back while a stream still works on it: who gets it, and when."""

import numpy as np
import pytest

import weftplan as mx
from tests.executor.dynamic_runs import SIMULATED, deep, run, settled
from weftplan import device, storage
from weftplan.ndarray.memory import stream_order
from weftplan.storage import AutoGrowth, LimitResource, PoisonResource, RawResource, StatisticsResource


@pytest.fixture
def dynamic(monkeypatch):
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    return monkeypatch


@pytest.mark.shows("FLAGS_fast_eager_deletion_mode")
@pytest.mark.parametrize("order", ["lazy", "random"])
def test_fast_eager_deletion_mode(dynamic, order):
    """Under it a result gets the memory of one whose readers have been enqueued, so few are taken from the pool;
    without it each takes memory anew, when what had it is over. The values are those of the plan."""
    dynamic.delenv("WEFTPLAN_EXECUTOR_STRATEGY")
    _, expected = run(mx.cpu(47), deep, grad_req="null")
    dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    taken = {}
    for mode in ("1", "0"):
        dynamic.setenv("FLAGS_fast_eager_deletion_mode", mode)
        ctx = mx.sim(next(SIMULATED))
        device.get(ctx).configure(order=order, seed=3)
        resource = PoisonResource(StatisticsResource(AutoGrowth(device.get(ctx))))
        # One worker enqueues everything, so that what has been given back is there when the next step looks for it.
        with storage.using(resource), mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", gpu_workers=1)):
            executor = deep().simple_bind(ctx, grad_req="null", data=(20, 30))
            rng = np.random.RandomState(0)
            for _, array in sorted(executor.arg_dict.items()):
                array[:] = rng.rand(*array.shape) - 0.5
            mx.nd.waitall()
            before = resource.statistics().allocations
            total = executor.forward(is_train=False)[0].asnumpy()
            taken[mode] = resource.statistics().allocations - before
            np.testing.assert_array_equal(total, expected[1])
            del executor, array
            assert settled(resource).requested_bytes == 0
    assert taken["0"] >= 20
    assert taken["1"] <= 6


def test_memory_behind_a_stream_is_a_rung_of_the_ladder(dynamic):
    """A request that does not fit beside memory which waits for a stream waits for the stream, and gets it."""
    ctx = mx.sim(next(SIMULATED))
    place = device.get(ctx)
    resource = LimitResource(RawResource(place), 4096)
    stream, ran = place.new_stream(), []
    with storage.using(resource):
        allocation = resource.allocate(4096)
        with stream:
            place.launch(lambda: ran.append(bool(stream_order.waiting)))
            stream_order.give(resource, allocation)
        assert stream_order.take(resource, ctx, 100) is None  # only memory of exactly as many bytes is handed on
        assert not ran
        other = resource.allocate(4000)
        assert ran == [True]
        assert not stream_order.waiting
        resource.free(other)


def test_memory_behind_a_stream_orders_who_takes_it(dynamic):
    """Another stream that takes it waits for the one that had it; the same stream need not, a host waits itself."""
    ctx = mx.sim(next(SIMULATED))
    place = device.get(ctx)
    resource, first, second, ran = RawResource(place), place.new_stream(), place.new_stream(), []

    def given(number):
        allocation = resource.allocate(512)
        with first:
            place.launch(lambda: ran.append(number))
            stream_order.give(resource, allocation)
        return allocation

    allocation = given(1)
    with first:
        assert stream_order.take(resource, ctx, 512) is allocation
    assert ran == []
    resource.free(allocation)
    allocation = given(2)
    with second:
        assert stream_order.take(resource, ctx, 512) is allocation
        place.launch(lambda: ran.append(3))
    second.synchronize()
    assert ran == [1, 2, 3]
    resource.free(allocation)
    allocation = given(4)
    assert stream_order.take(resource, ctx, 512) is allocation
    assert ran == [1, 2, 3, 4]
    resource.free(allocation)
    with first:
        place.launch(lambda: ran.append(5))
        stream_order.give(resource, resource.allocate(512))
    assert resource.statistics().live == 1
    assert stream_order.settle(block=True) == 512
    assert resource.statistics().live == 0
