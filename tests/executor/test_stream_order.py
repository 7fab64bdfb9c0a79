"""Memory that is freed while a stream still works on it: which request gets it, and when."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place as where
from tests.executor.dynamic_runs import SIMULATED, deep, run, wait_until_freed
from weftplan import device, storage
from weftplan.errors import MXNetError
from weftplan.storage import (
    AutoGrowth,
    LimitResource,
    NaiveBestFit,
    NaivePool,
    PoisonResource,
    RawResource,
    StatisticsResource,
)
from weftplan.storage.recording import address_of
from weftplan.storage.stream_order import StreamOrder, late, settle


@pytest.mark.shows("FLAGS_fast_eager_deletion_mode")
@pytest.mark.parametrize("order", ["lazy", "random"])
def test_fast_eager_deletion_mode(dynamic, order):
    """In fast mode a result reuses the memory of results whose readers have been enqueued, and the peak is smaller.

    In both modes the values are those of a static plan.
    """
    dynamic.delenv("WEFTPLAN_EXECUTOR_STRATEGY")
    _, expected = run(mx.cpu(47), deep, grad_req="null")
    dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    held = {}
    for mode in ("1", "0"):
        dynamic.setenv("FLAGS_fast_eager_deletion_mode", mode)
        ctx = mx.sim(next(SIMULATED))
        device.get(ctx).configure(order=order, seed=3)
        resource = PoisonResource(StatisticsResource(AutoGrowth(device.get(ctx))))
        # One worker enqueues everything, so that freed memory is available to the next step.
        with storage.using(resource), mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", gpu_workers=1)):
            executor = deep().simple_bind(ctx, grad_req="null", data=(20, 30))
            rng = np.random.RandomState(0)
            for _, array in sorted(executor.arg_dict.items()):
                array[:] = rng.rand(*array.shape) - 0.5
            mx.nd.waitall()
            resource.reset_peaks()
            before = resource.statistics().requested_bytes
            total = executor.forward(is_train=False)[0].asnumpy()
            held[mode] = resource.upstream.statistics().peak_requested_bytes - before
            np.testing.assert_array_equal(total, expected[1])
            del executor, array
            assert wait_until_freed(resource).requested_bytes == 0
    assert held["1"] <= 3 * 4000 + 200
    assert held["0"] > held["1"]


@pytest.fixture
def place():
    """A new simulated device."""
    return device.get(mx.sim(next(SIMULATED)))


def free_during_work(resource, stream, ran, number, nbytes=512):
    """Allocate memory, free it while ``stream`` has work on it, and return its address.

    The work appends ``number`` to ``ran``.
    """
    allocation = resource.allocate(nbytes)
    address = address_of(allocation.raw)
    with stream:
        stream.device.launch(lambda: ran.append(number))
        resource.free_behind(allocation)
    return address


def next_address(resource, nbytes=512):
    """Return the address of a new allocation of ``nbytes``, which is freed immediately."""
    allocation = resource.allocate(nbytes)
    address = address_of(allocation.raw)
    resource.free(allocation)
    return address


POOLS = [NaivePool, AutoGrowth, lambda where: PoisonResource(AutoGrowth(where)),
         lambda where: StatisticsResource(NaiveBestFit(where, first=1 << 20))]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
def test_next_user_waits_for_a_stream(place, pool):
    """Freed memory goes to the same stream without a wait, to another stream after a wait on the device, and to a host
    after a wait of the host.

    The pool's statistics count it as free immediately.
    """
    resource, first, second, ran = pool(place), place.new_stream(), place.new_stream(), []
    address = free_during_work(resource, first, ran, 1)
    assert resource.statistics().requested_bytes == 0
    with first:
        assert next_address(resource) == address
    assert ran == []
    address = free_during_work(resource, first, ran, 2)
    with second:
        assert next_address(resource) == address
        place.launch(lambda: ran.append(3))
    assert ran == []
    second.synchronize()
    assert ran == [1, 2, 3]
    address = free_during_work(resource, first, ran, 4)
    assert next_address(resource) == address
    assert ran == [1, 2, 3, 4]


@pytest.mark.parametrize("pool", [NaivePool, lambda where: AutoGrowth(where, chunk=4096)])
@pytest.mark.parametrize("emptied", [False, True])
def test_pool_prefers_blocks_of_the_same_stream(place, pool, emptied):
    """Of free blocks of one size, a stream gets those that it freed itself, from free lists and from the cache."""
    resource, streams, ran = pool(place), [place.new_stream() for _ in range(3)], []
    held = [resource.allocate(512) for _ in range(12)]
    owner = {address_of(one.raw): number % 3 for number, one in enumerate(held)}
    # Every second block stays in use, so that no two free blocks are merged.
    for number, allocation in enumerate(held):
        if number % 2:
            continue
        with streams[number % 3]:
            place.launch(lambda number=number: ran.append(number))
            resource.free_behind(allocation)
    if emptied:
        with resource._lock:
            resource._drain()
    for number in (0, 1, 2, 2, 1, 0):
        with streams[number]:
            assert owner[address_of(resource.allocate(512).raw)] == number
    assert ran == []


def test_blocks_are_cut_and_merged_while_streams_work_on_them(place):
    """A part of a freed block waits for the work on this block, and a merged block for the work on all parts."""
    resource, ran = AutoGrowth(place, chunk=4096), []
    streams = [place.new_stream() for _ in range(3)]
    held = [resource.allocate(1024) for _ in range(4)]
    held.sort(key=lambda one: address_of(one.raw))
    for number, allocation in enumerate(held[:2]):
        with streams[number]:
            place.launch(lambda number=number: ran.append(number))
            resource.free_behind(allocation)
    with streams[2]:
        part = resource.allocate(512)  # the high end of the second stream's block
        place.launch(lambda: ran.append("part"))
    streams[2].synchronize()
    assert ran == [1, "part"]
    resource.free(part)
    with streams[2]:
        whole = resource.allocate(2048)
        place.launch(lambda: ran.append("whole"))
    streams[2].synchronize()
    assert ran == [1, "part", 0, "whole"]
    for allocation in (whole, *held[2:]):
        resource.free(allocation)
    assert resource.statistics().live == 0


@pytest.mark.parametrize("pool", [RawResource, AutoGrowth, NaivePool])
def test_memory_goes_back_to_the_system_when_its_streams_are_over(place, pool):
    """A pool returns memory to the device only after the work on it has ended."""
    resource, stream, seen = pool(place), place.new_stream(), []
    allocation = resource.allocate(4096)
    allocation.raw.fill(7)
    raw = allocation.raw
    with stream:
        place.launch(lambda: seen.append(int(raw[0])))
        resource.free_behind(allocation)
    resource.empty_cache()
    assert seen == [7]
    assert place.used == 0


def test_limit_counts_freed_memory_as_free(place):
    """Memory that was freed during work does not count against a limit, and is reused without a wait."""
    resource, stream, ran = LimitResource(AutoGrowth(place), 4096), place.new_stream(), []
    free_during_work(resource, stream, ran, 1, 4096)
    with stream:
        next_address(resource, 4000)
    assert not ran


def test_host_memory_waits_for_its_copy(place):
    """Host memory is reused only after its copy has ended; other requests get other memory without a wait."""
    resource, stream, ran = NaivePool(device.get(mx.cpu(49))), place.new_stream(), []
    address = free_during_work(resource, stream, ran, 1, 4096)
    assert len(late) == 1
    assert next_address(resource, 4096) != address
    assert not ran
    assert settle(block=True)
    assert ran == [1]
    assert not late
    assert resource.statistics().live == 0


def test_second_free_during_work_is_refused(place):
    """Freeing memory twice during work raises an error."""
    resource, stream = AutoGrowth(place), place.new_stream()
    allocation = resource.allocate(64)
    with stream:
        resource.free_behind(allocation)
        with pytest.raises(MXNetError, match="freed before"):
            resource.free_behind(allocation)


def test_completed_ranges_are_dropped(place):
    """Ranges whose work has ended are dropped, so that at most 512 of 2,000 ranges are listed."""
    order, stream = StreamOrder(), place.new_stream()
    for number in range(2000):
        order.add(1024 * number, 512, stream, stream.record())
        if number % 100 == 0:
            stream.synchronize()
    assert len(order._ranges) <= 512


def chain():
    """Return a chain of results, each smaller than the previous one."""
    net, size = mx.sym.Variable("data"), 4096
    for _ in range(24):
        net = mx.sym.exp(net * 0.01)
        size = int(size * 0.9)
        net = mx.sym.slice_axis(net, axis=1, begin=0, end=size) * 0.5
    return net


def training():
    """Return layers of different widths and a loss."""
    net = mx.sym.Variable("data")
    for k in range(8):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=2048 // (k + 1), name=f"f{k}"), act_type="tanh")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def peak(ctx, symbol, is_train, **workers):
    """Return the peak bytes of the results of one run, without arguments and gradients."""
    resource = StatisticsResource(AutoGrowth(device.get(ctx)))
    with (
        storage.using(resource),
        mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", cpu_workers=1, **workers)),
    ):
        executor = symbol.simple_bind(ctx, grad_req="write" if is_train else "null", data=(64, 4096))
        mx.nd.waitall()
        for _ in range(2):
            before = resource.statistics().requested_bytes
            resource.reset_peaks()
            executor.forward(is_train=is_train)
            if is_train:
                executor.backward()
            mx.nd.waitall()
        actual = resource.statistics().peak_requested_bytes - before
        del executor
        assert wait_until_freed(resource).requested_bytes == 0
    return actual


@pytest.mark.parametrize(("symbol", "is_train"), [(chain, False), (training, True)])
def test_device_peak_is_near_the_host_peak(dynamic, symbol, is_train):
    """On a device with streams, which enqueues all work first, the peak is at most 5 % above that of a host."""
    host = peak(mx.cpu(48), symbol(), is_train)
    assert peak(mx.sim(next(SIMULATED)), symbol(), is_train) <= 1.05 * host


@pytest.mark.parametrize("workers", [2, 3])
def test_peak_with_several_streams(dynamic, workers):
    """With several streams, which reuse their own memory first, the peak is at most 5 % above that of a host."""
    host = peak(mx.cpu(48), training(), True)
    assert peak(mx.sim(next(SIMULATED)), training(), True, gpu_workers=workers) <= 1.05 * host


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_memory_moves_between_streams_of_a_gpu(dynamic, workers):
    """On a stand-in GPU, memory moves between the streams of several workers, and values are those of a static plan."""
    results = []
    for strategy in ("static", "dynamic"):
        dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", strategy)
        with (
            where("standin", gpu_workers=workers) as context,
            storage.using(AutoGrowth(device.get(context(0)), chunk=1 << 16)),
        ):
            executor, values = run(context(0))
            results.append(values)
            del executor
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
