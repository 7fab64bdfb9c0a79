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

import weftplan as mx
from tests.ops.test_golden import CASES as GOLDEN
from tests.ops.test_golden import inputs as golden
from tests.support.ops_harness import check_contract, differentiate, prepare, spec_of
from tests.support.ops_nn_cases import CASES as NN_CASES
from tests.support.ops_nn_cases import ident
from tests.support.ops_tensor_cases import CASES as TENSOR_CASES
from tests.support.ops_tensor_cases import NO_GRADIENT
from tests.support.together import operator, together
from weftplan.errors import MXNetError
from weftplan.ops.core import registry
from weftplan.symbol.api.functions import function

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


SAMPLES: dict[str, list[Any]] = {}
"""Calls by operator, but for those with states or random draws; ``shape_array`` of a number has no element."""
_stored = [case for cases in GOLDEN.values() for case in cases.values() if case.get("inputs")]
for _case in CASES + [(case["op"], golden.case_inputs(case), case.get("params", {})) for case in _stored]:
    _op = registry.get(_case[0])
    if not _op.aux and not _op.random and _op.name != "shape_array":
        SAMPLES.setdefault(_op.name, []).append(_case)


def calls_without_dimensions(samples: list[Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield a call of one number per input and a call of vectors of three, each if an array of it has no dimension."""
    for shape in ((), (3,)):
        for op, arrays, params in samples:
            inputs = [np.resize(array, shape or 1).reshape(shape) for array in arrays]
            for more in ({}, {"axis": 0}, {"axis": 0, "squeeze_axis": True}, {"axis": None}, {"keepdims": False}):
                try:
                    call = prepare(op, inputs, {**params, **more})
                except (MXNetError, ValueError, AssertionError):
                    continue  # not a call of this operator, or its shape stays unknown
                if any(spec.shape == () for spec in [*map(spec_of, inputs), *call.out_specs]):
                    yield op, inputs, {**params, **more}
                    break
            else:
                continue
            break


def run_without_dimensions(op: str, inputs: list[Any], params: dict[str, Any]) -> None:
    """Run the kernels of a call and of its gradient, then the same in a graph, forward and backward."""
    check_contract(op, inputs, params)
    call = prepare(op, inputs, params)
    wanted = [None if array is None else array.copy() for array in call()]
    if not inputs[0].shape:
        for number, vector in zip(wanted, prepare(op, [array.reshape(1) for array in inputs], params)(), strict=True):
            assert number is None or number.tobytes() == vector.tobytes()
    if call.op.gradient is None:
        return
    differentiate(call, [np.full(spec.shape, 0.5).astype(spec.dtype) for spec in call.out_specs])
    count = len(inputs)
    if inputs[0].shape:
        values = {f"x{k}": array for k, array in enumerate(inputs)}
        entries = [mx.sym.Variable(name) for name in values]
    else:  # a variable without dimensions has an unknown shape, so the numbers are parts of one variable
        values = {"x": np.array(inputs, np.float64)}
        parts = mx.sym.SliceChannel(mx.sym.Variable("x"), num_outputs=count, axis=0, squeeze_axis=True)
        entries = [parts[k] for k in range(count)]
    arrays = {name: mx.nd.array(value, dtype="float32") for name, value in values.items()}
    gradients = {name: mx.nd.zeros(value.shape) for name, value in values.items()}
    executor = function(op)(*entries, **params).bind(mx.cpu(), arrays, gradients)
    outputs = executor.forward(is_train=True)
    assert [out.shape for out in outputs] == [spec.shape for spec in call.out_specs[: len(outputs)]]
    executor.backward([mx.nd.full(out.shape or (1,), 0.5, dtype=out.dtype).reshape(out.shape) for out in outputs])
    assert all(np.shape(gradient.asnumpy()) == values[name].shape for name, gradient in gradients.items())


@together(by=lambda name: name.lstrip("_")[:3])
@pytest.mark.parametrize("name", SAMPLES)
def test_arrays_without_dimensions(name: str) -> None:
    """Operators that accept or give an array without dimensions run forward and backward, alone and in a graph."""
    for call in calls_without_dimensions(SAMPLES[name]):
        run_without_dimensions(*call)


def test_operators_that_give_no_dimension_are_found() -> None:
    """The search finds the operators that make a number of a vector, with and without a gradient."""
    shapes = {op: np.shape(inputs[0]) for name in SAMPLES for op, inputs, _ in calls_without_dimensions(SAMPLES[name])}
    vectors = {op for op, shape in shapes.items() if shape}
    assert vectors >= {"SliceChannel", "_split_v2", "_np_sum", "_np_dot", "_npi_var", "_npi_argmax", "_npi_mean"}
    assert len(shapes) > 200
