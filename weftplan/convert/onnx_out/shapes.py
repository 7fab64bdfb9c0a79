"""ONNX export of operators that move, slice, concatenate, reduce and resize.

Each rule adds the ONNX nodes of one operator to the graph of its :class:`.NodeWriter`. Importing the module registers
the rules; only one thread may build a graph.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from weftplan.convert.onnx_out.writing import NodeWriter, rule
from weftplan.errors import ShapeError


@rule("Reshape", "Flatten", "expand_dims", "squeeze", "reshape_like")
def _reshape(call: NodeWriter) -> None:
    dims = list(call.out_shape())
    with suppress(ShapeError):  # the shape of a label may be unknown; its nodes are left out at the end
        if dims and call.shape()[:1] == (dims[0],):
            dims[0] = 0  # ONNX copies this size from the input, so that it may stay open
    call.end("Reshape", [call.inputs[0], call.constant(dims, np.int64)])


@rule("transpose")
def _transpose(call: NodeWriter) -> None:
    call.end("Transpose", call.inputs, perm=list(call.params["axes"] or range(len(call.shape()) - 1, -1, -1)))


@rule("SwapAxis")
def _swap(call: NodeWriter) -> None:
    perm = list(range(len(call.shape())))
    a, b = call.params["dim1"], call.params["dim2"]
    perm[a], perm[b] = perm[b], perm[a]
    call.end("Transpose", call.inputs, perm=perm)


@rule("Concat")
def _concat(call: NodeWriter) -> None:
    call.end("Concat", call.inputs, axis=call.params["dim"])


@rule("stack")
def _stack(call: NodeWriter) -> None:
    axis = call.params["axis"] % len(call.out_shape())
    dims = list(call.out_shape())
    dims[axis] = 1
    parts = [call.emit("Reshape", [entry, call.constant(dims, np.int64)]) for entry in call.inputs]
    call.end("Concat", parts, axis=axis)


@rule("SliceChannel")
def _split(call: NodeWriter) -> None:
    axis, count = call.params["axis"] % len(call.shape()), call.params["num_outputs"]
    sizes = call.constant([call.shape()[axis] // count] * count, np.int64)
    if not call.params["squeeze_axis"]:
        call.emit("Split", [call.inputs[0], sizes], call.outputs, axis=axis)
        return
    parts = [call.fresh() for _ in call.outputs]
    call.emit("Split", [call.inputs[0], sizes], parts, axis=axis)
    for k, (part, output) in enumerate(zip(parts, call.outputs, strict=True)):
        call.emit("Reshape", [part, call.constant(call.out_shape(k), np.int64)], output)


@rule("slice_axis")
def _slice_axis(call: NodeWriter) -> None:
    axis = call.params["axis"] % len(call.shape())
    end = call.shape()[axis] if call.params["end"] is None else call.params["end"]
    numbers = [call.constant([number], np.int64) for number in (call.params["begin"], end, axis)]
    call.end("Slice", [call.inputs[0], *numbers])


@rule("slice")
def _slice(call: NodeWriter) -> None:
    shape = call.shape()
    steps = [*(step or 1 for step in call.params["step"] or ()), *[1] * len(shape)][: len(shape)]
    limits: list[list[int]] = []
    for key, forwards, backwards in (("begin", 0, -1), ("end", 1 << 31, -(1 << 31))):
        given = [*call.params[key], *[None] * len(shape)][: len(shape)]
        ends = [backwards if step < 0 else forwards for step in steps]
        limits.append([end if number is None else number for number, end in zip(given, ends, strict=True)])
    numbers = [call.constant(values, np.int64) for values in (*limits, range(len(shape)), steps)]
    call.end("Slice", [call.inputs[0], *numbers])


@rule("Pad")
def _pad(call: NodeWriter) -> None:
    width = call.params["pad_width"]
    pads = call.constant([*width[::2], *width[1::2]], np.int64)
    inputs = [call.inputs[0], pads]
    if call.params["mode"] == "constant":
        inputs.append(call.constant(call.params["constant_value"], call.dtype()))
    call.end("Pad", inputs, mode=call.params["mode"])


_REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


@rule(*_REDUCE)
def _reduce(call: NodeWriter) -> None:
    assert call.node.op is not None
    rank, listed = len(call.shape()), call.params["axis"]
    axes = [listed] if isinstance(listed, int) else list(listed or ())
    axes = sorted(axis % rank for axis in axes)
    if call.params["exclude"]:
        axes = [axis for axis in range(rank) if axis not in axes]
    axes = axes or list(range(rank))
    op, keep = _REDUCE[call.node.op.name], int(call.params["keepdims"])
    # Here a full reduction has one element in one dimension.
    target = call.outputs[0] if keep or len(axes) < rank else None
    if op == "ReduceSum":
        result = call.emit(op, [call.inputs[0], call.constant(axes, np.int64)], target, keepdims=keep)
    else:
        result = call.emit(op, call.inputs, target, keepdims=keep, axes=axes)
    if target is None:
        call.end("Reshape", [result, call.constant(call.out_shape(), np.int64)])


@rule("take")
def _take(call: NodeWriter) -> None:
    call.end("Gather", [call.inputs[0], call.emit("Cast", [call.inputs[1]], to=7)], axis=call.params["axis"])


@rule("UpSampling")
def _upsampling(call: NodeWriter) -> None:
    if call.params["sample_type"] != "nearest" or len(call.inputs) != 1:
        raise call.refuse("only nearest neighbours of one input have a counterpart")
    scale = call.params["scale"]
    scales = call.constant([1, 1, scale, scale], np.float32)
    facts = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    call.end("Resize", [call.inputs[0], "", scales], **facts)
