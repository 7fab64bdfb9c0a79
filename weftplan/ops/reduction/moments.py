"""moments: mean and variance over some axes, in one operator.

Sums run block by block in a fixed order, so that the scratch is bounded and every run gives the same bits.
"""

from __future__ import annotations

import math

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator, collapse, row_blocks, rows_per_block
from weftplan.ops.core.params import p_bool, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, SpecLike
from weftplan.ops.reduction.reduce import keepdims_shape, reduced_axes
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("axes", p_optional(p_shape), None, "axes over which mean and variance are taken; at least one"),
    Param("keepdims", p_bool, False, "keep these axes with size 1"),
)


def _axes(params: Params, rank: int) -> tuple[int, ...]:
    if not params["axes"]:
        raise ParameterError("moments: axes is empty: name every axis for the moments of the whole tensor")
    return reduced_axes({"axis": params["axes"]}, rank, "moments")


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axes = _axes(params, len(source))
    reduced = keepdims_shape(source, axes)
    if not params["keepdims"]:
        reduced = tuple(dim for axis, dim in enumerate(source) if axis not in axes) or (1,)
    return ins, [merge_shape(out, reduced, f"output of moments of {source} over {axes}") for out in outs]


def _view(params: Params, source: Shape) -> tuple[Shape, Shape, int]:
    """Return (collapsed shape of the data, the same with 1 for reduced axes, number of elements of one mean)."""
    if not source:
        return (1,), (1,), 1  # a tensor without dimensions, of var or std
    axes = _axes(params, len(source))
    shape, small = collapse(source, keepdims_shape(source, axes))
    return shape, small, math.prod(source[axis] for axis in axes)


def _scratch(params: Params, data: SpecLike, *outputs: SpecLike | None) -> ScratchSpecs:
    """Return the scratch: a block of the data, the means, the variances, and the sums of one block."""
    shape, small, _ = _view(params, data.shape)
    step, acc = rows_per_block(shape), accumulator(data.dtype)
    part = (min(small[0], step), *small[1:])
    return [((step, *shape[1:]), acc), (small, acc), (small, acc), (part, acc)]


def _sums(xp: ArrayModule, block: RawArray, total: RawArray, rows: slice, part: RawArray) -> None:
    """Add the sums of ``block``, rows ``rows`` of the data, to ``total``; ``part`` is scratch.

    If the first axis is not reduced, write them to the rows ``rows`` of ``total``.
    """
    axes = tuple(axis for axis in range(total.ndim) if total.shape[axis] == 1)
    if total.shape[0] == 1:
        xp.sum(block, axis=axes, dtype=total.dtype, out=part, keepdims=True)
        xp.add(total, part, out=total)
    else:
        xp.sum(block, axis=axes, dtype=total.dtype, out=total[rows], keepdims=True)


@kernel(scratch=_scratch)
def moments_forward(
    xp: ArrayModule,
    p: Params,
    data: RawArray,
    of_mean: RawArray | None,
    of_var: RawArray | None,
    block: RawArray,
    mean: RawArray,
    var: RawArray,
    part: RawArray,
) -> None:
    shape, small, count = _view(p, data.shape)
    data = data.reshape(shape)
    mean.fill(0)
    var.fill(0)
    for rows in row_blocks(shape):
        _sums(xp, data[rows], mean, rows, part)
    xp.multiply(mean, 1.0 / count, out=mean)
    for rows in row_blocks(shape):
        centred = block[: rows.stop - rows.start]
        xp.subtract(data[rows], mean if small[0] == 1 else mean[rows], out=centred)
        xp.multiply(centred, centred, out=centred)
        _sums(xp, centred, var, rows, part)
    xp.multiply(var, 1.0 / count, out=var)
    for out, value in zip((of_mean, of_var), (mean, var), strict=True):
        if out is not None:
            xp.copyto(out.reshape(small), value, casting="same_kind")


def _backward_scratch(
    params: Params, d_mean: SpecLike, d_var: SpecLike, data: SpecLike, mean: SpecLike, out: SpecLike
) -> ScratchSpecs:
    """Return the scratch: a block of the data."""
    return _scratch(params, data)[:1]


@kernel(scratch=_backward_scratch)
def moments_backward(
    xp: ArrayModule,
    p: Params,
    d_mean: RawArray,
    d_var: RawArray,
    data: RawArray,
    mean: RawArray,
    out: RawArray,
    buffer: RawArray,
) -> None:
    """Compute (gradient of the mean + 2 (data - mean) · gradient of the variance) / count."""
    shape, small, count = _view(p, out.shape)
    data, out = data.reshape(shape), out.reshape(shape)
    of_mean, of_var, mean = (array.reshape(small) for array in (d_mean, d_var, mean))
    for chunk in row_blocks(shape):
        rows = slice(None) if small[0] == 1 else chunk
        block = buffer[: chunk.stop - chunk.start]
        xp.subtract(data[chunk], mean[rows], out=block)
        xp.multiply(block, of_var[rows], out=block)
        xp.multiply(block, 2.0, out=block)
        xp.add(block, of_mean[rows], out=block)
        xp.multiply(block, 1.0 / count, out=out[chunk], casting="same_kind")


register(
    Op(
        name="moments",
        forward=moments_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("moments"),
        params=_PARAMS,
        outputs=("output0", "output1"),
        gradient=grad("_backward_moments", "g0", "g1", "x0", "y0"),
        doc="Mean and variance (divided by the number of elements) over axes.",
    )
)
backward(
    "moments",
    moments_backward,
    ("ograd0", "ograd1", "data", "mean"),
    params=_PARAMS,
    inplace=(InplacePair(2, 0),),
)
