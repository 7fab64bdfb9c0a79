"""L2Normalization: division by the Euclidean norm of a sample, a position or a channel."""

from __future__ import annotations

import math

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator, row_blocks, rows_per_block
from weftplan.ops.core.params import p_enum, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dtype,
    merge_shape,
)
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("eps", p_float, 1e-10, "Added to the sum of squares."),
    Param("mode", p_enum("channel", "instance", "spatial"), "instance", "The elements that share a norm."),
)


def _rows(params: Params, shape: Shape) -> Shape:
    """Return the data's shape as (outer, summed, inner); each norm sums over the middle axis."""
    if params["mode"] == "channel":
        return shape[0], shape[1], math.prod(shape[2:])
    if params["mode"] == "spatial":
        return shape[0] * shape[1], math.prod(shape[2:]), 1
    return shape[0], math.prod(shape[1:]), 1


def _norm_shape(params: Params, shape: Shape) -> Shape:
    if params["mode"] == "channel":
        return (shape[0], *shape[2:])
    return shape[:2] if params["mode"] == "spatial" else shape[:1]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "L2Normalization: data and output")
    if data is None:
        return ins, outs
    least = 2 if params["mode"] == "instance" else 3
    if len(data) < least:
        raise ShapeError(f"L2Normalization: data has shape {data}, mode={params['mode']} needs {least} dimensions")
    norm = merge_shape(_norm_shape(params, data), outs[1], f"L2Normalization: norm of data {data}, and given")
    return [data], [data, norm]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "L2Normalization: data and output")
    norm = None if data is None else accumulator(data)
    return [data], [data, merge_dtype(norm, outs[1], "L2Normalization: norm (float32 for float16 data)")]


def _scratch(params: Params, data: SpecLike, *outputs: SpecLike | None) -> ScratchSpecs:
    """Return the scratch specs of either pass: a block of data, and a number for each of its norms."""
    rows, acc = _rows(params, data.shape), accumulator(data.dtype)
    step = rows_per_block(rows)
    return [((step, *rows[1:]), acc), ((step, 1, rows[2]), acc)]


@kernel(scratch=_scratch)
def _forward(
    xp: ArrayModule,
    p: Params,
    x: RawArray,
    out: RawArray | None,
    norms: RawArray | None,
    square_buffer: RawArray,
    norm_buffer: RawArray,
) -> None:
    rows = _rows(p, x.shape)
    data = x.reshape(rows)
    for chunk in row_blocks(rows):
        x = data[chunk]
        square, norm = square_buffer[: x.shape[0]], norm_buffer[: x.shape[0]]
        xp.multiply(x, x, out=square, dtype=square.dtype)
        xp.sum(square, axis=1, out=norm, keepdims=True)
        xp.add(norm, p["eps"], out=norm)
        xp.sqrt(norm, out=norm)
        if norms is not None:
            norms.reshape(rows[0], 1, rows[2])[chunk] = norm
        if out is not None:
            xp.divide(x, norm, out=out.reshape(rows)[chunk], casting="same_kind")


@kernel(scratch=_scratch)
def _backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    output: RawArray,
    norm: RawArray,
    out: RawArray,
    term_buffer: RawArray,
    sum_buffer: RawArray,
) -> None:
    """Compute the gradient of data: (ograd - output · sum(ograd · output)) / norm."""
    rows = _rows(p, out.shape)
    ograd, output, target = ograd.reshape(rows), output.reshape(rows), out.reshape(rows)
    norms = norm.reshape(rows[0], 1, rows[2])
    for chunk in row_blocks(rows):
        g, y = ograd[chunk], output[chunk]
        term, total = term_buffer[: g.shape[0]], sum_buffer[: g.shape[0]]
        xp.multiply(g, y, out=term, dtype=term.dtype)
        xp.sum(term, axis=1, out=total, keepdims=True)
        xp.multiply(y, total, out=term)
        xp.subtract(g, term, out=term)
        xp.divide(term, norms[chunk], out=target[chunk], casting="same_kind")


register(
    Op(
        name="L2Normalization",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("L2Normalization", _infer_dtype),
        params=_PARAMS,
        outputs=("output", "norm"),
        visible_outputs=1,
        gradient=grad("_backward_L2Normalization", "g0", "y0", "y1"),
        inplace=UNARY_INPLACE,
        doc="data / sqrt(sum of squares + eps), in the shape of data. The sum is over a sample (instance), over the "
        "channels of a position (channel) or over the positions of a channel (spatial).",
    )
)
backward(
    "L2Normalization",
    _backward,
    ("ograd", "output", "norm"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
)
