"""cumsum: running sums along an axis.

Half-precision floats are summed in float32, in blocks of scratch that the memory plan counts; NumPy would convert whole
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.ops.core import tiling
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_dtype, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape, normalize_axis, take_bytes
from weftplan.ops.core.schema import Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.support.array_types import RawArray

_CUMSUM = (
    Param("axis", p_optional(p_int), None, "axis; None: the flattened tensor"),
    Param("dtype", p_optional(p_dtype), None, "dtype of the output; None: as the input"),
)


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    out = source
    if params["axis"] is None:
        out = (math.prod(source),)
    else:
        normalize_axis(params["axis"], len(source), "axis of cumsum")
    return ins, [merge_shape(outs[0], out, f"output of cumsum of {source}")]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    if params["dtype"] is not None:
        return ins, [merge_dtype(outs[0], params["dtype"], "output of cumsum and its dtype")]
    dtype = merge_dtype(ins[0], outs[0], "cumsum: data and output")
    return [dtype], [dtype]


def _sums(ctx: Workspace, params: Params, source: RawArray, target: RawArray, step: int) -> None:
    """Write running sums along the axis to ``target``, from the axis' start (``step`` 1) or its end (-1)."""
    axis = params["axis"]
    if axis is None:
        source, target, axis = source.reshape(-1), target.reshape(-1), 0
    if accumulator(target.dtype) != target.dtype:
        _wide_sums(ctx, _around(source, axis), _around(target, axis), step)
        return
    index = (*(slice(None),) * (axis % source.ndim), slice(None, None, step))
    ctx.xp.cumsum(source[index], axis=axis, dtype=target.dtype, out=target[index])


def _around(array: RawArray, axis: int) -> RawArray:
    """Return ``array`` reshaped to (outer, size, inner): the axes before and after ``axis`` are merged."""
    axis %= array.ndim
    return array.reshape(math.prod(array.shape[:axis]), array.shape[axis], math.prod(array.shape[axis + 1 :]))


def _wide_block(shape: Shape) -> tuple[int, int, int]:
    """Return the shape (rows, length, width) of a block of data (outer, size, inner) that fits the tile size."""
    outer, size, inner = shape
    width = min(inner, tiling.block())
    length = min(size, max(1, tiling.block() // max(1, width)))
    return min(outer, max(1, tiling.block() // max(1, width * length))), length, width


def _wide_sums(ctx: Workspace, source: RawArray, target: RawArray, step: int) -> None:
    xp = ctx.xp
    outer, size, inner = source.shape
    rows, length, width = _wide_block(source.shape)
    dtype = accumulator(target.dtype)
    terms, sums, carry = (ctx.take((rows, count, width), dtype) for count in (length, length, 1))
    for row in range(0, outer, rows):
        for column in range(0, inner, width):
            tile = slice(row, min(row + rows, outer)), slice(column, min(column + width, inner))
            x, y = source[tile[0], ::step, tile[1]], target[tile[0], ::step, tile[1]]
            for start in range(0, size, length):
                part = slice(start, min(start + length, size))
                block = (slice(0, x.shape[0]), slice(0, part.stop - start), slice(0, x.shape[2]))
                term, total, previous = terms[block], sums[block], carry[block[0], :, block[2]]
                xp.copyto(term, x[:, part])
                if start:
                    xp.add(term[:, :1], previous, out=term[:, :1])
                xp.cumsum(term, axis=1, out=total)
                xp.copyto(previous, total[:, -1:])
                xp.copyto(y[:, part], total, casting="unsafe")


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, _), dtype = inputs[0], outputs[0].dtype
    wide = accumulator(dtype)
    if wide == dtype:
        return 0
    axis = params["axis"]
    if axis is None or len(shape) != len(outputs[0].shape):
        around: Shape = (1, math.prod(shape), 1)
    else:
        axis %= len(shape)
        around = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    rows, length, width = _wide_block(around)
    return take_bytes(((rows, length, width), wide), ((rows, length, width), wide), ((rows, 1, width), wide))


@workspace_kernel
def _cumsum(ctx: Workspace, p: Params, a: RawArray, out: RawArray) -> None:
    _sums(ctx, p, a, out, 1)


@workspace_kernel
def _backward_cumsum(ctx: Workspace, p: Params, ograd: RawArray, out: RawArray) -> None:
    g = ograd if p["axis"] is not None else ograd.reshape(out.shape)
    _sums(ctx, p, g, out, -1)


register(
    Op(
        name="cumsum",
        forward=_cumsum,
        infer_shape=_shape,
        infer_dtype=_dtype,
        params=_CUMSUM,
        inputs=("a",),
        gradient=grad("_backward_cumsum", "g0"),
        workspace=_workspace,
        doc="Sums of the elements up to each one along axis.",
    )
)
backward("cumsum", _backward_cumsum, ("ograd",), params=_CUMSUM, workspace=_workspace)
