"""cumsum: running sums along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weftplan.ops.kernels import accumulator
from weftplan.ops.params import p_dtype, p_int, p_optional
from weftplan.ops.registry import register
from weftplan.ops.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape, normalize_axis
from weftplan.ops.schema import Op, OpContext, Param, Params

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


def _sums(ctx: OpContext, params: Params, source: Any, target: Any, step: int) -> None:
    """Running sums along the axis, from its start (``step`` 1) or its end (-1)."""
    axis = params["axis"]
    if axis is None:
        source, target, axis = source.reshape(-1), target.reshape(-1), 0
    way = (*(slice(None),) * (axis % source.ndim), slice(None, None, step))
    ctx.xp.cumsum(source[way], axis=axis, dtype=accumulator(target.dtype), out=target[way])


def _cumsum(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is not None:
        _sums(ctx, params, inputs[0], outputs[0], 1)


def _backward_cumsum(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is not None:
        g = inputs[0] if params["axis"] is not None else inputs[0].reshape(outputs[0].shape)
        _sums(ctx, params, g, outputs[0], -1)


register(
    Op(
        name="cumsum",
        forward=_cumsum,
        infer_shape=_shape,
        infer_dtype=_dtype,
        params=_CUMSUM,
        inputs=("a",),
        gradient=grad("_backward_cumsum", "g0"),
        doc="Sums of the elements up to each one along axis.",
    )
)
backward("cumsum", _backward_cumsum, ("ograd",), params=_CUMSUM)
