"""clip: values limited to an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.ops.kernels import BOOL, block_workspace, blocks
from weftplan.ops.params import p_float
from weftplan.ops.registry import register
from weftplan.ops.rules import UNARY_INPLACE, backward, grad, same_dtype, same_shape
from weftplan.ops.scalar import converted
from weftplan.ops.schema import InplacePair, Op, OpContext, Param, Params


def _clip(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is not None:
        low, high = converted(params["a_min"], out.dtype), converted(params["a_max"], out.dtype)
        ctx.xp.clip(inputs[0], low, high, out=out)


def _backward_clip(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    xp = ctx.xp
    for g, x, y, above, below in blocks(ctx, (*inputs, out), (BOOL, BOOL)):
        xp.greater_equal(x, params["a_min"], out=above)
        xp.less_equal(x, params["a_max"], out=below)
        xp.logical_and(above, below, out=above)
        xp.multiply(g, above, out=y)


_CLIP = (Param("a_min", p_float, doc="least value"), Param("a_max", p_float, doc="greatest value"))
register(
    Op(
        name="clip",
        forward=_clip,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=_CLIP,
        gradient=grad("_backward_clip", "g0", "x0"),
        inplace=UNARY_INPLACE,
        doc="Values limited to [a_min, a_max]; the gradient passes where they lie inside.",
    )
)
backward(
    "clip",
    _backward_clip,
    ("ograd", "data"),
    params=_CLIP,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=block_workspace(BOOL, BOOL),
)
