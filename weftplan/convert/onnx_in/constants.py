"""Constant folding during the ONNX import, for exporters that compute shapes by nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_in.reading import FOLDS, Constants, Fold, OnnxCall
from weftplan.support.array_types import RawArray


def _filled(call: OnnxCall, inputs: Constants) -> RawArray:
    dims = [int(dim) for dim in np.reshape(inputs[0], -1)]
    value = call.get("value")
    fill = np.float32(0) if value is None else np.reshape(value, -1)[0]
    call.spend(math.prod(dims), fill.dtype)
    return np.full(dims, fill)


def _sliced(call: OnnxCall, inputs: Constants) -> RawArray:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4, "steps") or [1] * len(starts)
    cut = [slice(None)] * np.ndim(inputs[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[axis] = slice(start, end if step > 0 or end >= -np.shape(inputs[0])[axis] else None, step)
    return inputs[0][tuple(cut)]


def _axes(call: OnnxCall) -> tuple[int, ...] | None:
    axes = call.numbers(1, "axes")
    return None if axes is None else tuple(axes)


def _ranged(call: OnnxCall, inputs: Constants) -> RawArray:
    start, limit, step = (np.reshape(number, -1)[0] for number in inputs)
    if not step:
        raise call.refuse("a range that never ends")
    call.spend(max(0, math.ceil((float(limit) - float(start)) / float(step))), np.float64)
    return np.arange(start, limit, step)


def _expanded(call: OnnxCall, inputs: Constants) -> RawArray:
    dims = np.broadcast_shapes(np.shape(inputs[0]), [int(dim) for dim in np.reshape(inputs[1], -1)])
    call.spend(math.prod(dims), np.asarray(inputs[0]).dtype)
    return np.broadcast_to(inputs[0], dims)


def _gathered(call: OnnxCall, inputs: Constants) -> RawArray:
    values, indices, axis = np.asarray(inputs[0]), np.asarray(inputs[1], np.int64), call.get("axis", 0)
    call.spend(values.size // max(values.shape[axis], 1) * indices.size, values.dtype)
    return np.take(values, indices, axis=axis)


def _joined(call: OnnxCall, inputs: Constants) -> RawArray:
    parts = [np.asarray(array) for array in inputs]
    call.spend(sum(part.size for part in parts), np.result_type(*parts))
    return np.concatenate(parts, axis=call.get("axis", 0))


def _elementwise(compute: Callable[..., RawArray]) -> Fold:
    """Return the fold of an elementwise operator of any number of inputs, each of which may be a scalar."""

    def fold(call: OnnxCall, inputs: Constants) -> RawArray:
        call.spend(math.prod(np.broadcast_shapes(*map(np.shape, inputs))), np.result_type(*inputs))
        return np.asarray(compute(*inputs))

    return fold


def _clipped(call: OnnxCall, inputs: Constants) -> RawArray:
    low, high = (call.inputs[k] if call.has(k) else call.get(key) for k, key in ((1, "min"), (2, "max")))
    values = np.asarray(inputs[0])
    call.spend(values.size, values.dtype)
    return values if low is None and high is None else np.asarray(np.clip(values, low, high), values.dtype)


def _reduced(compute: Callable[..., RawArray]) -> Fold:
    """Return the fold of a reduction over the axes of an input or an attribute, by default over all."""
    return lambda call, i: np.asarray(compute(i[0], axis=_axes(call), keepdims=bool(call.get("keepdims", 1))))


def _constant(call: OnnxCall, inputs: Constants) -> RawArray:
    for key in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if key in call.attrs:
            kind = np.int64 if "int" in key else np.float32 if "float" in key else None
            return np.asarray(call.attrs[key], kind)
    raise call.refuse("it has no value")


ELEMENTWISE: dict[str, Callable[..., RawArray]] = {
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Not": np.logical_not,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Where": np.where,
    "Max": lambda *values: reduce(np.maximum, values),
    "Min": lambda *values: reduce(np.minimum, values),
}
"""Functions of NumPy that fold elementwise operators."""

FOLDS.update((name, _elementwise(compute)) for name, compute in ELEMENTWISE.items())
FOLDS.update(
    {
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Shape": lambda call, i: np.array(call.shape(), np.int64)[call.get("start", 0) : call.get("end")],
        "Range": _ranged,
        "Slice": _sliced,
        "Gather": _gathered,
        "Concat": _joined,
        "Unsqueeze": lambda call, i: np.expand_dims(i[0], _axes(call) or ()),
        "Squeeze": lambda call, i: np.squeeze(i[0], _axes(call)),
        "Reshape": lambda call, i: np.reshape(i[0], [int(d) for d in np.reshape(i[1], -1)]),
        "Transpose": lambda call, i: np.transpose(i[0], call.get("perm")),
        "Cast": lambda call, i: np.asarray(i[0]).astype(onnx_module().helper.tensor_dtype_to_np_dtype(call.get("to"))),
        "Add": _elementwise(np.add),
        "Sub": _elementwise(np.subtract),
        "Mul": _elementwise(np.multiply),
        # Quotients of integers are rounded towards zero.
        "Div": _elementwise(lambda a, b: (a - np.fmod(a, b)) // b if np.asarray(a).dtype.kind in "iu" else a / b),
        "Mod": lambda call, i: _elementwise(np.fmod if call.get("fmod", 0) else np.mod)(call, i),
        "Expand": _expanded,
        "Clip": _clipped,
        "Relu": _elementwise(lambda a: np.maximum(a, np.zeros((), np.asarray(a).dtype))),
        "Size": lambda call, i: np.array(math.prod(call.shape()), np.int64),
        "ReduceProd": _reduced(np.prod),
        "ReduceSum": _reduced(np.sum),
        "ReduceMax": _reduced(np.max),
        "ReduceMin": _reduced(np.min),
        "Identity": lambda call, i: i[0],
    }
)
