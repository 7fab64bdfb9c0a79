"""The two phases of LAMB (You et al. 2020), also for low-precision weights with a float32 copy.

Phase 1 computes the direction of the step. The caller then computes the norms of weight and direction, and phase 2
computes the new weight from them. Decay rates are rounded to float32, so that 1 - 0.999 is rounded as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.expression import Expr, Parameters, cast
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.kernels import block_bytes, blocks
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    floats_only,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
)
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, TensorSpec, Workspace
from weftplan.ops.optimizer.mixed_precision import mixed_dtype
from weftplan.ops.optimizer.sgd_adam import CHOICES, COMMON, LR, rescaled, step_kernel
from weftplan.ops.optimizer.variants import T, average, rounded
from weftplan.support.array_types import RawArray

_WIDE = np.dtype(np.float32)

# ----------------------------------------------------------------------------------------------- phase 1: the direction

_DIRECTION = (
    Param("beta1", p_float, 0.9, "decay of the mean"),
    Param("beta2", p_float, 0.999, "decay of the mean of squares"),
    Param("epsilon", p_float, 1e-6, "added to the root of var"),
    T,
    Param("bias_correction", p_bool, True, "divide the averages by 1 - beta to the power t"),
    Param("wd", p_float, doc="weight decay"),
    *COMMON[1:3],
)


def _direction(p: Parameters, w: Expr, g: Expr, mean: Expr, var: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g)
    mean = average(mean, p.beta1, g)
    var = average(var, p.beta2, g.square())
    size = (var / (1.0 - rounded(p.beta2) ** p.t if p.corrects else 1.0)).sqrt() + p.epsilon
    ratio = mean / (1.0 - rounded(p.beta1) ** p.t if p.corrects else 1.0) / size
    return ratio + w * p.wd, mean, var


def _mixed_direction(p: Parameters, weight: Expr, g: Expr, mean: Expr, var: Expr, weight32: Expr) -> tuple[Expr, ...]:
    return _direction(p, weight32, cast(g, _WIDE), mean, var)


def _mixed_direction_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer dtypes: weight and gradient share a float dtype; all other arrays and the direction are float32."""
    inputs, _ = mixed_dtype(params, ins, [None])
    return inputs, [merge_dtype(_WIDE, outs[0], "direction of mp_lamb_update_phase1")]


register(
    Op(
        name="lamb_update_phase1",
        forward=step_kernel(_direction, 2),
        infer_shape=same_shape,
        infer_dtype=floats_only("lamb_update_phase1"),
        params=_DIRECTION,
        inputs=("weight", "grad", "mean", "var"),
        aux=(2, 3),
        inplace=UNARY_INPLACE,
        doc="The direction of LAMB (You et al. 2020): Adam's, and wd · weight.",
    )
)
register(
    Op(
        name="mp_lamb_update_phase1",
        forward=FormulaKernel(_mixed_direction, 5, states=(2, 3), overlaps=(), choices=CHOICES, base=4),
        infer_shape=same_shape,
        infer_dtype=_mixed_direction_dtype,
        params=_DIRECTION,
        inputs=("weight", "grad", "mean", "var", "weight32"),
        aux=(2, 3),
        ignored_inputs=(0,),
        doc="lamb_update_phase1 of a float32 copy of the weight; the direction is float32.",
    )
)

# ---------------------------------------------------------------------------------------------------- phase 2: the step

_STEP = (
    LR,
    Param("lower_bound", p_float, -1.0, "least r1; negative: none"),
    Param("upper_bound", p_float, -1.0, "greatest r1; negative: none"),
)


def _trusted_rate(ctx: Workspace, p: Params, r1: RawArray, r2: RawArray) -> RawArray:
    """Return an array of one element: lr · r1 / r2 with r1 clipped to its bounds, or lr if r2 or clipped r1 is 0."""
    xp = ctx.xp
    rate: RawArray = ctx.take((1,), r1.dtype)
    spare = ctx.take((1,), r1.dtype)
    xp.copyto(rate, r1)
    if p["lower_bound"] >= 0:
        xp.maximum(rate, p["lower_bound"], out=rate)
    if p["upper_bound"] >= 0:
        xp.minimum(rate, p["upper_bound"], out=rate)
    xp.multiply(rate, r2, out=spare)
    xp.divide(rate, r2, out=rate)
    xp.copyto(rate, 1, where=spare == 0)
    xp.multiply(rate, p["lr"], out=rate)
    return rate


@workspace_kernel
def _step(ctx: Workspace, p: Params, weight: RawArray, g: RawArray, r1: RawArray, r2: RawArray, out: RawArray) -> None:
    rate = _trusted_rate(ctx, p, r1, r2)
    for w, direction, target, moved in blocks(ctx, (weight, g, out), (out.dtype,)):
        ctx.xp.multiply(direction, rate, out=moved)
        ctx.xp.subtract(w, moved, out=target)


@workspace_kernel
def _mixed_step(
    ctx: Workspace,
    p: Params,
    weight: RawArray,
    g: RawArray,
    r1: RawArray,
    r2: RawArray,
    weight32: RawArray,
    out: RawArray | None,
) -> None:
    if out is None:  # the new weight is not needed, so its copy does not change either
        return
    rate = _trusted_rate(ctx, p, r1, r2)
    for w, direction, target, moved in blocks(ctx, (weight32, g, out), (_WIDE,)):
        ctx.xp.multiply(direction, rate, out=moved)
        ctx.xp.subtract(w, moved, out=w)
        ctx.xp.copyto(target, w, casting="same_kind")


def _step_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer shapes: weight, direction, copy and output share a shape; the norms have one element."""
    weight = merge_shape(merge_shape(ins[0], ins[1], "weight and g of LAMB's phase 2"), outs[0], "output")
    for copy in ins[4:]:
        weight = merge_shape(weight, copy, "weight and weight32 of LAMB's phase 2")
    norms = merge_shape((1,), merge_shape(ins[2], ins[3], "r1 and r2 of LAMB's phase 2"), "norms of LAMB's phase 2")
    if weight == ():
        raise ShapeError("LAMB's phase 2 expects at least 1 dimension, got shape ()")
    return [weight, weight, norms, norms, *[weight for _ in ins[4:]]], [weight]


def _mixed_step_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer dtypes: weight and output share a float dtype; all other arrays are float32."""
    (weight, _, *wide), out = mixed_dtype(params, [ins[0], None, *ins[1:]], outs)
    return [weight, *wide], out


def _step_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[1]
    return 2 * block_bytes(1, [dtype]) + block_bytes(int(np.prod(shape)), [dtype])


_FORMULA = "weight - lr · r1 / r2 · g, where r1 and r2 are the norms of weight and direction (1 if either is 0)."
register(
    Op(
        name="lamb_update_phase2",
        forward=_step,
        infer_shape=_step_shape,
        infer_dtype=same_dtype,
        params=_STEP,
        inputs=("weight", "g", "r1", "r2"),
        inplace=UNARY_INPLACE,
        workspace=_step_workspace,
        doc=_FORMULA,
    )
)
register(
    Op(
        name="mp_lamb_update_phase2",
        forward=_mixed_step,
        infer_shape=_step_shape,
        infer_dtype=_mixed_step_dtype,
        params=_STEP,
        inputs=("weight", "g", "r1", "r2", "weight32"),
        aux=(4,),
        inplace=(InplacePair(0, 0),),
        ignored_inputs=(0,),
        workspace=_step_workspace,
        doc=f"lamb_update_phase2 of a float32 copy of the weight: {_FORMULA}",
    )
)
