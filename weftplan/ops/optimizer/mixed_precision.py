"""Optimizer steps of low-precision weights with a float32 copy: mp_sgd_update, mp_sgd_mom_update, mp_nag_mom_update.

A step updates the copy, which is the last input. The output is the copy rounded to the weight's dtype.
"""

from __future__ import annotations

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core.expression import Expr, Parameters, cast
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.rules import DTypes, merge_dtype
from weftplan.ops.core.schema import Params
from weftplan.ops.optimizer.sgd_adam import CHOICES, COMMON, LR, MOMENTUM, Rule, rescaled, sgd, sgd_mom, step

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


def mixed_kernel(rule: Rule, states: int) -> FormulaKernel:
    """Return the kernel of a step of a float32 copy, with this number of states.

    Its inputs are the weight, which it does not read, gradient, states and copy; the output is the rounded new weight.
    """

    def mixed(p: Parameters, weight: Expr, gradient: Expr, *states_and_copy: Expr) -> tuple[Expr, ...]:
        *old, copy = states_and_copy
        new, *news = rule(p, copy, cast(gradient, _WIDE), *old)
        return new, *news, new

    end = 2 + states
    return FormulaKernel(mixed, 3 + states, states=range(2, end + 1), overlaps=(), choices=CHOICES, base=end)


def _nag_mom(p: Parameters, w: Expr, g: Expr, mom: Expr) -> tuple[Expr, ...]:
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


for _name, _rule, _states, _params, _doc in (
    ("mp_sgd_update", sgd, (), (LR, *COMMON), "sgd_update on a float32 copy of the weight."),
    ("mp_sgd_mom_update", sgd_mom, ("mom",), (LR, MOMENTUM, *COMMON), "sgd_mom_update on a float32 copy."),
    ("mp_nag_mom_update", _nag_mom, ("mom",), (LR, MOMENTUM, *COMMON[:3]), "nag_mom_update on a float32 copy."),
):
    step(_name, mixed_kernel(_rule, len(_states)), (*_states, "weight32"), _params, _doc, infer_dtype=mixed_dtype,
         ignored=(0,))  # fmt: skip
