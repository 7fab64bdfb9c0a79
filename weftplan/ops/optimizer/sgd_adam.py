"""Optimizer steps as operators: sgd_update, sgd_mom_update, adam_update.

The output is the new weight, which may reuse the old weight's memory. The optimizer's states are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.ops.core.kernels import BlockKernel, block_workspace
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, same_dtype, same_shape
from weftplan.ops.core.schema import Kernel, Op, Param, Params
from weftplan.support.array_types import ArrayModule, RawArray

LR = Param("lr", p_float, doc="learning rate")
COMMON = (
    Param("wd", p_float, 0.0, "weight decay: times the weight, added to the gradient"),
    Param("rescale_grad", p_float, 1.0, "factor of the gradient"),
    Param("clip_gradient", p_float, -1.0, "limit of the rescaled gradient's absolute values; negative: none"),
    Param("lazy_update", p_bool, True, "accepted; all gradients are dense"),
)


def rescaled(
    xp: ArrayModule, params: Params, gradient: RawArray, out: RawArray, decayed: RawArray | None = None
) -> None:
    """Compute ``out`` = gradient · rescale_grad + decayed, clipped; None for ``decayed``: 0."""
    xp.multiply(gradient, params["rescale_grad"], out=out)
    if decayed is not None:
        xp.add(out, decayed, out=out)
    limit = params["clip_gradient"]
    if limit >= 0:
        xp.clip(out, -limit, limit, out=out)


Step = Callable[..., None]
"""``step(xp, params, weight, grad, *states, out, scratch, scratch)`` updates one block; ``out`` may be ``weight``."""


def sgd_step(xp: ArrayModule, p: Params, w: RawArray, g: RawArray, out: RawArray, t: RawArray, u: RawArray) -> None:
    """Compute ``out`` = w · (1 - lr · wd) - lr · rescaled gradient for one block; ``t`` is scratch."""
    rescaled(xp, p, g, t)
    xp.multiply(t, -p["lr"], out=t)
    xp.multiply(w, 1.0 - p["lr"] * p["wd"], out=out)
    xp.add(out, t, out=out)


def sgd_mom_step(
    xp: ArrayModule, p: Params, w: RawArray, g: RawArray, mom: RawArray, out: RawArray, t: RawArray, u: RawArray
) -> None:
    """Compute mom = momentum · mom - lr · (rescaled gradient + wd · w) and ``out`` = w + mom for one block."""
    rescaled(xp, p, g, t)
    decay = p["wd"]
    if not isinstance(decay, float) or decay != 0.0:  # the host never reads the value of an array
        xp.multiply(w, decay, out=u)
        xp.add(t, u, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.multiply(mom, p["momentum"], out=mom)
    xp.subtract(mom, t, out=mom)
    xp.add(w, mom, out=out)


def _adam(
    xp: ArrayModule,
    p: Params,
    w: RawArray,
    g: RawArray,
    mean: RawArray,
    var: RawArray,
    out: RawArray,
    t: RawArray,
    u: RawArray,
) -> None:
    xp.multiply(w, p["wd"], out=u)
    rescaled(xp, p, g, t, u)
    xp.multiply(mean, p["beta1"], out=mean)
    xp.multiply(t, 1.0 - p["beta1"], out=u)
    xp.add(mean, u, out=mean)
    xp.multiply(var, p["beta2"], out=var)
    xp.multiply(t, t, out=t)
    xp.multiply(t, 1.0 - p["beta2"], out=t)
    xp.add(var, t, out=var)
    xp.sqrt(var, out=t)
    xp.add(t, p["epsilon"], out=t)
    xp.divide(mean, t, out=t)
    xp.multiply(t, p["lr"], out=t)
    xp.subtract(w, t, out=out)


def step_kernel(step: Step) -> Kernel:
    """Return a kernel that applies ``step`` block by block, with two scratch arrays."""
    return BlockKernel(step, lambda params, dtype: [dtype, dtype])


for _name, _step, _states, _params, _doc in (
    ("sgd_update", sgd_step, (), (), "weight - lr · (gradient + wd · weight)."),
    (
        "sgd_mom_update",
        sgd_mom_step,
        ("mom",),
        (Param("momentum", p_float, 0.0, "factor of the velocity"),),
        "mom = momentum · mom - lr · (gradient + wd · weight); weight + mom.",
    ),
    (
        "adam_update",
        _adam,
        ("mean", "var"),
        (
            Param("beta1", p_float, 0.9, "decay of the mean"),
            Param("beta2", p_float, 0.999, "decay of the mean of squares"),
            Param("epsilon", p_float, 1e-8, "added to the root of var"),
        ),
        "One step of Adam without bias correction: weight - lr · mean / (sqrt(var) + epsilon).",
    ),
):
    register(
        Op(
            name=_name,
            forward=step_kernel(_step),
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            params=(LR, *_params, *COMMON),
            inputs=("weight", "grad", *_states),
            aux=tuple(range(2, 2 + len(_states))),
            inplace=UNARY_INPLACE,
            workspace=block_workspace(None, None),
            doc=_doc,
        )
    )
