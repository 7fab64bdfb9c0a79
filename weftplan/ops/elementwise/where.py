"""where: an elementwise or rowwise choice between two tensors.

The kernels select by bit operations, which treat NaN and all dtypes alike.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, block_bytes, blocks
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import DType, Op, Params, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray


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


# The selection y ^ ((x ^ y) & -condition) preserves NaN and -0.0. It is several times faster than copyto(where=…) if
# the mask has no pattern.


def _integer(dtype: DType) -> DType:
    """Return the signed integer dtype of the same size."""
    return np.dtype(f"i{dtype.itemsize}")


def _bits(xp: ArrayModule, condition: RawArray, mask: RawArray, out: RawArray) -> None:
    """Set all bits of the integers ``out`` where ``condition`` is not 0, and none elsewhere; ``mask`` is scratch."""
    xp.not_equal(condition, 0, out=mask)
    xp.negative(mask.view("int8"), out=out)


def _by_row(ctx: Workspace, condition: RawArray, like: RawArray) -> RawArray:
    """Return the bit masks of a condition with one value for each row of ``like``, shaped to broadcast."""
    bits = ctx.take(condition.shape, _integer(like.dtype))
    _bits(ctx.xp, condition, ctx.take(condition.shape, BOOL), bits)
    return bits.reshape((condition.size,) + (1,) * (like.ndim - 1))


def _choose(xp: ArrayModule, bits: RawArray, x: RawArray, y: RawArray, out: RawArray) -> None:
    x, y, out = (array.view(bits.dtype) for array in (x, y, out))
    xp.bitwise_xor(x, y, out=out)
    xp.bitwise_and(out, bits, out=out)
    xp.bitwise_xor(out, y, out=out)


@workspace_kernel
def _where(ctx: Workspace, p: Params, condition: RawArray, x: RawArray, y: RawArray, out: RawArray) -> None:
    if condition.shape != out.shape:
        _choose(ctx.xp, _by_row(ctx, condition, out), x, y, out)
        return
    for bc, bx, by, bo, bits, mask in blocks(ctx, (condition, x, y, out), (_integer(out.dtype), BOOL)):
        _bits(ctx.xp, bc, mask, bits)
        _choose(ctx.xp, bits, bx, by, bo)


@workspace_kernel
def _backward_where(
    ctx: Workspace, p: Params, g: RawArray, condition: RawArray, d_x: RawArray | None, d_y: RawArray | None
) -> None:
    if condition.shape != g.shape:
        _share_out(ctx.xp, _by_row(ctx, condition, g), g, d_x, d_y)
        return
    spare = [g if out is None else out for out in (d_x, d_y)]
    for bg, bc, bx, by, bits, mask in blocks(ctx, (g, condition, *spare), (_integer(g.dtype), BOOL)):
        _bits(ctx.xp, bc, mask, bits)
        _share_out(ctx.xp, bits, bg, None if d_x is None else bx, None if d_y is None else by)


def _share_out(xp: ArrayModule, bits: RawArray, g: RawArray, x: RawArray | None, y: RawArray | None) -> None:
    """Copy the gradient to ``x`` where ``bits`` are set and to ``y`` elsewhere, with zeros at the other elements."""
    g = g.view(bits.dtype)
    if x is not None:
        xp.bitwise_and(g, bits, out=x.view(bits.dtype))
    if y is not None:
        y = y.view(bits.dtype)
        xp.bitwise_and(g, bits, out=y)
        xp.bitwise_xor(g, y, out=y)


def _where_bytes(condition: TensorSpec, spec: TensorSpec) -> int:
    kinds = [_integer(spec.dtype), BOOL]
    if condition.shape == spec.shape:
        return block_bytes(math.prod(spec.shape), kinds)
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
