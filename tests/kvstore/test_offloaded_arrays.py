"""Stores and tasks on mostly offloaded arrays: an operation waits until there is memory for all its arrays.

There is room for the arrays of one operation and some more, and several workers need memory at the same time. If each
worker reserved a part and then waited for more, they would deadlock.
"""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, engine, storage
from weftplan.ndarray.spill import spilling
from weftplan.storage import LimitResource, NaivePool

SIZE = 1 << 18
"""Bytes of each array."""
KEYS, EACH = 6, 4


@pytest.fixture(params=["cpu", "sim"])
def context(request, folder):
    """Return a context with room for nine arrays. An operation needs at most six; the rest are offloaded."""
    ctx = getattr(mx, request.param)(9240)
    targets = f"file:{folder}:64MB" if request.param == "cpu" else "host:64MB"
    with (
        engine.using(engine.create("ThreadedEnginePerDevice", cpu_workers=4)) as current,
        spilling.using(targets),
        storage.using(LimitResource(NaivePool(device.get(ctx)), 9 * SIZE)) as pool,
    ):
        yield ctx
        gc.collect()
        mx.nd.waitall()
        assert pool.statistics().requested_bytes == 0
        current.stop()


@pytest.mark.parametrize(
    ("kind", "compression", "each"), [("local", None, 1), ("device", None, 1), ("device", "2bit", 0.5)]
)
def test_sums_and_copies(context, kind, compression, each):
    """Pulls of six keys, which all need memory at the same time, return the sums of the (compressed) gradients."""
    kv = mx.kv.create(kind)
    if compression:
        kv.set_gradient_compression({"type": compression, "threshold": 0.5})
    gradients = {key: [mx.nd.full((SIZE // 4,), 1.0, ctx=context) for _ in range(EACH)] for key in range(KEYS)}
    for key in range(KEYS):
        kv.init(key, mx.nd.zeros((SIZE // 4,), ctx=context))
    outs = {key: [mx.nd.empty((SIZE // 4,), ctx=context) for _ in range(EACH)] for key in range(KEYS)}
    for key in range(KEYS):
        kv.push(key, gradients[key], priority=-key)
    for key in range(KEYS):
        kv.pull(key, outs[key], priority=-key)
    for key in range(KEYS):
        for out in outs[key]:
            np.testing.assert_array_equal(out.asnumpy(), EACH * each)
    del out
    gradients.clear()
    outs.clear()


def test_tasks(context):
    """Six tasks, more than there are workers, each add two arrays to a third; three rounds give the exact sums."""
    arrays = [mx.nd.full((SIZE // 4,), float(number), ctx=context) for number in range(3 * KEYS)]

    def add(total, first, second):
        total += first
        total += second

    for _ in range(3):
        for number in range(0, len(arrays), 3):
            mx.engine.submit(add, *arrays[number : number + 3], writes=[arrays[number]])
    for number, array in enumerate(arrays):
        want = number if number % 3 else number + 3 * (2 * number + 3)
        np.testing.assert_array_equal(array.asnumpy(), want)
    del array
    arrays.clear()
