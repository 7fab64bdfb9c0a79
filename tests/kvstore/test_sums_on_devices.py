"""Sums on a GPU or a simulated device take one launch, and have the precision of sums on the host."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from tests import standin_cupy
from tests.contract.devices import place


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_a_sum_on_a_gpu_is_one_launch(count):
    """A sum of any number of gradients of one GPU takes one launch, and a copy into the stored value."""
    with standin_cupy.installed("NaiveEngine"):
        kv = mx.kv.create("device")
        kv.init("w", mx.nd.zeros((50,), ctx=mx.gpu(0)))
        rng = np.random.default_rng(count)
        values = [rng.standard_normal(50).astype(np.float32) for _ in range(count)]
        gradients = [mx.nd.array(value, ctx=mx.gpu(0)) for value in values]
        kv.push("w", gradients)
        mx.nd.waitall()
        standin_cupy.meter.reset()
        kv.push("w", gradients)
        mx.nd.waitall()
        launches = standin_cupy.meter.launches
        assert launches[f"weftplan_sum_{count}"] == 1, launches
        assert standin_cupy.meter.total == 2, launches  # and the copy into the stored value
        out = mx.nd.empty((50,), ctx=mx.gpu(0))
        kv.pull("w", out)
        want = values[0].copy()
        for value in values[1:]:
            want += value
        np.testing.assert_array_equal(out.asnumpy(), want)


@pytest.mark.parametrize("where", ["cpu", "sim", "standin"])
def test_small_terms_of_half_precision_are_not_lost(where):
    """The float16 sum 2048 + 16 x 1 is 2064 on the host, a simulated device and a stand-in GPU."""
    with place(where) as context:
        kv = mx.kv.create("device")
        kv.init("w", mx.nd.zeros((3,), ctx=context(0), dtype="float16"))
        kv.push("w", [mx.nd.full((3,), value, ctx=context(0), dtype="float16") for value in [2048] + [1] * 16])
        out = mx.nd.empty((3,), ctx=context(0), dtype="float16")
        kv.pull("w", out)
        assert out.tolist() == [2064] * 3
