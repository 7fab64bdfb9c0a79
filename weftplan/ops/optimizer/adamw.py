"""Steps of AdamW: _adamw_update, and _mp_adamw_update with a float32 copy of the weight.

The factor of the gradient is an array of one number, which a loss scaler changes from step to step. As in MXNet 1.9.1,
a step whose factor is 0, infinite or NaN changes nothing. The host does not wait for the factor: the kernel always
computes the new weight and state, and stores them only if the factor is valid.
"""

from __future__ import annotations

from weftplan.ops.core.expression import Expr, Parameters, f, where
from weftplan.ops.core.params import p_float
from weftplan.ops.core.schema import Param
from weftplan.ops.optimizer.step import ADAM, COMMON, COPY, LR, average, step


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


step(
    "_adamw_update",
    _adamw,
    ("mean", "var", COPY, "rescale_grad"),
    (
        LR,
        *ADAM,
        Param("wd", p_float, 0.0, "weight decay, apart from the gradient"),
        Param("eta", p_float, doc="factor of the whole step"),
        COMMON[2],
    ),
    "One step of Adam with decoupled weight decay: weight - eta · (lr · mean / (sqrt(var) + epsilon) + wd · weight).",
    numbers=("rescale_grad",),
    single=("rescale_grad",),
)
