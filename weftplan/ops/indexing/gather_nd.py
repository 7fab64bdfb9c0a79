"""gather_nd, scatter_nd and batch_take: elements or slices of a tensor by coordinates.

``indices`` of shape (m, *places) has m coordinates for each place. They select an element of a tensor of m axes, or a
slice of a tensor of more axes. Indices may have any dtype; their fraction is dropped. They have no gradient.

Three faults of MXNet 1.9.1 are not reproduced: its gradient of gather_nd with negative indices goes to other elements
than were read, scatter_nd writes beyond the tensor for an index out of range, and batch_take has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import IndexRangeError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import INDEX, gather, to_index
from weftplan.ops.core.params import p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.shape.broadcast import like_dtype
from weftplan.support.array_types import RawArray


def _check(name: str, tensor: Shape, index: Shape) -> int:
    """Return the number of axes of ``tensor`` that the coordinates index; raise ShapeError if it has fewer."""
    if len(index) < 2:
        raise ShapeError(f"{name}: indices have shape {index}, expected (coordinates, places, …)")
    if index[0] > len(tensor):
        raise ShapeError(
            f"{name}: {index[0]} coordinates for a tensor of shape {tensor}: it has only {len(tensor)} axes"
        )
    return index[0]


def flat_positions(ctx: Workspace, name: str, index: RawArray, tensor: Shape, *, wrap: bool) -> RawArray:
    """Return the number of the slice of ``tensor`` that each place selects, int64 (places,).

    With ``wrap``, negative coordinates count from the end.

    Raises:
        IndexRangeError: a coordinate is out of range.
    """
    xp = ctx.xp
    rows = index.reshape(index.shape[0], -1)
    axes, count = rows.shape
    flat, parts, limits = ctx.take((count,), INDEX), ctx.take((axes, count), INDEX), ctx.take((2, axes), INDEX)
    flat.fill(0)
    xp.copyto(parts, rows, casting="unsafe")
    if count:
        xp.min(parts, axis=1, out=limits[0])
        xp.max(parts, axis=1, out=limits[1])
        lows, highs = limits.tolist()  # the host waits for the device here, once
        for axis, (low, high, size) in enumerate(zip(lows, highs, tensor, strict=False)):
            if high >= size or low < (-size if wrap else 0):
                raise IndexRangeError(
                    f"{name}: indices from {low} to {high} exceed axis {axis} of a tensor of shape {tensor}: expected "
                    f"{-size if wrap else 0} to {size - 1}"
                )
            if low < 0:
                xp.remainder(parts[axis], size, out=parts[axis])
    for part, size in zip(parts, tensor, strict=False):
        xp.multiply(flat, size, out=flat)
        xp.add(flat, part, out=flat)
    return flat


def flat_bytes(index: Shape) -> int:
    """Return the workspace bytes of :func:`flat_positions`."""
    count = math.prod(index[1:])
    return take_bytes(((count,), INDEX), ((index[0], count), INDEX), ((2, index[0]), INDEX))


def _slices(array: RawArray, axes: int) -> RawArray:
    """Return ``array`` reshaped to (slices, elements of a slice); the first ``axes`` axes index the slices."""
    return array.reshape(math.prod(array.shape[:axes]), math.prod(array.shape[axes:]))


# ------------------------------------------------------------------------------------------------------------ gather_nd


def _gather_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    tensor, index = ins
    if tensor is None or index is None:
        return ins, outs
    axes = _check("gather_nd", tensor, index)
    if axes == 0:
        return ins, outs
    out = (*index[1:], *tensor[axes:])
    return ins, [merge_shape(outs[0], out, f"output of gather_nd of {tensor} at indices of shape {index}")]


@workspace_kernel
def _gather(ctx: Workspace, p: Params, data: RawArray, index: RawArray, out: RawArray) -> None:
    flat = flat_positions(ctx, "gather_nd", index, data.shape, wrap=True)
    source = _slices(data, index.shape[0])
    gather(ctx.xp, source, flat, 0, out.reshape(flat.size, source.shape[1]))


@workspace_kernel
def _gather_backward(ctx: Workspace, p: Params, g: RawArray, index: RawArray, out: RawArray) -> None:
    """Add the gradient of each place to its slice, in the order of the places."""
    flat = flat_positions(ctx, "gather_nd", index, out.shape, wrap=True)
    target = _slices(out, index.shape[0])
    source = g.reshape(flat.size, target.shape[1])
    out.fill(0)
    if target.shape[1] == 1:
        ctx.xp.add.at(target.reshape(-1), flat, source.reshape(-1))
    else:
        ctx.xp.add.at(target, flat, source)


def _index_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return flat_bytes(inputs[1].shape)


register(
    Op(
        name="gather_nd",
        forward=_gather,
        infer_shape=_gather_shape,
        infer_dtype=like_dtype,
        inputs=("data", "indices"),
        gradient=grad("_backward_gather_nd", "g0", "x1"),
        workspace=_index_bytes,
        doc="The elements or slices of data at the coordinates indices[:, place]; negative ones count from the end.",
    )
)
backward("gather_nd", _gather_backward, ("ograd", "indices"), workspace=_index_bytes)


# ----------------------------------------------------------------------------------------------------------- scatter_nd

_SCATTER = (Param("shape", p_shape, doc="shape of the output"),)


def _scatter_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, index = ins
    shape = params["shape"]
    out = merge_shape(shape, outs[0], "scatter_nd: parameter shape, and output")
    if index is not None:
        axes = _check("scatter_nd", shape, index)
        if axes:
            expected = (*index[1:], *shape[axes:])
            data = merge_shape(expected, data, f"scatter_nd to {shape} at indices of shape {index}: expected data")
            assert data is not None
            index = (axes, *data[: len(index) - 1])
    return [data, index], [out]


@workspace_kernel
def _scatter(ctx: Workspace, p: Params, data: RawArray, index: RawArray, out: RawArray) -> None:
    flat = flat_positions(ctx, "scatter_nd", index, out.shape, wrap=False)
    target = _slices(out, index.shape[0])
    out.fill(0)
    target[flat] = data.reshape(flat.size, target.shape[1])


def _scatter_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return [*builder.node("gather_nd", [builder.ograd(), builder.input(1)], {}), None]


register(
    Op(
        name="scatter_nd",
        forward=_scatter,
        infer_shape=_scatter_shape,
        infer_dtype=like_dtype,
        params=_SCATTER,
        inputs=("data", "indices"),
        gradient=_scatter_gradient,
        workspace=_index_bytes,
        doc="Zeros of the given shape, with data at the coordinates indices[:, place]; the last of several wins.",
    )
)


# ----------------------------------------------------------------------------------------------------------- batch_take


def _batch_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    a, index = ins
    index = merge_shape(index, outs[0], "batch_take: indices and output")
    if a is None:
        return [None, index], [index]
    if len(a) != 2:
        raise ShapeError(f"batch_take: a has shape {a}, expected (rows, columns)")
    index = merge_shape(a[:1], index, f"batch_take: one index for each row of a of shape {a}, and given")
    assert index is not None
    return [(index[0], a[1]), index], [index]


def _batch_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "batch_take: a and output")
    return [data, np.dtype(np.int32) if ins[1] is None else ins[1]], [data]


def _batch_positions(ctx: Workspace, index: RawArray, shape: Shape) -> RawArray:
    """Return the flat position of the element that each row takes; indices are clipped to the columns."""
    xp = ctx.xp
    flat, rows = ctx.take(index.shape, INDEX), ctx.take(index.shape, INDEX)
    rows.fill(shape[1])
    xp.cumsum(rows, out=rows)
    to_index(xp, index, shape[1], "clip", flat)
    xp.subtract(rows, shape[1], out=rows)
    xp.add(flat, rows, out=flat)
    return flat


@workspace_kernel
def _batch_take(ctx: Workspace, p: Params, a: RawArray, index: RawArray, out: RawArray) -> None:
    gather(ctx.xp, a.reshape(-1), _batch_positions(ctx, index, a.shape), 0, out)


@workspace_kernel
def _batch_backward(ctx: Workspace, p: Params, g: RawArray, index: RawArray, out: RawArray) -> None:
    out.fill(0)
    out.reshape(-1)[_batch_positions(ctx, index, out.shape)] = g


def _batch_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes((inputs[1].shape, INDEX), (inputs[1].shape, INDEX))


register(
    Op(
        name="batch_take",
        forward=_batch_take,
        infer_shape=_batch_shape,
        infer_dtype=_batch_dtype,
        inputs=("a", "indices"),
        gradient=grad("_backward_batch_take", "g0", "x1"),
        workspace=_batch_bytes,
        doc="One element of each row of a matrix; indices are clipped to its columns.",
    )
)
backward("batch_take", _batch_backward, ("ograd", "indices"), workspace=_batch_bytes)
