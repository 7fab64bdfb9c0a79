"""LRN: local response normalisation over neighbouring channels.

The hidden output ``tmp_norm`` is the divisor of the data before it is raised to the power ``beta``.
"""

from __future__ import annotations

import math

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator, row_blocks, rows_per_block
from weftplan.ops.core.params import p_float, p_int
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
    Param("alpha", p_float, 1e-4, "Factor of the mean square."),
    Param("beta", p_float, 0.75, "Power of the divisor."),
    Param("knorm", p_float, 2.0, "Constant in the divisor."),
    Param("nsize", p_int, doc="Channels in a window. An even number divides the sum of one channel less, as in MXNet."),
)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if params["nsize"] < 1:
        raise ParameterError(f"LRN: nsize={params['nsize']}: expected at least 1")
    data = None
    for shape in (ins[0], *outs):
        data = merge_shape(data, shape, "LRN: data, output and tmp_norm")
    if data is not None and len(data) < 2:
        raise ShapeError(f"LRN: data has shape {data}, expected batch and channels")
    return [data], [data, data]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "LRN: data and output")
    norm = None if data is None else accumulator(data)
    return [data], [data, merge_dtype(norm, outs[1], "LRN: tmp_norm (float32 for float16 data)")]


def _rows(shape: Shape) -> Shape:
    return shape[0], shape[1], math.prod(shape[2:])


def _scratch(params: Params, data: SpecLike, *outputs: SpecLike | None) -> ScratchSpecs:
    """Return the scratch specs of either pass: two blocks of data in the accumulator dtype."""
    rows = _rows(data.shape)
    return [((rows_per_block(rows), *rows[1:]), accumulator(data.dtype))] * 2


def _window_sum(xp: ArrayModule, values: RawArray, half: int, out: RawArray) -> None:
    """Compute ``out`` = for each channel (axis 1), the sum of ``values`` over the channels at most ``half`` away."""
    xp.copyto(out, values)
    for shift in range(1, min(half, values.shape[1] - 1) + 1):
        xp.add(out[:, shift:], values[:, :-shift], out=out[:, shift:])
        xp.add(out[:, :-shift], values[:, shift:], out=out[:, :-shift])


@kernel(scratch=_scratch)
def _forward(
    xp: ArrayModule,
    p: Params,
    data: RawArray,
    out: RawArray | None,
    norms: RawArray | None,
    square_buffer: RawArray,
    sum_buffer: RawArray,
) -> None:
    rows = _rows(data.shape)
    data = data.reshape(rows)
    out, norms = (None if array is None else array.reshape(rows) for array in (out, norms))
    for images in row_blocks(rows):
        x = data[images]
        square, norm = square_buffer[: x.shape[0]], sum_buffer[: x.shape[0]]
        xp.multiply(x, x, out=square, dtype=square.dtype)
        _window_sum(xp, square, (p["nsize"] - 1) // 2, norm)
        xp.multiply(norm, p["alpha"] / p["nsize"], out=norm)
        xp.add(norm, p["knorm"], out=norm)
        if norms is not None:
            norms[images] = norm
        if out is not None:
            xp.power(norm, -p["beta"], out=norm)
            xp.multiply(x, norm, out=out[images], casting="same_kind")


@kernel(scratch=_scratch)
def _backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    data: RawArray,
    norms: RawArray,
    out: RawArray,
    term_buffer: RawArray,
    sum_buffer: RawArray,
) -> None:
    """Compute the gradient of data.

    It is ograd · norm^-beta - 2 · alpha · beta / nsize · data · sum(ograd · data · norm^(-beta - 1)), with the sum over
    the channels of the window.
    """
    rows = _rows(out.shape)
    ograd, data, norms, out = (array.reshape(rows) for array in (ograd, data, norms, out))
    for images in row_blocks(rows):
        g, x, norm = ograd[images], data[images], norms[images]
        term, total = term_buffer[: g.shape[0]], sum_buffer[: g.shape[0]]
        xp.power(norm, -p["beta"] - 1.0, out=term)
        xp.multiply(term, g, out=term)
        xp.multiply(term, x, out=term)
        _window_sum(xp, term, (p["nsize"] - 1) // 2, total)
        xp.multiply(total, x, out=total)
        xp.multiply(total, -2.0 * p["alpha"] * p["beta"] / p["nsize"], out=total)
        xp.power(norm, -p["beta"], out=term)
        xp.multiply(term, g, out=term)
        xp.add(term, total, out=out[images], casting="same_kind")


register(
    Op(
        name="LRN",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("LRN", _infer_dtype),
        params=_PARAMS,
        outputs=("output", "tmp_norm"),
        visible_outputs=1,
        gradient=grad("_backward_LRN", "g0", "x0", "y1"),
        inplace=UNARY_INPLACE,
        doc="data / (knorm + alpha · mean square over nsize channels)^beta, in the shape of data.",
    )
)
backward(
    "LRN",
    _backward,
    ("ograd", "data", "tmp_norm"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
)
