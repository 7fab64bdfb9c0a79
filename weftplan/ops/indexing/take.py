"""Operators that select or mark elements by index: take, pick, one_hot.

Indices may have any dtype (MXNet's are often floats); their fraction is dropped. They have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import IndexRangeError, ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel, workspace_kernel
from weftplan.ops.core.kernels import BOOL, INDEX, converted, gather, rows_per_block, to_index
from weftplan.ops.core.params import p_bool, p_dtype, p_enum, p_float, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    grad,
    merge_dtype,
    merge_shape,
    normalize_axis,
    take_bytes,
    zero_gradient,
)
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike, TensorSpec, Workspace, WorkspaceRule
from weftplan.ops.shape.broadcast import like_dtype
from weftplan.support.array_types import ArrayModule, RawArray


def _count_up(xp: ArrayModule, out: RawArray) -> RawArray:
    """Fill ``out`` (int64) with 0, 1, 2, … without a temporary, and return it."""
    out.fill(1)
    xp.cumsum(out, out=out)
    xp.subtract(out, 1, out=out)
    return out


# ----------------------------------------------------------------------------------------------------------------- take


def _take_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, index = ins
    if source is None or index is None:
        return ins, outs
    axis = normalize_axis(params["axis"], len(source), "axis of take")
    out = (*source[:axis], *index, *source[axis + 1 :])
    return ins, [merge_shape(outs[0], out, f"output of take of {source} at indices of shape {index}")]


def _positions(ctx: Workspace, params: Params, index: RawArray, size: int) -> RawArray:
    positions = ctx.take(index.shape, INDEX)
    xp = ctx.xp
    if params["mode"] != "raise":
        to_index(xp, index, size, params["mode"], positions)
        return positions
    xp.copyto(positions, index, casting="unsafe")
    limits = ctx.take((2,), INDEX)
    if positions.size:
        xp.min(positions, out=limits[:1].reshape(()))
        xp.max(positions, out=limits[1:].reshape(()))
        low, high = limits.tolist()  # the host waits for the device here, once
        if low < 0 or high >= size:
            raise IndexRangeError(f"take: indices from {low} to {high} exceed the {size} rows (mode=raise)")
    return positions


@workspace_kernel
def _take(ctx: Workspace, p: Params, a: RawArray, index: RawArray, out: RawArray) -> None:
    axis = p["axis"] % a.ndim
    gather(ctx.xp, a, _positions(ctx, p, index, a.shape[axis]), axis, out)


@workspace_kernel
def _backward_take(ctx: Workspace, p: Params, g: RawArray, index: RawArray, out: RawArray) -> None:
    axis = p["axis"] % out.ndim
    positions = _positions(ctx, p, index, out.shape[axis]).reshape(-1)
    outer, inner = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    target = out.reshape(outer, out.shape[axis], inner)
    source = g.reshape(outer, positions.size, inner)
    out.fill(0)
    if ctx.xp is np and inner >= 16:  # a Python step for each row is cheaper than ufunc.at for each element
        for position, row in enumerate(positions.tolist()):
            np.add(target[:, row], source[:, position], out=target[:, row])
        return
    for k in range(outer):
        if inner == 1:
            ctx.xp.add.at(target[k].reshape(-1), positions, source[k].reshape(-1))
        else:
            ctx.xp.add.at(target[k], positions, source[k])


def _index_workspace(position: int) -> WorkspaceRule:
    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        limits = [((2,), INDEX)] if params["mode"] == "raise" else []
        return take_bytes((inputs[position].shape, INDEX), *limits)

    return workspace


_TAKE = (
    Param("axis", p_int, 0, "axis of a along which is selected"),
    Param("mode", p_enum("clip", "wrap", "raise"), "clip", "what an index out of range means"),
)
register(
    Op(
        name="take",
        forward=_take,
        infer_shape=_take_shape,
        infer_dtype=like_dtype,
        params=_TAKE,
        inputs=("a", "indices"),
        gradient=grad("_backward_take", "g0", "x1"),
        workspace=_index_workspace(1),
        doc="The slices of a at indices along axis.",
    )
)
backward("take", _backward_take, ("ograd", "indices"), params=_TAKE, workspace=_index_workspace(1))


# ----------------------------------------------------------------------------------------------------------------- pick


def _pick_axis(params: Params, shape: Shape) -> tuple[int, int, int]:
    """Return the extents (outer, size, inner) before, of and after the picked axis."""
    if params["axis"] is None:
        return 1, math.prod(shape), 1
    axis = params["axis"] % len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _pick_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, index = ins
    if source is None:
        return ins, outs
    if params["axis"] is None:
        keepdims: Shape = (1,) * len(source)
        dropped: Shape = (1,)
    else:
        axis = normalize_axis(params["axis"], len(source), "axis of pick")
        keepdims = (*source[:axis], 1, *source[axis + 1 :])
        dropped = (*source[:axis], *source[axis + 1 :]) or (1,)
    if index is None:
        index = dropped
    else:
        expected = keepdims if len(index) == len(keepdims) else dropped
        index = merge_shape(index, expected, f"index of pick for data of shape {source}")
    out = merge_shape(outs[0], keepdims if params["keepdims"] else dropped, f"output of pick of {source}")
    return [source, index], [out]


def _pick_positions(ctx: Workspace, params: Params, shape: Shape, index: RawArray) -> RawArray:
    """Return the flat positions of the picked elements, shape (outer · inner,)."""
    xp = ctx.xp
    outer, size, inner = _pick_axis(params, shape)
    positions = ctx.take((outer, inner), INDEX)
    to_index(xp, index.reshape(outer, inner), size, params["mode"], positions)
    xp.multiply(positions, inner, out=positions)
    xp.add(positions, _count_up(xp, ctx.take((inner,), INDEX)), out=positions)
    rows = _count_up(xp, ctx.take((outer,), INDEX))
    xp.multiply(rows, size * inner, out=rows)
    xp.add(positions, rows.reshape(outer, 1), out=positions)
    return positions.reshape(-1)


def _pick_bytes(params: Params, shape: Shape) -> int:
    outer, _, inner = _pick_axis(params, shape)
    return take_bytes(((outer, inner), INDEX), ((inner,), INDEX), ((outer,), INDEX))


@workspace_kernel
def _pick(ctx: Workspace, p: Params, data: RawArray, index: RawArray, out: RawArray) -> None:
    positions = _pick_positions(ctx, p, data.shape, index)
    gather(ctx.xp, data.reshape(-1), positions, 0, out.reshape(-1))


@workspace_kernel
def _backward_pick(ctx: Workspace, p: Params, g: RawArray, index: RawArray, out: RawArray) -> None:
    positions = _pick_positions(ctx, p, out.shape, index)
    out.fill(0)
    out.reshape(-1)[positions] = g.reshape(-1)


_PICK = (
    Param("axis", p_optional(p_int), -1, "axis along which is picked; None: the flattened tensor"),
    Param("keepdims", p_bool, False, "keep the axis with size 1"),
    Param("mode", p_enum("clip", "wrap"), "clip", "what an index out of range means"),
)
register(
    Op(
        name="pick",
        forward=_pick,
        infer_shape=_pick_shape,
        infer_dtype=like_dtype,
        params=_PICK,
        inputs=("data", "index"),
        gradient=grad("_backward_pick", "g0", "x1"),
        workspace=lambda params, inputs, outputs: _pick_bytes(params, inputs[0].shape),
        aliases=("choose_element_0index",),
        doc="One element of each row along axis.",
    )
)
backward(
    "pick",
    _backward_pick,
    ("ograd", "index"),
    params=_PICK,
    workspace=lambda params, inputs, outputs: _pick_bytes(params, outputs[0].shape),
)


# -------------------------------------------------------------------------------------------------------------- one_hot


def _p_depth(value: object) -> int:
    depth = p_int(value)
    if depth < 1:
        raise ValueError("expected at least 1")
    return depth


def _one_hot_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    index, out = ins[0], outs[0]
    depth = params["depth"]
    if index is not None:
        out = merge_shape(out, (*index, depth), "output of one_hot")
    elif out is not None:
        if not out or out[-1] not in (0, depth):
            raise ShapeError(f"one_hot of depth {depth} cannot give shape {out}")
        index = out[:-1]
    return [index], [out]


def _one_hot_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(outs[0], params["dtype"], "output of one_hot and its dtype")]


def _one_hot_scratch(params: Params, indices: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch: all class numbers; for a block, its indices as integers and a mask of their classes."""
    depth = params["depth"]
    rows = rows_per_block((math.prod(indices.shape), depth))
    return [((depth,), INDEX), ((rows, 1), INDEX), ((rows, depth), BOOL)]


@kernel(scratch=_one_hot_scratch)
def _one_hot(
    xp: ArrayModule, p: Params, indices: RawArray, out: RawArray, classes: RawArray, labels: RawArray, hot: RawArray
) -> None:
    depth = p["depth"]
    index = indices.reshape(-1)
    out = out.reshape(index.size, depth)
    rows = len(labels)
    _count_up(xp, classes)
    out.fill(converted(p["off_value"], out.dtype))
    on = converted(p["on_value"], out.dtype)
    for start in range(0, index.size, max(1, rows)):
        count = min(rows, index.size - start)
        xp.copyto(labels[:count, 0], index[start : start + count], casting="unsafe")
        xp.equal(labels[:count], classes, out=hot[:count])
        xp.copyto(out[start : start + count], on, where=hot[:count])


register(
    Op(
        name="one_hot",
        forward=_one_hot,
        infer_shape=_one_hot_shape,
        infer_dtype=_one_hot_dtype,
        params=(
            Param("depth", _p_depth, doc="number of classes"),
            Param("on_value", p_float, 1.0, "value at the index"),
            Param("off_value", p_float, 0.0, "value elsewhere"),
            Param("dtype", p_dtype, np.dtype(np.float32), "dtype of the output"),
        ),
        inputs=("indices",),
        gradient=zero_gradient,
        doc="A new last axis that is on at the index and off elsewhere; an index out of range is off everywhere.",
    )
)
