"""Steps of AdamW: _adamw_update, and _mp_adamw_update with a float32 copy of the weight.

The factor of the gradient is an array of one number, which a loss scaler changes from step to step. As in MXNet 1.9.1,
a step whose factor is 0, infinite or NaN changes nothing. The host does not wait for the factor: the kernel always
computes the new weight and state, and stores them only if the factor is valid.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.expression import Expr, Parameters, cast, f, where
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.params import p_float
from weftplan.ops.core.rules import DTypes, Shapes, floats_only, merge_dtype, merge_shape
from weftplan.ops.core.schema import Param, Params
from weftplan.ops.optimizer.mixed_precision import mixed_dtype
from weftplan.ops.optimizer.sgd_adam import CHOICES, COMMON, LR, step
from weftplan.ops.optimizer.variants import average

_WIDE = np.dtype(np.float32)
_ADAMW = (
    LR,
    Param("beta1", p_float, 0.9, "decay of the mean"),
    Param("beta2", p_float, 0.999, "decay of the mean of squares"),
    Param("epsilon", p_float, 1e-8, "added to the root of var"),
    Param("wd", p_float, 0.0, "weight decay, apart from the gradient"),
    Param("eta", p_float, doc="factor of the whole step"),
    COMMON[2],
)


def _adamw(p: Parameters, w: Expr, g: Expr, mean: Expr, var: Expr, factor: Expr) -> tuple[Expr, ...]:
    """Return the new weight and averages, or the old ones unless ``factor`` is finite and not 0."""
    good = f.logical_and(f.isfinite(factor), f.not_equal(factor, 0))
    g = f.multiply(g, factor)
    if p.clips:
        g = g.clip(-p.clip_gradient, p.clip_gradient)
    new = average(mean, p.beta1, g)
    mean = where(good, new, mean)
    new = average(var, p.beta2, g.square())
    var = where(good, new, var)
    new = w - (mean / (new.sqrt() + p.epsilon) * p.lr + w * p.wd) * p.eta
    return where(good, new, w), mean, var


def _mixed(
    p: Parameters, weight: Expr, g: Expr, mean: Expr, var: Expr, weight32: Expr, factor: Expr
) -> tuple[Expr, ...]:
    new, mean, var = _adamw(p, weight32, cast(g, _WIDE), mean, var, factor)
    return new, mean, var, new


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer shapes: the factor has one element, and all other arrays have the weight's shape."""
    merged = outs[0]
    for shape in ins[:-1]:
        merged = merge_shape(merged, shape, "weight, gradient and states of a step of AdamW")
    factor = merge_shape(ins[-1], (1,), "rescale_grad of a step of AdamW, an array of one number")
    return [*[merged] * (len(ins) - 1), factor], [merged]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    merged = outs[0]
    for dtype in ins[:-1]:
        merged = merge_dtype(merged, dtype, "weight, gradient and states of a step of AdamW")
    return [*[merged] * (len(ins) - 1), merge_dtype(_WIDE, ins[-1], "rescale_grad of a step of AdamW")], [merged]


step(
    "_adamw_update",
    FormulaKernel(_adamw, 5, states=(2, 3), overlaps=(0,), choices=CHOICES, numbers=(4,)),
    ("mean", "var"),
    _ADAMW,
    "One step of Adam with decoupled weight decay: weight - eta · (lr · mean / (sqrt(var) + epsilon) + wd · weight).",
    infer_shape=_shape,
    infer_dtype=floats_only("adamw_update", _dtype),
    extra=("rescale_grad",),
)
step(
    "_mp_adamw_update",
    FormulaKernel(_mixed, 6, states=(2, 3, 4), overlaps=(), choices=CHOICES, numbers=(5,), base=4),
    ("mean", "var", "weight32"),
    _ADAMW,
    "_adamw_update on a float32 copy of the weight.",
    infer_shape=_shape,
    infer_dtype=mixed_dtype,
    extra=("rescale_grad",),
    ignored=(0,),
)
