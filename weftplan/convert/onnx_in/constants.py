"""Nodes whose inputs are known while reading: they are computed at once, as exporters expect who work out shapes so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_in.reading import FOLDS, Call

MOST_ELEMENTS = 1 << 27
"""Most elements of an array that a file makes out of a few numbers."""


def _filled(call: Call, inputs: list[Any]) -> Any:
    dims = [int(dim) for dim in np.reshape(inputs[0], -1)]
    if math.prod(dims) > MOST_ELEMENTS:
        raise call.refuse(f"an array of shape {dims} out of one number; at most {MOST_ELEMENTS:,} elements are made")
    value = call.get("value")
    return np.full(dims, np.float32(0) if value is None else np.reshape(value, -1)[0])


def _sliced(call: Call, inputs: list[Any]) -> Any:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4, "steps") or [1] * len(starts)
    cut = [slice(None)] * np.ndim(inputs[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[axis] = slice(start, end if step > 0 or end >= -np.shape(inputs[0])[axis] else None, step)
    return inputs[0][tuple(cut)]


def _axes(call: Call) -> tuple[int, ...] | None:
    found = call.numbers(1, "axes")
    return None if found is None else tuple(found)


def _ranged(call: Call, inputs: list[Any]) -> Any:
    start, limit, step = (np.reshape(one, -1)[0] for one in inputs)
    if not step or (limit - start) / step > MOST_ELEMENTS:
        raise call.refuse("a range that never ends")
    return np.arange(start, limit, step)


def _expanded(call: Call, inputs: list[Any]) -> Any:
    dims = np.broadcast_shapes(np.shape(inputs[0]), [int(dim) for dim in np.reshape(inputs[1], -1)])
    if math.prod(dims) > MOST_ELEMENTS:
        raise call.refuse(f"an array of shape {dims} out of {np.shape(inputs[0])}; at most {MOST_ELEMENTS:,} elements")
    return np.broadcast_to(inputs[0], dims)


def _constant(call: Call, inputs: list[Any]) -> Any:
    for key in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if key in call.attrs:
            kind = np.int64 if "int" in key else np.float32 if "float" in key else None
            return np.asarray(call.attrs[key], kind)
    raise call.refuse("it has no value")


FOLDS.update(
    {
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Shape": lambda call, inputs: None,
        "Range": _ranged,
        "Slice": _sliced,
        "Gather": lambda call, i: np.take(i[0], np.asarray(i[1], np.int64), axis=call.get("axis", 0)),
        "Concat": lambda call, i: np.concatenate([np.asarray(one) for one in i], axis=call.get("axis", 0)),
        "Unsqueeze": lambda call, i: np.expand_dims(i[0], _axes(call) or ()),
        "Squeeze": lambda call, i: np.squeeze(i[0], _axes(call)),
        "Reshape": lambda call, i: np.reshape(i[0], [int(d) for d in np.reshape(i[1], -1)]),
        "Transpose": lambda call, i: np.transpose(i[0], call.get("perm")),
        "Cast": lambda call, i: np.asarray(i[0]).astype(onnx_module().helper.tensor_dtype_to_np_dtype(call.get("to"))),
        "Add": lambda call, i: i[0] + i[1],
        "Sub": lambda call, i: i[0] - i[1],
        "Mul": lambda call, i: i[0] * i[1],
        "Div": lambda call, i: i[0] // i[1] if np.asarray(i[0]).dtype.kind in "iu" else i[0] / i[1],
        "Mod": lambda call, i: (np.fmod if call.get("fmod", 0) else np.mod)(i[0], i[1]),
        "Expand": _expanded,
        "Floor": lambda call, i: np.floor(i[0]),
        "Ceil": lambda call, i: np.ceil(i[0]),
        "Identity": lambda call, i: i[0],
    }
)
