"""Optimizer steps as operators: sgd_update, sgd_mom_update, their multi-precision forms, and adam_update."""

from __future__ import annotations

from weftplan.ops.core.expression import Expr, Parameters
from weftplan.ops.optimizer.step import ADAM, COMMON, COPY, LR, MOMENTUM, rescaled, step


def _sgd(p: Parameters, w: Expr, g: Expr) -> tuple[Expr, ...]:
    return (w * (1.0 - p.lr * p.wd) + rescaled(p, g) * -p.lr,)


def _sgd_mom(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
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


step("sgd_update", _sgd, (COPY,), (LR, *COMMON), "weight - lr · (gradient + wd · weight).")
step("sgd_mom_update", _sgd_mom, ("mom", COPY), (LR, MOMENTUM, *COMMON),
     "mom = momentum · mom - lr · (gradient + wd · weight); weight + mom.")  # fmt: skip
step("adam_update", _adam, ("mean", "var"), (LR, *ADAM, *COMMON),
     "One step of Adam without bias correction: weight - lr · mean / (sqrt(var) + epsilon).")  # fmt: skip
