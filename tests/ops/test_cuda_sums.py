"""Gradients by index on a GPU are summed in the order of positions and have the bits of the host."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device
from weftplan.kernels.cuda import segments


@pytest.mark.parametrize("count", [2, 64, 2048, 4096, 16384])
def test_keys_are_sorted(count):
    """Keys are sorted, in one tile, two, or many."""
    rng = np.random.default_rng(count)
    keys = rng.permutation(count).astype(np.uint64) << np.uint64(32) | rng.integers(0, 9, count, np.uint64)
    with place("standin") as context:
        where = device.get(context(0))

        def run():
            result = where.xp.asarray(keys)
            segments.sort(where.xp, result)
            np.testing.assert_array_equal(result.get(), np.sort(keys))

        where.launch(run)


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_embedding_has_the_bits_of_the_host(rows):
    """The gradient of Embedding has the host's bits.

    Large and small terms on few rows would reveal another order of additions.
    """
    rng = np.random.default_rng(rows)
    index = rng.integers(-2, rows + 2, 300).astype(np.float32)
    head = (rng.standard_normal((300, 5)) * 10.0 ** rng.integers(-6, 6, (300, 1))).astype(np.float32)
    net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=rows, output_dim=5, name="e")
    results = []
    with place("standin") as context:
        for ctx in (mx.cpu(), context(0), context(1)):
            executor = net.simple_bind(ctx, data=(300,), grad_req={"data": "null", "e_weight": "write"})
            executor.forward(is_train=True, data=mx.nd.array(index, ctx=ctx))
            executor.backward(mx.nd.array(head, ctx=ctx))
            results.append(executor.grad_dict["e_weight"].asnumpy())
        del executor
    for second in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.int32), second.view(np.int32))


def test_a_training_step_takes_nothing_from_cupy():
    """A step with Embedding, BilinearSampler and ROIPooling uses no float atomics and no memory of CuPy's own."""
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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", ["Embedding", "take", "gather_nd"])
def test_a_frequent_index_is_summed_by_many_threads(op, dtype):
    """Terms of a frequent index are summed in pieces of 1,024, then the pieces are added in order.

    Both GPUs have exactly the bits of this order. An index of at most 1,024 terms thus has the host's bits.
    """
    rng = np.random.default_rng(1)
    places, rows, wide = 7001, 6, 3
    index = rng.choice(rows, places, p=[0.55, 0.3, 0.12, 0.02, 0.01, 0.0])
    head = (rng.standard_normal((places, wide)) * 10.0 ** rng.integers(-2, 3, (places, 1))).astype(dtype)
    x, weight = mx.sym.Variable("data"), mx.sym.Variable("weight", shape=(rows, wide), dtype=dtype)
    if op == "Embedding":
        net = mx.sym.Embedding(x, weight, input_dim=rows, output_dim=wide, dtype=dtype)
    elif op == "take":
        net = mx.sym.take(weight, x)
    else:
        net = mx.sym.gather_nd(weight, mx.sym.reshape(x, shape=(1, -1)))
    wider = np.float32 if dtype == "float16" else np.dtype(dtype)
    expected = np.zeros((rows, wide), dtype)
    for row in range(rows):
        terms = head[index == row].astype(wider)
        pieces = [np.add.accumulate(terms[k : k + 1024])[-1] for k in range(0, len(terms), 1024)]
        expected[row] = np.add.accumulate(pieces)[-1] if pieces else 0
    with place("standin") as context:
        for k in (0, 1):
            types = {"data": "int32", "weight": dtype}
            executor = net.simple_bind(
                context(k), data=(places,), type_dict=types, grad_req={"data": "null", "weight": "write"}
            )
            executor.forward(is_train=True, data=mx.nd.array(index, ctx=context(k), dtype="int32"))
            executor.backward(mx.nd.array(head, ctx=context(k), dtype=dtype))
            assert executor.grad_dict["weight"].asnumpy().tobytes() == expected.tobytes()
        del executor
