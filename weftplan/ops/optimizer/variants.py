"""Optimizer steps as operators: signSGD, Signum, NAG, RMSProp, FTRL, FTML.

The formulas are those of MXNet 1.9.1. Decay rates are rounded to float32, so that 1 - 0.999 is rounded as there.
"""

from __future__ import annotations

from weftplan.ops.core.expression import Expr, Parameters, f
from weftplan.ops.core.params import p_float
from weftplan.ops.core.schema import Param
from weftplan.ops.optimizer.step import COMMON, COPY, LR, MOMENTUM, T, average, rescaled, rounded, step

_SHARED = COMMON[:3]


def _limited(p: Parameters, weight: Expr) -> Expr:
    if p.limits:
        weight = weight.clip(-p.clip_weights, p.clip_weights)
    return weight


def _signsgd(p: Parameters, w: Expr, g: Expr) -> tuple[Expr, ...]:
    return (w * (1.0 - p.lr * p.wd) - f.sign(g) * p.lr,)


def _signum(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
    descent = (rescaled(p, g) + w * p.wd) * (1.0 - rounded(p.momentum))
    mom = mom * p.momentum - descent
    return w * (1.0 - p.lr * p.wd_lh) + f.sign(mom) * p.lr, mom


def _nag_mom(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
    """Compute d = lr · (rescaled gradient + wd · w), mom = momentum · mom - d, and w + momentum · mom - d."""
    descent = (rescaled(p, g) + w * p.wd) * p.lr
    mom = mom * p.momentum - descent
    return w + (mom * p.momentum - descent), mom


def _nag_mom_on_copy(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
    """Return the step of nag_mom_update, but store the velocity with the decay of the new weight, not of the old.

    MXNet 1.9.1 does the same, and its saved states must remain usable.
    """
    g = rescaled(p, g)
    mom = mom * p.momentum
    g = g * p.lr
    mom = mom - g
    decay = w * (p.lr * p.wd)
    new = w + ((mom - decay) * p.momentum - decay - g)
    return new, mom - new * (p.lr * p.wd)


def _rmsprop(p: Parameters, w: Expr, g: Expr, n: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g, w * p.wd)
    n = average(n, p.gamma1, g.square())
    return _limited(p, w - g / (n + p.epsilon).sqrt() * p.lr), n


def _rmspropalex(p: Parameters, w: Expr, g: Expr, n: Expr, mean: Expr, delta: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g, w * p.wd)
    n = average(n, p.gamma1, g.square())
    mean = average(mean, p.gamma1, g)
    descent = g / (n - mean.square() + p.epsilon).sqrt() * p.lr
    delta = delta * p.gamma2 - descent
    return _limited(p, w + delta), n, mean, delta


def _ftrl(p: Parameters, w: Expr, g: Expr, z: Expr, n: Expr) -> tuple[Expr, ...]:
    g = rescaled(p, g)
    z = z + g
    square = g.square()
    old_root = n.sqrt()
    n = n + square
    root = n.sqrt()
    z = z - (root - old_root) * w / p.lr
    scale = (root + p.beta) / p.lr + p.wd
    return -(f.maximum(abs(z) - p.lamda1, 0.0) / scale * f.sign(z)), z, n


def _ftml(p: Parameters, w: Expr, g: Expr, d: Expr, v: Expr, z: Expr) -> tuple[Expr, ...]:
    beta1, beta2 = rounded(p.beta1), rounded(p.beta2)
    decayed = w * p.wd
    g = g * p.rescale_grad + decayed
    if p.clips:
        g = g.clip(-p.clip_grad, p.clip_grad)
    v = average(v, beta2, g.square())
    z = average(z, beta1, g)
    new = ((v / (1.0 - beta2**p.t)).sqrt() + p.epsilon) * ((1.0 - beta1**p.t) / p.lr)
    z = z - (new - d * beta1) * w
    return -(z / new), new, v, z


_RMS = (
    Param("gamma1", p_float, 0.95, "decay of the averages"),
    Param("epsilon", p_float, 1e-8, "added before the root"),
)
_CLIP_WEIGHTS = Param("clip_weights", p_float, -1.0, "limit of the new weight's absolute values; negative: none")
step("signsgd_update", _signsgd, (), (LR, *_SHARED), "weight · (1 - lr · wd) - lr · sign(gradient).")
step(
    "signum_update",
    _signum,
    ("mom",),
    (LR, MOMENTUM, *_SHARED, Param("wd_lh", p_float, 0.0, "decay of the weight itself")),
    "lr times the sign of the averaged descent is added to the weight.",
)
step("nag_mom_update", _nag_mom, ("mom", COPY), (LR, MOMENTUM, *_SHARED), "One step of Nesterov's descent.",
     on_copy=_nag_mom_on_copy)  # fmt: skip
step(
    "rmsprop_update",
    _rmsprop,
    ("n",),
    (LR, *_RMS, *_SHARED, _CLIP_WEIGHTS),
    "weight - lr · gradient / sqrt(n + epsilon), where n averages squares (Tieleman and Hinton 2012).",
)
step(
    "rmspropalex_update",
    _rmspropalex,
    ("n", "g", "delta"),
    (LR, _RMS[0], Param("gamma2", p_float, 0.9, "decay of delta"), _RMS[1], *_SHARED, _CLIP_WEIGHTS),
    "RMSProp with the variance for the mean of squares, and a velocity (Graves 2013).",
)
step(
    "ftrl_update",
    _ftrl,
    ("z", "n"),
    (
        LR,
        Param("lamda1", p_float, 0.01, "weight of the absolute values"),
        Param("beta", p_float, 1.0, "added to the root of n"),
        *_SHARED,
    ),
    "Follow the regularized leader (McMahan et al. 2013).",
)
step(
    "ftml_update",
    _ftml,
    ("d", "v", "z"),
    (
        LR,
        Param("beta1", p_float, 0.6, "decay of z and d"),
        Param("beta2", p_float, 0.999, "decay of v"),
        Param("epsilon", p_float, 1e-8, "added to the root of v"),
        T,
        *_SHARED[:2],
        Param("clip_grad", p_float, -1.0, "limit of the decayed gradient's absolute values; negative: none"),
    ),
    "Follow the moving leader (Zheng and Kwok 2017).",
)
