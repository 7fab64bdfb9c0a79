"""Activation: relu, sigmoid, tanh, softrelu or softsign of each element.

Every gradient is computed from the output, without the data. This module owns the formulas, except ``max(x, 0)``
(``elementwise/unary.py``). A formula function computes one block, with scratch that the caller provides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.ops.core.kernels import BOOL, BlockKernel, scratch_dtype
from weftplan.ops.core.params import p_enum
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, DTypes, backward, floats_only, grad, same_dtype, same_shape
from weftplan.ops.core.schema import DType, InplacePair, Op, Param, Params
from weftplan.ops.elementwise.unary import relu_into
from weftplan.support.array_types import ArrayModule, RawArray

Step = Callable[..., None]

_PARAMS = (Param("act_type", p_enum("relu", "sigmoid", "softrelu", "softsign", "tanh"), doc="The function."),)


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[Sequence[DType | None], Sequence[DType | None]]:
    rule = same_dtype if params["act_type"] == "relu" else floats_only(f"Activation of type {params['act_type']}")
    return rule(params, ins, outs)


def sigmoid_block(xp: ArrayModule, x: RawArray, out: RawArray, t: RawArray) -> None:
    """Compute ``out`` = 1 / (1 + exp(-x)); ``t`` is scratch of a float dtype, ``out`` may be ``x``."""
    xp.negative(x, out=t)
    xp.exp(t, out=t)  # infinite for very negative x, whose sigmoid is 0
    xp.add(t, 1.0, out=t)
    xp.divide(1.0, t, out=out, casting="same_kind")


def _softrelu(xp: ArrayModule, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.absolute(x, out=t)
    xp.negative(t, out=t)
    xp.exp(t, out=t)
    xp.log1p(t, out=t)
    xp.maximum(x, 0, out=out)
    xp.add(out, t, out=out, casting="same_kind")


def _softsign(xp: ArrayModule, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.absolute(x, out=t)
    xp.add(t, 1.0, out=t)
    xp.divide(x, t, out=out, casting="same_kind")


def relu_gradient(xp: ArrayModule, g: RawArray, y: RawArray, out: RawArray, mask: RawArray) -> None:
    """Compute the input gradient ``out`` of a relu from its output gradient ``g`` and output ``y``.

    ``mask`` is bool scratch.
    """
    xp.not_equal(y, 0, out=mask)  # y is never negative, and at NaN the incoming gradient must pass
    xp.multiply(g, mask, out=out)


def _sigmoid_gradient(xp: ArrayModule, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.subtract(1, y, out=t)
    xp.multiply(t, y, out=t)
    xp.multiply(g, t, out=out, casting="same_kind")


def _tanh_gradient(xp: ArrayModule, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.subtract(1.0, t, out=t)
    xp.multiply(g, t, out=out, casting="same_kind")


def _softrelu_gradient(xp: ArrayModule, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    # y = log(1 + exp(x)), so the derivative exp(x) / (1 + exp(x)) is 1 - exp(-y).
    xp.negative(y, out=t)
    xp.expm1(t, out=t)
    xp.negative(t, out=t)
    xp.multiply(g, t, out=out, casting="same_kind")


def _softsign_gradient(xp: ArrayModule, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    # 1 - |y| is 1 / (1 + |x|), and the derivative is its square.
    xp.absolute(y, out=t)
    xp.subtract(1.0, t, out=t)
    xp.multiply(t, t, out=t)
    xp.multiply(g, t, out=out, casting="same_kind")


_FORWARD: dict[str, Step] = {"sigmoid": sigmoid_block, "softrelu": _softrelu, "softsign": _softsign}
_GRADIENT: dict[str, Step] = {
    "relu": relu_gradient,
    "sigmoid": _sigmoid_gradient,
    "tanh": _tanh_gradient,
    "softrelu": _softrelu_gradient,
    "softsign": _softsign_gradient,
}


def _forward_step(xp: ArrayModule, params: Params, x: RawArray, out: RawArray, *scratch: RawArray) -> None:
    kind = params["act_type"]
    if kind == "relu":
        relu_into(xp, x, out)
    elif kind == "tanh":
        xp.tanh(x, out=out)
    else:
        _FORWARD[kind](xp, x, out, *scratch)


def _backward_step(xp: ArrayModule, params: Params, *block: RawArray) -> None:
    _GRADIENT[params["act_type"]](xp, *block)


_forward = BlockKernel(
    _forward_step, lambda params, dtype: [scratch_dtype("float", dtype)] if params["act_type"] in _FORWARD else []
)
_backward = BlockKernel(
    _backward_step,
    lambda params, dtype: [BOOL if params["act_type"] == "relu" else scratch_dtype("float", dtype)],
)

register(
    Op(
        name="Activation",
        forward=_forward,
        infer_shape=same_shape,
        infer_dtype=_infer_dtype,
        params=_PARAMS,
        gradient=grad("_backward_Activation", "g0", "y0"),
        inplace=UNARY_INPLACE,
        workspace=_forward.workspace,
        doc="relu, sigmoid, softrelu, softsign or tanh of each element; the output has the shape of data.",
    )
)
backward(
    "Activation",
    _backward,
    ("ograd", "output"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=_backward.workspace,
)
