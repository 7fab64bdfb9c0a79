"""Gradients by index on a GPU: sorted, added up in the order of the positions, the same bits as on the host."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device
from weftplan.ops.cuda import segments


@pytest.mark.parametrize("count", [2, 64, 2048, 4096, 16384])
def test_keys_are_sorted(count):
    """One tile, two, and many: the same keys come out sorted."""
    rng = np.random.default_rng(count)
    keys = rng.permutation(count).astype(np.uint64) << np.uint64(32) | rng.integers(0, 9, count, np.uint64)
    with place("standin") as context:
        where = device.get(context(0))

        def run():
            made = where.xp.asarray(keys)
            segments.sort(where.xp, made)
            np.testing.assert_array_equal(made.get(), np.sort(keys))

        where.launch(run)


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_embedding_has_the_bits_of_the_host(rows):
    """Large and small terms, few rows and many positions: another order of additions would show."""
    rng = np.random.default_rng(rows)
    index = rng.integers(-2, rows + 2, 300).astype(np.float32)
    head = (rng.standard_normal((300, 5)) * 10.0 ** rng.integers(-6, 6, (300, 1))).astype(np.float32)
    net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=rows, output_dim=5, name="e")
    found = []
    with place("standin") as context:
        for ctx in (mx.cpu(), context(0), context(1)):
            executor = net.simple_bind(ctx, data=(300,), grad_req={"data": "null", "e_weight": "write"})
            executor.forward(is_train=True, data=mx.nd.array(index, ctx=ctx))
            executor.backward(mx.nd.array(head, ctx=ctx))
            found.append(executor.grad_dict["e_weight"].asnumpy())
        del executor
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].view(np.int32), other.view(np.int32))


def test_a_training_step_takes_nothing_from_cupy():
    """Words, a sampler and regions: no atomics on floats, no memory that CuPy takes by itself."""
    sym = mx.sym
    words = sym.Embedding(sym.Variable("words"), input_dim=20, output_dim=4, name="e")
    image = sym.reshape(words, shape=(2, 1, 6, 4))
    warped = sym.BilinearSampler(image, sym.Variable("grid"))
    net = sym.sum(sym.ROIPooling(warped, sym.Variable("rois"), pooled_size=(2, 2), spatial_scale=1.0))
    with place("standin", kind="NaiveEngine") as context:
        executor = net.simple_bind(context(0), grad_req="write", words=(2, 6), grid=(2, 2, 5, 5), rois=(3, 5))
        for _ in range(2):
            meter.reset()
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones((1,), ctx=context(0)))
            mx.nd.waitall()
        assert meter.launches["sum_slices"] == meter.launches["sum_corners"] == meter.launches["spread_regions"] == 1
        assert not meter.atomics
        assert device.get(context(0)).temporaries.reserved == 0
        del executor
