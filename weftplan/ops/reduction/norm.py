"""norm: the 1-norm and the 2-norm over axes, computed row by row in bounded scratch."""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.floats import is_half
from weftplan.ops.core.forms import ChosenKernel, ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator, collapse, reduce_to, rows_per_block
from weftplan.ops.core.params import p_bool, p_dtype, p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, backward, grad, merge_dtype, same_dtype
from weftplan.ops.core.schema import DType, InplacePair, Op, Param, Params, Shape, SpecLike
from weftplan.ops.reduction.reduce import keepdims_shape, reduced_axes, reduced_shape, rowwise
from weftplan.support.array_types import ArrayModule, RawArray


def _norm_ord(value: object) -> int:
    order = p_int(value)
    if order not in (1, 2):
        raise ValueError("expected 1 or 2")
    return order


_NORM = (
    Param("ord", _norm_ord, 2, "1: sum of absolute values; 2: root of the sum of squares"),
    Param("axis", p_optional(p_shape), None, "axes to reduce; None: all"),
    Param("out_dtype", p_optional(p_dtype), None, "dtype of the output; None: that of data"),
    Param("keepdims", p_bool, False, "keep the reduced axes with size 1"),
)


def _norm_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    if params["out_dtype"] is None:
        return same_dtype(params, ins, outs)
    return ins, [merge_dtype(outs[0], params["out_dtype"], "output and out_dtype of norm")]


def _norm_plan(source: Shape, params: Params) -> tuple[Shape, Shape, int]:
    """Return (collapsed data shape, collapsed output shape, rows per block)."""
    axes = reduced_axes(params, len(source), "norm")
    shape, small = collapse(source, keepdims_shape(source, axes))
    return shape, small, rows_per_block(shape)


def _working(params: Params, data: DType, out: DType) -> DType:
    """Return the dtype of the sums; squares are summed in float64, as they overflow long before their root does.

    For the 1-norm and half-precision data it is the wider of the accumulators of data and output.
    """
    if params["ord"] == 1 or is_half(data):
        return np.result_type(accumulator(data), accumulator(out))
    return np.dtype(np.float64)


def _scratch(params: Params, data: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch: a block of powers, the sums, and one block's sums if several blocks are added up."""
    shape, small, rows = _norm_plan(data.shape, params)
    part: Shape = small if rows < shape[0] and small[0] == 1 else (0,)
    return [(dims, _working(params, data.dtype, out.dtype)) for dims in ((rows, *shape[1:]), small, part)]


@kernel(scratch=_scratch)
def _norm(
    xp: ArrayModule, p: Params, data: RawArray, out: RawArray, powers: RawArray, total: RawArray, part: RawArray
) -> None:
    shape, small, rows = _norm_plan(data.shape, p)
    x, y = data.reshape(shape), out.reshape(small)
    work = total.dtype
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        term = powers[: stop - start]
        if p["ord"] == 1:
            xp.absolute(x[start:stop], out=term, dtype=work)
        else:
            xp.multiply(x[start:stop], x[start:stop], out=term, dtype=work)
        if small[0] != 1:
            reduce_to(xp, term, total[start:stop])
        elif start == 0:
            reduce_to(xp, term, total)
        else:
            reduce_to(xp, term, part)
            xp.add(total, part, out=total)
    if p["ord"] == 2:
        xp.sqrt(total, out=total)
    xp.copyto(y, total, casting="unsafe")


def _norm1_gradient(
    xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray | None
) -> None:
    xp.sign(x, out=out)
    xp.multiply(out, g, out=out, casting="unsafe")


def _norm2_gradient(
    xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray | None
) -> None:
    xp.divide(x, y, out=out, casting="unsafe")
    xp.multiply(out, g, out=out, casting="unsafe")


_NORM_BACKWARD = {1: rowwise(_norm1_gradient, False), 2: rowwise(_norm2_gradient, False)}


register(
    Op(
        name="norm",
        forward=_norm,
        infer_shape=reduced_shape,
        infer_dtype=_norm_dtype,
        params=_NORM,
        gradient=grad("_backward_norm", "g0", "x0", "y0"),
        doc="The 1-norm or 2-norm over axes.",
    )
)
backward(
    "norm",
    ChosenKernel(lambda params: (_NORM_BACKWARD[params["ord"]], params)),
    ("ograd", "data", "output"),
    params=_NORM,
    inplace=(InplacePair(1, 0),),
)
