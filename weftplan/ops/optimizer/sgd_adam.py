"""Optimizer steps as operators: sgd_update, sgd_mom_update, adam_update, and how a step's formula becomes an operator.

The output is the new weight, which may reuse the old weight's memory. The optimizer's states are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.ops.core.expression import Expr, Parameters
from weftplan.ops.core.formula_kernel import Choices, FormulaKernel
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, floats_only, same_shape
from weftplan.ops.core.schema import DTypeRule, Op, Param, ShapeRule

LR = Param("lr", p_float, doc="learning rate")
COMMON = (
    Param("wd", p_float, 0.0, "weight decay: times the weight, added to the gradient"),
    Param("rescale_grad", p_float, 1.0, "factor of the gradient"),
    Param("clip_gradient", p_float, -1.0, "limit of the rescaled gradient's absolute values; negative: none"),
    Param("lazy_update", p_bool, True, "accepted; all gradients are dense"),
)
Rule = Callable[..., tuple[Expr, ...]]
"""``rule(p, weight, grad, *states)`` is the formula of a step; it returns the new weight and the new states."""
CHOICES: Choices = {
    "clips": lambda p: (p["clip_grad"] if "clip_grad" in p else p["clip_gradient"]) >= 0,
    "limits": lambda p: p.get("clip_weights", -1.0) >= 0,
    "decays": lambda p: not isinstance(p["wd"], float) or p["wd"] != 0.0,  # the host never reads the value of an array
    "corrects": lambda p: p.get("bias_correction", False),
}


def rescaled(p: Parameters, gradient: Expr, decayed: Expr | None = None) -> Expr:
    """Return the formula gradient · rescale_grad + decayed, clipped; None for ``decayed``: 0."""
    gradient = gradient * p.rescale_grad
    if decayed is not None:
        gradient = gradient + decayed
    return gradient.clip(-p.clip_gradient, p.clip_gradient) if p.clips else gradient


def step_kernel(rule: Rule, states: int) -> FormulaKernel:
    """Return the kernel of a step with this number of states."""
    return FormulaKernel(rule, 2 + states, states=range(2, 2 + states), overlaps=(0,), choices=CHOICES)


def step(
    name: str,
    kernel: Rule | FormulaKernel,
    states: tuple[str, ...],
    params: tuple[Param, ...],
    doc: str,
    *,
    infer_shape: ShapeRule = same_shape,
    infer_dtype: DTypeRule | None = None,
    extra: tuple[str, ...] = (),
    ignored: tuple[int, ...] = (),
) -> None:
    """Register the operator of a step.

    Args:
        kernel: the kernel, or the formula of one that reads only weight, gradient and states.
        states: names of its states.
        infer_dtype: None: all arrays have one float dtype.
        extra: names of the inputs after the states.
        ignored: indices of the inputs that the kernel does not read.
    """
    register(
        Op(
            name=name,
            forward=kernel if isinstance(kernel, FormulaKernel) else step_kernel(kernel, len(states)),
            infer_shape=infer_shape,
            infer_dtype=infer_dtype or floats_only(name),
            params=params,
            inputs=("weight", "grad", *states, *extra),
            aux=tuple(range(2, 2 + len(states))),
            inplace=UNARY_INPLACE,
            ignored_inputs=ignored,
            doc=doc,
        )
    )


def sgd(p: Parameters, w: Expr, g: Expr) -> tuple[Expr, ...]:
    """Return w · (1 - lr · wd) - lr · rescaled gradient."""
    return (w * (1.0 - p.lr * p.wd) + rescaled(p, g) * -p.lr,)


def sgd_mom(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
    """Return w + mom, with mom = momentum · mom - lr · (rescaled gradient + wd · w)."""
    descent = rescaled(p, g)
    if p.decays:
        descent = descent + w * p.wd
    descent = descent * p.lr
    mom = mom * p.momentum - descent
    return w + mom, mom


def _adam(p: Parameters, w: Expr, g: Expr, mean: Expr, var: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g, w * p.wd)
    mean = mean * p.beta1 + g * (1.0 - p.beta1)
    var = var * p.beta2 + g.square() * (1.0 - p.beta2)
    return w - mean / (var.sqrt() + p.epsilon) * p.lr, mean, var


MOMENTUM = Param("momentum", p_float, 0.0, "factor of the velocity")
step("sgd_update", sgd, (), (LR, *COMMON), "weight - lr · (gradient + wd · weight).")
step("sgd_mom_update", sgd_mom, ("mom",), (LR, MOMENTUM, *COMMON),
     "mom = momentum · mom - lr · (gradient + wd · weight); weight + mom.")  # fmt: skip
step(
    "adam_update",
    _adam,
    ("mean", "var"),
    (
        LR,
        Param("beta1", p_float, 0.9, "decay of the mean"),
        Param("beta2", p_float, 0.999, "decay of the mean of squares"),
        Param("epsilon", p_float, 1e-8, "added to the root of var"),
        *COMMON,
    ),
    "One step of Adam without bias correction: weight - lr · mean / (sqrt(var) + epsilon).",
)
