"""The two phases of LAMB (You et al. 2020), also for low-precision weights with a float32 copy.

Phase 1 computes the direction of the step. The caller then computes the norms of weight and direction, and phase 2
computes the new weight from them; ``lamb_update`` does all of this. Decay rates are rounded to float32, so that
1 - 0.999 is rounded as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weftplan.ops.core.expression import Expr, Parameters, f, where
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import get, parse_params, register
from weftplan.ops.core.rules import UNARY_INPLACE, floats_only, same_shape, take_bytes
from weftplan.ops.core.schema import Op, OpContext, Param, Params, TensorSpec
from weftplan.ops.optimizer.step import ADAM, COMMON, COPY, LR, T, average, rescaled, rounded, step
from weftplan.support.array_types import RawArray

_DIRECTION = (
    *ADAM[:2],
    Param("epsilon", p_float, 1e-6, "added to the root of var"),
    T,
    Param("bias_correction", p_bool, True, "divide the averages by 1 - beta to the power t"),
    Param("wd", p_float, doc="weight decay"),
    *COMMON[1:3],
)
_STEP = (
    LR,
    Param("lower_bound", p_float, -1.0, "least r1; negative: none"),
    Param("upper_bound", p_float, -1.0, "greatest r1; negative: none"),
)


def _direction(p: Parameters, w: Expr, g: Expr, mean: Expr, var: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g)
    mean = average(mean, p.beta1, g)
    var = average(var, p.beta2, g.square())
    size = (var / (1.0 - rounded(p.beta2) ** p.t if p.corrects else 1.0)).sqrt() + p.epsilon
    ratio = mean / (1.0 - rounded(p.beta1) ** p.t if p.corrects else 1.0) / size
    return ratio + w * p.wd, mean, var


def _step(p: Parameters, w: Expr, g: Expr, r1: Expr, r2: Expr) -> tuple[Expr, ...]:
    """Return w - lr · r1 / r2 · g with r1 clipped to its bounds, and lr for the rate if r2 or clipped r1 is 0."""
    if p.has_lower:
        r1 = f.maximum(r1, p.lower_bound)
    if p.has_upper:
        r1 = f.minimum(r1, p.upper_bound)
    is_zero = f.equal(r1 * r2, 0)  # before the ratio, which then needs no scratch of its own
    rate: Expr = where(is_zero, 1, r1 / r2) * p.lr
    return (w - g * rate,)


step("lamb_update_phase1", _direction, ("mean", "var", COPY), _DIRECTION,
     "The direction of LAMB (You et al. 2020): Adam's, and wd · weight.", is_direction=True)  # fmt: skip
step(
    "lamb_update_phase2",
    _step,
    ("r1", "r2", COPY),
    _STEP,
    "weight - lr · r1 / r2 · g, where r1 and r2 are the norms of weight and direction (1 if either is 0).",
    gradient="g",
    numbers=("r1", "r2"),
)

# --------------------------------------------------------------------------------------------------------- a whole step

_NORM = parse_params(get("norm"), {})
_CALLS: tuple[tuple[Op, Params | None, tuple[int, ...], int], ...] = (
    (get("lamb_update_phase1"), None, (0, 1, 2, 3), 4),
    (get("norm"), _NORM, (0,), 5),
    (get("norm"), _NORM, (4,), 6),
    (get("lamb_update_phase2"), None, (0, 4, 5, 6), 7),
)
"""Operators, their parameters (None: those of the step), and the indices of their inputs and output among weight,
gradient, mean, var, direction, r1, r2, new weight."""


@workspace_kernel
def _both_phases(
    ctx: OpContext, p: Params, w: RawArray, g: RawArray, mean: RawArray, var: RawArray, out: RawArray | None
) -> None:
    if out is None:  # the new weight is not needed, so the states do not change either
        return
    arrays = (w, g, mean, var, *(ctx.take(shape, w.dtype) for shape in (w.shape, (1,), (1,))), out)

    def compute(op: Op, params: Params | None, inputs: Sequence[int], result: int) -> None:
        op.forward(ctx, params or p, [arrays[k] for k in inputs], [arrays[result]])

    for call in [ctx.repeated(partial(compute, *each)) for each in _CALLS]:  # each begins with the scratch free now
        call()


def _both_phases_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    weight, number = inputs[0], TensorSpec((1,), inputs[0].dtype)
    specs = (*inputs, weight, number, number, *outputs)
    return take_bytes(weight, number, number) + max(
        op.workspace_bytes(own or params, [specs[k] for k in indices], [specs[result]])
        for op, own, indices, result in _CALLS
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
