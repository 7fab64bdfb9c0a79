"""Binary operators, elementwise and broadcasting: arithmetic, extrema, comparisons, logic.

Both forms of an operator share one kernel. The gradients are in ``binary_gradients.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from weftplan.ops.core.forms import Call, workspace_kernel
from weftplan.ops.core.kernels import BOOL, COMPARISONS, UfuncKernel, block_bytes, blocks, divide_integers
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    ADDITIVE_INPLACE,
    backward,
    broadcast_shape,
    grad,
    same_dtype,
    same_gradient,
    same_shape,
    take_bytes,
    zero_gradient,
)
from weftplan.ops.core.schema import Arrays, GradientRule, InplacePair, Kernel, Op, Params, TensorSpec, Workspace
from weftplan.ops.elementwise.binary_gradients import (
    Sides,
    backward_kernel,
    backward_workspace,
    div_l,
    div_r,
    hypot_side,
    masked,
    mod_l,
    mod_r,
    mul_l,
    mul_r,
    power_l,
    power_r,
    sum_backward,
)
from weftplan.support.array_types import RawArray

GRAD_INPLACE = (InplacePair(0, 0), InplacePair(0, 1))
"""For backward operators of sums and differences: either gradient may share the output gradient's memory."""
PRODUCT_INPLACE = (InplacePair(0, 1),)
"""For backward operators that compute the left gradient first: the right one may share the output gradient's memory."""


class _Division(UfuncKernel):
    """The kernel of a division; integer quotients are exact and rounded towards zero, as in C."""

    __slots__ = ()

    def __call__(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        out = outputs[0]
        if out.dtype.kind not in "iu":
            super().__call__(ctx, params, inputs, outputs)
            return
        lhs, rhs = inputs
        if lhs.shape == rhs.shape:
            for a, b, y, scratch in blocks(ctx, (lhs, rhs, out), (out.dtype,)):
                divide_integers(ctx.xp, a, b, y, scratch)
        else:
            divide_integers(ctx.xp, lhs, rhs, out, ctx.take(out.shape, out.dtype))

    def prepare(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return the ufunc with all arguments bound; for integers, a call of the whole kernel."""
        if outputs[0].dtype.kind in "iu":
            return ctx.repeated(partial(self, ctx, params, inputs, outputs))
        return super().prepare(ctx, params, inputs, outputs)


def _division_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    lhs, rhs = inputs
    shape, dtype = outputs[0]
    if dtype.kind not in "iu":
        return 0
    return block_bytes(math.prod(shape), [dtype]) if lhs.shape == rhs.shape else take_bytes((shape, dtype))


@workspace_kernel
def _mod(ctx: Workspace, p: Params, lhs: RawArray, rhs: RawArray, out: RawArray) -> None:
    """Compute the remainder with the divisor's sign; 0 for a divisor of 0."""
    xp = ctx.xp
    if lhs.shape == rhs.shape:
        for a, b, y, zero in blocks(ctx, (lhs, rhs, out), (BOOL,)):
            xp.equal(b, 0, out=zero)
            xp.remainder(a, b, out=y)
            xp.copyto(y, 0, where=zero)
        return
    zero = ctx.take(rhs.shape, BOOL)
    xp.equal(rhs, 0, out=zero)
    xp.remainder(lhs, rhs, out=out)
    xp.copyto(out, 0, where=zero)


def _mod_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    lhs, rhs = inputs
    if lhs.shape == rhs.shape:
        return block_bytes(math.prod(rhs.shape), [BOOL])
    return take_bytes((rhs.shape, BOOL))


# -------------------------------------------------------------------------------------------------------- the operators

_LR = ("lhs", "rhs")


def _binary(
    forward: Kernel,
    sides: Sides | None,
    doc: str,
    *,
    elementwise: tuple[str, ...],
    broadcast: tuple[str, ...],
    elementwise_inplace: tuple[InplacePair, ...] = PRODUCT_INPLACE,
    workspace: Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int] | None = None,
) -> None:
    """Register both forms of an operator; ``elementwise`` and ``broadcast`` are (name, *aliases) of a form."""
    for (name, *aliases), rule in ((elementwise, same_shape), (broadcast, broadcast_shape)):
        target = f"_backward_{name.lstrip('_')}"
        register(
            Op(
                name=name,
                forward=forward,
                infer_shape=rule,
                infer_dtype=same_dtype,
                inputs=_LR,
                gradient=zero_gradient if sides is None else grad(target, "g0", "x0", "x1"),
                inplace=ADDITIVE_INPLACE,
                workspace=workspace,
                aliases=tuple(aliases),
                doc=doc + (" Shapes must be equal." if rule is same_shape else " Shapes broadcast."),
            )
        )
        if sides is not None:
            backward(
                name,
                backward_kernel(sides),
                ("ograd", "lhs", "rhs"),
                grad_inputs=(0, 1),
                inplace=elementwise_inplace if rule is same_shape else PRODUCT_INPLACE,
                workspace=backward_workspace(sides),
            )


def _sum(name: str, aliases: tuple[str, ...], ufunc: str, sign: int, equal: bool, doc: str) -> None:
    gradient: GradientRule = grad(f"_backward_{name}", "g0", params={})
    needs_node = not (equal and sign > 0)  # both gradients of an elementwise sum are the output's gradient itself
    register(
        Op(
            name=name,
            forward=UfuncKernel(ufunc, 2),
            infer_shape=same_shape if equal else broadcast_shape,
            infer_dtype=same_dtype,
            inputs=_LR,
            gradient=gradient if needs_node else same_gradient,
            inplace=ADDITIVE_INPLACE,
            aliases=aliases,
            doc=doc,
        )
    )
    if needs_node:
        backward(name, sum_backward(sign), ("ograd",), grad_inputs=(0, 1), inplace=GRAD_INPLACE)


_sum("elemwise_add", ("_add", "_plus", "_Plus"), "add", 1, True, "lhs + rhs. Shapes must be equal.")
_sum("elemwise_sub", ("_sub", "_minus", "_Minus"), "subtract", -1, True, "lhs - rhs. Shapes must be equal.")
_sum("broadcast_add", ("broadcast_plus",), "add", 1, False, "lhs + rhs. Shapes broadcast.")
_sum("broadcast_sub", ("broadcast_minus",), "subtract", -1, False, "lhs - rhs. Shapes broadcast.")

register(
    Op(
        name="_grad_add",
        forward=UfuncKernel("add", 2),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        inputs=_LR,
        gradient=same_gradient,
        inplace=ADDITIVE_INPLACE,
        doc="Sum of two gradients of one entry; made by the gradient pass only.",
    )
)

_binary(
    UfuncKernel("multiply", 2),
    Sides(mul_l, mul_r, integers="whole"),
    "lhs * rhs.",
    elementwise=("elemwise_mul", "_mul", "_Mul"),
    broadcast=("broadcast_mul",),
    # In each block g * rhs is written before g * lhs: the first may overwrite rhs, the second g or lhs.
    elementwise_inplace=(InplacePair(0, 1), InplacePair(2, 0), InplacePair(1, 1)),
)
_binary(
    _Division("divide", 2),
    Sides(div_l, div_r),
    "lhs / rhs; integers drop the fraction.",
    elementwise=("elemwise_div", "_div", "_Div"),
    broadcast=("broadcast_div",),
    workspace=_division_workspace,
)
_binary(
    _mod,
    Sides(mod_l, mod_r, (None,), "zero"),
    "Remainder of lhs / rhs with the sign of rhs, 0 where rhs is 0.",
    elementwise=("_mod", "_Mod"),
    broadcast=("broadcast_mod",),
    workspace=_mod_workspace,
)
_binary(
    UfuncKernel("power", 2, real=True),  # integers are computed as floats, since exponents may be negative
    Sides(power_l, power_r, (None,)),
    "lhs to the power of rhs.",
    elementwise=("_power", "_Power"),
    broadcast=("broadcast_power",),
)
_binary(
    UfuncKernel("maximum", 2),
    Sides(masked("greater_equal"), masked("less"), (BOOL,), "whole"),
    "The greater of lhs and rhs; where they are equal the gradient goes to lhs.",
    elementwise=("_maximum", "_Maximum"),
    broadcast=("broadcast_maximum",),
)
_binary(
    UfuncKernel("minimum", 2),
    Sides(masked("less_equal"), masked("greater"), (BOOL,), "whole"),
    "The smaller of lhs and rhs; where they are equal the gradient goes to lhs.",
    elementwise=("_minimum", "_Minimum"),
    broadcast=("broadcast_minimum",),
)
_binary(
    UfuncKernel("hypot", 2),
    Sides(hypot_side(False), hypot_side(True), (None,)),
    "sqrt(lhs² + rhs²).",
    elementwise=("_hypot", "_Hypot"),
    broadcast=("broadcast_hypot",),
)
for _short, _ufunc, _what in COMPARISONS:
    _binary(
        UfuncKernel(_ufunc, 2),
        None,
        f"1 where {_what.format('lhs', 'rhs')}, else 0, in the dtype of the inputs.",
        elementwise=(f"_{_short}", f"_{_short.title()}"),
        broadcast=(f"broadcast_{_short}",),
    )
