"""Operators that select single elements by index or condition: take, pick, one_hot, where.

Indices may have any dtype (MXNet's are often floats); their fraction is dropped. No gradient flows to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.errors import MXNetError, ShapeError
from weftplan.ops.expand import like_dtype
from weftplan.ops.kernels import BOOL, INDEX, block_bytes, blocks, gather, rows_per_block, to_index
from weftplan.ops.params import p_bool, p_dtype, p_enum, p_float, p_int, p_optional
from weftplan.ops.registry import register
from weftplan.ops.rules import (
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
from weftplan.ops.scalar import converted
from weftplan.ops.schema import DType, Op, OpContext, Param, Params, Shape, TensorSpec


def _count_up(xp: Any, out: Any) -> Any:
    """Fill ``out`` (int64) with 0, 1, 2, … without a temporary."""
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


def _positions(ctx: OpContext, params: Params, index: Any, size: int) -> Any:
    found = ctx.take(index.shape, INDEX)
    xp = ctx.xp
    if params["mode"] != "raise":
        to_index(xp, index, size, params["mode"], found)
        return found
    xp.copyto(found, index, casting="unsafe")
    if found.size and (int(found.min()) < 0 or int(found.max()) >= size):
        raise MXNetError(
            f"take: indices from {int(found.min())} to {int(found.max())} exceed the {size} rows (mode=raise)"
        )
    return found


def _take(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is not None:
        a, index = inputs
        axis = params["axis"] % a.ndim
        gather(ctx.xp, a, _positions(ctx, params, index, a.shape[axis]), axis, out)


def _backward_take(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    g, index = inputs
    axis = params["axis"] % out.ndim
    found = _positions(ctx, params, index, out.shape[axis]).reshape(-1)
    outer, inner = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    target = out.reshape(outer, out.shape[axis], inner)
    source = g.reshape(outer, found.size, inner)
    out.fill(0)
    if ctx.xp is np and inner >= 16:  # a Python step for each row is cheaper than ufunc.at for each element
        for position, row in enumerate(found.tolist()):
            np.add(target[:, row], source[:, position], out=target[:, row])
        return
    for k in range(outer):
        if inner == 1:
            ctx.xp.add.at(target[k].reshape(-1), found, source[k].reshape(-1))
        else:
            ctx.xp.add.at(target[k], found, source[k])


def _index_workspace(position: int) -> Any:
    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        return take_bytes((inputs[position].shape, INDEX))

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
    """(outer, size, inner) extents round the picked axis."""
    if params["axis"] is None:
        return 1, math.prod(shape), 1
    axis = params["axis"] % len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _pick_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, index = ins
    if source is None:
        return ins, outs
    if params["axis"] is None:
        kept: Shape = (1,) * len(source)
        dropped: Shape = (1,)
    else:
        axis = normalize_axis(params["axis"], len(source), "axis of pick")
        kept = (*source[:axis], 1, *source[axis + 1 :])
        dropped = (*source[:axis], *source[axis + 1 :]) or (1,)
    if index is None:
        index = dropped
    else:
        expected = kept if len(index) == len(kept) else dropped
        index = merge_shape(index, expected, f"index of pick for data of shape {source}")
    out = merge_shape(outs[0], kept if params["keepdims"] else dropped, f"output of pick of {source}")
    return [source, index], [out]


def _pick_positions(ctx: OpContext, params: Params, shape: Shape, index: Any) -> Any:
    """Flat positions of the picked elements, shape (outer · inner,)."""
    xp = ctx.xp
    outer, size, inner = _pick_axis(params, shape)
    found = ctx.take((outer, inner), INDEX)
    to_index(xp, index.reshape(outer, inner), size, params["mode"], found)
    xp.multiply(found, inner, out=found)
    xp.add(found, _count_up(xp, ctx.take((inner,), INDEX)), out=found)
    rows = _count_up(xp, ctx.take((outer,), INDEX))
    xp.multiply(rows, size * inner, out=rows)
    xp.add(found, rows.reshape(outer, 1), out=found)
    return found.reshape(-1)


def _pick_bytes(params: Params, shape: Shape) -> int:
    outer, _, inner = _pick_axis(params, shape)
    return take_bytes(((outer, inner), INDEX), ((inner,), INDEX), ((outer,), INDEX))


def _pick(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is not None:
        data, index = inputs
        found = _pick_positions(ctx, params, data.shape, index)
        gather(ctx.xp, data.reshape(-1), found, 0, outputs[0].reshape(-1))


def _backward_pick(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is not None:
        g, index = inputs
        found = _pick_positions(ctx, params, out.shape, index)
        out.fill(0)
        out.reshape(-1)[found] = g.reshape(-1)


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


def _one_hot(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is None:
        return
    xp = ctx.xp
    depth = params["depth"]
    index = inputs[0].reshape(-1)
    out = outputs[0].reshape(index.size, depth)
    rows = rows_per_block((index.size, depth))
    classes = _count_up(xp, ctx.take((depth,), INDEX))
    whole = ctx.take((rows, 1), INDEX)
    hot = ctx.take((rows, depth), BOOL)
    out.fill(converted(params["off_value"], out.dtype))
    on = converted(params["on_value"], out.dtype)
    for start in range(0, index.size, max(1, rows)):
        count = min(rows, index.size - start)
        xp.copyto(whole[:count, 0], index[start : start + count], casting="unsafe")
        xp.equal(whole[:count], classes, out=hot[:count])
        xp.copyto(out[start : start + count], on, where=hot[:count])


def _one_hot_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    depth = params["depth"]
    rows = rows_per_block((math.prod(inputs[0].shape), depth))
    return take_bytes(((depth,), INDEX), ((rows, 1), INDEX), ((rows, depth), BOOL))


register(
    Op(
        name="one_hot",
        forward=_one_hot,
        infer_shape=_one_hot_shape,
        infer_dtype=_one_hot_dtype,
        params=(
            Param("depth", p_int, doc="number of classes"),
            Param("on_value", p_float, 1.0, "value at the index"),
            Param("off_value", p_float, 0.0, "value elsewhere"),
            Param("dtype", p_dtype, np.dtype(np.float32), "dtype of the output"),
        ),
        inputs=("indices",),
        gradient=zero_gradient,
        workspace=_one_hot_workspace,
        doc="A new last axis that is on at the index and off elsewhere; an index out of range is off everywhere.",
    )
)


# ---------------------------------------------------------------------------------------------------------------- where


def _where_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    condition, x, y = ins
    merged = merge_shape(x, y, "x and y of where")
    merged = merge_shape(merged, outs[0], "output of where")
    if merged is None:
        return ins, outs
    if condition is not None and len(condition) == 1 != len(merged):
        condition = merge_shape(condition, merged[:1], f"condition of where, one for each row of {merged}")
    elif condition is not None:
        condition = merged = merge_shape(condition, merged, "condition and x of where")
    return [condition, merged, merged], [merged]


def _where_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtype = merge_dtype(merge_dtype(ins[1], ins[2], "x and y of where"), outs[0], "output of where")
    return [ins[0], dtype, dtype], [dtype]


# A selection by mask is done on the bits, y ^ ((x ^ y) & -condition): several times faster than copyto(where=…) when
# the mask has no pattern, and it keeps NaN and -0.0.


def _integer(dtype: DType) -> DType:
    """The signed integer dtype of the same size."""
    return np.dtype(f"i{dtype.itemsize}")


def _bits(xp: Any, condition: Any, mask: Any, out: Any) -> None:
    """``out`` (integers) = all bits where ``condition`` is not 0, else none."""
    xp.not_equal(condition, 0, out=mask)
    xp.negative(mask.view("int8"), out=out)


def _by_row(ctx: OpContext, condition: Any, like: Any) -> Any:
    """Bits of a condition that has one value for each row of ``like``."""
    bits = ctx.take(condition.shape, _integer(like.dtype))
    _bits(ctx.xp, condition, ctx.take(condition.shape, BOOL), bits)
    return bits.reshape((condition.size,) + (1,) * (like.ndim - 1))


def _choose(xp: Any, bits: Any, x: Any, y: Any, out: Any) -> None:
    x, y, out = (array.view(bits.dtype) for array in (x, y, out))
    xp.bitwise_xor(x, y, out=out)
    xp.bitwise_and(out, bits, out=out)
    xp.bitwise_xor(out, y, out=out)


def _where(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    condition, x, y = inputs
    if condition.shape != out.shape:
        _choose(ctx.xp, _by_row(ctx, condition, out), x, y, out)
        return
    for bc, bx, by, bo, bits, mask in blocks(ctx, (condition, x, y, out), (_integer(out.dtype), BOOL)):
        _bits(ctx.xp, bc, mask, bits)
        _choose(ctx.xp, bits, bx, by, bo)


def _backward_where(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    g, condition = inputs
    if condition.shape != g.shape:
        _share_out(ctx.xp, _by_row(ctx, condition, g), g, *outputs)
        return
    spare = [g if out is None else out for out in outputs]
    for bg, bc, bx, by, bits, mask in blocks(ctx, (g, condition, *spare), (_integer(g.dtype), BOOL)):
        _bits(ctx.xp, bc, mask, bits)
        _share_out(ctx.xp, bits, bg, None if outputs[0] is None else bx, None if outputs[1] is None else by)


def _share_out(xp: Any, bits: Any, g: Any, x: Any, y: Any) -> None:
    """The gradient goes to x where the bits are set, and to y elsewhere."""
    g = g.view(bits.dtype)
    if x is not None:
        xp.bitwise_and(g, bits, out=x.view(bits.dtype))
    if y is not None:
        y = y.view(bits.dtype)
        xp.bitwise_and(g, bits, out=y)
        xp.bitwise_xor(g, y, out=y)


def _where_bytes(condition: TensorSpec, full: TensorSpec) -> int:
    kinds = [_integer(full.dtype), BOOL]
    if condition.shape == full.shape:
        return block_bytes(math.prod(full.shape), kinds)
    return take_bytes(*((condition.shape, kind) for kind in kinds))


register(
    Op(
        name="where",
        forward=_where,
        infer_shape=_where_shape,
        infer_dtype=_where_dtype,
        inputs=("condition", "x", "y"),
        gradient=grad("_backward_where", "g0", "x0", into=(1, 2)),
        workspace=lambda params, inputs, outputs: _where_bytes(inputs[0], inputs[1]),
        doc="x where condition is not 0, else y; a condition of one axis chooses rows.",
    )
)
backward(
    "where",
    _backward_where,
    ("ograd", "condition"),
    grad_inputs=(1, 2),
    workspace=lambda params, inputs, outputs: _where_bytes(inputs[1], inputs[0]),
)
