"""The executor strategy ``dynamic``: the bits of the plan, memory only between first and last use, Paddle's flags."""

import gc
import itertools
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, storage
from weftplan.errors import BindError, ConfigError, MXNetError, OutOfMemoryError
from weftplan.executor.collecting import Collector
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.ndarray import stream_order
from weftplan.ndarray.release import drain
from weftplan.storage import AutoGrowth, LimitResource, PoisonResource, RawResource, StatisticsResource

SIMULATED = itertools.count(4500)
"""A simulated device of its own for each use."""
CONTEXTS = [device.cpu(45), device.sim(45)]


@pytest.fixture
def dynamic(monkeypatch):
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    return monkeypatch


def network():
    """Branches, an identity in place, dropout, batch normalisation with states, two outputs."""
    data = mx.sym.Variable("data")
    net = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=40, name="one"), act_type="tanh", name="tanh")
    left = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=30, name="left"), act_type="relu", name="relu")
    right = mx.sym.Dropout(mx.sym.FullyConnected(net, num_hidden=30, name="right"), p=0.5, name="drop")
    both = mx.sym.BatchNorm(mx.sym.identity(left + right), fix_gamma=False, name="norm")
    last = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(both, num_hidden=10, name="two"), name="softmax")
    return mx.sym.Group([last, mx.sym.BlockGrad(both, name="shown")])


def deep():
    """A long chain: most results are dead soon in a run without a backward part."""
    net = mx.sym.Variable("data")
    for k in range(20):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=50, name=f"fc{k}"), act_type="tanh")
    return mx.sym.sum(net, name="total")


def run(ctx, symbol=network, steps=3, **bind):
    """What a few steps compute: outputs, gradients and states, bit for bit."""
    mx.random.seed(7)
    executor = symbol().simple_bind(ctx, data=(20, 30), **bind)
    rng = np.random.RandomState(0)
    for name, array in sorted(executor.arg_dict.items()):
        array[:] = rng.randint(0, 9, array.shape) if "label" in name else rng.rand(*array.shape) - 0.5
    found = []
    for _ in range(steps):
        executor.forward(is_train=True)
        executor.backward(*([mx.nd.ones(o.shape, ctx=ctx) for o in executor.outputs],) if symbol is deep else ())
        found += [a.asnumpy() for a in (*executor.outputs, *executor.aux_arrays)]
        found += [a.asnumpy() for a in executor.grad_arrays if a is not None]
        executor.forward(is_train=False)
        found += [a.asnumpy() for a in executor.outputs]
    return executor, found


def settled(resource):
    """Statistics once nothing is live any more, or after a minute: what a worker drops last goes a moment later."""
    end = time.monotonic() + 60
    while True:
        gc.collect()
        drain()
        mx.nd.waitall()
        drain()
        found = resource.statistics()
        if found.requested_bytes == 0 or time.monotonic() > end:
            return found


@pytest.mark.parametrize("ctx", CONTEXTS, ids=str)
@pytest.mark.parametrize("gb", ["0", "-1", "1e-5", "5"])
@pytest.mark.parametrize("fraction", ["1", "0.4", "0"])
@pytest.mark.parametrize("scope", ["1", "0"])
def test_same_bits_whatever_is_collected(monkeypatch, ctx, gb, fraction, scope):
    """Outputs, gradients and states are those of the static plan, in training and inference, run after run."""
    _, expected = run(ctx)
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", gb)
    monkeypatch.setenv("FLAGS_memory_fraction_of_eager_deletion", fraction)
    monkeypatch.setenv("FLAGS_eager_delete_scope", scope)
    resource = StatisticsResource(AutoGrowth(device.get(ctx)))
    with storage.using(resource):
        executor, found = run(ctx)
        assert type(executor) is DynamicExecutor
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        del executor
        assert settled(resource).requested_bytes == 0


@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def test_same_bits_on_every_engine(dynamic, engine):
    """Order and thread count change neither results nor what is left."""
    dynamic.delenv("WEFTPLAN_EXECUTOR_STRATEGY")
    _, expected = run(mx.cpu(45))
    dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    with mx.engine.using(mx.engine.create(engine)):
        for ours, theirs in zip(run(mx.cpu(45))[1], expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        mx.nd.waitall()


def held_by(symbol=deep, is_train=True, backward=True):
    """(peak, at the end) of planned memory in one run on a context of its own."""
    ctx = mx.cpu(46)
    resource = StatisticsResource(RawResource(device.get(ctx)))
    # One after the other: on other engines the peak depends on how operations overlap.
    with storage.using(resource), mx.engine.using(mx.engine.create("NaiveEngine")):
        executor = symbol().simple_bind(ctx, data=(20, 30), grad_req="write" if backward else "null")
        mx.nd.waitall()
        before = resource.statistics().requested_bytes
        resource.reset_peaks()
        executor.forward(is_train=is_train)
        if backward and is_train:
            executor.backward([mx.nd.ones(o.shape, ctx=ctx) for o in executor.outputs])
        mx.nd.waitall()
        now = resource.statistics()
        peak, end, total = now.peak_requested_bytes - before, now.requested_bytes - before, executor.memory_plan.peak
        del executor
        assert settled(resource).requested_bytes == 0
    return peak, end, total


@pytest.mark.shows("WEFTPLAN_EXECUTOR_STRATEGY")
def test_each_result_goes_back_after_its_last_reader(dynamic):
    """A chain without a backward part holds two results at a time, of 4,000 bytes each, not twenty."""
    peak, end, total = held_by(backward=False, is_train=False)
    assert total >= 20 * 4000
    assert peak <= 3 * 4000 + 200
    assert end <= 100, "a small output and nothing else"


def test_the_peak_is_below_the_plan_without_sharing(dynamic):
    """In training too, and nothing but outputs is held between runs."""
    peak, end, total = held_by()
    assert peak < 0.95 * total
    assert end <= 4100


@pytest.mark.shows("FLAGS_eager_delete_tensor_gb")
def test_eager_delete_tensor_gb(dynamic):
    """Below 0 nothing goes back within the run; at 0 at once; above 0 in batches, which lie between the two."""
    peaks = []
    for gb in ("0", str(30_000 / 2**30), "-1"):
        dynamic.setenv("FLAGS_eager_delete_tensor_gb", gb)
        peaks.append(held_by(backward=False, is_train=False)[0])
    at_once, batches, never = peaks
    assert at_once < batches <= never
    assert never >= 20 * 4000


@pytest.mark.shows("FLAGS_memory_fraction_of_eager_deletion")
def test_memory_fraction_of_eager_deletion(dynamic):
    """0 collects nothing, 1 everything, and half of the bytes lies between."""
    peaks = []
    for fraction in ("1", "0.5", "0"):
        dynamic.setenv("FLAGS_memory_fraction_of_eager_deletion", fraction)
        peaks.append(held_by(backward=False, is_train=False)[0])
    assert peaks[0] < peaks[1] < peaks[2]


def test_the_largest_are_collected_first(dynamic):
    """With a small share only the one large result goes back, whole; the small ones stay until the run is over."""
    dynamic.setenv("FLAGS_memory_fraction_of_eager_deletion", "0.01")

    def symbol():
        wide = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5000, name="wide")
        net = mx.sym.FullyConnected(wide, num_hidden=10, name="narrow")
        for k in range(5):
            net = mx.sym.FullyConnected(net, num_hidden=10, name=f"fc{k}")
        return net

    ctx = mx.cpu(47)
    executor = symbol().simple_bind(ctx, data=(20, 30), grad_req="null")
    executor._prepare()
    chosen = {chunk.name for ends in executor._memory.local[False].values() for chunk in ends}
    assert chosen == {"wide"}


@pytest.mark.shows("FLAGS_eager_delete_scope")
def test_eager_delete_scope(dynamic):
    """What is not collected goes back at the end of the run, or stays for the next."""
    dynamic.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    ends = []
    for scope in ("1", "0"):
        dynamic.setenv("FLAGS_eager_delete_scope", scope)
        ends.append(held_by(backward=False, is_train=False)[1])
    assert ends[0] <= 100
    assert ends[1] >= 20 * 4000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FLAGS_eager_delete_tensor_gb", "much"),
        ("FLAGS_memory_fraction_of_eager_deletion", "1.5"),
        ("FLAGS_memory_fraction_of_eager_deletion", "-0.1"),
        ("FLAGS_eager_delete_scope", "maybe"),
        ("WEFTPLAN_EXECUTOR_STRATEGY", "lazy"),
    ],
)
def test_bad_settings(dynamic, name, text):
    """The message names the variable and what is legal; nothing is bound."""
    dynamic.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}='{text}' is not legal"):
        network().simple_bind(mx.cpu(), data=(20, 30))


def test_backward_twice_is_refused(dynamic):
    """The results of forward are gone."""
    executor, _ = run(mx.cpu(45), steps=1)
    executor.forward(is_train=True)
    executor.backward()
    with pytest.raises(MXNetError, match=r"given back \(WEFTPLAN_EXECUTOR_STRATEGY=dynamic\); run forward"):
        executor.backward()


def test_a_budget_needs_a_plan(dynamic):
    """Both at once contradict each other."""
    with pytest.raises(BindError, match="unset WEFTPLAN_EXECUTOR_STRATEGY"):
        network().simple_bind(mx.cpu(), data=(20, 30), memory_budget="1GB")


def test_a_monitor_sees_every_result(dynamic):
    """Nothing goes back while somebody looks, and the values are those of the static executor."""
    shown = {}

    def look(name, array):
        shown.setdefault(name, []).append(array.asnumpy())

    for strategy in ("static", "dynamic"):
        dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", strategy)
        mx.random.seed(3)
        executor = network().simple_bind(mx.cpu(45), data=(20, 30))
        executor.set_monitor_callback(look)
        for array in executor.arg_arrays:
            array[:] = 0.25
        executor.forward(is_train=True)
        mx.nd.waitall()
    named = {name: arrays for name, arrays in shown.items() if len(arrays) == 2}  # not those with numbers for names
    for name, (ours, theirs) in named.items():
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert len(named) > 8


def test_running_out_in_the_middle_of_a_run(dynamic):
    """The operation that got no memory fails with the report, and the next run with room is right."""
    ctx = mx.cpu(48)
    resource = LimitResource(RawResource(device.get(ctx)), 1 << 30)
    with storage.using(resource):
        executor, expected = run(ctx, deep, steps=1)
        mx.nd.waitall()
        resource.limit = resource.statistics().requested_bytes + 6000
        executor.forward(is_train=True)
        with pytest.raises(OutOfMemoryError, match="out of memory on cpu"):
            executor.outputs[0].asnumpy()
        resource.limit = 1 << 30
        executor.forward(is_train=True)
        np.testing.assert_array_equal(executor.outputs[0].asnumpy(), expected[0])
        executor.backward([mx.nd.ones(o.shape, ctx=ctx) for o in executor.outputs])
        mx.nd.waitall()
        del executor
        assert settled(resource).requested_bytes == 0


def test_reshape(dynamic):
    """An executor for another batch size is dynamic too, and computes the same."""
    executor, _ = run(mx.cpu(45), steps=1)
    smaller = executor.reshape(data=(5, 30), softmax_label=(5,))
    assert type(smaller) is DynamicExecutor
    smaller.forward(is_train=False, data=executor.arg_dict["data"][:5])
    executor.forward(is_train=False)
    np.testing.assert_allclose(smaller.outputs[0].asnumpy(), executor.outputs[0].asnumpy()[:5], rtol=1e-6)


def test_calls_are_kept_for_memory_that_comes_again(dynamic):
    """Steps that find the same addresses make no call anew, values follow the arguments all the same, and what is kept
    stays below its limit."""
    net, shapes = mx.sym.Variable("x"), {"x": (8, 8)}
    for k in range(6):
        net = mx.sym.tanh(mx.sym.FullyConnected(net, num_hidden=8, name=f"fc{k}"))
    executor = mx.sym.MakeLoss(net).simple_bind(mx.cpu(), **shapes)
    for turn in range(6):
        for array in executor.arg_dict.values():
            array[:] = 0.1 * (turn + 1)
        executor.forward(is_train=True)
        executor.backward()
        got = executor.outputs[0].asnumpy()
        want = np.full((8, 8), 0.1 * (turn + 1), "float32")
        weight = np.float32(0.1 * (turn + 1))
        for _ in range(6):
            want = np.tanh(want @ np.full((8, 8), weight, "float32") + weight)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        mx.nd.waitall()
        if turn == 3:
            made = len(executor._memory._calls)
    assert 0 < len(executor._memory._calls) <= 2 * made
    assert executor._memory._remembered <= 4 << 20


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


def test_what_goes_back_inside_a_segment_has_no_other_user_then():
    """Programs of random segments: whoever gives a chunk back inside comes behind every other user in all orders that
    the engine may take, which are those of a serial search; and a chain gives everything back inside."""
    for seed in range(200):
        rng = random.Random(seed)
        chunks = [SimpleNamespace(var=object(), nbytes=1) for _ in range(5)]
        segments = []
        for number in range(rng.randint(1, 8)):
            used = rng.sample(chunks, rng.randint(1, 3))
            writes = [chunk.var for chunk in used if rng.random() < 0.5]
            reads = [chunk.var for chunk in used if chunk.var not in writes]
            step = SimpleNamespace(nid=number, bind=1, used=used)
            segments.append(SimpleNamespace(steps=[step], reads=reads, writes=writes, pushed=rng.random() < 0.9))
        local = Collector().settle(segments, [], lambda step: step.used, inside=True)
        before = [set() for _ in segments]  # whom each must wait for, found without masks
        for later, segment in enumerate(segments):
            for earlier in range(later):
                other = segments[earlier]
                clash = set(map(id, other.writes)) & set(map(id, [*segment.reads, *segment.writes]))
                clash |= set(map(id, other.reads)) & set(map(id, segment.writes))
                if clash and other.pushed and segment.pushed:
                    before[later] |= {earlier} | before[earlier]
        for number, dropped in local[True].items():
            for chunk in dropped:
                users = {k for k, segment in enumerate(segments) if chunk in segment.steps[0].used}
                assert users <= before[number] | {number}, seed
    chain = [SimpleNamespace(var=object(), nbytes=1) for _ in range(4)]
    segments = [
        SimpleNamespace(
            steps=[SimpleNamespace(nid=k, bind=1, used=chain[k : k + 2])],
            reads=[chain[k].var],
            writes=[chain[k + 1].var],
            pushed=True,
        )
        for k in range(3)
    ]
    assert sum(map(len, Collector().settle(segments, [], lambda step: step.used, inside=True)[True].values())) == 4
