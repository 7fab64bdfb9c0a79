"""Steps of AdamW: _adamw_update, and _mp_adamw_update with a float32 copy of the weight.

The factor of the gradient is an array of one number, which a loss scaler changes from step to step. As in MXNet 1.9.1,
a step whose factor is 0, infinite or NaN changes nothing. The host does not wait for the factor: the kernel always
computes the new weight and state, and stores them only if the factor is valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, block_bytes, blocks
from weftplan.ops.core.params import p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, DTypes, Shapes, floats_only, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import Op, Param, Params, TensorSpec, Workspace
from weftplan.ops.optimizer.mixed_precision import mixed_dtype
from weftplan.ops.optimizer.sgd_adam import COMMON, LR
from weftplan.ops.optimizer.variants import single
from weftplan.support.array_types import ArrayModule, RawArray

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


def _factor(ctx: Workspace, given: RawArray) -> tuple[RawArray, RawArray]:
    """Return the factor of the gradient, and whether it is finite and not 0, as arrays of one element."""
    xp = ctx.xp
    good, nonzero = ctx.take((1,), BOOL), ctx.take((1,), BOOL)
    xp.isfinite(given, out=good)
    xp.not_equal(given, 0, out=nonzero)
    xp.logical_and(good, nonzero, out=good)
    return given, good


_FACTOR_BYTES = take_bytes(((1,), BOOL), ((1,), BOOL))


def _step(
    xp: ArrayModule,
    p: Params,
    w: RawArray,
    g: RawArray,
    mean: RawArray,
    var: RawArray,
    factor: tuple[RawArray, RawArray],
    out: RawArray,
    t: RawArray,
    u: RawArray,
    s: RawArray,
) -> None:
    """Update one block of ``mean`` and ``var`` and write new weights to ``out``; ``t``, ``u`` and ``s`` are scratch.

    ``factor`` is the result of :func:`_factor`. ``out`` may be ``w``, and ``t`` may be ``g``.
    """
    scale, good = factor
    xp.multiply(g, scale, out=t, casting="same_kind")
    limit = p["clip_gradient"]
    if limit >= 0:
        xp.clip(t, -limit, limit, out=t)
    for average, rate in ((mean, single(p["beta1"])), (var, single(p["beta2"]))):
        xp.multiply(average, rate, out=u)
        xp.multiply(t, 1.0 - rate, out=s)
        xp.add(u, s, out=u)
        xp.copyto(average, u, where=good)
        if average is mean:
            xp.multiply(t, t, out=t)
    xp.sqrt(u, out=u)
    xp.add(u, p["epsilon"], out=u)
    xp.divide(mean, u, out=u)
    xp.multiply(u, p["lr"], out=u)
    xp.multiply(w, p["wd"], out=s)
    xp.add(u, s, out=u)
    xp.multiply(u, p["eta"], out=u)
    xp.subtract(w, u, out=u)
    if out is not w:
        xp.copyto(out, w)
    xp.copyto(out, u, where=good)


@workspace_kernel
def _adamw(
    ctx: Workspace,
    p: Params,
    w: RawArray,
    g: RawArray,
    mean: RawArray,
    var: RawArray,
    given: RawArray,
    out: RawArray | None,
) -> None:
    if out is None:  # the new weight is not needed, so the states do not change either
        return
    factor = _factor(ctx, given)
    for weight, gradient, m, v, y, t, u, s in blocks(ctx, (w, g, mean, var, out), (out.dtype,) * 3):
        _step(ctx.xp, p, weight, gradient, m, v, factor, y, t, u, s)


@workspace_kernel
def _mp_adamw(
    ctx: Workspace,
    p: Params,
    weight: RawArray | None,
    g: RawArray,
    mean: RawArray,
    var: RawArray,
    weight32: RawArray,
    given: RawArray,
    out: RawArray | None,
) -> None:
    if out is None:
        return
    xp = ctx.xp
    factor = _factor(ctx, given)
    for gradient, m, v, w, y, t, u, s in blocks(ctx, (g, mean, var, weight32, out), (_WIDE,) * 3):
        xp.copyto(t, gradient)
        _step(xp, p, w, t, m, v, factor, w, t, u, s)
        xp.copyto(y, w, casting="same_kind")


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


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return _FACTOR_BYTES + block_bytes(math.prod(inputs[0].shape), [inputs[2].dtype] * 3)


register(
    Op(
        name="_adamw_update",
        forward=_adamw,
        infer_shape=_shape,
        infer_dtype=floats_only("adamw_update", _dtype),
        params=_ADAMW,
        inputs=("weight", "grad", "mean", "var", "rescale_grad"),
        aux=(2, 3),
        inplace=UNARY_INPLACE,
        workspace=_workspace,
        doc="One step of Adam with decoupled weight decay: weight - eta · (lr · mean / (sqrt(var) + epsilon) "
        "+ wd · weight).",
    )
)
register(
    Op(
        name="_mp_adamw_update",
        forward=_mp_adamw,
        infer_shape=_shape,
        infer_dtype=mixed_dtype,
        params=_ADAMW,
        inputs=("weight", "grad", "mean", "var", "weight32", "rescale_grad"),
        aux=(2, 3, 4),
        inplace=UNARY_INPLACE,
        ignored_inputs=(0,),
        workspace=_workspace,
        doc="_adamw_update on a float32 copy of the weight.",
    )
)
