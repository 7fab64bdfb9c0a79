"""Memory freed while a stream still works on it: its next user, and when."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place as where
from tests.executor.dynamic_runs import SIMULATED, deep, run, settled
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
    """Under it a result gets the memory of one whose readers have been enqueued, so that few are held at once; without
    it memory goes back when what had it is over. The values are those of the plan."""
    dynamic.delenv("WEFTPLAN_EXECUTOR_STRATEGY")
    _, expected = run(mx.cpu(47), deep, grad_req="null")
    dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    held = {}
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
            resource.reset_peaks()
            before = resource.statistics().requested_bytes
            total = executor.forward(is_train=False)[0].asnumpy()
            held[mode] = resource.upstream.statistics().peak_requested_bytes - before
            np.testing.assert_array_equal(total, expected[1])
            del executor, array
            assert settled(resource).requested_bytes == 0
    assert held["1"] <= 3 * 4000 + 200
    assert held["0"] > held["1"]


@pytest.fixture
def place():
    """A simulated device of its own."""
    return device.get(mx.sim(next(SIMULATED)))


def freed(resource, stream, ran, number, nbytes=512):
    """Memory that comes back while ``stream`` still has work; its address."""
    allocation = resource.allocate(nbytes)
    address = address_of(allocation.raw)
    with stream:
        stream.device.launch(lambda: ran.append(number))
        resource.free_behind(allocation)
    return address


def again(resource, nbytes=512):
    """Allocate ``nbytes``, free them at once, and return their address."""
    allocation = resource.allocate(nbytes)
    address = address_of(allocation.raw)
    resource.free(allocation)
    return address


POOLS = [NaivePool, AutoGrowth, lambda where: PoisonResource(AutoGrowth(where)),
         lambda where: StatisticsResource(NaiveBestFit(where, first=1 << 20))]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
def test_memory_behind_a_stream_orders_its_next_user(place, pool):
    """The stream that had it need not wait, another stream waits on the device, a host waits itself. The memory is free
    for the pool's figures as soon as it comes back."""
    resource, first, second, ran = pool(place), place.new_stream(), place.new_stream(), []
    address = freed(resource, first, ran, 1)
    assert resource.statistics().requested_bytes == 0
    with first:
        assert again(resource) == address
    assert ran == []
    address = freed(resource, first, ran, 2)
    with second:
        assert again(resource) == address
        place.launch(lambda: ran.append(3))
    assert ran == []
    second.synchronize()
    assert ran == [1, 2, 3]
    address = freed(resource, first, ran, 4)
    assert again(resource) == address
    assert ran == [1, 2, 3, 4]


@pytest.mark.parametrize("pool", [NaivePool, lambda where: AutoGrowth(where, chunk=4096)])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_pool_prefers_the_blocks_of_the_own_stream(place, pool, emptied):
    """Of free blocks of one size a stream gets those that it need not wait for, from free lists and from the cache: no
    stream waits for another as long as it has a block of its own."""
    resource, streams, ran = pool(place), [place.new_stream() for _ in range(3)], []
    held = [resource.allocate(512) for _ in range(12)]
    owner = {address_of(one.raw): number % 3 for number, one in enumerate(held)}
    # What lies between keeps the blocks apart, so that none is merged with its neighbour.
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
    """A part of such a block is ordered after its own work only, a merged block after the work of all its parts."""
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
    """A simulated device spoils what it gets back: work that is still to come would see it."""
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


def test_a_limit_counts_memory_behind_a_stream_as_free(place):
    """A request that fits next to all live memory is served without a wait."""
    resource, stream, ran = LimitResource(AutoGrowth(place), 4096), place.new_stream(), []
    freed(resource, stream, ran, 1, 4096)
    with stream:
        again(resource, 4000)
    assert not ran


def test_host_memory_goes_back_when_its_copy_is_over(place):
    """Until then it is not reused: later requests take other memory without a wait, unless none is left."""
    resource, stream, ran = NaivePool(device.get(mx.cpu(49))), place.new_stream(), []
    address = freed(resource, stream, ran, 1, 4096)
    assert len(late) == 1
    assert again(resource, 4096) != address
    assert not ran
    assert settle(block=True)
    assert ran == [1]
    assert not late
    assert resource.statistics().live == 0


def test_wrong_frees_behind_a_stream_are_refused(place):
    """As at any free; nothing is listed of them."""
    resource, stream = AutoGrowth(place), place.new_stream()
    allocation = resource.allocate(64)
    with stream:
        resource.free_behind(allocation)
        with pytest.raises(MXNetError, match="freed before"):
            resource.free_behind(allocation)


def test_what_has_passed_is_forgotten(place):
    """The list stays short, however much comes back."""
    order, stream = StreamOrder(), place.new_stream()
    for number in range(2000):
        order.add(1024 * number, 512, stream, stream.record())
        if number % 100 == 0:
            stream.synchronize()
    assert len(order._ranges) <= 512


def chain():
    """Return results that die in sequence, each smaller than the previous."""
    net, size = mx.sym.Variable("data"), 4096
    for _ in range(24):
        net = mx.sym.exp(net * 0.01)
        size = int(size * 0.9)
        net = mx.sym.slice_axis(net, axis=1, begin=0, end=size) * 0.5
    return net


def training():
    """Layers of different widths, with a backward part."""
    net = mx.sym.Variable("data")
    for k in range(8):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=2048 // (k + 1), name=f"f{k}"), act_type="tanh")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def peak(ctx, symbol, is_train, **workers):
    """Return the peak bytes of results, excluding arguments and gradients."""
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
        assert settled(resource).requested_bytes == 0
    return actual


@pytest.mark.parametrize(("symbol", "is_train"), [(chain, False), (training, True)])
def test_a_device_with_streams_holds_no_more_than_a_host(dynamic, symbol, is_train):
    """Within 5 %, though all work is enqueued before the first of it runs."""
    host = peak(mx.cpu(48), symbol(), is_train)
    assert peak(mx.sim(next(SIMULATED)), symbol(), is_train) <= 1.05 * host


@pytest.mark.parametrize("workers", [2, 3])
def test_several_streams_hold_little_more_than_one(dynamic, workers):
    """A stream takes back what it has freed before it waits for another; the peak is the host's, within 5 %."""
    host = peak(mx.cpu(48), training(), True)
    assert peak(mx.sim(next(SIMULATED)), training(), True, gpu_workers=workers) <= 1.05 * host


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_streams_of_a_gpu_hand_memory_on(dynamic, workers):
    """Cut and merged blocks go from stream to stream of several workers: each access is ordered after the previous, and
    the values are those of the plan."""
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
