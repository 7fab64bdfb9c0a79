"""Integers in tensor operators: results stay integers, wrap around, and are divided exactly, towards zero."""

import math

import numpy as np
import pytest

from tests.support.ops_harness import check_contract, gradients, run
from tests.support.together import together
from weftplan.errors import DTypeError
from weftplan.ops.core import kernels, registry, tiling

LARGE = [2**62 + 1, -(2**62) - 3, 2**53 + 1, -7]


@pytest.mark.parametrize(
    ("op", "scalar", "x", "expected"),
    [
        ("_plus_scalar", 1.9, np.int32([1, -7]), [2, -6]),
        ("_plus_scalar", 10, np.uint8([250, 1]), [4, 11]),
        ("_plus_scalar", -2, np.uint8([250, 1]), [248, 255]),
        ("_div_scalar", 2, np.int32([1, -7]), [0, -3]),
        ("_div_scalar", 1, np.int64(LARGE), LARGE),
        ("_div_scalar", -2, np.int64(LARGE), [-(2**61), 2**61 + 1, -(2**52), 3]),
        ("_div_scalar", 0.5, np.int64(LARGE), [0, 0, 0, 0]),  # 0.5 becomes 0 first
        ("_rdiv_scalar", 7, np.int32([2, -2]), [3, -3]),
        ("_rdiv_scalar", 2.0**62, np.int64([3, -3, 0]), [2**62 // 3, -(2**62 // 3), 0]),
        ("_power_scalar", 2, np.int32([3, -7]), [9, 49]),
        ("_mod_scalar", 3, np.int32([7, -7]), [1, 2]),
        ("_mod_scalar", 0, np.int32([7, -7]), [0, 0]),
        ("_mod_scalar", 0.5, np.int32([7, -7]), [0, 0]),
        ("_rmod_scalar", 7, np.int32([0, -4]), [0, -1]),
        ("_greater_scalar", 1.5, np.int32([1, 2]), [0, 1]),
    ],
)
def test_integers_stay_integers(op, scalar, x, expected):
    """A scalar is truncated to the array's integer dtype and wraps around; quotients are exact, without a fraction."""
    (y,) = run(op, [x], {"scalar": scalar})
    assert y.dtype == x.dtype
    assert y.tolist() == expected


@pytest.mark.parametrize("op", ["elemwise_div", "broadcast_div"])
def test_quotients_of_integers_are_exact(op):
    """64-bit integers that no float can represent are divided exactly, towards zero; division by 0 gives 0.

    The kernel may write to the memory of either operand.
    """
    x = np.array(LARGE, np.int64)
    for divisor in (1, 2, -3, 0):
        expected = [0 if divisor == 0 else int(math.copysign(1, v * divisor)) * (abs(v) // abs(divisor)) for v in LARGE]
        y = np.full(4 if op == "elemwise_div" else 1, divisor, np.int64)
        assert run(op, [x, y])[0].tolist() == expected
        whole = np.full(4, divisor, np.int64)
        for place in (0, 1):
            operands = [x.copy(), whole.copy()]
            with np.errstate(all="ignore"):
                kernels.divide_integers(np, *operands, operands[place], np.empty_like(x))
            assert operands[place].tolist() == expected
    assert run(op, [np.array([250, 7], np.uint8), np.array([3, 200], np.uint8)])[0].tolist() == [83, 0]


def test_means_of_integers_are_exact():
    """The mean of 64-bit integers is computed without floats, so it is exact up to truncation; a sum wraps around."""
    assert run("sum", [np.uint8([250, 1, 9])], {})[0].tolist() == [4]
    x = np.array([LARGE], np.int64).T
    assert run("mean", [x], {"axis": 1})[0].tolist() == LARGE
    assert run("mean", [np.array([-3, -4])], {})[0].tolist() == [-3]


@pytest.mark.parametrize("op", ["tanh", "exp", "sqrt", "sin", "cbrt", "arctan", "hypot"])
def test_small_integers_compute_in_double(op):
    """int8, uint8 and int16 give the results of int32: they are not rounded to float16 in between, as in NumPy."""
    values = np.arange(5)
    inputs = [values, values[::-1]] if op == "hypot" else [values]
    name = "_hypot" if op == "hypot" else op
    expected = run(name, [x.astype(np.int32) for x in inputs])[0]
    for dtype in (np.int8, np.uint8, np.int16):
        np.testing.assert_array_equal(run(name, [x.astype(dtype) for x in inputs])[0], expected.astype(dtype))


FLOATS_ONLY = [
    ("hard_sigmoid", 1, {}), ("softmax", 1, {}), ("softmin", 1, {}), ("log_softmax", 1, {}),
    ("softmax", 1, {"dtype": "float32"}), ("SoftmaxActivation", 1, {}), ("SoftmaxOutput", 2, {}), ("LeakyReLU", 1, {}),
    ("Activation", 1, {"act_type": "tanh"}), ("Activation", 1, {"act_type": "sigmoid"}), ("BatchNorm", 5, {}),
    ("LayerNorm", 3, {}), ("InstanceNorm", 3, {}), ("L2Normalization", 1, {}), ("LRN", 1, {"nsize": 3}),
    ("LogisticRegressionOutput", 2, {}), ("linalg_gemm2", 2, {}),
]  # fmt: skip


@together()
@pytest.mark.parametrize(("op", "count", "params"), FLOATS_ONLY)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_operators_for_floats_refuse_integers(op, count, params, dtype):
    """Operators for floats refuse integers by name during dtype inference, as in MXNet 1.9.1; float16 is accepted."""
    op = registry.get(op)
    parsed = registry.parse_params(op, params)
    outputs: list = [None] * op.num_outputs(parsed)
    with pytest.raises(DTypeError, match=rf"{op.name}.* expects floats, got {dtype}: cast it to float32"):
        op.infer_dtype(parsed, [np.dtype(dtype)] + [None] * (count - 1), outputs)
    ins, _ = op.infer_dtype(parsed, [np.dtype("float16")] + [None] * (count - 1), outputs)
    assert ins[0] == np.float16


def test_relu_of_integers():
    """relu accepts integers, because its results need no fractions."""
    assert run("Activation", [np.array([-2, 3], np.int32)], {"act_type": "relu"})[0].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("dtype", "low", "high", "x", "expected"),
    [
        ("uint8", 0, 256, [0, 7, 255], [0, 7, 255]),
        ("uint8", -3, 300, [0, 7, 255], [0, 7, 255]),
        ("int8", -2.9, 5.7, [-7, -2, 100], [-2, -2, 5]),
        ("int32", -5, 3e9, [-7, 2**31 - 1], [-5, 2**31 - 1]),
        ("int64", -1e30, 1e30, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("int64", -math.inf, math.inf, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("int32", math.nan, 3, [-7, 5], [-7, 3]),
        ("int32", 2, math.nan, [-7, 5], [2, 5]),
        ("uint8", -9, -3, [0, 7], [0, 0]),
    ],
)
def test_clip_saturates_its_bounds(dtype, low, high, x, expected):
    """A bound beyond the dtype's range is saturated, NaN is ignored, and other bounds lose their fraction."""
    assert run("clip", [np.array(x, dtype)], {"a_min": low, "a_max": high})[0].tolist() == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"start": 1.3, "stop": 6.6, "step": 1.3}, [1, 2, 3, 4, 5]),
        ({"start": 0.5, "stop": 5.0}, [0, 1, 2, 3, 4]),
        ({"start": 5.0, "stop": 0.5, "step": -1.5}, [5, 4, 3]),
        ({"start": 0.5, "stop": 6.0, "step": 1.5, "repeat": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"start": 0.0, "stop": 2.0, "step": 0.5}, [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_arange_of_integers(params, expected, dtype):
    """Start and step are truncated before they are added; the length follows from the original numbers."""
    (y,) = run("_arange", [], {**params, "dtype": dtype})
    assert y.dtype == dtype
    assert y.tolist() == expected


X, Y, G = [1, 2, 3, -4], [2, 3, -1, 5], [3, 1, 2, 5]
GRADIENTS = {
    "sqrt": [0, 0, 0, None], "square": [6, 4, 12, -40], "tanh": [3, 1, 2, 5], "exp": [6, 7, 40, 0],
    "expm1": [6, 7, 40, 0], "log": [3, 0, 0, 0], "cosh": [3, 3, 20, -135], "degrees": [171, 57, 114, 285],
    "reciprocal": [-3, 0, 0, 0], "abs": [3, 1, 2, -5], "relu": [3, 1, 2, 0], "sin": [0, 0, 0, 0],
    "radians": [0, 0, 0, 0], "cbrt": [0, 0, 0, 0], "erf": [0, 0, 0, 0], "sigmoid": [0, 0, 0, 0],
    "elemwise_div": ([0, 0, -2, 0], [0, 0, -6, 0]), "broadcast_div": ([0, 0, -2, 0], [0, 0, -6, 0]),
    "broadcast_mod": ([0] * 4, [0] * 4), "_mod": ([0] * 4, [0] * 4), "broadcast_hypot": ([0] * 4, [0] * 4),
    "broadcast_power": ([6, 12, 0, 6400], [0, 5, 0, None]), "elemwise_mul": ([6, 3, -2, 25], [3, 2, 6, -20]),
    "broadcast_maximum": ([0, 0, 2, 0], [3, 1, 0, 5]),
    "_div_scalar": [1, 0, 1, 2], "_rdiv_scalar": [-6, 0, 0, 0], "_mod_scalar": [0] * 4, "_rmod_scalar": [0] * 4,
    "_power_scalar": [6, 4, 12, -40], "_rpower_scalar": [3, 2, 10, 0], "_hypot_scalar": [0] * 4,
    "_maximum_scalar": [0, 1, 2, 0], "_mul_scalar": [6, 2, 4, 10],
}  # fmt: skip
"""The gradient of X, or those of X and Y; the number is 2.5. None: the slope is NaN, whose cast C leaves undefined."""


@together()
@pytest.mark.parametrize("op", GRADIENTS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_gradients_through_integers(op, dtype):
    """Slope and number are truncated, and the slope is multiplied by the incoming gradient, as in MXNet 1.9.1."""
    two, params = isinstance(GRADIENTS[op], tuple), {"scalar": 2.5} if op.endswith("_scalar") else {}
    actual = gradients(op, [np.array(x, dtype) for x in (X, Y)[: 1 + two]], [np.array(G, dtype)], params)
    for side, expected in zip(actual, GRADIENTS[op] if two else [GRADIENTS[op]], strict=True):
        assert side.dtype == dtype
        assert all(want is None or got == want for got, want in zip(side.tolist(), expected, strict=True))


@pytest.mark.parametrize(("op", "params"), [("norm", {}), ("norm", {"ord": 1}), ("prod", {}), ("prod", {"axis": 0})])
def test_gradients_of_reduced_integers(op, params):
    """Norms and products of integers have integer gradients."""
    (actual,) = gradients(op, [np.array([1, 2, -4], np.int32)], [np.array([2], np.int32)], params)
    assert actual.tolist() == {"norm": [0, 0, -2] if not params else [2, 2, -2], "prod": [-16, -8, 4]}[op]


@pytest.mark.parametrize("op", ["tanh", "square", "_mod", "broadcast_power", "_power_scalar", "_rmod_scalar"])
@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_contract_of_integers(op, dtype, monkeypatch):
    """Gradients through integers meet the kernel contract, in one block and in many."""
    two = op in ("_mod", "broadcast_power")
    arrays = [np.array([1, 2, 3, 2, 1], dtype)] * (1 + two)
    for block in (tiling.HOST.block, 2):
        monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(block, 2 << 20))
        check_contract(op, arrays, {"scalar": 2.0} if op.endswith("scalar") else {})
    if op == "broadcast_power":
        check_contract(op, [arrays[0][None], arrays[0][:, None]], {})
