"""Formulas of elementwise kernels: compiled loops have NumPy's bits, or the formula is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.together import together
from weftplan.kernels.compiled import elementwise
from weftplan.kernels.compiled.target import host
from weftplan.ops.core import registry
from weftplan.ops.core.formulas import computation
from weftplan.ops.core.schema import OpContext

HOST = host()
needs_compiler = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
SETTINGS = {"scalar": 1.7, "lr": 0.1, "alpha": 0.2, "act_type": "relu", "a_min": -0.5, "a_max": 0.0, "wd": 0.01,
            "clip_gradient": 0.75, "momentum": 0.9, "rescale_grad": 1 / 3}  # fmt: skip
NAMES = (
    "elemwise_add", "elemwise_sub", "elemwise_mul", "elemwise_div", "_mul_scalar", "_rminus_scalar", "_rdiv_scalar",
    "_maximum_scalar", "_minimum_scalar", "clip", "abs", "sign", "sqrt", "square", "negative", "reciprocal", "relu",
    "Activation", "_backward_Activation", "_backward_relu", "_backward_tanh", "_backward_abs", "_backward_log1p",
    "_backward_hard_sigmoid", "rsqrt", "softsign", "sgd_update", "sgd_mom_update", "adam_update", "ftrl_update",
    "signum_update", "rmspropalex_update",
)  # fmt: skip
REFUSED = ("exp", "tanh", "_power_scalar", "floor", "broadcast_maximum", "_backward_sin", "sigmoid")


def parts_of(name: str) -> tuple[Any, dict[str, Any], int]:
    """Return an operator, parameters for it, and its number of inputs."""
    op = registry.get(name)
    params = registry.parse_params(op, {one.name: SETTINGS[one.name] for one in op.params if one.name in SETTINGS})
    return op, params, len(op.input_names(params))


def values(count: int, dtype: Any, seed: int) -> Any:
    """Return shuffled numbers of every kind: zeros of both signs, infinities, NaN, subnormal and normal numbers."""
    actual = np.random.default_rng(seed).standard_normal(count).astype(dtype)
    for k, special in enumerate((0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -0.5, 1.7)):
        actual[k::31] = special
    return np.random.default_rng(seed + 1).permutation(actual)


def same_bits(a: Any, b: Any) -> None:
    """Assert that two arrays have equal bits; any NaN equals any other."""
    np.testing.assert_array_equal(a, b)
    there = ~np.isnan(a)
    np.testing.assert_array_equal(np.signbit(a[there]), np.signbit(b[there]))


@together()
@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_formula_has_the_bits_of_numpy(name, dtype):
    """The result and every state have NumPy's bits, for special values and in two uneven ranges.

    The first range leaves the elements after it unchanged.
    """
    op, params, count = parts_of(name)
    actual = computation(op.forward, params, count, np.dtype(dtype), out=count)
    assert actual is not None
    inputs = [values(333, dtype, seed) for seed in range(count)]
    arguments, result = [a.copy() for a in inputs], [a.copy() for a in inputs]
    arguments.append(np.full(333, 7, dtype))
    result.append(np.full(333, 7, dtype))
    with np.errstate(all="ignore"):
        op.forward(OpContext(np, workspace=np.empty(1 << 16, np.uint8)), params, arguments[:-1], arguments[-1:])
    run = elementwise.compiled(actual, np.dtype(dtype))
    run(result, 0, 64)
    assert (result[-1][64:] == 7).all()
    run(result, 64, 333)
    for a, b in zip(arguments, result, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_have_other_bits_is_refused(name):
    """Functions that differ between libraries are not compiled, nor are extrema of two arrays.

    For extrema, the sign of zero is undefined.
    """
    op, params, count = parts_of(name)
    assert computation(op.forward, params, count, np.dtype(np.float32), out=count) is None


def test_only_one_float_dtype_is_compiled():
    """Formulas of integers, float16 and booleans are not compiled, because these dtypes have other rules."""
    op, params, _ = parts_of("elemwise_add")
    for dtype in ("int32", "float16", "bool"):
        assert computation(op.forward, params, 2, np.dtype(dtype), out=2) is None


def test_formulas_share_code_whatever_their_constants():
    """Formulas that differ only in constants share code, so that a changing rate causes no recompilation."""
    result = []
    for rate in (0.1, 0.2):
        op = registry.get("sgd_mom_update")
        params = registry.parse_params(op, {"lr": rate, "momentum": 0.9, "wd": rate})
        result.append(computation(op.forward, params, 3, np.dtype(np.float32), out=0))
    assert result[0].formula == result[1].formula
    assert result[0].constants != result[1].constants
