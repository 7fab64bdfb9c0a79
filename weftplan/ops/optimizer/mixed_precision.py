"""Optimizer steps of low-precision weights with a float32 copy: mp_sgd_update, mp_sgd_mom_update, mp_nag_mom_update.

A step updates the copy, which is the last input. The output is the copy rounded to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import block_workspace, blocks
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, merge_dtype, same_shape
from weftplan.ops.core.schema import InplacePair, Kernel, Op, Params, Workspace
from weftplan.ops.optimizer.sgd_adam import COMMON, LR, Step, rescaled, sgd_mom_step, sgd_step
from weftplan.ops.optimizer.variants import MOMENTUM
from weftplan.support.array_types import ArrayModule, RawArray

_WIDE = np.dtype(np.float32)


def mixed_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer dtypes: weight, gradient and output share a float dtype; states and the copy are float32.

    Raises:
        DTypeError: dtypes conflict, or the weight is not a float.
    """
    narrow = merge_dtype(ins[0], ins[1], "weight and gradient of a mixed-precision step")
    narrow = merge_dtype(narrow, outs[0], "weight and output of a mixed-precision step")
    if narrow is not None and not is_float(narrow):
        raise DTypeError(f"a mixed-precision step expects floats, got {narrow}: cast the weight first (Cast, astype)")
    wide = [merge_dtype(_WIDE, dtype, "state of a mixed-precision step") for dtype in ins[2:]]
    return [narrow, narrow, *wide], [narrow]


def mixed_step(xp: ArrayModule, step: Step, p: Params, block: Sequence[RawArray]) -> None:
    """Apply ``step`` to one block: gradient, states, float32 copy, low-precision output, and three scratch arrays."""
    gradient, *others, weight, target, wide, t, u = block
    xp.copyto(wide, gradient)
    step(xp, p, weight, wide, *others, weight, t, u)
    xp.copyto(target, weight, casting="same_kind")


def _mixed(step: Step) -> Kernel:
    @workspace_kernel
    def compute(ctx: Workspace, p: Params, *arrays: Any) -> None:
        *inputs, out = arrays
        if out is None:  # the new weight is not needed, so the states do not change either
            return
        for block in blocks(ctx, (*inputs[1:], out), (_WIDE, _WIDE, _WIDE)):
            mixed_step(ctx.xp, step, p, block)

    return compute


def _nag_mom(
    xp: ArrayModule, p: Params, w: RawArray, g: RawArray, mom: RawArray, out: RawArray, t: RawArray, u: RawArray
) -> None:
    """Apply nag_mom_update to one block, but subtract weight decay of the new weight from the velocity.

    MXNet 1.9.1 does the same, and its saved states must remain usable.
    """
    rescaled(xp, p, g, g)
    xp.multiply(mom, p["momentum"], out=mom)
    xp.multiply(g, p["lr"], out=g)
    xp.subtract(mom, g, out=mom)
    xp.multiply(w, p["lr"] * p["wd"], out=t)
    xp.subtract(mom, t, out=u)
    xp.multiply(u, p["momentum"], out=u)
    xp.subtract(u, t, out=u)
    xp.subtract(u, g, out=u)
    xp.add(w, u, out=out)
    xp.multiply(out, p["lr"] * p["wd"], out=t)
    xp.subtract(mom, t, out=mom)


for _name, _step, _states, _params, _doc in (
    ("mp_sgd_update", sgd_step, (), (LR, *COMMON), "sgd_update on a float32 copy of the weight."),
    ("mp_sgd_mom_update", sgd_mom_step, ("mom",), (LR, MOMENTUM, *COMMON), "sgd_mom_update on a float32 copy."),
    ("mp_nag_mom_update", _nag_mom, ("mom",), (LR, MOMENTUM, *COMMON[:3]), "nag_mom_update on a float32 copy."),
):
    register(
        Op(
            name=_name,
            forward=_mixed(_step),
            infer_shape=same_shape,
            infer_dtype=mixed_dtype,
            params=_params,
            inputs=("weight", "grad", *_states, "weight32"),
            aux=tuple(range(2, 3 + len(_states))),
            inplace=(InplacePair(0, 0),),
            ignored_inputs=(0,),
            workspace=block_workspace(_WIDE, _WIDE, _WIDE),
            doc=_doc,
        )
    )
