"""Binary operators, elementwise and broadcasting: arithmetic, extrema, comparisons, logic.

Both forms of an operator share one kernel. The gradients are in ``binary_gradients.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.ops.core.expression import Expr, f, quotient, where
from weftplan.ops.core.formula_kernel import FormulaKernel, Integers, ufunc_kernel
from weftplan.ops.core.gradient_kernel import GradientKernel
from weftplan.ops.core.kernels import COMPARISONS
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    ADDITIVE_INPLACE,
    backward,
    broadcast_shape,
    grad,
    same_dtype,
    same_gradient,
    same_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import InplacePair, Op
from weftplan.ops.elementwise.binary_gradients import sum_backward
from weftplan.ops.elementwise.rows import ONNX_BINARY

GRAD_INPLACE = (InplacePair(0, 0), InplacePair(0, 1))
"""For backward operators of sums and differences: either gradient may share the output gradient's memory."""
PRODUCT_INPLACE = (InplacePair(0, 1),)
"""For backward operators that compute the left gradient first: the right one may share the output gradient's memory."""


# -------------------------------------------------------------------------------------------------------- the operators

_LR = ("lhs", "rhs")


def _binary(
    formula: Callable[[Expr, Expr], object],
    doc: str,
    *,
    elementwise: tuple[str, ...],
    broadcast: tuple[str, ...],
    grads: Sequence[Callable[[Expr, Expr, Expr], object]] = (),
    sign: int = 0,
    integer: Callable[[Expr, Expr], object] | None = None,
    integers: Integers = "slope",
    elementwise_inplace: tuple[InplacePair, ...] = PRODUCT_INPLACE,
    onnx: str = "",
) -> None:
    """Register both forms of an operator; ``elementwise`` and ``broadcast`` are (name, *aliases) of a form.

    Args:
        formula: the result, a function of both arrays.
        grads: the gradients of both arrays before sums, functions of (output gradient, lhs, rhs).
        sign: 1 for a sum and -1 for a difference, whose gradients read neither array; else 0.
        integer: the formula for integers, if it is another.
        integers: how the gradients treat integers.
        onnx: ONNX's name of the operator.
    """
    forward = FormulaKernel(
        lambda p, a, b: formula(a, b), 2, integer=None if integer is None else lambda p, a, b: integer(a, b)
    )
    for (name, *aliases), is_equal in ((elementwise, True), (broadcast, False)):
        target = f"_backward_{name.lstrip('_')}"
        gradient = grad(target, "g0", "x0", "x1") if grads else zero_gradient
        if sign:  # both gradients of an elementwise sum are the output's gradient itself
            gradient = same_gradient if is_equal and sign > 0 else grad(target, "g0", params={})
        if onnx:
            ONNX_BINARY[name] = onnx
        register(
            Op(
                name=name,
                forward=forward,
                infer_shape=same_shape if is_equal else broadcast_shape,
                infer_dtype=same_dtype,
                inputs=_LR,
                gradient=gradient,
                inplace=ADDITIVE_INPLACE,
                aliases=tuple(aliases),
                doc=doc + (" Shapes must be equal." if is_equal else " Shapes broadcast."),
            )
        )
        if sign and gradient is not same_gradient:
            backward(name, sum_backward(sign), ("ograd",), grad_inputs=(0, 1), inplace=GRAD_INPLACE)
        elif grads:
            inplace = elementwise_inplace if is_equal else PRODUCT_INPLACE
            kernel = GradientKernel(
                lambda p, *arrays: tuple(side(*arrays) for side in grads), 3, overlaps=(0,), integers=integers
            )
            backward(name, kernel, ("ograd", "lhs", "rhs"), grad_inputs=(0, 1), inplace=inplace)


_binary(lambda a, b: a + b, "lhs + rhs.", elementwise=("elemwise_add", "_add", "_plus", "_Plus"),
        broadcast=("broadcast_add", "broadcast_plus"), sign=1, onnx="Add")  # fmt: skip
_binary(lambda a, b: a - b, "lhs - rhs.", elementwise=("elemwise_sub", "_sub", "_minus", "_Minus"),
        broadcast=("broadcast_sub", "broadcast_minus"), sign=-1, onnx="Sub")  # fmt: skip
register(
    Op(
        name="_grad_add",
        forward=ufunc_kernel("add", 2),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        inputs=_LR,
        gradient=same_gradient,
        inplace=ADDITIVE_INPLACE,
        doc="Sum of two gradients of one entry; made by the gradient pass only.",
    )
)

_binary(
    lambda a, b: a * b,
    "lhs * rhs.",
    grads=(lambda g, a, b: g * b, lambda g, a, b: g * a),
    integers="formula",
    elementwise=("elemwise_mul", "_mul", "_Mul"),
    broadcast=("broadcast_mul",),
    onnx="Mul",
    # In each block g * rhs is written before g * lhs: the first may overwrite rhs, the second g or lhs.
    elementwise_inplace=(InplacePair(0, 1), InplacePair(2, 0), InplacePair(1, 1)),
)
_binary(
    lambda a, b: a / b,
    "lhs / rhs; integers drop the fraction.",
    grads=(lambda g, a, b: g / b, lambda g, a, b: -(g / b * a / b)),
    integer=quotient,
    elementwise=("elemwise_div", "_div", "_Div"),
    broadcast=("broadcast_div",),
    onnx="Div",
)
_binary(
    lambda a, b: where(f.equal(b, 0), 0, f.remainder(a, b)),
    "Remainder of lhs / rhs with the sign of rhs, 0 where rhs is 0.",
    grads=(lambda g, a, b: g, lambda g, a, b: -f.floor(a / b) * g),
    integer=f.remainder,
    integers="zero",
    elementwise=("_mod", "_Mod"),
    broadcast=("broadcast_mod",),
)
_binary(
    lambda a, b: f.power(a, b, as_float=True),  # exponents of integers may be negative
    "lhs to the power of rhs.",
    grads=(lambda g, a, b: f.power(a, b - 1) * b * g, lambda g, a, b: f.power(a, b) * g * f.log(a)),
    elementwise=("_power", "_Power"),
    broadcast=("broadcast_power",),
    onnx="Pow",
)
_binary(
    f.maximum,
    "The greater of lhs and rhs; where they are equal the gradient goes to lhs.",
    grads=(lambda g, a, b: g * f.greater_equal(a, b), lambda g, a, b: g * f.less(a, b)),
    integers="formula",
    elementwise=("_maximum", "_Maximum"),
    broadcast=("broadcast_maximum",),
    onnx="Max",
)
_binary(
    f.minimum,
    "The smaller of lhs and rhs; where they are equal the gradient goes to lhs.",
    grads=(lambda g, a, b: g * f.less_equal(a, b), lambda g, a, b: g * f.greater(a, b)),
    integers="formula",
    elementwise=("_minimum", "_Minimum"),
    broadcast=("broadcast_minimum",),
    onnx="Min",
)
_binary(
    f.hypot,
    "sqrt(lhs² + rhs²).",
    grads=(lambda g, a, b: a / f.hypot(a, b) * g, lambda g, a, b: b / f.hypot(a, b) * g),
    elementwise=("_hypot", "_Hypot"),
    broadcast=("broadcast_hypot",),
)
for _short, _ufunc, _what in COMPARISONS:
    _binary(
        getattr(f, _ufunc),
        f"1 where {_what.format('lhs', 'rhs')}, else 0, in the dtype of the inputs.",
        elementwise=(f"_{_short}", f"_{_short.title()}"),
        broadcast=(f"broadcast_{_short}",),
    )
