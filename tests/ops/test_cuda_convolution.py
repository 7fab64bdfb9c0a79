"""Convolutions on a GPU without cuDNN: cuBLAS products over tiles of windows, and one launch for the columns."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from tests.standin_cupy.cublas import CUBLASError
from tests.support.gpu_counts import counted
from weftplan import device, models
from weftplan.ops.core import tiling
from weftplan.ops.core.cuda_gemm import gemm

CASES = {
    "padded": ((3, 2, 6, 5), {"kernel": (3, 3), "pad": (1, 1), "num_filter": 4}),
    "strided": ((2, 3, 7, 8), {"kernel": (3, 2), "stride": (2, 3), "pad": (1, 0), "num_filter": 2}),
    "dilated": ((2, 2, 8, 7), {"kernel": (2, 3), "dilate": (3, 2), "num_filter": 3}),
    "pointwise": ((3, 4, 3, 5), {"kernel": (1, 1), "num_filter": 5}),
    "strided pointwise": ((2, 4, 5, 5), {"kernel": (1, 1), "stride": (2, 2), "num_filter": 3}),
    "one axis": ((3, 2, 9), {"kernel": (4,), "stride": (2,), "pad": (2,), "num_filter": 3}),
    "three axes": ((2, 2, 4, 3, 5), {"kernel": (2, 2, 3), "pad": (1, 0, 1), "stride": (1, 1, 2), "num_filter": 2}),
}


def step(name, shape, params, ctx, dtype, *, bias=True):
    """Return a layer's output and gradients by name, and the launches of its backward pass.

    All values are whole numbers, so that sums are exact in any order.
    """
    symbol = getattr(mx.sym, name)(mx.sym.Variable("data"), name="c", no_bias=not bias, **params)
    types = dict.fromkeys(symbol.list_arguments(), dtype)
    executor = symbol.simple_bind(ctx, grad_req="write", type_dict=types, data=shape)
    rng = np.random.default_rng(2)
    for array in executor.arg_dict.values():
        array[:] = mx.nd.array(rng.integers(-4, 5, array.shape), ctx=ctx, dtype=dtype)
    executor.forward(is_train=True)
    out = executor.outputs[0]
    head = rng.integers(-4, 5, out.shape)
    for array in executor.grad_dict.values():
        array[:] = np.nan
    out.wait_to_read()
    meter.reset()
    executor.backward(mx.nd.array(head, ctx=ctx, dtype=dtype))
    arrays = {"out": out, **executor.grad_dict}
    assert executor.allocated_bytes == executor.memory_plan.peak
    return {key: array.asnumpy() for key, array in arrays.items()}, dict(meter.launches)


@pytest.mark.parametrize("tile", [1500, 1 << 30])
@pytest.mark.parametrize("name", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_host(case, name, tile, monkeypatch):
    """Output and gradients equal the host's bits, with few windows or images per tile and with all in one tile."""
    monkeypatch.setattr(tiling, "GPU", tiling.GPU._replace(tile_bytes=tile))
    shape, params = CASES[case]
    for dtype in ("float32", "float64") if case == "padded" else ("float32",):
        with place("standin", kind="NaiveEngine") as context:
            expected, _ = step(name, shape, params, mx.cpu(), dtype)
            actual, launches = step(name, shape, params, context(0), dtype)
            assert device.get(context(0)).temporaries.reserved == 0
        assert not {"matmul", "cupy_mat_ptrs", "elementwise_copy"} & set(launches)
        for key, array in expected.items():
            np.testing.assert_array_equal(actual[key], array, err_msg=key)


def test_a_tile_is_four_launches():
    """A backward pass in one tile takes four launches: columns, two products, and columns back."""
    shape, params = CASES["padded"]
    with place("standin", kind="NaiveEngine") as context:
        _, launches = step("Convolution", shape, params, context(0), "float32", bias=False)
    wanted = {"gather_windows": 1, "sum_windows": 1, "sgemm": 2}
    assert {name: launches[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("params", "dtype", "text"),
    [
        ({"num_group": 2}, "float32", "groups"),
        ({}, "float16", "products of float16"),
        ({"num_group": 2}, "float16", "products of float16"),
    ],
)
def test_the_plan_states_why_products_are_numpys(params, dtype, text):
    """Groups and float16 are computed by CuPy's products, and the plan states the reason."""
    symbol = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c", **params)
    types = dict.fromkeys(symbol.list_arguments(), dtype)
    planned = mx.planner.plan_symbol(symbol, {"data": (2, 4, 8, 8)}, types, context=mx.gpu(0))
    (choice,) = planned.kernels.values()
    assert choice.implementation.name == "numpy"
    assert text in choice.reason


@pytest.mark.parametrize("batch", [64, 80])
def test_large_batches_stay_below_forty_launches(batch):
    """VGG-16 at a large batch takes at most 40 launches per operator and 8 on average.

    The host never waits, and nothing is allocated outside the plan.
    """
    with place("standin") as context:
        actual = counted(models.get("vgg16"), models.input_shapes("vgg16", batch=batch), context(0))
    assert actual.most <= 40
    assert actual.mean <= 8
    assert (actual.waits, actual.beside, actual.planned) == (0, 0, actual.allocated)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products(dtype):
    """gemm multiplies transposed operands, a matrix shared by the batch, strided rows, and adds to its result."""
    rng = np.random.default_rng(0)

    def whole(*shape):
        return rng.integers(-3, 4, shape).astype(dtype)

    a, b, wide = whole(3, 2, 4), whole(3, 4, 5), whole(3, 4, 9)
    cases = [
        (lambda a, b, w: (a, b), 5),
        (lambda a, b, w: (a[0], b), 5),
        (lambda a, b, w: (a, b[1]), 5),
        (lambda a, b, w: (a[:, :, :1], b[:, :1]), 5),
        (lambda a, b, w: (a, w[:, :, 2:7]), 5),
        (lambda a, b, w: (b[0].T, w), 9),
        (lambda a, b, w: (a[:, :1], b), 5),
    ]
    with place("standin") as context:
        where = device.get(context(0))
        xp = where.xp

        def run():
            on_gpu = [xp.asarray(x) for x in (a, b, wide)]
            for pick, columns in cases:
                left, right = pick(a, b, wide)
                out = xp.ones((3, left.shape[-2], columns + 2), dtype)
                for add in (False, True):
                    gemm(xp, *pick(*on_gpu), out[:, :, 1:-1], add=add)
                expected = np.ones(out.shape, dtype)
                expected[:, :, 1:-1] = 2 * np.matmul(left, right)
                np.testing.assert_array_equal(out.get(), expected)

        where.launch(run)


def test_the_standin_for_cublas_is_strict():
    """The stand-in for cuBLAS refuses small leading dimensions, memory beyond an allocation, and scalars by value."""
    with place("standin") as context:
        where = device.get(context(0))
        xp = where.xp

        def run():
            x = where.allocate(64).view(np.float32).reshape(4, 4)
            one = np.ones(1, np.float32).ctypes.data
            call, handle = xp.cuda.cublas.sgemmStridedBatched, xp.cuda.get_cublas_handle()
            at = x.data.ptr
            call(handle, 0, 0, 4, 4, 2, one, at, 4, 0, at, 2, 0, one, at, 4, 0, 1)
            with pytest.raises(CUBLASError, match="INVALID_VALUE"):
                call(handle, 0, 0, 4, 4, 2, one, at, 3, 0, at, 2, 0, one, at, 4, 0, 1)
            with pytest.raises(RuntimeError, match="IllegalAddress"):
                call(handle, 0, 0, 4, 4, 5, one, at, 4, 0, at, 5, 0, one, at, 4, 0, 1)
            with pytest.raises(TypeError, match="integer"):
                call(handle, 0, 0, 4, 4, 2, 1.0, at, 4, 0, at, 2, 0, one, at, 4, 0, 1)

        where.launch(run)


@pytest.mark.shows("FLAGS_enable_cublas_tensor_op_math")
def test_tensor_cores_are_asked_for(monkeypatch):
    """With the flag, float32 products may round to TF32; afterwards the math mode is the default again."""
    monkeypatch.setenv("FLAGS_enable_cublas_tensor_op_math", "1")
    shape, params = CASES["padded"]
    modes = []
    with place("standin", kind="NaiveEngine") as context:
        cublas = device.get(context(0)).xp.cuda.cublas
        real = cublas.setMathMode
        monkeypatch.setattr(
            cublas, "setMathMode", staticmethod(lambda handle, mode: modes.append(mode) or real(handle, mode))
        )
        step("Convolution", shape, params, context(0), "float32")
        step("Convolution", shape, params, context(0), "float64")
    assert set(modes) == {0, 3}
    assert modes[-1] == 0
