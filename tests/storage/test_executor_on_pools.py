"""A planned executor takes its memory from the current resource and frees all of it."""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, storage
from weftplan.storage import AutoGrowth, LimitResource, NaiveBestFit, NaivePool, RawResource, StatisticsResource

POOLS = {
    "raw": RawResource,
    "naive": NaivePool,
    "auto growth": lambda place: AutoGrowth(place, chunk=1 << 16),
    "best fit": lambda place: NaiveBestFit(place, first=1 << 16),
    "limited": lambda place: LimitResource(AutoGrowth(place), 1 << 30),
}
CONTEXTS = [device.cpu(5), device.cpu_pinned(5), device.sim(5), pytest.param(device.gpu(0), marks=pytest.mark.gpu)]


def train(ctx):
    """Train a small network for three steps.

    Return its results, the bytes that its executor allocated, and the peak of its memory plan.
    """
    data = mx.sym.Variable("data")
    net = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=50, name="one"), act_type="tanh")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10, name="two"), name="softmax")
    executor = net.simple_bind(ctx, data=(20, 30))
    rng = np.random.RandomState(0)
    for name, array in executor.arg_dict.items():
        array[:] = rng.randint(0, 9, array.shape) if "label" in name else rng.rand(*array.shape)
    for _ in range(3):
        executor.forward(is_train=True)
        executor.backward()
        for name, grad in executor.grad_dict.items():
            if "weight" in name or "bias" in name:
                executor.arg_dict[name] -= 0.1 * grad
    values = [executor.outputs[0].asnumpy(), *(executor.arg_dict[n].asnumpy() for n in ("one_weight", "two_bias"))]
    return values, executor.allocated_bytes, executor.memory_plan.peak


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("ctx", CONTEXTS, ids=str)
def test_executor_allocates_the_planned_bytes(ctx, pool):
    """On every pool an executor gives the same bits, allocates exactly the planned bytes and frees them."""
    expected, _, _ = train(device.cpu(4))
    resource = StatisticsResource(POOLS[pool](device.get(ctx)))
    with storage.using(resource):
        values, allocated, peak = train(ctx)
        mx.nd.waitall()
        gc.collect()
        mx.nd.zeros((1,), ctx=ctx).wait_to_read()
        mx.nd.waitall()
        gc.collect()
        mx.nd.waitall()
        planned = [holder.nbytes for holder in resource.holders() if holder.name == "planned"]
    assert planned == []
    assert allocated == peak
    for ours, theirs in zip(values, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
