"""Batches read ahead lie in page-locked memory, and are copied to the devices while the previous step computes."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import GPUS, place
from weftplan import engine, profiler, storage
from weftplan.device.simulated import CostModel, configure
from weftplan.errors import ParameterError
from weftplan.profiler.recorder import OperationRecord

FRESH = itertools.count(20)
"""Numbers of simulated devices that no other test uses."""
ROWS = np.random.default_rng(0).integers(0, 2, (48, 1, 8, 8)).astype("float32")
"""Small integers: with weights of 1 every sum is exact, so its bits do not depend on how BLAS cuts a product."""
LABELS = np.arange(48) % 10


def prefetched_batches(contexts, depth=2, **settings):
    """Return an iterator over six batches of eight that are copied to ``contexts`` ahead."""
    return mx.io.PrefetchingIter(mx.io.NDArrayIter(ROWS, LABELS, batch_size=8), depth=depth, ctx=contexts, **settings)


def trained_weights(contexts, it):
    """Return the weights after two epochs over the batches of ``it``, as bytes by name."""
    mx.random.seed(2)
    module = mx.mod.Module(mx.models.digits("mlp"), context=contexts)
    module.fit(it, num_epoch=2, kvstore="device", optimizer_params={"learning_rate": 0.1})
    return {name: value.asnumpy().tobytes() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize("contexts", [[mx.sim(0)], [mx.sim(0), mx.sim(1)], [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]])
def test_the_same_weights(contexts):
    """Training on batches copied ahead gives the same bits as training on the source's batches."""
    expected = trained_weights(contexts, mx.io.NDArrayIter(ROWS, LABELS, batch_size=8))
    with prefetched_batches(contexts) as it:
        assert trained_weights(contexts, it) == expected


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", GPUS)
def test_the_same_weights_on_gpus(where, count):
    """On GPU contexts, too, training on batches copied ahead gives the bits of training on the source's batches."""
    with place(where) as context:
        contexts = [context(index) for index in range(count)]
        if len(set(contexts)) < count:
            pytest.skip("there is one GPU")
        expected = trained_weights(contexts, mx.io.NDArrayIter(ROWS, LABELS, batch_size=8))
        with prefetched_batches(contexts) as it:
            assert trained_weights(contexts, it) == expected


def test_where_batches_are():
    """Host arrays are page-locked, each device gets its part of the batch, and CPU contexts get no copy."""
    with prefetched_batches([mx.sim(0), mx.sim(1)]) as it:
        batch = it.next()
        assert [a.context for a in (*batch.data, *batch.label)] == [mx.cpu_pinned(0)] * 2
        for array, placed in zip((*batch.data, *batch.label), batch.placed, strict=True):
            assert {key: a.context for key, a in placed.items()} == {
                (mx.sim(0), 0, 4): mx.sim(0),
                (mx.sim(1), 4, 8): mx.sim(1),
            }
            np.testing.assert_array_equal(np.concatenate([a.asnumpy() for a in placed.values()]), array.asnumpy())
    with prefetched_batches(mx.cpu(0)) as it:
        batch = it.next()
        assert (batch.data[0].context, batch.placed) == (mx.cpu(0), [{}, {}])
    with mx.io.PrefetchingIter(mx.io.NDArrayIter(ROWS, LABELS, batch_size=8)) as it:
        assert it.next().placed is None


def test_placed_batches_serve_others():
    """A module on other devices, or with a part of the batch, reads the host arrays and computes the same."""
    mx.random.seed(0)
    others = (mx.sim(0), mx.sim(1), mx.cpu(0), [mx.sim(1), mx.sim(0)])
    modules = [mx.mod.Module(mx.models.digits("mlp"), context=ctx) for ctx in others]
    with prefetched_batches([mx.sim(0), mx.sim(1)]) as it:
        batch, actual = it.next(), []
        for module in modules:
            module.bind(it.provide_data, it.provide_label, for_training=False)
            module.init_params("one")
            module.forward(batch)
            actual.append(module.get_outputs()[0].asnumpy())
        assert all(np.array_equal(one, actual[0]) for one in actual)
        part = mx.io.DataBatch([a[:4] for a in batch.data], [a[:4] for a in batch.label])
        modules[0].forward(part)
        np.testing.assert_array_equal(modules[0].get_outputs()[0].asnumpy(), actual[0][:4])


def slow_copies():
    """Return a fresh simulated device; on its clock, copying a batch takes about as long as a step's kernels."""
    index = next(FRESH)
    return configure(index, cost=CostModel(launch=1e-5, latency=2e-4, bandwidth=1e12))


def epoch_seconds(place, it):
    """Train one epoch and return the virtual seconds that passed on the device."""
    module = mx.mod.Module(mx.models.digits("mlp"), context=place.context)
    module.bind(it.provide_data, it.provide_label)
    module.init_params("one")
    module.init_optimizer(kvstore=None)
    mx.nd.waitall()
    start = place.clock
    for batch in it:
        module.forward_backward(batch)
        module.update()
        module.get_outputs()[0].wait_to_read()
    mx.nd.waitall()
    return place.clock - start


def test_copies_overlap_the_step():
    """With batches copied ahead, an epoch takes less than 0.75 of its virtual time without.

    The trace shows the twelve copies on the copy queue.
    """
    with mx.io.PrefetchingIter(mx.io.NDArrayIter(ROWS, LABELS, batch_size=8), depth=2) as it:
        waiting = epoch_seconds(slow_copies(), it)
    place = slow_copies()
    profiler.set_state("run")
    try:
        with prefetched_batches(place.context) as it:
            ahead = epoch_seconds(place, it)
    finally:
        profiler.set_state("stop")
    assert 0 < ahead < 0.75 * waiting
    copies = [OperationRecord(*record) for record in profiler.recorder.operations]
    copies = [record for record in copies if record.name == "batch"]
    assert len(copies) == 12  # data and labels of six batches
    assert {(record.context, record.queue) for record in copies} == {(place.context, "copy")}


class Counted(mx.io.NDArrayIter):
    """An iterator that counts its calls of ``next``."""

    asked = 0

    def next(self):
        self.asked += 1
        return super().next()


def test_readers_are_at_most_the_depth_ahead():
    """The reader threads read at most ``depth`` batches more than were consumed."""
    source = Counted(ROWS, LABELS, batch_size=8)
    with mx.io.PrefetchingIter(source, depth=2, ctx=mx.sim(2)) as it:
        for used in range(1, 5):
            it.next()
            time.sleep(0.01)
            assert source.asked <= used + 2


def test_memory_of_used_batches_is_used_again():
    """Later epochs reuse the memory of the first: 144 batches need blocks for one epoch and the batches read ahead."""
    ctx, pools = mx.sim(2), [storage.get(where) for where in (mx.sim(2), mx.cpu_pinned(0))]
    before = [pool.statistics() for pool in pools]
    source = mx.io.NDArrayIter(np.zeros((96, 2048), "float32"), batch_size=8)
    with mx.io.PrefetchingIter(source, depth=2, ctx=ctx) as it:
        for _ in range(12):
            for batch in it:
                batch.placed[0][ctx, 0, 8].wait_to_read()
            del batch
            engine.get().wait_for_all()
            it.reset()
    for then, now in zip(before, [pool.statistics() for pool in pools], strict=True):
        assert now.allocations - then.allocations >= 144
        assert now.system_allocations - then.system_allocations <= 2 * (12 + 3)


def test_wrong_contexts():
    """A value that is no context, and a context named twice, raise ParameterError."""
    for wrong in ("gpu", [mx.cpu(0), mx.cpu(0)], [1]):
        with pytest.raises(ParameterError, match="ctx must be a context or a list of contexts"):
            prefetched_batches(wrong)
