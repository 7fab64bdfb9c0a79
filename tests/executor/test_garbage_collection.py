"""When a dynamic executor frees results: the flags of Paddle's garbage collector, peaks and order."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

import weftplan as mx
from tests.executor.dynamic_runs import CONTEXTS, deep, run, wait_until_freed
from weftplan import device, storage
from weftplan.executor.dynamic import Collector, DynamicExecutor
from weftplan.storage import AutoGrowth, RawResource, StatisticsResource


@pytest.mark.parametrize("ctx", CONTEXTS, ids=str)
@pytest.mark.parametrize("gb", ["0", "-1", "1e-5", "5"])
@pytest.mark.parametrize("fraction", ["1", "0.4", "0"])
@pytest.mark.parametrize("scope", ["1", "0"])
def test_same_bits_whatever_is_collected(monkeypatch, ctx, gb, fraction, scope):
    """With any setting of the flags, outputs, gradients and states are those of a static executor, and all is freed."""
    _, expected = run(ctx)
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", gb)
    monkeypatch.setenv("FLAGS_memory_fraction_of_eager_deletion", fraction)
    monkeypatch.setenv("FLAGS_eager_delete_scope", scope)
    resource = StatisticsResource(AutoGrowth(device.get(ctx)))
    with storage.using(resource):
        executor, actual = run(ctx)
        assert type(executor) is DynamicExecutor
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        del executor
        assert wait_until_freed(resource).requested_bytes == 0


def measure_run(symbol=deep, is_train=True, backward=True):
    """Run once on a separate context.

    Returns:
        The peak of planned memory, the planned bytes in use at the end, and the peak of the static plan, in bytes.
    """
    ctx = mx.cpu(46)
    resource = StatisticsResource(RawResource(device.get(ctx)))
    # NaiveEngine runs one operation at a time; on other engines the peak depends on overlaps.
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
        assert wait_until_freed(resource).requested_bytes == 0
    return peak, end, total


@pytest.mark.shows("WEFTPLAN_EXECUTOR_STRATEGY")
def test_each_result_goes_back_after_its_last_reader(dynamic):
    """In inference a chain of twenty results of 4,000 bytes uses at most three of them at a time."""
    peak, end, total = measure_run(backward=False, is_train=False)
    assert total >= 20 * 4000
    assert peak <= 3 * 4000 + 200
    assert end <= 100, "a small output and nothing else"


def test_the_peak_is_below_the_plan_without_sharing(dynamic):
    """In training the peak is at least 5 % below the static plan, and only outputs are in use between runs."""
    peak, end, total = measure_run()
    assert peak < 0.95 * total
    assert end <= 4100


@pytest.mark.shows("FLAGS_eager_delete_tensor_gb")
def test_eager_delete_tensor_gb(dynamic):
    """A negative threshold frees nothing during a run, 0 frees each result immediately, and 30,000 bytes in batches."""
    peaks = []
    for gb in ("0", str(30_000 / 2**30), "-1"):
        dynamic.setenv("FLAGS_eager_delete_tensor_gb", gb)
        peaks.append(measure_run(backward=False, is_train=False)[0])
    at_once, batches, never = peaks
    assert at_once < batches <= never
    assert never >= 20 * 4000


def test_threshold_counts_gib(dynamic):
    """The threshold is in GiB and exact: one byte more than five results delays freeing by one more result."""
    dynamic.setenv("MXNET_EXEC_BULK_EXEC_INFERENCE", "0")  # results are freed after each node
    peaks = []
    for nbytes in (20_000, 20_001):
        dynamic.setenv("FLAGS_eager_delete_tensor_gb", repr(nbytes / 2**30))
        peaks.append(measure_run(backward=False, is_train=False)[0])
    assert peaks == [6 * 4000, 7 * 4000]  # includes the result in progress


@pytest.mark.shows("FLAGS_memory_fraction_of_eager_deletion")
def test_memory_fraction_of_eager_deletion(dynamic):
    """A fraction of 1 frees all results, 0 frees none, and 0.5 gives a peak between these."""
    peaks = []
    for fraction in ("1", "0.5", "0"):
        dynamic.setenv("FLAGS_memory_fraction_of_eager_deletion", fraction)
        peaks.append(measure_run(backward=False, is_train=False)[0])
    assert peaks[0] < peaks[1] < peaks[2]


def test_the_largest_are_collected_first(dynamic):
    """With a fraction of 0.01 only the largest result is freed, as a whole."""
    dynamic.setenv("FLAGS_memory_fraction_of_eager_deletion", "0.01")

    def symbol():
        wide = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5000, name="wide")
        net = mx.sym.FullyConnected(wide, num_hidden=10, name="narrow")
        for k in range(5):
            net = mx.sym.FullyConnected(net, num_hidden=10, name=f"fc{k}")
        return net

    ctx = mx.cpu(47)
    executor = symbol().simple_bind(ctx, data=(20, 30), grad_req="null")
    executor._prepare_once()
    chosen = {chunk.name for ends in executor._memory.local[False].values() for chunk in ends}
    assert chosen == {"wide"}


@pytest.mark.shows("FLAGS_eager_delete_scope")
def test_eager_delete_scope(dynamic):
    """Results that are not freed during a run are freed at its end, or stay in use if the flag is 0."""
    dynamic.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    ends = []
    for scope in ("1", "0"):
        dynamic.setenv("FLAGS_eager_delete_scope", scope)
        ends.append(measure_run(backward=False, is_train=False)[1])
    assert ends[0] <= 100
    assert ends[1] >= 20 * 4000


def test_chunk_freed_inside_a_segment_has_no_other_user():
    """A step that frees a chunk inside a segment runs after all other users of the chunk.

    This holds in random programs, for all orders that the engine may choose. A chain frees all its chunks inside
    segments.
    """
    for seed in range(200):
        rng = random.Random(seed)
        chunks = [SimpleNamespace(var=object(), nbytes=1, context=mx.cpu()) for _ in range(5)]
        segments = []
        for number in range(rng.randint(1, 8)):
            used = rng.sample(chunks, rng.randint(1, 3))
            writes = [chunk.var for chunk in used if rng.random() < 0.5]
            reads = [chunk.var for chunk in used if chunk.var not in writes]
            step = SimpleNamespace(nid=number, bind=1, used=used, context=mx.cpu())
            segments.append(SimpleNamespace(steps=[step], reads=reads, writes=writes, pushed=rng.random() < 0.9))
        local = Collector().settle(segments, [], lambda step: step.used, inside=True)
        before = [set() for _ in segments]  # the segments that each waits for, without bit masks
        for later, segment in enumerate(segments):
            for earlier in range(later):
                second = segments[earlier]
                clash = set(map(id, second.writes)) & set(map(id, [*segment.reads, *segment.writes]))
                clash |= set(map(id, second.reads)) & set(map(id, segment.writes))
                if clash and second.pushed and segment.pushed:
                    before[later] |= {earlier} | before[earlier]
        for number, dropped in local[True].items():
            for chunk in dropped:
                users = {k for k, segment in enumerate(segments) if chunk in segment.steps[0].used}
                assert users <= before[number] | {number}, seed
    chain = [SimpleNamespace(var=object(), nbytes=1, context=mx.cpu()) for _ in range(4)]
    segments = [
        SimpleNamespace(
            steps=[SimpleNamespace(nid=k, bind=1, used=chain[k : k + 2], context=mx.cpu())],
            reads=[chain[k].var],
            writes=[chain[k + 1].var],
            pushed=True,
        )
        for k in range(3)
    ]
    assert sum(map(len, Collector().settle(segments, [], lambda step: step.used, inside=True)[True].values())) == 4
