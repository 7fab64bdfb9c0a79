"""The two phases of LAMB (You et al. 2020), also for low-precision weights with a float32 copy.

Phase 1 computes the direction of the step. The caller then computes the norms of weight and direction, and phase 2
computes the new weight from them; ``lamb_update`` does all of this. Decay rates are rounded to float32, so that
1 - 0.999 is rounded as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.expression import Expr, Parameters, cast, f, where
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.formula_kernel import Choices, FormulaKernel
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import get, parse_params, register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    floats_only,
    merge_dtype,
    merge_shape,
    same_shape,
    take_bytes,
)
from weftplan.ops.core.schema import Arrays, InplacePair, Op, OpContext, Param, Params, TensorSpec
from weftplan.ops.optimizer.mixed_precision import mixed_dtype
from weftplan.ops.optimizer.sgd_adam import CHOICES, COMMON, LR, rescaled, step
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


step("lamb_update_phase1", _direction, ("mean", "var"), _DIRECTION,
     "The direction of LAMB (You et al. 2020): Adam's, and wd · weight.")  # fmt: skip
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


_BOUNDS: Choices = {"has_lower": lambda p: p["lower_bound"] >= 0, "has_upper": lambda p: p["upper_bound"] >= 0}


def _step(p: Parameters, w: Expr, g: Expr, r1: Expr, r2: Expr) -> Expr:
    """Return w - lr · r1 / r2 · g with r1 clipped to its bounds, and lr for the rate if r2 or clipped r1 is 0."""
    if p.has_lower:
        r1 = f.maximum(r1, p.lower_bound)
    if p.has_upper:
        r1 = f.minimum(r1, p.upper_bound)
    is_zero = f.equal(r1 * r2, 0)  # before the ratio, which then needs no scratch of its own
    rate: Expr = where(is_zero, 1, r1 / r2) * p.lr
    return w - g * rate


def _mixed_step(p: Parameters, weight: Expr, g: Expr, r1: Expr, r2: Expr, weight32: Expr) -> tuple[Expr, Expr]:
    new = _step(p, weight32, g, r1, r2)
    return new, new


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


_FORMULA = "weight - lr · r1 / r2 · g, where r1 and r2 are the norms of weight and direction (1 if either is 0)."
register(
    Op(
        name="lamb_update_phase2",
        forward=FormulaKernel(_step, 4, overlaps=(0,), choices=_BOUNDS, numbers=(2, 3)),
        infer_shape=_step_shape,
        infer_dtype=floats_only("lamb_update_phase2"),
        params=_STEP,
        inputs=("weight", "g", "r1", "r2"),
        inplace=UNARY_INPLACE,
        doc=_FORMULA,
    )
)
register(
    Op(
        name="mp_lamb_update_phase2",
        forward=FormulaKernel(_mixed_step, 5, states=(4,), overlaps=(), choices=_BOUNDS, numbers=(2, 3), base=4),
        infer_shape=_step_shape,
        infer_dtype=_mixed_step_dtype,
        params=_STEP,
        inputs=("weight", "g", "r1", "r2", "weight32"),
        aux=(4,),
        inplace=(InplacePair(0, 0),),
        ignored_inputs=(0,),
        doc=f"lamb_update_phase2 of a float32 copy of the weight: {_FORMULA}",
    )
)

# --------------------------------------------------------------------------------------------------------- a whole step

_PHASES = get("lamb_update_phase1"), get("norm"), get("lamb_update_phase2")
_NORM = parse_params(_PHASES[1], {})


def _phase(ctx: OpContext, op: Op, params: Params, inputs: Arrays, result: RawArray) -> Callable[[], object]:
    """Return a call of an operator, which takes its scratch from the bytes that are free now."""
    return ctx.repeated(partial(op.forward, ctx, params, inputs, [result]))


@workspace_kernel
def _both_phases(
    ctx: OpContext, p: Params, w: RawArray, g: RawArray, mean: RawArray, var: RawArray, out: RawArray | None
) -> None:
    if out is None:  # the new weight is not needed, so the states do not change either
        return
    direction, r1, r2 = (ctx.take(shape, w.dtype) for shape in (w.shape, (1,), (1,)))
    phase1, norm, phase2 = _PHASES
    for call in [
        _phase(ctx, phase1, p, (w, g, mean, var), direction),
        _phase(ctx, norm, _NORM, (w,), r1),
        _phase(ctx, norm, _NORM, (direction,), r2),
        _phase(ctx, phase2, p, (w, direction, r1, r2), out),
    ]:
        call()


def _both_phases_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    weight, number = inputs[0], TensorSpec((1,), inputs[0].dtype)
    phase1, norm, phase2 = _PHASES
    return take_bytes(weight, number, number) + max(
        phase1.workspace_bytes(params, inputs, [weight]),
        norm.workspace_bytes(_NORM, [weight], [number]),
        phase2.workspace_bytes(params, [weight, weight, number, number], outputs),
    )


register(
    Op(
        name="lamb_update",
        forward=_both_phases,
        infer_shape=same_shape,
        infer_dtype=floats_only("lamb_update"),
        params=(*_DIRECTION, *_STEP),
        inputs=("weight", "grad", "mean", "var"),
        aux=(2, 3),
        inplace=UNARY_INPLACE,
        workspace=_both_phases_workspace,
        in_mxnet=False,
        doc="One step of LAMB: both phases, and the norms between them.",
    )
)
