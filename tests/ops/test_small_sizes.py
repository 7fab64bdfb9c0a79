"""Every kernel at sizes of 1 to 3 along each dimension, in float32 against float64.

For small sizes NumPy and processors run other code, because strides are small: columns of one number, gates of one
unit. Dimensions of equal size change together, so that the shapes still fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.ops_harness import differentiate, prepare
from tests.support.ops_nn_cases import CASES as NN_CASES
from tests.support.ops_nn_cases import ident
from tests.support.ops_tensor_cases import CASES as TENSOR_CASES
from tests.support.ops_tensor_cases import NO_GRADIENT
from tests.support.together import operator, together
from weftplan.errors import MXNetError
from weftplan.ops.core import registry

CASES = [
    case
    for case in TENSOR_CASES + NO_GRADIENT + NN_CASES
    if not registry.get(case[0]).random and sum(np.size(array) for array in case[1]) < 3000
]


def resized(arrays: list[Any], old: int, new: int) -> list[Any]:
    """Return the arrays with ``new`` elements along every dimension of size ``old``.

    The old elements are taken in order, and repeated if necessary.
    """
    result = []
    for array in map(np.asarray, arrays):
        for axis, dim in enumerate(array.shape):
            if dim == old:
                array = np.take(array, np.arange(new) % old, axis)
        result.append(np.ascontiguousarray(array))
    return result


def variants(arrays: list[Any]) -> Iterator[list[Any]]:
    """Yield the inputs of a case with the dimensions of one size changed to 1, 2 or 3."""
    for old in sorted({dim for array in arrays for dim in np.asarray(array).shape}):
        for new in (1, 2, 3):
            if new != old:
                yield resized(arrays, old, new)


def computed(op: str, arrays: list[Any], params: Any, dtype: str) -> list[Any]:
    """Return outputs and gradients; raise MXNetError if the shapes do not fit the operator."""
    inputs = [array.astype(dtype) if array.dtype == np.float64 else array for array in arrays]
    call = prepare(op, inputs, params)
    actual = [array for array in call() if array is not None]
    if call.op.gradient is not None:
        rng = np.random.default_rng(3)
        heads = [rng.uniform(-1, 1, spec.shape).astype(np.float32).astype(spec.dtype) for spec in call.out_specs]
        actual += differentiate(call, heads)[0]
    return actual


def check(op: str, arrays: list[Any], params: Any) -> int:
    """Compare all variants of a case in float32 and float64; return the number of variants that fit the operator."""
    fitting = 0
    arrays = [array.astype(np.float32).astype(np.float64) if array.dtype == np.float64 else array
              for array in map(np.asarray, arrays)]  # fmt: skip
    for inputs in variants(arrays):
        shapes = [array.shape for array in inputs]
        with np.errstate(all="ignore"):
            try:
                wanted = computed(op, inputs, params, "float64")
            except (MXNetError, ValueError):
                continue  # not a shape of this operator
            actual = computed(op, inputs, params, "float32")
        fitting += 1
        for k, (one, second) in enumerate(zip(wanted, actual, strict=True)):
            assert one.shape == second.shape
            scale = max(1.0, float(np.nanmax(np.abs(one), initial=1.0, where=np.isfinite(one))))
            np.testing.assert_allclose(
                second.astype(np.float64) / scale, one / scale, rtol=0, atol=2e-4, err_msg=f"array {k} of {op} {shapes}"
            )
    return fitting


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_small_sizes(case: Any) -> None:
    """Outputs and gradients at small sizes agree in float32 and float64."""
    check(*case)


def test_a_kernel_that_is_wrong_at_one_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` fails for a kernel that is wrong only in float32 rows of three, and passes for a correct kernel."""
    get = registry.get

    def wrong(ctx: Any, params: Any, inputs: Any, outputs: Any) -> None:
        np.tanh(inputs[0], out=outputs[0])
        if inputs[0].shape[-1] == 3 and inputs[0].dtype == np.float32:
            outputs[0][..., 1] += 1

    x = np.linspace(-1, 1, 20).reshape(4, 5)
    assert check("tanh", [x], {}) == 6
    broken = replace(get("tanh"), forward=wrong, gradient=None)
    monkeypatch.setattr(registry, "get", lambda name: broken if name == "tanh" else get(name))
    with pytest.raises(AssertionError, match=r"array 0 of tanh \[\(4, 3\)\]"):
        check("tanh", [x], {})
