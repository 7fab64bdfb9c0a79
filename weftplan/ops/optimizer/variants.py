"""Optimizer steps as operators: signSGD, Signum, NAG, RMSProp, FTRL, FTML.

The formulas are those of MXNet 1.9.1. Decay rates are rounded to float32, so that 1 - 0.999 is rounded as there.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.kernels import block_workspace
from weftplan.ops.core.params import p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, same_dtype, same_shape
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.ops.optimizer.sgd_adam import COMMON, LR, rescaled, step_kernel
from weftplan.support.array_types import ArrayModule, RawArray

_SHARED = COMMON[:3]
MOMENTUM = Param("momentum", p_float, 0.0, "factor of the velocity")


def single(value: float) -> float:
    """Return ``value`` rounded to float32."""
    return float(np.float32(value))


def decay_average(xp: ArrayModule, average: RawArray, rate: float, news: RawArray, spare: RawArray) -> None:
    """Compute ``average`` = rate · average + (1 - rate) · news in place; ``spare`` is scratch."""
    rate = single(rate)
    xp.multiply(average, rate, out=average)
    xp.multiply(news, 1.0 - rate, out=spare)
    xp.add(average, spare, out=average)


def decay_square_average(xp: ArrayModule, average: RawArray, rate: float, news: RawArray, spare: RawArray) -> None:
    """Compute ``average`` = rate · average + (1 - rate) · news² in place; ``spare`` is scratch."""
    rate = single(rate)
    xp.multiply(average, rate, out=average)
    xp.multiply(news, news, out=spare)
    xp.multiply(spare, 1.0 - rate, out=spare)
    xp.add(average, spare, out=average)


def _limit(xp: ArrayModule, limit: float, out: RawArray) -> None:
    if limit >= 0:
        xp.clip(out, -limit, limit, out=out)


def _signsgd(xp: ArrayModule, p: Params, w: RawArray, g: RawArray, out: RawArray, t: RawArray, u: RawArray) -> None:
    xp.sign(g, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.multiply(w, 1.0 - p["lr"] * p["wd"], out=out)
    xp.subtract(out, t, out=out)


def _signum(
    xp: ArrayModule, p: Params, w: RawArray, g: RawArray, mom: RawArray, out: RawArray, t: RawArray, u: RawArray
) -> None:
    rescaled(xp, p, g, t)
    xp.multiply(w, p["wd"], out=u)
    xp.add(t, u, out=t)
    xp.multiply(t, 1.0 - single(p["momentum"]), out=t)
    xp.multiply(mom, p["momentum"], out=mom)
    xp.subtract(mom, t, out=mom)
    xp.sign(mom, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.multiply(w, 1.0 - p["lr"] * p["wd_lh"], out=out)
    xp.add(out, t, out=out)


def _nag_mom(
    xp: ArrayModule, p: Params, w: RawArray, g: RawArray, mom: RawArray, out: RawArray, t: RawArray, u: RawArray
) -> None:
    """Compute d = lr · (rescaled gradient + wd · w), mom = momentum · mom - d, and ``out`` = w + momentum · mom - d."""
    rescaled(xp, p, g, t)
    xp.multiply(w, p["wd"], out=u)
    xp.add(t, u, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.multiply(mom, p["momentum"], out=mom)
    xp.subtract(mom, t, out=mom)
    xp.multiply(mom, p["momentum"], out=u)
    xp.subtract(u, t, out=u)
    xp.add(w, u, out=out)


def _rmsprop(
    xp: ArrayModule, p: Params, w: RawArray, g: RawArray, n: RawArray, out: RawArray, t: RawArray, u: RawArray
) -> None:
    xp.multiply(w, p["wd"], out=u)
    rescaled(xp, p, g, t, u)
    decay_square_average(xp, n, p["gamma1"], t, u)
    xp.add(n, p["epsilon"], out=u)
    xp.sqrt(u, out=u)
    xp.divide(t, u, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.subtract(w, t, out=out)
    _limit(xp, p["clip_weights"], out)


def _rmspropalex(
    xp: ArrayModule,
    p: Params,
    w: RawArray,
    g: RawArray,
    n: RawArray,
    mean: RawArray,
    delta: RawArray,
    out: RawArray,
    t: RawArray,
    u: RawArray,
) -> None:
    xp.multiply(w, p["wd"], out=u)
    rescaled(xp, p, g, t, u)
    decay_square_average(xp, n, p["gamma1"], t, u)
    decay_average(xp, mean, p["gamma1"], t, u)
    xp.multiply(mean, mean, out=u)
    xp.subtract(n, u, out=u)
    xp.add(u, p["epsilon"], out=u)
    xp.sqrt(u, out=u)
    xp.divide(t, u, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.multiply(delta, p["gamma2"], out=delta)
    xp.subtract(delta, t, out=delta)
    xp.add(w, delta, out=out)
    _limit(xp, p["clip_weights"], out)


def _ftrl(
    xp: ArrayModule,
    p: Params,
    w: RawArray,
    g: RawArray,
    z: RawArray,
    n: RawArray,
    out: RawArray,
    t: RawArray,
    u: RawArray,
) -> None:
    rescaled(xp, p, g, t)
    xp.add(z, t, out=z)
    xp.multiply(t, t, out=t)
    xp.sqrt(n, out=u)
    xp.add(n, t, out=n)
    xp.sqrt(n, out=t)
    xp.subtract(t, u, out=u)
    xp.multiply(u, w, out=u)
    xp.divide(u, p["lr"], out=u)
    xp.subtract(z, u, out=z)
    xp.add(t, p["beta"], out=t)
    xp.divide(t, p["lr"], out=t)
    xp.add(t, p["wd"], out=t)
    xp.absolute(z, out=u)
    xp.subtract(u, p["lamda1"], out=u)
    xp.maximum(u, 0.0, out=u)  # max(|z| - lamda1, 0)
    xp.divide(u, t, out=u)
    xp.sign(z, out=t)
    xp.multiply(u, t, out=u)
    xp.negative(u, out=out)


def _ftml(
    xp: ArrayModule,
    p: Params,
    w: RawArray,
    g: RawArray,
    d: RawArray,
    v: RawArray,
    z: RawArray,
    out: RawArray,
    t: RawArray,
    u: RawArray,
) -> None:
    beta1, beta2 = single(p["beta1"]), single(p["beta2"])
    xp.multiply(w, p["wd"], out=u)
    xp.multiply(g, p["rescale_grad"], out=t)
    xp.add(t, u, out=t)
    _limit(xp, p["clip_grad"], t)
    decay_square_average(xp, v, beta2, t, u)
    decay_average(xp, z, beta1, t, u)
    xp.divide(v, 1.0 - beta2 ** p["t"], out=u)
    xp.sqrt(u, out=u)
    xp.add(u, p["epsilon"], out=u)
    xp.multiply(u, (1.0 - beta1 ** p["t"]) / p["lr"], out=u)
    xp.multiply(d, beta1, out=d)
    xp.subtract(u, d, out=t)
    xp.multiply(t, w, out=t)
    xp.subtract(z, t, out=z)
    xp.copyto(d, u)
    xp.divide(z, d, out=t)
    xp.negative(t, out=out)


_RMS = (
    Param("gamma1", p_float, 0.95, "decay of the averages"),
    Param("epsilon", p_float, 1e-8, "added before the root"),
)
_CLIP_WEIGHTS = Param("clip_weights", p_float, -1.0, "limit of the new weight's absolute values; negative: none")
T = Param("t", p_int, doc="number of this update, counted from 1")
for _name, _step, _states, _params, _doc in (
    ("signsgd_update", _signsgd, (), (LR, *_SHARED), "weight · (1 - lr · wd) - lr · sign(gradient)."),
    (
        "signum_update",
        _signum,
        ("mom",),
        (LR, MOMENTUM, *_SHARED, Param("wd_lh", p_float, 0.0, "decay of the weight itself")),
        "lr times the sign of the averaged descent is added to the weight.",
    ),
    ("nag_mom_update", _nag_mom, ("mom",), (LR, MOMENTUM, *_SHARED), "One step of Nesterov's descent."),
    (
        "rmsprop_update",
        _rmsprop,
        ("n",),
        (LR, *_RMS, *_SHARED, _CLIP_WEIGHTS),
        "weight - lr · gradient / sqrt(n + epsilon), where n averages squares (Tieleman and Hinton 2012).",
    ),
    (
        "rmspropalex_update",
        _rmspropalex,
        ("n", "g", "delta"),
        (LR, _RMS[0], Param("gamma2", p_float, 0.9, "decay of delta"), _RMS[1], *_SHARED, _CLIP_WEIGHTS),
        "RMSProp with the variance for the mean of squares, and a velocity (Graves 2013).",
    ),
    (
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
    ),
    (
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
    ),
):
    register(
        Op(
            name=_name,
            forward=step_kernel(_step),
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            params=_params,
            inputs=("weight", "grad", *_states),
            aux=tuple(range(2, 2 + len(_states))),
            inplace=UNARY_INPLACE,
            workspace=block_workspace(None, None),
            doc=_doc,
        )
    )
