"""Arithmetic, extrema, comparisons and logic: of two arrays, or of an array and a number.

:func:`arithmetic` declares an operation once, and all its operators follow. A number is converted to the array's dtype
first, so integers stay integers: ``int32 array + 1.5`` adds 1, as in MXNet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftplan.ops.core.declaration import check_kernel, inferred_dtypes
from weftplan.ops.core.expression import BOOL, Expr, FormulaError, Parameters, Scalar, f, quotient, where
from weftplan.ops.core.formula_kernel import FormulaKernel, Integers
from weftplan.ops.core.gradient_kernel import GradientKernel
from weftplan.ops.core.kernels import converted
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import contains, get, is_packaged, register
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
from weftplan.ops.core.schema import InplacePair, Op, Param
from weftplan.ops.elementwise.rows import ONNX, row
from weftplan.ops.elementwise.sum_gradients import sum_backward

SUM_INPLACE = (InplacePair(0, 0), InplacePair(0, 1))
"""For backward operators of sums and differences: either gradient may share the output gradient's memory."""
PRODUCT_INPLACE = (InplacePair(0, 1),)
"""For backward operators that compute the left gradient first: the right one may share the output gradient's memory."""
SCALAR = (
    Param("scalar", p_float, 1.0, "the number"),
    Param("is_int", p_bool, True, "accepted for MXNet's sake; the tensor's dtype alone decides"),
)
Options = Mapping[str, object]
"""Arguments of :func:`row`."""


def number(p: Parameters) -> Scalar:
    """Return parameter ``scalar`` as a number of the arrays' dtype."""
    return Scalar.call(converted, p.scalar, p.array_dtype)


def arithmetic(
    word: str,
    formula: Callable[..., object],
    doc: str,
    *,
    grads: Sequence[Callable[..., object]] = (),
    sign: int = 0,
    integer: Callable[..., object] | None = None,
    integers: Integers = "slope",
    elementwise_inplace: tuple[InplacePair, ...] = PRODUCT_INPLACE,
    number_word: str = "",
    right: Options | None = None,
    left: Options | None = None,
    mirrored: str = "",
    onnx: str = "",
    in_mxnet: bool = True,
) -> None:
    """Register the operators of an operation: of two arrays, and of an array and a number.

    ``arithmetic("sub", …, number_word="minus", left={})`` registers ``elemwise_sub``, ``broadcast_sub``,
    ``_minus_scalar`` and ``_rminus_scalar``, with MXNet's aliases ``_sub``, ``_minus``, ``_Minus``,
    ``broadcast_minus``, ``_MinusScalar`` and ``_RMinusScalar``.

    Args:
        formula: the result, a function of the left and the right operand.
        doc: the documentation, with ``{0}`` and ``{1}`` for the operands and ``{2}`` for all arrays.
        grads: the gradients of both operands before sums, functions of (output gradient, left, right).
        sign: 1 for a sum and -1 for a difference, whose gradients read neither operand; else 0.
        integer: the formula for integers, if it is another.
        integers: how the gradients treat integers.
        number_word: the word in the names of operators with a number, if it is another.
        right, left: arguments of :func:`row` in place of those that follow from the formulas, for the operator with a
            number on the right, and on the left. Without ``left`` there is no operator with a number on the left.
        mirrored: without ``left``, the word of the operation that exchanges the operands, if it is another.
        onnx: ONNX's name of the operation.
        in_mxnet: whether MXNet has the operation.

    Raises:
        FormulaError: a formula is wrong, see :func:`row`, or there is not one gradient for each operand; nothing is
            registered.
        ParameterError: a name is registered already.
    """
    if len(grads) not in (0, 2) or sign not in (-1, 0, 1) or (sign and grads) or (mirrored and left is not None):
        raise FormulaError(
            f"operation {word!r}: {len(grads)} gradients, sign={sign}, mirrored={mirrored!r}, left={left}: expected "
            f"two gradients, a sign of 1 or -1, or neither; and mirrored or left, or neither"
        )
    number_word = number_word or word
    ops: list[Op] = []

    def with_number(k: int, letter: str, operands: Sequence[str], options: Options) -> str:
        """Declare the operator whose operand ``k`` is the array; return its name."""

        def order(x: object, scalar: object) -> tuple[object, object]:
            return (scalar, x) if k else (x, scalar)

        def slope(p: Parameters, g: object, x: object, y: object) -> object:
            return grads[k](g, *order(x, number(p)))

        derived: dict[str, Any] = {
            "formula": lambda p, x: formula(*order(x, number(p))),
            "integer": None if integer is None else lambda p, x: integer(*order(x, number(p))),
            "grad": slope if grads and "gradient" not in options else None,
            "doc": doc.format(*operands, "data"),
        }
        alias = f"_{letter.upper()}{number_word.title().replace('_', '')}Scalar"
        row(f"_{letter}{number_word}_scalar", params=SCALAR, integers=integers, aliases=(alias,),
            in_mxnet=in_mxnet, collect=ops, **{**derived, **options})  # fmt: skip
        return f"_{letter}{number_word}_scalar"

    right_name = with_number(0, "", ("data", "scalar"), right or {})
    if left is None:
        left_name = f"_{mirrored}_scalar" if mirrored else right_name
    else:
        left_name = with_number(1, "r", ("scalar", "data"), left)

    forward = FormulaKernel(
        lambda p, a, b: formula(a, b), 2, integer=None if integer is None else lambda p, a, b: integer(a, b)
    )
    sides = GradientKernel(
        lambda p, *arrays: tuple(side(*arrays) for side in grads), 3, overlaps=(0,), integers=integers
    )
    # MXNet 1.9.1 calls four operators elemwise_*, and the others by the word alone.
    first = f"elemwise_{word}" if word in ("add", "sub", "mul", "div") else f"_{word}"
    elementwise = first, f"_{word}", f"_{number_word}", f"_{number_word.title()}"
    for names, is_equal in ((elementwise, True), ((f"broadcast_{word}", f"broadcast_{number_word}"), False)):
        name, *aliases = dict.fromkeys(names)
        target = f"_backward_{name.lstrip('_')}"
        gradient = grad(target, "g0", "x0", "x1") if grads else zero_gradient
        if sign:  # both gradients of an elementwise sum are the output's gradient itself
            gradient = same_gradient if is_equal and sign > 0 else grad(target, "g0", params={})
        op = Op(
            name=name,
            forward=forward,
            infer_shape=same_shape if is_equal else broadcast_shape,
            infer_dtype=same_dtype,
            inputs=("lhs", "rhs"),
            gradient=gradient,
            inplace=ADDITIVE_INPLACE,
            aliases=tuple(aliases),
            with_number=(right_name, left_name),
            in_mxnet=in_mxnet,
            doc=f"{doc.format('lhs', 'rhs', 'the inputs')} Shapes {'must be equal' if is_equal else 'broadcast'}.",
        )
        ops.append(op)
        if grads:
            inplace = elementwise_inplace if is_equal else PRODUCT_INPLACE
            ops.append(backward(name, sides, ("ograd", "lhs", "rhs"), grad_inputs=(0, 1), inplace=inplace,
                                registers=False))  # fmt: skip
        elif sign and gradient is not same_gradient:
            ops.append(backward(name, sum_backward(sign), ("ograd",), grad_inputs=(0, 1), inplace=SUM_INPLACE,
                                registers=False))  # fmt: skip
    if not is_packaged(first):
        if mirrored and not contains(left_name):
            raise FormulaError(f"operation {word!r}: mirrored={mirrored!r}, but there is no operator {left_name!r}")
        for params, dtypes, output in inferred_dtypes(f"operation {word!r}", op, [{}]):
            check_kernel(f"operation {word!r}", forward, params, dtypes, [output])
            if grads:
                check_kernel(f"operation {word!r}, gradients", sides, params, [output, *dtypes], dtypes)
    register(*ops)
    if onnx:
        ONNX.update((op.name, onnx) for op in ops if not op.backward_of)


_COPY: Options = {"gradient": grad("_copy", "g0", params={})}
arithmetic("add", lambda a, b: a + b, "{0} + {1}.", sign=1, number_word="plus", right=_COPY, onnx="Add")
arithmetic(
    "sub",
    lambda a, b: a - b,
    "{0} - {1}.",
    sign=-1,
    number_word="minus",
    right=_COPY,
    left={"gradient": grad("negative", "g0", params={})},
    onnx="Sub",
)
_GRAD_ADD = "Sum of two gradients of one entry; made by the gradient pass only."
register(replace(get("elemwise_add"), name="_grad_add", aliases=(), with_number=(), doc=_GRAD_ADD))
arithmetic(
    "mul",
    lambda a, b: a * b,
    "{0} * {1}.",
    grads=(lambda g, a, b: g * b, lambda g, a, b: g * a),
    integers="formula",
    # In each block g * rhs is written before g * lhs: the first may overwrite rhs, the second g or lhs.
    elementwise_inplace=(InplacePair(0, 1), InplacePair(2, 0), InplacePair(1, 1)),
    right={"gradient": grad("_mul_scalar", "g0")},
    onnx="Mul",
)
arithmetic(
    "div",
    lambda a, b: a / b,
    "{0} / {1}; integers drop the fraction.",
    grads=(lambda g, a, b: g / b, lambda g, a, b: -(g / b * a / b)),
    integer=quotient,
    right={"gradient": grad("_div_scalar", "g0")},
    left={"grad": lambda p, g, x, y: -number(p) / (x * x) * g},
    onnx="Div",
)
arithmetic(
    "mod",
    lambda a, b: where(f.equal(b, 0), 0, f.remainder(a, b)),
    "Remainder of {0} / {1} with the sign of {1}, 0 where {1} is 0.",
    grads=(lambda g, a, b: g, lambda g, a, b: -f.floor(a / b) * g),
    integer=f.remainder,
    integers="zero",
    right={
        "choices": {"by_zero": lambda p: p["scalar"] == 0},
        "examples": ({}, {"scalar": 0.0}),
        "formula": lambda p, x: 0 if p.by_zero else f.remainder(x, number(p)),
        "doc": "Remainder of data / scalar with the scalar's sign.",
    },
    left={},
)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else (-math.inf if value == 0 else math.nan)


def _power(a: object, b: object) -> object:
    return f.power(a, b, as_float=True)  # exponents of integers may be negative


def _power_slope(g: Any, a: object, b: Any) -> Any:
    return f.power(a, b - 1) * b * g


arithmetic(
    "power",
    _power,
    "{0} to the power of {1}.",
    grads=(_power_slope, lambda g, a, b: f.power(a, b) * g * f.log(a)),
    right={  # the most common exponent is 2, for which a product is twenty times cheaper than a power
        "choices": {"squares": lambda p: p["scalar"] == 2.0},
        "examples": ({}, {"scalar": 2.0}),
        "formula": lambda p, x: x * x if p.squares else _power(x, number(p)),
        # True, the exponent of bools, is 1.
        "grad": lambda p, g, x, y: (
            x * number(p) * g if p.squares and p.array_dtype != BOOL else _power_slope(g, x, number(p))
        ),
    },
    left={"grad": lambda p, g, x, y: g * y * Scalar.call(_log, number(p))},
    onnx="Pow",
)
arithmetic(
    "maximum",
    f.maximum,
    "The greater of {0} and {1}; where they are equal the gradient goes to {0}.",
    grads=(lambda g, a, b: g * f.greater_equal(a, b), lambda g, a, b: g * f.less(a, b)),
    integers="formula",
    right={"doc": "The greater of data and scalar."},
    onnx="Max",
)
arithmetic(
    "minimum",
    f.minimum,
    "The smaller of {0} and {1}; where they are equal the gradient goes to {0}.",
    grads=(lambda g, a, b: g * f.less_equal(a, b), lambda g, a, b: g * f.greater(a, b)),
    integers="formula",
    right={"doc": "The smaller of data and scalar."},
    onnx="Min",
)
arithmetic(
    "hypot",
    f.hypot,
    "sqrt({0}² + {1}²).",
    grads=(lambda g, a, b: a / f.hypot(a, b) * g, lambda g, a, b: b / f.hypot(a, b) * g),
)

COMPARISONS = (
    ("equal", "equal", "equal", "{0} == {1}", "Equal"),
    ("not_equal", "not_equal", "not_equal", "{0} != {1}", ""),
    ("greater", "lesser", "greater", "{0} > {1}", "Greater"),
    ("greater_equal", "lesser_equal", "greater_equal", "{0} >= {1}", "GreaterOrEqual"),
    ("lesser", "greater", "less", "{0} < {1}", "Less"),
    ("lesser_equal", "greater_equal", "less_equal", "{0} <= {1}", "LessOrEqual"),
    ("logical_and", "logical_and", "logical_and", "{0} and {1} are both not 0", ""),
    ("logical_or", "logical_or", "logical_or", "{0} or {1} is not 0", ""),
    ("logical_xor", "logical_xor", "logical_xor", "exactly one of {0} and {1} is not 0", ""),
)
"""Operations whose results are 0 or 1: word, word of the exchanged operands, NumPy's function, the condition for 1, and
ONNX's name."""
for _word, _mirrored, _ufunc, _condition, _onnx in COMPARISONS:
    _doc = f"1 where {_condition}, else 0, in the dtype of {{2}}."
    arithmetic(_word, getattr(f, _ufunc), _doc, mirrored=_mirrored, onnx=_onnx)


def _smooth_l1(p: Parameters, x: Expr) -> Expr:
    size, square = abs(x), Scalar.call(converted, number(p) * number(p), p.array_dtype)
    near = size * square
    is_near = f.less(near, 1.0)
    near = near * size * 0.5
    far = size - 0.5 / Scalar.call(float, square)  # infinite, without a warning, if an integer dtype makes it 0
    return where(f.logical_not(is_near), far, near)


row(
    "smooth_l1",
    _smooth_l1,
    lambda p, g, x, y: (x * (number(p) * number(p))).clip(-1.0, 1.0) * g,
    params=SCALAR[:1],
    doc="0.5 (scalar·x)² where |x| < 1/scalar², else |x| - 0.5/scalar².",
)
