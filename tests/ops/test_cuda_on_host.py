"""Every CUDA C kernel runs on the host, through its own launch code, and gives the values of the host's kernels.

The host's compiler builds the kernels (``tests/cuda_on_host``). Threads run in several orders, which must give the same
bits, and every access is checked. :func:`test_every_kernel_has_run` fails if a kernel has no test here.
"""

import itertools

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.ops.test_on_devices import on_device, same
from tests.support import ops_cuda_sources as cuda
from tests.support.ops_harness import differentiate, prepare
from tests.support.pointwise_networks import NETWORKS
from weftplan import device
from weftplan.kernels.cuda import segments, updates
from weftplan.kernels.cuda.philox import PhiloxGenerator
from weftplan.ops.core.schema import OpContext

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing")

SEEDS = (0, 1, 2)
INF, NAN = np.inf, np.nan


def numbers(*shape, scale=1.0, seed=0):
    """Return distinct numbers from -scale to scale, in random order."""
    return (
        np.random.default_rng(seed).permutation(int(np.prod(shape))).reshape(shape) / np.prod(shape) * 2 - 1
    ) * scale


def wild(*shape):
    """Return numbers from -30 to 30; every seventh is replaced by minus infinity."""
    x = numbers(*shape, scale=30)
    x.reshape(-1)[::7] = -INF
    return x


def whole(low, high, *shape, seed=0):
    """Return random integers from ``low`` to ``high`` - 1, as float64."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float64)


REGIONS = np.array([[0, 0, 0, 9, 8], [1, 2, 1, 30, 40], [0, -5, -5, 2, 2], [7, 0, 0, 3, 3], [1, NAN, 0, 3, 3],
                    [-1, 0, 0, 2, 2], [0, 5, 5, 4, 4], [1, INF, 0, 3, 3]])  # fmt: skip
CASES = {
    "one row of a channel": ("BatchNorm", [numbers(1, 3, 1, 1), *numbers(3, 3), np.ones(3)], {"fix_gamma": False}),
    "channels longer than a block": (
        "BatchNorm", [numbers(3, 2, 27, 17), *numbers(3, 2), np.ones(2)], {"fix_gamma": False, "momentum": 0.5}),
    "channels at the end": ("BatchNorm", [numbers(70, 5), *numbers(3, 5), np.ones(5)], {"axis": -1}),
    "channels of one image": (
        "BatchNorm", [numbers(2, 3, 1500), *numbers(3, 3), np.ones(3)], {"fix_gamma": False}),
    "channels of odd rows": ("BatchNorm", [numbers(301, 2, 7), *numbers(3, 2), np.ones(2)], {"fix_gamma": False}),
    "channels in pieces": ("BatchNorm", [numbers(3, 2, 60, 71), *numbers(3, 2), np.ones(2)], {"fix_gamma": False}),
    "channels in pieces at the end": ("BatchNorm", [numbers(8200, 3), *numbers(3, 3), np.ones(3)], {"axis": -1}),
    "pieces of what was learnt": (
        "BatchNorm", [numbers(9, 1, 1000), *numbers(3, 1), np.full(1, 2.0)], {"use_global_stats": True}),
    "statistics that were learnt": (
        "BatchNorm", [numbers(4, 3, 40), *numbers(3, 3), np.full(3, 2.0)], {"use_global_stats": True}),
    "rows longer than a block": ("LayerNorm", [numbers(3, 2500), *numbers(2, 2500)], {}),
    "rows in the middle": ("LayerNorm", [numbers(5, 40, 3), *numbers(2, 40)], {"axis": 1}),
    "many short rows": ("LayerNorm", [numbers(300, 7), *numbers(2, 7)], {"eps": 0.1}),
    "channels of samples": ("InstanceNorm", [numbers(3, 5, 6, 50), *numbers(2, 5)], {}),
    "columns of windows": (
        "im2col", [numbers(2, 3, 9, 20)], {"kernel": (3, 4), "stride": (2, 3), "pad": (2, 1), "dilate": (2, 1)}),
    "columns of a volume": ("im2col", [numbers(2, 2, 5, 6, 7)], {"kernel": (2, 3, 2), "pad": (1, 0, 1)}),
    "windows added up": (
        "col2im", [numbers(2, 3 * 6, 40)], {"output_size": (9, 12), "kernel": (3, 2), "stride": (2, 1), "pad": (1, 0),
                                            "dilate": (1, 4)}),
    "one class": ("softmax", [numbers(3, 1)], {}),
    "classes longer than a block": ("softmax", [numbers(2, 2500, scale=9)], {}),
    "classes in the middle": ("softmax", [numbers(3, 40, 5, scale=9)], {"axis": 1}),
    "classes of no chance": ("softmax", [wild(5, 37)], {}),
    "classes far apart": ("softmax", [numbers(3, 11, 300, scale=9)], {"axis": 1}),
    "logarithms far apart": ("log_softmax", [numbers(2, 1100, 9, scale=9)], {"axis": 1}),
    "chances far apart": ("softmax", [wild(5, 37, 8)], {"axis": 1}),
    "logarithms": ("log_softmax", [numbers(3, 1100, 2, scale=9)], {"axis": 1}),
    "logarithms of no chance": ("log_softmax", [wild(4, 33)], {}),
    "labels": ("SoftmaxOutput", [numbers(300, 7), whole(-1, 8, 300)], {"normalization": "valid", "use_ignore": True}),
    "labels of pixels": (
        "SoftmaxOutput", [numbers(2, 5, 30, 9), whole(0, 5, 2, 30, 9)], {"multi_output": True, "out_grad": True}),
    "a loss of what is large": (
        "MakeLoss", [numbers(40, 50)], {"normalization": "valid", "valid_thresh": 0.3, "grad_scale": 2.0}),
    "windows of a line": (
        "Pooling", [numbers(2, 3, 400)], {"kernel": (5,), "stride": (3,), "pad": (2,), "pool_type": "max"}),
    "windows that end early": (
        "Pooling", [numbers(2, 3, 11, 14)],
        {"kernel": (4, 3), "stride": (3, 2), "pad": (1, 1), "pool_type": "avg", "pooling_convention": "full"}),
    "windows apart": ("Pooling", [numbers(2, 2, 12, 13)], {"kernel": (2, 2), "stride": (4, 3), "pool_type": "max"}),
    "windows of a volume": (
        "Pooling", [numbers(2, 2, 6, 7, 8)],
        {"kernel": (3, 2, 3), "stride": (2, 2, 1), "pad": (1, 1, 1), "pool_type": "avg", "count_include_pad": False}),
    "sums over windows": ("Pooling", [numbers(1, 2, 20, 20)], {"kernel": (3, 3), "pool_type": "sum"}),
    "ties in a window": ("Pooling", [whole(0, 3, 2, 2, 9, 9)], {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1)}),
    "whole images": ("Pooling", [numbers(3, 4, 37, 41)], {"global_pool": True, "kernel": (1, 1), "pool_type": "avg"}),
    "regions anywhere": ("ROIPooling", [numbers(2, 3, 9, 12), REGIONS], {"pooled_size": (3, 4), "spatial_scale": 0.5}),
    "a sampler": ("BilinearSampler", [numbers(2, 3, 9, 8), numbers(2, 2, 20, 21, scale=1.4)], {}),
    "a map": (
        "SpatialTransformer", [numbers(2, 3, 9, 8), numbers(2, 6, scale=1.2345)],
        {"target_shape": (33, 34), "transform_type": "affine", "sampler_type": "bilinear"}),
    "a map of one row": (
        "SpatialTransformer", [numbers(1, 1, 4, 5), numbers(1, 6)],
        {"target_shape": (2, 5), "transform_type": "affine", "sampler_type": "bilinear"}),
    "more channels than threads": ("CTCLoss", [numbers(9, 3, 300, scale=4), whole(0, 300, 3, 3)], {}),
    "more places than threads": (
        "CTCLoss", [numbers(45, 2, 4, scale=4), whole(1, 4, 2, 20), np.array([45, 40]), np.array([20, 11])],
        {"use_data_lengths": True, "use_label_lengths": True}),
    "the last channel is blank": ("CTCLoss", [numbers(8, 3, 5), whole(-1, 4, 3, 4)], {"blank_label": "last"}),
    "words": ("Embedding", [whole(-2, 13, 5000), numbers(11, 3)], {"input_dim": 11, "output_dim": 3}),
    "words in pieces": ("Embedding", [whole(0, 3, 5000, seed=1), numbers(3, 2)], {"input_dim": 3, "output_dim": 2}),
    "two words": ("Embedding", [np.array([1.0]), numbers(2, 1)], {"input_dim": 2, "output_dim": 1}),
    "taken around": ("take", [numbers(2, 7, 5), whole(-30, 30, 40, 9)], {"axis": 1, "mode": "wrap"}),
    "taken at the ends": ("take", [numbers(6, 5), np.array([NAN, -INF, 3, -7, 9])], {"mode": "clip"}),
    "gathered": ("gather_nd", [numbers(5, 6, 3), whole(-5, 5, 2, 300)], {}),
    "a cell of an LSTM": (
        "RNN", [numbers(3, 5, 4), numbers(280 * 76), numbers(1, 5, 70), numbers(1, 5, 70)],
        {"mode": "lstm", "state_size": 70, "num_layers": 1}),
    "cells of a GRU": (
        "RNN", [numbers(3, 5, 4), numbers(210 * 76), numbers(1, 5, 70)],
        {"mode": "gru", "state_size": 70, "num_layers": 1}),
    **{f"{name} along axis {axis}": (
        name, [numbers(6, 5, 60) if axis == 0 else numbers(5, 6, 60), np.array([3.0, 0.0, 99.0, NAN, 6.0])],
        {"use_sequence_length": True, "axis": axis} | ({"value": 2.5} if name == "SequenceMask" else {}))
       for name, axis in itertools.product(("SequenceMask", "SequenceLast", "SequenceReverse"), (0, 1))
       if not (name == "SequenceReverse" and axis)},
    "dropout": ("Dropout", [numbers(33, 9)], {"p": 0.4}),
    "an image in columns": ("im2col", [numbers(3, 2, 11, 13)], {"kernel": (3, 2), "stride": (1, 2), "pad": (1, 0)}),
    "columns in an image": (
        "col2im", [numbers(1, 2 * 9, 36)], {"output_size": (8, 8), "kernel": (3, 3), "stride": (1, 1)}),
    "dropout of many blocks": ("Dropout", [numbers(5000)], {"p": 0.3}),
    "dropout of all": ("Dropout", [numbers(40)], {"p": 1.0}),
}  # fmt: skip
VECTORS = {"BatchNorm": slice(1, None)}
"""The inputs, by operator, that stay float32 if the data is float16."""


@pytest.fixture(scope="module")
def host():
    """Yield the stand-in's first GPU and the record of executed kernels.

    Its kernels are machine code of the host. All float32 kernels are compiled together.
    """
    build.build(cuda.texts(every=False).values())
    with place("standin") as context, on_host(SEEDS) as result:
        yield device.get(context(0)), result


def compare(where, name, arrays, params):
    """Check that forward and every gradient call on the GPU ``where`` equal the host's."""
    call = prepare(name, arrays, params)
    inputs = [x.copy() for x in call.inputs]
    expected = [y.copy() for y in call()]
    calls = [(call, inputs, expected, call.inputs)]
    if call.op.gradient is not None:
        heads = [np.linspace(-1, 2, int(np.prod(s.shape))).reshape(s.shape).astype(s.dtype) for s in call.out_specs]
        calls += [(result, result.inputs, result.outputs, None) for result in differentiate(call, heads)[1].calls]
    for result, arguments, wanted, after in calls:
        actual, left = on_device(where, result, arguments, "auto")
        for k, (mine, theirs) in enumerate(zip(actual, wanted, strict=True)):
            same(mine, theirs, f"{result.op.name}: output {k}")
        for k in result.op.mutated(result.params) if after is not None else ():
            same(left[k], after[k], f"{result.op.name}: state {k}")


def cast_case(case, dtype):
    """Return a case's operator, its arrays cast to ``dtype``, and its parameters."""
    name, arrays, params = CASES[case]
    kinds = [dtype] * len(arrays)
    if dtype == "float16" and name in VECTORS:
        kinds[VECTORS[name]] = ["float32"] * len(kinds[VECTORS[name]])
    return name, [np.asarray(x).astype(kind) for x, kind in zip(arrays, kinds, strict=True)], params


def draw(where):
    """Draw from every distribution on the GPU ``where``, with scalar and array parameters.

    Uniform float32 and float64 numbers must have the host's bits.
    """
    xp = where.xp
    results = []

    def run():
        for kind in (np.float16, np.float32, np.float64):
            generator = PhiloxGenerator(xp, 2**62 + 5, 7 << 32)
            results.append((kind, generator.random((700,), dtype=kind).get()))
            for result in (
                generator.standard_normal(700, dtype=kind), generator.standard_exponential(700, dtype=kind),
                generator.standard_gamma(0.3, 300, dtype=kind), generator.standard_gamma(xp.full(300, 5.0), dtype=kind),
            ):  # fmt: skip
                assert np.isfinite(result.get()).all()
            for rate in (3.0, xp.full(300, 40.0)):
                assert (generator.poisson(rate, 300).get() >= 0).all()

    where.launch(run)
    for kind, mine in results:
        if kind is np.float16:  # a float32, rounded; the host draws none
            continue
        second = OpContext(np, random_key=(2**62 + 5, 7 << 32)).generator().random((700,), dtype=kind)
        np.testing.assert_array_equal(mine, second)


def step_all(where, dtype):
    """Check the step of one weight, and of a full launch of weights of many sizes, against NumPy formulas."""
    for (name, states), narrow in itertools.product(cuda.STEPS.items(), (False, True)):
        for count in (1, updates.GROUP):
            rows = [[numbers(1 + 97 * k, seed=k + s).astype(dtype) for s in range(2 + states)] for k in range(count)]
            rows = [[abs(x) if s == 3 else x for s, x in enumerate(row)] for row in rows]
            if narrow:
                rows = [[w, g.astype(np.float16), *some] for w, g, *some in rows]
            want = [_step(name, [x.astype(np.float64) for x in row]) for row in rows]
            found = []

            def run(name=name, rows=rows, found=found, narrow=narrow):
                xp = where.xp
                inputs = [[xp.asarray(x) for x in row] for row in rows]
                outs = [xp.zeros(row[0].shape, np.float16) if narrow else None for row in rows]
                steps = [
                    updates.WeightStep(cuda.step_formula(name, dtype), row, row[0], out)
                    for row, out in zip(inputs, outs, strict=True)
                ]
                updates.step(xp, steps)
                found.extend([x.get() for x in row] for row in inputs)
                for row, out in zip(inputs, outs, strict=True):
                    assert out is None or (out.get() == row[0].get().astype(np.float16)).all()

            where.launch(run)
            for mine, theirs in zip(found, want, strict=True):
                for x, y in zip(mine, theirs, strict=True):
                    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def _step(name, row):
    w, g, *remaining = row
    limit, lr, wd = 0.4, 0.1, 0.01
    if name == "adam_update":
        t = np.clip(g * 0.5 + wd * w, -limit, limit)
        m = 0.9 * remaining[0] + (1 - 0.9) * t
        v = 0.99 * remaining[1] + (1 - 0.99) * t * t
        return [w - lr * m / (np.sqrt(v) + 1e-8), g, m, v]
    t = np.clip(g * 0.5, -limit, limit)
    if name == "sgd_update":
        return [(1 - lr * wd) * w - lr * t, g]
    m = 0.9 * remaining[0] - lr * (t + wd * w)
    return [w + m, g, m]


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_host(host, case):
    """Each case in float32 gives the host's results.

    The cases cover more elements than a block has threads, fewer, borders, ties, infinities, and lengths out of range.
    """
    compare(host[0], *cast_case(case, "float32"))


def test_keys_are_sorted(host):
    """``segments.sort`` sorts keys, both in shared memory alone and over many tiles."""
    for count in (2, 64, 2048, 16384):
        keys = np.random.default_rng(count).permutation(count).astype(np.uint64)

        def run(keys=keys):
            result = host[0].xp.asarray(keys)
            segments.sort(host[0].xp, result)
            np.testing.assert_array_equal(result.get(), np.sort(keys))

        host[0].launch(run)


def test_distributions_are_drawn(host):
    """Uniform numbers have the host's bits; other draws are finite. ``test_cuda_random.py`` tests the moments."""
    draw(host[0])


def test_steps_of_optimizers(host):
    """Optimizer steps equal their formulas, for one weight and for a full group of 1 to 2,232 elements each."""
    step_all(host[0], np.float32)


def test_fused_nodes(host):
    """A fused tree of elementwise nodes gives the host's results; ``test_cuda_pointwise.py`` tests more trees."""
    make, shape = NETWORKS["formulas"]
    results = []
    for context in (mx.cpu(), host[0].context):
        executor = make().simple_bind(context, grad_req="null", data=shape)
        for k, array in enumerate(executor.arg_arrays):
            array[:] = mx.nd.array(np.sin(np.arange(array.size) + k).reshape(array.shape), ctx=context)
        results.append(executor.forward()[0].asnumpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_every_kernel_has_run(host, request):
    """The tests above have run every kernel: a new kernel needs a case."""
    above = [item for item in request.session.items if item.path == request.path and item.name != request.node.name]
    if len(above) < len(CASES) + 3:
        pytest.skip("some of the tests above were not asked for")
    ran = {name for _, name in host[1].executed}
    assert {name for _, code in cuda.codes() for name in build.kernels_of(code)} - ran == set()


def unreachable(label):
    """Return whether no call uses this source: lengths are floats, and integers are drawn as doubles."""
    where, *kinds = label.split()
    if where.startswith("sequence"):
        return kinds[0] not in cuda.FLOATS
    return where == "philox.float" and kinds[0] in ("int64", "float64")


@pytest.mark.stress
def test_every_dtype():
    """All cases give the host's results in every float dtype, with labels and indices of every dtype.

    Together the cases run every reachable source.
    """
    build.build(cuda.texts(every=True).values())
    with place("standin") as context, on_host((0, 1, 5, 6)) as result:
        where = device.get(context(0))
        for dtype, case in itertools.product(cuda.FLOATS, CASES):
            if CASES[case][0] != "ROIPooling" or dtype != "float16":
                compare(where, *cast_case(case, dtype))
        for dtype, second in itertools.product(cuda.FLOATS, cuda.INDICES):
            for case, low in (("labels", 0), ("taken around", None), ("words", 0)):
                name, arrays, params = cast_case(case, dtype)
                k = 0 if case == "words" else 1
                arrays[k] = np.clip(arrays[k], 0 if second == "uint8" else low, 100).astype(second)
                compare(where, name, arrays, params)
        for dtype, lengths in itertools.product(cuda.FLOATS, cuda.FLOATS):
            for case in (case for case in CASES if "along axis" in case):
                name, arrays, params = cast_case(case, dtype)
                compare(where, name, [arrays[0], arrays[1].astype(lengths)], params)
        draw(where)
        for dtype in (np.float32, np.float64):
            step_all(where, dtype)
        ran = {code for code, _ in result.executed}
    left = {label for label, text in cuda.texts(every=True).items() if text not in ran and not unreachable(label)}
    assert left == set()
