"""Operators of two inputs, elementwise (equal shapes) and broadcasting: arithmetic, extrema, comparisons, logic.

The gradients of both forms share one pair of formulas per operator. The broadcasting form computes a block of rows of
the full gradient in scratch and sums it into the smaller input's gradient, so scratch stays far below the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weftplan.ops.kernels import (
    BOOL,
    Kind,
    block_bytes,
    blocks,
    collapse,
    reduce_to,
    rows_per_block,
    scratch_dtype,
)
from weftplan.ops.registry import register
from weftplan.ops.rules import (
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
from weftplan.ops.schema import (
    GradientRule,
    InplacePair,
    Kernel,
    Op,
    OpContext,
    Params,
    TensorSpec,
)

Side = Callable[..., None]
"""``side(xp, ograd, lhs, rhs, out, *scratch)``: the gradient of one input before summing; ``out`` may be ``ograd``."""

GRAD_INPLACE = (InplacePair(0, 0), InplacePair(0, 1))
"""Backward operators of sums and differences: either gradient may take the incoming one."""
PRODUCT_INPLACE = (InplacePair(0, 1),)
"""Backward operators whose left gradient is computed first: the right one may take the incoming gradient."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """The two gradient formulas of an operator and the scratch that each needs."""

    lhs: Side
    rhs: Side
    scratch: tuple[Kind, ...] = ()


def _ufunc(name: str) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        out = outputs[0]
        if out is not None:
            getattr(ctx.xp, name)(inputs[0], inputs[1], out=out, casting="unsafe")

    return kernel


def _integer_safe(name: str) -> Kernel:
    """``divide`` and ``power`` of integers run in float64 and drop the fraction, as C does for a quotient."""

    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        out = outputs[0]
        if out is None:
            return
        if out.dtype.kind == "f":
            getattr(ctx.xp, name)(inputs[0], inputs[1], out=out)
        else:
            getattr(ctx.xp, name)(inputs[0], inputs[1], out=out, dtype=float, casting="unsafe")

    return kernel


def _mod(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Remainder with the divisor's sign; 0 where the divisor is 0."""
    out = outputs[0]
    if out is None:
        return
    xp = ctx.xp
    lhs, rhs = inputs
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


# ----------------------------------------------------------------------------------------------- gradients: the kernels


def _kinds(sides: _Sides, dtype: Any) -> list[Any]:
    return [scratch_dtype(kind, dtype) for kind in sides.scratch]


def _equal_shapes(sides: _Sides, ctx: OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    g, a, b = inputs
    da, db = outputs
    spare = g if da is None else da, g if db is None else db
    for bg, ba, bb, bda, bdb, *scratch in blocks(ctx, (g, a, b, *spare), _kinds(sides, g.dtype)):
        if da is not None:
            sides.lhs(ctx.xp, bg, ba, bb, bda, *scratch)
        if db is not None:
            sides.rhs(ctx.xp, bg, ba, bb, bdb, *scratch)


def _unequal_shapes(sides: _Sides, ctx: OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    xp = ctx.xp
    shape, *input_shapes = collapse(inputs[0].shape, inputs[1].shape, inputs[2].shape)
    g = inputs[0].reshape(shape)
    operands = [inputs[k + 1].reshape(input_shapes[k]) for k in (0, 1)]
    rows = rows_per_block(shape)
    block = (rows, *shape[1:])
    full = ctx.take(block, g.dtype)
    scratch = [ctx.take(block, dtype) for dtype in _kinds(sides, g.dtype)]
    part_size = _part_size(shape, input_shapes, rows)
    part = ctx.take((part_size,), g.dtype)
    for k, side in ((0, sides.lhs), (1, sides.rhs)):
        if outputs[k] is None:
            continue
        target = outputs[k].reshape(input_shapes[k])
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            bg = g[start:stop]
            ba, bb = (x if x.shape[0] == 1 else x[start:stop] for x in operands)
            temporary = [space[: stop - start] for space in scratch]
            if target.shape == shape:
                side(xp, bg, ba, bb, target[start:stop], *temporary)
                continue
            product = full[: stop - start]
            side(xp, bg, ba, bb, product, *temporary)
            if target.shape[0] != 1:
                reduce_to(xp, product, target[start:stop])
            elif start == 0:
                reduce_to(xp, product, target)
            else:
                term = part[: target.size].reshape(target.shape)
                reduce_to(xp, product, term)
                xp.add(target, term, out=target)


def _part_size(shape: Sequence[int], input_shapes: Sequence[Sequence[int]], rows: int) -> int:
    """Elements of the buffer for a block's sum: needed when several blocks add to one gradient."""
    if rows >= shape[0]:
        return 0
    return max((math.prod(s) for s in input_shapes if s[0] == 1), default=0)


def _backward_kernel(sides: _Sides) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        run = _equal_shapes if inputs[1].shape == inputs[2].shape else _unequal_shapes
        run(sides, ctx, inputs, outputs)

    return kernel


def _backward_workspace(sides: _Sides) -> Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int]:
    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        g, a, b = inputs
        kinds = _kinds(sides, g.dtype)
        if a.shape == b.shape:
            return block_bytes(math.prod(g.shape), kinds)
        shape, *input_shapes = collapse(g.shape, a.shape, b.shape)
        rows = rows_per_block(shape)
        block = (rows, *shape[1:])
        part = (_part_size(shape, input_shapes, rows),)
        return take_bytes((block, g.dtype), (part, g.dtype), *((block, kind) for kind in kinds))

    return workspace


def _sum_backward(sign: int) -> Kernel:
    """Gradients of lhs + rhs and lhs - rhs: the incoming one, summed to each shape, the right one times ``sign``."""

    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        xp = ctx.xp
        g = inputs[0]
        left, right = outputs
        # The left one first: where it shares memory with g it leaves g as it is, while the right one may change it.
        if left is not None:
            reduce_to(xp, g, left)
        if right is not None:
            if sign < 0 and right.shape == g.shape:
                xp.negative(g, out=right)
            else:
                reduce_to(xp, g, right)
                if sign < 0:
                    xp.negative(right, out=right)

    return kernel


# -------------------------------------------------------------------------------- gradients: (xp, ograd, a, b, out, t…)


def _mul_l(xp: Any, g: Any, a: Any, b: Any, out: Any) -> None:
    xp.multiply(g, b, out=out)


def _mul_r(xp: Any, g: Any, a: Any, b: Any, out: Any) -> None:
    xp.multiply(g, a, out=out)


def _div_l(xp: Any, g: Any, a: Any, b: Any, out: Any) -> None:
    xp.divide(g, b, out=out)


def _div_r(xp: Any, g: Any, a: Any, b: Any, out: Any) -> None:
    xp.divide(g, b, out=out)
    xp.multiply(out, a, out=out)
    xp.divide(out, b, out=out)
    xp.negative(out, out=out)


def _power_l(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
    xp.subtract(b, 1, out=t)
    xp.power(a, t, out=t)
    xp.multiply(t, b, out=t)
    xp.multiply(t, g, out=out)


def _power_r(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
    xp.power(a, b, out=t)
    xp.multiply(t, g, out=out)
    xp.log(a, out=t)
    xp.multiply(out, t, out=out)


def _mod_l(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
    xp.copyto(out, g)


def _mod_r(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
    xp.divide(a, b, out=t)
    xp.floor(t, out=t)
    xp.negative(t, out=t)
    xp.multiply(t, g, out=out)


def _masked(compare: str) -> Side:
    """``g`` where ``compare(a, b)``, else 0."""

    def side(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
        getattr(xp, compare)(a, b, out=t)
        xp.multiply(g, t, out=out)

    return side


def _hypot_side(right: bool) -> Side:
    def side(xp: Any, g: Any, a: Any, b: Any, out: Any, t: Any) -> None:
        xp.hypot(a, b, out=t)
        xp.divide(b if right else a, t, out=t)
        xp.multiply(t, g, out=out)

    return side


# -------------------------------------------------------------------------------------------------------- the operators

_LR = ("lhs", "rhs")


def _binary(
    forward: Kernel,
    sides: _Sides | None,
    doc: str,
    *,
    elementwise: tuple[str, ...],
    broadcast: tuple[str, ...],
    elementwise_inplace: tuple[InplacePair, ...] = PRODUCT_INPLACE,
    workspace: Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int] | None = None,
) -> None:
    """Register the elementwise and the broadcasting form; ``elementwise[0]`` and ``broadcast[0]`` are their names."""
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
                _backward_kernel(sides),
                ("ograd", "lhs", "rhs"),
                grad_inputs=(0, 1),
                inplace=elementwise_inplace if rule is same_shape else PRODUCT_INPLACE,
                workspace=_backward_workspace(sides),
            )


def _sum(name: str, aliases: tuple[str, ...], ufunc: str, sign: int, equal: bool, doc: str) -> None:
    gradient: GradientRule = grad(f"_backward_{name}", "g0", params={})
    made = not (equal and sign > 0)  # of an elementwise sum both gradients are the incoming one: no node
    register(
        Op(
            name=name,
            forward=_ufunc(ufunc),
            infer_shape=same_shape if equal else broadcast_shape,
            infer_dtype=same_dtype,
            inputs=_LR,
            gradient=gradient if made else same_gradient,
            inplace=ADDITIVE_INPLACE,
            aliases=aliases,
            doc=doc,
        )
    )
    if made:
        backward(name, _sum_backward(sign), ("ograd",), grad_inputs=(0, 1), inplace=GRAD_INPLACE)


_sum("elemwise_add", ("_add", "_plus", "_Plus"), "add", 1, True, "lhs + rhs. Shapes must be equal.")
_sum("elemwise_sub", ("_sub", "_minus", "_Minus"), "subtract", -1, True, "lhs - rhs. Shapes must be equal.")
_sum("broadcast_add", ("broadcast_plus",), "add", 1, False, "lhs + rhs. Shapes broadcast.")
_sum("broadcast_sub", ("broadcast_minus",), "subtract", -1, False, "lhs - rhs. Shapes broadcast.")

register(
    Op(
        name="_grad_add",
        forward=_ufunc("add"),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        inputs=_LR,
        gradient=same_gradient,
        inplace=ADDITIVE_INPLACE,
        doc="Sum of two gradients of one entry; made by the gradient pass only.",
    )
)

_binary(
    _ufunc("multiply"),
    _Sides(_mul_l, _mul_r),
    "lhs * rhs.",
    elementwise=("elemwise_mul", "_mul", "_Mul"),
    broadcast=("broadcast_mul",),
    # In each block g * rhs is written before g * lhs is, so each may take the memory that it alone reads last.
    elementwise_inplace=(InplacePair(0, 1), InplacePair(2, 0), InplacePair(1, 1)),
)
_binary(
    _integer_safe("divide"),
    _Sides(_div_l, _div_r),
    "lhs / rhs.",
    elementwise=("elemwise_div", "_div", "_Div"),
    broadcast=("broadcast_div",),
)
_binary(
    _mod,
    _Sides(_mod_l, _mod_r, (None,)),
    "Remainder of lhs / rhs with the sign of rhs, 0 where rhs is 0.",
    elementwise=("_mod", "_Mod"),
    broadcast=("broadcast_mod",),
    workspace=_mod_workspace,
)
_binary(
    _integer_safe("power"),
    _Sides(_power_l, _power_r, (None,)),
    "lhs to the power of rhs.",
    elementwise=("_power", "_Power"),
    broadcast=("broadcast_power",),
)
_binary(
    _ufunc("maximum"),
    _Sides(_masked("greater_equal"), _masked("less"), (BOOL,)),
    "The greater of lhs and rhs; where they are equal the gradient goes to lhs.",
    elementwise=("_maximum", "_Maximum"),
    broadcast=("broadcast_maximum",),
)
_binary(
    _ufunc("minimum"),
    _Sides(_masked("less_equal"), _masked("greater"), (BOOL,)),
    "The smaller of lhs and rhs; where they are equal the gradient goes to lhs.",
    elementwise=("_minimum", "_Minimum"),
    broadcast=("broadcast_minimum",),
)
_binary(
    _ufunc("hypot"),
    _Sides(_hypot_side(False), _hypot_side(True), (None,)),
    "sqrt(lhs² + rhs²).",
    elementwise=("_hypot", "_Hypot"),
    broadcast=("broadcast_hypot",),
)
for _short, _ufunc_name, _old, _what in (
    ("equal", "equal", "_Equal", "lhs == rhs"),
    ("not_equal", "not_equal", "_Not_Equal", "lhs != rhs"),
    ("greater", "greater", "_Greater", "lhs > rhs"),
    ("greater_equal", "greater_equal", "_Greater_Equal", "lhs >= rhs"),
    ("lesser", "less", "_Lesser", "lhs < rhs"),
    ("lesser_equal", "less_equal", "_Lesser_Equal", "lhs <= rhs"),
    ("logical_and", "logical_and", "_Logical_And", "lhs and rhs are both not 0"),
    ("logical_or", "logical_or", "_Logical_Or", "lhs or rhs is not 0"),
    ("logical_xor", "logical_xor", "_Logical_Xor", "exactly one of lhs and rhs is not 0"),
):
    _binary(
        _ufunc(_ufunc_name),
        None,
        f"1 where {_what}, else 0, in the dtype of the inputs.",
        elementwise=(f"_{_short}", _old),
        broadcast=(f"broadcast_{_short}",),
    )
