"""ONNX import of operators that move, slice, concatenate, reduce and resize.

Each rule turns one ONNX node (a :class:`.OnnxCall`) into symbols and has no other effect. Importing the module
registers the rules; any thread may then call them.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan import symbol as sym
from weftplan.convert.onnx_in.layers import pad_all
from weftplan.convert.onnx_in.reading import OnnxCall, rule
from weftplan.symbol import Symbol


@rule("Flatten")
def _flatten(call: OnnxCall) -> Symbol:
    axis = call.get("axis", 1)
    if axis == 1:
        return call.make("Flatten", call.symbol())
    shape = call.shape()
    rows = math.prod(shape[: axis if axis >= 0 else len(shape) + axis])
    return call.make("reshape", call.symbol(), shape=(rows, math.prod(shape) // rows))


@rule("Reshape")
def _reshape(call: OnnxCall) -> Symbol:
    dims = call.numbers(1, "shape") or []
    if call.get("allowzero", 0) and 0 in dims:
        raise call.refuse("arrays without elements are not read")
    return call.make("reshape", call.symbol(), shape=tuple(dims) or (1,))


@rule("Expand")
def _expand(call: OnnxCall) -> Symbol:
    """Broadcast both shapes against each other."""
    shape = call.shape()
    target = np.broadcast_shapes(shape, tuple(call.numbers(1, "shape") or []))
    result = call.symbol()
    if len(target) > len(shape):
        result = call.make("reshape", result, shape=(1,) * (len(target) - len(shape)) + shape)
    return result if target == shape else call.make("broadcast_to", result, shape=target)


@rule("Transpose")
def _transpose(call: OnnxCall) -> Symbol:
    return call.make("transpose", call.symbol(), axes=tuple(call.get("perm") or ()))


@rule("Concat")
def _concat(call: OnnxCall) -> Symbol:
    parts = [call.symbol(k) for k in range(len(call.inputs))]
    return call.make("Concat", *parts, dim=call.get("axis", 1) % len(call.shape()))


@rule("Split")
def _split(call: OnnxCall) -> list[Symbol]:
    axis = call.get("axis", 0)
    size = call.shape()[axis]
    sizes = call.numbers(1, "split") or [-(-size // call.outputs)] * call.outputs
    parts, start = [], 0
    for width in sizes:
        parts.append(call.make("slice_axis", call.symbol(), axis=axis, begin=start, end=min(start + width, size)))
        start += width
    return parts


@rule("Slice")
def _slice(call: OnnxCall) -> Symbol:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4, "steps") or [1] * len(starts)
    shape, result = call.shape(), call.symbol()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis]
        if step == 1:
            begin, stop, _ = slice(start, end).indices(size)
            result = call.make("slice_axis", result, axis=axis, begin=begin, end=stop)
        else:
            rank = len(shape)
            pairs = {axis % rank: (start, None if abs(end) > size else end, step)}
            begins, stops, strides = zip(*(pairs.get(k, (None, None, None)) for k in range(rank)), strict=True)
            result = call.make("slice", result, begin=begins, end=stops, step=strides)
    return result


@rule("Squeeze")
def _squeeze(call: OnnxCall) -> Symbol:
    axes = call.numbers(1, "axes")
    return call.make("squeeze", call.symbol(), **({} if axes is None else {"axis": tuple(axes)}))


@rule("Unsqueeze")
def _unsqueeze(call: OnnxCall) -> Symbol:
    axes = call.numbers(1, "axes") or []
    rank = len(call.shape()) + len(axes)
    result = call.symbol()
    for axis in sorted(axis % rank for axis in axes):
        result = call.make("expand_dims", result, axis=axis)
    return result


@rule("Gather")
def _gather(call: OnnxCall) -> Symbol:
    axis = call.get("axis", 0)
    if not isinstance(call.inputs[1], Symbol) and np.ndim(call.inputs[1]) == 0:
        position = int(call.inputs[1]) % call.shape()[axis]
        return call.make(
            "squeeze", call.make("slice_axis", call.symbol(), axis=axis, begin=position, end=position + 1), axis=axis
        )
    return call.make("take", call.symbol(), call.symbol(1), axis=axis, mode="wrap")


@rule("Pad")
def _pad(call: OnnxCall) -> Symbol:
    pads = call.numbers(1, "pads") or []
    value = float(np.reshape(call.constant(2), -1)[0]) if call.has(2) else float(call.get("value", 0.0))
    axes = len(pads) // 2
    return pad_all(call, call.symbol(), pads[:axes], pads[axes:], call.get("mode", "constant"), value)


@rule("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
def _reduce(call: OnnxCall) -> Symbol:
    axes = call.numbers(1, "axes")
    op = call.op.removeprefix("Reduce").lower()
    keep = bool(call.get("keepdims", 1))
    return call.make(op, call.symbol(), axis=tuple(axes) if axes else (), keepdims=keep)


@rule("Upsample", "Resize")
def _resize(call: OnnxCall) -> Symbol:
    shape = call.shape()
    mode = call.get("mode", "nearest")
    k = 1 if call.op == "Upsample" or call.model.opset < 11 else 2
    if call.op == "Resize" and call.has(3):
        sizes = [int(number) for number in np.reshape(call.constant(3), -1)]
    else:
        scales = call.get("scales") if not call.has(k) else np.reshape(call.constant(k), -1)
        sizes = [math.floor(size * float(scale)) for size, scale in zip(shape, scales, strict=True)]
    coordinate_mode = call.get(
        "coordinate_transformation_mode", "half_pixel" if call.model.opset >= 11 else "asymmetric"
    )
    if len(shape) == 4 and list(shape[:2]) == sizes[:2]:
        factor = sizes[2] // shape[2]
        is_multiple = [sizes[2], sizes[3]] == [shape[2] * factor, shape[3] * factor]
        if mode == "nearest" and is_multiple and (coordinate_mode == "asymmetric" or factor in (1, 2)):
            return call.make("UpSampling", call.symbol(), scale=factor, sample_type="nearest", num_args=1)
        if mode == "linear" and coordinate_mode in ("align_corners", "half_pixel", "pytorch_half_pixel"):
            corners = coordinate_mode == "align_corners"
            result: Symbol = sym.contrib.BilinearResize2D(
                call.symbol(), height=sizes[2], width=sizes[3], align_corners=corners
            )
            return result
    raise call.refuse(f"mode {mode} ({coordinate_mode}) from {shape} to {sizes} is not read")


@rule("ArgMax", "ArgMin")
def _argmax(call: OnnxCall) -> Symbol:
    keep = bool(call.get("keepdims", 1))
    return call.make(call.op.lower(), call.symbol(), axis=call.get("axis", 0), keepdims=keep)
