"""Activation: relu, sigmoid, tanh, softrelu or softsign of each element.

Every gradient is computed from the output, without the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.ops.core.expression import Expr, apply, f
from weftplan.ops.core.params import p_enum
from weftplan.ops.core.rules import DTypes, floats_only, same_dtype
from weftplan.ops.core.schema import DType, Param, Params
from weftplan.ops.elementwise.rows import row
from weftplan.ops.elementwise.unary import relu_into

_PARAMS = (Param("act_type", p_enum("relu", "sigmoid", "softrelu", "softsign", "tanh"), doc="The function."),)


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[Sequence[DType | None], Sequence[DType | None]]:
    rule = same_dtype if params["act_type"] == "relu" else floats_only(f"Activation of type {params['act_type']}")
    return rule(params, ins, outs)


def sigmoid(x: Expr) -> Expr:
    """Return the formula 1 / (1 + exp(-x))."""
    return 1.0 / (f.exp(-x) + 1.0)  # exp is infinite for very negative x, whose sigmoid is 0


def _softrelu(x: Expr) -> Expr:
    tail = f.log1p(f.exp(-abs(x)))
    return f.maximum(x, 0, kind=None) + tail


_FORMULAS: dict[str, Callable[[Expr], Expr]] = {
    "relu": lambda x: apply(relu_into, x, same=f.maximum(x, 0)),
    "sigmoid": sigmoid,
    "softrelu": _softrelu,
    "softsign": lambda x: x / (abs(x) + 1.0),
    "tanh": f.tanh,
}
_GRADIENTS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "relu": lambda g, y: g * f.not_equal(y, 0),  # y is never negative, and at NaN the incoming gradient must pass
    "sigmoid": lambda g, y: g * ((1 - y) * y),
    "softrelu": lambda g, y: g * -f.expm1(-y),  # y = log(1 + exp(x)): exp(x) / (1 + exp(x)) is 1 - exp(-y)
    "softsign": lambda g, y: g * (1.0 - abs(y)).square(),  # 1 - |y| is 1 / (1 + |x|)
    "tanh": lambda g, y: g * (1.0 - y * y),
}

row(
    "Activation",
    lambda p, x: _FORMULAS[p.act_type](x),
    lambda p, g, x, y: _GRADIENTS[p.act_type](g, y),
    params=_PARAMS,
    examples=[{"act_type": name} for name in _FORMULAS],
    choices={"act_type": lambda p: p["act_type"]},
    compute="float",
    grad_compute="float",
    integers="formula",
    infer_dtype=_infer_dtype,
    doc="relu, sigmoid, softrelu, softsign or tanh of each element; the output has the shape of data.",
)
